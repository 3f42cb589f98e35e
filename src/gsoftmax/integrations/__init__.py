"""Adapters for Hugging Face `Trainer`, Lightning and TensorBoard, each imported on first use."""

from __future__ import annotations

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name in ("lightning", "tensorboard", "transformers"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
