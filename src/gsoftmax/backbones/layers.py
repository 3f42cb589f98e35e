"""What several networks share: the last pooling, the initialisation, the checks of their arguments."""

from __future__ import annotations

import torch
from torch import nn

POOLS = ("avg", "max")


class GlobalPool(nn.Module):
    """Average (GAP) or maximum (GMP) of every channel over the image.

    h_d = mean or max over (i, j) of a_(d, i, j); shapes (N, D, H, W) -> (N, D).

    >>> GlobalPool("max")(torch.tensor([[[[1.0, 5.0], [2.0, 0.0]]]]))
    tensor([[5.]])
    """

    def __init__(self, pool: str = "avg") -> None:
        super().__init__()
        if pool not in POOLS:
            raise ValueError(f"pool must be one of {', '.join(POOLS)}, got {pool!r}")
        self.pool = pool

    def forward(self, a: torch.Tensor) -> torch.Tensor:  # (N, D, H, W) -> (N, D)
        # Reductions rather than adaptive pooling layers: their backward is deterministic on GPUs too.
        return a.amax((2, 3)) if self.pool == "max" else a.mean((2, 3))

    def extra_repr(self) -> str:
        return self.pool


def conv3x3(channels_in: int, channels_out: int, stride: int = 1) -> nn.Conv2d:
    """The 3x3 convolution of all these networks: size kept, no bias (a batch normalisation follows or precedes)."""
    return nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)


def he_init(network: nn.Module) -> None:
    """He et al.'s initialisation for ReLU networks, drawn from the global generator.

    Convolutions N(0, 2 / (k² channels_out)): the fan-out form of the original VGG, WRN and DenseNet code for CIFAR.
    Linear layers N(0, 2 / in_features), the fan-in form; biases 0. Normalisation layers keep weight 1 and bias 0.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
        else:
            continue
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def image_shape(input_shape: tuple[int, ...], smallest: int, network: str) -> tuple[int, int, int]:
    """(channels, height, width) of an image network, or a ValueError that says what it takes."""
    if len(input_shape) != 3:
        raise ValueError(f"input_shape of {network} must be (channels, height, width), got {tuple(input_shape)}")
    channels, height, width = input_shape
    if min(height, width) < smallest:
        raise ValueError(f"input_shape of {network} must be at least {smallest}x{smallest}, got {height}x{width}")
    return channels, height, width


def probability(value: float, name: str) -> float:
    """A dropout rate in [0, 1)."""
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value}")
    return float(value)
