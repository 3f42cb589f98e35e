"""Which classes a process holds, and tensors that are split accordingly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def split(num_classes: int, processes: int, rank: int) -> tuple[int, int]:
    """First class of a process and the one after its last; as DTensor splits, all but the last have the same number.

    num_classes, processes, rank: the totals, and which process

    >>> [split(10, 4, rank) for rank in range(4)]
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    size = -(-num_classes // processes)
    return min(rank * size, num_classes), min((rank + 1) * size, num_classes)


class ClassShard:
    """Which classes this process holds: `head.shard`, with start, stop, rank and processes.

    num_classes, mesh: number of classes of all processes, and their 1-D DeviceMesh
    averaged: whether the gradients of the backbone are averaged over the processes
    part, dim: the local part of a tensor, and its dimension of classes
    """

    def __init__(self, num_classes: int, mesh: Any, averaged: bool = True) -> None:
        self.num_classes, self.mesh, self.averaged = num_classes, mesh, averaged
        self.group, self.processes, self.rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        self.start, self.stop = split(num_classes, self.processes, self.rank)
        self.classes, self.width = slice(self.start, self.stop), self.stop - self.start

    def __repr__(self) -> str:
        text = f"classes {self.start} to {self.stop - 1}" if self.width else "no class"
        return f"ClassShard({text} of {self.num_classes})"

    def __deepcopy__(self, memo: Any) -> ClassShard:
        return self  # process groups cannot be copied

    def join(self, part: Tensor, dim: int = 0) -> Tensor:
        """The DTensor of which `part` holds the local classes."""
        return join(part, self.mesh, dim, (*part.shape[:dim], self.num_classes, *part.shape[dim + 1 :]))


def join(part: Tensor, mesh: Any, dim: int, shape: Sequence[int]) -> Tensor:
    """The DTensor of this shape, sharded in dimension `dim`, of which `part` is the local part."""
    from torch.distributed.tensor import DTensor, Shard

    size = torch.Size(shape)
    stride = tuple(math.prod(size[i + 1 :]) for i in range(len(size)))
    return DTensor.from_local(part, mesh, [Shard(dim)], run_check=False, shape=size, stride=stride)


def local(tensor: Any, name: str) -> Tensor:
    """The local part of a DTensor."""
    if not hasattr(tensor, "to_local"):
        raise TypeError(f"{name} must be a DTensor of a sharded head, got {type(tensor).__name__}")
    return tensor.to_local()
