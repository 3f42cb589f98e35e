"""The tables of a report and of the paper."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import measures, significance
from ..analyze import analyze
from ..recipes import recipes
from ..runs import read_result
from ..summary import PAIRED, differences, means, paired_cells, paired_table
from ..tables import Cell, Shown, Table, p_value


def of_document(doc: Mapping[str, Any]) -> list[Table]:
    """All tables of a report, those without rows left out."""
    found = [means(doc), *differences(doc), over_images(doc), *over_classes(doc), correlations(doc), classes(doc)]
    return [table for table in found if table is not None and table.rows]


def summary_by_seed(doc: Mapping[str, Any]) -> Table:
    """One row per metric, head and seed, for programs."""
    rows = tuple(
        (metric, head, seed, value)
        for metric, values in doc["metrics"].items()
        for head in doc["heads"]
        for seed, value in zip(doc["seeds"], values.get(head, {}).get("values", []), strict=False)
    )
    return Table("Metrics", ("metric", "head", "seed", "value"), rows)


def over_classes(doc: Mapping[str, Any]) -> list[Table]:
    """The paper's test: each head against the first, paired over the classes (values averaged over seeds)."""
    note = "Classes of one model are not independent of each other: p describes these models, not new ones."
    title = f"{{}} minus {doc['heads'][0]}, paired over classes"
    return [paired_table(title.format(head), tests, note) for head, tests in doc["over_classes"].items()]


def over_images(doc: Mapping[str, Any]) -> Table | None:
    """Two models on the same images."""
    found = doc.get("over_images")
    if not found:
        return None
    names = {"error": "labels wrong, points" if doc["multilabel"] else "error, points", "nll": "NLL"}
    rows = [(names[k], *paired_cells(d, 100.0 if k == "error" else 1.0)) for k, d in found["paired"].items()]
    note = ""
    if (exact := found.get("mcnemar")) is not None:
        note = (
            f"{exact['only_first_right']:,} images only {doc['heads'][0]} gets right, "
            f"{exact['only_second_right']:,} only {doc['heads'][1]}: McNemar's exact p {p_value(exact['p'])}."
        )
    return Table(f"{doc['heads'][1]} minus {doc['heads'][0]}, paired over images", ("", *PAIRED), tuple(rows), note)


def correlations(doc: Mapping[str, Any]) -> Table | None:
    """Pearson's r of geometry and the classes' scores, as the paper defines it and over all classes."""
    found = doc.get("correlations")
    if not found:
        return None
    what = "average precision" if doc["multilabel"] else "accuracy"
    rows = []
    for measure, both in found["rows"].items():
        best, every = both["best_class"], both["all_classes"]
        rows.append(
            (measure, doc["classes"][best["class"]], best["r"], _p(best["p"]), best["n"])
            + (every["r"], _p(every["p"]), every["n"])
        )
    note = (
        f"{found['settings']} runs of {', '.join(found['heads'])}. The paper correlates, over the settings, one class: "
        "the one with the best mean. Few points of one hand-picked class are weak evidence; the columns on the right "
        "take every class of every run."
    )
    header = ("", "best class", "r", "p", "n", "r, all classes", "p, all", "n, all")
    return Table(f"Correlation of geometry with the classes' {what}", header, tuple(rows), note)


def classes(doc: Mapping[str, Any]) -> Table:
    """Every class: the measures of every head, averaged over seeds, for every split."""
    shown = doc["measures"]
    several = len(doc["splits"]) > 1
    header = ("class", *(["split"] if several else []), "head", "images", *(measures.find(m).title for m in shown))
    groups: dict[tuple[str, str], list[Any]] = {(s, h): [] for s in doc["splits"] for h in doc["heads"]}
    for g in doc["geometry"]:
        groups[g["split"], g["head"]].append(g)
    rows: list[tuple[Cell, ...]] = []
    for c, name in enumerate(doc["classes"]):
        for (split, head), runs in groups.items():
            if runs:
                values = [_mean([g[m][c] for g in runs if g.get(m)]) for m in shown]
                rows.append((name, *([split] if several else []), head, runs[0]["count"][c], *values))
    return Table("Every class", header, tuple(rows))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(np.mean(known)) if known else None


def _p(p: float | None) -> Cell:
    return None if p is None or math.isnan(p) else Shown(p_value(p), p)


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


def paper_tables(runs: str | os.PathLike[str]) -> list[Table]:
    """The paper's tables, the published numbers beside ours; – where there is no run.

    runs: the folder of the run folders ROW that `gsoftmax reproduce` makes

    >>> [table.title[:7] for table in paper_tables("nowhere")]
    ['Table 1', 'Table 2', 'Table 3', 'Table 4', 'Table 5', 'Table 6']
    """
    root = Path(runs)
    results = {name: read_result(root / name) for name, r in recipes().items() if r.published}
    tables = []
    for key, title in _TITLES.items():
        rows_of = [r for r in recipes().values() if r.table == key and r.published]
        metrics = list(dict.fromkeys(m for r in rows_of for m in r.published))
        header = ["", *(f"{measures.find(m).label}{side}" for m in metrics for side in ("", ", ours"))]
        if len(metrics) == 1:
            header.append("difference")
        rows = []
        for recipe in rows_of:
            row: list[Cell] = [recipe.name]
            for m in metrics:
                published, result = recipe.published.get(m), results[recipe.name]
                ours = None if result is None or m not in result else 100 * result[m]
                row += [
                    None if published is None else Shown(f"{published:.2f}".removesuffix("0"), published),
                    None if ours is None else Shown(f"{ours:.2f}", ours),
                ]
                if len(metrics) == 1:
                    both = ours is not None and published is not None
                    row.append(Shown(f"{ours - published:+.2f}", ours - published) if both else None)  # type: ignore
            rows.append(tuple(row))
        tables.append(Table(title, tuple(header), tuple(rows)))
    done = {name for name, result in results.items() if result is not None}
    return [*tables, _paper_significance(root, done), _paper_correlations(root, done)]


def _paper_significance(root: Path, done: set[str]) -> Table:
    ap: dict[str, np.ndarray] = {}

    def of(name: str) -> np.ndarray:
        if name not in ap:
            ap[name] = analyze(root / name).score
        return ap[name]

    rows: list[tuple[Cell, ...]] = []
    for name, published in PUBLISHED_SIGNIFICANCE.items():
        base = f"{name.partition('-')[0]}-softmax"
        test = significance.paired(of(base), of(name)) if {base, name} <= done else None
        mine = (None, None, None) if test is None else (100 * test.difference, _p(test.p), test.n)
        rows.append((name, f"{published:.4f}", *mine))
    header = ("", "p, published", "difference of AP (points), ours", "p, ours", "classes")
    return Table("Table 5: softmax against G-softmax, paired t-test over the classes' AP", header, tuple(rows))


def _paper_correlations(root: Path, done: set[str]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for data, published in PUBLISHED_CORRELATION.items():
        names = [name for name in PUBLISHED_SIGNIFICANCE if name.startswith(data) and name in done]
        found = [analyze(root / name) for name in names]
        for measure, (r, p) in published.items():
            mine: tuple[Cell, ...] = (None,) * 6
            if len(found) > 1:
                values, ap = np.stack([f.measures[measure] for f in found]), np.stack([f.score for f in found])
                best = significance.paper_correlations(values, ap)
                every = significance.all_class_correlation(values, ap)
                mine = (best.r, _p(best.p), best.n, every.r, _p(every.p), every.n)
            rows.append((f"{data}: {measure}", f"{r:.4f}", f"{p:.4f}", *mine))
    header = ("", "r, published", "p, published", "r", "p", "n", "r, all classes", "p, all", "n, all")
    note = "Published: five settings (n = 5) of the one class with the best mean."
    return Table("Table 6: correlation of geometry with AP over the G-softmax settings", header, tuple(rows), note)
