"""JAX's CUDA path on one CPU device, by emulated_kernels.py and callbacks: `with emulated_cuda_in_jax.launches(): ..`."""

import contextlib
import inspect
from unittest import mock

import emulated_groups
import emulated_kernels
import jax
import numpy as np
from arrays import to_torch
from blockfp.jax_backend.implementations import choice, cuda
from blockfp.jax_backend.linear import grouped_products, products

from blockfp.kernels import calls as calls_of
from blockfp.kernels import switch

_FUNCTIONS = {each.__name__: each for each in (*emulated_kernels.FUNCTIONS, *emulated_groups.FUNCTIONS)}
_MAY_BE_ABSENT = {
    "quantize": ("key", "amax", "recorded", "codes", "scales", "tensor_scale", "codes_t", "scales_t", "tensor_scale_t"),
    "quantize_aligned": ("codes", "scales", "codes_t", "scales_t", "stored_t", "stored_scales_t"),
    "quantize_gated_aligned": ("up", "codes", "scales", "codes_t", "scales_t"),
    "dequantize": ("tensor_scale",),
    "product": ("ends", "bias", "workspace"),
}
_MAY_BE_ABSENT["quantize_gated"] = ("up", *(name for name in _MAY_BE_ABSENT["quantize"]))
_MAY_BE_ABSENT["quantize_groups"] = (*_MAY_BE_ABSENT["quantize"], "keys", "overflows")

calls = []
"""The names of the functions that were called."""


@contextlib.contextmanager
def launches(**replaced):
    """Lets what runs on the CPU take the path of a Hopper GPU until the block ends, with `replaced` functions by name.

    Programs are compiled anew.
    """
    own = jax.lax.platform_dependent

    def on_cuda(*arrays, default=None, cuda=None, **others):
        if cuda is None:
            return own(*arrays, default=default, **others)
        # JAX lowers both, and refuses results of other types. Callbacks give none with the mesh of a shard_map.
        types = [jax.eval_shape(branch, *arrays) for branch in (cuda, default)]
        types = [jax.tree.map(lambda each: each.update(sharding=None), made) for made in types]
        assert str(types[0]) == str(types[1]), types
        return cuda(*arrays)

    with contextlib.ExitStack() as patches:
        for place, name, value in (
            (choice, "has_gpu", lambda: True),
            (choice, "would_be_partitioned", lambda: False),
            (cuda.CudaLibrary, "missing", lambda _: None),
            (cuda, "cublas_version", lambda: 130000),
            (cuda, "_call", _call),
            (products, "capability", lambda: (9, 0)),
            (grouped_products, "capability", lambda: (9, 0)),
            (jax.lax, "platform_dependent", on_cuda),
        ):
            patches.enter_context(mock.patch.object(place, name, value))
        patches.enter_context(mock.patch.dict(_FUNCTIONS, replaced))
        patches.callback(_forget)
        _forget()
        calls.clear()
        yield


def _forget():
    with switch.definition_only():
        pass
    jax.clear_caches()


def _call(name, out, *arrays, **attributes):
    name = name.removesuffix("_by_cublas")
    assert tuple(attributes) == calls_of.SIGNATURES[name][1]
    function, many = _FUNCTIONS[name], isinstance(out, list)
    outs = tuple(out) if many else (out,)
    names = list(inspect.signature(function).parameters)

    def carried_out(*inputs):
        calls.append(name)
        made = [np.full(one.shape, 113, one.dtype) for one in outs]
        given = [_tensor(np.array(x)) for x in inputs] + [_tensor(x) for x in made]
        absent = _MAY_BE_ABSENT.get(name, ())
        tensors = [None if not x.numel() and own in absent else x for own, x in zip(names, given, strict=False)]
        function(*tensors, *map(int, attributes.values()))
        return tuple(made) if many else made[0]

    found = jax.pure_callback(carried_out, outs if many else out, *arrays, vmap_method="sequential")
    return list(found) if many else found


def _tensor(x):
    """A torch tensor on the array's memory; the library's words are int32."""
    return to_torch(x.view(np.int32) if x.dtype == np.uint32 else x)
