"""`blockfp export --quantize`: weights that were trained in high precision, as the codes of their forward."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="checkpoints are PyTorch's")

import threaded  # noqa: E402
from command import plain, run  # noqa: E402
from exported import bits, read  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

import blockfp  # noqa: E402
import blockfp.torch as bfp  # noqa: E402
from blockfp import recipes  # noqa: E402


def model_of(recipe):
    with threaded.seeded(0):
        model = nn.Sequential(nn.Linear(128, 96), nn.Linear(96, 96, bias=False), nn.Linear(96, 96, bias=False))
        model[2].weight = model[1].weight
        return bfp.convert(model, recipe, weights="high_precision")


def save(rank, folder, recipe):
    model = model_of(recipe)
    fully_shard(model)
    with torch.no_grad():
        model(torch.randn(2, 128))  # FSDP2 leaves the weights gathered, as codes
    bfp.save_checkpoint(folder, model, step=1)


@pytest.mark.parametrize(("recipe", "layout"), [("w4a8", "compressed-tensors"), ("fp8_row", "compressed-tensors"),
                                                ("nvfp4", "modelopt")])  # fmt: skip
def test_a_layout_has_the_bytes_that_are_streamed(recipe, layout, tmp_path):
    threaded.run(2, save, tmp_path / "run", recipe)
    result = run("export", tmp_path / "run", tmp_path / "out", "--to", layout, "--quantize")
    assert result.exit_code == 0, result.output
    assert "wrote" in result.output
    sent = {name: x for bucket in bfp.stream_weights(model_of(recipe), layout=layout, quantize=True) for name, x in bucket}
    found = read(tmp_path / "out" / "model.safetensors")
    # The file has a tied weight under each of its names.
    assert {name for name in found if not name.startswith("2.")} == sent.keys()
    for name, array in found.items():
        other = sent[name.replace("2.", "1.", 1) if name.startswith("2.") else name]
        np.testing.assert_array_equal(bits(array), other.contiguous().view(-1).view(torch.uint8).numpy(), err_msg=name)


def test_blockfps_own_layout(tmp_path):
    recipe = recipes.qat("mxfp6_e3m2")
    threaded.run(2, save, tmp_path / "run", recipe)
    assert run("export", tmp_path / "run", tmp_path / "codes.safetensors", "--quantize").exit_code == 0
    found, model = blockfp.load(tmp_path / "codes.safetensors"), model_of(recipe)
    for name in ("0.weight", "1.weight", "2.weight"):
        q = blockfp.quantize(model.get_parameter(name).detach().values.numpy(), "mxfp6_e3m2")
        np.testing.assert_array_equal(found[name].codes, q.codes)
        np.testing.assert_array_equal(found[name].scales, q.scales)
    # Without the option they are values, and the command says so.
    result = run("export", tmp_path / "run", tmp_path / "values.safetensors")
    assert "written as values, which --quantize writes as the codes of their forward: 3 weights" in " ".join(
        result.output.split()
    )
    assert bits(read(tmp_path / "values.safetensors")["1.weight"]).nbytes == 96 * 96 * 4


def test_the_checkpoint_loads_as_before(tmp_path):
    threaded.run(2, save, tmp_path / "run", "mxfp8")
    model = model_of("mxfp8")
    wanted = {name: value.detach().values.clone() for name, value in model.named_parameters() if "weight" in name}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert bfp.load_checkpoint(tmp_path / "run", model).extra == {}
    for name, value in wanted.items():
        assert torch.equal(model.get_parameter(name).detach().values, value)


def test_what_is_refused(tmp_path):
    threaded.run(2, save, tmp_path / "run", "w4a8")
    result = run("export", tmp_path / "run", tmp_path / "a.safetensors", "--to", "high-precision", "--quantize")
    assert (result.exit_code, "--quantize: writes codes" in result.output) == (2, True)
    result = run("export", tmp_path / "run", tmp_path / "out", "--to", "fine-grained-fp8", "--quantize")
    assert (result.exit_code, "has no layout for mxfp4_e2m1" in result.output.replace("\n", "")) == (2, True)
    bfp.save_checkpoint(tmp_path / "plain", nn.Linear(8, 8), step=1)
    result = run("export", tmp_path / "plain", tmp_path / "a.safetensors", "--quantize")
    assert (result.exit_code, "records no format of any weight" in result.output.replace("\n", "")) == (2, True)
    bad = model_of("w4a8")
    with torch.no_grad():
        bad[1].weight[0, 0] = math.nan
    bfp.save_checkpoint(tmp_path / "bad", bad, step=1)
    result = run("export", tmp_path / "bad", tmp_path / "out", "--to", "compressed-tensors", "--quantize")
    assert result.exit_code == 2
    assert "tensor '1.weight': has NaN scales" in plain(result.output)
    assert not list(tmp_path.glob("a.safetensors"))
    assert not list((tmp_path / "out").glob("*"))
