"""Compiled, exported, in ONNX, folded: the same outputs, for any batch size, and without this package."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import onnxruntime
import pytest
import torch
from test_attach import CLASSES, MODELS, mlp, model_and_inputs, outputs
from torch import nn

from gsoftmax import GaussianLogits, GSoftmaxHead, GSoftmaxLoss, LSoftmaxHead, MultiLabelGSoftmaxLoss, SoftmaxHead
from gsoftmax.attachment import attach, head_of
from gsoftmax.export import fold, to_onnx, to_program

HEADS = {
    "softmax": lambda: SoftmaxHead(16, CLASSES),
    "lsoftmax": lambda: LSoftmaxHead(16, CLASSES),
    "gsoftmax": lambda: GSoftmaxHead(16, CLASSES, lam=2.0),
    "gsoftmax without the term": lambda: GSoftmaxHead(16, CLASSES, lam=0.0),
    "gsoftmax without bias": lambda: GSoftmaxHead(16, CLASSES, bias=False),
    "tracked": lambda: GSoftmaxHead(16, CLASSES, gaussians="tracked", lam=4.0),
    "paired": lambda: GSoftmaxHead(16, CLASSES, form="paired"),
    "msml": lambda: GSoftmaxHead(16, CLASSES, form="msml"),
    "softmax, paired": lambda: SoftmaxHead(16, CLASSES, form="paired"),
}


def uneven(module, narrowest=0.0126):
    """Gaussians as after training, some of them narrow, in evaluation mode."""
    for part in module.modules():
        if isinstance(part, GaussianLogits):
            classes = part.num_classes
            part.set_gaussians(torch.randn(classes), torch.linspace(narrowest, 3, classes, dtype=torch.float64))
    return module.eval()


def close(a, b, bound):
    torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b).detach(), rtol=0, atol=bound)


def run_onnx(path, *values):
    """The first output of an ONNX file."""
    session = onnxruntime.InferenceSession(path)
    feed = {given.name: v.numpy() for given, v in zip(session.get_inputs(), values, strict=True)}
    return session.run(None, feed)[0]


# -------------------------------------------------------------------------------------------------------- torch.compile


@pytest.mark.parametrize("name", ["timm resnet18", "timm convnext_atto"])
def test_models_compile_without_graph_breaks(name):
    torch.compiler.reset()
    model, inputs = model_and_inputs(name, batch=2)
    uneven(attach(model, lam=2.0))
    with torch.no_grad():
        close(torch.compile(model, fullgraph=True, backend="aot_eager")(inputs), model(inputs), 1e-5)


@pytest.mark.parametrize("name", ["transformers ViT", "transformers Bert"])
def test_models_train_compiled_without_graph_breaks(name):
    """Two training steps of a compiled model are those of the model."""
    torch.compiler.reset()
    model, inputs = model_and_inputs(name, batch=3)
    attach(model, lam=2.0)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    y = torch.tensor([0, 1, 2])
    for m, call in ((model, compiled), (twin, twin)):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(outputs(call, inputs), y).backward()
            optimizer.step()
    close(head_of(model).mu.detach(), head_of(twin).mu, 1e-6)
    close(head_of(model).sigma.detach(), head_of(twin).sigma, 1e-6)
    close(outputs(compiled, inputs).detach(), outputs(twin, inputs), 1e-5)


@pytest.mark.parametrize("kind", ["learned", "fixed", "tracked"])
def test_compiled_for_any_batch_size(kind):
    torch.compiler.reset()
    model = uneven(attach(mlp(), lam=2.0, gaussians=kind)).train(kind != "tracked")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (4, 7, 2):
        x = torch.randn(batch, 8)
        close(compiled(x).detach(), model(x), 1e-6)


HEADER = Path(sysconfig.get_path("include"), "Python.h")
COMPILER = HEADER.is_file() and any(map(shutil.which, ("c++", "g++", "clang++")))
NO_COMPILER = "inductor needs a C++ compiler and Python's headers"


# the first runs inductor's graph without generating code
@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager_decomp_partition",
        pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.skipif(not COMPILER, reason=NO_COMPILER)]),
    ],
)
def test_inductor(backend):
    torch.compiler.reset()
    head = uneven(GSoftmaxHead(16, CLASSES, lam=2.0))
    h = torch.randn(6, 16)
    with torch.no_grad():
        close(torch.compile(head, fullgraph=True, backend=backend)(h), head(h), 1e-5)


# --------------------------------------------------------------------------------------------------- torch.export, ONNX


@pytest.mark.parametrize("name", MODELS)
def test_exported_models_equal_eager_ones(name):
    model, inputs = model_and_inputs(name, batch=3)
    uneven(attach(model, lam=2.0))
    program = to_program(model, inputs).module()
    for batch in (1, 5):
        _, inputs = model_and_inputs(name, batch)
        z = program(**inputs) if isinstance(inputs, dict) else program(inputs)
        close(z, outputs(model, inputs), 1e-6)


@pytest.mark.parametrize("kind", HEADS)
def test_torch_export_takes_heads_as_they_are(kind):
    """Without folding, in evaluation and in training mode."""
    head = uneven(HEADS[kind]())
    batch = torch.export.Dim("batch")
    for mode in (False,) if kind == "tracked" else (False, True):  # a tracked head in training mode moves by itself
        head.train(mode)
        program = torch.export.export(head, (torch.randn(3, 16),), dynamic_shapes=({0: batch},))
        h = torch.randn(5, 16)
        close(program.module()(h).detach(), head(h), 1e-6)


@pytest.mark.parametrize("kind", HEADS)
def test_onnx_heads_equal_eager_ones(kind, tmp_path):
    # dz/dx is 1 + 0.4 lam / sigma at most, and multiplies the rounding in which two matrix products differ
    head = uneven(HEADS[kind](), narrowest=0.1)
    to_onnx(head, torch.randn(3, 16), tmp_path / "head.onnx")
    assert onnxruntime.InferenceSession(tmp_path / "head.onnx").get_inputs()[0].shape == ["batch", 16]
    for batch in (1, 3, 200):
        h = torch.randn(batch, 16)
        close(run_onnx(tmp_path / "head.onnx", h), head(h), 1e-5)


def test_the_onnx_layer_equals_the_eager_one_on_the_same_outputs(tmp_path):
    layer = uneven(GaussianLogits(CLASSES, lam=4.0))
    to_onnx(layer, torch.randn(3, CLASSES), tmp_path / "layer.onnx")
    x = torch.randn(1000, CLASSES) * 4
    close(run_onnx(tmp_path / "layer.onnx", x), layer(x), 1e-5)


def test_onnx_for_one_batch_size(tmp_path):
    to_onnx(HEADS["gsoftmax"](), torch.randn(1, 16), tmp_path / "head.onnx", dynamic_batch=False)
    assert onnxruntime.InferenceSession(tmp_path / "head.onnx").get_inputs()[0].shape == [1, 16]


@pytest.mark.parametrize("name", ["torchvision resnet18", "transformers Bert"])
def test_onnx_models_equal_eager_ones(name, tmp_path):
    model, inputs = model_and_inputs(name, batch=3)
    uneven(attach(model, lam=2.0))
    to_onnx(model, inputs, tmp_path / "model.onnx", output_names=["z"])
    assert [z.name for z in onnxruntime.InferenceSession(tmp_path / "model.onnx").get_outputs()] == ["z"]
    _, inputs = model_and_inputs(name, batch=5)
    values = inputs.values() if isinstance(inputs, dict) else [inputs]
    close(run_onnx(tmp_path / "model.onnx", *values), outputs(model, inputs), 1e-5)


def test_plain_onnx_export_takes_the_attached_model(tmp_path):
    """torch.onnx.export itself, as people call it."""
    model = uneven(attach(mlp(), lam=2.0))
    options = {"dynamo": True, "verbose": False, "dynamic_shapes": ({0: torch.export.Dim("batch")},)}
    torch.onnx.export(model, (torch.randn(3, 8),), tmp_path / "model.onnx", **options)
    x = torch.randn(5, 8)
    close(run_onnx(tmp_path / "model.onnx", x), model(x), 1e-5)


def test_a_batch_of_one_is_no_example_of_any_batch():
    with pytest.raises(ValueError, match=r"example must be a batch of two or more, .* got shapes \[\(1, 16\)\]"):
        to_program(HEADS["gsoftmax"](), torch.randn(1, 16))
    program = to_program(HEADS["gsoftmax"](), torch.randn(1, 16), dynamic_batch=False)
    assert program.module()(torch.randn(1, 16)).shape == (1, CLASSES)


# ----------------------------------------------------------------------------------------------------------------- fold


def ours(module):
    return [m for m in module.modules() if type(m).__module__.startswith("gsoftmax")]


@pytest.mark.parametrize("kind", HEADS)
def test_folded_heads_are_plain_and_equal(kind):
    head = uneven(HEADS[kind]()).train()
    folded = fold(head)
    assert not ours(folded) and not folded.training and head.training
    h = torch.randn(200, 16) * 4
    z = head.eval()(h)
    close(folded(h).detach(), z, 1e-6)
    assert torch.equal(folded(h).argmax(-1), z.argmax(-1))
    plain = kind in ("softmax", "lsoftmax", "gsoftmax without the term")
    assert (type(folded) is nn.Linear) == plain
    with torch.no_grad():  # a copy: what is deployed does not move with further training
        head.weight.zero_()
    close(folded(h).detach(), z, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_folding_keeps_the_precision(dtype):
    head = uneven(HEADS["gsoftmax"]()).to(dtype)
    h = torch.randn(50, 16, dtype=dtype)
    z = fold(head)(h)
    assert z.dtype == head(h).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    close(z.detach(), head(h), 1e-6)


def test_folded_layers_take_maps():
    layer = uneven(GaussianLogits(CLASSES, lam=2.0))
    for shape in ((4, CLASSES), (4, CLASSES, 6), (4, CLASSES, 3, 2)):
        x = torch.randn(shape)
        close(fold(layer)(x), layer(x), 1e-6)
    x = torch.full((2, CLASSES), -torch.inf)
    assert torch.equal(fold(layer)(x), x)
    assert isinstance(fold(GaussianLogits(CLASSES, lam=0.0)), nn.Identity)


def test_folded_losses_give_their_logits():
    x = torch.randn(4, 2 * CLASSES)
    for loss in (GSoftmaxLoss(2 * CLASSES, lam=2.0), MultiLabelGSoftmaxLoss(CLASSES, lam=2.0)):
        close(fold(uneven(loss))(x), loss.logits(x), 1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_folded_models_are_plain_and_equal(name):
    model, inputs = model_and_inputs(name)
    uneven(attach(model, lam=2.0)).train()
    folded = fold(model)
    assert model.training and ours(model) and not ours(folded)
    model.eval()
    close(outputs(folded, inputs), outputs(model, inputs), 1e-6)  # by the formula, and by the kernel
    assert not ours(fold(folded))


def test_folding_leaves_other_models_as_they_are():
    x, model = torch.randn(4, 8), mlp()
    assert torch.equal(fold(model)(x), model(x))
    shared = nn.Module()
    shared.a = shared.b = GSoftmaxHead(8, 3)
    folded = fold(shared)
    assert folded.a is folded.b and not ours(folded)


ELSEWHERE = """
import sys
sys.modules["gsoftmax"] = None  # importing it fails
import torch
folder = sys.argv[1]
x = torch.load(f"{folder}/x.pt")
model = torch.load(f"{folder}/model.pt", weights_only=False)
program = torch.export.load(f"{folder}/model.pt2").module()
assert "gsoftmax" not in str(program.graph)
for module in (model, program):
    z = module(x)
    torch.testing.assert_close(z, torch.load(f"{folder}/z.pt"), rtol=1e-6, atol=1e-6)
try:
    import gsoftmax
except ImportError:
    print("equal")
"""


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.9 reads its own files so
@pytest.mark.parametrize("process", ["this one", pytest.param("another one", marks=pytest.mark.slow)])
def test_deployed_files_need_no_package_of_ours(process, tmp_path, monkeypatch, capsys):
    model = uneven(attach(mlp(), lam=2.0))
    x = torch.randn(5, 8)
    torch.save(x, tmp_path / "x.pt")
    torch.save(model(x).detach(), tmp_path / "z.pt")
    torch.save(fold(model), tmp_path / "model.pt")
    torch.export.save(to_program(model, torch.randn(2, 8)), tmp_path / "model.pt2")
    if process == "this one":
        for name in list(sys.modules):
            if name.split(".")[0] == "gsoftmax":
                monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setattr(sys, "argv", ["", str(tmp_path)])
        exec(ELSEWHERE, {})
        assert capsys.readouterr().out == "equal\n"
    else:
        done = subprocess.run([sys.executable, "-c", ELSEWHERE, tmp_path], capture_output=True, text=True)
        assert done.stdout == "equal\n", done.stderr
