"""Outputs of any model: numbers against NumPy, SciPy and scikit-learn, every format, every odd input."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tracemalloc
import zipfile

import numpy as np
import pytest
import scipy.stats
import torch
from safetensors.torch import save_file
from scipy.special import expit, log_softmax, softmax
from sklearn.metrics import accuracy_score, average_precision_score, f1_score, log_loss

from gsoftmax import analyze as room
from gsoftmax import outputs
from gsoftmax.analyze import analyze, compare_outputs, mcnemar
from gsoftmax.data import core
from gsoftmax.functional import gsoftmax
from gsoftmax.outputs import open_outputs
from gsoftmax.report import from_outputs
from gsoftmax.summary import over_images_tables


def single(n=400, c=5, seed=0, gap=3.0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, c, n)
    x = rng.normal(size=(n, c)) * rng.uniform(0.5, 2, c) + 7
    x[np.arange(n), y] += gap
    return x, y


def several(n=300, labels=6, seed=0):
    rng = np.random.default_rng(seed)
    y = (rng.random((n, labels)) < 0.3).astype(np.uint8)
    return rng.normal(size=(n, labels)) + 2 * y - 1, y


def save(path, **arrays):
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    elif path.suffix == ".safetensors":
        names = arrays.pop("names", None)
        metadata = None if names is None else {"names": json.dumps(list(names))}
        save_file({k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in arrays.items()}, path, metadata)
    else:
        x, y, names = arrays["x"], arrays["y"], arrays.get("names", [f"c{i}" for i in range(arrays["x"].shape[1])])
        several_labels = y.ndim == 2
        header = [*(f'"{n}"' for n in names), *([f'"y:{n}"' for n in names] if several_labels else ["y"])]
        if "p" in arrays:
            header += [f'"p:{n}"' for n in names]
        columns = np.hstack([x, y if several_labels else y[:, None], *([arrays["p"]] if "p" in arrays else [])])
        lines = [",".join(header), *(",".join(map(repr, row)) for row in columns.tolist())]
        path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def naive(x, y):
    """The definitions of the paper, in loops."""
    m = x.shape[1]
    out = np.full((m, 5), np.nan)
    for c in range(m):
        mean, std = x[y == c].mean(0), x[y == c].std(0)
        kl = [
            np.log(b / a) + (a**2 + (u - v) ** 2) / (2 * b**2) - 0.5
            for j in range(m)
            if j != c
            for u, a, v, b in [(mean[c], std[c], mean[j], std[j]), (mean[j], std[j], mean[c], std[c])]
        ]
        others = [j for j in range(m) if j != c]
        separability = sum(kl) / (2 * (m - 1))
        near = min(abs(mean[c] - mean[j]) for j in others)
        d = np.mean([(mean[c] - mean[j]) / np.sqrt((std[c] ** 2 + std[j] ** 2) / 2) for j in others])
        out[c] = 1 / std[c], separability, separability / std[c], std[c] / near, d
    return out.T


# ----------------------------------------------------------------------------------------------------------- numbers


def binned_gap(confidence, right, bins=15):
    """The calibration error, bin by bin: |accuracy - confidence| weighted by the share of the bin."""
    at = np.minimum((confidence * bins).astype(int), bins - 1)
    return sum(abs(right[at == b].mean() - confidence[at == b].mean()) * (at == b).mean() for b in np.unique(at))


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".csv"])
@pytest.mark.parametrize("block", [1 << 22, 70])
def test_one_label_against_numpy_and_scikit_learn(tmp_path, monkeypatch, suffix, block):
    monkeypatch.setattr(room, "_BLOCK", block)  # 70 numbers: blocks of 14 rows
    x, y = single()
    names = ["cat", "dog, big", "égal", "4", "5"]
    found = analyze(save(tmp_path / f"model{suffix}", x=x, y=y, names=names))
    assert (found.name, found.n, found.classes, found.multilabel) == ("model", 400, tuple(names), False)
    assert found.notes == ()
    for measure, expected in zip(room.geometry.MEASURES, naive(x, y), strict=True):
        np.testing.assert_allclose(found.measures[measure], expected, rtol=1e-9, err_msg=measure)
    p = softmax(x, axis=1)
    assert found.metrics["error"] == pytest.approx(1 - accuracy_score(y, p.argmax(1)), abs=1e-12)
    assert found.metrics["nll"] == pytest.approx(log_loss(y, p, labels=range(5)), rel=1e-12)
    assert found.metrics["ece"] == pytest.approx(binned_gap(p.max(1), p.argmax(1) == y), rel=1e-9)
    np.testing.assert_allclose(found.score, [np.mean(p.argmax(1)[y == c] == c) for c in range(5)], rtol=1e-12)
    for c in range(5):
        mine = x[y == c]
        rest = np.delete(mine, c, axis=1)
        np.testing.assert_allclose(found.gaussians.own[c], [mine[:, c].mean(), mine[:, c].std()], rtol=1e-9)
        np.testing.assert_allclose(found.gaussians.other[c], [rest.mean(), rest.std()], rtol=1e-9)
        np.testing.assert_allclose(found.gaussians.overall[c], [x[:, c].mean(), x[:, c].std()], rtol=1e-9)
        assert len(found.gaussians.nearest[c]) == 3 and c not in [j for j, *_ in found.gaussians.nearest[c]]
    confidence, right = p.max(1), p.argmax(1) == y
    k = np.minimum(np.ceil(confidence * 15).astype(int) - 1, 14)
    for b in range(15):
        count, mean, share = found.calibration[b]
        assert count == (k == b).sum()
        if count:
            assert (mean, share) == pytest.approx((confidence[k == b].mean(), right[k == b].mean()))


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".csv"])
@pytest.mark.parametrize("memory", [1 << 28, 9 * 300 * 4])  # the second: four labels at a time, so two passes
def test_several_labels_against_scikit_learn(tmp_path, monkeypatch, suffix, memory):
    monkeypatch.setattr(room, "_AP_MEMORY", memory)
    monkeypatch.setattr(room, "_BLOCK", 500)
    x, y = several()
    found = analyze(save(tmp_path / f"m{suffix}", x=x, y=y))
    p = expit(x)
    ap = [average_precision_score(y[:, k], p[:, k]) for k in range(6)]
    np.testing.assert_allclose(found.score, ap, rtol=1e-6)
    assert found.metrics["mAP"] == pytest.approx(np.mean(ap), rel=1e-6)
    assert found.metrics["C_F1_mean"] == pytest.approx(f1_score(y, p >= 0.5, average="macro"), rel=1e-9)
    assert found.metrics["O_F1"] == pytest.approx(f1_score(y, p >= 0.5, average="micro"), rel=1e-9)
    assert found.metrics["nll"] == pytest.approx(-np.log(np.where(y, p, 1 - p)).mean(), rel=1e-9)
    assert found.metrics["ece"] == pytest.approx(np.mean([binned_gap(p[:, k], y[:, k]) for k in range(6)]), rel=1e-9)
    assert found.metrics["hamming"] == pytest.approx(np.mean((p >= 0.5) != y))
    for k in range(6):
        has, has_not = x[y[:, k] == 1, k], x[y[:, k] == 0, k]
        assert found.measures["compactness"][k] == pytest.approx(1 / has.std(), rel=1e-9)
        a, b, d2 = has.var(), has_not.var(), (has.mean() - has_not.mean()) ** 2
        expected = ((a + d2) / b + (b + d2) / a - 2) / 4
        assert found.measures["separability"][k] == pytest.approx(expected, rel=1e-9)
        np.testing.assert_allclose(found.gaussians.other[k], [has_not.mean(), has_not.std()], rtol=1e-9)
        np.testing.assert_allclose(found.gaussians.overall[k], [x[:, k].mean(), x[:, k].std()], rtol=1e-9)
    assert any("logistic" in note for note in found.notes)


def test_two_outputs_a_label_and_given_probabilities(tmp_path):
    x, y = several()
    both = np.stack([x[::-1] * 0.3, x], axis=1)
    found = analyze(save(tmp_path / "a.npz", x=both, y=y))
    p = expit(both[:, 1] - both[:, 0])
    assert found.metrics["nll"] == pytest.approx(-np.log(np.where(y, p, 1 - p)).mean())
    assert found.measures["compactness"][0] == pytest.approx(1 / x[y[:, 0] == 1, 0].std())
    given = analyze(save(tmp_path / "b.npz", x=both, y=y, p=p**2))
    assert given.metrics["nll"] == pytest.approx(-np.log(np.where(y, p**2, 1 - p**2)).mean())


def test_probabilities_come_from_the_file_or_from_its_gaussians(tmp_path):
    x, y = single()
    mu, sigma = np.linspace(6, 8, 5), np.linspace(0.5, 2, 5)
    p = gsoftmax(*(torch.from_numpy(v) for v in (x, mu, sigma)), 3.0).numpy()
    expected = log_loss(y, p, labels=range(5))
    with_p = analyze(save(tmp_path / "a.npz", x=x, y=y, p=p, mu=mu, sigma=sigma))
    with_lam = analyze(save(tmp_path / "b.npz", x=x, y=y, lam=np.array(3.0), mu=mu, sigma=sigma))
    without = analyze(save(tmp_path / "c.npz", x=x, y=y, mu=mu, sigma=sigma))
    assert with_p.metrics["nll"] == pytest.approx(expected) == with_lam.metrics["nll"]
    assert without.metrics["nll"] == pytest.approx(log_loss(y, softmax(x, axis=1), labels=range(5)))
    np.testing.assert_array_equal(with_p.learned, np.stack([mu, sigma], 1))
    assert "G-softmax" in with_lam.notes[0] and "without the Gaussians" in without.notes[0]


def test_the_sample_of_points_is_true_and_does_not_depend_on_the_blocks(tmp_path, monkeypatch):
    x, y = single(n=2000)
    path = save(tmp_path / "a.npz", x=x, y=y)
    whole = analyze(path, points=40).points
    monkeypatch.setattr(room, "_BLOCK", 333)
    for key, value in analyze(path, points=40).points.items():
        np.testing.assert_array_equal(value, whole[key])
    p = softmax(x, axis=1)
    assert np.bincount(whole["c"]).tolist() == [40] * 5 and whole["own"].sum() == 100
    for c, own, j, value, probability in zip(*(whole[k].tolist() for k in ("c", "own", "j", "x", "p")), strict=True):
        rows = np.flatnonzero(x[:, j] == value)
        assert (c == j) == bool(own) and y[rows[0]] == c
        assert p[rows[0], j] == pytest.approx(probability)
    drawn = whole["x"][(whole["own"] == 1) & (whole["c"] == 0)]
    assert abs(drawn.mean() - x[y == 0, 0].mean()) < 4 * x[y == 0, 0].std() / np.sqrt(20)  # from all rows alike


# -------------------------------------------------------------------------------------------------------- comparison


def test_two_models_against_scipy(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "_BLOCK", 333)
    x, y = single(gap=1.5)
    other = 0.7 * x + 0.3 * single(seed=5, gap=1.5)[0]
    one, two, found = compare_outputs(save(tmp_path / "a.npz", x=x, y=y), save(tmp_path / "b.csv", x=other, y=y))
    assert (one.name, two.name) == ("a", "b")
    for k in ("compactness", "separability", "ratio", "accuracy"):
        t, p = scipy.stats.ttest_rel(two.measures[k], one.measures[k])
        assert (found.classes[k].t, found.classes[k].p) == pytest.approx((t, p), rel=1e-9)
    wrong_a, wrong_b = x.argmax(1) != y, other.argmax(1) != y
    only_a, only_b = int((~wrong_a & wrong_b).sum()), int((wrong_a & ~wrong_b).sum())
    assert (found.mcnemar.only_first_right, found.mcnemar.only_second_right) == (only_a, only_b)
    assert found.mcnemar.p == pytest.approx(scipy.stats.binomtest(only_a, only_a + only_b, 0.5).pvalue, rel=1e-10)
    nll = [-log_softmax(v, axis=1)[np.arange(400), y] for v in (x, other)]
    for key, (a, b) in {"nll": nll, "error": (wrong_a.astype(float), wrong_b.astype(float))}.items():
        test = scipy.stats.ttest_rel(b, a)
        low, high = test.confidence_interval()
        mine = found.images[key]
        assert (mine.t, mine.p, mine.low, mine.high) == pytest.approx(
            (test.statistic, test.pvalue, low, high), rel=1e-9
        )
        assert mine.difference == pytest.approx(np.mean(b - a)) and mine.n == 400


def test_the_error_of_x_is_that_of_the_outputs_without_their_gaussians(tmp_path):
    (x, y), mu, sigma = single(gap=1.0), np.linspace(5.0, 9.0, 5), np.full(5, 0.3)
    term = 3.0 * scipy.stats.norm.cdf(x, mu, sigma)
    one, two, found = compare_outputs(
        save(tmp_path / "a.npz", x=x, y=y), save(tmp_path / "b.npz", x=x, y=y, mu=mu, sigma=sigma, lam=np.array(3.0))
    )
    assert two.metrics["error_x"] == one.metrics["error_x"] == one.metrics["error"] != two.metrics["error"]
    assert two.metrics["error"] == pytest.approx(((x + term).argmax(1) != y).mean())
    assert list(found.images) == ["error", "error_x", "nll"]
    assert found.images["error_x"].difference == 0 != found.images["error"].difference
    assert list(from_outputs(tmp_path / "a.npz", tmp_path / "b.npz")["metrics"])[:2] == ["error", "error_x"]
    (table,) = over_images_tables(from_outputs(tmp_path / "a.npz", tmp_path / "b.npz"))
    assert [row[0] for row in table.rows] == ["error, points", "error of x, points", "NLL"]


@pytest.mark.parametrize(
    "a, b", [(0, 0), (3, 3), (5, 6), (10, 2), (0, 40), (700, 600), (2600, 2400), (499_000, 501_000)]
)
def test_mcnemar_is_the_exact_binomial_test(a, b):
    expected = scipy.stats.binomtest(a, a + b, 0.5).pvalue if a + b else 1.0
    assert mcnemar(a, b).p == pytest.approx(expected, rel=1e-10)
    assert mcnemar(b, a).p == mcnemar(a, b).p


def test_several_labels_of_two_models_leave_the_same_rows_out(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "_AP_MEMORY", 9 * 300 * 2)
    x, y = several()
    bad = x.copy()
    bad[7, 5] = np.nan
    one, two, found = compare_outputs(save(tmp_path / "a.npz", x=x, y=y), save(tmp_path / "b.npz", x=bad, y=y))
    keep = np.arange(300) != 7
    ap = [average_precision_score(y[keep, k], expit(x[keep, k])) for k in range(6)]
    np.testing.assert_allclose(one.score, ap, rtol=1e-6)  # columns of the later passes too
    np.testing.assert_allclose(two.score, ap, rtol=1e-6)
    assert found.images["error"].difference == 0 and found.images["nll"].p == 1 and found.mcnemar is None
    assert one.n == two.n == 299 and any("1 row with nan" in note for note in one.notes)


def test_models_on_different_images_are_rejected(tmp_path):
    x, y = single()
    a = save(tmp_path / "a.npz", x=x, y=y)
    swapped = y.copy()
    swapped[[3, 9]] = (y[[3, 9]] + 1) % 5
    with pytest.raises(ValueError, match="same images in the same order: y of b differs first in row 3"):
        compare_outputs(a, save(tmp_path / "b.npz", x=x, y=swapped))
    with pytest.raises(ValueError, match="a has rows 400, c has 399"):
        compare_outputs(a, save(tmp_path / "c.npz", x=x[1:], y=y[1:]))
    with pytest.raises(ValueError, match="has classes 5, d has 6"):
        compare_outputs(a, save(tmp_path / "d.npz", x=np.hstack([x, x[:, :1]]), y=y))


# --------------------------------------------------------------------------------------------------------- odd input


def test_what_cannot_be_used_is_left_out_with_a_note(tmp_path):
    x, y = single()

    def notes(**arrays):
        return " / ".join(analyze(save(tmp_path / "a.npz", **arrays)).notes)

    broken = x.copy()
    broken[5, 2], broken[9, 0] = np.nan, np.inf
    assert notes(x=broken, y=y) == "2 rows with nan or inf left out"
    np.testing.assert_allclose(
        analyze(tmp_path / "a.npz").measures["ratio"],
        naive(np.delete(x, [5, 9], 0), np.delete(y, [5, 9]))[2],
        rtol=1e-9,
    )
    ignored = y.copy()
    ignored[:3] = -100
    assert notes(x=x, y=ignored) == "3 rows labelled -100 left out"
    assert notes(x=x, y=y + 1) == "labels run from 1 to 5: read as 0 to 4"
    np.testing.assert_allclose(analyze(tmp_path / "a.npz").measures["ratio"], naive(x, y)[2], rtol=1e-9)
    assert "class 4: no examples" in notes(x=x, y=np.minimum(y, 3))
    one = np.where(np.arange(400) == 7, 4, np.minimum(y, 3))
    assert "class 4: 1 example, at least 2" in notes(x=x, y=one)
    found = analyze(tmp_path / "a.npz")
    assert np.isnan(found.measures["compactness"]).tolist() == [False] * 4 + [True]
    assert np.isfinite(list(found.geometry.average().values())).all()
    assert "classes 1, 2, 3, 4: no examples" in notes(x=x, y=np.zeros(400, int))
    assert "compactness only" in notes(x=x[:, :1], y=np.zeros(400, int))  # one class
    assert "its own output never varies" in notes(x=np.full((400, 5), 2.0), y=y)
    one_hot = np.eye(5, dtype=np.uint8)[y]
    assert "exactly one label" in notes(x=x, y=one_hot)
    p = np.eye(5)[(y + 1) % 5]
    assert "400 images whose true label has a probability below 2.2e-16" in notes(x=x, y=y, p=p)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"y": np.arange(400) % 5 + 2}, r"y must be in 0 to 4 for 5 outputs .* got 2 to 6"),
        ({"y": np.full(400, -1)}, r"y must be in 0 to 4 .* got -1 to -1"),
        ({"y": np.linspace(0, 4, 400)}, "y must be whole numbers"),
        ({"y": np.zeros(399, int)}, r"y must have as many rows as x, 400, got the shape \(399,\)"),
        ({"y": np.zeros((400, 3), int)}, r"y must have the shape \(400,\) or \(400, 5\)"),
        ({"y": np.full((400, 5), 2)}, "y must be 0 or 1 for several labels, got 2"),
        ({"y": np.full(400, -100)}, "no rows that can be used: all are marked -100"),
        ({"y": np.array(["cat"] * 400)}, "y has the text 'cat', which is not a name of the 5 classes"),
        ({"x": np.full((400, 5), np.nan)}, "no rows that can be used: all have nan"),
        ({"x": np.zeros((400, 5, 3))}, r"x must have the shape \(N, C\)"),
        ({"x": np.zeros((0, 5))}, r"x must have the shape \(N, C\)"),
        ({"x": np.zeros((400, 2, 5))}, r"y must have the shape \(400, 5\) beside x \(400, 2, 5\)"),
        ({"p": np.ones((400, 5))}, "p must sum to 1 over the classes, got 5"),
        ({"p": np.full((400, 5), -0.5)}, r"p must hold probabilities in \[0, 1\], got -0.5"),
        ({"p": np.ones((400, 4))}, r"p must have the shape \(400, 5\)"),
        ({"names": ["a", "b"]}, "names must be 5, one for each class, got 2"),
        ({"names": np.array(["a", None, "c", "d", "e"], dtype=object)}, "names .* holds pickled Python objects"),
        ({"y": np.array([0, None] * 200, dtype=object)}, "y .* holds pickled Python objects"),
        ({"mu": np.zeros(5)}, "mu and sigma come together, got mu alone"),
        ({"mu": np.zeros(5), "sigma": np.zeros(5)}, "sigma must be finite and positive, got 0"),
        ({"mu": np.zeros(4), "sigma": np.ones(4)}, r"mu must have the shape \(5,\)"),
    ],
)
def test_invalid_input_is_one_line(tmp_path, change, words):
    x, y = single()
    np.savez(tmp_path / "a.npz", **({"x": x, "y": y} | change))
    with pytest.raises(ValueError, match=words) as error:
        analyze(tmp_path / "a.npz")
    assert "\n" not in str(error.value)


def test_files_that_are_not_what_they_say(tmp_path):
    x, y = single()
    for name in ("a.npz", "a.safetensors", "a.csv"):
        (tmp_path / name).write_bytes(b"\x00\xff nonsense")
        with pytest.raises(ValueError, match=name) as error:
            analyze(tmp_path / name)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="does not exist"):
        analyze(tmp_path / "none.npz")
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match="ends in .npz, .safetensors, .csv, got a.txt"):
        analyze(tmp_path / "a.txt")
    np.savez(tmp_path / "b.npz", z=x)
    with pytest.raises(
        ValueError, match="b.npz must have x and y, got neither; h and W can .* x may be called logits; y .* labels"
    ):
        analyze(tmp_path / "b.npz")
    path = save(tmp_path / "c.npz", x=x, y=y)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(ValueError, match="x in c.npz is damaged: Bad CRC"):
        analyze(path)
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as archive:  # a header that promises more than there is
        archive.writestr("x.npy", np.lib.format.magic(1, 0) + b"v\0{'descr': '<f8', 'fortran_order': False, "
                         b"'shape': (1000000000, 5), }".ljust(118 - 1) + b"\n")  # fmt: skip
        archive.writestr("y.npy", b"")
    with pytest.raises(ValueError, match="cannot be read"):
        analyze(tmp_path / "d.npz")
    (tmp_path / "run").mkdir()
    with pytest.raises(ValueError, match="does not exist"):
        analyze(tmp_path / "run")


def test_compressed_and_column_major_archives(tmp_path):
    x, y = single()
    np.savez_compressed(tmp_path / "a.npz", logits=np.asfortranarray(x.astype(np.float16)), labels=y[:, None])
    found = analyze(tmp_path / "a.npz")
    np.testing.assert_allclose(found.measures["ratio"], naive(x.astype(np.float16).astype(float), y)[2], rtol=1e-9)


def test_half_precision_tensors(tmp_path):
    x, y = single()
    x = torch.from_numpy(x).bfloat16()
    save_file({"x": x, "y": torch.from_numpy(y)}, tmp_path / "a.safetensors")
    found = analyze(tmp_path / "a.safetensors")
    np.testing.assert_allclose(found.measures["ratio"], naive(x.double().numpy(), y)[2], rtol=1e-9)


def npz(path, compression=zipfile.ZIP_STORED, **members):
    """An archive of (shape, bytes of data), whatever the shape promises."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, (shape, held) in members.items():
            header = io.BytesIO()
            np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": shape})
            archive.writestr(f"{name}.npy", header.getvalue() + bytes(held))
    return path


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_small_archive_cannot_declare_much(tmp_path, compression, monkeypatch):
    path = npz(tmp_path / "a.npz", compression, x=((2, 10**9), 0), y=((2,), 16))
    with pytest.raises(
        ValueError, match=r"^x in a.npz cannot be read: it declares 16,000,000,000 bytes but holds f\S+$"
    ):
        analyze(path)
    monkeypatch.setattr(outputs, "SMALL", 2**20)
    monkeypatch.setattr(core, "SMALL", 2**20)
    path = npz(tmp_path / "a.npz", compression, x=((1000, 200), 1_600_000), y=((1000,), 8000))
    if compression == zipfile.ZIP_STORED:
        assert open_outputs(path).num_classes == 200
    else:
        words = r"^x in a.npz declares 1,600,000 bytes, more than 100 times the [\d,]+ that it holds$"
        with pytest.raises(ValueError, match=words):
            open_outputs(path)
    path = npz(tmp_path / "a.npz", compression, x=((0, 10**9), 0), y=((0,), 0))
    with pytest.raises(ValueError, match=r"^a row of x in a.npz declares 8,000,000,000 bytes, more than the limit"):
        open_outputs(path)


def test_a_csv_with_many_columns_and_short_rows_takes_no_memory(tmp_path):
    width, rows = 20_000, 2**14
    path = tmp_path / "a.csv"
    whole = ",".join(["0"] * width)
    for start, words in (("", "row 1 of a.csv"), (f"{whole}\n", "row 2 of a.csv")):
        path.write_text(",".join(["y", *(f"c{i}" for i in range(1, width))]) + "\n" + start + "0,1\n" * rows)
        tracemalloc.start()
        with pytest.raises(ValueError, match=f"{words} must have {width} cells, got 2"):
            analyze(path)
        assert tracemalloc.get_traced_memory()[1] < 2**26
        tracemalloc.stop()


def test_csv_reads_names_and_reports_the_line_of_an_error(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("cat;y;dog\n1.5;cat;0.5\n2.5;0;1\n\n0;dog;2\n0.5;1;4\n")
    found = analyze(path)
    assert found.classes == ("cat", "dog") and found.n == 4
    np.testing.assert_allclose(found.measures["compactness"], [2.0, 1.0])
    for text, words in (
        ("1,2,3\n4,5,6\n", "must begin with a header"),
        (
            "a,b\n1,2\n",
            "must have a column y, or y:NAME for every output .or labels, label, targets, target., got a, b",
        ),
        ("a,a,y\n1,2,0\n", "must have different names, got 'a' twice"),
        ("a,b,y\n1,2,0\n1,x,0\n", "row 2 of a.csv, column 'b', must be a number, got 'x'"),
        ("a,b,y\n1,2,0\n1,,0\n", "row 2 of a.csv, column 'b', must be a number, got ''"),
        ("a,b,y\n1,2,c\n", "column 'y', must be a class's name or its number, got 'c'"),
        ("a,b,y\n1,2,0\n1,2\n", "row 2 of a.csv must have 3 cells, got 2"),
        ("a,b,y:a\n1,2,0\n", "y: columns that do not match, such as 'b'"),
        ("", "must begin with a header"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            analyze(path)


@pytest.mark.parametrize("alias", ["y", "labels", "label", "targets", "target"])
def test_a_csv_takes_the_names_that_npz_takes(tmp_path, alias):
    x, y = single()
    save(tmp_path / "a.csv", x=x, y=y)
    text = (tmp_path / "a.csv").read_text().split("\n", 1)
    (tmp_path / "a.csv").write_text(text[0].replace("y", alias) + "\n" + text[1])
    np.savez(tmp_path / "a.npz", **{"logits": x, alias: y})
    assert analyze(tmp_path / "a.csv").metrics == analyze(tmp_path / "a.npz").metrics
    x, y = several()
    save(tmp_path / "b.csv", x=x, y=y, p=expit(x))
    text = (tmp_path / "b.csv").read_text().split("\n", 1)
    (tmp_path / "b.csv").write_text(
        text[0].replace('"y:', f'"{alias}:').replace('"p:', '"probabilities:') + "\n" + text[1]
    )
    found = analyze(tmp_path / "b.csv")
    assert found.multilabel and found.classes == tuple(f"c{k}" for k in range(6)) and not found.notes


def test_more_classes_than_a_full_table_are_pooled_with_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr(room.geometry, "FULL_TABLE_LIMIT", 4)
    x, y = single()
    found = analyze(save(tmp_path / "a.npz", x=x, y=y))
    assert found.geometry.pooled and found.gaussians.overall is None and "pooled" in found.notes[0]
    rest = np.delete(x[y == 2], 2, axis=1)
    np.testing.assert_allclose(found.gaussians.other[2], [rest.mean(), rest.std()], rtol=1e-9)


def test_opening_reads_no_outputs(tmp_path, monkeypatch):
    x, y = single()
    path = save(tmp_path / "a.npz", x=x, y=y)
    monkeypatch.setattr(np, "isfinite", lambda *a, **k: pytest.fail("x was read"))
    assert open_outputs(path).num_classes == 5


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is read from /proc")
def test_a_million_rows_in_a_minute_and_two_gigabytes(tmp_path):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 100, 1_000_000)
    x = rng.standard_normal((1_000_000, 100), dtype=np.float32)
    x[np.arange(len(y)), y] += 5
    np.savez(tmp_path / "big.npz", x=x, y=y)
    del x
    code = (
        "import sys, time; from gsoftmax import report; from pathlib import Path; t = time.thread_time();"
        "doc = report.from_outputs(sys.argv[1]); report.write(doc, Path(sys.argv[1]).parent, tables=['csv']);"
        "print(time.thread_time() - t, Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "big.npz")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seconds, kilobytes = map(float, done.stdout.split())
    print(f"{seconds:.1f} s, {kilobytes / 2**20:.2f} GiB")
    assert seconds < 60 and kilobytes < 2 * 2**20


# -- the paper's assumption -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [70, 1 << 22])
@pytest.mark.parametrize("kind", ["single", "several"])
def test_shape_and_ranges_of_x_do_not_depend_on_the_blocks(tmp_path, monkeypatch, kind, block):
    monkeypatch.setattr(room, "_BLOCK", block)
    x, y = single() if kind == "single" else several()
    found = analyze(save(tmp_path / "o.npz", x=x, y=y)).distributions
    x = x.astype(np.float64)
    for c in range(x.shape[1]):
        has = y == c if kind == "single" else y[:, c] == 1
        own = x[has, c]
        other = np.delete(x[has], c, axis=1) if kind == "single" else x[~has, c]
        assert found.skewness[c] == pytest.approx(scipy.stats.skew(own), rel=1e-9)
        assert found.kurtosis[c] == pytest.approx(scipy.stats.kurtosis(own), rel=1e-9)
        assert found.p[c] == pytest.approx(scipy.stats.normaltest(own).pvalue, rel=1e-8)
        np.testing.assert_array_equal(found.own[c], [own.min(), own.max()])
        np.testing.assert_array_equal(found.other[c], [other.min(), other.max()])


def test_learned_measures_of_several_labels_are_of_its_two_gaussians(tmp_path):
    x, y = several(labels=3)
    mu, sigma = np.array([[-1.0, 0.0, 1.0], [2.0, 3.0, 1.0]]), np.array([[1.0, 2.0, 3.0], [0.5, 1.0, 3.0]])
    found = analyze(save(tmp_path / "o.npz", x=x, y=y, mu=mu, sigma=sigma)).learned_measures
    v, w = sigma**2  # the symmetric KL divergence of absence and presence
    expected = ((v / w + w / v) / 2 - 1 + (mu[0] - mu[1]) ** 2 / 2 * (1 / v + 1 / w)) / 2
    np.testing.assert_allclose(found["compactness"], 1 / sigma[1])
    np.testing.assert_allclose(found["separability"], expected)
    np.testing.assert_allclose(found["ratio"], expected / sigma[1])
    alone = analyze(save(tmp_path / "one.npz", x=x, y=y, mu=mu[1], sigma=sigma[1])).learned_measures
    assert list(alone) == ["compactness"]
