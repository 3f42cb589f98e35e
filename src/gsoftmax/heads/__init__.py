"""Heads: the last linear layer of a classifier and its loss.

A built-in head is a file here, named after the head, and an entry in `HEADS`: the only list of heads.
"""

from __future__ import annotations

import importlib
import os
import sys

from torch import nn

from ..messages import unknown
from .gsoftmax import GSoftmaxHead
from .lsoftmax import LSoftmaxHead
from .softmax import SoftmaxHead

__all__ = ["HEADS", "GSoftmaxHead", "LSoftmaxHead", "SoftmaxHead", "find"]

# name, as in NAME.py -> class.  `gsoftmax heads` reads this file and NAME.py without importing them.
HEADS: dict[str, type[SoftmaxHead]] = {"softmax": SoftmaxHead, "lsoftmax": LSoftmaxHead, "gsoftmax": GSoftmaxHead}


def find(name: str) -> type[nn.Module]:
    """A head's class from its name or import path.

    name: a key of `HEADS`, or `package.module:ClassName` for a head of your own; the working directory is searched last

    >>> find("gsoftmax").__name__
    'GSoftmaxHead'
    """
    if name in HEADS:
        return HEADS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"{unknown('head', name, HEADS)}; heads are {', '.join(HEADS)} or package.module:ClassName")
    here, added = os.getcwd(), os.getcwd() not in sys.path
    if added:
        sys.path.append(here)  # the `gsoftmax` command, unlike `python -m gsoftmax`, does not search it
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing a module can fail in any way
        raise ValueError(f"head {name!r} cannot be imported: {str(error) or type(error).__name__}") from error
    finally:
        if added:
            sys.path.remove(here)
    missing = [m for m in ("features", "loss", "predict_proba") if not callable(getattr(found, m, None))]
    if not isinstance(found, type) or missing:
        lacks = f"lacks {', '.join(missing)}" if missing else "is not a class"
        raise ValueError(
            f"head {name!r} {lacks}: a head is an nn.Module with features(h), loss(h, target), predict_proba(h)"
        )
    return found
