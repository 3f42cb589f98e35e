"""Faults at awkward moments: a process killed between any two steps of a write, a full disk, a folder that is gone.

    python -m fuzz.faults results/faults.json    every case, one line each; status 1 if a case went wrong
    python -m fuzz.faults disk                   those whose name contains a word

After the fault, the same command is given again.  It must finish with the very bytes of an undisturbed run, or refuse
in one line; half-written files of the killed process must be gone.  Each command runs in a forked process of this one.
A name that ends in .json is a file for the same lines.  Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import hashlib
import importlib
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from gsoftmax import cli, files, runs

QUICK = ["epochs=3", "train_fraction=0.3", "threads=1", "device=cpu", "head=gsoftmax"]
TRAIN = ["train", "digits", *QUICK, "--out", "run"]
COMPARE = [
    "compare",
    "digits",
    "--heads",
    "softmax,gsoftmax",
    "--seeds",
    "1",
    "--jobs",
    "1",
    *QUICK[:4],
    "--out",
    "all",
]
REPORT = ["report", "all", "--tables", "csv,md", "--figures", "svg"]
PRELOADED = ("torch._dynamo", "torch.utils.tensorboard", "safetensors.torch", "jinja2", "vl_convert")
PRELOADED += ("gsoftmax.train", "gsoftmax.compare", "gsoftmax.report")
SECONDS = 120  # after which a command hangs
IMPOSSIBLE = "not possible here"
REASON = r"cannot be written|file too large|no space left|no such file|permission denied"
CAPABILITIES = 0x20080522, 0  # version 3 of the header of capset, and this process


class Done(NamedTuple):
    """How a command ended."""

    status: int  # as a shell has it: 128 + the signal
    error: str  # standard error


def command(argv: list[str], cwd: Path, fault: Callable[[], object] = lambda: None) -> Done:
    """Runs `gsoftmax ARGV` in a forked process, after `fault` prepared it there."""
    reader, writer = os.pipe()  # not a file, whose size would be limited too
    child = os.fork()
    if child == 0:
        try:
            os.chdir(cwd)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(writer, 2)
            sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, encoding="utf-8", closefd=False) for n in (1, 2))
            fault()
            status = cli.main(argv)
        except SystemExit as stopped:
            status = int(stopped.code or 0)
        except BaseException as error:
            os.write(2, f"Traceback: {error!r}\n".encode())
            status = 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    end = time.monotonic() + SECONDS
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(reader), os.close(writer)
            return Done(-1, "no end")
        time.sleep(0.02)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8", errors="replace") as errors:
        return Done(128 - status if status < 0 else status, errors.read(2**16))


# ------------------------------------------------------------------------------------------------------------- faults


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(pattern: str, when: str, count: int = 1) -> Callable[[], None]:
    """SIGKILL at the write of a file: "half" written, "before" or "after" it gets its name; the count-th such file."""

    def prepare() -> None:
        replace, sync, append, seen = os.replace, files.sync, runs.append_line, []

        def named(path: object) -> bool:
            return fnmatch.fnmatch(Path(str(path)).name, pattern)

        def now_replace(source, target) -> None:
            if named(target):
                seen.append(1)
                if len(seen) == count and when == "before":
                    die()
            replace(source, target)
            if named(target) and len(seen) == count and when == "after":
                die()

        def now_sync(path: Path) -> None:
            if named(path) and len(seen) == count - 1 and when == "half":
                os.truncate(path, path.stat().st_size // 2)
                die()
            sync(path)

        def now_append(path: Path, text: str) -> None:
            if pattern != "final row" or '"final"' not in text:
                return append(path, text)
            if when == "half":
                with open(path, "a", encoding="utf-8") as file:
                    file.write(text[: len(text) // 2])
            if when == "after":
                append(path, text)
            die()

        os.replace, files.sync, runs.append_line = now_replace, now_sync, now_append

    return prepare


def limited(size: int) -> Callable[[], None]:
    """No file may become larger: what a write says on a full disk."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def meanwhile(change: Callable[[], object]) -> Callable[[], None]:
    """Something happens to the folder after the first epoch."""

    def prepare() -> None:
        log = runs.RunFolder.log

        def now_log(self, row) -> None:
            log(self, row)
            if row.get("epoch") == 1:
                change()

        runs.RunFolder.log = now_log
        sys.modules["torch.utils.tensorboard"] = None  # its thread prints a traceback when its file is gone

    return prepare


def unprivileged() -> None:
    """Root may write everywhere; without its capabilities permissions hold for it as for any owner of a file."""
    if os.geteuid() == 0 and ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(*CAPABILITIES), (ctypes.c_uint32 * 6)()):
        raise OSError("capabilities cannot be dropped")


@contextlib.contextmanager
def small_disk(where: Path, size: int) -> Iterator[bool]:
    """A file system of `size` bytes, where this user may make one."""
    where.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", where]
    made = shutil.which("mount") is not None and subprocess.run(words, capture_output=True).returncode == 0
    try:
        yield made
    finally:
        if made:
            subprocess.run(["umount", where], check=True)
        where.rmdir()


# -------------------------------------------------------------------------------------------------------------- cases


def digest(folder: Path) -> dict[str, str]:
    """What must not change by a single bit: outputs and models, by path."""
    found = sorted(folder.rglob("*.safetensors"))
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in found}


def told(done: Done) -> str:
    """What a command said last, or its status."""
    lines = [line for line in done.error.splitlines() if line.startswith("gsoftmax: ")]
    return lines[-1] if lines else f"status {done.status}"


def unclear(done: Done) -> str:
    """What is wrong with the words of a command that failed: they must end with one line that names the reason."""
    lines = done.error.splitlines()
    if [line for line in lines if line.startswith("gsoftmax: ")] != lines[-1:] or (done.status == 2 and len(lines) > 1):
        return f"not one line: {done.error[-300:]!r}"
    return "" if re.search(REASON, told(done)) else f"no reason: {done.error[-300:]!r}"


def wrong(folder: Path, first: Done, second: Done, undisturbed: dict[str, str], statuses: tuple[int, ...]) -> str:
    """What a case did not keep; empty if all is well."""
    if first.status not in statuses:
        return f"status {first.status}: {first.error[-200:]!r}"
    if first.status < 128 and (problem := unclear(first)):
        return problem
    if second.status != 0:
        return f"again: status {second.status}: {second.error[-200:]!r}"
    if digest(folder) != undisturbed:
        return "other bits than undisturbed"
    # other processes may be writing into the folder of a comparison: leftovers there are removed after an hour
    left = [p.name for p in folder.rglob("*.partial") if p.parent != folder or folder.name == "run"]
    locks = [p for p in folder.rglob(".lock")]
    return f"left behind: {left or locks}" if left or locks else ""


def refused(done: Done) -> tuple[str, str]:
    return told(done), unclear(done) if done.status == 2 else str(done)


class Case(NamedTuple):
    """A fault during a command, and the command that goes on."""

    name: str
    argv: list[str]
    again: list[str]
    fault: Callable[[], object]
    statuses: tuple[int, ...]  # with which the first command may end


WHEN = ("half", "before", "after")
RUN_FILES = ("config.json", "environment.json", "epoch-*.pt", "model.safetensors", "outputs.safetensors", "SHA256SUMS")
KILLED, FAILED, REFUSED = (128 + signal.SIGKILL,), (1,), (2,)


def cases() -> Iterator[Case]:
    resumed = [*TRAIN, "--resume"]
    for name in (*RUN_FILES, "final row"):
        for when in WHEN:
            yield Case(f"kill -9, {name}, {when}", TRAIN, resumed, killed(name, when), KILLED)
    for when in WHEN:
        yield Case(f"kill -9, second checkpoint, {when}", TRAIN, resumed, killed("epoch-*.pt", when, 2), KILLED)
        yield Case(f"kill -9, summary.json, {when}", COMPARE, COMPARE, killed("summary.json", when), KILLED)
        yield Case(f"kill -9, page of compare, {when}", COMPARE, COMPARE, killed("report.html", when), KILLED)
    for size in (0, 100, 5_000, 50_000, 150_000):
        yield Case(f"disk full, files up to {size:,} bytes", TRAIN, resumed, limited(size), REFUSED)
    yield Case("disk full, compare", COMPARE, COMPARE, limited(50_000), FAILED)
    gone = meanwhile(lambda: shutil.rmtree("run"))
    yield Case("folder deleted while training", TRAIN, resumed, gone, REFUSED)
    moved = meanwhile(lambda: os.rename("run", "elsewhere"))
    yield Case("folder renamed while training", TRAIN, resumed, moved, REFUSED)


def one(case: Case, room: Path, undisturbed: dict[str, dict[str, str]]) -> tuple[str, str]:
    """What the first command said, and what went wrong."""
    room.mkdir(parents=True)
    first = command(case.argv, room, case.fault)
    second = command(case.again, room)
    out = case.argv[-1]
    problem = wrong(room / out, first, second, undisturbed[out], case.statuses)
    shutil.rmtree(room.parent)
    return told(first), problem


def report_killed(room: Path, name: str, when: str) -> tuple[str, str]:
    """A report that was killed left whole files; half-written ones are removed an hour later, by the next report."""
    before = digest(room / "all")
    first, second = command(REPORT, room, killed(name, when)), command(REPORT, room)
    left = [p for p in (room / "all").rglob("*.partial")]
    for path in (p for folder in left for p in (*folder.iterdir(), folder)):
        os.utime(path, (1, 1))
    third = command(REPORT, room)
    whole = (room / "all/report.html").read_text("utf-8").rstrip().endswith("</html>")
    good = (first.status, second.status, third.status) == (137, 0, 0) and digest(room / "all") == before and whole
    gone = not list((room / "all").rglob("*.partial"))
    return told(first), "" if good and gone else f"{first} {second} {third}"


def read_only_train(room: Path) -> tuple[str, str]:
    (room / "read-only").mkdir(0o555)
    return refused(command([*TRAIN[:-1], "read-only/run"], room, unprivileged))


def read_only_report(room: Path) -> tuple[str, str]:
    shutil.copytree(room / "all", room / "protected")
    for path in [room / "protected", *(room / "protected").rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    return refused(command([*REPORT[:1], "protected", *REPORT[2:]], room, unprivileged))


def other_device(room: Path, undisturbed: dict[str, str]) -> tuple[str, str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as device:
        if os.stat(device).st_dev == room.stat().st_dev:
            return IMPOSSIBLE, ""
        done = command([*TRAIN[:-1], f"{device}/run"], room)
        same = done.status == 0 and digest(Path(device) / "run") == undisturbed
    return told(done), "" if same else str(done)


def full_disk(room: Path, size: int) -> tuple[str, str]:
    with small_disk(room / "disk", size) as made:
        if not made:
            return IMPOSSIBLE, ""
        said, problem = refused(command([*TRAIN[:-1], "disk/run"], room))
        return said, problem or "".join(map(str, (room / "disk").rglob("*.partial")))


def two_processes(room: Path) -> tuple[str, str]:
    holder = os.fork()
    if holder == 0:
        with files.locked(room / "run"):
            time.sleep(SECONDS)
        os._exit(0)
    while not (room / "run" / ".lock").exists() or not (room / "run" / ".lock").stat().st_size:
        time.sleep(0.01)
    done = command([*TRAIN, "--resume"], room)
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    after = command([*TRAIN, "--resume"], room)
    good = done.status == 2 and "is in use by process" in done.error and after.status == 0
    return re.sub(r" process \d+ on .*", " another process", told(done)), "" if good else f"{done} {after}"


Fault = tuple[str, list[str], Callable[[], tuple[str, str]]]  # name, command, and what that said and did wrong


def faults(folder: Path, good: Path, undisturbed: dict[str, dict[str, str]]) -> Iterator[Fault]:
    """All faults: each of `cases` in a folder of its own, then those of reports, folders, devices and processes."""
    for i, case in enumerate(cases()):
        yield case.name, case.argv, partial(one, case, folder / str(i) / "cwd", undisturbed)
    for name in ("report.html", "*.csv", "tables.md", "*.svg"):
        for when in WHEN:
            yield f"kill -9, report, {name}, {when}", REPORT, partial(report_killed, good, name, when)
    yield "read-only folder, train", [*TRAIN[:-1], "read-only/run"], partial(read_only_train, good)
    yield "read-only folder, report", [*REPORT[:1], "protected", *REPORT[2:]], partial(read_only_report, good)
    yield "folder on another device", [*TRAIN[:-1], "device/run"], partial(other_device, good, undisturbed["run"])
    for size in (2**16, 2**18, 2**19):
        yield f"disk of {size:,} bytes", [*TRAIN[:-1], "disk/run"], partial(full_disk, good, size)
    yield "another process has the folder", [*TRAIN, "--resume"], partial(two_processes, good)


def main(*words: str) -> int:
    """Runs the faults whose names contain all words.

    words: a name that ends in .json is a file for what happened
    """
    path = next((word for word in words if word.endswith(".json")), "")
    words = tuple(word for word in words if not word.endswith(".json"))
    for name in PRELOADED:  # once, and not in every process
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    torch.set_num_threads(1)  # a forked process has none of the others
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        good = Path(folder) / "undisturbed" / "cwd"
        good.mkdir(parents=True)
        begun = command(TRAIN, good), command(COMPARE, good)
        assert [done.status for done in begun] == [0, 0], begun
        undisturbed = {name: digest(good / name) for name in ("run", "all")}
        for name, argv, run in faults(Path(folder), good, undisturbed):
            if not all(word in name for word in words):
                continue
            said, problem = run()
            ok = None if said == IMPOSSIBLE else not problem
            said = (problem or said).replace(folder, "")
            print(f"{ {True: 'ok', False: 'WRONG', None: '-'}[ok]:6}{name:48}{said}"[:240], flush=True)
            rows.append({"name": name, "command": f"gsoftmax {shlex.join(argv)}", "said": said, "ok": ok})
            if path:
                Path(path).write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", "utf-8")
    failed, left_out = (sum(row["ok"] is state for row in rows) for state in (False, None))
    print(f"{len(rows)} faults, {failed} went wrong, {left_out} {IMPOSSIBLE}")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
