"""Measured speeds of FP8 products, by which `kernels.products` chooses; rewritten by benchmarks/products.py --table."""

MEASURED: dict[str, tuple[tuple[int, int, int, int, int], ...]] = {
    "tensor": ((8192, 8192, 8192, 0, 1290),),
    "tensor fast": ((8192, 8192, 8192, 0, 1290),),
    "squares": (
        (8192, 8192, 8192, 1074, 1142),
        (16384, 16384, 4096, 1047, 1132),
        (16384, 4096, 16384, 1009, 1146),
        (4096, 16384, 16384, 1051, 1132),
        (8192, 14336, 4096, 1026, 1116),
        (8192, 6144, 4096, 1011, 1087),
        (4096, 4096, 4096, 933, 1097),
        (4096, 7168, 2048, 860, 1012),
        (8192, 1536, 4096, 986, 1055),
        (512, 4096, 4096, 982, 1019),
        (64, 8192, 4096, 246, 299),
    ),
    "rows": (
        (8192, 8192, 8192, 903, 888),
        (16384, 4096, 16384, 868, 870),
        (4096, 16384, 16384, 907, 867),
        (14336, 4096, 8192, 879, 879),
        (6144, 4096, 8192, 887, 882),
        (4096, 4096, 8192, 862, 898),
        (7168, 2048, 4096, 823, 885),
        (2048, 768, 8192, 675, 591),
    ),
}
"""For each kind of product (m, n, k, TFLOP/s of the library's own kernel, of cuBLASLt) on one H200. "tensor": of operands with
one scale; "tensor fast": the same, where sums may keep fewer bits; "squares": of 1x128 by 128x128; "rows": of 1x128 by
1x128."""
