"""`exact_order` under tensor parallelism in JAX: PyTorch's bits on 1, 2 and 4 ranks, by one tree of sums."""

from dataclasses import replace
from functools import cache, partial

import emulated_cuda_in_jax
import emulated_order
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blockfp.jax_backend.arrays import reducing
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from same_bits import assert_same_bits
from samples import sample

import blockfp.jax as bfp
from blockfp import recipes

torch = pytest.importorskip("torch")
threaded = pytest.importorskip("threaded")
bfp_torch = pytest.importorskip("blockfp.torch")
init_device_mesh = pytest.importorskip("torch.distributed.device_mesh").init_device_mesh

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight host devices")

TOKENS, IN, CUT, OUT, SPLITS = 12, 64, 512, 48, 4
SPECS = P(("tp", "fsdp")), P("fsdp", "tp")


def exact(name):
    return recipes.parse(name).replace(exact_order=True)


def arrays():
    """x, both weights, the second layer's bias and y's gradient, in bfloat16."""
    shapes = (TOKENS, IN), (CUT, IN), (OUT, CUT), (OUT,), (TOKENS, OUT)
    return [sample("gaussian", shape, "bfloat16", seed=i) for i, shape in enumerate(shapes)]


def _in_torch(rank, recipe):
    x, *weights, bias, g = (torch.from_numpy(each.astype(np.float32)).bfloat16() for each in arrays())
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))["tp"]
    layers = []
    for w, style, own in zip(weights, ("column", "row"), (None, bias), strict=True):
        layer = torch.nn.Linear(*w.mT.shape, bias=own is not None, dtype=torch.bfloat16)
        with torch.no_grad():
            layer.weight.copy_(w)
            if own is not None:
                layer.bias.copy_(own)
        layers.append(bfp_torch.convert(layer, recipe))
        bfp_torch.parallelize(layers[-1], mesh, style, splits=SPLITS)
    y = layers[1](layers[0](x.requires_grad_()))
    y.backward(g)
    found = y.detach(), x.grad, *(layer.weight.grad.full_tensor() for layer in layers)
    return [each.float().numpy() for each in found]


def of_jax(recipe, ranks, given=None, check_vma=True, fsdp=1):
    """y and the gradients of x and both weights, of a column-parallel layer and a row-parallel one behind it."""
    x, *weights, bias, g = map(jnp.asarray, given or arrays())
    devices = jax.devices()[: ranks * fsdp]
    mesh = jax.make_mesh((ranks, fsdp), ("tp", "fsdp"), axis_types=(AxisType.Auto,) * 2, devices=devices)
    placed = [bfp.shard_params(bfp.quantize_params(w, recipe), mesh, spec) for w, spec in zip(weights, SPECS, strict=True)]

    def body(x, first, second, bias, g):
        def loss(x, first, second):
            layer = partial(bfp.linear, recipe=recipe, key=3, splits=SPLITS, data_axes=("fsdp",))
            y = layer(layer(x, first), second, bias)
            return (y.astype(jnp.float32) * g.astype(jnp.float32)).sum(), y

        (_, y), gradients = bfp.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, first, second)
        return y, *gradients

    tokens = P("fsdp")
    inside = tokens, *map(bfp.partition_specs, placed), P(), tokens
    run = jax.shard_map(body, mesh=mesh, in_specs=inside, out_specs=(tokens, tokens, *SPECS), check_vma=check_vma)
    return jax.jit(run)(x, *placed, bias, g)


@cache
def on_one_rank(name):
    return of_jax(exact(name), 1)


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8", "mxfp4", "fp8_row", "nvfp4", "fp8_current"])
def test_the_bits_of_pytorch(name):
    recipe = exact(name)
    # A layer of PyTorch draws a key of its own.
    casts = {each: replace(getattr(recipe, each), stochastic=False) for each in ("gradient", "gradient_columnwise")}
    recipe = recipe.replace(**casts)
    wanted = threaded.run(1, _in_torch, recipe)[0]
    assert_same_bits(of_jax(recipe, 1), [jnp.asarray(each).astype(jnp.bfloat16) for each in wanted])


@pytest.mark.parametrize(
    ("name", "ranks", "check_vma"), [*((name, 2, True) for name in ("fp8_block", "mxfp8", "nvfp4")), ("mxfp8", 4, False)]
)
def test_any_number_of_ranks(name, ranks, check_vma):
    assert_same_bits(of_jax(exact(name), ranks, check_vma=check_vma), on_one_rank(name))


def test_a_row_depends_on_itself_alone_also_under_fsdp():
    y, dx, *_ = on_one_rank("mxfp8")
    assert_same_bits(of_jax(exact("mxfp8"), 2, fsdp=2)[:2], [y, dx])
    x, w, v, bias, g = arrays()
    alone = of_jax(exact("mxfp8"), 2, (x[3:4], w, v, bias, g[3:4]))
    assert_same_bits(alone[:2], [y[3:4], dx[3:4]])


def test_the_cuda_path_has_the_cpus_bits():
    wanted = on_one_rank("mxfp8")
    emulated_order.calls.clear()
    with emulated_cuda_in_jax.launches(product=emulated_order.product):
        found = jax.block_until_ready(of_jax(exact("mxfp8"), 1))
    # Forward and dgrad of one layer each are four products of pieces.
    assert len(emulated_order.calls) == 2 * 4 + 4
    assert_same_bits(found, wanted)


@pytest.mark.optimized
def test_sums_keep_subnormal_numbers_and_are_rounded_once():
    """Which XLA flushes and leaves out."""
    rng = np.random.default_rng(0)
    terms = np.ldexp(rng.standard_normal((4, 3, 5)), rng.choice([-148, -140, -126, 3], (4, 3, 5))).astype(np.float32)
    bias = rng.standard_normal(5).astype(np.float32) * np.float32(1e-40)
    wanted = ((terms[0] + terms[1]) + (terms[2] + terms[3])) + bias
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def body(terms, bias, dtype):
        return reducing.sum_over_ranks(terms[0], "tp", bias[None], dtype).astype(jnp.float32)

    for dtype in (jnp.float32, jnp.bfloat16):
        run = jax.jit(jax.shard_map(partial(body, dtype=dtype), mesh=mesh, in_specs=(P("tp"), P()), out_specs=P()))
        assert_same_bits([run(terms, bias)], [wanted.astype(dtype).astype(np.float32)])


def test_calls_without_a_tree_are_refused():
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x, w, *_ = map(jnp.asarray, arrays())
    whole, cut = P(), P("tp")

    def call(w=w, spec=cut, x_spec=whole, layer=bfp.linear, recipe="mxfp8", **options):
        placed = bfp.shard_params(bfp.quantize_params(w, recipe), mesh, spec)
        layer = partial(layer, recipe=exact(recipe), **options)
        inside = x_spec, bfp.partition_specs(placed)
        jax.eval_shape(jax.shard_map(layer, mesh=mesh, in_specs=inside, out_specs=whole), x, placed)

    grouped = partial(bfp.grouped_linear, group_sizes=jnp.array([TOKENS]))
    for message, options in (
        (r"the ranks of 'tp' would add their terms in any order: linear\(.., splits=N\)", {}),
        ("in any order: divide the groups, by expert_axis", {"w": w[None], "spec": P(None, "tp"), "layer": grouped}),
        ("splits must be a power of two that the 2 ranks of 'tp' divide, such as 2, got 3", {"splits": 3}),
        (r"splits=32: 512 features are not 32 pieces of whole blocks of mxfp8; .* 1024", {"splits": 32}),
        ("splits = 4 needs a weight that a tensor-parallel axis cuts", {"splits": 4, "spec": whole}),
        ("splits = 4 is not for sequence = True", {"splits": 4, "sequence": True}),
        ("x varies over 'tp', so JAX would add", {"splits": 4, "x_spec": cut}),
    ):
        with pytest.raises(ValueError, match=message):
            call(**options)
    with pytest.raises(ValueError, match="splits = 4 needs a weight"):
        bfp.linear(x, w, recipe=exact("mxfp8"), splits=4)
    placed = bfp.shard_params(bfp.quantize_params(w, "mxfp8"), mesh, cut)
    layer = partial(bfp.linear, recipe="mxfp8", splits=4)
    with pytest.raises(ValueError, match="splits = 4 is for recipes with exact_order = True, which mxfp8 hasn't"):
        jax.shard_map(layer, mesh=mesh, in_specs=(whole, bfp.partition_specs(placed)), out_specs=cut)(x, placed)
