"""Focal loss (Lin et al. 2017): examples that are classified well count less."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks, equations
from .softmax import SoftmaxHead


class FocalHead(SoftmaxHead):
    """Focal loss (Lin et al. 2017) with softmax: -(1 - p_y)^gamma log p_y, where y is the true class.

    With a soft target q, which label smoothing makes too, the loss is the sum of -q_k (1 - p_k)^gamma log p_k over the
    classes.  alpha of the paper is the loss's option `class_weight`.

    in_features, num_classes, bias, h and target as in `SoftmaxHead`; it has no multi-label form
    gamma: 0 or more; 0 is softmax cross entropy, the authors use 2

    >>> head = FocalHead(4, 2, gamma=2.0, bias=False)
    >>> h, target = torch.zeros(1, 4), torch.tensor([0])
    >>> round(head.loss(h, target).item(), 4)  # log(2) / 4
    0.1733
    """

    multilabel = False
    needs_target = True

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        gamma: float = 2.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        gamma = checks.check_number("gamma", gamma)
        super().__init__(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.gamma = gamma

    def loss(self, h: Tensor, target: Tensor, **options: Any) -> Tensor:
        given = checks.as_options(type(self).__name__, options)
        flat, rows, shape = checks.flatten_linear(h, self.weight, target, self.bias)
        x = self.features(flat)
        checks.check_cross_entropy(x, rows, given)
        log_p = F.log_softmax(x.to(checks.compute_dtype(x)), 1)
        # 1 - p without cancellation where p is close to 1
        log_p = log_p * equations.focal_weight(-torch.expm1(log_p), self.gamma)
        loss = equations.negative_log_likelihood(log_p, rows, given)
        return equations.loss_dtype(loss.view(shape) if loss.ndim else loss, x)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, gamma={self.gamma:g}"
