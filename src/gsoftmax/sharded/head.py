"""The classes of one process: parameters, outputs, and the loss over all processes' classes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks, equations
from ..equations import merge_moments
from ..gaussians import GaussianLogits, per_class
from . import wire
from .loss import _column_tiles, _CrossEntropy, _GatherRows, _linear, _Plan, _prepared, _tiles, _top
from .wire import _agree, _all_reduce, _all_to_all, _gather_rows, _rounds, _size, split

# On a GPU random numbers depend on how many are drawn at once: a weight of up to this many elements is drawn whole.
DRAWN_WHOLE = 1 << 28


def set_up(
    head: Any,
    shard: str | None,
    mesh: Any,
    negatives: int | None,
    seed: int,
    averaged: bool,
    bias: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> None:
    """Gives a head that is being made its `shard` and its parameters; called by the heads."""
    if shard != "class":
        raise ValueError(f"shard must be 'class', or None without mesh and negatives, got {shard!r}")
    if head.form is not None:
        raise ValueError(f"shard='class' is for one label an example (form=None), got form={head.form!r}")
    classes = head.num_classes
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 1:
        raise ValueError(f"num_classes must be a positive integer, got {classes!r}")
    if mesh is None and wire._world() is None:
        raise ValueError("shard='class' needs processes: call torch.distributed.init_process_group first")
    where = torch.empty(0, device=device).device
    if where.type == "meta":  # what `attach` tries a head's options on
        raise ValueError("shard='class' needs a device to hold parameters, got 'meta': make the head, don't attach it")
    if mesh is None:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(where.type, (_size(wire._world()),))
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension, got {mesh.ndim}")
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh must have this process in it, got processes {mesh.mesh.tolist()}")
    processes = mesh.size()
    if negatives is not None and (isinstance(negatives, bool) or not isinstance(negatives, int) or negatives < 1):
        raise ValueError(f"negatives must be a positive integer or None, got {negatives!r}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be an integer of 0 or more, got {seed!r}")
    start, stop = split(classes, processes, mesh.get_local_rank())
    head.shard = ClassShard(mesh, classes, start, stop, bool(averaged), negatives, seed)
    local = torch.empty(stop - start, head.in_features, device=where, dtype=dtype)
    head.register_parameter("weight", nn.Parameter(head.shard.distribute(local)))
    head.register_parameter("bias", nn.Parameter(head.shard.distribute(local.new_empty(len(local)))) if bias else None)
    if negatives is not None:
        head.register_buffer("draws", torch.zeros((), dtype=torch.int64))
    head.shard.reset_parameters(head)


@dataclass(frozen=True, eq=False)
class ClassShard:
    """Which classes this process has, of a head made with shard="class": `head.shard`.

    start, stop: the own classes; processes, rank: of the mesh.  Its methods are what the head's methods of the same
    names do; call those.

    >>> ClassShard(mesh=None, num_classes=3, start=0, stop=3)
    ClassShard(classes 0 to 2 of 3)
    """

    mesh: Any
    num_classes: int
    start: int
    stop: int
    averaged: bool = True
    negatives: int | None = None
    seed: int = 0

    def __repr__(self) -> str:
        text = f"classes {self.start} to {self.stop - 1}" if self.stop > self.start else "no class"
        sampled = "" if self.negatives is None else f", negatives={self.negatives}"
        return f"ClassShard({text} of {self.num_classes}{sampled})"

    def __deepcopy__(self, memo: Any) -> ClassShard:
        return self  # processes can't be copied

    @property
    def group(self) -> Any:
        return self.mesh.get_group()

    @property
    def processes(self) -> int:
        return self.mesh.size()

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    def distribute(self, local: Tensor) -> Tensor:
        """The DTensor of which `local` are the rows of the own classes."""
        from torch.distributed.tensor import Shard

        return _joined(local, self.mesh, Shard(0), (self.num_classes, *local.shape[1:]))

    # -- parameters ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reset_parameters(self, head: Any) -> None:
        """As `nn.Linear`, and as the whole head draws them: seeded alike, the joined weights are that head's.

        For this every process draws all the numbers, a piece at a time, and keeps its own: C D numbers to draw, 64 MB
        to hold.  On a GPU, where the numbers depend on how many are drawn at once, a weight above 2^28 elements is
        drawn in pieces too: then it is the same for every number of processes, but not the whole head's.
        """
        bound = 1 / math.sqrt(head.in_features)
        for parameter in (head.weight, head.bias):
            if parameter is None:
                continue
            local = parameter.to_local()
            width = local[:1].numel() or math.prod(local.shape[1:])
            whole = local.device.type != "cpu" and self.num_classes * width <= DRAWN_WHOLE
            rows = self.num_classes if whole else max(1, (1 << 24) // width)
            for first in range(0, self.num_classes, rows):
                drawn = local.new_empty(min(rows, self.num_classes - first), *local.shape[1:])
                drawn.uniform_(-bound, bound)
                a, b = max(first, self.start), min(first + len(drawn), self.stop)
                if a < b:
                    local[a - self.start : b - self.start] = drawn[a - first : b - first]
        if self.negatives is not None:
            head.draws.zero_()

    def gaussians(self, **options: Any) -> GaussianLogits:
        return _ShardedGaussians(self, **options)

    def local_parameters(self, head: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor, float]:
        """Own rows of weight, bias, mu and sigma, through which gradients flow to the DTensors, and lam."""
        weight = _own(head.weight, "weight")
        bias = None if head.bias is None else _own(head.bias, "bias")
        g = getattr(head, "gaussians", None)
        if g is None:
            like = torch.float64 if weight.dtype == torch.float64 else torch.float32
            mu = torch.zeros(len(weight), dtype=like, device=weight.device)
            return weight, bias, mu, torch.ones_like(mu), 0.0
        return weight, bias, *g.own(), g.lam

    # -- outputs ------------------------------------------------------------------------------------------------------

    def _rows(self, h: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        return h.reshape(-1, h.shape[-1]), tuple(h.shape[:-1])

    def _check_h(self, head: Any, h: Any) -> Exception | None:
        try:
            checks.check_outputs(h, "h")
        except (TypeError, ValueError) as error:
            return error
        if h.shape[-1] != head.in_features:
            return ValueError(f"h must have {head.in_features} features, got shape {tuple(h.shape)}")
        return None

    def _gathered(self, head: Any, h: Tensor) -> tuple[Tensor, list[int], tuple[int, ...]]:
        """h of all processes without gradient, how many rows each has, and the shape of the own ones."""
        error = self._check_h(head, h)
        flat, shape = self._rows(h) if error is None else (head.weight.to_local()[:0], (0,))
        counts, _ = _agree(self.group, flat.device, error, len(flat), ("outputs", str(flat.dtype)))
        return _gather_rows(flat.detach(), counts, self.group, "h"), counts, shape

    def outputs(self, head: Any, h: Tensor, adjusted: bool = True) -> Tensor:
        """x, or z if adjusted: (N, C), own columns."""
        from torch.distributed.tensor import Shard

        error = self._check_h(head, h)
        wanted = error is None and h.requires_grad and torch.is_grad_enabled()
        flat = self._rows(h)[0] if error is None else None
        counts, wanted = _agree(
            self.group, head.weight.device, error, 0 if flat is None else len(flat), "outputs", wanted
        )
        assert flat is not None
        if wanted and not flat.requires_grad:
            flat = flat.detach().requires_grad_()  # others wait for this process's part of their dh
        h_all = _GatherRows.apply(flat, counts, self)
        weight, bias, mu, sigma, lam = self.local_parameters(head)
        out = F.linear(h_all, weight, bias)
        if adjusted and hasattr(head, "gaussians"):
            out = head.gaussians(out)
        return _joined(out, self.mesh, Shard(1), (len(h_all), self.num_classes))

    @torch.no_grad()
    def predict_proba(self, head: Any, h: Tensor) -> Tensor:
        """p: (N, C), own columns; without gradient."""
        from torch.distributed.tensor import Shard

        z = _own(self.outputs(head, h), "z")
        z = z.to(checks.compute_dtype(z))
        top = _top(z)
        _all_reduce(top, self.group, "max", dist.ReduceOp.MAX)
        p = (z - top[:, None]).exp_()
        total = _all_reduce(p.sum(1), self.group, "sums")
        return _joined(p.div_(total[:, None]), self.mesh, Shard(1), (len(z), self.num_classes))

    @torch.no_grad()
    def topk(self, head: Any, h: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k largest z of the own rows over all classes, and their classes, (n_r, k) each."""
        h_all, counts, shape = self._gathered(head, h)
        weight, bias, mu, sigma, lam = self.local_parameters(head)
        weight, bias, mu, sigma, h_all = _prepared(h_all, weight, bias, mu, sigma, lam)
        n = len(h_all)
        # A process with fewer than k classes hands in -inf for the rest, with a class that comes after all others.
        best = torch.full((n, k), -torch.inf, dtype=sigma.dtype, device=h_all.device)
        classes = torch.full((n, k), self.num_classes, device=h_all.device)
        for at, own in _tiles(n, len(weight), h_all.device.type):
            z = equations.logits(_linear(h_all[at], weight[own], bias, own), mu[own], sigma[own], lam)
            values, found = z.max(1, keepdim=True) if k == 1 else z.topk(min(k, z.shape[1]), 1)
            found += self.start + own.start
            best[at], classes[at] = _largest(torch.cat([best[at], values], 1), torch.cat([classes[at], found], 1), k)
        # Every process sends what it found to the owners of the rows.
        rank, size, group = self.rank, self.processes, self.group
        sent, received = [c * k for c in counts], [counts[rank] * k] * size
        best, classes = (
            _all_to_all(t.reshape(-1), sent, received, group, "top classes")
            .view(size, counts[rank], k)
            .movedim(0, 1)
            .reshape(counts[rank], size * k)
            for t in (best, classes)
        )
        best, classes = _largest(best, classes, k)
        return best.view(*shape, k), classes.view(*shape, k)

    @torch.no_grad()
    def fit_gaussians(self, head: Any, batches: Iterable[Tensor]) -> None:
        """Mean and deviation of every own output over the batches of all processes, which may have more or fewer."""
        g = head.gaussians
        weight = head.weight.to_local()
        total = tuple(torch.zeros(3, len(weight), dtype=torch.float64, device=weight.device))
        rows = 0
        for batch in _rounds(batches, self.group, weight.device):
            h = weight.new_empty(0, head.in_features) if batch is None else batch
            h_all, _, _ = self._gathered(head, h.to(weight.dtype))
            rows += len(h_all)
            parts = []
            for own in _column_tiles(len(weight), weight.device.type):
                x = F.linear(h_all, weight[own], None if head.bias is None else head.bias.to_local()[own]).double()
                var, mean = torch.var_mean(x, dim=0, correction=0) if len(x) else (x.sum(0), x.sum(0))
                parts.append(torch.stack([torch.full_like(mean, len(x)), mean, var * len(x)]))
            if parts:
                total = merge_moments(total, tuple(torch.cat(parts, 1)))
        _, mean, m2 = total
        error = None
        if rows < 2:
            error = ValueError(f"batches must hold at least two examples to fit Gaussians to, got {rows}")
        elif not bool(torch.isfinite(mean).all() and torch.isfinite(m2).all()):
            error = ValueError("batches must hold finite outputs to fit Gaussians to, got NaN or infinity")
        _agree(self.group, weight.device, error)
        low = g.sigma_min * (1 + 1e-6) if g.sigma_min else 1e-6
        g.write_own(mean, (m2 / rows).sqrt().clamp_min(low))

    # -- the loss -----------------------------------------------------------------------------------------------------

    def loss(
        self,
        head: Any,
        h: Tensor,
        target: Tensor,
        *,
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """See the head's `loss` and the top of this file."""
        sampled = self.negatives is not None and head.training
        error = self._check_h(head, h)
        if error is None:
            try:
                self._check_loss(head, h, target, class_weight, ignore_index, reduction, label_smoothing, sampled)
            except (TypeError, ValueError) as found:
                error = found
        device = head.weight.device
        if error is not None:
            _agree(self.group, device, error)
        flat, shape = self._rows(h)
        soft = target.is_floating_point()
        rows = target.reshape(-1, self.num_classes) if soft else target.reshape(-1).long()
        autocast = torch.is_autocast_enabled(device.type)
        if autocast:
            flat = flat.to(torch.get_autocast_dtype(device.type))
        call = ("loss", str(flat.dtype), str(rows.dtype), class_weight is None, ignore_index, reduction)
        recorded = torch.is_grad_enabled()
        counts, wanted = _agree(
            self.group, device, None, len(flat), (*call, label_smoothing, sampled, recorded),
            flat.requires_grad and recorded,
        )  # fmt: skip
        if wanted and not flat.requires_grad:
            flat = flat.detach().requires_grad_()  # others wait for this process's part of their dh

        h_all = _gather_rows(flat.detach(), counts, self.group, "h")
        if soft:
            ends = [split(self.num_classes, self.processes, r) for r in range(self.processes)]
            columns = torch.cat([rows[:, a:b].reshape(-1) for a, b in ends]) if self.processes > 1 else rows
            own = self.stop - self.start
            sent, received = [len(rows) * (b - a) for a, b in ends], [n * own for n in counts]
            rows = _all_to_all(columns, sent, received, self.group, "probabilities").view(len(h_all), own)
        else:
            rows = _gather_rows(rows, counts, self.group, "targets")

        g = getattr(head, "gaussians", None)
        if g is not None and g.gaussians == "tracked" and head.training and recorded:
            g.track_linear(h_all, head, None if soft else rows != ignore_index)
        weight, bias, mu, sigma, lam = self.local_parameters(head)
        if g is not None and g.gaussians == "tracked":
            mu = mu.clone()  # a later step writes over the buffer, which a pending backward pass may still need
        drawn = None
        if sampled:
            drawn = self._draw(head, rows, ignore_index)
            if recorded:
                head.draws += 1
        if drawn is not None:
            index = drawn[0]
            weight, mu, sigma = (t.index_select(0, index) for t in (weight, mu, sigma))
            bias = None if bias is None else bias.index_select(0, index)
        weight, bias, mu, sigma, h_all = _prepared(h_all, weight, bias, mu, sigma, lam)
        checks.check_sigma(sigma)
        plan = _Plan(self, counts, wanted, lam, reduction, exact=not sampled)
        self._fill(plan, rows, drawn, sigma, class_weight, ignore_index, label_smoothing)
        with torch.autocast(device.type, enabled=False):
            loss = _CrossEntropy.apply(flat, weight, bias, mu, sigma, h_all, plan)
        loss = equations.loss_dtype(loss, flat)
        return loss.reshape(shape) if reduction == "none" else loss

    def _check_loss(
        self,
        head: Any,
        h: Tensor,
        target: Any,
        class_weight: Tensor | None,
        ignore_index: int,
        reduction: str,
        label_smoothing: float,
        sampled: bool,
    ) -> None:
        if not isinstance(target, Tensor):
            raise TypeError(f"target must be a tensor, got {type(target).__name__}")
        flat, rows, _ = checks.flatten_linear(h, head.weight, target, head.bias)
        x = flat.new_empty((len(flat), self.num_classes), device="meta")
        options = checks.Options(class_weight, ignore_index, reduction, label_smoothing)
        checks.check_cross_entropy(x, rows, options)
        if not rows.is_floating_point():
            checks.check_labels(rows, self.num_classes, ignore_index)
        elif rows.requires_grad:
            raise ValueError("target must need no gradient with shard='class': detach the probabilities")
        elif sampled:
            raise ValueError("target must hold class indices with negatives: probabilities make every class a target")

    def _draw(self, head: Any, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, float] | None:
        """Own classes to look at, sorted; which of them are targets; and the probability with which the others were
        drawn.  None if that is all of them."""
        assert self.negatives is not None
        mine = (target != ignore_index) & (target >= self.start) & (target < self.stop)
        kept = torch.unique(target[mine]) - self.start
        own, others = self.stop - self.start, self.stop - self.start - len(kept)
        share = self.negatives * self.stop // self.num_classes - self.negatives * self.start // self.num_classes
        wanted = max(1, share)
        if wanted >= others:
            return None
        random = np.random.default_rng([self.seed, int(head.draws), self.start])
        drawn = torch.from_numpy(_distinct(random, others, wanted)).to(target.device)
        # drawn counts the classes that are no target; the i-th target has kept[i] - i of those below it
        drawn = drawn + torch.searchsorted(kept - torch.arange(len(kept), device=kept.device), drawn, right=True)
        index, order = torch.sort(torch.cat([kept, drawn]))
        assert len(index) <= own
        return index, order < len(kept), wanted / others

    def _fill(
        self,
        plan: _Plan,
        target: Tensor,  # (N,), or own columns (N, C_r) of probabilities
        drawn: tuple[Tensor, Tensor, float] | None,
        like: Tensor,
        class_weight: Tensor | None,
        ignore_index: int,
        label_smoothing: float,
    ) -> None:
        n, dtype, device = len(target), like.dtype, like.device
        w = None if class_weight is None else class_weight.to(device, dtype)
        own_w = like.new_ones(self.stop - self.start) if w is None else w[self.start : self.stop]
        total_w = self.num_classes if w is None else w.sum()
        if label_smoothing > 0:
            plan.every = own_w * (label_smoothing / self.num_classes)
        if drawn is not None:
            index, kept, probability = drawn
            inverse = torch.where(kept, like.new_ones(()), 1 / probability)
            plan.shift = inverse.log()
            plan.every = None if plan.every is None else plan.every[index] * inverse
        if target.is_floating_point():
            plan.prob, plan.prob_weight = target, own_w * (1 - label_smoothing)
            plan.divisor = like.new_tensor(float(n))
            return
        keep = target != ignore_index
        valid = keep & (target >= 0) & (target < self.num_classes)
        of_row = like.new_ones(n) if w is None else w[torch.where(valid, target, 0)]
        # On a GPU nobody looked at the labels: one that no process has makes the loss nan instead of wrong.
        of_row = torch.where(valid, of_row, torch.nan)
        of_row = torch.where(keep, of_row, 0.0)
        column = target - self.start
        mine = valid & (column >= 0) & (column < self.stop - self.start)
        if drawn is not None and len(drawn[0]):
            column = torch.searchsorted(drawn[0], column.clamp(0, self.stop - self.start - 1))
        plan.keep, plan.column, plan.mine = keep, torch.where(mine, column, 0), mine
        plan.own = of_row * (1 - label_smoothing)
        plan.all_y = torch.where(keep, plan.own + (label_smoothing / self.num_classes) * total_w, 0.0)
        plan.divisor = of_row.sum()


def _own(parameter: Any, name: str) -> Tensor:
    """Own rows of a parameter."""
    if not hasattr(parameter, "to_local"):
        raise TypeError(f"{name} of a head with shard='class' must be a DTensor, got {type(parameter).__name__}")
    return parameter.to_local()


def _joined(local: Tensor, mesh: Any, placement: Any, shape: Sequence[int]) -> Tensor:
    """The DTensor of the given shape of which `local` is this process's part."""
    from torch.distributed.tensor import DTensor

    size = torch.Size(shape)
    stride = tuple(math.prod(size[i + 1 :]) for i in range(len(size)))
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=size, stride=stride)


def _distinct(random: np.random.Generator, below: int, wanted: int) -> np.ndarray:
    """`wanted` different integers below `below`, every set of them equally likely."""
    if wanted > below // 4:
        return random.permutation(below)[:wanted].astype(np.int64)
    drawn = np.empty(0, dtype=np.int64)
    while True:  # the first `wanted` different ones of a sequence of draws
        drawn = np.concatenate([drawn, random.integers(0, below, size=wanted + wanted // 4 + 16)])
        first = np.sort(np.unique(drawn, return_index=True)[1])
        if len(first) >= wanted:
            return drawn[first[:wanted]]


def _largest(values: Tensor, classes: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of the candidates (rows, candidates), the lower class first where they tie."""
    classes, order = classes.sort(dim=1)
    values, best = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values[:, :k], classes.gather(1, best[:, :k])


class _ShardedGaussians(GaussianLogits):
    """`GaussianLogits` of which every process has those of its own classes; x is (rows, own classes)."""

    def __init__(self, shard: ClassShard, *, mu: Any = 0.0, sigma: Any = 1.0, **options: Any) -> None:
        own = slice(shard.start, shard.stop)
        some = max(1, shard.stop - shard.start)  # a process without classes makes one, to have all options checked
        super().__init__(some, mu=0.0, sigma=max(1.0, 2 * options.get("sigma_min", 0.0)), **options)
        self.shard = shard
        self.num_classes = shard.num_classes
        initial = []
        for name, value in (("mu", mu), ("sigma", sigma)):
            if torch.as_tensor(value).ndim:  # a number needs no room for every class
                value = per_class(name, value, shard.num_classes)
                if name == "sigma":
                    self._check_sigma(value)
                initial.append(value[own].clone())
            else:
                initial.append(per_class(name, value, 1)[0])
        self._check_sigma(initial[1])
        self._initial = (initial[0], initial[1])
        for name in ("mu", "rho"):
            value = shard.distribute(getattr(self, name).detach()[: shard.stop - shard.start].clone())
            setattr(self, name, nn.Parameter(value) if self.gaussians == "learned" else value)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if isinstance(getattr(self, "shard", None), ClassShard):
            self.write_own(*self._initial)
        else:
            super().reset_parameters()  # while the base class is being made

    def own(self) -> tuple[Tensor, Tensor]:
        """mu and sigma of the own classes."""
        rho = _own(self.rho, "rho")
        return _own(self.mu, "mu"), self.sigma_min + (rho if rho.dtype == torch.float64 else rho.float()).exp()

    @torch.no_grad()
    def write_own(self, mu: Tensor, sigma: Tensor) -> None:
        _own(self.mu, "mu").copy_(mu)
        _own(self.rho, "rho").copy_((sigma - self.sigma_min).clamp_min(1e-6 * (self.sigma_min or 1e-6)).log())

    @torch.no_grad()
    def set_gaussians(self, mu: Any, sigma: Any) -> None:
        if not isinstance(getattr(self, "shard", None), ClassShard):
            return super().set_gaussians(mu, sigma)
        mu, sigma = per_class("mu", mu, self.num_classes), per_class("sigma", sigma, self.num_classes)
        self._check_sigma(sigma)
        self.write_own(mu[self.shard.start : self.shard.stop], sigma[self.shard.start : self.shard.stop])

    def fit_gaussians(self, batches: Iterable[Any]) -> GaussianLogits:
        raise ValueError("Gaussians of a head with shard='class' are fitted by the head: head.fit_gaussians(batches)")

    @torch.no_grad()
    def track(self, x: Tensor, keep: Tensor | None = None) -> None:
        if self.gaussians == "tracked" and self.training:
            d = x.to(checks.compute_dtype(self.mu)) - _own(self.mu, "mu")
            self._track(*_sums(d, keep), len(d) if keep is None else keep.sum())

    @torch.no_grad()
    def track_linear(self, h: Tensor, head: Any, keep: Tensor | None) -> None:
        """`track` on x = linear(h), of which only a tile exists at a time."""
        mu = _own(self.mu, "mu")
        bias = None if head.bias is None else head.bias.to_local()
        weight, bias, mu, _, h = _prepared(h, head.weight.to_local(), bias, mu, mu, 0.0)
        sums = torch.zeros(2, len(mu), dtype=torch.float64, device=mu.device)
        for at, own in _tiles(len(h), len(mu), h.device.type):
            d = _linear(h[at], weight[own], bias, own).to(mu.dtype) - mu[own]
            sums[:, own] += torch.stack(_sums(d, None if keep is None else keep[at]))
        self._track(sums[0], sums[1], len(h) if keep is None else keep.sum())

    def _track(self, s1: Tensor, s2: Tensor, rows: Tensor | int) -> None:
        """See `GaussianLogits.track`: s1 and s2 are sums of x - mu and of its square over the rows."""
        mu, sigma = (t.detach() for t in self.own())
        n = torch.as_tensor(rows, device=s1.device)
        self._move(mu, _own(self.rho, "rho"), sigma, n, s1.double(), s2.double())

    def current(self, x: Tensor, target: Tensor | None = None, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
        if self.gaussians == "tracked" and self.training and torch.is_grad_enabled():
            self.track(x.detach())
        mu, sigma = checks.as_gaussians(x, *self.own(), self.lam)
        return (mu.clone() if self.gaussians == "tracked" else mu), sigma


def _sums(d: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    if keep is not None:
        d = torch.where(keep[:, None], d, 0.0)
    return d.sum(0, dtype=torch.float64), (d * d).sum(0, dtype=torch.float64)
