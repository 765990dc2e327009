"""Operands of a linear layer's products: casts of activations and gradients along both axes, sharded or not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from blockfp.definition.numerics import Quantized
from blockfp.definition.rotation import rotate
from blockfp.definition.rounding import COLUMNWISE, ROWWISE, gradient_key
from blockfp.definition.scaling import delayed_multiplier, eps_for
from blockfp.formats import Format
from blockfp.kernels.calls import ACTIVATIONS
from blockfp.kernels.operand_cast import OperandCast, operand_cast
from blockfp.recipes import Cast, Recipe
from blockfp.sharding import plans

from ..arrays import sharded
from ..arrays.array import QuantizedArray, wrap_parts
from ..implementations import choice, cuda, explicit, ops
from ..implementations.activations import Making
from ..implementations.backend import marked, nan_scale, unless
from ..implementations.pallas.backend import Pallas
from ..implementations.xla import XLA
from .layer_placement import LayerPlacement
from .products import Aligned, Matrix, Side, align, aligns
from .prologue import Made, values_of

Pair = tuple[Side | None, Side | None]


class Operands(NamedTuple):
    """Both operands that a layer makes of an array, None where unwanted, and its amax, float32 (), if a cast found it."""

    row: Any
    column: Any
    amax: jax.Array | None = None


class Delayed(NamedTuple):
    """Delayed scaling of an operand.

    Attributes:
        scale: float32 (), 0 before the first update.
        multiplier: returns it, or before the first update that of the current amax.
    """

    scale: jax.Array
    multiplier: Callable[[], jax.Array | None]


def input_operands(
    x: jax.Array | Made,
    recipe: Recipe,
    placement: LayerPlacement,
    delayed: Delayed | None,
    activation: str | None = None,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
) -> Operands:
    """Quantizes this rank's x to [tokens, in] for the forward and [in, tokens] for wgrad.

    `activation` is what made x. `rowwise` and `columnwise` select the operands; the other is None. MX codes come aligned where
    the product would align them.
    """
    casts = (recipe.input if rowwise else None, recipe.input_columnwise if columnwise else None)
    return _Operands(x, recipe, placement, False, delayed, (None, None), activation).make(*casts)


def gradient_operands(
    g: jax.Array,
    recipe: Recipe,
    placement: LayerPlacement,
    delayed: Delayed | None,
    key: jax.Array | None,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
) -> Operands:
    """Quantizes g to [tokens, out] for dgrad and [out, tokens] for wgrad; arguments as for `input_operands`."""
    casts = (recipe.gradient if rowwise else None, recipe.gradient_columnwise if columnwise else None)
    return _Operands(g, recipe, placement, True, delayed, keys_of(key, placement)).make(*casts)


def keys_of(key: jax.Array | None, placement: LayerPlacement) -> tuple[jax.Array | None, jax.Array | None]:
    """Derives the keys of both directions on this rank from the key of layer and step."""
    if key is None:
        return None, None
    coordinate = placement.coordinate()
    row, column = (jnp.asarray(gradient_key(key, direction, coordinate)) for direction in (ROWWISE, COLUMNWISE))
    return row, column


def quantize_operand(
    x: jax.Array, cast: Cast, eps: float = 0.0, *, key: jax.Array | None = None, multiplier: jax.Array | None = None
) -> QuantizedArray:
    """Quantizes x, unsharded, along its last axis, after a rotation if the cast asks for it; an Inf makes scales NaN."""
    format = cast.format
    assert format is not None
    eps = eps_for(format, eps)
    x = rotate(x) if cast.rotate else x
    return wrap_parts(ops.quantize(x, key, multiplier, format=format, eps=eps, mark=True), format, x)


def _aligned(recipe: Recipe, gradient: bool) -> tuple[bool, bool]:
    """Returns which operands of x or of the gradient products would align."""
    weight, columns = recipe.weight.format, (recipe.input_columnwise.format, recipe.gradient_columnwise.format)
    # The gradient contracts the weight's rows.
    weight = None if gradient and weight is not None and not weight.square else weight
    exact, row = recipe.exactness, recipe.gradient if gradient else recipe.input
    return aligns(row.format, weight, exact=exact), aligns(columns[gradient], columns[not gradient], exact=exact)


class _Operands:
    """Makes both operands from one array."""

    def __init__(self, x, recipe: Recipe, placement: LayerPlacement, gradient: bool, delayed, keys, activation: Any = None):
        self.made = x if isinstance(x, Made) else None
        self.activation, x = activation, values_of(x)
        self.x, self.eps, self.placement = x, recipe.eps, placement
        self.gradient, self.delayed, self.keys = gradient, delayed, keys
        self.aligned = _aligned(recipe, gradient)
        self.sharding = placement.operand(x, gradient=gradient)
        travels = placement.gathers_gradient if gradient else placement.gathers_input
        self.over = (placement.tensor,) if travels and placement.tensor else ()

    @cached_property
    def multiplier(self) -> jax.Array | None:
        """Delayed scaling's multiplier, or None."""
        return None if self.delayed is None else self.delayed.multiplier()

    def _given(self, format: Format) -> jax.Array | None:
        """Returns what a cast of x by current scaling needn't find out, or delayed scaling's multiplier."""
        return ops.amax_in_passing(self.x, format) if self.delayed is None else self.multiplier

    def make(self, row: Cast | None, column: Cast | None) -> Operands:
        made = None if self.sharding is not None else self._by_kernel(row, column)
        if made is not None:
            return made
        first, second = self._quantized(row, column)
        if self.sharding is not None and (isinstance(first, QuantizedArray) or isinstance(second, QuantizedArray)):
            finite = is_finite(self.x, frozenset(self.over))
            first, second = (propagate(q, finite) if isinstance(q, QuantizedArray) else q for q in (first, second))
        return Operands(first, second)

    def _quantized(self, row: Cast | None, column: Cast | None) -> Pair:
        if row is not None and column is not None and row.format is not None and row.format is column.format:
            if self.sharding is None and not row.rotate and row.stochastic == column.stochastic:
                return self._from_one_read(row.format, row.stochastic, column.rotate)
            plain = not (row.stochastic or row.rotate or column.stochastic or column.rotate)
            if self.sharding is not None and row.format.square and plain:
                q = self._planned(row, columnwise=False)
                return q, q.mT
        return tuple(
            None if cast is None else self._one_direction(cast, columnwise=bool(i)) for i, cast in enumerate((row, column))
        )  # pyright: ignore[reportReturnType]

    def _by_kernel(self, row: Cast | None, column: Cast | None) -> Operands | None:
        """Casts by a kernel that aligns codes, makes x itself, or finds delayed scaling's amax; None where there is none."""
        casts = [cast for cast in (row, column) if cast is not None]
        format = casts[0].format if casts else None
        if format is None or any(cast.format is not format or cast.stochastic for cast in casts) or (row and row.rotate):
            return None
        if choice.missing_product(0) is not None:
            return self._by_pallas(operand_cast(row, column, eps_for(format, self.eps)))
        # Ranks of a tensor-parallel group share an amax, which no kernel finds.
        scaled = self.delayed is not None and self.placement.tensor is None and format.per_tensor
        plain = operand_cast(row, column, eps_for(format, self.eps), given="scale" if scaled else None)
        for gated in (True, False) if self.made is not None else (False,):
            cast = plain._replace(laid=self.aligned)
            cast = cast if cast.one_pass(stored=not gated) and self.x.size else plain
            if cast.of_made(*self.x.shape) if gated else scaled or cast is not plain:
                return self._by_library(cast, gated)
        return None

    def _by_library(self, cast: OperandCast, gated: bool) -> Operands:
        inputs: tuple[jax.Array | None, ...] = (self.x,)
        function, first = "quantize", 0
        if gated:
            assert self.made is not None
            inputs, function, first = self.made[1:], "quantize_gated", ACTIVATIONS[self.activation]

        def kernel(inputs, scale):
            return cuda.quantize_made(inputs, cast, scale, function, first)

        return self._run(kernel, inputs, cast)

    def _by_pallas(self, cast: OperandCast) -> Operands | None:
        """Makes x and casts it by one Pallas kernel; None where something else is chosen, and for delayed scaling."""
        if self.made is None or self.delayed is not None or not self.x.size:
            return None
        format, rows, columns = cast.format, cast.row is not None, cast.column is not None
        operation = "quantize_both" if rows and columns else "quantize" if rows else "quantize_columnwise"
        making = Making(self.activation, self.x.dtype.name, self.made.up is not None)
        backend = choice.choose(None, operation, format=format, eps=cast.eps, rotate=cast.rotates, making=making)
        if not isinstance(backend, Pallas):
            return None
        make = partial(backend.quantize_made, activation=self.activation, format=format, rows=rows, columns=columns)
        return self._run(lambda inputs, _: (*make(*inputs), None), self.made[1:], cast)

    def _run(self, kernel: Callable[..., Any], inputs: tuple[jax.Array | None, ...], cast: OperandCast) -> Operands:
        """Casts by `kernel(inputs, scale)` on CUDA devices, which gives (row, column, amax), by the definition elsewhere."""
        x, format = self.x, cast.format
        lengths = x.shape[1], x.shape[0]

        def definition(x, inputs, scale):
            found: list[Quantized | None] = [None, None]
            amax = multiplier = None
            if scale is not None:
                amax = XLA.amax(x, format=format).blocks.reshape(())
                multiplier, amax = delayed_multiplier(scale, amax, format, cast.eps), amax.view(jnp.float32)
            for way, turned in enumerate((x, rotate(x.mT) if cast.rotate else x.mT)):
                if cast[way] is not None:
                    parts = marked(XLA.quantize)(turned, None, multiplier, format=format, eps=cast.eps)
                    found[way] = align(parts, format, lengths[way]) if cast.laid[way] else parts
            return found[0], found[1], amax

        scale = self.delayed.scale if cast.given == "scale" and self.delayed is not None else None
        *parts, amax = explicit.on_device(lambda _, *given: kernel(*given), definition, x, inputs, scale)
        made: list[Side | None] = [None, None]
        for way, part in enumerate(parts):
            if part is not None and cast.laid[way]:
                made[way] = Aligned(part.codes, part.scales, format, lengths[way], np.dtype(x.dtype))
            elif part is not None:
                made[way] = wrap_parts(part, format, x, columnwise=bool(way))
        return Operands(made[0], made[1], amax)

    def _from_one_read(self, format: Format, stochastic: bool, rotate: bool) -> Pair:
        eps, key = eps_for(format, self.eps), None
        if stochastic:
            key = jnp.concatenate([jnp.asarray(words) for words in self.keys])
        row, column = ops.quantize_both(self.x, key, self._given(format), format=format, eps=eps, rotate=rotate, mark=True)
        return wrap_parts(row, format, self.x), wrap_parts(column, format, self.x, columnwise=True)

    def _one_direction(self, cast: Cast, *, columnwise: bool) -> Matrix:
        if cast.format is None:
            x = self.placement.gather_tokens(self.x) if self.over else self.x
            return x.mT if columnwise else x
        if self.sharding is not None:
            return self._planned(cast, columnwise=columnwise)
        key = self.keys[columnwise] if cast.stochastic else None
        given = self.multiplier if cast.rotate else self._given(cast.format)
        if not columnwise:
            return quantize_operand(self.x, cast, self.eps, key=key, multiplier=given)
        options = {"rotate": cast.rotate, "eps": eps_for(cast.format, self.eps), "mark": True}
        q = ops.quantize_columnwise(self.x, key, given, format=cast.format, **options)
        return wrap_parts(q, cast.format, self.x, columnwise=True)

    def _planned(self, cast: Cast, *, columnwise: bool) -> QuantizedArray:
        format = cast.format
        assert format is not None
        assert self.sharding is not None
        options = {
            "operand": "gradient" if self.gradient else "input",
            "data_axes": self.placement.data_axes,
            "columnwise": columnwise,
            "rotate": cast.rotate,
            "stochastic": cast.stochastic,
        }
        runs = self.placement.runs
        key = self.keys[columnwise] if cast.stochastic else None
        how = sharded.Options(key, eps_for(format, self.eps), self.x.dtype.name, self.multiplier)
        if not self.over:
            return sharded.quantize(self.x, plans.quantize_shards(format, self.sharding, **options), how)
        plan = plans.gather_activation(format, self.sharding, self.over, **options)
        if plan.reason is not None or (runs > 1 and columnwise and key is not None):
            # Random bits along tokens are indexed over all sequences together, and a rank has parts of each.
            return self._gathered()._one_direction(cast, columnwise=columnwise)  # pyright: ignore[reportReturnType]
        if runs == 1:
            return sharded.quantize(self.x, plan, how)
        rows, features = self.x.shape
        return _joined(sharded.quantize(self.x.reshape(runs, rows // runs, features), plan, how), columnwise=columnwise)

    def _gathered(self) -> _Operands:
        """Returns the same with all tokens, gathered in high precision."""
        whole = copy.copy(self)
        whole.x, whole.sharding, whole.over = self.placement.gather_tokens(self.x), None, ()
        return whole


def _joined(q: QuantizedArray, *, columnwise: bool) -> QuantizedArray:
    """Joins sequences [runs, tokens, features] or [runs, features, tokens] along the tokens, whose blocks are whole."""

    def join(part: jax.Array) -> jax.Array:
        runs, rows, columns = part.shape
        return part.swapaxes(0, 1).reshape(rows, runs * columns) if columnwise else part.reshape(runs * rows, columns)

    scales = q.scales.reshape(1, 1) if q.format.per_tensor else join(q.scales)
    columns = q.columns * q.codes.shape[0] if columnwise else q.columns
    return q.replace(codes=join(q.codes), scales=scales, columns=columns, sharding=None)


# ---- overflow


def is_finite(x: jax.Array, over: explicit.Axes = frozenset()) -> jax.Array:
    """Returns bool (): whether x contains no Inf on any rank of these mesh axes. A NaN has a NaN code or scale."""
    finite = ~jnp.isinf(x).any()
    return lax.pmin(finite.astype(jnp.int32), tuple(over)) == 1 if over else finite


def propagate(q: QuantizedArray, finite: jax.Array) -> QuantizedArray:
    """Makes all values of q NaN unless its source is `finite`: bool (), or [stack] for each matrix of a stack."""
    parts = unless(finite, Quantized(q.codes, q.scales, q.tensor_scale))
    return q.replace(scales=parts.scales, tensor_scale=parts.tensor_scale)


def propagate_rows(q: QuantizedArray, finite: jax.Array) -> QuantizedArray:
    """Makes rows of q NaN whose source isn't finite: bool [rows]; q has blocks of one row."""
    return q.replace(scales=jnp.where(finite[:, None], q.scales, nan_scale(q.scales)))
