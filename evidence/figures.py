"""Figures from the rows, a map of λ × σ and a forest of differences in error: `python -m evidence.tables` writes them.

The numbers that are drawn stand in the file's description: two files with the same ones show the same, whatever version
of Matplotlib drew them.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gsoftmax import measures
from gsoftmax.report.colours import BLUE, GREEN, GREY, ORANGE, VERMILLION

from .run import ROWS
from .tables import ROOT, Difference, Found, _decimals, _span, differences, done, metrics_of, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGES = ROOT / "docs" / "images"
MAP, FOREST = IMAGES / "evidence-map.svg", IMAGES / "evidence-forest.svg"
MAPPED = ("error", "compactness", "separability", "ece")
SETTING = re.compile(r"λ=([\d.]+) \((-?[\d.]+), ([\d.]+)\)")  # λ (μ, σ)

Cell = tuple[float, float]  # λ, σ


def map_cells(found: Found) -> dict[str, dict[Cell, Difference | None]]:
    """By metric, λ and σ: the difference from softmax where μ starts at 0; None where every run diverged."""
    if "tune-cifar10" not in found:
        return {}
    study, rows = found["tune-cifar10"]
    there = {row["setting"] for row in rows}
    cells = {s: (float(m[1]), float(m[3])) for s in study.settings if (m := SETTING.fullmatch(s)) and not float(m[2])}
    of = {(d.setting, d.metric): d for d in differences(study, rows)}
    if not any(s in cells for s, _ in of):
        return {}
    lost = there - {row["setting"] for row in done(rows)}
    return {
        metric: {cell: of.get((s, metric)) for s, cell in cells.items() if (s, metric) in of or s in lost}
        for metric in MAPPED
    }


def draw_map(cells: Mapping[str, Mapping[Cell, Difference | None]]) -> str:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    better = LinearSegmentedColormap.from_list("better", [VERMILLION, "#ffffff", BLUE])
    lams, sigmas = (sorted({cell[i] for of in cells.values() for cell in of}) for i in (0, 1))
    figure = Figure(figsize=(3 + 1.9 * len(sigmas), 2.2 + 0.8 * len(lams)))
    for axes, (metric, of) in zip(figure.subplots(2, 2).flat, cells.items(), strict=True):
        limit = max([abs(d.test.difference) for d in of.values() if d is not None], default=0) or 1.0
        for (lam, sigma), d in of.items():
            row, column = lams.index(lam), sigmas.index(sigma)
            colour = (0.87, 0.87, 0.87, 1.0)
            if d is not None:
                good = d.test.difference / limit * (-1 if measures.find(metric).smaller_is_better else 1)
                colour = better((good + 1) / 2)
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=colour, edgecolor="white"))
            bright = 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2] > 0.5
            axes.text(
                column,
                row,
                "diverged" if d is None else _short(d.test.difference, limit),
                ha="center",
                va="center",
                fontsize=9,
                color="black" if bright else "white",
                fontweight="bold" if d is not None and d.p < 0.05 else "normal",
            )
        axes.set_xticks(range(len(sigmas)), [f"{v:g}" for v in sigmas])
        axes.set_yticks(range(len(lams)), [f"{v:g}" for v in lams])
        axes.set(xlim=(-0.5, len(sigmas) - 0.5), ylim=(-0.5, len(lams) - 0.5), xlabel="first σ")
        axes.set_ylabel("λ", rotation=0, labelpad=8)
        axes.set_title(measures.find(metric).title, fontsize=11)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    figure.suptitle(
        "Difference from softmax: blue is better, orange is worse, bold is p < 0.05 after Holm's correction", fontsize=9
    )
    figure.tight_layout()
    drawn = [[m, *cell, _numbers(d)] for m, of in cells.items() for cell, d in of.items()]
    return _svg(figure, drawn)


def forest_rows(found: Found) -> dict[str, list[Difference]]:
    """By study: the differences in error, of studies with one label an example that choose nothing."""
    rows = {
        name: [d for d in differences(study, rows) if d.metric == "error"]
        for name, (study, rows) in found.items()
        if not name.startswith("tune-") and "error" in metrics_of(rows)
    }
    return {name: of for name, of in rows.items() if of}


def draw_forest(found: Mapping[str, Sequence[Difference]]) -> str:
    """A panel for each study with a scale of its own: differences are large where data are few."""
    from matplotlib.figure import Figure

    heights = [0.27 * len(of) + 0.75 for of in found.values()]
    figure = Figure(figsize=(9, sum(heights) + 0.5))
    panels = figure.subplots(len(found), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (name, of) in zip(panels, found.items(), strict=True):
        _panel(axes, name, of)
    panels[-1].set_xlabel("difference in error, points: left of the line is better; filled is p < 0.05 (Holm)")
    figure.tight_layout()
    drawn = [[name, d.setting, _numbers(d)] for name, of in found.items() for d in of]
    return _svg(figure, drawn)


def _panel(axes: Axes, name: str, of: Sequence[Difference]) -> None:
    for i, d in enumerate(of):
        colour, sure = _colour(d.setting), d.p < 0.05
        if not math.isnan(d.test.low):
            axes.plot([d.test.low, d.test.high], [i, i], color=colour, linewidth=1.6, solid_capstyle="butt")
        axes.plot(d.test.difference, i, "o", color=colour, markersize=6, markerfacecolor=colour if sure else "white")
        text = f"{_span(d.test)}  n = {d.test.n}"
        axes.text(1.01, i, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    axes.axvline(0, color="black", linewidth=1)
    axes.set_yticks(range(len(of)), [d.setting for d in of], fontsize=8)
    axes.set_ylim(len(of) - 0.4, -0.6)
    axes.set_title(name, loc="left", fontsize=10, fontweight="bold")
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _colour(setting: str) -> str:
    """As everywhere: blue for softmax, orange for L-softmax, vermillion for G-softmax; green where Gaussians track."""
    if setting.startswith("G "):
        return GREEN if "tracked" in setting else VERMILLION
    return BLUE if setting.startswith("softmax") else ORANGE if setting.startswith("L-softmax") else GREY


def _short(v: float, limit: float) -> str:
    """With as many decimals as the largest of a panel needs.

    >>> _short(-0.00312, 0.0121), _short(3.456, 4.2), _short(0.4, 310.0)
    ('-0.0031', '+3.46', '+0')
    """
    digits = _decimals(limit / 10)
    return f"{round(v, digits) + 0.0:+.{digits}f}"


def _numbers(d: Difference | None) -> list[Any] | None:
    if d is None:
        return None
    return [*(f"{v:.5g}" for v in (d.test.difference, d.test.low, d.test.high)), d.test.n, bool(d.p < 0.05)]


def _svg(figure: Figure, drawn: list[Any]) -> str:
    import matplotlib

    file = io.StringIO()
    described = {"Date": None, "Description": json.dumps(drawn, ensure_ascii=False)}
    with matplotlib.rc_context({"svg.hashsalt": "gsoftmax"}):
        figure.savefig(file, format="svg", metadata=described)
    return file.getvalue()


def content(svg: str) -> list[str]:
    """What a file says: the numbers of its description, and its words, which stand beside their outlines."""
    return [*re.findall(r"<dc:description>(.*?)</dc:description>", svg, re.DOTALL), *re.findall(r"<!-- (.*?) -->", svg)]


def drawn(folder: Path = ROWS) -> dict[Path, str]:
    """The figures that there are rows for."""
    found = read(folder)
    cells, forest = map_cells(found), forest_rows(found)
    return ({MAP: draw_map(cells)} if cells else {}) | ({FOREST: draw_forest(forest)} if forest else {})


def outdated(figures: Mapping[Path, str]) -> list[Path]:
    """Files that are not there, or say other things than the rows, or have no rows any more."""
    old = {path: content(path.read_text("utf-8")) for path in (MAP, FOREST) if path.exists()}
    new = {path: content(svg) for path, svg in figures.items()}
    return [path for path in (MAP, FOREST) if old.get(path) != new.get(path)]
