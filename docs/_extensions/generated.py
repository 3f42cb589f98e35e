"""Fills the markers of a page, such as <!-- commands -->, with text generated from the code."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from docstrings import field_comments
from sphinx.application import Sphinx

from gsoftmax import cli, data
from gsoftmax.config import CHOICES, RANGES, Config
from gsoftmax.recipes import recipes as all_recipes


def commands() -> str:
    """`--help` of every command."""
    os.environ.update(COLUMNS="92", NO_COLOR="1")

    def sections(parser: argparse.ArgumentParser) -> Iterator[str]:
        yield f"## {parser.prog}\n\n```text\n{parser.format_help().strip()}\n```\n"
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    yield from sections(command)

    return "\n".join(sections(cli.parser()))


def configuration() -> str:
    """The keys of `Config`, one section per group."""
    out = []
    for name, kind, default, text in field_comments(Config):
        if name:
            default = re.sub(r"field\(default_factory=(?:lambda: )?(.*)\)", r"\1", default).replace("dict", "{}")
            cells = (f"`{name}`", f"`{kind}`", f"`{default}`", accepted(name), text)
            out.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        else:
            heading = f"## {text[0].upper()}{text[1:]}"
            out.append(f"\n{heading}\n\n| key | type | default | accepted | meaning |\n|---|---|---|---|---|")
    return "\n".join(out)


def accepted(name: str) -> str:
    """What values a key takes, beyond its type."""
    if name in CHOICES:
        return ", ".join(f"`{choice}`" for choice in CHOICES[name])
    low, high = RANGES.get(name, (-math.inf, math.inf))
    return "" if low == -math.inf else f"{low} or more" if high == math.inf else f"{low} to {high:g}"


def datasets() -> str:
    """`gsoftmax datasets` as sections."""
    out = []
    for info in data.describe():
        source = re.sub(r"https?://[^\s;)]+", r"<\g<0>>", info.source)
        out.append(f"### {info.name}\n\n{info.size}.  Source: {source}.\n")
        if info.layout != "none":
            out.append(f"```text\n{info.layout}\n```\n")
    return "\n".join(out)


def recipes() -> str:
    """The recipes with the published numbers, one table for each of the paper's."""
    out, table = [], None
    for recipe in all_recipes().values():
        if recipe.table != table:
            table = recipe.table
            out.append(f"\n### {table}\n\n| recipe | network | epochs | published, % |\n|---|---|---|---|")
        config = recipe.config()
        numbers = ", ".join(f"{name} {value:g}" for name, value in recipe.published.items())
        out.append(f"| `{recipe.name}` | {config.backbone or 'by the data'} | {config.epochs} | {numbers or '–'} |")
    return "\n".join(out)


def examples() -> str:
    """The list in examples/README.md, and every script in full."""
    folder = Path(__file__).parents[2] / "examples"
    text = (folder / "README.md").read_text("utf-8").partition("\n")[2]
    text = re.sub(r"\]\(([\w.]+)\)", r"](../examples/\1)", text)
    scripts = (
        f"## {path.stem.replace('_', ' ')}\n\n```{{literalinclude}} ../examples/{path.name}\n:language: python\n```\n"
        for path in sorted(folder.glob("*.py"))
    )
    return "\n".join([text, *scripts])


MAKERS = {f"<!-- {make.__name__} -->": make for make in (commands, configuration, datasets, examples, recipes)}


def fill(app: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = re.sub("|".join(MAKERS), lambda marker: MAKERS[marker[0]](), source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
