"""A custom head in `gsoftmax compare`, given by its import path.

A head is an nn.Module, constructed as Head(in_features, num_classes, ...), with the methods features(h),
loss(h, target) and predict_proba(h).  This one divides the cosine between h and each class's weight by a temperature.

    python examples/own_head.py          # writes runs/own-head; on the command line:
    PYTHONPATH=examples gsoftmax compare digits --heads 'softmax,own_head:CosineHead(temperature=0.1)' --seeds 2
"""

import sys

import torch.nn.functional as F
from torch import Tensor, nn

from gsoftmax.cli import main


class CosineHead(nn.Module):
    def __init__(self, in_features: int, num_classes: int, temperature: float = 0.1) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, num_classes, bias=False)
        self.temperature = temperature

    def features(self, h: Tensor) -> Tensor:
        """x, the raw outputs: class geometry is measured on them."""
        return F.linear(F.normalize(h), F.normalize(self.linear.weight)) / self.temperature

    def loss(self, h: Tensor, target: Tensor, **options) -> Tensor:
        return F.cross_entropy(self.features(h), target, **options)

    def predict_proba(self, h: Tensor) -> Tensor:
        return self.features(h).softmax(-1)


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "runs/own-head"
    heads = "softmax,own_head:CosineHead(temperature=0.1)"
    sys.exit(main(["compare", "digits", "epochs=3", "--heads", heads, "--seeds", "2", "--jobs", "1", "--out", folder]))
