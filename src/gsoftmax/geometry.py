"""Class geometry: how tight each class's outputs are, and how far from the other classes'.

Two sources of Gaussians, the same numbers from both:

* the *learned* (mu, sigma) of a G-softmax head: `compactness`, `separability`, `ratio`, one Gaussian a class;
* the *empirical* ones of any model's outputs x: `ClassStatistics`, fed batch by batch. Over the images whose true class
  is c every output j has a mean and a standard deviation, N_(c,j): N_(c,c) is the class's own Gaussian, the rest are
  its impostors.

In the paper's words, for class c:

    compactness_c  = 1 / sigma_c
    separability_c = 1/(2(m-1)) sum_(j != c) [ KL(N_c || N_j) + KL(N_j || N_c) ]        (19), KL as in (18)
    ratio_c        = separability_c / sigma_c                                           (20)

Numbers in parentheses are the paper's equations.

Compactness and ratio change when x is merely rescaled, so a model can "improve" both by shrinking its outputs. Two
scale-free companions stand beside them: `relative_sigma` (sigma over the distance to the nearest impostor, smaller is
tighter) and `dprime` (the distance to the impostors in units of the common standard deviation, larger is better).

Everything here is float64, and every standard deviation divides by n, as NumPy's does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import equations

__all__ = [
    "ClassGeometry",
    "ClassStatistics",
    "FULL_TABLE_LIMIT",
    "compactness",
    "kl_divergence",
    "pair_separability",
    "ratio",
    "separability",
]

ArrayLike = Any  # a torch tensor, a NumPy array, or (nested) lists of numbers

# Above this many classes the m x m table (two float64 numbers an entry: 0.27 GB at 4096) gives way to the pooled form.
FULL_TABLE_LIMIT = 4096

# Elements worked on at a time: of x in `update` (128 MB a temporary, whatever the caller hands in), and of the table
# when it is read (2 MB, which stays in cache).
_CHUNK = 2**24
_BLOCK = 2**18

MEASURES = ("compactness", "separability", "ratio", "relative_sigma", "dprime")


# ---------------------------------------------------------------------------------------------------------------------
# Learned Gaussians: pure functions
# ---------------------------------------------------------------------------------------------------------------------


def kl_divergence(mu1: ArrayLike, sigma1: ArrayLike, mu2: ArrayLike, sigma2: ArrayLike) -> Any:
    """Kullback-Leibler divergence KL(N_1 || N_2) of two Gaussians (18), element by element (broadcasting).

    KL = log(sigma2/sigma1) + (sigma1^2 + (mu1 - mu2)^2) / (2 sigma2^2) - 1/2

    >>> float(kl_divergence(0.0, 1.0, 1.0, 1.0))
    0.5
    """
    (mu1, sigma1, mu2, sigma2), back = _inputs(mu1=mu1, sigma1=sigma1, mu2=mu2, sigma2=sigma2)
    # With e = sigma1/sigma2 - 1 the sigma part is e^2/2 + (e - log(1 + e)): nothing of size 1 is left to cancel.
    e = (sigma1 - sigma2) / sigma2
    return back(e * e / 2 + (e - torch.log1p(e)) + ((mu1 - mu2) / sigma2) ** 2 / 2)


def pair_separability(mu1: ArrayLike, sigma1: ArrayLike, mu2: ArrayLike, sigma2: ArrayLike) -> Any:
    """Separability of two Gaussians, (KL(N_1||N_2) + KL(N_2||N_1)) / 2, element by element (broadcasting).

    A label's own number in the multi-label case, with N_1 = N+ and N_2 = N-.

    >>> float(pair_separability(0.0, 1.0, 2.0, 1.0))
    2.0
    """
    (mu1, sigma1, mu2, sigma2), back = _inputs(mu1=mu1, sigma1=sigma1, mu2=mu2, sigma2=sigma2)
    return back(_pair_separability(mu1, sigma1, mu2, sigma2))


def compactness(sigma: ArrayLike) -> Any:
    """Compactness of each class, 1/sigma: (m,) to (m,), float64, the kind of array that came in.

    >>> compactness([0.5, 2.0])
    array([2. , 0.5])
    """
    (sigma,), back = _inputs(sigma=sigma)
    _one_dimensional(sigma=sigma)
    return back(1 / sigma)


def separability(mu: ArrayLike, sigma: ArrayLike) -> Any:
    """Separability of each of m Gaussians from the other m - 1 (19), in O(m).

    d_i = 1/(2(m-1)) sum_(j != i) [ KL(N_i || N_j) + KL(N_j || N_i) ]

    mu, sigma: (m,), tensors (a float64 tensor comes back, on the same device, differentiable) or arrays or lists (a
    float64 array comes back). With m = 1 there is nothing to be separated from, and the result is nan.

    >>> separability([0.0, 2.0], [1.0, 1.0])
    array([2., 2.])
    """
    (mu, sigma), back = _inputs(mu=mu, sigma=sigma)
    _one_dimensional(mu=mu, sigma=sigma)
    return back(_separability(mu, sigma))


def ratio(mu: ArrayLike, sigma: ArrayLike) -> Any:
    """Separability-sigma ratio of each class (20), separability/sigma: (m,), (m,) to (m,).

    >>> ratio([0.0, 2.0], [0.5, 0.5])
    array([16., 16.])
    """
    (mu, sigma), back = _inputs(mu=mu, sigma=sigma)
    _one_dimensional(mu=mu, sigma=sigma)
    return back(_separability(mu, sigma) / sigma)


def _separability(mu: Tensor, sigma: Tensor) -> Tensor:
    if mu.numel() == 1:
        return torch.full_like(mu, torch.nan)
    if mu.device.type == "cpu" and not (mu.requires_grad or sigma.requires_grad):
        # NumPy takes one core; two would be done in half the time, and wait for each other far longer than that where
        # the machine has other work.
        return torch.from_numpy(_sum_of_divergences(mu.numpy(), sigma.numpy()) / (4 * (mu.numel() - 1)))
    return _sum_of_divergences(mu, sigma) / (4 * (mu.numel() - 1))


def _sum_of_divergences(mu: Any, sigma: Any, m: int | None = None, total: Callable[[Any], Any] = lambda s: s) -> Any:
    """4 (m - 1) d of tensors or arrays (m,).

    Of m Gaussians spread over processes each gives its own, and `total` adds a number up over the processes."""
    # With v = sigma^2 and w = 1/v the logarithms of the symmetric sum cancel:
    #
    #     KL(i||j) + KL(j||i) = 1/2 [ v_i w_j + v_j w_i - 2 + (w_i + w_j)(mu_i - mu_j)^2 ],     0 for j = i,
    #
    # so the sum over j needs only V = sum v, W = sum w and moments of mu:
    #
    #     4(m-1) d_i = (v_i W + w_i V - 2m) + sum_j w_j (mu_i - mu_j)^2 + w_i sum_j (mu_i - mu_j)^2.
    #
    # Taken literally this loses every digit when the Gaussians are alike (2m is subtracted from 2m) or far from zero.
    # Both halves can be written as sums of squares.
    #
    # Means: with c = mean(mu) and c_w = sum w mu / W (the parallel-axis theorem),
    #     sum_j     (mu_i - mu_j)^2 = m (mu_i - c  )^2 + sum   (mu - c  )^2,
    #     sum_j w_j (mu_i - mu_j)^2 = W (mu_i - c_w)^2 + sum w (mu - c_w)^2.
    #
    # Deviations: let t = (V/W)^(1/4), G = sqrt(V W), r_i = sigma_i/t - t/sigma_i and q = r^2. Then
    #     v_i W = G sigma_i^2/t^2   and   w_i V = G t^2/sigma_i^2,   so   v_i W + w_i V = G (q_i + 2);
    #     sum q = V/t^2 + W t^2 - 2m = 2G - 2m,                      so   v_i W + w_i V - 2m = G q_i + sum q.
    #
    # r is computed as (sigma - t)(sigma + t)/(sigma t): where sigma is close to t the subtraction is exact.
    m = len(mu) if m is None else m
    w = 1 / (sigma * sigma)
    W, V = total(w.sum()), total((sigma * sigma).sum())
    t = (V / W) ** 0.25
    q = ((sigma - t) * (sigma + t) / (sigma * t)) ** 2
    mu = mu - total(mu.sum()) / m  # takes a common offset away; what rounding leaves of it is taken by c and c_w
    from_c = (mu - total(mu.sum()) / m) ** 2
    from_c_w = (mu - total((w * mu).sum()) / W) ** 2
    constant = total(q.sum()) + total((w * from_c_w).sum())
    return (V * W) ** 0.5 * q + constant + W * from_c_w + w * (m * from_c + total(from_c.sum()))


def _pair_separability(mu1: Tensor, sigma1: Tensor, mu2: Tensor, sigma2: Tensor) -> Tensor:
    # The same symmetric sum for one pair: 1/4 [ (sigma1/sigma2 - sigma2/sigma1)^2 + (w1 + w2)(mu1 - mu2)^2 ].
    r = (sigma1 - sigma2) * (sigma1 + sigma2) / (sigma1 * sigma2)
    d = mu1 - mu2
    return (r * r + (d / sigma1) ** 2 + (d / sigma2) ** 2) / 4


def _inputs(**named: ArrayLike) -> tuple[list[Tensor], Callable[[Tensor], Any]]:
    """The arguments as float64 tensors, checked, and the function that turns a result into the kind that came in."""
    tensors = [value for value in named.values() if isinstance(value, Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    out = []
    for name, value in named.items():
        if not isinstance(value, Tensor):
            try:
                value = torch.from_numpy(np.array(value, dtype=np.float64))
            except (TypeError, ValueError):
                raise TypeError(f"{name} must be a tensor, an array or a list of numbers, got {value!r:.60}") from None
        value = value.to(device=device, dtype=torch.float64)
        seen = value.detach()
        if not bool(torch.isfinite(seen).all()):
            raise ValueError(f"{name} must be finite, got {seen[~torch.isfinite(seen)][0].item()}")
        if name.startswith("sigma") and seen.numel() and bool(seen.min() <= 0):
            raise ValueError(f"{name} must be positive, got a minimum of {seen.min().item()}")
        out.append(value)
    return out, (lambda result: result) if tensors else (lambda result: result.numpy()[()])


def _one_dimensional(**named: Tensor) -> None:
    for name, value in named.items():
        if value.ndim != 1 or value.numel() == 0:
            raise ValueError(f"{name} must have the shape (classes,) with at least one class, got {tuple(value.shape)}")
    if len({value.shape for value in named.values()}) > 1:
        shapes = " and ".join(f"{name} {tuple(value.shape)}" for name, value in named.items())
        raise ValueError(f"mu and sigma must have one entry per class each, got {shapes}")


# ---------------------------------------------------------------------------------------------------------------------
# Empirical Gaussians: a streaming accumulator
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ClassGeometry:
    """The five measures of every class, (m,) float64 tensors on the CPU, nan where a class has none (see `left_out`).

    >>> x = torch.tensor([[2.0, 0.0], [3.0, 1.0], [0.0, 3.0], [1.0, 5.0]])
    >>> geometry = ClassStatistics(2).update(x, torch.tensor([0, 0, 1, 1])).geometry()
    >>> {name: round(value, 2) for name, value in geometry.average().items()}
    {'compactness': 1.5, 'separability': 11.94, 'ratio': 15.94, 'relative_sigma': 0.27, 'dprime': 4.21}
    """

    compactness: Tensor  # 1 / sigma
    separability: Tensor
    ratio: Tensor  # separability / sigma
    relative_sigma: Tensor  # sigma / distance from the own mean to the nearest impostor's; smaller is tighter
    dprime: Tensor  # mean over impostors of (own mean - impostor's) / sqrt((sigma^2 + sigma_impostor^2)/2)
    count: Tensor  # (m,) images of the class (multi-label: images that have the label)
    pooled: bool
    multilabel: bool
    left_out: dict[int, str] = field(default_factory=dict)

    def average(self) -> dict[str, float]:
        """Mean of each measure over the classes that have it; nan if none has."""
        return {name: float(getattr(self, name).nanmean()) for name in MEASURES}

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


class ClassStatistics:
    """Count, mean and standard deviation of the outputs per true class, in one pass over batches.

    Each batch's means and centred second moments are merged by Chan's formula, so the result does not depend on how
    the data was cut, nor on a common offset of x. Three forms, with what `count`, `mean` and `std` hold:

    * single label: row c, column j is N_(c,j), output j over the images of class c. count (m,), mean and std (m, m).
    * single label, pooled (above `FULL_TABLE_LIMIT` classes, or `pooled=True`): row c is the class's own Gaussian
      N_(c,c) and ONE Gaussian of all its impostor outputs together. (m, 2) each. Separability is then that of this
      one pair: a different number from the mean over impostors.
    * multi-label: x is x+ (images, labels), y is 0 or 1; row l is N+ over the images that have the label and N- over
      those that have not. (m, 2) each.

    Nothing waits for the GPU in `update`; labels and values are checked when they are on the CPU.

    >>> x = torch.tensor([[2.0, 0.0], [3.0, 1.0], [0.0, 3.0], [1.0, 5.0]])
    >>> statistics = ClassStatistics(2).update(x[:2], torch.tensor([0, 0])).update(x[2:], torch.tensor([1, 1]))
    >>> statistics
    ClassStatistics(num_classes=2, multilabel=False, pooled=False, count=4)
    >>> statistics.mean.tolist(), statistics.std.tolist()
    ([[2.5, 0.5], [0.5, 4.0]], [[0.5, 0.5], [0.5, 1.0]])
    >>> statistics.compactness().tolist()
    [2.0, 1.0]
    """

    def __init__(
        self,
        num_classes: int,
        *,
        multilabel: bool = False,
        pooled: bool | None = None,
        ignore_index: int = -100,
        device: torch.device | str | None = None,
    ) -> None:
        if not isinstance(num_classes, int) or isinstance(num_classes, bool) or num_classes < 1:
            raise ValueError(f"num_classes must be a positive integer, got {num_classes!r}")
        if multilabel and pooled:
            raise ValueError("pooled must be None or False with multilabel=True (two Gaussians a label), got True")
        if pooled is None:
            pooled = not multilabel and num_classes > FULL_TABLE_LIMIT
            if pooled:
                warnings.warn(
                    f"{num_classes} classes are more than {FULL_TABLE_LIMIT}: impostors are pooled into one Gaussian a "
                    "class instead of the full table (pooled=True says so silently, pooled=False keeps the table)",
                    UserWarning,
                    stacklevel=2,
                )
        self.num_classes = num_classes
        self.multilabel = bool(multilabel)
        self.pooled = bool(pooled)
        self.ignore_index = ignore_index
        self._device = None if device is None else torch.device(device)
        self._synced = False
        # All state is one float64 table of [counts | means | m2], m2 the sum of squared distances from the mean; counts
        # below 2^53 are exact. Rows are classes plus one spare row, where left-out entries go: it stays at count 0 and
        # is never read. A class has a mean per output and one count for all (full table), or a mean and a count for its
        # own Gaussian and for the others' (pooled, multi-label).
        self._outputs = num_classes  # columns of x; fewer where the classes are spread over processes
        self._columns = 2 if self.multilabel or self.pooled else num_classes
        self._counts = 2 if self.multilabel or self.pooled else 1
        self._table: Tensor | None = None  # (m + 1, counts + 2 columns), on the device of the first x

    # -- feeding ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self, x: ArrayLike, y: ArrayLike) -> ClassStatistics:
        """Take in a batch: x (N, C) or (N, C, d1, ...) of any float type; y (N,) or (N, d1, ...) class indices, or, in
        the multi-label case, 0/1 in the shape of x. Entries of y equal to `ignore_index` are left out."""
        if self._synced:
            raise RuntimeError("update after sync would count data twice: start a new ClassStatistics")
        x, y = self._flat(x, y)
        self._table = self._allocated(x.device)
        x, y = x.to(self._table.device), y.to(self._table.device)
        images = max(1, _CHUNK // max(1, self._outputs))
        for part, labels in zip(x.split(images), y.split(images), strict=True):
            if part.shape[0]:
                batch = self._multilabel_moments if self.multilabel else self._grouped_moments
                rows, moments = batch(part, labels)
                self._table.index_copy_(0, rows, _chan(self._table[rows], moments, self._counts))
        return self

    def merge(self, other: ClassStatistics) -> ClassStatistics:
        """Take in what another accumulator of the same kind has seen; any order gives the same result to rounding."""
        if not isinstance(other, ClassStatistics):
            raise TypeError(f"other must be a ClassStatistics, got {type(other).__name__}")
        if (self.num_classes, self._form) != (other.num_classes, other._form):
            raise ValueError(f"other must be of the same kind, {self!r}, got {other!r}")
        if other._table is not None:
            mine = self._allocated(other._table.device)
            self._table = _chan(mine, other._table.to(mine.device), self._counts)
        return self

    def sync(self, group: Any = None) -> ClassStatistics:
        """Merge the statistics of all processes of torch.distributed, in rank order: afterwards every process holds
        the same numbers, those of all the data. Once, after the last update; without processes it does nothing."""
        dist = torch.distributed
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
            return self
        if self._synced:
            raise RuntimeError("sync was called before: a second one would count data twice")
        mine = self._allocated(torch.device("cpu"))
        home = mine.device
        there = {"nccl": torch.device("cuda"), "gloo": torch.device("cpu")}.get(dist.get_backend(group), home)
        mine = mine.to(there)
        # One process's table at a time: the memory of three tables, not of as many as there are processes.
        total: Tensor | None = None
        for rank in range(dist.get_world_size(group)):
            theirs = mine if rank == dist.get_rank(group) else torch.empty_like(mine)
            dist.broadcast(theirs, src=rank if group is None else dist.get_global_rank(group, rank), group=group)
            total = theirs if total is None else _chan(total, theirs, self._counts)
        assert total is not None
        self._table = total.to(home)
        self._synced = True
        return self

    def _flat(self, x: ArrayLike, y: ArrayLike) -> tuple[Tensor, Tensor]:
        """x as (N, C) and y as (N,) or (N, C), checked."""
        x = x.detach() if isinstance(x, Tensor) else torch.as_tensor(np.asarray(x))
        y = y.detach() if isinstance(y, Tensor) else torch.as_tensor(np.asarray(y))
        m, outputs = self.num_classes, self._outputs
        if not x.is_floating_point():
            raise TypeError(f"x must be floating point, got {x.dtype}")
        if x.ndim < 2 or x.shape[1] != outputs:
            raise ValueError(f"x must have the shape (N, {outputs}) or (N, {outputs}, d1, ...), got {tuple(x.shape)}")
        expected = x.shape if self.multilabel else x.shape[:1] + x.shape[2:]
        if y.shape != expected:
            raise ValueError(f"y must have the shape {tuple(expected)} beside x {tuple(x.shape)}, got {tuple(y.shape)}")
        if not self.multilabel and (y.is_floating_point() or y.is_complex() or y.dtype == torch.bool):
            raise TypeError(f"y must hold integer class indices, got {y.dtype}")
        x = x.movedim(1, -1).reshape(y.numel() // (m if self.multilabel else 1), outputs)
        y = y.movedim(1, -1).reshape(-1, m) if self.multilabel else y.reshape(-1).long()
        ignored = y == self.ignore_index
        if y.device.type == "cpu":
            wrong = ~ignored & ((y != 0) & (y != 1) if self.multilabel else (y < 0) | (y >= m))
            if bool(wrong.any()):
                what = "0 or 1" if self.multilabel else f"in 0 to {m - 1}"
                raise ValueError(f"y must be {what} (or ignore_index {self.ignore_index}), got {y[wrong][0].item()}")
        if x.device.type == "cpu":
            used = torch.isfinite(x).logical_or_((ignored if self.multilabel else ignored[:, None]).cpu())
            if not bool(used.all()):
                row, column = (~used).nonzero()[0].tolist()
                raise ValueError(f"x must be finite, got {x[row, column].item()} in row {row}, output {column}")
        if x.device.type == "mps":  # has no float64
            x = x.cpu()
        return x, y.to(x.device)

    def _grouped_moments(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of the classes in the batch, and their moments as such a table, without asking the device (which
        would make the host wait) what classes these are."""
        m = self.num_classes
        batch = x.shape[0]
        # On a GPU a label out of range isn't caught by the host: sent to row m + 1 it trips the device's own check.
        outside = (y < 0) | (y >= m)
        y = torch.where(y == self.ignore_index, m, torch.where(outside, m + 1, y))
        y, order = torch.sort(y, stable=True)
        ignored = (y == m)[:, None]
        x = x[order].double().masked_fill_(ignored, 0.0)  # (batch, classes)
        if self.pooled:
            x, within, weight = self._pool(x, y.clamp(max=m - 1))  # (batch, 2) each
            x, within = x.masked_fill_(ignored, 0.0), within.masked_fill_(ignored, 0.0)
        # Images of one class are neighbours now and form a group; there are at most `slots` of them.
        group = torch.zeros_like(y)
        group[1:] = (y[1:] != y[:-1]).cumsum(0)
        slots = min(batch, m + 1)
        edges = torch.searchsorted(group, torch.arange(slots + 1, device=y.device))
        first = edges[:-1].clamp(max=batch - 1)
        rows = torch.where(edges.diff() > 0, y[first], m)  # the class of each group; unused slots go to the spare row
        n = torch.where(rows == m, 0, edges.diff())[:, None]
        # Distances from the group's first image: outputs that never vary then have a deviation of exactly zero.
        pivot = x[first]
        x -= pivot[group]
        # index_put_ adds float64 in a fixed order on CPU and GPU alike (index_add_ does not on a GPU).
        zero = torch.zeros_like(pivot)
        mean = zero.clone().index_put_((group,), x, accumulate=True) / n.clamp(min=1)
        squares = x.sub_(mean[group]).square_()
        if self.pooled:
            squares = weight * squares + within
            n = n * weight[first]
        m2 = zero.index_put_((group,), squares, accumulate=True)
        return rows, torch.cat([n, pivot + mean, m2], dim=1)

    def _pool(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _own_and_impostors(x, y)

    def _multilabel_moments(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """All rows, and the moments of N+ (column 0) and N- (column 1) of every label in the batch."""
        x = x.double()  # (batch, labels)
        keep = y != self.ignore_index
        sides = []
        for side in (1, 0):
            mask = keep & (y == side)
            n = mask.sum(0)
            pivot = x.gather(0, mask.byte().argmax(0, keepdim=True))  # the side's first image
            d = torch.where(mask, x - pivot, 0.0)
            mean = d.sum(0) / n.clamp(min=1)
            m2 = torch.where(mask, d - mean, 0.0).square().sum(0)
            sides.append((n, torch.where(n > 0, pivot[0] + mean, 0.0), m2))
        moments = torch.cat([torch.stack(pair, dim=1) for pair in zip(*sides, strict=True)], dim=1)
        return torch.arange(self.num_classes, device=x.device), moments

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def _form(self) -> int:
        return 2 if self.multilabel else int(self.pooled)

    def _allocated(self, device: torch.device) -> Tensor:
        """The table, made on `device` (unless another was asked for at construction) when there is none yet."""
        if self._table is not None:
            return self._table
        shape = self.num_classes + 1, self._counts + 2 * self._columns
        return torch.zeros(shape, dtype=torch.float64, device=self._device or device)

    def _state(self) -> tuple[Tensor, ...]:
        """count (m, 1 or 2), mean (m, columns), m2 (m, columns): views of the table without the spare row."""
        return self._allocated(torch.device("cpu"))[:-1].split([self._counts, self._columns, self._columns], dim=1)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything seen so far as plain tensors (copies): form (0 full, 1 pooled, 2 multi-label), count, mean, m2."""
        n, mean, m2 = self._state()
        parts = {"count": n.long(), "mean": mean, "m2": m2}
        return {"form": torch.tensor(self._form)} | {name: part.clone().contiguous() for name, part in parts.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> ClassStatistics:
        """Replace what has been seen by what `state_dict` gave."""
        missing = {"form", "count", "mean", "m2"} - set(state)
        if missing:
            raise ValueError(f"state must have form, count, mean and m2, got no {', '.join(sorted(missing))}")
        if int(state["form"]) != self._form:
            kinds = "0 full, 1 pooled, 2 multi-label"
            raise ValueError(f"state must be of form {self._form} ({kinds}), got {int(state['form'])}")
        for name, expected in zip(("count", "mean", "m2"), self._state(), strict=True):
            if state[name].shape != expected.shape:
                raise ValueError(f"{name} must have the shape {tuple(expected.shape)}, got {tuple(state[name].shape)}")
        rows = torch.cat([state["count"].double(), state["mean"].double(), state["m2"].double()], dim=1)
        table = self._allocated(rows.device).clone()
        table[:-1] = rows
        self._table = table
        return self

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    def count(self) -> Tensor:
        """Images per class, (m,) int64; pooled and multi-label (m, 2): own Gaussian, the others'."""
        n = self._state()[0].long()
        return n[:, 0] if self._counts == 1 else n

    @property
    def mean(self) -> Tensor:
        """Means, (m, m) or (m, 2), float64; nan without examples."""
        n, mean, _ = self._state()
        return torch.where(n > 0, mean, torch.nan)

    @property
    def std(self) -> Tensor:
        """Standard deviations (dividing by n), (m, m) or (m, 2), float64; nan without examples, 0 with one."""
        n, _, m2 = self._state()
        return (m2 / n).sqrt()  # 0/0 is nan

    def compactness(self) -> Tensor:
        """(m,) 1/sigma of each class's own Gaussian."""
        return self._measures()["compactness"]

    def separability(self) -> Tensor:
        """(m,) mean symmetric divergence between each class's own Gaussian and its impostors'."""
        return self._measures()["separability"]

    def ratio(self) -> Tensor:
        """(m,) separability/sigma."""
        return self._measures()["ratio"]

    def relative_sigma(self) -> Tensor:
        """(m,) own sigma / |own mean - nearest impostor's mean|: scale-free, smaller is tighter."""
        return self._measures()["relative_sigma"]

    def dprime(self) -> Tensor:
        """(m,) mean over impostors of (own mean - impostor's mean)/sqrt((sigma^2 + sigma_impostor^2)/2): scale-free."""
        return self._measures()["dprime"]

    def left_out(self) -> dict[int, str]:
        """The classes for which a measure is nan (so that averages pass over them), and why."""
        return self._reasons(*self._read()[1])

    def _reasons(self, *troubles: Tensor) -> dict[int, str]:
        own_count, other_count, own_std, constant, broken = (part.tolist() for part in troubles)
        missing = "images without the label" if self.multilabel else "impostor outputs"
        reasons: dict[int, str] = {}
        for c in range(self.num_classes):
            if own_count[c] < 2:
                seen = int(own_count[c])
                reasons[c] = f"{seen or 'no'} example{'' if seen == 1 else 's'}, at least 2 are needed"
            elif broken[c]:
                reasons[c] = "nan or inf among its outputs"
            elif own_std[c] == 0:
                reasons[c] = "its own output never varies (sigma is 0)"
            elif other_count[c] < 2:
                reasons[c] = f"fewer than 2 {missing}: compactness only"
            elif constant[c] >= 0:
                which = f"output {int(constant[c])}" if self._form == 0 else f"the output over its {missing}"
                reasons[c] = f"{which} never varies (sigma is 0): no separability and ratio"
        return reasons

    def geometry(self) -> ClassGeometry:
        """All five measures, the counts and what was left out, as one frozen result on the CPU."""
        measures, troubles = self._read()
        return ClassGeometry(
            **{name: value.cpu() for name, value in measures.items()},
            count=self._state()[0][:, 0].long().cpu(),
            pooled=self.pooled,
            multilabel=self.multilabel,
            left_out=self._reasons(*troubles),
        )

    def _measures(self) -> dict[str, Tensor]:
        return self._read()[0]

    def _read(self) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        """The five measures, and what may stand in their way, (m,) each: the own count, the others' count, the own std,
        the first output whose std is 0 (or -1), whether anything is not finite."""
        n = self._state()[0]
        own_std, divergence, dprime, nearest, constant, broken = self._scan()
        own_count = n[:, 0]
        other_count = n[:, 0] * (self.num_classes - 1) if self._form == 0 else n[:, 1]
        own = (own_count >= 2) & (own_std > 0) & ~broken
        others = own & (other_count >= 2)  # the impostors have a mean
        spread = others & (constant < 0)  # and a deviation
        compact = torch.where(own, 1 / own_std, torch.nan)
        separable = torch.where(spread, divergence, torch.nan)
        measures = {
            "compactness": compact,
            "separability": separable,
            "ratio": separable * compact,
            "relative_sigma": torch.where(others, own_std / nearest, torch.nan),
            "dprime": torch.where(others, dprime, torch.nan),
        }
        return measures, (own_count.long(), other_count.long(), own_std, constant, broken)

    def _scan(self) -> tuple[Tensor, ...]:
        """`_read_rows` of all classes, a block of rows at a time."""
        n, mean, m2 = self._state()
        rows = max(1, _BLOCK // self._columns)
        blocks = [
            self._read_rows(start, n[start : start + rows], mean[start : start + rows], m2[start : start + rows])
            for start in range(0, self.num_classes, rows)
        ]
        return tuple(torch.cat(part) for part in zip(*blocks, strict=True))

    def _read_rows(self, start: int, n: Tensor, mu: Tensor, m2: Tensor) -> tuple[Tensor, ...]:
        """(rows,) each, of the classes from `start` on: own std, mean divergence from the impostors, mean d', distance
        to the nearest impostor, first output whose std is 0 (or -1), whether anything is not finite."""
        sigma = (m2 / n).sqrt()  # 0/0 is nan, in rows without examples
        # The class's own column: the diagonal, or the first. It is its own impostor at distance 0 and adds nothing.
        own = (lambda table: table.diagonal(start)) if self._form == 0 else (lambda table: table[:, 0])
        mu_c, sigma_c = own(mu)[:, None], own(sigma)[:, None]
        d = mu_c - mu
        impostors = max(1, self._columns - 1)
        divergence = _pair_separability(mu_c, sigma_c, mu, sigma).sum(1) / impostors
        dprime = (d / ((sigma_c**2 + sigma**2) / 2).sqrt()).sum(1) / impostors
        distance = d.abs()
        own(distance).fill_(torch.inf)
        zero = sigma == 0
        constant = torch.where(zero.any(1), zero.byte().argmax(1), -1)
        broken = ~(torch.isfinite(mu) & torch.isfinite(sigma) | (n == 0)).all(1)
        return sigma_c[:, 0], divergence, dprime, distance.amin(1), constant, broken

    def __repr__(self) -> str:
        seen = int(self._state()[0][:, 0].sum())
        return (
            f"ClassStatistics(num_classes={self.num_classes}, multilabel={self.multilabel}, pooled={self.pooled}, "
            f"count={seen})"
        )


def _own_and_impostors(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each image's own output beside the mean of its impostor outputs, (batch, 2); the squared distances of the outputs
    behind each from it, (batch, 2); and how many outputs stand behind each, (batch, 2)."""
    impostors = x.shape[1] - 1
    own = x.gather(1, y[:, None])
    rest = x.scatter(1, y[:, None], 0.0)
    # Measured from one impostor's value, so that outputs which never vary have exactly no spread.
    pivot = torch.where(y == 0, x[:, min(1, impostors)], x[:, 0])[:, None]
    mean = (rest - pivot).scatter_(1, y[:, None], 0.0).sum(1, keepdim=True) / max(impostors, 1)
    m2 = (rest - pivot - mean).scatter_(1, y[:, None], 0.0).square().sum(1, keepdim=True)
    weight = torch.cat([x.new_ones(1), x.new_full((1,), impostors)])
    return torch.cat([own, pivot + mean], 1), torch.cat([torch.zeros_like(own), m2], 1), weight.expand(len(x), 2)


def _chan(a: Tensor, b: Tensor, counts: int) -> Tensor:
    """Two tables of [counts | means | m2] as one, as if from one sample."""
    widths = [counts] + [(a.shape[1] - counts) // 2] * 2
    return torch.cat(equations.merge_moments(a.split(widths, dim=1), b.split(widths, dim=1)), dim=1)
