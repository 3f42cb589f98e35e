"""Tuning: every head gets the same number of trials in the same space, judged on a validation split.

The first trial of a head is its default setting.  The others are points of one Sobol sequence over the shared keys, the
same for every head, and of another over the head's own options.  Successive halving decides which of them are trained
again: all trials with one seed, the better half with two, the better half of those with four.  From the chosen setting
each shared key is then swept over its range, alone, which shows how sensitive the head is to it.  The chosen settings
meet the test set on fresh seeds, and so do the defaults, which shows what tuning was worth.

out/tuning.json                          the space, and every trial with its validation results
out/tuning/HEAD/trial-3/seed-1000000/    the trials, and sweep-lr-3 of the sweeps (configuration and metrics only)
out/untuned/HEAD/seed-0/                 the defaults on the seeds of the comparison

Not Optuna: its pruners decide by the order in which runs finish, so that heads would not get the same trials, nor a
repeated tuning the same result.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from . import build, measures, photos
from .compare import Comparison, of_heads
from .config import Config, parse_head, parse_value
from .files import atomic_write, locked, read_json
from .progress import Event
from .runs import folder_name, keep_metrics, read_result
from .summary import summarise
from .workers import DIVERGED, Task, Workers, default_jobs

__all__ = ["Chosen", "Domain", "Trial", "Tuning", "default_space", "halving", "parse_space", "tune"]

FIRST_SEED = 1_000_000  # of the trials: a comparison's own seeds are below it
ROUNDS = 3  # of successive halving: 1, 2 and 4 seeds
SWEEP, SWEEP_SEEDS = 5, 2  # values of a range that the sweep of a key tries, and seeds of each
ENOUGH = 4  # trials, below which a budget is not spent on sweeps
PLAN = "tuning-plan.json"  # what a folder is for
VAL_FRACTION = 0.2  # of the training split, where the data has no validation split


@dataclass(frozen=True)
class Domain:
    """The values that tuning tries for one key.

    >>> Domain.parse("lr", "log(0.01, 1)").at(0.5), Domain.parse("lam", "0.5|1|4").at(0.99)
    (0.1, 4)
    """

    text: str  # as on the command line
    scale: str  # log, uniform or choice
    values: tuple[Any, ...]  # both ends of a range, or the choices

    @classmethod
    def parse(cls, key: str, text: str) -> Domain:
        """A domain from its text.

        key: named in errors
        text: `log(low, high)`, `uniform(low, high)` or `a|b|c`
        """
        if match := re.fullmatch(r"(log|uniform)\((.*)\)", text.strip()):
            ends = tuple(parse_value(part.strip()) for part in match[2].split(","))
            good = len(ends) == 2 and all(type(end) in (int, float) and math.isfinite(end) for end in ends)
            if not good or not ends[0] < ends[1] or (match[1] == "log" and ends[0] <= 0):
                above = " above 0" if match[1] == "log" else ""
                raise ValueError(f"{key}: {match[1]}(low, high) needs two increasing numbers{above}, got {text!r}")
            return cls(text, match[1], ends)
        choices = tuple(parse_value(part.strip()) for part in text.split("|"))
        if "" in choices:
            raise ValueError(f"{key}: choices are written a|b|c, ranges log(low, high), got {text!r}")
        return cls(text, "choice", choices)

    def at(self, u: float) -> Any:
        """A value, to four significant digits.

        u: its place in the domain, from 0 to 1
        """
        if self.scale == "choice":
            return self.values[min(int(u * len(self.values)), len(self.values) - 1)]
        low, high = self.values
        value = low * (high / low) ** u if self.scale == "log" else low + u * (high - low)
        return float(f"{value:.4g}")

    def swept(self) -> list[Any]:
        """The values of a sweep: numbers in increasing order, none if the choices are not numbers."""
        if self.scale == "choice":
            return sorted(self.values) if all(type(v) in (int, float) for v in self.values) else []
        return [self.at(k / (SWEEP - 1)) for k in range(SWEEP)]


def parse_space(text: str) -> dict[str, Domain]:
    """Domains by key.

    text: `key=domain` separated by spaces

    >>> {key: domain.values for key, domain in parse_space("lr=log(0.01, 0.5) feature_scale=0.25|1").items()}
    {'lr': (0.01, 0.5), 'feature_scale': (0.25, 1)}
    """
    found: dict[str, Domain] = {}
    for item in re.findall(r"(?:\([^)]*\)|[^\s(])+", text):
        key, equals, domain = item.partition("=")
        if not equals or not domain:
            raise ValueError(f"space is written as key=domain ..., got {item!r}")
        if key in found:
            raise ValueError(f"space has {key!r} twice")
        found[key] = Domain.parse(key, domain)
    if not found:
        raise ValueError("space must have at least one key=domain")
    return found


def default_space(base: Config) -> dict[str, Domain]:
    """Learning rate and scale of the features, around those of a configuration.

    base: the configuration
    """
    rate, scale = base.lr or 0.1, base.feature_scale or 1.0
    text = f"lr=log({rate / 8:.4g},{rate * 8:.4g}) feature_scale=log({scale / 4:.4g},{scale * 4:.4g})"
    return parse_space(text)


@dataclass
class Trial:
    """One setting of one head."""

    index: int  # among the trials of the head
    settings: dict[str, Any]  # keys and values that differ from the default
    config: Config  # of its first seed
    folder: Path  # of its runs
    values: list[float]  # the headline measure on the validation split, of each seed; worst possible if it diverged

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))


class Chosen(NamedTuple):
    """What tuning found for every head."""

    best: dict[str, Trial]  # by head
    sweeps: dict[str, dict[str, list[Trial]]]  # by swept key


def halving(trials: int) -> int:
    """Number of runs of successive halving.

    trials: of one head

    >>> halving(8)  # 8, 4 of them again, and 2 of those twice more
    16
    """
    kept, total = trials, trials
    for done in range(1, ROUNDS):
        kept = -(-kept // 2)
        total += kept * 2 ** (done - 1)
    return total


class Tuning:
    """A tuned comparison, validated; nothing is written before `run`.

    base: all other settings
    heads: as on the command line; an option with choices, as in `gsoftmax(lam=0.5|1|4)`, is tuned for that head
    seeds: of the comparison on the test set
    out: the folder of all runs
    trials: of every head, its default setting among them
    space: what is tuned for every head; None for `default_space`
    minutes: fewer trials, the same number for every head, if all would take longer than this; where fewer than four
        would be left, no sweeps
    sweep: the shared keys to sweep around the chosen settings; True is all of them
    untuned: whether the default settings meet the test set too, which shows what tuning was worth
    data_root: where the datasets are
    """

    def __init__(
        self,
        base: Config,
        heads: Sequence[str] | None,
        seeds: int | Sequence[int],
        out: str | os.PathLike[str],
        *,
        trials: int,
        space: Mapping[str, Domain] | None = None,
        minutes: float | None = None,
        sweep: bool | Sequence[str] = True,
        untuned: bool = True,
        data_root: str | None = None,
    ) -> None:
        if trials < 1:
            raise ValueError(f"trials must be 1 or more, got {trials}")
        if minutes is not None and not 0 < minutes < math.inf:
            raise ValueError(f"minutes must be above 0, got {minutes}")
        self.out, self.data_root, self.minutes = Path(out), data_root, minutes
        self.untuned = untuned
        base = base.override(photos.choose(base, data_root))
        self.space = dict(space or default_space(base))
        self.swept = {k: d.swept() for k, d in self.space.items() if sweep is True or (sweep and k in sweep)}
        if bad := {"seed", "head", "data", "evaluate_on", "val_fraction"} & {
            key.partition(".")[0] for key in self.space
        }:
            raise ValueError(f"space cannot contain {min(bad)!r}")
        self.defaults, self.own = {}, {}
        for text in heads or of_heads(base, None, data_root):
            name, options = parse_head(text)
            self.own[text] = {
                f"head_options.{k}": Domain.parse(k, v) for k, v in options.items() if isinstance(v, str) and "|" in v
            }
            fixed = {k: v for k, v in options.items() if f"head_options.{k}" not in self.own[text]}
            self.defaults[text] = base.override({"head": name, "head_options": {**base.head_options, **fixed}})
        self.comparison = Comparison(self.defaults, seeds, out, data_root)
        if max(self.comparison.seeds) >= FIRST_SEED:
            raise ValueError(f"seeds must be below {FIRST_SEED:,}, where those of the trials begin")
        self.measure = measures.headline(self.comparison.dataset.multilabel)
        try:
            build.load_data(base, data_root).split("val")
            validation: dict[str, Any] = {}
        except ValueError:
            validation = {"val_fraction": VAL_FRACTION}
        self.validation = validation | {"evaluate_on": "val", "train_geometry": False, "ood": None}
        self.trials = {name: self._draw(name, trials) for name in self.defaults}
        self._check_folder(trials)
        self._passed: set[Path] = set()  # runs of the stages so far
        everything = {f"{name} trial {t.index}": t.config for name, found in self.trials.items() for t in found}
        Comparison(everything, [FIRST_SEED], out, data_root)  # raises for a setting that cannot be built

    def _draw(self, name: str, trials: int) -> list[Trial]:
        """The default setting, then points of the space."""
        points: list[dict[str, Any]] = [{}]
        for keys, seed in ((self.space, 0), (self.own[name], 1)):
            if keys and trials > 1:
                engine = torch.quasirandom.SobolEngine(len(keys), scramble=True, seed=seed)
                drawn = engine.draw(trials - 1, dtype=torch.float64).tolist()
                new = [{key: d.at(u) for (key, d), u in zip(keys.items(), row, strict=True)} for row in drawn]
                points = [{}, *({**a, **b} for a, b in zip(points[1:] or [{}] * len(new), new, strict=True))]
        base, folder = self.defaults[name], self.out / "tuning" / folder_name(name)
        return [
            Trial(i, point, base.override(point | self.validation), folder / f"trial-{i}", [])
            for i, point in enumerate(points)
        ]

    def _check_folder(self, trials: int) -> None:
        """Raises if the folder holds another tuning, or runs of no tuning: results of different plans do not mix."""
        self.plan = {"trials": trials, "space": {key: domain.text for key, domain in self.space.items()}}
        path = self.out / PLAN
        if path.exists():
            found = read_json(path)
            for key, value in self.plan.items():
                if found.get(key) != value:
                    raise ValueError(f"{self.out} contains a tuning with {key}={found.get(key)}; choose another --out")
        elif (self.out / "summary.json").exists():
            raise ValueError(f"{self.out} contains a comparison without tuning; choose another --out")

    # ------------------------------------------------------------------------------------------------------- running

    def planned(self, trials: int) -> int:
        """Number of runs of a tuned comparison, at most: trials, sweeps, chosen settings and defaults."""
        swept = SWEEP_SEEDS * sum(map(len, self.swept.values()))
        return len(self.defaults) * (halving(trials) + swept + (1 + self.untuned) * len(self.comparison.seeds))

    def run(self, jobs: int | None = None, progress: Callable[[Event], None] | None = None) -> dict[str, Any]:
        """Trains what is not done yet and returns the summary, with what was tuned under `tuning`.

        jobs, progress: as in `Comparison.run`
        """
        with locked(self.out / "tuning"), Workers(jobs, progress) as workers:
            chosen = self.choose(workers)
            self.comparison.write_plan()
            workers.run(self.finalists(chosen), "chosen settings")
            heads, seeds = list(self.defaults), self.comparison.seeds
            summary = summarise(self.out, heads, seeds, {"tuning": self.told(chosen)})
            atomic_write(self.out / "tuning.json", json.dumps(summary["tuning"], indent=2))
            return summary

    def choose(self, workers: Workers) -> Chosen:
        """Trains the trials and the sweeps that are not done yet.

        workers: that train them
        """
        atomic_write(self.out / PLAN, json.dumps(self.plan, indent=2))
        self._fit_budget(workers)
        kept = {name: list(found) for name, found in self.trials.items()}
        for number in range(ROUNDS):
            if number:
                kept = {name: self._better_half(found) for name, found in kept.items()}
            self._evaluate(kept, 2**number, workers, f"tuning, round {number + 1} of {ROUNDS}")
        best = {name: self._ranked(found)[0] for name, found in kept.items()}
        sweeps = {name: self._sweeps(name, trial) for name, trial in best.items()}
        if any(sweeps.values()):
            flat = {name: [t for of in found.values() for t in of] for name, found in sweeps.items()}
            self._evaluate(flat, SWEEP_SEEDS, workers, "sweep")
        return Chosen(best, sweeps)

    def _sweeps(self, name: str, best: Trial) -> dict[str, list[Trial]]:
        """The chosen setting with one shared key changed, for every swept key."""
        found: dict[str, list[Trial]] = {}
        for key, values in self.swept.items():
            for i, value in enumerate(values):
                settings = {**best.settings, key: value}
                config = self.defaults[name].override(settings | self.validation)
                folder = self.out / "tuning" / folder_name(name) / f"sweep-{folder_name(key)}-{i}"
                found.setdefault(key, []).append(Trial(i, settings, config, folder, []))
        return found

    def _fit_budget(self, workers: Workers) -> None:
        """Fewer trials if the rest would not fit into the budget, judged by the time of the default settings."""
        if self.minutes is None:
            return
        path = self.out / "tuning-budget.json"  # a resumed tuning keeps its number of trials
        if path.exists():
            found = read_json(path)
            allowed = found.get("trials")
            if type(allowed) is not int or allowed < 1:
                raise ValueError(f"{path} must have a number of trials, got {allowed!r}")
            self.swept = self.swept if found.get("sweeps", True) else {}
        else:
            start = time.perf_counter()
            first = {name: found[:1] for name, found in self.trials.items()}
            self._evaluate(first, 1, workers, "default settings")
            spent, count = time.perf_counter() - start, len(next(iter(self.trials.values())))
            results = [read_result(of[0].folder / f"seed-{FIRST_SEED}") for of in first.values()]
            alone = sum(result["seconds"] for result in results if result)  # some may be from before an interruption
            jobs = workers.jobs or default_jobs(next(iter(self.defaults.values())))
            each = max(spent, alone / jobs) / len(self.defaults)
            allowed = self._affordable(count, each)
            if allowed < min(ENOUGH, count):
                self.swept = {}
                allowed = self._affordable(count, each)
            budget = {"trials": allowed, "sweeps": bool(self.swept), "minutes": self.minutes, "seconds per run": each}
            atomic_write(path, json.dumps(budget))
        self.trials = {name: found[:allowed] for name, found in self.trials.items()}

    def _affordable(self, trials: int, seconds: float) -> int:
        """How many of these trials fit into the budget, at least one, if every run takes so many seconds."""
        limit = 60 * (self.minutes or math.inf)
        return max((n for n in range(1, trials + 1) if seconds * self.planned(n) <= limit), default=1)

    def _evaluate(self, kept: Mapping[str, Sequence[Trial]], seeds: int, workers: Workers, stage: str) -> None:
        """Trains trials with the first `seeds` seeds and reads their results."""
        most = max(map(len, kept.values()))
        tasks = [  # trials outermost, so that heads advance alike
            Task(t.config.override({"seed": FIRST_SEED + k}), t.folder / f"seed-{FIRST_SEED + k}", self.data_root, True)
            for i in range(most)
            for found in kept.values()
            for t in found[i : i + 1]
            for k in range(seeds)
        ]
        self._passed |= {task.out for task in tasks}
        workers.run(tasks, stage, self.planned(len(next(iter(self.trials.values())))) - len(self._passed))
        for found in kept.values():
            for t in found:
                runs = [t.folder / f"seed-{FIRST_SEED + k}" for k in range(seeds)]
                t.values = [score for run in runs if (score := self._score(run)) is not None]
                for run in runs:
                    keep_metrics(run)

    def _score(self, run: Path) -> float | None:
        """The headline measure of a run, the worst possible if it diverged; None for a run that is not finished."""
        result = read_result(run)
        if result is not None:
            return self.measure.scale * float(result[self.measure.key])
        worst = math.inf if self.measure.smaller_is_better else -math.inf
        return worst if (run / DIVERGED).exists() else None

    def _ranked(self, trials: Sequence[Trial]) -> list[Trial]:
        sign = 1 if self.measure.smaller_is_better else -1
        return sorted(trials, key=lambda t: (sign * t.mean, t.index))

    def _better_half(self, trials: Sequence[Trial]) -> list[Trial]:
        return self._ranked(trials)[: -(-len(trials) // 2)]

    def finalists(self, chosen: Chosen) -> list[Task]:
        """The chosen settings, and the defaults where they are others, on the seeds of the comparison.

        chosen: as `choose` returned it
        """
        tasks = []
        for seed in self.comparison.seeds:
            for name, trial in chosen.best.items():
                config = self.defaults[name].override({"seed": seed})
                folder = self.out / folder_name(name) / f"seed-{seed}"
                tasks.append(Task(config.override(trial.settings), folder, self.data_root))
                if trial.index and self.untuned:
                    untuned = self.out / "untuned" / folder_name(name) / f"seed-{seed}"
                    tasks.append(Task(config, untuned, self.data_root, may_diverge=True))
        return tasks

    def told(self, chosen: Chosen) -> dict[str, Any]:
        """The result of the tuning as plain numbers.

        chosen: as `choose` returned it
        """
        told: dict[str, Any] = {
            "measure": self.measure.key,
            "space": {key: domain.text for key, domain in self.space.items()},
            "scales": {key: domain.scale for key, domain in self.space.items()},
            "trials": len(next(iter(self.trials.values()))),
            "asked": self.plan["trials"],
            "validation": "val"
            if "val_fraction" not in self.validation
            else f"{VAL_FRACTION:.0%} of the training split",
            "heads": {},
        }
        for name, trial in chosen.best.items():
            folder = self.out / ("untuned" if trial.index else "") / folder_name(name)
            defaults = [self._score(folder / f"seed-{s}") for s in self.comparison.seeds]
            told["heads"][name] = {
                "default": {key: getattr(self.defaults[name], key, None) for key in self.space},
                "chosen": trial.settings,
                "own": {key: domain.text for key, domain in self.own[name].items()},
                "untuned": _numbers(v for v in defaults if v is not None),
                "trials": [{"settings": t.settings, "values": _numbers(t.values)} for t in self.trials[name]],
                "sweeps": {
                    key: [{"value": t.settings[key], "values": _numbers(t.values)} for t in found]
                    for key, found in chosen.sweeps[name].items()
                },
            }
        return told


def _numbers(values: Iterable[float]) -> list[float | None]:
    return [v if math.isfinite(v) else None for v in values]


def tune(
    base: Config,
    heads: Sequence[str] | None,
    seeds: int | Sequence[int],
    out: str | os.PathLike[str],
    *,
    trials: int,
    space: Mapping[str, Domain] | None = None,
    minutes: float | None = None,
    sweep: bool | Sequence[str] = True,
    untuned: bool = True,
    data_root: str | None = None,
    jobs: int | None = None,
    progress: Callable[[Event], None] | None = None,
) -> dict[str, Any]:
    """Tunes every head alike, compares them on the test set, and returns the summary.

    base, heads, seeds, out, trials, space, minutes, sweep, untuned, data_root: as in `Tuning`
    jobs, progress: as in `Tuning.run`
    """
    options: Any = {"trials": trials, "space": space, "minutes": minutes, "sweep": sweep, "untuned": untuned}
    return Tuning(base, heads, seeds, out, data_root=data_root, **options).run(jobs, progress)
