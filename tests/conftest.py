"""Every test starts from the same random state, so that a failure comes back when its test is run again."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

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
