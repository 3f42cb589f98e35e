"""Reading image files: headers before pixels, so that nothing absurd is allocated, and many small files at once."""

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

from .core import DataError, first_line

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".gif", ".tif", ".tiff")
MAX_PIXELS = 2**26  # of one image: 67 megapixels
MAX_FILE = 2**28  # bytes of one image file
SMALL_SIDE = 64  # images up to this side are held in memory ...
SMALL_BYTES = 4 * 2**30  # ... when all of them together stay below this
_CHUNK = 256  # images decoded at a time


# Named one by one, because Pillow hands some other formats to outside programs (Ghostscript for EPS)
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

    With a shape (H, W): None for an image of another size, found out before its pixels are decoded.
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
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
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
    """All images in one uint8 (N, 3, H, W) tensor when they are small (SMALL_SIDE, SMALL_BYTES), else None.

    They must all have one size, unless `side` says to which square to bring them.
    """
    if not paths:
        return None
    height, width = (side, side) if side is not None else read_image(paths[0]).shape[-2:]
    if max(height, width) > SMALL_SIDE or len(paths) * 3 * height * width > SMALL_BYTES:
        return None
    # shared memory without a name, so that forked processes can fill it
    buffer = mmap.mmap(-1, max(1, len(paths) * 3 * height * width))
    out = np.frombuffer(buffer, dtype=np.uint8, count=len(paths) * 3 * height * width).reshape(-1, 3, height, width)

    def fill(start: int) -> str | None:
        """Decode a chunk into its rows. None when all is well, "" for an image of another size, else what is wrong."""
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
    """Call fill on every start until one reports something, and report that.

    Decoding small images is mostly Python, which threads cannot share: many files are spread over forked processes.
    """
    count = min(16, cores(), len(starts) // 8)
    can_fork = sys.platform == "linux" and not multiprocessing.current_process().daemon
    if count > 1 and can_fork:
        reports = _in_processes(fill, [starts[k::count] for k in range(count)])
        if reports is not None:
            return next((r for r in reports if r is not None), None)
    with ThreadPoolExecutor(min(8, cores())) as pool:
        for report in pool.map(fill, starts):
            if report is not None:
                pool.shutdown(wait=False, cancel_futures=True)
                return report
    return None


def _in_processes(fill: Callable[[int], str | None], shares: list[list[int]]) -> list[str | None] | None:
    """What each share's process reports first; None when a process was lost."""
    fork = multiprocessing.get_context("fork")

    def work(share: list[int], sender: Any) -> None:
        torch.set_num_threads(1)  # a forked process must not wait for the parent's threads
        sender.send(next((r for r in map(fill, share) if r is not None), None))

    running = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*use of fork\(\)")
        for share in shares:
            receiver, sender = fork.Pipe(duplex=False)
            process = fork.Process(target=work, args=(share, sender), daemon=True)
            process.start()
            sender.close()  # so that a process that dies leaves an end of file
            running.append((process, receiver))
    reports: list[str | None] = []
    try:
        for _, receiver in running:
            reports.append(receiver.recv())
    except EOFError:
        return None
    finally:
        for process, receiver in running:
            if len(reports) < len(running):
                process.terminate()
            process.join()
            receiver.close()
    return reports


def grey_if_grey(*splits: Tensor) -> list[Tensor]:
    """One channel instead of three when in every image all three are equal."""
    if all(torch.equal(x[:, 0], x[:, 1]) and torch.equal(x[:, 0], x[:, 2]) for x in splits):
        return [x[:, :1].contiguous() for x in splits]
    return list(splits)


def list_images(folder: str) -> list[str]:
    """Paths of the image files in a folder and below it, sorted by name; hidden ones are left out."""
    found = []
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        found += [
            os.path.join(where, n) for n in sorted(names) if n.lower().endswith(EXTENSIONS) and not n.startswith(".")
        ]
    return found
