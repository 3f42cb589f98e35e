"""Figures for papers: the page's specs with constants for its controls, written by vl-convert as SVG, PNG or PDF."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import measures
from ..files import atomic_file
from . import specs
from .data import PAPER
from .specs import Spec

__all__ = ["FORMATS", "figures", "render", "write"]

FORMATS = ("svg", "png", "pdf")
INK, FONT = "#222222", "Arial, Helvetica, Liberation Sans, sans-serif"
_MOST_CURVES = 4


def write(
    doc: Mapping[str, Any], out: Path, formats: Sequence[str], *, c: int = 0, names: Sequence[str] | None = None
) -> list[Path]:
    """Writes every figure the document has data for, or those called `names`, and returns their paths.

    doc, out: see `report.data`, and a folder
    formats, c: of `FORMATS`, and the class that figures of one class show
    """
    drawn = {name: spec for name, spec in figures(doc, c=c).items() if names is None or name in names}
    out.mkdir(parents=True, exist_ok=True)
    return [path for name, spec in drawn.items() for path in save(spec, out, name, formats)]


def save(spec: Spec, out: Path, name: str, formats: Sequence[str]) -> list[Path]:
    """Writes one figure and returns the paths of its files.

    spec, out: with all its data, and a folder
    name, formats: of the files
    """
    paths = [out / f"{name}.{kind}" for kind in formats]
    for path, kind in zip(paths, formats, strict=True):
        with atomic_file(path) as partial:
            partial.write_bytes(render(spec, kind))
    return paths


def render(spec: Spec, kind: str = "svg") -> bytes:
    """The content of a file that shows a Vega-Lite spec; the same spec gives the same bytes.

    spec: with all its data; kind: of `FORMATS`
    """
    if kind not in FORMATS:
        raise ValueError(f"figures must be of {', '.join(FORMATS)}, got {kind!r}")
    convert = vl_convert()
    options: dict[str, list[str]] = {"allowed_base_urls": []}  # nothing is fetched
    if kind == "svg":
        return str(convert.vegalite_to_svg(spec, **options)).encode()
    if kind == "png":
        return bytes(convert.vegalite_to_png(spec, scale=3, **options))
    # vl-convert lists the resources of a page in random order
    pdf = bytes(convert.vegalite_to_pdf(spec, **options))
    return re.sub(rb"(?:      /\w+ \d+ 0 R\n){2,}", lambda m: b"".join(sorted(m[0].splitlines(True))), pdf)


def vl_convert() -> Any:
    """The package vl-convert-python, which has Vega-Lite in it."""
    try:
        import vl_convert
    except ImportError:
        raise ValueError(
            "figures and the page need vl-convert-python, which is not installed: pip install 'gsoftmax[report]'"
        ) from None
    return vl_convert


def figures(doc: Mapping[str, Any], *, c: int = 0) -> dict[str, Spec]:
    """The figures that the document has data for, by name.

    doc: see `report.data`; c: the class that figures of one class show
    """
    heads, classes = doc["heads"], doc["classes"]
    # figures of one seed show the first that the most heads have outputs of
    seed = max(doc["seeds"], key=lambda s: len({g["head"] for g in doc["geometry"] if g["seed"] == s}))
    found: dict[str, Spec] = {}
    headline = measures.headline(doc["multilabel"]).key
    if any("paired" in row for row in doc["metrics"].get(headline, {}).values()):
        each = len(heads) - 1
        panels = [panel(specs.forest(json.dumps(headline)), None, 300, 40 * each)]
        panels.append(panel(specs.relative(), None, 300, {"step": 9, "for": "offset"}))
        found["forest"] = compose(doc, [panels])
    if doc["points"]:
        panels = [panel(specs.scatter(json.dumps(h)), h, 210, 190) for h in heads if _has(doc["points"], h)]
        found["x-against-p"] = compose(doc, [panels], f"class {classes[c]}", cls=c, seed=seed)
    if doc["geometry"]:
        wide = panel(specs.gaussians(), None, 300, 190)
        small = [panel(specs.class_bars(json.dumps(m), m), None, 26 * len(heads), 190) for m in PAPER]
        found["gaussians"] = compose(doc, [[wide, *small]], f"class {classes[c]}", cls=c, seed=seed)
    with_learned = [g for g in doc["geometry"] if g.get("learned") and g["split"] == "test"]
    if with_learned:
        panels = [panel(specs.learned(json.dumps(h), "-1"), h, 300, 230) for h in heads if _has(with_learned, h)]
        found["learned"] = compose(doc, [panels], seed=seed)
    if shown := [m for m in PAPER if m in doc["metrics"]]:
        panels = [panel(specs.average_bars(json.dumps(m), f"mean {m}"), None, 40 * len(heads), 180) for m in shown]
        found["averages"] = compose(doc, [panels])
    if keys := list(dict.fromkeys(k for run in doc["curves"] for k in run if k not in ("head", "seed", "epoch"))):
        panels = [panel(specs.curves(json.dumps(k)), None, 230, 180) for k in keys[:_MOST_CURVES]]
        found["curves"] = compose(doc, [panels])
    if len(doc["seeds"]) > 1:
        shown = [m for m in ("error", "mAP", *PAPER) if m in doc["metrics"]]
        panels = [panel(specs.seeds(json.dumps(m)), None, 50 * len(heads), 180) for m in shown]
        found["seeds"] = compose(doc, [panels])
    if tuned := specs.sensitivities(doc):
        panels = [panel(spec, None, 260, 190) for spec in tuned.values()]
        found["sensitivity"] = compose(doc, [panels], "lines: one key varied; rings: trials; on the edge: beyond it")
    if (doc.get("examples") or {}).get("confusion") and doc["examples"]["confusion"]["order"]:
        names = [classes[k] for k in specs.order(doc)]
        n, of = len(names), len(classes)
        few, side = (None, 240) if n == of else (f"{n} most confused of {of:,} classes", max(240, 11 * n))
        heads_ = doc["examples"]["confusion"]["heads"]
        panels = [panel(specs.confusion(json.dumps(h), "-1", names=names), h, side, side) for h in heads_]
        found["confusion"] = compose(doc, [panels], few)
    if doc["calibration"]:
        found["calibration"] = compose(doc, [[panel(specs.calibration(), None, 250, 250)]])
    if views := doc.get("features"):
        chosen = "-1" if len(classes) <= specs.MOST_COLOURS else str(c)
        drawn = [(row["head"], panel(specs.features(row, classes, chosen), row["head"], 300, 280)) for row in views]
        found["features"] = compose(doc, [[spec for h, spec in drawn if h == head] for head in dict(drawn)])
    for split in doc["splits"]:
        if any(g["split"] == split for g in doc["geometry"]):
            few = "" if len(classes) <= specs.SHOWN else f", first {specs.SHOWN} of {len(classes):,} classes"
            panels = class_panels(json.dumps(split))
            found[f"classes-{split}"] = compose(doc, [panels], f"{split} set{few}", first=0)
    return found


def sheet(spec: Spec, title: str | None = None, heads: Sequence[str] = ()) -> Spec:
    """A spec in the style of our figures, on white.

    spec: without `config`; title: of the whole figure; heads: whose colours are the first ones
    """
    legend = {"labelFontSize": 12, "labelColor": INK, "labelLimit": 220, "titleColor": INK, "symbolOpacity": 1}
    header = {"fontSize": 13, "fontWeight": "normal", "color": INK, "subtitleColor": INK}
    style = specs.config(
        heads,
        INK,
        FONT,
        background="white",
        legend=legend,
        title=header,
        axisXDiscrete={"labelAngle": -35},
        axisYDiscrete={"labelLimit": 200},
        padding=8,
        numberFormat=".4~g",
    )
    heading = {"title": {"text": title, "anchor": "start", "fontSize": 14, "offset": 10}} if title else {}
    return {**spec, **heading, "config": style}


def panel(spec: Spec, title: str | None, width: int, height: int | Spec) -> Spec:
    """A spec as a part of a figure, with its title and size in pixels."""
    return {**spec, "title": title or "", "width": width, "height": height}


def class_panels(split: str) -> list[Spec]:
    """The paper's measures of every class, one panel each; only the first has the classes' names.

    split: an expression
    """
    made = [panel(specs.bars(json.dumps(m), split), m, 190, {"step": 8, "for": "offset"}) for m in PAPER]
    for layer in (layer for one in made[1:] for layer in one["layer"]):
        layer["encoding"]["y"]["axis"] = {"labels": False, "ticks": False}
    return made


def compose(doc: Mapping[str, Any], rows: Sequence[list[Spec]], title: str | None = None, **choice: Any) -> Spec:
    """Rows of panels, with the data that they name and the parameters of the document.

    doc, rows: the document, and panels from top to bottom
    title, choice: of the whole figure, and parameters as in `specs.parameters`
    """
    data = {panel["data"]["name"] for panels in rows for panel in panels}
    sources = {**doc, **specs.sources(doc)}
    params = [{"name": k, "value": v} for k, v in specs.parameters(doc, **choice).items()]
    parts: Spec = {"hconcat": rows[0]} if len(rows) == 1 else {"vconcat": [{"hconcat": panels} for panels in rows]}
    whole = {**parts, "params": params, "datasets": {name: sources[name] for name in sorted(data)}}
    return sheet(whole, title, doc["heads"])


def _has(rows: Sequence[Mapping[str, Any]], head: str) -> bool:
    return any(row["head"] == head for row in rows)
