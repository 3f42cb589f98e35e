"""One run: a configuration, a visible training loop, and a folder that describes itself.

    config.json  environment.json  metrics.jsonl  outputs.safetensors  checkpoint/last.pt

Everything random follows from the seed: the backbone's weights, the head's weights, and for every epoch the order of
the examples, their augmentation and dropout, each from a stream of its own.  So two heads with the same seed start from
the same backbone and see the same batches, and a run that was stopped goes on as if nothing had happened.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import importlib
import inspect
import json
import math
import os
import platform
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import backbones, geometry, metrics, schedules
from . import data as data_room
from ._version import __version__
from .data.seeded import mix
from .gaussians import param_groups
from .heads import GSoftmaxHead, LSoftmaxHead, SoftmaxHead

HEADS: dict[str, type[nn.Module]] = {"softmax": SoftmaxHead, "lsoftmax": LSoftmaxHead, "gsoftmax": GSoftmaxHead}
SCHEDULES = ("constant", "linspace", "logspace", "staircase", "malleable")
AMP = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Config:
    """Everything a run depends on.  A recipe says what differs from these defaults.

    >>> Config().override({"head": "gsoftmax", "head_options.lam": 0.5}).head_options
    {'lam': 0.5}
    """

    # data: see gsoftmax.data.load
    data: str = "digits"
    val_fraction: float = 0.0
    train_fraction: float = 1.0
    imbalance: float = 1.0
    label_noise: float = 0.0
    image_size: int | None = None
    augment: str | None = None  # a preset or its changes; None is the dataset's own
    evaluate_on: str = "test"  # or "val", for choosing settings
    # network: see gsoftmax.backbones.create
    backbone: str | None = None  # None: cnn for small images, resnet101 for files, mlp for tables
    backbone_options: dict[str, Any] = field(default_factory=dict)
    pool: str | None = None
    pretrained: bool = False
    weights: str | None = None
    feature_scale: float = 1.0  # h is multiplied by it before the head
    # head
    head: str = "softmax"  # softmax, lsoftmax, gsoftmax or package.module:ClassName
    head_options: dict[str, Any] = field(default_factory=dict)
    init: str = "constant"  # "data": Gaussians from one pass over the training data before training
    label_smoothing: float = 0.0
    reduction: str | None = None  # multi-label losses: mean (default), sum or batchmean
    # optimisation
    epochs: int = 15
    batch_size: int = 64
    accumulate: int = 1  # steps of the optimiser take this many batches
    optimizer: str = "sgd"  # any of torch.optim, by name
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 5e-4
    bias_lr: float = 1.0  # multiplies the learning rate (and divides the decay) of the backbone's biases and norms
    schedule: dict[str, Any] = field(default_factory=lambda: {"name": "linspace", "a": 1.0, "b": 0.01})
    schedule_every: str = "epoch"  # or "step"
    warmup: float = 0.0  # share of the training over which the rate rises from 0
    clip: float | None = None  # largest norm of the gradient
    ema: float = 0.0  # decay of averaged weights, which are then the ones evaluated; 0 is off
    amp: str = "off"
    channels_last: bool = True  # of images; faster on CPUs too
    compile: bool = False
    # the run
    seed: int = 0
    device: str = "auto"
    threads: int = 0  # 0: torch's default
    workers: int | None = None  # processes that read image files
    evaluate_every: int = 0  # epochs; 0 is at the end only
    checkpoint_every: int = 1  # epochs; 0 is never
    train_geometry: bool = True  # class geometry of the training set too, one more pass at the end

    def __post_init__(self) -> None:
        for name, low in (("epochs", 0), ("batch_size", 1), ("accumulate", 1), ("threads", 0), ("evaluate_every", 0)):
            if type(getattr(self, name)) is not int or getattr(self, name) < low:
                raise ValueError(f"{name} must be a whole number, {low} or more, got {getattr(self, name)!r}")
        for name, choices in (
            ("amp", tuple(AMP)),
            ("init", ("constant", "data")),
            ("evaluate_on", ("test", "val")),
            ("schedule_every", ("epoch", "step")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name in ("lr", "momentum", "weight_decay", "ema", "warmup", "bias_lr", "feature_scale"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a number, 0 or more, got {value!r}")
        if self.schedule.get("name") not in SCHEDULES:
            raise ValueError(f"schedule name must be one of {', '.join(SCHEDULES)}, got {self.schedule.get('name')!r}")

    def override(self, changes: Mapping[str, Any]) -> Config:
        """The same with some keys changed; `head_options.lam` reaches into a dictionary.  Unknown keys are errors."""
        known = {f.name for f in dataclasses.fields(self)}
        new: dict[str, Any] = {}
        for key, value in changes.items():
            name, _, inner = key.partition(".")
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f", did you mean {close[0]!r}" if close else ""
                raise ValueError(f"unknown key {name!r}{hint}; keys are {', '.join(sorted(known))}")
            if inner:
                held = new.get(name, getattr(self, name))
                if not isinstance(held, dict):
                    raise ValueError(f"{name!r} holds {held!r} and has no {inner!r} inside")
                value = {**held, inner: value}
            new[name] = value
        return dataclasses.replace(self, **new)

    def identity(self) -> dict[str, Any]:
        """What decides the result: all but where it runs and how often it is looked at."""
        where = ("device", "workers", "evaluate_every", "checkpoint_every")
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in where}


class Diverged(RuntimeError):
    """The loss stopped being a finite number."""


# ---------------------------------------------------------------------------------------------- what a run is made of


class Network(nn.Module):
    """Backbone and head: images or rows in, h or the loss out."""

    backbone: Any
    head: Any

    def __init__(self, backbone: nn.Module, head: nn.Module, feature_scale: float = 1.0) -> None:
        super().__init__()
        self.backbone, self.head, self.feature_scale = backbone, head, feature_scale

    def h(self, inputs: Tensor) -> Tensor:
        h = self.backbone(inputs)
        return h if self.feature_scale == 1 else h * self.feature_scale

    def loss(self, inputs: Tensor, target: Tensor, **options: Any) -> Tensor:
        return self.head.loss(self.h(inputs), target, **options)


def find_head(name: str) -> type[nn.Module]:
    """A head's class from its name or import path.

    >>> find_head("gsoftmax").__name__
    'GSoftmaxHead'
    """
    if name in HEADS:
        return HEADS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        close = difflib.get_close_matches(name, HEADS, 1)
        hint = f", did you mean {close[0]!r}" if close else ""
        raise ValueError(f"unknown head {name!r}{hint}; heads are {', '.join(HEADS)} or package.module:ClassName")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"head {name!r} cannot be imported: {error}") from None
    missing = [m for m in ("features", "loss", "predict_proba") if not callable(getattr(found, m, None))]
    if not isinstance(found, type) or missing:
        lacks = f"lacks {', '.join(missing)}" if missing else "is not a class"
        raise ValueError(
            f"head {name!r} {lacks}: a head is an nn.Module with features(h), loss(h, target), predict_proba(h)"
        )
    return found


def parse_head(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a head written as `name(option=value, ...)`.

    >>> parse_head("gsoftmax(lam=4, gaussians=tracked)")
    ('gsoftmax', {'lam': 4, 'gaussians': 'tracked'})
    """
    match = re.fullmatch(r"\s*([\w.:-]+)\s*(?:\((.*)\))?\s*", text)
    if not match:
        raise ValueError(f"head must be written as name or name(option=value, ...), got {text!r}")
    options: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in (match[2] or "").split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key.isidentifier():
            raise ValueError(f"head {match[1]!r} takes options as option=value, got {item!r}")
        options[key] = parse_value(value)
    return match[1], options


def parse_value(text: str) -> Any:
    """A value of the command line: JSON where it is JSON, else the text itself.

    >>> parse_value("0.5"), parse_value("true"), parse_value("bf16"), parse_value("1e-5")
    (0.5, True, 'bf16', 1e-05)
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {"none": None, "None": None, "True": True, "False": False}.get(text, text)


@functools.lru_cache(maxsize=2)
def _load(spec: str, root: str | None, device: str, options: tuple[tuple[str, Any], ...]) -> data_room.Dataset:
    return data_room.load(spec, root, **dict(options)).to(device)


def load_data(config: Config, root: str | os.PathLike[str] | None = None) -> data_room.Dataset:
    """The configured dataset on its device; kept, so that many seeds read it once."""
    options = {
        k: getattr(config, k) for k in ("val_fraction", "train_fraction", "imbalance", "label_noise", "image_size")
    }
    where = str(pick_device(config.device))
    return _load(config.data, None if root is None else os.fspath(root), where, tuple(options.items()))


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return device


def total_steps(config: Config, dataset: data_room.Dataset) -> tuple[int, int]:
    """Batches of an epoch, and optimiser steps of the whole run."""
    if config.batch_size > len(dataset.train):
        raise ValueError(
            f"batch_size must be at most the {len(dataset.train):,} training rows of {dataset.name}, "
            f"got {config.batch_size:,}"
        )
    batches = len(dataset.train) // config.batch_size
    return batches, -(-batches // config.accumulate) * config.epochs


def build(config: Config, dataset: data_room.Dataset) -> Network:
    """Backbone and head with their initial weights, each from its own stream of the seed."""
    name = config.backbone or {"images": "cnn", "table": "mlp", "files": "resnet101"}[dataset.kind]
    torch.manual_seed(mix(config.seed, 1))
    backbone = backbones.create(
        name,
        input_shape=dataset.input_shape,
        pool=config.pool,
        pretrained=config.pretrained,
        weights=config.weights,
        **config.backbone_options,
    )
    cls, options = find_head(config.head), dict(config.head_options)
    if dataset.multilabel:
        options.setdefault("form", "paired")
    elif options.get("form") is not None:
        raise ValueError(
            f"form={options['form']!r} is for multi-label data, and {dataset.name} has one label an example"
        )
    if issubclass(cls, LSoftmaxHead):
        # the margin is fully there when nine tenths of the training are over
        options.setdefault("anneal_steps", max(1, round(0.9 * total_steps(config, dataset)[1] * config.accumulate)))
    torch.manual_seed(mix(config.seed, 2))
    try:
        head = cls(backbone.num_features, dataset.num_classes, **options)
    except TypeError as error:
        accepted = [p for p in inspect.signature(cls).parameters][2:]
        raise ValueError(f"head {config.head!r}: {error}; options are {', '.join(accepted)}") from None
    return Network(backbone, head, config.feature_scale)


def build_schedule(config: Config, length: int) -> schedules.Schedule:
    """The configured schedule over `length` epochs or steps, with its warm-up in front."""
    options = dict(config.schedule)
    name = options.pop("name")
    try:
        if name == "constant":
            schedule = schedules.staircase({})
        elif name == "staircase":
            schedule = schedules.staircase({int(k): float(v) for k, v in options.pop("steps").items()})
        elif name == "malleable":
            pieces = [tuple(piece) for piece in options.pop("pieces")]
            schedule = schedules.malleable(pieces, **{k: options.pop(k) for k in list(options)})
        else:
            schedule = getattr(schedules, name)(float(options.pop("a")), float(options.pop("b")), max(length, 1))
        if options:
            raise ValueError(f"unknown options {', '.join(options)}")
    except (KeyError, TypeError, ValueError) as error:
        reason = f"needs {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"schedule {name!r}: {reason}") from None
    return functools.partial(_warm, schedule, config.warmup * length)


def _warm(schedule: schedules.Schedule, steps: float, n: int) -> float:
    return schedule(n) * min(1.0, n / steps) if steps >= 1 else schedule(n)


def build_optimizer(config: Config, network: Network) -> torch.optim.Optimizer:
    """Any optimiser of torch by name; the head's Gaussians without decay, at their own rate."""
    small = {id(p) for p in network.backbone.parameters() if p.ndim <= 1} if config.bias_lr != 1 else set()
    groups = []
    for group in param_groups(network, lr=config.lr, weight_decay=config.weight_decay):
        rest = [p for p in group["params"] if id(p) not in small]
        biases = [p for p in group["params"] if id(p) in small]
        groups.append({**group, "params": rest})
        if biases:
            mult = config.bias_lr
            groups.append(
                {"params": biases, "lr": group["lr"] * mult, "weight_decay": group["weight_decay"] / max(mult, 1e-12)}
            )
    found = {n.lower(): c for n, c in vars(torch.optim).items() if isinstance(c, type) and n != "Optimizer"}
    cls = found.get(config.optimizer.lower())
    if cls is None:
        close = difflib.get_close_matches(config.optimizer.lower(), found, 1)
        hint = f", did you mean {close[0]!r}" if close else ""
        raise ValueError(f"unknown optimizer {config.optimizer!r}{hint}")
    options = dict(config.optimizer_options)
    accepted = inspect.signature(cls).parameters
    for key in ("momentum", "nesterov"):
        if key in accepted:
            options.setdefault(key, getattr(config, key))
    if options.get("nesterov") and not options.get("momentum"):
        options["nesterov"] = False
    try:
        return cls([g for g in groups if g["params"]], lr=config.lr, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"optimizer {config.optimizer!r}: {error}") from None


# ----------------------------------------------------------------------------------------------------------- the loop


def train(
    config: Config,
    out: str | os.PathLike[str] | None = None,
    *,
    data_root: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Trains, evaluates, writes the run folder `out` (none: nothing is written) and returns the final metrics."""
    if config.threads:
        torch.set_num_threads(config.threads)
    device = pick_device(config.device)
    torch.backends.cudnn.benchmark = True  # every batch has the same shape
    dataset = load_data(config, data_root)
    batches, steps = total_steps(config, dataset)
    per_step = config.schedule_every == "step"
    network = build(config, dataset).to(device)
    if config.channels_last:
        network = network.to(memory_format=torch.channels_last)
    if hasattr(network.backbone, "init_whiten"):
        sample = next(data_room.eval_batches(dataset, "train", min(5000, len(dataset.train))))[0]
        network.backbone.init_whiten(sample)
    if config.init == "data":
        fit_gaussians(network, dataset, config)
    optimizer = build_optimizer(config, network)
    scheduler = schedules.scheduler(optimizer, build_schedule(config, steps if per_step else config.epochs))
    average = _average(network, config.ema)
    scaler = torch.amp.GradScaler(device.type, enabled=config.amp == "fp16" and device.type == "cuda")
    loss_of = torch.compile(network.loss) if config.compile else network.loss
    options = loss_options(config, dataset)
    amp = _autocast(config, device)

    folder = None if out is None else RunFolder(out, config, dataset, resume)
    first = 1
    if folder is not None and (state := folder.checkpoint()) is not None:
        for name, part in _parts(network, optimizer, scheduler, average, scaler).items():
            part.load_state_dict(state[name])
        first = state["epoch"] + 1
    started, seen = time.perf_counter(), 0
    for epoch in range(first, config.epochs + 1):
        network.train()
        torch.manual_seed(mix(config.seed, 3, epoch))  # dropout; the same whatever came before
        losses = []
        for i, (inputs, target) in enumerate(_train_batches(dataset, config, epoch), start=1):
            with amp():
                loss = loss_of(inputs, target, **options)
            scaler.scale(loss / config.accumulate if config.accumulate > 1 else loss).backward()
            losses.append(loss.detach())
            seen += len(target)
            if i % config.accumulate == 0 or i == batches:
                if config.clip is not None:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(network.parameters(), config.clip)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                if average is not None:
                    average.update_parameters(network)
                if per_step:
                    scheduler.step()
            if progress is not None and device.type == "cpu":
                progress(_progress(config, epoch, i, batches, loss.item(), seen, started, first))
        mean_loss = _finite_mean(torch.stack(losses), epoch, folder)
        if progress is not None:
            progress(_progress(config, epoch, batches, batches, mean_loss, seen, started, first))
        row = {"epoch": epoch, "loss": mean_loss, "lr": optimizer.param_groups[0]["lr"]}
        if not per_step:
            scheduler.step()
        if config.evaluate_every and epoch % config.evaluate_every == 0 and epoch < config.epochs:
            row |= evaluate(_evaluated(network, average), dataset, config, config.evaluate_on)[0]
        if folder is not None:
            folder.log(row | {"seconds": time.perf_counter() - started})
            if config.checkpoint_every and epoch % config.checkpoint_every == 0:
                parts = _parts(network, optimizer, scheduler, average, scaler)
                folder.save({"epoch": epoch} | {name: part.state_dict() for name, part in parts.items()})

    best = _evaluated(network, average)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    result, outputs = evaluate(best, dataset, config, config.evaluate_on)
    if config.train_geometry:
        stats = class_statistics(best, dataset, config, "train")
        result |= {f"train_{k}": v for k, v in stats.geometry().average().items()}
        if dataset.num_classes <= 1000:  # what the report draws the training set's Gaussians from; 16 MB at most
            outputs |= {f"train_{k}": v.cpu() for k, v in stats.state_dict().items()}
    result |= {"seconds": seconds, "epochs": config.epochs, "examples_per_second": seen / max(seconds, 1e-9)}
    if folder is not None:
        folder.finish(result, outputs)
    return result


def _train_batches(dataset: data_room.Dataset, config: Config, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    augment = None if config.augment is None else data_room.Augment.parse(config.augment)
    return data_room.train_batches(
        dataset,
        config.batch_size,
        seed=config.seed,
        epoch=epoch,
        augment=augment,
        channels_last=config.channels_last,
        workers=config.workers,
    )


def loss_options(config: Config, dataset: data_room.Dataset) -> dict[str, Any]:
    options: dict[str, Any] = {"label_smoothing": config.label_smoothing} if config.label_smoothing else {}
    if config.reduction is not None:
        options["reduction"] = config.reduction
    return options


def _autocast(config: Config, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    dtype = AMP[config.amp]
    return nullcontext if dtype is None else functools.partial(torch.autocast, device.type, dtype)


def _average(network: Network, decay: float) -> torch.optim.swa_utils.AveragedModel | None:
    if not decay:
        return None
    swa = torch.optim.swa_utils
    return swa.AveragedModel(network, multi_avg_fn=swa.get_ema_multi_avg_fn(decay), use_buffers=True)


def _evaluated(network: Network, average: Any) -> Network:
    return network if average is None else average.module


def _parts(network: Any, optimizer: Any, scheduler: Any, average: Any, scaler: Any) -> dict[str, Any]:
    parts = {"network": network, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    return parts if average is None else parts | {"average": average}


def _finite_mean(losses: Tensor, epoch: int, folder: RunFolder | None) -> float:
    values = losses.double().cpu()
    bad = (~values.isfinite()).nonzero()
    if len(bad):
        saved = "" if folder is None or not folder.last.exists() else f"; the last good checkpoint is {folder.last}"
        step = int(bad[0]) + 1
        raise Diverged(f"the loss became {values[bad[0]].item()} in epoch {epoch}, step {step}{saved}")
    return float(values.mean())


def _progress(
    config: Config, epoch: int, i: int, batches: int, loss: float, seen: int, started: float, first: int
) -> str:
    spent = time.perf_counter() - started
    done = (epoch - first) * batches + i
    left = spent / done * ((config.epochs - first + 1) * batches - done)
    return f"epoch {epoch}/{config.epochs}  loss {loss:.4f}  {seen / max(spent, 1e-9):,.0f}/s  {clock(left)} left"


def clock(seconds: float) -> str:
    """
    >>> clock(75), clock(7384)
    ('1:15', '2:03:04')
    """
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


# --------------------------------------------------------------------------------------------------------- evaluation


@torch.no_grad()
def fit_gaussians(network: Network, dataset: data_room.Dataset, config: Config) -> None:
    """The paper's data-driven start: Gaussians of x over the training set with the initial weights, in eval mode."""
    if not hasattr(network.head, "fit_gaussians"):
        return  # a head without Gaussians: the same recipe serves it
    network.eval()
    device = next(network.parameters()).device
    with _autocast(config, device)():
        batches = data_room.eval_batches(dataset, "train", max(config.batch_size, 256), workers=config.workers)
        network.head.fit_gaussians(network.h(inputs).float() for inputs, _ in batches)


@torch.no_grad()
def collect(
    network: Network, dataset: data_room.Dataset, config: Config, part: str
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """x, p and y of a split, batch by batch; the head works in float64, so that no probability rounds to 0 or 1."""
    network.eval()
    head = copy.deepcopy(network.head).double()
    device = next(network.parameters()).device
    size = config.batch_size if dataset.kind == "files" else max(config.batch_size, 1024)
    batches = data_room.eval_batches(dataset, part, size, channels_last=config.channels_last, workers=config.workers)
    for inputs, y in batches:
        with _autocast(config, device)():
            h = network.h(inputs)
        h = h.double()
        yield head.features(h).float(), head.predict_proba(h), y


def evaluate(
    network: Network, dataset: data_room.Dataset, config: Config, part: str
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics of a split, and its outputs: x, p, y and the head's Gaussians where it has them."""
    x, p, y = (torch.cat(parts).cpu() for parts in zip(*collect(network, dataset, config, part), strict=True))
    stats = geometry.ClassStatistics(dataset.num_classes, multilabel=dataset.multilabel)
    stats.update(positive_outputs(x), y)
    outputs = {"x": x, "p": p, "y": y}
    for name in ("mu", "sigma"):
        if isinstance(value := getattr(network.head, name, None), Tensor):
            outputs[name] = value.detach().float().cpu().clone()
    return score(x, p, y, dataset.multilabel) | stats.geometry().average(), outputs


def class_statistics(
    network: Network, dataset: data_room.Dataset, config: Config, part: str
) -> geometry.ClassStatistics:
    """Mean and deviation of every output for every class of a split."""
    stats = geometry.ClassStatistics(dataset.num_classes, multilabel=dataset.multilabel)
    for x, _, y in collect(network, dataset, config, part):
        stats.update(positive_outputs(x), y)
    return stats


def positive_outputs(x: Tensor) -> Tensor:  # (N, C), or (N, 2, L) -> (N, L)
    return x[:, 1] if x.ndim == 3 else x


def score(x: Tensor, p: Tensor, y: Tensor, multilabel: bool) -> dict[str, float]:
    """The metrics of a test set: error, NLL and ECE, or the multi-label numbers; x also by itself, without the term.

    For the NLL p is held a float64's precision away from 0 and 1, as scikit-learn's log_loss does, so that one certain
    mistake costs 36 and not infinity.
    """
    eps = torch.finfo(torch.float64).eps
    held = p.double().clamp(eps, 1 - eps)
    if not multilabel:
        return {
            "error": float(metrics.top1_error(p, y)),
            "error_x": float(metrics.top1_error(x, y)),
            "nll": float(metrics.negative_log_likelihood(held, y)),
            "ece": float(metrics.expected_calibration_error(p, y)),
        }
    report = metrics.multilabel_report(p, y)
    numbers = {k: float(v) for k, v in dataclasses.asdict(report).items() if isinstance(v, (int, float))}
    return numbers | {  # averages over labels
        "nll": float(metrics.multilabel_negative_log_likelihood(held, y).nanmean()),
        "ece": float(metrics.multilabel_expected_calibration_error(p, y).nanmean()),
    }


# ----------------------------------------------------------------------------------------------------- the run folder


class RunFolder:
    """What a run leaves behind.  Files appear whole or not at all."""

    def __init__(self, path: str | os.PathLike[str], config: Config, dataset: data_room.Dataset, resume: bool) -> None:
        self.path = Path(path)
        self.last = self.path / "checkpoint" / "last.pt"
        self.resume = resume
        wanted = json.loads(json.dumps(config.identity()))
        if (found := read_config(self.path)) is not None:
            if not resume:
                raise ValueError(f"{self.path} already holds a run; --resume goes on with it")
            differing = sorted(k for k in wanted if found.identity().get(k) != wanted[k])
            if differing:
                raise ValueError(f"{self.path} holds a run with another {', '.join(differing)}")
        self.last.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / "config.json", json.dumps(dataclasses.asdict(config), indent=2))
        described = environment() | {"data": {"name": dataset.name, "classes": list(dataset.classes)}}
        write_atomically(self.path / "environment.json", json.dumps(described, indent=2))
        if not resume or not self.last.exists():
            write_atomically(self.path / "metrics.jsonl", "")

    def checkpoint(self) -> dict[str, Any] | None:
        """The state to go on from; rows written after it are taken back."""
        if not self.resume or not self.last.exists():
            return None
        state = torch.load(self.last, map_location="cpu", weights_only=True)
        rows = [row for row in read_rows(self.path) if "final" not in row and row["epoch"] <= state["epoch"]]
        write_atomically(self.path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        return state

    def log(self, row: Mapping[str, Any]) -> None:
        with open(self.path / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        board = self._board()
        if board is not None:
            for key, value in row.items():
                if isinstance(value, (int, float)) and key != "epoch":
                    board.add_scalar(key, value, row.get("epoch"))

    @functools.cache  # noqa: B019 - one writer a folder, as long as the folder object lives
    def _board(self) -> Any:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return None
        return SummaryWriter(str(self.path / "tensorboard"))

    def save(self, state: Mapping[str, Any]) -> None:
        with whole_file(self.last) as partial:
            torch.save(state, partial)

    def finish(self, result: Mapping[str, Any], outputs: Mapping[str, Tensor]) -> None:
        from safetensors.torch import save_file

        with whole_file(self.path / "outputs.safetensors") as partial:
            save_file({k: v.contiguous() for k, v in outputs.items()}, partial)
        self.log({"final": True, **result})
        if (board := self._board()) is not None:
            board.close()


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name to write to; the file appears under `path` when all of it is there, and not at all otherwise."""
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        os.replace(partial, path)
    except OSError:
        raise
    except Exception as error:  # torch and safetensors wrap what the system said in words of their own
        full = shutil.disk_usage(path.parent).free < 2**20
        reason = "no space left on the disk" if full else str(error).splitlines()[0]
        raise OSError(f"{path} cannot be written: {reason}") from error
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    with whole_file(path) as partial:
        partial.write_text(text)


def read_config(run: Path) -> Config | None:
    path = run / "config.json"
    if not path.exists():
        return None
    try:
        return Config(**json.loads(path.read_text()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def read_rows(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_result(run: Path) -> dict[str, Any] | None:
    """The final metrics of a finished run."""
    rows = read_rows(run)
    return rows[-1] if rows and rows[-1].get("final") and (run / "outputs.safetensors").exists() else None


def environment() -> dict[str, Any]:
    """Where a number came from."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "gsoftmax": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "threads": torch.get_num_threads(),
        "command": shlex.join(["gsoftmax", *sys.argv[1:]]),
    }
