"""The report: figures, tables and one page, from a comparison, from run folders or from files of model outputs."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import tables as table_room
from ..analyze import compare_models
from ..files import make_folder, refuse_link
from ..tables import Table
from . import figures as figure_room
from . import page
from .data import Document, from_analyses, from_comparison, from_runs
from .examples import read_examples
from .paper import paper_tables
from .tables import of_document, summary_by_seed

__all__ = [
    "Document",
    "Table",
    "from_analyses",
    "from_comparison",
    "from_outputs",
    "from_runs",
    "paper_tables",
    "terminal",
    "write",
    "write_page",
    "write_paper_tables",
]


def write_page(
    summary: Mapping[str, Any], out: str | os.PathLike[str], title: str, data_root: str | None = None
) -> Path:
    """Writes `out`/report.html for a comparison whose runs are in `out`, and returns its path.

    summary, out, title, data_root: as in `from_comparison`
    """
    return page.write(from_comparison(summary, out, title, data_root), out)


def from_outputs(
    outputs: str | os.PathLike[str], *against: str | os.PathLike[str], title: str | None = None, resamples: int = 1000
) -> Document:
    """The document of a file of outputs (see `gsoftmax.outputs`), or of several on the same test set.

    outputs, against: the file, and the files of other models, each of which is compared with the first
    title: of the report
    resamples: of the bootstrap, for the intervals of every class; 0 for none
    """
    files = [Path(outputs), *map(Path, against)]
    doc = from_analyses(*compare_models(files, resamples=resamples), title=title)
    doc["examples"] = read_examples({(head, 0): path for head, path in zip(doc["heads"], files, strict=True)})
    return doc


def write(
    doc: Document,
    out: str | os.PathLike[str],
    *,
    tables: Sequence[str] = (),
    figures: Sequence[str] = (),
    name: str | None = None,
) -> list[Path]:
    """Writes the page and the requested tables and figures into a folder, and returns their paths.

    doc, out: the document and the folder
    tables, figures: formats, of md, tex, csv, txt and of svg, png, pdf
    name: the class that figures of one class show (the first, if not given)
    """
    for word, known, asked in (("tables", table_room.FORMATS, tables), ("figures", figure_room.FORMATS, figures)):
        if unknown := sorted(set(asked) - set(known)):
            raise ValueError(f"{word} must be of {', '.join(known)}, got {unknown[0]!r}")
    if name is not None and name not in doc["classes"]:
        some = ", ".join(doc["classes"][:10])
        raise ValueError(f"class {name!r} is not among the {len(doc['classes'])} classes: {some} ...")
    out, made = Path(out), of_document(doc)
    refuse_link(out / "tables", out / "figures")  # before anything is written
    paths = [page.write(doc, out)]
    if tables:
        paths += table_room.write(made, out, tables, csv_tables=[summary_by_seed(doc), *made[1:]])
    if figures:
        chosen = 0 if name is None else doc["classes"].index(name)
        paths += figure_room.write(doc, make_folder(out, "figures"), figures, c=chosen)
    return paths


def write_paper_tables(
    runs: str | os.PathLike[str], out: str | os.PathLike[str], formats: Sequence[str]
) -> tuple[list[Table], list[Path]]:
    """The paper's tables beside the runs of `gsoftmax reproduce`, and the files that they were written to.

    runs, out: the folder of the runs, and the folder to write to
    formats: of md, tex, csv, txt
    """
    if not Path(runs).is_dir():
        raise ValueError(f"the folder of the runs must be one that `gsoftmax reproduce` wrote, and {runs} is none")
    made = paper_tables(runs)
    return made, table_room.write(made, Path(out), formats)


def terminal(doc: Document, most: int = 12) -> str:
    """The verdicts, the notes and the tables for a terminal.

    doc, most: the document, and the rows shown of a table of classes
    """
    missing = [f"incomplete: {doc['incomplete']}"] if doc["incomplete"] else []
    sentences = [*missing, *doc["verdicts"], *(f"note: {note}" for note in doc["notes"] if note not in doc["verdicts"])]
    parts = [textwrap.fill(table_room.plain(s), 100, subsequent_indent="  ") for s in sentences]
    for table in of_document(doc):
        more = f"... and {len(table.rows) - most:,} more rows on the page. {table.note}".strip()
        parts += ["", (table.first(most, more) if table.header[0] == "class" else table).text()]
    return "\n".join(parts)
