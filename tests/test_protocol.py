"""The recipes of the paper's tables against the authors' protocol: their formulas by hand, and the docs' table."""

from __future__ import annotations

import fnmatch
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn

from gsoftmax import GaussianLogits, GSoftmaxHead, build, functional, param_groups, train
from gsoftmax.config import Config
from gsoftmax.data import num_batches
from gsoftmax.recipes import find, recipes
from gsoftmax.runs import read_rows

DOCS = Path(__file__).parents[1] / "docs"
LABELS = 6
PHOTOS = SimpleNamespace(num_classes=LABELS, multilabel=True, name="photos", train=range(64))


class AuthorsUpdate:
    """One step of the authors' multi-label training in NumPy, x+ and x- in columns 0 and 1 as in their code.

    Their criterion passes on p - t without dividing by the batch; weights take Nesterov steps with decay; mu and sigma
    take plain steps with the gradient's mean over the batch, and that of mu lacks its minus sign.
    """

    def __init__(self, weight, bias, mu, sigma, lam, factor):
        self.weights, self.mu, self.sigma = [weight, bias], mu, sigma
        self.lam, self.factor, self.velocity = lam, factor, [0.0, 0.0]

    def step(self, h, target, lr):
        weight, bias = self.weights
        x = np.einsum("nd,lkd->nlk", h, weight) + bias  # (batch, labels, 2)
        z = x + self.lam * scipy.stats.norm.cdf(x, self.mu, self.sigma)
        p = np.exp(z) / np.exp(z).sum(2, keepdims=True)
        g = p - np.stack([target, 1 - target], 2)
        bell = self.lam * np.exp(-((x - self.mu) ** 2) / (2 * self.sigma**2)) / np.sqrt(2 * np.pi)
        dx = g * (1 + bell / self.sigma)
        mu_step = lr * self.factor * (g * bell / self.sigma).mean(0)
        sigma_step = lr * self.factor * (g * bell * (self.mu - x) / self.sigma**2).mean(0)
        gradients = [np.einsum("nlk,nd->lkd", dx, h), dx.sum(0)]
        for i, gradient in enumerate(gradients):
            gradient = gradient + 1e-4 * self.weights[i]
            self.velocity[i] = 0.9 * self.velocity[i] + gradient
            self.weights[i] = self.weights[i] - lr * (gradient + 0.9 * self.velocity[i])
        self.mu, self.sigma = self.mu + mu_step, self.sigma - sigma_step  # + descends: the sign that theirs lacks
        return dx


def two_columns(value):
    """(2L, ...), absence first, as (L, 2, ...), presence first."""
    return value.detach().numpy().reshape(2, LABELS, *value.shape[1:])[::-1].swapaxes(0, 1).copy()


def gaussians_of(head):
    """mu+, sigma+, mu-, sigma-."""
    mu, sigma = (v.detach().view(2, LABELS) for v in (head.gaussians.mu, head.gaussians.sigma))
    return [mu[1], sigma[1], mu[0], sigma[0]]


@pytest.mark.parametrize(
    "row, factor",
    [
        ("coco-softmax", 0.0),
        ("coco-gsoftmax(0,1)", 1.0),
        ("coco-gsoftmax(0,0.5)", 1.0),
        ("coco-gsoftmax(-0.1,1)", 1.0),
        ("nuswide-gsoftmax(0,3)", 100.0),
    ],
)
def test_three_steps_are_the_authors(row, factor):
    config = find(row).config()
    torch.manual_seed(0)
    backbone = nn.Linear(5, 7).double()
    head = build.head(config, PHOTOS, 7).double()
    assert not head.bias.any()
    network = build.Network(backbone, head)
    optimizer = build.optimizer(config, network)
    schedule, rates = build.schedule(config, config.epochs), [group["lr"] for group in optimizer.param_groups]
    gaussians = factor > 0
    authors = AuthorsUpdate(
        two_columns(head.weight),
        two_columns(head.bias),
        two_columns(head.gaussians.mu) if gaussians else np.zeros((LABELS, 2)),
        two_columns(head.gaussians.sigma) if gaussians else np.ones((LABELS, 2)),
        config.head_options.get("lam", 0.0),
        factor,
    )
    for epoch in (1, 3, 4):  # the rate falls to a tenth at the fourth
        lr = 1e-5 if epoch < 4 else 1e-6
        assert config.lr * schedule(epoch) == pytest.approx(lr)
        for group, first in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = first * schedule(epoch)
        inputs, target = torch.randn(16, 5).double(), torch.randint(2, (16, LABELS))
        before = {name: two_columns(p) for name, p in head.named_parameters()}
        wanted_before = {"weight": authors.weights[0], "bias": authors.weights[1]}
        wanted_before |= {"gaussians.mu": authors.mu, "gaussians.rho": authors.sigma} if gaussians else {}
        dx = authors.step(backbone(inputs).detach().numpy(), target.numpy(), lr)
        optimizer.zero_grad()
        network(inputs, target, **build.loss_options(config)).backward()
        x = head.features(backbone(inputs)).detach().requires_grad_()
        learned = {"gaussians": gaussians_of(head), "lam": config.head_options["lam"]} if gaussians else {}
        absent, present = x.unbind(1)
        loss = functional.multilabel_cross_entropy(present, absent, target, **learned, **build.loss_options(config))
        (got,) = torch.autograd.grad(loss, x)
        np.testing.assert_allclose(got.numpy()[:, ::-1].swapaxes(1, 2), dx, rtol=1e-6, atol=1e-12)
        optimizer.step()
        wanted = {"weight": authors.weights[0], "bias": authors.weights[1]}
        wanted |= {"gaussians.mu": authors.mu, "gaussians.rho": authors.sigma} if gaussians else {}
        assert set(wanted) == set(before)
        for name, parameter in head.named_parameters():  # the steps, which are much smaller than the values
            step, theirs = two_columns(parameter) - before[name], wanted[name] - wanted_before[name]
            assert np.abs(theirs).max() > 0
            np.testing.assert_allclose(step, theirs, rtol=1e-6, atol=1e-6 * np.abs(theirs).max(), err_msg=name)


def test_gaussians_have_their_own_momentum():
    model = nn.Sequential(nn.Linear(3, 4), GSoftmaxHead(4, 2))
    plain, own = param_groups(model, lr=0.1, gaussian_momentum=0.0)
    assert "momentum" not in plain and (own["momentum"], own["nesterov"]) == (0.0, False)
    assert all("momentum" not in group for group in param_groups(model, lr=0.1))


def test_sigma_itself_as_the_parameter():
    layer = GaussianLogits(3, sigma=[0.5, 1.0, 2.0], log_sigma=False)
    assert layer.rho.tolist() == [0.5, 1.0, 2.0] == layer.sigma.tolist() and "log_sigma=False" in repr(layer)
    with torch.no_grad():
        layer.rho[0] = -1.0
    assert layer.sigma[0].item() == pytest.approx(0.01)
    assert layer.fit_gaussians([torch.randn(50, 3)]).sigma.shape == (3,)
    with pytest.raises(ValueError, match="log_sigma=False is for learned and fixed"):
        GaussianLogits(3, gaussians="tracked", log_sigma=False)


@pytest.mark.parametrize("drop_last, steps", [(True, 20), (False, 21)])
def test_an_incomplete_last_batch_is_kept_on_request(drop_last, steps, tmp_path):
    config = Config(epochs=2, batch_size=64, drop_last=drop_last, threads=1, device="cpu", evaluate_every=1)
    dataset = build.load_data(config)
    assert build.total_steps(config, dataset) == (steps, 2 * steps) == (num_batches(1297, 64, drop_last), 2 * steps)
    batches = [len(y) for _, y in build.train_batches(dataset, config, 1)]
    assert batches == [64] * 20 + [17] * (not drop_last)
    result = train.train(config, tmp_path / "run")
    seconds = result["examples_per_second"] * result["seconds"]
    assert seconds == pytest.approx(2 * sum(batches)) and len(read_rows(tmp_path / "run")) == 3
    with pytest.raises(ValueError, match="the last has 17 rows: drop_last=true"):
        build.prepare(config.override({"cuda_graphs": True, "drop_last": False}), dataset, torch.device("cpu"))


def test_an_incomplete_batch_too_small_for_the_processes_is_refused():
    config = Config(batch_size=16, drop_last=False, device="cpu")  # 1297 = 81 * 16 + 1
    with pytest.raises(ValueError, match="the last batch of an epoch has 1 rows for 2 processes: drop_last=true"):
        build.prepare(config, build.load_data(config), torch.device("cpu"), build.World(0, 2))


def declared():
    """Rows of the table of declared choices: recipes, key, value."""
    text = (DOCS / "reproduce.md").read_text("utf-8")
    table = text.partition("## Choices that the paper leaves open")[2].partition("\n## ")[0]
    for line in table.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 5 and cells[4].startswith("`"):
            for key, value in re.findall(r"`([\w.]+)=([^`]*)`", cells[4]):
                patterns = re.findall(r"`([^`]+)`", cells[0])
                yield pytest.param(patterns, key, value, id=f"{' '.join(patterns)} {key}")


@pytest.mark.parametrize("patterns, key, value", list(declared()))
def test_declared_choices_are_those_of_the_recipes(patterns, key, value):
    rows = [r for r in recipes().values() if r.published and any(fnmatch.fnmatch(r.name, p) for p in patterns)]
    assert rows, f"no recipe is called {patterns}"
    for recipe in rows:
        held = recipe.config().identity() | {"evaluate_every": recipe.config().evaluate_every}
        for part in key.split("."):
            held = held[part]
        assert held == json.loads(value) if not isinstance(held, str) else held == value, recipe.name


def test_every_choice_is_declared():
    assert len(list(declared())) >= 30
