"""Batches: what comes in which order, and how it is changed, follows from (seed, epoch) alone.

So every head sees the same batches with the same augmentation, and a run that stopped goes on exactly where it was.
Images and tables in memory stay on their device from the first batch to the last. Large images are read and resized by
`DataLoader` workers; everything after that happens on the device, with the code that small images use.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .augment import Augment, boxes, colour, crop_and_resize, cut_out, draw, shift_and_flip
from .core import DataError, Dataset
from .images import cores, read_image, resize
from .seeded import mix

Batch = tuple[Tensor, Tensor]

GPU_ROWS = 1 << 14  # images augmented at a time on a GPU


def num_batches(rows: int, batch_size: int, drop_last: bool = False) -> int:
    """How many batches an epoch has.

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
    shard: tuple[int, int] = (0, 1),
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
    device: torch.device | str | None = None,
    workers: int | None = None,
) -> Iterator[Batch]:
    """Shuffled, augmented, normalised training batches (x, y) of one epoch.

    x: (batch, *input_shape) of `dtype`; y: int64 (batch,), or uint8 (batch, labels)
    seed, epoch: decide order and augmentation, and nothing else does
    augment: in place of data.augment; Augment() for none
    skip: batches at the beginning to leave out, for going on in the middle of an epoch
    shard: (rank, world): this process's share of every batch; batch_size counts all shares together
    device: where batches go (default: where data is; move data there once with data.to(device))
    workers: processes that read image files (default: one per core, at most 8); without influence on the result

    >>> from gsoftmax.data import load
    >>> digits = load("digits")
    >>> once = [y for _, y in train_batches(digits, 64, seed=1, epoch=5)]
    >>> again = [y for _, y in train_batches(digits, 64, seed=1, epoch=5, skip=2)]
    >>> len(once), len(again), torch.equal(once[2], again[0])
    (20, 18, True)
    """
    n = len(data.train)
    _positive("batch_size", batch_size)
    if batch_size > n:
        raise ValueError(f"batch_size must be at most the {n:,} training rows of {data.name}, got {batch_size:,}")
    chosen = data.augment if augment is None else augment
    if data.kind == "table" and chosen != Augment():
        raise ValueError(f"augment is for images, and {data.name} is a table")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(mix(seed, epoch, 0)))
    drawn = draw(chosen, n, seed, epoch)
    total = num_batches(n, batch_size, drop_last)
    if not 0 <= skip <= total:
        raise ValueError(f"skip must be from 0 to the epoch's {total} batches, got {skip}")
    pieces = [order[k * batch_size : (k + 1) * batch_size] for k in range(skip, total)]
    return _batches(data, "train", _share(pieces, shard), chosen, drawn, dtype, channels_last, device, workers)


def eval_batches(
    data: Dataset,
    part: str = "test",
    batch_size: int = 1024,
    *,
    shard: tuple[int, int] = (0, 1),
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
    device: torch.device | str | None = None,
    workers: int | None = None,
) -> Iterator[Batch]:
    """Every row of a split once, in order, normalised and unchanged otherwise.

    >>> from gsoftmax.data import load
    >>> sum(len(y) for _, y in eval_batches(load("digits"), "test", 64))
    500
    """
    _positive("batch_size", batch_size)
    order = torch.arange(len(data.split(part)))
    pieces = list(torch.split(order, batch_size))
    return _batches(data, part, _share(pieces, shard), Augment(), {}, dtype, channels_last, device, workers)


def _positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number above 0, got {value!r}")


def _share(pieces: list[Tensor], shard: tuple[int, int]) -> list[Tensor]:
    rank, world = shard
    if not 0 <= rank < world:
        raise ValueError(f"shard must be (rank, world) with 0 <= rank < world, got {shard}")
    return pieces if world == 1 else [piece.tensor_split(world)[rank] for piece in pieces]


def _batches(
    data: Dataset,
    part: str,
    pieces: list[Tensor],
    augment: Augment,
    drawn: dict[str, Tensor],
    dtype: torch.dtype,
    channels_last: bool,
    device: torch.device | str | None,
    workers: int | None,
) -> Iterator[Batch]:
    split = data.split(part)
    where = torch.device(device) if device is not None else split.y.device
    images = data.kind != "table"
    size = (data.input_shape[-2], data.input_shape[-1]) if images else (0, 0)
    shape, scale = ((1, -1, 1, 1), 255.0) if images else ((1, -1), 1.0)
    mean = (data.mean * scale).view(shape).to(where)
    factor = (1 / (data.std * scale)).view(shape).to(where)
    box = drawn.pop("box", None)  # (rows, 4) uniform numbers
    if box is not None and isinstance(split.x, Tensor):
        drawn["box"] = boxes(box, augment.area, split.x.shape[-2], split.x.shape[-1])
    drawn = {k: v.to(where) for k, v in drawn.items()}  # once an epoch: no transfer inside the loop

    def finish(x: Tensor, rows: Tensor) -> Tensor:
        """From pixels, or columns, to what the network is given.  rows: (batch,) positions in the split."""
        if images:
            now = {k: v[rows] for k, v in drawn.items()}
            x = shift_and_flip(x, now.get("shift"), now.get("flip"), augment.pad, augment.reflect)
            x = x.float()  # until the very end: pixels and colours lose digits in half precision
            x = crop_and_resize(x, now["box"], size) if "box" in now else resize(x, size)
            x = colour(x, now.get("jitter"), now.get("order"), now.get("lighting"))
            x = (x - mean) * factor
            if "cutout" in now:
                x = cut_out(x, now["cutout"], augment.cutout)
        else:
            x = (x - mean) * factor
        return x.to(dtype, memory_format=torch.channels_last if channels_last and images else torch.preserve_format)

    if isinstance(split.x, Tensor):
        # What happens to an example depends on the example alone, so a GPU gets many batches at a time: launching is
        # what costs there.  A CPU gets one, which stays in its cache.
        together = max(1, GPU_ROWS // max(1, len(pieces[0]))) if where.type == "cuda" and pieces else 1
        moved = _moved(pieces, split.x.device)
        for start in range(0, len(moved), together):
            group = moved[start : start + together]
            rows, sizes = torch.cat(group), [len(piece) for piece in group]
            x, y = finish(split.x[rows].to(where), rows.to(where)), split.y[rows].to(where)
            yield from zip(x.split(sizes), y.split(sizes), strict=True)
    else:
        for rows, pixels in _read_files(split.x, pieces, size, box, augment.area, where, workers):
            x = finish(pixels.to(where, non_blocking=True), rows.to(where, non_blocking=True))
            yield x, split.y[rows.to(split.y.device)].to(where)


def _moved(pieces: list[Tensor], device: torch.device) -> list[Tensor]:
    """All index pieces to the device in one transfer."""
    return list(torch.split(torch.cat(pieces).to(device), [len(p) for p in pieces])) if pieces else []


class _Files(torch.utils.data.Dataset):
    """Image files as uint8 (3, height, width), cropped when boxes are given; a damaged one is its message."""

    def __init__(self, paths: tuple[str, ...], size: tuple[int, int], drawn: Tensor | None, area: float) -> None:
        self.paths, self.size, self.drawn, self.area = paths, size, drawn, area

    def __getitem__(self, row: int) -> tuple[int, Tensor | str]:
        from torchvision.transforms.v2 import functional as V

        try:
            image = read_image(self.paths[row])
        except DataError as error:  # as text: an exception would arrive with the worker's whole traceback
            return row, str(error)
        if self.drawn is not None:
            h, w = image.shape[-2:]
            top, left, bh, bw = (round(v) for v in boxes(self.drawn[row : row + 1], self.area, h, w)[0].tolist())
            image = V.crop(image, min(top, h - 1), min(left, w - 1), max(bh, 1), max(bw, 1))
        mode = V.InterpolationMode.BICUBIC
        return row, V.resize(image, list(self.size), interpolation=mode, antialias=True)

    def __len__(self) -> int:
        return len(self.paths)


def _stand_apart(_: int) -> None:
    """A signal to the whole group of processes is for the one that trains: it still needs its readers to save."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)


def _stack(items: list[tuple[int, Any]]) -> tuple[Tensor, Tensor] | str:
    broken = next((x for _, x in items if isinstance(x, str)), None)
    if broken is not None:
        return broken
    return torch.tensor([row for row, _ in items]), torch.stack([x for _, x in items])


def _read_files(
    paths: tuple[str, ...],
    pieces: list[Tensor],
    size: tuple[int, int],
    drawn: Tensor | None,
    area: float,
    where: torch.device,
    workers: int | None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """(positions, uint8 (batch, 3, height, width)) for each piece, in order."""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        raise DataError("image files need torchvision, which is not installed: pip install 'gsoftmax[train]'") from None
    if workers is None:
        workers = min(8, cores())
    with warnings.catch_warnings():  # about more workers than cores, and about forking a process with threads
        warnings.filterwarnings("ignore", message=r"(?s).*(DataLoader will create|use of fork\(\))")
        loader = iter(
            torch.utils.data.DataLoader(
                _Files(paths, size, drawn, area),
                batch_sampler=[piece.tolist() for piece in pieces if len(piece)],
                num_workers=workers,
                worker_init_fn=_stand_apart,
                collate_fn=_stack,
                pin_memory=where.type == "cuda",
                generator=torch.Generator(),  # or the loader would take a number from the global generator
            )
        )
    for piece in pieces:
        if not len(piece):  # fewer rows than processes in the last batch
            yield piece, torch.empty(0, 3, *size, dtype=torch.uint8)
            continue
        item = next(loader)
        if isinstance(item, str):
            raise DataError(item)
        yield item
