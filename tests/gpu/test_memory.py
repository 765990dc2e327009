"""What the backward keeps on a GPU, counted: attention's output once, no codes in compiled code. What is cast again is x."""

import pytest
import torch
import torch.nn.functional as F
from arrays import with_scales
from blockfp.torch_backend.ops.quantize import operand_ops
from blockfp.torch_backend.torch_internals import KEEPS_RESULT
from torch.nn import attention

import blockfp.torch as bfp

T, D, HIDDEN = 512, 256, 512


def saved(call, *own):
    """The bytes of each memory that autograd saves, beside that of some tensors, by its dtype and address; and the result."""
    found = {}

    def note(tensor):
        if not hasattr(tensor, "__tensor_flatten__"):
            found[tensor.dtype, tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = call()
    addresses = {tensor.untyped_storage().data_ptr() for tensor in own}
    return {key: size for key, size in found.items() if key[1] not in addresses}, y


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_attention_keeps_its_output(backend):
    q = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
        found, y = saved(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    assert type(y.grad_fn).__name__ in KEEPS_RESULT
    assert (y.dtype, y.untyped_storage().data_ptr()) in found


def layer_of(recipe):
    torch.manual_seed(0)
    options = {"recipe": recipe, "norm": "rms_norm", "activation": "swiglu", "dtype": torch.bfloat16, "device": "cuda"}
    layer = with_scales(bfp.TransformerLayer(D, HIDDEN, 4, **options))
    x = torch.randn(1, T, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return layer, x


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "fp8_block", "mxfp8"])
def test_codes_of_an_eager_layer(recipe):
    layer, x = layer_of(recipe)
    weights = [part.codes for part in layer.parameters() if hasattr(part, "codes")]
    found, y = saved(lambda: layer(x), *weights)
    # Of what the two norms make.
    assert sum(size for (dtype, _), size in found.items() if dtype == torch.uint8 and size >= T * D) == 2 * T * D
    y.float().sum().backward()


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "mxfp8"])
def test_compiled_layers_cast_the_same_input_again(recipe, monkeypatch):
    cast = []
    quantize = operand_ops.quantize_matrix

    def noted(x, how, *options):
        cast.append((how.row is not None, how.column is not None, x.detach().clone()))
        return quantize(x, how, *options)

    monkeypatch.setattr(operand_ops, "quantize_matrix", noted)
    torch._dynamo.reset()
    layer, x = layer_of(recipe)
    layer.compile(fullgraph=True)
    weights = [part.codes for part in layer.parameters() if hasattr(part, "codes")]
    found, y = saved(lambda: layer(x), *weights)
    assert not [size for (dtype, _), size in found.items() if dtype == torch.uint8 and size >= T * D]
    rows = [one for row, column, one in cast if row and not column]
    y.float().square().sum().backward()
    columns = [one for row, column, one in cast if column and not row]
    assert len(columns) >= 3
    for one in columns:
        assert any(one.shape == other.shape and torch.equal(one, other) for other in rows)


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4"])
def test_the_table_of_memory_is_what_is_allocated(recipe):
    """Against the allocator, which rounds each block up to 512 bytes."""
    layer, x = layer_of(recipe)
    optimizer = bfp.AdamW(layer.parameters())
    for _ in range(2):
        layer(x).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        x.grad = None
    rows = bfp.summary(layer, optimizer, batch=x).memory
    kept = sum(row.bytes for row in rows if row.holds == "kept for the backward")
    before = torch.cuda.memory_allocated()
    y = layer(x)
    found = torch.cuda.memory_allocated() - before - y.untyped_storage().nbytes()
    # The input may be among what is kept, and was there before.
    assert kept - x.nbytes <= found <= kept + 512 * 64
    assert sum(row.bytes for row in rows if row.device == "cuda:0") - kept <= before
