"""Small generated files in each dataset's real format, for end-to-end smoke tests.

Every class has its own color, so a network can learn something from a handful of images. A file called SMOKE marks
the folder: loaders then require no published sizes or checksums, and add "(smoke)" to the dataset's name.
"""

from __future__ import annotations

import colorsys
import io
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .core import DataError
from .seeded import mix, uniform

Files = dict[str, Any]  # relative path -> text, bytes, or the pixels of an image


def write_smoke(name: str, root: str | os.PathLike[str]) -> str:
    """Write a small stand-in for a dataset, and return the spec that loads it (with the same root).

    name: one of SMOKE_NAMES
    root: folder to write to

    >>> import tempfile
    >>> from gsoftmax.data import load
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     load(write_smoke("cifar10", folder), folder).summary()
    'cifar10 (smoke): 200 train, 60 test, 10 classes, 3x32x32 images'
    """
    if name not in _LAYOUTS:
        raise ValueError(f"smoke dataset must be one of {', '.join(_LAYOUTS)}, got {name!r}")
    folder, make = _LAYOUTS[name]
    note = "Small generated files: for trying the software, not for results.\n"
    write_files(Path(root, folder), {"SMOKE": note, **make()})
    path = {"folder": "", "npz": "smoke.npz", "arff": "smoke-train.arff"}.get(name)
    return name if path is None else f"{name}:{Path(root, folder, path)}"


def write_files(folder: Path, files: Mapping[str, Any]) -> None:
    """Write text, bytes, or pixels, uint8 (height, width, 3), as files; JPEG unless the name says otherwise."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, np.ndarray):
            try:
                from PIL import Image
            except ImportError:
                extra = "pip install 'gsoftmax[train]'"
                raise DataError(f"smoke images need Pillow, which is not installed: {extra}") from None
            Image.fromarray(content).save(path, quality=90)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)


def image(labels: Sequence[int], classes: int, *seed: int, size: tuple[int, int] = (32, 32)) -> np.ndarray:
    """uint8 (height, width, 3): a vertical strip in the color of each label, with noise."""
    height, width = size
    hues = np.array([colorsys.hsv_to_rgb(label / classes, 0.8, 0.6) for label in labels])
    strip = np.arange(width) * len(labels) // width
    noise = uniform(height * width * 3, mix(*seed)).reshape(height, width, 3)
    return (255 * hues[strip] + 60 * noise).astype(np.uint8)


def python2_pickle(value: Any) -> bytes:
    """A protocol 2 pickle of dicts, lists, bytes, integers and uint8 (N, D) arrays, as Python 2 and its NumPy wrote it.

    >>> import pickle
    >>> pickle.loads(python2_pickle({b"labels": [3, 300]}), encoding="bytes")
    {b'labels': [3, 300]}
    """
    return b"\x80\x02" + _opcodes(value) + b"."


def _opcodes(value: Any) -> bytes:
    if isinstance(value, dict):
        return b"}(" + b"".join(_opcodes(k) + _opcodes(v) for k, v in value.items()) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(_opcodes, value)) + b"e"
    if isinstance(value, bytes):
        return (b"U" + bytes([len(value)]) if len(value) < 256 else b"T" + struct.pack("<i", len(value))) + value
    if isinstance(value, int):
        if 0 <= value < 256:
            return b"K" + bytes([value])
        return b"M" + struct.pack("<H", value) if 0 <= value < 65536 else b"J" + struct.pack("<i", value)
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = b"".join(map(_opcodes, value.shape)) + b"\x86"
    return array + b"(K\x01" + shape + dtype + b"\x89" + _opcodes(value.tobytes()) + b"tb"


def _cifar_rows(count: int, classes: int, label_key: bytes, seed: int) -> bytes:
    labels = [i % classes for i in range(count)]
    pixels = np.stack([image([c], classes, seed, i) for i, c in enumerate(labels)]).transpose(0, 3, 1, 2)
    return python2_pickle({b"batch_label": b"batch", label_key: labels, b"data": pixels.reshape(count, 3072)})


def _cifar10() -> Files:
    names = b"airplane automobile bird cat deer dog frog horse ship truck".split()
    files = {f"data_batch_{k}": _cifar_rows(40, 10, b"labels", k) for k in range(1, 6)}
    meta = python2_pickle({b"num_cases_per_batch": 40, b"label_names": names, b"num_vis": 3072})
    return files | {"test_batch": _cifar_rows(60, 10, b"labels", 6), "batches.meta": meta}


def _cifar100() -> Files:
    files = {part: _cifar_rows(n, 100, b"fine_labels", n) for part, n in (("train", 300), ("test", 100))}
    return files | {"meta": python2_pickle({b"fine_label_names": [b"class_%02d" % c for c in range(100)]})}


def _tiny_imagenet() -> Files:
    wnids = [f"n{1443537 + 31 * c:08d}" for c in range(5)]
    files: Files = {"wnids.txt": "\n".join(wnids), "val/val_annotations.txt": ""}
    files["words.txt"] = "".join(f"{w}\tcolor {c}, number {c}\n" for c, w in enumerate(wnids))
    for i in range(40):
        wnid = wnids[i % 5]
        files[f"train/{wnid}/images/{wnid}_{i}.JPEG"] = image([i % 5], 5, 0, i, size=(64, 64))
    for i in range(15):
        files[f"val/images/val_{i}.JPEG"] = image([i % 5], 5, 1, i, size=(64, 64))
        files["val/val_annotations.txt"] += f"val_{i}.JPEG\t{wnids[i % 5]}\t0\t0\t62\t62\n"
    return files


def _label_sets(count: int, labels: int, *seed: int) -> list[list[int]]:
    """One to three labels for each image; as in real data, the first few are frequent. Every eighth image has none."""
    draws = uniform(count * 4, mix(*seed)).reshape(count, 4)
    sets = [sorted({int(labels * u**2) for u in row[: 1 + int(3 * row[3])]}) for row in draws]
    return [[] if i % 8 == 7 else found for i, found in enumerate(sets)]


def _coco(year: int) -> Files:
    ids = [i for i in range(1, 91) if i not in (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)]  # 80 ids with COCO's gaps
    files: Files = {}
    for part, count, start in ((f"train{year}", 24, 1000), (f"val{year}", 12, 2000)):
        lists: dict[str, list[Any]] = {"images": [], "licenses": [], "annotations": []}
        for i, labels in enumerate(_label_sets(count, 80, start)):
            height, width = (72, 96) if i % 2 else (96, 72)
            image_id = start + 7 * i
            name = f"COCO_{part}_" * (year == 2014) + f"{image_id:012d}.jpg"
            lists["images"].append({"file_name": name, "height": height, "width": width, "id": image_id})
            files[f"{part}/{name}"] = image(labels or [0], 80, start, i, size=(height, width))
            for label in labels + labels[:1]:  # two objects of one category
                outline = {"segmentation": [[1.5, 2.5, 30.25, 2.5, 30.25, 40.0]], "bbox": [1.5, 2.5, 28.75, 37.5]}
                lists["annotations"].append({**outline, "image_id": image_id, "category_id": ids[label]})
        lists["categories"] = [{"supercategory": "pattern", "id": i, "name": f"pattern {i}"} for i in ids]
        files[f"annotations/instances_{part}.json"] = json.dumps({"info": {"year": year}, **lists})
    return files


def _nuswide() -> Files:
    files: Files = {"Concepts81.txt": "".join(f"concept{c:02d}\r\n" for c in range(81))}
    for tag, (part, count) in enumerate((("train", 24), ("test", 12))):
        names, rows = "", ""
        for i, labels in enumerate(_label_sets(count, 81, tag)):
            name = f"tag{i % 3}/{i:04d}_{tag}{i:07d}.jpg"
            files[f"images/{name}"] = image(labels or [0], 81, tag, i, size=(60, 80))
            names += f"images/{name} {len(labels)}\n"
            rows += " ".join("1" if c in labels else "0" for c in range(81)) + "\n"
        files |= {f"clean/nus_wide_{part}_imglist.txt": names, f"clean/nus_wide_{part}_label.txt": rows}
    return files


def folder_files(
    classes: Sequence[str], counts: Mapping[str, int], size: tuple[int, int] = (32, 32), end: str = "jpg"
) -> Files:
    """Images in class folders: `counts` maps each part to its number of images per class."""
    return {
        f"{part}/{name}/{i:04d}.{end}": image([c], len(classes), len(part), c, i, size=size)
        for part, count in counts.items()
        for c, name in enumerate(classes)
        for i in range(count)
    }


def _npz() -> Files:
    y = np.arange(150) % 3
    x = np.stack([image([int(c)], 3, i, size=(16, 16)) for i, c in enumerate(y)])
    file = io.BytesIO()
    np.savez_compressed(file, x_train=x[:100], y_train=y[:100], x_test=x[100:], y_test=y[100:])
    return {"smoke.npz": file.getvalue()}


def _arff() -> Files:
    header = "@relation MultiLabelData\n" + "".join(f"@attribute Att{i + 1} numeric\n" for i in range(8))
    header += "".join(f"@attribute {name} {{0,1}}\n" for name in ("round", "tall", "warm")) + "@data\n"
    tables = []
    for seed, count in enumerate((120, 60)):
        x = uniform(count * 8, seed).reshape(count, 8).round(6)
        y = np.stack([x[:, 0] + x[:, 1] > 1, x[:, 2] > 0.6, x[:, 3] + x[:, 4] < 0.8], axis=1).astype(int)
        tables.append([[*map(str, a), *map(str, b)] for a, b in zip(x.tolist(), y.tolist(), strict=True)])
    dense = "".join(",".join(row) + "\n" for row in tables[0])
    sparse = "".join("{" + ", ".join(f"{i} {v}" for i, v in enumerate(row) if v != "0") + "}\n" for row in tables[1])
    return {"smoke-train.arff": header + dense, "smoke-test.arff": header + sparse}


# name -> its folder, and what makes its files
_LAYOUTS: dict[str, tuple[str, Callable[[], Files]]] = {
    "cifar10": ("cifar-10-batches-py", _cifar10),
    "cifar100": ("cifar-100-python", _cifar100),
    "tiny-imagenet": ("tiny-imagenet-200", _tiny_imagenet),
    "coco": ("coco", lambda: _coco(2014)),
    "coco2017": ("coco2017", lambda: _coco(2017)),
    "nuswide": ("nuswide", _nuswide),
    "folder": ("folder", lambda: folder_files(("blue", "green", "red"), {"train": 12, "test": 6})),
    "npz": ("npz", _npz),
    "arff": ("arff", _arff),
}
SMOKE_NAMES = tuple(_LAYOUTS)
