"""Max pooling, batch normalisation and GELU as a few Triton kernels, for training on a GPU.

With p = x, or x after 2x2 max pooling, with r an optional residual, and means over all pixels of a channel,

    xhat = (p - mean) rstd        h = xhat + bias + r        y = h Phi(h)
    g = dy (Phi(h) + h phi(h))    dbias = sum g              dr = g
    dp = rstd (g - mean of g - xhat * mean of (g xhat)),

and dx is dp at the place of each maximum and 0 elsewhere.  All of this is memory-bound, so what counts is how often a
tensor is read or written:

* forward: one kernel reads x, writes p and the index of the maximum (a byte), and reduces; one reads p and writes y;
* backward: one kernel reads dy and p and reduces; one reads them again and writes all of dx, zeros included.

Only p, that byte, and two numbers per channel are saved.  Channels-last memory is a (pixels, channels) table.  To
reduce, a program walks down a tile of it and keeps, for every element of the tile, a running mean and the squares
around it (Welford's algorithm: subtracting squares of means would lose the variance where the mean is large).  A small
kernel combines the partial results in a fixed order: no atomics, bit-identical results, no GPU synchronization.
"""

# Kernels have no Python types, and neither have the decorators that make them.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl

    from ..checks import under_transform
    from ..kernels import launching
    from ..kernels.triton_ce import ROOT, gaussian_term
except ImportError:  # no Triton: `usable` says so
    triton = None

_jit: Any = (lambda function: function) if triton is None else triton.jit
_on_its_device: Any = (lambda function: function) if triton is None else launching.on_its_device
# Set explicitly, because the default of the second is about to change.
_OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": True}
_WIDE: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": True}


@_jit
def _distribution(h):
    """Phi(h), to 1e-7, and h * ROOT, whose negative square is the exponent of phi in base 2."""
    w, u = gaussian_term(h, 0.0, ROOT, 0.5, -0.9999998807907104, 7)
    return tl.where(h < -5.5, 0.0, w + 0.5), u  # w stops falling there


@_jit
def _of_channels(stats, bias, cols, C):
    """mean, rstd and bias of some channels."""
    there = cols < C
    mean = tl.load(stats + cols, mask=there, other=0.0)
    rstd = tl.load(stats + C + cols, mask=there, other=0.0)
    return mean, rstd, tl.load(bias + cols, mask=there, other=0.0).to(tl.float32)


@_jit
def _larger(v, which, new, place: tl.constexpr):
    """The first maximum stays, and NaN beats everything."""
    better = (new > v) | (new != new)
    return tl.where(better, new, v), tl.where(better, place, which)


@_jit
def _statistics_kernel(
    x, p, index, parts, N, C, groups, steps,
    H: tl.constexpr, W: tl.constexpr, POOL: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Pools, and writes the count, mean and squares around it of a program's pixels; parts: (3, groups, C).

    N counts pixels, after pooling; H and W are those of x.  The first pixel of p is subtracted from all values: where
    the mean is large, their differences keep their digits.
    """
    across = tl.cdiv(C, BLOCK_C)
    group = tl.program_id(0) // across
    cols = tl.program_id(0) % across * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    lines = tl.arange(0, BLOCK_P)[:, None]
    mean = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    squares = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    count = tl.zeros((BLOCK_P, 1), tl.float32)
    origin = tl.load(x + cols, mask=cols < C, other=0.0).to(tl.float32)
    if POOL:
        origin = tl.maximum(origin, tl.load(x + C + cols, mask=cols < C, other=0.0).to(tl.float32))
        origin = tl.maximum(origin, tl.load(x + W * C + cols, mask=cols < C, other=0.0).to(tl.float32))
        origin = tl.maximum(origin, tl.load(x + (W + 1) * C + cols, mask=cols < C, other=0.0).to(tl.float32))
    for step in range(0, steps):
        rows = (step * groups + group) * BLOCK_P + lines
        there = rows < N
        ok = there & (cols < C)
        if POOL:
            left = rows % (W // 2)
            above = rows // (W // 2)
            corner = (above // (H // 2) * H + above % (H // 2) * 2) * W + left * 2
            spot = x + corner.to(tl.int64) * C + cols
            raw0 = tl.load(spot, mask=ok, other=0.0)
            raw1 = tl.load(spot + C, mask=ok, other=0.0)
            raw2 = tl.load(spot + W * C, mask=ok, other=0.0)
            raw3 = tl.load(spot + (W + 1) * C, mask=ok, other=0.0)
            v = raw0.to(tl.float32)
            which = tl.zeros((BLOCK_P, BLOCK_C), tl.int32)
            v, which = _larger(v, which, raw1.to(tl.float32), 1)
            v, which = _larger(v, which, raw2.to(tl.float32), 2)
            v, which = _larger(v, which, raw3.to(tl.float32), 3)
            place = rows.to(tl.int64) * C + cols
            tl.store(p + place, v.to(p.dtype.element_ty), mask=ok)
            tl.store(index + place, which.to(tl.int8), mask=ok)
        else:
            v = tl.load(x + rows.to(tl.int64) * C + cols, mask=ok, other=0.0).to(tl.float32)
        # Only the last step may reach past the end, so all others have counted step + 1 values.
        v -= origin
        off = tl.where(ok, v - mean, 0.0)
        mean += off * (1.0 / (step + 1.0))
        squares += off * (v - mean)
        count += tl.where(there, 1.0, 0.0)
    total = tl.sum(count, 0)[None, :]
    middle = (tl.sum(count * mean, 0)[None, :]) / total
    off = mean - middle
    spread = tl.sum(squares + count * off * off, 0)[None, :]
    spot = parts + group * C + cols
    tl.store(spot, total + tl.zeros_like(middle), mask=cols < C)
    tl.store(spot + groups * C, middle, mask=cols < C)
    tl.store(spot + 2 * groups * C, spread, mask=cols < C)


@_jit
def _merge_statistics_kernel(
    p, parts, stats, running_mean, running_var, N, C, groups, momentum, eps,
    BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """mean and rstd, stats: (2, C), from all programs' parts, and a step of the running statistics."""
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    lines = tl.arange(0, BLOCK_G)[:, None]
    there = cols < C
    ok = (lines < groups) & there
    spot = parts + lines * C + cols
    count = tl.load(spot, mask=ok, other=0.0)
    mean = tl.load(spot + groups * C, mask=ok, other=0.0)
    squares = tl.load(spot + 2 * groups * C, mask=ok, other=0.0)
    middle = tl.sum(count * mean, 0)[None, :] / N
    off = mean - middle
    spread = tl.sum(squares + count * off * off, 0)[None, :]  # 0 of those that are not there
    middle += tl.load(p + cols, mask=there, other=0.0).to(tl.float32)
    tl.store(stats + cols, middle, mask=there)
    tl.store(stats + C + cols, 1.0 / tl.sqrt(spread / N + eps), mask=there)
    old = tl.load(running_mean + cols, mask=there, other=0.0).to(tl.float32)
    new = (1.0 - momentum) * old + momentum * middle
    tl.store(running_mean + cols, new.to(running_mean.dtype.element_ty), mask=there)
    old = tl.load(running_var + cols, mask=there, other=0.0).to(tl.float32)
    new = (1.0 - momentum) * old + momentum * (spread / (N - 1.0))
    tl.store(running_var + cols, new.to(running_var.dtype.element_ty), mask=there)


@_jit
def _output_kernel(
    p, residual, stats, bias, y, N, C,
    RESIDUAL: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """y = gelu((p - mean) rstd + bias + r)."""
    across = tl.cdiv(C, BLOCK_C)
    cols = tl.program_id(0) % across * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    rows = tl.program_id(0) // across * BLOCK_P + tl.arange(0, BLOCK_P)[:, None]
    there = cols < C
    ok = (rows < N) & there
    mean, rstd, shift = _of_channels(stats, bias, cols, C)
    place = rows.to(tl.int64) * C + cols
    h = (tl.load(p + place, mask=ok, other=0.0).to(tl.float32) - mean) * rstd + shift
    if RESIDUAL:
        h += tl.load(residual + place, mask=ok, other=0.0).to(tl.float32)
    below, _ = _distribution(h)
    tl.store(y + place, (h * below).to(y.dtype.element_ty), mask=ok)


@_jit
def _slope(dy, p, residual, place, ok, mean, rstd, shift, RESIDUAL: tl.constexpr):
    """g and xhat of the elements at `place`; g is 0 where dy is not loaded."""
    xhat = (tl.load(p + place, mask=ok, other=0.0).to(tl.float32) - mean) * rstd
    h = xhat + shift
    if RESIDUAL:
        h += tl.load(residual + place, mask=ok, other=0.0).to(tl.float32)
    below, u = _distribution(h)
    g = tl.load(dy + place, mask=ok, other=0.0).to(tl.float32) * (below + h * (0.3989422804014327 * tl.exp2(-u * u)))
    return g, xhat


@_jit
def _sums_kernel(
    dy, p, residual, stats, bias, parts, N, C, groups, steps,
    RESIDUAL: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The sums of g and g xhat over a program's pixels; parts: (2, groups, C)."""
    across = tl.cdiv(C, BLOCK_C)
    group = tl.program_id(0) // across
    cols = tl.program_id(0) % across * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    lines = tl.arange(0, BLOCK_P)[:, None]
    there = cols < C
    mean, rstd, shift = _of_channels(stats, bias, cols, C)
    sum_g = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    sum_gx = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for step in range(0, steps):
        rows = (step * groups + group) * BLOCK_P + lines
        ok = (rows < N) & there
        g, xhat = _slope(dy, p, residual, rows.to(tl.int64) * C + cols, ok, mean, rstd, shift, RESIDUAL)
        sum_g += g
        sum_gx += g * xhat
    spot = parts + group * C + cols
    tl.store(spot, tl.sum(sum_g, 0)[None, :], mask=there)
    tl.store(spot + groups * C, tl.sum(sum_gx, 0)[None, :], mask=there)


@_jit
def _merge_sums_kernel(parts, means, dbias, N, C, groups, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr):
    """dbias, and the means of g and g xhat, means: (2, C), from all programs' parts."""
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    lines = tl.arange(0, BLOCK_G)[:, None]
    there = cols < C
    ok = (lines < groups) & there
    spot = parts + lines * C + cols
    sum_g = tl.sum(tl.load(spot, mask=ok, other=0.0), 0)[None, :]
    sum_gx = tl.sum(tl.load(spot + groups * C, mask=ok, other=0.0), 0)[None, :]
    tl.store(dbias + cols, sum_g.to(dbias.dtype.element_ty), mask=there)
    tl.store(means + cols, sum_g / N, mask=there)
    tl.store(means + C + cols, sum_gx / N, mask=there)


@_jit
def _gradient_kernel(
    dy, p, index, residual, stats, bias, means, dx, dresidual, N, C,
    H: tl.constexpr, W: tl.constexpr, POOL: tl.constexpr, RESIDUAL: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dx, and the gradient of r.  With pooling, N counts windows, those cut off by an odd border included."""
    across = tl.cdiv(C, BLOCK_C)
    cols = tl.program_id(0) % across * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    rows = tl.program_id(0) // across * BLOCK_P + tl.arange(0, BLOCK_P)[:, None]
    there = cols < C
    ok = (rows < N) & there
    mean, rstd, shift = _of_channels(stats, bias, cols, C)
    mean_g = tl.load(means + cols, mask=there, other=0.0)
    mean_gx = tl.load(means + C + cols, mask=there, other=0.0)
    if POOL:
        wide: tl.constexpr = (W + 1) // 2
        high: tl.constexpr = (H + 1) // 2
        left = rows % wide
        above = rows // wide
        image = above // high
        above = above % high
        place = ((image * (H // 2) + above) * (W // 2) + left).to(tl.int64) * C + cols
        whole = ok & (left < W // 2) & (above < H // 2)
        g, xhat = _slope(dy, p, residual, place, whole, mean, rstd, shift, RESIDUAL)
        dp = (rstd * (g - mean_g - xhat * mean_gx)).to(dx.dtype.element_ty)
        which = tl.load(index + place, mask=whole, other=-1)
        spot = dx + ((image * H + above * 2) * W + left * 2).to(tl.int64) * C + cols
        right = ok & (left * 2 + 1 < W)
        below = above * 2 + 1 < H
        nothing = tl.zeros_like(dp)
        tl.store(spot, tl.where(which == 0, dp, nothing), mask=ok)
        tl.store(spot + C, tl.where(which == 1, dp, nothing), mask=right)
        tl.store(spot + W * C, tl.where(which == 2, dp, nothing), mask=ok & below)
        tl.store(spot + (W + 1) * C, tl.where(which == 3, dp, nothing), mask=right & below)
        ok = whole
    else:
        place = rows.to(tl.int64) * C + cols
        g, xhat = _slope(dy, p, residual, place, ok, mean, rstd, shift, RESIDUAL)
        dp = rstd * (g - mean_g - xhat * mean_gx)
        tl.store(dx + place, dp.to(dx.dtype.element_ty), mask=ok)
    if RESIDUAL:
        tl.store(dresidual + place, g.to(dresidual.dtype.element_ty), mask=ok)


class Plan(NamedTuple):
    """Tiling of the (pixels, channels) table."""

    block_p: int  # pixels of a tile
    block_c: int  # channels of a tile
    across: int  # tiles in a row
    groups: int  # programs that reduce one column of tiles, each every groups-th of them
    steps: int  # tiles of each of these programs
    block_g: int  # a power of 2, at least `groups`


def plan(pixels: int, channels: int, processors: int) -> Plan:
    """Tiles of 2048 elements, 16 to a thread, and about four programs to a multiprocessor where sums are taken.

    >>> plan(1024 * 15 * 15, 64, 132)
    Plan(block_p=32, block_c=64, across=1, groups=512, steps=15, block_g=512)
    """
    block_c = min(64, max(16, 1 << (channels - 1).bit_length()))
    block_p = 2048 // block_c
    across = -(-channels // block_c)
    tiles = -(-pixels // block_p)
    # One program merges all groups at once, so that there must not be too many.
    groups = min(tiles, max(1, min(512, 4 * processors) // across))
    return Plan(block_p, block_c, across, groups, -(-tiles // groups), max(16, 1 << (groups - 1).bit_length()))


def _empty(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Channels last on the device of `like`, for images of its type unless said otherwise."""
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device, memory_format=torch.channels_last)


@_on_its_device
def _forward(
    x: Tensor, bias: Tensor, residual: Tensor | None, norm: Norm, pool: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """y, p, index and stats."""
    n, c, h, w = x.shape
    shape = (n, c, h // 2, w // 2) if pool else (n, c, h, w)
    pixels = n * shape[2] * shape[3]
    cut = plan(pixels, c, launching.processors(x.device))
    p, index = (_empty(shape, x), _empty(shape, x, torch.int8)) if pool else (x, None)
    y = _empty(shape, x)
    parts = torch.empty((3, cut.groups, c), dtype=torch.float32, device=x.device)
    stats = torch.empty((2, c), dtype=torch.float32, device=x.device)
    _statistics_kernel[(cut.groups * cut.across,)](
        x, p, index, parts, pixels, c, cut.groups, cut.steps,
        h if pool else 0, w if pool else 0, pool, cut.block_p, cut.block_c,
        maxnreg=128, **_OPTIONS,  # so that four programs fit on a multiprocessor
    )  # fmt: skip
    _merge_statistics_kernel[(-(-c // 16),)](
        p, parts, stats, norm.mean, norm.var, pixels, c, cut.groups, norm.momentum, norm.eps, cut.block_g, 16, **_WIDE
    )
    _output_kernel[(-(-pixels // cut.block_p) * cut.across,)](
        p, residual, stats, bias, y, pixels, c, residual is not None, cut.block_p, cut.block_c, **_OPTIONS
    )
    return y, p, index, stats


@_on_its_device
def _backward(
    p: Tensor, index: Tensor | None, stats: Tensor, bias: Tensor, residual: Tensor | None, dy: Tensor, shape: torch.Size
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx, dbias and the gradient of the residual; shape: of x."""
    n, c, h, w = shape
    pool = index is not None
    pixels = p.shape[0] * p.shape[2] * p.shape[3]
    cut = plan(pixels, c, launching.processors(p.device))
    dy = dy.contiguous(memory_format=torch.channels_last)
    parts = torch.empty((2, cut.groups, c), dtype=torch.float32, device=p.device)
    means = torch.empty((2, c), dtype=torch.float32, device=p.device)
    dbias, dx = torch.empty_like(bias), _empty(shape, p)
    dresidual = None if residual is None else _empty(p.shape, residual)
    _sums_kernel[(cut.groups * cut.across,)](
        dy, p, residual, stats, bias, parts, pixels, c, cut.groups, cut.steps,
        residual is not None, cut.block_p, cut.block_c, **_OPTIONS,
    )  # fmt: skip
    _merge_sums_kernel[(-(-c // 16),)](parts, means, dbias, pixels, c, cut.groups, cut.block_g, 16, **_WIDE)
    windows = n * ((h + 1) // 2) * ((w + 1) // 2) if pool else pixels
    _gradient_kernel[(-(-windows // cut.block_p) * cut.across,)](
        dy, p, index, residual, stats, bias, means, dx, dresidual, windows, c,
        h if pool else 0, w if pool else 0, pool, residual is not None, cut.block_p, cut.block_c, **_OPTIONS,
    )  # fmt: skip
    return dx, dbias, dresidual


class _NormGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, residual: Tensor | None, norm: Norm, pool: bool) -> Tensor:
        y, p, index, stats = _forward(x, bias, residual, norm, pool)
        ctx.save_for_backward(p, index, stats, bias, residual)
        ctx.shape = x.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(*ctx.saved_tensors, dy, ctx.shape), None, None


def usable(x: Tensor) -> bool:
    """Whether `norm_gelu` accepts x: on a GPU, channels last, float32 or half precision, not under torch.compile.

    >>> usable(torch.zeros(2, 3, 4, 4))
    False
    """
    if triton is None or torch.compiler.is_compiling() or under_transform():
        return False
    return (
        not launching.unsupported_device(x)
        and x.dtype in launching.DTYPES
        and x.dim() == 4
        and x.numel() > 0
        and x.numel() // x.shape[1] < 1 << 30  # pixels are counted in 32 bits
        and x.is_contiguous(memory_format=torch.channels_last)
    )


class Norm(NamedTuple):
    """State and options of a batch normalization without a weight."""

    mean: Tensor  # (C,) running mean, updated in place
    var: Tensor  # (C,) running variance, updated in place
    momentum: float
    eps: float


def norm_gelu(x: Tensor, bias: Tensor, norm: Norm, pool: bool = False, residual: Tensor | None = None) -> Tensor:
    """Optional 2x2 max pooling, batch normalization without a weight, an optional residual sum, GELU; in training.

    y = gelu((p - mean) / sqrt(var + eps) + bias + residual), p = max_pool2d(x, 2) or x; mean and var are those of this
    batch, over (N, H, W).  The running statistics take a step of size `momentum`, as in `nn.BatchNorm2d`.
    Arithmetic is in float32, y in x's type.  Gradients: x, bias, residual; once.

    x (N, C, H, W), see `usable` -> y (N, C, H, W), or (N, C, H // 2, W // 2) with `pool`; residual has y's shape.
    """
    if not usable(x):
        wanted = "channels last, float32, bfloat16 or float16, on a GPU with Triton"
        seen = f"{x.dtype} on {x.device} with shape {tuple(x.shape)} and strides {x.stride()}"
        raise ValueError(f"x must be {wanted}, got {seen}")
    n, c, h, w = x.shape
    shape = (n, c, h // 2, w // 2) if pool else (n, c, h, w)
    if shape[0] * shape[2] * shape[3] < 2:
        raise ValueError(f"x must leave more than one value per channel, got shape {tuple(x.shape)} and pool={pool}")
    for name, v in (("bias", bias), ("running_mean", norm.mean), ("running_var", norm.var)):
        if v.shape != (c,) or v.device != x.device or not v.is_contiguous():
            raise ValueError(f"{name} must be ({c},), contiguous, on {x.device}, got {tuple(v.shape)} on {v.device}")
    if residual is not None:
        if residual.shape != shape or residual.device != x.device:
            seen = f"{tuple(residual.shape)} on {residual.device}"
            raise ValueError(f"residual must be {shape} on {x.device}, got {seen}")
        residual = residual.contiguous(memory_format=torch.channels_last)
    return _NormGelu.apply(x, bias, residual, norm, pool)
