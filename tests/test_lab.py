"""Runs and comparisons: identical conditions, exact resumption, numbers against SciPy, mistakes in one line."""

from __future__ import annotations

import copy
import io
import json
import math
import os
import sys
import threading
import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict
from unittest.mock import Mock

import numpy as np
import processes
import pytest
import scipy.stats
import torch
from processes import one_thread  # noqa: F401
from safetensors.torch import load_file

from gsoftmax import (
    backbones,
    build,
    compare,
    distributed,
    heads,
    measures,
    ood,
    progress,
    report,
    runs,
    stopping,
    train,
)
from gsoftmax.cli import main
from gsoftmax.config import Config
from gsoftmax.distributed import ALONE, World
from gsoftmax.files import sealed
from gsoftmax.heads import DEFAULT
from gsoftmax.recipes import find, recipes
from gsoftmax.significance import holm
from gsoftmax.summary import differences, means, so_far, verdicts

QUICK = Config(epochs=3, train_fraction=0.3, batch_size=64, threads=1, device="cpu")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"epoch": 3}, "unknown key 'epoch', did you mean 'epochs'"),
        ({"epochs": "many"}, "epochs must be a whole number, 0 or more, got 'many'"),
        ({"batch_size": 0}, "batch_size must be a whole number, 1 or more, got 0"),
        ({"lr": -1}, "lr must be a number, 0 or more, got -1"),
        ({"amp": "bf17"}, "amp must be one of off, bf16, fp16, got 'bf17'"),
        ({"schedule.name": "stairs"}, "schedule name must be one of constant, .* got 'stairs'"),
        ({"lr.x": 1}, "'lr' is 0.1, not a dictionary: it has no key 'x'"),
    ],
)
def test_configuration_mistakes(changes, words):
    with pytest.raises(ValueError, match=words):
        Config().override(changes)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"head": "gsoftmx"}, "unknown head 'gsoftmx', did you mean 'gsoftmax'"),
        ({"head": "nowhere.to:Be"}, "head 'nowhere.to:Be' cannot be imported"),
        ({"head": "torch.nn:Linear"}, "lacks features, loss, predict_proba"),
        (
            {"head": "gsoftmax", "head_options": {"lamda": 1}},
            "head 'gsoftmax': unknown option 'lamda', did you mean 'lam'",
        ),
        ({"head": "gsoftmax", "head_options": {"form": "paired"}}, "form='paired' is for multi-label data"),
        ({"optimizer": "sdg"}, "unknown optimizer 'sdg', did you mean 'sgd'"),
        ({"backbone": "vgg17"}, "unknown backbone 'vgg17'"),
        ({"batch_size": 5000}, "batch_size must be at most the 389 training rows of digits, got 5,000"),
        ({"schedule": {"name": "linspace", "a": 1}}, "schedule 'linspace': .* missing .* 'b'"),
        ({"schedule": {"name": "staircase", "steps": {}, "x": 1}}, "schedule 'staircase': .* unexpected .* 'x'"),
        ({"device": "cudaa"}, "device 'cudaa' cannot be used"),
        ({"evaluate_on": "val"}, "no validation split"),
        ({"data": "digit"}, "digit"),
        ({"ood": "digits"}, "ood must differ from the training data, got 'digits'"),
        ({"ood": "digits-mosaic nosuch"}, r"ood \(one of 2 datasets.*unknown dataset 'nosuch'"),
        ({"ood": "digits", "data": "digits-mosaic"}, "single-label"),
        ({"cuda_graphs": True, "accumulate": 2}, "cuda_graphs"),
        ({"cuda_graphs": True, "compile": True}, "cuda_graphs"),
    ],
)
def test_run_mistakes_leave_nothing_behind(changes, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        train.train(QUICK.override(changes | {"epochs": 0}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_every_recipe_is_valid_and_every_row_is_there():
    found = recipes()
    rows = Counter(recipe.table for recipe in found.values() if recipe.published)
    assert rows == {"table1": 24, "table2": 8, "table3": 8, "table4": 6}
    for recipe in found.values():
        for smoke in (False, True):
            config = recipe.config(smoke=smoke)
            schedule = build.schedule(config, config.epochs)
            assert all(schedule(n) >= 0 for n in range(1, config.epochs + 1))
    wide = find("wrn-cifar10-gsoftmax").config()
    assert (wide.backbone, wide.batch_size, wide.head_options["lam"]) == ("wrn-40-14", 128, 0.5)
    options = find("nuswide-gsoftmax(0,2)").config().head_options
    assert options == {"lam": 1.0, "lr_mult": 6.25, "log_sigma": False, "sigma": 2}
    with pytest.raises(ValueError, match="unknown recipe 'wrn-cifar10', did you mean 'wrn-cifar10"):
        find("wrn-cifar10")


def outputs(folder):
    return (folder / "outputs.safetensors").read_bytes()


@pytest.mark.parametrize("head", ["softmax", "lsoftmax", "gsoftmax"])
def test_two_runs_are_identical_and_a_stopped_one_resumes_exactly(head, tmp_path, monkeypatch):
    config = QUICK.override({"head": head, "ema": 0.9, "backbone_options": {"dropout": 0.2}, "accumulate": 2})
    if head == "gsoftmax":
        config = config.override({"head_options": {"gaussians": "tracked"}, "init": "data"})
    first = train.train(config, tmp_path / "a")
    train.train(config, tmp_path / "b")
    assert outputs(tmp_path / "a") == outputs(tmp_path / "b")

    log = runs.RunFolder.log

    def stop(self, row):
        log(self, row)
        if row.get("epoch") == 3:
            raise KeyboardInterrupt  # after the row, before its checkpoint

    with monkeypatch.context() as patched:
        patched.setattr(runs.RunFolder, "log", stop)
        with pytest.raises(KeyboardInterrupt):
            train.train(config, tmp_path / "c")
    assert runs.read_result(tmp_path / "c") is None
    resumed = train.train(config, tmp_path / "c", resume=True)
    assert outputs(tmp_path / "a") == outputs(tmp_path / "c")
    same = [k for k in first if k not in ("seconds", "examples_per_second")]
    assert [first[k] for k in same] == [resumed[k] for k in same]
    rows = [r["epoch"] for r in runs.read_rows(tmp_path / "c") if "final" not in r]
    assert rows == [1, 2, 3]


def test_loaded_state_has_the_memory_order_of_its_parameter():
    """Fused optimizers on a GPU require it; checkpoints are contiguous, and convolutions may be channels_last."""
    dataset, device = build.load_data(QUICK), torch.device("cpu")

    def made():
        parts = build.prepare(QUICK, dataset, device, ALONE)
        inputs, target = next(build.train_batches(dataset, QUICK, 1))
        parts.loss(inputs, target).backward()
        parts.optimizer.step()
        return parts

    state, again = made().state(), made()
    again.load(state, ALONE)
    held = [(p, value) for p, values in again.optimizer.state.items() for value in values.values() if value.ndim]
    assert any(not p.is_contiguous() for p, _ in held)
    assert all(value.stride() == p.stride() for p, value in held)


def test_heads_with_one_seed_start_equal_and_see_the_same_batches():
    dataset = build.load_data(QUICK)
    networks = {h: build.network(QUICK.override({"head": h}), dataset) for h in DEFAULT}
    reference = networks["softmax"].state_dict()
    for network in networks.values():
        for name, value in network.state_dict().items():
            if name in reference and name != "head.bias":
                assert torch.equal(value, reference[name]), name
    batches = [list(build.train_batches(dataset, QUICK.override({"head": h}), 2)) for h in DEFAULT]
    for a, b, c in zip(*batches, strict=True):
        assert torch.equal(a[0], b[0]) and torch.equal(a[0], c[0]) and torch.equal(a[1], b[1])
    other = build.network(QUICK.override({"seed": 1}), dataset).state_dict()
    assert not torch.equal(other["head.weight"], reference["head.weight"])


# draws that follow the seed


def test_a_run_draws_with_its_seed_unless_the_split_seed_is_set():
    def drawn(**changes):
        return build.load_data(Config(device="cpu", **changes))

    a, b = drawn(train_fraction=0.3, seed=1), drawn(train_fraction=0.3, seed=2)
    assert a.fingerprint() != b.fingerprint() and torch.equal(a.test.x, b.test.x)
    assert drawn(train_fraction=0.3, seed=2, split_seed=1) is a  # read and drawn once
    assert drawn(seed=1) is drawn(seed=2, split_seed=3)  # nothing is drawn
    assert drawn(train_fraction=0.3, seed=2, split_seed=0).notes[-1].endswith("(train_fraction 0.3, seed 0)")


def made_older(run):
    """Writes a configuration as it was before there were these keys, and no checksums."""
    (run / "SHA256SUMS").unlink(missing_ok=True)
    held = json.loads((run / "config.json").read_bytes())
    older = {k: v for k, v in held.items() if k not in ("split_seed", "mixup", "deterministic")}
    (run / "config.json").write_text(json.dumps(older))


def test_older_runs_drew_with_seed_0_and_are_only_taken_for_such(tmp_path):
    config = QUICK.override({"epochs": 0, "split_seed": 0})
    compare.compare(config, ["softmax"], 2, tmp_path, jobs=1)
    for seed in (0, 1):
        made_older(tmp_path / "softmax" / f"seed-{seed}")
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")}
    compare.compare(config, ["softmax"], 2, tmp_path, jobs=1)
    compare.compare(config.override({"split_seed": None}), ["softmax"], 1, tmp_path, jobs=1)  # its seed is 0 as well
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")} == before
    with pytest.raises(
        ValueError, match="seed-1 contains a run with split_seed=0, not split_seed=null; choose another"
    ):
        compare.compare(config.override({"split_seed": None}), ["softmax"], 2, tmp_path, jobs=1)
    assert runs.read_config(tmp_path / "softmax" / "seed-1") == config.override({"seed": 1})


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"train_fraction": 1.0, "seed": 3}, ""),  # nothing is drawn
        ({"val_fraction": 0.1, "seed": 3}, "split_seed=0, not split_seed=null"),
        ({"imbalance": 4.0}, "imbalance=4 of an older version, which did not shuffle the classes"),
        ({"imbalance": 4.0, "seed": 3, "split_seed": 0}, "imbalance=4 of an older version"),
    ],
)
def test_an_older_run_is_resumed_only_if_it_drew_the_same(changes, words, tmp_path):
    config = QUICK.override(changes)
    (tmp_path / "config.json").write_text(json.dumps(asdict(config)))
    assert runs.differences(tmp_path, config) == ""
    made_older(tmp_path)
    found = runs.differences(tmp_path, config)
    assert found.startswith(words) and bool(found) == bool(words)


# mixup


def mixed_batch(config):
    """A batch of 32, mixed, and the other example of each pair: found in the pixels, not from the permutation."""
    dataset = build.load_data(config)
    inputs, target = next(build.train_batches(dataset, config.override({"batch_size": 32}), 1))
    got, mixed = build.mixup(config, inputs, target, (1, 3))
    others = (got - mixed.weight * inputs) / (1 - mixed.weight)
    pairs = (others.flatten(1)[:, None] - inputs.flatten(1)).abs().amax(2)
    assert pairs.amin(1).max() < 1e-4
    return got, target, mixed, pairs.argmin(1)


@pytest.mark.parametrize(
    "head, options",
    [("softmax", {}), ("lsoftmax", {"anneal_steps": 5}), ("gsoftmax", {"gaussians": "tracked"}), ("etf", {})],
)
def test_the_loss_of_mixup_is_that_of_both_targets_and_the_head_makes_one_step(head, options):
    config = QUICK.override({"head": head, "head_options": options, "mixup": 0.7, "label_smoothing": 0.1})
    network = build.network(config, build.load_data(config)).train()
    inputs, target, mixed, pairs = mixed_batch(config)
    assert sorted(pairs.tolist()) == list(range(32)) and torch.equal(mixed.target, target[pairs])
    own, other = copy.deepcopy(network), copy.deepcopy(network)
    a, b = (n(inputs, t, label_smoothing=0.1) for n, t in ((own, target), (other, target[pairs])))
    w = float(mixed.weight)
    loss = network(inputs, target, mixed, label_smoothing=0.1)
    assert 0.05 < w < 0.95 and float((a - b).detach().abs()) > 1e-3
    torch.testing.assert_close(loss, w * a + (1 - w) * b)
    for part in (loss, w * a, (1 - w) * b):
        part.backward()
    parameters = list(network.named_parameters())
    for (name, p), q, r in zip(parameters, own.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad + r.grad, msg=lambda text, name=name: f"{name}: {text}")
    start = build.network(config, build.load_data(config)).state_dict()
    for name, buffer in network.head.named_buffers():
        assert torch.equal(buffer, own.head.get_buffer(name)), name
        assert head == "etf" or not torch.equal(buffer, start[f"head.{name}"]), name


def test_mixup_is_the_same_for_all_heads_and_its_weights_are_those_of_beta():
    config = QUICK.override({"mixup": 0.4})
    inputs, target = torch.randn(16, 3), torch.arange(16)

    def mixup(position=(1, 1), rank=0, **changes):
        found, mixed = build.mixup(config.override(changes), inputs, target, position, World(rank, 2))
        return found, mixed.target, mixed.weight

    first = mixup(head="softmax")
    state = torch.get_rng_state()
    for same in (mixup(head="gsoftmax", head_options={"lam": 4.0}, device="cpu"), mixup(split_seed=7)):
        assert all(map(torch.equal, first, same))
    for different in (mixup(seed=1), mixup(position=(1, 2)), mixup(position=(2, 1))):
        assert not any(map(torch.equal, first, different))
    weight_only = mixup(rank=1)  # the weight is that of the batch, the pairs are made within a process
    assert first[2] == weight_only[2] and not torch.equal(first[1], weight_only[1])
    assert torch.equal(state, torch.get_rng_state())  # dropout draws what it draws without mixup
    weights = [float(mixup((epoch, batch))[2]) for epoch in range(1, 21) for batch in range(1, 41)]
    assert scipy.stats.kstest(weights, scipy.stats.beta(0.4, 0.4).cdf).pvalue > 1e-3


def test_a_run_with_mixup_that_stops_within_an_epoch_resumes_exactly_and_0_is_off(tmp_path, monkeypatch):
    config = QUICK.override({"head": "lsoftmax", "mixup": 0.4, "epochs": 2, "accumulate": 2, "ema": 0.9})
    train.train(config, tmp_path / "a")
    with monkeypatch.context() as patched:
        answers = iter([distributed.Watch.GO_ON] * 3 + [distributed.Watch.STOP])
        patched.setattr(distributed.Watch, "poll", lambda self: next(answers))
        with pytest.raises(stopping.Stopped, match="in epoch 2, after batch 2 of 6"):
            train.train(config, tmp_path / "b")
    train.train(config, tmp_path / "b", resume=True)
    assert outputs(tmp_path / "a") == outputs(tmp_path / "b")
    losses = [[row["loss"] for row in runs.read_rows(tmp_path / f)[:-1]] for f in "ab"]
    assert losses[0] == losses[1]

    off = config.override({"mixup": 0.0})
    monkeypatch.setattr(build, "mixup", Mock(side_effect=AssertionError))
    train.train(off, tmp_path / "off")
    monkeypatch.setattr(
        build.Network, "forward", lambda self, inputs, target, *_: self.head.loss(self.h(inputs), target)
    )
    train.train(off, tmp_path / "plain")
    assert outputs(tmp_path / "off") == outputs(tmp_path / "plain") != outputs(tmp_path / "a")


@pytest.mark.parametrize("deterministic", [True, False])
def test_cudnn_chooses_its_algorithms_by_rule_where_a_run_asks_for_it(deterministic, monkeypatch):
    """The flags are those of the run inside it, and the user's afterwards, also where it fails."""
    cudnn, seen = torch.backends.cudnn, []
    users = cudnn.benchmark, cudnn.deterministic, cudnn.conv.fp32_precision

    def fails(*_):
        seen.append((cudnn.benchmark, cudnn.deterministic, cudnn.conv.fp32_precision))
        raise ZeroDivisionError

    monkeypatch.setattr(build, "prepare", fails)
    for before in ((False, True), (True, False)):
        try:
            cudnn.benchmark, cudnn.deterministic = before
            cudnn.conv.fp32_precision = "ieee"
            with pytest.raises(ZeroDivisionError):
                train.train(QUICK.override({"deterministic": deterministic}))
            assert seen.pop() == (not deterministic, deterministic, "ieee")
            assert (cudnn.benchmark, cudnn.deterministic, cudnn.conv.fp32_precision) == (*before, "ieee")
        finally:
            cudnn.benchmark, cudnn.deterministic, cudnn.conv.fp32_precision = users


# run folders and comparisons


def test_a_run_folder_describes_itself_and_is_not_overwritten(tmp_path):
    result = train.train(QUICK.override({"head": "gsoftmax"}), tmp_path / "run")
    files = {"config.json", "environment.json", "metrics.jsonl", "outputs.safetensors", "model.safetensors"}
    assert {p.name for p in (tmp_path / "run").iterdir()} >= files
    saved = load_file(tmp_path / "run" / "outputs.safetensors")
    x, p, y = saved["x"].double(), saved["p"], saved["y"]
    assert x.shape == (500, 10) and y.shape == (500,) and saved["mu"].shape == saved["sigma"].shape == (10,)
    # every number again, without our code
    z = x.numpy() + scipy.stats.norm.cdf(x.numpy(), saved["mu"].numpy(), saved["sigma"].numpy())
    q = np.exp(z - z.max(1, keepdims=True))
    q /= q.sum(1, keepdims=True)
    np.testing.assert_allclose(p.numpy(), q, atol=2e-6)
    truth = y.numpy()
    assert result["error"] == pytest.approx((z.argmax(1) != truth).mean())
    assert result["error_x"] == pytest.approx((x.numpy().argmax(1) != truth).mean())
    assert result["nll"] == pytest.approx(-np.log(q[np.arange(500), truth]).mean(), rel=1e-5)
    own = np.array([x.numpy()[truth == c, c].std() for c in range(10)])
    assert result["compactness"] == pytest.approx((1 / own).mean(), rel=1e-9)

    with pytest.raises(ValueError, match="already contains a run; continue it with --resume"):
        train.train(QUICK, tmp_path / "run")
    with pytest.raises(ValueError, match="contains a run with epochs=3, not epochs=4; head="):
        train.train(QUICK.override({"epochs": 4}), tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    "changes", [{"optimizer": "adamw", "lr": 0.002}, {"clip": 1.0}, {"amp": "bf16"}, {"bias_lr": 4.0}]
)
def test_other_ways_to_train(changes):
    assert train.train(QUICK.override(changes | {"train_fraction": 1.0}))["error"] < 0.1


def test_a_full_disk_is_one_line_and_leaves_no_partial_file(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patched:
        reason = "[enforce fail at inline_container.cc:664] unexpected pos 64 vs 0, no space left"
        patched.setattr(torch, "save", Mock(side_effect=RuntimeError(reason)))
        status, _, err = run(capsys, "train", "digits", "epochs=2", "--out", "run")
    assert status == 2 and ".pt cannot be written" in err and "Traceback" not in err and err.count("\n") == 1
    assert not list(tmp_path.rglob("*.partial"))
    assert run(capsys, "train", "digits", "epochs=2", "--out", "run", "--resume")[0] == 0


def test_schedule_by_step_with_warm_up():
    config = Config(schedule={"name": "linspace", "a": 1.0, "b": 0.0}, schedule_every="step", warmup=0.5)
    schedule = build.schedule(config, 9)
    assert [round(schedule(n), 3) for n in (1, 4, 5, 9)] == [0.222, 0.556, 0.5, 0.0]


def test_compare_pairs_seeds_and_agrees_with_scipy(tmp_path):
    heads = ["softmax", "gsoftmax(lam=2, sigma=2)"]
    # a staircase's steps have whole numbers as keys, which JSON does not have
    config = QUICK.override({"schedule": {"name": "staircase", "steps": {2: 0.1}}})
    summary = compare.compare(config, heads, 3, tmp_path / "out", jobs=1)
    values = {}
    for head, folder in zip(heads, ("softmax", "gsoftmax-lam=2-sigma=2"), strict=True):
        values[head] = [runs.read_result(tmp_path / "out" / folder / f"seed-{s}")["ratio"] for s in range(3)]
    rows = summary["metrics"]["ratio"]
    assert rows[heads[1]]["values"] == values[heads[1]]
    test = scipy.stats.ttest_rel(values[heads[1]], values[heads[0]])
    paired = rows[heads[1]]["paired"]
    assert paired["t"] == pytest.approx(test.statistic) and paired["p"] == pytest.approx(test.pvalue)
    interval = test.confidence_interval(0.95)
    assert (paired["low"], paired["high"]) == pytest.approx((interval.low, interval.high))

    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*.safetensors")}
    again = compare.compare(config, heads, 3, tmp_path / "out", jobs=1)
    assert again["metrics"] == summary["metrics"]
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*.safetensors")} == before
    with pytest.raises(ValueError, match="contains a run with epochs=3, not epochs=1"):
        compare.compare(config.override({"epochs": 1}), heads, 3, tmp_path / "out")
    (table,) = differences(summary)
    assert table.title == "gsoftmax(lam=2, sigma=2) minus softmax, paired by seed" and len(verdicts(summary)) == 1
    titles = [row[0] for row in means(summary).rows]
    assert titles[:2] == ["error %", "error of x %"] and [row[0] for row in table.rows] == titles
    primary, *others = [rows[heads[1]]["paired"] for rows in summary["metrics"].values()]
    assert primary["p_holm"] == primary["p"]
    assert [test["p_holm"] for test in others] == pytest.approx(holm([test["p"] for test in others]))
    told = f"the other measures are secondary, corrected for their {len(others)} tests"
    assert table.note == f"p, Holm: error is the primary measure, a single test; {told}."
    assert len(others) == len(measures.SINGLE) - 1


PLAN = {"heads": ["softmax", "gsoftmax(lam=2)"], "seeds": [0, 1]}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"seeds": [0, 0]}, r"seeds must be different and not empty, got \[0, 0\]"),
        ({"seeds": []}, "seeds must be different and not empty"),
        ({"heads": []}, "heads must be different and not empty"),
        ({"heads": ["gsoftmax(lam=2)", "gsoftmax-lam=2"]}, "heads must be different"),  # one folder
        ({"heads": "softmax"}, "heads must be names and seeds whole numbers"),
        ({"seeds": [0, True]}, "heads must be names and seeds whole numbers"),
        ({"seeds": None}, "."),
        ({"sha256": "0" * 64}, "its checksum does not match its content"),
    ],
)
def test_a_damaged_plan_is_one_line(changes, words, tmp_path):
    (tmp_path / "comparison.json").write_text(json.dumps(PLAN | changes))
    says = rf"^\S*comparison.json is not the plan of a comparison: {words}.*; run the comparison again$"
    with pytest.raises(ValueError, match=says):
        so_far(tmp_path)


def test_the_plan_of_a_comparison_is_sealed(tmp_path):
    plan = compare.Comparison(compare.of_heads(QUICK, PLAN["heads"]), 2, tmp_path)
    plan.write_plan()
    path = tmp_path / "comparison.json"
    held = json.loads(path.read_text())
    assert held == sealed(PLAN) and so_far(tmp_path) is None  # no run is there
    path.write_text(json.dumps(held | {"seeds": [0, 3]}))
    with pytest.raises(ValueError, match="its checksum does not match its content"):
        so_far(tmp_path)
    path.write_text(json.dumps(PLAN))  # of an older version
    assert so_far(tmp_path) is None
    with pytest.raises(ValueError, match="heads and seeds must be different"):
        compare.Comparison(compare.of_heads(QUICK, PLAN["heads"]), [0, 0], tmp_path)


def test_a_head_in_the_current_folder_is_found_and_the_path_stays(tmp_path, monkeypatch):
    (tmp_path / "own_head_here.py").write_text(OWN_HEAD)
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert heads.find("own_head_here:Scaled").__name__ == "Scaled" and sys.path == before
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.path)
    assert heads.find("own_head_here:Scaled") and sys.path == before


@pytest.mark.parametrize("form", ["paired", "independent", "printed", "msml"])
def test_multilabel_comparison_in_every_form(form, tmp_path):
    config = Config(data="digits-mosaic", epochs=2, train_fraction=0.3, threads=1, pool="max", device="cpu")
    config = config.override({"head_options": {"form": form}})
    summary = compare.compare(config, ["softmax", "gsoftmax"], 2, tmp_path / "out", jobs=1)
    assert set(summary["metrics"]) == set(measures.MULTI)
    for rows in summary["metrics"].values():
        assert all(np.isfinite(v).all() for v in (rows[h]["values"] for h in ("softmax", "gsoftmax")))


OWN_HEAD = """
from gsoftmax import SoftmaxHead

class Scaled(SoftmaxHead):
    def __init__(self, in_features, num_classes, *, scale=2.0, **options):
        super().__init__(in_features, num_classes, **options)
        self.scale = scale

    def features(self, h):
        return super().features(h * self.scale)

    def loss(self, h, target, **options):
        return super().loss(h * self.scale, target, **options)
"""


@pytest.mark.slow
def test_a_users_own_head_gives_the_same_with_any_number_of_jobs(tmp_path, monkeypatch):
    """The workers of two jobs find its file."""
    (tmp_path / "own_head.py").write_text(OWN_HEAD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["/home/me/bin/gsoftmax", "compare", "two words"])
    heads = ["softmax", "own_head:Scaled(scale=3)"]
    one, two = (compare.compare(QUICK, heads, 1, tmp_path / str(jobs), jobs=jobs)["metrics"] for jobs in (1, 2))
    assert one == two and one["error"][heads[1]]["mean"] < 50
    for jobs in "12":
        described = runs.read_environment(tmp_path / jobs / "own_head-Scaled-scale=3" / "seed-0")
        assert described["command"] == "gsoftmax compare 'two words'"


def paired_power(n, effect):
    """Of a two-sided paired t-test, by SciPy's noncentral t."""
    critical, shift = scipy.stats.t.ppf(0.975, n - 1), effect * np.sqrt(n)
    return scipy.stats.nct.sf(critical, n - 1, shift) + scipy.stats.nct.cdf(-critical, n - 1, shift)


def run(capsys, *argv):
    status = main(list(argv))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_commands(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["compare", "digits", "--seeds", "2", "--heads", "softmax,gsoftmax", "epochs=2", "--out", "o", "--jobs", "1"]
    status, out, err = run(capsys, *argv, "threads=1")
    assert status == 0 and "digits: 1,297 train, 500 test" in out and out.strip().endswith("report.html")
    assert err == "softmax seed 0  starts\n"
    page = (tmp_path / "o" / "report.html").read_text("utf-8")
    assert "gsoftmax against softmax, 2 seeds" in page and "<td>" in page
    assert json.loads((tmp_path / "o" / "summary.json").read_text())["seeds"] == [0, 1]
    assert "p, Holm: error is the primary measure, a single test; the other measures are secondary" in " ".join(
        out.split()
    )
    assert "gsoftmax minus softmax, paired over images" in out and "No verdict" not in out
    one = " ".join(run(capsys, *[("1" if word == "2" else word) for word in argv], "threads=1")[1].split())
    assert "No verdict: with one seed, a difference between heads cannot be told from one between seeds." in one
    seeds = [next(n for n in range(2, 99) if paired_power(n, 0.5 / sd) >= 0.8) for sd in (0.25, 0.5, 1.0)]
    assert "takes {}, {} or {} seeds if".format(*seeds) in one
    for command in (["evaluate", "o"], ["predict", "o", "rows.csv"], ["export", "o", "o.onnx"]):
        status, _, err = run(capsys, *command)
        assert status == 2 and err.endswith(", did you mean o/gsoftmax/seed-0\n") and err.count("\n") == 1

    options = ["epochs=3", "head=gsoftmax", "head_options.lam=0.5", "threads=1"]
    status, out, _ = run(capsys, "train", "digits", *options, "--out", "t")
    error = 100 * runs.read_result(tmp_path / "t")["error"]
    assert status == 0 and out.splitlines()[0] == f"error         {error:.4f} %"  # as the tables have it
    assert [line.split()[0] for line in out.splitlines()[1:6]] == ["compactness", "separability", "ratio", "NLL", "ECE"]
    status, out, _ = run(capsys, "evaluate", "t")
    again = {
        label.strip(): float(value.split()[0]) for label, value in (line.split("  ", 1) for line in out.splitlines())
    }
    assert again["ratio"] == pytest.approx(runs.read_result(tmp_path / "t")["ratio"], rel=1e-5)
    listed = {"datasets": "tiny-imagenet", "recipes": "wrn1100-cifar10-gsoftmax", "heads": "margin=2"}
    for command, word in listed.items():
        status, out, _ = run(capsys, command)
        assert status == 0 and word in out


STEP = {"event": "step", "run": "o/a", "name": "a seed 0", "epoch": 1, "epochs": 2, "loss": 0.5, "rate": 100, "left": 9}
STEP |= {"done": 0.5, "finished": 1, "runs": 3, "all_left": 61.0}
END = {"event": "end", "run": "o/a", "name": "a seed 0", "measure": "error %", "value": 1.5, "trained": True}
END |= {"finished": 2, "runs": 3, "all_left": None}


def test_progress_on_a_terminal_has_a_line_for_every_running_run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    shown = progress.Live(stream := io.StringIO())
    shown({"event": "start", "run": "o/a", "name": "a seed 0"})
    shown({"event": "start", "run": "o/b", "name": "b seed 0"})
    monkeypatch.setattr(progress, "OFTEN", 0.0)
    shown(STEP)
    last = stream.getvalue().rpartition("\x1b[J")[2].splitlines()
    assert last == [
        "a seed 0  epoch 1/2  loss 0.5000  100/s  0:00:09 left",
        "b seed 0  starts",
        "1 of 3 runs finished, about 0:01:01 left for all",
    ]
    shown(END)
    erase, _, last = stream.getvalue().rpartition("\x1b[J")
    assert erase.endswith("\x1b[3A")  # as many lines as it drew
    assert last.splitlines() == ["2/3  a seed 0  error % 1.50", "b seed 0  starts", "2 of 3 runs finished"]
    shown.clear()
    assert stream.getvalue().endswith("\x1b[2A\x1b[J")


def test_progress_in_a_log_has_a_rhythm(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    shown = progress.Lines(stream := io.StringIO())
    start = {"event": "start", "run": "o/a", "name": "a seed 0"}
    for event in (STEP, END, start, start, STEP, END, {"event": "failed", "name": "b", "reason": "full"}):
        shown(event)
    assert stream.getvalue() == "a seed 0  starts\nfailed: b: full\n"
    for seconds, event in ((11, STEP), (1, END), (50, STEP), (11, STEP)):
        now[0] += seconds
        shown(event)
    lines = stream.getvalue().splitlines()[2:]
    assert [line.split("  ")[0] for line in lines] == ["2/3", "a seed 0"]
    assert lines[1].endswith("left  (1 of 3 runs finished, about 0:01:01 left for all)")
    alone = progress.Lines(stream := io.StringIO())  # a single run has no start
    for seconds in (0, 11, 11):
        now[0] += seconds
        alone(STEP)
    assert len(stream.getvalue().splitlines()) == 1


def test_a_line_is_printed_where_there_was_none_for_long():
    told = threading.Event()
    with progress.told_late(told.set, 0.01):
        assert told.wait(10)
    told.clear()
    with progress.told_late(told.set, 0.05):
        pass
    assert not told.wait(0.15)


def test_a_model_at_chance_level_is_printed_without_geometry(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(capsys, "train", "digits", "epochs=0", "--out", "t", "threads=1")
    words = [line.split()[0] for line in out.splitlines()]
    assert status == 0 and words[:3] == ["error", "NLL", "ECE"] and "compactness" not in out
    assert "is not clearly better than that of guessing" in out and "no geometry is shown" in out
    status, out, _ = run(capsys, "evaluate", "t")
    assert status == 0 and "ratio" not in out and "no geometry is shown" in out


def test_progress_as_json(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["compare", "digits", "--seeds", "2", "--heads", "softmax,gsoftmax", "--jobs", "1", "--out", "o", "--json"]
    status, out, err = run(capsys, *argv, "epochs=1", "device=cpu")
    events = [json.loads(line) for line in out.splitlines()]
    kinds = Counter(event["event"] for event in events)
    assert status == 0 and not err and kinds.pop("step") >= 4
    assert kinds == {"comparison": 1, "plan": 1, "start": 4, "end": 4, "report": 1}
    assert [event["finished"] for event in events if event["event"] == "end"] == [1, 2, 3, 4]
    ends = {event["run"]: event["value"] for event in events if event["event"] == "end"}
    assert ends["o/gsoftmax/seed-1"] == 100 * runs.read_result(tmp_path / "o/gsoftmax/seed-1")["error"]
    assert events[-1]["path"] == "o/report.html"
    assert events[-1]["verdicts"][0].startswith("gsoftmax against softmax, 2 seeds: error")
    status, out, _ = run(capsys, "train", "digits", "epochs=1", "--out", "t", "--json")
    assert json.loads(out.splitlines()[-1])["metrics"] == {
        k: v for k, v in runs.read_result(tmp_path / "t").items() if k != "final"
    }


@pytest.mark.parametrize(
    "close", ["stdout=pipe", "stderr=pipe", "stderr", pytest.param("stdout", marks=pytest.mark.slow)]
)
def test_output_that_nobody_reads_does_not_cost_the_page(close, tmp_path):
    """As `| head -1`, `2>&1 | head -1`, `2>&-` and `>&-` do."""
    (tmp_path / "cwd").mkdir()
    done = processes.Program(_with_closed, close, cwd=tmp_path / "cwd", environment={"RANK": ""}).wait()
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "cwd" / "o" / "report.html").exists() and "Traceback" not in done.stderr
    assert ("report.html" in done.stdout) == close.startswith("stderr")


def _with_closed(close):
    name, _, pipe = close.partition("=")
    number = {"stdout": 1, "stderr": 2}[name]
    if pipe:
        reading, writing = os.pipe()
        os.dup2(writing, number)
        os.close(reading)
        setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115 - as Python starts
    else:
        os.close(number)
        setattr(sys, name, None)
    return main(["compare", "digits", "--heads", "softmax", "--seeds", "1", "--jobs", "1", "epochs=1", "--out", "o"])


@pytest.mark.parametrize(("rank", "size", "speaks"), [("", "", True), ("3", "", True), ("3", "4", False)])
def test_only_rank_0_of_several_processes_speaks(rank, size, speaks, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    status, _, err = run(capsys, "report", "nowhere")
    assert status == 2 and bool(err) == speaks


def test_an_unreadable_world_size_is_one_line(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "abc")
    status, _, err = run(capsys, "train", "digits")
    words = "the environment variable WORLD_SIZE must be a positive whole number, got 'abc'"
    assert status == 2 and err == f"gsoftmax: {words}\n"


def test_smoke_numbers_are_never_shown_as_results(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(capsys, "reproduce", "table1", "--row", "wrn-cifar10-gsoftmax", "--smoke")
    assert status == 0 and "smoke ok" in out and "no result" in out
    made = tmp_path / "runs" / "reproduce" / "smoke" / "wrn-cifar10-gsoftmax" / "seed-0"
    ours = 100 * runs.read_result(made)["error"]
    assert f"{ours:.2f}" not in out


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, r in recipes().items() if r.published or n == "cifar10-fast"])
def test_every_recipe_passes_its_smoke_run(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, "train", name, "--smoke", "--out", "run", "threads=1")
    assert status == 0, err
    result = runs.read_result(tmp_path / "run")
    assert all(math.isfinite(result[k]) for k in ("nll", "ece")) and "smoke" in out


def test_ood_detection_is_in_the_summary_and_its_table(tmp_path):
    config = Config(epochs=3, ood="digits-mosaic", threads=1)
    summary = compare.compare(config, ["softmax", "gsoftmax"], 2, tmp_path, jobs=1)
    found = summary["metrics"]["ood_probability digits-mosaic"]
    assert all(80 < v <= 100 for h in found.values() for v in h["values"])
    assert "ood_learned digits-mosaic" not in summary["metrics"]  # softmax has learned no Gaussians
    assert "AUROC, probability, digits-mosaic %" in means(summary).text()
    run = tmp_path / "gsoftmax" / "seed-1"
    outputs, result = load_file(run / "outputs.safetensors"), runs.read_result(run)
    assert "ood_learned digits-mosaic" in result and len(outputs["x"]) == 500


def test_ood_scores_that_fail_do_not_cost_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(ood, "detection", Mock(side_effect=ValueError("nothing to rank")))
    with pytest.warns(UserWarning, match="ood was left out: nothing to rank"):
        result = train.train(Config(epochs=1, ood="digits-mosaic"), tmp_path / "run")
    assert "error" in result and not any(k.startswith("ood") for k in result)
    assert runs.read_result(tmp_path / "run")["error"] == result["error"]


def test_capturing_a_network_changes_nothing_but_the_launches(monkeypatch):
    replays = []

    def capture(module, inputs):
        usual = module.forward
        for _ in range(3):
            usual(*inputs)
        module.forward = lambda *given: (replays.append(1) if module.training else None, usual(*given))[1]

    network, inputs = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)), torch.randn(8, 4)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", capture)
    before = {k: v.clone() for k, v in network.state_dict().items()}
    with build.cuda_graphs(network, inputs, torch.no_grad):
        assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())
        network(inputs)
        assert len(replays) == 1
        with pytest.raises(ValueError, match=r"cuda_graphs: batches must have the shape \(8, 4\), got \(1, 4\)"):
            network(inputs[:1])
        network.eval()(inputs[:3])  # any batch in evaluation
        warnings.warn("The AccumulateGrad node's stream does not match ...", stacklevel=1)  # would be an error
        assert len(replays) == 1
    assert "forward" not in vars(network) and network(inputs).shape == (8, 4)


def test_a_failed_capture_is_one_line(monkeypatch):
    reason = AssertionError("Modules must not have hooks\nand more")
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", Mock(side_effect=reason))
    words = "^cuda_graphs: this backbone cannot be captured: Modules must not have hooks$"
    with pytest.raises(ValueError, match=words):
        build.cuda_graphs(torch.nn.Linear(2, 2), torch.zeros(1, 2), torch.no_grad).__enter__()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.filterwarnings("ignore:Please use the new API settings to control TF32")  # monkeypatch cannot
@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [("cnn", (1, 8, 8), {}), ("resnet9", (3, 32, 32), {"widths": (8, 16, 16), "fused": False})],
)
def test_a_captured_step_is_the_same_step(name, shape, options, monkeypatch):
    """Two equal networks, one of them captured, take the same steps and evaluations in turn."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # products of matrices have it off anyway
    usual = backbones.create(name, input_shape=shape, **options).to("cuda", memory_format=torch.channels_last)
    recorded = copy.deepcopy(usual)
    both = (usual, recorded)
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.05, momentum=0.9, nesterov=True) for n in both]

    def batch(size):
        inputs = torch.randn(size, *shape).to("cuda", memory_format=torch.channels_last)
        return inputs, torch.randint(usual.num_features, (size,), device="cuda")

    with build.cuda_graphs(recorded, batch(16)[0], nullcontext):  # on a batch that does not come again
        for step in range(4):
            inputs, target = batch(16)
            outputs = [n.train()(inputs) for n in both]
            for h in outputs:
                torch.nn.functional.cross_entropy(h, target).backward()
            _agree(f"outputs of step {step}", *outputs)
            for (key, a), b in zip(usual.named_parameters(), recorded.parameters(), strict=True):
                assert (a.grad is not None) == (b.grad is not None) == a.requires_grad, key
                if a.requires_grad:
                    assert a.grad.any(), key
                    _agree(f"gradient of {key} in step {step}", a.grad, b.grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            for key, a in usual.state_dict().items():
                _agree(f"{key} after step {step}", a, recorded.state_dict()[key])
            inputs, _ = batch(5)
            with torch.no_grad():
                _agree(f"evaluation after step {step}", *(n.eval()(inputs) for n in both))


def _agree(what, a, b):
    largest = float(a.detach().abs().max())  # the scale for values that cancel to almost nothing
    torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5 * largest, msg=lambda text: f"{what}: {text}")


def test_runs_of_different_data_are_not_put_side_by_side(tmp_path):
    rng = np.random.default_rng(0)
    for head in ("softmax", "gsoftmax"):
        x, y = rng.normal(size=(60, 4)).astype("f4"), np.arange(60) % 3
        np.savez(tmp_path / "table.npz", x_train=x, y_train=y, x_test=x, y_test=y)
        config = Config(
            data=f"npz:{tmp_path / 'table.npz'}", head=head, epochs=1, batch_size=20, threads=1, device="cpu"
        )
        train.train(config, tmp_path / head)
    with pytest.raises(ValueError, match="were trained on different data"):
        report.from_runs([tmp_path / "softmax", tmp_path / "gsoftmax"])
