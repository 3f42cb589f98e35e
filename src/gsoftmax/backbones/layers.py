"""Pooling, initialization and argument checks that several networks share."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn


class GlobalPool(nn.Module):
    """Average (GAP) or maximum (GMP) of every channel over the image.

    h_d = mean or max over (i, j) of a_(d, i, j); shapes (N, D, H, W) -> (N, D).

    >>> GlobalPool("max")(torch.tensor([[[[1.0, 5.0], [2.0, 0.0]]]]))
    tensor([[5.]])
    """

    def __init__(self, pool: str = "avg") -> None:
        super().__init__()
        if pool not in ("avg", "max"):
            raise ValueError(f"pool must be avg or max, got {pool!r}")
        self.pool = pool

    def forward(self, a: torch.Tensor) -> torch.Tensor:  # (N, D, H, W) -> (N, D)
        # Reductions rather than adaptive pooling layers: their backward is deterministic on GPUs too.
        return a.amax((2, 3)) if self.pool == "max" else a.mean((2, 3))

    def extra_repr(self) -> str:
        return self.pool


def conv3x3(channels_in: int, channels_out: int, stride: int = 1) -> nn.Conv2d:
    """A 3x3 convolution that keeps the image size, without bias: batch normalization precedes or follows it."""
    return nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)


def he_init(network: nn.Module) -> None:
    """He et al.'s initialization for ReLU networks, drawn from the global generator.

    Convolutions N(0, 2 / (k² channels_out)): the fan-out form of the original VGG, WRN and DenseNet code for CIFAR.
    Linear layers N(0, 2 / in_features), the fan-in form; biases 0. Normalization layers keep weight 1 and bias 0.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            mode: Literal["fan_out", "fan_in"] = "fan_out" if isinstance(module, nn.Conv2d) else "fan_in"
            nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def image_shape(input_shape: tuple[int, ...], smallest: int, network: str) -> tuple[int, int, int]:
    """(channels, height, width), checked against the smallest image side that a network accepts."""
    if len(input_shape) != 3:
        raise ValueError(f"input_shape of {network} must be (channels, height, width), got {tuple(input_shape)}")
    channels, height, width = input_shape
    if min(height, width) < smallest:
        raise ValueError(f"input_shape of {network} must be at least {smallest}x{smallest}, got {height}x{width}")
    return channels, height, width


def check_dropout(dropout: float) -> None:
    """Raise unless it is a rate in [0, 1)."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")


def optional_dropout(dropout: float) -> list[nn.Module]:
    """A dropout layer, or none for the rate 0."""
    check_dropout(dropout)
    return [nn.Dropout(dropout)] if dropout > 0 else []
