"""Train, then export an ONNX file that needs neither this package nor PyTorch.

python examples/export_onnx.py          # writes model.onnx into a temporary folder
"""

import tempfile
from pathlib import Path

import onnxruntime
import torch
from torch import nn

import gsoftmax
from gsoftmax import export
from gsoftmax.data import load

torch.manual_seed(0)
digits = load("digits")
train_x, train_y, test_x, test_y = digits.train.x / 255, digits.train.y, digits.test.x / 255, digits.test.y

model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
model = gsoftmax.attach(model, "gsoftmax", lam=1.0)
optimizer = torch.optim.SGD(gsoftmax.param_groups(model, lr=0.1, weight_decay=5e-4), momentum=0.9)
for _ in range(10):
    for rows in torch.randperm(len(train_x)).split(64):
        loss = gsoftmax.attached_loss(model, train_x[rows], train_y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
with torch.no_grad():
    z = model(test_x)

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "model.onnx")
    export.to_onnx(model, test_x[:2], path, input_names=["image"], output_names=["z"], external_data=False)
    runtime = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (exported,) = runtime.run(None, {"image": test_x.numpy()})  # 500 images, exported with a batch of 2
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")

exported = torch.from_numpy(exported)
print(f"largest difference of z {(exported - z).abs().max().item():.1e}")
print(f"accuracy {(exported.argmax(1) == test_y).double().mean().item():.3f}")
