"""Loss modules for an existing training loop: their input is the logits x of any model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from . import checks, equations, functional, kernels
from .gaussians import GaussianLogits, first_items, param_groups
from .layout import by_sign, flat_outputs, spread_over_outputs

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["GSoftmaxLoss", "MultiLabelGSoftmaxLoss"]


class _GaussianLoss(nn.Module):
    """What the losses share: Gaussians, the options of cross entropy, and z from x."""

    weight: Tensor | None

    def __init__(
        self, gaussians: GaussianLogits, options: checks.Options | checks.LabelOptions, form: str | None = None
    ) -> None:
        super().__init__()
        self.gaussians = gaussians
        self.form = form
        self.register_buffer("weight", options.weight)
        self.ignore_index = options.ignore_index
        self.reduction = options.reduction
        self.label_smoothing = options.label_smoothing

    def _flat(self, x: Tensor) -> Tensor:
        """x with its classes or outputs in dimension 1."""
        return x

    def logits(self, x: Tensor) -> Tensor:
        """z, of x's shape; tracked Gaussians stay as they are."""
        g = self.gaussians
        return functional.gsoftmax_logits(self._flat(x), g.mu, g.sigma, g.lam).view(x.shape)

    def fit_gaussians(self, batches: Iterable[Any]) -> Self:
        """Set mu and sigma from batches of x, as in `GaussianLogits.fit_gaussians`."""
        self.gaussians.fit_gaussians(map(self._flat, first_items(batches)))
        return self

    def param_groups(self, *, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Parameter groups of this loss, as in `gsoftmax.param_groups`."""
        return param_groups(self, lr=lr, weight_decay=weight_decay)

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

    def extra_repr(self) -> str:
        defaults = {"reduction": "mean", "ignore_index": -100, "label_smoothing": 0.0, "impl": "auto"}
        return ", ".join(f"{k}={getattr(self, k)!r}" for k, v in defaults.items() if getattr(self, k, v) != v)


class GSoftmaxLoss(_GaussianLoss):
    """Drop-in replacement for `nn.CrossEntropyLoss` with the G-softmax term; at lam = 0 it is that loss, bit for bit.

    Its Gaussians are parameters: pass them to the optimizer, for instance with `param_groups`.  Predict with `logits`
    or `predict_proba`, which add the Gaussian term.

    num_classes: number of classes C
    lam, mu, sigma, gaussians, gaussian_options: the Gaussians, as in `GaussianLogits`
    weight, ignore_index, reduction, label_smoothing: as in `nn.CrossEntropyLoss`
    impl: how the loss is computed, as in `gsoftmax_cross_entropy`
    x, target: (N, C), (N, C, d1, ...) or (C,); class indices or probabilities

    >>> import torch
    >>> loss = GSoftmaxLoss(10)
    >>> x, target = torch.zeros(4, 10, requires_grad=True), torch.tensor([1, 2, 3, 4])
    >>> loss(x, target).item()
    2.3025...
    >>> loss.mu.shape, loss.sigma.shape
    (torch.Size([10]), torch.Size([10]))
    """

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
        options = checks.Options(weight, ignore_index, reduction, label_smoothing)
        checks.check_options(options, num_classes)
        checks.check_choice("impl", impl, kernels.IMPLS)
        g = GaussianLogits(num_classes, lam=lam, mu=mu, sigma=sigma, gaussians=gaussians, **gaussian_options)
        super().__init__(g, options)
        self.impl = impl

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        options = checks.Options(self.weight, self.ignore_index, self.reduction, self.label_smoothing)
        checks.check_cross_entropy(x, target, options)
        g = self.gaussians
        mu, sigma = g.current(x, target, self.ignore_index)
        return kernels.cross_entropy(x, target, mu, sigma, g.lam, options, self.impl)

    def predict_proba(self, x: Tensor) -> Tensor:
        """p = softmax(z), of x's shape and in the dtype of softmax(x)."""
        g = self.gaussians
        return functional.gsoftmax(x, g.mu, g.sigma, g.lam)


class MultiLabelGSoftmaxLoss(_GaussianLoss):
    """Cross entropy for labels of which any number may be present, in the forms of `multilabel_cross_entropy`.

    lam = 0 is the plain softmax loss of the same form.  `mu` and `sigma` have shape (2, L), or (L,) for "msml".

    num_labels: number of labels L
    form: "paired", "independent", "printed" or "msml"
    lam, mu, sigma, gaussians, gaussian_options: the Gaussians, as in `GaussianLogits`; mu, sigma may be (L,) or (2, L)
    weight, pos_weight, ignore_index, reduction, label_smoothing: as in `multilabel_cross_entropy`
    x: two outputs per label, absence first: (N, 2, L), where x[:, 0] is x- and x[:, 1] is x+, or flattened to (N, 2L),
        the output of `nn.Linear(features, 2 * L)`; "msml" has one output, (N, L)
    target: (N, L), 0 or 1, probabilities, or ignore_index

    >>> import torch
    >>> loss = MultiLabelGSoftmaxLoss(3)
    >>> x, target = torch.zeros(4, 6), torch.randint(2, (4, 3))
    >>> loss(x, target).detach()
    tensor(0.6931)
    >>> loss.predict_proba(x).shape
    torch.Size([4, 3])
    """

    form: str
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
        checks.check_choice("form", form, checks.MULTILABEL_FORMS)
        options = checks.LabelOptions(form, weight, pos_weight, ignore_index, reduction, label_smoothing)
        checks.check_options(options, num_labels)
        mu, sigma = (spread_over_outputs(v, num_labels, form) for v in (mu, sigma))
        outputs = num_labels if form == "msml" else 2 * num_labels
        g = GaussianLogits(outputs, lam=lam, mu=mu, sigma=sigma, gaussians=gaussians, **gaussian_options)
        super().__init__(g, options, form)
        self.num_labels = num_labels
        self.register_buffer("pos_weight", pos_weight)

    def _flat(self, x: Tensor) -> Tensor:
        return flat_outputs(x, self.num_labels, self.form)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self._flat(x)
        options = checks.LabelOptions(*(getattr(self, name) for name in checks.LabelOptions._fields))
        checks.check_multilabel((len(x), self.num_labels), target, options)
        return kernels.multilabel(x, target, *self.gaussians.current(x), self.lam, options)

    def predict_proba(self, x: Tensor) -> Tensor:
        """p+ (N, L); a label is predicted where it is at least 0.5."""
        g = self.gaussians
        z = functional.gsoftmax_logits(self._flat(x), g.mu, g.sigma, g.lam)
        return equations.label_probabilities(z, self.form)

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (str(self.num_labels), f"form={self.form!r}", super().extra_repr())))
