"""Cross entropy over sharded classes: tiled forward pass, all-reduced sums, tiled backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import checks, kernels
from ..checks import Options
from ..kernels.linear import FLOAT32_SUM, add_product
from .collectives import all_reduce, gather_rows, reduce_rows
from .shard import ClassShard

# A tile of x: elements, and classes at most.  In tiles of few rows, adding to dW would dominate the work.
TILE = {"cuda": (1 << 26, 1 << 16), "cpu": (1 << 20, 1 << 13)}


def column_tiles(columns: int, device: str) -> Iterator[slice]:
    width = TILE.get(device, TILE["cpu"])[1]
    for start in range(0, columns, width):
        yield slice(start, min(start + width, columns))


def tiles(rows: int, columns: int, device: str) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of every tile of x, those of the same columns one after another; none if x is empty."""
    for own in column_tiles(columns, device):
        height = max(1, TILE.get(device, TILE["cpu"])[0] // (own.stop - own.start))
        for start in range(0, rows, height):
            yield slice(start, min(start + height, rows)), own


class Parameters(NamedTuple):
    """The parameters of some classes."""

    weight: Tensor  # (c, D)
    bias: Tensor | None  # (c,)
    mu: Tensor  # (c,)
    sigma: Tensor  # (c,)
    lam: float

    def cast_for(self, h: Tensor) -> tuple[Tensor, Parameters]:
        """h and the parameters, cast as autocast would for a linear layer; mu and sigma in the compute dtype."""
        weight, bias, mu, sigma, lam = self
        device = h.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            h, weight = h.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        mu, sigma = checks.as_gaussians_for(len(weight), h.dtype, h.device, mu, sigma, lam)
        return h, Parameters(weight, bias, mu, sigma, lam)

    def select(self, index: Tensor) -> Parameters:
        weight, bias, mu, sigma = (None if t is None else t.index_select(0, index) for t in self[:4])
        assert weight is not None and mu is not None and sigma is not None
        return Parameters(weight, bias, mu, sigma, self.lam)

    def x(self, h: Tensor, own: slice) -> Tensor:
        with torch.autocast(h.device.type, enabled=False):
            return F.linear(h, self.weight[own], None if self.bias is None else self.bias[own])

    def z(self, x: Tensor, own: slice) -> Tensor:
        return kernels.logits(x, self.mu[own], self.sigma[own], self.lam)


class Sample(NamedTuple):
    """Sampled local classes."""

    classes: Tensor  # (c,) local indices, ascending
    is_target: Tensor  # (c,) bool
    probability: float  # with which each class that is not a target was sampled


@dataclass
class Targets:
    """y in the local columns.  With class indices, row i of y is `row_weight` at its `column` if that is `here`, plus
    `every` in all columns; with probabilities it is prob * prob_weight + every.  Class weights, label smoothing and the
    inverse probabilities of sampled classes are included."""

    divisor: Tensor  # () of reduction="mean"
    every: Tensor | None = None  # (c,)
    shift: Tensor | None = None  # (c,) log(1/pi) of sampled classes
    keep: Tensor | None = None  # (N,) rows that are not ignored
    column: Tensor | None = None  # (N,)
    here: Tensor | None = None  # (N,)
    row_weight: Tensor | None = None  # (N,)
    total: Tensor | None = None  # (N,) sum of y over the classes of all processes
    prob: Tensor | None = None  # (N, c)
    prob_weight: Tensor | None = None  # (c,)

    @classmethod
    def of(cls, target: Tensor, options: Options, shard: ClassShard, sample: Sample | None, like: Tensor) -> Targets:
        """target: (N,) indices of all classes, or (N, c) probabilities of the local ones; like: gives the dtype"""
        class_weight, ignore_index, _, smoothing = options
        n, classes = len(target), shard.num_classes
        w = None if class_weight is None else class_weight.to(like.device, like.dtype)
        local_w = like.new_ones(shard.width) if w is None else w[shard.classes]
        every = local_w * (smoothing / classes) if smoothing > 0 else None
        shift = None
        if sample is not None:
            inverse = torch.where(sample.is_target, like.new_ones(()), 1 / sample.probability)
            shift = inverse.log()
            every = None if every is None else every[sample.classes] * inverse
        if target.is_floating_point():
            divisor, prob_weight = like.new_tensor(float(n)), local_w * (1 - smoothing)
            return cls(divisor, every, shift, prob=target, prob_weight=prob_weight)
        keep = target != ignore_index
        valid = keep & (target >= 0) & (target < classes)
        of_row = like.new_ones(n) if w is None else w[torch.where(valid, target, 0)]
        # Labels on a GPU are not checked: one that is out of range makes the loss nan.
        of_row = torch.where(keep, torch.where(valid, of_row, torch.nan), 0.0)
        column = target - shard.start
        here = valid & (column >= 0) & (column < shard.width)
        if sample is not None and len(sample.classes):
            column = torch.searchsorted(sample.classes, column.clamp(0, shard.width - 1))
        row_weight = of_row * (1 - smoothing)
        total = torch.where(keep, row_weight + (smoothing / classes) * (classes if w is None else w.sum()), 0.0)
        return cls(of_row.sum(), every, shift, keep, torch.where(here, column, 0), here, row_weight, total)

    def sums(self, z: Tensor, at: slice, own: slice) -> tuple[Tensor, Tensor]:
        """Sums of y z and of y over the columns of a tile, (rows,) each."""
        if self.prob is not None:
            y = self._dense(z, at, own)
            assert y is not None
            return (y * z).sum(1), y.sum(1)
        here, column, weight = self._sparse(at, own)
        y = torch.where(here, weight, 0.0)
        yz = torch.where(here, weight * z.gather(1, column[:, None])[:, 0], 0.0)
        if self.every is not None and self.keep is not None:
            every, keep = self.every[own], self.keep[at]
            raw = z if self.shift is None else z - self.shift[own]
            yz = yz + torch.where(keep, (raw * every).sum(1), 0.0)
            y = y + torch.where(keep, every.sum(), 0.0)
        return yz, y

    def subtract(self, d: Tensor, f: Tensor, at: slice, own: slice) -> Tensor:
        """d - f y of a tile, in place."""
        y = self._dense(d, at, own)
        if y is not None:
            d.addcmul_(y, f[:, None], value=-1)
        if self.prob is None:
            here, column, weight = self._sparse(at, own)
            d.scatter_add_(1, column[:, None], torch.where(here, -f * weight, 0.0)[:, None])
        return d

    def _dense(self, z: Tensor, at: slice, own: slice) -> Tensor | None:
        """The part of y that lies in all columns: (rows, columns), (1, columns) or None."""
        every = None if self.every is None else self.every[own][None]
        if self.prob is None or self.prob_weight is None:
            return every
        y = self.prob[at, own].to(z.dtype) * self.prob_weight[own]
        return y if every is None else y + every

    def _sparse(self, at: slice, own: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Which rows have their target in the tile, its column there, and its y."""
        assert self.column is not None and self.here is not None and self.row_weight is not None
        column = self.column[at] - own.start
        here = self.here[at] & (column >= 0) & (column < own.stop - own.start)
        return here, torch.where(here, column, 0), self.row_weight[at]


class Call(NamedTuple):
    """What all processes agree on in a call of the loss."""

    shard: ClassShard
    counts: list[int]  # rows of every process
    need_dh: bool  # on some process
    lam: float
    reduction: str
    exact: bool  # no process has sampled classes


def row_maximum(z: Tensor) -> Tensor:
    """The largest z of every row; a finite number where there is none, because -inf - -inf is not 0."""
    low = torch.finfo(z.dtype).min
    return z.amax(1).clamp_(min=low) if z.shape[1] else z.new_full((len(z),), low)


def _work_on(z: Tensor, x: Tensor, shift: Tensor | None, own: slice) -> Tensor:
    """z plus the shift of sampled classes, to be overwritten: new memory costs as much as the arithmetic."""
    if shift is not None:
        return z + shift[own] if z is x else z.add_(shift[own])
    return z.clone() if z is x else z


def _about(sums: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Sums of exp(z - old), of y (z - old) and of y, with `new` in place of `old`."""
    down = old - new
    return torch.stack([sums[0] * down.exp(), sums[1] + torch.where(sums[2] == 0, 0.0, sums[2] * down), sums[2]])


class CrossEntropy(torch.autograd.Function):
    """Losses from the local columns and from sums over all processes.

    With M the largest z of a row, S = sum exp(z - M), T = sum y (z - M) and A = sum y, over all classes,

        loss = A log S - T,        dz = A exp(z - M)/S - y.

    Each process computes them for the local columns about its own maximum, and the differences of the maxima combine
    them: no number as large as z itself is subtracted from the loss.  Sampled classes have log(1/pi) added to z and y
    multiplied by 1/pi; sum y is then only an estimate Q of A, and the loss gains (A - Q) M.

    z and its backward pass are kernels; the steps between are plain torch, because the fused kernels turn x into losses
    in one launch, and here a reduction is needed between the sums and the losses.
    """

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, bias: Tensor | None, mu: Tensor, sigma: Tensor, h_all: Tensor, plan: Any
    ) -> Tensor:
        targets, call = plan
        n, group = len(h_all), call.shard.group
        parameters = Parameters(weight, bias, mu, sigma, call.lam)
        top = sigma.new_full((n,), torch.finfo(sigma.dtype).min)
        sums = sigma.new_zeros(3, n)
        every_tile = list(tiles(n, len(weight), h_all.device.type))
        x = None
        for at, own in every_tile:
            x = parameters.x(h_all[at], own)
            z = _work_on(parameters.z(x, own), x, targets.shift, own)
            largest = row_maximum(z)
            targeted = targets.sums(z.sub_(largest[:, None]), at, own)
            part = torch.stack([z.exp_().sum(1), *targeted])
            new = torch.maximum(top[at], largest)
            sums[:, at] = _about(sums[:, at], top[at], new) + _about(part, largest, new)
            top[at] = new
        most = all_reduce(top.clone(), group, "max", dist.ReduceOp.MAX)
        # sum y is known on every process unless the target is given as probabilities or classes are sampled
        used = 3 if targets.prob is not None or not call.exact else 2
        sums = all_reduce(_about(sums, top, most)[:used].contiguous(), group, "sums")
        all_y = sums[2] if targets.total is None else targets.total
        rows = all_y * sums[0].log() - sums[1]
        if not call.exact:
            rows = rows + (all_y - sums[2]) * most
        if targets.keep is not None:
            rows = torch.where(targets.keep, rows, 0.0)
        ctx.plan, ctx.one_tile = plan, len(every_tile) == 1
        ctx.save_for_backward(weight, bias, mu, sigma, h_all, most, sums[0], all_y, x if ctx.one_tile else None)
        if call.reduction == "none":
            return rows.split(call.counts)[call.shard.rank].clone()
        return rows.sum() if call.reduction == "sum" else rows.sum() / targets.divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, bias, mu, sigma, h, most, total, all_y, x_kept = ctx.saved_tensors
        (targets, call), (_, want_w, want_b, want_mu, want_sigma, *_) = ctx.plan, ctx.needs_input_grad
        shard, lam, dtype, device = call.shard, call.lam, sigma.dtype, h.device.type
        parameters = Parameters(weight, bias, mu, sigma, lam)
        f = grad.to(dtype)
        if call.reduction == "none":
            f = gather_rows(f, call.counts, shard.group, "row gradients")
        elif call.reduction == "mean":
            f = torch.where(targets.divisor == 0, 0.0, f / targets.divisor)  # all rows ignored: loss nan, gradient 0
        f = f.expand(len(h))
        if targets.keep is not None:
            f = torch.where(targets.keep, f, 0.0)
        scale = f * all_y / total
        dh = torch.zeros(h.shape, dtype=dtype, device=h.device) if call.need_dh else None
        dweight = torch.zeros_like(weight) if want_w else None
        dbias, dmu, dsigma = sigma.new_zeros(3, len(weight)).unbind()
        with torch.autocast(device, enabled=False):
            for own in column_tiles(len(weight), device):
                tile_dweight: Tensor | None = None
                exact = 4 * weight[own].numel() <= FLOAT32_SUM
                for at, _ in tiles(len(h), own.stop - own.start, device):
                    x = x_kept if ctx.one_tile else parameters.x(h[at], own)
                    z = _work_on(parameters.z(x, own), x, targets.shift, own)
                    d = z.sub_(most[at, None]).exp_().mul_(scale[at, None])
                    d = targets.subtract(d, f[at], at, own)  # dz
                    dx: Tensor | None
                    if lam:
                        need = True, want_mu, want_sigma
                        dx, *parts = kernels.logits_backward(d, x, mu[own], sigma[own], lam, need)
                        for sums, part in zip((dmu, dsigma), parts, strict=True):
                            if part is not None:
                                sums[own] += part
                    else:
                        dx = d.to(x.dtype)
                    assert dx is not None
                    if dh is not None:
                        dh[at] += torch.mm(dx, weight[own])
                    if want_w:
                        tile_dweight = add_product(tile_dweight, dx, h[at], exact)
                    if want_b:
                        dbias[own] += dx.sum(0, dtype=dtype)
                if dweight is not None and tile_dweight is not None:
                    dweight[own] = tile_dweight
        if dh is not None:
            dh = reduce_rows(dh, call.counts, shard.group, "dh").to(h.dtype)
            dh = dh * shard.processes if shard.averaged else dh
        return (
            dh,
            dweight,
            dbias.to(bias.dtype) if want_b else None,
            dmu if want_mu else None,
            dsigma if want_sigma else None,
            None,
            None,
        )


class GatherRows(torch.autograd.Function):
    """h of all processes; the backward pass sums its gradient over them and returns the local rows."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, counts: list[int], shard: ClassShard) -> Tensor:
        ctx.counts, ctx.shard = counts, shard
        return h.view_as(h) if shard.processes == 1 else gather_rows(h, counts, shard.group, "h")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shard = ctx.shard
        dh = grad.to(checks.compute_dtype(grad))  # half precision is summed in float32
        dh = reduce_rows(dh, ctx.counts, shard.group, "dh").to(grad.dtype)
        return (dh * shard.processes if shard.averaged else dh), None, None
