"""Runs of several processes: rank and world size, work on rank 0, gathering rows, signals.

    torchrun --nproc-per-node 4 -m gsoftmax train RECIPE

starts processes that find each other through the variables torchrun sets.  Every process trains on its share of every
batch; rank 0 writes the run folder.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from .config import world_size
from .messages import first_line
from .stopping import Requests

T = TypeVar("T")

# Rendezvous takes seconds: fail fast, so that torchrun can restart.
CONNECT = timedelta(minutes=1)
# Afterwards other ranks may wait while rank 0 unpacks an archive or computes the metrics.
ANSWER = timedelta(minutes=30)

# What the message of a lost connection contains.
LOST = "connectfullmesh|connection closed by peer|connection reset|broken pipe|timed out|socket timeout|nccl"

_set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # the older name


class World(NamedTuple):
    """This process among those of the run."""

    rank: int = 0  # number of this process
    size: int = 1  # number of processes

    @property
    def first(self) -> bool:
        return self.rank == 0


ALONE = World()


class LostProcess(RuntimeError):
    """Another process of the run died."""


def launch() -> str | None:
    """The name torchrun gave to this launch of processes, the same after each of its restarts."""
    return os.environ.get("TORCHELASTIC_RUN_ID")


def restarted(described: Mapping[str, Any]) -> bool:
    """Whether torchrun started this process in place of one that failed: then the run is resumed.

    described: contents of environment.json, which records the launch
    """
    if launch() in (None, "none"):  # several launches share that name
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return described.get("torchrun") == launch()


@contextmanager
def joined(device: torch.device) -> Iterator[World]:
    """The processes of the run; forms their group where torchrun started several and there is none yet."""
    if dist.is_available() and dist.is_initialized():
        yield World(dist.get_rank(), dist.get_world_size())
        return
    size = world_size() if os.environ.get("RANK") else 1
    if size == 1 or not dist.is_available():
        yield ALONE
        return
    # gloo beside NCCL: flags and descriptions stay on the CPU
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store: Any = None
    try:
        store, rank, size = next(rendezvous("env://", timeout=CONNECT))
        store = PrefixStore(_agreed_prefix(store, rank, size), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=CONNECT)
        _set_timeout(ANSWER, None)
        yield World(rank, size)
    except Exception as error:
        reason, lost = first_line(error), isinstance(error, RuntimeError) and _is_loss(error)
        with suppress(Exception):  # the store may be gone as well
            if lost and store.check(["reason"]):
                reason = store.get("reason").decode()
            elif not lost:
                store.set("reason", f"process {rank}: {reason}")  # before the others notice
        if lost:
            raise LostProcess(f"another process of the run died ({reason})") from error
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _agreed_prefix(store: Any, rank: int, size: int) -> str:
    """A group name unique to these processes.

    torchrun may keep its store when it restarts processes, and the addresses of dead ones must not be found in it.
    Each rank writes a random token; rank 0 repeats all the tokens it sees beside its own until every other rank has
    answered that it found its token.
    """
    token, end = uuid.uuid4().hex, time.monotonic() + CONNECT.total_seconds()

    def read(key: str) -> str:
        return store.get(key).decode() if store.check([key]) else ""

    store.set(f"here/{rank}", token)
    while time.monotonic() < end:
        if rank == 0:
            others = [read(f"here/{r}") for r in range(1, size)]
            store.set("session", " ".join([token, *others]))
            if all(read(f"heard/{r}") == f"{token} {other}" for r, other in enumerate(others, start=1)):
                return token
        else:
            first, *seen = read("session").split() or [""]
            if token in seen:
                store.set(f"heard/{rank}", f"{first} {token}")
                return first
        time.sleep(0.01)
    raise LostProcess(f"{size} processes did not find each other within {CONNECT.total_seconds():.0f} seconds")


def _is_loss(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or re.search(LOST, str(error), re.I) is not None


def from_rank0(world: World, value: Any) -> Any:
    """Rank 0's value, on every rank."""
    box = [value]
    if world.size > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def only_rank0(world: World, work: Callable[..., T], *args: Any) -> T | None:
    """Calls `work` on rank 0, which keeps the result; errors are re-raised on every rank."""
    result, failed = None, None
    try:
        result = work(*args) if world.first else None
    except (ValueError, OSError, RuntimeError) as error:
        failed = error
    failed = from_rank0(world, failed)
    if failed is not None:
        raise failed
    return result


def on_rank0(world: World, work: Callable[..., T], *args: Any) -> T:
    """Calls `work` on rank 0 and broadcasts the result; errors are re-raised on every rank."""
    return from_rank0(world, only_rank0(world, work, *args))


def rank0_first(world: World, work: Callable[..., T], *args: Any) -> T:
    """Calls `work` on rank 0, then on the others, which find the files that it unpacked or cached."""
    result: Any = only_rank0(world, work, *args)
    return result if world.first else work(*args)


@torch.no_grad()
def share_buffers(module: nn.Module, world: World) -> None:
    """Broadcasts rank 0's buffers: batch-norm statistics are each process's own until then."""
    if world.size > 1:
        for buffer in module.buffers():
            if not is_sharded(buffer):
                dist.broadcast(buffer, src=0)


def mean_gradients(parameters: Iterable[nn.Parameter], world: World) -> None:
    """Averages gradients over the processes, for parameters outside DDP and FSDP."""
    for p in parameters:
        if p.grad is not None and world.size > 1:
            dist.all_reduce(p.grad)
            p.grad /= world.size


def is_sharded(tensor: Tensor | None) -> bool:
    """Whether it is a DTensor, of FSDP or of a head sharded by class."""
    return hasattr(tensor, "placements")


def own_piece(tensor: Any) -> Tensor:
    """The part of a tensor that is on this process."""
    return (tensor.to_local() if is_sharded(tensor) else tensor).detach()


def total(values: Tensor, world: World) -> Tensor:
    """Sum over the processes."""
    if world.size > 1:
        dist.all_reduce(values)
    return values


def gather_rows(rows: Tensor, positions: list[Tensor], world: World) -> Tensor:
    """Gathers rows on rank 0 in the order of the dataset; other ranks keep their own.

    rows: (n_r, ...) of this process
    positions: for every rank the places of its rows in the whole
    """
    if world.size == 1:
        return rows
    longest = max(map(len, positions))
    padded = rows.new_zeros((longest, *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in positions] if world.first else None
    dist.gather(padded, parts, dst=0)
    if parts is None:
        return rows
    whole = rows.new_empty((sum(map(len, positions)), *rows.shape[1:]))
    for at, part in zip(positions, parts, strict=True):
        whole[at.to(rows.device)] = part[: len(at)]
    return whole


class Watch:
    """Signals and the clock, seen by all processes after the same batch.

    The first signal asks for a checkpoint and the end, a second one stops at once.  Every `minutes` rank 0 asks for a
    checkpoint.  Requests are exchanged asynchronously and take effect one batch later.  With `stop` this process's
    signals are left alone, and the number that it returns is the request.
    """

    GO_ON, SAVE, STOP = 0, 1, 2

    def __init__(self, world: World, minutes: float, stop: Callable[[], int] | None = None) -> None:
        self.world, self.minutes = world, minutes
        self._signals = Requests()
        self._stop = stop
        self._last = time.monotonic()
        self._flag = torch.zeros((), dtype=torch.int64)
        self._asked: Any = None
        # a group of its own: the order of its messages does not depend on when gradients are ready
        self._group: Any = None
        if world.size > 1:
            self._group = dist.new_group(backend="gloo", timeout=CONNECT)
            _set_timeout(ANSWER, self._group)

    @property
    def signal_number(self) -> int:
        """Of the signal that asks this process to stop; 0 if there is none."""
        return self._signals.number if self._stop is None else self._stop()

    def __enter__(self) -> Watch:
        if self._stop is None:
            self._signals.__enter__()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._asked is not None:
            self._asked.wait()
        self._signals.__exit__()
        if kind is None:
            self._signals.pass_on()  # too late to stop this run

    def saved(self) -> None:
        self._last = time.monotonic()

    def poll(self) -> int:
        """What all processes do now."""
        mine = self.GO_ON
        if self.signal_number:
            mine = self.STOP
        elif self.minutes and self.world.first and time.monotonic() - self._last > 60 * self.minutes:
            mine, self._last = self.SAVE, time.monotonic()  # asked once: the answer arrives at the next poll
        if self._group is None:
            return mine
        answer = self.GO_ON
        if self._asked is not None:
            self._asked.wait()
            answer = int(self._flag)
        self._flag.fill_(mine)
        self._asked = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return answer
