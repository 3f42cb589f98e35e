"""How multi-label outputs are laid out: one output per label, or two, absence first.

form: a multi-label form of `multilabel_cross_entropy`, of which only "msml" has one output per label; None for classes
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import checks


def two_outputs(form: str | None) -> bool:
    return form not in (None, "msml")


def flat_outputs(x: Tensor, labels: int, form: str) -> Tensor:
    """x (N, 2, L) or (N, 2L) as (N, 2L); with one output per label, x (N, L) itself."""
    checks.check_outputs(x)
    width = 2 * labels if two_outputs(form) else labels
    if x.shape[1:] == (width,):
        return x
    if two_outputs(form) and x.shape[1:] == (2, labels):
        return x.reshape(-1, width)
    expected = f"(N, 2, {labels}) or (N, {width})" if two_outputs(form) else f"(N, {labels})"
    raise ValueError(f"x must be {expected} for {labels} labels and form={form!r}, got {tuple(x.shape)}")


def split_outputs(z: Tensor, labels: int, form: str) -> tuple[Tensor, Tensor | None]:
    """z+ and z-, (N, L) each; None for z- with one output per label."""
    if not two_outputs(form):
        return z, None
    z = z.view(-1, 2, labels)
    return z[:, 1], z[:, 0]


def by_sign(v: Tensor, form: str | None) -> Tensor:
    """One value per output: (2L,) as (2, L)."""
    return v.view(2, -1) if two_outputs(form) else v


def spread_over_outputs(v: float | Sequence[float] | Tensor, labels: int, form: str | None) -> float | Tensor:
    """Initial values for every output, from a number, (L,), (2, L) or (2L,)."""
    if isinstance(v, (int, float)) or not two_outputs(form):
        return v  # type: ignore[return-value]
    v = torch.as_tensor(v, dtype=torch.float64, device="cpu")
    return v.expand(2, labels).reshape(-1) if v.shape == (labels,) else v.reshape(-1)
