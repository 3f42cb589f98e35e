"""What photos are trained with where nobody says, and how long that is said to take."""

from __future__ import annotations

import base64
import io
import json
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from gsoftmax import backbones, build, cli, compare, photos, runs, train
from gsoftmax.cli import main
from gsoftmax.config import Config
from gsoftmax.data import smoke
from gsoftmax.photos import FREE, choose
from gsoftmax.report import examples

pytest.importorskip("torchvision")
Image = pytest.importorskip("PIL.Image")

CPU = Config(device="cpu")


@pytest.fixture(autouse=True)
def empty_caches(tmp_path, monkeypatch):
    """No weights on this disk, whatever the machine has."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def folder(tmp_path):
    """Writes images of 70 x 80 pixels in two class folders; the spec that loads them."""

    def write(count: int = 10) -> str:
        smoke.write_files(tmp_path / "photos", smoke.folder_files("ab", {".": count}, (70, 80), "jpg"))
        return f"folder:{tmp_path / 'photos'}"

    return write


def test_a_small_network_from_scratch(folder):
    config = CPU.override({"data": folder()})
    assert choose(config) == {"backbone": "cnn", "image_size": 64}
    chosen = choose(config, free=FREE)
    assert chosen == {"backbone": "cnn", "image_size": 64, "epochs": 30, "batch_size": 4, "lr": 0.1}
    done = config.override(chosen)
    assert choose(done, free=FREE) == {}  # as a run that is repeated elsewhere
    assert build.load_data(done).input_shape == (3, 64, 64)
    assert photos.describe(done) == "cnn at 64 px from scratch, 30 epochs, batches of 4"


def test_what_is_set_is_kept(folder):
    config = CPU.override({"data": folder()})
    assert choose(config.override({"image_size": 96}), free=FREE)["image_size"] == 96
    assert choose(config.override({"backbone": "timm:resnet18"}), free=FREE) == {"image_size": 224}
    assert "epochs" not in choose(config, free={"lr", "batch_size"})
    assert choose(CPU.override({"data": "digits"}), free=FREE) == {}
    assert choose(CPU.override({"data": f"{config.data}?test=0.3", "image_size": 32, "backbone": "cnn"})) == {}


@pytest.mark.parametrize(("rows", "epochs", "batch"), [(9, 30, 4), (320, 30, 64), (500, 20, 64), (100_000, 6, 64)])
def test_epochs_and_batches_follow_the_number_of_images(folder, monkeypatch, rows, epochs, batch):
    config = CPU.override({"data": folder()})
    read = build.read_cached(config.data, None, None, True).data

    class Many:
        kind, val, train = read.kind, None, range(rows)

    monkeypatch.setattr(build, "read_cached", lambda *_: type("Source", (), {"data": Many}))
    chosen = choose(config, free=FREE)
    assert (chosen["epochs"], chosen["batch_size"]) == (epochs, batch)
    halved = choose(config.override({"val_fraction": 0.5}), free=FREE)
    assert halved["epochs"] == min(30, max(6, 10_000 // (rows // 2)))


def test_a_gpu_gets_a_larger_network(folder, monkeypatch):
    monkeypatch.setattr(build, "pick_device", lambda _: torch.device("cuda"))
    chosen = choose(CPU.override({"data": folder()}), free=FREE)
    assert (chosen["backbone"], chosen["image_size"], chosen["epochs"]) == ("torchvision:resnet18", 128, 60)


def test_published_weights_on_the_disk_are_used(folder, tmp_path):
    made = backbones.create("torchvision:resnet18", input_shape=(3, 96, 96))
    made.fc = torch.nn.Linear(512, 1000)
    path = tmp_path / "torch" / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    path.parent.mkdir(parents=True)
    torch.save(made.state_dict(), path)
    config = CPU.override({"data": folder()})
    assert choose(config) == {"backbone": "cnn", "image_size": 64}  # pretrained is false, and stays so
    assert "pretrained" not in choose(config, free={"lr"})
    chosen = choose(config, free=FREE)
    expected = {"backbone": "torchvision:resnet18", "image_size": 96, "pretrained": "IMAGENET1K_V1"}
    assert chosen == {**expected, "epochs": 10, "batch_size": 4, "lr": 0.01}
    done = config.override(chosen)
    network = build.network(done, build.load_data(done))
    assert torch.equal(network.backbone.conv1.weight, made.conv1.weight)
    assert photos.describe(done).startswith("torchvision:resnet18 at 96 px from published weights, 10 epochs")


def test_weights_in_the_cache_of_hugging_face_are_used(folder, tmp_path):
    snapshot = tmp_path / "hub" / "models--timm--resnet18.a1_in1k" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"weights")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    assert backbones.weights_on_disk("timm:resnet18.a1_in1k") is True
    assert backbones.weights_on_disk("timm:resnet34.a1_in1k") is False
    assert backbones.weights_on_disk("timm:nothing") is False
    chosen = choose(CPU.override({"data": folder()}), free=FREE)
    assert (chosen["backbone"], chosen["pretrained"]) == ("timm:resnet18.a1_in1k", True)


def test_weights_that_are_asked_for_but_not_there_are_downloaded(folder):
    chosen = choose(CPU.override({"data": folder(), "pretrained": True}))
    assert chosen == {"backbone": "torchvision:mobilenet_v3_small", "image_size": 128}


def test_the_command_says_what_it_chose_and_writes_it_down(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["compare", "folder:photos", "--heads", "softmax,gsoftmax", "--seeds", "2", "--jobs", "1", "epochs=1"]
    folder()
    assert main([*words, "device=cpu"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert (
        said[0]
        == "folder:photos: 16 train, 4 test, 2 classes, 3x64x64 images; softmax, gsoftmax; 2 seeds -> runs/photos"
    )
    assert said[1] == "4 of 20 images are set aside as the test set, the same for every seed"
    assert said[2] == "4 runs, 1 epoch each, 1 at a time; 0 finished before"
    assert said[3].startswith("cnn at 64 px from scratch, 1 epoch, batches of 4; about ")
    assert said[3].endswith(" in all until the report, as measured by a few steps")
    written = json.loads((tmp_path / "runs/photos/softmax/seed-1/config.json").read_text())
    assert {k: written[k] for k in ("backbone", "image_size", "epochs", "batch_size")} == {
        "backbone": "cnn",
        "image_size": 64,
        "epochs": 1,
        "batch_size": 4,
    }
    before = (tmp_path / "runs/photos/softmax/seed-1/metrics.jsonl").stat().st_mtime_ns
    assert main([*words, "device=cpu"]) == 0  # nothing is trained again
    assert (tmp_path / "runs/photos/softmax/seed-1/metrics.jsonl").stat().st_mtime_ns == before
    assert "about" not in capsys.readouterr().out.partition("finished before")[2].partition("\n\n")[0]
    clock = iter([0.0, 200.0])  # when the command starts, and when libraries and data are there
    monkeypatch.setattr(cli, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(train, "seconds_per_run", lambda *_: 100.0)
    assert main([*words, "--seeds", "3", "device=cpu"]) == 0  # two runs are missing
    assert "about 2 minutes per run, about 7 minutes in all until the report" in capsys.readouterr().out


def test_the_page_shows_the_files_of_images_that_are_in_memory(folder, tmp_path, monkeypatch):
    config = CPU.override({"data": folder(25), "image_size": 16, "backbone": "cnn"})
    data = build.load_data(config)
    assert data.kind == "images" and data.test.x.shape[2:] == (16, 16)
    names = ["/".join(Path(file).parts[-2:]) for file in data.test.files]
    assert [name[:2] for name in names] == ["a/"] * 5 + ["b/"] * 5  # as the labels
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(asdict(config)))
    x = 9 * torch.nn.functional.one_hot(data.test.y, 2).float()
    x[[1, 7]] = 9 - x[[1, 7]]  # wrong, and certain
    save_file({"x": x, "y": data.test.y}, run / "outputs.safetensors")
    found = examples.read_examples({("softmax", 0): run})
    assert {row: picture["name"] for row, picture in found["pictures"].items()} == {"1": names[1], "7": names[7]}
    small = found["pictures"]["1"]["src"].partition("base64,")[2]
    assert Image.open(io.BytesIO(base64.b64decode(small))).size == (80, 70)  # of the file, not of the network


def test_every_way_to_train_chooses(folder, tmp_path):
    config = CPU.override({"data": folder(), "epochs": 1, "batch_size": 4, "threads": 1})
    train.train(config, tmp_path / "run")
    assert runs.read_config(tmp_path / "run") == config.override({"backbone": "cnn", "image_size": 64})
    assert compare.of_heads(config, ["softmax"])["softmax"].image_size == 64


def test_the_time_of_a_run_is_that_of_its_steps(folder, monkeypatch):
    config = CPU.override({"data": folder(25), "backbone": "cnn", "image_size": 16, "batch_size": 20, "epochs": 7})
    dataset, now, step = build.load_data(config), [0.0], train.Run.step

    def slow(run: train.Run) -> None:
        now[0] += 16 * 0.5  # half a second for each of the 16 examples of a step
        step(run)

    monkeypatch.setattr(train.Run, "step", slow)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    threads = torch.get_num_threads()
    assert train.seconds_per_run(config, dataset) == pytest.approx(40 * 7 * 0.5 + (40 + 10) * 0.5 / 3)
    off = config.override({"train_geometry": False, "epochs": 0, "threads": 1})
    assert train.seconds_per_run(off, dataset) == pytest.approx(10 * 0.5 / 3)
    assert torch.get_num_threads() == threads
