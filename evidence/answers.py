"""What the tuned studies answer: the first table and the forest of docs/evidence.md, and one page per study."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from gsoftmax import measures
from gsoftmax.report.colours import BLUE, GREY, VERMILLION
from gsoftmax.significance import ALPHA, Paired, holm, paired
from gsoftmax.summary import tuning_tables
from gsoftmax.tables import Table, p_value, plus_minus, show

from . import figures
from .run import HERE, read_rows
from .tables import ROOT, grid, on_common_seeds, provenance, span, values
from .tuned import TUNED, Question, TunedStudy, read, studies

PAGES = ROOT / "docs" / "evidence"
FOREST = ROOT / "docs" / "images" / "evidence-answers.svg"
MULTI = ("mAP", "C_F1_mean", "O_F1", "nll", "ece", "compactness", "separability", "dprime")
SINGLE = ("error", "error_x", "nll", "ece", "compactness", "separability", "dprime")
MEDIANS = ("separability",)  # of a label that is always right it is without bound
SHARED = ("weight_decay", "label_smoothing", "mixup", "batch_size", "optimizer")  # settings that a caption states

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """A primary question with its test."""

    study: TunedStudy
    question: Question
    test: Paired
    p: float  # after Holm's correction over all primary questions

    @property
    def words(self) -> str:
        better = (self.test.difference < 0) == measures.find(self.question.metric).smaller_is_better
        sure = self.p < ALPHA
        said = ("Yes" if better else "No, it is worse") if sure else "No difference shown"
        name = measures.find(self.question.metric).label
        return (
            f"{said}: {span(self.test)} points of {name}, {self.test.n} pairs, {_p(self.test.p)}, and {_p(self.p)} "
            "after Holm's correction over all primary questions."
        )


def _p(p: float) -> str:
    shown = p_value(p)
    return f"p {shown}" if shown.startswith("<") else f"p = {shown}"


def finished() -> dict[str, TunedStudy]:
    """The studies that have rows on the test set."""
    return {name: study for name, study in studies().items() if (TUNED / f"{name}.jsonl").exists()}


def compared(rows: Sequence[Row], head: str, against: str, metric: str) -> Paired:
    of = values(rows, metric)
    return paired(*on_common_seeds(of[against], of[head]))


def answers() -> list[Answer]:
    """All primary questions that have rows."""
    asked = [(study, question) for study in finished().values() for question in study.questions]
    tests = [compared(read(study.name)[1], q.head, q.against, q.metric) for study, q in asked]
    corrected = holm([test.p for test in tests])
    return [Answer(*pair, test, float(p)) for pair, test, p in zip(asked, tests, corrected, strict=True)]


def cases() -> str:
    """The first table: case, what to use, measured difference, pairs, study."""
    lines = []
    for case in yaml.safe_load((HERE / "cases.yaml").read_text("utf-8")):
        tuned = case["study"] in studies()
        if tuned and case["study"] not in finished():
            continue
        rows = read(case["study"])[1] if tuned else read_rows(case["study"])
        test = compared(rows, case["head"], case["against"], case["metric"])
        what = f"{case['head']} against {case['against']}, {measures.find(case['metric']).label}"
        link = f"[{case['study']}](evidence/{case['study'] if tuned else 'earlier'}.md)"
        link += "" if tuned else ", earlier protocol"
        lines.append([case["case"], case["use"], what, span(test), str(test.n), link])
    return grid(["your case", "use", "measured", "points [95 %]", "pairs", "study"], lines)


def recipes() -> str:
    """The recipes as they are for softmax, beside softmax tuned, on the test set."""
    lines = []
    for name, study in finished().items():
        told, rows = read(name)
        head = next(head for head, text in study.heads.items() if text == "softmax")
        untuned, metric = told["heads"][head]["untuned"], told["measure"]
        gaussian = next((of["untuned"] for head, of in told["heads"].items() if "G-softmax" in head), [])
        if untuned and gaussian:
            tuned = np.array([*values(rows, metric)[head].values()])
            cells = [plus_minus(float(np.mean(v)), float(np.std(v, ddof=1))) for v in (untuned, tuned)]
            gaps = [f"{np.mean(of) - tuned.mean():+.2f}" for of in (untuned, gaussian)]
            lines.append([name, f"`{study.recipe}`", measures.find(metric).title, *cells, *gaps])
    shown = ("softmax, as it is", "softmax, tuned", "difference", "G-softmax as it is, minus softmax tuned")
    return grid(["study", "recipe", "measure", *shown], lines)


def shown_in_forest() -> list[tuple[str, str, Paired]]:
    """Study, head and its test against the reference: G-softmax, and the rival that is best on the validation split."""
    found = []
    for name, study in finished().items():
        told, rows = read(name)
        reference, *others = study.heads
        metric = told["measure"]
        gaussian = [head for head in others if "G-softmax" in head and "adjustment" not in head][:1]
        rivals = [head for head in others if "G-softmax" not in head]
        if rivals:
            sign = -1 if measures.find(metric).smaller_is_better else 1
            gaussian.append(max(rivals, key=lambda head: sign * _validated(told["heads"][head])))
        found += [(name, head, compared(rows, head, reference, metric)) for head in gaussian]
    return found


def _validated(head: Mapping[str, Any]) -> float:
    return float(np.mean(next(t["values"] for t in head["trials"] if t["settings"] == head["chosen"])))


def draw_forest() -> str:
    """One axis: points gained over the reference of each study, in error or mAP."""
    rows = []
    for name, head, test in shown_in_forest():
        study, told = studies()[name], read(name)[0]
        sign = -1 if measures.find(told["measure"]).smaller_is_better else 1
        low, high = sorted((sign * test.low, sign * test.high))
        colour = VERMILLION if "G-softmax" in head else GREY if head == "softmax, paired" else BLUE
        what = f"{name}: {head} against {next(iter(study.heads))}"
        text = f"{sign * test.difference:+.2f} [{low:+.2f}, {high:+.2f}]  n = {test.n}"
        rows.append({"what": what, "gain": sign * test.difference, "low": low, "high": high, "text": text, "c": colour})
    y = figures.ordinal("what", None, labelLimit=420) | {"sort": None}
    x: dict[str, Any] = {"field": "gain", "type": "quantitative", "title": "points gained in error or mAP, tuned alike"}
    colour = {"field": "c", "type": "nominal", "scale": None}
    spec = {
        "data": {"values": rows},
        "width": 430,
        "height": {"step": 20},
        "layer": [
            {"mark": "rule", "encoding": {"x": {"datum": 0}}},
            {
                "mark": {"type": "rule", "strokeWidth": 2},
                "encoding": {"y": y, "x": {**x, "field": "low"}, "x2": {"field": "high"}, "color": colour},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1},
                "encoding": {"y": y, "x": x, "color": colour},
            },
            {
                "mark": {"type": "text", "align": "left", "fontSize": 11},
                "encoding": {"y": y, "x": {"value": 440}, "text": {"field": "text"}},
            },
        ],
    }
    title = "Gain over softmax or BCE: right of the line is better; red is G-softmax, blue the rival best on validation"
    return figures.svg(spec, title, [[row["what"], row["text"]] for row in rows])


def page(study: TunedStudy) -> str:
    """The page of a study with rows."""
    told, rows = read(study.name)
    own = [answer for answer in answers() if answer.study.name == study.name]
    parts = [f"# {study.name}", study.about]
    parts += [f"**{answer.question.text}** {answer.words}" for answer in own]
    parts += [_test_table(study, rows), _settings(study), _provenance(study, rows)]
    metrics = {told["measure"]: {h: {"values": list(values(rows, told["measure"])[h].values())} for h in study.heads}}
    for name, head in told["heads"].items():  # the defaults met the first seeds only
        metrics[told["measure"]][name]["values"] = metrics[told["measure"]][name]["values"][
            : len(head["untuned"]) or None
        ]
    for table in tuning_tables({"tuning": told, "metrics": metrics}):
        parts.append(f"## {table.title}\n\n{_grid(table)}")
    return "\n\n".join(parts) + "\n"


def unfinished_page(study: TunedStudy, trials: Sequence[Mapping[str, Any]]) -> str:
    """The page of a study whose chosen settings have not met the test set."""
    asked = [f"**{question.text}** Not answered yet." for question in study.questions]
    parts = [f"# {study.name}", study.about, *asked]
    parts.append(
        "The settings were tried on the validation split; the comparison on the test set has no rows yet. The table "
        "has the trials that were trained with most seeds, the best of each head first. The best of several trials "
        "looks better than it is, for every head alike."
    )
    lines = []
    for head in study.heads:
        of: dict[int, list[float]] = {}
        settings = {}
        for row in trials:
            if row["setting"] == head and row["error"] is not None:
                of.setdefault(row["trial"], []).append(100 * row["error"])
                settings[row["trial"]] = row["settings"]
        most = max(map(len, of.values()))
        ranked = sorted((float(np.mean(v)), trial) for trial, v in of.items() if len(v) == most)
        for mean, trial in ranked[:2]:
            sd = float(np.std(of[trial], ddof=1)) if most > 1 else None
            told = ", ".join(f"{k}={v}" for k, v in settings[trial].items()) or "default"
            lines.append([head, plus_minus(mean, sd), str(most), f"`{told}`"])
    parts.append(grid(["head", "validation error %", "seeds", "setting"], lines))
    parts += [_settings(study), f"{study.trials} trials of every head in `{study.space}`."]
    return "\n\n".join(parts) + "\n"


def _test_table(study: TunedStudy, rows: Sequence[Row]) -> str:
    metrics = MULTI if "mAP" in rows[0]["metrics"] else SINGLE
    reference, primary = next(iter(study.heads)), metrics[:3] if metrics is MULTI else metrics[:1]
    by = {metric: values(rows, metric) for metric in metrics}
    lines = []
    for head in study.heads:
        cells = []
        for metric in metrics:
            v = np.array([*by[metric][head].values()])
            middle = show(float(np.median(v))) if metric in MEDIANS else ""
            cells.append(middle or plus_minus(float(v.mean()), float(v.std(ddof=1))))
        tests = [compared(rows, head, reference, metric) for metric in primary]
        lines.append([head, str(len(v)), *cells, *("–" if head == reference else span(test) for test in tests)])
    titles = (f"{measures.find(metric).title}{', median' if metric in MEDIANS else ''}" for metric in metrics)
    header = ["head", "seeds", *titles, *(f"{measures.find(metric).label} minus {reference}" for metric in primary)]
    note = "Test set, chosen settings: mean ± standard deviation over seeds; difference paired by seed [95 %]."
    return f"{grid(header, lines)}\n\n{note}"


def _settings(study: TunedStudy) -> str:
    config = study.config({})
    tuned = [key for key in re.findall(r"(\w+)=", study.space)]
    held = ", ".join(f"{key}={getattr(config, key)}" for key in SHARED if key not in tuned)
    shared = f"The same for all heads: recipe `{study.recipe}`, {held}."
    return f"{shared} Tuned for each: {', '.join(tuned)}, and its own options."


def _provenance(study: TunedStudy, rows: Sequence[Row]) -> str:
    planned = {head: max(study.seeds, study.more.get(head, 0)) for head in study.heads}
    done = {head: sum(row["setting"] == head for row in rows) for head in study.heads}
    text = provenance(rows)
    if done != planned:
        text += f" {sum(planned.values())} were declared; the others are not trained yet."
    return text


def _grid(table: Table) -> str:
    """Markdown without the title."""
    return table.markdown().split("\n", 2)[2]


def pages() -> dict[Path, str]:
    """All generated pages, by path."""
    found = {}
    for name, study in studies().items():
        trials = read_rows(f"{name}-trials", TUNED)
        if name in finished():
            found[PAGES / f"{name}.md"] = page(study)
        elif trials:
            found[PAGES / f"{name}.md"] = unfinished_page(study, trials)
    return found
