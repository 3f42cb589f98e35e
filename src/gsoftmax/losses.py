"""Criteria for a training loop that already exists: they take the outputs x of any model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import checks, equations, functional, kernels
from .gaussians import GaussianLogits, param_groups


class GSoftmaxLoss(nn.Module):
    """Drop-in replacement for `nn.CrossEntropyLoss` with the G-softmax term; at lam = 0 it is that loss, bit for bit.

    Its Gaussians are parameters: hand them to the optimiser too, for instance by `param_groups`.  Predict with `logits`
    or `predict_proba`, which add the distribution term.  Options of the Gaussians (lam, mu, sigma, gaussians, momentum,
    sigma_min, lr_mult) are those of `GaussianLogits`, options of the loss those of `nn.CrossEntropyLoss`.

    x: (N, C), (N, C, d1, ...) or (C,); target: class indices or probabilities.

    >>> loss = GSoftmaxLoss(10)
    >>> x, target = torch.zeros(4, 10, requires_grad=True), torch.tensor([1, 2, 3, 4])
    >>> loss(x, target).item()
    2.3025...
    >>> loss.mu.shape, loss.sigma.shape
    (torch.Size([10]), torch.Size([10]))
    """

    weight: Tensor | None

    def __init__(
        self,
        num_classes: int,
        *,
        lam: float = 1.0,
        mu: float | Sequence[float] | Tensor = 0.0,
        sigma: float | Sequence[float] | Tensor = 1.0,
        gaussians: str = "learned",
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        impl: str = "auto",
        **gaussian_options: Any,
    ) -> None:
        super().__init__()
        self.gaussians = GaussianLogits(
            num_classes, lam=lam, mu=mu, sigma=sigma, gaussians=gaussians, **gaussian_options
        )
        checks.check_choice("reduction", reduction, checks.REDUCTIONS)
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.impl = impl

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        options = checks.Options(self.weight, self.ignore_index, self.reduction, self.label_smoothing)
        checks.check_cross_entropy(x, target, options)
        g = self.gaussians
        mu, sigma = g.current(x, target, self.ignore_index)
        return kernels.cross_entropy(x, target, mu, sigma, g.lam, options, self.impl)

    def logits(self, x: Tensor) -> Tensor:
        """z, of x's shape; tracked Gaussians stay as they are."""
        return functional.gsoftmax_logits(x, self.mu, self.sigma, self.lam)

    def predict_proba(self, x: Tensor) -> Tensor:
        """p = softmax(z), of x's shape."""
        return torch.softmax(self.logits(x), checks.class_dim(x))

    @property
    def lam(self) -> float:
        return self.gaussians.lam

    @lam.setter
    def lam(self, lam: float) -> None:
        self.gaussians.lam = lam

    @property
    def mu(self) -> Tensor:
        return self.gaussians.mu

    @property
    def sigma(self) -> Tensor:
        return self.gaussians.sigma

    def fit_gaussians(self, batches: Iterable[Any]) -> GSoftmaxLoss:
        """See `GaussianLogits.fit_gaussians`: batches of x."""
        self.gaussians.fit_gaussians(batches)
        return self

    def param_groups(self, *, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """See `gsoftmax.param_groups`."""
        return param_groups(self, lr=lr, weight_decay=weight_decay)

    def extra_repr(self) -> str:
        return _options_repr(self, reduction="mean", ignore_index=-100, label_smoothing=0.0, impl="auto")


class MultiLabelGSoftmaxLoss(nn.Module):
    """Cross entropy over labels that may all be present or absent, in any form of `multilabel_cross_entropy`.

    Every label has two outputs, absence first: x is (N, 2, L), where x[:, 0] is x- and x[:, 1] is x+, or the same laid
    flat as (N, 2L), which is what `nn.Linear(features, 2 * L)` gives.  form="msml" has one output: x is (N, L).
    target: (N, L), 0 or 1, probabilities, or ignore_index.  `mu` and `sigma` read back as (2, L), or (L,) for "msml".
    lam = 0 is the plain softmax loss of the same form.

    >>> loss = MultiLabelGSoftmaxLoss(3)
    >>> x, target = torch.zeros(4, 6), torch.randint(2, (4, 3))
    >>> loss(x, target)
    tensor(0.6931, grad_fn=<DivBackward0>)
    >>> loss.predict_proba(x).shape
    torch.Size([4, 3])
    """

    weight: Tensor | None
    pos_weight: Tensor | None

    def __init__(
        self,
        num_labels: int,
        *,
        form: str = "paired",
        lam: float = 1.0,
        mu: float | Sequence[float] | Tensor = 0.0,
        sigma: float | Sequence[float] | Tensor = 1.0,
        gaussians: str = "learned",
        weight: Tensor | None = None,
        pos_weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        **gaussian_options: Any,
    ) -> None:
        super().__init__()
        checks.check_choice("form", form, checks.MULTILABEL_FORMS)
        checks.check_choice("reduction", reduction, checks.MULTILABEL_REDUCTIONS)
        self.num_labels = num_labels
        self.form = form
        self.gaussians = GaussianLogits(
            num_labels if form == "msml" else 2 * num_labels,
            lam=lam,
            mu=spread_over_outputs(mu, num_labels, form),
            sigma=spread_over_outputs(sigma, num_labels, form),
            gaussians=gaussians,
            **gaussian_options,
        )
        self.register_buffer("weight", weight)
        self.register_buffer("pos_weight", pos_weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        z = self.gaussians(flat_outputs(x, self.num_labels, self.form))
        z_pos, z_neg = split_outputs(z, self.num_labels, self.form)
        loss = functional.multilabel_cross_entropy(
            z_pos,
            z_neg,
            target,
            form=self.form,
            weight=self.weight,
            pos_weight=self.pos_weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )
        return equations.loss_dtype(loss, x)

    def logits(self, x: Tensor) -> Tensor:
        """z, of x's shape; tracked Gaussians stay as they are."""
        flat = flat_outputs(x, self.num_labels, self.form)
        g = self.gaussians
        return functional.gsoftmax_logits(flat, g.mu, g.sigma, g.lam).view(x.shape)

    def predict_proba(self, x: Tensor) -> Tensor:
        """p+ (N, L); a label is predicted where it is at least 0.5."""
        z_pos, z_neg = split_outputs(self.logits(x), self.num_labels, self.form)
        return functional.multilabel_probabilities(z_pos, z_neg, form=self.form)

    @property
    def lam(self) -> float:
        return self.gaussians.lam

    @lam.setter
    def lam(self, lam: float) -> None:
        self.gaussians.lam = lam

    @property
    def mu(self) -> Tensor:
        return by_sign(self.gaussians.mu, self.form)

    @property
    def sigma(self) -> Tensor:
        return by_sign(self.gaussians.sigma, self.form)

    def fit_gaussians(self, batches: Iterable[Any]) -> MultiLabelGSoftmaxLoss:
        """See `GaussianLogits.fit_gaussians`: batches of x."""
        rows = (batch[0] if isinstance(batch, (tuple, list)) else batch for batch in batches)
        self.gaussians.fit_gaussians(flat_outputs(x, self.num_labels, self.form) for x in rows)
        return self

    def param_groups(self, *, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """See `gsoftmax.param_groups`."""
        return param_groups(self, lr=lr, weight_decay=weight_decay)

    def extra_repr(self) -> str:
        options = _options_repr(self, reduction="mean", ignore_index=-100, label_smoothing=0.0)
        return f"{self.num_labels}, form={self.form!r}" + (f", {options}" if options else "")


# ------------------------------------------------------------- the layout of multi-label outputs, shared with the heads


def flat_outputs(x: Tensor, labels: int, form: str) -> Tensor:  # (N, 2, L) or (N, 2L) -> (N, 2L); "msml": (N, L)
    checks.check_outputs(x)
    width = labels if form == "msml" else 2 * labels
    if x.shape[1:] == (width,):
        return x
    if form != "msml" and x.shape[1:] == (2, labels):
        return x.reshape(-1, width)
    expected = f"(N, {labels})" if form == "msml" else f"(N, 2, {labels}) or (N, {width})"
    raise ValueError(f"x must be {expected} for {labels} labels and form={form!r}, got {tuple(x.shape)}")


def split_outputs(z: Tensor, labels: int, form: str) -> tuple[Tensor, Tensor | None]:  # -> (N, L) present, absent
    if form == "msml":
        return z, None
    z = z.view(-1, 2, labels)
    return z[:, 1], z[:, 0]


def by_sign(v: Tensor, form: str) -> Tensor:  # (2L,) -> (2, L)
    return v if form == "msml" else v.view(2, -1)


def spread_over_outputs(v: float | Sequence[float] | Tensor, labels: int, form: str) -> float | Tensor:
    """Initial values for every output from a number, (L,), (2, L) or (2L,)."""
    if isinstance(v, (int, float)) or form == "msml":
        return v  # type: ignore[return-value]
    v = torch.as_tensor(v, dtype=torch.float64, device="cpu")
    return v.expand(2, labels).reshape(-1) if v.shape == (labels,) else v.reshape(-1)


def _options_repr(module: nn.Module, **defaults: Any) -> str:
    return ", ".join(f"{k}={getattr(module, k)!r}" for k, v in defaults.items() if getattr(module, k) != v)
