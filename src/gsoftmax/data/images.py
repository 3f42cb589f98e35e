"""Reading image files: headers are checked before pixels are decoded, small files are read many at a time.

`usable` finds missing and damaged files before training starts.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import struct
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..files import open_read
from ..messages import first_line
from .core import DataError, Split, Splits, reading

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".gif", ".tif", ".tiff")
MAX_PIXELS = 2**26  # of one image: 67 megapixels
MAX_FILE = 2**28  # bytes of one image file
SMALL_SIDE = 64  # images up to this side are held in memory ...
SMALL_BYTES = 4 * 2**30  # ... when all of them together stay below this
CACHE_BYTES = 2**30  # of decoded and resized image files that are kept between epochs
_CHUNK = 256  # images decoded, or checked, at a time
_THREADS = 16  # that check files
_ENDS = (b"\xff\xd9", b"IEND\xaeB`\x82")  # the last bytes of a complete JPEG, PNG
# Named one by one, because Pillow passes some other formats to external programs (Ghostscript for EPS)
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "GIF", "TIFF")


@lru_cache(maxsize=1)
def _pillow() -> Any:
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise DataError("reading images needs Pillow, which is not installed: pip install 'gsoftmax[train]'") from None
    return Image.open, ImageOps.exif_transpose


def decode(data: bytes, name: str, shape: tuple[int, int] | None = None, near: int = 0) -> np.ndarray | None:
    """uint8 (H, W, 3) of one image file's bytes, upright; DataError naming the file when it is not a readable image.

    shape: None is returned for an image of another (H, W), mostly before its pixels are decoded
    near: a large JPEG is decoded at a fraction of its size, with sides of at least so many pixels
    """
    opened, transpose = _pillow()
    try:
        # from memory, not from the file: twice as fast for small images
        with opened(io.BytesIO(data), formats=_FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                size = f"{image.width} x {image.height}"
                raise DataError(f"{name} declares {size} pixels, more than the limit of {MAX_PIXELS:,}")
            if shape is not None and (image.height, image.width) != shape:
                return None
            if near:
                image.draft("RGB", (near, near))
            with suppress(ValueError, SyntaxError, struct.error):  # a damaged tag: the pixels are there all the same
                transpose(image, in_place=True)  # cameras store a photo as the sensor was held
            pixels = np.array(image) if image.mode == "RGB" else _eight_bits(image, name)
            return pixels if shape in (None, pixels.shape[:2]) else None
    except DataError:
        raise
    except Exception as error:  # Pillow's plugins raise anything from SyntaxError to struct.error on damaged files
        reason = "not a known image format" if type(error).__name__ == "UnidentifiedImageError" else first_line(error)
        raise DataError(f"{name} is not a readable image: {reason}") from None


def _eight_bits(image: Any, name: str) -> np.ndarray:
    """uint8 (H, W, 3) of an image in another mode.  Pillow would clip more than 8 bits instead of scaling them."""
    mode = image.mode
    if mode.startswith("I;16") or (mode == "I" and image.format in ("PPM", "PNG")):  # where Pillow scales to 16 bits
        bits = image.tag_v2.get(258, (16,))[0] if image.format == "TIFF" else 16
        if bits != 16:
            raise DataError(f"{name} has {bits} bits per pixel: save it with 8 or 16")
        gray = ((np.asarray(image).astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8)
    elif mode == "F":
        pixels = np.asarray(image)
        low, high = float(pixels.min()), float(pixels.max())
        if not 0 <= low <= high <= 1:
            raise DataError(f"{name} has pixels from {low:g} to {high:g}: floating-point images must be from 0 to 1")
        gray = np.rint(pixels * 255).astype(np.uint8)
    elif mode == "I":
        raise DataError(f"{name} has 32 bits per pixel: save it with 8 or 16")
    else:
        return np.array(image.convert("RGB"))
    return np.repeat(gray[..., None], 3, axis=2)


def read_image(path: str, near: int = 0) -> Tensor:
    """uint8 (3, H, W) of an image file.

    path, near: the file, and as in `decode`
    """
    pixels = decode(_read(path), path, near=near)
    assert pixels is not None
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _read(path: str) -> bytes:
    with reading(path), open_read(path) as file:
        data = file.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise DataError(f"{path} has more than {MAX_FILE:,} bytes, the limit for an image file")
    return data


def resize(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Images resized bicubically as by Pillow; (B, C, H, W) on the scale 0 to 255, uint8 or float, as is the result."""
    if x.shape[-2:] == torch.Size(size):
        return x
    # antialias also when the image grows: it is the only mode with Pillow's cubic, a = -1/2 instead of -3/4
    out = F.interpolate(x if x.is_floating_point() else x.float(), size, mode="bicubic", antialias=True)
    out = out.clamp_(0, 255)
    return out if x.is_floating_point() else out.round_().to(x.dtype)


class ImageFiles(torch.utils.data.Dataset):
    """(position, uint8 (3, height, width)) of image files; for a damaged file, the error message instead of pixels."""

    def __init__(self, paths: Sequence[str], size: tuple[int, int]) -> None:
        self.paths, self.size = paths, size

    def __getitem__(self, row: int) -> tuple[int, Tensor | str]:
        try:
            return row, self.read(row)
        except DataError as error:  # as text: an exception would arrive with the worker's whole traceback
            return row, str(error)

    def read(self, row: int) -> Tensor:
        """One image, resized bicubically."""
        return resize(read_image(self.paths[row])[None], self.size)[0]


class _OneSize(ImageFiles):
    """Images that must all have one size; for another one, the message is empty."""

    def read(self, row: int) -> Tensor:
        pixels = decode(_read(self.paths[row]), self.paths[row], self.size)
        if pixels is None:
            raise DataError
        return torch.from_numpy(pixels).permute(2, 0, 1)


def read_files(files: ImageFiles, pieces: list[Tensor], workers: int, pin: bool = False) -> Iterator[Any]:
    """(positions, uint8 (batch, 3, height, width)) for each piece, in order, or the message of its first error."""
    with warnings.catch_warnings():  # about more workers than cores, and about forking a process with threads
        warnings.filterwarnings("ignore", message=r"(?s).*(DataLoader will create|use of fork\(\))")
        loader = iter(
            torch.utils.data.DataLoader(
                files,
                batch_sampler=[piece.tolist() for piece in pieces if len(piece)],
                num_workers=workers,
                worker_init_fn=_leave_process_group,
                collate_fn=_stack,
                pin_memory=pin,
                generator=torch.Generator(),  # or the loader would draw from the global generator
            )
        )
    for piece in pieces:  # empty ones: fewer rows than processes in the last batch
        yield next(loader) if len(piece) else (piece, torch.empty(0, 3, *files.size, dtype=torch.uint8))


class Decoded:
    """Decoded and resized image files, kept so that later epochs and later runs of this process read none of them.

    >>> Decoded(10, (32, 32)).unknown(torch.tensor([3, 4]))
    tensor([3, 4])
    """

    def __init__(self, count: int, size: tuple[int, int]) -> None:
        self.pixels = torch.empty(count, 3, *size, dtype=torch.uint8)  # memory is taken when it is written to
        self.known = torch.zeros(count, dtype=torch.bool)

    def unknown(self, rows: Tensor) -> Tensor:
        """Those of the rows that were not decoded yet."""
        return rows[~self.known[rows]]

    def add(self, rows: Tensor, pixels: Tensor) -> None:
        """Keeps decoded rows."""
        self.pixels[rows], self.known[rows] = pixels, True


_decoded: WeakKeyDictionary[Split, Decoded] = WeakKeyDictionary()  # the most recently used last


def decoded(split: Split, size: tuple[int, int]) -> Decoded | None:
    """What is kept of a split of image files at this size, as long as the split exists; None if it is too large.

    Other splits are forgotten when all together would exceed CACHE_BYTES.
    """
    need = len(split) * 3 * size[0] * size[1]
    if need > CACHE_BYTES:
        return None
    found = _decoded.pop(split, None)
    if found is None or found.pixels.shape[2:] != torch.Size(size):
        found = Decoded(len(split), size)
    while _decoded and need + sum(kept.pixels.numel() for kept in _decoded.values()) > CACHE_BYTES:
        del _decoded[next(iter(_decoded))]
    _decoded[split] = found
    return found


def _leave_process_group(_: int) -> None:
    """Signals to the process group do not reach workers, which the trainer still needs while it saves."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)


def _stack(items: list[tuple[int, Any]]) -> tuple[Tensor, Tensor] | str:
    for _, x in items:
        if isinstance(x, str):
            return x
    return torch.tensor([row for row, _ in items]), torch.stack([x for _, x in items])


def read_small(paths: Sequence[str], side: int | None = None, workers: int | None = None) -> Tensor | None:
    """All images in one uint8 (N, 3, H, W) tensor if they are small (SMALL_SIDE, SMALL_BYTES), else None.

    side: resize them to this square; without it they must all have one size
    workers: processes that decode; by default many files are spread over processes, since decoding holds the GIL
    """
    if not paths:
        return None
    height, width = (side, side) if side is not None else read_image(paths[0]).shape[-2:]
    if max(height, width) > SMALL_SIDE or len(paths) * 3 * height * width > SMALL_BYTES:
        return None
    pieces = list(torch.arange(len(paths)).split(_CHUNK))
    if workers is None:
        can_fork = sys.platform == "linux" and not multiprocessing.current_process().daemon
        workers = min(16, cores(), len(pieces) // 8) if can_fork else 0
    files = (_OneSize if side is None else ImageFiles)(paths, (height, width))
    out = torch.empty(len(paths), 3, height, width, dtype=torch.uint8)
    try:
        for rows, item in zip(out.split(_CHUNK), read_files(files, pieces, workers), strict=True):
            if isinstance(item, str):
                if item:
                    raise DataError(item)
                return None
            rows.copy_(item[1])
    except RuntimeError:  # a process was killed
        if workers:
            return read_small(paths, side, workers=0)
        raise
    return out


def usable(splits: Splits, where: Path, check: bool) -> tuple[Splits, tuple[str, ...]]:
    """The splits of image files without missing, empty and damaged ones, and a note for each part that had some.

    where: folder of the dataset
    check: whether such a file is an error
    """
    kept, notes, errors = {}, [], []
    for part, split in splits.items():
        found = find_defects(split.x)
        rows = [i for i, defect in enumerate(found) if not defect]
        kept[part] = split if len(rows) == len(split) else split.select(rows)
        counts = Counter(filter(None, found))
        if counts:
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
            share = f"{counts.total():,} of {len(split):,} {part} images"
            notes.append(f"{share} left out ({kinds})")
            first = os.path.relpath(split.x[found.index(next(filter(None, found)))], where)
            errors.append(f"{share} cannot be used ({kinds}), first {first}")
    empty = [part for part in kept if not len(kept[part])]
    if errors and (check or empty):
        hint = "" if empty else "; check=false leaves them out"
        raise DataError(f"{where}: {' and '.join(errors)}: replace them{hint}")
    return kept, tuple(notes)


def find_defects(paths: Sequence[str]) -> list[str]:
    """For each file "" or what is wrong: "missing", "empty", "unreadable", "damaged".

    Only the last bytes are read; a file that does not end as a JPEG or PNG does is decoded.
    """
    chunks = [paths[k : k + _CHUNK] for k in range(0, len(paths), _CHUNK)]
    with ThreadPoolExecutor(_THREADS) as pool:  # to wait for many files at a time
        return [defect for found in pool.map(lambda chunk: list(map(_defect, chunk)), chunks) for defect in found]


def _defect(path: str) -> str:
    try:
        with open_read(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 8))
            if file.read(8).endswith(_ENDS):
                return ""
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except OSError:
        return "unreadable"
    if not size:
        return "empty"
    _pillow()  # its absence is not the file's fault
    try:
        decode(_read(path), path)
    except DataError:
        return "damaged"
    return ""


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gray_if_gray(x: Tensor) -> Tensor:
    """One channel instead of three if all three are equal in every image."""
    gray = torch.equal(x[:, 0], x[:, 1]) and torch.equal(x[:, 0], x[:, 2])
    return x[:, :1].contiguous() if gray else x


def list_images(folder: str) -> list[str]:
    """Paths of the image files in a folder and below it, sorted by name; hidden ones are left out."""
    found = []
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        names = sorted(n for n in names if n.lower().endswith(EXTENSIONS) and not n.startswith("."))
        found += [os.path.join(where, n) for n in names]
    return found
