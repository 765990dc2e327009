"""PyTorch, eager and compiled, has the bits of the definition on NumPy: codes, scales, dequantized values."""

import executors
import numpy as np
import pytest
import torch
from arrays import to_numpy, to_torch
from executors import BY_NAME, SHAPE
from executors import KEY as WORDS
from same_bits import assert_same_bits, assert_same_parts
from samples import DTYPES, sample
from sharded import GEOMETRIES

import blockfp.torch as bfp
from blockfp.definition import numerics

FAMILIES = ("fp8_e4m3", "fp8_e5m2_128x128_fp32", "mxfp8_e4m3", "mxfp6_e3m2_32x32", "mxfp4_e2m1_floor", "mxint8", "nvfp4_16x16")


@pytest.fixture(params=executors.of("torch"), ids=str)
def executor(request):
    with request.param.ready() as executor:
        yield executor


class TestEveryInput(executors.EveryInput, executors.EveryShape):
    """Eager, by the kernels and by the definition."""


def assert_bits_of_the_definition(x: np.ndarray, format: str, quantize=bfp.quantize, dequantize=None):
    """Through the face: quantize, then dequantize to every dtype, against NumPy."""
    expected = numerics.quantize(x, format)
    q = quantize(to_torch(x), format)
    assert q.shape == x.shape
    assert_same_parts(q, expected)
    for dtype in DTYPES:
        values = numerics.dequantize(*expected, format, dtype, columns=x.shape[-1])
        name = getattr(torch, dtype)
        assert_same_bits(to_numpy(q.dequantize(name) if dequantize is None else dequantize(q, name)), values)


@BY_NAME
@pytest.mark.usefixtures("route")
def test_strided_input(format):
    x = sample("exponents", (70, 140))
    expected = numerics.quantize(np.ascontiguousarray(x.T[3:, ::2]), format)
    strided = torch.from_numpy(x).mT[3:, ::2]
    assert_same_parts(bfp.quantize(strided, format), expected)


@pytest.mark.parametrize("format", FAMILIES)
@pytest.mark.usefixtures("route")
def test_every_form_of_a_key(format):
    words = torch.tensor(WORDS, dtype=torch.int64)
    for kind in ("bf16_valued", "exponents", "special"):
        x = sample(kind, (19, 150), "bfloat16")
        expected = numerics.quantize(x, format, key=WORDS)
        for key in (WORDS, WORDS[0] << 32 | WORDS[1], words, words.to(torch.uint32), words.to(torch.int32)):
            assert_same_parts(bfp.quantize(to_torch(x), format, key=key), expected)


def compiled(function, backend):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


@pytest.mark.parametrize(
    ("format", "backend"),
    [*((name, "inductor") for name in FAMILIES), *((f.name, "aot_eager") for f in GEOMETRIES if f.name not in FAMILIES)],
    ids=lambda value: str(value),
)
def test_compiled(format, backend):
    """One format of each geometry: to a compiler the format is a name, and the op rounds as it does in eager code."""
    quantize = compiled(bfp.quantize, backend)
    dequantize = torch.compile(lambda q, dtype: q.dequantize(dtype), fullgraph=True, backend=backend)
    for kind in ("exponents", "special"):
        assert_bits_of_the_definition(sample(kind, SHAPE, "bfloat16"), format, quantize, dequantize)
    both = torch.compile(lambda x, key: bfp.fake_quantize(x, format, key=key), fullgraph=True, backend=backend)
    x = sample("exponents", SHAPE, "bfloat16")
    expected = numerics.dequantize(*numerics.quantize(x, format, key=WORDS), format, "bfloat16", columns=SHAPE[1])
    assert_same_bits(to_numpy(both(to_torch(x), torch.tensor(WORDS, dtype=torch.int64))), expected)


@pytest.fixture
def two_threads():
    """Inductor writes parallel loops; elsewhere in the tests torch has one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


# array-api-compat caches namespaces with functools, which dynamo remarks on.
TRACES_NAMESPACES = pytest.mark.filterwarnings("ignore:.*lru_cache:UserWarning")


KINDS_THAT_TELL = ("bf16_valued", "integers", "exponents", "special", "subnormal")


@TRACES_NAMESPACES
@pytest.mark.parametrize("name", ["fp8_e5m2_128x128_fp32", "mxfp8_e4m3"])
@pytest.mark.usefixtures("two_threads")
def test_inductor_on_the_definition(name):
    """The definition itself, not as an op: what inductor fuses and reorders leaves its bits as they are."""
    quantize = compiled(lambda x: numerics.quantize(x, name), "inductor")
    for kind in KINDS_THAT_TELL:
        x = sample(kind, SHAPE, "bfloat16")
        assert_same_parts(numerics.Quantized(*quantize(to_torch(x))), numerics.quantize(x, name))


@TRACES_NAMESPACES
@pytest.mark.parametrize("name", ["mxfp6_e2m3", "mxint8", "nvfp4"])
@pytest.mark.usefixtures("two_threads")
def test_inductor_on_the_definition_backwards(name):
    dequantize = compiled(lambda *given: numerics.dequantize(*given, name, "bfloat16", columns=SHAPE[1]), "inductor")
    for kind in KINDS_THAT_TELL:
        q = numerics.quantize(sample(kind, SHAPE, "bfloat16"), name)
        given = [None if part is None else to_torch(np.asarray(part)) for part in q]
        assert_same_bits(to_numpy(dequantize(*given)), numerics.dequantize(*q, name, "bfloat16", columns=SHAPE[1]))
