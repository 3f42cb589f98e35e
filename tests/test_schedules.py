"""Schedules against the formulas and NumPy, and hung on optimisers."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch

from gsoftmax.schedules import linspace, logspace, malleable, scheduler, staircase


def test_linspace_and_logspace_are_numpys():
    np.testing.assert_allclose([linspace(1, 0.1, 30)(n) for n in range(1, 31)], np.linspace(1, 0.1, 30))
    np.testing.assert_allclose([logspace(1, 1e-4, 30)(n) for n in range(1, 31)], np.geomspace(1, 1e-4, 30))
    assert linspace(1, 0.5, 30)(31) == 0.5 and linspace(1, 0.5, 1)(1) == 0.5


def test_staircases_of_the_paper():
    wide = staircase({60: 0.2, 120: 0.2, 160: 0.2, 220: 0.2, 260: 0.2})
    assert [0.1 * wide(n) for n in (1, 59, 60, 120, 160, 300)] == pytest.approx(
        [0.1, 0.1, 0.02, 0.004, 0.0008, 0.000032]
    )
    dense = staircase({150: 0.1, 225: 0.1})
    assert [0.1 * dense(n) for n in (149, 150, 224, 225)] == pytest.approx([0.1, 0.01, 0.01, 0.001])


def test_malleable_is_continuous_and_literal_is_as_printed():
    pieces = [(1000, 0, -8), (1100, -8, -9)]
    rate = malleable(pieces)
    logs = np.log([rate(n) for n in range(1, 1101)])
    assert logs[0] == 0 and logs[999] == pytest.approx(-8) and logs[1099] == pytest.approx(-9)
    assert np.abs(np.diff(logs)).max() <= 8 / 999 + 1 / 100 and (np.diff(logs) < 0).all()
    assert malleable(pieces, base=10)(1000) == pytest.approx(1e-8)
    assert rate(2000) == rate(1100)

    printed = malleable([(3, 1.0, 0.1), (5, 0.1, 0.01)], literal=True)
    for n, (a, b) in zip(range(1, 6), [(1, 0.1)] * 3 + [(0.1, 0.01)] * 2, strict=True):
        assert printed(n) == pytest.approx(math.exp(math.log(a) + (math.log(b) - math.log(a)) / 4 * (n - 1)))
    assert printed(4) / printed(3) < 0.1  # so the printed form jumps between its pieces


def optimiser():
    a, b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    return torch.optim.SGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 2.0}])


def test_scheduler_keeps_the_ratio_of_groups_and_resumes():
    schedule = staircase({3: 0.1, 5: 0.1})
    whole, first = optimiser(), optimiser()
    run, part = scheduler(whole, schedule), scheduler(first, schedule)
    rates = []
    for _ in range(6):
        rates.append([g["lr"] for g in whole.param_groups])
        whole.step()
        run.step()
    assert rates == [pytest.approx([0.1 * schedule(n), 2.0 * schedule(n)]) for n in range(1, 7)]

    for _ in range(3):
        first.step()
        part.step()
    second = optimiser()
    resumed = scheduler(second, schedule)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(part.state_dict())
    for n in range(4, 7):
        assert [g["lr"] for g in second.param_groups] == pytest.approx(rates[n - 1])
        second.step()
        resumed.step()


def test_scheduler_per_group():
    opt = optimiser()
    run = scheduler(opt, [linspace(1, 0, 3), staircase({})])
    opt.step()
    run.step()
    assert [g["lr"] for g in opt.param_groups] == pytest.approx([0.05, 2.0])
    with pytest.raises(ValueError, match="one per group .2 groups., got 1"):
        scheduler(optimiser(), [linspace(1, 0, 3)])


def test_schedules_pickle():
    for schedule in (linspace(1, 0, 9), logspace(1, 0.1, 9), staircase({2: 0.5}), malleable([(9, 0, -1)])):
        assert pickle.loads(pickle.dumps(schedule))(5) == schedule(5)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: linspace(1, 0, 0), "epochs must be a positive integer, got 0"),
        (lambda: logspace(0, 1, 5), "a and b must be positive for logspace, got 0 and 1"),
        (lambda: staircase({0: 0.1}), "steps must map epochs >= 1 to positive factors, got 0: 0.1"),
        (lambda: staircase({5: 0.0}), "got 5: 0.0"),
        (lambda: malleable([]), r"pieces must end at increasing epochs >= 1, got \[\]"),
        (lambda: malleable([(5, 0, -1), (5, -1, -2)]), r"got \[5, 5\]"),
        (lambda: malleable([(5, 0, -1)], literal=True), "positive factors with literal=True"),
        (lambda: malleable([(5, 0, -1)], base=0), "base must be positive, got 0"),
        (lambda: staircase({})(0), "epochs count from 1, got 0"),
        (lambda: linspace(1, 0, 5)(0), "epochs count from 1, got 0"),
    ],
)
def test_mistakes(make, words):
    with pytest.raises(ValueError, match=words):
        make()
