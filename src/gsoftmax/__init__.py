"""G-softmax for PyTorch: a softmax whose logits gain a Gaussian term, z = x + lam * Phi((x - mu) / sigma)."""

from __future__ import annotations

import importlib
from types import ModuleType

from . import functional, kernels, schedules
from ._version import __version__
from .attach import attach, attached_loss, check_optimised, head_of
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
    "attach",
    "attached_loss",
    "check_optimised",
    "functional",
    "head_of",
    "kernels",
    "param_groups",
    "schedules",
]

_ON_FIRST_USE = (
    "analyze",
    "backbones",
    "compare",
    "data",
    "export",
    "geometry",
    "metrics",
    "recipes",
    "report",
    "sharded",
    "significance",
    "torchmetrics",
    "train",
)


def __getattr__(name: str) -> ModuleType:
    if name in _ON_FIRST_USE:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_ON_FIRST_USE])
