"""Generalized cross entropy (Zhang and Sabuncu 2018), for wrong labels: hard examples count less."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import checks, equations
from .softmax import SoftmaxHead


class GCEHead(SoftmaxHead):
    """Generalized cross entropy (Zhang and Sabuncu 2018), for wrong labels: (1 - p_y^q) / q, where y is the label.

    The gradient of cross entropy is multiplied by p_y^q, so that labels that the model does not believe count little.
    With soft targets and label smoothing, -log p_y is their cross entropy.  In evaluation mode the loss is cross
    entropy.

    in_features, num_classes, bias, h and target as in `SoftmaxHead`; it has no multi-label form
    q: above 0, near which it is cross entropy, and at most 1, where it is the absolute error; the authors use 0.7

    >>> head = GCEHead(4, 2, q=0.5, bias=False)
    >>> h, target = torch.zeros(1, 4), torch.tensor([0])
    >>> round(head.loss(h, target).item(), 4)  # (1 - sqrt(1 / 2)) / 0.5
    0.5858
    """

    multilabel = False
    needs_target = True

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        q: float = 0.7,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        q = checks.check_number("q", q, 1.0, positive=True)
        super().__init__(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.q = q

    def loss(self, h: Tensor, target: Tensor, **options: Any) -> Tensor:
        if not self.training:
            return super().loss(h, target, **options)
        given = checks.as_options(type(self).__name__, options)
        flat, rows, shape = checks.flatten_linear(h, self.weight, target, self.bias)
        x = self.features(flat)
        checks.check_cross_entropy(x, rows, given)
        each = given._replace(weight=None, reduction="none")
        loss = (
            -torch.expm1(-self.q * equations.softmax_cross_entropy(x.to(checks.compute_dtype(x)), rows, each)) / self.q
        )
        if given.weight is not None:
            soft = rows.is_floating_point()
            loss = loss * (
                rows.to(loss.dtype) @ given.weight.to(loss.dtype) if soft else equations.row_weights(loss, rows, given)
            )
        loss = equations.reduce_rows(loss, rows, given)
        return equations.loss_dtype(loss.view(shape) if loss.ndim else loss, x)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, q={self.q:g}"
