"""The tables of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import measures, significance
from ..summary import PAIRED, differences, means, over_images_tables, paired_cells, tuning_tables
from ..tables import Cell, Shown, Table, p_value
from .words import unit

_MOST_CONFUSIONS = 500


def of_document(doc: Mapping[str, Any]) -> list[Table]:
    """All tables of a report, those without rows left out."""
    tests = [*over_images_tables(doc), *over_classes(doc), correlations(doc), normality(doc), confusions(doc)]
    found = [means(doc), *differences(doc), *tuning_tables(doc), *tests, classes(doc), intervals(doc)]
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
    note = (
        f"p, Holm: corrected for the {sum(map(len, doc['over_classes'].values()))} tests over classes. "
        "Classes of one model are not independent of each other: p describes these models, not new ones."
    )
    title = f"{{}} minus {doc['heads'][0]}, paired over classes"
    made = []
    for head, tests in doc["over_classes"].items():
        found = {measures.find(key): test for key, test in tests.items()}
        rows = tuple((m.difference, *paired_cells(test, m.scale)) for m, test in found.items())
        made.append(Table(title.format(head), ("", *PAIRED), rows, note))
    return made


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
            (measure, doc["classes"][best["class"]], best["r"], p_cell(best["p"]), best["n"])
            + (every["r"], p_cell(every["p"]), every["n"])
        )
    note = (
        f"{found['settings']} runs of {', '.join(found['heads'])}. The paper correlates, over the settings, one class: "
        "the one with the best mean. Few points of one hand-picked class are weak evidence; the columns on the right "
        "take every class of every run."
    )
    header = ("", "best class", "r", "p", "n", "r, all classes", "p, all", "n, all")
    return Table(f"Correlation of geometry with the classes' {what}", header, tuple(rows), note)


def normality(doc: Mapping[str, Any]) -> Table:
    """The paper's assumption: whether x of each class is Gaussian, and its range."""
    own, other = ("with label", "without") if doc["multilabel"] else ("own", "impostor")
    ranges = (f"{side} {end}" for side in (own, other) for end in ("min", "max"))
    header = ("class", unit(doc), "images", "skewness", "excess kurtosis", "p", "p, Holm", *ranges)
    found, rows = doc.get("normality", []), []
    for c, name in enumerate(doc["classes"]):
        for row in found:
            tests = (p_cell(row["p"][c]), p_cell(row["p_holm"][c]))
            shape = (row["count"][c], row["skewness"][c], row["kurtosis"][c])
            rows.append((name, row["head"], *shape, *tests, *row["own"][c], *row["other"][c]))
    told = []
    for row in found:
        tested = [p for p in row["p_holm"] if p is not None]
        told.append(f"{row['head']}, {sum(p < significance.ALPHA for p in tested)} of {len(tested)}")
    which = (
        "" if len(doc["seeds"]) == 1 else f" of seed {', '.join(str(s) for s in sorted({r['seed'] for r in found}))}"
    )
    note = (
        f"Classes whose x is not Gaussian at {significance.ALPHA} after Holm's correction: {'; '.join(told)}. "
        f"D'Agostino-Pearson test of x over the class's own images{which}; p, Holm: corrected for the classes."
    )
    return Table("Is x Gaussian?", header, tuple(rows), note)


def confusions(doc: Mapping[str, Any]) -> Table | None:
    """What the images of a class are most often taken for, in percent of the class, by every head."""
    found = (doc.get("examples") or {}).get("confusion")
    if not found:
        return None
    parts: dict[tuple[int, int], dict[str, float]] = {}
    for head, of in found["heads"].items():
        for c, j, n, *_ in of["wrong"]:
            parts.setdefault((c, j), {})[head] = 100 * n / of["images"][c]
    order = sorted(parts, key=lambda pair: (-sum(parts[pair].values()), pair))
    names, heads = doc["classes"], list(found["heads"])
    rows = []
    for c, j in order[:_MOST_CONFUSIONS]:
        shares = [Shown(f"{v:.2f}", v) for v in (parts[c, j].get(head, 0.0) for head in heads)]
        rows.append((names[c], names[j], *shares))
    note = "Percent of the images of the class" + ", over all seeds" * (len(doc["seeds"]) > 1) + "."
    return Table("Most frequent confusions", ("class", "taken for", *(f"{h} %" for h in heads)), tuple(rows), note)


def classes(doc: Mapping[str, Any]) -> Table:
    """Every class: the measures of every head, averaged over seeds, for every split."""
    shown = doc["measures"]
    several = len(doc["splits"]) > 1
    header = ("class", *(["split"] if several else []), unit(doc), "images", *(measures.find(m).title for m in shown))
    groups: dict[tuple[str, str], list[Any]] = {(s, h): [] for s in doc["splits"] for h in doc["heads"]}
    for g in doc["geometry"]:
        groups[g["split"], g["head"]].append(g)
    rows: list[tuple[Cell, ...]] = []
    for c, name in enumerate(doc["classes"]):
        for (split, head), runs in groups.items():
            if runs:
                values = [_shown(m, _mean([g[m][c] for g in runs if g.get(m)])) for m in shown]
                rows.append((name, *([split] if several else []), head, runs[0]["count"][c], *values))
    return Table("Every class", header, tuple(rows))


def intervals(doc: Mapping[str, Any]) -> Table | None:
    """The 95 % intervals of every class, where there are some."""
    found = [g for g in doc["geometry"] if "compactness_low" in g]
    if not found:
        return None
    shown = [m for m in ("accuracy", *doc["measures"]) if f"{m}_low" in found[0]]
    shown = list(dict.fromkeys(shown))
    rows = tuple(
        (name, g["head"], g["count"][c], *(_shown(m, g[k][c]) for m in shown for k in (m, f"{m}_low", f"{m}_high")))
        for c, name in enumerate(doc["classes"])
        for g in found
    )
    ends = (cell for m in shown for cell in (measures.find(m).title, "95 % from", "to"))
    header = ("class", unit(doc), "images", *ends)
    note = "Over the images of the class: Wilson's interval of the accuracy, BCa bootstrap of the others."
    return Table("Intervals of every class", header, rows, note)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(np.mean(known)) if known else None


def _shown(key: str, value: float | None) -> float | None:
    """A number in the unit of its measure's title."""
    return None if value is None else measures.find(key).scale * value


def p_cell(p: float | None) -> Cell:
    """A p-value as a cell.

    p: a number, or nan or None where there is none
    """
    return None if p is None or math.isnan(p) else Shown(p_value(p), p)
