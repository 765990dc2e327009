"""The JAX face: a quantized array that is a pytree."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import GetAttrKey

from blockfp.array import BlockScaledArray
from blockfp.definition import checks, layout, numerics
from blockfp.formats import Format
from blockfp.sharding.placement import Sharding

from ..implementations import explicit, ops
from ..implementations.carriers import Watch, carrier_of, is_carrier
from ..implementations.derivatives import straight_through, without_gradient
from ..implementations.jax_internals import (
    CALCULATING,
    EQUINOX_DERIVATIVES,
    EQUINOX_FILE,
    JAX_GRAD,
    LINEN_AXES,
    OPTAX_LABELS,
    OPTAX_MASK,
    OPTAX_UPDATES,
    OPTAX_ZEROS,
    RULES,
    STOP_GRADIENT,
    flattening_caller,
)
from . import identity, storage
from .identity import stored, view_codes, view_scales


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedArray(BlockScaledArray):
    """An array stored as codes and scales: a pytree whose leaves are the codes and the scales.

    It passes through jit, vmap, scan, cond, checkpoint and shard_map like any tree of arrays. The constructor doesn't check its
    arguments, because JAX rebuilds trees with placeholders; `from_parts` does.

    Derivatives are straight-through: those of the original array, at every order, in reverse and forward mode. Codes are
    integers without derivatives, so a carrier without bytes (`tangent`) accompanies them if the array is known to be
    differentiated, and under this package's `value_and_grad` and `grad`. While JAX traces a function (jit, checkpoint, scan,
    ..) this isn't known yet. The array then has its derivative inside that function, but differentiating codes that left the
    function raises TypeError, unless `with_carrier` was called. An array that was quantized outside the differentiated function
    is a constant.

    Attributes:
        codes: uint8 [..., rows, bytes], packed along the last axis; `view_codes` returns them as elements.
        scales: uint8 or float32, one per block, of shape (1,) * ndim for one scale per tensor; `view_scales` returns numbers.
        tensor_scale: float32 of shape () for formats with two levels of scales (NVFP4), else None.
        format: the `Format`.
        columns: length of the last axis, which packed codes don't show; the only static length.
        dtype: dtype of the original and default of `dequantize()`.
        origin: (row, column) of the first element in the unsharded matrix.
        sharding: placement of the unsharded array on a mesh, or None. If set, the leaves are what a rank stores inside
            shard_map (see `sharded`), or all ranks' parts concatenated outside, and `origin` is unused.
        tangent: the carrier of the derivative, in the array's shape; None if nothing is differentiated.
    """

    codes: jax.Array
    scales: jax.Array
    tensor_scale: jax.Array | None
    format: Format
    columns: int
    dtype: np.dtype
    origin: tuple[int, int] = (0, 0)
    sharding: Sharding | None = None
    tangent: jax.Array | None = None

    # The carrier of an array that may turn out to be differentiated, and its watch; None if `tangent` is set. Not a leaf, so
    # that arrays made under jit have the same tree structure as others.
    _watched: tuple[jax.Array, Watch] | None = None

    _hints: ClassVar[tuple[str, ...]] = (
        "blockfp.jax.linear multiplies by a quantized weight",
        "blockfp.jax.with_masters makes optax's optimizers take quantized parameters",
        "jax.tree.map(lambda part: part[i], q) is one array of a stack",
    )

    def __post_init__(self):
        if "flax.serialization" in sys.modules and not storage.registered:
            storage.register(QuantizedArray)

    @classmethod
    def _from_parts(cls, codes, scales, tensor_scale, format: Format, columns: int, dtype, origin: tuple[int, int]):
        codes, scales = stored(codes, scales, format)
        checks.check_parts(codes, scales, tensor_scale, format, columns, origin)
        dtype = checks.nominal_dtype(dtype)
        tensor_scale = None if tensor_scale is None else _constant(tensor_scale)
        return cls(codes, _constant(scales), tensor_scale, format, columns, dtype, origin)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the original array.

        Raises:
            ValueError: the axes were moved, so the last axis of the codes doesn't hold the columns.
        """
        stored = layout.packed_columns(self.columns, self.format.element.bits)
        if self.sharding is None and self.codes.shape[-1] != stored:
            raise ValueError(self._misfit)
        return (*self.codes.shape[:-1], self.columns)

    @property
    def mT(self) -> QuantizedArray:
        """The array with its last two axes swapped: exact, without requantizing.

        Raises:
            ValueError: the blocks are not square.
        """
        self._check_whole()
        codes, scales = ops.transpose(self.codes, self.scales, format=self.format, columns=self.columns)
        rows, origin = self.codes.shape[-2], (self.origin[1], self.origin[0])
        sharding = None if self.sharding is None else self.sharding.transposed()
        flipped = QuantizedArray(codes, scales, self.tensor_scale, self.format, rows, self.dtype, origin, sharding)
        if self.tangent is not None:
            return flipped.replace(tangent=jnp.swapaxes(self.tangent, -1, -2))
        if self._watched is None:
            return flipped
        carrier, watch = self._watched
        return flipped.replace(_watched=(jnp.swapaxes(carrier, -1, -2), watch))

    @property
    def carrier(self) -> jax.Array | None:
        """The carrier of the original array's derivative, or None."""
        return self.tangent if self._watched is None else self._watched[0]

    def with_carrier(self) -> QuantizedArray:
        """Returns a copy with a leaf without bytes, `tangent`, which carries the gradient across function boundaries.

        Needed for arrays that are quantized inside a function that JAX traces (jit, checkpoint, scan, cond) and returned from
        it, if `jax.grad` is taken outside. Initial values of loops need it too.

        Example:
            >>> pack = jax.jit(lambda x: bfp.quantize(x, "mxfp8_e4m3").with_carrier())
            >>> jax.grad(lambda x: pack(x).dequantize().sum())(x)
        """
        if self.tangent is not None:
            return self
        if self._watched is None:
            return self.replace(tangent=carrier_of(explicit.zeros_beside(self.codes, self.shape, self.dtype)))
        carrier, watch = self._watched
        watch.live = True
        return self.replace(tangent=carrier)

    def without_carrier(self) -> QuantizedArray:
        """Returns the array as a constant, as `jax.lax.stop_gradient` does."""
        return replace(self, tangent=None, _watched=None)

    def view_codes(self) -> jax.Array:
        """Views the codes as elements [..., rows, columns] of a JAX dtype; code times block scale is the value.

        float8_e4m3fn, float8_e5m2 and int8 (64 times the value) reuse the bytes, without a copy in compiled programs;
        float4_e2m1fn is unpacked.

        Raises:
            TypeError: the elements have 6 bits, for which JAX has no dtype.
            ValueError: the array is stored in parts for a mesh.
        """
        self._check_view()
        return view_codes(self.codes, self.columns, self.format)

    def view_scales(self) -> jax.Array:
        """Views the scales as numbers: float8_e8m0fnu for MX, float8_e4m3fn for NVFP4 (multiply by `tensor_scale`), else
        float32.

        Raises:
            ValueError: the array is stored in parts for a mesh.
        """
        self._check_view()
        return view_scales(self.scales, self.format)

    def _check_view(self) -> None:
        if self.sharding is not None:
            raise ValueError("the parts that ranks store can't be viewed: view blockfp.jax.unshard_params(..)")
        self._check_whole()

    def dequantize(self, dtype=None, *, implementation: str | None = None) -> jax.Array:
        """Returns the values, rounded once to `dtype` (default: the dtype of the original).

        Args:
            dtype: float32, float16 or bfloat16.
            implementation: as for `quantize`.

        Raises:
            RuntimeError: `implementation` can't run on this machine.
            TypeError, ValueError: `dtype` is not float32, float16 or bfloat16.
            ValueError: this is a stack, made by vmap or scan, of arrays with one scale each.
        """
        if (self.scales.size > 1) if self.format.per_tensor else (self.tensor_scale is not None and self.tensor_scale.ndim):
            raise ValueError(
                f"a stack of {self.format} arrays, each with its own scale per tensor, can't be dequantized at once "
                f"(shape {self.shape}): use jax.vmap(lambda q: q.dequantize())"
            )
        self._check_whole()
        name = checks.output_dtype(self.dtype if dtype is None else dtype)
        parts = self.codes, self.scales, self.tensor_scale
        options = {"format": self.format, "dtype": name, "implementation": implementation}
        if self.sharding is not None:
            values = storage.dequantize(*parts, self.sharding, **options)
        else:
            values = ops.dequantize(*parts, columns=self.columns, origin=self.origin, **options)
        return values if self.carrier is None else straight_through(values, self.carrier)

    def _check_whole(self) -> None:
        """Raises ValueError if codes or scales don't fit the format, as after vmap or shard_map moved an axis."""
        if self.sharding is None and not self.format.per_tensor:
            expected = layout.scales_shape(self.shape, self.format, self.origin)
            if self.scales.shape != expected:
                raise ValueError(f"{self._misfit}: scales of {self.shape} have shape {expected}")

    @property
    def _misfit(self) -> str:
        return (
            f"codes {self.codes.shape} and scales {self.scales.shape} of {self.format} with {self.columns} columns don't fit; "
            "vmap takes and gives axes in front of the last two (out_axes=0), and shard_params cuts"
        )

    def replace(self, **changes) -> QuantizedArray:
        """Returns a copy with some attributes changed, unchecked."""
        if changes.get("tangent") is not None:
            changes["_watched"] = None
        return replace(self, **changes)

    def __repr__(self) -> str:
        # JAX also prints trees whose leaves are shardings, paths or placeholders.
        if not hasattr(self.codes, "shape"):
            return f"QuantizedArray({self.format}, codes={self.codes!r}, scales={self.scales!r})"
        where = "" if self.sharding is None else f", sharding={self.sharding}"
        shape = (*self.codes.shape[:-1], self.columns)
        return f"QuantizedArray({self.format}, shape={shape}, dtype={self.dtype}{where})"


def wrap_parts(parts: numerics.Quantized, format: Format, x, *, columnwise: bool = False) -> QuantizedArray:
    """Makes the QuantizedArray of x [..., rows, columns] or x.mT from its codes and scales, unchecked."""
    columns = x.shape[-2 if columnwise else -1]
    return QuantizedArray(parts.codes, parts.scales, parts.tensor_scale, format, columns, np.dtype(x.dtype))


def _constant(scales: jax.Array) -> jax.Array:
    if not jnp.issubdtype(scales.dtype, jnp.floating):
        return scales
    return without_gradient(
        scales, "scales given to from_parts have no gradient: multiply with them, or pass jax.lax.stop_gradient(scales)"
    )


def with_derivative(q: QuantizedArray, x) -> QuantizedArray:
    """Gives q the derivative of x if x is traced. q was quantized from x, or from the array that x carries."""
    if q.tangent is not None or q._watched is not None:
        q = q.without_carrier()
    if not isinstance(x, Tracer):
        return q
    watch = Watch()
    carrier = carrier_of(x, watch)
    watch.made()
    return q.replace(tangent=carrier) if watch.live else q.replace(_watched=(carrier, watch))


def is_quantized(leaf: object) -> bool:
    """Returns True for a QuantizedArray; for `is_leaf` of `jax.tree.map`."""
    return isinstance(leaf, QuantizedArray)


_REST = ("scales", "tensor_scale", "tangent")
_CODES, _FLOAT32 = _SCALES = np.dtype(np.uint8), np.dtype(np.float32)
_VALUES = (
    "blockfp.jax.dequantize_params(tree) has values; to map over a tree, keep quantized arrays whole with "
    "is_leaf=lambda leaf: isinstance(leaf, blockfp.jax.QuantizedArray)"
)


OF_PARTS = (
    "labels or a mask refer to codes and scales separately: make them for whole leaves, jax.tree.map(.., "
    "params, is_leaf=lambda leaf: isinstance(leaf, blockfp.jax.QuantizedArray)); or put optax.multi_transform "
    "or masked inside blockfp.jax.with_masters, which shows it plain arrays, with labels that are a function of these"
)


def label_of(labels: QuantizedArray) -> Any:
    """Returns the label that `jax.tree.map` gave to all parts of a quantized array; raises TypeError if they differ."""
    first, *others = (part for part in (labels.codes, labels.scales, labels.tensor_scale, labels.tangent) if part is not None)
    if hasattr(first, "dtype") or any(type(other) is not type(first) or other != first for other in others):
        raise TypeError(OF_PARTS)
    return first


def _flatten(q: QuantizedArray):
    caller = flattening_caller()
    if caller is not None and not hasattr(q.codes, "dtype"):
        if caller == OPTAX_LABELS:
            return (label_of(q),), None  # mapped over, it becomes the label of the whole leaf
        if caller in (OPTAX_MASK, OPTAX_ZEROS):
            raise TypeError(OF_PARTS)
    if caller == JAX_GRAD:
        raise TypeError(
            "jax.grad can't differentiate with respect to a QuantizedArray, whose codes are integers: use "
            "blockfp.jax.value_and_grad or blockfp.jax.grad, which give the gradient of the array that was quantized"
        )
    if caller == OPTAX_UPDATES:
        raise TypeError(
            "optax.apply_updates, which flax's TrainState.apply_gradients and nnx.Optimizer.update call too, can't add to "
            "codes: use blockfp.jax.apply_updates(params, updates), of an optimizer in blockfp.jax.with_masters"
        )
    if caller in EQUINOX_DERIVATIVES and q.tangent is None:
        raise TypeError(
            "eqx.filter_vjp and Equinox's Jacobians have no gradients for codes, which are integers: use "
            "blockfp.jax.grad, for a vjp of lambda model: jnp.vdot(f(model), cotangent); don't pass what isn't "
            "differentiated as an argument of the function"
        )
    if caller in LINEN_AXES:
        raise ValueError(
            "linen.scan would move an axis of codes and scales, which have others than the values of a QuantizedArray: stack "
            'layers along axis 0, variable_axes={"params": 0}, and scan over arrays along axis 0, in_axes=0'
        )
    if caller in CALCULATING:
        raise TypeError(f"{caller[0].partition('.')[0]} would calculate with the codes of a QuantizedArray: {_VALUES}")
    if q._watched is not None and caller != STOP_GRADIENT:
        q._watched[1].escaped = True
    leaves, static = (q.codes, q.scales, q.tensor_scale, q.tangent), identity.static_of(q)
    if caller == OPTAX_ZEROS:
        return (jax.ShapeDtypeStruct(q.shape, q.dtype),), None
    return ((identity.to_leaf(static), *leaves) if caller == EQUINOX_FILE else leaves), static


def _flatten_with_keys(q: QuantizedArray):
    if q._watched is not None:
        q._watched[1].escaped = True
    static = identity.static_of(q)
    keyed = [(GetAttrKey(identity.codes_name(static)), q.codes), *((GetAttrKey(name), getattr(q, name)) for name in _REST)]
    if flattening_caller() == EQUINOX_FILE:
        keyed.insert(0, (GetAttrKey("format"), identity.to_leaf(static)))
    return tuple(keyed), static


def _unflatten(static: identity.Static | None, leaves):
    if static is None:
        return leaves[0]
    *said, codes, scales, tensor_scale, tangent = leaves
    for leaf in said:
        identity.check_leaf(leaf, static)
    format, columns, dtype, origin, sharding = static
    if (
        getattr(codes, "dtype", _CODES) is not _CODES
        or getattr(scales, "dtype", _CODES) not in _SCALES
        or getattr(tensor_scale, "dtype", _FLOAT32) is not _FLOAT32
    ):
        _check_mapped(codes, scales, tensor_scale)
    # An array that isn't traced (any more), or a shape, is not differentiated.
    if is_carrier(tangent) and not isinstance(tangent, Tracer) and flattening_caller() not in RULES:
        tangent = None
    return QuantizedArray(codes, scales, tensor_scale, format, columns, dtype, origin, sharding, tangent)


def _check_mapped(codes, scales, tensor_scale) -> None:
    """Raises TypeError if a mapped tree has float codes or scales of another dtype; results without axes pass."""
    if getattr(codes, "ndim", 0) < 2:
        return
    for name, part, own in (("codes", codes, _CODES), ("scales", scales, _FLOAT32), ("tensor_scale", tensor_scale, _FLOAT32)):
        dtype = getattr(part, "dtype", own)
        if dtype != own and jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"{name} of a QuantizedArray, {own}, became {dtype}: they aren't values. {_VALUES}")


jax.tree_util.register_pytree_with_keys(QuantizedArray, _flatten_with_keys, _unflatten, _flatten)
jax.export.register_pytree_node_serialization(
    QuantizedArray,
    serialized_name="blockfp.jax.QuantizedArray",
    serialize_auxdata=identity.to_bytes,
    deserialize_auxdata=identity.from_bytes,
)
