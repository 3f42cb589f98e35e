"""Images in folders: `folder:PATH` for your own, `tiny-imagenet` in its published layout."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..catalog import FOLDER, TINY_IMAGENET
from .augment import PRESETS, Augment
from .core import (
    IMAGENET,
    PARTS,
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
from .images import SMALL_SIDE, gray_if_gray, list_images, read_small, usable

# the last one that is there counts
_PART_FOLDERS = {"train": ["train"], "val": ["validation", "valid", "val"], "test": ["test"]}


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


def image_dataset(about: Dataset, image_size: int | None) -> Dataset:
    """The dataset with its images in memory if they are small and of one size, else as files.

    about: a dataset whose splits have file names
    image_size: side of the images that the network is given
    """
    splits: Splits = {part: split for part in PARTS if (split := getattr(about, part)) is not None}
    paths = [path for split in splits.values() for path in split.x]
    x = read_small(paths)
    if x is None and image_size is not None and image_size <= SMALL_SIDE:
        x = read_small(paths, image_size)
    if x is None:
        return replace(about, kind="files", augment=Augment(flip=True))
    pieces = gray_if_gray(x).split([len(split) for split in splits.values()])
    held: Splits = {
        part: Split(piece, splits[part].y, splits[part].x) for part, piece in zip(splits, pieces, strict=True)
    }
    # gray images are often characters, which must not be mirrored
    augment = Augment() if pieces[0].shape[1] == 1 else Augment(pad=max(1, x.shape[-1] // 8), flip=True)
    return replace(about, kind="images", augment=augment, **held)


def own_images(
    name: str, classes: tuple[str, ...], splits: Splits, request: Request, notes: Sequence[str] = ()
) -> Dataset:
    """The dataset of a user's own image files.

    Without a test split, the validation images are the test set; without both, `set_aside` takes one.

    splits: of file names
    notes: about what was found so far
    """
    path, told = Path(request.path), list(notes)
    base = path if path.is_dir() else path.parent
    splits, unusable = usable(splits, base, request.check)
    told += unusable
    if "test" not in splits and "val" in splits:
        splits["test"] = splits.pop("val")
        told.append("val is the test set, because there is no other")
    elif "test" not in splits:
        rows = len(splits["train"])
        splits = set_aside(splits["train"], request)
        told.append(
            f"{len(splits['test']):,} of {rows:,} images are set aside as the test set, the same for every seed"
        )
    several = splits["train"].y.ndim == 2
    about = Dataset(name + " (smoke)" * is_smoke(base), "files", classes, several, **splits, notes=tuple(told))
    return image_dataset(about, request.image_size)


def some(names: Sequence[str]) -> str:
    """The first names of a list, for an error message."""
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")


def _class_folders(folder: Path) -> dict[str, list[str]]:
    """{class name: its images}, sorted, of the subfolders that are not hidden."""
    with reading(folder):
        names = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
    return {name: list_images(os.path.join(folder, name)) for name in names}


def load_folder(request: Request) -> Dataset:
    """Images in class folders, in train/, val/ and test/ or directly in the folder.

    The option `test` uses train/ alone and sets a fraction of it aside.
    """
    base, spec = Path(request.path), f"folder:{request.path}"
    layout = f"\n  layout: {FOLDER.layout}"
    if not base.is_dir():
        raise DataError(f"{spec} not found: expected a folder there{layout}")
    folders = {p: base / name for p, names in _PART_FOLDERS.items() for name in names if (base / name).is_dir()}
    if not folders:
        folders = {"train": base}
    elif "test" in request.options and "train" in folders:
        folders = {"train": folders["train"]}
    found = {part: _class_folders(folder) for part, folder in folders.items()}
    images = {part: {name: files for name, files in of.items() if files} for part, of in found.items()}
    for part in ("train", "test"):
        if not images.get(part, part == "test"):
            folder = folders.get(part, base / part)
            loose = len(list_images(str(folder)))
            hint = f", and {loose:,} outside of class folders (csv:FILE reads labels from a file)" if loose else ""
            where = "" if folder == base else f"{folder.name}/"
            raise DataError(f"{spec} has no images in {where}<class>/{hint}{layout}")
    classes, notes = tuple(images["train"]), []
    if len(classes) < 2:
        raise DataError(f"{spec} must have at least 2 classes, got {len(classes)}: {', '.join(classes)}")
    if empty := [name for name in found["train"] if name not in classes]:
        what = f"{len(empty)} of {len(found['train'])} class folders have no images: {some(empty)}"
        if request.check:
            raise DataError(f"{spec}: {what}; fill or remove them, or check=false leaves them out")
        notes.append(what)
    for part, of in images.items():
        if extra := [name for name in of if name not in classes]:
            few = f"the {len(classes)} classes of train/ ({some(classes)})"
            raise DataError(f"{spec}: {folders[part].name}/ has folders that are not among {few}: {some(extra)}")
        if of and (lost := [name for name in classes if name not in of]):
            notes.append(f"{folders[part].name}/ has no images of {some(lost)}")
    pairs = {part: [(file, name) for name, files in of.items() for file in files] for part, of in images.items() if of}
    splits: Splits = {part: _labelled(files, classes, spec) for part, files in pairs.items()}
    return own_images(f"folder:{base.resolve().name}", classes, splits, request, notes)


def load_tiny_imagenet(request: Request) -> Dataset:
    """Tiny ImageNet: classes in the order of wnids.txt, named by words.txt; its validation part is the test set.

    Images that cannot be used are an error, or with check=False left out.
    """
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
    splits, notes = usable(splits, base, request.check)
    about = Dataset("tiny-imagenet" + " (smoke)" * smoke, "files", classes, False, **splits, notes=notes)
    data = image_dataset(about, request.image_size)
    # photographs: the authors' augmentation, and the statistics that pretrained networks expect
    return replace(data, augment=PRESETS["photo-crop"], **IMAGENET)
