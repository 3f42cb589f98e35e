"""Does a head of your own keep the contract that `gsoftmax compare` and `gsoftmax train` rely on?"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["check_head"]

ROWS = 7


def check_head(
    head: type[nn.Module], *, in_features: int = 6, num_classes: int = 5, multilabel: bool = False, **options: Any
) -> None:
    """Checks a head class and raises one AssertionError with a line for every promise that it breaks.

    A head is an `nn.Module` with `features(h)`, `loss(h, target)` and `predict_proba(h)`.  What is checked: shapes,
    finite losses, probabilities, gradients against finite differences in float64, saving and loading, the same numbers
    from the same seed, float64, copies, and bfloat16 autocast.

    head: the class, called as `head(in_features, num_classes, **options)`
    in_features: width of the h it is given
    num_classes: number of classes, or of labels
    multilabel: whether to check it on labels that may all be present or absent; `form="paired"` is then passed, as the
        lab does, unless `options` has another form
    options: passed on to the class

    >>> from gsoftmax import GSoftmaxHead
    >>> check_head(GSoftmaxHead, lam=2.0)
    >>> check_head(nn.Linear)
    Traceback (most recent call last):
    AssertionError: Linear must have the methods features, loss and predict_proba, and lacks all of them
    """
    name = getattr(head, "__name__", repr(head))
    if not (isinstance(head, type) and issubclass(head, nn.Module)):
        raise AssertionError(f"{name} must be a class derived from torch.nn.Module")
    methods = ("features", "loss", "predict_proba")
    missing = [m for m in methods if not callable(getattr(head, m, None))]
    if missing:
        which = "all of them" if len(missing) == len(methods) else ", ".join(missing)
        raise AssertionError(f"{name} must have the methods features, loss and predict_proba, and lacks {which}")
    if multilabel:
        options.setdefault("form", "paired")
    case = _Case(head, name, in_features, num_classes, multilabel, options)
    # Where the shapes are wrong, the other checks would only repeat it.
    broken = _broken(_shapes, case) or [line for check in _CHECKS for line in _broken(check, case)]
    if broken:
        raise AssertionError("\n".join(dict.fromkeys(broken)))


class _Case:
    """A head class and inputs for it; everything it hands out is made from a fixed seed."""

    def __init__(self, cls: Any, name: str, features: int, classes: int, multilabel: bool, options: Any) -> None:
        self.cls, self.name, self.features, self.classes, self.multilabel = cls, name, features, classes, multilabel
        self.options = options
        generator = torch.Generator().manual_seed(0)
        self.h = torch.randn(ROWS, features, generator=generator)
        shape = (ROWS, classes) if multilabel else (ROWS,)
        self.target = torch.randint(2 if multilabel else classes, shape, generator=generator)

    def head(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.cls(self.features, self.classes, **self.options).to(dtype)


Check = Callable[[_Case], Iterator[str]]


def _broken(check: Check, case: _Case) -> list[str]:
    """A line for every promise that a check finds broken."""
    try:
        return list(check(case))
    except Exception as error:  # whatever a foreign class does
        title = check.__name__.strip("_").replace("_", " ")
        first = (str(error).splitlines() or [""])[0]
        return [f"{case.name} failed the check of {title}: {type(error).__name__}: {first}"]


def _shapes(case: _Case) -> Iterator[str]:
    head = case.head()
    x = head.features(case.h)
    accepted = [(ROWS, case.classes), *([(ROWS, 2, case.classes)] if case.multilabel else [])]
    if tuple(x.shape) not in accepted:
        yield f"{case.name}.features(h) must have the shape {' or '.join(map(str, accepted))}, got {tuple(x.shape)}"
        return
    p, loss = head.predict_proba(case.h), head.loss(case.h, case.target)
    if tuple(p.shape) != (ROWS, case.classes):
        yield f"{case.name}.predict_proba(h) must have the shape {(ROWS, case.classes)}, got {tuple(p.shape)}"
    if loss.ndim:
        yield f"{case.name}.loss(h, target) must be one number, got the shape {tuple(loss.shape)}"
    elif not bool(loss.isfinite()):
        yield f"{case.name}.loss(h, target) must be finite, got {loss.item()}"
    if not loss.requires_grad:
        yield f"{case.name}.loss(h, target) must have a gradient, and is detached"


def _probabilities(case: _Case) -> Iterator[str]:
    p = case.head(dtype=torch.float64).predict_proba(10 * case.h.double())
    if not bool(((p >= 0) & (p <= 1)).all()):
        yield f"{case.name}.predict_proba(h) must lie between 0 and 1, got {p.min().item():g} to {p.max().item():g}"
    total = p.sum(1)
    if not case.multilabel and not torch.allclose(total, torch.ones_like(total)):
        worst = int((total - 1).abs().argmax())
        yield f"{case.name}.predict_proba(h) must add up to 1 in every row, got {total[worst].item():g} in row {worst}"


def _single_rows(case: _Case) -> Iterator[str]:
    head = case.head(dtype=torch.float64).eval()
    whole, alone = head.predict_proba(case.h.double()), head.predict_proba(case.h[:1].double())
    if not torch.allclose(whole[:1], alone):
        yield f"{case.name}.predict_proba of a row must not depend on the other rows of the batch"


def _gradients(case: _Case) -> Iterator[str]:
    """Slopes along a random direction of h and of every parameter, against central differences, in eval mode."""
    head = case.head(dtype=torch.float64).eval()
    state = copy.deepcopy(head.state_dict())
    h = case.h.double().requires_grad_()
    inputs = {"h": h} | {n: p for n, p in head.named_parameters() if p.requires_grad}

    def loss() -> Tensor:
        with torch.no_grad():  # a loss may move buffers, such as a count of steps
            for key, buffer in head.named_buffers():
                if key in state:
                    buffer.copy_(state[key])
        return head.loss(h, case.target)

    found = torch.autograd.grad(loss(), list(inputs.values()), allow_unused=True)
    generator = torch.Generator().manual_seed(1)
    for (key, value), gradient in zip(inputs.items(), found, strict=True):
        what = "h" if key == "h" else f"the parameter {key}"
        if gradient is None:
            yield f"{case.name}.loss(h, target) must depend on {what}, and gives it no gradient"
            continue
        direction = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        direction /= direction.norm()
        slope, step = float((gradient * direction).sum()), 1e-6
        with torch.no_grad():
            before = value.clone()
            value.copy_(before + step * direction)
            above = float(loss())
            value.copy_(before - step * direction)
            below = float(loss())
            value.copy_(before)
        measured = (above - below) / (2 * step)
        # the difference of two losses is good to a few units of their last digit
        if abs(slope - measured) > 1e-5 * (abs(measured) + abs(slope)) + 1e-8 * (1 + abs(above)):
            yield (
                f"{case.name}.loss(h, target) has a wrong gradient for {what}: slope {slope:.6g}, "
                f"measured {measured:.6g}"
            )


def _saving_and_loading(case: _Case) -> Iterator[str]:
    first, second = case.head(seed=0), case.head(seed=1)
    second.load_state_dict(first.state_dict())
    pairs = {
        "predict_proba(h)": (first.predict_proba(case.h), second.predict_proba(case.h)),
        "loss(h, target)": (first.loss(case.h, case.target), second.loss(case.h, case.target)),
    }
    for what, (a, b) in pairs.items():
        if not torch.equal(a, b):
            yield f"{case.name}.{what} must survive load_state_dict(state_dict()): part of its state is not saved"


def _determinism(case: _Case) -> Iterator[str]:
    first, second = case.head(seed=3), case.head(seed=3)
    different = [k for k, v in first.state_dict().items() if not torch.equal(v, second.state_dict()[k])]
    if different:
        yield f"{case.name} must draw its weights from torch's generator: {different[0]} differs for the same seed"
        return
    losses = []
    for head in (first, second):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            losses.append(head.loss(case.h, case.target))
    if not torch.equal(*losses):
        yield f"{case.name}.loss(h, target) must be the same for the same weights, inputs and seed"


def _copies(case: _Case) -> Iterator[str]:
    head = case.head()
    if not torch.equal(copy.deepcopy(head).predict_proba(case.h), head.predict_proba(case.h)):
        yield f"{case.name} must give the same probabilities after copy.deepcopy"


def _autocast(case: _Case) -> Iterator[str]:
    head = case.head()
    with torch.autocast("cpu", torch.bfloat16):
        loss = head.loss(case.h, case.target)
    loss.backward()
    if not bool(loss.isfinite()):
        yield f"{case.name}.loss(h, target) must be finite under bfloat16 autocast, got {loss.item()}"
    for key, parameter in head.named_parameters():
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            yield f"{case.name}: the gradient of {key} must be finite under bfloat16 autocast"


def _options_of_the_loss(case: _Case) -> Iterator[str]:
    """label_smoothing and reduction are handed to the loss where a recipe sets them."""
    parameters = inspect.signature(case.cls.loss).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if takes_any or "label_smoothing" in {p.name for p in parameters}:
        loss = case.head().loss(case.h, case.target, label_smoothing=0.1)
        if not bool(loss.isfinite()):
            yield f"{case.name}.loss(h, target, label_smoothing=0.1) must be finite, got {loss.item()}"


_CHECKS: tuple[Check, ...] = (
    _probabilities,
    _single_rows,
    _gradients,
    _saving_and_loading,
    _determinism,
    _copies,
    _autocast,
    _options_of_the_loss,
)
