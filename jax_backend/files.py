"""Parameter trees in .safetensors files, the same that NumPy and PyTorch read (`files.saving`).

A stack [layers, out, in] whose matrices have a scale per tensor each is as many arrays in a file, "NAME.0", "NAME.1", ..:
elsewhere an array has one such scale, whatever its shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from blockfp.array import QuantizedArray as NumpyArray
from blockfp.errors import BadFile
from blockfp.files import saving

from .arrays.array import QuantizedArray, is_quantized
from .params.params import shares_scale
from .params.placing import unshard_params
from .params.trees import describe, map_with_path, path_name


def save(
    path: str | PathLike[str],
    tree: Any,
    *,
    file_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a tree of arrays, quantized or not, to a .safetensors file, or to several; see `blockfp.save`.

    A leaf's name is its path with dots between ("layers.0.weight"). Sharded leaves are put together first, one at a time.
    A stack whose matrices have a scale per tensor each (`quantize_params` makes them for scan) is taken apart: "NAME.0", ..
    In a program of several processes each must be able to see every array.

    Args:
        path: name of the file, ending in .safetensors.
        tree: the arrays.
        file_bytes, metadata: as for `blockfp.save`.

    Raises:
        ValueError: an array of which this process sees a part, or two leaves of one path; the message names it.
    """
    check_visible(tree)
    tensors = {}
    for where, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_quantized):
        for name, array in _matrices(path_name(where), unshard_params(leaf)):
            if name in tensors:
                raise ValueError(f"two leaves have the same path, {name!r}, once it is written with dots")
            tensors[name] = array
    saving.write(Path(path), tensors, np.asarray, file_bytes, metadata or {})


def check_visible(tree: Any) -> None:
    """Raises ValueError, naming the path, where this process sees parts of an array only."""
    for where, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            raise ValueError(
                f"{path_name(where)} is on devices of several processes: save it by Orbax, whose checkpoints load on "
                "any mesh, or gather it first (jax.experimental.multihost_utils.process_allgather)"
            )


def load(path: str | PathLike[str], like: Any = None) -> Any:
    """Reads what `save` of any framework wrote.

    Args:
        path: as for `blockfp.load`.
        like: a tree of arrays, quantized arrays or their shapes (`jax.eval_shape`), whole; stacks are put together as it has
            them. By default the result is a dictionary by name.

    Returns:
        The arrays, on the default device: as a tree like `like`, or by name.

    Raises:
        blockfp.errors.BadFile: see `blockfp.load`; or a tensor of 64 bits whose values change in the 32 that JAX has without
            jax_enable_x64.
        ValueError: a leaf of `like` that isn't in the file, or is there with another shape, dtype or format; the message names
            its path.
    """
    found, narrowed = {}, {}
    for name, array in saving.read(Path(path)):
        found[name] = _to_jax(Path(path), name, array)
        if found[name].dtype != array.dtype:
            narrowed[name] = f" (it is {array.dtype} in the file, which JAX keeps with jax_enable_x64)"
    if like is None:
        return found

    def pick(name: str, leaf):
        if _is_stack(leaf) and name not in found:
            matrices = jax.eval_shape(lambda leaf: dict(_matrices(name, leaf)), leaf)
            parts = [pick(part, matrix) for part, matrix in matrices.items()]
            return jax.tree.map(lambda part, *parts: jnp.stack(parts).reshape(part.shape), leaf, *parts)
        if name not in found:
            raise ValueError(f"{path} has no tensor {name!r}")
        got, wanted = (describe(x) for x in (found[name], leaf))
        if got != wanted:
            raise ValueError(f"{path} has {name!r} as {got}, expected {wanted}{narrowed.get(name, '')}")
        return found[name]

    return map_with_path(pick, like)


def _is_stack(leaf: Any) -> bool:
    """Returns True for a stack of matrices that have a scale per tensor each."""
    return is_quantized(leaf) and leaf.ndim > 2 and leaf.format.has_tensor_scale and not shares_scale(leaf)


def _matrices(name: str, leaf: Any) -> Iterator[tuple[str, Any]]:
    """Yields (name, array) for what a leaf is in a file: itself, or each matrix of a stack."""
    if not _is_stack(leaf):
        yield name, leaf
        return
    for place in np.ndindex(*leaf.shape[:-2]):
        yield ".".join((name, *map(str, place))), jax.tree.map(lambda part, place=place: part[place], leaf)


def _to_jax(path: Path, name: str, array: np.ndarray | NumpyArray) -> jax.Array | QuantizedArray:
    if not isinstance(array, NumpyArray):
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
        if dtype == array.dtype:
            return jnp.asarray(array)
        with np.errstate(over="ignore", under="ignore"):
            narrow = array.astype(dtype)
        if not np.array_equal(narrow.astype(array.dtype), array, equal_nan=array.dtype.kind == "f"):
            problem = f"its values need {array.dtype}, and JAX without jax_enable_x64 has {dtype}"
            raise BadFile(path, f"{problem}: jax.config.update('jax_enable_x64', True) keeps them", name)
        return jnp.asarray(narrow)
    tensor_scale = None if array.tensor_scale is None else jnp.asarray(array.tensor_scale)
    codes, scales = jnp.asarray(array.codes), jnp.asarray(array.scales)
    return QuantizedArray(codes, scales, tensor_scale, array.format, array.columns, array.dtype)
