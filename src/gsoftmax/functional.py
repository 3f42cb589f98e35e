"""The paper's equations as pure functions: the reference that kernels, modules and tests are held to.

The letters, here and everywhere else in the package:

====== ================================================================== =====================
h      what the backbone hands the head                                   (batch, features)
x      raw outputs of the last linear layer                               (batch, classes, ...)
z      adjusted outputs, z = x + lam * Phi((x - mu) / sigma)              (batch, classes, ...)
p      probabilities, softmax(z)                                          (batch, classes, ...)
mu     mean of each class's Gaussian                                      (classes,)
sigma  its standard deviation, positive                                   (classes,)
lam    weight of the distribution term; 0 is plain softmax                a number
====== ================================================================== =====================

Shapes follow `torch.nn.functional.cross_entropy`: the classes are dimension 1 of a batch and dimension 0 of a single
example.  Half-precision inputs are computed in float32, and z and p come back in float32, because adding Phi to x in
bfloat16 rounds most of it away; gradients come back in the dtype of the input.  Numbers in parentheses are the
paper's equations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import kernels

__all__ = [
    "MULTILABEL_FORMS",
    "gaussian_cdf",
    "gsoftmax",
    "gsoftmax_cross_entropy",
    "gsoftmax_logits",
    "large_margin_cross_entropy",
    "large_margin_logits",
    "linear_gsoftmax_cross_entropy",
    "multilabel_cross_entropy",
    "multilabel_probabilities",
]

REDUCTIONS = ("mean", "sum", "none")
MULTILABEL_REDUCTIONS = ("mean", "sum", "none", "batchmean")
MULTILABEL_FORMS = ("paired", "independent", "printed", "msml")

# Beyond this many standard deviations Phi is 0 or 1 and its density 0 to the last bit of the dtype, so
# u = (x - mu) / sigma is held there: a masked class at x = -inf and a sigma of 1e-6 then give a zero gradient instead
# of 0 * inf.
_U_MAX = {torch.float32: 14.0, torch.float64: 39.0}
# float16 ends at 65504 and dz/dx = 1 + lam * phi(u) / sigma: below this sigma the gradient would not fit.
_HALF_SIGMA_MIN = 1e-5


# ------------------------------------------------------------------------------------------------- the function itself


def gaussian_cdf(x: Tensor, mu: Tensor | float, sigma: Tensor | float) -> Tensor:
    """Phi(x; mu, sigma), the Gaussian distribution function of each class (4).

    Written with erfc, so that the lower tail keeps its relative accuracy down to the smallest representable value
    (1 + erf loses all digits five standard deviations below the mean).

    x: (N, C), (N, C, d1, ...) or (C,); mu, sigma: (C,) or a number.  Returns x's shape, in float32 for half precision.

    >>> gaussian_cdf(torch.tensor([[-1.0, 0.0, 30.0]]), 0.0, 1.0)
    tensor([[0.1587, 0.5000, 1.0000]])
    """
    _check_outputs(x)
    mu, sigma = _gaussians(x, mu, sigma)
    _check_sigma(sigma)
    return _cdf(x, mu, sigma)


def gsoftmax_logits(x: Tensor, mu: Tensor | float, sigma: Tensor | float, lam: float = 1.0) -> Tensor:
    """z = x + lam * Phi(x; mu, sigma), the exponent of (3).

    x: (N, C), (N, C, d1, ...) or (C,); mu, sigma: (C,) or a number.  Returns x's shape, in float32 for half precision.

    >>> gsoftmax_logits(torch.tensor([[-1.0, 0.0, 30.0]]), 0.0, 1.0, lam=2.0)
    tensor([[-0.6827,  1.0000, 32.0000]])
    """
    _check_outputs(x)
    lam = _check_lam(lam)
    mu, sigma = _gaussians(x, mu, sigma, lam)
    _check_sigma(sigma)
    return _logits(x, mu, sigma, lam)


def gsoftmax(x: Tensor, mu: Tensor | float, sigma: Tensor | float, lam: float = 1.0) -> Tensor:
    """p = softmax(x + lam * Phi(x; mu, sigma)), the G-softmax function (3).

    x: (N, C), (N, C, d1, ...) or (C,); mu, sigma: (C,) or a number.  Returns x's shape, in float32 for half precision.

    >>> gsoftmax(torch.tensor([[0.0, 1.0]]), 0.0, 1.0)
    tensor([[0.2073, 0.7927]])
    """
    return torch.softmax(gsoftmax_logits(x, mu, sigma, lam), _class_dim(x))


def gsoftmax_cross_entropy(
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
) -> Tensor:
    """Cross entropy of G-softmax (13), with the options and meanings of `torch.nn.functional.cross_entropy`.

    At lam = 0 it is that function, bit for bit.  `impl` picks how it is computed ("plain" is the formula below, step by
    step); `gsoftmax.kernels.explain` says what "auto" takes.

    x: (N, C), (N, C, d1, ...) or (C,); target: class indices (N, d1, ...) or probabilities of x's shape.

    >>> x, target = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
    >>> gsoftmax_cross_entropy(x, target, mu=0.0, sigma=1.0)
    tensor(0.1565)
    """
    if weight is None and impl == "auto":
        loss = kernels.repeated(x, target, mu, sigma, lam, ignore_index, reduction, label_smoothing)
        if loss is not None:
            return loss
    lam = _check_lam(lam)
    _check_cross_entropy(x, target, weight, ignore_index, reduction, label_smoothing)
    mu, sigma = _gaussians(x, mu, sigma, lam)
    return _cross_entropy(x, target, mu, sigma, lam, weight, ignore_index, reduction, label_smoothing, impl)


def linear_gsoftmax_cross_entropy(
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    mu: Tensor | float,
    sigma: Tensor | float,
    lam: float = 1.0,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """`gsoftmax_cross_entropy(linear(h, weight, bias), target, ...)` in one call.

    `class_weight` is what the other losses call `weight`; here `weight` is the matrix of the linear layer.

    h: (..., D); weight: (C, D); bias: (C,); target: class indices (...) or probabilities (..., C).

    >>> h, weight = torch.eye(2), torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    >>> linear_gsoftmax_cross_entropy(h, weight, torch.tensor([0, 1]), mu=0.0, sigma=1.0)
    tensor(0.1565)
    """
    lam = _check_lam(lam)
    h, target, shape = _flatten_linear(h, weight, target, bias)
    mu, sigma = _gaussians_for(weight.shape[0], _linear_dtype(h), h.device, mu, sigma, lam)
    _check_sigma(sigma)
    loss = _linear_cross_entropy(
        h, weight, bias, target, mu, sigma, lam, class_weight, ignore_index, reduction, label_smoothing, impl
    )
    return loss.reshape(shape) if reduction == "none" else loss


# ------------------------------------------------------------------------------------------------------ several labels


def multilabel_cross_entropy(
    x_pos: Tensor,
    x_neg: Tensor | None,
    target: Tensor,
    *,
    form: str = "paired",
    gaussians: Sequence[Tensor | float] | None = None,
    lam: float = 1.0,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy where every label is present or absent, in the four forms that go by the paper's name.

    With z = x + lam * Phi (z = x without `gaussians`) and s the logistic function, the loss of a label is

    ============= ============================ ============================== ==========================================
    form          y = 1                        y = 0                          what it is
    ============= ============================ ============================== ==========================================
    "paired"      -log softmax(z+, z-)[+]      -log softmax(z+, z-)[-]        a two-way softmax; at lam = 0 it is binary
                                                                              cross entropy of x+ - x-
    "independent" -log s(z+)                   -log s(z-)                     equation (15)
    "printed"     -log s(z+)                   -log(1 - s(z-))                (16); the sign of x- differs from (15)
    "msml"        -log s(z+)                   -log(1 - s(z+))                (14), one output a label: x_neg is None
    ============= ============================ ============================== ==========================================

    x_pos, x_neg: (N, L); target: (N, L), 0 or 1 or a probability, `ignore_index` where unknown; weight and pos_weight:
    (L,), as in `binary_cross_entropy_with_logits`.  gaussians: (mu+, sigma+, mu-, sigma-), or (mu, sigma) for "msml".
    reduction: "mean" over the labels that count, "sum", "none" (N, L), or "batchmean", which sums over labels and
    averages over the batch, as the paper's equations do.

    >>> x_pos, x_neg = torch.tensor([[2.0, -1.0]]), torch.tensor([[0.0, 1.0]])
    >>> multilabel_cross_entropy(x_pos, x_neg, torch.tensor([[1, 0]]))
    tensor(0.1269)
    """
    lam = _check_lam(lam)
    _check_multilabel(x_pos, x_neg, target, form, weight, pos_weight, reduction, label_smoothing)
    z_pos, z_neg = _multilabel_logits(x_pos, x_neg, form, gaussians, lam)

    known = target != ignore_index
    y = torch.where(known, target, 0).to(z_pos.dtype)
    if _values_are_free(y) and not bool(((y >= 0) & (y <= 1)).all()):
        raise ValueError(
            f"target must hold 0, 1, probabilities between them or ignore_index={ignore_index}, "
            f"got values from {y.min().item()} to {y.max().item()}"
        )
    y = y * (1 - label_smoothing) + label_smoothing / 2

    if form == "paired":
        # logsigmoid(z+ - z-) would round x+ - x- before the exponential sees it; so does softmax, and it is what
        # binary cross entropy on x+ - x- does, so the two agree to the last bits.
        log_p, log_q = F.logsigmoid(z_pos - z_neg), F.logsigmoid(z_neg - z_pos)
    elif form == "independent":
        log_p, log_q = F.logsigmoid(z_pos), F.logsigmoid(z_neg)
    elif form == "printed":
        log_p, log_q = F.logsigmoid(z_pos), F.logsigmoid(-z_neg)
    else:
        log_p, log_q = F.logsigmoid(z_pos), F.logsigmoid(-z_pos)

    if pos_weight is not None:
        log_p = log_p * pos_weight.to(log_p.dtype)
    loss = -_xlogy(y, log_p) - _xlogy(1 - y, log_q)
    if weight is not None:
        loss = loss * weight.to(loss.dtype)
    loss = torch.where(known, loss, 0.0)
    if reduction == "mean":
        loss = loss.sum() / known.sum()
    elif reduction == "sum":
        loss = loss.sum()
    elif reduction == "batchmean":
        loss = loss.sum() / (target.shape[0] if target.ndim > 1 else 1)
    return _loss_dtype(loss, x_pos)


def multilabel_probabilities(
    x_pos: Tensor,
    x_neg: Tensor | None,
    *,
    form: str = "paired",
    gaussians: Sequence[Tensor | float] | None = None,
    lam: float = 1.0,
) -> Tensor:
    """p+, the probability that a label is present; a label is predicted where p+ >= 0.5.

    "paired": softmax(z+, z-)[+]; "printed" and "msml": s(z+); "independent" has two unlinked answers, s(z+) for
    presence and s(z-) for absence, and p+ is the mean of the first and of one minus the second.  Shapes as in
    `multilabel_cross_entropy`.

    >>> multilabel_probabilities(torch.tensor([[2.0]]), torch.tensor([[0.0]]))
    tensor([[0.8808]])
    """
    lam = _check_lam(lam)
    _check_form(form, x_pos, x_neg)
    z_pos, z_neg = _multilabel_logits(x_pos, x_neg, form, gaussians, lam)
    if form == "paired":
        return torch.sigmoid(z_pos - z_neg)
    if form == "independent":
        return (torch.sigmoid(z_pos) + torch.sigmoid(-z_neg)) / 2
    return torch.sigmoid(z_pos)


# ----------------------------------------------------------------------------------------------------------- L-softmax


def large_margin_logits(
    h: Tensor,  # (batch, features)
    weight: Tensor,  # (classes, features)
    target: Tensor,  # (batch,)
    margin: int,
    anneal: float | Tensor = 0.0,
    *,
    ignore_index: int = -100,
) -> Tensor:  # (batch, classes)
    """Logits of L-softmax (Liu et al. 2016): the target's logit is made harder, the others are plain.

    With n = |W_y||h|, theta the angle between W_y and h, k such that theta lies in [k pi / m, (k + 1) pi / m], and

        psi(theta) = (-1)^k cos(m theta) - 2k,

    the target's logit is (anneal * n cos(theta) + n psi(theta)) / (1 + anneal).  A large `anneal` is plain softmax
    without bias, 0 the full margin; margin 1 is plain whatever `anneal` is.

    >>> h, weight = torch.tensor([[4.0, 3.0]]), torch.eye(2)
    >>> large_margin_logits(h, weight, torch.tensor([0]), margin=2)
    tensor([[1.4000, 3.0000]])
    """
    _check_margin(h, weight, target, margin, anneal, ignore_index)
    logits = F.linear(h, weight)
    if margin == 1:
        return logits
    return _with_own(logits, target, _own_logits(h, weight, target, margin, anneal, ignore_index), ignore_index)


def large_margin_cross_entropy(
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    margin: int,
    anneal: float | Tensor = 0.0,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """Cross entropy of `large_margin_logits`; where they are many, no more than a chunk of rows of them exists.

    h: (..., D); weight: (C, D); target: class indices (...).

    >>> h, weight = torch.tensor([[4.0, 3.0]]), torch.eye(2)
    >>> large_margin_cross_entropy(h, weight, torch.tensor([0]), margin=2)
    tensor(1.7839)
    """
    h, target, shape = _flatten_linear(h, weight, target, None)
    _check_margin(h, weight, target, margin, anneal, ignore_index)
    own = None if margin == 1 else _own_logits(h, weight, target, margin, anneal, ignore_index)
    mu, sigma = _gaussians_for(weight.shape[0], _linear_dtype(h), h.device, 0.0, 1.0, 0.0)
    loss = _linear_cross_entropy(
        h, weight, None, target, mu, sigma, 0.0, class_weight, ignore_index, reduction, label_smoothing, impl, own
    )
    return loss.reshape(shape) if reduction == "none" else loss


def _check_margin(
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
    if target.is_floating_point() or target.shape != h.shape[:1]:
        raise ValueError(
            "target must hold one class index for each row of h, because the margin needs to know the true class; "
            f"got {tuple(target.shape)} of {target.dtype} for h of {tuple(h.shape)}"
        )
    _check_labels(target, weight.shape[0], ignore_index)


def _own_logits(
    h: Tensor, weight: Tensor, target: Tensor, margin: int, anneal: float | Tensor, ignore_index: int
) -> Tensor:
    """What a margin makes of the label's own output, (batch,), in the dtype of the arithmetic."""
    row = _label_columns(target, ignore_index, weight.shape[0])
    with torch.autocast(h.device.type, enabled=False):
        dtype = _compute_dtype(h)
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


def _label_columns(target: Tensor, ignore_index: int, classes: int) -> Tensor:
    """The label of every row; rows that do not count, and labels that are out of range, have any class."""
    return torch.where(target == ignore_index, 0, target).clamp(0, classes - 1).long()


def _with_own(x: Tensor, target: Tensor, own: Tensor, ignore_index: int) -> Tensor:
    """x with `own` (batch,) where the label's output was."""
    row = _label_columns(target, ignore_index, x.shape[1])
    return x.scatter(1, row[:, None], own[:, None].to(x.dtype))


# ------------------------------------------------------------------------------------- the same without checks, shared


def _class_dim(x: Tensor) -> int:
    return 1 if x.ndim > 1 else 0


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _loss_dtype(loss: Tensor, x: Tensor) -> Tensor:
    """The dtype F.cross_entropy gives for x: x's own, except float32 under autocast."""
    if x.dtype in (torch.float16, torch.bfloat16) and not torch.is_autocast_enabled(x.device.type):
        return loss.to(x.dtype)
    return loss


def _cdf(x: Tensor, mu: Tensor, sigma: Tensor) -> Tensor:
    x = x.to(sigma.dtype)
    if x.ndim > 2:
        shape = (-1,) + (1,) * (x.ndim - 2)
        mu, sigma = mu.view(shape), sigma.view(shape)
    bound = _U_MAX[sigma.dtype] * sigma.detach()
    u = torch.clamp(x - mu, -bound, bound) / sigma
    return 0.5 * torch.erfc(u * -math.sqrt(0.5))


def _logits(x: Tensor, mu: Tensor, sigma: Tensor, lam: float) -> Tensor:
    if lam == 0:
        return _with_zero_gradients(x.to(sigma.dtype), mu, sigma)
    return x.to(sigma.dtype) + lam * _cdf(x, mu, sigma)


class _ZeroGradients(torch.autograd.Function):
    """x unchanged, with a zero gradient for mu and sigma: at lam = 0 that is their gradient, and leaving them out of
    the graph instead would stop distributed training, which waits for every parameter."""

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


def _with_zero_gradients(x: Tensor, mu: Tensor, sigma: Tensor) -> Tensor:
    if torch.is_grad_enabled() and (mu.requires_grad or sigma.requires_grad):
        return _ZeroGradients.apply(x, mu, sigma)
    return x


def _cross_entropy(
    x: Tensor,
    target: Tensor,
    mu: Tensor,
    sigma: Tensor,
    lam: float,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    impl: str,
) -> Tensor:
    """`gsoftmax_cross_entropy` after its checks: lam is a float, mu and sigma are (C,) in the compute dtype.

    Whether sigma is positive is seen here, because the compiled kernel sees it at no cost.
    """
    if lam == 0:
        _check_sigma(sigma)
        z = _with_zero_gradients(x, mu, sigma)
        return _softmax_cross_entropy(z, target, weight, ignore_index, reduction, label_smoothing)
    fused = kernels.cross_entropy(x, target, mu, sigma, lam, weight, ignore_index, reduction, label_smoothing, impl)
    if fused is not None:
        return fused
    _check_sigma(sigma)
    z = _logits(x, mu, sigma, lam)
    return _loss_dtype(_softmax_cross_entropy(z, target, weight, ignore_index, reduction, label_smoothing), x)


def _softmax_cross_entropy(
    z: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float
) -> Tensor:
    """PyTorch's own, with class weights of any dtype and our error for a label out of range."""
    if weight is not None and not target.is_floating_point():
        weight = weight.to(z.dtype)
    try:
        return F.cross_entropy(z, target, weight, None, ignore_index, None, reduction, label_smoothing)
    except IndexError as error:  # raised by the CPU kernel, which looks at every label anyway
        raise _label_error(target, z.shape[_class_dim(z)], ignore_index) from error


def _linear_dtype(h: Tensor) -> torch.dtype:
    """The dtype of what F.linear makes of h."""
    autocast = torch.is_autocast_enabled(h.device.type)
    return torch.get_autocast_dtype(h.device.type) if autocast else h.dtype


def _linear_cross_entropy(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    mu: Tensor,
    sigma: Tensor,
    lam: float,
    class_weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    impl: str,
    own: Tensor | None = None,
) -> Tensor:
    """`own` (batch,) takes the place of the label's output."""
    fused = kernels.linear_cross_entropy(
        h, weight, bias, target, mu, sigma, lam, class_weight, ignore_index, reduction, label_smoothing, impl, own
    )
    if fused is not None:
        return fused
    x = F.linear(h, weight, bias)
    if own is not None:
        x = _with_own(x, target, own, ignore_index)
    _check_cross_entropy(x, target, class_weight, ignore_index, reduction, label_smoothing)
    return _cross_entropy(x, target, mu, sigma, lam, class_weight, ignore_index, reduction, label_smoothing, impl)


def _multilabel_logits(
    x_pos: Tensor, x_neg: Tensor | None, form: str, gaussians: Sequence[Tensor | float] | None, lam: float
) -> tuple[Tensor, Tensor | Any]:
    if gaussians is None:
        return x_pos.to(_compute_dtype(x_pos)), None if x_neg is None else x_neg.to(_compute_dtype(x_neg))
    needed = ("mu", "sigma") if form == "msml" else ("mu_pos", "sigma_pos", "mu_neg", "sigma_neg")
    if len(gaussians) != len(needed):
        raise ValueError(f"gaussians must be ({', '.join(needed)}) for form={form!r}, got {len(gaussians)} values")
    z_pos = gsoftmax_logits(x_pos, gaussians[0], gaussians[1], lam)
    return z_pos, None if x_neg is None else gsoftmax_logits(x_neg, gaussians[2], gaussians[3], lam)


def _xlogy(y: Tensor, log_p: Tensor) -> Tensor:
    """y * log_p with 0 * -inf = 0, so that a masked label (x = -inf) that is absent costs nothing."""
    return torch.where(y == 0, 0.0, y * log_p)


# -------------------------------------------------------------------------------------------------------------- checks
# Everything that can be read off shapes and dtypes is checked always.  Values are looked at only where looking costs no
# synchronisation: on the CPU, outside of torch.compile.


def _values_are_free(x: Tensor) -> bool:
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _check_outputs(x: Tensor, name: str = "x") -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {x.dtype}")
    if x.ndim == 0:
        raise ValueError(f"{name} must be (C,), (N, C) or (N, C, d1, ...), got a single number")


def _check_lam(lam: float) -> float:
    if isinstance(lam, bool) or not isinstance(lam, (int, float)):
        raise TypeError(f"lam must be a number, got {type(lam).__name__}")
    if not 0 <= lam < math.inf:
        raise ValueError(f"lam must be 0 or more and finite, got {lam}")
    return float(lam)


def _gaussians(x: Tensor, mu: Tensor | float, sigma: Tensor | float, lam: float = 1.0) -> tuple[Tensor, Tensor]:
    """mu and sigma as (C,) tensors in the dtype the arithmetic on x is done in."""
    return _gaussians_for(x.shape[1 if x.ndim > 1 else 0], x.dtype, x.device, mu, sigma, lam)


def _gaussians_for(
    classes: int, dtype: torch.dtype, device: torch.device, mu: Tensor | float, sigma: Tensor | float, lam: float
) -> tuple[Tensor, Tensor]:
    compute = torch.float64 if dtype is torch.float64 else torch.float32
    if not (isinstance(mu, Tensor) and mu.dtype is compute and mu.shape == (classes,)):
        mu = _gaussian_parameter("mu", mu, classes, compute, device)
    if not (isinstance(sigma, Tensor) and sigma.dtype is compute and sigma.shape == (classes,)):
        sigma = _gaussian_parameter("sigma", sigma, classes, compute, device)
    if dtype is torch.float16:
        sigma = _hold(sigma, _HALF_SIGMA_MIN * max(lam, 1.0))
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


def _hold(sigma: Tensor, low: float) -> Tensor:
    """Positive values of sigma held at or above `low`; others are left for the check to refuse."""
    return torch.where((sigma > 0) & (sigma < low), low, sigma)


def _check_sigma(sigma: Tensor) -> None:
    if _values_are_free(sigma) and sigma.numel() and not sigma.detach().min().item() > 0:  # nor NaN
        raise ValueError(f"sigma must be positive, got a minimum of {sigma.min().item()}")


def _check_cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float
) -> None:
    _check_outputs(x)
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor, got {type(target).__name__}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must lie between 0 and 1, got {label_smoothing!r}")
    classes = x.shape[_class_dim(x)]
    if weight is not None and weight.shape != (classes,):
        raise ValueError(f"weight must have shape ({classes},), one value for each class, got {tuple(weight.shape)}")
    if target.is_floating_point():
        if target.shape != x.shape:
            raise ValueError(
                f"target of {target.dtype} holds probabilities and must have x's shape {tuple(x.shape)}, "
                f"got {tuple(target.shape)}; class indices must be torch.long"
            )
        if ignore_index >= 0:
            raise ValueError(f"ignore_index works with class indices only, got {ignore_index} with probabilities")
        if _values_are_free(target) and bool(target.isnan().any()):
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


def _check_labels(target: Tensor, classes: int, ignore_index: int) -> None:
    if _values_are_free(target) and bool(((target != ignore_index) & ((target < 0) | (target >= classes))).any()):
        raise _label_error(target, classes, ignore_index)


def _label_error(target: Tensor, classes: int, ignore_index: int) -> ValueError:
    wrong = target[(target != ignore_index) & ((target < 0) | (target >= classes))]
    return ValueError(
        f"target must lie between 0 and {classes - 1} or be ignore_index={ignore_index}, got {wrong[:1].item()}"
    )


def _flatten_linear(
    h: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    _check_outputs(h, "h")
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


def _check_form(form: str, x_pos: Tensor, x_neg: Tensor | None) -> None:
    if form not in MULTILABEL_FORMS:
        raise ValueError(f"form must be one of {', '.join(MULTILABEL_FORMS)}, got {form!r}")
    _check_outputs(x_pos, "x_pos")
    if x_pos.ndim > 2:
        raise ValueError(f"x_pos must be (N, L) or (L,), got {tuple(x_pos.shape)}")
    if (x_neg is None) != (form == "msml"):
        need = "has one output a label: x_neg must be None" if form == "msml" else "needs x_neg beside x_pos"
        raise ValueError(f"form={form!r} {need}, got {'None' if x_neg is None else tuple(x_neg.shape)}")
    if x_neg is not None and x_neg.shape != x_pos.shape:
        raise ValueError(f"x_neg must have x_pos's shape {tuple(x_pos.shape)}, got {tuple(x_neg.shape)}")


def _check_multilabel(
    x_pos: Tensor,
    x_neg: Tensor | None,
    target: Tensor,
    form: str,
    weight: Tensor | None,
    pos_weight: Tensor | None,
    reduction: str,
    label_smoothing: float,
) -> None:
    _check_form(form, x_pos, x_neg)
    if reduction not in MULTILABEL_REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(MULTILABEL_REDUCTIONS)}, got {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must lie between 0 and 1, got {label_smoothing!r}")
    if not isinstance(target, Tensor) or target.shape != x_pos.shape:
        seen = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(f"target must have x_pos's shape {tuple(x_pos.shape)}, one value for each label, got {seen}")
    labels = x_pos.shape[-1]
    for name, v in (("weight", weight), ("pos_weight", pos_weight)):
        if v is not None and v.shape != (labels,):
            raise ValueError(f"{name} must have shape ({labels},), one value for each label, got {tuple(v.shape)}")
