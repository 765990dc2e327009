"""The part of Pallas' Mosaic GPU interface that the kernels use, which changes between JAX releases.

Mosaic GPU programs run in one warpgroup (128 threads); a *layout* distributes an array over its registers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import Any

import jax
from jax import lax

try:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu
except ImportError as error:
    # JAX 0.10 imports absl here without depending on it.
    raise ImportError(
        f"Pallas' Mosaic GPU backend can't be imported ({error}): install the module it names (JAX 0.10 needs absl-py), "
        'or use implementation="xla"'
    ) from error

_load: Any = plgpu.load
# JAX 0.10 requires this parameter, 0.11 accepts it, 0.12 dropped it.
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
    """Lets kernels traced in this block run on a CPU, in JAX's interpreter."""
    token = _interpreting.set(True)
    try:
        with _interpret():
            yield
    finally:
        _interpreting.reset(token)


def on_gpu() -> bool:
    """Returns whether the kernel being traced has a GPU's arithmetic."""
    return not _interpreting.get()


Barrier = plgpu.Barrier
Layout = Any
Ref = Any
slice_of = pl.ds


def row_layout(columns: int, vector: int) -> Layout:
    """Returns a layout of [rows, columns] for loads of `vector` neighbours, with adjacent lanes loading adjacent vectors.

    `columns` is a power of two; a row uses at most eight lanes, and a longer row wraps around. `vector` divides `columns`.
    """
    lanes = min(columns // vector, 8)
    if lanes == 1:
        return plgpu.Layout.TILED(plgpu.Tiling(((128, vector), (32, vector))), warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1)
    rows, width = 32 // lanes, lanes * vector
    tiling = plgpu.Tiling(((4 * rows, width), (rows, width), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


WGMMA = plgpu.Layout.WGMMA
"""Layout of [64 m, 8 n] that accesses swizzled shared memory, also transposed, without bank conflicts."""


def load(ref: Ref, index: Any, layout: Layout) -> jax.Array:
    """Loads ref[index] from global memory, with a separate load per register."""
    where = (ref, index) if _INDEX is not None and _INDEX.default is _INDEX.empty else (ref.at[index],)
    return _load(*where, layout=layout, optimized=False)


def store(ref: Ref, index: Any, value: jax.Array) -> None:
    """Stores an array to ref[index] in global memory, with a separate store per register.

    Before JAX 0.12 an assignment does this. Later versions require whole sectors, which the kernels' layouts don't write.
    """
    if _store is None:
        ref[index] = value
    else:
        _store(ref.at[index], value, optimized=False)


def load_rows(ref: Ref, index: Any) -> jax.Array:
    """Loads rows of a matrix in shared memory: all columns, or those that `index` has beside the rows."""
    return _load(ref.at[index], layout=WGMMA)


def load_transposed(ref: Ref, rows: Any) -> jax.Array:
    """Loads rows of a matrix in shared memory, all columns, transposed."""
    # Only 16-bit numbers can be transposed while loading from shared memory.
    return _load(ref.at[rows].transpose((1, 0)), layout=WGMMA, optimized=ref.dtype.itemsize == 2)


def spread(x: jax.Array, shape: Sequence[int], axes: Sequence[int], layout: Layout) -> jax.Array:
    """Broadcasts x, whose axes are `axes` of `shape`, along the other axes."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, axes), layout)


def call(
    body: Callable,
    *operands: jax.Array,
    out: Sequence[jax.ShapeDtypeStruct],
    grid: Sequence[int],
    scratch: Sequence[Any] = (),
    name: str,
) -> list[jax.Array]:
    """Runs a kernel with one warpgroup per program; `body` takes references to operands, outputs and scratch."""
    body.__name__ = name
    return plgpu.kernel(
        body,
        out_type=list(out),
        scratch_types=list(scratch),
        grid=tuple(grid),
        grid_names=tuple("ijk"[: len(grid)]),
    )(*operands)


def divided(refs: Sequence[Ref], *lengths: int) -> list[list[Ref]]:
    """Divides a kernel's references into lists of these lengths."""
    rest = iter(refs)
    return [list(islice(rest, length)) for length in lengths]


def program(axis: int) -> jax.Array:
    """Returns this program's position along an axis of the grid."""
    return lax.axis_index("ijk"[axis])


def tile(rows: int, columns: int, dtype: Any, swizzle: int = 128) -> Any:
    """Returns the type of a matrix in shared memory, swizzled for reading rows and columns without bank conflicts.

    `swizzle` is the number of contiguous bytes in a row, 32 to 128, and the minimum width of a slice.
    """
    swizzle = min(swizzle, columns * jax.numpy.dtype(dtype).itemsize)
    width = swizzle // jax.numpy.dtype(dtype).itemsize
    return plgpu.SMEM((rows, columns), dtype, transforms=(plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(swizzle)))


def fetch(pairs: Iterable[tuple[Ref, Ref]], barrier: Ref) -> None:
    """Copies each (source in global memory, target in shared memory) and waits; as many arrive at the barrier."""
    for source, target in pairs:
        plgpu.copy_gmem_to_smem(source, target, barrier)
    plgpu.barrier_wait(barrier)


def commit() -> None:
    """Waits until all threads have written to shared memory, which each may read then."""
    plgpu.commit_smem()


def send(*pairs: tuple[Ref, Ref]) -> None:
    """Copies each (source in shared memory, target in global memory) and waits until the sources are read."""
    commit()
    for source, target in pairs:
        plgpu.copy_smem_to_gmem(source, target)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
