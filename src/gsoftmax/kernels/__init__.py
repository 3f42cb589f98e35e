"""Fused versions of the losses in `gsoftmax.functional`, chosen by `impl=`."""

from __future__ import annotations

from torch import Tensor

IMPLS = ("auto", "plain")


def cross_entropy(
    x: Tensor,
    target: Tensor,
    mu: Tensor,
    sigma: Tensor,
    lam: float,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    impl: str,
) -> Tensor | None:
    """The loss by a fused path, or None where the plain path is the one to take."""
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)}, got {impl!r}")
    return None


def linear_cross_entropy(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    mu: Tensor,
    sigma: Tensor,
    lam: float,
    class_weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    impl: str,
) -> Tensor | None:
    """The same for `linear_gsoftmax_cross_entropy`."""
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)}, got {impl!r}")
    return None
