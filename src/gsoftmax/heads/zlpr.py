"""ZLPR (Su et al. 2022): present labels are ranked above zero, and absent ones below it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import checks, equations
from .softmax import SoftmaxHead


class ZLPRHead(SoftmaxHead):
    """ZLPR (Su et al. 2022) for several labels: log(1 + sum of e^x_k, absent k) + log(1 + sum of e^-x_k, present k).

    The loss of a row ranks its present labels above 0 and its absent labels below 0, and a label is predicted where
    x > 0.  For a soft target y, which label smoothing makes too, e^x_k is multiplied by 1 - y_k and e^-x_k by y_k.
    `predict_proba` gives 1 / (1 + exp(-x)), which is 0.5 at x = 0 and is not calibrated.

    The loss has the options ignore_index, reduction and label_smoothing.  Its "mean" and "batchmean" are over the rows
    that have a known label, and "none" gives (N,).

    in_features, num_classes, bias, h and target as in `SoftmaxHead`
    form: "msml", one output per label

    >>> head = ZLPRHead(4, 3, bias=False)
    >>> h, target = torch.zeros(1, 4), torch.tensor([[1, 0, 0]])
    >>> round(head.loss(h, target).exp().item(), 4)  # (1 + 2) (1 + 1)
    6.0
    """

    singlelabel = False
    multilabel_form = "msml"
    needs_target = True

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

    def loss(self, h: Tensor, target: Tensor, **options: Any) -> Tensor:
        given = checks.as_options(type(self).__name__, options, weight=None)
        z = self(h)
        checks.check_multilabel(z.shape, target, given)
        x = z.to(checks.compute_dtype(z))
        y, known = equations.soft_labels(target, x.dtype, given)
        present = torch.where(known & (y > 0), y.log() - x, -math.inf)
        absent = torch.where(known & (y < 1), (1 - y).log() + x, -math.inf)
        zero = torch.zeros_like(x[..., :1])
        loss = torch.cat([zero, present], -1).logsumexp(-1) + torch.cat([zero, absent], -1).logsumexp(-1)
        if given.reduction == "batchmean":
            given = given._replace(reduction="mean")
        return equations.loss_dtype(equations.reduce_labels(loss, known.any(-1), given), z)
