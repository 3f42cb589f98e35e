"""The playground page: `python -m gsoftmax.report.playground [docs/playground.html]`."""

from __future__ import annotations

import sys
from pathlib import Path

from ..files import atomic_write
from .page import playground


def main(path: str = "docs/playground.html") -> Path:
    out = Path(path)
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(out, playground())
    return out


if __name__ == "__main__":
    print(main(*sys.argv[1:2]))
