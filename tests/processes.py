"""Processes for tests, forked from a server that has imported torch already, so that each costs milliseconds.

Every pytest process has its own server, which has no threads that a copy would lack.  What the processes run must be
importable, as for multiprocessing in general.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import multiprocessing
import os
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import uuid
import warnings
from pathlib import Path

import pytest
import torch

from gsoftmax import build, cli

CONTEXT = multiprocessing.get_context("forkserver")
TORCH = ["_dynamo", "distributed.tensor", "distributed.fsdp", "nn.parallel", "optim"]  # an optimizer needs _dynamo
OURS = ["attachment", "cli", "compare", "report", "sharded", "train"]
CONTEXT.set_forkserver_preload(
    ["pytest", "safetensors.torch", *(f"torch.{m}" for m in TORCH), *(f"gsoftmax.{m}" for m in OURS)]
)
PATIENCE = 300  # seconds; only a hanging process takes longer


@pytest.fixture(autouse=True)
def one_thread():
    """Models are small: a second thread costs more than it gains, and the more the busier the machine is."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _start(target, *args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # for the server, if this starts it, and with that for all
        process = CONTEXT.Process(target=target, args=args)
        process.start()
    return process


class Group:
    """Processes that call functions of a module, one after another, in a gloo group that meets in the file `store`."""

    def __init__(self, size: int, module: str, store: Path) -> None:
        self.pipes, theirs = zip(*(CONTEXT.Pipe() for _ in range(size)), strict=True)
        self.process = _start(_split, theirs, module, store)
        for pipe in theirs:
            pipe.close()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self.pipes:
            pipe.close()
        self.process.join(PATIENCE)
        self.process.kill()

    def run(self, function, *args, size: int | None = None) -> list:
        """The results of function(rank, *args) in the first `size` processes; after an error all processes are gone."""
        pipes = self.pipes[:size]
        for pipe in pipes:
            pipe.send((function, args))
        answers = [_answer(pipe) for pipe in pipes]
        wrong = [f"process {rank}: {text}" for rank, (good, text) in enumerate(answers) if not good]
        assert not wrong, "\n".join(wrong)
        return [answer for _, answer in answers]


def _answer(pipe):
    try:
        return pickle.loads(pipe.recv_bytes()) if pipe.poll(PATIENCE) else (False, "no answer")
    except (EOFError, OSError):
        return False, "died"


def _split(pipes, module, store) -> None:
    """Imports the module once, then forks one process per rank."""
    importlib.import_module(module)
    for rank, pipe in enumerate(pipes):
        if os.fork() == 0:
            for other in pipes[:rank] + pipes[rank + 1 :]:
                other.close()
            _obey(pipe, rank, len(pipes), store)
    for pipe in pipes:
        pipe.close()
    for _ in pipes:
        os.wait()


def _obey(pipe, rank, size, store) -> None:
    torch.set_num_threads(1)  # not before the fork: torch replaces a copied pool, and its threads race for that
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*CUDA initialization.*", UserWarning)  # as in pyproject.toml
    try:
        meeting = torch.distributed.FileStore(str(store), size)
        patience = datetime.timedelta(seconds=PATIENCE)
        torch.distributed.init_process_group("gloo", store=meeting, rank=rank, world_size=size, timeout=patience)
        while True:
            try:
                function, args = pipe.recv()
            except EOFError:
                break
            answer = function(rank, *args)
            pipe.send_bytes(pickle.dumps((True, answer)))  # a tensor's values, not a handle to its memory
        torch.distributed.destroy_process_group()
        os._exit(0)
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
        os._exit(1)  # at once, so that processes that wait for this one fail too


def run(size: int, function, *args, store: Path) -> list:
    """The results of function(rank, *args) in `size` new processes, in a group that meets in the file `store`."""
    with Group(size, function.__module__, store) as group:
        return group.run(function, *args)


class Program:
    """A call as a program: with its own session, current folder and environment variables, and captured output."""

    def __init__(self, call, *args, cwd: Path, environment=()) -> None:
        self.args = (call.__name__, *args)
        self.printed = Path(tempfile.mkdtemp(dir=cwd.parent))
        self.process = _start(_be_a_program, call, args, cwd, {**os.environ, **dict(environment)}, self.printed)

    def wait(self) -> subprocess.CompletedProcess[str]:
        """Its status and output, once it has ended."""
        self.process.join(PATIENCE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # and processes that it left behind
        self.process.join()
        out, err = ((self.printed / name).read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess(self.args, self.process.exitcode, out, err)


def _be_a_program(call, args, cwd, environment, printed) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the tests ignore if they run in the background
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which they ignore under nohup
    os.chdir(cwd)
    os.environ.clear()  # the environment of the first test that started a process
    os.environ |= environment
    for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
        with open(printed / name, "wb") as file:
            os.dup2(file.fileno(), {"out": 1, "err": 2}[name])
        stream.reconfigure(line_buffering=True)
    sys.exit(call(*args))


def script(path: Path) -> None:
    """As `python PATH` runs it."""
    sys.argv = [str(path)]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def gsoftmax(*argv: str) -> int:
    """As `gsoftmax ARGV`."""
    return cli.main(list(argv))


def batches_with_signal(epoch: int, batch: int, number: int):
    """In place of build.train_batches: sends this process a signal before a batch."""

    def batches(*args, original=build.train_batches):
        for i, item in enumerate(original(*args), start=1):
            if (args[2], i) == (epoch, batch):
                os.kill(os.getpid(), number)
            yield item

    return batches


def torchrun(size: int, call, *args, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A call in processes with the store and the variables of torchrun: the worst status, and all their output."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"TORCHELASTIC_RUN_ID": uuid.uuid4().hex, "WORLD_SIZE": str(size)}
    started = [
        Program(call, *args, cwd=cwd, environment=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(size)
    ]
    done = [program.wait() for program in started]
    out, err = ("".join(getattr(d, name) for d in done) for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(done[0].args, max((d.returncode for d in done), key=abs), out, err)
