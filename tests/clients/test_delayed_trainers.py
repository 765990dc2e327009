"""Trainers that know nothing of delayed scaling: scales follow the steps of any optimizer."""

import lightning
import pytest
import torch
import transformers
from accelerate import Accelerator
from torch import nn

import blockfp.torch as bfp
from blockfp import recipes

# What these packages warn of themselves.
pytestmark = pytest.mark.filterwarnings("ignore")


def scales_of(model):
    return [layer.gradient_scale.item() for layer in model.modules() if isinstance(layer, bfp.Linear)]


def histories_of(model):
    """The number of steps that each layer has recorded amaxes in."""
    return [int((layer.input_amax_history > 0).sum()) for layer in model.modules() if isinstance(layer, bfp.Linear)]


class Net(nn.Module):
    def __init__(self, weights="quantized"):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        bfp.convert(self.layers, recipes.fp8_delayed(history=8), weights=weights)

    def forward(self, x, labels=None):
        y = self.layers(x)
        return {"loss": nn.functional.cross_entropy(y, labels) * 1e-4, "logits": y}


def examples():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((32, 16), generator=generator)
    return [{"x": row, "labels": (row.sum() > 0).long()} for row in x]


def arguments(folder, **more):
    return transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=3, report_to=[],
        save_strategy="no", use_cpu=True, remove_unused_columns=False, disable_tqdm=True, **more,
    )  # fmt: skip


def test_hugging_face_trainer(tmp_path):
    model = Net()
    optimizer = bfp.AdamW(model.parameters(), lr=1e-2)
    trainer = transformers.Trainer(model, arguments(tmp_path), train_dataset=examples(), optimizers=(optimizer, None))
    trainer.train()
    # Of a step, whose microbatches are two, one entry.
    assert histories_of(model) == [3, 3]
    assert all(scale > 1e4 for scale in scales_of(model))


def test_hugging_face_trainer_with_its_own_optimizer(tmp_path):
    model = Net(weights="high_precision")
    transformers.Trainer(model, arguments(tmp_path), train_dataset=examples()).train()
    assert histories_of(model) == [3, 3]
    assert all(scale > 1e4 for scale in scales_of(model))


class Module(lightning.LightningModule):
    def __init__(self, optimizer):
        super().__init__()
        self.net, self.make = Net("quantized" if optimizer is bfp.AdamW else "high_precision"), optimizer

    def training_step(self, batch, index):
        return self.net(**batch)["loss"]

    def configure_optimizers(self):
        return self.make(self.net.parameters(), lr=1e-2)


def fit(module, folder):
    trainer = lightning.Trainer(
        max_steps=3, accumulate_grad_batches=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(folder),
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(examples(), batch_size=4))


@pytest.mark.parametrize("optimizer", [bfp.AdamW, torch.optim.SGD])
def test_lightning(optimizer, tmp_path):
    """Lightning calls forward and backward within the optimizer's step."""
    module = Module(optimizer)
    fit(module, tmp_path)
    assert histories_of(module) == [3, 3]
    assert all(scale > 1e4 for scale in scales_of(module))


def test_accelerate():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Net()
    model, optimizer = accelerator.prepare(model, bfp.AdamW(model.parameters(), lr=1e-2))
    for i, example in enumerate(torch.utils.data.DataLoader(examples(), batch_size=4)):
        with accelerator.accumulate(model):
            accelerator.backward(model(**example)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        assert histories_of(model) == [(i + 1) // 2] * 2 or i % 2 == 0
    assert all(scale > 1e4 for scale in scales_of(model))
