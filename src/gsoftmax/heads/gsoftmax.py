"""Linear layer and G-softmax cross entropy, with one Gaussian per output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks, functional
from ..gaussians import GaussianLogits
from ..layout import by_sign, spread_over_outputs
from .softmax import SoftmaxHead

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class GSoftmaxHead(SoftmaxHead):
    """Linear layer and G-softmax cross entropy: `SoftmaxHead` with a Gaussian for every output.

    Options of the Gaussians (lam, mu, sigma, gaussians, momentum, sigma_min, lr_mult) are those of `GaussianLogits`.

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
        shard: str | None = None,
        mesh: DeviceMesh | None = None,
        negatives: int | None = None,
        seed: int = 0,
        averaged: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **gaussian_options: Any,
    ) -> None:
        super().__init__(
            in_features, num_classes, bias=bias, form=form, impl=impl, shard=shard, mesh=mesh, negatives=negatives,
            seed=seed, averaged=averaged, device=device, dtype=dtype,
        )  # fmt: skip
        if form is not None:
            mu, sigma = (spread_over_outputs(v, num_classes, form) for v in (mu, sigma))
        options = dict(gaussian_options, lam=lam, mu=mu, sigma=sigma, gaussians=gaussians, device=device, dtype=dtype)
        self.gaussians: GaussianLogits
        if self.shard is not None:
            self.gaussians = self.shard.gaussians(**options)
        else:
            self.gaussians = GaussianLogits(self.out_features, **options)

    def reset_state(self) -> None:
        self.gaussians.reset_parameters()

    def forward(self, h: Tensor, target: Tensor | None = None) -> Tensor:
        if self.shard is not None:
            return self.shard.outputs(self, h)
        x = self.features(h)
        return self.gaussians(x.reshape(-1, self.out_features)).view(x.shape)

    def loss(self, h: Tensor, target: Tensor, **options: Any) -> Tensor:
        if self.form is not None or self.shard is not None:
            return super().loss(h, target, **options)
        g = self.gaussians
        if g.gaussians == "tracked" and self.training:
            # the step needs x itself, so the logits exist anyway
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
        """See `GaussianLogits.fit_gaussians`: batches of h."""
        rows = (batch[0] if isinstance(batch, (tuple, list)) else batch for batch in batches)
        if self.shard is not None:
            self.shard.fit_gaussians(self, rows)
            return self
        with torch.no_grad():
            self.gaussians.fit_gaussians(self.features(h).reshape(-1, self.out_features) for h in rows)
        return self
