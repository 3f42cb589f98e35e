"""Bootstrap intervals against SciPy's, and their coverage."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from gsoftmax import bootstrap
from gsoftmax.bootstrap import FEWEST, bca, class_intervals
from gsoftmax.geometry import ClassStatistics


def sample(n=80, c=4, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, c)) * [1.0, 2.0, 0.5, 1.5][:c] + [3.0, 0.0, 1.0, -1.0][:c]


def measures(x, own):
    """By the definitions, one resample at a time."""
    mean, std = x.mean(0), x.std(0)
    kl = [
        np.log(b / a) + (a**2 + (u - v) ** 2) / (2 * b**2) - 0.5
        for j in range(x.shape[1])
        if j != own
        for u, a, v, b in [(mean[own], std[own], mean[j], std[j]), (mean[j], std[j], mean[own], std[own])]
    ]
    separability = sum(kl) / (2 * (x.shape[1] - 1))
    return 1 / std[own], separability, separability / std[own]


@pytest.mark.parametrize("k", range(3))
def test_bca_is_that_of_scipy_for_the_same_resamples(k):
    x = sample(30)

    def statistic(rows):
        return measures(x[rows], 1)[k]

    expected = scipy.stats.bootstrap(
        (np.arange(30),), statistic, n_resamples=400, method="BCa", vectorized=False, random_state=0
    )
    jackknife = np.array([statistic(np.delete(np.arange(30), i)) for i in range(30)])
    found = bca(statistic(np.arange(30)), expected.bootstrap_distribution, jackknife)
    np.testing.assert_allclose(found, expected.confidence_interval, rtol=1e-12)


@pytest.mark.parametrize("numbers", [2**22, 80 * 64])  # in one block, and 64 resamples at a time
def test_intervals_are_those_of_scipy_up_to_the_draws(monkeypatch, numbers):
    monkeypatch.setattr(bootstrap, "_NUMBERS", numbers)
    x = sample()
    found = class_intervals(x + 1e6, 0, resamples=4000)  # far from zero
    for k in range(3):
        expected = scipy.stats.bootstrap(
            (np.arange(80),),
            lambda rows, k=k: measures(x[rows], 0)[k],
            n_resamples=2000,
            method="BCa",
            vectorized=False,
            random_state=1,
        ).confidence_interval
        width = expected.high - expected.low
        np.testing.assert_allclose(found[k], expected, atol=0.08 * width)  # Monte Carlo error of the ends


def test_the_estimate_is_inside_and_the_draws_are_fixed():
    x = sample(200)
    found = class_intervals(x, 2)
    statistics = ClassStatistics(4).update(x, np.full(200, 2))
    for (low, high), value in zip(found, (getattr(statistics, m)()[2] for m in bootstrap.MEASURES), strict=True):
        assert low < value < high
    np.testing.assert_array_equal(found, class_intervals(x, 2))
    assert (found != class_intervals(x, 2, seed=1)).all()


def test_what_has_no_interval_is_nan():
    x = sample(FEWEST)
    assert np.isnan(class_intervals(x[1:], 0)).all() and np.isfinite(class_intervals(x, 0)).all()
    constant = x.copy()
    constant[:, 0] = 5
    assert np.isnan(class_intervals(constant, 0)).all()
    alone = class_intervals(x[:, :1], 0)
    assert np.isfinite(alone[0]).all() and np.isnan(alone[1:]).all()


def test_intervals_cover():
    """95 % intervals of compactness and separability of known Gaussians, in 300 samples."""
    truth = measures_of_gaussians()
    covered = np.zeros(3)
    for seed in range(300):
        low, high = class_intervals(sample(60, seed=seed), 0, resamples=400).T
        covered += (low < truth) & (truth < high)
    assert (covered > 0.89 * 300).all(), covered / 300


def measures_of_gaussians():
    mean, std = np.array([3.0, 0.0, 1.0, -1.0]), np.array([1.0, 2.0, 0.5, 1.5])
    v, d = std**2, (mean - mean[0]) ** 2
    separability = ((v - 1) ** 2 / v + d * (1 / v + 1))[1:].mean() / 4
    return np.array([1.0, separability, separability])
