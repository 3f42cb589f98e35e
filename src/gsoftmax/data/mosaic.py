"""`mosaic(DATASET)`: a multi-label task made of real images, from any single-label set of small images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from .augment import Augment
from .core import DataError, Dataset, Split, within_limit
from .seeded import mix, shuffled


def tiles(n: int, count: int, cells: int, seed: int) -> np.ndarray:
    """Which of n images goes where, (count, cells): every image is used equally often, to within one.

    >>> np.bincount(tiles(6, 3, 4, seed=0).ravel(), minlength=6).tolist()
    [2, 2, 2, 2, 2, 2]
    """
    rounds = -(-count * cells // n)
    return np.concatenate([shuffled(n, mix(seed, r)) for r in range(rounds)])[: count * cells].reshape(count, cells)


def mosaic_split(split: Split, grid: tuple[int, int], count: int, num_classes: int, seed: int) -> Split:
    """Grids of images: x uint8 (count, C, rows·H, cols·W), y uint8 (count, classes), 1 for each class in the grid."""
    assert isinstance(split.x, Tensor)
    rows, cols = grid
    n, c, h, w = split.x.shape
    within_limit(count * c * rows * h * cols * w, "the mosaic")
    chosen = torch.from_numpy(tiles(n, count, rows * cols, seed))
    x = torch.empty(count, c, rows, h, cols, w, dtype=torch.uint8)
    for cell in range(rows * cols):
        x[:, :, cell // cols, :, cell % cols] = split.x[chosen[:, cell]]
    y = torch.zeros(count, num_classes, dtype=torch.uint8)
    y.scatter_(1, split.y[chosen], 1)
    return Split(x.view(count, c, rows * h, cols * w), y)


def make_mosaic(data: Dataset, *, grid: tuple[int, int], seed: int, counts: Mapping[str, int]) -> Dataset:
    """A multi-label dataset built from a single-label one; each split's mosaics come from that split's images.

    grid: (rows, columns)
    counts: part -> number of mosaics, where it differs from the number of images
    """
    rows, cols = grid
    if not (1 <= rows <= 16 and 1 <= cols <= 16 and rows * cols > 1):
        raise DataError(f"mosaic grid must be rows x columns, up to 16 each and more than one cell, got {rows}x{cols}")
    if data.multilabel or data.kind != "images":
        what = "multi-label" if data.multilabel else {"table": "a table", "files": "large image files"}[data.kind]
        raise DataError(f"mosaic({data.name}) needs a single-label set of small images, and this is {what}")

    def tile(part: str, split: Split) -> Split:
        count = counts.get(part, len(split))
        if count < 1:
            raise DataError(f"mosaic {part} must be at least 1 mosaic, got {count}")
        return mosaic_split(split, grid, count, data.num_classes, mix(seed, ("train", "test", "val").index(part)))

    name, smoke, _ = data.name.partition(" (smoke)")
    return replace(
        data.map_splits(tile),
        name=("digits-mosaic" if name == "digits" else f"mosaic({name})") + smoke,
        multilabel=True,
        augment=Augment(),
        notes=(*data.notes, f"{rows}x{cols} mosaics, seed {seed}"),
    )
