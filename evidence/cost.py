"""What a head costs: `python -m evidence.cost --data cifar10=SPEC` times training steps, results/evidence/cost.json.

The same network with each head in turn, a block of steps at a time, so that other load on the machine affects all of
them alike; and only the head with its loss, forward and backward, for its share of the step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from gsoftmax import build, recipes
from gsoftmax.config import Config

from .run import ROWS, resolve_spec, where

HEADS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax again": {},
    "L-softmax m=2": {"head": "lsoftmax", "head_options": {"margin": 2}},
    "G λ=1": {"head": "gsoftmax", "head_options": {"lam": 1}},
    "G λ=1, fixed": {"head": "gsoftmax", "head_options": {"lam": 1, "gaussians": "fixed"}},
    "G λ=1, tracked": {"head": "gsoftmax", "head_options": {"lam": 1, "gaussians": "tracked"}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="cifar10-fast")
    parser.add_argument(
        "--data", action="append", default=[], metavar="NAME=SPEC", help="location of the recipe's data"
    )
    parser.add_argument("--blocks", type=int, default=25)
    parser.add_argument("--steps", type=int, default=20, help="of a block")
    parser.add_argument("--rows", type=Path, default=ROWS, help="folder of the result")
    args = parser.parse_args()
    data = dict(pair.split("=", 1) for pair in args.data)
    found = measure(args.recipe, data, args.blocks, args.steps)
    args.rows.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"recipe": args.recipe, "heads": found} | where(), ensure_ascii=False, indent=1)
    (args.rows / "cost.json").write_text(text + "\n", "utf-8")
    for name, of in found.items():
        print(f"{name:16s} {of['step ms']:.3f} ms, {of['ratio']:.4f} of softmax, {of['share']:.2%} of it in the head")


def measure(recipe: str, data: dict[str, str], blocks: int, steps: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a step (median of the blocks), the median ratio to softmax's, and the head's share."""
    base = recipes.find(recipe).config({})
    base = base.override({"data": resolve_spec(base.data, data)})
    torch.backends.cudnn.benchmark = True
    times: dict[str, list[float]] = {name: [] for name in HEADS}
    heads: dict[str, list[float]] = {name: [] for name in HEADS}
    with ExitStack() as stack:
        runs = {name: _step_and_head(base.override(changes), stack) for name, changes in HEADS.items()}
        for block in range(-2, blocks):  # two to warm up
            turn = block % len(HEADS)
            for which, into in enumerate((times, heads)):
                for name in [*HEADS][turn:] + [*HEADS][:turn]:
                    ms = _block(runs[name][which], steps)
                    if block >= 0:
                        into[name].append(ms)
    return {
        name: {
            "step ms": statistics.median(times[name]),
            "ratio": statistics.median(a / b for a, b in zip(times[name], times["softmax"], strict=True)),
            "head ms": statistics.median(heads[name]),
            "share": statistics.median(heads[name]) / statistics.median(times[name]),
        }
        for name in HEADS
    }


def _step_and_head(config: Config, stack: ExitStack) -> tuple[Callable[[], None], Callable[[], None]]:
    """A training step on a batch in memory, and only its head."""
    dataset = build.load_data(config)
    device = dataset.train.y.device
    parts = build.prepare(config, dataset, device)
    inputs, target = next(build.train_batches(dataset, config, 1))
    amp, options = build.autocast(config, device), build.loss_options(config)
    parts.network.train()
    if config.cuda_graphs and device.type == "cuda":
        stack.enter_context(build.cuda_graphs(parts.network.backbone, inputs, amp))
    with torch.no_grad(), amp():
        h = parts.network.h(inputs).clone()
    h.requires_grad_()
    leaves = [h, *(p for p in parts.network.head.parameters() if p.requires_grad)]

    def step() -> None:
        with amp():
            loss = parts.loss(inputs, target, **options)
        loss.backward()
        parts.optimizer.step()
        parts.optimizer.zero_grad(set_to_none=True)

    def head() -> None:
        with amp():
            loss = parts.network.head.loss(h, target, **options)
        torch.autograd.grad(loss, leaves)

    if device.type != "cuda":
        return step, head
    # In a step the head's launches overlap with the backbone's work, so they should not count here either.
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        for _ in range(3):
            head()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        head()
    return step, graph.replay


def _block(run: Callable[[], None], steps: int) -> float:
    """Milliseconds of a step."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        for _ in range(steps):
            run()
        return (time.perf_counter() - start) / steps * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    begin.record()
    for _ in range(steps):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / steps


if __name__ == "__main__":
    main()
