"""VGG-16 (Simonyan & Zisserman 2015) in the form used on 32x32 images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .layers import GlobalPool, check_dropout, conv3x3, he_init, image_shape

STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # (channels, convolutions); a 2x2 max pooling ends each


class VGG16(nn.Module):
    """13 3x3 convolutions with batch normalization, then fully connected 512-512; with the head, 16 weight layers.

    The ImageNet original ends in 4096-4096 on a 7x7 map; on CIFAR the five poolings leave 1x1x512 and the usual
    classifier is Dropout-Linear(512)-ReLU twice, as in `hidden` (empty: only the convolutions).
    Convolutions have no bias, since batch normalization follows. Parameters for three channels: 14,718,912 in the
    convolutional part, 525,312 in the hidden layers. Images above 32x32 are pooled to 1x1 by `pool`.

    (N, C, H, W) -> (N, 512); H and W at least 32.

    >>> VGG16((3, 32, 32))(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 512])
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        *,
        pool: str | None = None,
        hidden: Sequence[int] = (512, 512),
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        channels, _, _ = image_shape(input_shape, 32, "vgg16")
        check_dropout(dropout)
        layers: list[nn.Module] = []
        for width, repeats in STAGES:
            for _ in range(repeats):
                layers += [conv3x3(channels, width), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.convolutions = nn.Sequential(*layers)
        self.pool = GlobalPool(pool or "avg")
        layers = []
        for width in hidden:
            layers += [nn.Dropout(dropout), nn.Linear(channels, width), nn.ReLU(inplace=True)]
            channels = width
        self.hidden = nn.Sequential(*layers)
        self.num_features = channels
        he_init(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:  # (N, C, H, W) -> (N, num_features)
        return self.hidden(self.pool(self.convolutions(images)))
