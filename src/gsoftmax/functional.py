"""The paper's equations as pure functions: the reference implementation for kernels, modules and tests.

The letters, here and everywhere else in the package:

====== ================================================================== =====================
h      features from the backbone                                         (batch, features)
x      raw outputs of the last linear layer                               (batch, classes, ...)
z      adjusted outputs, z = x + lam * Phi((x - mu) / sigma)              (batch, classes, ...)
p      probabilities, softmax(z)                                          (batch, classes, ...)
mu     mean of each class's Gaussian                                      (classes,)
sigma  its standard deviation, positive                                   (classes,)
lam    weight of the distribution term; 0 is plain softmax                a number
====== ================================================================== =====================

Shapes follow `torch.nn.functional.cross_entropy`: the classes are dimension 1 of a batch and dimension 0 of a single
example.  Half-precision inputs are computed in float32, and z comes back in float32, because adding Phi to x in
bfloat16 rounds most of it away; p has the dtype of softmax(x), and gradients that of the input.  Numbers in parentheses
are the paper's equations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from . import checks, equations, kernels
from .checks import MULTILABEL_FORMS, LabelOptions, Options
from .kernels.linear import Linear

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


def gaussian_cdf(x: Tensor, mu: Tensor | float, sigma: Tensor | float) -> Tensor:
    """Phi(x; mu, sigma), the Gaussian distribution function of each class (4).

    Written with erfc, so that the lower tail keeps its relative accuracy down to the smallest representable value
    (1 + erf loses all digits five standard deviations below the mean).

    x: (N, C), (N, C, d1, ...) or (C,); the result has its shape, in float32 for half precision
    mu, sigma: (C,) or a number, the Gaussian of each class

    >>> gaussian_cdf(torch.tensor([[-1.0, 0.0, 30.0]]), 0.0, 1.0)
    tensor([[0.1587, 0.5000, 1.0000]])
    """
    checks.check_outputs(x)
    mu, sigma = checks.as_gaussians(x, mu, sigma)
    checks.check_sigma(sigma)
    return equations.cdf(x, mu, sigma)


def gsoftmax_logits(x: Tensor, mu: Tensor | float, sigma: Tensor | float, lam: float = 1.0) -> Tensor:
    """z = x + lam * Phi(x; mu, sigma), the exponent of (3).

    lam: weight of the distribution term, 0 or more; x, mu, sigma and the result as in `gaussian_cdf`

    >>> gsoftmax_logits(torch.tensor([[-1.0, 0.0, 30.0]]), 0.0, 1.0, lam=2.0)
    tensor([[-0.6827,  1.0000, 32.0000]])
    """
    checks.check_outputs(x)
    lam = checks.check_lam(lam)
    mu, sigma = checks.as_gaussians(x, mu, sigma, lam)
    checks.check_sigma(sigma)
    return kernels.logits(x, mu, sigma, lam)


def gsoftmax(x: Tensor, mu: Tensor | float, sigma: Tensor | float, lam: float = 1.0) -> Tensor:
    """p = softmax(x + lam * Phi(x; mu, sigma)), the G-softmax function (3), in the dtype of softmax(x).

    Arguments and the shape of the result as in `gsoftmax_logits`.

    >>> gsoftmax(torch.tensor([[0.0, 1.0]]), 0.0, 1.0)
    tensor([[0.2073, 0.7927]])
    """
    checks.check_outputs(x)
    lam = checks.check_lam(lam)
    mu, sigma = checks.as_gaussians(x, mu, sigma, lam)
    checks.check_sigma(sigma)
    return kernels.probabilities(x, mu, sigma, lam)


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

    At lam = 0 it is that function, bit for bit.

    x, mu, sigma: as in `gaussian_cdf`
    lam: weight of the distribution term
    target: class indices (N, d1, ...) or probabilities of x's shape
    weight: (C,), class weights
    ignore_index: the class index of targets that do not contribute
    reduction: "mean", "sum" or "none"
    label_smoothing: between 0 and 1
    impl: the implementation, one of `gsoftmax.kernels.IMPLS`; `gsoftmax.kernels.explain` tells what "auto" chooses

    >>> x, target = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
    >>> gsoftmax_cross_entropy(x, target, mu=0.0, sigma=1.0)
    tensor(0.1565)
    """
    options = Options(weight, ignore_index, reduction, label_smoothing)
    if weight is None and impl == "auto":
        loss = kernels.cached_call(x, target, mu, sigma, lam, options)
        if loss is not None:
            return loss
    lam = checks.check_lam(lam)
    checks.check_cross_entropy(x, target, options)
    mu, sigma = checks.as_gaussians(x, mu, sigma, lam)
    return kernels.cross_entropy(x, target, mu, sigma, lam, options, impl)


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

    h: (..., D), features
    weight, bias: (C, D) and (C,), the linear layer
    target: class indices (...) or probabilities (..., C)
    class_weight: (C,), what the other losses call `weight`

    Other options as in `gsoftmax_cross_entropy`.

    >>> h, weight = torch.eye(2), torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    >>> linear_gsoftmax_cross_entropy(h, weight, torch.tensor([0, 1]), mu=0.0, sigma=1.0)
    tensor(0.1565)
    """
    lam = checks.check_lam(lam)
    h, target, shape = checks.flatten_linear(h, weight, target, bias)
    mu, sigma = checks.as_gaussians_for(weight.shape[0], equations.linear_dtype(h), h.device, mu, sigma, lam)
    checks.check_sigma(sigma)
    options = Options(class_weight, ignore_index, reduction, label_smoothing)
    loss = kernels.linear_cross_entropy(Linear(h, weight, bias), target, mu, sigma, lam, options, impl)
    return loss.reshape(shape) if reduction == "none" else loss


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
    """Cross entropy where every label is present or absent, in the four variants found in the paper and its code.

    With z = x + lam * Phi (z = x without `gaussians`) and s the logistic function, the loss of a label is

    ============= ============================ ============================== ==========================================
    form          y = 1                        y = 0                          what it is
    ============= ============================ ============================== ==========================================
    "paired"      -log softmax(z+, z-)[+]      -log softmax(z+, z-)[-]        a two-way softmax; at lam = 0 it is binary
                                                                              cross entropy of x+ - x-
    "independent" -log s(z+)                   -log s(z-)                     equation (15)
    "printed"     -log s(z+)                   -log(1 - s(z-))                (16); the sign of x- differs from (15)
    "msml"        -log s(z+)                   -log(1 - s(z+))                (14), one output per label: x_neg is None
    ============= ============================ ============================== ==========================================

    x_pos, x_neg: (N, L), outputs for "present" and "absent"
    target: (N, L), 0 or 1 or a probability, `ignore_index` where unknown
    form: one of the table
    gaussians: (mu+, sigma+, mu-, sigma-), or (mu, sigma) for "msml"
    lam: weight of the distribution term
    weight, pos_weight: (L,), as in `torch.nn.functional.binary_cross_entropy_with_logits`
    ignore_index: the value of unknown targets
    reduction: "mean" over the known labels, "sum", "none" (N, L), or "batchmean", which sums over labels and averages
        over the batch, as the paper's equations do
    label_smoothing: between 0 and 1

    >>> x_pos, x_neg = torch.tensor([[2.0, -1.0]]), torch.tensor([[0.0, 1.0]])
    >>> multilabel_cross_entropy(x_pos, x_neg, torch.tensor([[1, 0]]))
    tensor(0.1269)
    """
    lam = checks.check_lam(lam)
    options = LabelOptions(form, weight, pos_weight, ignore_index, reduction, label_smoothing)
    checks.check_form(form, x_pos, x_neg)
    checks.check_multilabel(x_pos.shape, target, options)
    x, mu, sigma = _outputs(x_pos, x_neg, form, gaussians, lam)
    return kernels.multilabel(x, target, mu, sigma, lam, options)


def multilabel_probabilities(
    x_pos: Tensor,
    x_neg: Tensor | None,
    *,
    form: str = "paired",
    gaussians: Sequence[Tensor | float] | None = None,
    lam: float = 1.0,
) -> Tensor:
    """p+, the probability that a label is present; a label is predicted where p+ >= 0.5.

    "paired": softmax(z+, z-)[+]; "printed" and "msml": s(z+); "independent" predicts presence and absence separately,
    and p+ is the mean of s(z+) and 1 - s(z-).  Arguments as in `multilabel_cross_entropy`.

    >>> multilabel_probabilities(torch.tensor([[2.0]]), torch.tensor([[0.0]]))
    tensor([[0.8808]])
    """
    lam = checks.check_lam(lam)
    checks.check_form(form, x_pos, x_neg)
    x, mu, sigma = _outputs(x_pos, x_neg, form, gaussians, lam)
    z = x.to(checks.compute_dtype(x)) if mu is None or sigma is None else kernels.logits(x, mu, sigma, lam)
    return equations.label_probabilities(z, form)


def _outputs(
    x_pos: Tensor, x_neg: Tensor | None, form: str, gaussians: Sequence[Tensor | float] | None, lam: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x with all outputs, absence first, and mu and sigma (outputs,), or None without Gaussians."""
    x = x_pos if x_neg is None else torch.cat([x_neg, x_pos], -1)
    if gaussians is None:
        return x, None, None
    needed = ("mu", "sigma") if form == "msml" else ("mu_pos", "sigma_pos", "mu_neg", "sigma_neg")
    if len(gaussians) != len(needed):
        raise ValueError(f"gaussians must be ({', '.join(needed)}) for form={form!r}, got {len(gaussians)} values")
    mu, sigma = checks.as_gaussians(x_pos, gaussians[0], gaussians[1], lam)
    if x_neg is not None:
        absent = checks.as_gaussians(x_neg, gaussians[2], gaussians[3], lam)
        mu, sigma = torch.cat([absent[0], mu]), torch.cat([absent[1], sigma])
    checks.check_sigma(sigma)
    return x, mu, sigma


def large_margin_logits(
    h: Tensor, weight: Tensor, target: Tensor, margin: int, anneal: float | Tensor = 0.0, *, ignore_index: int = -100
) -> Tensor:
    """Logits of L-softmax (Liu et al. 2016): the margin reduces the target's logit; the others are unchanged.

    With n = |W_y||h|, theta the angle between W_y and h, k such that theta lies in [k pi / m, (k + 1) pi / m], and

        psi(theta) = (-1)^k cos(m theta) - 2k,

    the target's logit is (anneal * n cos(theta) + n psi(theta)) / (1 + anneal).

    h, weight: (N, D) features and (C, D), the linear layer without bias; the result is (N, C)
    target: (N,) class indices, `ignore_index` for rows without one
    margin: m, 1 to 4; 1 is plain softmax
    anneal: 0 is the full margin, a large value plain softmax
    ignore_index: as in `gsoftmax_cross_entropy`

    >>> h, weight = torch.tensor([[4.0, 3.0]]), torch.eye(2)
    >>> large_margin_logits(h, weight, torch.tensor([0]), margin=2)
    tensor([[1.4000, 3.0000]])
    """
    checks.check_margin(h, weight, target, margin, anneal, ignore_index)
    logits = F.linear(h, weight)
    if margin == 1:
        return logits
    target_logit = equations.margin_logits(h, weight, target, margin, anneal, ignore_index)
    return equations.with_target_logit(logits, target, target_logit, ignore_index)


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
    """Cross entropy of `large_margin_logits`; large inputs are computed one chunk of rows at a time.

    h: (..., D), features
    weight: (C, D), the linear layer
    target: class indices (...)
    margin, anneal: see `large_margin_logits`

    Other options as in `linear_gsoftmax_cross_entropy`.

    >>> h, weight = torch.tensor([[4.0, 3.0]]), torch.eye(2)
    >>> large_margin_cross_entropy(h, weight, torch.tensor([0]), margin=2)
    tensor(1.7839)
    """
    h, target, shape = checks.flatten_linear(h, weight, target, None)
    checks.check_margin(h, weight, target, margin, anneal, ignore_index)
    logit = None if margin == 1 else equations.margin_logits(h, weight, target, margin, anneal, ignore_index)
    mu, sigma = checks.as_gaussians_for(weight.shape[0], equations.linear_dtype(h), h.device, 0.0, 1.0, 0.0)
    options = Options(class_weight, ignore_index, reduction, label_smoothing)
    loss = kernels.linear_cross_entropy(Linear(h, weight, None, logit), target, mu, sigma, 0.0, options, impl)
    return loss.reshape(shape) if reduction == "none" else loss
