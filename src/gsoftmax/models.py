"""Trained models: the file that a finished run leaves, and what one does with it.

`model.safetensors` holds the evaluated weights, and in its metadata the configuration, the names of the classes and the
format of the inputs, so the file alone is enough.  Nothing in it is executed: the network is built from the
configuration without memory, and its tensors must be those of the file.

>>> import tempfile
>>> from gsoftmax import config, train
>>> with tempfile.TemporaryDirectory() as folder:
...     _ = train.train(config.Config(epochs=1, threads=1), folder)
...     model = load(folder)
>>> images = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
>>> model.predict_proba(model.prepare(images)).shape
torch.Size([2, 10])
"""

from __future__ import annotations

import copy
import csv
import dataclasses
import importlib.util
import itertools
import json
import math
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as registration

from . import build, evaluation, functional, geometry, heads, outputs, tables
from ._version import __version__
from .config import Config
from .data import DataError, Dataset, Split, eval_batches, match_inputs
from .data.core import read_lines
from .data.images import ImageFiles, cores, list_images, read_files
from .data.tables import read_npz
from .export import fold, to_onnx, to_program
from .files import atomic_file, atomic_write, verify
from .layout import split_outputs
from .messages import first_line
from .runs import read_result, save_tensors

__all__ = [
    "Model",
    "Prediction",
    "describe",
    "detect",
    "evaluate",
    "export",
    "load",
    "predict",
    "predictions_table",
    "predictions_text",
    "saved_outputs",
]

FORMAT = 1  # of the metadata; a reader refuses a higher number
KEY = "gsoftmax"  # of the metadata, one JSON text
MOST = 1_000_000  # sum of the numbers in the options of a network that a file describes
LARGEST_SIDE = 4096  # of the images, in pixels
THRESHOLD = 0.5  # a label with this probability is predicted
SUFFIXES = (".onnx", ".pt2")
# Options of torchvision's and timm's networks that name files, downloads or where memory is allocated.
REFUSED = re.compile(r"^(pretrained|weights|checkpoint|cache)|(^|_)(file|url|dir|hub|device|dtype)(_|$)")
_INSTALL = "which is not installed: pip install 'gsoftmax[train]'"


# ------------------------------------------------------------------------------------------------------------ the model


class Model(nn.Module):
    """A trained network in evaluation mode, and what it knows about its inputs and classes.

    network, config: backbone and head with their weights, and the configuration of the run
    about: the training data without its rows: names of the classes, and the format of the inputs
    inputs: normalized, (N, C, H, W) or (N, D), as `prepare` makes them
    """

    def __init__(self, network: build.Network, config: Config, about: Dataset) -> None:
        super().__init__()
        self.network, self.config, self.about = network, config, about
        self.eval()

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, or of the labels."""
        return self.about.classes

    @property
    def multilabel(self) -> bool:
        """Whether an input has several labels."""
        return self.about.multilabel

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(C, H, W) or (D,) of one input."""
        return self.about.input_shape

    @property
    def kind(self) -> str:
        """The training data: "images", "files" (of images) or "table"."""
        return self.about.kind

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.network.parameters()).device

    def forward(self, inputs: Tensor) -> Tensor:
        """z, (N, C), or (N, 2, L) for a multi-label form of two outputs."""
        return self.network.head(self.network.h(inputs))

    def features(self, inputs: Tensor) -> Tensor:
        """x, of the same shape: the outputs without the Gaussian term."""
        return self.network.head.features(self.network.h(inputs))

    @torch.no_grad()
    def predict_proba(self, inputs: Tensor) -> Tensor:
        """p, (N, C), or p+ (N, L) for several labels."""
        return self.network.head.predict_proba(self.network.h(inputs))

    def prepare(self, given: Any) -> Tensor:
        """Inputs for the model, resized and normalized as in its evaluation.

        given: uint8 images (N, C, H, W) of any size, paths of image files, or rows (N, D) of a table
        """
        if self.kind != "table" and isinstance(given, (list, tuple)) and all(map(_is_path, given)):
            found = list(self.read([os.fspath(path) for path in given], max(1, len(given)), workers=0))
            return torch.cat(found) if found else torch.empty(0, *self.input_shape, device=self.device)
        x = torch.as_tensor(given)
        return next(self._delivered(self._rows(x) if self.kind == "table" else self._pixels(x), max(1, len(x))))

    def read(self, paths: Sequence[str], batch_size: int, workers: int | None = None) -> Iterator[Tensor]:
        """Inputs of image files, batch by batch; an unreadable one is a DataError.

        paths, batch_size: the files, and how many at a time
        workers: processes that read them; None chooses
        """
        if workers is None:
            workers = min(8, cores()) if len(paths) > 64 else 0
        if self.kind == "files":
            yield from self._delivered(tuple(paths), batch_size, workers)
            return
        size = (self.input_shape[-2], self.input_shape[-1])
        pieces = list(torch.arange(len(paths)).split(batch_size))
        for item in read_files(ImageFiles(paths, size), pieces, workers):
            if isinstance(item, str):
                raise DataError(item)
            rows, pixels = item
            if self.input_shape[0] == 1:  # files are decoded to three channels
                gray = (pixels == pixels[:, :1]).flatten(1).all(1)
                if not gray.all():
                    where = paths[int(rows[int((~gray).nonzero()[0])])]
                    raise DataError(f"{where} is in color, and the model takes gray images")
                pixels = pixels[:, :1]
            yield from self._delivered(self._pixels(pixels), batch_size)

    def _delivered(self, x: Tensor | tuple[str, ...], batch_size: int, workers: int = 0) -> Iterator[Tensor]:
        if not len(x):
            yield torch.empty(0, *self.input_shape, device=self.device)
            return
        data = dataclasses.replace(self.about, test=Split(x, torch.zeros(len(x), dtype=torch.int64)))
        options: Any = {"channels_last": self.config.channels_last, "device": self.device, "workers": workers}
        for inputs, _ in eval_batches(data, "test", batch_size, **options):
            yield inputs

    def _pixels(self, x: Tensor) -> Tensor:
        need = self.input_shape[0]
        if x.ndim != 4 or x.dtype != torch.uint8 or 0 in x.shape[1:]:
            raise ValueError(f"images must be uint8 (N, C, H, W) or paths, got {x.dtype} {tuple(x.shape)}")
        if x.shape[1] not in (1, need):
            raise ValueError(f"images must have {need} channels, got {x.shape[1]}")
        x = x.expand(-1, need, -1, -1)
        if self.kind == "files" and x.shape[-2:] != self.input_shape[-2:]:
            from torchvision.transforms.v2 import functional as V

            bicubic = V.InterpolationMode.BICUBIC  # as files are read
            return V.resize(x, list(self.input_shape[-2:]), interpolation=bicubic, antialias=True)
        return x

    def _rows(self, x: Tensor) -> Tensor:
        if x.ndim != 2 or x.shape[1] != self.input_shape[0]:
            raise ValueError(f"rows must have {self.input_shape[0]} columns, got the shape {tuple(x.shape)}")
        x = x.float()
        if not x.isfinite().all():
            row = int((~x.isfinite()).any(1).nonzero()[0])
            raise ValueError(f"rows must be finite, got nan or infinity in row {row}")
        return x


def _is_path(value: object) -> bool:
    return isinstance(value, (str, os.PathLike))


# ------------------------------------------------------------------------------------------------------------- the file


def describe(config: Config, dataset: Dataset) -> dict[str, str]:
    """The metadata of a model's file: what is needed to use it.

    config, dataset: of its training
    """
    about = {
        "format": FORMAT,
        "version": __version__,
        "config": dataclasses.asdict(config),
        "data": {
            "name": dataset.name,
            "kind": dataset.kind,
            "classes": list(dataset.classes),
            "multilabel": dataset.multilabel,
            "input_shape": list(dataset.input_shape),
            "mean": dataset.mean.tolist(),
            "std": dataset.std.tolist(),
        },
    }
    return {KEY: json.dumps(about)}


def load(
    run: str | os.PathLike[str],
    *,
    head: type[nn.Module] | str | None = None,
    device: torch.device | str = "cpu",
) -> Model:
    """The model of a finished run, in evaluation mode.  Nothing in the file is executed.

    run: a run folder, or a model.safetensors file
    head: the class of a head of your own, or `package.module:ClassName`; a file cannot name code to import
    device: where to put the model; "auto" is a GPU where there is one
    """
    path = Path(run)
    path = path / "model.safetensors" if path.is_dir() else path
    if not path.is_file():
        hint = _runs_below(Path(run))
        if not hint and Path(run).is_dir():
            hint = ": a run has it when it is finished, and --resume finishes one that was stopped"
        raise ValueError(f"{path} does not exist{hint}")
    try:
        from safetensors import safe_open
    except ImportError:
        raise ValueError(f"models are read with safetensors, {_INSTALL}") from None
    verify(path)
    where = build.pick_device(str(device))
    cls = heads.find(head) if isinstance(head, str) else head
    try:
        with safe_open(path, "pt") as file:
            config, about = _description(file.metadata())
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            network = _network(config, about, cls, shapes)
            # copies: the file may change while the model is used
            _fill(network, {name: file.get_tensor(name).clone() for name in shapes})
    except Exception as error:  # a foreign file may raise anything
        raise ValueError(f"{path} cannot be loaded: {first_line(error)}") from error
    network = network.to(where)
    if config.channels_last and about.kind != "table":
        network = network.to(memory_format=torch.channels_last)
    # the machine of the training is not this one
    return Model(network, config.override({"device": str(where), "workers": None}), about.to(where))


def _runs_below(folder: Path) -> str:
    """The end of an error message about the folder of a comparison, which names a run in it; empty for any other."""
    found = min(folder.glob("*/seed-*/model.safetensors"), default=None)
    return f", did you mean {found.parent}" if found else ""


def _description(metadata: Mapping[str, str] | None) -> tuple[Config, Dataset]:
    """Configuration and data of a file's metadata, checked."""
    text = (metadata or {}).get(KEY)
    if text is None:
        raise ValueError("its metadata does not describe a model of gsoftmax")
    try:
        found = json.loads(text)
        if not isinstance(found, dict) or type(found.get("format")) is not int:
            raise ValueError("it has no format number")
        if found["format"] > FORMAT:
            raise ValueError(f"format {found['format']} is of a newer gsoftmax, this one reads up to {FORMAT}")
        config, data = Config.from_file(found["config"]), found["data"]
        kind, classes, multilabel = data["kind"], data["classes"], data["multilabel"]
        shape, mean, std = data["input_shape"], data["mean"], data["std"]
        _check_description(kind, classes, multilabel, shape)
        mean, std = torch.tensor(mean, dtype=torch.float32), torch.tensor(std, dtype=torch.float32)
        good = mean.shape == std.shape == (shape[0],) and mean.isfinite().all() and std.isfinite().all()
        if not good or not (std > 0).all():
            raise ValueError(f"mean and std must be {shape[0]} finite numbers each, those of std positive")
    except RecursionError:
        raise ValueError("its metadata is nested too deeply") from None
    except KeyError as error:
        raise ValueError(f"its metadata has no {error}") from None
    except (ValueError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"its metadata cannot be read: {first_line(error)}") from None
    rows = Split(torch.empty(0, *shape), torch.empty(0, dtype=torch.int64))
    options: Any = {"input_shape": tuple(shape), "mean": mean, "std": std, "train": rows, "test": rows}
    return config, Dataset(str(data.get("name", "")), kind, tuple(classes), multilabel, **options)


def _check_description(kind: Any, classes: Any, multilabel: Any, shape: Any) -> None:
    if kind not in ("images", "files", "table"):
        raise ValueError(f"kind must be images, files or table, got {kind!r:.60}")
    if not isinstance(classes, list) or not classes or not all(isinstance(name, str) for name in classes):
        raise ValueError("classes must be a list of names")
    if type(multilabel) is not bool:
        raise ValueError(f"multilabel must be true or false, got {multilabel!r:.60}")
    axes, largest = (1, MOST) if kind == "table" else (3, LARGEST_SIDE)
    whole = isinstance(shape, list) and all(type(size) is int and 1 <= size <= largest for size in shape)
    if not whole or len(shape) != axes:
        raise ValueError(f"input_shape must be {axes} whole numbers from 1 to {largest:,}, got {shape!r:.60}")


def _network(
    config: Config, about: Dataset, cls: type[nn.Module] | None, shapes: Mapping[str, tuple[int, ...]]
) -> build.Network:
    """The configured network without weights, whose tensors are those of the file; memory is taken only after that."""
    if cls is None:
        if config.head not in heads.HEADS and ":" in config.head:
            name = config.head.rpartition(":")[2]
            hint = f"pass head={name:.60}, or --head {config.head:.120} on the command line"
            raise ValueError(f"its head is code of its own, which a file must not name: {hint}")
        cls = heads.find(config.head)
    name = config.backbone or ""
    if name and not re.fullmatch(r"((torchvision|timm):)?[\w.-]+", name):
        raise ValueError(f"backbone {name!r:.120} is not the name of a network")
    for option in (*config.backbone_options, *config.head_options):
        if REFUSED.search(option):
            raise ValueError(f"option {option!r:.60} is not accepted from a file: it names files, downloads or devices")
    if not _total(config.backbone_options) <= MOST:
        raise ValueError(f"the numbers in backbone_options must add up to at most {MOST:,}")
    options = config.backbone_options
    if config.pretrained and name in ("torchvision:googlenet", "torchvision:inception_v3"):
        options = {"transform_input": True, **options}  # as torchvision does for pretrained networks
    plain = config.override({"pretrained": False, "weights": None, "backbone_options": options})

    def make(device: str) -> build.Network:
        with _unseeded(), _bounded(shapes), torch.device(device):
            backbone = build.backbone(plain, about)
            return build.Network(backbone, _head(config, about, cls, backbone.num_features), config.feature_scale)

    try:
        network = make("meta")
    except ValueError as error:
        if "meta tensor" not in str(error) or options:
            raise
        network = make("cpu")  # some networks compute while they are built; without options their sizes are their own
    _compare(network, shapes)
    left = _unsaved(network)
    if any(tensor.is_meta for tensor in left):
        size, most = sum(tensor.nbytes for tensor in left), 2**28 + 4 * sum(map(math.prod, shapes.values()))
        if size > most:
            raise ValueError(f"its network needs {size:,} bytes that are not in the file, more than {most:,}")
        network = make("cpu")  # again, for the tensors that the network computes instead of saving
    return network


def _head(config: Config, about: Dataset, cls: type[nn.Module], features: int) -> nn.Module:
    """The whole head, also where it was trained in shards."""
    sharding = ("shard", "negatives", "seed") if "shard" in config.head_options else ()
    options = {k: v for k, v in config.head_options.items() if k not in sharding}
    return cls(features, about.num_classes, **heads.options_for(cls, options, about.multilabel, "its data"))


def _total(options: Mapping[str, Any]) -> float:
    """The sum of the absolute numbers in nested options."""
    found, todo = 0.0, list(options.values())
    while todo:
        value = todo.pop()
        if isinstance(value, (list, tuple)):
            todo += value
        elif isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, (int, float)):
            found += abs(value)
    return found


@contextmanager
def _unseeded() -> Iterator[None]:
    """Building a network seeds torch's generators; afterwards they are as before."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(list(gpus)):
        yield


@contextmanager
def _bounded(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[None]:
    """Stops building a network that is much larger than the file, such as wrn-1000000000-1.

    The limits leave room for layers without tensors, and for a classifier that is removed.
    """
    size, here = sum(map(math.prod, shapes.values())), threading.get_ident()
    parts, elements = 1000 + 20 * len(shapes), 2**24 + 2 * size
    seen = [0, 0]

    def note(module: nn.Module, name: str, part: nn.Module | Tensor | None) -> None:
        if threading.get_ident() != here:
            return
        seen[0] += 1
        seen[1] += part.numel() if isinstance(part, Tensor) else 0
        if seen[0] > parts or seen[1] > elements:
            held = f"{len(shapes):,} tensors of {size:,} numbers"
            raise ValueError(f"its network is too large for the file, which has {held}")

    hooks = [
        registration.register_module_parameter_registration_hook(note),
        registration.register_module_module_registration_hook(note),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _compare(network: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises unless the tensors of the network and of the file have the same names and shapes."""
    own = {name: tuple(value.shape) for name, value in network.state_dict().items() if isinstance(value, Tensor)}
    missing, extra = [k for k in own if k not in shapes], [k for k in shapes if k not in own]
    other = [k for k in own if k in shapes and own[k] != shapes[k]]
    problems = [f"{len(missing)} of {len(own)} tensors missing (first {missing[0]})"] if missing else []
    problems += [f"{len(extra)} unknown (first {extra[0]!r:.80})"] if extra else []
    if other:
        first = f"first {other[0]}: {shapes[other[0]]} in the file, {own[other[0]]} in the network"
        problems.append(f"{len(other)} of another shape ({first})")
    if problems:
        raise ValueError(f"its tensors do not fit its configuration: {'; '.join(problems)}")


def _unsaved(network: nn.Module) -> list[Tensor]:
    """Buffers that are not saved, and plain attributes."""
    saved = network.state_dict()
    buffers = [value for name, value in network.named_buffers() if name not in saved]
    return buffers + [v for part in network.modules() for v in vars(part).values() if isinstance(v, Tensor)]


def _fill(network: nn.Module, tensors: dict[str, Tensor]) -> None:
    for name, value in network.state_dict().items():
        if isinstance(value, Tensor) and tensors[name].dtype != value.dtype:
            seen, expected = tensors[name].dtype, value.dtype
            raise ValueError(f"its tensors do not fit its configuration: {name} must be {expected}, got {seen}")
    network.load_state_dict(tensors, strict=False, assign=True)


# ----------------------------------------------------------------------------------------------------------- predicting


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The probabilities of one image or row."""

    name: str  # path of the image, or file and number of the row
    p: Tensor | None  # (C,) on the CPU; None where the image could not be read
    error: str = ""  # why not


def predict(
    model: Model, paths: Iterable[str | os.PathLike[str]], *, batch_size: int = 64, workers: int | None = None
) -> Iterator[Prediction]:
    """p of every image, in order; an image that cannot be read has an error instead, and the others go on.

    model: from `load`
    paths: image files and folders, which are searched recursively; for a table .npz files with an array x, or .csv
    batch_size: images at a time
    workers: processes that read images; None chooses
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    given = [os.fspath(path) for path in paths]
    if model.kind == "table":
        for path in given:
            yield from _predict_rows(model, path, batch_size)
        return
    files = [file for path in given for file in _images(path)]
    start = 0
    while start < len(files):
        try:
            for inputs in model.read(files[start:], batch_size, workers):
                p = model.predict_proba(inputs).cpu()
                yield from map(Prediction, files[start : start + len(p)], p)
                start += len(p)
        except DataError:  # in the batch that follows: its images one by one
            for file in files[start : start + batch_size]:
                try:
                    yield Prediction(file, model.predict_proba(model.prepare([file]))[0].cpu())
                except DataError as error:
                    yield Prediction(file, None, first_line(error))
            start += batch_size


def _images(path: str) -> list[str]:
    if not os.path.isdir(path):
        return [path]
    found = list_images(path)
    if not found:
        raise ValueError(f"{path} contains no images")
    return found


def _predict_rows(model: Model, path: str, batch_size: int) -> Iterator[Prediction]:
    try:
        inputs = model.prepare(_read_rows(Path(path)))
    except ValueError as error:  # a DataError too
        reason = first_line(error)
        yield Prediction(path, None, reason if path in reason else f"{path}: {reason}")
        return
    rows = itertools.count(1)
    for batch in inputs.split(batch_size):
        for p in model.predict_proba(batch).cpu():
            yield Prediction(f"{path}:{next(rows)}", p)


def _read_rows(path: Path) -> np.ndarray:
    """(N, D) of an .npz or .csv file."""
    if path.suffix.lower() == ".npz":
        arrays = read_npz(path)
        if "x" not in arrays:
            raise DataError(f"{path} has no array x, only {', '.join(sorted(arrays)) or 'nothing'}")
        if arrays["x"].dtype.kind not in "biuf":
            raise DataError(f"{path} array x must be numbers, got {arrays['x'].dtype}")
        return arrays["x"].astype(np.float64)
    if path.suffix.lower() != ".csv":
        raise DataError(f"{path} must end in .npz or .csv")
    lines = read_lines(path)
    if lines and not _all_numbers(next(csv.reader(lines[:1]))):
        lines = lines[1:]  # the header
    if not lines:
        raise DataError(f"{path} has no rows of numbers")
    try:
        return np.loadtxt(lines, delimiter=",", ndmin=2, comments=None, quotechar='"')
    except ValueError as error:
        raise DataError(f"{path} must have the same number of numbers in every line: {first_line(error)}") from None


def _all_numbers(cells: Sequence[str]) -> bool:
    try:
        return bool([float(cell) for cell in cells])
    except ValueError:
        return False


def chosen(model: Model, p: Tensor, top: int = 5) -> list[tuple[str, float]]:
    """Classes with their probabilities, most probable first: the first `top`, or all labels with p of 0.5 or more."""
    order = p.argsort(descending=True, stable=True)
    order = order[p[order] >= THRESHOLD] if model.multilabel else order[:top]
    return [(model.classes[int(k)], float(p[k])) for k in order]


def predictions_table(model: Model, found: Sequence[Prediction], top: int = 5) -> tables.Table:
    """One row for every image: its most probable classes, or its labels, each with its probability.

    model, found: from `load`, and from `predict`
    top: how many classes; several labels are all those with a probability of 0.5 or more
    """
    if top < 1:
        raise ValueError(f"top must be 1 or more, got {top}")
    best = [[] if one.p is None else chosen(model, one.p, top) for one in found]
    width, failed = max(map(len, best), default=0), [one for one in found if one.error]
    header = ["row" if model.kind == "table" else "image"]
    header += [f"{what} {k}" for k in range(1, width + 1) for what in ("label" if model.multilabel else "class", "p")]
    rows = []
    for one, cells in zip(found, best, strict=True):
        row: list[tables.Cell] = [one.name, *(value for pair in cells for value in pair)]
        row += [None] * (1 + 2 * width - len(row))
        rows.append((*row, one.error or None) if failed else tuple(row))
    note = f"{len(failed)} of {len(found)} could not be read." if failed else ""
    title = f"{len(found)} {header[0]}{'' if len(found) == 1 else 's'}"
    return tables.Table(title, (*header, *(["error"] if failed else [])), tuple(rows), note)


def predictions_text(model: Model, found: Sequence[Prediction], top: int = 5, form: str = "text") -> str:
    """Predictions as text, CSV or JSON.

    model, found, top: as in `predictions_table`
    form: "text", "csv", or "json"
    """
    if form not in ("text", "csv", "json"):
        raise ValueError(f"format must be text, csv or json, got {form!r}")
    table = predictions_table(model, found, top)
    if form != "json":
        return table.text() if form == "text" else table.csv().removesuffix("\n")
    key = "labels" if model.multilabel else "classes"
    items: list[dict[str, Any]] = []
    for one in found:
        rest = {"error": one.error} if one.p is None else {key: [*map(_named, chosen(model, one.p, top))]}
        items.append({table.header[0]: one.name} | rest)
    return json.dumps(items, indent=2)


def _named(cell: tuple[str, float]) -> dict[str, Any]:
    return {"name": cell[0], "p": cell[1]}


# ----------------------------------------------------------------------------------------------------------- evaluating


def evaluate(
    model: Model,
    spec: str,
    root: str | os.PathLike[str] | None = None,
    split: str = "test",
    out: str | os.PathLike[str] | None = None,
    features: bool = False,
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics and outputs (x, p, y, and mu and sigma of a head that has them) of a model on any dataset.

    The dataset's classes must be the model's, by name: in any order, and all or some of them.  y of single-label data
    are indices of the model's classes; of several labels, only the columns of the dataset's labels are returned.

    model: from `load`
    spec, root: a dataset, and the folder of the published ones, as in `gsoftmax.data.load`
    split: "train", "val" or "test"
    out: a folder for outputs.safetensors, which `gsoftmax analyze` reads, and metrics.json
    features: whether the outputs include h, and W and b of a linear head; single-label data only
    """
    if features and model.multilabel:
        raise ValueError("features are measured of single-label data, and the model is multi-label")
    config, device = model.config, str(model.device)
    if spec == config.data:  # with its validation split
        dataset = build.load_data(config, root)
    else:
        dataset = build.load_cached(spec, None if root is None else os.fspath(root), device, config.image_size)
    places = torch.tensor(_places(model, dataset))
    evaluator, matched = evaluation.Evaluator(model.network, config), match_inputs(dataset, model.about)
    found = evaluator.outputs(matched, split)
    if features:
        found |= evaluator.features(matched, split)
    names = dataset.classes if model.multilabel else model.classes
    if model.multilabel:
        found |= {k: found[k][..., places] for k in ("x", "p", "mu", "sigma") if k in found}
    else:
        found["y"] = places[found["y"]]
    result = evaluation.score(found["x"], found["p"], found["y"])
    if out is not None:
        _write(Path(out), result, found, names)
    return result, found


def _places(model: Model, dataset: Dataset) -> list[int]:
    """For every class of the dataset the index of the model's class of that name."""
    if dataset.multilabel != model.multilabel:
        kinds = {True: "multi-label", False: "single-label"}
        raise ValueError(f"{dataset.name} is {kinds[dataset.multilabel]}, and the model {kinds[model.multilabel]}")
    if dataset.classes == model.classes:
        return list(range(len(model.classes)))
    place = {name: k for k, name in enumerate(model.classes)}
    what = "label" if model.multilabel else "class"
    for k, name in enumerate(dataset.classes):
        if name not in place:
            near = f"; {what} {k} of the model is {model.classes[k]!r}" if k < len(model.classes) else ""
            raise ValueError(f"{dataset.name} has the {what} {name!r}, which the model does not have{near}")
    if len(place) < len(model.classes) or len(set(dataset.classes)) < len(dataset.classes):
        raise ValueError(f"two names of a {what} are equal: they cannot be matched with those of {dataset.name}")
    return [place[name] for name in dataset.classes]


def _write(folder: Path, result: Mapping[str, float], found: Mapping[str, Tensor], names: Sequence[str]) -> None:
    if (folder / "config.json").exists():
        raise ValueError(f"{folder} contains a run, whose outputs would be overwritten; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / "outputs.safetensors", found, {"names": json.dumps(list(names))})
    atomic_write(folder / "metrics.json", json.dumps(dict(result), indent=2))


def saved_outputs(run: str | os.PathLike[str]) -> dict[str, Tensor]:
    """x, p and y of the test split that a finished run evaluated, and what else it saved.

    run: its folder
    """
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise ValueError(f"runs are read with safetensors, {_INSTALL}") from None
    path = Path(run)
    if read_result(path) is None:
        needed = ": config.json, metrics.jsonl and outputs.safetensors are needed"
        raise ValueError(f"{path} is not a finished run{_runs_below(path) or needed}")
    outputs.open_outputs(path)  # rejects a damaged file
    found = load_file(path / "outputs.safetensors")
    if "p" not in found:
        raise ValueError(f"{path / 'outputs.safetensors'} must contain x, p and y, got {', '.join(sorted(found))}")
    return found


def detect(
    model: Model, run: str | os.PathLike[str], specs: Sequence[str], root: str | os.PathLike[str] | None = None
) -> dict[str, float]:
    """Out-of-distribution detection of a finished run without training again: AUROC of every score and dataset.

    The examples that the run evaluated are told from the test splits of other datasets by their outputs, and by the
    class statistics of the training split where the run has them.

    model, run: from `load`, and the folder it was loaded from
    specs, root: the other datasets, and the folder of the published ones
    """
    found = saved_outputs(run)
    others = evaluation.load_others(model.config.override({"ood": " ".join(specs)}), model.about, root)
    state = {k.removeprefix("train_"): v for k, v in found.items() if k.startswith("train_")}
    stats = geometry.ClassStatistics(len(model.classes)).load_state_dict(state) if state else None
    return evaluation.Evaluator(model.network, model.config).detection(found, stats, others)


# ------------------------------------------------------------------------------------------------------------ exporting


class _Deployed(nn.Module):
    """From pixels in [0, 1], or rows as they are in the table, to p."""

    def __init__(self, network: build.Network, about: Dataset) -> None:
        super().__init__()
        shape = (-1, 1, 1) if about.kind != "table" else (-1,)
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", about.mean.view(shape).cpu())
        self.register_buffer("std", about.std.view(shape).cpu())
        self.backbone, self.head, self.scale = network.backbone, network.head, network.feature_scale
        self.form, self.labels = network.head.form, about.num_classes

    def forward(self, inputs: Tensor) -> Tensor:
        h = self.backbone((inputs - self.mean) / self.std)
        z = self.head(h if self.scale == 1 else h * self.scale)
        if self.form is None:
            return torch.softmax(z, -1)
        return functional.multilabel_probabilities(*split_outputs(z, self.labels, self.form), form=self.form)


def export(model: Model, path: str | os.PathLike[str]) -> None:
    """Write a model as one file that needs neither this package nor its code.

    It takes pixels in [0, 1], (N, C, H, W) of the model's size (or rows of a table, (N, D)), normalizes them, and
    returns p, for any N.  The names of the classes are in the file: a JSON list in the metadata `classes` of ONNX, and
    in the extra file classes.json of a program.

    model: from `load`
    path: ends in .onnx (needs the packages onnx and onnxscript), or in .pt2 for `torch.export.load`
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"path must end in {' or '.join(SUFFIXES)}, got {path.name!r}")
    head = model.network.head
    if type(head) not in heads.HEADS.values():
        name = type(head).__name__
        raise ValueError(f"head to export must be a built-in one, see `gsoftmax heads`, got {name}, a head of your own")
    if suffix == ".onnx":
        for package in ("onnx", "onnxscript"):
            if importlib.util.find_spec(package) is None:
                raise ValueError(f".onnx needs {package}, which is not installed: pip install onnx onnxscript")
    network = copy.deepcopy(model.network).cpu().to(memory_format=torch.contiguous_format)
    deployed = fold(_Deployed(network, model.about)).requires_grad_(False)
    example, names = torch.rand(2, *model.input_shape), json.dumps(list(model.classes))
    if suffix == ".pt2":
        program = to_program(deployed, example)
        with atomic_file(path) as partial, open(partial, "wb") as file:
            torch.export.save(program, file, extra_files={"classes.json": names})
        return
    import onnx

    given = ["rows" if model.kind == "table" else "images"]
    with atomic_file(path) as partial:
        to_onnx(deployed, example, partial, input_names=given, output_names=["p"], external_data=False)
        written = onnx.load(str(partial))
        onnx.helper.set_model_props(written, {"classes": names})
        onnx.save(written, str(partial))
