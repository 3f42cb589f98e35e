"""Check that a head of your own meets the requirements of `gsoftmax compare` and `gsoftmax train`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .messages import first_line

__all__ = ["check_head"]

ROWS = 7
METHODS = ("features", "loss", "predict_proba")


def check_head(
    head: type[nn.Module], *, in_features: int = 6, num_classes: int = 5, multilabel: bool = False, **options: Any
) -> None:
    """Check a head class; raises one AssertionError with a line for every requirement that it does not meet.

    A head is an `nn.Module` with `features(h)`, `loss(h, target)` and `predict_proba(h)`.  Checked are shapes, finite
    losses, probabilities, gradients against finite differences in float64, saving and loading, reproducibility, copies,
    and bfloat16 autocast.

    head: the class, called as `head(in_features, num_classes, **options)`
    in_features, num_classes: width of h, number of classes or labels
    multilabel: check it on multi-label targets, with `form="paired"` (or its `multilabel_form`) unless `options` has
        another form
    options: passed to the class

    >>> from gsoftmax import GSoftmaxHead
    >>> check_head(GSoftmaxHead, lam=2.0)
    >>> check_head(nn.Linear)
    Traceback (most recent call last):
    AssertionError: Linear must have the methods features, loss and predict_proba, and lacks all of them
    """
    name = getattr(head, "__name__", repr(head))
    if not (isinstance(head, type) and issubclass(head, nn.Module)):
        raise AssertionError(f"{name} must be a class derived from torch.nn.Module")
    missing = [m for m in METHODS if not callable(getattr(head, m, None))]
    if missing:
        which = "all of them" if len(missing) == len(METHODS) else ", ".join(missing)
        raise AssertionError(f"{name} must have the methods features, loss and predict_proba, and lacks {which}")
    if multilabel:
        options.setdefault("form", getattr(head, "multilabel_form", "paired"))
    case = _Case(head, in_features, num_classes, multilabel, options)
    # With wrong shapes the other checks would fail for the same reason.
    broken = _broken(_shapes, case) or [line for check in _CHECKS for line in _broken(check, case)]
    if broken:
        raise AssertionError("\n".join(f"{name}{line}" for line in dict.fromkeys(broken)))


class _Case:
    """A head class, and inputs from a fixed seed."""

    def __init__(self, cls: Any, features: int, classes: int, multilabel: bool, options: Any) -> None:
        self.cls, self.sizes, self.options, self.multilabel = cls, (features, classes), options, multilabel
        generator = torch.Generator().manual_seed(0)
        self.h = torch.randn(ROWS, features, generator=generator)
        shape = (ROWS, classes) if multilabel else (ROWS,)
        self.target = torch.randint(2 if multilabel else classes, shape, generator=generator)

    def head(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.cls(*self.sizes, **self.options).to(dtype)


Check = Callable[[_Case], Iterator[str]]  # yields messages, to be prefixed with the head's name


def _broken(check: Check, case: _Case) -> list[str]:
    try:
        return list(check(case))
    except Exception as error:  # a foreign class may raise anything
        title = check.__name__.strip("_").replace("_", " ")
        return [f" failed the check of {title}: {type(error).__name__}: {first_line(error)}"]


def _shapes(case: _Case) -> Iterator[str]:
    head, classes = case.head(), case.sizes[1]
    x = head.features(case.h)
    accepted = [(ROWS, classes), *([(ROWS, 2, classes)] if case.multilabel else [])]
    if tuple(x.shape) not in accepted:
        yield f".features(h) must have the shape {' or '.join(map(str, accepted))}, got {tuple(x.shape)}"
        return
    # h with a gradient, because a head need not have parameters
    p, loss = head.predict_proba(case.h), head.loss(case.h.clone().requires_grad_(), case.target)
    if tuple(p.shape) != (ROWS, classes):
        yield f".predict_proba(h) must have the shape {(ROWS, classes)}, got {tuple(p.shape)}"
    if loss.ndim:
        yield f".loss(h, target) must be one number, got the shape {tuple(loss.shape)}"
    elif not bool(loss.isfinite()):
        yield f".loss(h, target) must be finite, got {loss.item()}"
    if not loss.requires_grad:
        yield ".loss(h, target) must have a gradient, and is detached"


def _probabilities(case: _Case) -> Iterator[str]:
    head, h = case.head(dtype=torch.float64), case.h.double()
    p = head.predict_proba(10 * h)
    if not bool(((p >= 0) & (p <= 1)).all()):
        yield f".predict_proba(h) must lie between 0 and 1, got {p.min().item():g} to {p.max().item():g}"
    total = p.sum(1)
    if not case.multilabel and not torch.allclose(total, torch.ones_like(total)):
        worst = int((total - 1).abs().argmax())
        yield f".predict_proba(h) must add up to 1 in every row, got {total[worst].item():g} in row {worst}"
    head.eval()
    if not torch.allclose(head.predict_proba(h)[:1], head.predict_proba(h[:1])):
        yield ".predict_proba of a row must not depend on the other rows of the batch"


def _gradients(case: _Case) -> Iterator[str]:
    """Slopes along a random direction of h and of every parameter, against central differences, in eval mode."""
    head = case.head(dtype=torch.float64).eval()
    state = copy.deepcopy(head.state_dict())
    h = case.h.double().requires_grad_()
    inputs = {"h": h} | {f"the parameter {n}": p for n, p in head.named_parameters() if p.requires_grad}

    def loss() -> Tensor:
        with torch.no_grad():  # a loss may change buffers, such as a count of steps
            for key, buffer in head.named_buffers():
                if key in state:
                    buffer.copy_(state[key])
        return head.loss(h, case.target)

    found = torch.autograd.grad(loss(), list(inputs.values()), allow_unused=True)
    generator = torch.Generator().manual_seed(1)
    for (what, value), gradient in zip(inputs.items(), found, strict=True):
        if gradient is None:
            yield f".loss(h, target) must depend on {what}, and gives it no gradient"
            continue
        direction = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        direction /= direction.norm()
        slope, step, before, losses = float((gradient * direction).sum()), 1e-6, value.detach().clone(), []
        with torch.no_grad():
            for sign in (1, -1):
                value.copy_(before + sign * step * direction)
                losses.append(float(loss()))
            value.copy_(before)
        above, below = losses
        measured = (above - below) / (2 * step)
        # the difference of two losses is accurate to a few units of their last digit
        if abs(slope - measured) > 1e-5 * (abs(measured) + abs(slope)) + 1e-8 * (1 + abs(above)):
            yield f".loss(h, target) has a wrong gradient for {what}: slope {slope:.6g}, measured {measured:.6g}"


def _saving_and_loading(case: _Case) -> Iterator[str]:
    first, second = case.head(seed=0), case.head(seed=1)
    second.load_state_dict(first.state_dict())
    for what, args in (("predict_proba", (case.h,)), ("loss", (case.h, case.target))):
        if not torch.equal(getattr(first, what)(*args), getattr(second, what)(*args)):
            yield f".{what} must survive load_state_dict(state_dict()): part of its state is not saved"


def _reproducibility(case: _Case) -> Iterator[str]:
    first, second = case.head(seed=3), case.head(seed=3)
    different = [k for k, v in first.state_dict().items() if not torch.equal(v, second.state_dict()[k])]
    if different:
        yield f" must draw its weights from torch's generator: {different[0]} differs for the same seed"
        return
    losses = []
    for head in (first, second):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            losses.append(head.loss(case.h, case.target))
    if not torch.equal(*losses):
        yield ".loss(h, target) must be the same for the same weights, inputs and seed"
    if not torch.equal(copy.deepcopy(first).predict_proba(case.h), first.predict_proba(case.h)):
        yield " must give the same probabilities after copy.deepcopy"


def _autocast(case: _Case) -> Iterator[str]:
    head = case.head()
    with torch.autocast("cpu", torch.bfloat16):
        loss = head.loss(case.h.clone().requires_grad_(), case.target)
    loss.backward()
    if not bool(loss.isfinite()):
        yield f".loss(h, target) must be finite under bfloat16 autocast, got {loss.item()}"
    for key, parameter in head.named_parameters():
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            yield f": the gradient of {key} must be finite under bfloat16 autocast"


def _options_of_the_loss(case: _Case) -> Iterator[str]:
    """Recipes may set label_smoothing."""
    parameters = inspect.signature(case.cls.loss).parameters.values()
    if any(p.kind is p.VAR_KEYWORD or p.name == "label_smoothing" for p in parameters):
        loss = case.head().loss(case.h, case.target, label_smoothing=0.1)
        if not bool(loss.isfinite()):
            yield f".loss(h, target, label_smoothing=0.1) must be finite, got {loss.item()}"


_CHECKS = (_probabilities, _gradients, _saving_and_loading, _reproducibility, _autocast, _options_of_the_loss)
