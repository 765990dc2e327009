"""Arguments that kernels take or refuse: strides, read-only arrays, torch tensors, sizes; threads in other FP modes."""

import ml_dtypes
import numpy as np
import pytest
from adamw_cases import Parameter, table
from same_bits import assert_same_bits
from samples import DTYPES, KINDS, sample

from blockfp.definition import adamw, numerics, rotation
from blockfp.formats import Format
from blockfp.kernels import native
from blockfp.kernels.calls import DTYPE_NUMBERS, format_numbers
from blockfp.kernels.switch import once

NAMES = ("fp8_e4m3", "fp8_e4m3_1x128", "mxfp8_e4m3_32x32", "mxfp6_e3m2", "mxint8", "nvfp4")
SOME = pytest.mark.parametrize("name", NAMES)


@SOME
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(name, dtype):
    x = sample("special", (4, 200, 300), dtype)
    views = (
        x[:, ::2],
        x[:, :, 3:],
        x[..., ::3],
        x[::-1, ::-1],
        x.swapaxes(-1, -2),
        x.transpose(1, 0, 2),
        x[0].T,
        np.broadcast_to(x[:, :1], x.shape),
    )
    for view in views:
        plain = np.ascontiguousarray(view)
        assert_same_bits(native.quantize(view, name, key=1), native.quantize(plain, name, key=1))
        assert_same_bits(native.amax(view, name), native.amax(plain, name))


@SOME
def test_read_only_and_unaligned_arrays(name):
    x = sample("bf16_valued", (8, 64), "bfloat16")
    q = native.quantize(x, name)
    x.flags.writeable = False
    odd = np.zeros(x.nbytes + 1, np.uint8)[1:].view(ml_dtypes.bfloat16).reshape(x.shape)
    odd[...] = x
    for array in (x, odd):
        assert_same_bits(native.quantize(array, name), q)
    for part in q:
        if part is not None:
            part.flags.writeable = False
    native.dequantize(*q, name, "float16", columns=64)


@SOME
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1, 2])
def test_odd_addresses(name, dtype, offset):
    """No kernel reads a number from an address that isn't a multiple of its size: UBSan looks (`make sanitize`)."""
    torch = pytest.importorskip("torch")

    def moved(array):
        odd = np.zeros(array.nbytes + offset, np.uint8)[offset:].view(array.dtype).reshape(array.shape)
        odd[...] = array
        return odd

    def as_tensor(array):
        kind = array.dtype if array.dtype.kind in "iuf" else np.dtype(f"i{array.itemsize}")
        buffer = bytearray(moved(array).tobytes().rjust(array.nbytes + offset, b"\0"))
        flat = torch.frombuffer(buffer, dtype=getattr(torch, array.dtype.name), offset=offset)
        assert flat.data_ptr() % kind.itemsize == offset % kind.itemsize
        return flat.view(array.shape)

    x = sample("special", (40, 70), dtype)
    q, amax = native.quantize(x, name), native.amax(x, name)
    values = native.dequantize(*q, name, "float32", columns=70)
    for odd in (moved, as_tensor):
        assert_same_bits(tuple(native.quantize(odd(x), name)), tuple(q))
        assert_same_bits(tuple(native.amax(odd(x), name)), tuple(amax))
        rotated = native.rotate(odd(x[:, :64]))
        rotated = rotated if odd is moved else rotated.view(torch.uint8).numpy()
        assert rotated.tobytes() == native.rotate(np.ascontiguousarray(x[:, :64])).tobytes()
        parts = (None if part is None else odd(np.asarray(part)) if np.ndim(part) else part for part in q)
        assert_same_bits(native.dequantize(*parts, name, "float32", columns=70), values)
        given = numerics.Amax(*(None if part is None else odd(part) if np.ndim(part) else part for part in amax))
        if odd is moved:
            assert_same_bits(tuple(native.quantize(odd(x), name, amax=given)), tuple(q))


@SOME
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_tensors(name, dtype):
    torch = pytest.importorskip("torch")
    x = sample("special", (3, 40, 70), dtype)
    tensor = torch.from_numpy(x.view(f"i{x.itemsize}").copy()).view(getattr(torch, dtype))
    quantized = native.quantize(tensor, name, key=torch.tensor([1, 2]))
    assert_same_bits(tuple(quantized), tuple(native.quantize(x, name, key=(1, 2))))
    assert_same_bits(tuple(native.amax(tensor, name)), tuple(native.amax(x, name)))
    leaf = tensor.clone().requires_grad_()
    assert_same_bits(tuple(native.quantize(leaf.mT, name)), tuple(native.quantize(x.swapaxes(1, 2), name)))
    q = native.quantize(tensor, name)
    values = native.dequantize(*q, name, dtype, columns=70)
    assert values.dtype == tensor.dtype
    bits = values.view(torch.int32 if dtype == "float32" else torch.int16).numpy()
    assert_same_bits(bits.view(DTYPES[dtype]), native.dequantize(*native.quantize(x, name), name, dtype, columns=70))


@SOME
@pytest.mark.parametrize("instruction_set", ["avx512", "avx2", "scalar"])
def test_a_thread_that_flushes_subnormals(name, instruction_set):
    """Neither the thread's mode changes the bits, nor the call the thread's mode."""
    torch = pytest.importorskip("torch")
    if instruction_set not in native.instruction_sets():
        pytest.skip(f"this processor has no {instruction_set}")
    native.use_instruction_set(instruction_set)
    tiny = torch.tensor([1e-40])
    for kind in ("subnormal", "exponents"):
        x = sample(kind, (64, 128))
        q = numerics.quantize(x, name)
        expected = numerics.dequantize(*q, name, "float32", columns=128)
        torch.set_flush_denormal(True)
        try:
            flushed = (tiny * 1.0).item()
            actual = native.quantize(x, name)
            values = native.dequantize(*q, name, "float32", columns=128)
            assert (tiny * 1.0).item() == flushed == 0
        finally:
            torch.set_flush_denormal(False)
        assert_same_bits(actual, q)
        assert_same_bits(values, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation(dtype):
    for kind in KINDS:
        for shape in ((3, 5, 50), (2, 16), (4, 7), (0, 16), (3, 0)):
            x = sample(kind, shape, dtype)
            with np.errstate(all="ignore"):
                expected = rotation.rotate(x)
            for name in native.instruction_sets():
                native.use_instruction_set(name)
                assert_same_bits(native.rotate(x), expected)


def test_status_and_instruction_sets():
    assert native.instruction_sets()[-1] == "scalar"
    assert native.instruction_set() in native.status()
    with pytest.raises(ValueError, match=r"'mmx' can't run here; use one of .*scalar"):
        native.use_instruction_set("mmx")
    with pytest.raises(ValueError, match=r"threads must be 0 .* got -1"):
        native.set_threads(-1)


def test_without_a_library(monkeypatch):
    def missing():
        raise FileNotFoundError("it was not built")

    monkeypatch.setattr(native._cpu, "loaded", None)
    monkeypatch.setattr(native._cpu, "_find", missing)
    monkeypatch.setattr(native._cpu, "_load", once(native._cpu._load_first))
    monkeypatch.setattr(native._cpu, "why_not", "")
    assert not native.available()
    assert "it was not built; the definition runs instead" in native.status()
    with pytest.raises(RuntimeError, match="it was not built"):
        native.quantize(np.zeros((2, 32), np.float32), "mxint8")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: native.quantize(x.astype(np.float64), "mxint8"), TypeError, "got dtype float64"),
        (lambda x: native.quantize(x.tolist(), "mxint8"), TypeError, "take NumPy arrays and CPU torch tensors, got list"),
        (lambda x: native.quantize(x[0], "mxint8"), ValueError, "two or more axes"),
        (lambda x: native.quantize(x, "mxint9"), ValueError, "did you mean 'mxint8'"),
        (lambda x: native.quantize(x, "mxint8", eps=1.0), ValueError, "eps = 1.0 has no meaning"),
        (lambda x: native.quantize(x, "fp8_e4m3", eps=-1.0), ValueError, "eps must be finite"),
        (lambda x: native.quantize(x, "fp8_e4m3", nominal="float8"), ValueError, "nominal must be one of"),
        (lambda x: native.quantize(x, "mxint8", key="seed"), ValueError, "key must be"),
        (lambda x: native.quantize(x, "mxint8", amax=native.amax(x, "nvfp4")), ValueError, r"amax.blocks of mxint8"),
        (lambda x: native.quantize(x, "mxint8", amax=native.amax(x, "mxfp8_e4m3")), ValueError, "amax is not one of"),
        (lambda x: native.dequantize(*native.quantize(x, "mxint8"), "mxint8", "float64", columns=64), ValueError, "dtype"),
        (lambda x: native.dequantize(*native.quantize(x, "mxint8"), "mxint8", "float32", columns=63), ValueError, "codes"),
        (lambda x: native.dequantize(*native.quantize(x, "nvfp4"), "mxfp4_e2m1", "float32", columns=64), ValueError, "scales"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call(np.ones((4, 64), np.float32))


MX, FP8 = format_numbers(Format.parse("mxint8")), format_numbers(Format.parse("fp8_e4m3"))
FP32 = DTYPE_NUMBERS["float32"]


def lent(*shape, dtype="float32"):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda f: f.amax(lent(4, 64), lent(4, 3, dtype="int32"), None, None, FP32, *MX, 0, 0),
            r"blocks must be an int32 for each block: contiguous, 8 entries of 32 bits; it is int32 \[4, 3\] on cpu",
        ),
        (
            lambda f: f.amax(lent(4, 64), lent(4, 2, dtype="int32"), None, None, FP32, *MX, -32, 0),
            r"origin must not be negative; it is \(-32, 0\)",
        ),
        (
            lambda f: f.amax(lent(4, 64), lent(4, 2, dtype="int32"), None, None, FP32, 9, 1, 32, 7, 0, 0),
            "the format has element 9 and scale rule 7, which this library does not know",
        ),
        (
            lambda f: f.amax(lent(4, 64), lent(4, 2, dtype="int32"), None, None, FP32, *MX[:2], 24, MX[3], 0, 0),
            "block columns must be 0, 16, 32, 64, 128 or those of a whole row, 1073741824, and are 24",
        ),
        (
            lambda f: f.rotate(lent(4, 64), lent(4, 63), FP32),
            r"out must be like x: contiguous, 256 entries of 32 bits; it is float32 \[4, 63\] on cpu",
        ),
        (
            lambda f: f.rotate(lent(64), lent(64), FP32),
            r"x must have two or more axes and 32 bits an element; it is float32 \[64\] on cpu",
        ),
        (lambda f: f.rotate(lent(4, 64), lent(64, 4).T, FP32), r"it is float32 \[4, 64\] on cpu, not contiguous"),
        (lambda f: f.adamw(lent(1, 3, dtype="int64")), r"table must have this library's rows, .* int64 \[1, 3\] on cpu"),
        (
            lambda f: f.dequantize_arrays(lent(4, 64, dtype="uint8"), lent(3, 1), lent(0), lent(4, 64), 2, *FP8, 0, 0),
            r"scales must be there for each block, 1 of 32 bits a tensor; it is float32 \[3, 1\] on cpu",
        ),
    ],
)
def test_arguments_are_named_with_what_they_are(call, message):
    with pytest.raises(ValueError, match=message):
        call(native.library())


def test_a_table_with_a_bad_row_changes_nothing():
    c = adamw.coefficients(1, 1e-2, (0.9, 0.999), 1e-8, 0.1)
    mx = Format.parse("mxfp8_e4m3_32x32")
    good, bad = Parameter((64, 64), format=mx), Parameter((64, 64), format=mx)
    before = [np.copy(x) for x in (good.weight, good.out, good.out_scales)]
    steps = [good.step(c, 1), bad.step(c, 1)]
    rows = table(steps)
    other = table([s._replace(format=Format.parse("mxfp8_e5m2_32x32")) for s in steps])
    element = np.flatnonzero(rows.view(np.int32)[1] != other.view(np.int32)[1])[0]
    rows.view(np.int32)[1, element] = 9
    with pytest.raises(ValueError, match="the format has element 9"):
        native.library().adamw(rows)
    assert_same_bits((good.weight, good.out, good.out_scales), tuple(before))
