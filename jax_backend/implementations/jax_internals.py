"""The private parts of JAX that this package rests on, in one place, with the reasons.

Carriers (`implementations.carriers`) are arrays of an extended dtype, as JAX's random keys are. JAX has no public way to make
such a dtype, so the handlers that it keeps for its own are registered for ours.

A quantized array's flatten looks at the stack, because some callers want something else than codes and scales, and JAX
tells a flatten nothing about them (`flattening_caller`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax._src import ad_checkpoint, ad_util, core, dispatch, dtypes
from jax._src.earray import EArray
from jax._src.interpreters import ad, mlir, pxla
from jax._src.lax import lax as lax_functions
from jax._src.sharding_impls import parse_flatten_op_sharding, physical_sharding
from jax.sharding import PartitionSpec, Sharding

ExtendedDType = dtypes.ExtendedDType
extended_scalar = dtypes.extended
physical_aval = core.physical_aval
unmapped_aval = core.unmapped_aval

__all__ = [
    "CALCULATING",
    "EQUINOX_DERIVATIVES",
    "EQUINOX_FILE",
    "JAX_GRAD",
    "LINEN_AXES",
    "OPTAX_UPDATES",
    "OPTAX_ZEROS",
    "RULES",
    "STOP_GRADIENT",
    "EArray",
    "ExtendedDType",
    "evaluating",
    "extended_scalar",
    "flattening_caller",
    "physical_aval",
    "physical_result_handler",
    "register_array",
    "runs_at_once",
    "runs_compiled",
    "saved_as_they_are",
    "spec_of",
    "stop_also",
    "unmapped_aval",
    "without_tangents",
]


def register_array(kind: type[EArray], add: Callable[[Any, Any], Any] | None = None) -> None:
    """Registers a subclass of EArray with JAX, with the handlers that JAX has for EArray itself.

    Args:
        kind: the class.
        add: adds two cotangents of that kind, where there are such.
    """
    pxla.shard_arg_handlers[kind] = pxla.shard_arg_handlers[EArray]
    core.pytype_aval_mappings[kind] = lambda x: x.aval
    dtypes.register_canonicalize_value_handler(kind, None)
    mlir.register_constant_handler(kind, _as_constant)  # pyright: ignore[reportArgumentType]
    if add is not None:
        ad_util.raw_jaxval_adders[kind] = add


def _as_constant(x: Any, aval: Any) -> Any:
    return mlir.get_constant_handler(type(x._data))(x._data, core.physical_aval(aval))


def runs_at_once() -> bool:
    """True where operations run as they are called, and nothing but derivatives watches: not in jit, vmap or shard_map."""
    trace = core.trace_ctx.trace
    while isinstance(trace, ad.JVPTrace | ad.LinearizeTrace):
        trace = trace.parent_trace
    return isinstance(trace, core.EvalTrace)


evaluating = core.eval_context
"""Lets functions of arrays that aren't traced run as outside of derivatives: jit finds its compiled programs at once there."""


def stop_also(kind: Callable[[Any], bool], stop: Callable[[Any], Any]) -> None:
    """Makes `lax.stop_gradient` call `stop` for leaves of that kind.

    JAX gives on arrays of an extended dtype as they are there: its own have no tangents that could be stopped. Carriers have,
    and `jax.tree.map(lax.stop_gradient, params)` shows them to no other function.
    """
    others = lax_functions._stop_gradient
    lax_functions._stop_gradient = lambda x: stop(x) if kind(x) else others(x)


def runs_compiled(primitive: core.Primitive) -> None:
    """Makes a primitive that is called by itself, as under `jax.disable_jit`, run as a compiled program.

    JAX knows these programs as one operation: `jax_debug_nans` takes others that gave a NaN apart, to find where it came from,
    and would call one that calls its primitive without an end.
    """
    dispatch.simple_impl(primitive)


def saved_as_they_are(kind: Callable[[Any], bool]) -> None:
    """Makes `jax.checkpoint` save arrays of that kind as they are.

    What its policy saves of inexact dtypes it rounds to the bits that the dtype has, and an extended dtype doesn't say these.
    """
    others = ad_checkpoint._insert_reduce_precision

    def insert(jaxpr: Any, count: int) -> Any:
        results, first = jaxpr.outvars, len(jaxpr.outvars) - count
        own = [x for x in results[first:] if kind(x.aval)]
        if not own:
            return others(jaxpr, count)
        rounded = [x for x in results[first:] if not kind(x.aval)]
        # It looks at the last `count` results alone, and leaves the results' names.
        return others(jaxpr.replace(outvars=[*results[:first], *own, *rounded]), len(rounded)).replace(outvars=results)

    ad_checkpoint._insert_reduce_precision = insert


def without_tangents(tree: Any) -> Any:
    """Computes `lax.stop_gradient` in few of JAX's steps where derivatives watch: the arrays that they are taken of."""
    return jax.tree.map(_without_tangent, tree)


def _without_tangent(x: Any) -> Any:
    while isinstance(x, ad.JVPTracer | ad.LinearizeTracer):
        x = x.primal
    # Integers have no tangent. Another variable of them, such as `stop_gradient` makes, a scan would keep for its backward.
    return lax.stop_gradient(x) if isinstance(x, core.Tracer) and not dtypes.issubdtype(x.dtype, np.integer) else x


def physical_result_handler(aval: Any, sharding: Any, committed: bool) -> Any:
    """Returns JAX's handler that makes an array's buffers of a program's results."""
    make = pxla.global_result_handlers[core.ShapedArray]
    return make(core.physical_aval(aval), physical_sharding(aval, sharding), committed)


def spec_of(sharding: Sharding | None, mesh: Any, ndim: int) -> tuple[Any, ...]:
    """Returns the axes of the mesh that cut each dimension of an array, as XLA cut it.

    XLA also cuts by parts of an axis (two scales over four devices, two of which have the same one). No PartitionSpec says so,
    and JAX raises on its way there; here such an array counts as whole.
    """
    found: Any = ()
    if sharding is not None and not mesh.empty:
        try:
            (found,) = parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(ndim), mesh)
        except (ValueError, NotImplementedError):
            found = ()
    spec = tuple(PartitionSpec(*found))
    return (*spec, *(None,) * (ndim - len(spec)))


EQUINOX_FILE = ("equinox._serialisation", None)
"""Equinox on its way to or from a file, which has leaves and no names: a leaf must say the format."""

EQUINOX_DERIVATIVES = frozenset({("equinox._ad", "filter_vjp"), ("equinox._ad", "_Jac.__call__")})
"""Equinox's derivatives that split their arguments and differentiate what is inexact: codes would get None, without a word.
(`eqx.filter_grad` goes on to `jax.grad`.) The split is `equinox._filters.partition`, which many others call."""

LINEN_AXES = frozenset({("flax.core.axes_scan", f"transpose_{way}_front") for way in ("to", "from")})
"""`linen.scan` along another axis than the first, which codes and scales have elsewhere, and NVFP4's tensor scale doesn't."""

_CUSTOM_RULES = frozenset(("jax._src.custom_derivatives", f"_flatten_{which}") for which in ("fwd", "bwd", "jvp"))
RULES = frozenset(
    {
        *_CUSTOM_RULES,
        ("equinox._ad", None),
        ("equinox._filters", None),
        *EQUINOX_DERIVATIVES,
    }
)
"""What calls a rule of `jax.custom_vjp` and its like, which may differentiate what it is given, and Equinox on the way there: a
carrier stays there though it isn't traced, as it does under jit."""

OPTAX_ZEROS = ("optax.tree_utils._tree_math", "tree_zeros_like")
"""optax making moments or sums of gradients, which are arrays of the shape that was quantized."""

STOP_GRADIENT = ("jax._src.lax.lax", "stop_gradient")
"""`lax.stop_gradient` of a tree: what it gives is a constant, and loses no derivative."""

JAX_GRAD = ("jax._src.api", "value_and_grad_f")
"""`jax.grad`, whose own message about integers leads on to `allow_int`, and that to an empty gradient. It flattens its argument
before it looks at dtypes, so only there a better answer can be given. Should JAX come to flatten elsewhere, its own TypeError
stands."""

OPTAX_UPDATES = ("optax._src.update", "apply_updates")
"""optax adding updates to parameters, also for flax's TrainState and nnx.Optimizer: JAX would speak of types of trees, or codes
be added to."""

_TREE_MATH = (
    *("add", "sub", "mul", "div", "scale", "add_scale", "vdot", "sum", "max", "min", "norm", "ones_like", "full_like", "clip"),
    *("update_moment", "update_infinity_moment", "update_moment_per_elem_norm", "bias_correction", "allclose"),
)
_REDUCING = "pmean", "pmax", "pmin", "psum", "_psum", "_psum_is_async", "psum_scatter", "_psum_scatter_is_async"
CALCULATING = frozenset(
    {
        ("equinox._update", "apply_updates"),
        ("jax._src.flatten_util", "ravel_pytree"),
        ("optax._src.update", "incremental_update"),
        ("optax.projections._projections", None),
        *(("chex._src.asserts", f"_assert_tree_all_finite_{how}") for how in ("static", "jittable")),
        *(("jax._src.lax.parallel", name) for name in _REDUCING),
        *(("optax.tree_utils._tree_math", f"tree_{name}") for name in _TREE_MATH),
    }
)
"""Functions of trees that calculate with the leaves, by modules: codes would be taken for values, and are finite themselves
where their values aren't."""

_CALLERS = {EQUINOX_FILE, OPTAX_ZEROS, STOP_GRADIENT, JAX_GRAD, OPTAX_UPDATES, *LINEN_AXES, *RULES, *CALCULATING}


def _in_a_rule(frame: Any) -> bool:
    """True where a rule of one's own runs, which gives no cotangent for what nothing differentiates."""
    while frame is not None:
        if (frame.f_globals.get("__name__", ""), frame.f_code.co_name) in _CUSTOM_RULES:
            return True
        frame = frame.f_back
    return False


def flattening_caller() -> tuple[str, str | None] | None:
    """Returns the caller, among those above, that flattens the array whose flatten function calls this; else None."""
    frame = sys._getframe(2)
    while frame is not None and (module := frame.f_globals.get("__name__", "")).startswith("jax._src.tree"):
        frame = frame.f_back
    if frame is None:
        return None
    if (module, frame.f_code.co_name) == ("equinox._filters", "partition") and (outer := frame.f_back) is not None:
        asked = outer.f_globals.get("__name__", ""), outer.f_code.co_qualname
        if asked in EQUINOX_DERIVATIVES and not _in_a_rule(outer):
            return asked
    for caller in ((module, frame.f_code.co_name), (module, None)):
        if caller in _CALLERS:
            return caller
    return None
