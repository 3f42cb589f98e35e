"""Experimental heads, which are not part of the package."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gsoftmax.heads import GSoftmaxHead, SoftmaxHead


class CDFMargin(GSoftmaxHead):
    """G-softmax with a margin in the term: z_y = x_y + lam Phi((x_y - mu_y) / sigma_y - m) in training, x at test time.

    The term raises z where x is high, so that smaller differences of x suffice in training and classes move closer.
    The margin takes part of it, or at m = inf all of it, from the true class y.  p is the softmax of x.

    m: margin in units of sigma, 0 or more; inf leaves z_y = x_y

    >>> h, target = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> losses = [CDFMargin(4, 3, m=m) for m in (0.0, 1.0, "inf")]
    >>> _ = [head.load_state_dict(losses[0].state_dict()) for head in losses]
    >>> values = [head.loss(h, target).item() for head in losses]
    >>> z = losses[0].gaussians(losses[0].features(h))
    >>> values == sorted(values), torch.allclose(losses[0](h, target), z, atol=1e-5)
    (True, True)
    """

    def __init__(self, in_features: int, num_classes: int, *, m: float | str = 1.0, **options: Any) -> None:
        super().__init__(in_features, num_classes, **options)
        self.m = float(m)

    def forward(self, h: Tensor, target: Tensor | None = None) -> Tensor:  # (N, in_features) -> (N, classes)
        x = self.features(h)
        if target is None:
            return x
        z, x = self.gaussians(x).float(), x.float()
        mu, sigma = self.gaussians.mu.float()[target], self.gaussians.sigma.float()[target]
        own = x.gather(1, target[:, None])[:, 0]
        own = own + self.gaussians.lam * torch.special.ndtr((own - mu) / sigma - self.m)
        return z.scatter(1, target[:, None], own[:, None])

    def loss(self, h: Tensor, target: Tensor, **options: Any) -> Tensor:
        return F.cross_entropy(self(h, target), target, **options)

    def predict_proba(self, h: Tensor) -> Tensor:
        return torch.softmax(self(h), dim=1)


class Handicap(CDFMargin):
    """The margin of infinity: the term on all classes except the target.

    >>> h, target = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> head = Handicap(4, 3, lam=2.0)
    >>> torch.equal(head(h, target)[0, 0], head(h)[0, 0])
    True
    """

    def __init__(self, in_features: int, num_classes: int, **options: Any) -> None:
        super().__init__(in_features, num_classes, m=math.inf, **options)


class FreeBias(SoftmaxHead):
    """Softmax with one more bias per class, which has no weight decay and is dropped at test time.

    decay: the optimizer's weight decay, whose effect on this bias the loss cancels (SGD)

    >>> head = FreeBias(4, 2)
    >>> head.free.data += torch.tensor([1.0, 0.0])
    >>> h, target = torch.zeros(1, 4), torch.tensor([0])
    >>> bool(head.loss(h, target) < F.cross_entropy(head(h), target)), head.predict_proba(h).shape
    (True, torch.Size([1, 2]))
    """

    def __init__(self, in_features: int, num_classes: int, *, decay: float = 2e-3, **options: Any) -> None:
        super().__init__(in_features, num_classes, **options)
        self.decay, self.free = decay, torch.nn.Parameter(torch.zeros(num_classes))

    def loss(self, h: Tensor, target: Tensor, **options: Any) -> Tensor:
        loss = F.cross_entropy(self(h).float() + self.free, target, **options)
        return loss - self.decay / 2 * (self.free**2).sum()


class Suspicious(SoftmaxHead):
    """Softmax whose loss weights every example by how plausible its label is under the class's two Gaussians.

    For every class, running means and deviations of its x over the examples with that label (own) and over the others
    (impostors).  The weight is the posterior that x_y is one of the own, with `prior` for a correct label.  It starts
    after `warmup` batches, when the Gaussians mean something.

    momentum: of the running statistics

    >>> head = Suspicious(2, 2, warmup=0, momentum=1.0)
    >>> h, target = torch.randn(64, 2), torch.tensor([0, 1] * 32)
    >>> loss, weight = head.loss(h, target), head.weigh(head(h), target)
    >>> weight.shape, bool((weight > 0).all() and (weight <= 1).all())
    (torch.Size([64]), True)
    """

    own: Tensor
    other: Tensor
    batches: Tensor

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        prior: float = 0.5,
        warmup: int = 50,
        momentum: float = 0.05,
        **options: Any,
    ) -> None:
        super().__init__(in_features, num_classes, **options)
        self.prior, self.warmup, self.momentum = prior, warmup, momentum
        self.register_buffer("own", torch.tensor([[0.0], [0.0], [1.0]]).repeat(1, num_classes))  # count, mean, square
        self.register_buffer("other", torch.tensor([[0.0], [0.0], [1.0]]).repeat(1, num_classes))
        self.register_buffer("batches", torch.zeros(()))

    @torch.no_grad()
    def weigh(self, x: Tensor, target: Tensor) -> Tensor:
        """The posterior of every label, (N,)."""
        value = x.float().gather(1, target[:, None])[:, 0]
        log_odds = math.log(self.prior / (1 - self.prior))
        for (_, mean, square), sign in ((self.own, 1.0), (self.other, -1.0)):
            var = (square - mean**2).clamp_min(1e-4)[target]
            log_odds = log_odds - sign * 0.5 * ((value - mean[target]) ** 2 / var + var.log())
        # beyond the own mean a label is as plausible as at it
        return torch.where(value > self.own[1][target], torch.ones_like(value), torch.sigmoid(log_odds))

    @torch.no_grad()
    def follow(self, x: Tensor, target: Tensor) -> None:
        x, hot = x.float(), F.one_hot(target, x.shape[1]).float()
        for held, mask in ((self.own, hot), (self.other, 1 - hot)):
            count = mask.sum(0)
            new = torch.stack(
                [count, (mask * x).sum(0) / count.clamp_min(1), (mask * x * x).sum(0) / count.clamp_min(1)]
            )
            rate = torch.where(count == 0, 0.0, torch.where(held[0] == 0, 1.0, self.momentum))
            held.lerp_(new, rate.expand_as(held))
        self.batches += 1

    def loss(self, h: Tensor, target: Tensor, **options: Any) -> Tensor:
        x = self(h)
        if not self.training:
            return F.cross_entropy(x, target, **options)
        weight = torch.where(self.batches >= self.warmup, self.weigh(x, target), torch.ones_like(x[:, 0]))
        self.follow(x.detach(), target)
        return (weight * F.cross_entropy(x, target, reduction="none", **options)).sum() / weight.sum()


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
