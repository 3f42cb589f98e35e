"""The last linear layer and the loss in one: x = h W^T + bias is computed one chunk of rows at a time.

A chunk goes through three matrix products, each as large as without chunks, and the loss in between:

    x = h_chunk W^T + bias        loss, dx from x and the target        dh_chunk = dx W        dW += dx^T h_chunk

so the gradients are computed together with the loss, and the backward pass only scales them by the incoming gradient.
With reduction="none" and in float16 (see `autograd`) the backward pass recomputes x, a fourth matrix product.

A chunk has as many rows as h has columns, or more, so that accumulating dW costs no more than computing it.

A margin, as that of L-softmax, changes the target's logit only: `target_logit` replaces it in x, and the gradient there
goes to `target_logit` and no further.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks, equations
from ..checks import LabelOptions, Options
from .autograd import Evaluate, Loss, apply

__all__ = ["Linear", "linear_cross_entropy", "linear_multilabel"]

# The smallest x worth splitting, in elements: 512 MiB of bfloat16 on a GPU, and what stays in the caches of a CPU.
CHUNK = {"cuda": 1 << 28, "cpu": 1 << 22}
# dW of half-precision weights is summed over chunks in float32 where that takes no more bytes than this.  Otherwise it
# is summed in the weights' own dtype, over chunks twice as large, so that few sums are rounded.
FLOAT32_SUM = 1 << 30


class Linear(NamedTuple):
    """What x is made of: linear(h, weight, bias), with the target's logit replaced by `target_logit`."""

    h: Tensor  # (N, D)
    weight: Tensor  # (C, D)
    bias: Tensor | None = None  # (C,)
    target_logit: Tensor | None = None  # (N,), where targets are class indices

    def outputs(self, target: Tensor, ignore_index: int) -> Tensor:
        """x, all rows of it."""
        x = F.linear(self.h, self.weight, self.bias)
        if self.target_logit is None:
            return x
        return equations.with_target_logit(x, target, self.target_logit, ignore_index)


def linear_cross_entropy(
    layer: Linear, target: Tensor, mu: Tensor, sigma: Tensor, lam: float, options: Options, evaluate: Evaluate
) -> Tensor:
    """Cross entropy of G-softmax on the outputs of a linear layer, chunk by chunk.

    layer: the layer and its input h; target: (N,) or (N, C); mu, sigma: (C,)
    evaluate: computes losses and gradients of a chunk of x, which it may overwrite with dx

    >>> h, weight, target = torch.eye(2), torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
    >>> mu, sigma = torch.zeros(2), torch.ones(2)
    >>> from gsoftmax.kernels import chunked
    >>> linear_cross_entropy(Linear(h, weight), target, mu, sigma, 1.0, Options(), chunked.evaluate)
    tensor(0.1565)
    """
    h, weight, *_ = layer
    checks.check_cross_entropy(h.new_empty((h.shape[0], weight.shape[0]), device="meta"), target, options)
    if options.weight is not None:
        options = Options(options.weight.contiguous(), *options[1:])
    loss = _LinearLoss(target, lam, options, evaluate)
    return apply(loss, *_cast(layer), mu.contiguous(), sigma.contiguous())


def linear_multilabel(
    layer: Linear,
    target: Tensor,
    mu: Tensor | None,
    sigma: Tensor | None,
    lam: float,
    options: LabelOptions,
    evaluate: Evaluate,
) -> Tensor:
    """The same for several labels: target is (N, L), and the reduction is not "none"."""

    def in_place(x: Tensor, *arguments: Any) -> Any:
        return evaluate(x, *arguments, out=x)

    return apply(_LinearLabelLoss(target, lam, options, in_place), *_cast(layer), mu, sigma)


def _cast(layer: Linear) -> tuple[Tensor | None, ...]:
    """The layer as autocast would cast it."""
    h, weight, bias, target_logit = layer
    if not torch.is_autocast_enabled(h.device.type):
        return layer
    dtype = torch.get_autocast_dtype(h.device.type)
    return h.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), target_logit


class _LinearLoss(Loss):
    """The inputs are h, weight, bias, target_logit, mu and sigma."""

    __slots__ = ()

    def plain(self, *inputs: Any) -> Tensor:
        x = Linear(*inputs[:4]).outputs(self.target, self.options.ignore_index)
        mu, sigma = inputs[4:]
        return equations.cross_entropy(x, self.target, mu, sigma, self.lam, self.options)

    def __call__(self, inputs: Sequence[Any], need: Sequence[bool], grad: Tensor | None = None) -> tuple[Any, ...]:
        divisor = self._divisor(inputs[1].shape[0], checks.compute_dtype(inputs[0]))
        # If every row is ignored, the loss is 0 / 0 and there is no gradient.
        factor = torch.where(divisor == 0, 0, 1 / divisor)
        if grad is not None:
            factor = grad.to(factor.dtype) * factor
        with torch.autocast(inputs[0].device.type, enabled=False):
            rows, gradients = self._all_chunks(inputs, need, factor)
        return rows if self.options.reduction == "none" else rows.sum() / divisor, *gradients

    def _divisor(self, classes: int, dtype: torch.dtype) -> Tensor:
        """What the sum over rows is divided by: for reduction="mean" the number or weight of rows."""
        target, (weight, ignore_index, reduction, _) = self.target, self.options
        if reduction != "mean" or target.is_floating_point():
            rows = target.shape[0] if reduction == "mean" else 1
            return torch.full((), rows, dtype=dtype, device=target.device)
        counts = target != ignore_index
        if weight is None:
            return counts.sum().to(dtype)
        return torch.where(counts, weight.to(dtype)[target.clamp(0, classes - 1).long()], 0).sum()

    def _each(self) -> Any:
        """The options for a chunk, whose losses are not divided."""
        weight, ignore_index, _, label_smoothing = self.options
        return Options(weight, ignore_index, "none", label_smoothing)

    def _all_chunks(
        self, inputs: Sequence[Any], need: Sequence[bool], factor: Tensor
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Losses of rows or of chunks, and the gradients of the inputs; factor: () or (N,), of every row's gradient."""
        h, weight, bias, target_logit, mu, sigma = inputs
        (n, d), c, dtype = h.shape, weight.shape[0], factor.dtype
        losses = []
        dh = torch.empty_like(h) if need[0] else None
        dweight: Tensor | None = None
        dbias = torch.zeros(c, dtype=dtype, device=h.device) if need[2] else None
        d_target_logit = torch.empty_like(target_logit) if need[3] else None
        sums = [torch.zeros_like(v) if needed else None for v, needed in zip((mu, sigma), need[4:], strict=True)]
        each, need_of_chunk = self._each(), (any(need[:4]), *need[4:])
        buffer: Tensor | None = None
        exact = 4 * c * d <= FLOAT32_SUM
        for at in _chunks(n, d if exact else 2 * d, c, h.device.type):
            if buffer is None:
                buffer = torch.empty((at.stop - at.start, c), dtype=h.dtype, device=h.device)
            x, target = buffer[: at.stop - at.start], self.target[at]
            if bias is None:
                torch.mm(h[at], weight.t(), out=x)
            else:
                torch.addmm(bias, h[at], weight.t(), out=x)
            if target_logit is not None:
                labels = equations.label_columns(target, self.options.ignore_index, c)[:, None]
                x.scatter_(1, labels, target_logit[at, None].to(x.dtype))
            grad = factor[at] if factor.ndim else factor
            loss, dx, *parts = self.evaluate(x, target, mu, sigma, self.lam, each, need_of_chunk, grad)
            losses.append(loss)
            if dx is not None:
                if target_logit is not None:
                    if d_target_logit is not None:
                        d_target_logit[at] = dx.gather(1, labels).squeeze(1)
                    dx.scatter_(1, labels, 0.0)
                if dh is not None:
                    torch.mm(dx, weight, out=dh[at])
                if need[1]:
                    dweight = add_product(dweight, dx, h[at], exact)
                if dbias is not None:
                    dbias += dx.sum(0, dtype=dtype)
            for total, part in zip(sums, parts, strict=True):
                if total is not None and part is not None:
                    total += part
        del buffer, x, dx  # dW in its own dtype takes their place
        if dweight is not None:
            dweight = dweight.to(weight.dtype)
        if dbias is not None:
            dbias = dbias.to(bias.dtype)
        return torch.stack(losses) if losses[0].ndim == 0 else torch.cat(losses), [
            dh,
            dweight,
            dbias,
            d_target_logit,
            *sums,
        ]


class _LinearLabelLoss(_LinearLoss):
    """The same for several labels; target_logit is None."""

    __slots__ = ()

    def constants(self) -> tuple[Tensor | None, ...]:
        return self.target, self.options.weight, self.options.pos_weight

    def plain(self, *inputs: Any) -> Tensor:
        h, weight, bias, _, mu, sigma = inputs
        return equations.multilabel(F.linear(h, weight, bias), self.target, mu, sigma, self.lam, self.options)

    def _divisor(self, classes: int, dtype: torch.dtype) -> Tensor:
        target, reduction = self.target, self.options.reduction
        if reduction == "mean":
            return (target != self.options.ignore_index).sum().to(dtype)
        return torch.full((), len(target) if reduction == "batchmean" else 1, dtype=dtype, device=target.device)

    def _each(self) -> Any:
        return self.options._replace(reduction="sum")


def _chunks(rows: int, features: int, classes: int, device: str) -> Iterator[slice]:
    """Rows in chunks of equal size, of x's with about CHUNK elements, and no less than W has."""
    size = min(rows, max(features, CHUNK.get(device, CHUNK["cpu"]) // classes, 1))
    parts = -(-rows // size)
    size = -(-rows // parts)
    if parts > 1 and device == "cuda":
        size = -(-size // 128) * 128  # whole tiles of a matrix product
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def add_product(total: Tensor | None, dx: Tensor, h: Tensor, exact: bool) -> Tensor:
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
