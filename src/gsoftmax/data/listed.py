"""`csv:FILE`: images listed in a table with their label, or several labels, and optionally their split."""

from __future__ import annotations

import csv
import io
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from ..catalog import CSV
from .core import PARTS, DataError, Dataset, Request, Split, Splits, read_bytes, reading
from .folders import own_images, some

_COLUMNS = {"path": "path", "file": "path", "filename": "path", "image": "path"}
_COLUMNS |= {"label": "label", "class": "label", "labels": "labels", "split": "split"}
_SPLITS = {**{part: part for part in PARTS}, "valid": "val", "validation": "val"}
_MAX_LIST = 2**28  # bytes of the table


def load_csv(request: Request) -> Dataset:
    """Images of a table with the columns path, label or labels, and optionally split.

    Paths are relative to the file.  Several labels are separated by ; or | and make the data multi-label; without a
    column `split`, or with the option `test`, a fraction is set aside for testing.
    """
    path, spec = Path(request.path), f"csv:{request.path}"
    if not path.is_file():
        raise DataError(f"{spec} not found: expected a file there\n  layout: {CSV.layout}")
    rows = _rows(path, spec)
    several = "labels" in rows[0]
    named = [_labels(row["labels"]) if several else [row["label"].strip()] for row in rows]
    if not several and (bad := [name for (name,) in named if not name or len(_labels(name)) > 1]):
        raise DataError(f"{spec}: label must be one class, got {bad[0]!r}; a column called labels holds any number")
    parts = ["train"] * len(rows) if "test" in request.options else _parts(rows, spec)
    files = [os.path.join(path.parent, row["path"].strip()) for row in rows]
    twice, count = Counter(map(os.path.normpath, files)).most_common(1)[0]
    if count > 1:
        raise DataError(f"{spec} lists {twice} more than once: one line per image, labels separated by ; or |")
    classes = tuple(
        sorted({name for names, part in zip(named, parts, strict=True) if part == "train" for name in names})
    )
    if len(classes) < 2:
        raise DataError(f"{spec} must have at least 2 classes in its training rows, got {some(classes) or 'none'}")
    index = {name: k for k, name in enumerate(classes)}
    if unseen := sorted({name for names in named for name in names} - {*classes}):
        raise DataError(f"{spec} has labels that are in no training row: {some(unseen)}")
    splits: Splits = {}
    for part in PARTS:
        chosen = [i for i, of in enumerate(parts) if of == part]
        if chosen:
            labels = [[index[name] for name in named[i]] for i in chosen]
            y = _indicators(labels, len(classes)) if several else torch.tensor([k for (k,) in labels])
            splits[part] = Split(tuple(files[i] for i in chosen), y)
    return own_images(f"csv:{path.name}", classes, splits, request)


def _rows(path: Path, spec: str) -> list[dict[str, str]]:
    """The lines of the table, by the names of `_COLUMNS`."""
    with reading(path, UnicodeDecodeError, csv.Error):
        text = read_bytes(path, _MAX_LIST).decode("utf-8-sig")
        lines = list(csv.reader(io.StringIO(text), delimiter="\t" if path.suffix == ".tsv" else ",", strict=True))
    header = [_COLUMNS.get(name.strip().lower(), "") for name in lines[0]] if lines else []
    if header.count("path") != 1 or header.count("label") + header.count("labels") != 1:
        found = ", ".join(lines[0])[:80] if lines else "nothing"
        raise DataError(f"{spec} must begin with a line of column names, path and label or labels, got {found!r}")
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        if not "".join(line).strip():
            continue
        if len(line) != len(header):
            raise DataError(f"{spec} line {number} must have {len(header)} columns, got {len(line)}")
        rows.append({name: cell for name, cell in zip(header, line, strict=True) if name})
    if not rows:
        raise DataError(f"{spec} lists no image")
    return rows


def _labels(cell: str) -> list[str]:
    return [name.strip() for name in re.split(r"[;|]", cell) if name.strip()]


def _parts(rows: Sequence[dict[str, str]], spec: str) -> list[str]:
    """The split of every row; all of them are training rows if there is no such column."""
    if "split" not in rows[0]:
        return ["train"] * len(rows)
    given = [row["split"].strip().lower() for row in rows]
    if unknown := [name for name in given if name not in _SPLITS]:
        raise DataError(f"{spec}: split must be train, val or test, got {unknown[0]!r}")
    parts = [_SPLITS[name] for name in given]
    if "train" not in parts:
        raise DataError(f"{spec} has no row whose split is train")
    return parts


def _indicators(labels: Sequence[Sequence[int]], count: int) -> torch.Tensor:
    """uint8 (N, count): 1 where a row has the label."""
    y = torch.zeros(len(labels), count, dtype=torch.uint8)
    for row, of in zip(y, labels, strict=True):
        row[list(of)] = 1
    return y
