"""Runs of the studies, one row each: `python -m evidence.run scene --data scene=arff:PATH`.

A finished run appends a row to results/evidence/STUDY.jsonl and is not run again: a study can be interrupted and
continued.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from gsoftmax import evaluation, geometry, metrics, recipes, runs, train
from gsoftmax.config import Config

HERE = Path(__file__).parent
ROWS = HERE.parent / "results" / "evidence"
PROVENANCE = ("gsoftmax", "torch", "python", "processor", "gpu")  # of a row


@dataclass(frozen=True)
class Study:
    """Settings to compare over the same seeds."""

    name: str
    recipe: str
    changes: Mapping[str, Any]
    seeds: range
    settings: Mapping[str, Mapping[str, Any]]  # the changes of each; "seeds" in one limits the number of its seeds
    about: str = ""

    def config(self, setting: str, seed: int) -> Config:
        own = {k: v for k, v in self.settings[setting].items() if k != "seeds"}
        held = {"split_seed": 0, "deterministic": False, "threads": 1, "checkpoint_every": 0}
        changes = {**held, **self.changes, **own, "seed": seed}
        return recipes.find(self.recipe).config(changes)

    def runs(self) -> Iterator[tuple[str, int]]:
        """(setting, seed), grouped by seed, so that runs to be compared happen at about the same time."""
        for position, seed in enumerate(self.seeds):
            for setting, changes in self.settings.items():
                if position < changes.get("seeds", len(self.seeds)):
                    yield setting, seed


def studies() -> dict[str, Study]:
    written = yaml.safe_load((HERE / "studies.yaml").read_text("utf-8"))
    return {
        name: Study(name, s["recipe"], s["changes"], range(*s["seeds"]), s["settings"], s.get("about", ""))
        for name, s in written.items()
    }


def read_rows(study: str, folder: Path = ROWS) -> list[dict[str, Any]]:
    path = folder / f"{study}.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def missing(study: Study, folder: Path = ROWS) -> list[tuple[str, int]]:
    """(setting, seed) without a row yet."""
    there = {(row["setting"], row["seed"]) for row in read_rows(study.name, folder)}
    return [run for run in study.runs() if run not in there]


def resolve_spec(spec: str, data: Mapping[str, str]) -> str:
    """One or several dataset specs, with the names in `data` replaced by their locations.

    >>> resolve_spec("mosaic(cifar10)?grid=2x2", {"cifar10": "folder:images"})
    'mosaic(folder:images)?grid=2x2'
    """
    words = (re.fullmatch(r"(mosaic\()?([^()?]+)(.*)", word) for word in spec.split())
    return " ".join((m[1] or "") + data.get(m[2], m[2]) + m[3] for m in words if m)


def one(study: Study, setting: str, seed: int, data: Mapping[str, str]) -> dict[str, Any]:
    """Train one run; its row has every metric, for multi-label data also those of each label."""
    config = study.config(setting, seed)
    places = {k: resolve_spec(getattr(config, k), data) for k in ("data", "ood") if getattr(config, k)}
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = train.train(config.override(places), Path(folder) / "run")
        except train.Diverged as error:
            return {"setting": setting, "seed": seed, "diverged": str(error)}
        outputs = load_file(Path(folder) / "run" / "outputs.safetensors")
    names = dict(zip(places.get("ood", "").split(), (config.ood or "").split(), strict=True))
    row = {"setting": setting, "seed": seed}
    row["metrics"] = {" ".join(names.get(w, w) for w in k.split()): rounded(v) for k, v in result.items()}
    if outputs["y"].ndim == 2:
        x, p, y = outputs["x"], outputs["p"], outputs["y"]
        stats = geometry.ClassStatistics(y.shape[1], multilabel=True).update(evaluation.positive_outputs(x), y)
        found = stats.geometry()
        of_label = {"ap": metrics.average_precision(p, y)}
        of_label |= {k: getattr(found, k) for k in ("compactness", "separability", "ratio")}
        row["labels"] = {k: [rounded(float(v)) for v in values] for k, values in of_label.items()}
    return row


def rounded(value: float) -> float:
    """Seven digits: more than a float32 holds, a third of the bytes."""
    return float(f"{value:.7g}")


def where(run: Path | None = None) -> dict[str, Any]:
    """What a row was measured on: this machine, or that of a finished run."""
    found = runs.environment() if run is None else runs.read_environment(run)
    commit = found.get("commit") or os.environ.get("COMMIT")
    if commit is None:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
        commit = done.stdout.strip() or "unknown"
    return {k: found[k] for k in PROVENANCE} | {"commit": commit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", choices=sorted(studies()))
    parser.add_argument("--data", action="append", default=[], metavar="NAME=SPEC", help="location of a study's data")
    parser.add_argument("--settings", nargs="+", help="these settings only")
    parser.add_argument("--seeds", type=int, help="no more than this many seeds of each study")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no run after this")
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel runs")
    parser.add_argument("--rows", type=Path, default=ROWS, help="folder of the rows")
    args = parser.parse_args()
    data = dict(pair.split("=", 1) for pair in args.data)
    end = time.monotonic() + 60 * args.minutes
    args.rows.mkdir(parents=True, exist_ok=True)
    environment = where()
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting: dict[Future[dict[str, Any] | None], str] = {}
        for study in (studies()[name] for name in args.studies):
            first = study.seeds[: args.seeds]
            wanted = set(args.settings or study.settings)
            todo = [task for task in missing(study, args.rows) if task[0] in wanted and task[1] in first]
            print(f"{study.name}: {len(todo)} runs", flush=True)
            waiting |= {pool.submit(_before, end, study, *task, data): study.name for task in todo}
        for count, future in enumerate(as_completed(waiting), start=1):
            row = future.result()
            if row is None:
                continue
            with open(args.rows / f"{waiting[future]}.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(row | environment, ensure_ascii=False) + "\n")
            if sys.stderr.isatty() or count % 50 == 0:
                line = f"{count}/{len(waiting)}  {waiting[future]}: {row['setting']} seed {row['seed']}"
                print(line, file=sys.stderr, flush=True)


def _before(end: float, study: Study, setting: str, seed: int, data: Mapping[str, str]) -> dict[str, Any] | None:
    torch.set_num_threads(1)
    return None if time.monotonic() > end else one(study, setting, seed, data)


if __name__ == "__main__":
    main()
