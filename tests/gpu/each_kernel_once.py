"""One small case of every kernel, for compute-sanitizer.

compute-sanitizer --tool memcheck python tests/gpu/each_kernel_once.py
compute-sanitizer --tool racecheck python tests/gpu/each_kernel_once.py
"""

import torch
from blockfp.torch_backend.custom_ops import cuda

from blockfp.formats import FORMATS


def main():
    for dtype in (torch.bfloat16, torch.float32):
        for shape in ((160, 256), (37, 75), (128, 512)):
            x = torch.randn(shape, device="cuda").to(dtype)
            for format in FORMATS:
                if format.name.endswith(("_floor", "_fp32", "_pow2")):
                    continue
                for key in (None, 3):
                    q = cuda.quantize(x, format, key=key)
                    cuda.quantize_both(x, format, key=key)
                cuda.quantize(x, format, origin=(5, 3))
                cuda.encode(x, format, q.scales, q.tensor_scale)
                cuda.dequantize(*q, format, "bfloat16", columns=shape[1])
                if format.square:
                    cuda.transpose(q.codes, q.scales, format, columns=shape[1])
            cuda.quantize_both(x, "nvfp4", rotate=True)
            cuda.interleave_scales(cuda.quantize(x, "mxfp8_e4m3").scales)
    torch.cuda.synchronize()
    print("each kernel ran")


if __name__ == "__main__":
    main()
