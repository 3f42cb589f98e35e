"""The Triton kernels, on a GPU or in Triton's interpreter (see `interpreter.py`)."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tests.interpreter import DEVICE, GPU, INSIDE, in_another_process, loops, poisoned, process, quiet  # noqa: F401

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = quiet


if INSIDE:
    import triton
    import triton.language as tl

    from gsoftmax import checks, equations, functional, kernels
    from gsoftmax.checks import Options
    from gsoftmax.kernels import launching, linear, triton_ce
    from gsoftmax.kernels.launching import Plan

    # Tiles that cut even small tables in several, with something left over in both directions.
    SMALL_TILES = Plan(block_n=2, block_c=16, rows=4, warps=1, degree=7)


@pytest.fixture(params=["whole rows", "small tiles"])
def tiles(request, monkeypatch):
    if request.param == "small tiles":
        monkeypatch.setattr(triton_ce, "plan", lambda *_: SMALL_TILES)
    return request.param


def table(n, c, *, dtype="float32", kind="index", seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(n, c, generator=generator) * scale).to(getattr(torch, dtype))
    mu, sigma = torch.randn(c, generator=generator), torch.rand(c, generator=generator) * 2 + 0.2
    if kind == "index":
        target = torch.randint(0, c, (n,), generator=generator)
        target[n // 2] = -100
    else:
        target = torch.softmax(torch.randn(n, c, generator=generator), 1)
    return [v.to(DEVICE) for v in (x, target, mu, sigma)]


def exact(x, target, mu, sigma, lam, options):
    """The same in float64, by torch's own Phi and cross entropy, with a graph."""
    x, mu, sigma = (v.detach().double().requires_grad_() for v in (x, mu, sigma))
    z = x + lam * torch.special.ndtr((x - mu) / sigma)
    target = target.double() if target.is_floating_point() else target
    weight = None if options.weight is None else options.weight.double()
    loss = F.cross_entropy(z, target, **options._replace(weight=weight)._asdict())
    return loss, (x, mu, sigma)


def both(x, target, mu, sigma, lam=1.0, **options):
    """(loss, dx, dmu, dsigma) of the kernels and of float64, with a random incoming gradient."""
    rest = (lam, Options(**options))
    ours = [v.clone().requires_grad_() for v in (x, mu, sigma)]
    loss = triton_ce.cross_entropy(ours[0], target, *ours[1:], *rest)
    grad = torch.rand(loss.shape, dtype=loss.dtype, device=loss.device) + 0.5
    loss.backward(grad)
    loss64, theirs = exact(x, target, mu, sigma, *rest)
    loss64.backward(grad.double())
    return [loss.detach(), *(v.grad for v in ours)], [loss64.detach(), *(v.grad for v in theirs)]


def close(got, expected, tolerance=2e-6):
    assert got.shape == expected.shape
    norm = expected.norm().item()
    assert (got.double() - expected).norm().item() <= tolerance * norm + 5e-7  # p - 1 loses digits where p is 1


def close_loss(got, expected, eps=2e-6):
    assert got.shape == expected.shape
    assert ((got.double() - expected).abs() <= eps * (expected.abs() + 1)).all()


def agree(got, expected, tolerance=2e-6):
    """The loss, and all gradients."""
    close_loss(got[0].detach(), expected[0].detach(), tolerance)
    for a, b in zip(got[1:], expected[1:], strict=True):
        close(a, b, tolerance)


def forward_only(x, target, mu, sigma, **options):
    """The loss of the kernels and of float64."""
    rest = (1.0, Options(**options))
    labels = target if target.is_floating_point() else target.long()
    return triton_ce.cross_entropy(x, target, mu, sigma, *rest), exact(x, labels, mu, sigma, *rest)[0].detach()


OPTIONS = [
    {},
    {"reduction": "sum", "lam": 4.0},
    {"reduction": "none", "lam": 0.3},
    {"label_smoothing": 0.1},
    {"weight": True},
    {"weight": True, "label_smoothing": 0.2, "reduction": "sum"},
    {"weight": True, "label_smoothing": 0.2, "reduction": "mean"},
    {"kind": "probability"},
    {"kind": "probability", "weight": True, "label_smoothing": 0.3, "reduction": "none"},
    {"lam": 0.0},
    {"ignore_index": "last"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [(11, 37), (5, 3), (1, 2)], ids=str)
def check_every_option_against_float64(tiles, shape, options):
    options = dict(options)
    x, target, mu, sigma = table(*shape, kind=options.pop("kind", "index"))
    if "ignore_index" in options:
        target[target == -100] = options["ignore_index"] = shape[1] - 1
    if shape[0] == 1 and not target.is_floating_point():
        target.fill_(0)
    if options.pop("weight", False):
        options["weight"] = torch.rand(shape[1], device=DEVICE) + 0.1
    agree(*both(x, target, mu, sigma, **options))


@pytest.mark.parametrize("shape", [(3, 1024), (2, 1025), (3, 2500), (70, 40)], ids=str)
def check_the_tiles_that_are_chosen(shape):
    agree(*both(*table(*shape)))


# The interpreter truncates to bfloat16 where a GPU rounds.
@pytest.mark.parametrize("dtype, eps", [("bfloat16", 2**-8 if GPU else 2**-7), ("float16", 2**-11)])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def check_half_precision_is_rounded_once(tiles, dtype, eps, reduction):
    x, target, mu, sigma = table(7, 45, dtype=dtype)
    got, expected = both(x, target, mu, sigma, reduction=reduction)
    assert got[0].dtype == got[1].dtype == x.dtype and got[2].dtype == got[3].dtype == torch.float32
    close_loss(got[0], expected[0], eps)
    tiny = 2.0**-24 if dtype == "float16" else 0.0  # what float16 has below its normal numbers
    size = expected[1].abs()
    assert ((got[1].double() - expected[1]).abs() <= eps * size + 1e-6 * size.max() + tiny).all()
    close(got[2], expected[2])
    close(got[3], expected[3])


def check_autocast_keeps_the_loss_in_float32():
    x, target, mu, sigma = table(4, 9, dtype="bfloat16")
    with torch.autocast(DEVICE, torch.bfloat16):
        loss, expected = forward_only(x, target, mu, sigma, reduction="none")
    assert loss.dtype == torch.float32
    close_loss(loss, expected)


@pytest.mark.parametrize("layout", ["transposed", "every other column", "every other row", "offset", "row repeated"])
def check_strides(tiles, layout):
    x, target, mu, sigma = table(9, 35)
    if layout == "transposed":
        x = x.t().contiguous().t()
    elif layout == "every other column":
        x = torch.stack([x, torch.full_like(x, float("nan"))], 2).flatten(1)[:, ::2]
    elif layout == "every other row":
        x = torch.stack([x, torch.full_like(x, float("nan"))], 1).flatten(0, 1)[::2]
        target = torch.stack([target, torch.full_like(target, 10**6)], 1).flatten()[::2]
    elif layout == "offset":
        x = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(9, 35)
        mu = torch.stack([mu, mu + 1], 1)[:, 0]
    else:
        x = x[:1].expand(9, 35)
    before = x.clone()
    x.requires_grad_()  # as it lies: a clone would be contiguous
    rest = (1.0, Options(reduction="sum", label_smoothing=0.1))
    loss = triton_ce.cross_entropy(x, target, mu, sigma, *rest)
    loss64, theirs = exact(before, target, mu, sigma, *rest)
    agree([loss, *torch.autograd.grad(loss, x)], [loss64, *torch.autograd.grad(loss64, theirs[:1])])
    assert torch.equal(x.detach(), before)


def check_probabilities_with_strides(tiles):
    x, target, mu, sigma = table(6, 21, kind="probability")
    target = target.t().contiguous().t()
    agree(*both(x, target, mu, sigma))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def check_ignored_rows(tiles, smoothing):
    x, target, mu, sigma = table(7, 20)
    target[2:5] = -100
    x[3, 4] = -float("inf")
    got, _ = both(x, target, mu, sigma, label_smoothing=smoothing, reduction="none")
    assert (got[0][2:5] == 0).all() and (got[1][2:5] == 0).all()
    assert all(g.isfinite().all() for g in got)
    target[:] = -100
    got, _ = both(x, target, mu, sigma, label_smoothing=smoothing)
    assert got[0].isnan()  # 0 / 0, as F.cross_entropy has it
    assert all((g == 0).all() for g in got[1:])


def check_a_label_out_of_range_spoils_its_row_only(tiles):
    x, target, mu, sigma = table(6, 18)
    target[1], target[4] = 18, -7
    x = x.requires_grad_()
    loss = triton_ce.cross_entropy(x, target, mu, sigma, 1.0, Options(torch.ones(18, device=DEVICE), reduction="none"))
    loss.backward(torch.ones_like(loss))
    wrong = torch.tensor([False, True, False, False, True, False], device=DEVICE)
    assert loss.isnan().equal(wrong)
    assert x.grad.isnan().all(1).equal(wrong) and x.grad.isnan().any(1).equal(wrong)


def check_extreme_values(tiles):
    """Masked classes, logits of 1e4 and a sigma of 1e-6: against the plain formula in float64, which clamps u."""
    x, target, mu, sigma = table(8, 50)
    x[0, ::2] = -float("inf")
    target[0] = 1
    x[1, 16:48] = -float("inf")  # whole tiles
    target[1] = 2
    x[2] *= 1e4
    x[3] -= 1e4
    x[4] += 1e4
    sigma[::5] = 1e-6
    mu[5] = x[5, 5]  # phi(0) / 1e-6
    leaves = [v.clone().requires_grad_() for v in (x, mu, sigma)]
    loss = triton_ce.cross_entropy(leaves[0], target, *leaves[1:], 1.0, Options(reduction="none"))
    loss.backward(torch.ones_like(loss))
    exact_leaves = [v.double().requires_grad_() for v in (x, mu, sigma)]
    z = equations.logits(*exact_leaves, 1.0)
    expected = F.cross_entropy(z, target, reduction="none")
    expected.backward(torch.ones_like(expected))
    close_loss(loss.detach(), expected.detach())
    for a, b in zip(leaves, exact_leaves, strict=True):
        assert a.grad.isfinite().all()
        assert ((a.grad.double() - b.grad).abs() <= 1e-5 * b.grad.abs() + 1e-6).all()


def check_a_row_of_nothing_is_nan_as_in_torch(tiles):
    x, target, mu, sigma = table(3, 40)
    x[1], target[1] = -float("inf"), 4
    loss = triton_ce.cross_entropy(x, target, mu, sigma, 1.0, Options(reduction="none"))
    assert loss.isnan().tolist() == F.cross_entropy(x, target, reduction="none").isnan().tolist()


@pytest.mark.parametrize("kind", ["index", "probability"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("shape", [(6,), (4, 6, 5), (2, 7, 3, 2)], ids=str)
def check_other_shapes(shape, reduction, kind):
    x, mu, sigma = torch.randn(shape, device=DEVICE), *table(2, shape[min(1, len(shape) - 1)])[2:]
    if kind == "index":
        target = torch.randint(0, mu.shape[0], shape[:1] + shape[2:] if len(shape) > 1 else (), device=DEVICE)
    else:
        target = torch.rand(shape, device=DEVICE)
    got = [x.clone().requires_grad_(), mu.clone().requires_grad_(), sigma]
    loss = triton_ce.cross_entropy(
        got[0], target, got[1], got[2], 1.0, Options(reduction=reduction, label_smoothing=0.1)
    )
    view = (-1,) + (1,) * (len(shape) - 2)
    x64, mu64 = x.double().requires_grad_(), mu.double().requires_grad_()
    z = x64 + torch.special.ndtr((x64 - mu64.view(view)) / sigma.double().view(view))
    target = target.double() if kind == "probability" else target
    expected = F.cross_entropy(z, target, reduction=reduction, label_smoothing=0.1)
    loss.backward(torch.ones_like(loss))
    expected.backward(torch.ones_like(expected))
    agree([loss, got[0].grad, got[1].grad], [expected, x64.grad, mu64.grad])


def check_targets_of_one_byte():
    x, target, mu, sigma = table(6, 200)
    close_loss(*forward_only(x, target.clamp(0).to(torch.uint8), mu, sigma, reduction="none"))


def check_a_retained_graph_gives_the_same_twice_and_owns_nothing():
    x, target, mu, sigma = (v.requires_grad_(v.is_floating_point()) for v in table(6, 20))
    loss = triton_ce.cross_entropy(x, target, mu, sigma, 1.0, Options())
    first = [g.clone() for g in torch.autograd.grad(loss, (x, mu, sigma), retain_graph=True)]
    again = torch.autograd.grad(loss, (x, mu, sigma), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))  # the same bits, too
    (loss * 2).backward()
    for v, g in zip((x, mu, sigma), first, strict=True):
        v.grad.mul_(0.5)  # what gradient clipping does
        torch.testing.assert_close(v.grad, g)


def check_only_what_is_needed():
    x, target, mu, sigma = table(6, 20)
    full = both(x, target, mu, sigma)[0]
    rest = (1.0, Options())
    for need in itertools.product((False, True), repeat=3):
        leaves = [v.clone().requires_grad_(n) for v, n in zip((x, mu, sigma), need, strict=True)]
        loss = triton_ce.cross_entropy(leaves[0], target, *leaves[1:], *rest)
        assert loss.requires_grad == any(need)
        if any(need):
            loss.backward()
        assert [v.grad is not None for v in leaves] == list(need)
        close_loss(loss.detach(), full[0].double())
    leaves = [v.clone().requires_grad_() for v in (x, mu, sigma)]
    with torch.no_grad():
        assert not triton_ce.cross_entropy(leaves[0], target, *leaves[1:], *rest).requires_grad


@pytest.mark.parametrize("reduction, smoothing", [("mean", 0.0), ("none", 0.1)])
def check_second_derivatives(reduction, smoothing):
    x, target, mu, sigma = table(4, 6)
    rest = (1.0, Options(reduction=reduction, label_smoothing=smoothing))
    ours = [v.clone().requires_grad_() for v in (x, mu, sigma)]
    loss64, theirs = exact(x, target, mu, sigma, *rest)
    seconds = []
    for leaves, loss in ((ours, triton_ce.cross_entropy(ours[0], target, *ours[1:], *rest)), (theirs, loss64)):
        grads = torch.autograd.grad(loss.square().sum(), leaves, create_graph=True)
        sum(g.square().sum() for g in grads).backward()
        seconds.append([v.grad for v in leaves])
    for a, b in zip(*seconds, strict=True):
        close(a, b, 1e-5)


def check_compile_takes_it_whole(tiles):
    x, target, mu, sigma = table(6, 20)

    def loss(x, mu, sigma, smoothing):
        options = Options(label_smoothing=smoothing)
        return triton_ce.cross_entropy(x * 1.5, target, mu.exp().log(), sigma, 1.0, options) * 3

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for smoothing, both_gaussians in ((0.0, True), (0.2, False)):
        results = []
        for function in (loss, compiled):
            leaves = [v.clone().requires_grad_() for v in (x, mu.abs() + 0.1)]
            leaves.append(sigma.clone().requires_grad_(both_gaussians))
            value = function(*leaves, smoothing)
            value.backward()
            results.append([value.detach(), *(v.grad for v in leaves)])
        for a, b in zip(*results, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b)


def check_compile_takes_the_public_function():
    x, target, mu, sigma = (v.requires_grad_(v.is_floating_point()) for v in table(6, 20))
    compiled = torch.compile(functional.gsoftmax_cross_entropy, fullgraph=True, backend="aot_eager")
    loss = compiled(x, target, mu, sigma, 2.0, impl="triton")
    expected, leaves = exact(x, target, mu, sigma, 2.0, Options())
    gradients, exact_gradients = torch.autograd.grad(loss, (x, mu, sigma)), torch.autograd.grad(expected, leaves)
    agree([loss, *gradients], [expected, *exact_gradients])


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of opcheck's own
def check_the_operators_are_registered_properly():
    x, target, mu, sigma = (v.requires_grad_(v.is_floating_point()) for v in table(5, 12))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    for reduction, smoothing in (("mean", 0.1), ("none", 0.0)):
        args = (x, target, mu, sigma, 1.0, None, -100, reduction, smoothing, torch.float32)
        torch.library.opcheck(triton_ce._forward_op, args, test_utils=tests)


# The exp2 itself may be off, on a GPU by 2**-22, and Phi has half of that.
@pytest.mark.parametrize("degree, bound", [(0, 4e-4), (5, 3.5e-7), (6, 1.8e-7), (7, 1.3e-7)])
def check_phi_is_as_good_as_promised(degree, bound):
    from scipy.special import ndtr

    u = torch.cat([torch.linspace(-9, 9, 4000), torch.tensor([-40.0, 40.0, -float("inf"), 0.0, -0.0])])
    u = torch.cat([u, torch.zeros(4096 - u.numel())]).to(DEVICE)
    out, zero = torch.empty_like(u), torch.zeros_like(u)
    half, c0, _ = triton_ce._constants(1.0, degree)
    _phi_of[(1,)](u, zero, zero + triton_ce.ROOT.value, out, half, c0, degree, 4096)
    expected = ndtr(u.cpu().double().numpy())
    assert abs(out.cpu().double().numpy() - expected).max() < bound + 2**-23


if INSIDE:

    @triton.jit
    def _phi_of(u, mu, r, out, half, c0, DEGREE: tl.constexpr, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        w, _ = triton_ce.gaussian_term(tl.load(u + at), tl.load(mu + at), tl.load(r + at), half, c0, DEGREE)
        tl.store(out + at, w / (2 * half) + 0.5)


def check_calls_like_one_before(monkeypatch):
    """They skip the checks; what is not like it, or goes wrong, does not."""
    monkeypatch.setattr(kernels, "_checked", {})
    choose = kernels._choose

    def on_a_gpu(impl, lam, inputs, constants):
        usable = not checks.under_transform() and inputs[0].ndim == 2
        return ("triton", "") if usable else choose(impl, lam, inputs, constants)

    monkeypatch.setattr(kernels, "_choose", on_a_gpu)
    cached_call, count = kernels.cached_call, []

    def counting(*args):
        found = cached_call(*args)
        count.append(found is not None)
        return found

    monkeypatch.setattr(kernels, "cached_call", counting)
    call = functional.gsoftmax_cross_entropy
    for seed in range(3):
        x, target, mu, sigma = table(6, 9, seed=seed)
        leaves = [v.requires_grad_() for v in (x, mu, sigma)]
        loss64, theirs = exact(x, target, mu, sigma, 1.5, Options(label_smoothing=0.1))
        loss = call(x, target, mu, sigma, 1.5, label_smoothing=0.1)
        agree([loss, *torch.autograd.grad(loss, leaves)], [loss64, *torch.autograd.grad(loss64, theirs)])
    assert count == [False, True, True] and len(kernels._checked) == 1
    call(x, target, mu, sigma, 1.5)  # another kind
    call(x, target, mu, sigma, 2, label_smoothing=0.1)
    call(x, target, mu, sigma, weight=torch.ones(9, device=DEVICE))
    assert count[3:] == [False, False]
    for wrong in (
        lambda: call(x, target[:3], mu, sigma, 1.5, label_smoothing=0.1),
        lambda: call(x, target, mu[:3], sigma, 1.5, label_smoothing=0.1),
        lambda: call(x, target, mu, sigma, float("nan"), label_smoothing=0.1),
        lambda: call(x, target, mu, sigma, [1.5], label_smoothing=0.1),
        lambda: call(x, target, "mu", sigma, 1.5, label_smoothing=0.1),
    ):
        with pytest.raises((ValueError, TypeError)):
            wrong()
    assert count[5:] == [False] * 5
    torch.func.grad(lambda x: call(x, target, mu, sigma, 1.5, label_smoothing=0.1))(x.detach())
    assert count[10:] == [False]
    call(torch.randn(2, 9, 3, device=DEVICE), torch.zeros(2, 3, dtype=torch.long, device=DEVICE), mu, sigma)
    assert count[11:] == [False]


@pytest.mark.parametrize("dtype, rounding, most", [("bfloat16", 2.0**-8, 4.0), ("float16", 2.0**-11, 1.0)])
def check_many_classes_in_half_precision_take_phi_from_tanh(dtype, rounding, most):
    for lam, classes, error in ((most, 1100, 2e-4), (most * 1.01, 1100, 2e-6), (most, 1000, 2e-6)):
        x, target, mu, sigma = table(6, classes, dtype=dtype)
        assert triton_ce.is_fast(x, lam) is (error > 1e-5)
        leaves = [v.clone().requires_grad_() for v in (x, mu, sigma)]
        loss = triton_ce.cross_entropy(leaves[0], target, *leaves[1:], lam, Options(reduction="sum"), torch.float32)
        expected, exact_leaves = exact(x, target, mu, sigma, lam, Options(reduction="sum"))
        assert loss.dtype is torch.float32
        assert (loss - expected).abs() < (4e-4 * lam * len(x) if error > 1e-5 else 1e-4)
        found = torch.autograd.grad(loss, leaves)
        wanted = torch.autograd.grad(expected, exact_leaves)
        for a, b, limit in zip(found, wanted, (rounding + error, error, error), strict=True):
            assert (a.double() - b).norm() <= limit * b.norm()


def check_plans():
    for kind, rows, classes, size in itertools.product(
        ("forward", "backward"), (1, 2, 100, 8192, 10**6), (1, 2, 10, 1000, 1024, 1025, 32000, 10**6), (2, 4)
    ):
        cut = triton_ce.plan(kind, rows, classes, size, torch.device(DEVICE))
        for n in (cut.block_n, cut.block_c, cut.warps):
            assert n == 1 << (n.bit_length() - 1)
        assert cut.rows % cut.block_n == 0 and cut.block_n * cut.block_c <= 8192
        assert classes > 1024 or cut.block_c >= classes or (kind == "backward" and cut.rows >= rows)


def check_what_is_supported():
    x, target, mu, sigma = table(4, 6)
    assert kernels.explain(x, target, mu, sigma, impl="triton") == kernels.Path("triton", "impl='triton'")
    meta = [v.to("meta") for v in (x, target, mu, sigma)]
    soft = torch.rand(4, 6, device=DEVICE, requires_grad=True)
    for args, why in (
        ((x.double(), target, mu, sigma), "x is torch.float64"),
        ((x, target, mu, sigma, 1e3), "lam is above 100"),
        ((x[:0], target[:0], mu, sigma), "x is empty"),
        (meta, "x is on meta"),
        ((x, target, mu, meta[3]), "sigma is on meta"),
        ((x, soft, mu, sigma), "target or weight requires a gradient"),
    ):
        with pytest.raises(ValueError, match=why):
            kernels.explain(*args, impl="triton")
    with pytest.raises(ValueError, match="a torch.func transform"):
        torch.func.vmap(lambda v: functional.gsoftmax_cross_entropy(v, target, mu, sigma, impl="triton"))(x[None])


def check_a_gpu_that_runs_no_kernel_is_passed_over(monkeypatch):
    class Broken:
        def __getitem__(self, grid):
            raise RuntimeError("Failed to find C compiler.\nand more")

    device = torch.device(DEVICE)
    assert launching.cannot_run.__wrapped__(device) == ""
    monkeypatch.setattr(launching, "_trial_kernel", Broken())
    with pytest.warns(UserWarning, match="Failed to find C compiler.; falling back to a slower implementation"):
        why = launching.cannot_run.__wrapped__(device)
    assert why == f"Triton cannot run kernels on {device}: Failed to find C compiler."
    monkeypatch.setattr(launching, "cannot_run", lambda device: f"nothing runs on {device}")
    x = SimpleNamespace(is_cuda=True, dtype=torch.float32, device=torch.device("cuda:3"), numel=lambda: 1)
    assert triton_ce.unsupported(x, 1.0) == "nothing runs on cuda:3"


@pytest.mark.parametrize("reduction", ["mean", "none"])
def check_a_margin_chunk_by_chunk(monkeypatch, reduction):
    monkeypatch.setattr(linear, "CHUNK", {"cpu": 100, "cuda": 100})
    _, target, _, _ = table(23, 31)
    h, weight = (torch.randn(s, device=DEVICE) for s in ((23, 5), (31, 5)))
    leaves = [v.clone().requires_grad_() for v in (h, weight)]
    options = {"reduction": reduction, "label_smoothing": 0.1}
    loss = functional.large_margin_cross_entropy(*leaves, target, 3, 0.5, impl="triton", **options)
    exact_leaves = [v.double().requires_grad_() for v in (h, weight)]
    expected = F.cross_entropy(functional.large_margin_logits(*exact_leaves, target, 3, 0.5), target, **options)
    grad = torch.rand(expected.shape, device=DEVICE)
    got = [loss, *torch.autograd.grad(loss, leaves, grad)]
    agree(got, [expected, *torch.autograd.grad(expected, exact_leaves, grad.double())], 1e-5)
    close_loss(loss.detach(), expected.detach(), 3e-6)


def check_a_linear_layer_with_every_row_ignored():
    leaves = [torch.randn(s, device=DEVICE, requires_grad=True) for s in ((7, 5), (31, 5))]
    target = torch.full((7,), -100, device=DEVICE)
    loss = functional.linear_gsoftmax_cross_entropy(*leaves, target, 0.0, 1.0, impl="triton")
    loss.backward()
    assert loss.isnan() and all((v.grad == 0).all() for v in leaves)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 3e-6), ("bfloat16", 1.5e-2), ("float16", 2e-3)])
@pytest.mark.parametrize(
    "options", [{}, {"reduction": "none", "label_smoothing": 0.1}, {"lam": 0.0, "reduction": "sum"}], ids=str
)
def check_the_linear_layer_in_one(monkeypatch, options, dtype, tolerance):
    options = {"lam": 1.0, "reduction": "mean", "label_smoothing": 0.0} | options
    monkeypatch.setattr(linear, "CHUNK", {"cpu": 100, "cuda": 100})
    _, target, mu, sigma = table(23, 31)
    h, weight, bias = (torch.randn(s, device=DEVICE).to(getattr(torch, dtype)) for s in ((23, 5), (31, 5), (31,)))
    leaves = [v.clone().requires_grad_() for v in (h, weight, bias, mu, sigma)]
    rest = (options.pop("lam"), Options(**options), triton_ce.evaluate)
    loss = linear.linear_cross_entropy(linear.Linear(*leaves[:3]), target, *leaves[3:], *rest)
    exact_leaves = [v.double().requires_grad_() for v in (h, weight, bias, mu, sigma)]
    # x as the matrix product rounds it: what is tested begins there, and the slope of a small sigma would multiply it
    x = F.linear(*exact_leaves[:3])
    x = x + (F.linear(h, weight, bias).double() - x).detach()
    z = x + rest[0] * torch.special.ndtr((x - exact_leaves[3]) / exact_leaves[4])
    expected = F.cross_entropy(z, target, **options)
    grad = torch.rand(expected.shape, device=DEVICE).to(loss.dtype)
    gradients = torch.autograd.grad(loss, leaves, grad)
    assert [g.dtype for g in gradients] == [v.dtype for v in leaves]
    agree([loss, *gradients], [expected, *torch.autograd.grad(expected, exact_leaves, grad.double())], tolerance)


test_on_the_kernels = in_another_process(__file__, globals())
