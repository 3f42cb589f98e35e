"""G-softmax for PyTorch: a softmax whose logits gain a Gaussian term, z = x + lam * Phi((x - mu) / sigma).

Names and modules are imported on first use, so that `gsoftmax --help` does not import torch.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from . import functional, kernels, schedules
    from .attachment import attach, attached_loss, head_of
    from .gaussians import GaussianLogits, check_optimised, param_groups
    from .heads import GSoftmaxHead, LSoftmaxHead, SoftmaxHead
    from .losses import GSoftmaxLoss, MultiLabelGSoftmaxLoss
    from .models import load

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
    "load",
    "param_groups",
    "schedules",
]


def __getattr__(name: str) -> Any:
    if importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f".{name}", __name__)
    for home in ("gaussians", "losses", "heads", "attachment", "models") if name in __all__ else ():
        module = importlib.import_module(f".{home}", __name__)
        if name in module.__all__:
            globals()[name] = found = getattr(module, name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *(module.name for module in pkgutil.iter_modules(__path__))})
