"""Operands of a tensor-parallel group's ranks, held against those of one process.

Outputs and gradients are sums of the same terms in another order, in fp32 here. A sum of n terms in fp32 is off by at most
n * 2^-24 of the sum of their magnitudes, in whatever order; so two of them differ by at most `2 * n * 2^-24` of it.
"""

import copy
import threading
from functools import cache

import threaded
import torch
from blockfp.torch_backend.linear import dense_layer
from blockfp.torch_backend.linear.linear import apply
from blockfp.torch_backend.linear.tensor_parallel import parallel_layer
from blockfp.torch_backend.modules.cutting import part_of
from blockfp.torch_backend.ops.layer import linear_ops
from blockfp.torch_backend.ops.product.products import multiply, product_of
from samples import sample
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.recipes import RECIPES, Cast
from blockfp.sharding.placement import Mesh, Replicate, Shard, Sharding

RANKS = 2
STYLES = [("column", False), ("column", True), ("row", False), ("row", True)]
STYLE_NAMES = ["column", "column+sequence", "row", "row+sequence"]
KEY = (3, 5)
# tokens, in, out: parts are whole blocks of every format, or end inside one.
SHAPES = {"aligned": (256, 512, 768), "unaligned": (80, 88, 120)}
SQUARE = {
    "square_mx": recipes.mxfp8().replace(input=Cast("mxfp8_e4m3_32x32"), gradient=Cast("mxfp8_e5m2_32x32")),
    "square_nvfp4": recipes.mxfp8().replace(input=Cast("nvfp4_16x16"), gradient=Cast("mxfp8_e4m3")),
    "mixed": recipes.fp8_block().replace(input=Cast("fp8_e4m3"), input_columnwise=Cast("mxfp8_e4m3")),
    "high_gradient": recipes.mxfp8().replace(gradient=Cast(None)),
    "rotated": recipes.fp8_current().replace(
        input_columnwise=Cast("fp8_e4m3", rotate=True), gradient_columnwise=Cast("fp8_e5m2", rotate=True)
    ),
}
ALL = {**{name: make() for name, make in RECIPES.items()}, **SQUARE}


def record_products(monkeypatch):
    """Records what each thread multiplies from now on: {thread: [(a, b)]}, each as (parts, format, origin, columns)."""
    seen = {}

    def alone(a, b, n, k, *arguments):
        product = product_of(a, b, n, k, *arguments)
        kinds = (a.format, a.origin, k), (b.format, b.origin, n if b.transposed else k)

        def run(a, b, bias):
            # The list of what the forward kept is emptied when it has been multiplied.
            operands = tuple((list(parts), *kind) for parts, kind in zip((a, b), kinds, strict=True))
            seen.setdefault(threading.get_ident(), []).append(operands)
            return product(a, b, bias)

        return run

    def recorded(a, b, size, bias, dtype, **options):
        out = multiply(a, b, size, bias, dtype, **options)
        n, k = size
        left = (a.parts, a.format, a.origin, k)
        right = (b.parts, b.format, b.origin, n if b.transposed else k)
        if b.is_one_tensor:
            # FSDP frees the memory of a gathered weight.
            weight = b.parts[0]
            right = ([weight.detach().clone()], b.format, weight.origin, weight.shape[1])
        seen.setdefault(threading.get_ident(), []).append((left, right))
        return out

    for module in (parallel_layer, dense_layer):
        monkeypatch.setattr(module, "multiply", recorded)
    monkeypatch.setattr(linear_ops, "product_of", alone)
    for plans in ("_forwards", "_backwards"):
        monkeypatch.setattr(linear_ops, plans, {})
    return seen


MESHES = {"tp": (2,), "fsdp x tp": (2, 2), "hsdp x tp": (2, 2, 2)}
NAMES = ("replicate", "shard", "tp")


@cache
def _sample(size, seed):
    return sample("bf16_valued", size, seed=seed)


def tensors(shape, batch=0, dtype=torch.float32):
    """x, weight, bias and the output's gradient, whole; x and gradient are those of a data-parallel rank."""
    tokens, size_in, size_out = shape
    sizes = ((tokens, size_in), (size_out, size_in), (1, size_out), (tokens, size_out))
    seeds = (100 * batch, 1, 2, 100 * batch + 3)
    arrays = map(_sample, sizes, seeds)
    x, w, b, g = (torch.from_numpy(array).to(dtype, copy=True) for array in arrays)
    return x, w / 16, b[0], g / 64


def state_of(batch=0):
    """Of delayed scaling, and the key of stochastic rounding."""
    scale = torch.tensor(3.0)
    return bfp.LinearState(torch.zeros(4), scale, torch.zeros(4), scale.clone(), torch.tensor(KEY), torch.tensor(7), batch)


def trained(x, weight, bias, g, recipe, state, parallel=None, counts=None):
    """The output, and the gradients of x, weight and bias."""
    weight = weight.requires_grad_()
    x, bias = x.requires_grad_(), bias.requires_grad_()
    y = apply(x, weight, bias, recipe, state=state, counts=counts, parallel=parallel)
    y.backward(g)
    return y.detach(), x.grad, weight.grad, bias.grad


def part(x, axis, rank, ranks=RANKS):
    return x if axis is None else x.chunk(ranks, axis)[rank].clone()


def one_process(shape, recipe, seen, batch=0):
    """Results and operands of one process, products in the order forward, dgrad, wgrad."""
    seen.clear()
    x, w, b, g = tensors(shape, batch, torch.float32)
    weight = w if recipe.weight.format is None else bfp.quantize(w, recipe.weight.format)
    state = state_of(batch)
    results = trained(x, weight, b, g, recipe, state)
    ((forward, wgrad, dgrad),) = seen.values()
    seen.clear()
    return results, [forward, dgrad, wgrad], state


def axes(style):
    """Along which axis each operand of each product is cut; None where it is whole."""
    if style == "column":
        return [(None, 0), (1, 0), (0, None)]
    return [(1, 1), (None, 1), (None, 0)]


def mesh_of(kind):
    shape = MESHES[kind]
    return init_device_mesh("cpu", shape, mesh_dim_names=NAMES[-len(shape) :])


def shard(module, mesh):
    """Over the axes that are not tensor parallelism's."""
    if mesh.ndim > 1:
        fully_shard(module, mesh=mesh[mesh.mesh_dim_names[:-1]] if mesh.ndim > 2 else mesh["shard"])
    return module


def batch_of(mesh):
    """This rank's number on the data-parallel axes."""
    return mesh.get_rank() // mesh["tp"].size()


def linear(shape, recipe, weights="quantized"):
    """A layer with the weight and the state of `parallel_operands`."""
    _, w, b, _ = tensors(shape)
    layer = bfp.Linear(w.shape[1], w.shape[0], recipe=recipe, weights=weights)
    layer.load_state_dict({"weight": w, "bias": b}, strict=False)
    for operand in ("input", "gradient"):
        if layer.linear_recipe.delayed is not None:
            getattr(layer, f"{operand}_scale").fill_(3)
    if layer.rng_key is not None:
        layer.rng_key.copy_(torch.tensor(KEY))
        layer.step.fill_(7)
    return layer


def trained_layer(rank, layer, kind, style, sequence, shape):
    """Results of one rank, the thread that it ran on, and its number among the ranks and the batches."""
    mesh = mesh_of(kind)
    layer = copy.deepcopy(layer)
    bfp.parallelize(layer, mesh["tp"], style, sequence_parallel=sequence)
    shard(layer, mesh)
    tp, batch = mesh["tp"].get_local_rank(), batch_of(mesh)
    x, _, _, g = tensors(shape, batch)
    tokens = 0 if sequence else None
    x = part(x, tokens if style == "column" else 1, tp).requires_grad_()
    y = layer(x)
    y.backward(part(g, 1 if style == "column" else tokens, tp))
    return y.detach(), x.grad, layer.weight.grad, layer.bias.grad, threading.get_ident(), tp, batch


def assert_same_operand(got, whole, axis, rank):
    """Codes, scales and tensor scale, or the values, are this rank's part of the whole operand's."""
    parts, format, origin, columns = got
    if format is None:
        assert torch.equal(parts[0], part(whole[0][0], axis, rank))
        return
    expected = as_quantized(*whole)
    lies = Sharding(tuple(expected.shape), Mesh((RANKS,), ("tp",)), (Replicate() if axis is None else Shard(axis),))
    expected = part_of(expected, lies, rank)
    q = as_quantized(parts, format, origin, columns)
    if q.shape != expected.shape:
        # Stored the other way round, which a product takes of square blocks.
        q = q.mT
    assert (q.format, q.shape, q.origin) == (expected.format, expected.shape, expected.origin)
    for name in ("codes", "scales", "tensor_scale"):
        if getattr(q, name) is not None:
            assert torch.equal(getattr(q, name), getattr(expected, name)), name


def as_quantized(parts, format, origin, columns):
    if isinstance(parts[0], bfp.QuantizedTensor):
        return parts[0]
    return bfp.QuantizedTensor.from_parts(
        parts[0], parts[1], parts[2] if len(parts) > 2 else None, format=format, columns=columns, dtype=torch.float32,
        origin=tuple(origin),
    )  # fmt: skip


def values_of(operand):
    parts, format, origin, columns = operand
    return parts[0] if format is None else as_quantized(parts, format, origin, columns).dequantize(torch.float32)


def bounds(products):
    """For each product the sum of the magnitudes of its terms, times `2 * n * 2^-24`."""
    for a, b in products:
        a, b = values_of(a).abs(), values_of(b).abs()
        b = b if b.shape[1] == a.shape[1] else b.mT
        yield 2 * a.shape[1] * 2.0**-24 * (a @ b.mT)


def assert_near(got, expected, bound):
    assert got.shape == expected.shape
    assert bool(((got - expected).abs() <= bound).all()), float(((got - expected).abs() / bound).max())


def assert_shared(got, its_products, results, products, style, sequence, rank):
    """One rank's results and operands (in the order forward, dgrad, wgrad) are its parts of those of one process."""
    for mine, whole, cut in zip(its_products, products, axes(style), strict=True):
        for one, other, axis in zip(mine, whole, cut, strict=True):
            assert_same_operand(one, other, axis, rank)
    tokens = 0 if sequence else None
    y_axis, x_axis, w_axis, b_axis = (1, tokens, 0, 0) if style == "column" else (tokens, 1, 1, None)
    y, dx, dw, db = results
    forward, dgrad, wgrad = bounds(products)
    # The bias is added in one rounding, or in one more.
    assert_near(got[0], part(y, y_axis, rank), part(forward + 2**-22 * y.abs(), y_axis, rank))
    assert_near(got[1], part(dx, x_axis, rank), part(dgrad, x_axis, rank))
    if got[2] is None:
        return
    assert_near(got[2], part(dw, w_axis, rank), part(wgrad, w_axis, rank))
    assert_near(got[3], part(db, b_axis, rank), 2 * len(y) * 2.0**-24 * part(db.abs() + 1, b_axis, rank))


def check_layer(layer, kind, style, sequence, shape, seen):
    """Trains a cut layer for a step on a mesh against one process; returns `one_process` and each rank's `trained_layer`."""
    ranks = torch.Size(MESHES[kind]).numel()
    references = [one_process(shape, layer.linear_recipe, seen, batch) for batch in range(ranks // RANKS)]
    world = threaded.run(ranks, trained_layer, layer, kind, style, sequence, shape)
    for y, dx, _, _, thread, tp, batch in world:
        results, products, _ = references[batch]
        assert_shared((y, dx, None, None), seen[thread], results, products, style, sequence, tp)
    return references, world
