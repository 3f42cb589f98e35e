"""One Gaussian per class, learned, fixed or tracked, and the layer x -> z that adds them to the logits."""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import checks, equations, kernels

__all__ = ["GAUSSIANS", "GaussianLogits", "check_optimised", "param_groups"]

GAUSSIANS = ("learned", "fixed", "tracked")


class GaussianLogits(nn.Module):
    """The layer z = x + lam * Phi((x - mu) / sigma), for use inside a model: it needs no labels.

    Every module of this package that has mu and sigma keeps them in such a layer.  By default sigma = sigma_min +
    exp(rho), which is positive for every rho.

    num_classes: number of classes C, each with its own Gaussian
    lam: weight of the Gaussian term, 0 for plain softmax
    mu, sigma: initial values, a number or one per class; `fit_gaussians` takes them from data instead
    gaussians: "learned" by back-propagation; "fixed" at the initial values; "tracked", the running mean and standard
        deviation of x over the training batches of all processes.  Tracked Gaussians change only in training mode while
        gradients are recorded, not under `no_grad`; a class whose outputs are masked (-inf) keeps its Gaussian.
    momentum: weight of the current batch for tracked Gaussians
    sigma_min: lower bound of sigma; the term amplifies a gradient by at most 0.4 * lam / sigma_min
    lr_mult: factor on the learning rate of mu and rho in `param_groups`
    log_sigma: False makes sigma itself the parameter, as in the authors' code: sigma = max(rho, sigma_min).  A sigma
        below the bound has no gradient and stays there, so this is for small learning rates only.
    x: (N, C), (N, C, d1, ...) or (C,), the raw outputs; z has the same shape

    In training z is computed when something asks for its values, which cross entropy and binary cross entropy do not.

    >>> layer = GaussianLogits(3, lam=2.0)
    >>> layer(torch.zeros(1, 3)).detach()
    tensor([[1., 1., 1.]])
    >>> layer.mu.shape, layer.sigma.shape
    (torch.Size([3]), torch.Size([3]))
    """

    _version = 1
    defers = True  # whether z may be computed later, which a loss then need not do

    def __init__(
        self,
        num_classes: int,
        *,
        lam: float = 1.0,
        mu: float | Sequence[float] | Tensor = 0.0,
        sigma: float | Sequence[float] | Tensor = 1.0,
        gaussians: str = "learned",
        momentum: float = 0.02,
        sigma_min: float = 0.01,
        lr_mult: float = 1.0,
        log_sigma: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(num_classes, int) or num_classes < 1:
            raise ValueError(f"num_classes must be a positive integer, got {num_classes!r}")
        checks.check_choice("gaussians", gaussians, GAUSSIANS)
        if not 0 < momentum <= 1:
            raise ValueError(f"momentum must lie in (0, 1], got {momentum!r}")
        for name, value in (("sigma_min", sigma_min), ("lr_mult", lr_mult)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {value!r}")
        if gaussians == "tracked" and not log_sigma:
            raise ValueError("log_sigma=False is for learned and fixed Gaussians, got gaussians='tracked'")
        self.num_classes = num_classes
        self.lam = lam
        self.gaussians = gaussians
        self.momentum = momentum
        self.sigma_min = sigma_min
        self.lr_mult = lr_mult
        self.log_sigma = log_sigma
        self._initial = (per_class("mu", mu, num_classes), per_class("sigma", sigma, num_classes))
        self._check_sigma(self._initial[1])
        for name in ("mu", "rho"):
            empty = torch.empty(num_classes, device=device, dtype=dtype)
            if gaussians == "learned":
                self.register_parameter(name, nn.Parameter(empty))
            else:
                self.register_buffer(name, empty)
        self.mu: Tensor
        self.rho: Tensor
        self.reset_parameters()

    @property
    def lam(self) -> float:
        """Weight of the Gaussian term; may be changed at any time."""
        return self._lam

    @lam.setter
    def lam(self, lam: float) -> None:
        self._lam = checks.check_lam(lam)

    @property
    def sigma(self) -> Tensor:
        """The standard deviations (classes,), sigma_min + exp(rho) or max(rho, sigma_min)."""
        rho = self.rho
        if rho.dtype is not torch.float32 and rho.dtype is not torch.float64:
            rho = rho.float()
        return rho.exp() + self.sigma_min if self.log_sigma else rho.clamp_min(self.sigma_min)

    def reset_parameters(self) -> None:
        """Reset mu and sigma to their initial values."""
        self.write(*self._initial)

    def set_gaussians(self, mu: float | Sequence[float] | Tensor, sigma: float | Sequence[float] | Tensor) -> None:
        """Set mu and sigma, each a number or one value per class."""
        mu = per_class("mu", mu, self.num_classes)
        sigma = per_class("sigma", sigma, self.num_classes)
        self._check_sigma(sigma)
        self.write(mu, sigma)

    @torch.no_grad()
    def write(self, mu: Tensor, sigma: Tensor) -> None:
        """`set_gaussians` without checks, given tensors."""
        self.mu.copy_(mu)
        self.rho.copy_(self._rho(sigma))

    @torch.no_grad()
    def fit_gaussians(self, batches: Iterable[Any]) -> GaussianLogits:
        """Set mu and sigma to the mean and standard deviation of every output, in one pass over the data.

        batches: tensors x, or tuples whose first item is x; processes combine their statistics

        >>> layer = GaussianLogits(2).fit_gaussians([torch.tensor([[0.0, 1.0], [2.0, 5.0]])])
        >>> layer.mu.detach(), layer.sigma.detach().round(decimals=4)
        (tensor([1., 3.]), tensor([1., 2.]))
        """
        total = tuple(torch.zeros(3, self.num_classes, dtype=torch.float64, device=self.mu.device))
        for batch in first_items(batches):
            x = _rows(batch, self.num_classes).double()
            if len(x):
                var, mean = torch.var_mean(x, dim=0, correction=0)
                total = equations.merge_moments(total, (torch.full_like(mean, len(x)), mean, var * len(x)))
        if _processes() > 1:
            parts = [torch.empty_like(torch.stack(total)) for _ in range(_processes())]
            dist.all_gather(parts, torch.stack(total))
            total = functools.reduce(equations.merge_moments, (tuple(part) for part in parts))
        count, mean, m2 = total
        self.write(mean, self.fitted_sigma(int(count[0]), mean, m2))
        return self

    def fitted_sigma(self, n: int, mean: Tensor, m2: Tensor) -> Tensor:
        """The standard deviation from sums over a dataset.

        n, mean, m2: number of examples, their mean and sum of squared deviations
        """
        if n < 2:
            raise ValueError(f"batches must contain at least two examples to fit Gaussians, got {n}")
        if not bool(torch.isfinite(mean).all() and torch.isfinite(m2).all()):
            raise ValueError("batches must contain finite outputs to fit Gaussians, got NaN or infinity")
        return (m2 / n).sqrt().clamp_min(self.sigma_min * (1 + 1e-6) if self.sigma_min else 1e-6)

    @torch.no_grad()
    def track(self, x: Tensor, keep: Tensor | None = None) -> None:
        """One step of tracked Gaussians towards a batch; the other kinds stay.

        The new Gaussian has the moments of a mixture of the old one, with weight 1 - momentum, and the batch:
        mean mu + m d and variance (1 - m) sigma^2 + m v + m (1 - m) d^2, where d is the batch's mean minus mu and v its
        variance.  Sums of x - mu can be added across processes, because all processes have the same mu.

        keep: the rows of x to use, as booleans; all without it
        """
        if self.gaussians != "tracked" or not self.training:
            return
        mu, sigma = self.mu.to(checks.compute_dtype(self.mu)), self.sigma
        d = _rows(x, self.num_classes).to(mu.dtype) - mu  # (rows, classes)
        if keep is None:
            n = d.new_full((1,), d.shape[0])
        else:
            n = keep.sum()[None].to(d.dtype)
            d = torch.where(keep.reshape(-1, 1), d, 0.0)
        sums = torch.cat([n, d.sum(dim=0), (d * d).sum(dim=0)]).double()
        if _processes() > 1:
            dist.all_reduce(sums)
        n, s1, s2 = sums[0], sums[1 : 1 + self.num_classes], sums[1 + self.num_classes :]
        self._move(self.mu, self.rho, sigma, n, s1, s2)

    def _move(self, mu: Tensor, rho: Tensor, sigma: Tensor, n: Tensor, s1: Tensor, s2: Tensor) -> None:
        """`track` on mu and rho, in place, given n rows and their sums of x - mu and (x - mu)^2 in float64."""
        shift, m = s1 / n, self.momentum
        var = (1 - m) * sigma.double() ** 2 + m * (s2 / n - m * shift**2)
        seen = torch.isfinite(shift) & torch.isfinite(var) & (n > 0)
        mu.copy_(torch.where(seen, mu + m * shift, mu))
        rho.copy_(torch.where(seen, self._rho(var.clamp_min(0).sqrt()), rho))

    def _track_in_one_launch(self, x: Tensor, target: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor] | None:
        """`track` by a GPU kernel: mu and sigma after the step, in new tensors, or None if it cannot run."""
        # Triton's interpreter, which runs kernels on the CPU, is switched on by the same variable.
        if torch.compiler.is_compiling() or not (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
            return None
        if kernels.load_triton("triton_track") or _processes() > 1:
            return None
        kernel = kernels.triton_track
        if not kernel.supported(x, target, self.mu, self.rho):
            return None
        x = x.detach() if x.ndim == 2 else _rows(x.detach(), self.num_classes)
        target = None if target is None else target.reshape(-1)
        return kernel.track(x, target, self.mu, self.rho, self.momentum, self.sigma_min, self._low(), ignore_index)

    def current(self, x: Tensor, target: Tensor | None = None, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
        """mu and sigma for x, in the dtype of the arithmetic; tracked Gaussians make their step first.

        target, ignore_index: rows whose class index is ignore_index do not count in that step
        """
        if self.gaussians == "tracked" and self.training and torch.is_grad_enabled():
            indices = None if target is None or target.is_floating_point() else target
            after = self._track_in_one_launch(x, indices, ignore_index)
            if after is not None:
                return checks.as_gaussians(x, *after, self.lam)
            self.track(x.detach(), None if indices is None else indices.ne(ignore_index))
        mu, sigma = checks.as_gaussians(x, self.mu, self.sigma, self.lam)
        # the next step overwrites the buffer, which a pending backward pass may still need
        return (mu.clone() if self.gaussians == "tracked" else mu), sigma

    def forward(self, x: Tensor) -> Tensor:  # (batch, classes, ...) -> the same
        checks.check_outputs(x)
        mu, sigma = self.current(x)
        return kernels.logits(x, mu, sigma, self.lam, later=self.defers)

    def param_groups(self, *, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Parameter groups of this module, as in `param_groups`."""
        return param_groups(self, lr=lr, weight_decay=weight_decay)

    def extra_repr(self) -> str:
        text = f"{self.num_classes}, lam={self.lam:g}, gaussians={self.gaussians!r}, sigma_min={self.sigma_min:g}"
        if self.gaussians == "tracked":
            text += f", momentum={self.momentum:g}"
        text += "" if self.log_sigma else ", log_sigma=False"
        return text + (f", lr_mult={self.lr_mult:g}" if self.lr_mult != 1 else "")

    def _low(self) -> float:
        """The smallest exp(rho): sigma = sigma_min means rho = -inf, where the gradient is zero."""
        return 1e-6 * (self.sigma_min or 1e-6)

    def _rho(self, sigma: Tensor) -> Tensor:
        if not self.log_sigma:
            return sigma
        return (sigma - self.sigma_min).clamp_min(self._low()).log()

    def _check_sigma(self, sigma: Tensor) -> None:
        if _fails(sigma > self.sigma_min):
            raise ValueError(
                f"sigma must be above sigma_min={self.sigma_min:g}, got a minimum of {sigma.min().item():g}; "
                "reduce sigma_min to allow smaller values"
            )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        version = local_metadata.get("version", self._version)
        if version > self._version:
            raise ValueError(
                f"the Gaussians at {prefix!r} were saved in format {version}; this gsoftmax reads up to {self._version}"
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def param_groups(
    model: nn.Module, *, lr: float, weight_decay: float = 0.0, gaussian_momentum: float | None = None
) -> list[dict[str, Any]]:
    """Optimizer parameter groups for any model that contains modules of this package.

    mu and rho of every Gaussian get no weight decay, which would pull mu to 0 and sigma to 1 whatever the data, and
    `lr_mult` times the learning rate.

    model: any module; parameters with `requires_grad=False` are left out
    lr, weight_decay: for all other parameters
    gaussian_momentum: of mu and rho, without Nesterov's correction (0 in the authors' code); None for the optimizer's

    >>> groups = param_groups(GaussianLogits(3, lr_mult=10.0), lr=0.1, weight_decay=5e-4)
    >>> [(len(g["params"]), g["lr"], g["weight_decay"]) for g in groups]
    [(2, 1.0, 0.0)]
    """
    multipliers = {id(p): g.lr_mult for _, g in named_gaussians(model) for p in g.parameters(recurse=False)}
    groups: dict[float | None, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups.setdefault(multipliers.get(id(parameter)), []).append(parameter)
    own = {} if gaussian_momentum is None else {"momentum": gaussian_momentum, "nesterov": False}
    return [
        {"params": params, "lr": lr, "weight_decay": weight_decay}
        if mult is None
        else {"params": params, "lr": lr * mult, "weight_decay": 0.0, **own}
        for mult, params in sorted(groups.items(), key=lambda item: (item[0] is not None, item[0] or 0.0))
    ]


def check_optimised(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """Warn if learned Gaussians in `model` are in none of the optimizers and would keep their initial values.

    Call it once, before the first step.  Fixed, tracked and frozen (`requires_grad=False`) Gaussians need no optimizer.
    Optimizers that contain no other parameter of the model either, only copies as in sharded training, are not judged.
    `GSoftmaxTrainerMixin` and `GeometryCallback` call it themselves.

    model: any module with Gaussians inside, such as a model after `attach` or a loss of this package
    optimizers: all optimizers that train it

    >>> loss = GaussianLogits(3)
    >>> check_optimised(loss, torch.optim.SGD(param_groups(loss, lr=0.1)))
    """
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    learned = {
        f"{path}.{name}".lstrip("."): p
        for path, gaussians in named_gaussians(model)
        for name, p in gaussians.named_parameters(recurse=False)
        if p.requires_grad
    }
    others = {id(p) for p in model.parameters()} - {id(p) for p in learned.values()}
    missing = [name for name, p in learned.items() if id(p) not in held]
    if missing and (held & others or not others):
        warnings.warn(
            f"no optimizer holds {' and '.join(missing)}: build it after attaching, from gsoftmax.param_groups(model, "
            "lr=...), or add loss.parameters() to it; gaussians='fixed' says that they are meant to stay",
            stacklevel=2,
        )


def named_gaussians(model: nn.Module) -> list[tuple[str, GaussianLogits]]:
    """Path and module of every `GaussianLogits` in the model."""
    return [(path, m) for path, m in model.named_modules() if isinstance(m, GaussianLogits)]


def per_class(name: str, value: float | Sequence[float] | Tensor, classes: int) -> Tensor:
    """A number or one value per class as a float64 tensor (classes,) on the CPU."""
    value = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()
    if value.ndim > 0 and value.shape != (classes,):
        raise ValueError(f"{name} must be a number or {classes} values, got shape {tuple(value.shape)}")
    if _fails(torch.isfinite(value)):
        raise ValueError(f"{name} must be finite, got {value.tolist()}")
    return value.expand(classes).clone()


def _fails(condition: Tensor) -> bool:
    """Whether a condition is false anywhere; never for the fake tensors of a FakeTensorMode, which have no values."""
    try:
        return not bool(condition.all())
    except RuntimeError:  # DataDependentOutputException, which torch keeps in a private module
        return False


def first_items(batches: Iterable[Any]) -> Iterator[Tensor]:
    """The first item of every batch that is a tuple, every other batch itself."""
    return (batch[0] if isinstance(batch, (tuple, list)) else batch for batch in batches)


def _rows(x: Tensor, classes: int) -> Tensor:
    """x as (rows, classes)."""
    dim = checks.class_dim(x)
    if x.shape[dim] != classes:
        raise ValueError(f"x must have {classes} classes in dimension {dim}, got shape {tuple(x.shape)}")
    return x.movedim(dim, -1).reshape(-1, classes)


def _processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
