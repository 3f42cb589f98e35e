"""Every test starts from the same random state, so that a failure comes back when its test is run again.

What the tests see does not depend on how a machine is set up, either: variables that the package, its command line or
its figures listen to are taken out of the environment.
"""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

# a folder of datasets, a place among processes (as schedulers of clusters set it), colours, the terminal's width
for name in ("GSOFTMAX_DATA", "RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "FORCE_COLOR", "COLUMNS"):
    os.environ.pop(name, None)

# Workers of pytest-xdist share the cores: threads without a core of their own keep the others waiting.  Processes that
# tests start do as their worker does.
threads = max(1, min(4, torch.get_num_threads() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))
torch.set_num_threads(threads)
os.environ["OMP_NUM_THREADS"] = str(threads)

# EXPLORE=1 lets Hypothesis look at new examples in every run.  A busy machine is no reason to fail.
SLOW = [HealthCheck.too_slow]
settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=SLOW)
settings.register_profile("new", deadline=None, print_blob=True, suppress_health_check=SLOW)
settings.load_profile("new" if os.environ.get("EXPLORE") else "same")


@pytest.fixture(autouse=True)
def seeded():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
