"""z, softmax(z) and the loss of several labels on a GPU, as Triton kernels, without autograd.

With u = (x - mu) / sigma, z = x + lam Phi(u) and s = lam phi(u) / sigma, the gradients follow from that of z:

    dx = dz (1 + s),    dmu = -sum over rows of dz s,    dsigma = -sum over rows of dz s u.

The loss of a label y, smoothed, of weight w and pos_weight q, is

    w [q y (-log s(a)) + (1 - y) (-log s(b))]        -log s(a) = max(-a, 0) + log(1 + exp(-|a|)),

where s is the logistic function, and a and b are z+ - z- and z- - z+ ("paired"), z+ and z- ("independent"), z+ and -z-
("printed"), or z+ and -z+ ("msml").

Every operation is limited by memory: each array is read and written once, except that rows of more than one tile are
read twice for softmax.  As in `triton_ce`, a program keeps mu and sigma of a tile of classes in registers and loops
over rows, partial sums are added in a fixed order, and there is no GPU synchronization.

x with more than two dimensions is a batch of tables, each (rows, classes) with strides of its own, so that images need
no copy with the classes last.
"""

# Kernels have no Python types, and neither have the decorators that make them.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..checks import LabelOptions
from .launching import Call, Plan, calls, cdiv, launch, on_its_device, power_of_2, processors, remember
from .triton_ce import LOG2E, P_0, ROOT, SIGMA_MIN, gaussian_term, is_fast, unsupported

__all__ = ["logits", "logits_backward", "multilabel", "probabilities", "unsupported"]

# The result has float32's digits whatever x is rounded to.
_DEGREE = 7
# Beyond this u * ROOT, phi(u) is 0 in float32.
U_MAX = tl.constexpr(16.0)
# Rows up to this length are one tile.
LONGEST_TILE = 8192
# Of longer rows: block_n, block_c, warps.
LONG_ROWS = (1, 4096, 4)
# Up to this many labels, and this many in a row, one program computes everything.
FEW_LABELS, SHORT_ROW = 8192, 1024
# Targets that the kernel reads; others are converted.
_TARGETS = (
    torch.float32, torch.int64, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int16, torch.int8,
    torch.uint8,
)  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _gaussians(mu, sigma, at, inside):
    """mu and ROOT / sigma of classes, one row."""
    m = tl.load(mu + at, mask=inside, other=0.0)
    r = 1.0 / tl.maximum(tl.load(sigma + at, mask=inside, other=1.0), SIGMA_MIN) * ROOT
    return m[None, :], r[None, :]


@triton.jit
def _slope(u, r, steep):
    """lam phi(u) / sigma, and u without infinities; u comes multiplied by ROOT."""
    return tl.exp2(-u * u) * (r * steep), tl.minimum(tl.maximum(u, -U_MAX), U_MAX)


@triton.jit
def _locate(i, blocks, BLOCK_N: tl.constexpr, MANY: tl.constexpr):
    """The table and the rows of block i."""
    if MANY:
        table = i // blocks
        return table, (i - table * blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    else:
        return i, i * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def _offsets(table, rows, cols, s_b, s_n, s_c, MANY: tl.constexpr):
    """Offsets of a tile, 64 bits wide."""
    at = (rows.to(tl.int64) * s_n)[:, None] + (cols.to(tl.int64) * s_c)[None, :]
    if MANY:
        at += table.to(tl.int64) * s_b
    return at


@triton.jit
def _is_even(tile, last, R, C, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, MANY: tl.constexpr):
    """Whether a program's tiles have no edge, so that they need no masks."""
    even = R % BLOCK_N == 0 if MANY else last * BLOCK_N <= R
    return even & ((tile + 1) * BLOCK_C <= C)


@triton.jit
def _logits_tiles(
    first, last, tile, x, mu, sigma, z, R, C, blocks, sx_b, sx_n, sx_c, sz_b, sz_n, sz_c, half, c0,
    MASK: tl.constexpr, MANY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, DEGREE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    cols = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = cols < C
    m, r = _gaussians(mu, sigma, cols, inside)
    for i in tl.range(first, last, num_stages=STAGES):
        table, rows = _locate(i, blocks, BLOCK_N, MANY)
        at_x = x + _offsets(table, rows, cols, sx_b, sx_n, sx_c, MANY)
        at_z = z + _offsets(table, rows, cols, sz_b, sz_n, sz_c, MANY)
        if MASK:
            both = (rows < R)[:, None] & inside[None, :]
            xs = tl.load(at_x, mask=both, other=0.0).to(tl.float32)
        else:
            xs = tl.load(at_x).to(tl.float32)
        w, _ = gaussian_term(xs, m, r, half, c0, DEGREE)
        zs = xs + (w + half)
        if MASK:
            tl.store(at_z, zs, mask=both)
        else:
            tl.store(at_z, zs)


@triton.jit(do_not_specialize=["R", "T", "blocks", "total", "each"])
def _logits_kernel(
    x, mu, sigma, z, R, C, T, blocks, total, each, sx_b, sx_n, sx_c, sz_b, sz_n, sz_c, half, c0,
    EDGE: tl.constexpr, MANY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, DEGREE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """z of a tile of classes and `each` blocks of rows, of `total`; every table has `blocks` of them."""
    program = tl.program_id(0)
    tile = program % T
    first = (program // T) * each
    last = tl.minimum(first + each, total)
    if not EDGE and _is_even(tile, last, R, C, BLOCK_N, BLOCK_C, MANY):
        _logits_tiles(
            first, last, tile, x, mu, sigma, z, R, C, blocks, sx_b, sx_n, sx_c, sz_b, sz_n, sz_c, half, c0,
            False, MANY, BLOCK_N, BLOCK_C, DEGREE, STAGES,
        )  # fmt: skip
    else:
        _logits_tiles(
            first, last, tile, x, mu, sigma, z, R, C, blocks, sx_b, sx_n, sx_c, sz_b, sz_n, sz_c, half, c0,
            True, MANY, BLOCK_N, BLOCK_C, DEGREE, STAGES,
        )  # fmt: skip


@triton.jit
def _backward_tiles(
    first, last, tile, group, grad, x, mu, sigma, dx, dmu, dsigma, R, C, blocks,
    sg_b, sg_n, sg_c, sx_b, sx_n, sx_c, sd_b, sd_n, sd_c, steep,
    NEED_X: tl.constexpr, NEED_MU: tl.constexpr, NEED_SIGMA: tl.constexpr, MASK: tl.constexpr, MANY: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    cols = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = cols < C
    m, r = _gaussians(mu, sigma, cols, inside)
    # Sums are kept per lane until the end, which also keeps their rounding errors small.
    sum_mu = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    sum_sigma = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    for i in tl.range(first, last, num_stages=STAGES):
        table, rows = _locate(i, blocks, BLOCK_N, MANY)
        at_g = grad + _offsets(table, rows, cols, sg_b, sg_n, sg_c, MANY)
        at_x = x + _offsets(table, rows, cols, sx_b, sx_n, sx_c, MANY)
        if MASK:
            both = (rows < R)[:, None] & inside[None, :]
            g = tl.load(at_g, mask=both, other=0.0)
            xs = tl.load(at_x, mask=both, other=0.0).to(tl.float32)
        else:
            g = tl.load(at_g)
            xs = tl.load(at_x).to(tl.float32)
        slope, u = _slope((xs - m) * r, r, steep)
        ds = g * slope
        if NEED_X:
            at_dx = dx + _offsets(table, rows, cols, sd_b, sd_n, sd_c, MANY)
            if MASK:
                tl.store(at_dx, (g + ds).to(dx.dtype.element_ty), mask=both)
            else:
                tl.store(at_dx, (g + ds).to(dx.dtype.element_ty))
        if NEED_MU:
            sum_mu += ds
        if NEED_SIGMA:
            sum_sigma += ds * u
    part = group.to(tl.int64) * C + cols
    if NEED_MU:
        tl.store(dmu + part, -tl.sum(sum_mu, 0), mask=inside)
    if NEED_SIGMA:
        tl.store(dsigma + part, tl.sum(sum_sigma, 0) / -ROOT, mask=inside)


@triton.jit(do_not_specialize=["R", "T", "blocks", "total", "each"])
def _backward_kernel(
    grad, x, mu, sigma, dx, dmu, dsigma, R, C, T, blocks, total, each,
    sg_b, sg_n, sg_c, sx_b, sx_n, sx_c, sd_b, sd_n, sd_c, steep,
    NEED_X: tl.constexpr, NEED_MU: tl.constexpr, NEED_SIGMA: tl.constexpr, EDGE: tl.constexpr, MANY: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx of a tile of classes and `each` blocks of rows, and the group's parts (groups, C) of dmu and dsigma."""
    program = tl.program_id(0)
    tile = program % T
    group = program // T
    first = group * each
    last = tl.minimum(first + each, total)
    if not EDGE and _is_even(tile, last, R, C, BLOCK_N, BLOCK_C, MANY):
        _backward_tiles(
            first, last, tile, group, grad, x, mu, sigma, dx, dmu, dsigma, R, C, blocks,
            sg_b, sg_n, sg_c, sx_b, sx_n, sx_c, sd_b, sd_n, sd_c, steep, NEED_X, NEED_MU, NEED_SIGMA, False, MANY,
            BLOCK_N, BLOCK_C, STAGES,
        )  # fmt: skip
    else:
        _backward_tiles(
            first, last, tile, group, grad, x, mu, sigma, dx, dmu, dsigma, R, C, blocks,
            sg_b, sg_n, sg_c, sx_b, sx_n, sx_c, sd_b, sd_n, sd_c, steep, NEED_X, NEED_MU, NEED_SIGMA, True, MANY,
            BLOCK_N, BLOCK_C, STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["R", "T", "blocks", "total", "each"])
def _softmax_kernel(
    x, mu, sigma, parts, p, R, C, T, blocks, total, each, sx_b, sx_n, sx_c, sp_b, sp_n, sp_c, half, c0,
    STEP: tl.constexpr, BLOCK_T: tl.constexpr, MANY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    DEGREE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Softmax of whole rows (STEP "whole"), or of a tile of classes in two steps.

    Step "parts" writes the largest x of each row and tile, and the sum of exp2 above it, (2, rows, T); step "spread"
    writes p from them.
    """
    program = tl.program_id(0)
    tile = program % T
    group = program // T
    if STEP == "spread":  # last rows first: they are still in the cache
        group = tl.num_programs(0) // T - 1 - group
    first = group * each
    last = tl.minimum(first + each, total)
    cols = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = cols < C
    m, r = _gaussians(mu, sigma, cols, inside)
    plane = total.to(tl.int64) * BLOCK_N * T
    for i in tl.range(first, last, num_stages=STAGES):
        table, rows = _locate(i, blocks, BLOCK_N, MANY)
        both = (rows < R)[:, None] & inside[None, :]
        at_x = x + _offsets(table, rows, cols, sx_b, sx_n, sx_c, MANY)
        xs = tl.load(at_x, mask=both, other=float("-inf")).to(tl.float32)
        if STEP != "whole":  # rows of all tables, with those that only fill up the blocks
            at = parts + (i * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64) * T
        if STEP == "spread":
            tiles = tl.arange(0, BLOCK_T)[None, :]
            tops = tl.load(at[:, None] + tiles, mask=tiles < T, other=float("-inf"))
            top = tl.max(tops, 1)
            sums = tl.load(at[:, None] + plane + tiles, mask=tiles < T, other=0.0)
            scale = 1.0 / tl.sum(sums * tl.exp2((tops - top[:, None]) * LOG2E), 1)
        else:
            top = tl.max(xs, 1)
            scale = top
        above = top
        if STEP == "parts":
            # Where all classes of the tile are masked, -inf - -inf would be NaN.
            above = tl.where(top == float("-inf"), 0.0, top)
        w, _ = gaussian_term(xs, m, r, half, c0, DEGREE)
        e = tl.exp2(tl.fma(xs - above[:, None], LOG2E, w))
        if STEP == "parts":
            tl.store(at + tile, top)
            tl.store(at + plane + tile, tl.sum(e, 1))
        else:
            if STEP == "whole":
                scale = 1.0 / tl.sum(e, 1)
            at_p = p + _offsets(table, rows, cols, sp_b, sp_n, sp_c, MANY)
            tl.store(at_p, (e * scale[:, None]).to(p.dtype.element_ty), mask=both)


@triton.jit
def _logistic(a):
    """-log s(a), -log s(-a), s(-a) and s(a), s the logistic function, with the relative accuracy of exp in both tails.

    log(1 + e) is e times a polynomial fitted for its relative error, 1.7e-7.
    """
    e = tl.exp2(-tl.abs(a) * LOG2E)
    v = tl.fma(e, 0.005232693627476692, -0.02950523979961872)
    v = tl.fma(v, e, 0.07822596281766891)
    v = tl.fma(v, e, -0.13663247227668762)
    v = tl.fma(v, e, 0.19106008112430573)
    v = tl.fma(v, e, -0.2484298199415207)
    v = tl.fma(v, e, 0.3331909775733948)
    v = tl.fma(v, e, -0.4999949336051941)
    v = tl.fma(v, e, 0.9999999403953552) * e
    large = 1.0 / (1.0 + e)
    small = e * large
    below = a < 0
    return (
        tl.maximum(-a, 0.0) + v,
        tl.maximum(a, 0.0) + v,
        tl.where(below, large, small),
        tl.where(below, small, large),
    )


@triton.jit
def _is_known(t, ignore):
    """Whether labels are known; `ignore` was rounded to the type of t, as torch does before it compares."""
    if t.dtype.is_floating():
        return t.to(tl.float32) != ignore
    else:
        return t != ignore


@triton.jit(do_not_specialize=["N", "L", "T", "total", "each", "ignore"])
def _count_kernel(
    target, counts, N, L, T, total, each, st_n, st_c, ignore, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr
):
    """The number of known labels of each program, below 2^24."""
    program = tl.program_id(0)
    cols = (program % T) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = (program // T) * each
    counted = tl.zeros([BLOCK_N, BLOCK_C], tl.int32)
    for i in range(first, tl.minimum(first + each, total)):
        rows = i * BLOCK_N + tl.arange(0, BLOCK_N)
        both = (rows < N)[:, None] & (cols < L)[None, :]
        t = tl.load(target + _offsets(i, rows, cols, 0, st_n, st_c, False), mask=both, other=0)
        counted += (both & _is_known(t, ignore)).to(tl.int32)
    tl.store(counts + program, tl.sum(tl.sum(counted, 1), 0).to(tl.float32))


@triton.jit(do_not_specialize=["N", "T", "total", "each", "ignore", "divisor"])
def _labels_kernel(
    x, target, mu, sigma, weight, pos_weight, grad, counts, loss, dx, dmu, dsigma,
    N, L, T, total, each, sx_n, sx_c, st_n, st_c, sg_n, sg_c, sd_n, sd_c, keep, spread, ignore, divisor,
    half, c0, steep,
    FORM: tl.constexpr, GAUSS: tl.constexpr, WEIGHT: tl.constexpr, POS: tl.constexpr, SMOOTH: tl.constexpr,
    MEAN: tl.constexpr, NONE: tl.constexpr, GRAD: tl.constexpr, WHOLE: tl.constexpr,
    NEED_X: tl.constexpr, NEED_MU: tl.constexpr, NEED_SIGMA: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, DEGREE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of labels and `each` blocks of rows: losses, dx, and a group's parts (groups, outputs) of dmu and dsigma.

    loss: the loss itself where it is not reduced (NONE) or one program has all labels (WHOLE), else (2, programs):
    sums, and numbers of known labels.  counts: (), the number of known labels, where gradients of the mean need it.
    """
    program = tl.program_id(0)
    tile = program % T
    group = program // T
    first = group * each
    last = tl.minimum(first + each, total)
    cols = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = cols < L
    TWO: tl.constexpr = FORM != "msml"
    NEED: tl.constexpr = NEED_X or NEED_MU or NEED_SIGMA
    # Present outputs come after the absent ones.
    shift = L if TWO else 0
    counted = tl.zeros([BLOCK_N, BLOCK_C], tl.int32)
    if MEAN and WHOLE:
        for i in range(first, last):
            rows = i * BLOCK_N + tl.arange(0, BLOCK_N)
            both = (rows < N)[:, None] & inside[None, :]
            t = tl.load(target + _offsets(i, rows, cols, 0, st_n, st_c, False), mask=both, other=0)
            counted += (both & _is_known(t, ignore)).to(tl.int32)
        divisor = tl.sum(tl.sum(counted, 1), 0).to(tl.float32)
    elif MEAN and NEED:
        divisor = tl.load(counts)
    g = 1.0
    if GRAD and not NONE:
        g = tl.load(grad).to(tl.float32)
    if NEED and not NONE:
        g = tl.where(divisor == 0.0, 0.0, g / divisor)
    if GAUSS:
        m_pos, r_pos = _gaussians(mu, sigma, cols + shift, inside)
        if TWO:
            m_neg, r_neg = _gaussians(mu, sigma, cols, inside)
    if WEIGHT:
        wc = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
    if POS:
        qc = tl.load(pos_weight + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    mu_pos = sums
    mu_neg = sums
    sigma_pos = sums
    sigma_neg = sums
    for i in tl.range(first, last, num_stages=STAGES):
        rows = i * BLOCK_N + tl.arange(0, BLOCK_N)
        both = (rows < N)[:, None] & inside[None, :]
        t = tl.load(target + _offsets(i, rows, cols, 0, st_n, st_c, False), mask=both, other=0)
        x_pos = tl.load(x + _offsets(i, rows, cols + shift, 0, sx_n, sx_c, False), mask=both, other=0.0).to(tl.float32)
        z_pos = x_pos
        if GAUSS:
            term, u_pos = gaussian_term(x_pos, m_pos, r_pos, half, c0, DEGREE)
            z_pos = x_pos + (term + half)
        if TWO:
            x_neg = tl.load(x + _offsets(i, rows, cols, 0, sx_n, sx_c, False), mask=both, other=0.0).to(tl.float32)
            z_neg = x_neg
            if GAUSS:
                term, u_neg = gaussian_term(x_neg, m_neg, r_neg, half, c0, DEGREE)
                z_neg = x_neg + (term + half)
        known = both & _is_known(t, ignore)
        present = t.to(tl.float32)
        if SMOOTH:
            present = tl.fma(present, keep, spread)
        absent = 1.0 - present
        if POS:
            present *= qc
        if WEIGHT:
            present *= wc
            absent *= wc
        if FORM == "paired":
            cost, cost_b, da, db = _logistic(z_pos - z_neg)
        else:
            cost, cost_b, da, db = _logistic(z_pos)
            if FORM == "independent":
                cost_b, _, db, _ = _logistic(z_neg)
            elif FORM == "printed":
                _, cost_b, _, db = _logistic(z_neg)
        # 0 * inf is 0 here: a masked output costs nothing where its label says the same.
        cost = tl.where(present == 0.0, 0.0, present * cost) + tl.where(absent == 0.0, 0.0, absent * cost_b)
        cost = tl.where(known, cost, 0.0)
        if NONE:
            tl.store(loss + rows.to(tl.int64)[:, None] * L + cols[None, :], cost, mask=both)
        else:
            sums += cost
            if MEAN and not WHOLE and not NEED:
                counted += known.to(tl.int32)
        if NEED:
            if GRAD and NONE:
                by = tl.load(grad + _offsets(i, rows, cols, 0, sg_n, sg_c, False), mask=both, other=0.0).to(tl.float32)
            else:
                by = g
            # To a and to b, and from these to z.
            da = tl.where(known, -by * present * da, 0.0)
            db = tl.where(known, -by * absent * db, 0.0)
            if FORM == "independent":
                d_pos, d_neg = da, db
            elif FORM == "printed":
                d_pos, d_neg = da, -db
            else:
                d_pos = da - db
                d_neg = -d_pos
            ds_pos = d_pos
            ds_neg = d_neg
            if GAUSS:
                slope, u = _slope(u_pos, r_pos, steep)
                ds_pos = d_pos * slope
                d_pos += ds_pos
                mu_pos += ds_pos
                sigma_pos += ds_pos * u
                if TWO:
                    slope, u = _slope(u_neg, r_neg, steep)
                    ds_neg = d_neg * slope
                    d_neg += ds_neg
                    mu_neg += ds_neg
                    sigma_neg += ds_neg * u
            if NEED_X:
                at_dx = dx + _offsets(i, rows, cols + shift, 0, sd_n, sd_c, False)
                tl.store(at_dx, d_pos.to(dx.dtype.element_ty), mask=both)
                if TWO:
                    at_dx = dx + _offsets(i, rows, cols, 0, sd_n, sd_c, False)
                    tl.store(at_dx, d_neg.to(dx.dtype.element_ty), mask=both)
    if not NONE:
        result = tl.sum(tl.sum(sums, 1), 0)
        if WHOLE:
            tl.store(loss, result / divisor)
        else:
            tl.store(loss + program, result)
            if MEAN and not NEED:
                tl.store(loss + tl.num_programs(0) + program, tl.sum(tl.sum(counted, 1), 0).to(tl.float32))
    part = group.to(tl.int64) * (L + shift) + cols
    if NEED_MU:
        tl.store(dmu + part + shift, -tl.sum(mu_pos, 0), mask=inside)
        if TWO:
            tl.store(dmu + part, -tl.sum(mu_neg, 0), mask=inside)
    if NEED_SIGMA:
        tl.store(dsigma + part + shift, tl.sum(sigma_pos, 0) / -ROOT, mask=inside)
        if TWO:
            tl.store(dsigma + part, tl.sum(sigma_neg, 0) / -ROOT, mask=inside)


# ------------------------------------------------------------------------------------------------------------ launching


def plan(kind: str, rows: int, classes: int, device: torch.device, columns: bool = False) -> Plan:
    """The tile for x of this size; `kind` is "logits", "backward", "softmax" or "labels".

    columns: x lies in memory column by column, as images do
    """
    size, warps = 1024 if kind in ("backward", "labels") else 2048, 0
    if kind == "softmax" and classes <= LONGEST_TILE:
        block_c = max(16, power_of_2(classes))
        block_n = max(1, min(size // block_c, power_of_2(rows)))
    elif columns and kind == "softmax":  # tiles as wide as their number allows
        block_n, block_c = 16, 1024
    elif kind == "softmax":
        block_n, block_c, warps = LONG_ROWS
    elif columns:
        block_n = max(16, min(256, power_of_2(rows)))
        block_c = min(max(1, size // block_n), power_of_2(classes))
    else:
        block_c = max(16, min(512, power_of_2(classes)))
        block_n = max(1, min(size // block_c, power_of_2(rows)))
    warps = warps or min(16, max(1, block_n * block_c // (256 if size == 1024 else 512)))
    # Filling the GPU several times over matters more than long loops over rows.
    groups = max(1, 8 * processors(device) // cdiv(classes, block_c))
    each = min(max(1, 128 // block_n), cdiv(rows, groups * block_n))
    return Plan(block_n, block_c, each * block_n, warps, 1, _DEGREE)


@lru_cache
def _constants(lam: float, degree: int) -> tuple[float, float, float]:
    """half and c0 of `gaussian_term` without its log2(e), and lam phi(0) / ROOT."""
    if lam == 0:
        return 0.0, 0.0, 0.0
    return lam / 2, P_0[degree] + math.log2(lam), lam / (math.sqrt(2 * math.pi) * ROOT.value)


def _flat(x: Tensor) -> Tensor:
    """x with at most three dimensions."""
    return x if x.ndim <= 3 else x.flatten(2)


def _like(result: Tensor, x: Tensor) -> Tensor:
    """The result for `_flat(x)` in the shape and memory order of x."""
    if x.ndim <= 3:
        return result
    result = result.view(x.shape[:2] + x.shape[2:]) if result.is_contiguous() else result.unflatten(2, x.shape[2:])
    like = torch.empty_like(x, dtype=result.dtype, device="meta")
    return result if result.stride() == like.stride() else torch.empty_like(x, dtype=result.dtype).copy_(result)


def _tables(*arrays: Tensor) -> tuple[int, int, int, tuple[int, ...]]:
    """Arrays of one shape as tables: their number, rows, classes, and for each array the strides of these three."""
    shape = arrays[0].shape
    if len(shape) < 3:
        rows = shape[0] if len(shape) == 2 else 1
        strides = [(0, *v.stride()) if len(shape) == 2 else (0, 0, *v.stride()) for v in arrays]
        return 1, rows, shape[-1], tuple(s for v in strides for s in v)
    many, classes, rows = shape
    found = [(v.stride(0), v.stride(2), v.stride(1)) for v in arrays]
    if many == 1 or rows == 1 or all(s[0] == rows * s[1] for s in found):
        # One table with the rows of all.
        found = [(0, s[0] if rows == 1 else s[1], s[2]) for s in found]
        many, rows = 1, many * rows
    return many, rows, classes, tuple(s for v in found for s in v)


def _sizes(kind: str, device: torch.device, cut: Plan | None, tables: tuple[int, ...], strides: Sequence[int]) -> Call:
    """The call of a kernel whose first numbers are R, C, T, blocks, total, each, and the strides."""
    many, rows, classes = tables
    if cut is None:
        cut = plan(kind, rows if many == 1 else many * rows, classes, device, strides[1] == 1 != strides[2])
        if many > 1 and rows < cut.block_n:
            cut = cut._replace(block_n=power_of_2(rows))
    tiles, blocks, each = cdiv(classes, cut.block_c), cdiv(rows, cut.block_n), max(1, cut.rows // cut.block_n)
    total = blocks * many
    groups = cdiv(total, each)
    return Call(
        block=cut, flags=(tiles == 1 and classes < cut.block_c, many > 1),
        before=(rows, classes, tiles, blocks, total, each, *strides), after=(), tiles=tiles, groups=groups,
        programs=tiles * groups, size=total * cut.block_n,
    )  # fmt: skip


@on_its_device
def logits(x: Tensor, mu: Tensor, sigma: Tensor, lam: float, cut: Plan | None = None) -> Tensor:
    """z = x + lam Phi((x - mu) / sigma) in float32.

    x: (N, C), (N, C, d1, ...) or (C,), of any strides
    mu, sigma: (C,) in float32
    """
    flat, mu, sigma = _flat(x), mu.contiguous(), sigma.contiguous()
    z = torch.empty_like(flat, dtype=torch.float32)
    key = ("logits", flat.shape, flat.stride(), x.dtype, x.device, cut)
    call = calls.get(key)
    if call is None:
        *tables, strides = _tables(flat, z)
        call = remember(key, _sizes("logits", x.device, cut, tuple(tables), strides))
        call.after = (*call.flags, call.block.block_n, call.block.block_c, call.block.degree, call.block.stages)
    numbers = (*call.before, *_constants(lam, call.block.degree)[:2], *call.after)
    launch(call, _logits_kernel, call.programs, (flat, mu, sigma, z), numbers, call.block.warps)
    return _like(z, x)


@on_its_device
def logits_backward(
    grad: Tensor, x: Tensor, mu: Tensor, sigma: Tensor, lam: float, need: Sequence[bool], cut: Plan | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx, dmu and dsigma, those that are needed, from the gradient of z, in float32 and of any strides."""
    if not any(need):
        return None, None, None
    flat, mu, sigma = _flat(x), mu.contiguous(), sigma.contiguous()
    grad = _flat(grad)
    dx = torch.empty_like(flat) if need[0] else None
    need_x, need_mu, need_sigma = need
    key = ("backward", flat.shape, flat.stride(), grad.stride(), x.dtype, x.device, need_x, need_mu, need_sigma, cut)
    call = calls.get(key)
    if call is None:
        *tables, strides = _tables(flat, grad, flat if dx is None else dx)
        call = remember(key, _sizes("backward", x.device, cut, tuple(tables), strides))
        cut = call.block
        call.after = (need_x, need_mu, need_sigma, *call.flags, cut.block_n, cut.block_c, cut.stages)
        # grad before x
        call.before = (*call.before[:6], *strides[3:6], *strides[:3], *strides[6:])
    parts = _parts(call.groups, mu.numel(), need_mu, need_sigma, x.device)
    arrays = (grad, flat, mu, sigma, dx, *parts)
    numbers = (*call.before, _constants(lam, _DEGREE)[2], *call.after)
    launch(call, _backward_kernel, call.programs, arrays, numbers, call.block.warps)
    return None if dx is None else _like(dx, x), *_total(parts)


def _parts(
    groups: int, outputs: int, need_mu: bool, need_sigma: bool, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Where kernels write parts (groups, outputs) of dmu and dsigma."""
    if not (need_mu or need_sigma):
        return None, None
    parts = torch.empty((need_mu + need_sigma, groups, outputs), dtype=torch.float32, device=device)
    return parts[0] if need_mu else None, parts[-1] if need_sigma else None


def _total(parts: Sequence[Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
    """dmu and dsigma from their parts."""
    dmu, dsigma = (None if v is None else v[0] if len(v) == 1 else v.sum(0) for v in parts)
    return dmu, dsigma


@on_its_device
def probabilities(x: Tensor, mu: Tensor, sigma: Tensor, lam: float, cut: Plan | None = None) -> Tensor:
    """softmax(z) over the classes, computed in float32, in x's dtype; arguments as in `logits`."""
    flat, mu, sigma = _flat(x), mu.contiguous(), sigma.contiguous()
    p = torch.empty_like(flat)
    fast = is_fast(x, lam)
    key = ("softmax", flat.shape, flat.stride(), x.dtype, x.device, fast, cut)
    call = calls.get(key)
    if call is None:
        *tables, strides = _tables(flat, p)
        call = remember(key, _sizes("softmax", x.device, cut, tuple(tables), strides))
        # Where p is half precision, an error of 3e-7 is far below its rounding.
        rounded = cut is None and x.dtype is not torch.float32
        degree = 0 if rounded and fast else 5 if rounded else call.block.degree
        cut = call.block
        call.after = (power_of_2(call.tiles), call.flags[1], cut.block_n, cut.block_c, degree, cut.stages)
    half, c0, _ = _constants(lam * LOG2E.value, call.after[-2])
    parts = None
    if call.tiles > 1:
        parts = torch.empty((2, call.size, call.tiles), dtype=torch.float32, device=x.device)
    for step in ("whole",) if parts is None else ("parts", "spread"):
        # `launch` keeps one compiled kernel per call, and the steps are two.
        of_step = replace(call, kernels=call.kernels.setdefault(step, {}))
        numbers = (*call.before, half, c0, step, *call.after)
        launch(of_step, _softmax_kernel, call.programs, (flat, mu, sigma, parts, p), numbers, call.block.warps)
    return _like(p, x)


@on_its_device
def multilabel(
    x: Tensor,
    target: Tensor,
    mu: Tensor | None,
    sigma: Tensor | None,
    lam: float,
    options: LabelOptions,
    need: Sequence[bool],
    grad: Tensor | None = None,
    out: Tensor | None = None,
    cut: Plan | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The loss of several labels in float32 and its gradients dx, dmu and dsigma, None where `need` is false.

    x: (N, outputs), absence first where there are two outputs per label; target: (N, L)
    mu, sigma: (outputs,) in float32, or None without a Gaussian term
    grad: a number, or one per label with reduction="none", that multiplies the gradients
    out: where to write dx, which may be x itself
    """
    form, weight, pos_weight, ignore_index, reduction, smoothing = options
    if target.dtype is torch.bool:  # which torch compares as integers: 256 is neither 0 nor 1
        target, ignore_index = target.view(torch.uint8), ignore_index if ignore_index in (0, 1) else 2
    elif target.dtype not in _TARGETS:
        target = target.to(torch.float32)
    n, labels = target.shape
    none, mean, gauss = reduction == "none", reduction == "mean", mu is not None and sigma is not None and lam > 0
    if mu is not None and sigma is not None:
        mu, sigma = mu.contiguous(), sigma.contiguous()
    weight, pos_weight = (None if v is None else v.contiguous() for v in (weight, pos_weight))
    dx = None if not need[0] else torch.empty_like(x) if out is None else out
    grad = grad.expand(target.shape) if grad is not None and none else grad
    need_mu, need_sigma = (gauss and bool(v) for v in need[1:])
    any_need = need_mu or need_sigma or dx is not None
    key = (
        "labels", x.shape, x.stride(), x.dtype, x.device, target.stride(), target.dtype, form, ignore_index, reduction,
        smoothing, *(None if v is None else v.dtype for v in (weight, pos_weight)),
        None if grad is None else (grad.dtype, grad.stride()), None if dx is None else dx.stride(), gauss, need_mu,
        need_sigma, cut,
    )  # fmt: skip
    call = calls.get(key)
    if call is None:
        call = remember(key, _labels_call(x, target, cut))
        # As torch rounds it before it compares.
        ignore = torch.tensor(ignore_index).to(target.dtype).item()
        strides = (
            v.stride() if v is not None and v.ndim == 2 else (0, 0) for v in (x, target, grad, x if dx is None else dx)
        )
        call.before = (*call.before, *(s for two in strides for s in two), 1 - smoothing, smoothing / 2, ignore)
        call.after = (
            form, gauss, weight is not None, pos_weight is not None, smoothing > 0, mean, none, grad is not None,
            call.whole and not none, dx is not None, need_mu, need_sigma, call.block.block_n, call.block.block_c,
            call.block.degree, call.block.stages,
        )  # fmt: skip
    counts, divisor = None, float(n if reduction == "batchmean" else 1)
    if mean and any_need and not call.whole:
        counts = torch.empty(call.programs, dtype=torch.float32, device=x.device)
        ignore, size = call.before[-1], (call.block.block_n, call.block.block_c)
        numbers = (*call.before[:5], *target.stride(), ignore, *size)
        launch(call, _count_kernel, call.programs, (target, counts), numbers, call.block.warps)
        counts = counts.sum()
    shape = (n, labels) if none else () if call.whole else (2, call.programs)
    loss = torch.empty(shape, dtype=torch.float32, device=x.device)
    parts = _parts(call.groups, x.shape[1], need_mu, need_sigma, x.device)
    arrays = (x, target, mu, sigma, weight, pos_weight, grad, counts, loss, dx, *parts)
    half, c0, steep = _constants(lam if gauss else 0.0, call.block.degree)
    numbers = (*call.before, divisor, half, c0, steep, *call.after)
    launch(call, _labels_kernel, call.programs, arrays, numbers, call.block.warps)
    if not (none or call.whole):
        known = loss[1].sum() if mean and counts is None else counts
        loss = loss[0].sum() / (known if mean and known is not None else divisor)
    if mu is not None and not gauss:  # lam is 0
        zeros = torch.zeros((1, mu.numel()), device=x.device)
        parts = zeros if need[1] else None, zeros.clone() if need[2] else None
    return loss, dx, *_total(parts)


def _labels_call(x: Tensor, target: Tensor, cut: Plan | None) -> Call:
    """The call of `_labels_kernel`, whose first numbers are N, L, T, total and each."""
    n, labels = target.shape
    whole = cut is None and n * labels <= FEW_LABELS and labels <= SHORT_ROW
    if cut is None:
        cut = plan("labels", n, labels, x.device, x.stride(0) == 1 != x.stride(1))
    if whole:
        block_c = power_of_2(labels)
        block_n = max(1, min(1024 // block_c, power_of_2(n)))
        cut = cut._replace(block_n=block_n, block_c=block_c, rows=n, warps=4)
    tiles, total = cdiv(labels, cut.block_c), cdiv(n, cut.block_n)
    each = total if whole else max(1, cut.rows // cut.block_n)
    groups = cdiv(total, each)
    return Call(
        block=cut, flags=(), before=(n, labels, tiles, total, each), after=(), tiles=tiles, groups=groups,
        programs=tiles * groups, whole=whole,
    )  # fmt: skip
