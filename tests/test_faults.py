"""Killed, stopped, damaged, locked: afterwards --resume reproduces an undisturbed run bit for bit."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import processes
import pytest
import torch
from PIL import Image
from processes import one_thread  # noqa: F401
from safetensors.torch import load_file, save_file

from gsoftmax import (
    build,
    compare,
    data,
    distributed,
    evaluation,
    report,
    runs,
    stopping,
    summary,
    train,
    worker,
    workers,
)
from gsoftmax.cli import main
from gsoftmax.config import Config
from gsoftmax.heads import HEADS

QUICK = Config(epochs=3, train_fraction=0.3, batch_size=64, threads=1, device="cpu", head="gsoftmax")
DROPOUT = {"backbone_options": {"dropout": 0.2}}


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


def interrupt(config, folder, epoch=3, resume=False):
    """Stops a run in an epoch, as a crash does."""

    def progress(event):
        if event["epoch"] == epoch:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train.train(config, folder, progress=progress, resume=resume)


@pytest.mark.parametrize("damage", ["truncated", "one bit", "empty", "renamed", "both"])
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(damage, undisturbed, tmp_path):
    config, folder = QUICK.override(DROPOUT), tmp_path / "run"
    interrupt(config, folder)
    older, newest = checkpoints(folder)
    content = newest.read_bytes()
    half = len(content) // 2
    flipped = content[:half] + bytes([content[half] ^ 4]) + content[half + 1 :]
    new = {"truncated": content[:half], "one bit": flipped, "renamed": older.read_bytes()}
    newest.write_bytes(new.get(damage, b""))
    if damage == "both":  # the run begins again
        older.write_bytes(b"nothing")
    which = "[12]" if damage == "both" else "2"
    with pytest.warns(UserWarning, match=f"epoch-00000{which}.* was skipped: its content does not match its name"):
        train.train(config, folder, resume=True)
    assert outputs(folder) == outputs(undisturbed)
    assert [r["epoch"] for r in runs.read_rows(folder) if "final" not in r] == [1, 2, 3]


def test_damaged_checkpoints_do_not_push_out_new_ones(tmp_path):
    config, folder = QUICK.override({"epochs": 5}), tmp_path / "run"
    interrupt(config, folder, 5)
    for path in checkpoints(folder):
        path.write_bytes(b"nothing")
    with pytest.warns(UserWarning, match="was skipped"):
        interrupt(config, folder, 3, resume=True)
    good = [p.name[:12] for p in checkpoints(folder) if p.suffix == ".pt"]
    assert good == ["epoch-000001", "epoch-000002"]


def test_two_checkpoints_are_kept_until_the_end_and_nothing_partial(undisturbed, tmp_path):
    interrupt(QUICK.override({"epochs": 4}), tmp_path / "run", 4)
    assert [p.name[:12] for p in checkpoints(tmp_path / "run")] == ["epoch-000002", "epoch-000003"]
    assert not (undisturbed / "checkpoint").exists()
    for folder in (undisturbed, tmp_path / "run"):
        assert not list(folder.rglob("*.partial")) and not (folder / ".lock").exists()


@pytest.mark.parametrize("written", range(6))
def test_a_crash_between_any_two_writes_at_the_end_loses_nothing(written, undisturbed, tmp_path, monkeypatch):
    """Model, outputs, final row, checksums, one of two checkpoints: the next one is not written or removed."""
    config, folder, count = QUICK.override(DROPOUT), tmp_path / "run", []

    def stop_after(module, name):
        original = getattr(module, name)

        def counted(first, *rest, **options):
            at_end = name != "log" or "final" in rest[0]
            if at_end and len(count) == written:
                raise InterruptedError
            count.extend([1] * at_end)
            return original(first, *rest, **options)

        monkeypatch.setattr(module, name, counted)

    stop_after(runs, "save_tensors")
    stop_after(runs.RunFolder, "log")
    stop_after(runs, "write_sums")
    unlink = Path.unlink

    def checkpoint_gone(path, **options):
        if path.suffix == ".pt" and (folder / "outputs.safetensors").exists():
            if len(count) == written:
                raise InterruptedError
            count.append(1)
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", checkpoint_gone)
    with pytest.raises(InterruptedError):
        train.train(config, folder)
    monkeypatch.undo()
    finished = written > 2
    assert len(count) == written and (runs.read_result(folder) is not None) == finished
    assert len(checkpoints(folder)) == (2 if written < 5 else 1)
    epochs = []
    train.train(config, folder, resume=True, progress=epochs.append)
    assert not epochs  # nothing was trained again
    for name in ("outputs", "model"):
        path = f"{name}.safetensors"
        assert (folder / path).read_bytes() == (undisturbed / path).read_bytes()
    assert runs.read_result(folder) and not (folder / "checkpoint").exists() and (folder / "SHA256SUMS").exists()


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


@pytest.mark.parametrize("head", HEADS)
def test_every_head_says_that_it_diverged(head):
    """With Gaussians too, whose sigma is nan after the step: the loss refuses them."""
    changes = {
        "head": head,
        "lr": 1e12,
        "data": "digits" if getattr(HEADS[head], "singlelabel", True) else "digits-mosaic",
        "epochs": 1,
    }
    with pytest.raises(train.Diverged, match="the loss became (nan|inf) in step [23] |a weight stopped being finite"):
        train.train(QUICK.override(changes))


@pytest.mark.parametrize(
    "call, words",
    [(9, r"the loss became nan in step 9 \(epoch 2, batch 3\)"), (12, "a weight stopped being finite in epoch 2")],
)
def test_a_diverging_run_keeps_the_last_good_checkpoint(call, words, tmp_path, monkeypatch):
    """The loss is not finite, or it is and the weights after the last batch of an epoch are not."""
    forward, calls = build.Network.forward, []

    def poisoned(self, *batch, **options):
        calls.append(1)
        loss = forward(self, *batch, **options)
        return loss + (self.head.weight * float("inf")).sum() * 0 if len(calls) == call else loss

    monkeypatch.setattr(build.Network, "forward", poisoned)
    if call == 12:
        monkeypatch.setattr(train.Run, "gathered_losses", lambda self: torch.zeros(len(self.losses)).double())
    with pytest.raises(train.Diverged, match=words + "; the last good checkpoint is .*epoch-000001-.*pt"):
        train.train(QUICK.override({"head": "softmax"}), tmp_path / "run")
    [kept] = checkpoints(tmp_path / "run")
    state = torch.load(kept, weights_only=True)
    assert state["epoch"] == 1 and all(v.isfinite().all() for v in state["network"].values())


def test_an_incomplete_row_is_ignored(undisturbed, tmp_path):
    folder = tmp_path / "run"
    interrupt(QUICK.override(DROPOUT), folder)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 3, "lo')
    assert len(runs.read_rows(folder)) == 2
    leftover = folder / f".gsoftmax-{'0' * 16}.partial"
    leftover.mkdir()
    (leftover / "outputs.safetensors").write_text("half")
    train.train(QUICK.override(DROPOUT), folder, resume=True)
    assert outputs(folder) == outputs(undisturbed) and not list(folder.rglob("*.partial"))


def test_a_second_run_in_the_folder_is_rejected(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(workers, "PATIENCE", 0.5)  # a comparison waits for another one that writes its report
    monkeypatch.chdir(tmp_path)
    code = "import sys; from gsoftmax.files import locked; from pathlib import Path\n"
    code += "with locked(Path('run')): print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        before = sorted(tmp_path.rglob("*"))
        for command in ("train", "compare"):
            assert main([command, "digits", "epochs=1", "--out", "run"]) == 2
            assert f"run is in use by process {holder.pid} on" in capsys.readouterr().err
        assert sorted(tmp_path.rglob("*")) == before
        holder.kill()  # its lock goes with it
    assert main(["train", "digits", "epochs=1", "--out", "run"]) == 0
    assert not (tmp_path / "run" / ".lock").exists()


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_how_to_continue(number, status, undisturbed, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["train", "digits", "epochs=3", "train_fraction=0.3", "threads=1", "device=cpu", "head=gsoftmax"]
    argv += ["backbone_options.dropout=0.2", "--out", "run"]
    with monkeypatch.context() as patched:
        patched.setattr(build, "train_batches", processes.batches_with_signal(2, 3, number))
        before = signal.getsignal(number)
        assert main(argv) == status
        assert signal.getsignal(number) is before
    line = "gsoftmax: stopped in epoch 2, after batch 3 of 6; run the same command with --resume to continue\n"
    assert capsys.readouterr().err == line
    assert checkpoints(tmp_path / "run")[-1].name.startswith("epoch-000001-batch-00000003-")
    assert main([*argv, "--resume"]) == 0
    assert outputs(tmp_path / "run") == outputs(undisturbed)


def test_a_comparison_continues_after_ctrl_c(tmp_path):
    """Ctrl-C reaches the parent and its workers; the runs save and end, and the same command continues them."""
    epochs = 40
    argv = ["compare", "digits", "--heads", "softmax,gsoftmax", "--seeds", "2", "--jobs", "2", "--out", "out"]
    argv += [f"epochs={epochs}", "train_fraction=0.3", "device=cpu", "threads=1"]
    (tmp_path / "cwd").mkdir()
    out = tmp_path / "cwd" / "out"
    program = processes.Program(processes.gsoftmax, *argv, cwd=tmp_path / "cwd")
    _wait_for(lambda: len(list(out.glob("*/seed-0/checkpoint/*.pt"))) > 1)
    os.killpg(program.process.pid, signal.SIGINT)
    done = program.wait()
    assert done.returncode == 130, done.stderr
    assert "gsoftmax: stopped with 0 of 4 runs finished; run the same command again" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert len([p for p in out.glob("*/*") if runs.read_result(p)]) < 4
    assert not list(out.rglob("*.partial"))
    config = Config(epochs=epochs, train_fraction=0.3, threads=1, device="cpu")
    compare.compare(config, ["softmax", "gsoftmax"], 2, out, jobs=1)
    train.train(config.override({"head": "gsoftmax"}), tmp_path / "alone")
    assert outputs(out / "gsoftmax" / "seed-0") == outputs(tmp_path / "alone")


def _wait_for(condition, seconds=200):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def _start_a_worker():
    """Whose run never ends, or not for hours."""
    task = workers.Task(QUICK.override({"epochs": 10**6, "batch_size": 389}), Path("run"), None)
    workers.run_tasks([task, task._replace(out=Path("other"))], jobs=2)


def _read_many_images():
    """So many that a worker has processes of its own to decode them."""
    config = QUICK.override({"data": "folder:images", "epochs": 0, "train_geometry": False})
    task = workers.Task(config, Path("run"), None)
    workers.run_tasks([task, task._replace(out=Path("other"))], jobs=2)


def _fork_in_a_worker():
    read, write = os.pipe()
    os.dup2(read, 0)
    sys.stdin = open(0)  # noqa: SIM115

    def attempt(*_):
        time.sleep(0.2)  # until the listener waits for the next line
        child = multiprocessing.get_context("fork").Process(target=int)
        child.start()
        child.join()
        os._exit(child.exitcode)

    workers.Task, workers.attempt = Mock(), attempt
    os.write(write, b"{}\n")
    worker.main()


def test_a_worker_can_fork_while_it_listens(tmp_path):
    (tmp_path / "cwd").mkdir()
    program = processes.Program(_fork_in_a_worker, cwd=tmp_path / "cwd")
    _wait_for(lambda: not program.process.is_alive(), 30)
    assert program.wait().returncode == 0


@pytest.mark.slow
def test_workers_read_many_images(tmp_path):
    for k, part in itertools.product(range(2), ("train", "test")):
        folder = tmp_path / "cwd" / "images" / part / str(k)
        folder.mkdir(parents=True)
        Image.new("RGB", (4, 4), (9, 99 * k, 9)).save(folder / "0.png")
        for i in range(1, 2100 if part == "train" else 2):
            os.link(folder / "0.png", folder / f"{i}.png")
    program = processes.Program(_read_many_images, cwd=tmp_path / "cwd")
    _wait_for(lambda: not program.process.is_alive(), 120)
    assert program.wait().returncode == 0


@pytest.mark.parametrize("moment", [pytest.param("loading", marks=pytest.mark.slow), "training"])
def test_workers_die_with_a_killed_comparison(moment, tmp_path):
    (tmp_path / "cwd").mkdir()
    program = processes.Program(_start_a_worker, cwd=tmp_path / "cwd")
    _wait_for(lambda: len(_children(program.process.pid)) == 2)
    if moment == "training":
        _wait_for(lambda: len(list(tmp_path.rglob("config.json"))) == 2)
    started = _children(program.process.pid)
    program.process.kill()
    program.process.join()
    _wait_for(lambda: not any(map(_is_alive, started)), 5)


def _is_alive(process: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    return False


def _kill_first_worker(progress_file):
    """A comparison one of whose workers is killed."""

    def progress(event):
        if event["event"] == "step" and event["name"] == "softmax seed 0" and not Path(progress_file).exists():
            Path(progress_file).touch()
            _kill(_children(os.getpid())[0])

    try:
        compare.compare(QUICK.override({"epochs": 40}), ["softmax", "gsoftmax"], 2, "out", jobs=2, progress=progress)
    except workers.Failed as error:
        print(error)


def test_a_claim_that_another_process_removes_is_taken(tmp_path, monkeypatch):
    """It is there for mkdir, and gone a moment later: its owner has finished the run."""
    task, mkdir = workers.Task(QUICK, tmp_path / "run", None), os.mkdir

    def occupied(path, *rest, **more):
        if os.path.basename(path) == workers.TAKEN:
            raise FileExistsError(17, "File exists", str(path))
        mkdir(path, *rest, **more)

    monkeypatch.setattr(os, "mkdir", occupied)
    assert workers.attempt(task, Mock()) == "taken"
    monkeypatch.undo()
    (tmp_path / "run" / workers.TAKEN).symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError, match="is a link to another folder"):
        workers.attempt(task, Mock())


@pytest.mark.slow
def test_a_killed_worker_costs_one_run(tmp_path):
    (tmp_path / "cwd").mkdir()
    done = processes.Program(_kill_first_worker, "killed", cwd=tmp_path / "cwd").wait()
    assert "1 of 4 runs failed, the first: softmax seed 0: its process was ended by SIGKILL" in done.stdout, done
    out = tmp_path / "cwd" / "out"
    assert sorted(p.relative_to(out).as_posix() for p in out.glob("*/*") if runs.read_result(p)) == [
        "gsoftmax/seed-0",
        "gsoftmax/seed-1",
        "softmax/seed-1",
    ]
    found = summary.so_far(out)
    assert found["seeds"] == [1] and found["incomplete"] == "3 of 4 runs finished"


def test_a_signal_during_the_last_evaluation_reaches_the_caller(tmp_path, monkeypatch):
    def evaluate(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return original(*args)

    original = evaluation.Evaluator.evaluate
    monkeypatch.setattr(evaluation.Evaluator, "evaluate", evaluate)
    with pytest.raises(KeyboardInterrupt):
        train.train(QUICK, tmp_path / "run")
    assert runs.read_result(tmp_path / "run")


@pytest.fixture
def handled():
    """The signals that reach a handler that was there before the watch."""
    noted = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: noted.append(number))
    yield noted
    signal.signal(signal.SIGTERM, before)


def test_watch_notes_the_first_signal_and_obeys_the_second(handled):
    with distributed.Watch(distributed.World(), minutes=0) as watch:
        assert watch.poll() == watch.GO_ON
        os.kill(os.getpid(), signal.SIGTERM)
        assert watch.poll() == watch.STOP
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)  # `timeout` sends it twice at once
            watch._signals._first -= stopping.AGAIN
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
    assert handled == [signal.SIGTERM]  # re-raised, because nothing has stopped yet


def test_watch_keeps_ignored_signals_ignored(handled):
    """Ctrl-C reaches every process of a terminal; a pool's workers leave it to their parent."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with distributed.Watch(distributed.World(), minutes=0) as watch:
        os.kill(os.getpid(), signal.SIGTERM)
        assert watch.poll() == watch.GO_ON
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def _deaf_to_signals(calls):
    """A command that swallows what a signal raises, as a library's callback does."""
    stopping.GRACE, stopping.AGAIN, stopping.AT_ONCE = 1.5, 0.1, 0.2
    with stopping.ending(lambda: print("goodbye", flush=True)):
        while True:
            with contextlib.suppress(stopping.Stopped):
                Path(calls).touch()
                time.sleep(60)


@pytest.mark.parametrize(("number", "twice"), [("SIGTERM", False), ("SIGHUP", True)])
def test_a_process_ends_in_time_whatever_it_does(number, twice, tmp_path):
    (tmp_path / "cwd").mkdir()
    program = processes.Program(_deaf_to_signals, "ready", cwd=tmp_path / "cwd")
    _wait_for((tmp_path / "cwd" / "ready").exists)
    start = time.monotonic()
    os.kill(program.process.pid, getattr(signal, number))
    if twice:
        time.sleep(0.3)
        os.kill(program.process.pid, getattr(signal, number))
    done = program.wait()
    assert done.returncode == 128 + getattr(signal, number) and done.stdout == "goodbye\n"
    assert twice or time.monotonic() - start > 1.4


def test_a_signal_that_is_ignored_stays_ignored(handled):
    """As SIGHUP under nohup."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with stopping.ending(lambda: None), stopping.Requests() as asked:
        os.kill(os.getpid(), signal.SIGTERM)
        assert not asked.number
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_comparisons_keep_what_is_done(tmp_path, monkeypatch):
    """A run that fails in the middle of a comparison leaves the finished ones."""
    original, calls = train.train, []

    def fail(config, out, **options):
        calls.append(out)
        if len(calls) == 3:
            raise OSError("no space left on device")
        return original(config, out, **options)

    monkeypatch.setattr(workers, "train", fail)
    words = "1 of 4 runs failed, the first: softmax seed 1: no space left on device"
    with pytest.raises(workers.Failed, match=words):
        compare.compare(QUICK, ["softmax", "gsoftmax"], 2, tmp_path / "out", jobs=1)
    assert len(calls) == 4
    compare.compare(QUICK, ["softmax", "gsoftmax"], 2, tmp_path / "out", jobs=1)
    assert len(calls) == 5
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert len(summary["metrics"]["error"]["gsoftmax"]["values"]) == 2


@pytest.mark.parametrize("imported", ["gsoftmax.messages", "gsoftmax.cli"])
def test_ctrl_c_while_a_command_starts_is_no_traceback(imported, tmp_path):
    """While modules are imported, and while the options are parsed."""
    argv = [sys.executable, "-X", "importtime", "-m", "gsoftmax", "train", "digits", "--out", "run"]
    with subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as command:
        said = [next(line for line in command.stderr if line.split()[-1] == imported)]
        command.send_signal(signal.SIGINT)
        said += command.stderr
    assert command.returncode in (-signal.SIGINT, 128 + signal.SIGINT), "".join(said)
    assert "Traceback" not in "".join(said) and not (tmp_path / "run").exists()


SMALL = ["compare", "digits", "--heads", "softmax,gsoftmax", "--seeds", "2", "--jobs", "1", "--out", "o"]
SMALL += ["epochs=1", "train_fraction=0.3", "device=cpu"]


@pytest.mark.parametrize("finished, shows", [(0, ""), (1, "finished run"), (3, "3 finished runs")])
def test_a_stopped_comparison_says_what_shows_its_finished_runs(finished, shows, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    original, calls = train.train, []

    def stop(*args, **options):
        calls.append(1)
        if len(calls) > finished:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **options)

    monkeypatch.setattr(workers, "train", stop)
    assert main(SMALL) == 128 + signal.SIGTERM
    line = f"gsoftmax: stopped with {finished} of 4 runs finished; run the same command again to continue"
    assert capsys.readouterr().err.splitlines()[-1] == line + f"; gsoftmax report o shows the {shows}" * bool(shows)
    assert main(["report", "o", "--figures", ""]) == (0 if finished else 2)


@pytest.mark.parametrize("damage", ["one bit", "no checksums"])
def test_damaged_outputs_of_a_comparison_are_named(damage, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(SMALL) == 0 and "paired over images" in capsys.readouterr().out
    path = Path("o/gsoftmax/seed-1/outputs.safetensors")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content if damage == "one bit" else b"nothing")
    if damage != "one bit":
        path.with_name("SHA256SUMS").unlink()
    assert main(SMALL) == 1
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and err.startswith(f"gsoftmax: no page was written: {path} is ")
    assert err.endswith("; remove its folder and run the same command again\n")
    assert f"\nno test over images: {path} is " in out and "paired by seed" in out and "no page" not in out
    shutil.rmtree(path.parent)
    assert main(SMALL) == 0 and "paired over images" in capsys.readouterr().out


def test_the_page_of_a_comparison_is_interrupted_with_all_runs_kept(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "write_page", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    argv = ["compare", "digits", "--heads", "softmax", "--seeds", "1", "--jobs", "1", "epochs=1", "train_fraction=0.3"]
    assert main([*argv, "--out", str(tmp_path / "out")]) == 128 + signal.SIGTERM
    words = "stopped while the report was being made; all finished runs are kept; run the same command again"
    assert capsys.readouterr().err.endswith(f"gsoftmax: {words} to continue\n")


# -------------------------------------------------------------------------- other data, another head, another folder


def write_rows(path: Path, noise: bool = False) -> None:
    """Two classes that differ, or do not."""
    rng = np.random.default_rng(1)
    y = np.arange(80) % 2
    x = rng.normal(size=(80, 3)) + (0 if noise else 4) * y[:, None]
    np.savez(path, x_train=x[:60], y_train=y[:60], x_test=x[60:], y_test=y[60:])


HEAD = "from gsoftmax.heads import SoftmaxHead\n\n\nclass Head(SoftmaxHead):\n    pass\n"


@pytest.fixture
def other_inputs(tmp_path, monkeypatch):
    """A run's command, and functions that change what it reads."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_head.py").write_text(HEAD)
    sys.modules.pop("my_head", None)
    write_rows(tmp_path / "rows.npz")
    data_root = tmp_path / "root"
    data.write_smoke("cifar10", data_root)

    def other_root():
        batch = data_root / "cifar-10-batches-py" / "test_batch"
        content = bytearray(batch.read_bytes())
        content[len(content) // 2] ^= 64  # of a pixel
        batch.write_bytes(content)
        monkeypatch.setattr(data, "stamp", lambda _: (1,))  # as in a new process: nothing that was read is remembered

    def save_weights(value=0.0):
        model = train.train(Config(data="npz:rows.npz", epochs=0, batch_size=20), "weights", resume=True)
        assert model
        held = load_file("weights/model.safetensors")
        held = {k.removeprefix("backbone."): v + value for k, v in held.items() if k.startswith("backbone.")}
        save_file(held, "w.safetensors")

    save_weights()
    return {
        "data": (["npz:rows.npz"], lambda: write_rows(tmp_path / "rows.npz", noise=True)),
        "root": (["cifar10", "--data", str(data_root)], other_root),
        "head": (["npz:rows.npz"], lambda: (tmp_path / "my_head.py").write_text(HEAD + "# new\n")),
        "weights": (["npz:rows.npz", "weights=w.safetensors"], lambda: save_weights(0.5)),
    }


@pytest.mark.parametrize("what", ["data", "root", "head", "weights"])
@pytest.mark.parametrize("finished", [True, False])
def test_a_run_of_other_data_is_neither_reused_nor_resumed(what, finished, other_inputs, tmp_path, monkeypatch, capsys):
    words, change = other_inputs[what]
    head = "my_head:Head" if what == "head" else "softmax"
    words = [*words, "batch_size=20", "threads=1", "device=cpu", f"epochs={int(what != 'root')}"]
    one, several = (
        ["train", *words, f"head={head}", "--out", "run"],
        ["compare", *words, "--heads", head, "--out", "all"],
    )
    several += ["--seeds", "1", "--jobs", "1"]
    with monkeypatch.context() as patched:
        if not finished:
            patched.setattr(train.Run, "finish", Mock(side_effect=KeyboardInterrupt))
        assert [main(one), main(several)] == [0 if finished else 130] * 2
    before = {p: p.read_bytes() for p in tmp_path.rglob("run/*") if p.is_file()}
    capsys.readouterr()
    change()
    name = "data" if what == "root" else what
    says = rf"contains a run with {name}=\S+ as it was before it changed \(fingerprint \w{{8}}, now \w{{8}}\)"
    for again in ([*one, "--resume"], several):
        assert main(again) == 2
        err = capsys.readouterr().err
        assert re.search(says, err) and err.count("\n") == 1, err
    assert {p: p.read_bytes() for p in before} == before


def test_runs_of_different_data_are_not_compared(other_inputs, tmp_path, capsys):
    words = ["npz:rows.npz", "batch_size=20", "epochs=1", "device=cpu", "threads=1"]
    argv = ["compare", *words, "--heads", "softmax,gsoftmax", "--seeds", "2", "--jobs", "1", "--out", "o", "--only"]
    assert main([*argv, "1/2"]) == 0  # both seeds of softmax
    other_inputs["data"][1]()
    capsys.readouterr()
    assert main([*argv, "2/2"]) == 2
    assert "seed-0 contains a run with data=npz:rows.npz as it was before it changed" in capsys.readouterr().err
    assert not Path("o/gsoftmax").exists()  # nothing was trained
    assert main(["train", *words, "head=gsoftmax", "--out", "o/gsoftmax/seed-0"]) == 0
    capsys.readouterr()
    assert main(["report", "o"]) == 2
    says = r"gsoftmax: o/\S+ and o/\S+ were trained on different data: npz:rows.npz changed between them \(.*\n"
    assert re.fullmatch(says, capsys.readouterr().err)
    run = Path("o/gsoftmax/seed-0")
    described = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps({k: v for k, v in described.items() if k != "fingerprints"}))
    (run / "SHA256SUMS").unlink()
    assert main(["report", "o", "--figures", ""]) == 0  # of an older version


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


HELPED = "from gsoftmax.heads import SoftmaxHead\nimport helper_a\n\n\nclass Head(SoftmaxHead):\n    pass\n"


def test_a_helper_of_a_head_is_part_of_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, {"helped.py": HELPED, "helper_a.py": "import helper_b\n", "helper_b.py": "SCALE = 1\n"})
    argv = ["compare", "digits", "--heads", "helped:Head", "--jobs", "1", "--out", "o", "epochs=0", "device=cpu"]
    assert main([*argv, "--seeds", "1"]) == 0
    write(tmp_path, {"helper_b.py": "SCALE = 2\n"})
    capsys.readouterr()
    assert main([*argv, "--seeds", "2"]) == 2
    err = capsys.readouterr().err
    says = r"head=helped:Head as it was before a module that it imports changed \(fingerprint \w{8}, now \w{8}\)"
    assert re.search(says, err) and err.count("\n") == 1
    path = Path("o/helped-Head/seed-0/environment.json")  # as an older version wrote it
    described = json.loads(path.read_text())
    assert set(described["fingerprints"]) == {"data", "head", "head_imports"}
    del described["fingerprints"]["head_imports"]
    path.write_text(json.dumps(described))
    path.with_name("SHA256SUMS").unlink()
    assert main([*argv, "--seeds", "2"]) == 0


@pytest.mark.parametrize(
    "place, head, changed, seen",
    [
        ("", "p_flat", "p_one.py", True),  # from p_one import x
        ("", "p_flat", "p_late.py", True),  # imported inside a function, whether that has run or not
        ("", "p_flat", "p_other.py", False),  # in the folder, imported by something else
        ("", "p_box.heads.mine", "p_box/__init__.py", True),
        ("", "p_box.heads.mine", "p_box/parts.py", True),  # from .. import parts
        ("", "p_box.heads.mine", "p_box/heads/near.py", True),  # from .near import x
        ("", "p_box.heads.mine", "p_box/unused.py", False),
        ("", "p_box.heads.mine", "p_one.py", True),  # beside the package
        ("lib/site-packages", "p_box.heads.mine", "p_box/parts.py", True),
        ("lib/site-packages", "p_box.heads.mine", "p_one.py", False),  # another installed package
    ],
)
def test_a_head_is_known_by_the_modules_it_imports(place, head, changed, seen, tmp_path, monkeypatch):
    base = "from gsoftmax.heads import SoftmaxHead as Head\n\n\nclass Mine(Head):\n    pass\n"
    late = "\n\ndef f():\n    import p_late\n"
    files = dict.fromkeys(("p_late.py", "p_other.py", "p_box/__init__.py", "p_box/parts.py", "p_box/unused.py"), "")
    files |= {
        "p_one.py": "x = 1\n",
        "p_flat.py": f"from p_one import x\n{base}{late}",
        "p_box/heads/near.py": "x = 1\n",
    }
    files["p_box/heads/mine.py"] = f"import p_one\nfrom .. import parts\nfrom .near import x\n{base}"
    folder = tmp_path / place
    write(folder, files)
    monkeypatch.syspath_prepend(folder)
    config = Config(head=f"{head}:Mine", device="cpu")
    try:
        first = build.fingerprints(config)
        importlib.import_module("p_late")
        importlib.import_module("p_other")
        assert build.fingerprints(config) == first
        write(folder, {changed: "x = 2\n"})
        again = build.fingerprints(config)
    finally:
        for name in [name for name in sys.modules if name.startswith("p_")]:
            del sys.modules[name]
    assert again["head"] == first["head"] and (again != first) == seen


def test_a_run_without_fingerprints_is_believed(other_inputs):
    """Versions before they were recorded left such folders."""
    words = ["train", "npz:rows.npz", "epochs=1", "batch_size=20", "threads=1", "device=cpu", "--out", "run"]
    assert main(words) == 0
    described = json.loads(Path("run/environment.json").read_text())
    assert set(described.pop("fingerprints")) == {"data"}
    Path("run/environment.json").write_text(json.dumps(described))
    Path("run/SHA256SUMS").unlink()
    other_inputs["data"][1]()
    assert main([*words, "--resume"]) == 0


def test_the_fingerprint_of_image_files_sees_names_sizes_and_contents(tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.jpg").write_bytes(bytes([i]) * 100)

    def fingerprint():
        split = data.Split(tuple(map(str, sorted(tmp_path.iterdir()))), torch.tensor([0, 1, 0, 1]))
        return data.Dataset("x", "files", ("a", "b"), False, split, split).fingerprint()

    first = fingerprint()
    assert fingerprint() == first
    (tmp_path / "3.jpg").write_bytes(bytes([9]) * 100)
    second = fingerprint()
    (tmp_path / "3.jpg").write_bytes(bytes([9]) * 101)
    third = fingerprint()
    (tmp_path / "3.jpg").rename(tmp_path / "4.jpg")
    os.utime(tmp_path / "4.jpg", (1, 1))
    assert len({first, second, third, fingerprint()}) == 4


@pytest.mark.parametrize("lost", ["outputs.safetensors", "the end of metrics.jsonl"])
def test_a_finished_run_is_never_trained_again(lost, undisturbed, tmp_path):
    """It has no checkpoints any more: training would begin again, and the final row would be gone first."""
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    rows = run / "metrics.jsonl"
    if lost == "outputs.safetensors":
        (run / lost).unlink()
        says = "is a finished run without outputs.safetensors"
    else:
        rows.write_bytes(rows.read_bytes()[:-9])
        says = "metrics.jsonl is damaged: it does not match its checksum in SHA256SUMS"
    before = rows.read_bytes()
    with pytest.raises(ValueError, match=says):
        train.train(QUICK.override(DROPOUT), run, resume=True)
    assert rows.read_bytes() == before


@pytest.mark.parametrize("name", ["config.json", "environment.json", "metrics.jsonl", "model.safetensors"])
def test_checksums_are_those_of_sha256sum(name, undisturbed, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    check = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    assert subprocess.run(check, cwd=run, capture_output=True).returncode == 0
    content = bytearray((run / name).read_bytes())
    content[-20] ^= 1
    (run / name).write_bytes(content)
    assert subprocess.run(check, cwd=run, capture_output=True).returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["iso-8859-1", "ascii", "cp1252", "utf-8"])
def test_a_comparison_reaches_its_page_in_a_locale_without_utf_8(encoding, tmp_path):
    """Names of folders, classes and files that neither the locale nor the terminal has."""
    shown, root = "Käse 红", tmp_path / "Bilder-ü"
    data.write_smoke("folder", tmp_path)
    os.rename(tmp_path / "folder", root)
    for part in ("train", "test"):
        os.rename(root / part / "red", root / part / shown)
    words = ["compare", f"folder:{root}", "--heads", "softmax,gsoftmax", "--seeds", "1", "--jobs", "1"]
    words += ["epochs=1", "batch_size=8", "threads=1", "device=cpu", "--out", "Läufe"]
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": encoding}
    if encoding == "iso-8859-1":  # also the names of files, where this locale can be made
        made = ["localedef", "-i", "en_US", "-f", "ISO-8859-1", str(tmp_path / "en_US.ISO-8859-1")]
        if shutil.which(made[0]) and subprocess.run(made, capture_output=True).returncode == 0:
            environment |= {"LC_ALL": "en_US.ISO-8859-1", "LOCPATH": str(tmp_path)}
    environment = {k: v for k, v in os.environ.items() if k != "LANG"} | environment | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "gsoftmax", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=processes.PATIENCE)
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
    page = (tmp_path / "Läufe" / "report.html").read_text("utf-8")
    taken_for = "iso-8859-1" if "LOCPATH" in environment else "utf-8"
    assert all(name.encode().decode(taken_for) in page for name in (shown, "Bilder-ü"))
    assert "\ufffd" not in page.split("<script")[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cells", ["compare training TERM ", "compare report INT2", "compare-1 evaluating HUP", "train"]
)
def test_signals_at_some_moments(cells, tmp_path):
    """All of them: `python -m fuzz.signals`."""
    words = [sys.executable, "-m", "fuzz.signals", str(tmp_path / "cells.json"), cells]
    done = subprocess.run(words, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0 and json.loads((tmp_path / "cells.json").read_bytes()), done.stdout + done.stderr


SHARED = ["compare", "digits", "--heads", "softmax,gsoftmax", "--seeds", "32", "--jobs", "1", "--out", "out", "--json"]
SHARED += ["epochs=3", "train_fraction=0.3", "device=cpu", "threads=1"]


@pytest.mark.slow
def test_sixteen_processes_share_a_folder_and_two_are_killed(tmp_path):
    """Every run is trained to its end once, by one of them."""
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    finished = "out/*softmax/*/outputs.safetensors"  # not */*: that would look into folders that vanish
    programs = [processes.Program(processes.gsoftmax, *SHARED, cwd=cwd) for _ in range(16)]
    try:
        for count, program in zip((8, 24), programs, strict=False):  # in the middle of something
            _wait_for(lambda count=count: len(list(cwd.glob(finished))) > count, 600)
            program.process.kill()
        done = [program.wait() for program in programs]
    finally:
        _kill(*(program.process.pid for program in programs if program.process.is_alive()))
    failed = [d.stderr for d in done if d.returncode > 0]
    assert [d.returncode for d in done] == [-signal.SIGKILL] * 2 + [0] * 14, failed
    ends = [json.loads(line) for d in done for line in d.stdout.splitlines() if line.startswith('{"event": "end"')]
    trained = [end["run"] for end in ends if end["trained"]]
    assert len(trained) == len(set(trained)) >= 62  # a killed process may have finished a run without saying so
    folders = [p for p in cwd.glob("out/*/seed-*") if runs.read_result(p)]
    assert len(folders) == 64 and (cwd / "out" / "report.html").exists()
    assert json.loads((cwd / "out" / "summary.json").read_bytes())["seeds"] == list(range(32))
    config = Config(epochs=3, train_fraction=0.3, threads=1, device="cpu", head="gsoftmax", seed=17)
    train.train(config, tmp_path / "alone")
    assert outputs(cwd / "out" / "gsoftmax" / "seed-17") == outputs(tmp_path / "alone")


def test_parts_of_a_comparison_make_the_whole(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["compare", "digits", "--heads", "softmax,gsoftmax", "--seeds", "2", "--jobs", "1", "--out", "o"]
    argv += ["epochs=1", "train_fraction=0.3", "device=cpu"]
    assert main([*argv, "--only", "2/3"]) == 0
    printed = capsys.readouterr().out
    assert "1 run of the 4 of this comparison, 1 epoch each, 1 at a time" in printed
    assert printed.endswith("3 runs of other processes missing; gsoftmax report o shows the others\n")
    assert main([*argv, "--only", "3/3"]) == 0 and main(["report", "o", "--figures", "", "--out", "page"]) == 0
    assert "incomplete: 2 of 4 runs finished" in capsys.readouterr().out.replace("\n  ", " ")
    assert "incomplete: 2 of 4 runs finished" in (tmp_path / "page" / "report.html").read_text("utf-8")
    assert not (tmp_path / "o" / "report.html").exists()
    assert main([*argv, "--only", "1/3"]) == 0 and (tmp_path / "o" / "report.html").exists()
    compare.compare(Config(epochs=1, train_fraction=0.3, device="cpu", threads=1), ["softmax", "gsoftmax"], 2, "whole")
    assert (tmp_path / "o" / "summary.json").read_bytes().split(b'"seconds"')[0] == (
        (tmp_path / "whole" / "summary.json").read_bytes().split(b'"seconds"')[0]
    )


@pytest.mark.parametrize("only", ["0/3", "4/3", "1", "a/b"])
def test_parts_are_written_k_of_n(only, capsys, tmp_path):
    assert main(["compare", "digits", "--only", only, "--out", str(tmp_path / "o")]) == 2
    assert only in capsys.readouterr().err and not (tmp_path / "o").exists()


TWO = ["train", "digits", "head=gsoftmax", "epochs=100", "device=cpu", "threads=1", "batch_size=128", "ema=0.9"]
TWO += ["backbone_options.dropout=0.2", "--out"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TORCHRUN += ["--max-restarts", "40", "-m", "gsoftmax", *TWO]


@pytest.mark.slow
def test_two_processes_killed_at_twenty_random_moments(tmp_path):
    """SIGKILL to everything, or to one process of torchrun, which then restarts both."""
    options = {"cwd": tmp_path, "env": dict(os.environ, OMP_NUM_THREADS="1")}
    generator, folder, kills = random.Random(0), tmp_path / "killed", []
    while len(kills) < 20:
        resume = ["--resume"] if (folder / "config.json").exists() else []
        with (
            open(tmp_path / "log", "ab") as log,
            subprocess.Popen([*TORCHRUN, "killed", *resume], stdout=log, stderr=log, **options) as launcher,
        ):
            try:
                while len(kills) < 20 and launcher.poll() is None:
                    if generator.random() < 0.7:  # some epochs later; otherwise anywhere from the first import on
                        rows = _rows(folder) + generator.randint(1, 2)
                        _wait_for(lambda: launcher.poll() is not None or _rows(folder) >= rows, 400)  # noqa: B023
                    time.sleep(generator.uniform(0, 0.4))
                    workers = _children(launcher.pid)
                    if launcher.poll() is None and workers:
                        everything = generator.random() < 0.5  # the launcher first, or it would start others
                        _kill(*([launcher.pid, *workers] if everything else [generator.choice(workers)]))
                        kills.append(_rows(folder))
            finally:
                _kill(launcher.pid, *_children(launcher.pid))
    for argv in (["whole"], ["killed", "--resume"]):
        done = subprocess.run([*TORCHRUN, *argv], capture_output=True, **options)
        assert done.returncode == 0, done.stderr.decode()
    assert len(set(kills)) > 5, kills  # at different moments
    assert outputs(folder) == outputs(tmp_path / "whole")


def _rows(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _children(process: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return [int(c) for c in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


def _kill(*processes: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@pytest.mark.slow
def test_faults_at_awkward_moments(tmp_path):
    """Every case of the script: killed in the middle of a write, a full disk, folders that are gone or read-only."""
    script = Path(__file__).parents[1] / "fuzz" / "faults.py"
    words = [sys.executable, script, tmp_path / "faults.json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "faults.json").read_bytes())
    assert len(rows) == int(done.stdout.splitlines()[-1].split()[0]) > 40
    assert sum(row["ok"] is True for row in rows) > 40 and all(row["command"].startswith("gsoftmax ") for row in rows)


def test_a_queue_of_other_processes_is_waited_for(tmp_path, monkeypatch):
    """Patience is with one of them, however many have their turn before."""
    monkeypatch.setattr(workers, "PATIENCE", 0.3)
    turns = iter([*(f"process {i}" for i in range(8)), ""])

    @contextlib.contextmanager
    def locked(folder):
        if owner := next(turns):
            raise BlockingIOError(f"{folder} is in use by {owner}")
        yield

    monkeypatch.setattr(workers, "locked", locked)
    with workers.locked_when_free(tmp_path):
        pass
    turns = itertools.repeat("process 9")
    with pytest.raises(BlockingIOError, match="process 9"), workers.locked_when_free(tmp_path):
        pass
