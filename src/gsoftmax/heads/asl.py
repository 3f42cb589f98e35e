"""Asymmetric loss (Ridnik et al. 2021): binary cross entropy in which easy absent labels count less."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks, equations
from .softmax import SoftmaxHead


class ASLHead(SoftmaxHead):
    """Asymmetric loss (Ridnik et al. 2021) for several labels: focal binary cross entropy that discards easy absences.

    With p = 1 / (1 + exp(-x)) and p_m = max(p - clip, 0), the loss of a label is -(1 - p)^gamma_pos log p if it is
    present and -p_m^gamma_neg log(1 - p_m) if it is absent.  p is not calibrated: most absent labels have no gradient.

    in_features, num_classes, bias, h and target as in `SoftmaxHead`
    gamma_neg, gamma_pos, clip: the defaults are those of the authors' training
    detach: whether the focal factors have no gradient, as in the authors' training
    form: "msml", one output per label

    >>> head = ASLHead(4, 2, bias=False)
    >>> h, target = torch.zeros(1, 4), torch.tensor([[1, 0]])
    >>> [round(value, 4) for value in head.loss(h, target, reduction="none")[0].tolist()]  # log 2, -0.45^4 log 0.55
    [0.6931, 0.0245]
    """

    singlelabel = False
    multilabel_form = "msml"
    needs_target = True

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        gamma_neg: float = 4.0,
        gamma_pos: float = 0.0,
        clip: float = 0.05,
        detach: bool = True,
        bias: bool = True,
        form: str = "msml",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        gamma_neg = checks.check_number("gamma_neg", gamma_neg)
        gamma_pos = checks.check_number("gamma_pos", gamma_pos)
        clip = checks.check_number("clip", clip, 1.0)
        if not isinstance(detach, bool):
            raise ValueError(f"detach must be True or False, got {detach!r}")
        super().__init__(in_features, num_classes, bias=bias, form=form, device=device, dtype=dtype)
        self.gamma_neg, self.gamma_pos, self.clip, self.detach = gamma_neg, gamma_pos, clip, detach

    def loss(self, h: Tensor, target: Tensor, **options: Any) -> Tensor:
        given = checks.as_options(type(self).__name__, options, weight="weight")
        z = self(h)
        checks.check_multilabel(z.shape, target, given)
        x = z.to(checks.compute_dtype(z))
        y, known = equations.soft_labels(target, x.dtype, given)
        p_m = (torch.sigmoid(x) - self.clip).clamp_min(0)
        log_p = F.logsigmoid(x)
        log_q = torch.log1p(-p_m) if self.clip else F.logsigmoid(-x)  # p may round to 1, p_m is at most 1 - clip
        present = equations.focal_weight(torch.sigmoid(-x), self.gamma_pos)
        absent = equations.focal_weight(p_m, self.gamma_neg)
        if self.detach:
            present, absent = present.detach(), absent.detach()
        loss = -equations.xlogy(y * present, log_p) - equations.xlogy((1 - y) * absent, log_q)
        if given.weight is not None:
            loss = loss * given.weight.to(loss.dtype)
        return equations.loss_dtype(equations.reduce_labels(loss, known, given), z)

    def extra_repr(self) -> str:
        text = f"gamma_neg={self.gamma_neg:g}, gamma_pos={self.gamma_pos:g}, clip={self.clip:g}, detach={self.detach}"
        return f"{super().extra_repr()}, {text}"
