"""Softmax that counts an example by how plausible its label is, for training data with wrong labels."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .. import checks, equations
from .softmax import SoftmaxHead

_LEAST = 1e-6  # of a weight: no label is without any
_SMALLEST = 1e-4  # variance


class PlausibleHead(SoftmaxHead):
    """Softmax that weights examples by how plausible their labels are, for training data with wrong labels.

    Every class y has two Gaussians of its output x_y: over the training examples with the label (own), and over all
    others (impostors).  The weight of an example in the loss is the probability that its x_y is one of the own,

        w = prior N(x_y; own) / (prior N(x_y; own) + (1 - prior) N(x_y; impostors)),

    and 1 where x_y is above the own mean.  Both Gaussians follow the batches, and weights begin after `warmup` of them,
    when x means something.  The mean of the loss divides by the sum of the weights.  With soft targets, w is the mean
    over the classes.  In evaluation mode the loss is cross entropy.

    in_features, num_classes, bias, h and target as in `SoftmaxHead`; it has no multi-label form
    prior: probability that a label is right, between 0 and 1; near 1 all weights are 1, as in softmax
    warmup: batches, 0 or more
    momentum: weight of a batch in the running Gaussians, above 0 and at most 1

    >>> head = PlausibleHead(2, 2, warmup=0)
    >>> _ = head.weight.data.copy_(torch.eye(2)), head.bias.data.zero_()
    >>> h = torch.tensor([[3.0, 0.0], [2.0, 0.0], [0.0, 2.0], [0.0, 3.0], [0.0, 2.5]])
    >>> target = torch.tensor([0, 0, 1, 1, 0])
    >>> _ = [head.loss(h, target) for _ in range(2)]
    >>> (head.plausibility(h, target) > 0.5).tolist()  # the last label looks wrong
    [True, True, True, True, False]
    """

    multilabel = False
    needs_target = True

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        prior: float = 0.5,
        warmup: int = 50,
        momentum: float = 0.05,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        prior = checks.check_number("prior", prior, 1.0, positive=True)
        if prior == 1:
            raise ValueError("prior must be below 1, where all labels count alike: use softmax")
        momentum = checks.check_number("momentum", momentum, 1.0, positive=True)
        if type(warmup) is not int or warmup < 0:
            raise ValueError(f"warmup must be a whole number, 0 or more, got {warmup!r}")
        super().__init__(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.prior, self.warmup, self.momentum = prior, warmup, momentum
        self.running: Tensor
        self.batches: Tensor
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        # own and impostors; mean, variance, and whether there was an example
        self.register_buffer("running", torch.empty(2, 3, num_classes, device=device, dtype=wide))
        self.register_buffer("batches", torch.empty((), device=device, dtype=wide))
        self.reset_state()

    def reset_state(self) -> None:
        self.running.zero_()
        self.running[:, 1] = 1
        self.batches.zero_()

    @torch.no_grad()
    def plausibility(self, h: Tensor, target: Tensor) -> Tensor:
        """The probability that each label is right, (N,): small where it looks wrong."""
        flat, rows, shape = checks.flatten_linear(h, self.weight, target, self.bias)
        x = self.features(flat).to(self.running.dtype)
        checks.check_cross_entropy(x, rows, checks.Options())
        found = self._weigh(x, equations.label_columns(rows, -100, self.num_classes)[:, None])
        return found[:, 0].view(shape)

    def _weigh(self, x: Tensor, columns: Tensor) -> Tensor:
        """w of some labels of every row; x (N, C), columns and the result (N, K)."""
        value = x.gather(1, columns)
        odds = torch.full_like(value, math.log(self.prior / (1 - self.prior)))
        for (mean, var, _), sign in zip(self.running, (-0.5, 0.5), strict=True):
            spread = var.clamp_min(_SMALLEST)[columns]
            odds = odds + sign * ((value - mean[columns]) ** 2 / spread + spread.log())
        w = torch.where(value > self.running[0, 0][columns], 1.0, torch.sigmoid(odds))
        return w.clamp_min(_LEAST)

    def _follow(self, x: Tensor, q: Tensor, known: Tensor) -> None:
        """One step of both Gaussians towards a batch: mean and variance of a mixture, with weight `momentum`."""
        sides = torch.stack([q, known[:, None] - q])
        d = x - self.running[:, :1]  # (2, N, C)
        sums = torch.stack([sides.sum(1), (sides * d).sum(1), (sides * d * d).sum(1)])
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(sums)
        n, shift, square = sums[0], sums[1] / sums[0].clamp_min(1), sums[2] / sums[0].clamp_min(1)
        _, var, seen = self.running.unbind(1)
        rate = torch.where(n == 0, 0.0, torch.where(seen == 0, torch.ones_like(seen), self.momentum))
        self.running[:, 1] = torch.where(n == 0, var, (1 - rate) * var + rate * (square - rate * shift**2))
        self.running[:, 0] += rate * shift
        self.running[:, 2] = torch.maximum(seen, (n > 0).to(seen.dtype))
        self.batches += 1

    def loss(self, h: Tensor, target: Tensor, **options: Any) -> Tensor:
        if not self.training:
            return super().loss(h, target, **options)
        given = checks.as_options(type(self).__name__, options)
        flat, rows, shape = checks.flatten_linear(h, self.weight, target, self.bias)
        x = self.features(flat)
        checks.check_cross_entropy(x, rows, given)
        loss = equations.softmax_cross_entropy(x.to(checks.compute_dtype(x)), rows, given._replace(reduction="none"))
        w = self._weights(x.detach(), rows, given.ignore_index, torch.is_grad_enabled()).to(loss.dtype)
        loss = w * loss
        if given.reduction == "mean":
            of_rows = w if rows.is_floating_point() else w * equations.row_weights(loss, rows, given)
            loss = loss.sum() / of_rows.sum()
        elif given.reduction == "sum":
            loss = loss.sum()
        return equations.loss_dtype(loss.view(shape) if loss.ndim else loss, x)

    @torch.no_grad()
    def _weights(self, x: Tensor, target: Tensor, ignore_index: int, follow: bool) -> Tensor:
        """The weight of every row in the loss; then both Gaussians take their step, where they follow."""
        x = x.to(self.running.dtype)
        if target.is_floating_point():
            q, known = target.to(x.dtype), x.new_ones(len(x))
            w = (q * self._weigh(x, torch.arange(x.shape[1], device=x.device).expand_as(x))).sum(1)
        else:
            known, columns = (
                (target != ignore_index).to(x.dtype),
                equations.label_columns(target, ignore_index, x.shape[1]),
            )
            q = F.one_hot(columns, x.shape[1]) * known[:, None]
            w = self._weigh(x, columns[:, None])[:, 0]
        w = torch.where(self.batches >= self.warmup, w, 1.0)
        if follow:
            self._follow(x, q, known)
        return w

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, prior={self.prior:g}, warmup={self.warmup}, momentum={self.momentum:g}"
