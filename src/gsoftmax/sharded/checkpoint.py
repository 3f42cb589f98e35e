"""Checkpoints of sharded heads: one file per process, readable with any number of processes; no pickles.

A checkpoint is a folder: one file of rows from every process, and an index, which is written last.

    shard-000001-00000-of-00003.safetensors  ...  index.json

The index holds the SHA-256 and length of every file; the dtype and shape of every tensor, and which of its rows are in
which file; the optimizer's groups; and a SHA-256 of itself.  A new checkpoint in the same folder gets the next number,
and old files are removed only after the new index has replaced the old one: whenever a process is stopped, the index
names files that are complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import files
from ..messages import first_line
from . import collectives
from .collectives import exchange, rank, size
from .shard import join, split

INDEX = "index.json"
_FILE = re.compile(r"shard-(\d{6,})-\d{5,}-of-\d{5,}\.safetensors")
_FORMAT = "gsoftmax sharded checkpoint 1"

Modules = Mapping[str, nn.Module]
Optimizer = torch.optim.Optimizer


def save(
    folder: str | os.PathLike[str],
    modules: Modules,
    optimizer: Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write modules, sharded or not, and the optimizer's state into a folder; a collective call.

    Every process writes its shards, process 0 also what is the same everywhere.  If one process cannot write, all
    raise OSError and the previous checkpoint is kept.

    folder: created if missing
    modules, optimizer: modules by name, such as {"backbone": backbone, "head": head}, and of their parameters
    extra: anything that JSON can hold, taken from process 0

    >>> import tempfile
    >>> from gsoftmax import GSoftmaxHead
    >>> head, other = GSoftmaxHead(4, 3), GSoftmaxHead(4, 3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder, {"head": head}, extra={"epoch": 1})
    ...     load(folder, {"head": other})
    {'epoch': 1}
    >>> torch.equal(head.weight, other.weight)
    True
    """
    folder, group = Path(folder), collectives.world()
    tensors, described = _collect(modules, optimizer)
    places = {name: _place(tensor, name) for name, tensor in tensors.items()}  # validate before writing anything
    json.dumps(extra)
    device = next(iter(tensors.values())).device

    def on_all(path: Path, work: Callable[[], Any]) -> list[Any]:
        """The results of all processes, or the error of one of them on all."""
        try:
            answer = {"result": work()}
        except Exception as error:  # of any kind, or the other processes would wait
            complete = isinstance(error, OSError) and error.strerror is None
            reason = getattr(error, "strerror", None) or first_line(error)
            answer = {"error": str(error) if complete else f"{path} cannot be written: {reason}"}
        answers = exchange(answer, group, device)
        failed = [one["error"] for one in answers if "error" in one]
        if failed:
            raise OSError(failed[0])
        return [one["result"] for one in answers]

    def last_number() -> int:
        folder.mkdir(parents=True, exist_ok=True)
        return max([0, *(int(m[1]) for m in map(_FILE.fullmatch, os.listdir(folder)) if m)])

    number = 1 + max(on_all(folder, last_number))
    path = folder / f"shard-{number:06d}-{rank(group):05d}-of-{size(group):05d}.safetensors"
    try:
        shards = on_all(path, lambda: _write_shard(path, tensors, places, rank(group) == 0))
        index = {
            "format": _FORMAT,
            "files": {one["file"]: {"sha256": one["sha256"], "bytes": one["bytes"]} for one in shards},
            "tensors": _table_of_contents(shards),
            "optimizer": described,
            "extra": None if extra is None else dict(extra),
        }
        index["sha256"] = index_sha256(index)
        on_all(folder / INDEX, lambda: _write_index(folder, index) if rank(group) == 0 else None)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def load(folder: str | os.PathLike[str], modules: Modules, optimizer: Optimizer | None = None) -> dict[str, Any] | None:
    """Read what `save` wrote into modules and optimizer, with any number of processes, and return its `extra`.

    Every process reads the rows it needs, sharded or not (each file's checksum is computed once, by one process).  A
    damaged, truncated or missing file, or other names or shapes than those of the modules, is a ValueError that names
    it, and nothing is changed.

    folder, modules, optimizer: as in `save`
    """
    folder, group = Path(folder), collectives.world()
    state = _state(modules)
    index, error = {}, None
    try:
        index = _read_index(folder)
        _check_files(folder, index, rank(group), size(group))
        _check_contents(folder, index, state, modules)
        if optimizer is not None:
            _check_optimizer(folder, index["optimizer"], modules, optimizer)
    except ValueError as found:
        error = found
    device = next(iter(state.values())).device
    failed = [text for text in exchange(None if error is None else str(error), group, device) if text is not None]
    if failed:
        raise error or ValueError(failed[0])
    reader = Reader(folder, index["tensors"])
    with torch.no_grad():
        for name, tensor in state.items():
            part, rows = _place(tensor)
            part.copy_(reader.read(name, rows))
    if optimizer is not None:
        _load_optimizer(optimizer, modules, index["optimizer"], reader)
    return index["extra"]


def _unwrapped(modules: Modules) -> dict[str, nn.Module]:
    if any("/" in key for key in modules):
        raise ValueError(f"names of modules must not contain a slash, got {', '.join(map(repr, modules))}")
    wrapper = nn.parallel.DistributedDataParallel
    return {key: module.module if isinstance(module, wrapper) else module for key, module in modules.items()}


def _state(modules: Modules) -> dict[str, Tensor]:
    found = {f"{key}/{name}": v for key, m in _unwrapped(modules).items() for name, v in m.state_dict().items()}
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a tensor to be saved in a checkpoint, got {type(value).__name__}")
    return found


def _names(modules: Modules) -> dict[int, str]:
    """The name of every parameter, by its id."""
    found: dict[int, str] = {}
    for key, module in _unwrapped(modules).items():
        for name, parameter in module.named_parameters():
            found.setdefault(id(parameter), f"{key}/{name}")
    return found


def _collect(modules: Modules, optimizer: Optimizer | None) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """All tensors by name, and the optimizer's groups and numbers as JSON."""
    tensors = _state(modules)
    if optimizer is None:
        return tensors, None
    names = _names(modules)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    unknown = [tuple(p.shape) for p in parameters if id(p) not in names]
    if unknown:
        raise ValueError(f"optimizer must hold only parameters of the modules, got another of shape {unknown[0]}")
    groups = []
    for group in optimizer.param_groups:
        plain = {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        groups.append({"params": [names[id(p)] for p in group["params"]], **plain})
    numbers: dict[str, Any] = {names[id(p)]: {} for p in parameters}
    for p in parameters:
        for key, value in optimizer.state.get(p, {}).items():
            stored = f"optimizer:{key}:{names[id(p)]}"
            numbers[names[id(p)]][key] = {"tensor": stored} if isinstance(value, Tensor) else {"value": value}
            if isinstance(value, Tensor):
                tensors[stored] = value
    described = {"class": type(optimizer).__name__, "groups": groups, "state": numbers}
    return tensors, json.loads(json.dumps(described))


def _place(tensor: Any, name: str = "") -> tuple[Tensor, list[int] | None]:
    """The local part of a tensor and which rows of the whole it is; None for all of it."""
    if not hasattr(tensor, "placements"):
        return tensor, None
    if all(p.is_replicate() for p in tensor.placements):
        return tensor.to_local(), None
    mesh = tensor.device_mesh
    if mesh.ndim != 1 or not tensor.placements[0].is_shard(0):
        raise ValueError(f"{name} must be sharded by rows on a 1-D mesh, got {tensor.placements}")
    with torch.no_grad():
        return tensor.to_local(), list(split(tensor.shape[0], mesh.size(), mesh.get_local_rank()))


def _write_shard(path: Path, tensors: Mapping[str, Tensor], places: Mapping[str, Any], first: bool) -> dict[str, Any]:
    """Write the local rows, on the first process also unsharded tensors; name, checksum, length and contents."""
    from safetensors.torch import save_file

    mine: dict[str, Tensor] = {}
    contents: dict[str, Any] = {}
    memory: set[int] = set()
    for name, (part, rows) in places.items():
        if not (first if rows is None else rows[0] < rows[1]):
            continue
        part = part.detach().cpu().contiguous()
        if part.untyped_storage().data_ptr() in memory:
            part = part.clone()  # tied parameters: the format stores every tensor separately
        memory.add(part.untyped_storage().data_ptr())
        mine[name] = part
        contents[name] = [str(part.dtype).removeprefix("torch."), list(tensors[name].shape), rows]
    with files.atomic_file(path) as partial:
        save_file(mine, partial)
    return {"parts": contents, "file": path.name, "sha256": files.sha256(path), "bytes": path.stat().st_size}


def _table_of_contents(shards: list[dict[str, Any]]) -> dict[str, Any]:
    contents: dict[str, Any] = {}
    for one in shards:
        for name, (dtype, shape, rows) in one["parts"].items():
            entry = contents.setdefault(name, {"dtype": dtype, "shape": shape, "parts": []})
            rows = rows or [0, shape[0] if shape else 1]
            if all(part["rows"] != rows for part in entry["parts"]):  # replicas write the same shard
                entry["parts"].append({"file": one["file"], "rows": rows})
    for entry in contents.values():
        entry["parts"].sort(key=lambda part: part["rows"])
    return contents


def index_sha256(index: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in index.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _write_index(folder: Path, index: Mapping[str, Any]) -> None:
    """Replace the index and remove the files that only the old one names."""
    files.atomic_write(folder / INDEX, json.dumps(index, indent=1))
    for name in os.listdir(folder):
        if _FILE.fullmatch(name) and name not in index["files"]:
            with contextlib.suppress(OSError):
                (folder / name).unlink()


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    try:
        index = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no checkpoint: it has no {INDEX}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {first_line(error)}") from None
    if not isinstance(index, dict) or index.get("format") != _FORMAT:
        seen = index.get("format") if isinstance(index, dict) else type(index).__name__
        raise ValueError(f"{path} must be an index of format {_FORMAT!r}, got {seen!r:.60}")
    if index.get("sha256") != index_sha256(index):
        raise ValueError(f"{path} is damaged: its checksum does not match")
    return index


def _check_files(folder: Path, index: Mapping[str, Any], rank: int, size: int) -> None:
    """Check the length of every file, and the checksums of this process's share of them."""
    for i, (name, known) in enumerate(sorted(index["files"].items())):
        path = folder / name
        if not _FILE.fullmatch(name):
            raise ValueError(f"{folder / INDEX} names {name!r}, which is not a file of a checkpoint")
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        if path.stat().st_size != known["bytes"]:
            raise ValueError(f"{path} is damaged: it has {path.stat().st_size} bytes, not {known['bytes']}")
        if i % size == rank and files.sha256(path) != known["sha256"]:
            raise ValueError(f"{path} is damaged: its checksum does not match")


def _check_contents(folder: Path, index: Mapping[str, Any], state: Mapping[str, Tensor], modules: Modules) -> None:
    """Check that the checkpoint has the tensors of the modules, by name and shape, with all their rows."""
    contents = index["tensors"]
    saved = {name for name in contents if name.startswith(tuple(f"{key}/" for key in modules))}
    for what, names in (("does not have", set(state) - saved), ("also has", saved - set(state))):
        if names:
            raise ValueError(f"the checkpoint in {folder} {what} {', '.join(sorted(names))}")
    for name, tensor in state.items():
        seen = tuple(contents[name]["shape"])
        if tuple(tensor.shape) != seen:
            raise ValueError(f"{name} must have shape {tuple(tensor.shape)}, got {seen} in {folder}")
        _place(tensor, name)
    for name, entry in contents.items():
        end, total = 0, entry["shape"][0] if entry["shape"] else 1
        for part in (*entry["parts"], {"rows": [total, total], "file": next(iter(index["files"]))}):
            first, last = part["rows"]
            if first != end or last < first or part["file"] not in index["files"]:
                raise ValueError(f"{folder / INDEX} lacks rows from {end} of {name}")
            end = last


def _check_optimizer(folder: Path, saved: Mapping[str, Any] | None, modules: Modules, optimizer: Optimizer) -> None:
    if saved is None:
        raise ValueError(f"the checkpoint in {folder} has no optimizer")
    if saved["class"] != type(optimizer).__name__:
        raise ValueError(f"optimizer must be {saved['class']} as in {folder}, got {type(optimizer).__name__}")
    known = _names(modules)
    here = [[known.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
    there = [group["params"] for group in saved["groups"]]
    if here != there:
        different = next((a, b) for a, b in [*zip(here, there, strict=False), (here, there)] if a != b)
        raise ValueError(f"optimizer must hold parameters as in {folder}, {different[1]}, got {different[0]}")


class Reader:
    """Rows of tensors from the files of a checkpoint."""

    def __init__(self, folder: Path, contents: Mapping[str, Any]) -> None:
        self.folder, self.contents = folder, contents
        self.open: dict[str, Any] = {}

    def read(self, name: str, rows: list[int] | None) -> Tensor:
        entry = self.contents[name]
        first, last = rows or (0, entry["shape"][0] if entry["shape"] else 1)
        found = []
        for part in entry["parts"]:
            start, stop = part["rows"]
            a, b = max(first, start), min(last, stop)
            if a < b:
                found.append(self._slice(part["file"], name, slice(a - start, b - start) if entry["shape"] else None))
        if not found:
            return torch.empty(0, *entry["shape"][1:], dtype=getattr(torch, entry["dtype"]))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _slice(self, file: str, name: str, rows: slice | None) -> Tensor:
        from safetensors import SafetensorError, safe_open

        try:
            if file not in self.open:
                self.open[file] = safe_open(self.folder / file, framework="pt")
            opened = self.open[file]
            return opened.get_tensor(name) if rows is None else opened.get_slice(name)[rows]
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.folder / file} is damaged: {first_line(error)}") from None


def _load_optimizer(optimizer: Optimizer, modules: Modules, saved: Mapping[str, Any], reader: Reader) -> None:
    def value(p: Any, stored: Mapping[str, Any]) -> Any:
        if "value" in stored:
            return stored["value"]
        shape = reader.contents[stored["tensor"]]["shape"]
        alike = shape == list(p.shape)
        read = reader.read(stored["tensor"], _place(p)[1] if alike else None).to(p.device if shape else "cpu")
        return join(read, p.device_mesh, 0, p.shape) if hasattr(p, "placements") and alike else read

    names = _names(modules)
    # JSON has no tuples: betas and the like get the type that they have in the optimizer
    groups = [
        new | {k: tuple(v) if isinstance(new.get(k), tuple) else v for k, v in old.items() if k != "params"}
        for new, old in zip(optimizer.state_dict()["param_groups"], saved["groups"], strict=True)
    ]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    stored = [saved["state"].get(names[id(p)], {}) for p in parameters]
    state = {i: {k: value(parameters[i], v) for k, v in found.items()} for i, found in enumerate(stored) if found}
    optimizer.load_state_dict({"state": state, "param_groups": groups})
