"""z of a layer in training: losses that never compute it, and everything else, which gets its values."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gsoftmax import GaussianLogits, GSoftmaxHead, attach, equations, kernels
from gsoftmax.kernels import native
from gsoftmax.kernels.deferred import Deferred

N, C = 12, 7


def make(*shape: int, dtype: torch.dtype = torch.float32, lam: float = 1.5) -> tuple[Tensor, GaussianLogits]:
    g = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(shape or (N, C), generator=g)).to(dtype).requires_grad_()
    c = x.shape[1]
    mu, sigma = torch.randn(c, generator=g), torch.rand(c, generator=g) + 0.3
    return x, GaussianLogits(c, lam=lam, mu=mu, sigma=sigma)


def formula(x: Tensor, layer: GaussianLogits) -> Tensor:
    return equations.logits(x, layer.mu, layer.sigma, layer.lam)


def outcome(loss: Tensor, x: Tensor, layer: GaussianLogits) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, (x, *layer.parameters()))]


@pytest.fixture(autouse=True)
def small_tables_too(monkeypatch):
    monkeypatch.setattr(kernels, "LARGE_Z", 0)


@pytest.fixture
def no_z(monkeypatch):
    """Only for compiled kernels, whose z is never to be computed."""
    if native.unavailable():
        pytest.skip("the compiled kernels are not built")

    def fail(*_):
        raise AssertionError("z was computed")

    monkeypatch.setattr(native, "logits", fail)


INDICES = torch.arange(N) % C
SHARES = torch.rand(N, C, generator=torch.Generator().manual_seed(1))
WEIGHT = torch.arange(1.0, C + 1)
LOSSES = {
    "function": lambda z: F.cross_entropy(z, INDICES),
    "module": lambda z: nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1)(z, INDICES),
    "keywords": lambda z: F.cross_entropy(z, target=INDICES, reduction="sum", ignore_index=2),
    "each": lambda z: (F.cross_entropy(z, INDICES, reduction="none") * WEIGHT.repeat(2)[:N]).sum(),
    "shares": lambda z: F.cross_entropy(z, SHARES.softmax(1)),
    "same shape": lambda z: F.cross_entropy(z.view(-1, C), INDICES.view(-1)),
    "words": lambda z: F.cross_entropy(z.view(3, 4, C).view(-1, C), INDICES),
    "words, reshaped": lambda z: F.cross_entropy(z.reshape((3, 4, C)).reshape(-1, C), INDICES),
    "labels": lambda z: F.binary_cross_entropy_with_logits(z, SHARES.round()),
    "labels, module": lambda z: nn.BCEWithLogitsLoss(weight=WEIGHT, pos_weight=WEIGHT + 1, reduction="sum")(z, SHARES),
    "labels, each": lambda z: F.binary_cross_entropy_with_logits(z, SHARES, reduction="none").mul(WEIGHT).mean(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_loss_without_z_is_the_loss_of_z(loss, dtype, no_z):
    x, layer = make(dtype=dtype)
    found = loss(layer(x))
    expected = loss(formula(x, layer))
    assert type(found) is Tensor and found.dtype is torch.float32 and "Loss" not in type(found.grad_fn).__name__
    for a, b in zip(outcome(found, x, layer), outcome(expected, x, layer), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2 if a.dtype is torch.bfloat16 else 1e-5, atol=2e-6)


def test_images_have_their_classes_in_the_second_dimension(no_z):
    x, layer = make(2, C, 3, 2)
    target = torch.arange(12).view(2, 3, 2) % C
    found = F.cross_entropy(layer(x), target)
    torch.testing.assert_close(found, F.cross_entropy(formula(x, layer), target))


OTHERS = {
    "values": lambda z, y: F.nll_loss(z.log_softmax(1), y),
    "columns last": lambda z, y: F.cross_entropy(z.view(3, 4, C).movedim(-1, 1), y.view(3, 4)),
    "a slice": lambda z, y: F.cross_entropy(z[:, :-1], y % (C - 1)),
    "scaled": lambda z, y: F.cross_entropy(z / 2, y),
    "both": lambda z, y: F.cross_entropy(z, y) + z.square().mean(),
    "old keywords": lambda z, y: F.cross_entropy(z, y, size_average=False),
    "weights of examples": lambda z, y: F.binary_cross_entropy_with_logits(z, SHARES, weight=torch.rand(N, 1).fill_(2)),
    "margin": lambda z, y: F.multi_margin_loss(z, y),
    "changed in place": lambda z, y: F.cross_entropy(z.mul_(2), y),
    "data changed": lambda z, y: z.data.mul_(2) is None or F.cross_entropy(z, y),
    "view changed": lambda z, y: z.view(3, 4, C).mul_(2) is None or F.cross_entropy(z, y),
    "changed, then viewed": lambda z, y: F.cross_entropy(z.mul_(2).view(3, 4, C).view(-1, C), y),
    "a part of a view changed": lambda z, y: z.view(3, 4, C)[0].mul_(2) is None or F.cross_entropy(z, y),
    "another shape": lambda z, y: F.cross_entropy(z.view(3, 4, C).transpose(1, 2), y.view(3, 4)),
    "subclass": lambda z, y: F.cross_entropy(z.as_subclass(Labelled), y).as_subclass(Tensor),
    "labels, unknown": lambda z, y: F.binary_cross_entropy_with_logits(z, SHARES.round() - 1, reduction="none").sum(),
    "labels, half": lambda z, y: F.binary_cross_entropy_with_logits(z, SHARES.half()),
    "labels, double": lambda z, y: F.binary_cross_entropy_with_logits(z, SHARES.double()),
    "masked in place": lambda z, y: F.cross_entropy(z.masked_fill_(torch.eye(N, C).bool(), -9.0), y),
}


class Labelled(Tensor):
    """Another library's tensor, which says what it is after every operation."""


def masked(z: Tensor, y: Tensor) -> Tensor:
    z[:, 1] = -9.0
    return F.cross_entropy(z, y)


@pytest.mark.parametrize("loss", [*OTHERS.values(), masked], ids=[*OTHERS, "column in place"])
@pytest.mark.filterwarnings("ignore:size_average")
def test_everything_else_gets_the_values(loss):
    x, layer = make()
    found = outcome(loss(layer(x), INDICES), x, layer)
    expected = outcome(loss(formula(x, layer), INDICES), x, layer)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype is b.dtype
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


def test_values_can_be_read_in_every_way():
    x, layer = make()
    z, expected = layer(x), formula(x, layer).detach()
    assert isinstance(z, Tensor) and z.shape == x.shape and z.dtype is torch.float32 and z.requires_grad
    file = io.BytesIO()
    torch.save(z.detach(), file)
    file.seek(0)
    read = {
        "detach": z.detach(), "sum of rows": z.sum(1), "data": z.data, "tolist": torch.tensor(z.tolist()),
        "numpy": torch.from_numpy(z.detach().numpy()), "array": torch.from_numpy(np.asarray(z.detach())),
        "saved": torch.load(file), "pickled": pickle.loads(pickle.dumps(z.detach())), "half": z.half(), "cpu": z.cpu(),
        "stacked": torch.stack([z, z])[0], "item": torch.tensor(z[0, 0].item()), "iterated": torch.stack([*z]),
        "cloned": z.clone(), "contiguous": z.contiguous(), "dlpack": torch.from_dlpack(z.detach()),
    }  # fmt: skip
    for name, value in read.items():
        wanted = {"sum of rows": expected.sum(1), "item": expected[0, 0]}.get(name, expected)
        torch.testing.assert_close(
            value.detach().to(wanted.dtype), wanted, rtol=1e-3, atol=1e-2 if name == "half" else 1e-6
        )
    assert torch.equal(z.argmax(1), expected.argmax(1)) and f"{expected[0, 0]:.4f}"[:6] in repr(z)
    assert z.data_ptr() == z.data_ptr() != 0
    with pytest.raises(RuntimeError, match="deepcopy"):  # as any tensor with a history
        copy.deepcopy(z)


def test_metrics_after_the_step_are_of_the_batch_before_it():
    x, layer = make()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    z, before = layer(x), formula(x, layer).detach()
    F.cross_entropy(z, INDICES).backward()
    optimizer.step()
    torch.testing.assert_close(z.detach(), before)


def test_gradients_of_z_are_asked_for_before_the_loss():
    x, layer = make()
    plain = formula(x, layer)
    (expected,) = torch.autograd.grad(F.cross_entropy(plain, INDICES), plain)
    z = layer(x)
    z.retain_grad()
    F.cross_entropy(z, INDICES).backward()
    torch.testing.assert_close(z.grad, expected)
    seen = []
    z = layer(x)
    z.register_hook(seen.append)
    F.cross_entropy(z, INDICES).backward()
    torch.testing.assert_close(seen[0], expected)
    z = layer(x)
    words = z.view(3, 4, C)
    loss = F.cross_entropy(words.view(-1, C), INDICES)
    for ask in (
        z.retain_grad, lambda: z.register_hook(print), words.retain_grad, lambda: torch.autograd.grad(loss, z),
        lambda: loss.backward(inputs=[z]),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="before the loss"):
            ask()
    torch.autograd.grad(z, x, torch.ones(N, C), retain_graph=True)  # of z itself
    torch.autograd.backward(z, torch.ones(N, C))


@pytest.mark.parametrize("after", ["grad_fn", "edge", "z, viewed before", "view"])
def test_hooks_of_any_kind_see_the_gradient_of_z(after):
    x, layer = make()
    seen = []
    z = layer(x)
    flat = z.view(3, 4, C).view(-1, C)
    if after == "grad_fn":  # as a module's backward hooks of the old kind do
        z.grad_fn.register_hook(lambda into, out: seen.append(out[0]))
    elif after == "edge":
        edge = torch.autograd.graph.get_gradient_edge(z)
    else:
        (flat if after == "view" else z).register_hook(seen.append)
    loss = F.cross_entropy(flat if "view" in after else z, INDICES)
    seen += torch.autograd.grad(loss, edge) if after == "edge" else (loss.backward(),)
    plain = formula(x, layer)
    torch.testing.assert_close(seen[0], torch.autograd.grad(F.cross_entropy(plain, INDICES), plain)[0])


def test_a_detached_z_has_no_gradient():
    x, layer = make()
    assert not F.cross_entropy(layer(x).detach_(), INDICES).requires_grad
    z = layer(x)
    with torch.no_grad():
        flat = z.view(3, 4, C).view(-1, C)
    assert torch.autograd.grad(F.cross_entropy(flat, INDICES), x, allow_unused=True) == (None,)


def test_values_computed_in_inference_mode_can_be_used_outside():
    x, layer = make()
    z = layer(x)
    with torch.inference_mode():
        z.argmax(1)
    z.add_(1)
    z.detach()[:, 0] = 0
    z.square().sum().backward()


def test_losses_without_gradients_are_of_the_parameters_at_the_time():
    x, layer = make()
    z, expected = layer(x), F.cross_entropy(formula(x, layer), INDICES).detach()
    layer.mu.data += 1  # which autograd does not count
    with torch.no_grad():
        torch.testing.assert_close(F.cross_entropy(z, INDICES), expected)


@pytest.mark.parametrize("layout", ["transposed", "images"])
def test_x_may_lie_in_memory_in_any_order(layout):
    x, layer = make(*(N, C) if layout == "transposed" else (2, C, 3, 2))
    x = x.detach().T.contiguous().T if x.ndim == 2 else x.detach().contiguous(memory_format=torch.channels_last)
    z, expected = layer(x), formula(x, layer)
    assert type(z) is Deferred
    torch.testing.assert_close(z.reshape(-1), expected.reshape(-1))
    torch.testing.assert_close(z.contiguous().view(-1), expected.reshape(-1))
    torch.testing.assert_close(z.as_strided(z.shape, z.stride()), expected)


@pytest.mark.parametrize("first", [torch.square, torch.exp, lambda z: z.view(3, 4, C).square()])
def test_a_checkpoint_saves_the_same_when_it_computes_again(first):
    head, h = GSoftmaxHead(5, C), torch.randn(N, 5, generator=torch.Generator().manual_seed(2))

    def losses(z):
        return first(z).sum() + F.cross_entropy(z, INDICES) + F.cross_entropy(z.view(3, 4, C).view(-1, C), INDICES)

    expected = torch.autograd.grad(losses(formula(head.features(h), head.gaussians)), head.weight)
    for loss in (checkpoint(lambda h: losses(head(h)), h, use_reentrant=False),
                 checkpoint(losses, head(h), use_reentrant=False)):  # fmt: skip
        torch.testing.assert_close(torch.autograd.grad(loss, head.weight), expected)


def test_changes_that_cannot_be_followed_are_errors():
    x, layer = make()
    h = x * 1
    z = layer(h)
    h.mul_(2)
    with pytest.raises(RuntimeError, match="x was changed"):
        z.sum()
    with pytest.raises(RuntimeError, match="cannot be replaced"):
        layer(x).data = torch.zeros(N, C)


@pytest.mark.parametrize("target", [INDICES % 3 + C, INDICES[:3], INDICES.float(), torch.zeros(N, C + 1)])
def test_wrong_targets_have_torchs_own_errors(target):
    x, layer = make()
    with pytest.raises((IndexError, ValueError, RuntimeError)) as expected:
        F.cross_entropy(formula(x, layer), target)
    with pytest.raises(expected.type) as found:
        F.cross_entropy(layer(x), target)
    assert str(found.value) == str(expected.value)


def test_z_is_an_ordinary_tensor_where_nothing_is_recorded_and_under_transforms():
    x, layer = make()
    with torch.no_grad():
        assert type(layer(x)) is Tensor
    with torch.inference_mode():
        assert type(layer(x.detach())) is Tensor
    assert type(make(lam=0.0)[1](x)) is Tensor and type(layer(x.double())) is Tensor
    assert type(torch.compile(layer, backend="eager", fullgraph=True)(x)) is Tensor
    inner = torch.func.grad(lambda v: F.cross_entropy(layer(v), INDICES))(x)
    (outer,) = torch.autograd.grad(F.cross_entropy(layer(x), INDICES), x)
    torch.testing.assert_close(inner, outer)


def test_a_compiled_loss_takes_it():
    x, layer = make()
    found = torch.compile(nn.CrossEntropyLoss(), backend="eager")(layer(x), INDICES)
    torch.testing.assert_close(found, F.cross_entropy(formula(x, layer), INDICES))


def test_tensors_of_other_libraries_keep_their_type():
    x, layer = make()
    target = INDICES.as_subclass(Labelled)
    found = F.cross_entropy(layer(x), target)
    assert type(found) is Labelled
    torch.testing.assert_close(found.as_subclass(Tensor), F.cross_entropy(formula(x, layer), INDICES))


def test_a_loss_can_be_differentiated_twice(no_z):
    x, layer = make()
    second = []
    for z in (layer(x), formula(x, layer)):
        (first,) = torch.autograd.grad(F.cross_entropy(z, INDICES), x, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), (x, *layer.parameters())))
    for a, b in zip(*second, strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_and_checkpoints_and_hooks(no_z):
    head, h = GSoftmaxHead(5, C), torch.randn(N, 5, generator=torch.Generator().manual_seed(2))
    expected = F.cross_entropy(formula(head.features(h), head.gaussians), INDICES)
    for z in (head(h), checkpoint(head, h, use_reentrant=False)):
        assert type(z) is Deferred
        torch.testing.assert_close(F.cross_entropy(z, INDICES), expected)
    with torch.autocast("cpu", torch.bfloat16):
        z = head(h)
        assert type(z) is Deferred and z.dtype is torch.float32
        loss = F.cross_entropy(z, INDICES)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, expected, rtol=0.02, atol=0.02)


def test_a_backward_hook_of_the_module_sees_the_gradient_of_z():
    x, layer = make()
    seen = []
    layer.register_full_backward_hook(lambda module, into, out: seen.append(out[0]))
    F.cross_entropy(layer(x), INDICES).backward()
    plain = formula(x, layer)
    torch.testing.assert_close(seen[0], torch.autograd.grad(F.cross_entropy(plain, INDICES), plain)[0])


def test_attached_models_train_without_z(no_z):
    model = attach(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, C)))
    h = torch.randn(N, 5, generator=torch.Generator().manual_seed(2))
    F.cross_entropy(model(h), INDICES).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("shape", [(C,), (N, C), (2, C, 3), (2, C, 3, 2)])
def test_a_small_z_is_an_ordinary_tensor_that_can_be_changed_in_place(shape, monkeypatch):
    monkeypatch.undo()
    x, layer = make(2, C, 3, 2)
    x = x.detach().flatten()[: np.prod(shape)].view(shape).requires_grad_()
    found, expected = layer(x), formula(x, layer)
    assert type(found) is Tensor
    gradients = []
    for z in (found, expected):
        z += 1
        z[0] = 2.0
        gradients.append(torch.autograd.grad(z.square().sum(), (x, *layer.parameters())))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
