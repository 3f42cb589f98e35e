"""The rows of the paper's tables: run over seeds, and compared with the published numbers.

OUT/ROW/seed-0/ ...         the runs (see gsoftmax.train)
OUT/smoke/ROW/seed-0/ ...   the runs on generated data
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import measures, significance
from .config import Config
from .messages import did_you_mean
from .recipes import Recipe, recipes, shortened
from .runs import read_config, read_environment, read_result, read_rows
from .tables import Cell, Shown, Table
from .workers import Task

__all__ = ["Plan", "Seed", "best_epoch", "find_rows", "folder", "label", "read_seeds", "table", "tasks"]


@dataclass(frozen=True)
class Seed:
    """A finished run of a row."""

    seed: int  # of the initial weights, the order of the samples and the augmentation
    result: dict[str, Any]  # its final metrics
    best: dict[str, Any]  # the metrics of its best epoch, chosen on the test set; empty if only the last was tested
    label: str  # how it differs from the recipe; empty if it does not


def find_rows(what: str, row: str | None = None) -> list[Recipe]:
    """The rows of a table.

    what: table1, table2, table3 or table4
    row: one row, or what the names of several share, such as vgg-cifar10

    >>> [found.name for found in find_rows("table1", "vgg-cifar10")]
    ['vgg-cifar10-softmax', 'vgg-cifar10-lsoftmax', 'vgg-cifar10-gsoftmax']
    """
    published = [r for r in recipes().values() if r.published]
    rows = [r for r in published if r.table == what]
    if not rows:
        tables = ", ".join(sorted({r.table for r in published}))
        raise ValueError(f"unknown table {what!r}; tables are {tables}, figures are figure3 to figure8")
    chosen = [r for r in rows if row in (None, r.name, r.family)]
    if not chosen:
        hint = did_you_mean(str(row), {name for r in rows for name in (r.name, r.family)}, 3, 0.4)
        raise ValueError(f"{what} has no row {row!r}{hint}; `gsoftmax recipes` lists them")
    return chosen


@dataclass(frozen=True)
class Plan:
    """How runs differ from their recipes."""

    changes: Mapping[str, Any]  # keys of the configuration
    smoke: bool = False  # two epochs on generated data
    factor: float = 1.0  # by which the training is shorter

    def config(self, recipe: Recipe) -> Config:
        """The configuration of a row.

        recipe: the row
        """
        return shortened(recipe.config(smoke=self.smoke), self.factor).override(self.changes)


def tasks(
    rows: Sequence[Recipe], seeds: Sequence[int], out: str | os.PathLike[str], plan: Plan, data_root: str | None
) -> list[Task]:
    """The runs of rows over seeds, seeds outermost.

    rows, seeds: what to run
    out, plan: the folder of all runs, and how they differ from the recipes
    data_root: where the datasets are
    """
    found = []
    for seed in seeds:
        for recipe in rows:
            config = plan.config(recipe).override({"seed": seed})
            found.append(Task(config, folder(out, recipe.name, plan.smoke) / f"seed-{seed}", data_root))
    return found


def folder(out: str | os.PathLike[str], row: str, smoke: bool = False) -> Path:
    """The folder of a row's seeds.

    out, row: the folder of all runs, and the row's name
    smoke: whether the runs are on generated data
    """
    return Path(out) / "smoke" / row if smoke else Path(out) / row


def read_seeds(recipe: Recipe, rows: str | os.PathLike[str]) -> list[Seed]:
    """The finished runs of a row, by seed.

    recipe: the row
    rows: the folder of its seeds
    """
    found, key = [], "mAP_voc12" if "mAP_voc12" in recipe.published else "error"
    for run in Path(rows).glob("seed-*"):
        config, result = read_config(run), read_result(run)
        if config is not None and result is not None:
            found.append(Seed(config.seed, result, best_epoch(run, key), label(recipe, run)))
    return sorted(found, key=lambda one: one.seed)


def label(recipe: Recipe, run: Path) -> str:
    """How a run differs from its recipe: "smoke", the keys that were changed, or nothing.

    recipe, run: the row, and the folder of a run
    """
    data = read_environment(run).get("data")
    if isinstance(data, dict) and str(data.get("name")).endswith("(smoke)"):
        return "smoke"
    config = read_config(run)
    if config is None:
        return "without config.json"
    published, texts = recipe.config(), []
    factor = published.epochs / max(config.epochs, 1)
    if 1 < factor <= published.epochs:
        short = shortened(published, factor)
        if (short.epochs, short.identity()["schedule"]) == (config.epochs, config.identity()["schedule"]):
            published, texts = short, [f"training shortened {factor:g} times"]
    mine, wanted = config.identity(), published.identity()
    texts += [f"{k}={mine[k]}" for k in sorted(wanted) if k != "seed" and mine[k] != wanted[k]]
    return f"changed: {', '.join(texts)}" if texts else ""


def best_epoch(run: Path, key: str) -> dict[str, Any]:
    """The metrics of the epoch with the best error or mAP, as the authors report it; {} if only the last was tested.

    run, key: the folder of a finished run, and the metric
    """
    rows = read_rows(run)
    tested = [row for row in rows if key in row and not row.get("final")]
    if not tested:
        return {}
    last = {"epoch": rows[-1].get("epochs"), **rows[-1]}
    sign = 1 if measures.find(key).smaller_is_better else -1
    return min([*tested, last], key=lambda row: (sign * row[key], row["epoch"]))


def table(title: str, rows: Sequence[tuple[Recipe, Sequence[Seed]]]) -> Table:
    """Published numbers beside ours: the mean over seeds, its 95 % interval, and whether it contains the published one.

    title: of the table
    rows: the rows with their finished runs
    """
    header = ("row", "metric", "published", "ours", "difference", "95 % from", "to", "published inside", "seeds")
    lines: list[tuple[Cell, ...]] = []
    for recipe, seeds in rows:
        for key, published in recipe.published.items():
            cells = [measures.find(key).label, _number(published), *_ours(key, published, seeds)]
            labels = "; ".join(sorted({one.label for one in seeds} - {""}))
            lines.append((recipe.name, *cells, _best(key, seeds), labels))
    columns = (*header, "best epoch, chosen on the test set", "not the recipe")
    kept = [i for i in range(len(columns)) if i < len(header) or any(line[i] not in (None, "") for line in lines)]
    note = (
        "Ours: mean over seeds in the last epoch; interval of that mean over seeds (Student's t). "
        "The published number is one run, whose own spread the interval does not contain."
    )
    return Table(title, tuple(columns[i] for i in kept), tuple(tuple(line[i] for i in kept) for line in lines), note)


def _ours(key: str, published: float, seeds: Sequence[Seed]) -> tuple[Cell, ...]:
    """The cells from `ours` to `seeds`."""
    if any(one.label == "smoke" for one in seeds):
        return "smoke ok", "no result", None, None, None, len(seeds)
    values = np.array([100 * one.result[key] for one in seeds if key in one.result])
    if not len(values):
        return None, None, None, None, None, len(seeds)
    mean = float(values.mean())
    start = (Shown(f"{mean:.2f}", mean), Shown(f"{mean - published:+.2f}", mean - published))
    if len(values) < 2:
        return *start, None, None, None, len(values)
    half = significance.t_quantile(0.975, len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
    inside = "yes" if abs(mean - published) <= half else "no"
    return *start, _number(mean - half), _number(mean + half), inside, len(values)


def _best(key: str, seeds: Sequence[Seed]) -> Cell:
    found = [(100 * one.best[key], one.best["epoch"]) for one in seeds if key in one.best and one.label != "smoke"]
    if not found:
        return None
    mean = float(np.mean([value for value, _ in found]))
    epochs = sorted({epoch for _, epoch in found})
    shown = f"{epochs[0]}" if len(epochs) == 1 else f"{epochs[0]}–{epochs[-1]}"
    return Shown(f"{mean:.2f} (epoch {shown})", mean)


def _number(value: float) -> Shown:
    return Shown(f"{value:.2f}", value)
