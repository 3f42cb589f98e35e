"""The folder of a run: it describes itself, its writes are atomic, and it belongs to one run at a time.

    config.json  environment.json  metrics.jsonl  outputs.safetensors  checkpoint/epoch-000003-batch-00000000-HASH.pt

A checkpoint's name carries the first half of its SHA-256.  The newest two are kept: one that was damaged is passed
over, with a warning, for the one before it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import shlex
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._version import __version__
from .config import Config
from .files import atomic_file, atomic_write, checksum, locked
from .messages import first_line

KEPT = 2  # checkpoints


class RunFolder:
    """What a run leaves behind.  A context manager: the folder is locked from the beginning to the end.

    described: what environment.json says beside the machine
    """

    def __init__(
        self, path: str | os.PathLike[str], config: Config, described: Mapping[str, Any], resume: bool
    ) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoint"
        self.resume = resume
        self._board: Any = None  # a TensorBoard writer, where there is TensorBoard
        _refuse_file(self.path)
        self._lock = locked(self.path)
        self._lock.__enter__()
        try:
            self._claim(config, described)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._board is not None:
            self._board.close()
        self._lock.__exit__(None, None, None)

    def _claim(self, config: Config, described: Mapping[str, Any]) -> None:
        if (found := read_config(self.path)) is not None:
            if not self.resume:
                raise ValueError(f"{self.path} already holds a run; --resume goes on with it")
            if differing := found.differences(config):
                raise ValueError(f"{self.path} contains a run with {differing}")
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        for left in [*self.path.glob("*.partial"), *self.checkpoints.glob("*.partial")]:
            left.unlink()  # of a process that was killed while it wrote
        atomic_write(self.path / "environment.json", json.dumps(environment() | dict(described), indent=2))
        atomic_write(self.path / "config.json", json.dumps(dataclasses.asdict(config), indent=2))

    def newest(self) -> Path | None:
        """The newest checkpoint that is there, damaged or not."""
        return max(self.checkpoints.glob("epoch-*.pt"), default=None)

    def checkpoint(self) -> dict[str, Any] | None:
        """The state to go on from, None for the beginning; rows that were logged after it are taken back."""
        state = self._state() if self.resume else None
        done = 0 if state is None else state["epoch"]
        rows = [row for row in read_rows(self.path) if "final" not in row and row["epoch"] <= done]
        atomic_write(self.path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        self._board = _tensorboard(self.path / "tensorboard", None if state is None else done + 1)
        return state

    def _state(self) -> dict[str, Any] | None:
        for path in sorted(self.checkpoints.glob("epoch-*.pt"), reverse=True):
            reason = "its content does not match its name"
            if path.stem.rpartition("-")[2] == checksum(path):
                try:
                    state = torch.load(path, map_location="cpu", weights_only=True)
                    if isinstance(state, dict) and all(type(state.get(k)) is int for k in ("epoch", "batch")):
                        return state
                    reason = "it does not say how far its run was"
                except Exception as error:  # whatever a foreign file makes of the reader
                    reason = first_line(error)
            warnings.warn(f"checkpoint {path} was passed over: {reason}", stacklevel=2)
            path.rename(path.with_name(path.name + ".damaged"))  # or it would count among the newest that are kept
        return None

    def save(self, state: Mapping[str, Any]) -> None:
        name = f"epoch-{state['epoch']:06}-batch-{state['batch']:08}.pt"
        with atomic_file(self.checkpoints / name, checked=True) as partial:
            torch.save(dict(state), partial)
        for old in sorted(self.checkpoints.glob("epoch-*.pt"))[:-KEPT]:
            old.unlink(missing_ok=True)

    def log(self, row: Mapping[str, Any]) -> None:
        with open(self.path / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        if self._board is not None:
            for key, value in row.items():
                if isinstance(value, (int, float)) and key not in ("epoch", "final"):
                    self._board.add_scalar(key, value, row.get("epoch", row.get("epochs")))

    def finish(self, result: Mapping[str, Any], outputs: Mapping[str, Tensor]) -> None:
        from safetensors.torch import save_file

        with atomic_file(self.path / "outputs.safetensors") as partial:
            save_file({k: v.contiguous() for k, v in outputs.items()}, partial)
        self.log({"final": True, **result})


def _tensorboard(folder: Path, purge: int | None) -> Any:
    """A writer whose rows from step `purge` on take the place of older ones; None where TensorBoard is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=purge)


def folder_name(head: str) -> str:
    """A head's folder from how it was written.

    >>> folder_name("gsoftmax(lam=4, gaussians=tracked)")
    'gsoftmax-lam=4-gaussians=tracked'
    """
    return re.sub(r"-+", "-", re.sub(r"[^\w.=+-]+", "-", head)).strip("-")


def _refuse_file(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} must be a folder, and is a file")


def read_config(run: Path) -> Config | None:
    path = run / "config.json"
    if not path.exists():
        return None
    try:
        return Config(**json.loads(path.read_bytes()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def described_before(run: str | os.PathLike[str]) -> dict[str, Any]:
    """environment.json of the run in a folder; empty where there is none."""
    try:
        found = json.loads((Path(run) / "environment.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_rows(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; a last one that was cut off does not count."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    rows = []
    # what follows the last line's end is nothing, or was cut off
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path} cannot be read, line {number}: {error}") from None
        if not isinstance(row, dict) or not ("final" in row or type(row.get("epoch")) is int):
            raise ValueError(f"{path} cannot be read, line {number}: neither an epoch's row nor the final one")
        rows.append(row)
    return rows


def read_result(run: Path) -> dict[str, Any] | None:
    """The final metrics of a finished run."""
    rows = read_rows(run)
    return rows[-1] if rows and rows[-1].get("final") and (run / "outputs.safetensors").exists() else None


def environment() -> dict[str, Any]:
    """Where a number came from."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "gsoftmax": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "threads": torch.get_num_threads(),
        "command": shlex.join(["gsoftmax", *sys.argv[1:]]),
    }
