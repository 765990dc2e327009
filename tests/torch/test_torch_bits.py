"""PyTorch, eager and compiled, has the bits of the definition on NumPy: codes, scales, dequantized values."""

from functools import cache

import numpy as np
import pytest
import torch
from samples import DTYPES, KINDS, all_patterns, bits_of, sample

import blockfp.torch as bfp
from blockfp.definition import layout, numerics
from blockfp.formats import FORMATS, Format

BY_NAME = pytest.mark.parametrize("format", FORMATS, ids=str)
FAMILIES = ("fp8_e4m3", "fp8_e5m2_128x128_fp32", "mxfp8_e4m3", "mxfp6_e3m2_32x32", "mxfp4_e2m1_floor", "mxint8", "nvfp4_16x16")
SHAPE = (133, 150)  # ragged along both axes for every block, and more than one block of each
WORDS = (0xDEADBEEF, 0x87654321)


def to_torch(x: np.ndarray) -> torch.Tensor:
    name = x.dtype.name
    if name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def to_numpy(x: torch.Tensor) -> np.ndarray:
    if x.dtype is torch.bfloat16:
        return x.view(torch.int16).numpy().view(DTYPES["bfloat16"])
    return x.numpy()


def assert_same(got: torch.Tensor, expected: np.ndarray):
    """Equal bits; if not, the first difference."""
    values = to_numpy(got)
    assert (values.shape, values.dtype) == (expected.shape, expected.dtype)
    different = np.argwhere(bits_of(values) != bits_of(expected))
    if len(different):
        at = tuple(different[0])
        pytest.fail(f"{len(different)} differ, first at {at}: {bits_of(values)[at]:#x}, not {bits_of(expected)[at]:#x}")


def assert_same_parts(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_same(a, b)


def parts(q):
    return q.codes, q.scales, q.tensor_scale


def assert_bits_of_the_definition(x: np.ndarray, format: Format, quantize=bfp.quantize, dequantize=None, key=None):
    """Through the face: quantize, then dequantize to every dtype, against NumPy."""
    expected = numerics.quantize(x, format, key=key)
    q = quantize(to_torch(x), format, key=key)
    assert q.shape == x.shape
    assert_same_parts(parts(q), expected)
    for dtype in DTYPES:
        values = numerics.dequantize(*expected, format, dtype, columns=x.shape[-1])
        name = getattr(torch, dtype)
        assert_same(q.dequantize(name) if dequantize is None else dequantize(q, name), values)


@cache
def inputs(dtype: str) -> list[np.ndarray]:
    arrays = [sample(kind, SHAPE, dtype) for kind in KINDS]
    return arrays if dtype == "float32" else [*arrays, all_patterns(dtype)]


@BY_NAME
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("route")
def test_eager(format, dtype):
    for x in inputs(dtype):
        assert_bits_of_the_definition(x, format)


@BY_NAME
@pytest.mark.usefixtures("route")
def test_leading_axes_ragged_and_empty(format):
    for shape in ((2, 3, 33, 47), (1, 1), (3, 1, 129), (130, 3), (0, 32), (4, 0), (2, 0, 5), (0, 0), (0, 3, 4)):
        assert_bits_of_the_definition(sample("exponents", shape, "bfloat16"), format)


@BY_NAME
@pytest.mark.usefixtures("route")
def test_strided_input(format):
    x = sample("exponents", (70, 140))
    expected = numerics.quantize(np.ascontiguousarray(x.T[3:, ::2]), format)
    strided = torch.from_numpy(x).mT[3:, ::2]
    assert_same_parts(parts(bfp.quantize(strided, format)), expected)


@BY_NAME
@pytest.mark.usefixtures("route")
def test_stochastic_rounding(format):
    words = torch.tensor(WORDS, dtype=torch.int64)
    for kind in ("bf16_valued", "exponents", "special"):
        x = sample(kind, (19, 150), "bfloat16")
        expected = numerics.quantize(x, format, key=WORDS)
        for key in (WORDS, WORDS[0] << 32 | WORDS[1], words, words.to(torch.uint32), words.to(torch.int32)):
            assert_same_parts(parts(bfp.quantize(to_torch(x), format, key=key)), expected)


@BY_NAME
@pytest.mark.usefixtures("route")
def test_foreign_codes_and_scales(format):
    """Every byte in codes and scales: codes that are never written, Inf and NaN scales, negative and subnormal ones."""
    rng = np.random.default_rng(3)
    shape = (70, 300)
    codes = rng.integers(0, 256, layout.codes_shape(shape, format), dtype=np.uint8)
    size = 4 if format.scale.dtype == "float32" else 1
    *leading, last = layout.scales_shape(shape, format)
    scales = rng.integers(0, 256, (*leading, last * size), dtype=np.uint8).view(format.scale.dtype)
    tensor_scale = np.array(3e-41, np.float32) if format.scale.two_level else None
    given = [None if part is None else torch.from_numpy(part) for part in (codes, scales, tensor_scale)]
    q = bfp.QuantizedTensor.from_parts(*given, format=format, columns=shape[1], dtype=torch.float32)
    for dtype in DTYPES:
        expected = numerics.dequantize(codes, scales, tensor_scale, format, dtype, columns=shape[1])
        assert_same(q.dequantize(getattr(torch, dtype)), expected)


def compiled(function, backend):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


@pytest.mark.parametrize(
    ("format", "backend"),
    [(f, "inductor" if f.name in FAMILIES else "aot_eager") for f in FORMATS],
    ids=lambda value: str(value),
)
def test_compiled(format, backend):
    quantize = compiled(bfp.quantize, backend)
    dequantize = torch.compile(lambda q, dtype: q.dequantize(dtype), fullgraph=True, backend=backend)
    for kind in ("exponents", "special"):
        assert_bits_of_the_definition(sample(kind, SHAPE, "bfloat16"), format, quantize, dequantize)
    both = torch.compile(lambda x, key: bfp.fake_quantize(x, format, key=key), fullgraph=True, backend=backend)
    x = sample("exponents", SHAPE, "bfloat16")
    expected = numerics.dequantize(*numerics.quantize(x, format, key=WORDS), format, "bfloat16", columns=SHAPE[1])
    assert_same(both(to_torch(x), torch.tensor(WORDS, dtype=torch.int64)), expected)


# array-api-compat caches namespaces with functools, which dynamo remarks on.
TRACES_NAMESPACES = pytest.mark.filterwarnings("ignore:.*lru_cache:UserWarning")


KINDS_THAT_TELL = ("bf16_valued", "integers", "exponents", "special", "subnormal")


@TRACES_NAMESPACES
@pytest.mark.parametrize("name", ["fp8_e5m2_128x128_fp32", "mxfp8_e4m3"])
def test_inductor_on_the_definition(name):
    """The definition itself, not as an op: what inductor fuses and reorders leaves its bits as they are."""
    quantize = compiled(lambda x: numerics.quantize(x, name), "inductor")
    for kind in KINDS_THAT_TELL:
        x = sample(kind, SHAPE, "bfloat16")
        assert_same_parts(quantize(to_torch(x)), numerics.quantize(x, name))


@TRACES_NAMESPACES
@pytest.mark.parametrize("name", ["mxfp6_e2m3", "mxint8", "nvfp4"])
def test_inductor_on_the_definition_backwards(name):
    dequantize = compiled(lambda *given: numerics.dequantize(*given, name, "bfloat16", columns=SHAPE[1]), "inductor")
    for kind in KINDS_THAT_TELL:
        q = numerics.quantize(sample(kind, SHAPE, "bfloat16"), name)
        given = [None if part is None else to_torch(np.asarray(part)) for part in q]
        assert_same(dequantize(*given), numerics.dequantize(*q, name, "bfloat16", columns=SHAPE[1]))
