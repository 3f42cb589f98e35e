"""Name, unit, direction and order of every number that a run or an analysis reports.

Results hold fractions; tables and figures show percent where `percent` says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["FEATURES", "GEOMETRY", "MEASURES", "MULTI", "SINGLE", "Measure", "find", "headline", "ordered"]


@dataclass(frozen=True)
class Measure:
    """How a number is shown and read."""

    key: str  # as in metrics.jsonl
    label: str  # as in tables and figures, without the unit
    percent: bool = False  # a fraction that is shown as percent
    smaller_is_better: bool = False  # else larger is better

    @property
    def scale(self) -> float:
        return 100.0 if self.percent else 1.0

    @property
    def title(self) -> str:
        """Label and unit."""
        return f"{self.label} %" if self.percent else self.label

    @property
    def difference(self) -> str:
        """Label and unit of a difference."""
        return f"{self.label}, points" if self.percent else self.label


MEASURES = {
    m.key: m
    for m in (
        Measure("error", "error", percent=True, smaller_is_better=True),
        Measure("error_x", "error of x", percent=True, smaller_is_better=True),
        Measure("error_of_guessing", "error of guessing", percent=True),
        Measure("mAP", "mAP", percent=True),
        Measure("mAP_voc12", "mAP (VOC 2012)", percent=True),
        Measure("C_P", "C-P", percent=True),
        Measure("C_R", "C-R", percent=True),
        Measure("C_F1_mean", "C-F1", percent=True),
        Measure("O_P", "O-P", percent=True),
        Measure("O_R", "O-R", percent=True),
        Measure("O_F1", "O-F1", percent=True),
        Measure("hamming", "labels wrong", percent=True, smaller_is_better=True),
        Measure("compactness", "compactness"),
        Measure("separability", "separability"),
        Measure("ratio", "ratio"),
        Measure("relative_sigma", "relative σ", smaller_is_better=True),
        Measure("dprime", "d′"),
        Measure("nll", "NLL", smaller_is_better=True),
        Measure("ece", "ECE", percent=True, smaller_is_better=True),
        Measure("accuracy", "accuracy", percent=True),
        Measure("AP", "AP", percent=True),
        Measure("nc1", "NC1, variability within classes", smaller_is_better=True),
        Measure("nc2_norms", "NC2, norms of class means", smaller_is_better=True),
        Measure("nc2_angles", "NC2, angles of class means", smaller_is_better=True),
        Measure("nc2_simplex", "NC2, distance from a simplex", smaller_is_better=True),
        Measure("nc3", "NC3, W against class means", smaller_is_better=True),
        Measure("nc4", "NC4, nearest mean against model", percent=True, smaller_is_better=True),
        Measure("w_norms", "W, norms of rows", smaller_is_better=True),
        Measure("w_simplex", "W, distance from a simplex", smaller_is_better=True),
        Measure("ncm_error", "error of the nearest class mean", percent=True, smaller_is_better=True),
        Measure("fisher", "Fisher ratio"),
        Measure("effective_rank", "effective rank of h"),
    )
}

# What a comparison tests, in this order.
GEOMETRY = ("compactness", "separability", "ratio", "relative_sigma", "dprime")
SINGLE = ("error", "error_x", *GEOMETRY, "nll", "ece")
FEATURES = (
    *("nc1", "nc2_norms", "nc2_angles", "nc2_simplex", "nc3", "nc4", "ncm_error"),
    *("w_norms", "w_simplex", "fisher", "effective_rank"),
)
MULTI = ("mAP", "C_F1_mean", "O_F1", *GEOMETRY, "nll", "ece")


def find(key: str) -> Measure:
    """The measure of a key; an unknown key is its own title.

    key: of a result

    >>> find("dprime").title, find("ood_probability digits").title, find("loss").title
    ('d′', 'AUROC, probability, digits %', 'loss')
    """
    if key.startswith("ood_"):
        score, _, outside = key.removeprefix("ood_").partition(" ")
        return Measure(key, f"AUROC, {score.replace('_', ' ')}, {outside}", percent=True)
    return MEASURES.get(key) or Measure(key, key)


def ordered(keys: Iterable[str]) -> tuple[str, ...]:
    """The measures that a comparison tests: those of single-label or multi-label data, then detection.

    keys: of its results; a measure that they lack is left out, such as NLL where the head was too large to gather x

    >>> ordered(["seconds", "nll", "error", "ood_energy digits"])
    ('error', 'nll', 'ood_energy digits')
    """
    keys = list(keys)
    fixed = MULTI if "mAP" in keys else SINGLE
    return (*(k for k in fixed if k in keys), *(k for k in keys if k.startswith("ood_")))


def headline(multilabel: bool) -> Measure:
    """The measure that verdicts are about.

    multilabel: of the data
    """
    return MEASURES["mAP" if multilabel else "error"]
