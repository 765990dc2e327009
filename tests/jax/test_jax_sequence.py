"""Sequence parallelism of x [.., tokens, features]: y and all gradients of one device, for every leading shape and recipe."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blockfp.jax_backend.arrays.sharded import sharding_of
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from samples import sample
from sequence_cases import CASES, IN, OUT

import blockfp.jax as bfp
from blockfp import recipes

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
KEY = jnp.array([3, 4], jnp.uint32)
SCALED = bfp.DelayedState(jnp.zeros(4), jnp.float32(37.5), jnp.zeros(4), jnp.float32(1000))


def layer(recipe, x, w, b, g, **options):
    """(y, dx, dw, db) of one layer."""
    state = SCALED if recipe.delayed else None

    def loss(x, w, b):
        y = bfp.linear(x, w, b, recipe=recipe, key=KEY, state=state, **options)
        y = y[0] if recipe.delayed else y
        return (y * g).sum(), y

    (_, y), gradients = bfp.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, w, b)
    return y, *gradients


def arrays(leading):
    x, w, b, g = (
        sample("gaussian", shape, seed=i) for i, shape in enumerate(((*leading, IN), (OUT, IN), (1, OUT), (*leading, OUT)))
    )
    # Sequences, and tokens of one, of other magnitudes: other neighbours in a block would show.
    scales = np.exp2(np.random.default_rng(5).integers(-6, 6, (*leading, 1))).astype(np.float32)
    return x * scales, w, b[0], g * scales


@cache
def on_one_device(recipe, leading):
    x, w, b, g = arrays(leading)
    return jax.jit(partial(layer, recipe))(x, bfp.quantize_params(w, recipe), b, g)


def on_mesh(recipe, style, ranks, leading):
    """The program of a layer that ranks share, and its arguments."""
    mesh = jax.make_mesh((ranks,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])
    x, w, b, g = arrays(leading)
    placed = bfp.shard_params(bfp.quantize_params(w, recipe), mesh, P("tp") if style == "column" else P(None, "tp"))
    sequences = (None,) * (len(leading) - 1)
    tokens, features, cut = P(*sequences, "tp"), P(*sequences, None, "tp"), P("tp") if style == "column" else P()
    lies_x, lies_y = (tokens, features) if style == "column" else (features, tokens)
    weight = P("tp") if style == "column" else P(None, "tp")
    run = jax.shard_map(
        partial(layer, recipe, sequence=True),
        mesh=mesh,
        in_specs=(lies_x, bfp.partition_specs(placed), cut, lies_y),
        out_specs=(lies_y, lies_x, weight, cut),
    )
    return jax.jit(run), (x, placed, b, g)


@pytest.mark.parametrize("style", ["column", "row"])
@pytest.mark.parametrize(("recipe", "leading", "ranks"), CASES, ids=str)
def test_every_leading_shape_is_that_of_one_device(recipe, leading, ranks, style):
    recipe = recipes.parse(recipe)
    run, arguments = on_mesh(recipe, style, ranks, leading)
    for got, want in zip(run(*arguments), on_one_device(recipe, leading), strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * np.abs(want).max())


@pytest.mark.parametrize("style", ["column", "row"])
def test_what_ranks_cut_between_blocks_travels_as_codes(style):
    run, arguments = on_mesh(recipes.mxfp8(), style, 2, (3, 64))
    gathered = re.findall(r"= (\w+)\[[\d,]*\][^=\n]* all-gather\(", run.lower(*arguments).compile().as_text())
    assert set(gathered) == {"u8"}


@pytest.mark.parametrize("style", ["column", "row"])
def test_beside_a_data_parallel_axis_with_features_that_ranks_do_not_divide(style):
    """FSDP cuts the sequences, tp the tokens of each, and 65 or 97 features unevenly: ranks fill theirs up."""
    inside, outside = (IN, OUT + 1) if style == "column" else (IN + 1, OUT)
    mesh = jax.make_mesh((2, 4), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    x, w, b, g = (
        sample("gaussian", shape, seed=i)
        for i, shape in enumerate(((4, 64, inside), (outside, inside), (1, outside), (4, 64, outside)))
    )
    b, recipe = b[0], recipes.mxfp4()
    wanted = jax.jit(partial(layer, recipe))(x, bfp.quantize_params(w, recipe), b, g)
    spec = P(("tp", "fsdp")) if style == "column" else P("fsdp", "tp")
    placed = bfp.shard_params(bfp.quantize_params(w, recipe), mesh, spec)
    tokens, features = P("fsdp", "tp"), P("fsdp", None, "tp")
    lies_x, lies_y, cut = (tokens, features, P("tp")) if style == "column" else (features, tokens, P())
    fill = lambda array: np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[-1] % 4)])  # noqa: E731
    if style == "column":
        b, g = fill(b), fill(g)
    else:
        x = fill(x)
    body = partial(layer, recipe, sequence=True, data_axes=("fsdp",))
    specs = (lies_x, bfp.partition_specs(placed), cut, lies_y)
    run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=(lies_y, lies_x, spec, cut))
    y, dx, dw, db = jax.jit(run)(x, placed, b, g)
    ranks = sharding_of((outside, inside), placed.sharding.mesh, spec)
    rows, columns = (
        np.concatenate([np.arange(size) + i * max(sizes) for i, size in enumerate(sizes)])
        for sizes in ([ranks.span(dim, rank)[1] for rank in ranks.mesh.group(0, ranks.order(dim))] for dim in (0, 1))
    )
    dw = np.asarray(dw)[rows][:, columns]
    got = y[..., :outside], dx[..., :inside], dw, db[:outside]
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=3e-6 * np.abs(theirs).max())


def test_tokens_that_ranks_do_not_divide():
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    q = bfp.shard_params(bfp.quantize_params(jnp.ones((OUT, IN)), "mxfp8"), mesh, P(None, "tp"))
    body = partial(bfp.linear, recipe="mxfp8", sequence=True)
    for shape in ((2, 66, IN), (IN,)):
        run = jax.shard_map(
            body, mesh=mesh, in_specs=(P(*(None,) * (len(shape) - 1), "tp"), bfp.partition_specs(q)), out_specs=P("tp")
        )
        with pytest.raises(ValueError, match=r"cuts tokens evenly over 4 ranks of 'tp', on axis -2 of x, which has shape"):
            jax.eval_shape(run, jax.ShapeDtypeStruct(shape, jnp.float32), q)


def test_no_sequence_and_no_token():
    run, arguments = on_mesh(recipes.mxfp8(), "column", 2, (0, 64))
    assert [part.shape for part in run(*arguments)] == [(0, 64, OUT), (0, 64, IN), (OUT, IN), (OUT,)]
