"""The paper's tables and figures from finished runs, with the published values beside ours.

RUNS/ROW/seed-K/   a run of a row of the paper's tables (see gsoftmax.reproduce)

Bars and tables have means over seeds; points and Gaussians are of the first seed.  A run that is not the recipe is
labelled in every table and figure that it enters, and no mean is over runs that differ in more than the seed.
"""

from __future__ import annotations

import json
import os
import shlex
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import measures, recipes, significance
from ..analyze import Analysis, analyze
from ..messages import unknown
from ..outputs import open_outputs
from ..recipes import Recipe
from ..reproduce import Seed, by_label, not_recipe, ours, read_seeds
from ..runs import read_config
from ..tables import Cell, Shown, Table, plus_minus
from . import specs
from .data import PAPER, Document, add_analysis, blank, some_classes, some_points, with_intervals
from .figures import FORMATS, class_panels, compose, panel, save
from .specs import Spec
from .tables import p_cell

__all__ = ["FIGURES", "Figure", "figure", "paper_tables"]


@dataclass(frozen=True)
class Figure:
    """A figure of the paper."""

    title: str  # without the number; {data} is what was trained on
    rows: tuple[str, ...]  # recipes whose runs it shows
    classes: tuple[str, ...] | str  # names, "all", "first 10" or "average"
    network: str  # which the published values are of
    said: str = ""  # what the paper says of it in words
    published: Mapping[tuple[str, str], Mapping[str, float | str]] = field(
        default_factory=dict
    )  # by class and quantity


_WRN = {
    data: tuple(f"wrn-{data}-{head}" for head in ("softmax", "lsoftmax", "gsoftmax"))
    for data in ("cifar10", "cifar100")
}
_COCO = ("coco-softmax", "coco-gsoftmax(0,1)")
_DATA = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "coco": "MS COCO", "nuswide": "NUS-WIDE"}
_INSIDE = "impostors in [-5, 0], %"
_BLOCK = 4096  # rows of outputs read at a time
_HEADS = ("softmax", "lsoftmax", "gsoftmax")

# Values that the paper's text gives for its figures 3 to 8.
FIGURES = {
    "figure3": Figure(
        "x against p on the test set",
        (*_WRN["cifar10"], *_WRN["cifar100"]),
        ("airplane", "aquarium_fish"),
        "wide ResNet",
        "The paper's ranges are approximate.",
        {
            ("airplane", "x, min"): dict(zip(_HEADS, (0, 0, 0), strict=True)),
            ("airplane", "x, max"): dict(zip(_HEADS, (11, 24, 9), strict=True)),
            ("airplane", _INSIDE): {"gsoftmax": "most"},
            ("aquarium_fish", "x, min"): dict(zip(_HEADS, (0, 0, 0), strict=True)),
            ("aquarium_fish", "x, max"): dict(zip(_HEADS, (15, 14, 11), strict=True)),
            ("aquarium_fish", _INSIDE): {"gsoftmax": "most"},
        },
    ),
    "figure4": Figure(
        "x against p, Gaussians of x and class geometry on {data}",
        _COCO,
        ("cow", "baseball bat"),
        "ResNet-101",
        published={
            ("cow", "separability"): {"softmax": 1.8, "gsoftmax": 4.3},
            ("baseball bat", "compactness"): {"softmax": 2.1, "gsoftmax": 2.3},
        },
    ),
    "figure5": Figure(
        "Gaussians of x and class geometry on the test set",
        (*_WRN["cifar10"], *_WRN["cifar100"]),
        ("airplane", "aquarium_fish"),
        "wide ResNet",
        "The paper says that compactness, separability and ratio of G-softmax are overall better; it gives no numbers.",
    ),
    "figure6": Figure(
        "class geometry of every class of {data}",
        _WRN["cifar10"],
        "all",
        "wide ResNet",
        "The paper says that G-softmax is the highest in most classes of both sets, and L-softmax the lowest; "
        "it gives no numbers.",
    ),
    "figure7": Figure(
        "class geometry of the first 10 classes of {data}",
        _WRN["cifar100"],
        "first 10",
        "wide ResNet",
        "The paper says that G-softmax is above softmax in most classes of both sets, and that L-softmax is the "
        "highest in most classes of the training set and the lowest in most of the test set; it gives no numbers.",
    ),
    "figure8": Figure(
        "average class geometry over all classes of {data}",
        _COCO,
        "average",
        "ResNet-101",
        "The paper says that the ratio of G-softmax is higher.",
        {
            ("", "compactness"): {"softmax": 2.6, "gsoftmax": 2.8},
            ("", "separability"): {"softmax": 4.2, "gsoftmax": 4.5},
        },
    ),
}


def figure(
    name: str,
    runs: str | os.PathLike[str],
    out: str | os.PathLike[str],
    formats: Sequence[str] = ("svg",),
    rows: Sequence[str] | None = None,
) -> tuple[list[Table], list[Path]]:
    """Draws a figure of the paper from finished runs; returns tables of the published values and ours, and the files.

    name: of `FIGURES`
    runs, out: the folder of the runs ROW/seed-K, and the folder to write to
    formats: of svg, png, pdf
    rows: recipes instead of the paper's
    """
    if name not in FIGURES:
        raise ValueError(f"{unknown('figure', name, FIGURES)}; figures are {', '.join(FIGURES)}")
    if wrong := sorted(set(formats) - set(FORMATS)):
        raise ValueError(f"figures must be of {', '.join(FORMATS)}, got {wrong[0]!r}")
    wanted = FIGURES[name]
    parts, notes = _read(name, [recipes.find(row) for row in rows or wanted.rows], Path(runs), rows is None)
    paper = {recipes.find(row).config().data for row in wanted.rows}
    if not paper.issuperset(part.data for part in parts):  # what the paper says is of other data
        wanted = replace(wanted, said="", published={})
    data = " and ".join(_DATA.get(part.data, part.data) for part in parts)
    title = f"Figure {name.removeprefix('figure')}: {wanted.title.format(data=data)}"
    draw, tabulate = _WAYS[name]
    changed = {row.recipe.name: row.seeds[0].label for part in parts for row in part.rows if row.seeds[0].label}
    spec = draw(parts, title)
    seeds = sorted({len(row.seeds) for part in parts for row in part.rows})
    told = [*filter(None, (not_recipe({"not_recipe": changed}), _seeds_told(seeds, wanted.classes)))]
    if told:
        wrap: Any = {"width": 90, "break_on_hyphens": False, "max_lines": 4, "placeholder": " … (all in the tables)"}
        spec["title"]["subtitle"] = [line for text in told for line in textwrap.wrap(text, **wrap)]
    made = tabulate(parts, wanted, title)
    shared = [*notes, *told, wanted.said, f"Published: {wanted.network}." if wanted.published else ""]
    tables = [_with_note(table, shared) for table in made]
    Path(out).mkdir(parents=True, exist_ok=True)
    return tables, save(spec, Path(out), name, formats)


# ---------------------------------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    """The finished runs of a recipe."""

    recipe: Recipe
    head: str  # what figures and tables call it
    seeds: tuple[Seed, ...]  # with one label
    found: tuple[Analysis, ...]  # of each run

    def mean(self, value: Callable[[Analysis], float]) -> Cell:
        """Mean, and deviation over seeds, of a number of each run."""
        values = np.array([value(a) for a in self.found])
        sd = float(values.std(ddof=1)) if len(values) > 1 else None
        return None if np.isnan(values).any() else Shown(plus_minus(float(values.mean()), sd), float(values.mean()))


@dataclass(frozen=True)
class _Part:
    """The rows on one dataset, and the classes of it that the figure shows."""

    data: str
    rows: tuple[_Row, ...]
    classes: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.rows[0].found[0].classes[c] for c in self.classes)


def _chosen(recipe: Recipe, runs: Path) -> tuple[list[Seed], str]:
    """The finished runs of a row that enter one mean, and a note on those that differ from them and are left out."""
    groups = by_label(read_seeds(recipe, runs / recipe.name))
    chosen, *others = groups.values() or [[]]
    left = "; ".join(f"{len(found)} of {recipe.name} ({found[0].label})" for found in others)
    return chosen, f"Left out, because their settings differ: {left}." if left else ""


def _read(name: str, wanted: Sequence[Recipe], runs: Path, may_lack: bool) -> tuple[list[_Part], list[str]]:
    """The figure's rows, by dataset, and notes; a dataset without all its runs is left out if another has them."""
    groups: dict[str, list[Recipe]] = {}
    for recipe in wanted:
        groups.setdefault(recipe.config().data, []).append(recipe)
    if len(groups) > 1 and isinstance(FIGURES[name].classes, str):
        raise ValueError(f"the rows of {name} must be on one dataset, got {' and '.join(groups)}")
    ready = {r.name: _chosen(r, runs) for r in wanted}
    missing = {data: [r for r in rows if not ready[r.name][0]] for data, rows in groups.items()}
    lacking = [r for rows in missing.values() for r in rows]
    if lacking and (not may_lack or all(missing.values())):
        smoke = runs.name == "smoke"  # as in `reproduce.folder`
        words = ["gsoftmax", "reproduce", lacking[0].table, "--row", lacking[0].name]
        words += ["--out", str(runs.parent if smoke else runs), *["--smoke"] * smoke]
        raise ValueError(
            f"{name} needs a finished run of {lacking[0].name} in {runs}; this command makes it: {shlex.join(words)}"
        )
    parts, notes = [], []
    for data, rows in groups.items():
        if missing[data]:
            notes.append(f"{data} is left out: there is no finished run of {missing[data][0].name}.")
            continue
        heads = Counter(r.config().head for r in rows)
        made = []
        for r in rows:
            head = r.config().head if heads[r.config().head] == 1 else r.name
            seeds, left = ready[r.name]
            notes += [left] if left else []
            made.append(_Row(r, head, tuple(seeds), tuple(analyze(one.run, name=head) for one in seeds)))
        data = _trained_on(made[0])
        classes, note = _classes(FIGURES[name].classes, made[0].found, data)
        for row in made:
            if len({a.classes for a in row.found} | {made[0].found[0].classes}) > 1:
                raise ValueError(
                    f"the runs of {name} on {data} must have the same classes, and {row.recipe.name} has others"
                )
        notes += [note] if note else []
        parts.append(_Part(data, tuple(made), classes))
    return parts, notes


def _trained_on(row: _Row) -> str:
    """The data of its runs, which may not be that of the recipe."""
    config = read_config(row.seeds[0].run)
    return row.recipe.config().data if config is None else config.data


def _classes(wanted: tuple[str, ...] | str, found: Sequence[Analysis], data: str) -> tuple[tuple[int, ...], str]:
    """The classes that a figure shows of a dataset, and a note where they are not the paper's."""
    names, count = found[0].classes, np.min([a.geometry.count for a in found], axis=0)
    if wanted == "average":
        kept = np.min([np.isfinite(a.geometry.separability.numpy()).sum() for a in found])
        return tuple(range(len(names))), f"Averages over {kept} of {len(names)} classes." if kept < len(names) else ""
    if isinstance(wanted, str):
        most = 10 if wanted == "first 10" else specs.SHOWN
        few = wanted == "all" and len(names) > most
        return tuple(range(min(most, len(names)))), f"Shown: the first {most} of {len(names)} classes." if few else ""
    chosen = tuple(names.index(name) for name in wanted if name in names)
    if any(count[c] for c in chosen):
        return chosen, ""
    most = int(count.argmax())
    return (most,), f"{data} has no images of {', '.join(wanted)}: {names[most]} is shown."


def _document(parts: Sequence[_Part]) -> Document:
    """A document of the chosen classes of all datasets; a row has no numbers for the classes of other datasets."""
    heads = list(dict.fromkeys(row.head for part in parts for row in part.rows))
    most = max(len(row.seeds) for part in parts for row in part.rows)
    joined = blank("", "compare", heads, range(most), parts[0].rows[0].found[0].multilabel)
    joined["classes"] = [name for part in parts for name in part.names]
    before = 0
    for part in parts:
        doc = blank("", "compare", heads, range(most), joined["multilabel"])
        for row in part.rows:
            for seed, a in enumerate(row.found):
                add_analysis(doc, a, row.head, seed)
        after = len(joined["classes"]) - before - len(part.classes)
        keep = [*[None] * before, *part.classes, *[None] * after]
        place = {c: before + i for i, c in enumerate(part.classes)}
        joined["geometry"] += [some_classes(row, keep) for row in doc["geometry"]]
        joined["points"] += [some_points(row, place) for row in doc["points"] if row["seed"] == 0]
        joined["splits"] = [split for split in ("train", "test") if split in doc["splits"]]
        before += len(part.classes)
    return joined


# ---------------------------------------------------------------------------------------------------------------------
# Drawings
# ---------------------------------------------------------------------------------------------------------------------


def _of_classes(parts: Sequence[_Part], title: str, points: bool, bars: bool) -> Spec:
    """One line of panels for every class: x against p of every head, and the Gaussians and measures."""
    doc, lines, cls = _document(parts), [], 0
    for part in parts:
        for name in part.names:
            line, c = [], str(cls)
            if points:
                heads = [row.head for row in part.rows]
                line += [panel(specs.scatter(json.dumps(h), c), f"{name}: {h}", 210, 190) for h in heads]
            if bars:
                line.append(panel(specs.gaussians(c), None if points else name, 280, 190))
                small = (specs.class_bars(json.dumps(m), m, c) for m in PAPER)
                line += [panel(one, None, 26 * len(part.rows), 190) for one in small]
            lines.append(line)
            cls += 1
    return compose(doc, lines, title, seed=0)


def _scatter(parts: Sequence[_Part], title: str) -> Spec:
    return _of_classes(parts, title, points=True, bars=False)


def _gaussians(parts: Sequence[_Part], title: str) -> Spec:
    return _of_classes(parts, title, points=False, bars=True)


def _both(parts: Sequence[_Part], title: str) -> Spec:
    return _of_classes(parts, title, points=True, bars=True)


def _every_class(parts: Sequence[_Part], title: str) -> Spec:
    doc = _document(parts)
    lines = [class_panels(json.dumps(split)) for split in doc["splits"]]
    for split, line in zip(doc["splits"], lines, strict=True):
        for one in line:
            one["title"] = f"{one['title']}, {_SETS[split]}"
    return compose(doc, lines, title, first=0)


def _averages(parts: Sequence[_Part], title: str) -> Spec:
    doc = _document(parts)
    for m in PAPER:
        values = {row.head: np.array([a.geometry.average()[m] for a in row.found]) for row in parts[0].rows}
        doc["metrics"][m] = {
            h: {"values": v.tolist(), "mean": float(v.mean()), "sd": float(v.std(ddof=1)) if len(v) > 1 else None}
            for h, v in values.items()
        }
    doc["metrics"] = with_intervals(doc["metrics"])
    width = 45 * len(parts[0].rows)
    return compose(
        doc, [[panel(specs.average_bars(json.dumps(m), f"mean {m}"), None, width, 180) for m in PAPER]], title
    )


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------

_SETS = {"train": "training set", "test": "test set"}
_Quantities = Mapping[str, Callable[[_Row], Cell]]  # a cell of each row, by name


def _beside(title: str, quantities: _Quantities, rows: Sequence[_Row], wanted: Figure, name: str = "") -> Table:
    """Quantities of every head, the published value, where the paper has one for this class, before ours."""
    given = {quantity: value for (of, quantity), value in wanted.published.items() if of == name}
    header: list[str] = [""]
    lines: dict[str, list[Cell]] = {quantity: [quantity] for quantity in quantities}
    for row in rows:
        head = row.recipe.config().head
        if any(head in value for value in given.values()):
            header.append(f"{row.head}, published")
            for quantity, line in lines.items():
                value = given.get(quantity, {}).get(head)
                line.append(Shown(f"{value:g}", value) if isinstance(value, (int, float)) else value)
        header.append(f"{row.head}, ours")
        for quantity, cell in quantities.items():
            lines[quantity].append(cell(row))
    return Table(title, tuple(header), tuple(map(tuple, lines.values())))


def _class_tables(parts: Sequence[_Part], wanted: Figure, title: str) -> list[Table]:
    """For each class the published values beside ours, and whether x is Gaussian."""
    tables = []
    for part in parts:
        for c, name in zip(part.classes, part.names, strict=True):
            sides = ("x with the label", "x without it") if part.rows[0].found[0].multilabel else ("x", "impostors")
            what = f"{name}, {_DATA.get(part.data, part.data)}" if len(parts) > 1 else name
            tables.append(_beside(f"{title}: {what}", _of_class(c, sides), part.rows, wanted, name))
    return tables


def _measure(a: Analysis, measure: str, c: int) -> float:
    return float(a.measures[measure][c])


def _of_class(c: int, sides: tuple[str, str]) -> _Quantities:
    def mean(of: Callable[[Analysis], Any]) -> Callable[[_Row], Cell]:
        return lambda row: row.mean(lambda a: float(of(a)))

    def inside(row: _Row) -> Cell:
        shares = iter([_share_inside(one.run, c) for one in row.seeds])
        return row.mean(lambda _: next(shares))

    own, other = sides
    found: dict[str, Callable[[_Row], Cell]] = {
        "images": lambda row: int(row.found[0].geometry.count[c]),
        f"{own}, min": mean(lambda a: a.distributions.own[c, 0]),
        f"{own}, max": mean(lambda a: a.distributions.own[c, 1]),
        f"{other}, min": mean(lambda a: a.distributions.other[c, 0]),
        f"{other}, max": mean(lambda a: a.distributions.other[c, 1]),
    }
    if other == "impostors":
        found[_INSIDE] = inside
    found |= {m: mean(partial(_measure, measure=m, c=c)) for m in PAPER}
    found |= {
        "skewness": mean(lambda a: a.distributions.skewness[c]),
        "excess kurtosis": mean(lambda a: a.distributions.kurtosis[c]),
        "p of normality": lambda row: p_cell(float(row.found[0].distributions.p[c])),
    }
    return found


def _share_inside(run: Path, c: int) -> float:
    """Percent of the impostors of a class, the other outputs of its images, that are in [-5, 0]."""
    inside = total = 0
    for block in open_outputs(run).blocks(_BLOCK):
        x = np.delete(block.x[block.finite() & (block.y == c)], c, 1)
        inside, total = inside + int(((x >= -5) & (x <= 0)).sum()), total + x.size
    return 100 * inside / total if total else np.nan


def _every_class_tables(parts: Sequence[_Part], wanted: Figure, title: str) -> list[Table]:
    """The measures of every class and set, and in how many classes each head has the highest and the lowest value."""
    (part,) = parts
    rows: list[tuple[Cell, ...]] = []
    counts: list[tuple[Cell, ...]] = []
    for split in _splits(part):
        values = {m: np.array([_over_seeds(row, split, m)[list(part.classes)] for row in part.rows]) for m in PAPER}
        for i, name in enumerate(part.names):
            rows.append((name, _SETS[split], *(float(v) for m in PAPER for v in values[m][:, i])))
        for m in PAPER:
            known = values[m][:, ~np.isnan(values[m]).any(0)]
            best, worst = (np.bincount(pick(known, 0), minlength=len(part.rows)) for pick in (np.argmax, np.argmin))
            both = [int(n) for pair in zip(best, worst, strict=True) for n in pair]
            counts.append((f"{m}, {_SETS[split]}", *both, known.shape[1]))
    heads = [row.head for row in part.rows]
    ends = [f"{h} {end}" for h in heads for end in ("highest", "lowest")]
    return [
        Table(f"{title}: highest and lowest", ("", *ends, "classes"), tuple(counts)),
        Table(title, ("class", "set", *(f"{m}, {h}" for m in PAPER for h in heads)), tuple(rows)),
    ]


def _splits(part: _Part) -> list[str]:
    return ["train", "test"] if all(a.train is not None for row in part.rows for a in row.found) else ["test"]


def _over_seeds(row: _Row, split: str, measure: str) -> np.ndarray:
    """A measure of every class, averaged over seeds."""
    found = [a.geometry if split == "test" or a.train is None else a.train.geometry() for a in row.found]
    return np.mean([getattr(g, measure).numpy() for g in found], axis=0)


def _average_tables(parts: Sequence[_Part], wanted: Figure, title: str) -> list[Table]:
    (part,) = parts

    def average(measure: str) -> Callable[[_Row], Cell]:
        return lambda row: row.mean(lambda a: a.geometry.average()[measure])

    return [_beside(title, {m: average(m) for m in PAPER}, part.rows, wanted)]


def _seeds_told(seeds: Sequence[int], classes: tuple[str, ...] | str) -> str:
    """What is a mean; figures of named classes have points and Gaussians."""
    if seeds[-1] == 1:
        return ""
    n = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    first = "" if isinstance(classes, str) else "; points, Gaussians and p are of the first seed"
    return f"Means over {n} seeds (± standard deviation){first}."


def _with_note(table: Table, texts: Sequence[str]) -> Table:
    return Table(table.title, table.header, table.rows, " ".join(filter(None, [table.note, *texts])))


# How each figure is drawn and tabulated.
_WAYS: dict[
    str, tuple[Callable[[Sequence[_Part], str], Spec], Callable[[Sequence[_Part], Figure, str], list[Table]]]
] = {
    "figure3": (_scatter, _class_tables),
    "figure4": (_both, _class_tables),
    "figure5": (_gaussians, _class_tables),
    "figure6": (_every_class, _every_class_tables),
    "figure7": (_every_class, _every_class_tables),
    "figure8": (_averages, _average_tables),
}


# ---------------------------------------------------------------------------------------------------------------------
# The paper's tables
# ---------------------------------------------------------------------------------------------------------------------

# Tables 5 and 6 of the paper.  p of the paired t-test over the classes' average precisions, softmax against G-softmax
# with the initial (mu, sigma) of the row; and (r, p) of the correlation of each measure with average precision.
PUBLISHED_SIGNIFICANCE = {
    "coco-gsoftmax(0,1)": 0.9060,
    "coco-gsoftmax(0,0.5)": 0.0359,
    "coco-gsoftmax(0,5)": 0.0548,
    "coco-gsoftmax(-0.1,1)": 0.0764,
    "coco-gsoftmax(0.1,1)": 0.3160,
    "nuswide-gsoftmax(0,1)": 0.0049,
    "nuswide-gsoftmax(0,2)": 0.0001,
    "nuswide-gsoftmax(0,3)": 0.0098,
    "nuswide-gsoftmax(-0.05,1)": 0.6773,
    "nuswide-gsoftmax(0.05,1)": 0.0131,
}
PUBLISHED_CORRELATION = {
    "coco": {"compactness": (0.9472, 0.0144), "separability": (0.9791, 0.0036), "ratio": (0.9636, 0.0083)},
    "nuswide": {"compactness": (0.9635, 0.0083), "separability": (0.9045, 0.0349), "ratio": (0.9702, 0.0062)},
}
_TITLES = {
    "table1": "Table 1: top-1 error (%) on CIFAR-10 and CIFAR-100",
    "table2": "Table 2: top-1 error (%) on Tiny ImageNet",
    "table3": "Table 3: MS COCO (%)",
    "table4": "Table 4: NUS-WIDE (%)",
}
_BASES = ("coco-softmax", "nuswide-softmax")


def paper_tables(runs: str | os.PathLike[str]) -> list[Table]:
    """The paper's tables, the published numbers beside the means of our seeds; – where there is no run.

    runs: the folder of the runs ROW/seed-K that `gsoftmax reproduce` makes

    >>> [table.title[:7] for table in paper_tables("nowhere")]
    ['Table 1', 'Table 2', 'Table 3', 'Table 4', 'Table 5', 'Table 6']
    """
    known = {name: r for name, r in recipes.recipes().items() if r.published}
    tables = []
    for key, title in _TITLES.items():
        rows_of = [r for r in known.values() if r.table == key]
        metrics = max((list(r.published) for r in rows_of), key=len)  # the paper's columns
        header = ["", *(f"{measures.find(m).label}{side}" for m in metrics for side in ("", ", ours"))]
        if len(metrics) == 1:
            header.append("difference")
        decimals, rows = (2 if "error" in metrics else 1), []  # as the paper has
        for recipe in rows_of:
            for told, seeds in (by_label(read_seeds(recipe, Path(runs) / recipe.name)) or {"": []}).items():
                row: list[Cell] = [recipe.name]
                for m in metrics:
                    published = recipe.published.get(m)
                    mean, difference, *_ = ours(m, published, seeds)
                    given = None if published is None else Shown(f"{published:.{decimals}f}", published)
                    row += [given, mean, difference][: 2 + (len(metrics) == 1)]
                rows.append((*row, len(seeds) or None, told))
        tables.append(Table(title, (*header, "seeds", "not the recipe"), tuple(rows)))
    chosen = {name: _chosen(known[name], Path(runs)) for name in (*PUBLISHED_SIGNIFICANCE, *_BASES)}
    settings = {name: _setting([one.run for one in seeds]) for name, (seeds, _) in chosen.items() if seeds}
    labels = {name: seeds[0].label for name, (seeds, _) in chosen.items() if seeds}
    left = [note for _, note in chosen.values() if note]
    return [
        *tables,
        *(_with_note(one, left) for one in (_significance(settings, labels), _correlations(settings, labels))),
    ]


def _setting(runs: Sequence[Path]) -> dict[str, np.ndarray]:
    """The measures and the average precision of every class, averaged over seeds."""
    found = [analyze(run).measures for run in runs]
    return {key: np.mean([one[key] for one in found], axis=0) for key in found[0]}


def _significance(settings: Mapping[str, Mapping[str, np.ndarray]], told: Mapping[str, str]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name, published in PUBLISHED_SIGNIFICANCE.items():
        base = f"{name.partition('-')[0]}-softmax"
        mine: tuple[Cell, ...] = (None, None, None, "")
        if base in settings and name in settings:
            test = significance.paired(settings[base]["AP"], settings[name]["AP"])
            mine = (100 * test.difference, p_cell(test.p), test.n, _told(told, [base, name]))
        rows.append((name, f"{published:.4f}", *mine))
    header = ("", "p, published", "difference of AP (points), ours", "p, ours", "classes", "not the recipe")
    note = "Ours: average precisions averaged over seeds."
    return Table("Table 5: softmax against G-softmax, paired t-test over the classes' AP", header, tuple(rows), note)


def _correlations(settings: Mapping[str, Mapping[str, np.ndarray]], told: Mapping[str, str]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for data, published in PUBLISHED_CORRELATION.items():
        names = [name for name in PUBLISHED_SIGNIFICANCE if name.startswith(data) and name in settings]
        for measure, (r, p) in published.items():
            mine: tuple[Cell, ...] = (*(None,) * 6, "")
            if len(names) > 1:
                values, ap = (np.stack([settings[name][key] for name in names]) for key in (measure, "AP"))
                best = significance.paper_correlations(values, ap)
                every = significance.all_class_correlation(values, ap)
                mine = (best.r, p_cell(best.p), best.n, every.r, p_cell(every.p), every.n, _told(told, names))
            rows.append((f"{data}: {measure}", f"{r:.4f}", f"{p:.4f}", *mine))
    header = ("", "r, published", "p, published", "r", "p", "n", "r, all classes", "p, all", "n, all", "not the recipe")
    note = "Published: five settings (n = 5) of the one class with the best mean. Ours: averaged over seeds."
    return Table("Table 6: correlation of geometry with AP over the G-softmax settings", header, tuple(rows), note)


def _told(told: Mapping[str, str], names: Sequence[str]) -> str:
    return "; ".join(f"{name}: {told[name]}" for name in names if told[name])
