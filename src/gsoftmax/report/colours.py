"""Colour-blind safe colours (Okabe and Ito), fixed per head."""

from __future__ import annotations

from collections.abc import Sequence

BLUE, ORANGE, VERMILLION = "#0072B2", "#E69F00", "#D55E00"
GREEN, PURPLE, SKY, GREY = "#009E73", "#CC79A7", "#56B4E9", "#8C8C8C"
_FIXED = {"softmax": BLUE, "lsoftmax": ORANGE, "gsoftmax": VERMILLION}
_FREE = (GREEN, PURPLE, SKY, VERMILLION, ORANGE, BLUE)


def colours(heads: Sequence[str]) -> dict[str, str]:
    """A colour for each head: fixed for the three of the paper, the rest in order, grey when all are taken.

    >>> colours(["softmax", "gsoftmax", "mine"])
    {'softmax': '#0072B2', 'gsoftmax': '#D55E00', 'mine': '#009E73'}
    """
    found = {h: _FIXED[h] for h in heads if h in _FIXED}
    free = [c for c in _FREE if c not in found.values()]
    for h in heads:
        if h not in found:
            found[h] = free.pop(0) if free else GREY
    return {h: found[h] for h in heads}
