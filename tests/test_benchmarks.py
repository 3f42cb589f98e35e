"""What the benchmarks run and say, at sizes that take no time; what they measure is under results/."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.overrides import TorchFunctionMode

from benchmarks import cpu, gpu
from benchmarks.common import Timing


class OnCPU(TorchFunctionMode):
    """Makes on the CPU what is asked for on a GPU."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = dict(options or {})
        if options.get("device") == "cuda":
            options["device"] = "cpu"
        return function(*arguments, **options)


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every contender runs once, and the n-th takes n milliseconds and n GiB."""

    def once(contenders: dict[str, Callable[[], object]], **_: object) -> dict[str, Timing]:
        for run in contenders.values():
            run()
        return {name: Timing(i / 1e3, i / 1e3, i / 1e3, 1) for i, name in enumerate(contenders, 1)}

    monkeypatch.setattr(gpu, "interleaved", once)
    monkeypatch.setattr(gpu, "peak", lambda run: 1.0)
    monkeypatch.setattr(gpu, "clean", lambda: None)
    monkeypatch.setattr(gpu, "working", lambda contenders: contenders)
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)


@pytest.mark.parametrize("which", gpu.ROADS, ids=lambda which: f"{which[0]} {which[2]}")
def test_roads_of_a_gpu(without_a_gpu: None, monkeypatch: pytest.MonkeyPatch, which) -> None:
    """Every road runs with and without the term, and its bounds and verdicts are in its rows."""
    road, _, _, bound, memory_bound = which
    monkeypatch.setattr(gpu, "FEATURES", 4)
    with OnCPU():
        rows = list(gpu.bench_road(None, True, road, 6, 5, bound, memory_bound))
    assert [row["claim"] for row in rows] == [road, f"{road}, memory"][: 2 if memory_bound else 1]
    assert [row["bound"] for row in rows] == [v for v in (bound, memory_bound) if v]
    peer = list(rows[0]["details"]).index(gpu.PEERS[road]) + 1
    assert rows[0]["ratio"] == pytest.approx(1 / peer) and {row["verdict"] for row in rows} == {"PASS"}


def test_linear_layers_of_a_gpu(without_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LINEARS", [(6, 4, 5, 1.1, 2.0, 0.2)])
    with OnCPU():
        rows = list(gpu.bench_linears(None, True))
    assert [(row["claim"], row["bound"], row["verdict"]) for row in rows] == [
        ("linear", 1.1, "PASS"),
        ("linear, extra GiB", 2.0, "PASS"),
        ("linear, over the products", 0.2, "MISSED (at most 0.2)"),
    ]


def test_every_bound_of_a_cpu_is_shown() -> None:
    for (name, n, c), (most, memory) in cpu.ROADS.items():
        times = {who: {"quiet": t, "median": t} for who, t in (("ours", 2.0), ("plain", 1.0))}
        row = cpu.road_line(name, n, c, times, {"ours": 3.0, "plain": 1.0})
        assert (row["ratio"], row["at most"], row["memory at most"]) == (2.0, most, memory)
        assert row["time"] == ("PASS" if most >= 2 else f"MISSED (at most {most:g})")
        assert row["memory"] == f"MISSED (at most {memory:g})"
        assert cpu.road_line(name, n, c, times, {"ours": None, "plain": None})["memory"] == "not measured"
