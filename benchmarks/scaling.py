"""A million classes on many processes: communication, step time, and an extrapolation to larger machines.

    python -m benchmarks.scaling            measures 1, 2 and 4 processes here -> results/scaling.json, then the plot
    python -m benchmarks.scaling --plot     the plot alone, from the model below

The model of a training step of the head, for K processes with n rows of h (D numbers of b bytes) each, N = K n:

    classes in shards   8 N D C/K operations (x, x again, dh, dW; x once where K is 1), 5 passes over C/K D weights of 4
                        bytes (SGD with momentum), and on the wire (K - 1) (2 n D b + 32 n + 32) bytes sent by every
                        process
    head on everyone    6 n D C operations, the same passes over C D weights, and 2 (K - 1)/K C D b bytes

It ignores the backbone and any overlap.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gsoftmax.report.figures import render, sheet

from .common import provenance

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "scaling.json"
PLOT = ROOT / "docs" / "images" / "scaling.svg"


@dataclass(frozen=True)
class Machine:
    """Assumptions of the model.  The first two were measured on an H200 (results/bench-gpu.json), the others
    are the usual numbers of machines with eight of them."""

    operations: float = 4.32e14  # a second, bfloat16 products of 512 features with the loss in between
    memory: float = 4.25e12  # bytes a second, copying
    nvlink: float = 4.0e11  # bytes a second that a GPU sends inside a machine
    network: float = 5.0e10  # bytes a second that a GPU sends to another machine: one 400 Gbit/s card each
    latency: float = 3.0e-5  # seconds for a collective to begin
    hold: float = 1.2e11  # bytes of GPU memory for the head: weights, gradient, momentum
    per_machine: int = 8

    def link(self, processes: int) -> float:
        return self.nvlink if processes <= self.per_machine else self.network


def sent_by_shards(processes: int, rows: int, features: int, item: int = 2) -> float:
    """Bytes that one process sends per step with sharded classes, independent of their number."""
    return (processes - 1) * (2 * rows * features * item + 32 * rows + 32)


def sent_by_copies(processes: int, classes: int, features: int, item: int = 2) -> float:
    """The same for a replicated head, whose gradients are summed."""
    return 2 * (processes - 1) / processes * classes * features * item


def step_of_shards(processes: int, classes: float, rows: int, features: int, machine: Machine) -> float:
    """Seconds; infinite where the shard does not fit."""
    own = classes / processes
    if 12 * own * features > machine.hold:
        return float("inf")
    compute = (6 if processes == 1 else 8) * processes * rows * features * own / machine.operations
    update = 5 * 4 * own * features / machine.memory
    wire = 0.0
    if processes > 1:
        wire = sent_by_shards(processes, rows, features) / machine.link(processes) + 6 * machine.latency
    return compute + update + wire


def step_of_copies(processes: int, classes: float, rows: int, features: int, machine: Machine) -> float:
    if 12 * classes * features > machine.hold:
        return float("inf")
    compute = 6 * rows * features * classes / machine.operations
    update = 5 * 4 * classes * features / machine.memory
    wire = 0.0
    if processes > 1:
        wire = sent_by_copies(processes, int(classes), features) / machine.link(processes) + machine.latency
    return compute + update + wire


# ---------------------------------------------------------------------------------------------------------- measuring


def work(out: str, sizes: list[tuple[int, int, int]], rounds: int) -> None:
    """One of the processes: steps of both kinds of head, by turns, and the bytes that were sent."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from gsoftmax import GSoftmaxHead, sharded

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    processes, found = dist.get_world_size(), []

    class Loss(torch.nn.Module):
        def __init__(self, head: Any) -> None:
            super().__init__()
            self.head = head

        def forward(self, h: Any, y: Any) -> Any:
            return self.head.loss(h, y)

    for rows, features, classes in sizes:
        torch.manual_seed(0)
        heads: dict[str, Any] = {"shards": Loss(sharded.ShardedGSoftmaxHead(features, classes))}
        copies: Any = Loss(GSoftmaxHead(features, classes))
        heads["copies"] = DistributedDataParallel(copies) if processes > 1 else copies
        own = rows // processes
        h, y = torch.randn(own, features, requires_grad=True), torch.randint(0, classes, (own,))
        seconds: dict[str, list[float]] = {name: [] for name in heads}
        for i in range(rounds + 1):
            for name, head in heads.items():
                dist.barrier()
                start = time.perf_counter()
                with sharded.bytes_on_wire() as wire:
                    head(h, y).backward()
                dist.barrier()
                if i:  # the first is for warming up
                    seconds[name].append(time.perf_counter() - start)
                if name == "shards":
                    sent = wire.total
        row = {"processes": processes, "rows": rows, "features": features, "classes": classes}
        row |= {f"{name} ms": 1e3 * statistics.median(v) for name, v in seconds.items()}
        row |= {"shards sent bytes": sent, "copies sent bytes": sent_by_copies(processes, classes, features, 4)}
        found.append(row)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found), "utf-8")
    dist.destroy_process_group()


def measure(rounds: int = 5) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for processes in (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows.json"
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(processes),
            ]
            command += ["-m", "benchmarks.scaling", "--work", str(out), "--rounds", str(rounds)]
            subprocess.run(command, check=True, cwd=ROOT, env=dict(os.environ, OMP_NUM_THREADS="1"))
            rows += json.loads(out.read_text("utf-8"))
    return {"provenance": provenance(), "rows": rows}


# ------------------------------------------------------------------------------------------------------------ the plot


def plot(path: Path = PLOT, rows: int = 128, features: int = 512) -> None:
    """Milliseconds of a step of the head against the number of GPUs."""
    machine, counts = Machine(), [2**k for k in range(11)]
    kinds = {"classes in shards": step_of_shards, "a whole head each": step_of_copies}
    found = [
        {
            "gpus": k,
            "ms": 1e3 * step(k, classes, rows, features, machine),
            "classes": f"{classes:,.0f} classes",
            "kind": kind,
        }
        for classes in (1e5, 1e6, 1e7, 1e8)
        for kind, step in kinds.items()
        for k in counts
    ]
    log = {"type": "log", "nice": False}
    paint = {"range": ["#4269d0", "#3ca951", "#efb118", "#ff725c"]}
    dash = {"domain": list(kinds), "range": [[1, 0], [5, 4]]}
    spec = {
        "data": {"values": [row for row in found if row["ms"] < float("inf")]},
        "width": 560,
        "height": 340,
        "mark": {"type": "line", "strokeWidth": 2},
        "encoding": {
            "x": {"field": "gpus", "type": "quantitative", "title": "GPUs", "scale": log, "axis": {"values": counts}},
            "y": {"field": "ms", "type": "quantitative", "title": "milliseconds of a step of the head", "scale": log},
            "color": {"field": "classes", "type": "nominal", "title": None, "sort": None, "scale": paint},
            "strokeDash": {"field": "kind", "type": "nominal", "title": None, "scale": dash},
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(render(sheet(spec, f"{rows} rows a GPU, {features} features, bfloat16")))


SIZES = [(256, 128, 10_000), (256, 128, 100_000)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", action="store_true", help="only draw the plot")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, SIZES, args.rounds)
        return
    if not args.plot:
        found = measure(args.rounds)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        for row in found["rows"]:
            print("  ".join(f"{k} {v:,.1f}" if isinstance(v, float) else f"{k} {v:,}" for k, v in row.items()))
    plot()
    print(PLOT.relative_to(ROOT))


if __name__ == "__main__":
    main()
