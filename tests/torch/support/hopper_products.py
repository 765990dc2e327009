"""Adversarial operands of products with defined bits, and calls of the CUDA library's own kernel."""

import numpy as np
import torch

from blockfp.definition import layout
from blockfp.definition.groups import columns_for
from blockfp.definition.products import Operand
from blockfp.formats import Format
from blockfp.kernels import calls, cuda_library
from blockfp.kernels.products import plan, plan_values

ROWS, SQUARES, TENSOR = "fp8_e4m3_1x128_fp32", "fp8_e4m3_128x128_fp32", "fp8_e4m3"
GRADIENT, GRADIENT_TENSOR = "fp8_e5m2_1x128_fp32", "fp8_e5m2"
PAIRS = (
    (ROWS, SQUARES),
    (ROWS, ROWS),
    (GRADIENT, SQUARES),
    (ROWS, GRADIENT),
    (GRADIENT, GRADIENT),
    (SQUARES, ROWS),
    (SQUARES, SQUARES),
    (ROWS, TENSOR),
    (TENSOR, SQUARES),
    (TENSOR, TENSOR),
    (GRADIENT_TENSOR, TENSOR),
    (GRADIENT_TENSOR, GRADIENT_TENSOR),
    ("fp8_e4m3_row", "fp8_e4m3_row"),
    ("fp8_e4m3_row", TENSOR),
    ("fp8_e5m2_row", "fp8_e4m3_row"),
)
"""Pairs of formats that the kernel multiplies: every element and every kind of scales."""
KINDS = ("normal", "any finite", "cancelling", "subnormal", "mixed exponents", "specials")


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def magnitudes(element: str, shape: tuple[int, ...], kind: str, rng: np.random.Generator) -> np.ndarray:
    """Codes without signs, as int64."""
    top = {"e4m3": 0x7E, "e5m2": 0x7B}[element]
    drawn = rng.integers(0, top + 1, shape)
    if kind == "normal":
        dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[element]
        values = torch.from_numpy(np.abs(rng.standard_normal(shape)) * 16).to(torch.float32).to(dtype)
        return values.view(torch.uint8).numpy().astype(np.int64)
    if kind == "subnormal":
        return np.where(rng.random(shape) < 0.05, drawn, drawn % 8)
    if kind == "mixed exponents":
        return np.where(rng.random(shape) < 0.7, drawn // 4, drawn)
    if kind == "specials":
        return np.where(rng.random(shape) < 1 / 400, 0x7F - rng.integers(0, 4, shape), drawn)
    return drawn


def codes(element: str, rows: int, k: int, kind: str, seed: int) -> np.ndarray:
    """Codes [rows, k]. In "cancelling" each odd column almost undoes the one before it, if both sides are made so."""
    rng = np.random.default_rng(seed)
    code = magnitudes(element, (rows, k), kind, rng) | (rng.integers(0, 2, (rows, k)) << 7)
    if kind == "cancelling" and k > 1:
        even = code[:, : k // 2 * 2 : 2]
        undone = even ^ (0x80 if seed % 2 else 0)
        code[:, 1 : k // 2 * 2 : 2] = np.where(rng.random(even.shape) < 0.1, code[:, 1 : k // 2 * 2 : 2], undone)
    return code.astype(np.uint8)


def scales(shape: tuple[int, ...], kind: str, seed: int) -> np.ndarray:
    """Positive float32 with all mantissa bits in use; in "specials" also NaN, infinities, zeros and subnormals."""
    rng = np.random.default_rng(seed + 1000)
    reach = 60 if kind == "mixed exponents" else 10
    drawn = np.ldexp(rng.uniform(1, 2, shape), rng.integers(-reach, reach, shape)).astype(np.float32)
    if kind == "specials":
        few = np.array([np.nan, np.inf, 0, 1e-45, 3e-39], np.float32)
        drawn = np.where(rng.random(shape) < 0.05, rng.choice(few, shape), drawn)
    return drawn


def operand(format: str, rows: int, k: int, kind: str, seed: int) -> Operand:
    """One side of a product of FP8 codes."""
    parsed = Format.parse(format)
    made = codes(parsed.element.name, rows, k, kind, seed), scales(layout.scales_shape((rows, k), parsed), kind, seed)
    return Operand(*(torch.from_numpy(x).to(device()) for x in made), parsed)


def values(rows: int, k: int, kind: str, seed: int, dtype: torch.dtype = torch.bfloat16) -> Operand:
    """One side of a product of bfloat16 or float16, with one scale."""
    rng = np.random.default_rng(seed)
    shape = (rows, k)
    if kind == "normal":
        drawn = rng.standard_normal(shape)
    elif kind in ("any finite", "specials"):
        pattern = torch.from_numpy(rng.integers(-(2**15), 2**15, shape).astype(np.int16)).view(dtype).double().numpy()
        special = ~np.isfinite(pattern) & ((rng.random(shape) < 0.05) if kind == "specials" else False)
        drawn = np.where(np.isfinite(pattern) | special, pattern, 0)
    elif kind == "subnormal":
        drawn = np.ldexp(rng.standard_normal(shape), rng.integers(-80, -70, shape))
    else:
        drawn = np.ldexp(rng.standard_normal(shape), rng.integers(-30, 30, shape))
    if kind == "cancelling" and k > 1:
        drawn[:, 1 : k // 2 * 2 : 2] = drawn[:, : k // 2 * 2 : 2] * (-1 if seed % 2 else 1)
    made = torch.from_numpy(drawn).to(dtype)
    return Operand(made.to(device()), torch.from_numpy(scales((1,), "normal", seed)).to(device()))


def columns_of_groups(format: str, rows: int, counts: tuple[int, ...], kind: str, seed: int) -> tuple[Operand, list[Operand]]:
    """One side of products along k, each group filled up to 128, and each group's operand by itself."""
    parsed, width = Format.parse(format), columns_for(sum(counts), len(counts))
    each = [operand(format, rows, max(count, 1), kind, seed + 2 * group) for group, count in enumerate(counts)]
    all_codes = torch.full((rows, width), 0x55, dtype=torch.uint8, device=device())
    all_scales = torch.full((rows, width // 128), float("nan"), device=device())
    at = 0
    for one, count in zip(each, counts, strict=True):
        filled = -(-count // 128) * 128
        all_codes[:, at : at + filled] = 0
        all_codes[:, at : at + count] = one.codes[:, :count]
        if not parsed.per_tensor:
            all_scales[:, at // 128 : (at + filled) // 128] = one.scales[:, : filled // 128]
        at += filled
    if parsed.per_tensor:
        all_scales = torch.cat([one.scales.reshape(1) for one in each])
    return Operand(all_codes, all_scales, parsed), each


def library_product(
    a: Operand,
    b: Operand,
    *,
    dtype: str = "float32",
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    ends: list[int] | None = None,
    accumulate: bool = False,
    tile: int = -1,
    b_rows: int | None = None,
) -> torch.Tensor:
    """The library's own kernel, whatever the plan would choose; `b_rows` replaces the rows of b's blocks."""
    assert a.format is not None
    assert b.format is not None
    (m, k), n = a.codes.shape, b.codes.shape[-2]
    if out is None:
        out = torch.empty((m, n), dtype=getattr(torch, dtype), device="cuda")
    groups = 0 if ends is None else len(ends)
    options = {"capability": (9, 0), "cublas": 0, "dtype": dtype, "groups": groups, "along_k": out.ndim == 3}
    planned = plan(a.format, b.format, m, n, k, **options)
    assert planned.own
    kinds = [number for x in (a, b) for number in calls.format_numbers(x.format)[:2]]
    kinds[3] = kinds[3] if b_rows is None else b_rows
    numbers = (*(int(x) for x in kinds), 0, 0, 1, tile, 0, int(accumulate))
    on_device = None if ends is None else torch.tensor(ends, dtype=torch.int32, device=device())
    workspace = torch.empty(planned.workspace + 1024, dtype=torch.uint8, device="cuda")
    operands = a.codes, b.codes, a.scales.contiguous(), b.scales.contiguous()
    cuda_library.library().product(*operands, on_device, bias, out, workspace, *numbers)
    return out


def library_values(a: Operand, b: Operand, *, dtype: str = "float32") -> torch.Tensor:
    """The library's own product of bfloat16."""
    m, n, k = a.codes.shape[0], b.codes.shape[0], a.codes.shape[1]
    planned = plan_values(m, n, k)
    out = torch.empty((m, n), dtype=getattr(torch, dtype), device="cuda")
    workspace = torch.empty(planned.workspace + 1024, dtype=torch.uint8, device="cuda")
    cuda_library.library().product(a.codes, b.codes, a.scales, b.scales, None, None, out, workspace, *planned.numbers)
    return out


def pattern(x: torch.Tensor) -> torch.Tensor:
    """The bits as integers, every NaN alike."""
    integers = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}[x.dtype]
    return torch.where(x.isnan(), -1, x.view(integers))


def same_bits(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Raises AssertionError with the first differing element; NaN equals NaN."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    different = pattern(got) != pattern(want)
    if not bool(different.any()):
        return
    first = tuple(different.nonzero()[0].tolist())
    bits = [hex(int(pattern(x)[first]) & 0xFFFFFFFF) for x in (got, want)]
    raise AssertionError(
        f"{what}: {int(different.sum())} of {different.numel()} elements differ, first at {first}: got {got[first].item()!r} "
        f"({bits[0]}), want {want[first].item()!r} ({bits[1]})"
    )
