"""Metrics: top-1 error, average precision, the multi-label numbers of the paper's tables, and calibration.

Plain functions on tensors or arrays. Fractions in [0, 1], not percent. Scores are ranked as they are: no sigmoid is
applied, which would saturate and create ties. A class without positives has no average precision: it is nan, and
averages over classes skip it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "MultilabelReport",
    "average_precision",
    "expected_calibration_error",
    "mean_average_precision",
    "multilabel_expected_calibration_error",
    "multilabel_negative_log_likelihood",
    "multilabel_report",
    "negative_log_likelihood",
    "top1_error",
]

ArrayLike = Any  # a torch tensor, a NumPy array, or nested lists of numbers

STYLES = ("exact", "voc12")

P_MIN = float(np.finfo(np.float64).eps)  # probabilities below count as this in the NLL, as in scikit-learn's log_loss

_COLUMNS = 8  # classes processed together: a cache line of float32 in a row of the scores
_SMALL = 2**18  # scores below which threads cost more than they save


def top1_error(scores: ArrayLike, target: ArrayLike, *, ignore_index: int = -100) -> float:
    """Fraction of images whose highest score isn't at the true class (the first of equal scores counts as highest).

    scores: (N, C) or (N, C, d1, ...), any monotone score (x, z or p)
    target: (N,) or (N, d1, ...) class indices
    ignore_index: entries of target equal to it are left out; with none left the result is nan

    >>> top1_error([[0.1, 0.9], [0.8, 0.2]], [1, 1])
    0.5
    """
    scores, target = _single(scores, target, ignore_index, "scores")
    return float((scores.argmax(1) != target).mean()) if len(target) else float("nan")


def negative_log_likelihood(p: ArrayLike, target: ArrayLike, *, ignore_index: int = -100) -> float:
    """Mean of -log p of the true class.

    p: (N, C) or (N, C, d1, ...) probabilities; those below 2.2e-16 count as 2.2e-16, so that a wrong prediction with
    p = 1 costs 36, not infinity
    target, ignore_index: as in `top1_error`

    >>> round(negative_log_likelihood([[0.5, 0.5], [0.25, 0.75]], [0, 1]), 4)
    0.4904
    """
    p, target = _single(p, target, ignore_index, "p")
    check_probabilities(p, rows=True)
    if not len(target):
        return float("nan")
    return float(-np.log(p[np.arange(len(p)), target].astype(np.float64).clip(P_MIN, 1)).mean())


def expected_calibration_error(p: ArrayLike, target: ArrayLike, bins: int = 15, *, ignore_index: int = -100) -> float:
    """Expected calibration error of the top label,

        ECE = sum over bins of (images in the bin / N) * |accuracy in the bin - mean confidence in the bin|.

    p, target, ignore_index: as in `negative_log_likelihood`
    bins: number of equal bins; bin k holds highest probabilities in (k/bins, (k+1)/bins]

    >>> round(expected_calibration_error([[0.9, 0.1], [0.8, 0.2]], [0, 1], bins=2), 4)
    0.35
    """
    p, target = _single(p, target, ignore_index, "p")
    check_probabilities(p, rows=True)
    right = p.argmax(1) == target
    return float(calibration_error(reliability(p.max(1)[:, None], right[:, None], bins))[0])


def average_precision(scores: ArrayLike, target: ArrayLike, *, style: str = "exact") -> Any:
    """Average precision of every class, (L,) float64, nan where nothing is positive.

    scores, target: (N, L) numbers, and 0 or 1
    style: with P(k) the precision among all images scored at least as high as the k-th positive,
        `exact`: the mean of P(k) over the positives, the paper's AP and scikit-learn's `average_precision_score`;
        `voc12`: the area under the precision envelope as in PASCAL VOC 2012, the mean over k of the highest precision
        at that recall or a higher one

    >>> average_precision([[0.9], [0.8], [0.7], [0.6]], [[1], [0], [1], [1]])
    array([0.80555556])
    >>> average_precision([[0.9], [0.8], [0.7], [0.6]], [[1], [0], [1], [1]], style="voc12")
    array([0.83333333])
    """
    if style not in STYLES:
        raise ValueError(f"style must be one of {', '.join(STYLES)}, got {style!r}")
    s, t = _multi(scores, target, "scores")
    return _like(_average_precisions(s, t)[STYLES.index(style)], scores)


def mean_average_precision(scores: ArrayLike, target: ArrayLike, *, style: str = "exact") -> float:
    """mAP: the mean of `average_precision` over the classes that have positives; nan if none has.

    Arguments as in `average_precision`.

    >>> mean_average_precision([[0.9, 0.1], [0.8, 0.2]], [[1, 0], [0, 0]])
    1.0
    """
    return mean(np.asarray(average_precision(_numpy(scores, "scores"), target, style=style)))


@dataclass(frozen=True, eq=False)
class MultilabelReport:
    """The multi-label numbers of the paper's tables, as fractions, and the per-class numbers behind them.

    With c, p and g the true positives, predicted positives and positives of a class. A class that is never predicted
    has precision 0. A class without positives has no recall, F1 and AP: these are nan, and all averages over classes
    skip it (C_P too, so that all averages cover the same classes); its false positives count in O_P.
    """

    mAP: float  # mean of `ap`
    mAP_voc12: float  # mean of `ap_voc12`
    C_P: float  # mean over classes of c/p
    C_R: float  # mean over classes of c/g
    C_F1_harmonic: float  # harmonic mean of C_P and C_R, as the paper's text defines C-F1
    C_F1_mean: float  # mean over classes of their F1, which is what the paper's tables contain
    O_P: float  # sum c / sum p
    O_R: float  # sum c / sum g
    O_F1: float  # harmonic mean of O_P and O_R
    classes_without_positives: int  # how many
    classes_without_predictions: int  # how many
    threshold: float  # a label with at least this score is predicted
    n: int  # images
    ap: np.ndarray  # (L,) float64, `average_precision` of each class
    ap_voc12: np.ndarray  # (L,) the same in the style voc12
    precision: np.ndarray  # (L,) c/p
    recall: np.ndarray  # (L,) c/g
    f1: np.ndarray  # (L,) 2c/(p + g)
    positives: np.ndarray  # (L,) int64, g
    predicted: np.ndarray  # (L,) int64, p
    correct: np.ndarray  # (L,) int64, c

    def summary(self) -> dict[str, float]:
        """The numbers without the per-class arrays, by name."""
        everything = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in everything.items() if not isinstance(value, np.ndarray)}


def multilabel_report(scores: ArrayLike, target: ArrayLike, threshold: float = 0.5) -> MultilabelReport:
    """mAP, C-P, C-R, C-F1, O-P, O-R and O-F1; see `MultilabelReport`.

    scores, target: (N, L) numbers such as p+, and 0 or 1
    threshold: a label with at least this score is predicted

    >>> report = multilabel_report([[0.9, 0.2], [0.6, 0.7], [0.1, 0.8]], [[1, 0], [0, 1], [0, 1]])
    >>> report.mAP, report.C_P, report.C_R, round(report.C_F1_harmonic, 4), round(report.C_F1_mean, 4)
    (1.0, 0.75, 1.0, 0.8571, 0.8333)
    """
    threshold = float(threshold)
    if threshold != threshold:
        raise ValueError("threshold must be a number, got nan")
    s, t = _multi(scores, target, "scores")
    guess = s >= threshold
    return _report(threshold, len(s), *_average_precisions(s, t), (guess & t).sum(0), guess.sum(0), t.sum(0))


def join_reports(reports: Sequence[MultilabelReport]) -> MultilabelReport:
    """The report of all labels, from reports of some labels each on the same images."""
    keys = ("ap", "ap_voc12", "correct", "predicted", "positives")
    parts = (np.concatenate([getattr(report, key) for report in reports]) for key in keys)
    return _report(reports[0].threshold, reports[0].n, *parts)


def _report(threshold: float, n: int, *of_classes: np.ndarray) -> MultilabelReport:
    ap, ap_voc12, correct, predicted, positives = of_classes
    precision = _divide(correct, predicted, otherwise=0.0)
    recall = _divide(correct, positives)
    f1 = _divide(2.0 * correct, np.where(positives > 0, predicted + positives, 0))  # = 2PR/(P + R)
    known = positives > 0
    c_p, c_r = mean(precision[known]), mean(recall)
    o_p = float(_divide(correct.sum(), predicted.sum(), otherwise=0.0))
    o_r = float(_divide(correct.sum(), positives.sum()))
    return MultilabelReport(
        mAP=mean(ap),
        mAP_voc12=mean(ap_voc12),
        C_P=c_p,
        C_R=c_r,
        C_F1_harmonic=_harmonic(c_p, c_r),
        C_F1_mean=mean(f1),
        O_P=o_p,
        O_R=o_r,
        O_F1=_harmonic(o_p, o_r),
        classes_without_positives=int((~known).sum()),
        classes_without_predictions=int((predicted == 0).sum()),
        threshold=threshold,
        n=n,
        ap=ap,
        ap_voc12=ap_voc12,
        precision=precision,
        recall=recall,
        f1=f1,
        positives=positives.astype(np.int64),
        predicted=predicted.astype(np.int64),
        correct=correct.astype(np.int64),
    )


def multilabel_negative_log_likelihood(p: ArrayLike, target: ArrayLike) -> Any:
    """Mean of -log p (label present) or -log(1 - p) (absent) of each label, (L,) float64.

    p, target: (N, L) probabilities, clamped as in `negative_log_likelihood`, and 0 or 1

    >>> multilabel_negative_log_likelihood([[0.5, 0.25], [0.5, 0.25]], [[1, 0], [0, 0]]).round(4)
    array([0.6931, 0.2877])
    """
    q, t = _multi(p, target, "p")
    check_probabilities(q, rows=False)
    q = q.astype(np.float64)
    return _like(_column_means(-np.log(np.where(t, q, 1 - q).clip(P_MIN, 1))), p)


def multilabel_expected_calibration_error(p: ArrayLike, target: ArrayLike, bins: int = 15) -> Any:
    """Expected calibration error of each label as a binary problem, (L,) float64: in bins of p+,

        ECE = sum over bins of (images in the bin / N) * |fraction that has the label - mean p+ in the bin|.

    p, target: (N, L) probabilities, and 0 or 1
    bins: as in `expected_calibration_error`

    >>> multilabel_expected_calibration_error([[0.9], [0.8], [0.1]], [[1], [0], [0]], bins=2).round(4)
    array([0.2667])
    """
    q, t = _multi(p, target, "p")
    check_probabilities(q, rows=False)
    return _like(calibration_error(reliability(q, t, bins)), p)


def _average_precisions(scores: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both styles for every column of (N, L)."""
    classes = scores.shape[1]
    blocks = [slice(start, start + _COLUMNS) for start in range(0, classes, _COLUMNS)]
    workers = min(torch.get_num_threads(), len(blocks)) if scores.size >= _SMALL else 1
    if workers > 1:  # sorting, most of the work, releases the GIL
        with ThreadPoolExecutor(workers) as pool:
            parts = list(pool.map(lambda block: _block(scores[:, block], target[:, block]), blocks))
    else:
        parts = [_block(scores[:, block], target[:, block]) for block in blocks]
    exact, voc12 = np.concatenate(parts, axis=1) if parts else np.empty((2, 0))
    return exact, voc12


def _block(scores: np.ndarray, target: np.ndarray) -> np.ndarray:
    # Recall changes only at the scores of positives, so all that matters is how many positives and how many negatives
    # score at least as high as each. Sorting both by value gives these counts without an argsort, and treats equal
    # scores as one step.
    out = np.full((2, scores.shape[1]), np.nan)
    for i, (s, t) in enumerate(zip(np.ascontiguousarray(scores.T), np.ascontiguousarray(target.T), strict=True)):
        positive = np.sort(s[t])
        if not len(positive):
            continue
        negative = np.sort(s[~t])
        true = len(positive) - np.searchsorted(positive, positive)
        false = len(negative) - np.searchsorted(negative, positive)
        precision = true / (true + false)  # ascending score, that is, descending recall
        out[0, i] = precision.sum() / len(positive)
        out[1, i] = np.maximum.accumulate(precision).sum() / len(positive)
    return out


def reliability(confidence: np.ndarray, right: np.ndarray, bins: int = 15) -> np.ndarray:
    """(N, L) confidences and outcomes to (L, bins, 3): images, sum of confidence and number right of every bin."""
    if not isinstance(bins, (int, np.integer)) or isinstance(bins, bool) or bins < 1:
        raise ValueError(f"bins must be a positive integer, got {bins!r}")
    # side="left" puts a confidence equal to an edge into the bin below the edge; 0 itself joins the first bin
    edges, columns = np.linspace(0, 1, bins + 1)[1:-1], confidence.shape[1]
    confidence = confidence.astype(np.float64)
    place = (np.searchsorted(edges, confidence, side="left") + bins * np.arange(columns)).ravel()
    values = (np.ones(confidence.size), confidence.ravel(), right.ravel())
    return np.stack([np.bincount(place, v, bins * columns) for v in values], -1).reshape(columns, bins, 3)


def calibration_error(table: np.ndarray) -> np.ndarray:
    """The expected calibration error of each label, (L,), from the table of `reliability`; nan without images."""
    return _divide(np.abs(table[..., 2] - table[..., 1]).sum(1), table[..., 0].sum(1))


def _numpy(value: ArrayLike, name: str) -> np.ndarray:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "bifu":
        raise TypeError(f"{name} must be a tensor or an array of numbers, got {array.dtype}")
    return array.astype(np.float32) if array.dtype == np.float16 else array


def _like(result: np.ndarray, example: ArrayLike) -> Any:
    """A tensor on the device of `example` if that is a tensor, else the array."""
    return torch.from_numpy(result).to(example.device) if isinstance(example, Tensor) else result


def _scores(value: ArrayLike, name: str) -> np.ndarray:
    array = _numpy(value, name)
    array = array if array.dtype.kind == "f" else array.astype(np.float64)
    if np.isnan(array).any():
        row = np.argwhere(np.isnan(array))[0].tolist()
        raise ValueError(f"{name} must not hold nan, got one at {tuple(row)}")
    return array


def _single(scores: ArrayLike, target: ArrayLike, ignore_index: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(N, C) scores and (N,) targets, without ignored entries, checked."""
    t = _numpy(target, "target")
    s = _numpy(scores, name)
    if s.ndim < 2 or s.shape[1] == 0:
        raise ValueError(f"{name} must have the shape (N, C) or (N, C, d1, ...), got {s.shape}")
    if t.shape != s.shape[:1] + s.shape[2:]:
        expected = s.shape[:1] + s.shape[2:]
        raise ValueError(f"target must have the shape {expected} beside {name} {s.shape}, got {t.shape}")
    if t.dtype.kind not in "iu" and t.size:
        raise TypeError(f"target must hold integer class indices, got {t.dtype}")
    s, t = np.moveaxis(s, 1, -1).reshape(-1, s.shape[1]), t.reshape(-1).astype(np.int64)
    used = t != ignore_index
    if not used.all():
        s, t = s[used], t[used]
    if len(t) and (t.min() < 0 or t.max() >= s.shape[1]):
        wrong = t[(t < 0) | (t >= s.shape[1])][0]
        raise ValueError(f"target must be in 0 to {s.shape[1] - 1} (or ignore_index {ignore_index}), got {wrong}")
    return _scores(s, name), t


def _multi(scores: ArrayLike, target: ArrayLike, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(N, L) scores and (N, L) bool targets, checked."""
    s, t = _scores(scores, name), _numpy(target, "target")
    if s.ndim != 2:
        raise ValueError(f"{name} must have the shape (N, L), got {s.shape}")
    if t.shape != s.shape:
        raise ValueError(f"target must have the shape of {name}, {s.shape}, got {t.shape}")
    if t.dtype != bool:
        positive = t == 1
        if not (positive | (t == 0)).all():
            raise ValueError(f"target must be 0 or 1, got {t[~(positive | (t == 0))][0]}")
        t = positive
    return s, t


def check_probabilities(p: np.ndarray, *, rows: bool) -> None:
    """Raises unless p is in [0, 1] and, with `rows`, sums to 1 over the classes."""
    if not p.size:
        return
    low, high = p.min(), p.max()
    # float32 and bfloat16 softmaxes may round slightly above 1; logits are far outside
    if low < 0 or high > 1 + 1e-6:
        raise ValueError(f"p must hold probabilities in [0, 1], got {low if low < 0 else high}")
    if rows:
        sums = p.sum(1, dtype=np.float64)
        worst = sums[np.abs(sums - 1).argmax()]
        if abs(worst - 1) > 0.02:  # loose enough for a bfloat16 softmax
            raise ValueError(f"p must sum to 1 over the classes, got {worst}")


def _divide(a: Any, b: Any, otherwise: float = np.nan) -> np.ndarray:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.divide(a, b, out=np.full(np.broadcast_shapes(a.shape, b.shape), otherwise), where=b > 0)


def mean(values: np.ndarray) -> float:
    """Mean of what is not nan; nan (without a warning) of nothing."""
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else float("nan")


def _column_means(values: np.ndarray) -> np.ndarray:
    return values.mean(0) if len(values) else np.full(values.shape[1], np.nan)


def _harmonic(a: float, b: float) -> float:
    return 2 * a * b / (a + b) if a + b > 0 else (0.0 if a + b == 0 else float("nan"))
