"""The figures of a report as Vega-Lite, for the page and for files.

A spec names the part of the document that it draws (`data.name`) and selects its rows by parameters: `doc` (classes,
heads, colours, seeds, metrics, titles, scales and directions of measures, confusable order of the classes), `sides`
(what own outputs and impostors are called) and the choices `cls`, `head` and `seed` (null for all), `split`, `metric`,
`curve`, `panel` (head of the panel) and `paper` (its colour).  The page sets them from its controls; `figures.py`
writes constants in their place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .. import measures
from .colours import BLUE, GREY, VERMILLION, colours

Spec = dict[str, Any]

# of the playground: name, text, lowest, highest, step and first value
SLIDERS = (
    ("lam", "λ", 0, 8, 0.1, 2),
    ("mu1", "μ₁", -5, 5, 0.1, 0),
    ("sigma1", "σ₁", 0.1, 5, 0.1, 1),
    ("x1", "x₁", -8, 8, 0.1, 1),
    ("mu2", "μ₂", -5, 5, 0.1, 2),
    ("sigma2", "σ₂", 0.1, 5, 0.1, 1),
    ("x2", "x₂", -8, 8, 0.1, 0),
)
SHOWN = 20  # classes that the bars of a file show
MOST_COLOURS = 20  # classes with a colour each
FEWEST = 10  # images of a bin of the reliability diagram
_NUMBERED = 12  # classes whose confusion matrix has numbers
_LEAST_CELL = 26  # pixels of a cell that has room for one
_MIDDLE = 0.179  # luminance on which black and white have the same contrast, 4.58 to 1
_LINE = "#888888A0"
_CROSS = "M-.8,-.8L.8,.8M.8,-.8L-.8,.8"  # two thin strokes
_FEW = {"tickCount": 6}
_NUMBER = {"labelExpr": "datum.label === '' ? '' : format(datum.value, '.4~g')"}  # "~g" alone writes 10 as 1e+1
_CHOSEN = "(head === null || datum.head === head) && (seed === null || datum.seed === seed)"
_PAIR = "isArray(datum.pair) && isValid(datum.pair[0]) && isValid(datum.pair[1])"
_LEGEND = {
    "title": "% of the class",
    "orient": "bottom",
    "direction": "horizontal",
    "symbolType": "square",
    "tickCount": 4,
}
_COLOUR = {"field": "head", "type": "nominal", "title": None, "scale": {"domain": {"expr": "doc.heads"}}}
_HEADS = {"field": "head", "type": "nominal", "title": "head", "sort": None}


def config(heads: Sequence[str], ink: str, font: str, **more: Any) -> Spec:
    """The style of all figures.

    heads: whose colours are the first ones; ink: colour of the text; font: a CSS family; more: of Vega-Lite's config
    """
    axis = {
        **{"labelColor": ink, "titleColor": ink, "titleFontWeight": "normal", "labelFontSize": 12, "titleFontSize": 13},
        **{"gridColor": "#88888840", "domainColor": _LINE, "tickColor": _LINE, "labelLimit": 110, "labelFlush": False},
    }
    paint = {"range": {"category": list(colours(heads).values())}} if heads else {}
    return {"font": font, "view": {"stroke": None}, "axis": axis, "rule": {"color": ink}, **paint, **more}


def for_page(doc: Mapping[str, Any]) -> dict[str, Spec]:
    """All figures of the page, by name."""
    heads = doc["heads"]
    each = len(heads) - 1
    made = {
        "forest": (forest(brief=True), 60 + 44 * each),
        "relative": (relative(brief=True), 50 + (10 + 7 * each) * len(doc["metrics"])),
        "scatter": (scatter(), 220),
        "gaussians": (gaussians(), 260),
        "learned": (learned(), 340),
        "confusion": confusion_for_page(doc),
        "curves": (curves(), 260),
        "seeds": (seeds(), 240),
        "differences": (differences(), 240),
        "calibration": (calibration(), 320),
        **{f"tuning-{key}": (spec, 240) for key, spec in sensitivities(doc).items()},
        **{f"features-{k}": (features(row, doc["classes"]), 340) for k, row in enumerate(doc.get("features", []))},
    }
    drawn = {name: _fill_container(spec, height, heads) for name, (spec, height) in made.items()}
    return drawn if doc["kind"] == "compare" else {name: _of_models(spec) for name, spec in drawn.items()}


def _of_models(part: Any) -> Any:
    """A spec, or a part of it, whose tooltips name models and no seeds."""
    if isinstance(part, list):
        seeds = ("seed", "seeds", "sd")
        return [_of_models(v) for v in part if not (isinstance(v, dict) and v.get("field") in seeds and "title" in v)]
    if not isinstance(part, dict):
        return part
    return {k: "model" if (k, v) == ("title", "head") else _of_models(v) for k, v in part.items()}


def confusion_for_page(doc: Mapping[str, Any]) -> tuple[Spec, int]:
    """`confusion` for the classes of a document, and its height."""
    names = [doc["classes"][c] for c in order(doc)]
    n = len(names)
    return confusion(names=names, numbers=n <= _NUMBERED), 90 + min(34 * n, max(270, min(12 * n, 480)))


def order(doc: Mapping[str, Any]) -> list[int]:
    """The classes of the confusion matrix."""
    found: list[int] = ((doc.get("examples") or {}).get("confusion") or {}).get("order") or []
    return found


def parameters(doc: Mapping[str, Any], **choice: Any) -> dict[str, Any]:
    """The parameters of a document, and the choices `cls`, `head`, `seed` and `split` where files keep the default."""
    known = {key: doc[key] for key in ("classes", "heads", "seeds", "metrics")}
    known["colours"] = list(colours(doc["heads"]).values())
    known |= {"order": list(doc["metrics"]), "confusable": order(doc)}
    keys = [*doc["metrics"], *doc["measures"], *(key for run in doc["curves"] for key in run)]
    known["titles"] = {key: title_of(key) for key in keys}
    known["scales"] = {key: measures.find(key).scale for key in doc["measures"]}
    shown = {key: measures.find(key) for key in doc["metrics"]}
    known["differences"] = {key: m.difference for key, m in shown.items()}
    known["arrows"] = {key: f"{m.title} {'↓' if m.smaller_is_better else '↑'}" for key, m in shown.items()}
    sides = ["with the label", "without the label"] if doc["multilabel"] else ["own output", "impostors"]
    own = {"cls": 0, "head": None, "seed": None, "split": "test", "paper": "white"}
    return {"doc": known, "sides": sides, **own, **choice}


def title_of(key: str) -> str:
    """What a measure or a column of the learning curves is called.

    key: of a result or of a learning curve
    """
    return "learning rate" if key == "lr" else measures.find(key).title


def sources(doc: Mapping[str, Any]) -> dict[str, Any]:
    """The data that the figures name, beside those that a document has as lists of rows.

    doc: see `report.data`
    """
    found = (doc.get("examples") or {}).get("confusion") or {"heads": {}}
    return {
        "heads": [{"head": head} for head in doc["heads"]],
        "confusion": [{"head": head, **of} for head, of in found["heads"].items()],
    }


def forest(metric: str = "metric", *, brief: bool = False) -> Spec:
    """The difference of every head from the first: rings for the seeds, the mean, and its 95 % interval.

    brief: whether the first head is named elsewhere, not in the title of the axis
    """
    title = {"expr": ("" if brief else "'difference from ' + doc.heads[0] + ': ' + ") + f"doc.differences[{metric}]"}
    return _differences(metric, "x", title, {**_HEADS, "title": None, "axis": {"labelLimit": 170}})


def differences(metric: str = "metric") -> Spec:
    """The same from bottom to top."""
    return _differences(metric, "y", {"expr": f"doc.differences[{metric}]"}, _HEADS)


def relative(*, brief: bool = False) -> Spec:
    """The differences of all measures from the first head's mean, in percent of it, with their 95 % intervals.

    brief: as in `forest`
    """
    title = "difference, %" if brief else {"expr": "'difference, % of the mean of ' + doc.heads[0]"}
    x = _q("value", None, axis={**_FEW, "title": title})
    y = {"field": "label", "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": 130}}
    wide = [_text("label", "measure"), _text("head"), *(_number(k, t) for k, t in _ENDS.items())]
    place = {"y": y, "yOffset": _HEADS, "color": _COLOUR, "tooltip": [*wide, _number("p", "p after correction")]}
    base = "doc.metrics[datum.key][doc.heads[0]].mean"
    sure = {"condition": {"test": "isValid(datum.p) && datum.p < 0.05", "value": 1}, "value": 0}
    dot = {"type": "point", "filled": False, "size": 40, "opacity": 1, "strokeWidth": 1.5}
    steps = _steps(
        "datum.head !== doc.heads[0]",
        _calc(key="doc.order"),
        {"flatten": ["key"]},
        _calc(row="doc.metrics[datum.key][datum.head]"),
        f"isValid(datum.row) && isValid(datum.row.paired) && {base} !== 0",
        _calc(label="doc.arrows[datum.key]", p="datum.row.paired.p_holm"),
        _calc(**{k: f"100 * datum.row.paired.{of} / abs({base})" for k, of in _PAIRED.items()}),
    )
    return _figure(
        "heads",
        steps,
        _layer({"type": "rule", "strokeDash": [4, 3]}, {"x": {"datum": 0}}),
        _layer({"type": "rule", "strokeWidth": 2}, {**place, "x": {**x, "field": "low"}, "x2": {"field": "high"}}),
        _layer(dot, {**place, "x": x, "fill": _COLOUR, "fillOpacity": sure}),
    )


def scatter(panel: str = "panel", cls: str = "cls") -> Spec:
    """x against p of one class and its impostors, for one head; the range of x is that of all heads."""
    x = _q("x", scale={"zero": False})
    p = _q("p", scale={"domain": [-0.03, 1.03], "nice": False}, axis={**_FEW, "grid": True})
    colour = {"expr": f"doc.colours[indexof(doc.heads, {panel})]"}
    shapes = {"domain": {"expr": "sides"}, "range": ["circle", _CROSS]}
    ends = [{"op": "min", "field": "x", "as": "low"}, {"op": "max", "field": "x", "as": "high"}]
    at_zero = {**{k: v for k, v in p.items() if k != "field"}, "datum": 0}
    invisible = {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": at_zero}
    shown = {
        "x": x,
        "y": p,
        "order": {"field": "own"},  # impostors below
        "color": {"condition": {"test": "datum.own", "value": colour}, "value": GREY},
        "opacity": {"condition": {"test": "datum.own", "value": 0.75}, "value": 0.45},
        "shape": {"field": "side", "type": "nominal", "title": None, "scale": shapes},
        "tooltip": [_text("side", "which"), _text("output"), _number("x"), _number("p"), _text("seed")],
    }
    output = "datum.j < 0 ? 'another class' : doc.classes[datum.j]"
    return _figure(
        "points",
        _steps(
            "seed === null || datum.seed === seed",
            {"flatten": ["c", "own", "j", "x", "p"]},
            f"datum.c === {cls}",
            _calc(side="sides[1 - datum.own]", output=output),
        ),
        _layer({"type": "rule", "opacity": 0}, invisible, {"aggregate": ends}),
        _layer({"type": "point", "size": 24, "strokeWidth": 1.2}, shown, f"datum.head === {panel}"),
    )


def gaussians(cls: str = "cls") -> Spec:
    """The Gaussians of a class's own output and of all its impostors, with mean and σ averaged over seeds; with one
    head chosen, its nearest impostors."""
    alone = "(head !== null || length(doc.heads) === 1)"
    near = f"datum.nearest[{cls}]"
    pairs = {f"near{k}": f"{alone} && length({near}) > {k} ? slice({near}[{k}], 1) : null" for k in range(3)}
    pairs = {"all": f"datum.other[{cls}]", **pairs, "one": f"datum.own[{cls}]"}
    is_near = "indexof(datum.key, 'near') === 0"
    averages = [{"op": "mean", "field": f, "as": f} for f in ("mean", "sigma")]
    name = f"'impostor ' + doc.classes[{near}[toNumber(slice(datum.key, 4))][0]]"
    encoding = {
        "x": _q("x", axis=_FEW),
        "y": _q("density", stack=None),
        "color": _COLOUR,
        "detail": [{"field": "which"}],
        "tooltip": [_text("head"), _text("which"), _number("mean"), _number("sigma", "σ"), _text("seeds")],
    }
    dash = {"domain": {"expr": "sides"}, "range": [[1, 0], [5, 3]]}
    line = {
        "strokeDash": {"field": "side", "type": "nominal", "title": None, "scale": dash},
        "strokeWidth": {"condition": {"test": "datum.near", "value": 1}, "value": 2.2},
    }
    return _figure(
        "geometry",
        _steps(
            f"{_CHOSEN} && datum.split === split",
            _calc(**pairs),
            {"fold": list(pairs), "as": ["key", "pair"]},
            f"{_PAIR} && datum.pair[1] > 0",
            _calc(near=is_near, side="datum.key === 'one' ? sides[0] : sides[1]"),
            _calc(which=f"datum.near ? {name} : datum.side", mean="datum.pair[0]", sigma="datum.pair[1]"),
            {"aggregate": [*averages, {"op": "count", "as": "seeds"}], "groupby": ["head", "which", "side", "near"]},
            _calc(u="sequence(-4, 4.001, 0.05)"),
            {"flatten": ["u"]},
            _calc(x="datum.mean + datum.sigma * datum.u", density="densityNormal(datum.x, datum.mean, datum.sigma)"),
        ),
        _layer({"type": "area", "opacity": 0.1, "line": False}, encoding, "datum.side === sides[0]"),
        _layer({"type": "line"}, {**encoding, **line}),
    )


def bars(measure: str = "measure", split: str = "split") -> Spec:
    """One measure for every class, all heads side by side; whiskers are one standard deviation over seeds."""
    axis = {"labelExpr": "doc.classes[datum.value]"}
    place = {"y": {"field": "c", "type": "ordinal", "title": "class", "axis": axis}, "yOffset": _HEADS}
    shown = f"sequence(first, min(first + {SHOWN}, length(doc.classes)))"
    steps = _steps(
        f"{_CHOSEN} && datum.split === {split}",
        _calc(c=shown, value=f"slice(datum[{measure}], first, first + {SHOWN})"),
        {"flatten": ["c", "value"]},
        _calc(name="doc.classes[datum.c]"),
        _over_seeds("c", "name"),
    )
    return _figure("geometry", steps, *_bars("x", _titled(measure), place, [_text("name", "class")]))


def class_bars(measure: str, title: str, cls: str = "cls") -> Spec:
    """A measure of the chosen class, averaged over seeds, for each head."""
    steps = _steps("datum.split === split", _calc(value=f"datum[{measure}][{cls}]"), _over_seeds())
    return _figure("geometry", steps, *_bars("y", title, {"x": _HEADS}))


def average_bars(metric: str, title: str) -> Spec:
    """A metric averaged over seeds, with the 95 % interval of the mean, for each head."""
    return _figure("heads", _steps(_row_of(metric), _interval("datum.row")), *_bars("y", title, {"x": _HEADS}))


def learned(panel: str = "head", chosen: str = "cls") -> Spec:
    """(μ, σ) of the head compared with the empirical mean and deviation of x, averaged over seeds.

    The chosen class has an arrow from what is learned to what is there.
    """
    kinds = {"learned": "circle", "its own images": "triangle-up"}
    shapes = {"domain": list(kinds), "range": list(kinds.values())}
    x, y = (
        _q("mean", "μ, or mean of x", scale={"zero": False, "padding": 10}, axis=_FEW),
        _q("sigma", "σ, or deviation of x", scale={"zero": False, "padding": 10}),
    )
    colour = {**_COLOUR, "legend": None}
    points = {
        "x": x,
        "y": y,
        "color": colour,
        "shape": {"field": "kind", "type": "nominal", "title": None, "scale": shapes},
        "tooltip": [_text("name", "class"), _text("head"), _text("kind"), _number("mean"), _number("sigma", "σ")],
    }
    of_chosen = f"datum.c === {chosen}"
    ends = {f"{field}{end}": (field, end) for end in (0, 1) for field in ("mean", "sigma")}  # learned, and there
    joined = _steps(
        of_chosen,
        _calc(**{k: f"datum.step === {end} ? datum.{field} : 0" for k, (field, end) in ends.items()}),
        {"aggregate": [{"op": "sum", "field": k, "as": k} for k in ends], "groupby": ["head"]},
    )
    arrow = {"x": {**x, "field": "mean0"}, "y": {**y, "field": "sigma0"}, "color": colour}
    tip = {"x": {**x, "field": "mean1"}, "y": {**y, "field": "sigma1"}, "color": colour}
    along = {k: f"scale('{k}', datum.{f}1) - scale('{k}', datum.{f}0)" for k, f in (("x", "mean"), ("y", "sigma"))}
    angle = {"expr": f"atan2({along['y']}, {along['x']}) * 180 / PI"}
    head = {"type": "point", "shape": "M0,0L-1.6,-0.7L-1.6,0.7Z", "size": 180, "angle": angle}
    means = [{"op": "mean", "field": f, "as": f} for f in ("mean", "sigma")]
    return _figure(
        "geometry",
        _steps(
            _CHOSEN.replace("head === ", f"{panel} === ", 1).replace("=== head", f"=== {panel}"),
            "datum.split === 'test' && isArray(datum.learned)",
            _calc(c="sequence(length(datum.learned))"),
            {"flatten": ["c", "learned", "own"], "as": ["c", *kinds]},
            {"fold": list(kinds), "as": ["kind", "pair"]},
            _PAIR,
            _calc(mean="datum.pair[0]", sigma="datum.pair[1]"),
            {"aggregate": means, "groupby": ["head", "c", "kind"]},
            _calc(step=f"indexof({list(kinds)}, datum.kind)", name="doc.classes[datum.c]"),
        ),
        _layer({"type": "point", "filled": True, "opacity": 0.35, "size": 45, "cursor": "pointer"}, points),
        _layer(
            {"type": "rule", "strokeWidth": 2}, {**arrow, "x2": {"field": "mean1"}, "y2": {"field": "sigma1"}}, joined
        ),
        *([] if chosen == "-1" else [_layer({**head, "filled": True, "opacity": 1}, tip, joined)]),
        _layer({"type": "point", "filled": True, "opacity": 1, "size": 110, "stroke": "white"}, points, of_chosen),
    )


def confusion(panel: str = "panel", chosen: str = "cls", *, names: Sequence[str] = (), numbers: bool = False) -> Spec:
    """What the images of every class are taken for, by one head: percent of the class, over all seeds or of one.

    names: of the classes in the matrix
    numbers: whether they are written in the cells that have room for them
    """
    flat = len(names) * (7 * max(map(len, names), default=0) + 6) <= 280  # pixels of the narrowest matrix
    labels = {"labelExpr": "doc.classes[doc.confusable[datum.value]]", "labelOverlap": True, "labelLimit": 110}
    labels |= {"labelFontSize": 10} if len(names) > 20 else {}
    axis = {**labels, "ticks": False, "domain": False}
    domain = {"domain": {"expr": "sequence(length(doc.confusable))"}, "padding": 0.06}
    y = {"field": "row", "type": "ordinal", "title": "class", "axis": axis, "scale": domain}
    x = {**y, "field": "column", "title": "predicted class", "axis": {**axis, "labelAngle": 0 if flat else -90}}
    paint = f"doc.colours[indexof(doc.heads, {panel})]"
    colour = {"expr": paint}
    cells = {
        "x": x,
        "y": y,
        "color": {"value": colour},
        "opacity": {
            "field": "share",
            "type": "quantitative",
            "legend": None if numbers else _LEGEND,
            "scale": {"type": "sqrt", "domainMin": 0, "range": [0.08, 1]},
        },
        "tooltip": [_text("name", "class"), _text("as", "taken for"), _number("share", "% of the class"), _text("n")],
    }
    place = f"indexof(doc.confusable, {chosen})"
    frame = {"type": "rect", "fillOpacity": 0, "stroke": "#888888", "strokeWidth": 1.2}
    one: Spec = {"values": [{}]}
    each = _calc(row="sequence(length(doc.confusable))", column="sequence(length(doc.confusable))")
    diagonal = _layer({"type": "rect", "color": "#88888830"}, {"x": x, "y": y}, each, {"flatten": ["row", "column"]})
    counted = _steps(
        _calc(place="seed === null ? 2 : 3 + indexof(datum.seeds, seed)"),
        {"flatten": ["wrong"]},
        _calc(c="datum.wrong[0]", j="datum.wrong[1]", n="datum.wrong[datum.place]"),
        "datum.n > 0 && (seed === null || datum.place > 2)",
        _calc(row="indexof(doc.confusable, datum.c)", column="indexof(doc.confusable, datum.j)"),
        "datum.row >= 0 && datum.column >= 0",
        _calc(all="datum.images[datum.c] / (seed === null ? 1 : length(datum.seeds))", name="doc.classes[datum.c]"),
        _calc(share="100 * datum.n / datum.all", **{"as": "doc.classes[datum.j]"}),
    )
    mine = f"datum.head === {panel}"
    most = _layer(
        {"type": "point", "filled": True, "color": "#888888", "size": 0},  # as in the legend
        {"opacity": cells["opacity"]},
        counted,
        {"aggregate": [{"op": "max", "field": "share", "as": "share"}]},
    )
    strength = "scale('opacity', datum.share)"
    mixed = ", ".join(f"{strength} * rgb({paint}).{c} + (1 - {strength}) * rgb(paper).{c}" for c in "rgb")
    written = {
        "x": x,
        "y": y,
        "text": {"field": "share", "type": "quantitative", "format": ".1f"},
        "color": {"condition": {"test": f"luminance(rgb({mixed})) > {_MIDDLE}", "value": "black"}, "value": "white"},
        "opacity": {"condition": {"test": f"bandwidth('x') < {_LEAST_CELL}", "value": 0}, "value": 1},
    }
    return _figure(
        "confusion",
        [],
        {**diagonal, "data": one},
        most,  # of all heads: the same colours mean the same
        _layer({"type": "rect", "cursor": "pointer"}, cells, mine, counted),
        *([_layer({"type": "text", "fontSize": 11, "cursor": "pointer"}, written, mine, counted)] if numbers else []),
        {**_layer(frame, {"y": y}, _calc(row=place), "datum.row >= 0"), "data": one},
        {**_layer(frame, {"x": x}, _calc(column=place), "datum.column >= 0"), "data": one},
    )


def curves(curve: str = "curve") -> Spec:
    """A quantity of the training by epoch, one line for each run."""
    whole = {"labelExpr": "datum.value % 1 ? '' : datum.label", "format": "d"}
    log = {"type": "log", "nice": False, "padding": 8}  # "nice" would end it at powers of ten
    encoding = {
        "x": _q("epoch", axis=whole, scale={"zero": False, "nice": False}),
        "y": _q("value", None, scale=log, axis={"format": "~g", **_NUMBER, "title": _titled(curve)}),
        "color": _COLOUR,
        "detail": [{"field": "seed"}],
        "tooltip": [_text("head"), _text("seed"), _text("epoch"), _number("value")],
    }
    values = _steps(_calc(value=f"datum[{curve}]"), "isArray(datum.value)", {"flatten": ["epoch", "value"]})
    mark = {"type": "line", "point": {"size": 14}, "strokeWidth": 1.4, "opacity": 0.8}
    return _figure("curves", _steps(_CHOSEN, values, "datum.value > 0"), _layer(mark, encoding))


def seeds(metric: str = "metric") -> Spec:
    """A metric of every seed, with the mean and its 95 % interval."""
    each = _steps(_calc(seed="doc.seeds", value="datum.row.values"), {"flatten": ["seed", "value"]})
    return _figure("heads", _row_of(metric), *_seeds(each, "datum.row", _titled(metric)))


def sensitivity(key: str, scale: str, title: str, worst: float, best: float) -> Spec:
    """Validation score by the value of a tuned key: a line for each head's sweep, rings for its trials.

    key, scale, title: the key, whether it is on a logarithmic scale, and the score
    worst, best: ends of the axis; what lies outside is drawn at its edge
    """
    y = {"domain": sorted((worst, best)), "clamp": True, "nice": False}
    shared = {
        "x": _q(
            "value",
            key,
            scale={"type": "log" if scale == "log" else "linear", "zero": False, "nice": False},
            axis={"format": "~g", **_NUMBER},
        ),
        "y": _q("score", title, scale=y, axis=_FEW),
        "color": _COLOUR,
        "tooltip": [_text("head"), _number("value", key), _number("score", title), _text("seeds")],
    }
    rows = _steps(f"datum.key === {json.dumps(key)}", "head === null || datum.head === head")
    line = {"type": "line", "point": {"size": 30, "filled": True}, "strokeWidth": 2}
    ring = {"type": "point", "filled": False, "size": 36, "opacity": 0.8}
    return _figure("trials", rows, _layer(ring, shared, "!datum.swept"), _layer(line, shared, "datum.swept"))


def sensitivities(doc: Mapping[str, Any]) -> dict[str, Spec]:
    """`sensitivity` of every tuned key, by key."""
    rows, told = doc.get("trials") or [], doc.get("tuning") or {}
    if not rows:
        return {}
    measure = measures.find(told["measure"])
    sign = 1 if measure.smaller_is_better else -1
    scores = sorted(sign * row["score"] for row in rows)
    low, middle = scores[0], scores[3 * (len(scores) - 1) // 4]
    room = max(1.2 * (middle - low), 0.5)
    ends = sign * (low + room), sign * (low - 0.05 * room)
    keys = [key for key in told["space"] if any(row["key"] == key for row in rows)]
    return {key: sensitivity(key, told["scales"][key], f"validation {measure.title}", *ends) for key in keys}


def features(row: Mapping[str, Any], classes: Sequence[str], cls: str = "cls") -> Spec:
    """A view of the features: a sample of images and the class means on two axes.  Few classes have a colour each, of
    many only the chosen one.

    row, classes: of the document's `features`, and the names of the classes
    """
    few = len(classes) <= MOST_COLOURS
    titles = [f"{row['name']} {k} of {row['of']}" for k in (1, 2)]
    titles = [t if s is None else f"{t}, {100 * s:.0f} %" for t, s in zip(titles, row["share"], strict=True)]
    x, y = (_q(field, title, scale={"zero": False}, axis=_FEW) for field, title in zip("uv", titles, strict=True))
    chosen = f"datum.c === {cls}"
    scale = {"domain": {"expr": "doc.classes"}, "scheme": "tableau10" if len(classes) <= 10 else "tableau20"}
    each = {"field": "name", "type": "nominal", "scale": scale, "legend": None}
    colour = each if few else {"condition": {"test": chosen, "value": VERMILLION}, "value": GREY}
    shared = {"x": x, "y": y, "color": colour, "order": {"field": "chosen"}, "tooltip": [_text("name", "class")]}
    named = _calc(name="doc.classes[datum.c]", chosen=f"{chosen} ? 1 : 0")
    points = _steps({"flatten": ["c", "u", "v"]}, named)
    fields = {"flatten": ["c", "mu", "mv"], "as": ["c", "u", "v"]}
    means = _steps(_calc(c="sequence(length(datum.mu))"), fields, "isValid(datum.u)", named)
    opacity = {"opacity": {"condition": {"test": chosen, "value": 0.95}, "value": 0.6 if few else 0.4}}
    diamond = {"type": "point", "shape": "diamond", "filled": True, "size": 130, "opacity": 1, "stroke": "white"}
    label = {"type": "text", "dy": -12, "fontSize": 12, "limit": 90, "color": "currentColor"}
    text = {"x": x, "y": y, "text": {"field": "name"}}
    return _figure(
        "features",
        _steps(f"datum.head === {json.dumps(row['head'])} && datum.name === {json.dumps(row['name'])}"),
        _layer({"type": "point", "filled": True, "size": 22}, {**shared, **opacity}, points),
        _layer(diamond, shared, means, *([] if few else [chosen])),
        _layer(label, text, means, *([] if few else [chosen])),
    )


def calibration() -> Spec:
    """Reliability diagram: accuracy against confidence, with 95 % intervals (Agresti-Coull) of the accuracy."""
    x, y = (_q(f, t, scale={"domain": [0, 1]}, axis=_FEW) for f, t in (("confidence", ""), ("right", "accuracy")))
    ends = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": _COLOUR}
    middle, room = "(datum.right + 2) / (datum.count + 4)", "1.96 * sqrt({0} * (1 - {0}) / (datum.count + 4))"
    sums = [{"op": "sum", "field": f, "as": f} for f in ("count", "confidence", "right")]
    tooltip = [_text("head"), _number("confidence", "mean confidence"), _number("right", "accuracy")]
    size = {"field": "share", "type": "quantitative", "scale": {"range": [15, 260]}, "legend": None}
    points = {"size": size, "tooltip": [*tooltip, {"field": "count", "title": "images", "format": ",d"}]}
    diagonal = _layer({"type": "line", "strokeDash": [4, 3], "color": _LINE}, {"x": x, "y": y})
    return _figure(
        "calibration",
        _steps(
            _CHOSEN,
            _calc(bin="sequence(length(datum.count))"),
            {"flatten": ["bin", "count", "confidence", "right"]},
            "datum.count > 0",
            _calc(confidence="datum.count * datum.confidence", right="datum.count * datum.right"),
            {"aggregate": sums, "groupby": ["head", "bin"]},
            f"datum.count >= {FEWEST}",
            _calc(middle=middle, room=room.format("datum.middle")),
            _calc(low="max(0, datum.middle - datum.room)", high="min(1, datum.middle + datum.room)"),
            _calc(confidence="datum.confidence / datum.count", right="datum.right / datum.count"),
            {"joinaggregate": [{"op": "sum", "field": "count", "as": "total"}], "groupby": ["head"]},
            _calc(share="datum.count / datum.total"),
        ),
        {**diagonal, "data": {"values": [{"confidence": v, "right": v} for v in (0, 1)]}},
        _layer({"type": "rule", "opacity": 0.5}, ends),
        _layer({"type": "line", "strokeWidth": 1.6, "opacity": 0.7}, {"x": x, "y": y, "color": _COLOUR}),
        _layer({"type": "point", "filled": True, "opacity": 0.85}, {"x": x, "y": y, "color": _COLOUR, **points}),
    )


def playground() -> dict[str, Spec]:
    """z(x), its slope and p of two classes; lam, mu1, sigma1, mu2, sigma2, x1 and x2 are set by sliders."""

    def phi(x: str, c: int) -> str:
        return f"cumulativeNormal({x}, mu{c}, sigma{c})"

    def z(x: str, c: int) -> str:
        return f"({x} + lam * {phi(x, c)})"

    def slope(x: str, c: int) -> str:
        return f"(1 + lam * densityNormal({x}, mu{c}, sigma{c}))"

    params: list[Spec] = [{"name": name, "value": value} for name, *_, value in SLIDERS]
    for c, other in ((1, 2), (2, 1)):  # the values of the table beside the figures
        x = f"x{c}"
        told = {"phi": phi(x, c), "z": z(x, c), "slope": slope(x, c), "softmax": f"1 / (1 + exp(x{other} - {x}))"}
        told["p"] = f"1 / (1 + exp({z(f'x{other}', other)} - {z(x, c)}))"
        params += [{"name": f"{k}{c}", "expr": v} for k, v in told.items()]

    first, second, plain = "class 1", "class 2", "softmax (λ = 0)"
    paint = {"domain": [first, second, plain], "range": [VERMILLION, BLUE, "#888888"]}
    grid = {"sequence": {"start": -8, "stop": 8.001, "step": 0.05, "as": "x"}}
    dash = {"condition": {"test": f"datum.line === '{plain}'", "value": [5, 4]}, "value": [1, 0]}

    def panel(title: str, lines: Mapping[str, str], dots: Mapping[str, tuple[str, str]]) -> Spec:
        """lines: formulas of datum.x; dots: for each class its x and its y."""
        encoding = {
            "x": _q("x", scale={"domain": [-8, 8], "nice": False}),
            "y": _q("value", title, scale={"zero": False}),
            "color": {"field": "line", "type": "nominal", "scale": paint},
            "tooltip": [_text("line", "which"), _number("x"), _number("value")],
        }
        fold = {"fold": list(lines), "as": ["line", "value"]}
        drawn = _layer({"type": "line", "strokeWidth": 2}, {**encoding, "strokeDash": dash}, _calc(**lines), fold)
        dot = {"type": "point", "filled": True, "size": 90, "opacity": 1}
        layers = [{**drawn, "data": grid}]
        for name, (x, y) in dots.items():
            layers.append({**_layer(dot, encoding, _calc(x=x, value=y)), "data": {"values": [{"line": name}]}})
        return {**_fill_container({"layer": layers}, 220), "params": params}

    p = f"1 / (1 + exp({z('x2', 2)} - {{}}))"
    zs, slopes = ({first: f("datum.x", 1), second: f("datum.x", 2)} for f in (z, slope))
    at_z, at_slope = ({first: ("x1", f("x1", 1)), second: ("x2", f("x2", 2))} for f in (z, slope))
    ps = {first: p.format(z("datum.x", 1)), plain: "1 / (1 + exp(x2 - datum.x))"}
    return {
        "z": panel("z", {**zs, plain: "datum.x"}, at_z),
        "slope": panel("slope of z", {**slopes, plain: "1"}, at_slope),
        "p": panel("p of class 1", ps, {first: ("x1", p.format(z("x1", 1)))}),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Parts
# ---------------------------------------------------------------------------------------------------------------------


def _figure(data: str, transform: list[Spec], *layers: Spec) -> Spec:
    return {"data": {"name": data}, "transform": transform, "layer": list(layers)}


def _layer(mark: Spec, encoding: Spec, *steps: str | Spec | list[Spec]) -> Spec:
    return {"transform": _steps(*steps), "mark": mark, "encoding": encoding}


def _steps(*steps: str | Spec | list[Spec]) -> list[Spec]:
    """Transforms; a text is a filter."""
    found: list[Spec] = []
    for step in steps:
        found += [{"filter": step}] if isinstance(step, str) else step if isinstance(step, list) else [step]
    return found


def _calc(**fields: str) -> list[Spec]:
    return [{"calculate": expression, "as": name} for name, expression in fields.items()]


def _row_of(metric: str) -> list[Spec]:
    return _steps(
        "head === null || datum.head === head", _calc(row=f"doc.metrics[{metric}][datum.head]"), "isValid(datum.row)"
    )


def _interval(row: str) -> list[Spec]:
    ends = {k: f"isValid({row}.{k}) ? {row}.{k} : null" for k in ("low", "high")}
    return _calc(value=f"isDefined({row}.difference) ? {row}.difference : {row}.mean", **ends)


def _over_seeds(*by: str) -> list[Spec]:
    """Mean and one standard deviation of `value` for each head (and the fields `by`)."""
    ops = [{"op": op, "field": "value", "as": name} for op, name in (("mean", "mean"), ("stdev", "sd"), ("count", "n"))]
    known = "datum.n > 1 ? {} : null"
    ends = {"low": known.format("datum.mean - datum.sd"), "high": known.format("datum.mean + datum.sd")}
    mean = _calc(value="datum.mean", **ends, sd=known.format("datum.sd"))
    return _steps("isValid(datum.value)", {"aggregate": ops, "groupby": ["head", *by]}, mean)


def _titled(key: str) -> Spec:
    """The title of an axis that shows what a parameter chooses."""
    return {"expr": f"doc.titles[{key}]"}


def _bars(axis: str, title: str | Spec | None, place: Spec, tooltip: Sequence[Spec] = ()) -> list[Spec]:
    """Bars along `axis`, and whiskers from low to high."""
    value = _q("value", None, axis={**_FEW, "title": title})
    told = [*tooltip, _text("head"), _number("value"), _number("sd", "deviation over seeds")]
    ends = {axis: {**value, "field": "low"}, f"{axis}2": {"field": "high"}}
    return [
        _layer({"type": "bar"}, {**place, axis: value, "color": _COLOUR, "tooltip": told}),
        _layer({"type": "rule", "strokeWidth": 1.2}, {**place, **ends}, "isValid(datum.low)"),
    ]


def _differences(metric: str, along: str, title: Spec, heads: Spec) -> Spec:
    first = f"doc.metrics[{metric}][doc.heads[0]].values"
    each = _steps(
        _calc(seed="doc.seeds", value="datum.row.values", first=first),
        {"flatten": ["seed", "value", "first"]},
        _calc(value="datum.value - datum.first"),
    )
    zero = _layer({"type": "rule", "strokeDash": [4, 3]}, {along: {"datum": 0}})
    known = f"datum.head !== doc.heads[0] && isValid(doc.metrics[{metric}][doc.heads[0]])"
    rows = _steps(_row_of(metric), known)
    return _figure("heads", rows, zero, *_seeds(each, "datum.row.paired", title, along, heads))


_PAIRED = {"value": "difference", "low": "low", "high": "high"}
_ENDS = {"value": "mean", "low": "from", "high": "to"}


def _seeds(each: list[Spec], row: str, title: str | Spec | None, along: str = "y", heads: Spec = _HEADS) -> list[Spec]:
    """Rings for `each` seed; a dot and a bar for the mean of `row` and its interval."""
    across, beside = ("x", "xOffset") if along == "y" else ("y", "yOffset")
    value = _q("value", None, scale={"zero": False, "padding": 8}, axis={**_FEW, "title": title})
    shared = {across: heads, along: value, "color": _COLOUR}
    ring = {"type": "point", "filled": False, "size": 50, "opacity": 1, "strokeWidth": 1.6, beside: -9}
    tooltip = [_text("head"), _text("seed")]
    dot = {"type": "point", "filled": True, "size": 80, "opacity": 1, beside: 9}
    wide = [_text("head"), *(_number(k, t) for k, t in _ENDS.items())]
    ends = {along: {**value, "field": "low"}, f"{along}2": {"field": "high"}, "tooltip": wide}
    bar = {"type": "rule", "strokeWidth": 2.5, beside: 9}
    return [
        _layer(ring, {**shared, "tooltip": [*tooltip, _number("value")]}, each),
        _layer(bar, {**shared, **ends}, f"isValid({row})", _interval(row), "isValid(datum.low)"),
        _layer(dot, {**shared, "tooltip": wide}, f"isValid({row})", _interval(row)),
    ]


def _fill_container(spec: Spec, height: int, heads: Sequence[str] = ()) -> Spec:
    """The spec at the width of its container; the page has its own legend."""
    legend = {"disable": True, "labelColor": "currentColor", "titleColor": "currentColor"}
    room = {"left": 5, "top": 5, "bottom": 5, "right": 16}  # for half of a number at the end of an axis
    page: Spec = {"background": "transparent", "legend": legend, "axisXDiscrete": {"labelAngle": 0}, "padding": room}
    style = config(heads, "currentColor", "system-ui, sans-serif", **page)
    fit = {"type": "fit-x", "contains": "padding"}
    return {**spec, "width": "container", "height": height, "autosize": fit, "config": style}


def _q(field: str, title: str | None = "", **more: Any) -> Spec:
    """A quantitative channel, titled as its field unless a title (or None) is given."""
    return {"field": field, "type": "quantitative", "title": field if title == "" else title, **more}


def _text(field: str, title: str | None = None) -> Spec:
    return {"field": field, "type": "nominal", "title": title or field}


def _number(field: str, title: str | None = None) -> Spec:
    return {"field": field, "type": "quantitative", "title": title or field, "format": ".4g"}
