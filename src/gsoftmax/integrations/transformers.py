"""Hugging Face `Trainer`: a mixin that trains an attached head with its own loss, and its Gaussians without decay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..attachment import RowsError, forward_with_loss, head_of
from ..gaussians import check_optimised, named_gaussians, param_groups
from ..heads import SoftmaxHead

__all__ = ["GSoftmaxTrainerMixin"]


class GSoftmaxTrainerMixin:
    """`class MyTrainer(GSoftmaxTrainerMixin, Trainer)`, for a model after `attach(model, ...)`.

    `Trainer` also works without it, on the z that the model returns.  With it

    * the loss is `head.loss(h, labels)`, which L-softmax needs for its margin and which never stores all logits of a
      training batch at once; label smoothing, `num_items_in_batch`, gradient accumulation and label names work as in
      `Trainer`;
    * mu and rho have their own optimizer groups, from `gsoftmax.param_groups`: no decay, `lr_mult` times the rate;
    * logs contain the means of mu and sigma; Gaussians that a given optimizer lacks cause a warning.

    Floating-point labels go to the head if it has a multi-label form, or if they are probabilities of classes, as
    declared by `config.problem_type = "single_label_classification"`; otherwise transformers' own loss handles them.
    Where the head cannot compute the loss (a model that selects among its outputs afterwards, such as GPT-2 for
    sequences; several heads; `compute_loss_func`; `torch_compile`; `nn.DataParallel`), it is `Trainer`'s loss of z, the
    same number.

    >>> class NoTrainer:                        # stands for transformers.Trainer
    ...     model, model_accepts_loss_kwargs = nn.Sequential(nn.Linear(4, 3)), True
    >>> class MyTrainer(GSoftmaxTrainerMixin, NoTrainer): ...
    >>> from gsoftmax import attach
    >>> model = attach(MyTrainer.model)
    >>> loss = MyTrainer().compute_loss(model, {"input": torch.ones(2, 4), "labels": torch.tensor([0, 2])})
    >>> bool(torch.isclose(loss, nn.functional.cross_entropy(model(torch.ones(2, 4)), torch.tensor([0, 2]))))
    True
    """

    _selects_outputs = False  # known after the first batch

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        **options: Any,
    ) -> Any:
        """The loss of a batch, or (loss, outputs).

        model, inputs, return_outputs, num_items_in_batch, options: as in `Trainer.compute_loss`
        """
        label = self._label_name(inputs)
        target = None if label is None else inputs[label]
        past = getattr(getattr(self, "args", None), "past_index", -1)  # transformers 4
        if target is not None and self._takes_head_loss(model, target):
            if not getattr(self, "model_accepts_loss_kwargs", True):
                num_items_in_batch = None  # then Trainer divides by the number of accumulated batches
            rest = {k: v for k, v in inputs.items() if k != label}
            try:
                loss, outputs = self._head_loss(model, rest, target, return_outputs or past >= 0, num_items_in_batch)
            except RowsError:
                self._selects_outputs = True
            else:
                if past >= 0:
                    self._past = outputs[past]
                return (loss, outputs) if return_outputs else loss
        needing = [type(m).__name__ for m in model.modules() if isinstance(m, SoftmaxHead) and m.needs_target]
        if model.training and needing:
            raise ValueError(
                f"{needing[0]} in {type(model).__name__} cannot be trained here: its loss needs one target for each h, "
                "and a Trainer without compute_loss_func, torch_compile and nn.DataParallel"
            )
        if num_items_in_batch is not None:
            options["num_items_in_batch"] = num_items_in_batch
        return super().compute_loss(model, inputs, return_outputs=return_outputs, **options)  # type: ignore[misc]

    def _label_name(self, inputs: Mapping[str, Any]) -> str | None:
        """The only label among the inputs; several, such as start and end of an answer, are left to the model."""
        names = getattr(self, "label_names", None) or ["labels"]
        found = [name for name in names if inputs.get(name) is not None]
        return found[0] if len(found) == 1 else None

    def _takes_head_loss(self, model: nn.Module, target: Any) -> bool:
        heads = [m for m in model.modules() if isinstance(m, SoftmaxHead)]
        if not heads:
            head_of(model)  # raises an error that says what to do
        args = getattr(self, "args", None)
        if (
            len(heads) > 1
            or not isinstance(target, Tensor)
            or self._selects_outputs
            or getattr(self, "compute_loss_func", None) is not None
            or getattr(args, "torch_compile", False)  # which fuses cross entropy of z itself
            or getattr(args, "n_gpu", 1) > 1  # copies of the model, with heads of their own
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
        _, loss, outputs = forward_with_loss(
            model, inputs, target, keep_outputs=keep, label_smoothing=smoothing, reduction=reduction
        )
        if items is not None:
            # Trainer counts every entry of the labels; a row of probabilities is one item.
            per_item = target.shape[-1] if target.is_floating_point() and head_of(model).form is None else 1
            loss = loss * per_item / (items.to(loss.device) if isinstance(items, Tensor) else items)
            if getattr(getattr(self, "args", None), "average_tokens_across_devices", False):
                # items counts all processes, whose gradients are averaged
                copies = getattr(self, "get_tp_size", lambda: 1)()
                loss = loss * (self.accelerator.num_processes // copies)  # type: ignore[attr-defined]
        # Trainer takes predictions from a dict, or from what follows the loss in a tuple.
        if isinstance(outputs, Tensor):
            outputs = {"logits": outputs}
        elif isinstance(outputs, tuple):
            outputs = (loss, *outputs)
        return loss, outputs

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """`Trainer`'s optimizer with the Gaussians in groups of their own; a user-supplied optimizer is not changed.

        args, kwargs: as in `Trainer.create_optimizer`
        """
        ours = getattr(self, "optimizer", None) is None
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        model = next(iter(args), kwargs.get("model")) or self.model  # type: ignore[attr-defined]
        if ours:
            _regroup(optimizer, model, self.args.learning_rate)  # type: ignore[attr-defined]
        check_optimised(model, optimizer)
        return optimizer

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add mu_mean and sigma_mean to the logs of training steps.

        logs, args, kwargs: as in `Trainer.log`
        """
        found = [g for _, g in named_gaussians(self.model)] if "loss" in logs else []  # type: ignore[attr-defined]
        if found:
            with torch.no_grad():
                logs["mu_mean"] = float(torch.cat([g.mu.float() for g in found]).mean())
                logs["sigma_mean"] = float(torch.cat([g.sigma.float() for g in found]).mean())
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


def _regroup(optimizer: torch.optim.Optimizer, model: nn.Module, lr: float) -> None:
    """Move mu and rho from their groups to those of `param_groups`."""
    gaussians = {id(p) for _, g in named_gaussians(model) for p in g.parameters(recurse=False)}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]} & gaussians
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in held]
    for group in param_groups(model, lr=lr):
        group["params"] = [p for p in group["params"] if id(p) in held]
        if group["params"]:
            optimizer.add_param_group(group)
