"""CosFace (Wang et al. 2018): softmax on cosines, with a margin that is subtracted from the true class's cosine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import checks, equations
from .softmax import SoftmaxHead


class CosFaceHead(SoftmaxHead):
    """CosFace (Wang et al. 2018): x = scale cos(angle); in training the true class's cosine is reduced by the margin.

    The angle is that between h and the weights of a class, whose lengths do not matter.  There is no margin in
    evaluation mode, and none without a target.

    in_features, num_classes, h and target as in `SoftmaxHead`; it has no bias and no multi-label form
    scale: positive; None takes the smallest one at which a class can reach p = 0.999 (CosFace, equation 6), 8.2 for 10
        classes and 13.8 for 1,000; the authors use 64 for faces
    margin: 0 or more
    ignore_index: the target of rows that do not contribute

    >>> head = CosFaceHead(2, 2, scale=10.0, margin=0.35)
    >>> _ = head.weight.data.copy_(torch.eye(2))
    >>> head(torch.tensor([[3.0, 4.0]]), torch.tensor([1])).tolist()  # 10 * 0.6, 10 * (0.8 - 0.35)
    [[6.0..., 4.5...]]
    """

    has_bias = False
    multilabel = False
    reuses_weight = False
    needs_target = True

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        scale: float | None = None,
        margin: float = 0.35,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if scale is None:
            scale = equations.cosine_scale(num_classes)
        scale, margin = checks.check_number("scale", scale, positive=True), checks.check_number("margin", margin)
        super().__init__(in_features, num_classes, bias=False, device=device, dtype=dtype)
        self.scale, self.margin = scale, margin

    def linear_input(self, h: Tensor) -> Tensor:
        return equations.unit(h)

    def linear_weights(self) -> tuple[Tensor, Tensor | None]:
        return self.scale * equations.unit(self.weight.to(checks.compute_dtype(self.weight))), None

    def features(self, h: Tensor) -> Tensor:
        with torch.autocast(h.device.type, enabled=False):
            return super().features(h.to(checks.compute_dtype(h)))

    def forward(self, h: Tensor, target: Tensor | None = None, *, ignore_index: int = -100) -> Tensor:
        x = self.features(h)
        if target is None or not self.training:
            return x
        flat, rows, _ = checks.flatten_linear(h, self.weight, target, None)
        checks.check_true_classes(flat, rows, self.num_classes, ignore_index)
        z = x.reshape(-1, self.num_classes)
        logit = self.with_margin(equations.target_logits(z, rows, ignore_index))
        return equations.with_target_logit(z, rows, logit, ignore_index).view(x.shape)

    def with_margin(self, x: Tensor) -> Tensor:
        """The true class's x with the margin."""
        return x - self.scale * self.margin

    def loss(self, h: Tensor, target: Tensor, **options: Any) -> Tensor:
        return self._cross_entropy(h, target, options)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scale={self.scale:g}, margin={self.margin:g}"
