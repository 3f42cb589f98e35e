"""The fused loss in pure torch: computes gradients together with the loss, a chunk of rows at a time.

Autograd of the plain formula keeps nine tensors of x's size.  Here only dx has that size: a chunk small enough for the
caches goes through all steps before the next one is read, in reused buffers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..checks import Options, check_labels, check_sigma
from ..equations import U_MAX

__all__ = ["evaluate"]

LOG2_E = math.log2(math.e)
CHUNK = 1 << 19  # elements; anything from 2^18 to 2^20 is as good


def evaluate(
    x: Tensor,
    target: Tensor,
    mu: Tensor,
    sigma: Tensor,
    lam: float,
    options: Options,
    need: Sequence[bool],
    grad: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The loss and its gradients: arguments and results as in `native.evaluate`, on any device and in any dtype.

    >>> x, one = torch.zeros(2, 4), torch.ones(4)
    >>> options, need = Options(reduction="sum"), (True, False, False)
    >>> loss, dx, *_ = evaluate(x, torch.tensor([0, 1]), 0 * one, one, 1.0, options, need)
    >>> loss, dx[0]
    (tensor(2.7726), tensor([-1.0492,  0.3497,  0.3497,  0.3497]))
    """
    weight, ignore_index, reduction, label_smoothing = options
    shape, dtype, device = x.shape, sigma.dtype, x.device
    x = x[None, :, None] if x.ndim == 1 else x[:, :, None] if x.ndim == 2 else x.flatten(2)  # (N, C, S)
    n, c, s = x.shape
    check_sigma(sigma)

    # The target of a row is y = y0 + prob * y1 on all classes, plus `at_label` at its label; weights are included.
    w = torch.ones(c, dtype=dtype, device=device) if weight is None else weight.to(dtype)
    y0, y1 = (w * (label_smoothing / c)).view(1, c, 1), (w * (1 - label_smoothing)).view(1, c, 1)
    prob = label = keep = at_label = None
    if target.is_floating_point():
        prob = target.reshape(n, c, s)
        total = torch.full((), n * s, dtype=dtype, device=device)
    else:
        check_labels(target, c, ignore_index)
        label = target.reshape(n, 1, s).long()
        keep = label != ignore_index  # (N, 1, S)
        label = torch.where(keep, label, 0)
        at_label = torch.where(keep, w[label], 0)
        total = at_label.sum()
        at_label = at_label * (1 - label_smoothing)
    factor = 1 / total if reduction == "mean" else torch.ones_like(total)  # of every row's gradient
    if grad is not None:
        factor = factor * grad.to(dtype).reshape((n, 1, s) if grad.ndim else ())
    factor = factor.expand(n, 1, s)

    # With v = u / sqrt(2): Phi = (1 + erf(v)) / 2, whose half is the same for all classes and cancels in the softmax;
    # phi = exp(-v^2) / sqrt(2 pi) and s = dz/dx - 1 = slope * exp(-v^2).  Powers of 2 instead of e, because torch.exp2
    # is three times as fast as torch.exp on a CPU, and twenty times where the result is nearly 0.
    scale = (math.sqrt(0.5) / sigma).clamp_max(torch.finfo(dtype).max).view(1, c, 1)
    mu, bound, slope = mu.view(1, c, 1), U_MAX[dtype] * math.sqrt(0.5), lam / math.sqrt(math.pi) * scale

    loss = torch.empty((n, 1, s), dtype=dtype, device=device)
    dx = torch.empty_like(x) if need[0] else None
    sum_e = torch.zeros(c, dtype=torch.float64, device=device)
    sum_ev = torch.zeros_like(sum_e)
    buffers = torch.empty((3, max(min(CHUNK, n * c * s), c)), dtype=dtype, device=device)
    for at in _chunks(n, c, s):
        a = x[at].to(dtype)  # (n, C, s) of this chunk
        v, z, e = buffers[:, : a.numel()].view(3, *a.shape)
        torch.sub(a, mu, out=v).mul_(scale).clamp_(-bound, bound)
        torch.erf(v, out=z)
        torch.add(a, z, alpha=lam / 2, out=z)
        z.sub_(z.amax(1, keepdim=True).clamp_(min=torch.finfo(dtype).min))  # a row of -inf alone would be inf - inf

        # loss = -sum y log p = sum y log(sum exp z) - sum y z, where z is the one less its maximum
        all_y: Tensor | float = 0.0
        part: Tensor | float = 0.0
        y = None
        if label_smoothing > 0 or prob is not None:
            y = y0 if prob is None else torch.addcmul(y0, prob[at].to(dtype), y1)
            all_y = y.sum(1, keepdim=True)
            part = -torch.mul(y, z, out=e).sum(1, keepdim=True)
        if at_label is not None and label is not None:
            all_y = all_y + at_label[at]
            part = part - at_label[at] * z.gather(1, label[at])
        torch.exp2(z.mul_(LOG2_E), out=z)
        sum_z = z.sum(1, keepdim=True)
        part = part + all_y * sum_z.log()
        loss[at] = part if keep is None else torch.where(keep[at], part, 0)
        if not any(need):
            continue

        f = factor[at]
        k = all_y * f / sum_z
        if keep is not None:  # infinite if every row is ignored
            f, k = torch.where(keep[at], f, 0), torch.where(keep[at], k, 0)
        d = z.mul_(k)  # becomes f (p - y)
        if y is not None:
            d.sub_(torch.mul(y, f, out=e))
        if at_label is not None and label is not None:
            d.scatter_add_(1, label[at], -at_label[at] * f)
        torch.exp2(torch.mul(v, v, out=e).mul_(-LOG2_E), out=e).mul_(d)
        if need[1]:
            sum_e += e.sum((0, 2))
        if dx is not None:
            if dx.dtype == dtype:
                torch.addcmul(d, e, slope, out=dx[at])
            else:
                dx[at] = torch.addcmul(d, e, slope, out=d)
        if need[2]:
            sum_ev += e.mul_(v).sum((0, 2))

    if reduction == "none":
        loss = loss.view(shape[:1] + shape[2:] if len(shape) > 1 else ())
    else:
        loss = loss.sum() / total if reduction == "mean" else loss.sum()
    if dx is not None:
        dx = dx.view(shape)
    slope = slope.view(c).double()
    dmu = (-slope * sum_e).to(dtype) if need[1] else None
    return loss, dx, dmu, (-math.sqrt(2) * slope * sum_ev).to(dtype) if need[2] else None


def _chunks(n: int, c: int, s: int) -> Iterator[tuple[slice, slice, slice]]:
    """Parts of (N, :, S) of at most CHUNK elements, or of one row."""
    rows = max(1, CHUNK // (c * s))
    columns = s if c * s <= CHUNK else max(1, CHUNK // c)
    for i in range(0, n, rows):
        for j in range(0, s, columns):
            yield slice(i, i + rows), slice(None), slice(j, j + columns)
