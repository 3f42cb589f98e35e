"""DenseNet and DenseNet-BC (Huang, Liu, van der Maaten & Weinberger 2017) for 32x32 images."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .layers import GlobalPool, conv3x3, he_init, image_shape, optional_dropout


@contextmanager
def running_statistics_frozen(module: nn.Module) -> Iterator[None]:
    """A forward pass in training mode that does not update the running statistics of batch normalization.

    Recomputing a layer for its backward pass is a second forward pass, which would count the batch twice.
    """
    norms = [(m, m.momentum, m.num_batches_tracked) for m in module.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm, _, _ in norms:  # momentum 0 keeps the values; the buffers stay, since checkpointing counts tensors
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, momentum, batches in norms:
            norm.momentum, norm.num_batches_tracked = momentum, batches


class DenseLayer(nn.Module):
    """`growth` new channels from all those before: BN-ReLU-conv3x3, or BN-ReLU-conv1x1(4 growth)-BN-ReLU-conv3x3."""

    def __init__(self, channels: int, growth: int, bottleneck: bool, dropout: float, memory_efficient: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
        if bottleneck:
            layers += [nn.Conv2d(channels, 4 * growth, 1, bias=False), *optional_dropout(dropout)]
            layers += [nn.BatchNorm2d(4 * growth), nn.ReLU(inplace=True)]
            channels = 4 * growth
        self.layers = nn.Sequential(*layers, conv3x3(channels, growth), *optional_dropout(dropout))
        self.memory_efficient = memory_efficient

    def forward(self, maps: list[torch.Tensor]) -> torch.Tensor:  # [(N, c_i, H, W), ...] -> (N, growth, H, W)
        if self.memory_efficient and torch.is_grad_enabled():
            # The concatenation is recomputed too: storing all L would cost O(L²) memory instead of O(L).
            return checkpoint(self.concatenated, *maps, use_reentrant=False, context_fn=self._contexts)
        return self.concatenated(*maps)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), running_statistics_frozen(self)

    def concatenated(self, *maps: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cat(maps, dim=1))


class DenseBlock(nn.Module):
    """n dense layers; returns the input and all their outputs, concatenated."""

    def __init__(
        self, channels: int, growth: int, n: int, bottleneck: bool, dropout: float, memory_efficient: bool
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            DenseLayer(channels + i * growth, growth, bottleneck, dropout, memory_efficient) for i in range(n)
        )
        self.num_channels = channels + n * growth

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (N, c, H, W) -> (N, c + n growth, H, W)
        maps = [x]
        for layer in self.layers:
            maps.append(layer(maps))
        return torch.cat(maps, dim=1)


class DenseNet(nn.Module):
    """DenseNet (L = depth, k = growth) with three dense blocks; `bc=True` for bottleneck layers and compression.

    A convolution of 16 channels (BC: 2k), blocks of n = (L - 4) / 3 layers (BC: (L - 4) / 6), between them
    BN-ReLU-conv1x1-average pooling that keeps the channels (BC: halves them), at the end BN-ReLU-pooling.
    With a 10-class linear head (100, 24) has 27,249,082 parameters and D = 2320.

    `memory_efficient=True` recomputes each layer in the backward pass: the same gradients and running statistics,
    memory linear instead of quadratic in depth, about a third more time. `torch.compile` cannot trace it.

    (N, C, H, W) -> (N, D); any image size from 4x4.

    >>> DenseNet((3, 32, 32), depth=10, growth=4)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 40])
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        *,
        depth: int,
        growth: int,
        bc: bool = False,
        pool: str | None = None,
        dropout: float = 0.0,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__()
        name, step = ("densenet-bc", 6) if bc else ("densenet", 3)
        channels, _, _ = image_shape(input_shape, 4, f"{name}-{depth}-{growth}")
        if depth < 4 + step or (depth - 4) % step:
            raise ValueError(f"{name} depth must be {step}n + 4 (40, 100, 190, 250, ...), got {depth}")
        if growth < 1:
            raise ValueError(f"{name} growth must be at least 1, got {growth}")
        width = 2 * growth if bc else 16
        layers: list[nn.Module] = [conv3x3(channels, width)]
        for block in range(3):
            dense = DenseBlock(width, growth, (depth - 4) // step, bc, dropout, memory_efficient)
            width = dense.num_channels
            layers += [dense, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            if block < 2:
                compressed = width // 2 if bc else width
                layers += [nn.Conv2d(width, compressed, 1, bias=False), *optional_dropout(dropout), nn.AvgPool2d(2)]
                width = compressed
        self.layers = nn.Sequential(*layers)
        self.pool = GlobalPool(pool or "avg")
        self.num_features = width
        he_init(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:  # (N, C, H, W) -> (N, num_features)
        return self.pool(self.layers(images))
