"""Studies in which every head is tuned alike: `python -m evidence.tuned emotions --data emotions=arff:PATH`.

Every head gets the same number of trials on a validation split; the chosen settings meet the test set on other seeds.
tuned.yaml declares each study and its primary question, and was written before the rows.

results/evidence/tuned/STUDY.jsonl   one row per head and seed on the test set
results/evidence/tuned/STUDY.json    what was tried and chosen

The folder of the runs can be copied to another machine, without models and outputs: the same command there reads what
is finished and trains the rest.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gsoftmax import progress, recipes, runs, tune
from gsoftmax.config import Config
from gsoftmax.workers import DIVERGED, Task, run_tasks

from .run import HERE, ROWS, resolve_spec, rounded, where

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


def train(study: TunedStudy, data: Mapping[str, str], out: Path, jobs: int | None) -> None:
    """Trains what is missing, and writes rows and tuning of the study."""
    plan = study.tuning(data, out)
    told = plan.run(jobs, _quiet)["tuning"]
    tasks = []
    for seed in range(max(study.more.values(), default=0)):
        for name, text in study.heads.items():
            if seed < study.more.get(name, 0):
                config = plan.defaults[text].override({**told["heads"][text]["chosen"], "seed": seed})
                tasks.append(Task(config, out / runs.folder_name(text) / f"seed-{seed}", None))
    run_tasks(tasks, jobs, _quiet)
    for config in out.rglob("config.json"):
        runs.keep_metrics(config.parent)
    write(study, told, out)


def write(study: TunedStudy, told: Mapping[str, Any], out: Path) -> None:
    """The committed files of a study from the folder of its runs."""
    TUNED.mkdir(parents=True, exist_ok=True)
    names = {text: name for name, text in study.heads.items()}
    lines = []
    for text, name in names.items():
        for seed in range(max(study.seeds, study.more.get(name, 0))):
            run = out / runs.folder_name(text) / f"seed-{seed}"
            result = runs.read_result(run)
            if result is None:
                continue
            kept = {k: rounded(v) for k, v in result.items() if isinstance(v, (int, float)) and k != "final"}
            lines.append(json.dumps({"setting": name, "seed": seed, "metrics": kept} | where(run), ensure_ascii=False))
    (TUNED / f"{study.name}.jsonl").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    told = {**told, "heads": {names[text]: head for text, head in told["heads"].items()}}
    (TUNED / f"{study.name}.json").write_text(json.dumps(_short(told), ensure_ascii=False) + "\n", "utf-8")


def write_trials(study: TunedStudy, out: Path) -> None:
    """The trials of a study that has not met the test set yet."""
    lines = []
    for name, text in study.heads.items():
        for run in sorted((out / "tuning" / runs.folder_name(text)).glob("trial-*/seed-*")):
            config, result = runs.read_config(run), runs.read_result(run)
            if config is None or (result is None and not (run / DIVERGED).exists()):
                continue
            keys = tune.parse_space(study.space)
            settings = {key: getattr(config, key) for key in keys} | config.head_options
            row = {"setting": name, "trial": int(run.parent.name[6:]), "seed": config.seed, "settings": settings}
            row["error"] = None if result is None else rounded(result["error"])
            lines.append(json.dumps(row | where(run), ensure_ascii=False))
    (TUNED / f"{study.name}-trials.jsonl").write_text("".join(f"{line}\n" for line in lines), "utf-8")


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return rounded(value)
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items()}
    return [_short(v) for v in value] if isinstance(value, list) else value


def read(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The tuning and the rows of a study."""
    rows = (TUNED / f"{name}.jsonl").read_text("utf-8").splitlines()
    return json.loads((TUNED / f"{name}.json").read_text("utf-8")), [json.loads(row) for row in rows]


def _quiet(event: progress.Event) -> None:
    if event["event"] in ("end", "failed"):
        print(progress.text(event), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", choices=sorted(studies()))
    parser.add_argument("--data", action="append", default=[], metavar="NAME=SPEC", help="location of a study's data")
    parser.add_argument("--jobs", type=int, help="number of parallel runs")
    parser.add_argument("--out", type=Path, default=Path("runs/tuned"), help="folder of the runs")
    args = parser.parse_args()
    data = dict(pair.split("=", 1) for pair in args.data)
    for study in (studies()[name] for name in args.studies):
        train(study, data, args.out / study.name, args.jobs)
        print(f"{study.name}: {len(read(study.name)[1])} rows", flush=True)


if __name__ == "__main__":
    main()
