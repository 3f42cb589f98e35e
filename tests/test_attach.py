"""`attach` on common models: what stays the same, what trains, what is rejected."""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import logging
import warnings

import processes
import pytest
import torch
import torch.nn.functional as F
from processes import one_thread  # noqa: F401
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from gsoftmax import GSoftmaxHead, GSoftmaxLoss, LSoftmaxHead, SoftmaxHead, check_optimised, param_groups
from gsoftmax import functional as G
from gsoftmax.attachment import attach, attached_loss, head_of

CLASSES = 5


class _Lazily:
    """A library on first use: the processes that this file starts need none of them."""

    def __init__(self, name):
        self.name = name

    def __getattr__(self, attribute):
        return getattr(importlib.import_module(self.name), attribute)


timm, timm_data, timm_loss, timm_utils = (_Lazily(name) for name in ("timm", "timm.data", "timm.loss", "timm.utils"))
torchvision, transformers = _Lazily("torchvision"), _Lazily("transformers")

TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": CLASSES}


def _bert():
    return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=50, **TINY, **STILL))


def _gpt2():
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=1, n_head=2, num_labels=CLASSES, pad_token_id=0, **still
    )
    return transformers.GPT2ForSequenceClassification(config)


def _vgg11():
    """Without most of the 120 million parameters of its hidden layers."""
    with torch.device("meta"):
        model = torchvision.models.vgg11(dropout=0.0, init_weights=False)
    model.classifier[0], model.classifier[3] = nn.Linear(25088, 32), nn.Linear(32, 64)
    model.classifier[6] = nn.Linear(64, CLASSES)
    for layer in model.features:
        if isinstance(layer, nn.Conv2d):
            layer.to_empty(device="cpu").reset_parameters()
    return model


def _hf_vit():
    config = transformers.ViTConfig(image_size=32, patch_size=8, **TINY, **STILL)
    return transformers.ViTForImageClassification(config)


# what makes it, and the name of its classifier
MODELS = {
    "timm resnet18": (lambda: timm.create_model("resnet18", num_classes=CLASSES), "fc"),
    "timm vit_tiny": (lambda: timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES, img_size=32), "head"),
    "timm convnext_atto": (lambda: timm.create_model("convnext_atto", num_classes=CLASSES), "head.fc"),
    "torchvision resnet18": (lambda: torchvision.models.resnet18(num_classes=CLASSES), "fc"),
    "torchvision vgg11": (_vgg11, "classifier.6"),
    "torchvision mobilenet": (
        lambda: torchvision.models.mobilenet_v3_small(num_classes=CLASSES, dropout=0.0),
        "classifier.3",
    ),
    "transformers ViT": (_hf_vit, "classifier"),
    "transformers Bert": (_bert, "classifier"),
    "transformers GPT-2": (_gpt2, "score"),
}


@functools.cache
def _pristine(name):
    torch.manual_seed(0)
    return MODELS[name][0]().eval()


def model_and_inputs(name, batch=8):
    """A fresh copy, and keyword or positional inputs."""
    generator = torch.Generator().manual_seed(1)
    if name in ("transformers Bert", "transformers GPT-2"):
        inputs = {"input_ids": torch.randint(1, 50, (batch, 7), generator=generator)}
    else:
        images = torch.randn(batch, 3, 32, 32, generator=generator)
        inputs = {"pixel_values": images} if name.startswith("transformers") else images
    return copy.deepcopy(_pristine(name)), inputs


def outputs(model, inputs):
    return model(**inputs).logits if isinstance(inputs, dict) else model(inputs)


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def steps(model, optimizer, n=1, criterion=F.cross_entropy):
    x, y = torch.randn(8, 8), torch.arange(8) % CLASSES
    for _ in range(n):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()


# ----------------------------------------------------------------------------------------------- the models people have


@pytest.mark.parametrize("kind", ["gsoftmax", "softmax"])
@pytest.mark.parametrize("name", MODELS)
def test_without_the_term_the_outputs_are_the_old_ones(name, kind):
    model, inputs = model_and_inputs(name)
    old, state = outputs(model, inputs), torch.get_rng_state()
    assert attach(model, kind, **({"lam": 0.0} if kind == "gsoftmax" else {})) is model
    assert torch.equal(outputs(model, inputs), old)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.get_submodule(MODELS[name][1]) is head_of(model)


@pytest.mark.parametrize("name", MODELS)
def test_the_term_is_added_to_the_outputs(name):
    model, inputs = model_and_inputs(name)
    x = outputs(model, inputs).detach()
    mu, sigma = torch.randn(CLASSES), torch.rand(CLASSES) + 0.1
    attach(model, lam=2.0, mu=mu, sigma=sigma)
    z = x + 2.0 * torch.special.ndtr((x - mu) / sigma)
    torch.testing.assert_close(outputs(model, inputs), z, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_lowers_the_loss_and_moves_the_gaussians(name):
    model, inputs = model_and_inputs(name)
    y = torch.arange(8) % CLASSES
    attach(model, lr_mult=10.0).train()
    head = head_of(model)
    assert head.training
    before = head.mu.detach().clone(), head.sigma.detach().clone()
    optimizer = torch.optim.SGD(param_groups(model, lr=0.01, weight_decay=1e-4))
    first = F.cross_entropy(outputs(model, inputs), y)
    first.backward()
    optimizer.step()
    with torch.no_grad():
        assert F.cross_entropy(outputs(model, inputs), y) < first
    assert (head.mu != before[0]).all() and (head.sigma != before[1]).all()


@pytest.mark.parametrize("name", MODELS)
def test_state_round_trips(name):
    model, inputs = model_and_inputs(name)
    old_keys = set(model.state_dict())
    attach(model, sigma=2.0)
    head_of(model).gaussians.set_gaussians(torch.randn(CLASSES), torch.rand(CLASSES) + 0.1)
    state = model.state_dict()
    place = MODELS[name][1]
    assert set(state) == old_keys | {f"{place}.gaussians.mu", f"{place}.gaussians.rho"}
    other, _ = model_and_inputs(name)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    attach(other).load_state_dict(state)
    assert torch.equal(outputs(other, inputs), outputs(model, inputs))


@pytest.mark.parametrize("name", MODELS)
def test_another_number_of_classes(name):
    model, inputs = model_and_inputs(name, batch=2)
    old = head_of(attach(model, "softmax")).weight
    attach(model, "gsoftmax", 3)
    head = head_of(model)
    assert outputs(model, inputs).shape == (2, 3)
    assert head.num_classes == 3 and head.mu.shape == (3,)
    assert getattr(model, "num_classes", 3) == 3 and getattr(model, "num_labels", 3) == 3
    if name.startswith("transformers"):
        assert model.config.num_labels == 3 and len(model.config.id2label) == 3
        assert model(**inputs, labels=torch.tensor([0, 2])).loss.isfinite()
    # as nn.Linear: uniform within 1 / sqrt(features)
    assert head.weight.shape == (3, old.shape[1])
    assert 0.9 < head.weight.abs().max() * old.shape[1] ** 0.5 <= 1.0


@pytest.mark.parametrize("name", ["transformers ViT", "transformers Bert", "transformers GPT-2"])
def test_transformers_compute_the_gsoftmax_loss_themselves(name):
    model, inputs = model_and_inputs(name)
    x, y = outputs(model, inputs), torch.arange(8) % CLASSES
    attach(model, lam=2.0, sigma=0.3)
    loss = model(**inputs, labels=y).loss
    torch.testing.assert_close(loss, G.gsoftmax_cross_entropy(x, y, 0.0, 0.3, 2.0))


def test_transformers_files_hold_the_gaussians(tmp_path):
    model, inputs = model_and_inputs("transformers Bert")
    attach(model, lam=2.0).save_pretrained(tmp_path)
    other = attach(transformers.BertForSequenceClassification(model.config).eval(), lam=2.0)
    from safetensors.torch import load_file

    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(outputs(other, inputs), outputs(model, inputs))


# ------------------------------------------------------------------------------------- what people do with their models


def test_the_criterion_stays_the_users():
    """Label smoothing, class weights and soft targets on z are those options of the G-softmax loss."""
    model, x = mlp(), torch.randn(8, 8)
    raw = model(x)
    attach(model, lam=2.0, sigma=0.3)
    soft, hard, weight = torch.rand(8, CLASSES).softmax(1), torch.arange(8) % CLASSES, torch.rand(CLASSES)
    for target, options in [
        (hard, {"label_smoothing": 0.1}),
        (hard, {"weight": weight}),
        (soft, {}),
        (soft, {"label_smoothing": 0.1, "weight": weight}),
    ]:
        expected = G.gsoftmax_cross_entropy(raw, target, 0.0, 0.3, 2.0, **options)
        torch.testing.assert_close(nn.CrossEntropyLoss(**options)(model(x), target), expected)
    mixup = timm_data.Mixup(mixup_alpha=1.0, num_classes=CLASSES, label_smoothing=0.1)
    images, mixed = mixup(torch.randn(8, 1, 2, 4), hard)
    loss = timm_loss.SoftTargetCrossEntropy()(model(images.flatten(1)), mixed)
    head = head_of(model)
    torch.testing.assert_close(loss, head.loss(model[:2](images.flatten(1)), mixed))


def test_the_parameters_are_the_old_ones():
    model = mlp()
    weight, bias = model[2].weight, model[2].bias
    weight.requires_grad_(False)
    attach(model)
    assert head_of(model).weight is weight and head_of(model).bias is bias and not weight.requires_grad


def test_old_checkpoints_load():
    model, x = mlp(), torch.randn(4, 8)
    attached = attach(mlp(), lam=0.0)
    missing = attached.load_state_dict(model.state_dict(), strict=False)
    assert set(missing.missing_keys) == {"2.gaussians.mu", "2.gaussians.rho"} and not missing.unexpected_keys
    assert torch.equal(attached(x), model(x))


def test_hooks_on_the_classifier_stay():
    model, seen = mlp(), []
    handle = model[2].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    attach(model)
    gc.collect()
    model(torch.randn(4, 8))
    assert [h.shape for h in seen] == [(4, 16)]
    handle.remove()
    model(torch.randn(4, 8))
    assert len(seen) == 1


def test_copies_are_independent_and_averages_average():
    model = attach(mlp())
    twin = copy.deepcopy(model)
    average = AveragedModel(model)
    ema = timm_utils.ModelEmaV3(model, decay=0.75)
    start = head_of(model).mu.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    steps(model, optimizer, 3)
    average.update_parameters(model)
    one = head_of(model).mu.detach().clone()
    ema.update(model)
    torch.testing.assert_close(head_of(ema.module).mu, 0.75 * start + 0.25 * one)
    steps(model, optimizer, 3)
    average.update_parameters(model)
    two = head_of(model).mu.detach().clone()
    torch.testing.assert_close(head_of(average).mu, (one + two) / 2)
    assert (one != two).all()
    assert torch.equal(head_of(twin).mu, start)
    head_of(twin).lam = 3.0
    assert head_of(model).lam == 1.0


@pytest.mark.parametrize("name", [n for n in MODELS if not n.startswith("torchvision")])
def test_gradient_checkpointing_changes_nothing(name):
    grads = []
    for checkpointing in (False, True):
        model, inputs = model_and_inputs(name, batch=2)
        attach(model).train()
        if checkpointing and name.startswith("timm"):
            model.set_grad_checkpointing(True)
        elif checkpointing:
            model.gradient_checkpointing_enable()
            assert model.is_gradient_checkpointing
        F.cross_entropy(outputs(model, inputs), torch.tensor([0, 1])).backward()
        grads.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["timm resnet18", "transformers Bert"])
def test_autocast(name):
    """The linear layer runs in bfloat16, the term in float32."""
    model, inputs = model_and_inputs(name)
    attach(model, "softmax")
    with torch.autocast("cpu", torch.bfloat16):
        x = outputs(model, inputs)
    attach(model, "gsoftmax", lam=2.0)
    with torch.autocast("cpu", torch.bfloat16):
        z = outputs(model, inputs)
        F.cross_entropy(z, torch.arange(8) % CLASSES).backward()
    assert x.dtype == torch.bfloat16 and z.dtype == torch.float32
    torch.testing.assert_close(z, x.float() + 2 * torch.special.ndtr(x.float()))
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert (head_of(model).mu.grad != 0).all()


def test_attaching_again_changes_the_kind():
    model, x = mlp(), torch.randn(4, 8)
    old = model(x)
    attach(model, lam=3.0)
    attach(model, "softmax")
    assert type(head_of(model)) is SoftmaxHead and torch.equal(model(x), old)


def test_multilabel_heads():
    model, x = mlp(), torch.randn(4, 8)
    old = model(x)
    attach(model, "gsoftmax", form="msml", lam=0.0)
    assert torch.equal(model(x), old)
    attach(model, "gsoftmax", 7, form="paired")
    target = torch.randint(2, (4, 7))
    assert model(x).shape == (4, 2, 7)
    torch.testing.assert_close(attached_loss(model, x, target), head_of(model).loss(model[:2](x), target))


def test_a_bare_linear_layer_and_one_under_two_names():
    linear, h = nn.Linear(8, 3), torch.randn(4, 8)
    head = attach(linear, lam=0.0)
    assert isinstance(head, GSoftmaxHead) and torch.equal(head(h), linear(h))
    model = nn.Module()
    model.a = model.b = nn.Linear(8, 3)
    attach(model)
    assert model.a is model.b and isinstance(model.a, GSoftmaxHead)


def test_device_dtype_and_mode_follow_the_classifier():
    model = attach(mlp().double().eval())
    assert head_of(model).mu.dtype == torch.float64 and not head_of(model).gaussians.training
    with torch.device("meta"):
        model = attach(mlp())
    assert head_of(model).mu.is_meta and model(torch.zeros(2, 8, device="meta")).shape == (2, CLASSES)


def test_it_says_what_it_replaced(caplog):
    with caplog.at_level(logging.INFO, "gsoftmax"):
        attach(mlp())
    assert "replaced 2 of Sequential by GSoftmaxHead" in caplog.text


# ------------------------------------------------------------------------------------------------ the bias of L-softmax


def test_large_margin_head_drops_a_trained_bias_with_a_warning():
    model, x = mlp(), torch.randn(4, 8)
    weight = model[2].weight
    expected = F.linear(model[:2](x), weight)
    with pytest.warns(UserWarning, match="L-softmax has no bias: the bias of 2 is dropped") as record:
        attach(model, "lsoftmax", margin=3)
    assert record[0].filename == __file__
    head = head_of(model)
    assert isinstance(head, LSoftmaxHead) and head.weight is weight and head.bias is None and int(head.steps) == 0
    assert torch.equal(model(x), expected)


def test_large_margin_head_is_silent_where_nothing_is_lost():
    model = mlp()
    nn.init.zeros_(model[2].bias)
    attach(model, "lsoftmax")
    attach(mlp(), "lsoftmax", num_classes=3)
    attach(timm.create_model("resnet18", num_classes=5), "lsoftmax", num_classes=3)
    attach(nn.Sequential(nn.Linear(8, 3, bias=False)), "lsoftmax")
    assert attach(mlp(), "softmax", bias=False)[2].bias is None
    assert torch.equal(attach(nn.Linear(8, 3, bias=False), "softmax", bias=True).bias, torch.zeros(3))


# -------------------------------------------------------------------------------------------------------- attached_loss


@pytest.mark.parametrize("kind", ["softmax", "gsoftmax", "lsoftmax"])
@pytest.mark.parametrize("name", ["timm resnet18", "transformers Bert"])
def test_attached_loss_is_the_loss_of_the_head(name, kind):
    model, inputs = model_and_inputs(name)
    head = head_of(attach(model, kind, 4))
    y, h = torch.arange(8) % 4, []
    with head.register_forward_pre_hook(lambda module, args: h.append(args[0])):
        z = outputs(model, inputs).detach()
    for options in ({}, {"label_smoothing": 0.1}, {"reduction": "none"}):
        loss, logits = attached_loss(model, inputs, y, return_logits=True, **options)
        torch.testing.assert_close(loss, head.loss(h[0], y, **options))
        torch.testing.assert_close(logits, z)
    assert not logits.requires_grad and "forward" not in vars(head)
    given = transformers.BatchEncoding(inputs) if isinstance(inputs, dict) else (inputs,)
    attached_loss(model, given, y).backward()
    assert head.weight.grad.abs().sum() > 0


def test_attached_loss_puts_the_margin_on():
    model = attach(mlp(), "lsoftmax", 4, margin=4, anneal_start=0.0)
    x, y = torch.randn(8, 8), torch.arange(8) % 4
    plain = F.cross_entropy(model(x), y)
    assert attached_loss(model, x, y) > plain + 0.1
    assert int(head_of(model).steps) == 1
    model.eval()
    torch.testing.assert_close(attached_loss(model, x, y), plain)


def test_attached_loss_steps_tracked_gaussians_once():
    model, twin = (attach(mlp(), gaussians="tracked", momentum=0.5) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    x, y = torch.randn(8, 8), torch.arange(8) % CLASSES
    attached_loss(model, x, y, return_logits=True)
    twin(x)
    torch.testing.assert_close(head_of(model).mu, head_of(twin).mu)
    assert (head_of(model).mu != 0).all()


def test_attached_loss_restores_the_model_after_an_error():
    model = attach(mlp())
    with pytest.raises(ValueError, match="target must lie between 0 and 4"):
        attached_loss(model, torch.randn(2, 8), torch.tensor([0, 9]))
    assert model(torch.randn(2, 8)).shape == (2, CLASSES)


@pytest.mark.skipif(torch.__version__ < (2, 10), reason="Dynamo of torch 2.9 does not see a forward that was replaced")
def test_attached_loss_compiles():
    torch.compiler.reset()
    model = attach(mlp(), "lsoftmax", 4)
    x, y = torch.randn(8, 8), torch.arange(8) % 4
    expected = attached_loss(model, x, y)
    head_of(model).steps.zero_()
    compiled = torch.compile(lambda x, y: attached_loss(model, x, y), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, y), expected)


def test_attached_loss_mistakes():
    model, inputs = model_and_inputs("transformers GPT-2", batch=2)
    with pytest.raises(ValueError, match=r"GPT2.* has no gsoftmax head: call attach\(model, ...\) first"):
        attached_loss(model, inputs, torch.tensor([0, 1]))
    attach(model)
    with pytest.raises(ValueError, match=r"h of shape \(2, 7, 16\) for a target of \(2,\): .* apply the loss to"):
        attached_loss(model, inputs, torch.tensor([0, 1]))

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 3)

        def forward(self, x):
            return self.fc(x) + self.fc(-x)

    with pytest.raises(ValueError, match="forward of Twice called its head 2 times"):
        attached_loss(attach(Twice()), torch.randn(2, 8), torch.tensor([0, 1]))


# -------------------------------------------------------------------------------------------------- which one is chosen


def test_distilled_models_have_two_heads():
    model = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=3, img_size=32, depth=1).eval()
    x = torch.randn(2, 3, 32, 32)
    old = model(x)
    attach(model, lam=0.0)
    assert torch.equal(model(x), old)
    assert isinstance(head_of(model, "head"), GSoftmaxHead) and isinstance(head_of(model, "head_dist"), GSoftmaxHead)
    with pytest.raises(ValueError, match="Distilled has 2 heads, head, head_dist: choose one with name="):
        head_of(model)
    with pytest.raises(ValueError, match="Distilled has no head at name='fc'; its heads are head, head_dist"):
        head_of(model, "fc")


def test_classifiers_made_of_parts():
    with torch.device("meta"):
        model = attach(timm.create_model("levit_128", num_classes=3))
        heads = [path for path, m in model.named_modules() if isinstance(m, SoftmaxHead)]
        assert heads == ["head.linear", "head_dist.linear"]
        model = attach(timm.create_model("efficientvim_m1", num_classes=3))
        assert sum(isinstance(m, SoftmaxHead) for m in model.modules()) == 4
        model = attach(timm.create_model("repvit_m0_9", num_classes=3))
        heads = [path for path, m in model.named_modules() if isinstance(m, SoftmaxHead)]
        assert heads == ["head.head.l", "head.head_dist.l"]
        # timm's own subclass of nn.Linear, with a forward that computes the same
        model = attach(timm.create_model("mobilenetv3_small_050", num_classes=3))
        assert type(head_of(model)) is GSoftmaxHead
    model = timm.create_model("mobilenetv3_small_050", num_classes=3)
    assert type(model.classifier) is not nn.Linear
    assert type(attach(model).classifier) is GSoftmaxHead


def test_timm_without_a_classifier_gets_one_and_keeps_its_pooling():
    model = timm.create_model("resnet18", num_classes=0)
    with pytest.raises(
        ValueError, match=r"ResNet has no classifier to replace, its get_classifier\(\) returns an Identity"
    ):
        attach(model)
    assert attach(model, num_classes=3)(torch.randn(2, 3, 32, 32)).shape == (2, 3) and model.num_classes == 3
    for classes in (0, 5):
        model = attach(timm.create_model("resnet18", num_classes=classes, global_pool="max"), num_classes=3)
        assert model.global_pool.pool_type == "max" and model.num_classes == 3
    attach(timm.create_model("resnet18", num_classes=0), "lsoftmax", num_classes=3)  # no trained bias to warn about


def test_attention_projections_are_not_classifiers():
    model = nn.Module()
    model.fc, model.attention = nn.Linear(8, 3), nn.MultiheadAttention(8, 2)
    assert type(attach(model).fc) is GSoftmaxHead


def test_the_models_own_count_decides():
    """num_classes of the model finds a classifier that is not registered last."""
    model = nn.Module()
    model.fc, model.projection, model.num_classes = nn.Linear(8, 3), nn.Linear(8, 8), 3
    attach(model, num_classes=4)
    assert type(model.fc) is GSoftmaxHead and model.num_classes == 4 and type(model.projection) is nn.Linear


def test_name_picks_any_linear_layer():
    model = attach(mlp(), name="0")
    assert type(model[0]) is GSoftmaxHead and type(model[2]) is nn.Linear
    model = attach(mlp(), "softmax", name=("0", "2"))
    assert type(model[0]) is SoftmaxHead and type(model[2]) is SoftmaxHead


class _Cosine(nn.Linear):
    def forward(self, h):
        return F.linear(F.normalize(h), F.normalize(self.weight))


def _side_by_side():
    return nn.ModuleDict({"classes": nn.Linear(8, 3), "boxes": nn.Linear(8, 12)})


def _patched():
    linear = nn.Linear(8, 3)
    linear.forward = linear.forward
    return nn.Sequential(linear)


def _normalized():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 3)))


def _teacher():
    config = transformers.DeiTConfig(image_size=32, patch_size=16, **TINY, **STILL)
    return transformers.DeiTForImageClassificationWithTeacher(config)


def _language_model():
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=50, **TINY))


AFTER = r"\(nn.Sequential\(model, GaussianLogits\(num_classes\)\) adds the term after it\)"
SEVERAL = "has several linear layers that may be its classifier: "
# a model, options of attach, and the error
MISTAKES = {
    "not a model": (lambda: 3, {}, "model must be an nn.Module, got int"),
    "head": (mlp, {"head": "triplet"}, "head must be one of softmax, lsoftmax, gsoftmax, .*, zlpr, got 'triplet'"),
    "no classes": (mlp, {"num_classes": 0}, "num_classes must be a positive integer, got 0"),
    "classes": (mlp, {"num_classes": "ten"}, "num_classes must be a positive integer, got 'ten'"),
    "option": (mlp, {"lamda": 2.0}, "unexpected keyword argument 'lamda'"),
    "length": (mlp, {"mu": [0.0, 1.0]}, r"mu must be a number or 5 values, got shape \(2,\)"),
    "form": (mlp, {"head": "lsoftmax", "form": "paired"}, "LSoftmaxHead has no multi-label form, got form='paired'"),
    "name": (mlp, {"name": "fc"}, "name='fc' is no module of Sequential; its last linear layers: 0, 2"),
    "no name": (mlp, {"name": ()}, r"name must name at least one module of Sequential, got \(\)"),
    "other module": (
        mlp,
        {"name": "1"},
        "an nn.Linear, and '1' of Sequential is a ReLU; choose another module",
    ),
    "nothing": (nn.Sequential, {}, "found no nn.Linear in Sequential; it has no layer with weights; choose the module"),
    "convolution": (
        lambda: torchvision.models.squeezenet1_0(),
        {},
        f"no nn.Linear with model.num_classes=1000 outputs in SqueezeNet; .* is classifier.1, a Conv2d {AFTER}",
    ),
    "timm convolution": (
        lambda: timm.create_model("resnetv2_18"),
        {},
        f"'head.fc' of ResNetV2 is a Conv2d {AFTER}",
    ),
    "teacher": (
        _teacher,
        {},
        SEVERAL + r"cls_classifier \(5 outputs\), distillation_classifier \(5 outputs\); choose one, or several, with",
    ),
    "language model": (
        _language_model,
        {},
        "no nn.Linear with config.num_labels=2 outputs in BertForMaskedLM; .* is cls.predictions.decoder, a Linear",
    ),
    "side by side": (_side_by_side, {}, SEVERAL + r"classes \(3 outputs\), boxes \(12 outputs\); choose"),
    "two counts": (mlp, {"num_classes": 16}, SEVERAL + r"0 \(16 outputs\), 2 \(5 outputs\); choose"),
    "own forward": (lambda: nn.Sequential(_Cosine(8, 3)), {}, "'0' of Sequential is a _Cosine with a custom forward"),
    "computed weight": (_normalized, {}, "'0' of Sequential is a ParametrizedLinear whose weight is computed from"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), {}, "is a LazyLinear without weights yet"),
    "patched": (_patched, {}, "is a Linear whose forward was replaced by another library: attach first"),
    "wrapped": (lambda: nn.DataParallel(mlp()), {}, "model must be the plain module, got a DataParallel: attach first"),
    "compiled": (lambda: torch.compile(mlp()), {}, "got an OptimizedModule: attach first, then wrap or compile"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(case):
    make, options, words = MISTAKES[case]
    with pytest.raises((ValueError, TypeError), match=words) as error:
        attach(make(), **options)
    assert "\n" not in str(error.value)


def test_a_mistake_does_not_change_the_model():
    model = timm.create_model("resnet18", num_classes=5)
    fc = model.fc
    for wrong in ({"lamda": 2.0}, {"mu": [0.0, 1.0]}, {"sigma": -1.0}):
        with pytest.raises((ValueError, TypeError)):
            attach(model, "gsoftmax", 3, **wrong)
        assert model.fc is fc and model.num_classes == 5
    model = timm.create_model("resnetv2_18", num_classes=5)
    fc = model.head.fc
    with pytest.raises(ValueError, match="'head.fc' of ResNetV2 is a Conv2d"):
        attach(model, "gsoftmax", 3)
    assert model.head.fc is fc and model.num_classes == 5


# ------------------------------------------------------------------------------------------------------ optimizer check


def _sgd(*parts):
    return torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)


def test_gaussians_that_no_optimizer_holds_are_named():
    model = mlp()
    optimizer = _sgd(model)  # built before attaching: it holds the weights but not the Gaussians
    attach(model)
    with pytest.warns(
        UserWarning, match=r"^no optimizer holds 2.gaussians.mu and 2.gaussians.rho: build it "
    ) as record:
        check_optimised(model, optimizer)
    assert record[0].filename == __file__
    optimizer.add_param_group({"params": [model[2].mu]})
    with pytest.warns(UserWarning, match="^no optimizer holds 2.gaussians.rho: "):
        check_optimised(model, optimizer)
    with pytest.warns(UserWarning, match=r"^no optimizer holds gaussians.mu and gaussians.rho: .* loss.parameters\(\)"):
        check_optimised(GSoftmaxLoss(CLASSES), optimizer)


def _frozen(model):
    head_of(model).gaussians.requires_grad_(False)


# what attach is given, what happens to the model, and the modules of each optimizer
QUIET = {
    "all": ({}, None, [["0", "2"]]),
    "two optimizers": ({}, None, [["0"], ["2"]]),
    "frozen": ({}, _frozen, [["0"]]),
    "fixed": ({"gaussians": "fixed"}, None, [["0"]]),
    "tracked": ({"gaussians": "tracked"}, None, [["0"]]),
    "no Gaussians": ({"head": "softmax"}, None, [["0"]]),
    "copies": ({}, None, [[]]),  # as sharded training makes them
}


@pytest.mark.parametrize("case", QUIET)
def test_no_false_alarm(case):
    options, change, held = QUIET[case]
    model = attach(mlp(), **options)
    if change:
        change(model)
    optimizers = [_sgd(*(model.get_submodule(path) for path in paths), *([] if paths else [mlp()])) for paths in held]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_optimised(model, *optimizers)


def test_making_a_layer_changes_nothing_global():
    hooks = importlib.import_module("torch.optim.optimizer")._global_optimizer_post_hooks
    before = list(hooks)
    model = attach(mlp())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(model, _sgd(model[0]), 20)
    assert list(hooks) == before


# -------------------------------------------------------------------------------------------------------- two processes

CASES = {
    "learned": ("gsoftmax", {"lam": 2.0, "sigma": 0.5}, {}),
    "without the term": ("gsoftmax", {"lam": 0.0}, {}),
    "tracked": ("gsoftmax", {"gaussians": "tracked", "momentum": 0.3}, {}),
    "large margin": ("lsoftmax", {"num_classes": 4, "anneal_start": 1.0}, {"find_unused_parameters": True}),
    "fused": ("gsoftmax", {"lam": 2.0}, {"find_unused_parameters": True}),
}


def _train_steps(case, wrap, rank, world):
    """Gradients of two steps on rows rank, rank + world, ... and what the head then holds."""
    kind, options, ddp_options = CASES[case]
    torch.manual_seed(0)
    model = attach(mlp().double(), kind, **options)
    wrapped = DistributedDataParallel(model, **ddp_options) if wrap else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    grads = []
    for _ in range(2):
        x, y = torch.randn(12, 8, dtype=torch.float64), torch.randint(4, (12,))
        x, y = x[rank::world], y[rank::world]
        optimizer.zero_grad()
        loss = attached_loss(wrapped, x, y) if case in ("large margin", "fused") else F.cross_entropy(wrapped(x), y)
        loss.backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    return grads, model.state_dict()


def _one_of_two(rank, case):
    return _train_steps(case, True, rank, 2)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one_on_the_concatenated_batch(case, tmp_path):
    one = _train_steps(case, False, 0, 1)
    (grads, state), other = processes.run(2, _one_of_two, case, store=tmp_path / "store")
    if CASES[case][1].get("gaussians") != "tracked" and CASES[case][0] == "gsoftmax":
        assert {"2.gaussians.mu", "2.gaussians.rho"} <= set(grads[0])
        moved = (grads[0]["2.gaussians.mu"] != 0).all() and (grads[0]["2.gaussians.rho"] != 0).all()
        assert moved == (case != "without the term")
    torch.testing.assert_close((grads, state), other, rtol=0, atol=0)
    torch.testing.assert_close((grads, state), one, rtol=1e-12, atol=1e-12)
