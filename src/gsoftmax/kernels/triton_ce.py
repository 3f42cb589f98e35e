"""Cross entropy of G-softmax on a GPU: Triton kernels, their launches, and operators for torch.compile.

With u = (x - mu) / sigma and z = x + lam * Phi(u), the loss of a row and its gradients are

    loss = b (lse - z_t) + sum_c k_c (lse - z_c)        lse = log sum_c exp z_c
    dz_c = (b + K) p_c - k_c - b [c = t]                K = sum_c k_c,  p_c = exp(z_c - lse)
    dx_c = dz_c (1 + lam phi(u_c) / sigma_c)
    dmu_c = -sum over rows of dz_c lam phi(u_c) / sigma_c, and dsigma_c is the same times u_c,

which covers every option: t is the label, b = (1 - smoothing) weight_t and k_c = smoothing / C weight_c; where targets
are probabilities y, b = 0 and k_c = weight_c ((1 - smoothing) y_c + smoothing / C).

The cost is reading x twice and writing dx once, closely followed by arithmetic: a GPU moves a bfloat16 in the time of
some twenty instructions, of which two or three may be special functions.  So

* lse is kept as m = max x and s = sum exp(z - m), which loses no digits where all x are large and costs no more: 1 / s
  goes into the row's factor;
* everything is in base 2, and all z are shifted by -lam / 2, to which softmax is invariant: the term added to x is then
  +-lam (1/2 - Phi(-|u|)), a subtraction and a sign;
* Phi(-t) = exp2(P(t)), P a polynomial fitted for the error of Phi: one special function where the usual erf
  polynomials take two, an exponential and a reciprocal.  phi takes another exp2 in the backward pass, and must hold
  far into the tail, because it is divided by sigma;
* a program keeps mu, sigma and the sums for their gradients in registers for a tile of classes, and loops over rows;
* a second small kernel combines the tiles of a row, and sums over groups of rows are added at the end, both in a fixed
  order: no atomics, bit-identical results.

There is no GPU synchronization, so a label outside of 0 ... C - 1 that is not `ignore_index` cannot raise an error: its
row's loss and gradient are NaN.
"""

# Kernels have no Python types, and neither have the decorators that make them.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..checks import Options, class_dim
from .autograd import Loss, apply
from .launching import (
    DTYPES,
    INTERPRETED,
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

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Kernels keep u times ROOT, so that exp(-u^2 / 2) is exp2(-u^2).
ROOT = tl.constexpr(0.8493218002880191)
# P is evaluated up to here; Phi(-t) is 1.6e-8 there, and constant beyond.
T_MAX = tl.constexpr(4.7)
# 1 / sigma must not overflow.
SIGMA_MIN = tl.constexpr(1e-30)

# The constants of the polynomials in `gaussian_term`, by degree; the errors of Phi are 3.2e-7, 1.4e-7 and 8e-8.  Degree
# 0 stands for tanh, where the error is 4e-4.
P_0 = {0: 0.0, 5: -1.0000008344650269, 6: -0.9999997019767761, 7: -0.9999998807907104}
# exp2(+-lam / 2), summed over all classes, must stay within float32.
LAM_MAX = 100.0


# -------------------------------------------------------------------------------------------------------------- kernels


if INTERPRETED:  # which runs no assembly

    @triton.jit
    def _tanh(v):
        e = tl.exp2(tl.abs(v) * -2.8853900817779268)
        return tl.where(v < 0, e - 1.0, 1.0 - e) / (1.0 + e)

else:

    @triton.jit
    def _tanh(v):
        """tanh in one instruction, with a relative error of 2^-11."""
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def gaussian_term(x, mu, r, half, c0, DEGREE: tl.constexpr):
    """log2(e) * lam * (Phi(u) - 1/2), which the distribution term adds to x in base 2, and u * ROOT.

    r = ROOT / sigma, half = log2(e) * lam / 2, c0 = P(0) + log2(2 * half).
    """
    if DEGREE == 0:
        u = tl.fma(x, r, -mu * r)
        w = half * _tanh(u * tl.fma(u * u, 0.0575888, 0.9405166))
    else:
        u = (x - mu) * r
        t = tl.minimum(tl.abs(u), T_MAX)
        if DEGREE == 5:
            a = tl.fma(t, -0.0011740528279915452, 0.014196811243891716)
            a = tl.fma(a, t, -0.08575449138879776)
            a = tl.fma(a, t, -0.6366927027702332)
            a = tl.fma(a, t, -1.3552968502044678)
        elif DEGREE == 6:
            a = tl.fma(t, 5.108963159727864e-05, -0.001490290043875575)
            a = tl.fma(a, t, 0.0149025684222579)
            a = tl.fma(a, t, -0.08645211905241013)
            a = tl.fma(a, t, -0.6363925933837891)
            a = tl.fma(a, t, -1.3553426265716553)
        else:
            a = tl.fma(t, 2.6569634428597055e-05, -0.0001436101010767743)
            a = tl.fma(a, t, -0.0009531560936011374)
            a = tl.fma(a, t, 0.014200792647898197)
            a = tl.fma(a, t, -0.08600437641143799)
            a = tl.fma(a, t, -0.6365213990211487)
            a = tl.fma(a, t, -1.3553295135498047)
        w = half - tl.exp2(tl.fma(a, t, c0))
        sign = (u.to(tl.int32, bitcast=True) >> 31) << 31
        w = (w.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
    return w, u


@triton.jit
def column_offsets(cols, stride, UNIT: tl.constexpr):
    """Offsets of columns, 64 bits wide where a stride may carry them past 2^31."""
    if UNIT:
        return cols
    else:
        return cols.to(tl.int64) * stride


@triton.jit
def _finish(
    rows, ok, top, total, dense, mass, x, target, mu, sigma, weight, stats, out, N, C, sx_n, sx_c, st_n,
    half, c0, keep, ignore,
    GAUSS: tl.constexpr, HARD: tl.constexpr, DENSE: tl.constexpr, WEIGHT: tl.constexpr, UNIT: tl.constexpr,
    REDUCTION: tl.constexpr, WHOLE: tl.constexpr, DEGREE: tl.constexpr,
):  # fmt: skip
    """Write the loss of rows, and for the backward pass m, 1 / s, b and K, from m and the sums over classes.

    stats: (N,) each of m, 1 / s, b for class indices, K where k is not 0; then, for the mean, its divisor.  out: the
    loss itself where the reduction is "none" or one program has all rows (WHOLE), else (2, N): losses, and shares in
    the divisor.  An ignored row has m = inf, so that p = 0, whatever its x.
    """
    depth = tl.log2(total)
    loss = tl.zeros_like(top)
    share = loss + 1.0
    spot = stats + rows
    if DENSE:
        loss = (mass * depth - dense) * LN2
    if HARD:
        t = tl.load(target + rows.to(tl.int64) * st_n, mask=ok, other=0).to(tl.int64)
        counts = t != ignore
        known = ok & counts & (t >= 0) & (t < C)
        t = tl.where(known, t, 0).to(tl.int32)
        xt = tl.load(x + rows.to(tl.int64) * sx_n + column_offsets(t, sx_c, UNIT), mask=known, other=0.0).to(tl.float32)
        zt = (xt - top) * LOG2E
        if GAUSS:
            mt = tl.load(mu + t, mask=known, other=0.0)
            rt = 1.0 / tl.maximum(tl.load(sigma + t, mask=known, other=1.0), SIGMA_MIN) * ROOT
            w, _ = gaussian_term(xt, mt, rt, half, c0, DEGREE)
            zt += w
        if WEIGHT:
            share = tl.load(weight + t, mask=known, other=0.0).to(tl.float32)
        share = tl.where(counts, tl.where(known, share, float("nan")), 0.0)
        b = share * keep
        loss = tl.where(counts, loss + b * (depth - zt) * LN2, 0.0)
        top = tl.where(counts, top, float("inf"))
        mass = tl.where(counts, mass, 0.0)
        tl.store(spot + 2 * N, b, mask=ok)
    tl.store(spot, top, mask=ok)
    tl.store(spot + N, 1.0 / total, mask=ok)
    if DENSE:
        tl.store(spot + (3 * N if HARD else 2 * N), mass, mask=ok)
    if WHOLE:
        loss = tl.sum(tl.where(ok, loss, 0.0), 0)
        if REDUCTION == "mean":
            divisor = tl.sum(tl.where(ok, share, 0.0), 0)
            tl.store(stats + (4 * N if HARD and DENSE else 3 * N), divisor)
            loss = loss / divisor
        tl.store(out, loss)
    else:
        tl.store(out + rows, loss, mask=ok)
        if REDUCTION == "mean":
            tl.store(out + N + rows, share, mask=ok)


@triton.jit
def _forward_rows(
    first, last, tile, T, x, target, mu, sigma, weight, parts, stats, out,
    N, C, sx_n, sx_c, st_n, st_c, half, c0, keep, spread, ignore,
    GAUSS: tl.constexpr, HARD: tl.constexpr, DENSE: tl.constexpr, WEIGHT: tl.constexpr, UNIT: tl.constexpr,
    REDUCTION: tl.constexpr, WHOLE: tl.constexpr, SINGLE: tl.constexpr, MASK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, DEGREE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    cols = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = cols < C
    if GAUSS:
        m = tl.load(mu + cols, mask=inside, other=0.0)[None, :]
        r = (1.0 / tl.maximum(tl.load(sigma + cols, mask=inside, other=1.0), SIGMA_MIN) * ROOT)[None, :]
    if DENSE:
        wc = tl.where(inside, 1.0, 0.0)
        if WEIGHT:
            wc = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    for n in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        rows = n + tl.arange(0, BLOCK_N)
        ok = rows < N
        at = x + rows.to(tl.int64)[:, None] * sx_n + column_offsets(cols, sx_c, UNIT)[None, :]
        if MASK:
            xs = tl.load(at, mask=ok[:, None] & inside[None, :], other=float("-inf")).to(tl.float32)
        else:
            xs = tl.load(at).to(tl.float32)
        top = tl.max(xs, 1)
        # Where all classes of the tile are masked, -inf - -inf would be NaN.
        z = xs - tl.where(top == float("-inf"), 0.0, top)[:, None]
        if GAUSS:
            w, _ = gaussian_term(xs, m, r, half, c0, DEGREE)
            z = tl.fma(z, LOG2E, w)
        else:
            z = z * LOG2E
        total = tl.sum(tl.exp2(z), 1)
        dense = total
        mass = total
        if DENSE:
            k = (spread * wc)[None, :] + tl.zeros([BLOCK_N, 1], tl.float32)
            if not HARD:
                at_y = target + rows.to(tl.int64)[:, None] * st_n + cols.to(tl.int64)[None, :] * st_c
                y = tl.load(at_y, mask=ok[:, None] & inside[None, :], other=0.0).to(tl.float32)
                k += keep * wc[None, :] * y
            # Past the last class z is -inf, and 0 * -inf would be NaN.
            dense = tl.sum(tl.where(inside[None, :], k * z, 0.0), 1)
            mass = tl.sum(k, 1)
        if SINGLE:
            _finish(
                rows, ok, top, total, dense, mass, x, target, mu, sigma, weight, stats, out, N, C, sx_n, sx_c, st_n,
                half, c0, keep, ignore, GAUSS, HARD, DENSE, WEIGHT, UNIT, REDUCTION, WHOLE, DEGREE,
            )  # fmt: skip
        else:
            part = parts + rows.to(tl.int64) * T + tile
            plane = N.to(tl.int64) * T
            tl.store(part, top, mask=ok)
            tl.store(part + plane, total, mask=ok)
            if DENSE:
                tl.store(part + 2 * plane, dense, mask=ok)
                tl.store(part + 3 * plane, mass, mask=ok)


@triton.jit(do_not_specialize=["N", "T", "rows_each", "ignore"])
def _forward_kernel(
    x, target, mu, sigma, weight, parts, stats, out,
    N, C, T, sx_n, sx_c, st_n, st_c, rows_each, half, c0, keep, spread, ignore,
    GAUSS: tl.constexpr, HARD: tl.constexpr, DENSE: tl.constexpr, WEIGHT: tl.constexpr, UNIT: tl.constexpr,
    REDUCTION: tl.constexpr, WHOLE: tl.constexpr, SINGLE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, DEGREE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of classes, `rows_each` rows: the loss where the tile is the whole row, else its parts (2 or 4, N, T)."""
    program = tl.program_id(0)
    tile = program % T
    first = (program // T) * rows_each
    last = tl.minimum(first + rows_each, N)
    # Masks cost instructions; only tiles at the edge need them.
    if not SINGLE and ((tile + 1) * BLOCK_C <= C) & ((last - first) % BLOCK_N == 0):
        _forward_rows(
            first, last, tile, T, x, target, mu, sigma, weight, parts, stats, out,
            N, C, sx_n, sx_c, st_n, st_c, half, c0, keep, spread, ignore, GAUSS, HARD, DENSE, WEIGHT, UNIT,
            REDUCTION, WHOLE, SINGLE, False, BLOCK_N, BLOCK_C, DEGREE, STAGES,
        )  # fmt: skip
    else:
        _forward_rows(
            first, last, tile, T, x, target, mu, sigma, weight, parts, stats, out,
            N, C, sx_n, sx_c, st_n, st_c, half, c0, keep, spread, ignore, GAUSS, HARD, DENSE, WEIGHT, UNIT,
            REDUCTION, WHOLE, SINGLE, True, BLOCK_N, BLOCK_C, DEGREE, STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["N", "T", "ignore"])
def _combine_kernel(
    x, target, mu, sigma, weight, parts, stats, out,
    N, C, T, sx_n, sx_c, st_n, half, c0, keep, ignore,
    GAUSS: tl.constexpr, HARD: tl.constexpr, DENSE: tl.constexpr, WEIGHT: tl.constexpr, UNIT: tl.constexpr,
    REDUCTION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, DEGREE: tl.constexpr,
):  # fmt: skip
    """The loss of rows from their parts (2 or 4, N, T): largest x, sum of exp2, the two sums over k."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ok = rows < N
    # Sums are kept per lane until the end: Triton 3.6 cannot compile a reduction inside such a loop.
    lanes = tl.full([BLOCK_N, BLOCK_T], float("-inf"), tl.float32)
    for t in range(0, T, BLOCK_T):
        tiles = t + tl.arange(0, BLOCK_T)
        both = ok[:, None] & (tiles < T)[None, :]
        part = parts + rows.to(tl.int64)[:, None] * T + tiles[None, :]
        lanes = tl.maximum(lanes, tl.load(part, mask=both, other=float("-inf")))
    top = tl.max(lanes, 1)
    plane = N.to(tl.int64) * T
    totals = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    denses = totals
    masses = totals
    for t in range(0, T, BLOCK_T):
        tiles = t + tl.arange(0, BLOCK_T)
        both = ok[:, None] & (tiles < T)[None, :]
        part = parts + rows.to(tl.int64)[:, None] * T + tiles[None, :]
        down = (tl.load(part, mask=both, other=float("-inf")) - top[:, None]) * LOG2E
        totals += tl.load(part + plane, mask=both, other=0.0) * tl.exp2(down)
        if DENSE:
            k = tl.load(part + 3 * plane, mask=both, other=0.0)
            denses += tl.where(both, tl.load(part + 2 * plane, mask=both, other=0.0) + k * down, 0.0)
            masses += k
    total = tl.sum(totals, 1)
    dense = tl.sum(denses, 1)
    mass = tl.sum(masses, 1)
    _finish(
        rows, ok, top, total, dense, mass, x, target, mu, sigma, weight, stats, out, N, C, sx_n, sx_c, st_n,
        half, c0, keep, ignore, GAUSS, HARD, DENSE, WEIGHT, UNIT, REDUCTION, False, DEGREE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["N", "at_divisor"])
def _reduce_kernel(rows, stats, out, N, at_divisor, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """Sum or mean of rows (2, N): losses and shares in the divisor."""
    loss = tl.zeros([BLOCK], tl.float32)
    share = tl.zeros([BLOCK], tl.float32)
    for n in range(0, N, BLOCK):
        at = n + tl.arange(0, BLOCK)
        loss += tl.load(rows + at, mask=at < N, other=0.0)
        if MEAN:
            share += tl.load(rows + N + at, mask=at < N, other=0.0)
    result = tl.sum(loss, 0)
    if MEAN:
        by = tl.sum(share, 0)
        tl.store(stats + at_divisor, by)
        result = result / by
    tl.store(out, result)


@triton.jit
def _backward_rows(
    first, last, tile, group, x, target, mu, sigma, weight, grad, stats, dx, dmu, dsigma,
    N, C, sx_n, sx_c, st_n, st_c, sd_n, sd_c, sg_n, half, c0, steep, keep, spread,
    GAUSS: tl.constexpr, HARD: tl.constexpr, DENSE: tl.constexpr, WEIGHT: tl.constexpr, UNIT: tl.constexpr,
    MEAN: tl.constexpr, EACH: tl.constexpr, NEED_X: tl.constexpr, NEED_MU: tl.constexpr, NEED_SIGMA: tl.constexpr,
    SINGLE: tl.constexpr, MASK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, DEGREE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    cols = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = cols < C
    if GAUSS:
        m = tl.load(mu + cols, mask=inside, other=0.0)[None, :]
        r = (1.0 / tl.maximum(tl.load(sigma + cols, mask=inside, other=1.0), SIGMA_MIN) * ROOT)[None, :]
        peak = tl.log2(r * steep)  # of lam * phi(0) / sigma
    if DENSE:
        wc = tl.where(inside, 1.0, 0.0)
        if WEIGHT:
            wc = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    if not EACH:
        g = tl.load(grad).to(tl.float32)
        if MEAN:
            by = tl.load(stats + (4 * N if HARD and DENSE else 3 * N))
            g = tl.where(by == 0.0, 0.0, g / by)  # every row is ignored
    sum_mu = tl.zeros([BLOCK_C], tl.float32)
    sum_sigma = tl.zeros([BLOCK_C], tl.float32)
    for n in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        rows = n + tl.arange(0, BLOCK_N)
        ok = rows < N
        at = x + rows.to(tl.int64)[:, None] * sx_n + column_offsets(cols, sx_c, UNIT)[None, :]
        if MASK:
            both = ok[:, None] & inside[None, :]
            xs = tl.load(at, mask=both, other=float("-inf")).to(tl.float32)
        else:
            xs = tl.load(at).to(tl.float32)
        if EACH:
            g = tl.load(grad + rows.to(tl.int64) * sg_n, mask=ok, other=0.0).to(tl.float32)
        top = tl.load(stats + rows, mask=ok, other=float("inf"))
        a = tl.zeros([BLOCK_N], tl.float32)
        if HARD:
            t = tl.load(target + rows.to(tl.int64) * st_n, mask=ok, other=-1).to(tl.int32)
            b = tl.load(stats + 2 * N + rows, mask=ok, other=0.0) * g
            a = b
        if DENSE:
            a += tl.load(stats + (3 * N if HARD else 2 * N) + rows, mask=ok, other=0.0) * g
        a *= tl.load(stats + N + rows, mask=ok, other=0.0)
        z = xs - top[:, None]
        if GAUSS:
            w, u = gaussian_term(xs, m, r, half, c0, DEGREE)
            z = tl.fma(z, LOG2E, w)
        else:
            z = z * LOG2E
        d = tl.exp2(z) * a[:, None]
        if DENSE:
            k = (spread * wc)[None, :] + tl.zeros([BLOCK_N, 1], tl.float32)
            if not HARD:
                at_y = target + rows.to(tl.int64)[:, None] * st_n + cols.to(tl.int64)[None, :] * st_c
                y = tl.load(at_y, mask=ok[:, None] & inside[None, :], other=0.0).to(tl.float32)
                k += keep * wc[None, :] * y
            d -= tl.where(top == float("inf"), 0.0, g)[:, None] * k
        if HARD:
            if SINGLE:
                d -= tl.where(cols[None, :] == t[:, None], b[:, None], 0.0)
            else:
                # Few tiles contain the label; the others skip the search.
                near = t - tile * BLOCK_C
                if tl.max(((near >= 0) & (near < BLOCK_C)).to(tl.int32), 0) > 0:
                    d -= tl.where(cols[None, :] == t[:, None], b[:, None], 0.0)
        dx_tile = d
        if GAUSS:
            if NEED_SIGMA:
                u = tl.maximum(u, -1e30)  # x = -inf: phi is 0 there, and 0 * inf would be NaN
            ds = d * tl.exp2(tl.fma(-u, u, peak))
            dx_tile = d + ds
            if NEED_MU:
                sum_mu += tl.sum(ds, 0)
            if NEED_SIGMA:
                sum_sigma += tl.sum(ds * u, 0)
        if NEED_X:
            at_dx = dx + rows.to(tl.int64)[:, None] * sd_n + column_offsets(cols, sd_c, UNIT)[None, :]
            if MASK:
                tl.store(at_dx, dx_tile.to(dx.dtype.element_ty), mask=both)
            else:
                tl.store(at_dx, dx_tile.to(dx.dtype.element_ty))
    part = group.to(tl.int64) * C + cols
    if NEED_MU:
        tl.store(dmu + part, -sum_mu, mask=inside)
    if NEED_SIGMA:
        tl.store(dsigma + part, -sum_sigma / ROOT, mask=inside)


@triton.jit(do_not_specialize=["N", "T", "rows_each"])
def _backward_kernel(
    x, target, mu, sigma, weight, grad, stats, dx, dmu, dsigma,
    N, C, T, sx_n, sx_c, st_n, st_c, sd_n, sd_c, sg_n, rows_each, half, c0, steep, keep, spread,
    GAUSS: tl.constexpr, HARD: tl.constexpr, DENSE: tl.constexpr, WEIGHT: tl.constexpr, UNIT: tl.constexpr,
    MEAN: tl.constexpr, EACH: tl.constexpr, NEED_X: tl.constexpr, NEED_MU: tl.constexpr, NEED_SIGMA: tl.constexpr,
    SINGLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, DEGREE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx of a tile of classes and `rows_each` rows, and the group's parts (groups, C) of dmu and dsigma."""
    program = tl.program_id(0)
    tile = program % T
    # Last rows first: they are still in the cache after the forward pass.
    groups = tl.num_programs(0) // T
    group = groups - 1 - program // T
    first = group * rows_each
    last = tl.minimum(first + rows_each, N)
    if not SINGLE and ((tile + 1) * BLOCK_C <= C) & ((last - first) % BLOCK_N == 0):
        _backward_rows(
            first, last, tile, group, x, target, mu, sigma, weight, grad, stats, dx, dmu, dsigma,
            N, C, sx_n, sx_c, st_n, st_c, sd_n, sd_c, sg_n, half, c0, steep, keep, spread,
            GAUSS, HARD, DENSE, WEIGHT, UNIT, MEAN, EACH, NEED_X, NEED_MU, NEED_SIGMA, SINGLE, False,
            BLOCK_N, BLOCK_C, DEGREE, STAGES,
        )  # fmt: skip
    else:
        _backward_rows(
            first, last, tile, group, x, target, mu, sigma, weight, grad, stats, dx, dmu, dsigma,
            N, C, sx_n, sx_c, st_n, st_c, sd_n, sd_c, sg_n, half, c0, steep, keep, spread,
            GAUSS, HARD, DENSE, WEIGHT, UNIT, MEAN, EACH, NEED_X, NEED_MU, NEED_SIGMA, SINGLE, True,
            BLOCK_N, BLOCK_C, DEGREE, STAGES,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ launching


# For rows of more than one tile: block_n, block_c, rows, warps, stages, registers.  `python -m benchmarks.gpu --tune`
# measures them.
TUNED = {
    ("forward", 2): (2, 512, 64, 1, 3, None),
    ("forward", 4): (4, 256, 64, 1, 3, None),
    ("backward", 2): (2, 256, 128, 1, 1, None),
    ("backward", 4): (2, 1024, 256, 4, 1, None),
}


# The largest lam for which Phi is computed by tanh, by the dtype of x: lam * 4e-4 is below what x was rounded by.
FAST = {torch.bfloat16: 4.0, torch.float16: 1.0}
# Up to this many classes a tile holds whole rows, and launching takes longer than arithmetic.
FEW_CLASSES = 1024


def is_fast(x: Tensor, lam: float) -> bool:
    """Whether Phi may be as inexact as tanh makes it, which is an advantage where arithmetic takes longest."""
    return 0 < lam <= FAST.get(x.dtype, 0.0) and x.shape[class_dim(x)] > FEW_CLASSES


def plan(kind: str, rows: int, classes: int, itemsize: int, device: torch.device, fast: bool = False) -> Plan:
    """The tile for x of this size; `kind` is "forward" or "backward"."""
    # Where x is half precision, an error of Phi of 3e-7 is far below what x itself was rounded by.
    degree = 0 if fast else 7 if itemsize == 4 else 5 if kind == "forward" else 6
    block_n, block_c, each, warps, stages, registers = TUNED[kind, itemsize]
    if classes <= FEW_CLASSES:
        # A tile holds whole rows, several where they are short.
        block_c, stages, registers = max(16, power_of_2(classes)), 1, None
        block_n = min(max(1, 2048 // block_c), power_of_2(rows))
        warps = min(4, max(1, block_n * block_c // 512))
        if kind == "backward" and rows <= 1024 and classes >= 256:
            # Summing over all rows in one program saves launches.
            block_c, block_n = 32, min(128, power_of_2(rows))
            warps = max(1, block_n * block_c // 512)
            return Plan(block_n, block_c, cdiv(rows, block_n) * block_n, warps, 1, degree, None)
    # Filling the GPU several times over matters more than long loops over rows.
    waves = 2 if kind == "backward" and classes <= block_c else 8
    groups = max(1, waves * processors(device) // cdiv(classes, block_c))
    each = min(each, block_n * max(1, cdiv(rows, groups * block_n)))
    return Plan(block_n, block_c, max(block_n, each // block_n * block_n), warps, stages, degree, registers)


@lru_cache
def _constants(lam: float, degree: int) -> tuple[float, float, float]:
    """half, c0 and steep of the kernels: log2(e) lam / 2, P(0) + log2(log2(e) lam), and lam phi(0) / ROOT."""
    if lam == 0:
        return 0.0, 0.0, 0.0
    twice = lam * LOG2E.value
    return twice / 2, P_0[degree] + math.log2(twice), lam / (math.sqrt(2 * math.pi) * ROOT.value)


@on_its_device
def forward(
    x: Tensor,  # (N, C)
    target: Tensor,  # (N,) or (N, C)
    mu: Tensor,
    sigma: Tensor,
    lam: float,
    options: Options,
    dtype: torch.dtype,
    cut: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss in `dtype`, and what the backward pass needs: m, 1 / s, b, K and the divisor (see `_finish`)."""
    device = x.device
    weight, ignore_index, reduction, label_smoothing = options
    key = (
        x.shape, x.stride(), target.stride(), x.dtype, target.dtype, None if weight is None else weight.dtype, dtype,
        device, lam != 0, is_fast(x, lam), ignore_index, reduction, label_smoothing, cut,
    )  # fmt: skip
    call = calls.get(key)
    if call is None:
        call = remember(key, _forward_call(x, target, lam, options, cut))
    n, tiles, cut = x.shape[0], call.tiles, call.block
    stats = torch.empty(call.size + (reduction == "mean"), dtype=torch.float32, device=device)
    loss = torch.empty(n if reduction == "none" else (), dtype=dtype, device=device)
    rows = loss if call.whole or reduction == "none" else torch.empty((2, n), dtype=torch.float32, device=device)
    dense = call.flags[2]
    parts = None if tiles == 1 else torch.empty((4 if dense else 2, n, tiles), dtype=torch.float32, device=device)
    arrays = (x, target, mu, sigma, weight, parts, stats, rows)
    half, c0, _ = _constants(lam, cut.degree)
    numbers = (*call.before, half, c0, *call.after)
    launch(call, _forward_kernel, call.programs, arrays, numbers, cut.warps, cut.registers)
    if tiles > 1:
        block_t = min(1024, power_of_2(tiles))
        block_n = max(1, min(1024 // block_t, power_of_2(n)))
        keep = 1.0 - label_smoothing
        numbers = (*call.before[:6], half, c0, keep, ignore_index, *call.flags, block_n, block_t, cut.degree)
        launch(call, _combine_kernel, cdiv(n, block_n), arrays, numbers, 4)
    if rows is not loss:
        if n > 1 << 17:  # too long for one program
            rows = rows.sum(1, keepdim=True)
        numbers = (rows.shape[1], call.size, reduction == "mean", min(2048, power_of_2(n)))
        launch(call, _reduce_kernel, 1, (rows, stats, loss), numbers, 8)
    return loss, stats


def _arguments(
    kind: str, x: Tensor, target: Tensor, lam: float, options: Options, cut: Plan | None
) -> tuple[bool, bool, Plan, tuple[int, ...]]:
    """HARD and DENSE, the plan, and the scalar arguments that both kernels begin with."""
    (n, c), strides, hard = x.shape, target.stride(), target.ndim == 1
    if cut is None:
        cut = plan(kind, n, c, x.element_size(), x.device, is_fast(x, lam))
    sizes = (n, c, cdiv(c, cut.block_c), *x.stride(), strides[0], 0 if hard else strides[1])
    return hard, not hard or options.label_smoothing > 0, cut, sizes


def _forward_call(x: Tensor, target: Tensor, lam: float, options: Options, cut: Plan | None) -> Call:
    weight, ignore_index, reduction, smoothing = options
    hard, dense, cut, sizes = _arguments("forward", x, target, lam, options, cut)
    n, c, tiles, _, sx_c, *_ = sizes
    single, whole = tiles == 1, tiles == 1 and n <= cut.block_n and reduction != "none"
    flags = (lam != 0, hard, dense, weight is not None, sx_c == 1, reduction)
    after = (
        1.0 - smoothing, smoothing / c, ignore_index, *flags, whole, single,
        cut.block_n, cut.block_c, cut.degree, cut.stages,
    )  # fmt: skip
    return Call(
        block=cut, flags=flags, before=(*sizes, cut.rows), after=after, tiles=tiles,
        programs=tiles * cdiv(n, cut.rows), size=(2 + hard + dense) * n, whole=whole,
    )  # fmt: skip


@on_its_device
def backward(
    grad: Tensor,  # () or (N,)
    stats: Tensor,
    x: Tensor,
    target: Tensor,
    mu: Tensor,
    sigma: Tensor,
    lam: float,
    options: Options,
    need: Sequence[bool] = (True, True, True),
    dx: Tensor | None = None,
    cut: Plan | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx, dmu and dsigma, those that are needed; dx may be x itself."""
    if need[0] and dx is None:
        dx = torch.empty_like(x)
    device = x.device
    weight, _, reduction, label_smoothing = options
    key = (
        x.shape, x.stride(), target.stride(), None if dx is None else dx.stride(), grad.stride(), x.dtype, target.dtype,
        None if weight is None else weight.dtype, grad.dtype, device, lam != 0, is_fast(x, lam), reduction,
        label_smoothing, need, cut,
    )  # fmt: skip
    call = calls.get(key)
    if call is None:
        call = remember(key, _backward_call(grad, x, target, lam, options, need, dx, cut))
    (need_mu, need_sigma), groups = call.flags, call.groups
    dmu: Tensor | None
    dsigma: Tensor | None
    parts = None
    if groups > 1 and (need_mu or need_sigma):
        parts = torch.empty((need_mu + need_sigma, groups, x.shape[1]), dtype=torch.float32, device=device)
        dmu, dsigma = parts[0] if need_mu else None, parts[-1] if need_sigma else None
    else:
        dmu = torch.empty_like(mu) if need_mu else None
        dsigma = torch.empty_like(sigma) if need_sigma else None
    if need[0] or need_mu or need_sigma:
        arrays = (x, target, mu, sigma, weight, grad, stats, dx, dmu, dsigma)
        numbers = (*call.before, *_constants(lam, call.block.degree), *call.after)
        launch(call, _backward_kernel, call.programs, arrays, numbers, call.block.warps, call.block.registers)
    if parts is not None:
        sums = parts.sum(1).unbind()
        dmu, dsigma = sums[0] if need_mu else None, sums[-1] if need_sigma else None
    if need[1] and not need_mu:
        dmu = torch.zeros_like(mu)
    if need[2] and not need_sigma:
        dsigma = torch.zeros_like(sigma)
    return dx if need[0] else None, dmu, dsigma


def _backward_call(
    grad: Tensor, x: Tensor, target: Tensor, lam: float, options: Options, need: Sequence[bool], dx: Tensor | None,
    cut: Plan | None,
) -> Call:  # fmt: skip
    hard, dense, cut, sizes = _arguments("backward", x, target, lam, options, cut)
    n, c, tiles, _, sx_c, *_ = sizes
    need_mu, need_sigma, smoothing = need[1] and lam != 0, need[2] and lam != 0, options.label_smoothing
    sd_n, sd_c = (0, 1) if dx is None else dx.stride()
    after = (
        1.0 - smoothing, smoothing / c, lam != 0, hard, dense, options.weight is not None, sx_c == 1 and sd_c == 1,
        options.reduction == "mean", grad.ndim > 0, need[0], need_mu, need_sigma, tiles == 1,
        cut.block_n, cut.block_c, cut.degree, cut.stages,
    )  # fmt: skip
    groups, sg_n = cdiv(n, cut.rows), grad.stride(0) if grad.ndim else 0
    return Call(
        block=cut, flags=(need_mu, need_sigma), before=(*sizes, sd_n, sd_c, sg_n, cut.rows), after=after, tiles=tiles,
        groups=groups, programs=tiles * groups,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- autograd


@dataclass(slots=True)
class _Loss(Loss):
    """The eager path: minimal overhead between call and kernel."""

    dtype: torch.dtype
    stats: Tensor | None = None

    def early(self, x: Tensor) -> bool:
        return False

    def result(self, value: Tensor, x: Tensor) -> Tensor:
        return value

    def __call__(self, inputs: Sequence[Any], need: Sequence[bool], grad: Tensor | None = None) -> tuple[Any, ...]:
        x, mu, sigma = inputs
        if grad is None:
            loss, self.stats = forward(x, self.target, mu, sigma, self.lam, self.options, self.dtype)
            return loss, None, None, None
        assert self.stats is not None
        return None, *backward(grad, self.stats, x, self.target, mu, sigma, self.lam, self.options, need)


# For torch.compile, the same two functions as operators.

_FORWARD = (
    "(Tensor x, Tensor target, Tensor mu, Tensor sigma, float lam, Tensor? weight, SymInt ignore_index, "
    "str reduction, float label_smoothing, ScalarType dtype) -> (Tensor, Tensor)"
)
_BACKWARD = (
    "(Tensor grad, Tensor stats, Tensor x, Tensor target, Tensor mu, Tensor sigma, float lam, Tensor? weight, "
    "SymInt ignore_index, str reduction, float label_smoothing, bool need_x, bool need_mu, bool need_sigma) "
    "-> (Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("gsoftmax::cross_entropy", mutates_args=(), schema=_FORWARD)
def _forward_op(x, target, mu, sigma, lam, weight, ignore_index, reduction, label_smoothing, dtype):
    return forward(x, target, mu, sigma, lam, Options(weight, ignore_index, reduction, label_smoothing), dtype)


@_forward_op.register_fake
def _(x, target, mu, sigma, lam, weight, ignore_index, reduction, label_smoothing, dtype):
    n, hard = x.shape[0], not target.is_floating_point()
    size = (2 + hard + (not hard or label_smoothing > 0)) * n + (reduction == "mean")
    return x.new_empty((n,) if reduction == "none" else (), dtype=dtype), x.new_empty((size,), dtype=torch.float32)


@torch.library.custom_op("gsoftmax::cross_entropy_backward", mutates_args=(), schema=_BACKWARD)
def _backward_op(grad, stats, x, target, mu, sigma, lam, weight, ignore_index, reduction, label_smoothing, *need):
    need_x, need_mu, need_sigma = need
    options = Options(weight, ignore_index, reduction, label_smoothing)
    got = backward(grad, stats, x, target, mu, sigma, lam, options, need)
    # An operator must return tensors that share no memory.
    if need_mu and need_sigma:
        got = (got[0], got[1].clone(), got[2].clone())
    return tuple(x.new_empty(0, dtype=v.dtype) if g is None else g for g, v in zip(got, (x, mu, sigma), strict=True))


@_backward_op.register_fake
def _(grad, stats, x, target, mu, sigma, lam, weight, ignore_index, reduction, label_smoothing, *need):
    return tuple(
        torch.empty_like(v) if needed else v.new_empty(0) for v, needed in zip((x, mu, sigma), need, strict=True)
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, target, mu, sigma, lam, weight, *options, dtype = inputs
    ctx.save_for_backward(x, mu, sigma, target, weight, output[1])
    ctx.options = (lam, *options)
    ctx.mark_non_differentiable(output[1])


def _backward_of_op(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, mu, sigma, target, weight, stats = ctx.saved_tensors
    lam, *options = ctx.options
    need = (ctx.needs_input_grad[0], ctx.needs_input_grad[2], ctx.needs_input_grad[3])
    dx, dmu, dsigma = _backward_op(grad, stats, x, target, mu, sigma, lam, weight, *options, *need)
    return (
        dx if need[0] else None,
        None,
        dmu if need[1] else None,
        dsigma if need[2] else None,
        *(None,) * (len(ctx.options) + 2),
    )


_forward_op.register_autograd(_backward_of_op, setup_context=_save)


# ------------------------------------------------------------------------------------------------------------- the call


def unsupported(x: Tensor, lam: float) -> str:
    """Why these kernels do not support a call; "" if they do."""
    if why := unsupported_device(x):
        return why
    if x.dtype not in DTYPES:
        return f"x is {x.dtype}"
    return f"lam is above {LAM_MAX:g}" if lam > LAM_MAX else ""


def evaluate(
    x: Tensor,  # (N, C), overwritten with dx
    target: Tensor,
    mu: Tensor,
    sigma: Tensor,
    lam: float,
    options: Options,
    need: Sequence[bool],
    grad: Tensor,  # () or (N,)
) -> tuple[Any, ...]:
    """Losses of rows in float32, and the gradients: `native.evaluate` for a chunk of x with reduction="none"."""
    losses, stats = forward(x, target, mu, sigma, lam, options, torch.float32)
    if not any(need):
        return losses, None, None, None
    return losses, *backward(grad, stats, x, target, mu, sigma, lam, options, need, x)


def cross_entropy(
    x: Tensor,
    target: Tensor,
    mu: Tensor,
    sigma: Tensor,
    lam: float,
    options: Options,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`gsoftmax_cross_entropy` by Triton kernels.

    x: (N, C), (N, C, d1, ...) or (C,); target: class indices or probabilities
    mu, sigma: (C,) in float32
    dtype: of the loss; None for that of F.cross_entropy(x)
    """
    shape = None
    if x.ndim != 2:
        # Classes last, and one row for everything else.
        dim = class_dim(x)
        c, shape = x.shape[dim], x.shape[:dim] + x.shape[dim + 1 :]
        x = x.movedim(dim, -1).reshape(-1, c)
        target = target.movedim(dim, -1).reshape(-1, c) if target.is_floating_point() else target.reshape(-1)
    if dtype is None:
        dtype = torch.float32 if torch.is_autocast_enabled(x.device.type) else x.dtype
    mu, sigma = mu.contiguous(), sigma.contiguous()
    if options.weight is not None:
        options = Options(options.weight.contiguous(), *options[1:])
    if torch.compiler.is_compiling():
        loss = _forward_op(x, target, mu, sigma, lam, *options, dtype)[0]
    else:
        loss = apply(_Loss(target, lam, options, evaluate, dtype), x, mu, sigma)
    return loss.reshape(shape) if options.reduction == "none" and shape is not None else loss
