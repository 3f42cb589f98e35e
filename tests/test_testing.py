"""`check_head`: the built-in heads pass, and each broken promise is one line."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gsoftmax.functional import MULTILABEL_FORMS
from gsoftmax.heads import HEADS, GSoftmaxHead
from gsoftmax.testing import check_head


@pytest.mark.parametrize("name", HEADS)
def test_built_in_heads_keep_the_contract(name):
    check_head(HEADS[name])


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


class WrongShape(Sound):
    def features(self, h):
        return self.linear(h).T


class EachRow(Sound):
    def loss(self, h, target, **options):
        return F.cross_entropy(self.features(h), target, reduction="none")


class Detached(Sound):
    def loss(self, h, target, **options):
        return F.cross_entropy(self.features(h).detach(), target)


class Sigmoids(Sound):
    def predict_proba(self, h):
        return self.features(h).sigmoid()


class BatchNorm(Sound):
    def predict_proba(self, h):
        return self.features(h - h.mean(0)).softmax(1)


class WrongGradient(Sound):
    def features(self, h):
        x = self.linear(h)
        return x + x.detach()


class Unused(Sound):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.scale = nn.Parameter(torch.ones(3))


class Unsaved(Sound):
    def __init__(self, in_features, num_classes):
        super().__init__(in_features, num_classes)
        self.shift = torch.randn(num_classes)

    def features(self, h):
        return self.linear(h) + self.shift


class OwnGenerator(Sound):
    generator = torch.Generator().manual_seed(0)

    def __init__(self, in_features, num_classes):
        super().__init__(in_features, num_classes)
        nn.init.normal_(self.linear.weight, generator=self.generator)


class Noisy(Sound):
    count = 0

    def loss(self, h, target, **options):
        Noisy.count += 1
        return super().loss(h, target, **options) * (1 + Noisy.count)


class HalfOverflow(Sound):
    def loss(self, h, target, **options):
        x = self.features(h)
        return F.cross_entropy(x, target) / (x.dtype != torch.bfloat16)


class NoSmoothing(Sound):
    def loss(self, h, target, label_smoothing=0.0):
        return F.cross_entropy(self.features(h), target) / (label_smoothing == 0)


def test_a_sound_head_passes():
    check_head(Sound)


@pytest.mark.parametrize(
    ("head", "line"),
    [
        (WrongShape, r"features\(h\) must have the shape \(7, 5\), got \(5, 7\)"),
        (EachRow, r"loss\(h, target\) must be one number, got the shape \(7,\)"),
        (Detached, r"loss\(h, target\) must have a gradient, and is detached"),
        (Sigmoids, r"predict_proba\(h\) must add up to 1 in every row, got [\d.]+ in row \d"),
        (BatchNorm, "must not depend on the other rows"),
        (WrongGradient, r"wrong gradient for the parameter linear.weight: slope [-\d.]+, measured [-\d.]+"),
        (Unused, "must depend on the parameter scale, and gives it no gradient"),
        (Unsaved, r"must survive load_state_dict\(state_dict\(\)\)"),
        (OwnGenerator, "linear.weight differs for the same seed"),
        (Noisy, "must be the same for the same weights, inputs and seed"),
        (HalfOverflow, "must be finite under bfloat16 autocast, got inf"),
        (NoSmoothing, r"label_smoothing=0.1\) must be finite, got inf"),
        (lambda *_: None, "must be a class derived from torch.nn.Module"),
        (nn.Linear, "lacks all of them"),
    ],
)
def test_a_broken_promise_is_one_line(head, line):
    with pytest.raises(AssertionError, match=line) as error:
        check_head(head)
    assert all(text.strip() for text in str(error.value).splitlines())
