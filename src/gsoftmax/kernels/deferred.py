"""z that is computed when something asks for it, so that a loss that knows x, mu and sigma never does.

In training, z goes from a layer to a loss and nowhere else.  A `Deferred` looks like z and has its place in the graph,
but no values.  torch hands it to `__torch_function__` before a function of torch.nn.functional runs: a fused loss takes
x, mu and sigma from it.  Everything else reaches `__torch_dispatch__`, which computes z, once, and goes on with it.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .. import equations
from .autograd import Operation, apply

# (x, mu, sigma, lam, the other arguments of the loss) -> the loss, or None where only z will do
Fused = Callable[..., Tensor | None]

# What reads memory itself, past the dispatcher.
_RAW = {
    getattr(Tensor, name)
    for name in (
        "__array__", "__deepcopy__", "__dlpack__", "__reduce_ex__", "__repr__", "data_ptr", "numpy", "share_memory_",
        "storage", "tolist", "untyped_storage",
    )
}  # fmt: skip
_OF_THE_GRAPH = (Tensor.register_hook, Tensor.retain_grad, torch.autograd.grad, torch.autograd.backward)
_VIEWS = (Tensor.view, Tensor.reshape, torch.reshape)


class Deferred(Tensor):
    """z of x, mu and sigma, in x's shape or, for x (rows, classes), in another shape with the classes last."""

    source: _Source
    bypassed: bool  # whether a loss was computed without it
    call: ClassVar[Any]  # `_call`; where torch.compile is in use, such that it does not follow it

    @staticmethod
    def __new__(cls, source: _Source, shape: Sequence[int]) -> Deferred:
        x, _, sigma = source.inputs
        z: Deferred = Tensor._make_wrapper_subclass(cls, shape, dtype=sigma.dtype, device=x.device)
        z.source, z.bypassed = source, False
        if cls.call is _call and "torch._dynamo" in sys.modules:  # importing it takes seconds
            cls.call = torch.compiler.disable(_call)
        source.views.append(weakref.ref(z))
        return z

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return cls.call(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, lambda z: z.source.value(z), (args, kwargs or {}))
        return func(*args, **kwargs)

    def is_untouched(self) -> bool:
        """Whether x, mu and sigma say all about its values and its gradient."""
        return self.source.is_current() and not (self._version or self._backward_hooks or self.retains_grad)

    def loss(self, func: Any, *args: Any, **kwargs: Any) -> Tensor | None:
        """A loss without z, or None."""
        if self.shape != self.source.inputs[0].shape or not self.is_untouched():
            return None
        found = self.source.losses[func](*self.source.inputs, self.source.lam, *args, **kwargs)
        self.bypassed = self.bypassed or found is not None
        return found

    def seen_as(self, *sizes: Any) -> Tensor | None:
        """z in another shape with the classes last, or None."""
        x, given = self.source.inputs[0], sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
        shape = list(given)
        if not all(isinstance(n, int) for n in shape):  # a dtype
            return None
        if shape.count(-1) == 1 and 0 not in shape:
            shape[shape.index(-1)] = self.numel() // -math.prod(shape)
        if math.prod(shape) != self.numel() or not self.is_untouched():
            return None
        if shape == list(self.shape):
            return self
        if x.ndim != 2 or shape[-1:] != [x.shape[1]]:
            return None
        return apply(_Later(self.source, shape), *self.source.inputs)


def _call(func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """func(*args, **kwargs), where an argument is a `Deferred`."""
    if not all(t in (Deferred, Tensor, torch.nn.Parameter) for t in types):  # another library's tensors decide
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map_only(Deferred, torch.ops.aten.alias.default, (args, kwargs))
        return func(*args, **kwargs)
    z, found = args[0] if args else None, None
    with torch._C.DisableTorchFunctionSubclass():
        if isinstance(z, Deferred) and func in z.source.losses:
            found = z.loss(func, *args[1:], **kwargs)
        elif isinstance(z, Deferred) and func in _VIEWS and not kwargs:
            found = z.seen_as(*args[1:])
        elif func in _OF_THE_GRAPH:
            tree_map_only(Deferred, _refuse_bypassed, (args, kwargs))
        elif func in _RAW:
            args = tree_map_only(Deferred, torch.ops.aten.alias.default, args)
        return func(*args, **kwargs) if found is None else found


def _refuse_bypassed(z: Deferred) -> None:
    if z.bypassed:
        raise RuntimeError(
            "the loss was computed without z, so z gets no gradient: call z.retain_grad() or z.register_hook() before "
            "the loss"
        )


Deferred.call = _call


class _Source:
    """What z and the views of it are computed from."""

    def __init__(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        lam: float,
        forward: Callable[..., Tensor],
        backward: Callable[..., tuple[Any, ...]],
        losses: Mapping[Any, Fused],
    ) -> None:
        self.inputs, self.lam, self.forward, self.backward, self.losses = inputs, lam, forward, backward, losses
        self.versions = [v._version for v in inputs]
        self.mu = inputs[1].detach().clone()  # an optimizer changes mu in place, perhaps before z is asked for
        self.computed: Tensor | None = None
        self.views: list[weakref.ref[Deferred]] = []

    def is_current(self) -> bool:
        """Whether x, mu and sigma are what they were."""
        return self.versions == [v._version for v in self.inputs]

    def value(self, asked: Deferred) -> Tensor:
        """z in the shape of the one that is asked for."""
        if any(other._version for view in self.views if (other := view()) is not None and other is not asked):
            raise RuntimeError("z was changed in place after a view of it was taken: change a copy, z.clone()")
        if self.computed is None:
            x, _, sigma = self.inputs
            if [x._version, sigma._version] != self.versions[::2]:
                raise RuntimeError("x was changed in place before z was computed from it: change a copy, x.clone()")
            self.computed = self.forward(x.detach(), self.mu, sigma.detach(), self.lam)
        return self.computed.view(asked.shape)


@dataclass(slots=True)
class _Later(Operation):
    """A `Deferred` z of the inputs x, mu and sigma."""

    source: _Source
    shape: Sequence[int]

    def __call__(self, inputs: Sequence[Any], need: Sequence[bool], grad: Tensor | None = None) -> tuple[Any, ...]:
        if grad is None:
            return Deferred(self.source, self.shape), None, None, None
        return None, *self.source.backward(grad.reshape(inputs[0].shape), *inputs, self.source.lam, need)

    def plain(self, *inputs: Any) -> Tensor:
        x, mu, sigma = inputs
        return equations.logits(x, mu, sigma, self.source.lam).view(self.shape)


def logits(
    x: Tensor,
    mu: Tensor,
    sigma: Tensor,
    lam: float,
    forward: Callable[..., Tensor],
    backward: Callable[..., tuple[Any, ...]],
    losses: Mapping[Any, Fused],
) -> Tensor:
    """z, deferred.

    forward, backward: as in `autograd.Logits`
    losses: functions of z, by what computes them without it
    """
    source = _Source((x, mu, sigma), lam, forward, backward, losses)
    return apply(_Later(source, x.shape), x, mu, sigma)
