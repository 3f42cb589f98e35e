"""Small trees in the layouts in which datasets are published: what is loaded, and the line that answers each defect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from gsoftmax import data
from gsoftmax.data import coco, images, nuswide, smoke

PIL = pytest.importorskip("PIL.Image")


def line(spec: str, root: Path, **options) -> str:
    """The error of loading, which must be one line."""
    with pytest.raises(data.DataError) as caught:
        data.load(spec, root, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def names(split: data.Split) -> list[str]:
    return [Path(path).name for path in split.x]


def photo(*seed: int, size: tuple[int, int] = (24, 32)) -> np.ndarray:
    return smoke.image([seed[-1] % 7], 7, *seed, size=size)


def spoil(folder: Path, missing: str, empty: str, truncated: str) -> None:
    """Remove one file, empty another and cut a third in half."""
    (folder / missing).unlink()
    (folder / empty).write_bytes(b"")
    raw = (folder / truncated).read_bytes()
    (folder / truncated).write_bytes(raw[: len(raw) // 2])


# CIFAR


def cifar_rows(labels: Mapping[bytes, list[int]], seed: int) -> bytes:
    """One file of a CIFAR archive: labels, names and rows of 1,024 red, 1,024 green and 1,024 blue bytes."""
    count = len(next(iter(labels.values())))
    pixels = np.stack([photo(seed, i, size=(32, 32)) for i in range(count)]).transpose(0, 3, 1, 2).reshape(count, 3072)
    files = [b"image_s_%06d.png" % i for i in range(count)]
    return smoke.python2_pickle({b"batch_label": b"batch", **labels, b"data": pixels, b"filenames": files})


def cifar10(root: Path) -> Path:
    folder = root / "cifar-10-batches-py"
    files = {f"data_batch_{k}": cifar_rows({b"labels": [k, 9 - k]}, k) for k in range(1, 6)}
    classes = b"airplane automobile bird cat deer dog frog horse ship truck".split()
    meta = {b"num_cases_per_batch": 10000, b"label_names": classes, b"num_vis": 3072}
    files |= {"test_batch": cifar_rows({b"labels": [3, 8, 8]}, 6), "batches.meta": smoke.python2_pickle(meta)}
    smoke.write_files(folder, files | {"readme.html": "<meta>"})
    return folder


def cifar100(root: Path) -> Path:
    folder = root / "cifar-100-python"
    fine, coarse = [b"fine_%02d" % c for c in range(100)], [b"coarse_%02d" % c for c in range(20)]
    files = {
        "train": cifar_rows({b"coarse_labels": [0, 19, 7, 3], b"fine_labels": [99, 0, 49, 7]}, 1),
        "test": cifar_rows({b"coarse_labels": [1, 2], b"fine_labels": [50, 51]}, 2),
        "meta": smoke.python2_pickle({b"fine_label_names": fine, b"coarse_label_names": coarse}),
    }
    smoke.write_files(folder, files)
    return folder


def test_cifar10(tmp_path):
    folder = cifar10(tmp_path)
    loaded = data.load("cifar10", tmp_path, check=False)
    assert loaded.summary() == "cifar10: 10 train, 3 test, 10 classes, 3x32x32 images"
    assert loaded.classes[0] == "airplane" and loaded.classes[9] == "truck"
    assert loaded.train.y.tolist() == [1, 8, 2, 7, 3, 6, 4, 5, 5, 4] and loaded.test.y.tolist() == [3, 8, 8]
    assert np.array_equal(loaded.train.x[5].permute(1, 2, 0), photo(3, 1, size=(32, 32)))
    assert line("cifar10", tmp_path).startswith(f"{folder / 'data_batch_1'} is damaged or not the published file: MD5")


def test_cifar100(tmp_path):
    folder = cifar100(tmp_path)
    loaded = data.load("cifar100", tmp_path, check=False)
    assert loaded.summary() == "cifar100: 4 train, 2 test, 100 classes, 3x32x32 images"
    assert loaded.train.y.tolist() == [99, 0, 49, 7] and loaded.classes[99] == "fine_99"  # not the coarse ones
    assert line("cifar100", tmp_path).startswith(f"{folder / 'train'} is damaged or not the published file: MD5")


@pytest.mark.parametrize(
    ("name", "write", "file", "content", "says"),
    [
        ("cifar10", cifar10, "data_batch_4", None, "cannot be read: No such file or directory"),
        ("cifar10", cifar10, "data_batch_4", 0.5, "is damaged: ValueError while reading the pickle"),
        ("cifar10", cifar10, "test_batch", {b"labels": [10]}, "must be a list of integers from 0 to 9"),
        ("cifar100", cifar100, "train", {b"coarse_labels": [1]}, "it has no entry 'fine_labels'"),
        ("cifar100", cifar100, "meta", 0.0, "is damaged: ValueError while reading the pickle"),
    ],
)
def test_cifar_defects(name, write, file, content, says, tmp_path):
    path = write(tmp_path) / file
    if content is None:
        path.unlink()
    elif isinstance(content, float):
        raw = path.read_bytes()
        path.write_bytes(raw[: int(content * len(raw))])
    else:
        path.write_bytes(cifar_rows(content, 0))
    message = line(name, tmp_path, check=False)
    assert message.startswith(f"{path} ") and says in message


# Tiny ImageNet


def tiny_imagenet(root: Path) -> Path:
    folder, wnids = root / "tiny-imagenet-200", ["n02124075", "n04067472", "n01443537"]  # not in sorted order
    files: dict[str, object] = {"wnids.txt": "\n".join(wnids), "val/val_annotations.txt": ""}
    words = {"n01443537": "goldfish, Carassius auratus", "n02124075": "Egyptian cat", "n04067472": "reel"}
    files["words.txt"] = "".join(f"{w}\t{text}\n" for w, text in {"n00001740": "entity", **words}.items())
    for c, wnid in enumerate(wnids):
        files[f"train/{wnid}/{wnid}_boxes.txt"] = f"{wnid}_0.JPEG\t0\t10\t63\t58\n"
        for i in range(2):
            files[f"train/{wnid}/images/{wnid}_{i}.JPEG"] = photo(c, i, size=(64, 64))
    for i, wnid in enumerate((wnids[2], wnids[0], wnids[2], wnids[1])):
        files[f"val/images/val_{i}.JPEG"] = photo(9, i, size=(64, 64))
        files["val/val_annotations.txt"] += f"val_{i}.JPEG\t{wnid}\t0\t32\t44\t62\n"
    files["test/images/test_0.JPEG"] = photo(8, size=(64, 64))  # published without labels
    smoke.write_files(folder, files)
    return folder


def test_tiny_imagenet(tmp_path):
    folder = tiny_imagenet(tmp_path)
    loaded = data.load("tiny-imagenet", tmp_path, check=False)
    assert loaded.summary() == "tiny-imagenet: 6 train, 4 test, 3 classes, 3x64x64 images"
    assert loaded.classes == ("Egyptian cat", "reel", "goldfish")
    assert loaded.train.y.tolist() == [0, 0, 1, 1, 2, 2] and loaded.test.y.tolist() == [2, 0, 2, 1]
    first = np.asarray(PIL.open(folder / "val" / "images" / "val_0.JPEG"))
    assert np.array_equal(loaded.test.x[0].permute(1, 2, 0), first)
    published = "expected 200 classes, 100,000 training and 10,000 validation images, got 3, 6, 4"
    assert line("tiny-imagenet", tmp_path) == f"{folder} is incomplete: {published}"


def test_tiny_imagenet_without_some_images(tmp_path):
    folder = tiny_imagenet(tmp_path)
    (folder / "SMOKE").touch()  # any number of images
    whole = data.load("tiny-imagenet", tmp_path)
    spoil(folder, "val/images/val_1.JPEG", "val/images/val_2.JPEG", "train/n04067472/images/n04067472_1.JPEG")
    first = "1 of 6 train images cannot be used (1 damaged), first train/n04067472/images/n04067472_1.JPEG"
    second = "2 of 4 test images cannot be used (1 missing, 1 empty), first val/images/val_1.JPEG"
    hint = "replace them; check=false leaves them out"
    assert line("tiny-imagenet", tmp_path) == f"{folder}: {first} and {second}: {hint}"
    rest = data.load("tiny-imagenet", tmp_path, check=False)
    assert rest.notes == (
        "1 of 6 train images left out (1 damaged)",
        "2 of 4 test images left out (1 missing, 1 empty)",
    )
    assert rest.train.y.tolist() == [0, 0, 1, 2, 2] and rest.test.y.tolist() == [2, 1]
    assert torch.equal(rest.train.x, whole.train.x[[0, 1, 2, 4, 5]]) and torch.equal(rest.test.x, whole.test.x[[0, 3]])


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("val/val_annotations.txt", b"val_0.JPEG\tn09999999\t0\t0\t9\t9\n", "'n09999999' is not among the 3 classes"),
        ("val/val_annotations.txt", b"val_0.JPEG\n", "expected file, class and box, got 'val_0.JPEG'"),
        (
            "wnids.txt",
            b"n02124075\nn04067472\nn00000000\n",
            "n00000000/images has no images (1 of 3 classes are empty)",
        ),
    ],
)
def test_tiny_imagenet_defects(file, content, says, tmp_path):
    (tiny_imagenet(tmp_path) / file).write_bytes(content)
    assert says in line("tiny-imagenet", tmp_path, check=False)


# COCO

CATEGORIES = {
    1: "person",
    2: "bicycle",
    11: "fire hydrant",
    13: "stop sign",
    90: "toothbrush",
}  # of 80, with their gaps
# image id -> categories of its objects; the last image of each part has none
TRAIN = {9: [13, 1, 1], 25: [90], 30: [2], 34: [11, 2], 36: [1, 90], 49: []}
VAL = {42: [1], 73: [13], 74: [2, 90], 133: []}
YEARS = {"coco": 2014, "coco2017": 2017}


def file_name(part: str, image: int) -> str:
    return f"COCO_{part}_" * part.endswith("2014") + f"{image:012d}.jpg"


def instances(part: str, objects: Mapping[int, list[int]]) -> str:
    annotated = [(i, c) for i, categories in objects.items() for c in categories]
    lists = {
        "info": {"description": "COCO"},
        "images": [
            {"license": 5, "file_name": file_name(part, i), "height": 24, "width": 32, "id": i} for i in objects
        ],
        "licenses": [{"id": 1, "name": "Attribution"}],
        "annotations": [
            {"segmentation": [[1.5, 2, 9, 2, 9, 8]], "iscrowd": 0, "image_id": i, "category_id": c, "id": 900 + n}
            for n, (i, c) in enumerate(annotated[::-1])
        ],
        "categories": [{"supercategory": "any", "id": i, "name": name} for i, name in CATEGORIES.items()],
    }
    return json.dumps(lists)


def coco_tree(root: Path, year: int, folder: str = "coco", images: str = "{part}{year}", images_year: int = 0) -> Path:
    """COCO's annotations of one year, with images in the folders of the same or another year."""
    files: dict[str, object] = {}
    for part, objects in (("train", TRAIN), ("val", VAL)):
        files[f"annotations/instances_{part}{year}.json"] = instances(f"{part}{year}", objects)
        where = images_year or year
        for i in objects:
            name = file_name(f"{part}{where}", i)
            files[f"{images.format(part=part, year=where)}/{name}"] = photo(i)
    smoke.write_files(root / folder, files)
    return root / folder


@pytest.mark.parametrize(
    ("spec", "folder"), [("coco", "coco"), ("coco", "."), ("coco2017", "coco2017"), ("coco2017", "coco")]
)
@pytest.mark.parametrize("images", ["{part}{year}", "images/{part}{year}"])
def test_coco(spec, folder, images, tmp_path):
    year = YEARS[spec]
    base = coco_tree(tmp_path, year, folder, images)
    loaded = data.load(spec, tmp_path, check=False)
    assert loaded.summary() == f"{spec}: 5 train, 3 test, 5 labels, 3x224x224 image files" and not loaded.notes
    assert loaded.classes == ("person", "bicycle", "fire hydrant", "stop sign", "toothbrush")  # by id
    assert loaded.train.y.tolist() == [
        [1, 0, 0, 1, 0],
        [0, 0, 0, 0, 1],
        [0, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [1, 0, 0, 0, 1],
    ]
    assert loaded.test.y.tolist() == [[1, 0, 0, 0, 0], [0, 0, 0, 1, 0], [0, 1, 0, 0, 1]]
    part = base / images.format(part="train", year=year)
    assert loaded.train.x == tuple(str(part / file_name(f"train{year}", i)) for i in (9, 25, 30, 34, 36))
    assert str(year) in loaded.source


@pytest.mark.parametrize(("spec", "other"), [("coco", 2017), ("coco2017", 2014)])
def test_coco_images_in_the_folders_of_the_other_year(spec, other, tmp_path):
    base = coco_tree(tmp_path, YEARS[spec], images_year=other)
    # the two years split the same images differently
    moved = base / f"train{other}" / file_name(f"train{other}", 30)
    moved.rename(base / f"val{other}" / file_name(f"val{other}", 30))
    loaded = data.load(spec, tmp_path, check=False)
    assert names(loaded.train) == [file_name(f"{'val' if i == 30 else 'train'}{other}", i) for i in (9, 25, 30, 34, 36)]
    assert len(loaded.test) == 3 and not loaded.notes


@pytest.mark.parametrize("spec", YEARS)
def test_coco_sizes_are_required(spec, tmp_path, monkeypatch):
    year = YEARS[spec]
    base = coco_tree(tmp_path, year)
    published = {"coco": "82,783 images, 82,081", "coco2017": "118,287 images, 117,266"}[spec]
    file = base / "annotations" / f"instances_train{year}.json"
    expected = f"expected {published} with a label, got 6 and 5"
    assert line(spec, tmp_path) == f"{file} is not the published file: {expected}"
    info, *_ = coco._YEARS[spec]
    assert coco._YEARS[spec][2][1] == {"coco": (40_504, 40_137), "coco2017": (5_000, 4_952)}[spec]
    monkeypatch.setitem(coco._YEARS, spec, (info, year, ((6, 5), (4, 3))))
    expected = "expected 80 categories, got 5"
    assert line(spec, tmp_path) == f"{base / 'annotations'} is not the published set: {expected}"


@pytest.mark.parametrize(("spec", "other"), [("coco", "coco2017"), ("coco2017", "coco")])
def test_coco_annotations_of_the_other_year_only(spec, other, tmp_path):
    base = coco_tree(tmp_path, YEARS[other])
    missing = f"annotations/instances_train{YEARS[spec]}.json is not there"
    hint = f"{base} has the annotations of {YEARS[other]}, which the dataset {other} uses"
    assert line(spec, tmp_path) == f"{spec} not found under {tmp_path}: {missing}; {hint}"
    coco_tree(tmp_path, YEARS[spec])
    assert data.load(spec, tmp_path, check=False).name == spec


@pytest.mark.parametrize("spec", YEARS)
def test_coco_without_some_images(spec, tmp_path):
    year = YEARS[spec]
    base = coco_tree(tmp_path, year)
    (base / "SMOKE").touch()  # any number of images
    whole = data.load(spec, tmp_path)
    train = [f"train{year}/{file_name(f'train{year}', i)}" for i in (25, 30, 36)]
    spoil(base, *train)
    (base / f"val{year}" / file_name(f"val{year}", 42)).unlink()
    (base / f"val{year}" / file_name(f"val{year}", 133)).unlink()  # not labelled, so not needed
    first = f"3 of 5 train images cannot be used (1 missing, 1 empty, 1 damaged), first {train[0]}"
    second = f"1 of 3 test images cannot be used (1 missing), first val{year}/{file_name(f'val{year}', 42)}"
    hint = "replace them; check=false leaves them out"
    assert line(spec, tmp_path) == f"{base}: {first} and {second}: {hint}"
    rest = data.load(spec, tmp_path, check=False)
    assert rest.notes == (
        "3 of 5 train images left out (1 missing, 1 empty, 1 damaged)",
        "1 of 3 test images left out (1 missing)",
    )
    for part, kept in (("train", [0, 3]), ("test", [1, 2])):
        assert rest.split(part).x == tuple(whole.split(part).x[i] for i in kept)
        assert torch.equal(rest.split(part).y, whole.split(part).y[kept])
    x, _ = next(data.eval_batches(rest, "train", workers=0))
    assert len(x) == 2


def test_coco_without_any_image_of_a_part(tmp_path):
    base = coco_tree(tmp_path, 2014)
    for file in (base / "val2014").iterdir():
        file.unlink()
    what = "3 of 3 test images cannot be used (3 missing), first val2014/COCO_val2014_000000000042.jpg"
    assert line("coco", tmp_path, check=False) == f"{base}: {what}: replace them"


# NUS-WIDE

CONCEPTS = ("airport", "bear", "sky")
LISTED = {
    "train": {"actor/0001_2124494179": "001", "actor/0002_174174086": "000", "sky/0003_23": "101", "zoo/0004_1": "010"},
    "test": {"actor/0005_8": "100", "zoo/0006_99": "000", "zoo/0007_7": "110"},
}
LIST_FILE, LABEL_FILE = "ImageList/TrainImagelist.txt", "Groundtruth/TrainTestLabels/Labels_bear_Train.txt"


def write_photos(base: Path, folder: str) -> None:
    listed = [name for part in LISTED.values() for name in part]
    smoke.write_files(base, {f"{folder}/{name}.jpg": photo(i) for i, name in enumerate(listed)})


def official(root: Path, concepts: str = "ConceptsList/", folder: str = "Flickr", count: int = 3) -> Path:
    """NUS-WIDE as its zip files unpack; of more than three concepts, the others have no image."""
    base, extra = root / "nuswide", tuple(f"other{i}" for i in range(count - 3))
    files = {f"{concepts}Concepts81.txt": "".join(f"{c}\r\n" for c in CONCEPTS + extra)}
    for part, rows in LISTED.items():
        title = part.capitalize()
        files[f"ImageList/{title}Imagelist.txt"] = "".join(name.replace("/", "\\") + ".jpg\r\n" for name in rows)
        for c, concept in enumerate(CONCEPTS + extra):
            column = "".join(f"{row[c] if c < 3 else 0}\n" for row in rows.values())
            files[f"Groundtruth/TrainTestLabels/Labels_{concept}_{title}.txt"] = column
    smoke.write_files(base, files)
    write_photos(base, folder)
    return base


def cleaned(root: Path, prefix: str = "images/", folder: str = "clean/") -> Path:
    """NUS-WIDE with the cleaned lists; lines with the number 0 are left out."""
    base = root / "nuswide"
    files = {"Concepts81.txt": "\n".join(CONCEPTS)}
    for part, rows in LISTED.items():
        listed = "".join(f"{prefix}{name}.jpg {row.count('1')}\n" for name, row in rows.items())
        files[f"{folder}nus_wide_{part}_imglist.txt"] = listed
        files[f"{folder}nus_wide_{part}_label.txt"] = "".join(" ".join(row) + "\n" for row in rows.values())
    smoke.write_files(base, files)
    write_photos(base, "images")
    return base


UNLABELLED = ("1 of 4 train images have no label", "1 of 3 test images have no label")


@pytest.mark.parametrize("concepts", ["", "ConceptsList/"])
@pytest.mark.parametrize("folder", ["Flickr", "images"])
def test_nuswide_official(concepts, folder, tmp_path):
    base = official(tmp_path, concepts, folder)
    for spec in ("nuswide", "nuswide?lists=official"):
        loaded = data.load(spec, tmp_path, check=False)
        assert loaded.summary() == "nuswide: 4 train, 3 test, 3 labels, 3x224x224 image files"
        assert loaded.classes == CONCEPTS and loaded.notes == UNLABELLED
        for part, rows in LISTED.items():
            assert loaded.split(part).x == tuple(str(base / folder / f"{name}.jpg") for name in rows)
            assert loaded.split(part).y.tolist() == [list(map(int, row)) for row in rows.values()]


@pytest.mark.parametrize("prefix", ["images/", "Flickr/", ""])
@pytest.mark.parametrize("folder", ["clean/", ""])
def test_nuswide_cleaned(prefix, folder, tmp_path):
    base = cleaned(tmp_path, prefix, folder)
    loaded = data.load("nuswide", tmp_path, check=False)
    assert loaded.summary() == "nuswide: 3 train, 2 test, 3 labels, 3x224x224 image files"
    assert loaded.train.y.tolist() == [[0, 0, 1], [1, 0, 1], [0, 1, 0]] and loaded.test.y.tolist() == [
        [1, 0, 0],
        [1, 1, 0],
    ]
    assert loaded.test.x == tuple(str(base / "images" / f"{name}.jpg") for name in ("actor/0005_8", "zoo/0007_7"))
    sizes = "3 train and 2 test images are listed; the cleaned lists have 119,986 and 80,283"
    assert loaded.notes == (f"{sizes}, the paper names 161,789 and 107,859",)


def test_nuswide_cleaned_lists_are_the_default(tmp_path):
    official(tmp_path)
    needed = "clean lists: expected nus_wide_train_imglist.txt there"
    assert line("nuswide?lists=clean", tmp_path, check=False) == f"{tmp_path / 'nuswide'} has no {needed}"
    cleaned(tmp_path)
    options = ("", "?lists=official", "?lists=clean")
    sizes = {spec: len(data.load(f"nuswide{spec}", tmp_path, check=False).train) for spec in options}
    assert sizes == {"": 3, "?lists=official": 4, "?lists=clean": 3}
    what = "option lists must be official or clean, got 'both'"
    assert line("nuswide?lists=both", tmp_path) == f"nuswide?lists=both: {what}"


@pytest.mark.parametrize(("option", "write"), [("?lists=official", official), ("?lists=clean", cleaned)])
def test_nuswide_without_some_images(option, write, tmp_path):
    base = write(tmp_path)
    (base / "SMOKE").touch()  # any number of concepts and images
    whole = data.load("nuswide" + option, tmp_path)
    folder = Path(whole.train.x[0]).parents[1]
    spoil(folder, "zoo/0004_1.jpg", "sky/0003_23.jpg", "zoo/0007_7.jpg")
    total, tests = len(whole.train), len(whole.test)
    # the kinds are in the order in which they occur
    first = f"2 of {total} train images cannot be used (1 empty, 1 missing), first {folder.name}/sky/0003_23.jpg"
    second = f"1 of {tests} test images cannot be used (1 damaged), first {folder.name}/zoo/0007_7.jpg"
    hint = "replace them; check=false leaves them out"
    assert line("nuswide" + option, tmp_path) == f"{base}: {first} and {second}: {hint}"
    rest = data.load("nuswide" + option, tmp_path, check=False)
    assert rest.train.x == whole.train.x[:-2] and torch.equal(rest.train.y, whole.train.y[:-2])
    assert rest.test.x == whole.test.x[:-1] and torch.equal(rest.test.y, whole.test.y[:-1])
    left_out = (
        f"2 of {total} train images left out (1 empty, 1 missing)",
        f"1 of {tests} test images left out (1 damaged)",
    )
    unlabelled = ("1 of 2 train images have no label", "1 of 2 test images have no label")  # of those that stay
    assert rest.notes == left_out + (unlabelled if write is official else ())


@pytest.mark.parametrize(
    ("file", "edit", "says"),
    [
        (LABEL_FILE, lambda s: s + "0\n", "{file} has 5 lines but TrainImagelist.txt has 4"),
        (LIST_FILE, lambda s: s.split("\n", 1)[1], "{base}/{labels} has 4 lines but TrainImagelist.txt has 3"),
        (LABEL_FILE, lambda s: s.replace("1", "2"), "{file} must have 0 or 1 in each line"),
        (LABEL_FILE, None, "{file} cannot be read: No such file or directory"),
        (LIST_FILE, lambda s: "", "{file} lists no image"),
        (LIST_FILE, lambda s: "..\\..\\" + s, "{file} names '../../actor/0001_2124494179.jpg', which leads out of"),
        ("ConceptsList/Concepts81.txt", lambda s: s + "a/b", "{file} names 'a/b', which is not a plain"),
        ("ConceptsList/Concepts81.txt", lambda s: s + "sky", "{file} must name 81 different concepts, got 4 lines"),
        (
            LIST_FILE,
            None,
            "{base} has no lists: expected nus_wide_train_imglist.txt or ImageList/TrainImagelist.txt there",
        ),
    ],
)
def test_nuswide_official_defects(file, edit, says, tmp_path):
    base = official(tmp_path)
    path = base / file
    text = path.read_bytes().decode()
    path.unlink() if edit is None else path.write_bytes(edit(text).encode())
    first = "Groundtruth/TrainTestLabels/Labels_airport_Train.txt"
    assert line("nuswide", tmp_path, check=False).startswith(says.format(file=path, base=base, labels=first))


def test_nuswide_official_sizes_are_required(tmp_path, monkeypatch):
    base = official(tmp_path)
    concepts = base / "ConceptsList" / "Concepts81.txt"
    assert line("nuswide", tmp_path) == f"{concepts} must name 81 different concepts, got 3 lines"
    official(tmp_path, count=81)
    expected = "is not the published file: expected 161,789 images, got 4"
    assert line("nuswide", tmp_path) == f"{base / LIST_FILE} {expected}"
    assert nuswide._OFFICIAL["test"] == 107_859
    monkeypatch.setattr(nuswide, "_OFFICIAL", {"train": 4, "test": 3})
    assert data.load("nuswide", tmp_path).notes == UNLABELLED


def test_nuswide_without_images(tmp_path):
    base = official(tmp_path)
    (base / "Flickr").rename(base / "elsewhere")
    assert line("nuswide", tmp_path, check=False) == f"{base / 'images'} has no images, nor has {base / 'Flickr'}"


# the check of image files


def test_defects_of_files(tmp_path, monkeypatch):
    smoke.write_files(tmp_path, {name: photo(3) for name in ("a.jpg", "b.png", "c.gif", "d.bmp", "e.jpg", "f.png")})
    raw = (tmp_path / "a.jpg").read_bytes()
    (tmp_path / "padded.jpg").write_bytes(raw + b"\0" * 20)  # complete, with bytes after its end
    (tmp_path / "page.jpg").write_bytes(b"<html>photo unavailable</html>")
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "folder.jpg").mkdir()
    for name in ("e.jpg", "f.png"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-100])
    expected = dict.fromkeys(("a.jpg", "b.png", "c.gif", "d.bmp", "padded.jpg"), "")
    expected |= dict.fromkeys(("e.jpg", "f.png", "page.jpg"), "damaged")
    expected |= {"empty.jpg": "empty", "folder.jpg": "unreadable", "gone.jpg": "missing", "a.jpg/x.jpg": "missing"}
    monkeypatch.setattr(images, "_CHUNK", 2)
    decoded, decode = [], images.decode
    monkeypatch.setattr(images, "decode", lambda raw, name: decoded.append(Path(name).name) or decode(raw, name))
    found = images.find_defects([str(tmp_path / name) for name in expected])
    assert dict(zip(expected, found, strict=True)) == expected
    assert not {"a.jpg", "b.png"} & set(decoded)  # their last bytes are enough


def test_files_without_pillow(tmp_path, monkeypatch):
    smoke.write_files(tmp_path, {"a.gif": photo(3)})
    monkeypatch.setattr(images, "_pillow", lambda: (_ for _ in ()).throw(data.DataError("reading images needs Pillow")))
    with pytest.raises(data.DataError, match="^reading images needs Pillow$"):
        images.find_defects([str(tmp_path / "a.gif")])
