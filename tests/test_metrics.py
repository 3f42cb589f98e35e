"""Metrics against scikit-learn, torchmetrics, PyTorch's own losses, and the definitions typed out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk
from torchmetrics.functional import classification as tm

from gsoftmax import metrics

SETTINGS = settings(deadline=None, max_examples=40)


def problem(n=300, labels=7, seed=0, ties=None, rate=0.25, dtype=np.float64):
    """Scores in (0, 1) and 0/1 targets that have something to do with each other; `ties` rounds to that many levels."""
    rng = np.random.default_rng(seed)
    target = (rng.random((n, labels)) < rate).astype(np.int64)
    scores = 1 / (1 + np.exp(-(rng.normal(size=(n, labels)) + target)))
    if ties:
        scores = np.round(scores * ties) / ties
    return scores.astype(dtype), target


def rounding(target):
    """What an AP can be off by: it adds up at most a term for each row, to a sum of at most 1."""
    return len(target) * 2.0**-53


# -- average precision ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ties", [None, 2, 20])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_average_precision_is_that_of_scikit_learn_and_torchmetrics(dtype, ties):
    scores, target = problem(ties=ties, dtype=dtype)
    found = metrics.average_precision(scores, target)
    expected = [sk.average_precision_score(target[:, j], scores[:, j]) for j in range(target.shape[1])]
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=0, atol=rounding(target))
    theirs = tm.multilabel_average_precision(torch.from_numpy(scores), torch.from_numpy(target), 7, average=None)
    np.testing.assert_allclose(found, theirs, rtol=1e-5)
    assert metrics.mean_average_precision(scores, target) == pytest.approx(np.mean(expected), abs=rounding(target))


def test_average_precision_on_threads_is_the_same():
    scores, target = problem(n=metrics._SMALL // 20 + 1, labels=20, ties=1000, dtype=np.float32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        found = metrics.average_precision(scores, target)
    finally:
        torch.set_num_threads(before)
    expected = [sk.average_precision_score(target[:, j], scores[:, j]) for j in range(20)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=rounding(target))


@SETTINGS
@given(
    st.integers(1, 12).flatmap(
        lambda n: st.tuples(
            st.lists(st.sampled_from([-3.0, 0.0, 0.25, 0.5, 100.0, np.inf, -np.inf]), min_size=n, max_size=n),
            st.lists(st.booleans(), min_size=n, max_size=n),
        )
    )
)
def test_average_precision_of_small_rankings(case):
    scores, target = np.array(case[0])[:, None], np.array(case[1])[:, None]
    exact, voc12 = (metrics.average_precision(scores, target, style=style)[0] for style in ("exact", "voc12"))
    if not target.any():
        assert np.isnan(exact) and np.isnan(voc12)
        return
    # the definition, step by step over distinct scores
    steps = [(scores >= value) for value in sorted(set(case[0]), reverse=True)]
    recall = [0.0] + [float((step & target).sum() / target.sum()) for step in steps]
    precision = [float((step & target).sum() / step.sum()) for step in steps]
    gain = np.diff(recall)
    assert exact == pytest.approx(float((gain * precision).sum()), abs=1e-15)
    envelope = [max(precision[k:]) for k in range(len(precision))]
    assert voc12 == pytest.approx(float((gain * envelope).sum()), abs=1e-15)
    assert exact <= voc12 + 1e-15


def test_voc12_is_the_area_under_the_envelope():
    scores, target = problem(labels=4)
    for j, found in enumerate(metrics.average_precision(scores, target, style="voc12")):
        hit = target[np.argsort(-scores[:, j]), j]  # no ties here
        recall = np.concatenate([[0], np.cumsum(hit) / hit.sum(), [1]])
        precision = np.concatenate([[0], np.cumsum(hit) / np.arange(1, len(hit) + 1), [0]])
        for i in range(len(precision) - 2, -1, -1):
            precision[i] = max(precision[i], precision[i + 1])
        steps = np.flatnonzero(recall[1:] != recall[:-1])
        assert found == pytest.approx(((recall[steps + 1] - recall[steps]) * precision[steps + 1]).sum(), rel=1e-12)


def test_a_class_without_positives_is_nan_and_left_out_of_the_mean():
    scores, target = problem(labels=4)
    target[:, 2] = 0
    target[:, 3] = 1
    found = metrics.average_precision(scores, target)
    assert np.isnan(found).tolist() == [False, False, True, False] and found[3] == 1
    assert metrics.mean_average_precision(scores, target) == pytest.approx(found[[0, 1, 3]].mean())
    with pytest.warns(UserWarning, match="No positive samples"):
        theirs = tm.multilabel_average_precision(torch.from_numpy(scores), torch.from_numpy(target), 4, average=None)
    np.testing.assert_allclose(found[[0, 1, 3]], theirs[[0, 1, 3]], rtol=1e-5)
    assert np.isnan(metrics.mean_average_precision(scores, np.zeros_like(target)))
    assert np.isnan(metrics.average_precision(np.zeros((0, 2)), np.zeros((0, 2)))).all()


def test_raw_scores_are_ranked_as_they_are():
    # a sigmoid would make 40 and 50 equal in float32
    scores, target = torch.tensor([[50.0], [40.0], [-50.0]]), torch.tensor([[0], [1], [1]])
    assert metrics.average_precision(scores, target).item() == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert len(torch.sigmoid(scores).unique()) == 2
    masked = torch.tensor([[float("inf")], [0.0], [-float("inf")]])
    assert metrics.average_precision(masked, torch.tensor([[1], [0], [1]])).item() == pytest.approx((1 + 2 / 3) / 2)


def test_kinds_of_input_and_output():
    scores, target = problem(dtype=np.float32)
    expected = metrics.average_precision(scores, target)
    for t in (target.astype(bool), target.astype(np.float32), target.astype(np.uint8), torch.from_numpy(target)):
        np.testing.assert_array_equal(metrics.average_precision(scores, t), expected)
    as_tensor = metrics.average_precision(torch.from_numpy(scores).requires_grad_(), torch.from_numpy(target))
    assert isinstance(as_tensor, torch.Tensor) and as_tensor.dtype == torch.float64
    np.testing.assert_array_equal(as_tensor, expected)
    np.testing.assert_array_equal(metrics.average_precision(scores.T.copy().T, target), expected)
    for dtype in (torch.bfloat16, torch.float16):
        low = torch.from_numpy(scores).to(dtype)
        full = metrics.average_precision(low.float(), target)
        assert torch.equal(metrics.average_precision(low, target), full)
    counts = (scores * 10).astype(np.int32)
    np.testing.assert_array_equal(
        metrics.average_precision(counts, target), metrics.average_precision(counts.astype(np.float64), target)
    )


# -- the multi-label numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.5, 0.8])
def test_report_is_that_of_scikit_learn(threshold):
    scores, target = problem(n=500, labels=9, ties=50)
    scores[:, 4] *= 0.4  # never predicted
    target[:, 6] = 0  # no positives
    report = metrics.multilabel_report(scores, target, threshold)
    guess = scores >= threshold
    present = [j for j in range(9) if j != 6]
    per_class = sk.precision_recall_fscore_support(target, guess, average=None, zero_division=0)
    macro = sk.precision_recall_fscore_support(target, guess, average="macro", labels=present, zero_division=0)
    micro = sk.precision_recall_fscore_support(target, guess, average="micro", zero_division=0)
    np.testing.assert_allclose(report.precision, per_class[0], rtol=1e-14)
    for mine, theirs in ((report.recall, per_class[1]), (report.f1, per_class[2])):
        assert np.isnan(mine[6])
        np.testing.assert_allclose(mine[present], theirs[present], rtol=1e-14)
    assert (report.C_P, report.C_R, report.C_F1_mean) == pytest.approx(macro[:3], rel=1e-14)
    assert pytest.approx(micro[:3], rel=1e-14) == (report.O_P, report.O_R, report.O_F1)
    assert report.C_F1_harmonic == pytest.approx(2 / (1 / report.C_P + 1 / report.C_R), rel=1e-14)
    assert abs(report.C_F1_harmonic - report.C_F1_mean) > 1e-4  # two different numbers
    assert (report.classes_without_positives, report.classes_without_predictions) == (1, 1)
    np.testing.assert_array_equal(report.positives, target.sum(0))
    np.testing.assert_array_equal(report.predicted, guess.sum(0))
    for mean, values, style in ((report.mAP, report.ap, "exact"), (report.mAP_voc12, report.ap_voc12, "voc12")):
        np.testing.assert_array_equal(values, metrics.average_precision(scores, target, style=style))
        assert mean == metrics.mean_average_precision(scores, target, style=style)


def test_report_with_every_class_present_is_the_plain_macro_average():
    scores, target = problem(n=500, labels=9)
    report = metrics.multilabel_report(scores, target)
    macro = sk.precision_recall_fscore_support(target, scores >= 0.5, average="macro")
    assert (report.C_P, report.C_R, report.C_F1_mean) == pytest.approx(macro[:3], rel=1e-14)
    theirs = tm.multilabel_f1_score(torch.from_numpy(scores), torch.from_numpy(target), 9, average="macro")
    assert report.C_F1_mean == pytest.approx(theirs.item(), rel=1e-5)
    assert set(report.summary()) == {
        "mAP", "mAP_voc12", "C_P", "C_R", "C_F1_harmonic", "C_F1_mean", "O_P", "O_R", "O_F1",
        "classes_without_positives", "classes_without_predictions", "threshold", "n",
    }  # fmt: skip


def test_report_of_nothing():
    report = metrics.multilabel_report(np.zeros((3, 2)), np.ones((3, 2)))  # nothing predicted
    names = ("C_P", "C_R", "C_F1_harmonic", "C_F1_mean", "O_P", "O_R", "O_F1")
    assert [getattr(report, name) for name in names] == [0] * 7 and report.mAP == 1
    report = metrics.multilabel_report(np.ones((3, 2)), np.zeros((3, 2)))  # nothing positive
    assert report.O_P == 0 and report.classes_without_positives == 2
    assert all(np.isnan(v) for v in (report.mAP, report.C_P, report.C_R, report.C_F1_mean, report.O_R, report.O_F1))


# -- single label -----------------------------------------------------------------------------------------------------


def classes(n=400, c=6, seed=1):
    generator = torch.manual_seed(seed)
    target = torch.randint(0, c, (n,), generator=generator)
    x = torch.randn(n, c, generator=generator, dtype=torch.float64)
    x[torch.arange(n), target] += 1.5
    return x, target


def test_top1_error():
    x, target = classes()
    expected = 1 - sk.accuracy_score(target, x.argmax(1))
    assert metrics.top1_error(x, target) == pytest.approx(expected)
    assert metrics.top1_error(x.numpy(), target.numpy().astype(np.int32)) == pytest.approx(expected)
    assert metrics.top1_error(x.reshape(40, 10, 6).movedim(2, 1), target.reshape(40, 10)) == pytest.approx(expected)
    masked = torch.where(torch.arange(400) < 100, target, -100)
    assert metrics.top1_error(x, masked) == metrics.top1_error(x[:100], target[:100])
    assert np.isnan(metrics.top1_error(x, torch.full_like(target, -100)))
    assert metrics.top1_error(torch.tensor([[1, 1]]), torch.tensor([0])) == 0


def test_negative_log_likelihood():
    x, target = classes()
    expected = torch.nn.functional.cross_entropy(x, target).item()
    assert metrics.negative_log_likelihood(x.softmax(1), target) == pytest.approx(expected, rel=1e-12)
    certain = sk.log_loss([1, 0], [[1.0, 0.0], [1.0, 0.0]])  # and wrong, half of the time
    assert metrics.negative_log_likelihood([[1.0, 0.0], [1.0, 0.0]], [1, 0]) == pytest.approx(certain)
    y, t = torch.randn(50, 4, generator=torch.manual_seed(0), dtype=torch.float64), torch.arange(200).reshape(50, 4) % 2
    expected = torch.nn.functional.binary_cross_entropy_with_logits(y, t.double(), reduction="none").mean(0)
    torch.testing.assert_close(metrics.multilabel_negative_log_likelihood(y.sigmoid(), t), expected, rtol=1e-12, atol=0)
    found = metrics.multilabel_negative_log_likelihood([[1.0, 0.0]], [[0, 0]])
    assert found.tolist() == pytest.approx([-np.log(metrics.P_MIN), 0.0])


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_expected_calibration_error(bins):
    x, target = classes(2000)
    p = x.softmax(1)
    rounding = 1e-5  # torchmetrics adds up 2000 numbers below 1 in float32
    theirs = tm.multiclass_calibration_error(p, target, 6, n_bins=bins, norm="l1").item()
    assert metrics.expected_calibration_error(p, target, bins) == pytest.approx(theirs, abs=rounding)
    q, t = problem(n=2000, labels=3)
    columns = zip(torch.from_numpy(q.T.copy()), torch.from_numpy(t.T.copy()), strict=True)
    theirs = [tm.binary_calibration_error(*column, n_bins=bins).item() for column in columns]
    np.testing.assert_allclose(metrics.multilabel_expected_calibration_error(q, t, bins), theirs, rtol=0, atol=rounding)


def test_calibration_bins_are_closed_above():
    # 0.5 belongs to (0, 0.5] and 1.0 to (0.5, 1]: each bin is off by a half, in opposite directions
    p, target = [[1.0], [0.75], [0.5], [0.25]], [[0], [1], [1], [0]]
    assert metrics.multilabel_expected_calibration_error(p, target, bins=2).tolist() == [(0.75 + 0.25) / 4]
    assert metrics.multilabel_expected_calibration_error([[0.0], [1.0]], [[0], [1]]).tolist() == [0.0]


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: metrics.average_precision([[np.nan]], [[1]]), ValueError, r"scores must not hold nan.* at \(0, 0\)"),
        (lambda: metrics.average_precision([[0.1]], [[2]]), ValueError, "target must be 0 or 1, got 2"),
        (lambda: metrics.average_precision([[0.1]], [[np.nan]]), ValueError, "target must be 0 or 1, got nan"),
        (lambda: metrics.average_precision([0.1], [1]), ValueError, r"scores must have the shape \(N, L\), got \(1,\)"),
        (lambda: metrics.average_precision([[0.1]], [[1, 0]]), ValueError, r"target must have the shape .*\(1, 1\)"),
        (lambda: metrics.average_precision([[0.1]], [[1]], style="voc07"), ValueError, "exact, voc12, got 'voc07'"),
        (lambda: metrics.average_precision([["a"]], [[1]]), TypeError, "scores must be a tensor or an array of"),
        (lambda: metrics.multilabel_report([[0.1]], [[1]], np.nan), ValueError, "threshold must be a number, got nan"),
        (lambda: metrics.top1_error([[0.1, 0.2]], [2]), ValueError, "target must be in 0 to 1 .*got 2"),
        (lambda: metrics.top1_error([[0.1, 0.2]], [0.0]), TypeError, "integer class indices, got float64"),
        (lambda: metrics.top1_error([0.1, 0.2], [0]), ValueError, r"scores must have the shape \(N, C\)"),
        (lambda: metrics.top1_error([[0.1, 0.2]], [0, 1]), ValueError, r"target must have the shape \(1,\)"),
        (lambda: metrics.top1_error([[0.1, np.nan]], [0]), ValueError, "scores must not hold nan"),
        (lambda: metrics.negative_log_likelihood([[3.0, -1.0]], [0]), ValueError, r"p must .*in \[0, 1\], got -1"),
        (lambda: metrics.negative_log_likelihood([[0.9, 0.9]], [0]), ValueError, "p must sum to 1 .*, got 1.8"),
        (lambda: metrics.expected_calibration_error([[1.0]], [0], bins=0), ValueError, "bins must be a .*, got 0"),
        (lambda: metrics.multilabel_expected_calibration_error([[1.5]], [[1]]), ValueError, "p must .*got 1.5"),
    ],
)  # fmt: skip
def test_mistakes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
