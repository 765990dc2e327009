"""Training with gradients set by hand, on any mesh, so that where a checkpoint was saved and loaded must not change a bit."""

import torch
from blockfp.torch_backend.optimizer import optimizer_state
from blockfp.torch_backend.optimizer.local_parameter import LocalParameter
from blockfp.torch_backend.quantized_tensor import sharding
from blockfp.torch_backend.quantized_tensor.sharding import placed
from blockfp.torch_backend.weights.module_state import InParts, keep_in_parts
from same_tensors import assert_equal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import blockfp.torch as bfp
from blockfp.sharding import parts

# name: (shape of the mesh, its axes' names)
MESHES = {
    "one": None,
    "fsdp2": ((2,), ("fsdp",)),
    "fsdp4": ((4,), ("fsdp",)),
    "hsdp": ((2, 2), ("replicate", "fsdp")),
    "strided": ((2, 2), ("fsdp", "tp")),
    "row_parallel": ((2, 2), ("fsdp", "tp")),
    "hsdp_tp": ((1, 2, 2), ("replicate", "fsdp", "tp")),
}


class Layer(InParts):
    """A quantized weight and what else a layer keeps."""

    keep_init = True

    def __init__(self, weight, seed):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(spread((weight.shape[0],), seed))
        self.register_buffer("input_amax_history", spread((16,), seed + 1).abs())
        self.register_buffer("input_scale", spread((1,), seed + 2))
        self.register_buffer("rng_key", torch.tensor([seed, 2**32 - 1 - seed]))
        self.register_buffer("step", torch.tensor(seed))
        keep_in_parts(self)


def spread(shape, seed):
    """Values of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-4, 5, shape, generator=generator).float())


def model_of(format, shapes, seed=0, dtype=torch.float32):
    """A model of one layer for each shape; another seed gives other contents throughout."""
    weights = [spread(shape, seed + i).to(dtype) for i, shape in enumerate(shapes)]
    layers = (
        Layer(weight if format is None else bfp.quantize(weight, format), seed + 10 * i) for i, weight in enumerate(weights)
    )
    return nn.Sequential(*layers)


def shard(model, name):
    """Shards a model as its mesh's name says; returns it."""
    if MESHES[name] is None:
        return model
    shape, names = MESHES[name]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if "tp" in names:
        for layer in model:
            layer.weight = nn.Parameter(tensor_parallel(layer.weight.detach(), mesh["tp"], 1 if name == "row_parallel" else 0))
            if name != "row_parallel":
                layer.bias = nn.Parameter(tensor_parallel(layer.bias.detach(), mesh["tp"], 0))
    axes = tuple(axis for axis in names if axis != "tp")
    for layer in model:
        fully_shard(layer, mesh=mesh[axes])
    return fully_shard(model, mesh=mesh[axes])


def tensor_parallel(whole, mesh, dim):
    """A whole tensor as a DTensor whose ranks hold slices of it."""
    chunk = -(-whole.shape[dim] // mesh.size())
    rank = mesh.get_local_rank()
    index = [slice(None)] * whole.ndim
    index[dim] = slice(rank * chunk, (rank + 1) * chunk)
    stride = torch.empty(whole.shape, device="meta").stride()
    return DTensor.from_local(
        whole[tuple(index)].clone(), mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=stride
    )


def own(param, whole):
    """This rank's part of what is a whole tensor everywhere else."""
    part = LocalParameter(param)
    region = part.lies.region(sharding.rank_in(param))
    return whole.view(part.lies.shape)[region.slices].view(part.local.shape)


def train(model, optimizer, first, last):
    """Steps first .. last with gradients that depend on nothing but the step and the parameter, and buffers that move."""
    for step in range(first, last):
        for i, param in enumerate(model.parameters()):
            local = own(param, spread(tuple(param.shape), 1000 * step + i)).to(param.dtype, copy=True)
            param.grad = placed(param, local)
        optimizer.step()
        for layer in model:
            layer.input_amax_history.copy_(layer.input_amax_history.roll(1) + step)
            layer.step.add_(1)
    optimizer.zero_grad()


def assert_is_part_of(model, optimizer, whole, whole_optimizer):
    """Everything a rank holds is its part of what the unsharded model holds, bit for bit."""
    for (name, param), reference in zip(model.named_parameters(), whole.parameters(), strict=True):
        local = sharding.local_of(param)
        if isinstance(local, bfp.QuantizedTensor):
            lies = sharding.sharding_of(param)
            region = lies.region(sharding.rank_in(param))
            dtype = local.dtype
            assert torch.equal(local.dequantize(dtype), reference.detach().dequantize(dtype)[region.slices]), name
            for part in parts.parts(local.format, lies):
                if part.name != "codes":
                    assert torch.equal(getattr(local, part.name), getattr(reference, part.name)[part.span(region)]), name
        else:
            assert torch.equal(local, own(param, reference.detach())), name
        if optimizer is not None:
            shown = optimizer_state.portable(param, optimizer.state[param])
            expected = optimizer_state.portable(reference, whole_optimizer.state[reference])
            assert shown.keys() == expected.keys()
            for entry, value in shown.items():
                part = expected[entry] if entry == "step" else own(param, expected[entry])
                assert torch.equal(sharding.local_of(value), part), (name, entry)
    assert_equal(model.buffers(), whole.buffers())
