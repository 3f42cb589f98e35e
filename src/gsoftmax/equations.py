"""The paper's equations step by step, on validated arguments; the reference for the kernels.

The letters are those of `gsoftmax.functional`: mu and sigma are (classes,) in the dtype of the arithmetic, lam a float.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import checks
from .checks import Options

# Beyond this many standard deviations Phi is 0 or 1 and its density 0 to the last bit of the dtype, so u is clamped to
# that range: a masked class at x = -inf and a sigma of 1e-6 then give a zero gradient instead of 0 * inf.
U_MAX = {torch.float32: 14.0, torch.float64: 39.0}


def loss_dtype(loss: Tensor, x: Tensor) -> Tensor:
    """The loss in the dtype that F.cross_entropy returns for x: x's own, except float32 under autocast."""
    if x.dtype in (torch.float16, torch.bfloat16) and not torch.is_autocast_enabled(x.device.type):
        return loss.to(x.dtype)
    return loss


def linear_dtype(h: Tensor) -> torch.dtype:
    """The dtype of F.linear(h, ...), which depends on autocast."""
    autocast = torch.is_autocast_enabled(h.device.type)
    return torch.get_autocast_dtype(h.device.type) if autocast else h.dtype


def cdf(x: Tensor, mu: Tensor, sigma: Tensor) -> Tensor:
    x = x.to(sigma.dtype)
    if x.ndim > 2:
        shape = (-1,) + (1,) * (x.ndim - 2)
        mu, sigma = mu.view(shape), sigma.view(shape)
    bound = U_MAX[sigma.dtype] * sigma.detach()
    u = torch.clamp(x - mu, -bound, bound) / sigma
    return 0.5 * torch.erfc(u * -math.sqrt(0.5))


def logits(x: Tensor, mu: Tensor, sigma: Tensor, lam: float) -> Tensor:
    if lam == 0:
        return with_zero_gradients(x.to(sigma.dtype), mu, sigma)
    return x.to(sigma.dtype) + lam * cdf(x, mu, sigma)


class _ZeroGradients(torch.autograd.Function):
    """x unchanged, with a zero gradient for mu and sigma: at lam = 0 that is their gradient.  They stay in the graph
    because DDP waits for the gradient of every parameter."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, mu: Tensor, sigma: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        mu, sigma = ctx.saved_tensors
        return grad, torch.zeros_like(mu), torch.zeros_like(sigma)


def with_zero_gradients(x: Tensor, mu: Tensor, sigma: Tensor) -> Tensor:
    if torch.is_grad_enabled() and (mu.requires_grad or sigma.requires_grad):
        return _ZeroGradients.apply(x, mu, sigma)
    return x


def softmax_cross_entropy(z: Tensor, target: Tensor, options: Options) -> Tensor:
    """F.cross_entropy; accepts class weights of any dtype and raises our error for an out-of-range label."""
    weight, ignore_index, reduction, label_smoothing = options
    if weight is not None and not target.is_floating_point():
        weight = weight.to(z.dtype)
    try:
        return F.cross_entropy(z, target, weight, None, ignore_index, None, reduction, label_smoothing)
    except IndexError as error:  # raised by the CPU kernel, which checks every label anyway
        raise checks.label_error(target, z.shape[checks.class_dim(z)], ignore_index) from error


def cross_entropy(x: Tensor, target: Tensor, mu: Tensor, sigma: Tensor, lam: float, options: Options) -> Tensor:
    """The G-softmax loss (13) step by step; the reference for every fused version."""
    checks.check_sigma(sigma)
    if lam == 0:
        z = with_zero_gradients(x, mu, sigma)
        return softmax_cross_entropy(z, target, options)
    z = logits(x, mu, sigma, lam)
    return loss_dtype(softmax_cross_entropy(z, target, options), x)


def xlogy(y: Tensor, log_p: Tensor) -> Tensor:
    """y * log_p with 0 * -inf = 0, so that a masked label (x = -inf) that is absent costs nothing."""
    return torch.where(y == 0, 0.0, y * log_p)


def margin_logits(
    h: Tensor, weight: Tensor, target: Tensor, margin: int, anneal: float | Tensor, ignore_index: int
) -> Tensor:
    """The target logit with the margin applied, (batch,), in the dtype of the arithmetic."""
    row = label_columns(target, ignore_index, weight.shape[0])
    with torch.autocast(h.device.type, enabled=False):
        dtype = checks.compute_dtype(h)
        # A GPU sums the gradients of a class's rows in float32 whatever the weight is; a CPU does not.
        w = F.embedding(row, weight if weight.is_cuda else weight.to(dtype)).to(dtype)  # (batch, features)
        h = h.to(dtype)
        n = w.norm(dim=1) * h.norm(dim=1)
        s = (w * h).sum(dim=1)
        c = (s / n.clamp_min(torch.finfo(n.dtype).tiny)).clamp(-1, 1)
        # k counts the boundaries i pi / m that theta has passed; constant between them, it carries no gradient.
        k = sum((c.detach() < math.cos(i * math.pi / margin)).to(c.dtype) for i in range(1, margin))
        cos_m = {2: lambda: 2 * c**2 - 1, 3: lambda: 4 * c**3 - 3 * c, 4: lambda: 8 * c**4 - 8 * c**2 + 1}[margin]()
        psi = (1 - 2 * (k % 2)) * cos_m - 2 * k
        return (anneal * s + n * psi) / (1 + anneal)


def label_columns(target: Tensor, ignore_index: int, classes: int) -> Tensor:
    """The label of every row; ignored rows, and labels out of range, get an arbitrary class."""
    return torch.where(target == ignore_index, 0, target).clamp(0, classes - 1).long()


def with_target_logit(x: Tensor, target: Tensor, target_logit: Tensor, ignore_index: int) -> Tensor:
    """x with the target's logit replaced by `target_logit` (batch,)."""
    row = label_columns(target, ignore_index, x.shape[1])
    return x.scatter(1, row[:, None], target_logit[:, None].to(x.dtype))


def merge_moments(a: Sequence[Tensor], b: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and sum of squared deviations of two samples together (Chan, Golub and LeVeque 1983)."""
    n = a[0] + b[0]
    share = b[0] / n.clamp(min=1)  # of the second sample
    delta = b[1] - a[1]
    return n, a[1] + delta * share, a[2] + b[2] + delta * delta * (a[0] * share)
