"""Linear layer and softmax cross entropy: the baseline, and what the other heads derive from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks, functional
from ..gaussians import param_groups
from ..kernels import IMPLS
from ..layout import split_outputs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ..sharded import ClassShard


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

    has_bias = True  # whether the linear layer can have one
    multilabel = True  # whether `form` can be given
    needs_target = False  # whether z depends on the target while training

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
            from .. import sharded  # late: most heads are whole

            sharded.set_up(self, shard, mesh, negatives, seed, averaged, bias, device, dtype)
            return
        self.weight = nn.Parameter(torch.empty(self.out_features, in_features, device=device, dtype=dtype))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(self.out_features, device=device, dtype=dtype)) if bias else None
        )
        SoftmaxHead.reset_linear(self)

    @classmethod
    def defaults(cls, steps: int) -> dict[str, Any]:
        """Options that depend on the length of the training.

        steps: how many batches the head will be trained on
        """
        return {}

    def reset_parameters(self) -> None:
        """Linear layer as `nn.Linear`, everything else at its initial values."""
        self.reset_linear()
        self.reset_state()

    def reset_state(self) -> None:
        """Everything except the linear layer back to its initial values."""

    def reset_linear(self) -> None:
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
