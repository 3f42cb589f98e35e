"""Figures for papers and pictures: the page's figures drawn by matplotlib, as SVG, PNG or PDF."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import measures
from ..files import atomic_file
from .colours import GREY, colours

FORMATS = ("svg", "png", "pdf")
PAPER = ("compactness", "separability", "ratio")
_STYLE = {
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "gsoftmax",  # the same figure is the same file
    "figure.dpi": 110,
    "savefig.dpi": 200,
}
_SHAPES = "os^Dv*Pp"


def write(
    doc: Mapping[str, Any], out: Path, formats: Sequence[str], *, c: int = 0, names: Sequence[str] | None = None
) -> list[Path]:
    """Draws every figure the document has data for, or the named ones; `c` is the class of the figures of one class."""
    unknown = sorted(set(formats) - set(FORMATS))
    if unknown:
        raise ValueError(f"figures must be of {', '.join(FORMATS)}, got {unknown[0]!r}")
    out.mkdir(parents=True, exist_ok=True)
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
    paths = []
    matplotlib = _matplotlib()
    with matplotlib.rc_context(_STYLE):
        for name, figure in figures(doc, c=c).items():
            for kind in formats if names is None or name in names else ():
                path = out / f"{name}.{kind}"
                with atomic_file(path) as partial:
                    figure.savefig(partial, format=kind, metadata=metadata[kind], bbox_inches="tight")
                paths.append(path)
    return paths


def figures(doc: Mapping[str, Any], *, c: int = 0) -> dict[str, Any]:
    """The figures by name, as `matplotlib.figure.Figure`."""
    with _matplotlib().rc_context(_STYLE):
        makers: dict[str, Callable[[], Any]] = {
            "x-against-p": lambda: scatter(doc, c),
            "gaussians": lambda: gaussians(doc, c),
            "learned": lambda: learned(doc),
            "averages": lambda: averages(doc),
            "curves": lambda: curves(doc),
            "seeds": lambda: seeds(doc),
            "calibration": lambda: calibration(doc),
        }
        for split in doc["splits"]:
            makers[f"classes-{split}"] = functools.partial(bars, doc, split)
        drawn = {name: make() for name, make in makers.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def scatter(doc: Mapping[str, Any], c: int) -> Any:
    """x against p of one class and its impostors, one panel a head (first seed)."""
    heads, paint = doc["heads"], colours(doc["heads"])
    runs = {run["head"]: run for run in reversed(doc["points"])}
    if not runs or c >= len(doc["classes"]):
        return None
    figure, axes = _figure(len(runs), width=3.0, height=2.6, share=True)
    for axis, head in zip(axes, [h for h in heads if h in runs], strict=True):
        run = {k: np.array(runs[head][k]) for k in ("c", "own", "x", "p")}
        for own, colour, marker, label in (
            (0, GREY, "+", "without the label" if doc["multilabel"] else "impostors"),
            (1, paint[head], "o", "with the label" if doc["multilabel"] else "own output"),
        ):
            use = (run["c"] == c) & (run["own"] == own)
            paint_as = {"facecolors": "none", "edgecolors": colour} if own else {"color": colour}
            axis.scatter(run["x"][use], run["p"][use], 14, marker=marker, linewidths=0.7, label=label, **paint_as)
        axis.set(title=_text(head), xlabel="x", ylim=(-0.03, 1.03))
        axis.legend(loc="best", fontsize=8)
    axes[0].set_ylabel("p")
    figure.suptitle(f"class {_text(doc['classes'][c])}", x=0.01, ha="left")
    return figure


def gaussians(doc: Mapping[str, Any], c: int) -> Any:
    """The Gaussians of x (first seed) with compactness, separability and ratio (means over seeds) beside them."""
    rows = [g for g in doc["geometry"] if g["split"] == "test"]
    if not rows or c >= len(doc["classes"]):
        return None
    paint = colours(doc["heads"])
    figure, axes = _figure(1 + len(PAPER), width=1.9, height=2.6, ratios=[3.2, 1, 1, 1])
    first = {g["head"]: g for g in reversed(rows)}
    curves_of = [
        (head, side, first[head][side][c])
        for head in doc["heads"]
        for side in ("other", "own")
        if head in first and _usable(first[head][side][c])
    ]
    if curves_of:
        low = min(m - 3.5 * s for *_, (m, s) in curves_of)
        high = max(m + 3.5 * s for *_, (m, s) in curves_of)
        x = np.linspace(low, high, 160)
        for head, side, (m, s) in curves_of:
            y = np.exp(-0.5 * ((x - m) / s) ** 2) / (s * math.sqrt(2 * math.pi))
            own = side == "own"
            axes[0].plot(x, y, color=paint[head], ls="-" if own else "--", lw=1.6, label=_text(head) if own else None)
            if own:
                axes[0].fill_between(x, y, color=paint[head], alpha=0.1, lw=0)
        axes[0].legend(fontsize=8)
    axes[0].set(xlabel="x", ylabel="density", title=f"class {_text(doc['classes'][c])} (dashed: its impostors)")
    for axis, measure in zip(axes[1:], PAPER, strict=True):
        values = {h: _over_seeds(doc, h, "test", measure, c) for h in doc["heads"]}
        _bars(axis, values, paint)
        axis.set_title(measure)
    return figure


def bars(doc: Mapping[str, Any], split: str, most: int = 20) -> Any:
    """The three measures of every class (the first twenty), all heads side by side."""
    rows = [g for g in doc["geometry"] if g["split"] == split]
    if not rows:
        return None
    shown = min(most, len(doc["classes"]))
    heads, paint = doc["heads"], colours(doc["heads"])
    figure, axes = _figure(len(PAPER), width=max(5.0, 0.5 * shown + 1.5), height=1.9, rows=len(PAPER))
    width = 0.8 / len(heads)
    for axis, measure in zip(axes, PAPER, strict=True):
        for k, head in enumerate(heads):
            found = [_over_seeds(doc, head, split, measure, c) for c in range(shown)]
            mean = [np.nan if f is None else f[0] for f in found]
            error = [0.0 if f is None else f[1] for f in found]
            at = np.arange(shown) + (k - (len(heads) - 1) / 2) * width
            axis.bar(
                at,
                mean,
                width,
                color=paint[head],
                label=_text(head),
                yerr=error if any(error) else None,
                error_kw=_THIN,
            )
        axis.set_ylabel(measure)
        axis.grid(axis="x", visible=False)
        axis.set_xticks(range(shown), [_short(n) for n in doc["classes"][:shown]], rotation=0 if shown <= 12 else 45)
    axes[0].legend(ncols=len(heads), loc="lower left", bbox_to_anchor=(0, 1), fontsize=8)
    few = "" if shown == len(doc["classes"]) else f", first {shown} of {len(doc['classes'])} classes"
    figure.suptitle(f"{split} set{few}", x=0.01, ha="left")
    return figure


def averages(doc: Mapping[str, Any]) -> Any:
    """The three measures averaged over all classes (labels), with intervals over seeds."""
    found = [m for m in PAPER if m in doc["metrics"]]
    if not found:
        return None
    paint = colours(doc["heads"])
    figure, axes = _figure(len(found), width=2.2, height=2.4)
    for axis, measure in zip(axes, found, strict=True):
        rows = doc["metrics"][measure]
        values = {
            h: (r["mean"], 0.0 if r.get("low") is None else r["mean"] - r["low"])
            for h, r in rows.items()
            if r["mean"] is not None
        }
        _bars(axis, values, paint)
        axis.set_title(f"mean {measure}")
    return figure


def learned(doc: Mapping[str, Any]) -> Any:
    """(mu, sigma) of the heads that have them beside what x shows, one panel a head (first seed)."""
    rows: dict[str, Any] = {}
    for g in doc["geometry"]:
        if g.get("learned") and g["split"] == "test":
            rows.setdefault(g["head"], g)
    if not rows:
        return None
    paint = colours(doc["heads"])
    figure, axes = _figure(len(rows), width=4.0, height=3.0)
    kinds = (("learned", "o", "learned"), ("own", "^", "x, its own images"), ("overall", "s", "x, all images"))
    for axis, (head, g) in zip(axes, rows.items(), strict=True):
        for key, marker, label in kinds:
            pairs = np.array([p if p and None not in p else (np.nan, np.nan) for p in g[key] or []], dtype=float)
            if len(pairs):
                axis.scatter(*pairs.T, 24, paint[head], marker=marker, alpha=0.8, label=label, linewidths=0)
        axis.set(xlabel="mean", ylabel="σ", title=_text(head))
        axis.legend(fontsize=8)
    return figure


def curves(doc: Mapping[str, Any]) -> Any:
    """Everything that was written down by epoch, the loss and the learning rate first."""
    if not doc["curves"]:
        return None
    keys = [k for c in doc["curves"] for k in c if k not in ("head", "seed", "epoch")]
    keys = list(dict.fromkeys(keys))[:4]
    paint = colours(doc["heads"])
    figure, axes = _figure(len(keys), width=3.2, height=2.4)
    for axis, key in zip(axes, keys, strict=True):
        told: set[str] = set()
        for run in doc["curves"]:
            points = [(e, v) for e, v in zip(run["epoch"], run.get(key, []), strict=False) if v is not None]
            if points:
                label = None if run["head"] in told else _text(run["head"])
                told.add(run["head"])
                axis.plot(*zip(*points, strict=True), color=paint[run["head"]], lw=1, alpha=0.8, label=label)
        if all(v is None or v > 0 for run in doc["curves"] for v in run.get(key, [])):
            axis.set_yscale("log")
        axis.set(xlabel="epoch", title={"lr": "learning rate"}.get(key, measures.find(key).label))
    axes[0].legend(fontsize=8)
    return figure


def seeds(doc: Mapping[str, Any]) -> Any:
    """Every seed as a point, with the mean and its 95 % interval."""
    if len(doc["seeds"]) < 2:
        return None
    metrics = [m for m in ("error", "mAP", *PAPER) if m in doc["metrics"]]
    paint = colours(doc["heads"])
    figure, axes = _figure(len(metrics), width=2.2, height=2.4)
    for axis, metric in zip(axes, metrics, strict=True):
        for k, head in enumerate(doc["heads"]):
            row = doc["metrics"][metric][head]
            marker = _SHAPES[k % len(_SHAPES)]
            at = np.full(len(row["values"]), k - 0.12)
            axis.scatter(at, row["values"], 20, facecolors="none", edgecolors=paint[head], marker=marker)
            if row.get("low") is not None:
                half = row["mean"] - row["low"]
                axis.errorbar(k + 0.12, row["mean"], half, fmt=marker, color=paint[head], ms=5, lw=1.8)
        names = [_short(h, 12) for h in doc["heads"]]
        axis.set_xticks(range(len(names)), names, rotation=30, ha="right")
        axis.set(title=measures.find(metric).title, xlim=(-0.6, len(names) - 0.4))
        axis.grid(axis="x", visible=False)
    return figure


def calibration(doc: Mapping[str, Any]) -> Any:
    """Reliability diagram, all seeds together."""
    if not doc["calibration"]:
        return None
    paint = colours(doc["heads"])
    figure, (axis,) = _figure(1, width=3.4, height=3.2)
    axis.plot([0, 1], [0, 1], ls="--", color=GREY, lw=1)
    for k, head in enumerate(doc["heads"]):
        runs = [run for run in doc["calibration"] if run["head"] == head]
        if not runs:
            continue
        count = np.array([run["count"] for run in runs], float)
        sums = [np.array([[v or 0.0 for v in run[key]] for run in runs]) * count for key in ("confidence", "right")]
        total = count.sum(0)
        full = total > 0
        x, y = (part.sum(0)[full] / total[full] for part in sums)
        axis.plot(x, y, marker=_SHAPES[k % len(_SHAPES)], color=paint[head], ms=4, lw=1.4, label=_text(head))
    axis.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1.02), ylim=(-0.02, 1.02))
    axis.legend(fontsize=8)
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# Parts
# ---------------------------------------------------------------------------------------------------------------------

_THIN = {"lw": 0.9, "ecolor": "#333333"}


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ValueError("figures need matplotlib, which is not installed: pip install 'gsoftmax[report]'") from None
    return matplotlib


def _figure(
    panels: int, *, width: float, height: float, rows: int = 1, share: bool = False, ratios: list[float] | None = None
) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    columns = panels // rows
    total = width * (sum(ratios) if ratios else columns)
    figure = Figure(figsize=(min(total, 14), height * rows + 0.4), layout="constrained")
    grid = figure.subplots(
        rows, columns, squeeze=False, sharex=share, sharey=share, gridspec_kw={"width_ratios": ratios}
    )
    return figure, list(grid.flat)


def _bars(axis: Any, values: Mapping[str, tuple[float, float] | None], paint: Mapping[str, str]) -> None:
    for k, (head, found) in enumerate(values.items()):
        if found is not None:
            axis.bar(k, found[0], 0.75, color=paint[head], yerr=found[1] or None, error_kw=_THIN)
    axis.set_xticks(range(len(values)), [_short(h, 14) for h in values], rotation=35, ha="right")
    axis.grid(axis="x", visible=False)


def _over_seeds(doc: Mapping[str, Any], head: str, split: str, measure: str, c: int) -> tuple[float, float] | None:
    """Mean and deviation over seeds of a class's measure."""
    values = [g[measure][c] for g in doc["geometry"] if g["head"] == head and g["split"] == split]
    known = [v for v in values if v is not None]
    return (float(np.mean(known)), float(np.std(known, ddof=1)) if len(known) > 1 else 0.0) if known else None


def _usable(pair: Sequence[float | None] | None) -> bool:
    return bool(pair) and pair[0] is not None and bool(pair[1])  # type: ignore[index]


def _short(name: str, most: int = 18) -> str:
    return _text(name if len(name) <= most else name[: most - 1] + "…")


def _text(name: str) -> str:
    """A name as it is: matplotlib would set what stands between two $ as mathematics, and hide a label like _this."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")
