"""`coco`: MS COCO 2014, image-level labels read from the instance annotations."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..catalog import COCO
from .augment import PRESETS
from .core import IMAGENET_MEAN, IMAGENET_STD, DataError, Dataset, Split, first_line, is_smoke, locate

_PUBLISHED = {"train2014": (82_783, 82_081), "val2014": (40_504, 40_137)}  # images, those with at least one label
_CHUNK = 2**20
_MAX_ITEM = 2**26  # characters of one annotation


def load_coco(root: str | os.PathLike[str] | None = None, *, check: bool = True) -> Dataset:
    """Images with at least one annotated object, labelled with the set of its categories in order of id."""
    base = locate(COCO, root, ["coco", "coco2014", "."], ["annotations/instances_train2014.json"])
    smoke = is_smoke(base)
    names: dict[int, str] | None = None
    splits = []
    for part in ("train2014", "val2014"):
        file = base / "annotations" / f"instances_{part}.json"
        images, pairs, categories = _read_instances(file)
        if names is not None and categories != names:
            raise DataError(f"{file} has other categories than the training annotations")
        names = categories
        split, count = _label(base / part, images, pairs, sorted(categories), file)
        if check and not smoke and (count, len(split)) != _PUBLISHED[part]:
            images_published, labelled_published = _PUBLISHED[part]
            raise DataError(
                f"{file} is not the published file: expected {images_published:,} images, {labelled_published:,} "
                f"with a label, got {count:,} and {len(split):,}"
            )
        splits.append(split)
    assert names is not None
    if check and not smoke and len(names) != 80:
        raise DataError(f"{base / 'annotations'} is not the published set: expected 80 categories, got {len(names)}")
    return Dataset(
        name="coco" + " (smoke)" * smoke,
        kind="files",
        classes=tuple(names[i] for i in sorted(names)),
        multilabel=True,
        train=splits[0],
        test=splits[1],
        mean=torch.tensor(IMAGENET_MEAN),
        std=torch.tensor(IMAGENET_STD),
        augment=PRESETS["photo"],
        source=COCO.source,
    )


def _label(
    folder: Path, images: dict[int, str], pairs: set[tuple[int, int]], ids: list[int], file: Path
) -> tuple[Split, int]:
    """The labelled images in the order of their ids, and how many images there were in all."""
    column = {category: c for c, category in enumerate(ids)}
    labelled = sorted({image for image, _ in pairs})
    row = {image: r for r, image in enumerate(labelled)}
    y = np.zeros((len(labelled), len(ids)), dtype=np.uint8)
    for image, category in pairs:
        if image not in images or category not in column:
            raise DataError(
                f"{file} is damaged: an annotation names image {image}, category {category}, and one is not listed"
            )
        y[row[image], column[category]] = 1
    try:
        present = set(os.listdir(folder))
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror or error}") from None
    missing = [images[i] for i in labelled if images[i] not in present]
    if missing:
        raise DataError(f"{folder} lacks {len(missing):,} of {len(labelled):,} images, {missing[0]} first")
    if not labelled:
        raise DataError(f"{file} labels no image")
    return Split(tuple(str(folder / images[i]) for i in labelled), torch.from_numpy(y)), len(images)


def _read_instances(file: Path) -> tuple[dict[int, str], set[tuple[int, int]], dict[int, str]]:
    """{image id: file name}, {(image id, category id)}, {category id: name}.

    The published file has 448 MB, nearly all of it outlines of objects; item by item it is read in little memory.
    """
    images: dict[int, str] = {}
    pairs: set[tuple[int, int]] = set()
    categories: dict[int, str] = {}
    try:
        with open(file, encoding="utf-8") as stream:
            for key, item in _items(stream):
                if key == "annotations":
                    pairs.add((_integer(item["image_id"]), _integer(item["category_id"])))
                elif key == "images":
                    name = item["file_name"]
                    if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\\0"):
                        raise DataError(f"{file} names {str(name)[:80]!r}, which is not a plain file name")
                    images[_integer(item["id"])] = name
                elif key == "categories":
                    categories[_integer(item["id"])] = str(item["name"])
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None
    except DataError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"an item without {error}" if isinstance(error, KeyError) else first_line(error)
        raise DataError(f"{file} is damaged: {reason}") from None
    if not images or not categories:
        raise DataError(f"{file} lists {len(images)} images and {len(categories)} categories")
    return images, pairs, categories


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"expected an integer id, got {str(value)[:40]!r}")
    return value


def _items(stream: Any) -> Iterator[tuple[str, Any]]:
    """(key, item) for every item of every list in the file's top-level object, one by one; other values are skipped."""
    decoder = json.JSONDecoder()
    text, at = "", 0

    def more() -> bool:
        nonlocal text, at
        piece = stream.read(_CHUNK)
        text, at = text[at:] + piece, 0
        if len(text) > _MAX_ITEM:
            raise ValueError(f"an item of more than {_MAX_ITEM:,} characters")
        return bool(piece)

    def peek() -> str:
        """The next character that is not blank, without taking it."""
        nonlocal at
        while True:
            while at < len(text) and text[at] in " \t\r\n":
                at += 1
            if at < len(text):
                return text[at]
            if not more():
                raise ValueError("the file ends too early")

    def take(expected: str) -> str:
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
            if not more():
                raise ValueError("the file ends too early or is not JSON")

    take("{")
    if peek() == "}":
        return
    while True:
        key = value()
        take(":")
        if peek() == "[":
            take("[")
            if peek() == "]":
                take("]")
            else:
                while True:
                    yield str(key), value()
                    if take(",]") == "]":
                        break
        else:
            value()
        if take(",}") == "}":
            return
