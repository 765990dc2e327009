"""All 2^32 fp32 patterns through each 8-bit element on one GPU, a minute: `python tests/gpu/all_fp32_patterns.py`."""

import time

import torch
from blockfp.torch_backend.ops import cuda

from blockfp.definition import numerics
from blockfp.formats import Format
from blockfp.kernels import calls
from blockfp.kernels.operand_cast import OperandCast

CHUNK = 1 << 27


def chunks(scattered: bool):
    """The patterns as matrices of 128 columns: in order, or so that neighbours have nothing in common."""
    for start in range(0, 1 << 32, CHUNK):
        index = torch.arange(start, start + CHUNK, dtype=torch.int64, device="cuda")
        if scattered:
            index = (index * 2654435761) & 0xFFFFFFFF
        yield torch.where(index >= 1 << 31, index - (1 << 32), index).to(torch.int32).view(torch.float32).reshape(-1, 128)


def main():
    for name in ("fp8_e4m3", "fp8_e5m2", "mxfp8_e4m3", "mxfp8_e5m2", "mxint8"):
        format = Format.parse(name)
        began, seen, written = time.time(), 0, set()
        for scattered in (False, True):
            if format.per_tensor and scattered:
                continue
            for x in chunks(scattered):
                if format.per_tensor:
                    # A multiplier of 1, so that the code is the element nearest to x.
                    one = torch.ones((1, 1), device="cuda")
                    call = calls.quantize(tuple(x.shape), "float32", OperandCast(format, given="multiplier"), mark=False)
                    codes = cuda.carry_out(call, x, amax=one)["codes"]
                    pairs = ((codes, numerics.encode(x, format, one)),)
                else:
                    pairs = tuple(zip(cuda.quantize(x, format)[:2], numerics.quantize(x, format)[:2], strict=True))
                for got, expected in pairs:
                    # The comparison must see a single wrong byte.
                    wrong = got.clone()
                    wrong.view(-1)[-1] ^= 1
                    assert int((wrong != expected).sum()) == 1 + int((got != expected).sum())
                    written |= set(expected.unique().tolist()) if got is pairs[0][0] else set()
                    different = int((got != expected).sum())
                    assert different == 0, f"{name}: {different} bytes differ near {x.flatten()[0].item()}"
                seen += x.numel()
        print(f"{name}: {seen} patterns, 0 differences, {len(written)} codes occur, {time.time() - began:.2f} s", flush=True)


if __name__ == "__main__":
    main()
