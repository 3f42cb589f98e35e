"""Significance against SciPy, and against the definitions where SciPy has no say."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from gsoftmax import significance
from gsoftmax.significance import (
    holm,
    mcnemar,
    normality,
    paired,
    paired_over_images,
    paper_correlations,
    pearson,
    required_n,
    t_cdf,
    t_quantile,
    t_two_sided,
    wilson,
)

SETTINGS = settings(deadline=None, max_examples=50)
DOFS = [0.5, 1, 2, 3, 4, 7, 10, 29, 79, 100, 999, 1e4, 1e6]


# -- Student's distribution -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dof", DOFS)
def test_tails(dof):
    smallest = 1.0
    for t in [0.1, 0.5, 1, 1.5, 1.7, 1.72, 1.74, 1.8, 2, 3, 5, 8, 13, 20, 36, 100, 1e4, 1e9]:
        expected = 2 * stats.t.sf(t, dof)
        if expected > 1e-290:
            assert t_two_sided(t, dof) == pytest.approx(expected, rel=2e-12, abs=0), t
            assert t_two_sided(-t, dof) == t_two_sided(t, dof)
            assert t_cdf(-t, dof) == pytest.approx(expected / 2, rel=2e-12, abs=0)
            assert t_cdf(t, dof) == pytest.approx(stats.t.cdf(t, dof), rel=1e-14)
            smallest = min(smallest, expected)
    assert dof < 7 or smallest < 1e-40  # the far tail was among them
    assert t_two_sided(0, dof) == 1
    assert t_two_sided(math.inf, dof) == 0 and math.isnan(t_two_sided(math.nan, dof))


@pytest.mark.parametrize("dof", [1, 3, 4, 30, 200])
def test_tails_to_many_digits(dof):
    half = mpmath.mpf(1) / 2
    with mpmath.workdps(50):
        for t in [1e-8, 1e-3, 0.1, 1, 1.7, 1.8, 3, 8, 30, 1e4]:
            x = dof / (dof + mpmath.mpf(t) ** 2)
            expected = mpmath.betainc(dof * half, half, 0, x, regularized=True)
            if expected > 1e-290:
                assert abs(t_two_sided(t, dof) / expected - 1) < 1e-12, t


@pytest.mark.parametrize("a", [0.25, 0.5, 1, 7.5, 19.5, 20, 20.5, 33, 1e3, 1e7])
def test_half_a_step_of_gamma(a):
    with mpmath.workdps(50):
        expected = mpmath.loggamma(mpmath.mpf(a) + mpmath.mpf(1) / 2) - mpmath.loggamma(mpmath.mpf(a))
        assert abs(significance._log_gamma_half_step(a) - expected) < 4e-15


def test_no_overflow_far_out():
    assert t_two_sided(1e200, 1) == pytest.approx(2 / (math.pi * 1e200), rel=1e-12, abs=0)
    assert t_two_sided(1e200, 100) == 0


@pytest.mark.parametrize("dof", DOFS)
def test_quantiles(dof):
    for q in [1e-40, 1e-12, 1e-5, 0.001, 0.025, 0.1, 0.3, 0.45, 0.6, 0.9, 0.975, 0.995, 0.999999]:
        t = t_quantile(q, dof)
        assert t == pytest.approx(stats.t.ppf(q, dof), rel=1e-11), q
        assert t_cdf(t, dof) == pytest.approx(q, rel=1e-12, abs=0), q
    assert t_quantile(0.5, dof) == 0 and t_quantile(1, dof) == math.inf and t_quantile(0, dof) == -math.inf


# -- paired test ------------------------------------------------------------------------------------------------------

series = st.integers(2, 30).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(-1000, 1000).map(lambda i: i / 8), min_size=n, max_size=n)] * 2)
)


@SETTINGS
@given(series, st.sampled_from([0.5, 0.95, 0.999]))
def test_paired_is_scipys(pair, confidence):
    a, b = map(np.array, pair)
    result = paired(a, b, confidence)
    assert result.difference == pytest.approx((b - a).mean(), abs=1e-12)
    if np.ptp(b - a) == 0:
        return
    theirs = stats.ttest_rel(b, a)
    interval = theirs.confidence_interval(confidence)
    assert result.t == pytest.approx(theirs.statistic, rel=1e-10, abs=1e-12)
    assert result.p == pytest.approx(theirs.pvalue, rel=1e-10)
    assert (result.low, result.high) == pytest.approx((interval.low, interval.high), rel=1e-9, abs=1e-9)
    assert result.n == len(a) and result.sd == pytest.approx((b - a).std(ddof=1), rel=1e-12)


def test_paired_with_overwhelming_evidence_keeps_its_digits():
    rng = np.random.default_rng(0)
    a = rng.normal(size=80)
    b = a + 1 + 0.01 * rng.normal(size=80)
    result, theirs = paired(a, b), stats.ttest_rel(b, a)
    assert theirs.pvalue < 1e-100 and result.p == pytest.approx(theirs.pvalue, rel=1e-9, abs=0)


def test_paired_is_the_difference_from_the_first():
    assert paired([1.0, 2.0, 3.0], [2.0, 2.5, 5.0]).difference > 0
    assert paired([2.0, 2.5, 5.0], [1.0, 2.0, 3.0]).t < 0


def test_paired_edges():
    assert paired([1, 2], [1, 2]) == significance.Paired(0, 0, 0, 0, 1, 2, 0)
    assert paired([1, 2, 3], [3, 4, 5]) == significance.Paired(2, 2, 2, math.inf, 0, 3, 0)
    assert paired([3, 4], [1, 2]).t == -math.inf
    one = paired([1.0], [3.0])
    assert one.difference == 2 and one.n == 1 and all(math.isnan(v) for v in (one.low, one.high, one.t, one.p, one.sd))
    none = paired([], [])
    assert none.n == 0 and math.isnan(none.difference) and math.isnan(none.p)
    holes = paired([1.0, math.nan, 2.0, 4.0], torch.tensor([2.0, 1.0, float("nan"), 7.0]))
    assert (holes.n, holes.dropped) == (2, 2) and holes.difference == 2


# -- Holm, power ------------------------------------------------------------------------------------------------------


@SETTINGS
@given(st.lists(st.floats(0, 1), max_size=8), st.floats(0.001, 0.5))
def test_holm_rejects_what_the_step_down_procedure_rejects(p, alpha):
    adjusted = holm(p)
    rejected = [False] * len(p)
    for k, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        if p[i] * (len(p) - k) > alpha:
            break
        rejected[i] = True
    assert (adjusted <= alpha).tolist() == rejected
    assert all(0 <= raw <= new <= 1 for raw, new in zip(p, adjusted, strict=True))


@pytest.mark.parametrize("runs", [1, 3])
def test_over_images_is_scipys_t_interval_and_exact_permutation_test(runs):
    rng = np.random.default_rng(runs)
    for _ in range(5):
        a, b = rng.integers(0, runs + 1, (2, 12))
        found, d = paired_over_images(a, b, runs), (b - a) / runs
        exact = stats.permutation_test((d,), np.mean, permutation_type="samples", n_resamples=np.inf)
        interval = stats.ttest_rel(b / runs, a / runs).confidence_interval()
        assert found.p == pytest.approx(exact.pvalue, abs=1e-12) and found.difference == pytest.approx(d.mean())
        assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    many = rng.integers(0, runs + 1, (2, 40_000))
    assert paired_over_images(*many, runs).p == pytest.approx(stats.ttest_rel(*many).pvalue, abs=0.01)


def test_over_images_with_one_run_is_mcnemars_test():
    for first, second in ((3, 11), (0, 6), (40, 17), (5, 5), (0, 0)):
        a, b = np.zeros(200), np.zeros(200)
        a[:first], b[first : first + second] = 1, 1
        assert paired_over_images(a, b, 1).p == pytest.approx(mcnemar(first, second).p, abs=1e-12)
    halves = paired_over_images([0, 2, 0, 4], [2, 2, 4, 0], runs=2, labels=2)  # (0.5, 0, 1, -1)
    assert halves.difference == pytest.approx(0.125)
    with pytest.raises(ValueError, match="whole numbers of 1 or more runs"):
        paired_over_images([0.5], [1.0], 2)


def test_holm_skips_nan():
    assert holm([0.01, math.nan, 0.02]).tolist()[0::2] == [0.02, 0.02] and math.isnan(holm([math.nan])[0])


def exact_power(n, sd, effect, alpha):
    # the square of a noncentral t is a noncentral F
    critical, shift = stats.t.ppf(1 - alpha / 2, n - 1), effect / sd * math.sqrt(n)
    return stats.ncf.sf(critical**2, 1, n - 1, shift**2)


@pytest.mark.parametrize("alpha", [0.05, 0.001])
@pytest.mark.parametrize("n", [2, 3, 5, 8, 30, 200])
def test_power_is_that_of_the_noncentral_t(n, alpha):
    assert significance.power(n, 1.0, 0.0, alpha) == pytest.approx(alpha, rel=1e-9)
    for effect in (0.05, 0.3, 1.0, 2.0):
        found = significance.power(n, 1.0, effect, alpha)
        assert found == pytest.approx(exact_power(n, 1.0, effect, alpha), abs=1e-9)
        assert significance.power(n, 2.0, -2 * effect, alpha) == pytest.approx(found)


@pytest.mark.parametrize("wanted", [0.03, 0.5, 0.8, 0.99])
@pytest.mark.parametrize("effect", [0.1, 0.5, 1.0, 5.0])
def test_required_n_is_the_smallest_that_suffices(effect, wanted):
    n = required_n(1.0, effect, power=wanted)
    assert exact_power(n, 1.0, effect, 0.05) >= wanted
    assert n == 2 or exact_power(n - 1, 1.0, effect, 0.05) < wanted
    assert required_n(10.0, -10 * effect, power=wanted) == n


def test_required_n_by_simulation():
    n = required_n(sd=0.3, effect=0.25)
    d = np.random.default_rng(0).normal(0.25, 0.3, size=(4000, n))
    found = np.mean(stats.ttest_1samp(d, 0, axis=1).pvalue <= 0.05)
    assert 0.77 < found < 0.87


def test_required_n_extremes():
    assert required_n(0.0, 1.0) == 2
    assert required_n(1.0, 1e-5) == pytest.approx((1.959964 + 0.841621) ** 2 * 1e10, rel=1e-5)


# -- correlations -----------------------------------------------------------------------------------------------------


@SETTINGS
@given(series, st.sampled_from([0.8, 0.95]))
def test_pearson_is_scipys(pair, confidence):
    a, b = map(np.array, pair)
    result = pearson(a, b, confidence)
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        assert math.isnan(result.r) and math.isnan(result.p) and result.n == len(a)
        return
    theirs = stats.pearsonr(a, b)
    assert result.r == pytest.approx(theirs.statistic, abs=1e-12)
    # where 1 - r^2 is all rounding, p is too; SciPy computes it the lossy way
    assert result.p == pytest.approx(theirs.pvalue, rel=1e-8 / max(1e-6, 1 - abs(result.r)), abs=1e-12)
    if len(a) > 3 and abs(result.r) < 1 - 1e-12:
        interval = theirs.confidence_interval(confidence)
        assert (result.low, result.high) == pytest.approx((interval.low, interval.high), abs=1e-6)


def test_pearson_next_to_one_keeps_its_digits():
    x = np.arange(30.0)
    y = x + 1e-7 * np.where(np.arange(30) % 2, 1, -1) * (1 + np.arange(30) % 3)
    result = pearson(x, y)
    with mpmath.workdps(60):
        u, v = ([mpmath.mpf(float(value)) for value in values] for values in (x, y))
        mu, mv = mpmath.fsum(u) / 30, mpmath.fsum(v) / 30
        dot = mpmath.fsum((p - mu) * (q - mv) for p, q in zip(u, v, strict=True))
        squares = mpmath.fsum((p - mu) ** 2 for p in u) * mpmath.fsum((q - mv) ** 2 for q in v)
        rest = 1 - dot**2 / squares
        expected = mpmath.betainc(14, mpmath.mpf(1) / 2, 0, rest, regularized=True)
        assert 1e-250 < expected < 1e-150
        assert abs(result.p / expected - 1) < 1e-5


def test_pearson_edges():
    assert pearson([1, 2], [5, 3]) == significance.Correlation(-1, 1, 2, -1, 1)
    assert pearson([1, 2, 3], [2, 4, 6]).p == pytest.approx(0, abs=1e-7)
    assert pearson([1, 2, 3, 4], [2, 4, 6, 8]).r == 1
    assert (pearson([1, 2, 3], [1, 3, 2]).low, pearson([1, 2, 3], [1, 3, 2]).high) == (-1, 1)
    assert pearson([1, math.nan, 2, 3, 5], [1, 2, 2, math.nan, 4]).n == 3
    assert pearson([1.0], [1.0]).n == 1 and math.isnan(pearson([], []).r)
    assert math.isnan(pearson([0.1, 0.1, 0.1], [1, 2, 3]).r)


def test_paper_correlation_picks_the_best_class_on_average():
    rng = np.random.default_rng(0)
    values, ap = rng.normal(size=(5, 6)), rng.random((5, 6))
    values[:, 4] += 3
    values[2, 0] = 9  # the largest of all, but not on average
    values[:, 1] += 50  # larger still, but not known in all settings
    ap[0, 1] = math.nan
    result = paper_correlations(values, ap)
    theirs = stats.pearsonr(values[:, 4], ap[:, 4])
    assert result.best_class == 4 and result.n == 5
    assert (result.r, result.p) == pytest.approx((theirs.statistic, theirs.pvalue))
    smallest = paper_correlations(torch.from_numpy(-values), torch.from_numpy(ap), largest=False)
    assert smallest.best_class == 4 and smallest.r == pytest.approx(-result.r)
    everything = significance.all_class_correlation(values, ap)
    known = ~np.isnan(ap)
    theirs = stats.pearsonr(values[known], ap[known])
    assert everything.n == 29 and (everything.r, everything.p) == pytest.approx((theirs.statistic, theirs.pvalue))


def test_the_papers_own_table_is_consistent_with_five_settings():
    # (rho, p) pairs printed for COCO and NUS-WIDE: p follows from rho when n is 5
    for rho, p in [(0.9472, 0.0144), (0.9635, 0.0083), (0.9791, 0.0036), (0.9045, 0.0349), (0.9702, 0.0062)]:
        t = rho * math.sqrt(3 / (1 - rho**2))
        assert t_two_sided(t, 3) == pytest.approx(p, abs=1e-4)


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: paired([1, 2], [1]), ValueError, r"a and b must be equally long .*got \(2,\) and \(1,\)"),
        (lambda: paired([[1]], [[2]]), ValueError, "a and b must be equally long"),
        (lambda: paired([1, math.inf], [1, 2]), ValueError, "a must be finite .*got inf"),
        (lambda: paired(["x"], [1]), TypeError, "a must be numbers"),
        (lambda: paired([1], [1], confidence=95), ValueError, "confidence must be between 0 and 1, got 95"),
        (lambda: holm([0.5, 1.5]), ValueError, r"pvalues must be in \[0, 1\], got 1.5"),
        (lambda: holm([[0.5]]), ValueError, "pvalues must have one dimension"),
        (lambda: paper_correlations([[1.0]], [[1.0, 2.0]]), ValueError, r"values and ap must both be .*\(1, 1\) and"),
        (lambda: paper_correlations([[math.nan]], [[1.0]]), ValueError, "a class without nan"),
        (lambda: required_n(1.0, 0.0), ValueError, "effect must not be 0"),
        (lambda: required_n(-1.0, 1.0), ValueError, "sd must not be negative, got -1.0"),
        (lambda: required_n(1.0, 1.0, power=1.0), ValueError, "power must be between 0 and 1, got 1.0"),
        (lambda: required_n(math.nan, 1.0), ValueError, "sd must be a finite number, got nan"),
        (lambda: significance.power(1, 1.0, 1.0), ValueError, "n must be a whole number of at least 2 pairs, got 1"),
        (lambda: t_two_sided(1.0, 0), ValueError, "dof must be positive, got 0"),
        (lambda: t_quantile(1.5, 3), ValueError, r"q must be in \[0, 1\], got 1.5"),
    ],
)
def test_mistakes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


# -- normality --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [20, 21, 35, 100, 5000])
@pytest.mark.parametrize("law", ["normal", "exponential", "uniform", "standard_cauchy"])
def test_normality_is_the_omnibus_test_of_scipy(n, law):
    for seed, scale, shift in ((0, 1.0, 0.0), (1, 1e-3, -7.0), (2, 1e150, 0.0)):
        x = scale * getattr(np.random.default_rng(seed), law)(size=n) + shift
        found, expected = normality(x), stats.normaltest(x / scale)
        assert found.n == n and found.k2 == pytest.approx(expected.statistic, rel=1e-6)
        assert found.p == pytest.approx(expected.pvalue, rel=1e-5, abs=1e-300)
        assert found.skewness == pytest.approx(stats.skew(x / scale), rel=1e-6, abs=1e-9)
        assert found.kurtosis == pytest.approx(stats.kurtosis(x / scale), rel=1e-6, abs=1e-9)


def test_normality_rejects_a_gaussian_as_often_as_it_says():
    rng = np.random.default_rng(0)
    rejected = np.mean([normality(rng.normal(size=50)).p < 0.05 for _ in range(4000)])
    assert rejected == pytest.approx(
        stats.normaltest(rng.normal(size=(50, 4000))).pvalue.__lt__(0.05).mean(), abs=0.015
    )


@pytest.mark.parametrize("x", [[], [1.0], [3.0] * 30, [1e-300] * 25])
def test_normality_of_constants_is_unknown(x):
    found = normality(x)
    assert found.n == len(x) and all(math.isnan(v) for v in (found.skewness, found.kurtosis, found.k2, found.p))


def test_normality_of_few_or_bad_values():
    found = normality(np.arange(19.0))
    assert math.isnan(found.p) and found.kurtosis == pytest.approx(stats.kurtosis(np.arange(19.0)))
    with pytest.raises(ValueError, match="x must be finite, got nan"):
        normality([1.0, math.nan])
    with pytest.raises(ValueError, match=r"x must have one dimension, got \(2, 2\)"):
        normality(np.ones((2, 2)))


# -- proportions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("confidence", [0.95, 0.8])
def test_wilson_is_scipys(confidence):
    k, n = np.array([0, 3, 10, 57, 0]), np.array([10, 10, 10, 180, 0])
    found = wilson(k, n, confidence)
    for ends, a, b in zip(found[:-1], k.tolist(), n.tolist(), strict=False):
        expected = stats.binomtest(a, b).proportion_ci(confidence, method="wilson")
        np.testing.assert_allclose(ends, (expected.low, expected.high), rtol=1e-12, atol=1e-15)
    assert np.isnan(found[-1]).all()
