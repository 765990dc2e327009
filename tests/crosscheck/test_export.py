"""`blockfp export`: a checkpoint's model as a file, in blockfp's layout or in high precision."""

import copy
import json
import pickle
import re

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="checkpoints are PyTorch's")

import threaded  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from command import run  # noqa: E402
from exported import SHAPES, bits, numpy, read, save, unsharded  # noqa: E402
from resumed import model_of, train  # noqa: E402
from safetensors import torch as safetensors  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

import blockfp  # noqa: E402
import blockfp.torch as bfp  # noqa: E402
from blockfp.errors import BadFile  # noqa: E402
from blockfp.files import manifest  # noqa: E402
from blockfp.files.export import contents  # noqa: E402


@pytest.mark.parametrize("format", ["fp8_e4m3", "mxfp6_e3m2_32x32", "nvfp4_16x16"])
def test_quantized(format, tmp_path):
    """From four ranks to one file, which `blockfp dequantize` reads as the unsharded model's values."""
    threaded.run(4, save, tmp_path / "run", format)
    result = run("export", tmp_path / "run", tmp_path / "model.safetensors")
    assert result.exit_code == 0, result.output
    assert "2 quantized weights and 2 other tensors of step-00000002" in result.output
    assert run("dequantize", tmp_path / "model.safetensors", tmp_path / "values.safetensors").exit_code == 0
    model, _ = unsharded(format)
    values = read(tmp_path / "values.safetensors")
    assert set(values) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    for i, layer in enumerate(model):
        np.testing.assert_array_equal(bits(values[f"{i}.weight"]), bits(layer.weight.detach().dequantize().numpy()))
        np.testing.assert_array_equal(bits(values[f"{i}.bias"]), bits(layer.bias.detach().numpy()))


def test_several_files(tmp_path):
    """`blockfp dequantize` reads them as one; they are overwritten where that is asked for."""
    save(0, tmp_path / "run", "nvfp4_16x16", "one")
    (several, one, values), pieces = (
        (tmp_path / f"{name}.safetensors" for name in ("s", "one", "values")),
        ("--file-bytes", 6000),
    )
    assert run("export", tmp_path / "run", several, *pieces).exit_code == 0
    for arguments in (pieces, ()):
        result = run("export", tmp_path / "run", several, *arguments)
        assert result.exit_code == 2
        assert "s.safetensors.index.json: already exists; --force" in result.output.replace("\n", "")
    assert run("export", tmp_path / "run", several, *pieces, "--force").exit_code == 0
    assert run("export", tmp_path / "run", one).exit_code == 0
    found = []
    for source in (several, tmp_path / "s.safetensors.index.json", one):
        assert run("dequantize", source, values, "--force").exit_code == 0
        found.append(read(values))
    for name, expected in found.pop().items():
        for there in found:
            np.testing.assert_array_equal(bits(there[name]), bits(expected))
    index = json.loads((tmp_path / "s.safetensors.index.json").read_text())
    (tmp_path / index["weight_map"]["0.bias"]).rename(away := tmp_path / "away")
    assert "no such file" in run("dequantize", several, values, "--force").output.replace("\n", "")
    away.rename(tmp_path / index["weight_map"]["0.bias"])
    assert run("dequantize", several, several, "--force").exit_code == 0
    assert {path.name for path in tmp_path.glob("s[-.]*")} == {"s.safetensors"}
    assert read(several).keys() == read(values).keys()


def test_jax_opens_it(tmp_path):
    jax = pytest.importorskip("jax", reason="pip install 'blockfp[jax]'")
    import blockfp.jax

    threaded.run(4, save, tmp_path / "run", "nvfp4_16x16")
    assert run("export", tmp_path / "run", tmp_path / "model.safetensors", "--file-bytes", "6000").exit_code == 0
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    model, _ = unsharded("nvfp4_16x16")
    there = blockfp.jax.load(tmp_path / "model.safetensors")
    for i, layer in enumerate(model):
        q, weight = there[f"{i}.weight"], layer.weight.detach()
        assert isinstance(q.codes, jax.Array)
        for part in ("codes", "scales", "tensor_scale"):
            np.testing.assert_array_equal(np.asarray(getattr(q, part)), getattr(weight, part).numpy())


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_high_precision_comes_from_the_masters(dtype, tmp_path):
    threaded.run(2, save, tmp_path / "run", "mxfp8_e4m3_32x32", "fsdp2", torch.bfloat16)
    options = [] if dtype is None else ["--dtype", dtype]
    result = run("export", tmp_path / "run", tmp_path / "model.safetensors", "--to", "high-precision", *options)
    assert result.exit_code == 0, result.output
    assert "dequantized from codes" not in result.output
    model, optimizer = unsharded("mxfp8_e4m3_32x32", torch.bfloat16)
    values = read(tmp_path / "model.safetensors")
    for i, layer in enumerate(model):
        expected = optimizer.state[layer.weight]["master"].to(torch.float32 if dtype == "float32" else torch.bfloat16)
        np.testing.assert_array_equal(bits(values[f"{i}.weight"]), bits(numpy(expected)))
        # The bias is fp32, and its own master.
        np.testing.assert_array_equal(bits(values[f"{i}.bias"]), bits(numpy(layer.bias)))


def test_parameters_of_16_bits_have_masters_too(tmp_path):
    model = model_of("mxfp8_e4m3", SHAPES).to(torch.float32)
    for layer in model:
        layer.bias = torch.nn.Parameter(layer.bias.detach().to(torch.bfloat16))
    optimizer = bfp.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, 0, 2)
    bfp.save_checkpoint(tmp_path / "run", model, optimizer, step=2)
    for name, options in (("own", []), ("fp32", ["--dtype", "float32"])):
        path = tmp_path / f"{name}.safetensors"
        assert run("export", tmp_path / "run", path, "--to", "high-precision", *options).exit_code == 0
    assert read(tmp_path / "own.safetensors")["0.bias"].dtype == ml_dtypes.bfloat16
    master = optimizer.state[model[0].bias]["master"]
    np.testing.assert_array_equal(read(tmp_path / "fp32.safetensors")["0.bias"], master.numpy())
    np.testing.assert_array_equal(bits(read(tmp_path / "own.safetensors")["0.bias"]), bits(numpy(model[0].bias)))


class Nested(torch.nn.Module):
    """A layer inside a layer of the same name, tied to another, beside parameters that are called like blockfp's buffers."""

    def __init__(self):
        super().__init__()
        self.proj = bfp.Linear(64, 64, recipe="fp8_delayed")
        self.inner = torch.nn.ModuleDict({"proj": bfp.Linear(64, 64, recipe="fp8_delayed")})
        self.tied = bfp.Linear(64, 64, recipe="fp8_delayed")
        self.tied.weight = self.inner["proj"].weight
        self.plain = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
        self.plain_tied = self.plain
        self.frozen = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16), requires_grad=False)
        self.input_scale = torch.nn.Parameter(torch.full((3,), 2.0))


def test_names_that_are_those_of_others(tmp_path):
    """Each weight gets its own master, tied weights share one, equal bits don't; a parameter is no buffer."""
    model = Nested()
    optimizer = bfp.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones(parameter.shape, dtype=parameter.dtype) if parameter.requires_grad else None
    optimizer.step()
    model.frozen.data.copy_(model.plain.data)
    bfp.save_checkpoint(tmp_path / "run", model, optimizer, step=1)
    path = tmp_path / "m.safetensors"
    result = run("export", tmp_path / "run", path, "--to", "high-precision", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert "dequantized from codes" not in result.output
    assert "omitted, because only training needs it: 12 tensors (" in result.output
    values = read(path)
    for name, twin in (("proj.weight", "proj.weight"), ("inner.proj.weight",) * 2, ("tied.weight", "inner.proj.weight")):
        np.testing.assert_array_equal(values[name], optimizer.state[model.get_parameter(twin)]["master"].numpy())
    np.testing.assert_array_equal(values["plain_tied"], optimizer.state[model.plain]["master"].numpy())
    assert (values["plain_tied"] != model.frozen.detach().to(torch.float32).numpy()).all()
    np.testing.assert_array_equal(bits(values["frozen"]), bits(numpy(model.frozen)))
    np.testing.assert_array_equal(values["input_scale"], model.input_scale.detach().numpy())
    for prefix in ("inner.proj.", "tied."):
        options = ("--prefix", f"model.{prefix}", "--to", "high-precision", "--force")
        assert run("export", tmp_path / "run", path, *options).exit_code == 0
        np.testing.assert_array_equal(read(path)["weight"], values["inner.proj.weight"])


class Head(torch.nn.Module):
    """A head that shares its weight with an embedding, beside a module that is called "model"."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(64, 64)})
        self.lm_head = bfp.Linear(64, 64, bias=False, recipe="mxfp8", weights="high_precision")
        self.model["embedding"].weight = self.lm_head.weight


def tied(rank, folder):
    model, other = fully_shard(Head()), fully_shard(Head())
    optimizer = bfp.AdamW(model.parameters(), lr=0.1)
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    optimizer.step()
    bfp.save_checkpoint(folder / "run", model, optimizer, step=1)
    bfp.load_checkpoint(folder / "run", other)
    assert torch.equal(other.lm_head.weight.to_local().values, model.lm_head.weight.to_local().values)
    values = model.lm_head.weight.full_tensor()
    if rank == 0:
        np.save(folder / "values.npy", values.detach().numpy())


def test_a_head_that_shares_an_embeddings_weight(tmp_path):
    """torch's embedding shows a class of blockfp's in its state dict; the checkpoint has its values."""
    threaded.run(2, tied, tmp_path)
    for to in ("quantized", "high-precision"):
        path = tmp_path / f"{to}.safetensors"
        result = run("export", tmp_path / "run", path, "--to", to)
        assert result.exit_code == 0, result.output
        there = read(path)
        assert set(there) == {"model.embedding.weight", "lm_head.weight"}
        for values in there.values():
            np.testing.assert_array_equal(values, np.load(tmp_path / "values.npy"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_names_that_others_give(tmp_path):
    """Masters are found under them, and nothing that may be of the model is left out unasked."""
    model = torch.nn.ModuleDict({"model": model_of("nvfp4", SHAPES[:1]), "lm_head": torch.nn.Linear(2, 2)})
    optimizer = bfp.AdamW(model.parameters(), lr=0.1)
    optimizer.make_state()
    own, of_optimizer = get_state_dict(model, optimizer)
    master = of_optimizer["state"]["model.0.weight"]["master"]
    out = tmp_path / "m.safetensors"
    for i, (state, options, weight) in enumerate(
        (
            ({"model": own, "optim": of_optimizer}, [], "model.0.weight"),
            ({"app": {"model": own, "optim": of_optimizer}}, ["--prefix", "app.model."], "model.0.weight"),
            ({**own, "optim": of_optimizer}, ["--prefix", ""], "model.0.weight"),
            ({**own, "optim": of_optimizer}, ["--prefix", "model."], "0.weight"),
        )
    ):
        dcp.save(state, checkpoint_id=tmp_path / str(i))
        result = run("export", tmp_path / str(i), out, "--to", "high-precision", "--force", *options)
        assert result.exit_code == 0, result.output
        there = read(out)
        np.testing.assert_array_equal(there[weight], master.numpy())
        assert ("lm_head.weight" in there) == (weight == "model.0.weight")
        assert not any("optim" in name for name in there)
    result = run("export", tmp_path / "3", out, "--force")
    assert result.exit_code == 2
    assert "begin with 'model.': lm_head.bias, lm_head.weight: --prefix '' exports all" in result.output.replace("\n", "")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_without_masters_it_says_that_values_are_those_of_codes(tmp_path):
    model = model_of("nvfp4", SHAPES)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp")
    assert run("export", tmp_path / "dcp", tmp_path / "model.safetensors").exit_code == 2
    result = run("export", tmp_path / "dcp", tmp_path / "m.safetensors", "--prefix", "", "--to", "high-precision")
    assert result.exit_code == 0, result.output
    assert "because the checkpoint has no fp32 weight: 2 weights (0.weight, 1.weight)" in result.output
    values = read(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(bits(values["0.weight"]), bits(model[0].weight.detach().dequantize().numpy()))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_bad_use(tmp_path):
    threaded.run(2, save, tmp_path / "run", "mxint8", "fsdp2")
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "plain")
    dcp.save({"w": torch.ones(2, dtype=torch.complex128)}, checkpoint_id=tmp_path / "complex")
    (tmp_path / "file").write_text("no folder")
    out = tmp_path / "out.safetensors"
    for arguments, message in (
        ((tmp_path / "nowhere", out), "holds no checkpoint"),
        ((tmp_path / "run", out, "--step", "7"), "has no checkpoint of step 7, only 2"),
        ((tmp_path / "run", out, "--to", "onnx"), "--to onnx: must be one of"),
        ((tmp_path / "run", out, "--dtype", "float32"), "needs --to high-precision"),
        ((tmp_path / "run", out, "--to", "high-precision", "--dtype", "int8"), "must be float32, float16 or bfloat16"),
        ((tmp_path / "run", tmp_path / "out.bin"), "must end in .safetensors"),
        ((tmp_path / "run", out, "--prefix", "module."), "no name begins with 'module.'"),
        ((tmp_path / "run", tmp_path / "ct", "--to", "compressed-tensors"), "has no layout for mxint8"),
        ((tmp_path / "run", tmp_path / "run", "--to", "compressed-tensors"), "must be a new or empty folder"),
        ((tmp_path / "run", out, "--file-bytes", "0"), "--file-bytes 0: must be 1 or more"),
        ((tmp_path / "plain", tmp_path / "file" / "ct", "--to", "compressed-tensors", "--prefix", ""), "Not a directory"),
        ((tmp_path / "complex", tmp_path / "new" / "ct", "--to", "compressed-tensors", "--prefix", ""), "complex128 can't be"),
    ):
        result = run("export", *arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert message in result.output.replace("\n", ""), (arguments, result.output)
        assert not out.exists()
    assert not (tmp_path / "new").exists()
    path = tmp_path / "run" / "step-00000002" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    assert "__0_0.distcp has" in run("export", tmp_path / "run", out).output.replace("\n", "")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_part_that_is_missing_is_named(tmp_path):
    from blockfp.torch_backend.checkpoint.plain_values import open_checkpoint

    state = model_of("nvfp4", SHAPES).state_dict()
    del state["1.weight_tensor_scale"]
    dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(BadFile, match=r"tensor '1\.weight_tensor_scale': is missing, nvfp4 of shape \(37, 128\) needs float32"):
        contents(open_checkpoint(tmp_path / "dcp"), "model.")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_damaged_index_is_named(tmp_path):
    from blockfp.torch_backend.checkpoint.index import read_index

    dcp.save({"model": model_of("nvfp4", SHAPES).state_dict()}, checkpoint_id=tmp_path / "dcp")
    whole = read_index(manifest.Files(tmp_path / "dcp"))
    for damage, message in (
        (lambda index: index.storage_data.clear(), "that the index doesn't locate"),
        (
            lambda index: vars(index.state_dict_metadata["model.0.bias"]).pop("size"),
            "is malformed at 'model.0.bias': KeyError('size')",
        ),
        (lambda index: vars(index).pop("state_dict_metadata"), "holds a Metadata without tensors"),
    ):
        index = copy.deepcopy(whole)
        damage(index)
        (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(index))
        result = run("export", tmp_path / "dcp", tmp_path / "m.safetensors")
        assert result.exit_code == 2
        assert message in result.output.replace("\n", "")
        assert not (tmp_path / "m.safetensors").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_codes_of_two_formats_are_refused(tmp_path):
    """A cache of names, such as torchtitan's, keeps the old format's beside the new one's after `set_recipe`."""
    state = model_of("mxfp6_e3m2", SHAPES).state_dict()
    state["0.weight_format_mxfp6_e2m3"] = state["0.weight_format_mxfp6_e3m2"].clone()
    dcp.save(state, checkpoint_id=tmp_path / "run")
    result = run("export", tmp_path / "run", tmp_path / "out.safetensors", "--prefix", "")
    assert result.exit_code == 2
    said = r"tensor '0\.weight': names two formats of its codes, mxfp6_e\dm\d and mxfp6_e\dm\d"
    assert re.search(said, " ".join(result.output.split()))
    safetensors.save_file(state, tmp_path / "state.safetensors")
    with pytest.raises(BadFile, match=said):
        blockfp.load(tmp_path / "state.safetensors")
