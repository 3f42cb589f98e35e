"""Deploy without this package: heads as plain modules, programs of `torch.export`, ONNX files."""

from __future__ import annotations

import copy
import math
import os
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from .gaussians import GaussianLogits
from .heads import GSoftmaxHead, SoftmaxHead
from .losses import GSoftmaxLoss, MultiLabelGSoftmaxLoss

__all__ = ["fold", "to_onnx", "to_program"]


def fold(module: nn.Module) -> nn.Module:
    """A copy, in evaluation mode, in which every module of this package is made of plain PyTorch ones.

    A softmax or L-softmax head becomes an `nn.Linear`, a G-softmax head an `nn.Sequential` of an `nn.Linear` (which
    quantisation and pruning tools find) and an fx module that computes z = x + lam / 2 erfc((mu - x) / (sigma sqrt 2));
    at lam = 0 only the linear layer remains.  A loss becomes the layer x -> z of its `logits`, to put after the model.
    The copy can be pickled, loaded where this package is missing (`torch.load(..., weights_only=False)`), compiled and
    exported.  mu and sigma are frozen into buffers.

    >>> fold(GSoftmaxHead(8, 3, lam=0.5))
    Sequential(
      (linear): Linear(in_features=8, out_features=3, bias=True)
      (gaussians): GaussianTerm()
    )
    """
    if isinstance(module, (GSoftmaxLoss, MultiLabelGSoftmaxLoss)):
        module = module.gaussians
    plain = _plain(module)
    if plain is None:
        plain = copy.deepcopy(module)
        replaced = {id(m): new for m in plain.modules() if (new := _plain(m)) is not None}
        for parent in list(plain.modules()):
            for key, child in parent._modules.items():
                if id(child) in replaced:
                    setattr(parent, key, replaced[id(child)])
    return plain.eval()


def to_program(model: nn.Module, example: Any, *, dynamic_batch: bool = True) -> torch.export.ExportedProgram:
    """`torch.export` of the folded model: once saved (`torch.export.save(program, "model.pt2")`), it needs neither this
    package nor the model's own code.

    example: inputs of a batch of two or more, as a tensor, a tuple of arguments or a mapping of keyword arguments.
    Dimension 0 of every one is the batch, and of any size in the program unless `dynamic_batch` is false.  Where the
    model returns an object with `logits`, as transformers do, the program returns those.

    >>> program = to_program(GSoftmaxHead(8, 3), torch.zeros(2, 8))
    >>> program.module()(torch.zeros(5, 8)).shape
    torch.Size([5, 3])
    """
    args, kwargs = _arguments(example)
    shapes = _shapes(args, kwargs, torch.export.Dim("batch")) if dynamic_batch else None
    plain = fold(model)
    plain.register_forward_hook(lambda module, args, output: getattr(output, "logits", output))
    with torch.no_grad():
        return torch.export.export(plain, args, kwargs, dynamic_shapes=shapes)


def to_onnx(
    model: nn.Module, example: Any, path: str | os.PathLike[str], *, dynamic_batch: bool = True, **options: Any
) -> None:
    """Write the folded model as an ONNX file.  Needs the packages `onnx` and `onnxscript`.

    example, dynamic_batch: see `to_program`; options go to `torch.onnx.export`: input_names, output_names,
    external_data, ...
    """
    program = to_program(model, example, dynamic_batch=dynamic_batch)
    if dynamic_batch:
        options = {"dynamic_shapes": _shapes(*_arguments(example), "batch"), **options}  # names the dimension
    torch.onnx.export(program, f=os.fspath(path), dynamo=True, verbose=False, **options)


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return tuple(example) if isinstance(example, (tuple, list)) else (example,), {}


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any) -> Any:
    """`dynamic_shapes` that leave dimension 0 of every tensor open."""
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.ndim]
    sizes = {len(v) for v in tensors}
    if len(sizes) != 1 or min(sizes) < 2:
        raise ValueError(
            "example must hold a batch of two or more, the same in every input, for a program of any batch size, "
            f"got shapes {[tuple(v.shape) for v in tensors]}"
        )
    open_batch = [{0: batch} if isinstance(v, Tensor) and v.ndim else None for v in (*args, *kwargs.values())]
    return dict(zip(kwargs, open_batch, strict=True)) if kwargs else tuple(open_batch)


def _plain(module: nn.Module) -> nn.Module | None:
    """`module` in plain PyTorch, or None if it is none of ours."""
    if isinstance(module, GaussianLogits):
        return _term(module, classes_last=False) if module.lam else nn.Identity()
    if not isinstance(module, SoftmaxHead):
        return None
    parts: dict[str, nn.Module] = {"linear": _linear(module)}
    if isinstance(module, GSoftmaxHead) and module.lam:
        parts["gaussians"] = _term(module.gaussians, classes_last=True)
    if module.out_features != module.num_classes:
        parts["unflatten"] = nn.Unflatten(-1, (2, module.num_classes))  # absence and presence of every label
    return nn.Sequential(OrderedDict(parts)) if len(parts) > 1 else parts["linear"]


def _linear(head: SoftmaxHead) -> nn.Linear:
    linear = nn.utils.skip_init(nn.Linear, head.in_features, head.out_features, head.bias is not None)
    linear.weight = nn.Parameter(head.weight.detach().clone())
    if head.bias is not None:
        linear.bias = nn.Parameter(head.bias.detach().clone())
    return linear


def _term(gaussians: GaussianLogits, classes_last: bool) -> fx.GraphModule:
    """z from x, as a graph of torch functions; it pickles as their source, so it needs no class of ours."""
    root, graph = nn.Module(), fx.Graph()
    sigma = gaussians.sigma.detach().clone()
    root.register_buffer("mu", gaussians.mu.detach().to(sigma.dtype, copy=True))
    root.register_buffer("sigma", sigma)

    x = graph.placeholder("x")  # half precision meets mu in float32 and is promoted
    rows = x if classes_last else graph.call_function(torch.movedim, (x, 1, -1))
    u = graph.call_function(torch.sub, (rows, graph.get_attr("mu")))
    u = graph.call_function(torch.div, (u, graph.get_attr("sigma")))
    tail = graph.call_function(torch.erfc, (graph.call_function(torch.mul, (u, -math.sqrt(0.5))),))
    term = graph.call_function(torch.mul, (tail, 0.5 * gaussians.lam))
    term = term if classes_last else graph.call_function(torch.movedim, (term, -1, 1))
    graph.output(graph.call_function(torch.add, (x, term)))
    return fx.GraphModule(root, graph, "GaussianTerm")
