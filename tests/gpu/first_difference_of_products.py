"""Compares the Hopper kernel's products with the definition, and says where and how they begin to differ.

    python tests/gpu/first_difference_of_products.py [--sums 1000000000]

One line for each part: one step, a chain of steps, promotion, scales, the end. Where bits differ, it prints the first element,
the first chunk of k after which it differs, the bits there, and which other numbers of bits would explain all elements.
`--sums` counts differing sums among that many for each summation. Exits with 1 after a difference.
"""

import argparse
import sys
from dataclasses import replace
from itertools import product as combinations
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "torch" / "support"))

from hopper_products import KINDS, PAIRS, device, library_product, library_values, operand, pattern, values

from blockfp.definition import products
from blockfp.definition.matrix_units import SUMMATIONS, Summation
from blockfp.definition.products import Operand

STEP = {"hopper_fp8": 32, "hopper_bf16": 16}
wrong: list[str] = []


def on_device(a: Operand, b: Operand, **options) -> torch.Tensor:
    return library_values(a, b, **options) if a.format is None else library_product(a, b, **options)


def first_columns(x: Operand, k: int) -> Operand:
    """The first k columns and their scales."""
    scales = x.scales
    if x.format is not None and x.format.block is not None and not x.format.per_row:
        scales = scales[..., : -(-k // 128)].contiguous()
    return x._replace(codes=x.codes[:, :k].contiguous(), scales=scales)


def hexadecimal(x: torch.Tensor) -> str:
    bits = {torch.float32: (torch.int32, 0xFFFFFFFF)}.get(x.dtype, (torch.int16, 0xFFFF))
    return hex(int(x.view(bits[0]).item()) & bits[1])


def differing(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    return pattern(got) != pattern(want)


def variants(summation: Summation):
    """Neighbours of a summation: other numbers of bits, lengths and floors."""
    wide = summation.mantissa == 23
    fractions = (22, 23, 24, 25, 26, 27) if wide else (11, 12, 13, 14, 15, 16, 23, 24, 25)
    mantissas = (23,) if wide else (10, 11, 12, 13, 14, 15, 22, 23)
    floors = (summation.floor, -126, -132, -140) if wide else (summation.floor,)
    for fraction, mantissa, length, floor in combinations(fractions, mantissas, (4, 8, 16, 32), floors):
        yield replace(summation, fraction=fraction, mantissa=mantissa, length=length, floor=floor)


def explain(name: str, a: Operand, b: Operand, got: torch.Tensor, want: torch.Tensor) -> None:
    """Prints the first difference, the chunk where it begins, the products of that chunk, and summations that would fit."""
    bad = differing(got, want)
    i, j = bad.nonzero()[0].tolist()
    print(
        f"  {int(bad.sum())} of {bad.numel()} differ; first at {i, j}: device {hexadecimal(got[i, j])} = {got[i, j].item()!r},",
        end=" ",
    )
    print(f"definition {hexadecimal(want[i, j])} = {want[i, j].item()!r}")
    step, k = STEP[name], a.codes.shape[1]
    for end in [*range(step, k, step), k]:
        parts = first_columns(a, end), first_columns(b, end)
        now, then = on_device(*parts), products.product(*parts, name)
        if bool(differing(now[i, j], then[i, j])):
            start = (end - 1) // step * step
            chunk = [x.codes[row, start:end] for x, row in ((a, i), (b, j))]
            print(f"  it begins in columns {start} to {end}: device {hexadecimal(now[i, j])},", end=" ")
            print(f"definition {hexadecimal(then[i, j])}; of the first {end} columns {int(differing(now, then).sum())} differ")
            shown = [x.tolist() if x.dtype == torch.uint8 else x.view(torch.int16).tolist() for x in chunk]
            print(f"  a: {shown[0]}\n  b: {shown[1]}")
            break
    few = a.codes[:64].contiguous(), b.codes[:64].contiguous()
    left, right = (
        x._replace(codes=codes, scales=scales_of_rows(x, 64)) for x, codes in zip((a, b), few, strict=True)
    )  # fmt: skip
    counts = []
    for other in variants(SUMMATIONS[name]):
        misses = int(differing(got[:64, :64], products.product(left, right, other)).sum())
        counts.append((misses, other.fraction, other.mantissa, other.length, other.floor))
    print("  (differing, fraction, mantissa, length, floor) of other summations:", sorted(counts)[:6])


def scales_of_rows(x: Operand, rows: int) -> torch.Tensor:
    if x.format is None or x.format.block is None:
        return x.scales
    return x.scales[: -(-rows // x.format.block[0])].contiguous()


def hold(part: str, name: str, a: Operand, b: Operand, **options) -> None:
    """Compares one product and prints the outcome; explains the first three differences."""
    got, want = on_device(a, b, **options), products.product(a, b, name, **options)
    count = int(differing(got, want).sum())
    print(f"{'DIFFERS' if count else 'same'}: {part}", flush=True)
    if count:
        wrong.append(part)
    if count and len(wrong) <= 3:
        explain(name, a, b, got, want)


def fp8() -> None:
    for left, right in combinations(("fp8_e4m3", "fp8_e5m2"), repeat=2):
        for kind, k in combinations(KINDS, (32, 16, 64, 96, 128, 160, 256, 1040)):
            sides = operand(left, 192, k, kind, k), operand(right, 128, k, kind, k + 1)
            ones = [x._replace(scales=torch.ones_like(x.scales)) for x in sides]
            hold(f"{left} x {right}, {kind}, k = {k}, scales 1", "hopper_fp8", *ones)
    for (left, right), kind in combinations(PAIRS, KINDS):
        a, b = operand(left, 192, 400, kind, 0), operand(right, 264, 400, kind, 1)
        hold(f"{left} x {right}, {kind}, scales", "hopper_fp8", a, b)


def ends() -> None:
    """Biases and dtypes, of scales per tensor and of blocks."""
    for format, n, dtype in combinations(("fp8_e4m3", "fp8_e4m3_1x128_fp32"), (264, 13), ("float32", "bfloat16", "float16")):
        a, b = operand(format, 192, 256, "normal", 0), operand(format, n, 256, "normal", 1)
        bias = torch.randn(n, generator=torch.Generator().manual_seed(2)).to(device())
        hold(f"{format}, n = {n}, {dtype}", "hopper_fp8", a, b, dtype=dtype)
        hold(f"{format}, n = {n}, {dtype}, bias", "hopper_fp8", a, b, dtype=dtype, bias=bias)


def bfloat16() -> None:
    for kind, k in combinations(KINDS, (16, 8, 32, 64, 128, 1000)):
        sides = values(192, k, kind, k), values(128, k, kind, k + 1)
        hold(
            f"bfloat16, {kind}, k = {k}, scales 1",
            "hopper_bf16",
            *(x._replace(scales=torch.ones_like(x.scales)) for x in sides),
        )


def count(sums: int) -> None:
    """Counts differing sums of 128 products."""
    m = n = 2048
    for name in STEP:
        done = differ = seed = 0
        pairs = list(combinations(("fp8_e4m3", "fp8_e5m2"), repeat=2))
        while done < sums:
            kind, (left, right) = KINDS[seed % len(KINDS)], pairs[seed // len(KINDS) % 4]
            if name == "hopper_bf16":
                a, b = values(m, 128, kind, 2 * seed), values(n, 128, kind, 2 * seed + 1)
            else:
                a, b = operand(left, m, 128, kind, 2 * seed), operand(right, n, 128, kind, 2 * seed + 1)
            got = on_device(a, b)
            for row in range(0, m, 512):
                want = products.product(a._replace(codes=a.codes[row : row + 512]), b, name)
                differ += int(differing(got[row : row + 512], want).sum())
            done, seed = done + m * n, seed + 1
        print(f"{name}: {differ} of {done} sums of 128 differ", flush=True)
        wrong.extend([name] * (differ > 0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sums", type=int, default=0, help="how many sums of each summation to compare in addition")
    sums = parser.parse_args().sums
    fp8()
    bfloat16()
    ends()
    if sums:
        count(sums)
    print(f"{len(wrong)} parts differ", *wrong[:10], sep="\n  ")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
