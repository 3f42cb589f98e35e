"""The last linear layer and the loss in one: x = h W^T + bias exists only for a chunk of rows at a time.

A chunk goes through three matrix products, each as large as without chunks, and the loss in between:

    x = h_chunk W^T + bias        loss, dx from x and the target        dh_chunk = dx W        dW += dx^T h_chunk

so the gradients are made together with the loss and wait for the backward pass, which only multiplies them by what
comes in.  That needs the incoming gradient to be one number, and dx to survive until it is known: with
reduction="none" and in float16, where a loss scale is to lift what would be rounded to zero, the backward pass makes x
again, a fourth product.

A chunk has as many rows as h has columns, or more, so that adding to dW costs no more than making it.

A margin, as that of L-softmax, changes the target's output alone: `target_logit` takes its place in x, and the gradient
there goes to `target_logit` and no further.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks, equations
from ..checks import Options
from . import chunked, native

__all__ = ["Linear", "linear_cross_entropy"]

# The smallest x worth cutting, in elements: 512 MiB of bfloat16 on a GPU, and what stays in the caches of a CPU.
CHUNK = {"cuda": 1 << 28, "cpu": 1 << 22}
# dW of half-precision weights is summed over chunks in float32 where that takes no more bytes than this.  Otherwise it
# is summed in the weights' own dtype, over chunks twice as large, so that few sums are rounded.
FLOAT32_SUM = 1 << 30


class Linear(NamedTuple):
    """What x is made of: linear(h, weight, bias), with `target_logit` in the place of the target's output."""

    h: Tensor  # (N, D)
    weight: Tensor  # (C, D)
    bias: Tensor | None = None  # (C,)
    target_logit: Tensor | None = None  # (N,), where targets are class indices


def linear_cross_entropy(
    layer: Linear,
    target: Tensor,  # (N,) or (N, C)
    mu: Tensor,
    sigma: Tensor,
    lam: float,
    options: Options,
    path: str,
) -> Tensor:
    """Cross entropy of G-softmax on x = linear(h, weight, bias), of which no more than a chunk of rows exists.

    `path` is who turns a chunk of x into losses and gradients: "triton", "native" or "chunked" (pure torch).

    >>> h, weight, target = torch.eye(2), torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
    >>> mu, sigma = torch.zeros(2), torch.ones(2)
    >>> linear_cross_entropy(Linear(h, weight), target, mu, sigma, 1.0, Options(), "chunked")
    tensor(0.1565)
    """
    h, weight, bias, target_logit = layer
    device = h.device.type
    x = h.new_empty((h.shape[0], weight.shape[0]), device="meta")
    checks.check_cross_entropy(x, target, options)
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        h, weight = h.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    mu, sigma = mu.contiguous(), sigma.contiguous()
    class_weight = None if options.weight is None else options.weight.contiguous()
    how = (lam, options._replace(weight=None), path)
    # Outside of the chunks nothing is left for autocast to do.
    with torch.autocast(device, enabled=False):
        loss = _LinearCrossEntropy.apply(h, weight, bias, mu, sigma, target_logit, target, class_weight, how)
    return equations.loss_dtype(loss, h)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        mu: Tensor,
        sigma: Tensor,
        target_logit: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        how: tuple[float, Options, str],
    ) -> Tensor:
        options = how[1]
        early = options.reduction != "none" and h.dtype is not torch.float16
        want = ctx.needs_input_grad[:6] if early else (False,) * 6
        factor, divisor = _factor(target, class_weight, weight.shape[0], sigma.dtype, options)
        given = (h, weight, bias, mu, sigma, target_logit, target, class_weight)
        rows, gradients = _chunk_by_chunk(*given, how, factor, want)
        ctx.early, ctx.how = early, how
        ctx.save_for_backward(*given, *gradients)
        if options.reduction == "none":
            return rows
        return rows.sum() if options.reduction == "sum" else rows.sum() / divisor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        h, weight, bias, mu, sigma, target_logit, target, class_weight, *gradients = ctx.saved_tensors
        given = (h, weight, bias, mu, sigma, target_logit, target, class_weight)
        want = ctx.needs_input_grad[:6]
        if torch.is_grad_enabled():  # create_graph: the gradient is differentiated again
            gradients = _plain_gradients(grad, *given, ctx.how, want)
        elif ctx.early:
            # Not in place: a graph that is retained needs them again.
            gradients = [None if g is None else g * grad.to(g.dtype) for g in gradients]
        else:
            with torch.autocast(grad.device.type, enabled=False):
                factor, _ = _factor(target, class_weight, weight.shape[0], sigma.dtype, ctx.how[1])
                factor = grad.to(factor.dtype) * factor
                _, gradients = _chunk_by_chunk(*given, ctx.how, factor, want)
        return *gradients, None, None, None


def _factor(
    target: Tensor, class_weight: Tensor | None, classes: int, dtype: torch.dtype, options: Options
) -> tuple[Tensor, Tensor]:
    """What every row's loss is multiplied by, and its inverse: the number or weight of rows for reduction="mean"."""
    if options.reduction != "mean":
        divisor = torch.ones((), dtype=dtype, device=target.device)
    elif target.is_floating_point():
        divisor = torch.full((), target.shape[0], dtype=dtype, device=target.device)
    else:
        counts = target != options.ignore_index
        if class_weight is None:
            divisor = counts.sum().to(dtype)
        else:
            of_row = class_weight.to(dtype)[target.clamp(0, classes - 1).long()]
            divisor = torch.where(counts, of_row, 0).sum()
    # Where no row counts the loss is 0 / 0 and there is no gradient.
    return torch.where(divisor == 0, 0, 1 / divisor), divisor


def _chunks(rows: int, features: int, classes: int, device: str) -> Iterator[slice]:
    """Rows in chunks of equal size, of x's with about CHUNK elements, and no less than W has."""
    size = min(rows, max(features, CHUNK.get(device, CHUNK["cpu"]) // classes, 1))
    parts = -(-rows // size)
    size = -(-rows // parts)
    if parts > 1 and device == "cuda":
        size = -(-size // 128) * 128  # whole tiles of a matrix product
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _chunk_by_chunk(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mu: Tensor,
    sigma: Tensor,
    target_logit: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    how: tuple[float, Options, str],
    factor: Tensor,  # () or (N,)
    want: tuple[bool, ...],
) -> tuple[Tensor, list[Tensor | None]]:
    """Losses of rows (N,), and the gradients of h, weight, bias, mu, sigma and target_logit; None where not wanted."""
    (n, d), c = h.shape, weight.shape[0]
    losses = torch.empty(n, dtype=sigma.dtype, device=h.device)
    dh = torch.empty_like(h) if want[0] else None
    dweight: Tensor | None = None
    dbias = torch.zeros(c, dtype=sigma.dtype, device=h.device) if want[2] else None
    dmu = torch.zeros_like(mu) if want[3] else None
    dsigma = torch.zeros_like(sigma) if want[4] else None
    d_target_logit = torch.empty_like(target_logit) if target_logit is not None and want[5] else None
    buffer: Tensor | None = None
    exact = 4 * c * d <= FLOAT32_SUM
    for at in _chunks(n, d if exact else 2 * d, c, h.device.type):
        if buffer is None:
            buffer = torch.empty((at.stop - at.start, c), dtype=h.dtype, device=h.device)
        x = buffer[: at.stop - at.start]
        if bias is None:
            torch.mm(h[at], weight.t(), out=x)
        else:
            torch.addmm(bias, h[at], weight.t(), out=x)
        if target_logit is not None:
            labels = equations.label_columns(target[at], how[1].ignore_index, c)[:, None]
            x.scatter_(1, labels, target_logit[at, None].to(x.dtype))
        losses[at], dx, dmu_part, dsigma_part = _loss_and_gradient_(
            x, target[at], mu, sigma, class_weight, how, factor[at] if factor.ndim else factor,
            any(want[:3]) or want[5], want[3], want[4],
        )  # fmt: skip
        if dx is not None:
            if target_logit is not None:
                if d_target_logit is not None:
                    d_target_logit[at] = dx.gather(1, labels).squeeze(1)
                dx.scatter_(1, labels, 0.0)
            if dh is not None:
                torch.mm(dx, weight, out=dh[at])
            if want[1]:
                dweight = _add_product(dweight, dx, h[at], exact)
            if dbias is not None:
                dbias += dx.sum(0, dtype=dbias.dtype)
        if dmu is not None and dmu_part is not None:
            dmu += dmu_part
        if dsigma is not None and dsigma_part is not None:
            dsigma += dsigma_part
    del buffer, x, dx  # dW in its own dtype takes their place
    if dweight is not None:
        dweight = dweight.to(weight.dtype)
    if dbias is not None and bias is not None:
        dbias = dbias.to(bias.dtype)
    return losses, [dh, dweight, dbias, dmu, dsigma, d_target_logit]


def _loss_and_gradient_(
    x: Tensor,
    target: Tensor,
    mu: Tensor,
    sigma: Tensor,
    class_weight: Tensor | None,
    how: tuple[float, Options, str],
    factor: Tensor,
    want_x: bool,
    want_mu: bool,
    want_sigma: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Losses of the rows of a chunk, and dx, dmu, dsigma of factor * loss; dx may be written over x."""
    lam, options, path = how
    each = options._replace(weight=class_weight, reduction="none")
    if path == "triton":
        from . import triton_ce

        losses, stats = triton_ce.forward(x, target, mu, sigma, lam, each, torch.float32)
        need = (want_x, want_mu, want_sigma)
        if not any(need):
            return losses, None, None, None
        summed = each._replace(reduction="sum")
        return losses, *triton_ce.backward(factor, stats, x, target, mu, sigma, lam, summed, need, x)
    evaluate = native.evaluate if path == "native" else chunked.evaluate
    wanted = (want_x, want_mu or want_sigma)
    return evaluate(x, target, mu, sigma, lam, each, *wanted, factor.expand(x.shape[0]))


def _add_product(total: Tensor | None, dx: Tensor, h: Tensor, exact: bool) -> Tensor:
    """total + dx^T h, in place; the first call has no total yet.  exact: the total is float32 or better."""
    if not exact or dx.dtype not in (torch.bfloat16, torch.float16):
        return torch.mm(dx.t(), h) if total is None else total.addmm_(dx.t(), h)
    if not dx.is_cuda or torch.version.hip:
        product = torch.mm(dx.t(), h)
        return product.float() if total is None else total.add_(product)
    # Half-precision factors, sum in float32: the products are never rounded on the way.
    if total is None:
        return torch.mm(dx.t(), h, out_dtype=torch.float32)
    return torch.addmm(total, dx.t(), h, out_dtype=torch.float32, out=total)


def _plain_gradients(
    grad: Tensor,
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mu: Tensor,
    sigma: Tensor,
    target_logit: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    how: tuple[float, Options, str],
    want: tuple[bool, ...],
) -> list[Tensor | None]:
    """The gradients as functions that autograd can follow, by way of all of x and the plain formula."""
    lam, options, _ = how
    inputs = [
        v
        for v, wanted in zip((h, weight, bias, mu, sigma, target_logit), want, strict=True)
        if wanted and v is not None
    ]
    with torch.enable_grad():
        x = F.linear(h, weight, bias)
        if target_logit is not None:
            x = equations.with_target_logit(x, target, target_logit, options.ignore_index)
        loss = equations.cross_entropy(x, target, mu, sigma, lam, options._replace(weight=class_weight))
        found = iter(torch.autograd.grad(loss.to(grad.dtype), inputs, grad, create_graph=True))
    return [next(found) if wanted else None for wanted in want]
