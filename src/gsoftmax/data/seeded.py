"""Seeded choices that never change: splits, subsets, label noise and mosaics are made from these.

They hash (seed, index) with splitmix64, so they are the same on every platform and with every version of NumPy and
PyTorch, and a result can be repeated years later.
"""

from __future__ import annotations

import numpy as np


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
