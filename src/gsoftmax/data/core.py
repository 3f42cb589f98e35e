"""What every dataset becomes: two or three splits of inputs x and labels y, and the seeded choices made on them.

Loaders (one file per family) fill a Dataset; `gsoftmax.data.load` finishes it. Nothing here knows about heads.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..catalog import DatasetInfo
from .augment import Augment
from .seeded import mix, shuffled, uniform

Kind = Literal["images", "table", "files"]

MAX_BYTES = 16 * 2**30  # nothing that declares itself larger than this is allocated
IMAGENET_MEAN = (0.485, 0.456, 0.406)  # of the ImageNet training images, on the scale 0 to 1
IMAGENET_STD = (0.229, 0.224, 0.225)


class DataError(ValueError):
    """Data that is missing, damaged, or not what it says it is; the first line names the thing and what is expected."""


@dataclass(frozen=True, eq=False)
class Split:
    """Inputs and labels, row by row.

    x: uint8 (N, C, H, W) images, float32 (N, D) table, or a tuple of N image file names
    y: int64 (N,) class indices, or uint8 (N, L) with a 1 for every label the row has

    >>> Split(torch.zeros(3, 2), torch.tensor([0, 1, 1])).select([2, 0]).y
    tensor([1, 0])
    """

    x: Tensor | tuple[str, ...]
    y: Tensor

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise DataError(f"inputs and labels must have the same number of rows, got {len(self.x)} and {len(self.y)}")

    def __len__(self) -> int:
        return len(self.y)

    def select(self, index: Sequence[int] | np.ndarray) -> Split:
        """The rows at these positions, in this order."""
        rows = torch.as_tensor(np.asarray(index, dtype=np.int64))
        x = self.x[rows] if isinstance(self.x, Tensor) else tuple(self.x[i] for i in rows.tolist())
        return Split(x, self.y[rows])

    def to(self, device: torch.device | str) -> Split:
        """The same rows with labels, and inputs held in memory, on the device."""
        return Split(self.x.to(device) if isinstance(self.x, Tensor) else self.x, self.y.to(device))


@dataclass(frozen=True, eq=False)
class Dataset:
    """A task: splits, class names and everything training has to know about the inputs.

    kind: "images" (x in memory), "table" (x in memory) or "files" (x are names of image files)
    input_shape: what the network is given, (C, H, W) or (D,); batches resize images to it
    mean, std: (C,) of the training images on the scale 0 to 1, or (D,) of the table's columns
    augment: a sensible training augmentation for this data
    notes: sentences a user should see (rows left out, noise added, ...)
    """

    name: str
    kind: Kind
    classes: tuple[str, ...]
    multilabel: bool
    train: Split
    test: Split
    val: Split | None = None
    input_shape: tuple[int, ...] = ()
    mean: Tensor = field(default_factory=lambda: torch.empty(0))
    std: Tensor = field(default_factory=lambda: torch.empty(0))
    augment: Augment = field(default_factory=Augment)
    source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def num_classes(self) -> int:
        """Number of classes, or of labels."""
        return len(self.classes)

    def split(self, part: str) -> Split:
        """The split called "train", "val" or "test"."""
        if part not in ("train", "val", "test"):
            raise ValueError(f"part must be 'train', 'val' or 'test', got {part!r}")
        found: Split | None = getattr(self, part)
        if found is None:
            raise ValueError(f"{self.name} has no validation split: load it with val_fraction above 0")
        return found

    def to(self, device: torch.device | str) -> Dataset:
        """The same dataset with everything that is in memory on the device."""
        val = None if self.val is None else self.val.to(device)
        return replace(self, train=self.train.to(device), test=self.test.to(device), val=val)

    def summary(self) -> str:
        """One line: name, sizes, shape.

        >>> from gsoftmax.data import load
        >>> load("digits").summary()
        'digits: 1,297 train, 500 test, 10 classes, 1x8x8 images'
        """
        sizes = [f"{len(self.train):,} train"]
        if self.val is not None:
            sizes.append(f"{len(self.val):,} val")
        sizes.append(f"{len(self.test):,} test")
        sizes.append(f"{self.num_classes} {'labels' if self.multilabel else 'classes'}")
        shape = "x".join(map(str, self.input_shape))
        what = {"images": "images", "files": "image files", "table": "columns"}[self.kind]
        return f"{self.name}: {', '.join(sizes)}, {shape} {what}"

    def fingerprint(self) -> str:
        """SHA-256 over inputs (for files: their names relative to the common folder), labels and class names.

        Two runs were given the same data exactly when their fingerprints agree.
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
                digest.update("\n".join(Path(os.path.relpath(p, common)).as_posix() for p in part.x).encode())
        return digest.hexdigest()


# Seeded choices


def take(y: Tensor, fraction: float, seed: int, keep: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Positions (taken, left), both ascending: round(fraction · N) rows, of every class alike to within one row.

    At least `keep` rows of every class are left behind. Multi-label rows are taken at random, without strata.

    >>> taken, left = take(torch.tensor([0] * 8 + [1] * 4), 0.25, seed=0)
    >>> len(taken), len(left), int((taken < 8).sum())
    (3, 9, 2)
    """
    n = len(y)
    order = shuffled(n, seed)
    if y.ndim == 2:
        chosen = order[: round(fraction * n)]
    else:
        labels = y.cpu().numpy()[order]
        groups = [order[labels == c] for c in np.unique(labels)]
        exact = np.array([fraction * len(g) for g in groups])
        counts = np.floor(exact + 1e-9).astype(int)
        # the rows that rounding down lost go to the classes that lost most
        short = round(fraction * n) - int(counts.sum())
        counts[np.argsort(-(exact - counts), kind="stable")[: max(short, 0)]] += 1
        counts = np.minimum(counts, [max(len(g) - keep, 0) for g in groups])
        chosen = np.concatenate([g[:k] for g, k in zip(groups, counts, strict=True)])
    mask = np.zeros(n, dtype=bool)
    mask[chosen] = True
    return np.flatnonzero(mask), np.flatnonzero(~mask)


def long_tail(y: Tensor, factor: float, seed: int) -> np.ndarray:
    """Positions that make the classes unequal: class c of C keeps at most max_count · factor^(-c/(C-1)) rows.

    factor is the ratio of the largest to the smallest class (Cui et al. 2019), 1 changes nothing.

    >>> y = torch.arange(3).repeat_interleave(100)
    >>> torch.bincount(y[long_tail(y, 100.0, seed=0)]).tolist()
    [100, 10, 1]
    """
    labels = y.cpu().numpy()
    classes, counts = np.unique(labels, return_counts=True)
    order = shuffled(len(labels), seed)
    kept = []
    for rank, c in enumerate(classes):
        target = counts.max() * factor ** (-rank / max(len(classes) - 1, 1))
        rows = order[labels[order] == c]
        kept.append(rows[: max(1, round(target))])
    return np.sort(np.concatenate(kept))


def noisy(y: Tensor, fraction: float, num_classes: int, seed: int) -> Tensor:
    """The labels with exactly round(fraction · N) of them wrong: each becomes one of the others, all alike likely.

    >>> y = torch.zeros(10, dtype=torch.int64)
    >>> int((noisy(y, 0.4, 3, seed=0) != y).sum())
    4
    """
    n = len(y)
    rows = shuffled(n, mix(seed, 1))[: round(fraction * n)]
    step = 1 + np.floor(uniform(len(rows), mix(seed, 2)) * (num_classes - 1)).astype(np.int64)
    out = y.clone()
    at = torch.from_numpy(rows)
    out[at] = (y[at] + torch.from_numpy(step)) % num_classes
    return out


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation, float32, of each channel of uint8 (N, C, H, W), on the scale 0 to 1, or column of (N, D).

    A channel or column that never changes gets the standard deviation 1, so that dividing by it is harmless.
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


# Files


def data_root(root: str | os.PathLike[str] | None) -> Path:
    """Where datasets are looked for: the argument, else $GSOFTMAX_DATA, else ./data."""
    return Path(root if root is not None else os.environ.get("GSOFTMAX_DATA") or "data")


def locate(
    info: DatasetInfo, root: str | os.PathLike[str] | None, folders: Sequence[str], needed: Sequence[str]
) -> Path:
    """The first of root/folder that holds any of the needed files; else a DataError that says what to put where."""
    base = data_root(root)
    for folder in folders:
        if any((base / folder / name).exists() for name in needed):
            return base / folder
    raise DataError(
        f"{info.name} not found under {base}: expected {' or '.join(needed)} there\n"
        f"  get it from: {info.source}\n  layout: " + info.layout.replace("\n", "\n          ")
    )


def is_smoke(folder: Path) -> bool:
    """Whether the folder is marked as small generated files, exempt from published sizes and checksums."""
    return (folder / "SMOKE").is_file()


def first_line(error: BaseException) -> str:
    """An exception in one line: the first of its message, or its name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def within_limit(nbytes: int, what: str) -> None:
    """Refuse to allocate what declares itself too large."""
    if nbytes > MAX_BYTES:
        raise DataError(f"{what} declares {nbytes:,} bytes, more than the limit of {MAX_BYTES:,}")


def read_bytes(path: Path, limit: int) -> bytes:
    """A whole file, refused beforehand when larger than the limit."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise DataError(f"{path} has {size:,} bytes, more than the limit of {limit:,} for such a file")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def check_md5(data: bytes, expected: str, path: str | os.PathLike[str]) -> None:
    """Refuse a file whose MD5 is not the published one."""
    seen = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if seen != expected:
        raise DataError(f"{path} is damaged or not the published file: MD5 {seen}, published {expected}")


def encode_labels(groups: Sequence[Sequence[str]], classes: Sequence[str], where: str) -> list[Tensor]:
    """Class indices of names, one int64 tensor per group; an unknown name is a DataError."""
    index = {name: i for i, name in enumerate(classes)}
    out = []
    for names in groups:
        unknown = next((name for name in names if name not in index), None)
        if unknown is not None:
            raise DataError(f"{where}: class {unknown!r} is not among the {len(classes)} classes of the training split")
        out.append(torch.tensor([index[name] for name in names], dtype=torch.int64))
    return out
