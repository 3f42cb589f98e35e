"""What a run depends on: one flat configuration, and how it is written on a command line."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .messages import unknown

SCHEDULES = ("constant", "linspace", "logspace", "staircase", "malleable")
AMP = ("off", "bf16", "fp16")
PARALLEL = ("ddp", "fsdp")
CHOICES: dict[str, tuple[str, ...]] = {
    "amp": AMP,
    "evaluate_on": ("test", "val"),
    "init": ("constant", "data"),
    "parallel": PARALLEL,
    "schedule_every": ("epoch", "step"),
}
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("epochs", "threads", "workers", "evaluate_every", "checkpoint_every"), (0, math.inf)),
    **dict.fromkeys(("batch_size", "accumulate", "image_size"), (1, math.inf)),
    **dict.fromkeys(("lr", "weight_decay", "bias_lr", "feature_scale", "clip", "checkpoint_minutes"), (0, math.inf)),
    "seed": (0, 2**63 - 1),
    "threads": (0, 1024),  # the system refuses far more in ways that cannot be caught
    **dict.fromkeys(("momentum", "ema", "warmup", "label_smoothing"), (0, 1)),
}
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "str": ((str,), "text"),
    "dict[str, Any]": ((dict,), "a dictionary"),
}


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
    cuda_graphs: bool = False  # on a GPU: the backbone's step recorded once and replayed, with what Python decided then
    parallel: str = "ddp"  # with several processes: ddp, or fsdp for a backbone too large for one device
    sync_batchnorm: bool = False  # with several GPUs: batch norms see the whole batch
    # the run
    seed: int = 0
    device: str = "auto"
    threads: int = 0  # 0: torch's default
    workers: int | None = None  # processes that read image files
    evaluate_every: int = 0  # epochs; 0 is at the end only
    checkpoint_every: int = 1  # epochs; 0 is never
    checkpoint_minutes: float = 10.0  # and inside a long epoch, as often as this; 0 is never
    train_geometry: bool = True  # class geometry of the training set too, one more pass at the end
    ood: str | None = None  # other data, or several with spaces between: how well outputs tell their test images apart

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            _check_kind(f.name, str(f.type), getattr(self, f.name))
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                span = f"{low} or more" if high == math.inf else f"from {low} to {high}"
                raise ValueError(f"{name} must be {_KINDS[_kind(self, name)][1]}, {span}, got {value!r}")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if self.reduction not in (None, "mean", "sum", "batchmean"):
            raise ValueError(f"reduction must be one of mean, sum, batchmean, got {self.reduction!r}")
        if self.clip == 0:
            raise ValueError("clip must be above 0, or none for no clipping, got 0")
        if self.ema == 1:
            raise ValueError("ema must be below 1, because the average would never move, got 1")
        if self.schedule.get("name") not in SCHEDULES:
            raise ValueError(f"schedule name must be one of {', '.join(SCHEDULES)}, got {self.schedule.get('name')!r}")

    def override(self, changes: Mapping[str, Any]) -> Config:
        """The same with some keys changed; `head_options.lam` reaches into a dictionary.  Unknown keys are errors."""
        known = {f.name for f in dataclasses.fields(self)}
        new: dict[str, Any] = {}
        for key, value in changes.items():
            name, dot, inner = key.partition(".")
            if dot and not inner:
                raise ValueError(f"a name must follow the dot, got {key!r}")
            if name not in known:
                raise ValueError(f"{unknown('key', name, known)}; keys are {', '.join(sorted(known))}")
            if inner:
                held = new.get(name, getattr(self, name))
                if not isinstance(held, dict):
                    raise ValueError(f"{name!r} holds {held!r} and has no {inner!r} inside")
                value = {**held, inner: value}
            new[name] = value
        return dataclasses.replace(self, **new)

    def identity(self) -> dict[str, Any]:
        """What decides the result: all but where it runs and how often it is looked at."""
        where = ("device", "workers", "evaluate_every", "checkpoint_every", "checkpoint_minutes", "parallel")
        held = {k: v for k, v in dataclasses.asdict(self).items() if k not in where}
        return json.loads(json.dumps(held))  # as config.json has it, where the keys of a dictionary are text

    def differences(self, other: Config) -> str:
        """The keys that decide the result and differ: what this configuration has, and what the other wants.

        >>> Config(lr=0.1).differences(Config(lr=0.2))
        'lr=0.1, not lr=0.2'
        """
        mine, wanted = self.identity(), other.identity()
        keys = [k for k in sorted(wanted) if mine[k] != wanted[k]]
        shown = [f"{k}={json.dumps(mine[k])}, not {k}={json.dumps(wanted[k])}" for k in keys]
        return "; ".join(shown)


def _kind(config: Config, name: str) -> str:
    return next(str(f.type) for f in dataclasses.fields(config) if f.name == name).removesuffix(" | None")


def _check_kind(name: str, kind: str, value: Any) -> None:
    if value is None and kind.endswith(" | None"):
        return
    types, words = _KINDS[kind.removesuffix(" | None")]
    wrong = not isinstance(value, types) or (isinstance(value, bool) and bool not in types)
    if wrong or (isinstance(value, float) and not math.isfinite(value)):
        low = RANGES.get(name, (None,))[0]
        raise ValueError(f"{name} must be {words}{'' if low is None else f', {low} or more'}, got {value!r}")


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
    except (ValueError, RecursionError):  # also numbers of thousands of digits, and brackets without end
        return {"none": None, "None": None, "True": True, "False": False}.get(text, text)
