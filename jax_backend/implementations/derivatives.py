"""Custom derivatives that hold at every order, in forward and reverse mode, under every transformation.

`jax.custom_jvp` and `custom_vjp` lose their rules if scan evaluates part of its body early; the former has no custom transpose,
the latter no forward mode. The functions here are primitives, which JAX never looks inside.

attach       gives results a rule for their tangents, computed from the tangents of carriers
linear_map   a linear function of tangents with a custom transpose, such as the backward of quantized products
either       a function, or a differentiable replacement where derivatives are taken
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from blockfp.definition.rotation import GROUP, rotate

from . import amaxes, explicit
from .carriers import carrier_of, is_carrier
from .jax_internals import stop_also, unmapped_aval, without_tangents

Flat = Sequence[Any]


def straight_through(values: jax.Array, carrier: Any) -> jax.Array:
    """Gives `values` the tangent of the carrier, and its sharding on an Explicit mesh."""
    values, dtype = explicit.resharded_like(values, carrier), values.dtype
    return attach(values, (), carrier, lambda _, __, tangent: [tangent.astype(dtype)])


def without_gradient(x: jax.Array, why: str) -> jax.Array:
    """Returns x with a derivative that raises TypeError(why)."""

    def refuse(*_):
        raise TypeError(why)

    return attach(x, (), carrier_of(x), refuse) if isinstance(x, Tracer) else x


def attach(results: Any, kept: Any, carriers: Any, rule: Callable[[Any, Any, Any], Flat]) -> Any:
    """Gives `results`, a tree, custom derivatives.

    Args:
        results: arrays; their own dependencies don't contribute to the derivatives.
        kept: arrays that the rule needs, as they came: a scan stores those it hasn't. A rule stops their own derivatives.
        carriers: the inputs to differentiate by.
        rule: maps (kept, carriers, tangents of carriers, None for zeros) to tangents of the results' leaves, None for zeros. It
            may differentiate through `carriers`, for higher orders.
    """
    flat, structure = jax.tree.flatten(results)
    others, of_others = jax.tree.flatten(kept)
    points, of_points = jax.tree.flatten(carriers)
    if not any(isinstance(point, Tracer) for point in points):
        return results
    flat = without_tangents(flat)

    def of_leaves(others, points, tangents):
        return rule(of_others.unflatten(others), of_points.unflatten(points), of_points.unflatten(tangents))

    return structure.unflatten(_attach_p.bind(*flat, *others, *points, counts=(len(flat), len(others)), rule=of_leaves))


def linear_map(
    forward: Callable[[Any, Any], Flat], backward: Callable[[Any, Any, Flat], Any], kept: Any, tangents: Any, like: Flat
) -> Flat:
    """Computes forward(kept, tangents), linear in `tangents`; its transpose is backward(kept, tangents, cotangents).

    Args:
        forward: returns results of the types `like`; a tangent of None means zeros.
        backward: returns a tree like `tangents`, which are passed as types (`jax.typeof`) and Nones.
        kept: arrays; both functions are differentiable in them.
        tangents: a tree, with None for zeros.
        like: the types of the results.
    """
    known, of_known = jax.tree.flatten(kept)
    points, of_points = jax.tree.flatten(tangents)
    types = of_points.unflatten([jax.typeof(point) for point in points])

    def map_forward(known, points):
        return list(forward(of_known.unflatten(known), of_points.unflatten(points)))

    def map_backward(known, cotangents):
        return of_points.flatten_up_to(backward(of_known.unflatten(known), types, cotangents))

    avals = tuple(aval.to_tangent_aval() for aval in like)
    return _linear_p.bind(*known, *points, count=len(known), forward=map_forward, backward=map_backward, avals=avals)


def either(plain: Callable[..., Any], differentiable: Callable[..., Any], static: Hashable, *args: Any) -> Any:
    """Computes plain(static, *args), or differentiable(static, *args), with the same result, if a derivative is taken."""
    leaves, structure = jax.tree.flatten(args)
    if not any(isinstance(leaf, Tracer) for leaf in leaves):
        return plain(static, *args)
    jaxpr, results = jax.make_jaxpr(_of_leaves(plain, static, structure), return_shape=True)(*leaves)
    of_leaves = _of_leaves(differentiable, static, structure)
    made = _either_p.bind(*leaves, jaxpr=jaxpr, differentiable=lambda *leaves: jax.tree.leaves(of_leaves(*leaves)))
    # A scan doesn't stack what its body hands on as it came. Carriers come out with other derivatives.
    given = {id(var): leaf for var, leaf in zip(jaxpr.jaxpr.invars, leaves, strict=True) if not is_carrier(leaf)}
    made = [given.get(id(var), each) for var, each in zip(jaxpr.jaxpr.outvars, made, strict=True)]
    return jax.tree.structure(results).unflatten(made)


@lru_cache(maxsize=1024)
def _of_leaves(function: Callable[..., Any], static: Hashable, structure: Any) -> Callable[..., Any]:
    """Returns a function of the arguments' leaves; equal arguments get the same function, so that JAX traces once per shape."""
    return lambda *leaves: function(static, *structure.unflatten(leaves))


# attach


def _attach_jvp(primals, tangents, *, counts, rule):
    results, kept = counts
    others, points = primals[results : results + kept], primals[results + kept :]
    given = [None if type(t) is ad.Zero else t for t in tangents[results + kept :]]
    # Results for constants have no further derivatives.
    traced = any(isinstance(point, Tracer) for point in points)
    out = _attach_p.bind(*primals, counts=counts, rule=rule) if traced else list(primals[:results])
    dots = [None] * results if all(t is None for t in given) else rule(others, points, given)
    zeros = (ad.Zero(jax.typeof(x).to_tangent_aval()) for x in out)
    return out, [zero if dot is None else dot for zero, dot in zip(zeros, dots, strict=True)]


def _attach_batch(args, dims, *, counts, rule):
    results, kept = counts
    size = _batch_size(args, dims)
    flat = [batching.bdim_at_front(x, d, size) for x, d in zip(args[:results], dims[:results], strict=True)]
    of_others, of_points = dims[results : results + kept], dims[results + kept :]

    def batched(others, points, tangents):
        present = [i for i, t in enumerate(tangents) if t is not None]
        made: list[int] = []

        def one(others, points, given):
            tangents: list[Any] = [None] * len(points)
            for i, t in zip(present, given, strict=True):
                tangents[i] = t
            dots = rule(others, points, tangents)
            made[:] = [i for i, dot in enumerate(dots) if dot is not None]
            return [dot for dot in dots if dot is not None]

        axes = (list(of_others), list(of_points), [of_points[i] for i in present])
        if all(axis is None for each in axes for axis in each):
            dots = one(others, points, [tangents[i] for i in present])
            dots = [_for_each(dot, size) for dot in dots]
        else:
            dots = jax.vmap(one, in_axes=axes, axis_size=size)(list(others), list(points), [tangents[i] for i in present])
        all_dots: list[Any] = [None] * results
        for i, dot in zip(made, dots, strict=True):
            all_dots[i] = dot
        return all_dots

    return _attach_p.bind(*flat, *args[results:], counts=counts, rule=batched), [0] * results


_attach_p = Primitive("straight_through")
_attach_p.multiple_results = True
_attach_p.def_impl(lambda *args, counts, rule: list(args[: counts[0]]))
_attach_p.def_abstract_eval(lambda *args, counts, rule: [a.update(weak_type=False) for a in args[: counts[0]]])
mlir.register_lowering(_attach_p, lambda ctx, *args, counts, rule: list(args[: counts[0]]))
ad.primitive_jvps[_attach_p] = _attach_jvp
batching.primitive_batchers[_attach_p] = _attach_batch


def _stopped(carrier: Any) -> Any:
    (stopped,) = _attach_p.bind(carrier, carrier, counts=(1, 0), rule=lambda *_: [None])
    return stopped


stop_also(is_carrier, _stopped)


# linear_map


def _linear_impl(*args, count, forward, backward, avals):
    return forward(args[:count], args[count:])


def _linear_jvp(primals, tangents, *, count, forward, backward, avals):
    static = {"count": count, "forward": forward, "backward": backward, "avals": avals}
    known, points = primals[:count], primals[count:]
    out = _linear_p.bind(*primals, **static)
    terms = []
    if any(type(t) is not ad.Zero for t in tangents[count:]):
        terms.append(_linear_p.bind(*known, *map(ad.instantiate_zeros, tangents[count:]), **static))
    if any(type(t) is not ad.Zero for t in tangents[:count]):
        terms.append(_jvp_of(lambda *known: forward(known, points), known, tangents[:count])[1])
    return out, [sum(each[1:], each[0]) for each in zip(*terms, strict=True)]


def _linear_transpose(cotangents, *args, count, forward, backward, avals):
    known, points = args[:count], args[count:]
    given = [ad.instantiate_zeros(ct) if type(ct) is ad.Zero else ct for ct in cotangents]
    results = backward(known, given)
    return [None] * count + [r if ad.is_undefined_primal(p) else None for r, p in zip(results, points, strict=True)]


def _linear_batch(args, dims, *, count, forward, backward, avals):
    size, of_known = _batch_size(args, dims), list(dims[:count])
    points = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args[count:], dims[count:], strict=True)]
    shared = [d is None for d in dims[count:]]
    of_points = [None if alone else 0 for alone in shared]

    def batched_forward(known, points):
        return jax.vmap(forward, in_axes=(of_known, of_points), axis_size=size)(list(known), list(points))

    def batched_backward(known, cotangents):
        each = jax.vmap(backward, in_axes=(of_known, 0), axis_size=size)(list(known), list(cotangents))
        # A shared input gets the combined cotangents of the batch.
        return [_of_all(x) if alone and x is not None else x for x, alone in zip(each, shared, strict=True)]

    avals = tuple(unmapped_aval(size, 0, aval) for aval in avals)
    static = {"count": count, "forward": batched_forward, "backward": batched_backward, "avals": avals}
    return _linear_p.bind(*args[:count], *points, **static), [0] * len(avals)


def _of_all(cotangents: jax.Array) -> jax.Array:
    """Combines a shared value's cotangents along the first axis."""
    return amaxes.largest(cotangents) if amaxes.is_amax(cotangents) else jnp.sum(cotangents, axis=0)


def _for_each(tangent: jax.Array, size: int) -> jax.Array:
    """Repeats a shared tangent along a new first axis."""
    if not amaxes.is_amax(tangent):
        return jnp.broadcast_to(tangent, (size, *tangent.shape))
    like = unmapped_aval(size, 0, jax.typeof(tangent))
    (out,) = linear_map(
        lambda _, x: [amaxes.repeated(x, size)], lambda _, __, each: amaxes.largest(each[0]), (), tangent, [like]
    )
    return out


_linear_p = Primitive("straight_through_linear")
_linear_p.multiple_results = True
_linear_p.def_impl(_linear_impl)
_linear_p.def_abstract_eval(lambda *args, count, forward, backward, avals: list(avals))
mlir.register_lowering(_linear_p, mlir.lower_fun(_linear_impl, multiple_results=True))
ad.primitive_jvps[_linear_p] = _linear_jvp
ad.primitive_transposes[_linear_p] = _linear_transpose
batching.primitive_batchers[_linear_p] = _linear_batch


# either


def _either_impl(*args, jaxpr, differentiable):
    return jaxpr_as_fun(jaxpr)(*args)


def _either_jvp(primals, tangents, *, jaxpr, differentiable):
    return _jvp_of(differentiable, primals, tangents)


def _either_batch(args, dims, *, jaxpr, differentiable):
    each = [
        jax.vmap(function, in_axes=dims, axis_size=_batch_size(args, dims))
        for function in (jaxpr_as_fun(jaxpr), differentiable)
    ]
    out = _either_p.bind(*args, jaxpr=jax.make_jaxpr(each[0])(*args), differentiable=each[1])
    return out, [0] * len(out)


_either_p = Primitive("quantized")
_either_p.multiple_results = True
_either_p.def_impl(_either_impl)
_either_p.def_abstract_eval(lambda *args, jaxpr, differentiable: jaxpr.out_avals)
mlir.register_lowering(_either_p, mlir.lower_fun(_either_impl, multiple_results=True))
# JAX 0.12 calls this after all derivatives, for programs with steps that it has yet to lower (`jnp.searchsorted`).
_either_p.to_lojax = _either_impl
ad.primitive_jvps[_either_p] = _either_jvp
batching.primitive_batchers[_either_p] = _either_batch


def _jvp_of(function: Callable[..., Flat], primals: Flat, tangents: Flat) -> tuple[Flat, Flat]:
    """Computes a function's results and tangents; zero tangents (`ad.Zero`) are not passed to it."""
    live = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

    def of_live(*points):
        whole = list(primals)
        for i, point in zip(live, points, strict=True):
            whole[i] = point
        return list(function(*whole))

    out, dots = jax.jvp(of_live, [primals[i] for i in live], [tangents[i] for i in live])
    avals = [jax.typeof(x).to_tangent_aval() for x in out]
    return out, [ad.Zero(a) if a.dtype == jax.dtypes.float0 else dot for a, dot in zip(avals, dots, strict=True)]


def _batch_size(args: Flat, dims: Flat) -> int:
    return next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)


# ---- the Hadamard transform


def hadamard(x: jax.Array, *, inverse: bool = False) -> jax.Array:
    """Multiplies groups of 16 along x's last axis by `rotate`'s matrix or its inverse; a shorter tail is unchanged."""
    matrix = rotate(np.eye(GROUP, dtype=np.float32))
    whole = x.shape[-1] // GROUP * GROUP
    groups = x[..., :whole].reshape(*x.shape[:-1], -1, GROUP)
    turned = jnp.matmul(groups, (matrix.T if inverse else matrix).astype(x.dtype), precision=lax.Precision.HIGHEST)
    return jnp.concatenate([turned.reshape(*x.shape[:-1], whole), x[..., whole:]], axis=-1)
