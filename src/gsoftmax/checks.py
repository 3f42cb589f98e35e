"""Argument checks; each error is one line that names the argument, the value and what is accepted.

Shapes and dtypes are always checked.  Values are checked only where that needs no GPU synchronization and there are
values: on the CPU, outside of torch.compile, torch.func and tracing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

REDUCTIONS = ("mean", "sum", "none")
MULTILABEL_REDUCTIONS = ("mean", "sum", "none", "batchmean")
MULTILABEL_FORMS = ("paired", "independent", "printed", "msml")


class Options(NamedTuple):
    """The options of `torch.nn.functional.cross_entropy`, with its defaults."""

    weight: Tensor | None = None  # (C,), of the classes; `class_weight` beside a linear layer
    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0


class LabelOptions(NamedTuple):
    """The options of `multilabel_cross_entropy`, with its defaults."""

    form: str = "paired"
    weight: Tensor | None = None  # (L,), of the labels
    pos_weight: Tensor | None = None  # (L,), of the labels that are present
    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0


# The largest float16 is 65504, and dz/dx = 1 + lam * phi(u) / sigma: below this sigma the gradient would not fit.
_HALF_SIGMA_MIN = 1e-5


def class_dim(x: Tensor) -> int:
    return 1 if x.ndim > 1 else 0


def compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def values_are_free(x: Tensor) -> bool:
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not under_transform()


def under_transform() -> bool:
    """Whether a torch.func transform, forward-mode AD, a dispatch mode or tracing is active."""
    try:
        return (
            torch._C._are_functorch_transforms_active()
            or torch._C._len_torch_dispatch_stack() > 0
            or forward_ad._current_level >= 0
            or torch._C._is_tracing()
        )
    except AttributeError:  # another version of torch: what is right under a transform is right everywhere
        return True


def is_array(v: Tensor) -> bool:
    """Whether a tensor lies in memory, and is neither a batch of gradients under vmap nor one without values."""
    try:
        v.data_ptr()
    except RuntimeError:
        return False
    return type(v) is Tensor


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_number(name: str, value: float, high: float = math.inf, *, positive: bool = False) -> float:
    """A finite number from 0, or above 0, to `high`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= high or value == math.inf or (positive and value == 0):
        low = "above 0" if positive else "0 or more"
        accepted = f"{low} and finite" if high == math.inf else f"{low} and at most {high:.4g}"
        raise ValueError(f"{name} must be a number, {accepted}, got {value!r}")
    return float(value)


def as_options(loss: str, given: Mapping[str, Any], weight: str | None = "class_weight") -> Options:
    """The options that a loss got by their keywords.

    weight: what the loss calls `Options.weight`, None if it has no weights
    """
    _check_names(loss, given, (*([weight] if weight else []), "ignore_index", "reduction", "label_smoothing"))
    return Options(**{"weight" if name == weight else name: value for name, value in given.items()})


def as_label_options(loss: str, form: str, given: Mapping[str, Any]) -> LabelOptions:
    """The options that a multi-label loss got by their keywords."""
    _check_names(loss, given, LabelOptions._fields[1:])
    return LabelOptions(form, **given)


def _check_names(loss: str, given: Mapping[str, Any], accepted: Sequence[str]) -> None:
    for name in given:
        if name not in accepted:
            raise ValueError(f"options of {loss} are {', '.join(accepted)}, got {name}")


def check_outputs(x: Tensor, name: str = "x") -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {x.dtype}")
    if x.ndim == 0:
        raise ValueError(f"{name} must be (C,), (N, C) or (N, C, d1, ...), got a single number")


def check_lam(lam: float) -> float:
    if isinstance(lam, bool) or not isinstance(lam, (int, float)):
        raise TypeError(f"lam must be a number, got {type(lam).__name__}")
    if not 0 <= lam < math.inf:
        raise ValueError(f"lam must be 0 or more and finite, got {lam}")
    return float(lam)


def as_gaussians(x: Tensor, mu: Tensor | float, sigma: Tensor | float, lam: float = 1.0) -> tuple[Tensor, Tensor]:
    """mu and sigma as (C,) tensors in the dtype the arithmetic on x is done in."""
    return as_gaussians_for(x.shape[class_dim(x)], x.dtype, x.device, mu, sigma, lam)


def as_gaussians_for(
    classes: int, dtype: torch.dtype, device: torch.device, mu: Tensor | float, sigma: Tensor | float, lam: float
) -> tuple[Tensor, Tensor]:
    compute = torch.float64 if dtype is torch.float64 else torch.float32
    if not (isinstance(mu, Tensor) and mu.dtype is compute and mu.shape == (classes,)):
        mu = _gaussian_parameter("mu", mu, classes, compute, device)
    if not (isinstance(sigma, Tensor) and sigma.dtype is compute and sigma.shape == (classes,)):
        sigma = _gaussian_parameter("sigma", sigma, classes, compute, device)
    if dtype is torch.float16:
        low = _HALF_SIGMA_MIN * max(lam, 1.0)
        sigma = torch.where((sigma > 0) & (sigma < low), low, sigma)  # `check_sigma` rejects other values
    return mu, sigma


def _gaussian_parameter(name: str, v: Tensor | float, classes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if not isinstance(v, Tensor):
        if isinstance(v, bool) or not isinstance(v, (int, float)):
            raise TypeError(f"{name} must be a tensor of shape ({classes},) or a number, got {type(v).__name__}")
        return torch.full((classes,), float(v), dtype=dtype, device=device)
    if v.shape != (classes,):
        raise ValueError(f"{name} must have shape ({classes},), one value for each class, got {tuple(v.shape)}")
    if not v.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {v.dtype}")
    return v.to(dtype)


def check_sigma(sigma: Tensor) -> None:
    if values_are_free(sigma) and sigma.numel() and not sigma.detach().min().item() > 0:  # nor NaN
        raise ValueError(f"sigma must be positive, got a minimum of {sigma.min().item()}")


def check_reduction(options: Options | LabelOptions, choices: Sequence[str]) -> None:
    check_choice("reduction", options.reduction, choices)
    if not isinstance(options.label_smoothing, (int, float)) or not 0.0 <= options.label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must lie between 0 and 1, got {options.label_smoothing!r}")


def check_options(options: Options | LabelOptions, outputs: int) -> None:
    """Everything about the options that needs no batch; outputs: the number of classes or labels."""
    several = isinstance(options, LabelOptions)
    check_reduction(options, MULTILABEL_REDUCTIONS if several else REDUCTIONS)
    if isinstance(options.ignore_index, bool) or not isinstance(options.ignore_index, int):
        raise TypeError(f"ignore_index must be a whole number, got {options.ignore_index!r}")
    _check_weight("weight", options.weight, outputs, several)
    if isinstance(options, LabelOptions):
        _check_weight("pos_weight", options.pos_weight, outputs, several)


def _check_weight(name: str, weight: Tensor | None, outputs: int, several: bool) -> None:
    if weight is None:
        return
    if not isinstance(weight, Tensor):
        raise TypeError(f"{name} must be a tensor of shape ({outputs},), got {type(weight).__name__}")
    if weight.shape != (outputs,):
        what = "label" if several else "class"
        raise ValueError(f"{name} must have shape ({outputs},), one value for each {what}, got {tuple(weight.shape)}")


def check_cross_entropy(x: Tensor, target: Tensor, options: Options) -> None:
    weight, ignore_index = options.weight, options.ignore_index
    check_outputs(x)
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor, got {type(target).__name__}")
    check_reduction(options, REDUCTIONS)
    _check_weight("weight", weight, x.shape[class_dim(x)], several=False)
    if target.is_floating_point():
        if target.shape != x.shape:
            raise ValueError(
                f"target of {target.dtype} holds probabilities and must have x's shape {tuple(x.shape)}, "
                f"got {tuple(target.shape)}; class indices must be torch.long"
            )
        if ignore_index >= 0:
            raise ValueError(f"ignore_index works with class indices only, got {ignore_index} with probabilities")
        if values_are_free(target) and bool(target.isnan().any()):
            raise ValueError("target must hold probabilities, got NaN")
    else:
        expected = x.shape[:1] + x.shape[2:] if x.ndim > 1 else ()
        if target.shape != expected:
            raise ValueError(
                f"target of class indices must have shape {tuple(expected)} for x of {tuple(x.shape)}, "
                f"got {tuple(target.shape)}"
            )
        if target.dtype not in (torch.int64, torch.uint8):
            raise TypeError(
                f"target must hold class indices as torch.long or probabilities as floating point, got {target.dtype}"
            )


def check_labels(target: Tensor, classes: int, ignore_index: int) -> None:
    if values_are_free(target) and bool(((target != ignore_index) & ((target < 0) | (target >= classes))).any()):
        raise label_error(target, classes, ignore_index)


def label_error(target: Tensor, classes: int, ignore_index: int) -> ValueError:
    wrong = target[(target != ignore_index) & ((target < 0) | (target >= classes))]
    return ValueError(
        f"target must lie between 0 and {classes - 1} or be ignore_index={ignore_index}, got {wrong[:1].item()}"
    )


def flatten_linear(
    h: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    check_outputs(h, "h")
    if weight.ndim != 2 or weight.shape[1] != h.shape[-1]:
        raise ValueError(
            f"weight must be (classes, features) with the {h.shape[-1]} features of h, got {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape ({weight.shape[0]},), got {tuple(bias.shape)}")
    shape = h.shape[:-1]
    expected = (*shape, weight.shape[0]) if target.is_floating_point() else shape
    if target.shape != expected:
        what = "probabilities" if target.is_floating_point() else "class indices"
        raise ValueError(
            f"target of {what} must have shape {tuple(expected)} for h of {tuple(h.shape)}, got {tuple(target.shape)}"
        )
    rows = target.reshape(-1, weight.shape[0]) if target.is_floating_point() else target.reshape(-1)
    return h.reshape(-1, h.shape[-1]), rows, tuple(shape)


def check_form(form: str, x_pos: Tensor, x_neg: Tensor | None) -> None:
    check_choice("form", form, MULTILABEL_FORMS)
    check_outputs(x_pos, "x_pos")
    if x_pos.ndim > 2:
        raise ValueError(f"x_pos must be (N, L) or (L,), got {tuple(x_pos.shape)}")
    if (x_neg is None) != (form == "msml"):
        need = "has one output per label: x_neg must be None" if form == "msml" else "needs x_neg beside x_pos"
        raise ValueError(f"form={form!r} {need}, got {'None' if x_neg is None else tuple(x_neg.shape)}")
    if x_neg is not None and x_neg.shape != x_pos.shape:
        raise ValueError(f"x_neg must have x_pos's shape {tuple(x_pos.shape)}, got {tuple(x_neg.shape)}")


def check_multilabel(shape: Sequence[int], target: Tensor, options: Options | LabelOptions) -> None:
    """shape: of the labels, (N, L) or (L,)."""
    check_reduction(options, MULTILABEL_REDUCTIONS)
    if not isinstance(target, Tensor) or target.shape != shape:
        seen = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(f"target must have shape {tuple(shape)}, one value for each label, got {seen}")
    _check_weight("weight", options.weight, shape[-1], several=True)
    if isinstance(options, LabelOptions):
        _check_weight("pos_weight", options.pos_weight, shape[-1], several=True)


def check_margin(
    h: Tensor, weight: Tensor, target: Tensor, margin: int, anneal: float | Tensor, ignore_index: int
) -> None:
    if margin not in (1, 2, 3, 4) or isinstance(margin, bool):
        raise ValueError(f"margin must be 1, 2, 3 or 4, got {margin!r}")
    if not isinstance(anneal, Tensor) and not 0 <= anneal < math.inf:
        raise ValueError(f"anneal must be 0 or more and finite, got {anneal!r}")
    if weight.ndim != 2 or h.ndim != 2 or h.shape[1] != weight.shape[1]:
        raise ValueError(
            "h must be (batch, features) and weight (classes, features), "
            f"got {tuple(h.shape)} and {tuple(weight.shape)}"
        )
    check_true_classes(h, target, weight.shape[0], ignore_index)


def check_true_classes(h: Tensor, target: Tensor, classes: int, ignore_index: int) -> None:
    if target.is_floating_point() or target.shape != h.shape[:1]:
        raise ValueError(
            "target must hold one class index for each row of h, because the margin needs to know the true class; "
            f"got {tuple(target.shape)} of {target.dtype} for h of {tuple(h.shape)}"
        )
    check_labels(target, classes, ignore_index)
