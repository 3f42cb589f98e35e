"""The evidence pages follow from the committed rows, and the script's numbers agree with SciPy's."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from evidence import answers, cost, figures, heads, pages, prepare, run, tables, tuned
from gsoftmax import data, measures, recipes, runs, summary, tune, workers
from gsoftmax.config import Config
from gsoftmax.significance import holm
from gsoftmax.tables import p_value


def test_the_pages_say_what_the_rows_say():
    for page, text in pages.pages().items():
        assert page.read_text("utf-8") == text, f"{page.name}: make evidence-tables"
    assert all(pages.MARKS.search(page.read_text("utf-8")) for page in pages.MARKED)
    there = {page for page in answers.PAGES.iterdir() if page.name not in pages.BY_HAND}
    assert there == set(answers.pages())


def test_the_words_of_the_first_page_say_what_the_rows_say():
    def test(study, head, against, metric="error"):
        return answers.compared(tuned.read(study)[1], head, against, metric)

    def swept(study, head, key):
        return [np.mean(p["values"]) for p in tuned.read(study)[0]["heads"][head]["sweeps"][key]]

    def mean(study, head, metric="error", middle=np.mean):
        return middle([*tables.values(tuned.read(study)[1], metric)[head].values()])

    def gained(t):  # points of error and their interval, without the minus
        return f"{-t.difference:.2f} points [{-t.high:.2f}, {-t.low:.2f}]"

    leads, hardest = {}, {}  # by study and head with Gaussians: over the rival that it leads by least; the largest p
    for name, study in answers.finished().items():
        metric = tuned.read(name)[0]["measure"]
        uses = [*filter(answers.has_gaussians, study.heads)]
        for head in uses:
            against = {rival: test(name, head, rival, metric) for rival in study.heads if rival not in uses}
            sign = -1 if measures.find(metric).smaller_is_better else 1
            leads[name, head] = min(((sign * t.difference, rival, t.p) for rival, t in against.items()))
            hardest[name, head] = max(t.p for t in against.values())
    rivals = {name: [*itertools.filterfalse(answers.has_gaussians, s.heads)] for name, s in answers.finished().items()}
    several = {name for name, head in leads if "G-softmax" in head and len(rivals[name]) > 1}
    corrected = dict(zip(leads, holm([p if lead > 0 else 1.0 for lead, _, p in leads.values()]), strict=True))
    beats = {key for key, p in corrected.items() if p < 0.05}
    assert [key for key in beats if len(rivals[key[0]]) > 1] == [("tiny", "G-softmax")]
    assert beats - {("tiny", "G-softmax")} == {("noise", "G-softmax"), ("noise", "plausible labels")}
    every = holm([hardest[key] if leads[key][0] > 0 else 1.0 for key in leads])  # and every rival, not only the closest
    assert {key for key, p in zip(leads, every, strict=True) if p < 0.05} == beats
    tiny = {rival: test("tiny", "G-softmax", rival) for rival in rivals["tiny"]}
    first, others = tiny["softmax"], [t for rival, t in tiny.items() if rival != "softmax"]
    assert leads["tiny", "G-softmax"][1] == "softmax" and (first.n, {t.n for t in others}) == (40, {10})
    assert all(test("tiny", rival, "softmax").low > 0 for rival in rivals["tiny"][1:])
    found = tuned.read("tiny")[0]["heads"]
    assert found["G-softmax"]["chosen"] == found["softmax"]["chosen"] == {}  # the settings of the first trial
    assert test("tiny", "margin in Φ", "softmax").n == 10 and test("tiny", "margin in Φ", "softmax").p > 0.05
    geometry = [[mean("tiny", h, "compactness"), mean("tiny", h, "separability", np.median)] for h in found]
    apart = test("tiny", "G-softmax", "softmax", "dprime")
    scene, scene_p = leads["scene", "G-softmax, one output"], corrected["scene", "G-softmax, one output"]
    assert scene[1] == "ZLPR" and scene_p > 0.05 and apart.low > 0
    noise = {head: test("noise", head, "softmax") for head in ("plausible labels", "G-softmax")}
    assert {t.n for t in noise.values()} == {16}
    with_gce = [name for name, study in answers.finished().items() if "GCE" in study.heads]
    assert len(with_gce) == 3 and "noise" not in with_gce
    for name in with_gce:
        assert all(test(name, "GCE", rival).high < 0 for rival in ("softmax", "plausible labels"))
    paper = [r.published["error"] for n, r in recipes.recipes().items() if n.startswith("tiny-g")]
    paper = recipes.find("tiny-softmax").published["error"] - min(paper)
    margin, digits = test("digits-margin", "G-softmax", "softmax"), test("digits-heads", "G-softmax", "softmax")
    assert digits.p > 0.05 > margin.p and test("digits-margin", "margin in Φ", "softmax").p > 0.05
    adjusted = test("unequal", "logit adjustment", "softmax")
    gaussian = test("unequal", "G-softmax", "softmax")
    smooth = swept("unequal", "logit adjustment", "label_smoothing")
    labels = [a for a in answers.answers() if a.question.metric == "mAP"]
    worse = [a for a in labels if a.p < 0.05 and a.test.difference < 0]
    one = {name: test(name, "G-softmax, one output", "BCE", "mAP") for name in ("scene", "medical", "birds", "enron")}
    medical = test("medical", "ASL", "BCE", "mAP")
    assert (len(labels), len(worse)) == (7, 2) and not any(a.p < 0.05 and a.test.difference > 0 for a in labels)
    assert [t.high < 0 and t.p < 0.05 for t in one.values()] == [False, True, True, True] and one["scene"].p < 0.05
    asked = answers.answers()
    assert len(asked) == sum(len(study.questions) for study in tuned.studies().values())
    few = {head: test("small", head, "softmax") for head in tuned.studies()["small"].heads if head != "softmax"}
    few_p = next(a.p for a in asked if a.study.name == "small")
    assert min(few, key=lambda head: few[head].difference) == "L-softmax" and few_p > 0.05 > few["L-softmax"].p
    assert min(rivals["digits-heads"], key=lambda head: mean("digits-heads", head)) == "L-softmax"
    yes = {(a.study.name, a.question.head) for a in asked if "Yes" in a.words}
    assert {head for _, head in yes} == {"plausible labels", "G-softmax"} and ("tiny", "G-softmax") in yes
    compared = ("GCE", "plausible labels", "G-softmax")
    noisy = [{h: test(f"digits-noise-{n}", h, "softmax") for h in compared} for n in (20, 40)]
    assert all(test(f"digits-noise-{n}", "plausible labels", "GCE").low > 0 for n in (20, 40))
    small = [-test("small-noise", head, "softmax").difference for head in compared[:2]]
    of_asl = [test(a.study.name, "ASL", "BCE", "C_F1_mean") for a in labels]
    assert sum(t.low > 0 for t in of_asl) == 5 and sum(t.high < 0 for t in of_asl) == 2
    page, readme = (" ".join(p.read_text("utf-8").split()) for p in (pages.MARKED[0], tables.ROOT / "README.md"))
    for phrase in (
        f"G-softmax beats all of its rivals in one of {len(several)} studies with several rivals: on Tiny ImageNet",
        f"its error is {mean('tiny', 'G-softmax'):.2f} %, and that of softmax, the closest rival, "
        f"{mean('tiny', 'softmax'):.2f} %.",
        f"{gained(first)}, {first.n} pairs, p = {p_value(first.p)}, and p = {corrected['tiny', 'G-softmax']:.4f} after "
        f"Holm's correction over {len(leads)} comparisons",
        f"In the other {len(several) - 1} studies",
        f"G-softmax is {-first.difference:.2f} points better than softmax, and "
        f"{min(-t.difference for t in others):.2f} to {max(-t.difference for t in others):.2f} points better than "
        f"ArcFace, CosFace, L-softmax and L-GM (10 pairs each, p at most {p_value(max(t.p for t in others))};",
        f"The paper reports up to {paper:.2f} points with ResNet-101",
        "compactness is {1:.2f} instead of {0:.2f} and".format(*(c for c, _ in geometry)),
        "separability {1:.1f} instead of {0:.1f} (medians".format(*(s for _, s in geometry)),
        f"d′ is {100 * apart.difference / mean('tiny', 'softmax', 'dprime'):.0f} % higher",
        f"its lead of {scene[0]:.2f} points over ZLPR is not significant (p = {scene_p:.2f} after the correction above",
        f"the weights are {gained(noise['plausible labels'])} and G-softmax, which is not a primary question there, "
        f"{gained(noise['G-softmax'])} better than softmax, 16 pairs each",
        f"G-softmax is {margin.difference:.1f} points worse",
        f"G-softmax is {-gaussian.difference:.1f} points better than softmax, and "
        f"{test('unequal', 'G-softmax', 'logit adjustment').difference:.1f} points worse than logit adjustment",
        f"gains {-test('unequal', 'softmax, undecayed bias', 'softmax').difference:.1f} points over softmax",
        f"costs logit adjustment {smooth[1] - smooth[0]:.1f} points",
        f"one output per label is {one['scene'].difference:.2f} points of mAP above BCE",
        f"All {sum(len(s.questions) for s in tuned.studies().values())} primary questions are answered",
        f"the error of G-softmax is {few['G-softmax'].difference:.2f} points above that of softmax "
        f"[{few['G-softmax'].low:.2f}, {few['G-softmax'].high:.2f}], {few['G-softmax'].n} pairs, p = "
        f"{p_value(few['G-softmax'].p)}, and p = {p_value(few_p)} after Holm's correction over the primary questions",
        "L-softmax has the lowest error, {} points below softmax {}".format(
            *gained(few["L-softmax"]).split(" points ")
        ),
        f"but with 200 classes it is {test('tiny', 'L-softmax', 'softmax').difference:.1f} points worse than softmax",
        "it is {:.1f} and {:.1f} points better than softmax".format(*(-of["GCE"].difference for of in noisy)),
        "are {:.1f} and {:.1f} points better".format(*(-of["plausible labels"].difference for of in noisy)),
        "`gce` is {:.1f} and the weights are {:.1f} points better than softmax".format(*small),
        "and G-softmax {:.1f} and {:.1f} points worse".format(*(of["G-softmax"].difference for of in noisy)),
        f"by {min(t.difference for t in of_asl if t.low > 0):.0f} to {max(t.difference for t in of_asl):.0f} points",
    ):
        assert phrase in page, phrase
    cifar10 = tables.differences(*tables.read()["cifar10"])
    chosen = next(d.test for d in cifar10 if (d.setting, d.metric) == ("G λ=0.5 (0, 4), chosen", "error"))
    for phrase in (
        f"{chosen.difference:+.2f} points of error, between {chosen.low:+.2f} and {chosen.high:+.2f}",
        f"lowers the error by {-adjusted.difference:.1f} points, G-softmax by {-gaussian.difference:.1f}.",
        f"lowers the error by {-noisy[1]['GCE'].difference:.1f} points; G-softmax raises it by "
        f"{noisy[1]['G-softmax'].difference:.1f}.",
        f"ASL gains {medical.difference:.1f} points on one of them",
        f"It lowers the error of softmax, {mean('tiny', 'softmax'):.2f} %, by {-first.difference:.2f} points, between "
        f"{-first.high:.2f} and {-first.low:.2f} over {first.n} pairs.",
        f"is {few['G-softmax'].difference:.2f} points above that of softmax (p = {p_value(few_p)} after correction), "
        f"and that of L-softmax {-few['L-softmax'].difference:.2f} below.",
        f"where `gce` was not trained, G-softmax lowers it by {-noise['G-softmax'].difference:.1f}.",
    ):
        assert phrase in readme, phrase
    page = " ".join((tables.ROOT / "docs" / "should-i-use-this.md").read_text("utf-8").split()).replace("−", "-")
    scene = test("scene", "ASL", "BCE", "mAP")
    f1 = {name: test(name, "ASL", "BCE", "C_F1_mean").difference for name in ("birds", "mosaic")}
    for phrase in (
        f"{chosen.difference:+.2f} points of error, between {chosen.low:+.2f} and {chosen.high:+.2f}",
        f"{-adjusted.difference:.1f} points below softmax; G-softmax {-gaussian.difference:.1f} points below softmax",
        "{:.1f} and {:.1f} points of error below softmax; ".format(*(-of["GCE"].difference for of in noisy))
        + "G-softmax {:.1f} and {:.1f} points above softmax".format(*(of["G-softmax"].difference for of in noisy)),
        f"ASL {medical.difference:+.1f} points on `medical`, {scene.difference:.1f} on `scene`",
        f"`birds` {f1['birds']:+.1f}, `mosaic` {f1['mosaic']:.1f}",
        f"In {len(several)} studies of this repository every head",
        f"{few['G-softmax'].n} seeds: G-softmax {few['G-softmax'].difference:.2f} points of error above softmax (p = "
        f"{p_value(few_p)} after correction), L-softmax {-few['L-softmax'].difference:.2f} below",
        f"its error is {-first.difference:.2f} points below softmax's {mean('tiny', 'softmax'):.2f} %",
        f"{first.n} seeds: {first.difference:.2f} points of error against softmax, between {first.low:.2f} and "
        f"{first.high:.2f};",
        f"40 % wrong, {-noise['G-softmax'].difference:.1f} points below, and `gce` was not trained there",
    ):
        assert phrase in page, phrase


def test_the_words_about_sensitivity_and_recipes_say_what_the_rows_say():
    page = " ".join((answers.PAGES / "sensitivity.md").read_text("utf-8").split())
    lost = {}
    for study in tuned.studies().values():
        of = {head: np.median(v) - min(v) for head, v in answers.first_seeds(study).items()}
        if any("G-softmax" in head for head in of):
            lost[study.name] = of
    reference = {name: next(iter(of.values())) for name, of in lost.items()}
    gaussian = {name: next(v for head, v in of.items() if "G-softmax" in head) for name, of in lost.items()}
    signs = [np.sign(round(gaussian[name] - reference[name], 2)) for name in lost]
    zlpr = [of["ZLPR"] for of in lost.values() if "ZLPR" in of]
    assert len(zlpr) == 7
    assert all(max(of[head] for of in lost.values() if head in of) > max(zlpr) for head in ("BCE", "ASL"))
    told = tuned.read("medical")[0]
    metrics = {told["measure"]: {head: {"values": [0]} for head in told["heads"]}}
    found = summary.tuning_tables({"tuning": told, "metrics": metrics})[-1].rows
    factors = [row[5] for row in found if row[0] == "lr"]
    assert len(factors) == 6 and not any("≥" in of.text for of in factors)
    for phrase in (
        f"less than one of the reference in {signs.count(-1)} of {len(signs)} studies, more in {signs.count(1)}, and "
        f"the same in {signs.count(0)}",
        f"at most {max(zlpr):.1f} points of mAP below",
        f"more than a factor of {max(of.value for of in factors):.1f} in the",
    ):
        assert phrase in page, phrase
    found = answers.as_they_are()
    assert {*found} >= {"scene", "emotions", "enron", "medical", "birds", "cal500", "mosaic", "digits-heads"}
    for name, tests in found.items():  # in points, of error or mAP
        error = tuned.read(name)[0]["measure"] == "error"
        assert all((test.high < 3) if error else (test.low > -3) for *_, test in tests), name
    of = json.loads((run.ROWS / "repeat.json").read_text("utf-8"))
    more = 100 * (of["seconds"]["deterministic"] / of["seconds"]["default"] - 1)
    assert of["deterministic"]["largest difference"] == 0
    page = " ".join((answers.PAGES / "protocol.md").read_text("utf-8").split())
    apart = of["default"]["largest difference"]
    assert f"were up to {apart:.2f} points apart. It takes {more:.1f} % more time" in page


def test_tuned_studies_are_declared_whole():
    for name, study in tuned.studies().items():
        assert isinstance(study.config({}), Config) and tune.parse_space(study.space) and study.seeds >= 10, name
        assert {head for q in study.questions for head in (q.head, q.against)} <= set(study.heads), name
        assert set(study.more) <= set(study.heads) and len(study.questions) <= 2


def trial_rows(name):
    """The trials of a finished study as `STUDY-trials.jsonl` had them before."""
    told, rows = tuned.read(name)
    where = {row["setting"]: {key: row[key] for key in (*run.PROVENANCE, "commit")} for row in rows}
    found = []
    for head, of in told["heads"].items():
        for index, trial in enumerate(of["trials"]):
            for k, value in enumerate(trial["values"]):
                row = {"setting": head, "trial": index, "seed": tune.FIRST_SEED + k, "settings": trial["settings"]}
                found.append(row | {told["measure"]: None if value is None else value / 100} | where[head])
    return found


def write_trials(folder, name, rows):
    (folder / f"{name}-trials.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("name", ["tiny", "noise"])
def test_committed_trials_are_not_trained_again(name, finished, tmp_path, monkeypatch):
    rows = trial_rows(name)
    x, y = np.zeros((4096, 32, 32, 3), "uint8"), np.arange(4096) % 2  # more than a batch
    np.savez(tmp_path / "other.npz", x_train=x, y_train=y, x_test=x, y_test=y)  # the settings are what is restored
    study, other = tuned.studies()[name], f"npz:{tmp_path / 'other.npz'}"
    plan = study.tuning({"tiny-imagenet": other, "cifar10": other}, tmp_path / "runs")
    if not finished:  # as after a signal between the trials and the test set
        (tmp_path / "rows").mkdir()
        monkeypatch.setattr(tuned, "TUNED", tmp_path / "rows")
        for row in rows:
            row["settings"] = study.settings(plan.trials[study.heads[row["setting"]]][row["trial"]].config)
        write_trials(tmp_path / "rows", name, rows)
    tuned.restore_trials(study, plan)
    assert len([*(plan.out / "tuning").rglob("config.json")]) == len(rows) > 30
    for row in rows[::7]:
        trial = plan.trials[study.heads[row["setting"]]][row["trial"]]
        task = workers.Task(trial.config.override({"seed": row["seed"]}), trial.folder / f"seed-{row['seed']}", None)
        assert workers.is_done(task) and runs.read_result(task.out)["error"] == pytest.approx(row["error"])
        assert run.where(task.out)["commit"] == row["commit"]


def test_a_study_without_rows_on_the_test_set_has_a_page(tmp_path, monkeypatch):
    told = tuned.read("noise")[0]
    write_trials(tmp_path, "noise", trial_rows("noise"))
    monkeypatch.setattr(answers, "TUNED", tmp_path)
    (page,) = answers.pages().values()
    assert page.startswith("# noise\n") and page.count("Not answered yet.") == 1
    for head, of in told["heads"].items():
        best = min(np.mean(trial["values"]) for trial in of["trials"] if len(trial["values"]) == 4)
        assert f"| {head} | {best:.2f} ± " in page


@pytest.mark.slow
def test_a_tuned_study_continues_from_its_committed_files(tmp_path, monkeypatch):
    changes = {"epochs": 1, "train_fraction": 0.2, "device": "cpu"}
    question = tuned.Question("gsoftmax", "softmax", "error", "z", "?")
    study = tuned.TunedStudy("s", "", [question], "digits", changes, {"softmax": "softmax", "gsoftmax": "gsoftmax"},
                             "lr=0.3|0.4", 2, 2, more={"softmax": 3},
                             tested={"evaluate_on": "val", "val_fraction": 0.3})  # fmt: skip
    monkeypatch.setattr(tuned, "studies", lambda: {"s": study})
    monkeypatch.setattr(tuned, "TUNED", tmp_path / "rows")
    (tmp_path / "rows").mkdir()
    train, trained = workers.train, []

    def again(name, most=99):
        def counted(config, *words, **options):
            if len(trained) == most:
                raise KeyboardInterrupt  # as Ctrl-C, or when the time is over
            trained.append(config)
            return train(config, *words, **options)

        trained.clear()
        monkeypatch.setattr(workers, "train", counted)
        with contextlib.suppress(KeyboardInterrupt):
            tuned.train(["s"], {}, tmp_path / name, 1)
        return sorted((c.head, c.seed) for c in trained)

    trials, rows_file = 2 * tune.halving(2), tmp_path / "rows" / "s.jsonl"
    assert len(again("a", trials - 1)) == trials - 1 and not rows_file.exists()
    found = again("b")  # an empty folder: the last trial, sweeps and the runs on the test set
    assert sum(seed >= tune.FIRST_SEED for _, seed in found) == 1 + 2 * 2 * tune.SWEEP_SEEDS
    finalists = [c for c in trained if c.seed < tune.FIRST_SEED]
    assert {(c.head, c.seed) for c in finalists} == {("softmax", 2), *((h, s) for h in study.heads for s in range(2))}
    assert {(c.evaluate_on, c.val_fraction) for c in finalists} == {("val", 0.3)}
    assert not (tmp_path / "rows" / "s-trials.jsonl").exists()
    rows = run.read_rows("s", tmp_path / "rows")
    rows_file.write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    assert again("c", 0) == [] and run.read_rows("s", tmp_path / "rows") == rows[1:]
    assert again("d") == [("softmax", 0)]
    found = run.read_rows("s", tmp_path / "rows")
    assert [row["metrics"]["error"] for row in found] == [row["metrics"]["error"] for row in rows]
    told = tuned.read("s")[0]
    told["heads"]["softmax"]["chosen"] = {"lr": 7.0}
    (tmp_path / "rows" / "s.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match="softmax has chosen another setting than in its rows"):
        tuned.train(["s"], {}, tmp_path / "e", 1)


def test_committed_trials_are_the_same_for_every_head():
    for name, study in answers.finished().items():
        told, rows = tuned.read(name)
        shared = [
            [{k: t["settings"].get(k) for k in told["space"]} for t in h["trials"]] for h in told["heads"].values()
        ]
        assert list(told["heads"]) == list(study.heads) and len(shared[0]) == study.trials == told["asked"]
        assert all(trials == shared[0] for trials in shared)
        seeds = [sorted(len(t["values"]) for t in head["trials"]) for head in told["heads"].values()]
        assert all(of == seeds[0] for of in seeds)
        for head in told["heads"].values():  # chosen by the validation split, among the trials with most seeds
            sign = 1 if told["measure"] == "error" else -1
            last = [
                t for t in head["trials"] if len(t["values"]) == max(map(len, (t["values"] for t in head["trials"])))
            ]
            assert head["chosen"] == min(last, key=lambda t: sign * np.mean(t["values"]))["settings"]
        keys = [(row["setting"], row["seed"]) for row in rows]
        assert len(set(keys)) == len(keys) and {setting for setting, _ in keys} == set(study.heads)
        assert all(row["commit"] and row["torch"] and row["seed"] < tune.FIRST_SEED for row in rows)


def test_answers_agree_with_scipy():
    found = answers.answers()
    ps = [a.test.p for a in found]
    order = np.argsort(ps)
    steps = np.maximum.accumulate([(len(ps) - k) * ps[i] for k, i in enumerate(order)])
    for k, i in enumerate(order):
        assert found[i].p == pytest.approx(min(1.0, steps[k]))
    for a in found:
        of = {}
        for row in tuned.read(a.study.name)[1]:
            of.setdefault(row["setting"], {})[row["seed"]] = 100 * row["metrics"][a.question.metric]
        seeds = sorted(of[a.question.head].keys() & of[a.question.against].keys())
        expected = scipy.stats.ttest_rel(
            *([of[head][s] for s in seeds] for head in (a.question.head, a.question.against))
        )
        assert (a.test.p, a.test.t, a.test.n) == (
            pytest.approx(expected.pvalue),
            pytest.approx(expected.statistic),
            len(seeds),
        )


def test_a_bias_without_decay_is_not_decayed():
    head = heads.FreeBias(3, 2, decay=0.1)
    head.free.data.fill_(2.0)
    h, target = torch.zeros(4, 3), torch.tensor([0, 1, 0, 1])
    head.bias.data.zero_()  # both classes are as likely as they are frequent: the loss alone leaves the bias alone
    optimizer = torch.optim.SGD([head.free], lr=0.5, weight_decay=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        head.loss(h, target).backward()
        optimizer.step()
    torch.testing.assert_close(head.free.detach(), torch.full((2,), 2.0))


def test_a_wrong_label_weighs_less():
    generator = torch.Generator().manual_seed(0)
    centres = 4 * torch.eye(3)
    y = torch.randint(3, (600,), generator=generator)
    h = centres[y] + torch.randn(600, 3, generator=generator)
    wrong = torch.rand(600, generator=generator) < 0.3
    target = torch.where(wrong, (y + 1) % 3, y)
    head = heads.Suspicious(3, 3, warmup=0, momentum=0.5)
    head.weight.data, head.bias.data = torch.eye(3), torch.zeros(3)
    for _ in range(5):
        head.loss(h, target)
    weight = head.weigh(head(h), target)
    assert weight[wrong].mean() < 0.5 < 0.8 < weight[~wrong].mean()


def test_the_words_above_the_tables_say_what_the_rows_say():
    found = tables.read()
    of = {(name, d.setting, d.metric): d.test for name, pair in found.items() for d in tables.differences(*pair)}
    chosen = of["cifar10", "G λ=0.5 (0, 4), chosen", "error"]
    own = [
        of["cifar10", f"G λ={lam} (0, 1){how}", "error"].difference for lam in ("0.5", "1") for how in ("", ", fixed")
    ]
    calm = [f"G λ={lam}" for lam in ("0.5 (0, 4), chosen", "1 (0, 1), fixed", "0.5 (0, 1), fixed")]
    nll, ece = ([-of["cifar10", setting, metric].difference for setting in calm] for metric in ("nll", "ece"))
    unequal = -of["imbalance-again", "G λ=4 (0, 1), chosen", "error"].difference
    told = -of["imbalance-again", "softmax, adjusted", "error"].difference
    added = of["imbalance-adjusted", "G λ=4 (0, 1), adjusted", "error"]
    mosaic = [of["mosaic", "G λ=4, paired, chosen", metric] for metric in ("C_F1_mean", "O_F1", "mAP")]
    both = ("softmax", "G λ=1 (0, 1)")
    of_seeds = {
        m: tables.values(found["cifar10"][1], m) for m in ("compactness", "separability", "relative_sigma", "dprime")
    }
    geometry = {m: [v.mean() for v in tables.on_common_seeds(*(of[s] for s in both))] for m, of in of_seeds.items()}
    sigma = [1 / v for v in geometry["compactness"]]
    gap = [s / r for s, r in zip(sigma, geometry["relative_sigma"], strict=True)]  # to the nearest impostor
    steps = [v["ratio"] for head, v in tables.read_cost()["heads"].items() if head.startswith("G ")]
    assert added.low < 0 < added.high and mosaic[2].low < 0 < mosaic[2].high and {n.n for n in mosaic} == {20}
    assert chosen.n == 100 and f"{mosaic[0].difference:.1f}" == f"{mosaic[1].difference:.1f}"
    phrases = (
        f"differs by {chosen.difference:+.2f} points, with an interval from {chosen.low:+.2f} to {chosen.high:+.2f}",
        f"own differ by {min(own):+.2f} to {max(own):+.2f}, and tracked Gaussians by "
        f"{of['cifar10', 'G λ=1, tracked', 'error'].difference:+.2f}",
        f"the error is {unequal:.1f} points lower than softmax's",
        f"and {-of['imbalance-longer', 'G λ=4 (0, 1)', 'error'].difference:.1f} points when both are trained four",
        f"Logit adjustment, which has nothing to tune, is {told:.1f} points lower",
        f"{of['scene', 'G λ=16, paired, chosen', 'mAP'].difference:.1f} points of mAP on `scene` with λ = 16",
        f"no difference in mAP, and {mosaic[0].difference:.1f} points of the F1s with λ = 4",
        f"NLL (by {min(nll):.3f} to {max(nll):.3f}) and ECE (by {min(ece):.1f} to {max(ece):.1f} points)",
        f"the deviation is {100 * (1 - sigma[1] / sigma[0]):.0f} % smaller",
        "(compactness {1:.2f} instead of {0:.2f})".format(*geometry["compactness"]),
        f"nearest impostor is {100 * (1 - gap[1] / gap[0]):.0f} % smaller ({gap[1]:.1f} instead of {gap[0]:.1f})",
        "relative σ rises from {:.3f} to {:.3f}".format(*geometry["relative_sigma"]),
        "d′ falls from {:.2f} to {:.2f}".format(*geometry["dprime"]),
        "from {:.1f} to {:.1f}".format(*geometry["separability"]),
        f"`cifar10-fast` is {100 * (1 - max(steps)):.0f} % shorter",
    )
    published = {name: r.published["error"] for name, r in recipes.recipes().items() if "error" in r.published}
    gains = {n: published[f"{n.split('-gsoftmax')[0]}-softmax"] - v for n, v in published.items() if "-gsoftmax" in n}
    cifar = [gain for name, gain in gains.items() if "cifar" in name]
    phrases += (
        f"over softmax are {min(cifar):.2f} to {max(cifar):.2f} points of error on CIFAR and up to "
        f"{max(gains.values()):.2f} on Tiny ImageNet",
    )
    page = " ".join((answers.PAGES / "earlier.md").read_text("utf-8").split())
    for phrase in phrases:
        assert phrase in page, phrase


def test_the_figures_show_what_the_rows_say():
    assert figures.outdated(figures.drawn() | {answers.FOREST: answers.draw_forest()}) == [], "make evidence-tables"


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
            assert row["commit"] and row["torch"] and ("metrics" in row) != ("diverged" in row)
            assert all(np.isfinite(v) for v in row.get("metrics", {}).values())


@pytest.fixture
def rows():
    shifts = {"a": 0.0, "b": 0.01, "c": -0.3}
    settings = {setting: dict.fromkeys(measures.SINGLE, 0.5 + shift) for setting, shift in shifts.items()}
    return made(settings, range(8), single(), seconds=1.0)


def test_differences_agree_with_scipy(rows):
    study = run.Study("s", "digits", {}, range(8), {"a": {}, "b": {}, "c": {}})
    found = tables.differences(study, rows)
    assert len(found) == 2 * len(measures.SINGLE)
    error = {s: 100 * np.array([r["metrics"]["error"] for r in rows if r["setting"] == s]) for s in "abc"}
    d = next(d for d in found if (d.setting, d.metric) == ("c", "error"))
    expected = scipy.stats.ttest_rel(error["c"], error["a"])
    assert d.test.p == pytest.approx(expected.pvalue) and d.test.difference == pytest.approx(-30, abs=1)
    assert d.verdict == "better"  # less error
    assert next(d for d in found if (d.setting, d.metric) == ("c", "ratio")).verdict == "worse"
    ps = [d.test.p for d in found]
    assert min(d.p for d in found) == pytest.approx(min(ps) * len(ps), rel=1e-9)  # Holm: the smallest times all
    text = tables.study_tables(study, rows)
    assert f"**{tables.span(d.test)} better**" in text and "24 runs, 1.000 s each" in text
    unsure = next(d for d in found if not d.p < 0.05)  # b is one deviation away
    assert f"| {tables.span(unsure.test)} |" in text
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


# ---------------------------------------------------------------------------------------------- rows that are made up

WHERE = {"gpu": None, "processor": "x", "torch": "2", "gsoftmax": "0", "commit": "c"}
OUTSIDE = {f"ood_{score} {data}": 0.8 for score in ("probability", "empirical") for data in ("cifar2", "digits")}


def made(settings, seeds, metrics, labels=0, noise=0.01, start=0, seconds=2.0):
    """Rows of settings that differ from `metrics` by what `settings` says: noise of the seed, and of the run."""
    generator = np.random.default_rng(start)
    found = []
    for seed in seeds:
        of_seed = generator.standard_normal()
        for setting, shifts in settings.items():
            base = {m: v for m, v in {**metrics, **shifts}.items() if v is not None}
            m = {k: v + noise * (of_seed + generator.standard_normal()) for k, v in base.items()}
            m["seconds"] = seconds
            found.append({"setting": setting, "seed": seed, "metrics": m, **WHERE})
            if labels:
                keys = ("ap", "compactness", "separability", "ratio")
                # separability follows AP, compactness runs against it, ratio has nothing to do with it
                ap = (
                    np.linspace(0.3, 0.9, labels) + 0.02 * generator.standard_normal(labels) + m["mAP"] - metrics["mAP"]
                )
                of_label = (ap, 2 - ap, 3 * ap, np.where(np.arange(labels) % 2, 1.0, 2.0))
                found[-1]["labels"] = {k: v.tolist() for k, v in zip(keys, of_label, strict=True)}
    return found


def single(**changes):
    return dict.fromkeys(measures.SINGLE, 0.5) | changes


def multi():
    return dict.fromkeys((*measures.MULTI, *tables.SEVEN), 0.5)


def study_of(name, rows, seeds=None, **options):
    settings = dict.fromkeys(row["setting"] for row in rows)
    return run.Study(name, "digits", {}, seeds or range(100), {s: {} for s in settings}, **options)


def write(folder, found, cost=None):
    for name, (_, rows) in found.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if cost:
        (folder / "cost.json").write_text(json.dumps(cost))


@pytest.fixture
def everything():
    """One study of every kind, with settings that have fewer seeds, seeds that diverged, and one that always did."""
    shown = {"softmax": {}, "G λ=1": {"error": 0.4, "compactness": 0.7}, "G λ=4": {"separability": 0.2}}
    found = {}
    for i, name in enumerate(("cifar10", "few-1", "noise-20", "imbalance")):
        rows = made(shown, range(10), single(), start=i)
        rows = [r for r in rows if (r["setting"], r["seed"]) != ("G λ=1", 2)]
        for row in rows:
            if row["setting"] == "G λ=4" and row["seed"] < 3:
                del row["metrics"]
                row["diverged"] = "the loss is nan"
        found[name] = (study_of(name, rows), rows)
    outside = {**OUTSIDE, "ood_learned cifar2": None, "ood_learned digits": None}
    learned = {"ood_learned cifar2": 0.95, "ood_learned digits": 0.75}
    rows = made({"softmax": outside, "G λ=1": {**OUTSIDE, **learned}}, range(8), single())
    found["ood"] = (study_of("ood", rows), rows)
    heads = {"softmax": {}, "G a": {"mAP": 0.6}, "G b": {"mAP": 0.45}, "G c": {}}
    rows = made(heads, range(6), multi(), labels=10)
    found["mosaic"] = (study_of("mosaic", rows, about="Four images to a mosaic."), rows)
    grid = {f"λ={lam} (0, {sigma})": {"error": 0.5 - 0.01 * lam} for lam in (1, 4) for sigma in (0.5, 1)}
    rows = made({"softmax": {}, **grid, "λ=4 (2, 2)": {}, "λ=4, tracked": {}}, range(1000, 1005), single())
    rows += [{"setting": "λ=16 (0, 1)", "seed": seed, "diverged": "nan", **WHERE} for seed in range(1000, 1005)]
    found["tune-cifar10"] = (study_of("tune-cifar10", rows), rows)
    return found


COST = {
    "recipe": "r",
    "heads": {
        name: {"step ms": 2.0 * ratio, "ratio": ratio, "head ms": 0.1, "share": 0.05 / ratio}
        for name, ratio in {"softmax": 1.0, "softmax again": 1.0012, "G λ=1": 1.004, "G tracked": 1.02}.items()
    },
    **WHERE,
}


def test_diverged_and_missing_runs_are_counted_and_left_out(everything):
    study, rows = everything["cifar10"]
    text = tables.study_tables(study, rows)
    assert "| G λ=4 | 7 (3 diverged) |" in text and "| G λ=1 | 9 |" in text and "| softmax | 10 |" in text
    assert "| cifar10 | G λ=4 | 7 (3 diverged) |" in tables.summary({"cifar10": (study, rows)})
    assert "29 runs (3 diverged, left out of the numbers), 2.000 s each" in text
    of = {(r["setting"], r["seed"]): r["metrics"] for r in rows if "metrics" in r}
    for setting in ("G λ=1", "G λ=4"):
        seeds = [seed for seed in range(10) if (setting, seed) in of]
        for metric in measures.SINGLE:
            scale = 100 if metric in ("error", "error_x", "ece") else 1
            a, b = (scale * np.array([of[s, seed][metric] for seed in seeds]) for s in ("softmax", setting))
            heavy = metric == "relative_sigma"
            expected = scipy.stats.ttest_rel(*(np.log([b, a]) if heavy else (b, a)))
            numbers = (np.log(b / a).mean() if heavy else (b - a).mean(), *expected.confidence_interval())
            numbers = 100 * np.expm1(numbers) if heavy else numbers
            (d,) = [d for d in tables.differences(study, rows) if (d.setting, d.metric) == (setting, metric)]
            np.testing.assert_allclose((d.test.difference, d.test.low, d.test.high), numbers)
            assert d.test.p == pytest.approx(expected.pvalue) and d.test.n == len(seeds)
            assert tables.span(d.test) in text
    error = [100 * v["error"] for (s, _), v in of.items() if s == "G λ=4"]
    assert f"| {np.mean(error):.1f} ± {np.std(error, ddof=1):.1f} |" in text
    d = tables.differences(study, rows)[0].test
    n = int(text.split(" paired seeds here")[0].split()[-1])

    def found(n):
        t = scipy.stats.t.ppf(0.975, n - 1)
        return scipy.stats.nct.sf(t, n - 1, 0.1 / d.sd * n**0.5)

    assert found(n) >= 0.8 > found(n - 1)


@pytest.mark.parametrize("case", ["reference diverged", "all diverged", "one seed", "no pair"])
def test_incomparable_runs_are_not_compared(case, everything):
    study, rows = everything["few-1"]
    gone = {**WHERE, "diverged": "nan"}
    if case == "reference diverged":
        rows = [{"setting": r["setting"], "seed": r["seed"], **gone} if r["setting"] == "softmax" else r for r in rows]
    elif case == "all diverged":
        rows = [{"setting": r["setting"], "seed": r["seed"], **gone} for r in rows]
    elif case == "one seed":
        rows = [r for r in rows if r["seed"] == 5]
    else:
        rows = [r for r in rows if (r["setting"] == "softmax") == (r["seed"] < 5)]
    text, found = tables.study_tables(study, rows), {"few-1": (study, rows)}
    compared = case == "one seed"
    assert ("Differences from" in text) == compared and "nan" not in text and "80 % power" not in text
    assert ("few-1" in tables.summary(found)) == compared and "| G λ=1 |" in text
    claim = next(line for line in tables.verdicts(found, {}).splitlines() if line.startswith("| 1. lowers"))
    assert claim.endswith("**not shown** |") and ("2 in 1" in claim) == compared
    assert "nan" not in tables.verdicts(found, {})
    assert bool(figures.forest_rows(found)) == compared
    if compared:  # a point without an interval
        assert "n = 1" in figures.draw_forest(figures.forest_rows(found))


def test_several_labels_have_seven_metrics_and_the_papers_tests(everything):
    study, rows = everything["mosaic"]
    text = tables.study_tables(study, rows)
    assert text.startswith(
        "### mosaic\n\nFour images to a mosaic.\n\n| setting | seeds | mAP % | C-P % | C-R % | C-F1 % "
    )
    assert "O-P % | O-R % | O-F1 % |" in text
    ap = {s: 100 * np.mean([r["labels"]["ap"] for r in rows if r["setting"] == s], axis=0) for s in study.settings}
    for setting, t in tables.label_tests(study, rows).items():
        expected = scipy.stats.ttest_rel(ap[setting], ap["softmax"])
        assert (t.t, t.p, t.n) == (pytest.approx(expected.statistic), pytest.approx(expected.pvalue), 10)
        assert f"| {setting} | {tables.span(t)} | {t.t:+.2f} |" in text
    found = tables.correlations(study, rows)
    x = np.array(
        [np.mean([r["labels"]["ratio"] for r in rows if r["setting"] == s], axis=0) for s in ("G a", "G b", "G c")]
    )
    y = np.array([ap[s] for s in ("G a", "G b", "G c")])
    assert found["ratio"][1].r == pytest.approx(scipy.stats.pearsonr(x.ravel(), y.ravel())[0])
    assert found["separability"][1].r > 0.99 and found["compactness"][1].r < -0.99
    p = scipy.stats.pearsonr(x[0], y[0])
    assert tables._p_of_r(p.statistic, 10) == pytest.approx(p.pvalue)


def test_the_best_gaussian_score_is_compared_with_two_probabilities(everything):
    study, rows = everything["ood"]
    found = tables.detections(study, rows)
    # learned: 0.95 and 0.75 in the mean beat empirical's 0.8 and 0.8; softmax has no learned one
    assert {(d.setting, tables.score_and_data(d.metric)[0]) for d in found} == {
        ("softmax", "empirical"),
        ("G λ=1", "learned"),
    }
    assert len(found) == 2 + 4
    of = {s: [r["metrics"] for r in rows if r["setting"] == s] for s in study.settings}
    for reference in study.settings:
        (d,) = [d for d in found if (d.setting, d.metric, d.reference) == ("G λ=1", "ood_learned cifar2", reference)]
        a = [100 * m["ood_probability cifar2"] for m in of[reference]]
        b = [100 * m["ood_learned cifar2"] for m in of["G λ=1"]]
        assert d.test.p == pytest.approx(scipy.stats.ttest_rel(b, a).pvalue) and d.verdict == "better"
        # Holm over all Gaussian scores: empirical and learned, both data, own and reference's
        assert d.test.p < d.p <= 10 * d.test.p
    assert {d.verdict for d in found if d.setting == "G λ=1" and d.metric.endswith("digits")} == {"worse"}
    text = tables.study_tables(study, rows)
    assert "| setting | probability, cifar2 | probability, digits | empirical, cifar2 |" in text
    mean, sd = np.mean(b), np.std(b, ddof=1)
    digits = tables.decimals(sd)
    assert f"| {mean:.{digits}f} ± {sd:.{digits}f} |" in text
    row = next(line for line in text.splitlines() if line.startswith("| softmax | empirical |"))
    assert row.count("–") == 2  # not against itself twice


def test_costs_are_shown_as_measured(everything):
    text = tables.cost_tables(COST, everything)
    assert "| G λ=1 | 2.008 | 1.0040 | 0.100 | 4.98 % |" in text and '"softmax again"' in text
    assert "| G λ=4 | 7 (3 diverged) | 2.000 | 1.000 |" in text
    assert tables.cost_tables({}, {}) == tables.NOTHING
    assert "softmax again" not in tables.cost_tables({}, everything) and "2.008" in tables.cost_tables(COST, {})


@pytest.mark.slow
def test_every_mark_has_text_for_any_rows(everything, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "studies", lambda: {name: study for name, (study, _) in everything.items()})
    marks = {"verdicts", "summary", "tables", "cost"}

    def blocks(folder):
        return {mark: text for mark, text in pages.blocks(folder).items() if mark in marks}

    assert blocks(tmp_path) == dict.fromkeys(marks, tables.NOTHING) and figures.drawn(tmp_path) == {}
    for name, pair in everything.items():  # each alone
        folder = tmp_path / name
        folder.mkdir()
        write(folder, {name: pair})
        text = blocks(folder)
        assert text.keys() == marks and f"### {name}" in text["tables"]
        assert (name in text["summary"]) == (not name.startswith("tune-"))
        assert (figures.MAP in figures.drawn(folder)) == (name == "tune-cifar10")
        assert (figures.FOREST in figures.drawn(folder)) == (name not in ("tune-cifar10", "mosaic"))
    write(tmp_path, everything, COST)
    text = blocks(tmp_path)
    assert all(v != tables.NOTHING and "nan" not in v for v in text.values())
    for table in "\n\n".join(text.values()).split("\n\n"):  # as many cells in every line
        lines = table.splitlines()
        assert not table.startswith("|") or len({line.count("|") for line in lines}) == 1
    page = "a\n<!-- evidence: verdicts -->\n<!-- evidence: end -->\nb\n"
    assert pages.filled(page, text) == page.replace("-->\n<", f"-->\n{text['verdicts']}\n<", 1)


def test_verdicts_follow_from_the_rows():
    """Rows made so that every word occurs."""
    better = {"compactness": 0.9, "dprime": 0.3}
    shifts = {
        "G a": {**better, "separability": 0.9, "nll": 0.3},
        "G b": {**better, "separability": 0.1},
        "other": {"error": 0.1},
    }
    found = {}
    for name in ("cifar10", "few-1", "tune-x"):
        own = {"G a": {**shifts["G a"], "error": 0.4}} if name == "few-1" else {}
        own = {"G a": {"ratio": 0.9}} if name == "tune-x" else own
        rows = made({"softmax": {}, **shifts, **own}, range(12), single(), noise=0.003)
        for row in rows:  # the same everywhere except for noise
            row["metrics"]["ratio"] = 0.5 if name != "tune-x" else row["metrics"]["ratio"]
        found[name] = (study_of(name, rows), rows)
    lines = [line.strip("| ").split(" | ") for line in tables.verdicts(found, COST).splitlines() if line[:1] == "|"]
    of = {line[0]: line[1:] for line in lines}
    assert of["1. lowers the error"][:3] == ["1 in 1", "0", "3 in 2"]  # neither `other` nor tune-x counts
    assert of["1. lowers the error"][-1] == "**holds in part**"
    assert of["small training sets: lowers the error"][:3] == ["1 in 1", "0", "1 in 1"]
    assert of["small training sets: lowers the error"][-1] == "**holds in part**"
    assert of["2. raises compactness"][::4] == ["4 in 2", "**holds**"]
    assert of["3. raises separability"][:3] == ["2 in 2", "2 in 2", "0"]
    assert of["3. raises separability"][-1] == "**mixed**"
    assert of["3, scale-free: raises d′"][::4] == ["0", "**the reverse**"]
    assert of["4. raises the ratio"] == ["0", "0", "4 in 2", "+0.00 %", "**not shown**"]
    assert of["calibration: lowers NLL"][::4] == ["2 in 2", "**holds in part**"]  # half is not more than half
    assert of["label noise and imbalance: lowers the error"] == ["0", "0", "0", "–", "**not shown**"]
    cost = ["1 in 1", "1 in 1", "0", "+0.40 % (+0.40 to +2.00)", "**mixed**"]
    assert of["cost: a step takes at most 1 % more than softmax's"] == cost
    by = {d.setting: d.share for d in tables.differences(*found["few-1"]) if d.metric == "compactness"}
    a, b = (
        np.mean([r["metrics"]["compactness"] for r in found["few-1"][1] if r["setting"] == s])
        for s in ("softmax", "G a")
    )
    assert by["G a"] == pytest.approx(100 * (b / a - 1))


def test_verdicts_on_labels_and_outside_data(everything):
    lines = [line.strip("| ").split(" | ") for line in tables.verdicts(everything, {}).splitlines() if line[:1] == "|"]
    of = {line[0]: line[1:] for line in lines}
    # separability follows AP in what was made, compactness does the reverse, ratio neither
    assert of["5. geometry correlates with AP: all labels and settings"][:3] == ["1 in 1", "1 in 1", "1 in 1"]
    (outside,) = [v for k, v in of.items() if k.startswith("out-of-distribution")]
    assert outside[:3] == ["1 in 1", "1 in 1", "0"] and outside[-1] == "**mixed**"
    text = tables.verdicts(everything, {})
    assert "left out of all numbers: 3 of 29 in cifar10," in text and "5 of 40 in tune-cifar10" in text


@pytest.mark.parametrize(
    "counts, expected",
    [
        ((1, 0, 1), "holds"), ((3, 0, 5), "holds"), ((2, 0, 4), "holds in part"), ((0, 3, 5), "the reverse"),
        ((5, 1, 6), "mostly holds"), ((1, 5, 6), "mostly the reverse"), ((3, 1, 4), "mixed"), ((4, 1, 8), "mixed"),
        ((0, 2, 4), "the reverse in part"), ((0, 1, 3), "the reverse in part"),
        ((0, 0, 4), "not shown"), ((0, 0, 0), "not shown"),
    ],
)  # fmt: skip
def test_words(counts, expected):
    assert tables.word(*counts) == expected


def test_figures_show_the_differences_and_are_reproducible(everything):
    cells = figures.map_cells(everything)
    study, rows = everything["tune-cifar10"]
    assert set(cells) == {"error", "compactness", "separability", "ece"}
    for metric, of in cells.items():
        assert (
            of.keys() == {(1, 0.5), (1, 1), (4, 0.5), (4, 1), (16, 1)} and of[16, 1] is None
        )  # not μ = 2, not tracked
        of_runs = {(r["setting"], r["seed"]): r["metrics"][metric] for r in tables.done(rows)}
        gained = np.mean([of_runs["λ=4 (0, 0.5)", s] - of_runs["softmax", s] for s in range(1000, 1005)])
        assert of[4, 0.5].test.difference == pytest.approx(gained * (100 if metric in ("error", "ece") else 1))
    drawn = figures.draw_map(cells)
    assert drawn == figures.draw_map(figures.map_cells(everything))
    words = figures.content(drawn)
    assert (
        figures._short(cells["error"][4, 0.5].test.difference, 5.0) in words
        and "diverged" in words
        and "first σ" in words
    )

    forest = figures.forest_rows(everything)
    assert [*forest] == ["cifar10", "few-1", "noise-20", "imbalance", "ood"]
    drawn = figures.draw_forest(forest)
    assert drawn == figures.draw_forest(figures.forest_rows(everything))
    for name, of in forest.items():
        assert name in figures.content(drawn)
        for d in of:
            assert f"{tables.span(d.test)}  n = {d.test.n}" in figures.content(drawn)


def test_pages_and_figures_are_written_and_checked(everything, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "studies", lambda: {name: study for name, (study, _) in everything.items()})
    monkeypatch.setattr(pages, "MARKED", (tmp_path / "page.md",))
    monkeypatch.setattr(answers, "PAGES", tmp_path)
    monkeypatch.setattr(answers, "FOREST", tmp_path / "answers.svg")
    forest = answers.draw_forest()
    monkeypatch.setattr(answers, "draw_forest", lambda: forest)
    monkeypatch.setattr(answers, "pages", lambda: {tmp_path / "study.md": "# study\n"})
    for name in ("MAP", "FOREST"):
        monkeypatch.setattr(figures, name, tmp_path / f"{name}.svg")
    (tmp_path / "page.md").write_text("<!-- evidence: summary -->\n<!-- evidence: end -->\n")
    drawn, blocks = functools.cache(figures.drawn), functools.cache(pages.blocks)  # once for the rows there are
    monkeypatch.setattr(pages, "blocks", lambda: blocks(tmp_path))
    monkeypatch.setattr(figures, "drawn", lambda: drawn(tmp_path))

    def rows_changed():
        drawn.cache_clear()
        blocks.cache_clear()

    def main(*words):
        monkeypatch.setattr("sys.argv", ["pages", *words])
        pages.main()

    main()
    main("--check")
    assert not (tmp_path / "MAP.svg").exists()  # no rows
    write(tmp_path, everything)
    rows_changed()
    with pytest.raises(SystemExit, match=r"page\.md differs"):
        main("--check")
    main()
    for name in ("MAP.svg", "FOREST.svg"):
        main("--check")
        (tmp_path / name).unlink()
        with pytest.raises(SystemExit, match=f"{name} differs"):
            main("--check")
        main()
    main("--check")
    svg = tmp_path / "FOREST.svg"
    svg.write_text(svg.read_text("utf-8").replace("[[", "[[9, ", 1), "utf-8")  # another number in its description
    with pytest.raises(SystemExit, match="FOREST"):
        main("--check")
    main()
    (tmp_path / "tune-cifar10.jsonl").unlink()
    rows_changed()
    main()
    assert not (tmp_path / "MAP.svg").exists() and svg.exists()


def test_data_are_found_where_they_are():
    places = {"cifar10": "npz:all.npz", "cifar2": "folder:two"}
    assert run.resolve_spec("cifar10", places) == "npz:all.npz"
    assert run.resolve_spec("mosaic(cifar10)?grid=2x2&train=9", places) == "mosaic(npz:all.npz)?grid=2x2&train=9"
    assert run.resolve_spec("cifar2 digits", places) == "folder:two digits"


def test_some_classes_of_a_dataset(tmp_path):
    digits = data.load("digits")
    prepare.part(digits, ("3", "7"), tmp_path / "two.npz")
    two = data.load(f"npz:{tmp_path / 'two.npz'}")
    assert two.classes == ("3", "7") and len(two.test) == int(((digits.test.y == 3) | (digits.test.y == 7)).sum())
    rows = (digits.train.y == 7).nonzero().flatten()
    assert (two.train.x[two.train.y == 1] == digits.train.x[rows]).all()


def test_a_run_with_outside_data_and_one_that_diverges():
    changes = {"data": "digits", "epochs": 1, "ood": "elsewhere"}
    settings = {"a": {"head": "gsoftmax"}, "b": {"lr": 1e30}}
    study = run.Study("s", "digits", changes, range(1), settings)
    row = run.one(study, "a", 0, {"elsewhere": "digits-mosaic"})
    assert 0 < row["metrics"]["ood_probability elsewhere"] < 1 and "ood_learned elsewhere" in row["metrics"]
    diverged = run.one(study, "b", 0, {"elsewhere": "digits-mosaic"})
    assert "metrics" not in diverged and "step" in diverged["diverged"]


def test_what_a_head_costs_is_measured():
    found = cost.measure("digits", {}, 1, 1)
    assert found["softmax"]["ratio"] == 1 and set(found) == set(cost.HEADS)
    assert all(v > 0 for of in found.values() for v in of.values())


def test_seconds_are_compared_seed_by_seed():
    rows = [
        {"setting": setting, "seed": seed, "metrics": {"error": 0.1, "seconds": seconds * (1 + seed)}, **WHERE}
        for setting, seconds, seeds in (("softmax", 2.0, range(9)), ("G λ=1", 2.2, range(3)))
        for seed in seeds
    ]  # later seeds ran on a busier machine
    text = tables.cost_tables({}, {"cifar10": (study_of("cifar10", rows), rows)})
    assert "| softmax | 9 | 10.00 | 1.000 |" in text and "| G λ=1 | 3 | 4.400 | 1.100 |" in text


@pytest.mark.parametrize("cls", [heads.Adjusted, heads.AdjustedG])
def test_an_adjusted_head_knows_how_frequent_classes_are(cls):
    head, rng = cls(4, 3), np.random.default_rng(0)
    seen = np.ones(3)
    for _ in range(3):
        h, target = rng.normal(size=(7, 4)).astype("float32"), rng.integers(0, 3, 7)
        seen += np.bincount(target, minlength=3)
        loss = head.loss(torch.from_numpy(h), torch.from_numpy(target))
        z = head(torch.from_numpy(h)).detach().numpy() + np.log(seen / seen.sum())
        assert loss.item() == pytest.approx(-scipy.special.log_softmax(z, 1)[np.arange(7), target].mean(), rel=1e-5)
    head.eval().loss(torch.from_numpy(h), torch.from_numpy(target))
    assert head.seen.tolist() == seen.tolist()  # tests do not count
    np.testing.assert_allclose(
        head.predict_proba(torch.from_numpy(h)).detach(),
        scipy.special.softmax(z - np.log(seen / seen.sum()), 1),
        rtol=1e-4,
    )


def test_a_handicap_leaves_the_label_without_the_term():
    head, h, target = heads.Handicap(4, 3, lam=2.0), torch.randn(7, 4), torch.arange(7) % 3
    x, z = head.features(h).detach(), head(h, target).detach()
    expected = x + 2 * torch.from_numpy(scipy.stats.norm.cdf(x.numpy())).float()
    expected[torch.arange(7), target] = x[torch.arange(7), target]
    torch.testing.assert_close(z, expected)
    torch.testing.assert_close(head(h).detach(), x)
    assert head.loss(h, target).item() == pytest.approx(torch.nn.functional.cross_entropy(z, target).item())
