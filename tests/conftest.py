"""Reproducible tests: a fixed random state, and no environment variables that affect the package, its command line or
its figures."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

# the dataset folder, variables of torchrun and cluster schedulers, colours, terminal width
for name in ("GSOFTMAX_DATA", "RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "FORCE_COLOR", "COLUMNS"):
    os.environ.pop(name, None)

# Workers of pytest-xdist share the cores, so each uses its share of threads, and so do the processes it starts.
threads = max(1, min(4, torch.get_num_threads() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))
torch.set_num_threads(threads)
os.environ["OMP_NUM_THREADS"] = str(threads)

# EXPLORE=1: Hypothesis tries new examples in every run.  No deadlines: the machine may be busy.
SLOW = [HealthCheck.too_slow]
settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=SLOW)
settings.register_profile("new", deadline=None, print_blob=True, suppress_health_check=SLOW)
settings.load_profile("new" if os.environ.get("EXPLORE") else "same")


@pytest.fixture(autouse=True)
def seeded():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
