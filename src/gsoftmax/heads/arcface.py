"""ArcFace (Deng et al. 2019): softmax on cosines, with a margin that is added to the true class's angle."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import checks
from .cosface import CosFaceHead


class ArcFaceHead(CosFaceHead):
    """ArcFace (Deng et al. 2019): x = scale cos(angle); in training the margin is added to the true class's angle.

    theta is the angle between h and the weights of a class, whose lengths do not matter.
    cos(theta + margin) would grow again where theta + margin exceeds pi; there it continues as cos(theta) - margin
    sin(margin), which decreases everywhere, as in the authors' code.  There is no margin in evaluation mode, and none
    without a target.

    in_features, num_classes, h and target as in `SoftmaxHead`; it has no bias and no multi-label form
    scale: positive; None takes the smallest one at which a class can reach p = 0.999 (CosFace, equation 6), 8.2 for 10
        classes and 13.8 for 1,000; the authors use 64 for faces
    margin: in radians, 0 to pi
    ignore_index: the target of rows that do not contribute

    >>> head = ArcFaceHead(2, 2, scale=10.0, margin=0.5)
    >>> _ = head.weight.data.copy_(torch.eye(2))
    >>> z = head(torch.tensor([[3.0, 4.0]]), torch.tensor([1]))  # 10 * 0.6, 10 * cos(acos(0.8) + 0.5)
    >>> [round(value, 3) for value in z[0].tolist()]
    [6.0, 4.144]
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        scale: float | None = None,
        margin: float = 0.5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        margin = checks.check_number("margin", margin, math.pi)
        super().__init__(in_features, num_classes, scale=scale, margin=margin, device=device, dtype=dtype)

    def with_margin(self, x: Tensor) -> Tensor:
        cos = x / self.scale
        # The slope of the sine in the cosine is infinite at theta = 0 and pi, and rounding may leave a cosine beyond 1:
        # below the resolution of the dtype the sine is constant.
        sin = (1 - cos * cos).clamp_min(torch.finfo(cos.dtype).eps).sqrt()
        added = cos * math.cos(self.margin) - sin * math.sin(self.margin)
        return self.scale * torch.where(cos > -math.cos(self.margin), added, cos - self.margin * math.sin(self.margin))
