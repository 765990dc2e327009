"""One small case of every kernel, for compute-sanitizer, in parts that may run side by side.

compute-sanitizer --tool memcheck python tests/gpu/each_kernel_once.py
compute-sanitizer --tool racecheck python tests/gpu/each_kernel_once.py --parts casts --formats mxfp8
"""

import argparse

import torch
from blockfp.torch_backend.ops import cuda
from blockfp.torch_backend.ops.groups import cuda_groups, grouped_products
from blockfp.torch_backend.ops.optimizer import cuda_steps
from blockfp.torch_backend.ops.product import products
from blockfp.torch_backend.ops.quantize.quantize_plans import quantize_matrix

import blockfp.torch as bfp
from blockfp.formats import FORMATS, Format
from blockfp.kernels import cuda_library
from blockfp.kernels.operand_cast import OperandCast
from blockfp.kernels.products import plan_values


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--formats", default="", help="what the names of the formats begin with that are cast to")
    options = parser.parse_args()
    hopper = torch.cuda.get_device_capability() == (9, 0)
    for name in options.parts:
        if name == "casts":
            each_cast(options.formats)
        elif hopper or name not in HOPPER:
            PARTS[name]()
    torch.cuda.synchronize()
    print("each kernel of", *options.parts, "ran")


def each_cast(prefix):
    """Casts one way and both, of parts, stochastic and rotated; back to values; square blocks' transposes."""
    for dtype in (torch.bfloat16, torch.float32):
        for shape in ((160, 256), (37, 75), (128, 512)):
            x = torch.randn(shape, device="cuda").to(dtype)
            for format in FORMATS:
                if format.name.endswith(("_floor", "_fp32", "_pow2")) or not format.name.startswith(prefix):
                    continue
                for key in (None, 3):
                    q = cuda.quantize(x, format, key=key)
                    if format.square or not format.scale.four_over_six:
                        cuda.quantize_both(x, format, key=key)
                cuda.quantize(x, format, origin=(5, 3))
                cuda.encode(x, format, q.scales, q.tensor_scale)
                for key in (None, 3):
                    cuda.requantize(x.float(), format, q.scales, q.tensor_scale, key=key)
                cuda.dequantize(*q, format, "bfloat16", columns=shape[1])
                if format.square:
                    cuda.transpose(q.codes, q.scales, format, columns=shape[1])


def each_rotation():
    """Rotated casts."""
    for dtype in (torch.bfloat16, torch.float32):
        for shape in ((160, 256), (37, 75), (128, 512)):
            x = torch.randn(shape, device="cuda").to(dtype)
            cuda.quantize_both(x, "nvfp4", rotate=True)


def each_aligned():
    """Quantized straight to aligned codes, and to scales in the order of products: of whole tiles, ragged, and of groups."""
    ends = torch.tensor([100, 100, 141], dtype=torch.int32, device="cuda")
    for dtype in (torch.bfloat16, torch.float32):
        for shape in ((160, 256), (141, 75)):
            x = torch.randn(shape, device="cuda").to(dtype)
            for name in ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1", "fp8_e4m3_1x128"):
                format = Format.parse(name)
                words = cuda_groups.group_rows(ends, shape[0])
                for aligned in ((True, True), (True, False)):
                    cast = OperandCast(format, format, laid=aligned)
                    quantize_matrix(x, cast)
                    cuda_groups.quantize_groups(x, words, 3, cast)


def each_product():
    """Dense, ragged, of groups of rows, and of groups along k."""
    ends = torch.tensor([100, 100, 200], dtype=torch.int32, device="cuda")
    pairs = (("fp8_e4m3_1x128", "fp8_e4m3_128x128"), ("fp8_e4m3_1x128", "fp8_e4m3_1x128"), ("fp8_e4m3", "fp8_e4m3"))
    for left, right in ([Format.parse(name) for name in pair] for pair in pairs):
        for k in (384, 75):
            a = products.Matrix(bfp.quantize(torch.randn(200, k, device="cuda"), left).parts, left)
            b = products.Matrix(bfp.quantize(torch.randn(136, k, device="cuda"), right).parts, right)
            products.multiply_parts(a, b, 136, k, None, torch.bfloat16, False, None)
            scales = b.parts[1].reshape(1) if right.per_tensor else b.parts[1].repeat(3, 1, 1)
            stack = b._replace(parts=[b.parts[0].repeat(3, 1, 1), scales])
            grouped_products.multiply_groups(a, stack, ends, dtype=torch.bfloat16)
        if left == right:
            a, b = (products.Matrix(bfp.quantize(torch.randn(n, 512, device="cuda"), left).parts, left) for n in (72, 136))
            grouped_products.multiply_groups(a, b, ends, dtype=torch.float32)
    for name in ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1"):
        for k in (384, 75):
            left, right = Format.parse(name), Format.parse(f"{name}_32x32")
            a = products.Matrix(bfp.quantize(torch.randn(201, k, device="cuda"), left).parts, left)
            b = products.Matrix(bfp.quantize(torch.randn(130, k, device="cuda"), right).parts, right)
            for other in (a, b):
                products.multiply_parts(a, other, other.parts[0].shape[0], k, None, torch.bfloat16, False, None)


def each_product_of_values():
    """Dense and ragged, of groups of rows, and of groups along k."""
    ends, one = torch.tensor([100, 100, 200], dtype=torch.int32, device="cuda"), torch.ones(1, device="cuda")

    def run(a, b, out):
        planned = plan_values(a.shape[0], b.shape[-2], a.shape[1], matrices=b.shape[0] if b.ndim == 3 else 1)
        workspace = torch.empty(planned.workspace, dtype=torch.uint8, device="cuda")
        grouped = ends if 3 in (b.ndim, out.ndim) else None
        cuda_library.library().product(a, b, one, one, grouped, None, out, workspace, *planned.numbers)

    def random(*shape):
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    for k in (384, 75):
        for dtype in (torch.float32, torch.bfloat16):
            run(random(200, k), random(136, k), torch.empty((200, 136), device="cuda", dtype=dtype))
            run(random(200, k), random(3, 136, k), torch.empty((200, 136), device="cuda", dtype=dtype))
    run(random(72, 512), random(136, 512), torch.empty((3, 72, 136), device="cuda"))


def each_update_of_scales():
    """Of histories shorter and longer than a block of threads, in more operands than one launch takes."""
    lengths = (1, 2, 256, 257, 1024)
    state = [torch.rand(size, device="cuda") for i in range(520) for size in (lengths[i % len(lengths)], 1)]
    newest = torch.empty(520, dtype=torch.int32, device="cuda")
    assert cuda_steps.newest_amaxes(newest, state)
    for given in (None, newest):
        assert cuda_steps.update_scales([(0x43E00000, False)] * 520, given, state)


HOPPER = ("products", "aligned", "values")
"""Parts that run on Hopper alone."""
PARTS = {
    "casts": each_cast,
    "rotations": each_rotation,
    "products": each_product,
    "aligned": each_aligned,
    "values": each_product_of_values,
    "scales": each_update_of_scales,
}


if __name__ == "__main__":
    main()
