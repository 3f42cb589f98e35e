"""`check_head`: the built-in heads pass, and each broken promise is one line."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gsoftmax.functional import MULTILABEL_FORMS
from gsoftmax.heads import HEADS, GSoftmaxHead
from gsoftmax.testing import check_head


@pytest.mark.parametrize("name", HEADS)
def test_built_in_heads_keep_the_contract(name):
    # asl is trained with a gradient that leaves out its focal factors, as its authors do
    options = {"detach": False} if name == "asl" else {}
    check_head(HEADS[name], multilabel=not HEADS[name].singlelabel, **options)


@pytest.mark.parametrize("form", MULTILABEL_FORMS)
@pytest.mark.parametrize("name", ["softmax", "gsoftmax"])
def test_built_in_heads_keep_it_with_several_labels(name, form):
    check_head(HEADS[name], multilabel=True, form=form)


@pytest.mark.parametrize("gaussians", ["fixed", "tracked"])
def test_every_kind_of_gaussians_keeps_it(gaussians):
    check_head(GSoftmaxHead, gaussians=gaussians, lam=4.0)


class Sound(nn.Module):
    """A head as a user would write it."""

    def __init__(self, in_features, num_classes):
        super().__init__()
        self.linear = nn.Linear(in_features, num_classes)

    def features(self, h):
        return self.linear(h)

    def loss(self, h, target, **options):
        return F.cross_entropy(self.features(h), target, **options)

    def predict_proba(self, h):
        return self.features(h).softmax(1)


def variant(**methods):
    """`Sound` with other methods."""
    return type("Variant", (Sound,), methods)


def with_attribute(name, make):
    """`Sound` whose constructor also sets an attribute."""

    def init(self, in_features, num_classes):
        Sound.__init__(self, in_features, num_classes)
        setattr(self, name, make(self))

    return {"__init__": init}


def half_overflow(self, h, target, **options):
    x = self.features(h)
    return F.cross_entropy(x, target) / (x.dtype != torch.bfloat16)


def no_smoothing(self, h, target, label_smoothing=0.0):
    return F.cross_entropy(self.features(h), target) / (label_smoothing == 0)


GENERATOR, COUNT = torch.Generator().manual_seed(0), itertools.count(1)
BROKEN = {
    r"features\(h\) must have the shape \(7, 5\), got \(5, 7\)": variant(features=lambda self, h: self.linear(h).T),
    r"loss\(h, target\) must be one number, got the shape \(7,\)": variant(
        loss=lambda self, h, target: F.cross_entropy(self.features(h), target, reduction="none")
    ),
    r"loss\(h, target\) must have a gradient, and is detached": variant(
        loss=lambda self, h, target: F.cross_entropy(self.features(h).detach(), target)
    ),
    r"predict_proba\(h\) must add up to 1 in every row, got [\d.]+ in row \d": variant(
        predict_proba=lambda self, h: self.features(h).sigmoid()
    ),
    "must not depend on the other rows": variant(predict_proba=lambda self, h: self.features(h - h.mean(0)).softmax(1)),
    r"wrong gradient for the parameter linear.weight: slope [-\d.]+, measured [-\d.]+": variant(
        features=lambda self, h: self.linear(h) + self.linear(h).detach()
    ),
    "must depend on the parameter scale, and gives it no gradient": variant(
        **with_attribute("scale", lambda head: nn.Parameter(torch.ones(3)))
    ),
    r"must survive load_state_dict\(state_dict\(\)\)": variant(
        features=lambda self, h: self.linear(h) + self.shift,
        **with_attribute("shift", lambda head: torch.randn(head.linear.out_features)),
    ),
    "linear.weight differs for the same seed": variant(
        **with_attribute("drawn", lambda head: nn.init.normal_(head.linear.weight, generator=GENERATOR).norm().item())
    ),
    "must be the same for the same weights, inputs and seed": variant(
        loss=lambda self, h, target, **options: Sound.loss(self, h, target, **options) * next(COUNT)
    ),
    "must be finite under bfloat16 autocast, got inf": variant(loss=half_overflow),
    r"label_smoothing=0.1\) must be finite, got inf": variant(loss=no_smoothing),
    "must be a class derived from torch.nn.Module": lambda *_: None,
    "lacks all of them": nn.Linear,
}


def test_a_sound_head_passes():
    check_head(Sound)


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_promise_is_one_line(line):
    with pytest.raises(AssertionError, match=line) as error:
        check_head(BROKEN[line])
    assert all(text.strip() for text in str(error.value).splitlines())
