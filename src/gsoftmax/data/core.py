"""Dataset and Split, seeded subsets of the training rows, and helpers for reading files safely."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..catalog import DatasetInfo
from ..files import open_read
from ..messages import first_line
from .augment import Augment
from .seeded import long_tail, mix, noisy, take

Kind = Literal["images", "table", "files"]

PARTS = ("train", "val", "test")
Splits = dict[str, Any]  # part -> Split
TEST_SHARE = 0.2  # of the images that become the test set where there is none
MAX_BYTES = 16 * 2**30  # the most that a file may declare and have allocated
SMALL, MAX_RATIO = 2**29, 100  # any file may take the first; a large one this many times its size
_SAMPLED_FILES, _SAMPLED_BYTES = 1024, 2**16  # of image files, for their fingerprint
# of the ImageNet training images, on the scale 0 to 1
IMAGENET: dict[str, Any] = {"mean": torch.tensor([0.485, 0.456, 0.406]), "std": torch.tensor([0.229, 0.224, 0.225])}


class DataError(ValueError):
    """Missing, damaged or invalid data; the first line names the file or value and what is accepted."""


@dataclass(frozen=True, eq=False)
class Split:
    """Inputs and labels, row by row.

    x: uint8 (N, C, H, W) images, float32 (N, D) table, or a tuple of N image file names
    y: int64 (N,) class indices, or uint8 (N, L) of 0 and 1 for multi-label data
    files: names of the N image files that a tensor x was read from, or nothing

    >>> Split(torch.zeros(3, 2), torch.tensor([0, 1, 1])).select([2, 0]).y
    tensor([1, 0])
    """

    x: Tensor | tuple[str, ...]
    y: Tensor
    files: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise DataError(f"inputs and labels must have the same number of rows, got {len(self.x)} and {len(self.y)}")

    def __len__(self) -> int:
        return len(self.y)

    def select(self, index: Sequence[int] | np.ndarray) -> Split:
        """The rows at these positions, in this order.

        index: (M,) row positions
        """
        rows = torch.as_tensor(np.asarray(index, dtype=np.int64))
        x = self.x[rows] if isinstance(self.x, Tensor) else tuple(self.x[i] for i in rows.tolist())
        return Split(x, self.y[rows], tuple(self.files[i] for i in rows.tolist()) if self.files else ())

    def to(self, device: torch.device | str) -> Split:
        """The same rows on the device; file names stay."""
        return replace(self, x=self.x.to(device) if isinstance(self.x, Tensor) else self.x, y=self.y.to(device))


@dataclass(frozen=True, eq=False)
class Dataset:
    """Splits, class names, and what training needs to know about the inputs."""

    name: str  # as printed; generated smoke data ends in "(smoke)"
    kind: Kind  # images and tables are in memory; files are names of image files
    classes: tuple[str, ...]  # names of the classes, or of the labels
    multilabel: bool  # y is (N, L) of 0 and 1
    train: Split  # training rows
    test: Split  # test rows
    val: Split | None = None  # validation rows
    input_shape: tuple[int, ...] = ()  # of the network's input, (C, H, W) or (D,); batches resize images to it
    mean: Tensor = field(default_factory=lambda: torch.empty(0))  # (C,) of the training images in [0, 1], or (D,)
    std: Tensor = field(default_factory=lambda: torch.empty(0))  # likewise
    augment: Augment = field(default_factory=Augment)  # default training augmentation
    source: str = ""  # where the data comes from
    notes: tuple[str, ...] = ()  # sentences for the user: rows left out, noise added, ...

    @property
    def num_classes(self) -> int:
        """Number of classes, or of labels."""
        return len(self.classes)

    def split(self, part: str) -> Split:
        """One split.

        part: "train", "val" or "test"
        """
        if part not in PARTS:
            raise ValueError(f"part must be 'train', 'val' or 'test', got {part!r}")
        found: Split | None = getattr(self, part)
        if found is None:
            raise ValueError(f"{self.name} has no validation split: load it with val_fraction above 0")
        return found

    def map_splits(self, change: Callable[[str, Split], Split]) -> Dataset:
        """The same dataset with other splits.

        change: from the part's name and its split to the new split
        """
        splits: Splits = {p: change(p, split) for p in PARTS if (split := getattr(self, p)) is not None}
        return replace(self, **splits)

    def to(self, device: torch.device | str) -> Dataset:
        """The same dataset on the device; file names stay."""
        return self.map_splits(lambda part, split: split.to(device))

    def summary(self) -> str:
        """One line: name, sizes, shape.

        >>> from gsoftmax.data import load
        >>> load("digits").summary()
        'digits: 1,297 train, 500 test, 10 classes, 1x8x8 images'
        """
        sizes = [f"{len(split):,} {p}" for p in PARTS if (split := getattr(self, p)) is not None]
        sizes.append(f"{self.num_classes} {'labels' if self.multilabel else 'classes'}")
        shape = "x".join(map(str, self.input_shape))
        what = {"images": "images", "files": "image files", "table": "columns"}[self.kind]
        return f"{self.name}: {', '.join(sizes)}, {shape} {what}"

    def fingerprint(self) -> str:
        """SHA-256 of inputs, labels and class names.

        Of image files: the names relative to the common folder, all sizes, and the first 64 KiB of 1,024 files or
        fewer, evenly spaced.  A single file that changes without changing its size may go unnoticed.
        """
        digest = hashlib.sha256(repr((self.kind, self.classes, self.input_shape)).encode())
        for part in (self.train, self.val, self.test):
            if part is None:
                continue
            digest.update(repr((tuple(part.y.shape), str(part.y.dtype))).encode())
            digest.update(part.y.cpu().contiguous().numpy().data)
            if isinstance(part.x, Tensor):
                digest.update(part.x.cpu().contiguous().numpy().data)
            else:
                common = os.path.commonpath([os.path.dirname(p) for p in part.x]) if part.x else ""
                names = [Path(os.path.relpath(p, common)).as_posix() for p in part.x]
                digest.update("\n".join(names).encode("utf-8", "surrogateescape"))
                _add_files(digest, part.x)
        return digest.hexdigest()


def _add_files(digest: Any, paths: Sequence[str]) -> None:
    """Adds the sizes of files to a digest, and the beginnings of a fixed sample of them."""
    for path in paths:
        digest.update(b"%d\n" % (os.stat(path).st_size if os.path.exists(path) else -1))
    for path in paths[:: -(-len(paths) // _SAMPLED_FILES)]:
        with suppress(OSError), open_read(path) as file:
            digest.update(file.read(_SAMPLED_BYTES))


@dataclass(frozen=True)
class Subset:
    """Changes to the training split: less or worse data, and rows that become the validation split."""

    train_fraction: float = 1.0  # fraction of the training rows to keep, stratified by class
    imbalance: float = 1.0  # ratio of the largest to the smallest class, reached by dropping training rows
    label_noise: float = 0.0  # fraction of the training labels to replace by a wrong class
    val_fraction: float = 0.0  # fraction of the training rows for `val`, stratified by class, if the data has none

    def __post_init__(self) -> None:
        check_range("train_fraction", self.train_fraction, 0, 1, open_left=True)
        check_range("imbalance", self.imbalance, 1, math.inf, open_right=True)
        check_range("label_noise", self.label_noise, 0, 1)
        check_range("val_fraction", self.val_fraction, 0, 1, open_right=True)

    def is_random(self, data: Dataset) -> bool:
        """Whether the seed matters.

        data: as in `of`
        """
        return self != Subset(val_fraction=self.val_fraction) or (self.val_fraction > 0 and data.val is None)

    def of(self, data: Dataset, seed: int) -> Dataset:
        """`data` with these changes; the test split stays.

        data, seed: the dataset, and what decides the rows
        """
        data = self._with_validation(data, seed)
        train, notes = data.train, list(data.notes)
        for name, unused in (("imbalance", 1), ("label_noise", 0)):
            if data.multilabel and getattr(self, name) != unused:
                raise ValueError(f"{name} is for single-label data, and {data.name} is multi-label")

        def note(count: int, what: str, option: str) -> None:
            notes.append(f"{count:,} of {len(train):,} training {what} ({option} {getattr(self, option)}, seed {seed})")

        if self.train_fraction < 1:
            kept, _ = take(train.y, self.train_fraction, mix(seed, 11))
            lost = [] if data.multilabel else sorted(set(train.y.tolist()) - set(train.y[kept].tolist()))
            if not len(kept) or lost:
                which = f", none of class {data.classes[lost[0]]!r}" if lost else ""
                raise ValueError(f"train_fraction={self.train_fraction} keeps {len(kept)} rows of {data.name}{which}")
            note(len(kept), "rows", "train_fraction")
            train = train.select(kept)
        if self.imbalance > 1:
            kept = long_tail(train.y, self.imbalance, mix(seed, 12))
            note(len(kept), "rows", "imbalance")
            train = train.select(kept)
        if self.label_noise > 0:
            changed = noisy(train.y, self.label_noise, data.num_classes, mix(seed, 13))
            note(int((changed != train.y).sum()), "labels made wrong", "label_noise")
            train = replace(train, y=changed)
        return replace(data, train=train, notes=tuple(notes))

    def _with_validation(self, data: Dataset, seed: int) -> Dataset:
        """`data` with a validation split from the training rows, unless it already has one."""
        fraction = self.val_fraction
        if fraction == 0 or data.val is not None:
            return data
        aside, rest = take(data.train.y, fraction, mix(seed, 10), keep=1)
        if not len(aside) or not len(rest):
            sizes = f"{len(rest)} training and {len(aside)} validation rows"
            raise ValueError(f"val_fraction={fraction} would leave {sizes} of {data.name}")
        return replace(data, val=data.train.select(aside), train=data.train.select(rest))


class Request(NamedTuple):
    """What a loader is asked for."""

    family: str  # "cifar10", "npz", ...
    path: str  # what follows the family's name, as in npz:PATH
    options: dict[str, Any]  # those at the end of the spec
    root: str | os.PathLike[str] | None  # folder of the published datasets
    image_size: int | None
    check: bool  # whether published sizes and checksums are required, and every image


def set_aside(split: Split, request: Request) -> Splits:
    """The split in two: a fraction, TEST_SHARE or the option `test`, becomes the test set, stratified by class.

    It is the same test set for every seed, so that results of different seeds are about the same images.
    """
    aside, rest = take(split.y, request.options.get("test", TEST_SHARE), seed=0, keep=1)
    return {"train": split.select(rest), "test": split.select(aside)}


def check_range(
    name: str, value: float, low: float, high: float, *, open_left: bool = False, open_right: bool = False
) -> None:
    """Raise unless low <= value <= high; an open end is excluded."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not ok or (open_left and value == low) or (open_right and value == high):
        upper = "" if high == math.inf else f" and {'below' if open_right else 'at most'} {high}"
        raise ValueError(f"{name} must be {'above' if open_left else 'at least'} {low}{upper}, got {value!r}")


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32 mean and standard deviation of each channel of uint8 (N, C, H, W), in [0, 1], or column of (N, D).

    A constant channel or column gets the standard deviation 1, so that dividing by it is harmless.
    """
    image = x.dtype == torch.uint8
    dims, scale = ((0, 2, 3), 255.0) if image else ((0,), 1.0)
    count = x.numel() // x.shape[1]
    chunks = range(0, len(x), 256)
    mean, var = torch.zeros(2, x.shape[1], dtype=torch.float64)
    for k in chunks:  # whole numbers add up exactly
        mean += x[k : k + 256].sum(dims, dtype=torch.int64 if image else torch.float64)
    mean /= count
    centre = mean.float().view(1, -1, 1, 1) if image else mean
    for k in chunks:  # over differences from the mean, so float32 is enough for pixels
        rows = x[k : k + 256]
        var += ((rows.float() if image else rows.double()) - centre).square_().sum(dims)
    var /= count
    mean, std = mean / scale, var.sqrt() / scale
    std[std < 1e-8 * mean.abs().clamp_min(1e-8)] = 1.0
    return mean.float(), std.float()


def data_root(root: str | os.PathLike[str] | None) -> Path:
    """The folder of the published datasets.

    root: the folder; None for $GSOFTMAX_DATA, else ./data
    """
    return Path(root if root is not None else os.environ.get("GSOFTMAX_DATA") or "data")


def locate(
    info: DatasetInfo, root: str | os.PathLike[str] | None, folders: Sequence[str], needed: Sequence[str]
) -> Path:
    """The first of root/folder with any of the needed files; else a DataError with source and layout."""
    base = data_root(root)
    for folder in folders:
        if any((base / folder / name).exists() for name in needed):
            return base / folder
    raise DataError(
        f"{info.name} not found under {base}: expected {' or '.join(needed)} there\n"
        f"  get it from: {info.source}\n  layout: " + info.layout.replace("\n", "\n          ")
    )


def is_smoke(folder: Path) -> bool:
    """Whether the folder contains generated smoke data, which is exempt from published sizes and checksums."""
    return (folder / "SMOKE").is_file()


@contextmanager
def reading(path: str | os.PathLike[str], *damage: type[Exception]) -> Iterator[None]:
    """Raise a DataError that names `path` for an OSError, or for one of `damage`."""
    caught: tuple[type[Exception], ...] = (OSError, *damage)
    try:
        yield
    except DataError:
        raise
    except caught as error:
        if isinstance(error, OSError) and OSError not in damage:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
        reason = f"an item without {error}" if isinstance(error, KeyError) else first_line(error)
        raise DataError(f"{path} is damaged: {reason}") from None


def within_limit(nbytes: int, what: str, held: int = MAX_BYTES) -> None:
    """Raise if a declared size is more than a file of `held` bytes may take: a small file must not fill the memory."""
    limit = min(MAX_BYTES, max(SMALL, MAX_RATIO * held))
    if nbytes > limit:
        of = f" for a file of {held:,}" if limit < MAX_BYTES else ""
        raise DataError(f"{what} declares {nbytes:,} bytes, more than the limit of {limit:,}{of}")


def read_bytes(path: Path, limit: int) -> bytes:
    """A whole file of at most `limit` bytes."""
    with reading(path), open_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise DataError(f"{path} has {size:,} bytes, more than the limit of {limit:,} for such a file")
        return file.read(limit)


def read_lines(path: Path) -> list[str]:
    """The non-empty lines of a text file of at most 64 MiB, stripped."""
    return [line.strip() for line in read_bytes(path, 2**26).decode("utf-8", "replace").splitlines() if line.strip()]


def plain_name(name: object, where: Path) -> str:
    """The file name, or a DataError if it could lead out of its folder."""
    if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\\0"):
        raise DataError(f"{where} names {str(name)[:80]!r}, which is not a plain file name")
    return name


def check_md5(data: bytes, expected: str, path: str | os.PathLike[str]) -> None:
    """Raise unless the MD5 is the published one."""
    seen = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if seen != expected:
        raise DataError(f"{path} is damaged or not the published file: MD5 {seen}, published {expected}")
