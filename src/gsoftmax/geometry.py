"""Class geometry: how compact each class's outputs are, and how far from those of the other classes.

Two sources of Gaussians give the same measures:

* the *learned* (mu, sigma) of a G-softmax head, one Gaussian per class: `compactness`, `separability`, `ratio`;
* the *empirical* ones of any model's outputs x: `ClassStatistics`, updated batch by batch. Output j over the images of
  class c has a mean and a standard deviation, N_(c,j): N_(c,c) is the class's own Gaussian, the rest are its impostors.

As in the paper (equation numbers in parentheses), for class c:

    compactness_c  = 1 / sigma_c
    separability_c = 1/(2(m-1)) sum_(j != c) [ KL(N_c || N_j) + KL(N_j || N_c) ]        (19), KL as in (18)
    ratio_c        = separability_c / sigma_c                                           (20)

Compactness and ratio depend on the scale of x, so a model can "improve" both by shrinking its outputs. Two
scale-free measures complement them: `relative_sigma` (sigma over the distance to the nearest impostor, smaller is
tighter) and `dprime` (the distance to the impostors in units of the common standard deviation, larger is better).

Everything is float64, and standard deviations divide by n, as NumPy's do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
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

# Above this many classes pooled statistics replace the m x m table (two float64 numbers per entry: 0.27 GB at 4096).
FULL_TABLE_LIMIT = 4096

# Elements processed at a time: of x in `update` (128 MB per temporary, however large the batch), and of the table when
# it is read (2 MB, which stays in cache).
CHUNK = 2**24
BLOCK = 2**18

MEASURES = ("compactness", "separability", "ratio", "relative_sigma", "dprime")


def kl_divergence(mu1: ArrayLike, sigma1: ArrayLike, mu2: ArrayLike, sigma2: ArrayLike) -> Any:
    """Kullback-Leibler divergence KL(N_1 || N_2) of two Gaussians (18), element by element.

    mu1, sigma1, mu2, sigma2: numbers, arrays or tensors of shapes that broadcast

    KL = log(sigma2/sigma1) + (sigma1^2 + (mu1 - mu2)^2) / (2 sigma2^2) - 1/2

    >>> float(kl_divergence(0.0, 1.0, 1.0, 1.0))
    0.5
    """
    (mu1, sigma1, mu2, sigma2), back = float64_inputs(mu1=mu1, sigma1=sigma1, mu2=mu2, sigma2=sigma2)
    # With e = sigma1/sigma2 - 1 the sigma part is e^2/2 + (e - log(1 + e)): nothing of size 1 is left to cancel.
    e = (sigma1 - sigma2) / sigma2
    return back(e * e / 2 + (e - torch.log1p(e)) + ((mu1 - mu2) / sigma2) ** 2 / 2)


def pair_separability(mu1: ArrayLike, sigma1: ArrayLike, mu2: ArrayLike, sigma2: ArrayLike) -> Any:
    """Separability of two Gaussians, (KL(N_1||N_2) + KL(N_2||N_1)) / 2, element by element.

    In the multi-label case this is a label's separability, with N_1 = N+ and N_2 = N-. Arguments as in `kl_divergence`.

    >>> float(pair_separability(0.0, 1.0, 2.0, 1.0))
    2.0
    """
    inputs, back = float64_inputs(mu1=mu1, sigma1=sigma1, mu2=mu2, sigma2=sigma2)
    return back(_pair_separability(*inputs))


def compactness(sigma: ArrayLike) -> Any:
    """Compactness of each class, 1/sigma, (m,) float64.

    sigma: (m,), a tensor (a tensor is returned) or an array or list (an array is returned)

    >>> compactness([0.5, 2.0])
    array([2. , 0.5])
    """
    (sigma,), back = float64_inputs(per_class=True, sigma=sigma)
    return back(1 / sigma)


def separability(mu: ArrayLike, sigma: ArrayLike) -> Any:
    """Separability of each of m Gaussians from the other m - 1 (19), in O(m): (m,), differentiable; nan if m = 1.

    mu, sigma: (m,), tensors (a tensor on the same device is returned) or arrays or lists (an array is returned)

    >>> separability([0.0, 2.0], [1.0, 1.0])
    array([2., 2.])
    """
    (mu, sigma), back = float64_inputs(per_class=True, mu=mu, sigma=sigma)
    return back(mean_divergence(mu, sigma))


def ratio(mu: ArrayLike, sigma: ArrayLike) -> Any:
    """Separability-sigma ratio of each class (20), separability/sigma: (m,), arguments as in `separability`.

    >>> ratio([0.0, 2.0], [0.5, 0.5])
    array([16., 16.])
    """
    (mu, sigma), back = float64_inputs(per_class=True, mu=mu, sigma=sigma)
    return back(mean_divergence(mu, sigma) / sigma)


def mean_divergence(
    mu: Tensor, sigma: Tensor, m: int | None = None, total: Callable[[Tensor], Tensor] = lambda part: part
) -> Tensor:
    """d of float64 tensors (m,). If the m Gaussians are distributed over processes, `total` sums over these."""
    # With v = sigma^2 and w = 1/v the logarithms of the symmetric sum cancel:
    #
    #     KL(i||j) + KL(j||i) = 1/2 [ v_i w_j + v_j w_i - 2 + (w_i + w_j)(mu_i - mu_j)^2 ],     0 for j = i,
    #
    # so the sum over j needs only V = sum v, W = sum w and moments of mu:
    #
    #     4(m-1) d_i = (v_i W + w_i V - 2m) + sum_j w_j (mu_i - mu_j)^2 + w_i sum_j (mu_i - mu_j)^2.
    #
    # Computed literally this loses all digits when the Gaussians are similar (2m - 2m) or far from zero. Both halves
    # can be written as sums of squares.
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
    if m == 1:
        return torch.full_like(mu, torch.nan)
    w = 1 / (sigma * sigma)
    W, V = total(w.sum()), total((sigma * sigma).sum())
    t = (V / W) ** 0.25
    q = ((sigma - t) * (sigma + t) / (sigma * t)) ** 2
    mu = mu - total(mu.sum()) / m  # removes a common offset; c and c_w remove its rounding error
    from_c = (mu - total(mu.sum()) / m) ** 2
    from_c_w = (mu - total((w * mu).sum()) / W) ** 2
    constant = total(q.sum()) + total((w * from_c_w).sum())
    return ((V * W) ** 0.5 * q + constant + W * from_c_w + w * (m * from_c + total(from_c.sum()))) / (4 * (m - 1))


def _pair_separability(mu1: Tensor, sigma1: Tensor, mu2: Tensor, sigma2: Tensor) -> Tensor:
    # The same symmetric sum for one pair: 1/4 [ (sigma1/sigma2 - sigma2/sigma1)^2 + (w1 + w2)(mu1 - mu2)^2 ].
    r = (sigma1 - sigma2) * (sigma1 + sigma2) / (sigma1 * sigma2)
    d = mu1 - mu2
    return (r * r + (d / sigma1) ** 2 + (d / sigma2) ** 2) / 4


def float64_inputs(per_class: bool = False, **named: ArrayLike) -> tuple[list[Tensor], Callable[[Tensor], Any]]:
    """The arguments as float64 tensors, checked, and a function that converts a result to the type of the arguments.

    per_class: they must have the shape (m,), the same m for all
    """
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
        if per_class and (value.ndim != 1 or value.numel() == 0):
            raise ValueError(f"{name} must have the shape (classes,) with at least one class, got {tuple(value.shape)}")
        out.append(value)
    if per_class and len({value.shape for value in out}) > 1:
        shapes = " and ".join(f"{name} {tuple(value.shape)}" for name, value in zip(named, out, strict=True))
        raise ValueError(f"mu and sigma must have one entry per class each, got {shapes}")
    return out, (lambda result: result) if tensors else (lambda result: result.numpy()[()])


@dataclass(frozen=True, eq=False)
class ClassGeometry:
    """The five measures of every class, (m,) float64 tensors on the CPU, nan where undefined (see `left_out`).

    >>> x = torch.tensor([[2.0, 0.0], [3.0, 1.0], [0.0, 3.0], [1.0, 5.0]])
    >>> geometry = ClassStatistics(2).update(x, torch.tensor([0, 0, 1, 1])).geometry()
    >>> {name: round(value, 2) for name, value in geometry.average().items()}
    {'compactness': 1.5, 'separability': 11.94, 'ratio': 15.94, 'relative_sigma': 0.27, 'dprime': 4.21}
    """

    compactness: Tensor  # 1 / sigma
    separability: Tensor  # mean symmetric divergence between the class's own Gaussian and its impostors'
    ratio: Tensor  # separability / sigma
    relative_sigma: Tensor  # sigma / |own mean - nearest impostor's mean|: scale-free, smaller is tighter
    dprime: Tensor  # mean over impostors of (own mean - impostor's) / sqrt((sigma^2 + sigma_impostor^2)/2): scale-free
    count: Tensor  # (m,) images of the class (multi-label: images that have the label)
    pooled: bool  # impostors were pooled into one Gaussian per class
    multilabel: bool  # two Gaussians per label
    left_out: dict[int, str] = field(default_factory=dict)  # classes without a measure, which averages skip, and why

    def average(self) -> dict[str, float]:
        """Mean of each measure over the classes that have it; nan if none has."""
        return {name: float(getattr(self, name).nanmean()) for name in MEASURES}


class ClassStatistics:
    """Count, mean and standard deviation of the outputs per true class, in one pass over batches.

    Batches are merged by Chan's formula, so the result depends neither on the batch boundaries nor on a common offset
    of x. Three forms, with what `count`, `mean` and `std` contain:

    * single label: row c, column j is N_(c,j), output j over the images of class c. count (m,), mean and std (m, m).
    * single label, pooled: row c is the class's own Gaussian N_(c,c) and ONE Gaussian of all its impostor outputs.
      (m, 2) each. Separability is then that of this pair: a different number from the mean over impostors.
    * multi-label: x is x+ (images, labels), y is 0 or 1; row l is N+ over the images that have the label and N- over
      those that do not. (m, 2) each.

    num_classes: m, of classes or labels
    multilabel: two Gaussians per label
    pooled: one Gaussian for all impostors of a class; by default above `FULL_TABLE_LIMIT` classes
    ignore_index: entries of y equal to it are left out
    device: of the statistics; by default that of the first x

    `update` does not synchronize with a GPU; labels and values are checked when they are on the CPU.

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
            raise ValueError("pooled must be None or False with multilabel=True (two Gaussians per label), got True")
        if pooled is None:
            pooled = not multilabel and num_classes > FULL_TABLE_LIMIT
            if pooled:
                warnings.warn(
                    f"{num_classes} classes are more than {FULL_TABLE_LIMIT}: impostors are pooled into one Gaussian "
                    "per class (pooled=True silences this warning, pooled=False keeps the full table)",
                    UserWarning,
                    stacklevel=2,
                )
        self.num_classes = num_classes
        self.multilabel = bool(multilabel)
        self.pooled = bool(pooled)
        self.ignore_index = ignore_index
        self._device = None if device is None else torch.device(device)
        self._synced = False
        # All state is one float64 table of [counts | means | m2], m2 the sum of squared deviations; counts below 2^53
        # are exact. Rows are classes and a spare row for left-out entries, which stays at count 0 and is never read. A
        # class has a mean per output and one count for all (full table), or a mean and a count for its own Gaussian and
        # for the others' (pooled, multi-label).
        self.first_output, self.outputs = 0, num_classes  # columns of x; fewer where classes are sharded over processes
        self.columns, self.counts = (2, 2) if self.multilabel or self.pooled else (num_classes, 1)
        self.table: Tensor | None = None  # (m + 1, counts + 2 columns), on the device of the first x

    @torch.no_grad()
    def update(self, x: ArrayLike, y: ArrayLike) -> ClassStatistics:
        """Add a batch.

        x: (N, C) or (N, C, d1, ...) outputs of any float type
        y: (N,) or (N, d1, ...) class indices, or, in the multi-label case, 0/1 in the shape of x
        """
        if self._synced:
            raise RuntimeError("update after sync would count data twice: start a new ClassStatistics")
        x, y = self.check_batch(x, y)
        self.table = self.allocated(x.device)
        x, y = x.to(self.table.device), y.to(self.table.device)
        images = max(1, CHUNK // max(1, self.outputs))
        moments_of = self._multilabel_moments if self.multilabel else self._grouped_moments
        for part, labels in zip(x.split(images), y.split(images), strict=True):
            if part.shape[0]:
                rows, moments = moments_of(part, labels)
                self.table.index_copy_(0, rows, merge_tables(self.table[rows], moments, self.counts))
        return self

    def merge(self, other: ClassStatistics) -> ClassStatistics:
        """Add what another accumulator has seen; any order gives the same result up to rounding.

        other: of the same number of classes and the same form
        """
        if not isinstance(other, ClassStatistics):
            raise TypeError(f"other must be a ClassStatistics, got {type(other).__name__}")
        if (self.num_classes, self._form) != (other.num_classes, other._form):
            raise ValueError(f"other must be of the same kind, {self!r}, got {other!r}")
        if other.table is not None:
            mine = self.allocated(other.table.device)
            self.table = merge_tables(mine, other.table.to(mine.device), self.counts)
        return self

    def sync(self, group: Any = None) -> ClassStatistics:
        """Merge the statistics of all processes, in rank order, so that each has the numbers of all the data. Call it
        once, after the last update; without torch.distributed it does nothing.

        group: a process group; by default all processes
        """
        dist = torch.distributed
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
            return self
        if self._synced:
            raise RuntimeError("sync was called before: a second one would count data twice")
        mine = self.allocated(torch.device("cpu"))
        home = mine.device
        there = {"nccl": torch.device("cuda"), "gloo": torch.device("cpu")}.get(dist.get_backend(group), home)
        mine = mine.to(there)
        # One process's table at a time: memory for three tables, however many processes there are.
        total: Tensor | None = None
        for rank in range(dist.get_world_size(group)):
            theirs = mine if rank == dist.get_rank(group) else torch.empty_like(mine)
            dist.broadcast(theirs, src=rank if group is None else dist.get_global_rank(group, rank), group=group)
            total = theirs if total is None else merge_tables(total, theirs, self.counts)
        assert total is not None
        self.table = total.to(home)
        self._synced = True
        return self

    def check_batch(self, x: ArrayLike, y: ArrayLike) -> tuple[Tensor, Tensor]:
        """The batch, checked, as (N, C) outputs and (N,) or (N, C) labels.

        x, y: as given to `update`
        """
        x = x.detach() if isinstance(x, Tensor) else torch.as_tensor(np.asarray(x))
        y = y.detach() if isinstance(y, Tensor) else torch.as_tensor(np.asarray(y))
        m, outputs = self.num_classes, self.outputs
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
        """The table's rows of the classes in the batch, and their moments, without a device synchronization."""
        m, batch = self.num_classes, x.shape[0]
        # On a GPU the host does not check labels: one out of range is sent to row m + 1 and trips the device's check.
        outside = (y < 0) | (y >= m)
        y = torch.where(y == self.ignore_index, m, torch.where(outside, m + 1, y))
        y, order = torch.sort(y, stable=True)
        ignored = (y == m)[:, None]
        x = x[order].double().masked_fill_(ignored, 0.0)  # (batch, classes)
        if self.pooled:
            x, within, weight = own_and_impostors(x, y.clamp(max=m - 1) - self.first_output)  # (batch, 2) each
            x, within = x.masked_fill_(ignored, 0.0), within.masked_fill_(ignored, 0.0)
        # Images of one class are neighbours now and form a group; there are at most `slots` of them.
        group = torch.zeros_like(y)
        group[1:] = (y[1:] != y[:-1]).cumsum(0)
        slots = min(batch, m + 1)
        edges = torch.searchsorted(group, torch.arange(slots + 1, device=y.device))
        first = edges[:-1].clamp(max=batch - 1)
        rows = torch.where(edges.diff() > 0, y[first], m)  # the class of each group; unused slots go to the spare row
        n = torch.where(rows == m, 0, edges.diff())[:, None]
        # Deviations from the group's first image: the deviation of a constant output is then exactly zero.
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

    def _multilabel_moments(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """All rows of the table, and the moments of N+ (column 0) and N- (column 1) of every label in the batch."""
        x, used = x.double(), y != self.ignore_index  # (batch, labels)
        sides = [masked_moments(x, used & (y == side), 0) for side in (1, 0)]
        moments = torch.cat([part for pair in zip(*sides, strict=True) for part in pair]).T
        return torch.arange(self.num_classes, device=x.device), moments

    @property
    def _form(self) -> int:
        return 2 if self.multilabel else int(self.pooled)

    def allocated(self, device: torch.device) -> Tensor:
        """The table, created on `device` (or on the device given at construction) if there is none yet."""
        if self.table is not None:
            return self.table
        shape = self.num_classes + 1, self.counts + 2 * self.columns
        return torch.zeros(shape, dtype=torch.float64, device=self._device or device)

    def _state(self) -> tuple[Tensor, ...]:
        """count (m, 1 or 2), mean (m, columns), m2 (m, columns): views of the table without the spare row."""
        return self.allocated(torch.device("cpu"))[:-1].split([self.counts, self.columns, self.columns], dim=1)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything seen so far as plain tensors (copies): form (0 full, 1 pooled, 2 multi-label), count, mean, m2."""
        n, mean, m2 = self._state()
        parts = {"count": n.long(), "mean": mean, "m2": m2}
        return {"form": torch.tensor(self._form)} | {name: part.clone().contiguous() for name, part in parts.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> ClassStatistics:
        """Replace what has been seen.

        state: from `state_dict`
        """
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
        table = self.allocated(rows.device).clone()
        table[:-1] = rows
        self.table = table
        return self

    @property
    def count(self) -> Tensor:
        """Images per class, (m,) int64; pooled and multi-label (m, 2): own Gaussian, the others'."""
        n = self._state()[0].long()
        return n[:, 0] if self.counts == 1 else n

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
        """(m,), on the device of the statistics; this and the next four as in `ClassGeometry`."""
        return self.measures()["compactness"]

    def separability(self) -> Tensor:
        return self.measures()["separability"]

    def ratio(self) -> Tensor:
        return self.measures()["ratio"]

    def relative_sigma(self) -> Tensor:
        return self.measures()["relative_sigma"]

    def dprime(self) -> Tensor:
        return self.measures()["dprime"]

    def measures(self) -> dict[str, Tensor]:
        """All five measures by name, (m,) each, on the device of the statistics."""
        return self.read()[0]

    def left_out(self) -> dict[int, str]:
        """The classes for which a measure is nan, which averages skip, and why."""
        return self._reasons(*self.read()[1])

    def geometry(self) -> ClassGeometry:
        """All five measures, the counts and what was left out, as one frozen result on the CPU."""
        measures, obstacles = self.read()
        return ClassGeometry(
            **{name: value.cpu() for name, value in measures.items()},
            count=obstacles[0].cpu(),
            pooled=self.pooled,
            multilabel=self.multilabel,
            left_out=self._reasons(*obstacles),
        )

    def _reasons(self, *obstacles: Tensor) -> dict[int, str]:
        own_count, other_count, own_std, constant, broken = (part.tolist() for part in obstacles)
        missing = "images without the label" if self.multilabel else "impostor outputs"
        reasons: dict[int, str] = {}
        for c in range(self.num_classes):
            if own_count[c] < 2:
                seen = own_count[c]
                reasons[c] = f"{seen or 'no'} example{'' if seen == 1 else 's'}, at least 2 are needed"
            elif broken[c]:
                reasons[c] = "nan or inf among its outputs"
            elif own_std[c] == 0:
                reasons[c] = "its own output never varies (sigma is 0)"
            elif other_count[c] < 2:
                reasons[c] = f"fewer than 2 {missing}: compactness only"
            elif constant[c] >= 0:
                which = f"output {constant[c]}" if self._form == 0 else f"the output over its {missing}"
                reasons[c] = f"{which} never varies (sigma is 0): no separability and ratio"
        return reasons

    def read(self) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        """The five measures, and the reasons for missing values, (m,) each: own count, the others' count, own std, the
        first output whose std is 0 (or -1), whether anything is not finite."""
        n = self._state()[0].long()
        own_std, (divergence, dprime, nearest, constant, broken) = self._scan()
        own_count = n[:, 0]
        other_count = own_count * (self.num_classes - 1) if self._form == 0 else n[:, 1]
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
        return measures, (own_count, other_count, own_std, constant, broken)

    def _scan(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The own standard deviations, and `compare_rows` of all classes with the sums made means, a block of rows at a
        time."""
        n, mean, m2 = self._state()
        rows = max(1, BLOCK // self.columns)
        stds, found = [], []
        for start in range(0, self.num_classes, rows):
            own = partial(torch.diagonal, offset=start) if self._form == 0 else partial(torch.select, dim=1, index=0)
            block = slice(start, start + rows)
            mu, sigma = mean[block], (m2[block] / n[block]).sqrt()  # 0/0 is nan, in rows without examples
            stds.append(own(sigma))
            found.append(compare_rows(own(mu), own(sigma), mu, sigma, n[block], own))
        divergence, dprime, *rest = (torch.cat(part) for part in zip(*found, strict=True))
        impostors = max(1, self.columns - 1)
        return torch.cat(stds), (divergence / impostors, dprime / impostors, *rest)

    def __repr__(self) -> str:
        seen = int(self._state()[0][:, 0].sum())
        return (
            f"ClassStatistics(num_classes={self.num_classes}, multilabel={self.multilabel}, pooled={self.pooled}, "
            f"count={seen})"
        )


def compare_rows(
    own_mu: Tensor, own_sigma: Tensor, mu: Tensor, sigma: Tensor, n: Tensor, own: Callable[[Tensor], Tensor]
) -> tuple[Tensor, ...]:
    """Some classes against the columns of the table.

    own_mu, own_sigma: (rows,) the own Gaussians
    mu, sigma: (rows, columns) all Gaussians, `n` the counts behind them
    own: gives the view of such a table that holds the own column, which contributes nothing to the sums

    Returns (rows,) each: the sum of the divergences, the sum of d', the distance to the nearest impostor, the first
    column whose std is 0 (or -1), whether anything is not finite.
    """
    mu_c, sigma_c = own_mu[:, None], own_sigma[:, None]
    d = mu_c - mu
    divergence = _pair_separability(mu_c, sigma_c, mu, sigma).sum(1)
    dprime = (d / ((sigma_c**2 + sigma**2) / 2).sqrt()).sum(1)
    distance = d.abs()
    own(distance).fill_(torch.inf)
    zero = sigma == 0
    constant = torch.where(zero.any(1), zero.byte().argmax(1), -1)
    broken = ~(torch.isfinite(mu) & torch.isfinite(sigma) | (n == 0)).all(1)
    return divergence, dprime, distance.amin(1), constant, broken


def masked_moments(x: Tensor, mask: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean (0 if the count is) and sum of squared deviations of x under a mask along `dim`, which is kept."""
    n = mask.sum(dim, keepdim=True)
    pivot = x.gather(dim, mask.byte().argmax(dim, keepdim=True))  # the first: constant values have exactly no spread
    d = torch.where(mask, x - pivot, 0.0)
    mean = d.sum(dim, keepdim=True) / n.clamp(min=1)
    m2 = torch.where(mask, d - mean, 0.0).square().sum(dim, keepdim=True)
    return n, torch.where(n > 0, pivot + mean, 0.0), m2


def own_and_impostors(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each image's own output beside the mean of its impostor outputs, the sums of squared deviations behind each, and
    the numbers of outputs behind each: (batch, 2) each.

    y: the own column of each row; a column that is not among those of x has no own output here
    """
    if x.shape[1] == 0:
        zero = x.new_zeros(len(x), 2)
        return zero, zero.clone(), zero.clone()
    column = y[:, None]
    mine = (column >= 0) & (column < x.shape[1])
    column = torch.where(mine, column, 0)
    own = torch.where(mine, x.gather(1, column), 0.0)
    impostor = torch.ones_like(x, dtype=torch.bool).scatter_(1, column, ~mine)
    n, mean, m2 = masked_moments(x, impostor, 1)
    return torch.cat([own, mean], 1), torch.cat([torch.zeros_like(own), m2], 1), torch.cat([mine, n], 1).to(x.dtype)


def merge_tables(a: Tensor, b: Tensor, counts: int) -> Tensor:
    """Two tables of [counts | means | m2] as one, as if from one sample."""
    widths = [counts] + [(a.shape[1] - counts) // 2] * 2
    return torch.cat(equations.merge_moments(a.split(widths, dim=1), b.split(widths, dim=1)), dim=1)
