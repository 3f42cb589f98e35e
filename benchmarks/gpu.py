"""Speed on a GPU: `python -m benchmarks.gpu`.

Forward and backward pass of the loss against plain cross entropy, by torch, by `torch.compile`, by Liger-Kernel and by
quack; of small tables, where launching is all there is; of the last linear layer with the loss, against torch,
Liger-Kernel, quack and cut-cross-entropy; and the roads around the loss, each against what one would call without the
term.  Peers are left out where they can't be imported.  Contenders take turns and medians are compared.  Bytes are
counted as three passes over x (read, read, write) and compared with what a copy moves.

    --only    some parts, written to a file of their own: small, losses, linears, roads
    --tune    which tile, how many warps, ... is fastest, for `gsoftmax.kernels.triton_ce.TUNED`
    --quick   fewer rounds
    --out     a folder for the JSON, other than results/
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import interleaved, provenance, table, verdict, write
from gsoftmax import GaussianLogits, GSoftmaxHead, GSoftmaxLoss, MultiLabelGSoftmaxLoss, functional
from gsoftmax.checks import Options
from gsoftmax.sharded import ShardedGSoftmaxHead

GIB = 2**30
# rows, classes, dtype, most allowed time over the fastest plain cross entropy, least share of copy bandwidth, most ms
LOSSES = [
    (8192, 32000, torch.bfloat16, 1.10, None, None),
    (8192, 128256, torch.bfloat16, 1.10, 0.60, 2.1),
    (1024, 1000000, torch.bfloat16, 1.10, 0.60, None),
    (4096, 32000, torch.float32, 1.10, None, None),
]
# rows, classes, most allowed time over F.cross_entropy
SMALL = [(128, 10, 2.0), (1024, 1000, 2.0)]
# rows, features, classes, most allowed time over linear and F.cross_entropy, most extra memory in GiB, and most allowed
# time over the matrix products alone
LINEARS = [(8192, 2048, 128256, 1.10, 2.0, 1.10), (4096, 512, 1000000, 0.95, 3.0, None)]
# road, rows, classes or labels, most allowed time over the peer's, most extra memory over the peer's; all of bfloat16
ROADS = [
    ("attach", 8192, 32000, 1.6, None),
    ("attach", 4096, 128256, 1.6, None),
    ("predict_proba", 8192, 128256, 1.3, 1.05),
    ("paired", 4096, 20000, 2.2, None),
    ("msml", 4096, 20000, 1.3, None),
    ("sharded", 8192, 128256, 1.15, None),
]
# What one would call without the term; of the sharded head on one process, the head that is not sharded.
PEERS = {
    "attach": "cross entropy", "predict_proba": "softmax", "paired": "BCE, compiled", "msml": "BCE, compiled",
    "sharded": "whole head",
}  # fmt: skip
FEATURES = 2048  # of the sharded head

Contenders = dict[str, Callable[[], Any]]


def name_of(*sizes: int, dtype: torch.dtype | None = None) -> str:
    size = " x ".join(f"{s:,}" for s in sizes)
    return size if dtype is None else f"{size} {str(dtype).removeprefix('torch.')}"


def say(*words: Any) -> None:
    print(*words, flush=True)


# -------------------------------------------------------------------------------------------------------------- timing


class Clock:
    """Seconds on the GPU, after the caches were swept; the sweep also gives the CPU time to launch what is timed."""

    def __init__(self) -> None:
        self.sweep = torch.empty(GIB, dtype=torch.int8, device="cuda")
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self, run: Callable[[], Any]) -> float:
        getattr(run, "prepare", lambda: None)()
        self.sweep.zero_()
        self.start.record()
        run()
        self.end.record()
        self.end.synchronize()
        return self.start.elapsed_time(self.end) / 1e3


def wall(run: Callable[[], Any], calls: int = 50) -> float:
    """Seconds of a call among many, launching included, as a training loop of small steps sees it."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def peak(run: Callable[[], Any]) -> float:
    """GiB allocated at most while running, beyond what was there before."""
    run()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / GIB


def copy_bandwidth(clock: Clock) -> float:
    """Bytes a second, read and written, of a copy of 2 GiB."""
    a = torch.empty(2 * GIB, dtype=torch.int8, device="cuda").random_()
    b = torch.empty_like(a)
    for _ in range(3):
        b.copy_(a)
    return 2 * a.numel() / sorted(clock(lambda: b.copy_(a)) for _ in range(9))[4]


def working(contenders: Contenders) -> Contenders:
    """Those that run at all; of the others, what they said."""
    able = {}
    for name, run in contenders.items():
        try:
            for _ in range(3):
                run()
            torch.cuda.synchronize()
            able[name] = run
        except Exception as error:
            say(f"  {name} is left out: {type(error).__name__}: {str(error)[:160]!r}")
    return able


def clean() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()


# ------------------------------------------------------------------------------------------------------------ the peers


def peer(module: str, name: str) -> Any:
    """A function of another library, None where it cannot be imported."""
    try:
        return getattr(importlib.import_module(module), name)
    except Exception:  # a library for other GPUs may fail in its own way
        return None


# ------------------------------------------------------------------------------------------------------------- the loss


def data(n: int, c: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    x = torch.empty(n, c, dtype=dtype, device="cuda").normal_()
    target = torch.randint(c, (n,), device="cuda")
    mu, sigma = torch.randn(c, device="cuda") * 0.1, torch.rand(c, device="cuda") + 0.5
    return x.requires_grad_(), target, mu.requires_grad_(), sigma.requires_grad_()


def loss_contenders(n: int, c: int, dtype: torch.dtype, compiled: bool = True) -> Contenders:
    """Name to one forward and backward pass."""
    x, target, mu, sigma = data(n, c, dtype)

    def step(loss: Callable[..., Tensor], *leaves: Tensor, **options: Any) -> Callable[[], None]:
        def run() -> None:
            loss(leaves[0], target, *leaves[1:], **options).backward()
            for v in leaves:
                v.grad = None

        return run

    fixed_mu, fixed_sigma = mu.detach(), sigma.detach()
    found = {
        "G-softmax": step(functional.gsoftmax_cross_entropy, x, mu, sigma),
        "G-softmax, Gaussians fixed": step(
            lambda x, target: functional.gsoftmax_cross_entropy(x, target, fixed_mu, fixed_sigma), x
        ),
        "cross entropy": step(F.cross_entropy, x),
    }
    if compiled:
        found["cross entropy, compiled"] = step(torch.compile(F.cross_entropy, dynamic=False), x)
        formula = torch.compile(functional.gsoftmax_cross_entropy, dynamic=False)
        found["formula, compiled"] = step(formula, x, mu, sigma, impl="plain")
    if liger := peer("liger_kernel.transformers.functional", "liger_cross_entropy"):
        # It writes the gradient over its input, so it gets fresh outputs each time, before the clock starts.
        held = x.detach().clone().requires_grad_()
        found["cross entropy, Liger"] = run = step(liger, held)
        run.prepare = lambda: held.data.copy_(x.data)  # type: ignore[attr-defined]
    if quack := peer("quack.cross_entropy", "cross_entropy"):
        found["cross entropy, quack"] = step(quack, x, reduction="mean")
    return found


def bench_losses(clock: Clock, copy: float, quick: bool) -> Iterator[dict[str, Any]]:
    for n, c, dtype, bound, share_bound, ms_bound in LOSSES:
        clean()
        say(f"\nloss, {name_of(n, c, dtype=dtype)}")
        contenders = working(loss_contenders(n, c, dtype))
        times = interleaved(contenders, seconds=1.0 if quick else 3.0, clock=clock)
        memory = {name: peak(run) for name, run in contenders.items()}
        passes = 3 * n * c * dtype.itemsize
        for name, t in times.items():
            share = passes / t.median / copy
            say(f"  {name:28s} {t.median * 1e3:8.3f} ms, {share:4.0%} of copy bandwidth, extra {memory[name]:5.2f} GiB")
        kernels = kernel_times(clock, n, c, dtype)
        say(f"  kernels: forward {kernels[0] * 1e3:.3f} ms, backward {kernels[1] * 1e3:.3f} ms")
        plain = {name: t.median for name, t in times.items() if name.startswith("cross")}
        best = min(plain, key=plain.__getitem__)
        ours = times["G-softmax"].median
        yield {
            "claim": "loss", "size": name_of(n, c, dtype=dtype), "ours ms": ours * 1e3, "peer": best,
            "peer ms": plain[best] * 1e3, "ratio": ours / plain[best], "bound": bound,
            "verdict": verdict(ours / plain[best], bound),
            "details": {k: {"median ms": t.median * 1e3, "fastest ms": t.fastest * 1e3, "rounds": t.rounds,
                            "share of copy bandwidth": passes / t.median / copy, "extra GiB": memory[k]}
                        for k, t in times.items()},
        }  # fmt: skip
        if share_bound:
            share = passes / ours / copy
            yield {
                "claim": "share of copy bandwidth", "size": name_of(n, c, dtype=dtype), "ours ms": ours * 1e3,
                "peer": "three passes", "peer ms": passes / copy * 1e3, "ratio": share, "bound": share_bound,
                "verdict": "PASS" if share >= share_bound else f"MISSED (at least {share_bound:g})",
            }  # fmt: skip
        if ms_bound:
            yield row("loss, ms", name_of(n, c, dtype=dtype), times, "G-softmax", best, ours * 1e3, ms_bound)


def kernel_times(clock: Clock, n: int, c: int, dtype: torch.dtype) -> list[float]:
    """Seconds of the forward and of the backward pass alone."""
    from gsoftmax.kernels import triton_ce

    x, target, mu, sigma = (v.detach() for v in data(n, c, dtype))
    rest = (1.0, Options())
    _, stats = triton_ce.forward(x, target, mu, sigma, *rest, dtype)
    grad = torch.ones((), dtype=dtype, device="cuda")
    passes = (
        lambda: triton_ce.forward(x, target, mu, sigma, *rest, dtype),
        lambda: triton_ce.backward(grad, stats, x, target, mu, sigma, *rest),
    )
    return [sorted(clock(run) for _ in range(9))[4] for run in passes]


def bench_small(clock: Clock, quick: bool) -> Iterator[dict[str, Any]]:
    seconds = 2.0 if quick else 6.0
    for n, c, bound in SMALL:
        clean()
        say(f"\nsmall, eager call, {name_of(n, c, dtype=torch.float32)}")
        contenders = working(loss_contenders(n, c, torch.float32, compiled=False))
        times = interleaved(contenders, seconds=seconds, clock=wall)
        for name, t in times.items():
            say(f"  {name:28s} {t.median * 1e6:8.1f} us per step")
        parts_of_a_small_call(n, c)
        ratio = times["G-softmax"].median / times["cross entropy"].median
        yield row("eager call", name_of(n, c), times, "G-softmax", "cross entropy", ratio, bound)

        clean()
        say(f"\nsmall, compiled step, {name_of(n, c, dtype=torch.float32)}")
        contenders = working(step_contenders(n, c))
        times = interleaved(contenders, seconds=seconds, clock=wall)
        on_gpu = interleaved(contenders, seconds=seconds / 3, clock=clock)
        for name, t in times.items():
            say(f"  {name:28s} {t.median * 1e6:8.1f} us a step, {on_gpu[name].median * 1e6:8.1f} us of them on the GPU")
        # The same contender runs twice; the difference is noise.
        plain = [times[name].median for name in ("cross entropy", "cross entropy again")]
        noise = max(abs(plain[0] / plain[1] - 1), 0.05)
        ratio = times["G-softmax"].median / (sum(plain) / 2)
        yield row("compiled step", name_of(n, c), times, "G-softmax", "cross entropy", ratio, 1 + noise)
        # Cost of having mu and sigma as parameters, without the cost of the term.
        peer = "cross entropy, parameters alike"
        ratio = times["G-softmax"].median / times[peer].median
        yield row("compiled step, as many parameters", name_of(n, c), times, "G-softmax", peer, ratio, 1 + noise)


def row(
    claim: str, size: str, times: dict[str, Any], ours: str, peer: str, ratio: float, bound: float
) -> dict[str, Any]:
    return {
        "claim": claim, "size": size, "ours ms": times[ours].median * 1e3, "peer": peer,
        "peer ms": times[peer].median * 1e3, "ratio": ratio, "bound": bound, "verdict": verdict(ratio, bound),
        "details": {k: {"median ms": t.median * 1e3, "rounds": t.rounds} for k, t in times.items()},
    }  # fmt: skip


def step_contenders(n: int, c: int) -> Contenders:
    """A linear model with its loss, compiled as one.

    mu and sigma are two more parameters, which cost time in every step whatever they are used for.  So cross entropy
    runs a third time, with a shift and a scale per class.
    """
    torch.manual_seed(0)
    h, target = torch.randn(n, 256, device="cuda"), torch.randint(c, (n,), device="cuda")
    mu = torch.zeros(c, device="cuda", requires_grad=True)
    sigma = torch.ones(c, device="cuda", requires_grad=True)

    def ours(x: Tensor) -> Tensor:
        return functional.gsoftmax_cross_entropy(x, target, mu, sigma)

    def plain(x: Tensor) -> Tensor:
        return F.cross_entropy(x, target)

    def alike(x: Tensor) -> Tensor:
        return F.cross_entropy((x - mu) * sigma, target)

    def contender(loss: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        model = torch.nn.Linear(256, c, device="cuda")

        def forward(h: Tensor) -> Tensor:
            return loss(model(h))

        # A separate function, so that torch.compile does not recompile one function for every contender.
        forward.__code__ = forward.__code__.replace()
        step = torch.compile(forward, fullgraph=True, dynamic=False)
        leaves = [*model.parameters(), mu, sigma]

        def run() -> None:
            step(h).backward()
            for v in leaves:
                v.grad = None

        return run

    return {
        "G-softmax": contender(ours),
        "cross entropy": contender(plain),
        "cross entropy again": contender(plain),
        "cross entropy, parameters alike": contender(alike),
    }


def parts_of_a_small_call(n: int, c: int) -> None:
    """Where the time of a small call goes."""
    from gsoftmax.kernels import triton_ce

    x, target, mu, sigma = data(n, c, torch.float32)
    rest = (1.0, Options())
    loss, stats = triton_ce.forward(x.detach(), target, mu, sigma, *rest, torch.float32)
    grad = torch.ones_like(loss)
    kept = functional.gsoftmax_cross_entropy(x, target, mu, sigma)
    kept_plain = F.cross_entropy(x, target)
    leaves = (x, mu, sigma)
    parts = {
        "kernels, forward": lambda: triton_ce.forward(x.detach(), target, mu, sigma, *rest, torch.float32),
        "kernels, backward": lambda: triton_ce.backward(grad, stats, x.detach(), target, mu, sigma, *rest),
        "forward call": lambda: functional.gsoftmax_cross_entropy(x, target, mu, sigma),
        "backward call": lambda: torch.autograd.grad(kept, leaves, grad, retain_graph=True),
        "cross entropy, forward call": lambda: F.cross_entropy(x, target),
        "cross entropy, backward call": lambda: torch.autograd.grad(kept_plain, x, grad, retain_graph=True),
    }
    for name, run in parts.items():
        wall(run)
        say(f"    {name:28s} {sorted(wall(run) for _ in range(5))[2] * 1e6:7.1f} us")


# ----------------------------------------------------------------------------------------------------- the linear layer


def linear_contenders(n: int, d: int, c: int) -> Contenders:
    torch.manual_seed(0)
    h = torch.randn(n, d, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.empty(c, d, dtype=torch.bfloat16, device="cuda").normal_(std=d**-0.5).requires_grad_()
    target = torch.randint(c, (n,), device="cuda")
    mu = torch.zeros(c, device="cuda", requires_grad=True)
    sigma = torch.ones(c, device="cuda", requires_grad=True)

    def step(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            loss().backward()
            h.grad = weight.grad = mu.grad = sigma.grad = None

        return run

    found = {
        "linear + G-softmax": step(
            lambda: functional.linear_gsoftmax_cross_entropy(h, weight, target, mu, sigma, impl="auto")
        ),
        "linear + cross entropy, in one": step(
            lambda: functional.linear_gsoftmax_cross_entropy(h, weight, target, mu, sigma, lam=0.0, impl="auto")
        ),
        "linear + cross entropy": step(lambda: F.cross_entropy(F.linear(h, weight), target)),
        "matrix products alone": lambda: products(h, weight),
    }
    for name, module, function in (
        ("Liger", "liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"),
        ("cut-cross-entropy", "cut_cross_entropy", "linear_cross_entropy"),
        ("quack", "quack.linear_cross_entropy", "chunked_linear_cross_entropy"),
    ):
        if loss := peer(module, function):
            found[name] = step(functools.partial(loss, h, weight, target))
    if options := peer("torch.nn", "LinearCrossEntropyOptions"):
        in_chunks = functools.partial(F.linear_cross_entropy, options=options())
        found["torch, in chunks"] = step(functools.partial(in_chunks, h, weight, target))
    return found


@torch.no_grad()
def products(h: Tensor, weight: Tensor) -> None:
    x = h @ weight.t()
    x @ weight
    x.t() @ h


def bench_linears(clock: Clock, quick: bool) -> Iterator[dict[str, Any]]:
    for n, d, c, bound, memory_bound, products_bound in LINEARS:
        clean()
        say(f"\nlinear layer and loss, {name_of(n, d, c, dtype=torch.bfloat16)}")
        contenders = working(linear_contenders(n, d, c))
        times = interleaved(contenders, seconds=3.0 if quick else 6.0, blocks=3, warmup=1, clock=clock)
        memory = {name: peak(run) for name, run in contenders.items()}
        for name, t in times.items():
            say(f"  {name:30s} {t.median * 1e3:8.2f} ms, extra {memory[name]:6.2f} GiB, gradients included")
        ours, peer = "linear + G-softmax", "linear + cross entropy"
        found = row("linear", name_of(n, d, c), times, ours, peer, times[ours].median / times[peer].median, bound)
        for name in times:
            found["details"][name]["extra GiB"] = memory[name]
        yield found
        yield {
            "claim": "linear, extra GiB", "size": name_of(n, d, c), "ours ms": times[ours].median * 1e3, "peer": peer,
            "peer ms": times[peer].median * 1e3, "ratio": memory[ours], "bound": memory_bound,
            "verdict": verdict(memory[ours], memory_bound),
        }  # fmt: skip
        if products_bound:
            peer = "matrix products alone"
            ratio = times[ours].median / times[peer].median
            yield row("linear, over the products", name_of(n, d, c), times, ours, peer, ratio, products_bound)


# -------------------------------------------------------------------------------------------- the roads around the loss


def road_contenders(road: str, n: int, c: int) -> Contenders:
    """Name to one forward and backward pass, or to one prediction, with the term and without."""
    x, target, *_ = data(n, c, torch.bfloat16)

    def step(loss: Callable[[], Tensor], *leaves: Tensor, compiled: bool = False) -> Callable[[], None]:
        loss = torch.compile(loss, dynamic=False) if compiled else loss

        def run() -> None:
            loss().backward()
            for v in leaves:
                v.grad = None

        return run

    if road == "predict_proba":
        x, of_loss = x.detach(), GSoftmaxLoss(c, device="cuda").requires_grad_(False)
        return {
            "G-softmax": lambda: of_loss.predict_proba(x),
            "formula, compiled": functools.partial(torch.compile(of_loss.predict_proba, dynamic=False), x),
            "softmax": lambda: torch.softmax(x, 1),
        }
    if road == "sharded":
        h = torch.randn(n, FEATURES, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        heads = {
            name: head(FEATURES, c, bias=False, device="cuda", dtype=torch.bfloat16)
            for name, head in (("G-softmax", ShardedGSoftmaxHead), ("whole head", GSoftmaxHead))
        }
        return {
            name: step(functools.partial(head.loss, h, target), h, *head.parameters()) for name, head in heads.items()
        }
    if road == "attach":
        layer = GaussianLogits(c, device="cuda")
        ours, leaves, name = lambda: F.cross_entropy(layer(x), target), (x, *layer.parameters()), "cross entropy"
        plain = functools.partial(F.cross_entropy, x, target)
    else:
        labels = torch.randint(2, (n, c), device="cuda").to(torch.bfloat16)
        loss = MultiLabelGSoftmaxLoss(c, form=road, device="cuda")
        outputs = data(n, c if road == "msml" else 2 * c, torch.bfloat16)[0]
        ours, leaves, name = functools.partial(loss, outputs, labels), (outputs, *loss.parameters()), "BCE"
        plain = functools.partial(F.binary_cross_entropy_with_logits, x, labels)
    return {
        "G-softmax": step(ours, *leaves),
        "formula, compiled": step(ours, *leaves, compiled=True),
        name: step(plain, x),
        f"{name}, compiled": step(plain, x, compiled=True),
    }


def bench_road(
    clock: Any, quick: bool, road: str, n: int, c: int, bound: float, memory_bound: float | None
) -> Iterator[dict[str, Any]]:
    clean()
    size, ours, peer = name_of(n, c, dtype=torch.bfloat16), "G-softmax", PEERS[road]
    if road == "sharded":
        size = name_of(n, FEATURES, c, dtype=torch.bfloat16)
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    say(f"\n{road}, {size}")
    contenders = working(road_contenders(road, n, c))
    times = interleaved(contenders, seconds=1.0 if quick else 3.0, clock=clock)
    memory = {name: peak(run) for name, run in contenders.items()}
    for name, t in times.items():
        say(f"  {name:28s} {t.median * 1e3:8.3f} ms, extra {memory[name]:6.2f} GiB")
    found = row(road, size, times, ours, peer, times[ours].median / times[peer].median, bound)
    for name in times:
        found["details"][name]["extra GiB"] = memory[name]
    yield found
    if memory_bound:
        yield row(f"{road}, memory", size, times, ours, peer, memory[ours] / memory[peer], memory_bound)
    if road == "sharded":
        dist.destroy_process_group()


# --------------------------------------------------------------------------------------------------------------- tuning


def tune(deadline: float) -> dict[str, Any]:
    """Times of many plans; the best of each, as lines for TUNED."""
    from gsoftmax.kernels.launching import Plan

    shapes = {
        "forward": [(1, 512, 1), (1, 1024, 1), (2, 512, 1), (4, 256, 1), (1, 1024, 2), (1, 2048, 2), (1, 2048, 4),
                    (1, 4096, 4), (4, 512, 4), (1, 4096, 8)],
        "backward": [(1, 256, 1), (1, 512, 1), (2, 256, 1), (4, 256, 1), (1, 512, 2), (2, 512, 2), (1, 1024, 4),
                     (2, 1024, 4), (1, 2048, 4), (1, 2048, 8)],
    }  # fmt: skip
    results: dict[str, Any] = {}
    lines = []
    for size in (2, 4):
        tables = [(n, c, dtype) for n, c, dtype, *_ in LOSSES if dtype.itemsize == size]
        main = max(tables, key=lambda t: t[0] * t[1] if t[0] > 4000 else 0)
        degree = 6 if size == 2 else 7
        for kind in ("forward", "backward"):
            timed: dict[Plan, float] = {}
            timer = plan_timer(kind, *main)

            def attempt(plan: Plan, timed: dict[Plan, float] = timed, timer: Any = timer) -> None:
                if plan in timed or time.monotonic() > deadline:
                    return
                try:
                    timed[plan] = timer(plan)
                except Exception as error:
                    say(f"    {tuple(plan)}: {type(error).__name__} {str(error)[:90]}")

            say(f"\n{kind}, {name_of(main[0], main[1], dtype=main[2])}: {', '.join(Plan._fields)}")
            for block_n, block_c, warps in shapes[kind]:
                attempt(Plan(block_n, block_c, 128, warps, 1, degree, None))
            for of_interest in sorted(timed, key=timed.__getitem__)[:3]:
                for change in (
                    {"registers": 96}, {"registers": 128}, {"registers": 168}, {"rows": 32}, {"rows": 64},
                    {"rows": 256}, {"rows": 512}, {"stages": 2}, {"stages": 3},
                ):  # fmt: skip
                    if kind == "forward" and change.get("registers") == 168:
                        continue
                    attempt(of_interest._replace(**change))
            for of_interest in sorted(timed, key=timed.__getitem__)[:2]:
                for change in ({"rows": 64}, {"rows": 256}, {"rows": 512}, {"stages": 2}, {"registers": 128}):
                    attempt(of_interest._replace(**change))
            order = sorted(timed, key=timed.__getitem__)
            if not order:
                continue
            for plan in order[:10]:
                say(f"    {timed[plan] * 1e3:8.3f} ms  {tuple(plan)}")
            for d in (5, 6, 7):
                attempt(order[0]._replace(degree=d))
                if order[0]._replace(degree=d) in timed:
                    say(f"    {timed[order[0]._replace(degree=d)] * 1e3:8.3f} ms  degree {d} of the best")
            del timer
            others = {}
            for t in tables:
                if t is main:
                    continue
                clean()
                timer = plan_timer(kind, *t)
                others[t] = {plan: timer(plan) for plan in order[:5] if time.monotonic() < deadline}
                for plan, seconds in sorted(others[t].items(), key=lambda item: item[1]):
                    say(f"    {seconds * 1e3:8.3f} ms  {tuple(plan)} at {name_of(t[0], t[1], dtype=t[2])}")
                del timer
            clean()
            best = min(
                order[:5],
                key=lambda p: (
                    timed[p] / timed[order[0]]
                    + sum(times.get(p, 9.0) / min(times.values()) for times in others.values() if times)
                ),
            )
            lines.append(
                f'    ("{kind}", {size}): ({best.block_n}, {best.block_c}, {best.rows}, {best.warps}, {best.stages}, '
                f"{best.registers}),  # {timed[best] * 1e3:.3f} ms"
            )
            results[f"{kind}, {size} bytes"] = [{"plan": tuple(p), "ms": timed[p] * 1e3} for p in order]
    results["linear"] = tune_linear(deadline)
    say("\nTUNED = {")
    for line in lines:
        say(line)
    say("}")
    return results


def plan_timer(kind: str, n: int, c: int, dtype: torch.dtype) -> Callable[[Any], float]:
    from gsoftmax.kernels import triton_ce

    x, target, mu, sigma = (v.detach() for v in data(n, c, dtype))
    rest = (1.0, Options())
    loss, stats = triton_ce.forward(x, target, mu, sigma, *rest, torch.float32)
    grad, dx = torch.ones((), device="cuda"), torch.empty_like(x)
    expected = triton_ce.backward(grad, stats, x, target, mu, sigma, *rest, dx=dx)[1].clone()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timer(plan: Any) -> float:
        def run() -> Tensor:
            if kind == "forward":
                return triton_ce.forward(x, target, mu, sigma, *rest, torch.float32, plan)[0]
            return triton_ce.backward(grad, stats, x, target, mu, sigma, *rest, dx=dx, cut=plan)[1]

        got, right = run(), loss if kind == "forward" else expected
        off = ((got - right).norm() / right.norm()).item()
        if not off < 1e-4:
            raise ValueError(f"wrong by {off:.1e}")
        times = []
        for _ in range(7):
            start.record()
            for _ in range(3):
                run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 3e3)
        return sorted(times)[3]

    return timer


def tune_linear(deadline: float) -> list[dict[str, Any]]:
    from gsoftmax.kernels import linear

    clock, usual, found = Clock(), dict(linear.CHUNK), []
    usual_sum = linear.FLOAT32_SUM
    for n, d, c, *_ in LINEARS:
        clean()
        run = linear_contenders(n, d, c)["linear + G-softmax"]
        for dtype in (torch.float32, torch.bfloat16):
            for rows in (512, 1024, 2048, 4096):
                if time.monotonic() > deadline or rows < d:
                    continue
                linear.FLOAT32_SUM, linear.CHUNK["cuda"] = 1 << 40 if dtype is torch.float32 else 0, rows * c
                run()
                ms, gib = sorted(clock(run) for _ in range(5))[2] * 1e3, peak(run)
                found.append({"size": name_of(n, d, c), "rows": rows, "dW": str(dtype), "ms": ms, "GiB": gib})
                say(f"    linear {name_of(n, d, c)}: {rows} rows, dW in {dtype}: {ms:.2f} ms, {gib:.2f} GiB")
        linear.FLOAT32_SUM = usual_sum
        linear.CHUNK.update(usual)
    return found


# ----------------------------------------------------------------------------------------------------------------- main


PARTS: dict[str, Callable[[Any, float, bool], list[Iterator[dict[str, Any]]]]] = {
    "small": lambda clock, _, quick: [bench_small(clock, quick)],
    "losses": lambda clock, copy, quick: [bench_losses(clock, copy, quick)],
    "linears": lambda clock, _, quick: [bench_linears(clock, quick)],
    "roads": lambda clock, _, quick: [bench_road(clock, quick, *which) for which in ROADS],
}


def bench(quick: bool, folder: Path | None, only: Sequence[str]) -> None:
    """Every claim in turn; what is measured is saved at once, some parts alone under a name of their own."""
    file = "-".join(["bench-gpu", *only])
    clock = Clock()
    copy = copy_bandwidth(clock)
    say(f"copy bandwidth {copy / 1e12:.2f} TB/s, read and written")
    rows: list[dict[str, Any]] = []
    payload = {"provenance": provenance(), "copy bytes per second": copy, "rows": rows}
    for part in [part for name in only or PARTS for part in PARTS[name](clock, copy, quick)]:
        try:
            for measured in part:
                rows.append(measured)
                save(file, payload, folder)
        except Exception:
            say(traceback.format_exc())
            rows.append({"claim": "interrupted by an error", "size": "", "ours ms": None, "peer": "", "peer ms": None,
                         "ratio": None, "bound": None, "verdict": "MISSED"})  # fmt: skip
    say("\n" + table([{k: v for k, v in row.items() if k != "details"} for row in rows]))
    save(file, payload, folder)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--tune", action="store_true", help="find the fastest tiles instead")
    parser.add_argument("--bench", action="store_true", help="speed (what happens without --tune)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[], help="these parts")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--out", type=Path, help="folder for the JSON instead of results/")
    parser.add_argument("--seconds", type=float, default=540, help="when --tune must come to an end")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        say("no GPU here: nothing measured")
        return 2
    deadline = time.monotonic() + options.seconds
    import gsoftmax

    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, gsoftmax {getattr(gsoftmax, '__version__', '?')}")
    if options.tune:
        save("tune-gpu", {"provenance": provenance(), "times": tune(deadline)}, options.out)
    if options.bench or not options.tune:
        bench(options.quick, options.out, options.only)
    return 0


def save(name: str, payload: dict[str, Any], folder: Path | None) -> None:
    if folder is None:
        write(name, payload)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(payload, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
