"""Triton kernels on a GPU where there is one, and otherwise in Triton's interpreter; for the tests that need either.

Triton decides between the two when it is first imported, which any other test may have done already.  So such a test
file has one test for the outside, which starts a process of its own; what that process runs are the file's functions
called check_*.
"""

from __future__ import annotations

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


def run_checks(file: str) -> None:
    """The check_* functions of a test file, in a process of their own."""
    command = [sys.executable, "-m", "pytest", file, "-q", "-x", "-o", "python_functions=check_*", "-W", "error"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", "--show-capture=no", "--tb=short"]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    if not GPU:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode == CANNOT:
        pytest.skip("the interpreter of this Triton does not work with this numpy")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


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
    torch.use_deterministic_algorithms(True, warn_only=GPU)
    with np.errstate(all="ignore"):
        yield
    torch.use_deterministic_algorithms(False)
