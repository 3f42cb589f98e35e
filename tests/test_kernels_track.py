"""The step of tracked Gaussians as one kernel, on a GPU or in Triton's interpreter (see `interpreter.py`)."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from gsoftmax import GSoftmaxHead, GSoftmaxLoss, gaussians, kernels
from gsoftmax.gaussians import GaussianLogits
from tests.interpreter import DEVICE, GPU, INSIDE, in_another_process, loops, poisoned, process, quiet  # noqa: F401

pytestmark = quiet

STEP = """
import os, sys, torch
from gsoftmax import gaussians, kernels

def step():
    layer = gaussians.GaussianLogits(3, gaussians="tracked", momentum=1.0)
    layer.current(torch.tensor([[1.0, 2.0, 3.0]]).requires_grad_())
    assert layer.mu.tolist() == [1.0, 2.0, 3.0]

step()
assert "gsoftmax.kernels.triton_track" not in sys.modules
sys.modules["triton"] = None
os.environ["TRITON_INTERPRET"] = "1"
step()
assert "Triton cannot be imported" in kernels.load_triton("triton_track")
"""

COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gsoftmax.kernels.triton_track import _track_kernel as kernel

for x, labels, stride, block_n, block_c, warps in [
    ("*fp32", "*i64", 1, 512, 16, 8), ("*bf16", "*i32", 1, 64, 64, 8), ("*fp16", None, 7, 16, 16, 1),
]:
    constants = {"LABELS": labels is not None, "UNIT": stride == 1, "BLOCK_N": block_n, "BLOCK_C": block_c}
    constants |= {"target": None} if labels is None else {}
    constants |= {"sx_c": 1} if stride == 1 else {}
    kinds = {"x": x, "target": labels, "N": "i32", "C": "i32", "sx_n": "i32", "sx_c": "i32", "st_n": "i32"}
    kinds |= {"ignore": "i32"} | {name: "*fp32" for name in ("mu", "rho", "fresh_mu", "fresh_sigma")}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "fp32") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, places)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert made.asm["cubin"] and "sqrt.rn.f64" in made.asm["ptx"]
    assert "atom." not in made.asm["ptx"] and "red.global" not in made.asm["ptx"]
print("compiled")
"""


def run_python(code, **environment):
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env={**inherited, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_step_on_the_cpu_does_not_import_triton_and_without_triton_torch_makes_it():
    run_python(STEP)


def test_the_kernel_compiles_for_a_gpu_that_is_not_there(tmp_path):
    pytest.importorskip("triton.backends.nvidia", reason="Triton is not installed, or has no compiler for NVIDIA")
    assert "compiled" in run_python(COMPILE, TRITON_CACHE_DIR=str(tmp_path))


if INSIDE:
    from gsoftmax.kernels import triton_track
    from gsoftmax.kernels.launching import Plan

    # Several steps down the rows and several programs even for small tables, with something left over of both.
    SMALL_TILES = Plan(block_n=8, block_c=16, rows=0, warps=1)


@pytest.fixture(params=["as planned", "small tiles"])
def tiles(request, monkeypatch):
    if request.param == "small tiles":
        monkeypatch.setattr(triton_track, "plan", lambda *_: SMALL_TILES)
        monkeypatch.setattr(triton_track, "calls", {})
        monkeypatch.setattr(triton_track, "remember", lambda key, call: call)
    return request.param


@pytest.fixture
def launches(monkeypatch):
    """How often the kernel was launched."""
    seen, launch = [], triton_track.launch

    def counted(*args):
        seen.append(args)
        launch(*args)

    monkeypatch.setattr(triton_track, "launch", counted)
    return seen


def layer_of(classes, *, momentum=0.3, sigma_min=0.01, seed=0, **options):
    """Tracked, with a different Gaussian per class."""
    generator = np.random.default_rng(seed)
    mu, sigma = generator.normal(size=classes) * 2, generator.uniform(0.3, 3, classes)
    return GaussianLogits(
        classes, mu=mu.tolist(), sigma=sigma.tolist(), gaussians="tracked", momentum=momentum, sigma_min=sigma_min,
        device=DEVICE, **options,
    )  # fmt: skip


def outputs(*shape, dtype="float32", seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 2 + torch.randn(shape[1:], generator=generator)
    return x.to(DEVICE, getattr(torch, dtype))


def labels_of(rows, classes, ignored, seed=2, dtype=torch.int64):
    """Labels, every third of them ignored."""
    target = torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(seed))
    target[::3] = ignored
    return target.to(DEVICE, dtype)


def values(tensor):
    return tensor.detach().cpu().double().numpy()


def mixture(mu, sigma, x, m, sigma_min=0.01):
    """Mean and deviation of the mixture of N(mu, sigma^2), of weight 1 - m, and of x (rows, classes), in float64."""
    mean = (1 - m) * mu + m * x.mean(0)
    second = (1 - m) * (sigma**2 + (mu - mean) ** 2) + m * ((x - mean) ** 2).mean(0)
    return mean, np.maximum(np.sqrt(second), sigma_min + 1e-6 * (sigma_min or 1e-6))


def close(got, expected, rows=0, relative=2e-6):
    """To `relative` of each value and the largest of 1 and the middle one together.

    rows: of which a float32 sum was made.  A GPU adds up a tile in pairs, the interpreter a row at a time, and each
    addition may round by 2^-24; a program has 512 rows of a tile at most.
    """
    expected = values(expected) if isinstance(expected, torch.Tensor) else expected
    relative += 0 if GPU else min(rows, 512) * 2**-24
    error = np.abs(values(got) - expected)
    assert (error <= relative * (np.abs(expected) + max(1.0, np.median(np.abs(expected))))).all(), error.max()


def stepped(layer, x, *rest):
    """One step; checks that it returns copies of the layer's values after it."""
    mu, sigma = layer.current(x, *rest)
    assert mu.dtype == sigma.dtype == torch.float32 and mu.shape == sigma.shape == (layer.num_classes,)
    assert not mu.requires_grad and not sigma.requires_grad
    assert torch.equal(mu, layer.mu) and mu.data_ptr() != layer.mu.data_ptr()
    rounding = 2**-22 + layer.rho.abs().max().item() * 2**-24  # of exp, and of the rho that it is given
    torch.testing.assert_close(sigma, layer.sigma, rtol=rounding, atol=0)
    return mu, sigma


def step_and_compare(layer, x, counted, *rest, rows=None):
    """One step, against the mixture in float64 with the rows that are not ignored."""
    expected = mixture(values(layer.mu), values(layer.sigma), values(counted), layer.momentum)
    for got, wanted in zip(stepped(layer, x, *rest), expected, strict=True):
        close(got, wanted, rows or len(counted))


SHAPES = [(11, 37), (5, 3), (1, 2), (70, 16), (1030, 10), (9, 1), (300, 33)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def check_a_step_is_the_mixture_in_float64(tiles, launches, shape, dtype):
    if tiles == "small tiles":
        shape = (min(shape[0], 70), shape[1])  # nine of them down the rows
    for m in (0.02, 0.7, 1):
        x = outputs(*shape, dtype=dtype)
        step_and_compare(layer_of(shape[1], momentum=m), x, x)
    assert len(launches) == 3


@pytest.mark.parametrize("ignored", [-100, 0, 2**40], ids=str)
@pytest.mark.parametrize("shape", [(11, 37), (8, 3), (130, 10)], ids=str)
def check_ignored_rows_do_not_matter_whatever_they_hold(tiles, launches, shape, ignored):
    x, target = outputs(*shape), labels_of(*shape, ignored)
    counts = target != ignored
    assert 0 < counts.sum() < len(counts)
    x[~counts] = float("nan")
    step_and_compare(layer_of(shape[1]), x, x[counts], target, ignored, rows=shape[0])
    assert len(launches) == 1


def check_the_same_as_torch_over_many_steps(launches, monkeypatch):
    layers = [layer_of(19, momentum=0.1) for _ in range(2)]
    mu, sigma = values(layers[0].mu), values(layers[0].sigma)
    for step in range(40):
        x, target = outputs(23 + step, 19, seed=step), labels_of(23 + step, 19, -100, seed=step)
        stepped(layers[0], x, target)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "load_triton", lambda name: "not now")
            stepped(layers[1], x, target)
        mu, sigma = mixture(mu, sigma, values(x)[values(target) != -100], 0.1)
    assert len(launches) == 40
    for layer in layers:
        close(layer.mu, mu, 63)
        close(layer.sigma, sigma, 63)
    close(layers[0].mu, layers[1].mu, 63)
    close(layers[0].sigma, layers[1].sigma, 63)


LAYOUTS = {
    "turned": lambda x: x.t().contiguous().t(),
    "every second class": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "every third row": lambda x: x.repeat_interleave(3, 0)[::3],
    "a corner": lambda x: torch.nn.functional.pad(x, (3, 2, 1, 1), value=float("nan"))[1:-1, 3:-2],
    "one row again and again": lambda x: x[:1].expand(len(x), -1),
    "images": lambda x: x.view(7, 3, 1, -1).permute(0, 3, 1, 2),
    "images, contiguous": lambda x: x.view(7, 3, 1, -1).permute(0, 3, 1, 2).contiguous(),
    "no rows": lambda x: x[0],
}


@pytest.mark.parametrize("kind", LAYOUTS)
def check_any_strides(tiles, launches, kind):
    x = outputs(21, 18)
    rows = {"one row again and again": x[:1], "no rows": x[:1]}.get(kind, x)
    for m in (0.3, 0.9):
        step_and_compare(layer_of(18, momentum=m), LAYOUTS[kind](x), rows, rows=21)
    assert len(launches) == 2


def check_labels_in_any_shape(tiles, launches):
    x = outputs(21, 18)
    target = labels_of(21, 18, -100)
    images = x.view(7, 3, 1, 18).permute(0, 3, 1, 2)
    every_second = target.repeat_interleave(2)[::2]
    for outs, labels in ((images, target.view(7, 3, 1)), (x, every_second), (x, target.int())):
        step_and_compare(layer_of(18), outs, x[target != -100], labels, rows=21)
    assert len(launches) == 3
    layer = layer_of(18)
    before = layer.mu.clone()
    stepped(layer, x[0], target[0])  # one row, which is to be ignored
    assert torch.equal(layer.mu, before) and len(launches) == 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e25])
def check_a_class_that_is_not_finite_keeps_its_gaussian_and_the_others_move(tiles, launches, bad):
    x, layer, clean = outputs(13, 35), layer_of(35), layer_of(35)
    stepped(clean, x)
    x[4, 17], x[12, 34], x[0, 0] = bad, bad, bad
    mu, rho = layer.mu.clone(), layer.rho.clone()
    stepped(layer, x)
    kept = torch.isin(torch.arange(35), torch.tensor([0, 17, 34])).to(DEVICE)
    assert torch.equal(layer.mu, torch.where(kept, mu, clean.mu))
    assert torch.equal(layer.rho, torch.where(kept, rho, clean.rho))
    assert (clean.mu != mu).all() and len(launches) == 2


def check_ignoring_every_row_changes_nothing(tiles, launches):
    layer = layer_of(20)
    mu, rho = layer.mu.clone(), layer.rho.clone()
    stepped(layer, outputs(6, 20), torch.full((6,), -100, device=DEVICE))
    assert torch.equal(layer.mu, mu) and torch.equal(layer.rho, rho) and len(launches) == 1


@pytest.mark.parametrize("sigma_min", [0.01, 0, 0.25])
def check_constant_outputs_leave_sigma_a_little_above_its_floor(launches, sigma_min):
    layer = layer_of(3, momentum=1.0, sigma_min=sigma_min)
    for _ in range(2):
        stepped(layer, torch.full((8, 3), 1.5, device=DEVICE))
    assert layer.mu.tolist() == [1.5] * 3 and len(launches) == 2
    np.testing.assert_allclose(values(layer.rho), np.log(1e-6 * (sigma_min or 1e-6)), rtol=1e-6)
    # rho is near -28, where half a unit of float32 is 1e-6
    np.testing.assert_allclose(values(layer.sigma), sigma_min + 1e-6 * (sigma_min or 1e-6), rtol=3e-6)


def check_momentum_has_the_digits_of_a_float64():
    """With sums that are exact, only the last rounding of mu is left."""
    for m in np.random.default_rng(0).uniform(0.001, 1, 20):
        layer = GaussianLogits(1, gaussians="tracked", momentum=m, device=DEVICE)
        layer.current(torch.full((4, 1), 3.0, device=DEVICE))
        assert layer.mu.item() == np.float32(m * 3)
        assert abs(sum(triton_track._parts(m)) - m) < 1e-15


def check_the_same_bits_every_time(tiles):
    x, target = outputs(301, 21), labels_of(301, 21, -100)
    first, *others = (stepped(layer_of(21), x, target) for _ in range(3))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


# -------------------------------------------------------------------------------------------------- in losses and heads


def both_ways(make, monkeypatch, launches):
    """What `make` gives with the kernel, and without."""
    torch.manual_seed(0)
    ours, count = make(), len(launches)
    assert count > 0
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "load_triton", lambda name: "not now")
        torch.manual_seed(0)
        theirs = make()
    assert len(launches) == count
    return ours, theirs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def check_losses_and_their_gradients_are_those_of_torch(dtype, launches, monkeypatch):
    def make():
        loss = GSoftmaxLoss(13, lam=3.0, gaussians="tracked", momentum=0.4, impl="plain").to(DEVICE)
        found = []
        for step in range(3):
            x = outputs(12, 13, dtype=dtype, seed=step).requires_grad_()
            value = loss(x, labels_of(12, 13, -100, seed=step))
            value.backward()
            found += [value.detach(), x.grad, *(v.clone() for v in loss.gaussians.current(x.detach()))]
        return found

    for a, b in zip(*both_ways(make, monkeypatch, launches), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5 if dtype == "float32" else 1e-2, atol=1e-6)


def check_a_small_sigma_is_held_for_float16_only(launches, monkeypatch):
    def make():
        layer = layer_of(7, momentum=1.0, sigma_min=0.0, lam=3.0)
        return [layer.current(torch.ones(4, 7, device=DEVICE, dtype=dtype))[1] for dtype in (torch.half, torch.float)]

    ours, theirs = both_ways(make, monkeypatch, launches)
    assert (theirs[0] > 1e3 * theirs[1]).all()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=0)


@pytest.mark.parametrize("call", ["loss", "forward"])
def check_a_tracked_head_is_the_same(call, launches, monkeypatch):
    def make():
        head = GSoftmaxHead(8, 11, lam=2.0, gaussians="tracked", momentum=0.4, device=DEVICE)
        found = []
        for step in range(3):
            h = outputs(14, 8, seed=step).requires_grad_()
            value = head.loss(h, labels_of(14, 11, -100, seed=step)) if call == "loss" else head(h).square().mean()
            value.backward()
            found += [value.detach(), h.grad, head.weight.grad.clone(), head.mu.clone(), head.sigma.clone()]
        return found

    for a, b in zip(*both_ways(make, monkeypatch, launches), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert len(launches) == 3


def check_two_forward_passes_before_one_backward(launches):
    loss, x = GSoftmaxLoss(5, gaussians="tracked", impl="plain").to(DEVICE), outputs(4, 5).requires_grad_()
    target = torch.arange(4, device=DEVICE)
    (loss(x, target) + loss(x * 2, target)).backward()
    assert x.grad.isfinite().all() and len(launches) == 2


def check_a_step_bumps_the_version_of_saved_buffers(launches):
    layer, x = layer_of(5), outputs(4, 5).requires_grad_()
    pending = (x * layer.mu * layer.rho).sum()
    layer.current(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pending.backward()
    assert len(launches) == 1


# ---------------------------------------------------------------------------------------------- what is left to torch


class Quiet(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def check_what_the_kernel_does_not_take_is_left_to_torch(launches, monkeypatch):
    x = outputs(6, 4)
    expected = layer_of(4)
    expected.track(x)

    def same(layer, x, *rest):
        layer.current(x, *rest)
        relative = 1e-2 if layer.mu.dtype is torch.bfloat16 else 2e-6
        close(layer.mu, expected.mu, relative=relative)
        close(layer.sigma, expected.sigma, relative=relative)
        assert not launches

    same(layer_of(4), x.double())
    same(layer_of(4).double(), x)
    same(layer_of(4).bfloat16(), x)
    same(layer_of(4), x, torch.zeros(6, dtype=torch.uint8, device=DEVICE))
    with Quiet():
        same(layer_of(4), x)
    with forward_ad.dual_level():
        same(layer_of(4), x)
    halves = layer_of(4)
    halves.mu = torch.stack([halves.mu, halves.mu], 1)[:, 0]  # not one after the other in memory
    same(halves, x)
    for place, name, value in (
        (gaussians, "_processes", lambda: 2),
        (torch.compiler, "is_compiling", lambda: True),
        (triton_track, "MOST_ROWS", 5),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            patch.setattr(torch.distributed, "all_reduce", lambda sums: None)
            same(layer_of(4), x)
    layer = layer_of(4)
    with pytest.raises(ValueError, match="x must have 4 classes"):
        layer.current(outputs(6, 5))
    layer.current(x[:0])
    assert torch.equal(layer.mu, layer_of(4).mu) and not launches
    same(layer_of(4), x.to(DEVICE).as_subclass(type("Other", (torch.Tensor,), {})))


def check_torch_func_raises_torchs_error(launches):
    layer = layer_of(4)
    with pytest.raises(RuntimeError, match="in-place operation"):
        torch.func.grad(lambda v: layer(v).sum())(outputs(6, 4))
    assert torch.equal(layer.mu, layer_of(4).mu) and not launches


def check_nothing_moves_in_evaluation_or_without_gradients(launches):
    layer, x = layer_of(4), outputs(6, 4)
    before = layer.mu.clone()
    with torch.no_grad():
        layer.current(x)
    layer.eval().current(x)
    assert torch.equal(layer.mu, before) and not launches


@pytest.mark.skipif(not GPU, reason="the interpreter has no graphs to record")
def check_a_step_can_be_recorded():
    x, target = outputs(64, 10), labels_of(64, 10, -100)
    layer, expected = layer_of(10), layer_of(10)
    for _ in range(3):
        expected.current(x, target)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer.current(x, target)  # compiles
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mu, _ = layer.current(x, target)
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(layer.mu, expected.mu) and torch.equal(layer.rho, expected.rho) and torch.equal(mu, layer.mu)


test_on_the_kernels = in_another_process(__file__, globals())
