"""The README's picture of what G-softmax costs, from what the benchmarks measured: `python -m benchmarks.plot`."""

from __future__ import annotations

import json
import re
from pathlib import Path

from gsoftmax.report.figures import render, sheet

from .common import RESULTS

TITLE = "time over plain cross entropy, forward and backward"
PLOT = RESULTS.parent / "docs" / "images" / "cost.svg"


def bars(folder: Path = RESULTS) -> list[tuple[str, str, float]]:
    """(group, size, time over plain cross entropy), in the order of the benchmarks."""
    cpu, gpu, newer = (
        json.loads((folder / f"bench-{name}.json").read_text("utf-8"))["rows"] for name in ("cpu", "gpu", "gpu-losses")
    )
    found = [("loss, CPU", r["size"], r["ratio"]) for r in cpu if r["contender"] == "ours, native"]
    groups = {"loss": "loss, GPU", "linear": "linear layer and loss, GPU", "eager call": "loss, GPU"}
    last = {(r["claim"], r["size"]): r["ratio"] for r in (*gpu, *newer)}
    found += [(groups[claim], size, ratio) for (claim, size), ratio in last.items() if claim in groups]
    return sorted(found, key=lambda bar: (bar[0].startswith("linear"), bar[0]))


def plot(path: Path = PLOT) -> None:
    rows = [
        {"i": i, "group": group, "ratio": ratio, "text": f"{ratio:.2f}"} for i, (group, _, ratio) in enumerate(bars())
    ]
    sizes = [re.sub(r"\b\d{4,}\b", lambda n: f"{int(n[0]):,}", size.replace(" x ", " × ")) for _, size, _ in bars()]
    axis = {"labelExpr": "sizes[datum.value]", "labelLimit": 300, "ticks": False}
    y = {"field": "i", "type": "ordinal", "title": None, "axis": axis}
    x = {"field": "ratio", "type": "quantitative", "title": TITLE, "axis": {"tickCount": 8}}
    colour = {
        "field": "group",
        "type": "nominal",
        "title": None,
        "sort": None,
        "scale": {"range": ["#4269d0", "#efb118", "#3ca951"]},
    }
    beside = {"field": "ratio", "type": "quantitative"}  # the text, to the right of the bar and of the line at 1
    spec = {
        "data": {"values": rows},
        "params": [{"name": "sizes", "value": sizes}],
        "width": 520,
        "height": {"step": 24},
        "layer": [
            {"mark": "bar", "encoding": {"y": y, "x": x, "color": colour}},
            {"mark": "rule", "encoding": {"x": {"datum": 1}}},
            {
                "transform": [{"calculate": "datum.ratio > 0.9 ? max(1, datum.ratio) : datum.ratio", "as": "ratio"}],
                "mark": {"type": "text", "align": "left", "dx": 4, "fontSize": 12},
                "encoding": {"y": y, "x": beside, "text": {"field": "text"}},
            },
        ],
    }
    path.write_bytes(render(sheet(spec)))


if __name__ == "__main__":
    plot()
    print(PLOT.relative_to(RESULTS.parent))
