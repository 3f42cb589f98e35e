"""Geometry of the features h that a classifier separates: neural collapse, Fisher ratio, effective rank, 2-D views.

With m classes that have examples, n examples h of class y, class means mu_c and their mean mu, and the classifier
x = h W^T + b (Papyan, Han, Donoho 2020, https://arxiv.org/abs/2008.08186):

    Sigma_W = 1/n sum_i (h_i - mu_(y_i))(h_i - mu_(y_i))^T       Sigma_B = 1/m sum_c (mu_c - mu)(mu_c - mu)^T
    NC1     = tr(Sigma_W Sigma_B^+) / m                          within-class variability
    NC2     = sd_c |mu_c - mu| / mean_c |mu_c - mu|              equinorm
              sd of cos(mu_c - mu, mu_c' - mu), c != c'          equiangularity
              mean of |cos + 1/(m - 1)|                          distance from a simplex
    NC3     = | W / |W| - M / |M| |, row c of M mu_c - mu        self-duality, Frobenius norms
    NC4     = share of examples that the nearest class mean and the classifier put into different classes

All are 0 in full collapse. Sigma_W weighs examples equally and Sigma_B weighs classes equally, as in the authors' code;
mu is the mean of the class means. Everything is float64, and deviations divide by n.

`FeatureStatistics` needs one pass and O(D^2 + C D) memory; the nearest class mean needs a second one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Collapse", "FeatureStatistics", "NearestMean", "View", "effective_rank", "nearest_mean"]

ArrayLike = Any  # a torch tensor or a NumPy array

_NUMBERS = 2**24  # of h at a time: 128 MB in float64
_PAIRS = 2**22  # cosines at a time


@dataclass(frozen=True)
class Collapse:
    """Numbers of the features of one data set, nan where undefined.

    >>> h = torch.tensor([[3.0, 0.1], [3.0, -0.1], [-3.0, 0.1], [-3.0, -0.1]])
    >>> found = FeatureStatistics(2, 2).update(h, torch.tensor([0, 0, 1, 1])).measures(torch.tensor([[1., 0], [-1, 0]]))
    >>> found.nc1, found.nc2_norms, found.nc2_simplex, round(found.nc3, 6), round(found.fisher, 3)
    (0.0, 0.0, 0.0, 0.0, 900.0)
    """

    classes: int  # with examples
    nc1: float  # tr(Sigma_W Sigma_B^+) / classes
    nc2_norms: float  # coefficient of variation of the norms of the centred class means
    nc2_angles: float  # standard deviation of the cosines between them
    nc2_simplex: float  # mean distance of these cosines from -1/(classes - 1)
    nc3: float  # distance of W from the centred class means, both scaled to norm 1; 0 to 2
    w_norms: float  # coefficient of variation of the norms of the rows of W
    w_simplex: float  # mean distance of the cosines between the rows of W from -1/(classes - 1)
    fisher: float  # sum of squares between classes over that within classes
    effective_rank: float  # exp of the entropy of the singular values of the centred features; 1 to their number


@dataclass(frozen=True, eq=False)
class View:
    """Two axes of the feature space: a point is ((h - centre) @ axes.T)."""

    centre: Tensor  # (D,) mean of h
    axes: Tensor  # (2, D); the largest entry of an axis is positive
    share: tuple[float, float]  # of the variance (PCA), or of the separation of the classes (LDA)

    def project(self, h: ArrayLike) -> Tensor:
        """(N, 2) coordinates.

        h: (N, D) features
        """
        return (_matrix("h", h).to(self.centre.device) - self.centre) @ self.axes.T


class FeatureStatistics:
    """Count and mean of h for every class and the scatter within classes, in one pass over batches.

    Batches are merged by Chan's formula, so the result does not depend on their boundaries.

    num_classes: C
    features: D, the width of h
    ignore_index: rows with this label are left out
    device: of the statistics; by default that of the first h

    >>> h, y = torch.randn(100, 8), torch.randint(3, (100,))
    >>> whole = FeatureStatistics(3, 8).update(h, y).measures()
    >>> halves = FeatureStatistics(3, 8).update(h[:50], y[:50]).merge(FeatureStatistics(3, 8).update(h[50:], y[50:]))
    >>> math.isclose(whole.nc1, halves.measures().nc1)
    True
    """

    def __init__(
        self, num_classes: int, features: int, *, ignore_index: int = -100, device: torch.device | str | None = None
    ) -> None:
        for name, value in (("num_classes", num_classes), ("features", features)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        self.num_classes, self.features, self.ignore_index = num_classes, features, ignore_index
        self._device = None if device is None else torch.device(device)
        self.count = torch.zeros(num_classes, dtype=torch.float64, device=device)  # exact below 2^53
        self.mean = torch.zeros(num_classes, features, dtype=torch.float64, device=device)
        self.within = torch.zeros(features, features, dtype=torch.float64, device=device)  # sum of squared deviations
        self._eigen: tuple[Tensor, Tensor] | None = None  # of the scatter

    @torch.no_grad()
    def update(self, h: ArrayLike, y: ArrayLike) -> FeatureStatistics:
        """Add a batch.

        h: (N, D) features of any float type
        y: (N,) class indices
        """
        h, y = _matrix("h", h, self.features), torch.as_tensor(y).detach()
        if y.shape != h.shape[:1] or y.is_floating_point():
            raise ValueError(f"y must be {len(h)} class indices, one for each row of h, got {y.dtype} {tuple(y.shape)}")
        home = self._device or h.device
        if home != self.within.device:
            self._device, self.count, self.mean, self.within = (
                home,
                *(part.to(home) for part in (self.count, self.mean, self.within)),
            )
        rows = max(1, _NUMBERS // self.features)
        for part, labels in zip(h.split(rows), y.long().split(rows), strict=True):
            used = labels != self.ignore_index
            labels = labels[used].to(home)
            if not len(labels):
                continue
            if bool(((labels < 0) | (labels >= self.num_classes)).any()):
                raise ValueError(
                    f"y must be in 0 to {self.num_classes - 1}, got {int(labels.min())} to {int(labels.max())}"
                )
            values = part[used].to(home, torch.float64)
            if not bool(values.isfinite().all()):
                raise ValueError("h must be finite, got nan or infinity")
            present, group = labels.unique(return_inverse=True)
            count = torch.bincount(group, minlength=len(present)).double()
            # deviations from the mean of the batch: a common offset costs no digits
            centre = values.mean(0)
            values = values - centre
            mean = torch.zeros(len(present), self.features, dtype=torch.float64, device=home)
            mean = mean.index_add_(0, group, values) / count[:, None]
            values -= mean[group]
            self._merge(present, count, mean + centre, values.T @ values)
        return self

    def merge(self, other: FeatureStatistics) -> FeatureStatistics:
        """Add what another accumulator has seen; any order gives the same result up to rounding.

        other: of the same numbers of classes and features
        """
        if (self.num_classes, self.features) != (other.num_classes, other.features):
            raise ValueError(
                f"other must have {self.num_classes} classes and {self.features} features, "
                f"got {other.num_classes} and {other.features}"
            )
        present, home = other.count.nonzero()[:, 0], self.within.device
        parts = (present, other.count[present], other.mean[present], other.within)
        self._merge(*(part.to(home) for part in parts))
        return self

    def _merge(self, present: Tensor, count: Tensor, mean: Tensor, within: Tensor) -> None:
        before = self.count[present]
        total = before + count
        step = mean - self.mean[present]
        self.within += within + (step * (before * count / total)[:, None]).T @ step
        self.mean[present] += step * (count / total)[:, None]
        self.count[present] = total
        self._eigen = None

    def _between(self) -> tuple[Tensor, Tensor, Tensor]:
        """Number of examples of each class that has some, its mean minus the mean of all examples, and that mean."""
        present = self.count > 0
        count, mean = self.count[present], self.mean[present]
        if not len(count):
            raise ValueError("there are no features yet: call update first")
        centre = (count[:, None] * mean).sum(0) / count.sum()
        return count, mean - centre, centre

    def _spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues, ascending, and eigenvectors of the sum of (h - mean)(h - mean)^T over all examples."""
        if self._eigen is None:
            count, mean, _ = self._between()
            values, vectors = torch.linalg.eigh(self.within + (mean * count[:, None]).T @ mean)
            self._eigen = values, vectors
        return self._eigen

    def measures(self, weight: ArrayLike | None = None) -> Collapse:
        """All measures of the features, except those of the nearest class mean (see `NearestMean`).

        weight: (C, D), the classifier's W; without it NC3 and the numbers of W are nan
        """
        count, mean, _ = self._between()
        m, n = len(count), float(count.sum())
        between, within = float((count[:, None] * mean**2).sum()), float(self.within.trace())
        means = mean - mean.mean(0)
        _, s, v = torch.linalg.svd(means / math.sqrt(m), full_matrices=False)
        known = s > max(means.shape) * torch.finfo(s.dtype).eps * s.max()  # the rank of Sigma_B
        along = ((v @ self.within) * v).sum(1)[known] / n
        norms, angles, simplex = _frame(means)
        values, _ = self._spectrum()
        # below this an eigenvalue is a rounding error, whose square root would not be small
        values = values[values > len(values) * torch.finfo(values.dtype).eps * values.max()]
        nc3 = w_norms = w_simplex = math.nan
        if weight is not None:
            w = _matrix("W", weight, self.features).to(mean.device, torch.float64)
            if len(w) != self.num_classes:
                raise ValueError(f"W must have a row for each of the {self.num_classes} classes, got {len(w)}")
            w = w[self.count > 0]
            w_norms, _, w_simplex = _frame(w)
            if m > 1:
                nc3 = float(torch.linalg.norm(w / torch.linalg.norm(w) - means / torch.linalg.norm(means)))
        return Collapse(
            classes=m,
            nc1=float((along / s[known] ** 2).sum()) / m if m > 1 else math.nan,
            nc2_norms=norms,
            nc2_angles=angles,
            nc2_simplex=simplex,
            nc3=nc3,
            w_norms=w_norms,
            w_simplex=w_simplex,
            fisher=(between / within if within else math.inf) if m > 1 else math.nan,
            effective_rank=effective_rank(values.sqrt()),
        )

    def pca(self) -> View:
        """The two axes of the largest variance."""
        return _view(self._between()[2], *self._spectrum())

    def lda(self) -> View:
        """The two axes that separate the classes best: the leading eigenvectors of Sigma_W^+ S_B, S_B weighing classes
        by their examples.  The standard deviation within classes is 1 along both; needs three classes.
        """
        count, mean, centre = self._between()
        if len(count) < 3:
            raise ValueError(f"two axes of LDA need examples of at least 3 classes, got {len(count)}")
        values, vectors = torch.linalg.eigh(self.within / count.sum())
        known = values > len(values) * torch.finfo(values.dtype).eps * values.max()
        if int(known.sum()) < 2:
            raise ValueError("two axes of LDA need features that vary within classes along two directions")
        white = vectors[:, known] / values[known].sqrt()  # to deviations of 1 within classes
        spread = (mean @ white) * (count / count.sum()).sqrt()[:, None]
        values, vectors = torch.linalg.eigh(spread.T @ spread)
        return _view(centre, values, white @ vectors)


class NearestMean:
    """Accuracy of the nearest class mean, and how often it disagrees with the classifier (NC4), over a second pass.

    statistics: of the first pass, over the examples that define the means

    >>> h, y = torch.tensor([[2.0], [3.0], [-2.0], [-3.0]]), torch.tensor([0, 0, 1, 1])
    >>> nearest = NearestMean(FeatureStatistics(2, 1).update(h, y)).update(h, y, predicted=torch.tensor([0, 1, 1, 1]))
    >>> nearest.accuracy, nearest.nc4
    (1.0, 0.25)
    """

    def __init__(self, statistics: FeatureStatistics) -> None:
        self.classes = statistics.count.nonzero()[:, 0]  # those with a mean
        self.mean = statistics.mean[self.classes]
        self.n = self._right = self._different = 0

    def update(self, h: ArrayLike, y: ArrayLike, predicted: ArrayLike) -> NearestMean:
        """Add a batch.

        h, y: (N, D) features and (N,) class indices, without ignored rows
        predicted: (N,) classes that the classifier chose
        """
        y, predicted = (torch.as_tensor(v).to(self.mean.device) for v in (y, predicted))
        found = self.classes[nearest_mean(h, self.mean)]
        self.n += len(found)
        self._right += int((found == y).sum())
        self._different += int((found != predicted).sum())
        return self

    @property
    def accuracy(self) -> float:
        """Share of the examples whose nearest class mean is that of their class."""
        return self._right / self.n if self.n else math.nan

    @property
    def nc4(self) -> float:
        """Share of the examples whose nearest class mean is not that of the predicted class."""
        return self._different / self.n if self.n else math.nan


def nearest_mean(h: ArrayLike, mean: ArrayLike) -> Tensor:
    """The row of `mean` that is nearest to each row of h, (N,); ties go to the lowest.

    h: (N, D) features
    mean: (C, D)

    >>> nearest_mean(torch.tensor([[0.9], [4.0]]), torch.tensor([[0.0], [1.0], [3.0]])).tolist()
    [1, 2]
    """
    mean = _matrix("mean", mean).double()
    h = _matrix("h", h, mean.shape[1]).to(mean.device, torch.float64)
    centre = mean.mean(0)  # |h - m|^2 = |h|^2 - 2 (h.m - |m|^2 / 2): without a common offset that would cancel
    mean = mean - centre
    half = mean.square().sum(1) / 2
    rows = max(1, _NUMBERS // max(mean.shape))
    parts = [((part - centre) @ mean.T - half).argmax(1) for part in h.split(rows)]
    return torch.cat(parts)


def effective_rank(singular_values: ArrayLike) -> float:
    """exp of the entropy of the singular values, scaled to sum 1 (Roy and Vetterli 2007); nan without any above 0.

    singular_values: (k,) of a matrix

    >>> round(effective_rank(torch.ones(5)), 6)
    5.0
    """
    values = torch.as_tensor(singular_values, dtype=torch.float64)
    share = values[values > 0] / values.sum()
    return float((-(share * share.log()).sum()).exp()) if len(share) else math.nan


def _frame(rows: Tensor) -> tuple[float, float, float]:
    """Coefficient of variation of the norms of some rows; standard deviation of the cosines between different rows, and
    their mean distance from -1/(m - 1)."""
    m = len(rows)
    norms = torch.linalg.norm(rows, dim=1)
    if m < 2 or not bool((norms > 0).all()):
        return math.nan, math.nan, math.nan
    unit, target = rows / norms[:, None], -1 / (m - 1)
    total = square = distance = 0.0
    for start in range(0, m, step := max(1, _PAIRS // m)):
        gap = unit[start : start + step] @ unit.T - target
        gap.diagonal(start).zero_()
        total, square, distance = (
            total + float(gap.sum()),
            square + float((gap**2).sum()),
            distance + float(gap.abs().sum()),
        )
    pairs = m * (m - 1)
    variance = max(0.0, square / pairs - (total / pairs) ** 2)
    return float(norms.std(correction=0) / norms.mean()), math.sqrt(variance), distance / pairs


def _view(centre: Tensor, values: Tensor, vectors: Tensor) -> View:
    """The last two of the eigenvectors, which come in ascending order."""
    if len(values) < 2:
        raise ValueError("two axes need at least 2 features, got 1")
    axes = vectors[:, -2:].T.flip(0).clone()
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    total = float(values.clamp(min=0).sum())
    shares = [float(v) / total if total else math.nan for v in values[-2:].flip(0)]
    return View(centre, axes * largest.sign(), (shares[0], shares[1]))


def _matrix(name: str, value: ArrayLike, columns: int | None = None) -> Tensor:
    value = value.detach() if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
    if value.ndim != 2 or not value.is_floating_point() or (columns is not None and value.shape[1] != columns):
        wanted = "(rows, columns)" if columns is None else f"(rows, {columns})"
        raise ValueError(f"{name} must be {wanted} of floats, got {value.dtype} {tuple(value.shape)}")
    return value
