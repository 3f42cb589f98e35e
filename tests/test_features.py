"""Features in files of outputs: measures against scikit-learn and NumPy, views, guardrails, several models."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from scipy.special import expit
from scipy.stats import binomtest, ttest_rel
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.metrics import calinski_harabasz_score, cohen_kappa_score
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.neighbors import NearestCentroid
from test_report import marks

from gsoftmax import analyze as room
from gsoftmax import cli, evaluation, report, summary
from gsoftmax.analyze import analyze, compare_models
from gsoftmax.config import Config
from gsoftmax.report import figures
from gsoftmax.tables import p_value
from gsoftmax.train import train


def made(n=400, c=4, d=6, seed=0):
    """h, W, b and y; x = h W^T + b."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, c, n)
    h = rng.normal(size=(n, d)) + 3 * rng.normal(size=(c, d))[y] + 50
    means = np.stack([h[y == k].mean(0) for k in range(c)])
    return h, means - means.mean(0), -(means**2).sum(1) / 2, y  # the nearest class mean


def oracle(h, w, y, predicted):
    """By the definitions, with whole matrices and scikit-learn."""
    m, n = len(w), len(h)
    means = np.stack([h[y == c].mean(0) for c in range(m)])
    centred, residual, off = means - means.mean(0), h - means[y], ~np.eye(m, dtype=bool)
    centroids, s = NearestCentroid().fit(h, y), np.linalg.svd(h - h.mean(0), compute_uv=False)
    s = s[s > 1e-12 * s.max()] / s.sum()

    def frame(rows):
        norms, cosines = np.linalg.norm(rows, axis=1), cosine_similarity(rows)[off]
        return norms.std() / norms.mean(), cosines.std(), np.abs(cosines + 1 / (m - 1)).mean()

    between = np.linalg.pinv(centred.T @ centred / m, rcond=1e-10, hermitian=True)
    return {
        "nc1": np.trace(residual.T @ residual / n @ between) / m,
        **dict(zip(("nc2_norms", "nc2_angles", "nc2_simplex"), frame(centred), strict=True)),
        "nc3": np.linalg.norm(w / np.linalg.norm(w) - centred / np.linalg.norm(centred)),
        "nc4": (centroids.predict(h) != predicted).mean(),
        "ncm_error": 1 - centroids.score(h, y),
        **dict(zip(("w_norms", "w_simplex"), (frame(w)[0], frame(w)[2]), strict=True)),
        "fisher": calinski_harabasz_score(h, y) * (m - 1) / (n - m),
        "effective_rank": np.exp(-(s * np.log(s)).sum()),
    }


@pytest.fixture(scope="module", params=["softmax", "gsoftmax"])
def trained(request, tmp_path_factory):
    """The outputs of a model trained on the digits, with its features."""
    folder = tmp_path_factory.mktemp(request.param)
    train(Config(head=request.param, epochs=3, threads=1), folder / "run")
    assert cli.main(["evaluate", str(folder / "run"), "--features", "--out", str(folder / "features")]) == 0
    return folder / "features"


@pytest.mark.parametrize("block", [1 << 22, 640])
def test_measures_of_two_trained_models_are_those_of_the_oracle(trained, monkeypatch, block):
    monkeypatch.setattr(room, "_BLOCK", block)
    arrays = load_file(trained / "outputs.safetensors")
    h, w, y = (arrays[k] for k in ("h", "W", "y"))
    h, w = h.astype(np.float64), w.astype(np.float64)
    np.testing.assert_allclose(h @ w.T + arrays["b"], arrays["x"], atol=1e-4)
    found = analyze(trained).features.metrics
    expected = oracle(h, w, y, arrays["p"].argmax(1))
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key


def test_views_of_a_trained_model_are_those_of_scikit_learn(trained, monkeypatch):
    monkeypatch.setattr(room, "_SHOWN", 70)
    arrays = load_file(trained / "outputs.safetensors")
    h, y = arrays["h"].astype(np.float64), arrays["y"]
    pca, lda = analyze(trained).views
    assert (pca.name, lda.name, pca.of, len(pca.points), pca.means.shape) == ("PCA", "LDA", "h", 70, (10, 2))
    first, second = PCA(2).fit(h), LinearDiscriminantAnalysis(solver="eigen", n_components=2).fit(h, y)
    offset = second.transform(h).mean(0)
    for view, points in ((pca, first.transform(h)), (lda, second.transform(h) - offset)):
        points = points * np.sign((points * points[:1]).sum(0))
        shown = np.abs(view.points)
        distance = np.abs(shown[:, None] - np.abs(points)).max(2)  # the rows shown are rows of the file, each once
        assert distance.min(1).max() < 1e-5 * shown.max() and len(set(distance.argmin(1))) == 70
        np.testing.assert_array_equal(y[distance.argmin(1)], view.y)
        means = np.stack([points[y == c].mean(0) for c in range(10)])
        np.testing.assert_allclose(np.abs(view.means), np.abs(means), atol=1e-5 * shown.max())


@pytest.mark.parametrize("classes", [10, 30])  # with a colour each, and with one chosen class
def test_the_figure_shows_points_and_class_means(tmp_path, classes):
    h, w, b, y = made(c=classes)
    np.savez(tmp_path / "a.npz", x=h @ w.T + b, y=y, h=h, names=[f"class {k}" for k in range(classes)])
    doc = report.from_outputs(tmp_path / "a.npz", resamples=0)
    symbols = marks(figures.figures(doc, c=3)["features"], "symbol")
    texts = marks(figures.figures(doc, c=3)["features"], "text")
    pca, lda = analyze(tmp_path / "a.npz").views
    shown = range(10) if classes == 10 else [3]
    assert [len(m) for m in symbols] == [400, len(shown)] * 2
    assert [{item["text"] for item in m} for m in texts] == [{f"class {k}" for k in shown}] * 2
    for view, points, means in ((pca, *symbols[:2]), (lda, *symbols[2:])):
        for axis, key in enumerate("xy"):
            where = {item[key] for item in points} | {item[key] for item in means}
            values = np.concatenate([view.points[:, axis], view.means[list(shown), axis]])
            low, high = (min(where), max(where)) if key == "x" else (max(where), min(where))
            fitted = low + (values - values.min()) / (values.max() - values.min()) * (high - low)
            found = np.array([*(item[key] for item in points), *(item[key] for item in means)])
            assert np.abs(np.sort(found) - np.sort(fitted)).max() < 0.2  # pixels, of coordinates with four digits
    fills = {item["fill"] for item in symbols[0]}
    assert len(fills) == (10 if classes == 10 else 2)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_names_and_formats_of_h_w_and_b_and_x_from_them(tmp_path, suffix):
    h, w, b, y = made()
    short = {"x": h @ w.T + b, "y": y, "h": h, "W": w, "b": b}
    long = {"logits": short["x"], "target": y, "features": h, "weight": w, "bias": b}
    without = {k: v for k, v in short.items() if k != "x"}
    found = []
    for k, arrays in enumerate((short, long, without)):
        path = tmp_path / f"{k}{suffix}"
        save_file(arrays, path) if suffix == ".safetensors" else np.savez(path, **arrays)
        found.append(analyze(path))
    assert found[0].features.metrics == found[1].features.metrics == found[2].features.metrics
    assert found[0].metrics == found[1].metrics == pytest.approx(found[2].metrics)
    assert found[2].notes == ("no x in the file: it is h Wᵀ + b",) and not found[0].notes


def test_rows_that_are_left_out_are_left_out_of_the_features(tmp_path):
    h, w, b, y = made()
    x = h @ w.T + b
    y[5], h[7, 2], x[9, 0] = -100, np.nan, np.inf
    kept = np.delete(np.arange(400), [5, 7, 9])
    np.savez(tmp_path / "all.npz", x=x, y=y, h=h, W=w)
    np.savez(tmp_path / "kept.npz", x=x[kept], y=y[kept], h=h[kept], W=w)
    a, b = analyze(tmp_path / "all.npz", resamples=100), analyze(tmp_path / "kept.npz", resamples=100)
    for key, value in b.features.metrics.items():
        assert a.features.metrics[key] == pytest.approx(value, rel=1e-9), key
    for key, value in b.intervals.items():
        np.testing.assert_allclose(a.intervals[key], value)


def test_intervals_do_not_depend_on_the_blocks(tmp_path, monkeypatch):
    h, w, b, y = made()
    np.savez(tmp_path / "a.npz", x=h @ w.T + b, y=y)
    whole = analyze(tmp_path / "a.npz", resamples=100).intervals
    monkeypatch.setattr(room, "_BLOCK", 33)
    monkeypatch.setattr(room, "_RESAMPLED", 8 * 4 * 150)  # one class at a time
    for key, value in analyze(tmp_path / "a.npz", resamples=100).intervals.items():
        assert np.isfinite(value).all()
        np.testing.assert_array_equal(value, whole[key])


@pytest.mark.parametrize(
    "change, words",
    [
        ({"h": np.zeros((399, 6))}, r"h must have as many rows as x, 400, got the shape \(399, 6\)"),
        ({"h": np.zeros((400, 6, 1))}, r"h must have the shape \(N, D\), got \(400, 6, 1\)"),
        ({"W": np.zeros((6, 4))}, r"W must have the shape \(C, 6\) beside h \(400, 6\), got \(6, 4\), its transpose"),
        ({"W": np.zeros((5, 6)), "b": np.zeros(5)}, "W must have a row for each of the 4 outputs, got 5"),
        ({"W": np.full((4, 6), np.nan)}, "W must be finite, got nan"),
        ({"b": np.zeros(3)}, r"b must have the shape \(4,\) beside W \(4, 6\), got \(3,\)"),
        ({"h": np.array([["a"] * 6] * 400)}, "h must hold numbers"),
    ],
)
def test_invalid_features_are_one_line(tmp_path, change, words):
    h, w, b, y = made()
    np.savez(tmp_path / "a.npz", **({"x": h @ w.T + b, "y": y, "h": h, "W": w, "b": b} | change))
    with pytest.raises(ValueError, match=words) as error:
        analyze(tmp_path / "a.npz")
    assert "\n" not in str(error.value)


def test_what_is_not_measured_is_said(tmp_path):
    h, w, b, y = made()
    np.savez(tmp_path / "a.npz", x=h @ w.T + b, y=y, W=w)
    found = analyze(tmp_path / "a.npz")
    assert found.features is None and [v.of for v in found.views] == ["x", "x"]
    assert found.notes == ("W is not measured: there are no features h beside it",)
    several = (np.random.default_rng(0).random((400, 4)) < 0.4).astype(np.uint8)
    np.savez(tmp_path / "b.npz", x=4.0 * several - 2 + np.random.default_rng(1).normal(size=(400, 4)), y=several, h=h)
    found = analyze(tmp_path / "b.npz", resamples=50)
    assert found.features is None and found.views == () and found.intervals is None
    assert any("one label per image" in note for note in found.notes)
    np.savez(tmp_path / "c.npz", x=h @ w.T + b, y=y, h=h)  # without W
    assert "nc3" not in analyze(tmp_path / "c.npz").features.metrics
    two = np.where(y < 2, y, 1)
    np.savez(tmp_path / "d.npz", x=np.eye(2)[two] * 4 + h[:, :2], y=two)
    assert [v.name for v in analyze(tmp_path / "d.npz").views] == ["PCA"]  # two classes have one axis of LDA


# --------------------------------------------------------------------------------------------------------- guardrails


def refused(path, capsys):
    assert cli.main(["analyze", str(path)]) == 2
    return capsys.readouterr().err


def test_probabilities_given_as_x_are_refused(tmp_path, capsys):
    h, w, b, y = made()
    x = h @ w.T + b
    p = np.exp(x - x.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    np.savez(tmp_path / "a.npz", x=p.astype(np.float32), y=y)
    line = refused(tmp_path / "a.npz", capsys)
    assert line.count("\n") == 1 and "x of a holds probabilities" in line and "x=numpy.log(p)" in line
    log = np.log(p)
    np.savez(tmp_path / "b.npz", x=log, p=p, y=y)
    assert "x of b holds logarithms of probabilities" in refused(tmp_path / "b.npz", capsys)
    np.savez(tmp_path / "c.npz", x=log - log.mean(1, keepdims=True), p=p, y=y)  # what the lines say
    np.savez(tmp_path / "d.npz", x=x - x.mean(1, keepdims=True), y=y)
    restored, logits = (analyze(tmp_path / f"{name}.npz") for name in "cd")
    assert restored.metrics["error"] == pytest.approx((p.argmax(1) != y).mean())
    assert restored.geometry.average() == pytest.approx(logits.geometry.average())
    np.savez(tmp_path / "e.npz", x=expit(x), y=y)
    assert "x of e holds probabilities, all its numbers are in [0, 1]" in refused(tmp_path / "e.npz", capsys)


def test_probabilities_of_several_labels_are_refused(tmp_path, capsys):
    rng = np.random.default_rng(0)
    y = (rng.random((60, 4)) < 0.4).astype(np.uint8)
    x = 3.0 * y - 1 + rng.normal(size=y.shape)
    np.savez(tmp_path / "a.npz", x=1 / (1 + np.exp(-x)), y=y)
    line = refused(tmp_path / "a.npz", capsys)
    assert "x of a holds probabilities, all its numbers are in [0, 1]" in line and "log(p / (1 - p))" in line


def test_features_given_as_x_are_refused(tmp_path, capsys):
    x, y = load_digits(return_X_y=True)
    np.savez(tmp_path / "a.npz", x=x, y=y)
    line = refused(tmp_path / "a.npz", capsys)
    assert line.count("\n") == 1 and "x of a has 64 columns, y has 10 classes, and the error is 9" in line
    assert "this looks like features; save them as h" in line
    # a good model of more classes than the test set has
    np.savez(tmp_path / "b.npz", x=20.0 * np.eye(64)[y] + x, y=y)
    assert analyze(tmp_path / "b.npz").metrics["error"] < 0.5


def chance_file(path, seed=0, n=300):
    rng = np.random.default_rng(seed)
    np.savez(path, x=rng.normal(size=(n, 5)), y=rng.integers(0, 5, n))
    return path


def test_a_model_at_chance_level_has_no_geometry_but_a_warning(tmp_path, capsys):
    path = chance_file(tmp_path / "a.npz")
    with np.load(path) as arrays:
        y, predicted = arrays["y"], arrays["x"].argmax(1)
    found = analyze(path)
    kappa = cohen_kappa_score(y, predicted)  # (accuracy - chance) / (1 - chance)
    assert np.mean(y == predicted) == pytest.approx(found.chance + kappa * (1 - found.chance))
    assert cli.main(["analyze", str(path), "--out", str(tmp_path / "out")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "is not clearly better than that of guessing" in printed
        and "compactness" not in printed
        and "NC1" not in printed
    )
    doc = report.from_outputs(path)
    assert doc["geometry"] == [] and doc["points"] == [] and list(doc["metrics"]) == ["error", "error_x", "nll", "ece"]
    assert "not clearly better than that of guessing" in (tmp_path / "out" / "report.html").read_text("utf-8")


def test_a_head_at_chance_level_is_compared_without_geometry(tmp_path):
    rng = np.random.default_rng(0)
    y = torch.from_numpy(rng.integers(0, 5, 300))
    noise = [torch.from_numpy(rng.normal(size=(300, 5))) for _ in range(6)]
    good = [v + 3 * torch.eye(5)[y] for v in noise]
    results = {
        name: [{**evaluation.score(x, x.softmax(1), y), "seconds": 1.0} for x in xs]
        for name, xs in (("softmax", good[:2]), ("untrained", noise[2:4]), ("gsoftmax", good[4:]))
    }
    assert results["untrained"][0]["error_of_guessing"] == pytest.approx(0.8, abs=0.01)
    found = summary.summary_of(results, [0, 1])
    assert found["at_chance"] == ["untrained"] and set(found["metrics"]["ratio"]) == {"softmax", "gsoftmax"}
    verdicts = summary.verdicts(found)
    assert "geometry" in verdicts[1] and "geometry" not in verdicts[0] and "ratio" in summary.means(found).text()
    assert verdicts[2] == "Not clearly better than guessing, so without geometry: untrained."
    first = summary.summary_of({k: results[k] for k in ("untrained", "softmax")}, [0, 1])  # nothing to compare with
    geometry = first["metrics"].pop("ratio")
    assert set(geometry) == {"softmax"} and "paired" not in geometry["softmax"]
    for name in found["heads"]:  # the page reads such a summary
        (tmp_path / name).mkdir()
    (tmp_path / "summary.json").write_text(json.dumps(found))
    doc = report.from_runs([tmp_path])
    assert doc["metrics"]["ratio"].keys() == {"softmax", "gsoftmax"}
    report.write(doc, tmp_path, figures=["svg"])


def test_a_constant_prediction_is_chance_and_a_weak_model_is_not(tmp_path):
    rng = np.random.default_rng(0)
    y = (rng.random(400) < 0.1).astype(int)
    constant = rng.normal(size=(400, 2)) * 0.01 + [1.0, 0.0]
    np.savez(tmp_path / "a.npz", x=constant, y=y)
    assert analyze(tmp_path / "a.npz").chance == pytest.approx((y == 0).mean())
    constant[np.flatnonzero(y)[:12], 1] = 2.0  # finds some of the rare class, and nothing else
    np.savez(tmp_path / "b.npz", x=constant, y=y)
    assert analyze(tmp_path / "b.npz").chance is None


def test_a_model_at_chance_is_compared_without_geometry(tmp_path):
    good = tmp_path / "good.npz"
    with np.load(chance_file(tmp_path / "bad.npz")) as arrays:
        np.savez(good, x=arrays["x"] + 3 * np.eye(5)[arrays["y"]], y=arrays["y"])
    doc = report.from_outputs(good, tmp_path / "bad.npz")
    assert doc["over_classes"] == {} and [g["compactness"][0] is None for g in doc["geometry"]] == [False, True]
    assert [g["accuracy"][0] is None for g in doc["geometry"]] == [False, False]
    assert "error" in doc["verdicts"][0] and "compactness" not in doc["verdicts"][0]
    report.write(doc, tmp_path / "out", tables=["csv", "md"], figures=["svg"])


# ------------------------------------------------------------------------------------------------------ several models


def test_several_models_against_the_first(tmp_path, capsys):
    h, w, b, y = made(n=500)
    x, rng = h @ w.T + b, np.random.default_rng(1)
    xs = [x + noise * rng.normal(size=x.shape) for noise in (8, 10, 14)]
    paths = [tmp_path / f"{name}.npz" for name in ("first", "second", "third")]
    for path, values in zip(paths, xs, strict=True):
        np.savez(path, x=values, y=y)
    analyses, found = compare_models(paths)
    assert [a.name for a in analyses] == ["first", "second", "third"]
    wrong = [v.argmax(1) != y for v in xs]
    expected = []
    for other, comparison in zip(wrong[1:], found, strict=True):
        only = int((~wrong[0] & other).sum()), int((wrong[0] & ~other).sum())
        assert (comparison.mcnemar.only_first_right, comparison.mcnemar.only_second_right) == only
        expected.append(binomtest(only[0], sum(only)).pvalue)
        assert comparison.mcnemar.p == pytest.approx(expected[-1], rel=1e-10)
        test = ttest_rel(other.astype(float), wrong[0].astype(float)).confidence_interval()
        assert (comparison.images["error"].low, comparison.images["error"].high) == pytest.approx(tuple(test))
    doc = report.from_outputs(*paths)
    tests = [test for of in doc["over_images"].values() for test in of["paired"].values()]
    p = [test["p"] for test in tests]
    assert [p[0], p[2]] == pytest.approx(expected) and len(p) == 4  # error and NLL of two models
    order = np.argsort(p)  # Holm's correction over both models
    holm = np.maximum.accumulate(np.array(p)[order] * [4, 3, 2, 1]).clip(max=1)
    np.testing.assert_allclose([tests[k]["p_holm"] for k in order], holm, rtol=1e-9)
    arguments = [str(paths[0]), "--against", str(paths[1]), "--against", str(paths[2])]
    assert cli.main(["analyze", *arguments, "--out", str(tmp_path / "out")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "third against first, 500 images: error" in printed
    errors = doc["over_images"]["third"]["paired"]["error"]
    assert (
        errors["p"] < 0.05
        and f"(McNemar's p {p_value(errors['p'])}, {p_value(errors['p_holm'])} corrected for 4 tests over images)"
        in printed
    )
    assert "third minus first, paired over images" in (tmp_path / "out" / "report.html").read_text("utf-8")


def test_a_third_model_on_other_images_is_named(tmp_path):
    h, w, b, y = made()
    for name, labels in (("a", y), ("b", y), ("c", np.roll(y, 1))):
        np.savez(tmp_path / f"{name}.npz", x=h @ w.T + b, y=labels)
    with pytest.raises(ValueError, match="all files must hold the same images .* y of c differs first in row"):
        compare_models([tmp_path / f"{name}.npz" for name in "abc"])


def test_features_of_a_run_are_refused_where_they_mean_nothing(tmp_path, capsys):
    assert cli.main(["evaluate", str(tmp_path), "--features"]) == 2
    assert "--features needs --out" in capsys.readouterr().err
