"""The evidence pages follow from the committed rows, and the script's numbers agree with SciPy's."""

from __future__ import annotations

import json

import numpy as np
import pytest
import scipy.stats

from evidence import run, tables
from gsoftmax.config import Config


def test_the_pages_say_what_the_rows_say():
    text = tables.blocks()
    for page in tables.PAGES:
        found = page.read_text("utf-8")
        assert tables.filled(found, text) == found, f"{page.name}: make evidence-tables"
        assert tables.MARKS.search(found)


def test_every_study_is_a_valid_configuration():
    for study in run.studies().values():
        for setting in study.settings:
            assert isinstance(study.config(setting, 3), Config) and study.config(setting, 3).seed == 3
        assert len(study.seeds) >= 3
        tuning = study.name.startswith("tune-")
        assert (study.config(setting, 0).evaluate_on == "val") == tuning
        assert (min(study.seeds) >= 1000) == tuning  # seeds for choosing are used nowhere else


def test_committed_rows_are_whole_and_once():
    for name, study in run.studies().items():
        rows = run.read_rows(name)
        keys = [(row["setting"], row["seed"]) for row in rows]
        assert len(set(keys)) == len(keys)
        for row in rows:
            assert row["setting"] in study.settings and row["seed"] in study.seeds
            assert all(np.isfinite(v) for v in row["metrics"].values()) and row["commit"] and row["torch"]


@pytest.fixture
def rows(tmp_path):
    generator = np.random.default_rng(0)
    made = []
    for seed in range(8):
        for setting, shift in (("a", 0.0), ("b", 0.01), ("c", -0.3)):
            metrics = {m: 0.5 + shift + 0.01 * generator.standard_normal() for m in tables.SINGLE} | {"seconds": 1.0}
            made.append({"setting": setting, "seed": seed, "metrics": metrics, "gpu": None, "processor": "x"})
            made[-1] |= {"torch": "2", "gsoftmax": "0"}
    return made


def test_differences_agree_with_scipy(rows):
    study = run.Study("s", "digits", {}, range(8), {"a": {}, "b": {}, "c": {}})
    found = tables.differences(study, rows)
    assert len(found) == 2 * len(tables.SINGLE)
    error = {s: 100 * np.array([r["metrics"]["error"] for r in rows if r["setting"] == s]) for s in "abc"}
    d = next(d for d in found if (d.setting, d.metric) == ("c", "error"))
    expected = scipy.stats.ttest_rel(error["c"], error["a"])
    assert d.test.p == pytest.approx(expected.pvalue) and d.test.difference == pytest.approx(-30, abs=1)
    assert d.verdict == "better"  # less error
    assert next(d for d in found if (d.setting, d.metric) == ("c", "ratio")).verdict == "worse"
    ps = [d.test.p for d in found]
    assert min(d.p for d in found) == pytest.approx(min(ps) * len(ps), rel=1e-9)  # Holm: the smallest times all
    text = tables.study_tables(study, rows)
    assert "| c | error % | -" in text and "| better |" in text and "24 runs, 1.000 s each" in text
    assert "| s | c | 8 |" in tables.summary({"s": (study, rows)})


def test_pairs_are_by_seed_and_half_a_pair_does_not_count(rows):
    study = run.Study("s", "digits", {}, range(8), {"a": {}, "b": {}})
    less = [r for r in rows if (r["setting"], r["seed"]) != ("b", 3)]
    assert {d.test.n for d in tables.differences(study, less[::-1])} == {7}


def test_runs_are_appended_once(tmp_path, monkeypatch):
    """A real study in small: multi-label, with the numbers of every label."""
    study = run.Study(
        "small", "digits-mosaic", {"epochs": 1, "train_fraction": 0.1, "device": "cpu"}, range(2), {"softmax": {}}
    )
    row = run.one(study, "softmax", 1, {})
    assert row["setting"] == "softmax" and 0 < row["metrics"]["mAP"] < 1 and len(row["labels"]["ap"]) == 10
    assert np.mean(row["labels"]["ap"]) == pytest.approx(row["metrics"]["mAP"], abs=1e-6)
    (tmp_path / "small.jsonl").write_text(json.dumps(row) + "\n")
    assert list(run.missing(study, tmp_path)) == [("softmax", 0)]
