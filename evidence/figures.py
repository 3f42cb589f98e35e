"""Figures from the rows, a map of λ × σ and a forest of differences in error: `python -m evidence.pages` writes them.

The numbers that are drawn are in the file's description: two files can be compared whatever version of Vega drew them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from gsoftmax import measures
from gsoftmax.report.colours import BLUE, GREEN, GREY, ORANGE, VERMILLION
from gsoftmax.report.figures import render, sheet

from .run import ROWS
from .tables import ROOT, Difference, Found, decimals, differences, done, metrics_of, read, span

IMAGES = ROOT / "docs" / "images"
MAP, FOREST = IMAGES / "evidence-map.svg", IMAGES / "evidence-forest.svg"
MAPPED = ("error", "compactness", "separability", "ece")
SETTING = re.compile(r"λ=([\d.]+) \((-?[\d.]+), ([\d.]+)\)")  # λ (μ, σ)

Cell = tuple[float, float]  # λ, σ
Spec = dict[str, Any]


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
    """Two by two panels, one for each metric: λ against the first σ."""
    panels = []
    for metric, of in cells.items():
        limit = max([abs(d.test.difference) for d in of.values() if d is not None], default=0) or 1.0
        sign = -1 if measures.find(metric).smaller_is_better else 1
        rows = [
            {
                "lam": lam,
                "sigma": sigma,
                "good": None if d is None else sign * d.test.difference / limit,
                "text": "diverged" if d is None else _short(d.test.difference, limit),
                "sure": d is not None and bool(d.p < 0.05),
            }
            for (lam, sigma), d in of.items()
        ]
        paint = {"domain": [-1, 0, 1], "range": [VERMILLION, "#ffffff", BLUE], "interpolate": "rgb"}
        missing = {"test": "datum.good === null", "value": "#dedede"}
        good = {"field": "good", "type": "quantitative", "scale": paint, "legend": None, "condition": missing}
        dark = {"test": "abs(datum.good) > 0.8", "value": "white"}
        bold = {"type": "text", "fontSize": 12, "fontWeight": {"expr": "datum.sure ? 'bold' : 'normal'"}}
        panels.append(
            {
                "title": measures.find(metric).title,
                "data": {"values": rows},
                "width": {"step": 92},
                "height": {"step": 34},
                "encoding": {
                    "x": ordinal("sigma", "first σ", labelAngle=0),
                    "y": ordinal("lam", "λ", titleAngle=0) | {"sort": "descending"},
                },
                "layer": [
                    {"mark": {"type": "rect", "stroke": "white"}, "encoding": {"color": good}},
                    {
                        "mark": bold,
                        "encoding": {
                            "text": {"field": "text"},
                            "color": {"condition": dark, "value": "black"},
                        },
                    },
                ],
            }
        )
    title = "Difference from softmax: blue is better, orange is worse, bold is p < 0.05 after Holm's correction"
    drawn = [[m, *cell, _numbers(d)] for m, of in cells.items() for cell, d in of.items()]
    independent = {"scale": {"color": "independent"}}
    return svg({"concat": panels, "columns": 2, "resolve": independent}, title, drawn)


def forest_rows(found: Found) -> dict[str, list[Difference]]:
    """By study: the differences in error, single-label studies, without the tuning studies."""
    rows = {
        name: [d for d in differences(study, rows) if d.metric == "error"]
        for name, (study, rows) in found.items()
        if not name.startswith("tune-") and "error" in metrics_of(rows)
    }
    return {name: of for name, of in rows.items() if of}


def draw_forest(found: Mapping[str, Sequence[Difference]]) -> str:
    """One panel per study, each with its own scale: differences are larger with less data."""
    panels = [_panel(name, of) for name, of in found.items()]
    title = "Difference in error, points: left of the line is better; filled is p < 0.05 (Holm)"
    drawn = [[name, d.setting, _numbers(d)] for name, of in found.items() for d in of]
    return svg({"vconcat": panels, "spacing": 14}, title, drawn)


def _panel(name: str, of: Sequence[Difference]) -> Spec:
    rows = [
        {
            "setting": d.setting,
            "difference": d.test.difference,
            "low": None if math.isnan(d.test.low) else d.test.low,
            "high": None if math.isnan(d.test.high) else d.test.high,
            "text": f"{span(d.test)}  n = {d.test.n}",
            "colour": _colour(d.setting),
            "fill": _colour(d.setting) if d.p < 0.05 else "white",
        }
        for d in of
    ]
    colour = {"field": "colour", "type": "nominal", "scale": None}
    x = {"field": "difference", "type": "quantitative", "title": None}
    y = ordinal("setting", None, labelLimit=300) | {"sort": None}
    return {
        "title": {"text": name, "anchor": "start", "frame": "group", "fontWeight": "bold"},
        "data": {"values": rows},
        "width": 430,
        "height": {"step": 20},
        "layer": [
            {"mark": "rule", "encoding": {"x": {"datum": 0}}},
            {
                "transform": [{"filter": "isValid(datum.low)"}],
                "mark": {"type": "rule", "strokeWidth": 2},
                "encoding": {"y": y, "x": {**x, "field": "low"}, "x2": {"field": "high"}, "color": colour},
            },
            {
                "mark": {"type": "point", "size": 60, "opacity": 1},
                "encoding": {"y": y, "x": x, "color": colour, "fill": {**colour, "field": "fill"}},
            },
            {
                "mark": {"type": "text", "align": "left", "fontSize": 11},
                "encoding": {"y": y, "x": {"value": 440}, "text": {"field": "text"}},
            },
        ],
    }


def ordinal(field: str, title: str | None, **axis: Any) -> Spec:
    style = {"grid": False, "ticks": False, "domain": False, **axis}
    return {"field": field, "type": "ordinal", "title": title, "axis": style}


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
    digits = decimals(limit / 10)
    return f"{round(v, digits) + 0.0:+.{digits}f}"


def _numbers(d: Difference | None) -> list[Any] | None:
    if d is None:
        return None
    return [*(f"{v:.5g}" for v in (d.test.difference, d.test.low, d.test.high)), d.test.n, bool(d.p < 0.05)]


def svg(spec: Spec, title: str, drawn: list[Any]) -> str:
    described = escape(json.dumps(drawn, ensure_ascii=False))
    return render(sheet(spec, title)).decode().replace(">", f"><desc>{described}</desc>", 1)


def content(svg: str) -> list[str]:
    """The content of a file: its description, which has the numbers, and its text."""
    return [e.text or "" for e in ElementTree.fromstring(svg).iter() if e.tag.endswith(("}desc", "}text"))]


def drawn(folder: Path = ROWS) -> dict[Path, str]:
    """The figures that there are rows for."""
    found = read(folder)
    cells, forest = map_cells(found), forest_rows(found)
    return ({MAP: draw_map(cells)} if cells else {}) | ({FOREST: draw_forest(forest)} if forest else {})


def outdated(figures: Mapping[Path, str]) -> list[Path]:
    """Files that are not there, or say other things than the rows, or have no rows any more."""
    paths = dict.fromkeys((MAP, FOREST, *figures))
    old = {path: content(path.read_text("utf-8")) for path in paths if path.exists()}
    new = {path: content(svg) for path, svg in figures.items()}
    return [path for path in paths if old.get(path) != new.get(path)]
