"""Pages and figures from the rows: `python -m evidence.pages` writes them into docs and README.

    <!-- evidence: tables -->  ...  <!-- evidence: end -->

Everything between such marks, those of `blocks`, is generated; the pages of tuned studies as a whole.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from . import answers, figures
from .run import ROWS
from .tables import NOTHING, ROOT, cost_tables, read, read_cost, study_tables, summary, verdicts

BY_HAND = ("protocol.md", "sensitivity.md", "earlier.md")
MARKED = (ROOT / "docs" / "evidence.md", *(answers.PAGES / name for name in BY_HAND))
MARKS = re.compile(r"(<!-- evidence: (\w+) -->\n).*?(<!-- evidence: end -->)", re.DOTALL)


def blocks(folder: Path = ROWS) -> dict[str, str]:
    """The text of every mark."""
    found, cost = read(folder), read_cost(folder)
    return {
        "cases": answers.cases(),
        "recipes": answers.recipes(),
        "sensitivity": answers.sensitivity(),
        "spread": answers.spread(),
        "verdicts": verdicts(found, cost) if found or cost else NOTHING,
        "summary": summary(found),
        "tables": "\n\n".join(study_tables(*pair) for pair in found.values()) or NOTHING,
        "cost": cost_tables(cost, found),
    }


def filled(page: str, text: Mapping[str, str]) -> str:
    """A page with what belongs between its marks."""
    return MARKS.sub(lambda m: f"{m[1]}{text[m[2]]}\n{m[3]}", page)


def pages() -> dict[Path, str]:
    """All pages as they should be."""
    text = blocks()
    return {path: filled(path.read_text("utf-8"), text) for path in MARKED} | answers.pages()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page or figure differs")
    args = parser.parse_args()
    for path, new in pages().items():
        if new == (path.read_text("utf-8") if path.exists() else ""):
            continue
        if args.check:
            raise SystemExit(f"{path.name} differs from what the rows say: make evidence-tables")
        path.write_text(new, "utf-8")
        print(path.name)
    drawn = figures.drawn() | {answers.FOREST: answers.draw_forest()}
    for path in figures.outdated(drawn):
        if args.check:
            raise SystemExit(f"{path.name} differs from what the rows say: make evidence-tables")
        if path in drawn:
            path.write_text(drawn[path], "utf-8")
        else:
            path.unlink()
        print(path.name)


if __name__ == "__main__":
    main()
