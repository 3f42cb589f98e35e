"""Memory, file handles and files over many steps of one run, and over many runs of one comparison.

    python -m fuzz.long results/long.json 50000 500

Prints a line, and writes a row, at ten moments of each: all but the finished runs must stay as it is.  Linux only.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from gsoftmax import config, train, workers

BASE = config.Config(device="cpu", threads=1, head="gsoftmax", batch_size=8)
ROWS = 1297  # training rows of the digits


def measured(process: int | str = "self") -> dict[str, int]:
    """Memory in MiB, and open files, of a process."""
    kib = next(
        line for line in Path(f"/proc/{process}/status").read_text("utf-8").splitlines() if line.startswith("VmRSS")
    )
    return {"MiB": int(kib.split()[1]) >> 10, "open files": len(os.listdir(f"/proc/{process}/fd"))}


def children() -> list[int]:
    return [int(c) for c in Path(f"/proc/self/task/{os.getpid()}/children").read_text("utf-8").split()]


def size(folder: Path) -> int:
    """KiB of all files."""
    found = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a checkpoint that is being replaced
            found += path.stat().st_size
    return found >> 10


class Rows:
    """What was measured, as lines and in a file."""

    def __init__(self, path: str, made: Path) -> None:
        self.path, self.made, self.rows = path, made, []
        self.start = time.monotonic()

    def add(self, what: str, count: int, **more: Any) -> None:
        files = len(list((self.made / "tmp").iterdir()))
        row = {"what": what, "count": count, **measured(), "temporary files": files, **more}
        row["seconds"] = round(time.monotonic() - self.start)
        self.rows.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        if self.path:
            Path(self.path).write_text("[\n" + ",\n".join(map(json.dumps, self.rows)) + "\n]\n", "utf-8")


def steps(rows: Rows, wanted: int) -> None:
    """One run of many steps, with a checkpoint after every epoch."""
    out, each = rows.made / "run", -(-ROWS // BASE.batch_size)
    seen = 0

    def progress(event: dict[str, Any]) -> None:
        nonlocal seen
        seen += 1
        if seen % (wanted // 10) == 0:
            rows.add("steps of one run", seen, **{"KiB of its folder": size(out)})

    train.train(BASE.override({"epochs": -(-wanted // each)}), out, progress=progress)


def many(rows: Rows, wanted: int, jobs: int) -> None:
    """Many runs, in this process or in workers."""
    out = rows.made / f"runs-{jobs}"
    base = BASE.override({"epochs": 1, "train_fraction": 0.1, "split_seed": 0 if jobs == 1 else None})
    tasks = [workers.Task(base.override({"seed": seed}), out / f"seed-{seed}", None) for seed in range(wanted)]

    def progress(event: dict[str, Any]) -> None:
        if event["event"] == "end" and event["finished"] % (wanted // 10) == 0:
            more: dict[str, Any] = {"KiB per run": size(out) // event["finished"]}
            for i, child in enumerate(children()):
                more |= {f"worker {i} {key}": value for key, value in measured(child).items()}
            rows.add(f"runs, {jobs} at a time", event["finished"], **more)

    workers.run_tasks(tasks, jobs, progress)


def main(path: str = "", count: str = "50000", runs: str = "500") -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "tmp").mkdir()
        tempfile.tempdir = os.environ["TMPDIR"] = str(Path(made) / "tmp")  # for this process and its workers
        rows = Rows(path, Path(made))
        many(rows, int(runs), 1)
        many(rows, int(runs), 2)
        steps(rows, int(count))


if __name__ == "__main__":
    main(*sys.argv[1:])
