"""Measures of the features against two-pass NumPy formulas and scikit-learn."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import calinski_harabasz_score
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.neighbors import NearestCentroid

from gsoftmax import collapse
from gsoftmax.collapse import FeatureStatistics, NearestMean, effective_rank, nearest_mean


def features(n=600, c=5, d=12, seed=0, offset=100.0):
    """Unequal classes, correlated features far from zero, and a classifier."""
    rng = np.random.default_rng(seed)
    y = rng.choice(c, n, p=np.arange(1, c + 1) / np.arange(1, c + 1).sum())
    h = (rng.normal(size=(n, d)) + 2 * rng.normal(size=(c, d))[y]) @ rng.normal(size=(d, d)) + offset
    return h, y, rng.normal(size=(c, d))


def oracle(h, y, w=None):
    """The definitions in two passes over all features, with whole matrices."""
    names = np.unique(y)
    means = np.stack([h[y == c].mean(0) for c in names])
    m, n = len(names), len(h)
    centred = means - means.mean(0)
    within = sum((h[y == c] - h[y == c].mean(0)).T @ (h[y == c] - h[y == c].mean(0)) for c in names) / n
    between = centred.T @ centred / m
    off = ~np.eye(m, dtype=bool)

    def frame(rows):
        norms, cosines = np.linalg.norm(rows, axis=1), cosine_similarity(rows)[off]
        return norms.std() / norms.mean(), cosines.std(), np.abs(cosines + 1 / (m - 1)).mean()

    norms, angles, simplex = frame(centred)
    s = np.linalg.svd(h - h.mean(0), compute_uv=False)
    s = s[s > 1e-12 * s.max()] / s.sum()
    found = {
        "classes": m,
        "nc1": np.trace(within @ np.linalg.pinv(between, rcond=1e-10, hermitian=True)) / m,
        **{"nc2_norms": norms, "nc2_angles": angles, "nc2_simplex": simplex},
        "fisher": calinski_harabasz_score(h, y) * (m - 1) / (n - m),
        "effective_rank": np.exp(-(s * np.log(s)).sum()),
    }
    if w is not None:
        w = w[names]
        a, _, b = frame(w)
        nc3 = np.linalg.norm(w / np.linalg.norm(w) - centred / np.linalg.norm(centred))
        found |= {"w_norms": a, "w_simplex": b, "nc3": nc3}
    return found


def differences(found, expected):
    """Relative difference of every measure."""
    return {key: abs(getattr(found, key) / value - 1) for key, value in expected.items()}


@pytest.mark.parametrize("d", [2, 12, 40])  # fewer, and more, features than classes
@pytest.mark.parametrize("sizes", [[600], [1, 2, 597], [200, 200, 200]])
def test_measures_are_those_of_whole_matrices(d, sizes):
    h, y, w = features(d=d)
    statistics, at = FeatureStatistics(5, d), 0
    for size in sizes:
        statistics.update(h[at : at + size], y[at : at + size])
        at += size
    assert max(differences(statistics.measures(w), oracle(h, y, w)).values()) < 1e-9


def test_merging_and_classes_without_examples(monkeypatch):
    monkeypatch.setattr(collapse, "_NUMBERS", 12 * 7)  # seven rows at a time
    monkeypatch.setattr(collapse, "_PAIRS", 4)  # one row of cosines at a time
    h, y, w = features()
    y[y == 2] = -100  # ignored
    y[y == 4] = 3  # no examples
    used = y != -100
    parts = [FeatureStatistics(5, 12).update(torch.from_numpy(h[k::3]), torch.from_numpy(y[k::3])) for k in range(3)]
    whole = parts[0].merge(parts[1]).merge(parts[2])
    assert whole.count.tolist() == np.bincount(y[used], minlength=5).tolist()
    assert max(differences(whole.measures(w), oracle(h[used], y[used], w)).values()) < 1e-9
    nearest = NearestMean(whole).update(h[used], y[used], y[used])
    assert nearest.accuracy == NearestCentroid().fit(h[used], y[used]).score(h[used], y[used])
    assert nearest.nc4 == pytest.approx(1 - nearest.accuracy)


@pytest.mark.parametrize("d", [12, 40])
def test_nearest_means_are_those_of_scikit_learn(d):
    h, y, w = features(d=d, offset=1e4)
    centroids = NearestCentroid().fit(h, y)
    np.testing.assert_array_equal(nearest_mean(h, centroids.centroids_).numpy(), centroids.predict(h))
    predicted = (h @ w.T).argmax(1)
    found = NearestMean(FeatureStatistics(5, d).update(h, y)).update(h[:99], y[:99], predicted[:99])
    found.update(h[99:], y[99:], predicted[99:])
    assert found.accuracy == pytest.approx(centroids.score(h, y), abs=1e-12)
    assert found.nc4 == pytest.approx((centroids.predict(h) != predicted).mean(), abs=1e-12)


def test_views_are_those_of_scikit_learn_up_to_sign():
    h, y, _ = features()
    statistics = FeatureStatistics(5, 12).update(h, y)
    pca = PCA(2).fit(h)
    np.testing.assert_allclose(
        statistics.pca().project(h).abs().numpy(), np.abs(pca.transform(h)), rtol=1e-6, atol=1e-8
    )
    np.testing.assert_allclose(statistics.pca().share, pca.explained_variance_ratio_, rtol=1e-9)
    lda = LinearDiscriminantAnalysis(solver="eigen", n_components=2).fit(h, y)
    expected = lda.transform(h) - lda.transform(h).mean(0)
    found = statistics.lda()
    np.testing.assert_allclose(found.project(h).abs().numpy(), np.abs(expected), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found.share, lda.explained_variance_ratio_, rtol=1e-9)
    for view in (found, statistics.pca()):
        assert (view.axes.max(1).values == view.axes.abs().max(1).values).all()  # the sign is fixed


def test_views_of_features_without_full_rank():
    h, y, _ = features(d=6)
    wide = np.hstack([h, h[:, :3], np.zeros((600, 2))])  # repeated and dead features change no separation
    plain, more = FeatureStatistics(5, 6).update(h, y).lda(), FeatureStatistics(5, 11).update(wide, y).lda()
    np.testing.assert_allclose(plain.project(h).abs().numpy(), more.project(wide).abs().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(plain.share, more.share, rtol=1e-7)


def test_full_collapse_is_zero():
    simplex = np.eye(4) - 0.25
    y = np.tile(np.arange(4), 10)
    found = FeatureStatistics(4, 4).update(simplex[y], y).measures(3 * simplex)
    for key in ("nc1", "nc2_norms", "nc2_angles", "nc2_simplex", "nc3", "w_norms", "w_simplex"):
        assert getattr(found, key) == pytest.approx(0, abs=1e-7), key
    assert found.fisher > 1e15 and found.effective_rank == pytest.approx(3)
    assert FeatureStatistics(4, 4).update(simplex[y], y).measures(-simplex).nc3 == pytest.approx(2)


def test_one_class_and_wrong_input():
    h, y, w = features()
    one = FeatureStatistics(5, 12).update(h, np.zeros(600, int)).measures(w)
    assert np.isnan([one.nc1, one.nc2_norms, one.nc3, one.fisher]).all() and one.effective_rank > 1
    statistics = FeatureStatistics(5, 12)
    for call, words in (
        (lambda: statistics.update(h[:, :3], y), r"h must be \(rows, 12\)"),
        (lambda: statistics.update(h, y[:-1]), "y must be 600 class indices"),
        (lambda: statistics.update(h, y + 1), "y must be in 0 to 4, got 1 to 5"),
        (lambda: statistics.update(h * np.nan, y), "h must be finite"),
        (lambda: statistics.measures(), "no features yet"),
        (lambda: statistics.merge(FeatureStatistics(5, 3)), "other must have 5 classes and 12 features, got 5 and 3"),
        (lambda: FeatureStatistics(5, 12).update(h, y).measures(w.T), r"W must be \(rows, 12\)"),
        (lambda: FeatureStatistics(5, 12).update(h, np.minimum(y, 1)).lda(), "at least 3 classes, got 2"),
        (lambda: FeatureStatistics(0, 12), "num_classes must be a positive integer, got 0"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_effective_rank_of_known_spectra():
    assert effective_rank([3.0, 3.0, 0.0]) == pytest.approx(2)
    assert effective_rank([2.0, 1.0]) == pytest.approx(np.exp(-(2 / 3 * np.log(2 / 3) + 1 / 3 * np.log(1 / 3))))


def test_measures_of_a_trained_classifier():
    x, y = load_digits(return_X_y=True)
    x = x / 16
    model = LogisticRegression(max_iter=300).fit(x, y)
    found = FeatureStatistics(10, 64).update(x[:1000], y[:1000]).update(x[1000:], y[1000:]).measures(model.coef_)
    expected = oracle(x, y, model.coef_)
    assert set(expected) == {field.name for field in dataclasses.fields(found)}
    assert max(differences(found, expected).values()) < 1e-8
