"""TensorBoard: log the Gaussians of a model during training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..gaussians import named_gaussians

__all__ = ["log_gaussians"]


@torch.no_grad()
def log_gaussians(writer: Any, model: nn.Module, step: int, prefix: str = "gsoftmax") -> None:
    """Log histograms of mu and sigma of every G-softmax module in `model`, and their means as scalars.

    Gradients of mu and rho get histograms too if they exist: call it between `backward` and `zero_grad`.  Tags are made
    of prefix, module and quantity, as in gsoftmax/fc/sigma and gsoftmax/fc/sigma_mean.  Values that are not finite are
    left out of histograms but not of the means.

    writer: a `torch.utils.tensorboard.SummaryWriter`, or anything with its add_histogram and add_scalar
    model: any model with a G-softmax module inside
    step: number of the training step
    prefix: of the tags

    >>> class Printer:
    ...     def add_histogram(self, tag, values, step): print(tag, len(values), step)
    ...     def add_scalar(self, tag, value, step): print(tag, round(value, 3), step)
    >>> from gsoftmax import GaussianLogits
    >>> log_gaussians(Printer(), GaussianLogits(3, mu=0.5, sigma=2.0), step=7)
    gsoftmax/mu 3 7
    gsoftmax/mu_mean 0.5 7
    gsoftmax/sigma 3 7
    gsoftmax/sigma_mean 2.0 7
    """
    found = named_gaussians(model)
    if not found:
        raise ValueError(f"model must contain at least one G-softmax module, got {type(model).__name__} without any")
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
