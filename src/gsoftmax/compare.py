"""Heads x seeds under identical conditions, and what changed, with intervals and tests.

out/HEAD/seed-0/ ...   the runs (see gsoftmax.train)
out/summary.json       every number of the tables
out/report.html        the page
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import build, measures
from .config import Config, parse_head
from .distributed import Stopped
from .files import locked
from .runs import folder_name, read_config, read_result
from .summary import summarise
from .train import train


@dataclass(frozen=True)
class Task:
    """One run of a comparison."""

    config: Config
    out: Path
    data_root: str | None


def split_heads(text: str) -> list[str]:
    """Heads separated by commas that are not inside parentheses.

    >>> split_heads("softmax, gsoftmax(lam=2, sigma=2)")
    ['softmax', 'gsoftmax(lam=2, sigma=2)']
    """
    heads = [part.strip() for part in re.split(r",(?![^(]*\))", text)]
    if not all(heads) or len(set(map(folder_name, heads))) < len(heads):
        raise ValueError(f"heads must be different and not empty, got {text!r}")
    return heads


def compare(
    base: Config,
    heads: Sequence[str],
    seeds: int | Sequence[int],
    out: str | os.PathLike[str],
    *,
    data_root: str | None = None,
    jobs: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Trains every head with every seed, skipping what is done, and returns the summary."""
    seeds = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not heads or not seeds:
        raise ValueError(f"heads and seeds must not be empty, got {len(heads)} and {len(seeds)}")
    out = Path(out)
    dataset = build.load_data(base, data_root)
    tasks = []
    for seed in seeds:  # seeds outermost: whole pairs early
        for head in heads:
            name, options = parse_head(head)
            config = base.override({"head": name, "head_options": {**base.head_options, **options}, "seed": seed})
            tasks.append(Task(config, out / folder_name(head) / f"seed-{seed}", data_root))
    _refuse_early(tasks[: len(heads)], dataset)
    with locked(out):
        _run_missing(tasks, jobs, dataset.multilabel, progress)
        return summarise(out, heads, seeds)


def _run_missing(
    tasks: Sequence[Task], jobs: int | None, multilabel: bool, progress: Callable[[str], None] | None
) -> None:
    todo = [t for t in tasks if not _done(t)]
    started = time.perf_counter()
    for count, task in enumerate(_run_all(todo, jobs), start=1):
        if progress is not None:
            result = read_result(task.out) or {}
            spent = time.perf_counter() - started
            left = spent / count * (len(todo) - count)
            headline = measures.headline(multilabel)
            progress(
                f"{count}/{len(todo)}  {task.config.head} seed {task.config.seed}  "
                f"{headline.title} {headline.scale * result.get(headline.key, float('nan')):.2f}  {left:.0f} s left"
            )


def _refuse_early(tasks: Sequence[Task], dataset: Any) -> None:
    """Heads that cannot be built on this data fail before anything is trained or written."""
    for task in tasks:
        build.validate(task.config, dataset)
        build.schedule(task.config, max(task.config.epochs, 1))
        if not task.config.pretrained and task.config.weights is None:
            with torch.device("meta"):
                build.optimizer(task.config, build.network(task.config, dataset))


def _done(task: Task) -> bool:
    if read_result(task.out) is None:
        return False
    found = read_config(task.out)
    if found is None:
        raise ValueError(f"{task.out} holds a result without a config.json; choose another --out")
    if differing := found.differences(task.config):
        raise ValueError(f"{task.out} contains a run with {differing}; choose another --out")
    return True


def _run_all(tasks: Sequence[Task], jobs: int | None) -> Any:
    """Runs tasks, `jobs` at a time, and gives each as it ends."""
    if not tasks:
        return
    gpus = torch.cuda.device_count() if build.pick_device(tasks[0].config.device).type == "cuda" else 0
    jobs = min(jobs or gpus or os.cpu_count() or 1, len(tasks))
    if jobs == 1:
        for task in tasks:
            _run(task, None)
            yield task
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_follow, initargs=(os.getpid(),)) as pool:
        waiting = {}
        try:
            for i, task in enumerate(tasks):
                waiting[pool.submit(_run_in_pool, task, i % gpus if gpus else None)] = task
            while waiting:
                done, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    task = waiting.pop(future)
                    future.result()
                    yield task
        except BaseException:
            for future in waiting:
                future.cancel()
            for process in list(pool._processes.values()):
                process.terminate()  # which makes a run save its state
            raise


def _follow(parent: int) -> None:
    """A run in a pool leaves Ctrl-C to the one who started it, and does not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _note)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


_stopped: list[int] = []  # signals that this worker has seen
_busy: list[bool] = []


def _note(number: int, frame: object) -> None:
    """Outside of a run's own watch: a signal is remembered, and ends what is being done."""
    _stopped.append(number)
    if _busy:
        raise Stopped("", number)


def _run_in_pool(task: Task, gpu: int | None) -> None:
    if _stopped:  # a pool hands out a few tasks ahead, which nobody can take back
        raise Stopped("", _stopped[0])
    _busy.append(True)
    try:
        _run(task, gpu)
    except KeyboardInterrupt as stopped:
        _stopped.append(getattr(stopped, "signal_number", signal.SIGINT))
        raise
    finally:
        _busy.clear()


def _run(task: Task, gpu: int | None) -> None:
    config = task.config if gpu is None else task.config.override({"device": f"cuda:{gpu}"})
    train(config, task.out, data_root=task.data_root, resume=(task.out / "config.json").exists())
