"""Out-of-distribution scores against SciPy's densities, ROC numbers against scikit-learn, and both on data."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp
from scipy.stats import norm
from sklearn.metrics import roc_auc_score, roc_curve

from gsoftmax import ood
from gsoftmax.gaussians import GaussianLogits
from gsoftmax.geometry import ClassStatistics

SETTINGS = settings(deadline=None, max_examples=50)
ALL = ["probability", "output", "energy", "learned", "empirical", "empirical_all"]


def training(n=200, classes=5, scale=1.0):
    """Outputs (n, classes) whose own column is high, and their classes, every one of them there."""
    y = torch.arange(n) % classes
    deviation = 0.5 + torch.rand(classes, classes, dtype=torch.float64)
    x = torch.randn(n, classes, dtype=torch.float64) * deviation[y] + 4 * torch.eye(classes).double()[y]
    return scale * x, y


def statistics(x, y, **options):
    return ClassStatistics(x.shape[1], **options).update(x, y)


def plain_empirical_all(x, mean, std, classes):
    """The definition, image by image, class by class."""
    return [max(norm.logpdf(row, mean[c], std[c]).sum() for c in classes) for row in np.asarray(x)]


# -- scores -----------------------------------------------------------------------------------------------------------


def test_scores_are_those_of_scipy():
    train, y = training()
    stats = statistics(train, y)
    x = 3 * torch.randn(60, 5)
    p = (2 * x + torch.randn(60, 5)).double().softmax(1)  # its order isn't that of x
    mu, sigma = torch.randn(5), 0.1 + torch.rand(5)
    found = ood.scores(x, p, mu=mu, sigma=sigma, stats=stats)
    assert list(found) == ALL
    assert all(score.shape == (60,) and score.dtype == torch.float64 for score in found.values())

    k, rows = p.argmax(1).numpy(), np.arange(60)
    assert (k != x.argmax(1).numpy()).any()
    a, m, s = x.double().numpy(), stats.mean.numpy(), stats.std.numpy()
    expected = {
        "probability": p.numpy().max(1),
        "output": a.max(1),
        "energy": logsumexp(a, axis=1),
        "learned": norm.logpdf(a[rows, k], mu.double().numpy()[k], sigma.double().numpy()[k]),
        "empirical": norm.logpdf(a[rows, k], m[k, k], s[k, k]),
        "empirical_all": plain_empirical_all(a, m, s, range(5)),
    }
    for name in ALL:
        np.testing.assert_allclose(found[name].numpy(), expected[name], rtol=1e-12, err_msg=name)


@SETTINGS
@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.floats(1e-3, 1e3))
def test_the_learned_density_is_scipys(x, mu, sigma):
    found = ood.scores([[x]], [[1.0]], mu=[mu], sigma=[sigma])["learned"]
    np.testing.assert_allclose(found.numpy(), [norm.logpdf(x, mu, sigma)], rtol=1e-12, atol=1e-12)


def test_scores_are_given_for_what_is_known():
    x, y = training()
    p = x.softmax(1)
    assert list(ood.scores(x, p)) == ALL[:3]
    assert list(ood.scores(x, p, mu=torch.zeros(5), sigma=torch.ones(5))) == ALL[:4]
    assert list(ood.scores(x, p, stats=statistics(x, y))) == ALL[:3] + ALL[4:]


def test_arrays_and_a_heads_own_parameters_are_taken():
    x, _ = training()
    layer = GaussianLogits(5)
    p = layer(x).softmax(1)
    assert p.requires_grad
    found = ood.scores(x, p, mu=layer.mu, sigma=layer.sigma)
    assert not any(score.requires_grad for score in found.values())
    arrays = ood.scores(x.numpy(), p.detach().numpy(), mu=np.zeros(5), sigma=layer.sigma.tolist())
    for name, score in found.items():
        torch.testing.assert_close(arrays[name], score)


def test_no_images_no_scores():
    x, y = training()
    found = ood.scores(x[:0], x[:0], mu=torch.zeros(5), sigma=torch.ones(5), stats=statistics(x, y))
    assert {name: tuple(score.shape) for name, score in found.items()} == dict.fromkeys(ALL, (0,))


@pytest.mark.parametrize("block", [1, 2**10, 2**30])
def test_the_result_does_not_depend_on_the_blocks(monkeypatch, block):
    x, y = training()
    stats = statistics(x, y)
    whole = ood._highest_log_density(x, stats.mean, stats.std)
    monkeypatch.setattr(ood, "_BLOCK", block)
    torch.testing.assert_close(ood._highest_log_density(x, stats.mean, stats.std), whole, rtol=1e-14, atol=0)


def test_an_offset_of_all_outputs_leaves_the_measured_densities():
    x, y = training()
    near = ood.scores(x, x.softmax(1), stats=statistics(x, y))
    far = ood.scores(x + 2.0**20, x.softmax(1), stats=statistics(x + 2.0**20, y))
    for name in ("empirical", "empirical_all"):
        torch.testing.assert_close(far[name], near[name], rtol=1e-7, atol=0)


# -- classes that lack something --------------------------------------------------------------------------------------


@pytest.mark.parametrize("images", [0, 1])
def test_a_class_without_two_images_is_skipped(images):
    x, y = training()
    keep = y != 2
    keep[2] = images == 1
    stats = statistics(x[keep], y[keep])
    p = x.softmax(1)
    found = ood.scores(x, p, stats=stats)
    others = [0, 1, 3, 4]
    k = p.numpy().copy()
    k[:, 2] = -1
    k, a, m, s = k.argmax(1), x.numpy(), stats.mean.numpy(), stats.std.numpy()
    assert (p.argmax(1) == 2).any()
    np.testing.assert_allclose(found["empirical"], norm.logpdf(a[np.arange(len(a)), k], m[k, k], s[k, k]), rtol=1e-12)
    np.testing.assert_allclose(found["empirical_all"], plain_empirical_all(a, m, s, others), rtol=1e-12)


@pytest.mark.parametrize("part", ["mean", "m2"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_class_with_non_finite_statistics_is_skipped(part, value):
    x, y = training()
    state = statistics(x, y).state_dict()
    state[part][2, 2] = value
    found = ood.scores(x, x.softmax(1), stats=ClassStatistics(5).load_state_dict(state))
    expected = ood.scores(x, x.softmax(1), stats=statistics(x[y != 2], y[y != 2]))
    for name in ("empirical", "empirical_all"):
        assert torch.isfinite(found[name]).all()
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-12)


def test_an_output_that_never_varies_has_the_deviation_of_the_floor():
    x, y = training()
    x[y == 1, 1] = 7.0
    x[y == 1, 3] = -2.0
    stats = statistics(x, y)
    s = stats.std.numpy()
    assert s[1, 1] == s[1, 3] == 0
    floor = ood.DEVIATION_FLOOR * np.sort(s[s > 0])[(np.sum(s > 0) - 1) // 2]  # the lower of two middle ones
    s = np.where(s == 0, floor, s)
    p = x.softmax(1)
    found = ood.scores(x, p, stats=stats)
    k, rows = p.argmax(1).numpy(), np.arange(len(x))
    m = stats.mean.numpy()
    np.testing.assert_allclose(found["empirical"], norm.logpdf(x.numpy()[rows, k], m[k, k], s[k, k]), rtol=1e-9)
    np.testing.assert_allclose(found["empirical_all"], plain_empirical_all(x, m, s, range(5)), rtol=1e-9)


def test_the_floor_follows_the_scale_of_the_outputs():
    x, y = training()
    x[y == 1, 1] = 7.0
    p = x.softmax(1)
    unit = ood.scores(x, p, stats=statistics(x, y))
    large = ood.scores(1024 * x, p, stats=statistics(1024 * x, y))
    torch.testing.assert_close(large["empirical"], unit["empirical"] - math.log(1024), rtol=1e-12, atol=0)
    torch.testing.assert_close(large["empirical_all"], unit["empirical_all"] - 5 * math.log(1024), rtol=1e-12, atol=0)


@SETTINGS
@given(st.data())
def test_finite_outputs_have_finite_scores(data):
    """With missing classes and repeated values."""
    classes = data.draw(st.integers(1, 4))
    value = st.sampled_from([0.0, 1.0, 1.0 + 2**-20, -3.0, 1e4, 1e-30, 3e38, -3e38])
    rows = st.lists(st.lists(value, min_size=classes, max_size=classes), min_size=2, max_size=8)
    train = torch.tensor(data.draw(rows))
    y = torch.tensor(data.draw(st.lists(st.integers(0, classes - 1), min_size=len(train), max_size=len(train))))
    pooled = data.draw(st.booleans())
    test = torch.tensor(data.draw(rows))
    stats = statistics(train, y, pooled=pooled)
    enough = stats.count.view(classes, -1)[:, 0] >= 2
    own = stats.std[:, :1] if pooled else stats.std
    if not (own[enough] > 0).any():
        with pytest.raises(ValueError, match="2 images whose outputs differ, got none"):
            ood.scores(test, test.softmax(1), stats=stats)
        return
    for name, score in ood.scores(test, test.softmax(1), stats=stats).items():
        assert torch.isfinite(score).all(), name


def test_pooled_statistics_have_the_classes_own_gaussian_only():
    x, y = training()
    full = ood.scores(x, x.softmax(1), stats=statistics(x, y))
    pooled = ood.scores(x, x.softmax(1), stats=statistics(x, y, pooled=True))
    assert list(pooled) == [*ALL[:3], "empirical"]
    torch.testing.assert_close(pooled["empirical"], full["empirical"], rtol=1e-12, atol=1e-12)


# -- ROC numbers ------------------------------------------------------------------------------------------------------

# Few different values make ties within and across; the others are far apart in size.
VALUES = st.one_of(st.integers(-2, 2).map(float), st.floats(-1e300, 1e300))
SCORES = st.lists(VALUES, min_size=1, max_size=30)


@SETTINGS
@given(SCORES, SCORES)
def test_auroc_is_scikit_learns(inside, outside):
    expected = roc_auc_score([1] * len(inside) + [0] * len(outside), inside + outside)
    assert ood.auroc(inside, outside) == pytest.approx(expected, abs=1e-12)


def test_auroc_is_scikit_learns_on_many_tied_scores():
    inside, outside = torch.randn(3000).add(0.5).mul(8).round(), torch.randn(2000).mul(8).round()
    expected = roc_auc_score(np.r_[np.ones(3000), np.zeros(2000)], torch.cat([inside, outside]).numpy())
    assert ood.auroc(inside, outside) == pytest.approx(expected, abs=1e-12)
    assert ood.auroc(inside, outside) + ood.auroc(outside, inside) == pytest.approx(1, abs=1e-15)


def test_infinite_scores_are_ranked():
    inf = math.inf
    assert ood.auroc([inf, 0.0], [-inf, -inf]) == 1.0
    assert ood.auroc([-inf], [-inf]) == 0.5
    assert ood.fpr_at([inf, 0.0], [-inf, 1.0]) == 0.5


@SETTINGS
@given(SCORES, SCORES, st.sampled_from([0.05, 0.07, 0.25, 0.5, 0.8, 0.95, 1.0]))
def test_fpr_is_that_of_scikit_learns_curve(inside, outside, share):
    inside, outside = np.array(inside), np.array(outside)
    truth = np.r_[np.ones(len(inside)), np.zeros(len(outside))]
    fpr, tpr, _ = roc_curve(truth, np.r_[inside, outside], drop_intermediate=False)
    expected = fpr[np.argmax(tpr >= share - 1e-9)]
    assert ood.fpr_at(inside, outside, share) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("share, threshold", [(0.95, 6), (0.07, 94), (0.29, 72), (1.0, 1), (1e-9, 100)])
def test_the_threshold_is_passed_by_the_share_and_no_more(share, threshold):
    inside = torch.arange(1.0, 101)
    assert ood.fpr_at(inside, torch.tensor([threshold, threshold - 0.5]), share) == 0.5


def test_detection_takes_the_scores_in_common():
    inside = {"probability": [0.9, 0.8], "learned": [1.0], "energy": torch.tensor([1.0, 3.0])}
    outside = {"energy": torch.tensor([2.0]), "probability": [0.8], "empirical": [0.0]}
    assert ood.detection(inside, outside) == {"ood_probability": 0.75, "ood_energy": 0.5}


# -- on data ----------------------------------------------------------------------------------------------------------


def test_gaussian_scores_separate_far_points_from_two_blobs():
    """A linear classifier of two blobs is surest of itself far away, where the Gaussians aren't."""
    y = torch.arange(2000) % 2
    centre = torch.tensor([[3.0, 0.0], [0.0, 3.0]])
    h = centre[y] + 0.5 * torch.randn(2000, 2)
    away = 12 + 0.5 * torch.randn(500, 2)
    away[::2, 0] += 12
    stats = statistics(h[:1000], y[:1000])
    gaussians = {"mu": stats.mean.diagonal(), "sigma": stats.std.diagonal(), "stats": stats}
    inside = ood.scores(h[1000:], h[1000:].double().softmax(1), **gaussians)
    outside = ood.scores(away, away.double().softmax(1), **gaussians)
    found = ood.detection(inside, outside)
    assert list(found) == [f"ood_{name}" for name in ALL]
    for name in ("learned", "empirical", "empirical_all"):
        assert found[f"ood_{name}"] > 0.95, name
        assert ood.fpr_at(inside[name], outside[name]) < 0.05, name
    assert found["ood_probability"] < 0.6
    assert found["ood_output"] < 0.05  # larger outputs look more familiar


# -- mistakes ---------------------------------------------------------------------------------------------------------

X = torch.zeros(2, 3)
P = torch.full((2, 3), 1 / 3)
BOTH = {"mu": torch.zeros(3), "sigma": torch.ones(3)}


@pytest.mark.parametrize(
    "arguments, line",
    [
        ({"x": X[0], "p": P[0]}, r"x must have the shape \(images, classes\) with at least one class, got \(3,\)"),
        ({"x": X[:, :0], "p": P[:, :0]}, r"x must have the shape .* got \(2, 0\)"),
        ({"p": P[:, :2]}, r"p must have the shape \(2, 3\) of x, got \(2, 2\)"),
        ({"x": X / 0}, "x must be finite, got nan"),
        ({"p": P / 0}, "p must be finite, got inf"),
        ({"p": torch.tensor([[1.5, -0.5, 0.0]] * 2)}, r"p must hold probabilities in \[0, 1\], got -0.5"),
        ({"p": torch.full((2, 3), 0.5)}, "p must sum to 1 over the classes, got 1.5"),
        ({"mu": BOTH["mu"]}, "mu and sigma must be given together, got only mu"),
        ({"sigma": BOTH["sigma"]}, "mu and sigma must be given together, got only sigma"),
        (BOTH | {"mu": torch.zeros(2)}, r"mu must have the shape \(3,\) as x, got \(2,\)"),
        (BOTH | {"sigma": torch.ones(3, 2)}, r"sigma must have the shape \(3,\) as x, got \(3, 2\)"),
        (BOTH | {"sigma": torch.tensor([1.0, 0.0, 1.0])}, "sigma must be positive, got a minimum of 0.0"),
        ({"stats": ClassStatistics(3, multilabel=True)}, "stats must be single-label, got multi-label statistics"),
        ({"stats": ClassStatistics(4)}, r"stats must be of the 3 outputs of x, got ClassStatistics\(num_classes=4"),
        ({"stats": ClassStatistics(2)}, r"stats must be of the 3 outputs of x, got ClassStatistics\(num_classes=2"),
        ({"stats": ClassStatistics(4, pooled=True)}, "stats must be of the 3 outputs of x"),
        ({"stats": ClassStatistics(3)}, "stats must hold a class with 2 images whose outputs differ, got none"),
    ],
)
def test_a_mistake_is_one_line(arguments, line):
    with pytest.raises(ValueError, match=line) as raised:
        ood.scores(**({"x": X, "p": P} | arguments))
    assert "\n" not in str(raised.value)


def test_statistics_of_another_kind_are_rejected():
    with pytest.raises(TypeError, match="stats must be a gsoftmax.geometry.ClassStatistics, got dict"):
        ood.scores(X, P, stats={"mean": X})


@pytest.mark.parametrize("measure", [ood.auroc, ood.fpr_at])
def test_nan_scores_are_rejected(measure):
    with pytest.raises(ValueError, match="outside must hold numbers, got 1 NaN among 2 scores"):
        measure([1.0], [math.nan, 0.0])
    with pytest.raises(ValueError, match=r"inside must hold the scores of at least one image, got the shape \(0,\)"):
        measure([], [1.0])
    with pytest.raises(ValueError, match=r"outside must hold the scores of at least one image, got the shape \(1, 1\)"):
        measure([1.0], [[1.0]])


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, math.nan, 95])
def test_a_share_is_a_fraction(share):
    with pytest.raises(ValueError, match="share must be above 0 and at most 1, got"):
        ood.fpr_at([1.0], [0.0], share)


def test_detection_without_common_scores_is_rejected():
    with pytest.raises(ValueError, match=r"a score in common, got \['a'\] and \['b'\]"):
        ood.detection({"a": [1.0]}, {"b": [1.0]})
