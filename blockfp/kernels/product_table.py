"""Measured speeds of FP8 products, by which `kernels.products` chooses; rewritten by benchmarks/products.py --table."""

MEASURED: dict[str, tuple[tuple[int, int, int, int, int], ...]] = {
    "tensor": ((8192, 8192, 8192, 0, 1290),),
    "tensor fast": ((8192, 8192, 8192, 0, 1290),),
    "squares": (
        (8192, 8192, 8192, 1151, 1126),
        (16384, 16384, 4096, 1095, 1103),
        (16384, 4096, 16384, 1109, 1151),
        (4096, 4096, 4096, 955, 1036),
        (4096, 7168, 2048, 882, 965),
        (512, 4096, 4096, 833, 659),
    ),
    "rows": (
        (8192, 8192, 8192, 884, 856),
        (4096, 16384, 16384, 896, 875),
        (16384, 4096, 16384, 859, 880),
        (6144, 4096, 8192, 870, 856),
        (4096, 4096, 8192, 765, 866),
        (2048, 768, 8192, 546, 565),
    ),
}
"""For each kind of product (m, n, k, TFLOP/s of the library's own kernel, of cuBLASLt) on one H200. "tensor": of operands with one
scale; "tensor fast": the same, where sums may keep fewer bits; "squares": of 1x128 by 128x128; "rows": of 1x128 by 1x128."""
