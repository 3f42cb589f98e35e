"""Out-of-distribution detection from a classifier's outputs. Single label only, in float64.

`scores` gives every image several numbers, larger meaning more like the training data: the usual ones (the highest
probability, the highest output, the energy) and the density of the outputs under Gaussians, either the (mu, sigma) that
a G-softmax head has learned or those measured on any model's training outputs. `auroc`, `fpr_at` and `detection`
measure how well a score separates test images of the known classes (inside) from other images (outside).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import geometry, metrics

__all__ = ["DEVIATION_FLOOR", "auroc", "detection", "fpr_at", "scores"]

ArrayLike = Any  # a torch tensor, a NumPy array, or (nested) lists of numbers

# Lower bound of measured deviations, as a fraction of the median one. An output that was constant over the training
# images of a class would otherwise give any other value a density of zero.
DEVIATION_FLOOR = 1e-3

_BLOCK = 2**18  # elements of (images, classes, outputs) processed at a time: 2 MB, which stays in cache


@torch.no_grad()
def scores(
    x: ArrayLike,
    p: ArrayLike,
    *,
    mu: ArrayLike | None = None,
    sigma: ArrayLike | None = None,
    stats: geometry.ClassStatistics | None = None,
) -> dict[str, Tensor]:
    """Scores of N images, (N,) float64 each; larger means more like the training data.

    With k the most probable class and log N(x; m, s) = -((x - m)/s)^2/2 - log s - log(2 pi)/2:

    * `probability`: max p (Hendrycks and Gimpel);
    * `output`: max x;
    * `energy`: log sum_j exp x_j (Liu and others);
    * `learned`, with mu and sigma: log N(x_k; mu_k, sigma_k);
    * `empirical`, with stats: log N(x_k; m_kk, s_kk), the mean and deviation of output k over the training images of k;
    * `empirical_all`, with stats that are not pooled: max_c sum_j log N(x_j; m_cj, s_cj), all outputs under the nearest
      class, in O(N C^2) time.

    x: (N, C) raw outputs
    p: (N, C) probabilities, in float64 if possible (near 1 a float32 creates ties)
    mu, sigma: (C,) a head's Gaussians
    stats: the statistics of the *training* outputs

    A class with fewer than 2 training images, or whose statistics aren't finite, has no measured Gaussian: it is left
    out of the maximum of `empirical_all`, and for `empirical` k is the most probable of the other classes. Measured
    deviations are at least `DEVIATION_FLOOR` times the median of the positive ones.

    >>> x = torch.tensor([[4.0, 0.0], [9.0, 0.0]])
    >>> found = scores(x, x.double().softmax(1), mu=torch.tensor([4.0, 4.0]), sigma=torch.ones(2))
    >>> {name: [round(s, 2) for s in score.tolist()] for name, score in found.items()}
    {'probability': [0.98, 1.0], 'output': [4.0, 9.0], 'energy': [4.02, 9.0], 'learned': [-0.92, -13.42]}
    """
    if (mu is None) != (sigma is None):
        raise ValueError(f"mu and sigma must be given together, got only {'sigma' if mu is None else 'mu'}")
    given = {"x": x, "p": p} | ({} if mu is None else {"mu": mu, "sigma": sigma})
    (x, p, *gaussians), _ = geometry.float64_inputs(**given)
    _check(x, p)
    out = {"probability": p.amax(1), "output": x.amax(1), "energy": x.logsumexp(1)}
    if gaussians:
        for name, value in zip(("mu", "sigma"), gaussians, strict=True):
            if value.shape != x.shape[1:]:
                raise ValueError(f"{name} must have the shape {tuple(x.shape[1:])} as x, got {tuple(value.shape)}")
        mu, sigma = gaussians
        k = p.argmax(1)
        out["learned"] = _log_density(x.gather(1, k[:, None])[:, 0], mu[k], sigma[k])
    if stats is not None:
        known, mean, std = _measured(stats, x)
        # The full table has a column for every output, the pooled one has the class's own output first.
        own_mean, own_std = (mean[:, 0], std[:, 0]) if stats.pooled else (mean.diagonal(), std.diagonal())
        k = p.masked_fill(~known, -1.0).argmax(1)
        out["empirical"] = _log_density(x.gather(1, k[:, None])[:, 0], own_mean[k], own_std[k])
        if not stats.pooled:
            out["empirical_all"] = _highest_log_density(x, mean[known], std[known])
    return out


def auroc(inside: ArrayLike, outside: ArrayLike) -> float:
    """Area under the ROC curve, P(inside > outside) + P(inside = outside)/2 of a pair drawn at random.

    inside, outside: (N,) and (M,) scores, infinite ones too; 1 is perfect, 0.5 is chance

    >>> auroc([3.0, 2.0], [2.0, 1.0])
    0.875
    """
    inside, outside = _ranked(inside=inside, outside=outside)
    # The pairs that the inside score wins, plus half of the ties, counted in integers.
    below = torch.searchsorted(outside, inside)
    not_above = torch.searchsorted(outside, inside, right=True)
    return int((below + not_above).sum()) / (2 * len(inside) * len(outside))


def fpr_at(inside: ArrayLike, outside: ArrayLike, share: float = 0.95) -> float:
    """False positive rate at the threshold where the true positive rate is at least `share`; 0 is perfect.

    inside, outside: as in `auroc`
    share: of the inside scores at or above the threshold

    >>> fpr_at([4.0, 3.0, 2.0, 1.0], [2.5, 0.5], share=0.75)
    0.5
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, got {share}")
    inside, outside = _ranked(inside=inside, outside=outside)
    # Rounded first: 0.07 * 100 is 7.000000000000001 in floating point, and means 7.
    passing = max(1, math.ceil(round(share * len(inside), 6)))
    threshold = inside[len(inside) - passing]
    return int((outside >= threshold).sum()) / len(outside)


def detection(inside: Mapping[str, ArrayLike], outside: Mapping[str, ArrayLike]) -> dict[str, float]:
    """AUROC of every score that both have, as `{"ood_" + name: auroc}`.

    inside, outside: from `scores`

    >>> detection({"output": [3.0, 2.0], "energy": [1.0]}, {"output": [1.0, 0.0]})
    {'ood_output': 1.0}
    """
    common = [name for name in inside if name in outside]
    if not common:
        raise ValueError(f"inside and outside must have a score in common, got {list(inside)} and {list(outside)}")
    return {f"ood_{name}": auroc(inside[name], outside[name]) for name in common}


def _check(x: Tensor, p: Tensor) -> None:
    if x.ndim != 2 or x.shape[1] == 0:
        raise ValueError(f"x must have the shape (images, classes) with at least one class, got {tuple(x.shape)}")
    if p.shape != x.shape:
        raise ValueError(f"p must have the shape {tuple(x.shape)} of x, got {tuple(p.shape)}")
    metrics.check_probabilities(p.cpu().numpy(), rows=True)


def _measured(stats: geometry.ClassStatistics, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which classes have measured Gaussians, (C,); means and floored deviations, (C, C), or (C, 1) when pooled."""
    if not isinstance(stats, geometry.ClassStatistics):
        raise TypeError(f"stats must be a gsoftmax.geometry.ClassStatistics, got {type(stats).__name__}")
    if stats.multilabel:
        raise ValueError("stats must be single-label, got multi-label statistics")
    columns = 1 if stats.pooled else x.shape[1]
    mean, std = stats.mean[:, :columns].to(x.device), stats.std[:, :columns].to(x.device)
    if mean.shape != (x.shape[1], columns):
        raise ValueError(f"stats must be of the {x.shape[1]} outputs of x, got {stats!r}")
    count = (stats.count[:, 0] if stats.pooled else stats.count).to(x.device)
    known = (count >= 2) & torch.isfinite(mean).all(1) & torch.isfinite(std).all(1)
    varying = std[known]
    varying = varying[varying > 0]
    if not len(varying):
        raise ValueError("stats must hold a class with 2 images whose outputs differ, got none")
    floor = DEVIATION_FLOOR * varying.median().item()
    return known, mean, std.clamp(min=max(floor, torch.finfo(std.dtype).tiny))


def _log_density(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return -(((x - mean) / std) ** 2) / 2 - std.log() - math.log(2 * math.pi) / 2


def _highest_log_density(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """max_c sum_j log N(x_j; mean_cj, std_cj): x (N, outputs), mean and std (classes, outputs) to (N,)."""
    # Expanding the square into three matrix products would be many times faster, but loses all digits where a deviation
    # is small relative to its mean.
    top = -(std.log() + math.log(2 * math.pi) / 2).sum(1)  # (classes,)
    rows = x.split(max(1, _BLOCK // mean.numel()))
    return torch.cat([(top - ((part[:, None] - mean) / std).square_().sum(2) / 2).amax(1) for part in rows])


def _ranked(**named: ArrayLike) -> list[Tensor]:
    """Scores in ascending order as (N,) float64 tensors on the CPU, checked."""
    out = []
    for name, value in named.items():
        value = torch.as_tensor(value, dtype=torch.float64).detach().cpu()
        if value.ndim != 1 or not len(value):
            raise ValueError(f"{name} must hold the scores of at least one image, got the shape {tuple(value.shape)}")
        if bool(value.isnan().any()):
            raise ValueError(f"{name} must hold numbers, got {int(value.isnan().sum())} NaN among {len(value)} scores")
        out.append(value.sort().values)
    return out
