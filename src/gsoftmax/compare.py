"""Heads x seeds under identical conditions, with intervals and tests of the differences.

out/comparison.json    heads and seeds
out/HEAD/seed-0/ ...   the runs (see gsoftmax.train)
out/summary.json       every number of the tables
out/report.html        the page
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from . import build, photos
from .config import Config, parse_head
from .data import Dataset
from .files import atomic_write, refuse_link, sealed
from .heads import DEFAULT, HEADS
from .progress import Event
from .recipes import Recipe, shortened
from .runs import folder_name
from .summary import PLAN, summarise
from .workers import Task, is_done, locked_when_free, run_tasks

__all__ = ["Comparison", "compare", "of_heads", "of_rows", "split_heads"]


class Comparison:
    """Configurations x seeds on one dataset, validated; nothing is written before `run`.

    configs: a configuration for every name, as `of_heads` and `of_rows` make them; the first is the reference
    seeds: a number of seeds, from 0 on, or the seeds
    out: the folder of all runs
    data_root: where the datasets are
    only: (K, N) for every Nth run from the Kth on; other processes train the others
    """

    def __init__(
        self,
        configs: Mapping[str, Config],
        seeds: int | Sequence[int],
        out: str | os.PathLike[str],
        data_root: str | None = None,
        only: tuple[int, int] = (1, 1),
    ) -> None:
        self.heads, self.out = list(configs), Path(out)
        self.seeds = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
        if not self.heads or not self.seeds:
            raise ValueError(f"heads and seeds must not be empty, got {len(self.heads)} and {len(self.seeds)}")
        if len(set(self.seeds)) < len(self.seeds) or len(set(map(folder_name, self.heads))) < len(self.heads):
            raise ValueError(f"heads and seeds must be different, got {', '.join(self.heads)} and {self.seeds}")
        self.dataset = build.load_data(configs[self.heads[0]], data_root)
        self.tasks = [  # seeds outermost, so that pairs complete early
            Task(config.override({"seed": seed}), self.out / folder_name(name) / f"seed-{seed}", data_root, title=name)
            for seed in self.seeds
            for name, config in configs.items()
        ]
        if not 1 <= only[0] <= only[1]:
            raise ValueError(f"only must be K/N with K from 1 to N, got {only[0]}/{only[1]}")
        self.mine = self.tasks[only[0] - 1 :: only[1]]
        _validate(list(configs.values()), self.dataset)
        for task in self.tasks:
            refuse_link(task.out.parent, task.out)

    def run(self, jobs: int | None = None, progress: Callable[[Event], None] | None = None) -> dict[str, Any] | None:
        """Trains what is not done yet, and returns the summary; None if runs of other processes are missing.

        jobs: parallel runs, by default one per core or GPU
        progress: called with events (see `gsoftmax.progress`)

        Several processes may do this in one folder.  Raises `gsoftmax.workers.Failed`, at the end, if runs failed.
        """
        for task in self.tasks:  # also those of other processes: runs of different data do not mix
            is_done(task)
        self.write_plan()
        run_tasks(self.mine, jobs, progress)
        if not all(map(is_done, self.tasks)):
            return None
        with locked_when_free(self.out):
            return summarise(self.out, self.heads, self.seeds)

    def write_plan(self) -> None:
        """Writes heads and seeds, from which `gsoftmax report` knows what is missing."""
        plan = json.dumps(sealed({"heads": self.heads, "seeds": self.seeds}), indent=2)
        with locked_when_free(self.out):
            atomic_write(self.out / PLAN, plan)


def compare(
    base: Config,
    heads: Sequence[str] | None,
    seeds: int | Sequence[int],
    out: str | os.PathLike[str],
    *,
    data_root: str | None = None,
    jobs: int | None = None,
    progress: Callable[[Event], None] | None = None,
) -> dict[str, Any]:
    """Trains every head with every seed, skipping what is done, and returns the summary.

    base, heads: as in `of_heads`
    seeds, out, data_root: as in `Comparison`; jobs, progress: as in `Comparison.run`
    """
    summary = Comparison(of_heads(base, heads, data_root), seeds, out, data_root).run(jobs, progress)
    assert summary is not None  # all runs are its own
    return summary


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
        if len(rows) == 1:
            raise ValueError(f"{rows[0].family} has one row, {rows[0].name}: choose more heads, or train that row")
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
