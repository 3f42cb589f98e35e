"""Networks from images or tables to features h, (N, D), without a classifier.

>>> network = create("wrn-16-1", input_shape=(3, 32, 32))
>>> network.num_features
64
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from ..catalog import BACKBONES
from ..messages import unknown
from .densenet import DenseNet
from .resnet9 import ResNet9
from .small import MLP, SmallCNN
from .vgg import VGG16
from .wide_resnet import WideResNet
from .zoo import load_weights, names, read_state_dict, timm_backbone, torchvision_backbone, weights_on_disk

__all__ = ["available", "create", "load_weights", "read_state_dict", "weights_on_disk"]


def available() -> list[tuple[str, str]]:
    """The names that `create` accepts, each with a one-line description.

    >>> dict(available())["vgg16"]
    'VGG-16 with batch normalization for 32x32 images, 512-512 before the head'
    """
    return list(BACKBONES.items())


def create(
    name: str,
    *,
    input_shape: tuple[int, ...],
    pool: str | None = None,
    pretrained: bool | str = False,
    weights: str | Path | None = None,
    **options: Any,
) -> nn.Module:
    """A network without a classifier: (N, *input_shape) float, normalized -> h (N, `.num_features`).

    name: one of `available()`
    input_shape: (channels, height, width) or (columns,)
    pool: the last pooling, "avg" or "max"; None for the network's default
    pretrained: True fetches published weights (torchvision and timm; for resnet101 the older IMAGENET1K_V1, trained
        as in the paper's time); a string names others of torchvision's
    weights: a local .pth or .safetensors file
    options: of the network

    New weights come from torch's global generator, so `torch.manual_seed` before the call determines them.

    >>> import torch
    >>> h = create("cnn", input_shape=(1, 8, 8), features=32)(torch.zeros(5, 1, 8, 8))
    >>> h.shape
    torch.Size([5, 32])
    """
    input_shape = tuple(input_shape)
    if not input_shape or not all(isinstance(size, int) and size > 0 for size in input_shape):
        raise ValueError(f"input_shape must be positive whole numbers, got {input_shape}")
    if pool not in (None, "avg", "max"):
        raise ValueError(f"pool must be avg, max or None, got {pool!r}")
    if pretrained and weights is not None:
        raise ValueError(f"give pretrained or weights, not both, got pretrained={pretrained!r} and weights={weights}")
    family, _, member = name.partition(":")
    if name == "resnet101":
        family, member = "torchvision", name
        pretrained = "IMAGENET1K_V1" if pretrained is True else pretrained
    if member and family in ("torchvision", "timm"):
        build = torchvision_backbone if family == "torchvision" else timm_backbone
        return build(member, input_shape, pool=pool, pretrained=pretrained, weights=weights, **options)

    network, fixed = _built_in(name)
    if pretrained:
        hint = "there are no published weights; weights=PATH loads your own"
        raise ValueError(f"pretrained must be False for {name}, got {pretrained!r}: {hint}")
    accepted = [p for p in inspect.signature(network).parameters if p not in ("input_shape", "pool", *fixed)]
    for option in options:
        if option not in accepted:
            raise ValueError(f"options of {name} are {', '.join(accepted)}; got {option!r}")
    built = network(input_shape, pool=pool, **fixed, **options)
    if weights is not None:
        load_weights(built, weights, name)
    return built


def _built_in(name: str) -> tuple[Callable[..., nn.Module], dict[str, Any]]:
    """The constructor behind a name, and the arguments that the name contains."""
    plain: dict[str, Callable[..., nn.Module]] = {"cnn": SmallCNN, "mlp": MLP, "resnet9": ResNet9, "vgg16": VGG16}
    if name in plain:
        return plain[name], {}
    if match := re.fullmatch(r"wrn-(\d+)-(\d+)", name):
        return WideResNet, {"depth": int(match[1]), "width": int(match[2])}
    if match := re.fullmatch(r"densenet-(bc-)?(\d+)-(\d+)", name):
        return DenseNet, {"depth": int(match[2]), "growth": int(match[3]), "bc": match[1] is not None}
    examples = [*plain, "resnet101", "wrn-40-14", "wrn-28-10", "densenet-100-24", "densenet-bc-100-12"]
    elsewhere = [f"'{family}:{name}'" for family in ("torchvision", "timm") if name in names(family)]
    hint = f"unknown backbone {name!r}, did you mean {' or '.join(elsewhere)}" if elsewhere else ""
    raise ValueError(f"{hint or unknown('backbone', name, examples)}; known: {', '.join(BACKBONES)}")
