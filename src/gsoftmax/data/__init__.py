"""The data room: every dataset by its name, the same rows in the same order for every head.

>>> from gsoftmax import data
>>> digits = data.load("digits", val_fraction=0.1)
>>> for x, y in data.train_batches(digits, 128, seed=0, epoch=0):
...     break
>>> x.shape, y.shape
(torch.Size([128, 1, 8, 8]), torch.Size([128]))
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..catalog import DATASETS, DatasetInfo
from .augment import PRESETS, Augment
from .batches import eval_batches, num_batches, train_batches
from .bundled import load_digits
from .cifar import load_cifar
from .coco import load_coco
from .core import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    DataError,
    Dataset,
    Split,
    data_root,
    long_tail,
    noisy,
    statistics,
    take,
)
from .folders import load_folder, load_tiny_imagenet
from .images import resize
from .mosaic import make_mosaic
from .nuswide import load_nuswide
from .seeded import mix
from .smoke import SMOKE_NAMES, write_smoke
from .tables import load_arff, load_npz

__all__ = [
    "PRESETS",
    "SMOKE_NAMES",
    "Augment",
    "DataError",
    "Dataset",
    "DatasetInfo",
    "Split",
    "data_root",
    "describe",
    "eval_batches",
    "load",
    "match_inputs",
    "num_batches",
    "train_batches",
    "write_smoke",
]


def describe() -> list[DatasetInfo]:
    """What there is: names, sizes, where to get it and what the folder must look like.

    >>> [info.name for info in describe()][:3]
    ['digits', 'digits-mosaic', 'cifar10']
    """
    return list(DATASETS)


def load(
    spec: str,
    root: str | os.PathLike[str] | None = None,
    *,
    val_fraction: float = 0.0,
    split_seed: int = 0,
    image_size: int | None = None,
    train_fraction: float = 1.0,
    imbalance: float = 1.0,
    label_noise: float = 0.0,
    check: bool = True,
) -> Dataset:
    """The dataset that `spec` names, ready for training.

    spec: digits, digits-mosaic, cifar10, cifar100, tiny-imagenet, coco, nuswide, folder:PATH, npz:PATH, arff:PATH or
        mosaic(SPEC), with options at the end as in `arff:emotions.arff?labels=6&test=0.3`; `describe()` lists them
    root: folder of the published datasets (default: $GSOFTMAX_DATA, else ./data)
    val_fraction: share of the training set that becomes `val`, in every class alike
    split_seed: seeds validation split, subset, imbalance and noise; the same for every head
    image_size: side of the square images the network is given (default: their own; 224 for large image files)
    train_fraction: share of the (remaining) training set to keep, in every class alike
    imbalance: ratio of the largest to the smallest class, made by leaving out training rows
    label_noise: share of the training labels to make wrong (validation and test labels stay clean)
    check: whether published sizes and checksums are demanded; files marked SMOKE are always exempt

    A missing or damaged dataset is a DataError, which is a ValueError.

    >>> load("digits", train_fraction=0.1, label_noise=0.2).summary()
    'digits: 130 train, 500 test, 10 classes, 1x8x8 images'
    """
    _between("val_fraction", val_fraction, 0, 1, open_right=True)
    _between("train_fraction", train_fraction, 0, 1, open_left=True)
    _between("label_noise", label_noise, 0, 1)
    _between("imbalance", imbalance, 1, math.inf, open_right=True)
    if image_size is not None and not (type(image_size) is int and 1 <= image_size <= 4096):
        raise ValueError(f"image_size must be a whole number from 1 to 4096, got {image_size!r}")
    data, tile = _read(spec, root, split_seed=split_seed, image_size=image_size, check=check)
    data = _split_off(data, val_fraction, split_seed)
    data = _thin(data, train_fraction, imbalance, label_noise, split_seed)
    if tile is not None:  # after the splits, so that no image is in the mosaics of two of them
        data = tile(data)
    return _finish(data, image_size)


def _between(
    name: str, value: float, low: float, high: float, *, open_left: bool = False, open_right: bool = False
) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not ok or (open_left and value == low) or (open_right and value == high):
        upper = "" if high == math.inf else f" and {'below' if open_right else 'at most'} {high}"
        raise ValueError(f"{name} must be {'above' if open_left else 'at least'} {low}{upper}, got {value!r}")


def match_inputs(other: Dataset, like: Dataset) -> Dataset:
    """`other` with inputs as the network of `like` is given them: its size, channels, mean and deviation.

    >>> match_inputs(load("digits"), load("digits-mosaic")).input_shape
    (1, 16, 16)
    """
    if (other.kind == "table") != (like.kind == "table"):
        raise DataError(f"{other.name} cannot stand beside {like.name}: one has images, the other a table")
    splits = {part: getattr(other, part) for part in ("train", "val", "test")}
    have, need = other.input_shape[0], like.input_shape[0]
    if have != need:
        if other.kind == "table" or have != 1:
            what = "columns" if other.kind == "table" else "channels"
            raise DataError(f"{other.name} has {have} {what}, and {like.name} has {need}")
        for part, split in splits.items():  # grey images in colour
            if split is not None and isinstance(split.x, Tensor):
                splits[part] = Split(split.x.expand(-1, need, -1, -1), split.y)
    return replace(other, **splits, mean=like.mean, std=like.std, input_shape=like.input_shape)


# spec -> Dataset as published


def parse(spec: str) -> tuple[str, str, dict[str, str]]:
    """(family, argument, options) of a spec.

    >>> parse("arff:scene-train.arff?labels=6")
    ('arff', 'scene-train.arff', {'labels': '6'})
    >>> parse("mosaic(cifar10)?grid=3x2&seed=1")
    ('mosaic', 'cifar10', {'grid': '3x2', 'seed': '1'})
    """
    if not isinstance(spec, str):
        raise ValueError(f"dataset must be a name such as 'digits', got {type(spec).__name__}")
    body, options = spec.strip(), {}
    question = re.search(r"\?([a-z_]+=[^?()]*)$", body)
    if question:
        body = body[: question.start()]
        for item in question[1].split("&"):
            key, _, value = item.partition("=")
            options[key] = value
    if body.startswith("mosaic(") and body.endswith(")"):
        return "mosaic", body[len("mosaic(") : -1], options
    family, colon, argument = body.partition(":")
    if colon and family in ("folder", "npz", "arff"):
        return family, argument, options
    return body, "", options


def _options(spec: str, given: dict[str, str], **readers: Callable[[str], Any]) -> dict[str, Any]:
    """Options converted, an unknown or unreadable one refused."""
    out = {}
    for key, text in given.items():
        if key not in readers:
            accepted = ", ".join(readers) or "none"
            raise DataError(f"{spec}: unknown option {key!r}, accepted here: {accepted}")
        try:
            out[key] = readers[key](text)
        except (ValueError, IndexError):
            raise DataError(f"{spec}: option {key} cannot be {text!r}") from None
    return out


def _grid(text: str) -> tuple[int, int]:
    rows, _, cols = text.partition("x")
    return int(rows), int(cols or rows)


def _read(
    spec: str, root: str | os.PathLike[str] | None, *, split_seed: int, image_size: int | None, check: bool
) -> tuple[Dataset, Callable[[Dataset], Dataset] | None]:
    """The dataset as published, and what turns its splits into mosaics where that is asked for."""
    family, argument, given = parse(spec)
    if family in ("mosaic", "digits-mosaic"):
        read = _options(spec, given, grid=_grid, seed=int, train=int, val=int, test=int)
        if family == "mosaic" and not argument.strip():
            raise DataError(f"{spec}: a dataset must stand in the parentheses, as in mosaic(digits)")
        # image_size is the mosaic's: the tiles keep their own size
        inner, nested = _read(argument or "digits", root, split_seed=split_seed, image_size=None, check=check)
        if nested is not None:
            raise DataError(f"{spec}: a mosaic of mosaics is not supported, its parts are not single-label")
        grid, seed = read.pop("grid", (2, 2)), read.pop("seed", 0)
        return inner, lambda data: make_mosaic(data, grid=grid, seed=seed, counts=read)
    if family in ("folder", "npz", "arff"):
        if not argument:
            raise DataError(f"{spec}: a path must follow, as in {family}:PATH")
        if family == "folder":
            read = _options(spec, given, test=float)
            return load_folder(argument, image_size=image_size, split_seed=split_seed, **read), None
        if family == "npz":
            return load_npz(argument, split_seed=split_seed, **_options(spec, given, test=float)), None
        return load_arff(argument, split_seed=split_seed, **_options(spec, given, labels=int, test=float)), None
    loaders: dict[str, Callable[[], Dataset]] = {
        "digits": load_digits,
        "cifar10": lambda: load_cifar("cifar10", root, check=check),
        "cifar100": lambda: load_cifar("cifar100", root, check=check),
        "tiny-imagenet": lambda: load_tiny_imagenet(root, check=check, image_size=image_size),
        "coco": lambda: load_coco(root, check=check),
        "nuswide": lambda: load_nuswide(root, check=check),
    }
    if family in loaders:
        _options(spec, given)
        return loaders[family](), None
    names = [*loaders, "digits-mosaic", "folder:PATH", "npz:PATH", "arff:PATH", "mosaic(DATASET)"]
    near = difflib.get_close_matches(family, names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    if os.path.isdir(family):
        hint = f"did you mean folder:{family}? "
    raise DataError(f"unknown dataset {spec!r}: {hint}accepted are {', '.join(names)}")


# choices made on the training split, and the finish


def _split_off(data: Dataset, fraction: float, seed: int) -> Dataset:
    """A validation split from the training rows; one that came with the data stays as it is."""
    if fraction == 0 or data.val is not None:
        return data
    aside, rest = take(data.train.y, fraction, mix(seed, 10), keep=1)
    if not len(aside) or not len(rest):
        sizes = f"{len(rest)} training and {len(aside)} validation rows"
        raise ValueError(f"val_fraction={fraction} would leave {sizes} of {data.name}")
    return replace(data, val=data.train.select(aside), train=data.train.select(rest))


def _thin(data: Dataset, fraction: float, imbalance: float, noise: float, seed: int) -> Dataset:
    """Fewer training rows, unequal classes, wrong labels."""
    train, notes = data.train, list(data.notes)
    single = not data.multilabel
    for name, value, off in (("imbalance", imbalance, 1), ("label_noise", noise, 0)):
        if value != off and not single:
            raise ValueError(f"{name} is for single-label data, and {data.name} is multi-label")
    if fraction < 1:
        kept, _ = take(train.y, fraction, mix(seed, 11))
        lost = sorted(set(train.y.tolist()) - set(train.y[torch.from_numpy(kept)].tolist())) if single else []
        if not len(kept) or lost:
            which = f", none of class {data.classes[lost[0]]!r}" if lost else ""
            raise ValueError(f"train_fraction={fraction} keeps {len(kept)} rows of {data.name}{which}")
        train = train.select(kept)
        notes.append(f"{len(kept):,} of {len(data.train):,} training rows (train_fraction {fraction}, seed {seed})")
    if imbalance > 1:
        kept = long_tail(train.y, imbalance, mix(seed, 12))
        notes.append(f"{len(kept):,} of {len(train):,} training rows (imbalance {imbalance}, seed {seed})")
        train = train.select(kept)
    if noise > 0:
        changed = noisy(train.y, noise, data.num_classes, mix(seed, 13))
        wrong = int((changed != train.y).sum())
        notes.append(f"{wrong:,} of {len(train):,} training labels made wrong (label_noise {noise}, seed {seed})")
        train = Split(train.x, changed)
    return replace(data, train=train, notes=tuple(notes))


def _finish(data: Dataset, image_size: int | None) -> Dataset:
    """Input shape and statistics of the final training split."""
    x = data.train.x
    if not isinstance(x, Tensor):
        if data.mean.numel() == 0:  # too many pixels to go through; and pretrained networks expect these
            data = replace(data, mean=torch.tensor(IMAGENET_MEAN), std=torch.tensor(IMAGENET_STD))
        return replace(data, input_shape=(3, image_size or 224, image_size or 224))
    if x.ndim == 2 and image_size is not None:
        raise ValueError(f"image_size is for images, and {data.name} is a table")
    shape = tuple(x.shape[1:])
    if image_size is not None:
        shape = (x.shape[1], image_size, image_size)
        if image_size < min(x.shape[-2:]):  # shrunk once; what grows, grows batch by batch, to spare memory
            val = None if data.val is None else _shrink(data.val, image_size)
            data = replace(data, train=_shrink(data.train, image_size), test=_shrink(data.test, image_size), val=val)
    if data.mean.numel() != x.shape[1]:
        assert isinstance(data.train.x, Tensor)
        mean, std = statistics(data.train.x)
        data = replace(data, mean=mean, std=std)
    return replace(data, input_shape=shape)


def _shrink(split: Split, side: int) -> Split:
    assert isinstance(split.x, Tensor)
    rows = range(0, len(split), 1024)
    return Split(torch.cat([resize(split.x[k : k + 1024], (side, side)) for k in rows]), split.y)
