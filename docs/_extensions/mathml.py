"""Renders equations as MathML when the site is built; browsers display it without JavaScript."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util.math import get_node_equation_number


def inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def displayed(writer: Any, node: nodes.math_block) -> None:
    number = get_node_equation_number(writer, node) if node["number"] else None
    writer.body.append(writer.starttag(node, "div", CLASS="math-display"))
    writer.body.append(tex2mathml(node.astext(), as_block=True))
    if number:
        writer.body.append(f'<span class="eqno">({number})</span>')
    writer.body.append("</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (inline, None), (displayed, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
