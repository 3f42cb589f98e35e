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
from .recipes import Recipe, changed, family, find, recipes, shortened
from .runs import read_config, read_environment, read_result, read_rows
from .tables import Cell, Shown, Table
from .workers import Task

__all__ = [
    "Plan",
    "Seed",
    "best_epoch",
    "by_label",
    "find_rows",
    "folder",
    "label",
    "labels",
    "not_recipe",
    "ours",
    "read_seeds",
    "rows_of_heads",
    "table",
    "tasks",
]


@dataclass(frozen=True)
class Seed:
    """A finished run of a row."""

    run: Path  # its folder
    seed: int  # of the initial weights, the order of the samples and the augmentation
    result: dict[str, Any]  # its final metrics
    best: dict[str, Any]  # the metrics of its best epoch, chosen on the test set; empty if only the last was tested
    label: str  # how it differs from the recipe; empty if it does not


def find_rows(what: str, row: str | None = None) -> list[Recipe]:
    """The rows of a table.

    what: table1, table2, table3 or table4, or scaled for rows scaled to smaller data
    row: one row, or what the names of several share, such as vgg-cifar10

    >>> [found.name for found in find_rows("table1", "vgg-cifar10")]
    ['vgg-cifar10-softmax', 'vgg-cifar10-lsoftmax', 'vgg-cifar10-gsoftmax']
    """
    known = [r for r in recipes().values() if r.is_row]
    rows = [r for r in known if r.table == what]
    if not rows:
        tables = ", ".join(sorted({r.table for r in known}, key=lambda table: (table == "scaled", table)))
        raise ValueError(f"unknown table {what!r}; tables are {tables}, figures are figure3 to figure8")
    chosen = [r for r in rows if row in (None, r.name, r.family)]
    if not chosen:
        hint = did_you_mean(str(row), {name for r in rows for name in (r.name, r.family)}, 3, 0.4)
        raise ValueError(f"{what} has no row {row!r}{hint}; `gsoftmax recipes` lists them")
    return chosen


def rows_of_heads(what: str) -> list[str]:
    """The names of one row of every head, which is what a figure shows; the first of the head in its family.

    what: a family, or one of its rows, which is then that of its head; any other name is returned as it is

    >>> rows_of_heads("coco"), rows_of_heads("coco-gsoftmax(0,5)")
    (['coco-softmax', 'coco-gsoftmax(0,1)'], ['coco-softmax', 'coco-gsoftmax(0,5)'])
    """
    found: dict[str, str] = {}
    for row in family(what):
        head = row.config().head
        found[head] = row.name if row.name == what else found.get(head, row.name)
    return [*found.values()] or [what]


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
            run = folder(out, recipe.name, plan.smoke) / f"seed-{seed}"
            found.append(Task(config, run, data_root, title=recipe.name))
    return found


def folder(out: str | os.PathLike[str], row: str, smoke: bool = False) -> Path:
    """The folder of a row's seeds.

    out, row: the folder of all runs, and the row's name
    smoke: whether the runs are on generated data
    """
    return Path(out) / "smoke" / row if smoke else Path(out) / row


def read_seeds(recipe: Recipe, rows: str | os.PathLike[str], seeds: Sequence[int] | None = None) -> list[Seed]:
    """The finished runs of a row, by seed.

    recipe: the row
    rows: the folder of its seeds
    seeds: which of them; None for all that are there
    """
    key = "mAP_voc12" if "mAP_voc12" in recipe.published else "error"
    names = [run.name[5:] for run in Path(rows).glob("seed-*")]
    found = []
    for seed in sorted(
        {int(name) for name in names if name.isdecimal()}.intersection(*([] if seeds is None else [seeds]))
    ):
        run = Path(rows) / f"seed-{seed}"
        if (result := read_result(run)) is not None:
            found.append(Seed(run, seed, result, best_epoch(run, key), label(run, recipe)))
    return found


def by_label(seeds: Sequence[Seed]) -> dict[str, list[Seed]]:
    """The runs of a row by how they differ from the recipe: the recipe itself first, then by number.

    seeds: finished runs

    A mean, an interval or a test is always of one such group.
    """
    found: dict[str, list[Seed]] = {}
    for one in seeds:
        found.setdefault(one.label, []).append(one)
    return dict(sorted(found.items(), key=lambda item: (item[0] != "", -len(item[1]))))


def label(run: Path, recipe: Recipe | None = None) -> str:
    """How a run differs from a row of the paper: "smoke", the keys that were changed, or nothing.

    run: its folder
    recipe: the row, by default the one that the run's configuration comes from
    """
    config = read_config(run)
    if config is None:
        return "without config.json" if recipe else ""
    if recipe is None and config.recipe is None:
        return ""
    data = read_environment(run).get("data")
    if isinstance(data, dict) and str(data.get("name")).endswith("(smoke)"):
        return "smoke"
    return changed(config, recipe)


def labels(runs: Mapping[tuple[str, int], Path]) -> dict[str, str]:
    """How the runs of each head differ from their rows of the paper, without the heads whose runs do not.

    runs: their folders, by head and seed
    """
    found: dict[str, set[str]] = {}
    for (head, _), run in runs.items():
        if text := label(run):
            found.setdefault(head, set()).add(text)
    return {head: " or ".join(sorted(texts)) for head, texts in found.items()}


def not_recipe(summary: Mapping[str, Any]) -> str:
    """One sentence about runs that are not the paper's rows; empty if there are none.

    summary: of a comparison, or the document of a report, with what `labels` returns under `not_recipe`

    >>> not_recipe({"not_recipe": {"softmax": "changed: lr=0.5", "gsoftmax": "changed: lr=0.5"}})
    "Not the paper's recipe: softmax, gsoftmax (changed: lr=0.5)."
    """
    names: dict[str, list[str]] = {}
    for head, text in summary.get("not_recipe", {}).items():
        names.setdefault(text, []).append(head)
    told = "; ".join(f"{', '.join(heads)} ({text})" for text, heads in names.items())
    return f"Not the paper's recipe: {told}." if told else ""


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

    title: what the rows are
    rows: the rows with their finished runs; runs that differ from their recipe in different ways are lines of their own
    """
    header = ("row", "metric", "published", "ours", "difference", "95 % from", "to", "published inside", "seeds")
    lines: list[tuple[Cell, ...]] = []
    for recipe, every in rows:
        for told, seeds in (by_label(every) or {"": []}).items():
            numbers: Mapping[str, float | None] = recipe.published or dict.fromkeys(find(recipe.scaled).published)
            for key, published in numbers.items():
                given = None if published is None else _number(published)
                cells = [measures.find(key).label, given, *ours(key, published, seeds)]
                lines.append((recipe.name, *cells, _best(key, seeds), told))
    columns = (*header, "best epoch, chosen on the test set", "not the recipe")
    published = any(recipe.published for recipe, _ in rows)
    always = set(header) - (set() if published else {"published", "difference", "published inside"})
    kept = [i for i, name in enumerate(columns) if name in always or any(line[i] not in (None, "") for line in lines)]
    note = "Ours: mean over seeds in the last epoch; interval of that mean over seeds (Student's t)."
    if published:
        note += " The published number is one run, whose own spread the interval does not contain."
    title += ", published and ours (%)" if published else ", ours (%)"
    return Table(title, tuple(columns[i] for i in kept), tuple(tuple(line[i] for i in kept) for line in lines), note)


def ours(key: str, published: float | None, seeds: Sequence[Seed]) -> tuple[Cell, ...]:
    """Our mean, its difference from the published number, its 95 % interval, whether that contains it, and the seeds.

    key, published: the metric, and the published number in percent; None where there is none
    seeds: runs of one configuration
    """
    if any(one.label == "smoke" for one in seeds):
        return "smoke ok", "no result", None, None, None, len(seeds)
    values = np.array([100 * one.result[key] for one in seeds if key in one.result])
    if not len(values) or len(values) < len(seeds):
        return None, None, None, None, None, len(seeds)
    mean = float(values.mean())
    apart = None if published is None else mean - published
    start = (_number(mean), None if apart is None else Shown(f"{apart:+.2f}", apart))
    if len(values) < 2:
        return *start, None, None, None, len(values)
    half = significance.t_quantile(0.975, len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
    same = apart is not None and not any(one.label for one in seeds)  # else the published number is of something else
    inside = None if apart is None or not same else "yes" if abs(apart) <= half else "no"
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
