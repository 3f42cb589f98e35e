"""Signals that ask a program to end, what they raise, and how long it may take.  Nothing here imports torch."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
AGAIN = 0.5  # seconds: `timeout` and schedulers send a signal twice, to the process and to its group
GRACE = 8.0  # seconds from the first signal to the end of the process
AT_ONCE = 1.0  # seconds after a second one


class Stopped(KeyboardInterrupt):
    """A signal asked the run to stop; what it had done is saved."""

    def __init__(self, where: str, signal_number: int = signal.SIGINT) -> None:
        super().__init__(where, signal_number)
        self.where, self.signal_number = where, int(signal_number)

    def __str__(self) -> str:
        return self.where


class Requests:
    """Notes the first signal within its context; another one, later, raises `Stopped`.

    Signals that are ignored, as under nohup, stay ignored.  Only the main thread gets signals.
    """

    def __init__(self) -> None:
        self.number = 0  # of the first signal
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Requests:
        self._before = replace_handlers(self.note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def note(self, number: int, frame: object = None) -> None:
        if not self.number:
            self.number, self._first = int(number), time.monotonic()
        elif time.monotonic() - self._first > AGAIN:
            raise Stopped("", self.number)

    def pass_on(self) -> None:
        """Hands a noted signal to the handler that was there before, after the end of the context."""
        handler = self._before.get(self.number)
        if callable(handler):
            handler(self.number, None)
        elif self.number:
            raise Stopped("", self.number)


def replace_handlers(handler: Callable[[int, Any], Any]) -> dict[int, Any]:
    """Installs a handler of the signals that are not ignored; the handlers before, none outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {n: signal.signal(n, handler) for n in SIGNALS if signal.getsignal(n) not in (signal.SIG_IGN, None)}


@contextmanager
def ending(goodbye: Callable[[], None]) -> Iterator[None]:
    """Within this context the first signal raises `Stopped`, and the process ends in time whatever it is doing.

    A handler in Python has to wait until a call of a library returns, and an exception until everything is tidied up.
    So a thread, woken by the interpreter's own handler, ends the process with status 128 + n if it is still there
    `GRACE` seconds after the signal, or `AT_ONCE` after a second one.

    goodbye: called before the thread ends the process
    """
    asked = Requests()

    def handle(number: int, frame: object) -> None:
        if not asked.number:
            asked.note(number)
            raise Stopped("", number)

    before = replace_handlers(handle)
    if not before:
        yield
        return
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    wakeup = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_end_in_time, args=(theirs, goodbye), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        ours.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_in_time(wakeup: socket.socket, goodbye: Callable[[], None]) -> None:
    number, first, deadline = 0, 0.0, float("inf")
    with wakeup:
        while True:
            now = time.monotonic()
            if not select.select([wakeup], [], [], None if not number else max(0.0, deadline - now))[0]:
                goodbye()
                os._exit(128 + number)
            received = wakeup.recv(64)
            if not received:
                return
            now = time.monotonic()
            for n in received:
                if n in SIGNALS and not number:
                    number, first, deadline = n, now, now + GRACE
                elif n in SIGNALS and now - first > AGAIN:
                    deadline = min(deadline, now + AT_ONCE)
