"""Pages about speed and scale say what was measured: bytes, tables and plots follow from the files in results/."""

from __future__ import annotations

import json

import pytest

from benchmarks import plot, scaling
from evidence.figures import content

ROWS = json.loads(scaling.RESULTS.read_text("utf-8"))["rows"]


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r['processes']}-{r['classes']}")
def test_the_formula_gives_the_counted_bytes(row):
    k = row["processes"]
    assert scaling.sent_by_shards(k, row["rows"] // k, row["features"], 4) == row["shards sent bytes"]


def test_the_page_shows_what_was_measured():
    page = (scaling.ROOT / "docs" / "scale-out.md").read_text("utf-8")
    for row in ROWS:
        line = next(r for r in page.splitlines() if r.startswith(f"| {row['processes']} | {row['classes']:,} |"))
        assert f"| {row['shards ms']:.0f} ms | {row['copies ms']:.0f} ms |" in line


def test_the_model_grows_with_what_it_should(tmp_path):
    machine = scaling.Machine()
    for k in (1, 2, 8, 64, 1024):
        assert scaling.step_of_shards(k, 1e7, 128, 512, machine) > scaling.step_of_shards(k, 1e6, 128, 512, machine)
    # one process computes both in the same way
    assert scaling.step_of_shards(1, 1e6, 128, 512, machine) == scaling.step_of_copies(1, 1e6, 128, 512, machine)
    assert scaling.step_of_copies(8, 1e8, 128, 512, machine) == float("inf")  # 614 GB do not fit
    assert scaling.step_of_shards(8, 1e8, 128, 512, machine) == pytest.approx(0.15, rel=0.1)
    measured = json.loads((scaling.RESULTS.parent / "bench-gpu.json").read_text("utf-8"))
    row = next(r for r in measured["rows"] if (r["claim"], r["size"]) == ("linear", "4,096 x 512 x 1,000,000"))
    assert machine.operations == pytest.approx(6 * 4096 * 512 * 1e6 / (row["ours ms"] / 1e3), rel=0.01)
    assert machine.memory == pytest.approx(measured["copy bytes per second"], rel=0.01)
    scaling.plot(tmp_path / "plot.svg")
    words = [content(path.read_text("utf-8")) for path in (tmp_path / "plot.svg", scaling.PLOT)]
    assert words[0] == words[1] and "100,000,000 classes" in words[0], "python -m benchmarks.scaling --plot"


def test_the_readme_shows_what_was_measured(tmp_path):
    readme = (scaling.ROOT / "README.md").read_text("utf-8")
    table = readme[readme.index("## What it costs") : readme.index("## Attach to an existing model")]
    for _, size, ratio in plot.bars():
        assert f"{ratio:.2f}" in table, size
    cpu = json.loads((scaling.ROOT / "results" / "bench-cpu.json").read_text("utf-8"))
    gpu = json.loads((scaling.ROOT / "results" / "bench-gpu-roads.json").read_text("utf-8"))
    roads = [row for row in gpu["rows"] if "memory" not in row["claim"]]
    for row in cpu["roads"] + roads + [row for row in cpu["huge pages"] if row["contender"] == "ours, native"]:
        assert f"{row['ratio']:.2f}" in table, row
    plot.plot(tmp_path / "plot.svg")
    words = [content(path.read_text("utf-8")) for path in (tmp_path / "plot.svg", plot.PLOT)]
    assert words[0] == words[1] and "0.83" in words[0], "python -m benchmarks.plot"
