"""Checkpoints of class-sharded heads: a file a process, read by any number of processes; nothing in them is code."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import wire
from .head import _joined
from .wire import _exchange, _rank, _size, split

#
# A checkpoint is a folder: one file of rows from every process and an index, written last.
#
#     shard-000001-00000-of-00003.safetensors  ...  index.json
#
# The index has the SHA-256 and length of every file; of every tensor its dtype, its whole shape and which rows lie
# in which file; the optimiser's groups; and a SHA-256 of itself.  A new checkpoint in the same folder gets the next
# number, and the old files go only when its index stands in the place of the old one: whenever a process is stopped,
# the index that is there names files that are whole.  Nothing in it can run code.

INDEX = "index.json"
_FILE = re.compile(r"shard-(\d{6,})-\d{5,}-of-\d{5,}\.safetensors")
_FORMAT = "gsoftmax sharded checkpoint 1"


def save(
    folder: str | os.PathLike[str],
    modules: Mapping[str, nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write modules, sharded or not, and the optimiser's state into a folder; call it on every process.

    modules: by name, such as {"backbone": backbone, "head": head}.  Every process writes the rows that it alone has,
    process 0 also what is the same everywhere.  extra: whatever else JSON can hold, taken from process 0.  If one
    process can't write, all raise OSError and the checkpoint that was there stays.

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
    from safetensors.torch import save_file

    folder, group = Path(folder), wire._world()
    rank, size = _rank(group), _size(group)
    tensors, described = _collect(modules, optimizer)
    for name, tensor in tensors.items():
        _place(tensor, name)  # what can't be saved must show before anything is written
    device = _wire_device(group, tensors)
    json.dumps(extra)
    done: dict[str, Any] = {"parts": {}}
    partial, path = None, None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        numbers = [int(m[1]) for m in map(_FILE.fullmatch, os.listdir(folder)) if m]
    except OSError as error:
        numbers, done["error"] = [], f"{folder} cannot be written: {error.strerror}"
    number = 1 + max(max(seen) for seen in _exchange([0, *numbers], group, device))
    try:
        if "error" not in done:
            mine: dict[str, Tensor] = {}
            memory: set[int] = set()
            for name, tensor in tensors.items():
                local, rows = _part(tensor, rank, name)
                if local is None:
                    continue
                local = local.detach().cpu().contiguous()
                if local.untyped_storage().data_ptr() in memory:
                    local = local.clone()  # tied parameters: the format wants every tensor on its own
                memory.add(local.untyped_storage().data_ptr())
                mine[name] = local
                done["parts"][name] = [str(local.dtype).removeprefix("torch."), list(tensor.shape), rows]
            path = folder / f"shard-{number:06d}-{rank:05d}-of-{size:05d}.safetensors"
            partial = path.with_name(path.name + ".partial")
            save_file(mine, partial)
            _to_disk(partial)
            done |= {"file": path.name, "sha256": _sha256(partial), "bytes": partial.stat().st_size}
            os.replace(partial, path)
    except Exception as error:  # safetensors has its own words for a full disk
        done["error"] = f"{path} cannot be written: {str(error).splitlines()[0]}"
    everybody = _exchange(done, group, device)
    failed = next((one["error"] for one in everybody if "error" in one), None)
    if failed is None:
        failed = _exchange(_write_index(folder, everybody, described, extra) if rank == 0 else None, group, device)[0]
    if failed is not None:
        for leftover in (partial, path):
            if leftover is not None:
                leftover.unlink(missing_ok=True)
        raise OSError(failed)


def _write_index(
    folder: Path, everybody: list[dict[str, Any]], optimizer: Any, extra: Mapping[str, Any] | None
) -> str | None:
    """Puts the new index in the place of the old and removes what only the old one named; returns what went wrong."""
    index = {
        "format": _FORMAT,
        "files": {one["file"]: {"sha256": one["sha256"], "bytes": one["bytes"]} for one in everybody},
        "tensors": _table_of_contents(everybody),
        "optimizer": optimizer,
        "extra": None if extra is None else dict(extra),
    }
    index["sha256"] = _index_sha256(index)
    partial = folder / (INDEX + ".partial")
    try:
        partial.write_text(json.dumps(index, indent=1))
        _to_disk(partial)
        os.replace(partial, folder / INDEX)
    except OSError as error:
        partial.unlink(missing_ok=True)
        return f"{folder / INDEX} cannot be written: {error.strerror}"
    for name in os.listdir(folder):
        if _FILE.fullmatch(name.removesuffix(".partial")) and name not in index["files"]:
            with contextlib.suppress(OSError):
                (folder / name).unlink()
    return None


def load(
    folder: str | os.PathLike[str],
    modules: Mapping[str, nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, Any] | None:
    """Read what `save` wrote into modules and optimiser, on any number of processes, and return its `extra`.

    Sharded or not, in the checkpoint or here: every process reads the rows it needs, and nothing else (but each file's
    checksum is taken once, by one of the processes).  A damaged, truncated or missing file, or other names or shapes
    than the modules have, is a ValueError that names it, and then nothing has been changed.
    """
    folder, group = Path(folder), wire._world()
    state = {f"{key}/{name}": t for key, module in modules.items() for name, t in _state(module, key).items()}
    device = _wire_device(group, state)
    index, error = {}, None
    try:
        index = _read_index(folder)
        _check_files(folder, index, _rank(group), _size(group))
        _check_contents(folder, index, state, modules, optimizer)
    except ValueError as found:
        error = found
    told = [text for text in _exchange(None if error is None else str(error), group, device) if text is not None]
    if told:
        raise error or ValueError(told[0])
    reader = _Reader(folder, index["tensors"])
    with torch.no_grad():
        for name, tensor in state.items():
            local, rows = _place(tensor)
            local.copy_(reader.read(name, rows))
    if optimizer is not None:
        _load_optimizer(optimizer, modules, index["optimizer"], reader)
    return index["extra"]


def _wire_device(group: Any, tensors: Mapping[str, Tensor]) -> torch.device:
    if group is None or "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return next(iter(tensors.values())).device


def _state(module: nn.Module, key: str) -> dict[str, Tensor]:
    if "/" in key:
        raise ValueError(f"names of modules must be without a slash, got {key!r}")
    if isinstance(module, nn.parallel.DistributedDataParallel):
        module = module.module
    state = module.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{key}/{name} must be a tensor to go into a checkpoint, got {type(value).__name__}")
    return state


def _names(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """The name of every parameter, by its id."""
    found: dict[int, str] = {}
    for key, module in modules.items():
        inner = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
        for name, parameter in inner.named_parameters():
            found.setdefault(id(parameter), f"{key}/{name}")
    return found


def _collect(
    modules: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer | None
) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """All tensors by name, and the optimiser's groups and numbers as JSON."""
    tensors = {f"{key}/{name}": t for key, module in modules.items() for name, t in _state(module, key).items()}
    if optimizer is None:
        return tensors, None
    names = _names(modules)
    groups, numbers = [], {}
    for group in optimizer.param_groups:
        unknown = [tuple(p.shape) for p in group["params"] if id(p) not in names]
        if unknown:
            raise ValueError(f"optimizer must hold parameters of the modules alone, got another of shape {unknown[0]}")
        plain = {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        groups.append({"params": [names[id(p)] for p in group["params"]], **plain})
        for p in group["params"]:
            name, of_parameter = names[id(p)], {}
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer:{key}:{name}"] = value
                    of_parameter[key] = {"tensor": f"optimizer:{key}:{name}"}
                else:
                    of_parameter[key] = {"value": value}
            numbers[name] = of_parameter
    described = {"class": type(optimizer).__name__, "groups": groups, "state": numbers}
    return tensors, json.loads(json.dumps(described))


def _part(tensor: Any, rank: int, name: str) -> tuple[Tensor | None, list[int] | None]:
    """What of a tensor this process writes, and which rows that is; None for a tensor that is written whole."""
    if not hasattr(tensor, "placements"):
        return (tensor if rank == 0 else None), None
    local, rows = _place(tensor, name)
    if rows is None:
        return (local if rank == 0 else None), None
    return (local if rows[0] < rows[1] else None), rows


def _place(tensor: Any, name: str = "") -> tuple[Tensor, list[int] | None]:
    """The local memory of a tensor and which rows of the whole it is; None for all of it."""
    if not hasattr(tensor, "placements"):
        return tensor, None
    if all(p.is_replicate() for p in tensor.placements):
        return tensor.to_local(), None
    if tensor.device_mesh.ndim != 1 or not tensor.placements[0].is_shard(0):
        raise ValueError(f"{name} must be sharded by rows on a 1-D mesh, got {tensor.placements}")
    rank = tensor.device_mesh.get_local_rank()
    with torch.no_grad():
        return tensor.to_local(), list(split(tensor.shape[0], tensor.device_mesh.size(), rank))


def _table_of_contents(everybody: list[dict[str, Any]]) -> dict[str, Any]:
    contents: dict[str, Any] = {}
    for one in everybody:
        for name, (dtype, shape, rows) in one["parts"].items():
            entry = contents.setdefault(name, {"dtype": dtype, "shape": shape, "parts": []})
            rows = rows or [0, shape[0] if shape else 1]
            if all(part["rows"] != rows for part in entry["parts"]):  # replicas of a shard write the same
                entry["parts"].append({"file": one["file"], "rows": rows})
    for entry in contents.values():
        entry["parts"].sort(key=lambda part: part["rows"])
    return contents


def _index_sha256(index: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in index.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _to_disk(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    try:
        index = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no checkpoint: it has no {INDEX}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(index, dict) or index.get("format") != _FORMAT:
        seen = index.get("format") if isinstance(index, dict) else type(index).__name__
        raise ValueError(f"{path} must be an index of format {_FORMAT!r}, got {seen!r:.60}")
    if index.get("sha256") != _index_sha256(index):
        raise ValueError(f"{path} is damaged: its checksum does not match")
    return index


def _check_files(folder: Path, index: Mapping[str, Any], rank: int, size: int) -> None:
    """Every file has its length, and those that fall to this process their checksum."""
    for i, (name, known) in enumerate(sorted(index["files"].items())):
        path = folder / name
        if not _FILE.fullmatch(name):
            raise ValueError(f"{folder / INDEX} names {name!r}, which is no file of a checkpoint")
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        if path.stat().st_size != known["bytes"]:
            raise ValueError(f"{path} is damaged: it has {path.stat().st_size} bytes, not {known['bytes']}")
        if i % size == rank and _sha256(path) != known["sha256"]:
            raise ValueError(f"{path} is damaged: its checksum does not match")


def _check_contents(
    folder: Path,
    index: Mapping[str, Any],
    state: Mapping[str, Tensor],
    modules: Mapping[str, nn.Module],
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """The checkpoint has what the modules and the optimiser have, by name and shape, and every row of it."""
    contents = index["tensors"]
    keys = tuple(f"{key}/" for key in modules)
    saved = {name for name in contents if name.startswith(keys)}
    for what, names in (("does not have", set(state) - saved), ("also has", saved - set(state))):
        if names:
            raise ValueError(f"the checkpoint in {folder} {what} {', '.join(sorted(names))}")
    for name, tensor in state.items():
        if list(tensor.shape) != contents[name]["shape"]:
            seen = tuple(contents[name]["shape"])
            raise ValueError(f"{name} must have shape {tuple(tensor.shape)}, got {seen} in {folder}")
        _place(tensor, name)
    for name, entry in contents.items():
        end = 0
        for part in entry["parts"]:
            first, last = part["rows"]
            if first != end or last < first or part["file"] not in index["files"]:
                raise ValueError(f"{folder / INDEX} does not say where rows {end} and on of {name} are")
            end = last
        if end != (entry["shape"][0] if entry["shape"] else 1):
            raise ValueError(f"{folder / INDEX} does not say where rows {end} and on of {name} are")
    if optimizer is None:
        return
    if index["optimizer"] is None:
        raise ValueError(f"the checkpoint in {folder} has no optimiser")
    if index["optimizer"]["class"] != type(optimizer).__name__:
        raise ValueError(
            f"optimizer must be {index['optimizer']['class']} as in {folder}, got {type(optimizer).__name__}"
        )
    known = _names(modules)
    here = [[known.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
    there = [group["params"] for group in index["optimizer"]["groups"]]
    if here != there:
        different = next((a, b) for a, b in [*zip(here, there, strict=False), (here, there)] if a != b)
        raise ValueError(f"optimizer must hold parameters as in {folder}, {different[1]}, got {different[0]}")


class _Reader:
    """Rows of tensors from the files of a checkpoint."""

    def __init__(self, folder: Path, contents: Mapping[str, Any]) -> None:
        self.folder, self.contents = folder, contents
        self.open: dict[str, Any] = {}

    def read(self, name: str, rows: list[int] | None) -> Tensor:
        from safetensors import SafetensorError, safe_open

        entry = self.contents[name]
        first, last = rows or (0, entry["shape"][0] if entry["shape"] else 1)
        found = []
        for part in entry["parts"]:
            a, b = max(first, part["rows"][0]), min(last, part["rows"][1])
            if a >= b and last > first:
                continue
            try:
                if part["file"] not in self.open:
                    self.open[part["file"]] = safe_open(self.folder / part["file"], framework="pt")
                file = self.open[part["file"]]
                if not entry["shape"]:
                    return file.get_tensor(name)
                offset = part["rows"][0]
                found.append(file.get_slice(name)[a - offset : max(a, b) - offset])
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{self.folder / part['file']} is damaged: {str(error).splitlines()[0]}") from None
            if last == first:
                break
        if first >= last:
            return torch.empty(0, *entry["shape"][1:], dtype=getattr(torch, entry["dtype"]))
        return found[0] if len(found) == 1 else torch.cat(found)


def _load_optimizer(
    optimizer: torch.optim.Optimizer, modules: Mapping[str, nn.Module], saved: Mapping[str, Any], reader: _Reader
) -> None:
    names = _names(modules)
    state: dict[int, dict[str, Any]] = {}
    position = 0
    groups = []
    for group, kept in zip(optimizer.param_groups, saved["groups"], strict=True):
        params = list(range(position, position + len(group["params"])))
        # JSON has no tuples: betas and the like come back as what they are in the optimiser
        values = {k: tuple(v) if isinstance(group.get(k), tuple) else v for k, v in kept.items() if k != "params"}
        groups.append({"params": params, **values})
        for at, p in zip(params, group["params"], strict=True):
            for key, value in saved["state"].get(names[id(p)], {}).items():
                if "value" in value:
                    state.setdefault(at, {})[key] = value["value"]
                    continue
                shape = reader.contents[value["tensor"]]["shape"]
                _, rows = _place(p) if shape == list(p.shape) else (None, None)
                read = reader.read(value["tensor"], rows).to(p.device if shape else "cpu")
                if hasattr(p, "placements") and shape == list(p.shape):
                    read = _joined(read, p.device_mesh, p.placements[0], p.shape)
                state.setdefault(at, {})[key] = read
        position += len(params)
    optimizer.load_state_dict({"state": state, "param_groups": groups})
