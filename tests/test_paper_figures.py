"""Figures 3 to 8 of the paper from finished runs: drawings and tables against NumPy and SciPy, and the labels."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict

import numpy as np
import pytest
import scipy.stats
from safetensors.torch import load_file, save_file
from test_report import fake_run, marks

from gsoftmax import recipes
from gsoftmax.cli import main
from gsoftmax.report import figures, paper

CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
CIFAR100 = ["apple", "aquarium_fish", *(f"class {k}" for k in range(2, 12))]
LABELS = ["person", "cow", "baseball bat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs of every row that a figure needs, with the configurations of the recipes."""
    out = tmp_path_factory.mktemp("reproduce")
    for name in dict.fromkeys(row for figure in paper.FIGURES.values() for row in figure.rows):
        config = recipes.find(name).config()
        names = {"cifar10": CIFAR10, "cifar100": CIFAR100, "coco": LABELS}[config.data]
        for seed in range(2):
            run = out / name / f"seed-{seed}"
            fake_run(run, config.head, seed, names=names, multilabel=config.data == "coco", n=300)
            (run / "config.json").write_text(json.dumps(asdict(config.override({"seed": seed}))))
    return out


def drawn(monkeypatch, name, folder, tmp_path):
    """The spec of a figure, and its tables."""
    kept = []
    monkeypatch.setattr(paper, "save", lambda spec, *rest: kept.append(spec))
    made, _ = paper.figure(name, folder, tmp_path)
    return kept[0], made


def own_outputs(folder, row, c):
    found = [load_file(folder / row / f"seed-{seed}" / "outputs.safetensors") for seed in range(2)]
    return [o["x"].numpy()[o["y"].numpy() == c, c].astype(np.float64) for o in found]


def other_outputs(folder, row, c):
    """x_j of the images of class c, j not c."""
    found = [load_file(folder / row / f"seed-{seed}" / "outputs.safetensors") for seed in range(2)]
    return [np.delete(o["x"].numpy()[o["y"].numpy() == c], c, 1).astype(np.float64) for o in found]


def cells(table):
    return {(line[0], head): cell for line in table.rows for head, cell in zip(table.header[1:], line[1:], strict=True)}


def test_figure_3_has_the_published_ranges_and_the_shape_of_x(folder, tmp_path):
    made, paths = paper.figure("figure3", folder, tmp_path, ["svg", "png"])
    assert [p.name for p in paths] == ["figure3.svg", "figure3.png"] and all(p.stat().st_size > 10_000 for p in paths)
    assert [t.title.partition(": ")[2] for t in made] == [
        "x against p on the test set: airplane, CIFAR-10",
        "x against p on the test set: aquarium_fish, CIFAR-100",
    ]
    found = cells(made[0])
    published = [found["x, max", f"{head}, published"].value for head in ("softmax", "lsoftmax", "gsoftmax")]
    assert "of the first seed" in made[0].note
    assert published == [11, 24, 9] and "Not the paper's recipe" not in made[0].note
    x = own_outputs(folder, "wrn-cifar10-gsoftmax", 0)
    expected = {
        "x, min": np.mean([v.min() for v in x]),
        "x, max": np.mean([v.max() for v in x]),
        "compactness": np.mean([1 / v.std() for v in x]),
        "skewness": np.mean([scipy.stats.skew(v) for v in x]),
        "excess kurtosis": np.mean([scipy.stats.kurtosis(v) for v in x]),
        "p of normality": scipy.stats.normaltest(x[0]).pvalue,
    }
    impostors = other_outputs(folder, "wrn-cifar10-gsoftmax", 0)
    expected["impostors, min"] = np.mean([v.min() for v in impostors])
    expected["impostors, max"] = np.mean([v.max() for v in impostors])
    expected["impostors in [-5, 0], %"] = np.mean([100 * ((v >= -5) & (v <= 0)).mean() for v in impostors])
    for quantity, value in expected.items():
        assert found[quantity, "gsoftmax, ours"].value == pytest.approx(value, rel=1e-6)


def test_figures_4_and_8_have_the_published_geometry(folder, tmp_path):
    cow, bat = map(cells, paper.figure("figure4", folder, tmp_path)[0])
    assert [cow["separability", f"{h}, published"].text for h in ("softmax", "gsoftmax")] == ["1.8", "4.3"]
    assert [bat["compactness", f"{h}, published"].text for h in ("softmax", "gsoftmax")] == ["2.1", "2.3"]
    made = [load_file(folder / "coco-softmax" / f"seed-{seed}" / "outputs.safetensors") for seed in range(2)]
    spread = [o["x"].numpy()[:, 1].astype(float)[o["y"].numpy()[:, 1] == 1, 1].std() for o in made]
    assert cow["compactness", "softmax, ours"].value == pytest.approx(np.mean(1 / np.array(spread)), rel=1e-6)
    (table,) = paper.figure("figure8", folder, tmp_path)[0]
    assert "Means over 2 seeds (± standard deviation). The paper" in table.note  # there are no points
    averages = cells(table)
    for measure, published in (("compactness", ["2.6", "2.8"]), ("separability", ["4.2", "4.5"])):
        assert [averages[measure, f"{h}, published"].text for h in ("softmax", "gsoftmax")] == published


def test_figure_6_draws_every_class_of_both_sets(folder, tmp_path, monkeypatch):
    spec, (counts, every) = drawn(monkeypatch, "figure6", folder, tmp_path)
    bars = marks(spec, "rect")
    assert [len(items) for items in bars] == [30] * 6  # three heads, ten classes, three measures of two sets
    assert len(every.rows) == 20 and {line[1] for line in every.rows} == {"training set", "test set"}
    heads = ("softmax", "lsoftmax", "gsoftmax")
    spread = np.array(
        [[np.mean([1 / v.std() for v in own_outputs(folder, f"wrn-cifar10-{h}", c)]) for c in range(10)] for h in heads]
    )
    line = next(line for line in counts.rows if line[0] == "compactness, test set")
    expected = [(spread.argmax(0) == k).sum() for k in range(3)], [(spread.argmin(0) == k).sum() for k in range(3)]
    assert line[1:] == (*np.stack(expected, 1).ravel(), 10)


def test_figure_5_has_a_gaussian_of_each_head_and_figure_7_ten_classes(folder, tmp_path, monkeypatch):
    spec, made = drawn(monkeypatch, "figure5", folder, tmp_path)
    assert len(made) == 2 and len(spec["vconcat"]) == 2 and len(spec["vconcat"][0]["hconcat"]) == 4
    figures.render(spec, "svg")
    spec, (_, every) = drawn(monkeypatch, "figure7", folder, tmp_path)
    assert [line[0] for line in every.rows[:10]] == CIFAR100[:10] and len(every.rows) == 20


def test_changed_runs_are_labelled_in_figure_and_tables(folder, tmp_path, monkeypatch):
    other = tmp_path / "other"
    for row in paper.FIGURES["figure8"].rows:
        (other / row).parent.mkdir(exist_ok=True)
        (other / row).symlink_to(folder / row)
    row = "coco-gsoftmax(0,1)"
    (other / row).unlink()
    config = recipes.find(row).config().override({"lr": 0.5})
    fake_run(other / row / "seed-0", "gsoftmax", 0, names=LABELS, multilabel=True, n=300)
    (other / row / "seed-0" / "config.json").write_text(json.dumps(asdict(config)))
    spec, (table,) = drawn(monkeypatch, "figure8", other, tmp_path)
    told = "Not the paper's recipe: coco-gsoftmax(0,1) (changed: lr=0.5)."
    assert told in table.note and told in " ".join(spec["title"]["subtitle"])


def test_a_family_is_one_row_of_every_head(folder, tmp_path, capsys):
    for words in (["figure8", "--row", "coco"], ["figure4", "--row", "coco-gsoftmax(0,1)"]):
        assert main(["reproduce", *words, "--out", str(folder)]) == 0
        assert "gsoftmax, published" in capsys.readouterr().out
    missing = ["reproduce", "figure8", "--row", "coco-gsoftmax(0,5)", "--out", str(folder)]
    assert main(missing) == 2 and "needs a finished run of coco-gsoftmax(0,5)" in capsys.readouterr().err


def test_runs_that_differ_from_the_others_are_left_out(folder, tmp_path, monkeypatch):
    other = tmp_path / "other"
    for row in paper.FIGURES["figure8"].rows:
        shutil.copytree(folder / row, other / row)
    config = recipes.find("coco-softmax").config({"lr": 0.5, "seed": 1})
    (other / "coco-softmax" / "seed-1" / "config.json").write_text(json.dumps(asdict(config)))
    _, (table,) = drawn(monkeypatch, "figure8", other, tmp_path)
    assert "Left out, because their settings differ: 1 of coco-softmax (changed: lr=0.5)." in table.note
    assert "Not the paper's recipe" not in table.note and "± " not in str(cells(table)["compactness", "softmax, ours"])
    fifth = paper.paper_tables(other)[4]
    assert "1 of coco-softmax (changed: lr=0.5)" in fifth.note and not fifth.rows[0][-1]


def test_a_class_without_images_is_not_shown(folder, tmp_path):
    for row in paper.FIGURES["figure4"].rows:
        config = recipes.find(row).config()
        fake_run(tmp_path / row / "seed-0", config.head, 0, names=["person", "cow", "cup"], multilabel=True, n=300)
        (tmp_path / row / "seed-0" / "config.json").write_text(json.dumps(asdict(config)))
        outputs = load_file(tmp_path / row / "seed-0" / "outputs.safetensors")
        outputs["y"][:, :2] = 0  # neither a person nor a cow
        save_file(outputs, tmp_path / row / "seed-0" / "outputs.safetensors")
    (table,) = paper.figure("figure4", tmp_path, tmp_path)[0]
    assert "coco has no images of cow, baseball bat: cup is shown." in table.note
    assert cells(table)["images", "softmax, ours"] > 0


def test_missing_runs_are_one_line_with_the_command(folder, tmp_path):
    command = r"needs a finished run of coco-softmax .*: gsoftmax reproduce table3 --row coco-softmax --out \S*my-runs"
    for runs, end in ((tmp_path / "my-runs", "$"), (tmp_path / "my-runs" / "smoke", " --smoke$")):
        with pytest.raises(ValueError, match=command + end):
            paper.figure("figure8", runs, tmp_path)
    partial = tmp_path / "partial"
    partial.mkdir()
    for head in ("softmax", "lsoftmax", "gsoftmax"):
        (partial / f"wrn-cifar10-{head}").symlink_to(folder / f"wrn-cifar10-{head}")
    (table,) = paper.figure("figure3", partial, tmp_path)[0]
    assert "cifar100 is left out: there is no finished run of wrn-cifar100-softmax." in table.note
    with pytest.raises(ValueError, match="unknown figure 'figure9'"):
        paper.figure("figure9", tmp_path, tmp_path)
