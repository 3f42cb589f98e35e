"""What a report found, in plain sentences: one for each head or model that is compared with the first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import measures, summary

_ONE = "This is about these trained models; whether a method is better needs several seeds of each."


def findings(doc: Mapping[str, Any]) -> list[summary.Finding]:
    """One for each head after the first; empty for a single model.

    doc: see `report.data`
    """
    if doc["kind"] == "analyze":
        return [_of_images(doc, head) for head in doc["heads"][1:] if doc["over_images"]]
    return summary.findings(doc)


def about(doc: Mapping[str, Any]) -> str:
    """What was compared, in a line.

    doc: see `report.data`
    """
    heads, seeds, found = len(doc["heads"]), len(doc["seeds"]), doc["examples"]
    parts = [f"{heads} {'head' if doc['kind'] == 'compare' else 'model'}{'s' * (heads > 1)}"]
    if doc["kind"] == "compare":
        parts.append(f"{seeds} seed{'s' * (seeds > 1)} of each")
    if doc["config"].get("data"):
        parts.insert(0, str(doc["config"]["data"]))
    if found:
        parts.append(f"{found['rows']:,} {'test images' if found['unit'] == 'image' else 'test rows'}")
    parts.append(f"{len(doc['classes']):,} {'labels' if doc['multilabel'] else 'classes'}")
    return ", ".join(parts)


def _of_images(doc: Mapping[str, Any], head: str) -> summary.Finding:
    measure = measures.find("hamming" if doc["multilabel"] else "error")
    found, tests = doc["over_images"][head], sum(len(of["paired"]) for of in doc["over_images"].values())
    error = {k: None if v is None else measure.scale * v for k, v in found["paired"]["error"].items()}
    error |= {key: found["paired"]["error"][key] for key in ("p", "p_holm")}
    named = "p" if found["mcnemar"] is None else "McNemar's p"
    judged = summary.judge(head, error, measure, f"{tests} tests over images", named)
    base = {k: rows[doc["heads"][0]]["mean"] for k, rows in doc["metrics"].items() if doc["heads"][0] in rows}
    over = {k: test for k, test in doc["over_classes"].get(head, {}).items() if k in base and test["n"]}
    return judged._replace(more=f"{summary.geometry_changes(over, base)} {_ONE}".strip())
