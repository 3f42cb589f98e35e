"""Class-sharded heads, compared with the unsharded head on the concatenated batch.

Four processes run the `check_...` functions below, one after the other, on all four or on the first one, two or three.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
import operator
import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import processes
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gsoftmax import GSoftmaxHead, LSoftmaxHead, SoftmaxHead, checks, gaussians, geometry, param_groups, sharded
from gsoftmax.sharded import ShardedGSoftmaxHead, ShardedSoftmaxHead, checkpoint, collectives, sharded_class
from gsoftmax.sharded.head import distinct

WORLD = 4
D = 5
ROWS = {1: [9], 2: [4, 5], 3: [4, 0, 5], 4: [3, 1, 0, 5]}  # of each process; uneven, and some have none
BOUND = {torch.float32: 1e-5, torch.float64: 1e-12}

CHECKS, SLOW = {}, set()


def check(*numbers, slow=False):
    """Makes a function a check that runs on each of these numbers of processes."""

    def register(function):
        name = function.__name__.removeprefix("check_")
        for k in numbers or (WORLD,):
            full = f"{name}-{k}" if len(numbers) > 1 else name
            CHECKS[full] = (function, k)
            if slow:
                SLOW.add(full)
        return function

    return register


# -------------------------------------------------------------------------------------------------------------- shared


def close(a, b, bound=1e-12):
    """The largest difference is at most `bound` of the largest value (or of 1, if that is smaller)."""
    a, b = torch.as_tensor(a).detach().double(), torch.as_tensor(b).detach().double()
    assert a.shape == b.shape, (a.shape, b.shape)
    if a.numel() == 0:
        return
    assert torch.equal(a.isnan(), b.isnan()), (a, b)
    a, b = a.nan_to_num(), b.nan_to_num()
    error = (a - b).abs().max().item() / max(1.0, b.abs().max().item())
    assert error <= bound, f"off by {error:.3g}, {bound:.0e} is allowed"


def heads(env, classes, dtype=torch.float64, cls=GSoftmaxHead, **options):
    """A sharded head, the unsharded head with the same parameters, and which classes are local."""
    shard_options = {k: options.pop(k) for k in ("negatives", "seed", "averaged") if k in options}
    torch.manual_seed(1)
    sharded_cls = sharded_class(cls, "class")
    head = sharded_cls(D, classes, dtype=dtype, mesh=env.mesh, **{"averaged": False, **shard_options}, **options)
    torch.manual_seed(1)
    whole = cls(D, classes, dtype=dtype, impl="plain", **options)
    own = head.shard.classes
    if cls is GSoftmaxHead:
        g = torch.Generator().manual_seed(5)
        mu, sigma = torch.randn(classes, generator=g) * 0.3, torch.rand(classes, generator=g) + 0.5
        for module in (head, whole):
            module.gaussians.set_gaussians(mu, sigma)
    for name, p in whole.named_parameters():
        assert torch.equal(getter(head, name).to_local(), p[own]), f"{name} does not start as the unsharded head's"
    return head, whole.double(), own


def getter(module, name):
    return operator.attrgetter(name)(module)


def batch(env, classes, soft=False, ignore=(), dtype=torch.float64, seed=0, rows=None):
    """h and target of all processes, and which rows are local."""
    rows = rows or ROWS[env.size]
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(sum(rows), D, generator=g, dtype=torch.float64).to(dtype) * 2
    target = torch.rand(len(h), classes, generator=g, dtype=torch.float64).softmax(1).to(dtype)
    if not soft:
        target = torch.randint(classes, (len(h),), generator=g)
        target[list(ignore)] = -100
    return h, target, slice(sum(rows[: env.rank]), sum(rows[: env.rank + 1]))


def setup(env, classes, **options):
    """What `heads` and `batch` give."""
    return *heads(env, classes, **options), *batch(env, classes, dtype=options.get("dtype", torch.float64))


def close_parameters(head, whole, own, bound=1e-12, grad=True):
    """Gradients (or values) of the sharded head against those of the unsharded one."""
    for name, p in whole.named_parameters():
        found = getter(head, name)
        found, p = (found.grad, p.grad) if grad else (found, p)
        assert found.placements[0].is_shard(0) and found.shape == p.shape
        close(found.to_local(), p[own], bound)


def compare(head, whole, own, h, target, mine, bound=1e-12, scale=1.0, **options):
    """Loss and all gradients of the sharded head against those of the unsharded one."""
    h_own, h_all = h[mine].clone().requires_grad_(), h.double().clone().requires_grad_()
    for module in (head, whole):
        module.zero_grad()
    loss = head.loss(h_own, target[mine], **options)
    expected = whole.loss(h_all, target.double() if target.is_floating_point() else target, **options)
    if options.get("reduction") == "none":
        factors = torch.linspace(-1, 2, len(h), dtype=torch.float64)
        close(loss, expected[mine], bound)
        loss, expected = (loss * factors[mine].to(loss.dtype)).sum(), (expected * factors).sum()
    else:
        close(loss, expected, bound)
    loss.backward()
    expected.backward()
    close(h_own.grad, h_all.grad[mine] * scale, bound)
    close_parameters(head, whole, own, bound)


def gathered(env, value):
    """The value of every process."""
    found = [None] * env.size
    dist.all_gather_object(found, value, group=env.group)
    return found


def raises(env, words, call):
    """Every process of the check must see an error in one line, not wait for the one that made the mistake."""
    text = "nothing"
    try:
        call()
    except (ValueError, TypeError, OSError) as error:
        text = str(error)
    seen = gathered(env, text)
    assert any(words in one for one in seen), f"no process raised {words!r}, but: {seen}"
    assert all(words in one or "stopped because of an error on process" in one for one in seen), seen
    assert "\n" not in text


# ------------------------------------------------------------------------------------------------------ loss, gradients


OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.2},
    "weight": {"class_weight": True},
    "weight smoothing": {"class_weight": True, "label_smoothing": 0.1},
    "weight none smoothing": {"class_weight": True, "label_smoothing": 0.1, "reduction": "none"},
    "soft": {"soft": True},
    "soft weight smoothing": {"soft": True, "class_weight": True, "label_smoothing": 0.3},
    "soft none": {"soft": True, "reduction": "none"},
    "ignored": {"ignore": (0, 4, 8)},
    "ignored weight smoothing": {"ignore": (0, 4, 8), "class_weight": True, "label_smoothing": 0.1},
    "ignored sum": {"ignore": (1,), "reduction": "sum"},
    "ignored none": {"ignore": (1, 5), "reduction": "none"},
    "all ignored": {"ignore": tuple(range(9))},
    "all ignored sum": {"ignore": tuple(range(9)), "reduction": "sum", "label_smoothing": 0.1},
    "other ignore_index": {"ignore_index": 2},
}


def run_options(env, options, classes, dtype, kind="learned", cls=GSoftmaxHead, **head_options):
    options = dict(options)
    weight = torch.linspace(0.5, 2, classes, dtype=torch.float64) if options.pop("class_weight", None) else None
    made = {"soft": options.pop("soft", False), "ignore": options.pop("ignore", ())}
    if cls is GSoftmaxHead:
        head_options = {"lam": 1.5, "gaussians": kind, **head_options}
    head, whole, own = heads(env, classes, dtype, cls, **head_options)
    h, target, mine = batch(env, classes, **made, dtype=dtype)
    compare(head, whole, own, h, target, mine, BOUND[dtype], class_weight=weight, **options)


@check(1, 2, 3, 4)
def check_loss_and_gradients_equal_the_whole_heads(env):
    sizes = itertools.cycle((10, 7, 31, 3))  # none divides; on four processes 3 classes leave one without
    for dtype in (torch.float32, torch.float64):
        for name, options in OPTIONS.items():
            classes = next(sizes)
            try:
                run_options(env, options, classes, dtype)
            except AssertionError as error:
                raise AssertionError(f"{name}, {classes} classes, {dtype}: {error}") from error
    for classes in (10, 7, 31, 3, 1):
        run_options(env, {}, classes, torch.float32)


@check(1, 2, 3, 4, slow=True)
def check_all_options_with_all_sizes(env):
    for dtype, classes, kind in itertools.product(BOUND, (10, 7, 31, 3, 1), ("learned", "fixed", "tracked")):
        for options in OPTIONS.values():
            run_options(env, options, classes, dtype, kind)


@check()
def check_other_heads(env):
    """Softmax, no bias, fixed and tracked Gaussians, lam = 0."""
    for dtype in BOUND:
        for options in (OPTIONS["plain"], OPTIONS["soft weight smoothing"], OPTIONS["ignored weight smoothing"]):
            run_options(env, options, 7, dtype, cls=SoftmaxHead)
            run_options(env, options, 3, dtype, cls=SoftmaxHead, bias=False)
            run_options(env, options, 10, dtype, "fixed")
            run_options(env, options, 10, dtype, lam=0.0)
            run_options(env, options, 7, dtype, bias=False)
            run_options(env, options, 10, dtype, "tracked")


@check()
def check_many_tiles(env):
    """Tiles smaller than x in both directions give what one tile gives."""
    with mock.patch.dict(sharded.TILE, cpu=(6, 2)):
        for name in ("plain", "none", "weight smoothing", "soft weight smoothing", "ignored"):
            run_options(env, OPTIONS[name], 31, torch.float64)
        run_options(env, OPTIONS["plain"], 31, torch.float64, "tracked")
        head, whole, own, h, target, mine = setup(env, 31)
        for k in (1, 4, 31):
            close(head.topk(h[mine], k)[0], whole.topk(h[mine], k)[0])
            assert torch.equal(head.topk(h[mine], k)[1], whole.topk(h[mine], k)[1])


@check()
def check_large_outputs_keep_their_digits(env):
    """z of 1e4 in float32: the loss is a difference of such numbers, and must not be off by their rounding."""
    head, whole, own, h, target, mine = setup(env, 10, dtype=torch.float32)
    with torch.no_grad():
        head.bias.to_local().fill_(1e4)
        whole.bias.fill_(1e4)
    x = whole.features(h.double()).float().double()  # x rounded to float32, so that only the loss differs
    expected = nn.functional.cross_entropy(whole.gaussians(x), target, label_smoothing=0.1)
    got = head.loss(h[mine], target[mine], label_smoothing=0.1)
    assert abs(got.item() - expected.item()) < 3e-3, (got, expected)  # 1e4 has a spacing of 1e-3


@check()
def check_masked_class(env):
    """A class at -inf has no probability and no gradient, and makes no nan."""
    head, whole, own, h, target, mine = setup(env, 10)
    with torch.no_grad():
        whole.bias[4] = -torch.inf
        head.bias.to_local().copy_(whole.bias[own])
    target[target == 4] = 5
    h_own = h[mine].requires_grad_()
    loss = head.loss(h_own, target[mine])
    loss.backward()
    close(loss, whole.loss(h, target))
    assert all(torch.isfinite(g).all() for g in (h_own.grad, *(p.grad.to_local() for p in head.parameters())))


@check()
def check_leading_dimensions_and_unsigned_labels(env):
    head, whole, own = heads(env, 7)
    h, target, mine = batch(env, 7, rows=[2, 2, 2, 2])
    h, target = h.view(4, 1, 2, D), target.view(4, 1, 2)
    loss = head.loss(h[env.rank], target[env.rank].byte(), reduction="none")
    assert loss.shape == (1, 2)
    close(loss, whole.loss(h, target, reduction="none")[env.rank])
    assert head.predict(h[env.rank]).shape == (1, 2) and head.topk(h[env.rank], 3)[1].shape == (1, 2, 3)


@check()
def check_half_precision_and_autocast(env):
    """bfloat16 h and weights, and autocast over float32: as far from float64 as the whole head is, or nearer."""
    for autocast in (False, True):
        dtype = torch.float32 if autocast else torch.bfloat16
        torch.manual_seed(1)
        head = ShardedGSoftmaxHead(D, 31, dtype=dtype, mesh=env.mesh, averaged=False)
        torch.manual_seed(1)
        whole = GSoftmaxHead(D, 31, dtype=dtype, impl="plain")
        exact = copy.deepcopy(whole).double()
        own = head.shard.classes
        h, target, mine = batch(env, 31, dtype=dtype)
        h_own, h_all, h_exact = (t.clone().requires_grad_() for t in (h[mine], h, h.double()))
        context = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
        with context:
            loss, expected = head.loss(h_own, target[mine]), whole.loss(h_all, target)
        assert loss.dtype == expected.dtype, (loss.dtype, expected.dtype)
        true = exact.loss(h_exact, target)
        for each in (loss, expected, true):
            each.backward()

        def far(a, b, c):
            scale = c.abs().max().item()
            allowed = (b.double() - c).abs().max().item() + 0.02 * scale
            assert a.dtype == b.dtype
            assert (a.double() - c).abs().max().item() <= allowed

        far(loss.detach(), expected.detach(), true.detach())
        if len(h_own):
            far(h_own.grad, h_all.grad[mine], h_exact.grad[mine])
        for name, p in whole.named_parameters():
            c = getter(exact, name).grad[own]
            if len(c):
                far(getter(head, name).grad.to_local(), p.grad[own], c)


@check()
def check_nothing_holds_all_logits(env):
    """No tensor of the size of all logits, nor even of the own ones, is made on the way; and none is sent."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, torch.Tensor) and t.device.type != "meta" and not hasattr(t, "to_local"):
                    self.elements = max(self.elements, t.numel())
            return out

    classes, n = 4000, 64
    head, _, own = heads(env, classes, torch.float32)
    h = torch.randn(n, D, requires_grad=True)
    target = torch.randint(classes, (n,))
    with mock.patch.dict(sharded.TILE, cpu=(4096, 512)), Largest() as largest, sharded.bytes_on_wire() as wire:
        head.loss(h, target, label_smoothing=0.1).backward()
    # h of all, as bytes; the own logits are 256,000 and all are 1,024,000
    assert largest.elements == n * env.size * D * 4, largest.elements
    # h forward and dh backward, targets, header, and 2 numbers and a maximum per row
    k, rows = env.size, n * env.size
    there = (k - 1) * (n * D * 4 + n * 8 + 4 * 8) + (k - 1) / k * rows * D * 4 + 2 * (k - 1) / k * rows * 3 * 4
    assert wire.total == round(there), (wire, there)
    assert sum(wire.by_purpose.values()) == wire.total and wire.calls == 6


@check()
def check_backward_twice_and_accumulation(env):
    head, whole, own, h, target, mine = setup(env, 7)
    loss = head.loss(h[mine].requires_grad_(), target[mine])
    loss.backward(retain_graph=True)
    once = [p.grad.to_local().clone() for p in head.parameters()]
    loss.backward()
    for p, g in zip(head.parameters(), once, strict=True):
        close(p.grad.to_local(), 2 * g)


@check()
def check_frozen_parts(env):
    """Some processes have no h that needs a gradient, or a head that does not learn."""
    head, whole, own, h, target, mine = setup(env, 10)
    h_all = h.clone().requires_grad_()
    whole.loss(h_all, target).backward()
    head.requires_grad_(False)
    h_own = h[mine].clone().requires_grad_(env.rank != 1)  # process 1 forgot
    head.loss(h_own, target[mine]).backward()
    if env.rank != 1:
        close(h_own.grad, h_all.grad[mine])
    assert all(p.grad is None for p in head.parameters())
    head.requires_grad_(True)
    head.loss(h[mine], target[mine]).backward()  # a frozen backbone
    close(head.weight.grad.to_local(), whole.weight.grad[own])
    with torch.no_grad():
        close(head.loss(h[mine], target[mine]), whole.loss(h, target))


@check()
def check_copies(env):
    """A deep copy, as used for weight averaging, has its own parameters; state_dict can be loaded again."""
    head, whole, own, *data = setup(env, 10)
    other = copy.deepcopy(head)
    state = {name: t.clone() for name, t in head.state_dict().items()}
    with torch.no_grad():
        head.weight.zero_()
    compare(other, whole, own, *data)
    head.load_state_dict(state)
    compare(head, whole, own, *data)
    assert f"classes {own.start} to {own.stop - 1} of 10" in repr(head)


@check()
def check_runs_are_the_same(env):
    """The same call twice gives the same bits."""
    found = []
    for _ in range(2):
        head, _, _, h, target, mine = setup(env, 31, dtype=torch.float32)
        h_own = h[mine].requires_grad_()
        loss = head.loss(h_own, target[mine], label_smoothing=0.1)
        loss.backward()
        found.append([loss.detach(), h_own.grad, *(p.grad.to_local() for p in head.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert len(set(gathered(env, found[0][0].item()))) == 1  # bit-identical on every process


# ---------------------------------------------------------------------------------------------------------- a backbone


def network():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, D)).double()


@check(2, 3)
def check_backbone_under_ddp(env):
    """Training a backbone under DDP with a sharded head is training both in one process on the joined batch."""
    head, whole, own = heads(env, 7, averaged=True)
    backbone = nn.parallel.DistributedDataParallel(network(), process_group=env.group)
    reference = network()
    optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.3, momentum=0.9, foreach=False)
    expected = torch.optim.SGD([*reference.parameters(), *whole.parameters()], lr=0.3, momentum=0.9)
    rows = [4, 6, 2][: env.size]  # uneven
    mine = slice(sum(rows[: env.rank]), sum(rows[: env.rank + 1]))
    for step in range(4):
        g = torch.Generator().manual_seed(step)
        images, target = torch.randn(sum(rows), 6, generator=g).double(), torch.randint(7, (sum(rows),), generator=g)
        optimizer.zero_grad()
        expected.zero_grad()
        loss = head.loss(backbone(images[mine]), target[mine], label_smoothing=0.1)
        loss.backward()
        reference_loss = whole.loss(reference(images), target, label_smoothing=0.1)
        reference_loss.backward()
        close(loss, reference_loss)
        for p, q in zip(backbone.parameters(), reference.parameters(), strict=True):
            close(p.grad, q.grad)
        norm = sharded.clip_grad_norm_([*backbone.parameters(), *head.parameters()], 0.4)
        close(norm, nn.utils.clip_grad_norm_([*reference.parameters(), *whole.parameters()], 0.4), 1e-6)
        optimizer.step()
        expected.step()
    for p, q in zip(backbone.parameters(), reference.parameters(), strict=True):
        close(p, q, 1e-9)
    close_parameters(head, whole, own, 1e-9, grad=False)


@check()
def check_averaged_scales_dh_alone(env):
    for averaged, scale in ((True, env.size), (False, 1)):
        head, whole, own, h, target, mine = setup(env, 7, averaged=averaged)
        compare(head, whole, own, h, target, mine, scale=scale)
        compare(head, whole, own, h, target, mine, scale=scale, reduction="none")
        h_own, h_all = h[mine].clone().requires_grad_(), h.clone().requires_grad_()
        head(h_own).to_local().square().sum().backward()
        whole(h_all).square().sum().backward()
        close(h_own.grad, scale * h_all.grad[mine])


# ------------------------------------------------------------------------------------------------------------- outputs


@check(1, 4)
def check_outputs(env):
    for classes, cls in ((10, GSoftmaxHead), (3, GSoftmaxHead), (7, SoftmaxHead)):
        head, whole, own, h, target, mine = setup(env, classes, cls=cls)
        for name in ("features", "forward", "predict_proba"):
            out, expected = getattr(head, name)(h[mine]), getattr(whole, name)(h)
            assert out.shape == expected.shape
            close(out.to_local(), expected[:, own])
            close(out.full_tensor(), expected)
        assert torch.equal(head.predict(h[mine]), whole.predict(h)[mine])
        assert torch.equal(whole.predict(h), whole(h).argmax(1))
        for k in (1, 3):
            values, indices = head.topk(h[mine], k)
            expected_values, expected = whole(h).topk(k)
            close(values, expected_values[mine])
            assert torch.equal(indices, expected[mine])
        # gradients through x and z
        h_own, h_all = h[mine].clone().requires_grad_(), h.clone().requires_grad_()
        head(h_own).to_local().sin().sum().backward()
        whole(h_all).sin().sum().backward()
        close(h_own.grad, h_all.grad[mine])
        close_parameters(head, whole, own)
        plain = head.eval().unsharded()
        assert type(plain) is cls and not plain.training and str(plain) == str(whole)
        assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), whole.parameters(), strict=True))


@check()
def check_ties_go_to_the_first_class(env):
    head, _, own = heads(env, 10, cls=SoftmaxHead)
    with torch.no_grad():
        head.weight.to_local().zero_()
        head.bias.to_local().copy_((torch.arange(10) >= 4).double()[own])
    assert head.predict(torch.ones(2, D).double()).tolist() == [4, 4]
    assert head.topk(torch.ones(1, D).double(), 10)[1].sort()[0].tolist() == [list(range(10))]


@check()
def check_top1_error(env):
    head, whole, own = heads(env, 7)
    batches = [batch(env, 7, seed=i, ignore=(0, 6)) for i in range(3)]
    mine = [(h[rows], target[rows]) for h, target, rows in batches][: 1 + env.rank % 3]  # some have fewer batches
    wrong = seen = 0
    for i, (h, target, _) in enumerate(batches):
        for r, n in enumerate(ROWS[env.size]):
            at = slice(sum(ROWS[env.size][:r]), sum(ROWS[env.size][:r]) + n)
            if i < 1 + r % 3:
                keep = target[at] != -100
                wrong += int((whole.predict(h[at]) != target[at])[keep].sum())
                seen += int(keep.sum())
    assert 0 < wrong < seen
    assert sharded.top1_error(head, mine) == wrong / seen
    assert math.isnan(sharded.top1_error(head, []))


# ----------------------------------------------------------------------------------------------------------- Gaussians


@check()
def check_tracked_gaussians(env):
    """They use the same rows as a single process: no ignored rows, and no update in eval mode or under no_grad."""
    for classes in (10, 3):
        head, whole, own = heads(env, classes, gaussians="tracked", momentum=0.3)
        for step in range(3):
            h, target, mine = batch(env, classes, ignore=(1, 7) if step == 1 else (), seed=step, soft=step == 2)
            compare(head, whole, own, h, target, mine)
            close(head.mu.to_local(), whole.mu[own])
            close(head.sigma.to_local(), whole.sigma[own])
        close(head(h[mine]).to_local(), whole(h)[:, own])  # takes a step too
        close(head.mu.to_local(), whole.mu[own])
        # two losses before the backward pass: the second step must not change the first one's gradient
        again = h[mine].clone().requires_grad_(), h.clone().requires_grad_()
        (head.loss(again[0], target[mine]) + head.loss(again[0] * 2, target[mine])).backward()
        (whole.loss(again[1], target) + whole.loss(again[1] * 2, target)).backward()
        close(again[0].grad, again[1].grad[mine])
        before = head.mu.to_local().clone()
        with torch.no_grad():
            head.loss(h[mine], target[mine])
        head.eval()
        head.loss(h[mine], target[mine])
        target = torch.full((len(h),), -100)
        head.train()
        head.loss(h[mine], target[mine])  # no row counts
        assert torch.equal(before, head.mu.to_local())


@check()
def check_fit_gaussians(env):
    head, whole, own = heads(env, 10)
    batches = [batch(env, 10, seed=i) for i in range(2)]
    mine = [(h[rows], None) for h, _, rows in batches]
    if env.rank == 3:
        mine = [(torch.cat([h for h, _ in mine]), None)]  # the same rows in one batch
    head.fit_gaussians(mine)
    x = torch.cat([whole.features(h) for h, _, _ in batches])
    close(head.mu.to_local(), x.mean(0)[own], 1e-9)
    close(head.sigma.to_local(), x.std(0, correction=0)[own], 1e-9)


@check()
def check_initial_gaussians(env):
    for mu, sigma in ((0.5, 2.0), (list(range(7)), torch.linspace(0.5, 3, 7))):
        options = {"mu": mu, "sigma": sigma, "gaussians": "fixed", "dtype": torch.float64}
        head = ShardedGSoftmaxHead(D, 7, mesh=env.mesh, **options)
        whole = GSoftmaxHead(D, 7, **options)
        own = head.shard.classes
        for _ in range(2):
            close(head.mu.to_local(), whole.mu[own])
            close(head.sigma.to_local(), whole.sigma[own])
            close(head.sigma.full_tensor(), whole.sigma)
            head.gaussians.set_gaussians(1.0, 1.0)
            assert (head.mu.to_local() == 1).all()
            head.reset_parameters()
        assert not list(head.gaussians.parameters())


@check()
def check_random_state_after_making_a_head(env):
    """A head that is sharded draws what the whole one draws, also where it is drawn in pieces."""
    torch.manual_seed(3)
    GSoftmaxHead(D, 7)
    expected = torch.rand(3)
    torch.manual_seed(3)
    ShardedGSoftmaxHead(D, 7, mesh=env.mesh)
    assert torch.equal(torch.rand(3), expected)


# ----------------------------------------------------------------------------------------------------------- negatives


@check(1, 3)
def check_all_negatives_are_the_exact_loss(env):
    for options, classes in itertools.product(({}, {"label_smoothing": 0.2}, {"reduction": "none"}), (10, 3)):
        head, *rest = heads(env, classes, negatives=classes)
        compare(head, *rest, *batch(env, classes, ignore=(2,)), **options)
        assert int(head.draws) == 1


@check(1, 3)
def check_negatives_are_unbiased(env, trials=(500, 60)):
    """Over many samples exp(loss + z_target), the sum of exponentials, and the smoothing term average to the truth."""
    classes, trials = 40, trials[env.size > 1]
    head, whole, own = heads(env, classes, negatives=9)
    h, target, mine = batch(env, classes, seed=4)
    target[:] = torch.tensor([3, 3, 17, 25, 39, 3, 0, 17, 25])  # few targets, so that most classes must be sampled
    with torch.no_grad():
        for module in (head, whole):
            module.bias.add_(3.0)
        weight = torch.linspace(0.5, 2, classes, dtype=torch.float64)
        z = whole(h)
        z_target = z.gather(1, target[:, None])[:, 0]
        truth = z.exp().sum(1)
    sums, smoothed = [], []
    hits = torch.zeros(own.stop - own.start)
    for _ in range(trials):
        loss = head.loss(h[mine], target[mine], reduction="none")
        sums.append((loss.detach() + z_target[mine]).exp())
        head.weight.grad = None
        loss.sum().backward()
        hits += (head.weight.grad.to_local() != 0).any(1)
        # With smoothing 1 the loss is mean(w) lse - mean(w z); the same sample again cancels the lse.
        head.draws -= 1
        options = {"reduction": "none", "label_smoothing": 1.0, "class_weight": weight}
        other = head.loss(h[mine], target[mine], **options).detach()
        smoothed.append(weight.mean() * (loss.detach() + z_target[mine]) - other)
    assert int(head.draws) == trials
    for found, expected in ((torch.stack(sums), truth[mine]), (torch.stack(smoothed), (weight * z).mean(1)[mine])):
        if found.numel():
            error = (found.mean(0) - expected) / (found.std(0) / math.sqrt(trials))
            assert error.abs().max() < 4.5, error
            assert (found.std(0) > 1e-3).all()  # something was sampled at all
    # every class that is not a target is sampled equally often, targets always
    kept = local_targets(target, own)
    assert (hits[kept] == trials).all()
    others = [i for i in range(own.stop - own.start) if i not in kept.tolist()]
    p = (9 * own.stop // 40 - 9 * own.start // 40) / len(others)
    deviation = (hits[others] - trials * p) / math.sqrt(trials * p * (1 - p))
    assert deviation.abs().max() < 4.5, deviation


def local_targets(target, own):
    return torch.unique(target[(target >= own.start) & (target < own.stop)]) - own.start


@check(1, 3, slow=True)
def check_negatives_are_unbiased_to_more_digits(env):
    check_negatives_are_unbiased(env, trials=(10_000, 1000))


@check()
def check_negatives_touch_drawn_rows_only(env):
    head, whole, own, h, target, mine = setup(env, 200, negatives=20)
    h_own = h[mine].requires_grad_()
    head.loss(h_own, target[mine]).backward()
    touched = (head.weight.grad.to_local() != 0).any(1)
    assert torch.equal(touched, head.mu.grad.to_local() != 0) and torch.equal(touched, head.bias.grad.to_local() != 0)
    targets = local_targets(target, own)
    assert touched[targets].all()
    assert int(touched.sum()) == len(targets) + 5  # 20 negatives, 5 of each process
    # From which classes were drawn, the formula, and autograd: the same loss and gradients.
    found, one = touched.nonzero()[:, 0] + own.start, torch.ones((), dtype=torch.float64)
    inverse = torch.where(torch.isin(found, target), 1.0, one * (own.stop - own.start - len(targets)) / 5)
    found, inverse = (torch.cat(parts) for parts in zip(*gathered(env, (found, inverse)), strict=True))
    w, e, h_all = torch.linspace(0.5, 2, 200, dtype=torch.float64), 0.3, h.clone().requires_grad_()
    z = whole(h_all)
    lse = (z[:, found] + inverse.log()).logsumexp(1)
    rows = ((1 - e) * w[target] + e * w.mean()) * lse - (1 - e) * w[target] * z.gather(1, target[:, None])[:, 0]
    rows = rows - (e / 200 * w[found] * inverse * z[:, found]).sum(1)
    expected = rows.sum() / w[target].sum()
    expected.backward()
    head.zero_grad()
    head.draws -= 1
    h_own.grad = None
    loss = head.loss(h_own, target[mine], label_smoothing=e, class_weight=w)
    loss.backward()
    close(loss, expected)
    close(h_own.grad, h_all.grad[mine])
    close_parameters(head, whole, own)
    # evaluation uses all classes
    head.eval()
    close(head.loss(h[mine], target[mine]), whole.loss(h, target))
    assert int(head.draws) == 1


@check()
def check_negatives_come_again_after_a_restart(env):
    head, again, other, different = (heads(env, 200, negatives=20, seed=seed)[0] for seed in (3, 3, 3, 4))
    h, target, mine = batch(env, 200)

    def go(module, steps):
        return [module.loss(h[mine], target[mine]).item() for _ in range(steps)]

    first = go(head, 3)
    sharded.save(env.folder / "draws", {"head": head})
    rest = go(head, 3)
    assert go(other, 3) == first
    sharded.load(env.folder / "draws", {"head": again})
    assert go(again, 3) == rest and len(set(first + rest)) == 6
    assert go(different, 1) != first[:1]


@check()
def check_few_negatives_still_leave_no_class_out(env):
    """One negative for four processes: each draws one, or the classes of the others would count for nothing."""
    head, whole, own, h, target, mine = setup(env, 40, negatives=1)
    head.loss(h[mine].requires_grad_(), target[mine]).backward()
    assert int((head.bias.grad.to_local() != 0).sum()) == len(local_targets(target, own)) + 1


# ------------------------------------------------------------------------------------------------------------ geometry


@check(1, 2, 3, 4)
def check_class_statistics(env):
    for classes, pooled in ((7, False), (3, False), (7, True), (3, True), (2, True)):
        head, whole, own = heads(env, classes)
        mine_statistics = sharded.ClassStatistics(head, pooled=pooled)
        expected = geometry.ClassStatistics(classes, pooled=pooled)
        for step in range(4):
            h, target, mine = batch(env, classes, ignore=(2,), seed=step)
            if classes == 7:
                target[target == 5] = 4  # a class without examples
            mine_statistics.update(head.features(h[mine] + 3), target[mine])
            expected.update(whole.features(h + 3), target)
        got, want = mine_statistics.geometry(), expected.geometry()
        for name in geometry.MEASURES:
            close(getattr(got, name), getattr(want, name), 1e-9)
            close(getattr(mine_statistics, name)(), getattr(want, name), 1e-9)
        assert torch.equal(got.count, want.count) and got.left_out == want.left_out and got.pooled == want.pooled
        assert mine_statistics.left_out() == want.left_out
        assert not want.compactness.isnan().all() and (not want.separability.isnan().all())


@check()
def check_class_statistics_of_odd_classes(env):
    """An output that never varies, on one process alone, is told on all of them."""
    head, whole, own = heads(env, 7)
    with torch.no_grad():
        whole.weight[2] = 0
        head.weight.to_local().copy_(whole.weight[own])
    for pooled in (False, True):
        got, want = sharded.ClassStatistics(head, pooled=pooled), geometry.ClassStatistics(7, pooled=pooled)
        for step in range(3):
            h, target, mine = batch(env, 7, seed=step)
            got.update(head.features(h[mine]), target[mine])
            want.update(whole.features(h), target)
        assert got.left_out() == want.left_out() and want.left_out()
        close(got.separability(), want.separability(), 1e-9)
        close(got.dprime(), want.dprime(), 1e-9)
        with sharded.bytes_on_wire() as wire:
            got.separability()
        assert wire.total < 1000  # a few numbers per class, not the 63 outputs
    h_bad = torch.full((1, D), torch.nan if env.rank == 1 else 1.0).double()
    raises(env, "x must be finite", lambda: got.update(head.features(h_bad), torch.tensor([1])))
    raises(env, "x must be the DTensor", lambda: got.update(h, target))


@check(1, 4)
def check_learned_geometry(env):
    for classes in (10, 3, 1):
        head, whole, own = heads(env, classes)
        mu, sigma = whole.mu.detach(), whole.sigma.detach()
        close(sharded.compactness(head.sigma).to_local(), geometry.compactness(sigma)[own], 1e-9)
        close(sharded.separability(head.mu, head.sigma).to_local(), geometry.separability(mu, sigma)[own], 1e-9)
        close(sharded.ratio(head.mu, head.sigma).full_tensor(), geometry.ratio(mu, sigma), 1e-9)


# --------------------------------------------------------------------------------------------------------- checkpoints


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.2, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05, betas=(0.8, 0.95)),
}


def train(backbone, head, optimizer, env, steps, mine=True):
    """Steps on the joined batch of the given numbers, of which each process takes its part."""
    for step in steps:
        g = torch.Generator().manual_seed(step)
        images, target = torch.randn(8, 6, generator=g).double(), torch.randint(10, (8,), generator=g)
        at = torch.arange(8).tensor_split(env.size)[env.rank] if mine else slice(None)
        optimizer.zero_grad()
        head.loss(backbone(images[at]), target[at], label_smoothing=0.1).backward()
        if mine:
            for p in backbone.parameters():  # added up, because averaged=False
                dist.all_reduce(p.grad, group=env.group)
        optimizer.step()


def groups(backbone, head):
    return [{"params": list(backbone.parameters())}, *param_groups(head, lr=0.02, weight_decay=0.01)]


def resumed(world, path, name):
    """Three processes train and save, two continue, then one: compared with one uninterrupted run."""
    make = OPTIMIZERS[name]
    expected_head = None
    for k, steps in ((3, range(0, 3)), (2, range(3, 6)), (1, range(6, 8))):
        env = world.get(k)
        if env is None:
            continue
        head, whole, own = heads(env, 10)
        if expected_head is None:
            expected_head, expected_backbone = whole, network()
            expected = make(groups(expected_backbone, expected_head))
        backbone = network()
        optimizer = make(groups(backbone, head))
        modules = {"backbone": backbone, "head": head}
        if k < 3:
            with torch.no_grad():  # another start, which loading must undo
                for p in [*backbone.parameters(), *head.parameters()]:
                    p.mul_(0.0)
            optimizer.param_groups[0]["lr"] = 123.0
            with only(env.group):
                assert sharded.load(path / name, modules, optimizer) == {"step": steps.start}
        train(backbone, head, optimizer, env, steps)
        train(expected_backbone, expected_head, expected, env, steps, mine=False)
        for p, q in zip(backbone.parameters(), expected_backbone.parameters(), strict=True):
            close(p, q, 1e-10)
        close_parameters(head, expected_head, own, 1e-10, grad=False)
        assert int(optimizer.state[backbone[0].weight].get("step", steps.stop)) == steps.stop
        with only(env.group):
            sharded.save(path / name, modules, optimizer, extra={"step": steps.stop})
        dist.barrier(env.group)
    return expected_head, expected


def only(group):
    """`save` and `load` with only the processes of a group, as if there were no others."""
    return mock.patch.object(collectives, "world", lambda: group)


@check()
def check_checkpoint_of_three_goes_on_with_two_and_one(env):
    for name in OPTIMIZERS:
        if env.rank < 3:
            whole, optimizer = resumed(env.world, env.folder, name)
        if env.rank == 0:
            # and the whole head in one process without any processes
            other, head = network(), GSoftmaxHead(D, 10, dtype=torch.float64)
            fresh = OPTIMIZERS[name](groups(other, head))
            with only(None):
                assert sharded.load(env.folder / name, {"backbone": other, "head": head}, fresh) == {"step": 8}
            for p, q in zip(head.parameters(), whole.parameters(), strict=True):
                close(p, q, 1e-10)
                for key, value in optimizer.state[q].items():
                    close(fresh.state[p][key], value, 1e-10)
            assert len(list((env.folder / name).iterdir())) == 2  # the index and one file: old ones are gone
        dist.barrier(env.group)


@check()
def check_whole_checkpoint_into_a_sharded_head(env):
    head, whole, own = heads(env, 10, gaussians="tracked")
    with torch.no_grad():
        whole.weight += 1
        whole.gaussians.mu += 2
    if env.rank == 0:
        with only(None):
            sharded.save(env.folder / "whole", {"head": whole})
    dist.barrier(env.group)
    assert sharded.load(env.folder / "whole", {"head": head}) is None
    for name, t in whole.state_dict().items():
        assert torch.equal(head.state_dict()[name].to_local(), t[own])


@check()
def check_only_needed_rows_are_read(env):
    head, _, own = heads(env, 31)
    sharded.save(env.folder / "rows", {"head": head})
    read = []
    real = checkpoint.Reader.read

    def watched(self, name, rows):
        out = real(self, name, rows)
        read.append((name, rows, out.shape[0]))
        return out

    with mock.patch.object(checkpoint.Reader, "read", watched):
        sharded.load(env.folder / "rows", {"head": head})
    assert {name for name, _, _ in read} == {f"head/{n}" for n in head.state_dict()}
    assert all(rows == [own.start, own.stop] and n == own.stop - own.start for _, rows, n in read)


@check()
def check_damaged_checkpoints_are_refused(env):
    head, whole, own = heads(env, 10)
    folder = env.folder / "damaged"
    sharded.save(folder, {"head": head}, extra={"epoch": 1})
    index = (folder / "index.json").read_bytes()
    files = sorted(p for p in folder.iterdir() if p.suffix == ".safetensors")
    assert len(files) == env.size
    victim, content = files[2], files[2].read_bytes()
    before = [p.to_local().clone() for p in head.parameters()]

    def spoil(path, data):
        dist.barrier(env.group)
        if env.rank == 0:
            path.unlink() if data is None else path.write_bytes(data)
        dist.barrier(env.group)

    other = json.loads(index)
    other["tensors"]["head/weight"]["parts"][0]["rows"][1] -= 1
    other["sha256"] = checkpoint.index_sha256(other)
    outside = json.loads(index.replace(victim.name.encode(), b"../" + victim.name.encode()))
    outside["sha256"] = checkpoint.index_sha256(outside)
    ends = (len(content) - 3, 20)
    of_victim = [content[:-1], b"", None, *(content[:a] + bytes([content[a] ^ 1]) + content[a + 1 :] for a in ends)]
    of_index = [index[:-20], index.replace(b'"epoch": 1', b'"epoch": 2'), b"[]", b"\xff\xfe", b'{"format": "other"}']
    of_index += [json.dumps(other).encode(), json.dumps(outside).encode(), None]
    for path, data in [*((victim, data) for data in of_victim), *((folder / "index.json", data) for data in of_index)]:
        spoil(path, data)
        raises(env, path.name, lambda: sharded.load(folder, {"head": head}))
        assert all(torch.equal(a, p.to_local()) for a, p in zip(before, head.parameters(), strict=True))
        spoil(path, content if path == victim else index)
    assert sharded.load(folder, {"head": head}) == {"epoch": 1}
    # other modules and optimisers than were saved
    more, _, _ = heads(env, 11)
    bare, _, _ = heads(env, 10, bias=False)
    raises(env, "must have shape", lambda: sharded.load(folder, {"head": more}))
    raises(env, "also has head/bias", lambda: sharded.load(folder, {"head": bare}))
    raises(env, "does not have", lambda: sharded.load(folder, {"body": head}))
    sgd = torch.optim.SGD(head.parameters(), lr=0.1)
    raises(env, "has no optimizer", lambda: sharded.load(folder, {"head": head}, sgd))
    foreign = torch.optim.SGD(more.parameters(), lr=0.1)
    raises(env, "only parameters of the modules", lambda: sharded.save(folder, {"head": head}, foreign))
    sharded.save(folder, {"head": head}, sgd)
    adam = torch.optim.Adam(head.parameters())
    raises(env, "optimizer must be SGD", lambda: sharded.load(folder, {"head": head}, adam))
    fewer = torch.optim.SGD([head.weight], lr=0.1)
    raises(env, "optimizer must hold parameters", lambda: sharded.load(folder, {"head": head}, fewer))
    assert sharded.load(folder, {"head": head}, sgd) is None


@check()
def check_interrupted_save_keeps_the_checkpoint(env):
    """One process fails to write, or all stop before the index: the old checkpoint is still there, complete."""
    head, _, _ = heads(env, 10)
    folder = env.folder / "interrupted"
    sharded.save(folder, {"head": head}, extra={"epoch": 1})
    old = [p.to_local().clone() for p in head.parameters()]
    names = sorted(p.name for p in folder.iterdir())
    with torch.no_grad():
        for p in head.parameters():
            p.add_(1.0)
    save_file, replace = safetensors.torch.save_file, os.replace

    def full(tensors, path):
        if env.rank == 2:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save_file(tensors, path)

    def no_index(source, destination):
        if Path(destination).name == "index.json":
            raise OSError(28, "No space left on device")
        replace(source, destination)

    for module, name, fake, words in (
        (safetensors.torch, "save_file", full, "No space left"),
        (os, "replace", no_index, "index.json cannot be written: No space left"),
    ):
        with mock.patch.object(module, name, fake):
            raises(env, words, lambda: sharded.save(folder, {"head": head}, extra={"epoch": 2}))
        dist.barrier(env.group)
        assert sorted(p.name for p in folder.iterdir()) == names
    assert sharded.load(folder, {"head": head}) == {"epoch": 1}
    assert all(torch.equal(a, p.to_local()) for a, p in zip(old, head.parameters(), strict=True))
    sharded.save(folder, {"head": head}, extra={"epoch": 3})
    assert sharded.load(folder, {"head": head}) == {"epoch": 3}


# -------------------------------------------------------------------------------------------------------------- misuse


@check()
def check_mistakes_end_on_every_process(env):
    head, _, _ = heads(env, 7)
    h, target, _ = batch(env, 7, rows=[2, 2, 2, 2])
    h, target = h[:2], target[:2]
    mine = env.rank == 2  # the process that makes the mistake
    bad = {
        "target must lie between 0 and 6": lambda: head.loss(h, torch.tensor([0, 7]) if mine else target),
        "h must have 5 features": lambda: head.loss(h[:, :4] if mine else h, target),
        "h must be floating point": lambda: head.loss(h.long() if mine else h, target),
        "target of class indices must have shape": lambda: head.loss(h, target[:1] if mine else target),
        "target must be a tensor": lambda: head.loss(h, [0, 1] if mine else target),
        "label_smoothing must lie between": lambda: head.loss(h, target, label_smoothing=2.0 if mine else 0.0),
        "reduction must be one of": lambda: head.loss(h, target, reduction="max" if mine else "mean"),
        "weight must have shape": lambda: head.loss(h, target, class_weight=torch.ones(3)),
        "every process must make the same call": lambda: head.loss(h, target, reduction="sum" if mine else "mean"),
        "target must hold probabilities, got NaN": lambda: head.loss(
            h, torch.full((2, 7), torch.nan if mine else 0.1).double()
        ),
        "batches must contain at least two": lambda: head.fit_gaussians([]),
        "batches must contain finite": lambda: head.fit_gaussians([h / 0]),
    }
    for words, call in bad.items():
        raises(env, words, call)
    raises(env, "h must have 5 features", lambda: head(h[:, :4]))
    raises(env, "h must have 5 features", lambda: head.predict(h[:, :4] if mine else h))
    raises(env, "k must lie between", lambda: head.topk(h, 8))
    sampled, _, _ = heads(env, 7, negatives=3)
    raises(env, "class indices with negatives", lambda: sampled.loss(h, torch.ones(2, 7).double() / 7))
    for words, options in {
        "no multi-label form, got form='paired'": {"form": "paired"},
        "negatives must be a whole number, 1 or more, got 0": {"negatives": 0},
        "seed must be a whole number, 0 or more, got -1": {"seed": -1},
        "sigma must be above": {"sigma": 0.0},
        "sigma must be above sigma_min": {"sigma": [1.0] * 6 + [0.0]},
        "mu must be a number or 7 values": {"mu": [1.0]},
        "gaussians must be one of": {"gaussians": "guessed"},
    }.items():
        raises(env, words, lambda options=options: ShardedGSoftmaxHead(D, 7, mesh=env.mesh, **options))
    raises(env, "num_classes must be", lambda: ShardedSoftmaxHead(D, 0, mesh=env.mesh))
    raises(env, "shard must be one of class, got 'rows'", lambda: sharded_class(GSoftmaxHead, "rows"))
    raises(
        env,
        "shard='class' is for SoftmaxHead and GSoftmaxHead, got LSoft",
        lambda: sharded_class(LSoftmaxHead, "class"),
    )
    raises(env, "are fitted by the head", lambda: head.gaussians.fit_gaussians([]))
    raises(env, "target must not require a gradient", lambda: head.loss(h, torch.ones(2, 7).double().requires_grad_()))
    other = env.world.get(1)  # a mesh of process 0 alone
    if other is not None:
        assert ShardedSoftmaxHead(D, 7, mesh=other.mesh).shard.stop == 7
    # On a GPU labels are not looked at, so one that no process has must not give a loss that looks right.
    with mock.patch.object(checks, "check_labels"):
        assert torch.isnan(head.loss(h, torch.tensor([0, 7])))
    # and afterwards all processes are in step
    assert torch.isfinite(head.loss(h, target))


# ------------------------------------------------------------------------------------------------------------- running


WORLDS = {}  # of a process, by their size: those that it is in


def connect(rank, folder):
    gaussians._processes = lambda: 1  # the whole head, which is compared with, stands for a single process
    for k in range(1, WORLD + 1):
        mesh = DeviceMesh("cpu", torch.arange(k))
        if rank < k:
            WORLDS[k] = SimpleNamespace(mesh=mesh, group=mesh.get_group(), rank=rank, size=k, folder=folder)
            WORLDS[k].world = WORLDS


def call(rank, name):
    function, k = CHECKS[name]
    torch.manual_seed(0)
    function(WORLDS[k])


@pytest.fixture(scope="module")
def crew(tmp_path_factory):
    """A function that runs a check on four processes, which stay until a check fails."""
    with contextlib.ExitStack() as stack:
        alive = []

        def run(name):
            if not alive:
                folder = tmp_path_factory.mktemp("sharded")
                alive.append(stack.enter_context(processes.Group(WORLD, __name__, folder / "store")))
                alive[0].run(connect, folder)
            try:
                alive[0].run(call, name, size=CHECKS[name][1])
            except AssertionError:
                alive.clear()
                raise

        yield run


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CHECKS])
def test_processes(crew, name):
    crew(name)


# ------------------------------------------------------------------------------------------------- without any process


def test_needs_processes():
    with pytest.raises(ValueError, match="init_process_group"):
        ShardedGSoftmaxHead(D, 7)


@pytest.mark.parametrize("classes", [1, 3, 7, 10, 31])
@pytest.mark.parametrize("processes", [1, 2, 3, 4, 40])
def test_split_is_that_of_chunk(classes, processes):
    parts = [sharded.split(classes, processes, rank) for rank in range(processes)]
    expected = [len(part) for part in torch.arange(classes).chunk(processes)]
    assert [b - a for a, b in parts if b > a] == expected
    assert parts[0][0] == 0 and parts[-1][1] == classes
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))


@pytest.mark.parametrize(("below", "wanted"), [(10, 10), (10, 3), (1000, 3), (1000, 240), (10**9, 1000)])
def test_distinct_draws(below, wanted):
    drawn = distinct(np.random.default_rng(0), below, wanted)
    assert len(drawn) == len(set(drawn.tolist())) == wanted and drawn.min() >= 0 and drawn.max() < below


def test_distinct_draws_are_uniform():
    counts = np.zeros(20)
    for i in range(4000):
        counts[distinct(np.random.default_rng(i), 20, 4)] += 1
    assert abs(counts - 800).max() < 4.5 * math.sqrt(4000 * 0.2 * 0.8)


def test_checkpoint_without_processes(tmp_path):
    """Plain modules, tied weights, buffers of integers, half precision and optimisers with odd state."""
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False)).to(torch.bfloat16)
    net[2].weight = net[0].weight
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1, amsgrad=True)
    net(torch.randn(4, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    sharded.save(tmp_path / "a" / "b", {"net": net}, optimizer, extra={"names": ["x"]})
    other = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False)).to(torch.bfloat16)
    other[2].weight = other[0].weight
    fresh = torch.optim.Adam(other.parameters(), lr=0.5, amsgrad=True)
    assert sharded.load(tmp_path / "a" / "b", {"net": other}, fresh) == {"names": ["x"]}
    for name, value in net.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    assert fresh.param_groups[0]["lr"] == 0.1 and fresh.param_groups[0]["betas"] == (0.9, 0.999)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert optimizer.state[p].keys() == fresh.state[q].keys()
        for key, value in optimizer.state[p].items():
            assert torch.equal(fresh.state[q][key], value)
    with pytest.raises(ValueError, match="must not contain a slash"):
        sharded.save(tmp_path, {"a/b": net})
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot be written"):
        sharded.save(tmp_path / "file" / "folder", {"net": net})
    with pytest.raises(ValueError, match="holds no checkpoint"):
        sharded.load(tmp_path / "nothing", {"net": net})


def test_clip_grad_norm_without_processes():
    with pytest.raises(ValueError, match="max_norm"):
        sharded.clip_grad_norm_([], -1.0)
    assert sharded.clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0) == 0
