"""A fast network for 32x32 images, in the style of CIFAR-10 speed-run entries."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .layers import GlobalPool, conv3x3, image_shape


def whitening_filters(images: torch.Tensor, size: int = 2, eps: float = 5e-4) -> torch.Tensor:
    """Filters whose responses on size x size patches of `images` are uncorrelated, with unit second moment.

    With S = mean of patch patchᵀ = V diag(e) Vᵀ the filters are the rows of diag(e + eps)^(-1/2) Vᵀ, largest e first.
    eps limits the amplification of rare directions. The largest entry of each filter is positive, so that the result
    depends on the images only.

    images (N, C, H, W), normalized -> (C size², C, size, size) float32 on the same device.

    >>> images = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    >>> responses = F.conv2d(images, whitening_filters(images))
    >>> flat = responses.transpose(0, 1).flatten(1)
    >>> torch.allclose(flat @ flat.T / flat.shape[1], torch.eye(12), atol=2e-3)
    True
    """
    channels = images.shape[1]
    moment = torch.zeros(channels * size**2, channels * size**2, dtype=torch.float64, device=images.device)
    count = 0
    with torch.no_grad():
        for chunk in images.split(512):  # bounds the memory of the unfolded patches
            patches = F.unfold(chunk.float(), size).transpose(0, 1).flatten(1)  # (C size², patches)
            moment += patches @ patches.T
            count += patches.shape[1]
        eigenvalues, vectors = torch.linalg.eigh(moment / count)
        filters = (vectors / (eigenvalues + eps).sqrt()).T.flip(0)
        largest = filters.gather(1, filters.abs().argmax(1, keepdim=True))
        return (filters * largest.sign()).reshape(-1, channels, size, size).float()


class FastNorm(nn.BatchNorm2d):
    """Batch normalization with a bias only: the weight stays 1, since GELU networks this small do not need it.

    The running statistics adapt quickly, because training takes only a few hundred steps.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-5, momentum=0.4)
        self.weight.requires_grad_(False)


class FastBlock(nn.Module):
    """conv-max pooling-BN-GELU, then `convs - 1` times conv-BN-GELU, optionally with a residual sum around these."""

    def __init__(self, channels_in: int, channels_out: int, convs: int, residual: bool, fused: bool) -> None:
        super().__init__()
        self.conv = conv3x3(channels_in, channels_out)
        self.norm = FastNorm(channels_out)
        self.convs = nn.ModuleList(conv3x3(channels_out, channels_out) for _ in range(convs - 1))
        self.norms = nn.ModuleList(FastNorm(channels_out) for _ in range(convs - 1))
        self.residual, self.fused = residual, fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (N, in, H, W) -> (N, out, H/2, W/2)
        x = self._norm_gelu(self.conv(x), self.norm, pool=True)
        y = x
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            last = self.residual and i == len(self.convs) - 1
            y = self._norm_gelu(conv(y), norm, residual=x if last else None)
        return y

    def _norm_gelu(
        self, x: torch.Tensor, norm: Any, pool: bool = False, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        # not for a norm that was replaced, as by SyncBatchNorm, or that has hooks
        plain = type(norm) is FastNorm and not norm.weight.requires_grad and not norm._forward_hooks
        if self.fused and plain and norm.training and x.is_cuda and not torch.compiler.is_compiling():
            fused: Any = importlib.import_module(f"{__package__}.fused")  # Triton takes 0.4 s to import
            if fused.usable(x):
                norm.num_batches_tracked.add_(1)
                state = fused.Norm(norm.running_mean, norm.running_var, norm.momentum, norm.eps)
                return fused.norm_gelu(x, norm.bias, state, pool, residual)
        x = norm(F.max_pool2d(x, 2) if pool else x)
        return F.gelu(x if residual is None else x + residual)


class ResNet9(nn.Module):
    """Whitened 2x2 patches, three blocks of two 3x3 convolutions with a residual sum, global max pooling; D = 256.

    Meant for `channels_last` and bf16 or half on one GPU. 1,968,792 learned parameters, 1,967,616 of them in 3x3
    convolutions, and about 0.24 GFLOP (a multiply-add is two) per 32x32 image forward, three times that to train.

    whiten: the first layer is a 2x2 convolution with 2 C 2² fixed filters, plus and minus a basis of the patches, and a
        learned bias. The basis is a buffer: the identity until `init_whiten(images)` sets it. False learns that layer.
    widths, convs, residual: channels of the blocks, 3x3 convolutions per block, and whether a block has a residual sum
    fused: on a GPU pooling, normalization and GELU are one function while training; see `fused.py`

    Every 3x3 convolution starts as the identity on its first input channels (the other filters are PyTorch's default),
    so the initial network passes the image through. `FastNorm` has only a bias, which needs a learning rate well above
    that of the weights: all parameters with one dimension are such biases. Features are not scaled; a head's outputs
    need a factor of about 1/9.

    (N, C, H, W) -> (N, widths[-1]); images from 17x17.

    >>> network = ResNet9((3, 32, 32), widths=(8, 16, 16))
    >>> network.init_whiten(torch.randn(50, 3, 32, 32))(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 16])
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        *,
        pool: str | None = None,
        widths: Sequence[int] = (64, 256, 256),
        convs: int = 2,
        residual: bool = True,
        whiten: bool = True,
        fused: bool = True,
    ) -> None:
        super().__init__()
        channels, _, _ = image_shape(input_shape, 17, "resnet9")
        if len(widths) != 3 or min(widths) < 1:
            raise ValueError(f"resnet9 widths must be three positive numbers, got {tuple(widths)}")
        if convs < 2:
            raise ValueError(f"resnet9 convs (a block) must be at least 2, got {convs}")
        patch = channels * 2**2
        self.whiten = whiten
        if whiten:
            identity = torch.eye(patch).reshape(patch, channels, 2, 2)
            self.register_buffer("stem_weight", torch.cat([identity, -identity]))
        else:
            self.stem_weight = nn.Parameter(torch.empty(2 * patch, channels, 2, 2))
            nn.init.kaiming_normal_(self.stem_weight, nonlinearity="relu")
        self.stem_bias = nn.Parameter(torch.zeros(2 * patch))
        blocks = []
        channels = 2 * patch
        for width in widths:
            blocks.append(FastBlock(channels, width, convs, residual, fused))
            channels = width
        self.blocks = nn.Sequential(*blocks)
        self.pool = GlobalPool(pool or "max")
        self.num_features = channels
        for module in self.blocks.modules():
            if isinstance(module, nn.Conv2d):
                with torch.no_grad():
                    nn.init.dirac_(module.weight[: module.in_channels])

    def init_whiten(self, images: torch.Tensor, eps: float = 5e-4) -> ResNet9:
        """Set the fixed first layer, if there is one; returns itself.

        images: a few thousand normalized training images, (N, C, H, W)
        eps: as in `whitening_filters`
        """
        if images.dim() != 4 or images.shape[1] != self.stem_weight.shape[1] or len(images) == 0:
            expected = f"(N, {self.stem_weight.shape[1]}, H, W) with N > 0"
            raise ValueError(f"images must be {expected}, got {tuple(images.shape)}")
        if self.whiten:
            filters = whitening_filters(images, eps=eps)
            self.stem_weight.copy_(torch.cat([filters, -filters]))
        return self

    def forward(self, images: torch.Tensor) -> torch.Tensor:  # (N, C, H, W) -> (N, num_features)
        return self.pool(self.blocks(F.gelu(F.conv2d(images, self.stem_weight, self.stem_bias))))
