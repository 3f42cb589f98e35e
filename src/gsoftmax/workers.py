"""Runs in worker processes, which are joined to this one by the files of the runs and two pipes each.

A worker (`gsoftmax.worker`) stays for the next tasks, since it takes seconds to import torch.  It ends with this
process, because its pipe does.  Several processes, also on several machines, may train the tasks of one folder: whoever
locks a run's folder `taken` first trains it, the others wait for its result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import build, measures, messages, stopping
from .config import Config
from .files import atomic_write, locked, refuse_link
from .progress import Event
from .runs import differences, read_config, read_result
from .stopping import Requests, Stopped
from .train import Diverged, train

__all__ = [
    "DIVERGED",
    "Failed",
    "Task",
    "Workers",
    "attempt",
    "default_jobs",
    "is_done",
    "locked_when_free",
    "run_tasks",
]

DIVERGED = "diverged.txt"  # in the folder of a run that may diverge, and did
TAKEN = "taken"  # folder in that of a run, locked by the process that trains it
STOP = 6.0  # seconds that workers have for saving what they do
POLL = 0.2  # seconds between two looks at signals and processes
PATIENCE = 120.0  # seconds to wait for the report of one other process
RETRY = 2.0  # seconds between two looks at runs that other processes train
RHYTHM = 0.25  # seconds between two events of a run
START = "import json, sys; sys.path[:], sys.argv[:] = json.loads(sys.argv[1]); from gsoftmax.worker import main; main()"

Progress = Callable[[Event], None]


class Task(NamedTuple):
    """One run of a comparison."""

    config: Config  # with the run's head and seed
    out: Path  # its folder
    data_root: str | None  # where the datasets are
    may_diverge: bool = False  # a run that diverges is finished, without a result
    gpu: int | None = None  # instead of the configuration's device
    title: str = ""  # what progress calls it instead of the head

    @property
    def name(self) -> str:
        """Title, or else head, and seed."""
        return f"{self.title or self.config.head_text()} seed {self.config.seed}"

    def written(self) -> dict[str, Any]:
        """The task as JSON has it."""
        return self._asdict() | {"config": dataclasses.asdict(self.config), "out": str(self.out)}

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> Task:
        """The task from what `written` returned.

        written: the dictionary, also after a way through JSON
        """
        config = Config.from_file(written["config"])
        return cls(**{**written, "config": config, "out": Path(written["out"])})


class Failed(RuntimeError):
    """Some of several runs failed; the others are finished."""

    def __init__(self, reasons: Sequence[str], traces: Sequence[str], runs: int) -> None:
        super().__init__(f"{len(reasons)} of {messages.plural(runs, 'run')} failed, the first: {reasons[0]}")
        self.reasons, self.traces = reasons, traces


def default_jobs(config: Config) -> int:
    """Parallel runs, one per core or GPU.

    config: of one of the runs
    """
    return _gpus(config) or os.cpu_count() or 1


def _gpus(config: Config) -> int:
    return torch.cuda.device_count() if build.pick_device(config.device).type == "cuda" else 0


def is_done(task: Task) -> bool:
    """Whether a run is finished; raises if its folder has a run of another configuration, finished or not.

    task: the run
    """
    done = read_result(task.out) is not None or (task.may_diverge and (task.out / DIVERGED).exists())
    if read_config(task.out) is None:
        if done:
            raise ValueError(f"{task.out} contains a result without config.json; choose another --out")
    elif differing := differences(task.out, task.config, build.fingerprints(task.config, task.data_root)):
        raise ValueError(f"{task.out} contains a run with {differing}; choose another --out")
    return done


def attempt(task: Task, progress: Progress, stop: Callable[[], int] | None = None) -> str:
    """Trains a run in this process: "trained", "found" if another process was faster, "taken" if one is training it.

    task: the run
    progress, stop: as in `gsoftmax.train.train`
    """
    claim = task.out / TAKEN
    refuse_link(claim)
    with contextlib.ExitStack() as stack:
        try:
            stack.callback(_remove, claim)  # after the lock is gone
            stack.enter_context(locked(claim))
        except (BlockingIOError, FileNotFoundError):  # locked, or just removed by the one who had it
            return "taken"
        if is_done(task):
            return "found"
        config = task.config if task.gpu is None else task.config.override({"device": f"cuda:{task.gpu}"})
        resume = (task.out / "config.json").exists()
        try:
            train(config, task.out, data_root=task.data_root, resume=resume, progress=_thin(progress), stop=stop)
        except BlockingIOError:  # trained by `gsoftmax train`
            return "taken"
        except Diverged as error:
            if not task.may_diverge:
                raise
            atomic_write(task.out / DIVERGED, f"{error}\n")
    return "trained"


def _remove(claim: Path) -> None:
    with contextlib.suppress(OSError):
        claim.rmdir()  # not while another process has its lock file in it


def _thin(progress: Progress) -> Progress:
    """Fewer events: a small run has hundreds of batches in a second."""
    last = 0.0

    def thinned(event: Event) -> None:
        nonlocal last
        if time.monotonic() - last > RHYTHM:
            last = time.monotonic()
            progress(event)

    return thinned


@contextlib.contextmanager
def locked_when_free(folder: Path) -> Iterator[None]:
    """As `files.locked`, but waits for other processes.

    folder: in which they write a summary or a report
    """
    end, owner = 0.0, ""
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(folder))
                break
            except BlockingIOError as error:
                if str(error) != owner:  # another one's turn
                    end, owner = time.monotonic() + PATIENCE, str(error)
                elif time.monotonic() > end:
                    raise
            time.sleep(0.1)
        yield


class _Tally:
    """How far the tasks are; tells it with every event."""

    def __init__(self, tasks: Sequence[Task], todo: Sequence[Task], progress: Progress | None, later: int = 0) -> None:
        self.later = later
        self.total, self.finished, self._progress = len(tasks), len(tasks) - len(todo), progress
        self.reasons: list[str] = []
        self.traces: list[str] = []
        self._start = 0.0  # when the first batch was trained
        self._at: dict[Path, tuple[float, float]] = {task.out: (0.0, 0.0) for task in todo}  # first seen, and now

    def tell(self, event: Event, task: Task | None = None) -> None:
        if self._progress is not None:
            named = {} if task is None else {"run": str(task.out), "name": task.name}
            self._progress({"event": event["event"], **named, **event})

    def step(self, task: Task, event: Event) -> None:
        self._start = self._start or time.monotonic() - 1e-3
        first, now = self._at[task.out]
        self._at[task.out] = first if now else event["done"], event["done"]
        self.tell(event | self._so_far(), task)

    def ended(self, task: Task, how: str) -> None:
        self.finished += 1
        self._at[task.out] = self._at[task.out][0] if how == "trained" else 1.0, 1.0
        result = read_result(task.out) or {}
        headline = measures.headline("mAP" in result)
        value = result.get(headline.key)
        told = {"measure": headline.title, "value": None if value is None else headline.scale * value}
        self.tell({"event": "end", **told, "trained": how == "trained", **self._so_far()}, task)

    def failed(self, task: Task, reason: str, trace: str = "") -> None:
        self._at.pop(task.out)
        self.reasons.append(f"{task.name}: {reason}")
        self.traces.append(trace)
        self.tell({"event": "failed", "reason": reason}, task)

    def _so_far(self) -> Event:
        """`all_left` assumes that the rest goes on as what was trained since the start."""
        trained = sum(now - first for first, now in self._at.values())
        rest = sum(1 - now for _, now in self._at.values()) + self.later
        spent = time.monotonic() - self._start if self._start else 0.0
        left = spent / trained * rest if trained > 0 and spent > 1 else None
        return {"finished": self.finished, "runs": self.total, "all_left": left}


class _Process:
    """A worker process and what it does."""

    def __init__(self, slot: int, inbox: queue.SimpleQueue[tuple[_Process, Event]]) -> None:
        self.slot = slot  # its number, for GPUs
        given = json.dumps([[entry for entry in sys.path if isinstance(entry, str)], sys.argv])
        with _blocked_signals():  # until the worker has handlers of its own
            self.process = subprocess.Popen(
                [sys.executable, "-c", START, given], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        self.task: Task | None = None
        self._inbox = inbox
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):  # half a line of a process that was killed
                self._inbox.put((self, json.loads(line)))

    def send(self, message: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it died, which is seen elsewhere
            self.process.stdin.write((json.dumps(message) + "\n").encode())
            self.process.stdin.flush()

    def dead(self) -> bool:
        """Whether it ended; all that it told is in the inbox then."""
        if self.process.poll() is None:
            return False
        self._reader.join(1.0)  # not for ever: a process that it started may hold the pipe
        return True

    def end(self) -> None:
        """Ends an idle process, or one that is not to save anything."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        if self.dead() and not self._reader.is_alive():
            self.process.stdout.close()

    def why(self) -> str:
        status = self.process.returncode
        if status >= 0:
            return f"its process ended with status {status}"
        with contextlib.suppress(ValueError):
            name = signal.Signals(-status).name
            return f"its process was ended by {name}" + (", perhaps for lack of memory" if name == "SIGKILL" else "")
        return f"its process was ended by signal {-status}"


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stopping.SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Workers:
    """Trains tasks, several at a time in processes of their own, or one at a time in this process.

    jobs: parallel runs, by default one per core or GPU
    progress: called with events (see `gsoftmax.progress`)

    The processes stay until the end of the context.
    """

    def __init__(self, jobs: int | None = None, progress: Progress | None = None) -> None:
        self.jobs, self.progress = jobs, progress
        self._inbox: queue.SimpleQueue[tuple[_Process, Event]] = queue.SimpleQueue()
        self._processes: list[_Process] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, tasks: Sequence[Task], stage: str = "", later: int = 0) -> None:
        """Trains the tasks that are not finished yet; raises `Failed` at the end if some failed.

        tasks: a finished one with another configuration in its folder is an error before anything runs
        stage: what the tasks are for, told with every event
        later: runs of the stages after this one, part of the time that is left
        """
        todo = [task for task in tasks if not is_done(task)]
        told = self.progress
        if told is not None and stage:
            told = lambda event, tell=told: tell(event | {"stage": stage})  # noqa: E731
        tally = _Tally(tasks, todo, told, later)
        if not todo:
            return
        for task in {task.config.data: task for task in todo}.values():
            build.load_data(task.config, task.data_root)  # a missing dataset is one error, not one for each run
        jobs = min(self.jobs or default_jobs(todo[0].config), len(todo))
        tally.tell({"event": "plan", "runs": len(tasks), "finished": tally.finished, "jobs": jobs})
        try:
            if jobs == 1:
                self._run_here(todo, tally)
            else:
                self._run_in_processes(todo, tally, jobs)
        except KeyboardInterrupt as stopped:
            number = getattr(stopped, "signal_number", signal.SIGINT)
            done = sum(map(is_done, tasks))
            raise Stopped(f"with {done} of {messages.plural(len(tasks), 'run')} finished", number) from stopped
        if tally.reasons:
            raise Failed(tally.reasons, tally.traces, len(tasks))

    def _run_here(self, todo: Sequence[Task], tally: _Tally) -> None:
        todo = deque(todo)
        taken: list[Task] = []
        while todo or taken:
            if not todo:
                tally.tell({"event": "waiting", "runs": len(taken)})
                time.sleep(RETRY)
                todo, taken = deque(taken), []
            task = todo.popleft()
            tally.tell({"event": "start"}, task)
            try:
                how = attempt(task, lambda event, task=task: tally.step(task, event))  # type: ignore[misc]
            except Exception as error:
                tally.failed(task, messages.reason(error), traceback.format_exc())
                continue
            if how == "taken":
                taken.append(task)
            else:
                tally.ended(task, how)

    def _run_in_processes(self, todo: Sequence[Task], tally: _Tally, jobs: int) -> None:
        gpus = _gpus(todo[0].config)
        todo = deque(todo)
        taken: list[Task] = []
        retry = 0.0
        with Requests() as asked:
            try:
                while todo or taken or any(process.task for process in self._processes):
                    if asked.number:
                        raise Stopped("", asked.number)
                    if taken and not todo and time.monotonic() > retry:
                        todo, taken, retry = deque(taken), [], time.monotonic() + RETRY
                    self._hand_out(todo, tally, jobs, gpus)
                    for process, event in self._events():
                        self._handle(process, event, tally, taken, asked)
                    for process in [process for process in self._processes if process.dead()]:
                        for other, event in self._events(0.0):  # what it told before
                            self._handle(other, event, tally, taken, asked)
                        self._processes.remove(process)
                        if process.task is not None:
                            tally.failed(process.task, process.why())
                        process.end()
            except BaseException as error:
                self._stop(getattr(error, "signal_number", signal.SIGTERM), asked)
                raise
        asked.pass_on()  # it came when all was done

    def _hand_out(self, todo: deque[Task], tally: _Tally, jobs: int, gpus: int) -> None:
        """Gives tasks to processes without one, and starts those that are missing."""
        idle = [process for process in self._processes if process.task is None]
        while todo and (idle or len(self._processes) < jobs):
            if not idle:
                slot = min(set(range(jobs)) - {process.slot for process in self._processes})
                idle = [_Process(slot, self._inbox)]
                self._processes += idle
            process, task = idle.pop(0), todo.popleft()
            process.task = task
            process.send(task._replace(gpu=process.slot % gpus if gpus else None).written())
            tally.tell({"event": "start"}, task)

    def _events(self, patience: float = POLL) -> Iterator[tuple[_Process, Event]]:
        """What processes told."""
        with contextlib.suppress(queue.Empty):
            yield self._inbox.get(timeout=patience) if patience else self._inbox.get_nowait()
            while True:
                yield self._inbox.get_nowait()

    def _handle(self, process: _Process, event: Event, tally: _Tally, taken: list[Task], asked: Requests) -> None:
        kind, task = event["event"], process.task
        if kind == "signal":
            asked.note(event["number"])
        elif kind == "warning":
            warnings.warn(event["text"], stacklevel=2)
        elif task is None:
            return
        elif kind == "step":
            tally.step(task, event)
        else:
            process.task = None
            if kind == "failed":
                tally.failed(task, event["reason"], event["trace"])
            elif event["how"] == "taken":
                taken.append(task)
                if len(taken) == 1:
                    tally.tell({"event": "waiting", "runs": 1})
            else:
                tally.ended(task, event["how"])

    def _stop(self, number: int, asked: Requests) -> None:
        """Lets the processes save what they do; a second signal, or too much time, ends them."""
        end = time.monotonic() + STOP
        try:
            for process in self._processes:
                process.send({"stop": number})
            while not all([process.dead() for process in self._processes]) and time.monotonic() < end:
                for _, event in self._events(0.05):
                    if event["event"] == "signal":
                        asked.note(event["number"])
        finally:
            self._end(0.0)

    def _end(self, patience: float = 1.0) -> None:
        """Ends all processes, which have nothing left to do or to save."""
        processes, self._processes = self._processes, []
        for process in processes:
            process.end()
        end = time.monotonic() + patience
        while not all([process.dead() for process in processes]) and time.monotonic() < end:
            time.sleep(0.01)
        for process in processes:
            process.process.kill()
            process.process.wait()
            process.end()


def run_tasks(tasks: Sequence[Task], jobs: int | None = None, progress: Progress | None = None) -> None:
    """Trains the tasks that are not finished yet.

    tasks, jobs, progress: as in `Workers`
    """
    with Workers(jobs, progress) as workers:
        workers.run(tasks)
