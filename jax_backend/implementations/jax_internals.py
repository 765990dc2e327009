"""The private parts of JAX that this package uses, with the reasons.

Carriers (`implementations.carriers`) have an extended dtype, like JAX's random keys. JAX has no public way to define one, so
the handlers of its own extended dtypes are registered for ours.

A quantized array's flatten function inspects the stack, because some callers need something other than codes and scales, and
JAX doesn't tell it who calls (`flattening_caller`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from traceback import walk_stack
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
    "OPTAX_LABELS",
    "OPTAX_MASK",
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
    """Registers a subclass of EArray with JAX, using EArray's handlers; `add` adds two of its cotangents, if given."""
    pxla.shard_arg_handlers[kind] = pxla.shard_arg_handlers[EArray]
    core.pytype_aval_mappings[kind] = lambda x: x.aval
    dtypes.register_canonicalize_value_handler(kind, None)
    mlir.register_constant_handler(kind, _as_constant)  # pyright: ignore[reportArgumentType]
    if add is not None:
        ad_util.raw_jaxval_adders[kind] = add


def _as_constant(x: Any, aval: Any) -> Any:
    return mlir.get_constant_handler(type(x._data))(x._data, core.physical_aval(aval))


def runs_at_once() -> bool:
    """Returns whether operations run immediately or only under derivatives: not in jit, vmap or shard_map."""
    trace = core.trace_ctx.trace
    while isinstance(trace, ad.JVPTrace | ad.LinearizeTrace):
        trace = trace.parent_trace
    return isinstance(trace, core.EvalTrace)


evaluating = core.eval_context
"""Context that runs functions of concrete arrays outside of derivatives, where jit finds its compiled programs fast."""


def stop_also(kind: Callable[[Any], bool], stop: Callable[[Any], Any]) -> None:
    """Makes `lax.stop_gradient` call `stop` for leaves selected by `kind`.

    JAX returns arrays of extended dtypes unchanged, because its own have no tangents. Carriers have tangents, and
    `jax.tree.map(lax.stop_gradient, params)` offers no other hook.
    """
    others = lax_functions._stop_gradient
    lax_functions._stop_gradient = lambda x: stop(x) if kind(x) else others(x)


def runs_compiled(primitive: core.Primitive) -> None:
    """Makes a primitive run as a compiled program when it is called directly, as under `jax.disable_jit`.

    JAX treats such a program as one operation. `jax_debug_nans` re-runs other functions that returned NaN piece by piece, and
    would recurse endlessly in one that calls its own primitive.
    """
    dispatch.simple_impl(primitive)


def saved_as_they_are(kind: Callable[[Any], bool]) -> None:
    """Makes `jax.checkpoint` save arrays selected by `kind` unrounded.

    It rounds saved inexact arrays to their dtype's number of bits, which an extended dtype doesn't define.
    """
    others = ad_checkpoint._insert_reduce_precision

    def insert(jaxpr: Any, count: int) -> Any:
        results, first = jaxpr.outvars, len(jaxpr.outvars) - count
        own = [x for x in results[first:] if kind(x.aval)]
        if not own:
            return others(jaxpr, count)
        rounded = [x for x in results[first:] if not kind(x.aval)]
        # The original function only looks at the last `count` results, and keeps the results' names.
        return others(jaxpr.replace(outvars=[*results[:first], *own, *rounded]), len(rounded)).replace(outvars=results)

    ad_checkpoint._insert_reduce_precision = insert


def without_tangents(tree: Any) -> Any:
    """Like `lax.stop_gradient` of a tree, but with fewer JAX steps under derivatives: returns the primals."""
    return jax.tree.map(_without_tangent, tree)


def _without_tangent(x: Any) -> Any:
    while isinstance(x, ad.JVPTracer | ad.LinearizeTracer):
        x = x.primal
    # Integers have no tangent. A new variable, as from `stop_gradient`, would be saved by a scan for its backward.
    return lax.stop_gradient(x) if isinstance(x, core.Tracer) and not dtypes.issubdtype(x.dtype, np.integer) else x


def physical_result_handler(aval: Any, sharding: Any, committed: bool) -> Any:
    """Returns JAX's handler that converts a program's result buffers to an array."""
    make = pxla.global_result_handlers[core.ShapedArray]
    return make(core.physical_aval(aval), physical_sharding(aval, sharding), committed)


def spec_of(sharding: Sharding | None, mesh: Any, ndim: int) -> tuple[Any, ...]:
    """Returns the mesh axes that cut each dimension of an array partitioned by XLA.

    XLA can also cut by part of an axis (two scales over four devices, in pairs). No PartitionSpec expresses this and JAX raises
    an error; such an array counts as whole here.
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
"""Equinox reading or writing a file, which stores unnamed leaves: an additional leaf must give the format."""

EQUINOX_DERIVATIVES = frozenset({("equinox._ad", "filter_vjp"), ("equinox._ad", "_Jac.__call__")})
"""Equinox's derivatives that split arguments and differentiate inexact leaves; codes would silently get None.

(`eqx.filter_grad` calls `jax.grad`.) They split by `equinox._filters.partition`, which has many other callers.
"""

LINEN_AXES = frozenset({("flax.core.axes_scan", f"transpose_{way}_front") for way in ("to", "from")})
"""`linen.scan` along an axis other than the first, which codes and scales have at another position, or not at all."""

_CUSTOM_RULES = frozenset(("jax._src.custom_derivatives", f"_flatten_{which}") for which in ("fwd", "bwd", "jvp"))
RULES = frozenset(
    {
        *_CUSTOM_RULES,
        ("equinox._ad", None),
        ("equinox._filters", None),
        *EQUINOX_DERIVATIVES,
    }
)
"""Callers of rules of `jax.custom_vjp` and similar, which may differentiate their arguments, and Equinox on the way there.
Carriers are kept for them although they aren't traced, as under jit."""

OPTAX_ZEROS = ("optax.tree_utils._tree_math", "tree_zeros_like")
"""optax making moments or sums of gradients, which have the original array's shape."""

STOP_GRADIENT = ("jax._src.lax.lax", "stop_gradient")
"""`lax.stop_gradient` of a tree; its result is a constant, so no derivative gets lost."""

JAX_GRAD = ("jax._src.api", "value_and_grad_f")
"""`jax.grad`, whose own message about integers suggests `allow_int`, which gives an empty gradient.

It flattens its argument before it checks dtypes, so a better error is only possible here. If JAX flattens elsewhere in the
future, its own TypeError remains.
"""

OPTAX_UPDATES = ("optax._src.update", "apply_updates")
"""optax adding updates to parameters, also for flax's TrainState and nnx.Optimizer. JAX would complain about tree types, or add
to codes."""

OPTAX_LABELS = ("optax.transforms._combining", None)
"""optax.multi_transform reading labels of a tree's leaves."""

OPTAX_MASK = ("optax.transforms._masking", "_mask_callable")
"""optax.masked reading a mask that is a tree; gradients have plain arrays where parameters have codes and scales."""

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
"""Functions that calculate with a tree's leaves, by module. They would mistake codes for values, and codes are finite even if
their values aren't."""

_CALLERS = {
    EQUINOX_FILE,
    OPTAX_ZEROS,
    STOP_GRADIENT,
    JAX_GRAD,
    OPTAX_UPDATES,
    OPTAX_LABELS,
    OPTAX_MASK,
    *LINEN_AXES,
    *RULES,
    *CALCULATING,
}


def _in_a_rule(frame: Any) -> bool:
    """Returns whether a custom rule is running, which gives no cotangent for inputs that aren't differentiated."""
    return any((one.f_globals.get("__name__", ""), one.f_code.co_name) in _CUSTOM_RULES for one, _ in walk_stack(frame))


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
