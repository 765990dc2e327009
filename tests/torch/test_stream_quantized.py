"""`stream_weights(quantize=True)`: a server of weights that are trained in high precision gets the codes of their forward."""

import copy
import math

import numpy as np
import pytest
import threaded
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import blockfp
import blockfp.torch as bfp
from blockfp import recipes

# name: (mesh, its axes, styles of layers 0 and 2)
MESHES = {
    "fsdp2": ((2,), ("fsdp",), {}),
    "fsdp3": ((3,), ("fsdp",), {}),
    "hsdp": ((2, 2), ("replicate", "fsdp"), {}),
    "tp": ((2,), ("tp",), {"0": "column", "2": "row"}),
    "fsdp x tp": ((2, 2), ("fsdp", "tp"), {"0": "column", "2": "row"}),
}
CASES = [
    ("fp8_e4m3", None, "compressed-tensors"),
    ("fp8_e4m3_128x128", "fp8_e4m3_1x128", "fine-grained-fp8"),
    ("mxfp4_e2m1", "mxfp8_e4m3", "compressed-tensors"),
    ("nvfp4_16x16", None, "modelopt"),
]


def model_of(recipe):
    """Rows that FSDP2's shards cut inside of blocks, and blocks of many magnitudes."""
    with threaded.seeded(1), torch.no_grad():
        model = nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 80))
        for param in model.parameters():
            param.mul_(torch.exp2(torch.randint(-6, 7, param.shape).float()))
    return bfp.convert(model, recipe, weights="high_precision")


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def received(stream):
    found = {name: (tensor.dtype, tuple(tensor.shape), bits(tensor)) for bucket in stream for name, tensor in bucket}
    return found, stream.configs


def sent(model, layout, **options):
    return received(bfp.stream_weights(model, layout=layout, quantize=True, **options))


def by_numpy(model, layout):
    """The same, of a model that holds what the NumPy face makes of the values."""
    held = copy.deepcopy(model)
    for layer in (held[0], held[2]):
        q = blockfp.quantize(layer.weight.detach().values.numpy(), layer.weight.format)
        parts = [None if part is None else torch.from_numpy(np.array(part)) for part in (q.codes, q.scales, q.tensor_scale)]
        options = {"format": layer.weight.format, "columns": layer.weight.shape[-1], "dtype": torch.float32}
        layer.weight = nn.Parameter(bfp.QuantizedTensor.from_parts(*parts, **options))
    return received(bfp.stream_weights(held, layout=layout))


def sharded(whole, mesh):
    shape, names, styles = MESHES[mesh]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = copy.deepcopy(whole)
    if styles:
        bfp.parallelize(model, mesh["tp"], styles)
    axes = tuple(name for name in names if name != "tp")
    if axes:
        fully_shard(model[0], mesh=mesh[axes])
        fully_shard(model, mesh=mesh[axes])
    return model


def _rank(rank, mesh, whole, layout, expected, x, y):
    model = sharded(whole, mesh)
    found, configs = sent(model, layout, bucket_bytes=20_000)
    assert (found == expected[0]) if rank == 0 else (found == {})
    assert configs == expected[1]
    with torch.no_grad():
        torch.testing.assert_close(model(x), y, rtol=1e-4, atol=1e-4 * y.abs().max().item())
    # The root's weights, which are gathered now, are values as before, and training goes on with them.
    values = received(bfp.stream_weights(model, layout=layout, keep_on=None))[0]
    assert {values[name][2] for name in ("0.weight", "2.weight")} == {bits(whole[i].weight.detach().values) for i in (0, 2)}
    with torch.no_grad():
        model(x)
    assert sent(model, layout, keep_on=None)[0] == expected[0]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(("weight", "input", "layout"), CASES)
def test_every_mesh_sends_what_numpy_quantizes(weight, input, layout, mesh):
    whole = model_of(recipes.qat(weight, input))
    expected = by_numpy(whole, layout)
    assert sent(whole, layout) == expected
    x = torch.randn(6, 128)
    threaded.run(math.prod(MESHES[mesh][0]), _rank, mesh, whole, layout, expected, x, whole(x).detach())


def decoded(values, scales, shape, sizes):
    """Elements times their blocks' scales, in float64."""
    return (
        values.reshape(shape).double()
        * scales.double().repeat_interleave(sizes[0], 0).repeat_interleave(sizes[1], 1)[: shape[0], : shape[1]]
    )


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def served(found, name, shape):
    """A weight that a server decodes, by torch's own dtypes alone."""
    if f"{name}_scale_inv" in found:
        return decoded(found[name], found[f"{name}_scale_inv"], shape, (128, 128))
    if f"{name}_packed" in found:
        packed = found[f"{name}_packed"].long()
        elements = E2M1[torch.stack([packed & 15, packed >> 4], -1)]
        return decoded(elements, found[f"{name}_scale"].view(torch.float8_e8m0fnu).to(torch.float64), shape, (1, 32))
    return found[name].double() * found[f"{name}_scale"].double()


@pytest.mark.parametrize(("weight", "layout"), [(weight, layout) for weight, _, layout in CASES[:3]])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Muon])
def test_the_trainers_forward_is_a_plain_models_with_the_served_codes(weight, layout, optimizer):
    model = nn.Sequential(nn.Linear(128, 256, bias=False), nn.SiLU(), nn.Linear(256, 80, bias=False))
    bfp.convert(model, recipes.qat(weight), weights="high_precision")
    trained, x = optimizer(model.parameters(), lr=1e-2), torch.randn(16, 128)
    for _ in range(3):
        (model(x) - 1).square().mean().backward()
        trained.step()
        trained.zero_grad()
    found = {name: tensor for bucket in bfp.stream_weights(model, layout=layout, quantize=True) for name, tensor in bucket}
    first, second = (served(found, f"{i}.weight", tuple(model[i].weight.shape)) for i in (0, 2))
    y = F.silu(x.double() @ first.mT) @ second.mT
    torch.testing.assert_close(model(x).double(), y, rtol=1e-5, atol=1e-5 * y.abs().max().item())
    # The values themselves give other results: the check sees which weights were served.
    values = [model[i].weight.detach().values.double() for i in (0, 2)]
    assert (F.silu(x.double() @ values[0].mT) @ values[1].mT - y).abs().max() > 1e-3 * y.abs().max()


def test_experts():
    layer = bfp.GroupedLinear(3, 64, 96, recipe=recipes.w4a8(), weights="high_precision")
    found, _ = sent(nn.Sequential(layer), "mxfp4")
    q = blockfp.quantize(layer.weight.detach().values.numpy(), "mxfp4_e2m1")
    assert found["0.weight_blocks"][2] == q.codes.tobytes()
    assert found["0.weight_scales"][2] == q.scales.tobytes()


def test_half_of_a_model_in_codes_already():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    bfp.convert(model[0], "mxfp8")
    bfp.convert(model[1], "mxfp8", weights="high_precision")
    model[2].weight = model[1].weight
    shapes = bfp.stream_weights(model, layout="compressed-tensors", quantize=True).shapes
    assert [name for name in shapes if "weight" in name] == ["0.weight", "0.weight_scale", "1.weight", "1.weight_scale"]


def _refused(rank, case):
    model = bfp.convert(nn.Sequential(nn.Linear(64, 64)), "w4a8", weights="high_precision")
    options = {"layout": "compressed-tensors", "quantize": True}
    if case == "NaN on one rank":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        if rank == 1:
            model[0].weight.to_local().values[0, 0] = math.nan
    elif case == "others":
        options["quantize"] = rank == 0
    elif case == "no bool":
        options["quantize"] = "mxfp8"
    else:
        model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises((TypeError, ValueError), match=REFUSED[case]):
        bfp.stream_weights(model, **options)


REFUSED = {
    "NaN on one rank": r"0\.weight: has NaN scales, which compressed-tensors would read as numbers",
    "others": "quantize is True on rank 0 and False on rank 1",
    "no bool": "quantize must be True or False, got 'mxfp8'",
    "plain": r"quantize=True: no weight of model has a format: use convert\(model, recipe, weights='high_precision'\) first",
}


@pytest.mark.parametrize("case", REFUSED)
def test_all_ranks_refuse_what_one_can_not_send(case):
    threaded.run(2, _refused, case)
