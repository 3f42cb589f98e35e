"""Speed on a CPU: `python -m benchmarks.cpu`.

Forward and backward pass of the loss against `torch.nn.functional.cross_entropy` on the same x, with gradients for x
and, in ours, for mu and sigma; extra memory; the roads around the loss, each against what one would call without the
term; and average precision against torchmetrics.  Every size runs in a separate process, with alternating contenders.

Much of the time of both losses is spent on page faults of new memory, so the allocator matters: the default is the C
library's, and the compiled kernel asks for huge pages for its own output.  A second table repeats the large sizes with
torch's allocator asking for huge pages everywhere (THP_MEM_ALLOC_ENABLE=1), which helps plain cross entropy too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.common import interleaved, provenance, table, verdict, write
from gsoftmax import GaussianLogits, MultiLabelGSoftmaxLoss, kernels
from gsoftmax.functional import gsoftmax, gsoftmax_cross_entropy

# (rows, classes): the contender that has to be fast, its most allowed time over cross entropy's, and memory over x's
BOUNDS: dict[tuple[int, int], list[tuple[str, float, float | None]]] = {
    (128, 10): [("auto", 1.7, None)],
    (128, 100): [("auto", 1.7, None)],
    (256, 1000): [("auto", 1.2, None)],
    (1024, 21841): [("auto", 0.6, 1.1), ("chunked", 1.2, 1.1)],
    (512, 100000): [("auto", 0.6, 1.1)],
}
# road and (rows, classes or labels): its most allowed time over the plain road's, and peak memory likewise
ROADS: dict[tuple[str, int, int], tuple[float, float]] = {
    ("attach", 256, 1000): (2.5, 1.1),
    ("attach", 1024, 21841): (1.8, 1.1),
    ("predict_proba", 256, 1000): (1.5, 1.1),
    ("predict_proba", 1024, 21841): (1.5, 1.1),
    ("paired", 512, 10000): (2.5, 2.1),
    ("msml", 512, 10000): (1.5, 1.1),
}
WITHOUT = {"attach": "cross entropy", "predict_proba": "softmax", "paired": "BCE", "msml": "BCE"}
AP_BOUND = 0.4
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"


def contenders(n: int, c: int, compiled: bool) -> dict[str, Callable[[], None]]:
    """Name to one forward and backward pass."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, c, generator=generator, requires_grad=True)
    target = torch.randint(c, (n,), generator=generator)
    mu, sigma = torch.zeros(c, requires_grad=True), torch.ones(c, requires_grad=True)

    def step(loss: Callable[..., torch.Tensor], *args: Any, **options: Any) -> Callable[[], None]:
        def run() -> None:
            x.grad = mu.grad = sigma.grad = None
            loss(x, target, *args, **options).backward()

        return run

    def plain(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return gsoftmax_cross_entropy(x, target, mu, sigma, impl="plain")

    found = {
        "cross entropy": step(F.cross_entropy),
        "auto": step(gsoftmax_cross_entropy, mu, sigma),
        "chunked": step(gsoftmax_cross_entropy, mu, sigma, impl="chunked"),
        "plain": step(plain),
    }
    if compiled:
        found["compiled cross entropy"] = step(torch.compile(F.cross_entropy))
        found["compiled plain"] = step(torch.compile(plain))
    return found


def time_one(n: int, c: int, compiled: bool, seconds: float) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(n, c, generator=generator), torch.zeros(n, dtype=torch.long)
    path = kernels.explain(x, target, 0.0, 1.0)
    steps = contenders(n, c, compiled)
    base = steps.pop("cross entropy")
    times = {}
    for name, step in steps.items():  # in pairs, so that all start with similar caches
        pair = interleaved({"cross entropy": base, name: step}, seconds=seconds)
        times[name] = asdict(pair[name]) | {"cross entropy": asdict(pair["cross entropy"])}
    return {"auto is": str(path), "times": times}


def memory_of_one(n: int, c: int, name: str) -> float | None:
    """Peak memory of one step beyond what was there before it, as a multiple of x's; Linux only."""
    contenders(2, 3, False)[name]()  # triggers imports and initialization
    return _peak(contenders(n, c, False)[name], 4 * n * c)


def _peak(step: Callable[[], None], size: int) -> float | None:
    """Peak memory of a step beyond what was there before it, over `size`; Linux only."""
    try:
        Path("/proc/self/clear_refs").write_text("5", "utf-8")  # the peak starts again from here
        before = _status("VmRSS")
        step()
        return (_status("VmHWM") - before) / size
    except OSError:
        return None


def road(name: str, n: int, c: int) -> dict[str, Callable[[], None]]:
    """One forward and backward pass, or prediction, without the term ("plain") and with it ("ours")."""
    generator = torch.Generator().manual_seed(0)
    form = name if name in ("paired", "msml") else None
    x, wide = (torch.randn(n, k * c, generator=generator, requires_grad=True) for k in (1, 2))
    target = torch.randint(2 if form else c, (n, c) if form else (n,), generator=generator)
    gaussians = GaussianLogits(c)

    def train(
        v: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor], of: torch.nn.Module | None = None
    ) -> Callable[[], None]:
        def run() -> None:
            v.grad = None
            if of is not None:
                of.zero_grad()
            loss(v).backward()

        return run

    if form:
        module, y = MultiLabelGSoftmaxLoss(c, form=form), target.float()  # what each is usually given
        plain = train(x, lambda v: F.binary_cross_entropy_with_logits(v, y))
        return {"plain": plain, "ours": train(wide if form == "paired" else x, lambda v: module(v, target), module)}
    if name == "attach":
        ours = train(x, lambda v: F.cross_entropy(gaussians(v), target), gaussians)
        return {"plain": train(x, lambda v: F.cross_entropy(v, target)), "ours": ours}
    v, mu, sigma = x.detach(), gaussians.mu.detach(), gaussians.sigma.detach()

    def predict() -> None:
        gsoftmax(v, mu, sigma)

    def softmax() -> None:
        torch.softmax(v, 1)

    return {"plain": softmax, "ours": predict}


def time_road(name: str, n: int, c: int, seconds: float) -> dict[str, Any]:
    return {who: asdict(t) for who, t in interleaved(road(name, n, c), seconds=seconds).items()}


def memory_of_road(name: str, n: int, c: int, who: str) -> float | None:
    road(name, 2, 3)[who]()
    return _peak(road(name, n, c)[who], 4 * n * c)


def road_line(name: str, n: int, c: int, times: dict[str, Any], memory: dict[str, float | None]) -> dict[str, Any]:
    """A row of the table of roads."""
    ours, plain = times["ours"], times["plain"]
    ratio, bounds = ours["quiet"] / plain["quiet"], ROADS[name, n, c]
    more = memory["ours"] / memory["plain"] if memory["ours"] and memory["plain"] else None
    return {
        "road": name,
        "size": f"{n} x {c}",
        "ms": round(1e3 * ours["quiet"], 3),
        "without the term": WITHOUT[name],
        "its ms": round(1e3 * plain["quiet"], 3),
        "ratio": ratio,
        "at most": bounds[0],
        "time": verdict(ratio, bounds[0]),
        "of all rounds": ours["median"] / plain["median"],
        "memory / its": more,
        "memory at most": bounds[1],
        "memory": verdict(more, bounds[1]),
    }


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field + ":")))


def time_average_precision(seconds: float) -> dict[str, Any]:
    """AP of every class of 40,137 images with 80 labels, exact, ours and torchmetrics'."""
    from torchmetrics.functional.classification import multilabel_average_precision

    from gsoftmax.metrics import average_precision

    generator = torch.Generator().manual_seed(0)
    target = (torch.rand(40137, 80, generator=generator) < 0.036).long()
    scores = torch.sigmoid(torch.randn(40137, 80, generator=generator) + 2 * target)

    def theirs() -> torch.Tensor:
        return multilabel_average_precision(scores, target, num_labels=80, average=None)

    worst = (torch.as_tensor(average_precision(scores, target)) - theirs()).abs().max().item()
    times = interleaved(
        {"torchmetrics": theirs, "gsoftmax": lambda: average_precision(scores, target)}, seconds=seconds
    )
    return {"largest difference": worst, "times": {name: asdict(t) for name, t in times.items()}}


# ------------------------------------------------------------------------------------------- one process for each size


def in_a_process(*arguments: str, **environment: str) -> Any:
    command = [sys.executable, "-m", "benchmarks.cpu", *arguments]
    here = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, cwd=here)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def lines(n: int, c: int, found: dict[str, Any], memory: dict[str, float | None], judged: bool) -> list[dict[str, Any]]:
    """A row of the table for each contender."""
    path = found["auto is"].split(":")[0]
    rows = []
    for name, t in found["times"].items():
        base = t["cross entropy"]
        bound = next(((b, m) for who, b, m in BOUNDS[n, c] if who == name and judged), None)
        ratio = t["quiet"] / base["quiet"]
        row = {
            "size": f"{n} x {c}",
            "contender": f"ours, {path}" if name == "auto" else f"ours, {name}" if name == "chunked" else name,
            "ms": round(1e3 * t["quiet"], 3),
            "cross entropy": round(1e3 * base["quiet"], 3),
            "ratio": ratio,
            "of all rounds": t["median"] / base["median"],
            "GB/s": 3 * 4e-9 * n * c / t["quiet"],  # x read twice, dx written once
        }
        if judged:
            row["at most"] = bound and bound[0]
            row["time"] = verdict(ratio, bound[0]) if bound else ""
            row["memory / x"] = memory.get(name)
            row["memory at most"] = bound and bound[1]
            row["memory"] = verdict(memory.get(name), bound[1]) if bound and bound[1] else ""
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="also torch.compile of cross entropy and of the formula")
    parser.add_argument("--seconds", type=float, default=5.0, help="about the time for each pair of contenders")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads; the bounds are for two")
    parser.add_argument("--no-write", action="store_true", help="do not write results/bench-cpu.json")
    parser.add_argument("--time", nargs=2, type=int, metavar=("N", "C"), help=argparse.SUPPRESS)
    parser.add_argument("--memory", nargs=3, metavar=("N", "C", "NAME"), help=argparse.SUPPRESS)
    parser.add_argument("--road", nargs=3, metavar=("NAME", "N", "C"), help=argparse.SUPPRESS)
    parser.add_argument("--road-memory", nargs=4, metavar=("NAME", "N", "C", "WHO"), help=argparse.SUPPRESS)
    parser.add_argument("--ap", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.time:
        n, c = args.time
        return print(json.dumps(time_one(n, c, args.compile, args.seconds)))
    if args.memory:
        n, c, name = args.memory
        return print(json.dumps(memory_of_one(int(n), int(c), name)))
    if args.road:
        name, n, c = args.road
        return print(json.dumps(time_road(name, int(n), int(c), args.seconds)))
    if args.road_memory:
        name, n, c, who = args.road_memory
        return print(json.dumps(memory_of_road(name, int(n), int(c), who)))
    if args.ap:
        return print(json.dumps(time_average_precision(args.seconds)))

    where = provenance() | {"allocator": "the C library's; huge pages for the compiled kernel's output only"}
    print("\n".join(f"{key}: {value}" for key, value in where.items()), end="\n\n")
    common = ["--threads", str(args.threads), "--seconds", str(args.seconds)] + ["--compile"] * args.compile
    rows, raw = [], {}
    for n, c in BOUNDS:
        found = in_a_process("--time", str(n), str(c), *common, **{HUGE_PAGES: "0"})
        large = n * c > 10**6
        names = ["cross entropy", "auto", "chunked", "plain"] if large else []
        memory = {name: in_a_process("--memory", str(n), str(c), name, *common, **{HUGE_PAGES: "0"}) for name in names}
        raw[f"{n} x {c}"] = found | {"memory / x": memory}
        if large:
            print(f"cross entropy itself holds {memory['cross entropy'] or 0:.2f} times x at {n} x {c}")
        rows += lines(n, c, found, memory, judged=True)
    print("Forward + backward, float32, milliseconds; GB/s count x read twice and dx written once:\n")
    print(table(rows), end="\n\n")

    roads = []
    for name, n, c in ROADS:
        at = name, str(n), str(c)
        times = in_a_process("--road", *at, *common, **{HUGE_PAGES: "0"})
        memory = {  # Linux counts pages in batches, too coarse for a peak of a few megabytes
            who: in_a_process("--road-memory", *at, who, *common, **{HUGE_PAGES: "0"}) if n * c > 10**6 else None
            for who in ("plain", "ours")
        }
        raw[f"{name} {n} x {c}"] = {"times": times, "memory / x": memory}
        roads.append(road_line(name, n, c, times, memory))
    print("The roads around the loss, and what one would call without the term:\n")
    print(table(roads), end="\n\n")

    huge: list[dict[str, Any]] = []
    for n, c in BOUNDS:
        if n * c > 10**6:
            found = in_a_process("--time", str(n), str(c), *common, **{HUGE_PAGES: "1"})
            raw[f"{n} x {c}, huge pages for all"] = found
            huge += lines(n, c, found, {}, judged=False)
    print(f"The same where torch's allocator asks for huge pages too ({HUGE_PAGES}=1), for information:\n")
    print(table(huge))

    ap: dict[str, Any] | None = None
    try:
        import torchmetrics  # noqa: F401
    except ImportError:
        print("\nAverage precision: not measured, torchmetrics is not installed")
    else:
        ap = in_a_process("--ap", *common)
        ratio = ap["times"]["gsoftmax"]["quiet"] / ap["times"]["torchmetrics"]["quiet"]
        ap |= {"ratio": ratio, "at most": AP_BOUND, "verdict": verdict(ratio, AP_BOUND)}
        ours, theirs = (1e3 * ap["times"][name]["quiet"] for name in ("gsoftmax", "torchmetrics"))
        print(
            f"\nAverage precision of 40137 x 80: {ours:.0f} ms, torchmetrics {theirs:.0f} ms, "
            f"ratio {ratio:.2f}, at most {AP_BOUND}: {ap['verdict']} "
            f"(values differ by at most {ap['largest difference']:.0e})"
        )
    missed = [f"{r['size']} {r['contender']}" for r in rows if "MISSED" in r["time"] + r["memory"]]
    missed += [f"{r['road']} {r['size']}" for r in roads if "MISSED" in r["time"] + r["memory"]]
    missed += ["average precision"] if ap and "MISSED" in ap["verdict"] else []
    print("\nAll bounds kept." if not missed else f"\nMissed: {'; '.join(missed)}.")
    if not args.no_write:
        payload = {
            "where": where,
            "rows": rows,
            "roads": roads,
            "huge pages": huge,
            "average precision": ap,
            "missed": missed,
            "raw": raw,
        }
        print(f"Written to {write('bench-cpu', payload).name} under results/.")


if __name__ == "__main__":
    main()
