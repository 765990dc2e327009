"""Files that earlier versions wrote are read, with the bits that were written.

python tests/crosscheck/test_written.py      writes those of a new version into written/VERSION/, once, when it is released
"""

import pickle
from importlib import metadata
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import blockfp

WRITTEN = Path(__file__).parent / "written"
VERSIONS = sorted(folder.name for folder in WRITTEN.iterdir()) if WRITTEN.is_dir() else []
NAMES = ("fp8_e4m3", "fp8_e5m2_1x128", "mxfp8_e4m3_32x32", "mxfp6_e3m2", "mxint8", "nvfp4")
STEPS = 2


def values(rows: int = 16, columns: int = 40) -> np.ndarray:
    """Integers over 64, of all magnitudes and signs."""
    return ((np.arange(rows * columns, dtype=np.int64) * 7919 % 1009 - 504) / 64).astype(np.float32).reshape(rows, columns)


def quantized() -> dict[str, blockfp.QuantizedArray]:
    return {name: blockfp.quantize(values().astype(ml_dtypes.bfloat16), name) for name in NAMES}


def parts(q) -> list[np.ndarray]:
    return [np.asarray(part) for part in (q.codes, q.scales, q.tensor_scale) if part is not None]


def assert_quantized(found: dict) -> None:
    assert set(found) == set(NAMES)
    for name, expected in quantized().items():
        assert found[name].format is expected.format
        assert str(found[name].dtype).removeprefix("torch.") == "bfloat16"
        assert tuple(found[name].shape) == expected.shape
        for part, other in zip(parts(found[name]), parts(expected), strict=True):
            np.testing.assert_array_equal(part, other)


def trained(model, optimizer):
    """A model after some steps, which move masters and codes."""
    import torch

    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(2, 32)).square().sum().backward()
        optimizer.step()
    return model


def layers(weights: str = "quantized"):
    import torch
    from torch import nn

    import blockfp.torch as bfp

    model = nn.Sequential(nn.Linear(32, 8))
    with torch.no_grad():
        model[0].weight.copy_(torch.from_numpy(values(8, 32)))
        model[0].bias.zero_()
    return bfp.convert(model, "mxfp8", weights=weights)


def parameters() -> dict:
    import jax.numpy as jnp

    import blockfp.jax as bfp

    return bfp.quantize_params({"w": jnp.asarray(values(8, 32)), "b": jnp.ones(8)}, "mxfp8")


def need(library: str) -> None:
    # Not importorskip: the tests' folders have the names of libraries.
    try:
        metadata.version(library)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{library} is not installed")


@pytest.fixture(params=VERSIONS)
def folder(request) -> Path:
    return WRITTEN / request.param


def test_numpy_pickles(folder):
    found = pickle.loads((folder / "numpy.pickle").read_bytes())
    assert found.pop("recipe") == blockfp.recipes.fp8_delayed()
    assert found.pop("format") is blockfp.Format.parse("nvfp4")
    assert_quantized(found)


@pytest.mark.parametrize("name", ["arrays.safetensors", "parts.safetensors"])
def test_safetensors(folder, name):
    assert_quantized(blockfp.load(folder / name))


def test_npz(folder):
    with np.load(folder / "parts.npz") as found:
        made = {}
        for name in NAMES:
            held = [found[f"{name}.{i}"] for i in range(3) if f"{name}.{i}" in found]
            made[name] = blockfp.QuantizedArray.from_parts(*held, format=name, columns=40, dtype="bfloat16")
    assert_quantized(made)


def test_jax_pickles(folder):
    need("jax")
    import jax

    import blockfp.jax as face

    assert_quantized(pickle.loads((folder / "jax.pickle").read_bytes()))
    params, states, structure = pickle.loads((folder / "jax-states.pickle").read_bytes())
    assert structure == jax.tree.structure(parameters())
    expected = {"optimizer": face.adamw(1e-3).init(parameters()), "delayed": face.delayed_state("fp8_delayed")}
    for found, made in ((params, parameters()), (states, expected)):
        assert jax.tree.structure(found) == jax.tree.structure(made)
        jax.tree.map(np.testing.assert_array_equal, found, made)


def test_torch_files(folder):
    need("torch")
    import torch

    import blockfp.torch as face

    assert_quantized(torch.load(folder / "torch.pt", weights_only=True))

    cast = torch.load(folder / "torch-parameters.pt", weights_only=True)
    for name, param in layers("high_precision").named_parameters():
        assert type(cast[name]) is type(param)
        if name.endswith("weight"):
            assert isinstance(cast[name], face.CastWeight)
            assert cast[name].format is param.format
        assert torch.equal(*(getattr(p, "values", p) if isinstance(p, face.CastWeight) else p for p in (cast[name], param)))

    model = torch.load(folder / "torch-model.pt", weights_only=False)
    assert_same_state(model, layers())
    x = torch.from_numpy(values(8, 32))
    assert torch.equal(model(x), layers()(x))


def test_torch_states_and_checkpoints(folder):
    """State dicts and a checkpoint of one model: both give it, with its masters, and it goes on alike from both."""
    need("torch")
    import torch

    import blockfp.torch as face

    models = []
    for load in ("states", "checkpoint"):
        model = layers()
        optimizer = face.AdamW(model.parameters(), lr=0.5)
        if load == "states":
            state, optimizer_state = torch.load(folder / "torch-states.pt", weights_only=True)
            model.load_state_dict(state)
            optimizer.load_state_dict(optimizer_state)
        else:
            assert face.load_checkpoint(folder / "checkpoint", model, optimizer).step == STEPS
        masters = [optimizer.state[layer.weight]["master"] for layer in model]
        for layer, master in zip(model, masters, strict=True):
            again = face.quantize(master, layer.weight.format)
            assert torch.equal(again.codes, layer.weight.codes)
            assert torch.equal(again.scales, layer.weight.scales)
        models.append(trained(model, optimizer))
    one, other = models
    assert_same_state(one, other)
    assert not torch.equal(one[0].weight.codes, layers()[0].weight.codes)


def assert_same_state(model, other) -> None:
    import torch

    state, expected = model.state_dict(), other.state_dict()
    assert list(state) == list(expected)
    for name in state:
        assert torch.equal(state[name], expected[name]), name


def write(folder: Path) -> None:
    import jax
    import jax.numpy as jnp
    import torch

    import blockfp.jax as jax_face
    import blockfp.torch as torch_face

    folder.mkdir(parents=True)
    named = {"recipe": blockfp.recipes.fp8_delayed(), "format": blockfp.Format.parse("nvfp4")}
    (folder / "numpy.pickle").write_bytes(pickle.dumps(quantized() | named))
    blockfp.save(folder / "arrays.safetensors", quantized())
    blockfp.save(folder / "parts.safetensors", quantized(), file_bytes=2000)
    np.savez_compressed(folder / "parts.npz", **{f"{n}.{i}": p for n, q in quantized().items() for i, p in enumerate(parts(q))})

    arrays = {name: jax_face.quantize(jnp.asarray(values(), jnp.bfloat16), name) for name in NAMES}
    (folder / "jax.pickle").write_bytes(pickle.dumps(arrays))
    params = parameters()
    states = {"optimizer": jax_face.adamw(1e-3).init(params), "delayed": jax_face.delayed_state(named["recipe"])}
    (folder / "jax-states.pickle").write_bytes(pickle.dumps((params, states, jax.tree.structure(params))))

    tensors = {name: torch_face.quantize(torch.from_numpy(values()).bfloat16(), name) for name in NAMES}
    torch.save(tensors, folder / "torch.pt")
    cast = layers("high_precision")
    torch.save(dict(cast.named_parameters()), folder / "torch-parameters.pt")
    model = layers()
    torch.save(model, folder / "torch-model.pt")
    optimizer = torch_face.AdamW(model.parameters(), lr=0.5)
    trained(model, optimizer)
    torch.save((model.state_dict(), optimizer.state_dict()), folder / "torch-states.pt")
    torch_face.save_checkpoint(folder / "checkpoint", model, optimizer, step=STEPS)


if __name__ == "__main__":
    write(WRITTEN / blockfp.__version__)
