"""The paper's rows: families in a comparison, seeds against published numbers, labels of changed runs."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from processes import one_thread  # noqa: F401

from gsoftmax import recipes, report, reproduce, runs
from gsoftmax.cli import main
from gsoftmax.compare import of_heads, of_rows
from gsoftmax.config import Config
from gsoftmax.data import write_smoke
from gsoftmax.summary import differences, means, summarise, verdicts
from gsoftmax.workers import Task

TINY = ("backbone=wrn-10-1", "epochs=1", "batch_size=16", "train_geometry=false", "--jobs", "1")


def run(capsys, *argv):
    status = main(list(argv))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def finished_run(folder, config, result, epochs=(), data="cifar10"):
    """A run folder as `train` leaves it, without training."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    (folder / "environment.json").write_text(json.dumps({"data": {"name": data, "classes": []}}))
    rows = [
        *({"epoch": i, **row} for i, row in enumerate(epochs, 1)),
        {"final": True, "epochs": config.epochs, **result},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "outputs.safetensors").write_bytes(b"")


@pytest.mark.parametrize(
    "family, labels",
    [
        ("wrn-cifar10", ["softmax", "lsoftmax", "gsoftmax"]),
        ("tiny-64", ["softmax"]),
        ("nuswide", ["softmax", *(f"gsoftmax{g}" for g in ("(0,1)", "(0,2)", "(0,3)", "(-0.05,1)", "(0.05,1)"))]),
        ("coco-gap", ["softmax"]),
    ],
)
def test_a_family_is_the_rows_that_differ_in_the_head(family, labels):
    rows = recipes.family(family)
    assert [row.label for row in rows] == labels
    assert recipes.family(rows[-1].name) == rows
    folders = {runs.folder_name(row.label) for row in rows}
    assert len(folders) == len(rows)  # (-0.05, 1) and (0.05, 1) are two
    assert not recipes.family("digits") and not recipes.family("nowhere")
    every = [row for rows in recipes.families().values() for row in rows]
    assert len(every) == sum(r.is_row for r in recipes.recipes().values())


def test_each_row_of_a_family_has_its_own_options():
    made = of_rows(recipes.family("coco"), None, {"seed": 3})
    assert made["softmax"].head_options == {} and made["gsoftmax-data"].init == "data"
    assert made["gsoftmax(-0.1,1)"].head_options["mu"] == -0.1 and {c.seed for c in made.values()} == {3}
    chosen = of_rows(recipes.family("tiny"), ["softmax", "gsoftmax"])
    assert list(chosen) == [
        "softmax",
        *(label for label in (r.label for r in recipes.family("tiny")) if label[0] == "g"),
    ]
    more = of_rows(recipes.family("wrn-cifar10"), ["gsoftmax(lam=4)", "lsoftmax(margin=3)", "mine:Head(a=1)"])
    assert [c.head_options for c in more.values()] == [{"lam": 4}, {"margin": 3}, {"a": 1}]
    assert more["mine:Head(a=1)"].head == "mine:Head" and more["mine:Head(a=1)"].backbone == "wrn-40-14"
    assert of_heads(Config(head_options={"form": "msml"}), ["softmax"])["softmax"].head_options == {"form": "msml"}


@pytest.mark.parametrize("what", ["wrn-cifar10", "wrn-cifar10-gsoftmax"])
def test_compare_runs_a_family_with_the_options_of_its_rows(what, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_smoke("cifar10", "data")
    status, out, err = run(capsys, "compare", what, *TINY, "--seeds", "1", "--data", "data", "--out", "o")
    assert status == 0 and "gsoftmax:" not in err and "softmax, lsoftmax, gsoftmax; 1 seed " in out
    held = {head: runs.read_config(tmp_path / "o" / head / "seed-0") for head in ("softmax", "lsoftmax", "gsoftmax")}
    assert [c.head_options for c in held.values()] == [{}, {"margin": 2}, {"lam": 0.5}]
    assert all(c.weight_decay == 5e-4 and c.backbone == "wrn-10-1" for c in held.values())
    changed = "changed: backbone=wrn-10-1, batch_size=16, epochs=1, train_geometry=False"
    told = "Not the paper's recipe: softmax, lsoftmax, gsoftmax (smoke)"
    assert f"softmax, lsoftmax, gsoftmax ({changed})" in out and out.count(told) == 2  # the table and the verdicts
    assert told in (tmp_path / "o" / "report.html").read_text("utf-8").replace("&#39;", "'")
    summary = json.loads((tmp_path / "o" / "summary.json").read_text("utf-8"))
    assert summary["not_recipe"] == dict.fromkeys(held, "smoke")
    document = report.from_runs([tmp_path / "o" / "softmax" / "seed-0"])
    assert "Not the paper's recipe: softmax (smoke)." in document["verdicts"] and told in report.terminal(
        report.from_runs([tmp_path / "o"])
    )


@pytest.mark.parametrize(
    "name, factor, epochs, schedule",
    [
        ("dsn-cifar10-softmax", 10, 30, {"name": "staircase", "steps": {16: 0.1, 23: 0.1}}),
        ("coco-softmax", 2, 4, {"name": "staircase", "steps": {3: 0.1}}),
        ("tiny-softmax", 30, 1, {"name": "staircase", "steps": {1: 0.1, 2: 0.1}}),
        ("wrn1100-cifar10-softmax", 100, 11, {"name": "malleable", "pieces": [[10, 0, -8], [11, -8, -9]]}),
        ("digits", 3, 5, {"name": "linspace", "a": 1.0, "b": 0.01}),
    ],
)
def test_a_training_is_shortened_in_proportion(name, factor, epochs, schedule):
    short = recipes.shortened(recipes.find(name).config(), factor)
    assert (short.epochs, short.schedule) == (epochs, schedule)
    for wrong in (0.5, 2000, float("nan")):
        with pytest.raises(ValueError, match="shorten must be from 1 to the"):
            recipes.shortened(recipes.find(name).config(), wrong)


def test_seeds_are_compared_with_the_published_number(tmp_path):
    recipe = recipes.find("vgg-cifar10-softmax")
    errors = [0.0560, 0.0575, 0.0590]
    for seed, error in enumerate(errors):
        epochs = [{"error": 0.2}, {"error": 0.05 + 0.001 * seed}, {"loss": 1.0}]
        finished_run(tmp_path / f"seed-{seed}", recipe.config({"seed": seed, "threads": 2}), {"error": error}, epochs)
    found = reproduce.read_seeds(recipe, tmp_path)
    assert [(one.seed, one.label, one.best["epoch"]) for one in found] == [(0, "", 2), (1, "", 2), (2, "", 2)]
    table = reproduce.table("t", [(recipe, found)])
    row = dict(zip(table.header, table.rows[0], strict=True))
    interval = scipy.stats.t.interval(0.95, 2, np.mean(errors) * 100, scipy.stats.sem(errors) * 100)
    assert (row["95 % from"].value, row["to"].value) == pytest.approx(interval)
    assert row["ours"].value == pytest.approx(5.75) and row["difference"].text == "+0.06"
    assert row["published inside"] == "yes" and row["seeds"] == 3
    assert row["best epoch, chosen on the test set"].text == "5.10 (epoch 2)" and "not the recipe" not in row
    one = reproduce.table("t", [(recipe, found[:1])]).rows[0]
    assert one[5:9] == (None, None, None, 1)
    far = [dataclasses.replace(s, result={"error": s.result["error"] + 0.02}) for s in found]
    assert reproduce.table("t", [(recipe, far)]).rows[0][7] == "no"


@pytest.mark.parametrize(
    "changes, data, label",
    [
        ({}, "cifar10", ""),
        ({"seed": 4, "device": "cpu", "evaluate_every": 0}, "cifar10", ""),
        ({"lr": 0.2, "amp": "bf16"}, "cifar10", "changed: amp=bf16, lr=0.2"),
        ({"epochs": 3}, "cifar10", "changed: epochs=3"),
        ({}, "cifar10 (smoke)", "smoke"),
    ],
)
def test_a_run_that_is_not_the_recipe_is_labelled(changes, data, label, tmp_path):
    recipe = recipes.find("vgg-cifar10-gsoftmax")
    finished_run(tmp_path / "seed-0", recipe.config(changes), {"error": 0.05}, data=data)
    (found,) = reproduce.read_seeds(recipe, tmp_path)
    assert found.label == label
    text = reproduce.table("t", [(recipe, [found])]).text()
    assert (label in text) and ("not the recipe" in text) == bool(label) and ("5.00" in text) == (label != "smoke")


def test_a_shortened_training_is_labelled_as_such(tmp_path):
    recipe = recipes.find("vgg-cifar10-gsoftmax")
    short = recipes.shortened(recipe.config({"amp": "bf16"}), 20)
    finished_run(tmp_path / "seed-0", short, {"error": 0.05})
    assert reproduce.label(tmp_path / "seed-0", recipe) == "changed: training shortened 20 times, amp=bf16"


@pytest.mark.parametrize("name", ["vgg-cifar10-softmax", "dsn-cifar10-gsoftmax", "wrn1100-cifar100-lsoftmax"])
def test_every_whole_factor_is_found_again(name):
    recipe = recipes.find(name)
    for factor in (*range(2, 40), 50, 64, 100, 150):
        short = recipes.shortened(recipe.config(), factor)
        (told,) = re.fullmatch(r"changed: training shortened (\d+) times", recipes.changed(short, recipe)).groups()
        assert recipes.shortened(recipe.config(), int(told)).identity() == short.identity()
        assert int(told) == factor or recipe.config().epochs % factor  # of several, the one that divides the epochs


def test_scaled_rows_have_no_published_number(tmp_path):
    recipe = recipes.find("tiny32-gsoftmax(0,1)")
    finished_run(tmp_path / "seed-0", recipe.config({"seed": 0}), {"error": 0.5, "error_x": 0.51})
    table = reproduce.table("scaled", [(recipe, reproduce.read_seeds(recipe, tmp_path))])
    assert table.title == "scaled, ours (%)" and "published" not in " ".join((*table.header, table.note))
    assert [(line[1], line[2].text) for line in table.rows] == [("error", "50.00"), ("error of x", "51.00")]
    assert table.rows[0][-1] == "scaled from tiny-gsoftmax(0,1)"


def test_no_mean_is_over_runs_of_different_configurations(tmp_path, capsys):
    row, errors = "wrn-cifar10-softmax", (0.10, 0.02, 0.03, 0.05)
    recipe = recipes.find(row)
    changes: list[dict] = [{"epochs": 3, "lr": 0.02}, {"epochs": 1}, {"epochs": 1}, {}]
    for seed, (error, changed) in enumerate(zip(errors, changes, strict=True)):
        config = recipe.config(
            {"data": "digits", "backbone": "cnn", **changed, "seed": seed} if changed else {"seed": 3}
        )
        finished_run(tmp_path / row / f"seed-{seed}", config, {"error": error}, data="digits")
    found = reproduce.read_seeds(recipe, tmp_path / row)
    groups = reproduce.by_label(found)
    assert [[one.seed for one in group] for group in groups.values()] == [[3], [1, 2], [0]] and not [*groups][0]
    table = reproduce.table("t", [(recipe, found)])
    assert [(line[3].text, line[7], line[8]) for line in table.rows] == [
        ("5.00", None, 1),
        ("2.50", None, 2),  # its interval is about another training
        ("10.00", None, 1),
    ]
    assert [line[-1] for line in table.rows] == [*groups]
    pooled = [line for line in report.paper_tables(tmp_path)[0].rows if line[0] == row]
    assert [(line[2].text, line[-2], line[-1]) for line in pooled] == [
        (line[3].text, line[8], line[-1]) for line in table.rows
    ]
    words = ["--row", row, "--out", str(tmp_path), "data=digits", "backbone=cnn", "epochs=3", "lr=0.02"]
    status, out, err = run(capsys, "reproduce", "table1", *words)
    assert status == 0 and not err and "10.00" in out and "2.50" not in out and "inside   seeds" in out


def test_comparisons_and_reports_say_how_runs_differ_from_their_rows(tmp_path):
    for head, changes in (("softmax", {}), ("gsoftmax", {"lr": 0.2})):
        for seed in range(2):
            config = recipes.find(f"wrn-cifar10-{head}").config({**changes, "seed": seed})
            finished_run(tmp_path / head / f"seed-{seed}", config, {"error": 0.1 + 0.01 * seed, "seconds": 1.0})
    found = summarise(tmp_path, ["softmax", "gsoftmax"], [0, 1])
    told = "Not the paper's recipe: gsoftmax (changed: lr=0.2)."
    assert found["not_recipe"] == {"gsoftmax": "changed: lr=0.2"} and told in verdicts(found)
    assert means(found).note == told and all(told in table.note for table in differences(found))
    (tmp_path / "gsoftmax" / "seed-1" / "config.json").unlink()  # a run of no row
    assert reproduce.label(tmp_path / "gsoftmax" / "seed-1") == ""


def test_a_family_of_one_row_is_no_comparison(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, "compare", "tiny-64")
    assert status == 2 and not out and err.count("\n") == 1 and not list(tmp_path.iterdir())
    assert "tiny-64 has one row, tiny-64-softmax: choose more heads, or train that row" in err
    assert list(of_rows(recipes.family("tiny-64"), ["softmax", "gsoftmax"])) == ["softmax", "gsoftmax"]


def test_a_run_of_another_seed_than_asked_for_is_left_out(tmp_path):
    recipe = recipes.find("wrn-cifar10-softmax")
    for seed in (0, 1, 5):
        finished_run(tmp_path / f"seed-{seed}", recipe.config({"seed": seed}), {"error": 0.1})
    (tmp_path / "seed-x").mkdir()
    assert [one.seed for one in reproduce.read_seeds(recipe, tmp_path, range(2))] == [0, 1]
    assert [one.seed for one in reproduce.read_seeds(recipe, tmp_path)] == [0, 1, 5]


def test_progress_names_the_row(tmp_path):
    rows = reproduce.find_rows("table1", "wrn-cifar10")
    made = reproduce.tasks(rows, [3], tmp_path, reproduce.Plan({}), None)
    assert [task.name for task in made] == [
        f"wrn-cifar10-{head} seed 3" for head in ("softmax", "lsoftmax", "gsoftmax")
    ]
    assert Task.read(json.loads(json.dumps(made[0].written()))).name == made[0].name


@pytest.mark.parametrize("change", ["epochs=3", "lr=0.5", "head_options.lam=2"])
def test_reproduce_never_prints_the_number_of_another_configuration(change, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["reproduce", "table1", "--row", "wrn-cifar10-gsoftmax", "--smoke", "--out", "o"]
    for seed in range(2):
        recipe = recipes.find("wrn-cifar10-gsoftmax")
        config = recipe.config({"seed": seed}, smoke=True)
        finished_run(
            tmp_path / "o/smoke/wrn-cifar10-gsoftmax" / f"seed-{seed}", config, {"error": 0.5}, data="x (smoke)"
        )
    status, out, _ = run(capsys, *argv, "--seeds", "2")
    assert status == 0 and "smoke ok" in out and "50.00" not in out
    status, out, err = run(capsys, *argv, change)
    assert status == 2 and not out and f"not {change.partition('.')[0].partition('=')[0]}=" in err
    assert "contains a run with" in err and "choose another --out" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "argv, words",
    [
        (["table9"], "unknown table 'table9'; tables are table1, table2, table3, table4, scaled, figures are figure3"),
        (["table1", "--row", "vgg-cifar"], "table1 has no row 'vgg-cifar', did you mean 'vgg-cifar10'"),
        (["table1", "--seeds", "0"], "--seeds must be 1 or more, got 0"),
        (["table1", "--row", "vgg-cifar10", "--shorten", "0"], "shorten must be from 1 to the 300 epochs"),
        (["figure9"], "figure9"),
        (["figure6", "epochs=3"], "figure6 is drawn from finished runs and takes no epochs=3"),
        (["figure6", "--shorten", "2"], "takes no --shorten"),
        (["figure6", "--seeds", "2"], "takes no --seeds"),
        (["figure6", "--jobs", "2"], "takes no --jobs"),
        (["figure6", "--data", "."], "takes no --data"),
        (["table1", "seed=7"], "reproduce has as many seeds as --seeds says; seed cannot be set"),
    ],
)
def test_reproduce_mistakes_are_one_line(argv, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, "reproduce", *argv)
    assert status == 2 and words in err and err.count("\n") == 1 and not out and not list(tmp_path.iterdir())


def test_the_docs_show_what_was_run():
    root = Path(__file__).parents[1]
    shown = (root / "docs" / "reproduce.md").read_text("utf-8").split("## Rows that were run")[1].split("\n## ")[0]
    lines = {line.split("`")[1]: line.split("|")[2:-1] for line in shown.splitlines() if line.startswith("| `")}
    runs: dict[str, list[dict]] = {}
    for line in (root / "results" / "reproduce.jsonl").read_text("utf-8").splitlines():
        runs.setdefault(json.loads(line)["row"], []).append(json.loads(line))
    assert lines.keys() == runs.keys()
    for name, cells in lines.items():
        assert [run["seed"] for run in runs[name]] == [0, 1, 2] and all(run["not the recipe"] for run in runs[name])
        made = [reproduce.Seed(Path(), run["seed"], run, {}, run["not the recipe"]) for run in runs[name]]
        published = recipes.find(name).published.get("error")
        mean, _, low, high, *_ = (getattr(cell, "text", None) for cell in reproduce.ours("error", published, made))
        best = 100 * np.mean([run["best error"] for run in runs[name]])
        expected = [f"{published}" if published else "–", mean, f"{low} to {high}", f"{best:.2f}"]
        assert [cell.strip() for cell in cells] == expected, name
