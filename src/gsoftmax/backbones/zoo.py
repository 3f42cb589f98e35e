"""Networks of torchvision and timm without their classifier, and weights from a local file."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .layers import GlobalPool, image_shape


def first_line(error: BaseException) -> str:
    """The first line of an error's message, for quoting it in ours."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def nearest(name: str, known: Iterable[str]) -> str:
    """`name`'s neighbours among `known`, ready for an error message."""
    return ", ".join(difflib.get_close_matches(name, list(known), n=4, cutoff=0.5)) or "none is close"


def torchvision_names() -> list[str]:
    """Names of torchvision's image classifiers; empty without torchvision."""
    try:
        import torchvision.models
    except ImportError:
        return []
    return torchvision.models.list_models(module=torchvision.models)


def timm_names() -> list[str]:
    """Names of timm's networks; empty without timm."""
    try:
        import timm
    except ImportError:
        return []
    return timm.list_models()


def torchvision_backbone(
    name: str,
    input_shape: tuple[int, ...],
    *,
    pool: str | None = None,
    pretrained: bool | str = False,
    weights: str | Path | None = None,
    default_weights: str = "DEFAULT",
    **options: Any,
) -> nn.Module:
    """torchvision's image classifier `name` with its last linear layer taken off.

    `pretrained=True` means `default_weights`; a string names others of the same network ("IMAGENET1K_V1").
    `pool="max"` replaces the global average pooling by the maximum, where the network has one to replace.

    (N, 3, H, W) -> (N, num_features).
    """
    try:
        import torchvision.models as zoo
    except ImportError:
        raise ValueError(
            f"backbone {name!r} needs torchvision, which is not installed: pip install 'gsoftmax[train]'"
        ) from None
    names = torchvision_names()
    if name not in names:
        raise ValueError(f"torchvision has no network {name!r}; nearest: {nearest(name, names)}")
    channels, height, width = image_shape(input_shape, 32, name)
    if channels != 3:
        raise ValueError(
            f"input_shape of torchvision's {name} must have 3 channels, got {channels}; timm's networks take any number"
        )
    if name in ("googlenet", "inception_v3"):  # auxiliary classifiers would make the output a tuple in training
        options = {"aux_logits": False, "init_weights": not pretrained and weights is None, **options}
    if name.startswith("vit_"):
        options = {"image_size": height, **options}
    wanted = None
    if pretrained:
        published = zoo.get_model_weights(name)
        try:
            wanted = published[default_weights if pretrained is True else pretrained]
        except KeyError:
            raise ValueError(
                f"pretrained of {name} must be True or one of "
                f"{', '.join(w.name for w in published)}, got {pretrained!r}"
            ) from None
        try:
            wanted.get_state_dict(progress=sys.stderr.isatty(), check_hash=True)  # into torch's cache
        except Exception as error:  # no network, a time-out, a cut download, a cache that can't be written
            raise ValueError(
                f"pretrained: the weights of {name} could not be fetched ({first_line(error)}); get "
                f"{wanted.url} by other means and give weights=PATH instead"
            ) from error
    try:
        network = zoo.get_model(name, weights=wanted, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"options of {name}: {first_line(error)}") from error

    linear = [(path, module) for path, module in network.named_modules() if isinstance(module, nn.Linear)]
    if not linear or linear[-1][1].out_features != options.get("num_classes", 1000):
        raise ValueError(
            f"torchvision's {name} does not end in a linear classifier, so it can't be a backbone; try timm:{name}"
        )
    classifier, last = linear[-1]
    network.set_submodule(classifier, nn.Identity())
    network.num_features = last.in_features
    if pool is not None:
        own = getattr(network, "avgpool", None)
        if not isinstance(own, nn.AdaptiveAvgPool2d) or own.output_size not in (1, (1, 1)):
            raise ValueError(f"pool must be None for torchvision's {name} (no pooling layer to replace), got {pool!r}")
        network.avgpool = nn.Sequential(GlobalPool(pool), nn.Unflatten(1, (-1, 1, 1)))  # its forward wants 4 axes
    if weights is not None:
        # Published DenseNet files write norm.1 where the network now says norm1.
        renames = {r"(denselayer\d+\.(?:norm|conv))\.([12]\.)": r"\1\2"} if name.startswith("densenet") else {}
        load_weights(network, weights, name, ignore=(f"{classifier}.", "aux1.", "aux2.", "AuxLogits."), renames=renames)
    return network


def timm_backbone(
    name: str,
    input_shape: tuple[int, ...],
    *,
    pool: str | None = None,
    pretrained: bool | str = False,
    weights: str | Path | None = None,
    **options: Any,
) -> nn.Module:
    """timm's network `name` (with a tag after a dot, if need be) created without a classifier.

    `pool` is timm's `global_pool`. A network with a fixed input size is built for that of `input_shape`.

    (N, C, H, W) -> (N, num_features).
    """
    try:
        import timm
    except ImportError:
        raise ValueError(
            f"backbone 'timm:{name}' needs timm, which is not installed: pip install 'gsoftmax[train]'"
        ) from None
    if not timm.is_model(name):
        raise ValueError(f"timm has no network {name!r}; nearest: {nearest(name, timm.list_models())}")
    if isinstance(pretrained, str):
        raise ValueError(
            f"pretrained must be True or False for timm (the tag goes into the name: timm:{name}.TAG), "
            f"got {pretrained!r}"
        )
    channels, height, width = image_shape(input_shape, 8, f"timm's {name}")
    described = timm.get_pretrained_cfg(name)
    if described is not None and described.fixed_input_size and (height, width) != tuple(described.input_size[1:]):
        options = {"img_size": (height, width), **options}
    if pool is not None:
        options = {"global_pool": pool, **options}

    def build(pretrained: bool) -> nn.Module:
        return timm.create_model(name, pretrained=pretrained, num_classes=0, in_chans=channels, **options)

    try:
        network = build(False)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise ValueError(f"options of timm's {name}: {first_line(error)}") from error
    if pretrained:
        try:
            network = build(True)
        except Exception as error:  # what a failed download raises depends on the client behind timm
            raise ValueError(
                f"pretrained: the weights of timm's {name} could not be fetched ({first_line(error)}); "
                "get them by other means and give weights=PATH instead"
            ) from error
    if weights is not None:
        classifier: Any = described.classifier if described is not None else None  # a name, several, or none
        paths = [classifier] if isinstance(classifier, str) else classifier or []
        load_weights(network, weights, f"timm's {name}", ignore=tuple(f"{path}." for path in paths))
    # Some networks have a layer between the pooling and the classifier; its width is what comes out.
    network.num_features = getattr(network, "head_hidden_size", None) or network.num_features
    return network


def read_state_dict(path: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of a .safetensors or PyTorch weights file, by name.

    Of a checkpoint the part called state_dict, model or backbone is taken; prefixes that wrappers add are removed.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"weights: there is no file {path}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except ImportError:
        raise ValueError(
            f"weights: reading {path} needs safetensors, which is not installed: pip install 'gsoftmax[train]'"
        ) from None
    except Exception as error:  # unpickling a damaged file can raise almost anything
        raise ValueError(f"weights: {path} can't be read as a file of tensors ({first_line(error)})") from error
    for part in ("state_dict", "model", "backbone"):
        if isinstance(state, dict) and isinstance(state.get(part), dict):
            state = state[part]
    if not isinstance(state, dict) or not state or not all(isinstance(v, torch.Tensor) for v in state.values()):
        raise ValueError(f"weights: {path} holds no state dict (names and tensors)")
    for prefix in ("module.", "_orig_mod."):
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state


def load_weights(
    network: nn.Module,
    path: str | Path,
    name: str,
    *,
    ignore: tuple[str, ...] = (),
    renames: dict[str, str] | None = None,
) -> None:
    """Load a weights file into `network`; every tensor must find its place, or nothing is loaded.

    Names that start with one of `ignore` (the classifier that was taken off) may be there or not. `renames` are regular
    expressions applied to the names in the file.
    """
    state = read_state_dict(path)
    for pattern, replacement in (renames or {}).items():
        state = {re.sub(pattern, replacement, key): tensor for key, tensor in state.items()}
    own = network.state_dict()
    counters = tuple(key for key in own if key.endswith("num_batches_tracked"))  # files before PyTorch 0.4.1 lack them
    missing = [key for key in own if key not in state and key not in counters]
    extra = [key for key in state if key not in own and not (ignore and key.startswith(ignore))]
    shapes = [key for key in own if key in state and own[key].shape != state[key].shape]
    problems = []
    if missing:
        problems.append(f"{len(missing)} of {len(own)} tensors missing (first {missing[0]})")
    if extra:
        problems.append(f"{len(extra)} unknown (first {extra[0]})")
    if shapes:
        key = shapes[0]
        problems.append(
            f"{len(shapes)} of another shape (first {key}: {tuple(state[key].shape)} in the file, "
            f"{tuple(own[key].shape)} in the network)"
        )
    if problems:
        raise ValueError(f"weights: {path} does not fit {name}: {'; '.join(problems)}")
    network.load_state_dict({key: tensor for key, tensor in state.items() if key in own}, strict=False)
