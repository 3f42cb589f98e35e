"""Small generated files in each dataset's real on-disk format, for trying a recipe from the first byte to the last.

Every class has a colour and a stripe pattern of its own, so a network can learn something from a handful of images. The
folder is marked with a file called SMOKE: the loaders then do not demand published sizes and checksums, and put
"(smoke)" behind the dataset's name.
"""

from __future__ import annotations

import colorsys
import gzip
import io
import json
import os
import struct
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .core import DataError
from .seeded import mix, uniform
from .tables import Attribute

SMOKE_NAMES = ("cifar10", "cifar100", "tiny-imagenet", "coco", "nuswide", "folder", "npz", "arff")

_CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def write_smoke(name: str, root: str | os.PathLike[str], *, seed: int = 0, archive: bool = False) -> str:
    """Write a small stand-in for a dataset under root, and return the spec that loads it (with the same root).

    archive: for cifar10 and cifar100, the .tar.gz in place of the extracted folder

    >>> import tempfile
    >>> from gsoftmax.data import load
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     load(write_smoke("cifar10", folder), folder).summary()
    'cifar10 (smoke): 200 train, 60 test, 10 classes, 3x32x32 images'
    """
    writers: dict[str, Callable[[Path, int], str]] = {
        "cifar10": lambda base, s: _write_cifar("cifar10", base, s, archive),
        "cifar100": lambda base, s: _write_cifar("cifar100", base, s, archive),
        "tiny-imagenet": _write_tiny_imagenet,
        "coco": _write_coco,
        "nuswide": _write_nuswide,
        "folder": _write_folder,
        "npz": _write_npz,
        "arff": _write_arff_pair,
    }
    if name not in writers:
        raise ValueError(f"smoke dataset must be one of {', '.join(writers)}, got {name!r}")
    base = Path(root)
    base.mkdir(parents=True, exist_ok=True)
    return writers[name](base, seed)


def pattern(label: int, classes: int, side: tuple[int, int], seed: int) -> np.ndarray:
    """uint8 (height, width, 3): the class's hue, striped in the class's direction and width, with noise."""
    h, w = side
    noise, offset = uniform(h * w * 3, mix(seed, 1)).reshape(h, w, 3), uniform(1, mix(seed, 2))[0]
    angle = np.pi * ((label * 7) % 16) / 16
    rows, cols = np.mgrid[0:h, 0:w] / max(h, w)
    stripes = np.sin(2 * np.pi * ((2 + label % 5) * (rows * np.sin(angle) + cols * np.cos(angle)) + offset))
    hue = np.array(colorsys.hsv_to_rgb(label / classes, 0.8, 1.0))
    pixels = 255 * (0.5 + 0.3 * stripes[..., None]) * hue + 60 * (noise - 0.5)
    return np.asarray(pixels.clip(0, 255), dtype=np.uint8)


def scene(labels: Sequence[int], classes: int, side: tuple[int, int], seed: int) -> np.ndarray:
    """uint8 (height, width, 3): one vertical strip of each label's pattern."""
    edges = np.linspace(0, side[1], len(labels) + 1).astype(int)
    strips = [
        pattern(c, classes, (side[0], max(1, b - a)), mix(seed, c))
        for c, a, b in zip(labels, edges, edges[1:], strict=False)
    ]
    return np.concatenate(strips, axis=1)


def _jpeg(path: Path, pixels: np.ndarray) -> None:
    try:
        from PIL import Image
    except ImportError:
        raise DataError(
            "smoke images are written with Pillow, which is not installed: pip install 'gsoftmax[train]'"
        ) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, format="JPEG", quality=90)


def _mark(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "SMOKE").write_text("Small generated files: for trying the software, not for results.\n")


# CIFAR: pickles as Python 2 wrote them


def _pickle(value: Any) -> bytes:
    """Protocol 2 opcodes for dicts, lists, bytes, integers and uint8 arrays, as Python 2 and its NumPy wrote them."""
    if isinstance(value, dict):
        return b"}(" + b"".join(_pickle(k) + _pickle(v) for k, v in value.items()) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(_pickle, value)) + b"e"
    if isinstance(value, bytes):
        return (b"U" + bytes([len(value)]) if len(value) < 256 else b"T" + struct.pack("<i", len(value))) + value
    if isinstance(value, int):
        if 0 <= value < 256:
            return b"K" + bytes([value])
        return b"M" + struct.pack("<H", value) if 0 <= value < 65536 else b"J" + struct.pack("<i", value)
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 2:
        array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        shape = b"".join(map(_pickle, value.shape)) + b"\x86"
        return array + b"(K\x01" + shape + dtype + b"\x89" + _pickle(value.tobytes()) + b"tb"
    raise TypeError(f"no pickle for {type(value).__name__}")


def python2_pickle(value: Any) -> bytes:
    """A whole protocol 2 pickle of what CIFAR's files hold.

    >>> import pickle
    >>> pickle.loads(python2_pickle({b"labels": [3, 300]}), encoding="bytes")
    {b'labels': [3, 300]}
    """
    return b"\x80\x02" + _pickle(value) + b"."


def _write_cifar(name: str, base: Path, seed: int, archive: bool) -> str:
    ten = name == "cifar10"
    classes = 10 if ten else 100
    folder = "cifar-10-batches-py" if ten else "cifar-100-python"
    label_key = b"labels" if ten else b"fine_labels"

    def rows(count: int, tag: int, title: bytes) -> bytes:
        labels = [i % classes for i in range(count)]
        images = [pattern(c, classes, (32, 32), mix(seed, tag, i)) for i, c in enumerate(labels)]
        content: dict[bytes, Any] = {
            b"batch_label": title,
            label_key: labels,
            b"data": np.stack(images).transpose(0, 3, 1, 2).reshape(count, 3072),
            b"filenames": [b"image_%05d.png" % i for i in range(count)],
        }
        if not ten:
            content[b"coarse_labels"] = [c // 5 for c in labels]
        return python2_pickle(content)

    names = [n.encode() for n in _CIFAR10_CLASSES] if ten else [b"class_%02d" % c for c in range(100)]
    if ten:
        files = {f"data_batch_{k}": rows(40, k, b"training batch %d of 5" % k) for k in range(1, 6)}
        files["test_batch"] = rows(60, 6, b"testing batch 1 of 1")
        files["batches.meta"] = python2_pickle({b"num_cases_per_batch": 40, b"label_names": names, b"num_vis": 3072})
    else:
        files = {"train": rows(300, 1, b"training batch 1 of 1"), "test": rows(100, 2, b"testing batch 1 of 1")}
        coarse = [b"group_%02d" % c for c in range(20)]
        files["meta"] = python2_pickle({b"fine_label_names": names, b"coarse_label_names": coarse})
    if archive:
        _mark(base)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for file, data in files.items():
                member = tarfile.TarInfo(f"{folder}/{file}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        path = base / ("cifar-10-python.tar.gz" if ten else "cifar-100-python.tar.gz")
        path.write_bytes(gzip.compress(packed.getvalue(), mtime=0))
    else:
        _mark(base / folder)
        for file, data in files.items():
            (base / folder / file).write_bytes(data)
    return name


# image trees


def _write_tiny_imagenet(base: Path, seed: int) -> str:
    folder = base / "tiny-imagenet-200"
    wnids = [f"n{1443537 + 31 * c:08d}" for c in range(5)]
    _mark(folder)
    (folder / "wnids.txt").write_text("\n".join(wnids) + "\n")
    (folder / "words.txt").write_text("".join(f"{w}\tstripes {c}, pattern number {c}\n" for c, w in enumerate(wnids)))
    annotations = []
    for c, wnid in enumerate(wnids):
        for i in range(8):
            _jpeg(folder / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", pattern(c, 5, (64, 64), mix(seed, c, i)))
    for i in range(15):
        _jpeg(folder / "val" / "images" / f"val_{i}.JPEG", pattern(i % 5, 5, (64, 64), mix(seed, 99, i)))
        annotations.append(f"val_{i}.JPEG\t{wnids[i % 5]}\t0\t0\t62\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(annotations))
    return "tiny-imagenet"


def _label_sets(count: int, labels: int, seed: int) -> list[list[int]]:
    """One to three labels for each image; the first few labels are frequent, as they are in real data."""
    draws = uniform(count * 4, seed).reshape(count, 4)
    return [sorted({int(labels * u**2) for u in row[: 1 + int(3 * row[3])]}) for row in draws]


def _write_coco(base: Path, seed: int) -> str:
    folder = base / "coco"
    _mark(folder)
    ids = [i for i in range(1, 91) if i not in (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)]  # 80 ids with COCO's gaps
    categories = [{"supercategory": "pattern", "id": i, "name": f"pattern {i}"} for i in ids]
    (folder / "annotations").mkdir(exist_ok=True)
    for tag, (part, count) in enumerate((("train2014", 24), ("val2014", 12))):
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for i, labels in enumerate(_label_sets(count, 80, mix(seed, tag))):
            image_id = 1000 * (tag + 1) + 7 * i
            h, w = (72, 96) if i % 2 else (96, 72)
            name = f"COCO_{part}_{image_id:012d}.jpg"
            images.append({"license": 1, "file_name": name, "height": h, "width": w, "id": image_id})
            _jpeg(folder / part / name, scene(labels, 80, (h, w), mix(seed, tag, i)))
            if i % 8 == 7:
                continue  # an image without any object, as the published files have too
            for label in [*labels, labels[0]]:  # two objects of one category
                item: dict[str, Any] = {
                    "segmentation": [[1.5, 2.5, 30.25, 2.5, 30.25, 40.0]],
                    "area": 539.1,
                    "iscrowd": 0,
                }
                item |= {"image_id": image_id, "bbox": [1.5, 2.5, 28.75, 37.5], "category_id": ids[label]}
                annotations.append(item | {"id": len(annotations) + 1})
        content = {
            "info": {"year": 2014},
            "images": images,
            "licenses": [],
            "annotations": annotations,
            "categories": categories,
        }
        (folder / "annotations" / f"instances_{part}.json").write_text(json.dumps(content))
    return "coco"


def _write_nuswide(base: Path, seed: int) -> str:
    folder = base / "nuswide"
    _mark(folder)
    (folder / "clean").mkdir(exist_ok=True)
    (folder / "Concepts81.txt").write_text("".join(f"concept{c:02d}\r\n" for c in range(81)))
    for tag, (part, count) in enumerate((("train", 24), ("test", 12))):
        names, rows = [], []
        for i, labels in enumerate(_label_sets(count, 81, mix(seed, 5, tag))):
            name = f"{i:04d}_{tag}{i:07d}.jpg"
            dropped = i % 8 == 7  # listed, but with no label left: the loader passes over it
            _jpeg(folder / "images" / f"tag{i % 3}" / name, scene(labels, 81, (60, 80), mix(seed, 6, tag, i)))
            names.append(f"images/tag{i % 3}/{name} {0 if dropped else len(labels)}\n")
            rows.append(" ".join("1" if c in labels and not dropped else "0" for c in range(81)) + "\n")
        (folder / "clean" / f"nus_wide_{part}_imglist.txt").write_text("".join(names))
        (folder / "clean" / f"nus_wide_{part}_label.txt").write_text("".join(rows))
    return "nuswide"


def _write_folder(base: Path, seed: int) -> str:
    folder = base / "folder"
    _mark(folder)
    for tag, (part, count) in enumerate((("train", 12), ("test", 6))):
        for c, name in enumerate(("blue", "green", "red")):
            for i in range(count):
                _jpeg(folder / part / name / f"{i:04d}.jpg", pattern(c, 3, (32, 32), mix(seed, tag, c, i)))
    return f"folder:{folder}"


# tables


def _write_npz(base: Path, seed: int) -> str:
    folder = base / "npz"
    _mark(folder)
    y = np.arange(150) % 3
    x = np.stack([pattern(int(c), 3, (16, 16), mix(seed, i)) for i, c in enumerate(y)])
    np.savez_compressed(folder / "smoke.npz", x_train=x[:100], y_train=y[:100], x_test=x[100:], y_test=y[100:])
    return f"npz:{folder / 'smoke.npz'}"


def _write_arff_pair(base: Path, seed: int) -> str:
    folder = base / "arff"
    _mark(folder)
    attributes = [
        *(Attribute(f"Att{i + 1}") for i in range(8)),
        *(Attribute(n, ("0", "1")) for n in ("round", "tall", "warm")),
    ]
    for tag, (part, count) in enumerate((("train", 120), ("test", 60))):
        x = uniform(count * 8, mix(seed, tag)).reshape(count, 8).round(6)
        y = np.stack([x[:, 0] + x[:, 1] > 1, x[:, 2] > 0.6, x[:, 3] + x[:, 4] < 0.8], axis=1)
        write_arff(
            folder / f"smoke-{part}.arff",
            "MultiLabelData",
            attributes,
            np.concatenate([x, y], axis=1),
            sparse=bool(tag),
        )
    return f"arff:{folder / 'smoke-train.arff'}"


def _quoted(text: str) -> str:
    if text and not set(text) & set(" \t\r\n,{}%'\"\\?") and text.isprintable():
        return text
    return (
        "'"
        + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
        + "'"
    )


def write_arff(
    path: str | os.PathLike[str],
    relation: str,
    attributes: Sequence[Attribute],
    data: np.ndarray,
    *,
    sparse: bool = False,
) -> None:
    """Write an ARFF file. data: (rows, attributes), a nominal entry is its position in the attribute's values."""

    def cell(attribute: Attribute, value: float) -> str:
        return repr(float(value)) if attribute.values is None else _quoted(attribute.values[int(value)])

    with open(path, "w", encoding="utf-8", newline="\n") as out:
        out.write(f"@relation {_quoted(relation)}\n\n")
        for a in attributes:
            kind = "numeric" if a.values is None else "{" + ",".join(map(_quoted, a.values)) + "}"
            out.write(f"@attribute {_quoted(a.name)} {kind}\n")
        out.write("\n@data\n")
        for row in np.asarray(data, dtype=np.float64):
            cells = list(zip(attributes, row.tolist(), strict=True))
            if sparse:
                out.write("{" + ", ".join(f"{i} {cell(a, v)}" for i, (a, v) in enumerate(cells) if v != 0) + "}\n")
            else:
                out.write(",".join(cell(a, v) for a, v in cells) + "\n")
