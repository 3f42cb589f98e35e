"""Fused versions of the losses in `gsoftmax.functional`, selected by `impl=`.

========= ==========================================================================================================
plain     the formula step by step: runs anywhere, under every transform, and keeps about nine tensors of x's size
chunked   pure torch, loss and gradients together, a chunk of rows at a time; anywhere, one tensor of x's size
native    the same in compiled code with SIMD and threads; CPU, float32, bfloat16 and float16
triton    GPU kernels
========= ==========================================================================================================

"auto" selects the fastest implementation that supports the call; `explain` says which one, and why.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks, equations
from ..checks import LabelOptions, Options
from . import chunked, deferred, linear, native
from .autograd import LabelLoss, LabelLossOfZ, Logits, Loss, LossOfZ, Probabilities, apply

if TYPE_CHECKING:
    from . import triton_ce, triton_terms, triton_track  # noqa: F401  `load_triton` imports them

__all__ = ["IMPLS", "Path", "explain"]

IMPLS = ("auto", "plain", "chunked", "native", "triton")

# Below this many elements the plain formula is faster than the chunked one, whose steps in Python cost more than the
# arithmetic.
SMALL = 30_000
# Below this many elements on a GPU torch.compile does better with the plain formula than with a kernel call.
SMALL_COMPILED = 1 << 22
# From this many elements on, a loss without z is faster on a CPU than z and the loss.
LARGE_Z = 1 << 15
# From this many elements on, the outputs of a linear layer are worth computing chunk by chunk.
LARGE_LINEAR = {"cpu": 1 << 22, "cuda": 1 << 26}


@dataclass(frozen=True)
class Path:
    """The implementation chosen for a call, and the reason.

    >>> print(Path("plain", "impl='plain'"))
    plain: impl='plain'
    """

    name: str  # one of IMPLS except "auto"
    why: str  # the reason, in a few words

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


def explain(
    x: Tensor,
    target: Tensor,
    mu: Tensor | float,
    sigma: Tensor | float,
    lam: float = 1.0,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    impl: str = "auto",
) -> Path:
    """The implementation that `gsoftmax_cross_entropy` uses for these arguments, and why.

    All arguments as in `gsoftmax.functional.gsoftmax_cross_entropy`.

    >>> x, target = torch.zeros(2, 4, dtype=torch.float64), torch.tensor([0, 1])
    >>> explain(x, target, 0.0, 1.0)
    Path(name='plain', why='x is torch.float64')
    """
    lam = checks.check_lam(lam)
    checks.check_cross_entropy(x, target, Options(weight, ignore_index, reduction, label_smoothing))
    mu, sigma = checks.as_gaussians(x, mu, sigma, lam)
    if lam == 0:
        return Path("plain", "lam is 0: torch.nn.functional.cross_entropy itself")
    name, why = _choose(impl, lam, (x, mu, sigma), (target, weight))
    if name == "native":
        threads = torch.get_num_threads()
        why += f", {native.explain_instructions()}, {threads} thread{'s' if threads > 1 else ''}"
    return Path(name, why)


def cross_entropy(
    x: Tensor, target: Tensor, mu: Tensor, sigma: Tensor, lam: float, options: Options, impl: str
) -> Tensor:
    """`gsoftmax_cross_entropy` after its checks: lam is a float, mu and sigma are (C,) in the compute dtype.

    The chosen implementation checks that sigma is positive: the compiled kernel does so at no cost.
    """
    path = "plain" if lam == 0 else _choose(impl, lam, (x, mu, sigma), (target, options.weight))[0]
    if path == "plain":
        return equations.cross_entropy(x, target, mu, sigma, lam, options)
    if path == "triton":
        repeatable = impl == "auto" and options.weight is None and x.dtype is not torch.float16
        if repeatable and not torch.compiler.is_compiling():
            if len(_checked) >= 4096:  # every batch has another size
                _checked.clear()
            _checked[_kind(x, target, mu, sigma, lam, options)] = triton_ce.cross_entropy
        return triton_ce.cross_entropy(x, target, mu, sigma, lam, options)
    evaluate = native.evaluate if path == "native" else chunked.evaluate
    return apply(Loss(target, lam, options, evaluate), x, mu, sigma)


def linear_cross_entropy(
    layer: linear.Linear, target: Tensor, mu: Tensor, sigma: Tensor, lam: float, options: Options, impl: str
) -> Tensor:
    """The same for `linear_gsoftmax_cross_entropy`."""
    path, _ = _choose_linear(impl, lam, layer, (target, mu, sigma, options.weight))
    if path == "plain":
        x = layer.outputs(target, options.ignore_index)
        checks.check_cross_entropy(x, target, options)
        return cross_entropy(x, target, mu, sigma, lam, options, impl)
    module = triton_ce if path == "triton" else native if path == "native" else chunked
    return linear.linear_cross_entropy(layer, target, mu, sigma, lam, options, module.evaluate)


# ---------------------------------------------------------------------------------------------- z, p and several labels


def logits(x: Tensor, mu: Tensor, sigma: Tensor, lam: float, *, later: bool = False) -> Tensor:
    """z in the compute dtype; arguments as in `cross_entropy`.

    later: whether z may be a `Deferred`
    """
    module = _terms(lam, (x, mu, sigma))
    if module is None or lam == 0:
        return equations.logits(x, mu, sigma, lam)
    recorded = torch.is_grad_enabled() and (x.requires_grad or mu.requires_grad or sigma.requires_grad)
    if later and recorded and (x.is_cuda or x.numel() >= LARGE_Z) and not x.is_inference():
        return deferred.logits(x, mu, sigma, lam, module.logits, module.logits_backward, _WITHOUT_Z)
    return apply(Logits(lam, module.logits, module.logits_backward), x, mu, sigma)


def _cross_entropy_without_z(
    x: Tensor,
    mu: Tensor,
    sigma: Tensor,
    lam: float,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """F.cross_entropy(z, ...) in float32, or None where torch should compute it, or say what is wrong."""
    if size_average is not None or reduce is not None:
        return None
    options = Options(weight, ignore_index, reduction, label_smoothing)
    try:
        checks.check_cross_entropy(x, target, options)
        path = _choose("auto", lam, (x, mu, sigma), (target, weight))[0]
        if path == "plain":
            return None
        if path == "triton":
            return triton_ce.cross_entropy(x, target, mu, sigma, lam, options, torch.float32)
        evaluate = native.evaluate if path == "native" else chunked.evaluate
        return apply(LossOfZ(target, lam, options, evaluate), x, mu, sigma)
    except (AttributeError, TypeError, ValueError):  # a wrong argument
        return None


def _bce_without_z(
    x: Tensor,
    mu: Tensor,
    sigma: Tensor,
    lam: float,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor | None:
    """The same for F.binary_cross_entropy_with_logits(z, ...)."""
    per_label = all(v is None or v.shape == x.shape[1:] for v in (weight, pos_weight))
    if x.ndim != 2 or not per_label or size_average is not None or reduce is not None:
        return None
    if target.shape != x.shape or any(
        v is not None and v.dtype is not torch.float32 for v in (target, weight, pos_weight)
    ):
        return None
    options = LabelOptions("msml", weight, pos_weight, _NO_LABEL, reduction)
    module = _terms(lam, (x, mu, sigma), (target, weight, pos_weight))
    if module is None or reduction not in checks.REDUCTIONS:
        return None
    try:
        return apply(LabelLossOfZ(target, lam, options, module.multilabel), x, mu, sigma)
    except ValueError:  # a target that is no probability, which torch allows
        return None


_NO_LABEL = -(1 << 30)  # no target is ignored
_WITHOUT_Z: dict[Any, deferred.Fused] = {
    F.cross_entropy: _cross_entropy_without_z,
    F.binary_cross_entropy_with_logits: _bce_without_z,
}


def logits_backward(
    grad: Tensor, x: Tensor, mu: Tensor, sigma: Tensor, lam: float, need: Sequence[bool] = (True, True, True)
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x (rows, classes), mu and sigma from that of z, for a backward pass written by hand."""
    module = _terms(lam, (x, mu, sigma))
    backward = (equations if module is None else module).logits_backward
    found: tuple[Tensor | None, Tensor | None, Tensor | None] = backward(grad, x, mu, sigma, lam, need)
    return found


def probabilities(x: Tensor, mu: Tensor, sigma: Tensor, lam: float) -> Tensor:
    """softmax(z) in x's dtype; float32 for half precision under autocast."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(sigma.dtype)
    module = None if lam == 0 else _terms(lam, (x, mu, sigma))
    if module is None:
        return equations.probabilities(x, mu, sigma, lam)
    return apply(Probabilities(lam, module.probabilities, module.logits_backward), x, mu, sigma)


def multilabel(
    x: Tensor, target: Tensor, mu: Tensor | None, sigma: Tensor | None, lam: float, options: LabelOptions
) -> Tensor:
    """`multilabel_cross_entropy` after its checks.

    x: (N, outputs) or (outputs,), absence first where there are two outputs per label
    mu, sigma: (outputs,) in the compute dtype, or None without a Gaussian term
    """
    module = _terms(lam, (x, mu, sigma), (target, options.weight, options.pos_weight))
    if module is None or x.ndim != 2:
        return equations.multilabel(x, target, mu, sigma, lam, options)
    return apply(LabelLoss(target, 0.0 if mu is None else lam, options, module.multilabel), x, mu, sigma)


def linear_multilabel(
    layer: linear.Linear, target: Tensor, mu: Tensor | None, sigma: Tensor | None, lam: float, options: LabelOptions
) -> Tensor:
    """`multilabel` of the outputs of a linear layer, computed in chunks where labels are many."""
    inputs, module = (layer.h, mu, sigma, layer.weight, layer.bias), None
    if options.reduction != "none" and _is_large(layer):
        module = _terms(lam, inputs, (target, options.weight, options.pos_weight))
    if module is None:
        return multilabel(F.linear(*layer[:3]), target, mu, sigma, lam, options)
    return linear.linear_multilabel(layer, target, mu, sigma, 0.0 if mu is None else lam, options, module.multilabel)


def load_triton(name: str) -> str:
    """Import a module of this package that needs Triton; why that fails, or "".

    The only import that waits until it is needed, on a GPU or in Triton's interpreter: Triton takes 0.4 s to import.
    """
    try:
        importlib.import_module(f"{__name__}.{name}")
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    return ""


# What torch.compiler.assume_constant_result does, without importing torch._dynamo for it.
load_triton.__dict__["_dynamo_marked_constant"] = True


# ------------------------------------------------------------------------------------------ repeated calls on a GPU

# Calls that were validated and went to a GPU's kernels, by everything that was validated and that the choice of the
# implementation depends on, except the state that `cached_call` checks.
_checked: dict[Any, Any] = {}


def _kind(x: Tensor, target: Tensor, mu: Any, sigma: Any, lam: Any, options: Options) -> Any:
    return (
        type(x), x.shape, x.dtype, x.device, x.layout, type(target), target.shape, target.dtype, target.device,
        target.layout, type(mu), mu.shape, mu.dtype, mu.device, mu.layout, type(sigma), sigma.shape, sigma.dtype,
        sigma.device, sigma.layout, type(lam), lam, options,
    )  # fmt: skip


def cached_call(x: Tensor, target: Tensor, mu: Any, sigma: Any, lam: Any, options: Options) -> Tensor | None:
    """The loss of a repeated call on a GPU, where validation costs as much as the launch; None for other calls."""
    if not _checked or torch.compiler.is_compiling() or checks.under_transform():
        return None
    try:
        found = _checked.get(_kind(x, target, mu, sigma, lam, options))
    except (AttributeError, TypeError):  # not tensors, or not hashable: the checks raise the error
        return None
    if found is None or x.is_neg() or mu.is_neg() or sigma.is_neg() or target.requires_grad:
        return None
    return found(x, target, mu, sigma, lam, options)


# ----------------------------------------------------------------------------------------------------------- the choice

# What "auto" tries on a device, in this order, before the plain formula.
_ORDER = {"cpu": ("native", "chunked"), "cuda": ("triton", "chunked")}
_WHY = {"native": "the compiled kernel", "triton": "x is on a GPU"}
_NAMES = ("x", "mu", "sigma", "target", "weight")
_LINEAR_NAMES = ("h", "mu", "sigma", "weight", "bias", "target", "class_weight")
_UNNAMED = ("an argument",) * 8  # where nobody reads the reason
_PLAIN_TYPES, _STRIDED = (Tensor, torch.nn.Parameter), torch.strided
_HALF_OR_SINGLE = (torch.float32, torch.bfloat16, torch.float16)


def _choose(
    impl: str,
    lam: float,
    inputs: Sequence[Any],
    constants: Sequence[Any],
    names: tuple[str, ...] = _NAMES,
    why_first: str = "",
) -> tuple[str, str]:
    """(path, why): the first candidate without a reason against it; a ValueError where `impl` names one that has.

    inputs: what can be differentiated, x or h first; constants: the target and its weights, which cannot
    """
    if impl != "auto":
        checks.check_choice("impl", impl, IMPLS)
        if impl != "plain" and (why := _unsupported_loss(impl, lam, inputs, constants, names)):
            raise ValueError(f"impl={impl!r} is not available: {why}; impl='auto' falls back automatically")
        return impl, f"impl={impl!r}"
    device = inputs[0].device.type
    reasons: list[str] = []
    for path in _ORDER.get(device, ()):
        why = _unsupported_loss(path, lam, inputs, constants, names)
        if not why and path != "native":
            why = _slower(path, inputs[0], names)
        if not why:
            return path, reasons[-1] if reasons else why_first or _WHY[path]
        reasons.append(why)
    return "plain", "; ".join(dict.fromkeys(reasons)) or f"{names[0]} is on {device}"


def _choose_linear(impl: str, lam: float, layer: linear.Linear, rest: Sequence[Any]) -> tuple[str, str]:
    """The same for a linear layer and target, mu, sigma, class_weight; "plain" here means to compute all of x first."""
    elements = layer.h.shape[0] * layer.weight.shape[0]
    if impl == "auto" and not _is_large(layer):
        return "plain", f"x has {elements} elements, few enough to compute without chunks"
    target, mu, sigma, class_weight = rest
    inputs, constants = (layer.h, mu, sigma, layer.weight, layer.bias), (target, class_weight)
    return _choose(impl, lam, inputs, constants, _LINEAR_NAMES, f"x has {elements} elements")


def _is_large(layer: linear.Linear) -> bool:
    """Whether the outputs of a linear layer are worth computing in chunks."""
    return layer.h.shape[0] * layer.weight.shape[0] >= LARGE_LINEAR.get(layer.h.device.type, 0)


def _terms(lam: float, inputs: Sequence[Any], constants: Sequence[Any] = ()) -> Any:
    """The module with the kernels of z, p and several labels; None for the plain formula, which compilers fuse."""
    x = inputs[0]
    path = "triton" if x.is_cuda else "native"
    if torch.compiler.is_compiling() or _unsupported(path, lam, inputs, constants, _UNNAMED):
        return None
    if path == "native":
        return native
    return None if load_triton("triton_terms") else triton_terms


def _unsupported_loss(
    path: str, lam: float, inputs: Sequence[Any], constants: Sequence[Any], names: tuple[str, ...]
) -> str:
    """Why `path` does not support a cross entropy of these arguments; "" if it does."""
    if torch.compiler.is_compiling() and (path != "triton" or names[0] != "x"):
        return "torch.compile fuses the plain formula itself"
    if why := _unsupported(path, lam, inputs, constants, names):
        return why
    target, weight = constants
    double = torch.float64 in (target.dtype, None if weight is None else weight.dtype)
    if double and path != "triton" and target.is_floating_point():
        return "target or weight is torch.float64"
    return ""


def _unsupported(path: str, lam: float, inputs: Sequence[Any], constants: Sequence[Any], names: tuple[str, ...]) -> str:
    """Why `path` does not support these arguments; "" if it does."""
    x, compiling = inputs[0], torch.compiler.is_compiling()
    if not compiling and checks.under_transform():
        return "a torch.func transform, forward-mode AD or tracing is active"
    if path == "triton":
        why = load_triton("triton_ce") or triton_ce.unsupported(x, lam)
        if why:
            return why
    cpu = x.is_cpu
    for i, v in enumerate((*inputs, *constants)):
        if v is None:
            continue
        if not compiling and (type(v) not in _PLAIN_TYPES or v.layout is not _STRIDED or v.is_neg()):
            return f"{names[i]} is a {type(v).__name__} of layout {v.layout}, not a plain array in memory"
        if v.is_cpu is not cpu or not (cpu or v.device == x.device):
            return f"{names[i]} is on {v.device}, {names[0]} on {x.device}"
    for v in constants:
        if v is not None and v.requires_grad:
            return "target or weight requires a gradient"
    if x.numel() == 0:
        return f"{names[0]} is empty"
    if path != "native":
        return ""
    if not cpu:
        return f"{names[0]} is on {x.device.type}"
    return native.unavailable() if x.dtype in _HALF_OR_SINGLE else f"{names[0]} is {x.dtype}"


def _slower(path: str, x: Tensor, names: tuple[str, ...]) -> str:
    """Why the plain formula is faster than `path`; "" if it is not."""
    whole = names[0] == "x"  # not chunks of a linear layer
    if path == "triton" and whole and torch.compiler.is_compiling() and x.numel() < SMALL_COMPILED:
        return "torch.compile fuses a plain formula of this size better than a kernel call"
    if path == "chunked" and x.dtype not in _HALF_OR_SINGLE and (x.is_cpu or not whole):
        return f"{names[0]} is {x.dtype}"
    if path == "chunked" and whole and x.numel() < SMALL:
        return f"{x.numel()} elements: the plain formula is fastest"
    return ""
