"""Reading image files: headers are checked before pixels are decoded, small files are read many at a time."""

from __future__ import annotations

import io
import mmap
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..messages import first_line
from .core import DataError, reading

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".gif", ".tif", ".tiff")
MAX_PIXELS = 2**26  # of one image: 67 megapixels
MAX_FILE = 2**28  # bytes of one image file
SMALL_SIDE = 64  # images up to this side are held in memory ...
SMALL_BYTES = 4 * 2**30  # ... when all of them together stay below this
_CHUNK = 256  # images decoded at a time
# Named one by one, because Pillow passes some other formats to external programs (Ghostscript for EPS)
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "GIF", "TIFF")


@lru_cache(maxsize=1)
def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise DataError("reading images needs Pillow, which is not installed: pip install 'gsoftmax[train]'") from None
    return Image


def decode(data: bytes, name: str, shape: tuple[int, int] | None = None) -> np.ndarray | None:
    """uint8 (H, W, 3) of one image file's bytes; DataError naming the file when it is not a readable image.

    shape: None is returned for an image of another (H, W), before its pixels are decoded
    """
    pillow = _pillow()
    try:
        # from memory, not from the file: twice as fast for small images
        with pillow.open(io.BytesIO(data), formats=_FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                size = f"{image.width} x {image.height}"
                raise DataError(f"{name} declares {size} pixels, more than the limit of {MAX_PIXELS:,}")
            if shape is not None and (image.height, image.width) != shape:
                return None
            return np.array(image if image.mode == "RGB" else image.convert("RGB"))
    except DataError:
        raise
    except Exception as error:  # Pillow's plugins raise anything from SyntaxError to struct.error on damaged files
        reason = "not a known image format" if type(error).__name__ == "UnidentifiedImageError" else first_line(error)
        raise DataError(f"{name} is not a readable image: {reason}") from None


def read_image(path: str) -> Tensor:
    """uint8 (3, H, W) of an image file."""
    pixels = decode(_read(path), path)
    assert pixels is not None
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _read(path: str) -> bytes:
    with reading(path), open(path, "rb") as file:
        data = file.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise DataError(f"{path} has more than {MAX_FILE:,} bytes, the limit for an image file")
    return data


def resize(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Images resized bilinearly, smoothed when they shrink; uint8 (B, C, H, W) stays uint8, float stays float."""
    if x.shape[-2:] == torch.Size(size):
        return x
    shrinks = size[0] < x.shape[-2] or size[1] < x.shape[-1]
    out = F.interpolate(x if x.is_floating_point() else x.float(), size, mode="bilinear", antialias=shrinks)
    return out if x.is_floating_point() else out.round_().clamp_(0, 255).to(x.dtype)


def read_small(paths: Sequence[str], side: int | None = None) -> Tensor | None:
    """All images in one uint8 (N, 3, H, W) tensor if they are small (SMALL_SIDE, SMALL_BYTES), else None.

    side: resize them to this square; without it they must all have one size
    """
    if not paths:
        return None
    height, width = (side, side) if side is not None else read_image(paths[0]).shape[-2:]
    if max(height, width) > SMALL_SIDE or len(paths) * 3 * height * width > SMALL_BYTES:
        return None
    # anonymous shared memory, so that forked processes can fill it
    buffer = mmap.mmap(-1, max(1, len(paths) * 3 * height * width))
    out = np.frombuffer(buffer, dtype=np.uint8, count=len(paths) * 3 * height * width).reshape(-1, 3, height, width)

    def fill(start: int) -> str | None:
        """Decode a chunk into its rows. The answer is "" for an image of another size, else the error, or None."""
        for row in range(start, min(start + _CHUNK, len(paths))):
            try:
                pixels = decode(_read(paths[row]), paths[row], (height, width) if side is None else None)
            except DataError as error:
                return str(error)
            if pixels is None:
                return ""
            pixels = pixels.transpose(2, 0, 1)
            if pixels.shape[1:] != (height, width):
                pixels = resize(torch.from_numpy(pixels)[None], (height, width))[0].numpy()
            out[row] = pixels
        return None

    problem = _fill_all(fill, list(range(0, len(paths), _CHUNK)))
    if problem:
        raise DataError(problem)
    return torch.from_numpy(out) if problem is None else None


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _fill_all(fill: Callable[[int], str | None], starts: list[int]) -> str | None:
    """Call fill on every start until one reports a problem, and return that.

    Decoding small images is mostly Python, which holds the GIL: many files are spread over forked processes. Threads
    then do what the processes left undone because of a problem, or because one was killed.
    """
    count = min(16, cores(), len(starts) // 8)
    if count > 1 and sys.platform == "linux" and not multiprocessing.current_process().daemon:
        done = mmap.mmap(-1, len(starts))  # shared; 1 for every start that went well

        def work(first: int) -> None:
            torch.set_num_threads(1)  # a forked process must not wait for the parent's threads
            for i in range(first, len(starts), count):
                if fill(starts[i]) is not None:
                    return
                done[i] = 1

        _fork(work, count)
        starts = [start for i, start in enumerate(starts) if not done[i]]
    with ThreadPoolExecutor(min(8, cores())) as pool:
        for report in pool.map(fill, starts):
            if report is not None:
                pool.shutdown(wait=False, cancel_futures=True)
                return report
    return None


def _fork(work: Callable[[int], None], count: int) -> None:
    """work(0), ..., work(count - 1), each in a forked process."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=work, args=(i,), daemon=True) for i in range(count)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*use of fork\(\)")
        for process in processes:
            process.start()
    try:
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()


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
