"""Replace the classifier of a model by a head: timm, torchvision, transformers, or any model with a last linear layer.

The model's forward then returns z instead of x.  Criteria on logits (`nn.CrossEntropyLoss`, label smoothing, mixup),
metrics and trainers work unchanged, because cross entropy of z is the G-softmax loss.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from . import checks
from .gaussians import named_gaussians
from .heads import HEADS, SoftmaxHead
from .layout import two_outputs

__all__ = ["attach", "attached_loss", "head_of"]

_log = logging.getLogger(__name__)


def attach(
    model: nn.Module,
    head: str = "gsoftmax",
    num_classes: int | None = None,
    *,
    name: str | Sequence[str] | None = None,
    **head_options: Any,
) -> nn.Module:
    """Replace the classifier of `model`, in place, by a head, and return the model.

    The head reuses the classifier's `weight` and `bias`, the same Parameter objects: at lam = 0 the outputs are
    unchanged, bit for bit, and an optimizer that held them still does.  The Gaussians are new parameters, so build the
    optimizer afterwards, for instance from `param_groups(model, lr=...)`.  Attach before wrapping the model for
    distributed training, and load an old checkpoint before attaching (or after, with `strict=False`).

    model: a plain module, not yet wrapped, scripted or compiled
    head: a name in `gsoftmax.heads.HEADS`; cosface, arcface, lgm and etf, whose x is another function of h and the
        weights, get new weights
    num_classes: a number other than the classifier's creates new weights, initialized like `nn.Linear`, and updates the
        model's own count (`num_classes`, `num_labels`, `config.num_labels`)
    name: the module to replace, as in `model.named_modules()`; several names replace each.  Without it, it is
        `get_classifier()` of a timm model (both if it is distilled), of a transformers model the last linear layer with
        `config.num_labels` outputs, otherwise the last one with `model.num_classes` outputs or, without that number,
        the last one registered.  `head_of(model)` and `print(model)` show the choice.  Auxiliary classifiers stay.
    head_options: options of the head's class, such as lam, sigma and form

    The forms "paired", "independent" and "printed" have two outputs per label, so weights are new and forward returns
    (N, 2, num_classes).  L-softmax has no bias: a trained one is dropped with a warning.  Its margin needs the target,
    which forward does not get: train it with `attached_loss`.

    >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    >>> attach(net, "gsoftmax", lam=0.5)
    Sequential(
      (0): Linear(in_features=8, out_features=16, bias=True)
      (1): ReLU()
      (2): GSoftmaxHead(
        16, 3
        (gaussians): GaussianLogits(3, lam=0.5, gaussians='learned', sigma_min=0.01)
      )
    )
    >>> nn.CrossEntropyLoss()(net(torch.zeros(4, 8)), torch.tensor([0, 1, 2, 0])).backward()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    checks.check_choice("head", head, tuple(HEADS))
    if num_classes is not None and (type(num_classes) is not int or num_classes < 1):
        raise ValueError(f"num_classes must be a positive integer, got {num_classes!r}")
    # by name, because importing them all takes longer than this package
    wrappers = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"}
    if {*wrappers, "ScriptModule", "OptimizedModule"}.intersection(kind.__name__ for kind in type(model).__mro__):
        raise ValueError(f"model must be the plain module, got {_kind(model)}: attach first, then wrap or compile")
    # Validate the options before replacing anything.  The lengths of mu and sigma wait for the number of classes.
    unknown = () if num_classes else ("mu", "sigma")
    size = num_classes or 2
    HEADS[head](size, size, device="meta", **{k: v for k, v in head_options.items() if k not in unknown})

    created = name is None and num_classes is not None and _create_classifier(model, num_classes)
    places = _find(model, name, num_classes)
    heads = [_make_head(HEADS[head], old, num_classes, head_options) for _, old in places]
    if not created and "bias" not in head_options:
        dropped = [path or "the layer" for (path, old), new in zip(places, heads, strict=True) if _loses_bias(old, new)]
        if dropped:
            warnings.warn(
                f"L-softmax has no bias: the bias of {', '.join(dropped)} is dropped, which changes the outputs",
                stacklevel=2,
            )
    for (path, old), new in zip(places, heads, strict=True):
        _write_count(model, path, getattr(old, "num_classes", old.out_features), new.num_classes)
        if path == "":
            return new  # the model was the classifier
        replace_modules(model, {old: new})
        _log.info("replaced %s of %s by %s", path, type(model).__name__, type(new).__name__)
    return model


def head_of(model: nn.Module, name: str | None = None) -> SoftmaxHead:
    """The attached head, also inside DDP, torch.compile and other wrappers.

    model: a model after `attach`
    name: which of several heads, as in `model.named_modules()`

    >>> net = attach(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
    >>> head_of(net).mu.shape
    torch.Size([3])
    """
    found = dict(_heads(model))
    if name in found:
        return found[name]
    if name is not None:
        raise ValueError(
            f"{type(model).__name__} has no head at name={name!r}; its heads are {', '.join(found) or 'none'}"
        )
    if not found:
        raise ValueError(f"{type(model).__name__} has no gsoftmax head: call attach(model, ...) first")
    if len(found) > 1:
        raise ValueError(f"{type(model).__name__} has {len(found)} heads, {', '.join(found)}: choose one with name=")
    return next(iter(found.values()))


def attached_loss(
    model: nn.Module, inputs: Any, target: Tensor, *, return_logits: bool = False, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`head.loss(h, target)` on the h that the model passes to its head.

    L-softmax is trained this way, because its margin needs the target.  G-softmax and softmax use the fused linear
    loss, which never stores all logits at once.  The loss is computed inside forward and returned in place of the
    logits, so that wrappers such as DistributedDataParallel see an ordinary forward.

    model: a model with one head, after `attach`
    inputs: of the model, as a tensor, a tuple of arguments or a mapping of keyword arguments (as from a tokenizer)
    target: class indices or probabilities, as in `SoftmaxHead.loss`
    return_logits: return (loss, z), z without margin and without gradient
    options: those of `head.loss`: class_weight, ignore_index, reduction, label_smoothing

    >>> net = attach(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), "lsoftmax", num_classes=5)
    >>> attached_loss(net, torch.randn(4, 8), torch.tensor([0, 1, 2, 3])).backward()
    """
    h, loss, _ = forward_with_loss(model, inputs, target, **options)
    if not return_logits:
        return loss
    with torch.no_grad():
        return loss, head_of(model)(h)


class RowsError(ValueError):
    """The head gets more or fewer rows than there are targets."""


def forward_with_loss(
    model: nn.Module, inputs: Any, target: Tensor, *, keep_outputs: bool = False, **options: Any
) -> tuple[Tensor, Tensor, Any]:
    """h, the head's loss, and what forward returns: with `keep_outputs` the model's outputs, else a placeholder."""
    head = head_of(model)
    taken: list[tuple[Tensor, Tensor]] = []
    rows = target.shape[:-1] if target.is_floating_point() or head.form is not None else target.shape

    def loss_instead(h: Tensor) -> Tensor:
        if h.shape[:-1] != rows:
            raise RowsError(
                f"the head of {type(model).__name__} gets h of shape {tuple(h.shape)} for a target of "
                f"{tuple(target.shape)}: if the model selects among the head's outputs afterwards, apply the loss to "
                "the output of forward instead"
            )
        del head.forward  # which the loss may need
        loss = head.loss(h, target, **options)
        if keep_outputs:
            z = _logits_without_tracking(head, h)
        else:
            shape = (2, head.num_classes) if two_outputs(head.form) else (head.out_features,)
            z = loss.sum().expand(*h.shape[:-1], *shape)
        head.forward = loss_instead  # type: ignore[assignment, method-assign]
        taken.append((h.detach(), loss))
        return z

    head.forward = loss_instead  # type: ignore[assignment, method-assign]
    try:
        args, kwargs = split_arguments(inputs)
        outputs = model(*args, **kwargs)
    finally:
        vars(head).pop("forward", None)
    if len(taken) != 1:
        raise ValueError(
            f"forward of {type(model).__name__} called its head {len(taken)} times, expected once: apply the loss to "
            "the output of forward instead"
        )
    return *taken[0], outputs


def split_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a model, from a tensor, a tuple or a mapping."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}


def _logits_without_tracking(head: SoftmaxHead, h: Tensor) -> Tensor:
    """z, while tracked Gaussians stay as they are: the loss has made their step."""
    moving = [g for _, g in named_gaussians(head) if g.training]
    for g in moving:
        g.training = False
    try:
        return head(h)
    finally:
        for g in moving:
            g.training = True


# ----------------------------------------------------------------------------------------------- finding the classifier

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_AFTER_CONVOLUTION = "(nn.Sequential(model, GaussianLogits(num_classes)) adds the term after it)"
_Classifier = nn.Linear | SoftmaxHead
_Place = tuple[str, nn.Module]


def _find(model: nn.Module, name: str | Sequence[str] | None, num_classes: int | None) -> list[tuple[str, _Classifier]]:
    """Paths and modules to replace, checked; the order of the rules is in the docstring of `attach`."""
    places: Sequence[_Place]
    if name is not None:
        places = [(path, _named(model, path)) for path in ([name] if isinstance(name, str) else name)]
    else:
        places = _heads(model) or _find_timm(model) or _find_linear(model, num_classes)
    if not places:
        raise ValueError(f"name must name at least one module of {type(model).__name__}, got {name!r}")
    for path, module in places:
        reason = _why_not(module)
        if reason is not None:
            kind = f"{_kind(module)} {reason}".strip()
            raise ValueError(
                f"attach replaces an nn.Linear, and {path or 'the model'!r} of {type(model).__name__} is {kind}; "
                "choose another module with name="
            )
    return places  # type: ignore[return-value]


def _named(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        last = ", ".join(p for p, _ in _linears(model)[-3:]) or "none"
        raise ValueError(
            f"name={path!r} is no module of {type(model).__name__}; its last linear layers: {last}"
        ) from None


def _heads(model: nn.Module) -> list[tuple[str, SoftmaxHead]]:
    return [(path, m) for path, m in model.named_modules() if isinstance(m, SoftmaxHead)]


def _linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Linear layers in the order of registration, except the output projection inside nn.MultiheadAttention, which is
    never called."""
    unused = NonDynamicallyQuantizableLinear
    return [(p, m) for p, m in model.named_modules() if isinstance(m, nn.Linear) and not isinstance(m, unused)]


def _find_timm(model: nn.Module) -> list[_Place]:
    get_classifier = getattr(model, "get_classifier", None)
    if not callable(get_classifier):
        return []
    found = get_classifier()
    paths = {id(m): path for path, m in model.named_modules()}
    places: list[_Place] = []
    for module in found if isinstance(found, (tuple, list, nn.ModuleList)) else [found]:
        if not isinstance(module, nn.Module) or isinstance(module, nn.Identity) or id(module) not in paths:
            raise ValueError(
                f"{type(model).__name__} has no classifier to replace, its get_classifier() returns {_kind(module)}: "
                "give num_classes= to create one, or choose a module with name="
            )
        path = paths[id(module)]
        inside = [(f"{path}.{p}" if p else path, m) for p, m in _linears(module)]
        # A classifier may have parts, such as a norm and a linear layer, or two layers side by side for distillation.
        places += [(p, m) for p, m in inside if m.out_features == inside[-1][1].out_features] or [(path, module)]
    return places


def _find_linear(model: nn.Module, num_classes: int | None) -> list[_Place]:
    """The last linear layer, of those with as many outputs as the model says it has classes."""
    labels = getattr(getattr(model, "config", None), "num_labels", None)  # transformers
    classes = labels if isinstance(labels, int) else getattr(model, "num_classes", None)
    every = _linears(model)
    found = [(p, m) for p, m in every if m.out_features == classes] if isinstance(classes, int) else every
    if not found:
        count = f" with {'config.num_labels' if classes is labels else 'model.num_classes'}={classes} outputs"
        raise ValueError(
            f"attach found no nn.Linear{count if isinstance(classes, int) else ''} in {type(model).__name__}; "
            f"{_last_layer(model)}; choose the module to replace with name="
        )
    path, last = found[-1]
    rivals: list[tuple[str, nn.Linear]] = []
    if isinstance(labels, int):
        body = getattr(model, "base_model", model)
        inside = set() if body is model else {id(m) for m in body.modules()}
        outside = [(p, m) for p, m in found if id(m) not in inside]
        if outside:
            path, last = outside[-1]
            rivals = [(p, m) for p, m in outside if p.split(".")[0] != path.split(".")[0]]
    elif not isinstance(classes, int):
        if last.out_features != num_classes:
            rivals = [(p, m) for p, m in every if m.out_features == num_classes][-1:]
        # Layers with the same parent and the same input, of which neither can feed the other: the classes and the boxes
        # of a detector, the outputs of two tasks.
        parent, width = path.rpartition(".")[0], last.in_features
        beside = [(p, m) for p, m in every[:-1] if p.rpartition(".")[0] == parent and m.in_features == width]
        rivals = rivals or [(p, m) for p, m in beside if m.out_features != width]
    if rivals:
        candidates = ", ".join(f"{p} ({m.out_features} outputs)" for p, m in [*rivals, (path, last)])
        raise ValueError(
            f"{type(model).__name__} has several linear layers that may be its classifier: {candidates}; choose one, "
            "or several, with name="
        )
    return [(path, last)]


def _last_layer(model: nn.Module) -> str:
    """Description of the last layer with weights, for an error message."""
    layers = [(p, m) for p, m in model.named_modules() if any(n == "weight" for n, _ in m.named_parameters("", False))]
    if not layers:
        return "it has no layer with weights"
    path, module = layers[-1]
    hint = f" {_AFTER_CONVOLUTION}" if isinstance(module, _CONVOLUTIONS) else ""
    return f"its last layer with weights is {path or 'itself'}, {_kind(module)}{hint}"


def _why_not(module: nn.Module) -> str | None:
    """None if a head can replace `module`, else the reason."""
    if isinstance(module, SoftmaxHead):
        return None
    if isinstance(module, _CONVOLUTIONS):
        return _AFTER_CONVOLUTION
    if not isinstance(module, nn.Linear):
        return ""
    if isinstance(module.weight, nn.UninitializedParameter):
        return "without weights yet: run a batch through it first"
    if "weight" not in dict(module.named_parameters(recurse=False)):
        return "whose weight is computed from others (parametrized, normalized or pruned): make it a plain one first"
    if "forward" in vars(module):
        return "whose forward was replaced by another library: attach first"
    if type(module).forward is not nn.Linear.forward and not _is_linear(module):
        return "with a custom forward"
    return None


def _is_linear(module: nn.Linear) -> bool:
    """Whether a subclass with its own forward still computes h W' + b: timm has one that only casts for TorchScript."""
    if module.weight.is_meta:
        return True
    h = torch.linspace(-1, 1, module.in_features, dtype=module.weight.dtype, device=module.weight.device)[None]
    try:
        with torch.no_grad():
            return torch.equal(module(h), F.linear(h, module.weight, module.bias))
    except Exception:  # a custom forward may raise anything
        return False


def _kind(thing: object) -> str:
    noun = type(thing).__name__
    return ("an " if noun[:1] in "AEIOU" else "a ") + noun


# ------------------------------------------------------------------------------------------------------------ replacing


def _make_head(
    cls: type[SoftmaxHead], old: _Classifier, num_classes: int | None, options: dict[str, Any]
) -> SoftmaxHead:
    classes = num_classes or int(getattr(old, "num_classes", old.out_features))
    if cls.has_bias:
        options = {"bias": old.bias is not None, **options}
    options = {**options, "dtype": old.weight.dtype}
    width = cls(old.in_features, classes, **options, device="meta").out_features
    options["device"] = old.weight.device
    if width != len(old.weight) or not (cls.reuses_weight and getattr(old, "reuses_weight", True)):
        new = cls(old.in_features, classes, **options)
    else:
        # without drawing random numbers, so that the random state does not depend on the head
        new = nn.utils.skip_init(cls, old.in_features, classes, **options)
        new.weight = old.weight
        if new.bias is not None and old.bias is not None:
            new.bias = old.bias
        elif new.bias is not None:
            nn.init.zeros_(new.bias)
        new.reset_state()
    # the dictionaries of hooks themselves, so that handles that users keep still remove their hooks
    vars(new).update({k: v for k, v in vars(old).items() if "ward_" in k and "hook" in k})
    return new.train(old.training)


def _loses_bias(old: _Classifier, new: SoftmaxHead) -> bool:
    bias = old.bias if new.weight is old.weight and new.bias is None else None
    return bias is not None and not bias.is_meta and bool((bias != 0).any())


def replace_modules(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> None:
    """Replace submodules wherever the model has them, also under several names."""
    for path, module in reversed(list(model.named_modules(remove_duplicate=False))):  # children before parents
        if module in new:
            model.set_submodule(path, new[module])


def _write_count(model: nn.Module, path: str, old: int, new: int) -> None:
    """Update the number of classes in the model and in every module on the path to its classifier."""
    if new == old:
        return
    steps = path.split(".")
    for module in [model.get_submodule(".".join(steps[:i])) for i in range(len(steps))]:
        for key in ("num_classes", "num_labels"):
            if getattr(module, key, None) == old:
                setattr(module, key, new)
        config = getattr(module, "config", None)
        if config is not None and getattr(config, "num_labels", None) == old:
            config.num_labels = new  # in transformers this also renews id2label


def _create_classifier(model: nn.Module, num_classes: int) -> bool:
    """Create the classifier of a timm model that has none; whether it was needed."""
    get_classifier, reset = (getattr(model, f"{verb}_classifier", None) for verb in ("get", "reset"))
    if not (callable(get_classifier) and callable(reset) and isinstance(get_classifier(), nn.Identity)):
        return False
    # reset_classifier may default to average pooling: keep the model's own
    pool = getattr(model, "global_pool", None)
    pool = pool if isinstance(pool, str) else getattr(pool, "pool_type", None)
    accepts_pool = "global_pool" in inspect.signature(reset).parameters
    reset(num_classes, **({"global_pool": pool} if pool and accepts_pool else {}))
    return True
