"""Linear layer and softmax cross entropy: the baseline, and what the other heads derive from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks, equations, functional, kernels
from ..gaussians import param_groups
from ..kernels import IMPLS
from ..kernels.linear import Linear
from ..layout import two_outputs


class SoftmaxHead(nn.Module):
    """Linear layer and softmax cross entropy: the baseline head.

    `features(h)` gives x, calling the head gives z (here z = x), `loss(h, target)` the loss, `predict_proba(h)` the
    probabilities.  Parameters: `weight` (outputs, in_features) and `bias`, as in `nn.Linear`.

    in_features, num_classes: width of h, number of classes C or labels L
    bias: whether the linear layer has a bias
    form: None, or a form of `multilabel_cross_entropy`: x and z are then (N, 2, L), absence first, or (N, L) for
        "msml", and `predict_proba` gives p+ (N, L)
    impl: as in `gsoftmax_cross_entropy`
    h: (..., in_features), features of the backbone
    target: class indices (...) or probabilities (..., C); for a multi-label form (N, L)
    k: how many classes, 1 to C
    steps: batches of the whole training

    >>> head = SoftmaxHead(16, 10)
    >>> h, target = torch.zeros(4, 16), torch.tensor([1, 2, 3, 4])
    >>> head(h).shape, head.loss(h, target).ndim
    (torch.Size([4, 10]), 0)
    """

    has_bias = True  # whether the linear layer can have one
    singlelabel = True  # whether it takes single-label data
    multilabel = True  # whether it takes multi-label data
    multilabel_form = "paired"  # `form` for multi-label data by default
    reuses_weight = True  # whether it can take over the weight of a trained classifier
    needs_target = False  # whether training needs `loss`, because no criterion on z is the same

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = True,
        form: str | None = None,
        impl: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if form is not None:
            if not self.multilabel:
                raise ValueError(f"{type(self).__name__} has no multi-label form, got form={form!r}")
            checks.check_choice("form", form, checks.MULTILABEL_FORMS)
        if not self.singlelabel and form != self.multilabel_form:
            raise ValueError(f"form of {type(self).__name__} must be {self.multilabel_form!r}, got {form!r}")
        if not isinstance(bias, bool):
            raise ValueError(f"bias must be True or False, got {bias!r}")
        checks.check_choice("impl", impl, IMPLS)
        self.in_features = in_features
        self.num_classes = num_classes
        self.form = form
        self.impl = impl
        self.out_features = 2 * num_classes if two_outputs(form) else num_classes
        self.weight: nn.Parameter
        self.bias: nn.Parameter | None
        self.weight = nn.Parameter(torch.empty(self.out_features, in_features, device=device, dtype=dtype))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(self.out_features, device=device, dtype=dtype)) if bias else None
        )
        SoftmaxHead.reset_linear(self)

    @classmethod
    def defaults(cls, steps: int) -> dict[str, Any]:
        """Default options for a training run.

        steps: its number of optimizer steps
        """
        return {}

    def reset_parameters(self) -> None:
        """Reset the linear layer and everything else."""
        self.reset_linear()
        self.reset_state()

    def reset_state(self) -> None:
        """Reset everything except the linear layer to its initial values."""

    def reset_linear(self) -> None:
        """Draw weight and bias as `nn.Linear` does: uniform within 1 / sqrt(in_features)."""
        bound = 1 / math.sqrt(self.in_features)
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                nn.init.uniform_(parameter, -bound, bound)

    def linear_input(self, h: Tensor) -> Tensor:
        """What the linear layer is applied to."""
        return h

    def linear_weights(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the linear layer: x = linear(linear_input(h), *linear_weights())."""
        return self.weight, self.bias

    def features(self, h: Tensor) -> Tensor:
        """x, the raw outputs: (..., C), or (N, 2, L) for a multi-label form of two outputs."""
        x = F.linear(self.linear_input(h), *self.linear_weights())
        return x.view(-1, 2, self.num_classes) if two_outputs(self.form) else x

    def forward(self, h: Tensor, target: Tensor | None = None) -> Tensor:
        """z, the adjusted outputs.  Only a head with a margin uses `target`."""
        return self.features(h)

    def _cross_entropy(self, h: Tensor, target: Tensor, options: Mapping[str, Any]) -> Tensor:
        """Cross entropy of z, of a head whose z in training is not that linear layer."""
        given = checks.as_options(type(self).__name__, options)
        flat, rows, shape = checks.flatten_linear(h, self.weight, target, self.bias)
        z = self(flat, rows, ignore_index=given.ignore_index)
        checks.check_cross_entropy(z, rows, given)
        loss = equations.softmax_cross_entropy(z, rows, given)
        return equations.loss_dtype(loss.view(shape) if loss.ndim else loss, h)

    def loss(self, h: Tensor, target: Tensor, **options: Any) -> Tensor:
        """The training loss.

        options: class_weight, ignore_index, reduction, label_smoothing; for a multi-label form those of
            `multilabel_cross_entropy`
        """
        if self.form is not None:
            return self._label_loss(h, target, None, None, 0.0, options)
        return functional.linear_gsoftmax_cross_entropy(
            h, self.weight, target, 0.0, 1.0, 0.0, bias=self.bias, impl=self.impl, **options
        )

    def _label_loss(
        self, h: Tensor, target: Tensor, mu: Tensor | None, sigma: Tensor | None, lam: float, given: Mapping[str, Any]
    ) -> Tensor:
        """The loss of a multi-label form, with a Gaussian term where there are mu and sigma."""
        assert self.form is not None
        options = checks.as_label_options(type(self).__name__, self.form, given)
        h = h.reshape(-1, self.in_features) if two_outputs(self.form) else h
        checks.check_multilabel((*h.shape[:-1], self.num_classes), target, options)
        layer = Linear(self.linear_input(h), *self.linear_weights())
        if mu is not None and sigma is not None:
            dtype = equations.linear_dtype(h)
            mu, sigma = checks.as_gaussians_for(self.out_features, dtype, h.device, mu, sigma, lam)
        return kernels.linear_multilabel(layer, target, mu, sigma, lam, options)

    def predict_proba(self, h: Tensor) -> Tensor:
        """p (..., C), or p+ (N, L) for a multi-label form."""
        z = self(h)
        if self.form is None:
            return torch.softmax(z, -1)
        return equations.label_probabilities(z.flatten(-2) if two_outputs(self.form) else z, self.form)

    @torch.no_grad()
    def predict(self, h: Tensor) -> Tensor:
        """The class with the largest z, (...); ties go to the lowest class index."""
        return self.topk(h, 1)[1].squeeze(-1)

    @torch.no_grad()
    def topk(self, h: Tensor, k: int = 5) -> tuple[Tensor, Tensor]:
        """The largest z and their classes, largest first, (..., k) each.

        k: how many
        """
        self._check_k(k)
        z = self(h)
        if k > 1:
            return tuple(z.topk(k, -1))
        return tuple(z.max(-1, keepdim=True))  # topk does not guarantee the order of ties

    def _check_k(self, k: int) -> None:
        if self.form is not None:
            raise ValueError(f"topk is for single-label heads, got form={self.form!r}")
        if not 1 <= k <= self.num_classes:
            raise ValueError(f"k must lie between 1 and the {self.num_classes} classes, got {k!r}")

    def param_groups(self, *, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Parameter groups of this head, as in `gsoftmax.param_groups`."""
        return param_groups(self, lr=lr, weight_decay=weight_decay)

    def extra_repr(self) -> str:
        text = f"{self.in_features}, {self.num_classes}"
        if self.has_bias and self.bias is None:
            text += ", bias=False"
        return text if self.form is None else f"{text}, form={self.form!r}"
