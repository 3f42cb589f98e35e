"""A Hugging Face `Trainer` that trains an attached head with the head's own loss.

Trains a small vision transformer, randomly initialised from a configuration, on the digits.

    python examples/huggingface_trainer.py
"""

import tempfile

import torch
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import gsoftmax
from gsoftmax.data import load
from gsoftmax.integrations.transformers import GSoftmaxTrainerMixin


class MyTrainer(GSoftmaxTrainerMixin, Trainer):
    pass


def examples(split):
    return [{"pixel_values": x / 255 - 0.3, "labels": y} for x, y in zip(split.x, split.y, strict=True)]


def accuracy(prediction):
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


torch.manual_seed(0)
digits = load("digits")
config = ViTConfig(
    image_size=8,
    patch_size=4,
    num_channels=1,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    num_labels=10,
)
model = gsoftmax.attach(ViTForImageClassification(config), "gsoftmax", lam=1.0)

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        num_train_epochs=8,
        per_device_train_batch_size=64,
        per_device_eval_batch_size=250,
        learning_rate=3e-3,
        weight_decay=0.05,
        warmup_steps=30,
        label_smoothing_factor=0.05,
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        seed=0,
    )
    trainer = MyTrainer(
        model,
        arguments,
        train_dataset=examples(digits.train),
        eval_dataset=examples(digits.test),
        compute_metrics=accuracy,
    )
    trainer.train()
    result = trainer.evaluate()

for group in trainer.optimizer.param_groups:
    print(f"{len(group['params']):3} parameters with weight decay {group['weight_decay']}")
print(f"evaluation loss {result['eval_loss']:.3f}, accuracy {result['eval_accuracy']:.3f}")
