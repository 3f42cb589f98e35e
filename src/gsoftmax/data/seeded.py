"""Seeded random choices for splits, subsets, label noise and mosaics.

They hash (seed, index) with splitmix64, so they are the same on every platform and with every version of NumPy and
PyTorch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def mix(*numbers: int) -> int:
    """One 63-bit seed from several integers.

    >>> mix(0, 1) != mix(1, 0)
    True
    """
    h, mask = 0, 2**64 - 1
    for number in numbers:  # _splitmix in Python's integers, because this is called for every batch
        z = ((h ^ int(number)) + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        h = z ^ (z >> 31)
    return h >> 1


def _splitmix(z: np.ndarray) -> np.ndarray:
    """splitmix64's output function: uint64 in, well mixed uint64 out."""
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))


def _hashes(n: int, seed: int) -> np.ndarray:
    return _splitmix(_splitmix(np.arange(n, dtype=np.uint64)) ^ np.uint64(mix(seed)))


def shuffled(n: int, seed: int) -> np.ndarray:
    """A permutation of 0 ... n-1 that depends on nothing but n and the seed.

    >>> sorted(shuffled(5, seed=3).tolist())
    [0, 1, 2, 3, 4]
    """
    return np.argsort(_hashes(n, seed), kind="stable")


def uniform(n: int, seed: int) -> np.ndarray:
    """n numbers in [0, 1), float64."""
    return np.ldexp((_hashes(n, seed) >> np.uint64(11)).astype(np.float64), -53)


def take(y: Tensor, fraction: float, seed: int, keep: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Row positions (taken, left), both ascending: round(fraction · N) rows, stratified to within one row per class.

    keep: how many rows of each class remain at least
    Multi-label rows are not stratified.

    >>> taken, left = take(torch.tensor([0] * 8 + [1] * 4), 0.25, seed=0)
    >>> len(taken), len(left), int((taken < 8).sum())
    (3, 9, 2)
    """
    n = len(y)
    order = shuffled(n, seed)
    if y.ndim == 2:
        chosen = order[: round(fraction * n)]
    else:
        labels = y.cpu().numpy()[order]
        groups = [order[labels == c] for c in np.unique(labels)]
        exact = np.array([fraction * len(g) for g in groups])
        counts = np.floor(exact + 1e-9).astype(int)
        # largest-remainder rounding
        short = round(fraction * n) - int(counts.sum())
        counts[np.argsort(-(exact - counts), kind="stable")[: max(short, 0)]] += 1
        counts = np.minimum(counts, [max(len(g) - keep, 0) for g in groups])
        chosen = np.concatenate([g[:k] for g, k in zip(groups, counts, strict=True)])
    mask = np.zeros(n, dtype=bool)
    mask[chosen] = True
    return np.flatnonzero(mask), np.flatnonzero(~mask)


def long_tail(y: Tensor, factor: float, seed: int) -> np.ndarray:
    """Row positions of a long-tailed subset: the class of rank r of C keeps at most max_count · factor^(-r/(C-1)) rows.

    factor: ratio of the largest to the smallest class (Cui et al. 2019); 1 changes nothing
    seed: of the rows and of the ranks, so that any class can be the largest

    >>> y = torch.arange(3).repeat_interleave(100)
    >>> [torch.bincount(y[long_tail(y, 100.0, seed=s)]).tolist() for s in (0, 1)]
    [[10, 1, 100], [1, 10, 100]]
    """
    labels = y.cpu().numpy()
    classes, counts = np.unique(labels, return_counts=True)
    order = shuffled(len(labels), seed)
    kept = []
    for rank, c in enumerate(classes[shuffled(len(classes), mix(seed, 1))]):
        target = counts.max() * factor ** (-rank / max(len(classes) - 1, 1))
        rows = order[labels[order] == c]
        kept.append(rows[: max(1, round(target))])
    return np.sort(np.concatenate(kept))


def noisy(y: Tensor, fraction: float, num_classes: int, seed: int) -> Tensor:
    """The labels with exactly round(fraction · N) of them replaced by another class, uniformly at random.

    >>> y = torch.zeros(10, dtype=torch.int64)
    >>> int((noisy(y, 0.4, 3, seed=0) != y).sum())
    4
    """
    n = len(y)
    rows = shuffled(n, mix(seed, 1))[: round(fraction * n)]
    step = 1 + np.floor(uniform(len(rows), mix(seed, 2)) * (num_classes - 1)).astype(np.int64)
    out = y.clone()
    at = torch.from_numpy(rows)
    out[at] = (y[at] + torch.from_numpy(step)) % num_classes
    return out
