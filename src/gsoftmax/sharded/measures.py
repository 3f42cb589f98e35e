"""Error, gradient norm and class geometry of a class-sharded head, without gathering its outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import checks, geometry
from .head import ClassShard, _joined, _own
from .wire import _agree, _all_reduce, _gather_rows, _rounds


@torch.no_grad()
def top1_error(head: Any, batches: Iterable[tuple[Tensor, Tensor]], *, ignore_index: int = -100) -> float:
    """Share of the examples of all processes whose class is not the one with the largest z.

    batches: (h, target) of the own rows; processes may have more or fewer of them.  The same on every process.

    >>> from gsoftmax import SoftmaxHead
    >>> head = SoftmaxHead(2, 3)  # a whole head will do
    >>> h = torch.randn(4, 2)
    >>> top1_error(head, [(h, head.predict(h))])
    0.0
    """
    group, weight = (None, head.weight) if head.shard is None else (head.shard.group, head.weight.to_local())
    device = weight.device
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    empty = weight.new_empty(0, head.in_features), torch.empty(0, dtype=torch.int64, device=device)
    for batch in _rounds(batches, group, device):
        h, target = empty if batch is None else batch
        keep = target != ignore_index
        counts += torch.stack([(keep & (head.predict(h) != target)).sum(), keep.sum()])
    wrong, seen = _all_reduce(counts, group, "counts").tolist()
    return wrong / seen if seen else math.nan


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` where some parameters are sharded and the others the same on every process.

    Gradients are scaled by min(1, max_norm / norm), the norm being that of all of them, every class counted once.
    Call it on every process.  Returns the norm.

    >>> w = torch.nn.Parameter(torch.zeros(2))
    >>> w.grad = torch.tensor([3.0, 4.0])
    >>> clip_grad_norm_([w], 1.0), w.grad
    (tensor(5.), tensor([0.6000, 0.8000]))
    """
    if not 0 <= max_norm < math.inf:
        raise ValueError(f"max_norm must be 0 or more and finite, got {max_norm!r}")
    grads = [p.grad for p in parameters if p.grad is not None]
    squares: dict[Any, Tensor] = {}
    locals_ = []
    grad: Any
    for grad in grads:
        mesh = getattr(grad, "device_mesh", None)
        whole = mesh is None or all(p.is_replicate() for p in grad.placements)
        local = grad if mesh is None else grad.to_local()
        locals_.append(local)
        part = local.to(checks.compute_dtype(local)).square().sum().double()
        key = None if whole else mesh
        squares[key] = squares[key] + part if key in squares else part
    for mesh, part in squares.items():
        if mesh is not None:
            for dim in range(mesh.ndim):
                _all_reduce(part, mesh.get_group(dim), "norm")
    norm = torch.stack(list(squares.values())).sum().sqrt() if squares else torch.zeros(())
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for local in locals_:
        local.mul_(factor.to(local.dtype))
    return norm.to(torch.float32)


def compactness(sigma: Tensor) -> Tensor:
    """`geometry.compactness` of the DTensor of a sharded head: (classes,), float64, sharded alike."""
    return _like(1 / _gaussian(sigma, "sigma"), sigma)


@torch.no_grad()
def separability(mu: Tensor, sigma: Tensor) -> Tensor:
    """`geometry.separability` of the DTensors of a sharded head: (classes,), float64, sharded alike.

    Every process hands in eight sums; nothing else travels.
    """
    group, m = sigma.device_mesh.get_group(), sigma.shape[0]  # type: ignore[attr-defined]
    total = partial(_all_reduce, group=group, purpose="geometry")
    return _like(geometry.mean_divergence(_gaussian(mu, "mu"), _gaussian(sigma, "sigma"), m, total), sigma)


def ratio(mu: Tensor, sigma: Tensor) -> Tensor:
    """`geometry.ratio` of the DTensors of a sharded head: (classes,), float64, sharded alike."""
    return _like(separability(mu, sigma).to_local() / _gaussian(sigma, "sigma"), sigma)  # type: ignore[attr-defined]


def _gaussian(value: Tensor, name: str) -> Tensor:
    return _own(value, name).detach().double()


def _like(local: Tensor, parameter: Any) -> Tensor:
    return _joined(local, parameter.device_mesh, parameter.placements[0], parameter.shape)


class ClassStatistics(geometry.ClassStatistics):
    """`geometry.ClassStatistics` of a head with sharded classes: every process has the outputs of its own classes.

    Feed it what `head.features(h)` gives, on every process, and the labels of the own rows:

        statistics = sharded.ClassStatistics(head)
        statistics.update(head.features(h), target)
        statistics.geometry()  # or compactness(), separability(), ratio(), relative_sigma(), dprime(), left_out()

    Every process must make these calls; the results, (classes,), are then the same on all.  The full table takes
    classes^2 / processes numbers twice on each; above `geometry.FULL_TABLE_LIMIT` classes impostors are pooled.
    `count` is that of all processes (pooled: of the own columns), `mean` and `std` are those of the own columns.
    """

    def __init__(self, head: Any, *, pooled: bool | None = None, ignore_index: int = -100) -> None:
        super().__init__(head.num_classes, pooled=pooled, ignore_index=ignore_index, device=head.weight.device)
        self.shard: ClassShard = head.shard
        self.first_output, self.outputs = self.shard.start, self.shard.stop - self.shard.start
        if not self.pooled:
            self.columns = self.outputs

    @torch.no_grad()
    def update(self, x: Any, y: Any) -> ClassStatistics:
        """x: what `head.features` gives, (rows of all processes, classes); y: the class indices of the own rows."""
        shard = self.shard
        error: Exception | None = None
        device = self.allocated(torch.device("cpu")).device
        y = torch.as_tensor(y).detach().reshape(-1)
        if not hasattr(x, "to_local"):
            error = TypeError(f"x must be the DTensor that head.features gives, got {type(x).__name__}")
        elif y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            error = TypeError(f"y must hold integer class indices, got {y.dtype}")
        counts, _ = _agree(shard.group, device, error, len(y))
        y = _gather_rows(y.long().to(device), counts, shard.group, "targets")
        local = x.to_local()
        try:
            self.check_batch(local, y)
        except (TypeError, ValueError) as found:
            error = found
        _agree(shard.group, device, error)
        super().update(local, y)
        return self

    def sync(self, group: Any = None) -> ClassStatistics:
        """Nothing: every process sees all rows already."""
        return self

    def _whole(self) -> geometry.ClassStatistics:
        """The pooled statistics of all columns."""
        whole = geometry.ClassStatistics(self.num_classes, pooled=True, ignore_index=self.ignore_index)
        n, mean, m2 = (part.clone() for part in self._state())
        group = self.shard.group
        total = _all_reduce(n.clone(), group, "geometry")
        # About any one centre that all processes share means and squares add up; the first guess may be far off.
        centre = _all_reduce(n * mean, group, "geometry") / total.clamp(min=1)
        first = _all_reduce(n * (mean - centre), group, "geometry") / total.clamp(min=1)
        centre = centre + first
        squares = _all_reduce(m2 + n * (mean - centre) ** 2, group, "geometry")
        table = torch.cat([total, centre, squares], 1)
        whole.table = torch.cat([table, table.new_zeros(1, table.shape[1])])
        return whole

    def read(self) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        return self._whole().read() if self.pooled else super().read()

    def _scan(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Every class against the own columns, then added up: a few numbers a class travel."""
        n, mean, m2 = self._state()
        m, shard, group = self.num_classes, self.shard, self.shard.group
        # The Gaussian of each class itself, from its owner.
        own, mine = mean.new_zeros(2, m), slice(shard.start, shard.stop)
        own[0, mine], own[1, mine] = mean[mine].diagonal(), (m2[mine] / n[mine]).sqrt().diagonal()
        own = _all_reduce(own, group, "geometry")
        rows = max(1, geometry.BLOCK // max(1, self.columns))
        sums, least, most = mean.new_zeros(2, m), mean.new_full((2, m), torch.inf), mean.new_zeros(m)
        for start in range(0, m, rows) if self.columns else ():
            at = slice(start, min(start + rows, m))
            mu, sigma = mean[at], (m2[at] / n[at]).sqrt()
            mine_in = partial(torch.diagonal, offset=start - shard.start)
            found = geometry.compare_rows(own[0, at], own[1, at], mu, sigma, n[at], mine_in)
            sums[0, at], sums[1, at], least[0, at], constant, most[at] = found
            least[1, at] = torch.where(constant >= 0, shard.start + constant, torch.inf)
        # nan is no number to compare with others: classes without examples have no distance
        least[0] = torch.where(least[0].isnan(), torch.inf, least[0])
        sums = _all_reduce(sums, group, "geometry") / max(1, m - 1)
        least = _all_reduce(least, group, "geometry", dist.ReduceOp.MIN)
        broken = _all_reduce(most, group, "geometry", dist.ReduceOp.MAX) > 0
        constant = torch.where(least[1].isinf(), -1, least[1].nan_to_num(posinf=0.0).long())
        return own[1], (sums[0], sums[1], least[0], constant, broken)
