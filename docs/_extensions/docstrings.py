"""Our docstrings are written for `help()`; here they become reStructuredText.

* A line `x, mu: ...` that begins with names of parameters becomes an item of a list.
* An indented formula becomes a literal block.
* The comments behind a dataclass's fields become a list of its fields.
* `|x|` and `*args` stand for themselves.
* A name in backticks becomes a link where it is one of ours, and stays a word in code where it is not.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.util.nodes import make_refnode

import gsoftmax


def process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    try:
        names = set(inspect.signature(obj).parameters)
    except (TypeError, ValueError):
        names = set()
    lines[:] = literal_formulas(list_parameters(escaped(lines), names))
    if what == "class" and dataclasses.is_dataclass(obj) and name != "gsoftmax.config.Config":  # which has its tables
        rows = [row for row in field_comments(obj) if row[0]]
        lines += ["", *(f"* **{field}** (``{kind}``){text and f': {text}'}" for field, kind, _, text in rows), ""]


def signature(app: Sphinx, what: str, name: str, obj: Any, *rest: Any) -> tuple[str, str] | None:
    """None for a dataclass, whose fields are listed below it."""
    return ("", "") if what == "class" and dataclasses.is_dataclass(obj) else None


def escaped(lines: list[str]) -> list[str]:
    """Without what reStructuredText would take for a substitution or for emphasis that never ends."""
    out, example = [], False
    for line in lines:
        example = line.strip() != "" and (example or line.startswith(">>>"))
        if not example and not line.startswith("    "):
            parts = re.split(r"(`[^`]*`)", line)  # code is at the odd places
            parts[::2] = [re.sub(r"\||\*(?=\w)(?!\w[^*]*\*)", r"\\\g<0>", part) for part in parts[::2]]
            line = "".join(parts)
        out.append(line)
    return out


def list_parameters(lines: list[str], names: set[str]) -> list[str]:
    """Lines that begin with names of parameters, and what belongs to them, as list items."""
    out: list[str] = []
    inside = False
    for line in lines:
        start = re.match(r"(\w+(?:(?:, | and )\w+)*): (?=\S)", line)
        if start and set(re.split(", | and ", start[1])) <= names:
            out += ["", f"* **{start[1]}**: {line[start.end() :]}"]
            inside = True
        elif inside and line.strip():
            out.append("  " + line.strip())
        else:
            inside = False
            out.append(line)
    return out


def literal_formulas(lines: list[str]) -> list[str]:
    """Indented paragraphs after one that is not a list, as literal blocks."""
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
    """Name, type, default and comment of a dataclass's fields; a comment on a line of its own has an empty name."""
    out: list[tuple[str, str, str, str]] = []
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        for line in inspect.getsource(base).splitlines():
            if re.match(r"    (@|def )", line):
                break
            field = re.match(r"    ([a-z]\w*): (.*?)(?: = (.*?))?(?:  # (.*))?$", line)
            comment = re.match(r"    # (.*)", line)
            if field and field[1] in base.__annotations__:
                out.append((field[1], field[2], field[3] or "", field[4] or ""))
            elif comment:
                out.append(("", "", "", comment[1]))
    return out


def find(app: Sphinx, env: Any, node: pending_xref, contnode: nodes.TextElement) -> nodes.Node | None:
    """A name of ours that was written without its module; any other word in backticks is left as it is."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"].removesuffix("()")
    if target.removeprefix("gsoftmax.") in gsoftmax.__all__:  # where the names at the top of the package come from
        top = getattr(gsoftmax, target.removeprefix("gsoftmax."))
        target = f"{top.__module__}.{top.__qualname__}" if hasattr(top, "__qualname__") else target
    found = env.domains["py"].find_obj(env, node.get("py:module"), node.get("py:class"), target, None, 1)
    if len(found) > 1:  # methods go by the same names in many classes
        found = [(name, entry) for name, entry in found if entry.objtype in ("class", "function")][:1]
    if len(found) == 1:
        name, entry = found[0]
        return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, contnode, name)
    return contnode if node["reftype"] == "obj" else None


def setup(app: Sphinx) -> dict[str, bool]:
    app.config.default_role = "py:obj"
    app.connect("autodoc-process-docstring", process)
    app.connect("autodoc-process-signature", signature)
    app.connect("missing-reference", find)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
