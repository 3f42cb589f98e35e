"""The examples of a document as the page shows them: a picture or a number, the label, and what the heads say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .colours import colours
from .examples import Tile

_MOST_NAMES = 10  # of classes, in a sentence
_FIFTHS = 5  # runs; of fewer, at least 80 % are all


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
        told = {"head": head, "told": _told(doc, head, of), "gained": gained, "lost": lost}
        first = doc["heads"][0]
        if of["runs"] == [1, 1]:
            titles = f"Right where {first} is wrong", f"Wrong where {first} is right"
        else:
            titles = f"Right more often than {first}", f"Right less often than {first}"
        numbered = zip(titles, (of["better"], of["worse"]), strict=True)
        flips.append({**told, "titles": [f"{title} ({n:,})" for title, n in numbered]})
    labels = [_tile(doc, tile, {}) for tile in found["labels"]]
    unlearned = [doc["classes"][c] for c in found["unlearned"]]
    names = ", ".join(unlearned[:_MOST_NAMES])
    if len(unlearned) > _MOST_NAMES:
        names += f" and {len(unlearned) - _MOST_NAMES:,} more"
    return {"flips": flips, "labels": labels, "doubt": _doubt(doc, names), "missing": found["missing"]}


def _doubt(doc: Mapping[str, Any], unlearned: str) -> str:
    """Which labels are doubted.

    unlearned: names of the classes that are left out
    """
    n, runs, what = doc["examples"]["runs"], _runs(doc), f"{doc['examples']['unit']}s"
    if n == 1:
        agreed, most = "The model gives another answer, with a probability of 0.7 or more", "the model gets"
    else:
        agreed = f"At least 80 % of all {runs}" if n >= _FIFTHS else f"All {n} {runs}"
        agreed += " agree on another answer, with a mean probability of 0.7 or more"
        most = f"the {runs} get"
    text = f"{agreed}. Some of these labels may be wrong; others belong to {what} that mislead "
    text += "the model." if n == 1 else "every model."
    return text + (f" Left out, because {most} most of their {what} wrong: {unlearned}." if unlearned else "")


def _told(doc: Mapping[str, Any], head: str, of: Mapping[str, Any]) -> str:
    """How many examples flip, beside what flips between two runs of the first head."""
    first, found = doc["heads"][0], doc["examples"]
    what = f"{found['unit']}s" if not doc["multilabel"] else "labels"
    if of["apart_first"] is None:
        size, better, worse = (f"{n:,}" for n in (found["rows"], of["better"], of["worse"]))
        if of["runs"] != [1, 1]:
            return f"Of {size} {found['unit']}s, {better} and {worse} {what} flip."
        of_ = " labels" if doc["multilabel"] else ""
        right = f"{head} gets {better}{of_} right that {first} gets wrong"
        return f"Of {size} {found['unit']}s, {right}, and {worse}{of_} wrong that {first} gets right."
    return (
        f"A run of {head} and a run of {first} disagree about whether they are right on {of['apart']:.1f} {what} on "
        f"average; two runs of {first} on {of['apart_first']:.1f}. Shown are the {what} whose fraction of right runs "
        "changes most."
    )


def _runs(doc: Mapping[str, Any]) -> str:
    return "runs" if doc["kind"] == "compare" else "models"


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
        wrong, right = answer(tile[f"as_{side}"]) if tile[side] > 0 else "", round(n * (1 - tile[side]))
        if n == 1:
            text = f"wrong: {wrong}" if wrong else "right"
        else:
            text = f"{right}/{n} right" + (f", else {wrong}" if wrong else "")
        lines.append({"colour": paint[head], "text": text})
    if "p" in tile:
        text = f"{answer(tile['as_first'])}, p {tile['p']:.2f}"
        if found["runs"] > 1:
            text = f"{100 * tile['first']:.0f} % of {_runs(doc)}: {text}"
        lines.append({"colour": None, "text": text})
    small = picture.get("src", "").startswith("data:image/png")
    return {"src": picture.get("src"), "small": small, "what": what, "c": tile["c"], "label": label, "lines": lines}
