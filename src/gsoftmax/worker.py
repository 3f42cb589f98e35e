"""A process that trains runs for another one, `gsoftmax.workers`: tasks come in on stdin, events go out on stdout.

Both are lines of JSON.  Signals do nothing here but tell the parent, which decides for all workers; it asks this one to
stop by a line, {"stop": number}.  The end of stdin ends the process, whatever it does: its parent is gone or has no
more work.  Nothing here imports torch before the first task.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
import traceback
import warnings
from typing import Any

import gsoftmax

from . import messages, stopping


class Worker:
    """What the two threads of this process share."""

    def __init__(self, orders: int, events: int) -> None:
        self.orders, self.events = orders, events  # file descriptors
        self.tasks: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.stop = 0  # number of the signal for which the parent asked this process to stop
        self.has_state = False  # whether a run is there that could be saved

    def tell(self, event: dict[str, Any]) -> None:
        os.write(self.events, (json.dumps(event) + "\n").encode())  # at once, also from a signal's handler

    def asked(self) -> int:
        """Called by the run after every batch."""
        self.has_state = True
        return self.stop

    def listen(self) -> None:
        """Reads the parent's lines, in a thread of its own."""
        for line in os.fdopen(self.orders, "rb"):
            message = json.loads(line)
            if "stop" in message:
                self.stop = message["stop"]
                if not self.has_state:
                    os._exit(0)
            else:
                self.tasks.put(message)
        os._exit(0)

    def work(self) -> None:
        while not self.stop:
            task = self.tasks.get()
            try:
                how = gsoftmax.workers.attempt(gsoftmax.workers.Task.read(task), self.tell, self.asked)
                self.tell({"event": "ended", "how": how})
            except stopping.Stopped:
                break
            except Exception as error:
                self.tell({"event": "failed", "reason": messages.reason(error), "trace": traceback.format_exc()})
            self.has_state = False


def main() -> None:
    worker = Worker(os.dup(0), os.dup(1))
    # A process forked to read images closes sys.stdin, and would wait for ever for a lock that the listener held.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)  # what a run prints is no event
    for number in stopping.SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: worker.tell({"event": "signal", "number": int(number)}))
    if hasattr(signal, "pthread_sigmask"):  # the parent blocked them until here
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stopping.SIGNALS)
    warnings.showwarning = lambda message, *_, **__: worker.tell({"event": "warning", "text": str(message)})
    threading.Thread(target=worker.listen, daemon=True).start()
    worker.work()
    os._exit(0)  # without waiting for threads of libraries
