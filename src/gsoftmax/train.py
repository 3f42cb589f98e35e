"""The training loop: batches in, a run folder with metrics, outputs and the trained model out."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import build, distributed, evaluation, models, photos, sharded
from .config import Config
from .data import Dataset
from .data.seeded import mix
from .distributed import Watch, World
from .messages import first_line
from .progress import Event
from .runs import RunFolder, finished, read_environment
from .stopping import Stopped

__all__ = ["Diverged", "seconds_per_run", "train"]


class Diverged(RuntimeError):
    """The loss or a weight is no longer finite."""


def train(
    config: Config,
    out: str | os.PathLike[str] | None = None,
    *,
    data_root: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: Callable[[Event], None] | None = None,
    stop: Callable[[], int] | None = None,
) -> dict[str, Any]:
    """Trains, evaluates, writes the run folder and returns the final metrics.

    config, data_root: what to train, and where the datasets are
    out, resume: the run folder (None to write nothing), and whether to continue from its newest checkpoint; a finished
        run is not trained again
    progress: called with a `step` (see `gsoftmax.progress`) after every batch, on a GPU after every epoch
    stop: called after every batch; a signal's number ends the run as that signal does, and real ones are left alone

    Under torchrun the processes share every batch.  SIGINT, SIGTERM and SIGHUP save the state and raise `Stopped`.
    """
    if out is not None and importlib.util.find_spec("safetensors") is None:  # needed at the end, checked early
        raise ValueError("a run folder needs safetensors, which is not installed: pip install 'gsoftmax[train]'")
    if config.threads:
        torch.set_num_threads(config.threads)
    device = build.pick_device(config.device)
    with ExitStack() as stack:
        stack.enter_context(build.cudnn_algorithms(config.deterministic))
        world = stack.enter_context(distributed.joined(device))
        config = config.override(distributed.on_rank0(world, photos.choose, config, data_root))
        if out is not None:
            resume = resume or distributed.restarted(read_environment(out))
            fingerprints = functools.partial(build.fingerprints, config, data_root)
            done = distributed.on_rank0(world, finished, out, config, resume, fingerprints)
            if done is not None:
                return done
        dataset = distributed.rank0_first(world, build.load_data, config, data_root)
        parts = build.prepare(config, dataset, device, world)
        others = distributed.rank0_first(world, evaluation.load_others, config, dataset, data_root)
        run = Run(config, dataset, parts, device, world, progress if world.first else None)
        if out is not None:
            told = {"name": dataset.name, "classes": list(dataset.classes), "notes": list(dataset.notes)}
            described: dict[str, Any] = {"data": told, "processes": world.size}
            described["fingerprints"] = fingerprints() if world.first else {}
            if distributed.launch() is not None:
                described["torchrun"] = distributed.launch()
            run.folder = distributed.only_rank0(world, RunFolder, out, config, described, resume)
            stack.enter_context(run.folder or nullcontext())
            run.watch = stack.enter_context(Watch(world, config.checkpoint_minutes, stop))
            run.restore()
        if config.cuda_graphs and device.type == "cuda":
            inputs, _ = next(build.train_batches(dataset, config, 1))
            stack.enter_context(build.cuda_graphs(parts.network.backbone, inputs, run.amp))
        run.fit()
        return run.finish(others)


def seconds_per_run(config: Config, dataset: Dataset, seconds: float = 1.0) -> float:
    """How long a run will take, from a few of its steps, without the time until data and libraries are loaded.

    config, dataset: of the run, with nothing left open
    seconds: how long to measure, after one step to warm up
    """
    threads, device = torch.get_num_threads(), build.pick_device(config.device)
    if config.threads:
        torch.set_num_threads(config.threads)
    try:
        run = Run(config, dataset, build.prepare(config, dataset, device), device, distributed.ALONE, None)
        reading = []
        for _ in range(2):  # image files are decoded once if they fit into the cache
            start = time.perf_counter()
            inputs, target = next(build.train_batches(dataset, config, 1))
            reading.append(time.perf_counter() - start)
        if device.type == "cpu":  # a large network would take long for all of them
            inputs, target = inputs[:16], target[:16]
        steps, start = -1, 0.0
        while steps < 2 or time.perf_counter() < start + seconds:
            run.backward((inputs, target, None), True, len(target))
            run.step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            steps += 1
            if steps == 0:
                start = time.perf_counter()
        example = (time.perf_counter() - start) / steps / len(target)
    finally:
        torch.set_num_threads(threads)
    rows, first, again = len(dataset.train), reading[0] / config.batch_size, reading[1] / config.batch_size
    evaluated = len(dataset.split(config.evaluate_on)) + rows * config.train_geometry
    # a forward pass takes about a third of a step
    return rows * (config.epochs * (example + again) + max(0.0, first - again)) + evaluated * (example / 3 + again)


@dataclass
class Run:
    """A run in progress.  Its position is part of every checkpoint."""

    config: Config
    dataset: Dataset
    parts: build.Parts
    device: torch.device
    world: World
    progress: Callable[[Event], None] | None
    folder: RunFolder | None = None  # on rank 0
    watch: Watch | None = None  # where there is a folder, on every rank
    # the position
    epoch: int = 0  # finished
    batch: int = 0  # finished of the epoch after it
    losses: list[Tensor] = field(default_factory=list)  # of those batches
    seen: int = 0  # examples

    def __post_init__(self) -> None:
        self.batches, _ = build.total_steps(self.config, self.dataset)
        self.amp = build.autocast(self.config, self.device)
        self.start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Training time, including that before the run was resumed."""
        return time.perf_counter() - self.start

    def fit(self) -> None:
        """Trains all epochs that are left."""
        config, rank = self.config, self.world.rank
        for epoch in range(self.epoch + 1, config.epochs + 1):
            self.parts.network.train()
            batches = build.train_batches(self.dataset, config, epoch, self.world, self.batch)
            for i, (inputs, target) in enumerate(batches, self.batch + 1):
                torch.manual_seed(mix(config.seed, 3, epoch, i, *([rank] if rank else [])))  # dropout
                last = i % config.accumulate == 0 or i == self.batches  # of an optimizer step
                rows = min(config.batch_size, len(self.dataset.train) - (i - 1) * config.batch_size)
                mixed = None
                if config.mixup:
                    inputs, mixed = build.mixup(config, inputs, target, (epoch, i), self.world)
                try:
                    loss = self.backward((inputs, target, mixed), last, rows)
                except ValueError:
                    self.check_finite()  # a loss refuses Gaussians that are not finite: that is a divergence
                    raise
                self.seen += rows
                if self.progress is not None and self.device.type == "cpu":
                    self.show(i, loss.item())
                if not last:
                    continue
                self.step()
                self.batch = i
                if i < self.batches:
                    self.checkpoint(f"in epoch {epoch}, after batch {i} of {self.batches}")
            self.finish_epoch()

    def backward(self, batch: tuple[Tensor, Tensor, build.Mixed | None], last: bool, rows: int) -> Tensor:
        """Loss and gradients of one batch; DDP averages the gradients after the `last` batch of a step.

        batch: inputs, targets, and what the inputs were mixed with
        rows: of the batch over all processes
        """
        parts, size, weight = self.parts, self.world.size, 1.0
        if size > 1 and not parts.network.in_shards:  # a sharded head returns the loss of the whole batch everywhere
            weight = size * (1.0 if self.config.reduction == "sum" else len(batch[1]) / rows)
        with nullcontext() if last else parts.no_sync():
            with self.amp():
                loss = parts.loss(*batch, **build.loss_options(self.config))
            factor = weight / self.config.accumulate
            parts.scaler.scale(loss * factor if factor != 1 else loss).backward()
        self.losses.append(loss.detach() * (weight / size) if size > 1 else loss.detach())
        return loss

    def step(self) -> None:
        """One step of the optimizer with the gradients so far."""
        parts = self.parts
        distributed.mean_gradients(parts.alone, self.world)
        if self.config.clip is not None:
            parts.scaler.unscale_(parts.optimizer)
            parameters = list(parts.network.parameters())
            in_shards = any(map(distributed.is_sharded, parameters))
            (sharded if in_shards else nn.utils).clip_grad_norm_(parameters, self.config.clip)
        parts.scaler.step(parts.optimizer)
        parts.scaler.update()
        parts.optimizer.zero_grad(set_to_none=True)
        if parts.average is not None:
            parts.average.update_parameters(parts.network)
        if self.config.schedule_every == "step":
            parts.scheduler.step()

    def finish_epoch(self) -> None:
        """Logs the epoch, evaluates where that is due, and saves."""
        config, parts = self.config, self.parts
        loss = self.check_finite()
        if self.progress is not None:
            self.show(self.batches, loss)
        row = {"epoch": self.epoch + 1, "loss": loss, "lr": parts.optimizer.param_groups[0]["lr"]}
        self.epoch, self.batch, self.losses = self.epoch + 1, 0, []
        if config.schedule_every == "epoch":
            parts.scheduler.step()
        if config.evaluate_every and self.epoch % config.evaluate_every == 0 and self.epoch < config.epochs:
            row |= self.evaluator().evaluate(self.dataset, config.evaluate_on)[0]
        if self.folder is not None:
            self.folder.log(row | {"seconds": self.seconds})
        due = config.checkpoint_every and self.epoch % config.checkpoint_every == 0
        self.checkpoint(f"after epoch {self.epoch}", bool(due))

    def finish(self, others: dict[str, Dataset]) -> dict[str, Any]:
        """Evaluates, writes metrics and outputs, and returns the metrics."""
        config, dataset, world = self.config, self.dataset, self.world
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = self.seconds
        evaluator = self.evaluator()
        result, outputs = evaluator.evaluate(dataset, config.evaluate_on)
        if (config.train_geometry or others) and "x" in outputs:
            stats = evaluator.class_statistics(dataset, "train")
            if config.train_geometry:
                result |= {f"train_{k}": v for k, v in stats.geometry().average().items()}
                if dataset.num_classes <= 1000:  # for the report's figures; 16 MB at most
                    outputs |= {f"train_{k}": v.cpu() for k, v in stats.state_dict().items()}
            if others:
                result |= evaluator.detection(outputs, stats, others)
        result |= {"seconds": seconds, "epochs": config.epochs, "examples_per_second": self.seen / max(seconds, 1e-9)}
        if self.watch is not None:
            written = (outputs, self.weights(), models.describe(config, dataset))
            distributed.only_rank0(world, RunFolder.finish, self.folder, result, *written)
        return result

    def weights(self) -> dict[str, Tensor]:
        """The weights that were evaluated, whole and on the CPU of rank 0; all ranks must call it."""
        from torch.distributed.checkpoint import state_dict as states

        average = self.parts.average
        network: Any = self.parts.network if average is None else average.module
        options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
        held = states.get_model_state_dict(network, options=options)
        counter = "head.draws" if network.in_shards else None  # of sampled classes, which a whole head does not have
        return {k: v for k, v in held.items() if isinstance(v, Tensor) and k != counter}

    def evaluator(self) -> evaluation.Evaluator:
        """Of the network, or of its EMA copy if there is one, the same on every process."""
        average = self.parts.average
        network: Any = self.parts.network if average is None else average.module
        distributed.share_buffers(network, self.world)
        return evaluation.Evaluator(network, self.config, self.world)

    def check_finite(self) -> float:
        """The mean loss of the epoch so far; raises `Diverged` if it or a weight is not finite."""
        losses = self.gathered_losses()
        epoch, bad = self.epoch + 1, (~losses.isfinite()).nonzero().flatten()
        saved = None if self.folder is None else self.folder.newest()
        kept = "" if saved is None else f"; the last good checkpoint is {saved}"
        if len(bad):
            batch = int(bad[0]) + 1
            step = self.epoch * self.batches + batch
            where = f"step {step:,} (epoch {epoch}, batch {batch})"
            raise Diverged(f"the loss became {losses[bad[0]].item()} in {where}{kept}")
        weights = map(distributed.own_piece, self.parts.network.parameters())
        finite = torch.stack([weight.isfinite().all() for weight in weights]).all()
        if distributed.total((~finite).double().cpu(), self.world):
            raise Diverged(f"a weight stopped being finite in epoch {epoch}{kept}")
        return float(losses.mean())

    def gathered_losses(self) -> Tensor:
        """The losses of the epoch so far over all processes, as float64 on the CPU, by one transfer."""
        losses = torch.stack([v.double() for v in self.losses]).cpu() if self.losses else torch.zeros(0).double()
        return distributed.total(losses, self.world)

    def checkpoint(self, where: str, due: bool = False) -> None:
        """Saves if a checkpoint is due or was asked for, and raises `Stopped` if a signal asked for that."""
        if self.watch is None:
            return
        wish = self.watch.poll()
        if wish == Watch.GO_ON and not due:
            return
        if self.losses:
            self.check_finite()
        position = {"epoch": self.epoch, "batch": self.batch, "seconds": self.seconds, "seen": self.seen}
        state = position | {"losses": self.gathered_losses().tolist()} | self.parts.state()
        if self.folder is not None:
            self.folder.save(state)
        self.watch.saved()
        if wish == Watch.STOP:
            raise Stopped(where, self.watch.signal_number or signal.SIGTERM)

    def restore(self) -> None:
        """Continues from the newest checkpoint of the folder, if there is one."""
        state: Any = distributed.only_rank0(self.world, RunFolder.checkpoint, self.folder) or {}
        small = {k: state.get(k) for k in ("epoch", "batch", "losses", "seconds", "seen")}
        position = distributed.from_rank0(self.world, small)
        self.start = time.perf_counter() - (position["seconds"] or 0.0)
        if position["epoch"] is None:
            return
        try:
            self.parts.load(state, self.world)
            losses = torch.tensor(position["losses"], dtype=torch.float64, device=self.device)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if self.folder is None or self.world.size > 1:  # the cause may be on another rank
                raise
            path = self.folder.newest()
            raise ValueError(f"checkpoint {path} does not belong to this run: {first_line(error)}") from None
        self.epoch, self.batch, self.seen = position["epoch"], position["batch"], position["seen"]
        self.losses = list(losses if self.world.first else torch.zeros_like(losses))  # they are summed over ranks

    def show(self, batch: int, loss: float) -> None:
        """Tells epoch, loss, speed and time left."""
        assert self.progress is not None
        config, spent, total = self.config, self.seconds, self.config.epochs * self.batches
        done = self.epoch * self.batches + batch
        told = {"epoch": self.epoch + 1, "epochs": config.epochs, "loss": loss if math.isfinite(loss) else None}
        told |= {"rate": self.seen / max(spent, 1e-9), "left": spent / self.seen * config.batch_size * (total - done)}
        self.progress({"event": "step", **told, "done": done / total})
