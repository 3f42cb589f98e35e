"""What a comparison found: means over seeds, paired differences from the first head, tests, tables, verdicts.

Every p-value of a comparison is corrected by Holm's method for all tests of that comparison (heads times measures); the
verdicts use the corrected ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from . import measures, significance
from .files import atomic_write
from .runs import folder_name, read_result
from .tables import Cell, Shown, Table, p_value, plus_minus, signed

__all__ = ["PAIRED", "correct", "differences", "means", "paired_cells", "summarise", "summary_of", "verdicts"]

PAIRED = ("difference", "95 % from", "to", "t", "p", "p, Holm", "n")


def summarise(out: str | os.PathLike[str], heads: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """The summary of a comparison's folder, which is also written there."""
    results: dict[str, list[Any]] = {
        h: [read_result(Path(out) / folder_name(h) / f"seed-{s}") for s in seeds] for h in heads
    }
    summary = summary_of(results, seeds)
    atomic_write(Path(out) / "summary.json", json.dumps(summary, indent=2))
    return summary


def summary_of(results: Mapping[str, Sequence[Mapping[str, Any]]], seeds: Sequence[int]) -> dict[str, Any]:
    """Mean and deviation of every measure for every head, and the paired difference from the first head."""
    heads = list(results)
    keys = set.intersection(*(set(r) for h in heads for r in results[h]))
    tested = measures.ordered(k for k in results[heads[0]][0] if k in keys)
    summary: dict[str, Any] = {"heads": heads, "seeds": list(seeds), "metrics": {}, "multilabel": "mAP" in tested}
    for key in tested:
        scale = measures.find(key).scale
        values = {h: np.array([scale * r[key] for r in results[h]]) for h in heads}
        rows: dict[str, Any] = {}
        for h, v in values.items():
            sd = float(v.std(ddof=1)) if len(v) > 1 else None
            rows[h] = {"values": v.tolist(), "mean": float(v.mean()), "sd": sd}
            if h != heads[0] and len(v) > 1:
                rows[h]["paired"] = asdict(significance.paired(values[heads[0]], v))
        summary["metrics"][key] = rows
    correct([row["paired"] for rows in summary["metrics"].values() for row in rows.values() if "paired" in row])
    summary["seconds"] = {h: [r["seconds"] for r in results[h]] for h in heads}
    return summary


def correct(tests: Sequence[dict[str, Any]]) -> None:
    """Adds `p_holm`, the p corrected for all of these tests, to each of them."""
    corrected = significance.holm([np.nan if test["p"] is None else test["p"] for test in tests])
    for test, p in zip(tests, corrected.tolist(), strict=True):
        test["p_holm"] = p


def means(summary: Mapping[str, Any]) -> Table:
    """Mean and deviation over seeds (or one number) of every measure and head."""
    heads, n = summary["heads"], len(summary["seeds"])
    rows = []
    for key, values in summary["metrics"].items():
        cells = [plus_minus(values[h]["mean"], values[h].get("sd")) if h in values else None for h in heads]
        rows.append((measures.find(key).title, *cells))
    title = f"Mean ± standard deviation over {n} seeds" if n > 1 else "Metrics and average geometry"
    return Table(title, ("", *heads), tuple(rows))


def differences(summary: Mapping[str, Any]) -> list[Table]:
    """Each head minus the first, paired by seed."""
    tables = []
    for head in summary["heads"][1:]:
        found = {k: v[head]["paired"] for k, v in summary["metrics"].items() if "paired" in v.get(head, {})}
        if found:
            tests = len(found) * (len(summary["heads"]) - 1)
            note = f"p, Holm: corrected for the {tests} tests of this comparison."
            tables.append(paired_table(f"{head} minus {summary['heads'][0]}, paired by seed", found, note))
    return tables


def paired_table(title: str, tests: Mapping[str, Mapping[str, Any]], note: str) -> Table:
    """Paired tests, by the key of what they measure."""
    rows = tuple((measures.find(key).title, *paired_cells(test)) for key, test in tests.items())
    return Table(title, ("", *PAIRED), rows, note)


def paired_cells(test: Mapping[str, Any], scale: float = 1.0) -> tuple[Cell, ...]:
    """The cells under `PAIRED` of a paired test."""

    def number(key: str) -> Cell:
        value = test[key]
        return None if value is None else Shown(signed(scale * value) or "–", scale * value)

    def p(key: str) -> Cell:
        value = test.get(key)
        return None if value is None or np.isnan(value) else Shown(p_value(value), value)

    t = None if test["t"] is None else Shown(f"{test['t']:.2f}", test["t"])
    return number("difference"), number("low"), number("high"), t, p("p"), p("p_holm"), test["n"]


def verdicts(summary: Mapping[str, Any]) -> list[str]:
    """What changed, and how sure we are, in sentences."""
    heads, n = summary["heads"], len(summary["seeds"])
    headline = measures.headline(summary["multilabel"])
    sentences = []
    for h in heads[1:] if n > 1 else []:
        d = summary["metrics"][headline.key][h]["paired"]
        word = significance.verdict(d["difference"], d["p_holm"], headline.smaller_is_better)
        shown = word if word == "no difference shown" else f"{word}, p {p_value(d['p_holm'])}"
        sentence = (
            f"{h} against {heads[0]}, {n} seeds: {headline.label} {signed(d['difference'])} points, "
            f"interval {signed(d['low'])} to {signed(d['high'])}: {shown}"
        )
        for key in ("compactness", "separability", "ratio"):
            rows = summary["metrics"][key]
            base, g = rows[heads[0]]["mean"], rows[h]["paired"]
            sentence += f"; {key} {100 * g['difference'] / base:+.0f} %, p {p_value(g['p_holm'])}"
        sentences.append(sentence + ".")
    return sentences
