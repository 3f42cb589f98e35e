"""Heads x seeds under identical conditions, and what changed, with intervals and tests.

out/HEAD/seed-0/ ...   the runs (see gsoftmax.train)
out/summary.json       every number of the tables
out/report.html        the page
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import significance
from .config import Config, parse_head
from .distributed import Stopped
from .runs import locked, read_config, read_result, write_atomically
from .train import load_data, pick_device, train

SINGLE = ("error", "compactness", "separability", "ratio", "relative_sigma", "dprime", "nll", "ece")
MULTI = ("mAP", "C_F1_mean", "O_F1", "compactness", "separability", "ratio", "relative_sigma", "dprime", "nll", "ece")
NAMES = {
    "error": "error %",
    "mAP": "mAP %",
    "C_F1_mean": "C-F1 %",
    "O_F1": "O-F1 %",
    "relative_sigma": "relative σ",
    "dprime": "d′",
    "nll": "NLL",
    "ece": "ECE %",
}
PERCENT = ("error", "mAP", "C_F1_mean", "O_F1", "ece")
SMALLER_IS_BETTER = ("error", "relative_sigma", "nll", "ece")


@dataclass(frozen=True)
class Task:
    """One run of a comparison."""

    config: Config
    out: Path
    data_root: str | None


def folder_name(head: str) -> str:
    """A head's folder from how it was written.

    >>> folder_name("gsoftmax(lam=4, gaussians=tracked)")
    'gsoftmax-lam=4-gaussians=tracked'
    """
    return re.sub(r"-+", "-", re.sub(r"[^\w.=+-]+", "-", head)).strip("-")


def split_heads(text: str) -> list[str]:
    """Heads separated by commas that are not inside parentheses.

    >>> split_heads("softmax, gsoftmax(lam=2, sigma=2)")
    ['softmax', 'gsoftmax(lam=2, sigma=2)']
    """
    heads = [part.strip() for part in re.split(r",(?![^(]*\))", text)]
    if not all(heads) or len(set(map(folder_name, heads))) < len(heads):
        raise ValueError(f"heads must be different and not empty, got {text!r}")
    return heads


def compare(
    base: Config,
    heads: Sequence[str],
    seeds: int | Sequence[int],
    out: str | os.PathLike[str],
    *,
    data_root: str | None = None,
    jobs: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Trains every head with every seed, skipping what is done, and returns the summary."""
    seeds = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not heads or not seeds:
        raise ValueError(f"heads and seeds must not be empty, got {len(heads)} and {len(seeds)}")
    out = Path(out)
    dataset = load_data(base, data_root)
    tasks = []
    for seed in seeds:  # seeds outermost: whole pairs early
        for head in heads:
            name, options = parse_head(head)
            config = base.override({"head": name, "head_options": {**base.head_options, **options}, "seed": seed})
            tasks.append(Task(config, out / folder_name(head) / f"seed-{seed}", data_root))
    _refuse_early(tasks[: len(heads)], dataset)
    with locked(out):
        _run_missing(tasks, jobs, dataset.multilabel, progress)
        return summarise(out, heads, seeds)


def _run_missing(
    tasks: Sequence[Task], jobs: int | None, multilabel: bool, progress: Callable[[str], None] | None
) -> None:
    todo = [t for t in tasks if not _done(t)]
    started = time.perf_counter()
    for count, task in enumerate(_run_all(todo, jobs), start=1):
        if progress is not None:
            result = read_result(task.out) or {}
            spent = time.perf_counter() - started
            left = spent / count * (len(todo) - count)
            headline = "mAP" if multilabel else "error"
            progress(
                f"{count}/{len(todo)}  {task.config.head} seed {task.config.seed}  "
                f"{NAMES[headline]} {100 * result.get(headline, float('nan')):.2f}  {left:.0f} s left"
            )


def _refuse_early(tasks: Sequence[Task], dataset: Any) -> None:
    """Heads that cannot be built on this data fail before anything is trained or written."""
    from .train import build, build_optimizer, build_schedule, refuse

    for task in tasks:
        refuse(task.config, dataset)
        build_schedule(task.config, max(task.config.epochs, 1))
        if not task.config.pretrained and task.config.weights is None:
            with torch.device("meta"):
                build_optimizer(task.config, build(task.config, dataset))


def _done(task: Task) -> bool:
    if read_result(task.out) is None:
        return False
    found = read_config(task.out)
    if found is None:
        raise ValueError(f"{task.out} holds a result without a config.json; choose another --out")
    differing = sorted(k for k, v in task.config.identity().items() if found.identity()[k] != v)
    if differing:
        raise ValueError(f"{task.out} holds a run with another {', '.join(differing)}; choose another --out")
    return True


def _run_all(tasks: Sequence[Task], jobs: int | None) -> Any:
    """Runs tasks, `jobs` at a time, and gives each as it ends."""
    if not tasks:
        return
    gpus = torch.cuda.device_count() if pick_device(tasks[0].config.device).type == "cuda" else 0
    jobs = min(jobs or gpus or os.cpu_count() or 1, len(tasks))
    if jobs == 1:
        for task in tasks:
            _run(task, None)
            yield task
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_follow, initargs=(os.getpid(),)) as pool:
        waiting = {}
        try:
            for i, task in enumerate(tasks):
                waiting[pool.submit(_run_in_pool, task, i % gpus if gpus else None)] = task
            while waiting:
                done, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    task = waiting.pop(future)
                    future.result()
                    yield task
        except BaseException:
            for future in waiting:
                future.cancel()
            for process in list(pool._processes.values()):
                process.terminate()  # which makes a run save its state
            raise


def _follow(parent: int) -> None:
    """A run in a pool leaves Ctrl-C to the one who started it, and does not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _note)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


_stopped: list[int] = []  # signals that this worker has seen
_busy: list[bool] = []


def _note(number: int, frame: object) -> None:
    """Outside of a run's own watch: a signal is remembered, and ends what is being done."""
    _stopped.append(number)
    if _busy:
        raise Stopped("", number)


def _run_in_pool(task: Task, gpu: int | None) -> None:
    if _stopped:  # a pool hands out a few tasks ahead, which nobody can take back
        raise Stopped("", _stopped[0])
    _busy.append(True)
    try:
        _run(task, gpu)
    except KeyboardInterrupt as stopped:
        _stopped.append(getattr(stopped, "signal_number", signal.SIGINT))
        raise
    finally:
        _busy.clear()


def _run(task: Task, gpu: int | None) -> None:
    config = task.config if gpu is None else task.config.override({"device": f"cuda:{gpu}"})
    train(config, task.out, data_root=task.data_root, resume=(task.out / "config.json").exists())


# ------------------------------------------------------------------------------------------------------------- numbers


def summarise(out: str | os.PathLike[str], heads: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """The summary of a comparison's folder, which is also written there."""
    results: dict[str, list[Any]] = {
        h: [read_result(Path(out) / folder_name(h) / f"seed-{s}") for s in seeds] for h in heads
    }
    summary = summary_of(results, seeds)
    write_atomically(Path(out) / "summary.json", json.dumps(summary, indent=2))
    return summary


def summary_of(results: Mapping[str, Sequence[Mapping[str, Any]]], seeds: Sequence[int]) -> dict[str, Any]:
    """Mean and deviation of every metric for every head, and the paired difference from the first head."""
    heads = list(results)
    multilabel = "mAP" in results[heads[0]][0]
    summary: dict[str, Any] = {"heads": heads, "seeds": list(seeds), "metrics": {}, "multilabel": multilabel}
    outside = [
        k for k in results[heads[0]][0] if k.startswith("ood_") and all(k in r for h in heads for r in results[h])
    ]
    for metric in (*(MULTI if multilabel else SINGLE), *outside):
        scale = 100.0 if metric in PERCENT or metric in outside else 1.0
        values = {h: np.array([scale * r[metric] for r in results[h]]) for h in heads}
        rows = {}
        for h, v in values.items():
            sd = float(v.std(ddof=1)) if len(v) > 1 else None
            rows[h] = {"values": v.tolist(), "mean": float(v.mean()), "sd": sd}
            if h != heads[0] and len(v) > 1:
                rows[h]["paired"] = asdict(significance.paired(values[heads[0]], v))
        summary["metrics"][metric] = rows
    summary["seconds"] = {h: [r["seconds"] for r in results[h]] for h in heads}
    return summary


def tables(summary: dict[str, Any]) -> str:
    """The summary for a terminal: means, then differences from the first head."""
    heads, seeds = summary["heads"], summary["seeds"]
    width = max(16, *(len(h) + 2 for h in heads))
    name = {metric: _name(metric) for metric in summary["metrics"]}
    first = max(14, *(len(text) + 2 for text in name.values()))
    lines = [f"mean ± standard deviation over {len(seeds)} seed{'s' if len(seeds) > 1 else ''}", ""]
    lines.append(f"{'':{first}}" + "".join(f"{h:>{width}}" for h in heads))
    for metric, rows in summary["metrics"].items():
        cells = [_plus_minus(rows[h]["mean"], rows[h]["sd"]) for h in heads]
        lines.append(f"{name[metric]:{first}}" + "".join(f"{c:>{width}}" for c in cells))
    if len(seeds) > 1 and len(heads) > 1:
        lines += ["", f"difference from {heads[0]}, paired by seed: mean [95 % interval] p"]
        for h in heads[1:]:
            lines += ["", h]
            for metric, rows in summary["metrics"].items():
                d = rows[h]["paired"]
                span = f"[{number(d['low'], True)}, {number(d['high'], True)}]"
                change = f"{number(d['difference'], True):>10}  {span:24} {p_value(d['p'])}"
                lines.append(f"  {name[metric]:{first}}{change}")
    return "\n".join(lines)


def verdicts(summary: dict[str, Any]) -> list[str]:
    """What changed, and how sure we are, in sentences."""
    heads, n = summary["heads"], len(summary["seeds"])
    headline = "mAP" if summary["multilabel"] else "error"
    sentences = []
    for h in heads[1:] if n > 1 else []:
        d = summary["metrics"][headline][h]["paired"]
        better = (d["difference"] < 0) == (headline in SMALLER_IS_BETTER)
        if not d["p"] <= 0.05:
            shown = "no difference shown"
        else:
            shown = f"{'better' if better else 'worse'}, p {p_value(d['p'])}"
        sentence = (
            f"{h} against {heads[0]}, {n} seeds: {headline} {number(d['difference'], True)} points, "
            f"interval {number(d['low'], True)} to {number(d['high'], True)}: {shown}"
        )
        for metric in ("compactness", "separability", "ratio"):
            rows = summary["metrics"][metric]
            base, g = rows[heads[0]]["mean"], rows[h]["paired"]
            sentence += f"; {metric} {100 * g['difference'] / base:+.0f} %, p {p_value(g['p'])}"
        sentences.append(sentence + ".")
    return sentences


def _name(metric: str) -> str:
    """
    >>> _name("dprime"), _name("ood_probability digits")
    ('d′', 'AUROC %, probability, digits')
    """
    if metric.startswith("ood_"):
        score, _, outside = metric.removeprefix("ood_").partition(" ")
        return f"AUROC %, {score.replace('_', ' ')}, {outside}"
    return NAMES.get(metric, metric)


def p_value(p: float) -> str:
    """
    >>> p_value(0.0321), p_value(3e-9)
    ('0.032', '< 1e-6')
    """
    if math.isnan(p):
        return "n/a"
    return "< 1e-6" if p < 1e-6 else f"{p:.2g}"


def number(v: float, sign: bool = False) -> str:
    digits = 2 if abs(v) >= 10 else 3 if abs(v) >= 1 else 4
    v = round(v, digits) + 0.0  # no -0.0000
    return f"{v:+.{digits}f}" if sign else f"{v:.{digits}f}"


def _plus_minus(mean: float, sd: float | None) -> str:
    digits = 2 if abs(mean) >= 10 else 3 if abs(mean) >= 1 else 4
    return f"{mean:.{digits}f}" + ("" if sd is None else f" ± {sd:.{digits}f}")
