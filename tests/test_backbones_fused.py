"""Fused pooling, normalisation and GELU, on a GPU where there is one and otherwise in Triton's interpreter.

What runs where is in `interpreter.py`.
"""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gsoftmax.backbones import fused
from tests.interpreter import DEVICE, GPU, in_another_process, loops, poisoned, process, quiet  # noqa: F401

pytestmark = quiet


def test_without_triton_the_module_is_there_and_unusable(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    spec = importlib.util.spec_from_file_location(fused.__name__, fused.__file__)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert again.triton is None and not again.usable(images((2, 3, 4, 4)))


@pytest.mark.parametrize("channels", [1, 3, 16, 24, 64, 70, 256, 1000])
@pytest.mark.parametrize("pixels", [2, 31, 33, 5000, 10**6])
def test_every_tile_is_taken_by_one_group_and_no_group_is_empty(pixels, channels):
    cut = fused.plan(pixels, channels, 132)
    tiles = -(-pixels // cut.block_p)
    taken = [step * cut.groups + group for step in range(cut.steps) for group in range(cut.groups)]
    assert {t for t in taken if t < tiles} == set(range(tiles)) and len(set(taken)) == len(taken)
    assert cut.groups <= tiles and cut.groups <= cut.block_g <= 512 and cut.block_p >= 16
    assert cut.across * cut.block_c >= channels > (cut.across - 1) * cut.block_c


# ----------------------------------------------------------------------------------------------- inside, on the kernels


def images(shape, dtype="float32", scale=1.0, mean=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * scale + mean
    x = x.to(DEVICE, getattr(torch, dtype))
    return x.contiguous(memory_format=torch.channels_last)


def plain(x, bias, norm, pool=False, residual=None):
    """The separate layers."""
    layer = nn.BatchNorm2d(len(bias), eps=norm.eps, momentum=norm.momentum, dtype=x.dtype, device=x.device)
    layer.running_mean, layer.running_var = norm.mean, norm.var
    h = F.max_pool2d(x, 2) if pool else x
    h = torch.func.functional_call(layer, {"bias": bias}, (h,))
    return F.gelu(h if residual is None else h + residual)


def both(x, pool, residual=None, momentum=0.4, eps=1e-5):
    """(y, dx, dbias, running mean, running variance[, dresidual]) of the kernels and of float64."""
    c = x.shape[1]
    generator = torch.Generator().manual_seed(1)
    bias, old_mean = (torch.randn(c, generator=generator).to(DEVICE) for _ in range(2))
    old_var = (torch.rand(c, generator=generator) + 0.5).to(DEVICE)
    dy, results = None, []
    for function, precise in ((fused.norm_gelu, False), (plain, True)):
        inputs = [v.double() if precise else v.clone() for v in (x, bias, old_mean, old_var)]
        r = None if residual is None else residual.double() if precise else residual.clone()
        for v in (inputs[0], inputs[1], *(() if r is None else (r,))):
            v.requires_grad_()
        y = function(*inputs[:2], fused.Norm(*inputs[2:], momentum, eps), pool, r)
        if dy is None:
            dy = images(y.shape, seed=2).to(y.dtype)
            assert y.dtype == x.dtype and y.is_contiguous(memory_format=torch.channels_last)
        y.backward(dy.to(y.dtype))
        results.append([y.detach(), inputs[0].grad, inputs[1].grad, inputs[2], inputs[3]])
        if r is not None:
            results[-1].append(r.grad)
    return results


def close(got, expected, relative=1e-5, floor=0.0):
    """Each element to `relative` of itself and the largest together."""
    assert got.shape == expected.shape
    error = (got.double() - expected).abs()
    assert (error <= relative * (expected.abs() + expected.abs().max()) + floor).all(), error.max()  # NaN fails


SHAPES = [(2, 3, 4, 4), (3, 24, 5, 7), (4, 70, 9, 8), (5, 1, 2, 3), (5, 16, 2, 2), (13, 64, 8, 5)]


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def check_against_float64(shape, pool):
    for got, expected in zip(*both(images(shape, scale=2.0, mean=0.5), pool), strict=True):
        close(got, expected)


def check_two_values_to_a_channel():
    """Two pixels always normalize to -1 and 1: the gradient cancels almost entirely, in terms up to 1 / std."""
    for got, expected in zip(*both(images((2, 7, 2, 3)), True), strict=True):
        close(got, expected, floor=20 * 2**-21)  # 1 / std is 20 at most here, and some eight numbers are rounded


@pytest.mark.parametrize("pool", [False, True])
def check_a_residual_sum(pool):
    x = images((4, 24, 5, 6))
    residual = images((4, 24, 2, 3) if pool else x.shape, seed=3)
    for got, expected in zip(*both(x, pool, residual), strict=True):
        close(got, expected)
    for got, expected in zip(*both(x, pool, residual.contiguous()), strict=True):  # channels first
        close(got, expected)


# The interpreter truncates to bfloat16 where a GPU rounds.
@pytest.mark.parametrize("dtype, eps", [("bfloat16", 2**-8 if GPU else 2**-7), ("float16", 2**-11)])
@pytest.mark.parametrize("pool", [False, True])
def check_half_precision_is_rounded_once(dtype, eps, pool):
    x = images((5, 24, 7, 6), dtype)
    residual = None if pool else images((5, 24, 7, 6), dtype, seed=3)
    got, expected = both(x, pool, residual)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        if i in (2, 3, 4):
            assert a.dtype == torch.float32
            close(a, b)
        else:
            assert a.dtype == x.dtype
            tiny = 2.0**-24 if dtype == "float16" else 0.0  # what float16 has below its normal numbers
            assert ((a.double() - b).abs() <= eps * b.abs() + 2e-6 * b.abs().max() + tiny).all()


def check_a_large_mean_keeps_the_variance():
    """Sums of squares in float32 would leave nothing of the variance."""
    x = images((7, 3, 16, 16), scale=0.1, mean=1000.0)
    x[:, 0] -= 2000
    got, expected = both(x, False)
    wide = x.double().var((0, 2, 3))
    assert (expected[4] - 0.4 * wide).abs().max() > 0.1  # the old ones are in there as well
    assert ((got[4].double() - expected[4]).abs() <= 1e-6).all()
    mean, var = torch.zeros(3, device=DEVICE), torch.zeros(3, device=DEVICE)
    fused.norm_gelu(x, torch.zeros(3, device=DEVICE), fused.Norm(mean, var, 1.0, 1e-5))
    assert ((var.double() - wide).abs() <= 1e-5 * wide).all()
    assert ((mean.double() - x.double().mean((0, 2, 3))).abs() <= 2.0**-14).all()  # one unit of float32 at 1000
    # (x - mean) / std: half a unit of the mean, 3e-5, is 3e-4 of the deviation.
    close(got[0], expected[0], 5e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def check_ties_go_where_torch_takes_them(dtype):
    x = images((6, 20, 7, 6), dtype).float().round().to(getattr(torch, dtype))
    x = x.contiguous(memory_format=torch.channels_last)
    x[0, 0] = -7  # all four equal
    got, expected = both(x, True)
    assert ((got[1] != 0) == (expected[1] != 0)).all()
    assert (got[1][:, :, 6] == 0).all()  # the odd row
    close(got[1], expected[1], 1e-5 if dtype == "float32" else 2**-7)


@pytest.mark.parametrize("spots", [[(0, 0)], [(1, 1)], [(0, 1), (1, 0)]], ids=str)
def check_nan_spoils_its_channel_and_no_other(spots):
    x = images((3, 5, 4, 4))
    clean = x.clone()
    for i, j in spots:
        x[1, 2, i, j] = float("nan")
    x.requires_grad_()
    mean, var, bias = (torch.zeros(5, device=DEVICE) for _ in range(3))
    norm = fused.Norm(mean, var, 0.1, 1e-5)
    y = fused.norm_gelu(x, bias, norm, pool=True)
    y.sum().backward()
    _, p, index, _ = fused._forward(x.detach(), bias, None, norm, True)
    pooled, where = F.max_pool2d(x.detach(), 2, return_indices=True)
    torch.testing.assert_close(p, pooled, equal_nan=True, rtol=0, atol=0)
    assert torch.equal(where, (index // 2).long() * 4 + index % 2 + corners(where))
    others = [0, 1, 3, 4]
    assert y[:, 2].isnan().all() and mean[2].isnan() and var[2].isnan()
    close(y.detach()[:, others], plain(clean, bias, norm._replace(mean=mean * 0), True)[:, others].double())
    assert x.grad[:, others].isfinite().all()


def corners(where):
    """The flat index of each window's first element in its 4x4 image."""
    i = torch.arange(2, device=where.device)
    return i[:, None] * 8 + i * 2


@pytest.mark.parametrize("pool", [False, True])
def check_gradients_in_any_layout_and_the_same_bits_twice(pool):
    x, bias = images((4, 20, 6, 6)).requires_grad_(), torch.randn(20, device=DEVICE, requires_grad=True)
    found = []
    norm = fused.Norm(torch.zeros(20, device=DEVICE), torch.ones(20, device=DEVICE), 0.1, 1e-5)
    for layout in ("channels last", "channels first", "channels last"):
        y = fused.norm_gelu(x, bias, norm, pool)
        dy = images(y.shape, seed=4)
        found.append(torch.autograd.grad(y, (x, bias), dy if layout == "channels last" else dy.contiguous()))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    y = fused.norm_gelu(x, bias, norm, pool)
    y.sum().backward()  # a gradient that is one number, repeated
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("pool", [False, True])
def check_an_unusual_first_pixel(pool):
    """The statistics are taken around it."""
    x = images((9, 4, 6, 6))
    x[0, 0, 0, 0], x[0, 1, 0, 0], x[0, 2, 0, 0] = 1e4, -1e4, float("-inf")
    if not pool:
        x[0, 2, 0, 0] = 0.0
    for i, (got, expected) in enumerate(zip(*both(x, pool), strict=True)):
        close(got, expected, floor=1e4 * 2**-23 if i == 3 else 0.0)  # of a mean of float32 differences from 1e4


def check_what_can_be_taken():
    x = images((2, 3, 4, 4))
    assert fused.usable(x) and fused.usable(x.bfloat16())
    assert not fused.usable(x.contiguous()) and not fused.usable(x.double()) and not fused.usable(x[0])
    assert not fused.usable(x[:0]) and not fused.usable(x[:, :, ::2])
    assert not fused.usable(x.to("meta"))
    bias, mean, var = (torch.zeros(3, device=DEVICE) for _ in range(3))
    norm = fused.Norm(mean, var, 0.1, 1e-5)
    for wrong, words in (
        ((x.contiguous(), bias, norm), "x must be channels last"),
        ((images((1, 3, 2, 2)), bias, norm, True), "x must leave more than one value"),
        ((images((4, 3, 1, 4)), bias, norm, True), "more than one"),
        ((x, bias[:2], norm), r"bias must be \(3,\)"),
        ((x, bias, norm._replace(var=var[:2])), r"running_var must be \(3,\)"),
        ((x, bias, norm, True, x), "residual must be"),
    ):
        with pytest.raises(ValueError, match=words):
            fused.norm_gelu(*wrong)


test_on_the_kernels = in_another_process(__file__, globals())
