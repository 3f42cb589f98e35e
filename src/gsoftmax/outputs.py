"""Files of outputs, from any framework: .npz, .safetensors, .csv, or a run folder of this package.

    x      (N, C) raw outputs; multi-label also (N, 2, L), absence first            aliases: logits
    y      (N,) class indices, or (N, C) of 0 and 1 for several labels               aliases: labels, targets, target
    p      (N, C) probabilities, if you have them (else softmax or sigmoid of x)     aliases: probabilities
    names  (C,) the classes' names
    mu, sigma, lam    (C,), (C,) and a number: the Gaussians of a G-softmax head

A CSV has a header: the column `y` (an index or a class's name), every other column an output that is named after its
class; for several labels a column `y:NAME` for every output; `p:NAME` for probabilities.  In a .safetensors file the
names are a JSON list in the metadata.

Files are read in blocks of rows, so they may be larger than memory, and nothing is ever unpickled.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Block", "Outputs", "open_outputs"]

ALIASES = {
    "x": ("x", "logits"),
    "y": ("y", "labels", "targets", "target"),
    "p": ("p", "probabilities"),
}
SUFFIXES = (".npz", ".safetensors", ".csv")
IGNORE = -100


@dataclass
class Block:
    """Some rows of a file."""

    x: np.ndarray  # (rows, C), or (rows, 2, L)
    y: np.ndarray  # (rows,) int64, or (rows, L) uint8
    p: np.ndarray | None
    p_dtype: type = np.float64

    @property
    def positive(self) -> np.ndarray:
        """(rows, C): x, or x+ of two outputs a label."""
        return self.x[:, 1] if self.x.ndim == 3 else self.x

    def finite(self) -> np.ndarray:
        """Rows without nan and infinity, and without numbers whose squares would be infinite."""
        good = np.abs(self.x) < 1e150 if self.x.dtype == np.float64 else np.isfinite(self.x)
        ok: np.ndarray = good.reshape(len(self.x), -1).all(1)
        return ok if self.p is None else ok & np.isfinite(self.p).all(1)

    def take(self, rows: np.ndarray) -> Block:
        if rows.all():
            return self
        return Block(self.x[rows], self.y[rows], None if self.p is None else self.p[rows], self.p_dtype)

    def columns(self, which: slice) -> Block:
        """Some labels of a multi-label block."""
        return Block(self.x[..., which], self.y[:, which], None if self.p is None else self.p[:, which], self.p_dtype)

    def probabilities(self, file: Outputs) -> tuple[np.ndarray, np.ndarray]:
        """p in float64, and the log of what the truth was given: (rows,), or (rows, L) for several labels."""
        if self.p is not None:
            p = self.p.astype(np.float64)
            file.check_probabilities(p)
            with np.errstate(divide="ignore"):
                if file.multilabel:
                    p = p.clip(0, 1)
                    return p, np.log(np.where(self.y == 1, p, 1 - p))
                return p, np.log(p[np.arange(len(p)), self.y])
        if file.multilabel:
            z = self.positive.astype(np.float64)
            if self.x.ndim == 3:
                z = z - self.x[:, 0]
            e = np.exp(-np.abs(z))
            toward = np.where(self.y == 1, z, -z)
            return np.where(z >= 0, 1, e) / (1 + e), np.minimum(toward, 0) - np.log1p(e)
        z = file.adjusted(self.x.astype(np.float64))
        z -= z.max(1, keepdims=True)
        at_truth = z[np.arange(len(z)), self.y]
        np.exp(z, out=z)
        total = z.sum(1, keepdims=True)
        z /= total
        return z, at_truth - np.log(total[:, 0])


@dataclass
class Outputs:
    """A file of outputs, ready to be read block by block."""

    name: str
    n: int
    num_classes: int
    multilabel: bool
    classes: tuple[str, ...]
    names_given: bool
    mu: np.ndarray | None
    sigma: np.ndarray | None
    lam: float | None
    notes: list[str]
    _source: Any
    _has_p: bool
    _shift: int = 0  # taken from y: 1 where labels start at 1

    def blocks(self, rows: int) -> Iterator[Block]:
        """All rows, in order."""
        wanted = ["x", "y", *(["p"] if self._has_p else [])]
        for part in self._source.rows(wanted, rows):
            y = _labels(part["y"], self.classes, self.multilabel, self.num_classes)
            if self._shift:
                y = np.where(y == IGNORE, y, y - self._shift)
            p = part.get("p")
            if p is not None and p.dtype.kind not in "biuf":
                raise ValueError(f"p must hold numbers, got {p.dtype}")
            yield Block(_floats(part["x"]), y, p, np.float32 if p is None or p.dtype != np.float64 else np.float64)

    def adjusted(self, x: np.ndarray) -> np.ndarray:
        """z of a G-softmax head whose lam, mu and sigma came with the file, else x itself."""
        if self.lam is None or self.mu is None or self.sigma is None or not self.lam:
            return x
        import torch

        from .functional import gsoftmax_logits

        mu, sigma = torch.from_numpy(self.mu), torch.from_numpy(self.sigma)
        return gsoftmax_logits(torch.from_numpy(x), mu, sigma, self.lam).numpy()

    def check_probabilities(self, p: np.ndarray) -> None:
        if p.size and (p.min() < 0 or p.max() > 1 + 1e-6):
            raise ValueError(f"p must hold probabilities in [0, 1], got {p.min() if p.min() < 0 else p.max():g}")
        if not self.multilabel and p.size:
            sums = p.sum(1)
            worst = sums[np.abs(sums - 1).argmax()]
            if abs(worst - 1) > 0.02:  # loose enough for a bfloat16 softmax
                raise ValueError(f"p must sum to 1 over the classes, got {worst:g}")


def open_outputs(
    path: str | os.PathLike[str], *, names: Sequence[str] | None = None, name: str | None = None
) -> Outputs:
    """Looks at a file of outputs: shapes, labels, names.  x itself is read later, in blocks."""
    path = Path(path)
    run_names = None
    if path.is_dir():
        run_names, path = _run_names(path), path / "outputs.safetensors"
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"outputs must be a run folder or a file that ends in {', '.join(SUFFIXES)}, got {path.name}")
    readers: dict[str, Any] = {".npz": _Npz, ".safetensors": _Safetensors, ".csv": _Csv}
    source = readers[path.suffix.lower()](path)
    label = name or (path.parent.name if path.name == "outputs.safetensors" else path.stem)
    notes: list[str] = []
    for key in ("x", "y"):
        if key not in source.shapes:
            held = ", ".join(source.shapes) or "nothing"
            raise ValueError(f"{path.name} must hold x and y, got {held}")
    shape, y_shape = source.shapes["x"], source.shapes["y"]
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[1] != 2) or 0 in shape:
        raise ValueError(f"x must have the shape (N, C), or (N, 2, L) for several labels, got {shape}")
    n, classes = shape[0], shape[-1]
    if y_shape[:1] != (n,):
        raise ValueError(f"y must have as many rows as x, {n}, got the shape {y_shape}")
    if y_shape not in ((n,), (n, 1), (n, classes)):
        raise ValueError(f"y must have the shape ({n},) or ({n}, {classes}) beside x {shape}, got {y_shape}")
    multilabel = len(y_shape) == 2 and (y_shape[1] > 1 or len(shape) == 3)
    if len(shape) == 3 and not multilabel:
        raise ValueError(f"y must have the shape ({n}, {classes}) beside x {shape}, got {y_shape}")
    if "p" in source.shapes and source.shapes["p"] != (n, classes):
        raise ValueError(f"p must have the shape ({n}, {classes}), got {source.shapes['p']}")
    given = names if names is not None else source.names if source.names is not None else run_names
    if given is not None and len(given) != classes:
        raise ValueError(f"names must be {classes}, one for each class, got {len(given)}")
    found = Outputs(
        name=label,
        n=n,
        num_classes=classes,
        multilabel=multilabel,
        classes=tuple(map(str, given)) if given is not None else tuple(map(str, range(classes))),
        names_given=given is not None,
        mu=_gaussian(source, "mu", classes),
        sigma=_gaussian(source, "sigma", classes),
        lam=_lam(source),
        notes=notes,
        _source=source,
        _has_p="p" in source.shapes,
    )
    if (found.mu is None) != (found.sigma is None):
        raise ValueError(f"mu and sigma come together, got {'sigma' if found.mu is None else 'mu'} alone")
    _look_at_labels(found)
    if not found._has_p:
        if multilabel:
            notes.append("no p in the file: it is the logistic function of x")
        elif found.lam and found.mu is not None:
            notes.append(f"no p in the file: it is G-softmax of x, with the file's Gaussians and lam {found.lam:g}")
        elif found.mu is not None:
            notes.append("no p in the file: it is the softmax of x, without the Gaussians, since there is no lam")
    return found


def _look_at_labels(file: Outputs) -> None:
    """One pass over y: labels that start at 1 are shifted, labels that make no sense refused."""
    low, high, single = math.inf, -math.inf, True
    for part in file._source.rows(["y"], 2**20 if not file.multilabel else max(1, 2**22 // file.num_classes)):
        y = _labels(part["y"], file.classes, file.multilabel, file.num_classes)
        if file.multilabel:
            single = single and bool((y.sum(1) == 1).all())
            continue
        y = y[y != IGNORE]
        if len(y):
            low, high = min(low, int(y.min())), max(high, int(y.max()))
    if file.multilabel:
        if single and file.num_classes > 1:
            file.notes.append(
                "every row of y has exactly one label: if classes exclude each other, give y as (N,) class indices"
            )
        return
    c = file.num_classes
    if low == 1 and high == c:
        file._shift = 1
        file.notes.append(f"labels run from 1 to {c}: read as 0 to {c - 1}")
    elif high != -math.inf and (low < 0 or high >= c):
        raise ValueError(f"y must be in 0 to {c - 1} for {c} outputs (or {IGNORE}, left out), got {low} to {high}")


def _labels(y: np.ndarray, classes: Sequence[str], multilabel: bool, c: int) -> np.ndarray:
    """y as (rows,) int64 or (rows, L) uint8, checked."""
    if y.dtype.kind in "US":
        place = {name: i for i, name in enumerate(classes)}
        text = [v.decode("utf-8", "replace") if isinstance(v, bytes) else str(v) for v in y.reshape(-1).tolist()]
        unknown = next((v for v in text if v not in place), None)
        if unknown is not None:
            raise ValueError(f"y holds the text {unknown!r}, which is not among the names of the {c} classes")
        return np.array([place[v] for v in text], np.int64)
    if y.dtype.kind not in "biuf":
        raise ValueError(f"y must hold numbers or names, got {y.dtype}")
    if multilabel:
        wrong = ~((y == 0) | (y == 1))
        if wrong.any():
            raise ValueError(f"y must be 0 or 1 for several labels, got {y[wrong][0]}")
        return y.astype(np.uint8)
    y = y.reshape(-1)
    if y.dtype.kind == "f":
        fractional = ~np.isfinite(y) | (y != np.floor(y)) | (np.abs(y) > 2**53)
        if fractional.any():
            raise ValueError(f"y must hold whole numbers (class indices), got {y[fractional][0]}")
    return y.astype(np.int64)


def _floats(x: np.ndarray) -> np.ndarray:
    if x.dtype.kind not in "biuf":
        raise ValueError(f"x must hold numbers, got {x.dtype}")
    return x if x.dtype in (np.float32, np.float64) else x.astype(np.float32 if x.dtype == np.float16 else np.float64)


def _gaussian(source: Any, key: str, classes: int) -> np.ndarray | None:
    """mu or sigma of x (or x+): (C,), from (C,) or from (2, L), absence first."""
    if key not in source.shapes:
        return None
    shape = source.shapes[key]
    if shape not in ((classes,), (2, classes)):
        raise ValueError(f"{key} must have the shape ({classes},), or (2, {classes}), got {shape}")
    value = source.whole(key)
    if value.dtype.kind not in "biuf":
        raise ValueError(f"{key} must hold numbers, got {value.dtype}")
    value = value.astype(np.float64)
    value = value[1] if value.ndim == 2 else value
    if not np.isfinite(value).all() or (key == "sigma" and value.min() <= 0):
        raise ValueError(f"{key} must be finite{' and positive' if key == 'sigma' else ''}, got {value.min():g}")
    return value


def _lam(source: Any) -> float | None:
    if "lam" not in source.shapes:
        return None
    shape = source.shapes["lam"]
    if shape not in ((), (1,)):
        raise ValueError(f"lam must be one number, got the shape {shape}")
    value = source.whole("lam").reshape(-1)[0]
    if value.dtype.kind not in "biuf" or not 0 <= value < math.inf:
        raise ValueError(f"lam must be a number, 0 or more, got {value}")
    return float(value)


class _Npz:
    """Members of the archive read as streams, compressed or not: nothing is unpickled, nothing is held whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._archive() as archive:
            held = {Path(m).stem: m for m in archive.namelist() if m.endswith(".npy")}
            self.members = {key: held[a] for key, a in _found(held).items()}
            self.shapes = {key: self._shape(archive, key) for key in self.members}
        self.names = None
        if "names" in held:
            self.members["names"] = held["names"]
            values = self.whole("names")
            if values.dtype.kind not in "USiu":
                raise ValueError(f"names must be text, got {values.dtype}")
            self.names = [_text(v) for v in values.reshape(-1).tolist()]

    def _archive(self) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(self.path)
        except (zipfile.BadZipFile, OSError, NotImplementedError, ValueError) as error:
            raise ValueError(f"{self.path.name} is not an .npz archive: {_first_line(error)}") from None

    def _shape(self, archive: zipfile.ZipFile, key: str) -> tuple[int, ...]:
        stream, shape, _ = self._open(archive, key)
        stream.close()
        return shape

    def _open(self, archive: zipfile.ZipFile, key: str) -> tuple[Any, tuple[int, ...], np.dtype]:
        """The stream of a member behind its header, its shape and its type."""
        try:
            stream: Any = archive.open(self.members[key])
        except (zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
            raise ValueError(f"{key} in {self.path.name} cannot be read: {_first_line(error)}") from None
        try:
            return self._begin(stream, key)
        except ValueError:
            stream.close()
            raise

    def _begin(self, stream: Any, key: str) -> tuple[Any, tuple[int, ...], np.dtype]:
        try:
            version = np.lib.format.read_magic(stream)
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            if version not in read:
                raise ValueError(f"unknown version {version}")
            shape, fortran, dtype = read[version](stream)
        except Exception as error:  # damaged headers end in almost any exception, tokenize.TokenError among them
            raise ValueError(f"{key} in {self.path.name} cannot be read: {_first_line(error)}") from None
        if dtype.hasobject:
            raise ValueError(
                f"{key} in {self.path.name} holds pickled Python objects, which are not read: save numbers or text"
            )
        if fortran and len(shape) > 1:
            if math.prod(shape) * dtype.itemsize > 2**30:
                raise ValueError(f"{key} is stored column by column: save numpy.ascontiguousarray({key})")
            whole = np.frombuffer(self._read(stream, key, math.prod(shape) * dtype.itemsize), dtype)
            stream.close()
            stream = io.BytesIO(np.ascontiguousarray(whole.reshape(shape[::-1]).T).tobytes())
        return stream, tuple(shape), dtype

    def _read(self, stream: Any, key: str, size: int) -> bytes:
        try:
            data: bytes = stream.read(size)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise ValueError(f"{key} in {self.path.name} is damaged: {_first_line(error)}") from None
        if len(data) < size:
            raise ValueError(f"{key} in {self.path.name} is cut short")
        return data

    def rows(self, keys: Sequence[str], size: int) -> Iterator[dict[str, np.ndarray]]:
        with ExitStack() as stack:  # an archive stays open as long as one of its streams does
            archive = stack.enter_context(self._archive())
            opened = {}
            for key in keys:
                opened[key] = self._open(archive, key)
                stack.callback(opened[key][0].close)
            n = opened[keys[0]][1][0]
            for start in range(0, n, size):
                part = {}
                for key, (stream, shape, dtype) in opened.items():
                    block = (min(size, n - start), *shape[1:])
                    data = self._read(stream, key, math.prod(block) * dtype.itemsize)
                    part[key] = np.frombuffer(bytearray(data), dtype).reshape(block)  # torch wants it writable
                yield part

    def whole(self, key: str) -> np.ndarray:
        with self._archive() as archive:
            stream, shape, dtype = self._open(archive, key)
            with closing(stream):
                if math.prod(shape) * dtype.itemsize > 2**28:
                    raise ValueError(f"{key} in {self.path.name} is too large: {shape}")
                raw = self._read(stream, key, math.prod(shape) * dtype.itemsize)
            return np.frombuffer(raw, dtype).reshape(shape)


class _Safetensors:
    def __init__(self, path: Path) -> None:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise ValueError(
                "reading .safetensors needs safetensors, which is not installed: pip install 'gsoftmax[report]'"
            ) from None
        try:
            self.file = safe_open(path, "pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path.name} is not a .safetensors file: {_first_line(error)}") from None
        held = {key: key for key in self.file.keys()}  # noqa: SIM118 - not a dict
        self.keys = _found(held)
        self.shapes = {key: tuple(self.file.get_slice(a).get_shape()) for key, a in self.keys.items()}
        told = (self.file.metadata() or {}).get("names")
        try:
            self.names = None if told is None else [str(v) for v in json.loads(told)]
        except (ValueError, TypeError):
            raise ValueError(f"the metadata `names` of {path.name} must be a JSON list, got {told!r:.60}") from None

    def rows(self, keys: Sequence[str], size: int) -> Iterator[dict[str, np.ndarray]]:
        slices = {key: self.file.get_slice(self.keys[key]) for key in keys}
        for start in range(0, self.shapes[keys[0]][0], size):
            yield {key: _from_torch(part[start : start + size]) for key, part in slices.items()}

    def whole(self, key: str) -> np.ndarray:
        return _from_torch(self.file.get_tensor(self.keys[key]))


class _Csv:
    """A table with a header.  Small files are parsed once and kept, large ones parsed again in every pass."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, newline="", encoding="utf-8-sig") as file:
                first = file.readline()
                count = 1 + max(first.count(c) for c in ",;\t") if first else 0
                self.delimiter = max(",;\t", key=first.count)
                header = [cell.strip() for cell in next(csv.reader([first], delimiter=self.delimiter), [])]
                self.n = sum(1 for line in file if line.strip())
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{path.name} is not a CSV: {_first_line(error)}") from None
        if count < 2 or all(_is_number(cell) for cell in header):
            raise ValueError(
                f"{path.name} must begin with a header: y and the classes' names, got {first.strip()[:60]!r}"
            )
        if len(set(header)) < len(header):
            twice = next(cell for cell in header if header.count(cell) > 1)
            raise ValueError(f"the columns of {path.name} must have different names, got {twice!r} twice")
        place = {cell: i for i, cell in enumerate(header)}
        truth = next((place[a] for a in ALIASES["y"] if a in place), None)
        several = [cell[2:] for cell in header if cell.startswith("y:")]
        p_names = {cell[2:]: i for cell, i in place.items() if cell.startswith("p:")}
        x_names = {
            cell.removeprefix("x:"): i for cell, i in place.items() if i != truth and not cell.startswith(("y:", "p:"))
        }
        names = list(x_names)
        if truth is None and not several:
            raise ValueError(
                f"{path.name} must have a column y, or y:NAME for every output, got {', '.join(header)[:200]}"
            )
        columns = {"x": list(x_names.values()), "y": [truth] if truth is not None else []}
        for key, found in (("y", {s: place[f"y:{s}"] for s in several}), ("p", p_names)):
            if found and (key == "p" or truth is None):
                missing = [name for name in names if name not in found] + [
                    name for name in found if name not in x_names
                ]
                if missing:
                    raise ValueError(
                        f"{path.name} has outputs and {key}: columns that do not match, such as {missing[0]!r}"
                    )
                columns[key] = [found[name] for name in names]
        self.columns = columns
        self.width, self.header = len(header), header
        self.names = None if all(name == f"x{i}" or name == str(i) for i, name in enumerate(names)) else names
        self.truth = truth
        self.shapes: dict[str, tuple[int, ...]] = {key: (self.n, len(c)) for key, c in columns.items() if c}
        if truth is not None:
            self.shapes["y"] = (self.n,)
        self.place = {name: i for i, name in enumerate(names)}
        self.kept: list[np.ndarray] | None = None
        self.small = path.stat().st_size < 2**27

    def rows(self, keys: Sequence[str], size: int) -> Iterator[dict[str, np.ndarray]]:
        if self.small:
            if self.kept is None:
                self.kept = list(self._parsed(2**14))
            table = np.concatenate(self.kept) if len(self.kept) > 1 else self.kept[0]
            self.kept = [table]
            blocks: Iterator[np.ndarray] = (table[i : i + size] for i in range(0, len(table), size))
        else:
            blocks = self._parsed(size)
        for block in blocks:
            part = {key: block[:, self.columns[key]] for key in keys}
            if self.truth is not None and "y" in part:
                part["y"] = part["y"][:, 0]
            yield part

    def _parsed(self, size: int) -> Iterator[np.ndarray]:
        with open(self.path, encoding="utf-8-sig") as file:
            file.readline()
            line = 1
            while lines := [text for _, text in zip(range(size), file, strict=False)]:
                yield self._parse([text for text in lines if text.strip()], line)
                line += len(lines)

    def _parse(self, lines: list[str], line: int) -> np.ndarray:
        if not lines:
            return np.zeros((0, self.width))
        try:
            table = np.loadtxt(lines, delimiter=self.delimiter, quotechar='"', comments=None, ndmin=2)
            if table.shape[1] == self.width:
                return table
        except ValueError:
            pass
        # a name in the column y, or something wrong: cell by cell, to say where
        table = np.empty((len(lines), self.width))
        for i, cells in enumerate(self._cells(lines, line)):
            if len(cells) != self.width:
                raise ValueError(f"row {line + i} of {self.path.name} must have {self.width} cells, got {len(cells)}")
            for k, cell in enumerate(cells):
                cell = cell.strip()
                if k == self.truth and cell in self.place and not _is_number(cell):
                    table[i, k] = self.place[cell]
                    continue
                try:
                    table[i, k] = float(cell)
                except ValueError:
                    what = "a class's name or its number" if k == self.truth else "a number"
                    raise ValueError(
                        f"row {line + i} of {self.path.name}, column {self.header[k]!r}, must be {what}, got {cell!r}"
                    ) from None
        return table

    def _cells(self, lines: list[str], line: int) -> Iterator[list[str]]:
        try:
            yield from csv.reader(lines, delimiter=self.delimiter)
        except csv.Error as error:
            raise ValueError(f"a row of {self.path.name} after row {line} cannot be read: {error}") from None

    def whole(self, key: str) -> np.ndarray:
        raise KeyError(key)


def _found(held: Mapping[str, str]) -> dict[str, str]:
    """The keys of this module, each with the name it has in the file."""
    keys = {key: next((a for a in aliases if a in held), None) for key, aliases in ALIASES.items()}
    keys |= {key: key if key in held else None for key in ("mu", "sigma", "lam")}
    return {key: name for key, name in keys.items() if name is not None}


def _run_names(run: Path) -> list[str] | None:
    try:
        return list(json.loads((run / "environment.json").read_text())["data"]["classes"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _from_torch(value: Any) -> np.ndarray:
    import torch

    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
