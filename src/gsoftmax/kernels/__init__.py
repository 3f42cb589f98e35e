"""Fused versions of the losses in `gsoftmax.functional`, chosen by `impl=`.

========= ==========================================================================================================
plain     the formula step by step: runs anywhere, under every transform, and keeps about nine tensors of x's size
chunked   pure torch, loss and gradients together, a chunk of rows at a time; anywhere, one tensor of x's size
native    the same in compiled code with SIMD and threads; CPU, float32, bfloat16 and float16
triton    GPU kernels
========= ==========================================================================================================

"auto" takes the fastest that can do what is asked; `explain` says which one, and why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from .. import checks, equations
from ..checks import Options
from . import chunked, linear, native

__all__ = ["IMPLS", "Path", "explain"]

IMPLS = ("auto", "plain", "chunked", "native", "triton")

# Below this many elements the plain formula is faster than the chunked one, whose steps in Python cost more than the
# arithmetic.
SMALL = 30_000
# From this many elements on, the outputs of a linear layer are worth making a chunk at a time.
LARGE_LINEAR = {"cpu": 1 << 22, "cuda": 1 << 26}


@dataclass(frozen=True)
class Path:
    """How a call is computed, and why that way.

    >>> print(Path("plain", "impl='plain'"))
    plain: impl='plain'
    """

    name: str
    why: str

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
    """The path that `gsoftmax_cross_entropy` takes when called like this, and why.

    >>> x, target = torch.zeros(2, 4, dtype=torch.float64), torch.tensor([0, 1])
    >>> explain(x, target, 0.0, 1.0)
    Path(name='plain', why='x is torch.float64')
    """
    lam = checks.check_lam(lam)
    checks.check_cross_entropy(x, target, Options(weight, ignore_index, reduction, label_smoothing))
    mu, sigma = checks.as_gaussians(x, mu, sigma, lam)
    if lam == 0:
        return Path("plain", "lam is 0: torch.nn.functional.cross_entropy itself")
    name, why = _choose(x, target, mu, sigma, lam, weight, impl)
    if name == "native":
        threads = torch.get_num_threads()
        why += f", {native.explain_instructions()}, {threads} thread{'s' if threads > 1 else ''}"
    return Path(name, why)


def cross_entropy(
    x: Tensor, target: Tensor, mu: Tensor, sigma: Tensor, lam: float, options: Options, impl: str
) -> Tensor:
    """`gsoftmax_cross_entropy` after its checks: lam is a float, mu and sigma are (C,) in the compute dtype.

    Whether sigma is positive is seen by the path that is taken: the compiled kernel sees it at no cost.
    """
    path = "plain"
    if lam != 0:
        path, _ = _choose(x, target, mu, sigma, lam, options.weight, impl)
    if path == "plain":
        return equations.cross_entropy(x, target, mu, sigma, lam, options)
    if path == "triton":
        from . import triton_ce

        seen_again = impl == "auto" and options.weight is None and x.dtype is not torch.float16
        if seen_again and not torch.compiler.is_compiling():
            if len(_checked) >= 4096:  # every batch has another size
                _checked.clear()
            _checked[_kind(x, target, mu, sigma, lam, options)] = triton_ce.cross_entropy
        return triton_ce.cross_entropy(x, target, mu, sigma, lam, options)
    evaluate = native.evaluate if path == "native" else chunked.evaluate
    if torch.is_grad_enabled() and (x.requires_grad or mu.requires_grad or sigma.requires_grad):
        return _Fused.apply(x, mu, sigma, target, options.weight, lam, options, evaluate)
    loss = evaluate(x, target, mu, sigma, lam, options, False, False)[0]
    return loss if x.dtype is torch.float32 else equations.loss_dtype(loss, x)


# Kinds of calls whose arguments were checked once and which then went to a GPU's kernels.  What is checked, and what
# the kernels are chosen by, is in a kind, but for the state that `cached_call` looks at.
_checked: dict[Any, Any] = {}


def _kind(x: Tensor, target: Tensor, mu: Any, sigma: Any, lam: Any, options: Options) -> Any:
    return (
        type(x), x.shape, x.dtype, x.device, x.layout, type(target), target.shape, target.dtype, target.device,
        target.layout, type(mu), mu.shape, mu.dtype, mu.device, mu.layout, type(sigma), sigma.shape, sigma.dtype,
        sigma.device, sigma.layout, type(lam), lam, options,
    )  # fmt: skip


def cached_call(x: Tensor, target: Tensor, mu: Any, sigma: Any, lam: Any, options: Options) -> Tensor | None:
    """The loss of a call like one before, on a GPU, where checking takes as long as launching; else None."""
    if not _checked or torch.compiler.is_compiling() or under_transform():
        return None
    try:
        found = _checked.get(_kind(x, target, mu, sigma, lam, options))
    except (AttributeError, TypeError):  # not tensors, or not hashable: the checks have words for it
        return None
    if found is None or x.is_neg() or mu.is_neg() or sigma.is_neg() or target.requires_grad:
        return None
    return found(x, target, mu, sigma, lam, options)


def linear_cross_entropy(
    layer: linear.Linear, target: Tensor, mu: Tensor, sigma: Tensor, lam: float, options: Options, impl: str
) -> Tensor:
    """The same for `linear_gsoftmax_cross_entropy`."""
    h, weight, bias, target_logit = layer
    path, _ = _choose_linear(h, weight, bias, target, mu, sigma, lam, options.weight, impl)
    if path == "plain":
        x = F.linear(h, weight, bias)
        if target_logit is not None:
            x = equations.with_target_logit(x, target, target_logit, options.ignore_index)
        checks.check_cross_entropy(x, target, options)
        return cross_entropy(x, target, mu, sigma, lam, options, impl)
    return linear.linear_cross_entropy(layer, target, mu, sigma, lam, options, path)


class _Fused(torch.autograd.Function):
    """Loss and gradients from `evaluate` of native.py or chunked.py, as one node of the graph.

    The gradients are made with the loss, while x is in the cache, and wait for the backward pass, which gives them away
    (they may become somebody's `.grad`), so that a second pass over a retained graph makes them again from x.  They
    cannot be made early where they depend on the incoming gradient: one for each row (reduction="none"), or float16, in
    which a gradient that a loss scale is about to lift would already have been rounded to zero.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mu: Tensor,
        sigma: Tensor,
        target: Tensor,
        weight: Tensor | None,
        lam: float,
        options: Options,
        evaluate: Any,
    ) -> Tensor:
        want_x, *want = ctx.needs_input_grad[:3]
        early = options.reduction != "none" and x.dtype is not torch.float16
        wanted = (early and want_x, early and (want[0] or want[1]))
        loss, *gradients = evaluate(x, target, mu, sigma, lam, options, *wanted)
        ctx.save_for_backward(x, mu, sigma, target, weight)
        ctx.lam, ctx.options, ctx.evaluate = lam, options, evaluate
        ctx.ready = [gradients] if early else []
        return loss if x.dtype is torch.float32 else equations.loss_dtype(loss, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        create_graph = torch.is_grad_enabled()
        if ctx.ready and not create_graph:
            gradients = ctx.ready.pop()
            if not grad.is_cpu or grad.item() != 1:
                for v in gradients:
                    if v is not None:
                        v.mul_(grad)  # nobody else has it
        else:
            gradients = _again(ctx, grad, create_graph)
        _, want_mu, want_sigma = ctx.needs_input_grad[:3]
        dx, dmu, dsigma = gradients
        return dx, dmu if want_mu else None, dsigma if want_sigma else None, *(None,) * 5


def _again(ctx: Any, grad: Tensor, create_graph: bool) -> tuple[Tensor | None, ...]:
    """dx, dmu and dsigma from what was saved; by the plain formula if they are to be differentiated themselves."""
    x, mu, sigma, target, _ = ctx.saved_tensors  # raises if the weight was changed in place
    lam, options = ctx.lam, ctx.options
    want = ctx.needs_input_grad[:3]
    if not create_graph:
        return ctx.evaluate(x, target, mu, sigma, lam, options, want[0], want[1] or want[2], grad)[1:]
    loss = equations.cross_entropy(x, target, mu, sigma, lam, options)
    inputs = [v for v, wanted in zip((x, mu, sigma), want, strict=True) if wanted]
    made = iter(torch.autograd.grad(loss, inputs, grad, create_graph=True))
    return tuple(next(made) if wanted else None for wanted in want)


# ----------------------------------------------------------------------------------------------------------- the choice

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_HALF_OR_SINGLE = (torch.float32, torch.bfloat16, torch.float16)
_ASKED = {name: (name, f"impl={name!r}") for name in IMPLS}
_NATIVE = ("native", "the compiled kernel")


def _choose(
    x: Tensor, target: Tensor, mu: Tensor, sigma: Tensor, lam: float, weight: Tensor | None, impl: str
) -> tuple[str, str]:
    """(path, why); a ValueError where `impl` names one that cannot do it."""
    if impl == "plain":
        return _ASKED["plain"]
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)}, got {impl!r}")
    device = x.device.type
    if impl == "triton" or (impl == "auto" and device == "cuda"):
        why_not = _no_triton(x, target, mu, sigma, lam, weight)
        if impl == "auto" and not why_not and torch.compiler.is_compiling():
            from . import triton_ce

            if triton_ce.prefer_plain_when_compiling(x):
                return "plain", "torch.compile fuses a plain formula of this size better than a kernel call"
        if not why_not:
            return ("triton", "x is on a GPU") if impl == "auto" else _ASKED[impl]
        if impl == "triton":
            raise ValueError(f"impl='triton' cannot be taken: {why_not}; impl='auto' takes what can")
        why_not_chunked = _no_fused(x, target, mu, sigma, weight) or _too_small(x)
        return ("plain", f"{why_not}; {why_not_chunked}") if why_not_chunked else ("chunked", why_not)

    why_not = _no_fused(x, target, mu, sigma, weight)
    if impl == "chunked" and not why_not:
        return _ASKED[impl]
    if not why_not and (device != "cpu" or x.dtype not in _HALF_OR_SINGLE):
        why_not = f"x is {x.dtype}" if device == "cpu" else f"x is on {device}"
    if impl == "auto" and why_not:
        return "plain", why_not
    if not why_not:
        why_not = native.unavailable()
        if not why_not:
            return _NATIVE if impl == "auto" else _ASKED[impl]
    if impl != "auto":
        raise ValueError(f"impl={impl!r} cannot be taken: {why_not}; impl='auto' takes what can")
    small = _too_small(x)
    return ("plain", f"{why_not}; {small}") if small else ("chunked", why_not)


def _choose_linear(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    mu: Tensor,
    sigma: Tensor,
    lam: float,
    class_weight: Tensor | None,
    impl: str,
) -> tuple[str, str]:
    """The same for a linear layer and the loss in one; "plain" here means to make x first."""
    if impl == "plain":
        return _ASKED["plain"]
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)}, got {impl!r}")
    device = h.device.type
    elements = target.numel() * (1 if target.is_floating_point() else weight.shape[0])
    if impl == "auto" and elements < LARGE_LINEAR.get(device, 0):
        return "plain", f"x has {elements} elements, few enough to be made at once"
    why_not = _no_fused(h, target, mu, sigma, class_weight)
    for v in (weight, bias):
        if not why_not and v is not None and (type(v) not in _PLAIN_TYPES or v.device != h.device):
            why_not = f"weight or bias is a {type(v).__name__} on {v.device}"
    if not why_not and (device not in LARGE_LINEAR or (impl != "chunked" and h.dtype not in _HALF_OR_SINGLE)):
        why_not = f"h is {h.dtype}" if device in LARGE_LINEAR else f"h is on {device}"
    if impl == "auto" and why_not:
        return "plain", why_not
    # Who is to do the loss of a chunk, and why not
    path = impl if impl != "auto" else "triton" if device == "cuda" else "native"
    if not why_not and path == "triton":
        why_not = _no_triton(h, target, mu, sigma, lam, class_weight)
    elif not why_not and path == "native":
        why_not = native.unavailable() if device == "cpu" else f"h is on {device}"
    if impl == "auto":
        return ("chunked", why_not) if why_not else (path, f"x has {elements} elements")
    if why_not:
        raise ValueError(f"impl={impl!r} cannot be taken: {why_not}; impl='auto' takes what can")
    return _ASKED[impl]


def _no_fused(x: Tensor, target: Tensor, mu: Tensor, sigma: Tensor, weight: Tensor | None) -> str:
    """Why only the plain formula will do, in words; empty when a fused path can be taken."""
    if torch.compiler.is_compiling():
        return "torch.compile fuses the plain formula itself"
    if under_transform():
        return "torch.func, forward-mode or tracing is at work"
    cpu = x.is_cpu
    for v in (x, target, mu, sigma) if weight is None else (x, target, mu, sigma, weight):
        if type(v) not in _PLAIN_TYPES:
            return f"an argument is a {type(v).__name__}"
        if v.layout is not torch.strided or v.is_neg():
            return f"an argument is {v.layout} or a negated view, not an array in memory"
        if v.is_cpu != cpu:
            return f"an argument is on {v.device}, x on {x.device}"
    if target.requires_grad or (weight is not None and weight.requires_grad):
        return "a gradient for target or weight is wanted"
    if target.is_floating_point() and (
        target.dtype is torch.float64 or (weight is not None and weight.dtype is torch.float64)
    ):
        return "target or weight is torch.float64"
    return "x is empty" if x.numel() == 0 else ""


def under_transform() -> bool:
    """Whether operations mean something else than usual just now: torch.func, forward mode, tracing."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
        or torch._C._is_tracing()
    )


def _too_small(x: Tensor) -> str:
    return f"{x.numel()} elements are fastest in one go" if x.numel() < SMALL else ""


def _no_triton(x: Tensor, target: Tensor, *rest: Any) -> str:
    try:
        from . import triton_ce
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    return triton_ce.supported(x, target, *rest)
