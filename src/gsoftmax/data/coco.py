"""`coco` and `coco2017`: MS COCO in its two splits, image-level labels read from the instance annotations."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from ..catalog import COCO, COCO2017
from ..files import open_read
from .augment import PRESETS
from .core import DataError, Dataset, Request, Split, Splits, data_root, is_smoke, locate, plain_name, reading
from .images import usable

# spec -> description, year, and of train and test: images, those with at least one label
_YEARS = {
    "coco": (COCO, 2014, ((82_783, 82_081), (40_504, 40_137))),
    "coco2017": (COCO2017, 2017, ((118_287, 117_266), (5_000, 4_952))),
}
_FOLDERS = {"coco": ("coco", "coco2014", "."), "coco2017": ("coco2017", "coco", ".")}
_PREFIX = re.compile(r"COCO_(train|val)2014_")  # of file names; those of 2017 have none
_CHUNK = 2**20
_MAX_ITEM = 2**26  # characters of one annotation


def load_coco(request: Request) -> Dataset:
    """Images with at least one annotated object, labelled with the set of its categories in order of id.

    Images that cannot be used are an error, or with check=False left out.
    """
    _, year, counts = _YEARS[request.family]
    base = _locate(request)
    smoke = is_smoke(base)
    published = request.check and not smoke
    names: dict[int, str] = {}
    splits: Splits = {}
    for part, folder, sizes in zip(("train", "test"), (f"train{year}", f"val{year}"), counts, strict=True):
        file = base / "annotations" / f"instances_{folder}.json"
        images, pairs, categories = _read_instances(file)
        if names and categories != names:
            raise DataError(f"{file} has other categories than the training annotations")
        names = categories
        splits[part] = _label(_locate_images(base, folder, images), pairs, sorted(categories), file)
        got = len(images), len(splits[part])
        if published and got != sizes:
            expected = f"expected {sizes[0]:,} images, {sizes[1]:,} with a label"
            raise DataError(f"{file} is not the published file: {expected}, got {got[0]:,} and {got[1]:,}")
    if published and len(names) != 80:
        raise DataError(f"{base / 'annotations'} is not the published set: expected 80 categories, got {len(names)}")
    classes = tuple(names[i] for i in sorted(names))
    splits, notes = usable(splits, base, request.check)
    name = request.family + " (smoke)" * smoke
    augment = PRESETS["photo"]
    return Dataset(name, "files", classes, True, **splits, augment=augment, notes=notes)


def _locate(request: Request) -> Path:
    """The folder with the annotations; if only the other year's are there, the error names that spec."""
    annotations = {spec: f"annotations/instances_train{year}.json" for spec, (_, year, _) in _YEARS.items()}
    needed = annotations.pop(request.family)
    (other, others), root = annotations.popitem(), data_root(request.root)
    folders = _FOLDERS[request.family]
    if not any((root / folder / needed).exists() for folder in folders):
        for folder in _FOLDERS[other]:
            if (root / folder / others).exists():
                year = _YEARS[other][1]
                hint = f"{root / folder} has the annotations of {year}, which the dataset {other} uses"
                raise DataError(f"{request.family} not found under {root}: {needed} is not there; {hint}")
    return locate(_YEARS[request.family][0], request.root, folders, [needed])


def _locate_images(base: Path, folder: str, images: dict[int, str]) -> dict[int, str]:
    """{image id: path}. The images of both years are the same ones in other folders, and in 2014 with a prefix."""
    paths: dict[str, str] = {}
    for name in (folder, *(f"{part}{year}" for part in ("train", "val") for _, year, _ in _YEARS.values())):
        for where in (base / name, base / "images" / name):
            if where.is_dir():
                with reading(where):
                    for file in os.listdir(where):
                        paths.setdefault(_PREFIX.sub("", file), str(where / file))
    return {i: paths.get(_PREFIX.sub("", file), str(base / folder / file)) for i, file in images.items()}


def _label(paths: dict[int, str], pairs: set[tuple[int, int]], ids: list[int], file: Path) -> Split:
    """The labelled images in the order of their ids."""
    column = {category: c for c, category in enumerate(ids)}
    labelled = sorted({image for image, _ in pairs})
    row = {image: r for r, image in enumerate(labelled)}
    y = np.zeros((len(labelled), len(ids)), dtype=np.uint8)
    for image, category in pairs:
        if image not in paths or category not in column:
            what = f"image {image}, category {category}"
            raise DataError(f"{file} is damaged: an annotation names {what}, and one is not listed")
        y[row[image], column[category]] = 1
    if not labelled:
        raise DataError(f"{file} labels no image")
    return Split(tuple(paths[i] for i in labelled), torch.from_numpy(y))


def _read_instances(file: Path) -> tuple[dict[int, str], set[tuple[int, int]], dict[int, str]]:
    """{image id: file name}, {(image id, category id)}, {category id: name}.

    The published file has 448 MB, nearly all of it outlines of objects; reading item by item needs little memory.
    """
    images: dict[int, str] = {}
    pairs: set[tuple[int, int]] = set()
    categories: dict[int, str] = {}
    with reading(file, ValueError, KeyError, TypeError, RecursionError), _text(file) as stream:
        for key, item in _items(stream):
            if key == "annotations":
                pairs.add((_integer(item["image_id"]), _integer(item["category_id"])))
            elif key == "images":
                images[_integer(item["id"])] = plain_name(item["file_name"], file)
            elif key == "categories":
                categories[_integer(item["id"])] = str(item["name"])
    if not images or not categories:
        raise DataError(f"{file} lists {len(images)} images and {len(categories)} categories")
    return images, pairs, categories


def _text(file: Path) -> TextIO:
    return io.TextIOWrapper(open_read(file), encoding="utf-8")


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"expected an integer id, got {str(value)[:40]!r}")
    return value


def _items(stream: TextIO) -> Iterator[tuple[str, Any]]:
    """(key, item) for every item of every list in the file's top-level object, one by one; other values are skipped."""
    decoder = json.JSONDecoder()
    text, at = "", 0

    def more() -> None:
        nonlocal text, at
        piece = stream.read(_CHUNK)
        text, at = text[at:] + piece, 0
        if not piece:
            raise ValueError("the file ends too early or is not JSON")
        if len(text) > _MAX_ITEM:
            raise ValueError(f"an item of more than {_MAX_ITEM:,} characters")

    def peek() -> str:
        """The next character that is not blank."""
        nonlocal at
        while True:
            while at < len(text) and text[at] in " \t\r\n":
                at += 1
            if at < len(text):
                return text[at]
            more()

    def take(expected: str) -> str:
        """The same, which must be one of those expected; what follows is next."""
        nonlocal at
        seen = peek()
        if seen not in expected:
            raise ValueError(f"expected {' or '.join(expected)}, got {seen!r}")
        at += 1
        return seen

    def value() -> Any:
        nonlocal at
        peek()
        while True:
            try:
                found, end = decoder.raw_decode(text, at)
                if end < len(text) and text[end] not in "0123456789.eE+-":  # or a number may go on in the next chunk
                    at = end
                    return found
            except json.JSONDecodeError:
                pass
            more()

    take("{")
    after = take("}") if peek() == "}" else ","
    while after == ",":
        key = value()
        take(":")
        if peek() != "[":
            value()
        else:
            take("[")
            inner = take("]") if peek() == "]" else ","
            while inner == ",":
                yield str(key), value()
                inner = take(",]")
        after = take(",}")
