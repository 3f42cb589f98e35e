"""`digits`: real images that come with scikit-learn, so that nothing needs a download."""

from __future__ import annotations

import gzip
import importlib.util
import os
from pathlib import Path

import numpy as np
import torch

from .core import DataError, Dataset, Request, Split
from .seeded import take


def load_digits(request: Request) -> Dataset:
    """1,797 handwritten digits, 8 x 8 gray levels, with a fixed stratified split into 1,297 and 500."""
    levels, labels = _digits()
    # 0 ... 16 becomes 0 ... 255: 255/16 apart, so all 17 levels stay distinct
    x = torch.from_numpy(np.rint(levels * (255 / 16)).astype(np.uint8)).view(-1, 1, 8, 8)
    y = torch.from_numpy(labels.astype(np.int64))
    test, train = take(y, 500 / len(y), seed=1797)
    every, names = Split(x, y), tuple(map(str, range(10)))
    return Dataset("digits", "images", names, False, every.select(train), every.select(test))


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Gray levels 0 to 16, (1797, 64), and digits, (1797,)."""
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.origin:
        raise DataError("digits comes with scikit-learn, which is not installed: pip install 'gsoftmax[train]'")
    # reading its file is a hundred times as fast as importing scikit-learn
    table = Path(os.path.dirname(found.origin), "datasets", "data", "digits.csv.gz")
    if table.is_file():
        with gzip.open(table, "rt", encoding="ascii") as lines:
            rows = np.loadtxt(lines, delimiter=",")
        return rows[:, :64], rows[:, 64]
    from sklearn.datasets import load_digits as bundled

    raw = bundled()
    return raw.data, raw.target
