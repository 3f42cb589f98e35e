"""Put a head where a model's classifier is: timm, torchvision, transformers, or any module with a last linear layer.

The model keeps its forward: it gives z instead of x, so a criterion on logits (`nn.CrossEntropyLoss`, label smoothing,
mixup, soft targets), metrics and trainers stay as they are, and cross entropy of z is the G-softmax loss.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .heads import HEADS, SoftmaxHead

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

    The head takes over the classifier's `weight` and `bias`, the very parameters: at lam = 0 the outputs are what they
    were, bit for bit, and an optimiser that held them still does.  The Gaussians are new parameters, so build the
    optimiser afterwards, by `param_groups(model, lr=...)` for instance.  Attach before wrapping the model for
    distributed training, and load an old checkpoint before attaching (or after, with `strict=False`).

    head: "gsoftmax", "lsoftmax" or "softmax"; head_options are those of its class, such as lam, sigma and form.
    num_classes: a number other than the classifier's gives new weights, drawn as `nn.Linear` draws them, and is
    written where the model keeps its own count (`num_classes`, `num_labels`, `config.num_labels`).
    name: which module to replace, as in `model.named_modules()`; several names replace each.  Without it, it is
    `get_classifier()` of a timm model (both, if it is distilled); of a transformers model the last linear layer with
    `config.num_labels` outputs; otherwise the last one with `model.num_classes` outputs or, without such a number, the
    last one registered.  `head_of(model)` and `print(model)` show what was chosen.  Auxiliary classifiers stay.

    The options form="paired", "independent" and "printed" have two outputs a label, so weights are new and forward
    gives (N, 2, num_classes).  L-softmax has no bias: a trained one is dropped with a warning.  Its margin needs the
    target, which forward does not get: train it with `attached_loss`.

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
    if head not in HEADS:
        raise ValueError(f"head must be one of {', '.join(HEADS)}, got {head!r}")
    if num_classes is not None and (isinstance(num_classes, bool) or not isinstance(num_classes, int)):
        raise TypeError(f"num_classes must be an integer, got {type(num_classes).__name__}")
    if num_classes is not None and num_classes < 1:
        raise ValueError(f"num_classes must be 1 or more, got {num_classes}")
    _refuse_wrapped(model)
    # A mistake in the options must show before anything is replaced.  The length of mu and sigma can only be checked
    # once the number of classes is known.
    unknown = () if num_classes else ("mu", "sigma")
    HEADS[head](1, num_classes or 1, device="meta", **{k: v for k, v in head_options.items() if k not in unknown})

    trained = not (name is None and num_classes is not None and _reset_timm(model, num_classes))
    places = _find(model, name, num_classes)
    heads = [_make_head(HEADS[head], old, num_classes, head_options) for _, old in places]
    dropped = [path for (path, old), new in zip(places, heads, strict=True) if trained and _loses_bias(old, new)]
    if dropped and "bias" not in head_options:
        warnings.warn(
            f"L-softmax has no bias: that of {', '.join(dropped) or 'the layer'} is dropped, which changes the outputs",
            stacklevel=2,
        )
    for (path, old), new in zip(places, heads, strict=True):
        _write_count(model, path, _outputs(old), new.num_classes)
        if path == "":
            model = new  # the model was the classifier
        _replace(model, old, new)
        _log.info("%s of %s is now %s", path or "all", type(model).__name__, type(new).__name__)
    return model


def head_of(model: nn.Module, name: str | None = None) -> SoftmaxHead:
    """The attached head, wherever it sits and whatever wraps the model; `name` picks one of several.

    >>> net = attach(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
    >>> head_of(net).mu.shape
    torch.Size([3])
    """
    found = {path: m for path, m in model.named_modules() if isinstance(m, SoftmaxHead)}
    if name is not None:
        if name in found:
            return found[name]
        seen = ", ".join(found) or "none"
        raise ValueError(f"name={name!r} is no head of this {type(model).__name__}; its heads: {seen}")
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise ValueError(f"{type(model).__name__} has no head of this package: attach(model, ...) gives it one")
    raise ValueError(f"{type(model).__name__} has {len(found)} heads, {', '.join(found)}: name= picks one")


def attached_loss(
    model: nn.Module, inputs: Any, target: Tensor, *, return_logits: bool = False, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`head.loss(h, target)` on the h that the model's forward hands its head.

    L-softmax trains this way, because its margin needs the target; G-softmax gains the fused linear loss, which never
    holds all logits at once, and softmax the same.  The loss is computed where the head stands, in the middle of
    forward, and travels out in the place of the logits: a wrapper such as DistributedDataParallel sees an ordinary
    forward.

    inputs: a tensor, a tuple of arguments or a mapping of keyword arguments (what a tokenizer gives), passed to
    `model`; options are those of `head.loss`: class_weight, ignore_index, reduction, label_smoothing.  With
    `return_logits` it returns (loss, z), z without margin and without gradient.

    >>> net = attach(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), "lsoftmax", num_classes=5)
    >>> attached_loss(net, torch.randn(4, 8), torch.tensor([0, 1, 2, 3])).backward()
    """
    head = head_of(model)
    taken: list[tuple[Tensor, Tensor]] = []

    def loss_instead(h: Tensor) -> Tensor:
        if head.form is None and not target.is_floating_point() and h.shape[:-1] != target.shape:
            raise ValueError(
                f"the head of {type(model).__name__} sees h of shape {tuple(h.shape)} for a target of "
                f"{tuple(target.shape)}: this model chooses among the head's outputs afterwards, "
                "so put the criterion on what its forward returns"
            )
        del head.forward  # which the loss may need
        loss = head.loss(h, target, **options)
        head.forward = loss_instead  # type: ignore[assignment, method-assign]
        taken.append((h.detach(), loss))
        shape = (*h.shape[:-1], head.out_features) if head.form is None else (len(h), *_per_example(head))
        return loss.sum().expand(shape)

    head.forward = loss_instead  # type: ignore[assignment, method-assign]
    try:
        if isinstance(inputs, Mapping):
            model(**inputs)
        elif isinstance(inputs, (tuple, list)):
            model(*inputs)
        else:
            model(inputs)
    finally:
        vars(head).pop("forward", None)
    if len(taken) != 1:
        raise ValueError(
            f"forward of {type(model).__name__} called its head {len(taken)} times where attached_loss needs exactly "
            "one: put the criterion on what forward returns"
        )
    h, loss = taken[0]
    if not return_logits:
        return loss
    with torch.no_grad():
        return loss, head(h)


def _per_example(head: SoftmaxHead) -> tuple[int, ...]:
    return (head.num_classes,) if head.form == "msml" else (2, head.num_classes)


# ----------------------------------------------------------------------------------------------- finding the classifier

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_AFTER_CONVOLUTION = "(nn.Sequential(model, GaussianLogits(num_classes)) adds the term after it)"
_Place = tuple[str, nn.Module]
_Classifier = tuple[str, "nn.Linear | SoftmaxHead"]


def _find(model: nn.Module, name: str | Sequence[str] | None, num_classes: int | None) -> list[_Classifier]:
    """Paths and modules to replace, checked; the order of the rules is in the docstring of `attach`."""
    places: Sequence[_Place]
    if name is not None:
        places = [(path, _named(model, path)) for path in ([name] if isinstance(name, str) else name)]
    else:
        places = (
            [(path, m) for path, m in model.named_modules() if isinstance(m, SoftmaxHead)]
            or _find_timm(model)
            or _find_transformers(model)
            or _find_last(model, num_classes)
        )
    if not places:
        raise ValueError(f"name must name at least one module of {type(model).__name__}, got {name!r}")
    for path, module in places:
        reason = _why_not(module)
        if reason is not None:
            kind = f"{_article(type(module).__name__)} {reason}".strip()
            raise ValueError(
                f"attach replaces an nn.Linear, and {path or 'the model'!r} of {type(model).__name__} is {kind}; "
                "name= picks another module"
            )
    return places  # type: ignore[return-value]


def _named(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        linear = ", ".join(p for p, _ in list(_linears(model))[-3:]) or "none"
        raise ValueError(
            f"name={path!r} is no module of {type(model).__name__}; its last linear layers: {linear}"
        ) from None


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Linear layers in the order of registration, without the output projection of nn.MultiheadAttention, which is
    never called."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and not isinstance(module, NonDynamicallyQuantizableLinear):
            yield path, module


def _find_timm(model: nn.Module) -> list[_Place]:
    get_classifier = getattr(model, "get_classifier", None)
    if not callable(get_classifier):
        return []
    found = get_classifier()
    classifiers = list(found) if isinstance(found, (tuple, list, nn.ModuleList)) else [found]
    paths = {id(m): path for path, m in model.named_modules()}
    places: list[_Place] = []
    for module in classifiers:
        if not isinstance(module, nn.Module) or isinstance(module, nn.Identity) or id(module) not in paths:
            raise ValueError(
                f"{type(model).__name__} has no classifier to replace, its get_classifier() gives "
                f"{_article(type(module).__name__)}: num_classes= makes one, name= picks another module"
            )
        path = paths[id(module)]
        inside = [(f"{path}.{p}" if p else path, m) for p, m in _linears(module)]
        # A classifier may have parts, such as a norm and a linear layer, or hold two side by side for distillation.
        places += [(p, m) for p, m in inside if m.out_features == inside[-1][1].out_features] or [(path, module)]
    return places


def _find_transformers(model: nn.Module) -> Sequence[_Place]:
    labels = getattr(getattr(model, "config", None), "num_labels", None)
    if not isinstance(labels, int):
        return []
    every = [(path, m) for path, m in _linears(model) if m.out_features == labels]
    base = getattr(model, "base_model", model)
    within = set() if base is model else {id(m) for m in base.modules()}
    places = [(path, m) for path, m in every if id(m) not in within] or every
    if not places:
        raise ValueError(
            f"attach found no nn.Linear with config.num_labels={labels} outputs in {type(model).__name__}; "
            f"{_last_layer(model)}; name= picks the module to replace"
        )
    last = places[-1][0]
    rivals = [path for path, _ in places if path.split(".")[0] != last.split(".")[0]]
    if rivals and not within.intersection(id(m) for _, m in places):
        raise ValueError(
            f"{type(model).__name__} has several linear layers with config.num_labels={labels} outputs: "
            f"{', '.join([*rivals, last])}; name= picks one, or several"
        )
    return places[-1:]


def _find_last(model: nn.Module, num_classes: int | None) -> Sequence[_Place]:
    every = list(_linears(model))
    own = getattr(model, "num_classes", None)
    counted = [(path, m) for path, m in every if m.out_features == own]
    if counted:
        return counted[-1:]
    final = _last_layer(model)
    if not every or isinstance(own, int):
        wanted = "nn.Linear" if not isinstance(own, int) else f"nn.Linear with model.num_classes={own} outputs"
        raise ValueError(
            f"attach found no {wanted} in {type(model).__name__}; {final}; name= picks the module to replace"
        )
    path, last = every[-1]
    rivals = [p for p, m in every if m.out_features == num_classes]
    if num_classes is not None and last.out_features != num_classes and rivals:
        raise ValueError(
            f"{type(model).__name__} has {path} ({last.out_features} outputs) registered last and "
            f"{rivals[-1]} with num_classes={num_classes} outputs: name= picks the module to replace"
        )
    # Layers of one parent with the same input, of which neither can feed the other: the classes and the boxes of a
    # detector, the outputs of two tasks.
    parent = path.rpartition(".")[0]
    beside = [
        p
        for p, m in every[:-1]
        if p.rpartition(".")[0] == parent and m.in_features == last.in_features != m.out_features
    ]
    if beside:
        raise ValueError(
            f"{type(model).__name__} has several linear layers side by side at its end: "
            f"{', '.join([*beside, path])}; name= picks the module to replace"
        )
    return [(path, last)]


def _last_layer(model: nn.Module) -> str:
    """What stands where a linear classifier was looked for."""
    layers = [(path, m) for path, m in model.named_modules() if m._parameters.get("weight") is not None]
    if not layers:
        return "it has no layer with weights"
    path, module = layers[-1]
    hint = f" {_AFTER_CONVOLUTION}" if isinstance(module, _CONVOLUTIONS) else ""
    return f"its last layer with weights is {path or 'itself'}, {_article(type(module).__name__)}{hint}"


def _why_not(module: nn.Module) -> str | None:
    """None where a head can do what `module` does, otherwise the rest of a sentence."""
    if isinstance(module, SoftmaxHead):
        return None
    if isinstance(module, _CONVOLUTIONS):
        return _AFTER_CONVOLUTION
    if not isinstance(module, nn.Linear):
        return ""
    if isinstance(module.weight, nn.UninitializedParameter):
        return "that has not seen a batch yet: run one first"
    if "weight" not in module._parameters:
        return "whose weight is computed from others (parametrised, normalised or pruned): make it a plain one first"
    if "forward" in vars(module):
        return "whose forward was replaced by another library: attach first"
    if type(module).forward is not nn.Linear.forward and not _is_linear(module):
        return "with a forward of its own"
    return None


def _is_linear(module: nn.Linear) -> bool:
    """Whether a subclass with its own forward still computes h W' + b: timm has one that only casts for TorchScript."""
    if module.weight.is_meta:
        return True
    h = torch.linspace(-1, 1, module.in_features, dtype=module.weight.dtype, device=module.weight.device)[None]
    try:
        with torch.no_grad():
            return torch.equal(module(h), F.linear(h, module.weight, module.bias))
    except Exception:  # somebody else's forward: whatever it raises, it is no plain linear layer
        return False


def _article(noun: str) -> str:
    return ("an " if noun[:1] in "AEIOU" else "a ") + noun


def _refuse_wrapped(model: nn.Module) -> None:
    # by name, because importing them all takes longer than this package
    kinds = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"}
    kinds |= {"ScriptModule", "OptimizedModule"}
    if kinds.intersection(kind.__name__ for kind in type(model).__mro__):
        raise ValueError(
            f"model must be the plain module, got {_article(type(model).__name__)}: attach first, "
            "then wrap, script or compile"
        )


# ------------------------------------------------------------------------------------------------------------ replacing

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


def _outputs(old: nn.Linear | SoftmaxHead) -> int:
    return old.num_classes if isinstance(old, SoftmaxHead) else old.out_features


def _make_head(
    cls: type[SoftmaxHead], old: nn.Linear | SoftmaxHead, num_classes: int | None, options: dict[str, Any]
) -> SoftmaxHead:
    classes = num_classes or _outputs(old)
    if cls.has_bias:
        options = {"bias": old.bias is not None, **options}
    options = {**options, "dtype": old.weight.dtype}
    width = cls(1, classes, **options, device="meta").out_features
    options["device"] = old.weight.device
    if width != len(old.weight):
        new = cls(old.in_features, classes, **options)
    else:
        # without drawing random numbers, so that the rest of a run does not depend on the kind of head
        new = nn.utils.skip_init(cls, old.in_features, classes, **options)
        new.weight = old.weight
        if new.bias is not None and old.bias is not None:
            new.bias = old.bias
        elif new.bias is not None:
            nn.init.zeros_(new.bias)
        new.reset_state()
    for hooks in _HOOKS:  # the dictionaries themselves, so that the handles that users keep still remove
        setattr(new, hooks, getattr(old, hooks))
    return new.train(old.training)


def _loses_bias(old: nn.Linear | SoftmaxHead, new: SoftmaxHead) -> bool:
    bias = old.bias if new.weight is old.weight and new.bias is None else None
    return bias is not None and not bias.is_meta and bool((bias != 0).any())


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Wherever the model holds `old`: a module may be registered under two names."""
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is old:
                setattr(parent, key, new)


def _write_count(model: nn.Module, path: str, old: int, new: int) -> None:
    """The number of classes in the model and in every module on the way to its classifier."""
    if new == old:
        return
    steps = path.split(".")
    for module in [model.get_submodule(".".join(steps[:i])) for i in range(len(steps))]:
        for key in ("num_classes", "num_labels"):
            if getattr(module, key, None) == old:
                setattr(module, key, new)
        config = getattr(module, "config", None)
        if config is not None and getattr(config, "num_labels", None) == old:
            config.num_labels = new  # transformers keeps it as the length of id2label, which this renews


def _reset_timm(model: nn.Module, num_classes: int) -> bool:
    """timm's own way to another number of classes, which also serves models without a classifier; whether it was
    needed."""
    reset = getattr(model, "reset_classifier", None)
    if not callable(reset) or not hasattr(model, "get_classifier"):
        return False
    if getattr(model, "num_classes", None) == num_classes:
        return False
    if not isinstance(model.get_classifier(), nn.Identity):  # type: ignore[operator]
        _find(model, None, num_classes)  # raises if it cannot be replaced, while the model is still whole
    options = {}
    accepted = inspect.signature(reset).parameters.get("global_pool")
    if accepted is not None and accepted.default is not None:
        # It would go back to average pooling.  A model made without a classifier keeps that default.
        pool = getattr(model, "global_pool", None)
        pool = pool if isinstance(pool, str) else getattr(pool, "pool_type", None)
        if pool:
            options["global_pool"] = pool
    reset(num_classes, **options)
    return True
