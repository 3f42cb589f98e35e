"""The README's picture of what G-softmax costs, from what the benchmarks measured: `python -m benchmarks.plot`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .common import RESULTS

PLOT = RESULTS.parent / "docs" / "images" / "cost.svg"


def bars(folder: Path = RESULTS) -> list[tuple[str, str, float]]:
    """(group, size, time over plain cross entropy), in the order of the benchmarks."""
    cpu, gpu = (json.loads((folder / f"bench-{name}.json").read_text())["rows"] for name in ("cpu", "gpu"))
    found = [("loss, CPU", r["size"], r["ratio"]) for r in cpu if r["contender"] == "ours, native"]
    groups = {"loss": "loss, GPU", "linear": "linear layer and loss, GPU", "eager call": "loss, GPU"}
    found += [(groups[r["claim"]], r["size"], r["ratio"]) for r in gpu if r["claim"] in groups]
    return sorted(found, key=lambda bar: (bar[0].startswith("linear"), bar[0]))


def plot(path: Path = PLOT) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "gsoftmax"
    found = bars()
    colours = dict(zip(sorted({b[0] for b in found}), ("#4269d0", "#efb118", "#3ca951"), strict=True))
    figure, axes = plt.subplots(figsize=(8, 0.36 * len(found) + 1.1))
    drawn: dict[str, Any] = {}
    for i, (group, _, ratio) in enumerate(found):
        drawn[group] = axes.barh(i, ratio, color=colours[group])
        axes.text(max(ratio + 0.02, 1.02 if ratio > 0.9 else 0), i, f"{ratio:.2f}", va="center", fontsize=9)
    axes.set_yticks(range(len(found)), [size.replace(" x ", " × ") for _, size, _ in found], fontsize=9)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=1)
    axes.set(xlabel="time over plain cross entropy, forward and backward", xlim=(0, 1.15 * max(b[2] for b in found)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(drawn.values(), drawn.keys(), frameon=False, loc="lower right", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    plot()
    print(PLOT.relative_to(RESULTS.parent))
