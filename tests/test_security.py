"""Nothing that is read can run code, leave its folder or take memory it has no bytes for; names stay text on the page.

The pickles, archives and images of datasets are in test_data_safety.py; here are checkpoints, weights, outputs,
recipes, heads, the page and the tables, and a look at the source itself.
"""

from __future__ import annotations

import ast
import csv
import functools
import hashlib
import io
import json
import os
import pickle
import re
import resource
import shlex
import shutil
import struct
import sys
import tarfile
import time
import tracemalloc
import warnings
import zipfile
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file

import gsoftmax
from gsoftmax import backbones, cli, data, files, heads, recipes, report, tables, train
from gsoftmax.analyze import analyze
from gsoftmax.config import Config
from gsoftmax.data import cifar
from gsoftmax.measures import SINGLE
from gsoftmax.outputs import open_outputs
from gsoftmax.report import page
from tests.writers import write_cifar_archive

SOURCE = Path(gsoftmax.__file__).parent


class Runs:
    """Pickles to a call of `function(*arguments)`."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


class Module(torch.nn.Module):
    """A module with the payload in its state: what torch.save of a whole model looks like."""

    def __init__(self, payload):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.payload = payload


@pytest.fixture
def marker(tmp_path):
    """A file that only a payload would write; it must not be there when the test ends."""
    path = tmp_path / "marker"
    yield path
    assert not path.exists()


def payloads(marker: Path) -> dict[str, object]:
    touch, command = f"open({str(marker)!r}, 'w').close()", f"touch {shlex.quote(str(marker))}"
    return {
        "system": Runs(os.system, command),
        "exec": Runs(exec, touch),
        "eval": Runs(eval, touch),
        "mkdir": Runs(os.mkdir, str(marker)),
        "nested": {"a": [{"b": (Runs(os.system, command),)}]},
        "beside tensors": {"network": {"weight": torch.zeros(3)}, "epoch": 1, "x": Runs(os.system, command)},
        "in a key": {("x", 1): torch.zeros(1), "y": Runs(os.system, command)},
        "in a module": Module(Runs(os.system, command)),
    }


KINDS = list(payloads(Path("x")))


def write_checkpoint(path: Path, payload: object, how: str) -> None:
    """As torch writes it (a zip), as torch wrote it before 1.6, or a bare pickle."""
    if how == "pickle":
        path.write_bytes(pickle.dumps(payload, protocol=2))
    else:
        torch.save(payload, path, _use_new_zipfile_serialization=how == "zip")


def test_the_payloads_run_in_an_unrestricted_unpickler(tmp_path):
    for kind, payload in payloads(tmp_path / "proof").items():
        write_checkpoint(tmp_path / "x.pt", payload, "zip")
        torch.load(tmp_path / "x.pt", weights_only=False)
        proof = tmp_path / "proof"
        assert proof.exists(), kind
        proof.rmdir() if proof.is_dir() else proof.unlink()


# ------------------------------------------------------------------------------------------- checkpoints and weights


@pytest.mark.parametrize("how", ["zip", "old", "pickle"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_would_run_code(kind, how, tmp_path, marker):
    for suffix in (".pt", ".pth", ".bin", ""):
        path = tmp_path / f"weights{suffix}"
        write_checkpoint(path, payloads(marker)[kind], how)
        with pytest.raises(ValueError, match="can't be read as a file of tensors|holds no state dict") as caught:
            backbones.create("cnn", input_shape=(1, 8, 8), weights=path)
        assert "\n" not in str(caught.value) and not marker.exists()


def test_weights_that_are_not_what_their_name_says(tmp_path, marker):
    path = tmp_path / "weights.safetensors"
    write_checkpoint(path, payloads(marker)["system"], "zip")
    with pytest.raises(ValueError, match="can't be read as a file of tensors"):
        backbones.create("cnn", input_shape=(1, 8, 8), weights=path)
    (tmp_path / "tensors").write_bytes(b"\x80\x02ctorch._utils\n_rebuild_tensor\n.")
    with pytest.raises(ValueError, match="can't be read as a file of tensors|holds no state dict"):
        backbones.create("cnn", input_shape=(1, 8, 8), weights=tmp_path / "tensors")


@pytest.fixture(scope="session")
def half_a_run(tmp_path_factory) -> Path:
    """A run of two epochs, stopped before its end."""
    folder = tmp_path_factory.mktemp("half") / "run"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(train.Run, "finish", Mock(side_effect=InterruptedError))
        train.train(Config(epochs=2, batch_size=512, train_fraction=0.5, threads=1), folder)
    assert len(list((folder / "checkpoint").iterdir())) == 2
    return folder


def resume_from(half_a_run: Path, run: Path, replace, capsys) -> str:
    """What `train --resume` says after `replace(path)` rewrote each checkpoint, whose name gets the right sum."""
    shutil.copytree(half_a_run, run)
    found = list((run / "checkpoint").iterdir())
    assert found
    for path in found:
        replace(path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:32]
        path.rename(path.with_name(re.sub(r"-[0-9a-f]{32}\.pt$", f"-{digest}.pt", path.name)))
    words = ["epochs=2", "batch_size=512", "train_fraction=0.5", "threads=1", "--resume", "--out", str(run)]
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        status = cli.main(["train", "digits", *words])
    err = capsys.readouterr().err
    assert status in (0, 2) and "Traceback" not in err, err  # restarted with a warning, or rejected
    return err


@pytest.mark.parametrize("how", ["zip", "old", "pickle"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_that_would_run_code(kind, how, half_a_run, tmp_path, marker, capsys):
    def replace(path):
        write_checkpoint(path, payloads(marker)[kind], how)

    assert "checkpoint" in resume_from(half_a_run, tmp_path / "run", replace, capsys) and not marker.exists()


@pytest.mark.parametrize("part", ["epoch", "network", "optimizer", "steps"])
@pytest.mark.parametrize("value", [None, 5, "x", [], {}, {"x": torch.zeros(1)}], ids=str)
def test_a_checkpoint_with_another_content(part, value, half_a_run, tmp_path, capsys):
    def replace(path):
        torch.save(torch.load(path, weights_only=True) | {part: value}, path)

    err = resume_from(half_a_run, tmp_path / "run", replace, capsys)
    assert "checkpoint" in err or value == 5, err  # a number in place of a number is believed


# -------------------------------------------------------------------------------------------------------------- models


@pytest.fixture(scope="session")
def model_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "run"
    config = Config(epochs=1, batch_size=512, train_fraction=0.5, threads=1, device="cpu", head="gsoftmax")
    train.train(config, folder)
    return folder / "model.safetensors"


def forged_model(path: Path, model: Path, changes: dict, tensors: dict | None = None) -> Path:
    """The model's file with other entries in its metadata, as `config.head` or `data.kind`, and other tensors."""
    with safe_open(model, "pt") as file:
        about = json.loads(file.metadata()["gsoftmax"])
        held = {k: file.get_tensor(k) for k in file.keys()} | (tensors or {})  # noqa: SIM118
    for key, value in changes.items():
        *where, last = key.split(".")
        inner = functools.reduce(dict.__getitem__, where, about)
        inner[last] = value
    save_file({k: v for k, v in held.items() if v is not None}, path, {"gsoftmax": json.dumps(about)})
    return path


def refused_model(path: Path, seconds: float = 10) -> str:
    """The message of `load`; it comes soon, and little memory is needed for it."""
    start = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError) as caught:
            gsoftmax.load(path)
        assert tracemalloc.get_traced_memory()[1] < 2**27 and time.monotonic() - start < seconds
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value) and str(caught.value).startswith(str(path))
    return str(caught.value)


def test_a_model_cannot_name_code(model_file, tmp_path, monkeypatch, marker):
    (tmp_path / "harmful_head.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    path = forged_model(tmp_path / "m.safetensors", model_file, {"config.head": "harmful_head:Head"})
    words = "its head is code of its own, which a file must not name: pass head=Head, or --head harmful_head:Head"
    assert words in refused_model(path) and not marker.exists() and "harmful_head" not in sys.modules
    for head in ("os:system", "gsoftmx", "", "harmful_head"):
        refused_model(forged_model(path, model_file, {"config.head": head}))
        assert not marker.exists()


@pytest.mark.parametrize(
    "backbone", ["timm:hf-hub:a/b", "hf-hub:a/b", "timm:local-dir:.", "timm:../x", "torchvision:os.system", "x" * 10**5]
)
def test_a_model_cannot_name_downloads(backbone, model_file, tmp_path):
    refused_model(forged_model(tmp_path / "m.safetensors", model_file, {"config.backbone": backbone}))


OPTIONS = {"checkpoint_path": "x.pth", "pretrained_cfg": {"url": "http://x"}, "pretrained_cfg_overlay": {"file": "x"}}
OPTIONS |= {"cache_dir": "/", "weights_backbone": "DEFAULT", "pretrained": True, "weights": "x.pth", "device": "cpu"}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_a_model_name_no_files(option, model_file, tmp_path):
    changes = {"config.backbone": "timm:resnet18", "config.backbone_options": {option: OPTIONS[option]}}
    words = f"option '{option}' is not accepted from a file: it names files, downloads or devices"
    assert words in refused_model(forged_model(tmp_path / "m.safetensors", model_file, changes))
    head = {"config.head_options": {"device": "cpu"}}
    assert "option 'device'" in refused_model(forged_model(tmp_path / "m.safetensors", model_file, head))


def test_a_model_starts_from_no_other_weights(model_file, tmp_path, marker):
    """Its configuration may say that training did; nothing is fetched or opened again."""
    write_checkpoint(tmp_path / "w.pt", payloads(marker)["system"], "zip")
    changes = {"config.weights": str(tmp_path / "w.pt"), "config.pretrained": True, "config.workers": 10**9}
    model = gsoftmax.load(forged_model(tmp_path / "m.safetensors", model_file, changes))
    assert model.config.workers is None and not marker.exists()


HUGE = {
    "wrn-1000000000-1": {}, "wrn-10-1000000000000": {}, "wrn-40-14": {}, "densenet-1000000000-12": {},
    "densenet-bc-100-1000000000": {}, "wrn-" + "9" * 5000 + "-1": {}, "resnet9": {"convs": 10**6}, "vgg16": {},
    "cnn": {"features": 10**15}, "mlp": {"hidden": [10**5] * 9}, "timm:vit_tiny_patch16_224": {"depth": 10**5},
    "timm:resnet18": {"layers": [10**5, 1, 1, 1]}, "timm:vit_small_patch16_224": {"depth": 10**9},
    "torchvision:regnet_y_128gf": {}, "timm:vit_giant_patch14_224": {}, "timm:resnet34": {"layers": [[[10**300]]]},
}  # fmt: skip


@pytest.mark.parametrize("backbone", HUGE, ids=lambda name: name[:30])
def test_a_model_takes_no_memory_that_its_file_does_not_have(backbone, model_file, tmp_path):
    side = {"timm:vit_giant_patch14_224": 224, "resnet9": 32}.get(backbone, 32)
    changes = {"config.backbone": backbone, "config.backbone_options": HUGE[backbone]}
    changes |= {"data.input_shape": [3, side, side], "data.mean": [0.0] * 3, "data.std": [1.0] * 3}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused_model(forged_model(tmp_path / "m.safetensors", model_file, changes), 30)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2**19  # kilobytes; the imports of timm and torchvision are most of it


DESCRIPTIONS = [
    {"format": 2}, {"format": "1"}, {"format": None}, {"config": None}, {"config": {"nosuch": 1}}, {"config": []},
    {"data": {}}, {"data": 5}, {"data.kind": "pickle"}, {"data.kind": []}, {"data.classes": []}, {"data.classes": "ab"},
    {"data.classes": [1, 2]}, {"data.classes": ["a"]}, {"data.classes": ["a"] * 10**6}, {"data.multilabel": 1},
    {"data.multilabel": True}, {"data.input_shape": [1, 8]}, {"data.input_shape": [1, 8, 10**9]},
    {"data.input_shape": [1, 0, 8]}, {"data.input_shape": [1, 8.0, 8]}, {"data.input_shape": [True, 8, 8]},
    {"data.mean": []}, {"data.mean": [0.0, 0.0]}, {"data.mean": ["0"]}, {"data.mean": [float("nan")]},
    {"data.std": [0.0]}, {"data.std": [-1.0]}, {"data.std": [[1.0]]}, {"config.head_options": {"lam": "x"}},
    {"config.head_options": {"form": "paired"}}, {"config.head_options": {"nosuch": 1}},
    {"config.head_options": {"mu": [0.0] * 10**5}}, {"config.backbone_options": {"nosuch": 1}}, {"config.epochs": -1},
    {"config.backbone_options": {"widths": [8] * 10**5}}, {"config.feature_scale": "x"}, {"config.head": "lsoftmax"},
]  # fmt: skip


@pytest.mark.parametrize("changes", DESCRIPTIONS, ids=lambda changes: str(changes)[:60])
def test_a_model_with_another_description(changes, model_file, tmp_path):
    refused_model(forged_model(tmp_path / "m.safetensors", model_file, changes))


@pytest.mark.parametrize("text", ["", "no JSON", "[" * 10**5, '{"a":' * 10**5, "5", "[]", "{}", '{"format": 1}', "NaN"])
def test_metadata_that_is_no_description(text, model_file, tmp_path):
    tensors = load_file(model_file)
    save_file(tensors, tmp_path / "m.safetensors", {"gsoftmax": text})
    assert "metadata" in refused_model(tmp_path / "m.safetensors")
    save_file(tensors, tmp_path / "m.safetensors")
    assert "its metadata does not describe a model of gsoftmax" in refused_model(tmp_path / "m.safetensors")


def test_options_nested_almost_too_deeply(model_file, tmp_path):
    nested_list = functools.reduce(lambda inner, _: [inner], range(400), 5)
    changes = {"config.backbone_options": {"widths": nested_list}}
    refused_model(forged_model(tmp_path / "m.safetensors", model_file, changes))


@pytest.mark.parametrize(
    "tensors, words",
    [
        ({"head.weight": None}, "1 of 22 tensors missing (first head.weight)"),
        ({"more": torch.zeros(2)}, "1 unknown (first 'more')"),
        ({"head.weight": torch.zeros(10, 63)}, "first head.weight: (10, 63) in the file, (10, 64) in the network"),
        ({"head.weight": torch.zeros(10, 64).half()}, "head.weight must be torch.float32, got torch.float16"),
        ({"head.weight": torch.zeros(10, 64, dtype=torch.int32)}, "must be torch.float32, got torch.int32"),
    ],
)
def test_a_model_with_other_tensors(tensors, words, model_file, tmp_path):
    found = refused_model(forged_model(tmp_path / "m.safetensors", model_file, {}, tensors))
    assert "its tensors do not fit its configuration" in found and words in found


def test_files_that_are_no_models(model_file, tmp_path, marker):
    path, content = tmp_path / "m.safetensors", model_file.read_bytes()
    for size in (0, 1, 7, 8, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        refused_model(path)
    for head in LYING_HEADERS:
        path.write_bytes(struct.pack("<Q", len(json.dumps(head))) + json.dumps(head).encode() + bytes(64))
        refused_model(path)
    for kind in KINDS:
        write_checkpoint(path, payloads(marker)[kind], "zip")
        assert "cannot be loaded" in refused_model(path) and not marker.exists()
    path.write_bytes((model_file.parent / "outputs.safetensors").read_bytes())
    assert "does not describe a model" in refused_model(path)


# ----------------------------------------------------------------------------------------------------- files of outputs


def forged(
    path: Path, members: dict[str, tuple[str, tuple[int, ...], bytes]], kind: int = zipfile.ZIP_DEFLATED
) -> None:
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, (dtype, shape, body) in members.items():
            stream = io.BytesIO()
            np.lib.format.write_array_header_1_0(stream, {"descr": dtype, "fortran_order": False, "shape": shape})
            archive.writestr(f"{name}.npy", stream.getvalue() + body)


def refused_cheaply(path: Path, limit: int = 2**25) -> str:
    """The error message; raising it must not need much memory."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError) as caught:
            analyze(path)
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("key", ["x", "y", "p", "names", "mu", "lam"])
def test_outputs_with_pickled_objects(key, tmp_path, marker):
    arrays = {"x": np.zeros((4, 2)), "y": np.zeros(4, int)}
    arrays[key] = np.array([payloads(marker)["system"]], dtype=object)
    np.savez(tmp_path / "a.npz", **arrays)
    assert "pickled Python objects" in refused_cheaply(tmp_path / "a.npz")


@pytest.mark.parametrize("rows", [10**7, 10**12, 2**62, 2**70])
def test_outputs_that_declare_more_than_they_hold(rows, tmp_path):
    for key in ("x", "y", "p", "mu", "names"):
        good = {"x": ("<f8", (4, 2), bytes(64)), "y": ("<i8", (4,), bytes(32))}
        shapes = {"x": (rows, 2), "y": (rows,), "p": (rows, 2), "mu": (rows,), "names": (rows,)}
        forged(tmp_path / "a.npz", good | {key: ("<f8" if key != "names" else "<U9", shapes[key], b"")})
        refused_cheaply(tmp_path / "a.npz")
    forged(tmp_path / "a.npz", {"x": ("<f8", (rows, 2), b""), "y": ("<i8", (rows,), b"")})
    assert "x in a.npz cannot be read: it declares" in refused_cheaply(tmp_path / "a.npz")


def test_an_archive_that_unpacks_to_far_more(tmp_path):
    zeros = bytes(2**25)
    forged(tmp_path / "a.npz", {"x": ("<f8", (2**40, 2), zeros), "y": ("<i8", (2**40,), zeros)})
    assert (tmp_path / "a.npz").stat().st_size < 2**18
    refused_cheaply(tmp_path / "a.npz", 2**28)
    forged(
        tmp_path / "b.npz",
        {"x": ("<f8", (4, 2), bytes(64)), "y": ("<i8", (4,), bytes(32)), "names": ("<U16777216", (2,), zeros)},
    )
    refused_cheaply(tmp_path / "b.npz", 2**29)


@pytest.mark.parametrize(
    "head",
    [
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (-4, 2), }",
        b"{'descr': '|O', 'fortran_order': False, 'shape': (4, 2), }",
        b"{'descr': __import__('os').system('true'), 'fortran_order': False, 'shape': (4, 2), }",
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (4, 2), 'x': 1}",
        b"{'descr': [('a', '<f8')] * 10, 'fortran_order': False, 'shape': (4, 2), }",
        b"{'descr': '<f8', 'fortran_order': False, 'shape': ('4', 2), }",
        b"{'descr': '<f8', 'fortran_order': 5, 'shape': (4, 2), }",
        b"(" * 200 + b")" * 200,
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (4, 2",
        b"{'descr': '<V99999999999', 'fortran_order': False, 'shape': (4, 2), }",
        b"\xff" * 60,
        b"",
    ],
)
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0), (9, 9)])
def test_forged_headers(head, version, tmp_path):
    size = struct.pack("<H" if version == (1, 0) else "<I", len(head) + 1)
    raw = b"\x93NUMPY" + bytes(version) + size + head + b"\n" + bytes(64)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", raw)
        archive.writestr("y.npy", raw)
    refused_cheaply(tmp_path / "a.npz")
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        archive.writestr("x_train.npy", raw)
    with pytest.raises(data.DataError) as caught:
        data.load(f"npz:{tmp_path / 'b.npz'}")
    assert "\n" not in str(caught.value)


def test_members_of_an_archive_are_never_written(tmp_path):
    folder = tmp_path / "inside"
    folder.mkdir()
    with zipfile.ZipFile(folder / "a.npz", "w") as archive:
        for name in ("../x.npy", "/tmp/y.npy", "..\\y.npy", "x.npy", "x.npy"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the name twice
                archive.writestr(name, b"\x93NUMPY nonsense")
    before = sorted(tmp_path.rglob("*"))
    refused_cheaply(folder / "a.npz")
    assert sorted(tmp_path.rglob("*")) == before


LYING_HEADERS = [
    {"x": {"dtype": "F64", "shape": [4, 2], "data_offsets": [0, 2**62]}},
    {"x": {"dtype": "F64", "shape": [2**40, 2**40], "data_offsets": [0, 64]}},
    {"x": {"dtype": "F64", "shape": [4, 2], "data_offsets": [64, 0]}},
    {"x": {"dtype": "F64", "shape": [4, 2], "data_offsets": [-64, 0]}},
    {"x": {"dtype": "F64", "shape": [-4, -2], "data_offsets": [0, 64]}},
    {"x": {"dtype": "F64", "shape": [4, 2], "data_offsets": [0, 64]},
     "y": {"dtype": "I64", "shape": [4], "data_offsets": [32, 64]}},
    {"x": {"dtype": "O", "shape": [4, 2], "data_offsets": [0, 64]}},
    {"x": {"dtype": "F64", "shape": "4,2", "data_offsets": [0, 64]}},
    {"x": {"dtype": "F64", "data_offsets": [0, 64]}},
    {"x": 5},
    {"__metadata__": {"names": 5}},
    {"__metadata__": "x"},
]  # fmt: skip


@pytest.mark.parametrize("head", LYING_HEADERS, ids=map(str, range(len(LYING_HEADERS))))
def test_safetensors_with_a_lying_header(head, tmp_path):
    for text in (json.dumps(head).encode(), json.dumps(head).encode() + b" " * 1000):
        for size in (len(text), len(text) - 3, 2**31, 2**63):
            (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", size) + text + bytes(64))
            refused_cheaply(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="can't be read as a file of tensors|holds no state dict"):
        backbones.create("cnn", input_shape=(1, 8, 8), weights=tmp_path / "a.safetensors")


def test_tables_with_more_columns_than_they_have_data(tmp_path):
    (tmp_path / "a.csv").write_text("y," + ",".join(f"c{i}" for i in range(100_000)) + "\n0,1\n")
    assert "cells" in refused_cheaply(tmp_path / "a.csv", 2**28)
    (tmp_path / "a.csv").write_text("y,a,b\n" + '0,"' + "x" * 10**6 + '",1\n')
    refused_cheaply(tmp_path / "a.csv", 2**28)


# ------------------------------------------------------------------------------------------------- recipes and heads


@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/object/apply:os.system ['touch MARKER']",
        "a: !!python/object/new:os.system ['touch MARKER']",
        "a: !!python/name:os.system",
        "a: !!python/module:os",
        "a: !!python/object/apply:builtins.eval [\"open('MARKER', 'w')\"]",
        "!!python/object/apply:subprocess.run [[touch, MARKER]]: {epochs: 1}",
        "a: {epochs: !!python/tuple [1]}",
        "a: !custom {epochs: 1}",
    ],
)
def test_recipes_that_would_run_code(text, marker):
    with pytest.raises(ValueError, match="mine.yaml is not YAML: could not determine a constructor"):
        recipes.parse({"mine.yaml": text.replace("MARKER", str(marker))})


def test_a_recipe_that_multiplies_itself_stays_small():
    doubling = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" if i else "a0: &a0 [1]" for i in range(30))
    with pytest.raises(ValueError, match="recipe 'a0' must map keys to values, got list"):
        recipes.parse({"mine.yaml": doubling})


@pytest.mark.parametrize(
    "name",
    [
        "os:system", "subprocess:run", "builtins:eval", "builtins:exec", "os.path:join", "sys:modules", "os:nosuch",
        "nosuch:Head", "pathlib:Path", "torch.nn:Linear", "gsoftmax.config:Config", ":", "os:", ":system", ".os:system",
        "os:path.join", "os/path:join", "../os:system", "os;system:x", "this-is-no-module:X", "__main__:__loader__",
    ],
)  # fmt: skip
def test_heads_that_are_none_are_not_called(name, marker):
    with pytest.raises(ValueError, match="head") as caught:
        heads.find(name)
    assert "\n" not in str(caught.value)


def test_only_what_is_named_is_imported(tmp_path, monkeypatch, marker):
    (tmp_path / "harmful.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("harmful", "softmax", "harmful.py", "gsoftmax:harmful", "./harmful:X"):
        try:
            heads.find(name)
        except ValueError:
            assert "harmful" not in sys.modules


def test_a_head_that_fails_while_it_is_imported_is_one_line(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for i, text in enumerate(("1 / 0", "def (", "import nosuch", "raise SystemError", "x = undefined")):
        (tmp_path / f"failing{i}.py").write_text(text)
        with pytest.raises(ValueError, match=f"head 'failing{i}:Head' cannot be imported") as caught:
            heads.find(f"failing{i}:Head")
        assert "\n" not in str(caught.value)


def test_values_of_a_command_line_are_data(marker):
    from gsoftmax.config import parse_head, parse_value

    for text in (f"__import__('os').system('touch {marker}')", "[].__class__", "f'{1}'", "{1: 2}", "(1)", "1 + 1"):
        assert parse_value(text) == text
    with pytest.raises(ValueError):
        parse_head(f"gsoftmax(lam=__import__('os').system('touch {marker}')) or 1")


def test_the_environment_names_folders_only(tmp_path, monkeypatch, marker):
    for value in (f"$(touch {marker})", f"; touch {marker}", "~", "\x1b[31m", "/proc/self/mem", "/dev/null"):
        monkeypatch.setenv("GSOFTMAX_DATA", value)
        with pytest.raises(data.DataError, match="cifar10 not found under"):
            data.load("cifar10")


# -------------------------------------------------------------------------------------------------------- CIFAR pickles


def nested(depth: int) -> bytes:
    return b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."


@pytest.mark.parametrize(
    "evil",
    [
        b"\x80\x02\x82\x01.",  # EXT1
        b"\x80\x02\x83\x01\x00.",  # EXT2
        b"\x80\x02\x84\x01\x00\x00\x00.",  # EXT4
        b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93\x8c\x02os\x8c\x06system\x86R.",  # getattr
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
        b"\x80\x04\x8c\x05numpy\x8c\x10ndarray.__reduce__\x93.",  # a way through an admitted name
        b"\x80\x02cnumpy\ndtype\n}X\x04\x00\x00\x00makecnumpy\nndarray\nsb.",  # BUILD on an admitted name
        b"\x80\x02cnumpy\nload\n(X\x01\x00\x00\x00xtR.",
        b"\x80\x02cnumpy.core.multiarray\nfromfile\n.",
        b"\x80\x02c_codecs\nlookup\n.",
        b"\x80\x02cgsoftmax.data.cifar\nsafe_unpickle\n.",
        b"\x80\x02(i__builtin__\neval\n.",
        b"\x80\x02c__main__\nx\n.",
        b"(dp0\nS'a'\np1\ncposix\nsystem\np2\n(S'true'\ntRs.",
    ],
)
def test_more_pickles_are_rejected(evil):
    with pytest.raises(data.DataError, match="is rejected|is damaged") as caught:
        cifar.safe_unpickle(evil)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("depth", [100, 10_000, 200_000])
def test_deep_nesting_neither_overflows_nor_hangs(depth):
    try:
        found = cifar.safe_unpickle(nested(depth))
        with pytest.raises(data.DataError, match="expected a dictionary, got list"):
            cifar._entry(found, "data", Path("batch"))
        while found:  # undone level by level, because Python's own destructor recurses
            found = found.pop()
    except data.DataError:
        pass


def test_a_memo_that_doubles_stays_shared():
    # each list holds the one before twice: 2**60 elements if they were copied
    bomb = (
        b"\x80\x02]q\x00"
        + b"".join(b"](h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1]) for i in range(60))
        + b"."
    )
    tracemalloc.start()
    found = cifar.safe_unpickle(bomb)
    with pytest.raises(data.DataError, match="expected a dictionary, got list"):
        cifar._rows(found, "labels", 10, Path("batch"))
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


def test_a_long_integer_is_not_turned_into_text():
    with pytest.raises(data.DataError):
        cifar._rows(
            cifar.safe_unpickle(pickle.dumps({"data": 1, "labels": [1 << 100_000]}, 2)), "labels", 10, Path("b")
        )


def test_a_tar_with_the_same_member_twice(tmp_path):
    path = write_cifar_archive(tmp_path)
    with tarfile.open(path) as tar:
        members = [(m, tar.extractfile(m).read()) for m in tar if m.isreg()]
    evil = pickle.dumps(Runs(os.system, "true"), 2)
    for order in (0, 1):  # before and after the good one
        with tarfile.open(path, "w:gz") as tar:
            for member, content in members:
                copies = [content]
                if member.name.endswith("data_batch_1"):
                    copies.insert(order, evil)
                for copy in copies:
                    member.size = len(copy)
                    tar.addfile(member, io.BytesIO(copy))
        try:
            assert len(data.load("cifar10", tmp_path).train) == 200
        except data.DataError as error:
            assert "is rejected" in str(error)


# ------------------------------------------------------------------------------------------------- the page and tables

EVIL = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\" onmouseover=alert(1) x=\"",
    "' onfocus='alert(1)",
    "javascript:alert(1)",
    "<!--<script>",
    "]]>",
    "{{ 7 * 7 }}{% raw %}",
    "&lt;b&gt;",
    "\u2028\u2029",
    "=cmd|' /C calc'!A0",
    "@SUM(1+1)",
    "+1+1",
    "-2+3",
    "\t=1+1",
    " =1+1",
    "\u00a0=1+1",
    "\u200b\ufeff=1+1",
    "\uff1d1+1",
    "\ufe62 1",
    "| a | b |\n|---|---|",
    "[x](javascript:alert(1))",
    "![x](http://example.org/x.png)",
    r"\input{/etc/passwd}\write18{true}",
    "$\\immediate\\write18{true}$ % #",
    "\x1b]0;title\x07\x1b[31m",
    "\x00\x08\x7f\u202e",
]  # fmt: skip


class Elements(HTMLParser):
    """Every tag with its attributes, and the text of scripts."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, text):
        self.texts.append(text)


def write_outputs(path: Path, names: list[str]) -> None:
    y = np.arange(4 * len(names)) % len(names)
    x = np.random.default_rng(0).normal(size=(len(y), len(names))) + 3 * np.eye(len(names))[y]
    np.savez(path, x=x, y=y, names=np.array(names))


@pytest.fixture(scope="session")
def evil_report(tmp_path_factory) -> Path:
    """The report of outputs whose classes, file and title are all written to do harm."""
    folder = tmp_path_factory.mktemp("evil")
    file = folder / "<b>&\"'x.npz"
    write_outputs(file, EVIL)
    doc = report.from_outputs(file, title=EVIL[0] + EVIL[1] + EVIL[2])
    report.write(doc, folder / "out", tables=["md", "tex", "csv", "txt"])
    return folder / "out"


def test_the_page_has_no_element_a_name_asked_for(evil_report, tmp_path):
    text = (evil_report / "report.html").read_text("utf-8")
    write_outputs(tmp_path / "plain.npz", [f"class {i}" for i in range(len(EVIL))])
    other = page.render(report.from_outputs(tmp_path / "plain.npz", title="plain"))
    found, harmless = Elements(), Elements()
    found.feed(text)
    harmless.feed(other)
    assert [tag for tag, _ in found.tags] == [tag for tag, _ in harmless.tags]
    assert [set(a) for _, a in found.tags] == [set(a) for _, a in harmless.tags]  # and no attribute
    for tag, attributes in found.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("href", "src", "action", "formaction", "srcset"):
                assert not str(value).strip().lower().startswith(("javascript:", "data:text/html", "vbscript:")), value
    assert "<img src=x" not in text and "alert(1)</script>" not in text


def test_the_page_keeps_every_name_as_it_was(evil_report):
    text = (evil_report / "report.html").read_text("utf-8")
    held = re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', text, re.S)
    classes = json.loads(held[1])["classes"]
    assert classes == [tables.plain(name) for name in EVIL]
    assert "</script" not in held[1] and "<!--" not in held[1] and "\u2028" not in held[1]


def test_the_page_asks_for_nothing_from_outside(evil_report):
    found = Elements()
    found.feed((evil_report / "report.html").read_text("utf-8"))
    for tag, attributes in found.tags:
        assert not (tag in ("script", "img", "iframe", "object", "embed", "link") and attributes.get("src")), attributes
        assert tag not in ("iframe", "object", "embed", "base"), tag
        assert "action" not in attributes and "formaction" not in attributes


def test_markdown_tables_hold_their_cells(evil_report):
    text = (evil_report / "tables.md").read_text("utf-8")
    bare = re.sub(r"\\.", "", text)  # without what is escaped
    for block in bare.split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1, rows  # no name opened a cell or a row
    assert "<" not in bare and "](" not in bare and "`" not in bare
    assert text.count("\n### ") == text.count("\n\n### ")


def test_latex_tables_have_no_command_a_name_asked_for(evil_report):
    text = (evil_report / "tables.tex").read_text("utf-8")
    commands = set(re.findall(r"\\([a-zA-Z]+)", text))
    ours = "begin end centering caption toprule midrule bottomrule pm sigma infty mu lambda"
    escapes = "textbackslash textasciitilde textasciicircum textless textgreater"
    assert commands <= {*ours.split(), *escapes.split()}
    assert not re.search(r"(?<!\\)[%#]", text)


def test_csv_cells_are_no_formulas(evil_report):
    """A text that a spreadsheet would run begins with an apostrophe; numbers, negative ones too, stay numbers."""
    found = 0
    for path in (evil_report / "tables").glob("*.csv"):
        for row in csv.reader(io.StringIO(path.read_text("utf-8"))):
            for cell in row:
                found += cell.startswith("'")
                if cell.lstrip(" \u00a0\u200b\ufeff")[:1] in ("=", "+", "-", "@", "\uff1d", "\ufe62"):
                    float(cell)
    assert found >= 9


def test_control_characters_do_not_reach_the_terminal(evil_report, capsys):
    for name in ("tables.txt", "tables.md", "tables.tex"):
        text = (evil_report / name).read_text("utf-8")
        assert not set(text) & set("\x1b\x07\x00\x08\x7f\r")


def test_names_of_files_come_from_titles_safely(tmp_path):
    bad = [
        tables.Table(t, ("a",), (("b",),)) for t in ("../../up", "/abs", "a\0b", "..", "", "CON", "x" * 500, '<>:"|?*')
    ]
    paths = tables.write(bad, tmp_path / "out", ["csv"])
    assert all(p.parent == tmp_path / "out" / "tables" and re.fullmatch(r"[a-z0-9-]+\.csv", p.name) for p in paths)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("head", ["..", ".", "/", "\0"])
def test_a_summary_cannot_lead_out_of_its_folder(head, tmp_path):
    numbers = dict.fromkeys(("difference", "low", "high", "t", "p", "n"), 1.0)
    row = {"values": [1.0], "mean": 1.0, "sd": None, "paired": numbers}
    metrics = {m: {h: row for h in ("softmax", head)} for m in SINGLE}
    summary = {"heads": ["softmax", head], "seeds": [0], "multilabel": False, "metrics": metrics, "seconds": {}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(ValueError, match="summary.json is not the summary of a comparison: a head's name leads out"):
        report.from_runs([tmp_path])


# ----------------------------------------------------------------------------------------------- folders of strangers

QUICK = ["epochs=2", "batch_size=512", "train_fraction=0.5", "threads=1"]
EVERY_FILE = [
    "report.html",
    "tables.md",
    "tables.tex",
    "tables/most-frequent-confusions.csv",
    "metrics.jsonl",
    "environment.json",
]
EVERY_FILE += ["config.json", "SHA256SUMS", "figures/confusion.svg"]


@pytest.fixture
def victim(tmp_path):
    """A file that nobody named; it must not have changed when the test ends."""
    path = tmp_path / "victim"
    path.write_text("alias ls='ls --color'\n")
    path.chmod(0o640)
    yield path
    assert path.read_text() == "alias ls='ls --color'\n" and path.stat().st_mode & 0o777 == 0o640


@pytest.fixture
def stranger(model_file, tmp_path) -> Path:
    """A finished run whose first class is named like a command."""
    run = tmp_path / "run"
    shutil.copytree(model_file.parent, run)
    described = json.loads((run / "environment.json").read_text())
    described["data"]["classes"][0] = "; touch marker #"
    (run / "environment.json").write_text(json.dumps(described))
    (run / "SHA256SUMS").unlink(missing_ok=True)
    return run


def one_line(capsys, *words: object) -> str:
    """What a command says when it refuses."""
    assert cli.main([str(word) for word in words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("gsoftmax: "), err
    return err


@pytest.mark.parametrize("suffix", ["", ".partial"])
def test_a_report_follows_no_link_in_the_folder_of_a_run(suffix, stranger, victim, capsys):
    """`report` writes into the run folder by default; the names of its files can be guessed."""
    (stranger / "tables").mkdir()
    (stranger / "figures").mkdir()
    for name in EVERY_FILE if suffix else EVERY_FILE[:4] + EVERY_FILE[-1:]:
        (stranger / f"{name}{suffix}").symlink_to(victim)
    assert cli.main(["report", str(stranger)]) == 0
    table = stranger / "tables/most-frequent-confusions.csv"
    assert "; touch marker #" in table.read_text("utf-8")
    assert not table.is_symlink() and not (stranger / "report.html").is_symlink()


@pytest.mark.parametrize("name", ["tables", "figures"])
def test_a_linked_folder_of_a_run_is_not_written_to(name, stranger, tmp_path, capsys):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (stranger / name).symlink_to(elsewhere)
    before = sorted(stranger.iterdir())
    assert f"{stranger / name} is a link to another folder" in one_line(capsys, "report", stranger)
    assert not list(elsewhere.iterdir()) and sorted(stranger.iterdir()) == before


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_linked_lock_overwrites_nothing(link, half_a_run, stranger, victim, tmp_path, capsys):
    run = tmp_path / "half"
    shutil.copytree(half_a_run, run)
    for folder in (run, stranger):
        (folder / ".lock").unlink(missing_ok=True)
        link(victim, folder / ".lock")
    words = "a link, which is not followed: " if link is os.symlink else "is another name of some file"
    assert words in one_line(capsys, "train", "digits", *QUICK, "--resume", "--out", run)
    options = ["epochs=1", *QUICK[1:], "head=gsoftmax", "--resume", "--out"]
    (stranger / "checkpoint").mkdir()
    assert words in one_line(capsys, "train", "digits", *options, stranger)
    assert (stranger / "checkpoint").exists()


@pytest.mark.parametrize("name", ["checkpoint", "tensorboard"])
def test_linked_folders_of_a_run_are_not_resumed_from(name, half_a_run, tmp_path, capsys):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    shutil.copytree(half_a_run, run)
    (run / name).rename(elsewhere) if (run / name).exists() else elsewhere.mkdir()
    (run / name).symlink_to(elsewhere)
    before = sorted(elsewhere.rglob("*"))
    assert f"{run / name} is a link" in one_line(capsys, "train", "digits", *QUICK, "--resume", "--out", run)
    assert sorted(elsewhere.rglob("*")) == before


def test_links_among_the_files_of_a_run_are_replaced(half_a_run, victim, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(half_a_run, run)
    for name in ("model.safetensors", "outputs.safetensors", "SHA256SUMS"):
        (run / name).symlink_to(victim)
    rows = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").unlink()
    (tmp_path / "rows").write_bytes(rows)
    (run / "metrics.jsonl").symlink_to(tmp_path / "rows")
    assert cli.main(["train", "digits", *QUICK, "--resume", "--out", str(run)]) == 0
    assert (tmp_path / "rows").read_bytes() == rows
    assert not any(path.is_symlink() for path in run.rglob("*"))


def test_a_comparison_does_not_leave_its_folder(tmp_path, capsys):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "gsoftmax").symlink_to(elsewhere)
    words = ["compare", "digits", "--heads", "softmax,gsoftmax", "--seeds", "1", "--out", tmp_path / "all"]
    assert f"{tmp_path / 'all' / 'gsoftmax'} is a link" in one_line(capsys, *words, *QUICK)
    assert not list(elsewhere.iterdir()) and [p.name for p in (tmp_path / "all").iterdir()] == ["gsoftmax"]


def test_only_our_own_leftovers_are_removed(tmp_path, victim):
    ours, old, link = (tmp_path / f".gsoftmax-{digit * 16}.partial" for digit in "abc")
    for folder in (ours, old):
        folder.mkdir()
        (folder / "report.html").write_text("half")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    link.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "download.partial").write_text("somebody else's")
    for path in (old / "report.html", old):
        os.utime(path, (1, 1))
    files.atomic_write(tmp_path / "new", "text")  # another process may still be writing there
    assert ours.exists() and not old.exists()
    files.remove_leftovers(tmp_path)
    kept = {"victim", "new", "elsewhere", "download.partial", link.name}
    assert {p.name for p in tmp_path.iterdir()} == kept and (tmp_path / "elsewhere" / "kept").exists()


@pytest.mark.parametrize("name", ["config.json", "environment.json", "metrics.jsonl", "SHA256SUMS"])
def test_a_pipe_in_the_folder_of_a_run_is_refused(name, stranger, capsys):
    (stranger / name).unlink(missing_ok=True)
    os.mkfifo(stranger / name)
    assert f"{name}" in (err := one_line(capsys, "report", stranger)) and "not a regular file" in err.lower()


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_files_have_the_permissions_of_any_new_file(umask, tmp_path, capsys):
    before = os.umask(umask)
    try:
        words = [
            "compare",
            "digits",
            "--heads",
            "softmax",
            "--seeds",
            "1",
            "--jobs",
            "1",
            "--out",
            str(tmp_path / "all"),
        ]
        assert cli.main([*words, *QUICK, "epochs=1"]) == 0
        assert cli.main(["report", str(tmp_path / "all"), "--tables", "csv,md"]) == 0
    finally:
        os.umask(before)
    run = tmp_path / "all/softmax/seed-0"
    ours = [p for p in (tmp_path / "all").rglob("*") if p.is_file() and "tensorboard" not in p.parts]
    assert {run / "outputs.safetensors", run / "model.safetensors", tmp_path / "all/report.html"} < set(ours)
    assert {p.stat().st_mode & 0o777 for p in ours} == {0o666 & ~umask}


# ------------------------------------------------------------------------------------------------- the source itself


def calls(path: Path):
    """(line, dotted name, keywords) of every call in a file."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call):
            name, keywords = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            if name in ("open", "os.fdopen"):
                keywords |= dict(zip(("path", "mode"), map(ast.unparse, node.args), strict=False))
            elif node.args:
                keywords["path"] = " ".join(map(ast.unparse, node.args))
            yield node.lineno, name, keywords


def forbidden(name: str, keywords: dict[str | None, str]) -> str | None:
    """Why a call is forbidden in the source."""
    last = name.rpartition(".")[2]
    if name in ("eval", "exec", "compile", "__import__") or name.startswith("builtins."):
        return "runs code"
    unpicklers = "pickle.load pickle.loads pickle.Unpickler dill.load joblib.load marshal.loads shelve.open"
    if name in unpicklers.split():
        return "unpickles"
    if name == "torch.load" and keywords.get("weights_only") != "True":
        return "torch.load without weights_only=True"
    if last in ("read_array",) or (last == "load" and name.split(".")[0] in ("np", "numpy")):
        return None if keywords.get("allow_pickle") == "False" else "NumPy without allow_pickle=False"
    if name.startswith("yaml.") and last in ("load", "load_all", "unsafe_load", "full_load"):
        return "YAML without the safe loader"
    if last in ("extractall", "extract"):
        return None if keywords.get("filter") == "'data'" else "extracts an archive"
    programs = ("os.system", "os.popen", "commands.getoutput")
    if name in programs or last.startswith(("spawnl", "spawnv", "execv", "execl")):
        return "runs a program"
    if keywords.get("shell") not in (None, "False") and last in ("run", "Popen", "call", "check_call", "check_output"):
        return "runs a shell"
    if name in ("tempfile.mktemp",) or last == "urlopen" or name.startswith("requests."):
        return "a name anyone can guess, or the network"
    writes = {"open": keywords.get("mode", "r"), "write_text": "w", "write_bytes": "w", "touch": "w", "savez": "w"}
    writes |= dict.fromkeys(("savez_compressed", "save_file", "mkstemp", "mkdtemp", "NamedTemporaryFile"), "w")
    if set(writes.get(last, "r")) & set("wax+") and "partial" not in f"{name} {keywords.get('path')}":
        return "writes a file itself"
    if last == "Markup" and not name.startswith("markupsafe.escape"):
        return "unescaped"
    return None


ALLOWED = {  # (file, why)
    ("report/page.py", "unescaped"),  # JSON escaped for a script, and our own files
    ("files.py", "writes a file itself"),  # on behalf of all others
    ("data/smoke.py", "writes a file itself"),  # into a new temporary folder
    ("completion.py", "runs a shell"),  # the name of the shell that a completion script is for
}


def test_the_source_has_no_dangerous_call():
    found = []
    paths = sorted(SOURCE.rglob("*.py"))
    assert len(paths) > 30
    for path in paths:
        name = path.relative_to(SOURCE).as_posix()
        for line, call, keywords in calls(path):
            why = forbidden(call, keywords)
            if why and (name, why) not in ALLOWED:
                found.append(f"{name}:{line} {call}: {why}")
    assert not found, found


def test_the_only_unpickler_is_the_restricted_one():
    for path in SOURCE.rglob("*.py"):
        text = path.read_text("utf-8")
        if path.name != "cifar.py":
            assert not re.search(r"^\s*(import|from) (pickle|cPickle|dill|marshal|shelve|joblib)\b", text, re.M), path
    assert issubclass(cifar._Restricted, pickle.Unpickler)
    assert all(isinstance(stand, cifar._Stand) for stand in cifar._GLOBALS.values())


@pytest.mark.parametrize(
    "line",
    [
        "eval(x)", "exec(x)", "pickle.load(f)", "torch.load(f)", "torch.load(f, weights_only=False)", "np.load(f)",
        "numpy.load(f, allow_pickle=True)", "np.lib.format.read_array(s)", "yaml.load(s)", "tar.extractall(x)",
        "tar.extract(m)", "os.system(x)", "subprocess.run(x, shell=True)", "tempfile.mktemp()", "Markup(x)",
        "open(path, 'a')", "open(path, mode='wb')", "path.write_text(x)", "save_file(held, path)", "np.savez(path, x)",
    ],
)  # fmt: skip
def test_the_source_scan_finds_dangerous_calls(line, tmp_path):
    (tmp_path / "x.py").write_text(line)
    assert [forbidden(name, keywords) for _, name, keywords in calls(tmp_path / "x.py")][0]


def test_an_outputs_reader_keeps_no_file_open(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 2)), y=np.zeros(4, int))
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(20):
        list(open_outputs(tmp_path / "a.npz").blocks(2))
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + 1
