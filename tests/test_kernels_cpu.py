"""The fused CPU paths against the plain formula in float64: every option, layout, dtype and way of calling them."""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad

from gsoftmax import functional, kernels
from gsoftmax.checks import Options
from gsoftmax.functional import gsoftmax_cross_entropy
from gsoftmax.kernels import chunked, native
from gsoftmax.kernels.linear import Linear

PATHS = ("chunked", "native")
INF = float("inf")


def need(path: str) -> None:
    """A missing compiled kernel is a failure wherever it could have been built."""
    why = native.unavailable() if path == "native" else ""
    if not why:
        return
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip(f"no C compiler on this machine: {why}")
    pytest.fail(f"{why}; build it with `python setup.py build_ext --inplace`")


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    need(request.param)
    return request.param


@pytest.fixture
def compiled() -> None:
    need("native")


def example(*shape: int, kind: str = "labels", spread: float = 3.0, seed: int = 0) -> tuple[Tensor, ...]:
    """x, target, mu, sigma."""
    g = torch.Generator().manual_seed(seed)
    c = shape[1] if len(shape) > 1 else shape[0]
    rows = shape[:1] + shape[2:] if len(shape) > 1 else ()
    x = spread * torch.randn(shape, generator=g)
    if kind == "labels":
        target = torch.randint(c, rows, generator=g)
    else:
        target = torch.randn(shape, generator=g).softmax(1 if len(shape) > 1 else 0)
    return x, target, torch.randn(c, generator=g), torch.rand(c, generator=g) + 0.2


def run(impl: str, x: Tensor, target: Tensor, mu: Tensor, sigma: Tensor, lam: float = 1.3, grad=None, dtype=None, **kw):
    """Loss and gradients of x, mu, sigma; in another dtype when given."""
    if dtype is not None:
        x, mu, sigma = x.to(dtype), mu.to(dtype), sigma.to(dtype)
        target = target.to(dtype) if target.is_floating_point() else target
        if kw.get("weight") is not None:
            kw["weight"] = kw["weight"].to(dtype)
    leaves = [v.detach().requires_grad_() for v in (x, mu, sigma)]
    loss = gsoftmax_cross_entropy(leaves[0], target, leaves[1], leaves[2], lam, impl=impl, **kw)
    loss.backward(torch.ones_like(loss) if grad is None else grad.to(loss.dtype))
    return loss.detach(), *(v.grad for v in leaves)


def assert_close(seen, expected, tolerance: float = 3e-6, floor: float = 1e-30) -> None:
    """Errors relative to the largest value, or to `floor` where all values may be small differences of p and y."""
    for name, a, b in zip(("loss", "dx", "dmu", "dsigma"), seen, expected, strict=True):
        assert a.shape == b.shape, name
        assert torch.equal(a.isnan(), b.isnan()), name
        assert torch.equal(a.isinf(), b.isinf()), name
        ok = b.isfinite()
        scale = b[ok].abs().max().item() if ok.any() else 1.0
        worst = (a[ok].double() - b[ok].double()).abs().max().item() if ok.any() else 0.0
        assert worst <= tolerance * max(scale, floor), f"{name}: off by {worst} where the largest is {scale}"


# ------------------------------------------------------------------------------------------------------- every option

OPTIONS = list(itertools.product(("mean", "sum", "none"), (0.0, 0.1), (False, True), ("labels", "ignored", "prob")))
SHAPES = [(7,), (5, 1), (4, 2), (6, 16), (3, 33), (2, 1025), (3, 2100), (2, 5, 3), (2, 17, 3, 2), (40, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_options(path: str, shape: tuple[int, ...]) -> None:
    for i, (reduction, smoothing, weighted, kind) in enumerate(OPTIONS):
        x, target, mu, sigma = example(*shape, kind="prob" if kind == "prob" else "labels", seed=i)
        if kind == "ignored":
            if not target.ndim:
                continue
            target.view(-1)[::2] = -7
        weight = torch.rand(mu.shape, generator=torch.Generator().manual_seed(i)) + 0.1 if weighted else None
        ignore_index = -7 if kind == "ignored" else -100
        options = dict(weight=weight, reduction=reduction, label_smoothing=smoothing, ignore_index=ignore_index)
        rows = x.shape[:1] + x.shape[2:] if reduction == "none" and x.ndim > 1 else ()
        grad = torch.randn(rows, generator=torch.Generator().manual_seed(i))
        seen = run(path, x, target, mu, sigma, grad=grad, **options)
        assert seen[0].dtype == torch.float32
        assert_close(seen, run("plain", x, target, mu, sigma, grad=grad, dtype=torch.float64, **options), 5e-6, 0.05)


@pytest.mark.parametrize("shape, lams", [((3001, 11), [1.3]), ((5, 30011), [1.3]), ((20, 30), [1e-3, 1, 40, 300])])
def test_sizes_and_lam(path: str, shape: tuple[int, ...], lams: list[float]) -> None:
    args = example(*shape)
    for lam in lams:
        seen, expected = run(path, *args, lam=lam), run("plain", *args, lam=lam, dtype=torch.float64)
        assert_close(seen, expected, 3e-6 if lam == 1.3 else 1e-5)


def test_long_sums(path: str) -> None:
    """dmu and dsigma of very many rows that all pull the same way; a single float32 sum would lose the fifth digit."""
    x, target, mu, sigma = example(300_000, 3)
    args = x, torch.zeros_like(target), mu, sigma
    assert_close(run(path, *args), run("plain", *args, dtype=torch.float64), 1e-6)


def test_uint8_labels(path: str) -> None:
    x, target, mu, sigma = example(5, 7)
    assert_close(run(path, x, target.to(torch.uint8), mu, sigma), run(path, x, target, mu, sigma), 0.0)


def test_label_zero_as_ignore_index(path: str) -> None:
    x, target, mu, sigma = example(9, 3)
    seen = run(path, x, target, mu, sigma, ignore_index=0)
    assert_close(seen, run("plain", x, target, mu, sigma, ignore_index=0, dtype=torch.float64))
    assert (seen[1][target == 0] == 0).all()


def test_all_ignored(path: str) -> None:
    x, target, mu, sigma = example(4, 5)
    loss, dx, dmu, dsigma = run(path, x, torch.full_like(target, -100), mu, sigma)
    assert loss.isnan() and not dx.any() and not dmu.any() and not dsigma.any()
    assert run(path, x, torch.full_like(target, -100), mu, sigma, reduction="sum")[0] == 0


def test_empty_batch() -> None:
    args = torch.zeros(0, 5), torch.zeros(0, dtype=torch.long), torch.zeros(5), torch.ones(5)
    assert gsoftmax_cross_entropy(*args).isnan()
    assert gsoftmax_cross_entropy(*args, reduction="sum") == 0
    assert gsoftmax_cross_entropy(*args, reduction="none").shape == (0,)
    for impl in PATHS:
        with pytest.raises(ValueError, match="x is empty"):
            gsoftmax_cross_entropy(*args, impl=impl)


# -------------------------------------------------------------------------------------------- numbers at their extremes


def test_masked_classes(path: str) -> None:
    """Some of a tile, whole tiles, and the label itself, whose loss is infinite."""
    x, target, mu, sigma = example(3, 3000)
    x[:, :2048] = -INF
    x[:, 2100:2150] = -INF
    target = torch.tensor([2500, 10, 2999])
    for options in ({}, {"label_smoothing": 0.1}):
        seen = run(path, x, target, mu, sigma, reduction="none", **options)
        assert_close(seen, run("plain", x, target, mu, sigma, reduction="none", dtype=torch.float64, **options))
        assert all(v.isfinite().all() for v in seen[1:])
        assert seen[0].isinf().tolist() == [options != {}, True, options != {}]


def test_rows_without_a_softmax(path: str) -> None:
    x, target, mu, sigma = example(6, 20)
    x[1] = -INF
    x[2, 3] = INF
    x[4, 5] = float("nan")
    loss, dx, _, _ = run(path, x, target, mu, sigma, reduction="none")
    bad = torch.tensor([False, True, True, False, True, False])
    assert torch.equal(loss.isnan(), bad)
    assert dx[bad].isnan().all() and dx[~bad].isfinite().all()
    # ... and where they are ignored, nothing of them is left
    target[bad] = -100
    seen = run(path, torch.where(x == -INF, x, torch.nan_to_num(x, nan=0.0, posinf=0.0)), target, mu, sigma)
    assert all(v.isfinite().all() for v in seen)
    assert not seen[1][bad].any()


@pytest.mark.parametrize("sigma", (1e-40, 1e-6, 1e-3, 1e3, 1e30))
def test_sigma(path: str, sigma: float) -> None:
    x, target, mu, _ = example(12, 9)
    x[0, : 9 if sigma == 1e-40 else 1] = mu[: 9 if sigma == 1e-40 else 1]  # only there a narrow Gaussian has a slope
    args = x, target, mu, torch.full_like(mu, sigma)
    seen = run(path, *args)
    assert all(v.isfinite().all() for v in seen)
    if sigma > 1e-40:  # whose slope is beyond float32
        assert_close(seen, run("plain", *args, dtype=torch.float64))


@pytest.mark.parametrize("offset", (-1e4, 1e4))
def test_offset(path: str, offset: float) -> None:
    x, target, mu, sigma = example(30, 50)
    x = (x * 64).round() / 64 + offset  # exact, so that float64 sees the same numbers
    for options in ({}, {"label_smoothing": 0.2}):
        seen, expected = run(path, x, target, mu + offset, sigma, **options), run(
            "plain", x, target, mu + offset, sigma, dtype=torch.float64, **options
        )  # fmt: skip
        # z has 2^-11 between neighbours there
        assert_close(seen, expected, 1e-3)


def test_phi_to_the_last_digits(path: str) -> None:
    """Two classes, one held down by its own Gaussian: the loss shows Phi itself."""
    u = torch.linspace(-13, 13, 20001)
    x = torch.stack([u, torch.zeros_like(u)], 1)
    mu, sigma, target = torch.tensor([0.0, -1000.0]), torch.ones(2), torch.zeros(len(u), dtype=torch.long)
    loss = gsoftmax_cross_entropy(x, target, mu, sigma, 1.0, reduction="none", impl=path)
    exact = gsoftmax_cross_entropy(x.double(), target, mu.double(), sigma.double(), 1.0, reduction="none")
    assert ((loss - exact).abs() / exact.clamp_min(1)).max() < 3e-7


# ----------------------------------------------------------------------------------------------------- dtypes, layouts


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("shape", ((5, 7), (4, 1030), (2, 9, 5)), ids=str)
def test_half_precision(path: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, target, mu, sigma = example(*shape)
    x = x.to(dtype)
    for reduction in ("mean", "none"):
        loss, dx, dmu, dsigma = run(path, x, target, mu, sigma, reduction=reduction)
        same = run(path, x.float(), target, mu, sigma, reduction=reduction)
        assert loss.dtype == dx.dtype == dtype
        assert dmu.dtype == dsigma.dtype == torch.float32
        # The arithmetic is float32, rounded once
        assert torch.equal(loss, same[0].to(dtype))
        assert torch.equal(dx, same[1].to(dtype))
        assert torch.equal(dmu, same[2]) and torch.equal(dsigma, same[3])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gsoftmax_cross_entropy(x, target, mu, sigma, impl=path).dtype == torch.float32


@pytest.mark.parametrize("isa", (1, 2, 3))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_every_half_number(compiled: None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, isa: int) -> None:
    """In: all finite values.  Out: all of them too, what lies halfway between two, next to that, and beyond the end."""
    if isa > native.best_instructions():
        pytest.skip(f"this processor has no {native.INSTRUCTIONS[isa]}")
    monkeypatch.setattr(native, "instructions", isa)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    c = 11  # a whole vector of conversions, and some one by one
    x = every[: len(every) // c * c].view(-1, c)
    target, mu, sigma = torch.arange(len(x)) % c, torch.zeros(c), torch.full((c,), 1e-3)
    options = (1.0, Options(reduction="none"), (True, True, True))
    half, single = (native.evaluate(v, target, mu, sigma, *options) for v in (x, x.float()))
    for a, b in zip(half, single, strict=True):
        assert torch.equal(a, b.to(a.dtype))

    up = every.float().sort().values
    between = up[:-1] / 2 + up[1:] / 2
    grad = torch.cat(
        [up, between, between.nextafter(up[1:]), between.nextafter(up[:-1]), (1.01 * up).clamp(-3.4e38, 3.4e38)]
    )
    # One class has all the probability, the target is its neighbour, and no slope is left: dx is grad and -grad there.
    at = torch.arange(len(grad)) % c
    x = torch.full((len(grad), c), -INF).scatter(1, at[:, None], 0.0)
    right = torch.zeros(len(grad), c).scatter(1, torch.stack([at, (at + 1) % c], 1), torch.stack([grad, -grad], 1))
    _, dx, _, _ = native.evaluate(x.to(dtype), (at + 1) % c, mu, torch.full((c,), 1e30), *options, grad)
    assert torch.equal(dx, right.to(dtype))


def test_float16_gradients_survive_a_loss_scale(path: str) -> None:
    """A mean over many rows makes gradients that float16 has no room for until the scale has lifted them."""
    x, target, mu, sigma = example(4096, 64, spread=1.0)
    scale = torch.tensor(4096.0)
    dx = run(path, x.half(), target, mu, sigma, grad=scale)[1]
    expected = run("plain", x.half(), target, mu, sigma, grad=scale, dtype=torch.float64)[1]
    assert ((dx.double() - expected).abs() <= 6e-4 * expected.abs() + 4e-8).all()


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The same numbers at other places in memory."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), float("nan"), dtype=x.dtype)
    wide[..., 1::2] = x
    out = {"apart": wide[..., 1::2], "transposed": x.transpose(0, 1).contiguous().transpose(0, 1)}
    if x.ndim == 4:
        out["channels last"] = x.contiguous(memory_format=torch.channels_last)
        out["swapped"] = x.transpose(2, 3).contiguous().transpose(2, 3)
    return out


@pytest.mark.parametrize("shape", ((5, 7), (19, 1030), (3, 9, 5), (2, 20, 3, 7)), ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_layouts(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for kind in ("labels", "prob"):
        x, target, mu, sigma = example(*shape, kind=kind)
        x = x.to(dtype)
        expected = run(path, x, target, mu, sigma)
        for name, v in layouts(x).items():
            assert not v.is_contiguous() and torch.equal(v, x), name
            assert_close(run(path, v, target, mu, sigma), expected, 1e-6 if dtype == torch.float32 else 4e-3)
        if kind == "prob":
            for v in layouts(target).values():
                assert_close(run(path, x, v, mu, sigma), expected, 1e-6 if dtype == torch.float32 else 4e-3)
    other = target if kind == "labels" else example(*shape)[1]
    apart = torch.stack([other, other + 1], -1)[..., 0]
    spread = [torch.stack([v, -v], 1)[:, 0] for v in (mu, sigma)]
    assert_close(run(path, x, apart, *spread), run(path, x, other, mu, sigma), 1e-6)


def test_expanded_input_and_inputs_stay_untouched(path: str) -> None:
    x, _, mu, sigma = example(1, 1100)
    args = x.expand(6, 1100), torch.arange(6), mu, sigma
    before = [v.clone() for v in args]
    assert_close(run(path, *args), run(path, *before), 1e-6)
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True))


# ---------------------------------------------------------------------------------------------------- the kernel itself


def all_of_native(x: Tensor, target: Tensor, mu: Tensor, sigma: Tensor) -> tuple[Tensor, ...]:
    return native.evaluate(x, target, mu, sigma, 1.0, Options(label_smoothing=0.05), (True, True, True))


@pytest.mark.parametrize("isa", (1, 2, 3))
def test_instruction_sets(compiled: None, monkeypatch: pytest.MonkeyPatch, isa: int) -> None:
    if isa > native.best_instructions():
        pytest.skip(f"this processor has no {native.INSTRUCTIONS[isa]}")
    monkeypatch.setattr(native, "instructions", isa)
    for shape in ((7, 5), (9, 16), (5, 31), (3, 2051), (3, 33, 4)):
        for kind in ("labels", "prob"):
            x, target, mu, sigma = example(*shape, kind=kind)
            x[0, 1] = -INF if kind == "labels" else -50.0
            target = torch.where(target == 1, 0, target) if kind == "labels" else target
            for options in ({}, {"reduction": "none"}, {"weight": torch.linspace(0.5, 2, shape[1])}):
                seen = run("native", x, target, mu, sigma, **options)
                assert_close(seen, run("plain", x, target, mu, sigma, dtype=torch.float64, **options), 5e-6)


@pytest.mark.parametrize("team", (True, False))
def test_threads(compiled: None, monkeypatch: pytest.MonkeyPatch, team: bool) -> None:
    """Any number of them, torch's or our own: the same to rounding, and always the same bits."""
    args = example(257, 7003)
    if not team:
        monkeypatch.setattr(native, "_team", 0)
    results = []
    for threads in (1, 2, 3, 7) if team else (1, 2, 7, 100, 500):  # 109 of them have enough to do
        monkeypatch.setattr(native, "_get_num_threads", lambda threads=threads: threads)
        results.append(all_of_native(*args))
        for _ in range(3 if threads < 100 else 1):
            assert all(torch.equal(a, b) for a, b in zip(all_of_native(*args), results[-1], strict=True))
    for seen in results[1:]:
        assert torch.equal(seen[1], results[0][1])
        assert_close(seen, results[0], 1e-6)


def poisoned(make):
    def made(*args, **kwargs):
        out = make(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    return made


@pytest.mark.parametrize("shape", ((5, 7), (3, 2051), (2, 9, 5), (70, 3)), ids=str)
def test_everything_is_written(path: str, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    """Outputs and scratch memory that begin as NaN or rubbish end as the answer."""
    cases = [(example(*shape, kind=kind), reduction) for kind in ("labels", "prob") for reduction in ("mean", "none")]
    expected = [run(path, *args, reduction=reduction) for args, reduction in cases]
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(native, "_empty", torch.empty)
    monkeypatch.setattr(native, "_empty_like", torch.empty_like)
    fill = getattr(ctypes.CDLL(None), "mallopt", None)  # lets glibc fill new memory with a pattern
    try:
        if fill:
            fill(-6, 0x80)
        for (args, reduction), right in zip(cases, expected, strict=True):
            for dtype in (None, torch.bfloat16):
                seen = run(path, args[0].to(dtype or torch.float32), *args[1:], reduction=reduction)
                assert all(v.isfinite().all() for v in seen)
                if dtype is None:
                    assert_close(seen, right, 0.0)
    finally:
        if fill:
            fill(-6, 0)


def test_no_memory_beyond_the_row_is_touched(compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows inside a larger tensor: what lies between and around them stays."""
    x, target, mu, sigma = example(6, 13)
    room = torch.full((8, 20), 123.0)
    room[1:7, 3:16] = x
    view = room[1:7, 3:16]
    out = torch.full((8, 20), 77.0)
    monkeypatch.setattr(native, "_empty_like", lambda v: out[1:7, 3:16] if v.ndim == 2 else torch.empty_like(v))
    _, dx, _, _ = native.evaluate(view, target, mu, sigma, 1.3, Options(), (True, True, True))
    expected = run("plain", x, target, mu, sigma, dtype=torch.float64)[1]
    assert (dx - expected).abs().max() < 1e-6
    out[1:7, 3:16] = 77.0
    assert (out == 77.0).all()


def test_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one row, of a part of one example, and of several examples."""
    for shape in ((23, 7), (4, 5, 6)):
        args = example(*shape)
        expected = run("plain", *args, dtype=torch.float64)
        for size in (1, 10, 15, 40, 10**6):
            monkeypatch.setattr(chunked, "CHUNK", size)
            assert_close(run("chunked", *args), expected)


# -------------------------------------------------------------------------------------------------------- with autograd


def test_second_backward(path: str) -> None:
    """A retained graph gives the same again, though the first gradients have been given away and changed."""
    x, target, mu, sigma = example(6, 9)
    for reduction in ("mean", "sum", "none"):
        leaves = [v.clone().requires_grad_() for v in (x, mu, sigma)]
        loss = gsoftmax_cross_entropy(leaves[0], target, *leaves[1:], impl=path, reduction=reduction).sum()
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        copies = [v.clone() for v in first]
        for v in first:
            v.zero_()
        second = torch.autograd.grad(loss, leaves, retain_graph=True)
        third = torch.autograd.grad(3 * loss, leaves)
        for a, b, c in zip(copies, second, third, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(3 * a, c, rtol=1e-5, atol=1e-6)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(loss, leaves)


def test_x_may_change_after_the_loss(path: str) -> None:
    """As with torch's own loss: the gradient is of the x that was seen."""
    x, target, mu, sigma = example(6, 9)
    leaf = x.clone().requires_grad_()
    copy = leaf * 1
    loss = gsoftmax_cross_entropy(copy, target, mu, sigma, impl=path)
    copy.detach().zero_()
    loss.backward()
    torch.testing.assert_close(leaf.grad, run("plain", x, target, mu, sigma, lam=1.0)[1])


@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_double_backward(path: str, reduction: str) -> None:
    def hessian_times_ones(impl: str, dtype: torch.dtype) -> list[Tensor]:
        x, target, mu, sigma = example(4, 6, spread=1.0)
        leaves = [v.to(dtype).requires_grad_() for v in (x, mu, sigma)]
        scale = torch.tensor(2.0, dtype=dtype, requires_grad=True)
        loss = gsoftmax_cross_entropy(leaves[0], target, *leaves[1:], impl=impl, reduction=reduction).sum() * scale
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
        return [*grads, *torch.autograd.grad(sum((v**2).sum() for v in grads), [*leaves, scale])]

    for a, b in zip(hessian_times_ones(path, torch.float32), hessian_times_ones("plain", torch.float64), strict=True):
        torch.testing.assert_close(a, b.float(), rtol=2e-5, atol=2e-6)


def test_only_what_is_wanted(path: str) -> None:
    x, target, mu, sigma = example(7, 11)
    expected = run("plain", x, target, mu, sigma, lam=1.0, dtype=torch.float64)
    for wanted in itertools.product((False, True), repeat=3):
        for reduction in ("mean", "none"):
            leaves = [v.clone().requires_grad_(w) for v, w in zip((x, mu, sigma), wanted, strict=True)]
            loss = gsoftmax_cross_entropy(leaves[0], target, *leaves[1:], impl=path, reduction=reduction).mean()
            assert loss.requires_grad == any(wanted)
            if any(wanted):
                loss.backward()
            for leaf, w, right in zip(leaves, wanted, expected[1:], strict=True):
                assert (leaf.grad is not None) == w
                if w:
                    torch.testing.assert_close(leaf.grad, right.float(), rtol=1e-5, atol=1e-7)


def test_no_grad_makes_no_gradient(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, target, mu, sigma = example(7, 11)
    module = native if path == "native" else chunked
    wanted = []

    def watched(*args):
        wanted.append(args[6])
        return evaluate(*args)

    evaluate = module.evaluate
    monkeypatch.setattr(module, "evaluate", watched)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            loss = gsoftmax_cross_entropy(x.clone().requires_grad_(), target, mu, sigma, impl=path)
        assert not loss.requires_grad
    gsoftmax_cross_entropy(x, target, mu, sigma, impl=path)
    assert wanted == [(False, False, False)] * 3
    assert loss.item() == pytest.approx(run("plain", x, target, mu, sigma, lam=1.0)[0].item(), rel=1e-6)


def test_compile_sees_one_graph() -> None:
    args = example(6, 9)
    expected = run("auto", *args)
    x, target, mu, sigma = args[0].requires_grad_(), *args[1:]
    torch.compile(gsoftmax_cross_entropy, fullgraph=True, backend="aot_eager")(x, target, mu, sigma, 1.3).backward()
    torch.testing.assert_close(x.grad, expected[1])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # torch's own, when forward mode is first used
def test_transforms() -> None:
    x, target, mu, sigma = example(5, 7)
    expected = run("plain", x, target, mu, sigma, lam=1.0)
    dx = torch.func.grad(lambda v: gsoftmax_cross_entropy(v, target, mu, sigma))(x)
    torch.testing.assert_close(dx, expected[1])
    each = torch.func.vmap(lambda v, t: gsoftmax_cross_entropy(v, t, mu, sigma), in_dims=(0, 0))(x, target)
    torch.testing.assert_close(each.mean(), expected[0])
    tangent = torch.randn_like(x)
    along = torch.func.jvp(lambda v: gsoftmax_cross_entropy(v, target, mu, sigma), (x,), (tangent,))[1]
    torch.testing.assert_close(along, (tangent * expected[1]).sum())
    with forward_ad.dual_level():
        dual = gsoftmax_cross_entropy(forward_ad.make_dual(x, tangent), target, mu, sigma)
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, along)


def test_gradients_for_target_and_weight() -> None:
    x, target, mu, sigma = example(5, 7, kind="prob")
    target.requires_grad_()
    assert kernels.explain(x, target, mu, sigma) == kernels.Path("plain", "target or weight requires a gradient")
    gsoftmax_cross_entropy(x, target, mu, sigma).backward()
    assert target.grad is not None


# -------------------------------------------------------------------------------------------------- errors, the choice


def test_labels_out_of_range(path: str) -> None:
    x, target, mu, sigma = example(4, 5)
    for wrong in (5, -1, 2**62):
        target[2] = wrong
        message = f"target must lie between 0 and 4 or be ignore_index=-100, got {wrong}"
        with pytest.raises(ValueError, match=message):
            gsoftmax_cross_entropy(x, target, mu, sigma, impl=path)
    x.requires_grad_()
    with pytest.raises(ValueError, match="must lie between"):
        gsoftmax_cross_entropy(x, target, mu, sigma, impl=path)


def test_sigma_is_checked(path: str) -> None:
    """The kernels check it too, so that no extra pass is needed."""
    x, target, mu, sigma = example(4, 5)
    for wrong in (0.0, -1.0, float("nan")):
        sigma[3] = wrong
        with pytest.raises(ValueError, match=f"sigma must be positive, got a minimum of {wrong}"):
            kernels.cross_entropy(x, target, mu, sigma, 1.0, Options(), path)


def test_explain(compiled: None) -> None:
    x, target, mu, sigma = example(4, 5)
    path = kernels.explain(x, target, mu, sigma)
    threads = torch.get_num_threads()
    end = f"{native.explain_instructions()}, {threads} thread{'s' if threads > 1 else ''}"
    assert str(path) == f"native: the compiled kernel, {end}"
    assert kernels.explain(x, target, mu, sigma, impl="native").why == f"impl='native', {end}"
    assert kernels.explain(x, target, mu, sigma, impl="chunked") == kernels.Path("chunked", "impl='chunked'")
    assert kernels.explain(x, target, 0.0, 1.0, 0.0).why.startswith("lam is 0")
    assert kernels.explain(x.double(), target, mu, sigma) == kernels.Path("plain", "x is torch.float64")
    assert kernels.explain(x[:0], target[:0], mu, sigma) == kernels.Path("plain", "x is empty")
    meta = kernels.explain(x.to("meta"), target.to("meta"), mu.to("meta"), sigma.to("meta"))
    assert meta == kernels.Path("plain", "x is on meta")
    with pytest.raises(ValueError, match="impl must be one of auto, plain, chunked, native, triton, got 'fast'"):
        kernels.explain(x, target, mu, sigma, impl="fast")
    with pytest.raises(ValueError, match="impl='native' is not available: x is torch.float64"):
        gsoftmax_cross_entropy(x.double(), target, mu.double(), sigma.double(), impl="native")


def test_choice_for_a_linear_layer(compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk by chunk from a certain size on; the loss of a chunk by the path that was asked for, or the best."""
    _, target, mu, sigma = example(6, 40)
    h, weight, bias = torch.randn(6, 5), torch.randn(40, 5), torch.randn(40)

    def choose(impl: str, dtype: torch.dtype = torch.float32) -> tuple[str, str]:
        layer = Linear(h.to(dtype), weight.to(dtype), bias.to(dtype))
        return kernels._choose_linear(impl, 1.0, layer, (target, mu.to(dtype), sigma.to(dtype), None))

    assert choose("auto") == ("plain", "x has 240 elements, few enough to compute without chunks")
    monkeypatch.setitem(kernels.LARGE_LINEAR, "cpu", 240)
    assert choose("auto") == ("native", "x has 240 elements")
    for impl in ("plain", "chunked", "native"):
        assert choose(impl) == (impl, f"impl={impl!r}")
    assert choose("auto", torch.float64) == ("plain", "h is torch.float64")
    with pytest.raises(ValueError, match="impl='native' is not available: h is torch.float64"):
        choose("native", torch.float64)
    with pytest.raises(ValueError, match="impl must be one of auto, .* got 'fast'"):
        choose("fast")
    monkeypatch.setattr(native, "unavailable", lambda: "the compiled kernel was not built")
    assert choose("auto") == ("chunked", "the compiled kernel was not built")


def test_chunked_in_double() -> None:
    args = example(6, 40)
    assert_close(run("chunked", *args, dtype=torch.float64), run("plain", *args, dtype=torch.float64), 1e-13)


def test_without_the_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "unavailable", lambda: "the compiled kernel was not built")
    small, large = example(4, 5), example(40, 1000)
    assert kernels.explain(*small).name == "plain"
    assert kernels.explain(*large) == kernels.Path("chunked", "the compiled kernel was not built")
    assert_close(run("auto", *large), run("plain", *large, dtype=torch.float64))
    with pytest.raises(ValueError, match="impl='native' is not available: the compiled kernel was not built"):
        gsoftmax_cross_entropy(*small, impl="native")


def test_which_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor's widest, but not wider than torch's; tests can request others."""
    cases = {
        (3, "AVX512", ""): "AVX-512",
        (3, "SOMETHING NEW", ""): "AVX-512",
        (2, "AVX512", ""): "AVX2",
        (1, "SVE256", ""): native.INSTRUCTIONS[1],
        (3, "AVX2", "avx2"): "AVX2 (ATEN_CPU_CAPABILITY; the processor has AVX-512)",
        (2, "DEFAULT", "default"): f"{native.INSTRUCTIONS[1]} (ATEN_CPU_CAPABILITY; the processor has AVX2)",
        (3, "AVX2", ""): "AVX2 (no wider than torch's; the processor has AVX-512)",
    }
    for name in ("_call", "_call_terms", "_why", "_team", "_best", "_taken"):
        monkeypatch.setattr(native, name, getattr(native, name))
    for (processor, torchs, variable), expected in cases.items():
        monkeypatch.setattr(native, "_why", "not looked for")
        library = SimpleNamespace(
            gsoftmax_best_isa=lambda processor=processor: processor, gsoftmax_cross_entropy=None, gsoftmax_terms=None
        )
        monkeypatch.setattr(native, "_load", lambda library=library: (library, ""))
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda torchs=torchs: torchs)
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", variable)
        assert native.explain_instructions() == expected
    monkeypatch.setattr(native, "instructions", 1)
    why = f"{native.INSTRUCTIONS[1]} (native.instructions; the processor has AVX-512)"
    assert native.explain_instructions() == why


def test_a_process_of_its_own() -> None:
    """torch's variable holds for the kernel too, and importing the package does not import Triton."""
    code = """if 1:
        import sys, gsoftmax, torch
        from gsoftmax.kernels import native
        assert not any(name.split(".")[0] == "triton" for name in sys.modules)
        assert native.unavailable() or native._taken == 1, native._taken
    """
    env = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)


# ------------------------------------------------------------------------------------------- a library built elsewhere

SOURCE = Path(native.__file__).with_name("native.c")


def compilers(folder: Path) -> list[str]:
    """Those of this machine that can make a library, each once."""
    (folder / "probe.c").write_text("#include <math.h>\n#include <pthread.h>\nint one(void) { return 1; }\n")
    found = {}
    for name in ("cc", "gcc", "clang", "aarch64-linux-gnu-gcc"):
        file = shutil.which(name)
        command = [name, "-shared", "-fPIC", "-o", folder / "probe.so", folder / "probe.c"]
        if file and not subprocess.run(command, capture_output=True).returncode:
            found.setdefault(os.path.realpath(file), name)
    return list(found.values())


def test_compiles_without_a_warning_and_with_each_instruction_in_its_place(tmp_path: Path) -> None:
    """Only the copies meant for them have AVX instructions: the rest must run on a processor without any."""
    library = tmp_path / "kernel.so"
    for compiler in compilers(tmp_path):
        x86 = platform.machine() == "x86_64" and not compiler.startswith("aarch64")
        # not all warnings: compilers to come will have others
        errors = [f"-Werror={name}" for name in ("implicit-function-declaration", "int-conversion", "format")]
        options = ["-O2", "-Wall", "-Wextra", *errors, "-shared", "-fPIC", *(["-march=x86-64"] if x86 else [])]
        subprocess.run([compiler, *options, "-o", library, SOURCE, "-lm", "-lpthread"], check=True)
        if not x86 or not shutil.which("objdump"):
            continue
        command = ["objdump", "-d", "--no-show-raw-insn", library]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        function, wide = "", set()
        for line in lines:
            if header := re.match(r"[0-9a-f]+ <(.+)>:$", line):
                function = header[1]
            elif re.match(r"\s+[0-9a-f]+:\s+v", line):  # AVX, all of it
                wide.add(re.search("_(avx2|avx512)|$", function)[1] or function)
        assert wide == {"avx2", "avx512"}, compiler


@pytest.mark.parametrize("lie", ("__SIZEOF_POINTER__=4", "__BYTE_ORDER__=__ORDER_BIG_ENDIAN__"))
def test_unsupported_machines_are_rejected_at_compile_time(tmp_path: Path, lie: str) -> None:
    """The layout of a job takes 64 bits and little-endian numbers for granted."""
    for compiler in compilers(tmp_path):
        command = [compiler, "-w", "-fsyntax-only", f"-D{lie}", SOURCE]
        assert "64-bit little-endian" in subprocess.run(command, capture_output=True, text=True).stderr, compiler


def test_an_unusable_library_falls_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Built for another machine, from another version, or not at all: falls back and gives the reason."""

    built, (_, header) = native._files()

    def why(library: Path | None, *sources: Path) -> str:
        found = library, sources or (SOURCE, header)
        for name, value in (("_call", None), ("_why", "not looked for"), ("_files", lambda: found)):
            monkeypatch.setattr(native, name, value)
        path = kernels.explain(*large)
        assert path.name == "chunked" and path.why == native.unavailable()
        with pytest.raises(RuntimeError, match=re.escape(path.why)):
            all_of_native(*large)
        return path.why

    large = example(40, 1000)
    again = "; install gsoftmax again to build it here"
    nowhere, other, broken = tmp_path / "native.c", tmp_path / "_native.cpython-27-vax.so", tmp_path / "broken.so"
    assert why(None, nowhere) == "the compiled kernel was not built (no C compiler when the package was installed)"
    other.write_bytes(b"")
    assert (
        why(None, nowhere) == f"the compiled kernel was not built for this Python and machine, only {other.name}{again}"
    )
    broken.write_bytes(b"not a library")
    said = why(broken)
    assert said.startswith("the compiled kernel does not load; was it built on another machine? (") and again in said
    another_version = f"the compiled kernel was built from another version of native.c{again}"
    assert why(Path(torch._C.__file__)) == another_version  # none of the names in it
    if built:
        for changed in (SOURCE, header):
            nowhere.write_bytes(changed.read_bytes() + b"\n")
            sources = (nowhere, header) if changed == SOURCE else (SOURCE, nowhere)
            assert why(built, *sources) == another_version
        nowhere.unlink()
        monkeypatch.setattr(native, "_files", lambda: (built, (nowhere, header)))
        assert native._load()[1] == ""  # an installed package has no source
        elsewhere = bytearray(built.read_bytes())
        elsewhere[18:20] = b"\x08\x00"  # an ELF header's processor: MIPS
        broken.write_bytes(elsewhere)
        if elsewhere.startswith(b"\x7fELF"):
            assert why(broken).startswith("the compiled kernel does not load")
    for compiler in compilers(tmp_path):
        (tmp_path / "new.c").write_text("int missing(void); int gsoftmax_cross_entropy(void) { return missing(); }")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", broken, tmp_path / "new.c"], check=True)
        broken.rename(tmp_path / f"{compiler}.so")  # loaders cache libraries by name
        assert why(tmp_path / f"{compiler}.so").startswith("the compiled kernel does not load")


# ----------------------------------------------------------------------------------------------------------- properties


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_all_paths_agree(data: st.DataObject) -> None:
    need("native")
    draw = data.draw
    n, c = draw(st.integers(1, 20)), draw(st.sampled_from([1, 2, 3, 15, 16, 17, 40, 257, 1024, 1025]))
    shape = draw(st.sampled_from([(n, c), (n, c, 3), (n % 3 + 1, c, 2, 2)]))
    kind = draw(st.sampled_from(["labels", "prob"]))
    x, target, mu, sigma = example(*shape, kind=kind, seed=draw(st.integers(0, 10**6)))
    options = dict(
        reduction=draw(st.sampled_from(["mean", "sum", "none"])),
        label_smoothing=draw(st.sampled_from([0.0, 0.3, 1.0])),
        weight=torch.linspace(0.5, 1.5, c) if draw(st.booleans()) else None,
    )
    lam = draw(st.floats(1e-3, 20.0))
    if kind == "labels" and draw(st.booleans()):
        target.view(-1)[:: draw(st.integers(2, 4))] = -100
    x = draw(st.sampled_from([x, *layouts(x).values()]))
    expected = run("plain", x, target, mu, sigma, lam, dtype=torch.float64, **options)
    for path in PATHS:
        assert_close(run(path, x, target, mu, sigma, lam, **options), expected, 2e-5, 0.05)
    assert functional.gsoftmax_cross_entropy(x, target, mu, sigma, lam, **options).dtype == torch.float32
