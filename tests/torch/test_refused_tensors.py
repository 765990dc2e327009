"""Arguments that no layer, optimizer or file can take: each is named, with what would do."""

import numpy as np
import pytest
import torch
from arrays import values
from torch import nn

import blockfp
import blockfp.torch as bfp

X = values((64, 64), 0)
OFFS = torch.tensor([64], dtype=torch.int32)
LAYOUTS = {"coo": lambda x: x.to_sparse(), "csr": lambda x: x.to_sparse_csr(), "mkldnn": lambda x: x.to_mkldnn()}
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")


def layer():
    return bfp.Linear(64, 64, recipe="mxfp8")


def convert(weight):
    linear = nn.Linear(64, 64)
    linear.weight = nn.Parameter(weight)
    bfp.convert(nn.Sequential(linear), "mxfp8")


def behind_a_dense_one(x):
    """What is known of a dense tensor says nothing of another."""
    model = layer()
    model(X)
    model(x)


SPARSE = {
    "x must be": lambda x: bfp.quantize(x, "mxfp8_e4m3"),
    "x must be dense": behind_a_dense_one,
    "x must be dense, got": lambda x: bfp.linear(x, X, recipe="mxfp8"),
    "weight must be": lambda x: bfp.linear(X, x, recipe="mxfp8"),
    "a must be": lambda x: bfp.grouped_mm(x, X[None], offs=OFFS, recipe="mxfp8"),
    "b_t must be": lambda x: bfp.grouped_mm(X, x, offs=OFFS, recipe="mxfp8"),
    "tensor must be": lambda x: bfp.load_high_precision_(layer().weight, x),
    "tensor must be dense": lambda x: layer().load_state_dict({"weight": x, "bias": torch.ones(64)}),
    "weight of '0'": convert,
    "x must": lambda x: bfp.dispatch(x, torch.zeros(64, 1, dtype=torch.int64), 1, recipe="mxfp8"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("named", SPARSE)
def test_tensors_that_are_not_dense(named, layout):
    with pytest.raises((TypeError, ValueError), match=rf"{named}.*layout torch\.(sparse|_mkldnn).*to_dense\(\)"):
        SPARSE[named](LAYOUTS[layout](X))


def test_gradients_and_parts_that_are_not_dense():
    with pytest.raises(TypeError, match=r"the gradient of a layer's output must be dense, got layout torch\.sparse_coo"):
        layer()(X.clone().requires_grad_()).backward(X.to_sparse())
    weight = nn.Parameter(X.clone())
    weight.grad = X.to_sparse()
    with pytest.raises(TypeError, match=r"gradients must be dense, got layout torch\.sparse_coo"):
        bfp.clip_grad_norm_([weight], 1.0)
    with pytest.raises(TypeError, match=r"gradients must be dense, got layout torch\.sparse_coo"):
        bfp.AdamW([weight]).step()
    parts = {"format": "mxfp8_e4m3", "columns": 64, "dtype": torch.float32}
    codes, scales = torch.zeros(64, 64, dtype=torch.uint8), torch.zeros(64, 2, dtype=torch.uint8)
    for name, given in (("codes", (codes.to_sparse(), scales)), ("scales", (codes, scales.to_sparse()))):
        with pytest.raises(TypeError, match=f"{name} must be dense"):
            bfp.QuantizedTensor.from_parts(*given, **parts)


class Endless:
    """As `numpy.matrix`, whose rows are matrices."""

    def __iter__(self):
        yield self


ORIGINS = {
    "a tensor without end": torch.zeros(1, dtype=torch.int64).expand(2**40),
    "an array without end": np.broadcast_to(0, (2**40,)),
    "numbers without end": range(2**40),
    "three": (0, 0, 0),
    "one": (0,),
    "no pair": 3,
    "nothing": None,
    "words": "ab",
}


@pytest.mark.parametrize("name", ORIGINS)
def test_an_origin_is_two_integers(name):
    """However many there are: an expanded tensor has them all in the memory of one."""
    options = {"format": "mxfp8_e4m3_32x32", "columns": 32, "origin": ORIGINS[name]}
    for kind, module, dtype in ((bfp.QuantizedTensor, torch, torch.float32), (blockfp.QuantizedArray, np, np.float32)):
        codes, scales = module.zeros((32, 32), dtype=module.uint8), module.ones((1, 1), dtype=module.uint8)
        with pytest.raises((TypeError, ValueError), match="origin must be of integers"):
            kind.from_parts(codes, scales, dtype=dtype, **options)


def test_more_elements_than_memory():
    x = torch.ones(1, 1).expand(2**20, 2**20)
    with pytest.raises(RuntimeError, match="allocate") as error:
        bfp.quantize(x, "mxfp8_e4m3")
    assert error.value.__notes__ == ["x has shape (1048576, 1048576), 1099511627776 elements"]


@pytest.mark.parametrize(
    "optimizer",
    [X, np.ones((2, 2)), Endless(), "adam", ["adam"], [X], bfp.AdamW, 3, nn.ModuleList([nn.Linear(2, 2)])],
    ids=lambda one: type(one).__name__,
)
def test_what_is_no_optimizer(optimizer):
    """Some give others of their kind for ever, as strings do."""
    model = layer()
    codes = model.weight.codes.clone()
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer or None, got "):
        bfp.set_recipe(model, optimizer, "nvfp4")
    assert torch.equal(model.weight.codes, codes)


@pytest.mark.parametrize("kind", ["ndarray", "QuantizedArray"])
def test_arrays_of_other_libraries_are_not_saved_as_tensors(kind, tmp_path):
    array = np.ones((32, 32), np.float32)
    array = array if kind == "ndarray" else blockfp.quantize(array, "mxfp8_e4m3")
    with pytest.raises(TypeError, match=f"tensor 'a' must be a torch.Tensor, got {kind}: blockfp.save"):
        bfp.save(tmp_path / "x.safetensors", {"a": array})
    assert not list(tmp_path.iterdir())
