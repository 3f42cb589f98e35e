"""Two small networks: a CNN for small images, an MLP for tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from .layers import GlobalPool, conv3x3, he_init, image_shape, optional_dropout


class SmallCNN(nn.Module):
    """A few stages of conv3x3, max pooling, BN and ReLU, then Linear-BN-ReLU: (N, C, H, W) -> (N, features).

    Pooling before normalization quarters the cost of what follows; the maximum commutes with ReLU, and with BN while
    its weight is positive. By default two stages (32, 64) up to 16x16, one more for every further doubling.
    `pool=None` flattens the last map, which keeps the position (a digit fills its image);
    "avg" and "max" discard it (several objects anywhere: mosaics). Images from 4x4.

    >>> SmallCNN((1, 8, 8))(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 64])
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        *,
        pool: str | None = None,
        widths: Sequence[int] | None = None,
        features: int = 64,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        channels, height, width = image_shape(input_shape, 4, "cnn")
        if widths is None:
            stages = max(2, math.ceil(math.log2(min(height, width) / 4)))
            widths = tuple(min(32 * 2**stage, 128) for stage in range(stages))
        if not widths or min(widths) < 1 or features < 1:
            raise ValueError(f"cnn widths and features must be positive, got {tuple(widths)} and {features}")
        if min(height, width) < 2 ** len(widths):
            most = f"{int(math.log2(min(height, width)))} stages for {height}x{width} images"
            raise ValueError(f"cnn widths must name at most {most}, got {len(widths)}")
        layers: list[nn.Module] = []
        for out in widths:
            layers += [conv3x3(channels, out), nn.MaxPool2d(2), nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
            channels, height, width = out, height // 2, width // 2
        layers += [nn.Flatten() if pool is None else GlobalPool(pool), *optional_dropout(dropout)]
        inputs = channels * height * width if pool is None else channels
        layers += [nn.Linear(inputs, features, bias=False), nn.BatchNorm1d(features), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*layers)
        self.num_features = features
        he_init(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:  # (N, C, H, W) -> (N, num_features)
        return self.layers(images)


class MLP(nn.Module):
    """Linear-BN-ReLU(-dropout) for every width in `hidden`: (N, d1, ...) -> (N, hidden[-1]); images are flattened.

    >>> MLP((294,), hidden=(128, 32))(torch.zeros(2, 294)).shape
    torch.Size([2, 32])
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        *,
        pool: str | None = None,
        hidden: Sequence[int] = (256, 128),
        batchnorm: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if pool is not None:
            raise ValueError(f"pool must be None for mlp (it has no image to pool), got {pool!r}")
        if not hidden or min(hidden) < 1:
            raise ValueError(f"mlp hidden must be one or more positive widths, got {tuple(hidden)}")
        layers: list[nn.Module] = [nn.Flatten()]
        inputs = math.prod(input_shape)
        for width in hidden:
            norm = [nn.BatchNorm1d(width)] if batchnorm else []
            layers += [nn.Linear(inputs, width, bias=not batchnorm), *norm, nn.ReLU(inplace=True)]
            layers += optional_dropout(dropout)
            inputs = width
        self.layers = nn.Sequential(*layers)
        self.num_features = inputs
        he_init(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (N, d1, ...) -> (N, num_features)
        return self.layers(x)
