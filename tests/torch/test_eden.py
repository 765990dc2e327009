"""MS-EDEN in PyTorch: the definition's bits, ops, what layers compute and keep, eager and compiled."""

import copy

import numpy as np
import pytest
import threaded
import torch
from arrays import values
from blockfp.torch_backend.custom_ops import eden_ops
from linear_reference import assert_close, expected
from samples import sample
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.definition import eden, numerics
from blockfp.definition.rounding import fold_in, gradient_key

KEY = torch.tensor([3, -5], dtype=torch.int32)
WORDS = (3, (1 << 32) - 5)


@pytest.mark.parametrize("kind", ["gaussian", "exponents", "random_bits"])
@pytest.mark.parametrize("rows", [16, 77, 300])
def test_the_op_has_the_definitions_bits(kind, rows):
    x = sample(kind, (rows, 40))
    with np.errstate(invalid="ignore", over="ignore"):
        z = eden.rotate(np.ascontiguousarray(x.T), WORDS)
        wanted = eden.quantize(z, "nvfp4", WORDS, "input")
    codes, scales, tensor_scale = eden_ops.quantize_eden(torch.from_numpy(x), None, KEY, "input", True, [0, 0], None)
    np.testing.assert_array_equal(codes.numpy(), wanted.codes)
    np.testing.assert_array_equal(scales.numpy(), wanted.scales)
    # An Inf marks its operand.
    assert tensor_scale.isnan() if np.isinf(x).any() else tensor_scale.numpy() == wanted.tensor_scale


def test_opcheck():
    x = values((40, 24), 0)
    torch.library.opcheck(eden_ops.rotate_eden, (x, KEY, 128))
    torch.library.opcheck(eden_ops.eden_amaxes, (x, KEY, True, [8, 128]))
    amaxes = eden_ops.eden_amaxes(x, KEY, True, [8, 128])
    for arguments in ((None, KEY, "input", True, [0, 0], None), (amaxes, KEY, "gradient", True, [8, 128], [64, 256])):
        torch.library.opcheck(eden_ops.quantize_eden, (x, *arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [40, 256, 300])
def test_a_layer_multiplies_the_definitions_operands(tokens, dtype):
    x, weight, gradient = values((tokens, 64), 0, dtype), values((48, 64), 1, dtype), values((tokens, 48), 2, dtype)
    stored = bfp.quantize(weight, "nvfp4_16x16").requires_grad_()
    leaf = x.clone().requires_grad_()
    y = bfp.linear(leaf, stored, recipe="nvfp4_eden", key=7)
    y.backward(gradient)
    wanted = expected(x, weight, gradient, "nvfp4_eden", key=7)
    for got, result in zip((y, leaf.grad, stored.grad), wanted, strict=True):
        assert_close(got, result, sums=2.0**-20)


def test_the_gradient_of_a_weight_is_unbiased():
    """Its mean over keys comes near the product of the values, where that of nvfp4 stays away."""
    x, weight, gradient = values((256, 32), 0), values((16, 32), 1), values((256, 16), 2)
    exact = gradient.double().mT @ x.double()
    biases = {}
    for name in ("nvfp4", "nvfp4_eden"):
        total, squared, count = 0, 0.0, 100
        for key in range(count):
            parameter = weight.clone().requires_grad_()
            bfp.linear(x, parameter, recipe=name, key=key).backward(gradient)
            total, squared = total + parameter.grad.double(), squared + float((parameter.grad - exact).square().mean())
        biases[name] = float((total / count - exact).square().mean()) / (squared / count / count)
    assert 0.8 < biases["nvfp4_eden"] < 1.2
    assert biases["nvfp4"] > 5


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
@pytest.mark.parametrize("name", ["nvfp4_eden", "mxfp4_rotated"])
def test_compiled_layers(name, weights):
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = bfp.Linear(64, 48, recipe=name, weights=weights)
    other = copy.deepcopy(layer)
    other.compile(fullgraph=True, backend="aot_eager")
    for step in range(2):
        results = []
        for each in (layer, other):
            x = values((72, 64), step).requires_grad_()
            y = each(x)
            y.backward(values((72, 48), 5))
            results.append([y.detach(), x.grad, each.weight.grad.clone()])
            each.zero_grad()
            assert each.step == step + 1
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_layer_keeps_its_input_alone():
    layer = bfp.Linear(64, 48, recipe="nvfp4_eden")
    x = values((128, 64), 0).requires_grad_()
    for needs, wanted in ((True, [x.data_ptr()]), (False, [])):
        layer.weight.requires_grad_(needs)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            layer(x)
        own = [t for t in saved if not isinstance(t, bfp.QuantizedTensor) and t.numel()]
        assert [t.data_ptr() for t in own] == wanted


def test_recomputing_a_forward_changes_nothing():
    torch.manual_seed(0)
    layer = bfp.Linear(64, 64, recipe="nvfp4_eden")
    results = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        layer.zero_grad()
        layer.step.zero_()
        x = values((128, 64), 0).requires_grad_()
        run(x).square().sum().backward()
        results.append((x.grad, layer.weight.grad.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_grouped_layers_rotate_each_group_by_its_own_signs():
    layer = bfp.GroupedLinear(2, 64, 48, recipe="nvfp4_eden")
    x, gradient = values((200, 64), 0), values((200, 48), 1)
    layer(x, torch.tensor([140, 60])).backward(gradient)
    for group, (first, last) in enumerate(((0, 140), (140, 200))):
        key = gradient_key(first_key(layer), 1, group=group)
        turned = (np.ascontiguousarray(t[first:last].numpy().T) for t in (gradient, x))
        a, b = (
            torch.from_numpy(
                numerics.dequantize(
                    *eden.quantize(eden.rotate(z, key), "nvfp4", key, name), "nvfp4", "float32", columns=z.shape[1]
                )
            ).double()
            for z, name in zip(turned, ("gradient", "input"), strict=True)
        )
        torch.testing.assert_close(layer.weight.grad[group].double(), a @ b.mT, rtol=1e-5, atol=1e-4)


def first_key(layer):
    """The key of the layer's first step on rank 0."""
    return fold_in(fold_in(tuple(int(word) & 0xFFFFFFFF for word in layer.rng_key), 0), 0)


def test_fsdp2_ranks_draw_signs_of_their_own():
    torch.manual_seed(0)
    whole = bfp.Linear(64, 48, recipe="nvfp4_eden")

    def run(rank):
        layer = fully_shard(copy.deepcopy(whole), mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
        x = values((128, 64), 3).requires_grad_()
        layer(x).backward(values((128, 48), 4))
        return x.grad, layer.weight.grad.full_tensor()

    (dx, dw), (other, same) = threaded.run(2, run)
    assert not torch.equal(dx, other)
    assert torch.equal(dw, same)
    x = values((128, 64), 3).requires_grad_()
    whole(x).backward(values((128, 48), 4))
    assert torch.equal(dx, x.grad)
    # The mean of two estimates of one gradient.
    assert not torch.equal(dw, whole.weight.grad)
    assert (dw - whole.weight.grad).norm() < 0.3 * dw.norm()


def test_what_is_refused():
    with pytest.raises(ValueError, match="recipe nvfp4_eden: EDEN quantizes inputs in the backward, from values"):
        bfp.dispatch(values((8, 64), 0), torch.zeros(8, 1, dtype=torch.int64), 2, recipe="nvfp4_eden", key=1)
    with pytest.raises(ValueError, match="nvfp4_eden rounds gradients stochastically: pass key="):
        bfp.linear(values((8, 64), 0).requires_grad_(), values((48, 64), 1), recipe="nvfp4_eden")
    assert recipes.parse("nvfp4_eden").gradient_columnwise.eden
