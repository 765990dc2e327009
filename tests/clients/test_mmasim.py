"""Sums of matrix units against mmasim, an independent model of the instructions that was held against the devices.

Every instruction of mmasim that multiplies FP8, FP6, FP4, bfloat16 or float16 into fp32, of the generations that have a
`Summation`. `python tests/clients/test_mmasim.py SUMS [SUMMATION ..]` compares that many sums of each.
"""

import sys
from dataclasses import replace
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from mmasim.nv_ptx import MMA, WGMMA, MMABlockScale, TCGen05MMA, TCGen05MMABlockScale

from blockfp.definition.bits import NAN
from blockfp.definition.matrix_units import SUMMATIONS, accumulate, terms_of_codes, terms_of_powers, terms_of_values
from blockfp.formats import E4M3, ELEMENTS

FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
HALF = {"bf16": (torch.bfloat16, ml_dtypes.bfloat16), "f16": (torch.float16, np.float16)}


class Instruction(NamedTuple):
    summation: str
    kind: type
    generation: str
    name: str


def fp8_pairs(summation, kind, generation, name):
    return [Instruction(summation, kind, generation, name.format(a=a, b=b)) for a in FLOAT8 for b in FLOAT8]


def halves(summation, kind, generation, name):
    return [Instruction(summation, kind, generation, name.format(a=a)) for a in HALF]


INSTRUCTIONS = (
    Instruction("volta_fp16", MMA, "Volta", "m8n8k4.f32.f16.f16.f32"),
    Instruction("turing_fp16", MMA, "Turing", "m16n8k8.f32.f16.f16.f32"),
    *halves("ampere_bf16", MMA, "Ampere", "m16n8k16.f32.{a}.{a}.f32"),
    *halves("ampere_bf16", MMA, "Ada Lovelace", "m16n8k16.f32.{a}.{a}.f32"),
    *fp8_pairs("ada_fp8", MMA, "Ada Lovelace", "m16n8k32.f32.{a}.{b}.f32"),
    *halves("hopper_bf16", WGMMA, "Hopper", "m64n8k16.f32.{a}.{a}"),
    *fp8_pairs("hopper_fp8", WGMMA, "Hopper", "m64n8k32.f32.{a}.{b}"),
    *halves("blackwell_bf16", TCGen05MMA, "Blackwell", "m64n8k16.kind::f16.f32.{a}.{a}"),
    *fp8_pairs("blackwell_fp8", TCGen05MMA, "Blackwell", "m64n8k32.kind::f8f6f4.f32.{a}.{b}"),
    *fp8_pairs("blackwell_fp8", MMA, "RTX Blackwell", "m16n8k32.f32.{a}.{b}.f32"),
    Instruction("blackwell_fp8", TCGen05MMA, "Blackwell", "m64n8k32.kind::f8f6f4.f32.e2m3.e3m2"),
    Instruction("blackwell_fp8", TCGen05MMA, "Blackwell", "m64n8k32.kind::f8f6f4.f32.e2m1.e4m3"),
    *fp8_pairs("blackwell_mx", TCGen05MMABlockScale, "Blackwell", "m128n8k32.kind::mxf8f6f4.block32.f32.{a}.{b}.ue8m0"),
    Instruction("blackwell_mx", TCGen05MMABlockScale, "Blackwell", "m128n8k32.kind::mxf8f6f4.block32.f32.e2m3.e3m2.ue8m0"),
    Instruction("blackwell_mx", MMABlockScale, "RTX Blackwell", "m16n8k32.kind::mxf8f6f4.block32.f32.e4m3.e4m3.f32.ue8m0"),
    Instruction("blackwell_mxfp4", TCGen05MMABlockScale, "Blackwell", "m128n8k64.kind::mxf4.block32.f32.e2m1.e2m1.ue8m0"),
    Instruction("blackwell_nvfp4", TCGen05MMABlockScale, "Blackwell", "m128n8k64.kind::mxf4nvf4.block16.f32.e2m1.e2m1.ue4m3"),
)


def codes(name, shape, rng):
    """uint8: all codes, subnormals and small ones, values of one size, or of many, with and without specials."""
    element, style = ELEMENTS[name], rng.integers(0, 5)
    sign = rng.integers(0, 2, shape) << (element.bits - 1)
    if style == 0:
        return (rng.integers(0, 1 << element.bits, shape)).astype(np.uint8)
    magnitude = rng.integers(0, element.max_code + 1, shape)
    if style == 1:
        magnitude = np.where(rng.random(shape) < 0.9, magnitude % (2 << element.mantissa_bits), magnitude)
    if style == 2:
        magnitude = element.max_code - magnitude % (2 << element.mantissa_bits)
    if style == 3 and shape[1] > 1:  # cancels, if both sides are of this style
        magnitude[:, 1::2] = magnitude[:, ::2]
        sign[:, 1::2] = sign[:, ::2] ^ (rng.integers(0, 2) << (element.bits - 1))
    return (magnitude | sign).astype(np.uint8)


def values(kind, shape, rng):
    """float16 or bfloat16 as torch and NumPy have them."""
    native, style = HALF[kind], rng.integers(0, 4)
    drawn = rng.standard_normal(shape)
    if style == 1:
        drawn = np.ldexp(drawn, rng.integers(-14, 14, shape))
    if style == 2:
        drawn[:, 1::2] = -drawn[:, ::2] * (1 + rng.integers(-1, 2, drawn[:, ::2].shape) * 2.0**-7)
    if style == 3:
        some = torch.from_numpy(rng.integers(-(2**15), 2**15, shape).astype(np.int16)).view(native[0])
        return some if rng.random() < 0.3 else torch.where(some.isfinite(), some, 0)
    return torch.from_numpy(drawn).to(native[0])


def accumulators(shape, rng):
    style = rng.integers(0, 4)
    if style == 0:
        return np.zeros(shape, np.float32)
    if style == 1:
        return rng.integers(-(2**31), 2**31, shape).astype(np.int32).view(np.float32)
    return np.ldexp(rng.standard_normal(shape), rng.integers(-30 if style == 2 else 0, 30 if style == 2 else 1, shape)).astype(
        np.float32
    )


def as_given(code, name, packed):
    """Codes as mmasim takes them: FP8 as torch's dtypes, FP4 in pairs, or two bits up where wider elements may stand too."""
    if name in FLOAT8:
        return torch.from_numpy(code).view(FLOAT8[name])
    if packed:
        return torch.from_numpy(code[:, ::2] | (code[:, 1::2] << 4))
    return torch.from_numpy(code << 2 if name == "e2m1" else code)


def differing(one, rng, lines=None):
    """(number of sums that differ, number of sums, the first difference) of an instruction with random operands.

    `lines` are the rows and columns instead of the instruction's own; mmasim takes any number.
    """
    simulated, summation = one.kind(one.generation, one.name), SUMMATIONS[one.summation]
    (m, n), k = lines or (simulated.m, simulated.n), simulated.k
    a_type, b_type = simulated.a_type_ptx, simulated.b_type_ptx
    c = accumulators((m, n), rng)
    if a_type in HALF:
        a, b = values(a_type, (m, k), rng), values(b_type, (n, k), rng)
        terms = [terms_of_values(x.view(torch.int16).numpy().view(HALF[a_type][1])) for x in (a, b)]
        want = simulated(a, b.T.contiguous(), torch.from_numpy(c))
        return compared(want, accumulate(*terms, c.view(np.int32), summation))
    a, b = codes(a_type, (m, k), rng), codes(b_type, (n, k), rng)
    terms = [terms_of_codes(a, ELEMENTS[a_type]), terms_of_codes(b, ELEMENTS[b_type])]
    packed = summation.group > 1
    given = [as_given(a, a_type, packed), as_given(b, b_type, packed).T.contiguous(), torch.from_numpy(c)]
    if summation.scale_block is None:
        return compared(simulated(*given), accumulate(*terms, c.view(np.int32), summation))
    e4m3 = one.name.endswith("ue4m3")
    low, high = [(0, 0x80), (0x30, 0x48)][rng.integers(0, 2)] if e4m3 else [(0, 256), (120, 135), (0, 255)][rng.integers(0, 3)]
    scales = [rng.integers(low, high, (lines, k // summation.scale_block)).astype(np.uint8) for lines in (m, n)]
    kind = torch.float8_e4m3fn if e4m3 else torch.float8_e8m0fnu
    want = simulated(*given, torch.from_numpy(scales[0]).view(kind), torch.from_numpy(scales[1]).T.contiguous().view(kind))
    of_scales = [terms_of_codes(x, E4M3) if e4m3 else terms_of_powers(x) for x in scales]
    return compared(want, accumulate(*terms, c.view(np.int32), summation, of_scales))


def compared(want, got):
    pattern = np.where(want.isnan().numpy(), NAN, want.view(torch.int32).numpy())
    bad = np.argwhere(pattern != got)
    first = [f"{x[tuple(bad[0])]:#x}" for x in (pattern, got)] if len(bad) else None
    return len(bad), got.size, first


@pytest.mark.parametrize("one", INSTRUCTIONS, ids=lambda one: f"{one.summation} {one.name}")
def test_has_the_instructions_bits(one):
    rng = np.random.default_rng(0)
    for _ in range(15):
        bad, _, first = differing(one, rng)
        assert bad == 0, f"mmasim, definition: {first}"


def test_every_device_is_compared():
    assert {one.summation for one in INSTRUCTIONS} == set(SUMMATIONS) - {"fp32_in_order"}


@pytest.mark.parametrize("change", [{"fraction": 14}, {"mantissa": 14}, {"length": 16}])
def test_sees_a_wrong_number_of_bits(change, monkeypatch):
    monkeypatch.setitem(SUMMATIONS, "hopper_fp8", replace(SUMMATIONS["hopper_fp8"], **change))
    one = next(one for one in INSTRUCTIONS if one.summation == "hopper_fp8")
    rng = np.random.default_rng(0)
    assert sum(differing(one, rng)[0] for _ in range(8)) > 0


LINES = (64, 64)
"""Rows and columns of `count`: their intermediate results fit in a core's cache."""


def count(summation, sums):
    """Compares random sums of all instructions of a summation, with more rows and columns than the tests."""
    own = [one for one in INSTRUCTIONS if one.summation == summation]
    total = wrong = seed = 0
    while total < sums:
        one = own[seed % len(own)]
        bad, compared_now, first = differing(one, np.random.default_rng(seed), LINES)
        if bad:
            print(f"{one.name}, seed {seed}: {first}")
        total, wrong, seed = total + compared_now, wrong + bad, seed + 1
        if seed % 1024 == 0 or total >= sums:
            print(f"{summation}: {wrong} of {total} sums differ", flush=True)


if __name__ == "__main__":
    for name in sys.argv[2:] or sorted({one.summation for one in INSTRUCTIONS}):
        count(name, int(float(sys.argv[1])))
