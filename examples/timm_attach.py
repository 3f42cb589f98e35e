"""A timm model with a G-softmax head: one extra line, the same training loop.

Trains timm's smallest ResNet from scratch on the digits, enlarged to 16 x 16.

    python examples/timm_attach.py
"""

import timm
import torch
import torch.nn.functional as F

import gsoftmax
from gsoftmax.data import load

torch.manual_seed(0)
digits = load("digits")


def images(split):  # (N, 1, 8, 8) bytes -> (N, 1, 16, 16)
    return F.interpolate(split.x / 255, size=16, mode="bilinear") - 0.3


train_x, train_y, test_x, test_y = images(digits.train), digits.train.y, images(digits.test), digits.test.y

model = timm.create_model("test_resnet", num_classes=10, in_chans=1)
model = gsoftmax.attach(model, "gsoftmax", lam=1.0)  # the extra line
print(gsoftmax.head_of(model))

optimizer = torch.optim.AdamW(gsoftmax.param_groups(model, lr=1e-2, weight_decay=0.01))
criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)  # on z, which forward returns; any criterion on logits works
epochs = 8
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
for epoch in range(epochs):
    model.train()
    total = 0.0
    for rows in torch.randperm(len(train_x)).split(64):
        loss = criterion(model(train_x[rows]), train_y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(rows)
    schedule.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).double().mean().item()
    print(f"epoch {epoch + 1}  loss {total / len(train_x):.3f}  accuracy {accuracy:.3f}")

head = gsoftmax.head_of(model)
print("mu   ", " ".join(f"{v:6.3f}" for v in head.mu.tolist()))
print("sigma", " ".join(f"{v:6.3f}" for v in head.sigma.tolist()))
