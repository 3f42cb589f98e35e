"""Wide residual networks (Zagoruyko & Komodakis 2016), pre-activation basic blocks, for 32x32 images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .layers import GlobalPool, check_dropout, conv3x3, he_init, image_shape


class WideBlock(nn.Module):
    """y = shortcut + conv(relu(bn(conv(relu(bn(x))))), with dropout between the convolutions.

    Where the shape changes, the shortcut is a 1x1 convolution of the activated input relu(bn(x)), as in the
    authors' code; elsewhere it is x itself.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels_in)
        self.conv1 = conv3x3(channels_in, channels_out, stride)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = conv3x3(channels_out, channels_out)
        self.shortcut = None
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (N, in, H, W) -> (N, out, H/stride, W/stride)
        activated = F.relu(self.bn1(x), inplace=True)
        shortcut = x if self.shortcut is None else self.shortcut(activated)
        residual = F.relu(self.bn2(self.conv1(activated)), inplace=True)
        return shortcut + self.conv2(self.dropout(residual))


class WideResNet(nn.Module):
    """WRN-depth-width: a 16-channel convolution, three groups of n = (depth - 4) / 6 blocks, BN-ReLU, pooling.

    Group widths are 16k, 32k and 64k for width k, the second and third halve the image; D = 64k.
    With a 10-class linear head: WRN-28-10 has 36,479,194 parameters, WRN-40-14 (the G-softmax paper's) 109,416,410.

    (N, C, H, W) -> (N, 64 width); any image size from 8x8.

    >>> WideResNet((3, 32, 32), depth=10, width=1)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 64])
    """

    def __init__(
        self, input_shape: tuple[int, ...], *, depth: int, width: int, pool: str | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        channels, _, _ = image_shape(input_shape, 8, f"wrn-{depth}-{width}")
        check_dropout(dropout)
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"wrn depth must be 6n + 4 (10, 16, 22, 28, 34, 40, ...), got {depth}")
        if width < 1:
            raise ValueError(f"wrn width must be at least 1, got {width}")
        self.stem = conv3x3(channels, 16)
        channels = 16
        groups = []
        for group, widened in enumerate((16 * width, 32 * width, 64 * width)):
            blocks = []
            for block in range((depth - 4) // 6):
                stride = 2 if group > 0 and block == 0 else 1
                blocks.append(WideBlock(channels, widened, stride, dropout))
                channels = widened
            groups.append(nn.Sequential(*blocks))
        self.groups = nn.Sequential(*groups)
        self.bn = nn.BatchNorm2d(channels)
        self.pool = GlobalPool(pool or "avg")
        self.num_features = channels
        he_init(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:  # (N, C, H, W) -> (N, num_features)
        return self.pool(F.relu(self.bn(self.groups(self.stem(images))), inplace=True))
