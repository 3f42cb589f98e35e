"""What the tuned studies answer: the first table and the forest of docs/evidence.md, and one page per study."""

from __future__ import annotations

import math
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
from gsoftmax.tune import FIRST_SEED

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
        name, q = measures.find(self.question.metric).label, self.question
        return (
            f"{said}. {q.head} minus {q.against}: {span(self.test)} points of {name}, {self.test.n} pairs, "
            f"{_p(self.test.p)}, and {_p(self.p)} after Holm's correction over all primary questions."
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


def as_they_are() -> dict[str, list[tuple[str, str, Paired]]]:
    """The recipe as it is minus a head tuned, on the test set, with both heads, by study that trained the defaults."""
    found = {}
    for name in (name for name, study in finished().items() if study.untuned):
        told, rows = read(name)
        tuned, untuned = values(rows, told["measure"]), {h: of["untuned"] for h, of in told["heads"].items()}
        softmax, bce, gaussian = (next((h for h in tuned if word in h), "") for word in ("softmax", "BCE", "G-softmax"))
        pairs = ((softmax, softmax), (bce, bce), (gaussian, softmax))
        tests = [
            (head, against, paired(np.array([*tuned[against].values()][: len(untuned[head])]), np.array(untuned[head])))
            for head, against in pairs
            if untuned.get(head)
        ]
        if all(map(untuned.get, (softmax, gaussian))):
            found[name] = tests
    return found


def recipes() -> str:
    lines = []
    for name, tests in as_they_are().items():
        of = {(h, a): "0, it was chosen" if np.allclose((t.low, t.high), 0) else span(t) for h, a, t in tests}
        cells = [of.get(("BCE", "BCE"), "–"), *(text for (head, _), text in of.items() if head != "BCE")]
        measure = measures.find(read(name)[0]["measure"]).label
        lines.append([name, f"`{studies()[name].recipe}`", measure, *cells, str(tests[0][2].n)])
    minus = ("BCE, minus BCE tuned", "softmax, minus softmax tuned", "G-softmax, minus softmax tuned")
    return grid(["study", "recipe", "measure", *minus, "pairs"], lines)


def sensitivity() -> str:
    """For every study with sweeps, the factor over which a head loses at most one point."""
    parts: dict[tuple[str, ...], list[list[str]]] = {}
    for name, study in finished().items():
        for table in _tuning_tables(study):
            if table.title == "Sensitivity":
                of = {(row[0], row[1]): row[5] for row in table.rows}
                for key in dict.fromkeys(key for key, _ in of if of[key, next(iter(study.heads))]):
                    line = [name, f"`{key}`", *(show(of[key, head]) for head in study.heads)]
                    parts.setdefault(tuple(study.heads), []).append(line)
    return "\n\n".join(grid(["study", "key", *heads], lines) for heads, lines in parts.items())


def spread() -> str:
    """How much a setting costs that was not chosen: the median over the trials of every head, minus its best one."""
    lines = []
    for name, study in studies().items():
        of = first_seeds(study)
        if of:
            lost = {head: float(np.median(scores) - min(scores)) for head, scores in of.items()}
            first, *others = (f"{head} {points:.2f}" for head, points in lost.items())
            lines.append([name, str(study.trials), first, "; ".join(others)])
    return grid(["study", "trials", "reference", "others"], lines)


def first_seeds(study: TunedStudy) -> dict[str, list[float]]:
    """The validation results of all trials with their first seed, by head: in points, the smaller the better."""
    if study.name in finished():
        told = read(study.name)[0]
        sign = 1 if told["measure"] == "error" else -1
        scores = {head: [t["values"][0] for t in of["trials"]] for head, of in told["heads"].items()}
        return {head: [math.inf if v is None else sign * v for v in of] for head, of in scores.items()}
    found: dict[str, list[float]] = {}
    for row in read_rows(f"{study.name}-trials", TUNED):
        if row["seed"] == FIRST_SEED:
            found.setdefault(row["setting"], []).append(math.inf if row["error"] is None else 100 * row["error"])
    return found


def has_gaussians(head: str) -> bool:
    """Whether a head of the studies is G-softmax or another use of its Gaussians."""
    return "G-softmax" in head or head in ("plausible labels", "margin in Φ")


def shown_in_forest() -> list[tuple[str, str, Paired]]:
    """Study, head and its test against the reference: G-softmax, and the rival that is best on the validation split."""
    found = []
    for name, study in finished().items():
        told, rows = read(name)
        reference, *others = study.heads
        metric = told["measure"]
        gaussian = [head for head in others if "G-softmax" in head and "adjustment" not in head][:1]
        rivals = [head for head in others if not has_gaussians(head)]
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
    rows = read(study.name)[1]
    own = [answer for answer in answers() if answer.study.name == study.name]
    parts = [f"# {study.name}", study.about]
    parts += [f"**{answer.question.text}** {answer.words}" for answer in own]
    parts += [_in_short(study), _test_table(study, rows), _settings(study), _provenance(study, rows)]
    parts += [f"## {table.title}\n\n{_grid(table)}" for table in _tuning_tables(study)]
    return "\n\n".join(parts) + "\n"


def _tuning_tables(study: TunedStudy) -> list[Table]:
    told, rows = read(study.name)
    of = {head: [*of.values()] for head, of in values(rows, told["measure"]).items()}
    metrics = {  # the defaults met the first seeds only
        head: {"values": of[head][: len(found["untuned"]) or None]} for head, found in told["heads"].items()
    }
    return tuning_tables({"tuning": told, "metrics": {told["measure"]: metrics}})


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


def _in_short(study: TunedStudy) -> str:
    """The best head and the reference, by the means of the measure that was tuned."""
    told, rows = read(study.name)
    measure = measures.find(told["measure"])
    means = {head: float(np.mean([*of.values()])) for head, of in values(rows, measure.key).items()}
    best, reference = (min if measure.smaller_is_better else max)(means, key=means.__getitem__), next(iter(study.heads))
    rest = "." if best == reference else f", and {reference} {means[reference]:.2f} %."
    which = "Lowest" if measure.smaller_is_better else "Highest"
    primary = "question above is" if len(study.questions) == 1 else "questions above are"
    return f"{which} mean {measure.label}: {best}, {means[best]:.2f} %{rest} Only the {primary} primary."


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
    split = "Held-out training images" if study.tested else "Test set"
    note = f"{split}, chosen settings: mean ± standard deviation over seeds; difference paired by seed [95 %]."
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
