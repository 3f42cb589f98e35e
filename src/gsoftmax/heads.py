"""Heads: the last linear layer of a classifier together with the loss that belongs to it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import catalog, checks, functional
from .gaussians import GaussianLogits, param_groups
from .kernels import IMPLS
from .losses import by_sign, split_outputs, spread_over_outputs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .sharded import ClassShard


class SoftmaxHead(nn.Module):
    """Linear layer and softmax cross entropy: the head that the others are compared with.

    `features(h)` gives x, calling the head gives z (here z = x), `loss(h, target)` the loss, `predict_proba(h)` the
    probabilities.  With `form` it is a multi-label head (see `multilabel_cross_entropy`): x and z are then (N, 2, L),
    absence first, or (N, L) for "msml", and `predict_proba` gives p+ (N, L).

    The parameters are `weight` (outputs, in_features) and `bias`, as in `nn.Linear`.  h: (..., in_features).

    shard="class" splits the classes over the processes of `mesh`; see `gsoftmax.sharded` for it and for the options
    that go with it, negatives, seed and averaged.

    >>> head = SoftmaxHead(16, 10)
    >>> h, target = torch.zeros(4, 16), torch.tensor([1, 2, 3, 4])
    >>> head(h).shape, head.loss(h, target).ndim
    (torch.Size([4, 10]), 0)
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = True,
        form: str | None = None,
        impl: str = "auto",
        shard: str | None = None,
        mesh: DeviceMesh | None = None,
        negatives: int | None = None,
        seed: int = 0,
        averaged: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if form is not None:
            checks.check_choice("form", form, checks.MULTILABEL_FORMS)
        if not isinstance(bias, bool):
            raise ValueError(f"bias must be True or False, got {bias!r}")
        checks.check_choice("impl", impl, IMPLS)
        self.in_features = in_features
        self.num_classes = num_classes
        self.form = form
        self.impl = impl
        self.out_features = num_classes if form in (None, "msml") else 2 * num_classes
        self.weight: nn.Parameter
        self.bias: nn.Parameter | None
        self.shard: ClassShard | None = None
        if shard is not None or mesh is not None or negatives is not None:
            from . import sharded  # late: most heads are whole

            sharded.set_up(self, shard, mesh, negatives, seed, averaged, bias, device, dtype)
            return
        self.weight = nn.Parameter(torch.empty(self.out_features, in_features, device=device, dtype=dtype))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(self.out_features, device=device, dtype=dtype)) if bias else None
        )
        SoftmaxHead.reset_parameters(self)

    def reset_parameters(self) -> None:
        """As `nn.Linear`: uniform within 1 / sqrt(in_features)."""
        if self.shard is not None:
            return self.shard.reset_parameters(self)
        bound = 1 / math.sqrt(self.in_features)
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                nn.init.uniform_(parameter, -bound, bound)

    def features(self, h: Tensor) -> Tensor:
        """x, the raw outputs: (..., classes), or (N, 2, L) for a multi-label form of two outputs.

        Of a head with sharded classes x, z and p are DTensors (rows of all processes, classes), each process holding
        the columns of its own classes."""
        if self.shard is not None:
            return self.shard.outputs(self, h, adjusted=False)
        x = F.linear(h, self.weight, self.bias)
        return x if self.form in (None, "msml") else x.view(-1, 2, self.num_classes)

    def forward(self, h: Tensor, target: Tensor | None = None) -> Tensor:
        """z, the adjusted outputs.  `target` matters only to a head with a margin."""
        if self.shard is not None:
            return self.shard.outputs(self, h)
        return self.features(h)

    def loss(self, h: Tensor, target: Tensor, **options: Any) -> Tensor:
        """The training loss.  Options: class_weight, ignore_index, reduction, label_smoothing; for a multi-label form
        those of `multilabel_cross_entropy`."""
        if self.shard is not None:
            return self.shard.loss(self, h, target, **options)
        if self.form is not None:
            z_pos, z_neg = split_outputs(self(h), self.num_classes, self.form)
            return functional.multilabel_cross_entropy(z_pos, z_neg, target, form=self.form, **options)
        return functional.linear_gsoftmax_cross_entropy(
            h, self.weight, target, 0.0, 1.0, 0.0, bias=self.bias, impl=self.impl, **options
        )

    def predict_proba(self, h: Tensor) -> Tensor:
        """p (..., classes), or p+ (N, L) for a multi-label form."""
        if self.shard is not None:
            return self.shard.predict_proba(self, h)
        z = self(h)
        if self.form is None:
            return torch.softmax(z, -1)
        z_pos, z_neg = split_outputs(z, self.num_classes, self.form)
        return functional.multilabel_probabilities(z_pos, z_neg, form=self.form)

    @torch.no_grad()
    def predict(self, h: Tensor) -> Tensor:
        """The class with the largest z of every row of h, (...); of the first such class, if several tie."""
        return self.topk(h, 1)[1].squeeze(-1)

    @torch.no_grad()
    def topk(self, h: Tensor, k: int = 5) -> tuple[Tensor, Tensor]:
        """The k largest z of every row of h and their classes, largest first, (..., k) each."""
        if self.form is not None:
            raise ValueError(f"topk is for one label an example, got form={self.form!r}")
        if not 1 <= k <= self.num_classes:
            raise ValueError(f"k must lie between 1 and the {self.num_classes} classes, got {k!r}")
        if self.shard is not None:
            return self.shard.topk(self, h, k)
        z = self(h)
        if k > 1:
            return tuple(z.topk(k, -1))
        return tuple(z.max(-1, keepdim=True))  # the first of equals, which topk does not promise

    def param_groups(self, *, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """See `gsoftmax.param_groups`."""
        return param_groups(self, lr=lr, weight_decay=weight_decay)

    def extra_repr(self) -> str:
        text = f"{self.in_features}, {self.num_classes}"
        if self.bias is None:
            text += ", bias=False"
        if self.shard is not None:
            text += f", {self.shard}"
        return text if self.form is None else f"{text}, form={self.form!r}"


class GSoftmaxHead(SoftmaxHead):
    """Linear layer and G-softmax cross entropy: `SoftmaxHead` with a Gaussian for every output.

    Options of the Gaussians (lam, mu, sigma, gaussians, momentum, sigma_min, lr_mult) are those of `GaussianLogits`.

    >>> head = GSoftmaxHead(16, 10, lam=1.0)
    >>> h, target = torch.zeros(4, 16), torch.tensor([1, 2, 3, 4])
    >>> head.loss(h, target).backward()
    >>> head.mu.shape, head.sigma.shape, head.gaussians.rho.grad.shape
    (torch.Size([10]), torch.Size([10]), torch.Size([10]))
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        lam: float = 1.0,
        mu: float | Sequence[float] | Tensor = 0.0,
        sigma: float | Sequence[float] | Tensor = 1.0,
        gaussians: str = "learned",
        bias: bool = True,
        form: str | None = None,
        impl: str = "auto",
        shard: str | None = None,
        mesh: DeviceMesh | None = None,
        negatives: int | None = None,
        seed: int = 0,
        averaged: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **gaussian_options: Any,
    ) -> None:
        super().__init__(
            in_features, num_classes, bias=bias, form=form, impl=impl, shard=shard, mesh=mesh, negatives=negatives,
            seed=seed, averaged=averaged, device=device, dtype=dtype,
        )  # fmt: skip
        if form is not None:
            mu, sigma = (spread_over_outputs(v, num_classes, form) for v in (mu, sigma))
        options = dict(gaussian_options, lam=lam, mu=mu, sigma=sigma, gaussians=gaussians, device=device, dtype=dtype)
        self.gaussians: GaussianLogits
        if self.shard is not None:
            self.gaussians = self.shard.gaussians(**options)
        else:
            self.gaussians = GaussianLogits(self.out_features, **options)

    def reset_parameters(self) -> None:
        """Linear layer as `nn.Linear`, Gaussians at their initial values."""
        super().reset_parameters()
        self.gaussians.reset_parameters()

    def forward(self, h: Tensor, target: Tensor | None = None) -> Tensor:
        if self.shard is not None:
            return self.shard.outputs(self, h)
        x = self.features(h)
        return self.gaussians(x.reshape(-1, self.out_features)).view(x.shape)

    def loss(self, h: Tensor, target: Tensor, **options: Any) -> Tensor:
        if self.form is not None or self.shard is not None:
            return super().loss(h, target, **options)
        g = self.gaussians
        if g.gaussians == "tracked" and self.training:
            # the step needs x itself, so the logits exist anyway
            flat, rows, shape = checks.flatten_linear(h, self.weight, target, self.bias)
            x = F.linear(flat, self.weight, self.bias)
            mu, sigma = g.current(x, rows, options.get("ignore_index", -100))
            weight = options.pop("class_weight", None)
            loss = functional.gsoftmax_cross_entropy(
                x, rows, mu, sigma, g.lam, weight=weight, impl=self.impl, **options
            )
            return loss.view(shape) if loss.ndim else loss
        return functional.linear_gsoftmax_cross_entropy(
            h, self.weight, target, g.mu, g.sigma, g.lam, bias=self.bias, impl=self.impl, **options
        )

    @property
    def lam(self) -> float:
        return self.gaussians.lam

    @lam.setter
    def lam(self, lam: float) -> None:
        self.gaussians.lam = lam

    @property
    def mu(self) -> Tensor:
        """(classes,), or (2, L) for a multi-label form of two outputs."""
        return self.gaussians.mu if self.form is None else by_sign(self.gaussians.mu, self.form)

    @property
    def sigma(self) -> Tensor:
        """(classes,), or (2, L) for a multi-label form of two outputs."""
        return self.gaussians.sigma if self.form is None else by_sign(self.gaussians.sigma, self.form)

    def fit_gaussians(self, batches: Iterable[Any]) -> GSoftmaxHead:
        """See `GaussianLogits.fit_gaussians`: batches of h."""
        rows = (batch[0] if isinstance(batch, (tuple, list)) else batch for batch in batches)
        if self.shard is not None:
            self.shard.fit_gaussians(self, rows)
            return self
        with torch.no_grad():
            self.gaussians.fit_gaussians(self.features(h).reshape(-1, self.out_features) for h in rows)
        return self


class LSoftmaxHead(SoftmaxHead):
    """L-softmax (Liu et al. 2016): no bias, and while training the true class must win by a multiple of its angle.

    The margin comes in slowly, because switched on at once it kills the network: its weight 1 / (1 + A) in
    `large_margin_logits` grows geometrically from 1 / (1 + anneal_start) to 1 / (1 + anneal_end) over the first
    `anneal_steps` training steps, which are counted in the module and saved with it.  In evaluation mode and without a
    target there is no margin.

    >>> head = LSoftmaxHead(16, 10, margin=2)
    >>> h, target = torch.randn(4, 16), torch.tensor([1, 2, 3, 4])
    >>> loss = head.loss(h, target)
    >>> int(head.steps), round(head.anneal)
    (1, 999)
    """

    _version = 1

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        margin: int = 2,
        anneal_start: float = 1000.0,
        anneal_end: float = 0.0,
        anneal_steps: int = 10_000,
        form: str | None = None,
        impl: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if form is not None:
            raise ValueError(
                f"L-softmax has no multi-label form (got form={form!r}): its margin is put on the output of the one "
                "true class, and a label that is present or absent by itself has none"
            )
        if margin not in (1, 2, 3, 4) or isinstance(margin, bool):
            raise ValueError(f"margin must be 1, 2, 3 or 4, got {margin!r}")
        for name, v in (("anneal_start", anneal_start), ("anneal_end", anneal_end)):
            if not 0 <= v < math.inf:
                raise ValueError(f"{name} must be 0 or more and finite, got {v!r}")
        if anneal_steps < 1:
            raise ValueError(f"anneal_steps must be 1 or more, got {anneal_steps!r}")
        super().__init__(in_features, num_classes, bias=False, impl=impl, device=device, dtype=dtype)
        self.margin = margin
        self.anneal_start = anneal_start
        self.anneal_end = anneal_end
        self.anneal_steps = anneal_steps
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=device))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.steps.zero_()

    def _anneal(self) -> Tensor:
        done = (self.steps / self.anneal_steps).clamp(max=1.0)
        start, end = math.log1p(self.anneal_start), math.log1p(self.anneal_end)
        return torch.expm1(start + (end - start) * done).clamp_min(0.0)

    @property
    def anneal(self) -> float:
        """A at the next training step."""
        return float(self._anneal())

    def forward(self, h: Tensor, target: Tensor | None = None, *, ignore_index: int = -100) -> Tensor:
        if target is None or not self.training:
            return self.features(h)
        flat, rows, shape = checks.flatten_linear(h, self.weight, target, None)
        z = functional.large_margin_logits(
            flat, self.weight, rows, self.margin, self._anneal(), ignore_index=ignore_index
        )
        if torch.is_grad_enabled():
            self.steps += 1
        return z.view(*shape, self.num_classes)

    def loss(  # type: ignore[override]  # the options spelled out
        self,
        h: Tensor,
        target: Tensor,
        *,
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        options: dict[str, Any] = {
            "class_weight": class_weight,
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
        }
        if not self.training:
            return super().loss(h, target, **options)
        loss = functional.large_margin_cross_entropy(
            h, self.weight, target, self.margin, self._anneal(), impl=self.impl, **options
        )
        if torch.is_grad_enabled():
            self.steps += 1
        return loss

    def extra_repr(self) -> str:
        anneal = f"{self.anneal_start:g} to {self.anneal_end:g} in {self.anneal_steps} steps"
        return f"{self.in_features}, {self.num_classes}, margin={self.margin}, anneal {anneal}"


HEADS: dict[str, type[SoftmaxHead]] = {name: globals()[cls] for name, cls in catalog.HEADS.items()}
