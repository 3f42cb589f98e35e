"""The examples of a document as the page shows them: a picture or a number, the label, and what the heads say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .colours import colours
from .examples import Tile

_MOST_NAMES = 10  # of classes, in a sentence


def view(doc: Mapping[str, Any]) -> dict[str, Any]:
    """Tiles of the examples that flip and of labels to check, for the template.

    doc: see `report.data`, with examples
    """
    found = doc["examples"]
    flips = []
    for head, of in found["flips"].items():
        runs = dict(zip((doc["heads"][0], head), of["runs"], strict=True))
        gained = [_tile(doc, tile, runs) for tile in of["tiles"] if tile["first"] > tile["second"]]
        lost = [_tile(doc, tile, runs) for tile in of["tiles"] if tile["first"] < tile["second"]]
        told = {"head": head, "better": f"{of['better']:,}", "worse": f"{of['worse']:,}", "told": _told(doc, head, of)}
        flips.append({**told, "gained": gained, "lost": lost})
    labels = [_tile(doc, tile, {}) for tile in found["labels"]]
    unlearned = [doc["classes"][c] for c in found["unlearned"]]
    names = ", ".join(unlearned[:_MOST_NAMES])
    if len(unlearned) > _MOST_NAMES:
        names += f" and {len(unlearned) - _MOST_NAMES:,} more"
    return {"flips": flips, "labels": labels, "unlearned": names, "missing": found["missing"]}


def _told(doc: Mapping[str, Any], head: str, of: Mapping[str, Any]) -> str:
    """How many examples flip, beside what flips between two runs of the first head."""
    first, found = doc["heads"][0], doc["examples"]
    what = f"{found['unit']}s" if not doc["multilabel"] else "labels"
    if of["apart_first"] is None:
        return f"Of {found['rows']:,} {found['unit']}s, {of['better']:,} and {of['worse']:,} {what} flip."
    return (
        f"A run of {head} and a run of {first} disagree about whether they are right on {of['apart']:.1f} {what} on "
        f"average; two runs of {first} on {of['apart_first']:.1f}. Shown are the {what} whose fraction of right runs "
        "changes most."
    )


def _tile(doc: Mapping[str, Any], tile: Tile, runs: Mapping[str, int]) -> dict[str, Any]:
    found, classes = doc["examples"], doc["classes"]
    picture = found["pictures"].get(str(tile["row"]), {})
    what = picture.get("name") or f"test {found['unit']} {tile['row']}"
    label = classes[tile["c"]] + ("" if tile.get("has", True) else ", absent")
    paint = colours(doc["heads"])

    def answer(j: int) -> str:
        if "has" in tile:
            return "present" if j == 1 else "absent"
        return classes[j] if j >= 0 else "another class"

    lines: list[dict[str, Any]] = []
    for (head, n), side in zip(runs.items(), ("first", "second"), strict=False):
        right = f"{round(n * (1 - tile[side]))}/{n} right"
        wrong = f", else {answer(tile[f'as_{side}'])}" if tile[side] > 0 else ""
        lines.append({"colour": paint[head], "text": right + wrong})
    if "p" in tile:
        text = f"{100 * tile['first']:.0f} % of runs: {answer(tile['as_first'])}, p {tile['p']:.2f}"
        lines.append({"colour": None, "text": text})
    small = picture.get("src", "").startswith("data:image/png")
    return {"src": picture.get("src"), "small": small, "what": what, "c": tile["c"], "label": label, "lines": lines}
