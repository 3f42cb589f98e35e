"""Lightning: a callback that logs the class geometry of the validation outputs after every epoch.

Works with `lightning` or `pytorch_lightning` (but not lightning 2.6.2 and 2.6.3, which were reported as compromised).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..gaussians import check_optimised
from ..geometry import ClassGeometry, ClassStatistics

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback  # type: ignore[assignment, unused-ignore]
    except ImportError:
        raise ImportError(
            "gsoftmax.integrations.lightning needs lightning: pip install 'lightning>=2.4,!=2.6.2,!=2.6.3'"
        ) from None

__all__ = ["GeometryCallback"]


class GeometryCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Logs compactness, separability, ratio, relative_sigma and dprime of the validation outputs, means over classes.

    Statistics are merged over processes first, so all of them log the values of the whole validation set (including
    examples that a distributed sampler repeats).  `geometry` has the values of every class in the last epoch; with
    several validation sets, those of the last one.  When training starts, the callback warns about learned Gaussians
    that no optimizer holds (`check_optimised`).

    num_classes: number of classes C
    outputs: a function from what `validation_step` returned and the batch to (x, y); without it the step must return a
        dict with "x" (or "logits"), (N, C), and "y" (or "labels"), (N,).  x are the raw outputs where heads are to be
        compared, z where the model returns only those.
    prefix: of the logged names; with several validation sets they end in /dataloader_idx_0, ...
    options: of `ClassStatistics`: multilabel, pooled, ignore_index
    trainer, pl_module, batch, batch_idx, dataloader_idx: as Lightning passes them

    >>> callback = GeometryCallback(10, outputs=lambda step, batch: (step, batch[1]))
    >>> callback.prefix, callback.geometry
    ('val/', None)
    """

    def __init__(
        self,
        num_classes: int,
        *,
        outputs: Callable[[Any, Any], tuple[Tensor, Tensor]] | None = None,
        prefix: str = "val/",
        **options: Any,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.outputs = outputs
        self.prefix = prefix
        self.options = options
        self.geometry: ClassGeometry | None = None
        self._statistics: list[ClassStatistics] = []
        self._fresh()  # validates the options early

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        check_optimised(pl_module, *trainer.optimizers)

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        # one per validation set on every process, even without batches: `sync` is collective
        self._statistics = [self._fresh() for _ in trainer.num_val_batches]

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        x, y = self._pair(outputs, batch)
        self._statistics[dataloader_idx].update(x, y)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.sanity_checking:
            return
        for number, seen in enumerate(self._statistics):
            self.geometry = seen.sync().geometry()
            which = f"/dataloader_idx_{number}" if len(self._statistics) > 1 else ""
            measures = {f"{self.prefix}{name}{which}": value for name, value in self.geometry.average().items()}
            # every process has the same numbers, but Lightning expects sync_dist=True
            pl_module.log_dict(measures, sync_dist=trainer.world_size > 1, add_dataloader_idx=False)

    def _fresh(self) -> ClassStatistics:
        return ClassStatistics(self.num_classes, **self.options)

    def _pair(self, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        if self.outputs is not None:
            return self.outputs(outputs, batch)
        found = outputs if isinstance(outputs, Mapping) else {}
        x, y = found.get("x", found.get("logits")), found.get("y", found.get("labels"))
        if x is None or y is None:
            got = f"a dict with {', '.join(map(str, found))}" if found else type(outputs).__name__
            raise ValueError(
                "validation_step must return a dict with x (or logits) and y (or labels), or GeometryCallback needs "
                f"outputs=, a function from what the step returned and the batch to (x, y); it returned {got}"
            )
        return x, y
