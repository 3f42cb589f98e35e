"""Heads from the literature, each against another library or a formula in NumPy and SciPy.

`pytest -s` prints the largest difference of every comparison.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from processes import one_thread  # noqa: F401
from scipy.special import expit, log_expit, logsumexp
from scipy.stats import multivariate_normal
from torch import nn
from torchvision.ops import sigmoid_focal_loss

import gsoftmax
from gsoftmax import build, data, heads, models, train
from gsoftmax.attachment import attach, attached_loss, head_of
from gsoftmax.config import Config
from gsoftmax.export import fold, to_program
from gsoftmax.heads import HEADS

SINGLE = ("adjusted", "focal", "gce", "cosface", "arcface", "lgm", "etf")
SEVERAL = ("bce", "asl", "zlpr")
# every option that changes the formula
VARIANTS = [
    *((name, {}) for name in (*SINGLE, *SEVERAL)),
    ("focal", {"gamma": 0.5}),
    ("lgm", {"covariance": "diagonal", "alpha": 1.0, "likelihood": 0.5}),
    ("asl", {"gamma_pos": 1.0, "gamma_neg": 0.5, "clip": 0.0, "detach": False}),
]
IDS = [name + ("" if not options else " " + str(options)) for name, options in VARIANTS]
FEATURES, CLASSES, ROWS = 8, 5, 40


def make(name, options=None, *, dtype=torch.float64):
    """A head as after some training, with h and a target for it."""
    cls = HEADS[name]
    head = cls(FEATURES, CLASSES, **(options or {}), dtype=dtype)
    h = 2 * torch.randn(ROWS, FEATURES, dtype=dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    if name == "adjusted":
        head.fit_prior(torch.tensor([50, 20, 10, 0, 3]))
    target = torch.randint(CLASSES, (ROWS,)) if cls.singlelabel else torch.randint(2, (ROWS, CLASSES))
    return head, h, target


def compare(name, ours, theirs, bound=1e-12):
    ours, theirs = (torch.as_tensor(v).detach().double() for v in (ours, theirs))
    assert ours.shape == theirs.shape
    largest = (ours - theirs).abs().max().item()
    print(f"{name}: {largest:.1e}")
    assert largest < bound, name


def cross_entropy(z, target):
    """Of every row, in NumPy."""
    return logsumexp(z, axis=1) - z[np.arange(len(z)), target]


# ----------------------------------------------------------------------------------- against others, one label per row


@pytest.mark.parametrize("tau", [0.0, 0.5, 1.0])
def test_logit_adjustment_is_cross_entropy_with_the_log_prior(tau):
    head, h, target = make("adjusted", {"tau": tau})
    x = h.numpy() @ head.weight.detach().numpy().T + head.bias.detach().numpy()
    prior = np.array([50, 20, 10, 1, 3]) / 84  # a class without examples counts as one
    expected = cross_entropy(x + tau * np.log(prior), target.numpy())
    compare(f"adjusted, tau {tau}", head.loss(h, target, reduction="none"), expected)
    compare("adjusted, tested", head.eval().predict_proba(h), np.exp(x - logsumexp(x, axis=1, keepdims=True)))
    assert torch.equal(head(h, target), head(h))
    compare("adjusted, loss in evaluation", head.loss(h, target), cross_entropy(x, target.numpy()).mean())


SOFT = torch.softmax(torch.randn(ROWS, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), 1)
LOSS_OPTIONS = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"ignore_index": 2},
    {"label_smoothing": 0.2},
    {"class_weight": torch.tensor([1.0, 0.5, 2.0, 3.0, 0.1])},
    {"class_weight": torch.tensor([1.0, 0.5, 2.0, 3.0, 0.1]), "label_smoothing": 0.2, "ignore_index": 2},
]


@pytest.mark.parametrize("options", LOSS_OPTIONS)
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("name, plain", [("adjusted", {"tau": 0.0}), ("focal", {"gamma": 0.0})])
def test_without_their_term_they_are_torchs_cross_entropy(name, plain, soft, options):
    head, h, target = make(name, plain)
    if soft:
        target, options = SOFT, {k: v for k, v in options.items() if k != "ignore_index"}
    theirs = {"weight" if k == "class_weight" else k: v for k, v in options.items()}
    theirs |= {k: v.double() for k, v in theirs.items() if k == "weight"}
    compare(name, head.loss(h, target, **options), F.cross_entropy(head(h), target, **theirs))


@pytest.mark.parametrize("gamma", [0.5, 2.0, 5.0])
def test_focal_loss_of_two_classes_is_torchvisions(gamma):
    head = HEADS["focal"](FEATURES, 2, gamma=gamma, dtype=torch.float64)
    h, target = 3 * torch.randn(ROWS, FEATURES, dtype=torch.float64), torch.randint(2, (ROWS,))
    x = head(h)
    expected = sigmoid_focal_loss(x[:, 1] - x[:, 0], target.double(), alpha=-1, gamma=gamma)
    compare(f"focal, gamma {gamma}", head.loss(h, target, reduction="none"), expected)


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_focal_loss_is_the_formula(gamma):
    head, h, target = make("focal", {"gamma": gamma})
    weight = torch.tensor([1.0, 0.5, 2.0, 3.0, 0.1], dtype=torch.float64)
    x = head(h).detach().numpy()
    log_p = x - logsumexp(x, axis=1, keepdims=True)
    each = -((1 - np.exp(log_p)) ** gamma) * log_p
    y, w = target.numpy(), weight.numpy()
    expected = (w[y] * each[np.arange(ROWS), y]).sum() / w[y].sum()
    compare("focal, weighted", head.loss(h, target, class_weight=weight), expected)
    compare("focal, soft", head.loss(h, SOFT, reduction="none"), (SOFT.numpy() * each).sum(1))
    smooth = 0.9 * np.eye(CLASSES)[y] + 0.1 / CLASSES
    smoothed = head.loss(h, target, reduction="none", label_smoothing=0.1)
    compare("focal, smoothed", smoothed, (smooth * each).sum(1))


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")  # inside that library
@pytest.mark.parametrize("name", ["cosface", "arcface"])
@pytest.mark.parametrize("scale, margin", [(64.0, None), (30.0, 0.2)])
def test_margins_on_cosines_agree_with_another_library(name, scale, margin):
    from pytorch_metric_learning.losses import ArcFaceLoss, CosFaceLoss

    head, h, target = make(name, {"scale": scale} | ({} if margin is None else {"margin": margin}))
    h[:10] = -head.weight.detach()[target[:10]] + 0.1 * h[:10]  # angles close to pi
    if name == "arcface":
        theirs = ArcFaceLoss(CLASSES, FEATURES, margin=math.degrees(head.margin), scale=scale)
    else:
        theirs = CosFaceLoss(CLASSES, FEATURES, margin=head.margin, scale=scale)
    theirs.W.data = head.weight.detach().T.clone()
    ours, other = h.clone().requires_grad_(), h.clone().requires_grad_()
    a, b = head.loss(ours, target), theirs(other, target)
    a.backward()
    b.backward()
    compare(f"{name}, loss", a, b, 1e-11)
    compare(f"{name}, gradient of h", ours.grad, other.grad, 1e-11)
    compare(f"{name}, gradient of the weight", head.weight.grad, theirs.W.grad.T, 1e-11)


def test_the_margin_of_arcface_decreases_everywhere():
    theta = torch.linspace(0, math.pi, 10_001, dtype=torch.float64)
    h = torch.stack([theta.cos(), theta.sin()], 1)
    head = HEADS["arcface"](2, 2, scale=1.0, dtype=torch.float64)
    head.weight.data = torch.eye(2, dtype=torch.float64)
    z = head(h, torch.zeros(10_001, dtype=torch.long))[:, 0]
    assert (z.diff() < 1e-9).all()
    low = theta < math.pi - 0.5
    compare("arcface, the margin", z[low], torch.cos(theta[low] + 0.5), 1e-8)


def test_arcface_at_angles_of_zero_and_pi():
    """The cosine is exactly 1 and -1, where the slope of the sine is infinite."""
    head = HEADS["arcface"](3, 3)
    head.weight.data = torch.eye(3)
    h, target = torch.cat([torch.eye(3), -torch.eye(3)]).requires_grad_(), torch.arange(3).repeat(2)
    head.loss(h, target).backward()
    assert h.grad.isfinite().all() and head.weight.grad.isfinite().all()


def test_the_default_scale_is_the_smallest_that_reaches_the_probability():
    """With weights at the largest equal angles, the true class has p = 0.999 at its own direction."""
    for name in ("cosface", "arcface"):
        for classes in (2, 10, 100):
            head = HEADS[name](128, classes, dtype=torch.float64).eval()
            head.weight.data = HEADS["etf"](128, classes, dtype=torch.float64).weight
            p = head.predict_proba(7 * head.weight).diagonal()
            compare(f"{name}, {classes} classes", p, torch.full((classes,), 0.999, dtype=torch.float64))


@pytest.mark.parametrize("covariance", ["identity", "diagonal"])
def test_lgm_is_a_mixture_of_gaussians(covariance):
    options = {"covariance": covariance, "alpha": 0.7, "likelihood": 0.2}
    head, h, target = make("lgm", options)
    variances = np.ones((CLASSES, FEATURES)) if covariance == "identity" else head.log_var.detach().exp().numpy()
    means, y = head.weight.detach().numpy(), target.numpy()
    densities = [multivariate_normal(m, np.diag(v)) for m, v in zip(means, variances, strict=True)]
    logs = np.stack([density.logpdf(h.numpy()) for density in densities], 1)
    constant = FEATURES / 2 * math.log(2 * math.pi)
    compare(f"lgm {covariance}, x", head.features(h), logs + constant, 1e-11)
    compare(f"lgm {covariance}, p", head.predict_proba(h), np.exp(logs - logsumexp(logs, axis=1, keepdims=True)))
    z, true = logs.copy(), (np.arange(ROWS), y)
    far = ((h.numpy() - means[y]) ** 2 / variances[y]).sum(1) / 2
    z[true] -= 0.7 * far
    expected = cross_entropy(z, y) - 0.2 * (logs[true] + constant)
    compare(f"lgm {covariance}, loss", head.loss(h, target, reduction="none"), expected, 1e-11)
    compare(f"lgm {covariance}, mean", head.loss(h, target), expected.mean(), 1e-11)
    weight = torch.tensor([1.0, 0.5, 2.0, 3.0, 0.1], dtype=torch.float64)
    w = weight.numpy()[y] * (y != 2)
    weighted = head.loss(h, target, class_weight=weight, ignore_index=2)
    compare(f"lgm {covariance}, weighted", weighted, (w * expected).sum() / w.sum(), 1e-11)
    compare(f"lgm {covariance}, tested", head.eval().loss(h, target), cross_entropy(logs, y).mean(), 1e-11)


def test_lgm_is_accurate_far_from_the_origin():
    """h and all means 1,000 from the origin: x in float32 is that in float64 but for the rounding of h itself."""
    head, h, _ = make("lgm", {"covariance": "diagonal"}, dtype=torch.float32)
    head.weight.data += 1000
    h = h + 1000
    exact = heads.LGMHead(FEATURES, CLASSES, covariance="diagonal", dtype=torch.float64)
    exact.load_state_dict(head.state_dict())
    compare("lgm, float32", head.features(h), exact.features(h.double()), 2e-4)


@pytest.mark.parametrize("features, classes", [(1, 2), (9, 10), (10, 10), (64, 10), (300, 100)])
def test_etf_has_equal_angles(features, classes):
    weight = HEADS["etf"](features, classes, dtype=torch.float64).weight.numpy()
    expected = classes / (classes - 1) * (np.eye(classes) - 1 / classes)
    compare("etf, W W'", weight @ weight.T, expected)
    found = np.linalg.svd(weight, compute_uv=False)[: classes - 1]  # a tight frame of its span
    compare("etf, singular values", found, np.full(classes - 1, math.sqrt(classes / (classes - 1))))
    compare("etf, sum", weight.sum(0), np.zeros(features))
    half = HEADS["etf"](features, classes, dtype=torch.bfloat16).weight.double()
    compare("etf, bfloat16", half @ half.T, expected, 0.02)


@pytest.mark.parametrize("q", [0.1, 0.7, 1.0])
def test_gce_is_the_formula(q):
    head, h, target = make("gce", {"q": q})
    x = (h @ head.weight.T + head.bias).detach().numpy()
    p = np.exp(x - logsumexp(x, axis=1, keepdims=True))[np.arange(ROWS), target]
    compare(f"gce, q {q}", head.loss(h, target, reduction="none"), (1 - p**q) / q)
    weight = torch.rand(CLASSES, dtype=torch.float64) + 0.5
    of_rows = weight[target].numpy()
    expected = (of_rows * (1 - p**q) / q).sum() / of_rows.sum()
    compare("gce, class weights", head.loss(h, target, class_weight=weight), expected)
    soft = F.one_hot(target, CLASSES).double()
    for reduction in ("none", "sum"):
        of = {"class_weight": weight, "reduction": reduction}
        compare("gce, probabilities", head.loss(h, soft, **of), head.loss(h, target, **of))
    compare("gce, evaluation", head.eval().loss(h, target), F.cross_entropy(torch.from_numpy(x), target))


def test_gce_is_cross_entropy_for_a_small_q():
    head, h, target = make("gce", {"q": 1e-9})
    compare("gce, q near 0", head.loss(h, target), F.cross_entropy(head(h), target), 1e-7)


def test_etf_is_cross_entropy_and_is_not_trained():
    head, h, target = make("etf")
    h.requires_grad_()
    compare("etf, loss", head.loss(h, target), cross_entropy((h @ head.weight.T).detach().numpy(), target).mean())
    before = head.weight.clone()
    head.loss(h, target).backward()
    assert h.grad.abs().max() > 0 and not list(head.parameters()) and torch.equal(head.weight, before)
    assert not torch.equal(make("etf")[0].weight, before)  # drawn


# ------------------------------------------------------------------------------------- against others, several labels


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_bce_is_torchs(reduction):
    head, h, target = make("bce")
    weights = {"weight": torch.rand(CLASSES).double(), "pos_weight": torch.rand(CLASSES).double() + 1}
    for options in ({}, weights):
        expected = F.binary_cross_entropy_with_logits(head(h), target.double(), reduction=reduction, **options)
        compare("bce", head.loss(h, target, reduction=reduction, **options), expected)


def asl(x, y, gamma_pos, gamma_neg, clip):
    """The loss of every label and its slope in x, the focal factors held fixed."""
    p, q = expit(x), expit(-x)
    p_m = np.maximum(p - clip, 0)
    present, absent = q**gamma_pos, p_m**gamma_neg
    loss = np.where(y == 1, -present * log_expit(x), -absent * np.log1p(-p_m))
    return loss, np.where(y == 1, -present * q, absent * p * q / (1 - p_m) * (p > clip))


@pytest.mark.parametrize("gamma_pos, gamma_neg, clip", [(0, 4, 0.05), (1, 4, 0.05), (0.5, 2.5, 0.2), (0, 4, 0.0)])
def test_asl_is_the_formula(gamma_pos, gamma_neg, clip):
    options = {"gamma_pos": gamma_pos, "gamma_neg": gamma_neg, "clip": clip}
    head, h, target = make("asl", options)
    x = head(h).detach().numpy()
    loss, slope = asl(x, target.numpy(), gamma_pos, gamma_neg, clip)
    compare("asl", head.loss(h, target, reduction="none"), loss)
    compare("asl, sum, as the authors reduce", head.loss(h, target, reduction="sum"), loss.sum(), 1e-11)
    head.loss(h, target, reduction="sum").backward()
    compare("asl, gradient", head.bias.grad, slope.sum(0), 1e-11)
    weight = torch.rand(CLASSES).double()
    target[::2, 1] = -100
    known = target.numpy() != -100
    expected = (loss * weight.numpy() * known).sum() / known.sum()
    compare("asl, weighted", head.loss(h, target, weight=weight), expected)


def test_asl_without_its_factors_is_binary_cross_entropy():
    head, h, target = make("asl", {"gamma_pos": 0, "gamma_neg": 0, "clip": 0})
    for y in (target, torch.rand(ROWS, CLASSES).double()):
        expected = F.binary_cross_entropy_with_logits(head(h), y.double() * 0.8 + 0.1)
        compare("asl, plain", head.loss(h, y, label_smoothing=0.2), expected)


def test_zlpr_is_the_formula():
    head, h, target = make("zlpr")
    target[0], target[1] = 0, 1  # no label, every label
    x, y = head(h).detach().numpy(), target.numpy()
    expected = [
        logsumexp([0, *row[labels == 0]]) + logsumexp([0, *-row[labels == 1]]) for row, labels in zip(x, y, strict=True)
    ]
    compare("zlpr", head.loss(h, target, reduction="none"), expected)
    for reduction, value in (("sum", np.sum(expected)), ("mean", np.mean(expected)), ("batchmean", np.mean(expected))):
        compare(f"zlpr, {reduction}", head.loss(h, target, reduction=reduction), value, 1e-11)
    soft = torch.rand(ROWS, CLASSES).double()
    t = 0.8 * soft.numpy() + 0.1
    expected = np.log(1 + ((1 - t) * np.exp(x)).sum(1)) + np.log(1 + (t * np.exp(-x)).sum(1))
    compare("zlpr, soft", head.loss(h, soft, label_smoothing=0.2, reduction="none"), expected)
    present = head.predict_proba(h) >= 0.5
    assert torch.equal(present, head(h) > 0)


def test_zlpr_leaves_out_unknown_labels():
    head, h, target = make("zlpr")
    target[:, 2], target[3] = -100, -100
    found = head.loss(h, target, label_smoothing=0.1)
    rows = [i for i in range(ROWS) if i != 3]
    other = heads.ZLPRHead(FEATURES, CLASSES - 1, dtype=torch.float64)
    kept = [0, 1, 3, 4]
    other.load_state_dict({k: v[kept] for k, v in head.state_dict().items()})
    compare("zlpr, unknown", found, other.loss(h[rows], target[rows][:, kept], label_smoothing=0.1))


# ------------------------------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("name, options", VARIANTS, ids=IDS)
def test_gradients(name, options):
    """Training mode, against finite differences in float64, for h and every parameter."""
    head, h, target = make(name, options | ({"detach": False} if name == "asl" else {}))
    h, target = h[:6].requires_grad_(), target[:6]
    names = [n for n, _ in head.named_parameters()]

    def loss(h, *values):
        state = dict(zip(names, values, strict=True))
        return torch.func.functional_call(Loss(head), {f"head.{k}": v for k, v in state.items()}, (h, target))

    assert torch.autograd.gradcheck(loss, (h, *(p for _, p in head.named_parameters())))


class Loss(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, h, target):
        return self.head.loss(h, target)


@pytest.mark.parametrize("name, options", VARIANTS, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extremes_are_finite(name, options, dtype):
    """h of zero, huge, and in and against the direction of a class."""
    head, h, target = make(name, options, dtype=dtype)
    h[0], h[1], h[2] = 0, 1e4 * h[1], -1e4 * h[2]
    h[3:8], h[8:13] = head.weight.detach()[:5], -head.weight.detach()[:5]
    if target.ndim == 1:
        target[3:13] = torch.arange(5).repeat(2)
    h.requires_grad_()
    loss = head.loss(h, target)
    loss.backward()
    assert loss.isfinite() and h.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in head.parameters())
    assert name == "lgm" or h.grad.abs().max() < 1e3  # in lgm the gradient is proportional to the distance


# ------------------------------------------------------------------------------------------------------------ modes


@pytest.mark.parametrize("name, options", VARIANTS, ids=IDS)
def test_shapes_reductions_and_ignored_rows(name, options):
    head, h, target = make(name, options)
    each = head.loss(h, target, reduction="none")
    single = head.singlelabel
    assert each.shape == ((ROWS,) if single or name == "zlpr" else (ROWS, CLASSES))
    compare("mean", head.loss(h, target), each.mean())
    compare("sum", head.loss(h, target, reduction="sum"), each.sum(), 1e-10)
    assert head.features(h).shape == head(h).shape == head.predict_proba(h).shape == (ROWS, CLASSES)
    assert name in HEADS and type(head).__name__ in repr(head)
    if not single:
        with pytest.raises(ValueError, match="topk is for single-label heads"):
            head.predict(h)
        return
    compare("more dimensions", head.loss(h.view(4, 2, 5, -1), target.view(4, 2, 5), reduction="none").flatten(), each)
    compare("one row", head.loss(h[0], target[0], reduction="none"), each[0])
    ignored = target.clone()
    ignored[::3] = -100
    compare("ignored", head.loss(h, ignored), each[ignored >= 0].mean())
    compare("a number", head.loss(h, ignored, reduction="none")[::3], torch.zeros(14))
    smooth = head.loss(h, target, label_smoothing=0.1)
    assert smooth.isfinite() and smooth != head.loss(h, target)
    p = head.predict_proba(h)
    assert torch.equal(head.predict(h), p.argmax(1)) and torch.equal(head.topk(h, 2)[1][:, 0], p.argmax(1))
    if name in ("cosface", "arcface", "lgm"):
        with pytest.raises(ValueError, match="target must hold one class index for each row"):
            head.loss(h, SOFT)
        assert not torch.equal(head(h, target), head(h))
        head.eval()
        assert torch.equal(head(h, target), head(h))
        compare("tested", head.loss(h, SOFT), F.cross_entropy(head(h), SOFT))


@pytest.mark.parametrize("name, options", VARIANTS, ids=IDS)
def test_half_precision_is_computed_in_float32(name, options):
    head, h, target = make(name, options, dtype=torch.float32)
    h = h.bfloat16().float()
    expected = head.loss(h, target)
    with torch.autocast("cpu", torch.bfloat16):
        found = head.loss(h, target)
        half = head.loss(h.bfloat16(), target)
    assert found.dtype == torch.float32
    # on cosines and distances nothing is rounded, elsewhere x is
    bound = 1e-6 if name in ("cosface", "arcface", "lgm") else 0.02
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
    torch.testing.assert_close(half, expected, rtol=bound, atol=bound)
    head.bfloat16()
    half = h.bfloat16().requires_grad_()
    found = head.loss(half, target)
    found.backward()
    assert found.dtype == half.grad.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("name, options", VARIANTS, ids=IDS)
def test_they_compile_without_graph_breaks(name, options):
    torch.compiler.reset()
    head, h, target = make(name, options, dtype=torch.float32)
    compiled = torch.compile(lambda h, y: head.loss(h, y), fullgraph=True, backend="aot_eager")
    a, b = h.clone().requires_grad_(), h.clone().requires_grad_()
    found, expected = compiled(a, target), head.loss(b, target)
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("name, options", VARIANTS, ids=IDS)
def test_state_is_saved_and_reset(name, options):
    head, h, target = make(name, options, dtype=torch.float32)
    other = HEADS[name](FEATURES, CLASSES, **options)
    assert not torch.equal(other.loss(h, target), head.loss(h, target))
    other.load_state_dict(head.state_dict())
    assert torch.equal(other.loss(h, target), head.loss(h, target))
    with torch.device("meta"):
        empty = HEADS[name](FEATURES, CLASSES, **options)
    assert all(v.is_meta for v in empty.state_dict().values())
    torch.manual_seed(3)
    fresh = HEADS[name](FEATURES, CLASSES, **options)
    torch.manual_seed(3)
    if name == "etf":
        torch.empty(CLASSES, FEATURES).uniform_()  # what a new head draws first, as every head does
    empty = empty.to_empty(device="cpu")
    empty.reset_parameters()
    assert all(torch.equal(v, fresh.state_dict()[k]) for k, v in empty.state_dict().items())


@pytest.mark.parametrize("name, options", VARIANTS, ids=IDS)
def test_they_fold_and_export(name, options):
    head, h, _ = make(name, options, dtype=torch.float32)
    head.eval()
    plain = fold(nn.Sequential(nn.Identity(), head))
    assert all(type(m).__module__.startswith("torch.") for m in plain[1].modules())
    torch.testing.assert_close(plain(h), head(h), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(to_program(head, h).module()(h[:3]), head(h[:3]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*SINGLE, *SEVERAL])
def test_they_attach(name):
    net = nn.Sequential(nn.Linear(4, FEATURES), nn.ReLU(), nn.Linear(FEATURES, CLASSES))
    inputs, last = torch.randn(ROWS, 4), net[2]
    before = net(inputs)
    attach(net, name)
    head = head_of(net)
    assert type(head) is HEADS[name]
    linear = name in ("adjusted", "focal", "gce", *SEVERAL)
    assert (head.weight is last.weight) == linear == torch.equal(net(inputs), before)
    target = torch.randint(CLASSES, (ROWS,)) if head.singlelabel else torch.randint(2, (ROWS, CLASSES))
    attached_loss(net, inputs, target).backward()
    assert net[0].weight.grad.isfinite().all()
    old = head.weight
    attach(net, "softmax")
    assert type(head_of(net)).__name__ == "SoftmaxHead" and (head_of(net).weight is old) == linear


# ------------------------------------------------------------------------------------------------------------- training

QUICK = Config(epochs=3, threads=1, device="cpu", train_geometry=False)
MOSAIC = {"data": "digits-mosaic", "pool": "max"}


@pytest.mark.parametrize("name", [*SINGLE, *SEVERAL])
def test_they_learn_and_load(name, tmp_path):
    several = name in SEVERAL
    config = QUICK.override({"head": name} | (MOSAIC if several else {}))
    result = train.train(config, tmp_path / "run")
    if several:
        labels = data.load("digits-mosaic").test.y.double()
        assert result["mAP"] > labels.mean() + 0.15  # at random it is the share of present labels
    else:
        assert result["error"] < 0.1
    model = gsoftmax.load(tmp_path / "run")
    metrics, outputs = models.evaluate(model, config.data)
    assert metrics == {k: result[k] for k in metrics}
    assert type(model.network.head) is HEADS[name] and outputs["p"].shape == outputs["x"].shape
    inputs = model.prepare(data.load(config.data).test.x[:7])
    torch.testing.assert_close(model.predict_proba(inputs).double(), outputs["p"][:7], rtol=0, atol=1e-5)
    models.export(model, tmp_path / "model.pt2")
    pixels = data.load(config.data).test.x[:7].float() / 255
    found = torch.export.load(tmp_path / "model.pt2").module()(pixels)
    torch.testing.assert_close(found.double(), outputs["p"][:7], rtol=0, atol=1e-5)


def test_the_prior_is_that_of_the_training_split():
    config = QUICK.override({"head": "adjusted", "imbalance": 20})
    dataset = build.load_data(config)
    counts = np.bincount(dataset.train.y.numpy(), minlength=10)
    assert counts.max() > 10 * counts.min()
    head = build.prepare(config, dataset, torch.device("cpu")).network.head
    compare("prior", head.log_prior, np.log(counts / counts.sum()), 1e-6)


# ------------------------------------------------------------------------------------------------------------- mistakes


def test_the_lists_of_heads_agree():
    assert list(HEADS) == [*heads.DEFAULT, *SINGLE, *SEVERAL]
    assert all(HEADS[name].singlelabel and not HEADS[name].multilabel for name in SINGLE)
    assert all(HEADS[name].multilabel and not HEADS[name].singlelabel for name in SEVERAL)


@pytest.mark.parametrize("name", [*SINGLE, *SEVERAL])
def test_the_wrong_kind_of_data_is_one_line(name):
    right, wrong = ("single-label", "multi-label") if name in SINGLE else ("multi-label", "single-label")
    config = QUICK.override({"head": name, "data": "digits-mosaic" if name in SINGLE else "digits"})
    with pytest.raises(ValueError, match=rf"^{HEADS[name].__name__} is for {right} data, and digits\S* is {wrong}$"):
        build.head(config, build.load_data(config), FEATURES)


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("adjusted", {"tau": -1}, "tau must be a number, 0 or more and finite, got -1"),
        ("adjusted", {"tau": "x"}, "tau must be a number, 0 or more and finite, got 'x'"),
        ("focal", {"gamma": math.nan}, "gamma must be a number, 0 or more and finite, got nan"),
        ("focal", {"gamma": True}, "gamma must be a number, 0 or more and finite, got True"),
        ("cosface", {"scale": 0}, "scale must be a number, above 0 and finite, got 0"),
        ("cosface", {"margin": math.inf}, "margin must be a number, 0 or more and finite, got inf"),
        ("arcface", {"margin": 4}, "margin must be a number, 0 or more and at most 3.142, got 4"),
        ("arcface", {"scale": [1]}, r"scale must be a number, above 0 and finite, got \[1\]"),
        ("lgm", {"covariance": "full"}, "covariance must be one of identity, diagonal, got 'full'"),
        ("lgm", {"alpha": -0.1}, "alpha must be a number, 0 or more and finite, got -0.1"),
        ("lgm", {"likelihood": None}, "likelihood must be a number, 0 or more and finite, got None"),
        ("asl", {"clip": 1.5}, "clip must be a number, 0 or more and at most 1, got 1.5"),
        ("asl", {"gamma_neg": -1}, "gamma_neg must be a number, 0 or more and finite, got -1"),
        ("asl", {"detach": 1}, "detach must be True or False, got 1"),
        ("bce", {"form": "paired"}, "form of BCEHead must be 'msml', got 'paired'"),
        ("zlpr", {"form": None}, "form of ZLPRHead must be 'msml', got None"),
        ("bce", {"bias": "x"}, "bias must be True or False, got 'x'"),
    ],
)
def test_bad_options(name, options, words):
    with pytest.raises(ValueError, match=f"^{words}$"):
        HEADS[name](FEATURES, CLASSES, **options)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: heads.ETFHead(8, 10), "in_features must be at least 9, one less than the classes.* got 8"),
        (lambda: heads.ETFHead(8, 1), "num_classes must be 2 or more, got 1"),
        (lambda: heads.AdjustedHead(4, 3).fit_prior(torch.ones(2)), r"counts must have shape \(3,\).* got \(2,\)"),
        (lambda: heads.AdjustedHead(4, 2).fit_prior(torch.tensor([1, -1])), "counts must be 0 or more.* of -1"),
        (lambda: loss("focal", pos_weight=1), "options of FocalHead are class_weight, .* got pos_weight"),
        (lambda: loss("cosface", weight=1), "options of CosFaceHead are class_weight, .* got weight"),
        (lambda: loss("zlpr", weight=torch.ones(3)), "options of ZLPRHead are ignore_index, .* got weight"),
        (lambda: loss("asl", pos_weight=1), "options of ASLHead are weight, .* got pos_weight"),
        (lambda: loss("focal", reduction="batchmean"), "reduction must be one of mean, sum, none, got 'batchmean'"),
        (lambda: loss("lgm", reduction="avg"), "reduction must be one of mean, sum, none, got 'avg'"),
        (lambda: loss("arcface", label_smoothing=2), "label_smoothing must lie between 0 and 1, got 2"),
        (lambda: loss("asl", reduction="avg"), "reduction must be one of mean, .*, got 'avg'"),
        (lambda: loss("focal", target=torch.tensor([0, 3])), "target must lie between 0 and 2"),
        (lambda: loss("lgm", target=torch.tensor([0, 3])), "target must lie between 0 and 2"),
        (lambda: loss("adjusted", target=torch.tensor([0, 3])), "target must lie between 0 and 2"),
        (lambda: loss("arcface", target=torch.tensor([0])), r"class indices must have shape \(2,\)"),
        (lambda: loss("zlpr", target=torch.full((2, 3), 2)), "target must hold 0, 1, probabilities"),
        (lambda: loss("asl", target=torch.tensor([0, 1])), r"target must have shape \(2, 3\), one value for each"),
    ],
)
def test_mistakes(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def loss(name, target=None, **options):
    head = HEADS[name](4, 3)
    if target is None:
        target = torch.tensor([0, 1]) if head.singlelabel else torch.zeros(2, 3)
    return head.loss(torch.zeros(2, 4), target, **options)
