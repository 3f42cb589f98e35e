"""Class geometry against longdouble sums, NumPy on the whole data, torch.distributions, and itself in other orders."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import processes
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import one_thread  # noqa: F401

from gsoftmax import geometry
from gsoftmax.geometry import MEASURES, ClassStatistics

SETTINGS = settings(deadline=None, max_examples=25)


# -- learned Gaussians ------------------------------------------------------------------------------------------------


def slow_separability(mu, sigma):
    """The definition, term by term, in 80-bit floats."""
    mu, sigma = np.asarray(mu, np.longdouble), np.asarray(sigma, np.longdouble)
    half = np.longdouble(0.5)
    out = np.empty(len(mu), np.longdouble)
    for i in range(len(mu)):
        d2, v_i, v = (mu[i] - mu) ** 2, sigma[i] ** 2, sigma**2
        there = np.log(sigma / sigma[i]) + (v_i + d2) / (2 * v) - half
        back = np.log(sigma[i] / sigma) + (v + d2) / (2 * v_i) - half
        out[i] = np.delete(there + back, i).sum() / (2 * (len(mu) - 1))
    return out


M = 2000
RNG = np.random.default_rng(7)
MEANS = {
    "spread": RNG.uniform(-1000, 1000, M),
    "offset": 1e4 + RNG.normal(size=M),
    "spread and offset": 1e4 + RNG.uniform(-1000, 1000, M),
    "within 0.001": RNG.uniform(0, 1e-3, M),
    "within 0.001 and offset": 1e4 + RNG.uniform(0, 1e-3, M),
}
SIGMAS = {"1e-3 to 1e3": 10 ** RNG.uniform(-3, 3, M), "within 1e-4 of 1": 1 + RNG.uniform(-1e-4, 1e-4, M)}


@pytest.mark.parametrize("sigmas", SIGMAS)
@pytest.mark.parametrize("means", MEANS)
def test_separability_in_linear_time_equals_the_quadratic_sum(means, sigmas):
    mu, sigma = MEANS[means], SIGMAS[sigmas]
    exact = slow_separability(mu, sigma)
    assert float(np.max(np.abs(geometry.separability(mu, sigma) / exact - 1))) < 1e-11


@SETTINGS
@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(1e-3, 1e3)), min_size=2, max_size=12))
def test_separability_is_that_of_torch_distributions(pairs):
    mu, sigma = torch.tensor(pairs, dtype=torch.float64).T.contiguous()
    normal = torch.distributions.Normal(mu[:, None], sigma[:, None])
    other = torch.distributions.Normal(mu[None], sigma[None])
    kl = torch.distributions.kl_divergence
    expected = (kl(normal, other) + kl(other, normal)).sum(1) / (2 * (len(pairs) - 1))
    torch.testing.assert_close(geometry.separability(mu, sigma), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(geometry.ratio(mu, sigma), expected / sigma, rtol=1e-9, atol=1e-6)
    torch.testing.assert_close(
        geometry.kl_divergence(mu[:, None], sigma[:, None], mu, sigma), kl(normal, other), rtol=1e-9, atol=1e-9
    )
    torch.testing.assert_close(
        geometry.pair_separability(mu[0], sigma[0], mu[1], sigma[1]),
        geometry.separability(mu[:2], sigma[:2])[0],
        rtol=1e-12,
        atol=0,
    )


def test_separability_is_differentiable():
    mu = torch.randn(6, dtype=torch.float64, generator=torch.manual_seed(0)).requires_grad_()
    sigma = torch.rand(6, dtype=torch.float64, generator=torch.manual_seed(1)).add(0.5).requires_grad_()
    assert torch.autograd.gradcheck(geometry.separability, (mu, sigma))


def test_kind_and_type_of_the_result():
    for function in (geometry.separability, geometry.ratio):
        assert function(torch.zeros(3), torch.ones(3)).dtype == torch.float64
        assert isinstance(function([0, 1, 2], [1, 1, 1]), np.ndarray)
        assert function(np.zeros(3, np.float32), np.ones(3, np.float32)).dtype == np.float64
    assert isinstance(geometry.compactness(torch.ones(2)), torch.Tensor)
    assert geometry.kl_divergence(torch.tensor(0.0), 1.0, [0.0, 1.0], 1.0).tolist() == [0.0, 0.5]
    assert geometry.kl_divergence(0, 1, 0, 1) == 0


def test_one_class_has_nothing_to_be_separated_from():
    assert np.isnan(geometry.separability([0.0], [1.0])).all()
    assert np.isnan(geometry.ratio([0.0], [1.0])).all()
    assert geometry.compactness([2.0]).tolist() == [0.5]


@pytest.mark.parametrize(
    ("mu", "sigma", "error", "message"),
    [
        ([0.0, 1.0], [1.0, -1.0], ValueError, "sigma must be positive, got a minimum of -1.0"),
        ([0.0, 1.0], [1.0, 0.0], ValueError, "sigma must be positive, got a minimum of 0.0"),
        ([0.0, float("nan")], [1.0, 1.0], ValueError, "mu must be finite, got nan"),
        ([0.0, 1.0], [1.0, float("inf")], ValueError, "sigma must be finite, got inf"),
        ([0.0, 1.0], [1.0], ValueError, r"got mu \(2,\) and sigma \(1,\)"),
        ([[0.0, 1.0]], [[1.0, 1.0]], ValueError, r"mu must have the shape \(classes,\).*got \(1, 2\)"),
        ([], [], ValueError, r"at least one class, got \(0,\)"),
        ("abc", [1.0], TypeError, "mu must be a tensor, an array or a list of numbers, got 'abc'"),
    ],
)
def test_bad_gaussians(mu, sigma, error, message):
    with pytest.raises(error, match=message):
        geometry.separability(mu, sigma)


# -- empirical Gaussians ----------------------------------------------------------------------------------------------


def outputs(n=600, m=5, seed=0, multilabel=False):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, m)) * rng.uniform(0.5, 3, m) + rng.normal(size=m)
    if multilabel:
        y = (rng.random((n, m)) < 0.3).astype(np.int64)
        return torch.from_numpy(x + 2 * y), torch.from_numpy(y)
    y = rng.integers(0, m, n)
    x[np.arange(n), y] += 4
    return torch.from_numpy(x), torch.from_numpy(y)


def by_numpy(x, y, m, pooled=False, multilabel=False):
    """The five measures straight from their definitions, from all the data at once."""
    x, y = np.asarray(x, np.float64), np.asarray(y)
    result = {name: np.full(m, np.nan) for name in MEASURES}
    for c in range(m):
        if multilabel:
            own, others = x[y[:, c] == 1, c], [x[y[:, c] == 0, c]]
        else:
            rows = x[y == c]
            own, others = rows[:, c], [rows[:, j] for j in range(m) if j != c]
            others = [np.concatenate(others)] if pooled else others
        mu, sigma = own.mean(), own.std()
        kl = geometry.kl_divergence  # compared with torch.distributions above
        divergence = [kl(mu, sigma, o.mean(), o.std()) + kl(o.mean(), o.std(), mu, sigma) for o in others]
        result["compactness"][c] = 1 / sigma
        result["separability"][c] = np.sum(divergence) / (2 * len(others))
        result["ratio"][c] = result["separability"][c] / sigma
        result["relative_sigma"][c] = sigma / min(abs(mu - o.mean()) for o in others)
        result["dprime"][c] = np.mean([(mu - o.mean()) / np.sqrt((sigma**2 + o.var()) / 2) for o in others])
    return result


FORMS = {"full": {}, "pooled": {"pooled": True}, "multilabel": {"multilabel": True}}


def new(form):
    return ClassStatistics(5, **FORMS[form])


@pytest.fixture(params=FORMS)
def case(request):
    """A form, and outputs and labels for it."""
    return request.param, *outputs(multilabel=request.param == "multilabel")


def assert_same(a: ClassStatistics, b: ClassStatistics, rtol=1e-12):
    assert torch.equal(a.count, b.count)
    torch.testing.assert_close(a.mean, b.mean, rtol=rtol, atol=rtol, equal_nan=True)
    torch.testing.assert_close(a.std, b.std, rtol=rtol, atol=rtol, equal_nan=True)


def test_streamed_measures_are_those_of_the_whole_data(case):
    form, x, y = case
    statistics = new(form)
    for part, labels in zip(x.split(37), y.split(37), strict=True):
        assert statistics.update(part, labels) is statistics
    expected = by_numpy(x, y, 5, **FORMS[form])
    found = statistics.geometry()
    for name in MEASURES:
        np.testing.assert_allclose(getattr(found, name).numpy(), expected[name], rtol=1e-11, err_msg=name)
        assert torch.equal(getattr(statistics, name)(), getattr(found, name))
        assert found.average()[name] == pytest.approx(expected[name].mean(), rel=1e-11)
    assert found.left_out == {} and found.pooled == (form == "pooled") and found.multilabel == (form == "multilabel")
    own = y.sum(0) if form == "multilabel" else torch.bincount(y)
    assert torch.equal(found.count, own)


def test_table_is_row_true_class_column_output():
    x, y = outputs()
    statistics = ClassStatistics(5).update(x, y)
    assert statistics.count.shape == (5,) and statistics.mean.shape == (5, 5)
    for c in range(5):
        rows = x[y == c].numpy()
        np.testing.assert_allclose(statistics.mean[c], rows.mean(0), rtol=1e-13)
        np.testing.assert_allclose(statistics.std[c], rows.std(0), rtol=1e-13)


def test_pooled_and_multilabel_tables():
    x, y = outputs()
    pooled = ClassStatistics(5, pooled=True).update(x, y)
    rows = x[y == 2].numpy()
    impostors = np.delete(rows, 2, axis=1)
    assert pooled.count[2].tolist() == [len(rows), impostors.size]
    np.testing.assert_allclose(pooled.mean[2], [rows[:, 2].mean(), impostors.mean()], rtol=1e-13)
    np.testing.assert_allclose(pooled.std[2], [rows[:, 2].std(), impostors.std()], rtol=1e-13)
    x, y = outputs(multilabel=True)
    several = ClassStatistics(5, multilabel=True).update(x, y)
    has = y[:, 3] == 1
    assert several.count[3].tolist() == [int(has.sum()), int((~has).sum())]
    np.testing.assert_allclose(several.mean[3], [x[has, 3].mean(), x[~has, 3].mean()], rtol=1e-13)
    np.testing.assert_allclose(several.std[3], [x[has, 3].numpy().std(), x[~has, 3].numpy().std()], rtol=1e-13)


@pytest.mark.parametrize("form", FORMS)
@SETTINGS
@given(data=st.data())
def test_any_split_and_merge_order_gives_the_same_result(form, data):
    n, m = data.draw(st.integers(1, 60)), data.draw(st.integers(2, 6))
    multilabel = form == "multilabel"
    x, y = outputs(n, m, seed=data.draw(st.integers(0, 99)), multilabel=multilabel)
    whole = ClassStatistics(m, **FORMS[form]).update(x, y)
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=5)))
    edges = [0, *cuts, n]
    parts = [
        ClassStatistics(m, **FORMS[form]).update(x[a:b], y[a:b]) for a, b in zip(edges[:-1], edges[1:], strict=True)
    ]
    merged = ClassStatistics(m, **FORMS[form])
    for part in data.draw(st.permutations(parts)):
        assert merged.merge(part) is merged
    assert_same(merged, whole)
    streamed = ClassStatistics(m, **FORMS[form])
    for a, b in zip(edges[:-1], edges[1:], strict=True):
        streamed.update(x[a:b], y[a:b])
    assert_same(streamed, whole)


def test_a_large_offset_costs_no_digits(case):
    form, x, y = case
    offset = 2.0**20  # exact in float64 to 2^-32
    x = (x * 2**20).round() / 2**20
    near, far = new(form), new(form)
    for part, labels in zip(x.split(50), y.split(50), strict=True):
        near.update(part, labels)
        far.update(part + offset, labels)
    torch.testing.assert_close(far.std, near.std, rtol=1e-9, atol=0)  # one-pass sums of squares keep four digits here


def test_large_updates_are_processed_in_chunks(case, monkeypatch):
    form, x, y = case
    whole = new(form).update(x, y)
    measures = whole.geometry()
    monkeypatch.setattr(geometry, "CHUNK", 5 * 7)  # 7 images at a time
    pieces = new(form).update(x, y)
    assert_same(pieces, whole)
    monkeypatch.setattr(geometry, "BLOCK", 10)  # 2 rows of the table at a time
    for name in MEASURES:
        torch.testing.assert_close(getattr(whole, name)(), getattr(measures, name), rtol=0, atol=0)


def test_scale_changes_compactness_and_ratio_only(case):
    form, x, y = case
    one = new(form).update(x, y).geometry()
    ten = new(form).update(10 * x, y).geometry()
    for name in ("separability", "relative_sigma", "dprime"):
        torch.testing.assert_close(getattr(ten, name), getattr(one, name), rtol=1e-11, atol=0)
    for name in ("compactness", "ratio"):
        torch.testing.assert_close(10 * getattr(ten, name), getattr(one, name), rtol=1e-11, atol=0)


def test_more_dimensions_are_more_images():
    x, y = outputs(60)
    images = x.reshape(10, 2, 3, 5).movedim(-1, 1)  # (N, C, d1, d2)
    assert_same(ClassStatistics(5).update(images, y.reshape(10, 2, 3)), ClassStatistics(5).update(x, y))
    x, y = outputs(60, multilabel=True)
    images, labels = (part.reshape(10, 6, 5).movedim(-1, 1) for part in (x, y))
    several = ClassStatistics(5, multilabel=True)
    assert_same(several.update(images, labels), ClassStatistics(5, multilabel=True).update(x, y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision_input_is_summed_in_float64(case, dtype):
    form, x, y = case
    x = x.to(dtype)
    low = new(form).update(x, y)
    assert low.mean.dtype == torch.float64
    assert_same(low, new(form).update(x.double(), y))


def test_numpy_bool_and_float_labels_and_gradients(case):
    form, x, y = case
    expected = new(form).update(x, y)
    assert_same(new(form).update(x.numpy(), y.numpy().astype(np.int32)), expected)
    assert_same(new(form).update(x.clone().requires_grad_(), y.byte()), expected)
    if form == "multilabel":
        assert_same(new(form).update(x, y.bool()), expected)
        assert_same(new(form).update(x, y.double()), expected)


@pytest.mark.parametrize("ignore_index", [-100, 2, 7])
@pytest.mark.parametrize("form", ["full", "pooled"])
def test_ignored_images_are_left_out_whatever_they_hold(form, ignore_index):
    x, y = outputs()
    dropped = torch.rand(y.shape, generator=torch.manual_seed(3)) < 0.3
    y = torch.where(dropped, ignore_index, y)
    used = y != ignore_index
    holes = torch.where(used[:, None], x, torch.nan)
    found = ClassStatistics(5, ignore_index=ignore_index, **FORMS[form]).update(holes, y)
    assert_same(found, new(form).update(x[used], y[used]))
    nothing = ClassStatistics(3, **FORMS[form]).update(torch.zeros(2, 3), torch.tensor([-100, -100]))
    nothing.update(torch.zeros(0, 3), torch.zeros(0).long())
    assert int(nothing.count.sum()) == 0


def test_ignored_labels_are_left_out_whatever_they_hold():
    x, y = outputs(multilabel=True)
    used = torch.rand(y.shape, generator=torch.manual_seed(3)) < 0.7
    holes = torch.where(used, x, torch.nan)
    found = ClassStatistics(5, multilabel=True, ignore_index=9).update(holes, torch.where(used, y, 9))
    for label in range(5):
        keep = used[:, label]
        alone = ClassStatistics(1, multilabel=True).update(x[keep, label, None], y[keep, label, None])
        assert torch.equal(found.count[label], alone.count[0])
        torch.testing.assert_close(found.std[label], alone.std[0], rtol=1e-12, atol=0)


def test_classes_without_a_deviation_are_left_out_and_named():
    # class 0: fine. 1: one example. 2: none. 3: own output constant. 4: output 0 constant, an impostor.
    x = torch.randn(12, 5, dtype=torch.float64, generator=torch.manual_seed(0))
    y = torch.tensor([0, 0, 0, 0, 1, 3, 3, 3, 4, 4, 4, 4])
    x[5:8, 3] = 0.1  # 0.1 three times does not average to 0.1 in floating point unless care is taken
    x[8:, 0] = 0.7
    for cut in (12, 1, 5):
        statistics = ClassStatistics(5)
        for part, labels in zip(x.split(cut), y.split(cut), strict=True):
            statistics.update(part, labels)
        result = statistics.geometry()
        assert list(result.left_out) == [1, 2, 3, 4]
        assert result.left_out[1].startswith("1 example,") and result.left_out[2].startswith("no examples,")
        assert "never varies" in result.left_out[3] and result.left_out[4].startswith("output 0 never varies")
        nan = {name: getattr(result, name).isnan().tolist() for name in MEASURES}
        for name in ("separability", "ratio"):
            assert nan[name] == [False, True, True, True, True]
        for name in ("compactness", "relative_sigma", "dprime"):
            assert nan[name] == [False, True, True, True, False]
        assert result.average()["ratio"] == result.ratio[0].item()
        assert statistics.mean[2].isnan().all() and statistics.std[1].tolist() == [0.0] * 5


def test_pooled_and_multilabel_left_out():
    x = torch.randn(6, 3, dtype=torch.float64, generator=torch.manual_seed(0))
    y = torch.tensor([[1, 0, 1], [1, 0, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0], [1, 0, 0]])
    x[2:, 2] = 0.1
    result = ClassStatistics(3, multilabel=True).update(x, y).geometry()
    assert list(result.left_out) == [0, 1, 2]
    assert "images without the label: compactness only" in result.left_out[0]
    assert result.compactness.isnan().tolist() == [False, True, False]
    assert result.dprime.isnan().tolist() == [True, True, False]
    assert result.separability.isnan().tolist() == [True, True, True]
    x = torch.full((4, 3), 0.1, dtype=torch.float64)
    x[:, 0] = torch.arange(4.0)
    result = ClassStatistics(3, pooled=True).update(x, torch.zeros(4).long()).geometry()
    assert "impostor outputs never varies" in result.left_out[0]
    assert result.compactness[0] > 0 and result.separability[0].isnan()


@pytest.mark.parametrize("pooled", [True, False])
def test_one_class(pooled):
    result = ClassStatistics(1, pooled=pooled).update(torch.tensor([[1.0], [3.0]]), torch.tensor([0, 0])).geometry()
    assert result.compactness.tolist() == [1.0] and result.separability.isnan().all() and result.dprime.isnan().all()
    assert result.relative_sigma.isnan().all()


def test_many_classes_are_pooled_and_say_so():
    many = geometry.FULL_TABLE_LIMIT + 1
    with pytest.warns(UserWarning, match=f"{many} classes are more than {geometry.FULL_TABLE_LIMIT}") as caught:
        statistics = ClassStatistics(many)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert statistics.pooled and "pooled=True" in repr(statistics)
    assert ClassStatistics(many, pooled=True).pooled  # explicit: no warning (which would be an error here)
    assert not ClassStatistics(many, multilabel=True).pooled
    assert not ClassStatistics(geometry.FULL_TABLE_LIMIT).pooled
    x = torch.randn(8, many, generator=torch.manual_seed(0))
    y = torch.tensor([0, 0, 0, many - 1, many - 1, 5, 5, 9])
    statistics.update(x, y)
    result = statistics.geometry()
    rows = x[y == many - 1].double().numpy()
    expected = geometry.pair_separability(
        rows[:, -1].mean(), rows[:, -1].std(), rows[:, :-1].mean(), rows[:, :-1].std()
    )
    assert result.separability[-1].item() == pytest.approx(expected, rel=1e-11)
    assert len(result.left_out) == many - 3
    assert all(part.numel() <= 2 * many for part in statistics.state_dict().values())  # bounded memory


def test_state_travels(case):
    form, x, y = case
    whole = new(form).update(x, y)
    half = new(form).update(x[:300], y[:300])
    state = half.state_dict()
    loaded = new(form).load_state_dict(state).update(x[300:], y[300:])
    assert_same(loaded, whole)
    assert_same(copy.deepcopy(half).update(x[300:], y[300:]), whole)
    assert_same(pickle.loads(pickle.dumps(half)).update(x[300:], y[300:]), whole)
    assert torch.equal(state["mean"], half.state_dict()["mean"])  # later updates did not touch the saved copy
    again = new(form).update(x, y)
    assert repr(again) == repr(whole) and torch.equal(again.mean, whole.mean)  # same data, same bits
    with pytest.raises(ValueError, match="mean must have the shape"):
        new(form).load_state_dict({**state, "mean": state["mean"][:, :-1]})
    with pytest.raises(ValueError, match="got no m2"):
        half.load_state_dict({name: value for name, value in state.items() if name != "m2"})
    with pytest.raises(ValueError, match="state must be of form"):
        new("full" if form != "full" else "pooled").load_state_dict(state)


def test_nothing_seen_yet():
    empty = ClassStatistics(3)
    assert repr(empty) == "ClassStatistics(num_classes=3, multilabel=False, pooled=False, count=0)"
    assert empty.ratio().isnan().all() and len(empty.left_out()) == 3
    assert np.isnan(list(empty.geometry().average().values())).all()
    assert empty.merge(ClassStatistics(3)).count.tolist() == [0, 0, 0]
    assert empty.sync() is empty  # no processes: nothing to do


TWO = torch.zeros(2).long()
MULTI = {"multilabel": True}


@pytest.mark.parametrize(
    ("options", "x", "y", "error", "message"),
    [
        ({}, torch.zeros(2, 4), TWO, ValueError, r"x must have the shape \(N, 3\).*got \(2, 4\)"),
        ({}, torch.zeros(3), TWO[0], ValueError, r"x must have the shape .* got \(3,\)"),
        ({}, torch.zeros(2, 3), torch.zeros(3).long(), ValueError, r"y must have the shape \(2,\).*got \(3,\)"),
        ({}, torch.zeros(2, 3), torch.tensor([0, 3]), ValueError, "y must be in 0 to 2 .* got 3"),
        ({}, torch.zeros(2, 3), torch.tensor([0, -1]), ValueError, "y must be in 0 to 2 .* got -1"),
        ({}, torch.zeros(2, 3), torch.zeros(2), TypeError, "y must hold integer class indices, got torch.float32"),
        ({}, torch.zeros(2, 3).long(), TWO, TypeError, "x must be floating point, got torch.int64"),
        ({}, torch.tensor([[0, 1, 2], [0, np.nan, 1]]), TWO, ValueError, "finite, got nan in row 1, output 1"),
        (MULTI, torch.zeros(2, 3), torch.full((2, 3), 2), ValueError, "y must be 0 or 1 .* got 2"),
        (MULTI, torch.zeros(2, 3), torch.full((2, 3), 0.5), ValueError, "y must be 0 or 1 .* got 0.5"),
        (MULTI, torch.zeros(2, 3), torch.zeros(2), ValueError, r"y must have the shape \(2, 3\)"),
        (MULTI, torch.tensor([[0, 1, np.inf]]), torch.zeros(1, 3), ValueError, "finite, got inf in row 0, output 2"),
    ],
)
def test_bad_batches(options, x, y, error, message):
    statistics = ClassStatistics(3, **options)
    with pytest.raises(error, match=message):
        statistics.update(x, y)
    assert int(statistics.count.sum()) == 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ClassStatistics(0), ValueError, "num_classes must be a positive integer, got 0"),
        (lambda: ClassStatistics(3, multilabel=True, pooled=True), ValueError, "pooled must be None or False"),
        (lambda: ClassStatistics(3).merge(ClassStatistics(4)), ValueError, "other must be of the same kind"),
        (lambda: new("full").merge(new("pooled")), ValueError, "other must be of the same kind"),
        (lambda: ClassStatistics(3).merge(3), TypeError, "other must be a ClassStatistics, got int"),
    ],
)
def test_bad_options_and_merges(call, error, message):
    with pytest.raises(error, match=message):
        call()


# -- several processes ------------------------------------------------------------------------------------------------


def _process(rank):
    results = {}
    for form, options in FORMS.items():
        x, y = outputs(multilabel=form == "multilabel")
        part = slice(0, 170) if rank == 0 else slice(170, None)
        statistics = ClassStatistics(5, **options).update(x[part], y[part]).sync()
        results[form] = statistics.state_dict()
        for again in (statistics.sync, lambda s=statistics, x=x, y=y: s.update(x, y)):
            try:
                again()
            except RuntimeError as error:
                assert "twice" in str(error)
            else:
                raise AssertionError("data would have been counted twice")
    # a process that saw nothing
    x, y = outputs()
    alone = ClassStatistics(5)
    results["alone"] = (alone.update(x, y) if rank == 1 else alone).sync().state_dict()
    return results


def test_sync_across_processes(tmp_path):
    first, second = processes.run(2, _process, store=tmp_path / "store")
    for form, options in {**FORMS, "alone": {}}.items():
        x, y = outputs(multilabel=form == "multilabel")
        for name in ("count", "mean", "m2"):
            assert torch.equal(first[form][name], second[form][name]), "every process holds the same bits"
        synced = ClassStatistics(5, **options).load_state_dict(first[form])
        assert_same(synced, ClassStatistics(5, **options).update(x, y))
