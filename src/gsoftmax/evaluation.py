"""What a network answers on a part of a data set, and the numbers made of that.

Every process of a run evaluates its share of the rows; rank 0 brings them together.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import distributed, geometry, metrics, ood, sharded
from .build import Network, autocast, load_cached
from .config import Config
from .data import Dataset, eval_batches, match_inputs
from .distributed import ALONE, World

EVALUATED_WHOLE = 1 << 15  # a head with more classes in shards is never put together


# -------------------------------------------------------------------------------------------------------- the answers


@torch.no_grad()
def collect(
    network: Network, dataset: Dataset, config: Config, part: str, world: World = ALONE
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """x, p and y of a split, or of this process's share of it, batch by batch.

    The head works in float64, so that no probability rounds to 0 or 1.
    """
    head = network.whole_head().double()
    for h, y in _features(network, dataset, config, part, world):
        h = h.double()
        yield head.features(h).float(), head.predict_proba(h), y


def _features(
    network: Network, dataset: Dataset, config: Config, part: str, world: World
) -> Iterator[tuple[Tensor, Tensor]]:
    """h and y of this process's share of a split, batch by batch."""
    network.eval()
    device = next(network.parameters()).device
    batches = eval_batches(
        dataset,
        part,
        _at_once(dataset, config),
        shard=world.share,
        channels_last=config.channels_last,
        workers=config.workers,
    )
    for inputs, y in batches:
        with autocast(config, device)():
            h = network.h(inputs)
        yield h, y


def _at_once(dataset: Dataset, config: Config) -> int:
    return config.batch_size if dataset.kind == "files" else max(config.batch_size, 1024)


def _gathered(
    found: Iterable[tuple[Tensor, ...]], dataset: Dataset, config: Config, part: str, world: World
) -> list[Tensor]:
    """What was found of a process's share of a split, batch by batch: all of it on rank 0, on the others their own."""
    rows = torch.arange(len(dataset.split(part))).split(_at_once(dataset, config))
    shares = [torch.cat([piece.tensor_split(world.size)[rank] for piece in rows]) for rank in range(world.size)]
    return [distributed.gather_rows(torch.cat(of).cpu(), shares, world) for of in zip(*found, strict=True)]


# -------------------------------------------------------------------------------------------------------- the numbers


def evaluate(
    network: Network, dataset: Dataset, config: Config, part: str, world: World = ALONE
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics of a split, and its outputs: x, p, y and the head's Gaussians where it has them.

    Every process sees its share of the rows; rank 0 computes the metrics of all of them and holds the outputs.
    """
    if network.in_shards and dataset.num_classes > EVALUATED_WHOLE:
        return _evaluate_shards(network, dataset, config, part, world)
    x, p, y = _gathered(collect(network, dataset, config, part, world), dataset, config, part, world)
    outputs = {"x": x, "p": p, "y": y}
    head = network.whole_head()
    for name in ("mu", "sigma"):
        if isinstance(value := getattr(head, name, None), Tensor):
            outputs[name] = value.detach().float().cpu().clone()
    return distributed.on_rank0(world, score, x, p, y), outputs


def _evaluate_shards(
    network: Network, dataset: Dataset, config: Config, part: str, world: World
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Error and class geometry where nobody could hold the outputs of all classes; labels and predictions are kept."""
    head, stats = network.head, sharded.ClassStatistics(network.head)
    found = []
    with torch.no_grad():
        for h, y in _features(network, dataset, config, part, world):
            h = h.to(head.weight.dtype)
            stats.update(head.features(h), y)
            found.append((head.predict(h), y))
    predicted, y = _gathered(found, dataset, config, part, world)
    error = distributed.on_rank0(world, _error, predicted, y)
    return {"error": error} | stats.geometry().average(), {"y": y, "predicted": predicted}


def _error(predicted: Tensor, y: Tensor) -> float:
    return float((predicted != y).double().mean())


def score(x: Tensor, p: Tensor, y: Tensor) -> dict[str, float]:
    """Metrics and class geometry of a split: error, NLL and ECE, or the multi-label numbers; x also without the term.

    x: (N, C), or of several labels (N, L) or (N, 2, L); p: (N, C) or (N, L); y: (N,), or 0 and 1 in the shape of p

    >>> x = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 3.0], [1.0, 0.0]])
    >>> found = score(x, x.softmax(1), torch.tensor([0, 0, 1, 1]))
    >>> found["error"], round(found["nll"], 3), round(found["separability"], 3)
    (0.25, 0.451, 2.889)
    """
    multilabel = y.ndim == 2
    stats = geometry.ClassStatistics(p.shape[1], multilabel=multilabel).update(positive_outputs(x), y)
    if multilabel:
        report = metrics.multilabel_report(p, y)
        numbers = {k: float(v) for k, v in dataclasses.asdict(report).items() if isinstance(v, (int, float))}
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
    return numbers | stats.geometry().average()


def positive_outputs(x: Tensor) -> Tensor:  # (N, C), or (N, 2, L) -> (N, L)
    return x[:, 1] if x.ndim == 3 else x


def class_statistics(
    network: Network, dataset: Dataset, config: Config, part: str, world: World = ALONE
) -> geometry.ClassStatistics:
    """Mean and deviation of every output for every class of a split, over all processes."""
    stats = geometry.ClassStatistics(dataset.num_classes, multilabel=dataset.multilabel)
    for x, _, y in collect(network, dataset, config, part, world):
        stats.update(positive_outputs(x), y)
    return stats.sync()


def load_others(config: Config, dataset: Dataset, root: str | os.PathLike[str] | None = None) -> dict[str, Dataset]:
    """The datasets that `config.ood` names, with the input format of `dataset`."""
    specs = (config.ood or "").split()
    if not specs:
        return {}
    if dataset.multilabel:
        raise ValueError(f"ood is for single-label data, and {dataset.name} is multi-label")
    if config.head_options.get("shard") and dataset.num_classes > EVALUATED_WHOLE:
        raise ValueError(
            f"ood needs all outputs in one place, and {dataset.num_classes:,} classes are too many for that"
        )
    if config.data in specs:
        raise ValueError(f"ood must differ from the training data, got {config.data!r} for both")
    device, place = str(dataset.train.y.device), None if root is None else os.fspath(root)
    try:
        return {spec: match_inputs(load_cached(spec, place, device), dataset) for spec in specs}
    except ValueError as error:
        several = f" (one of {len(specs)} datasets, separated by spaces)" if len(specs) > 1 else ""
        raise ValueError(f"ood{several}: {error}") from None


def detection(
    network: Network,
    config: Config,
    outputs: dict[str, Tensor],
    stats: geometry.ClassStatistics,
    others: dict[str, Dataset],
    world: World = ALONE,
) -> dict[str, float]:
    """AUROC of telling examples that were evaluated from the test split of other data, by every score there is.

    outputs: what `evaluate` gave; stats: of the training set.  All processes collect, the first one ranks.  What cannot
    be ranked is a warning: the training is worth more.
    """
    known: dict[str, Any] = {"mu": outputs.get("mu"), "sigma": outputs.get("sigma"), "stats": stats}
    outside = {
        name: _gathered(collect(network, other, config, "test", world), other, config, "test", world)
        for name, other in others.items()
    }

    def ranked() -> dict[str, float]:
        try:
            inside = ood.scores(outputs["x"], outputs["p"], **known)
            found = {name: ood.detection(inside, ood.scores(x, p, **known)) for name, (x, p, _) in outside.items()}
        except ValueError as error:
            warnings.warn(f"ood was left out: {error}", stacklevel=2)
            return {}
        return {f"{key} {name}": v for name, of in found.items() for key, v in of.items()}

    return distributed.on_rank0(world, ranked)
