"""Multi-label classification: which of the ten digits are in a mosaic of four?

python examples/multilabel.py
"""

import torch
from torch import nn

import gsoftmax
from gsoftmax.data import load
from gsoftmax.geometry import ClassStatistics
from gsoftmax.metrics import multilabel_report

mosaics = load("digits-mosaic")
train_x, train_y = mosaics.train.x / 255, mosaics.train.y
test_x, test_y = mosaics.test.x / 255, mosaics.test.y
print(mosaics.summary())


def train(lam: float) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 128, 4, stride=4),  # one position per tile of the mosaic
        nn.BatchNorm2d(128),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 2 * 10),  # two outputs per label: absence and presence
    )
    loss_fn = gsoftmax.MultiLabelGSoftmaxLoss(10, form="paired", lam=lam)  # lam = 0 is the softmax loss
    parameters = gsoftmax.param_groups(nn.ModuleList([model, loss_fn]), lr=5e-3, weight_decay=1e-3)
    optimizer = torch.optim.AdamW(parameters)
    for _ in range(16):
        for rows in torch.randperm(len(train_x)).split(64):
            loss = loss_fn(model(train_x[rows]), train_y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval(), loss_fn


names = {"mAP": "mAP", "C_F1_mean": "C-F1", "O_F1": "O-F1"}
measures = ("compactness", "separability", "ratio")
print(f"{'':10}" + "".join(f"{name:>14}" for name in (*names.values(), *measures)))
for name, lam in (("softmax", 0.0), ("gsoftmax", 1.0)):
    model, loss_fn = train(lam)
    with torch.no_grad():
        x = model(test_x)
        p = loss_fn.predict_proba(x)  # (images, labels)
    report = multilabel_report(p, test_y).summary()
    x_present = x.view(-1, 2, 10)[:, 1]
    geometry = ClassStatistics(10, multilabel=True).update(x_present, test_y).geometry().average()
    numbers = [report[key] for key in names] + [geometry[key] for key in measures]
    print(f"{name:10}" + "".join(f"{value:14.3f}" for value in numbers))
