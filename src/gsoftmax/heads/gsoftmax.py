"""Linear layer and G-softmax cross entropy, with one Gaussian per output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks, functional, kernels
from ..gaussians import GaussianLogits, first_items
from ..layout import by_sign, spread_over_outputs
from .softmax import SoftmaxHead


class GSoftmaxHead(SoftmaxHead):
    """G-softmax (Luo et al. 2020): softmax cross entropy of x plus a Gaussian term, with a Gaussian per output.

    in_features, num_classes, bias, form, impl, h and target as in `SoftmaxHead`; lam, mu, sigma, gaussians and
    gaussian_options (momentum, sigma_min, lr_mult, log_sigma) as in `GaussianLogits`.

    >>> head = GSoftmaxHead(16, 10, lam=1.0)
    >>> h, target = torch.zeros(4, 16), torch.tensor([1, 2, 3, 4])
    >>> head.loss(h, target).backward()
    >>> head.mu.shape, head.sigma.shape, head.gaussians.rho.grad.shape
    (torch.Size([10]), torch.Size([10]), torch.Size([10]))
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        lam: float = 1.0,
        mu: float | Sequence[float] | Tensor = 0.0,
        sigma: float | Sequence[float] | Tensor = 1.0,
        gaussians: str = "learned",
        bias: bool = True,
        form: str | None = None,
        impl: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **gaussian_options: Any,
    ) -> None:
        super().__init__(in_features, num_classes, bias=bias, form=form, impl=impl, device=device, dtype=dtype)
        mu, sigma = (spread_over_outputs(v, num_classes, form) for v in (mu, sigma))
        gaussian_options |= {"lam": lam, "mu": mu, "sigma": sigma, "gaussians": gaussians}
        self.gaussians = GaussianLogits(self.out_features, **gaussian_options, device=device, dtype=dtype)

    def reset_state(self) -> None:
        self.gaussians.reset_parameters()

    def forward(self, h: Tensor, target: Tensor | None = None) -> Tensor:
        x = self.features(h)
        return self.gaussians(x.reshape(-1, self.out_features)).view(x.shape)

    def loss(self, h: Tensor, target: Tensor, **options: Any) -> Tensor:
        g = self.gaussians
        tracking = g.gaussians == "tracked" and self.training
        if self.form is not None:
            if not tracking:
                return self._label_loss(h, target, g.mu, g.sigma, g.lam, options)
            given = checks.as_label_options(type(self).__name__, self.form, options)
            x = F.linear(h.reshape(-1, self.in_features), self.weight, self.bias)
            checks.check_multilabel((len(x), self.num_classes), target, given)
            return kernels.multilabel(x, target, *g.current(x), g.lam, given)
        if tracking:
            # tracking needs x, so the logits are computed anyway
            flat, rows, shape = checks.flatten_linear(h, self.weight, target, self.bias)
            x = F.linear(flat, self.weight, self.bias)
            mu, sigma = g.current(x, rows, options.get("ignore_index", -100))
            weight = options.pop("class_weight", None)
            loss = functional.gsoftmax_cross_entropy(
                x, rows, mu, sigma, g.lam, weight=weight, impl=self.impl, **options
            )
            return loss.view(shape) if loss.ndim else loss
        return functional.linear_gsoftmax_cross_entropy(
            h, self.weight, target, g.mu, g.sigma, g.lam, bias=self.bias, impl=self.impl, **options
        )

    def predict_proba(self, h: Tensor) -> Tensor:
        if self.form is not None:
            return super().predict_proba(h)
        x, g = self.features(h), self.gaussians
        return functional.gsoftmax(x.reshape(-1, self.out_features), g.mu, g.sigma, g.lam).view(x.shape)

    @property
    def lam(self) -> float:
        return self.gaussians.lam

    @lam.setter
    def lam(self, lam: float) -> None:
        self.gaussians.lam = lam

    @property
    def mu(self) -> Tensor:
        """(classes,), or (2, L) for a multi-label form of two outputs."""
        return by_sign(self.gaussians.mu, self.form)

    @property
    def sigma(self) -> Tensor:
        """(classes,), or (2, L) for a multi-label form of two outputs."""
        return by_sign(self.gaussians.sigma, self.form)

    def fit_gaussians(self, batches: Iterable[Any]) -> GSoftmaxHead:
        """Set mu and sigma from batches of h, as in `GaussianLogits.fit_gaussians`."""
        with torch.no_grad():
            x = (self.features(h).reshape(-1, self.out_features) for h in first_items(batches))
            self.gaussians.fit_gaussians(x)
        return self
