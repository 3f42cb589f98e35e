"""The model of a finished run: the same outputs after loading, from any data it is given, and in other formats."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import processes
import pytest
import torch
from PIL import Image
from processes import one_thread  # noqa: F401
from safetensors.torch import load_file, safe_open
from test_lab import OWN_HEAD

import gsoftmax
from gsoftmax import build, data, models, runs, train
from gsoftmax.config import Config
from gsoftmax.heads import SoftmaxHead

BASE = Config(epochs=1, train_fraction=0.3, threads=1, device="cpu", train_geometry=False)
TABLE = {"data": "npz:table.npz", "train_fraction": 1.0, "batch_size": 16}
MOSAIC = {"data": "digits-mosaic", "pool": "max"}
CASES: dict[str, dict] = {
    "learned": {"head": "gsoftmax", "head_options": {"lam": 2.0}, "train_geometry": True},
    "tracked, averaged": {"head": "gsoftmax", "head_options": {"gaussians": "tracked"}, "init": "data", "ema": 0.9},
    "lsoftmax": {"head": "lsoftmax"},
    "whitened": {"backbone": "resnet9", "image_size": 20, "feature_scale": 0.125}
    | {"backbone_options": {"widths": [8, 8, 8]}, "bias_lr": 4.0, "lr": 0.01},
    "transformer": {"backbone": "timm:swin_tiny_patch4_window7_224", "image_size": 32, "batch_size": 256}
    | {"backbone_options": {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 1], "window_size": 2}},
    "table": TABLE | {"head": "gsoftmax"},
    **{form: MOSAIC | {"head": "gsoftmax", "head_options": {"form": form}} for form in ("paired", "independent")},
    **{form: MOSAIC | {"head_options": {"form": form}} for form in ("printed", "msml")},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The runs of all cases, each trained when it is first asked for."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def trained(folder, monkeypatch):
    monkeypatch.chdir(folder)
    if not (folder / "table.npz").exists():
        x, y = np.random.default_rng(0).normal(size=(80, 5)) * 10 + 3, np.arange(80) % 3
        np.savez("table.npz", x_train=x[:60], y_train=y[:60], x_test=x[60:], y_test=y[60:])

    def run(case):
        config = BASE.override(CASES[case])
        return train.train(config, folder / case, resume=(folder / case).exists())

    return run


def rows_of(case):
    return data.load(BASE.override(CASES[case]).data).test.x[:7]


# ------------------------------------------------------------------------------------------------------- one model file


@pytest.mark.parametrize("case", CASES)
def test_a_loaded_model_has_the_metrics_and_outputs_of_its_run(case, trained):
    result = trained(case)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model = gsoftmax.load(case)
    assert torch.equal(before, torch.get_rng_state()) and not model.training
    config = BASE.override(CASES[case])
    metrics, outputs = models.evaluate(model, config.data)
    assert metrics == {k: result[k] for k in metrics} and "nll" in metrics
    for name, saved in load_file(f"{case}/outputs.safetensors").items():
        if not name.startswith("train_"):
            torch.testing.assert_close(outputs[name], saved, rtol=0, atol=0, equal_nan=True)
    inputs = model.prepare(rows_of(case))
    assert inputs.shape == (7, *model.input_shape)
    with torch.no_grad():
        torch.testing.assert_close(model.features(inputs), outputs["x"][:7], rtol=1e-4, atol=1e-5)
        assert model(inputs).shape == outputs["x"][:7].shape
    torch.testing.assert_close(model.predict_proba(inputs).double(), outputs["p"][:7], rtol=0, atol=1e-5)
    assert model.classes == data.load(config.data).classes and model.multilabel == (outputs["y"].ndim == 2)


def test_a_finished_run_keeps_one_model_file_and_nothing_to_resume_from(trained, folder):
    trained("tracked, averaged")
    run = folder / "tracked, averaged"
    files = {p.relative_to(run).as_posix() for p in run.rglob("*") if "tensorboard" not in p.parts and p.is_file()}
    assert files == {f"{n}.json" for n in ("config", "environment")} | {"metrics.jsonl", "SHA256SUMS"} | {
        f"{n}.safetensors" for n in ("model", "outputs")
    }
    with safe_open(run / "model.safetensors", "pt") as file:
        about = json.loads(file.metadata()["gsoftmax"])
        values = sum(file.get_tensor(k).numel() for k in file.keys())  # noqa: SIM118
    assert about["format"] == 1 and about["config"]["ema"] == 0.9 and about["data"]["input_shape"] == [1, 8, 8]
    assert (run / "model.safetensors").stat().st_size < 4 * values + 16_000  # no optimizer, no second copy


def test_resuming_a_finished_run_returns_its_result(trained, folder, monkeypatch):
    first = trained("learned")
    run = folder / "learned"
    files = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in run.iterdir() if p.is_file()}
    (run / "checkpoint").mkdir()
    (run / "checkpoint" / "epoch-000001-batch-00000000-x.pt").write_bytes(b"left by a crash")
    with monkeypatch.context() as patched:
        patched.setattr(build, "prepare", None)  # nothing is built
        assert train.train(BASE.override(CASES["learned"]), run, resume=True) == first and "final" not in first
    assert not (run / "checkpoint").exists() and not (run / ".lock").exists()
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in run.iterdir() if p.is_file()} == files
    with pytest.raises(ValueError, match="contains a run with epochs=1, not epochs=2"):
        train.train(BASE.override(CASES["learned"] | {"epochs": 2}), run, resume=True)
    with pytest.raises(ValueError, match="already contains a run"):
        train.train(BASE.override(CASES["learned"]), run)


def test_a_run_of_an_older_version_gets_its_model_from_its_checkpoint(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(runs, "remove_checkpoints", lambda path: None)
        first = train.train(BASE, tmp_path / "run")
    whole = load_file(tmp_path / "run" / "model.safetensors")
    (tmp_path / "run" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model.safetensors does not exist: a run has it when it is finished, and "):
        gsoftmax.load(tmp_path / "run")
    monkeypatch.setattr(train.Run, "backward", None)  # nothing is trained
    again = train.train(BASE, tmp_path / "run", resume=True)
    assert again["nll"] == first["nll"] and not (tmp_path / "run" / "checkpoint").exists()
    for name, value in load_file(tmp_path / "run" / "model.safetensors").items():
        assert torch.equal(value, whole[name])


def test_weights_that_share_memory(tmp_path):
    whole = torch.arange(12.0).view(3, 4)
    held = {"a": whole, "b": whole, "row": whole[1], "turned": whole.T, "empty": whole[:0], "step": torch.tensor(3)}
    runs.save_tensors(tmp_path / "x.safetensors", held)
    found = load_file(tmp_path / "x.safetensors")
    assert set(found) == set(held) and all(torch.equal(found[k], v) for k, v in held.items())


class Tied(SoftmaxHead):
    """A head with a tied weight, a buffer, and a state that is not a tensor."""

    def __init__(self, in_features, num_classes, **options):
        super().__init__(in_features, num_classes, **options)
        self.same = self.weight
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("unsaved", torch.ones(1), persistent=False)

    def get_extra_state(self):
        return {"note": "text"}

    def set_extra_state(self, state): ...

    def features(self, h):
        return super().features(h) * self.unsaved


def test_a_head_of_ones_own_with_tied_weights(tmp_path):
    config = BASE.override({"head": f"{__name__}:Tied"})
    result = train.train(config, tmp_path / "run")
    words = rf"its head is code of its own, .*: pass head=Tied, or --head {__name__}:Tied on the command line"
    with pytest.raises(ValueError, match=words):
        gsoftmax.load(tmp_path / "run")
    for head in (Tied, f"{__name__}:Tied"):
        model = gsoftmax.load(tmp_path / "run", head=head)
        assert models.evaluate(model, "digits")[0]["nll"] == result["nll"]
    with pytest.raises(ValueError, match="^head to export must be a built-in one, .*, got Tied, a head of your own$"):
        models.export(model, tmp_path / "model.onnx")


def test_a_head_that_derives_from_ours_is_not_folded_into_it(tmp_path, monkeypatch):
    (tmp_path / "own_scaled.py").write_text(OWN_HEAD)
    monkeypatch.syspath_prepend(tmp_path)
    train.train(BASE.override({"head": "own_scaled:Scaled"}), tmp_path / "run")
    model = gsoftmax.load(tmp_path / "run", head="own_scaled:Scaled")
    with pytest.raises(ValueError, match="got Scaled, a head of your own"):
        models.export(model, tmp_path / "model.pt2")


@pytest.mark.parametrize("name", ["torchvision:regnet_x_400mf", "timm:resnet10t"])
def test_networks_that_compute_while_they_are_built(name, tmp_path):
    """The first cannot be built without memory."""
    config = Config(backbone=name, image_size=32)
    dataset = replace(data.load("digits", image_size=32), input_shape=(3, 32, 32), mean=torch.zeros(3))
    dataset = replace(dataset, std=torch.ones(3))
    network = build.network(config, dataset).eval()
    runs.save_tensors(tmp_path / "m.safetensors", network.state_dict(), models.describe(config, dataset))
    model, x = gsoftmax.load(tmp_path / "m.safetensors"), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model(x), network.head(network.h(x)))


def test_a_pretrained_googlenet_keeps_its_own_normalization(tmp_path):
    """torchvision changes the forward pass of two networks if they are pretrained."""
    config = Config(backbone="torchvision:googlenet", pretrained=True)
    dataset = replace(data.load("digits"), input_shape=(3, 32, 32), mean=torch.zeros(3), std=torch.ones(3))
    network = build.network(config.override({"pretrained": False}), dataset)
    runs.save_tensors(tmp_path / "m.safetensors", network.state_dict(), models.describe(config, dataset))
    assert gsoftmax.load(tmp_path / "m.safetensors").network.backbone.transform_input


ELSEWHERE = """
import sys, json, torch, gsoftmax
from gsoftmax import models
model = gsoftmax.load("moved.safetensors")
images = torch.arange(128, dtype=torch.uint8).view(2, 1, 8, 8)
metrics, outputs = models.evaluate(model, "digits")
models.export(model, "model.pt2")
[one] = models.predict(model, ["one.png"])
p = model.predict_proba(model.prepare(images)).tolist()
print(json.dumps({"p": p, "error": metrics["error"], "one": one.p.argmax().item()}))
"""


def test_the_file_alone_is_enough_in_another_process(trained, folder, tmp_path):
    result = trained("learned")
    model = gsoftmax.load("learned")
    (tmp_path / "moved.safetensors").write_bytes((folder / "learned" / "model.safetensors").read_bytes())
    image = data.load("digits").test.x[3]
    Image.fromarray(image[0].numpy()).save(tmp_path / "one.png")
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    images = torch.arange(128, dtype=torch.uint8).view(2, 1, 8, 8)
    torch.testing.assert_close(torch.tensor(found["p"]), model.predict_proba(model.prepare(images)))
    assert found["error"] == result["error"] and (tmp_path / "model.pt2").stat().st_size > 1000
    assert found["one"] == model.predict_proba(model.prepare(image[None])).argmax()


# ----------------------------------------------------------------------------------------------------------- predicting


@pytest.fixture
def pictures(tmp_path):
    """Ten test digits as files, and their pixels."""
    x = data.load("digits").test.x[:10]
    (tmp_path / "in" / "below").mkdir(parents=True)
    paths = [tmp_path / "in" / ("below" if k % 2 else "") / f"{k}.png" for k in range(10)]
    for path, image in zip(paths, x, strict=True):
        Image.fromarray(image[0].numpy()).save(path)
    return tmp_path / "in", sorted(map(str, paths), key=lambda p: ("below" in p, p)), x


def test_predictions_of_files_are_those_of_their_pixels(trained, pictures):
    trained("learned")
    model, (where, paths, x) = gsoftmax.load("learned"), pictures
    expected = model.predict_proba(model.prepare(x))
    for batch_size in (3, 64):
        found = list(models.predict(model, [where], batch_size=batch_size))
        assert [one.name for one in found] == paths
        for one in found:
            index = int(one.name.rpartition("/")[2].removesuffix(".png"))
            torch.testing.assert_close(one.p, expected[index])
    torch.testing.assert_close(model.prepare(paths[:1]), model.prepare(x[:1]))
    assert model.prepare([]).shape == (0, 1, 8, 8)
    larger = torch.nn.functional.interpolate(x.float(), (24, 24)).to(torch.uint8)
    assert model.prepare(larger).shape == (10, 1, 8, 8)


def test_an_unreadable_image_does_not_stop_the_others(trained, pictures, tmp_path):
    trained("learned")
    model, where = gsoftmax.load("learned"), pictures[0]
    (where / "3a.png").write_text("no image")
    Image.new("RGB", (8, 8), (255, 0, 0)).save(where / "5a.png")
    given = [str(where / "0.png"), str(where / "3a.png"), str(where / "5a.png"), "gone.png", str(where / "2.png")]
    for batch_size in (1, 2, 64):
        found = list(models.predict(model, given, batch_size=batch_size))
        assert [one.name for one in found] == given
        assert [one.p is None for one in found] == [False, True, True, True, False]
    errors = [one.error for one in found if one.error]
    assert [e.rpartition("/")[2] for e in errors] == [
        "3a.png is not a readable image: not a known image format",
        "5a.png is in color, and the model takes gray images",
        "gone.png cannot be read: No such file or directory",
    ]
    table = models.predictions_table(model, found, top=2)
    assert table.header == ("image", "class 1", "p 1", "class 2", "p 2", "error") and len(table.rows) == 5
    assert table.note == "3 of 5 could not be read." and table.rows[1][-1] == errors[0]
    assert len(list(models.predict(model, where))) == 12
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty contains no images"):
        list(models.predict(model, [tmp_path / "empty"]))


def test_predictions_as_table_csv_and_json(trained, pictures):
    trained("learned")
    model = gsoftmax.load("learned")
    found = list(models.predict(model, pictures[0]))
    table = models.predictions_table(model, found)
    assert table.title == "10 images" and table.header[-1] == "p 5" and "error" not in table.header
    best = [int(one.p.argmax()) for one in found]
    rows = list(csv.DictReader(io.StringIO(models.predictions_text(model, found, 3, "csv"))))
    assert [row["class 1"] for row in rows] == [model.classes[k] for k in best]
    items = json.loads(models.predictions_text(model, found, 20, "json"))
    for item, one in zip(items, found, strict=True):
        p = [c["p"] for c in item["classes"]]
        assert item["image"] == one.name and p == sorted(one.p.tolist(), reverse=True) and len(p) == 10
    assert models.predictions_text(model, found).startswith("10 images\n\nimage")
    for options, words in (((0,), "top must be 1 or more, got 0"), ((5, "xml"), "text, csv or json, got 'xml'")):
        with pytest.raises(ValueError, match=words):
            models.predictions_text(model, found, *options)


def test_several_labels_are_those_above_one_half(trained):
    trained("paired")
    model = gsoftmax.load("paired")
    found = [models.Prediction("a", torch.tensor([0.2, 0.9, 0.5, *[0.1] * 7])), models.Prediction("b", torch.zeros(10))]
    table = models.predictions_table(model, found, top=1)
    assert table.header == ("image", "label 1", "p 1", "label 2", "p 2")
    assert [row[1::2] for row in table.rows] == [("1", "2"), (None, None)]
    assert json.loads(models.predictions_text(model, found, form="json"))[1] == {"image": "b", "labels": []}


def test_rows_of_a_table(trained, tmp_path):
    trained("table")
    model, x = gsoftmax.load("table"), rows_of("table")
    expected = model.predict_proba(model.prepare(x))
    np.savez(tmp_path / "a.npz", x=x.numpy())
    text = "\n".join(",".join(map(repr, row)) for row in x.tolist())
    (tmp_path / "b.csv").write_text(f"a,b,c,d,e\n{text}\n")
    (tmp_path / "c.csv").write_text(text)
    for name in ("a.npz", "b.csv", "c.csv"):
        found = list(models.predict(model, [tmp_path / name], batch_size=3))
        torch.testing.assert_close(torch.stack([one.p for one in found]), expected)
        assert found[6].name == f"{tmp_path / name}:7"
    np.savez(tmp_path / "d.npz", y=np.zeros(3))
    (tmp_path / "e.csv").write_text("1,2,3,4,5\n1,2,x,4,5")
    (tmp_path / "f.csv").write_text("1,2\n3,4")
    (tmp_path / "g.csv").write_text("1,2,3,4,nan")
    words = {"d.npz": "has no array x, only y", "e.csv": "same number of numbers in every line", "h.txt": "must end in"}
    words |= {"f.csv": r"rows must have 5 columns, got the shape \(2, 2\)", "g.csv": "must be finite, .* in row 0"}
    for name, text in words.items():
        [one] = models.predict(model, [tmp_path / name])
        assert one.p is None and name in one.error and re.search(text, one.error)
    assert models.predictions_table(model, [one]).header[0] == "row"


def test_photos_are_resized_as_in_their_evaluation(tmp_path, monkeypatch):
    """Large files, read by torchvision's bicubic filter: from the file and from its pixels."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / "photos" / part / name).mkdir(parents=True)
            for k in range(4):
                pixels = generator.integers(0, 255, (90 + k, 80, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "photos" / part / name / f"{k}.png")
    changes = {"data": "folder:photos", "image_size": 72, "backbone": "cnn", "batch_size": 4, "train_fraction": 1.0}
    train.train(BASE.override(changes | {"workers": 0}), tmp_path / "run")
    model = gsoftmax.load("run")
    assert model.kind == "files" and model.classes == ("cat", "dog")
    p = load_file("run/outputs.safetensors")["p"]
    found = list(models.predict(model, ["photos/test"], workers=0))
    torch.testing.assert_close(torch.stack([one.p for one in found]).double(), p, rtol=0, atol=1e-5)
    pixels = torch.from_numpy(np.array(Image.open("photos/test/cat/1.png"))).permute(2, 0, 1)[None]
    torch.testing.assert_close(model.prepare(pixels), model.prepare(["photos/test/cat/1.png"]))
    Image.new("L", (99, 70), 7).save("gray.png")
    assert model.prepare(["gray.png"]).shape == (1, 3, 72, 72)


@pytest.mark.parametrize(
    "case, given, words",
    [
        ("learned", torch.zeros(2, 1, 8, 8), r"images must be uint8 \(N, C, H, W\) or paths, got torch.float32"),
        ("learned", torch.zeros(1, 8, 8, dtype=torch.uint8), r"got torch.uint8 \(1, 8, 8\)"),
        ("learned", torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "images must have 1 channels, got 3"),
        ("table", torch.zeros(2, 4), r"rows must have 5 columns, got the shape \(2, 4\)"),
        ("table", torch.full((2, 5), torch.inf), "rows must be finite, got nan or infinity in row 0"),
    ],
)
def test_inputs_of_another_format(case, given, words, trained):
    trained(case)
    with pytest.raises(ValueError, match=words):
        gsoftmax.load(case).prepare(given)


# ----------------------------------------------------------------------------------------------------------- evaluating


def write_digits(path, names, keep, multilabel=False):
    """Some test digits as npz data whose class k is called names[k]; keep: the digit of every class."""
    digits = data.load("digits-mosaic" if multilabel else "digits")
    x, y = digits.test.x.numpy()[:200, 0], digits.test.y.numpy()[:200]
    if multilabel:
        y = y[:, keep]
    else:
        rows = np.isin(y, keep)
        x, y = x[rows], np.array([keep.index(k) for k in y[rows]])
    np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y, names=np.array(names))
    return f"npz:{path}"


@pytest.mark.parametrize("keep", [list(range(10))[::-1], [7, 2, 5]])
def test_other_data_is_matched_by_the_names_of_its_classes(keep, trained, tmp_path):
    trained("learned")
    model = gsoftmax.load("learned")
    spec = write_digits(tmp_path / "a.npz", list(map(str, keep)), keep)
    _, outputs = models.evaluate(model, "digits")
    rows = torch.isin(outputs["y"][:200], torch.tensor(keep))
    metrics, found = models.evaluate(model, spec, out=tmp_path / "out")
    torch.testing.assert_close(found["p"], outputs["p"][:200][rows])
    assert torch.equal(found["y"], outputs["y"][:200][rows])
    wrong = found["p"].argmax(1) != found["y"]
    assert metrics["error"] == pytest.approx(wrong.double().mean().item())
    file = gsoftmax.outputs.open_outputs(tmp_path / "out")
    assert file.classes == model.classes and json.loads((tmp_path / "out" / "metrics.json").read_text()) == metrics
    with pytest.raises(ValueError, match="learned contains a run, whose outputs would be overwritten"):
        models.evaluate(model, spec, out="learned")


@pytest.mark.parametrize("keep", [list(range(10))[::-1], [7, 2, 5]])
def test_labels_are_matched_by_name_too(keep, trained, tmp_path):
    trained("paired")
    model = gsoftmax.load("paired")
    spec = write_digits(tmp_path / "a.npz", list(map(str, keep)), keep, multilabel=True)
    _, outputs = models.evaluate(model, "digits-mosaic")
    metrics, found = models.evaluate(model, spec)
    torch.testing.assert_close(found["p"], outputs["p"][:200][:, keep])
    assert torch.equal(found["y"], outputs["y"][:200][:, keep]) and found["x"].shape == (200, 2, len(keep))
    torch.testing.assert_close(found["mu"], outputs["mu"][:, keep])
    assert np.isfinite(metrics["mAP"])


def test_data_that_does_not_fit(trained, tmp_path):
    trained("learned")
    model = gsoftmax.load("learned")
    names = [*map(str, range(8)), "acht", "9"]
    words = "npz:a.npz has the class 'acht', which the model does not have; class 8 of the model is '8'"
    with pytest.raises(ValueError, match=words):
        models.evaluate(model, write_digits(tmp_path / "a.npz", names, list(range(10))))
    with pytest.raises(ValueError, match="digits-mosaic is multi-label, and the model single-label"):
        models.evaluate(model, "digits-mosaic")
    trained("table")
    model = gsoftmax.load("table")
    names = [*model.classes]
    with pytest.raises(ValueError, match="one has images, the other a table"):
        models.evaluate(model, write_digits(tmp_path / "b.npz", names, [0, 1, 2]))
    with pytest.raises(ValueError, match="no validation split"):
        models.evaluate(model, TABLE["data"], split="val")


def test_detection_is_that_of_training_with_ood(tmp_path):
    config = BASE.override({"head": "gsoftmax", "train_geometry": True})
    result = train.train(config.override({"ood": "digits-mosaic"}), tmp_path / "with")
    train.train(config, tmp_path / "without")
    found = models.detect(gsoftmax.load(tmp_path / "without"), tmp_path / "without", ["digits-mosaic"])
    assert found == {k: v for k, v in result.items() if k.startswith("ood")} and len(found) == 6
    train.train(config.override({"train_geometry": False}), tmp_path / "bare")
    bare = models.detect(gsoftmax.load(tmp_path / "bare"), tmp_path / "bare", ["digits-mosaic"])
    assert bare == {k: v for k, v in found.items() if "empirical" not in k}
    with pytest.raises(ValueError, match="ood must differ from the training data, got 'digits'"):
        models.detect(gsoftmax.load(tmp_path / "bare"), tmp_path / "bare", ["digits"])


# ------------------------------------------------------------------------------------------------------------ exporting


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.9 reads its own files so
@pytest.mark.parametrize("case", [case for case in CASES if case != "transformer"])
def test_exported_files_take_pixels_and_give_p(case, trained, tmp_path):
    trained(case)
    model, x = gsoftmax.load(case), rows_of(case)
    table = model.kind == "table"
    if not table:
        x = torch.nn.functional.interpolate(x.float(), model.input_shape[-2:]).to(torch.uint8)
    p = model.predict_proba(model.prepare(x))
    models.export(model, tmp_path / "model.onnx")
    models.export(model, tmp_path / "model.pt2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.pt2"]
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    given, returned = session.get_inputs()[0], session.get_outputs()[0]
    assert given.name == ("rows" if table else "images") and returned.name == "p"
    assert given.shape == ["batch", *model.input_shape]
    assert tuple(json.loads(session.get_modelmeta().custom_metadata_map["classes"])) == model.classes
    extra = {"classes.json": ""}
    program = torch.export.load(tmp_path / "model.pt2", extra_files=extra).module()
    assert tuple(json.loads(extra["classes.json"])) == model.classes
    for rows in (1, 7):
        pixels = x[:rows] if table else x[:rows].float() / 255
        torch.testing.assert_close(torch.from_numpy(session.run(None, {given.name: pixels.numpy()})[0]), p[:rows])
        torch.testing.assert_close(program(pixels), p[:rows], rtol=0, atol=1e-5)


def test_other_formats_are_named(trained):
    trained("learned")
    with pytest.raises(ValueError, match=r"path must end in .onnx or .pt2, got 'model.pb'"):
        models.export(gsoftmax.load("learned"), "model.pb")


def test_an_exported_model_needs_onnx(trained, monkeypatch, tmp_path):
    trained("learned")
    model, find = gsoftmax.load("learned"), models.importlib.util.find_spec
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name))
    with pytest.raises(ValueError, match=".onnx needs onnxscript, which is not installed: pip install onnx onnxscript"):
        models.export(model, tmp_path / "model.onnx")


def test_the_device_of_a_model(trained):
    trained("lsoftmax")
    model = gsoftmax.load("lsoftmax", device="auto")
    assert model.device.type in ("cpu", "cuda")
    with pytest.raises(ValueError, match="device 'meta' cannot be used"):
        gsoftmax.load("lsoftmax", device="meta")


# -------------------------------------------------------------------------------------------------- on the command line


def test_train_predict_evaluate_and_export_on_the_command_line(pictures, tmp_path):
    """Each command in a process of its own; the checks compute the same from the arrays."""

    def command(*words, status=0):
        done = processes.Program(processes.gsoftmax, *map(str, words), cwd=tmp_path).wait()
        assert done.returncode == status, done.stderr
        return done.stdout, done.stderr

    where, paths, x = pictures
    command("train", "digits", "head=gsoftmax", "head_options.lam=0.5", "epochs=4", "threads=1", "--out", "run")
    test = data.load("digits").test
    np.savez(tmp_path / "other.npz", x_train=x, y_train=np.arange(10), x_test=test.x[50:250], y_test=test.y[50:250])

    model = gsoftmax.load(tmp_path / "run")
    p = model.predict_proba(model.prepare(test.x[50:250]))
    out, _ = command("predict", "run", where, "--top", 1, "--format", "csv")
    rows, best = list(csv.DictReader(io.StringIO(out))), model.predict_proba(model.prepare(x)).argmax(1)
    assert [row["image"] for row in rows] == paths
    assert [row["class 1"] for row in rows] == [model.classes[best[int(Path(path).stem)]] for path in paths]
    (tmp_path / "broken.png").write_bytes(b"no image")
    out, error = command("predict", "run", paths[0], "broken.png", status=2)
    assert (
        paths[0] in out
        and error.startswith("gsoftmax: 1 of 2 could not be read; the first: ")
        and "broken.png" in error
    )

    out, _ = command("evaluate", "run", "--data", "npz:other.npz", "--out", "on-other")
    shown = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in out.splitlines())
    error = 100 * (p.argmax(1) != test.y[50:250]).float().mean().item()
    assert float(shown["error"].removesuffix(" %")) == pytest.approx(error, rel=1e-5)
    assert "separability" in command("analyze", "on-other")[0]

    command("export", "run", "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    [found] = session.run(None, {"images": test.x[50:250].numpy() / np.float32(255)})
    np.testing.assert_allclose(found, p.numpy(), atol=1e-5)
    error = command("export", "run", "model.txt", status=2)[1]
    assert error.startswith("gsoftmax: ") and ".onnx" in error and error.count("\n") == 1
