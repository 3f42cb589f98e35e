"""Large-margin Gaussian mixture loss (Wan et al. 2018): every class is a Gaussian of h."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks, equations
from .softmax import SoftmaxHead

COVARIANCES = ("identity", "diagonal")


class LGMHead(SoftmaxHead):
    """L-GM (Wan et al. 2018): x is the log-density of a Gaussian per class, with a margin on the true class's distance.

    With the means m_k (the rows of `weight`), the diagonal covariances v_k and

        d_k = sum_i (h_i - m_ki)^2 / (2 v_ki),

    x_k = -d_k - (sum_i log v_ki) / 2, the log-density without the constant D log(2 pi) / 2.  In training the true
    class's d_y is multiplied by 1 + alpha, and the loss is cross entropy plus `likelihood` times -x_y.  In evaluation
    mode the loss is cross entropy of x.

    in_features, num_classes, h and target as in `SoftmaxHead`; it has no bias and no multi-label form
    alpha: margin, 0 or more; the authors' code raises it to 0.3 in steps, here it is constant
    likelihood: weight of the likelihood regularization, 0 or more; 0.1 in the authors' code
    covariance: "identity", as in the authors' code, or "diagonal", learned as `log_var` = log v (C, D)
    ignore_index: the target of rows that do not contribute

    >>> head = LGMHead(2, 2, alpha=0.5, likelihood=0.0)
    >>> _ = head.weight.data.copy_(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
    >>> h, target = torch.tensor([[0.0, 0.0]]), torch.tensor([1])
    >>> (head(h) - head.features(h)).abs().max().item(), head(h, target)[0, 1].item()  # -25 / 2 * 1.5
    (0.0, -18.75)
    """

    has_bias = False
    multilabel = False
    reuses_weight = False
    needs_target = True

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        alpha: float = 0.3,
        likelihood: float = 0.1,
        covariance: str = "identity",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        alpha, likelihood = checks.check_number("alpha", alpha), checks.check_number("likelihood", likelihood)
        checks.check_choice("covariance", covariance, COVARIANCES)
        super().__init__(in_features, num_classes, bias=False, device=device, dtype=dtype)
        self.alpha, self.likelihood, self.covariance = alpha, likelihood, covariance
        self.log_var: nn.Parameter | None
        diagonal = covariance == "diagonal"
        self.register_parameter("log_var", nn.Parameter(torch.empty_like(self.weight)) if diagonal else None)
        self.reset_state()

    def reset_state(self) -> None:
        if self.log_var is not None:
            nn.init.zeros_(self.log_var)

    # x is a linear layer on (g, g^2) with g = h - c, for any c.  With the mean of all m_k for c the products are small,
    # and so are their rounding errors.  x does not depend on c, so c needs no gradient.

    def _centre(self) -> Tensor:
        return self.weight.detach().to(checks.compute_dtype(self.weight)).mean(0)

    def linear_input(self, h: Tensor) -> Tensor:
        g = h - self._centre()
        return torch.cat([g, (g * g).sum(-1, keepdim=True) if self.log_var is None else g * g], -1)

    def linear_weights(self) -> tuple[Tensor, Tensor | None]:
        m = self.weight.to(checks.compute_dtype(self.weight)) - self._centre()
        if self.log_var is None:
            return torch.cat([m, m.new_full((len(m), 1), -0.5)], 1), -0.5 * (m * m).sum(1)
        log_var = self.log_var.to(m.dtype)
        precision = torch.exp(-log_var)
        return torch.cat([m * precision, -0.5 * precision], 1), -0.5 * (m * m * precision + log_var).sum(1)

    def features(self, h: Tensor) -> Tensor:
        with torch.autocast(h.device.type, enabled=False):
            return super().features(h.to(checks.compute_dtype(h)))

    def _distance(self, h: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
        """d_y and (sum_i log v_yi) / 2 of every row, (batch,) each."""
        row = equations.label_columns(target, ignore_index, self.num_classes)
        dtype = checks.compute_dtype(h)
        with torch.autocast(h.device.type, enabled=False):
            square = (h.to(dtype) - F.embedding(row, self.weight.to(dtype))) ** 2
            if self.log_var is None:
                return square.sum(1) / 2, square.new_zeros(len(square))
            log_var = F.embedding(row, self.log_var.to(dtype))
            return (square * torch.exp(-log_var)).sum(1) / 2, log_var.sum(1) / 2

    def forward(self, h: Tensor, target: Tensor | None = None, *, ignore_index: int = -100) -> Tensor:
        x = self.features(h)
        if target is None or not self.training:
            return x
        flat, rows, _ = checks.flatten_linear(h, self.weight, target, None)
        checks.check_true_classes(flat, rows, self.num_classes, ignore_index)
        z = x.reshape(-1, self.num_classes)
        distance, _ = self._distance(flat, rows, ignore_index)
        logit = equations.target_logits(z, rows, ignore_index) - self.alpha * distance
        return equations.with_target_logit(z, rows, logit, ignore_index).view(x.shape)

    def loss(self, h: Tensor, target: Tensor, **options: Any) -> Tensor:
        if not self.training or not self.likelihood:
            return self._cross_entropy(h, target, options)
        given = checks.as_options(type(self).__name__, options)
        loss = self._cross_entropy(h, target, {**options, "reduction": "none"})
        flat, rows, shape = checks.flatten_linear(h, self.weight, target, None)
        checks.check_reduction(given, checks.REDUCTIONS)
        distance, half_log_det = self._distance(flat, rows, given.ignore_index)
        weights = equations.row_weights(distance, rows, given)
        loss = loss.reshape(-1) + self.likelihood * weights * (distance + half_log_det)
        loss = equations.reduce_rows(loss, rows, given)
        return equations.loss_dtype(loss.view(shape) if loss.ndim else loss, h)

    def extra_repr(self) -> str:
        text = f"alpha={self.alpha:g}, likelihood={self.likelihood:g}, covariance={self.covariance!r}"
        return f"{super().extra_repr()}, {text}"
