"""Cross entropy over classes that nobody holds all of: tiles of x, sums exchanged, gradients by tiles again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import checks, equations
from ..kernels.linear import FLOAT32_SUM, add_product
from .wire import _all_reduce, _gather_rows, _return_rows

if TYPE_CHECKING:
    from .head import ClassShard

# A tile of x: elements, and classes at most.  A tile of few rows would make adding to dW the larger part of the work.
TILE = {"cuda": (1 << 26, 1 << 16), "cpu": (1 << 20, 1 << 13)}


@dataclass
class _Plan:
    """What the loss of own columns is made of.  With index targets, row i of y is `own` at its `column` where that is
    `mine`, plus `every` on all columns; with probabilities it is prob * prob_weight + every.  Class weights and the
    inverse probabilities of drawn classes are inside."""

    shard: ClassShard
    counts: list[int]
    wanted: bool  # somebody needs dh
    lam: float
    reduction: str
    exact: bool  # no classes are drawn, on any process
    every: Tensor | None = None  # (c,)
    shift: Tensor | None = None  # (c,) log(1/pi) of drawn classes
    keep: Tensor | None = None  # (N,) rows that count
    column: Tensor | None = None  # (N,)
    mine: Tensor | None = None  # (N,)
    own: Tensor | None = None  # (N,)
    all_y: Tensor | None = None  # (N,) sum of y over all classes of all processes
    prob: Tensor | None = None  # (N, c)
    prob_weight: Tensor | None = None  # (c,)
    divisor: Tensor | None = None  # () of reduction="mean"

    def weighted(self, z: Tensor, at: slice, own: slice) -> tuple[Tensor, Tensor]:
        """Sums over the columns of a tile of y z and of y, (rows,) each."""
        if self.prob is not None:
            y = self.dense(z, at, own)
            assert y is not None
            return (y * z).sum(1), y.sum(1)
        assert self.keep is not None and self.own is not None
        here, column = self._here(at, own)
        y = torch.where(here, self.own[at], 0.0)
        yz = torch.where(here, self.own[at] * z.gather(1, column[:, None])[:, 0], 0.0)
        if self.every is not None:
            every, keep = self.every[own], self.keep[at]
            raw = z if self.shift is None else z - self.shift[own]
            yz = yz + torch.where(keep, (raw * every).sum(1), 0.0)
            y = y + torch.where(keep, every.sum(), 0.0)
        return yz, y

    def dense(self, z: Tensor, at: slice, own: slice) -> Tensor | None:
        """The part of y that lies on all columns: (rows, columns), (1, columns) or None."""
        every = None if self.every is None else self.every[own][None]
        if self.prob is None:
            return every
        assert self.prob_weight is not None
        y = self.prob[at, own].to(z.dtype) * self.prob_weight[own]
        return y if every is None else y + every

    def _here(self, at: slice, own: slice) -> tuple[Tensor, Tensor]:
        """Which rows have their target in the tile, and in which of its columns."""
        assert self.column is not None and self.mine is not None
        column = self.column[at] - own.start
        here = self.mine[at] & (column >= 0) & (column < own.stop - own.start)
        return here, torch.where(here, column, 0)

    def subtract(self, d: Tensor, f: Tensor, at: slice, own: slice) -> Tensor:
        """d - f y, in place."""
        y = self.dense(d, at, own)
        if y is not None:
            d.addcmul_(y, f[:, None], value=-1)
        if self.prob is None:
            assert self.own is not None
            here, column = self._here(at, own)
            d.scatter_add_(1, column[:, None], torch.where(here, -f * self.own[at], 0.0)[:, None])
        return d


def _prepared(
    h: Tensor, weight: Tensor, bias: Tensor | None, mu: Tensor, sigma: Tensor, lam: float
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """What autocast would make of a linear layer's arguments; mu and sigma in the dtype of the arithmetic."""
    device = h.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        h, weight = h.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    mu, sigma = checks.as_gaussians_for(len(weight), h.dtype, h.device, mu, sigma, lam)
    return weight, bias, mu, sigma, h


def _linear(h: Tensor, weight: Tensor, bias: Tensor | None, own: slice) -> Tensor:
    with torch.autocast(h.device.type, enabled=False):
        return F.linear(h, weight, None if bias is None else bias[own])


def _column_tiles(columns: int, device: str) -> Iterator[slice]:
    width = TILE.get(device, TILE["cpu"])[1]
    for start in range(0, columns, width):
        yield slice(start, min(start + width, columns))


def _tiles(rows: int, columns: int, device: str) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of every tile of x, those of the same columns in a row; none where x is empty."""
    for own in _column_tiles(columns, device):
        height = max(1, TILE.get(device, TILE["cpu"])[0] // (own.stop - own.start))
        for start in range(0, rows, height):
            yield slice(start, min(start + height, rows)), own


def _top(z: Tensor) -> Tensor:
    """The largest z of every row; a finite number where there is none, because -inf - -inf is not 0."""
    low = torch.finfo(z.dtype).min
    return z.amax(1).clamp_(min=low) if z.shape[1] else z.new_full((len(z),), low)


def _about(sums: Tensor, top: Tensor, new: Tensor) -> Tensor:
    """Sums of exp(z - top), of y (z - top) and of y, with `new` in the place of top."""
    down = top - new
    return torch.stack([sums[0] * down.exp(), sums[1] + torch.where(sums[2] == 0, 0.0, sums[2] * down), sums[2]])


class _CrossEntropy(torch.autograd.Function):
    """Losses from own columns and what the processes exchange about every row.

    With M the largest z of a row, S = sum exp(z - M), T = sum y (z - M) and A = sum y, over all classes,

        loss = A log S - T,        dz = A exp(z - M)/S - y.

    Each process finds them for its own columns about its own maximum; differences of maxima then bring them together,
    so nothing of the size of z itself is ever subtracted from the loss.  Of drawn classes z gains the shift log(1/pi)
    and y the factor 1/pi; sum y is then only an estimate Q of A, and the loss has (A - Q) M more.

    The steps are plain torch: the fused kernels turn x into losses in one go, and here the processes have to speak
    between the sums and the losses.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        mu: Tensor,
        sigma: Tensor,
        h_all: Tensor,
        plan: _Plan,
    ) -> Tensor:
        n, group = len(h_all), plan.shard.group
        top = sigma.new_full((n,), torch.finfo(sigma.dtype).min)
        sums = sigma.new_zeros(3, n)
        tiles = list(_tiles(n, len(weight), h_all.device.type))
        x = None
        for at, own in tiles:
            x = _linear(h_all[at], weight[own], bias, own)
            z = equations.logits(x, mu[own], sigma[own], plan.lam)
            if plan.shift is not None:
                z = z + plan.shift[own]
            here = _top(z)
            z = z - here[:, None]
            part = torch.stack([z.exp().sum(1), *plan.weighted(z, at, own)])
            new = torch.maximum(top[at], here)
            sums[:, at] = _about(sums[:, at], top[at], new) + _about(part, here, new)
            top[at] = new
        most = _all_reduce(top.clone(), group, "max", dist.ReduceOp.MAX)
        # y is known to all processes unless it was given as probabilities or drawn
        used = 3 if plan.prob is not None or not plan.exact else 2
        sums = _all_reduce(_about(sums, top, most)[:used].contiguous(), group, "sums")
        all_y = sums[2] if plan.all_y is None else plan.all_y
        rows = all_y * sums[0].log() - sums[1]
        if not plan.exact:
            rows = rows + (all_y - sums[2]) * most
        if plan.keep is not None:
            rows = torch.where(plan.keep, rows, 0.0)
        ctx.plan, ctx.one_tile = plan, len(tiles) == 1
        ctx.save_for_backward(weight, bias, mu, sigma, h_all, most, sums[0], all_y, x if ctx.one_tile else None)
        if plan.reduction == "none":
            return rows.split(plan.counts)[plan.shard.rank].clone()
        assert plan.divisor is not None
        return rows.sum() if plan.reduction == "sum" else rows.sum() / plan.divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, bias, mu, sigma, h, most, total, all_y, x_kept = ctx.saved_tensors
        plan, (_, want_w, want_b, want_mu, want_sigma, *_) = ctx.plan, ctx.needs_input_grad
        shard = plan.shard
        dtype, n, lam = sigma.dtype, len(h), plan.lam
        f = grad.to(dtype)
        if plan.reduction == "none":
            f = _gather_rows(f, plan.counts, shard.group, "row gradients")
        elif plan.reduction == "mean":
            f = torch.where(plan.divisor == 0, 0.0, f / plan.divisor)  # no row counts: the loss is nan, no gradient
        f = f.expand(n)
        if plan.keep is not None:
            f = torch.where(plan.keep, f, 0.0)
        scale = f * all_y / total
        dh = torch.zeros(h.shape, dtype=dtype, device=h.device) if plan.wanted else None
        columns: dict[str, list[Tensor]] = {"weight": [], "bias": [], "mu": [], "sigma": []}
        with torch.autocast(h.device.type, enabled=False):
            for own in _column_tiles(len(weight), h.device.type):
                dweight: Tensor | None = None
                dbias, dmu, dsigma = sigma.new_zeros(3, own.stop - own.start).unbind()
                exact = 4 * weight[own].numel() <= FLOAT32_SUM
                for at, _ in _tiles(n, own.stop - own.start, h.device.type):
                    x = x_kept if ctx.one_tile else _linear(h[at], weight[own], bias, own)
                    z = equations.logits(x, mu[own], sigma[own], lam)
                    if plan.shift is not None:
                        z = z + plan.shift[own]
                    d = (z - most[at, None]).exp_().mul_(scale[at, None])
                    d = plan.subtract(d, f[at], at, own)  # dz
                    if lam:
                        # u is held as in the distribution function, so that a masked output (-inf) gives 0, not nan
                        bound = equations.U_MAX[dtype] * sigma[own]
                        u = torch.clamp(x.to(dtype) - mu[own], -bound, bound) / sigma[own]
                        e = (u * u).mul_(-0.5).exp_().mul_(d).mul_(lam / math.sqrt(2 * math.pi) / sigma[own])
                        dmu -= e.sum(0)
                        dsigma -= (e * u).sum(0)
                        d = d + e
                    dx = d.to(x.dtype)
                    if dh is not None:
                        dh[at] += torch.mm(dx, weight[own])
                    if want_w:
                        dweight = add_product(dweight, dx, h[at], exact)
                    if want_b:
                        dbias += dx.sum(0, dtype=dtype)
                if want_w:
                    found = torch.zeros_like(weight[own]) if dweight is None else dweight.to(weight.dtype)
                    columns["weight"].append(found)
                columns["bias"].append(dbias)
                columns["mu"].append(dmu)
                columns["sigma"].append(dsigma)
        if dh is not None:
            dh = _return_rows(dh, plan.counts, shard.group, "dh").to(h.dtype)
            if shard.averaged:
                dh = dh * shard.processes
        whole = {name: torch.cat(parts) if parts else None for name, parts in columns.items()}
        if not len(weight):
            whole = {"weight": torch.zeros_like(weight), **dict.fromkeys(("bias", "mu", "sigma"), sigma.new_zeros(0))}
        return (
            dh,
            whole["weight"] if want_w else None,
            whole["bias"].to(bias.dtype) if want_b and bias is not None and whole["bias"] is not None else None,
            whole["mu"] if want_mu else None,
            whole["sigma"] if want_sigma else None,
            None,
            None,
        )


class _GatherRows(torch.autograd.Function):
    """h of all processes; its gradient is added up over them and goes back to the rows' owners."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, counts: list[int], shard: ClassShard) -> Tensor:
        ctx.counts, ctx.shard = counts, shard
        return h.view_as(h) if shard.processes == 1 else _gather_rows(h, counts, shard.group, "h")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shard = ctx.shard
        dh = grad.to(checks.compute_dtype(grad))  # sums of half precision are made in float32
        dh = _return_rows(dh, ctx.counts, shard.group, "dh").to(grad.dtype)
        return (dh * shard.processes if shard.averaged else dh), None, None
