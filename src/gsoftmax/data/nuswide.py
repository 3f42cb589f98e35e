"""`nuswide`: NUS-WIDE with the cleaned lists that the authors' code reads."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from ..catalog import NUSWIDE
from .augment import PRESETS
from .core import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    DataError,
    Dataset,
    Split,
    is_smoke,
    locate,
    read_bytes,
    within_limit,
)
from .images import list_images

_KNOWN = {(161_789, 107_859), (119_986, 80_283)}
_MAX_LIST = 2**28


def load_nuswide(root: str | os.PathLike[str] | None = None, *, check: bool = True) -> Dataset:
    """The listed images with their 0/1 rows. A list line whose second column is 0 is left out, as in the authors' code.

    Images that no longer exist (many of the original links are dead) are an error, or with check=False left out.
    """
    base = locate(NUSWIDE, root, ["nuswide", "nus-wide", "."], ["Concepts81.txt"])
    smoke = is_smoke(base)
    lists = base / "clean" if (base / "clean").is_dir() else base
    concepts = tuple(_lines(base / "Concepts81.txt"))
    if len(concepts) < 2 or len(set(concepts)) != len(concepts) or (check and not smoke and len(concepts) != 81):
        raise DataError(f"{base / 'Concepts81.txt'} must name 81 different concepts, got {len(concepts)} lines")
    folder = base / "images"
    present = {os.path.relpath(p, folder).replace(os.sep, "/") for p in list_images(str(folder))}
    if not present:
        raise DataError(f"{folder} has no images")
    splits, notes = [], []
    for part in ("train", "test"):
        names, y = _read_lists(lists, part, len(concepts))
        # the lists start each path with the folder's name, which differs from copy to copy
        paths = [n if n in present else n.partition("/")[2] for n in names]
        missing = [n for n, p in zip(names, paths, strict=True) if p not in present]
        if missing and (check or len(missing) == len(names)):
            raise DataError(
                f"{folder} lacks {len(missing):,} of the {len(names):,} images in the {part} list, {missing[0]} first"
                + (" (check=False leaves them out)" if len(missing) < len(names) else "")
            )
        if missing:
            notes.append(f"{len(missing):,} of {len(names):,} {part} images are missing and left out")
        kept = [i for i, p in enumerate(paths) if p in present]
        splits.append(Split(tuple(str(folder / paths[i]) for i in kept), torch.from_numpy(y[kept])))
    sizes = (len(splits[0]), len(splits[1]))
    if not smoke and sizes not in _KNOWN:
        notes.append(
            f"{sizes[0]:,} train and {sizes[1]:,} test images; "
            "the paper names 161,789 and 107,859, the cleaned lists 119,986 and 80,283"
        )
    return Dataset(
        name="nuswide" + " (smoke)" * smoke,
        kind="files",
        classes=concepts,
        multilabel=True,
        train=splits[0],
        test=splits[1],
        mean=torch.tensor(IMAGENET_MEAN),
        std=torch.tensor(IMAGENET_STD),
        augment=PRESETS["photo"],
        source=NUSWIDE.source,
        notes=tuple(notes),
    )


def _lines(path: Path) -> list[str]:
    return [
        line.strip() for line in read_bytes(path, _MAX_LIST).decode("utf-8", "replace").splitlines() if line.strip()
    ]


def _read_lists(folder: Path, part: str, labels: int) -> tuple[list[str], np.ndarray]:
    """Image names and uint8 (N, labels) of one part."""
    list_file, label_file = (folder / f"nus_wide_{part}_{what}.txt" for what in ("imglist", "label"))
    lines, rows = _lines(list_file), _lines(label_file)
    if len(lines) != len(rows):
        raise DataError(f"{list_file} has {len(lines):,} lines but {label_file.name} has {len(rows):,}")
    within_limit(len(rows) * labels, str(label_file))
    names: list[str] = []
    y = np.zeros((len(rows), labels), dtype=np.uint8)
    for number, (line, row) in enumerate(zip(lines, rows, strict=True), 1):
        name, *flag = line.split()
        name = name.replace("\\", "/")
        if name.startswith("/") or ".." in name.split("/") or "\0" in name:
            raise DataError(f"{list_file} names {name[:80]!r}, which leads out of the images folder")
        values = row.split()
        if len(values) != labels or not set(values) <= {"0", "1"}:
            raise DataError(f"{label_file} line {number} must be {labels} times 0 or 1, got {row[:40]!r}")
        try:
            kept = not flag or float(flag[0]) > 0
        except ValueError:
            raise DataError(f"{list_file} must have a path and a number in each line, got {line[:60]!r}") from None
        if kept:
            y[len(names)] = np.frombuffer("".join(values).encode(), dtype=np.uint8) - ord("0")
            names.append(name)
    if not names:
        raise DataError(f"{list_file} lists no image")
    return names, y[: len(names)]
