"""Studies in which every head is tuned alike: `python -m evidence.tuned emotions --data emotions=arff:PATH`.

Every head gets the same number of trials on a validation split; the chosen settings meet the test set on other seeds.
tuned.yaml declares each study and its primary question, and was written before the rows.

results/evidence/tuned/STUDY.jsonl   one row per head and seed on the test set
results/evidence/tuned/STUDY.json    what was tried and chosen

results/evidence/tuned/STUDY-trials.jsonl   the trials of a study without rows on the test set

The same command continues on any machine: what the committed files have is not trained again.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gsoftmax import progress, recipes, runs, tune
from gsoftmax.config import Config
from gsoftmax.files import atomic_write, locked
from gsoftmax.workers import DIVERGED, Task, Workers

from .run import HERE, PROVENANCE, ROWS, read_rows, resolve_spec, rounded, where

TUNED = ROWS / "tuned"


@dataclass(frozen=True)
class Question:
    """What a study is for, declared before its rows."""

    head: str
    against: str
    metric: str
    reading: str  # z, x or p
    text: str


@dataclass(frozen=True)
class TunedStudy:
    """Heads to tune alike and to compare over the same seeds; the first is the reference of the tables."""

    name: str
    about: str
    questions: Sequence[Question]
    recipe: str
    changes: Mapping[str, Any]
    heads: Mapping[str, str]  # name in tables: head, as on the command line
    space: str
    trials: int
    seeds: int  # of the chosen settings
    more: Mapping[str, int] = field(default_factory=dict)  # more seeds of some heads
    sweep: bool | Sequence[str] = True
    untuned: bool = True
    tested: Mapping[str, Any] = field(default_factory=dict)  # changes of the runs that answer the questions

    def planned(self, head: str) -> int:
        """Seeds of a head that answer the questions."""
        return max(self.seeds, self.more.get(head, 0))

    def settings(self, config: Config) -> dict[str, Any]:
        """What is tuned, as a configuration has it."""
        return {key: getattr(config, key) for key in tune.parse_space(self.space)} | config.head_options

    def finalists(self, plan: tune.Tuning, chosen: tune.Chosen) -> list[Task]:
        """The runs of the chosen settings, and of the defaults where they are asked for."""
        tasks = plan.finalists(chosen)
        for name, text in self.heads.items():
            for seed in range(self.seeds, self.planned(name)):
                config = plan.defaults[text].override({**chosen.best[text].settings, "seed": seed})
                tasks.append(Task(config, plan.out / runs.folder_name(text) / f"seed-{seed}", None))
        return [task._replace(config=task.config.override(self.tested)) for task in tasks]

    def config(self, data: Mapping[str, str]) -> Config:
        """What all heads start from."""
        config = recipes.find(self.recipe).config({**self.changes, "threads": 1, "checkpoint_every": 0})
        return config.override({"data": resolve_spec(config.data, data), "train_geometry": False})

    def tuning(self, data: Mapping[str, str], out: Path) -> tune.Tuning:
        base = self.config(data)
        options: Any = {"trials": self.trials, "sweep": self.sweep, "untuned": self.untuned}
        space = tune.parse_space(self.space)
        return tune.Tuning(base, list(self.heads.values()), self.seeds, out, space=space, **options)


def studies() -> dict[str, TunedStudy]:
    written = yaml.safe_load((HERE / "tuned.yaml").read_text("utf-8"))
    found = {}
    for name, s in written.items():
        if not name.startswith("_"):
            found[name] = TunedStudy(name, **{**s, "questions": [Question(**q) for q in s["questions"]]})
    return found


def train(names: Sequence[str], data: Mapping[str, str], out: Path, jobs: int | None) -> None:
    """Trains what is missing of some studies, and writes their rows and tuning, also if a signal stops it.

    The trials come first, then the runs on the test set: heads of primary questions before the others, and seeds in
    turn, so that what is there when the time is over says most.
    """
    asked = [studies()[name] for name in names]
    tasks: list[tuple[bool, int, Task]] = []  # secondary, seed, run
    with Workers(jobs, _quiet) as workers:
        plans = {study.name: study.tuning(data, out / study.name) for study in asked}
        chosen = {}
        for study in asked:
            plan = plans[study.name]
            restore_trials(study, plan)
            try:
                with locked(plan.out / "tuning"):
                    chosen[study.name] = plan.choose(workers)
            finally:
                write_trials(study, plan)
            restore_rows(study, plan, chosen[study.name])
            primary = {runs.folder_name(study.heads[head]) for q in study.questions for head in (q.head, q.against)}
            for task in study.finalists(plan, chosen[study.name]):
                name = task.out.relative_to(plan.out).parts[0]
                tasks.append((name not in primary, task.config.seed, task))
        tasks.sort(key=lambda found: found[:2])
        try:
            workers.run([task for *_, task in tasks], "test set")
        finally:
            for study in asked:
                write(study, plans[study.name], chosen[study.name])


def write(study: TunedStudy, plan: tune.Tuning, chosen: tune.Chosen) -> None:
    """The committed files of a study from the folder of its runs."""
    TUNED.mkdir(parents=True, exist_ok=True)
    names = {text: name for name, text in study.heads.items()}
    lines = []
    for name, text in study.heads.items():
        for seed in range(study.planned(name)):
            run = plan.out / runs.folder_name(text) / f"seed-{seed}"
            result = runs.read_result(run)
            if result is None:
                continue
            kept = {k: rounded(v) for k, v in result.items() if isinstance(v, (int, float)) and k != "final"}
            row = {"setting": name, "seed": seed, "metrics": kept} | where(run)
            lines.append(json.dumps(row, ensure_ascii=False))
    for config in plan.out.rglob("config.json"):
        runs.keep_metrics(config.parent)
    if not lines:
        return
    _write_lines(f"{study.name}.jsonl", lines)
    told = plan.told(chosen)
    told = {**told, "heads": {names[text]: head for text, head in told["heads"].items()}}
    (TUNED / f"{study.name}.json").write_text(json.dumps(_short(told), ensure_ascii=False) + "\n", "utf-8")
    (TUNED / f"{study.name}-trials.jsonl").unlink(missing_ok=True)  # STUDY.json has them


def write_trials(study: TunedStudy, plan: tune.Tuning) -> None:
    """The trials of a study that has not met the test set yet."""
    key, lines = plan.measure.key, []
    for name, text in study.heads.items():
        for trial in plan.trials[text]:
            for run in sorted(trial.folder.glob("seed-*")):
                config, result = runs.read_config(run), runs.read_result(run)
                if config is None or (result is None and not (run / DIVERGED).exists()):
                    continue
                row = {"setting": name, "trial": trial.index, "seed": config.seed, "settings": study.settings(config)}
                row[key] = None if result is None else rounded(result[key])
                lines.append(json.dumps(row | where(run), ensure_ascii=False))
    if lines:
        _write_lines(f"{study.name}-trials.jsonl", lines)


def _write_lines(name: str, lines: Sequence[str]) -> None:
    (TUNED / name).write_text("".join(f"{line}\n" for line in lines), "utf-8")


def restore_trials(study: TunedStudy, plan: tune.Tuning) -> None:
    """Makes the folders of finished trials from the committed files, where they are not there."""
    key = plan.measure.key
    for row in read_rows(f"{study.name}-trials", TUNED):
        trial = plan.trials[study.heads[row["setting"]]][row["trial"]]
        if study.settings(trial.config) != row["settings"]:
            raise ValueError(f"{study.name}: trial {row['trial']} of {row['setting']} is not that of its rows")
        result = None if row[key] is None else {key: row[key]}
        _restore(trial.folder / f"seed-{row['seed']}", trial.config.override({"seed": row["seed"]}), result, row)
    rows = read_rows(study.name, TUNED)
    for name, head in read(study.name)[0]["heads"].items() if rows else ():
        row = next(row for row in rows if row["setting"] == name)  # trials ran where it did
        for folder, config, values in _told(study, plan, name, head):
            for k, value in enumerate(values):
                made = config.override({"seed": config.seed + k})
                result = None if value is None else {key: value / plan.measure.scale}
                _restore(folder / f"seed-{made.seed}", made, result, row)


def _told(
    study: TunedStudy, plan: tune.Tuning, name: str, head: Mapping[str, Any]
) -> Iterator[tuple[Path, Config, Sequence[float | None]]]:
    """Trials, sweeps and defaults of a head in STUDY.json: folder, configuration with the first seed, results."""
    text = study.heads[name]
    tried = plan.defaults[text].override({"seed": tune.FIRST_SEED, **plan.validation})
    folder = plan.out / "tuning" / runs.folder_name(text)
    for index, trial in enumerate(head["trials"]):
        yield folder / f"trial-{index}", tried.override(trial["settings"]), trial["values"]
    for key, points in head["sweeps"].items():
        for index, point in enumerate(points):
            config = tried.override({**head["chosen"], key: point["value"]})
            yield folder / f"sweep-{runs.folder_name(key)}-{index}", config, point["values"]
    if head["chosen"]:
        folder = plan.out / "untuned" / runs.folder_name(text)
        yield folder, plan.defaults[text].override({"seed": 0, **study.tested}), head["untuned"]


def restore_rows(study: TunedStudy, plan: tune.Tuning, chosen: tune.Chosen) -> None:
    """The same of the runs on the test set, whose settings must be those that were chosen."""
    rows = read_rows(study.name, TUNED)
    told = read(study.name)[0]["heads"] if rows else {}
    tasks = {task.out: task for task in study.finalists(plan, chosen)} if rows else {}
    for row in rows:
        text = study.heads[row["setting"]]
        if told[row["setting"]]["chosen"] != chosen.best[text].settings:
            raise ValueError(f"{study.name}: {row['setting']} has chosen another setting than in its rows")
        run = plan.out / runs.folder_name(text) / f"seed-{row['seed']}"
        _restore(run, tasks[run].config, row["metrics"], row)


def _restore(run: Path, config: Config, result: Mapping[str, Any] | None, row: Mapping[str, Any]) -> None:
    if (run / "config.json").exists():
        return
    run.mkdir(parents=True, exist_ok=True)
    atomic_write(run / "config.json", json.dumps(asdict(config)))
    atomic_write(run / "environment.json", json.dumps({key: row[key] for key in (*PROVENANCE, "commit")}))
    if result is None:
        atomic_write(run / DIVERGED, "as its row says\n")
    else:
        atomic_write(run / "metrics.jsonl", json.dumps({"final": True, **result}) + "\n")
        atomic_write(run / runs.METRICS_ONLY, "This run was made from a committed row.\n")


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return rounded(value)
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items()}
    return [_short(v) for v in value] if isinstance(value, list) else value


def read(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The tuning and the rows of a study."""
    return json.loads((TUNED / f"{name}.json").read_text("utf-8")), read_rows(name, TUNED)


def _quiet(event: progress.Event) -> None:
    if event["event"] in ("end", "failed"):
        print(progress.text(event), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", choices=sorted(studies()))
    parser.add_argument("--data", action="append", default=[], metavar="NAME=SPEC", help="location of a study's data")
    parser.add_argument("--jobs", type=int, help="number of parallel runs")
    parser.add_argument("--out", type=Path, default=Path("runs/tuned"), help="folder of the runs")
    parser.add_argument("--minutes", type=float, help="stop after this, as Ctrl-C does")
    args = parser.parse_args()
    stopped = ""
    try:
        if args.minutes is not None:
            timer = threading.Timer(60 * args.minutes, signal.raise_signal, [signal.SIGINT])
            timer.daemon = True
            timer.start()
        train(args.studies, dict(pair.split("=", 1) for pair in args.data), args.out, args.jobs)
    except KeyboardInterrupt:
        stopped = "stopped; run the same command again to continue"
    for name in args.studies:
        print(f"{name}: {len(read_rows(name, TUNED))} rows", flush=True)
    sys.exit(stopped or 0)


if __name__ == "__main__":
    main()
