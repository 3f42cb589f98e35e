"""The page of a comparison: one HTML file that works offline."""

from __future__ import annotations

import html
import os
from pathlib import Path
from typing import Any

from .compare import NAMES, SMALLER_IS_BETTER, _number, _plus_minus, p_value, verdicts
from .train import environment, write_atomically

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: #8886; --soft: #8881; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
.wide, pre {{ overflow-x: auto; }}
.sure {{ font-weight: 600; }}
pre {{ background: var(--soft); padding: .7rem; }}
</style>
<h1>{title}</h1>
{verdicts}
<h2>Mean ± standard deviation over {n} seeds</h2>
<div class="wide"><table>{means}</table></div>
{differences}
<h2>How to make it again</h2>
<pre>{command}</pre>
<p>{where}</p>
</html>
"""


def write_page(summary: dict[str, Any], out: str | os.PathLike[str], title: str) -> Path:
    """Writes `out`/report.html and returns its path.  Names that users chose are shown as text."""
    heads, described = summary["heads"], environment()
    means = "<tr><th></th>" + "".join(f"<th>{html.escape(h)}</th>" for h in heads) + "</tr>"
    for metric, rows in summary["metrics"].items():
        cells = "".join(f"<td>{_plus_minus(rows[h]['mean'], rows[h]['sd'])}</td>" for h in heads)
        means += f"<tr><td>{_name(metric)}</td>{cells}</tr>"
    where = f"gsoftmax {described['gsoftmax']}, torch {described['torch']}, Python {described['python']}, "
    where += described["gpu"] or f"{described['processor']}, {described['cores']} cores"
    page = _PAGE.format(
        title=html.escape(title),
        verdicts="".join(f"<p>{html.escape(v)}</p>" for v in verdicts(summary)),
        n=len(summary["seeds"]),
        means=means,
        differences="".join(_differences(summary, h) for h in heads[1:]) if len(summary["seeds"]) > 1 else "",
        command=html.escape(described["command"]),
        where=html.escape(where),
    )
    path = Path(out) / "report.html"
    write_atomically(path, page)
    return path


def _name(metric: str) -> str:
    better = "smaller" if metric in SMALLER_IS_BETTER else "larger"
    return f'<span title="{better} is better">{html.escape(NAMES.get(metric, metric))}</span>'


def _differences(summary: dict[str, Any], head: str) -> str:
    first = summary["heads"][0]
    text = f"<h2>{html.escape(head)} minus {html.escape(first)}, paired by seed</h2><div class='wide'><table>"
    text += "<tr><th></th><th>difference</th><th>95 % interval</th><th>t</th><th>p</th><th>n</th></tr>"
    for metric, rows in summary["metrics"].items():
        d = rows[head]["paired"]
        sure = ' class="sure"' if d["p"] <= 0.05 else ""
        text += (
            f"<tr{sure}><td>{_name(metric)}</td><td>{_number(d['difference'], True)}</td>"
            f"<td>{_number(d['low'], True)} to {_number(d['high'], True)}</td>"
            f"<td>{d['t']:.2f}</td><td>{html.escape(p_value(d['p']))}</td><td>{d['n']}</td></tr>"
        )
    return text + "</table></div>"
