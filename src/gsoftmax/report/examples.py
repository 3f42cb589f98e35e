"""Single examples: what is confused with what, examples that flip between heads, labels that may be wrong, thumbnails.

Everything but the thumbnails comes from the files of outputs.  The pictures are read from the run's own dataset when
the report is made; where that cannot be read, or its labels are not those of the outputs, the page shows row numbers.

    examples   None, or: rows, unit ("image", "row"), runs, confusion, flips, labels, unlearned, pictures, missing
    confusion  order (classes, confusable ones are neighbours; of many the most confused), heads: head -> images (of
               every class, in all runs), right, seeds, wrong (class, predicted, count, count of every seed; the most
               frequent first); None for several labels
    flips      head -> runs (of the first head, and of it), better, worse (examples that a larger, or smaller, part of
               its runs gets right), apart, apart_first (examples on which a run of it and of the first head differ, and
               two runs of the first), tiles
    labels     tiles: examples whose label nearly all runs contradict with high probability
    unlearned  classes without such tiles, because the runs get most of their images wrong
    tile       row, c (label), first and second (fractions of wrong runs), as_first, as_second, p; -1 for no class
    pictures   row -> name, and src (a data URI) where there is an image
"""

from __future__ import annotations

import base64
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import build
from ..data.images import read_image
from ..messages import first_line
from ..outputs import IGNORE, Outputs, open_outputs
from ..runs import read_config
from ..tables import plain

MOST_PICTURES = 96
MOST_CELLS = 3000  # of a head's confusion, the most frequent
MOST_ORDERED = 200  # classes whose confusion is drawn as a whole matrix
MOST_DRAWN = 40  # of more classes, those of the most frequent confusions
_MOST_LABELS = 24  # labels that may be wrong
_MOST_TILES = 12  # of a head, better and worse each
_MOST_ITEMS = 50_000_000  # predictions held at a time
_AGREED, _CONFIDENT = 0.8, 0.7  # of the runs, and their mean probability: a label that may be wrong
_BLOCK = 2**22
_SIDE = 112  # of the thumbnails of photos, in pixels
_PIXELATED = 48  # small images keep every pixel
_MOST_BYTES = 800_000  # of all thumbnails

Runs = Mapping[tuple[str, int], Path]
Tile = dict[str, Any]


class _Run(NamedTuple):
    """What one run does with every example."""

    y: np.ndarray  # (N,), or (N, L) of 0 and 1
    predicted: np.ndarray  # as y; several labels: where p is at least 1/2
    p: np.ndarray  # as y: of the predicted class; several labels: against the label
    used: np.ndarray  # (N,) rows with a label and finite outputs
    soft: np.ndarray | None  # (C, C) sums of p over the images of a class, for few classes


def read_examples(runs: Runs, data_root: str | None = None) -> dict[str, Any] | None:
    """The examples of a document; None where there is nothing to read, or too much.

    runs: run folders or files of outputs by (head, seed), those of the first head first
    data_root: where the datasets are
    """
    if not runs:
        return None
    heads = list(dict.fromkeys(head for head, _ in runs))
    first = open_outputs(next(iter(runs.values())))
    each = first.n * (first.num_classes if first.multilabel else 1)
    seeds = list(dict.fromkeys(seed for _, seed in runs))
    seeds = seeds[: max(1, _MOST_ITEMS // (each * len(heads)))]
    if each * len(heads) > _MOST_ITEMS:
        return None
    found: dict[tuple[str, int], _Run] = {}
    for (head, seed), path in runs.items():
        if seed in seeds:
            run = _read(open_outputs(path))
            base = next(iter(found.values()), run)
            if np.array_equal(run.y, base.y):  # else another draw of a validation split
                found[head, seed] = run
    y, used = next(iter(found.values())).y, np.logical_and.reduce([run.used for run in found.values()])
    heads = [h for h in heads if any(head == h for head, _ in found)]
    flips = {h: _flips(_of(found, heads[0]), _of(found, h), used, len(heads)) for h in heads[1:]}
    labels, unlearned = _labels(list(found.values()), used)
    tiles = [tile for head in flips.values() for tile in head["tiles"]] + labels
    pictures, missing, unit = _pictures(next(iter(runs.values())), data_root, y, [tile["row"] for tile in tiles])
    return {
        "rows": int(used.sum()),
        "unit": unit,
        "runs": len(found),
        "confusion": None if first.multilabel else _confusion(found, heads, used, first.num_classes),
        "flips": flips,
        "labels": labels,
        "unlearned": unlearned,
        "pictures": pictures,
        "missing": missing,
    }


def some_examples(found: dict[str, Any] | None, place: Mapping[int, int]) -> dict[str, Any] | None:
    """Examples with other classes.

    found, place: the examples, and the new number of each class that is kept
    """
    if found is None:
        return None

    def kept(tiles: Sequence[Tile]) -> list[Tile]:
        new = [{**t, **{k: place.get(t[k], -1) for k in ("c", "as_first", "as_second")}} for t in tiles]
        return [t for t in new if t["c"] >= 0]

    confusion = found["confusion"] and {
        "order": [place[c] for c in found["confusion"]["order"] or () if c in place],
        "heads": {
            head: {
                **{k: [of[k][c] for c in place] for k in ("images", "right")},
                "seeds": of["seeds"],
                "wrong": [[place[c], place[j], *n] for c, j, *n in of["wrong"] if c in place and j in place],
            }
            for head, of in found["confusion"]["heads"].items()
        },
    }
    flips = {head: {**of, "tiles": kept(of["tiles"])} for head, of in found["flips"].items()}
    unlearned = [place[c] for c in found["unlearned"] if c in place]
    return {**found, "confusion": confusion, "flips": flips, "labels": kept(found["labels"]), "unlearned": unlearned}


def confusable_order(similarity: np.ndarray) -> list[int]:
    """An order in which similar classes are neighbours: average linkage, the chains joined at their most similar ends.

    similarity: (C, C)

    >>> near = np.array([[0, 1, 9, 1], [1, 0, 1, 5], [9, 1, 0, 2], [1, 5, 2, 0]])
    >>> confusable_order(near)
    [0, 2, 3, 1]
    """
    s = similarity + similarity.T.astype(np.float64)
    linkage = s.copy()
    np.fill_diagonal(linkage, -np.inf)
    chains: dict[int, list[int]] = {c: [c] for c in range(len(s))}
    while len(chains) > 1:
        a, b = sorted(divmod(int(linkage.argmax()), len(s)))
        left, right = chains[a], chains.pop(b)
        size = len(left), len(right)
        ways = [(one, two) for one in (left, left[::-1]) for two in (right, right[::-1])]
        chains[a] = max(((one + two) for one, two in ways), key=lambda joined: s[joined[size[0] - 1], joined[size[0]]])
        linkage[a] = linkage[:, a] = (size[0] * linkage[a] + size[1] * linkage[b]) / sum(size)
        linkage[a, a] = -np.inf
        linkage[b] = linkage[:, b] = -np.inf
    return next(iter(chains.values()), [])


def _read(file: Outputs) -> _Run:
    ys, predicted, ps, masks = [], [], [], []
    few = not file.multilabel and file.num_classes <= MOST_ORDERED
    soft = np.zeros((file.num_classes, file.num_classes)) if few else None
    for block in file.blocks(max(1, _BLOCK // file.num_classes)):
        used = block.finite() if file.multilabel else block.finite() & (block.y != IGNORE)
        ys.append(block.y)
        masks.append(used)
        predicted.append(np.zeros(block.y.shape, bool if file.multilabel else np.int32))
        ps.append(np.zeros(block.y.shape, np.float32))
        if used.any():
            p, _ = file.probabilities(block.take(used))
            y = block.y[used]
            predicted[-1][used] = p >= 0.5 if file.multilabel else p.argmax(1)
            ps[-1][used] = np.abs(p - y) if file.multilabel else p.max(1)
            if soft is not None:
                np.add.at(soft, y, p)
    y_, predicted_, p_, used_ = (np.concatenate(parts) for parts in (ys, predicted, ps, masks))
    return _Run(y_, predicted_, p_, used_, soft)


def _of(found: Mapping[tuple[str, int], _Run], head: str) -> list[_Run]:
    return [run for (name, _), run in found.items() if name == head]


def _wrong(run: _Run, used: np.ndarray) -> np.ndarray:
    """Whether each example, or each label of each example, is wrong, as one row."""
    wrong: np.ndarray = run.predicted != run.y
    wrong[~used] = False
    return wrong.reshape(-1)


def _flips(first: Sequence[_Run], second: Sequence[_Run], used: np.ndarray, heads: int) -> dict[str, Any]:
    """Examples that more or fewer runs of a head get right than of the first head."""
    a, b = (np.stack([_wrong(run, used) for run in runs]).sum(0) for runs in (first, second))
    n, m = len(first), len(second)
    gain = a / n - b / m
    doubt = np.stack([run.p.reshape(-1) for run in (*first, *second)]).sum(0)
    most = max(1, min(_MOST_TILES, (MOST_PICTURES - _MOST_LABELS) // (2 * (heads - 1))))
    tiles: list[Tile] = []
    for sign in (1, -1):
        changed = np.flatnonzero(sign * gain > 0)
        order = np.lexsort((changed, -doubt[changed], -sign * gain[changed]))[:most]
        for item in changed[order].tolist():
            tile = _tile(first, item)
            tile |= {"first": float(a[item] / n), "second": float(b[item] / m), "as_first": _mode(first, item)[0]}
            tiles.append({**tile, "as_second": _mode(second, item)[0]})
    return {
        "runs": [n, m],
        "better": int((gain > 0).sum()),
        "worse": int((gain < 0).sum()),
        "apart": float((a / n * (1 - b / m) + (1 - a / n) * b / m).sum()),
        "apart_first": float((a * (n - a)).sum() * 2 / (n * (n - 1))) if n > 1 else None,
        "tiles": tiles,
    }


def _labels(runs: Sequence[_Run], used: np.ndarray) -> tuple[list[Tile], list[int]]:
    """Examples whose label nearly all runs contradict with high probability, the most certain first; and classes left
    out because the runs get most of their images wrong, so that a contradiction says nothing about the label."""
    wrong = np.stack([_wrong(run, used) for run in runs])
    votes = wrong.sum(0)
    y = runs[0].y
    # of several labels, images with and without a label are groups of their own
    group = y if y.ndim == 1 else (2 * np.arange(y.shape[1]) + y).reshape(-1)
    counted = used if y.ndim == 1 else np.repeat(used, y.shape[1])
    groups, sizes = np.unique(group[counted], return_counts=True)
    errors = np.bincount(group[counted], weights=votes[counted], minlength=int(groups.max(initial=0)) + 1)[groups]
    unlearned = groups[errors > 0.5 * len(runs) * sizes]
    votes[np.isin(group, unlearned)] = 0
    p = np.where(wrong, np.stack([run.p.reshape(-1) for run in runs]), 0).sum(0)
    items = np.flatnonzero((votes >= _AGREED * len(runs)) & (p >= _CONFIDENT * votes))
    tiles: list[Tile] = []
    for item in items[np.argsort(-p[items], kind="stable")].tolist():
        j, agreed = _mode(runs, item)
        if agreed >= _AGREED * len(runs) and len(tiles) < _MOST_LABELS:
            mean = round(float(p[item] / votes[item]), 4)
            part = float(votes[item] / len(runs))
            tiles.append({**_tile(runs, item), "first": part, "second": part, "as_first": j, "as_second": j, "p": mean})
    return tiles, sorted({int(g) if y.ndim == 1 else int(g) // 2 for g in unlearned})


def _tile(runs: Sequence[_Run], item: int) -> Tile:
    y = runs[0].y
    row, label = (item, None) if y.ndim == 1 else divmod(item, y.shape[1])
    # of several labels, whether the example has this one
    return {"row": row, "c": int(y[row])} if label is None else {"row": row, "c": label, "has": bool(y[row, label])}


def _mode(runs: Sequence[_Run], item: int) -> tuple[int, int]:
    """What most of the wrong runs predict (of several labels: 1 for the label, 0 for none; -1 where no run is wrong),
    and how many do."""
    y = int(runs[0].y.reshape(-1)[item])
    wrong = [j for j in (int(run.predicted.reshape(-1)[item]) for run in runs) if j != y]
    if not wrong:
        return -1, 0
    found, counts = np.unique(wrong, return_counts=True)
    return int(found[counts.argmax()]), int(counts.max())


def _confusion(
    found: Mapping[tuple[str, int], _Run], heads: Sequence[str], used: np.ndarray, classes: int
) -> dict[str, Any]:
    told, softs = {}, [run.soft for run in found.values() if run.soft is not None]
    for head in heads:
        runs, right, images = _of(found, head), np.zeros(classes, np.int64), np.zeros(classes, np.int64)
        cells = []
        for run in runs:
            y, j = run.y[used].astype(np.int64), run.predicted[used].astype(np.int64)
            images += np.bincount(y, minlength=classes)
            right += np.bincount(y[y == j], minlength=classes)
            cells.append(y[y != j] * classes + j[y != j])
        place, cell = np.unique(np.concatenate(cells), return_inverse=True)
        of_run = np.repeat(np.arange(len(runs)), [len(c) for c in cells])
        count = np.bincount(cell * len(runs) + of_run, minlength=len(place) * len(runs)).reshape(-1, len(runs))
        order = np.lexsort((place, -count.sum(1)))[:MOST_CELLS]
        wrong = [[*divmod(int(place[k]), classes), int(count[k].sum()), *count[k].tolist()] for k in order]
        seeds = [seed for name, seed in found if name == head]
        told[head] = {"images": images.tolist(), "right": right.tolist(), "seeds": seeds, "wrong": wrong}
    if softs:
        mean = np.sum(softs, axis=0)
        order_ = confusable_order(mean / np.maximum(mean.sum(1, keepdims=True), 1e-12))
    else:
        order_ = _most_confused(told)
    return {"order": order_, "heads": told}


def _most_confused(heads: Mapping[str, Any]) -> list[int]:
    """The classes of the most frequent confusions, confusable ones are neighbours.

    heads: as in `confusion`
    """
    parts = Counter[tuple[int, int]]()
    for of in heads.values():
        for c, j, n, *_ in of["wrong"]:
            parts[c, j] += n / of["images"][c]
    chosen: dict[int, int] = {}
    for pair in sorted(parts, key=lambda pair: (-parts[pair], pair)):
        if len({*chosen, *pair}) <= MOST_DRAWN:
            for c in pair:
                chosen.setdefault(c, len(chosen))
    similarity = np.zeros((len(chosen), len(chosen)))
    for (c, j), part in parts.items():
        if c in chosen and j in chosen:
            similarity[chosen[c], chosen[j]] = part
    classes = list(chosen)
    return [classes[k] for k in confusable_order(similarity)]


def _pictures(
    path: Path, data_root: str | None, y: np.ndarray, rows: Sequence[int]
) -> tuple[dict[str, dict[str, str]], str, str]:
    """Name and thumbnail of these rows of the run's evaluated split, why there are none, and what a row is: an image,
    unless the dataset is a table or nothing is known about it."""
    config = read_config(path) if path.is_dir() else None
    unit = "row" if config is None or re.search(r"\b(arff|npz):", config.data) else "image"
    if config is None or not rows:
        return {}, "", unit
    try:
        data = build.load_data(config.override({"device": "cpu"}), data_root)
        split = data.split(config.evaluate_on)
        unit = "row" if isinstance(split.x, torch.Tensor) and split.x.ndim != 4 else "image"
        if not np.array_equal(split.y.numpy(), y):
            raise ValueError(f"{config.data} has other rows than the outputs")
        if unit == "row":
            return {}, "", unit
        in_memory, files = (split.x, split.files) if isinstance(split.x, torch.Tensor) else (None, split.x)
        found: dict[str, dict[str, str]] = {}
        size = 0
        for row in list(dict.fromkeys(rows))[:MOST_PICTURES]:
            told = {"name": plain("/".join(Path(files[row]).parts[-2:]))} if files else {}
            if size < _MOST_BYTES:
                x = read_image(files[row], near=2 * _SIDE) if files or in_memory is None else in_memory[row]
                told["src"] = _thumbnail(x)
                size += len(told["src"])
            found[str(row)] = told
        return found, "", unit
    except (ImportError, OSError, ValueError) as error:
        return {}, first_line(error), unit


def _thumbnail(x: torch.Tensor) -> str:
    """A data URI of an image; x: uint8 (C, H, W)."""
    from PIL import Image

    small = max(x.shape[1:]) <= _PIXELATED
    pixels = x.permute(1, 2, 0).contiguous().numpy()
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels[:, :, :3])
    if not small:
        image.thumbnail((_SIDE, _SIDE), reducing_gap=2.0)
    out = io.BytesIO()
    image.save(out, "PNG" if small else "JPEG", **({"optimize": True} if small else {"quality": 80}))
    kind = "png" if small else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}"
