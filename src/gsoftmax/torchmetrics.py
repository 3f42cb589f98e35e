"""The metrics and class statistics as `torchmetrics.Metric` objects: fed per batch, synchronised across processes.

Thin: each holds state and calls the plain function or class it is named after, where the definitions are. Needs the
torchmetrics package; nothing else in this library does.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from . import metrics
from .geometry import ClassGeometry, ClassStatistics, merge_tables

__all__ = ["AveragePrecisionMetric", "ClassGeometryMetric", "MultilabelReportMetric", "Top1ErrorMetric"]

AVERAGES = ("macro", None)


class ClassGeometryMetric(Metric):
    """Compactness, separability, ratio, relative sigma and d' of the classes; see `geometry.ClassStatistics`.

    `update(x, y)` as there; `compute()` gives a dict of the five, averaged over the classes that have them
    (`average="macro"`) or per class, (m,) (`average=None`); `geometry()` the whole `ClassGeometry`.

    >>> metric = ClassGeometryMetric(2)
    >>> metric.update(torch.tensor([[2.0, 0.0], [3.0, 1.0], [0.0, 3.0], [1.0, 5.0]]), torch.tensor([0, 0, 1, 1]))
    >>> metric.compute()["compactness"].item()
    1.5
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = False

    table: Tensor

    def __init__(
        self,
        num_classes: int,
        *,
        multilabel: bool = False,
        pooled: bool | None = None,
        ignore_index: int = -100,
        average: str | None = "macro",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.average = _check_average(average)
        statistics = ClassStatistics(num_classes, multilabel=multilabel, pooled=pooled, ignore_index=ignore_index)
        self.num_classes, self.multilabel, self.pooled = num_classes, statistics.multilabel, statistics.pooled
        self.ignore_index = ignore_index
        # The statistics' one table is the state; tables of processes are merged in the order of their ranks.
        merge = partial(_merge_tables, counts=statistics.counts)
        self.add_state("table", default=statistics.allocated(torch.device("cpu")), dist_reduce_fx=merge)

    def update(self, x: Tensor, y: Tensor) -> None:
        self.table = self._statistics().update(x, y).allocated(self.table.device)

    def compute(self) -> dict[str, Tensor]:
        measures = self._statistics().measures()
        return {name: value.nanmean() for name, value in measures.items()} if self.average else measures

    def geometry(self) -> ClassGeometry:
        """All measures with counts and what was left out, of all processes' data."""
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            return self._statistics().geometry()

    def set_dtype(self, dst_type: str | torch.dtype) -> ClassGeometryMetric:
        """Does nothing: statistics are kept in float64, or they would not be worth keeping."""
        return self

    def _statistics(self) -> ClassStatistics:
        statistics = ClassStatistics(
            self.num_classes, multilabel=self.multilabel, pooled=self.pooled, ignore_index=self.ignore_index
        )
        statistics.table = self.table
        return statistics


class MultilabelReportMetric(Metric):
    """mAP, C-P, C-R, C-F1, O-P, O-R, O-F1; see `metrics.multilabel_report`.

    `update(scores, target)` takes (N, L) each; `compute()` gives a dict of the summary's numbers, `report()` the whole
    `MultilabelReport`.

    >>> metric = MultilabelReportMetric(2)
    >>> metric.update(torch.tensor([[0.9, 0.2], [0.6, 0.7], [0.1, 0.8]]), torch.tensor([[1, 0], [0, 1], [0, 1]]))
    >>> metric.compute()["C_P"].item()
    0.75
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    pairs: list[Tensor]

    def __init__(self, num_labels: int, *, threshold: float = 0.5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_labels, self.threshold = num_labels, threshold
        self.add_state("pairs", default=[], dist_reduce_fx="cat")

    def update(self, scores: Tensor, target: Tensor) -> None:
        self.pairs.append(_pair(scores, target, self.num_labels))

    def compute(self) -> dict[str, Tensor]:
        summary = metrics.multilabel_report(*_unpair(self.pairs, self.num_labels), self.threshold).summary()
        del summary["threshold"]
        return {name: torch.tensor(value, dtype=torch.float64, device=self.device) for name, value in summary.items()}

    def report(self) -> metrics.MultilabelReport:
        """The numbers with the per-class arrays behind them, of all processes' data."""
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            return metrics.multilabel_report(*_unpair(self.pairs, self.num_labels), self.threshold)


class AveragePrecisionMetric(Metric):
    """Average precision, per class (`average=None`) or its mean (`average="macro"`); see `metrics.average_precision`.

    >>> metric = AveragePrecisionMetric(1, style="voc12")
    >>> metric.update(torch.tensor([[0.9], [0.8], [0.7]]), torch.tensor([[1], [0], [1]]))
    >>> round(metric.compute().item(), 4)
    0.8333
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    pairs: list[Tensor]

    def __init__(self, num_labels: int, *, style: str = "exact", average: str | None = "macro", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if style not in metrics.STYLES:
            raise ValueError(f"style must be one of {', '.join(metrics.STYLES)}, got {style!r}")
        self.num_labels, self.style, self.average = num_labels, style, _check_average(average)
        self.add_state("pairs", default=[], dist_reduce_fx="cat")

    def update(self, scores: Tensor, target: Tensor) -> None:
        self.pairs.append(_pair(scores, target, self.num_labels))

    def compute(self) -> Tensor:
        per_class = metrics.average_precision(*_unpair(self.pairs, self.num_labels), style=self.style)
        return per_class.nanmean() if self.average else per_class


class Top1ErrorMetric(Metric):
    """Fraction of images whose highest score isn't at the true class; see `metrics.top1_error`.

    >>> metric = Top1ErrorMetric()
    >>> metric.update(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    >>> metric.compute().item()
    0.5
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    wrong: Tensor
    total: Tensor

    def __init__(self, *, ignore_index: int = -100, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ignore_index = ignore_index
        self.add_state("wrong", default=torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("total", default=torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, scores: Tensor, target: Tensor) -> None:
        if scores.ndim < 2 or target.shape != scores.shape[:1] + scores.shape[2:]:
            raise ValueError(
                "scores must be (N, C) or (N, C, d1, ...) and target (N,) or (N, d1, ...), "
                f"got {tuple(scores.shape)} and {tuple(target.shape)}"
            )
        if target.device.type == "cpu":  # says what is wrong; on a GPU it would make the host wait
            metrics.top1_error(scores, target, ignore_index=self.ignore_index)
        used = target != self.ignore_index
        self.wrong += ((scores.argmax(1) != target) & used).sum()
        self.total += used.sum()

    def compute(self) -> Tensor:
        return self.wrong.double() / self.total


def _merge_tables(tables: Tensor, counts: int) -> Tensor:
    """(processes, m + 1, width) tables of class statistics to one, in order."""
    total = tables[0]
    for table in tables[1:]:
        total = merge_tables(total, table, counts)
    return total


def _pair(scores: Tensor, target: Tensor, num_labels: int) -> Tensor:
    """Scores and target side by side in one flat tensor.

    One tensor, so that they stay together and cross between processes at once; flat, because a process without data
    takes part in the exchange with an empty one-dimensional float32 tensor.
    """
    if scores.ndim != 2 or scores.shape[1] != num_labels or target.shape != scores.shape:
        got = f"{tuple(scores.shape)} and {tuple(target.shape)}"
        raise ValueError(f"scores and target must both have the shape (N, {num_labels}), got {got}")
    scores = scores.detach()
    if scores.dtype != torch.float64:
        scores = scores.float()
    return torch.cat([scores, target.to(scores)], dim=1).flatten()


def _unpair(pairs: Tensor | list[Tensor], num_labels: int) -> tuple[Tensor, Tensor]:
    flat = dim_zero_cat(pairs) if len(pairs) else torch.empty(0)
    scores, target = flat.reshape(-1, 2 * num_labels).split(num_labels, dim=1)
    return scores, target


def _check_average(average: str | None) -> str | None:
    average = None if average == "none" else average  # torchmetrics takes both
    if average not in AVERAGES:
        raise ValueError(f"average must be 'macro' or None, got {average!r}")
    return average
