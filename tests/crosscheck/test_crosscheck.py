"""Comparison of backends: agreement where there is some, and every planted difference found and located."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from held_formats import FORMATS
from same_bits import assert_same_bits
from samples import bits_of, sample

from blockfp.check import crosscheck, measure, pieces
from blockfp.check.backends import BACKENDS, WHERE_NAMED
from blockfp.check.crosscheck import Definition
from blockfp.definition import layout, numerics
from blockfp.errors import BadBackend
from blockfp.formats import Format


class Changed(Definition):
    """The definition, with one thing changed in the pieces whose largest value is above 5."""

    name = "changed"

    def __init__(self, part=None, change=None):
        self.part, self.change = part, change

    def quantize(self, x, format):
        q = numerics.quantize(x, format)
        if self.part in q._fields and np.max(x) > 5:
            q = q._replace(**{self.part: self.change(getattr(q, self.part).copy())})
        return q

    def dequantize(self, q, format, dtype, columns):
        values = numerics.dequantize(*q, format, dtype, columns=columns)
        return self.change(values.copy()) if self.part == "values" and values.max() > 5 else values


def flip(index):
    def change(array):
        array.view(f"u{array.itemsize}")[index] ^= 1
        return array

    return change


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 256 * 64)


@pytest.fixture
def x(small_pieces):
    """512 x 64 in two pieces; the largest value is in the second."""
    x = np.random.default_rng(0).standard_normal((512, 64)).astype(np.float32)
    x[300, 40] = 6.0
    return x


def only_difference(x, format, backend):
    result = crosscheck.check(x, format, [Definition(), backend])
    assert not result.identical
    return result.differences[0]


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2_128x128", "mxfp6_e3m2", "mxint8_32x32", "nvfp4"])
@pytest.mark.parametrize("kind", ["bf16_valued", "exponents", "special"])
def test_backends_here_agree(format, kind):
    backends = []
    for name, load in BACKENDS.items():
        if name in WHERE_NAMED:
            continue
        try:
            backends.append(load())
        except ImportError:
            continue
    x = sample(kind, (67, 133), "bfloat16")
    result = crosscheck.check(x, format, backends)
    assert result.identical, [str(d) for d in result.differences]
    assert result.statistics.elements == x.size


def test_equal_backends_give_no_difference(x):
    for format in FORMATS:
        assert crosscheck.check(x, format, [Definition(), Changed()]).identical


def test_a_changed_code_is_located(x):
    found = only_difference(x, "mxfp8_e4m3", Changed("codes", flip((44, 40))))
    code = numerics.quantize(x, "mxfp8_e4m3").codes[300, 40]
    assert (found.backend, found.part, found.index) == ("changed", "codes", (300, 40))
    assert (found.input, found.expected, found.found) == ("0x40c00000", f"0x{code:02x}", f"0x{code ^ 1:02x}")


def test_a_changed_packed_code_is_located_by_element(x):
    found = only_difference(x, "mxfp4_e2m1", Changed("codes", lambda codes: codes ^ np.uint8(0x10)))
    assert (found.part, found.index) == ("codes", (256, 1))
    assert found.input == f"0x{bits_of(x)[256, 1]:08x}"


def test_a_changed_scale_is_located_by_block(x):
    found = only_difference(x, "mxfp8_e4m3_32x32", Changed("scales", flip((1, 1))))
    assert (found.part, found.index) == ("scales", (9, 1))
    assert found.input == "0x40c00000"


def test_a_changed_tensor_scale_is_found(x):
    found = only_difference(x, "nvfp4", Changed("tensor_scale", flip(())))
    assert (found.part, found.index, found.input) == ("tensor_scale", (), "0x40c00000")
    assert "tensor_scale of input" in str(found)


def test_a_changed_value_is_located(x):
    found = only_difference(x.astype(ml_dtypes.bfloat16), "mxfp8_e4m3", Changed("values", flip((100, 7))))
    assert (found.part, found.index) == ("values", (356, 7))
    assert len(found.expected) == len("0x0000")


def test_changed_padding_is_told_from_codes(small_pieces):
    x = np.full((128, 7), 6.0, np.float32)
    found = only_difference(x, "mxfp4_e2m1", Changed("codes", flip((3, 3)))).part
    assert found == "codes"
    found = only_difference(x, "mxfp4_e2m1", Changed("codes", lambda codes: codes | np.array([0, 0, 0, 0xF0], np.uint8)))
    assert (found.part, found.index, found.input) == ("padding", (0, 3), None)


@pytest.mark.parametrize("change", [lambda codes: codes[..., :-1], lambda codes: codes.astype(np.int16), lambda _: None])
def test_another_shape_or_dtype_is_a_difference(x, change):
    backend = Changed()
    backend.quantize = lambda x, format: (q := numerics.quantize(x, format))._replace(codes=change(q.codes))
    backend.dequantize = lambda q, format, dtype, columns: np.zeros((1, 1), np.float32)
    found = crosscheck.check(x, "mxfp8_e4m3", [Definition(), backend]).differences
    assert [(d.part, d.index) for d in found] == [("codes", None), ("values", None)]
    assert "uint8 of shape (256, 64)" in str(found[0])


def test_each_backend_and_part_is_reported_once(x):
    x[10, 3] = 7.0
    everything = [Changed(part, lambda array: array.view(f"u{array.itemsize}") ^ 1) for part in ("codes", "values")]
    everything[0].change = flip((..., slice(None)))
    everything[1].change = flip((..., slice(None)))
    everything[1].name = "other"
    found = crosscheck.check(x, "mxfp8_e4m3", [Definition(), *everything]).differences
    assert [(d.backend, d.part, d.index) for d in found] == [
        ("changed", "codes", (0, 0)),
        ("changed", "values", (0, 0)),
        ("other", "values", (0, 0)),
    ]


def test_a_failing_backend_says_which(x):
    broken = SimpleNamespace(name="broken", quantize=lambda x, format: 1 / 0)
    where = r"backend 'broken', format mxfp8_e4m3, float32 array of shape \(256, 64\): ZeroDivisionError: division by zero"
    with pytest.raises(BadBackend, match=where) as error:
        crosscheck.check(x, "mxfp8_e4m3", [Definition(), broken])
    assert isinstance(error.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("bad", [np.zeros(4, np.float32), np.zeros((4, 4))])
def test_what_cannot_be_quantized_is_refused(bad):
    with pytest.raises((TypeError, ValueError), match="x must"):
        crosscheck.check(bad, "mxfp8_e4m3", [Definition()])


@pytest.mark.parametrize("shape", [(700, 33), (3, 200, 70), (40, 3, 3), (2, 5, 300, 64), (0, 5), (1, 100_000)])
def test_pieces_follow_one_another_and_cut_no_block(small_pieces, shape):
    x = np.arange(np.prod(shape)).reshape(shape)
    found = [x[where] for where in pieces.split(shape)]
    joined = np.concatenate([piece.reshape(-1) for piece in found]) if found else x.reshape(-1)
    np.testing.assert_array_equal(joined, x.reshape(-1))
    for where in pieces.split(shape):
        assert len(where) < len(shape) - 1 or where[-1].start % 128 == 0


@pytest.mark.parametrize("shape", [(700, 64), (5, 70, 64), (40, 16, 33)])
@pytest.mark.parametrize("format", [f for f in FORMATS if f.has_tensor_scale], ids=str)
@pytest.mark.parametrize("backend", ["numpy", "torch-definition"])
def test_the_definition_in_pieces_is_the_definition(small_pieces, backend, format, shape):
    if backend != "numpy":
        pytest.importorskip("torch")
    x, made = sample("special", shape), BACKENDS[backend]()
    wanted = numerics.quantize(x, format)
    assert_same_bits(tuple(made.quantize(x, format)), tuple(wanted))
    for dtype in ("float32", "bfloat16"):
        values = made.dequantize(wanted, format, dtype, shape[-1])
        assert_same_bits((values,), (numerics.dequantize(*wanted, format, dtype, columns=shape[-1]),))


def test_figures_in_pieces_are_those_of_the_whole(monkeypatch):
    x = sample("special", (700, 64))
    q = numerics.quantize(x, "nvfp4")
    values = numerics.dequantize(*q, "nvfp4", "float32", columns=64)
    whole = measure.measure(x, q, values, Format.parse("nvfp4"))
    monkeypatch.setattr(pieces, "PIECE", 64 * 64)
    in_pieces = measure.measure(x, q, values, Format.parse("nvfp4"))
    for name, found in vars(in_pieces).items():
        assert found == (pytest.approx(getattr(whole, name)) if name in ("signal", "noise") else getattr(whole, name)), name


def test_digests_are_those_of_the_whole_arrays(x):
    import hashlib

    result = crosscheck.check(x, "mxfp6_e2m3_32x32", [Definition()])
    q = numerics.quantize(x, "mxfp6_e2m3_32x32")
    assert result.codes_sha256 == hashlib.sha256(q.codes.tobytes()).hexdigest()
    assert result.scales_sha256 == hashlib.sha256(q.scales.tobytes()).hexdigest()


@pytest.mark.parametrize("format", ["fp8_e4m3", "mxfp8_e4m3", "nvfp4"])
def test_an_empty_array_has_no_differences(format):
    result = crosscheck.check(np.zeros((0, 64), np.float32), format, [Definition(), Changed()])
    assert result.identical
    assert result.statistics.elements == 0


def test_index_of_a_stack_counts_its_matrices(small_pieces):
    x = np.ones((6, 64, 64), np.float32)
    x[5, 33, 2] = 6.0
    grid = layout.scales_shape((2, 64, 64), Format.parse("mxfp8_e4m3_32x32"))
    assert grid == (2, 2, 2)
    found = only_difference(x, "mxfp8_e4m3_32x32", Changed("scales", flip((1, 1, 0))))
    assert found.index == (5, 1, 0)
