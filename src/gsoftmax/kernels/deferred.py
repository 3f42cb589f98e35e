"""z that is computed when something asks for it, so that a loss that knows x, mu and sigma never does.

In training, z goes from a layer to a loss and nowhere else.  A `Deferred` looks like z and has its place in the graph,
but no values.  torch hands it to `__torch_function__` before a function of torch.nn.functional runs: a fused loss takes
x, mu and sigma from it.  Everything else reaches `__torch_dispatch__`, which computes z, once, and goes on with it.
"""

from __future__ import annotations

import sys
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
_NODE, _DATA = Tensor.grad_fn.__get__, Tensor.data.__get__  # type: ignore[attr-defined, union-attr]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_EXPOSE = (_NODE, _DATA, Tensor.register_hook, Tensor.retain_grad)  # a node has hooks, data no version
_DIFFERENTIATE = {torch.autograd.grad: 1, torch.autograd.backward: 5}  # where `inputs` is among their arguments


class Deferred(Tensor):
    """z of x, mu and sigma, in x's shape or, for x (rows, classes), in another shape with the classes last."""

    source: _Source
    call: ClassVar[Any]  # `_call`; where torch.compile is in use, such that it does not follow it

    @staticmethod
    def __new__(cls, source: _Source, shape: Sequence[int]) -> Deferred:
        x, _, sigma = source.inputs
        z: Deferred = Tensor._make_wrapper_subclass(cls, shape, dtype=sigma.dtype, device=x.device)
        z.source = source
        if cls.call is _call and "torch._dynamo" in sys.modules:  # importing it takes seconds
            cls.call = torch.compiler.disable(_call)
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
        if func is torch.ops.aten.view.default:
            z, size = args
            shape = torch.empty(z.shape, device="meta").view(size).shape
            if shape[-1:] == z.source.inputs[0].shape[1:]:  # (..., classes)
                return Deferred(z.source, shape)  # torch makes it a view of z
        return func(*map(_values, args), **{k: _values(v) for k, v in (kwargs or {}).items()})

    def as_subclass(self, cls: Any) -> Any:  # not handed to __torch_function__
        return torch.ops.aten.alias.default(self).as_subclass(cls)

    def is_untouched(self) -> bool:
        """Whether x, mu and sigma say all about its values and its gradient."""
        return self.source.is_untouched() and not self._version and self.grad_fn is not None

    def loss(self, func: Any, *args: Any, **kwargs: Any) -> Tensor | None:
        """A loss without z, or None."""
        if self.shape != self.source.inputs[0].shape or not self.is_untouched() or not torch.is_grad_enabled():
            return None
        found = self.source.losses[func](*self.source.inputs, self.source.lam, *args, **kwargs)
        self.source.bypassed = self.source.bypassed or found is not None
        return found


def _values(v: Any) -> Any:
    """An argument of an operator with the values of z; `tree_map` takes 10 us."""
    if isinstance(v, Deferred):
        return v.source.value(v)
    return [_values(item) for item in v] if isinstance(v, (list, tuple)) else v


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
        elif isinstance(z, Deferred) and func in _EXPOSE:
            if func not in (_NODE, _DATA):
                _refuse_bypassed(z)
            z.source.exposed = True
        elif func in _DIFFERENTIATE:
            tree_map_only(Deferred, _refuse_bypassed, kwargs.get("inputs", args[_DIFFERENTIATE[func] :][:1]))
        elif func == _SET_DATA:
            raise RuntimeError("z.data cannot be replaced: use z.copy_() or another tensor")
        elif func in _RAW:
            args = tree_map_only(Deferred, torch.ops.aten.alias.default, args)
        return func(*args, **kwargs) if found is None else found


def _refuse_bypassed(z: Deferred) -> None:
    if z.source.bypassed:
        raise RuntimeError(
            "the loss was computed without z, so z gets no gradient: call z.retain_grad() or z.register_hook() before "
            "the loss, or set `defers` of the layer to False"
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
        self.computed: Tensor | None = None  # contiguous, as every `Deferred` says it is
        self.bypassed = False  # whether a loss was computed without z
        self.exposed = False  # whether somebody may change its values unseen, or waits for its gradient

    def is_untouched(self) -> bool:
        """Whether x, mu and sigma are what they were, and say all about the values and the gradient of z."""
        return not self.exposed and self.versions == [v._version for v in self.inputs]

    def value(self, asked: Deferred) -> Tensor:
        """z in the shape of the one that is asked for."""
        if self.computed is None:
            x, _, sigma = self.inputs
            if [x._version, sigma._version] != self.versions[::2]:
                raise RuntimeError("x was changed in place before z was computed from it: change a copy, x.clone()")
            with torch.inference_mode(False):  # z may be used outside it later
                self.computed = self.forward(x.detach(), self.mu, sigma.detach(), self.lam).contiguous()
        return self.computed.view(asked.shape)


@dataclass(slots=True)
class _Later(Operation):
    """A `Deferred` z of the inputs x, mu and sigma."""

    source: _Source

    def __call__(self, inputs: Sequence[Any], need: Sequence[bool], grad: Tensor | None = None) -> tuple[Any, ...]:
        if grad is None:
            return Deferred(self.source, inputs[0].shape), None, None, None
        return None, *self.source.backward(grad, *inputs, self.source.lam, need)

    def plain(self, *inputs: Any) -> Tensor:
        x, mu, sigma = inputs
        return equations.logits(x, mu, sigma, self.source.lam)


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
    return apply(_Later(source), x, mu, sigma)
