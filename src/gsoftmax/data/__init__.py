"""Datasets by name, and batches that are the same for every head.

>>> from gsoftmax import data
>>> digits = data.load("digits", val_fraction=0.1)
>>> for x, y in data.train_batches(digits, 128, seed=0, epoch=0):
...     break
>>> x.shape, y.shape
(torch.Size([128, 1, 8, 8]), torch.Size([128]))
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..catalog import DATASETS, DatasetInfo
from ..messages import unknown
from .augment import PRESETS, Augment
from .batches import Delivery, eval_batches, num_batches, train_batches
from .bundled import load_digits
from .cifar import load_cifar
from .coco import load_coco
from .core import IMAGENET, DataError, Dataset, Request, Split, Subset, data_root, statistics
from .folders import load_folder, load_tiny_imagenet
from .images import resize
from .listed import load_csv
from .mosaic import make_mosaic
from .nuswide import LISTS, load_nuswide
from .smoke import SMOKE_NAMES, write_smoke
from .tables import load_arff, load_npz

__all__ = [
    "PRESETS",
    "SMOKE_NAMES",
    "Augment",
    "DataError",
    "Dataset",
    "DatasetInfo",
    "Delivery",
    "Split",
    "Subset",
    "by_path",
    "data_root",
    "describe",
    "eval_batches",
    "load",
    "match_inputs",
    "num_batches",
    "stamp",
    "train_batches",
    "write_smoke",
]


def describe() -> list[DatasetInfo]:
    """The available datasets: name, size, source and folder layout of each.

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
    check: bool = True,
    **subset: float,
) -> Dataset:
    """The dataset that `spec` names, ready for training.

    spec: digits, digits-mosaic, cifar10, cifar100, tiny-imagenet, coco, coco2017, nuswide, folder:PATH, csv:PATH,
        npz:PATH, arff:PATH or mosaic(SPEC), with options at the end as in `arff:emotions.arff?labels=6&test=0.3` and
        `nuswide?lists=official`; `describe()` lists them
    root: folder of the published datasets (default: $GSOFTMAX_DATA, else ./data)
    val_fraction: fraction of the training set used as `val`, stratified by class
    split_seed: seed of the validation split and of `subset`; the test split does not depend on it
    image_size: side of the square images the network is given (default: their own; 224 for large image files)
    check: whether published sizes and checksums, and every image file, are required; without it, images that are
        missing or damaged are left out. Generated smoke data may have any size
    subset: train_fraction, imbalance and label_noise, as in `Subset`

    A missing or damaged dataset is a DataError, which is a ValueError.

    >>> load("digits", train_fraction=0.1, label_noise=0.2).summary()
    'digits: 130 train, 500 test, 10 classes, 1x8x8 images'
    """
    wanted = Subset(val_fraction=val_fraction, **subset)  # checked before anything is read
    return read(spec, root, image_size, check).draw(wanted, split_seed)


@dataclass(frozen=True, eq=False)
class Source:
    """A dataset as it was read, of which `draw` makes the splits of a run."""

    data: Dataset  # of a mosaic: the single images
    image_size: int | None = None  # as in `load`
    tiling: dict[str, Any] | None = None  # the options of a mosaic

    def draw(self, subset: Subset, seed: int) -> Dataset:
        """The dataset of a run.

        subset, seed: what is drawn from the training rows, and the seed of the draw
        """
        data = subset.of(self.data, seed)
        if self.tiling is not None:  # after the splits, so that no image is in the mosaics of two of them
            counts = {k: v for k, v in self.tiling.items() if k not in ("grid", "seed")}
            grid, own_seed = self.tiling.get("grid", (2, 2)), self.tiling.get("seed", 0)
            data = make_mosaic(data, grid=grid, seed=own_seed, counts=counts)
            data = _resized(data, self.image_size)
        return _with_statistics(data)


def read(spec: str, root: str | os.PathLike[str] | None, image_size: int | None = None, check: bool = True) -> Source:
    """The dataset that `spec` names, before anything is drawn from it; arguments as in `load`."""
    if image_size is not None and not (type(image_size) is int and 1 <= image_size <= 4096):
        raise ValueError(f"image_size must be a whole number from 1 to 4096, got {image_size!r}")
    family, argument, given = parse(spec)
    source = spec
    tiling: dict[str, Any] | None = None
    if family in _MOSAICS:
        tiling = _options(spec, given, grid=(_grid, "ROWSxCOLUMNS"), seed=_WHOLE, train=_WHOLE, val=_WHOLE, test=_WHOLE)
        if family == "mosaic" and not argument.strip():
            raise DataError(f"{spec}: the parentheses must contain a dataset, as in mosaic(digits)")
        source = argument or "digits"
        family, argument, given = parse(source)
        if family in _MOSAICS:
            raise DataError(f"{spec}: a mosaic of mosaics is not supported, its parts are not single-label")
    if family not in _LOADERS:
        raise DataError(_unknown(source, family))
    if family in _BY_PATH and not argument:
        raise DataError(f"{source}: a path must follow, as in {family}:PATH")
    loader, readers = _LOADERS[family]
    tile_size = image_size if tiling is None else None  # tiles keep their own size
    options = _options(source, given, **readers)
    data = loader(Request(family, argument, options, root, tile_size, check))
    for part, split in (("train", data.train), ("val", data.val), ("test", data.test)):
        if split is not None and not len(split):
            raise DataError(f"{source} has no rows in the {part} split")
    data = replace(data, source=next(info.source for info in DATASETS if info.name.split(":")[0] == family))
    return Source(data if tiling is not None else _resized(data, image_size), image_size, tiling)


def match_inputs(other: Dataset, like: Dataset) -> Dataset:
    """`other` with the input size, channels and normalization of `like`.

    other, like: both images or both tables; gray images become color images, but not the reverse

    >>> match_inputs(load("digits"), load("digits-mosaic")).input_shape
    (1, 16, 16)
    """
    if (other.kind == "table") != (like.kind == "table"):
        raise DataError(f"{other.name} cannot be combined with {like.name}: one has images, the other a table")
    have, need = other.input_shape[0], like.input_shape[0]
    if have != need:
        if other.kind == "table" or have != 1:
            what = "columns" if other.kind == "table" else "channels"
            raise DataError(f"{other.name} has {have} {what}, and {like.name} has {need}")
        if other.kind == "images":
            other = other.map_splits(lambda _, split: Split(_pixels(split).expand(-1, need, -1, -1), split.y))
    return replace(other, mean=like.mean, std=like.std, input_shape=like.input_shape)


def _pixels(split: Split) -> Tensor:
    assert isinstance(split.x, Tensor)
    return split.x


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
        options = {key: value for key, _, value in (item.partition("=") for item in question[1].split("&"))}
    if body.startswith("mosaic(") and body.endswith(")"):
        return "mosaic", body[len("mosaic(") : -1], options
    family, colon, argument = body.partition(":")
    return (family, argument, options) if colon and family in _BY_PATH else (body, "", options)


def stamp(spec: str) -> tuple[int, ...]:
    """What changes when the file that a spec names is written again; empty for a spec without a path.

    spec: as in `load`; of a folder, what changes below it is not seen
    """
    family, argument, _ = parse(spec)
    if family == "mosaic":
        return stamp(argument)
    if family in _BY_PATH:
        with contextlib.suppress(OSError, ValueError):
            found = os.stat(argument)
            return found.st_mtime_ns, found.st_size, found.st_ino
    return ()


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise ValueError
    return value


def _lists(text: str) -> str:
    return LISTS[LISTS.index(text)]


def _grid(text: str) -> tuple[int, int]:
    rows, _, cols = text.partition("x")
    return int(rows), int(cols or rows)


# an option's reader, and what it accepts
Reader = tuple[Callable[[str], Any], str]
_WHOLE: Reader = (int, "a whole number")
_TEST: dict[str, Reader] = {"test": (_fraction, "a fraction between 0 and 1")}

_MOSAICS = ("mosaic", "digits-mosaic")
_BY_PATH = ("folder", "csv", "npz", "arff")
_LOADERS: dict[str, tuple[Callable[[Request], Dataset], dict[str, Reader]]] = {
    "digits": (load_digits, {}),
    "cifar10": (load_cifar, {}),
    "cifar100": (load_cifar, {}),
    "tiny-imagenet": (load_tiny_imagenet, {}),
    "coco": (load_coco, {}),
    "coco2017": (load_coco, {}),
    "nuswide": (load_nuswide, {"lists": (_lists, " or ".join(LISTS))}),
    "folder": (load_folder, _TEST),
    "csv": (load_csv, _TEST),
    "npz": (load_npz, _TEST),
    "arff": (load_arff, {"labels": _WHOLE, **_TEST}),
}


def _options(spec: str, given: dict[str, str], **readers: Reader) -> dict[str, Any]:
    """The options of a spec, converted; unknown and invalid ones are errors."""
    out = {}
    for key, text in given.items():
        if key not in readers:
            raise DataError(f"{spec}: unknown option {key!r}, accepted here: {', '.join(readers) or 'none'}")
        try:
            out[key] = readers[key][0](text)
        except ValueError:
            raise DataError(f"{spec}: option {key} must be {readers[key][1]}, got {text!r}") from None
    return out


def _unknown(spec: str, family: str) -> str:
    names = [f"{name}:PATH" if name in _BY_PATH else name for name in _LOADERS]
    names += ["digits-mosaic", "mosaic(DATASET)"]
    meant = by_path(family)
    hint = f"unknown dataset {spec!r}, did you mean {meant!r}" if meant else ""
    return f"{hint or unknown('dataset', spec, names)}; accepted are {', '.join(names)}"


def by_path(path: str) -> str | None:
    """The spec that reads a folder or file; None where there is none, or of another kind.

    path: as somebody may write it instead of the spec

    >>> by_path("."), by_path("nowhere")
    ('folder:.', None)
    """
    if os.path.isdir(path):
        return f"folder:{path}"
    family = {".npz": "npz", ".arff": "arff", ".csv": "csv", ".tsv": "csv"}.get(os.path.splitext(path)[1].lower())
    return f"{family}:{path}" if family and os.path.isfile(path) else None


# input shape and statistics


def _resized(data: Dataset, image_size: int | None) -> Dataset:
    """`data` with its input shape, and large images shrunk to it."""
    x = data.train.x
    if not isinstance(x, Tensor):  # too many pixels to go through; and pretrained networks expect these statistics
        side = image_size or 224
        return replace(data, **IMAGENET, input_shape=(3, side, side))
    if x.ndim == 2 and image_size is not None:
        raise ValueError(f"image_size is for images, and {data.name} is a table")
    shape = tuple(x.shape[1:]) if image_size is None else (x.shape[1], image_size, image_size)
    if image_size is not None and image_size < min(x.shape[-2:]):  # to grow, batch by batch, takes less memory
        data = data.map_splits(lambda _, split: _shrink(split, image_size))
    return replace(data, input_shape=shape)


def _with_statistics(data: Dataset) -> Dataset:
    """`data` with mean and standard deviation of its training split, unless it has published ones."""
    if data.mean.numel() == data.input_shape[0]:
        return data
    mean, std = statistics(_pixels(data.train))
    return replace(data, mean=mean, std=std)


def _shrink(split: Split, side: int) -> Split:
    rows = range(0, len(split), 1024)
    return Split(torch.cat([resize(_pixels(split)[k : k + 1024], (side, side)) for k in rows]), split.y)
