"""Heads x seeds under identical conditions, with intervals and tests of the differences.

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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import build, measures
from .config import Config, parse_head
from .data import Dataset
from .distributed import Stopped
from .files import locked
from .heads import HEADS
from .runs import folder_name, read_config, read_result
from .summary import summarise
from .train import train

__all__ = ["Comparison", "compare", "split_heads"]


class Task(NamedTuple):
    """One run of a comparison."""

    config: Config  # with the run's head and seed
    out: Path  # its folder
    data_root: str | None  # where the datasets are


class Comparison:
    """Heads x seeds on one dataset, validated; nothing is written before `run`.

    base: all settings but head and seed
    heads: as on the command line; None for all built-in ones that suit the data
    seeds: a number of seeds, from 0 on, or the seeds
    out: the folder of all runs
    data_root: where the datasets are
    """

    def __init__(
        self,
        base: Config,
        heads: Sequence[str] | None,
        seeds: int | Sequence[int],
        out: str | os.PathLike[str],
        data_root: str | None = None,
    ) -> None:
        self.out, self.dataset = Path(out), build.load_data(base, data_root)
        suitable = [name for name, head in HEADS.items() if head.multilabel or not self.dataset.multilabel]
        self.heads = suitable if heads is None else list(heads)
        self.seeds = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
        if not self.heads or not self.seeds:
            raise ValueError(f"heads and seeds must not be empty, got {len(self.heads)} and {len(self.seeds)}")
        self.tasks = []
        for seed in self.seeds:  # seeds outermost, so that pairs complete early
            for head in self.heads:
                name, options = parse_head(head)
                config = base.override({"head": name, "head_options": {**base.head_options, **options}, "seed": seed})
                self.tasks.append(Task(config, self.out / folder_name(head) / f"seed-{seed}", data_root))
        _validate([task.config for task in self.tasks[: len(self.heads)]], self.dataset)

    def run(self, jobs: int | None = None, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
        """Trains what is not done yet and returns the summary.

        jobs: parallel runs, by default one per core or GPU
        progress: called with one line of text per run
        """
        with locked(self.out):
            todo = [task for task in self.tasks if not _done(task)]
            start, headline = time.perf_counter(), measures.headline(self.dataset.multilabel)
            for count, task in enumerate(_run_all(todo, jobs), start=1):
                if progress is not None:
                    value = headline.scale * (read_result(task.out) or {}).get(headline.key, float("nan"))
                    left = (time.perf_counter() - start) / count * (len(todo) - count)
                    run = f"{task.config.head} seed {task.config.seed}"
                    progress(f"{count}/{len(todo)}  {run}  {headline.title} {value:.2f}  {left:.0f} s left")
            return summarise(self.out, self.heads, self.seeds)


def compare(
    base: Config,
    heads: Sequence[str] | None,
    seeds: int | Sequence[int],
    out: str | os.PathLike[str],
    *,
    data_root: str | None = None,
    jobs: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Trains every head with every seed, skipping what is done, and returns the summary.

    Arguments as in `Comparison` and as in `Comparison.run`.
    """
    return Comparison(base, heads, seeds, out, data_root).run(jobs, progress)


def split_heads(text: str) -> list[str]:
    """Heads separated by commas that are not inside parentheses.

    text: as on the command line

    >>> split_heads("softmax, gsoftmax(lam=2, sigma=2)")
    ['softmax', 'gsoftmax(lam=2, sigma=2)']
    """
    heads = [part.strip() for part in re.split(r",(?![^(]*\))", text)]
    if not all(heads) or len(set(map(folder_name, heads))) < len(heads):
        raise ValueError(f"heads must be different and not empty, got {text!r}")
    return heads


def _validate(configs: Sequence[Config], dataset: Dataset) -> None:
    """Raises for heads that cannot be built on this data, before anything is trained or written."""
    base = configs[0]
    build.validate(base, dataset)
    build.schedule(base, max(base.epochs, 1))
    with torch.device("meta"):
        backbone = build.backbone(base.override({"pretrained": False, "weights": None}), dataset)
        for config in configs:
            head = build.head(config, dataset, backbone.num_features)
            build.optimizer(config, build.Network(backbone, head))


def _done(task: Task) -> bool:
    if read_result(task.out) is None:
        return False
    found = read_config(task.out)
    if found is None:
        raise ValueError(f"{task.out} contains a result without config.json; choose another --out")
    if differing := found.differences(task.config):
        raise ValueError(f"{task.out} contains a run with {differing}; choose another --out")
    return True


def _run_all(tasks: Sequence[Task], jobs: int | None) -> Iterator[Task]:
    """Runs tasks, `jobs` at a time, and yields each when it finishes."""
    if not tasks:
        return
    gpus = torch.cuda.device_count() if build.pick_device(tasks[0].config.device).type == "cuda" else 0
    jobs = min(jobs or gpus or os.cpu_count() or 1, len(tasks))
    if jobs == 1:
        for task in tasks:
            _run(task)
            yield task
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_follow, initargs=(os.getpid(),)) as pool:
        futures = {}
        try:
            for i, task in enumerate(tasks):
                futures[pool.submit(_run_in_pool, task, i % gpus if gpus else None)] = task
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        except BaseException:
            for future in futures:
                future.cancel()
            for process in list(pool._processes.values()):
                process.terminate()  # which makes a run save its state
            raise


def _follow(parent: int) -> None:
    """Sets up a worker of the pool: it ignores Ctrl-C, which its parent handles, and dies with its parent."""
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
    """Handles SIGTERM outside the loop of a run: remembers it, and ends what the worker does."""
    _stopped.append(number)
    if _busy:
        raise Stopped("", number)


def _run_in_pool(task: Task, gpu: int | None) -> None:
    if _stopped:  # the pool prefetches tasks that cannot be cancelled
        raise Stopped("", _stopped[0])
    _busy.append(True)
    try:
        _run(task, gpu)
    except KeyboardInterrupt as stopped:
        _stopped.append(getattr(stopped, "signal_number", signal.SIGINT))
        raise
    finally:
        _busy.clear()


def _run(task: Task, gpu: int | None = None) -> None:
    config = task.config if gpu is None else task.config.override({"device": f"cuda:{gpu}"})
    train(config, task.out, data_root=task.data_root, resume=(task.out / "config.json").exists())
