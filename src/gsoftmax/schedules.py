"""Learning-rate schedules of the paper: functions from the epoch, counted from 1, to a factor on the initial rate.

>>> schedule = staircase({60: 0.2, 120: 0.2})
>>> schedule(1), schedule(60), schedule(200)
(1.0, 0.2, 0.04000000000000001)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

__all__ = ["Schedule", "linspace", "logspace", "malleable", "scheduler", "staircase", "warm_up"]

Schedule = Callable[[int], float]


def linspace(a: float, b: float, epochs: int) -> Schedule:
    """a + (b - a) (n - 1) / (M - 1): linear from a at epoch 1 to b at epoch M, then constant.

    a, b: first and last factor
    epochs: M

    >>> [linspace(1.0, 0.0, 5)(n) for n in (1, 3, 5, 6)]
    [1.0, 0.5, 0.0, 0.0]
    """
    _check_epochs(epochs)
    if not (math.isfinite(a) and math.isfinite(b)):
        raise ValueError(f"a and b must be finite, got {a!r} and {b!r}")
    return functools.partial(_line, float(a), float(b), 1, epochs)


def logspace(a: float, b: float, epochs: int) -> Schedule:
    """exp(log a + (log b - log a) (n - 1) / (M - 1)): geometric from a at epoch 1 to b at epoch M, then constant.

    a, b: first and last factor, positive
    epochs: M

    >>> [round(logspace(1.0, 0.01, 3)(n), 6) for n in (1, 2, 3, 4)]
    [1.0, 0.1, 0.01, 0.01]
    """
    _check_epochs(epochs)
    if not (0 < a < math.inf and 0 < b < math.inf):
        raise ValueError(f"a and b must be positive for logspace, got {a!r} and {b!r}")
    return functools.partial(_exponential, math.log(a), math.log(b), epochs)


def staircase(steps: Mapping[int, float]) -> Schedule:
    """1 at first, multiplied by a factor from each of the given epochs on.

    steps: factors by epoch

    >>> [staircase({150: 0.1, 225: 0.1})(n) for n in (149, 150)]
    [1.0, 0.1]
    """
    for epoch, factor in steps.items():
        if not isinstance(epoch, int) or epoch < 1 or not 0 < factor < math.inf:
            raise ValueError(f"steps must map epochs >= 1 to positive factors, got {epoch!r}: {factor!r}")
    return functools.partial(_staircase, tuple(sorted((e, float(f)) for e, f in steps.items())))


def malleable(pieces: Sequence[tuple[int, float, float]], base: float = math.e, literal: bool = False) -> Schedule:
    """The paper's malleable rate (17): pieces, each going exponentially from a to b.

    The paper's setting, [(1000, 0, -8), (1100, -8, -9)], only makes sense with a and b as exponents, and is continuous
    only if every piece runs over its own length.  That is the default: base ** (a + (b - a) t), where t goes from 0 at
    the end of the previous piece (at epoch 1 in the first) to 1 at end_epoch.

    pieces: (end_epoch, a, b), in order
    base: of the exponentials
    literal: use the formula as printed, exp(log a + (log b - log a) (n - 1) / (M - 1)), where a and b are factors and M
        is the last epoch of all

    >>> schedule = malleable([(1000, 0, -8), (1100, -8, -9)])
    >>> schedule(1), round(math.log(schedule(1000)), 6), round(math.log(schedule(1100)), 6)
    (1.0, -8.0, -9.0)
    """
    pieces = [(end, float(a), float(b)) for end, a, b in pieces]
    ends = [end for end, _, _ in pieces]
    if not all(isinstance(end, int) for end in ends):
        raise ValueError(f"pieces must end at whole epochs, got {ends}")
    if not ends or ends[0] < 1 or any(later <= end for end, later in zip(ends, ends[1:], strict=False)):
        raise ValueError(f"pieces must end at increasing epochs >= 1, got {ends}")
    if not 0 < base < math.inf:
        raise ValueError(f"base must be positive, got {base!r}")
    for _, a, b in pieces:
        if not (abs(a) + abs(b)) * abs(math.log(base)) < 700:  # a larger exponent overflows float64
            raise ValueError(f"pieces must have exponents that give finite factors, got {a!r} and {b!r}")
    if literal and any(not (a > 0 and b > 0) for _, a, b in pieces):
        raise ValueError("pieces must have positive factors with literal=True, which takes their logarithms")
    return functools.partial(_malleable, tuple(pieces), float(base), literal)


def warm_up(schedule: Schedule, epochs: float) -> Schedule:
    """`schedule` times a factor that rises linearly to 1.

    schedule: the schedule after the warm-up
    epochs: length of the warm-up; below 1 there is none

    >>> [warm_up(staircase({}), 4)(n) for n in (1, 2, 4, 5)]
    [0.25, 0.5, 1.0, 1.0]
    """
    return functools.partial(_warm_up, schedule, epochs) if epochs >= 1 else schedule


def scheduler(optimizer: Optimizer, schedule: Schedule | Sequence[Schedule]) -> LambdaLR:
    """An LR scheduler that multiplies each group's initial learning rate by a schedule.

    Call `step()` after every epoch; resume with `state_dict()` and `load_state_dict()`.

    optimizer: any, with one or more parameter groups
    schedule: one for all groups, or one per group

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    >>> epochs = scheduler(optimizer, linspace(1.0, 0.0, 5))
    >>> optimizer.step(); epochs.step(); optimizer.param_groups[0]["lr"]
    0.07500000000000001
    """
    groups = len(optimizer.param_groups)
    schedules = [schedule] * groups if callable(schedule) else list(schedule)
    if len(schedules) != groups:
        raise ValueError(f"schedule must be one, or one per group ({groups} groups), got {len(schedules)}")
    return LambdaLR(optimizer, [functools.partial(_from_zero, s) for s in schedules])


def _from_zero(schedule: Schedule, step: int) -> float:
    return schedule(step + 1)


def _warm_up(schedule: Schedule, epochs: float, n: int) -> float:
    return schedule(n) * min(1.0, n / epochs)


def _line(a: float, b: float, start: int, end: int, n: int) -> float:
    """From a at epoch `start` to b at epoch `end`, and b after it."""
    _check_epoch(n)
    return a + (b - a) * (1.0 if n >= end else (n - start) / (end - start))


def _exponential(log_a: float, log_b: float, epochs: int, n: int) -> float:
    return math.exp(_line(log_a, log_b, 1, epochs, n))


def _staircase(steps: tuple[tuple[int, float], ...], n: int) -> float:
    _check_epoch(n)
    return math.prod((factor for epoch, factor in steps if n >= epoch), start=1.0)


def _malleable(pieces: tuple[tuple[int, float, float], ...], base: float, literal: bool, n: int) -> float:
    i = next((i for i, piece in enumerate(pieces) if n <= piece[0]), len(pieces) - 1)
    end, a, b = pieces[i]
    if literal:
        return _exponential(math.log(a), math.log(b), pieces[-1][0], n)
    return base ** _line(a, b, pieces[i - 1][0] if i else 1, end, n)


def _check_epoch(n: int) -> None:
    if n < 1:
        raise ValueError(f"epochs count from 1, got {n!r}")


def _check_epochs(epochs: int) -> None:
    if not isinstance(epochs, int) or epochs < 1:
        raise ValueError(f"epochs must be a positive integer, got {epochs!r}")
