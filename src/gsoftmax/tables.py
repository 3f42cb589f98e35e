"""One small type of table for terminal, Markdown, LaTeX and CSV, and how its numbers are written."""

from __future__ import annotations

import csv
import io
import math
import re
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .files import atomic_write, make_folder
from .messages import decoded

__all__ = [
    "FORMATS",
    "Cell",
    "Shown",
    "Table",
    "decimals",
    "p_value",
    "plain",
    "plus_minus",
    "show",
    "signed",
    "write",
]


@dataclass(frozen=True)
class Shown:
    """A number with the text it is shown as; CSV gets the number."""

    text: str
    value: float


Cell = str | float | int | Shown | None

FORMATS = ("md", "tex", "csv", "txt")


@dataclass(frozen=True)
class Table:
    """A table for terminal, Markdown, LaTeX and CSV.

    >>> print(Table("Errors", ("head", "error %"), (("softmax", 9.93), ("gsoftmax", None))).text())
    Errors
    <BLANKLINE>
    head       error %
    softmax      9.930
    gsoftmax         –
    """

    title: str  # above the table
    header: tuple[str, ...]  # one text per column
    rows: tuple[tuple[Cell, ...], ...]  # cells: text, numbers, None for nothing
    note: str = ""  # below the table

    def first(self, most: int, note: str) -> Table:
        """The table itself, or its first rows where it is longer.

        most, note: the number of rows, and the note that says so
        """
        return self if len(self.rows) <= most else Table(self.title, self.header, self.rows[:most], note)

    def cells(self) -> list[list[str]]:
        """All rows as text, numbers rounded for reading."""
        return [[show(cell) for cell in row] for row in self.rows]

    def text(self) -> str:
        """For a terminal."""
        grid = [[plain(cell) for cell in row] for row in [list(self.header), *self.cells()]]
        widths = [max(map(_width, column)) for column in zip(*grid, strict=True)]
        lines = []
        for row in grid:
            gaps = [" " * (w - _width(cell)) for cell, w in zip(row, widths, strict=True)]
            cells = [row[0] + gaps[0], *(gap + cell for cell, gap in zip(row[1:], gaps[1:], strict=True))]
            lines.append("   ".join(cells).rstrip())  # wider than the spaces of "1.2 ± 0.3"
        note = ["", textwrap.fill(plain(self.note), 100)] if self.note else []
        return "\n".join([plain(self.title), "", *lines, *note])

    def markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(_markdown(cell) for cell in cells) + " |"

        rule = "|" + "|".join("---" if k == 0 else "---:" for k in range(len(self.header))) + "|"
        body = [line(self.header), rule, *map(line, self.cells())]
        note = ["", _markdown(self.note)] if self.note else []
        return "\n".join([f"### {_markdown(self.title)}", "", *body, *note])

    def latex(self) -> str:
        """A `table` with booktabs rules."""

        def line(cells: Sequence[str]) -> str:
            return " & ".join(_latex(cell) for cell in cells) + r" \\"

        caption = _latex(self.title + (f". {self.note}" if self.note else ""))
        columns = "l" + "r" * (len(self.header) - 1)
        begin = [r"\begin{table}[t]", r"\centering", rf"\caption{{{caption}}}", rf"\begin{{tabular}}{{{columns}}}"]
        body = [r"\toprule", line(self.header), r"\midrule", *map(line, self.cells()), r"\bottomrule"]
        return "\n".join([*begin, *body, r"\end{tabular}", r"\end{table}"])

    def csv(self) -> str:
        """All digits; a text that a spreadsheet would run as a formula gets an apostrophe in front."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([_csv(cell) for cell in self.header])
        writer.writerows([_csv(cell) for cell in row] for row in self.rows)
        return out.getvalue()


def write(
    tables: Sequence[Table], out: Path, formats: Sequence[str], *, csv_tables: Sequence[Table] = ()
) -> list[Path]:
    """All tables in one file of each format; CSV, one file per table, in a folder (`csv_tables`, if given)."""
    unknown = sorted(set(formats) - set(FORMATS))
    if unknown:
        raise ValueError(f"tables must be of {', '.join(FORMATS)}, got {unknown[0]!r}")
    ways = {"md": Table.markdown, "tex": Table.latex, "txt": Table.text}
    files = {}
    for kind in (k for k in FORMATS if k in formats):
        if kind == "csv":
            for table in csv_tables or tables:
                slug = re.sub(r"[^a-z0-9]+", "-", table.title.lower()).strip("-")[:60] or "table"
                files[out / "tables" / f"{slug}.csv"] = table.csv()
        else:
            files[out / f"tables.{kind}"] = "\n\n".join(ways[kind](table) for table in tables) + "\n"
    for path, text in files.items():
        make_folder(out, *path.relative_to(out).parts[:-1])
        atomic_write(path, text)
    return list(files)


def show(cell: Cell) -> str:
    """A cell for reading.

    >>> show(0.123456), show(12.3456), show(None), show("text"), show(7)
    ('0.1235', '12.35', '–', 'text', '7')
    """
    if isinstance(cell, Shown):
        return cell.text
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return "–"
    if isinstance(cell, bool) or not isinstance(cell, float):
        return f"{cell:,}" if isinstance(cell, int) else str(cell)
    return f"{cell:.{_digits(cell)}f}" if math.isfinite(cell) and (abs(cell) >= 1e-4 or cell == 0) else f"{cell:.3g}"


def signed(value: float | None, digits: int | None = None) -> str | None:
    """
    >>> signed(0.5), signed(-12.0), signed(-0.00001, digits=2)
    ('+0.5000', '-12.00', '+0.00')
    """
    if value is None or not math.isfinite(value):
        return None
    value = 0.0 if abs(value) < (1e-12 if digits is None else 0.5 * 10**-digits) else value  # avoid -0
    if digits is not None:
        return f"{value:+.{digits}f}"
    return f"{value:+.{_digits(value)}f}" if abs(value) >= 1e-4 or value == 0 else f"{value:+.2g}"


def p_value(p: float) -> str:
    """
    >>> p_value(0.0321), p_value(3e-9)
    ('0.032', '< 1e-6')
    """
    if math.isnan(p):
        return "n/a"
    return "< 1e-6" if p < 1e-6 else f"{p:.2g}"


def plus_minus(mean: float | None, sd: float | None, digits: int | None = None) -> str:
    if mean is None or not math.isfinite(mean):
        return "–" if mean is None or math.isnan(mean) else "∞"
    digits = _digits(mean) if digits is None else digits
    return f"{mean:.{digits}f}" + ("" if sd is None else f" ± {sd:.{digits}f}")


def decimals(values: Iterable[float | None]) -> int | None:
    """Decimals that suit all numbers of a row: those of the largest; None where one of them is tiny.

    values: numbers, or None where there is none

    >>> decimals([1.067, 0.6667]), decimals([None, 3e-5])
    (3, None)
    """
    largest = max((abs(v) for v in values if v is not None and math.isfinite(v)), default=0.0)
    return None if 0 < largest < 1e-3 else _digits(largest)


def _digits(value: float) -> int:
    return 2 if abs(value) >= 10 else 3 if abs(value) >= 1 else 4


_DIRECTIONS = frozenset("\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def plain(text: str) -> str:
    """Text without control characters, line separators and changes of direction, which become �."""
    kinds = ("Cc", "Cs", "Zl", "Zp")
    return "".join("�" if unicodedata.category(c) in kinds or c in _DIRECTIONS else c for c in decoded(text))


def _width(text: str) -> int:
    """Columns of a terminal."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in text)


def _markdown(text: str) -> str:
    text = plain(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_|\[\]~])", r"\\\1", text)


_LATEX = {c: "\\" + c for c in "&%$#_{}"} | {"′": "'", "–": "--"}
_LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_LATEX |= {"<": r"\textless{}", ">": r"\textgreater{}", "±": r"$\pm$", "∞": r"$\infty$", "−": r"$-$"}
_LATEX |= {"σ": r"$\sigma$", "μ": r"$\mu$", "λ": r"$\lambda$"}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in plain(text))


def _csv(cell: Cell) -> Cell:
    if cell is None:
        return ""
    if isinstance(cell, Shown):
        return repr(cell.value)
    if not isinstance(cell, str):
        return repr(cell) if isinstance(cell, float) else cell
    text = plain(cell)
    # A spreadsheet may skip blanks and what is invisible in front of a formula, and take full-width signs.
    seen = "".join(c for c in unicodedata.normalize("NFKC", text) if unicodedata.category(c) not in ("Cf", "Zs"))
    formula = seen.startswith(("=", "+", "-", "@")) and not re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", text)
    return f"'{text}" if formula else text
