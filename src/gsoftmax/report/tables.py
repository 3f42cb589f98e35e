"""Tables: one small type for terminal, Markdown, LaTeX and CSV, and the tables of a report and of the paper."""

from __future__ import annotations

import csv
import io
import math
import os
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import significance
from ..compare import NAMES, p_value


@dataclass(frozen=True)
class Shown:
    """A number with the text it is shown as; CSV gets the number."""

    text: str
    value: float


Cell = str | float | int | Shown | None

FORMATS = ("md", "tex", "csv", "txt")


@dataclass(frozen=True)
class Table:
    """A title, a header, rows of cells (text, numbers, None for nothing) and a line below.

    >>> print(Table("Errors", ("head", "error %"), (("softmax", 9.93), ("gsoftmax", None))).text())
    Errors
    <BLANKLINE>
    head      error %
    softmax     9.930
    gsoftmax        –
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    def cells(self) -> list[list[str]]:
        """All rows as text, numbers rounded for reading."""
        return [[show(cell) for cell in row] for row in self.rows]

    def text(self) -> str:
        """For a terminal."""
        grid = [[plain(cell) for cell in row] for row in [list(self.header), *self.cells()]]
        widths = [max(map(_width, column)) for column in zip(*grid, strict=True)]
        lines = []
        for row in grid:
            padded = [
                cell + " " * (w - _width(cell)) if k == 0 else " " * (w - _width(cell)) + cell
                for k, (cell, w) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(padded).rstrip())
        return "\n".join([plain(self.title), "", *lines, *(["", plain(self.note)] if self.note else [])])

    def markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(_markdown(cell) for cell in cells) + " |"

        rule = "|" + "|".join("---" if k == 0 else "---:" for k in range(len(self.header))) + "|"
        body = [line(self.header), rule, *map(line, self.cells())]
        note = ["", _markdown(self.note)] if self.note else []
        return "\n".join([f"### {_markdown(self.title)}", "", *body, *note])

    def latex(self) -> str:
        """A `table` with booktabs rules."""

        def line(cells: Sequence[str]) -> str:
            return " & ".join(_latex(cell) for cell in cells) + r" \\"

        caption = _latex(self.title + (f". {self.note}" if self.note else ""))
        return "\n".join(
            [
                r"\begin{table}[t]",
                r"\centering",
                rf"\caption{{{caption}}}",
                rf"\begin{{tabular}}{{l{'r' * (len(self.header) - 1)}}}",
                r"\toprule",
                line(self.header),
                r"\midrule",
                *map(line, self.cells()),
                r"\bottomrule",
                r"\end{tabular}",
                r"\end{table}",
            ]
        )

    def csv(self) -> str:
        """All digits; a text that a spreadsheet would run as a formula gets an apostrophe in front."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([_csv(cell) for cell in self.header])
        writer.writerows([_csv(cell) for cell in row] for row in self.rows)
        return out.getvalue()


def write(
    tables: Sequence[Table], out: Path, formats: Sequence[str], *, csv_tables: Sequence[Table] = ()
) -> list[Path]:
    """All tables in one file of each format; CSV, with one table a file, in a folder (`csv_tables`, if given)."""
    from ..runs import write_atomically

    unknown = sorted(set(formats) - set(FORMATS))
    if unknown:
        raise ValueError(f"tables must be of {', '.join(FORMATS)}, got {unknown[0]!r}")
    ways = {"md": Table.markdown, "tex": Table.latex, "txt": Table.text}
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind in (k for k in FORMATS if k in formats):
        if kind == "csv":
            folder = out / "tables"
            folder.mkdir(parents=True, exist_ok=True)
            for table in csv_tables or tables:
                slug = re.sub(r"[^a-z0-9]+", "-", table.title.lower()).strip("-")[:60] or "table"
                path = folder / f"{slug}.csv"
                write_atomically(path, table.csv())
                paths.append(path)
        else:
            path = out / f"tables.{kind}"
            write_atomically(path, "\n\n".join(ways[kind](table) for table in tables) + "\n")
            paths.append(path)
    return paths


# ---------------------------------------------------------------------------------------------------------------------
# The tables of a document (see data.py)
# ---------------------------------------------------------------------------------------------------------------------


def of_document(doc: Mapping[str, Any]) -> list[Table]:
    """All tables of a report, those without rows left out."""
    found = [summary(doc), *differences(doc), over_images(doc), *over_classes(doc), correlations(doc), classes(doc)]
    return [table for table in found if table is not None and table.rows]


def summary(doc: Mapping[str, Any]) -> Table:
    """Mean and deviation over seeds (or one number) of every metric and head."""
    heads, n = doc["heads"], len(doc["seeds"])
    rows = []
    for metric, values in doc["metrics"].items():
        cells = [plus_minus(values[h]["mean"], values[h].get("sd")) if h in values else None for h in heads]
        rows.append((metric_name(metric), *cells))
    title = f"Mean ± standard deviation over {n} seeds" if n > 1 else "Metrics and average geometry"
    return Table(title, ("", *heads), tuple(rows))


def summary_by_seed(doc: Mapping[str, Any]) -> Table:
    """The same as one line a metric, head and seed, for programs."""
    rows = tuple(
        (metric, head, seed, value)
        for metric, values in doc["metrics"].items()
        for head in doc["heads"]
        for seed, value in zip(doc["seeds"], values.get(head, {}).get("values", []), strict=False)
    )
    return Table("Metrics", ("metric", "head", "seed", "value"), rows)


def differences(doc: Mapping[str, Any]) -> list[Table]:
    """Each head minus the first, paired by seed."""
    tables = []
    for head in doc["heads"][1:]:
        rows = [
            (metric_name(metric), *_paired(values[head]["paired"]))
            for metric, values in doc["metrics"].items()
            if "paired" in values.get(head, {})
        ]
        if rows:
            title = f"{head} minus {doc['heads'][0]}, paired by seed"
            tables.append(Table(title, ("", *_PAIRED), tuple(rows)))
    return tables


def over_classes(doc: Mapping[str, Any]) -> list[Table]:
    """The paper's test: each head against the first, paired over the classes (values averaged over seeds)."""
    tables = []
    for head, rows in doc["over_classes"].items():
        note = "Classes of one model are not independent of each other: p describes these models, not new ones."
        title = f"{head} minus {doc['heads'][0]}, paired over classes"
        body = tuple((metric_name(k), *_paired(d)) for k, d in rows.items())
        tables.append(Table(title, ("", *_PAIRED), body, note))
    return tables


def over_images(doc: Mapping[str, Any]) -> Table | None:
    """Two models on the same images."""
    found = doc.get("over_images")
    if not found:
        return None
    names = {"error": "labels wrong, points" if doc["multilabel"] else "error, points", "nll": "NLL"}
    rows = [(names[k], *_paired(d, 100.0 if k == "error" else 1.0)) for k, d in found["paired"].items()]
    note = ""
    if (exact := found.get("mcnemar")) is not None:
        note = (
            f"{exact['only_first_right']:,} images only {doc['heads'][0]} gets right, "
            f"{exact['only_second_right']:,} only {doc['heads'][1]}: McNemar's exact p {p_value(exact['p'])}."
        )
    return Table(f"{doc['heads'][1]} minus {doc['heads'][0]}, paired over images", ("", *_PAIRED), tuple(rows), note)


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
    measures = [*doc["measures"]]
    header = ["class", *(["split"] if len(doc["splits"]) > 1 else []), "head", "images", *map(metric_name, measures)]
    rows: list[tuple[Cell, ...]] = []
    for c, name in enumerate(doc["classes"]):
        for split in doc["splits"]:
            for head in doc["heads"]:
                runs = [g for g in doc["geometry"] if g["head"] == head and g["split"] == split]
                if not runs:
                    continue
                values = [mean_over([g.get(m, [])[c : c + 1] for g in runs]) for m in measures]
                images = runs[0]["count"][c]
                rows.append((name, *([split] if len(doc["splits"]) > 1 else []), head, images, *values))
    return Table("Every class", tuple(header), tuple(rows))


def mean_over(parts: Sequence[Sequence[float | None]]) -> float | None:
    """The mean of the numbers among one-element lists; None of nothing."""
    values = [part[0] for part in parts if part and part[0] is not None]
    return float(np.mean(values)) if values else None


_PAIRED = ("difference", "95 % from", "to", "t", "p", "n")


def _paired(d: Mapping[str, Any], scale: float = 1.0) -> tuple[Cell, ...]:
    def number(key: str) -> Cell:
        value = d[key]
        return None if value is None else Shown(signed(scale * value) or "–", scale * value)

    t = None if d["t"] is None else Shown(f"{d['t']:.2f}", d["t"])
    return number("difference"), number("low"), number("high"), t, _p(d["p"]), d["n"]


def _p(p: float | None) -> Cell:
    return None if p is None or math.isnan(p) else Shown(p_value(p), p)


# ---------------------------------------------------------------------------------------------------------------------
# The paper's tables beside ours
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


def paper_tables(runs: str | os.PathLike[str]) -> list[Table]:
    """The paper's tables, the published numbers beside those of the run folders `runs`/ROW (`gsoftmax reproduce` makes
    them); – where there is no run.

    >>> [table.title[:7] for table in paper_tables("nowhere")]
    ['Table 1', 'Table 2', 'Table 3', 'Table 4', 'Table 5', 'Table 6']
    """
    from ..recipes import recipes
    from ..runs import read_result

    root = Path(runs)
    results = {name: read_result(root / name) for name, r in recipes().items() if r.published}
    tables = []
    for key, title in _TITLES.items():
        rows_of = [r for r in recipes().values() if r.table == key and r.published]
        metrics = list(dict.fromkeys(m for r in rows_of for m in r.published))
        header = ["", *(f"{metric_name(m).removesuffix(' %')}{side}" for m in metrics for side in ("", ", ours"))]
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
    from ..analyze import analyze

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
    from ..analyze import analyze

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


# ---------------------------------------------------------------------------------------------------------------------
# Cells
# ---------------------------------------------------------------------------------------------------------------------

_MORE_NAMES = {
    "error_x": "error of x %",
    "mAP_voc12": "mAP (VOC 2012) %",
    "C_P": "C-P %",
    "C_R": "C-R %",
    "O_P": "O-P %",
    "O_R": "O-R %",
    "hamming": "labels wrong %",
    "accuracy": "accuracy",
    "AP": "AP",
}


def metric_name(metric: str) -> str:
    return {**NAMES, **_MORE_NAMES}.get(metric, metric)


def show(cell: Cell) -> str:
    """A cell for reading.

    >>> show(0.123456), show(12.3456), show(None), show("text"), show(7)
    ('0.1235', '12.35', '–', 'text', '7')
    """
    if isinstance(cell, Shown):
        return cell.text
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return "–"
    if isinstance(cell, bool) or not isinstance(cell, float):
        return f"{cell:,}" if isinstance(cell, int) else str(cell)
    return f"{cell:.{_digits(cell)}f}" if math.isfinite(cell) and (abs(cell) >= 1e-4 or cell == 0) else f"{cell:.3g}"


def signed(value: float | None) -> str | None:
    """
    >>> signed(0.5), signed(-12.0)
    ('+0.5000', '-12.00')
    """
    if value is None or not math.isfinite(value):
        return None
    value = 0.0 if abs(value) < 1e-12 else value  # what rounding left of nothing
    return f"{value:+.{_digits(value)}f}" if abs(value) >= 1e-4 or value == 0 else f"{value:+.2g}"


def plus_minus(mean: float | None, sd: float | None) -> str:
    if mean is None or not math.isfinite(mean):
        return "–" if mean is None or math.isnan(mean) else "∞"
    return f"{mean:.{_digits(mean)}f}" + ("" if sd is None else f" ± {sd:.{_digits(mean)}f}")


def _digits(value: float) -> int:
    return 2 if abs(value) >= 10 else 3 if abs(value) >= 1 else 4


_DIRECTIONS = frozenset("\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def plain(text: str) -> str:
    """Text that cannot steer a terminal: control characters, line separators and changes of direction become �."""
    return "".join("�" if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or c in _DIRECTIONS else c for c in text)


def _width(text: str) -> int:
    """Columns of a terminal."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in text)


def _markdown(text: str) -> str:
    text = plain(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_|\[\]~])", r"\\\1", text)


_LATEX = {c: "\\" + c for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "σ": r"$\sigma$",
    "μ": r"$\mu$",
    "λ": r"$\lambda$",
    "′": "'",
    "–": "--",
    "∞": r"$\infty$",
    "−": r"$-$",
}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in plain(text))


def _csv(cell: Cell) -> Cell:
    if cell is None:
        return ""
    if isinstance(cell, Shown):
        return repr(cell.value)
    if not isinstance(cell, str):
        return repr(cell) if isinstance(cell, float) else cell
    text = plain(cell)
    return (
        f"'{text}"
        if text.startswith(("=", "+", "-", "@")) and not re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", text)
        else text
    )
