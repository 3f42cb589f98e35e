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
from .collectives import agree, all_reduce, gather_rows, rounds
from .head import ShardedSoftmaxHead
from .shard import join, local


@torch.no_grad()
def top1_error(head: Any, batches: Iterable[tuple[Tensor, Tensor]], *, ignore_index: int = -100) -> float:
    """Top-1 error over the examples of all processes, the same number on every process.

    head: sharded or not
    batches: (h, target) of the local rows; processes may have different numbers of batches
    ignore_index: the target of rows to leave out

    >>> from gsoftmax import SoftmaxHead
    >>> head = SoftmaxHead(2, 3)
    >>> h = torch.randn(4, 2)
    >>> top1_error(head, [(h, head.predict(h))])
    0.0
    """
    group = head.shard.group if isinstance(head, ShardedSoftmaxHead) else None
    device = head.weight.device
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    empty = torch.empty(0, head.in_features, dtype=head.weight.dtype, device=device), counts[:0]
    for batch in rounds(batches, group, device):
        h, target = empty if batch is None else batch
        keep = target != ignore_index
        counts += torch.stack([(keep & (head.predict(h) != target)).sum(), keep.sum()])
    wrong, seen = all_reduce(counts, group, "counts").tolist()
    return wrong / seen if seen else math.nan


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` where some parameters are sharded and the others the same on every process.

    A collective call; returns the norm of all gradients and scales them by min(1, max_norm / norm).

    parameters, max_norm: those of backbone and head, and 0 or more

    >>> w = torch.nn.Parameter(torch.zeros(2))
    >>> w.grad = torch.tensor([3.0, 4.0])
    >>> clip_grad_norm_([w], 1.0), w.grad
    (tensor(5.), tensor([0.6000, 0.8000]))
    """
    if not 0 <= max_norm < math.inf:
        raise ValueError(f"max_norm must be 0 or more and finite, got {max_norm!r}")
    squares: dict[Any, Tensor] = {}  # by mesh; None for tensors that are the same everywhere
    parts = []
    grad: Any
    for grad in (p.grad for p in parameters if p.grad is not None):
        mesh = getattr(grad, "device_mesh", None)
        part = grad if mesh is None else grad.to_local()
        if mesh is not None and all(p.is_replicate() for p in grad.placements):
            mesh = None
        parts.append(part)
        square = part.to(checks.compute_dtype(part)).square().sum().double()
        squares[mesh] = squares[mesh] + square if mesh in squares else square
    for mesh, square in squares.items():
        for dim in range(0 if mesh is None else mesh.ndim):
            all_reduce(square, mesh.get_group(dim), "norm")
    norm = torch.stack(list(squares.values())).sum().sqrt() if squares else torch.zeros(())
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for part in parts:
        part.mul_(factor.to(part.dtype))
    return norm.to(torch.float32)


def compactness(sigma: Tensor) -> Tensor:
    """`geometry.compactness` of sharded classes.

    sigma: of the head, a DTensor; the result is one too, (classes,), float64
    """
    return _like(1 / _local(sigma, "sigma"), sigma)


@torch.no_grad()
def separability(mu: Tensor, sigma: Tensor) -> Tensor:
    """`geometry.separability` of sharded classes; communicates eight sums.

    mu, sigma: of the head, DTensors; the result is one too, (classes,), float64
    """
    group, m = sigma.device_mesh.get_group(), sigma.shape[0]  # type: ignore[attr-defined]
    total = partial(all_reduce, group=group, purpose="geometry")
    return _like(geometry.mean_divergence(_local(mu, "mu"), _local(sigma, "sigma"), m, total), sigma)


def ratio(mu: Tensor, sigma: Tensor) -> Tensor:
    """`geometry.ratio` of sharded classes; mu and sigma as in `separability`."""
    return _like(_local(separability(mu, sigma), "separability") / _local(sigma, "sigma"), sigma)


def _local(value: Tensor, name: str) -> Tensor:
    return local(value, name).detach().double()


def _like(part: Tensor, parameter: Any) -> Tensor:
    return join(part, parameter.device_mesh, 0, parameter.shape)


class ClassStatistics(geometry.ClassStatistics):
    """`geometry.ClassStatistics` of a sharded head; every process keeps the statistics of the local classes.

        statistics = sharded.ClassStatistics(head)
        statistics.update(head.features(h), target)
        statistics.geometry()  # or compactness(), separability(), ratio(), relative_sigma(), dprime(), left_out()

    These are collective calls, and their results, (classes,), are the same on all processes.  The full table has
    classes^2 / processes entries on each, of two numbers; above `geometry.FULL_TABLE_LIMIT` classes impostors are
    pooled.  `count` is that of all processes (pooled: of the local columns), `mean` and `std` of the local columns.

    head: a sharded head; pooled, ignore_index: as in `geometry.ClassStatistics`
    """

    def __init__(self, head: ShardedSoftmaxHead, *, pooled: bool | None = None, ignore_index: int = -100) -> None:
        super().__init__(head.num_classes, pooled=pooled, ignore_index=ignore_index, device=head.weight.device)
        self.shard = head.shard
        self.first_output, self.outputs = self.shard.start, self.shard.width
        if not self.pooled:
            self.columns = self.outputs

    @torch.no_grad()
    def update(self, x: Any, y: Any) -> ClassStatistics:
        """Add a batch.

        x: what `head.features` gives, (rows of all processes, classes); y: the class indices of the local rows
        """
        shard = self.shard
        error: Exception | None = None
        device = self.allocated(torch.device("cpu")).device
        y = torch.as_tensor(y).detach().reshape(-1)
        if not hasattr(x, "to_local"):
            error = TypeError(f"x must be the DTensor that head.features gives, got {type(x).__name__}")
        elif y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            error = TypeError(f"y must hold integer class indices, got {y.dtype}")
        counts, _ = agree(shard.group, device, error, len(y))
        y = gather_rows(y.long().to(device), counts, shard.group, "targets")
        local = x.to_local()
        try:
            self.check_batch(local, y)
        except (TypeError, ValueError) as found:
            error = found
        agree(shard.group, device, error)
        super().update(local, y)
        return self

    def sync(self, group: Any = None) -> ClassStatistics:
        """Does nothing, because every process sees all rows."""
        return self

    def _whole(self) -> geometry.ClassStatistics:
        """The pooled statistics of all columns."""
        (n, mean, m2), group = self._state(), self.shard.group
        total = all_reduce(n.clone(), group, "geometry")
        # Means and squares about a centre that all processes share can be added; the first estimate may be far off.
        centre = all_reduce(n * mean, group, "geometry") / total.clamp(min=1)
        centre = centre + all_reduce(n * (mean - centre), group, "geometry") / total.clamp(min=1)
        squares = all_reduce(m2 + n * (mean - centre) ** 2, group, "geometry")
        whole = geometry.ClassStatistics(self.num_classes, pooled=True, ignore_index=self.ignore_index)
        state = {"form": torch.tensor(self._form), "count": total, "mean": centre, "m2": squares}
        return whole.load_state_dict(state)

    def read(self) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        return self._whole().read() if self.pooled else super().read()

    def _scan(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Every class against the local columns, then summed: a few numbers per class are communicated."""
        n, mean, m2 = self._state()
        m, shard, group = self.num_classes, self.shard, self.shard.group
        # The Gaussian of each class, from the process that holds it.
        own, mine = mean.new_zeros(2, m), shard.classes
        own[0, mine], own[1, mine] = mean[mine].diagonal(), (m2[mine] / n[mine]).sqrt().diagonal()
        own = all_reduce(own, group, "geometry")
        rows = max(1, geometry.BLOCK // max(1, self.columns))
        sums, least, most = mean.new_zeros(2, m), mean.new_full((2, m), torch.inf), mean.new_zeros(m)
        for start in range(0, m, rows) if self.columns else ():
            at = slice(start, min(start + rows, m))
            mu, sigma = mean[at], (m2[at] / n[at]).sqrt()
            mine_in = partial(torch.diagonal, offset=start - shard.start)
            found = geometry.compare_rows(own[0, at], own[1, at], mu, sigma, n[at], mine_in)
            sums[0, at], sums[1, at], least[0, at], constant, most[at] = found
            least[1, at] = torch.where(constant >= 0, shard.start + constant, torch.inf)
        # classes without examples have no distance, and nan would win every comparison
        least[0] = torch.where(least[0].isnan(), torch.inf, least[0])
        sums = all_reduce(sums, group, "geometry") / max(1, m - 1)
        least = all_reduce(least, group, "geometry", dist.ReduceOp.MIN)
        broken = all_reduce(most, group, "geometry", dist.ReduceOp.MAX) > 0
        constant = torch.where(least[1].isinf(), -1, least[1].nan_to_num(posinf=0.0).long())
        return own[1], (sums[0], sums[1], least[0], constant, broken)
