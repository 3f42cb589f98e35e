"""Fuzzing: readers and parsers raise only the documented errors, quickly and with little memory.

A good file is changed at random places (bytes flipped, cut, repeated, moved).  EXPLORE=20 tries twenty times as much,
and something else every time.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
import signal
import string
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gsoftmax import build, cli, compare, data, measures, recipes, reproduce, runs, schedules, train, workers
from gsoftmax.analyze import analyze
from gsoftmax.backbones.zoo import read_state_dict
from gsoftmax.compare import folder_name, split_heads
from gsoftmax.config import Config, parse_head, parse_value
from gsoftmax.data import cifar, coco, core, images, nuswide, smoke, tables
from gsoftmax.data.augment import Augment
from gsoftmax.models import load, saved_outputs
from gsoftmax.outputs import open_outputs
from gsoftmax.report import data as report_data

DOCUMENTED = (ValueError, OSError, workers.Failed)  # DataError is a ValueError


@pytest.fixture(autouse=True)
def soon_and_small():
    """Every test here ends, on a busy machine too, and takes less than a gigabyte more than the process had."""

    def late(*_: object) -> None:
        pytest.fail("no answer after 5 minutes")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    earlier = signal.signal(signal.SIGALRM, late)
    signal.alarm(300 * int(os.environ.get("EXPLORE") or 1))
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, earlier)
    unit = 1 if sys.platform == "darwin" else 1024
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit < 2**30


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def fuzz(count: int):
    return settings(
        max_examples=count * int(os.environ.get("EXPLORE") or 1), deadline=None, suppress_health_check=list(HealthCheck)
    )


CHANGE = st.tuples(
    st.sampled_from(["flip", "set", "cut", "drop", "repeat", "insert", "move", "digit"]),
    st.floats(0, 1, exclude_max=True),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 255),
)
CHANGES = st.lists(CHANGE, min_size=1, max_size=6)


def mutate(raw: bytes, changes: list[tuple[str, float, float, int]]) -> bytes:
    for what, first, second, value in changes:
        if not raw:
            break
        at, other = int(first * len(raw)), int(second * len(raw))
        low, high = sorted((at, other))
        if what == "flip":
            raw = raw[:at] + bytes([raw[at] ^ (1 << value % 8)]) + raw[at + 1 :]
        elif what == "set":
            raw = raw[:at] + bytes([value]) + raw[at + 1 :]
        elif what == "cut":
            raw = raw[:at]
        elif what == "drop":
            raw = raw[:low] + raw[min(high, low + 40) :]
        elif what == "repeat":
            raw = raw[:low] + raw[low : min(high, low + 300)] * (1 + value % 3) + raw[low:]
        elif what == "insert":
            raw = raw[:at] + bytes([value]) * (1 + value % 5) + raw[at:]
        elif what == "move":
            raw = raw[:at] + raw[other : other + 20] + raw[at:]
        else:  # another number where there is one, which is where headers lie
            place = next((i for i in range(at, len(raw)) if raw[i : i + 1].isdigit()), None)
            if place is not None:
                raw = raw[:place] + str(value * 10 ** (value % 12)).encode() + raw[place + 1 :]
    return raw


def documented(call: Callable[[], object]) -> None:
    try:
        call()
    except DOCUMENTED as error:
        first = str(error).splitlines()[0] if str(error) else ""
        assert first, "an error without a message"


# ------------------------------------------------------------------------------------------------------------ files


def outputs(kind: str) -> bytes:
    y = np.arange(40) % 3
    x = np.random.default_rng(0).normal(size=(40, 3)) + np.eye(3)[y]
    p = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    arrays = {"x": x, "y": y, "p": p, "mu": np.zeros(3), "sigma": np.ones(3), "lam": np.array(1.0)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        if kind == "csv":
            rows = np.column_stack([y, x])
            np.savetxt(path, rows, delimiter=",", header="y,a,b,c", comments="", fmt="%.3f")
        elif kind == "safetensors":
            from safetensors.numpy import save_file

            save_file(arrays, path, metadata={"names": json.dumps(["a", "b", "c"])})
        else:
            write = np.savez if kind == "npz" else np.savez_compressed
            with open(path, "wb") as file:
                write(file, **arrays, names=np.array(["a", "b", "c"]))
        return path.read_bytes()


@pytest.mark.parametrize("kind, count", [("npz", 150), ("compressed", 60), ("safetensors", 150), ("csv", 100)])
def test_files_of_outputs(kind, count, place):
    raw = outputs(kind)
    path = place / f"a.{'npz' if kind == 'compressed' else kind}"

    @fuzz(count)
    @given(CHANGES)
    def try_one(changes):
        path.write_bytes(mutate(raw, changes))
        documented(lambda: analyze(path))

    try_one()


@fuzz(60)
@given(text=st.text(alphabet=string.digits + "yabcxp:,;\t\n\"' .-eE", max_size=80))
def test_csv_of_any_text(text, place):
    path = place / "b.csv"
    path.write_text(text, encoding="utf-8")
    documented(lambda: list(open_outputs(path).blocks(7)))


def datasets(kind: str) -> tuple[bytes, Callable[[Path], object]]:
    """A good file, and how it is read."""
    with tempfile.TemporaryDirectory() as folder:
        if kind in ("npz", "npz images"):
            x = np.arange(48.0).reshape(12, 4) if kind == "npz" else np.zeros((12, 4, 4, 3), np.uint8)
            y = np.arange(12) % 3
            np.savez(Path(folder) / "x.npz", x_train=x, y_train=y, x_test=x, y_test=y, names=np.array(["a", "b", "c"]))
            return (Path(folder) / "x.npz").read_bytes(), lambda path: data.load(f"npz:{path}")
        if kind == "cifar":
            labels = [int(i) for i in range(3)]
            raw = smoke.python2_pickle({b"data": np.zeros((3, 3072), np.uint8), b"labels": labels})
            return raw, lambda path: cifar._rows(cifar.safe_unpickle(path.read_bytes()), "labels", 10, path)
        if kind == "pickle":
            content = {"labels": [1, 2], "data": np.zeros((2, 4), np.uint8), "names": ["a", "b"]}
            return pickle.dumps(content, 2), lambda path: cifar.safe_unpickle(path.read_bytes())
        if kind == "arff":
            data.write_smoke("arff", folder)
            raw = (Path(folder) / "arff" / "smoke-train.arff").read_bytes()[:1500].rpartition(b"\n")[0]
            return raw + b"\n", lambda path: data.load(f"arff:{path}?test=0.5")
        if kind == "xml":
            text = '<labels xmlns="http://x"><label name="a"><label name="b"/></label></labels>'
            return text.encode(), tables.xml_labels
        if kind == "coco":
            content = {
                "info": {"year": 2014},
                "images": [{"id": i, "file_name": f"{i}.jpg"} for i in range(4)],
                "annotations": [{"image_id": i, "category_id": 1 + i % 2, "bbox": [1.5, 2e3]} for i in range(4)],
                "categories": [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}],
            }
            return json.dumps(content).encode(), coco._read_instances
        if kind == "png" or kind == "jpeg":
            from PIL import Image

            pixels = np.random.default_rng(0).integers(0, 255, (12, 10, 3), np.uint8)
            Image.fromarray(pixels).save(Path(folder) / "x", format=kind)
            return (Path(folder) / "x").read_bytes(), lambda path: images.decode(path.read_bytes(), str(path))
        if kind == "weights":
            torch.save({"state_dict": {"a": torch.zeros(2, 3), "b": torch.ones(1)}}, Path(folder) / "x")
            return (Path(folder) / "x").read_bytes(), read_state_dict
    raise AssertionError(kind)


FAMILIES = {"npz": 120, "npz images": 60, "cifar": 80, "pickle": 200, "arff": 120, "xml": 100, "coco": 200, "png": 120,
            "jpeg": 100, "weights": 60}  # fmt: skip


@pytest.mark.parametrize("kind", FAMILIES)
def test_files_of_datasets(kind, place):
    raw, read = datasets(kind)
    path = place / f"{kind.replace(' ', '-')}.bin"
    documented(lambda: path.write_bytes(raw))
    read(path)  # the good file is good

    @fuzz(FAMILIES[kind])
    @given(CHANGES)
    def try_one(changes):
        path.write_bytes(mutate(raw, changes))
        documented(lambda: read(path))

    try_one()


@fuzz(80)
@given(st.lists(CHANGE, max_size=4), st.lists(CHANGE, max_size=4))
def test_lists_of_nuswide(place, first, second):
    names, rows = b"images/..a/b.jpg 2\nimages/./c.jpg 1\n" * 3, b"1 0 1\n0 1 0\n" * 3
    (place / "nus_wide_train_imglist.txt").write_bytes(mutate(names, first))
    (place / "nus_wide_train_label.txt").write_bytes(mutate(rows, second))

    def read() -> None:
        found, y = nuswide._read_clean(place, "train", ("sky", "sea", "cow"))
        assert len(found) == len(y) and not any(name.startswith("/") or ".." in name.split("/") for name in found)

    documented(read)


@fuzz(60)
@given(st.sampled_from(["ImageList/TrainImagelist.txt", "Groundtruth/TrainTestLabels/Labels_sea_Train.txt"]), CHANGES)
def test_official_lists_of_nuswide(place, name, changes):
    texts = {"ImageList/TrainImagelist.txt": b"sky\\1.jpg\n..sea\\2.jpg\n" * 3}
    texts |= {f"Groundtruth/TrainTestLabels/Labels_{concept}_Train.txt": b"1\n0\n" * 3 for concept in ("sky", "sea")}
    for file, text in texts.items():
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_bytes(mutate(text, changes) if file == name else text)

    def read() -> None:
        found, y = nuswide._read_official(place, "train", ("sky", "sea"))
        assert len(found) == len(y) and not any(part.startswith("/") or ".." in part.split("/") for part in found)

    documented(read)


@fuzz(60)
@given(st.sampled_from(["wnids.txt", "words.txt", "val/val_annotations.txt"]), CHANGES)
def test_lists_of_tiny_imagenet(place, name, changes):
    root = place / "tiny"
    if not root.exists():
        data.write_smoke("tiny-imagenet", root)
    file = root / "tiny-imagenet-200" / name
    good = file.read_bytes()
    try:
        file.write_bytes(mutate(good, changes))
        documented(lambda: data.load("tiny-imagenet", root))
    finally:
        file.write_bytes(good)


# ---------------------------------------------------------------------------------------------------- a run's own files

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@fuzz(150)
@given(CHANGES)
def test_rows_of_metrics(place, changes):
    rows = [{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": 0.25, "lr": 1e-3}, {"final": True, "error": 0.1}]
    raw = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (place / "metrics.jsonl").write_bytes(mutate(raw, changes))

    def read() -> None:
        assert all(isinstance(row, dict) for row in runs.read_rows(place))
        runs.read_result(place)

    documented(read)


@fuzz(150)
@given(CHANGES | st.dictionaries(st.sampled_from(sorted(Config.__dataclass_fields__)), JSON, max_size=3) | JSON)
def test_configurations_on_disk(place, changes):
    import dataclasses

    good = dataclasses.asdict(Config())
    if isinstance(changes, list) and changes and isinstance(changes[0], tuple):
        raw = mutate(json.dumps(good).encode(), changes)
    else:
        raw = json.dumps({**good, **changes} if isinstance(changes, dict) else changes).encode()
    (place / "config.json").write_bytes(raw)
    documented(lambda: runs.read_config(place))


@fuzz(100)
@given(CHANGES)
def test_summaries(place, changes):
    numbers = dict.fromkeys(("difference", "low", "high", "t", "p", "n"), 1.0)
    row = {"values": [1.0, 2.0], "mean": 1.5, "sd": 0.5, "paired": numbers}
    metrics = {m: {"softmax": row, "gsoftmax": row} for m in measures.SINGLE}
    good = {"heads": ["softmax", "gsoftmax"], "seeds": [0, 1], "multilabel": False, "metrics": metrics, "seconds": {}}
    path = place / "summary.json"
    path.write_text(json.dumps(good))
    found = report_data._read_summary(path)
    assert found.keys() == good.keys() and found["metrics"]["error"]["gsoftmax"]["paired"].items() > numbers.items()
    path.write_bytes(mutate(json.dumps(good).encode(), changes))
    documented(lambda: report_data.from_runs([place]))


# ------------------------------------------------------------------------------------------------ a damaged run folder

SMALL = Config(epochs=1, batch_size=512, train_fraction=0.5, threads=1, device="cpu")


@pytest.fixture(scope="session")
def comparison(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("comparison") / "all"
    compare.compare(SMALL, ["softmax", "gsoftmax"], 2, folder, jobs=1)
    return folder


def everything(folder: Path) -> dict[str, Callable[[], object]]:
    """All that a command would take from a comparison's folder, by what is done; no run of it is trained."""
    run = folder / "gsoftmax" / "seed-0"
    wanted = SMALL.override({"head": "gsoftmax"})

    def told(doc: dict) -> str:
        return json.dumps({k: v for k, v in doc.items() if k != "commands"}, sort_keys=True)

    def weights() -> list[float]:
        return [float(v.double().sum()) for v in load(run).state_dict().values()]

    return {
        "report": lambda: told(report_data.from_runs([run])),
        "report of the comparison": lambda: told(report_data.from_runs([folder], "all")),
        "analyze": lambda: analyze(run, name="x").metrics,
        "load": weights,
        "evaluate": lambda: {k: float(v.double().sum()) for k, v in saved_outputs(run).items()},
        "train --resume": lambda: train.train(wanted, run, resume=True),
        "compare": lambda: compare.compare(SMALL, ["softmax", "gsoftmax"], 2, folder, jobs=1)["metrics"],
        "reproduce": lambda: reproduce.read_seeds(recipes.find("wrn-cifar10-softmax"), run.parent)[0].result,
    }


RUN_FILES = ["config.json", "environment.json", "metrics.jsonl", "model.safetensors", "outputs.safetensors"]
DAMAGED = [f"gsoftmax/seed-0/{name}" for name in (*RUN_FILES, "SHA256SUMS")] + ["summary.json"]


@pytest.fixture(scope="session")
def undamaged(comparison) -> dict[str, object]:
    return {name: call() for name, call in everything(comparison).items()}


def refused_or_the_same(folder: Path, undamaged: dict[str, object], damage: str) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a finished run is trained again")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "prepare", never)
        for name, call in everything(folder).items():
            try:
                found = call()
            except DOCUMENTED as error:
                assert str(error) and "\n" not in str(error), (damage, name, error)
            else:
                assert found == undamaged[name], (damage, name)


@pytest.mark.parametrize("name", DAMAGED)
def test_a_flipped_bit_is_never_another_number(name, comparison, undamaged, tmp_path):
    """Everything that reads a finished run refuses it, or returns what it returned before."""
    folder = tmp_path / "all"
    shutil.copytree(comparison, folder)
    good = (folder / name).read_bytes()
    rng = random.Random(0)
    for _ in range(6 * int(os.environ.get("EXPLORE") or 1)):
        at, bit = rng.randrange(len(good)), rng.randrange(8)
        (folder / name).write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])
        refused_or_the_same(folder, undamaged, f"byte {at}, bit {bit}")
        shutil.copy(comparison / "summary.json", folder / "summary.json")


VALUES = ["", "[]", "5", "null", "{", "word", '"text"', "{}", "[" * 9999, '{"data": 5}', '{"data": []}', '{"heads": 5}']


@pytest.mark.parametrize("name", [n for n in DAMAGED if n.endswith((".json", ".jsonl"))])
@pytest.mark.parametrize("older", [False, True])
def test_other_json_in_a_run_folder_is_one_line(name, older, comparison, tmp_path):
    """Also where no checksums are: of an older version, or removed by whoever changed the file."""
    folder = tmp_path / "all"
    shutil.copytree(comparison, folder)
    if older:
        (folder / "gsoftmax/seed-0/SHA256SUMS").unlink()
    good = (folder / name).read_text()
    values = [
        *VALUES,
        good[: len(good) // 2],
        good.replace(":", ": [", 1),
        good.replace('"classes": [', '"classes": [5,'),
    ]
    for value in values:
        for call in everything(folder).values():
            (folder / name).write_text(value)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(build, "prepare", Mock(side_effect=OSError("training begins again")))
                documented(call)
        shutil.copy(comparison / "summary.json", folder / "summary.json")


@fuzz(40)
@given(
    st.recursive(
        JSON,
        lambda inner: st.dictionaries(
            st.sampled_from(["data", "classes", "name", "fingerprints", "command", "torchrun", "processes"]),
            inner,
            max_size=4,
        ),
    )
)
def test_environments(comparison, value):
    path = comparison / "gsoftmax/seed-0/environment.json"
    good, sums = path.read_bytes(), path.with_name("SHA256SUMS").read_bytes()
    try:
        path.with_name("SHA256SUMS").unlink()
        path.write_text(json.dumps(value))
        for name, call in everything(comparison).items():
            if name != "compare":
                documented(call)
    finally:
        path.write_bytes(good)
        path.with_name("SHA256SUMS").write_bytes(sums)


# ------------------------------------------------------------------------------------------------------------- words

KEYS = st.sampled_from(sorted(Config.__dataclass_fields__)) | st.text(max_size=12)
DOTTED = st.builds(lambda a, b: a if b is None else f"{a}.{b}", KEYS, st.none() | st.text(max_size=6))


@fuzz(400)
@given(st.dictionaries(DOTTED, JSON, max_size=4))
def test_changes_of_a_configuration(changes):
    def override() -> None:
        config = Config().override(changes)
        assert Config(**json.loads(json.dumps(config.__dict__))) == config  # what is accepted survives the disk

    documented(override)


@fuzz(300)
@given(st.text(max_size=40))
@example("[" * 100_000)
@example("9" * 5000)
@example('{"a":' * 50_000)
def test_values_of_a_command_line(text):
    parse_value(text)  # anything is a value


@fuzz(300)
@given(
    st.text(alphabet=string.ascii_letters + string.digits + "():=,.[]{}\"' -_\n\0é", max_size=30) | st.text(max_size=20)
)
@example("gsoftmax(" + "(" * 50_000)
@example("a" * 100_000)
def test_heads_as_written(text):
    def read() -> None:
        for head in split_heads(text):
            name, options = parse_head(head)
            assert isinstance(name, str) and all(key.isidentifier() for key in options)
            assert "/" not in folder_name(head) and "\0" not in folder_name(head)

    documented(read)


@fuzz(200)
@given(
    st.text(max_size=30)
    | st.from_regex(r"(folder|npz|arff|mosaic\(digits\)|digits|coco)[:?]?[a-z=&0-9x.]{0,12}", fullmatch=True)
)
def test_names_of_datasets(text):
    documented(lambda: data.parse(text))
    if "mosaic" not in text:  # which may be valid and large
        documented(lambda: data.load(text, "nowhere"))


@fuzz(200)
@given(st.text(max_size=20) | st.from_regex(r"[a-z-]{0,8}(,[a-z]{2,8}=[0-9a-z.-]{0,5}){0,3}", fullmatch=True))
def test_augmentations_as_written(text):
    documented(lambda: Augment.parse(text))


NUMBERS = st.integers(-5, 10**6) | st.floats() | st.sampled_from([0, 1, 7, 1e308, float("nan"), float("inf")])


@fuzz(300)
@given(
    st.sampled_from(["linspace", "logspace", "staircase", "malleable"]),
    st.lists(NUMBERS, min_size=3, max_size=9),
    st.integers(1, 10**7),
)
def test_schedules(name, numbers, epoch):
    a, b, c, *rest = numbers
    try:
        if name == "staircase":
            schedule = schedules.staircase({a: b, c: 0.5})
        elif name == "malleable":
            pieces = [tuple(numbers[i : i + 3]) for i in range(0, len(numbers) - 2, 3)]
            schedule = schedules.malleable(pieces, base=abs(b) or 2.0, literal=bool(len(rest) % 2))
        else:
            schedule = getattr(schedules, name)(a, b, c)
    except (ValueError, TypeError):
        return
    value = schedule(epoch)
    assert np.isfinite(value) and (name == "linspace" or value >= 0)


@fuzz(150)
@given(CHANGES)
def test_recipes(changes):
    raw = (Path(recipes.__file__).parent / "table1.yaml").read_bytes()[:1500].rpartition(b"\n")[0]
    text = mutate(raw, changes).decode("utf-8", "replace")

    def read() -> None:
        for recipe in recipes.parse({"mine.yaml": text}).values():
            recipe.config()
            recipe.config(smoke=True)

    documented(read)


@fuzz(150)
@given(st.text(max_size=60))
def test_recipes_of_any_text(text):
    documented(lambda: recipes.parse({"mine.yaml": text}))


WORDS = st.sampled_from(
    [
        "evaluate", "analyze", "report", "datasets", "recipes", "heads", "--debug", "--out", "--tables", "--figures",
        "--class", "--against", "--paper", "--data", "--seeds", "--jobs", "--heads", "--row", "md", "svg", "nosuch",
        "a.npz", "epochs=0", "x=", "=", "-", "--", "-h", "--help", "--version", "reproduce", "table9", "--smoke=1",
    ]
)  # fmt: skip


@fuzz(150)
@given(st.lists(WORDS | st.text(max_size=8), max_size=5))
def test_command_lines(place, words):
    import contextlib
    import io

    folder = place / "cli"
    folder.mkdir(exist_ok=True)
    out, err, here = io.StringIO(), io.StringIO(), os.getcwd()
    if words[:1] in (["train"], ["compare"]):
        return
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = cli.main([w for w in words if w != "--debug"])
    except SystemExit as end:
        status = end.code
    finally:
        os.chdir(here)
    assert status in (0, 2) and "Traceback" not in err.getvalue()
    assert status == 0 or err.getvalue().count("\n") == 1, err.getvalue()
    assert list(folder.iterdir()) == []


def test_mutation_changes_files():
    """Mutations are effective: most change the file, and many make it invalid."""
    raw = outputs("npz")
    rng = np.random.default_rng(0)
    kinds = ["flip", "set", "cut", "drop", "repeat", "insert", "move", "digit"]
    made = [mutate(raw, [(k, *rng.random(2), int(rng.integers(256)))]) for k in kinds for _ in range(20)]
    assert sum(m != raw for m in made) > 130
    assert core.MAX_BYTES == 16 * 2**30


# ------------------------------------------------------------------------------------------------------------- load

SOAK = """
import json, sys
import torch
from gsoftmax import build, train
from gsoftmax.config import Config

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

# 1,280 rows in batches of 64 are 20 steps an epoch
config = Config(
    epochs=250, batch_size=64, train_fraction=1290 / 1297, head="gsoftmax",
    head_options={"lam": 1.0, "gaussians": sys.argv[1]}, threads=1, ema=0.99, evaluate_every=20, checkpoint_every=5,
)
seen = []
network_loss = build.Network.forward

def counted(self, *args, **kwargs):
    result = network_loss(self, *args, **kwargs)
    if torch.is_grad_enabled() and self.training:
        counted.steps += 1
        if counted.steps % 100 == 0:
            seen.append((counted.steps, resident()))
    return result

counted.steps = 0
build.Network.forward = counted
train.train(config, sys.argv[2])
print(json.dumps(seen))
"""


@pytest.mark.slow
@pytest.mark.parametrize("gaussians", ["learned", "tracked"])
def test_memory_is_flat_over_five_thousand_steps(gaussians, tmp_path):
    """Resident memory after step 500 and at step 5,000 of a real run: checkpoints, evaluation, averaged weights."""
    if not os.path.exists("/proc/self/statm"):
        pytest.skip("resident memory is read from /proc")
    signal.alarm(0)
    done = subprocess.run(
        [sys.executable, "-c", SOAK, gaussians, str(tmp_path / "run")], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    seen = dict(json.loads(done.stdout.splitlines()[-1]))
    assert max(seen) == 5000
    early, late = seen[500], seen[5000]
    print(f"{gaussians}: {early / 2**20:.1f} MB after step 500, {late / 2**20:.1f} MB after step 5,000")
    assert late - early < 0.02 * early, seen  # less is the kernel taking pages back
