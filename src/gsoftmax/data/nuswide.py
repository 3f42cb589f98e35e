"""`nuswide`: NUS-WIDE with the cleaned lists of the authors' code."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from ..catalog import NUSWIDE
from .augment import PRESETS
from .core import DataError, Dataset, Request, Split, is_smoke, locate, read_lines, within_limit
from .images import list_images

_KNOWN = {(161_789, 107_859), (119_986, 80_283)}


def load_nuswide(request: Request) -> Dataset:
    """The listed images and their labels. A line whose second column is 0 is left out, as in the authors' code.

    Missing images (many of the original links are dead) are an error, or with check=False left out.
    """
    base = locate(NUSWIDE, request.root, ["nuswide", "nus-wide", "."], ["Concepts81.txt"])
    smoke = is_smoke(base)
    lists = base / "clean" if (base / "clean").is_dir() else base
    concepts = tuple(read_lines(base / "Concepts81.txt"))
    known = not request.check or smoke or len(concepts) == 81
    if len(concepts) < 2 or len(set(concepts)) != len(concepts) or not known:
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
        kept = [i for i, p in enumerate(paths) if p in present]
        missing = [n for n, p in zip(names, paths, strict=True) if p not in present]
        if missing and (request.check or not kept):
            hint = " (check=False leaves them out)" if kept else ""
            lacking = f"{len(missing):,} of the {len(names):,} images in the {part} list, {missing[0]} first"
            raise DataError(f"{folder} lacks {lacking}{hint}")
        if missing:
            notes.append(f"{len(missing):,} of {len(names):,} {part} images are missing and left out")
        splits.append(Split(tuple(str(folder / paths[i]) for i in kept), torch.from_numpy(y[kept])))
    train, test = splits
    if not smoke and (len(train), len(test)) not in _KNOWN:
        paper = "the paper names 161,789 and 107,859, the cleaned lists 119,986 and 80,283"
        notes.append(f"{len(train):,} train and {len(test):,} test images; {paper}")
    name = "nuswide" + " (smoke)" * smoke
    return Dataset(name, "files", concepts, True, train, test, augment=PRESETS["photo"], notes=tuple(notes))


def _read_lists(folder: Path, part: str, labels: int) -> tuple[list[str], np.ndarray]:
    """Image names and uint8 (N, labels) of one part."""
    list_file, label_file = (folder / f"nus_wide_{part}_{what}.txt" for what in ("imglist", "label"))
    lines, rows = read_lines(list_file), read_lines(label_file)
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
