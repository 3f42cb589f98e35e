"""Turns our docstrings, which are written for `help()`, into reStructuredText.

* A line `x, mu: ...` that starts with parameter names becomes a list item.
* An indented formula becomes a literal block.
* The comments behind the fields of a dataclass or named tuple become a list of its fields.
* `|x|` and `*args` are escaped.
* A name in backticks becomes a link if it is documented here, and code otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import sys
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.util.nodes import make_refnode

import gsoftmax


def process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    names = set()
    for function in [obj, *(f for _, f in inspect.getmembers(obj, inspect.isfunction) if inspect.isclass(obj))]:
        with contextlib.suppress(TypeError, ValueError):
            names |= {*inspect.signature(function).parameters}
    lines[:] = literal_formulas(list_parameters(escaped(lines), names))
    if is_record(obj) and name != "gsoftmax.config.Config":  # Config has tables of its keys
        rows = [(field, kind, *escaped([text])) for field, kind, _, text in field_comments(obj) if field]
        lines += ["", *(f"* **{field}** (``{kind}``){text and f': {text}'}" for field, kind, text in rows), ""]


def signature(app: Sphinx, what: str, name: str, obj: Any, *rest: Any) -> tuple[str, str] | None:
    """None, or an empty signature for a record, whose fields are listed below it."""
    return ("", "") if is_record(obj) else None


def is_record(obj: Any) -> bool:
    return inspect.isclass(obj) and (dataclasses.is_dataclass(obj) or hasattr(obj, "_fields"))


def escaped(lines: list[str]) -> list[str]:
    """Escapes | and single * outside of code and examples."""
    out, example = [], False
    for line in lines:
        example = line.strip() != "" and (example or line.startswith(">>>"))
        if not example and not line.startswith("    "):
            parts = re.split(r"(`[^`]*`)", line)  # code is at the odd positions
            parts[::2] = [re.sub(r"\||\*(?=\w)(?!\w[^*]*\*)", r"\\\g<0>", part) for part in parts[::2]]
            line = "".join(parts)
        out.append(line)
    return out


NAMES = r"[\\*\w]+(?:(?:, | and )[\\*\w]+)*: +(?=\S)"


def parameters(line: str) -> list[tuple[list[str], str]]:
    """Names and description of the parameters in a line: `x, mu: a; y: b` -> [(["x", "mu"], "a"), (["y"], "b")]."""
    parts = re.split(f"; (?={NAMES})", line) if re.match(NAMES, line) else []
    return [
        (re.findall(r"\w+", names.replace(" and ", ", ")), text) for names, text in (p.split(": ", 1) for p in parts)
    ]


def list_parameters(lines: list[str], names: set[str]) -> list[str]:
    """Lines that describe parameters, with their continuation lines, as list items."""
    out: list[str] = []
    inside = False
    for line in lines:
        items = parameters(line)
        starts = bool(items) and {name for found, _ in items for name in found} <= names
        other = line.startswith("Other ")  # "Other options as in `NAME`."
        inside = starts or (inside and bool(line.strip()) and not other)
        if starts:
            out += ["", *(f"* **{', '.join(found)}**: {text}" for found, text in items)]
        elif inside:
            out.append(f"  {line.strip()}")
        else:
            out += ["", line] if other else [line]
    return out


def literal_formulas(lines: list[str]) -> list[str]:
    """Indented paragraphs, except those inside a list, as literal blocks."""
    out: list[str] = []
    listed = inside = False
    for i, line in enumerate(lines):
        indented = line.startswith("    ")
        if line.strip() and not indented:
            listed = (listed and line.startswith(" ")) or bool(re.match(r"[*>.=]", line))
            inside = False
        elif indented and not inside and not listed and i and not lines[i - 1].strip():
            out += ["::", ""]
            inside = True
        out.append(line)
    return out


def field_comments(cls: type) -> list[tuple[str, str, str, str]]:
    """Name, type, default and comment of each field of a record; a comment on its own line has an empty name."""
    out: list[tuple[str, str, str, str]] = []
    for base in filter(is_record, reversed(cls.__mro__)):
        for line in inspect.getsource(base).splitlines():
            if re.match(r"    (@|def )", line):
                break
            field = re.match(r"    ([a-zA-Z]\w*): (.*?)(?: = (.*?))?(?:  # (.*))?$", line)
            comment = re.match(r"    # (.*)", line)
            if field and field[1] in base.__annotations__:
                out.append((field[1], field[2], field[3] or "", field[4] or ""))
            elif comment:
                out.append(("", "", "", comment[1]))
    return out


def find(app: Sphinx, env: Any, node: pending_xref, contnode: nodes.TextElement) -> nodes.Node | None:
    """Links one of our names that is written without its module; other words in backticks stay code."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"].removesuffix("()")
    module, _, word = target.rpartition(".")
    ours = target.removeprefix("gsoftmax.") in gsoftmax.__all__ or (
        module.startswith("gsoftmax.") and hasattr(sys.modules.get(module), word)
    )
    # A name of the package, or of the module that defines it, is documented where users import it from.
    target = word if ours else target
    found = env.domains["py"].find_obj(env, node.get("py:module"), node.get("py:class"), target, None, 1)
    if len(found) > 1:  # many classes have methods of the same name
        found = [(name, entry) for name, entry in found if entry.objtype in ("class", "function")][:1]
    if len(found) == 1:
        name, entry = found[0]
        return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, contnode, name)
    return contnode if ours or node["reftype"] == "obj" else None


def setup(app: Sphinx) -> dict[str, bool]:
    app.config.default_role = "py:obj"
    app.connect("autodoc-process-docstring", process)
    app.connect("autodoc-process-signature", signature)
    app.connect("missing-reference", find)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
