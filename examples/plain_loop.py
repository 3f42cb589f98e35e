"""A plain PyTorch loop with `GSoftmaxLoss` as a drop-in replacement for `nn.CrossEntropyLoss`.

Trains the same small network on the handwritten digits of scikit-learn with both losses, and prints accuracy and class
geometry on the test images side by side.

    python examples/plain_loop.py
"""

import torch
from torch import nn

import gsoftmax
from gsoftmax.data import load
from gsoftmax.geometry import ClassStatistics

digits = load("digits")  # included in scikit-learn: 1,297 training and 500 test images
train_x, train_y = digits.train.x.flatten(1) / 255, digits.train.y
test_x, test_y = digits.test.x.flatten(1) / 255, digits.test.y


def train(loss_fn: nn.Module) -> nn.Module:
    torch.manual_seed(0)  # the same network and the same batches for both losses
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    everything = nn.ModuleList([model, loss_fn])  # mu and sigma are parameters of the loss: train them too
    optimizer = torch.optim.SGD(
        gsoftmax.param_groups(everything, lr=0.05, weight_decay=5e-4), momentum=0.9, nesterov=True
    )
    for _ in range(60):
        for rows in torch.randperm(len(train_x)).split(64):
            loss = loss_fn(model(train_x[rows]), train_y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


measures = ("compactness", "separability", "ratio", "relative_sigma", "dprime")
print(f"{'':10}{'accuracy':>10}" + "".join(f"{name:>16}" for name in measures))
for name, loss_fn in (("softmax", nn.CrossEntropyLoss()), ("gsoftmax", gsoftmax.GSoftmaxLoss(10, lam=1.0))):
    model = train(loss_fn)
    with torch.no_grad():
        x = model(test_x)
        z = loss_fn.logits(x) if name == "gsoftmax" else x  # predictions come from z
    accuracy = (z.argmax(1) == test_y).double().mean().item()
    geometry = ClassStatistics(10).update(x, test_y).geometry().average()  # of x, which both models have
    print(f"{name:10}{accuracy:10.3f}" + "".join(f"{geometry[key]:16.3f}" for key in measures))
print(f"learned mu {loss_fn.mu.mean().item():.3f}, sigma {loss_fn.sigma.mean().item():.3f}, averaged over classes")
