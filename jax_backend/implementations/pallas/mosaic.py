"""The part of Pallas' Mosaic GPU interface that the kernels need, which moves between releases of JAX, in one place.

Mosaic GPU is written for one warpgroup (128 threads): an array in a kernel is spread over its registers by a *layout*.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
from jax import lax

try:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu
except ImportError as error:
    # JAX 0.10 imports absl there without depending on it.
    raise ImportError(
        f"Pallas' Mosaic GPU backend can't be imported ({error}): install the module it names (JAX 0.10 needs absl-py), "
        'or use implementation="xla"'
    ) from error

_load: Any = plgpu.load
# JAX 0.10 demands one, 0.11 takes one, 0.12 has none.
_INDEX = inspect.signature(_load).parameters.get("idx")

_store: Any = getattr(plgpu, "store", None)

# JAX 0.10 can't read swizzled shared memory transposed.
CAN_TRANSPOSE = jax.__version_info__ >= (0, 11)

_interpret: Any = getattr(plgpu, "force_gpu_interpret_mode", None)
CAN_INTERPRET = _interpret is not None
"""Whether JAX can run kernels on a CPU."""

_interpreting: ContextVar[bool] = ContextVar("_interpreting", default=False)


@contextmanager
def interpreted() -> Iterator[None]:
    """Lets kernels that are traced in this block run on a CPU, by JAX's interpreter."""
    token = _interpreting.set(True)
    try:
        with _interpret():
            yield
    finally:
        _interpreting.reset(token)


def on_gpu() -> bool:
    """Returns True where a kernel that is traced now has a GPU's arithmetic."""
    return not _interpreting.get()


Barrier = plgpu.Barrier
Layout = Any
Ref = Any
slice_of = pl.ds


def row_layout(columns: int, vector: int) -> Layout:
    """Layout of [rows, columns] for loads of `vector` neighbours: a lane's loads lie side by side with the next lane's.

    Args:
        columns: power of two; a row takes at most eight lanes, a longer one goes around several times.
        vector: elements a lane holds side by side; divides `columns`.
    """
    lanes = min(columns // vector, 8)
    if lanes == 1:
        return plgpu.Layout.TILED(plgpu.Tiling(((128, vector), (32, vector))), warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1)
    rows, width = 32 // lanes, lanes * vector
    tiling = plgpu.Tiling(((4 * rows, width), (rows, width), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


WGMMA = plgpu.Layout.WGMMA
"""Layout of [64 m, 8 n] that reads and writes swizzled shared memory, transposed too, without bank conflicts."""


def load(ref: Ref, index: Any, layout: Layout) -> jax.Array:
    """Loads ref[index] from global memory, each register by a load of its own."""
    where = (ref, index) if _INDEX is not None and _INDEX.default is _INDEX.empty else (ref.at[index],)
    return _load(*where, layout=layout, optimized=False)


def store(ref: Ref, index: Any, value: jax.Array) -> None:
    """Stores an array as ref[index] in global memory, each register by a store of its own.

    Before JAX 0.12 an assignment does that. From then on it asks for whole sectors, which the kernels' layouts don't write.
    """
    if _store is None:
        ref[index] = value
    else:
        _store(ref.at[index], value, optimized=False)


def load_rows(ref: Ref, rows: Any) -> jax.Array:
    """Loads rows of a matrix in shared memory (all columns)."""
    return _load(ref.at[rows], layout=WGMMA)


def load_transposed(ref: Ref, rows: Any) -> jax.Array:
    """Loads rows of a matrix in shared memory (all columns), with the axes swapped."""
    # Only 16-bit numbers can be transposed on their way from shared memory.
    return _load(ref.at[rows].transpose((1, 0)), layout=WGMMA, optimized=ref.dtype.itemsize == 2)


def spread(x: jax.Array, shape: Sequence[int], axes: Sequence[int], layout: Layout) -> jax.Array:
    """Repeats x, whose axes are `axes` of `shape`, along the others."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, axes), layout)


def call(
    body: Callable,
    *operands: jax.Array,
    out: Sequence[jax.ShapeDtypeStruct],
    grid: Sequence[int],
    scratch: Sequence[Any] = (),
    name: str,
) -> list[jax.Array]:
    """Runs a kernel of one warpgroup a program; `body` takes the operands' references, the outputs' and the scratch."""
    body.__name__ = name
    return plgpu.kernel(
        body,
        out_type=list(out),
        scratch_types=list(scratch),
        grid=tuple(grid),
        grid_names=tuple("ijk"[: len(grid)]),
    )(*operands)


def program(axis: int) -> jax.Array:
    """This program's position along an axis of the grid."""
    return lax.axis_index("ijk"[axis])


def tile(rows: int, columns: int, dtype: Any, swizzle: int = 128) -> Any:
    """A matrix in shared memory, swizzled so that rows and columns of it can be read without bank conflicts.

    Args:
        rows: rows.
        columns: columns.
        dtype: dtype.
        swizzle: bytes of a row that belong together, 32 to 128: the least that a part of it may be wide.
    """
    swizzle = min(swizzle, columns * jax.numpy.dtype(dtype).itemsize)
    width = swizzle // jax.numpy.dtype(dtype).itemsize
    return plgpu.SMEM((rows, columns), dtype, transforms=(plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(swizzle)))


def fetch(source: Ref, target: Ref, barrier: Ref) -> None:
    """Copies from global into shared memory and waits for it."""
    plgpu.copy_gmem_to_smem(source, target, barrier)
    plgpu.barrier_wait(barrier)


def send(*pairs: tuple[Ref, Ref]) -> None:
    """Copies (source in shared memory, target in global memory) and waits until the sources are read."""
    plgpu.commit_smem()
    for source, target in pairs:
        plgpu.copy_smem_to_gmem(source, target)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
