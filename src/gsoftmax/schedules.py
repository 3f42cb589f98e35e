"""Learning-rate schedules of the paper: functions of the epoch, counted from 1, that give the factor on eta_0.

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

Schedule = Callable[[int], float]


def linspace(a: float, b: float, epochs: int) -> Schedule:
    """a + (b - a) (n - 1) / (M - 1): a straight line from a at epoch 1 to b at epoch M, and b after it.

    >>> [linspace(1.0, 0.0, 5)(n) for n in (1, 3, 5, 6)]
    [1.0, 0.5, 0.0, 0.0]
    """
    _check_epochs(epochs)
    if not (math.isfinite(a) and math.isfinite(b)):
        raise ValueError(f"a and b must be finite, got {a!r} and {b!r}")
    return functools.partial(_linspace, float(a), float(b), epochs)


def logspace(a: float, b: float, epochs: int) -> Schedule:
    """exp(log a + (log b - log a) (n - 1) / (M - 1)): geometric from a at epoch 1 to b at epoch M, and b after it.

    >>> [round(logspace(1.0, 0.01, 3)(n), 6) for n in (1, 2, 3, 4)]
    [1.0, 0.1, 0.01, 0.01]
    """
    _check_epochs(epochs)
    if not (0 < a < math.inf and 0 < b < math.inf):
        raise ValueError(f"a and b must be positive for logspace, got {a!r} and {b!r}")
    return functools.partial(_logspace, math.log(a), math.log(b), epochs)


def staircase(steps: Mapping[int, float]) -> Schedule:
    """1 at first, multiplied by `steps[e]` from epoch e on.

    >>> [staircase({150: 0.1, 225: 0.1})(n) for n in (149, 150)]
    [1.0, 0.1]
    """
    for epoch, factor in steps.items():
        if not isinstance(epoch, int) or epoch < 1 or not 0 < factor < math.inf:
            raise ValueError(f"steps must map epochs from 1 on to positive factors, got {epoch!r}: {factor!r}")
    return functools.partial(_staircase, tuple(sorted((e, float(f)) for e, f in steps.items())))


def malleable(pieces: Sequence[tuple[int, float, float]], base: float = math.e, literal: bool = False) -> Schedule:
    """The paper's malleable rate (17): pieces (end_epoch, a, b), each bending from a to b.

    The paper's own setting, [(1000, 0, -8), (1100, -8, -9)], only makes sense with a and b as exponents, and is only
    continuous when every piece runs over its own length; that is the default: base ** (a + (b - a) t), where t goes
    from 0 at the end of the piece before (at epoch 1 in the first) to 1 at end_epoch.  `literal=True` is the formula as
    printed, exp(log a + (log b - log a) (n - 1) / (M - 1)) with M the last epoch of all, where a and b are factors.

    >>> schedule = malleable([(1000, 0, -8), (1100, -8, -9)])
    >>> schedule(1), round(math.log(schedule(1000)), 6), round(math.log(schedule(1100)), 6)
    (1.0, -8.0, -9.0)
    """
    pieces = [(end, float(a), float(b)) for end, a, b in pieces]
    ends = [end for end, _, _ in pieces]
    if not all(isinstance(end, int) for end in ends):
        raise ValueError(f"pieces must end at whole epochs, got {ends}")
    if not ends or ends[0] < 1 or any(later <= end for end, later in zip(ends, ends[1:], strict=False)):
        raise ValueError(f"pieces must end at growing epochs from 1 on, got {ends}")
    if not 0 < base < math.inf:
        raise ValueError(f"base must be positive, got {base!r}")
    for _, a, b in pieces:
        if not (abs(a) + abs(b)) * abs(math.log(base)) < 700:  # beyond, a factor is no float64
            raise ValueError(f"pieces must hold exponents that give finite factors, got {a!r} and {b!r}")
    if literal and any(not (a > 0 and b > 0) for _, a, b in pieces):
        raise ValueError("pieces must hold positive factors with literal=True, because their logarithms are taken")
    return functools.partial(_malleable, tuple(pieces), float(base), literal)


def warm_up(schedule: Schedule, epochs: float) -> Schedule:
    """`schedule` times a factor that rises linearly to 1 over the first `epochs`.

    >>> [warm_up(staircase({}), 4)(n) for n in (1, 2, 4, 5)]
    [0.25, 0.5, 1.0, 1.0]
    """
    return functools.partial(_warm_up, schedule, epochs) if epochs >= 1 else schedule


def scheduler(optimizer: Optimizer, schedule: Schedule | Sequence[Schedule]) -> LambdaLR:
    """Hangs a schedule on an optimiser: each group's learning rate is its own initial one times the factor.

    schedule: one for all groups, or one for each.  Call `step()` after every epoch; `state_dict()` and
    `load_state_dict()` resume it.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    >>> epochs = scheduler(optimizer, linspace(1.0, 0.0, 5))
    >>> optimizer.step(); epochs.step(); optimizer.param_groups[0]["lr"]
    0.07500000000000001
    """
    groups = len(optimizer.param_groups)
    schedules = [schedule] * groups if callable(schedule) else list(schedule)
    if len(schedules) != groups:
        raise ValueError(f"schedule must be one, or one for each of the {groups} groups, got {len(schedules)}")
    return LambdaLR(optimizer, [functools.partial(_from_zero, s) for s in schedules])


def _from_zero(schedule: Schedule, step: int) -> float:
    return schedule(step + 1)


def _warm_up(schedule: Schedule, epochs: float, n: int) -> float:
    return schedule(n) * min(1.0, n / epochs)


def _linspace(a: float, b: float, epochs: int, n: int) -> float:
    return a + (b - a) * _progress(1, epochs, n)


def _logspace(log_a: float, log_b: float, epochs: int, n: int) -> float:
    return math.exp(log_a + (log_b - log_a) * _progress(1, epochs, n))


def _staircase(steps: tuple[tuple[int, float], ...], n: int) -> float:
    _check_epoch(n)
    return math.prod((factor for epoch, factor in steps if n >= epoch), start=1.0)


def _malleable(pieces: tuple[tuple[int, float, float], ...], base: float, literal: bool, n: int) -> float:
    _check_epoch(n)
    i = next((i for i, piece in enumerate(pieces) if n <= piece[0]), len(pieces) - 1)
    end, a, b = pieces[i]
    if literal:
        return _logspace(math.log(a), math.log(b), pieces[-1][0], n)
    return base ** (a + (b - a) * _progress(pieces[i - 1][0] if i else 1, end, n))


def _progress(start: int, end: int, n: int) -> float:
    """0 at epoch `start`, 1 from epoch `end` on."""
    _check_epoch(n)
    return 1.0 if n >= end else (n - start) / (end - start)


def _check_epoch(n: int) -> None:
    if n < 1:
        raise ValueError(f"epochs count from 1, got {n!r}")


def _check_epochs(epochs: int) -> None:
    if not isinstance(epochs, int) or epochs < 1:
        raise ValueError(f"epochs must be a positive integer, got {epochs!r}")
