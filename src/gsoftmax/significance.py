"""Significance: paired tests with intervals, correlations, a test of normality, Holm's correction, how many seeds.

The paper compares the per-class average precisions of two heads with a paired-sample t-test and correlates class
geometry with average precision. Student's distribution is computed here, so that nothing beyond NumPy is needed.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np

__all__ = [
    "Correlation",
    "McNemar",
    "Normality",
    "Paired",
    "PaperCorrelation",
    "all_class_correlation",
    "chance_accuracy",
    "clearly_above",
    "holm",
    "mcnemar",
    "normality",
    "normality_from_moments",
    "paired",
    "paired_from_moments",
    "paired_over_images",
    "paper_correlations",
    "pearson",
    "power",
    "required_n",
    "t_cdf",
    "t_quantile",
    "t_two_sided",
    "verdict",
    "wilson",
]

ALPHA = 0.05  # the level of every verdict
FEWEST_JUDGED = 20  # images from which on a model is compared with chance
_CHANCE_Z = NormalDist().inv_cdf(0.99)  # standard errors above chance that a model must exceed

ArrayLike = Any  # a torch tensor, a NumPy array, or a list of numbers


@dataclass(frozen=True)
class Paired:
    """A paired comparison: mean difference, interval, test and number of pairs."""

    difference: float  # mean of b - a: positive where the second is larger
    low: float  # confidence interval of the difference
    high: float  # its other end
    t: float  # difference / standard error
    p: float  # two-sided
    n: int  # pairs used
    sd: float  # standard deviation of b - a, dividing by n - 1
    dropped: int = 0  # pairs left out because one side was nan


def paired(a: ArrayLike, b: ArrayLike, confidence: float = 0.95) -> Paired:
    """Paired-sample t-test of b - a: t = mean(d) / (sd(d)/sqrt(n)), d = b - a, with n - 1 degrees of freedom.

    a, b: numbers of the same seeds, folds or classes; a pair with a nan is dropped and counted in `dropped`
    confidence: of the interval

    With one pair only the difference is defined: sd, t, p and the interval are nan. When all differences are equal, t
    is infinite and p is 0, or, when they are all zero, t is 0 and p is 1.

    >>> result = paired([1.0, 2.0, 3.0, 4.0], [1.5, 2.5, 3.0, 5.0])
    >>> result.difference, result.n, round(result.t, 4), round(result.p, 4)
    (0.5, 4, 2.4495, 0.0917)
    >>> round(result.low, 3), round(result.high, 3)
    (-0.15, 1.15)
    """
    _check_fraction("confidence", confidence)
    a, b, dropped = _pairs(a, b, "a", "b")
    d = b - a
    if len(d) and (d == d[0]).all():
        return paired_from_moments(len(d), float(d[0]), 0.0, confidence, dropped)
    mean, sd = (float(d.mean()), float(d.std(ddof=1))) if len(d) else (math.nan, math.nan)
    return paired_from_moments(len(d), mean, sd, confidence, dropped)


def paired_from_moments(n: int, mean: float, sd: float, confidence: float = 0.95, dropped: int = 0) -> Paired:
    """`paired` from moments of the differences.

    n, mean, sd: number, mean and standard deviation (dividing by n - 1)
    confidence, dropped: of the interval; pairs left out before

    >>> round(paired_from_moments(4, 0.5, 0.408248).t, 4)
    2.4495
    """
    nan = math.nan
    if n < 2:
        return Paired(mean, nan, nan, nan, nan, n, nan, dropped)
    if sd == 0:
        t = math.copysign(math.inf, mean) if mean else 0.0
        return Paired(mean, mean, mean, t, 0.0 if mean else 1.0, n, 0.0, dropped)
    error = sd / math.sqrt(n)
    half = t_quantile((1 + confidence) / 2, n - 1) * error
    t = mean / error
    return Paired(mean, mean - half, mean + half, t, t_two_sided(t, n - 1), n, sd, dropped)


@dataclass(frozen=True)
class McNemar:
    """Images that only one of two models got right; p is the exact two-sided binomial one."""

    only_first_right: int  # images
    only_second_right: int  # images
    p: float  # two-sided


def mcnemar(only_first_right: int, only_second_right: int) -> McNemar:
    """McNemar's exact test: under the null hypothesis, each discordant image is a fair coin flip.

    p = min(1, 2 P(K <= k)), K binomial(n, 1/2), k the smaller count of n together.

    only_first_right, only_second_right: images that one of two models gets right and the other does not

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
    if n <= 20_000:
        return math.comb(n, k) / 2**n
    if k < 50:
        return 0.0  # far below the smallest number
    # Stirling: n! = sqrt(2 pi n) (n/e)^n e^d(n).  The powers together are (n/2k)^k (n/2(n-k))^(n-k).
    d = [1 / (12 * m) - 1 / (360 * m**3) + 1 / (1260 * m**5) for m in (n, k, n - k)]
    powers = -k * math.log1p((2 * k - n) / n) - (n - k) * math.log1p((n - 2 * k) / n)
    return math.exp(powers + d[0] - d[1] - d[2]) * math.sqrt(n / (2 * math.pi * k * (n - k)))


def paired_over_images(first: ArrayLike, second: ArrayLike, runs: int, labels: int = 1) -> Paired:
    """Two methods on the same images: the mean over images of the difference of their error rates over runs.

    The interval is that of a t-test with the images as units. p is of the exact sign-flip test: under the null
    hypothesis the difference of every image is as likely as its opposite. With one run it is McNemar's test. Both are
    about other images, for these trained runs; `paired` over seeds is about other runs, on these images.

    first, second: (N,) wrong answers of each image, summed over the runs of a method: whole numbers
    runs, labels: runs of each method, and labels of an image where several can be wrong

    >>> found = paired_over_images([0, 0, 1, 2, 0, 0], [1, 2, 1, 2, 1, 2], runs=2)
    >>> found.difference, round(found.p, 6), found.n
    (0.5, 0.125, 6)
    """
    a, b, _ = _pairs(first, second, "first", "second")
    d = b - a
    if runs < 1 or (d != d.round()).any():
        raise ValueError(f"first and second must be whole numbers of 1 or more runs, got {runs} runs")
    return replace(paired(a / (runs * labels), b / (runs * labels)), t=math.nan, p=_sign_flip(d.astype(np.int64)))


def _sign_flip(d: np.ndarray) -> float:
    """P(|sum of +-d| >= |sum of d|) with fair independent signs, to about 1e-12.

    The sum has the characteristic function prod_m cos(m t)^(number of d with |d| = m), which one FFT inverts.
    """
    size, observed = int(np.abs(d).sum()), abs(int(d.sum()))
    t = 2 * np.pi * np.arange(size + 1) / (2 * size + 1)
    found = np.ones(size + 1)
    for m, n in enumerate(np.bincount(np.abs(d)).tolist()[1:], start=1):
        found *= np.cos(m * t) ** n
    at = np.fft.irfft(found, 2 * size + 1)  # P(sum = 0), P(sum = 1), ..., P(sum = -1)
    return float(np.clip(1 - at[0] - 2 * at[1:observed].sum() if observed else 1.0, 0.0, 1.0))


def chance_accuracy(y: ArrayLike, predicted: ArrayLike) -> float | None:
    """The accuracy expected of predictions that are unrelated to y and as frequent as these, as in Cohen's kappa.

    y, predicted: (n,) class indices; None for fewer than `FEWEST_JUDGED`, or of one class, which are not judged

    >>> chance_accuracy([0, 1] * 20, [0] * 40)
    0.5
    """
    truth, found = (np.asarray(v.cpu() if hasattr(v, "cpu") else v, dtype=np.int64) for v in (y, predicted))
    n = len(truth)
    if n < FEWEST_JUDGED or (truth == truth[0]).all():
        return None
    size = int(max(truth.max(), found.max())) + 1
    return float((np.bincount(truth, minlength=size) / n) @ (np.bincount(found, minlength=size) / n))


def clearly_above(accuracy: float, chance: float, n: int) -> bool:
    """Whether an accuracy is above that of guessing, by a one-sided test at the 1 % level.

    The mean accuracy of several runs is judged in the same way: they share the test images, so that it may be as
    uncertain as that of one run.

    accuracy, chance: of the model, and as `chance_accuracy` returns it, both averaged over runs if there are several
    n: test images

    >>> clearly_above(0.7, 0.5, n=40), clearly_above(0.65, 0.5, n=40)
    (True, False)
    """
    return accuracy > chance + _CHANCE_Z * math.sqrt(max(chance * (1 - chance), 1 / n) / n)


def wilson(successes: ArrayLike, trials: ArrayLike, confidence: float = 0.95) -> np.ndarray:
    """Wilson's interval of a proportion, (..., 2); nan without trials.  Unlike a bootstrap, it has a width where there
    was no success or no failure.

    successes, trials: counts of equal shape
    confidence: of the interval

    >>> wilson([0, 8], [10, 10]).round(3).tolist()
    [[0.0, 0.278], [0.49, 0.943]]
    """
    _check_fraction("confidence", confidence)
    k, n = _array(successes, "successes"), _array(trials, "trials")
    z2 = NormalDist().inv_cdf((1 + confidence) / 2) ** 2
    with np.errstate(divide="ignore", invalid="ignore"):
        centre = (k + z2 / 2) / (n + z2)
        half = np.sqrt(z2 * (k * (n - k) / n + z2 / 4)) / (n + z2)  # 0/0 is nan
    return np.stack([(centre - half).clip(0), (centre + half).clip(max=1)], -1)


def holm(pvalues: ArrayLike) -> np.ndarray:
    """Holm's step-down correction for multiple tests: the adjusted p-values.

    pvalues: of m tests; the k-th smallest is multiplied by m - k + 1 and raised to the largest before it. A nan stays
    nan and does not count as a test.

    >>> holm([0.01, 0.04, 0.03]).tolist()
    [0.03, 0.06, 0.06]
    """
    p = _array(pvalues, "pvalues")
    if p.ndim != 1:
        raise ValueError(f"pvalues must have one dimension, got {p.shape}")
    if len(wrong := p[(p < 0) | (p > 1)]):
        raise ValueError(f"pvalues must be in [0, 1], got {wrong[0]}")
    known = np.flatnonzero(~np.isnan(p))
    order = known[np.argsort(p[known], kind="stable")]
    adjusted = p.copy()
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)), 1.0)
    return adjusted


def verdict(difference: float, p: float, smaller_is_better: bool) -> str:
    """Verdict of a test at the level `ALPHA`.

    difference, p: of the second from the first; after correction
    smaller_is_better: whether a negative difference is an improvement

    >>> verdict(-0.3, 0.01, smaller_is_better=True), verdict(0.1, 0.4, smaller_is_better=True)
    ('better', 'no difference shown')
    """
    if not p < ALPHA:
        return "no difference shown"
    return "better" if (difference < 0) == smaller_is_better else "worse"


def power(n: int, sd: float, effect: float, alpha: float = 0.05) -> float:
    """Power of a two-sided paired t-test: the probability that it finds a true mean difference.

    n: pairs
    sd: standard deviation of the differences
    effect: true mean difference
    alpha: level of the test

    >>> round(power(34, sd=1.0, effect=0.5), 3)
    0.808
    """
    if n != int(n) or n < 2:
        raise ValueError(f"n must be a whole number of at least 2 pairs, got {n!r}")
    _check_sizes(sd, effect, alpha)
    if sd == 0:
        return 1.0 if effect else alpha
    dof = int(n) - 1
    shift = abs(effect) / sd * math.sqrt(n)
    critical = t_quantile(1 - alpha / 2, dof)
    # Given s, the estimated over the true deviation, t is normal around shift/s: the power is the mean over s of
    # P(|Z + shift| > critical s). With u = log s the density of s is proportional to exp(dof (u - e^(2u)/2)); it falls
    # below e^-39 of its peak beyond these limits, and the trapezoidal rule converges exponentially on such a bell.
    reach = math.sqrt(39 / dof)
    u = np.linspace(-reach - 39 / dof, reach, 4001)
    weight = np.exp(dof * (u - (np.exp(2 * u) - 1) / 2))
    border = critical * np.exp(u) / math.sqrt(2)
    centre = shift / math.sqrt(2)
    found = [(math.erfc(x - centre) + math.erfc(x + centre)) / 2 for x in border.tolist()]
    return min(1.0, float(np.dot(weight, found) / weight.sum()))


def required_n(sd: float, effect: float, power: float = 0.8, alpha: float = 0.05) -> int:
    """Pairs (seeds) that a two-sided paired t-test needs to find a true mean difference with a given probability.

    sd, effect, alpha: as in the function `power`
    power: the probability

    Starts from the normal approximation ((z_(1-alpha/2) + z_power) sd/effect)^2 and moves to the smallest n with enough
    exact power. Above a million pairs the approximation itself is returned.

    >>> required_n(sd=1.0, effect=0.5)
    34
    """
    _check_fraction("power", power)
    _check_sizes(sd, effect, alpha)
    if effect == 0:
        raise ValueError("effect must not be 0: no number of pairs finds a difference that is not there, got 0")
    z = NormalDist().inv_cdf(1 - alpha / 2)
    start = max(0.0, z + NormalDist().inv_cdf(power)) ** 2 * (sd / effect) ** 2
    n = max(2, math.ceil(start))
    if n > 1_000_000:
        return n
    while _power(n, sd, effect, alpha) < power:
        n += 1
    while n > 2 and _power(n - 1, sd, effect, alpha) >= power:
        n -= 1
    return n


_power = power  # which the parameter `power` of required_n shadows


@dataclass(frozen=True)
class Correlation:
    """Pearson's correlation."""

    r: float  # the coefficient
    p: float  # two-sided
    n: int  # points
    low: float  # confidence interval of r
    high: float  # its other end


@dataclass(frozen=True)
class PaperCorrelation(Correlation):
    """The paper's correlation, of one class.

    r, p, n, low, high: as in `Correlation`
    """

    best_class: int  # the class with the best mean over the settings


def pearson(a: ArrayLike, b: ArrayLike, confidence: float = 0.95) -> Correlation:
    """Pearson's correlation of a and b, with the exact p-value under normality and Fisher's interval.

    a, b: numbers; pairs with a nan are dropped
    confidence: of the interval

    Two points always lie on a line: r is 1 or -1 and p is 1. If a or b is constant, or with fewer than two points, r is
    nan.

    >>> result = pearson([1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0])
    >>> round(result.r, 4), round(result.p, 4), result.n
    (0.8, 0.2, 4)
    """
    _check_fraction("confidence", confidence)
    a, b, _ = _pairs(a, b, "a", "b")
    n = len(a)
    nan = math.nan
    if n < 2 or (a == a[0]).all() or (b == b[0]).all():
        return Correlation(nan, nan, n, nan, nan)
    u, v = _unit(a), _unit(b)
    if n == 2:
        return Correlation(1.0 if u @ v > 0 else -1.0, 1.0, n, -1.0, 1.0)
    r = min(1.0, max(-1.0, float(u @ v)))
    # 1 - r^2 from the distances of the unit vectors: exact where r is next to 1 and 1 - r*r would lose all digits
    rest = float((u - v) @ (u - v)) * float((u + v) @ (u + v)) / 4
    dof = n - 2
    p = 0.0 if rest == 0 else t_two_sided(math.copysign(math.sqrt(max(0.0, 1 - rest) * dof / rest), r), dof)
    if n == 3 or abs(r) == 1:
        return Correlation(r, p, n, *((-1.0, 1.0) if n == 3 else (r, r)))
    half = NormalDist().inv_cdf((1 + confidence) / 2) / math.sqrt(n - 3)
    return Correlation(r, p, n, math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half))


def paper_correlations(values: ArrayLike, ap: ArrayLike, *, largest: bool = True) -> PaperCorrelation:
    """The paper's correlation of a class-geometry measure with average precision.

    The class whose value averaged over all settings is best is picked, and its values are correlated with its average
    precisions across the settings.

    values, ap: (settings, classes), one row per G-softmax setting; classes with a nan are skipped
    largest: whether the largest value is best, or the smallest

    The paper has five settings: few points, of one class picked for its values. See also `all_class_correlation`.

    >>> values = [[1.0, 5.0], [2.0, 6.0], [3.0, 8.0]]
    >>> ap = [[0.5, 0.60], [0.4, 0.65], [0.6, 0.75]]
    >>> result = paper_correlations(values, ap)
    >>> result.best_class, round(result.r, 3), result.n
    (1, 1.0, 3)
    """
    v, a = _tables(values, ap)
    complete = np.flatnonzero(~(np.isnan(v) | np.isnan(a)).any(0))
    if not len(complete):
        raise ValueError(f"values and ap must have a class without nan in all {len(v)} settings, got none")
    means = v[:, complete].mean(0)
    best = int(complete[means.argmax() if largest else means.argmin()])
    return PaperCorrelation(**asdict(pearson(v[:, best], a[:, best])), best_class=best)


def all_class_correlation(values: ArrayLike, ap: ArrayLike) -> Correlation:
    """Pearson's correlation of a measure with average precision over all (setting, class) points together.

    values, ap: (settings, classes); points with a nan are left out

    The settings of one class are not independent, so p is too small when there are several: read it as a description.

    >>> round(all_class_correlation([[1.0, 5.0, 2.0], [2.0, 6.0, 3.0]], [[0.5, 0.7, 0.5], [0.5, 0.8, 0.6]]).r, 3)
    0.978
    """
    v, a = _tables(values, ap)
    return pearson(v.ravel(), a.ravel())


@dataclass(frozen=True)
class Normality:
    """The shape of a sample, and the D'Agostino-Pearson test of whether it is Gaussian."""

    skewness: float  # 0 for a Gaussian
    kurtosis: float  # excess: 0 for a Gaussian
    k2: float  # sum of squares of the normalized skewness and kurtosis
    p: float  # of K^2 under normality, chi-squared with 2 degrees of freedom
    n: int  # values


def normality(x: ArrayLike) -> Normality:
    """Skewness m3/m2^(3/2), excess kurtosis m4/m2^2 - 3 and the D'Agostino-Pearson test, K^2 = Z1^2 + Z2^2.

    x: (n,) numbers

    Z1 and Z2 are skewness and kurtosis transformed to standard normals (D'Agostino 1970, Anscombe and Glynn 1983). K^2
    and p are nan below 20 values, and all four numbers are nan for constant x.

    >>> found = normality([1.0, 2.0, 2.0, 3.0, 3.0, 3.0, 4.0, 4.0, 5.0, 20.0] * 3)
    >>> round(found.skewness, 3), round(found.kurtosis, 3), found.p < 0.001, found.n
    (2.449, 4.444, True, 30)
    """
    x = _array(x, "x")
    if x.ndim != 1:
        raise ValueError(f"x must have one dimension, got {x.shape}")
    if not np.isfinite(x).all():
        raise ValueError(f"x must be finite, got {x[~np.isfinite(x)][0]}")
    if not len(x):
        return normality_from_moments(0, 0.0, 0.0, 0.0, 0.0)
    d = x - x[0]  # constant x has exactly no deviations
    scale = float(np.abs(d).max()) or 1.0  # so that no power overflows
    d = d / scale
    d -= d.mean()
    return normality_from_moments(len(x), float(x.mean()) / scale, *(float((d**k).sum()) for k in (2, 3, 4)))


def normality_from_moments(n: int, mean: float, s2: float, s3: float, s4: float) -> Normality:
    """`normality` from sums of powers of the deviations.

    n, mean: number and mean of the values
    s2, s3, s4: sums of (x - mean)^2, ^3 and ^4

    >>> normality_from_moments(4, 0.0, 4.0, 0.0, 4.0).kurtosis
    -2.0
    """
    nan = math.nan
    # below this the deviations are rounding errors of the mean, as in SciPy
    if n < 2 or not s2 / n > (np.finfo(float).eps * mean) ** 2 or not 0 < (s2 / n) ** 2 < math.inf:
        return Normality(nan, nan, nan, nan, n)
    m2 = s2 / n
    skewness, kurtosis = s3 / n / m2**1.5, s4 / n / m2**2
    if n < 20 or not math.isfinite(skewness * kurtosis):
        return Normality(skewness, kurtosis - 3, nan, nan, n)
    k2 = _skewness_z(skewness, n) ** 2 + _kurtosis_z(kurtosis, n) ** 2
    return Normality(skewness, kurtosis - 3, k2, math.exp(-k2 / 2), n)


def _skewness_z(skewness: float, n: int) -> float:
    """Skewness of n Gaussian values as a standard normal variable: Johnson's S_U curve fitted to its moments."""
    y = skewness * math.sqrt((n + 1) * (n + 3) / (6 * (n - 2)))
    beta2 = 3 * (n * n + 27 * n - 70) * (n + 1) * (n + 3) / ((n - 2) * (n + 5) * (n + 7) * (n + 9))
    w2 = math.sqrt(2 * (beta2 - 1)) - 1
    return math.asinh(y * math.sqrt((w2 - 1) / 2)) / math.sqrt(math.log(w2) / 2)


def _kurtosis_z(kurtosis: float, n: int) -> float:
    """Kurtosis m4/m2^2 of n Gaussian values as a standard normal variable, by the cube root of Wilson and Hilferty."""
    mean = 3 * (n - 1) / (n + 1)
    sd = math.sqrt(24 * n * (n - 2) * (n - 3) / ((n + 3) * (n + 5))) / (n + 1)
    third = 6 * (n * n - 5 * n + 2) / ((n + 7) * (n + 9)) * math.sqrt(6 * (n + 3) * (n + 5) / (n * (n - 2) * (n - 3)))
    a = 6 + 8 / third * (2 / third + math.sqrt(1 + 4 / third**2))  # degrees of freedom
    base = 1 + (kurtosis - mean) / sd * math.sqrt(2 / (a - 4))
    root = math.copysign(((1 - 2 / a) / abs(base)) ** (1 / 3), base) if base else math.inf
    return (1 - 2 / (9 * a) - root) / math.sqrt(2 / (9 * a))


def t_two_sided(t: float, dof: float) -> float:
    """P(|T| >= |t|) for Student's t, with a relative error of about 1e-13 however small it is.

    t: a number
    dof: degrees of freedom

    It is the regularised incomplete beta function I_x(dof/2, 1/2) at x = dof/(dof + t^2).

    >>> round(t_two_sided(2.0, 10), 6)
    0.073388
    """
    if not dof > 0:
        raise ValueError(f"dof must be positive, got {dof}")
    if math.isnan(t):
        return math.nan
    ratio = abs(t) / math.sqrt(dof)
    if ratio == 0:
        return 1.0
    if math.isinf(ratio):
        return 0.0
    a = dof / 2
    # x = 1/(1 + ratio^2) and y = 1 - x through their logarithms: no overflow, and y keeps its digits when x is near 1
    log_y_over_x = 2 * math.log(ratio)
    log_x = -math.log1p(ratio * ratio) if ratio < 1e8 else -log_y_over_x
    log_y = log_x + log_y_over_x
    # x^a y^(1/2) / B(a, 1/2)
    log_front = a * log_x + log_y / 2 + _log_gamma_half_step(a) - math.log(math.pi) / 2
    if math.exp(log_y) > 1.5 / (a + 2.5):  # outside the bulk: the tail itself
        return min(1.0, math.exp(log_front - log_y - math.log(a)) * _tail_fraction(a, math.exp(-log_y_over_x)))
    return max(0.0, 1 - math.exp(log_front) * _bulk_series(a, math.exp(log_y)))


def t_cdf(t: float, dof: float) -> float:
    """P(T <= t) for Student's t; arguments as in `t_two_sided`.

    >>> t_cdf(0.0, 3), round(t_cdf(2.0, 10), 6)
    (0.5, 0.963306)
    """
    tail = t_two_sided(t, dof) / 2
    return tail if t < 0 else 1 - tail


@cache  # the same few degrees of freedom again and again
def t_quantile(q: float, dof: float) -> float:
    """The t with P(T <= t) = q for Student's t.

    q: a probability; dof: as in `t_two_sided`

    >>> round(t_quantile(0.975, 9), 6)
    2.262157
    """
    if not 0 <= q <= 1:
        raise ValueError(f"q must be in [0, 1], got {q}")
    if not dof > 0:
        raise ValueError(f"dof must be positive, got {dof}")
    if q in (0, 1):
        return math.copysign(math.inf, q - 0.5)
    if q == 0.5:
        return 0.0
    target = 2 * min(q, 1 - q)  # two-sided
    # Bisection of log t.
    low, high = -745.0, 1.0
    while t_two_sided(math.exp(high), dof) > target:
        low, high = high, 2 * high
        if high > 700:
            return math.copysign(math.inf, q - 0.5)
    while low < (s := (low + high) / 2) < high:
        if t_two_sided(math.exp(s), dof) > target:
            low = s
        else:
            high = s
    return math.copysign(math.exp(s), q - 0.5)


def _log_gamma_half_step(a: float) -> float:
    """log(Gamma(a + 1/2) / Gamma(a)): the difference of two lgammas would lose its digits for large a."""
    shift = 0.0
    while a < 20:
        shift += math.log(a / (a + 0.5))
        a += 1
    # The asymptotic series in 1/a; its next term is below 1e-17 here.
    i = 1 / (a * a)
    series = 1 / 8 - i * (1 / 192 - i * (1 / 640 - i * (17 / 14336 - i * (31 / 18432))))
    return shift + math.log(a) / 2 - series / a


def _tail_fraction(a: float, z: float) -> float:
    """2F1(1/2, 1; a + 1; -z) by Gauss's continued fraction 1/(1 + k_1 z/(1 + k_2 z/(1 + ...))), z = x/y = dof/t^2.

    I_x(a, 1/2) = x^a y^(1/2) / (a B(a, 1/2)) * 2F1(a + 1/2, 1; a + 1; x), and Pfaff's transformation turns the last
    factor into 2F1(1/2, 1; a + 1; -x/y) / y. Here every term is positive, so nothing cancels; the usual fraction in x
    loses its digits when x is next to 1, that is, for many degrees of freedom.
    """
    c, d, h = 1.0, 0.0, 1.0  # Lentz's method
    for k in range(1, 100_000):
        n, odd = divmod(k, 2)
        top = (n + 0.5) * (n + a) if odd else n * (n + a - 0.5)
        step = top * z / ((k + a - 1) * (k + a))
        d = 1 / (1 + step * d)
        c = 1 + step / c
        h *= c * d
        if abs(c * d - 1) < 3e-16:
            break
    return 1 / h


def _bulk_series(a: float, y: float) -> float:
    """2 * 2F1(a + 1/2, 1; 3/2; y): I_y(1/2, a) = x^a y^(1/2) / B(a, 1/2) times this. Every term is positive."""
    total = term = 2.0
    n = 0
    while term > 1e-17 * total:
        term *= (a + 0.5 + n) / (1.5 + n) * y
        total += term
        n += 1
    return total


def _array(value: ArrayLike, name: str) -> np.ndarray:
    if hasattr(value, "detach"):  # a torch tensor, without importing torch
        value = value.detach().cpu().double().numpy()
    try:
        return np.array(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be numbers, got {value!r:.60}") from None


def _pairs(a: ArrayLike, b: ArrayLike, name_a: str, name_b: str) -> tuple[np.ndarray, np.ndarray, int]:
    x, y = _array(a, name_a), _array(b, name_b)
    if x.ndim != 1 or y.ndim != 1 or len(x) != len(y):
        raise ValueError(f"{name_a} and {name_b} must be equally long lists of numbers, got {x.shape} and {y.shape}")
    for name, value in ((name_a, x), (name_b, y)):
        if np.isinf(value).any():
            raise ValueError(f"{name} must be finite (nan marks a missing value), got {value[np.isinf(value)][0]}")
    known = ~(np.isnan(x) | np.isnan(y))
    return x[known], y[known], int((~known).sum())


def _tables(values: ArrayLike, ap: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    v, a = _array(values, "values"), _array(ap, "ap")
    if v.ndim != 2 or v.shape != a.shape:
        raise ValueError(f"values and ap must both be (settings, classes), got {v.shape} and {a.shape}")
    return v, a


def _unit(x: np.ndarray) -> np.ndarray:
    x = x - x.mean()
    x = x / np.abs(x).max()
    return x / math.sqrt(float(x @ x))


def _check_fraction(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{name} must be between 0 and 1, got {value}")


def _check_sizes(sd: float, effect: float, alpha: float) -> None:
    _check_fraction("alpha", alpha)
    for name, value in (("sd", sd), ("effect", effect)):
        if not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value}")
    if sd < 0:
        raise ValueError(f"sd must not be negative, got {sd}")
