"""Hugging Face `Trainer`: a mix-in that trains an attached head by its own loss and keeps its Gaussians from decay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..attachment import attached_loss, head_of
from ..gaussians import GaussianLogits, check_optimised, param_groups
from ..heads import SoftmaxHead

__all__ = ["GSoftmaxTrainerMixin"]


class GSoftmaxTrainerMixin:
    """`class MyTrainer(GSoftmaxTrainerMixin, Trainer)`: for a model after `attach(model, ...)`.

    Without it `Trainer` works too, on the z that the model gives.  With it

    * the loss is `head.loss(h, labels)`, which L-softmax needs for its margin and which never holds all logits of a
      training batch at once; label smoothing, `num_items_in_batch`, gradient accumulation and label names are
      `Trainer`'s;
    * mu and rho have optimiser groups of their own, from `gsoftmax.param_groups`: no decay, `lr_mult` times the rate;
    * logs hold the means of mu and sigma.

    Floating-point labels go to the head if it has a multi-label form, or if they are probabilities of classes, which
    `config.problem_type = "single_label_classification"` says; otherwise they mean to a transformers model what they
    always did.  Where the head cannot take the loss (a model that chooses among its outputs afterwards, as GPT-2 for
    sequences does; several heads; `compute_loss_func`; `torch_compile`; `nn.DataParallel`) it is `Trainer`'s loss on z,
    the same number.

    >>> class NoTrainer:                        # stands for transformers.Trainer
    ...     model, model_accepts_loss_kwargs = nn.Sequential(nn.Linear(4, 3)), True
    >>> class MyTrainer(GSoftmaxTrainerMixin, NoTrainer): ...
    >>> from gsoftmax import attach
    >>> model = attach(MyTrainer.model)
    >>> loss = MyTrainer().compute_loss(model, {"input": torch.ones(2, 4), "labels": torch.tensor([0, 2])})
    >>> bool(torch.isclose(loss, nn.functional.cross_entropy(model(torch.ones(2, 4)), torch.tensor([0, 2]))))
    True
    """

    _chooses_among_outputs = False  # found out at the first batch

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        **options: Any,
    ) -> Any:
        """The loss of a batch, or (loss, outputs): see `Trainer.compute_loss`."""
        label = self._label_name(inputs)
        target = None if label is None else inputs[label]
        past = getattr(getattr(self, "args", None), "past_index", -1)  # transformers 4
        if target is not None and self._takes_head_loss(model, target):
            if not getattr(self, "model_accepts_loss_kwargs", True):
                num_items_in_batch = None  # then Trainer divides by the number of accumulated batches
            rest = {k: v for k, v in inputs.items() if k != label}
            keep = return_outputs or past >= 0
            handle = head_of(model).register_forward_pre_hook(_refuse_other_shape(head_of(model), target))
            try:
                loss, outputs = self._head_loss(model, rest, target, keep, num_items_in_batch)
            except _OtherShapeError:
                self._chooses_among_outputs = True
            else:
                if past >= 0:
                    self._past = outputs[past]
                return (loss, outputs) if return_outputs else loss
            finally:
                handle.remove()
        if model.training and any(isinstance(m, SoftmaxHead) and m.needs_target for m in model.modules()):
            raise ValueError(
                f"an L-softmax head in {type(model).__name__} cannot be trained here: its margin needs one target for "
                "each h, and a Trainer without compute_loss_func, torch_compile and nn.DataParallel"
            )
        if num_items_in_batch is not None:
            options["num_items_in_batch"] = num_items_in_batch
        return super().compute_loss(model, inputs, return_outputs=return_outputs, **options)  # type: ignore[misc]

    def _label_name(self, inputs: Mapping[str, Any]) -> str | None:
        """The one input that is the target; several, as start and end of an answer, are the model's own business."""
        names = getattr(self, "label_names", None) or ["labels"]
        found = [name for name in names if inputs.get(name) is not None]
        return found[0] if len(found) == 1 else None

    def _takes_head_loss(self, model: nn.Module, target: Any) -> bool:
        heads = [m for m in model.modules() if isinstance(m, SoftmaxHead)]
        if not heads:
            head_of(model)  # says what to do
        args = getattr(self, "args", None)
        if (
            len(heads) > 1
            or not isinstance(target, Tensor)
            or self._chooses_among_outputs
            or getattr(self, "compute_loss_func", None) is not None
            or getattr(args, "torch_compile", False)  # which fuses cross entropy of z by itself
            or getattr(args, "n_gpu", 1) > 1  # copies of the model, which the head in this one knows nothing of
        ):
            return False
        if heads[0].form is not None:
            return True
        config = getattr(getattr(self, "model", None), "config", None)
        kind = getattr(config, "problem_type", None)
        if target.is_floating_point():
            return config is None or kind == "single_label_classification"
        return kind in (None, "single_label_classification")

    def _head_loss(
        self, model: nn.Module, inputs: dict[str, Any], target: Tensor, keep: bool, items: Tensor | int | None
    ) -> tuple[Tensor, Any]:
        smoother = getattr(self, "label_smoother", None)
        smoothing = 0.0 if smoother is None else float(smoother.epsilon)
        reduction = "mean" if items is None else "sum"
        options: dict[str, Any] = {"label_smoothing": smoothing, "reduction": reduction}
        outputs: Any = None
        if keep:
            loss, outputs = _loss_and_outputs(model, inputs, target, **options)
        else:
            loss = attached_loss(model, inputs, target, **options)  # type: ignore[assignment]
        if items is not None:
            head = head_of(model)
            # Trainer counted every entry of the labels; a row of probabilities is one item.
            per_item = target.shape[-1] if target.is_floating_point() and head.form is None else 1
            loss = loss * per_item / (items.to(loss.device) if isinstance(items, Tensor) else items)
            args = getattr(self, "args", None)
            if getattr(args, "average_tokens_across_devices", False):
                # the items are those of all processes, whose gradients are averaged
                copies = getattr(self, "get_tp_size", lambda: 1)()
                loss = loss * (self.accelerator.num_processes // copies)  # type: ignore[attr-defined]
        return loss, outputs

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """`Trainer`'s optimiser, with the Gaussians in groups of their own; one that was handed in stays as it is."""
        ours = getattr(self, "optimizer", None) is None
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        model = next(iter(args), kwargs.get("model")) or self.model  # type: ignore[attr-defined]
        if ours:
            _regroup(optimizer, model, self.args.learning_rate)  # type: ignore[attr-defined]
        check_optimised(model, optimizer)
        return optimizer

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds mu_mean and sigma_mean to the logs of training steps."""
        if "loss" in logs:
            with torch.no_grad():
                found = [m for m in self.model.modules() if isinstance(m, GaussianLogits)]  # type: ignore[attr-defined]
                if found:
                    logs["mu_mean"] = float(torch.cat([m.mu.float() for m in found]).mean())
                    logs["sigma_mean"] = float(torch.cat([m.sigma.float() for m in found]).mean())
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class _OtherShapeError(Exception):
    """The head is called on other rows than there are labels."""


def _refuse_other_shape(head: SoftmaxHead, target: Tensor) -> Any:
    def check(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        rows = target.shape[:-1] if target.is_floating_point() or head.form is not None else target.shape
        if args[0].shape[:-1] != rows:
            raise _OtherShapeError

    return check


def _loss_and_outputs(model: nn.Module, inputs: dict[str, Any], target: Tensor, **options: Any) -> tuple[Tensor, Any]:
    """The head's loss and all that the model returns, z with its gradient."""
    head = head_of(model)
    taken: list[Tensor] = []

    def take(module: nn.Module, args: tuple[Tensor, ...], z: Tensor) -> None:
        handle.remove()  # the loss may call the head
        tracking = [m for m in head.modules() if isinstance(m, GaussianLogits) and m.training]
        for m in tracking:
            m.training = False  # tracked Gaussians have made their step in forward
        try:
            taken.append(head.loss(args[0], target, **options))
        finally:
            for m in tracking:
                m.training = True

    handle = head.register_forward_hook(take)
    try:
        outputs = model(**inputs)
    finally:
        handle.remove()
    if not taken:
        raise ValueError(f"forward of {type(model).__name__} never called its head")
    # Trainer takes predictions from a dict, or from what follows the loss in a tuple.
    if isinstance(outputs, Tensor):
        outputs = {"logits": outputs}
    elif isinstance(outputs, tuple):
        outputs = (taken[0], *outputs)
    return taken[0], outputs


def _regroup(optimizer: torch.optim.Optimizer, model: nn.Module, lr: float) -> None:
    """Moves mu and rho from the groups they are in to those of `param_groups`."""
    gaussians = {id(p) for m in model.modules() if isinstance(m, GaussianLogits) for p in m.parameters(recurse=False)}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]} & gaussians
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in held]
    for group in param_groups(model, lr=lr):
        group["params"] = [p for p in group["params"] if id(p) in held]
        if group["params"]:
            optimizer.add_param_group(group)
