"""`npz:PATH` (arrays) and `arff:PATH` (multi-label tables as MULAN, MEKA and Weka write them)."""

from __future__ import annotations

import math
import os
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

from ..catalog import ARFF, NPZ
from .augment import Augment
from .core import DataError, Dataset, Split, first_line, is_smoke, read_bytes, take, within_limit

# npz


def load_npz(path: str, *, test: float | None = None, split_seed: int = 0) -> Dataset:
    """Arrays x_train, y_train, x_test, y_test of an .npz file, read without pickle."""
    arrays = read_npz(Path(path))
    if test is not None and "x_test" not in arrays and not 0 < test < 1:
        raise DataError(f"npz:{path}?test must lie between 0 and 1, got {test}")
    for key in ("x_train", "y_train") if test is not None else ("x_train", "y_train", "x_test", "y_test"):
        if key not in arrays:
            raise DataError(
                f"npz:{path} has no array {key}, only {', '.join(sorted(arrays)) or 'nothing'}\n  layout: {NPZ.layout}"
            )
    parts = [p for p in ("train", "val", "test") if f"x_{p}" in arrays and f"y_{p}" in arrays]
    xs = {p: _inputs(arrays[f"x_{p}"], f"npz:{path} x_{p}") for p in parts}
    for p in parts:
        if xs[p].shape[1:] != xs["train"].shape[1:] or xs[p].dtype != xs["train"].dtype:
            raise DataError(
                f"npz:{path} x_{p} must have rows shaped {tuple(xs['train'].shape[1:])}, got {tuple(xs[p].shape[1:])}"
            )
    ys, classes, multilabel = _targets({p: arrays[f"y_{p}"] for p in parts}, arrays.get("names"), f"npz:{path}")
    splits = {p: Split(xs[p], ys[p]) for p in parts}
    if "test" not in splits and test is not None:
        aside, rest = take(ys["train"], test, split_seed, keep=1)
        splits["test"], splits["train"] = splits["train"].select(aside), splits["train"].select(rest)
    for p, split in splits.items():
        if not len(split):
            raise DataError(f"npz:{path} has no rows in the {p} split")
    return Dataset(
        name=f"npz:{Path(path).name}" + " (smoke)" * is_smoke(Path(path).parent),
        kind="images" if xs["train"].dtype == torch.uint8 else "table",
        classes=classes,
        multilabel=multilabel,
        train=splits["train"],
        test=splits["test"],
        val=splits.get("val"),
        augment=Augment(),
        source=NPZ.source,
    )


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an .npz file. Object arrays (pickles) are refused, and arrays larger than their bytes can hold."""
    arrays = {}
    try:
        with zipfile.ZipFile(path) as archive:
            total = 0
            for member in archive.infolist():
                name = member.filename.removesuffix(".npy")
                if name == member.filename:
                    raise DataError(f"{path} holds {name[:60]!r}, which is not an array")
                with archive.open(member) as stream:
                    version = np.lib.format.read_magic(stream)
                    reader = (
                        np.lib.format.read_array_header_1_0
                        if version == (1, 0)
                        else np.lib.format.read_array_header_2_0
                    )
                    shape, _, dtype = reader(stream)
                if dtype.hasobject:
                    raise DataError(
                        f"{path} array {name} holds Python objects, which are refused: save numbers or strings"
                    )
                size = math.prod(shape) * dtype.itemsize
                total += size
                within_limit(total, str(path))
                # deflate shrinks at most 1032 to 1
                if size > member.file_size or size > 1100 * member.compress_size + 1024:
                    raise DataError(f"{path} array {name} declares {size:,} bytes but holds fewer")
                with archive.open(member) as stream:
                    arrays[name] = np.lib.format.read_array(stream, allow_pickle=False)
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"npz:{path} not found\n  layout: {NPZ.layout}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # damaged archives and headers end in almost any exception
        raise DataError(f"{path} is damaged or not an .npz file: {first_line(error)}") from None
    return arrays


def _inputs(x: np.ndarray, where: str) -> Tensor:
    """float32 (N, D) or uint8 (N, C, H, W)."""
    if x.ndim == 2:
        if x.dtype.kind not in "biuf" or x.shape[1] == 0:
            raise DataError(f"{where} must be numbers with at least one column, got {x.dtype} {x.shape}")
        with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused below
            table = x.astype(np.float32)
        if not np.isfinite(table).all():
            raise DataError(
                f"{where} must be finite, got nan or infinity in row {int(np.argwhere(~np.isfinite(table))[0, 0])}"
            )
        return torch.from_numpy(table)
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or 0 in x.shape[1:]:
        raise DataError(
            f"{where} must be a table (N, D) or uint8 images (N, H, W), (N, H, W, C) or (N, C, H, W), "
            f"got {x.dtype} {x.shape}"
        )
    if x.ndim == 3:
        x = x[:, None]
    elif x.shape[3] in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    elif x.shape[1] not in (1, 3):
        raise DataError(f"{where} images must have 1 or 3 channels, got the shape {x.shape}")
    return torch.from_numpy(np.ascontiguousarray(x))


def _targets(
    ys: dict[str, np.ndarray], names: np.ndarray | None, where: str
) -> tuple[dict[str, Tensor], tuple[str, ...], bool]:
    """Labels as tensors, class names, and whether there are several labels a row."""
    given = None if names is None else tuple(_text(n) for n in np.atleast_1d(names).tolist())
    first = ys["train"]
    if names is not None and (names.ndim > 1 or names.dtype.kind not in "biuUS"):
        raise DataError(f"{where} names must be (C,) strings, got {names.dtype} {names.shape}")
    if first.ndim == 2 and first.shape[1] == 0:
        raise DataError(f"{where} y_train must have at least 1 label, got the shape {first.shape}")
    if first.ndim == 2:
        for part, y in ys.items():
            if y.ndim != 2 or y.shape[1] != first.shape[1] or not np.isin(y, (0, 1)).all():
                raise DataError(f"{where} y_{part} must be (N, {first.shape[1]}) of 0 and 1, got {y.dtype} {y.shape}")
        classes = given or tuple(str(i) for i in range(first.shape[1]))
        if len(classes) != first.shape[1]:
            raise DataError(f"{where} names has {len(classes)} entries for {first.shape[1]} labels")
        return {p: torch.from_numpy(y.astype(np.uint8)) for p, y in ys.items()}, classes, True
    for part, y in ys.items():
        if y.ndim != 1 or y.dtype.kind not in "biuUS":
            raise DataError(
                f"{where} y_{part} must be (N,) integers or strings, or (N, L) of 0 and 1, got {y.dtype} {y.shape}"
            )
    values = np.unique(first)
    if given is not None and first.dtype.kind in "biu":
        values = np.arange(len(given))
    if len(values) < 2:
        raise DataError(f"{where} y_train must have at least 2 classes, got {len(values)}")
    out = {}
    for part, y in ys.items():
        if y.dtype.kind != first.dtype.kind and not {y.dtype.kind, first.dtype.kind} <= set("biu"):
            raise DataError(f"{where} y_{part} must be of the same kind as y_train, got {y.dtype} and {first.dtype}")
        at = np.searchsorted(values, y).clip(0, len(values) - 1)
        if not (values[at] == y).all():
            stranger = y[values[at] != y][0]
            raise DataError(
                f"{where} y_{part} has the class {stranger!s}, which is none of the {len(values)} known ones"
            )
        out[part] = torch.from_numpy(at.astype(np.int64))
    labels = given if given is not None and first.dtype.kind in "biu" else tuple(_text(v) for v in values.tolist())
    return out, labels, False


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


# ARFF


@dataclass(frozen=True)
class Attribute:
    """A column: values is None for numbers, else the names of a nominal column."""

    name: str
    values: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Arff:
    """A table as read: data is float64 (rows, attributes), a nominal entry is its position among the values."""

    relation: str
    attributes: tuple[Attribute, ...]
    data: np.ndarray


_MAX_LINE = 2**26
_MAX_ATTRIBUTES = 2**20
_TOKEN = re.compile(r"""\s*(?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"|([^,{}'"][^,{}]*|))\s*""", re.S)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), text, flags=re.S) if "\\" in text else text


def _values(text: str) -> list[str]:
    """Comma-separated values, each bare or in quotes."""
    if "'" not in text and '"' not in text:
        return [v.strip() for v in text.split(",")]
    out, at = [], 0
    while True:
        found = _TOKEN.match(text, at)
        if found is None:
            raise ValueError(f"unbalanced quotes in {text[at : at + 40]!r}")
        single, double, bare = found.groups()
        out.append(bare.strip() if bare is not None else _unescape(single if single is not None else double))
        at = found.end()
        if at == len(text):
            return out
        if text[at] != ",":
            wrong = "unbalanced quotes in" if text[at] in "'\"" else "expected a comma before"
            raise ValueError(f"{wrong} {text[at : at + 40]!r}")
        at += 1


def _name_and_rest(text: str) -> tuple[str, str]:
    """The first word, bare or in quotes, and what follows it."""
    text = text.strip()
    if not text:
        raise ValueError("an attribute without a name")
    if text[:1] in ("'", '"'):
        found = _TOKEN.match(text)
        if found is None or found[3] is not None:
            raise ValueError(f"unbalanced quotes in {text[:40]!r}")
        return _unescape(found[1] if found[1] is not None else found[2]), text[found.end() :].strip()
    word, *rest = text.split(None, 1)
    if "{" in word:  # a bare name directly followed by its values
        word, brace, tail = word.partition("{")
        rest = [brace + tail + (" " + rest[0] if rest else "")]
    return word, rest[0] if rest else ""


def _attribute(text: str) -> Attribute:
    name, kind = _name_and_rest(text)
    if kind.startswith("{"):
        if not kind.endswith("}"):
            raise ValueError(f"the values of {name!r} have no closing brace")
        values = tuple(_values(kind[1:-1]))
        if len(set(values)) != len(values):
            raise ValueError(f"the values of {name!r} repeat")
        return Attribute(name, values)
    if kind.split("[")[0].strip().lower() in ("numeric", "real", "integer"):
        return Attribute(name)
    raise ValueError(f"attribute {name!r} has the type {kind[:40]!r}, only numeric and nominal {{...}} are read")


def read_arff(path: str | os.PathLike[str]) -> Arff:
    """Read an ARFF file line by line: dense and sparse rows, numeric and nominal attributes, quoted names, comments."""
    try:
        with open(path, encoding="utf-8-sig", errors="replace") as stream:
            return _parse_arff(stream, str(path))
    except OSError as error:
        raise DataError(f"arff:{path} cannot be read: {error.strerror or error}\n  layout: {ARFF.layout}") from None


def _parse_arff(stream: TextIO, path: str) -> Arff:
    relation = ""
    attributes: list[Attribute] = []
    lines = _Lines(stream)
    try:
        for line in lines:
            keyword, *rest = line.split(None, 1)
            keyword = keyword.lower()
            if keyword == "@relation":
                relation = _name_and_rest(rest[0])[0] if rest else ""
            elif keyword == "@attribute":
                attributes.append(_attribute(rest[0] if rest else ""))
                if len(attributes) > _MAX_ATTRIBUTES:
                    raise ValueError(f"more than {_MAX_ATTRIBUTES:,} attributes")
            elif keyword == "@data":
                break
            else:
                raise ValueError(f"expected @relation, @attribute or @data, got {line[:40]!r}")
        else:
            raise ValueError("there is no @data line")
        if not attributes:
            raise ValueError("there are no attributes")
        if len({a.name for a in attributes}) != len(attributes):
            raise ValueError("attribute names repeat")
        readers = [
            _finite if a.values is None else {v: float(i) for i, v in enumerate(a.values)}.__getitem__
            for a in attributes
        ]
        rows: list[np.ndarray] = []
        for line in lines:
            within_limit((len(rows) + 1) * len(attributes) * 8, path)
            rows.append(_row(line, readers, attributes))
    except DataError:
        raise
    except (ValueError, IndexError) as error:
        raise DataError(f"{path} line {lines.number}: {error}") from None
    return Arff(relation, tuple(attributes), np.stack(rows) if rows else np.zeros((0, len(attributes))))


class _Lines:
    """Lines without blanks and comments; `number` is that of the line last read."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.number = stream, 0

    def __iter__(self) -> Iterator[str]:
        while line := self.stream.readline(_MAX_LINE):
            self.number += 1
            if len(line) >= _MAX_LINE:
                raise ValueError(f"more than {_MAX_LINE:,} characters")
            line = line.strip()
            if line and not line.startswith("%"):
                yield line


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or "_" in text:  # Python reads 1_000, the format does not
        raise ValueError(text)
    return value


def _row(line: str, readers: list[Any], attributes: list[Attribute]) -> np.ndarray:
    row = np.zeros(len(readers))
    if line.startswith("{"):
        if not line.endswith("}"):
            raise ValueError("a sparse row has no closing brace")
        seen = set()
        for pair in _pairs(line[1:-1]):
            index, value = pair
            if not 0 <= index < len(readers) or index in seen:
                raise ValueError(f"index {index} is repeated or not below {len(readers)}")
            seen.add(index)
            row[index] = _read_value(readers, attributes, index, value)
        return row
    values = _values(line) if "," in line or "'" in line or '"' in line else line.split()
    if len(values) != len(readers):
        raise ValueError(f"expected {len(readers)} values, got {len(values)}")
    try:
        row[:] = [read(v) for read, v in zip(readers, values, strict=True)]
    except (KeyError, ValueError):
        for index, value in enumerate(values):  # once more, to say where
            _read_value(readers, attributes, index, value)
        raise
    return row


def _pairs(text: str) -> list[tuple[int, str]]:
    """(index, value) of a sparse row `1 0.5, 7 'a b'`."""
    out: list[tuple[int, str]] = []
    at, end = 0, len(text.rstrip())
    while at < end:
        head = re.compile(r"\s*(\d{1,9})\s+").match(text, at)
        found = _TOKEN.match(text, head.end()) if head else None
        if head is None or found is None or (found.end() < end and text[found.end()] != ","):
            raise ValueError(f"expected `index value` pairs, got {text[at : at + 40]!r}")
        single, double, bare = found.groups()
        out.append(
            (int(head[1]), bare.strip() if bare is not None else _unescape(single if single is not None else double))
        )
        at = found.end() + 1
    return out


def _read_value(readers: list[Any], attributes: list[Attribute], index: int, value: str) -> float:
    attribute = attributes[index]
    try:
        return float(readers[index](value))
    except (KeyError, ValueError):
        if value == "?":
            raise ValueError(f"attribute {attribute.name!r} has a missing value, which is not supported") from None
        wanted = "a finite number" if attribute.values is None else f"one of {{{','.join(attribute.values[:6])}}}"
        raise ValueError(f"attribute {attribute.name!r} must be {wanted}, got {value[:40]!r}") from None


def label_columns(table: Arff, path: Path, labels: int | None) -> list[int]:
    """Positions of the label columns: the last `labels`, else by MULAN's XML or MEKA's -C, else the last {0,1} ones."""
    count = len(table.attributes)
    if labels is not None:
        if not 1 <= labels < count:
            raise DataError(f"arff:{path}?labels must be from 1 to {count - 1}, got {labels}")
        return list(range(count - labels, count))
    stem = re.sub(r"[-_.]?(train|test)$", "", path.stem, flags=re.I)
    for xml in dict.fromkeys([path.with_suffix(".xml"), path.with_name(stem + ".xml")]):
        if xml.is_file():
            position = {a.name: i for i, a in enumerate(table.attributes)}
            names = _xml_labels(xml)
            unknown = [n for n in names if n not in position]
            if unknown or not names:
                raise DataError(
                    f"{xml} names the label {(unknown or ['(none)'])[0]!r}, which {path.name} does not have"
                )
            return sorted(position[n] for n in names)
    meka = re.search(r"-C\s+(-?\d{1,7})", table.relation)
    if meka and 1 <= abs(int(meka[1])) < count:
        k = int(meka[1])
        return list(range(k)) if k > 0 else list(range(count + k, count))
    first = count
    while first > 0 and set(table.attributes[first - 1].values or ()) == {"0", "1"}:
        first -= 1
    if first in (0, count):
        raise DataError(
            f"arff:{path} does not say which columns are labels: add ?labels=6 (the last six)\n  layout: {ARFF.layout}"
        )
    return list(range(first, count))


def _xml_labels(path: Path) -> list[str]:
    """Label names of a MULAN XML file, nested ones included."""
    from xml.etree import ElementTree

    raw = read_bytes(path, 2**24)
    if b"<!DOCTYPE" in raw or b"<!ENTITY" in raw or b"\0" in raw:  # entities could expand without bound, also in UTF-16
        raise DataError(f"{path} has a document type, which is refused")
    try:
        root = ElementTree.fromstring(raw)
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise DataError(f"{path} is damaged: {error}") from None
    return [e.attrib["name"] for e in root.iter() if e.tag.rpartition("}")[2] == "label" and "name" in e.attrib]


def _columns(table: Arff, labels: list[int], path: Path) -> tuple[Tensor, Tensor]:
    """float32 (N, D) features and uint8 (N, L) labels; a nominal feature is 0/1, or one column per value beyond two."""
    is_label = set(labels)
    parts = []
    width = sum(
        len(a.values) if a.values is not None and len(a.values) > 2 else 1
        for i, a in enumerate(table.attributes)
        if i not in is_label
    )
    within_limit(len(table.data) * width * 4, str(path))
    for i, attribute in enumerate(table.attributes):
        if i not in is_label:
            column = table.data[:, i]
            if attribute.values is not None and len(attribute.values) > 2:
                parts.append((column[:, None] == np.arange(len(attribute.values))).astype(np.float32))
            else:
                parts.append(column[:, None].astype(np.float32))
    if not parts:
        raise DataError(f"arff:{path} has label columns only")
    y = np.zeros((len(table.data), len(labels)), dtype=np.uint8)
    for k, i in enumerate(labels):
        attribute, column = table.attributes[i], table.data[:, i]
        if attribute.values is None:
            if not np.isin(column, (0, 1)).all():
                raise DataError(f"arff:{path} label {attribute.name!r} must be 0 or 1 in every row")
            y[:, k] = column
        elif set(attribute.values) <= {"0", "1"}:
            y[:, k] = column == (attribute.values.index("1") if "1" in attribute.values else -1)
        else:
            seen = ",".join(attribute.values[:6])
            raise DataError(f"arff:{path} label {attribute.name!r} must have the values {{0,1}}, got {{{seen}}}")
    x = np.concatenate(parts, axis=1)
    if not np.isfinite(x).all():
        raise DataError(f"arff:{path} has numbers too large for float32")
    return torch.from_numpy(x), torch.from_numpy(y)


def _arff_files(path: str, alone: bool) -> tuple[Path, Path | None]:
    """The training file and, unless one file is to be split, the test file."""
    if alone:
        return Path(path), None
    whole = Path(path)
    if "," in path and not whole.exists():
        first, _, second = path.partition(",")
        return Path(first.strip()), Path(second.strip())
    train = whole
    if not train.is_file():
        for end in ("-train.arff", "_train.arff"):
            candidate = whole.with_name(whole.name.removesuffix(".arff") + end)
            if candidate.is_file():
                train = candidate
                break
        else:
            raise DataError(f"arff:{path} not found\n  layout: {ARFF.layout}")
    test = train.with_name(re.sub(r"train(\.arff)?$", r"test\1", train.name))
    if test == train or not test.is_file():
        what = "has no test file beside it: give two, or set rows aside with ?test=0.3"
        raise DataError(f"arff:{path} {what}\n  layout: {ARFF.layout}")
    return train, test


def load_arff(path: str, *, labels: int | None = None, test: float | None = None, split_seed: int = 0) -> Dataset:
    """A multi-label table from one or two ARFF files."""
    if test is not None and not 0 < test < 1:
        raise DataError(f"arff:{path}?test must lie between 0 and 1, got {test}")
    train_file, test_file = _arff_files(path, alone=test is not None)
    table = read_arff(train_file)
    columns = label_columns(table, train_file, labels)
    train = Split(*_columns(table, columns, train_file))
    if test_file is None:
        assert test is not None
        aside, rest = take(train.y, test, split_seed)
        held, train = train.select(aside), train.select(rest)
    else:
        second = read_arff(test_file)
        if second.attributes != table.attributes:
            raise DataError(f"{test_file} must have the very attributes of {train_file.name}, and some differ")
        held = Split(*_columns(second, columns, test_file))
    for what, split in ((train_file, train), (test_file or train_file, held)):
        if not len(split):
            raise DataError(f"{what} has no rows for the {'train' if split is train else 'test'} split")
    stem = re.sub(r"[-_]train$", "", train_file.stem)
    return Dataset(
        name=f"arff:{stem}" + " (smoke)" * is_smoke(train_file.parent),
        kind="table",
        classes=tuple(table.attributes[i].name for i in columns),
        multilabel=True,
        train=train,
        test=held,
        source=ARFF.source,
    )
