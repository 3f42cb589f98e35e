"""Heads with sharded classes: parameters, outputs, and the loss over the classes of all processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .. import checks, equations, functional
from ..checks import Options
from ..gaussians import GaussianLogits, first_items, per_class
from ..heads import GSoftmaxHead, SoftmaxHead
from . import collectives
from .collectives import agree, all_reduce, all_to_all, gather_rows, rounds
from .loss import Call, CrossEntropy, GatherRows, Parameters, Sample, Targets, column_tiles, row_maximum, tiles
from .shard import ClassShard, local, split

# On a GPU random numbers depend on how many are drawn at once: a weight of up to this many elements is drawn whole.
DRAWN_WHOLE = 1 << 28


class ShardedSoftmaxHead(SoftmaxHead):
    """`SoftmaxHead` with its classes split over processes; see `gsoftmax.sharded`.

    in_features, num_classes, bias, h and target as in `SoftmaxHead`; it has no multi-label form
    mesh: a 1-D DeviceMesh of the processes, by default all of them
    negatives: number of classes to sample in a training step, besides the targets; None: all classes
    seed: of the sampling
    averaged: whether the gradients of the backbone are averaged over the processes, as DDP and FSDP do
    """

    multilabel = False

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = True,
        form: str | None = None,
        mesh: DeviceMesh | None = None,
        negatives: int | None = None,
        seed: int = 0,
        averaged: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, value, low in (("num_classes", num_classes, 1), ("negatives", negatives, 1), ("seed", seed, 0)):
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= low
            if not whole and not (name == "negatives" and value is None):
                raise ValueError(f"{name} must be a whole number, {low} or more, got {value!r}")
        # allocated below; not super(), because a head with Gaussians makes sharded ones
        SoftmaxHead.__init__(self, in_features, num_classes, bias=bias, form=form, device="meta", dtype=dtype)
        if mesh is None and collectives.world() is None:
            raise ValueError("a sharded head needs processes: call torch.distributed.init_process_group first")
        device = torch.empty(0, device=device).device
        if mesh is None:
            mesh = init_device_mesh(device.type, (collectives.size(collectives.world()),))
        if mesh.ndim != 1:
            raise ValueError(f"mesh must have one dimension, got {mesh.ndim}")
        if mesh.get_coordinate() is None:
            raise ValueError(f"mesh must contain this process, got processes {mesh.mesh.tolist()}")
        self.shard = ClassShard(num_classes, mesh, bool(averaged))
        self.negatives, self.seed = negatives, seed
        weight = torch.empty(self.shard.width, in_features, device=device, dtype=dtype)
        self.weight = nn.Parameter(self.shard.join(weight))
        if bias:
            self.bias = nn.Parameter(self.shard.join(weight.new_empty(len(weight))))
        if negatives is not None:
            self.draws: Tensor
            self.register_buffer("draws", torch.zeros((), dtype=torch.int64))
        self.reset_linear()

    @torch.no_grad()
    def reset_linear(self) -> None:
        """Draw weight and bias; with the same seed, the concatenated weights equal the unsharded head's.

        For this every process draws all the numbers, a piece at a time, and keeps the local ones: C D numbers to draw,
        64 MB to hold.  On a GPU, where the numbers depend on how many are drawn at once, a weight above 2^28 elements
        is drawn in pieces too: then it is the same for every number of processes, but differs from the unsharded one.
        """
        bound, classes, shard = 1 / math.sqrt(self.in_features), self.num_classes, self.shard
        for name, parameter in (("weight", self.weight), ("bias", self.bias)):
            if parameter is None:
                continue
            part = local(parameter, name)
            width = math.prod(part.shape[1:])
            whole = part.device.type != "cpu" and classes * width <= DRAWN_WHOLE
            rows = classes if whole else max(1, (1 << 24) // width)
            for first in range(0, classes, rows):
                drawn = part.new_empty(min(rows, classes - first), *part.shape[1:]).uniform_(-bound, bound)
                a, b = max(first, shard.start), min(first + len(drawn), shard.stop)
                if a < b:
                    part[a - shard.start : b - shard.start] = drawn[a - first : b - first]
        if self.negatives is not None:
            self.draws.zero_()

    def unsharded(self) -> SoftmaxHead:
        """A plain head on every process, with the parameters of all of them; a collective call."""
        return self._filled(SoftmaxHead)

    def _filled(self, cls: type[SoftmaxHead], **options: Any) -> SoftmaxHead:
        options |= {"bias": self.bias is not None, "device": self.weight.device, "dtype": self.weight.dtype}
        head = nn.utils.skip_init(cls, self.in_features, self.num_classes, **options)
        head.load_state_dict({k: v.full_tensor() for k, v in self.state_dict().items() if k != "draws"})
        return head.train(self.training)

    # -- outputs ------------------------------------------------------------------------------------------------------

    def _gather(
        self, h: Any, call: tuple[Any, ...], check: Callable[[], None] = lambda: None, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, list[int], bool]:
        """Local rows of h, how many each process has, and whether any process needs their gradient.

        call, check: what must be the same, and what must not raise an error, on any process; dtype: cast h
        """
        rows, needed, error = local(self.weight, "weight")[:0], False, None
        try:
            checks.check_outputs(h, "h")
            if h.shape[-1] != self.in_features:
                raise ValueError(f"h must have {self.in_features} features, got shape {tuple(h.shape)}")
            check()
            rows = h.reshape(-1, self.in_features).to(dtype or h.dtype)
            needed = rows.requires_grad and torch.is_grad_enabled()
        except (TypeError, ValueError) as found:
            error = found
        call = (*call, str(rows.dtype))
        counts, needed = agree(self.shard.group, self.weight.device, error, len(rows), call, needed)
        if needed and not rows.requires_grad:
            rows = rows.detach().requires_grad_()  # every process must take part in the backward collective
        return rows, counts, needed

    def _local_x(self, h: Tensor) -> Tensor:
        """(rows of all processes, local classes)"""
        rows, counts, _ = self._gather(h, ("outputs",))
        weight, bias, *_ = self._local_parameters()
        return F.linear(GatherRows.apply(rows, counts, self.shard), weight, bias)

    def features(self, h: Tensor) -> Tensor:
        """x, a DTensor (rows of all processes, classes) of which each process has its own columns."""
        return self.shard.join(self._local_x(h), 1)

    @torch.no_grad()
    def predict_proba(self, h: Tensor) -> Tensor:
        """p, a DTensor as `features` gives; without gradient."""
        z, group = local(self(h), "z"), self.shard.group
        z = z.to(checks.compute_dtype(z))
        p = (z - all_reduce(row_maximum(z), group, "max", dist.ReduceOp.MAX)[:, None]).exp_()
        return self.shard.join(p.div_(all_reduce(p.sum(1), group, "sums")[:, None]), 1)

    def _local_parameters(self) -> Parameters:
        """The local classes' parameters; gradients flow through them to the DTensors."""
        weight, bias = local(self.weight, "weight"), None if self.bias is None else local(self.bias, "bias")
        mu = torch.zeros(len(weight), dtype=checks.compute_dtype(weight), device=weight.device)
        return Parameters(weight, bias, mu, torch.ones_like(mu), 0.0)

    @torch.no_grad()
    def topk(self, h: Tensor, k: int = 5) -> tuple[Tensor, Tensor]:
        """The k largest z of the local rows over all classes, and their classes, largest first, (..., k) each."""
        self._check_k(k)
        rows, counts, _ = self._gather(h, ("topk", k))
        shard, group = self.shard, self.shard.group
        h_all, parameters = self._local_parameters().cast_for(gather_rows(rows, counts, group, "h"))
        n = len(h_all)
        # A process with fewer than k classes pads with -inf, and with a class that comes after all others.
        best = torch.full((n, k), -torch.inf, dtype=parameters.sigma.dtype, device=h_all.device)
        classes = torch.full((n, k), self.num_classes, device=h_all.device)
        for at, own in tiles(n, shard.width, h_all.device.type):
            z = parameters.z(parameters.x(h_all[at], own), own)
            values, found = z.max(1, keepdim=True) if k == 1 else z.topk(min(k, z.shape[1]), 1)
            found += shard.start + own.start
            best[at], classes[at] = _largest(torch.cat([best[at], values], 1), torch.cat([classes[at], found], 1), k)
        # Every process sends its candidates to the owners of the rows.
        mine = counts[shard.rank]
        sent, received = [c * k for c in counts], [mine * k] * shard.processes
        best, classes = (
            all_to_all(t.reshape(-1), sent, received, group, "top classes")
            .view(shard.processes, mine, k)
            .movedim(0, 1)
            .reshape(mine, shard.processes * k)
            for t in (best, classes)
        )
        best, classes = _largest(best, classes, k)
        return best.view(*h.shape[:-1], k), classes.view(*h.shape[:-1], k)

    def extra_repr(self) -> str:
        sampled = "" if self.negatives is None else f", negatives={self.negatives}"
        return f"{super().extra_repr()}, {self.shard}{sampled}"

    # -- the loss -----------------------------------------------------------------------------------------------------

    def loss(self, h: Tensor, target: Tensor, *, class_weight: Tensor | None = None, **options: Any) -> Tensor:
        """The loss over the rows and classes of all processes.

        class_weight, options: as in `SoftmaxHead.loss`
        """
        given = Options(class_weight, **options)
        sampled, recorded = self.negatives is not None and self.training, torch.is_grad_enabled()
        device, shard = self.weight.device, self.shard
        if shard.processes == 1 and not sampled:
            return self._loss_alone(h, target, given)
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        kind = str(target.dtype) if isinstance(target, Tensor) and target.is_floating_point() else "indices"
        call = ("loss", kind, class_weight is None, *given[1:], sampled, recorded)
        rows, counts, need_dh = self._gather(h, call, lambda: self._check(h, target, given, sampled), autocast)
        h_all = gather_rows(rows.detach(), counts, shard.group, "h")
        targets = self._gather_targets(target, counts)
        self._track(h_all, None if targets.is_floating_point() else targets != given.ignore_index)
        parameters = self._local_parameters()
        sample = self._sample(targets, given.ignore_index) if sampled else None
        if sampled and recorded:
            self.draws += 1
        if sample is not None:
            parameters = parameters.select(sample.classes)
        h_all, parameters = parameters.cast_for(h_all)
        plan = (
            Targets.of(targets, given, shard, sample, parameters.sigma),
            Call(shard, counts, need_dh, parameters.lam, given.reduction, exact=not sampled),
        )
        with torch.autocast(device.type, enabled=False):
            loss = CrossEntropy.apply(rows, *parameters[:4], h_all, plan)
        loss = equations.loss_dtype(loss, rows)
        return loss.reshape(h.shape[:-1]) if given.reduction == "none" else loss

    def _loss_alone(self, h: Tensor, target: Tensor, options: Options) -> Tensor:
        """The loss of a process that has all classes and all rows, as the whole head computes it."""
        checks.check_outputs(h, "h")
        self._check(h, target, options, False)
        keep = None if target.is_floating_point() else target.reshape(-1) != options.ignore_index
        self._track(h.detach().reshape(-1, self.in_features), keep)
        weight, bias, mu, sigma, lam = self._local_parameters()
        given: dict[str, Any] = options._asdict()
        given["class_weight"] = given.pop("weight")
        return functional.linear_gsoftmax_cross_entropy(h, weight, target, mu.clone(), sigma, lam, bias=bias, **given)

    def _check(self, h: Tensor, target: Any, options: Options, sampled: bool) -> None:
        if not isinstance(target, Tensor):
            raise TypeError(f"target must be a tensor, got {type(target).__name__}")
        if checks.values_are_free(self.weight):
            checks.check_sigma(self._local_parameters().sigma)  # here, because an error of one process is raised on all
        flat, rows, _ = checks.flatten_linear(h, self.weight, target, self.bias)
        checks.check_cross_entropy(flat.new_empty((len(flat), self.num_classes), device="meta"), rows, options)
        if not rows.is_floating_point():
            checks.check_labels(rows, self.num_classes, options.ignore_index)
        elif rows.requires_grad:
            raise ValueError("target must not require a gradient in a sharded head: detach the probabilities")
        elif sampled:
            raise ValueError("target must hold class indices with negatives: probabilities make every class a target")

    def _gather_targets(self, target: Tensor, counts: list[int]) -> Tensor:
        """Class indices (N,) of all rows, or the local columns (N, c) of their probabilities."""
        shard = self.shard
        if not target.is_floating_point():
            return gather_rows(target.reshape(-1).long(), counts, shard.group, "targets")
        rows = target.reshape(-1, self.num_classes)
        ends = [split(self.num_classes, shard.processes, r) for r in range(shard.processes)]
        columns = torch.cat([rows[:, a:b].reshape(-1) for a, b in ends])
        sent, received = [len(rows) * (b - a) for a, b in ends], [n * shard.width for n in counts]
        return all_to_all(columns, sent, received, shard.group, "probabilities").view(sum(counts), shard.width)

    def _track(self, h: Tensor, keep: Tensor | None) -> None:
        """Update tracked Gaussians."""

    def _sample(self, target: Tensor, ignore_index: int) -> Sample | None:
        """The targets among the local classes, and a share of the negatives; None for all local classes."""
        assert self.negatives is not None
        shard, classes = self.shard, self.num_classes
        mine = (target != ignore_index) & (target >= shard.start) & (target < shard.stop)
        kept = torch.unique(target[mine]) - shard.start
        others = shard.width - len(kept)
        wanted = max(1, self.negatives * shard.stop // classes - self.negatives * shard.start // classes)
        if wanted >= others:
            return None
        random = np.random.default_rng([self.seed, int(self.draws), shard.start])
        drawn = torch.from_numpy(distinct(random, others, wanted)).to(target.device)
        # `drawn` counts the classes that are not targets; below the i-th target lie kept[i] - i of them
        drawn = drawn + torch.searchsorted(kept - torch.arange(len(kept), device=kept.device), drawn, right=True)
        index, order = torch.sort(torch.cat([kept, drawn]))
        return Sample(index, order < len(kept), wanted / others)


def distinct(random: np.random.Generator, below: int, wanted: int) -> np.ndarray:
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
    """The k largest of the candidates (rows, candidates); ties go to the lowest class."""
    classes, order = classes.sort(dim=1)
    values, best = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values[:, :k], classes.gather(1, best[:, :k])


class ShardedGSoftmaxHead(ShardedSoftmaxHead, GSoftmaxHead):
    """`GSoftmaxHead` with its classes split over processes; see `gsoftmax.sharded`.

    in_features, num_classes, h, target and sharded_options (bias, mesh, negatives, seed, averaged) as in
    `ShardedSoftmaxHead`; lam, mu, sigma, gaussians, momentum, sigma_min and lr_mult as in `GaussianLogits`.
    """

    gaussians: ShardedGaussians

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        lam: float = 1.0,
        mu: float | Sequence[float] | Tensor = 0.0,
        sigma: float | Sequence[float] | Tensor = 1.0,
        gaussians: str = "learned",
        momentum: float = 0.02,
        sigma_min: float = 0.01,
        lr_mult: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **sharded_options: Any,
    ) -> None:
        super().__init__(in_features, num_classes, device=device, dtype=dtype, **sharded_options)
        options = {"gaussians": gaussians, "momentum": momentum, "sigma_min": sigma_min, "lr_mult": lr_mult}
        self.gaussians = ShardedGaussians(self.shard, mu, sigma, lam=lam, **options, device=device, dtype=dtype)

    def unsharded(self) -> SoftmaxHead:
        names = ("lam", "gaussians", "momentum", "sigma_min", "lr_mult")
        return self._filled(GSoftmaxHead, **{name: getattr(self.gaussians, name) for name in names})

    def forward(self, h: Tensor, target: Tensor | None = None) -> Tensor:
        """z, a DTensor as `features` gives."""
        return self.shard.join(self.gaussians(self._local_x(h)), 1)

    def _local_parameters(self) -> Parameters:
        mu, sigma = self.gaussians.local()
        if self.gaussians.gaussians == "tracked":
            mu = mu.clone()  # the next step overwrites the buffer, which a pending backward pass may still need
        return super()._local_parameters()._replace(mu=mu, sigma=sigma, lam=self.lam)

    def _track(self, h: Tensor, keep: Tensor | None) -> None:
        if self.gaussians.gaussians == "tracked" and self.training and torch.is_grad_enabled():
            self.gaussians.track_linear(h, self._local_parameters(), keep)

    @torch.no_grad()
    def fit_gaussians(self, batches: Iterable[Any]) -> ShardedGSoftmaxHead:
        """Set mu and sigma from batches of h, as in `GaussianLogits.fit_gaussians`; numbers of batches may differ."""
        parameters, group, n = self._local_parameters(), self.shard.group, 0
        weight = parameters.weight
        total = tuple(torch.zeros(3, len(weight), dtype=torch.float64, device=weight.device))
        for batch in rounds(first_items(batches), group, weight.device):
            rows, counts, _ = self._gather(weight[:0] if batch is None else batch.to(weight.dtype), ("fit_gaussians",))
            h = gather_rows(rows, counts, group, "h")
            n += len(h)
            moments = torch.stack(total).fill_(len(h))
            for own in column_tiles(len(weight), weight.device.type):
                bias = None if parameters.bias is None else parameters.bias[own]
                x = F.linear(h, weight[own], bias).double()
                var, mean = torch.var_mean(x, dim=0, correction=0) if len(x) else (x.sum(0), x.sum(0))
                moments[1:, own] = torch.stack([mean, var * len(x)])
            total = equations.merge_moments(total, tuple(moments))
        error = None
        try:
            sigma = self.gaussians.fitted_sigma(n, *total[1:])
        except ValueError as found:
            error = found
        agree(group, weight.device, error)
        self.gaussians.write(total[1], sigma)
        return self


class ShardedGaussians(GaussianLogits):
    """`GaussianLogits` of the local classes; x is (rows, local classes)."""

    defers = False  # z becomes a part of a DTensor

    def __init__(self, shard: ClassShard, mu: Any, sigma: Any, **options: Any) -> None:
        self.shard = shard
        # a process without classes makes one, so that all processes check the options
        own = shard.classes if shard.width else slice(shard.num_classes - 1, shard.num_classes)
        values = (mu, sigma)
        mu, sigma = (
            per_class(name, v, shard.num_classes)[own] if torch.as_tensor(v).ndim else v
            for name, v in zip(("mu", "sigma"), values, strict=True)
        )
        super().__init__(max(1, shard.width), mu=mu, sigma=sigma, **options)
        self._check_sigma(torch.as_tensor(values[1]))  # of all classes, so that all processes raise the same error
        self.num_classes = shard.num_classes
        for name in ("mu", "rho"):
            value = shard.join(getattr(self, name).detach()[: shard.width].clone())
            setattr(self, name, nn.Parameter(value) if self.gaussians == "learned" else value)

    @torch.no_grad()
    def write(self, mu: Tensor, sigma: Tensor) -> None:
        for tensor, value in ((self.mu, mu), (self.rho, self._rho(sigma))):
            part: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a tensor in __init__
            part.copy_(value)

    @torch.no_grad()
    def set_gaussians(self, mu: Any, sigma: Any) -> None:
        mu, sigma = (per_class(name, v, self.num_classes) for name, v in (("mu", mu), ("sigma", sigma)))
        self._check_sigma(sigma)
        self.write(mu[self.shard.classes], sigma[self.shard.classes])

    def local(self) -> tuple[Tensor, Tensor]:
        """mu and sigma of the local classes."""
        rho = local(self.rho, "rho")
        return local(self.mu, "mu"), self.sigma_min + (rho if rho.dtype == torch.float64 else rho.float()).exp()

    def fit_gaussians(self, batches: Iterable[Any]) -> GaussianLogits:
        raise ValueError("Gaussians of a sharded head are fitted by the head: head.fit_gaussians(batches)")

    @torch.no_grad()
    def track(self, x: Tensor, keep: Tensor | None = None) -> None:
        if self.gaussians == "tracked" and self.training:
            d = x.to(checks.compute_dtype(self.mu)) - local(self.mu, "mu")
            self._step(_sums(d, keep), len(d) if keep is None else keep.sum())

    @torch.no_grad()
    def track_linear(self, h: Tensor, parameters: Parameters, keep: Tensor | None) -> None:
        """`track` on x = linear(h), of which only a tile exists at a time."""
        h, parameters = parameters._replace(sigma=parameters.mu, lam=0.0).cast_for(h)
        mu = parameters.mu
        sums = torch.zeros(2, len(mu), dtype=torch.float64, device=mu.device)
        for at, own in tiles(len(h), len(mu), h.device.type):
            d = parameters.x(h[at], own).to(mu.dtype) - mu[own]
            sums[:, own] += _sums(d, None if keep is None else keep[at])
        self._step(sums, len(h) if keep is None else keep.sum())

    def _step(self, sums: Tensor, rows: Tensor | int) -> None:
        mu, sigma = (t.detach() for t in self.local())
        n = torch.as_tensor(rows, device=sums.device)
        self._move(mu, local(self.rho, "rho"), sigma, n, sums[0], sums[1])

    def current(self, x: Tensor, target: Tensor | None = None, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
        if self.gaussians == "tracked" and self.training and torch.is_grad_enabled():
            self.track(x.detach())
        mu, sigma = checks.as_gaussians(x, *self.local(), self.lam)
        return (mu.clone() if self.gaussians == "tracked" else mu), sigma


def _sums(d: Tensor, keep: Tensor | None) -> Tensor:
    """Sums of d and of its square over the rows, (2, columns)."""
    if keep is not None:
        d = torch.where(keep[:, None], d, 0.0)
    return torch.stack([d.sum(0, dtype=torch.float64), (d * d).sum(0, dtype=torch.float64)])


SHARDED: dict[type[nn.Module], type[ShardedSoftmaxHead]] = {
    SoftmaxHead: ShardedSoftmaxHead,
    GSoftmaxHead: ShardedGSoftmaxHead,
}


def sharded_class(head: type[nn.Module], shard: str) -> type[ShardedSoftmaxHead]:
    """The sharded class of a head, for `head_options.shard`.

    head, shard: `SoftmaxHead` or `GSoftmaxHead`, and "class", the only way to split a head

    >>> sharded_class(SoftmaxHead, "class").__name__
    'ShardedSoftmaxHead'
    """
    checks.check_choice("shard", shard, ("class",))
    if head not in SHARDED:
        names = " and ".join(cls.__name__ for cls in SHARDED)
        raise ValueError(f"shard={shard!r} is for {names}, got {head.__name__}")
    return SHARDED[head]
