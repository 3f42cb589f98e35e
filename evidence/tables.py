"""Tables and verdicts from the rows of the studies in studies.yaml."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gsoftmax import measures
from gsoftmax.significance import (
    Correlation,
    Paired,
    all_class_correlation,
    holm,
    paired,
    paper_correlations,
    required_n,
    t_two_sided,
    verdict,
)
from gsoftmax.tables import p_value, show, signed

from .run import ROWS, Study, read_rows, studies

ROOT = Path(__file__).parent.parent
NOTHING = "No run has been done yet."

SEVEN = ("mAP", "C_P", "C_R", "C_F1_mean", "O_P", "O_R", "O_F1")  # the paper's, of several labels
GEOMETRY = ("compactness", "separability", "ratio")
GAUSSIAN = ("learned", "empirical", "empirical_all")  # the scores of gsoftmax.ood that come from Gaussians
HEAVY = ("relative_sigma",)  # its denominator may be near 0: tested on logarithms, in percent, and shown by medians
COST_BOUND = 1.01  # the largest acceptable ratio of step times

Row = Mapping[str, Any]
Found = Mapping[str, tuple[Study, Sequence[Row]]]


@dataclass(frozen=True)
class Difference:
    """A setting against another in one metric, paired by seed."""

    setting: str
    metric: str
    reference: str  # the other setting
    mean: float  # of the reference over the paired seeds
    test: Paired
    p: float  # after Holm's correction over all tests made together

    @property
    def verdict(self) -> str:
        return verdict(self.test.difference, self.p, measures.find(self.metric).smaller_is_better)

    @property
    def share(self) -> float:
        """The difference in percent of the reference."""
        if self.metric in HEAVY:
            return self.test.difference
        return 100 * self.test.difference / self.mean if self.mean else math.nan


OfSeeds = Mapping[int, float]


def tested(cases: Iterable[tuple[str, str, str, OfSeeds, OfSeeds]]) -> list[Difference]:
    """Paired tests with Holm's correction for all of them.

    cases: setting, metric, reference, the reference's values by seed, the setting's; without common seeds they are
    skipped
    """
    found = []
    for setting, metric, reference, base, of in cases:
        a, b = on_common_seeds(base, of)
        if len(a):
            test = _in_percent(paired(np.log(a), np.log(b))) if metric in HEAVY else paired(a, b)
            found.append((setting, metric, reference, float(a.mean()), test))
    corrected = holm([test.p for *_, test in found])
    return [Difference(*d, float(p)) for d, p in zip(found, corrected, strict=True)]


def _in_percent(of_logarithms: Paired) -> Paired:
    difference, low, high = (
        100 * math.expm1(v) for v in (of_logarithms.difference, of_logarithms.low, of_logarithms.high)
    )
    return replace(of_logarithms, difference=difference, low=low, high=high)


def done(rows: Sequence[Row]) -> list[Row]:
    """The rows of runs that did not diverge."""
    return [row for row in rows if "metrics" in row]


def values(rows: Sequence[Row], metric: str) -> dict[str, dict[int, float]]:
    """A metric by setting and seed, in percent where it is a fraction."""
    scale = measures.find(metric).scale
    found: dict[str, dict[int, float]] = {}
    for row in done(rows):
        if metric in row["metrics"]:
            found.setdefault(row["setting"], {})[row["seed"]] = scale * row["metrics"][metric]
    return found


def metrics_of(rows: Sequence[Row]) -> tuple[str, ...]:
    """The metrics that are tested; none where all runs diverged."""
    first = next(iter(done(rows)), None)
    return () if first is None else measures.MULTI if "mAP" in first["metrics"] else measures.SINGLE


def settings_of(study: Study, rows: Sequence[Row]) -> list[str]:
    there = {row["setting"] for row in rows}
    return [s for s in study.settings if s in there]


def live(study: Study) -> list[str]:
    """The settings that test the head: not those of the printed multi-label forms, which hardly learn with any head."""
    forms = {name: changes.get("head_options", {}).get("form") for name, changes in study.settings.items()}
    return [name for name, form in forms.items() if form not in ("independent", "printed")]


def on_common_seeds(a: Mapping[int, float], b: Mapping[int, float]) -> tuple[np.ndarray, np.ndarray]:
    seeds = sorted(a.keys() & b.keys())
    return np.array([a[s] for s in seeds]), np.array([b[s] for s in seeds])


def differences(study: Study, rows: Sequence[Row]) -> list[Difference]:
    """Every setting against the first one in every metric, with Holm's correction for all of these tests."""
    first, *others = study.settings
    by = {metric: values(rows, metric) for metric in metrics_of(rows)}
    return tested((s, m, first, of.get(first, {}), of.get(s, {})) for m, of in by.items() for s in others)


def study_tables(study: Study, rows: Sequence[Row]) -> str:
    """Means and deviations, then paired differences, as Markdown."""
    settings, metrics = settings_of(study, rows), metrics_of(rows)
    parts = [f"### {study.name}"]
    if study.about:
        parts.append(study.about)
    if "mAP" in metrics:
        parts.append(_means(rows, settings, SEVEN))
    parts.append(_means(rows, settings, [*(m for m in metrics if m not in SEVEN), "seconds"]))
    found = differences(study, rows)
    if found:
        parts += [_caption(study), _differences(found, metrics)]
        if not math.isnan(sd := found[0].test.sd):
            effect, name = 0.1, measures.find(found[0].metric).label
            parts.append(
                f"To see {effect} points of {name} at 80 % power takes {required_n(sd, effect)} paired seeds here "
                f"({found[0].setting})."
            )
    parts += [*_label_tables(study, rows), *_ood_tables(study, rows), provenance(rows)]
    return "\n\n".join(parts)


def _means(rows: Sequence[Row], settings: Sequence[str], metrics: Sequence[str]) -> str:
    by = {m: values(rows, m) for m in metrics}
    lines = []
    for setting in settings:
        cells = []
        for metric in metrics:
            found = by[metric].get(setting, {})
            # the seconds of a run that something else slowed down should not count
            middle = metric in ("seconds", *HEAVY) and found
            cells.append(show(float(np.median([*found.values()]))) if middle else _plus_minus(found))
        lines.append([setting, _seeds(rows, setting), *cells])
    titles = (f"{measures.find(m).title}{', median' if m in HEAVY else ''}" for m in metrics)
    return grid(["setting", "seeds", *titles], lines)


def _caption(study: Study) -> str:
    reference = next(iter(study.settings))
    return (
        f"Differences from {reference}, paired by seed: mean [95 % interval].  Bold, with the word better or worse: "
        "p after Holm's correction is below 0.05.  All others: no difference shown."
    )


def _differences(found: Sequence[Difference], metrics: Sequence[str]) -> str:
    lines = []
    for setting in dict.fromkeys(d.setting for d in found):
        of = {d.metric: d for d in found if d.setting == setting}
        cells = [_shown(of[m].test, of[m].verdict) if m in of else "–" for m in metrics]
        lines.append([setting, str(max(d.test.n for d in of.values())), *cells])
    titles = (f"{measures.find(m).title}{', in percent' if m in HEAVY else ''}" for m in metrics)
    return grid(["setting", "pairs", *titles], lines)


def _label_tables(study: Study, rows: Sequence[Row]) -> list[str]:
    """The paper's t-test and correlations, which are over labels."""
    parts = []
    tests = label_tests(study, rows)
    if tests:
        parts.append(
            "The paper's t-test: average precision, in points and as the mean over seeds, paired by label.  "
            "The labels are few, and p is not corrected."
        )
        lines = [[s, span(t), f"{t.t:+.2f}", p_value(t.p), str(t.n)] for s, t in tests.items()]
        parts.append(grid(["setting", "difference in AP", "t", "p", "labels"], lines))
    found = correlations(study, rows)
    if found:
        parts.append(
            "Correlation of a label's geometry with its AP: the paper's way (the best label only, over settings), and "
            "all."
        )
        lines = []
        for measure, (one, everything) in found.items():
            lines.append([measure, _r(one), p_value(one.p), str(one.n), _r(everything), str(everything.n)])
        parts.append(grid(["measure", "r of one label", "p", "n", "r of all", "n"], lines))
    return parts


def label_tests(study: Study, rows: Sequence[Row]) -> dict[str, Paired]:
    """The paper's test: the labels' average precisions of a setting against the reference's, paired by label."""
    by: dict[str, dict[int, Any]] = {}
    for row in done(rows):
        if "labels" in row:
            by.setdefault(row["setting"], {})[row["seed"]] = row["labels"]["ap"]
    reference, *others = study.settings
    found = {}
    for setting in others:
        a, b = on_common_seeds(by.get(reference, {}), by.get(setting, {}))  # (seeds, labels)
        if len(a):
            found[setting] = paired(100 * a.mean(0), 100 * b.mean(0))
    return found


def correlations(study: Study, rows: Sequence[Row]) -> dict[str, tuple[Correlation, Correlation]]:
    """Pearson correlations of a label's geometry with its average precision, means over seeds, of live settings.

    Of the one label whose value is best over the settings, which is the paper's table; and of all labels and settings.
    """
    there = [row for row in done(rows) if "labels" in row]
    chosen = [s for s in settings_of(study, there) if s in live(study) and s != next(iter(study.settings))]
    if len(chosen) < 3:
        return {}

    def table(key: str) -> np.ndarray:  # (settings, labels)
        return np.array([np.mean([r["labels"][key] for r in there if r["setting"] == s], axis=0) for s in chosen])

    ap = table("ap")
    return {k: (paper_correlations(table(k), ap), all_class_correlation(table(k), ap)) for k in GEOMETRY}


def ood_metrics(rows: Sequence[Row]) -> list[str]:
    """The metrics `ood_SCORE DATA` that any row has, sorted by score in the order of the first row."""
    keys = dict.fromkeys(k for row in done(rows) for k in row["metrics"] if k.startswith("ood_"))
    scores = [*dict.fromkeys(score_and_data(k)[0] for k in keys)]
    return sorted(keys, key=lambda k: scores.index(score_and_data(k)[0]))


def score_and_data(metric: str) -> list[str]:
    """
    >>> score_and_data("ood_empirical_all cifar2")
    ['empirical_all', 'cifar2']
    """
    return metric.removeprefix("ood_").split(" ", 1)


def detections(study: Study, rows: Sequence[Row]) -> list[Difference]:
    """AUROC of every setting's best Gaussian score against that of its own probability and of the reference's.

    The best score has the highest mean over all outside data; Holm's correction covers all Gaussian scores.
    """
    first = next(iter(study.settings))
    by = {metric: values(rows, metric) for metric in ood_metrics(rows)}
    gaussian = [metric for metric in by if score_and_data(metric)[0] in GAUSSIAN]

    def cases() -> Iterator[tuple[str, str, str, OfSeeds, OfSeeds]]:
        for setting in settings_of(study, done(rows)):
            for metric in gaussian:
                probability = by.get(f"ood_probability {score_and_data(metric)[1]}", {})
                for reference in dict.fromkeys((setting, first)):
                    yield setting, metric, reference, probability.get(reference, {}), by[metric].get(setting, {})

    means: dict[str, dict[str, list[float]]] = {}  # by setting and score
    for metric in gaussian:
        for setting, found in by[metric].items():
            of = means.setdefault(setting, {}).setdefault(score_and_data(metric)[0], [])
            of.append(float(np.mean([*found.values()])))
    best = {setting: max(of, key=lambda score: np.mean(of[score])) for setting, of in means.items()}
    return [d for d in tested(cases()) if score_and_data(d.metric)[0] == best[d.setting]]


def _ood_tables(study: Study, rows: Sequence[Row]) -> list[str]:
    columns = ood_metrics(rows)
    if not columns:
        return []
    by = [values(rows, metric) for metric in columns]
    lines = [[s, *(_plus_minus(v.get(s, {})) for v in by)] for s in settings_of(study, done(rows))]
    parts = [
        "Out-of-distribution detection: AUROC in percent, for every score and every kind of outside data.",
        grid(["setting", *(measures.find(metric).label.removeprefix("AUROC, ") for metric in columns)], lines),
    ]
    found = detections(study, rows)
    if not found:
        return parts
    first = next(iter(study.settings))
    outsides = [*dict.fromkeys(score_and_data(metric)[1] for metric in columns)]
    parts.append(
        "The best Gaussian score of each setting (by the mean of this table, which favours it) against the highest "
        f"probability, of the same setting and of {first}: points of AUROC, paired by seed.  Bold: p below 0.05 after "
        "Holm's correction over all Gaussian scores."
    )
    lines = []
    for setting in dict.fromkeys(d.setting for d in found):
        of = {(d.reference == setting, score_and_data(d.metric)[1]): d for d in found if d.setting == setting}
        # the reference is only compared with itself
        pairs = [(own, outside) for outside in outsides for own in (True, False)]
        cells = [_shown(of[k].test, of[k].verdict) if k in of else "–" for k in pairs]
        score = score_and_data(next(iter(of.values())).metric)[0]
        lines.append([setting, score.replace("_", " "), *cells])
    heads = [f"{outside}, against {which}" for outside in outsides for which in ("its own", f"{first}'s")]
    return [*parts, grid(["setting", "score", *heads], lines)]


def read_cost(folder: Path = ROWS) -> dict[str, Any]:
    path = folder / "cost.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def cost_tables(cost: Mapping[str, Any], found: Found) -> str:
    """What a step costs with every head, and a whole run of `cifar10`."""
    parts = []
    if cost.get("heads"):
        lines = [
            [name, f"{of['step ms']:.3f}", f"{of['ratio']:.4f}", f"{of['head ms']:.3f}", f"{100 * of['share']:.2f} %"]
            for name, of in cost["heads"].items()
        ]
        parts.append(grid(["head", "step, ms", "of softmax's", "head alone, ms", "share of the step"], lines))
        again = '"softmax again" is the same head once more: how far it is from 1 is noise.  '
        parts.append((again if "softmax again" in cost["heads"] else "") + f"Recipe {cost['recipe']}, {_where(cost)}.")
    if "cifar10" in found:
        study, rows = found["cifar10"]
        seconds, first = values(rows, "seconds"), next(iter(study.settings))
        lines = []
        for setting in settings_of(study, rows):
            of = seconds.get(setting, {})
            a, b = on_common_seeds(seconds.get(first, {}), of)
            if len(a):
                median = show(float(np.median([*of.values()])))
                lines.append([setting, _seeds(rows, setting), median, f"{np.median(b / a):.3f}"])
        if lines:
            parts.append(
                "Seconds of a whole run of `cifar10`, one seed, on a GPU that several runs shared: medians, the ratio "
                "of pairs with the same seed, which ran at about the same time."
            )
            parts.append(grid(["setting", "seeds", "seconds", f"of {first}'s"], lines))
    return "\n\n".join(parts) or NOTHING


@dataclass(frozen=True)
class Case:
    """One comparison that bears on a claim."""

    study: str
    verdict: str
    size: float


def claims(found: Found, cost: Mapping[str, Any]) -> Iterator[tuple[str, str, list[Case]]]:
    """Claim, unit of the differences, cases: live settings of G-softmax in all studies except the tuning ones.

    Claim 5 counts the tuning studies of several labels too: only they have three settings or more, and a correlation
    chooses none.
    """
    tried = {name: pair for name, pair in found.items() if not name.startswith("tune-")}
    compared = [
        (n, d)
        for n, (s, rows) in tried.items()
        for d in differences(s, rows)
        if d.setting.startswith("G ") and d.setting in live(s)
    ]

    def of(*metrics: str, names: str = "", share: bool = False) -> list[Case]:
        chosen = [(n, d) for n, d in compared if d.metric in metrics and re.match(names, n)]
        return [Case(n, d.verdict, d.share if share else d.test.difference) for n, d in chosen]

    yield "1. lowers the error", "points", of("error")
    yield "1. raises mAP, C-F1 and O-F1", "points", of("mAP", "C_F1_mean", "O_F1")
    yield "2. raises compactness", "%", of("compactness", share=True)
    yield "2, scale-free: lowers relative σ", "%", of("relative_sigma", share=True)
    yield "3. raises separability", "%", of("separability", share=True)
    yield "3, scale-free: raises d′", "%", of("dprime", share=True)
    yield "4. raises the ratio", "%", of("ratio", share=True)
    one: list[Case] = []
    everything: list[Case] = []
    for name, (study, rows) in found.items():
        pairs = [*correlations(study, rows).values()]
        if pairs:
            labels = len(next(r for r in done(rows) if "labels" in r)["labels"]["ap"])
            # The settings of one label are not independent: a label counts as one point, however many there are.
            of_all = [(c.r, _p_of_r(c.r, labels)) for _, c in pairs]
            for cases, of_measures in ((one, [(c.r, c.p) for c, _ in pairs]), (everything, of_all)):
                corrected = zip(of_measures, holm([p for _, p in of_measures]), strict=True)
                cases += [Case(name, verdict(r, p, False), r) for (r, _), p in corrected if not math.isnan(r)]
    yield "5. geometry correlates with AP: one label over settings, as in the paper", "r", one
    yield "5. geometry correlates with AP: all labels and settings", "r", everything
    yield "calibration: lowers NLL", "%", of("nll", share=True)
    yield "calibration: lowers ECE", "points", of("ece")
    yield "small training sets: lowers the error", "points", of("error", names="few-")
    yield "label noise and imbalance: lowers the error", "points", of("error", names="noise-|(digits-)?imbalance")
    outside = [
        Case(name, d.verdict, d.test.difference)
        for name, (study, rows) in tried.items()
        for d in detections(study, rows)
        if d.setting.startswith("G ") and d.reference != d.setting
    ]
    claim = "out-of-distribution detection: its best Gaussian score has a higher AUROC than softmax's probability"
    yield claim, "points", outside
    ratios = [of["ratio"] for head, of in cost.get("heads", {}).items() if head.startswith("G ")]
    within = [Case("cost", "better" if r <= COST_BOUND else "worse", 100 * (r - 1)) for r in ratios]
    yield f"cost: a step takes at most {100 * (COST_BOUND - 1):.0f} % more than softmax's", "%", within


def _p_of_r(r: float, n: int) -> float:
    """Pearson's two-sided p of r from n points."""
    if n < 3 or math.isnan(r):
        return math.nan
    return 0.0 if abs(r) == 1 else t_two_sided(r * math.sqrt((n - 2) / (1 - r * r)), n - 2)


def word(better: int, worse: int, total: int) -> str:
    """The verdict on a claim.

    >>> word(3, 0, 5), word(0, 3, 5), word(1, 0, 5), word(0, 1, 5), word(0, 0, 5), word(2, 1, 5)
    ('holds', 'the reverse', 'holds in part', 'the reverse in part', 'not shown', 'mixed')
    >>> word(4, 1, 5), word(1, 4, 5), word(4, 1, 9)
    ('mostly holds', 'mostly the reverse', 'mixed')
    """
    if better and worse:
        clear = 2 * max(better, worse) > total and max(better, worse) >= 4 * min(better, worse)
        return "mixed" if not clear else "mostly holds" if better > worse else "mostly the reverse"
    if not better and not worse:
        return "not shown"
    return ("holds" if better else "the reverse") + ("" if 2 * max(better, worse) > total else " in part")


def verdicts(found: Found, cost: Mapping[str, Any]) -> str:
    """One row per claim: how often G-softmax is better, worse, or neither, and the verdict."""
    lines = []
    for claim, unit, cases in claims(found, cost):
        counts = []
        for answer in ("better", "worse", "no difference shown"):
            names = [c.study for c in cases if c.verdict == answer]
            counts.append((len(names), len(set(names))))
        shown = [f"{n} in {k}" if n else "0" for n, k in counts]
        lines.append([claim, *shown, _range(cases, unit), f"**{word(counts[0][0], counts[1][0], len(cases))}**"])
    parts = [
        grid(["claim", "better", "worse", "no difference shown", "median difference (range)", "verdict"], lines),
        '"3 in 2" means three comparisons in two studies.  A comparison tests one G-softmax setting against the '
        "reference of its study in one metric; it is better or worse if p is below 0.05 after Holm's correction.  For "
        "claim 5 it is one measure in a study; for cost it is one head, better if it stays within the bound.  A claim "
        "*holds* if more than half of the comparisons are better and none is worse, and holds *in part* if fewer are "
        "better; *the reverse* exchanges better and worse.  With both it is *mixed*, or *mostly* the side that has "
        "more than half of the comparisons and at least four times as many as the other; *not shown* if there is none.",
    ]
    lost = {name: sum("metrics" not in r for r in rows) for name, (_, rows) in found.items()}
    if any(lost.values()):
        of = ", ".join(f"{n} of {len(found[name][1])} in {name}" for name, n in lost.items() if n)
        parts.append(f"Runs that diverged are left out of all numbers: {of}.")
    return "\n\n".join(parts)


def _range(cases: Sequence[Case], unit: str) -> str:
    sizes = [c.size for c in cases if not math.isnan(c.size)]
    if not sizes:
        return "–"
    ends = [f"{v:+.0f}" if abs(v) >= 100 else f"{v:+.1f}" if abs(v) >= 10 else f"{v + 0.0:+.2f}" for v in sizes]
    low, high = (ends[sizes.index(f(sizes))] for f in (min, max))
    middle = ends[sizes.index(float(np.quantile(sizes, 0.5, method="lower")))]
    unit = f" {unit}" if unit != "r" else ""
    return f"{low}{unit}" if low == high else f"{middle}{unit} ({low} to {high})"


def summary(found: Found) -> str:
    """One row per study and setting: the changes of the paper's four numbers."""
    lines = []
    for name, (study, rows) in found.items():
        if name.startswith("tune-"):
            continue
        everything = differences(study, rows)
        for setting in dict.fromkeys(d.setting for d in everything):
            of = {d.metric: d for d in everything if d.setting == setting}
            lost = sum("metrics" not in row for row in rows if row["setting"] == setting)
            headline = of.get(metrics_of(rows)[0])
            first = f"{span(headline.test)}, {headline.verdict}" if headline else "–"
            rest = [f"{of[m].share:+.0f} %, {of[m].verdict}" if m in of else "–" for m in GEOMETRY]
            pairs = f"{headline.test.n if headline else 0}" + (f" ({lost} diverged)" if lost else "")
            lines.append([name, setting, pairs, first, *rest])
    return grid(["study", "setting", "seeds", "error or mAP", *GEOMETRY], lines) if lines else NOTHING


def grid(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(x)} |" for x in lines)])


def _seeds(rows: Sequence[Row], setting: str) -> str:
    """
    >>> _seeds([{"setting": "a", "metrics": {}}, {"setting": "a", "diverged": "nan"}], "a")
    '1 (1 diverged)'
    """
    finished = ["metrics" in row for row in rows if row["setting"] == setting]
    lost = finished.count(False)
    return f"{finished.count(True)} ({lost} diverged)" if lost else str(len(finished))


def decimals(spread: float) -> int:
    """So many that two digits of the spread are seen.

    >>> decimals(0.12), decimals(0.0044), decimals(27.0)
    (2, 4, 0)
    """
    return min(4, max(0, 1 - math.floor(math.log10(spread)))) if spread > 0 else 4


def _plus_minus(of_seeds: Mapping[int, float]) -> str:
    v = np.array([*of_seeds.values()])
    if len(v) < 2:
        return show(float(v[0])) if len(v) else "–"
    sd = float(v.std(ddof=1))
    if sd < 1e-9 * abs(v.mean()):  # the same number every time, but for rounding
        return f"{show(float(v.mean()))} ± 0"
    digits = decimals(sd)
    return f"{v.mean():.{digits}f} ± {sd:.{digits}f}"


def span(t: Paired) -> str:
    if math.isnan(t.low):
        return signed(t.difference) or "–"
    digits = decimals((t.high - t.low) / 2)
    d, low, high = (f"{round(v, digits) + 0.0:+.{digits}f}" for v in (t.difference, t.low, t.high))  # no -0.00
    return f"{d} [{low}, {high}]"


def _shown(t: Paired, verdict: str) -> str:
    return span(t) if verdict == "no difference shown" else f"**{span(t)} {verdict}**"


def _r(found: Correlation) -> str:
    return "n/a" if math.isnan(found.r) else f"{found.r:.2f}"


def _where(row: Row) -> str:
    return f"{row['gpu'] or row['processor']}, torch {row['torch']}, gsoftmax {row['gsoftmax']}"


def provenance(rows: Sequence[Row]) -> str:
    seconds = [r["metrics"]["seconds"] for r in done(rows)]
    each = f", {show(float(np.median(seconds)))} s each in the median" if seconds else ""
    lost = len(rows) - len(done(rows))
    diverged = f" ({lost:,} diverged, left out of the numbers)" if lost else ""
    return f"{len(rows):,} runs{diverged}{each}: {'; '.join(sorted({_where(r) for r in rows}))}."


def read(folder: Path = ROWS) -> dict[str, tuple[Study, Sequence[Row]]]:
    """Studies that have rows."""
    return {name: (study, rows) for name, study in studies().items() if (rows := read_rows(name, folder))}
