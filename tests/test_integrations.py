"""Adapters: the Hugging Face Trainer mix-in, the Lightning callback, TensorBoard, each with the real framework."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import re
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import processes
import pytest
import torch
import torch.nn.functional as F
from processes import one_thread  # noqa: F401
from torch import nn

from gsoftmax import GSoftmaxLoss, attach, head_of
from gsoftmax.config import Config
from gsoftmax.geometry import MEASURES, ClassStatistics
from gsoftmax.heads import LSoftmaxHead
from gsoftmax.integrations.tensorboard import log_gaussians
from gsoftmax.integrations.wandb import WandbWriter, open_run
from gsoftmax.runs import RunFolder
from gsoftmax.train import train

CLASSES = 5
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": CLASSES}

# ------------------------------------------------------------------------------------------------------- transformers


def _vit(head="gsoftmax", options=(), **config):
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_channels=1, **TINY, **STILL, **config))
    with torch.no_grad():
        model.classifier.bias.uniform_(-1, 1)
    if head == "gsoftmax":
        options = {"lam": 2.0, "mu": np.linspace(-1, 1, CLASSES), "sigma": 0.5} | dict(options)
    elif head == "lsoftmax":
        model.classifier.bias.detach().zero_()
        options = {"anneal_start": 1.0}
    return attach(model, head, **dict(options))


def _bert(**config):
    from transformers import BertConfig, BertForTokenClassification

    torch.manual_seed(0)
    return attach(BertForTokenClassification(BertConfig(vocab_size=20, **TINY, **STILL, **config)), lam=2.0, sigma=0.5)


def _images(n=12, **more):
    x, y = torch.randn(n, 1, 8, 8), torch.arange(n) % CLASSES
    return [{"pixel_values": x[i], "labels": y[i]} | {k: v[i] for k, v in more.items()} for i in range(n)]


def _batch(rows):
    return {k: torch.stack([row[k] for row in rows]) for k in rows[0]}


def _trainer(model, folder, rows=None, plain=False, **options):
    from transformers import Trainer, TrainingArguments

    from gsoftmax.integrations.transformers import GSoftmaxTrainerMixin

    class Ours(GSoftmaxTrainerMixin, Trainer):
        pass

    trainer_options = {k: options.pop(k) for k in ("optimizers", "compute_loss_func", "eval_dataset") if k in options}
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **{"save_strategy": "no", "max_steps": 1, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"} | options,
    )
    return (Trainer if plain else Ours)(model, arguments, train_dataset=rows, **trainer_options)


def _h(model, inputs):
    """The features that the model passes to its head."""
    seen = []
    handle = head_of(model).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(**inputs)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("head", ["softmax", "gsoftmax", "lsoftmax"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("items", [None, 30, torch.tensor(30)])
def test_trainer_loss_is_the_heads_own(tmp_path, head, smoothing, items):
    model = _vit(head)
    trainer = _trainer(model, tmp_path, label_smoothing_factor=smoothing)
    batch = _batch(_images())
    labels, images = batch["labels"], {"pixel_values": batch["pixel_values"]}
    model.train()
    if head == "lsoftmax":
        head_of(model).steps.fill_(500)
    # the margin depends on how many steps were made
    by_hand = copy.deepcopy(head_of(model)).loss(_h(model, images), labels, label_smoothing=smoothing, reduction="sum")
    by_hand = by_hand / (12 if items is None else 30)
    kept = dict(batch)
    loss = trainer.compute_loss(model, batch, num_items_in_batch=items)
    torch.testing.assert_close(loss, by_hand)
    assert batch.keys() == kept.keys(), "the caller's inputs are the caller's"
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head_of(model).parameters())
    if head != "lsoftmax":  # the same number by Trainer's own way, from the logits
        plain = _trainer(model, tmp_path, plain=True, label_smoothing_factor=smoothing)
        torch.testing.assert_close(loss, plain.compute_loss(model, dict(batch), num_items_in_batch=items))
    else:
        z = model(**images).logits
        assert loss > F.cross_entropy(z, labels, label_smoothing=smoothing, reduction="sum") / (12 if not items else 30)
        assert int(head_of(model).steps) == 501


def test_training_takes_the_fused_loss(tmp_path, monkeypatch):
    """No logits and no model loss while training: the head's forward never runs."""
    model = _vit()
    monkeypatch.setattr(type(head_of(model)), "forward", lambda *_: pytest.fail("z was computed"))
    _trainer(model, tmp_path).compute_loss(model, _batch(_images())).backward()


def test_outputs_are_the_models(tmp_path):
    model = _vit().eval()
    trainer = _trainer(model, tmp_path)
    batch = _batch(_images())
    loss, outputs = trainer.compute_loss(model, batch | {"output_hidden_states": True}, return_outputs=True)
    expected = model(batch["pixel_values"], labels=batch["labels"], output_hidden_states=True)
    torch.testing.assert_close(loss, expected.loss)
    assert torch.equal(outputs.logits, expected.logits) and outputs.logits.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(outputs.hidden_states, expected.hidden_states, strict=True))
    _, logits, labels = trainer.prediction_step(model, batch | {"return_dict": False}, prediction_loss_only=False)
    assert torch.equal(logits, expected.logits) and torch.equal(labels, batch["labels"])


def _step_by_hand(model, batch, lr):
    """Parameters after a step of SGD on the mean cross entropy of all labels that are not ignored."""
    model = copy.deepcopy(model)
    z = model(input_ids=batch["input_ids"]).logits
    F.cross_entropy(z.flatten(0, 1), batch["labels"].flatten()).backward()
    return {n: p.detach() - (0 if p.grad is None else lr * p.grad) for n, p in model.named_parameters()}


@pytest.mark.parametrize("size, accumulate", [(8, 1), (2, 4)])
def test_accumulation_is_one_large_batch(tmp_path, size, accumulate):
    """Batches with different numbers of valid labels: a mean of means would differ."""
    ids, labels = torch.randint(20, (8, 6)), torch.randint(CLASSES, (8, 6))
    labels[torch.arange(6) > torch.arange(8)[:, None]] = -100
    rows = [{"input_ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)]
    model = _bert()
    expected = _step_by_hand(model, _batch(rows), lr=0.5)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulate}
    _trainer(model, tmp_path, rows, optim="sgd", learning_rate=0.5, **options).train()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name], atol=2e-6, rtol=2e-5)
    for name in ("classifier.gaussians.mu", "classifier.gaussians.rho"):
        assert (dict(model.named_parameters())[name] - before[name]).abs().max() > 1e-4


def test_a_model_that_takes_no_count_accumulates_means(tmp_path):
    """Then Trainer divides by the number of batches, and the loss must not be divided by the items as well."""
    model = _Plain()
    rows = [{"image": torch.randn(8), "target": torch.tensor(i % 3)} for i in range(8)]
    batch = _batch(rows)
    expected = copy.deepcopy(model)
    F.cross_entropy(expected(batch["image"]), batch["target"]).backward()
    options = {"optim": "sgd", "learning_rate": 0.5, "label_names": ["target"]}
    trainer = _trainer(model, tmp_path, rows, per_device_train_batch_size=2, gradient_accumulation_steps=4, **options)
    assert not trainer.model_accepts_loss_kwargs
    torch.testing.assert_close(
        trainer.compute_loss(model, batch, num_items_in_batch=32),
        F.cross_entropy(model(batch["image"]), batch["target"]),
    )
    trainer.train()
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach() - 0.5 * q.grad)


class _Plain(nn.Module):
    """Somebody's own module: a tensor in, a tensor out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = attach(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), lam=2.0, sigma=0.5)

    def forward(self, image):
        return self.net(image)


def test_other_label_names_and_plain_modules(tmp_path):
    model = _Plain()
    rows = [{"image": torch.randn(8), "target": torch.tensor(i % 3)} for i in range(10)]
    trainer = _trainer(
        model, tmp_path, rows, label_names=["target"], per_device_eval_batch_size=4, max_steps=30, learning_rate=0.05
    )
    before = trainer.predict(rows)
    trainer.train()
    after = trainer.predict(rows)
    batch = _batch(rows)
    with torch.no_grad():
        z = model(batch["image"])
    np.testing.assert_allclose(after.predictions, z.numpy(), rtol=1e-5)
    np.testing.assert_array_equal(after.label_ids, batch["target"])
    np.testing.assert_allclose(after.metrics["test_loss"], F.cross_entropy(z, batch["target"]), rtol=1e-5)
    assert after.metrics["test_loss"] < 0.5 * before.metrics["test_loss"]


def test_gaussians_have_groups_without_decay(tmp_path):
    model = _vit(options={"lr_mult": 10.0})
    trainer = _trainer(
        model, tmp_path, _images(), weight_decay=0.3, learning_rate=1e-3, lr_scheduler_type="linear", max_steps=4
    )
    trainer.train()
    groups = trainer.optimizer.param_groups
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters()), "each exactly once"
    ours = [g for g in groups if any(p is head_of(model).mu for p in g["params"])]
    assert len(ours) == 1 and {id(p) for p in ours[0]["params"]} == {
        id(head_of(model).gaussians.mu),
        id(head_of(model).gaussians.rho),
    }
    assert ours[0]["weight_decay"] == 0.0 and ours[0]["initial_lr"] == pytest.approx(1e-2)
    decayed = [g for g in groups if any(p is head_of(model).weight for p in g["params"])]
    assert decayed[0]["weight_decay"] == 0.3 and decayed[0]["initial_lr"] == pytest.approx(1e-3)
    assert [log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log] == []


def test_a_user_supplied_optimizer_is_not_changed(tmp_path):
    model = _vit()
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = _trainer(model, tmp_path, _images(), optimizers=(mine, None))
    assert trainer.create_optimizer() is mine
    assert [len(g["params"]) for g in mine.param_groups] == [len(list(model.parameters()))]
    del mine.param_groups[0]["params"][-2:]
    with pytest.warns(UserWarning, match="no optimizer holds classifier.gaussians.mu and classifier.gaussians.rho"):
        trainer.train()


@pytest.mark.parametrize("head", ["softmax", "gsoftmax"])
def test_frozen_gaussians_and_other_heads_need_no_group(tmp_path, head):
    model = _vit(head)
    for name, p in model.named_parameters():
        p.requires_grad_("gaussians" not in name)
    assert len(_trainer(model, tmp_path).create_optimizer().param_groups) == 2


def test_means_are_logged_at_logging_steps(tmp_path):
    model = _vit()
    rows = _images()
    trainer = _trainer(model, tmp_path, rows, eval_dataset=rows, max_steps=3, logging_steps=1, eval_strategy="steps")
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["step"] for log in logs] == [1, 2, 3]
    assert logs[-1]["mu_mean"] == pytest.approx(head_of(model).mu.mean().item())
    assert logs[-1]["sigma_mean"] == pytest.approx(head_of(model).sigma.mean().item())
    assert logs[0]["sigma_mean"] != logs[-1]["sigma_mean"]
    evaluations = [log for log in trainer.state.log_history if "eval_loss" in log]
    assert len(evaluations) == 3 and not any("mu_mean" in log for log in evaluations)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    rows = [{"input_ids": torch.randint(20, (6,)), "labels": torch.randint(CLASSES, (6,))} for _ in range(16)]
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2, "weight_decay": 0.1}
    ended = []
    for checkpoint in (None, str(tmp_path / "checkpoint-2")):
        model = _bert()
        head_of(model).gaussians.lr_mult = 3.0
        _trainer(model, tmp_path, rows, **options).train(resume_from_checkpoint=checkpoint)
        ended.append(dict(model.named_parameters()))
    assert all(torch.equal(p, ended[1][name]) for name, p in ended[0].items())


def test_models_that_choose_among_outputs(tmp_path):
    """GPT-2 gives its head every token and picks one afterwards: Trainer's loss on z, which is the same number."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    torch.manual_seed(0)
    small = {"vocab_size": 20, "n_embd": 16, "n_layer": 1, "n_head": 2, "num_labels": CLASSES, "pad_token_id": 0}
    model = attach(GPT2ForSequenceClassification(GPT2Config(**small)), lam=2.0).eval()
    batch = {"input_ids": torch.randint(1, 20, (4, 6)), "labels": torch.tensor([0, 1, 2, 3])}
    trainer = _trainer(model, tmp_path)
    expected = F.cross_entropy(model(batch["input_ids"]).logits, batch["labels"])
    passes = []
    model.transformer.register_forward_hook(lambda *_: passes.append(1))
    for _ in range(2):  # found out, then known
        torch.testing.assert_close(trainer.compute_loss(model, dict(batch)), expected)
        loss, outputs = trainer.compute_loss(model, dict(batch), return_outputs=True)
        torch.testing.assert_close(loss, expected)
        assert outputs.logits.shape == (4, CLASSES)
    assert len(passes) == 5, "one pass too many, in the first call"
    assert not head_of(model)._forward_pre_hooks and not head_of(model)._forward_hooks

    model = attach(model, "lsoftmax").train()
    with pytest.raises(ValueError, match="LSoftmaxHead in GPT2ForSequenceClassification cannot be trained here"):
        _trainer(model, tmp_path).compute_loss(model, dict(batch))


def test_several_heads_and_own_criteria_use_trainers_loss(tmp_path):
    model = _vit().eval()
    batch = _batch(_images())
    trainer = _trainer(model, tmp_path, compute_loss_func=lambda outputs, labels, **_: outputs.logits.sum())
    torch.testing.assert_close(trainer.compute_loss(model, dict(batch)), model(batch["pixel_values"]).logits.sum())
    model.spare = attach(nn.Sequential(nn.Linear(2, 2)))
    loss = _trainer(model, tmp_path).compute_loss(model, dict(batch))
    torch.testing.assert_close(loss, F.cross_entropy(model(batch["pixel_values"]).logits, batch["labels"]))


def test_a_model_without_a_head_is_told_so(tmp_path):
    model = _Plain()
    model.net = nn.Sequential(nn.Linear(8, 3))
    trainer = _trainer(model, tmp_path)
    with pytest.raises(ValueError, match="_Plain has no gsoftmax head: call attach"):
        trainer.compute_loss(model, {"image": torch.zeros(2, 8), "labels": torch.tensor([0, 1])})


def _check_loss(trainer, model, images, labels, expected):
    batch = {"pixel_values": images, "labels": labels}
    for options in ({}, {"num_items_in_batch": 6 * CLASSES}, {"return_outputs": True}):
        loss = trainer.compute_loss(model, dict(batch), **options)
        torch.testing.assert_close(loss[0] if "return_outputs" in options else loss, expected)


def test_floating_point_labels(tmp_path):
    images = torch.randn(6, 1, 8, 8)
    soft = torch.softmax(torch.randn(6, CLASSES), 1)
    several = (torch.rand(6, CLASSES) < 0.5).float()

    model = _vit().eval()
    trainer = _trainer(model, tmp_path)
    z = model(images).logits
    # to transformers they are independent labels
    loss = trainer.compute_loss(model, {"pixel_values": images, "labels": several})
    torch.testing.assert_close(loss, F.binary_cross_entropy_with_logits(z, several))
    model.config.problem_type = "single_label_classification"
    _check_loss(trainer, model, images, soft, F.cross_entropy(z, soft))
    model.config.problem_type = "regression"
    loss = trainer.compute_loss(model, {"pixel_values": images, "labels": soft})
    torch.testing.assert_close(loss, F.mse_loss(z, soft))

    model = attach(_vit(), "gsoftmax", form="paired", lam=2.0).eval()
    z = model(images).logits  # (6, 2, labels), absence first
    expected = F.binary_cross_entropy_with_logits(z[:, 1] - z[:, 0], several)
    _check_loss(_trainer(model, tmp_path), model, images, several, expected)


def test_tracked_gaussians_make_one_step(tmp_path):
    batch = _batch(_images())
    moved = []
    for return_outputs in (False, True):
        model = _vit(options={"gaussians": "tracked"}).train()
        _trainer(model, tmp_path).compute_loss(model, dict(batch), return_outputs=return_outputs)
        moved.append(head_of(model).mu.clone())
        assert head_of(model).gaussians.training
    torch.testing.assert_close(*moved)
    assert not torch.equal(moved[0], _vit(options={"gaussians": "tracked"}).classifier.mu)


def test_items_of_all_processes(tmp_path, monkeypatch):
    """Gradients are averaged over processes but items are counted over all of them: the loss is multiplied."""
    model, batch = _vit().eval(), _batch(_images())
    trainer = _trainer(model, tmp_path)
    one = trainer.compute_loss(model, dict(batch), num_items_in_batch=24)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    two = trainer.compute_loss(model, dict(batch), num_items_in_batch=24)
    torch.testing.assert_close(two, 2 * one)
    torch.testing.assert_close(two, F.cross_entropy(model(batch["pixel_values"]).logits, batch["labels"]))


@pytest.mark.parametrize(
    "head, options", [("gsoftmax", {"bf16": True, "max_steps": 40}), ("lsoftmax", {"max_steps": 80})]
)
def test_training_learns(tmp_path, head, options):
    rows, model = _images(), _vit(head)
    trainer = _trainer(model, tmp_path, rows, eval_dataset=rows, learning_rate=1e-2, **options)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.5 * before
    if head == "lsoftmax":
        assert isinstance(head_of(model), LSoftmaxHead) and int(head_of(model).steps) == 80
    else:
        assert head_of(model).mu.dtype == torch.float32


# ---------------------------------------------------------------------------------------------------------- Lightning

lightning_noise = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.*", "ignore:.*many workers.*", "ignore:.*on tensorboard.*", "ignore:.*GPU available.*"
)


@pytest.fixture
def pl():
    return importlib.import_module("lightning.pytorch")


def _callback(*args, **options):
    from gsoftmax.integrations.lightning import GeometryCallback

    return GeometryCallback(*args, **options)


def _module(pl, step=lambda x, y: {"x": x, "y": y}):
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(6, 3)

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.linear(batch[0]), batch[1])

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            return step(self.linear(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    return Module()


def _loader(n, batch_size=8, seed=0):
    from torch.utils.data import DataLoader, TensorDataset

    g = torch.Generator().manual_seed(seed)
    return DataLoader(
        TensorDataset(torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g)), batch_size=batch_size
    )


def _run(pl, folder, callbacks, **options):
    return pl.Trainer(
        accelerator="cpu",
        callbacks=callbacks,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def _by_hand(module, loader):
    """In one update, not one per batch; x by batches, since products of other shapes are rounded otherwise."""
    with torch.no_grad():
        x, labels = zip(*((module.linear(images), labels) for images, labels in loader), strict=True)
    return ClassStatistics(3).update(torch.cat(x), torch.cat(labels)).geometry()


@lightning_noise
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning_logs_the_geometry_of_every_epoch(tmp_path, package):
    pl = pytest.importorskip(package)
    geometry, loader = _callback(3), _loader(50)
    epochs = []

    class Check(pl.Callback):
        def on_validation_end(self, trainer, pl_module):
            if trainer.sanity_checking:
                assert geometry.geometry is None and not trainer.callback_metrics
                return
            expected = _by_hand(pl_module, loader)
            for name in MEASURES:
                torch.testing.assert_close(getattr(geometry.geometry, name), getattr(expected, name))
                assert trainer.callback_metrics[f"val/{name}"].item() == pytest.approx(expected.average()[name])
            epochs.append(expected.average()["ratio"])

    _run(pl, tmp_path, [geometry, Check()], max_epochs=3).fit(_module(pl), _loader(40, seed=1), loader)
    assert len(epochs) == 3 == len(set(epochs))
    assert int(geometry.geometry.count.sum()) == 50


@lightning_noise
def test_lightning_checks_the_optimizer(tmp_path, pl):
    module = _module(pl)
    module.configure_optimizers = lambda: torch.optim.SGD([module.linear.weight], lr=0.5)
    attach(module)
    trainer = _run(pl, tmp_path, [_callback(3)], max_epochs=1)
    with pytest.warns(UserWarning, match="no optimizer holds linear.gaussians.mu and linear.gaussians.rho"):
        trainer.fit(module, _loader(8), _loader(8))


@lightning_noise
def test_lightning_several_sets_and_an_own_function(tmp_path, pl):
    geometry = _callback(3, outputs=lambda step, batch: (step[0], batch[1]), prefix="geometry_")
    module = _module(pl, step=lambda x, y: [x])
    loaders = [_loader(40), _loader(30, seed=5)]
    logged = _run(pl, tmp_path, [geometry]).validate(module, loaders, verbose=False)
    for number, loader in enumerate(loaders):
        for name, value in _by_hand(module, loader).average().items():
            key = f"geometry_{name}/dataloader_idx_{number}"
            assert logged[number][key] == pytest.approx(value), key


@lightning_noise
@pytest.mark.parametrize(
    "step, seen",
    [
        (lambda x, y: None, "NoneType"),
        (lambda x, y: x.sum(), "Tensor"),
        (lambda x, y: {"loss": x.sum(), "logits": x}, "a dict with loss, logits"),
    ],
)
def test_lightning_says_what_it_needs(tmp_path, pl, step, seen):
    with pytest.raises(ValueError, match=rf"must return a dict with x \(or logits\) and y .*; it returned {seen}$"):
        _run(pl, tmp_path, [_callback(3)]).validate(_module(pl, step), _loader(8), verbose=False)
    with pytest.raises(ValueError, match="num_classes must be a positive integer, got 0"):
        _callback(0)


def _fit_on_two_processes():
    warnings.filterwarnings("ignore")
    import lightning.pytorch as pl

    warnings.filterwarnings("error", ".*sync_dist.*")

    class Check(pl.Callback):
        def on_validation_end(self, trainer, pl_module):
            if trainer.sanity_checking:
                return
            seen = sum(len(batch[1]) for batch in trainer.val_dataloaders)
            expected = _by_hand(pl_module, loader)
            for name in MEASURES:
                torch.testing.assert_close(getattr(geometry.geometry, name), getattr(expected, name))
                logged = trainer.callback_metrics[f"val/{name}"].double().item()
                torch.testing.assert_close(logged, expected.average()[name], rtol=1e-5, atol=0)
            print(f"rank {trainer.global_rank} saw {seen} of {int(geometry.geometry.count.sum())}", flush=True)

    loader, geometry = _loader(48), _callback(3)
    trainer = _run(pl, ".", [geometry, Check()], max_epochs=1, devices=2, strategy="ddp_fork")
    trainer.fit(_module(pl), _loader(32, seed=1), loader)


def test_lightning_merges_processes(tmp_path):
    done = processes.Program(_fit_on_two_processes, cwd=tmp_path).wait()
    assert done.returncode == 0, done.stdout + done.stderr
    seen = re.findall(r"rank (\d) saw (\d+) of (\d+)", done.stdout)
    assert sorted(seen) == [("0", "24", "48"), ("1", "24", "48")], done.stdout


# -------------------------------------------------------------------------------------------------------- TensorBoard


def _writer(folder):
    """One for a test: files of the same second are read in the order of a number in their names, 10 before 9."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder)


def _events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"histograms": 0, "scalars": 0}).Reload()


def test_tensorboard_events_read_back(tmp_path):
    mu = np.linspace(-1, 1, 7)
    model = nn.ModuleDict(
        {"body": nn.Linear(4, 4), "fc": attach(nn.Linear(4, 7), mu=mu, sigma=2.0), "loss": GSoftmaxLoss(3, sigma=0.5)}
    )
    with _writer(tmp_path) as writer:
        log_gaussians(writer, model, 0)
        head_of(model).loss(torch.randn(5, 4), torch.arange(5)).backward()
        with torch.no_grad():
            model["fc"].mu.add_(1.0)
        log_gaussians(writer, model, 10)
    events = _events(tmp_path)
    tags = events.Tags()
    grads = {"gsoftmax/fc/mu_grad", "gsoftmax/fc/rho_grad"}  # the loss was not used and has none
    assert set(tags["histograms"]) == grads | {f"gsoftmax/{p}/{q}" for p in ("fc", "loss") for q in ("mu", "sigma")}
    assert set(tags["scalars"]) == {f"gsoftmax/{p}/{q}_mean" for p in ("fc", "loss") for q in ("mu", "sigma")}
    first, second = events.Histograms("gsoftmax/fc/mu")
    assert (first.step, second.step) == (0, 10)
    h = first.histogram_value
    assert (h.num, h.min, h.max) == (7, -1, 1)
    assert h.sum_squares == pytest.approx((mu**2).sum(), rel=1e-5)
    assert second.histogram_value.min == pytest.approx(0) and second.histogram_value.max == pytest.approx(2)
    assert [e.value for e in events.Scalars("gsoftmax/fc/mu_mean")] == pytest.approx([0.0, 1.0], abs=1e-6)
    assert [e.value for e in events.Scalars("gsoftmax/loss/sigma_mean")] == pytest.approx([0.5, 0.5])
    (grad,) = events.Histograms("gsoftmax/fc/rho_grad")
    assert grad.step == 10
    assert grad.histogram_value.sum == pytest.approx(model["fc"].gaussians.rho.grad.sum().item(), rel=1e-4)


def test_tensorboard_of_values_that_are_not_finite_or_of_half_precision(tmp_path):
    loss = GSoftmaxLoss(3)
    with torch.no_grad():
        loss.gaussians.mu[0] = torch.nan
        loss.gaussians.rho.fill_(torch.nan)
    with _writer(tmp_path) as writer:
        log_gaussians(writer, loss, 1, prefix="")
        with pytest.raises(ValueError, match="at least one G-softmax module, got Linear without any"):
            log_gaussians(writer, nn.Linear(2, 2), 1)
        log_gaussians(writer, GSoftmaxLoss(4, sigma=2.0).to(torch.bfloat16), 3, prefix="half")
    events = _events(tmp_path)
    assert events.Histograms("mu")[0].histogram_value.num == 2
    assert set(events.Tags()["histograms"]) == {"mu", "half/mu", "half/sigma"}
    assert np.isnan(events.Scalars("mu_mean")[0].value)
    assert events.Histograms("half/sigma")[0].histogram_value.num == 4


# Weights & Biases


class StandIn(ModuleType):
    """What the package uses of `wandb`, with its signatures; the library itself takes 100 MB."""

    class Settings:
        def __init__(self, *, silent: bool, console: str) -> None:
            self.options = silent, console

    class Histogram:
        def __init__(self, sequence: list[float]) -> None:
            self.sequence = sequence

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None)
        self.started: list[dict] = []
        self.rows: list[tuple[int, dict]] = []
        self.finished = 0

    def init(self, *, mode, project, dir, id, name, resume, reinit, config, settings):
        self.started.append(locals())
        return self

    def log(self, data: dict, *, step: int) -> None:
        assert not self.rows or step >= self.rows[-1][0]  # the library drops rows of earlier steps
        self.rows.append((step, data))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch):
    for name in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    module = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_the_rows_of_a_run(tmp_path, wandb):
    config = Config(epochs=2, train_fraction=0.2, threads=1, device="cpu", logger="wandb")
    train(config, tmp_path / "softmax" / "seed-0")
    (started,) = wandb.started
    assert (started["mode"], started["project"], started["name"]) == ("offline", "gsoftmax", "softmax/seed-0")
    assert started["dir"] == str((tmp_path / "softmax" / "seed-0").resolve()) and started["config"]["epochs"] == 2
    rows = [json.loads(line) for line in (tmp_path / "softmax/seed-0/metrics.jsonl").read_text().splitlines()]
    written = [
        (row.get("epoch", row.get("epochs")), {key: value})
        for row in rows
        for key, value in row.items()
        if key not in ("epoch", "final")
    ]
    assert wandb.rows == written and wandb.finished == 1
    again = RunFolder(tmp_path / "softmax" / "seed-0", config.override({"logger": None}), {}, resume=True)
    with again:  # the logger does not make it another run
        again.checkpoint()
    assert len(wandb.started) == 1


def test_wandb_mode_and_project_follow_the_environment(tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_PROJECT", "trees")
    one, other = open_run(tmp_path / "a", Config()), open_run(tmp_path / "b", Config())
    assert [(run["mode"], run["project"]) for run in wandb.started] == [("online", "trees")] * 2
    assert wandb.started[0]["id"] != wandb.started[1]["id"] and one.run is other.run is wandb


def test_wandb_gets_gaussians(wandb):
    log_gaussians(WandbWriter(wandb), GSoftmaxLoss(3, mu=[1.0, 2.0, 3.0]), 7)
    found = {tag: value for step, row in wandb.rows for tag, value in row.items() if step == 7}
    assert found["gsoftmax/mu"].sequence == [1.0, 2.0, 3.0] and found["gsoftmax/mu_mean"] == 2.0


def test_a_logger_that_is_not_installed_is_said_before_anything_is_written(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else find(name, *rest))
    with pytest.raises(ValueError, match=r"logger=wandb needs wandb, .*: pip install 'gsoftmax\[wandb\]'"):
        train(Config(logger="wandb"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
