"""FSDP2 gathers codes and scales: what every rank multiplies by is the quantization of the whole weight, bit for bit."""

import gloo
import pytest
import threaded
import torch
from arrays import tensors_of
from blockfp.torch_backend.quantized_tensor.sharding import local_of, region_of
from blockfp.torch_backend.weights.requantize import requantize_
from held_formats import FORMATS, OTHER_CHOICES
from same_tensors import assert_equal
from sharded import GEOMETRIES
from small_model import Side, assert_gathered, device_mesh, inputs_for, quantized, shapes_for, shard, train, update, weights_for
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import blockfp.torch as bfp
from blockfp.formats import Format

MESHES = {"fsdp4": (4,), "hsdp2x2": (2, 2), "hsdp2x1": (2, 1)}
FAMILIES = ("fp8_e4m3", "fp8_e4m3_128x128", "mxfp8_e4m3", "mxfp6_e3m2_32x32", "nvfp4_16x16")


@pytest.mark.parametrize(
    ("format", "reshard"),
    [*((format, True) for format in (*FORMATS, OTHER_CHOICES[-1])), *((format, False) for format in GEOMETRIES)],
    ids=lambda value: {True: "reshard", False: "keep"}.get(value, str(value)),
)
def test_whole_weights_at_the_start_and_after_updates(format, reshard):
    # Replicas are a mean of gradients more, which never sees what a format rounds to.
    for shape in MESHES.values() if format in GEOMETRIES else [MESHES["fsdp4"]]:
        ranks = torch.Size(shape).numel()
        shapes = shapes_for(format, shape[-1])
        first, last = (quantized(weights_for(shapes, step), format) for step in (0, 3))
        gradients = threaded.run(ranks, train, shape, reshard, shapes, first, last)
        reference = [torch.zeros(size) for size in shapes]
        for rank in range(ranks):
            whole = Side([q.clone() for q in first])
            whole(inputs_for(rank, max(columns for _, columns in shapes))).backward()
            for total, layer in zip(reference, whole.layers, strict=True):
                total += layer.weight.grad / ranks
        for rank in range(ranks):
            for got, want in zip(gradients[rank], reference, strict=True):
                # The same terms in another order: three rows and four ranks of sums.
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


def meta_train(rank, format, shapes, expected, offload):
    mesh = device_mesh((4,))
    with torch.device("meta"):
        model = Side(quantized([torch.empty(shape) for shape in shapes], format))
    assert all(layer.weight.codes.is_meta for layer in model.layers)
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    shard(model, mesh, **options)
    model.to_empty(device="cpu")
    update(model, 0, shapes)
    model(inputs_for(rank, 300)).backward()
    for layer, weight in zip(model.layers, expected, strict=True):
        assert_gathered(layer, weight)
        assert layer.weight.grad is not None


@pytest.mark.parametrize("offload", [False, True], ids=["resident", "offloaded"])
@pytest.mark.parametrize("name", FAMILIES)
def test_from_the_meta_device(name, offload):
    (format,) = (f for f in FORMATS if f.name == name)
    shapes = shapes_for(format, 4)
    threaded.run(4, meta_train, format, shapes, quantized(weights_for(shapes), format), offload)


def experts(rank, format, weight, expected):
    model = Side([expected.clone()])

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = model.layers[0].weight

        def forward(self):
            self.seen = self.weight.detach().clone()
            return self.seen.codes.sum()

    module = Experts()
    fully_shard(module, mesh=device_mesh((4,)))
    for step in range(2):
        module()
        assert_equal(module.seen, expected)
        module.reshard()
        if step == 0:
            new = weight * 3 + 1
            requantize_([module.weight], [new[region_of(module.weight).slices]])
            expected = bfp.quantize(new, format)
    assert module.seen.shape == (6, 40, 48)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_one_weight_for_each_expert(format):
    weight = torch.stack(weights_for([(40, 48)] * 6))
    threaded.run(4, experts, format, weight, bfp.quantize(weight, format))


def mixed_precision(rank, format, weight, expected):
    model = Side([expected.clone()])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, device_mesh((4,)), mp_policy=policy)
    model(inputs_for(rank, 64)).backward()
    layer = model.layers[0]
    assert layer.seen_as[2] is torch.bfloat16
    assert_equal(layer.seen, tensors_of(expected))
    assert layer.weight.dtype is torch.float32
    assert layer.weight.grad.dtype is torch.float32
    return layer.weight.grad.full_tensor()


@pytest.mark.parametrize("name", FAMILIES)
def test_mixed_precision_names_the_gathered_dtype(name):
    weight = weights_for([(50, 64)])[0]
    gradients = threaded.run(4, mixed_precision, name, weight, bfp.quantize(weight, name))
    total = torch.zeros(50, 64)
    for rank in range(4):
        q = bfp.quantize(weight.bfloat16(), name).clone()
        q = bfp.QuantizedTensor.from_parts(
            *tensors_of(bfp.quantize(weight, name)), format=name, columns=64, dtype=torch.bfloat16
        )
        model = Side([q])
        model(inputs_for(rank, 64, dtype=torch.bfloat16)).backward()
        total += model.layers[0].weight.grad.float() / 4
    torch.testing.assert_close(gradients[0], total, rtol=1e-5, atol=1e-5 * total.abs().max().item())


def accumulated(rank, weights, expected, resharded):
    model = Side([q.clone() for q in expected])
    shard(model, device_mesh((4,)))
    for micro in range(3):
        last = micro == 2
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(resharded)
        model(inputs_for(10 * rank + micro, 64)).backward()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for layer, weight in zip(model.layers, expected, strict=True):
        assert_gathered(layer, weight)
    return norm.full_tensor(), [layer.weight.grad.full_tensor() for layer in model.layers]


@pytest.mark.parametrize("resharded", [True, False], ids=["reshard", "keep"])
def test_accumulation_and_clipping(resharded):
    weights = weights_for([(50, 64), (33, 40)])
    expected = quantized(weights, "mxfp8_e4m3_32x32")
    norms_and_gradients = threaded.run(4, accumulated, weights, expected, resharded)
    whole = Side([q.clone() for q in expected])
    for rank in range(4):
        for micro in range(3):
            (whole(inputs_for(10 * rank + micro, 64)) / 4).backward()
    norm = nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    for got_norm, gradients in norms_and_gradients:
        torch.testing.assert_close(got_norm, norm, rtol=1e-5, atol=0)
        for got, layer in zip(gradients, whole.layers, strict=True):
            torch.testing.assert_close(got, layer.weight.grad, rtol=1e-5, atol=1e-5 * got.abs().max().item())


def memory(rank, expected):
    model = Side([expected.clone()])
    shard(model, device_mesh((4,)))
    local = local_of(model.layers[0].weight)
    parts, _ = local.fsdp_pre_all_gather(device_mesh((4,)))
    sizes = [part.numel() * part.itemsize for part in parts]
    return sizes, parts[0].data_ptr() == local.codes.data_ptr(), parts[1].data_ptr() == local.scales.data_ptr()


@pytest.mark.parametrize(
    ("name", "per_element"), [("mxfp8_e4m3", 1 + 1 / 32), ("mxfp8_e4m3_32x32", 1 + 1 / 1024), ("nvfp4_16x16", 0.5 + 1 / 256)]
)
def test_what_travels(name, per_element):
    expected = bfp.quantize(weights_for([(510, 512)])[0], name)
    for sizes, codes_in_place, scales_in_place in threaded.run(4, memory, expected):
        assert sum(sizes) - 4 * (expected.tensor_scale is not None) == 128 * 512 * per_element
        assert codes_in_place
        assert scales_in_place


def freed(rank, expected):
    model = Side([expected.clone()])
    shard(model, device_mesh((4,)))
    model(inputs_for(rank, 64)).backward()
    layer = model.layers[0]
    gathered = []
    layer.register_forward_pre_hook(lambda module, *_: gathered.append(module.weight))
    model(inputs_for(rank, 64)).backward()
    sizes = [part.untyped_storage().size() for part in tensors_of(gathered[0])]
    return sizes, local_of(layer.weight).codes


def test_the_gathered_weight_is_freed():
    expected = bfp.quantize(weights_for([(50, 64)])[0], "mxfp8_e4m3_32x32")
    for sizes, codes in threaded.run(4, freed, expected):
        assert sizes == [0, 0]
        assert codes.untyped_storage().size() > 0


def two_dimensional(rank, format, whole, expected, axis):
    """FSDP over tensor parallelism: shards of shards, (StridedShard, Shard) along the rows or (Shard, Shard) across."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    tp = mesh["tp"]
    size = -(-whole.shape[axis] // 2)
    part = expected.narrow(axis, tp.get_local_rank() * size, min(size, whole.shape[axis] - tp.get_local_rank() * size))
    part = DTensor.from_local(part.clone(), tp, [Shard(axis)], run_check=False, shape=whole.shape, stride=whole.stride())
    module = nn.Module()
    module.weight = nn.Parameter(part)
    fully_shard(module, mesh=mesh["fsdp"])
    for step in range(2):
        if step:
            new = whole * 3 + 1
            requantize_([module.weight], [new[region_of(module.weight).slices]])
            expected = bfp.quantize(new, format)
        module.unshard()
        got = local_of(module.weight)
        first, columns = got.origin
        want = expected.narrow(0, first, got.shape[0]).narrow(1, columns, got.shape[1])
        assert_equal(got, want)
        module.reshard()
    return tuple(map(str, module.weight.placements))


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_over_tensor_parallelism(format):
    rows, columns = (1, 128) if format.per_row else format.block or (16, 32)
    for shape, axis in (((4 * rows, columns), 0), ((3 * rows + 6, columns), 0), ((2 * rows + 6, 2 * columns), 1)):
        whole = weights_for([shape])[0]
        placements = threaded.run(4, two_dimensional, format, whole, bfp.quantize(whole, format), axis)[0]
        assert placements == (("_S(0, 2)", "S(0)") if axis == 0 else ("S(0)", "S(1)"))


def tied_and_frozen(rank, weight, expected):
    """Two layers of one weight, and one that isn't trained, in one group."""
    model = Side([expected.clone(), expected.clone(), expected.clone()])
    model.layers[1].weight = model.layers[0].weight
    model.layers[2].weight.requires_grad_(False)
    fully_shard(model, mesh=device_mesh((4,)))
    for _ in range(2):
        model(inputs_for(rank, 64)).backward()
    for layer in model.layers:
        assert_gathered(layer, expected)
    assert model.layers[1].weight is model.layers[0].weight
    assert model.layers[2].weight.grad is None
    return model.layers[0].weight.grad.full_tensor()


def test_tied_and_frozen_weights():
    weight = weights_for([(50, 64)])[0]
    expected = bfp.quantize(weight, "fp8_e4m3_128x128")
    total = torch.zeros(50, 64)
    for rank in range(4):
        whole = Side([expected.clone()])
        # Two layers, two steps, the mean of four ranks.
        whole(inputs_for(rank, 64)).backward()
        total += whole.layers[0].weight.grad
    for gradient in threaded.run(4, tied_and_frozen, weight, expected):
        torch.testing.assert_close(gradient, total, rtol=1e-5, atol=1e-5 * total.abs().max().item())


def requantized_scales(rank, weight, format):
    model = Side([bfp.quantize(torch.zeros_like(weight), format)])
    shard(model, device_mesh((4,)))
    param = model.layers[0].weight
    requantize_([param], [weight[region_of(param).slices]])
    local = local_of(param)
    return local.scales if local.tensor_scale is None else local.tensor_scale


def test_amaxes_are_those_of_the_whole():
    weight = weights_for([(50, 64)])[0]
    for format in ("nvfp4_16x16", "fp8_e4m3"):
        whole = bfp.quantize(weight, format)
        for scale in threaded.run(4, requantized_scales, weight, format):
            assert torch.equal(scale, whole.scales if whole.tensor_scale is None else whole.tensor_scale)


def initial_values(rank, weights, expected):
    model = Side([q.clone() for q in expected])
    for layer, weight in zip(model.layers, weights, strict=True):
        layer.weight.initial = weight
    shard(model, device_mesh((4,)))
    model(inputs_for(rank, 64)).backward()
    for layer, weight in zip(model.layers, weights, strict=True):
        local = local_of(layer.weight)
        mine = weight[region_of(layer.weight).slices]
        assert torch.equal(local.initial, mine)
        assert local.initial.untyped_storage().nbytes() == 4 * mine.numel()
    update(model, 1, [tuple(weight.shape) for weight in weights])
    assert all(local_of(layer.weight).initial is None for layer in model.layers)


def test_original_values_are_sharded_with_the_weight():
    weights = weights_for([(50, 64), (3, 40), (1, 24)])
    threaded.run(4, initial_values, weights, quantized(weights, "nvfp4_16x16"))


def replicated(rank, expected):
    param = DTensor.from_local(expected.clone(), device_mesh((4,)), [Replicate()], run_check=False)
    requantize_([param], [weights_for([(50, 64)], 1)[0]])
    return local_of(param)


def test_replicated_weights_are_quantized_by_each_rank():
    want = bfp.quantize(weights_for([(50, 64)], 1)[0], "nvfp4_16x16")
    for got in threaded.run(4, replicated, bfp.quantize(weights_for([(50, 64)])[0], "nvfp4_16x16")):
        assert_equal(got, want)


def check(rank, mesh, reshard):
    for name in FAMILIES:
        shapes = shapes_for(Format.parse(name), mesh[-1])
        train(rank, mesh, reshard, shapes, *(quantized(weights_for(shapes, step), name) for step in (0, 3)))


def two_ranks(rank):
    check(rank, (2,), True)
    check(rank, (2,), False)
    check(rank, (2, 1), True)
    data_parallel(rank)


def data_parallel(rank):
    """DistributedDataParallel averages the gradients of quantized weights."""
    weights = quantized(weights_for([(50, 64), (33, 40)]), "mxfp8_e4m3_32x32")
    whole = [Side([q.clone() for q in weights]) for _ in range(2)]
    for other, model in enumerate(whole):
        model(inputs_for(other, 64)).backward()
    model = DistributedDataParallel(Side(weights))
    model(inputs_for(rank, 64)).backward()
    for got, first, second in zip(model.parameters(), *(one.parameters() for one in whole), strict=True):
        torch.testing.assert_close(got.grad, (first.grad + second.grad) / 2)


def four_ranks(rank):
    check(rank, (4,), True)
    check(rank, (2, 2), False)
    weight = weights_for([(50, 64)], 1)[0]
    model = Side(quantized([weights_for([(50, 64)])[0]], "nvfp4_16x16"))
    fully_shard(model, mesh=device_mesh((2, 2)))
    param = model.layers[0].weight
    bfp.load_high_precision_(param, weight)
    whole, region = bfp.quantize(weight, "nvfp4_16x16"), region_of(param)
    assert local_of(param).tensor_scale == whole.tensor_scale
    assert (local_of(param).codes == whole.codes[region.slices[0]]).all()
    model = Side(quantized([weights_for([(50, 64)])[0]], "mxfp8_e4m3"))
    fully_shard(model, mesh=device_mesh((4,)), reshard_after_forward=2)
    with pytest.raises(ValueError, match="reshard_after_forward=2"):
        model(inputs_for(rank, 64))


@pytest.mark.parametrize(("ranks", "function"), [(2, "two_ranks"), (4, "four_ranks")])
def test_real_processes(ranks, function):
    gloo.run(ranks, __file__, function)
