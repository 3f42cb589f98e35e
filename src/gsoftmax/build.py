"""From a configuration to data, network, optimizer and schedule.

Everything random follows from the seed: the backbone's weights, the head's weights, and for every batch its examples,
their augmentation, mixup and dropout, each from its own random stream.  So two heads with the same seed start from the
same backbone and see the same batches, and a resumed run continues bit for bit.
"""

from __future__ import annotations

import ast
import copy
import functools
import gc
import hashlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import backbones, catalog, distributed, heads, schedules, sharded
from . import data as data_room
from .config import Config
from .data import DataError, Dataset, Subset
from .data.seeded import mix, shuffled
from .distributed import ALONE, World
from .files import sha256
from .gaussians import param_groups
from .messages import first_line, unknown

P = ParamSpec("P")
R = TypeVar("R")
WHOLE = Subset()

# --------------------------------------------------------------------------------------------------- data and device


def pick_device(name: str) -> torch.device:
    """The device called `name`; "auto" is a GPU where there is one.  Each process of a machine gets its own GPU."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
        if device.type == "cuda" and device.index is None and "LOCAL_RANK" in os.environ:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        torch.empty(0, device=device)
        if device.type == "meta":
            raise RuntimeError("it stores no values")
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used: {first_line(error)}") from None
    return device


@contextmanager
def cudnn_algorithms(deterministic: bool) -> Iterator[None]:
    """How cuDNN chooses its algorithms: by timing them, or by rule, so that results repeat exactly.

    Every batch has the same shape, so one timing is enough; but its outcome depends on what else the GPU is doing, and
    algorithms round differently.
    """
    # not `torch.backends.cudnn.flags`, which also resets the precision, and fails where that was set by the newer API
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = not deterministic, deterministic
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before


def _cached(size: int) -> Callable[[Callable[Concatenate[str, P], R]], Callable[Concatenate[str, P], R]]:
    """A cache for functions of a dataset's spec, which forgets when the file that the spec names is written again."""

    def decorate(function: Callable[Concatenate[str, P], R]) -> Callable[Concatenate[str, P], R]:
        held: Any = functools.lru_cache(size)(lambda _, *args, **options: function(*args, **options))

        @functools.wraps(function)
        def call(spec: str, /, *args: P.args, **options: P.kwargs) -> R:
            return held(data_room.stamp(spec), spec, *args, **options)

        return call

    return decorate


@_cached(4)
def read_cached(spec: str, root: str | None, image_size: int | None = None, check: bool = True) -> data_room.Source:
    """A dataset before anything is drawn from it, cached across draws: files are read once."""
    return data_room.read(spec, root, image_size, check)


@_cached(4)
def load_cached(
    spec: str,
    root: str | None,
    device: str,
    image_size: int | None = None,
    check: bool = True,
    subset: Subset = WHOLE,
    split_seed: int = 0,
) -> Dataset:
    """A dataset on a device, cached across runs."""
    return read_cached(spec, root, image_size, check).draw(subset, split_seed).to(device)


def load_data(config: Config, root: str | os.PathLike[str] | None = None) -> Dataset:
    """The configured dataset on its device, drawn with the seed of the run; `root` as in `gsoftmax.data.load`.

    It is cached: for all heads of a seed, and for all seeds if nothing is drawn.
    """
    device, place = str(pick_device(config.device)), None if root is None else os.fspath(root)
    subset = Subset(config.train_fraction, config.imbalance, config.label_noise, config.val_fraction)
    what = (config.image_size, config.check)
    random = subset.is_random(read_cached(config.data, place, *what).data)
    return load_cached(config.data, place, device, *what, subset, config.draw_seed if random else 0)


@_cached(64)
def _fingerprint(spec: str, root: str | None, image_size: int | None, check: bool) -> str:
    return read_cached(spec, root, image_size, check).data.fingerprint()


def fingerprints(config: Config, root: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """SHA-256 of everything outside a configuration that decides a run's result, by the configuration's key.

    config, root: as in `load_data`
    The datasets, the file of initial weights, and the module of a head of your own; under `head_imports`, which older
    versions did not record, the modules that it imports.  A dataset that is not there is left out: nothing can have
    been computed from another one.
    """
    found, place = {}, None if root is None else os.fspath(root)
    with suppress(DataError):
        found["data"] = _fingerprint(config.data, place, config.image_size, config.check)
    with suppress(DataError):
        others = [_fingerprint(spec, place, None, True) for spec in (config.ood or "").split()]
        if others:
            found["ood"] = hashlib.sha256(" ".join(others).encode()).hexdigest()
    if config.weights is not None and os.path.isfile(config.weights):
        found["weights"] = sha256(Path(config.weights))
    if ":" in config.head:
        cls = heads.find(config.head)
        source = getattr(sys.modules[cls.__module__], "__file__", None)
        if source is not None:
            found["head"] = sha256(Path(source))
            modules = _with_imports(cls.__module__) | _with_imports(config.head.partition(":")[0])
            held = sorted(f"{name} {sha256(path)}" for name, path in modules.items() if name != cls.__module__)
            found["head_imports"] = hashlib.sha256("\n".join(held).encode()).hexdigest()
    return found


def _with_imports(module: str) -> dict[str, Path]:
    """The files of an imported module and of all that it imports from its folder or package, also through others.

    Read from the sources: what `sys.modules` holds depends on what else a process has done.  Of an installed module it
    is its package only, and this package is never among them.
    """
    source, ours = getattr(sys.modules[module], "__file__", None), __name__.partition(".")[0]
    top = module.partition(".")[0]
    if source is None or top == ours:
        return {}
    file = Path(source).absolute()
    root = file.parents[min(module.count(".") + (file.stem == "__init__"), len(file.parents) - 1)]
    installed = bool({"site-packages", "dist-packages"} & {*root.parts})
    found, todo = {module: file}, [module]
    while todo:
        name = todo.pop()
        path = found[name]
        if path.suffix != ".py":  # a compiled module
            continue
        package = name if path.stem == "__init__" else name.rpartition(".")[0]
        for imported in _imported(path.read_bytes(), package):
            start = imported.partition(".")[0]
            if imported in found or start == ours or (installed and start != top):
                continue
            place, suffixes = root.joinpath(*imported.split(".")), importlib.machinery.all_suffixes()
            files = [*(place / f"__init__{s}" for s in suffixes), *(Path(f"{place}{s}") for s in suffixes)]
            for file in [file for file in files if file.is_file()][:1]:
                found[imported] = file
                todo.append(imported)
    return found


@functools.lru_cache(maxsize=256)
def _imported(source: bytes, package: str) -> frozenset[str]:
    """The absolute names of all that may be a module in the imports of a source, with the packages around them.

    source, package: of a module, and the package that its relative imports start from
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # imported on first use, if ever
        return frozenset()
    names: set[str] = {package}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = [part for part in (*above, node.module) if part]
            names |= {".".join(base), *(".".join([*base, alias.name]) for alias in node.names)}
    parents = {".".join(name.split(".")[:k]) for name in names for k in range(1, name.count(".") + 2)}
    return frozenset(filter(None, parents))


def train_batches(
    dataset: Dataset, config: Config, epoch: int, world: World = ALONE, skip: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of this process's share of an epoch's batches, without the first `skip`."""
    options: Any = {"shard": world, "channels_last": config.channels_last, "workers": config.workers, "skip": skip}
    options["drop_last"] = config.drop_last
    options["augment"] = None if config.augment is None else data_room.Augment.parse(config.augment)
    return data_room.train_batches(dataset, config.batch_size, seed=config.seed, epoch=epoch, **options)


class Mixed(NamedTuple):
    """What a batch was mixed with."""

    target: Tensor  # of the other example of each pair
    weight: Tensor  # () of the own example; that of the other is 1 minus it


def mixup(
    config: Config, inputs: Tensor, target: Tensor, position: tuple[int, int], world: World = ALONE
) -> tuple[Tensor, Mixed]:
    """Pairs of examples, mixed (Zhang et al. 2018): w x_i + (1 - w) x_j with w from Beta(alpha, alpha).

    Their loss is w loss(y_i) + (1 - w) loss(y_j), which needs no mixed targets: it suits every head.

    position: epoch and number of the batch, which decide w, the same in all processes, and the pairs, which are made
        within the share of a process
    """
    weight = np.random.default_rng(mix(config.seed, 4, *position)).beta(config.mixup, config.mixup)
    other = torch.from_numpy(shuffled(len(target), mix(config.seed, 5, *position, world.rank))).to(target.device)
    mixed = weight * inputs + (1 - weight) * inputs[other]
    return mixed, Mixed(target[other], torch.tensor(weight, dtype=torch.float32, device=target.device))


def total_steps(config: Config, dataset: Dataset) -> tuple[int, int]:
    """Batches per epoch, and optimizer steps of the whole run."""
    rows, size = len(dataset.train), config.batch_size
    if size > rows:
        raise ValueError(f"batch_size must be at most the {rows:,} training rows of {dataset.name}, got {size:,}")
    batches = data_room.num_batches(rows, size, config.drop_last)
    return batches, -(-batches // config.accumulate) * config.epochs


def validate(config: Config, dataset: Dataset) -> None:
    """Raises for settings that do not fit the data, before anything is written."""
    total_steps(config, dataset)
    dataset.split(config.evaluate_on)
    if config.augment is not None:
        data_room.Augment.parse(config.augment)
    if config.weights is not None:
        backbones.read_state_dict(config.weights)
    if config.logger is not None and importlib.util.find_spec(config.logger) is None:
        raise ValueError(
            f"logger={config.logger} needs {config.logger}, which is not installed: pip install 'gsoftmax[wandb]'"
        )


# ----------------------------------------------------------------------------------------------------------- network


class Network(nn.Module):
    """Backbone and head: images or rows in, the loss out."""

    backbone: Any
    head: Any

    def __init__(self, backbone: nn.Module, head: nn.Module, feature_scale: float = 1.0) -> None:
        super().__init__()
        self.backbone, self.head, self.feature_scale = backbone, head, feature_scale

    def h(self, inputs: Tensor) -> Tensor:
        h = self.backbone(inputs)
        return h if self.feature_scale == 1 else h * self.feature_scale

    def forward(self, inputs: Tensor, target: Tensor, mixed: Mixed | None = None, **options: Any) -> Tensor:
        h = self.h(inputs)
        if mixed is None:
            return self.head.loss(h, target, **options)
        # Both losses start from the same state of the head, and the head makes one step per batch: the second loss
        # works on copies of the buffers, such as the counter of L-softmax and tracked Gaussians, which are dropped.
        copies = {name: buffer.clone() for name, buffer in self.head.named_buffers()}
        loss = self.head.loss(h, target, **options)
        with _buffers(self.head, copies):
            other = self.head.loss(h, mixed.target, **options)
        return mixed.weight * loss + (1 - mixed.weight) * other

    @property
    def in_shards(self) -> bool:
        """Whether the head's classes are spread over the processes."""
        return isinstance(self.head, sharded.ShardedSoftmaxHead)

    def whole_head(self) -> Any:
        """An unsharded copy of the head."""
        return self.head.unsharded().eval() if self.in_shards else copy.deepcopy(self.head)


@contextmanager
def _buffers(module: nn.Module, replaced: Mapping[str, Tensor]) -> Iterator[None]:
    """Replaces buffers; changing their values in place would spoil what an earlier loss keeps for its gradient."""
    owners = {name: module.get_submodule(name.rpartition(".")[0]) for name in replaced}
    before = dict(module.named_buffers())
    try:
        for name, buffer in replaced.items():
            setattr(owners[name], name.rpartition(".")[2], buffer)
        yield
    finally:
        for name, buffer in before.items():
            setattr(owners[name], name.rpartition(".")[2], buffer)


def backbone(config: Config, dataset: Dataset) -> Any:
    """The configured backbone with its initial weights, a module with `num_features`."""
    name = config.backbone or {"images": "cnn", "table": "mlp", "files": "resnet101"}[dataset.kind]
    options: Any = {"pool": config.pool, "pretrained": config.pretrained, "weights": config.weights}
    torch.manual_seed(mix(config.seed, 1))
    try:
        return backbones.create(name, input_shape=dataset.input_shape, **options, **config.backbone_options)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"backbone_options of {name}: {first_line(error)}") from None


def head(config: Config, dataset: Dataset, features: int, device: torch.device | None = None) -> nn.Module:
    """The configured head with its initial weights.

    features: numbers in each row of h
    """
    cls = heads.find(config.head)
    options = heads.options_for(cls, config.head_options, dataset.multilabel, dataset.name)
    shard = options.pop("shard", None)
    if shard is not None:
        cls = sharded.sharded_class(cls, shard)
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                f"head_options.shard={shard} needs processes: torchrun --nproc-per-node K -m gsoftmax train"
            )
        options |= {"device": device, "averaged": True}  # as DDP and FSDP average the backbone's gradients
    if issubclass(cls, heads.SoftmaxHead):
        options = cls.defaults(total_steps(config, dataset)[1] * config.accumulate) | options
    torch.manual_seed(mix(config.seed, 2))
    try:
        made = cls(features, dataset.num_classes, **options)
    except (TypeError, RuntimeError) as error:
        accepted = catalog.options(config.head) or [*inspect.signature(cls).parameters][2:]
        wrong = [key for key in options if key not in accepted and repr(key) in str(error)]
        told = unknown("option", wrong[0], accepted) if wrong else error
        raise ValueError(f"head {config.head!r}: {told}; options are {', '.join(accepted)}") from None
    if config.zero_bias and isinstance(bias := getattr(made, "bias", None), Tensor):
        nn.init.zeros_(bias)
    return made


def network(config: Config, dataset: Dataset, device: torch.device | None = None) -> Network:
    """Backbone and head with their initial weights, each from its own stream of the seed."""
    made = backbone(config, dataset)
    return Network(made, head(config, dataset, made.num_features, device), config.feature_scale)


def autocast(config: Config, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """The context of mixed precision, in training and evaluation."""
    if config.amp == "off":
        return nullcontext
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[config.amp]
    cached = not (config.cuda_graphs and device.type == "cuda")  # CUDA graphs would replay stale casts of the weights
    return functools.partial(torch.autocast, device.type, dtype, cache_enabled=cached)


def loss_options(config: Config) -> dict[str, Any]:
    """The options of the head's `loss`."""
    options: dict[str, Any] = {"label_smoothing": config.label_smoothing} if config.label_smoothing else {}
    return options if config.reduction is None else options | {"reduction": config.reduction}


# --------------------------------------------------------------------------------------------- optimizer and schedule


def schedule(config: Config, length: int) -> schedules.Schedule:
    """The configured schedule over `length` epochs or steps, with its warm-up in front."""
    options = dict(config.schedule)
    name = options.pop("name")
    try:
        if name in ("linspace", "logspace"):
            made = getattr(schedules, name)(epochs=max(length, 1), **{k: float(v) for k, v in options.items()})
        elif name == "malleable":
            made = schedules.malleable(**options)
        else:
            steps = {} if name == "constant" else options.pop("steps")
            made = schedules.staircase({int(k): float(v) for k, v in steps.items()}, **options)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"needs {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"schedule {name!r}: {reason}") from None
    return schedules.warm_up(made, config.warmup * length)


def optimizer(config: Config, network: Network) -> torch.optim.Optimizer:
    """Any optimizer of torch by name; the head's Gaussians without decay, at their own rate."""
    small = {id(p) for p in network.backbone.parameters() if p.ndim <= 1} if config.bias_lr != 1 else set()
    groups = []
    own: Any = {"weight_decay": config.weight_decay, "gaussian_momentum": config.gaussian_momentum}
    for group in param_groups(network, lr=config.lr, **own):
        kinds: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for p in group["params"]:  # sharded parameters in their own groups: foreach kernels cannot mix them with others
            kinds.setdefault((id(p) in small, distributed.is_sharded(p)), []).append(p)
        for (biases, _), params in sorted(kinds.items()):
            mult = config.bias_lr if biases else 1.0
            decay = group["weight_decay"] / max(mult, 1e-12)
            groups.append({**group, "params": params, "lr": group["lr"] * mult, "weight_decay": decay})
    found = {n.lower(): c for n, c in vars(torch.optim).items() if isinstance(c, type) and n != "Optimizer"}
    cls = found.get(config.optimizer.lower())
    if cls is None:
        raise ValueError(unknown("optimizer", config.optimizer.lower(), found))
    options = dict(config.optimizer_options)
    accepted = inspect.signature(cls).parameters
    for key in ("momentum", "nesterov"):
        if key in accepted:
            options.setdefault(key, getattr(config, key))
    if options.get("nesterov") and not options.get("momentum"):
        options["nesterov"] = False
    try:
        return cls(groups, lr=config.lr, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"optimizer {config.optimizer!r}: {error}") from None


# -------------------------------------------------------------------------------------------------- the parts of a run


@dataclass
class Parts:
    """The parts of a run, and the state of its checkpoints."""

    network: Network
    loss: Callable[..., Tensor]  # the network, wrapped by DDP and torch.compile
    optimizer: torch.optim.Optimizer
    scheduler: Any
    average: torch.optim.swa_utils.AveragedModel | None
    scaler: torch.amp.GradScaler
    alone: list[nn.Parameter]  # parameters whose gradients neither DDP nor FSDP averages
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext

    def state(self) -> dict[str, Any]:
        """Whole tensors on the CPU, gathered: independent of the number of processes."""
        from torch.distributed.checkpoint import state_dict as states

        options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = {
            "network": _contiguous(states.get_model_state_dict(self.network, options=options)),
            "optimizer": _contiguous(states.get_optimizer_state_dict(self.network, self.optimizer, options=options)),
            "steps": self.scheduler.last_epoch,  # of the schedule, which is a function of them
            "scaler": self.scaler.state_dict(),
        }
        return state if self.average is None else state | {"average": self.average.state_dict()}

    def load(self, state: dict[str, Any], world: World) -> None:
        """Restores rank 0's `state`; other ranks pass an empty one."""
        from torch.distributed.checkpoint import state_dict as states

        options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=world.size > 1)
        states.set_model_state_dict(self.network, state.get("network", {}), options=options)
        states.set_optimizer_state_dict(self.network, self.optimizer, state.get("optimizer", {}), options=options)
        _match_memory_order(self.optimizer)
        small = ("steps", "scaler", "average")
        rest = distributed.from_rank0(world, {k: state[k] for k in small if k in state})
        # set here, because sharded parameters have groups of their own: the saved groups may be others
        at = self.scheduler
        at.last_epoch = rest["steps"]
        for group, rate, factor in zip(self.optimizer.param_groups, at.base_lrs, at.lr_lambdas, strict=True):
            group["lr"] = rate * factor(rest["steps"])
        if rest["scaler"]:  # empty if the run began without one
            self.scaler.load_state_dict(rest["scaler"])
        if self.average is not None:
            self.average.load_state_dict(rest["average"])


def _match_memory_order(optimizer: torch.optim.Optimizer) -> None:
    """Brings loaded state into the memory order of its parameter (channels_last): fused optimizers require it."""
    for parameter, held in optimizer.state.items():
        for name, value in held.items():
            same = isinstance(value, Tensor) and value.shape == parameter.shape
            if same and not distributed.is_sharded(parameter) and value.stride() != parameter.stride():
                held[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _contiguous(state: Any) -> Any:
    """The same with contiguous tensors: others would be scrambled when they are sent to another process."""
    if isinstance(state, dict):
        return {k: _contiguous(v) for k, v in state.items()}
    return state.contiguous() if isinstance(state, Tensor) else state


def prepare(config: Config, dataset: Dataset, device: torch.device, world: World = ALONE) -> Parts:
    """Network, optimizer and schedule at the start of a run, spread over the processes."""
    validate(config, dataset)
    _, steps = total_steps(config, dataset)
    several, fsdp = world.size > 1, world.size > 1 and config.parallel == "fsdp"
    if world.size > config.batch_size:
        raise ValueError(
            f"batch_size must be at least the {world.size} processes that share it, got {config.batch_size}"
        )
    incomplete = 0 if config.drop_last else len(dataset.train) % config.batch_size
    if 0 < incomplete < world.size:
        raise ValueError(
            f"the last batch of an epoch has {incomplete} rows for {world.size} processes: drop_last=true drops it"
        )
    if config.cuda_graphs and incomplete:
        raise ValueError(f"cuda_graphs needs batches of one size, and the last has {incomplete} rows: drop_last=true")
    if config.cuda_graphs and (several or config.accumulate > 1 or config.compile):
        raise ValueError("cuda_graphs is for one process, with accumulate=1 and without compile")
    made = network(config, dataset, device).to(device)
    if config.channels_last and not fsdp:  # which takes plain strides only
        made = made.to(memory_format=torch.channels_last)
    if hasattr(made.backbone, "init_whiten"):
        sample = next(data_room.eval_batches(dataset, "train", min(5000, len(dataset.train))))[0]
        made.backbone.init_whiten(sample)
    if config.init == "data" and hasattr(made.head, "fit_gaussians"):  # the recipe serves heads without Gaussians too
        # the paper's data-driven start: Gaussians of x over the training set with the initial weights, in eval mode
        made.eval()
        size = max(config.batch_size, 256)
        batches = data_room.eval_batches(dataset, "train", size, shard=world, workers=config.workers)
        with torch.no_grad(), autocast(config, device)():
            made.head.fit_gaussians(made.h(inputs).float() for inputs, _ in batches)
    if hasattr(made.head, "fit_prior"):
        made.head.fit_prior(torch.bincount(dataset.train.y, minlength=dataset.num_classes))
    if config.sync_batchnorm and several:
        made = nn.SyncBatchNorm.convert_sync_batchnorm(made)
    if fsdp or (several and made.in_shards):
        if config.ema:
            raise ValueError(f"ema must be 0 with parallel=fsdp and with classes in shards, got {config.ema}")
        if config.amp == "fp16":
            raise ValueError("amp must be off or bf16 with parallel=fsdp and with classes in shards, got 'fp16'")
    if fsdp:
        _shard_backbone(made, device)
    average = None
    if config.ema:
        mean = torch.optim.swa_utils.get_ema_multi_avg_fn(config.ema)
        average = torch.optim.swa_utils.AveragedModel(made, multi_avg_fn=mean, use_buffers=True)
    wrapped: Any = _data_parallel(made, device, world) if several and not fsdp else made
    stepped = optimizer(config, made)
    length = steps if config.schedule_every == "step" else config.epochs
    return Parts(
        made,
        torch.compile(wrapped) if config.compile else wrapped,
        stepped,
        schedules.scheduler(stepped, schedule(config, length)),
        average,
        torch.amp.GradScaler(device.type, enabled=config.amp == "fp16" and device.type == "cuda"),
        list(made.head.parameters()) if fsdp and not made.in_shards else [],
        getattr(wrapped, "no_sync", nullcontext),
    )


def _shard_backbone(network: Network, device: torch.device) -> None:
    """FSDP2: every part of the backbone is whole only while it is used, and its gradients are averaged."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for child in network.backbone.children():
        for part in child if isinstance(child, (nn.Sequential, nn.ModuleList)) else [child]:
            if any(True for _ in part.parameters()):
                fully_shard(part, mesh=mesh)
    fully_shard(network.backbone, mesh=mesh)


def _data_parallel(network: Network, device: torch.device, world: World) -> nn.Module:
    ddp = nn.parallel.DistributedDataParallel
    if network.in_shards:  # whose gradients are those of all processes already
        names = [name for name, _ in (*network.named_parameters(), *network.named_buffers())]
        ddp._set_params_and_buffers_to_ignore_for_model(network, [n for n in names if n.startswith("head.")])
    return ddp(
        network,
        device_ids=[device] if device.type == "cuda" else None,
        # DDP would regroup its sums after the first step, and a resumed run would round differently from an
        # uninterrupted one.  Between two processes the order of a sum does not matter.
        find_unused_parameters=device.type == "cpu" and world.size > 2,
    )


# ------------------------------------------------------------------------------------------------------- CUDA graphs


@contextmanager
def cuda_graphs(backbone: nn.Module, inputs: Tensor, amp: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Captures the backbone's forward and backward pass as CUDA graphs: two launches per step instead of hundreds.

    They replace training mode only, for batches of the shape of `inputs`.  What Python decides during the capture (a
    layer dropped at random, the value of an attribute) is frozen.
    """
    own = vars(backbone).get("forward")
    backbone.train()
    buffers = [(buffer, buffer.clone()) for buffer in backbone.buffers()]  # the capture runs the network a few times
    with warnings.catch_warnings():
        # gradients accumulate on the stream of the capture, and other streams wait for it: the warning is harmless
        warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream does not match")
        try:
            with amp():
                torch.cuda.make_graphed_callables(backbone, (inputs.clone(),))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"cuda_graphs: this backbone cannot be captured: {first_line(error)}") from None
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        captured = backbone.forward

        def forward(given: Tensor) -> Any:
            if backbone.training and given.shape != inputs.shape:  # it would be copied into the captured batch
                shapes = f"{tuple(inputs.shape)}, got {tuple(given.shape)}"
                raise ValueError(f"cuda_graphs: batches must have the shape {shapes}")
            return captured(given)

        try:
            backbone.forward = forward
            yield
        finally:
            del backbone.forward  # which hides that of the class
            if own is not None:
                backbone.forward = own
            gc.collect()  # reference cycles would keep the graphs' memory alive
