"""Runs on several processes: the numbers of one process, one writer, everything synchronised."""

from __future__ import annotations

import json
import os
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

from gsoftmax import build, distributed, evaluation, runs, train
from gsoftmax.config import Config
from gsoftmax.distributed import World

# Without batch norm, whose statistics are each process's own, the number of processes must not matter.  Batches of 50
# on 3 processes are shares of 17, 17 and 16.
OPTIONS = ["data=digits", "backbone=mlp", "epochs=2", "batch_size=50", "device=cpu", "threads=1", "lr=0.02"]
OPTIONS += ["backbone_options.batchnorm=false"]
OPTIONS += ["evaluate_every=1", "accumulate=2", "clip=1.0"]


def single(tmp_path: Path, changes: list[str]) -> dict:
    from gsoftmax.cli import parse_changes

    return train.train(Config().override(parse_changes([*OPTIONS, *changes])), tmp_path / "one")


CASES = {
    "tracked": ["head=gsoftmax", "head_options.gaussians=tracked", "head_options.lam=2", "init=data"],
    "learned-fsdp": ["head=gsoftmax", "parallel=fsdp", "optimizer=adamw", "optimizer_options.eps=0.001"],
}


@pytest.mark.parametrize("case, size", [("tracked", 3), ("learned-fsdp", 2)])
def test_as_one_process(case, size, tmp_path):
    argv = ["train", "digits", *OPTIONS, *CASES[case], "--out", "many"]
    compare(processes.torchrun(size, processes.gsoftmax, *argv, cwd=tmp_path), CASES[case], size, tmp_path)


@pytest.mark.slow
def test_as_one_process_by_torchrun_itself(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "-m", "gsoftmax"]
    command += ["train", "digits", *OPTIONS, *CASES["tracked"], "--out", "many"]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    compare(done, CASES["tracked"], 3, tmp_path)


def compare(done: subprocess.CompletedProcess[str], changes: list[str], size: int, tmp_path: Path) -> None:
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("error ") == 1  # one of them speaks
    one = single(tmp_path, changes)
    many = runs.read_result(tmp_path / "many")
    a, b = (load_file(tmp_path / name / "outputs.safetensors") for name in ("one", "many"))
    assert torch.equal(a["y"], b["y"]) and set(a) == set(b)
    for name in ("x", "p", "mu", "sigma", "train_mean"):
        scale = a[name].abs().max()
        assert (a[name].double() - b[name].double()).abs().max() < 2e-4 * scale, name
    for key in ("nll", "compactness", "separability", "train_ratio"):
        assert many[key] == pytest.approx(one[key], rel=1e-3), key
    rows = [runs.read_rows(tmp_path / name) for name in ("one", "many")]
    for x, y in zip(*rows, strict=True):
        assert x.get("loss", 0) == pytest.approx(y.get("loss", 0), rel=1e-4)
        assert x.get("error", 0) == pytest.approx(y.get("error", 0), abs=0.0021)  # one of 500 may fall on either side
    assert json.loads((tmp_path / "many" / "environment.json").read_text())["processes"] == size
    # one writer, and what several wrote is what one reads
    assert len(list((tmp_path / "many" / "checkpoint").iterdir())) == 2
    state = torch.load(max((tmp_path / "many" / "checkpoint").iterdir()), weights_only=True)
    parts = build.prepare(
        Config().override(_config(changes)), build.load_data(Config(device="cpu")), torch.device("cpu")
    )
    parts.load(state, World())
    mine = torch.load(max((tmp_path / "one" / "checkpoint").iterdir()), weights_only=True)
    for name, value in parts.network.state_dict().items():
        torch.testing.assert_close(value, mine["network"][name], rtol=1e-3, atol=1e-3)
    assert set(state["optimizer"]["state"]) == set(mine["optimizer"]["state"])


def _config(changes):
    from gsoftmax.cli import parse_changes

    return parse_changes([*OPTIONS, *changes])


def _train_and_evaluate_in_shards(*argv):
    assert processes.gsoftmax(*argv) == 0
    if os.environ["RANK"] == "0":
        os.rename("many/outputs.safetensors", "whole.safetensors")
    evaluation.EVALUATED_WHOLE = 5  # now nobody may put ten classes together
    return processes.gsoftmax(*argv, "--resume")


def test_classes_in_shards(tmp_path):
    """Processes with some of the classes each train what one process trains; then measures that gather nothing."""
    argv = ["train", "digits", *OPTIONS, "head=gsoftmax", "head_options.shard=class", "--out", "many"]
    done = processes.torchrun(3, _train_and_evaluate_in_shards, *argv, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    one = single(tmp_path, ["head=gsoftmax"])
    a, b = load_file(tmp_path / "one" / "outputs.safetensors"), load_file(tmp_path / "whole.safetensors")
    assert set(a) == set(b)
    for name in ("x", "p", "mu", "sigma", "train_mean"):
        assert (a[name].double() - b[name].double()).abs().max() < 2e-4 * a[name].abs().max(), name
    last = load_file(tmp_path / "many" / "outputs.safetensors")
    assert set(last) == {"y", "predicted"} and torch.equal(last["y"], a["y"])
    assert (last["predicted"] == a["p"].argmax(1)).float().mean() > 0.99
    result = runs.read_result(tmp_path / "many")
    for key in ("error", "compactness", "separability", "ratio", "dprime"):
        assert result[key] == pytest.approx(one[key], rel=1e-3, abs=0.0021 if key == "error" else 0), key
    with pytest.raises(ValueError, match="head_options.shard=class needs processes: torchrun"):
        single(tmp_path / "again", ["head=gsoftmax", "head_options.shard=class"])


def _stop_in_epoch_two(*argv):
    original = build.train_batches

    def counted(*args):
        for i, batch in enumerate(original(*args)):
            if args[2] == 2 and i == 5 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    build.train_batches = counted
    return processes.gsoftmax(*argv)


def test_a_checkpoint_of_two_processes_resumes_on_three(tmp_path):
    """Stopped by torchrun's own signal in the middle, with a mistake in between that every process must hear of."""
    argv = ["train", "digits", *OPTIONS, "head=gsoftmax", "epochs=4", "--out", "run"]
    done = processes.torchrun(2, _stop_in_epoch_two, *argv, cwd=tmp_path)
    assert done.returncode == 128 + signal.SIGTERM
    assert "gsoftmax: stopped in epoch 2, after batch" in done.stderr, done.stderr
    assert "run the same command with --resume to continue" in done.stderr
    refused = processes.torchrun(2, processes.gsoftmax, *argv, cwd=tmp_path)  # no --resume
    assert refused.returncode == 2 and refused.stderr.count("gsoftmax: run already contains a run") == 1
    done = processes.torchrun(3, processes.gsoftmax, *argv, "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    one = single(tmp_path, ["head=gsoftmax", "epochs=4"])
    many = runs.read_result(tmp_path / "run")
    assert many["nll"] == pytest.approx(one["nll"], rel=1e-3)
    rows = [runs.read_rows(tmp_path / name) for name in ("one", "run")]
    assert [r["loss"] for r in rows[1][:-1]] == pytest.approx([r["loss"] for r in rows[0][:-1]], rel=1e-4)


def test_states_travel_in_the_usual_order_of_memory():
    """A weight in channels-last order that is sent as it lies arrives as another weight."""
    config = Config(device="cpu")
    parts = build.prepare(config, build.load_data(config), torch.device("cpu"))
    parts.network(torch.randn(2, 1, 8, 8), torch.tensor([1, 2])).backward()
    parts.optimizer.step()
    held = [*parts.network.parameters(), *(s["momentum_buffer"] for s in parts.optimizer.state.values())]
    assert not all(v.is_contiguous() for v in held)
    state = parts.state()
    sent = [*state["network"].values(), *(s["momentum_buffer"] for s in state["optimizer"]["state"].values())]
    assert all(v.is_contiguous() for v in sent)


def test_rows_come_back_in_order():
    positions = [torch.tensor([0, 1, 4]), torch.tensor([2, 3])]
    rows = torch.arange(10.0).view(5, 2)
    assert distributed.gather_rows(rows, positions[:1], World()) is rows


def test_mistakes(tmp_path, monkeypatch):
    dataset, cpu = build.load_data(Config(device="cpu")), torch.device("cpu")
    with pytest.raises(ValueError, match="batch_size must be at least the number of processes, 80, .* got 64"):
        build.prepare(Config(device="cpu"), dataset, cpu, World(0, 80))
    with pytest.raises(ValueError, match="ema must be 0 with parallel=fsdp and with classes in shards, got 0.9"):
        build.prepare(Config(device="cpu", ema=0.9, parallel="fsdp"), dataset, cpu, World(0, 2))
    with pytest.raises(ValueError, match="amp must be off or bf16 with parallel=fsdp"):
        build.prepare(Config(device="cpu", amp="fp16", parallel="fsdp"), dataset, cpu, World(0, 2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    from gsoftmax.cli import main

    assert main(["compare", "digits", "--out", str(tmp_path / "x")]) == 2
    assert not (tmp_path / "x").exists()


def test_torchrun_goes_on_with_its_own_run_only(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert not distributed.restarted({})
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert distributed.restarted({"torchrun": "mine"})
    assert not distributed.restarted({"torchrun": "another's"}) and not distributed.restarted({})
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert distributed.restarted({})


def test_processes_agree_on_a_name_whatever_an_older_group_left_behind():
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
