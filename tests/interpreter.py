"""Triton kernels on a GPU where there is one, and otherwise in Triton's interpreter; for the tests that need either.

Triton decides between the two when it is first imported, which any other test may have done already.  So what tests
kernels is in functions called check_*, which run in another process, one for all files that have such functions.
Those files end with `test_on_the_kernels = in_another_process(__file__, globals())`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
INSIDE = GPU or os.environ.get("TRITON_INTERPRET") == "1"
CANNOT = 77

# On a GPU some of torch's own operations say that they can't promise the same bits twice.
quiet = pytest.mark.filterwarnings("ignore:.*deterministic")


@functools.cache
def _process() -> subprocess.Popen[str]:
    """Reads one check name per line and answers with one line; ends with its parent."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    environment.pop("PYTEST_ADDOPTS", None)
    if not GPU:
        environment["TRITON_INTERPRET"] = "1"
    pipe = subprocess.PIPE
    started = subprocess.Popen([sys.executable, __file__], env=environment, stdin=pipe, stdout=pipe, text=True)
    started.stdout.readline()  # all is imported
    return started


@pytest.fixture
def process():
    pytest.importorskip("triton", reason="Triton is not installed")
    return _process()


def in_another_process(file: str, names: dict[str, object]):
    """A test for each check among the names of a test file."""

    @pytest.mark.parametrize("check", [name for name in names if name.startswith("check_")])
    def test(check, process):
        print(json.dumps(f"{file}::{check}"), file=process.stdin, flush=True)
        answer = process.stdout.readline()
        if not answer:
            _process.cache_clear()
            pytest.fail(f"the process that runs the checks ended with {process.wait()}")
        status, output = json.loads(answer)
        if status == CANNOT:
            pytest.skip("the interpreter of this Triton does not work with this numpy")
        assert status == 0, output[-6000:]
        if " passed" not in output:
            pytest.skip("it needs a GPU")

    return test


def _answer() -> None:
    options = ["-q", "-x", "-o", "addopts=", "-o", "python_functions=check_*", "-W", "error", "-p", "no:cacheprovider"]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # where anything else is printed
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            status = pytest.main([*options, "--show-capture=no", "--tb=short", json.loads(line)])
        gc.freeze()  # pytest collects garbage five times per run; skip torch's objects
        print(json.dumps([status, output.getvalue()]), file=answers, flush=True)
    gc.unfreeze()


if INSIDE:
    import triton
    import triton.language as tl

    @triton.jit
    def _count(out, n):
        for _ in range(0, n):
            tl.store(out, tl.load(out) + 1)


@pytest.fixture(autouse=True, scope="session")
def loops():
    """Interpreters up to that of Triton 3.6 stop at any loop, since numpy 2.4 makes no number of an array any more."""
    if INSIDE and not GPU:
        try:
            _count[(1,)](torch.zeros(1), 3)
        except Exception:
            pytest.exit("no loops in the interpreter", returncode=CANNOT)


@pytest.fixture(autouse=True)
def poisoned():
    """torch.empty gives NaN, or the largest integer, so that what a kernel does not write is seen; numpy is quiet."""
    torch.set_deterministic_debug_mode("warn" if GPU else "error")  # without the import that the other way brings
    with np.errstate(all="ignore"):
        yield
    torch.set_deterministic_debug_mode("default")


if __name__ == "__main__":
    _answer()
