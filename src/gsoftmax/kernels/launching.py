"""Launching Triton kernels: device checks, tile plans, and a cache that makes launches cheap."""

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
# These two are missing where torch knows no CUDA, and may be in another version; the public ones take longer.
_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", lambda i: torch.cuda.current_stream(i).cuda_stream)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


@triton.jit
def _trial_kernel(out):  # type: ignore[no-untyped-def]
    tl.store(out, 1.0)


INTERPRETED = not isinstance(_trial_kernel, triton.runtime.JITFunction)


def unsupported_device(x: Tensor) -> str:
    """The reason why Triton is unavailable on x's device; "" if it is available."""
    if not x.is_cuda:
        return "" if INTERPRETED and x.device.type == "cpu" else f"x is on {x.device.type}, not on a GPU"
    return "" if torch.compiler.is_compiling() else cannot_run(x.device)  # torch.compile needs Triton itself


@lru_cache
def cannot_run(device: torch.device) -> str:
    """Why no kernel runs on this GPU, found by running one; "" if it runs.

    Triton may be installed without what it needs: a C compiler, Python's headers, a writable folder, a recent GPU.
    """
    try:
        _try(torch.zeros(1, device=device))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # each failure raises a different exception
        first = next(iter(str(error).splitlines()), type(error).__name__)
        why = f"Triton cannot run kernels on {device}: {first}"
        warnings.warn(f"{why}; falling back to a slower implementation", stacklevel=2)
        return why
    return ""


def on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make the device of the first argument the current one, on which Triton launches."""

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


class Plan(NamedTuple):
    """Tiles of a kernel: block_n rows and block_c classes, `rows` rows per program."""

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


@dataclass(slots=True)
class Call:
    """What all calls with the same key have in common."""

    block: Plan
    flags: tuple[Any, ...]
    before: tuple[Any, ...]  # scalar arguments before those that come from lam
    after: tuple[Any, ...]  # and after them
    tiles: int
    programs: int
    groups: int = 1  # of rows, each with its partial sums of dmu and dsigma
    size: int = 0  # of the statistics without the divisor
    whole: bool = False  # one program computes everything
    kernels: dict[Any, Any] = field(default_factory=dict)  # compiled


# Triton inspects every argument to select a compiled kernel, which takes longer than the work on a small table.
# Everything it inspects is part of the key here.
calls: dict[Any, Call] = {}


def remember(key: Any, call: Call) -> Call:
    if len(calls) >= 4096:  # every batch has another size
        calls.clear()
    calls[key] = call
    return call


def launch(
    call: Call,
    kernel: Any,
    programs: int,
    arrays: tuple[Any, ...],
    numbers: tuple[Any, ...],
    warps: int,
    registers: int | None = None,
) -> None:
    """Launch `kernel`; compiled code and argument setup are cached in `call`."""
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
    if compiled is not None:  # None in the interpreter
        # `compiled` too, because its function is freed with it
        call.kernels[key] = (
            compiled.run, compiled.function, compiled.packed_metadata, arrays[0].device.index, compiled
        )  # fmt: skip


def _watched() -> bool:
    """Whether a Triton profiler has launch hooks; then Triton's own launcher is used."""
    hooks = triton.knobs.runtime
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
