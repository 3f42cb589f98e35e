"""Heads x seeds under identical conditions, with intervals and tests of the differences.

out/HEAD/seed-0/ ...   the runs (see gsoftmax.train)
out/summary.json       every number of the tables
out/report.html        the page
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import build, measures, photos
from .config import Config, parse_head
from .data import Dataset
from .distributed import Stopped
from .files import atomic_write, locked, refuse_link
from .heads import DEFAULT, HEADS
from .recipes import Recipe, shortened
from .runs import differences, folder_name, read_config, read_result
from .summary import summarise
from .train import Diverged, train

__all__ = ["Comparison", "Task", "compare", "of_heads", "of_rows", "run_tasks", "split_heads"]


class Task(NamedTuple):
    """One run of a comparison."""

    config: Config  # with the run's head and seed
    out: Path  # its folder
    data_root: str | None  # where the datasets are
    may_diverge: bool = False  # a run that diverges is finished, without a result


class Comparison:
    """Configurations x seeds on one dataset, validated; nothing is written before `run`.

    configs: a configuration for every name, as `of_heads` and `of_rows` make them; the first is the reference
    seeds: a number of seeds, from 0 on, or the seeds
    out: the folder of all runs
    data_root: where the datasets are
    """

    def __init__(
        self,
        configs: Mapping[str, Config],
        seeds: int | Sequence[int],
        out: str | os.PathLike[str],
        data_root: str | None = None,
    ) -> None:
        self.heads, self.out = list(configs), Path(out)
        self.seeds = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
        if not self.heads or not self.seeds:
            raise ValueError(f"heads and seeds must not be empty, got {len(self.heads)} and {len(self.seeds)}")
        self.dataset = build.load_data(configs[self.heads[0]], data_root)
        self.tasks = [  # seeds outermost, so that pairs complete early
            Task(config.override({"seed": seed}), self.out / folder_name(name) / f"seed-{seed}", data_root)
            for seed in self.seeds
            for name, config in configs.items()
        ]
        _validate(list(configs.values()), self.dataset)
        for task in self.tasks:
            refuse_link(task.out.parent, task.out)

    def run(self, jobs: int | None = None, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
        """Trains what is not done yet and returns the summary.

        jobs: parallel runs, by default one per core or GPU
        progress: called with lines of text about the runs
        """
        with locked(self.out):
            run_tasks(self.tasks, jobs, progress)
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

    base, heads: as in `of_heads`
    seeds, out, data_root: as in `Comparison`; jobs, progress: as in `Comparison.run`
    """
    return Comparison(of_heads(base, heads, data_root), seeds, out, data_root).run(jobs, progress)


def of_heads(base: Config, heads: Sequence[str] | None = None, data_root: str | None = None) -> dict[str, Config]:
    """One configuration for every head.

    base: all other settings; its head options go to every head
    heads: as on the command line; None for those of the paper that suit the data
    data_root: where the datasets are

    >>> of_heads(Config(), ["softmax", "gsoftmax(lam=2)"])["gsoftmax(lam=2)"].head_options
    {'lam': 2}
    """
    base = base.override(photos.choose(base, data_root))
    if heads is None:
        several = build.load_data(base, data_root).multilabel
        heads = [name for name in DEFAULT if HEADS[name].multilabel or not several]
    found = {}
    for text in heads:
        name, options = parse_head(text)
        found[text] = base.override({"head": name, "head_options": {**base.head_options, **options}})
    return found


def of_rows(
    rows: Sequence[Recipe],
    heads: Sequence[str] | None = None,
    changes: Mapping[str, Any] | None = None,
    shorten: float = 1.0,
) -> dict[str, Config]:
    """The configurations of a family of the paper's rows, each with its own options.

    rows: of one family, such as wrn-cifar10
    heads: names choose rows; a head with options is the family's row of that head with these options changed
    changes: keys of every configuration
    shorten: factor by which the training is shorter, epochs and schedule alike

    >>> from gsoftmax.recipes import families
    >>> made = of_rows(families()["wrn-cifar10"], ["softmax", "gsoftmax", "gsoftmax(lam=2)"])
    >>> {name: config.head_options for name, config in made.items()}
    {'softmax': {}, 'gsoftmax': {'lam': 0.5}, 'gsoftmax(lam=2)': {'lam': 2}}
    """
    configs = {row.label: shortened(row.config(), shorten).override(changes or {}) for row in rows}
    if heads is None:
        return configs
    found = {}
    for text in heads:
        if text in configs:
            found[text] = configs[text]
            continue
        name, options = parse_head(text)
        same = {label: config for label, config in configs.items() if config.head == name}
        if same and not options:
            found |= same
            continue
        first = next(iter((same or configs).values()))
        kept = first.head_options if same else {}
        found[text] = first.override({"head": name, "head_options": {**kept, **options}})
    return found


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


DIVERGED = "diverged.txt"  # in the folder of a run that may diverge, and did


def _done(task: Task) -> bool:
    if read_result(task.out) is None and not (task.may_diverge and (task.out / DIVERGED).exists()):
        return False
    if read_config(task.out) is None:
        raise ValueError(f"{task.out} contains a result without config.json; choose another --out")
    if differing := differences(task.out, task.config, build.fingerprints(task.config, task.data_root)):
        raise ValueError(f"{task.out} contains a run with {differing}; choose another --out")
    return True


def run_tasks(tasks: Sequence[Task], jobs: int | None = None, progress: Callable[[str], None] | None = None) -> None:
    """Runs the tasks that are not finished yet.

    tasks: a finished one with another configuration in its folder is an error before anything runs
    jobs: parallel runs, by default one per core or GPU
    progress: called with lines of text, one per run or, for one run at a time, one per batch
    """
    todo, start = [task for task in tasks if not _done(task)], time.perf_counter()
    for count, task in enumerate(_run_all(todo, jobs, progress), start=1):
        if progress is not None:
            result = read_result(task.out) or {}
            headline = measures.headline("mAP" in result)
            value = headline.scale * result.get(headline.key, float("nan"))
            left = (time.perf_counter() - start) / count * (len(todo) - count)
            progress(f"{count}/{len(todo)}  {_name(task)}  {headline.title} {value:.2f}  {left:.0f} s left")


def default_jobs(config: Config) -> int:
    """Parallel runs where nobody says how many: one per GPU, or per core.

    config: of one of the runs
    """
    return _gpus(config) or os.cpu_count() or 1


def _gpus(config: Config) -> int:
    return torch.cuda.device_count() if build.pick_device(config.device).type == "cuda" else 0


def _name(task: Task) -> str:
    return f"{task.config.head_text()} seed {task.config.seed}"


def _run_all(tasks: Sequence[Task], jobs: int | None, progress: Callable[[str], None] | None = None) -> Iterator[Task]:
    """Runs tasks, `jobs` at a time, and yields each when it finishes."""
    if not tasks:
        return
    gpus = _gpus(tasks[0].config)
    jobs = min(jobs or default_jobs(tasks[0].config), len(tasks))
    if jobs == 1:
        for count, task in enumerate(tasks, start=1):
            name = f"{count}/{len(tasks)}  {_name(task)}"
            _run(task, progress=progress and functools.partial(_prefixed, progress, name))
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


def _run(task: Task, gpu: int | None = None, progress: Callable[[str], None] | None = None) -> None:
    config = task.config if gpu is None else task.config.override({"device": f"cuda:{gpu}"})
    resume = (task.out / "config.json").exists()
    try:
        train(config, task.out, data_root=task.data_root, resume=resume, progress=progress)
    except Diverged as error:
        if not task.may_diverge:
            raise
        atomic_write(task.out / DIVERGED, f"{error}\n")


def _prefixed(progress: Callable[[str], None], name: str, line: str) -> None:
    progress(f"{name}  {line}")
