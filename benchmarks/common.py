"""What the benchmarks share: interleaved timing, where a number was measured, tables, and JSON under results/."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from gsoftmax.runs import environment

RESULTS = Path(__file__).resolve().parent.parent / "results"


@dataclass(frozen=True)
class Timing:
    """Seconds of one contender: the median of all rounds, the lowest median of a block of rounds, and the fastest.

    The lowest block is the one that other processes on the machine disturbed least; ratios are made of it.
    """

    median: float
    quiet: float
    fastest: float
    rounds: int


def interleaved(
    contenders: Mapping[str, Callable[[], Any]],
    *,
    seconds: float = 3.0,
    blocks: int = 5,
    warmup: int = 3,
    clock: Callable[[Callable[[], Any]], float] | None = None,
) -> dict[str, Timing]:
    """Time the contenders alternately, so that background load affects all of them equally.

    `seconds` is about what all of it takes.  `clock` calls its argument and returns the seconds, where a wall clock
    would not do (events on a GPU).

    >>> sorted(interleaved({"a": lambda: None, "b": lambda: sum(range(9))}, seconds=0.01))
    ['a', 'b']
    """
    clock = clock or wall_clock
    # wall time: `clock` may return the time of one call among many
    once = max(1e-9, min(wall_clock(lambda: [clock(f) for f in contenders.values()]) for _ in range(max(1, warmup))))
    rounds = max(3, min(2000, int(seconds / blocks / once)))
    blocks = max(1, min(blocks, int(seconds / rounds / once)))  # fewer where one call takes long
    times: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for _ in range(blocks):
        for of_all in times.values():
            of_all.append([])
        for _ in range(rounds):
            for name, f in contenders.items():
                times[name][-1].append(clock(f))
    return {name: _timing(of_all) for name, of_all in times.items()}


def wall_clock(f: Callable[[], Any]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def _timing(blocks: Sequence[Sequence[float]]) -> Timing:
    every = [t for block in blocks for t in block]
    return Timing(statistics.median(every), min(map(statistics.median, blocks)), min(every), len(every))


# --------------------------------------------------------------------------------------------------------- provenance


def provenance() -> dict[str, Any]:
    """The machine, the versions and the commit that a number belongs to."""
    info = environment() | {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", _module(), *(a for a in sys.argv[1:] if "/" not in a and a != "--out")]),
        # COMMIT: for a copy of the tree without its history
        "commit": os.environ.get("COMMIT") or _output("git", "rev-parse", "--short=12", "HEAD"),
        "uncommitted changes": "COMMIT" not in os.environ and bool(_output("git", "status", "--porcelain")),
        "processor": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
    }
    for package in ("numpy", "triton", "liger-kernel", "cut-cross-entropy", "quack-kernels", "torchmetrics"):
        try:
            info[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return info


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec else Path(sys.argv[0]).stem


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=RESULTS.parent, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    wide = [flag for flag in ("avx2", "avx512f", "avx512_bf16") if flag in flags]
    return f"{name} ({', '.join(wide)})" if wide else name


# ------------------------------------------------------------------------------------------------------------- output


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of the same keys as aligned text.

    >>> print(table([{"size": "1x2", "ratio": 0.5}, {"size": "10x20", "ratio": 1.25}]))
    size   ratio
    1x2     0.50
    10x20   1.25
    """
    cells = [list(rows[0]), *([_text(v) for v in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [all(isinstance(row[key], (int, float, type(None))) for row in rows) for key in rows[0]]
    lines = (
        "  ".join(c.rjust(w) if right else c.ljust(w) for c, w, right in zip(line, widths, numeric, strict=True))
        for line in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def verdict(value: float | None, bound: float) -> str:
    """PASS, or MISSED with what was allowed; a value that could not be measured is neither."""
    if value is None:
        return "not measured"
    return "PASS" if value <= bound else f"MISSED (at most {bound:g})"


def write(name: str, payload: Mapping[str, Any]) -> Path:
    """results/NAME.json, replaced whole."""
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{name}.json"
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(payload, indent=1) + "\n", "utf-8")
    temporary.replace(file)
    return file
