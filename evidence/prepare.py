"""Data for the studies: `python -m evidence.prepare SPEC FOLDER NAME` writes NAME.npz, decoded once for all runs.

SPEC is a dataset of small images in any form (tiny-imagenet, folder:PATH).  Of CIFAR-10 it also writes cifar8.npz and
cifar2.npz: eight of its classes, and the two that are left out, used as out-of-distribution data by the study `ood`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gsoftmax import data

OUTSIDE = ("deer", "truck")


def part(dataset: data.Dataset, classes: tuple[str, ...], path: Path) -> None:
    """The rows of some classes, numbered from 0 in the order of their names."""
    arrays: dict[str, Any] = {"names": np.array(classes)}
    for name in ("train", "test"):
        split = dataset.split(name)
        if not isinstance(split.x, torch.Tensor):
            raise ValueError(f"{dataset.name} must have small images, of one size")
        print(f"{path.name}, {name}: mean absolute Laplacian {sharpness(split.x):.1f}")
        new = torch.full((dataset.num_classes,), -1)
        new[[dataset.classes.index(c) for c in classes]] = torch.arange(len(classes))
        y = new[split.y]
        arrays |= {f"x_{name}": split.x[y >= 0].numpy(), f"y_{name}": y[y >= 0].numpy()}
    np.savez(path, **arrays)


def sharpness(x: torch.Tensor) -> float:  # (N, C, H, W)
    """Mean absolute Laplacian: splits that were scaled by different filters differ in it.

    >>> sharpness(torch.ones(2, 3, 8, 8))
    0.0
    """
    x = x[:: max(1, len(x) // 10_000)].float()
    around = x[..., :-2, 1:-1] + x[..., 2:, 1:-1] + x[..., 1:-1, :-2] + x[..., 1:-1, 2:]
    return float((4 * x[..., 1:-1, 1:-1] - around).abs().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", metavar="SPEC")
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("name", metavar="NAME", nargs="?", default="cifar10")
    args = parser.parse_args()
    dataset = data.load(args.spec)
    args.folder.mkdir(parents=True, exist_ok=True)
    parts = {args.name: tuple(dataset.classes)}
    if set(OUTSIDE) < set(dataset.classes):
        parts |= {"cifar8": tuple(c for c in dataset.classes if c not in OUTSIDE), "cifar2": OUTSIDE}
    for name, classes in parts.items():
        part(dataset, classes, args.folder / f"{name}.npz")
        print(args.folder / f"{name}.npz", len(classes), "classes")


if __name__ == "__main__":
    main()
