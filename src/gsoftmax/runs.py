"""The folder of a run: it describes itself, its writes are atomic, and it belongs to one run at a time.

    config.json  environment.json  metrics.jsonl  model.safetensors  outputs.safetensors  SHA256SUMS

Until the run is finished there are also checkpoints, checkpoint/epoch-000003-batch-00000000-HASH.pt.  A checkpoint's
name carries the first half of its SHA-256.  The newest two are kept: a damaged one is skipped, with a warning, for the
one before it.  The files of a finished run are compared with SHA256SUMS whenever they are read.

environment.json has a fingerprint of everything outside the configuration that decides the result: the data, initial
weights, and the source of a head of your own with the modules that it imports from its folder or package.  A run whose
fingerprints differ is another run.  Folders of versions that recorded no fingerprints and no checksums are believed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._version import __version__
from .config import Config
from .files import (
    SUMS,
    append_line,
    atomic_file,
    atomic_write,
    locked,
    make_folder,
    open_read,
    read_json,
    refuse_link,
    remove_leftovers,
    sha256,
    sync,
    verify,
    write_sums,
)
from .integrations import wandb
from .messages import first_line

KEPT = 2  # checkpoints
METRICS_ONLY = "metrics-only.txt"  # marks a finished run whose model and outputs were removed
_FINAL = ("config.json", "environment.json", "metrics.jsonl", "model.safetensors", "outputs.safetensors", METRICS_ONLY)


class RunFolder:
    """A run folder, locked until the end of its context; `described` joins the machine in environment.json."""

    def __init__(
        self, path: str | os.PathLike[str], config: Config, described: Mapping[str, Any], resume: bool
    ) -> None:
        self.path, self.resume = Path(path), resume
        self.checkpoints = self.path / "checkpoint"
        self._boards: list[Any] = []  # TensorBoard's writer, where there is TensorBoard, and that of `logger`
        self._config = config
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{path} must be a folder, and is a file")
        with ExitStack() as stack:
            stack.enter_context(locked(self.path))
            self._claim(config, described)
            self._open = stack.pop_all()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _claim(self, config: Config, described: Mapping[str, Any]) -> None:
        if read_config(self.path) is not None and not self.resume:
            raise ValueError(f"{self.path} already contains a run; continue it with --resume")
        check_config(self.path, config, described.get("fingerprints", {}))
        make_folder(self.path, "checkpoint")
        refuse_link(self.path / "tensorboard", self.path / "wandb")
        for folder in (self.path, self.checkpoints):
            remove_leftovers(folder)
        atomic_write(self.path / "environment.json", json.dumps(environment() | dict(described), indent=2))
        atomic_write(self.path / "config.json", json.dumps(dataclasses.asdict(config), indent=2))

    def newest(self) -> Path | None:
        """The newest checkpoint that is there, damaged or not."""
        return max(self.checkpoints.glob("epoch-*.pt"), default=None)

    def checkpoint(self) -> dict[str, Any] | None:
        """The state to continue from, None for the beginning; rows logged after the checkpoint are removed."""
        state = self._state() if self.resume else None
        done = 0 if state is None else state["epoch"]
        rows = [row for row in read_rows(self.path) if "final" not in row and row["epoch"] <= done]
        atomic_write(self.path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        if str(self.path).encode("utf-8", "replace") == os.fsencode(self.path):  # which TensorBoard takes for granted
            with suppress(ImportError):
                from torch.utils.tensorboard import SummaryWriter

                purged = None if state is None else done + 1
                self._boards.append(SummaryWriter(str(self.path / "tensorboard"), purge_step=purged))
        if self._config.logger == "wandb":
            self._boards.append(wandb.open_run(self.path, self._config))
        for board in self._boards:
            self._open.callback(board.close)
        return state

    def _state(self) -> dict[str, Any] | None:
        for path in sorted(self.checkpoints.glob("epoch-*.pt"), reverse=True):
            reason = "its content does not match its name"
            if path.stem.rpartition("-")[2] == sha256(path)[:32]:
                try:
                    state = torch.load(path, map_location="cpu", weights_only=True)
                    if isinstance(state, dict) and all(type(state.get(k)) is int for k in ("epoch", "batch")):
                        return state
                    reason = "it has no progress record"
                except Exception as error:  # a foreign file may raise anything
                    reason = first_line(error)
            warnings.warn(f"checkpoint {path} was skipped: {reason}", stacklevel=2)
            path.rename(path.with_name(path.name + ".damaged"))  # or it would count among the newest that are kept
        return None

    def save(self, state: Mapping[str, Any]) -> None:
        name = f"epoch-{state['epoch']:06}-batch-{state['batch']:08}.pt"
        with atomic_file(self.checkpoints / name, checked=True) as partial:
            torch.save(dict(state), partial)
        for old in sorted(self.checkpoints.glob("epoch-*.pt"))[:-KEPT]:
            old.unlink(missing_ok=True)

    def log(self, row: Mapping[str, Any]) -> None:
        append_line(self.path / "metrics.jsonl", json.dumps(row))
        for board in self._boards:
            for key, value in row.items():
                if isinstance(value, (int, float)) and key not in ("epoch", "final"):
                    board.add_scalar(key, value, row.get("epoch", row.get("epochs")))

    def finish(
        self,
        result: Mapping[str, Any],
        outputs: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        described: Mapping[str, str],
    ) -> None:
        """Writes the model, the outputs, the row that makes the run a finished one, checksums; checkpoints go last."""
        save_tensors(self.path / "model.safetensors", weights, described)
        save_tensors(self.path / "outputs.safetensors", outputs)
        self.log({"final": True, **result})
        sync(self.path / "metrics.jsonl")  # on the disk before the checkpoints are gone
        write_sums(self.path, _FINAL)
        remove_checkpoints(self.path)


def finished(
    run: str | os.PathLike[str], config: Config, resume: bool, fingerprints: Callable[[], Mapping[str, str]]
) -> dict[str, Any] | None:
    """The metrics of a run that needs no further training, None for any other; completes what a crash left at its end.

    run, config, resume: the folder, what is wanted in it, and whether a run in it may be continued
    fingerprints: of what is wanted, as in `build.fingerprints`
    """
    path = Path(run)
    if not resume or not _has_final_row(path):
        return None
    check_config(path, config, fingerprints())
    with locked(path):
        result = read_result(path)
        if result is None:  # someone removed them: training starts again only if that is wanted
            raise ValueError(f"{path} is a finished run without outputs.safetensors; choose another --out or remove it")
        left = any((path / "checkpoint").glob("epoch-*.pt"))
        has_model = (path / "model.safetensors").exists()
        if left and not has_model:
            return None  # a run of an older version: its last checkpoint becomes the model
        if left and not (path / SUMS).exists():
            write_sums(path, _FINAL)
        if has_model:
            remove_checkpoints(path)
        remove_leftovers(path)
    return {k: v for k, v in result.items() if k != "final"}


def check_config(run: Path, config: Config, fingerprints: Mapping[str, str]) -> None:
    """Raises if the folder contains a run with another configuration, or of other data."""
    if differing := differences(run, config, fingerprints):
        raise ValueError(f"{run} contains a run with {differing}")


def differences(run: Path, config: Config, fingerprints: Mapping[str, str] | None = None) -> str:
    """What decides the result and differs between the run of a folder and a configuration; empty if there is no run.

    run, config: the folder, and what is wanted in it
    fingerprints: of what is wanted, as in `build.fingerprints`; compared where the run recorded its own
    """
    found = read_config(run)
    if found is None:
        return ""
    if differing := found.differences(config):
        return differing
    if found.imbalance > 1 and "split_seed" not in read_json(run / "config.json"):
        return f"imbalance={found.imbalance:g} of an older version, which did not shuffle the classes"
    recorded, wanted = read_environment(run).get("fingerprints"), fingerprints or {}
    if not isinstance(recorded, dict):
        return ""
    changed = [key for key in wanted if key in recorded and recorded[key] != wanted[key]]
    told = []
    for key in changed:
        of = key.removesuffix("_imports")
        what = "it" if of == key else "a module that it imports"
        prints = f"fingerprint {str(recorded[key])[:8]}, now {wanted[key][:8]}"
        told.append(f"{of}={getattr(config, of)} as it was before {what} changed ({prints})")
    return "; ".join(told)


def check_same_data(runs: Iterable[str | os.PathLike[str]]) -> None:
    """Raises if runs that are to be compared recorded fingerprints of different data; without fingerprints they pass.

    runs: their folders
    """
    found: dict[tuple[str, int | None], dict[str, Path]] = {}
    for run in map(Path, runs):
        recorded, config = read_environment(run).get("fingerprints"), read_config(run)
        if isinstance(recorded, dict) and isinstance(of := recorded.get("data"), str) and config is not None:
            seen = found.setdefault((config.data, config.image_size), {})  # the size is part of the fingerprint
            seen.setdefault(of, run)
            if len(seen) > 1:
                (one, first), (other, second) = seen.items()
                raise ValueError(
                    f"{first} and {second} were trained on different data: {config.data} changed between them "
                    f"(fingerprints {one[:8]} and {other[:8]}); remove one of them and train it again"
                )


def _has_final_row(run: Path) -> bool:
    rows = read_rows(run)
    return bool(rows) and bool(rows[-1].get("final"))


def remove_checkpoints(run: Path) -> None:
    """Removes what a finished run no longer needs."""
    refuse_link(run / "checkpoint")
    for path in (run / "checkpoint").glob("epoch-*.pt"):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # damaged checkpoints stay, and with them the folder
        (run / "checkpoint").rmdir()


def save_tensors(path: Path, tensors: Mapping[str, Tensor], described: Mapping[str, str] | None = None) -> None:
    """Writes a .safetensors file with `described` as its metadata.

    Tensors that share memory, such as tied weights, are written once for each name: the format has no shared tensors.
    """
    from safetensors.torch import save_file

    held: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        place = tensor.untyped_storage().data_ptr()
        held[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    with atomic_file(path) as partial:
        save_file(held, partial, dict(described or {}))


def folder_name(head: str) -> str:
    """The folder of a head from how it is written on the command line.

    >>> folder_name("gsoftmax(lam=4, gaussians=tracked)")
    'gsoftmax-lam=4-gaussians=tracked'
    """
    return re.sub(r"[^\w.=+-]+", "-", head).strip("-")


def read_config(run: Path) -> Config | None:
    """The configuration of a run; None where there is no config.json."""
    path = run / "config.json"
    try:
        found = Config.from_file(read_json(path))
    except FileNotFoundError:
        return None
    except (TypeError, ValueError) as error:
        reason = str(error).removeprefix(f"{path} cannot be read: ")
        raise ValueError(f"{path} cannot be read: {reason}") from None
    verify(path)
    return found


def read_environment(run: str | os.PathLike[str]) -> dict[str, Any]:
    """environment.json of a run; empty where there is none."""
    path = Path(run) / "environment.json"
    try:
        found = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    verify(path)
    return found


def read_rows(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; an incomplete last line is ignored."""
    path = run / "metrics.jsonl"
    try:
        with open_read(path) as file:
            lines = file.read().split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return []
    rows = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read, line {number}: {first_line(error)}") from None
        if not isinstance(row, dict) or not ("final" in row or type(row.get("epoch")) is int):
            raise ValueError(f"{path} cannot be read, line {number}: neither an epoch's row nor the final one")
        rows.append(row)
    verify(path)
    return rows


def read_result(run: Path) -> dict[str, Any] | None:
    """The final metrics of a run; None where it is not finished."""
    rows = read_rows(run)
    whole = any((run / name).exists() for name in ("outputs.safetensors", METRICS_ONLY))
    return rows[-1] if rows and rows[-1].get("final") and whole else None


def keep_metrics(run: Path) -> None:
    """Removes all of a finished run but its configuration and metrics."""
    if (run / METRICS_ONLY).exists() or read_result(run) is None:
        return
    atomic_write(run / METRICS_ONLY, "Model and outputs of this run were not kept.\n")
    for name in ("model.safetensors", "outputs.safetensors"):
        (run / name).unlink(missing_ok=True)
    for name in ("tensorboard", "wandb", "checkpoint"):
        shutil.rmtree(run / name, ignore_errors=True)
    write_sums(run, _FINAL)


def notes(runs: Iterable[str | os.PathLike[str]]) -> list[str]:
    """What the data of some runs had to tell, such as how many images were left out; each sentence once.

    runs: their folders
    """
    found = (read_environment(run).get("data") for run in runs)
    return list(dict.fromkeys(note for data in found if isinstance(data, dict) for note in data.get("notes", [])))


def environment() -> dict[str, Any]:
    """Provenance of a number: versions, machine and command."""
    return {
        "gsoftmax": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "command": command_line(),
    }


def command_line() -> str:
    """The command line of this process, quoted for a shell."""
    program = Path(sys.argv[0]).name if sys.argv else ""
    start = ["python", "-m", "gsoftmax"] if program == "__main__.py" else [program]
    return shlex.join([*start, *sys.argv[1:]])
