"""Class geometry and metrics of any model, from a file of its outputs x and the true labels y.

`gsoftmax.outputs` describes such files.  They are read in blocks of rows, so they may be larger than memory.  Unusable
rows are skipped with a note; invalid files raise a one-line error.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from . import bootstrap, geometry, measures, metrics, significance
from .collapse import Collapse, FeatureStatistics, NearestMean, View
from .geometry import ClassGeometry, ClassStatistics
from .outputs import IGNORE, Block, Outputs, open_outputs
from .significance import McNemar, mcnemar

__all__ = [
    "Analysis",
    "ClassGaussians",
    "Comparison",
    "Distributions",
    "FeatureView",
    "Features",
    "McNemar",
    "analyze",
    "class_gaussians",
    "compare_models",
    "compare_outputs",
    "mcnemar",
]

MOST_POINTS = 60_000  # of all classes together
_BLOCK = 2**22  # numbers of x read at a time: 32 MB in float64
_AP_MEMORY = 2**28  # bytes of scores held for average precision; more labels than fit take more passes
_LOG_P_MIN = math.log(metrics.P_MIN)
_NEAREST = 3  # impostors listed by name
_MOST_NEAREST = 1000  # classes for which they are looked for: the search is quadratic
_MOST_FEATURES = 8192  # columns of h: their scatter takes 0.5 GB
_MOST_VIEWED = 1024  # columns of x, and classes, of a two-dimensional view
_SHOWN = 1500  # points of a view
_RESAMPLED = 2**28  # bytes of x held for the bootstrap; more rows than fit take more passes
_DRAWS = 2**36  # numbers of x times resamples, above which there are fewer resamples, but at least _FEW_RESAMPLES
_FEW_RESAMPLES = 200

_SINGLE = ("error", "error_x", "nll", "ece")
_MULTI = ("mAP", "mAP_voc12", "C_P", "C_R", "C_F1_mean", "O_P", "O_R", "O_F1", "ece", "nll", "hamming")

Rows = dict[
    str, np.ndarray
]  # one value per row used: wrong, nll, clipped and, of single labels, y, predicted, confidence, wrong_x


@dataclass(frozen=True, eq=False)
class ClassGaussians:
    """The Gaussians to draw, (C, 2) each: mean and standard deviation."""

    own: np.ndarray  # the class's own output over its images (multi-label: x+ with the label)
    other: np.ndarray  # all its impostors together (multi-label: x+ without the label)
    overall: np.ndarray | None  # each output over all images; none for pooled statistics
    nearest: list[list[tuple[int, float, float]]]  # for each class its nearest impostors: output, mean, deviation


@dataclass(frozen=True, eq=False)
class Distributions:
    """Whether x of a class is Gaussian, as the paper assumes: the shape of its own output, and the ranges of x."""

    skewness: np.ndarray  # (C,) of the class's own output over its images (multi-label: x+ with the label)
    kurtosis: np.ndarray  # (C,) excess
    p: np.ndarray  # (C,) of the D'Agostino-Pearson test; nan below 20 images
    own: np.ndarray  # (C, 2) smallest and largest own output
    other: np.ndarray  # (C, 2) of the impostors (multi-label: x+ without the label)


@dataclass(frozen=True, eq=False)
class Features:
    """Measures of the features h of single-label data (see `gsoftmax.collapse`)."""

    collapse: Collapse  # NC1 to NC3, Fisher ratio, effective rank
    nc4: float  # share of images that the nearest class mean and the model put into different classes
    accuracy: float  # of the nearest class mean, the means being those of the same images

    @property
    def metrics(self) -> dict[str, float]:
        """By the keys of `gsoftmax.measures`; nan left out."""
        found = {**asdict(self.collapse), "nc4": self.nc4, "ncm_error": 1 - self.accuracy}
        return {k: found[k] for k in measures.FEATURES if not math.isnan(found[k])}


@dataclass(frozen=True, eq=False)
class FeatureView:
    """A sample of images on two axes of the feature space."""

    name: str  # "PCA" or "LDA"
    of: str  # "h" or "x"
    share: tuple[float, float]  # of the variance (PCA), or of the separation of the classes (LDA)
    points: np.ndarray  # (n, 2)
    y: np.ndarray  # (n,) class of each point
    means: np.ndarray  # (C, 2) class means; nan without examples


@dataclass(frozen=True, eq=False)
class Analysis:
    """One model on one test set.  Per-class arrays are (C,) float64, nan where a class has no such number."""

    name: str  # of the model
    n: int  # images used
    classes: tuple[str, ...]  # names
    multilabel: bool  # several labels per image
    metrics: dict[str, float]  # fractions: error, error_x, nll, ece, or the multi-label numbers
    geometry: ClassGeometry  # the measures of every class
    score: np.ndarray  # accuracy of each class, or its average precision
    gaussians: ClassGaussians  # of x
    distributions: Distributions  # of x
    calibration: np.ndarray  # (bins, 3) images, mean confidence, accuracy
    points: dict[str, np.ndarray]  # a sample: c class, own 0/1, j output, x, p
    learned: np.ndarray | None  # (C, 2) mu and sigma of the head (multi-label: of x+)
    learned_absent: np.ndarray | None  # (C, 2) mu and sigma of x-, where a label has two Gaussians
    notes: tuple[str, ...]  # what was left out, and other things to know
    train: ClassStatistics | None = None  # of the training set, where a run saved them
    features: Features | None = None  # where the file has h
    views: tuple[FeatureView, ...] = ()  # of h, or else of x
    intervals: dict[str, np.ndarray] | None = None  # (C, 2) of accuracy, compactness, separability and ratio
    chance: float | None = None  # accuracy expected of predictions unrelated to y, where the model is not better

    @property
    def measures(self) -> dict[str, np.ndarray]:
        """The geometry as arrays, and the score."""
        found = {name: getattr(self.geometry, name).numpy() for name in geometry.MEASURES}
        return {**found, "AP" if self.multilabel else "accuracy": self.score}

    @property
    def learned_measures(self) -> dict[str, np.ndarray]:
        """Compactness, separability and ratio of the head's Gaussians; of a label these are those of x+ and x-."""
        if self.learned is None:
            return {}
        mu, sigma = self.learned.T
        found = {"compactness": geometry.compactness(sigma)}
        if self.multilabel and self.learned_absent is None:  # one Gaussian per label: nothing to be separated from
            return found
        if self.learned_absent is not None:
            found["separability"] = geometry.pair_separability(mu, sigma, *self.learned_absent.T)
        else:
            found["separability"] = geometry.separability(mu, sigma)
        return {**found, "ratio": found["separability"] / sigma}


@dataclass(frozen=True)
class Comparison:
    """A second model against a first on the same images: differences are second minus first."""

    classes: dict[str, significance.Paired]  # paired over classes: the measures and the score
    images: dict[str, significance.Paired]  # over images: error (multi-label: wrong labels), error_x (not there), nll
    exact: dict[str, McNemar]  # of error and error_x; single label only

    @property
    def mcnemar(self) -> McNemar | None:
        """Of the error."""
        return self.exact.get("error")


def analyze(
    path: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    points: int = 500,
    most_points: int = MOST_POINTS,
    name: str | None = None,
    resamples: int = 0,
) -> Analysis:
    """Reads a file of outputs once (multi-label files may need several passes) and measures its classes.

    path, names, name: as in `open_outputs`
    points: how many (x, p) pairs of a class are kept for drawing, own and impostor together
    most_points: of all classes together
    resamples: of the bootstrap, for the intervals of every class; 0 for none

    >>> import tempfile
    >>> x, y = np.array([[2.0, 0.0], [3.0, 1.0], [0.0, 3.0], [1.0, 5.0]]), np.array([0, 0, 1, 1])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(folder + "/outputs.npz", x=x, y=y, names=["cat", "dog"])
    ...     found = analyze(folder + "/outputs.npz")
    >>> found.classes, found.metrics["error"], found.geometry.compactness.tolist()
    (('cat', 'dog'), 0.0, [2.0, 1.0])
    """
    file = open_outputs(path, names=names, name=name)
    return _analyze([file], min(points, most_points // file.num_classes), resamples)[0][0]


def compare_outputs(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    points: int = 500,
) -> tuple[Analysis, Analysis, Comparison]:
    """Two models on the same test set, paired over classes and over images.

    first, second: files of outputs of the same images, in the same order; names, points: as in `analyze`
    """
    (one, two), (found,) = compare_models([first, second], names=names, points=points)
    return one, two, found


def compare_models(
    paths: Sequence[str | os.PathLike[str]],
    *,
    names: Sequence[str] | None = None,
    points: int = 500,
    resamples: int = 0,
) -> tuple[list[Analysis], list[Comparison]]:
    """Models on the same test set: each, and each after the first against the first.

    paths: files of outputs of the same images, in the same order; names, points, resamples: as in `analyze`
    """
    labels = _different_names([Path(path) for path in paths]) if len(paths) > 1 else [None]
    files = [open_outputs(path, names=names, name=label) for path, label in zip(paths, labels, strict=True)]
    a = files[0]
    for b in files[1:]:
        kinds = ["several labels" if file.multilabel else "one label" for file in (a, b)]
        for what, left, right in (
            ("rows", a.n, b.n),
            ("classes", a.num_classes, b.num_classes),
            ("kind of labels", *kinds),
        ):
            if left != right:
                raise ValueError(
                    f"all files must hold the same test set: {a.name} has {what} {left}, {b.name} has {right}"
                )
    if not (a.names_given or names):
        a.classes = next((b.classes for b in files if b.names_given), a.classes)
    found = _analyze(files, min(points, MOST_POINTS // (a.num_classes * max(1, len(files) - 1))), resamples)
    return [analysis for analysis, _ in found], [_compare(found[0], other) for other in found[1:]]


def _compare(first: tuple[Analysis, Rows], second: tuple[Analysis, Rows]) -> Comparison:
    (one, of_one), (two, of_two) = first, second
    classes = {k: significance.paired(v, two.measures[k]) for k, v in one.measures.items()}
    keys = {"error": "wrong"}
    if not one.multilabel and any((of["wrong"] != of["wrong_x"]).any() for of in (of_one, of_two)):
        keys["error_x"] = "wrong_x"  # else it is the same test once more
    images = {k: significance.paired(of_one[row], of_two[row]) for k, row in (keys | {"nll": "nll"}).items()}
    exact = {}
    for key, row in keys.items() if not one.multilabel else ():
        counts = (int((b[row] > a[row]).sum()) for a, b in ((of_one, of_two), (of_two, of_one)))
        exact[key] = mcnemar(*counts)
    return Comparison(classes, images, exact)


def _analyze(files: Sequence[Outputs], points: int, resamples: int) -> list[tuple[Analysis, Rows]]:
    """One pass over files side by side; rows that one of them cannot use are left out of all."""
    head = files[0]
    tallies = [_Tally(f, points) for f in files]
    start = bad = ignored = 0
    masks = []  # rows used
    for blocks in zip(*(f.blocks(max(1, _BLOCK // head.num_classes)) for f in files), strict=True):
        y = blocks[0].y
        for file, block in zip(files, blocks, strict=True):
            if start == 0:
                _reject_probabilities(file, block)
            if not np.array_equal(y, block.y):
                row = start + int(np.flatnonzero((y != block.y).reshape(len(y), -1).any(1))[0])
                told = f"y of {file.name} differs first in row {row}"
                raise ValueError(f"all files must hold the same images in the same order: {told}")
        used = np.ones(len(y), bool) if head.multilabel else y != IGNORE
        finite = np.logical_and.reduce([b.finite() for b in blocks])
        ignored, bad = ignored + int((~used).sum()), bad + int((used & ~finite).sum())
        masks.append(used & finite)
        for tally, block in zip(tallies, blocks, strict=True):
            tally.update(block.take(masks[-1]), np.arange(start, start + len(y))[masks[-1]])
        start += len(y)
    if start == bad + ignored:
        reason = "all have nan or inf among their outputs" if bad else f"all are marked {IGNORE}"
        raise ValueError(f"{head.name} has no rows that can be used: {reason}")
    notes = [f"{_count(ignored, 'row')} labelled {IGNORE} left out"] if ignored else []
    notes += [f"{_count(bad, 'row')} with nan or inf left out"] if bad else []
    return [tally.result(notes, np.concatenate(masks), resamples) for tally in tallies]


def _reject_probabilities(file: Outputs, block: Block) -> None:
    """Raises for x that holds probabilities or their logarithms, whose Gaussians mean nothing."""
    x = block.positive[block.finite()]
    if not len(x) or x.shape[1] < 2 or x.max() > 1:
        return
    within, enough = x.min() >= 0, len(x) >= significance.FEWEST_JUDGED
    kind, centred = "probabilities", "x -= x.mean(1, keepdims=True)"
    if not file.multilabel and within and np.allclose(x.sum(1), 1, atol=1e-3):
        how = f"its rows sum to 1: save the logits, or x=numpy.log(p) after {centred}, and p=p"
    elif not file.multilabel and x.max() <= 0 and enough and np.allclose(np.exp(x).sum(1), 1, atol=1e-3):
        kind, how = "logarithms of probabilities", f"their exponentials sum to 1: save the logits, or x after {centred}"
    elif within and enough:
        how = "all its numbers are in [0, 1]: save x=numpy.log(p / (1 - p))" + ", and p=p" * file.multilabel
    else:
        return
    raise ValueError(f"x of {file.name} holds {kind}, {how}")


class _Tally:
    """Running statistics of one file."""

    def __init__(self, file: Outputs, points: int) -> None:
        self.file, c = file, file.num_classes
        pooled = not file.multilabel and c > geometry.FULL_TABLE_LIMIT
        self.statistics = ClassStatistics(c, multilabel=file.multilabel, pooled=pooled)
        self.distributions = _Distributions(c, file.multilabel)
        self.rows: list[Rows] = []
        self.points = _Points(c, max(1, points // 2), file.multilabel)
        # several labels: the scores of as many columns as memory allows, the rest in later passes
        self.columns = max(1, _AP_MEMORY // (9 * max(file.n, 1)))
        self.scores: list[tuple[np.ndarray, np.ndarray]] = []
        self.features: FeatureStatistics | None = None
        self.sample = _Sample()
        width = 0 if file.multilabel else file.width or (c if c <= _MOST_VIEWED else 0)
        if 1 < width <= _MOST_FEATURES:
            self.features = FeatureStatistics(c, width)

    def update(self, block: Block, number: np.ndarray) -> None:
        """Takes in a block of usable rows; number: of each row in the file."""
        y, x = block.y, block.positive
        if not len(y):
            return
        self.statistics.update(x, y)
        self.distributions.update(x, y)
        if self.features is not None:
            h = x if block.h is None else block.h
            self.features.update(h, y)
            self.sample.update(h, y, number)
        p, log_true = self.file.probabilities(block)
        self.points.update(x, p, y, number)
        clipped: np.ndarray = log_true < _LOG_P_MIN
        nll = -np.maximum(log_true, _LOG_P_MIN)
        if self.file.multilabel:
            has = y.astype(bool)
            self.rows.append({"wrong": ((p >= 0.5) != has).mean(1), "nll": nll.mean(1), "clipped": np.any(clipped, 1)})
            self.scores.append((p[:, : self.columns].copy(), has[:, : self.columns].copy()))
        else:
            predicted = np.asarray(p.argmax(1))
            rows = {"y": y, "predicted": predicted, "wrong": predicted != y, "nll": nll, "clipped": clipped}
            self.rows.append(rows | {"confidence": p.max(1), "wrong_x": x.argmax(1) != y})

    def result(self, notes: Sequence[str], used: np.ndarray, resamples: int) -> tuple[Analysis, Rows]:
        file, found = self.file, self.statistics.geometry()
        rows = {key: np.concatenate([block[key] for block in self.rows]) for key in self.rows[0]}
        chance = None
        if not file.multilabel:
            self._refuse_features(rows)
            chance = significance.chance_accuracy(rows["y"], rows["predicted"])
            if chance is not None and significance.clearly_above(1 - rows["wrong"].mean(), chance, len(rows["y"])):
                chance = None
        numbers, score, table = self._several(used) if file.multilabel else self._single(rows)
        numbers |= {
            "hamming": float(rows["wrong"].mean()),
            "nll": float(rows["nll"].mean()),
            "ece": metrics.mean(metrics.calibration_error(table)),
        }
        images, *sums = table.sum(0).T
        with np.errstate(invalid="ignore"):
            calibration = np.stack([images, *(s / images for s in sums)], 1)
        told = [*file.notes, *notes]
        if zero := int(rows["clipped"].sum()):
            told.append(
                f"{_count(zero, 'image')} whose true label has a probability below {metrics.P_MIN:.1e}, "
                "which the NLL counts as that"
            )
        if found.pooled:
            told.append(
                f"{file.num_classes} classes: the impostors of a class are pooled into one Gaussian (the full table is "
                f"kept up to {geometry.FULL_TABLE_LIMIT})"
            )
        if file.width > _MOST_FEATURES:
            told.append(f"h has {file.width:,} columns: features are measured up to {_MOST_FEATURES:,}")
        train = None
        if file.train is not None:
            form = int(file.train["form"])
            train = ClassStatistics(len(file.train["count"]), multilabel=form == 2, pooled=form == 1)
            train.load_state_dict(file.train)
        analysis = Analysis(
            name=file.name,
            n=len(rows["nll"]),
            classes=tuple(file.classes),
            multilabel=file.multilabel,
            metrics={key: numbers[key] for key in (_MULTI if file.multilabel else _SINGLE)},
            geometry=found,
            score=score,
            gaussians=class_gaussians(self.statistics),
            distributions=self.distributions.result(),
            calibration=calibration,
            points=self.points.result(),
            learned=None if file.mu is None or file.sigma is None else np.stack([file.mu, file.sigma], 1),
            learned_absent=file.absent,
            notes=(*told, *_left_out(found.left_out, file.classes)),
            train=train,
            features=self._features(rows, used),
            views=() if self.features is None else self.sample.views(self.features, "h" if file.width else "x"),
            intervals=self._intervals(rows, used, resamples) if resamples and chance is None else None,
            chance=chance,
        )
        return analysis, rows

    def _refuse_features(self, rows: Rows) -> None:
        """Raises for outputs that are features: many columns for few classes, and worse than guessing among these."""
        file, labels, error = self.file, int(rows["y"].max()) + 1, float(rows["wrong"].mean())
        enough = len(rows["y"]) >= significance.FEWEST_JUDGED and not file.names_given
        if enough and 4 <= 2 * labels <= file.num_classes and error >= 1 - 1 / labels:
            raise ValueError(
                f"x of {file.name} has {file.num_classes} columns, y has {labels} classes, and the error is "
                f"{100 * error:.1f} %: this looks like features; save them as h, and the logits as x (or the "
                "classifier's W and b)"
            )

    def _features(self, rows: Rows, used: np.ndarray) -> Features | None:
        """Measures of h, which take a second pass."""
        if self.features is None or not self.file.width:
            return None
        nearest, start, seen = NearestMean(self.features), 0, 0
        for h in self.file.features(max(1, _BLOCK // self.file.width)):
            kept = h[used[start : start + len(h)]]
            mine = slice(seen, seen + len(kept))
            nearest.update(kept, rows["y"][mine], rows["predicted"][mine])
            start, seen = start + len(h), seen + len(kept)
        return Features(self.features.measures(self.file.weight), nearest.nc4, nearest.accuracy)

    def _intervals(self, rows: Rows, used: np.ndarray, resamples: int) -> dict[str, np.ndarray] | None:
        """Ends of the 95 % interval of every class, from further passes over as many classes as fit into memory."""
        file, y = self.file, rows.get("y")
        if y is None or self.statistics.pooled:
            return None
        c, count = file.num_classes, np.bincount(y, minlength=file.num_classes)
        right = np.bincount(y, ~rows["wrong"], c)
        ends = np.full((len(bootstrap.MEASURES), c, 2), np.nan)
        resamples = min(resamples, max(_FEW_RESAMPLES, _DRAWS // (len(y) * c)))
        group = np.cumsum(8 * c * count) // _RESAMPLED  # of classes that are read together
        for chosen in (np.flatnonzero(group == g) for g in np.unique(group)):
            inside, start, parts = np.isin(np.arange(c), chosen), 0, []
            for block in file.blocks(max(1, _BLOCK // c)):
                kept = used[start : start + len(block.y)]
                start += len(kept)
                kept = kept & inside[np.where(kept, block.y, 0)]
                parts.append((block.positive[kept], block.y[kept]))
            x, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
            order = np.argsort(labels, kind="stable")
            edges = np.searchsorted(labels[order], [chosen, chosen + 1])
            for k, first, last in zip(chosen.tolist(), *edges.tolist(), strict=True):
                ends[:, k] = bootstrap.class_intervals(x[order[first:last]], k, resamples)
        return {"accuracy": significance.wilson(right, count), **dict(zip(bootstrap.MEASURES, ends, strict=True))}

    def _single(self, rows: Rows) -> tuple[dict[str, float], np.ndarray, np.ndarray]:
        """Metrics, accuracy of each class, and the bins of the reliability diagram."""
        right, c = ~rows["wrong"], self.file.num_classes
        with np.errstate(invalid="ignore"):
            score = np.bincount(rows["y"], right, c) / np.bincount(rows["y"], minlength=c)
        table = metrics.reliability(rows["confidence"][:, None], right[:, None])
        return {"error": float(rows["wrong"].mean()), "error_x": float(rows["wrong_x"].mean())}, score, table

    def _several(self, used: np.ndarray) -> tuple[dict[str, float], np.ndarray, np.ndarray]:
        """The same of several labels, from blocks of columns that fit into memory; the score is average precision."""
        reports, tables = [], []
        for first in range(0, self.file.num_classes, self.columns):
            if first:  # another pass, for the next columns
                self.scores = list(self._read_columns(slice(first, first + self.columns), used))
            p, has = (np.concatenate(parts) for parts in zip(*self.scores, strict=True))
            self.scores = []
            reports.append(metrics.multilabel_report(p, has))
            tables.append(metrics.reliability(p, has))
        report = metrics.join_reports(reports)
        return report.summary(), report.ap, np.concatenate(tables)

    def _read_columns(self, columns: slice, used: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        start = 0
        for block in self.file.blocks(max(1, _BLOCK // self.file.num_classes)):
            part = block.take(used[start : start + len(block.y)]).columns(columns)
            start += len(block.y)
            yield self.file.probabilities(part)[0], part.y.astype(bool)


class _Distributions:
    """Running moments up to the fourth and ranges of every class, exact and of constant size.

    Blocks are merged by the formulas of Chan and Pébay.
    """

    def __init__(self, classes: int, multilabel: bool) -> None:
        self.classes, self.multilabel = classes, multilabel
        self.moments = np.zeros((5, classes))  # number, mean, and the sums of (x - mean)^2, ^3 and ^4
        # largest -x and largest x of each class, of its own output and of the others
        self.own, self.other = (np.full((classes, 2), -np.inf) for _ in range(2))

    def update(self, x: np.ndarray, y: np.ndarray) -> None:
        row, c = np.nonzero(y) if self.multilabel else (np.arange(len(y)), y)
        own = x[row, c].astype(np.float64)
        if self.multilabel:
            has_not = y == 0
            low, high = (np.max(v, axis=0, where=has_not, initial=-np.inf) for v in (-x, x))
            np.maximum(self.other, np.stack([low, high], 1), out=self.other)
        else:
            impostors = x.astype(np.float64)  # a copy
            impostors[row, c] = -np.inf
            high = impostors.max(1)
            impostors[row, c] = np.inf
            np.maximum.at(self.other, c, np.stack([-impostors.min(1), high], 1))
        np.maximum.at(self.own, c, np.stack([-own, own], 1))
        self._merge(own, c)

    def _merge(self, own: np.ndarray, c: np.ndarray) -> None:
        def per_class(value: np.ndarray | None) -> np.ndarray:
            return np.bincount(c, value, self.classes)

        first = np.zeros(self.classes)
        first[c[::-1]] = own[::-1]  # deviations from it: those of a constant output are exactly zero
        nb = per_class(None).astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):  # fourth powers of huge outputs
            d = own - first[c]
            mean = per_class(d) / np.maximum(nb, 1)
            d -= mean[c]
            b2, b3, b4 = (per_class(d**k) for k in (2, 3, 4))
            na, ma, a2, a3, a4 = self.moments
            n = np.maximum(na + nb, 1)
            e = np.where(na > 0, first + mean - ma, 0.0)  # from the mean so far to the block's
            wa, wb = na / n, nb / n
            self.moments = np.stack(
                [
                    na + nb,
                    np.where(na > 0, ma + e * wb, first + mean),
                    a2 + b2 + e**2 * na * wb,
                    a3 + b3 + e**3 * na * wb * (wa - wb) + 3 * e * (wa * b2 - wb * a2),
                    a4
                    + b4
                    + e**4 * na * wb * (wa**2 - wa * wb + wb**2)
                    + 6 * e**2 * (wa**2 * b2 + wb**2 * a2)
                    + 4 * e * (wa * b3 - wb * a3),
                ]
            )

    def result(self) -> Distributions:
        shapes = [significance.normality_from_moments(int(n), *rest) for n, *rest in self.moments.T.tolist()]
        skewness, kurtosis, p = np.array([(s.skewness, s.kurtosis, s.p) for s in shapes]).T
        own, other = (np.where(np.isfinite(v), v * [-1, 1], np.nan) for v in (self.own, self.other))
        return Distributions(skewness, kurtosis, p, own, other)


class _Sample:
    """Some rows of the features, those whose scrambled number is smallest: the same rows of every model."""

    def __init__(self) -> None:
        self.kept: tuple[np.ndarray, ...] | None = None  # scrambled numbers, labels and features

    def update(self, h: np.ndarray, y: np.ndarray, number: np.ndarray) -> None:
        new: tuple[np.ndarray, ...] = (_scramble(number), y, h)
        if self.kept is not None:
            new = tuple(map(np.concatenate, zip(self.kept, new, strict=True)))
        first = np.argsort(new[0], kind="stable")[:_SHOWN]
        self.kept = tuple(part[first] for part in new)

    def views(self, statistics: FeatureStatistics, of: str) -> tuple[FeatureView, ...]:
        assert self.kept is not None
        _, y, h = self.kept
        present = int((statistics.count > 0).sum())
        found: dict[str, View] = {}
        if present <= _MOST_VIEWED:
            for name, make in (("PCA", statistics.pca), ("LDA", statistics.lda)):
                try:
                    found[name] = make()
                except ValueError:  # too few classes or directions for two axes
                    continue
        means = torch.where(statistics.count[:, None] > 0, statistics.mean, torch.nan)
        return tuple(
            FeatureView(name, of, view.share, view.project(h).numpy(), y, view.project(means).numpy())
            for name, view in found.items()
        )


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
            row, c = np.nonzero(key[:, None] < np.where(y == 1, self.limit[:, 1], self.limit[:, 0]))
            own, j = y[row, c], c
        else:  # the image's own output and one impostor
            row = np.flatnonzero(key < self.limit[y, 1])
            step = 1 + _scramble(number[row] + 1_000_003) % np.uint64(max(1, self.classes - 1))
            j = np.concatenate([y[row], (y[row] + step.astype(np.int64)) % self.classes])
            row = np.tile(row, 2)
            c, own = y[row], j == y[row]
        new = {"key": key[row], "c": c, "own": own, "j": j, "x": x[row, j], "p": p[row, j]}
        if self.classes == 1 and not self.multilabel:
            new = {k: v[: len(v) // 2] for k, v in new.items()}  # no impostors
        merged = {k: np.concatenate([self.kept[k], new[k].astype(t)]) for k, t in _POINT.items()}
        # the first `each` of every (class, side), by scrambled number
        order = np.lexsort((merged["key"], merged["own"], merged["c"]))
        group = merged["c"][order] * 2 + merged["own"][order]
        rank = np.arange(len(group)) - np.searchsorted(group, group)
        self.kept = {k: v[order[rank < self.each]] for k, v in merged.items()}
        full = order[rank == self.each - 1]
        self.limit[merged["c"][full], merged["own"][full]] = merged["key"][full]

    def result(self) -> dict[str, np.ndarray]:
        return {k: v for k, v in self.kept.items() if k != "key"}


_POINT = {"key": np.uint64, "c": np.int64, "own": np.int8, "j": np.int64, "x": np.float64, "p": np.float64}


def _scramble(number: np.ndarray) -> np.ndarray:
    """Row numbers in a fixed pseudo-random order (the finaliser of splitmix64)."""
    with np.errstate(over="ignore"):
        z = (number.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def class_gaussians(stats: ClassStatistics) -> ClassGaussians:
    """Own, pooled impostors' and overall (mean, deviation) of every class, and its nearest impostors.

    stats: of x over a test or training set
    """
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


def _different_names(paths: Sequence[Path]) -> list[str | None]:
    """Different names for files, adding path components until they differ."""
    parts = [[*p.resolve().parent.parts, p.name if p.is_dir() else p.stem] for p in paths]
    for k in range(1, max(map(len, parts)) + 1):
        names: list[str | None] = ["/".join(part[-k:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"model {k}" for k in range(1, len(paths) + 1)]


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"
