"""Network, image size and training of image files, where a configuration leaves them open.

The choice depends on the number of images, on whether there is a GPU, and on the published weights that are on this
disk.  It becomes part of the run's configuration, so that the run can be repeated on another machine.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from . import backbones, build
from .config import Config

__all__ = ["FREE", "choose", "describe"]

FREE = ("pretrained", "epochs", "batch_size", "lr")  # keys with a default that may be chosen unless the user sets them
NAMED_SIZE = 224  # side of the images of a network that the user names: most are published for it


@dataclass(frozen=True)
class _Choice:
    """Networks with the side of their images, the preferred one first, and how they are trained."""

    networks: dict[str, int]
    images: int  # that a run trains on, over all epochs ...
    epochs: tuple[int, int]  # ... of which there are at least and at most so many
    lr: float = 0.1


_FAST = ("torchvision:mobilenet_v3_small", "timm:mobilenetv3_small_100.lamb_in1k")
_STRONG = ("torchvision:resnet18", "timm:resnet18.a1_in1k")
# Sizes for a CPU are such that two cores train fifteen times on a few hundred images in minutes.
_SCRATCH = {
    "cpu": _Choice({"cnn": 64}, 10_000, (6, 30)),
    "gpu": _Choice({"torchvision:resnet18": 128}, 100_000, (10, 60)),
}
_FINE_TUNED = {
    "cpu": _Choice({**dict.fromkeys(_FAST, 128), **dict.fromkeys(_STRONG, 96)}, 3_000, (3, 10), lr=0.01),
    "gpu": _Choice(dict.fromkeys((*_STRONG, *_FAST), 224), 30_000, (5, 20), lr=0.01),
}


def choose(
    config: Config, data_root: str | os.PathLike[str] | None = None, free: Collection[str] = ()
) -> dict[str, Any]:
    """The keys that a configuration leaves open, with their values; empty for data other than image files.

    `backbone` and `image_size` are open where they are None.

    config: the configuration
    data_root: where the datasets are
    free: those of `FREE` that may be chosen too

    >>> choose(Config(data="digits"))
    {}
    """
    if config.backbone is not None and config.image_size is not None:
        return {}
    data = build.read_cached(config.data, None if data_root is None else os.fspath(data_root), None, config.check).data
    if data.kind != "files":
        return {}
    if config.backbone is not None:
        return {"image_size": NAMED_SIZE}
    device = "cpu" if build.pick_device(config.device).type == "cpu" else "gpu"
    choice, name, weights = _SCRATCH[device], next(iter(_SCRATCH[device].networks)), config.pretrained
    if config.weights is None and (config.pretrained or "pretrained" in free):
        tuned = _FINE_TUNED[device]
        on_disk = {known: found for known in tuned.networks if (found := backbones.weights_on_disk(known))}
        if on_disk:
            choice, (name, weights) = tuned, next(iter(on_disk.items()))
        elif config.pretrained:  # they are downloaded
            choice, name = tuned, next(iter(tuned.networks))
    chosen: dict[str, Any] = {"backbone": name, "image_size": config.image_size or choice.networks[name]}
    if weights != config.pretrained:
        chosen["pretrained"] = weights
    rows = int(len(data.train) * config.train_fraction * (1 if data.val else 1 - config.val_fraction))
    low, high = choice.epochs
    trained = {
        "epochs": min(max(choice.images // max(rows, 1), low), high),
        "batch_size": min(config.batch_size, 1 << max(2, (rows // 4).bit_length() - 1)),  # four steps per epoch
        "lr": choice.lr,
    }
    return chosen | {key: value for key, value in trained.items() if key in free}


def describe(config: Config) -> str:
    """Network, image size and training in a few words.

    config: with nothing left open

    >>> describe(Config(backbone="cnn", image_size=64, epochs=30))
    'cnn at 64 px from scratch, 30 epochs, batches of 64'
    """
    start = "published weights" if config.pretrained else config.weights or "scratch"
    size = "" if config.image_size is None else f" at {config.image_size} px"
    epochs = f"{config.epochs} epoch{'s' * (config.epochs != 1)}"
    return f"{config.backbone}{size} from {start}, {epochs}, batches of {config.batch_size}"
