"""The torchmetrics wrappers against the functions they wrap, one process and two."""

from __future__ import annotations

import copy
import pickle
import warnings

import processes
import pytest
import torch
from processes import one_thread  # noqa: F401
from torchmetrics import MetricCollection

from gsoftmax import metrics
from gsoftmax.geometry import MEASURES, ClassStatistics
from gsoftmax.torchmetrics import AveragePrecisionMetric, ClassGeometryMetric, MultilabelReportMetric, Top1ErrorMetric

M = 4


def single(n=120):
    generator = torch.manual_seed(0)
    y = torch.randint(0, M, (n,), generator=generator)
    x = torch.randn(n, M, generator=generator)
    x[torch.arange(n), y] += 1.5
    return x, y


def several(n=120):
    generator = torch.manual_seed(1)
    y = (torch.rand(n, M, generator=generator) < 0.3).long()
    return torch.sigmoid(torch.randn(n, M, generator=generator) + y), y


def geometry_case(data, average="macro", **options):
    def expected(x, y):
        statistics = ClassStatistics(M, **options).update(x, y)
        return statistics.geometry().average() if average else statistics.measures()

    return lambda: ClassGeometryMetric(M, average=average, **options), data, expected


def report(x, y):
    return {k: v for k, v in metrics.multilabel_report(x, y, 0.6).summary().items() if k != "threshold"}


# name: (how to make the metric, its data, what compute() must give)
CASES = {
    "geometry": geometry_case(single),
    "geometry per class": geometry_case(single, average=None),
    "geometry pooled": geometry_case(single, pooled=True),
    "geometry multilabel": geometry_case(several, multilabel=True),
    "report": (lambda: MultilabelReportMetric(M, threshold=0.6), several, report),
    "mAP": (lambda: AveragePrecisionMetric(M), several, metrics.mean_average_precision),
    "AP": (
        lambda: AveragePrecisionMetric(M, style="voc12", average="none"),
        several,
        lambda x, y: metrics.average_precision(x, y, style="voc12"),
    ),
    "top-1": (Top1ErrorMetric, single, metrics.top1_error),
}


def assert_same(found, expected):
    if isinstance(expected, dict):
        assert set(found) == set(expected)
        for name in expected:
            assert_same(found[name], expected[name])
    else:
        torch.testing.assert_close(
            found, torch.as_tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12, equal_nan=True
        )


def fed(name, cut=50):
    make, data, expected = CASES[name]
    metric = make()
    x, y = data()
    for part, labels in zip(x.split(cut), y.split(cut), strict=True):
        metric.update(part, labels)
    return metric, x, y, expected


@pytest.mark.parametrize("name", CASES)
def test_update_compute_reset(name):
    metric, x, y, expected = fed(name)
    assert_same(metric.compute(), expected(x, y))
    metric.reset()
    metric.update(x[:40], y[:40])
    assert_same(metric.compute(), expected(x[:40], y[:40]))


@pytest.mark.parametrize("name", CASES)
def test_forward_gives_the_batch_and_keeps_the_total(name):
    make, data, expected = CASES[name]
    metric, (x, y) = make(), data()
    for part, labels in zip(x.split(40), y.split(40), strict=True):
        assert_same(metric(part, labels), expected(part, labels))
    assert_same(metric.compute(), expected(x, y))


@pytest.mark.parametrize("name", CASES)
def test_copies_and_saved_states(name):
    metric, x, y, expected = fed(name)
    for twin in (metric.clone(), copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))):
        twin.update(x, y)
        assert_same(twin.compute(), expected(torch.cat([x, x]), torch.cat([y, y])))
    assert_same(metric.compute(), expected(x, y))
    metric.persistent(True)
    state = copy.deepcopy(metric.state_dict())
    loaded = CASES[name][0]()
    loaded.persistent(True)
    loaded.load_state_dict(state)
    loaded.update(x[:30], y[:30])
    assert_same(loaded.compute(), expected(torch.cat([x, x[:30]]), torch.cat([y, y[:30]])))


@pytest.mark.parametrize("name", CASES)
def test_to_and_half_do_not_change_the_statistics(name):
    metric, x, y, expected = fed(name)
    metric.to("cpu").half()
    if name.startswith("geometry"):
        metric.set_dtype(torch.float32)
    assert_same(metric.compute(), expected(x, y))


def test_whole_results():
    metric, x, y, _ = fed("geometry")
    geometry = metric.geometry()
    for name in MEASURES:
        assert_same(getattr(geometry, name), getattr(ClassStatistics(M).update(x, y), name)())
    assert geometry.left_out == {} and geometry.count.sum() == len(x)
    metric, x, y, _ = fed("report")
    assert (metric.report().ap == metrics.multilabel_report(x, y, 0.6).ap).all()


def test_collection():
    x, y = single()
    collection = MetricCollection({"error": Top1ErrorMetric(), "geometry": ClassGeometryMetric(M)})
    collection.update(x, y)
    found = collection.compute()
    assert found["error"].item() == pytest.approx(metrics.top1_error(x, y))
    assert found["compactness"].item() == pytest.approx(ClassStatistics(M).update(x, y).compactness().mean().item())


def test_ignored_and_more_dimensions():
    x, y = single()
    y = torch.where(torch.arange(len(y)) % 3 == 0, 7, y)
    grid, labels = x.reshape(12, 10, M).movedim(2, 1), y.reshape(12, 10)
    for metric in (Top1ErrorMetric(ignore_index=7), ClassGeometryMetric(M, ignore_index=7)):
        metric.update(grid, labels)
        used = y != 7
        name = "top-1" if isinstance(metric, Top1ErrorMetric) else "geometry"
        assert_same(metric.compute(), CASES[name][2](x[used], y[used]))


def test_mixed_precision_batches():
    x, y = several()
    metric = AveragePrecisionMetric(M)
    metric.update(x[:60].bfloat16(), y[:60].bool())
    metric.update(x[60:].double(), y[60:].float())
    joined = torch.cat([x[:60].bfloat16().double(), x[60:].double()])
    assert_same(metric.compute(), metrics.mean_average_precision(joined, y))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: AveragePrecisionMetric(3, style="voc07"), "style must be one of exact, voc12, got 'voc07'"),
        (lambda: AveragePrecisionMetric(3, average="micro"), "average must be 'macro' or None, got 'micro'"),
        (lambda: AveragePrecisionMetric(3).update(torch.zeros(2, 4), torch.zeros(2, 4)), r"\(N, 3\), got \(2, 4\)"),
        (lambda: MultilabelReportMetric(3).update(torch.zeros(2, 3), torch.zeros(3)), r"got \(2, 3\) and \(3,\)"),
        (lambda: Top1ErrorMetric().update(torch.zeros(2, 3), torch.tensor([0, 3])), "target must be in 0 to 2"),
        (lambda: Top1ErrorMetric().update(torch.zeros(2, 3), torch.zeros(3).long()), r"got \(2, 3\) and \(3,\)"),
        (lambda: ClassGeometryMetric(3).update(torch.zeros(1, 3), torch.tensor([3])), "y must be in 0 to 2"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# -- two processes ----------------------------------------------------------------------------------------------------


def _process(rank):
    results = {}
    for name, (make, data, _) in CASES.items():
        x, y = data()
        part = slice(0, 47) if rank == 0 else slice(47, None)
        metric = make()
        for batch, labels in zip(x[part].split(20), y[part].split(20), strict=True):
            metric.update(batch, labels)
        results[name] = metric.compute()
        metric.update(x[:10], y[:10])  # compute() restores this process's own state afterwards
        results[name + ", again"] = metric.compute()
        if name == "geometry":
            results["whole"] = metric.geometry().ratio
    warnings.simplefilter("ignore")  # torchmetrics remarks on computing before updating
    for name, (make, data, _) in CASES.items():
        metric = make()
        if rank == 1:  # the other process has no data at all
            metric.update(*data())
        results[name + ", alone"] = metric.compute()
    return results


def test_two_processes_equal_one_on_the_concatenated_data(tmp_path):
    ranks = processes.run(2, _process, store=tmp_path / "store")
    for name, (_, data, expected) in CASES.items():
        x, y = data()
        twice = torch.cat([x, x[:10], x[:10]]), torch.cat([y, y[:10], y[:10]])
        for results in ranks:
            assert_same(results[name], expected(x, y))
            assert_same(results[name + ", alone"], expected(x, y))
            assert_same(results[name + ", again"], expected(*twice))
    assert torch.equal(ranks[0]["whole"], ranks[1]["whole"])
