"""The report: numbers in the page against NumPy and SciPy, names shown as text, tables, figures, limits of size."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import shutil
import xml.etree.ElementTree as ET
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
import vl_convert
from safetensors.torch import load_file, save_file
from scipy.special import expit, softmax

from gsoftmax import evaluation, files, geometry, report, runs
from gsoftmax.config import Config, parse_head
from gsoftmax.functional import gsoftmax
from gsoftmax.report import examples, figures, page, pictures, tables, words
from gsoftmax.report.colours import colours
from gsoftmax.summary import no_verdict, summarise, summary_of, verdicts
from gsoftmax.tables import Table

ROOT = Path(__file__).parents[1]
EVIL = "<img src=x onerror=alert(1)>"
NAMES = [EVIL, "</script><script>alert(2)</script>", "plain", "größer & größer", "$x^2$_%"]
HEADS = ("softmax", "lsoftmax", "gsoftmax")


def fake_outputs(head, seed, *, multilabel=False, n=200, classes=5):
    """Outputs of a model that was never trained; the same labels for every head."""
    rng = np.random.default_rng([seed, len(head)])
    if multilabel:
        y = (np.random.default_rng(7).random((n, classes)) < 0.4).astype(np.uint8)
        x = np.stack([rng.normal(size=(n, classes)) - y, rng.normal(size=(n, classes)) + 2 * y], axis=1)
        p = expit(x[:, 1] - x[:, 0])
    else:
        y = np.random.default_rng(7).integers(0, classes, n)
        x = rng.normal(size=(n, classes)) * rng.uniform(0.7, 1.6, classes)
        x[np.arange(n), y] += {"softmax": 2.5, "lsoftmax": 4.0}.get(head, 3.0)
        p = softmax(x, axis=1)
    found = {"x": torch.from_numpy(x.astype(np.float32)), "p": torch.from_numpy(p), "y": torch.from_numpy(y)}
    if head.startswith("gsoftmax"):
        shape = (2, classes) if multilabel else (classes,)
        found["mu"], found["sigma"] = (torch.from_numpy(rng.uniform(0.5, 1.5, shape)) for _ in range(2))
        if not multilabel:
            found["p"] = gsoftmax(found["x"].double(), found["mu"], found["sigma"], 1.0)
    return found


def fake_run(folder, head, seed, *, names=NAMES, multilabel=False, train_split=True, **options):
    """A run folder as `train` leaves it behind."""
    folder.mkdir(parents=True)
    outputs = fake_outputs(head, seed, multilabel=multilabel, classes=len(names), **options)
    x, p, y = (outputs[k] for k in "xpy")
    stats = geometry.ClassStatistics(len(names), multilabel=multilabel).update(evaluation.positive_outputs(x), y)
    if train_split:
        outputs |= {f"train_{k}": v for k, v in stats.state_dict().items()}
        outputs["train_mean"] = outputs["train_mean"] * 1.5  # so that train and test differ
    save_file({k: v.contiguous() for k, v in outputs.items()}, folder / "outputs.safetensors")
    name, head_options = parse_head(head)
    config = Config(head=name, head_options=head_options, seed=seed, epochs=3)
    (folder / "config.json").write_text(json.dumps(asdict(config)))
    described = runs.environment() | {"command": "gsoftmax compare <digits>", "data": {"classes": names}}
    (folder / "environment.json").write_text(json.dumps(described))
    result = evaluation.score(x, p, y) | {"seconds": 1.0}
    rows = [{"epoch": e, "loss": 1 / (e + seed + len(head)), "lr": 0.1 / e} for e in (1, 2, 3)]
    rows.append({"final": True, **result})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def fake_comparison(out, *, heads=HEADS, seeds=3, title="evil & co", **options):
    """A finished comparison with its page."""
    for head in heads:
        for seed in range(seeds):
            fake_run(out / runs.folder_name(head) / f"seed-{seed}", head, seed, **options)
    summary = summarise(out, heads, range(seeds))
    return report.write_page(summary, out, title)


def embedded(path):
    """The numbers in a page."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text("utf-8"), re.DOTALL)
    return json.loads(match[1])


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return fake_comparison(tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    out = tmp_path_factory.mktemp("several")
    return fake_comparison(out, heads=("softmax", "gsoftmax"), seeds=2, multilabel=True)


# ---------------------------------------------------------------------------------------------------------- the page


def test_geometry_in_the_page_is_numpys(single):
    doc = embedded(single)
    assert doc["classes"] == NAMES and doc["heads"] == list(HEADS) and doc["seeds"] == [0, 1, 2]
    assert {(g["head"], g["seed"], g["split"]) for g in doc["geometry"]} == {
        (h, s, split) for h in HEADS for s in range(3) for split in ("test", "train")
    }
    for g in doc["geometry"]:
        if g["split"] == "train":
            continue
        o = fake_outputs(g["head"], g["seed"])
        x, y = o["x"].double().numpy(), o["y"].numpy()
        for c in range(5):
            mean, std = x[y == c].mean(0), x[y == c].std(0)
            assert g["own"][c] == pytest.approx([mean[c], std[c]], rel=1e-9)
            assert g["compactness"][c] == pytest.approx(1 / std[c], rel=1e-9)
            v, d2 = std**2, (mean - mean[c]) ** 2
            kl = ((v[c] + d2) / v + (v + d2) / v[c] - 2) / 2  # both directions together
            separability = np.delete(kl, c).sum() / (2 * 4)
            assert g["separability"][c] == pytest.approx(separability, rel=1e-9)
            assert g["ratio"][c] == pytest.approx(separability / std[c], rel=1e-9)
            assert g["accuracy"][c] == pytest.approx((o["p"].numpy().argmax(1) == y)[y == c].mean(), rel=1e-9)
        if g["head"] == "gsoftmax":
            assert g["learned"] == [pytest.approx(pair) for pair in torch.stack([o["mu"], o["sigma"]], 1).tolist()]
            expected = geometry.ratio(o["mu"].numpy(), o["sigma"].numpy())
            np.testing.assert_allclose(g["learned_measures"]["ratio"], expected, rtol=1e-9)


def test_the_training_set_has_its_own_geometry(single):
    doc = embedded(single)
    test, own = (next(g for g in doc["geometry"] if g["split"] == s) for s in ("test", "train"))
    assert np.array(own["own"])[:, 0] == pytest.approx(1.5 * np.array(test["own"])[:, 0], rel=1e-9)
    assert own["compactness"] == pytest.approx(test["compactness"], rel=1e-9)
    assert own["separability"] != pytest.approx(test["separability"], rel=1e-2)


def test_every_p_value_is_scipys(single):
    doc = embedded(single)
    for rows in doc["metrics"].values():
        first = rows["softmax"]["values"]
        for head in HEADS:
            row, n = rows[head], 3
            half = scipy.stats.t.ppf(0.975, n - 1) * np.std(row["values"], ddof=1) / np.sqrt(n)
            assert (row["low"], row["high"]) == pytest.approx((row["mean"] - half, row["mean"] + half), rel=1e-9)
            if head != "softmax" and (rows is not doc["metrics"]["error_x"] or "paired" in row):
                t, p = scipy.stats.ttest_rel(row["values"], first)
                assert (row["paired"]["t"], row["paired"]["p"]) == pytest.approx((t, p), rel=1e-9)
    tests = [g for g in doc["geometry"] if g["split"] == "test"]

    def average(head, measure):
        return np.mean([g[measure] for g in tests if g["head"] == head], axis=0)

    for head in HEADS[1:]:
        for measure, d in doc["over_classes"][head].items():
            t, p = scipy.stats.ttest_rel(average(head, measure), average("softmax", measure))
            assert (d["t"], d["p"]) == pytest.approx((t, p), rel=1e-8), measure
    g_runs = [g for g in tests if g["head"] == "gsoftmax"]
    for measure, both in doc["correlations"]["rows"].items():
        values, score = (np.array([g[k] for g in g_runs]) for k in (measure, "accuracy"))
        best = values.mean(0).argmax()
        assert both["best_class"]["class"] == best and both["best_class"]["n"] == 3
        r, p = scipy.stats.pearsonr(values[:, best], score[:, best])
        assert (both["best_class"]["r"], both["best_class"]["p"]) == pytest.approx((r, p), rel=1e-7)
        r, p = scipy.stats.pearsonr(values.ravel(), score.ravel())
        assert (both["all_classes"]["r"], both["all_classes"]["p"]) == pytest.approx((r, p), rel=1e-7)
        assert both["all_classes"]["n"] == 15


def test_several_labels(several):
    doc = embedded(several)
    assert doc["multilabel"] and doc["measures"][-1] == "AP" and "mAP" in doc["metrics"]
    g = next(g for g in doc["geometry"] if g["head"] == "gsoftmax" and g["split"] == "test")
    o = fake_outputs("gsoftmax", 0, multilabel=True)
    x, y = o["x"][:, 1].double().numpy(), o["y"].numpy()
    for k in range(5):
        has, has_not = x[y[:, k] == 1, k], x[y[:, k] == 0, k]
        assert g["own"][k] == pytest.approx([has.mean(), has.std()], rel=1e-9)
        assert g["other"][k] == pytest.approx([has_not.mean(), has_not.std()], rel=1e-9)
        assert g["learned"][k] == pytest.approx([float(o["mu"][1, k]), float(o["sigma"][1, k])])
    assert all(set(run["j"]) == set(run["c"]) for run in doc["points"])
    run = next(r for r in doc["points"] if r["head"] == "gsoftmax")
    for c, own, value in list(zip(run["c"], run["own"], run["x"], strict=True))[::17]:
        row = np.abs(x[:, c] - value).argmin()
        assert x[row, c] == pytest.approx(value, rel=1e-4) and y[row, c] == own


def test_names_are_text_wherever_they_stand(single):
    text = single.read_text("utf-8")
    assert EVIL not in text and "<script>alert(2)" not in text
    assert "&lt;img src=x onerror=alert(1)&gt;" in text  # the option of the select and the rows of tables
    assert text.count("<script") == 6  # data, specs, Vega and ours
    assert "gsoftmax compare &lt;digits&gt;" in text and "<title>evil &amp; co</title>" in text
    assert embedded(single)["classes"][0] == EVIL


def test_the_page_opens_with_plain_findings_and_is_a_few_megabytes(single):
    text = single.read_text("utf-8")
    doc = embedded(single)
    changes = np.subtract(*(doc["metrics"]["error"][h]["values"] for h in ("gsoftmax", "softmax")))
    ends = scipy.stats.t.interval(0.95, 2, changes.mean(), scipy.stats.sem(changes))
    shown = [f"{v:+.2f}".replace("-", "−") for v in (changes.mean(), *ends)]
    said = "error {} points, between {} and {}".format(*shown)
    assert said in text and text.index(said) < text.index('data-figure="forest"') < text.index('<form class="bar"')
    assert single.stat().st_size < 2e6
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!#|data:image/)", text.split('<script type="application/json"')[0])


def test_a_page_of_many_classes_stays_small_and_says_what_it_leaves_out(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "_MOST_CLASSES", 7)
    monkeypatch.setattr(page, "_MOST_ROWS", 30)
    names = [f"class {i}" for i in range(12)]
    path = fake_comparison(tmp_path, names=names, n=300, train_split=False)
    doc, count = embedded(path), np.bincount(fake_outputs("softmax", 0, n=300, classes=12)["y"].numpy(), minlength=12)
    assert len(doc["classes"]) == 7
    kept = [names.index(n) for n in doc["classes"]]
    assert min(count[kept]) >= max(np.delete(count, kept))
    assert {g["seed"] for g in doc["geometry"]} == {0}
    assert all(len(g["ratio"]) == 7 == len(g["own"]) for g in doc["geometry"])
    assert any("7 classes with the most images of 12" in n for n in doc["notes"])
    assert any("seeds 0 of 3" in n for n in doc["notes"])
    wrong = doc["examples"]["confusion"]["heads"]["lsoftmax"]["wrong"]
    shown = {(doc["classes"][c], doc["classes"][j]): n for c, j, n, *_ in wrong}
    expected = {}
    for seed in range(3):
        o = fake_outputs("lsoftmax", seed, n=300, classes=12)
        for c, j in zip(o["y"].tolist(), o["p"].argmax(1).tolist(), strict=True):
            if c != j and c in kept and j in kept:
                expected[names[c], names[j]] = expected.get((names[c], names[j]), 0) + 1
    assert shown == expected
    run = doc["points"][0]
    x = fake_outputs("softmax", 0, n=300, classes=12)["x"].numpy()
    own = [i for i, o in enumerate(run["own"]) if o]
    assert all(np.abs(x[:, kept[run["c"][i]]] - run["x"][i]).min() < 1e-3 for i in own)


def test_files_are_utf_8_in_every_locale(tmp_path, monkeypatch):
    monkeypatch.setattr(io, "text_encoding", lambda encoding, level=2: encoding or "ascii")  # as of LC_ALL=C
    files.atomic_write(tmp_path / "page.html", "größer ±")
    assert (tmp_path / "page.html").read_bytes() == "größer ±".encode()


def test_run_folders_anywhere_make_a_report(tmp_path):
    for head, seed in (("gsoftmax(lam=2)", 0), ("gsoftmax(lam=2)", 1), ("softmax", 1), ("softmax", 0), ("softmax", 2)):
        fake_run(tmp_path / f"{head}-{seed}", head, seed)
    folders = sorted(tmp_path.iterdir())
    doc = report.from_runs(folders)
    assert doc["heads"] == ["softmax", "gsoftmax(lam=2)"] and doc["seeds"] == [0, 1]
    assert doc["notes"] == ["1 runs left out: their seed is not there for every head"]
    results = {h: [runs.read_result(tmp_path / f"{h}-{s}") for s in (0, 1)] for h in doc["heads"]}
    t, p = scipy.stats.ttest_rel(*([100 * r["error"] for r in results[h]] for h in reversed(doc["heads"])))
    assert doc["metrics"]["error"]["gsoftmax(lam=2)"]["paired"]["p"] == pytest.approx(p, rel=1e-9)
    with pytest.raises(ValueError, match="contains neither a finished run nor a comparison"):
        report.from_runs([tmp_path])
    with pytest.raises(ValueError, match="at least one run folder"):
        report.from_runs([])


def test_runs_of_too_many_classes_to_gather_make_a_report_of_what_they_have(tmp_path):
    """A sharded head writes predictions instead of x, and no numbers that need x."""
    folders = [tmp_path / f"{head}-{seed}" for head in ("softmax", "gsoftmax") for seed in (0, 1)]
    for folder in folders:
        head, _, seed = folder.name.partition("-")
        fake_run(folder, head, int(seed))
        found = load_file(folder / "outputs.safetensors")
        save_file({"y": found["y"], "predicted": found["p"].argmax(1)}, folder / "outputs.safetensors")
        *rows, last = runs.read_rows(folder)
        last = {k: v for k, v in last.items() if k not in ("error_x", "nll", "ece")}
        (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (*rows, last)))
    doc = report.from_runs(folders)
    assert list(doc["metrics"]) == ["error", "compactness", "separability", "ratio", "relative_sigma", "dprime"]
    assert doc["notes"] == ["4 of 4 runs have no outputs: they are not in the figures"] and len(doc["verdicts"]) == 1
    assert report.write(doc, tmp_path / "out")[0].exists()
    del last["ratio"]
    (folder / "metrics.jsonl").write_text(json.dumps(last) + "\n")
    with pytest.raises(ValueError, match="must have a number for 'ratio'"):
        report.from_runs(folders)


def test_a_summary_from_before_there_was_a_measure_is_read(single, tmp_path):
    summary = json.loads((single.parent / "summary.json").read_text())
    assert list(summary["metrics"])[:2] == ["error", "error_x"]
    del summary["metrics"]["error_x"], summary["sha256"]  # as an older version wrote it
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert "error_x" not in report.from_runs([tmp_path])["metrics"]


def test_a_comparison_whose_runs_are_gone_still_has_its_tables(single, tmp_path):
    summary = json.loads((single.parent / "summary.json").read_text())
    doc = embedded(report.write_page(summary, tmp_path, "t"))
    assert doc["notes"] == ["9 of 9 runs have no outputs: they are not in the figures"] and doc["geometry"] == []


# -------------------------------------------------------------------------------------------------------- findings


def summary_with(values, keys=("error", "compactness", "separability", "ratio")):
    """The document of two heads whose runs have these values for every measure; no runs are on the disk."""
    results = {head: [{key: v for key in keys} | {"seconds": 1.0} for v in row] for head, row in values.items()}
    return report.from_comparison(summary_of(results, range(len(values["softmax"]))), "nowhere", "t")


@pytest.mark.parametrize(
    "second, verdict, begins",
    [
        ([0.010, 0.012, 0.009, 0.0105], "better", "It helps: error −8.96 points, between −9."),
        ([0.190, 0.192, 0.189, 0.1905], "worse", "It hurts: error +9.04 points, between +8."),
        ([0.101, 0.098, 0.103, 0.099], "open", "No evidence that it helps: error +0."),
    ],
)
def test_findings_are_plain_sentences(second, verdict, begins):
    doc = summary_with({"softmax": [0.1, 0.101, 0.099, 0.1], "gsoftmax": second})
    (found,) = words.findings(doc)
    assert (found.head, found.verdict) == ("gsoftmax", verdict) and found.sentence.startswith(begins)
    assert doc["verdicts"] == [f"gsoftmax against softmax, 4 seeds: {found.change}. {found.claim}. {found.more}"]
    assert no_verdict(doc) == ""


def test_an_interval_without_zero_beside_no_verdict_is_explained_by_the_correction():
    values = {"softmax": [0.1, 0.101, 0.099, 0.1], "bce": [0.1, 0.09, 0.11, 0.1], "etf": [0.097, 0.1, 0.0965, 0.0988]}
    found = words.findings(summary_with(values))[1]
    test = scipy.stats.ttest_rel(values["etf"], values["softmax"])
    low, high = (f"−{abs(100 * v):.2f}" for v in test.confidence_interval())
    told = f"(p {test.pvalue:.2g}, {2 * test.pvalue:.2g} corrected for 2 heads)"
    assert test.pvalue < 0.05 < 2 * test.pvalue and found.verdict == "open"
    assert (
        found.sentence
        == f"Not shown that it helps, after correction: error −0.19 points, between {low} and {high} {told}."
    )


def test_the_primary_measure_is_corrected_for_heads_and_the_others_for_all_their_tests():
    rng, heads = np.random.default_rng(0), ("softmax", "etf", "focal")
    keys = ("error", "compactness", "separability", "ratio", "nll")
    results = {h: [{k: rng.random() for k in keys} | {"seconds": 1.0} for _ in range(4)] for h in heads}
    for row in (row for rows in results.values() for row in rows):
        row["error_x"] = row["error"]
    results["focal"][0]["error_x"] += 0.1  # else the same test as that of the error
    metrics = summary_of(results, range(4))["metrics"]
    tested = {(k, h): row["paired"] for k, rows in metrics.items() for h, row in rows.items() if "paired" in row}
    assert ("error_x", "focal") in tested and ("error_x", "etf") not in tested and len(tested) == 2 * 5 + 1
    for family in ([key for key in tested if key[0] == "error"], [key for key in tested if key[0] != "error"]):
        p = np.array([tested[key]["p"] for key in family])
        order = np.argsort(p)
        expected = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)).clip(max=1)
        assert [tested[family[k]]["p_holm"] for k in order] == pytest.approx(expected.tolist())


def test_the_test_over_images_is_that_of_error_rates_averaged_over_seeds(single, several):
    doc, y = embedded(single), fake_outputs("softmax", 0)["y"].numpy()
    rates = {}
    for head in HEADS:
        p = [fake_outputs(head, seed)["p"].numpy() for seed in range(3)]
        rates[head] = np.mean([v.argmax(1) != y for v in p], axis=0)
    for head in HEADS[1:]:
        found, test = doc["over_images"][head]["paired"]["error"], scipy.stats.ttest_rel(rates[head], rates["softmax"])
        flipped = scipy.stats.permutation_test(
            (rates[head] - rates["softmax"],), np.mean, permutation_type="samples", n_resamples=4000, rng=0
        )
        assert found["n"] == 200 and found["difference"] == pytest.approx(np.mean(rates[head] - rates["softmax"]))
        assert (found["low"], found["high"]) == pytest.approx(tuple(test.confidence_interval()))
        assert found["p"] == pytest.approx(flipped.pvalue, abs=0.03) and found["p_holm"] >= found["p"]
    text = single.read_text("utf-8")
    assert "gsoftmax minus softmax, paired over images" in text and "about these trained models on other images" in text
    several_labels = embedded(several)["over_images"]["gsoftmax"]["paired"]["error"]
    o = [[fake_outputs(h, s, multilabel=True) for s in range(2)] for h in ("softmax", "gsoftmax")]
    wrong = [np.mean([((v["p"] >= 0.5) != (v["y"] == 1)).double().mean() for v in of]) for of in o]
    assert several_labels["difference"] == pytest.approx(wrong[1] - wrong[0])


def fake_weak_run(folder, head, seed, skill, n=48):
    """A run on few test images; `skill` is added to the output of the true class."""
    fake_run(folder, head, seed, names=list("abc"), n=n, train_split=False)
    rng, y = np.random.default_rng([seed, len(head), 5]), torch.arange(n) % 3
    x = torch.from_numpy(rng.normal(size=(n, 3))) + skill * torch.eye(3)[y]
    save_file({"x": x.float(), "p": x.softmax(1), "y": y}, folder / "outputs.safetensors")
    rows = runs.read_rows(folder)[:-1] + [{"final": True, **evaluation.score(x.float(), x.softmax(1), y), "seconds": 1}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def test_all_runs_of_a_head_are_judged_together_and_keep_their_accuracy(tmp_path):
    skills = {"softmax": 2.0, "gsoftmax": 0.65, "etf": 0.0}
    for head, skill in skills.items():
        for seed in range(4):
            fake_weak_run(tmp_path / head / f"seed-{seed}", head, seed, skill)
    summary = summarise(tmp_path, list(skills), range(4))
    alone = [
        s
        for s in range(4)
        if summary_of({"gsoftmax": [runs.read_result(tmp_path / "gsoftmax" / f"seed-{s}")]}, [s])["at_chance"]
    ]
    assert summary["at_chance"] == ["etf"] and 0 < len(alone) < 4
    assert verdicts(summary)[-1] == "Not clearly better than guessing, so without geometry: etf."
    path = report.write_page(summary, tmp_path, "t")
    doc = embedded(path)
    assert verdicts(summary)[-1] in doc["notes"] and f"<li>{verdicts(summary)[-1]}" in path.read_text("utf-8")
    assert set(doc["metrics"]["ratio"]) == {"softmax", "gsoftmax"} == {row["head"] for row in doc["points"]}
    told = [note for note in doc["notes"] if "not clearly better than that of guessing" in note]
    assert [note.partition(":")[0] for note in told] == [f"gsoftmax, seed {s}" for s in alone]
    for head in skills:  # the same runs in every number
        rows = [g for g in doc["geometry"] if g["head"] == head]
        accuracy = np.mean([np.average(g["accuracy"], weights=g["count"]) for g in rows])
        assert 100 - 100 * accuracy == pytest.approx(doc["metrics"]["error"][head]["mean"]) and len(rows) == 4
        assert all((g["compactness"][0] is None) == (head == "etf") == (g["own"][0] is None) for g in rows)
    cells = {tuple(row[:2]): row for row in tables.classes(doc).rows}
    assert cells["a", "etf"][3] is None and cells["a", "etf"][-1] is not None and cells["a", "gsoftmax"][3] is not None
    report.write(report.from_runs([tmp_path]), tmp_path / "out", figures=["svg"])


@pytest.mark.parametrize("heads", [1, 3])
def test_a_finding_says_how_many_seeds_would_be_needed(heads):
    values = {"softmax": [0.1, 0.101, 0.099, 0.1], "gsoftmax": [0.101, 0.098, 0.11, 0.099]}
    values |= {f"etf{k}": values["gsoftmax"] for k in range(1, heads)}
    found = words.findings(summary_with(values))[0]
    sd = np.std(100 * np.subtract(values["gsoftmax"], values["softmax"]), ddof=1)
    level = 1 - 0.05 / heads / 2  # that of the corrected test
    powers = ((n, scipy.stats.nct.sf(scipy.stats.t.ppf(level, n - 1), n - 1, 0.5 / sd * n**0.5)) for n in range(5, 99))
    needed = next(n for n, power in powers if power >= 0.8)
    assert f": {needed} would show a true difference of 0.5 points" in found.more


def test_few_seeds_estimate_the_power_and_equal_differences_say_nothing_about_it():
    values = {"softmax": [0.1, 0.101, 0.099], "gsoftmax": [0.101, 0.098, 0.11]}
    estimated, known = (words.findings(summary_with({h: n * v for h, v in values.items()}))[0].more for n in (1, 2))
    assert "3 seeds are few: " in estimated and "with 80 % power, by a rough estimate from 3 seeds. " in estimated
    assert "with 80 % power" in known and "estimate" not in known
    (shown,) = words.findings(summary_with({"softmax": [0.1, 0.101, 0.099], "gsoftmax": [0.05, 0.052, 0.05]}))
    assert shown.verdict == "better" and "power" not in shown.more  # they show a difference
    for changed, more in (([0.09, 0.11], "All seeds differ by the same amount. "), ([0.1, 0.12], "")):
        (found,) = words.findings(summary_with({"softmax": [0.1, 0.12], "gsoftmax": changed}, ["error", "compactness"]))
        assert "power" not in found.more and found.more.startswith(more) and ("All seeds" in found.more) == bool(more)


def test_another_scale_of_x_is_no_change_of_geometry(tmp_path):
    o = fake_outputs("softmax", 0, n=900, classes=20)
    x, y = o["x"].double().numpy(), o["y"].numpy()
    tighter = x - np.eye(20)[y] * x * 0.3 + np.eye(20)[y]
    for name, changed in (("first", x), ("scaled", 1.5 * x), ("tighter", tighter)):
        np.savez(tmp_path / f"{name}.npz", x=changed, y=y, p=o["p"].numpy())
    doc = report.from_outputs(*(tmp_path / f"{name}.npz" for name in ("first", "scaled", "tighter")))
    scaled, tight = doc["verdicts"]
    assert "Only the scale of x changes: compactness −33 %. " in scaled and "ratio" not in scaled
    assert re.search(r"Class geometry changes: separability \+\d+ %, relative σ −\d+ %, d′ \+\d+ %\. ", tight)
    assert "compactness" not in tight


def test_one_seed_has_no_verdict_and_the_page_says_why(tmp_path):
    doc = summary_with({"softmax": [0.1], "gsoftmax": [0.12]})
    (found,) = words.findings(doc)
    assert (
        found.verdict == "none" and found.sentence == "No evidence either way: error +2.00 points with one seed each."
    )
    # Cohen's d = 2, 1 and 1/2: 9.94 and 33.4 for the last two
    assert "takes 5, 10 or 34 seeds if" in no_verdict(doc) and "is 0.25, 0.5 or 1 points." in no_verdict(doc)
    assert "No verdict: with one seed" in report.write(doc, tmp_path)[0].read_text("utf-8")


def test_an_incomplete_comparison_says_so(single, tmp_path):
    summary = json.loads((single.parent / "summary.json").read_text())
    text = report.write_page(summary | {"incomplete": "4 of 9 runs <missing>"}, tmp_path, "t").read_text("utf-8")
    assert "This comparison is incomplete: 4 of 9 runs &lt;missing&gt;" in text
    assert "incomplete:" not in single.read_text("utf-8")


def test_numbers_of_a_row_have_the_same_decimals(single):
    for table in tables.of_document(embedded(single))[:3]:
        for row in table.cells():
            cells = [cell for cell in row[1:4] if cell not in ("–", "∞")]
            assert len({len(number.split(".")[1]) for cell in cells for number in cell.split(" ± ")}) <= 1, row


# -------------------------------------------------------------------------------------------------------- examples


def test_confusions_are_scikit_learns(single):
    from sklearn.metrics import confusion_matrix

    found = embedded(single)["examples"]["confusion"]
    assert sorted(found["order"]) == list(range(5))
    for head in HEADS:
        outputs = [fake_outputs(head, seed) for seed in range(3)]
        expected = sum(confusion_matrix(o["y"], o["p"].argmax(1)) for o in outputs)
        of = found["heads"][head]
        assert of["images"] == expected.sum(1).tolist() and of["right"] == expected.diagonal().tolist()
        shown = np.diag(of["right"])
        by_seed = np.stack([confusion_matrix(o["y"], o["p"].argmax(1)) for o in outputs])
        for c, j, n, *of_seeds in of["wrong"]:
            shown[c, j] = n
            assert of_seeds == by_seed[:, c, j].tolist()
        counts = [n for _, _, n, *_ in of["wrong"]]
        assert (shown == expected).all() and counts == sorted(counts)[::-1] and of["seeds"] == [0, 1, 2]
    (table,) = (t for t in tables.of_document(embedded(single)) if t.title == "Most frequent confusions")
    c, j = (NAMES.index(name) for name in table.rows[0][:2])
    assert table.rows[0][4].value == pytest.approx(100 * expected[c, j] / expected[c].sum())


def test_confusable_classes_are_neighbours():
    group = np.random.default_rng(0).permutation(np.repeat(np.arange(6), 5))
    noise = np.random.default_rng(1).random((30, 30))
    order = examples.confusable_order((group[:, None] == group) + 0.5 * noise)
    assert sorted(order) == list(range(30)) and (np.diff(group[order]) != 0).sum() == 5  # every group in one piece


def test_flips_are_those_of_a_count_by_hand(single):
    all_flips = report.from_runs([single.parent])["examples"]["flips"]
    wrong = {
        h: np.stack([(o["p"].argmax(1) != o["y"]).numpy() for o in (fake_outputs(h, s) for s in range(3))])
        for h in HEADS
    }
    for head in HEADS[1:]:
        found, gain = all_flips[head], wrong["softmax"].mean(0) - wrong[head].mean(0)
        assert (found["better"], found["worse"]) == ((gain > 0).sum(), (gain < 0).sum())
        every = [(a != b).sum() for a in wrong["softmax"] for b in wrong[head]]
        assert found["apart"] == pytest.approx(np.mean(every))
        three = [(wrong["softmax"][a] != wrong["softmax"][b]).sum() for a, b in ((0, 1), (0, 2), (1, 2))]
        assert found["apart_first"] == pytest.approx(np.mean(three))
        gained = [tile for tile in found["tiles"] if tile["first"] > tile["second"]]
        most = sorted(gain)[::-1][: len(gained)]
        assert len(gained) == 12 and [gain[tile["row"]] for tile in gained] == pytest.approx(most)
        for tile in found["tiles"]:
            y = fake_outputs(head, 0)["y"]
            answers = [int(fake_outputs(head, s)["p"][tile["row"]].argmax()) for s in range(3)]
            wrongs = [a for a in answers if a != y[tile["row"]]]
            assert tile["c"] == y[tile["row"]] and tile["second"] == pytest.approx(len(wrongs) / 3)
            assert tile["as_second"] in wrongs if wrongs else tile["as_second"] == -1


def planted(folder, mistakes, **options):
    """Runs of good models whose labels are wrong in some rows."""
    for head in ("softmax", "gsoftmax"):
        for seed in range(2):
            run = folder / head / f"seed-{seed}"
            fake_run(run, head, seed, **options)
            found = load_file(run / "outputs.safetensors")
            y = found["y"].clone()
            truth = (y[mistakes] + 2) % 5 if y.ndim == 1 else y
            if y.ndim == 1:
                x = torch.randn(len(y), 5) + 12 * torch.nn.functional.one_hot(y, 5)
                x[mistakes] = 12.0 * torch.nn.functional.one_hot(truth, 5)
                found |= {"x": x, "p": x.double().softmax(1)}
            else:
                p = torch.where(y == 1, 0.99, 0.01).double()
                p[mistakes, 3] = 1 - p[mistakes, 3]
                found["p"] = p
            save_file(found, run / "outputs.safetensors")
    return report.write_page(summarise(folder, ["softmax", "gsoftmax"], range(2)), folder, "t")


def test_wrong_labels_are_found(tmp_path):
    mistakes = torch.tensor([7, 50, 121])
    path = planted(tmp_path, mistakes)
    doc, y = report.from_runs([tmp_path]), fake_outputs("softmax", 0)["y"]
    tiles = doc["examples"]["labels"]
    assert sorted(tile["row"] for tile in tiles) == mistakes.tolist()
    assert all(tile["as_second"] == (y[tile["row"]] + 2) % 5 and tile["p"] > 0.99 for tile in tiles)
    text = path.read_text("utf-8")
    assert text.count('<figure class="tile"') == 3 and "100 % of runs: " in text and "test image 50" in text


def test_labels_of_classes_that_are_not_learned_are_not_doubted(tmp_path):
    y = fake_outputs("softmax", 0)["y"]
    chosen = torch.nonzero(y == 2).squeeze(1)
    path = planted(tmp_path, torch.cat([torch.nonzero(y == 1)[:3, 0], chosen[: len(chosen) // 2 + 1]]))
    found = report.from_runs([tmp_path])["examples"]
    assert found["unlearned"] == [2] and [tile["c"] for tile in found["labels"]] == [1, 1, 1]
    assert "Left out, because the runs get most of their images wrong: plain." in path.read_text("utf-8")


def test_wrong_labels_of_several_are_found(tmp_path):
    path = planted(tmp_path, torch.tensor([7, 50]), multilabel=True)
    tiles = report.from_runs([tmp_path])["examples"]["labels"]
    y = fake_outputs("softmax", 0, multilabel=True)["y"]
    assert {(tile["row"], tile["c"]) for tile in tiles} == {(7, 3), (50, 3)}
    assert all(tile["has"] == bool(y[tile["row"], 3]) for tile in tiles)
    assert "100 % of runs: " + ("absent" if y[7, 3] else "present") in path.read_text("utf-8")


def photos(root, size):
    """Six images of two classes, and run folders whose outputs are of them."""
    from PIL import Image

    for part in ("train", "test"):
        for c in ("ash", "oak<b>"):
            (root / "photos" / part / c).mkdir(parents=True)
            for i in range(3):
                pixels = np.random.default_rng([i, len(c)]).integers(0, 255, (*size, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(root / "photos" / part / c / f"{i}.png")
    y = torch.tensor([0, 0, 0, 1, 1, 1])
    for head in ("softmax", "gsoftmax"):
        run = root / "runs" / head
        fake_run(run, head, 0, names=["ash", "oak<b>"])
        x = torch.nn.functional.one_hot(1 - y if head == "softmax" else y, 2).float() * 9  # one is always wrong
        save_file({"x": x, "p": x.double().softmax(1), "y": y}, run / "outputs.safetensors")
        config = Config(data=f"folder:{root / 'photos'}", head=head)
        (run / "config.json").write_text(json.dumps(asdict(config)))
    return [root / "runs" / head for head in ("softmax", "gsoftmax")]


@pytest.mark.parametrize("size, kind", [((20, 30), "png"), ((150, 400), "jpeg")])
def test_examples_have_pictures_while_the_data_is_there(tmp_path, size, kind):
    from PIL import Image

    runs_ = photos(tmp_path, size)
    found = report.from_runs(runs_)["examples"]
    assert found["missing"] == "" and found["unit"] == "image" and set(found["pictures"]) == set("012345")
    begin = f"data:image/{kind};base64,"
    assert all(p["src"].startswith(begin) for p in found["pictures"].values())
    picture = Image.open(io.BytesIO(base64.b64decode(found["pictures"]["4"]["src"].removeprefix(begin))))
    if kind == "png":  # every pixel
        expected = np.random.default_rng([1, 6]).integers(0, 255, (*size, 3))
        assert (np.asarray(picture) == expected).all()
    else:
        assert picture.size == (112, 42)
        assert found["pictures"]["4"]["name"] == "oak<b>/1.png"
    text = report.write(report.from_runs(runs_), tmp_path / "out")[0].read_text("utf-8")
    assert text.count('<img src="data:image') == 6 and "oak<b>" not in text.replace("oak&lt;b&gt;", "")
    shutil.rmtree(tmp_path / "photos")  # as on another machine
    doc = report.from_runs(runs_)
    assert doc["examples"]["pictures"] == {} and "photos" in doc["examples"]["missing"]
    text = report.write(doc, tmp_path / "out")[0].read_text("utf-8")
    assert '<img src="data:' not in text and "The images are not shown: " in text and "test image 4" in text


def test_pictures_are_few_and_small(tmp_path, monkeypatch):
    monkeypatch.setattr(examples, "MOST_PICTURES", 28)  # of which 24 are for labels
    runs_ = photos(tmp_path, (20, 30))
    pictures = report.from_runs(runs_)["examples"]["pictures"]
    assert len(pictures) == 2
    monkeypatch.setattr(examples, "_MOST_BYTES", 1)
    assert sum("src" in p for p in report.from_runs(runs_)["examples"]["pictures"].values()) == 1


# ------------------------------------------------------------------------------------------------- anybody's outputs


def test_outputs_of_two_models_make_a_page_tables_and_figures(tmp_path):
    for name in ("softmax", "gsoftmax"):
        o = fake_outputs(name, 0)
        np.savez(tmp_path / f"{name}.npz", x=o["x"].numpy(), y=o["y"].numpy(), p=o["p"].numpy(), names=NAMES)
    doc = report.from_outputs(tmp_path / "softmax.npz", tmp_path / "gsoftmax.npz")
    assert re.fullmatch(
        r"gsoftmax against softmax, 200 images: error [+−].* points, between .* and .*\. .*\. .* class geometry .*\. "
        r"This is about these trained models; .*\.",
        doc["verdicts"][0],
    )
    paths = report.write(doc, tmp_path / "out", tables=["md", "tex", "csv", "txt"], figures=["svg"], name="plain")
    names = {str(p.relative_to(tmp_path / "out")) for p in paths}
    assert {"report.html", "tables.md", "tables.tex", "tables.txt", "tables/every-class.csv"} <= names
    assert {"figures/x-against-p.svg", "figures/gaussians.svg", "figures/classes-test.svg"} <= names
    with open(tmp_path / "out/tables/every-class.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [r["class"] for r in rows[::2]] == NAMES
    x, y = (fake_outputs("softmax", 0)[k].double().numpy() for k in "xy")
    assert float(rows[4]["compactness"]) == pytest.approx(1 / x[y == 2, 2].std(), rel=1e-9)
    shown = report.terminal(doc)
    assert doc["verdicts"][0][:40] in shown and EVIL in shown and "paired over images" in shown
    few = report.terminal(doc, most=2)  # of every table of classes, not of the others
    assert "... and 8 more rows on the page." in few and shown.count("\nECE % ") == few.count("\nECE % ") == 1
    with pytest.raises(ValueError, match="class 'nobody' is not among the 5 classes"):
        report.write(doc, tmp_path / "out", name="nobody")
    with pytest.raises(ValueError, match="tables must be of md, tex, csv, txt, got 'doc'"):
        report.write(doc, tmp_path / "out", tables=["doc"])
    with pytest.raises(ValueError, match="figures must be of svg, png, pdf, got 'bmp'"):
        report.write(doc, tmp_path / "out", figures=["bmp"])


def test_notes_reach_the_page(tmp_path):
    x, y = np.ones((15, 3)), np.arange(15) % 2 + 1  # too few to be called chance
    x[3] = np.nan
    np.savez(tmp_path / "a.npz", x=x, y=y)
    doc = report.from_outputs(tmp_path / "a.npz")
    text = report.write(doc, tmp_path / "out", tables=["csv"], figures=["svg"])[0].read_text("utf-8")
    assert "1 row with nan or inf left out" in text and "its own output never varies" in text
    assert "no compactness, no class allows it" in doc["verdicts"][0]


# ------------------------------------------------------------------------------------------------------------ tables


def test_tables_are_safe_in_every_format():
    bad = Table("A & B_1", ("", "50 %"), (("=1+1|<b>", 0.5), ("\x1b[31mred", None), ("~^\\{}", -1e-7)))
    assert list(csv.reader(io.StringIO(bad.csv()))) == [
        ["", "50 %"],
        ["'=1+1|<b>", "0.5"],
        ["�[31mred", ""],
        ["~^\\{}", "-1e-07"],
    ]
    assert "\x1b" not in bad.text() and "–" in bad.text()
    assert r"| =1+1\|&lt;b&gt; | 0.5000 |" in bad.markdown() and "<b>" not in bad.markdown()
    tex = bad.latex()
    assert r"\caption{A \& B\_1}" in tex and r"\textasciitilde{}\textasciicircum{}\textbackslash{}\{\}" in tex
    assert r"50 \%" in tex and tex.count(r"\\") == 4


def test_columns_line_up_in_a_terminal():
    lines = Table("t", ("", "value"), (("日本", 1.0), ("ab", 12.0))).text().splitlines()[2:]
    assert lines == ["       value", "日本   1.000", "ab     12.00"]


def test_the_papers_tables_beside_our_runs(tmp_path):
    for k, head in enumerate(["coco-softmax", "coco-gsoftmax(0,1)", "coco-gsoftmax(0,0.5)", "coco-gsoftmax(0,5)"]):
        fake_run(tmp_path / head / "seed-0", "gsoftmax" if k else "softmax", k, multilabel=True)
    found = {t.title.partition(":")[0]: t for t in report.paper_tables(tmp_path)}
    assert list(found) == [f"Table {i}" for i in range(1, 7)]
    assert [len(t.rows) for t in found.values()] == [24, 8, 8, 6, 10, 6]
    row = next(r for r in found["Table 1"].rows if r[0] == "wrn-cifar100-gsoftmax")
    assert row == ("wrn-cifar100-gsoftmax", tables.Shown("17.41", 17.41), None, None, None, "")
    row = next(r for r in found["Table 1"].rows if r[0] == "wrn1100-cifar100-softmax")
    assert row[1].text == "17.60"
    ours = runs.read_result(tmp_path / "coco-softmax" / "seed-0")
    row = next(r for r in found["Table 3"].rows if r[0] == "coco-softmax")
    header = found["Table 3"].header
    assert header[1:15:2] == ("C-P", "C-R", "C-F1", "O-P", "O-R", "O-F1", "mAP (VOC 2012)")
    assert row[header.index("seeds")] == 1 and row[-1].startswith("changed: ")
    assert row[header.index("C-P")].text == "81.3"
    assert row[header.index("C-P, ours")] == tables.Shown(f"{100 * ours['C_P']:.2f}", 100 * ours["C_P"])

    def ap(name):
        from sklearn.metrics import average_precision_score

        o = load_file(tmp_path / name / "seed-0" / "outputs.safetensors")
        return [average_precision_score(o["y"][:, k], o["p"][:, k]) for k in range(5)]

    row = found["Table 5"].rows[0]
    assert row[:2] == ("coco-gsoftmax(0,1)", "0.9060")
    assert row[3].value == pytest.approx(scipy.stats.ttest_rel(ap("coco-gsoftmax(0,1)"), ap("coco-softmax")).pvalue)
    assert found["Table 5"].rows[5][2] is None  # no run of NUS-WIDE
    row = found["Table 6"].rows[0]
    assert row[:3] == ("coco: compactness", "0.9472", "0.0144") and row[5] == 3 and row[8] == 15
    made, paths = report.write_paper_tables(tmp_path, tmp_path / "out", ["md", "tex", "csv"])
    assert len(made) == 6 and len(paths) == 8


# ----------------------------------------------------------------------------------------------------------- figures


def marks(spec, kind):
    """The items of every mark of a kind, mark by mark, as Vega places them."""
    found = []

    def visit(mark):
        if mark.get("role") == "mark" and mark["marktype"] == kind:
            found.append(mark["items"])
        for item in mark["items"]:
            for inner in item.get("items", []):
                visit(inner)

    visit(vl_convert.vegalite_to_scenegraph(spec)["scenegraph"])
    return found


def affine(values, pixels):
    """Whether pixels are a scale's image of the values."""
    fit = np.polyfit(values, pixels, 1)
    return np.abs(np.polyval(fit, values) - pixels).max() < 1e-6


@pytest.mark.parametrize("kind", ["single", "several"])
def test_figures_show_the_document(kind, request):
    doc = embedded(request.getfixturevalue(kind))
    drawn = figures.figures(doc, c=1)
    expected = {"x-against-p", "gaussians", "learned", "averages", "curves", "seeds", "calibration"}
    more = {"forest", "classes-test", "classes-train"} | ({"confusion", "features"} if kind == "single" else set())
    assert set(drawn) == expected | more
    paint = [c.lower() for c in colours(doc["heads"]).values()]
    bars = marks(drawn["averages"], "rect")[0]  # compactness
    assert [b["fill"].lower() for b in bars] == paint
    assert affine(
        [0, *(doc["metrics"]["compactness"][h]["mean"] for h in doc["heads"])], [0, *(b["height"] for b in bars)]
    )
    lines = [items[0]["stroke"].lower() for items in marks(drawn["calibration"], "line")]
    assert lines[1:] == paint  # the first is the diagonal
    run = doc["points"][0]
    points = [i for i, c in enumerate(run["c"]) if c == 1]
    shown = marks(drawn["x-against-p"], "symbol")[0]
    assert affine(sorted(run["x"][i] for i in points), sorted(s["x"] for s in shown))
    assert affine(sorted(run["p"][i] for i in points), sorted((s["y"] for s in shown), reverse=True))
    bars = marks(drawn["classes-train"], "rect")[2]
    train = [g for g in doc["geometry"] if g["split"] == "train"]
    ratio = [np.mean([g["ratio"][c] for g in train if g["head"] == h]) for h in doc["heads"] for c in range(5)]
    assert affine([0, *sorted(ratio)], [0, *sorted(b["width"] for b in bars)])


def test_figures_of_one_seed_show_one_that_has_outputs(single):
    doc = embedded(single)
    for key in ("points", "geometry"):
        doc[key] = [row for row in doc[key] if row["seed"] > 0]
    assert len(marks(figures.figures(doc)["gaussians"], "line")) == 2 * len(HEADS)


def test_gaussians_drawn_are_the_numbers(single):
    doc = embedded(single)
    lines = marks(figures.figures(doc, c=2)["gaussians"], "line")
    first = [next(g for g in doc["geometry"] if g["head"] == h and g["split"] == "test") for h in HEADS]
    pairs = sorted(g[side][2] for g in first for side in ("other", "own"))
    lines.sort(key=lambda line: line[80]["x"])  # by the mean, which scales keep in order
    x = np.array([m + s * np.linspace(-4, 4, 161) for m, s in pairs])
    y = np.array([scipy.stats.norm.pdf(row, *pair) for row, pair in zip(x, pairs, strict=True)])
    assert affine(x.ravel(), np.array([[i["x"] for i in line] for line in lines]).ravel())
    assert affine(y.ravel(), np.array([[i["y"] for i in line] for line in lines]).ravel())


@pytest.mark.parametrize("kind, begins", [("svg", b"<svg"), ("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_a_figure_is_the_same_every_time_and_shows_any_name(single, tmp_path, kind, begins):
    for c in (1, 4):
        a, b = (figures.write(embedded(single), tmp_path / place, [kind], c=c, names=["x-against-p"]) for place in "ab")
        assert [p.name for p in a] == [f"x-against-p.{kind}"] and a[0].read_bytes().startswith(begins)
        assert a[0].read_bytes() == b[0].read_bytes()
        if kind == "svg":  # which is XML and is parsed
            assert f"class {NAMES[c]}" in "".join(ET.parse(a[0]).getroot().itertext())


def test_a_head_has_one_colour():
    assert colours(["softmax", "gsoftmax"]) == {k: v for k, v in colours(HEADS).items() if k != "lsoftmax"}
    many = colours([f"h{i}" for i in range(9)])
    assert len(set(many.values())) == 7  # six and grey


# ------------------------------------------------------------------------------------- what is kept in the repository


def test_readme_pictures_come_from_committed_results(tmp_path):
    doc = json.loads((ROOT / pictures.RESULTS).read_text("utf-8"))
    assert doc["commands"] and doc["environment"]["torch"]
    paths = pictures.draw(ROOT / pictures.RESULTS, tmp_path)
    pages = [path.read_text("utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))]
    others = {"cost.svg", "scaling.svg", "evidence-map.svg", "evidence-forest.svg", "evidence-answers.svg"}
    assert {p.name for p in paths} | others == {p.name for p in (ROOT / pictures.IMAGES).glob("*.svg")}
    assert all(any(name in page for page in pages) for name in others)


def test_the_committed_playground_is_the_one_that_is_made():
    def ours(text):  # all but the library, which changes with its version
        return re.sub(r"<script>(?!\"use strict\").*?</script>", "", text, flags=re.DOTALL)

    committed = (ROOT / "docs" / "playground.html").read_text("utf-8")
    assert ours(committed) == ours(page.playground())
    assert len(committed.encode()) < 1.5e6


def test_tables_of_a_document_need_no_figures(single):
    made = tables.of_document(embedded(single))
    titles = [t.title for t in made]
    assert titles[0] == "Mean ± standard deviation over 3 seeds" and titles[-1] == "Every class"
    assert "gsoftmax minus softmax, paired over classes" in titles
    assert len(made[-1].rows) == 5 * 3 * 2  # classes, heads, splits


# ------------------------------------------------------------------------------------------- pages of unusual documents


def test_a_page_of_many_classes_without_geometry_keeps_the_first(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "a.npz", x=rng.normal(size=(20, 2000)), y=rng.integers(0, 2000, 20))
    doc = report.from_outputs(tmp_path / "a.npz", resamples=0)
    assert doc["geometry"] == []
    shown = embedded(report.write(doc, tmp_path / "out")[0])
    assert shown["classes"] == doc["classes"][:1500]
    assert any("the first 1,500 classes of 2,000" in note for note in shown["notes"])


def test_of_many_classes_the_most_confused_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(examples, "MOST_ORDERED", 11)
    monkeypatch.setattr(examples, "MOST_DRAWN", 4)
    names = [f"class {i}" for i in range(12)]
    path = fake_comparison(tmp_path, seeds=1, names=names, n=300, train_split=False)
    found = embedded(path)["examples"]["confusion"]
    parts = np.zeros((12, 12))
    for of in found["heads"].values():
        for c, j, n, *_ in of["wrong"]:
            parts[c, j] += n / of["images"][c]
    order = found["order"]
    assert len(set(order)) == len(order) in (3, 4)
    first = np.unravel_index(parts.argmax(), parts.shape)
    assert set(first) <= set(order)
    text = path.read_text("utf-8")
    assert f"The {len(order)} classes of the most frequent confusions, of 12." in text
    drawn = figures.figures(embedded(path))["confusion"]
    cells = [len(items) for items in marks(drawn, "rect")]
    inside = [[c, j] for of in found["heads"].values() for c, j, *_ in of["wrong"] if c in order and j in order]
    assert sum(cells) == len(inside) + len(HEADS) * len(order)  # and the diagonals
    assert page.trim(embedded(path))["examples"]["confusion"]["order"] == order
    monkeypatch.setattr(page, "_MOST_CLASSES", 7)
    small = page.trim(report.from_runs([tmp_path]))
    kept = [names.index(name) for name in small["classes"]]
    assert [kept[c] for c in small["examples"]["confusion"]["order"]] == [c for c in order if c in kept]


@pytest.mark.parametrize(
    "data, unit", [("digits", "image"), ("csv:photos.csv", "image"), ("arff:x.arff", "row"), ("npz:x.npz", "row")]
)
def test_an_example_is_called_what_the_dataset_has(tmp_path, data, unit):
    for head in ("softmax", "gsoftmax"):
        fake_run(tmp_path / head, head, 0)
        (tmp_path / head / "config.json").write_text(json.dumps(asdict(Config(head=head, data=data))))
    found = report.from_runs([tmp_path / "softmax", tmp_path / "gsoftmax"])["examples"]
    assert found["pictures"] == {} and found["unit"] == unit


def test_every_measure_on_a_page_has_a_meaning(tmp_path, single, several):
    for path in (single, several):
        doc = embedded(path)
        told = [title for title, _ in words.meanings(doc)]
        labels = [page.measures.find(key).label for key in (*doc["metrics"], *doc["measures"])]
        assert set(labels) <= set(told)
        assert all(f"<dt>{title}</dt>" in path.read_text("utf-8") for title in told)
    assert not set(page.measures.MEASURES) - set(words._MEANINGS) - {"error_of_guessing"}


def test_pages_of_models_speak_of_models(tmp_path):
    for name in ("softmax", "gsoftmax"):
        o = fake_outputs(name, 0)
        np.savez(tmp_path / f"{name}.npz", x=o["x"].numpy(), y=o["y"].numpy())
    doc = report.from_outputs(tmp_path / "softmax.npz", tmp_path / "gsoftmax.npz", resamples=10)
    body = report.write(doc, tmp_path)[0].read_text("utf-8").split('<script type="application/json"')[0]
    assert "Right where softmax is wrong" in body and "wrong: " in body and "0/1" not in body
    assert "<h2>Models</h2>" in body and "Heads and seeds" not in body and "All 2 models agree" in body
    assert {t.header[1] for t in tables.of_document(doc) if t.header[0] == "class"} == {"model", "taken for"}
    drawn = json.dumps(figures.specs.for_page(doc))
    assert '"field": "seed", "type": "nominal", "title"' not in drawn and '"title": "head"' not in drawn
