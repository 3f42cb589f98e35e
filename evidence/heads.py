"""Heads that are tried out here and are not in the package."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gsoftmax.heads import GSoftmaxHead, SoftmaxHead


class Handicap(GSoftmaxHead):
    """G-softmax whose term sees the label: the label's own class goes without it, z_t = x_t, and tests have z = x.

    The term lifts z where x is high, so that training is content with smaller differences of x: classes come closer.
    Given to the other classes alone it is a lead that the label's x must make up for, as a margin would be.

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
    """Softmax made for unequal classes: trained on z + log of how frequent a class is, tested on z (Menon et al. 2021).

    What every class has in advance, z need not learn.  Classes are counted as they come by in training, from one each.

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
    """The same with the z of G-softmax.

    >>> head = AdjustedG(4, 2, lam=4.0)
    >>> head.loss(torch.zeros(6, 4), torch.tensor([0, 0, 0, 0, 0, 1])).ndim, head.gaussians.lam
    (0, 4.0)
    """
