"""TensorBoard: histograms of mu and sigma during training.

python examples/tensorboard_histograms.py          # writes runs/tensorboard
tensorboard --logdir runs/tensorboard
"""

import sys

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import gsoftmax
from gsoftmax.data import load
from gsoftmax.integrations.tensorboard import log_gaussians

folder = sys.argv[1] if len(sys.argv) > 1 else "runs/tensorboard"
torch.manual_seed(0)
digits = load("digits")
train_x, train_y, test_x, test_y = digits.train.x / 255, digits.train.y, digits.test.x / 255, digits.test.y

model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), gsoftmax.GSoftmaxHead(128, 10, lam=1.0))
optimizer = torch.optim.SGD(gsoftmax.param_groups(model, lr=0.1, weight_decay=5e-4), momentum=0.9)
head = gsoftmax.head_of(model)
step = 0
with SummaryWriter(folder) as writer:
    for _ in range(30):
        for rows in torch.randperm(len(train_x)).split(64):
            loss = head.loss(model[:-1](train_x[rows]), train_y[rows])
            optimizer.zero_grad()
            loss.backward()
            if step % 20 == 0:
                writer.add_scalar("loss", loss.item(), step)
                log_gaussians(writer, model, step)  # before zero_grad, to log the gradients too
            optimizer.step()
            step += 1

with torch.no_grad():
    accuracy = (model(test_x).argmax(1) == test_y).double().mean().item()
print(f"accuracy {accuracy:.3f} after {step} steps")
print(f"mu from {head.mu.min().item():.3f} to {head.mu.max().item():.3f}")
print(f"sigma from {head.sigma.min().item():.3f} to {head.sigma.max().item():.3f}")
print(f"tensorboard --logdir {folder}")
