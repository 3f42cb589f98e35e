"""TensorBoard: what the Gaussians of a model are doing while it trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..gaussians import GaussianLogits

__all__ = ["log_gaussians"]


@torch.no_grad()
def log_gaussians(writer: Any, model: nn.Module, step: int, prefix: str = "gsoftmax") -> None:
    """Histograms of mu and sigma of every G-softmax module in `model`, and their means as scalars.

    The gradients of mu and rho get histograms too where there are any, so call it between `backward` and `zero_grad`
    to see them.  Tags are prefix, the place in the model and the quantity, as in gsoftmax/fc/sigma and
    gsoftmax/fc/sigma_mean.  Values that are not finite are left out of a histogram, and show in the mean.

    writer: a `torch.utils.tensorboard.SummaryWriter`, or anything with its add_histogram and add_scalar.

    >>> class Printer:
    ...     def add_histogram(self, tag, values, step): print(tag, len(values), step)
    ...     def add_scalar(self, tag, value, step): print(tag, round(value, 3), step)
    >>> log_gaussians(Printer(), GaussianLogits(3, mu=0.5, sigma=2.0), step=7)
    gsoftmax/mu 3 7
    gsoftmax/mu_mean 0.5 7
    gsoftmax/sigma 3 7
    gsoftmax/sigma_mean 2.0 7
    """
    found = [(path, m) for path, m in model.named_modules() if isinstance(m, GaussianLogits)]
    if not found:
        raise ValueError(f"model must hold at least one G-softmax module, got {type(model).__name__} without any")
    for path, module in found:
        place = "".join(f"{part}/" for part in (prefix, path.removesuffix("gaussians").rstrip(".")) if part)
        for name, values in (("mu", module.mu), ("sigma", module.sigma)):
            _histogram(writer, f"{place}{name}", values, step)
            writer.add_scalar(f"{place}{name}_mean", float(values.double().mean()), step)
        for name, parameter in (("mu_grad", module.mu), ("rho_grad", module.rho)):
            if parameter.grad is not None:
                _histogram(writer, f"{place}{name}", parameter.grad, step)


def _histogram(writer: Any, tag: str, values: Tensor, step: int) -> None:
    values = values.detach().cpu()
    values = values[torch.isfinite(values)]
    if len(values):
        writer.add_histogram(tag, values, step)
