"""What a comparison found: means over seeds, paired differences from the first head, tests, tables, verdicts.

Every p-value of a comparison is corrected by Holm's method for all tests of that comparison (heads times measures); the
verdicts use the corrected ones.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from . import measures, significance
from .files import atomic_write, sealed
from .messages import first_line, plural
from .runs import folder_name, read_result
from .tables import Cell, Shown, Table, decimals, p_value, plus_minus, signed

__all__ = [
    "PAIRED",
    "correct",
    "correction",
    "differences",
    "means",
    "paired_cells",
    "so_far",
    "summarise",
    "summary_of",
    "tuning_tables",
    "verdicts",
]

PLAN = "comparison.json"  # heads and seeds of a comparison's folder
_SHOWN, _SPREADS = 0.5, (0.25, 0.5, 1.0)  # points of a difference, and of its standard deviation over seeds
PAIRED = ("difference", "95 % from", "to", "t", "p", "p, Holm", "n")


def summarise(
    out: str | os.PathLike[str], heads: Sequence[str], seeds: Sequence[int], more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The summary of a comparison's folder, which is also written there with the entries of `more`."""
    results: dict[str, list[Any]] = {
        h: [read_result(Path(out) / folder_name(h) / f"seed-{s}") for s in seeds] for h in heads
    }
    summary = summary_of(results, seeds) | dict(more or {})
    atomic_write(Path(out) / "summary.json", json.dumps(sealed(summary), indent=2))
    return summary


def so_far(out: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The summary of a comparison's finished runs; None without a plan, or if summary.json has them all.

    out: the folder

    While runs are missing, it is of the seeds that all heads have finished, or else of the heads that have finished one
    seed, and says under `incomplete` how many runs there are.
    """
    path = Path(out) / PLAN
    if not path.exists():
        return None
    try:
        plan = json.loads(path.read_bytes())
        heads, seeds = plan["heads"], plan["seeds"]
        if not all(type(s) is int for s in seeds) or any(folder_name(h) in ("", ".", "..") for h in heads):
            raise ValueError("heads must be names and seeds whole numbers")
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is not the plan of a comparison: {first_line(error)}") from None
    found = {(h, s): read_result(Path(out) / folder_name(h) / f"seed-{s}") for s in seeds for h in heads}
    results = {key: result for key, result in found.items() if result is not None}
    if len(results) == len(found):
        path = Path(out) / "summary.json"
        if path.exists() and not _is_of_others(path, heads, seeds):
            return None
        return summary_of({h: [results[h, s] for s in seeds] for h in heads}, seeds)
    finished = f"{len(results)} of {plural(len(found), 'run')}"
    if not results:
        return None
    whole = [s for s in seeds if all((h, s) in results for h in heads)]
    if not whole:
        whole = [max(seeds, key=lambda s: sum((h, s) in results for h in heads))]
        heads = [h for h in heads if (h, whole[0]) in results]
    summary = summary_of({h: [results[h, s] for s in whole] for h in heads}, whole)
    return summary | {"incomplete": f"{finished} finished"}


def _is_of_others(path: Path, heads: Sequence[str], seeds: Sequence[int]) -> bool:
    """Whether an undamaged summary is of other heads or seeds: the comparison goes on with more of them."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_bytes())
        if isinstance(found, dict) and found == sealed(found):
            return (found.get("heads"), found.get("seeds")) != (heads, seeds)
    return False


def summary_of(results: Mapping[str, Sequence[Mapping[str, Any]]], seeds: Sequence[int]) -> dict[str, Any]:
    """Mean and deviation of every measure for every head, and the paired difference from the first head."""
    heads = list(results)
    keys = set.intersection(*(set(r) for h in heads for r in results[h]))
    tested = measures.ordered(k for k in results[heads[0]][0] if k in keys)
    summary: dict[str, Any] = {"heads": heads, "seeds": list(seeds), "metrics": {}, "multilabel": "mAP" in tested}
    at_chance = summary["at_chance"] = [h for h in heads if any("error_of_guessing" in r for r in results[h])]
    for key in tested:
        scale, shown = measures.find(key).scale, heads
        if key in measures.GEOMETRY:  # of outputs without skill it means nothing
            shown = [] if heads[0] in at_chance else [h for h in heads if h not in at_chance]
        values = {h: np.array([scale * r[key] for r in results[h]]) for h in shown}
        rows: dict[str, Any] = {}
        for h, v in values.items():
            sd = float(v.std(ddof=1)) if len(v) > 1 else None
            rows[h] = {"values": v.tolist(), "mean": float(v.mean()), "sd": sd}
            if h != heads[0] and len(v) > 1:
                rows[h]["paired"] = asdict(significance.paired(values[heads[0]], v))
        if rows:
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
        digits = decimals(row["mean"] for row in values.values())
        cells = [plus_minus(values[h]["mean"], values[h].get("sd"), digits) if h in values else None for h in heads]
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

    ends = ("difference", "low", "high")
    digits = decimals(None if test[key] is None else scale * test[key] for key in ends)

    def number(key: str) -> Cell:
        value = test[key]
        return None if value is None else Shown(signed(scale * value, digits) or "–", scale * value)

    def p(key: str) -> Cell:
        value = test.get(key)
        return None if value is None or np.isnan(value) else Shown(p_value(value), value)

    t = None if test["t"] is None else Shown(f"{test['t']:.2f}", test["t"])
    return *map(number, ends), t, p("p"), p("p_holm"), test["n"]


def tuning_tables(summary: Mapping[str, Any]) -> list[Table]:
    """What each head chose, what tuning was worth to it, and how sensitive it is; empty without tuning."""
    told = summary.get("tuning")
    return [table for table in (_chosen(told), _worth(summary, told), _sensitivity(told)) if table] if told else []


def _chosen(told: Mapping[str, Any]) -> Table:
    """The chosen settings, with their validation results."""
    keys = list(dict.fromkeys([*told["space"], *(k for head in told["heads"].values() for k in head["own"])]))
    rows = []
    for name, head in told["heads"].items():
        values = _mean_of(next(t for t in head["trials"] if t["settings"] == head["chosen"]))
        settings = [
            head["chosen"].get(k, head["default"].get(k, "default" if k in head["own"] else None)) for k in keys
        ]
        failed = sum(None in trial["values"] for trial in head["trials"])
        rows.append((name, *(None if v is None else _value(v) for v in settings), values, failed))
    title = measures.find(told["measure"]).title
    header = ("", *(k.removeprefix("head_options.") for k in keys), f"validation {title}", "diverged")
    space = ", ".join(f"{k}={v}" for k, v in told["space"].items())
    note = f"{told['trials']} trials of every head in {space}, judged on {told['validation']}."
    if told["trials"] < told["asked"]:
        note += f" {told['asked']} were asked for; the budget of time allowed {told['trials']}."
    return Table("Chosen settings", header, tuple(rows), note)


def _worth(summary: Mapping[str, Any], told: Mapping[str, Any]) -> Table | None:
    """Tuned minus default on the test set, paired by seed; None if the defaults did not meet it."""
    rows = []
    for name, head in told["heads"].items():
        tuned, untuned = summary["metrics"][told["measure"]][name]["values"], head["untuned"]
        if len(tuned) < 2:
            return None
        shown = [_mean_of({"values": values}) for values in (untuned, tuned)]
        if not untuned:
            rows.append((name, "not trained", shown[1], None, None, None))
        elif lost := untuned.count(None):
            rows.append((name, f"{lost} of {len(untuned)} diverged", shown[1], None, None, None))
        else:
            test = asdict(significance.paired(np.array(untuned), np.array(tuned)))
            rows.append((name, *shown, *paired_cells(test)[:3]))
    changed = [head for head in told["heads"].values() if head["chosen"]]
    if changed and not any(head["untuned"] for head in changed):
        return None
    title = f"What tuning was worth: {measures.find(told['measure']).title} on the test set"
    return Table(title, ("", "default", "tuned", *PAIRED[:3]), tuple(rows))


def _sensitivity(told: Mapping[str, Any]) -> Table | None:
    """The values of each swept key that cost less than one point of the measure."""
    measure, rows = measures.find(told["measure"]), []
    for key in told["space"]:
        for name, head in told["heads"].items():
            curve = [(p["value"], np.mean(p["values"])) for p in head["sweeps"].get(key, []) if None not in p["values"]]
            if not curve:
                continue
            sign = 1 if measure.smaller_is_better else -1
            best = min(sign * score for _, score in curve)
            good = [value for value, score in curve if sign * score <= best + 1]
            worst = max(sign * score for _, score in curve) - best
            rows.append((key, name, _value(good[0]), _value(good[-1]), len(good), len(head["sweeps"][key]), worst))
    header = ("key", "head", "from", "to", "values", "of", f"largest loss, {measure.label} points")
    note = "From and to: the values tried that stay within one point of the best, all else at the chosen setting."
    return Table("Sensitivity", header, tuple(rows), note) if rows else None


def _value(value: Any) -> Cell:
    return Shown(f"{value:g}" if isinstance(value, (int, float)) else str(value), value)


def _mean_of(trial: Mapping[str, Any]) -> Cell:
    values = [v for v in trial["values"] if v is not None]
    if not values:
        return None
    return plus_minus(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)


def verdicts(summary: Mapping[str, Any]) -> list[str]:
    """What changed, and how sure we are, in sentences."""
    heads, n = summary["heads"], len(summary["seeds"])
    headline = measures.headline(summary["multilabel"])
    sentences = [_one_seed(headline)] if n == 1 and len(heads) > 1 else []
    for h in heads[1:] if n > 1 else []:
        d = summary["metrics"][headline.key][h]["paired"]
        word = significance.verdict(d["difference"], d["p_holm"], headline.smaller_is_better)
        shown = word if word == "no difference shown" else f"{word}, p {p_value(d['p_holm'])}"
        sentence = (
            f"{h} against {heads[0]}, {n} seeds: {headline.label} {signed(d['difference'])} points, "
            f"interval {signed(d['low'])} to {signed(d['high'])}: {shown}"
        )
        for key in ("compactness", "separability", "ratio"):
            rows = summary["metrics"].get(key, {})
            if h not in rows:  # at chance level
                continue
            base, g = rows[heads[0]]["mean"], rows[h]["paired"]
            sentence += f"; {key} {100 * g['difference'] / base:+.0f} %, p {p_value(g['p_holm'])}"
        sentences.append(sentence + ".")
    if at_chance := summary.get("at_chance"):
        sentences.append(f"No better than guessing, so without geometry: {', '.join(at_chance)}.")
    return sentences


def correction(summary: Mapping[str, Any]) -> str:
    """What the p-values of the verdicts are corrected for; empty with one seed."""
    tests = sum("paired" in row for rows in summary["metrics"].values() for row in rows.values())
    return f"p: after Holm's correction for the {tests} tests of this comparison." if tests else ""


def _one_seed(headline: measures.Measure) -> str:
    """Why one seed has no verdict, and how many would show a small difference."""
    needed = [f"{significance.required_n(sd, _SHOWN)} if they vary by {sd:g} points" for sd in _SPREADS]
    return (
        f"No verdict: with one seed, a difference between heads cannot be told from one between seeds. To show a "
        f"difference of {_SHOWN:g} points of {headline.label} with 80 % power takes as many seeds as the paired "
        f"differences vary: {', '.join(needed)} (standard deviation). Start with --seeds 5; finished runs are kept."
    )
