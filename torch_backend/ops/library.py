"""The library of blockfp's custom ops, and functions that define an op: its schema, implementation and fake.

Ops take a format by name. A compiled graph calls each op once; every implementation gives the same bits.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.compiler.config as compiler_config
from torch import Tensor

import blockfp
from blockfp.definition import layout
from blockfp.definition.bits import FLOAT_DTYPES
from blockfp.formats import ELEMENTS, Format

from ..torch_internals import FakeTensor, disable_compiler, dispatch_modes, is_exporting, pytree


def digest_of(package: Path) -> str:
    """Returns a digest of a package's Python sources, those behind links included."""
    folders = sorted((folder, sorted(names)) for folder, _, names in os.walk(package, followlinks=True))
    digest = hashlib.blake2b(digest_size=8)
    for path in (Path(folder, name) for folder, names in folders for name in names if name.endswith(".py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()


# torch keeps compiled programs on disk and finds them by the names of ops. Without this tag, which all its caches read,
# programs that another blockfp compiled, with other defaults, fakes or subclasses, would run here.
compiler_config.cache_key_tag += f"blockfp {blockfp.__version__} {digest_of(Path(blockfp.__file__).parent)};"

# A Library with Python functions costs two thirds of `torch.library.custom_op`'s host time.
_library = torch.library.Library("blockfp", "DEF")

Register = Callable[[Callable[..., Any]], Callable[..., Any]]
Function = TypeVar("Function", bound=Callable[..., Any])


def define(schema: str) -> Any:
    """Defines an op and returns its callable."""
    name = _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    op = getattr(torch.ops.blockfp, name).default
    _library.impl(name, partial(_resolved, op), "Negative")
    return op


def _resolved(op: Any, *arguments: Any, **options: Any) -> Any:
    """Calls an op after resolving torch's negative bit, which marks tensors whose memory holds the negated values.

    Raises ValueError while a compiler traces, since Inductor ignores the bit.
    """

    def resolved(tensor: Tensor) -> Tensor:
        if tensor.is_neg() and isinstance(tensor, FakeTensor):
            raise ValueError(
                "a tensor has torch's negative bit (is_neg()), as parts of conjugated complex tensors have, and compilers take "
                "the negated values that its memory holds: give compiled code resolve_neg() of it"
            )
        return tensor.resolve_neg()

    return op(*pytree.tree_map_only(Tensor, resolved, arguments), **pytree.tree_map_only(Tensor, resolved, options))


def impl(op: Any) -> Register:
    """Registers the decorated function as an op's implementation on every device."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _library.impl(op.name().removeprefix("blockfp::"), function, "CompositeExplicitAutograd")
        return function

    return register


def fake(op: Any) -> Register:
    """Registers the decorated function as an op's fake, which returns outputs without values for tracing and meta tensors."""
    return torch.library.register_fake(op.name(), lib=_library)


def differentiate(op: Any) -> Register:
    """Registers the decorated function (ctx, *gradients) as an op's backward."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.register_autograd(op.name(), function, lib=_library)
        return function

    return register


def empty_parts(x: Tensor, shape: Sequence[int], format: Format, origin: tuple[int, int] = (0, 0)) -> list[Tensor]:
    """Returns uninitialized codes, scales and, in two-level formats, tensor scale of an array of this shape, on x's device."""
    # Not cached, since lengths may be symbolic.
    parts = layout.parts.__wrapped__(tuple(shape), format, origin)
    return [x.new_empty(part, dtype=getattr(torch, dtype)) for part, dtype in parts]


def is_real(tensor: Tensor) -> bool:
    """Returns whether a tensor has memory: it isn't a meta tensor, nor a compiler's stand-in.

    Other tensors must go through an op, so that it is traced or its fake runs.
    """
    return type(tensor) is Tensor and not tensor.is_meta


def runs_now(tensor: Tensor) -> bool:
    """Returns whether operations on a tensor run immediately and unobserved: the tensor is real and no dispatch mode is active.

    Modes (FLOP counters, selective checkpointing, tracers) only see operations that go through the dispatcher.
    """
    return type(tensor) is Tensor and not tensor.is_meta and not dispatch_modes()


def outside_graphs(function: Function) -> Function:
    """Makes compilers break their graph at a function."""
    return disable_compiler(function)


# ---- programs of torch.export


without_backward = define("without_backward(Tensor y, Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def outputs(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns a layer's outputs; in a torch.export program their backward raises.

    Without this op, gradients of everything before the layer would silently be missing there, and other gradients correct.
    """
    if not is_exporting():
        return y
    wanted = any(each is not None and each.requires_grad for each in (x, weight, bias))
    return without_backward(y, x, weight, bias) if wanted else y


@impl(without_backward)
def _copied(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return y.clone()


@fake(without_backward)
def _fake(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.empty_like(y)


@differentiate(without_backward)
def _refuse(ctx: Any, gradient: Tensor) -> None:
    raise NotImplementedError(
        "torch.export keeps the forward of blockfp's layers without their gradients: train the model itself, and export it "
        "afterwards; for a pipeline make torch.distributed.pipelining.PipelineStage of modules, without pipeline()"
    )


# ---- dtypes


DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in FLOAT_DTYPES)
"""Dtypes that can be quantized and dequantized to."""

# torch's 4-bit dtype holds two codes; it has no 6-bit dtype.
_CODES = {e.name: getattr(torch, e.native_dtype + ("_x2" if e.bits == 4 else ""), None) for e in ELEMENTS.values()}
_SCALES = {name: getattr(torch, name) for name in ("float8_e8m0fnu", "float8_e4m3fn", "float32")}


@cache
def name_of(dtype: torch.dtype) -> str:
    """Returns the core's name of a dtype: "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def view_codes(codes: Tensor, format: Format) -> Tensor:
    """Returns a view of codes as elements, 4-bit ones as pairs; raises TypeError for 6-bit elements."""
    dtype = _CODES[format.element.name]
    if dtype is None:
        raise TypeError(
            f"torch has no dtype for {format.element}: q.codes has four of them in three bytes, and "
            "blockfp.definition.layout.unpack one a byte"
        )
    return codes.view(dtype)


def view_scales(scales: Tensor, format: Format) -> Tensor:
    """Returns a view of scales as numbers; fp32 scales unchanged."""
    return scales.view(_SCALES[format.scale.native_dtype])


def stored(codes: Tensor, scales: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Returns codes and scales as uint8 if they have the format's native dtypes; other dtypes unchanged."""
    if codes.dtype is _CODES[format.element.name]:
        codes = codes.view(torch.uint8)
    if scales.dtype is _SCALES[format.scale.native_dtype] and format.scale.dtype == "uint8":
        scales = scales.view(torch.uint8)
    return codes, scales


# ---- memory


@lru_cache(maxsize=4096)
def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous array."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def maker(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Returns a function that makes a contiguous tensor of this kind, not filled, with new memory each time.

    It copies a tensor that has no memory of its own, which costs the host three quarters of what reading shape, dtype and
    device does.
    """
    shape = tuple(shape)
    like = torch.empty_strided(shape, strides_of(shape), dtype=dtype, device=device)
    like.untyped_storage().resize_(0)
    return partial(torch.empty_like, like)
