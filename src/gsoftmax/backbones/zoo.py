"""Networks of torchvision and timm without their classifier, and weights from a local file."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..messages import did_you_mean, first_line
from .layers import GlobalPool, image_shape

_INSTALL = "which is not installed: pip install 'gsoftmax[train]'"


def names(family: str) -> list[str]:
    """Names of the image classifiers of torchvision, or the networks of timm; empty if it is not installed."""
    try:
        zoo: Any = importlib.import_module({"torchvision": "torchvision.models", "timm": "timm"}[family])
    except ImportError:
        return []
    return list(zoo.list_models(module=zoo) if family == "torchvision" else zoo.list_models())


def _check_name(family: str, name: str, known: bool) -> None:
    if not known:
        raise ValueError(f"{family} has no network {name!r}{did_you_mean(name, names(family), n=4, cutoff=0.5)}")


def _not_fetched(what: str, error: Exception, source: str = "them") -> ValueError:
    other_way = f"get {source} by other means and give weights=PATH instead"
    return ValueError(f"pretrained: the weights of {what} could not be fetched ({first_line(error)}); {other_way}")


def weights_on_disk(name: str) -> bool | str:
    """What `pretrained` must be to use published weights that are in torch's, timm's or Hugging Face's cache.

    name: as in `torchvision:resnet18` and `timm:resnet18`; False where there are none, or the library is missing
    """
    family, _, member = name.partition(":")
    cache = Path(torch.hub.get_dir(), "checkpoints")
    try:
        if family == "torchvision":
            import torchvision.models as zoo

            published = zoo.get_model_weights(member)
            found = [w.name for w in (published["DEFAULT"], *published) if (cache / Path(w.url).name).is_file()]
            return found[0] if found else False
        import timm
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return False
    described = timm.get_pretrained_cfg(member)
    if described is None:
        return False
    hub = [(described.hf_hub_id, file) for file in ("model.safetensors", "pytorch_model.bin") if described.hf_hub_id]
    in_hub = any(isinstance(try_to_load_from_cache(*place), str) for place in hub)
    return in_hub or (bool(described.url) and (cache / Path(str(described.url)).name).is_file())


def torchvision_backbone(
    name: str,
    input_shape: tuple[int, ...],
    *,
    pool: str | None = None,
    pretrained: bool | str = False,
    weights: str | Path | None = None,
    **options: Any,
) -> nn.Module:
    """torchvision's image classifier `name` without its last linear layer: (N, 3, H, W) -> (N, num_features).

    pool: "max" replaces the global average pooling, where the network has one
    pretrained: True, or the name of published weights ("IMAGENET1K_V1")
    """
    try:
        import torchvision.models as zoo
    except ImportError:
        raise ValueError(f"backbone {name!r} needs torchvision, {_INSTALL}") from None
    _check_name("torchvision", name, name in names("torchvision"))
    channels, height, _ = image_shape(input_shape, 32, name)
    if channels != 3:
        alternative = "timm's networks accept any number"
        raise ValueError(f"input_shape of torchvision's {name} must have 3 channels, got {channels}; {alternative}")
    if name in ("googlenet", "inception_v3"):  # auxiliary classifiers would make the output a tuple in training
        options = {"aux_logits": False, "init_weights": not pretrained and weights is None, **options}
    if name.startswith("vit_"):
        options = {"image_size": height, **options}
    wanted = None
    if pretrained:
        published = zoo.get_model_weights(name)
        try:
            wanted = published["DEFAULT" if pretrained is True else pretrained]
        except KeyError:
            accepted = ", ".join(w.name for w in published)
            raise ValueError(f"pretrained of {name} must be True or one of {accepted}, got {pretrained!r}") from None
        try:
            wanted.get_state_dict(progress=sys.stderr.isatty(), check_hash=True)  # into torch's cache
        except Exception as error:  # no network, a time-out, a cut download, a cache that can't be written
            raise _not_fetched(name, error, wanted.url) from error
    try:
        network = zoo.get_model(name, weights=wanted, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"options of {name}: {first_line(error)}") from error

    linear = [(path, module) for path, module in network.named_modules() if isinstance(module, nn.Linear)]
    if not linear or linear[-1][1].out_features != options.get("num_classes", 1000):
        raise ValueError(f"torchvision's {name} does not end in a linear classifier; try timm:{name}")
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
    """timm's network `name` (possibly with a tag after a dot) without a classifier: (N, C, H, W) -> (N, num_features).

    A network with a fixed input size is built for that of `input_shape`.
    """
    try:
        import timm
    except ImportError:
        raise ValueError(f"backbone 'timm:{name}' needs timm, {_INSTALL}") from None
    _check_name("timm", name, timm.is_model(name))
    if isinstance(pretrained, str):
        tag = f"the tag goes into the name: timm:{name}.TAG"
        raise ValueError(f"pretrained must be True or False for timm ({tag}), got {pretrained!r}")
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
            raise _not_fetched(f"timm's {name}", error) from error
    if weights is not None:
        classifier: Any = described.classifier if described is not None else None  # a name, several, or none
        paths = [classifier] if isinstance(classifier, str) else classifier or []
        load_weights(network, weights, f"timm's {name}", ignore=tuple(f"{path}." for path in paths))
    # Some networks have a layer between the pooling and the classifier; the features have its width.
    network.num_features = getattr(network, "head_hidden_size", None) or network.num_features
    return network


def read_state_dict(path: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of a weights file, by name, without the prefixes that wrappers add.

    path: .safetensors or PyTorch file; of a checkpoint, the part called state_dict, model or backbone is used
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
        raise ValueError(f"weights: reading {path} needs safetensors, {_INSTALL}") from None
    except Exception as error:  # unpickling a damaged file can raise almost anything
        raise ValueError(f"weights: {path} can't be read as a file of tensors ({first_line(error)})") from error
    for part in ("state_dict", "model", "backbone"):
        if isinstance(state, dict) and isinstance(state.get(part), dict):
            state = state[part]
    if not isinstance(state, dict) or not state or not all(isinstance(v, torch.Tensor) for v in state.values()):
        raise ValueError(f"weights: {path} contains no state dict (names and tensors)")
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
    """Load a weights file; all tensors must match, or nothing is loaded.

    network, name: what to load into, and its name for error messages
    path: as in `read_state_dict`
    ignore: prefixes of names that may be absent or present (the classifier that was removed)
    renames: regular expressions, with their replacements, applied to the names in the file
    """
    state = read_state_dict(path)
    for pattern, replacement in (renames or {}).items():
        state = {re.sub(pattern, replacement, key): tensor for key, tensor in state.items()}
    own = network.state_dict()  # files before PyTorch 0.4.1 lack num_batches_tracked
    missing = [key for key in own if key not in state and not key.endswith("num_batches_tracked")]
    extra = [key for key in state if key not in own and not (ignore and key.startswith(ignore))]
    problems = []
    if missing:
        problems.append(f"{len(missing)} of {len(own)} tensors missing (first {missing[0]})")
    if extra:
        problems.append(f"{len(extra)} unknown (first {extra[0]})")
    shapes = [(key, tuple(state[key].shape), tuple(own[key].shape)) for key in own if key in state]
    if other := [shape for shape in shapes if shape[1] != shape[2]]:
        key, seen, expected = other[0]
        first = f"first {key}: {seen} in the file, {expected} in the network"
        problems.append(f"{len(other)} of another shape ({first})")
    if problems:
        raise ValueError(f"weights: {path} does not fit {name}: {'; '.join(problems)}")
    network.load_state_dict({key: tensor for key, tensor in state.items() if key in own}, strict=False)
