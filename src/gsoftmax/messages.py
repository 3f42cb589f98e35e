"""Words that error messages share.  Nothing here imports torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, choices: Iterable[str], n: int = 1, cutoff: float = 0.6) -> str:
    """The end of an error message that names the closest choices; empty where none is close.

    >>> did_you_mean("gsoftmx", ["softmax", "gsoftmax"]), did_you_mean("x", ["softmax"])
    (", did you mean 'gsoftmax'", '')
    """
    close = [repr(choice) for choice in difflib.get_close_matches(word, list(choices), n, cutoff)]
    return f", did you mean {' or '.join(filter(None, (', '.join(close[:-1]), close[-1])))}" if close else ""


def unknown(kind: str, word: str, choices: Iterable[str]) -> str:
    """The beginning of an error message about a word that is none of `choices`.

    >>> unknown("head", "gsoftmx", ["softmax", "gsoftmax"])
    "unknown head 'gsoftmx', did you mean 'gsoftmax'"
    """
    return f"unknown {kind} {word!r}{did_you_mean(word, choices)}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
