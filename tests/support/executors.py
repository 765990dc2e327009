"""Everything that carries the definition out, a row each, and the inputs on which each is held against it, bit for bit.

A test module of a room has its room's rows as its `executor`, and these tests as its own:

    @pytest.fixture(params=executors.of("torch"), ids=str)
    def executor(request):
        with request.param.ready() as executor:
            yield executor

    class TestEveryInput(executors.EveryInput): ...
"""

import hashlib
import re
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import pytest
from held_formats import FORMATS, OTHER_CHOICES
from same_bits import assert_same_bits
from samples import DTYPES, KINDS, all_patterns, sample

from blockfp.definition import layout, numerics
from blockfp.definition.numerics import Quantized
from blockfp.formats import Format
from blockfp.kernels import native, switch

BY_NAME = pytest.mark.parametrize("format", FORMATS, ids=str)
SHAPE = (133, 150)  # ragged along both axes for every block, and more than one block of each
RAGGED = ((2, 3, 33, 47), (1, 1), (3, 1, 129), (130, 3), (4, 15))
EMPTY = ((0, 32), (4, 0), (2, 0, 5), (0, 0), (0, 4, 8))
KEY = (0xDEADBEEF, 0x87654321)


def each_arithmetic() -> list[Format]:
    """Formats in which each element meets each of its scales, and which have each size of block."""
    seen, chosen = set(), []
    for format in FORMATS:
        facts = {(format.element, format.scale), format.block}
        if not facts <= seen:
            chosen.append(format)
            seen |= facts
    return chosen


ARITHMETIC = each_arithmetic()
OF_EVERY_DTYPE = [f for f in ARITHMETIC if "4over6" not in f.name]
"""Formats whose inputs have every dtype where formats share their arithmetic: 4/6 reads as NVFP4 does, and compiles long."""


class Executor(NamedTuple):
    """Two functions that quantize and dequantize several NumPy arrays of one shape and dtype.

    Attributes:
        quantize: `(arrays, format, key) -> [Quantized]`; key is None or two words.
        dequantize: `(parts, format, columns) -> {dtype: [values]}` of every output dtype.
        by_definition: whether formats share their arithmetic, which every dtype of inputs then need not meet in each.
    """

    quantize: Callable
    dequantize: Callable
    by_definition: bool = False


class Row(NamedTuple):
    """An executor's name, the room whose tests run it, and a context manager that makes it or skips the test."""

    name: str
    room: str
    ready: Callable

    def __str__(self):
        return self.name


ROWS: list[Row] = []


def of(room: str) -> list[Row]:
    """The rows of a room."""
    return [row for row in ROWS if row.room == room]


def row(name: str, room: str, *arguments):
    """Puts a context manager that yields an executor into the table, once for these arguments."""

    def add(make):
        ROWS.append(Row(name, room, lambda: contextmanager(make)(*arguments)))
        return make

    return add


def one_by_one(quantize, dequantize, by_definition=False) -> Executor:
    """Makes an executor of functions of one array, with the arguments of `numerics.quantize` and `numerics.dequantize`."""
    return Executor(
        lambda arrays, format, key: [quantize(x, format, key=key) for x in arrays],
        lambda parts, format, columns: {
            dtype: [dequantize(*each, format, dtype, columns=columns) for each in parts] for dtype in DTYPES
        },
        by_definition,
    )


@row("avx512", "kernels", "avx512")
@row("avx2", "kernels", "avx2")
@row("scalar", "kernels", "scalar")
def kernels(instruction_set):
    """The CPU kernels on NumPy arrays."""
    if not native.available():
        pytest.skip(native.status())
    if instruction_set not in native.instruction_sets():
        pytest.skip(f"this processor has no {instruction_set}")
    native.use_instruction_set(instruction_set)
    yield one_by_one(native.quantize, native.dequantize)
    native.use_instruction_set(native.instruction_sets()[0])


@row("kernels", "torch", True)
@row("definition", "torch", False)
def torch_face(by_kernels):
    """`blockfp.torch`, eager: its ops on kernels, or on the definition by torch's own operations."""
    from arrays import to_numpy, to_torch

    import blockfp.torch as bfp

    def quantize(x, format, key):
        q = bfp.quantize(to_torch(x), format, key=key)
        assert q.shape == x.shape
        return Quantized(*map(to_numpy, (q.codes, q.scales, q.tensor_scale)))

    def dequantize(codes, scales, tensor_scale, format, dtype, columns):
        import torch

        parts = map(to_torch, (codes, scales, tensor_scale))
        q = bfp.QuantizedTensor.from_parts(*parts, format=format, columns=columns, dtype=torch.float32)
        return to_numpy(q.dequantize(getattr(torch, dtype)))

    with ExitStack() as stack:
        if not by_kernels:
            stack.enter_context(switch.definition_only())
        elif not native.available():
            pytest.skip(native.status())
        yield one_by_one(quantize, dequantize, not by_kernels)


@row("xla", "jax", "xla")
@row("ffi", "jax", "ffi")
def jax_face(implementation):
    """`blockfp.jax`, vmapped and compiled: by XLA from the definition, whose programs are also read, or by the library."""
    import jax

    import blockfp.jax as bfp

    if implementation == "ffi":
        try:
            bfp.quantize(np.zeros((1, 32), np.float32), "mxint8", implementation="ffi")
        except RuntimeError as error:
            pytest.skip(str(error))
    programs = {}

    def run(key, function, *arguments):
        if key not in programs:
            programs[key] = read_program(function, *arguments) if implementation == "xla" else jax.jit(function)
        return jax.tree.map(np.asarray, programs[key](*arguments))

    def quantize(arrays, format, key):
        def one(x, key):
            q = bfp.quantize(x, format, key=key, implementation=implementation)
            return q.codes, q.scales, q.tensor_scale

        x, words = np.stack(arrays), None if key is None else np.array(key, np.uint32)
        parts = run((format, x.shape, x.dtype, key is None), jax.vmap(one, in_axes=(0, None)), x, words)
        return [Quantized(*(None if part is None else part[i] for part in parts)) for i in range(len(x))]

    def dequantize(parts, format, columns):
        def values(codes, scales, tensor_scale):
            q = bfp.QuantizedArray.from_parts(codes, scales, tensor_scale, format=format, columns=columns, dtype="float32")
            return {dtype: q.dequantize(dtype, implementation=implementation) for dtype in DTYPES}

        stacked = [None if each[0] is None else np.stack(each) for each in zip(*parts, strict=True)]
        return {dtype: list(each) for dtype, each in run((format, stacked[0].shape), jax.vmap(values), *stacked).items()}

    yield Executor(quantize, dequantize, implementation == "xla")


# XLA replaces a division by a product with a reciprocal; the others are inexact.
FORBIDDEN = re.compile(r"\b(divide|remainder|exponential|exponential-minus-one|log|log-plus-one|power|r?sqrt|cbrt)\(")


def read_program(function, *arguments):
    """JAX's compiled function, after a look at the program before and after XLA's optimizations."""
    import jax

    lowered = jax.jit(function).lower(*arguments)
    program = lowered.compile()
    for text in (lowered.compiler_ir("hlo").as_hlo_text(), program.as_text()):
        assert "ENTRY" in text
        found = FORBIDDEN.findall(text)
        assert not found, f"the program holds {', '.join(found)}"
        assert "custom-call(" not in text
    return program


@cache
def inputs(dtype: str) -> list[np.ndarray]:
    """18 arrays: every kind of sample and, of a 16-bit dtype, all its patterns, in order and shuffled."""
    arrays = [sample(kind, SHAPE, dtype) for kind in KINDS]
    if dtype == "float32":
        return arrays + [sample(kind, SHAPE, dtype, seed) for kind in ("random_bits", "exponents") for seed in range(1, 5)]
    patterns = all_patterns(dtype).reshape(-1)
    for order in (patterns, np.random.default_rng(1).permutation(patterns)):
        filled = np.zeros(4 * SHAPE[0] * SHAPE[1], order.dtype)
        filled[: order.size] = order
        arrays += list(filled.reshape(4, *SHAPE))
    return arrays


def foreign(format: Format, seed: int) -> Quantized:
    """Random bytes as codes and as scales: Inf, NaN, subnormal and negative scales, codes that are never written."""
    rng = np.random.default_rng(seed)

    def random(shape, dtype):
        size = np.dtype(dtype).itemsize
        return rng.integers(0, 256, (*shape[:-1], shape[-1] * size), dtype=np.uint8).view(dtype)

    tensor_scale = None
    if format.scale.two_level:
        named = np.array([1.0, 1e-40, 3e38, np.nan, -2.5, 3e-41], np.float32)
        tensor_scale = (named[seed] if seed < len(named) else random((1,), np.float32)[0]).reshape(())
    return Quantized(
        random(layout.codes_shape(SHAPE, format), np.uint8),
        random(layout.scales_shape(SHAPE, format), format.scale.dtype),
        tensor_scale,
    )


def hold(executor, arrays, format, key=None) -> list[Quantized]:
    """The executor quantizes arrays of one shape and dtype as the definition does; returns the results."""
    results = executor.quantize(arrays, format, key)
    for i, (got, x) in enumerate(zip(results, arrays, strict=True)):
        what = f"{format}, {x.dtype} array {i}, key {key}"
        hold_one(tuple(got), (format, key), (x,), lambda x=x: tuple(numerics.quantize(x, format, key=key)), what, x)
    return results


def hold_values(executor, parts, format, columns):
    """The executor dequantizes codes and scales of arrays of one shape as the definition does, to every dtype."""
    for dtype, each in executor.dequantize(parts, format, columns).items():
        for i, (got, q) in enumerate(zip(each, parts, strict=True)):
            want = partial(numerics.dequantize, *q, format, dtype, columns=columns)
            hold_one((got,), (format, dtype, columns), tuple(q), lambda want=want: (want(),), f"{format} to {dtype}, array {i}")


_defined: dict[tuple, bytes] = {}


def hold_one(got, options, given, define, what, source=None):
    """Asserts that a result is the definition's, whose digests this process keeps; other digests are compared in full."""
    key = (*options, digest_of(given))
    digest = digest_of(got)
    if _defined.get(key) != digest:
        assert_same_bits(got, define(), what, source)
        _defined[key] = digest


def digest_of(arrays) -> bytes:
    """A digest of the dtypes, shapes and bits of arrays, some of which may be None."""
    found = hashlib.blake2b(digest_size=20)
    for x in arrays:
        x = None if x is None else np.asarray(x)
        found.update(repr(None if x is None else (x.dtype.name, x.shape)).encode())
        found.update(b"" if x is None else x.tobytes())
    return found.digest()


class EveryInput:
    """Inputs by which every executor is held against the definition; of few shapes, because XLA compiles for each."""

    @BY_NAME
    def test_every_kind_of_input(self, executor, format):
        for dtype in DTYPES if format in OF_EVERY_DTYPE or not executor.by_definition else ("float32",):
            expected = hold(executor, inputs(dtype), format)
            # Codes and scales don't tell of which dtype they were made.
            if dtype == "float32":
                hold_values(executor, expected, format, SHAPE[1])
        # And some that quantize would not write.
        hold_values(executor, [foreign(format, seed) for seed in range(len(expected))], format, SHAPE[1])

    @BY_NAME
    def test_stochastic_rounding(self, executor, format):
        arrays = [sample(kind, (2, 3, 33, 47), "bfloat16") for kind in ("bf16_valued", "exponents", "special")]
        for key in (KEY, (0, 42)):
            hold(executor, arrays, format, key)

    # In square blocks one says as much as all.
    @pytest.mark.parametrize("format", [f for f in OTHER_CHOICES if not f.square or f is OTHER_CHOICES[-1]], ids=str)
    def test_other_choices_of_4_over_6(self, executor, format):
        arrays = [sample(kind, (21, 37), "bfloat16", seed) for kind in KINDS for seed in range(2)]
        hold_values(executor, hold(executor, arrays, format), format, 37)


class EveryShape:
    """Shapes, for executors that compile nothing."""

    @BY_NAME
    def test_leading_axes_ragged_and_empty(self, executor, format):
        for shape in (*RAGGED, *EMPTY):
            expected = hold(
                executor, [sample("exponents", shape, "bfloat16"), sample("bf16_valued", shape, "bfloat16")], format
            )
            hold_values(executor, expected, format, shape[-1])
