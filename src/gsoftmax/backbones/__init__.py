"""The networks of the lab: from images or tables to features h, (N, D); the head is attached by whoever trains.

>>> network = create("wrn-16-1", input_shape=(3, 32, 32))
>>> network.num_features
64
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ..catalog import BACKBONES
from .densenet import DenseNet
from .resnet9 import ResNet9
from .small import MLP, SmallCNN
from .vgg import VGG16
from .wide_resnet import WideResNet
from .zoo import (
    load_weights,
    nearest,
    read_state_dict,
    timm_backbone,
    timm_names,
    torchvision_backbone,
    torchvision_names,
)

__all__ = ["available", "create", "load_weights", "read_state_dict"]


def available() -> list[tuple[str, str]]:
    """Names that `create` knows, each with one line of description.

    >>> dict(available())["vgg16"]
    'VGG-16 with batch normalisation for 32x32 images, 512-512 before the head'
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
    """The network `name` without a classifier: (N, *input_shape) float, normalised -> h (N, `.num_features`).

    `input_shape` is (channels, height, width) or (columns,). `pool` is the last pooling, "avg" or "max"; None is what
    the network has by itself. `pretrained=True` fetches published weights (torchvision and timm; for resnet101 the
    older IMAGENET1K_V1, trained as in the paper's time), `weights` reads a local .pth or .safetensors file. `options`
    go to the network.
    New weights come from torch's global generator, so `torch.manual_seed` before the call decides them.

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
        return torchvision_backbone(
            name,
            input_shape,
            pool=pool,
            pretrained=pretrained,
            weights=weights,
            default_weights="IMAGENET1K_V1",
            **options,
        )
    if family == "torchvision" and member:
        return torchvision_backbone(member, input_shape, pool=pool, pretrained=pretrained, weights=weights, **options)
    if family == "timm" and member:
        return timm_backbone(member, input_shape, pool=pool, pretrained=pretrained, weights=weights, **options)

    network = _own(name)
    if pretrained:
        raise ValueError(
            f"pretrained must be False for {name} (there are no published weights), got {pretrained!r}; "
            "weights=PATH loads your own"
        )
    accepted = [
        p
        for p in inspect.signature(network).parameters
        if p not in ("input_shape", "pool", "depth", "width", "growth", "bc")
    ]
    for option in options:
        if option not in accepted:
            raise ValueError(f"options of {name} are {', '.join(accepted)}; got {option!r}")
    built = network(input_shape, pool=pool, **options)
    if weights is not None:
        load_weights(built, weights, name)
    return built


def _own(name: str) -> Callable[..., nn.Module]:
    """The constructor behind one of our own names, the numbers in the name filled in."""
    plain = {"cnn": SmallCNN, "mlp": MLP, "resnet9": ResNet9, "vgg16": VGG16}
    if name in plain:
        return plain[name]
    if match := re.fullmatch(r"wrn-(\d+)-(\d+)", name):
        return partial(WideResNet, depth=int(match[1]), width=int(match[2]))
    if match := re.fullmatch(r"densenet-(bc-)?(\d+)-(\d+)", name):
        return partial(DenseNet, depth=int(match[2]), growth=int(match[3]), bc=match[1] is not None)
    examples = [*plain, "resnet101", "wrn-40-14", "wrn-28-10", "densenet-100-24", "densenet-bc-100-12"]
    elsewhere = [
        f"{family}:{name}"
        for family, names in (("torchvision", torchvision_names()), ("timm", timm_names()))
        if name in names
    ]
    raise ValueError(
        f"unknown backbone {name!r}; nearest: {', '.join(elsewhere) or nearest(name, examples)}; "
        f"known: {', '.join(BACKBONES)}"
    )
