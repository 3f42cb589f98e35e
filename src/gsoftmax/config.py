"""What a run depends on: one flat configuration, and its command-line syntax."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .messages import unknown

__all__ = ["Config", "parse_head", "parse_value", "world_size"]

SCHEDULES = ("constant", "linspace", "logspace", "staircase", "malleable")
CHOICES: dict[str, tuple[str, ...]] = {
    "amp": ("off", "bf16", "fp16"),
    "evaluate_on": ("test", "val"),
    "init": ("constant", "data"),
    "logger": ("wandb",),
    "parallel": ("ddp", "fsdp"),
    "reduction": ("mean", "sum", "batchmean"),
    "schedule_every": ("epoch", "step"),
}
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("epochs", "workers", "evaluate_every", "checkpoint_every"), (0, math.inf)),
    **dict.fromkeys(("batch_size", "accumulate", "image_size"), (1, math.inf)),
    **dict.fromkeys(("lr", "weight_decay", "bias_lr", "feature_scale", "clip", "checkpoint_minutes"), (0, math.inf)),
    **dict.fromkeys(("seed", "split_seed"), (0, 2**63 - 1)),
    "mixup": (0, 1e6),  # more would mix all pairs half and half
    "threads": (0, 1024),  # larger values crash outside Python
    **dict.fromkeys(("momentum", "gaussian_momentum", "ema", "warmup", "label_smoothing"), (0, 1)),
}
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "bool": (bool, "true or false"),
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
    "str": (str, "text"),
    "bool | str": ((bool, str), "true, false or a name"),
    "dict[str, Any]": (dict, "a dictionary"),
}


@dataclass(frozen=True)
class Config:
    """Everything a run depends on.  A recipe lists its differences from these defaults.

    >>> Config().override({"head": "gsoftmax", "head_options.lam": 0.5}).head_options
    {'lam': 0.5}
    """

    # data
    data: str = "digits"  # a dataset, as in `gsoftmax datasets`
    val_fraction: float = 0.0  # fraction of each class that moves from the training to the validation split
    train_fraction: float = 1.0  # fraction of the training split to keep
    imbalance: float = 1.0  # largest class over smallest in a long-tailed training split; 1 is off
    label_noise: float = 0.0  # fraction of training labels replaced by a wrong class
    split_seed: int | None = None  # of the four keys above: which rows, labels and classes; None is the run's seed
    image_size: int | None = None  # side of the images in pixels; None: the dataset's own; photos: by the backbone
    augment: str | None = None  # a preset or changes of it; None is the dataset's own
    mixup: float = 0.0  # alpha of Beta(alpha, alpha), which mixes pairs of training examples; 0 is off
    evaluate_on: str = "test"  # or val, for choosing settings
    check: bool = True  # require published sizes and all images; false leaves out missing and truncated images
    # network
    backbone: str | None = None  # None: cnn for small images, mlp for tables; photos: by number and machine
    backbone_options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the backbone
    pool: str | None = None  # avg or max, before the head; None is the backbone's own
    pretrained: bool | str = False  # start from ImageNet weights; for networks of torchvision also their name
    weights: str | None = None  # file of weights to start from
    feature_scale: float = 1.0  # factor on h before the head
    # head
    head: str = "softmax"  # a head, as in `gsoftmax heads`, or package.module:ClassName
    head_options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the head
    init: str = "constant"  # or data: Gaussians from one pass over the training data before training
    zero_bias: bool = False  # start the head's bias at 0 instead of nn.Linear's random values
    label_smoothing: float = 0.0  # of the loss
    reduction: str | None = None  # multi-label losses: mean (default), sum or batchmean
    # optimization
    epochs: int = 15  # passes over the training split
    batch_size: int = 64  # examples per batch, over all processes
    drop_last: bool = True  # drop an incomplete last batch of an epoch
    accumulate: int = 1  # batches per optimizer step (gradient accumulation)
    optimizer: str = "sgd"  # any of torch.optim, by name
    optimizer_options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the optimizer
    lr: float = 0.1  # learning rate before the schedule's factor
    momentum: float = 0.9  # for optimizers that have it
    gaussian_momentum: float | None = None  # momentum of the head's Gaussians; None is that of the other parameters
    nesterov: bool = True  # Nesterov momentum, for optimizers that have it
    weight_decay: float = 5e-4  # of all parameters but the head's Gaussians
    bias_lr: float = 1.0  # factor on the learning rate (and divisor of the decay) of the backbone's biases and norms
    schedule: dict[str, Any] = field(default_factory=lambda: {"name": "linspace", "a": 1.0, "b": 0.01})  # of the rate
    schedule_every: str = "epoch"  # or step
    warmup: float = 0.0  # linear warm-up, as a fraction of training
    clip: float | None = None  # largest norm of the gradient; None is no clipping
    ema: float = 0.0  # decay of averaged weights, which are then the ones evaluated; 0 is off
    amp: str = "off"  # mixed precision: bf16 or fp16
    channels_last: bool = True  # memory order of images; faster on CPUs too
    compile: bool = False  # use torch.compile
    cuda_graphs: bool = False  # GPU: capture the backbone's forward and backward pass as CUDA graphs
    parallel: str = "ddp"  # with several processes: ddp, or fsdp for a backbone too large for one device
    sync_batchnorm: bool = False  # with several GPUs: batch norms see the whole batch
    # the run
    recipe: str | None = None  # the row of the paper that the configuration comes from, set by its recipe
    seed: int = 0  # of weights, batches, augmentation and dropout
    deterministic: bool = False  # GPU: choose cuDNN's algorithms by rule, not by timing, so that results repeat
    device: str = "auto"  # cpu, cuda, cuda:1, ...; auto is a GPU where there is one
    threads: int = 0  # of the CPU; 0 is torch's default
    workers: int | None = None  # processes that read image files
    evaluate_every: int = 0  # epochs; 0 is at the end only
    checkpoint_every: int = 1  # epochs; 0 is never
    checkpoint_minutes: float = 10.0  # within a long epoch; 0 is never
    logger: str | None = None  # wandb: metrics to Weights & Biases too, offline unless WANDB_MODE says otherwise
    train_geometry: bool = True  # class geometry of the training split too, by one more pass at the end
    ood: str | None = None  # out-of-distribution detection: datasets to detect, separated by spaces

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            _check(f.name, str(f.type), getattr(self, f.name))
        if self.clip == 0:
            raise ValueError("clip must be above 0, or none for no clipping, got 0")
        if self.ema == 1:
            raise ValueError("ema must be below 1, because the average would never move, got 1")
        if self.schedule.get("name") not in SCHEDULES:
            raise ValueError(f"schedule name must be one of {', '.join(SCHEDULES)}, got {self.schedule.get('name')!r}")

    def override(self, changes: Mapping[str, Any]) -> Config:
        """A copy with some keys changed.

        changes: values by key; `head_options.lam` sets one entry of a dictionary, and an unknown key is an error
        """
        known = {f.name for f in dataclasses.fields(self)}
        new: dict[str, Any] = {}
        for key, value in changes.items():
            name, dot, inner = key.partition(".")
            if name == "recipe":
                raise ValueError("recipe is the row of the paper that a run starts from, not a key to set")
            if dot and not inner:
                raise ValueError(f"a name must follow the dot, got {key!r}")
            if name not in known:
                raise ValueError(f"{unknown('key', name, known)}; keys are {', '.join(sorted(known))}")
            if inner:
                held = new.get(name, getattr(self, name))
                if not isinstance(held, dict):
                    raise ValueError(f"{name!r} is {held!r}, not a dictionary: it has no key {inner!r}")
                value = {**held, inner: value}
            new[name] = value
        return dataclasses.replace(self, **new)

    def head_text(self) -> str:
        """The head as it is written on a command line.

        >>> Config(head="gsoftmax", head_options={"lam": 4, "gaussians": "tracked"}).head_text()
        'gsoftmax(lam=4, gaussians=tracked)'
        """
        options = ", ".join(f"{k}={v}" for k, v in self.head_options.items())
        return f"{self.head}({options})" if options else self.head

    @property
    def draw_seed(self) -> int:
        """The seed of subsets, imbalance, label noise and the validation split."""
        return self.seed if self.split_seed is None else self.split_seed

    @staticmethod
    def from_file(found: Mapping[str, Any]) -> Config:
        """The configuration of a file; files without `split_seed` are older than that key and drew with seed 0.

        found: content of the file
        """
        return Config(**{"split_seed": 0, **found})

    def identity(self) -> dict[str, Any]:
        """The keys that decide the result: all except machine, parallelism, logger, intervals and recipe's name."""
        where = {"recipe", "device", "threads", "workers", "parallel", "logger"}
        where |= {"evaluate_every", "checkpoint_every", "checkpoint_minutes"}
        held = {k: v for k, v in dataclasses.asdict(self).items() if k not in where}
        drawn = (self.val_fraction, self.train_fraction, self.imbalance, self.label_noise) != (0, 1, 1, 0)
        if not drawn or self.split_seed == self.seed:
            held["split_seed"] = None
        return json.loads(json.dumps(held))  # as config.json has it, where all keys are text

    def differences(self, other: Config) -> str:
        """The keys that decide the result and differ, with both values.

        other: the configuration that is wanted

        >>> Config(lr=0.1).differences(Config(lr=0.2))
        'lr=0.1, not lr=0.2'
        """
        mine, wanted = self.identity(), other.identity()
        differing = [k for k in sorted(wanted) if mine[k] != wanted[k]]
        return "; ".join(f"{k}={json.dumps(mine[k])}, not {k}={json.dumps(wanted[k])}" for k in differing)


def _check(name: str, kind: str, value: Any) -> None:
    if value is None and kind.endswith(" | None"):
        return
    types, words = _KINDS[kind.removesuffix(" | None")]
    good = isinstance(value, types) and (isinstance(value, bool) == (types is bool) or types == (bool, str))
    if name in CHOICES and good and value not in CHOICES[name]:
        raise ValueError(f"{name} must be one of {', '.join(CHOICES[name])}, got {value!r}")
    low, high = RANGES.get(name, (-math.inf, math.inf))
    if good and isinstance(value, (int, float)):
        good = low <= value <= high and abs(value) != math.inf  # neither NaN
    if not good:
        span = "" if low == -math.inf else f", {low} or more" if high == math.inf else f", from {low} to {high}"
        raise ValueError(f"{name} must be {words}{span}, got {value!r}")


def parse_head(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a head.

    text: written as `name(option=value, ...)`

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


def world_size() -> int:
    """The number of processes of the run: the variable WORLD_SIZE, which torchrun sets."""
    text = os.environ.get("WORLD_SIZE") or "1"
    if not (text.isdecimal() and int(text)):
        raise ValueError(f"the environment variable WORLD_SIZE must be a positive whole number, got {text!r}")
    return int(text)


def parse_value(text: str) -> Any:
    """A value of the command line.

    text: JSON, or none, True and False as in Python, or else plain text

    >>> parse_value("0.5"), parse_value("true"), parse_value("bf16"), parse_value("1e-5")
    (0.5, True, 'bf16', 1e-05)
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # a RecursionError for thousands of open brackets
        return {"none": None, "None": None, "True": True, "False": False}.get(text, text)
