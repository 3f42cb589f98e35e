"""report.html: one file with everything in it, which works offline.

The template is filled by Jinja2 with escaping on, numbers travel as JSON, and the figures are drawn by Vega-Lite, whose
JavaScript comes with the package vl-convert-python (0.9 MB; plotly's would be 4.8 MB).
"""

from __future__ import annotations

import functools
import json
import os
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from .. import measures
from ..files import atomic_write
from ..significance import ALPHA
from ..summary import PAIRED, differences, means, no_verdict, over_images_tables, tuning_tables
from ..tables import Shown, Table
from . import gallery, specs, tables, words
from .colours import colours
from .data import Document, some_classes, some_points
from .examples import some_examples
from .figures import vl_convert

# What the page holds for each class, head, seed and split is about 300 bytes.
_MOST_ROWS = 5_000
_MOST_CLASSES = 1_500
_MOST_EXACT = 200  # classes whose numbers have all digits
_MOST_TABLE_ROWS = 200  # of a table on the page


def write(doc: Document, out: str | os.PathLike[str]) -> Path:
    """Writes `out`/report.html and returns its path."""
    path = Path(out) / "report.html"
    text = render(doc)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, text)
    return path


def render(doc: Document) -> str:
    """The page as text."""
    small = trim(doc)
    paint = colours(doc["heads"])
    few = f"The first {_MOST_TABLE_ROWS} of {{:,}} rows; the table files have all. {{}}"
    rest = [*tables.over_classes(small), tables.correlations(small), tables.normality(small), tables.classes(small)]
    rest.append(tables.intervals(small))
    shown, headline = small["examples"], measures.headline(doc["multilabel"])
    found = words.findings(doc)
    word = words.unit(doc)
    return _fill(
        "report.html",
        doc=small,
        word=word,
        figures_title=words.figures_title(doc),
        meanings=words.meanings(doc),
        colours=paint,
        about=words.about(doc),
        findings=found,
        no_verdict=no_verdict(doc),
        has_forest=doc["kind"] == "compare" and bool(found),
        headline=headline.key,
        headline_smaller=headline.smaller_is_better,
        smaller=[measures.find(m).label for m in doc["metrics"] if measures.find(m).smaller_is_better],
        tables={
            "summary": means(small),
            "tuning": tuning_tables(small),
            "differences": [*differences(small), *over_images_tables(small)],
            "rest": [
                t.first(_MOST_TABLE_ROWS, few.format(len(t.rows), t.note)) for t in rest if t is not None and t.rows
            ],
        },
        places={name: c for c, name in reversed(list(enumerate(small["classes"])))},
        name_of=lambda key: measures.find(key).title,
        curve_title=specs.title_of,
        cells=_cells,
        opened=_opened(small),
        sure=_sure,
        tuned_keys=list(specs.sensitivities(small)),
        has_learned=any("learned" in g for g in doc["geometry"]),
        has_margin=any(head.partition("(")[0] == "lsoftmax" for head in doc["heads"]),
        has_confusion=bool(shown and shown["confusion"]),
        drawn=len(specs.order(small)),  # classes of the confusion matrix
        total=len(doc["classes"]),
        shown=shown and gallery.view(small),
        fewest=specs.FEWEST,
        curve_keys=list(dict.fromkeys(k for c in doc["curves"] for k in c if k not in ("head", "seed", "epoch"))),
        data_json={**small, "examples": shown and {"confusion": shown["confusion"]}},
        specs_json={
            "figures": specs.for_page(small),
            "parameters": specs.parameters(small),
            "sources": specs.sources(small),
            "playground": specs.playground(),
        },
    )


def playground() -> str:
    """The playground as a separate page."""
    return _fill("playground.html", specs_json={"playground": specs.playground()})


def trim(doc: Document) -> Document:
    """The same with as many classes and seeds as fit into a few megabytes, and notes on the rest."""
    small = {**doc, "notes": list(doc["notes"])}
    rows, parts = doc["geometry"], len(doc["heads"]) * len(doc["splits"])
    most = min(_MOST_CLASSES, max(1, 2 * _MOST_ROWS // parts))
    if len(doc["classes"]) > most:
        count = rows[0]["count"] if rows else [0] * len(doc["classes"])
        keep = sorted(sorted(range(len(count)), key=lambda c: -count[c])[:most])
        which = f"the {most:,} classes with the most images" if rows else f"the first {most:,} classes"
        place = {c: i for i, c in enumerate(keep)}
        small["classes"] = [doc["classes"][c] for c in keep]
        small["geometry"] = rows = [some_classes(row, keep) for row in rows]
        small["normality"] = [some_classes(row, keep) for row in doc.get("normality", [])]
        small["points"] = [some_points(run, place) for run in doc["points"]]
        small["examples"] = some_examples(doc["examples"], place)
        small["correlations"] = None
        small["notes"].append(f"this page shows {which} of {len(doc['classes']):,}; tables written beside it have all")
    if len(small["classes"]) > _MOST_EXACT:
        small["geometry"] = [_rounded(row) for row in small["geometry"]]
    seeds, each = list(doc["seeds"]), max(1, len(small["classes"]) * parts)
    kept = seeds[: max(1, _MOST_ROWS // each)]
    if len(kept) < len(seeds):
        for key in ("geometry", "points"):
            small[key] = [row for row in small[key] if row["seed"] in kept]
        told = ", ".join(map(str, kept))
        small["notes"].append(f"the figures by class show seeds {told} of {len(seeds)}; tables and tests use all")
    return small


def _rounded(value: Any) -> Any:
    """The same with five significant digits."""
    if isinstance(value, dict):
        return {key: _rounded(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _opened(doc: Document) -> int:
    """The class that is shown first: of several models that whose score changes most, else that which scores worst."""
    key, scores = doc["measures"][-1], {}
    for head in doc["heads"]:
        runs = [g[key] for g in doc["geometry"] if g["head"] == head and g["split"] == "test"]
        if runs:
            scores[head] = np.array(runs, dtype=float).mean(0)
    if not scores:
        return 0
    first, *others = scores.values()
    changes = np.max([np.abs(other - first) for other in others], axis=0) if others else np.zeros_like(first)
    order = np.lexsort((first, -np.nan_to_num(changes)))  # nan, a class without images, comes last
    return int(order[0])


def _cells(table: Table) -> list[list[str]]:
    """The rows of a table as text, numbers with the minus sign of the prose and the figures."""
    return [
        [text if isinstance(cell, str) else text.replace("-", "−") for cell, text in zip(*row, strict=True)]
        for row in zip(table.rows, table.cells(), strict=True)
    ]


def _sure(table: Table, row: int) -> bool:
    """Whether a row of differences is significant after correction."""
    if table.header[1:] != PAIRED:
        return False
    p = table.rows[row][1 + PAIRED.index("p, Holm")]
    return isinstance(p, Shown) and p.value < ALPHA


def _fill(template: str, **values: Any) -> str:
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError:
        raise ValueError("a page needs Jinja2, which is not installed: pip install 'gsoftmax[report]'") from None
    loader = jinja2.FunctionLoader(_file)
    env = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    ours = {"css": "style.css", "common_js": "common.js", "playground_js": "playground.js", "report_js": "report.js"}
    trusted = {key: _file(name) for key, name in ours.items()} | {"vega": vega()}
    trusted |= {key: script_json(value) for key, value in values.items() if key.endswith("_json")}
    values |= {key: Markup(text) for key, text in trusted.items()}  # noqa: S704 - ours, or escaped for a script element
    return env.get_template(template).render(sliders=specs.SLIDERS, **values)


def script_json(value: Any) -> str:
    """JSON escaped for a script element.

    >>> script_json({"name": "</script><img src=x>"})
    '{"name":"\\\\u003c/script\\\\u003e\\\\u003cimg src=x\\\\u003e"}'
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


@functools.cache
def vega() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script."""
    bundle: str = vl_convert().javascript_bundle()
    return bundle.replace("</script", "<\\/script")


def _file(name: str) -> str:
    return (resources.files(__package__) / "templates" / name).read_text("utf-8")
