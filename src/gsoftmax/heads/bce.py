"""Linear layer and binary cross entropy, one output per label."""

from __future__ import annotations

import torch

from .softmax import SoftmaxHead


class BCEHead(SoftmaxHead):
    """Binary cross entropy for several labels: one output per label, p = 1 / (1 + exp(-x)).

    It is `SoftmaxHead` with `form="msml"`, under the name that other libraries use.

    in_features, num_classes, bias, h and target as in `SoftmaxHead`
    form: "msml", one output per label

    >>> head = BCEHead(16, 5)
    >>> h, target = torch.zeros(4, 16), torch.zeros(4, 5)
    >>> head(h).shape, head.loss(h, target).ndim
    (torch.Size([4, 5]), 0)
    """

    singlelabel = False
    multilabel_form = "msml"

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = True,
        form: str = "msml",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, num_classes, bias=bias, form=form, device=device, dtype=dtype)
