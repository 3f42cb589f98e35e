"""Adapters for Hugging Face `Trainer`, Lightning, TensorBoard and Weights & Biases, each imported on first use."""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["lightning", "tensorboard", "transformers", "wandb"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
