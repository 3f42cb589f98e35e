"""z, p and the loss of several labels: compiled kernels and Triton's against float64, and every way to call them."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gsoftmax import GaussianLogits, GSoftmaxHead, GSoftmaxLoss, MultiLabelGSoftmaxLoss, equations, functional, kernels
from gsoftmax.checks import MULTILABEL_FORMS, LabelOptions
from gsoftmax.kernels import linear, native
from gsoftmax.kernels.autograd import LabelLoss, apply
from tests.interpreter import DEVICE, GPU, INSIDE, in_another_process, loops, poisoned, process, quiet  # noqa: F401

INF = math.inf
LAM = 1.3

if INSIDE:
    from gsoftmax.kernels import launching, triton_terms
    from gsoftmax.kernels.launching import Plan

    # Tiles that cut even small tables in several, with something left over in both directions.
    SMALL_TILES = Plan(block_n=2, block_c=16, rows=4, warps=1, degree=7)


@pytest.fixture(params=[1, 2, 3], ids=lambda i: f"isa{i}")
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernels at each instruction set that this processor has."""
    need_native()
    if request.param > native.best_instructions():
        pytest.skip(f"this processor has no {native.INSTRUCTIONS[request.param]}")
    monkeypatch.setattr(native, "instructions", request.param)


def need_native() -> None:
    if why := native.unavailable():
        if not any(map(shutil.which, ("cc", "gcc", "clang"))):
            pytest.skip(f"no C compiler on this machine: {why}")
        pytest.fail(f"{why}; build it with `python setup.py build_ext --inplace`")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def example(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x, mu, sigma."""
    c = shape[1] if len(shape) > 1 else shape[0]
    return 3 * random(*shape, seed=seed), random(c, seed=seed + 1), random(c, seed=seed + 2).abs() + 0.2


def leaves(*values: Tensor | None) -> list[Tensor | None]:
    return [None if v is None else v.detach().double().requires_grad_() for v in values]


def exact_z(x: Tensor, mu: Tensor, sigma: Tensor, lam: float = LAM) -> Tensor:
    view = (-1,) + (1,) * (x.ndim - 2)
    return x + lam * torch.special.ndtr((x - mu.view(view)) / sigma.view(view))


def close(seen: Tensor, expected: Tensor, tolerance: float = 2e-6, floor: float = 1e-30) -> None:
    """Errors relative to the largest value, or to `floor`."""
    assert seen.shape == expected.shape
    seen = seen.double()
    assert torch.equal(seen.isnan(), expected.isnan())
    assert torch.equal(seen.isinf(), expected.isinf())
    ok = expected.isfinite()
    if ok.any():
        scale = max(expected[ok].abs().max().item(), floor)
        worst = (seen[ok] - expected[ok]).abs().max().item()
        assert worst <= tolerance * scale, f"off by {worst} where the largest is {scale}"


# ------------------------------------------------------------------------------------------------------------- z and p

SHAPES = [(7,), (1, 1), (5, 16), (40, 3), (3, 513), (70, 1030), (2, 5, 3), (3, 17, 3, 2)]


def hold_z(module, x: Tensor, mu: Tensor, sigma: Tensor, lam: float = LAM, grad: Tensor | None = None) -> None:
    x64, mu64, sigma64 = leaves(x, mu, sigma)
    z64 = exact_z(x64, mu64, sigma64, lam)
    z = module.logits(x, mu, sigma, lam)
    assert z.dtype is torch.float32
    close(z, z64.detach(), 4e-7)
    grad = random(*x.shape, seed=7) if grad is None else grad
    expected = torch.autograd.grad(z64, (x64, mu64, sigma64), grad.double())
    half = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(x.dtype, 0.0)
    for needed in ((True, True, True), (True, False, False), (False, True, True), (False, False, True)):
        seen = module.logits_backward(grad, x, mu, sigma, lam, needed)
        assert [v is not None for v in seen] == [*needed]
        for i, v in enumerate(seen):
            if v is not None:
                assert v.dtype is (x.dtype if i == 0 else torch.float32)
                close(v, expected[i], 2e-6 if i else 2e-6 + half)


def hold_p(module, x: Tensor, mu: Tensor, sigma: Tensor, lam: float = LAM) -> None:
    p = module.probabilities(x, mu, sigma, lam)
    assert p.dtype is x.dtype and p.stride() == torch.empty_like(x).stride()
    expected = exact_z(x.double(), mu.double(), sigma.double(), lam).softmax(1 if x.ndim > 1 else 0)
    half = {torch.bfloat16: 2**-8 if GPU or not INSIDE else 2**-7, torch.float16: 2**-11}.get(x.dtype, 0.0)
    close(p, expected, 2e-6 + half)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_z_and_p(compiled: None, shape: tuple[int, ...]) -> None:
    hold_z(native, *example(*shape))
    hold_p(native, *example(*shape))


@pytest.mark.parametrize("lam", (1e-3, 1.0, 40.0, 300.0))
def test_weights_of_the_term(compiled: None, lam: float) -> None:
    hold_z(native, *example(20, 30), lam)
    close(
        native.probabilities(*example(20, 30), lam), exact_z(*leaves(*example(20, 30)), lam).softmax(1).detach(), 2e-5
    )


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The same numbers at other places in memory."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), float("nan"), dtype=x.dtype, device=x.device)
    wide[..., 1::2] = x
    out = {"apart": wide[..., 1::2], "transposed": x.transpose(0, 1).contiguous().transpose(0, 1)}
    if x.ndim == 4:
        out["channels last"] = x.contiguous(memory_format=torch.channels_last)
        out["swapped"] = x.transpose(2, 3).contiguous().transpose(2, 3)
    return out


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("shape", [(19, 37), (3, 9, 5), (2, 20, 3, 7)], ids=str)
def test_layouts(compiled: None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, mu, sigma = example(*shape)
    x, grad = x.to(dtype), random(*shape, seed=5)
    z, p = (f(x.float(), mu, sigma, LAM) for f in (native.logits, native.probabilities))
    gradients = native.logits_backward(grad, x.float(), mu, sigma, LAM, (True, True, True))
    for v, g in itertools.product((x, *layouts(x).values()), (grad, *layouts(grad).values())):
        # the arithmetic is float32, rounded once, wherever the numbers lie
        assert torch.equal(native.logits(v, mu, sigma, LAM), z)
        assert torch.equal(native.probabilities(v, mu, sigma, LAM), p.to(dtype))
        dx, *sums = native.logits_backward(g, v, mu, sigma, LAM, (True, True, True))
        assert torch.equal(dx, gradients[0].to(dtype))
        assert all(map(torch.equal, sums, gradients[1:]))
    repeated = random(1, 1).expand(shape)
    hold_z(native, x, mu, sigma, grad=repeated)


def test_long_sums(compiled: None) -> None:
    """dmu and dsigma of very many rows that all pull the same way; a single float32 sum would lose the fifth digit."""
    x, mu, sigma = example(200_000, 3)
    hold_z(native, x, mu, sigma, grad=torch.ones_like(x))


def masked(x: Tensor, mu: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Masked classes, whole tiles of them, extreme values, and Gaussians from points to planes."""
    x[0, ::2] = -INF
    x[1, : x.shape[1] // 2 + 3] = -INF
    x[2] = 1e4
    sigma[::5], sigma[1], sigma[2] = 1e-6, 1e-30, 1e30
    return x, mu, sigma


def test_extreme_values(compiled: None) -> None:
    x, mu, sigma = masked(*example(8, 1030))
    z, p = native.logits(x, mu, sigma, LAM), native.probabilities(x, mu, sigma, LAM)
    close(z.nan_to_num(neginf=0), exact_z(x.double(), mu.double(), sigma.double()).nan_to_num(neginf=0), 3e-7)
    close(p, exact_z(x.double(), mu.double(), sigma.double()).softmax(1), 2e-6)
    assert not p[x == -INF].any()
    assert torch.equal(z == -INF, x == -INF)
    x[3, 5] = mu[5]  # phi(0) / 1e-6
    for v in native.logits_backward(torch.ones_like(x), x, mu, sigma, LAM, (True, True, True)):
        assert v.isfinite().all()
    # a row without a softmax is as in torch
    x[4], x[5, 3], x[6, 2] = -INF, INF, float("nan")
    close(native.probabilities(x, mu, sigma, LAM), exact_z(x, mu, sigma).double().softmax(1), 2e-5)
    assert native.logits(x, mu, sigma, LAM)[6].isnan().nonzero().tolist() == [[2]]


# ------------------------------------------------------------------------------------------------------ several labels


def exact_labels(x: Tensor, target: Tensor, mu: Tensor | None, sigma: Tensor | None, options: LabelOptions) -> Tensor:
    """The loss in float64 from torch's softplus."""
    form, weight, pos_weight, ignore, reduction, smoothing = options
    z = x if mu is None else exact_z(x, mu, sigma)
    z_neg, z_pos = (-z, z) if form == "msml" else z.chunk(2, -1)
    known = target != ignore
    y = torch.where(known, target, 0).double() * (1 - smoothing) + smoothing / 2
    if form == "paired":
        present, absent = F.softplus(z_neg - z_pos), F.softplus(z_pos - z_neg)
    else:
        present = F.softplus(-z_pos)
        absent = F.softplus({"independent": -z_neg, "printed": z_neg, "msml": z_pos}[form])
    q = 1 if pos_weight is None else pos_weight.double()
    cost = torch.where(y == 0, 0.0, y * q * present) + torch.where(y == 1, 0.0, (1 - y) * absent)  # not 0 * inf
    cost = torch.where(known, cost * (1 if weight is None else weight.double()), 0.0)
    if reduction == "none":
        return cost
    return cost.sum() / {"mean": known.sum(), "sum": 1, "batchmean": len(x)}[reduction]


def labels_like(n: int, labels: int, seed: int = 0, unknown: bool = False) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    target = torch.randint(2, (n, labels), generator=g)
    if unknown:
        target[torch.rand(n, labels, generator=g) < 0.3] = -100
    return target.to(DEVICE)


def hold_labels(module, x: Tensor, target: Tensor, mu, sigma, options: LabelOptions, **more) -> list[Tensor]:
    """A kernel's loss and gradients against float64."""
    x64, mu64, sigma64 = leaves(x, mu, sigma)
    expected = exact_labels(x64, target, mu64, sigma64, options)
    grad = random(*expected.shape, seed=3)
    need = (True, mu is not None, mu is not None)
    seen = module.multilabel(x, target, mu, sigma, LAM, options, need, grad, **more)
    again = module.multilabel(x, target, mu, sigma, LAM, options, (False,) * 3, **more)
    assert seen[0].dtype is torch.float32 and torch.equal(again[0], seen[0]) and again[1:] == (None,) * 3
    close(seen[0], expected.detach(), 2e-6, 0.01)
    wanted = [v for v in (x64, mu64, sigma64) if v is not None]
    found = torch.autograd.grad(expected, wanted, grad.double())
    half = {torch.bfloat16: 2**-8 if GPU or not INSIDE else 2**-7, torch.float16: 2**-11}.get(x.dtype, 0.0)
    for i, v in enumerate(found):
        assert seen[1 + i].dtype is (x.dtype if i == 0 else torch.float32)
        close(seen[1 + i], v, 4e-6 + (0 if i else half), 1e-3)
    return [v for v in seen if v is not None]


def label_case(
    n: int, labels: int, form: str, gauss: bool, seed: int = 0
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    x, mu, sigma = example(n, labels if form == "msml" else 2 * labels, seed=seed)
    return (x, mu, sigma) if gauss else (x, None, None)


CASES = list(
    itertools.product((False, True), ("none", "mean", "sum", "batchmean"), (False, True), (False, True), (0.0, 0.1))
)


@pytest.mark.parametrize("form", MULTILABEL_FORMS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 37), (70, 30), (2, 1100)], ids=str)
def test_labels(compiled: None, shape: tuple[int, int], form: str) -> None:
    for seed, (gauss, reduction, unknown, weighted, smoothing) in enumerate(CASES):
        x, mu, sigma = label_case(*shape, form, gauss, seed)
        target = labels_like(*shape, seed=seed, unknown=unknown and shape != (1, 1))
        weight, pos_weight = (random(shape[1], seed=seed + i).abs() + 0.1 if weighted else None for i in (1, 2))
        options = LabelOptions(form, weight, pos_weight, -100, reduction, smoothing)
        hold_labels(native, x, target, mu, sigma, options)


@pytest.mark.parametrize("form", MULTILABEL_FORMS)
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_types_and_layouts_of_labels(compiled: None, form: str, reduction: str) -> None:
    x, mu, sigma = label_case(9, 45, form, True)
    options = LabelOptions(form, ignore_index=-100, reduction=reduction)
    target = labels_like(9, 45, unknown=True)
    first = hold_labels(native, x, target, mu, sigma, options)
    for dtype in (torch.int32, torch.int8, torch.float32, torch.float64, torch.bfloat16, torch.float16):
        assert all(map(torch.equal, first, hold_labels(native, x, target.to(dtype), mu, sigma, options)))
    for v, t in itertools.product(
        (x, *layouts(x).values()), (target, *layouts(target.float()).values(), target.t().clone().t())
    ):
        assert all(map(torch.equal, first, hold_labels(native, v, t, mu, sigma, options)))
    for dtype in (torch.bfloat16, torch.float16):
        for v in (x.to(dtype), *layouts(x.to(dtype)).values()):
            hold_labels(native, v, target, mu, sigma, options)
    into = x.clone()
    again = native.multilabel(into, target, mu, sigma, LAM, options, (True,) * 3, random(*first[0].shape, seed=3), into)
    assert again[1] is into and all(map(torch.equal, first, again))
    known = options._replace(ignore_index=2)
    for dtype in (torch.uint8, torch.bool):
        hold_labels(native, x, labels_like(9, 45).to(dtype), mu, sigma, known)
    for ignored in (1, 256, -255):
        hold_labels(native, x, labels_like(9, 45).bool(), mu, sigma, options._replace(ignore_index=ignored))
    soft = torch.rand(9, 45, generator=torch.Generator().manual_seed(1))
    hold_labels(native, x, soft, mu, sigma, known)


def extreme_labels(form: str) -> tuple[Tensor, ...]:
    """Masked outputs and narrow Gaussians; a label at a masked output is what makes the loss infinite."""
    x, mu, sigma = label_case(8, 40, form, True)
    x[0, ::2], sigma[::5], sigma[1] = -INF, 1e-6, 1e30
    x[1] *= 1e4
    return x, labels_like(8, 40), mu, sigma


@pytest.mark.parametrize("form", MULTILABEL_FORMS)
def test_extreme_labels(compiled: None, form: str) -> None:
    x, target, mu, sigma = extreme_labels(form)
    options = LabelOptions(form, reduction="none")
    loss, dx, dmu, dsigma = native.multilabel(x, target, mu, sigma, LAM, options, (True,) * 3)
    assert all(v[~v.isnan()].isfinite().all() for v in (dx, dmu, dsigma))
    exact = exact_labels(x.double(), target, mu.double(), sigma.double(), options)
    both = (x == -INF)[:, :40] & (x == -INF)[:, -40:] if form == "paired" else torch.zeros(8, 40, dtype=torch.bool)
    assert torch.equal(loss.isnan(), both)  # -inf - -inf
    fine = exact.isfinite()
    assert torch.equal(loss[~both].isinf(), exact[~both].isinf() & ~exact[~both].isnan())
    assert (
        (loss - exact)[fine].abs()
        <= 2e-6 * (exact[fine].abs() + 1) + 2e-3 * (x.abs().amax(1) > 1e3)[:, None].expand(8, 40)[fine]
    ).all()
    # nothing is left of a label that is not known, whatever its output
    x[2, 5] = x[2, -1] = -INF
    target[:] = -100
    loss, *gradients = native.multilabel(x, target, mu, sigma, LAM, options._replace(reduction="mean"), (True,) * 3)
    assert loss.isnan() and not any(v.any() for v in gradients)


def test_wrong_targets() -> None:
    need_native()
    x, mu, sigma = label_case(5, 7, "paired", True)
    for wrong in (2, -1, 0.5 + 1, float("nan")):
        target = labels_like(5, 7).float()
        target[3, 4] = wrong
        with pytest.raises(ValueError, match="target must hold 0, 1, probabilities between them or ignore_index=-100"):
            functional.multilabel_cross_entropy(x[:, 7:], x[:, :7], target)
    for wrong_sigma in (0.0, -1.0, float("nan")):
        sigma[3] = wrong_sigma
        for call in (functional.gsoftmax_logits, functional.gsoftmax):
            with pytest.raises(ValueError, match="sigma must be positive, got a minimum of"):
                call(x, mu, sigma)
        loss = MultiLabelGSoftmaxLoss(7)
        with torch.no_grad():
            loss.gaussians.rho[:] = float("nan")
        with pytest.raises(ValueError, match="sigma must be positive"):
            loss(x, labels_like(5, 7))


@pytest.mark.parametrize("threads", (1, 3))
def test_threads_do_not_change_bits(threads: int) -> None:
    need_native()
    x, mu, sigma = label_case(130, 900, "paired", True)
    options, before = LabelOptions(), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        runs = [hold_labels(native, x, labels_like(130, 900), mu, sigma, options) for _ in range(3)]
        hold_z(native, x, mu, sigma)
        hold_p(native, x, mu, sigma)
    finally:
        torch.set_num_threads(before)
    for other in runs[1:]:
        assert all(map(torch.equal, runs[0], other))


def test_labels_of_a_linear_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of rows, with every gradient; the chunks are smaller than the batch."""
    need_native()
    monkeypatch.setattr(linear, "CHUNK", {"cpu": 60})
    monkeypatch.setitem(kernels.LARGE_LINEAR, "cpu", 0)
    for form, lam, reduction in itertools.product(MULTILABEL_FORMS, (0.0, LAM), ("mean", "sum", "batchmean", "none")):
        head = GSoftmaxHead(4, 6, form=form, lam=lam)
        h = random(23, 4).requires_grad_()
        target = labels_like(23, 6, unknown=True)
        wanted = [h, *head.parameters()]
        loss = head.loss(h, target, reduction=reduction, label_smoothing=0.1)
        grad = random(*loss.shape, seed=1)
        g = head.gaussians
        h64, w64, b64, mu64, sigma64 = leaves(h, head.weight, head.bias, g.mu, g.sigma)
        x = F.linear(h64, w64, b64)
        z = x + lam * torch.special.ndtr((x - mu64) / sigma64)
        expected = exact_labels(z, target, None, None, LabelOptions(form, reduction=reduction, label_smoothing=0.1))
        close(loss.detach(), expected.detach(), 2e-6, 0.01)
        found = dict(zip(wanted, torch.autograd.grad(loss, wanted, grad), strict=True))
        exact = torch.autograd.grad(expected, (h64, w64, b64), grad.double())
        for v, e in zip((h, head.weight, head.bias), exact, strict=True):
            close(found[v], e, 3e-6, 1e-2)


# ----------------------------------------------------------------------------------- every way to call the default path

ROWS, CLASSES = 6, 40
HALF = CLASSES // 2


def loss(x, mu, sigma):
    return functional.gsoftmax_cross_entropy(x, torch.arange(ROWS, device=x.device), mu, sigma)


def losses(x, mu, sigma):
    return functional.gsoftmax_cross_entropy(x, torch.arange(ROWS, device=x.device), mu, sigma, reduction="none")


def z(x, mu, sigma):
    return functional.gsoftmax_logits(x, mu, sigma)


def p(x, mu, sigma):
    return functional.gsoftmax(x, mu, sigma).square()


def of_labels(x, mu, sigma):
    target = torch.arange(ROWS, device=x.device)[:, None] > torch.arange(HALF, device=x.device) % 7
    gaussians = mu[HALF:], sigma[HALF:], mu[:HALF], sigma[:HALF]
    return functional.multilabel_cross_entropy(x[:, HALF:], x[:, :HALF], target, gaussians=gaussians)


def of_a_layer(x, mu, sigma):
    weight = torch.eye(CLASSES, dtype=x.dtype, device=x.device)
    return functional.linear_gsoftmax_cross_entropy(x, weight, torch.arange(ROWS, device=x.device), mu, sigma)


ROADS = [loss, losses, z, p, of_labels, of_a_layer]


def plain_inputs() -> list[Tensor]:
    return [v.requires_grad_() for v in example(ROWS, CLASSES)]


def batched(f, inputs):
    out = f(*inputs)
    grads = torch.stack([torch.ones_like(out), 2 * torch.ones_like(out)])
    return torch.autograd.grad(out, inputs, grads, is_grads_batched=True)


def vmapped(f, inputs):
    out = f(*inputs)
    return torch.vmap(lambda g: torch.autograd.grad(out, inputs, g, retain_graph=True))(
        torch.ones(2, *out.shape).to(out)
    )


def jacobian(f, inputs):
    return torch.autograd.functional.jacobian(f, tuple(inputs), vectorize=True)


def hessian(f, inputs):
    return torch.autograd.functional.hessian(lambda *v: f(*v).square().sum(), tuple(inputs))


def forward_mode(f, inputs):
    return torch.func.jacfwd(f, (0, 1, 2))(*inputs)


def linearized(f, inputs):
    inputs = [v.detach() for v in inputs]
    out, push = torch.func.linearize(f, *inputs)
    return out, push(*map(torch.ones_like, inputs))


def of_models(f, inputs):
    x, mu, sigma = inputs
    return torch.vmap(f, in_dims=(None, 0, 0))(x, torch.stack([mu, mu + 1]), torch.stack([sigma, 2 * sigma]))


def traced(f, inputs):
    def step(*v):
        v = [t.detach().requires_grad_() for t in v]
        return torch.autograd.grad(f(*v).sum(), v)

    inputs = [v.detach() for v in inputs]
    return make_fx(step)(*[torch.ones_like(v) for v in inputs])(*inputs)


def symbolic(f, inputs):
    inputs = [v.detach() for v in inputs]
    return make_fx(f, tracing_mode="symbolic")(*[torch.ones_like(v) for v in inputs])(*inputs)


def checkpointed(f, inputs):
    out = torch.utils.checkpoint.checkpoint(f, *inputs, use_reentrant=False)
    return torch.autograd.grad(out.sum(), inputs)


def in_one_graph(f, inputs):
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    return torch.autograd.grad(compiled(*inputs).square().sum(), inputs)


def exported(f, inputs):
    class Module(torch.nn.Module):
        def forward(self, x, mu, sigma):
            return f(x, mu, sigma)

    inputs = tuple(v.detach() for v in inputs)
    return torch.export.export(Module(), tuple(map(torch.ones_like, inputs))).module()(*inputs)


WAYS = [batched, vmapped, jacobian, hessian, forward_mode, linearized, of_models, traced, checkpointed]
COMPILERS = [in_one_graph, exported, symbolic]
CALLS = [(road, way) for road in ROADS for way in WAYS] + [(road, way) for road in (z, of_labels) for way in COMPILERS]
SLOW = [(road, way) for road in (loss, losses, p, of_a_layer) for way in COMPILERS]


def flat(values):
    return [values] if isinstance(values, Tensor) else [v for inner in values for v in flat(inner)]


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:Attempted to insert a get_attr"
)
@pytest.mark.parametrize(
    "road, way", [*CALLS, *(pytest.param(*v, marks=pytest.mark.slow) for v in SLOW)], ids=lambda f: f.__name__
)
def test_ways(monkeypatch: pytest.MonkeyPatch, road, way) -> None:
    """Each transform of the default path equals that of the formula in float64."""
    need_native()
    monkeypatch.setitem(kernels.LARGE_LINEAR, "cpu", 1)
    torch.compiler.reset() if way is in_one_graph else None
    seen, expected = flat(way(road, plain_inputs())), flat(way(road, leaves(*plain_inputs())))
    assert len(seen) == len(expected)
    for a, b in zip(seen, expected, strict=True):
        close(a, b.detach(), 1e-5, 0.1)


@pytest.mark.parametrize("road", ROADS, ids=lambda f: f.__name__)
def test_fake_tensors(road) -> None:
    """Shapes and dtypes without values, as tools that estimate memory ask for them."""
    with FakeTensorMode() as mode:
        inputs = [mode.from_tensor(v).detach().requires_grad_() for v in plain_inputs()]
        out = road(*inputs)
        gradients = torch.autograd.grad(out.sum(), inputs)
    real = road(*plain_inputs())
    assert out.shape == real.shape and out.dtype is real.dtype
    assert [v.shape for v in gradients] == [v.shape for v in inputs]


@pytest.mark.parametrize("name", ("_are_functorch_transforms_active", "_len_torch_dispatch_stack", "_is_tracing"))
def test_another_torch_takes_the_formula(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    x, mu, sigma = plain_inputs()
    monkeypatch.delattr(torch._C, name)
    assert kernels.explain(x, torch.arange(ROWS), mu, sigma).name == "plain"
    close(z(x, mu, sigma).detach(), exact_z(*leaves(x, mu, sigma), 1.0).detach())


@pytest.mark.parametrize("road", [z, p, of_labels], ids=lambda f: f.__name__)
def test_a_graph_twice_and_inputs_changed(road) -> None:
    inputs = plain_inputs()
    out = road(*inputs)
    first = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    kept = [v.clone() for v in first]
    second = torch.autograd.grad(3 * out.sum(), inputs)
    for a, b, c in zip(first, kept, second, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(c, 3 * a, rtol=1e-5, atol=1e-7)
    if road is of_labels:  # which copies its two halves
        return
    out = road(*inputs)
    with torch.no_grad():
        inputs[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_p_has_the_dtype_of_softmax() -> None:
    x, mu, sigma = example(4, 9)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert p(x.to(dtype), mu, sigma).dtype is torch.softmax(x.to(dtype), 1).dtype
        assert GSoftmaxLoss(9).predict_proba(x.to(dtype)).dtype is dtype
        assert GaussianLogits(9)(x.to(dtype)).dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            wide = torch.float64 if dtype is torch.float64 else torch.float32
            assert p(x.to(dtype), mu, sigma).dtype is wide  # as softmax on a GPU
    half = x.half().requires_grad_()
    p(half, mu, sigma)[:, 0].sum().backward()
    assert half.grad.dtype is torch.float16 and half.grad.isfinite().all()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_gradients_of_p_do_not_round_p(dtype: torch.dtype) -> None:
    """Where p is nearly 1, dz is a small difference, which p in half precision would lose."""
    x, mu, sigma = example(9, 30)
    inputs = [v.requires_grad_() for v in ((2 * x).to(dtype), mu, sigma)]
    exact = leaves(*inputs)
    out, expected = functional.gsoftmax(*inputs, LAM), exact_z(*exact).softmax(1)
    grad = random(9, 30, seed=4).to(dtype)
    dx, dmu, dsigma = torch.autograd.grad(out, inputs, grad)
    x64, mu64, sigma64 = torch.autograd.grad(expected, exact, grad.double())
    close(dx, x64, 2**-8)
    close(dmu, mu64, 1e-5)
    close(dsigma, sigma64, 1e-5)


def test_p_under_autocast_takes_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    need_native()
    x, mu, sigma = example(4, 9)
    monkeypatch.setattr(equations, "probabilities", None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        close(functional.gsoftmax(x.bfloat16(), mu, sigma, LAM), exact_z(*leaves(x.bfloat16(), mu, sigma)).softmax(1))


def test_float16_gradients_survive_a_loss_scale() -> None:
    """A mean over many labels makes gradients that float16 has no room for until the scale has lifted them."""
    module, x = MultiLabelGSoftmaxLoss(300), random(512, 600).half().requires_grad_()
    target = labels_like(512, 300)
    (module(x, target).float() * 2.0**14).backward()
    (x64,) = leaves(x)
    expected = exact_labels(x64 + torch.special.ndtr(x64), target, None, None, LabelOptions()) * 2.0**14
    (exact,) = torch.autograd.grad(expected, x64)
    assert ((x.grad.double() - exact).abs() <= 2e-3 * exact.abs() + 1e-7).all()


def test_no_term_is_the_loss_without_one() -> None:
    """lam = 0: the same loss, and a gradient of 0 for mu and sigma, which DDP waits for."""
    for form in MULTILABEL_FORMS:
        module = MultiLabelGSoftmaxLoss(6, form=form, lam=0.0)
        x = random(5, 6 if form == "msml" else 12).requires_grad_()
        target = labels_like(5, 6)
        module(x, target).backward()
        assert all(not v.grad.any() for v in module.parameters())
        (x64,) = leaves(x)
        close(x.grad, torch.autograd.grad(exact_labels(x64, target, None, None, LabelOptions(form)), x64)[0])
        for out in (module.gaussians(x), functional.gsoftmax_logits(x, 0.0, 1.0, 0.0)):
            assert torch.equal(out, x)


# ------------------------------------------------------------------------------ Triton, on a GPU or in its interpreter


COMPILE = """
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gsoftmax.checks import MULTILABEL_FORMS, LabelOptions
from gsoftmax.kernels import triton_terms

kinds = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64", torch.uint8: "u8"}
made = []

def compile_only(call, kernel, programs, arrays, numbers, warps):
    signature, constants, attributes = {}, {}, {}
    for i, (p, v) in enumerate(zip(kernel.params, (*arrays, *numbers), strict=True)):
        if p.is_constexpr or v is None or (type(v) is int and v == 1 and not p.do_not_specialize):
            signature[p.name], constants[(i,)] = "constexpr", v
            continue
        array = isinstance(v, torch.Tensor)
        signature[p.name] = "*" + kinds[v.dtype] if array else "fp32" if isinstance(v, float) else "i32"
        if not p.do_not_specialize and (array or (isinstance(v, int) and v % 16 == 0)):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    made.append(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}))
    assert made[-1].asm["cubin"] and "atom." not in made[-1].asm["ptx"]

triton_terms.launch, triton_terms.processors = compile_only, lambda device: 132

def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")

need = (True, True, True)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for n, c in ((8192, 128256), (256, 1000)):
        x, gaussians = empty(n, c, dtype=dtype), (empty(c), empty(c), 1.0)
        triton_terms.logits(x, *gaussians)
        triton_terms.logits_backward(empty(n, c), x, *gaussians, need)
        triton_terms.probabilities(x, *gaussians)
    for form in MULTILABEL_FORMS:
        outputs, options = 20000 if form == "msml" else 40000, LabelOptions(form)
        x, gaussians = empty(4096, outputs, dtype=dtype), (empty(outputs), empty(outputs), 1.0)
        triton_terms.multilabel(x, empty(4096, 20000, dtype=torch.int64), *gaussians, options, need)
for target in (torch.bool, torch.float32, torch.bfloat16):
    options = LabelOptions("printed", empty(80), empty(80), -100, "none", 0.1)
    arrays = empty(128, 160), empty(128, 80, dtype=target), empty(160), empty(160), 1.0
    triton_terms.multilabel(*arrays, options, need, empty(128, 80))
print("compiled", len(made))
"""


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu_that_is_not_there(tmp_path) -> None:
    """As it would be launched on an H200; the interpreter accepts what the compiler does not."""
    pytest.importorskip("triton.backends.nvidia", reason="Triton is not installed, or has no compiler for NVIDIA")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-W", "ignore", "-c", COMPILE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "compiled 48\n"


@pytest.fixture(params=["its own tiles", "small tiles"])
def tiles(request: pytest.FixtureRequest) -> dict[str, object]:
    return {"cut": SMALL_TILES} if request.param == "small tiles" else {}


class Triton:
    """The module with the same tiles in every call."""

    def __init__(self, tiles: dict[str, object]) -> None:
        self.tiles = tiles

    def __getattr__(self, name: str):
        return lambda *a, **k: getattr(triton_terms, name)(*a, **k, **self.tiles)


@quiet
@pytest.mark.parametrize("shape", [(7,), (5, 37), (2, 5, 3)], ids=str)
def check_z_and_p(tiles, shape):
    hold_z(Triton(tiles), *example(*shape))
    hold_p(Triton(tiles), *example(*shape))


@quiet
def check_weights_of_the_term():
    for lam in (1e-3, 1.0, 40.0):
        hold_z(triton_terms, *example(6, 20), lam)


@quiet
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def check_half_precision(tiles, dtype):
    x, mu, sigma = example(7, 45)
    hold_p(Triton(tiles), x.to(dtype), mu, sigma)
    z = Triton(tiles).logits(x.to(dtype), mu, sigma, LAM)
    close(z, exact_z(x.to(dtype).double(), mu.double(), sigma.double()), 4e-7)
    for v, e in zip(
        *[
            m.logits_backward(random(7, 45), t, mu, sigma, LAM, (True,) * 3)
            for m, t in ((Triton(tiles), x.to(dtype)), (native, x.to(dtype)))
        ],
        strict=True,
    ):
        if not GPU:
            close(v, e.double(), 2**-7 if v.dtype is dtype else 3e-6)


@quiet
@pytest.mark.parametrize("shape", [(19, 37), (3, 9, 5), (2, 20, 3, 7)], ids=str)
def check_layouts(shape):
    x, mu, sigma = example(*shape)
    grad = random(*shape, seed=5)
    pairs = zip((x, *layouts(x).values()), (grad, *layouts(grad).values()), strict=True)
    for v, g in pairs:
        hold_z(triton_terms, v, mu, sigma, grad=g)
        hold_p(triton_terms, v, mu, sigma)
    hold_z(triton_terms, x, mu, sigma, grad=random(1, 1).expand(shape))


@quiet
def check_extreme_values(tiles):
    x, mu, sigma = masked(*example(5, 50))
    module = Triton(tiles)
    z, p = module.logits(x, mu, sigma, LAM), module.probabilities(x, mu, sigma, LAM)
    assert torch.equal(z == -INF, x == -INF) and not p[x == -INF].any()
    close(p, exact_z(x.double(), mu.double(), sigma.double()).softmax(1), 2e-6)
    for v in module.logits_backward(torch.ones_like(x), x, mu, sigma, LAM, (True,) * 3):
        assert v.isfinite().all()


@quiet
@pytest.mark.parametrize("form", MULTILABEL_FORMS)
def check_labels_against_float64(tiles, form):
    """A few of the options at a time: the interpreter takes its time."""
    few = [
        (True, "mean", True, True, 0.1),
        (True, "none", False, True, 0.0),
        (False, "batchmean", True, False, 0.1),
        (True, "sum", False, False, 0.0),
    ]
    for seed, (gauss, reduction, unknown, weighted, smoothing) in enumerate(few):
        n, labels = (1, 1) if seed == 3 else (5, 37)
        x, mu, sigma = label_case(n, labels, form, gauss, seed)
        target = labels_like(n, labels, seed=seed, unknown=unknown)
        weight, pos_weight = (random(labels, seed=seed + i).abs() + 0.1 if weighted else None for i in (1, 2))
        options = LabelOptions(form, weight, pos_weight, -100, reduction, smoothing)
        hold_labels(Triton(tiles), x, target, mu, sigma, options)


@quiet
@pytest.mark.parametrize("form", ["paired", "msml"])
def check_types_and_layouts_of_labels(form):
    x, mu, sigma = label_case(9, 21, form, True)
    options = LabelOptions(form)
    target = labels_like(9, 21, unknown=True)
    for dtype in (torch.int32, torch.int8, torch.float32, torch.float64, torch.bfloat16, torch.float16):
        hold_labels(triton_terms, x, target.to(dtype), mu, sigma, options)
    for v, t in zip(layouts(x).values(), layouts(target.float()).values(), strict=True):
        hold_labels(triton_terms, v, t, mu, sigma, options)
    for dtype in (torch.bfloat16, torch.float16):
        hold_labels(triton_terms, x.to(dtype), target, mu, sigma, options)
    known = options._replace(ignore_index=2)
    for dtype in (torch.uint8, torch.bool):
        hold_labels(triton_terms, x, labels_like(9, 21).to(dtype), mu, sigma, known)
    for ignored in (1, 256, -255):
        hold_labels(triton_terms, x, labels_like(9, 21).bool(), mu, sigma, options._replace(ignore_index=ignored))


@quiet
@pytest.mark.parametrize("form", MULTILABEL_FORMS)
def check_extreme_labels(tiles, form):
    x, target, mu, sigma = extreme_labels(form)
    found = Triton(tiles).multilabel(x, target, mu, sigma, LAM, LabelOptions(form, reduction="none"), (True,) * 3)
    same = native.multilabel(
        *(v.cpu() for v in (x, target, mu, sigma)), LAM, LabelOptions(form, reduction="none"), (True,) * 3
    )
    for a, b in zip(found, same, strict=True):
        assert torch.equal(a.isfinite().cpu(), b.isfinite())
    target[:] = -100
    loss, *gradients = Triton(tiles).multilabel(x, target, mu, sigma, LAM, LabelOptions(form), (True,) * 3)
    assert loss.isnan() and not any(v.nan_to_num().any() for v in gradients)


@quiet
def check_a_mean_without_gradients_in_many_programs():
    x, mu, sigma = label_case(40, 300, "paired", True)
    hold_labels(triton_terms, x, labels_like(40, 300, unknown=True), mu, sigma, LabelOptions())


@quiet
def check_steps_of_softmax_are_kernels_of_their_own(monkeypatch):
    """A compiled kernel is launched again by what its call remembers; the interpreter remembers none."""
    ran = []

    class Kernel:
        def __getitem__(self, _):
            def compile_and_launch(*arguments, **_):
                step = next(v for v in arguments if isinstance(v, str))
                ran.append(step)
                return SimpleNamespace(run=lambda *_: ran.append(step), function=None, packed_metadata=None)

            return compile_and_launch

    monkeypatch.setattr(triton_terms, "_softmax_kernel", Kernel())
    monkeypatch.setattr(launching, "_stream", lambda _: 0)
    for _ in range(2):
        triton_terms.probabilities(*example(3, 99), LAM, SMALL_TILES)
    assert ran == ["parts", "spread"] * 2


@quiet
def check_under_autograd():
    x, mu, sigma = (v.requires_grad_() for v in label_case(5, 9, "paired", True))
    target = labels_like(5, 9)
    out = apply(LabelLoss(target, LAM, LabelOptions(), triton_terms.multilabel), x, mu, sigma)
    out.backward(torch.full_like(out, 2.0))
    exact = leaves(x, mu, sigma)
    (2 * exact_labels(exact[0], target, *exact[1:], LabelOptions())).backward()
    for a, b in zip((x, mu, sigma), exact, strict=True):
        close(a.grad, b.grad, 3e-6, 1e-3)


test_on_the_kernels = in_another_process(__file__, globals())
