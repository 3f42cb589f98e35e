"""Tables and verdicts from the rows: `python -m evidence.tables` writes them between the marks in docs and README.

    <!-- evidence: tables -->  ...  <!-- evidence: end -->

Nothing between such marks is written by hand.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gsoftmax.compare import MULTI, NAMES, PERCENT, SINGLE, SMALLER_IS_BETTER, number, p_value
from gsoftmax.significance import Paired, all_class_correlation, holm, paired, paper_correlations, required_n

from .run import ROWS, Study, read_rows, studies

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "docs" / "evidence.md", ROOT / "README.md")
MARKS = re.compile(r"(<!-- evidence: (\w+) -->\n).*?(<!-- evidence: end -->)", re.DOTALL)


@dataclass(frozen=True)
class Difference:
    """A setting against the reference in one metric."""

    setting: str
    metric: str
    reference: float  # mean of the reference over the paired seeds
    test: Paired
    p: float  # after Holm's correction over all tests of the study

    @property
    def verdict(self) -> str:
        if not self.p < 0.05:
            return "no difference shown"
        return "better" if (self.test.difference < 0) == (self.metric in SMALLER_IS_BETTER) else "worse"


def values(rows: Sequence[Mapping[str, Any]], metric: str) -> dict[str, dict[int, float]]:
    """A metric by setting and seed, in percent where it is a share."""
    scale = 100.0 if metric in PERCENT else 1.0
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        found.setdefault(row["setting"], {})[row["seed"]] = scale * row["metrics"][metric]
    return found


def metrics_of(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    return MULTI if "mAP" in rows[0]["metrics"] else SINGLE


def differences(study: Study, rows: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Every setting against the first one in every metric, paired by seed, corrected for being several."""
    reference, *others = [s for s in study.settings if any(row["setting"] == s for row in rows)]
    found = []
    for metric in metrics_of(rows):
        by = values(rows, metric)
        for setting in others:
            seeds = sorted(by[reference].keys() & by[setting].keys())
            a, b = (np.array([by[s][seed] for seed in seeds]) for s in (reference, setting))
            found.append((setting, metric, float(a.mean()), paired(a, b)))
    corrected = holm([d[3].p for d in found])
    return [Difference(*d, float(p)) for d, p in zip(found, corrected, strict=True)]


def study_tables(study: Study, rows: Sequence[Mapping[str, Any]]) -> str:
    """Means and deviations, then paired differences, as Markdown."""
    metrics = metrics_of(rows)
    settings = [s for s in study.settings if any(row["setting"] == s for row in rows)]
    lines = [f"### {study.name}", ""]
    lines += [
        "| setting | seeds | " + " | ".join(_name(m) for m in metrics) + " |",
        "|---" * (len(metrics) + 2) + "|",
    ]
    for setting in settings:
        cells = []
        for metric in metrics:
            v = np.array(list(values(rows, metric)[setting].values()))
            cells.append(f"{number(v.mean())} ± {number(v.std(ddof=1))}" if len(v) > 1 else number(v.mean()))
        lines.append(f"| {setting} | {len(v)} | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"Difference from {settings[0]}, paired by seed: mean [95 % interval], p after Holm's correction.",
        "",
    ]
    lines += ["| setting | metric | difference | p | |", "|---|---|---|---|---|"]
    for d in differences(study, rows):
        t = d.test
        span = _span(t)
        share = f" ({100 * t.difference / d.reference:+.1f} %)" if d.metric not in PERCENT else ""
        lines.append(f"| {d.setting} | {_name(d.metric)} | {span}{share} | {p_value(d.p)} | {d.verdict} |")
    first = differences(study, rows)[0]
    effect = 0.1
    needed = required_n(first.test.sd, effect) if first.test.sd > 0 else 0
    lines += [
        "",
        f"To see {effect} points of {_name(first.metric)} at 80 % power takes {needed} paired seeds here.",
    ]
    if "labels" in rows[0]:
        lines += ["", *_correlations(study, rows, settings)]
    return "\n".join([*lines, "", _provenance(rows)])


def _correlations(study: Study, rows: Sequence[Mapping[str, Any]], settings: Sequence[str]) -> list[str]:
    """The paper's table of Pearson correlations of a label's geometry with its average precision, means over seeds."""
    chosen = [s for s in settings if s != settings[0]]
    if len(chosen) < 3:
        return []

    def table(key: str) -> np.ndarray:  # (settings, labels)
        return np.array([np.mean([r["labels"][key] for r in rows if r["setting"] == s], axis=0) for s in chosen])

    lines = [
        "Correlation of a label's geometry with its AP: the paper's way (the best label only, over settings), and all.",
        "",
    ]
    lines += ["| measure | r of one label | p | n | r of all | n |", "|---|---|---|---|---|---|"]
    for key in ("compactness", "separability", "ratio"):
        one, everything = paper_correlations(table(key), table("ap")), all_class_correlation(table(key), table("ap"))
        lines.append(f"| {key} | {one.r:.2f} | {p_value(one.p)} | {one.n} | {everything.r:.2f} | {everything.n} |")
    return lines


def summary(found: Mapping[str, tuple[Study, Sequence[Mapping[str, Any]]]]) -> str:
    """One row a study and setting: what happened to the paper's four numbers."""
    lines = [
        "| study | setting | seeds | error or mAP | compactness | separability | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (study, rows) in found.items():
        if name.startswith("tune-"):
            continue
        everything = differences(study, rows)
        headline = metrics_of(rows)[0]
        for setting in dict.fromkeys(d.setting for d in everything):
            of = {d.metric: d for d in everything if d.setting == setting}
            t = of[headline].test
            first = f"{_span(t)}, {of[headline].verdict}"
            rest = [
                f"{100 * of[m].test.difference / of[m].reference:+.0f} %, {of[m].verdict}"
                for m in ("compactness", "separability", "ratio")
            ]
            lines.append(f"| {name} | {setting} | {t.n} | {first} | {' | '.join(rest)} |")
    return "\n".join(lines)


def _name(metric: str) -> str:
    return NAMES.get(metric, metric)


def _span(t: Paired) -> str:
    return f"{number(t.difference, True)} [{number(t.low, True)}, {number(t.high, True)}]"


def _provenance(rows: Sequence[Mapping[str, Any]]) -> str:
    machines = sorted({(r["gpu"] or r["processor"], r["torch"], r["gsoftmax"]) for r in rows})
    seconds = np.median([r["metrics"]["seconds"] for r in rows])
    where = "; ".join(f"{machine}, torch {torch}, gsoftmax {version}" for machine, torch, version in machines)
    return f"{len(rows):,} runs, {number(seconds)} s each in the median: {where}."


def blocks(folder: Path = ROWS) -> dict[str, str]:
    """The text of every mark."""
    found = {name: (study, rows) for name, study in studies().items() if (rows := read_rows(name, folder))}
    if not found:
        return {"tables": "No run has been done yet.", "summary": "No run has been done yet."}
    return {"tables": "\n\n".join(study_tables(*pair) for pair in found.values()), "summary": summary(found)}


def filled(page: str, text: Mapping[str, str]) -> str:
    """A page with what belongs between its marks."""
    return MARKS.sub(lambda m: f"{m[1]}{text[m[2]]}\n{m[3]}", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page differs")
    args = parser.parse_args()
    text = blocks()
    for path in PAGES:
        old = path.read_text("utf-8")
        new = filled(old, text)
        if args.check and new != old:
            raise SystemExit(f"{path.name} differs from what the rows say: make evidence-tables")
        if new != old:
            path.write_text(new, "utf-8")
            print(path.name)


if __name__ == "__main__":
    main()
