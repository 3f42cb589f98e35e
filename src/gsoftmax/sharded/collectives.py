"""Collectives of class-sharded heads, with a count of the bytes sent."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Wire:
    """Bytes sent by this process."""

    total: int = 0  # all bytes
    calls: int = 0  # collective calls
    by_purpose: dict[str, int] = field(default_factory=dict)  # bytes by what they were for: "h", "targets", "dh", ...


_wires: list[Wire] = []


@contextlib.contextmanager
def bytes_on_wire() -> Iterator[Wire]:
    """Count the bytes that this process sends in the collectives of sharded heads while the block runs.

    Counted as ring algorithms send them: with K processes an all-gather sends (K - 1) times the local part, a
    reduce-scatter (K - 1)/K and an all-reduce 2 (K - 1)/K times the whole, an all-to-all what is addressed to others.
    What DistributedDataParallel sends for the backbone is not included.

    >>> with bytes_on_wire() as wire:
    ...     pass
    >>> wire.total
    0
    """
    wire = Wire()
    _wires.append(wire)
    try:
        yield wire
    finally:
        _wires.remove(wire)


def _count(purpose: str, sent: float) -> None:
    for wire in _wires:
        wire.total += round(sent)
        wire.calls += 1
        wire.by_purpose[purpose] = wire.by_purpose.get(purpose, 0) + round(sent)


def size(group: Any) -> int:
    return 1 if group is None else dist.get_world_size(group)


def rank(group: Any) -> int:
    return 0 if group is None else dist.get_rank(group)


def world() -> Any:
    """The default group; None without one."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def message_device(group: Any, device: torch.device) -> torch.device:
    """Where messages are sent from: the CPU if the group has a backend for it, so that they need not wait for a GPU."""
    return torch.device("cpu") if group is None or "cpu:" in dist.get_backend_config(group) else device


def _bytes(t: Tensor) -> Tensor:
    """The same memory as bytes: backends do not support every dtype."""
    return t.contiguous().reshape(-1).view(torch.uint8)


def all_gather(t: Tensor, group: Any, purpose: str) -> Tensor:
    """(processes, *shape) of a tensor that has the same shape everywhere."""
    k = size(group)
    if k == 1 or t.numel() == 0:
        return t[None].expand(k, *t.shape)
    mine = _bytes(t)
    _count(purpose, (k - 1) * mine.numel())
    out = torch.empty(k * mine.numel(), dtype=torch.uint8, device=t.device)
    dist.all_gather_into_tensor(out, mine, group=group)
    return out.view(t.dtype).view(k, *t.shape)


def all_reduce(t: Tensor, group: Any, purpose: str, op: Any = None) -> Tensor:
    """The sum (or maximum, minimum) over the processes, in place."""
    k = size(group)
    if k > 1 and t.numel():
        _count(purpose, 2 * (k - 1) / k * t.numel() * t.element_size())
        dist.all_reduce(t, op=op or dist.ReduceOp.SUM, group=group)
    return t


def all_to_all(t: Tensor, sent: Sequence[int], received: Sequence[int], group: Any, purpose: str) -> Tensor:
    """(sum(received),): elements of the flat t, `sent[s]` of them to process s, `received[s]` from it, in order."""
    if size(group) == 1:
        return t
    width = t.element_size()
    _count(purpose, width * (sum(sent) - sent[rank(group)]))
    out = torch.empty(sum(received) * width, dtype=torch.uint8, device=t.device)
    dist.all_to_all_single(out, _bytes(t), [n * width for n in received], [n * width for n in sent], group=group)
    return out.view(t.dtype)


def _padded(t: Tensor, rows: int) -> Tensor:
    return t if t.shape[0] == rows else torch.cat([t, t.new_zeros(rows - t.shape[0], *t.shape[1:])])


def gather_rows(t: Tensor, counts: Sequence[int], group: Any, purpose: str) -> Tensor:
    """(N, ...): the rows of all processes, of which process r has counts[r]."""
    if size(group) == 1:
        return t
    parts = all_gather(_padded(t, max(counts)), group, purpose)
    if min(counts) == max(counts):
        return parts.reshape(-1, *t.shape[1:])
    return torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])


def reduce_rows(t: Tensor, counts: Sequence[int], group: Any, purpose: str) -> Tensor:
    """(n_r, ...): the local rows of the sum of t (N, ...) over the processes, the transpose of `gather_rows`."""
    k, most = size(group), max(counts)
    if k == 1 or most == 0:
        return t
    if min(counts) != most:
        t = torch.cat([_padded(part, most) for part in t.split(list(counts))])
    t = t.contiguous()
    out = t.new_empty(most, *t.shape[1:])
    _count(purpose, (k - 1) / k * t.numel() * t.element_size())
    dist.reduce_scatter_tensor(out, t, group=group)
    return out[: counts[rank(group)]]


def agree(
    group: Any, device: torch.device, error: Exception | None, rows: int = 0, options: Any = None, flag: bool = False
) -> tuple[list[int], bool]:
    """The number of rows of every process, and whether any of them has the flag.

    An error on one process, or options that differ, are errors on every process: otherwise the others would wait.
    """
    if size(group) == 1:
        if error is not None:
            raise error
        return [rows], flag
    code = zlib.crc32(repr(options).encode())
    mine = torch.tensor([rows, code, flag, error is not None], dtype=torch.int64, device=message_device(group, device))
    table = all_gather(mine, group, "header").tolist()
    if error is not None:
        raise error
    failed = [str(r) for r, row in enumerate(table) if row[3]]
    if failed:
        raise ValueError(f"stopped because of an error on process {', '.join(failed)}")
    different = [str(r) for r, row in enumerate(table) if row[1] != table[0][1]]
    if different:
        raise ValueError(
            f"every process must make the same call, got other options or dtypes on process {', '.join(different)} "
            f"than on process 0; here {options!r}"
        )
    return [row[0] for row in table], any(row[2] for row in table)


def exchange(message: Any, group: Any, device: torch.device) -> list[Any]:
    """The messages of all processes; sent as JSON, never as a pickle."""
    text = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
    text = text.to(message_device(group, device))
    counts, _ = agree(group, device, None, len(text))
    parts = gather_rows(text, counts, group, "messages").cpu().split(counts)
    return [json.loads(part.numpy().tobytes()) for part in parts]


def rounds(batches: Iterable[Any], group: Any, device: torch.device) -> Iterator[Any]:
    """The batches of this process, then None until all processes have finished theirs."""
    iterator = iter(batches)
    while True:
        batch = next(iterator, None)
        if not agree(group, device, None, flag=batch is not None)[1]:
            return
        yield batch
