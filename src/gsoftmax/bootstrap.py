"""Bootstrap intervals of the measures of one class, over its examples.

The examples of a class are drawn with replacement, as many as it has. The intervals are bias-corrected and accelerated
(BCa, Efron 1987): sigma of a resample is too small by a factor of about 1 - 1/(2n), which percentiles would pass on to
the interval.
"""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist

import numpy as np

__all__ = ["FEWEST", "MEASURES", "bca", "class_intervals"]

MEASURES = ("compactness", "separability", "ratio")
FEWEST = 10  # examples; with fewer, resamples without any spread are not rare
_NUMBERS = 2**22  # of a block of resamples: 32 MB

_NORMAL = NormalDist()


def class_intervals(x: np.ndarray, own: int, resamples: int = 1000, seed: int = 0) -> np.ndarray:
    """(3, 2) ends of the 95 % intervals of compactness, separability and ratio of a class; nan below `FEWEST` examples.

    x: (n, C) outputs of its examples
    own: the class
    resamples: how many; classes of equal size share the draws
    seed: of the draws

    >>> x = np.random.default_rng(0).normal(size=(500, 2)) + [3.0, 0.0]
    >>> low, high = class_intervals(x, own=0)[0]
    >>> bool(0.9 < low < 1 / x[:, 0].std() < high < 1.1)
    True
    """
    n = len(x)
    if n < FEWEST:
        return np.full((len(MEASURES), 2), np.nan)
    centre = x.mean(0, dtype=np.float64)
    x = x - centre  # squares of deviations keep their digits
    square = x**2
    step = max(1, _NUMBERS // max(x.shape))
    replicates = []
    for start in range(0, resamples, step):
        weight = _weights(n, min(step, resamples - start), seed + start)
        replicates.append(_measures(centre, weight @ x, weight @ square, own))
    without = [
        _measures(centre, (x.sum(0) - x[i : i + step]) / (n - 1), (square.sum(0) - square[i : i + step]) / (n - 1), own)
        for i in range(0, n, step)
    ]
    estimate = _measures(centre, x.mean(0)[None], square.mean(0)[None], own)[:, 0]
    return np.stack([bca(*parts) for parts in zip(estimate, np.hstack(replicates), np.hstack(without), strict=True)])


def bca(
    estimate: float, replicates: np.ndarray, jackknife: np.ndarray, confidence: float = 0.95
) -> tuple[float, float]:
    """The bias-corrected and accelerated interval of a statistic; nan where it has none.

    estimate: the statistic of the sample
    replicates: (resamples,) of the resamples
    jackknife: (n,) of the samples without one example each
    confidence: of the interval
    """
    with np.errstate(all="ignore"):
        below = ((replicates < estimate).mean() + (replicates <= estimate).mean()) / 2
        d = jackknife.mean() - jackknife
        acceleration = (d**3).sum() / (6 * (d**2).sum() ** 1.5)
    if not 0 < below < 1 or not np.isfinite(acceleration):
        return np.nan, np.nan
    bias, tail = _NORMAL.inv_cdf(below), _NORMAL.inv_cdf((1 + confidence) / 2)
    shares = [_NORMAL.cdf(bias + (bias + z) / (1 - acceleration * (bias + z))) for z in (-tail, tail)]
    low, high = np.quantile(replicates, shares)
    return float(low), float(high)


def _measures(centre: np.ndarray, mean: np.ndarray, square: np.ndarray, own: int) -> np.ndarray:
    """(3, resamples) of means and mean squares of x minus its centre, (resamples, C) each."""
    with np.errstate(all="ignore"):  # a resample without spread is infinitely compact
        v, d = square - mean**2, (mean + centre) - (mean + centre)[:, own, None]
        mine = v[:, own, None]
        divergence = ((v - mine) ** 2 / (v * mine) + d**2 * (1 / v + 1 / mine)).sum(1) / 4
        sigma = np.sqrt(mine[:, 0])
        separability = divergence / (v.shape[1] - 1) if v.shape[1] > 1 else np.full(len(v), np.nan)
        return np.stack([1 / sigma, separability, separability / sigma])


@lru_cache(maxsize=2)
def _weights(n: int, resamples: int, seed: int) -> np.ndarray:
    """(resamples, n): how often each example is in each resample, divided by n."""
    drawn = np.random.default_rng([seed, n]).integers(n, size=(resamples, n), dtype=np.int32)
    drawn += np.arange(resamples, dtype=np.int32)[:, None] * n
    return np.bincount(drawn.ravel(), minlength=resamples * n).reshape(resamples, n) / n
