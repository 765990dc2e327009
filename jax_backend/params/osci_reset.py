"""OsciReset around an optimizer with masters (`definition.oscillation`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp

from blockfp.definition import oscillation
from blockfp.definition.oscillation import OsciReset

from ..arrays.array import is_quantized
from .optimizer import MasterState, Optimizer, Replacement, check_state
from .params import dequantize_params
from .trees import map_with_path


class OsciResetState(NamedTuple):
    """The state of `osci_reset`.

    Attributes:
        step: number of completed steps, int32.
        master_paths, quantized_paths: path lengths in the current window, float32, in the structure of gradients; None for
            unquantized parameters.
        inner: the optimizer's own state, a `MasterState`.
    """

    step: jax.Array
    master_paths: Any
    quantized_paths: Any
    inner: MasterState


jax.export.register_namedtuple_serialization(OsciResetState, serialized_name="blockfp.experimental.jax.OsciResetState")


def osci_reset(optimizer: Optimizer, settings: OsciReset | None = None) -> Optimizer:
    """Wraps an optimizer with masters: resets masters of oscillating quantized weights to their quantized values.

    Equivalent to `blockfp.experimental.torch.osci_reset`. Stores two float32 numbers per quantized weight. A reset doesn't
    change codes; the next step starts from the new masters.

    Args:
        optimizer: `adamw`, `adam`, or the result of `with_masters`.
        settings: an `OsciReset`; the published settings by default.

    Raises:
        TypeError, ValueError: the settings are invalid; at `init`, the optimizer has no masters, or no parameter is quantized,
            as in `with_masters(osci_reset(..))`.

    Example:
        >>> optimizer = osci_reset(bfp.adamw(1e-3), OsciReset(period=200, window=50, threshold=8.0))
    """
    how = oscillation.check_settings(OsciReset() if settings is None else settings)

    def init(params, originals=None):
        inner = optimizer.init(params) if originals is None else optimizer.init(params, originals)
        if not isinstance(inner, MasterState):
            raise TypeError(
                f"osci_reset wraps adamw, adam or with_masters(..), whose state has masters, got {type(inner).__name__}"
            )
        if not any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized))):
            raise ValueError(
                "params holds no quantized array, so osci_reset would do nothing: use quantize_params, and put "
                "with_masters inside, osci_reset(with_masters(..)); omit it if all parameters are plain"
            )
        master_paths, quantized_paths = (map_with_path(_new_path, params, inner.masters) for _ in range(2))
        return OsciResetState(jnp.zeros((), jnp.int32), master_paths, quantized_paths, inner)

    def update(gradients, state: OsciResetState, params=None, **extra):
        check_state(state, OsciResetState)
        updates, inner = optimizer.update(gradients, state.inner, params, **extra)
        step = state.step + 1
        place = oscillation.place(step, how)
        within, begins, ends = (place >= 1) & (place <= how.window), place == 1, place == how.window

        def one(path: str, param, before, new, update: Replacement, *paths):
            if not is_quantized(param):
                return new, *paths
            codes: list[Any] = [param, update.value]
            quantized = [dequantize_params(q.without_carrier(), jnp.float32) for q in codes]
            moves = zip(paths, (before, quantized[0]), (new, quantized[1]), strict=True)
            master_path, quantized_path = (
                jnp.where(within, oscillation.lengthen(path, old, now, begins), path) for path, old, now in moves
            )
            reset = ends & oscillation.oscillates(master_path, quantized_path, how.threshold)
            return jnp.where(reset, quantized[1], new), master_path, quantized_path

        trees = (state.inner.masters, inner.masters, updates, state.master_paths, state.quantized_paths)
        done = map_with_path(one, params, *trees)
        masters, master_paths, quantized_paths = (
            map_with_path(lambda _, param, each, i=i: each[i], params, done) for i in range(3)
        )
        return updates, OsciResetState(step, master_paths, quantized_paths, MasterState(masters, inner.inner))

    return Optimizer(init, update)


def _new_path(path: str, param: Any, master: Any) -> jax.Array | None:
    return jnp.zeros_like(master) if is_quantized(param) else None
