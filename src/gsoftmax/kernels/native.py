"""The compiled CPU kernels (native.c) on tensors: loading the library, and one call of each."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import zlib
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import equations
from ..checks import LabelOptions, Options, check_sigma, label_error

__all__ = ["INSTRUCTIONS", "evaluate", "logits", "logits_backward", "multilabel", "probabilities", "unavailable"]

# The first is the baseline of the architecture.
_BASELINES = {"x86_64": "SSE2", "aarch64": "NEON", "arm64": "NEON"}
INSTRUCTIONS = {1: _BASELINES.get(platform.machine(), "baseline"), 2: "AVX2", 3: "AVX-512"}

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_TARGETS = {**_DTYPES, torch.int64: 3, torch.uint8: 4, torch.bool: 4}
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2, "batchmean": 3}
_FORMS = {"paired": 0, "independent": 1, "printed": 2, "msml": 3}
_LOGITS, _BACKWARD, _SOFTMAX, _LABELS = range(4)
_BAD_LABEL, _BAD_SIGMA, _BAD_TARGET = 1, 2, 4
_NUMBER = torch.empty((), dtype=torch.float32)
_NO_STRIDES: tuple[int, ...] = (0, 0, 0)
# `struct job` of native.c, field by field.
_JOB = "@11Q 4q 9q 3q Q q 3d"
_pack = struct.Struct(_JOB.replace(" ", "")).pack
# `struct terms` of native_terms.h, which begins with a job.
_pack_terms = struct.Struct(f"{_JOB} 4Q 3q 6q d".replace(" ", "")).pack
_empty, _empty_like, _get_num_threads = torch.empty, torch.empty_like, torch.get_num_threads

_REINSTALL = "install gsoftmax again to build it here"

_call: Any = None  # the function for the loss of one label, once loaded
_call_terms: Any = None  # the one for all else
_why = "not looked for"
_team = 0
_best = _taken = 0  # the widest instruction set of the processor, and the one in use
instructions = 0  # overrides `_taken`, for tests


def unavailable() -> str:
    """The reason why the compiled kernel is unavailable; "" if it is available."""
    global _call, _call_terms, _why, _team, _best, _taken
    if _why == "not looked for":
        library, why = _load()
        if library is not None:
            _best = library.gsoftmax_best_isa()
            # Never wider than torch's own kernels, so that ATEN_CPU_CAPABILITY applies to ours as well.
            _taken = min(_best, {"DEFAULT": 1, "NO AVX": 1, "AVX2": 2}.get(torch.backends.cpu.get_cpu_capability(), 3))
            # The threads of torch's OpenMP runtime, which the process has already loaded, instead of a second pool.
            # If no such function is found, native.c starts its own threads.  Another OpenMP runtime, found first,
            # computes the same numbers with a second pool.
            team = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
            _team = ctypes.cast(team, ctypes.c_void_p).value or 0 if team else 0
            _call, _call_terms = library.gsoftmax_cross_entropy, library.gsoftmax_terms
        _why = why
    return _why


def best_instructions() -> int:
    """The widest of `INSTRUCTIONS` that this processor supports; 0 without the compiled kernel."""
    return 0 if unavailable() else _best


def explain_instructions() -> str:
    """The instruction set in use and, where the processor has a wider one, why not that."""
    best, taken = best_instructions(), instructions or _taken
    if taken == best:
        return INSTRUCTIONS[taken]
    variable = "ATEN_CPU_CAPABILITY"
    why = "native.instructions" if instructions else variable if os.environ.get(variable) else "no wider than torch's"
    return f"{INSTRUCTIONS[taken]} ({why}; the processor has {INSTRUCTIONS[best]})"


def _files() -> tuple[Path | None, tuple[Path, ...]]:
    """The library built for this Python, if any, and its sources, which only a checkout has."""
    here = Path(__file__)
    libraries = (here.with_name("_native" + suffix) for suffix in EXTENSION_SUFFIXES)
    sources = here.with_name("native.c"), here.with_name("native_terms.h")
    return next((file for file in libraries if file.exists()), None), sources


def _load() -> tuple[Any, str]:
    file, sources = _files()
    if file is None:
        others = ", ".join(sorted(v.name for v in sources[0].parent.glob("_native.*")))
        if others:
            return None, f"the compiled kernel was not built for this Python and machine, only {others}; {_REINSTALL}"
        return None, "the compiled kernel was not built (no C compiler when the package was installed)"
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        return None, f"the compiled kernel does not load; was it built on another machine? ({error}); {_REINSTALL}"
    try:
        calls, best = (library.gsoftmax_cross_entropy, library.gsoftmax_terms), library.gsoftmax_best_isa
        made_from = ctypes.c_uint32.in_dll(library, "gsoftmax_source").value
    except (AttributeError, ValueError):
        made_from = None
    present = all(v.exists() for v in sources)
    if made_from is None or (present and made_from != zlib.crc32(b"".join(v.read_bytes() for v in sources))):
        return None, f"the compiled kernel was built from another version of native.c; {_REINSTALL}"
    for call in calls:
        call.argtypes, call.restype = [ctypes.c_char_p], ctypes.c_int64
    best.restype = ctypes.c_int64
    return library, ""


def _strides(v: Tensor) -> tuple[int, ...]:
    """Strides of the (N, C, S) view of any supported shape."""
    stride = v.stride()
    return (*stride, 0) if len(stride) == 2 else stride if len(stride) == 3 else (0, *stride, 0)


def evaluate(
    x: Tensor,
    target: Tensor,
    mu: Tensor,
    sigma: Tensor,
    lam: float,
    options: Options,
    need: Sequence[bool],
    grad: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The loss in float32 and its gradients dx, dmu and dsigma, None where `need` is false, without autograd.

    x: (N, C), (N, C, d1, ...) or (C,) on the CPU in float32, bfloat16 or float16, with any strides
    target: class indices or probabilities; mu, sigma: (C,) in float32
    need: which of dx, dmu and dsigma to compute
    grad: a number, or one per loss with reduction="none", that multiplies the gradients
    """
    if _call is None and unavailable():
        raise RuntimeError(_why)
    weight, ignore_index, reduction, label_smoothing = options
    shape = x.shape
    dims = len(shape)
    x = x if dims < 4 else x.flatten(2)
    c = shape[1] if dims > 1 else shape[0]
    n, s = (x.shape[0], x.shape[2]) if dims > 2 else (shape[0], 1) if dims == 2 else (1, 1)
    probabilities = target.is_floating_point()
    prob_strides = _NO_STRIDES
    if probabilities:
        target = target.to(torch.float32)
        target = target if dims < 4 else target.flatten(2)
        prob_strides = _strides(target)
    else:
        if target.dtype is not torch.int64:
            target = target.long()
        target = target.contiguous()
    mu, sigma = mu.contiguous(), sigma.contiguous()
    if weight is not None:
        weight = weight.to(torch.float32).contiguous()
    row_grad, scale = None, 1.0
    if reduction == "none":
        loss = _empty(shape[:1] + shape[2:] if dims > 1 else (), dtype=torch.float32)
        if grad is not None:
            row_grad = (grad if grad.ndim == loss.ndim else grad.expand(loss.shape)).to(torch.float32).contiguous()
    else:
        loss = _empty_like(_NUMBER)
        scale = 1.0 if grad is None else float(grad)
    dx = dmu = dsigma = None
    dx_strides = _NO_STRIDES
    if need[0]:
        dx = _empty_like(x)
        dx_strides = _strides(dx)
    if need[1] or need[2]:
        dmu, dsigma = _empty_like(mu), _empty_like(mu)

    label, prob = (0, target.data_ptr()) if probabilities else (target.data_ptr(), 0)
    job = _pack(
        x.data_ptr(), 0 if dx is None else dx.data_ptr(), label, prob, mu.data_ptr(), sigma.data_ptr(),
        0 if weight is None else weight.data_ptr(), 0 if row_grad is None else row_grad.data_ptr(), loss.data_ptr(),
        0 if dmu is None else dmu.data_ptr(), 0 if dsigma is None else dsigma.data_ptr(),
        _DTYPES[x.dtype], n, c, s, *_strides(x), *dx_strides, *prob_strides,
        ignore_index, _REDUCTIONS[reduction], _get_num_threads(), _team, instructions or _taken,
        lam, label_smoothing, scale,
    )  # fmt: skip
    failed = _call(job)
    if failed:
        if failed == _BAD_LABEL:
            raise label_error(target, c, ignore_index)
        if failed == _BAD_SIGMA:
            check_sigma(sigma)
        raise MemoryError(f"no memory for the scratch space of {c} classes")
    if dims > 3 and dx is not None:
        dx = dx.view(shape)
    return loss, dx, dmu if need[1] else None, dsigma if need[2] else None


# ---------------------------------------------------------------------------------------------- z, p and several labels


def logits(x: Tensor, mu: Tensor, sigma: Tensor, lam: float) -> Tensor:
    """z = x + lam Phi((x - mu) / sigma) in float32.

    x, mu, sigma: as in `evaluate`
    """
    flat = x if x.ndim < 4 else x.flatten(2)
    z = torch.empty_like(flat, dtype=torch.float32)
    _terms(_LOGITS, flat, mu, sigma, lam, _Rest(out=z))
    return z.view(x.shape)


def logits_backward(
    grad: Tensor, x: Tensor, mu: Tensor, sigma: Tensor, lam: float, need: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx, dmu and dsigma, those that are needed, from the gradient of z, in float32 and of any strides."""
    flat, grad = (v if v.ndim < 4 else v.flatten(2) for v in (x, grad))
    dx = _empty_like(flat) if need[0] else None
    dmu, dsigma = _terms(_BACKWARD, flat, mu, sigma, lam, _Rest(dx, grad), need[1] or need[2])
    return None if dx is None else dx.view(x.shape), dmu if need[1] else None, dsigma if need[2] else None


def probabilities(x: Tensor, mu: Tensor, sigma: Tensor, lam: float) -> Tensor:
    """softmax(z) over the classes, computed in float32, in x's dtype; arguments as in `logits`."""
    flat = x if x.ndim < 4 else x.flatten(2)
    p = _empty_like(flat)
    _terms(_SOFTMAX, flat, mu, sigma, lam, _Rest(out=p))
    return p.view(x.shape)


def multilabel(
    x: Tensor,
    target: Tensor,
    mu: Tensor | None,
    sigma: Tensor | None,
    lam: float,
    options: LabelOptions,
    need: Sequence[bool],
    grad: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The loss of several labels in float32 and its gradients dx, dmu and dsigma, None where `need` is false.

    x: (N, outputs), absence first where there are two outputs per label; target: (N, L)
    mu, sigma: (outputs,) in float32, or None without a Gaussian term
    grad: a number, or one per label with reduction="none", that multiplies the gradients
    out: where to write dx, which may be x itself
    """
    if target.dtype not in _TARGETS:
        target = target.to(torch.float32)
    # `ignore_index` as torch rounds it before it compares; beside bool, torch compares integers.
    ignore = float(options.ignore_index)
    if target.dtype is not torch.bool:
        ignore = float(torch.tensor(options.ignore_index).to(target.dtype))
    each = options.reduction == "none"
    loss = torch.empty(target.shape if each else (), dtype=torch.float32)
    dx = None if not need[0] else _empty_like(x) if out is None else out
    grads = None if grad is None or not each else grad.to(torch.float32).expand(loss.shape)
    labels = _Labels(target, options, ignore, 1.0 if grad is None or each else float(grad))
    sums = sigma is not None and (need[1] or need[2])
    dmu, dsigma = _terms(_LABELS, x, mu, sigma, lam, _Rest(dx, grads, loss, labels), sums)
    return loss, dx, dmu if need[1] else None, dsigma if need[2] else None


class _Labels(NamedTuple):
    """What a loss of several labels has beside its arrays of floats."""

    target: Tensor
    options: LabelOptions
    ignore: float
    scale: float


class _Rest(NamedTuple):
    """The arrays of a call beside x; those that it does not have are None."""

    dx: Tensor | None = None
    grad: Tensor | None = None
    out: Tensor | None = None
    labels: _Labels | None = None


def _terms(
    kind: int, x: Tensor, mu: Tensor | None, sigma: Tensor | None, lam: float, rest: _Rest, sums: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """Run one kernel; dmu and dsigma if `sums`."""
    if _call_terms is None and unavailable():
        raise RuntimeError(_why)
    dx, grad, out, labels = rest
    shape = x.shape
    c = shape[1] if len(shape) > 1 else shape[0]
    n, s = (shape[0], shape[2]) if len(shape) > 2 else (shape[0], 1) if len(shape) == 2 else (1, 1)
    dmu = dsigma = weight = pos_weight = None
    if sigma is not None and mu is not None:
        mu, sigma = mu.contiguous(), sigma.contiguous()
        if sums:
            dmu, dsigma = _empty_like(mu), _empty_like(mu)
    target, smoothing, scale, ignore, target_type, form, reduction = None, 0.0, 1.0, 0.0, 0, 0, 0
    if labels is not None:
        target, options, ignore, scale = labels
        weight, pos_weight = (None if v is None else v.to(torch.float32).contiguous() for v in options[1:3])
        smoothing, target_type = options.label_smoothing, _TARGETS[target.dtype]
        form, reduction = _FORMS[options.form], _REDUCTIONS[options.reduction]
    # A loss that is reduced is a number, not an array.
    number = 0 if labels is None or reduction == 0 or out is None else out.data_ptr()
    array = None if number else out
    failed = _call_terms(
        _pack_terms(
            x.data_ptr(), _address(dx), 0, 0, _address(mu), _address(sigma), _address(weight), 0, number, _address(dmu),
            _address(dsigma), _DTYPES[x.dtype], n, c, s, *_strides(x), *_maybe_strides(dx), *_maybe_strides(grad),
            0, reduction, _get_num_threads(), _team, instructions or _taken, lam, smoothing, scale,
            _address(grad), _address(array), _address(target), _address(pos_weight), kind, form, target_type,
            *_maybe_strides(array), *_maybe_strides(target), ignore,
        )
    )  # fmt: skip
    if failed:
        if failed == _BAD_SIGMA and sigma is not None:
            check_sigma(sigma)
        if failed == _BAD_TARGET and labels is not None:
            equations.soft_labels(labels.target, torch.float32, labels.options)
        raise MemoryError(f"no memory for the scratch space of {c} outputs")
    return dmu, dsigma


def _address(v: Tensor | None) -> int:
    return 0 if v is None else v.data_ptr()


def _maybe_strides(v: Tensor | None) -> tuple[int, ...]:
    return _NO_STRIDES if v is None else _strides(v)
