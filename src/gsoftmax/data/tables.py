"""`npz:PATH` (arrays) and `arff:PATH` (multi-label tables as MULAN, MEKA and Weka write them)."""

from __future__ import annotations

import io
import math
import os
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO
from xml.etree import ElementTree

import numpy as np
import torch
from torch import Tensor

from ..catalog import ARFF, NPZ
from ..files import open_read
from ..messages import first_line
from .core import (
    MAX_BYTES,
    PARTS,
    DataError,
    Dataset,
    Request,
    Split,
    Splits,
    is_smoke,
    read_bytes,
    reading,
    set_aside,
    within_limit,
)

# npz


def load_npz(request: Request) -> Dataset:
    """Arrays x_train, y_train, x_test, y_test of an .npz file, read without pickle."""
    path, spec = Path(request.path), f"npz:{request.path}"
    arrays = read_npz(path)
    alone = "test" in request.options
    for key in ("x_train", "y_train") if alone else ("x_train", "y_train", "x_test", "y_test"):
        if key not in arrays:
            found = ", ".join(sorted(arrays)) or "nothing"
            raise DataError(f"{spec} has no array {key}, only {found}\n  layout: {NPZ.layout}")
    parts = [p for p in PARTS if f"x_{p}" in arrays and f"y_{p}" in arrays]
    xs = {p: _inputs(arrays[f"x_{p}"], f"{spec} x_{p}") for p in parts}
    like = xs["train"]
    for p, x in xs.items():
        if x.shape[1:] != like.shape[1:] or x.dtype != like.dtype:
            raise DataError(f"{spec} x_{p} must have rows shaped {tuple(like.shape[1:])}, got {tuple(x.shape[1:])}")
    targets = _labels if arrays["y_train"].ndim == 2 else _classes
    ys, classes = targets({p: arrays[f"y_{p}"] for p in parts}, _names(arrays.get("names"), spec), spec)
    splits: Splits = {p: Split(xs[p], ys[p]) for p in parts}
    if "test" not in splits:
        splits |= set_aside(splits["train"], request)
    name = f"npz:{path.name}" + " (smoke)" * is_smoke(path.parent)
    return Dataset(name, "images" if like.dtype == torch.uint8 else "table", classes, targets is _labels, **splits)


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an .npz file, without pickles; declared sizes are checked before memory is allocated."""
    arrays, total = {}, 0
    if not path.exists():
        raise DataError(f"npz:{path} not found\n  layout: {NPZ.layout}")
    try:
        with reading(path), open_read(path) as file, zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                name = member.filename.removesuffix(".npy")
                if name == member.filename:
                    raise DataError(f"{path} holds {name[:60]!r}, which is not an array")
                with archive.open(member) as stream:
                    first = np.lib.format.read_magic(stream) == (1, 0)
                    read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
                    shape, _, dtype = read(stream)
                if dtype.hasobject:
                    raise DataError(f"{path} array {name} contains Python objects: save numbers or strings instead")
                size = math.prod(shape) * dtype.itemsize
                # deflate compresses at most 1032:1
                if size > member.file_size or size > 1100 * member.compress_size + 1024:
                    raise DataError(f"{path} array {name} declares {size:,} bytes but holds fewer")
                # a table becomes float32
                total += max(size, 4 * math.prod(shape)) if len(shape) == 2 else size
                within_limit(total, str(path), os.fstat(file.fileno()).st_size)
                with archive.open(member) as stream:
                    arrays[name] = np.lib.format.read_array(stream, allow_pickle=False)
    except DataError:
        raise
    except Exception as error:  # damaged archives and headers end in almost any exception
        raise DataError(f"{path} is damaged or not an .npz file: {first_line(error)}") from None
    return arrays


def _inputs(x: np.ndarray, where: str) -> Tensor:
    """float32 (N, D) or uint8 (N, C, H, W)."""
    if x.ndim == 2:
        if x.dtype.kind not in "biuf" or x.shape[1] == 0:
            raise DataError(f"{where} must be numbers with at least one column, got {x.dtype} {x.shape}")
        with np.errstate(over="ignore"):  # overflow becomes inf and is rejected below
            table = x.astype(np.float32)
        if not np.isfinite(table).all():
            row = int(np.argwhere(~np.isfinite(table))[0, 0])
            raise DataError(f"{where} must be finite, got nan or infinity in row {row}")
        return torch.from_numpy(table)
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or 0 in x.shape[1:]:
        layouts = "a table (N, D) or uint8 images (N, H, W), (N, H, W, C) or (N, C, H, W)"
        raise DataError(f"{where} must be {layouts}, got {x.dtype} {x.shape}")
    if x.ndim == 3:
        x = x[:, None]
    elif x.shape[3] in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    elif x.shape[1] not in (1, 3):
        raise DataError(f"{where} images must have 1 or 3 channels, got the shape {x.shape}")
    return torch.from_numpy(np.ascontiguousarray(x))


def _names(names: np.ndarray | None, where: str) -> tuple[str, ...]:
    """The class names that the file gives; empty if it gives none."""
    if names is None:
        return ()
    if names.ndim > 1 or names.size == 0 or names.dtype.kind not in "biuUS":
        raise DataError(f"{where} names must be (C,) strings, got {names.dtype} {names.shape}")
    return tuple(map(_text, np.atleast_1d(names).tolist()))


def _labels(ys: dict[str, np.ndarray], names: tuple[str, ...], where: str) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """uint8 (N, L) of 0 and 1, and the names of the labels."""
    count = ys["train"].shape[1]
    if count == 0:
        raise DataError(f"{where} y_train must have at least 1 label, got the shape {ys['train'].shape}")
    for part, y in ys.items():
        if y.ndim != 2 or y.shape[1] != count or not np.isin(y, (0, 1)).all():
            raise DataError(f"{where} y_{part} must be (N, {count}) of 0 and 1, got {y.dtype} {y.shape}")
    if names and len(names) != count:
        raise DataError(f"{where} names has {len(names)} entries for {count} labels")
    return {p: torch.from_numpy(y.astype(np.uint8)) for p, y in ys.items()}, names or tuple(map(str, range(count)))


def _classes(
    ys: dict[str, np.ndarray], names: tuple[str, ...], where: str
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """int64 (N,) class indices, and the names of the classes."""
    kinds = {part: "integers" if y.dtype.kind in "biu" else y.dtype.kind for part, y in ys.items()}
    for part, y in ys.items():
        if y.ndim != 1 or y.dtype.kind not in "biuUS":
            accepted = "(N,) integers or strings, or (N, L) of 0 and 1"
            raise DataError(f"{where} y_{part} must be {accepted}, got {y.dtype} {y.shape}")
        if kinds[part] != kinds["train"]:
            types = f"{y.dtype} and {ys['train'].dtype}"
            raise DataError(f"{where} y_{part} must be of the same kind as y_train, got {types}")
    numbered = bool(names) and kinds["train"] == "integers"
    values = np.arange(len(names)) if numbered else np.unique(ys["train"])
    if len(values) < 2:
        raise DataError(f"{where} y_train must have at least 2 classes, got {len(values)}")
    out = {}
    for part, y in ys.items():
        at = np.searchsorted(values, y).clip(0, len(values) - 1)
        if not (values[at] == y).all():
            known = f"which is not among the {len(values)} known ones"
            raise DataError(f"{where} y_{part} has the class {y[values[at] != y][0]!s}, {known}")
        out[part] = torch.from_numpy(at.astype(np.int64))
    return out, names if numbered else tuple(map(_text, values.tolist()))


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


# ARFF


@dataclass(frozen=True)
class Attribute:
    """A column: values is None for numbers, else the names of a nominal column."""

    name: str
    values: tuple[str, ...] | None = None

    @cached_property
    def positions(self) -> dict[str, float]:
        return {value: float(i) for i, value in enumerate(self.values or ())}

    def read(self, text: str) -> float:
        """The number, or the position among the values."""
        try:
            if self.values is not None:
                return self.positions[text]
            if math.isfinite(value := float(text)) and "_" not in text:  # Python reads 1_000, the format does not
                return value
        except (KeyError, ValueError):
            pass
        if text == "?":
            raise ValueError(f"attribute {self.name!r} has a missing value, which is not supported") from None
        wanted = "a finite number" if self.values is None else f"one of {{{','.join(self.values[:6])}}}"
        raise ValueError(f"attribute {self.name!r} must be {wanted}, got {text[:40]!r}") from None


@dataclass(frozen=True)
class Arff:
    """A table: data is float64 (rows, attributes), a nominal entry is its position among the values."""

    relation: str
    attributes: tuple[Attribute, ...]
    data: np.ndarray


_MAX_LINE = 2**26
_MAX_ATTRIBUTES = 2**20
_TOKEN = re.compile(r"""\s*(?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"|([^,{}'"][^,{}]*|))\s*""", re.S)
_INDEX = re.compile(r"\s*(\d{1,9})\s+")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


def _token(text: str, at: int) -> tuple[str, int]:
    """The value that begins at a position, bare or in quotes, and the position behind it."""
    found = _TOKEN.match(text, at)
    if found is None or text[found.end() : found.end() + 1] in ("'", '"'):
        raise ValueError(f"unbalanced quotes in {text[at : at + 40]!r}")
    single, double, bare = found.groups()
    if bare is not None:
        return bare.strip(), found.end()
    quoted = single if single is not None else double
    return re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), quoted, flags=re.S), found.end()


def _values(text: str) -> list[str]:
    """Comma-separated values, each bare or in quotes."""
    if "'" not in text and '"' not in text:
        return [v.strip() for v in text.split(",")]
    out, at = [], -1
    while at < len(text):
        if at >= 0 and text[at] != ",":
            raise ValueError(f"expected a comma before {text[at : at + 40]!r}")
        value, at = _token(text, at + 1)
        out.append(value)
    return out


def _name_and_rest(text: str) -> tuple[str, str]:
    """The first word, bare or in quotes, and what follows it."""
    text = text.strip()
    if not text:
        raise ValueError("an attribute without a name")
    if text[0] in "'\"":
        name, end = _token(text, 0)
    else:  # a brace may follow the name directly
        end = next((i for i, c in enumerate(text) if c.isspace() or c == "{"), len(text))
        name = text[:end]
    return name, text[end:].strip()


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
        with io.TextIOWrapper(open_read(path), encoding="utf-8-sig", errors="replace") as stream:
            return parse_arff(stream, str(path), os.path.getsize(path))
    except OSError as error:
        raise DataError(f"arff:{path} cannot be read: {error.strerror or error}\n  layout: {ARFF.layout}") from None


def parse_arff(stream: TextIO, path: str, held: int = MAX_BYTES) -> Arff:
    """The table in a stream; `path` is for error messages, `held` the size of the file."""
    relation, number = "", 0
    attributes: list[Attribute] = []

    def lines() -> Iterator[str]:
        """Lines other than blanks and comments."""
        nonlocal number
        while line := stream.readline(_MAX_LINE):
            number += 1
            if len(line) >= _MAX_LINE:
                raise ValueError(f"more than {_MAX_LINE:,} characters")
            line = line.strip()
            if line and not line.startswith("%"):
                yield line

    try:
        for line in lines():
            keyword, rest = (*line.split(None, 1), "")[:2]
            if keyword.lower() == "@relation":
                relation = _name_and_rest(rest)[0] if rest else ""
            elif keyword.lower() == "@attribute":
                attributes.append(_attribute(rest))
                if len(attributes) > _MAX_ATTRIBUTES:
                    raise ValueError(f"more than {_MAX_ATTRIBUTES:,} attributes")
            elif keyword.lower() == "@data":
                break
            else:
                raise ValueError(f"expected @relation, @attribute or @data, got {line[:40]!r}")
        else:
            raise ValueError("there is no @data line")
        if not attributes:
            raise ValueError("there are no attributes")
        if len({a.name for a in attributes}) != len(attributes):
            raise ValueError("attribute names repeat")
        rows: list[np.ndarray] = []
        for line in lines():
            within_limit((len(rows) + 1) * len(attributes) * 8, path, held)
            rows.append(_row(line, attributes))
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{path} line {number}: {error}") from None
    return Arff(relation, tuple(attributes), np.stack(rows) if rows else np.zeros((0, len(attributes))))


def _row(line: str, attributes: list[Attribute]) -> np.ndarray:
    if not line.startswith("{"):
        values = _values(line) if "," in line or "'" in line or '"' in line else line.split()
        if len(values) != len(attributes):
            raise ValueError(f"expected {len(attributes)} values, got {len(values)}")
        return np.array([a.read(v) for a, v in zip(attributes, values, strict=True)])
    if not line.endswith("}"):
        raise ValueError("a sparse row has no closing brace")
    row, seen, at = np.zeros(len(attributes)), set(), 0
    text = line[1:-1].rstrip()
    while at < len(text):  # `1 0.5, 7 'a b'`
        head = _INDEX.match(text, at)
        value, end = _token(text, head.end()) if head else ("", at)
        if head is None or text[end : end + 1] not in ("", ","):
            raise ValueError(f"expected `index value` pairs, got {text[at : at + 40]!r}")
        index = int(head[1])
        if index >= len(attributes) or index in seen:
            raise ValueError(f"index {index} is repeated or not below {len(attributes)}")
        seen.add(index)
        row[index] = attributes[index].read(value)
        at = end + 1
    return row


def label_columns(table: Arff, path: Path, labels: int | None) -> list[int]:
    """Positions of the label columns: the last `labels`, else by MULAN's XML or MEKA's -C, else the last {0,1} ones."""
    count = len(table.attributes)
    if labels is not None:
        if not 1 <= labels < count:
            raise DataError(f"arff:{path}?labels must be from 1 to {count - 1}, got {labels}")
        return list(range(count - labels, count))
    # x.xml beside x-train.arff, x-train-sparse.arff
    stem = re.sub(r"[-_.]?(train|test)([-_.]sparse)?$", "", path.stem, flags=re.I)
    for xml in (path.with_suffix(".xml"), path.with_name(stem + ".xml")):
        if xml.is_file():
            position = {a.name: i for i, a in enumerate(table.attributes)}
            names = xml_labels(xml)
            unknown = [n for n in names if n not in position] if names else ["(none)"]
            if unknown:
                raise DataError(f"{xml} names the label {unknown[0]!r}, which {path.name} does not have")
            return sorted(position[n] for n in names)
    meka = re.search(r"-C\s+(-?\d{1,7})", table.relation)
    if meka and 1 <= abs(int(meka[1])) < count:
        k = int(meka[1])
        return list(range(k)) if k > 0 else list(range(count + k, count))
    first = count
    while first > 0 and set(table.attributes[first - 1].values or ()) == {"0", "1"}:
        first -= 1
    if first in (0, count):
        hint = "add ?labels=6 (the last six)"
        raise DataError(f"arff:{path} does not say which columns are labels: {hint}\n  layout: {ARFF.layout}")
    return list(range(first, count))


def xml_labels(path: Path) -> list[str]:
    """Label names of a MULAN XML file, nested ones included."""
    raw = read_bytes(path, 2**24)
    if b"<!DOCTYPE" in raw or b"<!ENTITY" in raw or b"\0" in raw:  # entities could expand without bound, also in UTF-16
        raise DataError(f"{path} has a document type, which is not allowed")
    with reading(path, ElementTree.ParseError, ValueError, LookupError):
        root = ElementTree.fromstring(raw)
    return [e.attrib["name"] for e in root.iter() if e.tag.rpartition("}")[2] == "label" and "name" in e.attrib]


def columns(table: Arff, labels: list[int], path: Path) -> Split:
    """float32 (N, D) features and uint8 (N, L) labels; a nominal feature is 0/1, or one column per value beyond two."""
    features = [(a, table.data[:, i]) for i, a in enumerate(table.attributes) if i not in set(labels)]
    widths = [len(a.values) if a.values is not None and len(a.values) > 2 else 1 for a, _ in features]
    within_limit(len(table.data) * sum(widths) * 4, str(path), path.stat().st_size)
    if not features:
        raise DataError(f"arff:{path} has label columns only")
    parts = [v[:, None] if n == 1 else v[:, None] == np.arange(n) for (_, v), n in zip(features, widths, strict=True)]
    x = np.concatenate([part.astype(np.float32) for part in parts], axis=1)
    if not np.isfinite(x).all():
        raise DataError(f"arff:{path} has numbers too large for float32")
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
    return Split(torch.from_numpy(x), torch.from_numpy(y))


def _pair(path: str) -> tuple[Path, Path]:
    """The training file and the test file."""
    whole = Path(path)
    if "," in path and not whole.exists():
        first, _, second = path.partition(",")
        return Path(first.strip()), Path(second.strip())
    stem = whole.name.removesuffix(".arff")
    candidates = [whole, whole.with_name(f"{stem}-train.arff"), whole.with_name(f"{stem}_train.arff")]
    train = next((file for file in candidates if file.is_file()), None)
    if train is None:
        raise DataError(f"arff:{path} not found\n  layout: {ARFF.layout}")
    # the last `train` of the name: emotions-train.arff, Corel5k-train-sparse.arff
    test = train.with_name(re.sub(r"(.*)train(?![a-z])", r"\1test", train.name))
    if test == train or not test.is_file():
        what = "has no test file beside it: give two, or set rows aside with ?test=0.3"
        raise DataError(f"arff:{path} {what}\n  layout: {ARFF.layout}")
    return train, test


def load_arff(request: Request) -> Dataset:
    """A multi-label table from one or two ARFF files."""
    alone = "test" in request.options
    train_file, test_file = (Path(request.path),) * 2 if alone else _pair(request.path)
    table = read_arff(train_file)
    chosen = label_columns(table, train_file, request.options.get("labels"))
    splits: Splits = {"train": columns(table, chosen, train_file)}
    if alone:
        splits = set_aside(splits["train"], request)
    else:
        second = read_arff(test_file)
        if second.attributes != table.attributes:
            raise DataError(f"{test_file} must have the same attributes as {train_file.name}")
        splits["test"] = columns(second, chosen, test_file)
    name = f"arff:{re.sub('[-_]train(?![a-z])', '', train_file.stem)}" + " (smoke)" * is_smoke(train_file.parent)
    return Dataset(name, "table", tuple(table.attributes[i].name for i in chosen), True, **splits)
