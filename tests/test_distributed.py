"""Runs of several processes: the same numbers as one process, and rank 0 writes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import processes
import pytest
import torch
from processes import one_thread  # noqa: F401
from safetensors.torch import load_file

from gsoftmax import build, cli, distributed, evaluation, runs, train
from gsoftmax.config import Config
from gsoftmax.distributed import World
from gsoftmax.models import load

# Without batch norm, whose statistics are each process's own, the number of processes must not matter.  Batches of 50
# on 3 processes are shares of 17, 17 and 16.
OPTIONS = ["data=digits", "backbone=mlp", "epochs=2", "batch_size=50", "device=cpu", "threads=1", "lr=0.02"]
OPTIONS += ["backbone_options.batchnorm=false", "evaluate_every=1", "accumulate=2", "clip=1.0"]


def config(*changes: str) -> Config:
    return Config().override(cli.parse_changes([*OPTIONS, *changes]))


def outputs_agree(a: Path, b: Path) -> None:
    one, many = load_file(a), load_file(b)
    assert torch.equal(one["y"], many["y"]) and set(one) == set(many)
    for name in ("x", "p", "mu", "sigma", "train_mean"):
        assert (one[name].double() - many[name].double()).abs().max() < 2e-4 * one[name].abs().max(), name


def same_model(many: Path, one: Path) -> None:
    """Whole tensors, whatever the processes had of them."""
    mine, state = (load_file(run / "model.safetensors") for run in (one, many))
    assert set(state) == set(mine) == set(load(many).network.state_dict())
    for name, value in state.items():
        torch.testing.assert_close(value, mine[name], rtol=1e-3, atol=1e-3)


CASES = {
    "tracked": ["head=gsoftmax", "head_options.gaussians=tracked", "head_options.lam=2", "init=data"],
    "learned-fsdp": ["head=gsoftmax", "parallel=fsdp", "optimizer=adamw", "optimizer_options.eps=0.001"],
}


@pytest.mark.parametrize(
    "case, size, by_torchrun",
    [("tracked", 3, False), ("learned-fsdp", 2, False), pytest.param("tracked", 3, True, marks=pytest.mark.slow)],
)
def test_as_one_process(case, size, by_torchrun, tmp_path):
    changes, folder = CASES[case], tmp_path / "many"
    argv = ["train", "digits", *OPTIONS, *changes, "--out", "many"]
    if by_torchrun:
        command = [sys.executable, *["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"], str(size)]
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        command += ["-m", "gsoftmax", *argv]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    else:
        done = processes.torchrun(size, processes.gsoftmax, *argv, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("NLL ") == 1  # printed by rank 0 only
    one, many = train.train(config(*changes), tmp_path / "one"), runs.read_result(folder)
    outputs_agree(tmp_path / "one" / "outputs.safetensors", folder / "outputs.safetensors")
    for key in ("nll", "compactness", "separability", "train_ratio"):
        assert many[key] == pytest.approx(one[key], rel=1e-3), key
    for x, y in zip(runs.read_rows(tmp_path / "one"), runs.read_rows(folder), strict=True):
        assert x.get("loss", 0) == pytest.approx(y.get("loss", 0), rel=1e-4)
        assert x.get("error", 0) == pytest.approx(y.get("error", 0), abs=0.0021)  # one of 500 may fall on either side
    assert runs.read_environment(folder)["processes"] == size
    assert not (folder / "checkpoint").exists() and not (folder / ".lock").exists()
    same_model(folder, tmp_path / "one")
    # a finished run is not trained again, and all processes agree on that
    before = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    again = processes.torchrun(size, processes.gsoftmax, *argv, "--resume", cwd=tmp_path)
    assert again.returncode == 0 and again.stdout == done.stdout, again.stderr
    assert {p: p.stat().st_mtime_ns for p in folder.iterdir()} == before


def _train_and_evaluate_in_shards(*argv):
    assert processes.gsoftmax(*argv) == 0
    if os.environ["RANK"] == "0":
        os.rename("many/outputs.safetensors", "whole.safetensors")
        shutil.rmtree("many")
    evaluation.EVALUATED_WHOLE = 5  # now ten classes are too many to gather
    return processes.gsoftmax(*argv, "--resume")


def test_classes_in_shards(tmp_path):
    """Sharded classes train as on one process; then the evaluation that gathers nothing."""
    argv = ["train", "digits", *OPTIONS, "head=gsoftmax", "head_options.shard=class", "--out", "many"]
    done = processes.torchrun(3, _train_and_evaluate_in_shards, *argv, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    one = train.train(config("head=gsoftmax"), tmp_path / "one")
    outputs_agree(tmp_path / "one" / "outputs.safetensors", tmp_path / "whole.safetensors")
    a = load_file(tmp_path / "one" / "outputs.safetensors")
    last = load_file(tmp_path / "many" / "outputs.safetensors")
    assert set(last) == {"y", "predicted"} and torch.equal(last["y"], a["y"])
    assert (last["predicted"] == a["p"].argmax(1)).float().mean() > 0.99
    result = runs.read_result(tmp_path / "many")
    same_model(tmp_path / "many", tmp_path / "one")
    for key in ("error", "compactness", "separability", "ratio", "dprime"):
        assert result[key] == pytest.approx(one[key], rel=1e-3, abs=0.0021 if key == "error" else 0), key
    with pytest.raises(ValueError, match="head_options.shard=class needs processes: torchrun"):
        train.train(config("head=gsoftmax", "head_options.shard=class"))


def _diverge_on_rank_1(*argv):
    """The Gaussians of this process's classes stop being finite in the second step; the others are good."""
    step, steps = train.Run.step, []

    def poisoned(self):
        step(self)
        steps.append(1)
        if len(steps) == 2 and os.environ["RANK"] == "1":
            with torch.no_grad():
                self.parts.network.head.gaussians.rho.fill_(torch.nan)

    train.Run.step = poisoned
    return processes.gsoftmax(*argv)


def test_a_shard_that_diverges_is_named_by_all_processes(tmp_path):
    """No process waits for the one that raises."""
    argv = ["train", "digits", *OPTIONS, "accumulate=1", "head=gsoftmax", "head_options.shard=class", "--out", "run"]
    done = processes.torchrun(2, _diverge_on_rank_1, *argv, cwd=tmp_path)
    assert done.returncode == 2
    assert "gsoftmax: a weight stopped being finite in epoch 1" in done.stderr, done.stderr


def _stop_in_epoch_two(*argv):
    if os.environ["RANK"] == "1":
        build.train_batches = processes.batches_with_signal(2, 6, signal.SIGTERM)
    return processes.gsoftmax(*argv)


def test_a_checkpoint_of_two_processes_resumes_on_three(tmp_path):
    """Stopped by a signal to one rank, with a mistake in between that is re-raised on every rank.

    The optimizer's state is whole as well: the losses after the resumption show it.
    """
    argv = ["train", "digits", *OPTIONS, "head=gsoftmax", "epochs=4", "--out", "run"]
    done = processes.torchrun(2, _stop_in_epoch_two, *argv, cwd=tmp_path)
    assert done.returncode == 128 + signal.SIGTERM
    assert "gsoftmax: stopped in epoch 2, after batch" in done.stderr, done.stderr
    assert "run the same command with --resume to continue" in done.stderr
    refused = processes.torchrun(2, processes.gsoftmax, *argv, cwd=tmp_path)  # no --resume
    assert refused.returncode == 2 and refused.stderr.count("gsoftmax: run already contains a run") == 1
    done = processes.torchrun(3, processes.gsoftmax, *argv, "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    one = train.train(config("head=gsoftmax", "epochs=4"), tmp_path / "one")
    many = runs.read_result(tmp_path / "run")
    assert many["nll"] == pytest.approx(one["nll"], rel=1e-3)
    rows = [runs.read_rows(tmp_path / name) for name in ("one", "run")]
    assert [r["loss"] for r in rows[1][:-1]] == pytest.approx([r["loss"] for r in rows[0][:-1]], rel=1e-4)


def test_states_are_sent_contiguous():
    """A weight in channels-last order that is sent as it lies arrives as another weight."""
    base = Config(device="cpu")
    parts = build.prepare(base, build.load_data(base), torch.device("cpu"))
    parts.network(torch.randn(2, 1, 8, 8), torch.tensor([1, 2])).backward()
    parts.optimizer.step()
    kept = [*parts.network.parameters(), *(s["momentum_buffer"] for s in parts.optimizer.state.values())]
    state = parts.state()
    sent = [*state["network"].values(), *(s["momentum_buffer"] for s in state["optimizer"]["state"].values())]
    assert not all(v.is_contiguous() for v in kept) and all(v.is_contiguous() for v in sent)


@pytest.mark.parametrize(
    "changes, world, words",
    [
        ({}, World(0, 80), "batch_size must be at least the 80 processes that share it, got 64"),
        ({"ema": 0.9}, World(0, 2), "ema must be 0 with parallel=fsdp and with classes in shards, got 0.9"),
        ({"amp": "fp16"}, World(0, 2), "amp must be off or bf16 with parallel=fsdp"),
    ],
)
def test_mistakes(changes, world, words):
    base = Config(device="cpu", parallel="fsdp")
    with pytest.raises(ValueError, match=words):
        build.prepare(base.override(changes), build.load_data(base), torch.device("cpu"), world)


def test_compare_is_not_for_torchrun(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["compare", "digits", "--out", str(tmp_path / "x")]) == 2
    assert not (tmp_path / "x").exists()


def test_torchrun_resumes_its_own_run_only(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert not distributed.restarted({})
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert distributed.restarted({"torchrun": "mine"})
    assert not distributed.restarted({"torchrun": "another's"}) and not distributed.restarted({})
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert distributed.restarted({})


def test_processes_agree_on_a_name_despite_an_older_group():
    store = torch.distributed.HashStore()
    for key in ("here/0", "here/1", "here/2", "heard/1", "heard/2"):
        store.set(key, "old")
    store.set("session", "old old old")
    with ThreadPoolExecutor(3) as pool:
        names = list(pool.map(lambda rank: distributed._agreed_prefix(store, rank, 3), (1, 2, 0)))
        again = list(pool.map(lambda rank: distributed._agreed_prefix(store, rank, 3), (0, 1, 2)))
    assert len(set(names)) == len(set(again)) == 1 and names != again and "old" not in names


def test_a_lost_process_is_one_line():
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:535] Connection closed by peer [127.0.0.1]:1234\nmore")
    assert distributed._is_loss(lost) and not distributed._is_loss(RuntimeError("shapes do not match"))
