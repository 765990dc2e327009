"""lightning: Fabric and Trainer train, save and load models whose weights are codes."""

import warnings

import pytest
import torch
from arrays import values
from torch import nn

import blockfp.torch as bfp

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # lightning's own imports
    import lightning


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
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(getattr(a, "codes", a), getattr(b, "codes", b))


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
    for a, b in zip(resumed.parameters(), through.parameters(), strict=True):
        assert torch.equal(getattr(a, "codes", a), getattr(b, "codes", b))
