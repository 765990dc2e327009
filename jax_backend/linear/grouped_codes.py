"""Codes and scales of grouped rows in the CUDA library's layout: one call for all groups, without the host.

`blockfp.definition.groups` defines the layout. Concatenated tiles of 128 rows have the same columns, so the other
implementations work on tiles: those for other devices, for casts without a kernel, and for second derivatives.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from blockfp.definition.groups import UNIT, columns_for, ordered
from blockfp.definition.layout import packed_columns
from blockfp.definition.numerics import Quantized
from blockfp.definition.recoding import keeps_codes, value_dtype
from blockfp.definition.rounding import COLUMNWISE, ROWWISE
from blockfp.definition.scaling import eps_for
from blockfp.formats import Format
from blockfp.kernels.operand_cast import cuda_rotates, given_of, operand_cast
from blockfp.recipes import HIGH_PRECISION, Cast

from ..arrays.array import QuantizedArray
from ..implementations import cuda, explicit
from .tiles import Scaling, Tiles, gather_rows, quantize_tiles, turn_tiles


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales", "tensor_scale"),
    meta_fields=("format", "columns", "dtype", "columnwise"),
)
@dataclass(frozen=True)
class GroupCodes:
    """Rows of groups, quantized along the rows or columns; or their values.

    Attributes:
        codes: uint8 [tokens, features], packed; columnwise [features, columns], each group padded with zeros to `UNIT`. Values
            are in `dtype`.
        scales: float32 [groups] for one scale per group, else one per block (`definition.groups`); None for values.
        tensor_scale: float32 [groups] for formats with two levels, else None.
        format: the format, or None for values.
        columns: codes per row, which packing hides.
        dtype: dtype of the original rows.
        columnwise: whether codes run along the columns.
    """

    codes: jax.Array
    scales: jax.Array | None
    tensor_scale: jax.Array | None
    format: Format | None
    columns: int
    dtype: np.dtype
    columnwise: bool

    @classmethod
    def of_tiles(cls, q: QuantizedArray | jax.Array, tiles: Tiles, *, columnwise: bool) -> GroupCodes:
        """Converts the result of `quantize_tiles` with tiles of `UNIT` rows; formats have blocks of one row."""
        count = columns_for(tiles.target.shape[0], tiles.sizes.shape[0]) // UNIT

        def laid(x: jax.Array) -> jax.Array:
            if columnwise:
                return x[:count].swapaxes(0, 1).reshape(x.shape[1], -1)
            return gather_rows(x.reshape(-1, x.shape[-1]), tiles.target)

        features = q.shape[1 if columnwise else 2]
        columns = count * UNIT if columnwise else features
        if not isinstance(q, QuantizedArray):
            return cls(laid(q), None, None, None, columns, np.dtype(q.dtype), columnwise)

        def of_groups(x: jax.Array) -> jax.Array:
            # An empty group has no tile; its scale is unused.
            first = (jnp.cumsum(tiles.filled) - tiles.filled) // UNIT
            return jnp.broadcast_to(x.reshape(-1), tiles.group.shape)[first]

        scales = of_groups(q.scales) if q.format.per_tensor else laid(q.scales)
        scales = _in_fours(scales.T) if ordered(q.format) else scales
        tensor_scale = None if q.tensor_scale is None else of_groups(q.tensor_scale)
        return cls(laid(q.codes), scales, tensor_scale, q.format, columns, q.dtype, columnwise)

    @classmethod
    def of_rows(cls, q: QuantizedArray, tiles: Tiles) -> GroupCodes:
        """Converts quantized rows [tokens, features]; a group that contains a NaN scale gets only NaN scales."""
        scales, tensor_scale, count = q.scales, q.tensor_scale, tiles.sizes.shape
        if q.format.per_tensor:
            scales = jnp.broadcast_to(scales.reshape(1), count)
        elif tensor_scale is not None:
            tensor_scale = jnp.broadcast_to(tensor_scale.reshape(1), count)
        else:
            nan = jnp.asarray(0xFF if q.format.scale.e8m0 else jnp.nan, scales.dtype)
            finite = (scales != nan) if q.format.scale.e8m0 else jnp.isfinite(scales)
            group = tiles.group_of_token()
            own = jnp.where(tiles.target >= 0, finite.all(axis=1).astype(jnp.int32), 1)
            of_groups = jax.ops.segment_min(own, group, num_segments=count[0])
            scales = jnp.where((of_groups[group] == 1)[:, None], scales, nan)
        scales = _in_fours(scales.T) if ordered(q.format) else scales
        return cls(q.codes, scales, tensor_scale, q.format, q.columns, q.dtype, False)

    @classmethod
    def turned(cls, q: QuantizedArray, tiles: Tiles, cast: Cast, scaling: Scaling) -> GroupCodes | None:
        """Quantizes the columnwise form of quantized rows (`blockfp.definition.recoding`)."""
        if cast.format is not None and keeps_codes(q.format, cast.format, cast.rotate):
            return cls.of_tiles(turn_tiles(q, tiles, cast, scaling), tiles, columnwise=True)
        return quantize_groups(q.dequantize(value_dtype(q.dtype.name)), tiles, (None, cast), scaling)[1]

    def tiles(self, tiles: Tiles) -> QuantizedArray | jax.Array:
        """Inverts `of_tiles`."""
        count = tiles.group.shape[0]

        def apart(x: jax.Array, unit: int) -> jax.Array:
            if not self.columnwise:
                return tiles.split(x)
            return _filled(x.reshape(x.shape[0], -1, unit).swapaxes(0, 1), count)

        if self.format is None:
            return apart(self.codes, UNIT)
        assert self.scales is not None
        if self.format.per_tensor:
            scales = self.scales[tiles.group][:, None, None]
        else:
            assert self.format.block is not None
            scales = self.scales[:, : self.codes.shape[0]].T if ordered(self.format) else self.scales
            scales = apart(scales, UNIT // self.format.block[1])
        tensor_scale = None if self.tensor_scale is None else self.tensor_scale[tiles.group]
        codes = apart(self.codes, packed_columns(UNIT, self.format.element.bits))
        columns = UNIT if self.columnwise else self.columns
        return QuantizedArray(codes, scales, tensor_scale, self.format, columns, self.dtype)


def _in_fours(scales: jax.Array) -> jax.Array:
    return jnp.pad(scales, ((0, 0), (0, -scales.shape[1] % 4)))


def _filled(x: jax.Array, count: int) -> jax.Array:
    return jnp.pad(x, ((0, max(count - x.shape[0], 0)), (0, 0), (0, 0)))[:count]


def quantize_groups(
    x: jax.Array, tiles: Tiles, casts: tuple[Cast | None, Cast | None], scaling: Scaling
) -> tuple[GroupCodes | None, GroupCodes | None]:
    """Quantizes groups of rows x [tokens, size] along the rows and the columns; a cast of None skips a direction."""
    row, column = casts
    if (
        row is not None
        and column is not None
        and row.format is column.format
        and _has_kernel(row, scaling, columnwise=False)
        and _has_kernel(column, scaling, columnwise=True)
    ):
        return _by_kernel(x, tiles, casts, scaling)
    return _one_direction(x, tiles, row, scaling, columnwise=False), _one_direction(x, tiles, column, scaling, columnwise=True)


def _has_kernel(cast: Cast, scaling: Scaling, *, columnwise: bool) -> bool:
    """Returns whether the library has a kernel for this cast of all groups."""
    format = cast.format
    if format is None or format.scale.four_over_six or (cast.rotate and not (columnwise and cuda_rotates(format))):
        return False
    # The library takes amaxes and indexes random bytes within the local features only.
    of_all = cast.stochastic or (format.has_tensor_scale and scaling.multiplier is None)
    return scaling.cut is None or not of_all


def _one_direction(x: jax.Array, tiles: Tiles, cast: Cast | None, scaling: Scaling, *, columnwise: bool) -> GroupCodes | None:
    if cast is None:
        return None
    if _has_kernel(cast, scaling, columnwise=columnwise):
        return _by_kernel(x, tiles, (None, cast) if columnwise else (cast, None), scaling)[columnwise]
    if cast == HIGH_PRECISION and not columnwise:
        return GroupCodes(x, None, None, None, x.shape[1], np.dtype(x.dtype), False)
    return _by_tiles(x, tiles, cast, scaling, columnwise=columnwise)


def _by_tiles(x: jax.Array, tiles: Tiles, cast: Cast, scaling: Scaling, *, columnwise: bool) -> GroupCodes:
    q = quantize_tiles(x, tiles, cast, scaling, COLUMNWISE if columnwise else ROWWISE)
    return GroupCodes.of_tiles(q, tiles, columnwise=columnwise)


def _by_kernel(
    x: jax.Array, tiles: Tiles, casts: tuple[Cast | None, Cast | None], scaling: Scaling
) -> tuple[GroupCodes | None, GroupCodes | None]:
    """Quantizes directions of the same format by the library's kernel, or by tiles on other devices."""
    (format,) = {cast.format for cast in casts if cast is not None}
    assert format is not None
    tokens, count = x.shape[0], tiles.sizes.shape[0]
    how = operand_cast(*casts, eps_for(format, scaling.eps), given=given_of(None, scaling.multiplier), keyed=True)
    arrays = scaling.multiplier, scaling.key if any(how.random) else None, scaling.coordinate, scaling.first_group

    def given(multiplier, key, coordinate, first) -> Scaling:
        return scaling._replace(multiplier=multiplier, key=key, coordinate=coordinate, first_group=first)

    def kernel(x, tiles, multiplier, *rest):
        keys = None
        if any(how.random):
            one = given(multiplier, *rest)
            each = [jax.vmap(lambda group, way=way: one.key_of(group, way))(jnp.arange(count)) for way in (ROWWISE, COLUMNWISE)]
            keys = jnp.stack(each, axis=1).astype(jnp.uint32)
        words = cuda.group_rows(jnp.cumsum(tiles.sizes), tokens)
        return [parts for parts in cuda.quantize_groups(x, words, keys, multiplier, how, count) if parts is not None]

    def definition(x, tiles, *rest):
        made = [_by_tiles(x, tiles, cast, given(*rest), columnwise=bool(i)) for i, cast in enumerate(casts) if cast is not None]
        return [Quantized(each.codes, each.scales, each.tensor_scale) for each in made]

    made = iter(explicit.on_device(kernel, definition, x, tiles, *arrays))
    columns = x.shape[1], columns_for(tokens, count)
    found: list[GroupCodes | None] = [None, None]
    for i, cast in enumerate(casts):
        if cast is not None:
            codes, scales, tensor_scale = next(made)
            found[i] = GroupCodes(codes, scales, tensor_scale, format, columns[i], np.dtype(x.dtype), bool(i))
    return found[0], found[1]
