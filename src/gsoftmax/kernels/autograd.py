"""One autograd node for all fused operations, on every device.

Where it can, the node of a loss computes the gradients together with the loss, while x is in the cache.  The backward
pass scales them by the incoming gradient and returns them without a copy (they may become `.grad`), so a second pass
over a retained graph computes them again.  Gradients wait for the backward pass where they depend on more than one
incoming number (reduction="none", z), and in float16, where they would underflow before loss scaling is applied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import checks, equations

# (x, target, mu, sigma, lam, options, need, grad=None) -> loss and gradients of x, mu and sigma, None where not needed
Evaluate = Callable[..., tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]]


class Operation:
    """What is computed from the inputs, and everything that is not differentiated."""

    __slots__ = ()

    def constants(self) -> tuple[Tensor | None, ...]:
        """Tensors that must not be changed in place before the backward pass."""
        return ()

    def early(self, x: Tensor) -> bool:
        """Whether gradients are computed together with the value."""
        return False

    def result(self, value: Tensor, x: Tensor) -> Tensor:
        """The value in the dtype that the caller gets."""
        return value

    def __call__(self, inputs: Sequence[Any], need: Sequence[bool], grad: Tensor | None = None) -> tuple[Any, ...]:
        """The value, and the gradient of every input that needs one, times `grad`."""
        raise NotImplementedError

    def plain(self, *inputs: Any) -> Tensor:
        """The value by the plain formula, which can be differentiated twice."""
        raise NotImplementedError


@dataclass(slots=True)
class Logits(Operation):
    """z of the inputs x, mu and sigma."""

    lam: float
    forward: Callable[..., Tensor]  # (x, mu, sigma, lam)
    backward: Callable[..., tuple[Any, ...]]  # (grad, x, mu, sigma, lam, need)

    def __call__(self, inputs: Sequence[Any], need: Sequence[bool], grad: Tensor | None = None) -> tuple[Any, ...]:
        if grad is None:
            return self.forward(*inputs, self.lam), None, None, None
        return None, *self.backward(grad, *inputs, self.lam, need)

    def plain(self, *inputs: Any) -> Tensor:
        x, mu, sigma = inputs
        return equations.logits(x, mu, sigma, self.lam)


@dataclass(slots=True)
class Probabilities(Logits):
    """softmax(z) of the inputs x, mu and sigma; its backward pass computes it again."""

    def __call__(self, inputs: Sequence[Any], need: Sequence[bool], grad: Tensor | None = None) -> tuple[Any, ...]:
        if grad is None:
            return self.forward(*inputs, self.lam), None, None, None
        x, mu, sigma = inputs
        p, grad = self.forward(x.to(sigma.dtype), mu, sigma, self.lam), grad.to(sigma.dtype)
        dz = p * (grad - (grad * p).sum(checks.class_dim(p), keepdim=True))
        return None, *self.backward(dz, *inputs, self.lam, need)

    def plain(self, *inputs: Any) -> Tensor:
        x, mu, sigma = inputs
        return equations.probabilities(x, mu, sigma, self.lam)


@dataclass(slots=True)
class Loss(Operation):
    """The loss of the inputs x, mu and sigma."""

    target: Tensor
    lam: float
    options: Any  # Options; LabelOptions for several labels
    evaluate: Evaluate

    def constants(self) -> tuple[Tensor | None, ...]:
        return self.target, self.options.weight

    def early(self, x: Tensor) -> bool:
        return self.options.reduction != "none" and x.dtype is not torch.float16

    def result(self, value: Tensor, x: Tensor) -> Tensor:
        return value if value.dtype is x.dtype else equations.loss_dtype(value, x)

    def __call__(self, inputs: Sequence[Any], need: Sequence[bool], grad: Tensor | None = None) -> tuple[Any, ...]:
        x, mu, sigma = inputs
        return self.evaluate(x, self.target, mu, sigma, self.lam, self.options, need, grad)

    def plain(self, *inputs: Any) -> Tensor:
        x, mu, sigma = inputs
        return equations.cross_entropy(x, self.target, mu, sigma, self.lam, self.options)


@dataclass(slots=True)
class LabelLoss(Loss):
    """The loss of several labels."""

    def constants(self) -> tuple[Tensor | None, ...]:
        return self.target, self.options.weight, self.options.pos_weight

    def plain(self, *inputs: Any) -> Tensor:
        x, mu, sigma = inputs
        return equations.multilabel(x, self.target, mu, sigma, self.lam, self.options)


class LossOfZ(Loss):
    """The loss in float32 whatever x is, as torch computes it from z."""

    __slots__ = ()

    def result(self, value: Tensor, x: Tensor) -> Tensor:
        return value


class LabelLossOfZ(LabelLoss):
    """The same for several labels."""

    __slots__ = ()
    result = LossOfZ.result


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        inputs, operation, need = arguments[:-1], arguments[-1], ctx.needs_input_grad[:-1]
        x, early = inputs[0], operation.early(inputs[0])
        value, *gradients = operation(inputs, need if early else (False,) * len(need))
        # Constants for their version: an error if they are changed in place.
        ctx.save_for_backward(*inputs, *operation.constants())
        ctx.operation, ctx.ready = operation, [gradients] if early else []
        value = operation.result(value, x)
        if type(value) is Tensor and value._is_view():  # of memory that is its own; autograd forbids to change views
            value = value.new_empty(0).set_(value)  # type: ignore[call-overload]
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plain = torch.is_grad_enabled() or not checks.is_array(grad)
        if ctx.ready and not plain:
            gradients = ctx.ready.pop()
            if not grad.is_cpu or grad.item() != 1:
                for v in gradients:
                    if v is not None:
                        v.mul_(grad)
            return *gradients, None
        need = ctx.needs_input_grad[:-1]
        inputs = ctx.saved_tensors[: len(need)]
        if not plain:
            return *ctx.operation(inputs, need, grad)[1:], None
        differentiable = torch.is_grad_enabled()
        with torch.enable_grad():
            value = ctx.operation.plain(*inputs).to(grad.dtype)
        wanted = [v for v, needed in zip(inputs, need, strict=True) if needed]
        found = iter(torch.autograd.grad(value, wanted, grad, create_graph=differentiable))
        return *(next(found) if needed else None for needed in need), None


# `_Node.apply` without the check for torch.func transforms, which are excluded before a fused operation is chosen.
_apply = super(torch.autograd.Function, _Node).apply


def apply(operation: Operation, *inputs: Any) -> Tensor:
    """The value of an operation, recorded by autograd if an input requires a gradient."""
    if torch.is_grad_enabled():
        for v in inputs:
            if v is not None and v.requires_grad:
                return _apply(*inputs, operation)
    return operation.result(operation(inputs, (False,) * len(inputs))[0], inputs[0])
