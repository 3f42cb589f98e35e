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
from .checks import LabelOptions, Options

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


def logits_backward(
    grad: Tensor, x: Tensor, mu: Tensor, sigma: Tensor, lam: float, need: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x (rows, classes), mu and sigma from that of z, without autograd; None where not needed.

    With u = (x - mu) / sigma and s = lam phi(u) / sigma they are grad (1 + s), and minus the sums of grad s and of
    grad s u over the rows.
    """
    bound = U_MAX[sigma.dtype] * sigma
    u = torch.clamp(x.to(sigma.dtype) - mu, -bound, bound) / sigma
    e = (u * u).mul_(-0.5).exp_().mul_(grad).mul_(lam / math.sqrt(2 * math.pi) / sigma)
    return (
        (grad + e).to(x.dtype) if need[0] else None,
        -e.sum(0) if need[1] else None,
        -(e * u).sum(0) if need[2] else None,
    )


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


def probabilities(x: Tensor, mu: Tensor, sigma: Tensor, lam: float) -> Tensor:
    """softmax(z) in x's dtype; float32 for half precision under autocast."""
    return loss_dtype(torch.softmax(logits(x, mu, sigma, lam), checks.class_dim(x)), x)


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


def target_logits(x: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """The target's logit of every row, (batch,)."""
    return x.gather(1, label_columns(target, ignore_index, x.shape[1])[:, None])[:, 0]


def negative_log_likelihood(log_p: Tensor, target: Tensor, options: Options) -> Tensor:
    """F.cross_entropy without its log-softmax, for log-probabilities (batch, classes) that a loss has changed."""
    weight, ignore_index, _, label_smoothing = options
    weighted = log_p if weight is None else log_p * weight.to(log_p.dtype)
    classes = log_p.shape[1]
    if target.is_floating_point():
        q = target.to(log_p.dtype) * (1 - label_smoothing) + label_smoothing / classes
        return reduce_rows(-xlogy(q, weighted).sum(1), target, options)
    checks.check_labels(target, classes, ignore_index)
    loss = F.nll_loss(weighted, target, ignore_index=ignore_index, reduction="none")
    if label_smoothing:
        even = torch.where(target == ignore_index, 0.0, -weighted.sum(1))
        loss = (1 - label_smoothing) * loss + label_smoothing / classes * even
    return reduce_rows(loss, target, options)


def reduce_rows(loss: Tensor, target: Tensor, options: Options) -> Tensor:
    """Weighted losses of rows, reduced as in F.cross_entropy: the mean divides by the weights of the rows' classes."""
    if options.reduction != "mean":
        return loss.sum() if options.reduction == "sum" else loss
    if target.is_floating_point():
        return loss.mean()
    return loss.sum() / row_weights(loss, target, options).sum()


def row_weights(loss: Tensor, target: Tensor, options: Options) -> Tensor:
    """The weight of every row's class, 0 for ignored rows."""
    known = (target != options.ignore_index).to(loss.dtype)
    if options.weight is None:
        return known
    weight = options.weight.to(loss.dtype)
    return known * weight[label_columns(target, options.ignore_index, len(weight))]


def present_and_absent(z: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """a and b such that a label's loss is -log s(a) if it is present and -log s(b) if it is absent.

    z: (..., outputs), absence first where there are two outputs per label
    """
    if form == "msml":
        return z, -z
    z_neg, z_pos = z.chunk(2, -1)
    if form == "paired":
        # Subtracting before the exponential rounds z+ - z-; so do softmax and binary cross entropy on x+ - x-, so the
        # results agree to the last bits.
        return z_pos - z_neg, z_neg - z_pos
    return z_pos, z_neg if form == "independent" else -z_neg


def label_probabilities(z: Tensor, form: str) -> Tensor:
    """p+ of every label; z as in `present_and_absent`."""
    present, absent = present_and_absent(z, form)
    if form == "independent":
        return (torch.sigmoid(present) + torch.sigmoid(-absent)) / 2
    return torch.sigmoid(present)


def multilabel(
    x: Tensor, target: Tensor, mu: Tensor | None, sigma: Tensor | None, lam: float, options: LabelOptions
) -> Tensor:
    """`multilabel_cross_entropy` step by step; x as in `present_and_absent`, mu and sigma (outputs,) or None."""
    z = x.to(checks.compute_dtype(x)) if mu is None or sigma is None else logits(x, mu, sigma, lam)
    present, absent = present_and_absent(z, options.form)
    y, known = soft_labels(target, present.dtype, options)
    log_p, log_q = F.logsigmoid(present), F.logsigmoid(absent)
    if options.pos_weight is not None:
        log_p = log_p * options.pos_weight.to(log_p.dtype)
    loss = -xlogy(y, log_p) - xlogy(1 - y, log_q)
    if options.weight is not None:
        loss = loss * options.weight.to(loss.dtype)
    return loss_dtype(reduce_labels(loss, known, options), x)


def soft_labels(target: Tensor, dtype: torch.dtype, options: Options | LabelOptions) -> tuple[Tensor, Tensor]:
    """y between 0 and 1, smoothed, and whether each label is known, both of target's shape."""
    ignore_index, label_smoothing = options.ignore_index, options.label_smoothing
    known = target != ignore_index
    y = torch.where(known, target, 0).to(dtype)
    if checks.values_are_free(y) and not bool(((y >= 0) & (y <= 1)).all()):
        raise ValueError(
            f"target must hold 0, 1, probabilities between them or ignore_index={ignore_index}, "
            f"got values from {y.min().item()} to {y.max().item()}"
        )
    return y * (1 - label_smoothing) + label_smoothing / 2, known


def reduce_labels(loss: Tensor, known: Tensor, options: Options | LabelOptions) -> Tensor:
    """Losses (N, L) or (L,) of labels, the unknown ones left out."""
    loss = torch.where(known, loss, 0.0)
    if options.reduction == "none":
        return loss
    if options.reduction == "sum":
        return loss.sum()
    if options.reduction == "mean":
        return loss.sum() / known.sum()
    return loss.sum() / (loss.shape[0] if loss.ndim > 1 else 1)  # batchmean


def focal_weight(q: Tensor, gamma: float) -> Tensor:
    """q ** gamma with a finite gradient at q = 0, also for gamma < 1."""
    return q.clamp_min(torch.finfo(q.dtype).tiny) ** gamma


def unit(v: Tensor) -> Tensor:
    """v (..., D) divided by its length.  A zero vector has no direction: it stays zero, and so does its gradient."""
    length = v.norm(dim=-1, keepdim=True)
    return v / torch.where(length > 0, length.clamp_min(1e-12), math.inf)


def cosine_scale(classes: int, p: float = 0.999) -> float:
    """The smallest s at which softmax(s cos) of a class's own direction can reach p (Wang et al. 2018, equation 6).

    The directions of C classes have cosines of -1 / (C - 1) at best, so p = 1 / (1 + (C - 1) exp(-s C / (C - 1))).
    """
    others = max(classes, 2) - 1
    return others / (others + 1) * math.log(others * p / (1 - p))


def merge_moments(a: Sequence[Tensor], b: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and sum of squared deviations of two samples together (Chan, Golub and LeVeque 1983)."""
    n = a[0] + b[0]
    share = b[0] / n.clamp(min=1)  # of the second sample
    delta = b[1] - a[1]
    return n, a[1] + delta * share, a[2] + b[2] + delta * delta * (a[0] * share)
