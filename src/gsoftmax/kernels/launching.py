"""Starting Triton kernels: where they can run, how a table is cut for them, and launches that take little time."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import Parameter

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TYPES = (Tensor, Parameter)
# These two are missing where torch knows no CUDA.
_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # of a device's index
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)


# --------------------------------------------------------------------------------------------------------------- where


@triton.jit
def _trial_kernel(out):  # type: ignore[no-untyped-def]
    tl.store(out, 1.0)


INTERPRETED = not isinstance(_trial_kernel, triton.runtime.JITFunction)


def unsupported_device(x: Tensor) -> str:
    """Why no kernel runs where x is, in a few words; "" where they do."""
    if not x.is_cuda:
        return "" if INTERPRETED and x.device.type == "cpu" else f"x is on {x.device.type}, not on a GPU"
    return "" if torch.compiler.is_compiling() else cannot_run(x.device)  # torch.compile needs Triton for itself


@lru_cache
def cannot_run(device: torch.device) -> str:
    """Why no kernel runs on this GPU, in a few words, found by running one; "" where they do.

    Triton can be there without what it needs: a C compiler, Python's headers, a folder to write to, a recent GPU.
    """
    try:
        _try(torch.zeros(1, device=device))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # each of these fails in a way of its own
        first = next(iter(str(error).splitlines()), type(error).__name__)
        why = f"Triton cannot run kernels on {device}: {first}"
        warnings.warn(f"{why}; falling back to a slower implementation", stacklevel=2)
        return why
    return ""


def on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Triton launches on the current device, which may not be the one that holds the first argument."""

    @wraps(function)
    def call(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        if first.is_cuda and first.get_device() != _current_device():
            with torch.cuda.device(first.device):
                return function(first, *args, **kwargs)
        return function(first, *args, **kwargs)

    return call


@on_its_device
def _try(out: Tensor) -> None:
    _trial_kernel[(1,)](out)


@lru_cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


# ------------------------------------------------------------------------------------------------------------- cutting


class Plan(NamedTuple):
    """How a kernel is cut: a tile of block_n rows and block_c classes, `rows` rows to a program."""

    block_n: int
    block_c: int
    rows: int
    warps: int
    stages: int = 1
    degree: int = 6
    registers: int | None = None  # a limit, for more programs at a time


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_2(a: int) -> int:
    """The smallest power of 2 that is not below a."""
    return 1 << (a - 1).bit_length()


# ----------------------------------------------------------------------------------------------------------- launching


# What a launch needs, from calls seen before.  Triton looks at every argument to find the kernel that fits; for a small
# table that takes longer than the work, and everything it looks at is in the key.
@dataclass(slots=True)
class Call:
    """What all calls of one kind have in common."""

    block: Plan
    flags: tuple[Any, ...]
    before: tuple[Any, ...]  # the numbers that kernels are given, before those that come from lam
    after: tuple[Any, ...]
    tiles: int
    programs: int
    groups: int = 1  # of rows, each with its part of dmu and dsigma
    size: int = 0  # of the statistics, without the divisor
    whole: bool = False  # one program does everything
    kernels: dict[Any, Any] = field(default_factory=dict)  # compiled


calls: dict[Any, Call] = {}


def remember(key: Any, call: Call) -> None:
    if len(calls) >= 4096:  # every batch has another size
        calls.clear()
    calls[key] = call


def launch(
    call: Call,
    kernel: Any,
    programs: int,
    arrays: tuple[Any, ...],
    numbers: tuple[Any, ...],
    warps: int,
    registers: int | None = None,
) -> None:
    """Launches `kernel`, the second time without looking at what is the same as the first time."""
    pointers = [None if v is None else v.data_ptr() for v in arrays]
    together = 0
    for p in pointers:
        if p is not None:
            together |= p
    key = (kernel, *(p is None or p % 16 == 0 for p in pointers)) if together % 16 else kernel
    found = call.kernels.get(key)
    if found is not None and not _watched():
        run, function, metadata, device, _ = found
        run(programs, 1, 1, _stream(device), function, metadata, None, None, None, *pointers, *numbers)
        return
    options: dict[str, Any] = {"num_warps": warps, "enable_fp_fusion": True}
    if registers:
        options["maxnreg"] = registers
    compiled = kernel[(programs,)](*arrays, *numbers, **options)
    if compiled is not None:  # as it is in the interpreter
        # the kernel itself too, because its function goes with it
        call.kernels[key] = (
            compiled.run, compiled.function, compiled.packed_metadata, arrays[0].device.index, compiled
        )  # fmt: skip


def _watched() -> bool:
    """Whether a profiler of Triton wants to hear of launches; it has the usual way then."""
    hooks = triton.knobs.runtime
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
