"""Gaussians, criteria and heads as PyTorch modules: state, modes, processes, training."""

from __future__ import annotations

import copy
import io
import math
import pickle

import processes
import pytest
import torch
import torch.nn.functional as F
from processes import one_thread  # noqa: F401
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import gsoftmax
from gsoftmax import (
    GaussianLogits,
    GSoftmaxHead,
    GSoftmaxLoss,
    LSoftmaxHead,
    MultiLabelGSoftmaxLoss,
    SoftmaxHead,
)
from gsoftmax import functional as G

KINDS = ("learned", "fixed", "tracked")
FORMS = G.MULTILABEL_FORMS
MODULES = {
    "layer": lambda **k: GaussianLogits(5, **k),
    "loss": lambda **k: GSoftmaxLoss(5, **k),
    "multilabel loss": lambda **k: MultiLabelGSoftmaxLoss(5, **k),
    "head": lambda **k: GSoftmaxHead(8, 5, **k),
    "multilabel head": lambda **k: GSoftmaxHead(8, 5, form="paired", **k),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("sigma", [1.0, [0.5, 1.0, 2.0, 1.0, 1.0]])
def test_modules_are_made_of_fake_tensors(name, sigma):
    """A FakeTensorMode, in which memory is estimated and graphs are exported, has shapes and no values."""
    with FakeTensorMode():
        made = MODULES[name](mu=0.5, sigma=sigma)
        tensors = made.state_dict()
    real = MODULES[name](mu=0.5, sigma=sigma).state_dict()
    assert {key: value.shape for key, value in tensors.items()} == {key: value.shape for key, value in real.items()}


def run(module):
    """A scalar that depends on everything the module holds."""
    x, y = torch.randn(7, 5, requires_grad=True), torch.randint(5, (7,))
    labels = torch.randint(2, (7, 5))
    if isinstance(module, GaussianLogits):
        return module(x).logsumexp(1).sum()
    if isinstance(module, GSoftmaxLoss):
        return module(x, y)
    if isinstance(module, MultiLabelGSoftmaxLoss):
        return module(torch.randn(7, 10, requires_grad=True), labels)
    return module.loss(torch.randn(7, 8), y if module.form is None else labels)


def descend(loss, optimizer, steps):
    """Values of loss(step) over some optimizer steps."""
    values = []
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(step)
        value.backward()
        optimizer.step()
        values.append(value.item())
    return values


# ------------------------------------------------------------------------------------------------------------ state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODULES)
def test_state_round_trips(name, kind):
    module = MODULES[name](gaussians=kind, mu=0.3, sigma=2.0)
    learned = {n for n, _ in module.named_parameters()} - {"weight", "bias"}
    assert len(learned) == (2 if kind == "learned" else 0)
    run(module)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    keys = {k.removeprefix("gaussians.") for k in state} - {"weight", "bias"}
    assert keys == {"mu", "rho"}  # the same names for every kind, so one loads into another

    other = MODULES[name](gaussians=kind)
    assert not torch.equal(other.sigma, module.sigma)
    other.load_state_dict(state)
    for clone in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(clone.mu, module.mu) and torch.equal(clone.sigma, module.sigma)
        assert repr(clone) == repr(module) or clone is other
    assert kind in repr(module)


def test_state_of_a_newer_format_is_rejected():
    layer = GaussianLogits(3)
    state = layer.state_dict()
    assert state._metadata[""]["version"] == 1
    state._metadata[""]["version"] = 2
    with pytest.raises(ValueError, match="saved in format 2; this gsoftmax reads up to 1"):
        layer.load_state_dict(state)


@pytest.mark.parametrize("name", MODULES)
def test_meta_device(name):
    with torch.device("meta"):
        module = MODULES[name](mu=0.5, sigma=0.25)
    assert all(t.is_meta for t in module.state_dict().values())
    module = module.to_empty(device="cpu")
    for m in module.modules():
        if hasattr(m, "reset_parameters"):
            m.reset_parameters()
    torch.testing.assert_close(module.sigma, torch.full_like(module.sigma, 0.25))
    assert (module.mu == 0.5).all() and run(module).isfinite()


def test_initial_values():
    layer = GaussianLogits(3, mu=[1, 2, 3], sigma=torch.tensor([0.5, 1.0, 2.0]))
    torch.testing.assert_close(layer.mu.detach(), torch.tensor([1.0, 2.0, 3.0]))
    torch.testing.assert_close(layer.sigma.detach(), torch.tensor([0.5, 1.0, 2.0]))
    for loss in (MultiLabelGSoftmaxLoss(2, mu=[1, 2]), MultiLabelGSoftmaxLoss(2, mu=torch.tensor([[1, 2], [1, 2]]))):
        assert loss.mu.tolist() == [[1, 2], [1, 2]] and loss.sigma.shape == (2, 2)
    assert MultiLabelGSoftmaxLoss(2, form="msml", mu=[1, 2]).mu.tolist() == [1, 2]


def test_half_precision_modules():
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        loss = GSoftmaxLoss(5).to(dtype)
        x = torch.randn(4, 5, dtype=dtype, requires_grad=True)
        value = loss(x, torch.tensor([0, 1, 2, 3]))
        value.backward()
        assert value.dtype == x.grad.dtype == loss.gaussians.rho.grad.dtype == dtype


# ------------------------------------------------------------------------------------------------- the loss itself


def test_loss_without_the_term_is_cross_entropy_loss():
    x, y = torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 4, -100])
    weight = {"weight": torch.rand(5)}
    for options in ({}, {"label_smoothing": 0.1}, weight, {"reduction": "none"}, {"ignore_index": 2}):
        if "ignore_index" in options:
            y = y.abs() % 5
        for kind in KINDS:
            ours = GSoftmaxLoss(5, lam=0.0, gaussians=kind, **options)(x, y)
            assert torch.equal(ours, nn.CrossEntropyLoss(**options)(x, y))


@pytest.mark.parametrize("kind", KINDS)
def test_loss_equals_the_function(kind):
    loss = GSoftmaxLoss(5, lam=1.5, mu=0.2, sigma=0.7, gaussians=kind, label_smoothing=0.1).eval()
    x, y = torch.randn(6, 5, 3), torch.randint(5, (6, 3))
    expected = G.gsoftmax_cross_entropy(x, y, torch.full((5,), 0.2), torch.full((5,), 0.7), 1.5, label_smoothing=0.1)
    torch.testing.assert_close(loss(x, y), expected)
    torch.testing.assert_close(loss.predict_proba(x), G.gsoftmax(x, loss.mu, loss.sigma, 1.5))


def test_lam_can_change_between_steps():
    loss, x, y = GSoftmaxLoss(5, lam=0.0), torch.randn(6, 5), torch.randint(5, (6,))
    plain = loss(x, y)
    loss.lam = 2.0
    assert loss(x, y) != plain and loss.gaussians.lam == 2.0
    with pytest.raises(ValueError, match="lam must be 0 or more"):
        loss.lam = -1.0


@pytest.mark.parametrize("form", FORMS)
def test_multilabel_loss_equals_the_function(form):
    loss = MultiLabelGSoftmaxLoss(3, form=form, lam=1.2, mu=0.1, sigma=0.8, reduction="batchmean")
    target = torch.randint(2, (4, 3))
    x = torch.randn(4, 3) if form == "msml" else torch.randn(4, 2, 3)
    x_pos, x_neg = (x, None) if form == "msml" else (x[:, 1], x[:, 0])
    g = (torch.full((3,), 0.1), torch.full((3,), 0.8)) * (1 if form == "msml" else 2)
    expected = G.multilabel_cross_entropy(x_pos, x_neg, target, form=form, gaussians=g, lam=1.2, reduction="batchmean")
    torch.testing.assert_close(loss(x, target), expected)
    torch.testing.assert_close(loss(x.flatten(1), target), expected)
    p = loss.predict_proba(x)
    assert p.shape == (4, 3) and (p > 0).all() and (p < 1).all()
    torch.testing.assert_close(p, G.multilabel_probabilities(x_pos, x_neg, form=form, gaussians=g, lam=1.2))


# ----------------------------------------------------------------------------------------------- learned Gaussians


def test_rough_steps_leave_sigma_positive():
    """lr 5 with momentum on raw outputs: a raw sigma crosses zero here within a few steps."""
    loss = GSoftmaxLoss(10, lam=2.0, sigma=0.05)
    x = nn.Parameter(3 * torch.randn(64, 10))
    optimizer = torch.optim.SGD([x, *loss.parameters()], lr=5.0, momentum=0.9, weight_decay=5e-4)

    def value(step):
        assert (loss.sigma >= loss.gaussians.sigma_min).all() and loss.sigma.isfinite().all()
        return loss(x, torch.randint(10, (64,), generator=torch.Generator().manual_seed(step)))

    assert all(map(math.isfinite, descend(value, optimizer, 301)))


def test_param_groups():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), GSoftmaxHead(8, 5, lr_mult=100.0))
    groups = gsoftmax.param_groups(model, lr=0.1, weight_decay=5e-4)
    assert [(len(g["params"]), g["lr"], g["weight_decay"]) for g in groups] == [(4, 0.1, 5e-4), (2, 10.0, 0.0)]
    assert {id(p) for g in groups for p in g["params"]} == {id(p) for p in model.parameters()}
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    before = model[2].sigma.clone()
    model[2].loss(model[:2](torch.randn(16, 4)), torch.randint(5, (16,))).backward()
    optimizer.step()
    assert not torch.equal(before, model[2].sigma)
    assert len(GSoftmaxLoss(3, gaussians="fixed").param_groups(lr=0.1)) == 0
    assert [g["lr"] for g in SoftmaxHead(3, 2).param_groups(lr=0.1)] == [0.1]


def test_learned_gaussians_reduce_the_loss():
    x, y = torch.randn(256, 5) * 2, torch.randint(5, (256,))
    loss = GSoftmaxLoss(5, lam=4.0)
    values = descend(lambda step: loss(x, y), torch.optim.Adam(loss.parameters(), lr=0.05), 50)
    assert values[-1] < values[0] - 1e-3


# ---------------------------------------------------------------------------------------- fitted and tracked ones


@pytest.mark.parametrize("kind", KINDS)
def test_fit_gaussians_streams(kind):
    x = torch.randn(1000, 5) * torch.tensor([0.5, 1, 2, 3, 4]) + torch.tensor([1e3, -5, 0, 5, 10])
    loss = GSoftmaxLoss(5, gaussians=kind).fit_gaussians(iter(x.split(97)))
    torch.testing.assert_close(loss.mu.detach(), x.double().mean(0).float())
    torch.testing.assert_close(loss.sigma.detach(), x.double().std(0, correction=0).float(), rtol=1e-5, atol=1e-6)
    head = GSoftmaxHead(4, 5, gaussians=kind)
    h = torch.randn(300, 4)
    head.fit_gaussians((b, None) for b in h.split(64))
    torch.testing.assert_close(head.mu, head.features(h).mean(0), rtol=1e-4, atol=1e-5)
    two = MultiLabelGSoftmaxLoss(3, gaussians=kind).fit_gaussians([torch.randn(50, 2, 3) + 4])
    assert two.mu.shape == (2, 3) and (two.mu > 3).all()


def test_constant_outputs_give_the_smallest_sigma():
    loss = GSoftmaxLoss(5).fit_gaussians([torch.zeros(3, 5)])
    assert (loss.sigma > 0.01).all() and loss.gaussians.rho.isfinite().all()


def test_tracked_gaussians_follow_the_outputs():
    loss = GSoftmaxLoss(3, gaussians="tracked", momentum=0.1)
    scale, shift = torch.tensor([0.5, 1.0, 3.0]), torch.tensor([-2.0, 0.0, 4.0])
    for _ in range(300):
        loss((torch.randn(256, 3) * scale + shift).requires_grad_(), torch.randint(3, (256,))).backward()
    torch.testing.assert_close(loss.mu, shift, rtol=0.05, atol=0.05)
    torch.testing.assert_close(loss.sigma, scale, rtol=0.05, atol=0.05)
    assert not loss.mu.requires_grad and not list(loss.parameters())


def test_one_tracked_step_has_the_moments_of_the_mixture():
    layer, m = GaussianLogits(1, gaussians="tracked", momentum=0.25, mu=1.0, sigma=2.0), 0.25
    x = torch.tensor([[3.0], [5.0], [7.0]])
    layer.track(x)
    mean = 0.75 * 1.0 + m * 5.0
    var = 0.75 * (4.0 + (1.0 - mean) ** 2) + m * (x.var(correction=0).item() + (5.0 - mean) ** 2)
    assert layer.mu.item() == pytest.approx(mean) and layer.sigma.item() == pytest.approx(math.sqrt(var))


def test_tracked_gaussians_rest_in_evaluation_and_without_gradients():
    for module in (GSoftmaxLoss(5, gaussians="tracked"), GSoftmaxHead(8, 5, gaussians="tracked")):
        run(module)
        before = module.mu.clone()
        with torch.no_grad():
            run(module)
        module.eval()
        run(module)
        assert torch.equal(before, module.mu)
        module.train()
        run(module)
        assert not torch.equal(before, module.mu)


def test_tracked_gaussians_leave_out_ignored_rows_and_masked_classes():
    a, b = (GSoftmaxLoss(3, gaussians="tracked") for _ in range(2))
    x = torch.randn(8, 3, requires_grad=True)
    y = torch.tensor([0, 1, 2, 0, 1, 2, -100, -100])
    a(x, y)
    b(x[:6], y[:6])
    torch.testing.assert_close(a.mu, b.mu)
    torch.testing.assert_close(a.sigma, b.sigma)
    masked = x.detach().clone().index_fill(1, torch.tensor([1]), -math.inf).requires_grad_()
    before = a.mu.clone(), a.sigma.clone()
    value = a(masked, torch.zeros(8, dtype=torch.long))
    value.backward()
    assert value.isfinite() and masked.grad.isfinite().all()
    assert a.mu[1] == before[0][1] and a.sigma[1] == before[1][1] and a.mu[0] != before[0][0]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("impl", ["auto", "chunked", "plain"])
def test_two_forward_passes_before_one_backward(impl, reduction):
    loss = GSoftmaxLoss(5, gaussians="tracked", impl=impl, reduction=reduction)
    x = torch.randn(4, 5, requires_grad=True)
    (loss(x, torch.arange(4)) + loss(x * 2, torch.arange(4))).sum().backward()
    assert x.grad.isfinite().all()


def _track_and_fit(rank, world):
    torch.manual_seed(3)
    batches = [torch.randn(13, 4) * 3 + 7 for _ in range(5)]
    tracked, fitted = GaussianLogits(4, gaussians="tracked"), GaussianLogits(4)
    for batch in batches:
        tracked.track(batch[rank::world])
    fitted.fit_gaussians(batch[rank::world] for batch in batches)
    return [t.detach() for t in (tracked.mu, tracked.sigma, fitted.mu, fitted.sigma)]


def test_processes_share_their_statistics(tmp_path):
    """Two processes with parts of a batch (7 and 6 rows) hold what one process with all of it does."""
    two, other = processes.run(2, _track_and_fit, 2, store=tmp_path / "store")
    torch.testing.assert_close(two, other, rtol=0, atol=0)
    torch.testing.assert_close(two, _track_and_fit(0, 1), rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------- heads


def test_softmax_head_is_linear_and_cross_entropy():
    head, linear = SoftmaxHead(8, 5), nn.Linear(8, 5)
    linear.load_state_dict(head.state_dict())
    h, y = torch.randn(6, 8), torch.tensor([0, 1, 2, 3, 4, -100])
    assert torch.equal(head(h), linear(h)) and torch.equal(head.features(h), linear(h))
    assert torch.equal(head.loss(h, y, label_smoothing=0.1), F.cross_entropy(linear(h), y, label_smoothing=0.1))
    torch.testing.assert_close(head.predict_proba(h).sum(1), torch.ones(6))


@pytest.mark.parametrize("kind", KINDS)
def test_gsoftmax_head_is_its_parts(kind):
    head = GSoftmaxHead(8, 5, lam=1.5, gaussians=kind)
    h, y = torch.randn(2, 3, 8), torch.randint(5, (2, 3))
    w = torch.rand(5)
    loss = head.loss(h, y, reduction="none", class_weight=w, label_smoothing=0.1)
    head.eval()
    x, z = head.features(h), head(h)
    assert loss.shape == (2, 3) and z.shape == (2, 3, 5)
    expected = G.gsoftmax_logits(x.view(6, 5), head.mu, head.sigma, 1.5)
    torch.testing.assert_close(z.view(6, 5), expected)
    value = F.cross_entropy(expected, y.view(6), weight=w, label_smoothing=0.1, reduction="none").view(2, 3)
    torch.testing.assert_close(head.loss(h, y, reduction="none", class_weight=w, label_smoothing=0.1), value)
    torch.testing.assert_close(loss, value)  # what the training pass used is what evaluation sees
    torch.testing.assert_close(head.predict_proba(h), z.softmax(-1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cls", [SoftmaxHead, GSoftmaxHead])
def test_multilabel_heads(cls, form):
    head = cls(8, 5, form=form)
    h, target = torch.randn(6, 8), torch.randint(2, (6, 5))
    shape = (6, 5) if form == "msml" else (6, 2, 5)
    assert head.features(h).shape == head(h).shape == shape
    assert head.predict_proba(h).shape == (6, 5)
    head.loss(h, target, reduction="batchmean").backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in head.parameters())
    if cls is GSoftmaxHead:
        assert head.mu.shape == head.sigma.shape == shape[1:]
        criterion = MultiLabelGSoftmaxLoss(5, form=form)
        torch.testing.assert_close(head.loss(h, target), criterion(head.features(h), target))


def test_large_margin_head_anneals_saves_and_rests_in_evaluation():
    head = LSoftmaxHead(8, 5, margin=3, anneal_steps=10)
    h, y = torch.randn(16, 8), torch.randint(5, (16,))
    seen = []
    for _ in range(12):
        seen.append(head.anneal)
        head.loss(h, y)
    assert seen[0] == pytest.approx(1000, rel=1e-4) and seen[10] == seen[11] == 0 and sorted(seen, reverse=True) == seen
    assert int(head.steps) == 12
    with torch.no_grad():
        head.loss(h, y)
    assert int(head.steps) == 12
    other = LSoftmaxHead(8, 5, margin=3, anneal_steps=10)
    other.load_state_dict(head.state_dict())
    assert other.anneal == 0 and torch.equal(other.loss(h, y), head.loss(h, y))
    assert not torch.equal(head(h, y), head(h))
    head.eval()
    plain = F.linear(h, head.weight)
    assert torch.equal(head(h, y), plain) and torch.equal(head.loss(h, y), F.cross_entropy(plain, y))
    assert head.bias is None and "margin=3" in repr(head)
    head.reset_parameters()
    assert int(head.steps) == 0


@pytest.mark.parametrize("margin", [1, 2, 3, 4])
def test_large_margin_head_trains_by_default(margin):
    """Three blobs, a high learning rate and the default annealing: training must not collapse."""
    torch.manual_seed(margin)
    centres = 2 * torch.randn(3, 8)
    y = torch.randint(3, (512,))
    data = centres[y] + 0.5 * torch.randn(512, 8)
    net, head = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16)), LSoftmaxHead(16, 3, margin=margin)
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1, momentum=0.9, nesterov=True)
    batches = [slice(a, a + 64) for a in range(0, 512, 64)]
    descend(lambda step: head.loss(net(data[batches[step % 8]]), y[batches[step % 8]]), optimizer, 200)
    head.eval()
    assert (head(net(data)).argmax(1) != y).float().mean() < 0.02


@pytest.mark.parametrize("cls", [SoftmaxHead, GSoftmaxHead, LSoftmaxHead])
def test_heads_compile_without_graph_breaks(cls):
    torch.compiler.reset()
    head = cls(8, 5)
    h, y = torch.randn(6, 8), torch.randint(5, (6,))
    compiled = torch.compile(lambda h, y: head.loss(h, y), fullgraph=True, backend="aot_eager")
    a = compiled(h, y)
    if cls is LSoftmaxHead:
        assert int(head.steps) == 1
        head.steps.zero_()
    torch.testing.assert_close(a, head.loss(h, y))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: GaussianLogits(0), "num_classes must be a positive integer, got 0"),
        (lambda: GaussianLogits(3, gaussians="learnt"), "gaussians must be one of learned, fixed, tracked, got 'le"),
        (lambda: GaussianLogits(3, sigma=0.0), "sigma must be above sigma_min=0.01, got a minimum of 0"),
        (lambda: GaussianLogits(3, sigma=[1.0, -1.0, 1.0]), "sigma must be above sigma_min=0.01, got a minimum of -1"),
        (lambda: GaussianLogits(3, mu=[1.0]), r"mu must be a number or 3 values, got shape \(1,\)"),
        (lambda: GaussianLogits(3, mu=math.nan), "mu must be finite"),
        (lambda: GaussianLogits(3, momentum=0.0), r"momentum must lie in \(0, 1\], got 0.0"),
        (lambda: GaussianLogits(3, lr_mult=-1), "lr_mult must be 0 or more, got -1"),
        (lambda: GSoftmaxLoss(3, reduction="avg"), "reduction must be one of mean, sum, none, got 'avg'"),
        (lambda: GSoftmaxLoss(3, label_smoothing=2.0), "label_smoothing must lie between 0 and 1, got 2.0"),
        (lambda: GSoftmaxLoss(3, label_smoothing="a"), "label_smoothing must lie between 0 and 1, got 'a'"),
        (lambda: GSoftmaxLoss(3, weight=torch.ones(4)), r"weight must have shape \(3,\), one value for each class"),
        (lambda: GSoftmaxLoss(3, weight=[1, 2, 3]), r"weight must be a tensor of shape \(3,\), got list"),
        (lambda: GSoftmaxLoss(3, ignore_index=1.5), "ignore_index must be a whole number, got 1.5"),
        (lambda: GSoftmaxLoss(3, impl="fast"), "impl must be one of auto, plain, chunked, native, triton, got 'fast'"),
        (lambda: MultiLabelGSoftmaxLoss(3, reduction="avg"), "reduction must be one of mean, sum, none, batchmean"),
        (lambda: MultiLabelGSoftmaxLoss(3, label_smoothing=-1), "label_smoothing must lie between 0 and 1, got -1"),
        (lambda: MultiLabelGSoftmaxLoss(3, pos_weight=torch.ones(6)), r"pos_weight must have shape \(3,\), one value"),
        (lambda: MultiLabelGSoftmaxLoss(3, form="pair"), "form must be one of paired, .*, got 'pair'"),
        (lambda: SoftmaxHead(3, 2, form="pair"), "form must be one of paired, .*, got 'pair'"),
        (lambda: MultiLabelGSoftmaxLoss(3)(torch.zeros(2, 5), torch.zeros(2, 3)), r"x must be \(N, 2, 3\) or \(N, 6\)"),
        (lambda: GSoftmaxLoss(3)(torch.zeros(2, 5), torch.zeros(2).long()), r"mu must have shape \(5,\).* got \(3,\)"),
        (lambda: GSoftmaxLoss(5).fit_gaussians([]), "at least two examples .* got 0"),
        (lambda: GSoftmaxLoss(5).fit_gaussians([torch.zeros(1, 5)]), "at least two examples .* got 1"),
        (lambda: GSoftmaxLoss(5).fit_gaussians([torch.full((3, 5), math.nan)]), "finite"),
        (lambda: GSoftmaxLoss(5).fit_gaussians([torch.zeros(3, 4)]), r"5 classes in dimension 1, got shape \(3, 4\)"),
        (lambda: LSoftmaxHead(8, 5, form="paired"), "LSoftmaxHead has no multi-label form, got form='paired'"),
        (lambda: LSoftmaxHead(8, 5, margin=0), "margin must be 1, 2, 3 or 4, got 0"),
        (lambda: LSoftmaxHead(8, 5).loss(torch.zeros(2, 8), torch.full((2, 5), 0.2)), "must hold one class index"),
        (lambda: LSoftmaxHead(8, 5).loss(torch.zeros(2, 8), torch.tensor([0, 5])), "target must lie between 0 and 4"),
    ],
)
def test_mistakes(make, words):
    with pytest.raises((TypeError, ValueError), match=words):
        make()
