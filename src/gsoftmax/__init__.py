"""G-softmax for PyTorch: a softmax whose logits gain a Gaussian term, z = x + lam * Phi((x - mu) / sigma)."""

from __future__ import annotations

import importlib
from types import ModuleType

from . import functional, kernels, schedules
from ._version import __version__
from .gaussians import GaussianLogits, param_groups
from .heads import GSoftmaxHead, LSoftmaxHead, SoftmaxHead
from .losses import GSoftmaxLoss, MultiLabelGSoftmaxLoss

__all__ = [
    "GSoftmaxHead",
    "GSoftmaxLoss",
    "GaussianLogits",
    "LSoftmaxHead",
    "MultiLabelGSoftmaxLoss",
    "SoftmaxHead",
    "__version__",
    "functional",
    "kernels",
    "param_groups",
    "schedules",
]

_ON_FIRST_USE = ("backbones", "compare", "data", "geometry", "metrics", "significance", "torchmetrics", "train")


def __getattr__(name: str) -> ModuleType:
    if name in _ON_FIRST_USE:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_ON_FIRST_USE])
