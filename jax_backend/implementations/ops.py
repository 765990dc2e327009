"""Jitted operations on plain arrays, without derivatives, which callers attach.

An `Op` chooses the backend and runs it; `Backend` documents the arguments. Static arguments give each format one compiled
function per shape and dtype. A key is data, so a new seed doesn't recompile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from blockfp.definition import numerics
from blockfp.definition.numerics import Amax, Quantized
from blockfp.definition.rounding import Key, key_words
from blockfp.formats import Format

from . import choice, cuda, explicit
from .backend import Backend, marked
from .explicit import vary, varying
from .xla import XLA

Result = TypeVar("Result")


class Op(Generic[Result]):
    """An operation of every backend; `name` is the method of `Backend`.

    It stops gradients, because JAX's derivative of a cast would round the cotangent.
    """

    def __init__(self, name: str, specs: Callable[..., Any], *, keyed: bool = False) -> None:
        """Makes the operation.

        `specs` maps the arguments to the results' PartitionSpecs on a mesh with Explicit axes. `keyed` means that the arrays
        are x, a key and an amax, of which the last two are optional.
        """

        def run(*arrays, backend: Backend, **options):
            arrays = lax.stop_gradient(arrays)
            mesh = explicit.mesh_of(*arrays)
            if mesh is None:
                return self._on(backend, options, *arrays)
            if mesh.size > 1 and not backend.asked:
                backend = XLA
            return explicit.left_to_xla(partial(self._on, backend, options), mesh, specs(*arrays, **options), *arrays)

        self.name, self._keyed = name, keyed
        run.__name__ = run.__qualname__ = name
        static = ("backend", "format", "eps", "nominal", "rotate", "mark", "dtype", "columns", "origin")
        self._jitted = jax.jit(run, static_argnames=static)

    def __call__(self, *arrays: Any, implementation: str | None = None, **options: Any) -> Result:
        """Runs the operation on the backend named `implementation`, or the first one that this machine supports.

        `arrays` and `options` are the arguments of the `Backend` method. Quantizing operations also take `mark`: whether scales
        become NaN if x contains an Inf (`backend.marked`). Raises ValueError or RuntimeError as `choice.choose`
        does.
        """
        if self._keyed:
            arrays = (*arrays, None, None)[:3]
            backend = choice.choose(implementation, self.name, stochastic=arrays[1] is not None, **options)
        else:
            backend = choice.choose(implementation, self.name, **options)
        return self._jitted(*arrays, backend=backend, **options)

    def _on(self, backend: Backend, options: dict[str, Any], *arrays: Any) -> Any:
        kernel = self._method(backend, options)
        if backend.platform is None:
            return kernel(*arrays)
        definition = self._method(XLA, options)
        kernel = _varying_like(definition, kernel)
        if backend.asked:
            return kernel(*arrays)
        return lax.platform_dependent(*arrays, **{backend.platform: kernel}, default=definition)

    def _method(self, backend: Backend, options: dict[str, Any]) -> Callable[..., Any]:
        own = {name: value for name, value in options.items() if name != "mark" or backend.marks}
        method = partial(getattr(backend, self.name), **own)
        return marked(method) if options.get("mark") and not backend.marks else method


def _varying_like(definition: Callable, kernel: Callable) -> Callable:
    """Returns the kernel with results that vary over the same mesh axes as the definition's inside shard_map."""

    def run(*arrays):
        results = kernel(*arrays)
        if not any(map(varying, jax.tree.leaves(arrays))):
            return results
        types = jax.make_jaxpr(definition)(*arrays).out_avals
        leaves, structure = jax.tree.flatten(results)
        return structure.unflatten(vary(x, t.mat.varying) for x, t in zip(leaves, types, strict=True))

    return run


amax: Op[Amax] = Op("amax", explicit.specs_of_amax)
quantize: Op[Quantized] = Op("quantize", explicit.specs_of_quantized, keyed=True)
quantize_columnwise: Op[Quantized] = Op("quantize_columnwise", explicit.specs_of_columnwise, keyed=True)
quantize_both: Op[tuple[Quantized, Quantized]] = Op("quantize_both", explicit.specs_of_both, keyed=True)
dequantize: Op[jax.Array] = Op("dequantize", explicit.specs_of_values)


_CACHED = 64 << 20
"""Bytes that may still lie in a GPU's cache when a kernel looks for their amax after they were made."""


def amax_in_passing(x: jax.Array, format: Format, count: int = 1) -> jax.Array | None:
    """Returns the amax of x for `quantize` if XLA had better find it as it makes x, one of `count` such matrices; else None.

    The CUDA library would read x from memory once more.
    """
    large = count * x.size * x.dtype.itemsize > _CACHED
    if not (large and format.per_tensor and choice.missing_product(0) is None):
        return None
    return amax(x, format=format, implementation="xla").blocks


@partial(jax.jit, static_argnames=("format", "columns"))
def transpose(codes: jax.Array, scales: jax.Array, *, format: Format, columns: int) -> tuple[jax.Array, jax.Array]:
    """Transposes codes and scales as `numerics.transpose` does, on every backend."""
    run = partial(numerics.transpose, format=format, columns=columns)
    mesh = explicit.mesh_of(codes, scales)
    if mesh is None and codes.size and choice.missing_product(0) is None:
        # XLA would transpose a scan's whole stack of weights before the loop, and copy a slice in each step.
        by_library = lambda codes, scales: (cuda.transpose(codes, format, columns), jnp.swapaxes(scales, -1, -2))  # noqa: E731
        return explicit.on_device(by_library, run, codes, scales)
    if mesh is None:
        return run(codes, scales)
    return explicit.left_to_xla(run, mesh, explicit.specs_of_transposed(codes, scales, format, columns), codes, scales)


def key_array(key: Key | None) -> jax.Array | np.ndarray | None:
    """Returns a key as an array of two uint32 words, or None.

    `key` is an integer seed, two uint32 words, or a typed key of `jax.random.key`. Raises ValueError for other types, and for
    typed keys of a generator other than threefry2x32. Traced words aren't checked.
    """
    if key is None:
        return None
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        generator = str(jax.random.key_impl(key))
        if generator != "threefry2x32":
            raise ValueError(
                f"key must be of generator threefry2x32, got a key of {generator}: "
                "use jax.random.key(seed, impl='threefry2x32')"
            )
        key = jax.random.key_data(key)
    elif isinstance(key, jax.Array) and key.ndim == 0:
        raise ValueError(
            f"key must be an integer seed, two uint32 words or a jax.random.key, got an array of {key.dtype} without axes: "
            "jax.random.fold_in(jax.random.key(seed), step) makes a key of a step"
        )
    if isinstance(key, jax.Array) and key.dtype == np.int64 and not isinstance(key, Tracer):
        key = np.asarray(key)
    if isinstance(key, jax.Array) and key.dtype == np.uint32 and key.shape == (2,):
        return key
    words = key_words(key)
    if isinstance(key, jax.Array):
        return jnp.asarray(key, jnp.uint32)
    return np.array([int(word) & 0xFFFFFFFF for word in words], np.uint32)
