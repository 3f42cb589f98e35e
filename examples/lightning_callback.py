"""Lightning: log the class geometry of the validation set after every epoch.

python examples/lightning_callback.py
"""

import logging
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gsoftmax
from gsoftmax.data import load
from gsoftmax.integrations.lightning import GeometryCallback

try:
    import lightning.pytorch as pl
except ImportError:
    import pytorch_lightning as pl

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # reports the hardware
warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data are in memory
warnings.filterwarnings("ignore", ".*LeafSpec.*")  # Lightning 2.6 under PyTorch 2.15


class Digits(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.head = gsoftmax.GSoftmaxHead(64, 10, lam=1.0)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return self.head.loss(self.backbone(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        h = self.backbone(images)
        self.log("val/accuracy", (self.head(h).argmax(1) == labels).float().mean())
        return {"x": self.head.features(h), "y": labels}  # for the callback

    def configure_optimizers(self):
        return torch.optim.SGD(gsoftmax.param_groups(self, lr=0.02, weight_decay=5e-4), momentum=0.9)


class Table(pl.Callback):
    names = ("accuracy", "compactness", "separability", "ratio", "relative_sigma", "dprime")

    def on_fit_start(self, trainer, pl_module):
        print("epoch" + "".join(f"{name:>16}" for name in self.names))

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            values = [trainer.callback_metrics[f"val/{name}"].item() for name in self.names]
            print(f"{trainer.current_epoch + 1:5}" + "".join(f"{value:16.3f}" for value in values))


pl.seed_everything(0, verbose=False)
digits = load("digits")
train, test = (TensorDataset(part.x / 255, part.y) for part in (digits.train, digits.test))
geometry = GeometryCallback(num_classes=10)
trainer = pl.Trainer(
    max_epochs=12,
    accelerator="cpu",
    callbacks=[geometry, Table()],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Digits(), DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=250))

print("\nclasses after the last epoch")
last = geometry.geometry
for digit in range(10):
    print(f"{digit}: compactness {last.compactness[digit]:.3f}, separability {last.separability[digit]:.1f}")
