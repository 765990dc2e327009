"""The precision plugin for lightning's Trainer: the losses and weights of a plain loop of blockfp's, to the bit."""

import warnings

import pytest
import torch
from arrays import values
from documented import run_documented
from torch import nn

import blockfp.torch as bfp

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # lightning's own imports
    import lightning

    from blockfp.integrations.lightning import BlockfpPrecision

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::FutureWarning", "ignore::DeprecationWarning")

RECIPES = ("mxfp8", "fp8_block", "fp8_delayed")


class Module(lightning.LightningModule):
    """Knows nothing of blockfp but its optimizer."""

    def __init__(self, optimizer=bfp.AdamW):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
        self.losses, self.make = [], optimizer

    def training_step(self, batch, _):
        loss = self.net(batch).float().square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return self.make(self.parameters(), lr=1e-2)


def batches():
    return list(values((4, 32, 64), 0))


def fitted(module, plugin, folder, epochs=1, checkpoint=None):
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, plugins=[plugin],
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=None), ckpt_path=checkpoint)
    return trainer


def looped(recipe, optimizer=bfp.AdamW, weights="quantized", dtype=None):
    module = Module(optimizer)
    bfp.convert(module.net, recipe, weights=weights)
    step = module.configure_optimizers()
    for x in batches():
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            loss = module.training_step(x, 0)
        loss.backward()
        step.step()
        step.zero_grad()
    return module


def assert_same_run(module, expected):
    assert module.losses == expected.losses
    ours, theirs = module.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    assert "net.0.weight_codes" in ours or not isinstance(module.net[0].weight, bfp.QuantizedTensor)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "autocast"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_trains_as_a_plain_loop(recipe, dtype, tmp_path):
    module = Module()
    before = [param.detach().clone() for param in module.parameters()]
    trainer = fitted(module, BlockfpPrecision(recipe, dtype=dtype), tmp_path)
    assert trainer.precision == ("32-true" if dtype is None else "bf16-mixed")
    assert_same_run(module, looped(recipe, dtype=dtype))
    for param, old in zip(module.parameters(), before, strict=True):
        assert not torch.equal(param.dequantize() if isinstance(param, bfp.QuantizedTensor) else param, old)


@pytest.mark.parametrize("recipe", RECIPES)
def test_another_optimizer(recipe, tmp_path):
    """Scales of delayed scaling follow it too."""
    module = Module(torch.optim.AdamW)
    fitted(module, BlockfpPrecision(recipe, weights="high_precision"), tmp_path)
    assert_same_run(module, looped(recipe, torch.optim.AdamW, "high_precision"))


def test_it_resumes_to_the_bit(tmp_path):
    plugin = BlockfpPrecision("nvfp4", lambda path, layer: path != "net.2")
    torch.manual_seed(1)
    fitted(Module(), plugin, tmp_path).save_checkpoint(tmp_path / "first.ckpt")
    runs = []
    for _ in range(2):
        module = plugin.convert_module(Module())
        assert [type(layer) for layer in (module.net[0], module.net[2])] == [bfp.Linear, nn.Linear]
        fitted(module, plugin, tmp_path, 2, tmp_path / "first.ckpt")
        assert len(module.losses) == 4
        runs.append(module)
    assert_same_run(*runs)
    torch.manual_seed(1)
    through = Module()
    fitted(through, plugin, tmp_path, 2)
    runs[0].losses = through.losses[:4] + runs[0].losses
    assert_same_run(runs[0], through)


def test_codes_for_a_model_that_is_not_converted_are_refused(tmp_path):
    plugin = BlockfpPrecision("mxfp8")
    fitted(Module(), plugin, tmp_path).save_checkpoint(tmp_path / "first.ckpt")
    with pytest.raises(RuntimeError, match="weight_codes"):
        fitted(Module(), plugin, tmp_path, 2, tmp_path / "first.ckpt")


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"dtype must be torch\.bfloat16 or None, got torch\.float16"):
        BlockfpPrecision("mxfp8", dtype=torch.float16)


def test_the_documented_lines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = Module()
    data = torch.utils.data.DataLoader(batches(), batch_size=None)
    run_documented("Lightning", module=module, data=data, path=tmp_path / "a.ckpt")
    assert isinstance(module.net[0].weight, bfp.QuantizedTensor)
    assert (tmp_path / "a.ckpt").is_file()
