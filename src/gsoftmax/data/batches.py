"""Batches whose order and augmentation depend only on (seed, epoch).

So every head sees the same batches, and an interrupted run continues exactly where it stopped. Images and tables in
memory stay on their device. Large images are read and resized by `DataLoader` workers; all further steps happen on the
device, with the code that small images use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .augment import Augment, boxes, color, crop_and_resize, cut_out, draw, shift_and_flip, whole_pixels
from .core import DataError, Dataset
from .images import ImageFiles, cores, decoded, read_files, read_image, resize
from .seeded import mix

Batch = tuple[Tensor, Tensor]

GPU_ROWS = 1 << 14  # images augmented at a time on a GPU


@dataclass(frozen=True)
class Delivery:
    """How batches arrive; none of this changes which rows are in a batch or how they are augmented."""

    shard: tuple[int, int] = (0, 1)  # (rank, world): this process's part of every batch; batch_size counts all parts
    dtype: torch.dtype = torch.float32  # of x
    channels_last: bool = False  # memory format of images
    device: torch.device | str | None = None  # default: where the data is; move it there once with data.to(device)
    workers: int | None = None  # processes that read image files (default: one per core, at most 8)

    def __post_init__(self) -> None:
        if not 0 <= self.shard[0] < self.shard[1]:
            raise ValueError(f"shard must be (rank, world) with 0 <= rank < world, got {self.shard}")


def num_batches(rows: int, batch_size: int, drop_last: bool = False) -> int:
    """The number of batches in an epoch.

    rows, batch_size: how many there are, and how many go into a batch
    drop_last: whether an incomplete last batch is dropped

    >>> num_batches(10, 4), num_batches(10, 4, drop_last=True)
    (3, 2)
    """
    return rows // batch_size if drop_last else -(-rows // batch_size)


def train_batches(
    data: Dataset,
    batch_size: int,
    *,
    seed: int,
    epoch: int,
    augment: Augment | None = None,
    drop_last: bool = True,
    skip: int = 0,
    **delivery: Any,
) -> Iterator[Batch]:
    """Shuffled, augmented, normalized training batches (x, y) of one epoch.

    x: (batch, *input_shape); y: int64 (batch,), or uint8 (batch, labels)
    data, batch_size: the dataset, and the rows per batch
    seed, epoch: determine order and augmentation
    augment: instead of data.augment; Augment() for none
    drop_last: whether an incomplete last batch is dropped
    skip: batches to skip at the start, to resume within an epoch
    delivery: shard, dtype, channels_last, device and workers, as in `Delivery`

    >>> from gsoftmax.data import load
    >>> digits = load("digits")
    >>> once = [y for _, y in train_batches(digits, 64, seed=1, epoch=5)]
    >>> again = [y for _, y in train_batches(digits, 64, seed=1, epoch=5, skip=2)]
    >>> len(once), len(again), torch.equal(once[2], again[0])
    (20, 18, True)
    """
    n = len(data.train)
    _check_batch_size(batch_size)
    if batch_size > n:
        raise ValueError(f"batch_size must be at most the {n:,} training rows of {data.name}, got {batch_size:,}")
    chosen = data.augment if augment is None else augment
    if data.kind == "table" and chosen != Augment():
        raise ValueError(f"augment is for images, and {data.name} is a table")
    total = num_batches(n, batch_size, drop_last)
    if not 0 <= skip <= total:
        raise ValueError(f"skip must be from 0 to the epoch's {total} batches, got {skip}")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(mix(seed, epoch, 0)))
    pieces = list(order.split(batch_size))[skip:total]
    return _batches(data, "train", pieces, chosen, draw(chosen, n, seed, epoch), Delivery(**delivery))


def eval_batches(data: Dataset, part: str = "test", batch_size: int = 1024, **delivery: Any) -> Iterator[Batch]:
    """Every row of a split once, in order, normalized and not augmented.

    part: "train", "val" or "test"
    data, batch_size, delivery: as in `train_batches`

    >>> from gsoftmax.data import load
    >>> sum(len(y) for _, y in eval_batches(load("digits"), "test", 64))
    500
    """
    _check_batch_size(batch_size)
    pieces = list(torch.arange(len(data.split(part))).split(batch_size))
    return _batches(data, part, pieces, Augment(), {}, Delivery(**delivery))


def _check_batch_size(value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"batch_size must be a whole number above 0, got {value!r}")


def _batches(
    data: Dataset, part: str, pieces: list[Tensor], augment: Augment, drawn: dict[str, Tensor], delivery: Delivery
) -> Iterator[Batch]:
    split = data.split(part)
    rank, world = delivery.shard
    if world > 1:
        pieces = [piece.tensor_split(world)[rank] for piece in pieces]
    where = split.y.device if delivery.device is None else torch.device(delivery.device)
    images = data.kind != "table"
    size = (data.input_shape[-2], data.input_shape[-1]) if images else (0, 0)
    layout = torch.channels_last if delivery.channels_last and images else torch.preserve_format
    shape, scale = ((1, -1, 1, 1), 255.0) if images else ((1, -1), 1.0)
    mean = (data.mean * scale).view(shape).to(where)
    factor = (1 / (data.std * scale)).view(shape).to(where)
    box = drawn.pop("box", None)  # (rows, 4) uniform numbers
    if box is not None and isinstance(split.x, Tensor):
        drawn["box"] = boxes(box, augment.area, split.x.shape[-2], split.x.shape[-1])
    drawn = {k: v.to(where) for k, v in drawn.items()}  # one transfer per epoch

    def finish(x: Tensor, rows: Tensor) -> Tensor:
        """From pixels, or columns, to the network's input.  rows: (batch,) positions in the split."""
        if not images:
            return ((x - mean) * factor).to(delivery.dtype)
        now = {k: v[rows] for k, v in drawn.items()}
        x = shift_and_flip(x, now.get("shift"), now.get("flip"), augment.pad, augment.reflect)
        x = x.float()  # until the very end: pixels and colors lose digits in half precision
        x = crop_and_resize(x, now["box"], size) if "box" in now else resize(x, size)
        x = color(x, now.get("jitter"), now.get("order"), now.get("lighting"))
        x = (x - mean) * factor
        if "cutout" in now:
            x = cut_out(x, now["cutout"], augment.cutout)
        return x.to(delivery.dtype, memory_format=layout)

    if isinstance(split.x, Tensor):
        # Augmentation depends on the example alone, so a GPU gets many batches at a time: launch overhead dominates
        # there.  A CPU gets one, which stays in its cache.
        together = max(1, GPU_ROWS // max(1, len(pieces[0]))) if where.type == "cuda" and pieces else 1
        if pieces:  # one transfer per epoch
            pieces = list(torch.cat(pieces).to(split.x.device).split([len(piece) for piece in pieces]))
        for start in range(0, len(pieces), together):
            group = pieces[start : start + together]
            rows, sizes = torch.cat(group), [len(piece) for piece in group]
            x, y = finish(split.x[rows].to(where), rows.to(where)), split.y[rows].to(where)
            yield from zip(x.split(sizes), y.split(sizes), strict=True)
    else:
        workers = min(8, cores()) if delivery.workers is None else delivery.workers
        photos = _Photos(split.x, size, box, augment.area)
        kept = decoded(split, size) if box is None else None  # a crop differs from epoch to epoch
        todo = pieces if kept is None else [kept.unknown(piece) for piece in pieces]
        workers = workers if any(map(len, todo)) else 0
        for piece, item in zip(pieces, read_files(photos, todo, workers, pin=where.type == "cuda"), strict=True):
            if isinstance(item, str):
                raise DataError(item)
            rows, pixels = item
            if kept is not None:
                kept.add(rows, pixels)
                rows, pixels = piece, kept.pixels[piece]
            x = finish(pixels.to(where, non_blocking=True), rows.to(where, non_blocking=True))
            yield x, split.y[rows.to(split.y.device)].to(where)


class _Photos(ImageFiles):
    """Images resized with torchvision's bicubic filter, cropped if there are boxes."""

    def __init__(self, paths: tuple[str, ...], size: tuple[int, int], drawn: Tensor | None, area: float) -> None:
        super().__init__(paths, size)
        self.drawn, self.area = drawn, area

    def read(self, row: int) -> Tensor:
        try:
            from torchvision.transforms.v2 import functional as V
        except ImportError:
            need = "which is not installed: pip install 'gsoftmax[train]'"
            raise DataError(f"image files need torchvision, {need}") from None
        image = read_image(self.paths[row])
        if self.drawn is not None:
            h, w = image.shape[-2:]
            box = whole_pixels(boxes(self.drawn[row : row + 1], self.area, h, w), h, w)
            image = V.crop(image, *box[0].int().tolist())
        return V.resize(image, list(self.size), interpolation=V.InterpolationMode.BICUBIC, antialias=True)
