"""Progress of runs, as events and as what is shown of them.  Nothing here imports torch.

An event is a dictionary that can be written as JSON.  Its keys:

    event    plan, start, step, end, failed or waiting
    plan     runs, finished (before the start), jobs
    start    run (its folder), name
    step     run, name, epoch, epochs, loss, rate (examples per second), left (seconds), done (part of the run, 0 to 1)
    end      run, name, measure, value, trained (whether by this process)
    failed   run, name, reason
    waiting  runs (that other processes train)

The steps and ends of several runs also say how far all of them are: finished, runs, and all_left in seconds, which is
None until there is an estimate.  `stage` names the part of a tuning, whose all_left includes the parts after it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TextIO

from .messages import plural

__all__ = ["Event", "Json", "Lines", "Live", "discard", "show", "text", "told_late"]

Event = dict[str, Any]
OFTEN = 0.1  # seconds between two drawings on a terminal
RHYTHM = 1.0  # seconds between two steps of a run in JSON
SOME_RUNS, SOME_STEPS = 10.0, 60.0  # seconds before a line about a finished run, and about a running one


def text(event: Event) -> str:
    """One line about an event.

    event: as described above

    >>> text({"event": "step", "epoch": 2, "epochs": 5, "loss": 0.5, "rate": 1234.5, "left": 61.2})
    'epoch 2/5  loss 0.5000  1,234/s  0:01:01 left'
    """
    kind, name = event["event"], event.get("name", "")
    if kind == "step":
        loss = "not finite" if event["loss"] is None else f"{event['loss']:.4f}"
        parts = [name, f"epoch {event['epoch']}/{event['epochs']}", f"loss {loss}"]
        parts += [f"{event['rate']:,.0f}/s", f"{timedelta(seconds=round(event['left']))} left"]
    elif kind == "end":
        parts = [f"{event['finished']}/{event['runs']}", name]
        parts += [f"{event['measure']} {event['value']:.2f}"] if event["value"] is not None else ["diverged"]
        parts += [] if event["trained"] else ["by another process"]
        parts += [_about(event)]
    elif kind == "failed":
        parts = [f"failed: {name}: {event['reason']}"]
    elif kind == "waiting":
        parts = [f"waiting for {plural(event['runs'], 'run')} of other processes"]
    else:
        parts = [name, "starts"]
    return "  ".join(part for part in (event.get("stage", ""), *parts) if part)


def _about(event: Event) -> str:
    seconds = event.get("all_left")
    if seconds is None:
        return ""
    return f"about {timedelta(seconds=round(seconds))} left for all" if event["finished"] < event["runs"] else ""


def _together(event: Event) -> str:
    """How far all runs are."""
    return ", ".join(filter(None, (f"{event['finished']} of {event['runs']} runs finished", _about(event))))


def show(words: str, stream: TextIO) -> None:
    """Writes at once.  Where a pipe is closed or a terminal is gone, nothing more is written, and work goes on.

    words, stream: what is shown, with its line feeds, and where
    """
    try:
        print(end=words, file=stream, flush=True)
    except OSError:
        discard(stream)


def discard(stream: TextIO) -> None:
    """Sends what is still written to a stream nowhere.

    stream: of a file
    """
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Live:
    """Shows the running runs on a terminal, a line each, and the finished ones above.

    stream: the terminal
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._height, self._last = stream, 0, 0.0
        self._running: dict[str, str] = {}
        self._below = ""

    def __call__(self, event: Event) -> None:
        kind, run = event["event"], event.get("run", "")
        above = ""
        if kind in ("start", "step"):
            self._running[run] = text(event)
        elif kind in ("end", "failed"):
            self._running.pop(run, None)
            above = text(event)
        if kind == "waiting":
            self._below = text(event)
        elif event.get("runs", 1) > 1 and "finished" in event:
            self._below = _together(event)
        if kind != "step" or time.monotonic() - self._last > OFTEN:
            self._draw(above)

    def clear(self) -> None:
        """Removes the lines of the running runs."""
        self._running, self._below = {}, ""
        if self._height:
            self._draw()

    def _draw(self, above: str = "") -> None:
        columns = shutil.get_terminal_size().columns - 1
        lines = [line[:columns] for line in (*self._running.values(), self._below) if line]
        erase = f"\x1b[{self._height}A\x1b[J" if self._height else ""
        show(erase + "".join(f"{line}\n" for line in (above, *lines) if line), self._stream)
        self._height, self._last = len(lines), time.monotonic()


class Lines:
    """Prints a line about what happens from time to time, for a log: the first when a run starts, or after ten seconds.

    stream: the file
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._last = stream, time.monotonic()
        self._pauses = {"failed": 0.0, "start": 0.0, "end": SOME_RUNS, "step": SOME_RUNS, "waiting": SOME_STEPS}

    def __call__(self, event: Event) -> None:
        pause = self._pauses.get(event["event"])
        if pause is None or time.monotonic() - self._last < pause:
            return
        line = text(event)
        if event["event"] == "step" and "finished" in event:
            line += f"  ({_together(event)})"
        show(f"{line}\n", self._stream)
        self._last = time.monotonic()
        self._pauses |= {"start": math.inf, "step": SOME_STEPS}

    def clear(self) -> None:
        """Nothing: a log keeps its lines."""


class Json:
    """Writes events as JSON, one a line; steps of a run at most once a second.

    write: called with each line
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._last: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        run, now = event.get("run", ""), time.monotonic()
        if event["event"] == "step":
            if now - self._last.get(run, 0.0) < RHYTHM:
                return
            self._last[run] = now
        self._write(json.dumps(event))

    def clear(self) -> None:
        """Nothing: lines stay."""


@contextlib.contextmanager
def told_late(tell: Callable[[], None], seconds: float = SOME_RUNS) -> Iterator[None]:
    """Calls `tell`, in another thread, if the context lasts longer.

    tell: prints a line
    seconds: how long it may be silent
    """
    timer = threading.Timer(seconds, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
