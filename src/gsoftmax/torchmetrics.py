"""The metrics and class statistics as `torchmetrics.Metric` objects: updated per batch, synchronised across processes.

Thin: each holds state and calls the plain function or class it is named after, where the definitions are. Needs the
torchmetrics package; nothing else in this library does. Keyword arguments not described here go to `Metric`.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from . import metrics
from .geometry import ClassGeometry, ClassStatistics, merge_tables

__all__ = ["AveragePrecisionMetric", "ClassGeometryMetric", "MultilabelReportMetric", "Top1ErrorMetric"]


class ClassGeometryMetric(Metric):
    """Compactness, separability, ratio, relative sigma and d' of the classes; `compute()` returns them in a dict.

    average: "macro" for the mean over the classes that have a measure, or None for (m,) numbers per class
    num_classes, multilabel, pooled, ignore_index: as in `geometry.ClassStatistics`
    x, y: a batch, as in `ClassStatistics.update`

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
        new = ClassStatistics(num_classes, multilabel=multilabel, pooled=pooled, ignore_index=ignore_index)
        self.options: dict[str, Any] = {
            "multilabel": new.multilabel,
            "pooled": new.pooled,
            "ignore_index": ignore_index,
        }
        self.num_classes = num_classes
        # The statistics' table is the state; the tables of processes are merged in the order of their ranks.
        merge = partial(reduce, partial(merge_tables, counts=new.counts))
        self.add_state("table", default=new.allocated(torch.device("cpu")), dist_reduce_fx=merge)

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
        """Does nothing: statistics stay in float64, to keep their precision.

        dst_type: ignored
        """
        return self

    def _statistics(self) -> ClassStatistics:
        statistics = ClassStatistics(self.num_classes, **self.options)
        statistics.table = self.table
        return statistics


class _Pairs(Metric):
    """Keeps the scores and targets of all batches."""

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    pairs: list[Tensor]

    def __init__(self, num_labels: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_labels = num_labels
        self.add_state("pairs", default=[], dist_reduce_fx="cat")

    def update(self, scores: Tensor, target: Tensor) -> None:
        # Side by side in one tensor, so that they stay aligned and are gathered in one collective; flat, because a
        # process without data takes part with an empty one-dimensional float32 tensor.
        if scores.ndim != 2 or scores.shape[1] != self.num_labels or target.shape != scores.shape:
            got = f"{tuple(scores.shape)} and {tuple(target.shape)}"
            raise ValueError(f"scores and target must both have the shape (N, {self.num_labels}), got {got}")
        scores = scores.detach()
        if scores.dtype != torch.float64:
            scores = scores.float()
        self.pairs.append(torch.cat([scores, target.to(scores)], dim=1).flatten())

    def _unpair(self) -> tuple[Tensor, Tensor]:
        flat = dim_zero_cat(self.pairs) if len(self.pairs) else torch.empty(0)
        both = flat.reshape(-1, 2 * self.num_labels)
        return both[:, : self.num_labels], both[:, self.num_labels :]


class MultilabelReportMetric(_Pairs):
    """mAP, C-P, C-R, C-F1, O-P, O-R, O-F1 in a dict; see `metrics.multilabel_report`.

    num_labels: L of the (N, L) scores and targets
    threshold: as in `multilabel_report`

    >>> metric = MultilabelReportMetric(2)
    >>> metric.update(torch.tensor([[0.9, 0.2], [0.6, 0.7], [0.1, 0.8]]), torch.tensor([[1, 0], [0, 1], [0, 1]]))
    >>> metric.compute()["C_P"].item()
    0.75
    """

    def __init__(self, num_labels: int, *, threshold: float = 0.5, **kwargs: Any) -> None:
        super().__init__(num_labels, **kwargs)
        self.threshold = threshold

    def compute(self) -> dict[str, Tensor]:
        summary = metrics.multilabel_report(*self._unpair(), self.threshold).summary()
        del summary["threshold"]
        return {name: torch.tensor(value, dtype=torch.float64, device=self.device) for name, value in summary.items()}

    def report(self) -> metrics.MultilabelReport:
        """The numbers with the per-class arrays behind them, of all processes' data."""
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            return metrics.multilabel_report(*self._unpair(), self.threshold)


class AveragePrecisionMetric(_Pairs):
    """Average precision; see `metrics.average_precision`.

    num_labels: L of the (N, L) scores and targets
    average, style: "macro" for the mean over labels, or None for (L,) numbers; as in `average_precision`

    >>> metric = AveragePrecisionMetric(1, style="voc12")
    >>> metric.update(torch.tensor([[0.9], [0.8], [0.7]]), torch.tensor([[1], [0], [1]]))
    >>> round(metric.compute().item(), 4)
    0.8333
    """

    def __init__(self, num_labels: int, *, style: str = "exact", average: str | None = "macro", **kwargs: Any) -> None:
        super().__init__(num_labels, **kwargs)
        if style not in metrics.STYLES:
            raise ValueError(f"style must be one of {', '.join(metrics.STYLES)}, got {style!r}")
        self.style, self.average = style, _check_average(average)

    def compute(self) -> Tensor:
        per_class = metrics.average_precision(*self._unpair(), style=self.style)
        return per_class.nanmean() if self.average else per_class


class Top1ErrorMetric(Metric):
    """Fraction of images whose highest score isn't at the true class; see `metrics.top1_error`.

    scores, target, ignore_index: as in `top1_error`

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
        if target.device.type == "cpu":  # checks the labels; on a GPU it would synchronize
            metrics.top1_error(scores, target, ignore_index=self.ignore_index)
        used = target != self.ignore_index
        self.wrong += ((scores.argmax(1) != target) & used).sum()
        self.total += used.sum()

    def compute(self) -> Tensor:
        return self.wrong.double() / self.total


def _check_average(average: str | None) -> str | None:
    average = None if average == "none" else average  # torchmetrics accepts both
    if average not in ("macro", None):
        raise ValueError(f"average must be 'macro' or None, got {average!r}")
    return average
