"""The figures of a report as Vega-Lite, for the page and for files alike.

A spec names the part of the document that it draws (`data.name`) and selects its rows by parameters: `doc` (classes,
heads, seeds, metrics), `sides` (what own outputs and impostors are called), `paint` (a colour for each head) and the
choices `cls`, `head` and `seed` (null for all), `split`, `measure`, `metric`, `curve`, `first` (class of the bars) and
`panel` (head of the panel).  The page sets them from its controls; `figures.py` writes constants in their place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .colours import BLUE, GREY, VERMILLION, colours

Spec = dict[str, Any]

SHOWN = 20  # classes that the bars show at once
_LINE = "#888888A0"
_CROSS = "M-.8,-.8L.8,.8M.8,-.8L-.8,.8"  # two thin strokes
_NUMBER = ".4g"
_FEW = {"tickCount": 6}
_CHOSEN = "(head === null || datum.head === head) && (seed === null || datum.seed === seed)"
_COLOUR: Spec = {
    "field": "head",
    "type": "nominal",
    "title": None,
    "scale": {"domain": {"expr": "doc.heads"}},  # the range is the configuration's
}


def config(heads: Sequence[str], ink: str, font: str, **more: Any) -> Spec:
    """The style of all figures.

    heads: whose colours are the first ones; ink: colour of the text; font: a CSS family; more: of Vega-Lite's config
    """
    axis = {
        "labelColor": ink,
        "titleColor": ink,
        "titleFontWeight": "normal",
        "labelFontSize": 12,
        "titleFontSize": 13,
        "gridColor": "#88888840",
        "domainColor": _LINE,
        "tickColor": _LINE,
        "labelLimit": 110,
        "labelFlush": False,
    }
    paint = {"range": {"category": list(colours(heads).values())}} if heads else {}
    return {"font": font, "view": {"stroke": None}, "axis": axis, "rule": {"color": ink}, **paint, **more}


def for_page(heads: Sequence[str]) -> dict[str, Spec]:
    """All figures of the page, by name."""
    return {
        "scatter": _fill_container(scatter(), 220, heads),
        "gaussians": _fill_container(gaussians(), 260, heads),
        "bars": _fill_container(bars(), 300, heads),  # the page sets the height by the number of bars
        "learned": _fill_container(learned(), 300, heads),
        "curves": _fill_container(curves(), 240, heads),
        "seeds": _fill_container(seeds(), 240, heads),
        "differences": _fill_container(differences(), 240, heads),
        "calibration": _fill_container(calibration(), 300, heads),
    }


def parameters(doc: Mapping[str, Any], **choice: Any) -> dict[str, Any]:
    """The parameters of a document, and the choices `cls`, `head`, `seed` and `split`, for specs that files show."""
    known = {key: doc[key] for key in ("classes", "heads", "seeds", "metrics")}
    known["colours"] = list(colours(doc["heads"]).values())
    return {"doc": known, "sides": sides(doc), "cls": 0, "head": None, "seed": None, "split": "test", **choice}


def sides(doc: Mapping[str, Any]) -> list[str]:
    """What own outputs and impostors are called."""
    return ["with the label", "without the label"] if doc["multilabel"] else ["own output", "impostors"]


def scatter(panel: str = "panel") -> Spec:
    """x against p of one class and its impostors, for one head; the range of x is that of all heads."""
    colour = {"expr": f"doc.colours[indexof(doc.heads, {panel})]"}
    spread = [{"op": "min", "field": "x", "as": "low"}, {"op": "max", "field": "x", "as": "high"}]
    x, y = (
        _q("x", "x", scale={"zero": False}),
        _q("p", "p", scale={"domain": [-0.03, 1.03], "nice": False}, axis={**_FEW, "grid": True}),
    )
    at_zero = {k: v for k, v in y.items() if k != "field"} | {"datum": 0}
    return {
        "data": {"name": "points"},
        "transform": [
            _filter("seed === null || datum.seed === seed"),
            {"flatten": ["c", "own", "j", "x", "p"]},
            _filter("datum.c === cls"),
            _calculate("sides[1 - datum.own]", "side"),
            _calculate("datum.j < 0 ? 'another class' : doc.classes[datum.j]", "output"),
        ],
        "layer": [
            {
                "transform": [{"aggregate": spread}],
                "mark": {"type": "rule", "opacity": 0},
                "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": at_zero},
            },
            {
                "transform": [_filter(f"datum.head === {panel}")],
                "mark": {"type": "point", "size": 24, "strokeWidth": 1.2},
                "encoding": {
                    "x": x,
                    "y": y,
                    "order": {"field": "own"},  # impostors below
                    "color": {"condition": {"test": "datum.own", "value": colour}, "value": GREY},
                    "opacity": {"condition": {"test": "datum.own", "value": 0.75}, "value": 0.45},
                    "shape": {
                        "field": "side",
                        "type": "nominal",
                        "title": None,
                        "scale": {"domain": {"expr": "sides"}, "range": ["circle", _CROSS]},
                    },
                    "tooltip": [_text("side", "which"), _text("output"), _number("x"), _number("p"), _text("seed")],
                },
            },
        ],
    }


def gaussians() -> Spec:
    """The Gaussians of a class's own output and of all its impostors; with one head chosen, its nearest impostors."""
    nearest = {
        f"nearest{k}": f"(head !== null || length(doc.heads) === 1) && length(datum.nearest[cls]) > {k} "
        f"? slice(datum.nearest[cls][{k}], 1) : null"
        for k in range(3)
    }
    pairs = {"all": "datum.other[cls]", **nearest, "one": "datum.own[cls]"}
    name = "'impostor ' + doc.classes[datum.nearest[cls][toNumber(slice(datum.key, 7))][0]]"
    encoding: Spec = {
        "x": _q("x", "x", axis=_FEW),
        "y": _q("density", "density", stack=None),
        "color": _COLOUR,
        "detail": [{"field": "key"}, {"field": "seed"}],
        "tooltip": [_text("head"), _text("which"), _number("mean"), _number("sigma", "σ"), _text("seed")],
    }
    dash = {"domain": {"expr": "sides"}, "range": [[1, 0], [5, 3]]}
    line = {
        "strokeDash": {"field": "side", "type": "nominal", "title": None, "scale": dash},
        "strokeWidth": {"condition": {"test": "indexof(datum.key, 'nearest') === 0", "value": 1}, "value": 2.2},
    }
    return {
        "data": {"name": "geometry"},
        "transform": [
            _filter(f"{_CHOSEN} && datum.split === split"),
            *(_calculate(pair, key) for key, pair in pairs.items()),
            {"fold": list(pairs), "as": ["key", "pair"]},
            _filter("isArray(datum.pair) && isValid(datum.pair[0]) && datum.pair[1] > 0"),
            _calculate("datum.key === 'one' ? sides[0] : sides[1]", "side"),
            _calculate(f"indexof(datum.key, 'nearest') === 0 ? {name} : datum.side", "which"),
            _calculate("datum.pair[0]", "mean"),
            _calculate("datum.pair[1]", "sigma"),
            _calculate("sequence(-4, 4.001, 0.05)", "deviations"),
            {"flatten": ["deviations"]},
            _calculate("datum.mean + datum.sigma * datum.deviations", "x"),
            _calculate("exp(-0.5 * datum.deviations * datum.deviations) / (datum.sigma * sqrt(2 * PI))", "density"),
        ],
        "layer": [
            {
                "transform": [_filter("datum.key === 'one'")],
                "mark": {"type": "area", "opacity": 0.12, "line": False},
                "encoding": encoding,
            },
            {"mark": "line", "encoding": {**encoding, **line}},
        ],
    }


def bars(measure: str = "measure") -> Spec:
    """One measure for every class, all heads side by side; whiskers are one standard deviation over seeds."""
    place: Spec = {
        "y": {"field": "c", "type": "ordinal", "title": None, "axis": {"labelExpr": "doc.classes[datum.value]"}},
        "yOffset": {"field": "head", "type": "nominal", "sort": None},
    }
    return {
        "data": {"name": "geometry"},
        "transform": [
            _filter(f"{_CHOSEN} && datum.split === split"),
            _calculate(f"sequence(first, min(first + {SHOWN}, length(doc.classes)))", "c"),
            _calculate(f"slice(datum[{measure}], first, first + {SHOWN})", "value"),
            {"flatten": ["c", "value"]},
            _calculate("doc.classes[datum.c]", "class"),
            *_over_seeds("c", "class"),
        ],
        "layer": _bars(_q("value", None, axis=_FEW), place, "x"),
    }


def _head_bars(title: str, data: str, transform: Sequence[Spec]) -> Spec:
    """One bar for each head; the transform gives the fields value, low and high."""
    place = {"x": {"field": "head", "type": "nominal", "sort": None, "title": None}}
    return {
        "data": {"name": data},
        "transform": list(transform),
        "layer": _bars(_q("value", title, axis=_FEW), place, "y"),
    }


def class_bars(measure: str, title: str) -> Spec:
    """A measure of the chosen class, averaged over seeds."""
    value = _calculate(f"datum[{measure}][cls]", "value")
    return _head_bars(title, "geometry", [_filter("datum.split === split"), value, *_over_seeds()])


def average_bars(metric: str, title: str) -> Spec:
    """A metric averaged over seeds, with the 95 % interval of the mean."""
    return _head_bars(title, "heads", [*_rows_of(metric), _calculate("datum.row.mean", "value"), *_INTERVAL])


def learned(panel: str = "head", chosen: str = "cls") -> Spec:
    """(μ, σ) of the head beside the mean and deviation of x, one line for each class."""
    kinds = {"its own images": "triangle-up", "learned": "circle", "all images": "square"}
    place = {"x": _q("mean", "mean", scale={"zero": False}, axis=_FEW), "y": _q("sigma", "σ", scale={"zero": False})}
    tooltip = [_text("class"), _text("head"), _text("kind"), _number("mean"), _number("sigma", "σ")]
    colour = {**_COLOUR, "legend": None}
    return {
        "data": {"name": "geometry"},
        "transform": [
            _filter(f"({panel} === null || datum.head === {panel}) && (seed === null || datum.seed === seed)"),
            _filter("datum.split === 'test' && isArray(datum.learned)"),
            _calculate("sequence(length(datum.learned))", "classes"),
            _calculate("isArray(datum.overall) ? datum.overall : []", "everything"),
            {"flatten": ["classes", "own", "learned", "everything"], "as": ["c", *kinds]},
            {"fold": list(kinds), "as": ["kind", "pair"]},
            _filter("isArray(datum.pair) && isValid(datum.pair[0]) && isValid(datum.pair[1])"),
            _calculate("datum.pair[0]", "mean"),
            _calculate("datum.pair[1]", "sigma"),
            _calculate("doc.classes[datum.c]", "class"),
        ],
        "layer": [
            {
                "mark": {"type": "line", "strokeWidth": 1, "opacity": 0.35},
                "encoding": {
                    "x": {**place["x"], "sort": None},
                    "y": place["y"],
                    "detail": [{"field": "c"}, {"field": "seed"}],
                    "color": colour,
                },
            },
            {
                "mark": {"type": "point", "filled": True, "opacity": 0.85},
                "encoding": {
                    **place,
                    "color": colour,
                    "shape": {
                        "field": "kind",
                        "type": "nominal",
                        "title": None,
                        "scale": {"domain": list(kinds), "range": list(kinds.values())},
                    },
                    "size": {"condition": {"test": f"datum.c === {chosen}", "value": 190}, "value": 55},
                    "tooltip": tooltip,
                },
            },
        ],
    }


def curves(curve: str = "curve", title: str | None = None) -> Spec:
    """A quantity of the training by epoch, one line for each run."""
    whole = {"labelExpr": "datum.value % 1 ? '' : datum.label", "format": "d"}
    return {
        "data": {"name": "curves"},
        "transform": [
            _filter(_CHOSEN),
            _calculate(f"datum[{curve}]", "value"),
            _filter("isArray(datum.value)"),
            {"flatten": ["epoch", "value"]},
            _filter("datum.value > 0"),
        ],
        "mark": {"type": "line", "point": {"size": 14}, "strokeWidth": 1.4, "opacity": 0.8},
        "encoding": {
            "x": _q("epoch", "epoch", axis=whole, scale={"zero": False}),
            "y": _q("value", title, scale={"type": "log"}, axis={"format": "~g"}),
            "color": _COLOUR,
            "detail": [{"field": "seed"}],
            "tooltip": [_text("head"), _text("seed"), _text("epoch"), _number("value")],
        },
    }


def seeds(metric: str = "metric", title: str | None = None) -> Spec:
    """A metric of every seed, with the mean and its 95 % interval."""
    each = [_calculate("doc.seeds", "seed"), _calculate("datum.row.values", "value"), {"flatten": ["seed", "value"]}]
    return _seeds(_rows_of(metric), each, "datum.row.mean", title)


def differences(metric: str = "metric") -> Spec:
    """The paired differences from the first head, with their mean and its 95 % interval."""
    each = [
        _calculate("doc.seeds", "seed"),
        _calculate("datum.row.values", "value"),
        _calculate(f"doc.metrics[{metric}][doc.heads[0]].values", "first"),
        {"flatten": ["seed", "value", "first"]},
        _calculate("datum.value - datum.first", "value"),
    ]
    rows = [*_rows_of(metric), _filter("isValid(datum.row.paired)")]
    return _seeds(rows, each, "datum.row.paired.difference", None, zero=True)


def calibration() -> Spec:
    """Reliability diagram: accuracy against confidence."""
    place = {
        "x": _q("confidence", "confidence", scale={"domain": [0, 1]}, axis=_FEW),
        "y": _q("right", "accuracy", scale={"domain": [0, 1]}, axis=_FEW),
    }
    sums = [{"op": "sum", "field": f, "as": f} for f in ("count", "confidence", "right")]
    tooltip = [_text("head"), _number("confidence", "mean confidence"), _number("right", "accuracy")]
    return {
        "data": {"name": "calibration"},
        "transform": [
            _filter(_CHOSEN),
            _calculate("sequence(length(datum.count))", "bin"),
            {"flatten": ["bin", "count", "confidence", "right"]},
            _filter("datum.count > 0"),
            _calculate("datum.count * datum.confidence", "confidence"),
            _calculate("datum.count * datum.right", "right"),
            {"aggregate": sums, "groupby": ["head", "bin"]},
            _calculate("datum.confidence / datum.count", "confidence"),
            _calculate("datum.right / datum.count", "right"),
            {"joinaggregate": [{"op": "sum", "field": "count", "as": "total"}], "groupby": ["head"]},
            _calculate("datum.count / datum.total", "share"),
        ],
        "layer": [
            {
                "data": {"values": [{"confidence": 0, "right": 0}, {"confidence": 1, "right": 1}]},
                "mark": {"type": "line", "strokeDash": [4, 3], "color": _LINE},
                "encoding": place,
            },
            {
                "mark": {"type": "line", "strokeWidth": 1.6, "opacity": 0.7},
                "encoding": {**place, "color": _COLOUR},
            },
            {
                "mark": {"type": "point", "filled": True, "opacity": 0.85},
                "encoding": {
                    **place,
                    "color": _COLOUR,
                    "size": {"field": "share", "type": "quantitative", "scale": {"range": [15, 260]}, "legend": None},
                    "tooltip": [*tooltip, {"field": "count", "title": "images", "format": ",d"}],
                },
            },
        ],
    }


# ---------------------------------------------------------------------------------------------------------------------
# The playground
# ---------------------------------------------------------------------------------------------------------------------


def playground() -> dict[str, Spec]:
    """z(x), its slope and p of two classes; lam, mu1, sigma1, mu2, sigma2, x1 and x2 are set by sliders."""
    values = {"lam": 2.0, "mu1": 0.0, "sigma1": 1.0, "mu2": 2.0, "sigma2": 1.0, "x1": 1.0, "x2": 0.0}

    def phi(x: str, c: int) -> str:
        return f"cumulativeNormal({x}, mu{c}, sigma{c})"

    def z(x: str, c: int) -> str:
        return f"({x} + lam * {phi(x, c)})"

    def slope(x: str, c: int) -> str:
        return f"(1 + lam * densityNormal({x}, mu{c}, sigma{c}))"

    params: list[Spec] = [{"name": k, "value": v} for k, v in values.items()]
    for c, other in ((1, 2), (2, 1)):  # what the table beside the figures says
        x = f"x{c}"
        told = {
            "phi": phi(x, c),
            "z": z(x, c),
            "slope": slope(x, c),
            "p": f"1 / (1 + exp({z(f'x{other}', other)} - {z(x, c)}))",
            "softmax": f"1 / (1 + exp(x{other} - {x}))",
        }
        params += [{"name": f"{k}{c}", "expr": v} for k, v in told.items()]

    first, second, plain = "class 1", "class 2", "softmax (λ = 0)"
    paint = {"domain": [first, second, plain], "range": [VERMILLION, BLUE, "#888888"]}
    encoding: Spec = {
        "x": _q("x", "x", scale={"domain": [-8, 8], "nice": False}),
        "color": {"field": "line", "type": "nominal", "scale": paint},
        "tooltip": [_text("line", "which"), _number("x"), _number("value")],
    }

    def panel(title: str, lines: Mapping[str, str], dots: Mapping[str, tuple[str, str]]) -> Spec:
        """lines: formulas of datum.x; dots: for each class its x and its y."""
        encoding["y"] = _q("value", title, scale={"zero": False})
        dash = {"condition": {"test": f"datum.line === '{plain}'", "value": [5, 4]}, "value": [1, 0]}
        drawn: Spec = {
            "data": {"sequence": {"start": -8, "stop": 8.001, "step": 0.05, "as": "x"}},
            "transform": [
                *(_calculate(formula, name) for name, formula in lines.items()),
                {"fold": list(lines), "as": ["line", "value"]},
            ],
            "mark": {"type": "line", "strokeWidth": 2},
            "encoding": {**encoding, "strokeDash": dash},
        }
        marked = [
            {
                "data": {"values": [{"line": name}]},
                "transform": [_calculate(x, "x"), _calculate(y, "value")],
                "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1},
                "encoding": dict(encoding),
            }
            for name, (x, y) in dots.items()
        ]
        return {**_fill_container({"layer": [drawn, *marked]}, 220), "params": params}

    p = f"1 / (1 + exp({z('x2', 2)} - {{}}))"
    return {
        "z": panel(
            "z",
            {first: z("datum.x", 1), second: z("datum.x", 2), plain: "datum.x"},
            {first: ("x1", z("x1", 1)), second: ("x2", z("x2", 2))},
        ),
        "slope": panel(
            "slope of z",
            {first: slope("datum.x", 1), second: slope("datum.x", 2), plain: "1"},
            {first: ("x1", slope("x1", 1)), second: ("x2", slope("x2", 2))},
        ),
        "p": panel(
            "p of class 1",
            {first: p.format(z("datum.x", 1)), plain: "1 / (1 + exp(x2 - datum.x))"},
            {first: ("x1", p.format(z("x1", 1)))},
        ),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Parts
# ---------------------------------------------------------------------------------------------------------------------

_INTERVAL = [{"calculate": f"isValid(datum.row.{k}) ? datum.row.{k} : null", "as": k} for k in ("low", "high")]


def _fill_container(spec: Spec, height: int, heads: Sequence[str] = ()) -> Spec:
    """The spec as wide as its place on the page, which has a key of its own."""
    style = config(
        heads,
        "currentColor",
        "system-ui, sans-serif",
        background="transparent",
        legend={"disable": True},
        axisXDiscrete={"labelAngle": 0},
    )
    fit = {"type": "fit-x", "contains": "padding"}
    return {**spec, "width": "container", "height": height, "autosize": fit, "config": style}


def _filter(test: str) -> Spec:
    return {"filter": test}


def _calculate(expression: str, name: str) -> Spec:
    return {"calculate": expression, "as": name}


def _rows_of(metric: str) -> list[Spec]:
    return [_filter("head === null || datum.head === head"), _calculate(f"doc.metrics[{metric}][datum.head]", "row")]


def _over_seeds(*by: str) -> list[Spec]:
    """Mean and one standard deviation of `value` for each head (and the fields `by`)."""
    ops = [{"op": op, "field": "value", "as": name} for op, name in (("mean", "mean"), ("stdev", "sd"), ("count", "n"))]
    return [
        _filter("isValid(datum.value)"),
        {"aggregate": ops, "groupby": ["head", *by]},
        _calculate("datum.mean", "value"),
        _calculate("datum.n > 1 ? datum.sd : null", "sd"),
        _calculate("datum.n > 1 ? datum.mean - datum.sd : null", "low"),
        _calculate("datum.n > 1 ? datum.mean + datum.sd : null", "high"),
    ]


def _bars(value: Spec, place: Spec, axis: str) -> list[Spec]:
    """Bars along `axis` and whiskers from low to high."""
    tooltip = [*([_text("class")] if axis == "x" else []), _text("head"), _number("value")]
    ends = {axis: {**value, "field": "low"}, f"{axis}2": {"field": "high"}}
    return [
        {
            "mark": {"type": "bar"},
            "encoding": {**place, axis: value, "color": _COLOUR, "tooltip": [*tooltip, _number("sd", "deviation")]},
        },
        {
            "transform": [_filter("isValid(datum.low)")],
            "mark": {"type": "rule", "strokeWidth": 1.2},
            "encoding": {**place, **ends},
        },
    ]


def _seeds(rows: list[Spec], each: list[Spec], mean: str, title: str | None, zero: bool = False) -> Spec:
    """Rings for `each` seed, a dot and a bar for the mean and its interval."""
    x = {"field": "head", "type": "nominal", "sort": None, "title": None}
    y = _q("value", title, scale={"zero": zero}, axis=_FEW)
    wide = [_text("head"), _number("value", "mean"), _number("low", "from"), _number("high", "to")]
    line: Spec = {"mark": {"type": "rule", "strokeDash": [4, 3]}, "encoding": {"y": {"datum": 0}}}
    interval = [{**step, "calculate": step["calculate"].replace("row", "row.paired")} for step in _INTERVAL]
    whole = [_calculate(mean, "value"), *(interval if zero else _INTERVAL)]
    return {
        "data": {"name": "heads"},
        "transform": rows,
        "layer": [
            *([line] if zero else []),
            {
                "transform": each,
                "mark": {"type": "point", "filled": False, "size": 50, "xOffset": -9},
                "encoding": {
                    "x": x,
                    "y": y,
                    "color": _COLOUR,
                    "tooltip": [_text("head"), _text("seed"), _number("value")],
                },
            },
            {
                "transform": [*whole, _filter("isValid(datum.low)")],
                "mark": {"type": "rule", "strokeWidth": 2.5, "xOffset": 9},
                "encoding": {
                    "x": x,
                    "y": {**y, "field": "low"},
                    "y2": {"field": "high"},
                    "color": _COLOUR,
                    "tooltip": wide,
                },
            },
            {
                "transform": whole,
                "mark": {"type": "point", "filled": True, "size": 80, "opacity": 1, "xOffset": 9},
                "encoding": {"x": x, "y": y, "color": _COLOUR, "tooltip": wide},
            },
        ],
    }


def _q(field: str, title: str | None, **more: Any) -> Spec:
    return {"field": field, "type": "quantitative", "title": title, **more}


def _text(field: str, title: str | None = None) -> Spec:
    return {"field": field, "type": "nominal", "title": title or field}


def _number(field: str, title: str | None = None) -> Spec:
    return {"field": field, "type": "quantitative", "title": title or field, "format": _NUMBER}
