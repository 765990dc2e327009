"""A second, independent statement of every formula, in float64, tables and rational numbers: it shares names alone."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import cache

import ml_dtypes
import numpy as np

FP32_MAX = float(np.finfo(np.float32).max)
LARGEST = {"float32": FP32_MAX, "float16": 65504.0, "bfloat16": float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)}

# name: exponent bits, mantissa bits, bias, largest finite value
FLOATS = {
    "e4m3": (4, 3, 7, 448.0),
    "e5m2": (5, 2, 15, 57344.0),
    "e3m2": (3, 2, 3, 28.0),
    "e2m3": (2, 3, 1, 7.5),
    "e2m1": (2, 1, 1, 6.0),
}
MAX = {name: fields[3] for name, fields in FLOATS.items()} | {"int8": 127 / 64}
EMAX = {"e4m3": 8, "e5m2": 15, "e3m2": 4, "e2m3": 2, "e2m1": 2, "int8": 0}
BITS = {"e4m3": 8, "e5m2": 8, "e3m2": 6, "e2m3": 6, "e2m1": 4, "int8": 8}
OWN_NAN = {"e4m3": 0x7F, "e5m2": 0x7F}


def describe(name: str) -> tuple[str, tuple[int, int] | None, str]:
    """(element, block, scale rule) of a format's name."""
    element = "int8" if "int8" in name else next((e for e in FLOATS if e in name), "e2m1")
    square = re.search(r"(\d+)x(\d+)", name)
    block = (int(square[1]), int(square[2])) if square else None
    if name.startswith("fp8"):
        if block is None:
            return element, (1, 1 << 30) if "_row" in name else None, "pow2" if name.endswith("pow2") else "fp32"
        return element, block, "fp32" if name.endswith("fp32") else "pow2"
    if name.startswith("nvfp4"):
        return element, block or (1, 16), re.sub(r"_?\d+x16$", "", name).removeprefix("nvfp4_")
    return element, block or (1, 32), "floor" if name.endswith("floor") else "ceil"


@cache
def values(element: str) -> np.ndarray:
    """The non-negative finite values in order of their codes, float64."""
    if element == "int8":
        return np.arange(128) / 64
    exponent_bits, mantissa_bits, bias, largest = FLOATS[element]
    table = []
    for field in range(1 << exponent_bits):
        for mantissa in range(1 << mantissa_bits):
            fraction = mantissa / 2**mantissa_bits
            table.append((1 + fraction) * 2.0 ** (field - bias) if field else fraction * 2.0 ** (1 - bias))
    return np.array([v for v in table if v <= largest])


def decode(codes: np.ndarray, element: str) -> np.ndarray:
    """Values of codes, one a byte, float64."""
    codes = codes.astype(np.int64)
    if element == "int8":
        return np.where(codes >= 128, codes - 256, codes) / 64
    sign_bit = 1 << (BITS[element] - 1)
    magnitude = codes & (sign_bit - 1)
    table = list(values(element))
    if element == "e4m3":
        table += [np.nan]
    if element == "e5m2":
        table += [np.inf, np.nan, np.nan, np.nan]
    return np.where(codes & sign_bit, -1.0, 1.0) * np.array(table)[magnitude]


def to_element(y: np.ndarray, element: str, u: np.ndarray | None = None, width: int = 1) -> np.ndarray:
    """Codes of exact float64 values, found among their neighbours in the table; `u` are random numbers of `width` bytes."""
    table = values(element)
    magnitude = np.minimum(np.abs(np.nan_to_num(y, nan=0.0, posinf=1e300, neginf=-1e300)), table[-1])
    below = np.searchsorted(table, magnitude, side="right") - 1
    above = np.minimum(below + 1, len(table) - 1)
    if u is None:
        middle = (table[below] + table[above]) / 2
        up = (magnitude > middle) | ((magnitude == middle) & (below % 2 == 1))
    else:
        gap = np.where(above > below, table[above] - table[below], 1.0)
        up = (magnitude - table[below]) / gap + (2 * u + 1) / (2 * 256**width) >= 1
    code = np.where(up, above, below)
    if element == "int8":
        code = np.where(np.signbit(y), -code, code) & 0xFF
    else:
        code = code | (np.signbit(y).astype(np.int64) << (BITS[element] - 1))
    nan_code = OWN_NAN.get(element, len(table) - 1)
    return np.where(np.isnan(y), nan_code, code).astype(np.uint8)


def mul32(a, b) -> np.ndarray:
    """fp32 product, as float64."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return (np.asarray(a, np.float64) * np.asarray(b, np.float64)).astype(np.float32).astype(np.float64)


def div32(a, b) -> np.ndarray:
    """fp32 quotient, as float64."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
        return (np.asarray(a, np.float32) / np.asarray(b, np.float32)).astype(np.float64)


def fp32(value: float) -> float:
    return float(np.float32(value))


def blocks_of(shape: tuple[int, ...], block: tuple[int, int] | None):
    """(scale index, element slices) of every block."""
    if block is None:
        yield (0,) * len(shape), (slice(None),) * len(shape)
        return
    for lead in np.ndindex(*shape[:-2]):
        for i in range(-(-shape[-2] // block[0])):
            for j in range(-(-shape[-1] // block[1])):
                rows = slice(i * block[0], min((i + 1) * block[0], shape[-2]))
                columns = slice(j * block[1], min((j + 1) * block[1], shape[-1]))
                yield (*lead, i, j), (*lead, rows, columns)


def largest_magnitude(x: np.ndarray) -> float:
    finite_or_inf = np.abs(x[~np.isnan(x)])
    return float(finite_or_inf.max()) if finite_or_inf.size else 0.0


@cache
def e8m0(amax: float, element: str, rule: str) -> int:
    if amax == 0:
        return 0
    if np.isinf(amax):
        return 0xFE
    if rule == "floor":
        exponent = 0
        while Fraction(2) ** (exponent + 1) <= Fraction(amax):
            exponent += 1
        while Fraction(2) ** exponent > Fraction(amax):
            exponent -= 1
        return min(max(exponent + 127 - EMAX[element], 0), 254)
    pattern = int(np.float32(mul32(amax, fp32(1 / MAX[element]))).view(np.uint32))
    exponent, mantissa = pattern >> 23, pattern & 0x7FFFFF
    if exponent == 0:
        return 1 if mantissa > 0x400000 else 0
    return min(exponent + (mantissa != 0), 254)


def quantize(x: np.ndarray, name: str, *, u: np.ndarray | None = None, eps: float = 0.0, nominal: str | None = None):
    """(codes one a byte, scales, tensor_scale) of x in the format of this name."""
    element, block, rule = describe(name)
    nominal = nominal or x.dtype.name
    with np.errstate(invalid="ignore"):  # signalling NaNs
        x = np.where(np.isnan(x), np.nan, x.astype(np.float64))
    grid = (1,) * x.ndim if block is None else (*x.shape[:-2], -(-x.shape[-2] // block[0]), -(-x.shape[-1] // block[1]))
    scales = np.ones(grid, np.float32 if rule in ("fp32", "pow2") else np.uint8)
    tensor_scale = None
    if rule in ("nvfp4", "guarded") or rule.startswith("4over6"):
        amax = tensor_amax = largest_magnitude(x)
        bound = 256 if rule in ("4over6", "4over6_mse") else 448
        mapped_to = 96 / 17 if rule == "guarded" else 6.0
        global_multiplier = 1.0 if amax == 0 or np.isinf(amax) else float(min(div32(bound * mapped_to, amax), FP32_MAX))
        tensor_scale = np.float32(div32(1.0, global_multiplier))
    amax, nan = np.zeros(grid), np.zeros(grid, bool)
    for index, where in blocks_of(x.shape, block):
        amax[index], nan[index] = max(largest_magnitude(x[where]), eps), np.isnan(x[where]).any()
    if rule in ("fp32", "pow2"):
        multiplier = np.where((amax == 0) | np.isinf(amax), 1.0, div32(MAX[element], amax))
        multiplier[np.isinf(multiplier)] = FP32_MAX if block is None else LARGEST[nominal]
        if rule == "pow2":
            multiplier = 2.0 ** (np.frexp(multiplier)[1] - 1)
        scales[...] = div32(1.0, multiplier)
    elif rule in ("nvfp4", "guarded"):
        level = mul32(amax, mul32(global_multiplier, fp32(1 / mapped_to)))
        scales[...] = to_element(np.minimum(level, FP32_MAX), "e4m3")
        decode_scale = mul32(decode(scales, "e4m3"), tensor_scale)
        multiplier = np.minimum(div32(1.0, decode_scale), FP32_MAX)
    elif rule.startswith("4over6"):
        multiplier = np.ones(grid)
        for index, where in blocks_of(x.shape, block):
            of_tensor = (tensor_amax, global_multiplier, tensor_scale)
            chosen = four_over_six(x[where], amax[index], *of_tensor, bound, squared="mse" in rule)
            scales[index], multiplier[index] = chosen
    else:
        for index in np.ndindex(grid):
            scales[index] = e8m0(float(amax[index]), element, rule)
        multiplier = 2.0 ** (127 - scales.astype(np.float64))
    # Of a power of two the product is not rounded: it may lie outside of fp32.
    multiply = np.multiply if rule in ("ceil", "floor") else mul32
    with np.errstate(invalid="ignore"):
        codes = to_element(multiply(x, spread(multiplier, x.shape, block)), element, u)
    if element not in OWN_NAN:
        scales[nan] = 0x7F if tensor_scale is not None else 0xFF
    return codes, scales, tensor_scale


def four_over_six(
    x: np.ndarray, amax: float, tensor_amax: float, global_multiplier: float, tensor_scale, bound: int, squared: bool
) -> tuple[int, float]:
    """(scale, multiplier) of one block: of the scales that map amax to 6 and to 4, the one that errs less. All in fp32."""
    f = np.float32
    with np.errstate(all="ignore"):
        base = f(f(amax) / f(6)) * f(global_multiplier)
        tried = []
        for level in (base, base * f(1.5)):
            scale = to_element(np.float64(min(level, f(448))), "e4m3")
            value = f(decode(scale, "e4m3"))
            multiplier = min(f(1) / (value * f(tensor_scale)), f(FP32_MAX))
            of_rows = np.zeros(16, f)
            codes = decode(to_element((x.astype(f) * multiplier).astype(np.float64), "e2m1"), "e2m1").astype(f)
            errors = abs(codes * value * f(tensor_amax) / f(6 * bound) - x.astype(f))
            errors = errors * errors if squared else errors
            for i, row in enumerate(errors):
                for error in row:
                    of_rows[i] += error
            for half in (8, 4, 2, 1):
                of_rows = of_rows[:half] + of_rows[half:]
            tried.append((of_rows[0], int(scale), float(multiplier)))
    six, four = tried
    return four[1:] if four[0] < six[0] else six[1:]


def spread(per_block: np.ndarray, shape: tuple[int, ...], block: tuple[int, int] | None) -> np.ndarray:
    """Each block's number at each of its elements."""
    out = np.zeros(shape)
    for index, where in blocks_of(shape, block):
        out[where] = per_block[index]
    return out


def dequantize(codes: np.ndarray, scales: np.ndarray, tensor_scale, name: str, dtype) -> np.ndarray:
    """Values of codes (one a byte), in `dtype`; NaN has no particular bits."""
    element, block, rule = describe(name)
    if tensor_scale is not None:
        scales = mul32(decode(scales, "e4m3"), tensor_scale)
    elif rule in ("ceil", "floor"):
        scales = np.where(scales == 0xFF, np.nan, 2.0 ** (scales.astype(np.float64) - 127))
    out = mul32(decode(codes, element), spread(scales, codes.shape, block))
    with np.errstate(over="ignore", invalid="ignore"):
        return out.astype(np.float32).astype(dtype)


def unpack(packed: np.ndarray, bits: int, columns: int) -> np.ndarray:
    """Codes one a byte from the rows' bit streams, least significant bit first."""
    if bits == 8:
        return packed
    stream = np.unpackbits(packed, axis=-1, bitorder="little")
    stream = stream[..., : stream.shape[-1] // bits * bits].reshape(*packed.shape[:-1], -1, bits)
    return (stream * (1 << np.arange(bits))).sum(-1).astype(np.uint8)[..., :columns]


def threefry(key: tuple[int, int], counter: int) -> bytes:
    """Eight random bytes, Threefry-2x32 with 20 rounds in unbounded integers."""
    mask = 0xFFFFFFFF
    schedule = [*key, key[0] ^ key[1] ^ 0x1BD11BDA]
    x0, x1 = ((counter >> 32) + key[0]) & mask, ((counter & mask) + key[1]) & mask
    for i in range(20):
        rotation = (13, 15, 26, 6, 17, 29, 16, 24)[i % 8]
        x0 = (x0 + x1) & mask
        x1 = (((x1 << rotation) | (x1 >> (32 - rotation))) & mask) ^ x0
        if i % 4 == 3:
            n = i // 4 + 1
            x0, x1 = (x0 + schedule[n % 3]) & mask, (x1 + schedule[(n + 1) % 3] + n) & mask
    return x0.to_bytes(4, "little") + x1.to_bytes(4, "little")


def random_bytes(key: tuple[int, int], first: int, count: int, width: int = 1) -> np.ndarray:
    """The random bytes of elements first .. first + count, `width` of each as one number."""
    served = 8 // width
    stream = b"".join(threefry(key, i) for i in range(first // served, (first + count - 1) // served + 1))
    return np.frombuffer(stream, f"<u{width}")[first % served :][:count].astype(np.int64)


def kept_scale(scale: float, amax: float, *largest: float) -> float:
    """A block's decode scale for another amax: `scale` times the power of two nearest to 1 that reaches amax by `largest`."""
    if not 0 < scale < np.inf:
        scale = 1.0
    if amax == 0 or np.isinf(amax):
        return scale
    top = scale
    for factor in largest:
        top = float(mul32(factor, top))
    top, amax, k = Fraction(top), Fraction(amax), 0
    while top * Fraction(2) ** k < amax:
        k += 1
    while top * Fraction(2) ** k >= 4 * amax:
        k -= 1
    return scale * 2.0**k


def requantize(x: np.ndarray, name: str, scales: np.ndarray, tensor_scale: float | None, u: np.ndarray):
    """(codes one a byte, scales, tensor scale) of float32 values that had other scales; u has two random bytes each."""
    element, block, rule = describe(name)
    codes, new = np.zeros(x.shape, np.uint8), scales.copy()
    e4m3 = decode(np.arange(0x7F), "e4m3")
    new_tensor, moved = tensor_scale, 1.0
    if tensor_scale is not None:
        new_tensor = max(kept_scale(tensor_scale, largest_magnitude(x), 240.0, MAX[element]), 2.0**-126)
        moved = new_tensor / tensor_scale
    for at, where in blocks_of(x.shape, block):
        part, old = x[where], scales[at]
        amax, nan = largest_magnitude(part), bool(np.isnan(part).any()) and element not in OWN_NAN
        if tensor_scale is not None:
            byte = 0x38 if old in (0, 0x7F) else int(old)
            decoded = float(mul32(e4m3[byte], tensor_scale))
            wanted = e4m3[byte] * kept_scale(decoded, amax, MAX[element]) / decoded / moved
            while wanted not in e4m3:  # a power of two that loses no bit
                wanted *= 2
            new[at] = 0 if old == 0 and amax == 0 else int(np.searchsorted(e4m3, wanted))
            new[at] = 0x7F if nan else new[at]
            decoded = float(mul32(decode(new[at].reshape(1), "e4m3")[0], new_tensor))
        elif scales.dtype == np.uint8:
            byte = 127 if old == 0xFF else int(old)
            wanted = kept_scale(2.0 ** (byte - 127), amax, MAX[element])
            byte = int(np.clip(np.log2(wanted) + 127, 0, 254))
            new[at], decoded = (0xFF if nan else byte), 2.0 ** (min(0xFF if nan else byte, 254) - 127)
        else:
            decoded = new[at] = max(kept_scale(float(old), amax, MAX[element]), min(float(old), 2.0**-126))
        if rule in ("ceil", "floor"):
            y = part.astype(np.float64) / decoded
        else:
            decoded = FP32_MAX if np.isnan(decoded) else float(decoded)
            with np.errstate(divide="ignore"):
                y = mul32(part, min(float(div32(1.0, decoded)), FP32_MAX))
        codes[where] = to_element(y, element, u[where], 2)
    return codes, new, new_tensor


def hadamard(x: np.ndarray) -> np.ndarray:
    """One group of 16 rotated, float64 by the matrix itself (a sum of 16 terms, not the butterfly)."""
    matrix = np.array([[1.0]])
    for _ in range(4):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])
    return (signs * x) @ matrix / 4
