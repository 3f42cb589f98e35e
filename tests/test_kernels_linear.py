"""The fused linear layer and loss on a CPU; test_kernels_triton.py tests it with the Triton kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from gsoftmax import functional, kernels
from gsoftmax.checks import Options
from gsoftmax.heads import LSoftmaxHead
from gsoftmax.kernels import chunked, linear, native
from gsoftmax.kernels.linear import Linear

N, D, C = 23, 5, 31

PATHS = [
    "chunked",
    pytest.param("native", marks=pytest.mark.skipif(bool(native.unavailable()), reason="no compiled kernel here")),
]


@pytest.fixture(autouse=True)
def chunks(monkeypatch):
    """Four rows at a time, or five where h is wider: several chunks and a shorter last one."""
    monkeypatch.setattr(linear, "CHUNK", {"cpu": 4 * C, "cuda": 4 * C})


def inputs(dtype=torch.float32, kind="index", bias=True):
    generator = torch.Generator().manual_seed(1)
    h, weight = (torch.randn(s, generator=generator).to(dtype) for s in ((N, D), (C, D)))
    b = torch.randn(C, generator=generator).to(dtype) if bias else None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    mu, sigma = torch.randn(C, generator=generator, dtype=wide), torch.rand(C, generator=generator, dtype=wide) + 0.3
    if kind == "index":
        target = torch.randint(0, C, (N,), generator=generator)
        target[[3, 5, 7]] = torch.tensor([0, C - 1, -100])
    else:
        target = torch.softmax(torch.randn(N, C, generator=generator, dtype=wide), 1)
    return [h, weight, b, mu, sigma], target


def exact(values, target, lam, options):
    leaves = [None if v is None else v.detach().double().requires_grad_() for v in values]
    h, weight, bias, mu, sigma = leaves
    # x as the matrix product rounds it: what is tested begins there, and the slope of a small sigma would multiply it
    x = F.linear(h, weight, bias)
    x = x + (F.linear(*values[:3]).double() - x).detach()
    z = x + lam * torch.special.ndtr((x - mu) / sigma)
    target = target.double() if target.is_floating_point() else target
    class_weight = None if options.weight is None else options.weight.double()
    return F.cross_entropy(z, target, **options._replace(weight=class_weight)._asdict()), leaves


DEFAULT = Options()
EVALUATE = {"chunked": chunked.evaluate, "native": native.evaluate}


def ours(values, target, lam=1.0, options=DEFAULT, path="chunked", target_logit=None):
    leaves = [None if v is None else v.clone().requires_grad_() for v in values]
    layer, gaussians = Linear(*leaves[:3], target_logit), leaves[3:]
    return linear.linear_cross_entropy(layer, target, *gaussians, lam, options, EVALUATE[path]), leaves


def compare(values, target, lam, options, path, tolerance):
    loss, leaves = ours(values, target, lam, options, path)
    loss64, leaves64 = exact(values, target, lam, options)
    grad = torch.rand(loss.shape).to(loss.dtype) + 0.5
    loss.backward(grad)
    loss64.backward(grad.double())
    assert loss.shape == loss64.shape
    assert ((loss.double() - loss64).abs() <= tolerance * (loss64.abs() + 1)).all()
    for a, b in zip(leaves, leaves64, strict=True):
        if a is not None:
            assert a.grad.dtype == a.dtype
            assert (a.grad.double() - b.grad).norm() <= tolerance * b.grad.norm() + 1e-12


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "kind, bias, lam, weighted, reduction, smoothing",
    [
        ("index", True, 1.0, False, "mean", 0.0),
        ("index", False, 2.0, True, "mean", 0.2),
        ("index", True, 1.0, True, "sum", 0.0),
        ("index", True, 1.0, False, "none", 0.1),
        ("index", False, 0.0, False, "mean", 0.0),
        ("probability", True, 1.0, True, "mean", 0.1),
        ("probability", False, 1.0, False, "none", 0.0),
    ],
)
def test_every_option_against_float64(path, kind, bias, lam, weighted, reduction, smoothing):
    values, target = inputs(kind=kind, bias=bias)
    class_weight = torch.linspace(0.2, 1.5, C) if weighted else None
    compare(values, target, lam, Options(class_weight, -100, reduction, smoothing), path, 3e-6)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_half_precision(path, dtype, tolerance, reduction):
    values, target = inputs(dtype)
    compare(values, target, 1.0, Options(reduction=reduction), path, tolerance)


class Largest(TorchDispatchMode):
    """How large the largest tensor was."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for v in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(v, torch.Tensor) and v.device.type != "meta":
                self.size = max(self.size, v.numel())
        return out


@pytest.mark.parametrize("margin", [False, True])
def test_x_is_never_stored_in_full(margin):
    values, target = inputs(bias=not margin)
    target_logit = torch.randn(N, requires_grad=True) if margin else None
    with Largest() as largest:
        loss, _ = ours(values, target, target_logit=target_logit)
        loss.backward()
    assert 5 * C <= largest.size <= 3 * 5 * C < N * C  # pure torch has three tables of a chunk's size
    if margin:
        assert target_logit.grad.count_nonzero() == N - 1  # one row is ignored
        h, weight, _, mu, sigma = values  # which need no gradient now
        layer = Linear(h, weight, None, target_logit)
        alone = linear.linear_cross_entropy(layer, target, mu, sigma, 1.0, Options(), chunked.evaluate)
        assert torch.equal(*torch.autograd.grad(alone, target_logit), target_logit.grad)


def test_chunks_are_even_and_cover_all_rows():
    for rows, features, classes, device in ((23, 5, 31, "cpu"), (8192, 2048, 128256, "cuda"), (1, 4, 10, "cuda")):
        cut = list(linear._chunks(rows, features, classes, device))
        assert [i for s in cut for i in range(s.start, s.stop)] == list(range(rows))
        sizes = [s.stop - s.start for s in cut]
        assert min(sizes[:-1], default=sizes[0]) == max(sizes)


def test_a_loss_scale_reaches_float16_before_it_rounds(monkeypatch):
    monkeypatch.setattr(linear, "CHUNK", {"cpu": 1 << 22})
    rows = classes = 4096  # dx is p / rows, and float16 ends at 6e-8
    h = torch.randn(rows, 2, dtype=torch.float16, requires_grad=True)
    weight = (1 + torch.randn(classes, 2) / 8).half()
    target = torch.randint(0, classes, (rows,))
    mu, sigma = torch.zeros(classes), torch.ones(classes)
    loss = linear.linear_cross_entropy(Linear(h, weight), target, mu, sigma, 1.0, Options(), chunked.evaluate)
    loss.backward(torch.tensor(4096.0, dtype=torch.float16))
    some = h.detach()[:256].double().requires_grad_()  # rows are alone, and scale and mean cancel
    x = some @ weight.double().t()
    F.cross_entropy(x + torch.special.ndtr(x), target[:256], reduction="sum").backward()
    assert (h.grad[:256].double() - some.grad).norm() < 5e-3 * some.grad.norm()


def test_only_what_is_needed():
    values, target = inputs()
    rest = (1.0, Options(), chunked.evaluate)
    full, leaves = ours(values, target)
    full.backward()
    for i in range(5):
        some = [v.clone().requires_grad_(i == j) for j, v in enumerate(values)]
        loss = linear.linear_cross_entropy(Linear(*some[:3]), target, *some[3:], *rest)
        loss.backward()
        assert torch.equal(loss, full)
        assert [v.grad is not None for v in some] == [i == j for j in range(5)]
        torch.testing.assert_close(some[i].grad, leaves[i].grad)
    assert not linear.linear_cross_entropy(Linear(*values[:3]), target, *values[3:], *rest).requires_grad


def test_a_retained_graph_gives_the_same_twice():
    values, target = inputs()
    loss, leaves = ours(values, target)
    first = [g.clone() for g in torch.autograd.grad(loss, leaves, retain_graph=True)]
    for g in torch.autograd.grad(loss, leaves, retain_graph=True):
        g.zero_()  # the caller may change the gradients it gets
    for a, b in zip(first, torch.autograd.grad(loss, leaves), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_first_and_second_derivatives(monkeypatch, reduction):
    monkeypatch.setattr(linear, "CHUNK", {"cpu": 2 * 6})
    values, target = inputs(torch.float64)
    values = [v[:4].clone() if i == 0 else v[:6].clone() for i, v in enumerate(values)]
    target = target[:4] % 6
    leaves = [v.requires_grad_() for v in values]

    def loss(h, weight, bias, mu, sigma):
        options = Options(reduction=reduction, label_smoothing=0.1)
        return linear.linear_cross_entropy(Linear(h, weight, bias), target, mu, sigma, 1.0, options, chunked.evaluate)

    assert torch.autograd.gradcheck(loss, leaves)
    assert torch.autograd.gradgradcheck(loss, leaves)


def test_autocast_works_as_in_linear():
    values, target = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        loss, leaves = ours(values, target)
        h, weight, bias, mu, sigma = (v.detach().clone().requires_grad_() for v in values)
        expected = functional.gsoftmax_cross_entropy(F.linear(h, weight, bias), target, mu, sigma, impl="plain")
    assert loss.dtype == expected.dtype == torch.float32
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=2e-3, atol=1e-3)
    for a, b in zip(leaves, (h, weight, bias, mu, sigma), strict=True):
        assert a.grad.dtype == torch.float32
        assert (a.grad - b.grad).norm() < 1e-2 * b.grad.norm()


@pytest.mark.parametrize("path", PATHS)
def test_every_row_ignored(path):
    values, target = inputs()
    target[:] = -100
    loss, leaves = ours(values, target, 1.0, Options(label_smoothing=0.1), path)
    loss.backward()
    assert loss.isnan()
    assert all((v.grad == 0).all() for v in leaves)


@pytest.mark.parametrize("path", PATHS)
def test_mistakes_are_named(path):
    values, target = inputs()
    with pytest.raises(ValueError, match=r"weight must have shape \(31,\)"):
        ours(values, target, 1.0, Options(torch.ones(3)), path)
    with pytest.raises(ValueError, match="reduction must be one of"):
        ours(values, target, 1.0, Options(reduction="average"), path)
    target[20] = 31
    with pytest.raises(ValueError, match="target must lie between 0 and 30 .* got 31"):
        ours(values, target, 1.0, Options(), path)


# ------------------------------------------------------------------------------------------------------------ a margin


def margin_loss(function, h, weight, target, *rest, **options):
    leaves = [v.clone().requires_grad_() for v in (h, weight)]
    loss = function(*leaves, target, *rest, **options)
    return loss.detach(), torch.autograd.grad(loss, leaves, (torch.arange(N) / N + 1).to(loss) if loss.ndim else None)


def whole(h, weight, target, margin, anneal, class_weight=None, **options):
    z = functional.large_margin_logits(h, weight, target, margin, anneal)
    return F.cross_entropy(z, target, None if class_weight is None else class_weight.to(z.dtype), **options)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("margin, anneal", [(1, 0.0), (2, 0.0), (3, 2.5), (4, torch.tensor(0.5))])
@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "none"}, {"reduction": "sum", "label_smoothing": 0.2}, {"class_weight": True}],
    ids=str,
)
def test_a_margin_chunk_by_chunk_is_that_of_all_logits(path, margin, anneal, options):
    (h, weight, *_), target = inputs()
    if options.get("class_weight"):
        options = {"class_weight": torch.rand(C) + 0.1}
    got, gradients = margin_loss(
        functional.large_margin_cross_entropy, h, weight, target, margin, anneal, impl=path, **options
    )
    expected, exact_gradients = margin_loss(whole, h.double(), weight.double(), target, margin, anneal, **options)
    torch.testing.assert_close(got.double(), expected, rtol=3e-6, atol=3e-6)
    for a, b in zip(gradients, exact_gradients, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_margin_in_half_precision(dtype, tolerance, reduction):
    (h, weight, *_), target = inputs(dtype)
    options = {"reduction": reduction}
    got, gradients = margin_loss(functional.large_margin_cross_entropy, h, weight, target, 2, impl="chunked", **options)
    expected, exact_gradients = margin_loss(whole, h.double(), weight.double(), target, 2, 0.0, **options)
    assert got.dtype is dtype and {g.dtype for g in gradients} == {dtype}
    for a, b in zip((got, *gradients), (expected, *exact_gradients), strict=True):
        assert (a.double() - b).norm() <= tolerance * b.norm()


def test_a_margin_far_from_the_label_keeps_its_digits():
    """Others lose to the label by 60 before the margin, and win by 60 with it: their share must not round to 0."""
    h, weight = torch.tensor([[60.0, 0.0]]).repeat(N, 1), torch.cat([torch.eye(2), torch.zeros(C - 2, 2)])
    weight[0] = torch.tensor([1.0, 0.2])
    target = torch.zeros(N, dtype=torch.long)
    got, gradients = margin_loss(functional.large_margin_cross_entropy, h, weight, target, 4, impl="chunked")
    expected, exact_gradients = margin_loss(whole, h.double(), weight.double(), target, 4, 0.0)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=0.0)
    for a, b in zip(gradients, exact_gradients, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-6)


def test_a_margin_can_be_differentiated_twice(monkeypatch):
    monkeypatch.setattr(linear, "CHUNK", {"cpu": 2 * 6})
    (h, weight, *_), target = inputs(torch.float64)
    h, weight, target = h[:4], weight[:6], target[:4] % 6

    def loss(h, weight):
        return functional.large_margin_cross_entropy(h, weight, target, 2, 1.0, impl="chunked")

    leaves = [v.clone().requires_grad_() for v in (h, weight)]
    assert torch.autograd.gradcheck(loss, leaves, atol=1e-6)
    assert torch.autograd.gradgradcheck(loss, leaves, atol=1e-5)


def test_a_head_with_a_margin_takes_chunks_where_outputs_are_many(monkeypatch):
    (h, weight, *_), target = inputs()
    found = {}
    for name, limit in (("whole", 1 << 40), ("chunks", 0)):
        monkeypatch.setattr(kernels, "LARGE_LINEAR", {"cpu": limit, "cuda": limit})
        head = LSoftmaxHead(D, C, margin=3, anneal_start=1.0)
        head.weight.data.copy_(weight)
        loss = head.loss(h, target)
        loss.backward()
        found[name] = (loss.detach(), head.weight.grad, head.eval().loss(h, target).detach())
        assert int(head.steps) == 1
    for a, b in zip(*found.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)
