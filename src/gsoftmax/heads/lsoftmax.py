"""L-softmax (Liu et al. 2016): a margin between the true class and the others while training."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import checks, functional
from .softmax import SoftmaxHead


class LSoftmaxHead(SoftmaxHead):
    """L-softmax (Liu et al. 2016): no bias, and in training the margin multiplies the angle of the true class.

    The margin is annealed, because training collapses if it is applied in full from the first step: its weight
    1 / (1 + A) in `large_margin_logits` grows geometrically over the first training steps, which are counted in the
    module and saved with it.  There is no margin in evaluation mode, and none without a target.

    in_features, num_classes, impl, h and target as in `SoftmaxHead`; it has no multi-label form
    margin: 1 (no margin), 2, 3 or 4
    anneal_start, anneal_end, anneal_steps: A at the first step, at the last one, and the number of steps between
    ignore_index: the target of rows without a margin

    >>> head = LSoftmaxHead(16, 10, margin=2)
    >>> h, target = torch.randn(4, 16), torch.tensor([1, 2, 3, 4])
    >>> loss = head.loss(h, target)
    >>> int(head.steps), round(head.anneal)
    (1, 999)
    """

    has_bias = False
    multilabel = False
    needs_target = True
    _version = 1

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        margin: int = 2,
        anneal_start: float = 1000.0,
        anneal_end: float = 0.0,
        anneal_steps: int = 10_000,
        form: str | None = None,
        impl: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if margin not in (1, 2, 3, 4) or isinstance(margin, bool):
            raise ValueError(f"margin must be 1, 2, 3 or 4, got {margin!r}")
        for name, v in (("anneal_start", anneal_start), ("anneal_end", anneal_end)):
            if not 0 <= v < math.inf:
                raise ValueError(f"{name} must be 0 or more and finite, got {v!r}")
        if anneal_steps < 1:
            raise ValueError(f"anneal_steps must be 1 or more, got {anneal_steps!r}")
        super().__init__(in_features, num_classes, bias=False, form=form, impl=impl, device=device, dtype=dtype)
        self.margin = margin
        self.anneal_start = anneal_start
        self.anneal_end = anneal_end
        self.anneal_steps = anneal_steps
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=device))

    @classmethod
    def defaults(cls, steps: int) -> dict[str, Any]:
        """The full margin is reached after nine tenths of the training."""
        return {"anneal_steps": max(1, round(0.9 * steps))}

    def reset_state(self) -> None:
        self.steps.zero_()

    def _anneal(self) -> Tensor:
        done = (self.steps / self.anneal_steps).clamp(max=1.0)
        start, end = math.log1p(self.anneal_start), math.log1p(self.anneal_end)
        return torch.expm1(start + (end - start) * done).clamp_min(0.0)

    @property
    def anneal(self) -> float:
        """A at the next training step."""
        return float(self._anneal())

    def forward(self, h: Tensor, target: Tensor | None = None, *, ignore_index: int = -100) -> Tensor:
        if target is None or not self.training:
            return self.features(h)
        flat, rows, shape = checks.flatten_linear(h, self.weight, target, None)
        z = functional.large_margin_logits(
            flat, self.weight, rows, self.margin, self._anneal(), ignore_index=ignore_index
        )
        if torch.is_grad_enabled():
            self.steps += 1
        return z.view(*shape, self.num_classes)

    def loss(self, h: Tensor, target: Tensor, **options: Any) -> Tensor:
        if not self.training:
            return super().loss(h, target, **options)
        loss = functional.large_margin_cross_entropy(
            h, self.weight, target, self.margin, self._anneal(), impl=self.impl, **options
        )
        if torch.is_grad_enabled():
            self.steps += 1
        return loss

    def extra_repr(self) -> str:
        anneal = f"{self.anneal_start:g} to {self.anneal_end:g} in {self.anneal_steps} steps"
        return f"{self.in_features}, {self.num_classes}, margin={self.margin}, anneal {anneal}"
