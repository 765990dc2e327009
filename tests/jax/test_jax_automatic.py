"""Programs that XLA splits by itself (Auto axes, no shard_map): a quantized weight travels as codes and scales."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from samples import sample

import blockfp.jax as bfp

pytestmark = [pytest.mark.skipif(jax.default_backend() != "cpu" or jax.device_count() < 8, reason="needs eight host devices")]
GATHER = re.compile(r"= \(?(\w+)\[([\d,]*)\][^=\n]* all-gather\(")
# x [8, 5, 256] and w [128, 256], so that no part of x has as many elements as one of w; whether the weight has to travel.
CUTS = {
    "fsdp": (P("d"), P("d"), True),
    "fsdp along in": (P("d"), P(None, "d"), True),
    "fsdp and columns": (P("d"), P("e", "d"), True),
    "data and columns": (P("d"), P("e"), False),
    "data and rows": (P("d", None, "e"), P(None, "e"), False),
    "data": (P("d"), P(), False),
}
X, W = (jnp.asarray(sample("gaussian", shape)) for shape in ((8, 5, 256), (128, 256)))


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("d", "e"), axis_types=(AxisType.Auto,) * 2)


def placed(mesh, q, spec_x, spec_w):
    return jax.device_put(q, bfp.named_shardings(q, mesh, spec_w)), jax.device_put(X, NamedSharding(mesh, spec_x))


@pytest.mark.parametrize(
    ("cut", "recipe"), [*((cut, "mxfp8") for cut in CUTS), ("fsdp", "mxfp4"), ("fsdp", "fp8_current"), ("fsdp", "fp8_block")]
)
def test_collectives_and_values(cut, recipe, mesh):
    *specs, travels = CUTS[cut]

    def loss(w, x):
        y = bfp.linear(x, w, recipe=recipe)
        return (y**2).sum(), y

    step = jax.jit(bfp.value_and_grad(loss, (0, 1), has_aux=True))
    q = bfp.quantize_params(W, recipe)
    operands = placed(mesh, q, *specs)
    program = step.lower(*operands).compile()
    got, expected = (jax.tree.map(np.asarray, each) for each in (program(*operands), step(q, X)))
    chex.assert_trees_all_close(got, expected, rtol=2e-5, atol=2e-2)
    gathered = GATHER.findall(program.as_text())
    sizes = ((dtype, np.prod([int(n) for n in shape.split(",") if n])) for dtype, shape in gathered)
    of_weight = {dtype for dtype, size in sizes if size in (W.size, W.size // 2, W.size // 4)}
    assert of_weight <= ({"u8"} if travels else set())
    assert any(dtype == "u8" for dtype, _ in gathered) == travels


def test_nvfp4_forward(mesh):
    q = bfp.quantize_params(W, "nvfp4")
    step = jax.jit(lambda w, x: bfp.linear(x, w, recipe="nvfp4", key=3))
    operands = placed(mesh, q, P("d"), P("d"))
    program = step.lower(*operands).compile()
    gathered = GATHER.findall(program.as_text())
    # Some versions gather y, which is smaller than the weight.
    assert {dtype for dtype, shape in gathered if "256" in shape.split(",") or dtype == "u8"} == {"u8"}
    chex.assert_trees_all_close(np.asarray(program(*operands)), np.asarray(step(q, X)), rtol=2e-5, atol=1e-3)


def test_vmap_scan_checkpoint_eager_and_export(mesh):
    q = bfp.quantize_params(W, "mxfp8")
    w, x = placed(mesh, q, P("d"), P("d"))
    linear = lambda x, w: bfp.linear(x, w, recipe="mxfp8")  # noqa: E731
    expected = np.asarray(linear(X, q))

    def scanned(x, w):
        return jax.lax.scan(jax.checkpoint(lambda carry, x: (carry, linear(x, w))), 0, x)[1]

    for run in (jax.jit(jax.vmap(linear, in_axes=(0, None))), jax.jit(scanned), linear):
        np.testing.assert_allclose(run(x, w), expected, rtol=2e-5, atol=1e-4)

    def of_parts(x, codes, scales):
        return linear(x, q.replace(codes=codes, scales=scales))

    exported = jax.export.export(jax.jit(of_parts))(x, w.codes, w.scales)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_allclose(jax.jit(again.call)(x, w.codes, w.scales), expected, rtol=2e-5, atol=1e-4)


def test_a_weight_from_outside_where_no_argument_lies_on_the_mesh(mesh):
    """JAX knows of no mesh in the callback then, and its shardings have no spec."""
    q = bfp.quantize_params(W, "mxfp8")
    w = jax.device_put(q, bfp.named_shardings(q, mesh, P("d")))
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: bfp.linear(x, w, recipe="mxfp8"))(X)
    np.testing.assert_allclose(y, bfp.linear(X, q, recipe="mxfp8"), rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize("cut", [P(None, "d"), P(None, None, "d")], ids=["out", "in"])
def test_scales_that_lie_on_parts_of_an_axis(cut, mesh):
    """Stacked weights whose two scales along an axis lie over four devices: XLA cuts them by a part of that axis."""
    stack = {"w": jnp.asarray(sample("gaussian", (2, 64, 64)))}
    q = bfp.quantize_params(stack, "mxfp8")

    def loss(params, x):
        layer = lambda x, w: (jnp.tanh(bfp.linear(x, w, recipe="mxfp8")), None)  # noqa: E731
        return (jax.lax.scan(layer, x, params["w"])[0] ** 2).sum()

    gradients = jax.jit(bfp.value_and_grad(loss))
    placed = jax.device_put(q, bfp.named_shardings(q, mesh, cut))
    x = X[0, :, :64]
    chex.assert_trees_all_close(
        *(jax.tree.map(np.asarray, gradients(params, x)) for params in (placed, q)), rtol=1e-4, atol=1e-4
    )
