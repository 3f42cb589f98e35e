"""What a comparison found: means over seeds, paired differences from the first head, tests, tables, verdicts.

The headline measure, error or mAP, is the primary one: its tests are corrected by Holm's method for the heads, and the
verdicts and the number of seeds are about it. All other measures are secondary: their tests are corrected for all of
them, heads times measures. The tests over images are a third family, corrected for the heads.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import measures, significance
from .files import atomic_write, read_json, sealed
from .messages import first_line, plural, reason
from .outputs import IGNORE, has_outputs, open_outputs
from .reproduce import labels, not_recipe
from .runs import check_same_data, folder_name, read_result
from .tables import Cell, Shown, Table, decimals, p_value, plus_minus, signed

__all__ = [
    "PAIRED",
    "Finding",
    "at_chance",
    "correct",
    "correct_families",
    "correction",
    "damaged",
    "differences",
    "findings",
    "geometry_changes",
    "judge",
    "means",
    "no_verdict",
    "not_better",
    "over_images",
    "over_images_tables",
    "paired_cells",
    "so_far",
    "summarise",
    "summary_of",
    "tuning_tables",
    "verdicts",
    "without_geometry",
]

PLAN = "comparison.json"  # heads and seeds of a comparison's folder
_WORTH, _SPREADS = 0.5, (0.25, 0.5, 1.0)  # points of a difference worth knowing, and of its deviation over seeds
_FEW = 5  # seeds, with fewer of which their deviation is hardly known
_EQUAL = 1e-9  # points: differences that differ by rounding errors are equal
_BLOCK = 2**22  # numbers of x read at a time
PAIRED = ("difference", "95 % from", "to", "t", "p", "p, Holm", "n")


def summarise(
    out: str | os.PathLike[str], heads: Sequence[str], seeds: Sequence[int], more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The summary of a comparison's folder, which is also written there with the entries of `more`."""
    results: dict[str, list[Any]] = {h: [read_result(_run(out, h, s)) for s in seeds] for h in heads}
    summary = _with_images(summary_of(results, seeds), out) | dict(more or {})
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
    heads, seeds = _read_plan(path)
    found = {(h, s): read_result(_run(out, h, s)) for s in seeds for h in heads}
    results = {key: result for key, result in found.items() if result is not None}
    check_same_data(_run(out, *key) for key in results)
    if len(results) == len(found):
        path = Path(out) / "summary.json"
        if path.exists() and not _is_of_others(path, heads, seeds):
            return None
        return _with_images(summary_of({h: [results[h, s] for s in seeds] for h in heads}, seeds), out)
    finished = f"{len(results)} of {plural(len(found), 'run')}"
    if not results:
        return None
    whole = [s for s in seeds if all((h, s) in results for h in heads)]
    if not whole:
        whole = [max(seeds, key=lambda s: sum((h, s) in results for h in heads))]
        heads = [h for h in heads if (h, whole[0]) in results]
    summary = _with_images(summary_of({h: [results[h, s] for s in whole] for h in heads}, whole), out)
    return summary | {"incomplete": f"{finished} finished"}


def _read_plan(path: Path) -> tuple[list[str], list[int]]:
    """Heads and seeds of a comparison; the plans of older versions have no checksum."""
    try:
        plan = read_json(path)
        heads, seeds = plan["heads"], plan["seeds"]
        if "sha256" in plan and plan != sealed(plan):
            raise ValueError("its checksum does not match its content")
        folders = list(map(folder_name, heads))
        lists = isinstance(heads, list) and isinstance(seeds, list)
        if not lists or not all(type(s) is int for s in seeds) or {"", ".", ".."} & {*folders}:
            raise ValueError("heads must be names and seeds whole numbers")
        for what, named in (("heads", folders), ("seeds", seeds)):
            if not named or len(set(named)) < len(named):
                raise ValueError(f"{what} must be different and not empty, got {named}")
    except (ValueError, LookupError, TypeError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else first_line(error).removeprefix(f"{path} ")
        raise ValueError(f"{path} is not the plan of a comparison: {why}; run the comparison again") from None
    return heads, seeds


def _run(out: str | os.PathLike[str], head: str, seed: int) -> Path:
    return Path(out) / folder_name(head) / f"seed-{seed}"


def _with_images(summary: dict[str, Any], out: str | os.PathLike[str]) -> dict[str, Any]:
    runs = {(h, s): _run(out, h, s) for h in summary["heads"] for s in summary["seeds"]}
    return summary | {"over_images": over_images(runs), "not_recipe": labels(runs)}


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
    hidden = summary["at_chance"] = [h for h in heads if at_chance(results[h])]
    for key in tested:
        scale, shown = measures.find(key).scale, heads
        if key in measures.GEOMETRY:  # of outputs without skill it means nothing
            shown = [h for h in heads if h not in hidden]
        values = {h: np.array([scale * r[key] for r in results[h]]) for h in shown}
        rows: dict[str, Any] = {}
        for h, v in values.items():
            sd = float(v.std(ddof=1)) if len(v) > 1 else None
            rows[h] = {"values": v.tolist(), "mean": float(v.mean()), "sd": sd}
            again = key == "error_x" and all(r[key] == r["error"] for r in (*results[heads[0]], *results[h]))
            if h != heads[0] and heads[0] in values and len(v) > 1 and not again:  # else it is a test that is there
                rows[h]["paired"] = asdict(significance.paired(values[heads[0]], v))
        if rows:
            summary["metrics"][key] = rows
    correct_families(summary)
    summary["seconds"] = {h: [r["seconds"] for r in results[h]] for h in heads}
    return summary


def at_chance(results: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong with runs that are, together, not clearly better than guessing; empty for any others.

    results: final metrics of the runs of one head, or of one run; those of several labels or few images are not judged
    """
    keys = ("error", "error_of_guessing", "images")
    if not all(isinstance(r.get(key), (int, float)) for r in results for key in keys):
        return ""
    error, guessing, images = (float(np.mean([r[key] for r in results])) for key in keys)
    enough = significance.clearly_above(1 - error, 1 - guessing, max(1, round(images)))
    return "" if enough else not_better(error, guessing)


def not_better(error: float, guessing: float) -> str:
    """What is wrong with a model whose error is not clearly better than that of guessing.

    error, guessing: fractions
    """
    return f"the error, {100 * error:.2f} %, is not clearly better than that of guessing, {100 * guessing:.2f} %"


def over_images(runs: Mapping[tuple[str, int], Path]) -> dict[str, Any]:
    """Every head after the first against it on the same test images, their errors averaged over the seeds.

    runs: run folders by (head, seed)

    Returns head -> paired (error, of several labels the labels wrong) and mcnemar, which is None; nothing where a run
    has no outputs, or where seeds have different images.
    """
    heads, seeds = (list(dict.fromkeys(key[k] for key in runs)) for k in (0, 1))
    wrong: dict[str, Any] = {}
    y, used = None, np.ones(1, bool)
    try:
        for (head, _), run in runs.items() if len(heads) > 1 and all(map(has_outputs, runs.values())) else ():
            truth, found, labels = _wrong(run)
            if y is not None and not np.array_equal(truth, y):
                return {}
            y, used = truth, used & (found >= 0)
            wrong[head] = wrong.get(head, 0) + found
    except (OSError, ValueError):  # a damaged file is reported where the outputs themselves are shown
        return {}
    if not wrong or not used.any():
        return {}
    first, *others = ((head, count[used]) for head, count in wrong.items())
    tests = {
        head: asdict(significance.paired_over_images(first[1], count, len(seeds), labels)) | {"t": None}
        for head, count in others
    }
    correct(list(tests.values()))
    return {head: {"paired": {"error": test}, "mcnemar": None} for head, test in tests.items()}


def damaged(summary: Mapping[str, Any], out: str | os.PathLike[str]) -> str:
    """The first file of outputs of a comparison that cannot be read, and why; empty if all can be read.

    summary, out: of the comparison, and its folder
    """
    for run in (_run(out, h, s) for h in summary["heads"] for s in summary["seeds"]):
        try:
            if has_outputs(run):
                _wrong(run)
        except (OSError, ValueError) as error:
            path, why = run / "outputs.safetensors", reason(error)
            if str(path) in why:
                return why
            return f"{path}{why.removeprefix(path.name)}" if why.startswith(path.name) else f"{path}: {why}"
    return ""


def _wrong(run: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """y of a run's outputs, how many labels of each row are wrong (-1: the row cannot be used), and how many it has."""
    file = open_outputs(run)
    ys, counts = [], []
    for block in file.blocks(max(1, _BLOCK // file.num_classes)):
        used = block.finite() & (file.multilabel or block.y != IGNORE)
        counts.append(np.full(len(used), -1))
        ys.append(block.y)
        if used.any():
            p, y = file.probabilities(block.take(used))[0], block.y[used]
            counts[-1][used] = ((p >= 0.5) != y).sum(1) if file.multilabel else p.argmax(1) != y
    return np.concatenate(ys), np.concatenate(counts), file.num_classes if file.multilabel else 1


def correct_families(summary: Mapping[str, Any]) -> None:
    """Corrects the tests of the primary measure, those of all others, and those over images, each among themselves.

    summary: of a comparison
    """
    first, metrics = measures.headline(summary["multilabel"]).key, summary["metrics"]
    for keys in ([key for key in metrics if key == first], [key for key in metrics if key != first]):
        correct([row["paired"] for key in keys for row in metrics[key].values() if "paired" in row])
    correct([of["paired"]["error"] for of in summary.get("over_images", {}).values()])


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
    return Table(title, ("", *heads), tuple(rows), not_recipe(summary))


def differences(summary: Mapping[str, Any]) -> list[Table]:
    """Each head minus the first, paired by seed."""
    tables = []
    for head in summary["heads"][1:]:
        found = {k: v[head]["paired"] for k, v in summary["metrics"].items() if "paired" in v.get(head, {})}
        if found:
            title = f"{head} minus {summary['heads'][0]}, paired by seed"
            tables.append(paired_table(title, found, f"{correction(summary)} {not_recipe(summary)}".rstrip()))
    return tables


def over_images_tables(summary: Mapping[str, Any]) -> list[Table]:
    """Heads, or models, against the first on the same images.

    summary: of a comparison, or the document of a report
    """
    made, seeds = [], len(summary["seeds"])
    count = sum(len(found["paired"]) for found in summary["over_images"].values())
    for head, found in summary["over_images"].items():
        rows = []
        for key, test in found["paired"].items():
            measure = measures.find("hamming" if key == "error" and summary["multilabel"] else key)
            label = f"{measure.label}, points" if measure.percent else measure.label
            rows.append((label, *paired_cells(test, measure.scale)))
        note = f"p, Holm: corrected for {plural(count, 'test')} over images."
        if (exact := found["mcnemar"]) is not None:
            note = (
                f"{exact['only_first_right']:,} images only {summary['heads'][0]} gets right, "
                f"{exact['only_second_right']:,} only {head}. p of errors is McNemar's exact one. {note}"
            )
        elif summary.get("kind") != "analyze":
            note = (
                f"Each image counts with its mean error over {plural(seeds, 'seed')}, and p is that of the sign-flip "
                f"test. It is about these trained models on other images; the test over seeds is about other runs on "
                f"these images. {note}"
            )
        title = f"{head} minus {summary['heads'][0]}, paired over images"
        made.append(Table(title, ("", *PAIRED), tuple(rows), note))
    return made


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
        note += f" {told['asked']} were asked for; the budget of time allowed {told['trials']}"
        note += ", the default, so that nothing was tuned." if told["trials"] == 1 else "."
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
    """How far each swept key may be off before it costs one point of the measure."""
    measure, rows = measures.find(told["measure"]), []
    sign = 1 if measure.smaller_is_better else -1
    for key in told["space"]:
        for name, head in told["heads"].items():
            points = head["sweeps"].get(key, [])
            values = [p["value"] for p in points]
            scores = [math.inf if None in p["values"] else sign * float(np.mean(p["values"])) for p in points]
            best = min(scores, default=math.inf)
            if math.isinf(best):
                continue
            k, lost, log = scores.index(best), [score - best for score in scores], told["scales"][key] == "log"
            low, below = _one_point(values[k::-1], lost[k::-1], log)
            high, above = _one_point(values[k:], lost[k:], log)
            factor = Shown(f"{'' if below and above else '≥ '}{high / low:.3g}", high / low) if log else None
            worst: Cell = "diverged" if math.isinf(max(lost)) else max(lost)
            rows.append((key, name, *(Shown(f"{v:.3g}", v) for v in (values[k], low, high)), factor, worst))
    header = ("key", "head", "best", "from", "to", "factor", f"largest loss, {measure.label} points")
    note = (
        "The range around the best value in which at most one point is lost on the validation split, all else at the "
        "chosen setting, interpolated between the values tried. Factor: its end over its start; ≥ where the range "
        "reaches the end of the sweep."
    )
    return Table("Sensitivity", header, tuple(rows), note) if rows else None


def _one_point(values: Sequence[Any], lost: Sequence[float], log: bool) -> tuple[Any, bool]:
    """Where a curve, followed from its best value, has lost one point, and whether it does.

    Between values on a logarithmic scale it is interpolated; a diverged run loses without bound.
    """
    for (a, of_a), (b, of_b) in itertools.pairwise(zip(values, lost, strict=True)):
        if of_b > 1:
            return (a * (b / a) ** ((1 - of_a) / (of_b - of_a)) if log else a), True
    return values[-1], False


def _value(value: Any) -> Cell:
    return Shown(f"{value:g}" if isinstance(value, (int, float)) else str(value), value)


def _mean_of(trial: Mapping[str, Any]) -> Cell:
    values = [v for v in trial["values"] if v is not None]
    if not values:
        return None
    return plus_minus(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)


class Finding(NamedTuple):
    """What is said of one head or model."""

    head: str
    verdict: str  # better, worse, open (no difference shown), or none (no test)
    claim: str  # the verdict in words
    change: str  # of the headline measure
    more: str = ""  # the rest, smaller

    @property
    def sentence(self) -> str:
        return f"{self.claim}: {self.change}."

    def against(self, first: str, size: str) -> str:
        """The finding for a terminal.

        first, size: what the head is compared with, and on how much
        """
        return f"{self.head} against {first}, {size}: {self.change}. {self.claim}. {self.more}".rstrip()


def judge(head: str, test: Mapping[str, Any], measure: measures.Measure, family: str, named: str = "p") -> Finding:
    """What a paired test says of a head.

    head: or model
    test: difference, low, high, p and p_holm in the unit of `measure`, None for what there is not
    measure: that the test is about
    family: what p_holm is corrected for, as in "2 heads"; empty for a single test
    named: what p is called
    """
    p, corrected = (math.nan if test[key] is None else test[key] for key in ("p", "p_holm"))
    verdict = significance.verdict(test["difference"], corrected, measure.smaller_is_better)
    sign = "helps" if (test["difference"] < 0) == measure.smaller_is_better else "hurts"
    change = f"{measure.label} {points(test['difference'])} points"
    if test["low"] is not None and not math.isnan(test["low"]):
        change += f", between {points(test['low'])} and {points(test['high'])}"
    if p < significance.ALPHA:
        change += f" ({named} {p_value(p)}" + (f", {p_value(corrected)} corrected for {family})" if family else ")")
    if verdict in ("better", "worse"):
        return Finding(head, verdict, f"It {sign}", change)
    shown = f"Not shown that it {sign}, after correction" if p < significance.ALPHA else "No evidence that it helps"
    return Finding(head, "open", shown, change)


def points(value: float) -> str:
    """A difference in points, with a sign.

    value: points

    >>> points(-0.4), points(0.0004), points(12.345)
    ('−0.40', '0.00', '+12.35')
    """
    shown = f"{round(value, 9):+.2f}"  # a tie but for rounding errors is a tie
    return shown[1:] if float(shown) == 0 else shown.replace("-", "−")


def findings(summary: Mapping[str, Any]) -> list[Finding]:
    """One for each head after the first.

    summary: of a comparison, or its document
    """
    first, *others = summary["heads"]
    measure, n = measures.headline(summary["multilabel"]), len(summary["seeds"])
    rows, found = summary["metrics"][measure.key], []
    for head in others:
        test = rows[head].get("paired")
        if test is None:
            change = f"{measure.label} {points(rows[head]['mean'] - rows[first]['mean'])} points with one seed each"
            found.append(Finding(head, "none", "No evidence either way", change))
            continue
        of = {k: v for k, v in summary["metrics"].items() if "paired" in v.get(head, {})}
        tests = {k: v[head]["paired"] for k, v in of.items()}
        geometry = geometry_changes(tests, {k: v[first]["mean"] for k, v in of.items()})
        judged = judge(head, test, measure, plural(len(others), "head") if len(others) > 1 else "")
        found.append(judged._replace(more=f"{_power(test, n, len(others))} {geometry}".strip()))
    return found


def geometry_changes(tests: Mapping[str, Mapping[str, Any]], means: Mapping[str, float]) -> str:
    """The measures of class geometry that change, after correction; empty without tests of them.

    tests, means: paired tests, and means of the first head, by measure

    Compactness and ratio depend on the scale of x, so alone they are no change of geometry.
    """
    known = [key for key in measures.GEOMETRY if key in tests and means[key]]
    told = {}
    for key in known:
        p = tests[key]["p_holm"]
        if p is not None and p < significance.ALPHA:
            change = 100 * tests[key]["difference"] / means[key]
            told[key] = f"{measures.find(key).label} {change:+.0f} %".replace("-", "−")
    if free := [text for key, text in told.items() if key not in ("compactness", "ratio")]:
        return f"Class geometry changes: {', '.join(free)}."
    if told:
        return f"Only the scale of x changes: {next(iter(told.values()))}."
    return "No change of class geometry is shown." if known else ""


def verdicts(summary: Mapping[str, Any]) -> list[str]:
    """What changed, and how sure we are, in sentences: those of `findings`, or why there are none.

    summary: of a comparison
    """
    size = plural(len(summary["seeds"]), "seed")
    told = [f.against(summary["heads"][0], size) for f in findings(summary) if f.verdict != "none"]
    sentences = [sentence for sentence in (no_verdict(summary), *told) if sentence]
    return [*sentences, *filter(None, [without_geometry(summary), not_recipe(summary)])]


def without_geometry(summary: Mapping[str, Any]) -> str:
    """Which heads are not clearly better than guessing; empty if all are.

    summary: of a comparison
    """
    hidden = ", ".join(summary.get("at_chance", ()))
    return f"Not clearly better than guessing, so without geometry: {hidden}." if hidden else ""


def correction(summary: Mapping[str, Any]) -> str:
    """What the p-values of a comparison are corrected for; empty with one seed."""
    headline = measures.headline(summary["multilabel"])
    counts = {k: sum("paired" in row for row in rows.values()) for k, rows in summary["metrics"].items()}
    heads, others = counts.pop(headline.key, 0), sum(counts.values())
    if not heads:
        return ""
    primary = f"corrected for {plural(heads, 'head')}" if heads > 1 else "a single test"
    secondary = f"; the other measures are secondary, corrected for their {plural(others, 'test')}" if others else ""
    return f"p, Holm: {headline.label} is the primary measure, {primary}{secondary}."


def _power(test: Mapping[str, Any], n: int, heads: int) -> str:
    """How small a difference these seeds can show, in the primary test of one of several heads; not if it shows one."""
    if test["low"] is None:
        return ""
    if test["high"] - test["low"] < _EQUAL:  # which says nothing about other seeds
        return "All seeds differ by the same amount." if abs(test["difference"]) > _EQUAL else ""
    if test["p_holm"] < significance.ALPHA:
        return ""
    sd = (test["high"] - test["low"]) / 2 / significance.t_quantile(0.975, n - 1) * math.sqrt(n)
    needed = significance.required_n(sd, _WORTH, alpha=significance.ALPHA / heads)
    after = f", corrected for {plural(heads, 'head')}" if heads > 1 else ""
    after += f", by a rough estimate from {plural(n, 'seed')}" if n < _FEW else ""
    if needed <= n:
        return f"{n} seeds show a true difference of {_WORTH:g} points with 80 % power or more{after}."
    return f"{n} seeds are few: {needed:,} would show a true difference of {_WORTH:g} points with 80 % power{after}."


def no_verdict(summary: Mapping[str, Any]) -> str:
    """Why a comparison with one seed has no verdict, and how many would show a small difference; else nothing.

    summary: of a comparison, or the document of a report
    """
    heads = len(summary["heads"]) - 1
    if len(summary["seeds"]) > 1 or not heads or summary.get("kind") == "analyze":
        return ""
    alpha, label = significance.ALPHA / heads, measures.headline(summary["multilabel"]).label
    needed = [str(significance.required_n(sd, _WORTH, alpha=alpha)) for sd in _SPREADS]
    return (
        f"No verdict: with one seed, a difference between heads cannot be told from one between seeds. To show a "
        f"difference of {_WORTH:g} points of {label} with 80 % power takes {_either(needed)} seeds if the standard "
        f"deviation of the paired differences is {_either([f'{sd:g}' for sd in _SPREADS])} points. Start with "
        "--seeds 5; finished runs are kept."
    )


def _either(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"
