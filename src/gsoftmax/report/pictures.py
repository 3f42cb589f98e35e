"""The pictures of the README, from committed results: `python -m gsoftmax.report.pictures`.

`python -m gsoftmax.report.pictures runs/digits` first updates the results from a comparison's folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ..files import atomic_write
from . import figures
from .data import Document, from_runs

RESULTS = Path("results/digits.json")
IMAGES = Path("docs/images")
CLASS = "3"  # of the digits, the one that is hardest to tell from the others
NAMES = ("x-against-p", "gaussians", "learned", "seeds", "calibration")


def refresh(runs: str, results: Path = RESULTS) -> Path:
    """Saves what the pictures need of a comparison."""
    doc = from_runs([runs])
    chosen = doc["classes"].index(CLASS)
    small = {**doc, "points": [_of_class(run, chosen) for run in doc["points"] if run["seed"] == doc["seeds"][0]]}
    small["geometry"] = [{k: v for k, v in g.items() if k != "nearest"} | {"nearest": []} for g in doc["geometry"]]
    small["environment"] = {k: doc["environment"].get(k) for k in ("gsoftmax", "torch", "python", "processor", "gpu")}
    small["commands"] = doc["commands"][:-1]  # all but this one
    results.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(results, json.dumps(small, ensure_ascii=False, separators=(",", ":")) + "\n")
    return results


def _of_class(run: Document, c: int) -> Document:
    chosen = [i for i, found in enumerate(run["c"]) if found == c]
    return {**run, **{k: [run[k][i] for i in chosen] for k in ("c", "own", "j", "x", "p")}}


def draw(results: Path = RESULTS, out: Path = IMAGES) -> list[Path]:
    """The pictures, from the saved results."""
    doc = json.loads(results.read_text("utf-8"))
    return figures.write(doc, out, ["svg"], c=doc["classes"].index(CLASS), names=NAMES)


def main(argv: list[str]) -> None:
    if argv:
        print(refresh(argv[0]))
    for path in draw():
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
