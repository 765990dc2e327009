"""The format in other libraries' files: encoded in the names and bytes that they write.

Checkpoint libraries store a pytree's leaves, not its static data such as the format, and codes of E5M2 and E4M3 have the same
shape and dtype. So the format is part of the codes' name (Orbax and Flax write names), of the bytes that `jax.export` requests,
and for Equinox, which writes unnamed leaves, of an additional first leaf.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from blockfp.definition import layout
from blockfp.formats import Format
from blockfp.sharding.placement import Mesh, Partial, Replicate, Shard, Sharding, StridedShard


class Static(NamedTuple):
    """The static part of a `QuantizedArray`, stored in its tree structure."""

    format: Format
    columns: int
    dtype: np.dtype
    origin: tuple[int, int]
    sharding: Sharding | None


def static_of(q: Any) -> Static:
    """Returns the static part of a quantized array."""
    return Static(q.format, q.columns, q.dtype, q.origin, q.sharding)


def codes_name(static: Static) -> str:
    """Returns the name of the codes, such as "codes_mxfp8_e4m3_bfloat16_64" for 64 columns, plus the placement of a shard."""
    name = f"codes_{static.format}_{static.dtype}_{static.columns}"
    if tuple(static.origin) != (0, 0):
        name += "_at_{}_{}".format(*static.origin)
    if static.sharding is not None:
        # Only letters, digits and underscores, because names become paths.
        name += "_of_" + re.sub(r"\W+", "_", str(static.sharding)).strip("_")
    return name


_CODES = re.compile(
    r"codes_(?P<format>\w+?)_(?P<dtype>float32|float16|bfloat16)_(?P<columns>\d+)"
    r"(?:_at_(?P<row>\d+)_(?P<column>\d+))?(?P<part>_of_\w+)?"
)


def parse_codes_name(name: Any) -> Static | None:
    """Parses a name from `codes_name`; returns None for other names.

    Raises ValueError for an unknown format, and for parts of a sharded array, which only a restore target describes.
    """
    found = _CODES.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        return None
    if found["part"]:
        raise ValueError(
            f"{name} are the parts of an array sharded over a mesh: restore them into parameters sharded alike, or save "
            "blockfp.jax.unshard_params(params)"
        )
    origin = (int(found["row"] or 0), int(found["column"] or 0))
    return Static(Format.parse(found["format"]), int(found["columns"]), np.dtype(found["dtype"]), origin, None)


_PLACEMENTS = {kind.__name__: kind for kind in (Replicate, Shard, StridedShard, Partial)}


def to_bytes(static: Static) -> bytes:
    """Encodes the static part for `jax.export`."""
    whole: dict[str, Any] = static._asdict() | {"format": static.format.name, "dtype": static.dtype.name}
    if static.sharding is not None:
        placements = [[type(p).__name__, asdict(p)] for p in static.sharding.placements]
        whole["sharding"] = {"shape": static.sharding.shape, "mesh": asdict(static.sharding.mesh), "placements": placements}
    return json.dumps(whole).encode()


def from_bytes(data: bytes) -> Static:
    """Decodes the result of `to_bytes`."""
    whole = json.loads(data)
    sharding = whole["sharding"]
    if sharding is not None:
        mesh = Mesh(tuple(sharding["mesh"]["shape"]), tuple(sharding["mesh"]["names"]))
        placements = tuple(_PLACEMENTS[kind](**fields) for kind, fields in sharding["placements"])
        sharding = Sharding(tuple(sharding["shape"]), mesh, placements)
    format, dtype, origin = Format.parse(whole["format"]), np.dtype(whole["dtype"]), tuple(whole["origin"])
    return Static(format, whole["columns"], dtype, origin, sharding)


def to_leaf(static: Static) -> np.ndarray:
    """Encodes the codes' name as a leaf."""
    return np.frombuffer(codes_name(static).encode(), np.uint8)


def check_leaf(leaf: Any, static: Static) -> None:
    """Raises ValueError if a leaf from a file names another format; leaves that are not arrays pass."""
    if not isinstance(leaf, np.ndarray):
        return
    expected = codes_name(static)
    found = leaf.tobytes().decode(errors="replace") if leaf.dtype == np.uint8 else f"an array of {leaf.dtype} {leaf.shape}"
    if found != expected:
        raise ValueError(f"the file has {found}, expected {expected}: read it into an array of the format that was written")


# ---- small dtypes


def view_codes(codes: jax.Array, columns: int, format: Format) -> jax.Array:
    """Views codes as elements [..., rows, columns]; raises TypeError for 6-bit elements."""
    element = format.element
    if element.bits == 6:
        raise TypeError(
            f"JAX has no dtype for {element}: q.codes has four of them in three bytes, and "
            "blockfp.definition.layout.unpack one a byte"
        )
    elements = layout.unpack(codes, element.bits, columns)
    if element.packed:
        elements = elements.astype(jnp.uint4)
    return lax.bitcast_convert_type(elements, layout.dtype_of(element.native_dtype))


def view_scales(scales: jax.Array, format: Format) -> jax.Array:
    """Views scales as numbers; fp32 scales are unchanged."""
    return lax.bitcast_convert_type(scales, layout.dtype_of(format.scale.native_dtype))


def stored(codes: jax.Array, scales: jax.Array, format: Format) -> tuple[jax.Array, jax.Array]:
    """Converts codes and scales from the format's own dtypes to its storage dtypes; others are unchanged."""
    element = format.element
    if codes.dtype == element.native_dtype and not isinstance(codes, np.ndarray):
        as_integers = lax.bitcast_convert_type(codes, jnp.uint4 if element.packed else jnp.uint8)
        codes = layout.pack(as_integers.astype(jnp.uint8), element.bits)
    elif isinstance(codes, np.ndarray):
        codes = layout.stored_codes(codes, format)
    if scales.dtype == format.scale.native_dtype and scales.dtype != format.scale.dtype:
        scales = lax.bitcast_convert_type(scales, jnp.uint8)
    return codes, scales
