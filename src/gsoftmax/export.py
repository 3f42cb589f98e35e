"""Export: models as plain PyTorch modules, `torch.export` programs and ONNX files."""

from __future__ import annotations

import copy
import math
import os
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, fx, nn

from .attachment import replace_modules, split_arguments
from .gaussians import GaussianLogits
from .heads import GSoftmaxHead, SoftmaxHead
from .losses import GSoftmaxLoss, MultiLabelGSoftmaxLoss

__all__ = ["fold", "to_onnx", "to_program"]


def fold(module: nn.Module) -> nn.Module:
    """A copy in evaluation mode in which every module of this package is replaced by plain PyTorch modules.

    A softmax or L-softmax head becomes an `nn.Linear`, a G-softmax head an `nn.Sequential` of an `nn.Linear` (which
    quantization and pruning tools recognize) and an fx module for z = x + lam / 2 erfc((mu - x) / (sigma sqrt 2)); at
    lam = 0 only the linear layer remains.  A head on cosines or distances has an fx module before the linear layer.  A
    loss becomes the layer x -> z of its `logits`, to put after the model.  The copy can be compiled, exported and
    pickled, and loaded without this package (`torch.load(..., weights_only=False)`).  mu and sigma are frozen into
    buffers.

    module: a model, head, layer or loss; it is not changed

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
        replace_modules(plain, {m: new for m in plain.modules() if (new := _plain(m)) is not None})
    return plain.eval()


def to_program(model: nn.Module, example: Any, *, dynamic_batch: bool = True) -> torch.export.ExportedProgram:
    """`torch.export` of the folded model; saved with `torch.export.save(program, "model.pt2")` it needs neither this
    package nor the model's own code.

    model: any model; if it returns an object with `logits`, as in transformers, the program returns those
    example: inputs for a batch of two or more, as a tensor, a tuple of arguments or a mapping of keyword arguments
    dynamic_batch: make dimension 0 of every input, the batch, dynamic

    >>> program = to_program(GSoftmaxHead(8, 3), torch.zeros(2, 8))
    >>> program.module()(torch.zeros(5, 8)).shape
    torch.Size([5, 3])
    """
    args, kwargs = split_arguments(example)
    shapes = _shapes(args, kwargs, torch.export.Dim("batch")) if dynamic_batch else None
    plain = fold(model)
    plain.register_forward_hook(lambda module, args, output: getattr(output, "logits", output))
    with torch.no_grad():
        return torch.export.export(plain, args, kwargs, dynamic_shapes=shapes)


def to_onnx(
    model: nn.Module, example: Any, path: str | os.PathLike[str], *, dynamic_batch: bool = True, **options: Any
) -> None:
    """Write the folded model as an ONNX file.  Needs the packages `onnx` and `onnxscript`.

    model, example, dynamic_batch: as in `to_program`
    path: the file to write
    options: of `torch.onnx.export`: input_names, output_names, external_data, ...
    """
    program = to_program(model, example, dynamic_batch=dynamic_batch)
    if dynamic_batch:
        options = {"dynamic_shapes": _shapes(*split_arguments(example), "batch"), **options}  # names the dimension
    torch.onnx.export(program, f=os.fspath(path), dynamo=True, verbose=False, **options)


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any) -> Any:
    """`dynamic_shapes` that make dimension 0 of every tensor dynamic."""
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.ndim]
    sizes = {len(v) for v in tensors}
    if len(sizes) != 1 or min(sizes) < 2:
        raise ValueError(
            "example must be a batch of two or more, of the same size in every input, for a dynamic batch size, "
            f"got shapes {[tuple(v.shape) for v in tensors]}"
        )
    dynamic = [{0: batch} if isinstance(v, Tensor) and v.ndim else None for v in (*args, *kwargs.values())]
    return dict(zip(kwargs, dynamic, strict=True)) if kwargs else tuple(dynamic)


def _plain(module: nn.Module) -> nn.Module | None:
    """`module` in plain PyTorch, or None if it is not from this package."""
    if isinstance(module, GaussianLogits):
        return _term(module, classes_last=False) if module.lam else nn.Identity()
    if not isinstance(module, SoftmaxHead):
        return None
    parts: dict[str, nn.Module] = {"linear": _linear(module)}
    if type(module).linear_input is not SoftmaxHead.linear_input:
        traced = fx.symbolic_trace(lambda h: module.linear_input(h))  # as source, which needs no class of this package
        parts = {"input": traced, **parts}
    if isinstance(module, GSoftmaxHead) and module.lam:
        parts["gaussians"] = _term(module.gaussians, classes_last=True)
    if module.out_features != module.num_classes:
        parts["unflatten"] = nn.Unflatten(-1, (2, module.num_classes))  # absence and presence of each label
    return nn.Sequential(OrderedDict(parts)) if len(parts) > 1 else parts["linear"]


def _linear(head: SoftmaxHead) -> nn.Linear:
    weight, bias = (v if v is None else v.detach().clone() for v in head.linear_weights())
    assert weight is not None
    linear = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], bias is not None)
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    return linear


def _term(gaussians: GaussianLogits, classes_last: bool) -> fx.GraphModule:
    """z from x as a graph of torch functions, which is pickled as source and needs no class of this package."""
    root, graph = nn.Module(), fx.Graph()
    sigma = gaussians.sigma.detach().clone()
    root.register_buffer("mu", gaussians.mu.detach().to(sigma.dtype, copy=True))
    root.register_buffer("sigma", sigma)

    x = graph.placeholder("x")  # mu in float32 promotes half precision
    rows = x if classes_last else graph.call_function(torch.movedim, (x, 1, -1))
    u = graph.call_function(torch.sub, (rows, graph.get_attr("mu")))
    u = graph.call_function(torch.div, (u, graph.get_attr("sigma")))
    tail = graph.call_function(torch.erfc, (graph.call_function(torch.mul, (u, -math.sqrt(0.5))),))
    term = graph.call_function(torch.mul, (tail, 0.5 * gaussians.lam))
    term = term if classes_last else graph.call_function(torch.movedim, (term, -1, 1))
    graph.output(graph.call_function(torch.add, (x, term)))
    return fx.GraphModule(root, graph, "GaussianTerm")
