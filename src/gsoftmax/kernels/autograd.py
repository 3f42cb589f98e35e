"""One autograd node for all fused losses, on every device.

Where it can, the node computes the gradients together with the loss, while x is in the cache.  The backward pass
scales them by the incoming gradient and returns them without a copy (they may become `.grad`), so a second pass over a
retained graph computes them again.  Gradients wait for the backward pass where they depend on more than one incoming
number (reduction="none"), and in float16, where they would underflow before loss scaling is applied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import equations
from ..checks import Options

# (x, target, mu, sigma, lam, options, need, grad=None) -> loss and gradients of x, mu and sigma, None where not needed
Evaluate = Callable[..., tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]]


@dataclass(slots=True)
class Loss:
    """The loss of the inputs x, mu and sigma: everything that is not differentiated, and how to compute it."""

    target: Tensor
    lam: float
    options: Options
    evaluate: Evaluate

    def early(self, x: Tensor) -> bool:
        """Whether gradients are computed together with the loss."""
        return self.options.reduction != "none" and x.dtype is not torch.float16

    def __call__(self, inputs: Sequence[Any], need: Sequence[bool], grad: Tensor | None = None) -> tuple[Any, ...]:
        """The loss, and the gradient of every input that needs one, times `grad`."""
        x, mu, sigma = inputs
        return self.evaluate(x, self.target, mu, sigma, self.lam, self.options, need, grad)

    def plain(self, x: Tensor, mu: Tensor, sigma: Tensor) -> Tensor:
        """The same by the plain formula, which can be differentiated twice."""
        return equations.cross_entropy(x, self.target, mu, sigma, self.lam, self.options)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        inputs, loss, need = arguments[:-1], arguments[-1], ctx.needs_input_grad[:-1]
        x, early = inputs[0], loss.early(inputs[0])
        value, *gradients = loss(inputs, need if early else (False,) * len(need))
        # The last two for their version: an error if they are changed in place.
        ctx.save_for_backward(*inputs, loss.target, loss.options.weight)
        ctx.loss, ctx.ready = loss, [gradients] if early else []
        return value if value.dtype is x.dtype else equations.loss_dtype(value, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        differentiable = torch.is_grad_enabled()
        if ctx.ready and not differentiable:
            gradients = ctx.ready.pop()
            if not grad.is_cpu or grad.item() != 1:
                for v in gradients:
                    if v is not None:
                        v.mul_(grad)
            return *gradients, None
        need = ctx.needs_input_grad[:-1]
        inputs = ctx.saved_tensors[: len(need)]
        if not differentiable:
            return *ctx.loss(inputs, need, grad)[1:], None
        value = ctx.loss.plain(*inputs).to(grad.dtype)
        wanted = [v for v, needed in zip(inputs, need, strict=True) if needed]
        found = iter(torch.autograd.grad(value, wanted, grad, create_graph=True))
        return *(next(found) if needed else None for needed in need), None


# `_Node.apply` without the check for torch.func transforms, which are excluded before a fused loss is chosen.
_apply = super(torch.autograd.Function, _Node).apply


def apply(loss: Loss, *inputs: Any) -> Tensor:
    """The value of `loss`, recorded by autograd if an input requires a gradient."""
    if torch.is_grad_enabled():
        for v in inputs:
            if v is not None and v.requires_grad:
                return _apply(*inputs, loss)
    value = loss(inputs, (False,) * len(inputs))[0]
    return value if value.dtype is inputs[0].dtype else equations.loss_dtype(value, inputs[0])
