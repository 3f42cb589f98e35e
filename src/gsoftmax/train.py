"""One run: what it is made of, and a visible training loop.

Everything random follows from the seed: the backbone's weights, the head's weights, and for every batch which examples
it has, their augmentation and dropout, each from a stream of its own.  So two heads with the same seed start from
the same backbone and see the same batches, and a run that was stopped goes on as if nothing had happened.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import importlib.util
import inspect
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import backbones, distributed, evaluation, heads, schedules
from . import data as data_room
from .config import Config
from .data.seeded import mix
from .distributed import ALONE, Stopped, Watch, World
from .gaussians import param_groups
from .messages import first_line, unknown
from .runs import RunFolder, described_before


class Diverged(RuntimeError):
    """The loss stopped being a finite number."""


# ---------------------------------------------------------------------------------------------- what a run is made of


class Network(nn.Module):
    """Backbone and head: images or rows in, the loss out.

    build_whole: makes a head like this one, without shards
    """

    backbone: Any
    head: Any

    def __init__(
        self, backbone: nn.Module, head: nn.Module, feature_scale: float, build_whole: Callable[[], nn.Module]
    ) -> None:
        super().__init__()
        self.backbone, self.head, self.feature_scale, self.build_whole = backbone, head, feature_scale, build_whole

    def h(self, inputs: Tensor) -> Tensor:
        h = self.backbone(inputs)
        return h if self.feature_scale == 1 else h * self.feature_scale

    def forward(self, inputs: Tensor, target: Tensor, **options: Any) -> Tensor:
        return self.head.loss(self.h(inputs), target, **options)

    @property
    def in_shards(self) -> bool:
        """Whether every process has some of the head's classes."""
        return getattr(self.head, "shard", None) is not None

    def whole_head(self) -> Any:
        """A copy of the head, with all classes in it."""
        if not self.in_shards:
            return copy.deepcopy(self.head)
        head = self.build_whole().to(self.head.weight.device)
        found = self.head.state_dict()
        head.load_state_dict(
            {k: v.full_tensor() if distributed.is_sharded(v) else v for k, v in found.items() if k != "draws"}
        )
        return head.eval()


@functools.lru_cache(maxsize=4)
def _load(spec: str, root: str | None, device: str, options: tuple[tuple[str, Any], ...]) -> data_room.Dataset:
    return data_room.load(spec, root, **dict(options)).to(device)


def load_data(config: Config, root: str | os.PathLike[str] | None = None) -> data_room.Dataset:
    """The configured dataset on its device; kept, so that many seeds read it once."""
    options = {
        k: getattr(config, k) for k in ("val_fraction", "train_fraction", "imbalance", "label_noise", "image_size")
    }
    where = str(distributed.local_device(pick_device(config.device)))
    return _load(config.data, None if root is None else os.fspath(root), where, tuple(options.items()))


def _load_others(
    config: Config, dataset: data_room.Dataset, root: str | os.PathLike[str] | None
) -> dict[str, data_room.Dataset]:
    """The data that `config.ood` names, as the network of `dataset` is given them."""
    specs = str(config.ood).split()
    if dataset.multilabel:
        raise ValueError(f"ood is for single-label data, and {dataset.name} is multi-label")
    if config.head_options.get("shard") and dataset.num_classes > evaluation.EVALUATED_WHOLE:
        raise ValueError(
            f"ood needs all outputs in one place, and {dataset.num_classes:,} classes are too many for that"
        )
    if config.data in specs:
        raise ValueError(f"ood must be other data than the {config.data} that is trained on")
    where = str(dataset.train.y.device)
    place = None if root is None else os.fspath(root)
    try:
        return {spec: data_room.match_inputs(_load(spec, place, where, ()), dataset) for spec in specs}
    except ValueError as error:
        several = f" (of {len(specs)}, since spaces stand between several)" if len(specs) > 1 else ""
        raise ValueError(f"ood{several}: {error}") from None


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
        if device.type == "meta":
            raise RuntimeError("it holds no numbers")
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return device


def validate(config: Config, dataset: data_room.Dataset) -> None:
    """Validate what can be validated before anything is written."""
    total_steps(config, dataset)
    dataset.split(config.evaluate_on)
    if config.augment is not None:
        data_room.Augment.parse(config.augment)
    if config.weights is not None:
        backbones.read_state_dict(config.weights)


def total_steps(config: Config, dataset: data_room.Dataset) -> tuple[int, int]:
    """Batches of an epoch, and optimiser steps of the whole run."""
    if config.batch_size > len(dataset.train):
        raise ValueError(
            f"batch_size must be at most the {len(dataset.train):,} training rows of {dataset.name}, "
            f"got {config.batch_size:,}"
        )
    batches = len(dataset.train) // config.batch_size
    return batches, -(-batches // config.accumulate) * config.epochs


def build(config: Config, dataset: data_room.Dataset, device: torch.device | None = None) -> Network:
    """Backbone and head with their initial weights, each from its own stream of the seed."""
    name = config.backbone or {"images": "cnn", "table": "mlp", "files": "resnet101"}[dataset.kind]
    torch.manual_seed(mix(config.seed, 1))
    try:
        backbone = backbones.create(
            name,
            input_shape=dataset.input_shape,
            pool=config.pool,
            pretrained=config.pretrained,
            weights=config.weights,
            **config.backbone_options,
        )
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"backbone_options of {name}: {str(error).splitlines()[0]}") from None
    torch.manual_seed(mix(config.seed, 2))
    features: Any = backbone.num_features
    head = build_head(config, dataset, features, device)
    # a function, because copies of the network share it: a dataset that the network held would be copied too
    return Network(backbone, head, config.feature_scale, lambda: build_head(config, dataset, features, whole=True))


def build_head(
    config: Config, dataset: data_room.Dataset, features: int, device: torch.device | None = None, whole: bool = False
) -> nn.Module:
    """The configured head; `whole` makes one without shards of a head whose classes are sharded."""
    cls, options = heads.find(config.head), dict(config.head_options)
    if dataset.multilabel:
        options.setdefault("form", "paired")
    elif options.get("form") is not None:
        raise ValueError(
            f"form={options['form']!r} is for multi-label data, and {dataset.name} has one label an example"
        )
    if whole:
        options = {k: v for k, v in options.items() if k not in ("shard", "mesh", "negatives", "seed", "averaged")}
    elif options.get("shard") is not None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                f"head_options.shard={options['shard']} needs processes: torchrun --nproc-per-node K -m gsoftmax train"
            )
        options |= {"device": device, "averaged": True}  # as DDP and FSDP average the backbone's gradients
    if issubclass(cls, heads.SoftmaxHead):
        options = cls.defaults(total_steps(config, dataset)[1] * config.accumulate) | options
    try:
        return cls(features, dataset.num_classes, **options)
    except (TypeError, RuntimeError) as error:
        accepted = [p for p in inspect.signature(cls).parameters][2:]
        raise ValueError(f"head {config.head!r}: {error}; options are {', '.join(accepted)}") from None


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
    except (KeyError, TypeError, ValueError, AttributeError) as error:
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
        kinds: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for p in group["params"]:  # sharded parameters apart: no operation takes both kinds at once
            kinds.setdefault((id(p) in small, distributed.is_sharded(p)), []).append(p)
        for (biases, _), params in sorted(kinds.items()):
            mult = config.bias_lr if biases else 1.0
            decay = group["weight_decay"] / max(mult, 1e-12)
            groups.append({"params": params, "lr": group["lr"] * mult, "weight_decay": decay})
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


# ----------------------------------------------------------------------------------------------------------- the loop


def train(
    config: Config,
    out: str | os.PathLike[str] | None = None,
    *,
    data_root: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Trains, evaluates, writes the run folder `out` (none: nothing is written) and returns the final metrics.

    Under torchrun the processes share every batch.  SIGINT and SIGTERM save the state and raise `Stopped`.
    """
    if out is not None and importlib.util.find_spec("safetensors") is None:  # needed at the end, said at the start
        raise ValueError("a run folder needs safetensors, which is not installed: pip install 'gsoftmax[train]'")
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.backends.cudnn.benchmark = True  # every batch has the same shape
    device = distributed.local_device(pick_device(config.device))
    with ExitStack() as stack:
        world = stack.enter_context(distributed.joined(device))
        dataset = distributed.rank0_first(world, lambda: load_data(config, data_root))
        parts = prepare(config, dataset, device, world)
        others = {}
        if config.ood:
            others = distributed.rank0_first(world, lambda: _load_others(config, dataset, data_root))
        folder, watch = None, None
        if out is not None:
            described: dict[str, Any] = {
                "data": {"name": dataset.name, "classes": list(dataset.classes)},
                "processes": world.size,
            }
            if distributed.launch() is not None:
                described["torchrun"] = distributed.launch()
            opened: list[RunFolder] = []
            distributed.on_rank0(
                world,
                lambda: opened.append(
                    RunFolder(out, config, described, resume or distributed.restarted(described_before(out)))
                ),
            )
            folder = stack.enter_context(opened[0]) if opened else None
            watch = stack.enter_context(Watch(world, config.checkpoint_minutes))
        shown = progress if world.first else None
        return _train(parts, config, dataset, others, world, folder, watch, shown, stack)


def _train(
    parts: Parts,
    config: Config,
    dataset: data_room.Dataset,
    others: dict[str, data_room.Dataset],
    world: World,
    folder: RunFolder | None,
    watch: Watch | None,
    progress: Callable[[str], None] | None,
    stack: ExitStack,
) -> dict[str, Any]:
    device = next(parts.network.parameters()).device
    batches, _ = total_steps(config, dataset)
    per_step = config.schedule_every == "step"
    options, amp = loss_options(config), evaluation.autocast(config, device)
    at = Position() if watch is None else _go_on(parts, folder, world)
    clock_start = time.perf_counter() - at.seconds

    def save() -> None:
        """All processes bring their state together, and the first one writes it."""
        at.seconds = time.perf_counter() - clock_start
        losses = distributed.total(_doubles(at.losses), world).tolist()
        state = dataclasses.asdict(dataclasses.replace(at, losses=losses)) | parts.state()
        if folder is not None:
            folder.save(state)
        if watch is not None:
            watch.saved()

    if config.cuda_graphs and device.type == "cuda":
        stack.enter_context(_recorded(parts.network.backbone, next(_train_batches(dataset, config, 1))[0], amp))
    for epoch in range(at.epoch + 1, config.epochs + 1):
        parts.network.train()
        for i, (inputs, target) in enumerate(_train_batches(dataset, config, epoch, world, at.batch), at.batch + 1):
            torch.manual_seed(mix(config.seed, 3, epoch, i, *([world.rank] if world.rank else [])))  # dropout
            step = i % config.accumulate == 0 or i == batches
            # a head with its classes in shards gives the loss of the whole batch on every process
            weight = 1.0 if parts.network.in_shards else world.size * _share_of_loss(config, len(target), world)
            with nullcontext() if step else parts.no_sync():
                with amp():
                    loss = parts.loss(inputs, target, **options)
                scaled = loss * (weight / config.accumulate) if weight != 1 or config.accumulate > 1 else loss
                parts.scaler.scale(scaled).backward()
            at.losses.append(loss.detach() * (weight / world.size) if world.size > 1 else loss.detach())
            at.seen += config.batch_size
            if progress is not None and device.type == "cpu":
                progress(_progress(config, epoch, i, batches, loss.item(), at.seen, clock_start))
            if not step:
                continue
            if world.size > 1:
                distributed.mean_gradients(parts.alone, world)
            if config.clip is not None:
                parts.scaler.unscale_(parts.optimizer)
                _clip(parts.network, config.clip)
            parts.scaler.step(parts.optimizer)
            parts.scaler.update()
            parts.optimizer.zero_grad(set_to_none=True)
            if parts.average is not None:
                parts.average.update_parameters(parts.network)
            if per_step:
                parts.scheduler.step()
            at.batch = i
            if watch is not None and i < batches and (wish := watch.poll()) != Watch.GO_ON:
                _refuse_nonfinite(at, batches, parts.network, folder, world)
                save()
                if wish == Watch.STOP:
                    where = f"in epoch {epoch}, after batch {i} of {batches}"
                    raise Stopped(where, watch.signal_number or signal.SIGTERM)
        mean_loss = _refuse_nonfinite(at, batches, parts.network, folder, world)
        if progress is not None:
            progress(_progress(config, epoch, batches, batches, mean_loss, at.seen, clock_start))
        row = {"epoch": epoch, "loss": mean_loss, "lr": parts.optimizer.param_groups[0]["lr"]}
        at.epoch, at.batch, at.losses = epoch, 0, []
        if not per_step:
            parts.scheduler.step()
        if config.evaluate_every and epoch % config.evaluate_every == 0 and epoch < config.epochs:
            row |= evaluation.evaluate(parts.evaluated(world), dataset, config, config.evaluate_on, world)[0]
        if folder is not None:
            folder.log(row | {"seconds": time.perf_counter() - clock_start})
        wish = Watch.GO_ON if watch is None else watch.poll()
        if watch is not None and (wish or (config.checkpoint_every and epoch % config.checkpoint_every == 0)):
            save()
        if watch is not None and wish == Watch.STOP:
            raise Stopped(f"after epoch {epoch}", watch.signal_number or signal.SIGTERM)

    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - clock_start
    best = parts.evaluated(world)
    result, outputs = evaluation.evaluate(best, dataset, config, config.evaluate_on, world)
    stats = None
    if (config.train_geometry or config.ood) and "x" in outputs:
        stats = evaluation.class_statistics(best, dataset, config, "train", world)
    if config.train_geometry and stats is not None:
        result |= {f"train_{k}": v for k, v in stats.geometry().average().items()}
        if dataset.num_classes <= 1000:  # what the report draws the training set's Gaussians from; 16 MB at most
            outputs |= {f"train_{k}": v.cpu() for k, v in stats.state_dict().items()}
    if others and stats is not None:
        result |= evaluation.detection(best, config, outputs, stats, others, world)
    result |= {"seconds": seconds, "epochs": config.epochs, "examples_per_second": at.seen / max(seconds, 1e-9)}
    distributed.on_rank0(world, lambda: folder.finish(result, outputs) if folder is not None else None)
    return result


@dataclass
class Position:
    """How far a run is: whole epochs, batches of the epoch after them and their losses, seconds and examples so far."""

    epoch: int = 0
    batch: int = 0
    losses: list[Tensor] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    seen: int = 0


@dataclass
class Parts:
    """What a run is made of and what its checkpoints hold."""

    network: Network
    loss: Callable[..., Tensor]  # the network, in the wrappings of DDP and torch.compile
    optimizer: torch.optim.Optimizer
    scheduler: Any
    average: torch.optim.swa_utils.AveragedModel | None
    scaler: torch.amp.GradScaler
    alone: list[nn.Parameter]  # parameters whose gradients nobody else averages over the processes
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext

    def evaluated(self, world: World) -> Network:
        """The network whose numbers count, the same on every process."""
        network: Any = self.network if self.average is None else self.average.module
        distributed.share_buffers(network, world)
        return network

    def state(self) -> dict[str, Any]:
        """Whole tensors on the CPU, whoever holds their pieces: written by any number of processes, read by any."""
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_model_state_dict,
            get_optimizer_state_dict,
        )

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = {
            "network": _plain(get_model_state_dict(self.network, options=options)),
            "optimizer": _plain(get_optimizer_state_dict(self.network, self.optimizer, options=options)),
            "steps": self.scheduler.last_epoch,  # of the schedule, which is a function of them
            "scaler": self.scaler.state_dict(),
        }
        return state if self.average is None else state | {"average": self.average.state_dict()}

    def load(self, own: dict[str, Any], world: World) -> None:
        """The same from rank 0's state; the others have none."""
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=world.size > 1)
        set_model_state_dict(self.network, own.get("network", {}), options=options)
        set_optimizer_state_dict(self.network, self.optimizer, own.get("optimizer", {}), options=options)
        small = ("steps", "scaler", "average")
        rest = distributed.on_rank0(world, lambda: {k: own[k] for k in small if k in own})
        # the groups may be others than those that were saved, since sharded parameters have groups of their own
        at = self.scheduler
        at.last_epoch = rest["steps"]
        for group, rate, factor in zip(self.optimizer.param_groups, at.base_lrs, at.lr_lambdas, strict=True):
            group["lr"] = rate * factor(rest["steps"])
        if rest["scaler"]:  # nothing where the run began without one
            self.scaler.load_state_dict(rest["scaler"])
        if self.average is not None:
            self.average.load_state_dict(rest["average"])


def _plain(state: Any) -> Any:
    """The same with every tensor in the usual order of memory: as such it is sent from process to process."""
    if isinstance(state, dict):
        return {k: _plain(v) for k, v in state.items()}
    return state.contiguous() if isinstance(state, Tensor) else state


def prepare(config: Config, dataset: data_room.Dataset, device: torch.device, world: World = ALONE) -> Parts:
    """Network, optimiser and schedule at the start of a run, spread over the processes."""
    validate(config, dataset)
    _, steps = total_steps(config, dataset)
    if world.size > config.batch_size:
        raise ValueError(
            f"batch_size must be at least the number of processes, {world.size}, because they share it, "
            f"got {config.batch_size}"
        )
    if config.cuda_graphs and (world.size > 1 or config.accumulate > 1 or config.compile):
        raise ValueError("cuda_graphs is for one process, with accumulate=1 and without compile")
    network = build(config, dataset, device).to(device)
    if config.channels_last and not (world.size > 1 and config.parallel == "fsdp"):  # which takes plain strides only
        network = network.to(memory_format=torch.channels_last)
    if hasattr(network.backbone, "init_whiten"):
        sample = next(data_room.eval_batches(dataset, "train", min(5000, len(dataset.train))))[0]
        network.backbone.init_whiten(sample)
    if config.init == "data":
        evaluation.fit_gaussians(network, dataset, config, world)
    if config.sync_batchnorm and world.size > 1:
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    alone: list[nn.Parameter] = []
    wrapped: Any = network
    if config.ema and world.size > 1 and (network.in_shards or config.parallel == "fsdp"):
        raise ValueError(f"ema must be 0 with parallel=fsdp and with classes in shards, got {config.ema}")
    if config.amp == "fp16" and world.size > 1 and (network.in_shards or config.parallel == "fsdp"):
        raise ValueError("amp must be off or bf16 with parallel=fsdp and with classes in shards, got 'fp16'")
    if world.size > 1 and config.parallel == "fsdp":
        _shard_backbone(network, device)
        alone = [] if network.in_shards else list(network.head.parameters())
    average = _average(network, config.ema)
    if world.size > 1 and config.parallel == "ddp":
        if network.in_shards:  # whose gradients are those of all processes already
            held = [name for name, _ in (*network.named_parameters(), *network.named_buffers())]
            nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
                network, [name for name in held if name.startswith("head.")]
            )
        wrapped = nn.parallel.DistributedDataParallel(
            network,
            device_ids=[device] if device.type == "cuda" else None,
            # DDP would regroup its sums after the first step, and a resumed run would round otherwise than one that was
            # left alone.  Between two processes the order of a sum does not matter.
            find_unused_parameters=device.type == "cpu" and world.size > 2,
        )
    optimizer = build_optimizer(config, network)
    length = steps if config.schedule_every == "step" else config.epochs
    return Parts(
        network,
        torch.compile(wrapped) if config.compile else wrapped,
        optimizer,
        schedules.scheduler(optimizer, build_schedule(config, length)),
        average,
        torch.amp.GradScaler(device.type, enabled=config.amp == "fp16" and device.type == "cuda"),
        alone,
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


def _clip(network: nn.Module, limit: float) -> None:
    if any(distributed.is_sharded(p) for p in network.parameters()):
        from .sharded import clip_grad_norm_

        clip_grad_norm_(network.parameters(), limit)
    else:
        nn.utils.clip_grad_norm_(network.parameters(), limit)


def _share_of_loss(config: Config, rows: int, world: World) -> float:
    """What this process's loss is multiplied by so that the sum over all is the loss of the whole batch."""
    return 1.0 if world.size == 1 or config.reduction == "sum" else rows / config.batch_size


def _go_on(parts: Parts, folder: RunFolder | None, world: World) -> Position:
    """Loads the newest checkpoint of the folder, which rank 0 has; the beginning where there is none."""
    state: dict[str, Any] = {}

    def read() -> dict[str, Any] | None:
        state.update((folder.checkpoint() if folder is not None else None) or {})
        return {f.name: state[f.name] for f in dataclasses.fields(Position)} if state else None

    found = distributed.on_rank0(world, read)
    if found is None:
        return Position()
    try:
        parts.load(state, world)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if world.size > 1:  # another process may be the reason, or may hear of it in this way
            raise
        where = "" if folder is None else f" {folder.newest()}"
        raise ValueError(f"checkpoint{where} is not one of this run: {first_line(error)}") from None
    device = next(parts.network.parameters()).device  # where the losses of the batches to come will be
    losses = torch.tensor(found.pop("losses"), dtype=torch.float64, device=device)
    return Position(losses=list(losses if world.first else torch.zeros_like(losses)), **found)


def _train_batches(
    dataset: data_room.Dataset, config: Config, epoch: int, world: World = ALONE, skip: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    augment = None if config.augment is None else data_room.Augment.parse(config.augment)
    return data_room.train_batches(
        dataset,
        config.batch_size,
        seed=config.seed,
        epoch=epoch,
        augment=augment,
        skip=skip,
        shard=world.share,
        channels_last=config.channels_last,
        workers=config.workers,
    )


def loss_options(config: Config) -> dict[str, Any]:
    options: dict[str, Any] = {"label_smoothing": config.label_smoothing} if config.label_smoothing else {}
    if config.reduction is not None:
        options["reduction"] = config.reduction
    return options


@contextmanager
def _recorded(backbone: nn.Module, inputs: Tensor, amp: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """The backbone's forward and backward pass as CUDA graphs: two launches a step where there are hundreds.

    They serve training mode, with batches of the shape of `inputs`; in evaluation mode nothing is different.  What
    Python decides while recording (a layer left out at random, a number that an attribute holds) stays as it was then.
    """
    own = vars(backbone).get("forward")
    backbone.train()
    buffers = [(buffer, buffer.clone()) for buffer in backbone.buffers()]  # recording runs the network a few times
    try:
        with amp(), _quiet_streams():
            torch.cuda.make_graphed_callables(backbone, (inputs.clone(),))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"cuda_graphs: this backbone cannot be recorded: {first_line(error)}") from None
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    recorded = backbone.forward

    def forward(given: Tensor) -> Any:
        if backbone.training and given.shape != inputs.shape:  # it would be copied into the batch that was recorded
            raise ValueError(
                f"cuda_graphs: batches must have the shape {tuple(inputs.shape)}, got {tuple(given.shape)}"
            )
        return recorded(given)

    try:
        backbone.forward = forward
        with _quiet_streams():
            yield
    finally:
        del backbone.forward  # which hides that of the class
        if own is not None:
            backbone.forward = own
        gc.collect()  # graphs hold memory, and cycles hold graphs


@contextmanager
def _quiet_streams() -> Iterator[None]:
    """Gradients are added up on the stream of the recording, which the others wait for: right, no reason to warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream does not match")
        yield


def _average(network: Network, decay: float) -> torch.optim.swa_utils.AveragedModel | None:
    if not decay:
        return None
    swa = torch.optim.swa_utils
    return swa.AveragedModel(network, multi_avg_fn=swa.get_ema_multi_avg_fn(decay), use_buffers=True)


def _refuse_nonfinite(at: Position, batches: int, network: nn.Module, folder: RunFolder | None, world: World) -> float:
    """The mean loss of the epoch so far; the run ends here where it, or a weight, stopped being a finite number."""
    values = distributed.total(_doubles(at.losses), world)
    bad = (~values.isfinite()).nonzero().flatten()
    saved = None if folder is None else folder.newest()
    kept = "" if saved is None else f"; the last good checkpoint is {saved}"
    if len(bad):
        batch = int(bad[0]) + 1
        raise Diverged(
            f"the loss became {values[bad[0]].item()} in step {at.epoch * batches + batch:,} "
            f"(epoch {at.epoch + 1}, batch {batch}){kept}"
        )
    finite = torch.stack([distributed.own_piece(p).isfinite().all() for p in network.parameters()]).all()
    if distributed.total((~finite).double().cpu(), world):
        raise Diverged(f"a weight stopped being a finite number in epoch {at.epoch + 1}{kept}")
    return float(values.mean())


def _doubles(losses: list[Tensor]) -> Tensor:
    """Losses as float64 on the CPU, by one transfer."""
    return torch.stack([v.double() for v in losses]).cpu() if losses else torch.zeros(0, dtype=torch.float64)


def _progress(config: Config, epoch: int, i: int, batches: int, loss: float, seen: int, start: float) -> str:
    spent = time.perf_counter() - start
    left = spent / seen * config.batch_size * ((config.epochs - epoch + 1) * batches - i)
    return f"epoch {epoch}/{config.epochs}  loss {loss:.4f}  {seen / max(spent, 1e-9):,.0f}/s  {clock(left)} left"


def clock(seconds: float) -> str:
    """
    >>> clock(75), clock(7384)
    ('1:15', '2:03:04')
    """
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
