"""One step of tracked Gaussians on a GPU, as one Triton kernel.

With d = x - mu, sums over the n rows that are not ignored, and momentum m, the step of `GaussianLogits.track` is

    shift = sum d / n
    mu <- mu + m shift
    variance <- (1 - m) sigma^2 + m (sum d^2 / n - m shift^2)
    rho <- log(max(sqrt(variance) - sigma_min, low)),        sigma = sigma_min + exp(rho).

As torch operations this would be dozens of launches on a few numbers each.  Here a program has a tile of classes and
loops over all rows: x is read once, programs are independent, and results are bit-identical.  Sums are in float32, the
rest in float64.  No GPU synchronization.
"""

# Kernels have no Python types, and neither have the decorators that make them.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..checks import under_transform
from .launching import (
    DTYPES,
    TYPES,
    Call,
    Plan,
    calls,
    cdiv,
    launch,
    on_its_device,
    power_of_2,
    processors,
    remember,
    unsupported_device,
)
from .triton_ce import column_offsets

_LABELS = (torch.int64, torch.int32)
# One program has all rows of its classes.  Beyond this many, torch's operations use more programs.
MOST_ROWS = 1 << 14


@triton.jit
def _finite(v):
    return tl.abs(v) < float("inf")  # NaN is not


@triton.jit(do_not_specialize=["N", "ignore"])
def _track_kernel(
    x, target, mu, rho, fresh_mu, fresh_sigma,
    N, C, sx_n, sx_c, st_n, m, m_rest, sigma_min, sigma_min_rest, low, ignore,
    LABELS: tl.constexpr, UNIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Update mu and rho of a tile of classes in place; fresh_mu and fresh_sigma are the values after the step.

    m and sigma_min are passed as two numbers each, whose sum has float64 precision: Triton passes numbers as float32.
    """
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = cols < C
    old_mu = tl.load(mu + cols, mask=inside, other=0.0)
    old_rho = tl.load(rho + cols, mask=inside, other=0.0)
    # Sums are kept per lane until the end, which also keeps their rounding errors small.
    sums = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    squares = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    counted = tl.zeros([BLOCK_N], tl.int32)
    for n in range(0, N, BLOCK_N):
        rows = n + tl.arange(0, BLOCK_N)
        counts = rows < N
        if LABELS:
            t = tl.load(target + rows.to(tl.int64) * st_n, mask=counts, other=0).to(tl.int64)
            counts = counts & (t != ignore)
        counted += counts.to(tl.int32)
        both = counts[:, None] & inside[None, :]
        at = x + rows.to(tl.int64)[:, None] * sx_n + column_offsets(cols, sx_c, UNIT)[None, :]
        d = tl.load(at, mask=both, other=0.0).to(tl.float32) - old_mu[None, :]
        d = tl.where(both, d, 0.0)
        sums += d
        squares += d * d

    zero = tl.zeros([BLOCK_C], tl.float64)
    count = zero + tl.sum(counted, 0)
    divisor = tl.maximum(count, zero + 1.0)
    momentum = zero + m + m_rest
    floor = zero + sigma_min + sigma_min_rest
    sigma = (floor + tl.exp(old_rho.to(tl.float64))).to(tl.float32).to(tl.float64)
    shift = tl.sum(sums, 0).to(tl.float64) / divisor
    variance = (1.0 - momentum) * sigma * sigma
    variance += momentum * (tl.sum(squares, 0).to(tl.float64) / divisor - momentum * shift * shift)
    # A class with NaN or infinity keeps its Gaussian, and so do all classes if every row is ignored.
    seen = _finite(shift) & _finite(variance) & (count > 0)
    above = tl.sqrt(tl.where(seen & (variance > 0), variance, 0.0)) - floor
    new_rho = tl.log(tl.maximum(above, zero + low)).to(tl.float32)
    new_rho = tl.where(seen, new_rho, old_rho)
    new_mu = tl.where(seen, (old_mu.to(tl.float64) + momentum * shift).to(tl.float32), old_mu)
    new_sigma = (floor + tl.exp(new_rho.to(tl.float64))).to(tl.float32)
    tl.debug_barrier()  # several threads may read the same class: synchronize before writing
    tl.store(mu + cols, new_mu, mask=inside)
    tl.store(rho + cols, new_rho, mask=inside)
    tl.store(fresh_mu + cols, new_mu, mask=inside)
    tl.store(fresh_sigma + cols, new_sigma, mask=inside)


def plan(rows: int, classes: int, device: torch.device) -> Plan:
    """The tile for x of this size."""
    # Narrow tiles give more programs; where there are enough, wide tiles read longer pieces of a row.
    block_c, most = (16, 512) if classes <= 32 * processors(device) else (64, 64)
    block_n = max(16, min(most, power_of_2(rows)))
    return Plan(block_n, block_c, rows, warps=min(8, max(1, block_n * block_c // 512)))


@lru_cache
def _parts(v: float) -> tuple[float, float]:
    """v as the sum of two float32."""
    high = ctypes.c_float(v).value
    return high, v - high


def supported(x: Tensor, target: Tensor | None, mu: Tensor, rho: Tensor) -> bool:
    """Whether `track` supports x, (rows, classes) or with more dimensions after the classes, and its labels."""
    if (
        torch.compiler.is_compiling()
        or under_transform()
        or unsupported_device(x)
        or x.dtype not in DTYPES
        or x.numel() == 0
    ):
        return False
    classes = x.shape[min(1, x.ndim - 1)]
    rows = x.numel() // classes
    if rows > MOST_ROWS or (target is not None and (target.dtype not in _LABELS or target.numel() != rows)):
        return False
    for v in (mu, rho):
        # torch raises a clear error for writing to an inference tensor
        if v.dtype is not torch.float32 or v.shape != (classes,) or not v.is_contiguous() or v.is_inference():
            return False
    return all(
        type(v) in TYPES and v.layout is torch.strided and v.device == x.device and not v.is_neg()
        for v in (x, mu, rho, x if target is None else target)
    )


@on_its_device
def track(
    x: Tensor,  # (rows, classes)
    target: Tensor | None,  # (rows,)
    mu: Tensor,  # (classes,), changed in place
    rho: Tensor,
    momentum: float,
    sigma_min: float,
    low: float,
    ignore_index: int = -100,
    cut: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of mu and rho towards the rows of x that are not ignored; mu and sigma after it, in new tensors.

    `supported` says for which arguments; `GaussianLogits.track` is the same in torch operations.
    low: the smallest exp(rho)
    """
    labels = None if target is None else (target.stride(), target.dtype)
    key = ("track", x.shape, x.stride(), x.dtype, x.device, labels, ignore_index, cut)
    call = calls.get(key)
    if call is None:
        call = remember(key, _track_call(x, target, ignore_index, cut))
    fresh_mu, fresh_sigma = torch.empty_like(mu), torch.empty_like(mu)
    numbers = (*call.before, *_parts(float(momentum)), *_parts(float(sigma_min)), low, *call.after)
    torch.autograd.graph.increment_version((mu, rho))  # autograd then sees that saved tensors were changed
    arrays = (x, target, mu, rho, fresh_mu, fresh_sigma)
    launch(call, _track_kernel, call.programs, arrays, numbers, call.block.warps)
    return fresh_mu, fresh_sigma


def _track_call(x: Tensor, target: Tensor | None, ignore_index: int, cut: Plan | None) -> Call:
    (n, c), (sx_n, sx_c) = x.shape, x.stride()
    st_n = 0 if target is None else target.stride(0)
    if cut is None:
        cut = plan(n, c, x.device)
    tiles = cdiv(c, cut.block_c)
    return Call(
        block=cut, flags=(), before=(n, c, sx_n, sx_c, st_n),
        after=(ignore_index, target is not None, sx_c == 1, cut.block_n, cut.block_c), tiles=tiles, programs=tiles,
    )  # fmt: skip
