"""`nuswide`: NUS-WIDE with the cleaned lists of the authors' code, or with its official lists."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from ..catalog import NUSWIDE
from .augment import PRESETS
from .core import (
    DataError,
    Dataset,
    Request,
    Split,
    Splits,
    is_smoke,
    locate,
    plain_name,
    read_bytes,
    read_lines,
    within_limit,
)
from .images import list_images, usable

LISTS = ("official", "clean")  # values of the option `lists`
_OFFICIAL = {"train": 161_789, "test": 107_859}
_CLEAN = {"train": 119_986, "test": 80_283}


def load_nuswide(request: Request) -> Dataset:
    """The listed images and their labels.

    The cleaned lists are the default where they are present; of these, a line whose second column is 0 is left out, as
    in the authors' code. The official lists keep images without a label. Images that cannot be used (many of the
    original links are dead) are an error, or with check=False left out.
    """
    concepts_files = ["Concepts81.txt", "ConceptsList/Concepts81.txt"]
    base = locate(NUSWIDE, request.root, ["nuswide", "nus-wide", "."], concepts_files)
    smoke = is_smoke(base)
    published = request.check and not smoke
    concepts_file = next(base / name for name in concepts_files if (base / name).exists())
    concepts = tuple(plain_name(name, concepts_file) for name in read_lines(concepts_file))
    if len(concepts) < 2 or len(set(concepts)) != len(concepts) or (published and len(concepts) != 81):
        raise DataError(f"{concepts_file} must name 81 different concepts, got {len(concepts)} lines")
    official, lists = _choose_lists(base, request.options.get("lists"))
    folder, present = _images(base)
    splits: Splits = {}
    notes: tuple[str, ...] = ()
    for part in ("train", "test"):
        names, y = (_read_official if official else _read_clean)(lists, part, concepts)
        if official and published and len(names) != _OFFICIAL[part]:
            expected = f"expected {_OFFICIAL[part]:,} images, got {len(names):,}"
            raise DataError(f"{_image_list(lists, part)} is not the published file: {expected}")
        without = [name.partition("/")[2] or name for name in names]
        if len(present.intersection(without)) > len(present.intersection(names)):
            names = without  # the first folder of a listed path differs from copy to copy
        splits[part] = Split(tuple(str(folder / name) for name in names), torch.from_numpy(y))
    if not official and not smoke and {part: len(split) for part, split in splits.items()} != _CLEAN:
        sizes = f"{len(splits['train']):,} train and {len(splits['test']):,} test images are listed"
        notes = (f"{sizes}; the cleaned lists have 119,986 and 80,283, the paper names 161,789 and 107,859",)
    splits, left_out = usable(splits, base, request.check)
    notes += left_out
    for part, split in splits.items():
        unlabelled = int((split.y.sum(1) == 0).sum())
        if official and unlabelled:
            notes += (f"{unlabelled:,} of {len(split):,} {part} images have no label",)
    name = "nuswide" + " (smoke)" * smoke
    return Dataset(name, "files", concepts, True, **splits, augment=PRESETS["photo"], notes=notes)


def _choose_lists(base: Path, wanted: str | None) -> tuple[bool, Path]:
    """Whether the official lists are used, and the folder of the lists."""
    clean = base / "clean" if (base / "clean").is_dir() else base
    files = {False: clean / "nus_wide_train_imglist.txt", True: _image_list(base, "train")}
    choices = [False, True] if wanted is None else [wanted == "official"]
    for official in choices:
        if files[official].exists():
            return official, base if official else clean
    names = " or ".join(str(files[official].relative_to(base)) for official in choices)
    raise DataError(f"{base} has no {wanted + ' ' if wanted else ''}lists: expected {names} there")


def _images(base: Path) -> tuple[Path, set[str]]:
    """The folder of images, and the paths in it."""
    for folder in (base / "images", base / "Flickr"):
        present = {os.path.relpath(path, folder).replace(os.sep, "/") for path in list_images(str(folder))}
        if present:
            return folder, present
    raise DataError(f"{base / 'images'} has no images, nor has {base / 'Flickr'}")


def _path(name: str, where: Path) -> str:
    """A listed path with slashes, or a DataError if it leads out of the images folder."""
    name = name.replace("\\", "/")
    if name.startswith("/") or ".." in name.split("/") or "\0" in name:
        raise DataError(f"{where} names {name[:80]!r}, which leads out of the images folder")
    return name


def _image_list(base: Path, part: str) -> Path:
    return base / "ImageList" / f"{part.capitalize()}Imagelist.txt"


def _read_official(base: Path, part: str, concepts: tuple[str, ...]) -> tuple[list[str], np.ndarray]:
    """Image names and uint8 (N, labels) of one part: a file of names, and for each concept a file of 0 and 1."""
    list_file = _image_list(base, part)
    names = [_path(line, list_file) for line in read_lines(list_file)]
    if not names:
        raise DataError(f"{list_file} lists no image")
    within_limit(len(names) * len(concepts), str(list_file))
    y = np.empty((len(names), len(concepts)), dtype=np.uint8)
    for column, concept in enumerate(concepts):
        label_file = base / "Groundtruth" / "TrainTestLabels" / f"Labels_{concept}_{part.capitalize()}.txt"
        values = read_bytes(label_file, 2**26).split()
        if len(values) != len(names):
            raise DataError(f"{label_file} has {len(values):,} lines but {list_file.name} has {len(names):,}")
        if not set(values) <= {b"0", b"1"}:
            raise DataError(f"{label_file} must have 0 or 1 in each line")
        y[:, column] = np.frombuffer(b"".join(values), dtype=np.uint8) - ord("0")
    return names, y


def _read_clean(folder: Path, part: str, concepts: tuple[str, ...]) -> tuple[list[str], np.ndarray]:
    """Image names and uint8 (N, labels) of one part: a file of names, and a file of rows of 0 and 1."""
    list_file, label_file = (folder / f"nus_wide_{part}_{what}.txt" for what in ("imglist", "label"))
    lines, rows = read_lines(list_file), read_lines(label_file)
    if len(lines) != len(rows):
        raise DataError(f"{list_file} has {len(lines):,} lines but {label_file.name} has {len(rows):,}")
    labels = len(concepts)
    within_limit(len(rows) * labels, str(label_file))
    names: list[str] = []
    y = np.zeros((len(rows), labels), dtype=np.uint8)
    for number, (line, row) in enumerate(zip(lines, rows, strict=True), 1):
        name, *flag = line.split()
        name = _path(name, list_file)
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
