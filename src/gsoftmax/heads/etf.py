"""Fixed simplex equiangular tight frame (Zhu et al. 2021, Yang et al. 2022): class weights that are not trained."""

from __future__ import annotations

import math

import torch

from .softmax import SoftmaxHead


class ETFHead(SoftmaxHead):
    """Fixed simplex ETF (Zhu et al. 2021, Yang et al. 2022): weights of length 1 at equal, largest angles, not trained.

    The weights are W = sqrt(C / (C - 1)) V Q: the columns of V (C, C - 1) are an orthonormal basis of the vectors
    whose sum is 0, and the rows of Q (C - 1, D) are orthonormal and drawn at random.  Therefore W W' = C / (C - 1)
    (I - 11' / C), and the cosine between any two classes is -1 / (C - 1).  The loss is softmax cross entropy, as in Zhu
    et al. (2021), not the dot-regression loss of Yang et al. (2022).

    in_features, num_classes, impl, h and target as in `SoftmaxHead`, with in_features of at least num_classes - 1; it
    has no bias and no multi-label form

    >>> head = ETFHead(8, 3)
    >>> (head.weight @ head.weight.T).round(decimals=4)
    tensor([[ 1.0000, -0.5000, -0.5000],
            [-0.5000,  1.0000, -0.5000],
            [-0.5000, -0.5000,  1.0000]])
    >>> list(head.parameters())
    []
    """

    has_bias = False
    multilabel = False
    reuses_weight = False

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        impl: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if num_classes < 2:
            raise ValueError(f"num_classes must be 2 or more, got {num_classes}")
        if in_features < num_classes - 1:
            need = f"{num_classes - 1}, one less than the classes"
            raise ValueError(f"in_features must be at least {need}, for equal angles between them, got {in_features}")
        super().__init__(in_features, num_classes, bias=False, impl=impl, device=device, dtype=dtype)
        weight = self.weight.detach()
        del self.weight
        self.register_buffer("weight", weight)
        self.reset_linear()

    @torch.no_grad()
    def reset_linear(self) -> None:
        """Draw Q; W is computed in float64."""
        classes, device = self.num_classes, self.weight.device
        drawn = torch.randn(self.in_features, classes - 1, device=device, dtype=torch.float64)
        q = torch.linalg.qr(drawn)[0].T
        # column k = 1, 2, ... of V: k times 1, then -k, then 0, divided by its length
        v = torch.ones(classes, classes - 1, device=device, dtype=torch.float64).triu()
        k = torch.arange(1, classes, device=device, dtype=torch.float64)
        v[1:].diagonal().copy_(-k)
        v = v / (k * (k + 1)).sqrt()
        self.weight.copy_(math.sqrt(classes / (classes - 1)) * (v @ q))
