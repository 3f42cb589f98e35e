"""The functions against PyTorch at lam = 0, float64 autograd, SciPy and another library's L-softmax."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.special
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from gsoftmax import functional as G

N, C = 6, 5


def gaussians(classes=C, dtype=torch.float64, seed=1, requires_grad=False):
    g = torch.Generator().manual_seed(seed)
    mu = torch.randn(classes, generator=g, dtype=torch.float64)
    sigma = 0.3 + 2 * torch.rand(classes, generator=g, dtype=torch.float64)
    return mu.to(dtype).requires_grad_(requires_grad), sigma.to(dtype).requires_grad_(requires_grad)


def outputs(shape, seed=0, scale=3.0, dtype=torch.float64):
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


def make_target(shape, kind, seed=2, ignored=True):
    """Class indices (with one ignored) or probabilities for x of this shape."""
    g = torch.Generator().manual_seed(seed)
    classes = shape[1] if len(shape) > 1 else shape[0]
    if kind == "probabilities":
        return torch.rand(shape, generator=g, dtype=torch.float64).softmax(1 if len(shape) > 1 else 0)
    target = torch.randint(classes, shape[:1] + shape[2:] if len(shape) > 1 else (), generator=g)
    if ignored and target.ndim:
        target.view(-1)[0] = -100
    return target


SHAPES = [(N, C), (C,), (N, C, 3), (2, C, 3, 4)]
OPTIONS = [
    dict(weight=weight, reduction=reduction, label_smoothing=smoothing)
    for weight, reduction, smoothing in itertools.product((False, True), ("mean", "sum", "none"), (0.0, 0.1, 1.0))
]


def with_weight(options, dtype, classes=C):
    weight = torch.linspace(0.5, 2.0, classes, dtype=dtype) if options["weight"] else None
    return {**options, "weight": weight}


# ------------------------------------------------------------------------------------------------------------- Phi


@pytest.mark.parametrize("dtype, low", [(torch.float32, -12.5), (torch.float64, -37.0)], ids=["float32", "float64"])
def test_cdf_agrees_with_scipy_into_the_tail(dtype, low):
    """To a few roundings, and there a rounding of x by one part is one of Phi by about x^2 parts."""
    x = torch.linspace(low, 9.0, 20_001, dtype=dtype)
    ours = G.gaussian_cdf(x, torch.zeros(len(x), dtype=dtype), torch.ones(len(x), dtype=dtype))
    theirs = scipy.special.ndtr(x.double().numpy())
    bound = torch.finfo(dtype).eps * (8 + 2 * x.double().square().numpy())
    assert (np.abs(ours.double().numpy() / theirs - 1) < bound).all()


def test_cdf_with_mean_and_deviation():
    mu, sigma = gaussians()
    x = outputs((N, C, 2))
    ours = G.gaussian_cdf(x, mu, sigma)
    theirs = scipy.special.ndtr(((x - mu.view(-1, 1)) / sigma.view(-1, 1)).numpy())
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


# --------------------------------------------------------------------------------------------- lam = 0 is PyTorch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["indices", "probabilities"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_without_the_term_it_is_cross_entropy_bit_for_bit(shape, kind, dtype):
    mu, sigma = gaussians(requires_grad=True)
    target = make_target(shape, kind)
    target = target.to(dtype) if kind == "probabilities" else target
    for options in OPTIONS:
        options = with_weight(options, dtype)
        ours, theirs = (outputs(shape, dtype=dtype).requires_grad_() for _ in range(2))
        a = G.gsoftmax_cross_entropy(ours, target, mu, sigma, 0.0, **options)
        b = F.cross_entropy(theirs, target, **options)
        assert a.dtype == b.dtype and torch.equal(a.nan_to_num(9), b.nan_to_num(9)), options
        (a * 1.5).sum().backward()
        (b * 1.5).sum().backward()
        assert torch.equal(ours.grad, theirs.grad), options
        assert torch.equal(mu.grad, torch.zeros_like(mu)) and torch.equal(sigma.grad, torch.zeros_like(sigma))


def test_without_the_term_under_autocast():
    x, target = outputs((N, C), dtype=torch.bfloat16), make_target((N, C), "indices")
    with torch.autocast("cpu", torch.bfloat16):
        a, b = G.gsoftmax_cross_entropy(x, target, 0.0, 1.0, 0.0), F.cross_entropy(x, target)
    assert a.dtype == b.dtype and torch.equal(a, b)


def test_logits_without_the_term_are_x():
    x = outputs((N, C), dtype=torch.float32)
    mu, sigma = gaussians(dtype=torch.float32, requires_grad=True)
    assert torch.equal(G.gsoftmax_logits(x, mu, sigma, 0), x)


# -------------------------------------------------------------------------------------------------------- gradients


def reference(x, target, mu, sigma, lam, **options):
    """The definition, written out with SciPy-checked Phi and nothing shared with the code under test."""
    view = (-1,) + (1,) * (x.ndim - 2) if x.ndim > 1 else (-1,)
    phi = torch.special.erfc((mu.view(view) - x) / (sigma.view(view) * math.sqrt(2))) / 2
    return F.cross_entropy(x + lam * phi, target, **options)


@pytest.mark.parametrize("impl", ["auto", "plain"])
@pytest.mark.parametrize("kind", ["indices", "probabilities"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loss_and_gradients_agree_with_float64_autograd(shape, kind, impl):
    target = make_target(shape, kind)
    for options in OPTIONS:
        x, (mu, sigma) = outputs(shape), gaussians()
        exact = [t.float().double().requires_grad_() for t in (x, mu, sigma)]  # what float32 can hold
        ours = [t.detach().float().requires_grad_() for t in exact]
        y32, y64 = (target.float(), target.float().double()) if kind == "probabilities" else (target, target)
        single, double = (with_weight(options, dtype) for dtype in (torch.float32, torch.float64))
        a = G.gsoftmax_cross_entropy(ours[0], y32, *ours[1:], 1.5, impl=impl, **single)
        b = reference(exact[0], y64, *exact[1:], 1.5, **double)
        probe = torch.linspace(0.5, 1.5, a.numel(), dtype=torch.float64).view(a.shape)
        (a * probe.float()).sum().backward()
        (b * probe).sum().backward()
        assert (a.double() - b).abs().max() <= 2e-5 * b.abs().max(), options
        for name, p, q in zip(("x", "mu", "sigma"), ours, exact, strict=True):
            assert (p.grad.double() - q.grad).norm() <= 2e-5 * q.grad.norm() + 1e-12, (name, options)


@pytest.mark.parametrize("kind", ["indices", "probabilities"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradcheck(kind, reduction):
    mu, sigma = gaussians(requires_grad=True)
    x, target = outputs((4, C)).requires_grad_(), make_target((4, C), kind)
    options = dict(reduction=reduction, label_smoothing=0.1, weight=torch.linspace(0.5, 2, C).double())

    def loss(x, mu, sigma):
        return G.gsoftmax_cross_entropy(x, target, mu, sigma, 1.3, **options)

    assert torch.autograd.gradcheck(loss, (x, mu, sigma))
    assert torch.autograd.gradgradcheck(loss, (x, mu, sigma))


def test_gradcheck_of_the_other_functions():
    mu, sigma = gaussians(requires_grad=True)
    x = outputs((3, C)).requires_grad_()
    assert torch.autograd.gradcheck(G.gaussian_cdf, (x, mu, sigma))
    assert torch.autograd.gradcheck(lambda *a: G.gsoftmax(*a, 0.7), (x, mu, sigma))
    h, weight, bias = outputs((4, 3), 3).requires_grad_(), outputs((C, 3), 4).requires_grad_(), outputs((C,), 5)
    target = make_target((4, C), "indices")
    assert torch.autograd.gradcheck(
        lambda h, w, b, m, s: G.linear_gsoftmax_cross_entropy(h, w, target, m, s, 1.1, bias=b),
        (h, weight, bias.requires_grad_(), mu, sigma),
    )


def test_printed_gradient_is_wrong_and_the_true_one_right():
    """Equations 9, 10 and 12 carry x + lam Phi where the derivative of the log-sum-exp puts p."""
    lam, (mu, sigma), x = 1.0, gaussians(), outputs((1, C))
    y = F.one_hot(torch.tensor([2]), C).double()
    variables = [t.clone().requires_grad_() for t in (x, mu, sigma)]
    autograd = torch.autograd.grad(reference(variables[0], y, *variables[1:], lam), variables)

    u = (x - mu) / sigma
    phi = torch.exp(-(u**2) / 2) / (math.sqrt(2 * math.pi) * sigma)
    z = x + lam * torch.special.ndtr(u)
    factors = {"as printed": z - y, "with p": z.softmax(1) - y}
    errors = {}
    for name, factor in factors.items():
        ours = (factor * (1 + lam * phi), (-lam * factor * phi)[0], (-lam * factor * phi * u)[0])
        errors[name] = [float((a - b).abs().max()) for a, b in zip(ours, autograd, strict=True)]
        print(f"{name:10}  |error| in dx, dmu, dsigma: " + ", ".join(f"{e:.1e}" for e in errors[name]))
    assert max(errors["with p"]) < 1e-12
    assert min(errors["as printed"]) > 0.1 and errors["as printed"][0] > 1


# ------------------------------------------------------------------------------------------------ extremes and dtypes


@pytest.mark.parametrize("impl", ["auto", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lam", [0.5, 4.0])
def test_extreme_inputs_stay_finite(dtype, lam, impl):
    x = torch.tensor(
        [
            [1e4, -1e4, 0.0, -math.inf],
            [0.0, 1e-7, -math.inf, -math.inf],
            [-1e4, -1e4, -1e4, -1e4],
            [1e4, 1e4, 1e4, 0.0],
            [0.0, 0.0, 0.0, 0.0],
        ],
        dtype=dtype,
        requires_grad=True,
    )
    mu = torch.zeros(4, requires_grad=True)
    sigma = torch.full((4,), 1e-6, requires_grad=True)
    loss = G.gsoftmax_cross_entropy(x, torch.tensor([1, 0, 3, 0, 2]), mu, sigma, lam, impl=impl)
    loss.backward()
    assert loss.isfinite()
    for t in (x, mu, sigma):
        assert t.grad.isfinite().all() and t.grad.dtype == t.dtype


@pytest.mark.parametrize("impl", ["auto", "plain"])
def test_half_precision_is_computed_in_float32(impl):
    """At |x| near 100 half of Phi would be rounding if it were added to x in bfloat16."""
    x = (outputs((64, C), scale=1.0) + 100).bfloat16()
    target = make_target((64, C), "indices")
    args = (torch.full((C,), 100.0), torch.ones(C), 2.0)
    a, b = x.clone().requires_grad_(), x.float().requires_grad_()
    loss = G.gsoftmax_cross_entropy(a, target, *args, impl=impl)
    exact = G.gsoftmax_cross_entropy(b, target, *args, impl="plain")
    loss.backward()
    exact.backward()
    assert loss.dtype == torch.bfloat16 and a.grad.dtype == torch.bfloat16
    once = 2**-8 + 1e-5  # rounded to bfloat16, and what two ways to compute it in float32 differ by
    assert abs(loss.item() - exact.item()) <= once * exact.item()
    assert (a.grad.float() - b.grad).abs().max() <= once * b.grad.abs().max()
    assert G.gsoftmax_logits(x, *args).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert G.gsoftmax_cross_entropy(x, target, *args, impl=impl).dtype == torch.float32


def test_all_ignored_and_empty_as_in_pytorch():
    x, target = outputs((3, C), dtype=torch.float32), torch.full((3,), -100)
    assert G.gsoftmax_cross_entropy(x, target, 0.0, 1.0).isnan()
    assert G.gsoftmax_cross_entropy(x[:0], target[:0], 0.0, 1.0).isnan()
    assert G.gsoftmax_cross_entropy(x, target, 0.0, 1.0, reduction="sum") == 0


def test_linear_equals_two_steps():
    h, weight, bias = outputs((2, 3, 4), 1), outputs((C, 4), 2), outputs((C,), 3)
    mu, sigma = gaussians()
    indices = torch.randint(C, (2, 3))
    indices[0, 0] = -100
    for target in (indices, torch.rand(2, 3, C).double().softmax(-1)):
        for options in OPTIONS:
            options = with_weight(options, torch.float64)
            x = (h @ weight.T + bias).view(6, C)
            b = G.gsoftmax_cross_entropy(
                x, target.view(6, C) if target.is_floating_point() else target.view(6), mu, sigma, 1.2, **options
            )
            options["class_weight"] = options.pop("weight")
            a = G.linear_gsoftmax_cross_entropy(h, weight, target, mu, sigma, 1.2, bias=bias, **options)
            assert a.shape == (target.shape[:2] if options["reduction"] == "none" else ())
            torch.testing.assert_close(a.flatten(), b.flatten(), rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=40)
@given(
    data=st.data(),
    dims=st.lists(st.integers(1, 4), min_size=0, max_size=3),
    classes=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    probabilities=st.booleans(),
    lam=st.floats(0, 8),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    smoothing=st.floats(0, 1),
    weighted=st.booleans(),
)
def test_any_shape_dtype_and_option(data, dims, classes, dtype, probabilities, lam, reduction, smoothing, weighted):
    shape = (dims[0], classes, *dims[1:]) if dims else (classes,)
    seed = data.draw(st.integers(0, 2**16))
    x = outputs(shape, seed, dtype=dtype).requires_grad_()
    mu, sigma = gaussians(classes, torch.float32, seed, requires_grad=True)
    target = make_target(shape, "probabilities" if probabilities else "indices", seed, ignored=False)
    weight = torch.linspace(0.5, 2.0, classes, dtype=dtype) if weighted else None
    target = target.to(dtype) if probabilities else target
    options = dict(weight=weight, reduction=reduction, label_smoothing=smoothing)
    loss = G.gsoftmax_cross_entropy(x, target, mu, sigma, lam, **options)
    plain = F.cross_entropy(x.detach(), target, **options)
    assert loss.shape == plain.shape and loss.dtype == plain.dtype and loss.isfinite().all()
    loss.sum().backward()
    assert x.grad.shape == x.shape and x.grad.dtype == dtype and x.grad.isfinite().all()
    assert mu.grad.isfinite().all() and sigma.grad.isfinite().all()
    z = G.gsoftmax_logits(x, mu, sigma, lam)
    exact = x.detach().double()
    assert z.shape == x.shape and (z >= exact - 1e-5).all() and (z <= exact + lam + 1e-5).all()
    total = G.gsoftmax(x, mu, sigma, lam).sum(1 if dims else 0)
    torch.testing.assert_close(total, torch.ones_like(total))


# ------------------------------------------------------------------------------------------------------- multi-label


def multilabel_case(seed=0, dtype=torch.float64):
    x_pos, x_neg = outputs((N, C), seed, dtype=dtype), outputs((N, C), seed + 1, dtype=dtype)
    target = torch.randint(2, (N, C), generator=torch.Generator().manual_seed(seed))
    (mu_pos, sigma_pos), (mu_neg, sigma_neg) = gaussians(dtype=dtype), gaussians(dtype=dtype, seed=7)
    return x_pos, x_neg, target, (mu_pos, sigma_pos, mu_neg, sigma_neg)


def test_paired_without_the_term_is_binary_cross_entropy_of_the_difference():
    x_pos, x_neg, target, _ = multilabel_case()
    for pos_weight in (None, torch.linspace(0.5, 3, C).double()):
        for weight in (None, torch.linspace(1, 2, C).double()):
            for reduction in ("mean", "sum", "none"):
                options = dict(weight=weight, pos_weight=pos_weight, reduction=reduction)
                ours = G.multilabel_cross_entropy(x_pos, x_neg, target, form="paired", **options)
                theirs = F.binary_cross_entropy_with_logits(x_pos - x_neg, target.double(), **options)
                torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


def test_msml_without_the_term_is_the_soft_margin_loss():
    x_pos, _, target, _ = multilabel_case()
    ours = G.multilabel_cross_entropy(x_pos, None, target, form="msml")
    torch.testing.assert_close(ours, F.multilabel_soft_margin_loss(x_pos, target.double()))


def test_paired_is_a_two_way_gsoftmax():
    x_pos, x_neg, target, g = multilabel_case()
    ours = G.multilabel_cross_entropy(x_pos, x_neg, target, gaussians=g, lam=1.7)
    z = torch.stack([G.gsoftmax_logits(x_neg, g[2], g[3], 1.7), G.gsoftmax_logits(x_pos, g[0], g[1], 1.7)], dim=1)
    torch.testing.assert_close(ours, F.cross_entropy(z, target))
    p = G.multilabel_probabilities(x_pos, x_neg, gaussians=g, lam=1.7)
    torch.testing.assert_close(p, z.softmax(1)[:, 1])


@pytest.mark.parametrize("lam", [0.0, 1.3])
def test_the_forms_are_the_equations(lam):
    x_pos, x_neg, y, g = multilabel_case()
    zp = x_pos + lam * torch.special.ndtr((x_pos - g[0]) / g[1])
    zn = x_neg + lam * torch.special.ndtr((x_neg - g[2]) / g[3])
    s = torch.sigmoid
    terms = {
        "independent": (s(zp), s(zn)),
        "printed": (s(zp), 1 - s(zn)),
        "msml": (s(zp), 1 - s(zp)),
        "paired": (zp.exp() / (zp.exp() + zn.exp()), zn.exp() / (zp.exp() + zn.exp())),
    }
    for form, (present, absent) in terms.items():
        theirs = -(y * present.log() + (1 - y) * absent.log())
        one = form == "msml"
        args = (x_pos, None if one else x_neg, y)
        options = dict(form=form, gaussians=g[:2] if one else g, lam=lam)
        torch.testing.assert_close(G.multilabel_cross_entropy(*args, reduction="none", **options), theirs)
        torch.testing.assert_close(
            G.multilabel_cross_entropy(*args, reduction="batchmean", **options), theirs.sum() / N
        )
    # the printed equation is not the baseline with a term added: at lam = 0 the sign of x- differs
    if lam == 0:
        a, b = (
            G.multilabel_cross_entropy(x_pos, x_neg, y, form=form, gaussians=g, lam=0.0)
            for form in ("independent", "printed")
        )
        assert abs(a - b) > 0.1


@pytest.mark.parametrize("form", G.MULTILABEL_FORMS)
def test_multilabel_gradcheck_and_extremes(form):
    x_pos, x_neg, target, g = multilabel_case()
    one = form == "msml"
    leaves = [t.clone().requires_grad_() for t in (x_pos, x_neg, *g)]

    def loss(xp, xn, *g):
        return G.multilabel_cross_entropy(
            xp, None if one else xn, target, form=form, gaussians=g[:2] if one else g, lam=1.2, label_smoothing=0.1
        )

    assert torch.autograd.gradcheck(loss, leaves)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        big = torch.tensor([[1e4, -1e4, 0.0, 5.0, -5.0]], dtype=dtype).repeat(N, 1).requires_grad_()
        small = tuple(torch.full((C,), v) for v in (0.0, 1e-6) * (1 if one else 2))
        value = G.multilabel_cross_entropy(
            big, None if one else big.flip(1), target, form=form, gaussians=small, lam=2.0
        )
        value.backward()
        assert value.isfinite() and value.dtype == dtype and big.grad.isfinite().all() and big.grad.dtype == dtype


@pytest.mark.parametrize("form", G.MULTILABEL_FORMS)
def test_multilabel_ignores_unknown_labels(form):
    x_pos, x_neg, target, _ = multilabel_case()
    x_neg = None if form == "msml" else x_neg
    every = G.multilabel_cross_entropy(x_pos, x_neg, target, form=form, reduction="none")
    target = target.clone()
    target[0, 1] = target[3, 2] = -100
    keep = target != -100
    some = G.multilabel_cross_entropy(x_pos, x_neg, target, form=form)
    torch.testing.assert_close(some, every[keep].mean())


# ---------------------------------------------------------------------------------------------------------- L-softmax


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")  # inside that library
@pytest.mark.parametrize("margin", [2, 3, 4])
def test_large_margin_agrees_with_another_library(margin):
    from pytorch_metric_learning.losses import LargeMarginSoftmaxLoss

    torch.manual_seed(0)
    h, target = torch.randn(64, 8, dtype=torch.float64), torch.randint(7, (64,))
    theirs = LargeMarginSoftmaxLoss(7, 8, margin=margin, scale=1).double()
    weight = theirs.W.detach().T.clone().requires_grad_()
    ours, other = h.clone().requires_grad_(), h.clone().requires_grad_()
    a = F.cross_entropy(G.large_margin_logits(ours, weight, target, margin), target)
    b = theirs(other, target)
    a.backward()
    b.backward()
    assert abs(a - b) < 1e-6
    assert (ours.grad - other.grad).abs().max() < 1e-6
    assert (weight.grad - theirs.W.grad.T).abs().max() < 1e-6


@pytest.mark.parametrize("margin", [1, 2, 3, 4])
def test_large_margin_is_the_definition(margin):
    torch.manual_seed(1)
    h, weight, target = torch.randn(500, 3).double(), torch.randn(4, 3).double(), torch.randint(4, (500,))
    n = weight[target].norm(dim=1) * h.norm(dim=1)
    theta = torch.acos((weight[target] * h).sum(1) / n)
    k = torch.floor(theta * margin / math.pi)
    psi = (-1.0) ** k * torch.cos(margin * theta) - 2 * k
    expected = h @ weight.T
    for anneal in (0.0, 3.0):
        soft = (anneal * n * torch.cos(theta) + n * psi) / (1 + anneal)
        expected[torch.arange(500), target] = soft
        torch.testing.assert_close(G.large_margin_logits(h, weight, target, margin, anneal), expected)


def test_margin_one_is_softmax_without_bias():
    h, weight, target = torch.randn(9, 3), torch.randn(4, 3), torch.randint(4, (9,))
    assert torch.equal(G.large_margin_logits(h, weight, target, 1), F.linear(h, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_margin_extremes(dtype):
    weight = torch.eye(3, dtype=dtype).requires_grad_()
    h = torch.tensor([[0, 0, 0], [1, 0, 0], [-1, 0, 0], [100, 1, 0]], dtype=dtype).requires_grad_()
    z = G.large_margin_logits(h, weight, torch.tensor([0, 0, 0, -100]), 4)
    assert z.dtype == dtype
    z.float().logsumexp(1).sum().backward()
    assert z.isfinite().all() and h.grad.isfinite().all() and weight.grad.isfinite().all()


def test_large_margin_gradcheck():
    h, weight = torch.randn(6, 3).double().requires_grad_(), torch.randn(4, 3).double().requires_grad_()
    target = torch.tensor([0, 1, 2, 3, 0, -100])
    for margin in (2, 3, 4):
        assert torch.autograd.gradcheck(lambda h, w, m=margin: G.large_margin_logits(h, w, target, m, 2.0), (h, weight))


# ------------------------------------------------------------------------------------------------------------ mistakes

X, Y = torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])
ONE = torch.ones(3)
ce, linear, multilabel = G.gsoftmax_cross_entropy, G.linear_gsoftmax_cross_entropy, G.multilabel_cross_entropy
margin = G.large_margin_logits


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: ce(X, Y + 1, 0.0, 1.0), ValueError, "target must lie between 0 and 2.* got 3"),
        (lambda: ce(X, Y - 1, 0.0, 1.0, 0.0), ValueError, "target .* got -1"),
        (lambda: ce(X, Y[:3], 0.0, 1.0), ValueError, r"target .*\(4,\).* got \(3,\)"),
        (lambda: ce(X, Y.float(), 0.0, 1.0), ValueError, "target of torch.float32 .*probabilities"),
        (lambda: ce(X, Y.int(), 0.0, 1.0), TypeError, "target .*torch.long.* got torch.int32"),
        (lambda: ce(X, X * math.nan, 0.0, 1.0), ValueError, "target .*got NaN"),
        (lambda: ce(X, X, 0.0, 1.0, ignore_index=0), ValueError, "ignore_index .*got 0"),
        (lambda: ce(X, [0], 0.0, 1.0), TypeError, "target must be a tensor, got list"),
        (lambda: ce(Y, Y, 0.0, 1.0), TypeError, "x must be floating point, got torch.int64"),
        (lambda: ce(X, Y, ONE[:2], ONE), ValueError, r"mu must have shape \(3,\).* got \(2,\)"),
        (lambda: ce(X, Y, "0", ONE), TypeError, "mu must be a tensor .* got str"),
        (lambda: ce(X, Y, ONE, ONE.long()), TypeError, "sigma must be floating point"),
        (lambda: ce(X, Y, ONE, -ONE), ValueError, "sigma must be positive, got a minimum of -1"),
        (lambda: ce(X, Y, ONE, 0.0), ValueError, "sigma must be positive, got a minimum of 0"),
        (lambda: ce(X, Y, ONE, math.nan), ValueError, "sigma must be positive, got .*nan"),
        (lambda: ce(X.half(), Y, ONE, -ONE), ValueError, "sigma must be positive"),
        (lambda: ce(X, Y, ONE, ONE, -1.0), ValueError, "lam must be 0 or more.* got -1"),
        (lambda: ce(X, Y, ONE, ONE, math.inf), ValueError, "lam .*got inf"),
        (lambda: ce(X, Y, ONE, ONE, "1"), TypeError, "lam must be a number, got str"),
        (lambda: ce(X, Y, ONE, ONE, reduction="avg"), ValueError, "reduction .*mean.* got 'avg'"),
        (lambda: ce(X, Y, ONE, ONE, label_smoothing=2), ValueError, "label_smoothing .*got 2"),
        (lambda: ce(X, Y, ONE, ONE, weight=ONE[:2]), ValueError, r"weight .*\(3,\).* got \(2,\)"),
        (lambda: ce(X, Y, ONE, ONE, impl="cuda"), ValueError, "impl .*auto.* got 'cuda'"),
        (lambda: G.gsoftmax_logits(torch.zeros(()), ONE, ONE), ValueError, "x must be .*got a single number"),
        (lambda: linear(X, ONE, Y, 0.0, 1.0), ValueError, "weight must be .classes, features"),
        (lambda: linear(X, X, Y[:1], 0.0, 1.0), ValueError, r"target .*got \(1,\)"),
        (lambda: linear(X, X, Y, 0.0, 1.0, bias=ONE), ValueError, r"bias .*\(4,\).* got \(3,\)"),
        (lambda: linear(X, X, Y + 4, 0.0, 1.0), ValueError, "target must lie .*got 4"),
        (lambda: multilabel(X, X, X, form="pair"), ValueError, "form must be one of paired.* got 'pair'"),
        (lambda: multilabel(X, None, X), ValueError, "form='paired' needs x_neg"),
        (lambda: multilabel(X, X, X, form="msml"), ValueError, "x_neg must be None"),
        (lambda: multilabel(X, X[:2], X), ValueError, r"x_neg .*got \(2, 3\)"),
        (lambda: multilabel(X, X, Y), ValueError, r"target .*\(4, 3\).* got \(4,\)"),
        (lambda: multilabel(X, X, X + 2), ValueError, "target must hold 0, 1.* got .*2.0"),
        (lambda: multilabel(X, X, X * math.nan), ValueError, "target must hold 0, 1.* got .*nan"),
        (lambda: multilabel(X, X, X, gaussians=(ONE, ONE)), ValueError, "gaussians .*got 2 values"),
        (lambda: multilabel(X, X, X, pos_weight=ONE[:1]), ValueError, "pos_weight must have shape"),
        (lambda: multilabel(X, X, X, reduction="avg"), ValueError, "reduction .*batchmean.* got 'avg'"),
        (lambda: margin(X, ONE[None], Y, 5), ValueError, "margin must be 1, 2, 3 or 4, got 5"),
        (lambda: margin(X, ONE[None], Y, 2, -1.0), ValueError, "anneal must be 0 or more"),
        (lambda: margin(X, ONE[None], X, 2), ValueError, "target must hold one class index"),
        (lambda: margin(X, ONE[None], Y, 2), ValueError, "target must lie between 0 and 0"),
    ],
)
def test_mistakes_name_the_argument_the_value_and_what_is_accepted(call, error, words):
    with pytest.raises(error, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_fullgraph_compile():
    torch.compiler.reset()
    mu, sigma = gaussians(dtype=torch.float32, requires_grad=True)
    x, target = outputs((N, C), dtype=torch.float32).requires_grad_(), make_target((N, C), "indices")
    compiled = torch.compile(lambda *a: G.gsoftmax_cross_entropy(*a, 1.5), fullgraph=True, backend="aot_eager")
    a, b = compiled(x, target, mu, sigma), G.gsoftmax_cross_entropy(x, target, mu, sigma, 1.5)
    torch.testing.assert_close(a, b)
    for p, q in zip(*(torch.autograd.grad(loss, (x, mu, sigma)) for loss in (a, b)), strict=True):
        torch.testing.assert_close(p, q)
