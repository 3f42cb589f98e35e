"""Outputs of a network on a split, and their metrics.

Every process of a run evaluates its share of the rows; rank 0 gathers them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from . import distributed, geometry, metrics, ood, sharded, significance
from .build import Network, autocast, load_cached
from .config import Config
from .data import Dataset, eval_batches, match_inputs
from .distributed import ALONE, World

EVALUATED_WHOLE = 1 << 15  # a sharded head with more classes is never gathered


@dataclass(frozen=True)
class Evaluator:
    """A trained network, and what it needs to be evaluated.  All ranks must make the same calls."""

    network: Network  # in the weights to evaluate
    config: Config  # of the run
    world: World = ALONE  # this process among those that share the rows

    @torch.no_grad()
    def collect(self, dataset: Dataset, part: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """x, p and y of this process's share of a split, batch by batch.

        The head computes in float64, so that no probability rounds to 0 or 1.
        """
        head = self.network.whole_head().double()
        for h, y in self._features(dataset, part):
            h = h.double()
            yield head.features(h).float(), head.predict_proba(h), y

    def _features(self, dataset: Dataset, part: str) -> Iterator[tuple[Tensor, Tensor]]:
        """h and y of this process's share of a split, batch by batch."""
        config = self.config
        self.network.eval()
        amp = autocast(config, next(self.network.parameters()).device)
        options: Any = {"shard": self.world, "channels_last": config.channels_last, "workers": config.workers}
        for inputs, y in eval_batches(dataset, part, self._batch_size(dataset), **options):
            with amp():
                h = self.network.h(inputs)
            yield h, y

    def _batch_size(self, dataset: Dataset) -> int:
        return self.config.batch_size if dataset.kind == "files" else max(self.config.batch_size, 1024)

    def _gather(self, found: Iterable[tuple[Tensor, ...]], dataset: Dataset, part: str) -> list[Tensor]:
        """Batches of this process's share of a split, gathered on rank 0; other ranks keep their own."""
        rows, size = torch.arange(len(dataset.split(part))).split(self._batch_size(dataset)), self.world.size
        shares = [torch.cat([piece.tensor_split(size)[rank] for piece in rows]) for rank in range(size)]
        return [distributed.gather_rows(torch.cat(of).cpu(), shares, self.world) for of in zip(*found, strict=True)]

    def evaluate(self, dataset: Dataset, part: str) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Metrics of a split, and its outputs: x, p, y and the head's Gaussians where it has them.

        Every rank returns the metrics; rank 0 has the outputs of all rows.
        """
        if self.network.in_shards and dataset.num_classes > EVALUATED_WHOLE:
            return self._evaluate_shards(dataset, part)
        outputs = self.outputs(dataset, part)
        return distributed.on_rank0(self.world, score, *(outputs[k] for k in "xpy")), outputs

    def outputs(self, dataset: Dataset, part: str) -> dict[str, Tensor]:
        """x, p and y of a split, of all rows on rank 0, and the head's Gaussians where it has them."""
        outputs = dict(zip("xpy", self._gather(self.collect(dataset, part), dataset, part), strict=True))
        head = self.network.whole_head()
        for name in ("mu", "sigma"):
            if isinstance(value := getattr(head, name, None), Tensor):
                outputs[name] = value.detach().float().cpu().clone()
        return outputs

    @torch.no_grad()
    def features(self, dataset: Dataset, part: str) -> dict[str, Tensor]:
        """h of a split, of all rows on rank 0, and the W and b of a head with one row of weights per class."""
        found = {"h": self._gather(((h.float(),) for h, _ in self._features(dataset, part)), dataset, part)[0]}
        head = self.network.whole_head()
        for key, name in (("W", "weight"), ("b", "bias")):
            value = getattr(head, name, None)
            if isinstance(value, Tensor) and value.shape == (dataset.num_classes, found["h"].shape[1])[: value.ndim]:
                found[key] = value.detach().float().cpu().clone()
        return found

    @torch.no_grad()
    def _evaluate_shards(self, dataset: Dataset, part: str) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Error, class geometry and predictions of a sharded head whose outputs do not fit on one process."""
        head = self.network.head
        stats, found = sharded.ClassStatistics(head), []
        for h, y in self._features(dataset, part):
            h = h.to(head.weight.dtype)
            stats.update(head.features(h), y)
            found.append((head.predict(h), y))
        predicted, y = self._gather(found, dataset, part)
        error = distributed.from_rank0(self.world, float((predicted != y).double().mean()))
        return {"error": error} | stats.geometry().average(), {"y": y, "predicted": predicted}

    def class_statistics(self, dataset: Dataset, part: str) -> geometry.ClassStatistics:
        """Mean and deviation of every output for every class of a split, over all processes."""
        stats = geometry.ClassStatistics(dataset.num_classes, multilabel=dataset.multilabel)
        for x, _, y in self.collect(dataset, part):
            stats.update(positive_outputs(x), y)
        return stats.sync()

    def detection(
        self, outputs: dict[str, Tensor], stats: geometry.ClassStatistics | None, others: dict[str, Dataset]
    ) -> dict[str, float]:
        """Out-of-distribution detection: AUROC of every score, evaluated examples against the test split of other data.

        stats: class statistics of the training split, if known
        Scores that cannot be computed are a warning, to keep the run.
        """
        outside = {name: self._gather(self.collect(other, "test"), other, "test") for name, other in others.items()}
        return distributed.on_rank0(self.world, _detection, outputs, stats, outside)


def score(x: Tensor, p: Tensor, y: Tensor) -> dict[str, float]:
    """Metrics and class geometry: error (also of x without the Gaussian term), NLL and ECE, or multi-label metrics; for
    single-label data also the error of guessing and the number of images, from which `summary` judges the geometry.

    x: (N, C), multi-label (N, L) or (N, 2, L); p: (N, C) or (N, L); y: (N,), multi-label (N, L) of 0 and 1

    >>> x = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 3.0], [1.0, 0.0]])
    >>> found = score(x, x.softmax(1), torch.tensor([0, 0, 1, 1]))
    >>> found["error"], round(found["nll"], 3), round(found["separability"], 3)
    (0.25, 0.451, 2.889)
    """
    multilabel = y.ndim == 2
    stats = geometry.ClassStatistics(p.shape[1], multilabel=multilabel).update(positive_outputs(x), y)
    if multilabel:
        report = metrics.multilabel_report(p, y)
        numbers = {k: float(v) for k, v in asdict(report).items() if isinstance(v, (int, float))}
        numbers |= {  # averages over labels
            "nll": float(metrics.multilabel_negative_log_likelihood(p, y).nanmean()),
            "ece": float(metrics.multilabel_expected_calibration_error(p, y).nanmean()),
        }
    else:
        numbers = {
            "error": float(metrics.top1_error(p, y)),
            "error_x": float(metrics.top1_error(x, y)),
            "nll": float(metrics.negative_log_likelihood(p, y)),
            "ece": float(metrics.expected_calibration_error(p, y)),
        }
        if (chance := significance.chance_accuracy(y, p.argmax(1))) is not None:
            numbers |= {"error_of_guessing": 1 - chance, "images": len(y)}
    return numbers | stats.geometry().average()


def positive_outputs(x: Tensor) -> Tensor:  # (N, C), or (N, 2, L) -> (N, L)
    return x[:, 1] if x.ndim == 3 else x


def load_others(config: Config, dataset: Dataset, root: str | os.PathLike[str] | None = None) -> dict[str, Dataset]:
    """The datasets that `config.ood` names, with the input format of the training data."""
    specs = (config.ood or "").split()
    if not specs:
        return {}
    if dataset.multilabel:
        raise ValueError(f"ood is for single-label data, and {dataset.name} is multi-label")
    if config.head_options.get("shard") and dataset.num_classes > EVALUATED_WHOLE:
        raise ValueError(f"ood needs at most {EVALUATED_WHOLE:,} sharded classes, got {dataset.num_classes:,}")
    if config.data in specs:
        raise ValueError(f"ood must differ from the training data, got {config.data!r} for both")
    device, place = str(dataset.train.y.device), None if root is None else os.fspath(root)
    try:
        return {spec: match_inputs(load_cached(spec, place, device), dataset) for spec in specs}
    except ValueError as error:
        several = f" (one of {len(specs)} datasets, separated by spaces)" if len(specs) > 1 else ""
        raise ValueError(f"ood{several}: {error}") from None


def _detection(
    outputs: dict[str, Tensor], stats: geometry.ClassStatistics | None, outside: dict[str, list[Tensor]]
) -> dict[str, float]:
    known: dict[str, Any] = {"mu": outputs.get("mu"), "sigma": outputs.get("sigma"), "stats": stats}
    try:
        inside = ood.scores(outputs["x"], outputs["p"], **known)
        found = {name: ood.detection(inside, ood.scores(x, p, **known)) for name, (x, p, _) in outside.items()}
    except ValueError as error:
        warnings.warn(f"ood was left out: {error}", stacklevel=2)
        return {}
    return {f"{key} {name}": value for name, of in found.items() for key, value in of.items()}
