"""Images in folders: `folder:PATH` for your own, `tiny-imagenet` in its published layout."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from ..catalog import FOLDER, TINY_IMAGENET
from .augment import PRESETS, Augment
from .core import (
    IMAGENET,
    DataError,
    Dataset,
    Request,
    Split,
    Splits,
    is_smoke,
    locate,
    plain_name,
    read_lines,
    reading,
    set_aside,
)
from .images import SMALL_SIDE, gray_if_gray, list_images, read_small


def _labelled(files: Iterable[tuple[str, str]], classes: tuple[str, ...], where: object) -> Split:
    """A Split of (path, class name) pairs."""
    index = {name: i for i, name in enumerate(classes)}
    paths, labels = [], []
    for path, name in files:
        if name not in index:
            raise DataError(f"{where}: class {name!r} is not among the {len(classes)} classes of the training split")
        paths.append(path)
        labels.append(index[name])
    return Split(tuple(paths), torch.tensor(labels, dtype=torch.int64))


def _dataset(name: str, classes: tuple[str, ...], splits: Splits, image_size: int | None) -> Dataset:
    """A Dataset with images in memory if they are small and of one size, else as files."""
    paths = [str(path) for split in splits.values() for path in split.x]
    x = read_small(paths)
    if x is None and image_size is not None and image_size <= SMALL_SIDE:
        x = read_small(paths, image_size)
    if x is None:
        return Dataset(name, "files", classes, False, **splits, augment=Augment(flip=True))
    pieces = gray_if_gray(x).split([len(split) for split in splits.values()])
    held: Splits = {part: Split(piece, splits[part].y) for part, piece in zip(splits, pieces, strict=True)}
    # gray images are often characters, which must not be mirrored
    augment = Augment() if pieces[0].shape[1] == 1 else Augment(pad=max(1, x.shape[-1] // 8), flip=True)
    return Dataset(name, "images", classes, False, **held, augment=augment)


def _class_folders(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """{class name: (path, class name) pairs} of the subfolders with images, sorted."""
    with reading(folder):
        names = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
    found = {name: [(path, name) for path in list_images(os.path.join(folder, name))] for name in names}
    return {name: files for name, files in found.items() if files}


def load_folder(request: Request) -> Dataset:
    """Images in class folders. Without test/, val/ is the test set; or the option `test` sets images aside."""
    base, spec = Path(request.path), f"folder:{request.path}"
    layout = f"\n  layout: {FOLDER.layout}"
    if not base.is_dir():
        raise DataError(f"{spec} not found: expected a folder there{layout}")
    alone = "test" in request.options
    if alone:
        found = {"train": _class_folders(base / "train" if (base / "train").is_dir() else base)}
    else:
        found = {p: _class_folders(base / p) for p in ("train", "val", "test") if (base / p).is_dir()}
        if "test" not in found and "val" in found:
            found["test"] = found.pop("val")
        if not found.get("val", True):
            del found["val"]
    for part in ("train",) if alone else ("train", "test"):
        if not found.get(part):
            raise DataError(f"{spec} has no images in {'' if alone else part + '/'}<class>/{layout}")
    classes = tuple(found["train"])
    if len(classes) < 2:
        raise DataError(f"{spec} must have at least 2 classes, got {len(classes)}: {', '.join(classes)}")
    splits: Splits = {p: _labelled([f for files in c.values() for f in files], classes, spec) for p, c in found.items()}
    if alone:
        splits = set_aside(splits["train"], request)
    name = f"folder:{base.resolve().name}" + " (smoke)" * is_smoke(base)
    return _dataset(name, classes, splits, request.image_size)


def load_tiny_imagenet(request: Request) -> Dataset:
    """Tiny ImageNet: classes in the order of wnids.txt, named by words.txt; its validation part is the test set."""
    base = locate(TINY_IMAGENET, request.root, ["tiny-imagenet-200", "tiny-imagenet", "."], ["wnids.txt"])
    smoke, annotations = is_smoke(base), base / "val" / "val_annotations.txt"
    wnids = [plain_name(wnid, base / "wnids.txt") for wnid in read_lines(base / "wnids.txt")]
    if len(set(wnids)) != len(wnids) or len(wnids) < 2:
        raise DataError(f"{base / 'wnids.txt'} is damaged: expected one class per line, got {len(wnids)} lines")
    train = {w: list_images(str(base / "train" / w / "images")) for w in wnids}
    test = []
    for line in read_lines(annotations):
        file, *rest = line.split()
        if not rest:
            raise DataError(f"{annotations} is damaged: expected file, class and box, got {line[:60]!r}")
        test.append((str(base / "val" / "images" / plain_name(file, annotations)), rest[0]))
    if not test:
        raise DataError(f"{annotations} lists no image")
    empty = [w for w, files in train.items() if not files]
    if empty:
        count = f"{len(empty)} of {len(wnids)} classes are empty"
        raise DataError(f"{base / 'train' / empty[0] / 'images'} has no images ({count})")
    counts = (len(wnids), sum(map(len, train.values())), len(test))
    if request.check and not smoke and counts != (200, 100_000, 10_000):
        published = "200 classes, 100,000 training and 10,000 validation images"
        raise DataError(f"{base} is incomplete: expected {published}, got {', '.join(f'{n:,}' for n in counts)}")
    meaning = dict(line.split("\t", 1) for line in read_lines(base / "words.txt") if "\t" in line)
    names = [meaning.get(w, w).split(",")[0].strip() for w in wnids]
    classes = tuple(n if names.count(n) == 1 else f"{n} ({w})" for n, w in zip(names, wnids, strict=True))
    of = dict(zip(wnids, classes, strict=True))
    splits: Splits = {
        "train": _labelled(((f, of[w]) for w, files in train.items() for f in files), classes, base),
        "test": _labelled(((f, of.get(w, w)) for f, w in test), classes, base),
    }
    data = _dataset("tiny-imagenet" + " (smoke)" * smoke, classes, splits, request.image_size)
    # photographs: the authors' augmentation, and the statistics that pretrained networks expect
    return replace(data, augment=PRESETS["photo-crop"], **IMAGENET)
