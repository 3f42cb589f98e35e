"""Logit adjustment (Menon et al. 2021): the class frequencies are added to x while training."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import checks
from .softmax import SoftmaxHead


class AdjustedHead(SoftmaxHead):
    """Logit adjustment (Menon et al. 2021): softmax cross entropy of x + tau log prior in training, of x at test time.

    With pi the class frequencies of the training data, x then ranks classes as if all were equally frequent, which
    minimizes the balanced error.  pi is uniform, and the head plain softmax, until `fit_prior`, which `gsoftmax train`
    and `gsoftmax compare` call.

    in_features, num_classes, bias, h and target as in `SoftmaxHead`; it has no multi-label form
    tau: weight of log pi, 0 or more; the authors' 1 is consistent for the balanced error
    counts: (C,), training examples of every class
    ignore_index: as in `gsoftmax_cross_entropy`; it does not affect z

    >>> head = AdjustedHead(4, 2).fit_prior(torch.tensor([90, 10]))
    >>> h, target = torch.zeros(1, 4), torch.tensor([0])
    >>> (head(h, target) - head(h)).tolist()  # log 0.9 and log 0.1
    [[-0.105..., -2.302...]]
    """

    multilabel = False
    needs_target = True

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        tau: float = 1.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        tau = checks.check_number("tau", tau)
        super().__init__(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.tau = tau
        self.log_prior: Tensor
        self.register_buffer("log_prior", torch.empty(num_classes, device=device, dtype=dtype))
        self.reset_state()

    def reset_state(self) -> None:
        self.log_prior.fill_(-math.log(self.num_classes))

    @torch.no_grad()
    def fit_prior(self, counts: Tensor) -> AdjustedHead:
        """Set pi from the class counts of the training data; a class without examples counts as one example."""
        if counts.shape != (self.num_classes,):
            raise ValueError(
                f"counts must have shape ({self.num_classes},), one for each class, got {tuple(counts.shape)}"
            )
        counts = counts.to(self.log_prior.device, torch.float64)
        if not bool(((counts >= 0) & counts.isfinite()).all()):
            raise ValueError(f"counts must be 0 or more and finite, got a minimum of {counts.min().item():g}")
        counts = torch.where(counts == 0, 1.0, counts)
        self.log_prior.copy_((counts / counts.sum()).log())
        return self

    def forward(self, h: Tensor, target: Tensor | None = None, *, ignore_index: int = -100) -> Tensor:
        x = self.features(h)
        if target is None or not self.training:
            return x
        dtype = checks.compute_dtype(x)
        return x.to(dtype) + self.tau * self.log_prior.to(dtype)

    def loss(self, h: Tensor, target: Tensor, **options: Any) -> Tensor:
        return self._cross_entropy(h, target, options) if self.training else super().loss(h, target, **options)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, tau={self.tau:g}"
