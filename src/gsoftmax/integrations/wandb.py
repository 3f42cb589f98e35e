"""Weights & Biases: metrics of runs, and the Gaussians of a model in your own loop; nothing is uploaded by default."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from ..config import Config

__all__ = ["WandbWriter", "open_run"]


class WandbWriter:
    """A Weights & Biases run with the methods of a `SummaryWriter` that this package uses.

    `tensorboard.log_gaussians(WandbWriter(run), model, step)` logs histograms of mu and sigma.

    run: what `wandb.init` returned
    tag: name of the value
    value, values: a number, and the numbers of a histogram
    step: number of the training step, or of the epoch; values of one step are one row

    >>> class Printer:
    ...     def log(self, row, step): print(row, step)
    >>> WandbWriter(Printer()).add_scalar("loss", 0.5, 3)
    {'loss': 0.5} 3
    """

    def __init__(self, run: Any) -> None:
        self.run = run

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Logs a number."""
        self.run.log({tag: value}, step=step)

    def add_histogram(self, tag: str, values: Tensor, step: int) -> None:
        """Logs a histogram."""
        import wandb

        self.run.log({tag: wandb.Histogram(values.double().tolist())}, step=step)

    def close(self) -> None:
        """Ends the run."""
        self.run.finish()


def open_run(folder: str | os.PathLike[str], config: Config) -> WandbWriter:
    """A writer for a run of `gsoftmax train` or `compare`, with the files of Weights & Biases in its folder.

    Offline unless WANDB_MODE says otherwise: `wandb sync FOLDER/wandb/offline-run-*` uploads it.  A run that is resumed
    continues under the same id.

    folder, config: of the run
    """
    import wandb

    path = Path(folder).resolve()
    return WandbWriter(
        wandb.init(
            mode=os.environ.get("WANDB_MODE", "offline"),  # type: ignore[arg-type, unused-ignore]
            project=os.environ.get("WANDB_PROJECT", "gsoftmax"),
            dir=str(path),
            id=hashlib.sha256(str(path).encode()).hexdigest()[:16],
            name=f"{path.parent.name}/{path.name}",
            resume="allow",
            reinit="create_new",  # another run may be open in this process
            config=dataclasses.asdict(config),
            settings=wandb.Settings(silent=True, console="off"),
        )
    )
