"""Words that error messages share.  Nothing here imports torch."""

from __future__ import annotations

import difflib
import re
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


def decoded(text: str) -> str:
    """Text that UTF-8 can hold.  In another locale Python keeps bytes of file names that it cannot decode; they are
    taken for UTF-8.

    >>> decoded("K\\udcc3\\udca4se")
    'Käse'
    """
    text = re.sub("[\ud800-\udc7f\udd00-\udfff]", "\ufffd", text)  # half a character, from anywhere else
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def reason(error: BaseException) -> str:
    """What went wrong, in one line; errors of the system without their number.

    >>> reason(FileNotFoundError(2, "No such file or directory", "x.npz"))
    'no such file or directory: x.npz'
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower() + (f": {error.filename}" if error.filename else "")
    return first_line(error)


def plural(count: int, noun: str) -> str:
    """
    >>> plural(1, "seed"), plural(2000, "run")
    ('1 seed', '2,000 runs')
    """
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
