"""Tuning: the same trials for every head, judged on a validation split, and the test set last."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from processes import one_thread  # noqa: F401
from test_lab import run

from gsoftmax import build, report, runs, summary, tune, workers
from gsoftmax.config import Config

BASE = Config(epochs=1, train_fraction=0.3, threads=1, device="cpu")
HEADS = ["softmax", "gsoftmax(lam=0.5|4)"]
SPACE = tune.parse_space("lr=log(0.01,1) feature_scale=0.5|1|2")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    out = tmp_path_factory.mktemp("tuned")
    return out, tune.tune(BASE, HEADS, 3, out, trials=4, space=SPACE, jobs=1)


def test_every_head_gets_the_same_trials(tuned):
    out, found = tuned
    trials = {name: [t["settings"] for t in head["trials"]] for name, head in found["tuning"]["heads"].items()}
    shared = [[{k: v for k, v in t.items() if k in SPACE} for t in each] for each in trials.values()]
    assert shared[0] == shared[1] and len(shared[0]) == 4 and shared[0][0] == {}
    assert len({json.dumps(t) for t in shared[0]}) == 4
    own = [t["head_options.lam"] for t in trials[HEADS[1]][1:]]
    assert set(own) <= {0.5, 4} and "head_options.lam" not in trials[HEADS[1]][0]
    seeds = [sorted(len(t["values"]) for t in head["trials"]) for head in found["tuning"]["heads"].values()]
    assert seeds == [[1, 1, 2, 4]] * 2  # successive halving: 4 trials, 2 of them, 1 of those


def test_the_best_by_validation_meets_the_test_set_on_fresh_seeds(tuned):
    out, found = tuned
    for name, head in found["tuning"]["heads"].items():
        last = [t for t in head["trials"] if len(t["values"]) == 4]
        assert head["chosen"] == min(last, key=lambda t: np.mean(t["values"]))["settings"]
        for seed in range(3):
            config = runs.read_config(out / runs.folder_name(name) / f"seed-{seed}")
            assert config.evaluate_on == "test" and config.val_fraction == 0 and config.seed == seed
            wanted = BASE.override({"head": name.split("(")[0], "head_options": {}} | head["chosen"] | {"seed": seed})
            assert not config.differences(wanted)
        for path in (out / "tuning" / runs.folder_name(name)).rglob("config.json"):
            config = runs.read_config(path.parent)
            assert config.evaluate_on == "val" and config.val_fraction == 0.2 and config.seed >= tune.FIRST_SEED
            assert not (path.parent / "model.safetensors").exists()
    trial = out / "tuning" / "softmax" / "trial-0" / f"seed-{tune.FIRST_SEED}"
    again = build.load_data(runs.read_config(trial))
    assert len(again.split("val")) > 0
    assert found["tuning"]["heads"]["softmax"]["trials"][0]["values"][0] == 100 * runs.read_result(trial)["error"]


def test_what_tuning_was_worth_is_the_difference_on_the_test_set(tuned):
    out, found = tuned
    chosen, worth, sensitivity = summary.tuning_tables(found)
    for row, (name, head) in zip(worth.rows, found["tuning"]["heads"].items(), strict=True):
        folder = out / ("untuned" if head["chosen"] else "") / runs.folder_name(name)
        default = [100 * runs.read_result(folder / f"seed-{s}")["error"] for s in range(3)]
        values = found["metrics"]["error"][name]["values"]
        assert row[0] == name and row[3].value == pytest.approx(np.mean(values) - np.mean(default))
    assert [row[0] for row in chosen.rows] == HEADS and "20% of the training split" in chosen.note
    assert [row[:2] for row in sensitivity.rows] == [(key, name) for key in SPACE for name in HEADS]


def test_the_range_that_costs_one_point_is_interpolated_and_ends_where_runs_diverge():
    def curve(*losses, scale="log"):
        values = [0.01, 0.1, 1.0, 10.0][: len(losses)]
        points = [
            {"value": v, "values": [None if x is None else 3 + x] * 2} for v, x in zip(values, losses, strict=True)
        ]
        head = {"chosen": {}, "default": {}, "own": {}, "untuned": [], "sweeps": {"lr": points}}
        head["trials"] = [{"settings": {}, "values": [3.0]}]
        told = {"measure": "error", "space": {"lr": "?"}, "scales": {"lr": scale}, "heads": {"h": head}, "trials": 1}
        told |= {"asked": 1, "validation": "val"}
        *_, table = summary.tuning_tables({"tuning": told, "metrics": {"error": {"h": {"values": [0.0]}}}})
        return table.rows[0][2:] if table.title == "Sensitivity" else None

    best, low, high, factor, worst = curve(4.0, 0.0, 0.5, 2.5)  # a quarter and a quarter of the way, in decades
    assert (best.value, worst, factor.text) == (0.1, 4.0, f"{10**1.5:.3g}")
    assert (low.value, high.value) == (pytest.approx(0.1 * 10**-0.25), pytest.approx(10**0.25))
    best, low, high, factor, worst = curve(0.2, 0.0, None, 0.0)  # from 0.1 on it is not known
    assert (low.value, high.value, factor.text, worst) == (0.01, 0.1, "≥ 10", "diverged")
    best, low, high, factor, _ = curve(3.0, 0.0, 2.0, scale="choice")
    assert (low.value, high.value, factor) == (0.1, 0.1, None)
    assert curve(None, None) is None


def test_absent_and_diverged_defaults_are_told_apart():
    def rows(**untuned):
        heads = {h: {"chosen": {"lr": 1.0} if h != "a" else {}, "untuned": v} for h, v in untuned.items()}
        values = {h: {"values": [5.0, 7.0]} for h in heads}
        table = summary._worth({"metrics": {"error": values}}, {"measure": "error", "heads": heads})
        return None if table is None else {row[0]: row[1] for row in table.rows}

    told = rows(a=[5.0, 7.0], b=[], c=[8.0, None], d=[9.0, 9.5])
    assert (told["b"], told["c"]) == ("not trained", "1 of 2 diverged") and "9.25" in told["d"]
    assert rows(a=[5.0, 7.0], b=[]) is None and rows(a=[5.0, 7.0])["a"] != "not trained"


def test_sweeps_change_one_key(tuned):
    out, found = tuned
    for head in found["tuning"]["heads"].values():
        assert [p["value"] for p in head["sweeps"]["lr"]] == [0.01, 0.03162, 0.1, 0.3162, 1.0]
        assert [p["value"] for p in head["sweeps"]["feature_scale"]] == [0.5, 1, 2]
        assert all(len(p["values"]) == tune.SWEEP_SEEDS for curve in head["sweeps"].values() for p in curve)
    swept = runs.read_config(out / "tuning" / "softmax" / "sweep-lr-0" / f"seed-{tune.FIRST_SEED}")
    chosen = BASE.override(found["tuning"]["heads"]["softmax"]["chosen"])
    assert swept.lr == 0.01 and swept.feature_scale == chosen.feature_scale


def test_the_page_shows_the_tuning(tuned):
    out, found = tuned
    page = report.write_page(found, out, "tuned").read_text("utf-8")
    for words in ("Chosen settings", "What tuning was worth", "Sensitivity", 'data-figure="tuning-lr"'):
        assert words in page
    again = report.from_runs([out])
    assert len(again["trials"]) == len(report.from_comparison(found, out, "tuned")["trials"]) > 20
    [path] = report.figures.write(again, out / "figures", ["svg"], names=["sensitivity"])
    assert path.read_text("utf-8").count("validation error %") >= 2


def test_a_finished_tuning_trains_nothing(tuned, monkeypatch):
    out, found = tuned
    monkeypatch.setattr(workers, "train", lambda *_, **__: pytest.fail("it trained"))
    assert tune.tune(BASE, HEADS, 3, out, trials=4, space=SPACE, jobs=1) == found


def test_the_time_left_is_that_of_all_stages(tuned, monkeypatch):
    out, _ = tuned
    plan = tune.Tuning(BASE, HEADS, 3, out, trials=4, space=SPACE)
    train, stages, seen = workers.Workers.run, [], set()

    def watched(self, tasks, stage="", later=0):
        seen.update(task.out for task in tasks)
        stages.append((stage, len(seen) + later))
        train(self, tasks, stage, later)

    monkeypatch.setattr(workers.Workers, "run", watched)
    plan.run(jobs=1)
    assert [count for _, count in stages[:-1]] == [plan.planned(4)] * 4 and len(seen) <= plan.planned(4)
    task = workers.Task(BASE, out, None)
    left = {}
    for later in (0, 3):
        events = []
        tally = workers._Tally([task], [task], events.append, later)
        monkeypatch.setattr(workers.time, "monotonic", iter([0.0, 0.001, 10.0]).__next__)
        for done in (0.25, 0.5):
            tally.step(task, {"event": "step", "done": done})
        left[later] = events[-1]["all_left"]
    assert left[3] == pytest.approx(left[0] * 3.5 / 0.5)


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_jobs(tuned, tmp_path):
    _, found = tuned
    again = tune.tune(BASE, HEADS, 3, tmp_path, trials=4, space=SPACE, jobs=2)
    assert again["tuning"] == found["tuning"]
    assert all(again["metrics"]["error"][h]["values"] == found["metrics"]["error"][h]["values"] for h in HEADS)


def test_a_diverging_trial_counts_as_the_worst(tmp_path):
    space = tune.parse_space("lr=1e30|0.1")
    found = tune.tune(BASE, ["softmax"], 2, tmp_path, trials=4, space=space, jobs=1)
    head = found["tuning"]["heads"]["softmax"]
    failed = [t for t in head["trials"] if t["settings"].get("lr") == 1e30]
    assert failed and all(None in t["values"] for t in failed)
    assert head["chosen"].get("lr", 0.1) == 0.1 and summary.tuning_tables(found)[0].rows[0][-1] == len(failed)
    again = tune.tune(BASE, ["softmax"], 2, tmp_path, trials=4, space=space, jobs=1)  # and is not trained again
    assert again == found


def test_a_budget_allows_the_same_fewer_trials_for_every_head(tmp_path):
    found = tune.tune(BASE, HEADS, 2, tmp_path, trials=64, space=SPACE, minutes=0.001, sweep=False, jobs=1)
    assert found["tuning"]["asked"] == 64 and found["tuning"]["trials"] == 1
    assert "budget of time allowed 1" in summary.tuning_tables(found)[0].note
    assert "so that nothing was tuned" in summary.tuning_tables(found)[0].note
    again = tune.tune(BASE, HEADS, 2, tmp_path, trials=64, space=SPACE, minutes=0.001, sweep=False, jobs=1)
    assert again == found


def test_a_small_budget_leaves_out_the_sweeps_before_the_trials(tmp_path, monkeypatch):
    plan = tune.Tuning(BASE, HEADS, 2, tmp_path, trials=4, space=SPACE, minutes=1.0)
    assert plan.swept
    least = len(HEADS) * (tune.halving(4) + 2 * 2)  # runs of four trials, of the chosen settings and of the defaults
    plan.minutes = (least + 0.5) / 60
    clock = iter([0.0, float(len(HEADS))])  # a second a run
    monkeypatch.setattr(tune.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(plan, "_evaluate", lambda *_: None)
    plan._fit_budget(tune.Workers(1))
    assert plan.swept == {} and {len(found) for found in plan.trials.values()} == {4}
    again = tune.Tuning(BASE, HEADS, 2, tmp_path, trials=4, space=SPACE, minutes=plan.minutes)
    again._fit_budget(tune.Workers(1))
    assert again.swept == {} and {len(found) for found in again.trials.values()} == {4}


def test_a_budget_counts_the_runs_from_before_an_interruption(tmp_path, monkeypatch):
    plan = tune.Tuning(BASE, HEADS, 2, tmp_path, trials=64, space=SPACE, minutes=1.0)
    monkeypatch.setattr(plan, "_evaluate", lambda *_: None)  # all of them are finished
    monkeypatch.setattr(tune, "read_result", lambda folder: {"seconds": 6.0})
    plan._fit_budget(tune.Workers(2))
    budget = json.loads((tmp_path / "tuning-budget.json").read_text("utf-8"))
    assert budget["seconds per run"] == 3.0 and budget["trials"] < 64  # two at a time


def test_several_labels_are_tuned_by_map(tmp_path):
    base = BASE.override({"data": "digits-mosaic", "pool": "max"})
    found = tune.tune(base, ["softmax", "gsoftmax(lam=1|4)"], 2, tmp_path, trials=2, space=SPACE, sweep=False, jobs=1)
    assert found["tuning"]["measure"] == "mAP"
    for head in found["tuning"]["heads"].values():
        best = max((t for t in head["trials"] if len(t["values"]) == 4), key=lambda t: np.mean(t["values"]))
        assert head["chosen"] == best["settings"]


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ("lr", "space is written as key=domain"),
        ("", "at least one key=domain"),
        ("lr=log(0,1)", "two increasing numbers above 0"),
        ("lr=log(1,0.1)", "two increasing numbers"),
        ("lr=uniform(1)", "two increasing numbers"),
        ("lr=log(a,b)", "two increasing numbers"),
        ("lr=1|", "choices are written a|b|c"),
        ("lr=1|2 lr=3", "'lr' twice"),
        ("learning_rate=1|2", "unknown key 'learning_rate'"),
        ("seed=1|2", "space cannot contain 'seed'"),
        ("lr=-1|2", "lr must be a number, 0 or more"),
        ("head_options.lam=1|2", "softmax"),
    ],
)
def test_mistakes_in_the_space_are_said_before_anything_is_written(space, words, tmp_path, capsys):
    out = tmp_path / "o"
    status, _, err = run(capsys, "compare", "digits", "--tune", "4", "--space", space, "--out", str(out))
    assert status == 2 and words in err and err.count("\n") == 1 and not out.exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tune", "0"], "--tune must be 1 or more"),
        (["--space", "lr=1|2"], "--space belongs to --tune"),
        (["--minutes", "5"], "--minutes belongs to --tune"),
        (["--tune", "2", "--minutes", "-1"], "minutes must be above 0"),
        (["--tune", "2", "--first-seed", "1000000"], "seeds must be below 1,000,000"),
    ],
)
def test_options_of_tuning(words, told, capsys, tmp_path):
    status, _, err = run(capsys, "compare", "digits", *words, "--out", str(tmp_path / "o"))
    assert status == 2 and told in err


@pytest.mark.slow
def test_a_stopped_tuning_continues(tmp_path):
    words = [sys.executable, "-m", "gsoftmax", "compare", "digits", "--tune", "3", "--heads", "softmax", "--seeds", "2"]
    words += ["epochs=1", "train_fraction=0.3", "device=cpu", "--space", "lr=log(0.01,1)", "--jobs", "1", "--out", "o"]
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("o/tuning/softmax/trial-0/*/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and "run the same command again to continue" in err
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "Chosen settings" in done.stdout, done.stderr
    base = Config(epochs=1, train_fraction=0.3, threads=1, device="cpu")
    whole = tune.tune(base, ["softmax"], 2, tmp_path / "whole", trials=3, space=tune.parse_space("lr=log(0.01,1)"))
    assert json.loads((tmp_path / "o" / "tuning.json").read_text("utf-8")) == whole["tuning"]
