"""Killed, stopped, damaged, locked: afterwards --resume reaches the state of a run that was never disturbed."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import processes
import pytest
import torch
from processes import one_thread  # noqa: F401

from gsoftmax import build, compare, distributed, evaluation, runs, train
from gsoftmax.cli import main
from gsoftmax.config import Config

QUICK = Config(epochs=3, train_fraction=0.3, batch_size=64, threads=1, device="cpu", head="gsoftmax")
DROPOUT = {"backbone_options": {"dropout": 0.2}}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = dict(os.environ, OMP_NUM_THREADS="1")


@pytest.fixture(autouse=True)
def interruptible():
    """A shell starts what it runs in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def outputs(folder: Path) -> bytes:
    return (folder / "outputs.safetensors").read_bytes()


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoint").iterdir())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train.train(QUICK.override(DROPOUT), folder)
    return folder


# ------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("damage", ["truncated", "one bit", "empty", "renamed"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(damage, undisturbed, tmp_path):
    config, folder = QUICK.override(DROPOUT), tmp_path / "run"
    with pytest.raises(InterruptedError):
        train.train(config, folder, progress=_stop_in_epoch(3))
    older, newest = checkpoints(folder)
    content = bytearray(newest.read_bytes())
    if damage == "truncated":
        newest.write_bytes(content[: len(content) // 2])
    elif damage == "empty":
        newest.write_bytes(b"")
    elif damage == "one bit":
        content[len(content) // 2] ^= 4
        newest.write_bytes(content)
    else:
        newest.write_bytes(older.read_bytes())
    with pytest.warns(UserWarning, match="epoch-000002.* was skipped: its content does not match its name"):
        train.train(config, folder, resume=True)
    assert outputs(folder) == outputs(undisturbed)
    assert [r["epoch"] for r in runs.read_rows(folder) if "final" not in r] == [1, 2, 3]


def _stop_in_epoch(epoch):
    def progress(text):
        if text.startswith(f"epoch {epoch}/"):
            raise InterruptedError

    return progress


def test_without_a_good_checkpoint_a_run_begins_again(undisturbed, tmp_path):
    config, folder = QUICK.override(DROPOUT), tmp_path / "run"
    with pytest.raises(InterruptedError):
        train.train(config, folder, progress=_stop_in_epoch(3))
    for path in checkpoints(folder):
        path.write_bytes(b"nothing")
    with pytest.warns(UserWarning, match="was skipped"):
        train.train(config, folder, resume=True)
    assert outputs(folder) == outputs(undisturbed)


def test_damaged_checkpoints_do_not_push_out_new_ones(tmp_path):
    config, folder = QUICK.override({"epochs": 5}), tmp_path / "run"
    with pytest.raises(InterruptedError):
        train.train(config, folder, progress=_stop_in_epoch(5))
    for path in checkpoints(folder):
        path.write_bytes(b"nothing")
    with pytest.warns(UserWarning, match="was skipped"), pytest.raises(InterruptedError):
        train.train(config, folder, resume=True, progress=_stop_in_epoch(3))
    good = [p.name[:12] for p in checkpoints(folder) if p.suffix == ".pt"]
    assert good == ["epoch-000001", "epoch-000002"]


def test_two_checkpoints_are_kept_and_nothing_partial(undisturbed):
    assert [p.name[:12] for p in checkpoints(undisturbed)] == ["epoch-000002", "epoch-000003"]
    assert not list(undisturbed.rglob("*.partial")) and not (undisturbed / ".lock").exists()


def test_the_clock_asks_for_checkpoints_inside_an_epoch(undisturbed, tmp_path, monkeypatch):
    saved = []
    save = runs.RunFolder.save

    def note(self, state):
        saved.append((state["epoch"], state["batch"]))
        save(self, state)
        if len(saved) == 4:
            raise InterruptedError

    monkeypatch.setattr(runs.RunFolder, "save", note)
    config = QUICK.override(DROPOUT | {"checkpoint_minutes": 1e-9})
    with pytest.raises(InterruptedError):
        train.train(config, tmp_path / "run")
    assert saved == [(0, 1), (0, 2), (0, 3), (0, 4)]
    monkeypatch.undo()
    train.train(config, tmp_path / "run", resume=True)
    assert outputs(tmp_path / "run") == outputs(undisturbed)
    whole, resumed = (runs.read_rows(f) for f in (undisturbed, tmp_path / "run"))
    assert [r["loss"] for r in whole[:-1]] == [r["loss"] for r in resumed[:-1]]


def test_weights_that_are_not_finite_are_not_saved(tmp_path, monkeypatch):
    """The gradient of the last batch overflows: its loss is a number, the weights after it are none."""
    forward, seen = build.Network.forward, []

    def poisoned(self, inputs, target, **options):
        loss = forward(self, inputs, target, **options)
        seen.append(1)
        return loss + (self.head.weight * float("inf")).sum() * 0 if len(seen) == 12 else loss

    monkeypatch.setattr(build.Network, "forward", poisoned)
    monkeypatch.setattr(train.Run, "gathered_losses", lambda self: torch.zeros(len(self.losses)).double())
    with pytest.raises(train.Diverged, match="a weight stopped being finite in epoch 2; the last good .*0001"):
        train.train(QUICK, tmp_path / "run")
    [kept] = checkpoints(tmp_path / "run")
    assert all(v.isfinite().all() for v in torch.load(kept, weights_only=True)["network"].values())


def test_a_row_that_was_cut_off_does_not_count(undisturbed, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(InterruptedError):
        train.train(QUICK.override(DROPOUT), folder, progress=_stop_in_epoch(3))
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 3, "lo')
    assert len(runs.read_rows(folder)) == 2
    (folder / "outputs.safetensors.partial").write_text("half")
    train.train(QUICK.override(DROPOUT), folder, resume=True)
    assert outputs(folder) == outputs(undisturbed) and not list(folder.rglob("*.partial"))


# ------------------------------------------------------------------------------------------------------------- locks


def test_a_second_run_in_the_folder_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "import sys; from gsoftmax.files import locked; from pathlib import Path\n"
    code += "with locked(Path('run')): print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        before = sorted(tmp_path.rglob("*"))
        for argv in (
            ["train", "digits", "epochs=1", "--out", "run"],
            ["compare", "digits", "epochs=1", "--out", "run"],
        ):
            assert main(argv) == 2
            assert f"run is in use by process {holder.pid} on" in capsys.readouterr().err
        assert sorted(tmp_path.rglob("*")) == before
        holder.kill()  # its lock goes with it
    assert main(["train", "digits", "epochs=1", "--out", "run"]) == 0
    assert not (tmp_path / "run" / ".lock").exists()


# ----------------------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_how_to_go_on(number, status, undisturbed, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["train", "digits", "epochs=3", "train_fraction=0.3", "threads=1", "device=cpu", "head=gsoftmax"]
    argv += ["backbone_options.dropout=0.2", "--out", "run"]
    batches = data_batches = 0
    original = build.train_batches

    def counted(*args):
        nonlocal batches
        for batch in original(*args):
            batches += 1
            if batches == 9:
                os.kill(os.getpid(), number)
            yield batch

    with monkeypatch.context() as patched:
        patched.setattr(build, "train_batches", counted)
        before = signal.getsignal(number)
        assert main(argv) == status
        assert signal.getsignal(number) is before
    line = "gsoftmax: stopped in epoch 2, after batch 3 of 6; run the same command with --resume to continue\n"
    assert capsys.readouterr().err == line and data_batches == 0
    assert checkpoints(tmp_path / "run")[-1].name.startswith("epoch-000001-batch-00000003-")
    assert main([*argv, "--resume"]) == 0
    assert outputs(tmp_path / "run") == outputs(undisturbed)


def _compare_quickly(*argv):
    """Without importing torch for each run, and without trained epochs until the signal comes: runs wait for it."""
    multiprocessing.get_context = lambda _, find=multiprocessing.get_context: find("fork")
    original = build.train_batches

    def until_stopped(*args):
        for batch in original(*args):
            while args[2] > 1 and not signal.getsignal(signal.SIGTERM).__self__.signal_number:
                time.sleep(0.01)
            yield batch

    build.train_batches = until_stopped
    return processes.gsoftmax(*argv)


@pytest.mark.parametrize(
    "call, epochs", [(_compare_quickly, 3), pytest.param(processes.gsoftmax, 60, marks=pytest.mark.slow)]
)
def test_a_comparison_goes_on_after_ctrl_c(call, epochs, tmp_path):
    """Ctrl-C reaches the process that was started; its runs save and end, and the same command goes on."""
    argv = ["compare", "digits", "--heads", "softmax,gsoftmax", "--seeds", "2", "--jobs", "2", "--out", "out"]
    argv += [f"epochs={epochs}", "train_fraction=0.3", "device=cpu", "threads=1"]
    (tmp_path / "cwd").mkdir()
    out = tmp_path / "cwd" / "out"
    program = processes.Program(call, *argv, cwd=tmp_path / "cwd")
    _wait_for(lambda: len(list(out.glob("*/seed-0/checkpoint/*.pt"))) > 1)
    os.killpg(program.process.pid, signal.SIGINT)
    done = program.wait()
    assert done.returncode == 130, done.stderr
    assert "gsoftmax: stopped; run the same command again to continue" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert len([p for p in out.glob("*/*") if runs.read_result(p)]) < 4
    assert not list(out.rglob("*.partial")) and not list(out.rglob(".lock"))
    config = Config(epochs=epochs, train_fraction=0.3, threads=1, device="cpu")
    compare.compare(config, ["softmax", "gsoftmax"], 2, out, jobs=1)
    train.train(config.override({"head": "gsoftmax"}), tmp_path / "alone")
    assert outputs(out / "gsoftmax" / "seed-0") == outputs(tmp_path / "alone")


def _wait_for(condition, seconds=processes.PATIENCE):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def _start_a_worker():
    parent = os.getpid()
    worker = os.fork() == 0
    with open("alive", "w") as alive:  # held open by both
        if worker:
            compare._follow(parent)
            Path("worker").touch()
        time.sleep(processes.PATIENCE)
        alive.write("still here")


def test_workers_of_a_killed_comparison_do_not_live_on(tmp_path):
    os.mkfifo(tmp_path / "alive")
    program = processes.Program(_start_a_worker, cwd=tmp_path)
    with open(tmp_path / "alive") as alive:
        _wait_for((tmp_path / "worker").exists)
        program.process.kill()
        assert alive.read() == ""  # once nobody has it open


def test_a_worker_of_a_pool_that_was_stopped_takes_no_other_run(monkeypatch):
    monkeypatch.setattr(compare, "_stopped", [])
    monkeypatch.setattr(compare, "_run", lambda *_: compare._note(signal.SIGTERM, None))
    for _ in range(2):
        with pytest.raises(distributed.Stopped):
            compare._run_in_pool(None, None)
    assert compare._stopped and not compare._busy
    compare._note(signal.SIGTERM, None)  # between two runs it is only remembered


def test_a_signal_during_the_last_evaluation_reaches_whoever_comes_next(tmp_path, monkeypatch):
    def evaluate(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return original(*args)

    original = evaluation.Evaluator.evaluate
    monkeypatch.setattr(evaluation.Evaluator, "evaluate", evaluate)
    with pytest.raises(KeyboardInterrupt):
        train.train(QUICK, tmp_path / "run")
    assert runs.read_result(tmp_path / "run")


def test_watch_notes_the_first_signal_and_obeys_the_second(monkeypatch):
    later = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: later.append(number))
    try:
        with distributed.Watch(distributed.World(), minutes=0) as watch:
            assert watch.poll() == watch.GO_ON
            os.kill(os.getpid(), signal.SIGTERM)
            assert watch.poll() == watch.STOP
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1)
        assert later == [signal.SIGTERM]  # nobody has stopped yet
    finally:
        signal.signal(signal.SIGTERM, before)


def test_watch_leaves_ignored_signals_alone():
    """Ctrl-C reaches every process of a terminal; a pool's workers wait for the word of the one who started them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with distributed.Watch(distributed.World(), minutes=0) as watch:
            os.kill(os.getpid(), signal.SIGINT)
            assert watch.poll() == watch.GO_ON
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_comparisons_keep_what_is_done(tmp_path, monkeypatch):
    """A run that fails in the middle of a comparison does not take the others with it."""
    original, calls = train.train, []

    def fail(config, out, **options):
        calls.append(out)
        if len(calls) == 3:
            raise OSError("no space left on device")
        return original(config, out, **options)

    monkeypatch.setattr(compare, "train", fail)
    with pytest.raises(OSError, match="no space"):
        compare.compare(QUICK, ["softmax", "gsoftmax"], 2, tmp_path / "out", jobs=1)
    compare.compare(QUICK, ["softmax", "gsoftmax"], 2, tmp_path / "out", jobs=1)
    assert len(calls) == 5
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert len(summary["metrics"]["error"]["gsoftmax"]["values"]) == 2


# --------------------------------------------------------------------------------------------------- several processes


TWO = ["train", "digits", "head=gsoftmax", "epochs=100", "device=cpu", "threads=1", "batch_size=128", "ema=0.9"]
TWO += ["backbone_options.dropout=0.2"]


@pytest.mark.slow
def test_two_processes_killed_at_twenty_random_moments(tmp_path):
    """SIGKILL to everything, or to one process in torchrun's hands, which then starts both again."""
    done = subprocess.run(
        [*TORCHRUN, "-m", "gsoftmax", *TWO, "--out", "whole"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    generator, folder, kills, where = random.Random(0), tmp_path / "killed", 0, []
    while kills < 20:
        resume = ["--resume"] if (folder / "config.json").exists() else []
        command = [*TORCHRUN, "--max-restarts", "40", "-m", "gsoftmax", *TWO, "--out", "killed", *resume]
        with (
            open(tmp_path / "log", "ab") as log,
            subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=log, stderr=log) as process,
        ):
            try:
                while kills < 20 and process.poll() is None:
                    if generator.random() < 0.7:  # some epochs later; otherwise anywhere from the first import on
                        rows = _rows(folder) + generator.randint(1, 2)
                        _wait_for(lambda: process.poll() is not None or _rows(folder) >= rows, 400)  # noqa: B023
                    time.sleep(generator.uniform(0, 0.4))
                    workers = _workers(process.pid)
                    if process.poll() is not None or not workers:
                        continue
                    if generator.random() < 0.5:
                        _kill(process.pid)  # the launcher first, or it would start others
                        for pid in workers:
                            _kill(pid)
                    else:
                        _kill(generator.choice(workers))
                    kills += 1
                    where.append(_rows(folder))
            finally:
                for pid in (process.pid, *_workers(process.pid)):
                    _kill(pid)
    left = [*TORCHRUN, "-m", "gsoftmax", *TWO, "--out", "killed", "--resume"]
    done = subprocess.run(left, cwd=tmp_path, env=ENVIRONMENT, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    print("rows logged at each kill:", where)
    assert len(set(where)) > 5  # at different moments
    assert outputs(folder) == outputs(tmp_path / "whole")


def _rows(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _workers(launcher: int) -> list[int]:
    try:
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [int(c) for c in children]


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
