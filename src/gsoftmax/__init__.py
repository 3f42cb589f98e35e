"""G-softmax for PyTorch: a softmax whose logits gain a Gaussian term, z = x + lam * Phi((x - mu) / sigma).

Names and modules are imported on first use, so that `gsoftmax --help` does not wait for torch.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from . import functional as functional
    from . import kernels as kernels
    from . import schedules as schedules
    from .attachment import attach, attached_loss, head_of
    from .gaussians import GaussianLogits, check_optimised, param_groups
    from .heads import GSoftmaxHead, LSoftmaxHead, SoftmaxHead
    from .losses import GSoftmaxLoss, MultiLabelGSoftmaxLoss

_HOMES = {
    "GSoftmaxHead": "heads",
    "GSoftmaxLoss": "losses",
    "GaussianLogits": "gaussians",
    "LSoftmaxHead": "heads",
    "MultiLabelGSoftmaxLoss": "losses",
    "SoftmaxHead": "heads",
    "attach": "attachment",
    "attached_loss": "attachment",
    "check_optimised": "gaussians",
    "head_of": "attachment",
    "param_groups": "gaussians",
}

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


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        globals()[name] = found = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
        return found
    if importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *(module.name for module in pkgutil.iter_modules(__path__))})
