"""`coco`: MS COCO 2014, image-level labels read from the instance annotations."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from ..catalog import COCO
from .augment import PRESETS
from .core import DataError, Dataset, Request, Split, is_smoke, locate, plain_name, reading

_PUBLISHED = {"train2014": (82_783, 82_081), "val2014": (40_504, 40_137)}  # images, those with at least one label
_CHUNK = 2**20
_MAX_ITEM = 2**26  # characters of one annotation


def load_coco(request: Request) -> Dataset:
    """Images with at least one annotated object, labelled with the set of its categories in order of id."""
    base = locate(COCO, request.root, ["coco", "coco2014", "."], ["annotations/instances_train2014.json"])
    smoke = is_smoke(base)
    published = request.check and not smoke
    names: dict[int, str] = {}
    splits = []
    for part, (all_images, labelled) in _PUBLISHED.items():
        file = base / "annotations" / f"instances_{part}.json"
        images, pairs, categories = _read_instances(file)
        if names and categories != names:
            raise DataError(f"{file} has other categories than the training annotations")
        names = categories
        split = _label(base / part, images, pairs, sorted(categories), file)
        if published and (len(images), len(split)) != (all_images, labelled):
            expected = f"expected {all_images:,} images, {labelled:,} with a label"
            raise DataError(f"{file} is not the published file: {expected}, got {len(images):,} and {len(split):,}")
        splits.append(split)
    if published and len(names) != 80:
        raise DataError(f"{base / 'annotations'} is not the published set: expected 80 categories, got {len(names)}")
    classes = tuple(names[i] for i in sorted(names))
    train, test = splits
    return Dataset("coco" + " (smoke)" * smoke, "files", classes, True, train, test, augment=PRESETS["photo"])


def _label(folder: Path, images: dict[int, str], pairs: set[tuple[int, int]], ids: list[int], file: Path) -> Split:
    """The labelled images in the order of their ids."""
    column = {category: c for c, category in enumerate(ids)}
    labelled = sorted({image for image, _ in pairs})
    row = {image: r for r, image in enumerate(labelled)}
    y = np.zeros((len(labelled), len(ids)), dtype=np.uint8)
    for image, category in pairs:
        if image not in images or category not in column:
            what = f"image {image}, category {category}"
            raise DataError(f"{file} is damaged: an annotation names {what}, and one is not listed")
        y[row[image], column[category]] = 1
    with reading(folder):
        present = set(os.listdir(folder))
    missing = [images[i] for i in labelled if images[i] not in present]
    if missing:
        raise DataError(f"{folder} lacks {len(missing):,} of {len(labelled):,} images, {missing[0]} first")
    if not labelled:
        raise DataError(f"{file} labels no image")
    return Split(tuple(str(folder / images[i]) for i in labelled), torch.from_numpy(y))


def _read_instances(file: Path) -> tuple[dict[int, str], set[tuple[int, int]], dict[int, str]]:
    """{image id: file name}, {(image id, category id)}, {category id: name}.

    The published file has 448 MB, nearly all of it outlines of objects; reading item by item needs little memory.
    """
    images: dict[int, str] = {}
    pairs: set[tuple[int, int]] = set()
    categories: dict[int, str] = {}
    with reading(file, ValueError, KeyError, TypeError, RecursionError), open(file, encoding="utf-8") as stream:
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
