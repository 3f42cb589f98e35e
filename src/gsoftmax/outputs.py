"""Files of model outputs, from any framework: .npz, .safetensors, .csv, or a run folder of this package.

    x      (N, C) raw outputs; multi-label also (N, 2, L), absence first            aliases: logits
    y      (N,) class indices, or (N, C) of 0 and 1 for several labels               aliases: label(s), target(s)
    p      (N, C) probabilities, if you have them (else softmax or sigmoid of x)     aliases: probabilities
    names  (C,) the classes' names
    mu, sigma, lam    (C,), (C,) and a number: the Gaussians of a G-softmax head; multi-label also (2, L), absence first
    h      (N, D) features, the inputs of the classifier; .npz and .safetensors      aliases: features
    W, b   (C, D) and (C,): the classifier; x may be left out where h and W are      aliases: weight, bias
           there, and is then h W^T + b

A CSV has a header: the column `y` (an index or a class's name), every other column an output that is named after its
class; for several labels a column `y:NAME` for every output; `p:NAME` for probabilities; the aliases are the same.  In
a .safetensors file the names are a JSON list in the metadata.

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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from .data.core import MAX_RATIO, SMALL, within_limit
from .files import verify
from .functional import gsoftmax_logits
from .messages import first_line
from .metrics import check_probabilities
from .runs import read_environment

__all__ = ["Outputs", "has_outputs", "open_outputs"]

ALIASES = {
    "x": ("x", "logits"),
    "y": ("y", "labels", "label", "targets", "target"),
    "p": ("p", "probabilities"),
    "h": ("h", "features"),
    "W": ("W", "weight"),
    "b": ("b", "bias"),
    **{key: (key,) for key in ("mu", "sigma", "lam", "names")},
}
IGNORE = -100
TRAIN = ("form", "count", "mean", "m2")  # a run's class statistics of its training set, each behind `train_`


@dataclass
class Block:
    """Some rows of a file."""

    x: np.ndarray  # (rows, C), or (rows, 2, L)
    y: np.ndarray  # (rows,) int64, or (rows, L) uint8
    p: np.ndarray | None  # (rows, C) where the file has it
    h: np.ndarray | None = None  # (rows, D) where the file has it

    @property
    def positive(self) -> np.ndarray:
        """(rows, C): x, or x+ of two outputs per label."""
        return self.x[:, 1] if self.x.ndim == 3 else self.x

    def finite(self) -> np.ndarray:
        """Whether a row has neither nan nor infinity, nor a value whose square overflows."""
        good = np.abs(self.x) < 1e150 if self.x.dtype == np.float64 else np.isfinite(self.x)
        ok: np.ndarray = good.reshape(len(self.x), -1).all(1)
        for more in (self.p, self.h):
            ok = ok if more is None else ok & np.isfinite(more).all(1)
        return ok

    def take(self, rows: np.ndarray) -> Block:
        """The rows where `rows` is true."""
        if rows.all():
            return self
        return Block(self.x[rows], self.y[rows], *(None if v is None else v[rows] for v in (self.p, self.h)))

    def columns(self, which: slice) -> Block:
        """The labels `which` of a multi-label block."""
        return Block(self.x[..., which], self.y[:, which], None if self.p is None else self.p[:, which])


@dataclass
class Outputs:
    """A file of outputs, ready to be read block by block."""

    name: str  # of the model
    n: int  # rows
    num_classes: int  # or labels
    multilabel: bool  # several labels per row
    classes: tuple[str, ...]  # their names, or their numbers
    names_given: bool  # whether they are names
    mu: np.ndarray | None  # (C,) float64, of a head with Gaussians
    sigma: np.ndarray | None  # (C,) float64
    lam: float | None  # of a G-softmax head
    notes: list[str]  # what a reader of the numbers should know
    train: dict[str, torch.Tensor] | None  # state of the training set's ClassStatistics, in a run's file
    source: Any  # the reader
    absent: np.ndarray | None = None  # (L, 2) mu and sigma of x-, of a head with two Gaussians per label
    offset: int = 0  # subtracted from y: 1 where labels start at 1
    width: int = 0  # D, of h; 0 without
    weight: np.ndarray | None = None  # (C, D) float64, the classifier's W
    bias: np.ndarray | None = None  # (C,) float64

    def blocks(self, rows: int) -> Iterator[Block]:
        """All rows, in order.

        rows: how many at a time
        """
        keys = [key for key in ("x", "y", "p", *(["h"] if self.width else [])) if key in self.source.shapes]
        for part in self.source.rows(keys, rows):
            y, h = self.labels(part["y"]), _floats(part["h"], "h") if "h" in part else None
            x = self.classify(h) if h is not None and "x" not in part else _floats(part["x"], "x")
            if self.offset:
                y = np.where(y == IGNORE, y, y - self.offset)
            yield Block(x, y, _numbers(part["p"], "p") if "p" in part else None, h)

    def features(self, rows: int) -> Iterator[np.ndarray]:
        """h of all rows, in order.

        rows: how many at a time
        """
        for part in self.source.rows(["h"], rows):
            yield _floats(part["h"], "h")

    def classify(self, h: np.ndarray) -> np.ndarray:
        """x = h W^T + b.

        h: (rows, D) features
        """
        assert self.weight is not None
        x: np.ndarray = h.astype(np.float64) @ self.weight.T
        return x if self.bias is None else x + self.bias

    def probabilities(self, block: Block) -> tuple[np.ndarray, np.ndarray]:
        """p in float64 and the log-probability of the true label: (rows,), or (rows, L) for several labels.

        block: rows of this file, perhaps of some of its labels
        """
        y = torch.from_numpy(block.y)
        if block.p is not None:
            p = block.p.astype(np.float64)
            check_probabilities(p, rows=not self.multilabel)
            truth = np.where(block.y == 1, p, 1 - p) if self.multilabel else p[np.arange(len(p)), block.y]
            with np.errstate(divide="ignore"):
                return p.clip(0, 1), np.log(truth.clip(0, 1))
        z = torch.from_numpy(block.positive).double()
        if self.multilabel:
            if block.x.ndim == 3:
                z = z - torch.from_numpy(block.x[:, 0])
            return z.sigmoid().numpy(), logsigmoid(torch.where(y == 1, z, -z)).numpy()
        if self.lam and self.mu is not None and self.sigma is not None:
            z = gsoftmax_logits(z, torch.from_numpy(self.mu), torch.from_numpy(self.sigma), self.lam)
        log_p = z.log_softmax(1)
        return log_p.exp().numpy(), log_p.gather(1, y[:, None])[:, 0].numpy()

    def labels(self, y: np.ndarray) -> np.ndarray:
        """Labels as (rows,) int64 or (rows, L) uint8, checked.

        y: as the file has them
        """
        if y.dtype.kind in "US":
            place = {name: i for i, name in enumerate(self.classes)}
            names = [_text(v) for v in y.reshape(-1).tolist()]
            unknown = next((v for v in names if v not in place), None)
            if unknown is not None:
                raise ValueError(f"y has the text {unknown!r}, which is not a name of the {self.num_classes} classes")
            return np.array([place[v] for v in names], np.int64)
        _numbers(y, "y", "numbers or names")
        if self.multilabel:
            wrong = ~((y == 0) | (y == 1))
            if wrong.any():
                raise ValueError(f"y must be 0 or 1 for several labels, got {y[wrong][0]}")
            return y.astype(np.uint8)
        y = y.reshape(-1)
        if y.dtype.kind == "f":
            fractional = ~np.isfinite(y) | (y != np.floor(y)) | (np.abs(y) > 2**53)
            if fractional.any():
                raise ValueError(f"y must be whole numbers (class indices), got {y[fractional][0]}")
        return y.astype(np.int64)


def has_outputs(run: Path) -> bool:
    """Whether a run folder has x of every row: a sharded head with too many classes to gather writes only predictions.

    run: folder of a finished run
    """
    path = run / "outputs.safetensors"
    return path.exists() and "x" in _Safetensors(path).shapes


def open_outputs(
    path: str | os.PathLike[str], *, names: Sequence[str] | None = None, name: str | None = None
) -> Outputs:
    """Checks shapes, labels and names of a file of outputs.  x itself is read later, in blocks.

    path, name: a file or a run folder, and what the model is called
    names: of the classes, instead of the file's
    """
    path, run_names = Path(path), None
    if path.is_dir():
        described = read_environment(path).get("data")
        run_names = described.get("classes") if isinstance(described, dict) else None
        path = path / "outputs.safetensors"
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    if path.name == "outputs.safetensors":
        verify(path)
    readers: dict[str, Any] = {".npz": _Npz, ".safetensors": _Safetensors, ".csv": _Csv}
    if path.suffix.lower() not in readers:
        raise ValueError(f"outputs must be a run folder or a file that ends in {', '.join(readers)}, got {path.name}")
    source = readers[path.suffix.lower()](path)
    shapes = source.shapes
    if "y" not in shapes or not ("x" in shapes or {"h", "W"} <= shapes.keys()):
        also = "; h and W can stand for x" if "x" not in shapes else ""
        also += "".join(f"; {key} may be called {', '.join(ALIASES[key][1:])}" for key in "xy" if key not in shapes)
        raise ValueError(f"{path.name} must have x and y, got {', '.join(shapes) or 'neither'}{also}")
    width, weight, bias = _classifier(source)
    shape, y_shape = shapes["x"] if "x" in shapes else (shapes["h"][0], shapes["W"][0]), shapes["y"]
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[1] != 2) or 0 in shape:
        raise ValueError(f"x must have the shape (N, C), or (N, 2, L) for several labels, got {shape}")
    n, c = shape[0], shape[-1]
    if y_shape[:1] != (n,):
        raise ValueError(f"y must have as many rows as x, {n}, got the shape {y_shape}")
    if y_shape not in ((n,), (n, 1), (n, c)):
        raise ValueError(f"y must have the shape ({n},) or ({n}, {c}) beside x {shape}, got {y_shape}")
    multilabel = len(y_shape) == 2 and (y_shape[1] > 1 or len(shape) == 3)
    if len(shape) == 3 and not multilabel:
        raise ValueError(f"y must have the shape ({n}, {c}) beside x {shape}, got {y_shape}")
    if source.shapes.get("p", (n, c)) != (n, c):
        raise ValueError(f"p must have the shape ({n}, {c}), got {source.shapes['p']}")
    run_names = run_names if isinstance(run_names, list) else None
    if width and shapes["h"][0] != n:
        raise ValueError(f"h must have as many rows as x, {n}, got the shape {shapes['h']}")
    if weight is not None and len(weight) != c and not multilabel:
        raise ValueError(f"W must have a row for each of the {c} outputs, got {len(weight)}")
    given = next((g for g in (names, source.names, run_names) if g is not None), None)
    if given is not None and len(given) != c:
        raise ValueError(f"names must be {c}, one for each class, got {len(given)}")
    mu, sigma = _gaussians(source, "mu", c), _gaussians(source, "sigma", c)
    if (mu is None) != (sigma is None):
        raise ValueError(f"mu and sigma come together, got {'sigma' if mu is None else 'mu'} alone")
    pairs = None if mu is None or sigma is None else np.stack(np.broadcast_arrays(mu, sigma), 2)  # (1 or 2, C, 2)
    found = Outputs(
        name=name or (path.parent.name if path.name == "outputs.safetensors" else path.stem),
        n=n,
        num_classes=c,
        multilabel=multilabel,
        classes=tuple(map(str, range(c) if given is None else given)),
        names_given=given is not None,
        mu=None if pairs is None else pairs[-1, :, 0],
        sigma=None if pairs is None else pairs[-1, :, 1],
        lam=_lam(source),
        notes=[],
        train=getattr(source, "train", None),
        source=source,
        absent=pairs[0] if pairs is not None and len(pairs) == 2 and multilabel else None,
        width=0 if multilabel and "x" in shapes else width,
        weight=weight,
        bias=bias,
    )
    if width and multilabel:
        found.notes.append("h is not measured: neural collapse is defined for one label per image")
    if "W" in shapes and not width:
        found.notes.append("W is not measured: there are no features h beside it")
    if "x" not in shapes:
        found.notes.append("no x in the file: it is h Wᵀ" + (" + b" if bias is not None else ""))
    _look_at_labels(found)
    if "p" not in source.shapes:
        if multilabel:
            found.notes.append("no p in the file: it is the logistic function of x")
        elif found.mu is not None:
            known, unknown = (
                "G-softmax of x, with the file's Gaussians and lam",
                "the softmax of x, without the Gaussians",
            )
            how = f"{known} {found.lam:g}" if found.lam else f"{unknown}, since there is no lam"
            found.notes.append(f"no p in the file: it is {how}")
    return found


def _look_at_labels(file: Outputs) -> None:
    """One pass over y: labels that start at 1 are shifted, invalid labels are rejected."""
    low, high, single, c = math.inf, -math.inf, True, file.num_classes
    for part in file.source.rows(["y"], max(1, 2**22 // c) if file.multilabel else 2**20):
        y = file.labels(part["y"])
        if file.multilabel:
            single = single and bool((y.sum(1) == 1).all())
        elif len(y := y[y != IGNORE]):
            low, high = min(low, int(y.min())), max(high, int(y.max()))
    if file.multilabel:
        if single and c > 1:
            file.notes.append(
                "every row of y has exactly one label: if classes exclude each other, give y as (N,) class indices"
            )
    elif low == 1 and high == c:
        file.offset = 1
        file.notes.append(f"labels run from 1 to {c}: read as 0 to {c - 1}")
    elif high != -math.inf and (low < 0 or high >= c):
        raise ValueError(f"y must be in 0 to {c - 1} for {c} outputs (or {IGNORE}, left out), got {low} to {high}")


def _classifier(source: Any) -> tuple[int, np.ndarray | None, np.ndarray | None]:
    """The width of h (0 without), W and b, checked against each other."""
    shapes = source.shapes
    if "h" not in shapes:
        return 0, None, None
    if len(shapes["h"]) != 2 or 0 in shapes["h"]:
        raise ValueError(f"h must have the shape (N, D), got {shapes['h']}")
    width = shapes["h"][1]
    if "W" not in shapes:
        return width, None, None
    if len(shapes["W"]) != 2 or shapes["W"][1] != width:
        hint = ", its transpose" if shapes["W"][:1] == (width,) else ""
        raise ValueError(f"W must have the shape (C, {width}) beside h {shapes['h']}, got {shapes['W']}{hint}")
    if shapes.get("b", shapes["W"][:1]) != shapes["W"][:1]:
        raise ValueError(f"b must have the shape {shapes['W'][:1]} beside W {shapes['W']}, got {shapes['b']}")
    found = [_numbers(source.whole(key), key).astype(np.float64) if key in shapes else None for key in "Wb"]
    for key, value in zip("Wb", found, strict=True):
        if value is not None and not np.isfinite(value).all():
            raise ValueError(f"{key} must be finite, got {value[~np.isfinite(value)][0]}")
    return width, found[0], found[1]


def _gaussians(source: Any, key: str, classes: int) -> np.ndarray | None:
    """mu or sigma: (1, C), or (2, L) of x- and x+."""
    if key not in source.shapes:
        return None
    if source.shapes[key] not in ((classes,), (2, classes)):
        raise ValueError(f"{key} must have the shape ({classes},), or (2, {classes}), got {source.shapes[key]}")
    value: np.ndarray = _numbers(source.whole(key), key).astype(np.float64).reshape(-1, classes)
    if not np.isfinite(value).all() or (key == "sigma" and value.min() <= 0):
        raise ValueError(f"{key} must be finite{' and positive' if key == 'sigma' else ''}, got {value.min():g}")
    return value


def _lam(source: Any) -> float | None:
    if "lam" not in source.shapes:
        return None
    if source.shapes["lam"] not in ((), (1,)):
        raise ValueError(f"lam must be one number, got the shape {source.shapes['lam']}")
    value = source.whole("lam").reshape(-1)[0]
    if value.dtype.kind not in "biuf" or not 0 <= value < math.inf:
        raise ValueError(f"lam must be a number, 0 or more, got {value}")
    return float(value)


class _Npz:
    """Members of the archive, compressed or not, read as streams: nothing is unpickled, no array is read whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._archive() as archive:
            self.members = _found({Path(m).stem: m for m in archive.namelist() if m.endswith(".npy")})
            self.shapes = {}
            for key in self.members:
                stream, self.shapes[key], _ = self._open(archive, key)
                stream.close()
        self.names = None
        if self.shapes.pop("names", None) is not None:
            values = self.whole("names")
            if values.dtype.kind not in "USiu":
                raise ValueError(f"names must be text, got {values.dtype}")
            self.names = [_text(v) for v in values.reshape(-1).tolist()]

    def _archive(self) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(self.path)
        except (zipfile.BadZipFile, OSError, NotImplementedError, ValueError) as error:
            raise ValueError(f"{self.path.name} is not an .npz archive: {first_line(error)}") from None

    def _open(self, archive: zipfile.ZipFile, key: str) -> tuple[Any, tuple[int, ...], np.dtype]:
        """The stream of a member behind its header, its shape and its type."""
        with ExitStack() as on_error:
            try:
                stream: Any = on_error.enter_context(archive.open(self.members[key]))
                version = np.lib.format.read_magic(stream)
                read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
                if version not in read:
                    raise ValueError(f"unknown version {version}")
                shape, fortran, dtype = read[version](stream)
            except Exception as error:  # damaged headers end in almost any exception, tokenize.TokenError among them
                raise ValueError(f"{key} in {self.path.name} cannot be read: {first_line(error)}") from None
            if dtype.hasobject:
                raise ValueError(
                    f"{key} in {self.path.name} holds pickled Python objects, which are not read: save numbers or text"
                )
            size = math.prod(shape) * dtype.itemsize
            self._check_declared(archive.getinfo(self.members[key]), key, size, shape)
            if fortran and len(shape) > 1:  # which is read at once
                if size > min(2**30, max(2**27, 100 * archive.getinfo(self.members[key]).compress_size)):
                    raise ValueError(f"{key} is stored column by column: save numpy.ascontiguousarray({key})")
                whole = np.frombuffer(self._read(stream, key, size), dtype).reshape(shape[::-1]).T
                return io.BytesIO(np.ascontiguousarray(whole).tobytes()), tuple(shape), dtype
            on_error.pop_all()  # the caller closes it
            return stream, tuple(shape), dtype

    def _check_declared(self, member: zipfile.ZipInfo, key: str, size: int, shape: tuple[int, ...]) -> None:
        """Raises for a header that promises more than there is, or than a small file may take."""
        what, held = f"{key} in {self.path.name}", self.path.stat().st_size
        packed = min(member.compress_size, held)
        if size > member.file_size or size > 1100 * packed + 1024:  # deflate compresses at most 1032:1
            raise ValueError(f"{what} cannot be read: it declares {size:,} bytes but holds fewer")
        if size > max(SMALL, MAX_RATIO * packed):
            raise ValueError(
                f"{what} declares {size:,} bytes, more than {MAX_RATIO} times the {packed:,} that it holds"
            )
        within_limit(8 * math.prod(shape[1:]), f"a row of {what}", held)

    def _read(self, stream: Any, key: str, size: int) -> bytes:
        try:
            data: bytes = stream.read(size)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise ValueError(f"{key} in {self.path.name} is damaged: {first_line(error)}") from None
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
            raise ValueError(f"{path.name} is not a .safetensors file: {first_line(error)}") from None
        held = list(self.file.keys())
        self.keys = _found({key: key for key in held if key != "names"})
        self.shapes = {key: tuple(self.file.get_slice(a).get_shape()) for key, a in self.keys.items()}
        self.train = None
        if all(f"train_{key}" in held for key in TRAIN):
            self.train = {key: self.file.get_tensor(f"train_{key}") for key in TRAIN}
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
        self.table: np.ndarray | None = None
        try:
            with open(path, newline="", encoding="utf-8-sig") as file:
                first = file.readline()
                self.delimiter = max(",;\t", key=first.count)
                self.header = [cell.strip() for cell in next(csv.reader([first], delimiter=self.delimiter), [])]
                n = sum(1 for line in file if line.strip())
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{path.name} is not a CSV: {first_line(error)}") from None
        if self.delimiter not in first or all(_is_number(cell) for cell in self.header):
            raise ValueError(
                f"{path.name} must begin with a header: y and the classes' names, got {first.strip()[:60]!r}"
            )
        if twice := [cell for cell, n in Counter(self.header).items() if n > 1]:
            raise ValueError(f"the columns of {path.name} must have different names, got {twice[0]!r} twice")
        place = {cell: i for i, cell in enumerate(self.header)}
        self.truth = next((place[a] for a in ALIASES["y"] if a in place), None)
        of: dict[str, dict[str, int]] = {"x": {}, "y": {}, "p": {}}
        for cell, i in place.items():
            if i != self.truth:
                word, _, name = cell.partition(":")
                key = next((key for key in of if name and word in ALIASES[key]), None)
                of[key or "x"][name if key else cell] = i
        outputs = of.pop("x")
        if self.truth is None and not of["y"]:
            told = ", ".join(self.header)[:200]
            also = ", ".join(ALIASES["y"][1:])
            raise ValueError(f"{path.name} must have a column y, or y:NAME for every output (or {also}), got {told}")
        self.columns = {"x": list(outputs.values())}
        if self.truth is not None:
            self.columns["y"], of["y"] = [self.truth], {}
        for key, found in of.items():
            if found:
                if missing := [name for name in (*outputs, *found) if name not in found or name not in outputs]:
                    raise ValueError(
                        f"{path.name} has outputs and {key}: columns that do not match, such as {missing[0]!r}"
                    )
                self.columns[key] = [found[name] for name in outputs]
        self.shapes: dict[str, tuple[int, ...]] = {key: (n, len(c)) for key, c in self.columns.items() if c}
        if self.truth is not None:
            self.shapes["y"] = (n,)
        self.place = {name: i for i, name in enumerate(outputs)}
        self.names = None if all(name in (f"x{i}", str(i)) for i, name in enumerate(outputs)) else list(outputs)

    def rows(self, keys: Sequence[str], size: int) -> Iterator[dict[str, np.ndarray]]:
        if self.table is None and self.path.stat().st_size < 2**27:
            self.table = np.concatenate([np.zeros((0, len(self.header))), *self._parsed(2**14)])
        kept = self.table
        blocks = self._parsed(size) if kept is None else (kept[i : i + size] for i in range(0, len(kept), size))
        for block in blocks:
            part = {key: block[:, self.columns[key]] for key in keys}
            yield {k: v[:, 0] if k == "y" and self.truth is not None else v for k, v in part.items()}

    def _parsed(self, size: int) -> Iterator[np.ndarray]:
        with open(self.path, encoding="utf-8-sig") as file:
            file.readline()
            line = 1
            while lines := [text for _, text in zip(range(size), file, strict=False)]:
                if used := [text for text in lines if text.strip()]:
                    yield self._parse(used, line)
                line += len(lines)

    def _parse(self, lines: list[str], line: int) -> np.ndarray:
        try:
            table = np.loadtxt(lines, delimiter=self.delimiter, quotechar='"', comments=None, ndmin=2)
            if table.shape[1] == len(self.header):
                return table
        except ValueError:
            pass
        # a name in the column y, or something wrong: cell by cell, to say where
        rows = []
        try:
            for i, cells in enumerate(csv.reader(lines, delimiter=self.delimiter)):
                if len(cells) != len(self.header):
                    raise ValueError(
                        f"row {line + i} of {self.path.name} must have {len(self.header)} cells, got {len(cells)}"
                    )
                rows.append(np.array([self._value(cell.strip(), k, line + i) for k, cell in enumerate(cells)]))
        except csv.Error as error:
            raise ValueError(f"a row of {self.path.name} after row {line} cannot be read: {error}") from None
        return np.stack(rows)

    def _value(self, cell: str, column: int, row: int) -> float:
        if _is_number(cell):
            return float(cell)
        if column == self.truth and cell in self.place:
            return self.place[cell]
        what = "a class's name or its number" if column == self.truth else "a number"
        where = f"row {row} of {self.path.name}, column {self.header[column]!r}"
        raise ValueError(f"{where}, must be {what}, got {cell!r}")


def _found(held: Mapping[str, str]) -> dict[str, str]:
    """For each key of `ALIASES` that a file has, what it is called there."""
    names = {key: next((held[a] for a in aliases if a in held), None) for key, aliases in ALIASES.items()}
    return {key: name for key, name in names.items() if name is not None}


def _numbers(value: np.ndarray, name: str, what: str = "numbers") -> np.ndarray:
    if value.dtype.kind not in "biuf":
        raise ValueError(f"{name} must hold {what}, got {value.dtype}")
    return value


def _floats(value: np.ndarray, name: str) -> np.ndarray:
    """In float32 or float64."""
    value = _numbers(value, name)
    if value.dtype in (np.float32, np.float64):
        return value
    return value.astype(np.float32 if value.dtype == np.float16 else np.float64)


def _from_torch(value: torch.Tensor) -> np.ndarray:
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
