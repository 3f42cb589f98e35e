"""CIFAR-10 and CIFAR-100 from the published Python archives, without executing pickle code.

The archives contain Python 2 pickles. `safe_unpickle` checks every opcode first and replaces NumPy's names by stand-ins
that only record their arguments, so neither arbitrary code nor NumPy's own unpickling runs; arrays are rebuilt from
their bytes.
"""

from __future__ import annotations

import gzip
import io
import os
import pickle
import pickletools
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..catalog import CIFAR10, CIFAR100, DatasetInfo
from ..messages import first_line
from .augment import PRESETS
from .core import DataError, Dataset, Request, Split, check_md5, is_smoke, locate, read_bytes, reading

_MAX_MEMBER = 2**28  # the largest, CIFAR-100's train, has 155 MB
_MAX_ARCHIVE = 2**29


class _Layout(NamedTuple):
    info: DatasetInfo
    archive: str
    md5: str  # of the archive
    folder: str
    files: dict[str, str]  # training files, test file, names; each with its published MD5
    labels: str  # keys of the dictionaries in these files
    names: str


_LAYOUTS = {
    "cifar10": _Layout(
        CIFAR10,
        "cifar-10-python.tar.gz",
        "c58f30108f718f92721af3b95e74349a",
        "cifar-10-batches-py",
        {
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
            "test_batch": "40351d587109b95175f43aff81a1287e",
            "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
        },
        "labels",
        "label_names",
    ),
    "cifar100": _Layout(
        CIFAR100,
        "cifar-100-python.tar.gz",
        "eb9058c3a382ffc7106e4002c42a8d85",
        "cifar-100-python",
        {
            "train": "16019d7e3df5f24257cddd939b257f8d",
            "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
            "meta": "7973b15100ade9c7d40fb424638fde48",
        },
        "fine_labels",
        "fine_label_names",
    ),
}


def load_cifar(request: Request) -> Dataset:
    """CIFAR-10 or CIFAR-100 (fine labels), from the extracted folder if there is one, else from the archive."""
    name, layout = request.family, _LAYOUTS[request.family]
    base = locate(layout.info, request.root, [".", name], [layout.folder, layout.archive])
    extracted = (base / layout.folder).is_dir()
    where = base / (layout.folder if extracted else layout.archive)
    smoke = is_smoke(where if extracted else base)
    published = request.check and not smoke
    if extracted:
        members = {file: read_bytes(where / file, _MAX_MEMBER) for file in layout.files}
    else:
        members = _read_archive(where, layout, published)
    if published:
        for file, md5 in layout.files.items():
            check_md5(members[file], md5, where / file)
    contents = {file: safe_unpickle(data, where / file) for file, data in members.items()}
    *batches, meta = layout.files
    classes = _names(contents[meta], layout.names, where / meta)
    xs, ys = zip(*(_rows(contents[f], layout.labels, len(classes), where / f) for f in batches), strict=True)
    train, test = Split(torch.cat(xs[:-1]), torch.cat(ys[:-1])), Split(xs[-1], ys[-1])
    name += " (smoke)" * smoke
    return Dataset(name, "images", classes, False, train, test, augment=PRESETS["crop-flip"])


def _read_archive(path: Path, layout: _Layout, published: bool) -> dict[str, bytes]:
    """The members' bytes, read in memory: nothing is written, links and other members are ignored."""
    raw = read_bytes(path, _MAX_ARCHIVE)
    if published:
        check_md5(raw, layout.md5, path)
    found: dict[str, bytes] = {}
    with reading(path, tarfile.TarError, EOFError, OSError, zlib.error, ValueError):
        unpacked = gzip.GzipFile(fileobj=io.BytesIO(raw)).read(_MAX_ARCHIVE + 1)
        if len(unpacked) > _MAX_ARCHIVE:
            raise DataError(f"{path} unpacks to more than {_MAX_ARCHIVE:,} bytes: not the published archive")
        with tarfile.open(fileobj=io.BytesIO(unpacked), mode="r:") as tar:
            for member in tar:
                folder, _, file = member.name.partition("/")
                if not member.isreg() or folder != layout.folder or file not in layout.files:
                    continue
                if member.size > _MAX_MEMBER:
                    size = f"{member.size:,} bytes, limit {_MAX_MEMBER:,}"
                    raise DataError(f"{path} member {member.name} declares {size}")
                handle = tar.extractfile(member)
                found[file] = b"" if handle is None else handle.read()
                if len(found[file]) != member.size:
                    raise DataError(f"{path} is truncated inside {member.name}")
                if len(found) == len(layout.files):
                    break
    for file in layout.files:
        if file not in found:
            raise DataError(f"{path} has no regular file {layout.folder}/{file}")
    return {file: found[file] for file in layout.files}


class _Array:
    """Stand-in for numpy.ndarray while unpickling: keeps the state, which only `uint8` turns into an array."""

    def __init__(self) -> None:
        self.state: Any = ()

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def uint8(self) -> np.ndarray:
        """The array, from (version, shape, dtype, fortran order, bytes)."""
        _, shape, dtype, fortran, raw = self.state
        if not isinstance(dtype, _DType) or dtype.code not in ("u1", "uint8") or fortran or not isinstance(raw, bytes):
            raise ValueError("'data' is not a plain uint8 array")
        return np.frombuffer(raw, dtype=np.uint8).reshape(shape)


class _DType:
    """Stand-in for numpy.dtype: keeps the type code."""

    def __init__(self, code: bytes | str = "", *ignored: Any) -> None:
        self.code = code.decode("latin-1") if isinstance(code, bytes) else str(code)

    def __setstate__(self, state: Any) -> None:
        pass


def _latin1(text: str, encoding: str) -> bytes:
    """Bytes as Python 3 writes them in protocol 2: _codecs.encode(text, 'latin1')."""
    if encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"encoding {encoding!r}")
    return text.encode("latin-1")


class _Stand:
    """A callable that a pickle may name. It can only be called: setting its attributes is an error."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    def __call__(self, *arguments: Any) -> Any:
        return self.make(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("state for a function")


_GLOBALS: dict[tuple[str, str], _Stand] = {
    ("numpy.core.multiarray", "_reconstruct"): _Stand(lambda *ignored: _Array()),
    ("numpy._core.multiarray", "_reconstruct"): _Stand(lambda *ignored: _Array()),
    ("numpy", "ndarray"): _Stand(lambda *ignored: _Array()),
    ("numpy", "dtype"): _Stand(_DType),
    ("_codecs", "encode"): _Stand(_latin1),
}
_OPCODES = {
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG",
    "LONG1", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES",
    "SHORT_BINBYTES", "EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS",
    "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "GET", "BINGET", "LONG_BINGET", "PUT", "BINPUT",
    "LONG_BINPUT", "MEMOIZE", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "POP",
}  # fmt: skip


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _GLOBALS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name}") from None


def safe_unpickle(data: bytes, where: str | os.PathLike[str] = "pickle") -> Any:
    """The dicts, lists, strings, numbers and arrays in a pickle; anything else is a DataError and has no effect.

    Arrays are returned as records, which `_rows` turns into NumPy arrays.

    >>> safe_unpickle(pickle.dumps({"labels": [3, 1]}))
    {'labels': [3, 1]}
    """
    try:
        # Before anything is built: only opcodes that cannot execute code, and no memo index or length beyond the
        # data, because the unpickler allocates what these declare.
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name not in _OPCODES:
                raise pickle.UnpicklingError(f"opcode {opcode.name}")
            if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and not 0 <= int(argument or 0) <= len(data):
                raise pickle.UnpicklingError("memo index beyond the data")
            if opcode.name == "GLOBAL" and tuple(str(argument).split(" ", 1)) not in _GLOBALS:
                raise pickle.UnpicklingError(str(argument).replace(" ", "."))
        return _Restricted(io.BytesIO(data), encoding="bytes").load()
    except pickle.UnpicklingError as error:
        allowed = "only arrays, strings, numbers and lists are allowed"
        raise DataError(f"{where} is rejected: {allowed}, not {first_line(error)}") from None
    except Exception as error:  # damaged pickles end in almost any exception
        raise DataError(f"{where} is damaged: {type(error).__name__} while reading the pickle") from None


def _entry(content: Any, key: str, where: Path) -> Any:
    if not isinstance(content, dict):
        raise DataError(f"{where} is damaged: expected a dictionary, got {type(content).__name__}")
    for spelling in (key.encode(), key):  # written by Python 2, by Python 3
        if spelling in content:
            return content[spelling]
    raise DataError(f"{where} is damaged: it has no entry {key!r}")


def _names(content: Any, key: str, where: Path) -> tuple[str, ...]:
    names = _entry(content, key, where)
    if not isinstance(names, list) or not names or not all(isinstance(n, (bytes, str)) for n in names):
        raise DataError(f"{where} is damaged: {key!r} must be a list of names")
    return tuple(n.decode("utf-8", "replace") if isinstance(n, bytes) else n for n in names)


def _rows(content: Any, label_key: str, num_classes: int, where: Path) -> tuple[Tensor, Tensor]:
    """uint8 (N, 3, 32, 32) and int64 (N,) of one file."""
    data, labels = _entry(content, "data", where), _entry(content, label_key, where)
    try:
        if not isinstance(data, _Array):
            raise ValueError("'data' is not an array")
        x = data.uint8()
        if x.ndim != 2 or x.shape[1] != 3072:
            raise ValueError(f"'data' has the shape {x.shape}, expected (N, 3072)")
        if not isinstance(labels, list) or not all(type(v) is int and 0 <= v < num_classes for v in labels):
            raise ValueError(f"{label_key!r} must be a list of integers from 0 to {num_classes - 1}")
        if len(labels) != len(x):
            raise ValueError(f"{len(x)} images but {len(labels)} labels")
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{where} is damaged: {error}") from None
    # rows are 1024 red, 1024 green, 1024 blue bytes
    return torch.from_numpy(x.reshape(-1, 3, 32, 32).copy()), torch.tensor(labels, dtype=torch.int64)
