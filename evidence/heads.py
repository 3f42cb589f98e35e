"""Experimental heads, which are not part of the package."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gsoftmax.heads import GSoftmaxHead, SoftmaxHead


class Handicap(GSoftmaxHead):
    """G-softmax with the term on all classes except the target, z_t = x_t; z = x at test time.

    The term raises z where x is high, so that smaller differences of x suffice in training and classes move closer. On
    the other classes only, it acts like a margin that the target's x must overcome.

    >>> head = Handicap(4, 3, lam=2.0)
    >>> h, target = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> bool(head.loss(h, target) > F.cross_entropy(head(h), target))
    True
    """

    def forward(self, h: Tensor, target: Tensor | None = None) -> Tensor:  # (N, in_features) -> (N, classes)
        x = self.features(h)
        if target is None:
            return x
        own = torch.arange(x.shape[1], device=x.device) == target[:, None]
        return torch.where(own, x.float(), self.gaussians(x).float())

    def loss(self, h: Tensor, target: Tensor, **options: Any) -> Tensor:
        return F.cross_entropy(self(h, target), target, **options)

    def predict_proba(self, h: Tensor) -> Tensor:
        return torch.softmax(self(h), dim=1)


class Adjusted(SoftmaxHead):
    """Logit adjustment (Menon et al. 2021): trains on z + log class frequency, tests on z.

    Classes are counted during training, starting from one each.

    >>> head = Adjusted(4, 2)
    >>> h, target = torch.zeros(6, 4), torch.tensor([0, 0, 0, 0, 0, 1])
    >>> head.loss(h, target).ndim, head.seen
    (0, tensor([6., 2.]))
    """

    seen: Tensor

    def __init__(self, in_features: int, num_classes: int, **options: Any) -> None:
        super().__init__(in_features, num_classes, **options)
        self.register_buffer("seen", torch.ones(num_classes))

    def loss(self, h: Tensor, target: Tensor, **options: Any) -> Tensor:
        if self.training:
            self.seen.index_add_(0, target, torch.ones_like(target, dtype=self.seen.dtype))
        return F.cross_entropy(self(h).float() + (self.seen / self.seen.sum()).log(), target, **options)


class AdjustedG(Adjusted, GSoftmaxHead):
    """Logit adjustment with the z of G-softmax.

    >>> head = AdjustedG(4, 2, lam=4.0)
    >>> head.loss(torch.zeros(6, 4), torch.tensor([0, 0, 0, 0, 0, 1])).ndim, head.gaussians.lam
    (0, 4.0)
    """
