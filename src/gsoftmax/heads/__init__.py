"""Heads: the last linear layer of a classifier and its loss.

`softmax`, `lsoftmax` and `gsoftmax` are those of the paper; the others are alternatives from the literature.  A
built-in head is a file here, named after the head, and an entry in `HEADS`: the only list of heads.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..messages import unknown
from .adjusted import AdjustedHead
from .arcface import ArcFaceHead
from .asl import ASLHead
from .bce import BCEHead
from .cosface import CosFaceHead
from .etf import ETFHead
from .focal import FocalHead
from .gce import GCEHead
from .gsoftmax import GSoftmaxHead
from .lgm import LGMHead
from .lsoftmax import LSoftmaxHead
from .softmax import SoftmaxHead
from .zlpr import ZLPRHead

__all__ = [
    "DEFAULT",
    "HEADS",
    "ASLHead",
    "AdjustedHead",
    "ArcFaceHead",
    "BCEHead",
    "CosFaceHead",
    "ETFHead",
    "FocalHead",
    "GCEHead",
    "GSoftmaxHead",
    "LGMHead",
    "LSoftmaxHead",
    "SoftmaxHead",
    "ZLPRHead",
    "find",
    "options_for",
]

# name, as in NAME.py -> class.  `gsoftmax heads` reads this file and NAME.py without importing them.
HEADS: dict[str, type[SoftmaxHead]] = {
    "softmax": SoftmaxHead,
    "lsoftmax": LSoftmaxHead,
    "gsoftmax": GSoftmaxHead,
    "adjusted": AdjustedHead,
    "focal": FocalHead,
    "gce": GCEHead,
    "cosface": CosFaceHead,
    "arcface": ArcFaceHead,
    "lgm": LGMHead,
    "etf": ETFHead,
    "bce": BCEHead,
    "asl": ASLHead,
    "zlpr": ZLPRHead,
}
DEFAULT = ("softmax", "lsoftmax", "gsoftmax")  # those of the paper, which `gsoftmax compare` compares by default


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


def options_for(head: type[nn.Module], options: Mapping[str, Any], multilabel: bool, data: str) -> dict[str, Any]:
    """The options of a head for some data, with its default `form` where rows have several labels.

    head, options: the class, and the options so far; a class without the attributes of `SoftmaxHead` takes all data
    multilabel, data: whether rows have several labels, and the name of the data

    >>> options_for(GSoftmaxHead, {"lam": 2.0}, True, "digits-mosaic")
    {'form': 'paired', 'lam': 2.0}
    >>> options_for(LSoftmaxHead, {}, True, "digits-mosaic")
    Traceback (most recent call last):
    ValueError: LSoftmaxHead is for single-label data, and digits-mosaic is multi-label
    """
    kinds = {True: "multi-label", False: "single-label"}
    if not getattr(head, "multilabel" if multilabel else "singlelabel", True):
        raise ValueError(f"{head.__name__} is for {kinds[not multilabel]} data, and {data} is {kinds[multilabel]}")
    if multilabel:
        return {"form": getattr(head, "multilabel_form", "paired"), **options}
    if options.get("form") is not None:
        raise ValueError(f"form={options['form']!r} is for multi-label data, and {data} is single-label")
    return dict(options)
