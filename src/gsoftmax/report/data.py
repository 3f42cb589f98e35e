"""The document: everything a report shows, as plain lists and numbers that can be written as JSON.

Tables, figures and the page read nothing else, so they work the same from a comparison, from run folders, from
files of outputs, and from a document that was saved.  nan and inf are None.

    title, kind ("compare" or "analyze"), verdicts, notes, multilabel, classes, heads, seeds, splits, measures
    not_recipe     head -> how its runs differ from their row of the paper, for the heads whose runs do
    incomplete     a sentence about runs of the comparison that are missing, or nothing
    metrics        metric -> head -> values (one per seed), mean, sd, low, high (interval of the mean), paired
    geometry       one entry per (head, seed, split): the measures of every class, count, own, other, overall, learned,
                   learned_measures, nearest; MEASURE_low and MEASURE_high where there are intervals; of a head that is
                   not better than chance count and accuracy only
    points         one per (head, seed): c class, own, j output, x, p
    calibration    one per (head, seed): count, confidence, right (accuracy)
    curves         one per (head, seed): epoch, loss, lr, ...
    over_classes   head -> measure -> paired difference from the first head
    over_images    head or model -> paired differences from the first on the same images, and mcnemar: the images that
                   only one of two models gets right (p of errors is then McNemar's), None for heads with seeds
    correlations   of geometry with the classes' scores
    features       one per head, of its first seed, and view: name (PCA or LDA), of (h or x), share, and for every point
                   c class, u, v, and for every class the mean mu, mv
    normality      one per head, of its first seed: for every class count, skewness, kurtosis, p, p_holm, and the ranges
                   own and other
    tuning, trials what was tuned, as in summary.json, or {}; and one entry per (head, key, setting): value, score,
                   seeds, swept (whether only this key was changed)
    examples       confusions, examples that flip between heads, and labels that may be wrong, as in `report.examples`
    config, environment, commands
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import geometry, measures, significance
from ..analyze import MOST_POINTS, Analysis, Comparison, analyze, class_gaussians
from ..files import read_json, sealed
from ..messages import first_line, plural
from ..outputs import has_outputs
from ..reproduce import labels
from ..runs import (
    check_same_data,
    command_line,
    environment,
    folder_name,
    read_config,
    read_environment,
    read_result,
    read_rows,
)
from ..summary import correct, correct_families, not_better, over_images, summary_of, verdicts, without_geometry
from ..tables import plain
from . import features, words
from .examples import read_examples

Document = dict[str, Any]

PAPER = geometry.MEASURES[:3]  # compactness, separability, ratio
_MOST_EPOCHS = 200  # of a learning curve


def from_comparison(
    summary: Mapping[str, Any], out: str | os.PathLike[str], title: str, data_root: str | None = None
) -> Document:
    """The document of a comparison.

    summary, out: as `compare` returns it, and its folder with the runs HEAD/seed-N
    title: of the report
    data_root: where the datasets are, for the images of examples
    """
    heads, seeds = summary["heads"], summary["seeds"]
    runs = {(head, seed): Path(out) / folder_name(head) / f"seed-{seed}" for head in heads for seed in seeds}
    return _from_runs(summary, runs, title, data_root)


def from_runs(
    paths: Sequence[str | os.PathLike[str]], title: str | None = None, data_root: str | None = None
) -> Document:
    """The document of finished runs.  Softmax, or else the first head, is the reference.

    paths, title: run folders, or the folder of one comparison; and the title of the report
    data_root: as in `from_comparison`
    """
    folders = [Path(p) for p in paths]
    if not folders:
        raise ValueError("report needs at least one run folder")
    if len(folders) == 1 and (folders[0] / "summary.json").exists():
        summary = _read_summary(folders[0] / "summary.json")
        return from_comparison(summary, folders[0], title or folders[0].resolve().name, data_root)
    found: dict[str, dict[int, tuple[Path, dict[str, Any]]]] = {}
    data: dict[str, None] = {}
    for folder in folders:
        config, result = read_config(folder), read_result(folder)
        if config is None or result is None:
            raise ValueError(f"{folder} contains neither a finished run nor a comparison")
        for m in (*_checked(result, "mAP" in result), "seconds"):
            if not _is_number(result.get(m)):
                raise ValueError(f"the last line of {folder / 'metrics.jsonl'} must have a number for {m!r}")
        data[config.data] = None
        of_head = found.setdefault(config.head_text(), {})
        if config.seed in of_head:
            raise ValueError(f"{folder} and {of_head[config.seed][0]} are of the same head and seed")
        of_head[config.seed] = folder, result
    if len(data) > 1:
        raise ValueError(f"runs of one report must be on the same data, got {' and '.join(data)}")
    check_same_data(folder for of in found.values() for folder, _ in of.values())
    heads = sorted(found, key=lambda h: (h != "softmax", list(found).index(h)))  # softmax is the reference
    seeds = sorted(set.intersection(*(set(runs) for runs in found.values())))
    if not seeds:
        raise ValueError("the heads of a report must have a seed in common, got none")
    summary = summary_of({h: [found[h][s][1] for s in seeds] for h in heads}, seeds)
    chosen = {(h, s): found[h][s][0] for h in heads for s in seeds}
    summary["over_images"] = over_images(chosen)
    doc = _from_runs(summary, chosen, title or ", ".join(heads), data_root)
    if left := sum(map(len, found.values())) - len(seeds) * len(heads):
        doc["notes"].append(f"{left} runs left out: their seed is not there for every head")
    return doc


def _read_summary(path: Path) -> dict[str, Any]:
    """The validated summary of a comparison."""
    try:
        summary = read_json(path)
        heads, seeds, metrics = summary["heads"], summary["seeds"], summary["metrics"]
        if not heads or not all(isinstance(h, str) for h in heads) or not all(type(s) is int for s in seeds):
            raise ValueError("heads must be names and seeds whole numbers")
        if any(folder_name(h) in ("", ".", "..") for h in heads):
            raise ValueError("a head's name leads out of the folder")
        for metric in _checked(metrics, bool(summary["multilabel"])):
            for head in heads:
                if metric in measures.GEOMETRY and {head, heads[0]} & set(summary.get("at_chance", ())):
                    continue
                row = metrics[metric][head]
                if len(row["values"]) != len(seeds) or not all(map(_is_number, [row["mean"], *row["values"]])):
                    raise ValueError(f"{metric} of {head} must be {len(seeds)} numbers and their mean")
                if head != heads[0] and len(seeds) > 1 and (metric != "error_x" or "paired" in row):
                    paired = row["paired"]
                    if not all(_is_number(paired[k]) for k in ("difference", "low", "high", "t", "p", "n")):
                        raise ValueError(f"the paired test of {metric} must be numbers")
        for test in (of["paired"]["error"] for of in summary.get("over_images", {}).values()):
            if not all(_is_number(test[k]) for k in ("difference", "low", "high", "p", "n")):
                raise ValueError("the test over images must be numbers")
        if "sha256" in summary and summary != sealed(summary):
            raise ValueError("its checksum does not match its content")
        correct_families(summary)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else first_line(error)
        raise ValueError(f"{path} is not the summary of a comparison: {reason}") from None
    return summary


def _checked(keys: Iterable[str], multilabel: bool) -> list[str]:
    """The measures among the keys, and those that verdicts need."""
    return list(dict.fromkeys((measures.headline(multilabel).key, *PAPER, *measures.ordered(keys))))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _from_runs(
    summary: Mapping[str, Any], runs: Mapping[tuple[str, int], Path], title: str, data_root: str | None
) -> Document:
    heads, seeds = list(summary["heads"]), list(summary["seeds"])
    doc = blank(title, "compare", heads, seeds, bool(summary["multilabel"]))
    summary = {**summary, "not_recipe": labels(runs)}
    doc["not_recipe"] = summary["not_recipe"]
    doc["verdicts"], doc["incomplete"] = verdicts(dict(summary)), str(summary.get("incomplete") or "")
    doc["notes"] += [told for told in [without_geometry(summary)] if told and len(heads) > 1]  # else it is a verdict
    doc["metrics"], hidden = with_intervals(summary["metrics"]), set(summary.get("at_chance", ()))
    doc["over_images"] = _json(summary.get("over_images", {}))
    if summary.get("tuning"):
        doc["tuning"], doc["trials"] = summary["tuning"], _trials(summary["tuning"])
    ready = {key: run for key, run in runs.items() if has_outputs(run)}
    if len(ready) < len(runs):
        doc["notes"].append(
            f"{len(runs) - len(ready)} of {len(runs)} runs have no outputs: they are not in the figures"
        )
    found: dict[tuple[str, int], Analysis] = {}
    notes = Counter[str]()
    for (head, seed), run in ready.items():
        found[head, seed] = a = analyze(run, most_points=MOST_POINTS // len(runs), name=head)
        add_analysis(doc, a, head, seed, hidden=head in hidden)
        _add_curve(doc, run, head, seed)
        notes.update(a.notes)
        if a.chance is not None and head not in hidden:
            alone = not_better(a.metrics["error"], 1 - a.chance)
            doc["notes"].append(f"{head}, seed {seed}: {alone}; all seeds of this head together are")
    doc["notes"] += [note if n == len(ready) else f"{note} (in {n} of {len(ready)} runs)" for note, n in notes.items()]
    _drop_empty(doc)
    for head in heads[1:]:
        pair = [[a for (h, _), a in found.items() if h == name] for name in (heads[0], head)]
        if all(pair) and not hidden & {head, heads[0]}:
            first, second = map(_over_seeds, pair)
            doc["over_classes"][head] = _json({m: significance.paired(first[m], second[m]) for m in first})
    correct([test for tests in doc["over_classes"].values() for test in tests.values()])
    doc["over_classes"] = _json(doc["over_classes"])  # a test without a p has no corrected one
    doc["correlations"] = _correlations({key: a for key, a in found.items() if key[0] not in hidden})
    doc["examples"] = read_examples(ready, data_root)
    _add_origin(doc, list(ready.values()))
    return doc


def _trials(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The trials and sweeps of a tuning, by head and shared key; those that diverged are left out."""
    rows = []
    for name, head in told["heads"].items():
        for key in told["space"]:
            found = [(t["settings"].get(key, head["default"].get(key)), t["values"], False) for t in head["trials"]]
            found += [(point["value"], point["values"], True) for point in head["sweeps"].get(key, [])]
            for value, values, swept in found:
                if None not in values and _is_number(value):
                    score = float(np.mean(values))
                    rows.append(
                        {"head": name, "key": key, "value": value, "score": score, "seeds": len(values), "swept": swept}
                    )
    return rows


def _add_curve(doc: Document, run: Path, head: str, seed: int) -> None:
    rows = [row for row in read_rows(run) if "epoch" in row and not row.get("final")]
    if not rows:
        return
    step = -(-len(rows) // _MOST_EPOCHS)
    thin = [row for i, row in enumerate(rows) if i % step == 0 or i == len(rows) - 1]
    keys = [k for k in thin[-1] | thin[0] if k not in ("epoch", "seconds", "examples_per_second")]
    keys = [k for k in keys if all(isinstance(row.get(k, 0.0), (int, float)) for row in thin)]
    curve = {"epoch": [row["epoch"] for row in thin]} | {k: [row.get(k) for row in thin] for k in keys}
    doc["curves"].append(_json({"head": head, "seed": seed, **curve}))


def _add_origin(doc: Document, runs: Sequence[Path]) -> None:
    """Configuration, environment and commands."""
    commands: dict[str, None] = {}
    for run in runs:
        if not doc["config"] and (config := read_config(run)) is not None:
            different = ("head", "head_options", "seed")
            doc["config"] = _json({k: v for k, v in asdict(config).items() if k not in different})
        described = read_environment(run)
        if command := str(described.pop("command", "")):
            commands[command] = None
        doc["environment"] = doc["environment"] or _json({k: v for k, v in described.items() if k != "data"})
    doc["commands"] = [*commands][:5] + ([f"... and {len(commands) - 5} more"] if len(commands) > 5 else [])
    if (here := command_line()) not in doc["commands"]:
        doc["commands"].append(here)
    doc["environment"] = doc["environment"] or _json(environment())


def from_analyses(
    analyses: Sequence[Analysis], comparisons: Sequence[Comparison] = (), title: str | None = None
) -> Document:
    """The document of one model's outputs, or of several models' on the same images.

    analyses, comparisons: as `compare_models` returns them
    title: of the report
    """
    heads, first = [a.name for a in analyses], analyses[0]
    doc = blank(title or " against ".join(reversed(heads)), "analyze", heads, [0], first.multilabel)
    averages = {a.name: dict(a.metrics) for a in analyses}
    for a in analyses:
        if a.chance is None:
            averages[a.name] |= {**a.geometry.average(), **({} if a.features is None else a.features.metrics)}
    keys = list(dict.fromkeys(key for of in averages.values() for key in of))
    order = measures.ordered(keys)
    for metric in (*order, *(key for key in keys if key not in order)):
        scale = measures.find(metric).scale
        values = {h: scale * averages[h][metric] for h in heads if metric in averages[h]}
        doc["metrics"][metric] = _json({h: {"values": [v], "mean": v, "sd": None} for h, v in values.items()})
    for a in analyses:
        add_analysis(doc, a, a.name, 0, hidden=a.chance is not None)
        notes = list(a.notes)
        if a.chance is not None:
            shown = "no geometry is shown; do the rows of x and y belong together?"
            notes.append(f"{not_better(a.metrics['error'], 1 - a.chance)}: {shown}")
        doc["notes"] += [f"{a.name}: {note}" if len(heads) > 1 else note for note in notes]
    _drop_empty(doc)
    for a, found in zip(analyses[1:], comparisons, strict=True):
        if first.chance is None and a.chance is None:
            doc["over_classes"][a.name] = _json(found.classes)
        tests = _json(found.images)
        for key, exact in found.exact.items():
            tests[key] |= {"t": None, "p": exact.p}
        doc["over_images"][a.name] = {"paired": tests, "mcnemar": _json(found.mcnemar)}
    correct([test for of in doc["over_classes"].values() for test in of.values()])
    correct([test for of in doc["over_images"].values() for test in of["paired"].values()])
    doc["over_classes"], doc["over_images"] = _json(doc["over_classes"]), _json(doc["over_images"])
    size = plural(first.n, "image")
    doc["verdicts"] = [found.against(first.name, size) for found in words.findings(doc)] or [_alone(first)]
    doc["environment"] = _json({k: v for k, v in environment().items() if k not in ("command", "gpu", "threads")})
    doc["commands"] = [command_line()]
    return doc


def _alone(a: Analysis) -> str:
    images = f"{a.n:,} images, {len(a.classes):,} {'labels' if a.multilabel else 'classes'}"
    score = f"mAP {100 * a.metrics['mAP']:.2f} %" if a.multilabel else f"error {100 * a.metrics['error']:.2f} %"
    sentence = f"{a.name}, {images}: {score}"
    for measure in PAPER if a.chance is None else ():
        values = getattr(a.geometry, measure).numpy()
        if not np.isfinite(values).any():
            sentence += f"; no {measure}, no class allows it"
            continue
        sentence += f"; {measure} {np.nanmean(values):.4g}"
        ends = [f"{values[c]:.4g} ({plain(a.classes[c])})" for c in (np.nanargmin(values), np.nanargmax(values))]
        if ends[0] != ends[1]:
            sentence += f" on average, from {ends[0]} to {ends[1]}"
    return sentence + "."


def blank(title: str, kind: str, heads: Sequence[str], seeds: Sequence[int], multilabel: bool) -> Document:
    """A document without numbers.

    title, kind, heads, seeds, multilabel: as the document has them
    """
    lists = (
        "verdicts",
        "notes",
        "classes",
        "geometry",
        "points",
        "calibration",
        "curves",
        "commands",
        "features",
        "normality",
        "trials",
    )
    return {
        **{key: [] for key in lists},
        **{key: {} for key in ("metrics", "over_classes", "over_images", "config", "environment", "tuning")},
        **{"title": title, "kind": kind, "multilabel": multilabel, "heads": list(heads), "seeds": list(seeds)},
        "incomplete": "",
        "splits": ["test"],
        "measures": [*geometry.MEASURES, "AP" if multilabel else "accuracy"],
        "correlations": None,
        "examples": None,
    }


def add_analysis(doc: Document, a: Analysis, head: str, seed: int, hidden: bool = False) -> None:
    """Adds one model to a document.

    doc, a: the document and the model
    head, seed: what the model is called there
    hidden: whether its head is at chance level: the accuracy of its classes is shown, and no geometry
    """
    doc["classes"] = doc["classes"] or [plain(name) for name in a.classes]
    count, confidence, right = a.calibration.T
    bins = {"count": count.astype(int), "confidence": confidence, "right": right}
    doc["calibration"].append(_json({"head": head, "seed": seed, **bins}))
    if all(row["head"] != head for row in doc["features"]):
        doc["features"] += features.rows(a.views, head)
    row = _geometry(a.geometry, a.gaussians, head, seed, "test")
    row["AP" if a.multilabel else "accuracy"] = _json(a.score)
    if hidden:
        nothing = [None] * len(row["count"])
        row |= {key: nothing for key in row if key not in ("head", "seed", "split", "count", "accuracy")}
        doc["geometry"].append(row | {"nearest": [[] for _ in nothing]})
        return
    if a.learned is not None:
        row["learned"], row["learned_measures"] = _json(a.learned), _json(a.learned_measures)
    for measure, ends in (a.intervals or {}).items():
        row |= {f"{measure}_{end}": _json(v) for end, v in zip(("low", "high"), ends.T, strict=True)}
    doc["geometry"].append(row)
    if a.train is not None:
        doc["geometry"].append(_geometry(a.train.geometry(), class_gaussians(a.train), head, seed, "train"))
        if "train" not in doc["splits"]:
            doc["splits"].append("train")
    points = {k: a.points[k].tolist() for k in ("c", "own", "j")}
    points |= {k: [float(f"{v:.5g}") for v in a.points[k].tolist()] for k in ("x", "p")}
    doc["points"].append({"head": head, "seed": seed, **points})
    if all(row["head"] != head for row in doc["normality"]):
        found = a.distributions
        tests = {"count": row["count"], "p_holm": significance.holm(found.p), **vars(found)}
        doc["normality"].append({"head": head, "seed": seed, **{k: _json(v, 6) for k, v in tests.items()}})


def _drop_empty(doc: Document) -> None:
    """Removes the geometry where no head shows any: figures of classes would be empty."""
    if not doc["points"]:
        doc["geometry"] = []


def _geometry(g: geometry.ClassGeometry, n: Any, head: str, seed: int, split: str) -> dict[str, Any]:
    row = {"head": head, "seed": seed, "split": split, "count": g.count.numpy()}
    row |= {m: getattr(g, m).numpy() for m in geometry.MEASURES}
    return _json({**row, "own": n.own, "other": n.other, "overall": n.overall, "nearest": n.nearest})


def some_classes(row: Mapping[str, Any], keep: Sequence[int | None]) -> dict[str, Any]:
    """A row of `geometry` or `normality` with other classes.

    row, keep: the row, and which of its classes, None for one without numbers
    """

    def part(key: str, value: Any) -> Any:
        if key == "learned_measures":
            return {k: part(k, v) for k, v in value.items()}
        if key == "nearest":
            return [[] for _ in keep]
        return [None if c is None else value[c] for c in keep] if isinstance(value, list) else value

    return {key: part(key, value) for key, value in row.items()}


def some_points(run: Mapping[str, Any], place: Mapping[int, int]) -> dict[str, Any]:
    """A row of `points` with other classes.

    run, place: the row, and the new number of each class that is kept
    """
    chosen = [i for i, c in enumerate(run["c"]) if c in place]
    new = {k: [run[k][i] for i in chosen] for k in ("own", "x", "p")}
    new |= {"c": [place[run["c"][i]] for i in chosen], "j": [place.get(run["j"][i], -1) for i in chosen]}
    return {**run, **new}


def with_intervals(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics with the 95 % intervals of their means over seeds.

    metrics: metric -> head -> values, mean and sd
    """

    def with_interval(row: Mapping[str, Any]) -> Any:
        n, sd = len(row["values"]), row.get("sd")
        if sd is None:
            return _json(row)
        half = significance.t_quantile(0.975, n - 1) * sd / math.sqrt(n)
        return _json({**row, "low": row["mean"] - half, "high": row["mean"] + half})

    return {metric: {head: with_interval(row) for head, row in rows.items()} for metric, rows in metrics.items()}


def _over_seeds(runs: Sequence[Analysis]) -> dict[str, np.ndarray]:
    """Every measure and the score of each class, averaged over seeds."""
    return {m: np.mean([a.measures[m] for a in runs], axis=0) for m in runs[0].measures}


def _correlations(found: Mapping[tuple[str, int], Analysis]) -> dict[str, Any] | None:
    """Over the runs that have Gaussians, as the paper defines it and over all classes."""
    chosen = {key: a for key, a in found.items() if a.learned is not None}
    if len(chosen) < 3:
        return None
    score = np.stack([a.score for a in chosen.values()])
    rows: dict[str, Any] = {}
    for measure in PAPER:
        values = np.stack([a.measures[measure] for a in chosen.values()])
        try:
            best = significance.paper_correlations(values, score)
        except ValueError:  # no class has the measure in every run
            continue
        every = significance.all_class_correlation(values, score)
        rows[measure] = {
            "best_class": {"class": best.best_class, "r": best.r, "p": best.p, "n": best.n},
            "all_classes": {"r": every.r, "p": every.p, "n": every.n},
        }
    heads = list(dict.fromkeys(head for head, _ in chosen))
    return _json({"settings": len(chosen), "heads": heads, "rows": rows}) if rows else None


def _json(value: Any, digits: int = 12) -> Any:
    """The same as plain lists and numbers, rounded, None for what is not finite."""
    if is_dataclass(value) and not isinstance(value, type):
        return _json(asdict(value), digits)
    if isinstance(value, Mapping):
        return {str(k): _json(v, digits) for k, v in value.items()}
    if isinstance(value, np.ndarray):
        return _json(value.tolist(), digits)
    if isinstance(value, (list, tuple)):
        return [_json(v, digits) for v in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value
