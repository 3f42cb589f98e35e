"""Signals and kills at every moment of `gsoftmax compare` and `train`: what happened, as a table.

    python -m fuzz.signals results/signals.json
    python -m fuzz.signals "" "compare report"      # some of it

A cell is a command that is started, hit at a moment, and watched.  Its processes must be gone in ten seconds (two after
a second signal), its status is 128 + n, one line says how to go on, and the same command, run again, ends with the bits
of a run that nobody disturbed.  Moments are read from the files of the runs.  The commands are forked from this
process, which has imported torch already; the workers of a comparison are real ones.  Linux only: it reads /proc.

Before two signals the command is kept busy, or it would have ended at the second one: workers are stopped, so that they
do not answer, and where there are none the main thread is inside a call of a library, which no signal interrupts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from gsoftmax import build, cli, compare, report, runs, train
from gsoftmax.report import page

SIGNALS = {"INT": signal.SIGINT, "TERM": signal.SIGTERM, "HUP": signal.SIGHUP}
MOMENTS = ("loading", "training", "checkpoint", "evaluating", "report")
SETTINGS = ["digits", "device=cpu", "threads=1", "epochs=4", "batch_size=8", "train_fraction=0.3"]
COMPARE = ["compare", *SETTINGS, "--heads", "softmax,gsoftmax", "--seeds", "1", "--jobs"]
COMMANDS = {
    "compare": [*COMPARE, "2"],  # two workers
    "compare-1": [*COMPARE, "1"],  # in the process itself
    "train": ["train", *SETTINGS, "head=gsoftmax"],
}
PATIENCE = 120.0  # seconds until the moment comes
LIMIT, AT_ONCE = 10.0, 2.0  # seconds after one signal, and after the second
AGAIN = 0.7  # seconds between the two
CALL = 100_000_000  # rounds of a hash: a call of a library that takes longer than all of this


@dataclass
class Cell:
    """What was done to a command, and what happened."""

    command: str
    moment: str
    signal: str  # INT, TERM, HUP, KILL; 2 behind it for two of them
    target: str  # parent, group, worker
    status: int | None = None  # as a shell shows it
    seconds: float = 0.0  # from the last signal to the end of the last process
    orphans: int = 0
    busy: bool | None = None  # whether the target was still there at the second signal
    line: str = ""  # what was said last
    same: bool = False  # whether the same command ended with the same bits
    wrong: str = ""  # what should not have happened

    @property
    def name(self) -> str:
        return f"{self.command} {self.moment} {self.signal} {self.target}"


def cells() -> Iterator[Cell]:
    """All cells of the table."""
    for moment in MOMENTS:
        for number in (*SIGNALS, "INT2", "TERM2", "KILL"):
            yield Cell("compare", moment, number, "parent")
            yield Cell("compare-1", moment, number, "parent")
            if moment != "report":
                yield Cell("train", moment, number, "parent")
            if moment != "report" and not number.endswith("2"):
                yield Cell("compare", moment, number, "worker")
            if number != "KILL":
                yield Cell("compare", moment, number, "group")


def long_call(begun: int) -> None:
    """A call of a library, also if a signal comes right after the byte that says so."""
    try:
        os.write(begun, b".")
    finally:
        hashlib.pbkdf2_hmac("sha256", b"", b"", CALL)


class Program:
    """A gsoftmax command, forked, in a session of its own."""

    def __init__(self, argv: list[str], said: Path, report: bool = True) -> None:
        reader, busy = os.pipe()
        self.busy = os.fdopen(reader, "rb", 0)  # closed with this object
        self.pid = os.fork()
        if self.pid:
            os.close(busy)  # so that reading ends with the process
            return
        os.setsid()
        for number in SIGNALS.values():
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, lambda *_: long_call(busy))
        with open(said, "wb", 0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        status = 70
        try:
            if not report:  # which takes longer than these runs
                cli._show_comparison = lambda *_: None
            status = cli.main(argv)
            sys.stdout.flush()
        finally:
            os._exit(status)

    def keep_busy(self, by_workers: bool) -> None:
        """Until a second signal, and longer.

        by_workers: whether the command waits for its workers; other children, such as `uname`, are none
        """
        workers = self.workers() if by_workers else []
        for pid in workers or [self.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if workers else signal.SIGUSR1)
        if not workers:
            self.busy.read(1)  # of two signals that wait, Python handles SIGINT first

    def workers(self) -> list[int]:
        with contextlib.suppress(FileNotFoundError):
            return [int(c) for c in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text("utf-8").split()]
        return []

    def ended(self) -> int | None:
        """The status as a shell shows it, None while the process runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid:
            return None
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code


def alive(session: int) -> list[int]:
    """The processes of a session, but for those that have ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, held = path.read_text("utf-8").rpartition(") ")[2].split()[:4]
            if int(held) == session and state != "Z":
                found.append(int(path.parent.name))
    return found


def reached(moment: str, out: Path) -> Callable[[], bool]:
    """Whether a moment has come, as the files say."""

    def rows() -> int:
        logs = [p for p in files() if p.name == "metrics.jsonl" and "partial" not in p.parent.name]
        return max((p.read_bytes().count(b"\n") for p in logs), default=0)

    def files() -> list[Path]:
        return [Path(folder, name) for folder, _, names in os.walk(out) for name in names]  # rglob fails if one goes

    return {
        "loading": lambda: out.exists(),
        "training": lambda: any(p.name == "config.json" for p in files()),
        "checkpoint": lambda: any(
            p.parent.name == "checkpoint" and ("partial" in p.name or p.suffix == ".pt") for p in files()
        ),
        "evaluating": lambda: rows() >= 4,
        "report": lambda: (out / "summary.json").exists(),
    }[moment]


def hit(cell: Cell, folder: Path, expected: dict[str, bytes]) -> None:
    """Runs a cell."""
    out, said = folder / "out", folder / "said"
    argv = [*COMMANDS[cell.command], "--out", str(out)]
    number = signal.SIGKILL if cell.signal == "KILL" else SIGNALS[cell.signal.removesuffix("2")]
    program, come = Program(argv, said), reached(cell.moment, out)
    try:
        end = time.monotonic() + PATIENCE
        while not come() or (cell.target == "worker" and not program.workers()):
            if program.ended() is not None or time.monotonic() > end:
                cell.wrong = "the moment did not come"
                return
            time.sleep(0.001)
        if cell.moment == "loading":  # workers import torch, or the network is made
            time.sleep(random.uniform(0.0, 2.0 if cell.command == "compare" else 0.02))
        elif cell.moment == "report" and not cell.signal.endswith("2"):
            time.sleep(random.uniform(0.0, 0.05))
        target = random.choice(program.workers()) if cell.target == "worker" else program.pid
        twice = cell.signal.endswith("2")
        if twice:
            program.keep_busy(by_workers=cell.command == "compare" and cell.moment != "report")
        for send in range(1 + twice):
            if send:
                time.sleep(AGAIN)
                cell.busy = program.pid in alive(program.pid)
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if cell.target == "group" else os.kill)(target, number)
        start = time.monotonic()
        killed_worker = cell.signal == "KILL" and cell.target == "worker"
        limit = PATIENCE if killed_worker else AT_ONCE if twice else LIMIT
        while (cell.status is None or alive(program.pid)) and time.monotonic() - start < limit:
            cell.status = program.ended() if cell.status is None else cell.status
            time.sleep(0.005)
        cell.seconds, cell.orphans = round(time.monotonic() - start, 2), len(alive(program.pid))
    finally:
        for pid in alive(program.pid):
            os.kill(pid, signal.SIGKILL)
        if cell.status is None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(program.pid, 0)
    words = said.read_text("utf-8", errors="replace")
    lines = (line for line in reversed(words.splitlines()) if line.startswith("gsoftmax: "))
    cell.line = next(lines, "").replace(str(out), "out")  # a temporary folder
    if cell.status is None or cell.orphans:
        cell.wrong = f"{cell.orphans} processes after {cell.seconds} s"
    elif killed_worker:
        if cell.status != 1 or "SIGKILL" not in cell.line:
            cell.wrong = "the lost run was not reported"
    elif cell.status not in (128 + number, 0) or (cell.status == 0 and cell.moment != "report"):
        cell.wrong = f"status {cell.status}"
    elif cell.busy is False:
        cell.wrong = "it had ended before the second signal"
    elif "Traceback" in words:
        cell.wrong = "a traceback"
    elif cell.status and cell.signal != "KILL" and "to continue" not in cell.line:
        cell.wrong = "no line says how to go on"
    again = [*argv, "--resume"] if cell.command == "train" and (out / "config.json").exists() else argv
    if cell.command == "compare":
        again = [*COMMANDS["compare-1"], "--out", str(out)]  # without workers that import torch: the result is the same
    program = Program(again, said, report=cell.moment == "report")
    while (status := program.ended()) is None:
        time.sleep(0.01)
    cell.same = status == 0 and contents(out) == expected
    if not cell.same:
        cell.wrong = cell.wrong or f"continued: status {status}, other bits\n{said.read_text('utf-8')}"


def contents(out: Path) -> dict[str, bytes]:
    """What must not change: the models and the outputs of all runs."""
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in sorted(out.rglob("*.safetensors"))}


def undisturbed(command: str, folder: Path) -> dict[str, bytes]:
    """The files of a command that nobody disturbs."""
    argv = [*COMMANDS["train" if command == "train" else "compare-1"], "--out", str(folder)]
    program = Program(argv, folder.with_suffix(".said"))
    while (status := program.ended()) is None:
        time.sleep(0.01)
    assert status == 0, folder.with_suffix(".said").read_text("utf-8")
    return contents(folder)


def run(todo: list[Cell], told: Callable[[Cell], None] = lambda cell: None) -> list[Cell]:
    """Runs cells and returns them, with what happened.

    todo, told: the cells, and what is called after each
    """
    random.seed(0)
    torch.set_num_threads(1)
    for module in (build, compare, report, train, runs):  # imported before the forks
        assert module
    page.vega()  # bundles JavaScript for over a second, and keeps Python's lock, without which no thread ends a process
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        expected = {name: undisturbed(name, folder / name) for name in {cell.command for cell in todo}}
        for i, cell in enumerate(todo):
            (folder / str(i)).mkdir()
            hit(cell, folder / str(i), expected[cell.command])
            shutil.rmtree(folder / str(i))
            told(cell)
    return todo


def main(path: str = "", only: str = "") -> int:
    """Runs the cells whose name starts with `only`, but for those that are in the file `path` already."""
    rows = json.loads(Path(path).read_bytes()) if path and Path(path).exists() else []
    had = {Cell(**row).name for row in rows}
    todo = [cell for cell in cells() if cell.name.startswith(only) and cell.name not in had]
    random.Random(0).shuffle(todo)  # what is cut short has seen every moment

    def told(cell: Cell) -> None:
        print(
            f"{cell.name:32} {cell.status!s:5} {cell.seconds:6.2f} s  {cell.wrong or 'same bits'}  {cell.line}",
            flush=True,
        )
        rows.append(asdict(cell))
        if path:
            text = "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n"
            Path(path).write_text(text, "utf-8")

    run(todo, told)
    hangs, changed = sum(row["status"] is None for row in rows), sum(not row["same"] for row in rows)
    orphans, wrong = sum(row["orphans"] for row in rows), sum(bool(row["wrong"]) for row in rows)
    print(f"{len(rows)} cells, {hangs} hangs, {orphans} orphans, {changed} with changed bits, {wrong} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
