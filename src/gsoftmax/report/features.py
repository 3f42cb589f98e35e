"""The two-dimensional views of the features: their part of the document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..analyze import FeatureView


def rows(views: Sequence[FeatureView], head: str) -> list[dict[str, Any]]:
    """The entries of a document for one model, with four digits of every coordinate.

    views, head: of the model, and what it is called
    """
    return [
        {
            **{"head": head, "name": view.name, "of": view.of, "share": [_number(v) for v in view.share]},
            **{"c": view.y.tolist(), "u": _numbers(view.points[:, 0]), "v": _numbers(view.points[:, 1])},
            **{"mu": _numbers(view.means[:, 0]), "mv": _numbers(view.means[:, 1])},
        }
        for view in views
    ]


def _numbers(values: np.ndarray) -> list[float | None]:
    return [_number(v) for v in values.tolist()]


def _number(value: float) -> float | None:
    return float(f"{value:.4g}") if np.isfinite(value) else None
