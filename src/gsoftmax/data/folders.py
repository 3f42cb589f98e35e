"""Images in folders: `folder:PATH` for anyone's own, `tiny-imagenet` in its published layout."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from ..catalog import FOLDER, TINY_IMAGENET
from .augment import PRESETS, Augment
from .core import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    DataError,
    Dataset,
    Split,
    encode_labels,
    is_smoke,
    locate,
    read_bytes,
    take,
)
from .images import SMALL_SIDE, grey_if_grey, list_images, read_small


def _pack(
    name: str,
    classes: tuple[str, ...],
    parts: dict[str, tuple[list[str], list[str]]],
    where: str,
    image_size: int | None,
    source: str,
) -> Dataset:
    """A Dataset of (paths, class names) per part: in memory when the images are small and alike, else as files."""
    paths = {part: files for part, (files, _) in parts.items()}
    labels = dict(zip(parts, encode_labels([n for _, n in parts.values()], classes, where), strict=True))
    every = [path for part in parts for path in paths[part]]
    side = image_size if image_size is not None and image_size <= SMALL_SIDE else None
    x = read_small(every)
    if x is None and side is not None:
        x = read_small(every, side)
    if x is None:
        splits = {part: Split(tuple(paths[part]), labels[part]) for part in parts}
        augment = Augment(flip=True)
    else:
        pieces = grey_if_grey(*torch.split(x, [len(paths[part]) for part in parts]))
        splits = {part: Split(piece, labels[part]) for part, piece in zip(parts, pieces, strict=True)}
        # grey images are often characters, which must not be mirrored
        augment = Augment() if pieces[0].shape[1] == 1 else Augment(pad=max(1, x.shape[-1] // 8), flip=True)
    return Dataset(
        name=name,
        kind="files" if x is None else "images",
        classes=classes,
        multilabel=False,
        train=splits["train"],
        test=splits["test"],
        val=splits.get("val"),
        augment=augment,
        source=source,
    )


def _class_folders(folder: Path) -> dict[str, list[str]]:
    """{class name: image paths} of the sub-folders, both sorted; folders without images are left out."""
    try:
        names = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror or error}") from None
    found = {name: list_images(os.path.join(folder, name)) for name in names}
    return {name: files for name, files in found.items() if files}


def load_folder(path: str, *, test: float | None = None, image_size: int | None = None, split_seed: int = 0) -> Dataset:
    """Images in class folders. Without test/, val/ is the test set; or `test` is the share of each class set aside."""
    base = Path(path)
    if not base.is_dir():
        raise DataError(f"folder:{path} not found: expected a folder there\n  layout: " + FOLDER.layout)
    if test is None:
        found = {p: _class_folders(base / p) for p in ("train", "val", "test") if (base / p).is_dir()}
        if "test" not in found and "val" in found:
            found["test"] = found.pop("val")
        if not found.get("train") or not found.get("test"):
            lacking = "train" if not found.get("train") else "test"
            raise DataError(f"folder:{path} has no images in {lacking}/<class>/\n  layout: " + FOLDER.layout)
        if "val" in found and not found["val"]:
            del found["val"]
    else:
        if not 0 < test < 1:
            raise DataError(f"folder:{path}?test must lie between 0 and 1, got {test}")
        found = {"train": _class_folders(base / "train" if (base / "train").is_dir() else base)}
        if not found["train"]:
            raise DataError(f"folder:{path} has no images in <class> folders\n  layout: " + FOLDER.layout)
    classes = tuple(found["train"])
    if len(classes) < 2:
        raise DataError(f"folder:{path} must have at least 2 classes, got {len(classes)}: {', '.join(classes)}")
    parts = {
        p: ([f for files in c.values() for f in files], [name for name, files in c.items() for _ in files])
        for p, c in found.items()
    }
    name = f"folder:{base.resolve().name}" + " (smoke)" * is_smoke(base)
    if test is None:
        return _pack(name, classes, parts, f"folder:{path}", image_size, FOLDER.source)
    paths, names = parts["train"]
    (y,) = encode_labels([names], classes, path)
    aside, rest = take(y, test, split_seed, keep=1)
    parts = {"train": ([paths[i] for i in rest], [names[i] for i in rest])}
    parts["test"] = ([paths[i] for i in aside], [names[i] for i in aside])
    if not len(aside):
        raise DataError(f"folder:{path}?test={test} leaves no image for testing")
    return _pack(name, classes, parts, f"folder:{path}", image_size, FOLDER.source)


def load_tiny_imagenet(
    root: str | os.PathLike[str] | None = None, *, check: bool = True, image_size: int | None = None
) -> Dataset:
    """Tiny ImageNet: classes in the order of wnids.txt, named by words.txt; its validation part is the test set."""
    base = locate(TINY_IMAGENET, root, ["tiny-imagenet-200", "tiny-imagenet", "."], ["wnids.txt"])
    smoke = is_smoke(base)
    wnids = _lines(base / "wnids.txt")
    if len(set(wnids)) != len(wnids) or len(wnids) < 2:
        raise DataError(
            f"{base / 'wnids.txt'} is damaged: expected different names, one a line, got {len(wnids)} lines"
        )
    for wnid in wnids:
        _plain(wnid, base / "wnids.txt")
    train = {w: list_images(str(base / "train" / w / "images")) for w in wnids}
    test_files, test_names = [], []
    for line in _lines(base / "val" / "val_annotations.txt"):
        words = line.split()
        if len(words) < 2:
            raise DataError(
                f"{base / 'val' / 'val_annotations.txt'} is damaged: expected file, class and box, got {line[:60]!r}"
            )
        test_files.append(str(base / "val" / "images" / _plain(words[0], base / "val" / "val_annotations.txt")))
        test_names.append(words[1])
    if not test_files:
        raise DataError(f"{base / 'val' / 'val_annotations.txt'} lists no image")
    empty = [w for w, files in train.items() if not files]
    if empty:
        raise DataError(
            f"{base / 'train' / empty[0] / 'images'} has no images ({len(empty)} of {len(wnids)} classes are empty)"
        )
    if check and not smoke:
        counts = (len(wnids), sum(map(len, train.values())), len(test_files))
        if counts != (200, 100_000, 10_000):
            raise DataError(
                f"{base} is incomplete: expected 200 classes, 100,000 training and 10,000 validation images, got "
                + ", ".join(f"{n:,}" for n in counts)
            )
    meaning = dict(line.split("\t", 1) for line in _lines(base / "words.txt") if "\t" in line)
    names = [meaning.get(w, w).split(",")[0].strip() for w in wnids]
    classes = tuple(n if names.count(n) == 1 else f"{n} ({w})" for n, w in zip(names, wnids, strict=True))
    of = dict(zip(wnids, classes, strict=True))
    parts = {
        "train": ([f for w in wnids for f in train[w]], [of[w] for w in wnids for _ in train[w]]),
        "test": (test_files, [of.get(w, w) for w in test_names]),
    }
    data = _pack("tiny-imagenet" + " (smoke)" * smoke, classes, parts, str(base), image_size, TINY_IMAGENET.source)
    # photographs: the authors' augmentation, and the mean and deviation that pretrained networks expect
    return replace(
        data, augment=PRESETS["photo-crop"], mean=torch.tensor(IMAGENET_MEAN), std=torch.tensor(IMAGENET_STD)
    )


def _lines(path: Path) -> list[str]:
    """Non-empty lines of a text file of at most 64 MiB."""
    return [line.strip() for line in read_bytes(path, 2**26).decode("utf-8", "replace").splitlines() if line.strip()]


def _plain(name: str, where: Path) -> str:
    """The name, refused when it would lead out of its folder."""
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise DataError(f"{where} names {name[:80]!r}, which is not a plain file name")
    return name
