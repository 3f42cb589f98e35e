"""Anybody's outputs: what a model did to the classes, from a file of its outputs x and the true labels y.

`gsoftmax.outputs` says what such a file holds.  It is read in blocks of rows, so it may be larger than memory.  What
cannot be used is left out, and a note says so; what makes no sense is one clear line.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import geometry, significance
from .metrics import P_MIN, multilabel_report
from .outputs import IGNORE, Block, Outputs, open_outputs

__all__ = [
    "Analysis",
    "ClassGaussians",
    "Comparison",
    "McNemar",
    "analyze",
    "class_gaussians",
    "compare_outputs",
    "mcnemar",
]

BINS = 15  # of the reliability diagram, as in metrics.expected_calibration_error
_BLOCK = 2**22  # numbers of x read at a time: 32 MB in float64
_AP_MEMORY = 2**28  # bytes of scores held for average precision; more labels than fit take more passes
_LOG_P_MIN = math.log(P_MIN)
_NEAREST = 3  # impostors told by name
_MOST_NEAREST = 1000  # classes for which they are looked for: the search is quadratic


# ---------------------------------------------------------------------------------------------------------------------
# What comes out
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ClassGaussians:
    """The Gaussians to draw, (C, 2) each: mean and standard deviation."""

    own: np.ndarray  # the class's own output over its images (multi-label: x+ with the label)
    other: np.ndarray  # all its impostors together (multi-label: x+ without the label)
    overall: np.ndarray | None  # each output over all images; none for pooled statistics
    nearest: list[list[tuple[int, float, float]]]  # for each class its nearest impostors: output, mean, deviation


@dataclass(frozen=True, eq=False)
class Analysis:
    """One model on one test set.  Per-class arrays are (C,) float64, nan where a class has no such number."""

    name: str
    n: int  # images used
    classes: tuple[str, ...]
    multilabel: bool
    metrics: dict[str, float]  # fractions: error, error_x, nll, ece, or the multi-label numbers
    geometry: geometry.ClassGeometry
    score: np.ndarray  # accuracy of each class, or its average precision
    gaussians: ClassGaussians
    calibration: np.ndarray  # (BINS, 3) images, mean confidence, accuracy
    points: dict[str, np.ndarray]  # a sample: c class, own 0/1, j output, x, p
    learned: np.ndarray | None  # (C, 2) mu and sigma of the head
    notes: tuple[str, ...]

    @property
    def measures(self) -> dict[str, np.ndarray]:
        """The geometry as arrays, and the score."""
        found = {name: getattr(self.geometry, name).numpy() for name in geometry.MEASURES}
        return {**found, "AP" if self.multilabel else "accuracy": self.score}


@dataclass(frozen=True)
class McNemar:
    """Images that only one of two models got right; p is the exact two-sided binomial one."""

    only_first_right: int
    only_second_right: int
    p: float


@dataclass(frozen=True)
class Comparison:
    """A second model against a first on the same images: differences are second minus first."""

    classes: dict[str, significance.Paired]  # paired over classes: the measures and the score
    images: dict[str, significance.Paired]  # paired over images: error (multi-label: share of labels wrong) and nll
    mcnemar: McNemar | None  # single label only


# ---------------------------------------------------------------------------------------------------------------------
# Analysis
# ---------------------------------------------------------------------------------------------------------------------


def analyze(
    path: str | os.PathLike[str], *, names: Sequence[str] | None = None, points: int = 500, name: str | None = None
) -> Analysis:
    """Reads a file of outputs once (several labels: now and then more than once) and measures its classes.

    points: how many (x, p) pairs of a class are kept for drawing, own and impostor together.

    >>> import tempfile
    >>> x, y = np.array([[2.0, 0.0], [3.0, 1.0], [0.0, 3.0], [1.0, 5.0]]), np.array([0, 0, 1, 1])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(folder + "/outputs.npz", x=x, y=y, names=["cat", "dog"])
    ...     found = analyze(folder + "/outputs.npz")
    >>> found.classes, found.metrics["error"], found.geometry.compactness.tolist()
    (('cat', 'dog'), 0.0, [2.0, 1.0])
    """
    return _analyze([open_outputs(path, names=names, name=name)], points)[0][0]


def compare_outputs(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    points: int = 500,
) -> tuple[Analysis, Analysis, Comparison]:
    """Two models on the same test set, paired over classes and over images; the files hold the same images in order."""
    labels = _two_names(Path(first), Path(second))
    opened = [open_outputs(path, names=names, name=label) for path, label in zip((first, second), labels, strict=True)]
    a, b = opened
    for what, left, right in (
        ("rows", a.n, b.n),
        ("classes", a.num_classes, b.num_classes),
        ("kind of labels", _kind(a.multilabel), _kind(b.multilabel)),
    ):
        if left != right:
            raise ValueError(
                f"both files must hold the same test set: {a.name} has {what} {left}, {b.name} has {right}"
            )
    if not (a.names_given or names) and b.names_given:
        a.classes = b.classes
    (one, two), pairs = _analyze(opened, points)
    measures = {k: significance.paired(v, two.measures[k]) for k, v in one.measures.items()}
    images = {key: pairs[key].paired() for key in ("error", "nll")}
    exact = None if one.multilabel else mcnemar(pairs["first"], pairs["second"])
    return one, two, Comparison(measures, images, exact)


def _analyze(files: Sequence[Outputs], points: int) -> tuple[list[Analysis], dict[str, Any]]:
    """One pass over one or two files side by side; rows that one of them cannot use are left out of both."""
    head = files[0]
    rows = max(1, _BLOCK // max(1, head.num_classes))
    tallies = [_Tally(f, points) for f in files]
    pairs: dict[str, Any] = {"error": _Moments(), "nll": _Moments(), "first": 0, "second": 0}
    start = bad = ignored = 0
    masks = []  # rows used
    for blocks in zip(*(f.blocks(rows) for f in files), strict=True):
        y = blocks[0].y
        if len(blocks) == 2 and not np.array_equal(y, blocks[1].y):
            row = start + int(np.flatnonzero((y != blocks[1].y).reshape(len(y), -1).any(1))[0])
            raise ValueError(f"both files must hold the same images in the same order: y differs first in row {row}")
        used = np.ones(len(y), bool) if head.multilabel else y != IGNORE
        ignored += int((~used).sum())
        finite = np.logical_and.reduce([b.finite() for b in blocks])
        bad += int((used & ~finite).sum())
        used &= finite
        masks.append(used)
        number = np.arange(start, start + len(y))[used]
        seen = [tally.update(b.take(used), number) for tally, b in zip(tallies, blocks, strict=True)]
        if len(seen) == 2:
            (wrong_a, nll_a), (wrong_b, nll_b) = seen
            pairs["error"].update(wrong_b.astype(float) - wrong_a)
            pairs["nll"].update(nll_b - nll_a)
            if not head.multilabel:
                pairs["first"] += int((~wrong_a & wrong_b).sum())
                pairs["second"] += int((wrong_a & ~wrong_b).sum())
        start += len(y)
    if start == bad + ignored:
        reason = "all have nan or inf among their outputs" if bad else f"all are marked {IGNORE}"
        raise ValueError(f"{head.name} has no rows that can be used: {reason}")
    notes = []
    if ignored:
        notes.append(f"{_count(ignored, 'row')} labelled {IGNORE} left out")
    if bad:
        notes.append(f"{_count(bad, 'row')} with nan or inf left out")
    mask = np.concatenate(masks)
    return [tally.result(notes, mask) for tally in tallies], pairs


class _Tally:
    """What is counted while the rows of one file pass by."""

    def __init__(self, file: Outputs, points: int) -> None:
        self.file, c = file, file.num_classes
        pooled = not file.multilabel and c > geometry.FULL_TABLE_LIMIT
        self.statistics = geometry.ClassStatistics(c, multilabel=file.multilabel, pooled=pooled)
        self.n = self.wrong_x = 0
        self.nll, self.zero = _Moments(), 0
        self.wrong = _Moments()
        self.right_of_class, self.of_class = np.zeros(c), np.zeros(c)
        self.bins = np.zeros((BINS, 3))
        self.points = _Points(c, max(1, min(points // 2, 30_000 // c)), file.multilabel)
        # several labels: the scores of as many columns as memory allows, the rest in later passes
        self.columns = max(1, _AP_MEMORY // (5 * max(file.n, 1)))
        self.scores: list[tuple[np.ndarray, np.ndarray]] = []
        self.label_error = np.zeros((BINS * c, 2)) if file.multilabel else None

    def update(self, block: Block, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Counts a block of usable rows; gives what each image cost: wrong or not (or the share of labels), and NLL."""
        y, x = block.y, block.positive
        self.n += len(y)
        if not len(y):
            return np.zeros(0, bool), np.zeros(0)
        self.statistics.update(x, y)
        p, log_true = block.probabilities(self.file)
        impossible = log_true < _LOG_P_MIN
        self.zero += int(impossible.reshape(len(y), -1).any(1).sum())
        log_true = np.maximum(log_true, _LOG_P_MIN)
        self.points.update(x, p, y, number)
        if self.file.multilabel:
            has = y.astype(bool)
            wrong: np.ndarray = ((p >= 0.5) != has).mean(1)
            nll = -log_true.mean(1)
            assert self.label_error is not None
            self._calibrate(p.ravel(), has.ravel())
            bins = _bins(p) * p.shape[1] + np.arange(p.shape[1])
            self.label_error[:, 0] += np.bincount(bins.ravel(), minlength=len(self.label_error))
            self.label_error[:, 1] += np.bincount(bins.ravel(), (has - p).ravel(), minlength=len(self.label_error))
            self.scores.append((p[:, : self.columns].astype(block.p_dtype), has[:, : self.columns].copy()))
        else:
            right = p.argmax(1) == y
            wrong, nll = ~right, -log_true
            self._calibrate(p.max(1), right)
            self.wrong_x += int((x.argmax(1) != y).sum())
            self.of_class += np.bincount(y, minlength=len(self.of_class))
            self.right_of_class += np.bincount(y[right], minlength=len(self.of_class))
        self.nll.update(nll)
        self.wrong.update(wrong.astype(float))
        return wrong, nll

    def _calibrate(self, confidence: np.ndarray, right: np.ndarray) -> None:
        k = _bins(confidence)
        for column, weights in enumerate((None, confidence, right.astype(float))):
            self.bins[:, column] += np.bincount(k, weights, minlength=BINS)

    def result(self, notes: Sequence[str], used: np.ndarray) -> Analysis:
        self.used = used
        file, found = self.file, self.statistics.geometry()
        count = np.maximum(self.bins[:, :1], 1)
        calibration = np.hstack([self.bins[:, :1], np.where(self.bins[:, :1] > 0, self.bins[:, 1:] / count, np.nan)])
        if file.multilabel:
            metrics, score = self._several()
            metrics |= {"nll": self.nll.mean, "hamming": self.wrong.mean}
        else:
            with np.errstate(invalid="ignore"):
                score = self.right_of_class / self.of_class
            excess = np.abs(self.bins[:, 2] - self.bins[:, 1]).sum() / self.n
            metrics = {
                "error": self.wrong.mean,
                "error_x": self.wrong_x / self.n,
                "nll": self.nll.mean,
                "ece": float(excess),
            }
        told = [*file.notes, *notes]
        if self.zero:
            told.append(
                f"{_count(self.zero, 'image')} whose true label was given a probability below {P_MIN:.1e}, "
                "which the NLL counts as that"
            )
        if found.pooled:
            told.append(
                f"{file.num_classes} classes: the impostors of a class are pooled into one Gaussian (the full table is "
                f"kept up to {geometry.FULL_TABLE_LIMIT})"
            )
        told += _left_out(found.left_out, file.classes)
        learned = None
        if file.mu is not None and file.sigma is not None:
            learned = np.stack([file.mu, file.sigma], 1)
        return Analysis(
            name=file.name,
            n=self.n,
            classes=tuple(file.classes),
            multilabel=file.multilabel,
            metrics=metrics,
            geometry=found,
            score=score,
            gaussians=class_gaussians(self.statistics),
            calibration=calibration,
            points=self.points.result(),
            learned=learned,
            notes=tuple(told),
        )

    def _next_columns(self, columns: slice) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        start = 0
        for block in self.file.blocks(max(1, _BLOCK // self.file.num_classes)):
            used = self.used[start : start + len(block.y)]
            start += len(block.y)
            part = block.take(used).columns(columns)
            yield part.probabilities(self.file)[0].astype(block.p_dtype), part.y.astype(bool)

    def _several(self) -> tuple[dict[str, float], np.ndarray]:
        """The multi-label numbers, from blocks of columns that fit into memory."""
        labels = self.file.num_classes
        reports = []
        for first in range(0, labels, self.columns):
            if first:  # another pass, for the next columns
                self.scores = list(self._next_columns(slice(first, first + self.columns)))
            p, has = (np.concatenate(parts) for parts in zip(*self.scores, strict=True))
            self.scores = []
            reports.append(multilabel_report(p, has))

        def every(key: str) -> np.ndarray:
            return np.concatenate([getattr(r, key) for r in reports])

        precision, positives, predicted = every("precision"), every("positives"), every("predicted")
        known = positives > 0
        correct = np.rint(precision * predicted).sum()
        o_p = float(correct / predicted.sum()) if predicted.sum() else 0.0
        o_r = float(correct / positives.sum()) if known.any() else math.nan
        assert self.label_error is not None
        ece = np.abs(self.label_error[:, 1]).reshape(BINS, labels).sum(0) / self.n
        return {
            "mAP": _mean(every("ap")),
            "mAP_voc12": _mean(every("ap_voc12")),
            "C_P": _mean(precision[known]),
            "C_R": _mean(every("recall")),
            "C_F1_mean": _mean(every("f1")),
            "O_P": o_p,
            "O_R": o_r,
            "O_F1": 2 * o_p * o_r / (o_p + o_r) if o_p + o_r > 0 else o_p + o_r,
            "ece": _mean(ece),
        }, every("ap")


class _Moments:
    """Count, mean and sum of squared distances from it, block by block (Chan's formula)."""

    def __init__(self) -> None:
        self.n, self.mean, self.m2 = 0, 0.0, 0.0

    def update(self, values: np.ndarray) -> None:
        n = len(values)
        if not n:
            return
        mean = float(values.mean())
        delta, total = mean - self.mean, self.n + n
        self.m2 += float(np.square(values - mean).sum()) + delta * delta * self.n * n / total
        self.mean += delta * n / total
        self.n = total

    def paired(self) -> significance.Paired:
        """The paired t-test of differences that were streamed."""
        sd = math.sqrt(self.m2 / (self.n - 1)) if self.n > 1 else math.nan
        return significance.paired_from_moments(self.n, self.mean, sd)


def mcnemar(only_first_right: int, only_second_right: int) -> McNemar:
    """McNemar's exact test: were the models equally good, each image that only one gets right would be a fair coin.

    p = min(1, 2 P(K <= k)), K binomial(n, 1/2), k the smaller count of n together.

    >>> mcnemar(10, 2).p
    0.03857421875
    """
    n, k = only_first_right + only_second_right, min(only_first_right, only_second_right)
    if 2 * k >= n - 1:  # includes n = 0
        return McNemar(only_first_right, only_second_right, 1.0)
    # P(K <= k) = C(n, k)/2^n (1 + k/(n-k+1) (1 + (k-1)/(n-k+2) (...))): positive terms, each smaller than the last
    i = np.arange(k, 0, -1, dtype=np.float64)
    series = 1.0 + float(np.cumprod(i / (n - i + 1)).sum())
    return McNemar(only_first_right, only_second_right, min(1.0, 2 * _half_binomial(n, k) * series))


def _half_binomial(n: int, k: int) -> float:
    """C(n, k)/2^n to full precision, which the difference of large log-gammas would not have."""
    if n <= 5000:
        return math.comb(n, k) / 2**n if n < 1000 else math.exp(math.log(math.comb(n, k)) - n * math.log(2))
    if k == 0:
        return math.exp(-n * math.log(2))

    # Stirling: n! = sqrt(2 pi n) (n/e)^n e^d(n).  The powers together are (n/2k)^k (n/2(n-k))^(n-k).
    def d(m: int) -> float:
        return 1 / (12 * m) - 1 / (360 * m**3) + 1 / (1260 * m**5) if m > 50 else _stirling_rest(m)

    powers = -k * math.log1p((2 * k - n) / n) - (n - k) * math.log1p((n - 2 * k) / n)
    return math.exp(powers + d(n) - d(k) - d(n - k)) * math.sqrt(n / (2 * math.pi * k * (n - k)))


def _stirling_rest(m: int) -> float:
    return math.lgamma(m + 1) - (m + 0.5) * math.log(m) + m - 0.5 * math.log(2 * math.pi)


class _Points:
    """A sample of (x, p) for every class: the rows whose scrambled number is smallest, so that it is the same however
    the file was cut into blocks, and the same for two models."""

    def __init__(self, classes: int, each: int, multilabel: bool) -> None:
        self.classes, self.each, self.multilabel = classes, each, multilabel
        self.kept = {k: np.zeros(0, t) for k, t in _POINT.items()}
        # the scrambled number beyond which a class (or a side of a label) takes no more rows
        self.limit = np.full((classes, 2), np.iinfo(np.uint64).max, np.uint64)

    def update(self, x: np.ndarray, p: np.ndarray, y: np.ndarray, number: np.ndarray) -> None:
        key = _scramble(number)
        if self.multilabel:
            has = y.astype(bool)
            row, c = np.nonzero(key[:, None] < np.where(has, self.limit[:, 1], self.limit[:, 0]))
            own, j = has[row, c].astype(np.int8), c
            new = [{"key": key[row], "c": c, "own": own, "j": j, "x": x[row, c], "p": p[row, c]}]
        else:
            row = np.flatnonzero(key < self.limit[y, 1])
            c, key = y[row], key[row]
            new = [{"key": key, "c": c, "own": np.ones(len(c), np.int8), "j": c, "x": x[row, c], "p": p[row, c]}]
            if self.classes > 1:  # beside its own output, one impostor of the image
                step = 1 + (_scramble(number[row] + 1_000_003) % np.uint64(self.classes - 1)).astype(np.int64)
                j = (c + step) % self.classes
                new.append(
                    {"key": key, "c": c, "own": np.zeros(len(c), np.int8), "j": j, "x": x[row, j], "p": p[row, j]}
                )
        merged = {k: np.concatenate([self.kept[k], *(part[k].astype(_POINT[k]) for part in new)]) for k in _POINT}
        # the first `each` of every (class, side), by scrambled number
        order = np.lexsort((merged["key"], merged["own"], merged["c"]))
        group = merged["c"][order] * 2 + merged["own"][order]
        first = np.r_[True, group[1:] != group[:-1]] if len(group) else np.zeros(0, bool)
        begin = np.maximum.accumulate(np.where(first, np.arange(len(group)), 0))
        rank = np.arange(len(group)) - begin
        keep = order[rank < self.each]
        self.kept = {k: v[keep] for k, v in merged.items()}
        full = rank == self.each - 1
        self.limit[merged["c"][order[full]], merged["own"][order[full]]] = merged["key"][order[full]]

    def result(self) -> dict[str, np.ndarray]:
        return {k: v for k, v in self.kept.items() if k != "key"}


_POINT = {"key": np.uint64, "c": np.int64, "own": np.int8, "j": np.int64, "x": np.float64, "p": np.float64}


def _scramble(number: np.ndarray) -> np.ndarray:
    """Row numbers in an order that looks random and never changes (the finaliser of splitmix64)."""
    with np.errstate(over="ignore"):
        z = (number.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def class_gaussians(stats: geometry.ClassStatistics) -> ClassGaussians:
    """Own, pooled impostors' and overall (mean, deviation) of every class, and its nearest impostors."""
    mean, std = stats.mean.numpy(), stats.std.numpy()
    m = stats.num_classes
    if stats.multilabel or stats.pooled:
        own, other = np.stack([mean[:, 0], std[:, 0]], 1), np.stack([mean[:, 1], std[:, 1]], 1)
        overall = _mixture(mean, std, stats.count.numpy()) if stats.multilabel else None
        return ClassGaussians(own, other, overall, [[] for _ in range(m)])
    own = np.stack([mean.diagonal(), std.diagonal()], 1)
    off = 1 - np.eye(m)
    other = _mixture(mean, std, off) if m > 1 else np.full((1, 2), np.nan)
    count = stats.count.numpy().astype(np.float64)
    overall = _mixture(mean.T, std.T, np.broadcast_to(count, (m, m)))
    nearest: list[list[tuple[int, float, float]]] = [[] for _ in range(m)]
    if m <= _MOST_NEAREST:
        for c in np.flatnonzero((count >= 2) & (own[:, 1] > 0)):
            mu, sigma = own[c]
            with np.errstate(divide="ignore", invalid="ignore"):
                d2, v, w = (mean[c] - mu) ** 2, sigma**2, std[c] ** 2
                far = np.where(w > 0, (d2 + v) / w + (d2 + w) / v, np.inf)
            far[c] = np.inf
            nearest[c] = [
                (int(j), float(mean[c, j]), float(std[c, j]))
                for j in np.argsort(far, kind="stable")[: min(_NEAREST, m - 1)]
                if np.isfinite(far[j])
            ]
    return ClassGaussians(own, other, overall, nearest)


def _mixture(mean: np.ndarray, std: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """(rows, 2): mean and deviation of each row's Gaussians taken together, those of weight 0 left out."""
    total = weight.sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        centre = np.where(weight > 0, weight * mean, 0.0).sum(1) / total
        spread = np.where(weight > 0, weight * (std**2 + (mean - centre[:, None]) ** 2), 0.0).sum(1) / total
    return np.stack([centre, np.sqrt(spread)], 1)


def _left_out(reasons: Mapping[int, str], classes: Sequence[str]) -> list[str]:
    """One note for each reason, naming a few of its classes."""
    by_reason: dict[str, list[int]] = {}
    for c, reason in reasons.items():
        by_reason.setdefault(reason, []).append(c)
    notes = []
    for reason, found in by_reason.items():
        some = ", ".join(classes[c] for c in found[:5]) + (f" and {len(found) - 5:,} more" if len(found) > 5 else "")
        notes.append(f"left out of the averages: {'class' if len(found) == 1 else 'classes'} {some}: {reason}")
    return notes


def _two_names(first: Path, second: Path) -> tuple[str, str]:
    """Different names for two files, with as much of their paths as that takes."""
    a, b = ([*p.resolve().parent.parts, p.name if p.is_dir() else p.stem] for p in (first, second))
    for k in range(1, min(len(a), len(b)) + 1):
        if a[-k:] != b[-k:]:
            return "/".join(a[-k:]), "/".join(b[-k:])
    return "first", "second"


def _bins(confidence: np.ndarray) -> np.ndarray:
    """The bin of each confidence, bin k being (k/BINS, (k+1)/BINS]."""
    return np.maximum(np.ceil(confidence * BINS).astype(np.int64) - 1, 0)


def _mean(values: np.ndarray) -> float:
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else math.nan


def _kind(multilabel: bool) -> str:
    return "several labels" if multilabel else "one label"


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"
