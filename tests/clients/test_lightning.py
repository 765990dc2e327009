"""lightning: Fabric and Trainer train, save and load models whose weights are codes; summaries are the plain model's."""

import copy
import warnings

import pytest
import torch
from arrays import values
from same_tensors import assert_equal
from torch import nn

import blockfp.torch as bfp

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # lightning's own imports
    import lightning
    from lightning.pytorch.utilities.model_summary import ModelSummary


def net(seed=0, recipe="mxfp8"):
    torch.manual_seed(seed)
    return bfp.convert(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)), recipe)


def batches(count=4):
    return list(values((count, 32, 64), 0))


@pytest.mark.filterwarnings("ignore")  # lightning's, of the machine and of its own releases
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_delayed"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_fabric(recipe, precision, tmp_path):
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    model = net(0, recipe)
    model, optimizer = fabric.setup(model, bfp.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for x in batches():
        loss = model(x).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    fabric.save(tmp_path / "state.ckpt", {"model": model, "optimizer": optimizer})
    other = net(1, recipe)
    other, restored = fabric.setup(other, bfp.AdamW(other.parameters(), lr=1e-2))
    fabric.load(tmp_path / "state.ckpt", {"model": other, "optimizer": restored})
    for one, two in ((model, optimizer), (other, restored)):
        fabric.backward(one(batches(1)[0]).square().mean())
        two.step()
    assert_equal(model.parameters(), other.parameters())


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()
        self.losses = []

    def training_step(self, batch, _):
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return bfp.AdamW(self.parameters(), lr=1e-2)


@pytest.mark.filterwarnings("ignore")
def test_trainer_resumes(tmp_path):
    def trained(epochs, checkpoint=None):
        module = Module()
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=epochs, logger=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=None), ckpt_path=checkpoint)
        return trainer, module

    first, _ = trained(1)
    first.save_checkpoint(tmp_path / "first.ckpt")
    _, through = trained(2)
    _, resumed = trained(2, tmp_path / "first.ckpt")
    assert resumed.losses == through.losses[len(through.losses) - len(resumed.losses) :]
    assert_equal(resumed.parameters(), through.parameters())


class WithExample(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
        self.example_input_array = torch.randn(4, 32)

    def forward(self, x):
        return self.net(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_parameters_and_flops(recipe):
    plain = WithExample()
    quantized = bfp.convert(copy.deepcopy(plain), recipe)
    expected, summary = (ModelSummary(model, max_depth=2) for model in (plain, quantized))
    assert summary.total_flops == expected.total_flops == 2 * 4 * (32 * 64 + 64 * 16)
    assert summary.flop_counts.keys() == expected.flop_counts.keys()
    assert summary.total_parameters == expected.total_parameters
    assert summary.trainable_parameters == expected.trainable_parameters
    assert "24.6 K    Total Flops" in str(summary)
