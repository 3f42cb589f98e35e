"""What processes with a class-sharded head send each other, counted."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


def split(num_classes: int, processes: int, rank: int) -> tuple[int, int]:
    """First class of a process and the one after its last, as DTensor splits: the same number for all but the last.

    >>> [split(10, 4, rank) for rank in range(4)]
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    size = -(-num_classes // processes)
    return min(rank * size, num_classes), min((rank + 1) * size, num_classes)


@dataclass
class Wire:
    """Bytes that this process sent, in all and by purpose, and how many calls that took."""

    total: int = 0
    calls: int = 0
    by_purpose: dict[str, int] = field(default_factory=dict)

    def _add(self, purpose: str, count: float) -> None:
        self.total += round(count)
        self.calls += 1
        self.by_purpose[purpose] = self.by_purpose.get(purpose, 0) + round(count)


_wires: list[Wire] = []


@contextlib.contextmanager
def bytes_on_wire() -> Iterator[Wire]:
    """Counts the bytes that this process sends in the collectives of this module while the block runs.

    Counted as the usual ring algorithms send them: with K processes an all-gather sends (K - 1) times the own part, a
    reduce-scatter (K - 1)/K and an all-reduce 2 (K - 1)/K times the whole, an all-to-all what is addressed to others.
    What DistributedDataParallel sends for the backbone is not in it.

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


def _count(purpose: str, count: float) -> None:
    for wire in _wires:
        wire._add(purpose, count)


def _size(group: Any) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _rank(group: Any) -> int:
    return 0 if group is None else dist.get_rank(group)


def _world() -> Any:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _bytes(t: Tensor) -> Tensor:
    """The same memory as bytes: what is only moved needs no dtype that the backend knows."""
    return t.contiguous().reshape(-1).view(torch.uint8)


def _all_gather(t: Tensor, group: Any, purpose: str) -> Tensor:
    """(processes, *shape) of a tensor that has the same shape everywhere."""
    size = _size(group)
    if size == 1 or t.numel() == 0:
        return t[None].expand(size, *t.shape)
    mine = _bytes(t)
    _count(purpose, (size - 1) * mine.numel())
    out = torch.empty(size * mine.numel(), dtype=torch.uint8, device=t.device)
    dist.all_gather_into_tensor(out, mine, group=group)
    return out.view(t.dtype).view(size, *t.shape)


def _all_reduce(t: Tensor, group: Any, purpose: str, op: Any = None) -> Tensor:
    """The sum (or maximum, minimum) over the processes, in place."""
    size = _size(group)
    if size > 1 and t.numel():
        _count(purpose, 2 * (size - 1) / size * t.numel() * t.element_size())
        dist.all_reduce(t, op=op or dist.ReduceOp.SUM, group=group)
    return t


def _all_to_all(t: Tensor, sent: Sequence[int], received: Sequence[int], group: Any, purpose: str) -> Tensor:
    """(sum(received),): elements of the flat t, `sent[s]` of them to process s, `received[s]` from it, in order."""
    if _size(group) == 1:
        return t
    width = t.element_size()
    _count(purpose, width * (sum(sent) - sent[_rank(group)]))
    out = torch.empty(sum(received) * width, dtype=torch.uint8, device=t.device)
    dist.all_to_all_single(out, _bytes(t), [n * width for n in received], [n * width for n in sent], group=group)
    return out.view(t.dtype)


def _padded(t: Tensor, rows: int) -> Tensor:
    return t if t.shape[0] == rows else torch.cat([t, t.new_zeros(rows - t.shape[0], *t.shape[1:])])


def _gather_rows(t: Tensor, counts: Sequence[int], group: Any, purpose: str) -> Tensor:
    """(N, ...): the rows of all processes, which have counts[r] of them."""
    if _size(group) == 1:
        return t
    parts = _all_gather(_padded(t, max(counts)), group, purpose)
    if min(counts) == max(counts):
        return parts.reshape(-1, *t.shape[1:])
    return torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])


def _return_rows(t: Tensor, counts: Sequence[int], group: Any, purpose: str) -> Tensor:
    """(n_r, ...): the sum over processes of the own rows of t (N, ...), the transpose of `_gather_rows`."""
    size, most = _size(group), max(counts)
    if size == 1 or most == 0:
        return t
    if min(counts) != most:
        t = torch.cat([_padded(part, most) for part in t.split(list(counts))])
    t = t.contiguous()
    out = t.new_empty(most, *t.shape[1:])
    _count(purpose, (size - 1) / size * t.numel() * t.element_size())
    dist.reduce_scatter_tensor(out, t, group=group)
    return out[: counts[_rank(group)]]


def _agree(
    group: Any, device: torch.device, error: Exception | None, rows: int = 0, options: Any = None, flag: bool = False
) -> tuple[list[int], bool]:
    """Every process's number of rows, and whether any has the flag.

    A mistake on one process ends the call on all of them, instead of leaving the others waiting.
    """
    if _size(group) == 1:
        if error is not None:
            raise error
        return [rows], flag
    # Where the group also has a backend for the CPU nothing waits for the GPU here.
    place = torch.device("cpu") if "cpu:" in dist.get_backend_config(group) else device
    code = zlib.crc32(repr(options).encode())
    mine = torch.tensor([rows, code, flag, error is not None], dtype=torch.int64, device=place)
    table = _all_gather(mine, group, "header").tolist()
    if error is not None:
        raise error
    failed = [str(rank) for rank, row in enumerate(table) if row[3]]
    if failed:
        raise ValueError(f"stopped because of an error on process {', '.join(failed)}")
    different = [str(rank) for rank, row in enumerate(table) if row[1] != table[0][1]]
    if different:
        raise ValueError(
            f"every process must make the same call, got other options or dtypes on process {', '.join(different)} "
            f"than on process 0; here {options!r}"
        )
    return [row[0] for row in table], any(row[2] for row in table)


def _exchange(message: Any, group: Any, device: torch.device) -> list[Any]:
    """What every process says, as JSON."""
    text = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8).to(device)
    counts, _ = _agree(group, device, None, len(text))
    joined = bytes(_gather_rows(text, counts, group, "messages").cpu().numpy().tobytes())
    ends = np.cumsum([0, *counts])
    return [json.loads(joined[a:b]) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def _rounds(batches: Iterable[Any], group: Any, device: torch.device) -> Iterator[Any]:
    """The batches of this process, then None until every process is through with its own."""
    iterator = iter(batches)
    while True:
        batch = next(iterator, None)
        if not _agree(group, device, None, flag=batch is not None)[1]:
            return
        yield batch
