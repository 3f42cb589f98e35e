"""The interactive figures as Vega-Lite: what is drawn.  The page's script fills in the rows that are chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Spec = dict[str, Any]

_GRID, _LINE = "#88888840", "#888888A0"
CONFIG: Spec = {
    "background": "transparent",
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": "currentColor",
        "titleColor": "currentColor",
        "titleFontWeight": "normal",
        "labelFontSize": 12,
        "titleFontSize": 13,
        "gridColor": _GRID,
        "domainColor": _LINE,
        "tickColor": _LINE,
        "labelLimit": 110,
    },
}
_NUMBER = ".4g"
_FEW = {"tickCount": 8, "format": "~g"}


def specs(colours: Mapping[str, str]) -> dict[str, Spec]:
    """All figures of a report, by name."""
    return {
        "scatter": scatter(),
        "gaussians": gaussians(colours),
        "bars": bars(colours),
        "learned": learned(colours),
        "curves": curves(colours),
        "seeds": seeds(colours),
        "differences": differences(colours),
        "calibration": calibration(colours),
    }


def scatter() -> Spec:
    """x against p of one class and its impostors; one such panel a head, all over the same range of x."""
    return _figure(
        220,
        params=[{"name": "x0", "value": 0}, {"name": "x1", "value": 1}, {"name": "colour", "value": "#888888"}],
        mark={"type": "point", "size": 24, "clip": True, "strokeWidth": 1.2},
        encoding={
            "x": _x("x", "x", scale={"domain": [{"expr": "x0"}, {"expr": "x1"}], "nice": False}),
            "y": _y("p", "p", scale={"domain": [-0.03, 1.03]}, axis={"values": [0, 0.2, 0.4, 0.6, 0.8, 1]}),
            "color": {"condition": {"test": "datum.own", "value": {"expr": "colour"}}, "value": "#888888"},
            "shape": {"field": "shape", "type": "nominal", "scale": None},
            "opacity": {"condition": {"test": "datum.own", "value": 0.75}, "value": 0.45},
            "tooltip": [_text("side", "which"), _text("output"), _number("x"), _number("p"), _text("seed")],
        },
    )


def gaussians(colours: Mapping[str, str]) -> Spec:
    """The Gaussian of the class's own output and that of its impostors, for every head."""
    shared: Spec = {
        "x": _x("x", "x", axis=_FEW),
        "y": _y("density", "density"),
        "color": _colour(colours),
        "detail": [{"field": "id"}],
        "tooltip": [
            _text("head"),
            _text("side", "which"),
            _number("mean"),
            _number("sigma", "σ"),
            _text("seed"),
        ],
    }
    dash = {"condition": {"test": "datum.own", "value": [1, 0]}, "value": [5, 3]}
    width = {"condition": {"test": "datum.thin", "value": 1}, "value": 2.2}
    return _figure(
        260,
        layer=[
            {
                "transform": [{"filter": "datum.own"}],
                "mark": {"type": "area", "opacity": 0.12, "line": False},
                "encoding": {**shared, "y": {**shared["y"], "stack": None}},
            },
            {"mark": "line", "encoding": {**shared, "strokeDash": dash, "strokeWidth": width}},
        ],
    )


def bars(colours: Mapping[str, str]) -> Spec:
    """One measure for every class, all heads side by side; whiskers are one standard deviation over seeds."""
    place = {
        "y": {"field": "name", "type": "nominal", "sort": None, "title": None},
        "yOffset": {"field": "head", "type": "nominal", "sort": list(colours)},
    }
    tooltip = [_text("name", "class"), _text("head"), _number("value"), _number("sd", "deviation over seeds")]
    return _figure(
        300,  # the page sets it by the number of bars
        layer=[
            {
                "mark": {"type": "bar"},
                "encoding": {
                    **place,
                    "x": _x("value", None, scale={"zero": True}, axis=_FEW),
                    "color": _colour(colours),
                    "tooltip": tooltip,
                },
            },
            {
                "transform": [{"filter": "datum.low != null"}],
                "mark": {"type": "rule", "color": "currentColor", "strokeWidth": 1.2},
                "encoding": {**place, "x": _x("low", None), "x2": {"field": "high"}},
            },
        ],
    )


def learned(colours: Mapping[str, str]) -> Spec:
    """(mu, sigma) of the head beside the mean and deviation that x has, one line a class."""
    tooltip = [_text("name", "class"), _text("head"), _text("kind"), _number("mean"), _number("sigma", "σ")]
    place = {"x": _x("mean", "mean", scale={"zero": False}, axis=_FEW), "y": _y("sigma", "σ", scale={"zero": False})}
    shapes = {"domain": ["learned", "its own images", "all images"], "range": ["circle", "triangle-up", "square"]}
    return _figure(
        300,
        layer=[
            {
                "mark": {"type": "line", "strokeWidth": 1, "opacity": 0.35},
                "encoding": {**place, "detail": [{"field": "id"}], "color": _colour(colours)},
            },
            {
                "mark": {"type": "point", "filled": True, "opacity": 0.85},
                "encoding": {
                    **place,
                    "color": _colour(colours),
                    "shape": {"field": "kind", "type": "nominal", "scale": shapes, "legend": None},
                    "size": {"condition": {"test": "datum.chosen", "value": 190}, "value": 55},
                    "tooltip": tooltip,
                },
            },
        ],
    )


def curves(colours: Mapping[str, str]) -> Spec:
    """A quantity of the training by epoch, one line a run."""
    return _figure(
        240,
        layer=[
            {
                "mark": {"type": "line", "point": {"size": 14}, "strokeWidth": 1.4, "opacity": 0.8},
                "encoding": {
                    "x": _x("epoch", "epoch", axis={"format": "~g", "tickMinStep": 1}),
                    "y": _y("value", None, scale={"type": "log"}, axis={"format": "~g"}),
                    "color": _colour(colours),
                    "detail": [{"field": "id"}],
                    "tooltip": [_text("head"), _text("seed"), _text("epoch"), _number("value")],
                },
            }
        ],
    )


def seeds(colours: Mapping[str, str]) -> Spec:
    """A metric of every seed, with the mean and its 95 % interval."""
    return _seed_figure(colours, zero=False)


def differences(colours: Mapping[str, str]) -> Spec:
    """The paired differences from the first head, with their mean and its 95 % interval."""
    return _seed_figure(colours, zero=True)


def _seed_figure(colours: Mapping[str, str], zero: bool) -> Spec:
    x = {"field": "head", "type": "nominal", "sort": list(colours), "title": None, "axis": {"labelAngle": 0}}
    y = _y("value", None, scale={"zero": zero})
    wide = [_text("head"), _number("value", "mean"), _number("low", "from"), _number("high", "to")]
    mean = {"transform": [{"filter": "datum.mean"}]}
    rule: Spec = {"mark": {"type": "rule", "strokeDash": [4, 3], "color": "currentColor"}}
    zero_line = [{"data": {"values": [{"value": 0}]}, **rule, "encoding": {"y": y}}] if zero else []
    return _figure(
        240,
        layer=[
            *zero_line,
            {
                "transform": [{"filter": "!datum.mean"}],
                "mark": {"type": "point", "filled": False, "size": 50, "xOffset": -9},
                "encoding": {
                    "x": x,
                    "y": y,
                    "color": _colour(colours),
                    "tooltip": [_text("head"), _text("seed"), _number("value")],
                },
            },
            {
                **mean,
                "mark": {"type": "rule", "strokeWidth": 2.5, "xOffset": 9},
                "encoding": {
                    "x": x,
                    "y": _y("low", None),
                    "y2": {"field": "high"},
                    "color": _colour(colours),
                    "tooltip": wide,
                },
            },
            {
                **mean,
                "mark": {"type": "point", "filled": True, "size": 80, "opacity": 1, "xOffset": 9},
                "encoding": {"x": x, "y": y, "color": _colour(colours), "tooltip": wide},
            },
        ],
    )


def calibration(colours: Mapping[str, str]) -> Spec:
    """Reliability diagram: how often a confidence was right."""
    place = {
        "x": _x("confidence", "confidence", scale={"domain": [0, 1]}, axis=_FEW),
        "y": _y("right", "accuracy", scale={"domain": [0, 1]}),
    }
    line: Spec = {"mark": {"type": "line", "strokeDash": [4, 3], "color": _LINE}}
    diagonal = {"data": {"values": [{"confidence": 0, "right": 0}, {"confidence": 1, "right": 1}]}, **line}
    tooltip = [
        _text("head"),
        _number("confidence", "mean confidence"),
        _number("right", "right"),
        {"field": "count", "title": "images", "format": ",d"},
    ]
    return _figure(
        300,
        layer=[
            {**diagonal, "encoding": place},
            {
                "mark": {"type": "line", "strokeWidth": 1.6, "opacity": 0.7},
                "encoding": {**place, "color": _colour(colours)},
            },
            {
                "mark": {"type": "point", "filled": True, "opacity": 0.85},
                "encoding": {
                    **place,
                    "color": _colour(colours),
                    "size": {"field": "share", "type": "quantitative", "scale": {"range": [15, 260]}, "legend": None},
                    "tooltip": tooltip,
                },
            },
        ],
    )


def playground() -> dict[str, Spec]:
    """z(x), its slope and p of two classes; lam, mu1, sigma1, mu2, sigma2, x1 and x2 are set by sliders."""
    values = {"lam": 2.0, "mu1": 0.0, "sigma1": 1.0, "mu2": 2.0, "sigma2": 1.0, "x1": 1.0, "x2": 0.0}

    def phi(x: str, c: int) -> str:
        return f"cumulativeNormal({x}, mu{c}, sigma{c})"

    def z(x: str, c: int) -> str:
        return f"({x} + lam * {phi(x, c)})"

    def rows(*parts: tuple[str, str]) -> list[Spec]:
        """x on a grid, with one row for each of the named formulas."""
        steps: list[Spec] = [{"calculate": formula, "as": name} for name, formula in parts]
        return [*steps, {"fold": [name for name, _ in parts], "as": ["line", "value"]}]

    def slope(x: str, c: int) -> str:
        return f"(1 + lam * densityNormal({x}, mu{c}, sigma{c}))"

    params: list[Spec] = [{"name": k, "value": v} for k, v in values.items()]
    for c, other in ((1, 2), (2, 1)):  # what the table beside the figures says
        x = f"x{c}"
        told = {"phi": phi(x, c), "z": z(x, c), "slope": slope(x, c)}
        told |= {
            "p": f"1 / (1 + exp({z(f'x{other}', other)} - {z(x, c)}))",
            "softmax": f"1 / (1 + exp(x{other} - {x}))",
        }
        params += [{"name": f"{k}{c}", "expr": v} for k, v in told.items()]

    grid = {"sequence": {"start": -8, "stop": 8.001, "step": 0.05, "as": "x"}}
    first, second, plain = "class 1", "class 2", "softmax (λ = 0)"
    dashes = {"condition": {"test": f"datum.line === '{plain}'", "value": [5, 4]}, "value": [1, 0]}
    range_ = {"domain": [first, second, plain], "range": ["#D55E00", "#0072B2", "#888888"]}
    here: Spec = {"data": {"values": [{}]}}

    def panel(title: str, transform: list[Spec], at: list[tuple[str, str, str]], height: int = 220) -> Spec:
        lines = {
            "data": grid,
            "transform": transform,
            "mark": {"type": "line", "strokeWidth": 2},
            "encoding": {
                "x": _x("x", "x", scale={"domain": [-8, 8], "nice": False}),
                "y": _y("value", title, scale={"zero": False}),
                "color": {"field": "line", "type": "nominal", "scale": range_, "legend": None},
                "strokeDash": dashes,
                "tooltip": [_text("line", "which"), _number("x"), _number("value")],
            },
        }
        dots = [
            {
                **here,
                "transform": [
                    {"calculate": x, "as": "x"},
                    {"calculate": y, "as": "value"},
                    {"calculate": f"'{which}'", "as": "line"},
                ],
                "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1},
                "encoding": {
                    "x": {"field": "x", "type": "quantitative"},
                    "y": {"field": "value", "type": "quantitative"},
                    "color": {"field": "line", "type": "nominal", "scale": range_, "legend": None},
                    "tooltip": [_text("line", "which"), _number("x"), _number("value")],
                },
            }
            for x, y, which in at
        ]
        return {**_figure(height, layer=[lines, *dots]), "params": params}

    p = f"1 / (1 + exp({z('x2', 2)} - {{}}))"
    return {
        "z": panel(
            "z",
            rows((first, z("datum.x", 1)), (second, z("datum.x", 2)), (plain, "datum.x")),
            [("x1", z("x1", 1), first), ("x2", z("x2", 2), second)],
        ),
        "slope": panel(
            "slope of z",
            rows((first, slope("datum.x", 1)), (second, slope("datum.x", 2)), (plain, "1")),
            [("x1", slope("x1", 1), first), ("x2", slope("x2", 2), second)],
        ),
        "p": panel(
            "p of class 1",
            rows((first, p.format(z("datum.x", 1))), (plain, "1 / (1 + exp(x2 - datum.x))")),
            [("x1", p.format(z("x1", 1)), first)],
        ),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Parts
# ---------------------------------------------------------------------------------------------------------------------


def _figure(height: int, **parts: Any) -> Spec:
    return {
        "data": {"name": "rows"},
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "config": CONFIG,
        **parts,
    }


def _x(field: str, title: str | None, **more: Any) -> Spec:
    return {"field": field, "type": "quantitative", "title": title, **more}


def _y(field: str, title: str | None, **more: Any) -> Spec:
    return {"field": field, "type": "quantitative", "title": title, **more}


def _colour(colours: Mapping[str, str]) -> Spec:
    scale = {"domain": list(colours), "range": list(colours.values())}
    return {"field": "head", "type": "nominal", "scale": scale, "legend": None}


def _text(field: str, title: str | None = None) -> Spec:
    return {"field": field, "type": "nominal", "title": title or field}


def _number(field: str, title: str | None = None) -> Spec:
    return {"field": field, "type": "quantitative", "title": title or field, "format": _NUMBER}
