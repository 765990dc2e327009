"""Compares the backends on one array from Python, as `blockfp check` does for files.

A backend is any object with a name, a version, quantize and dequantize. A deliberately wrong one is detected here.
"""

import numpy as np

import blockfp
from blockfp.check import crosscheck


class OffByOne(crosscheck.Definition):
    name = "off-by-one"

    def quantize(self, x, format):
        q = super().quantize(x, format)
        q.codes[3, 40] ^= 1
        return q


x = np.random.default_rng(0).standard_normal((128, 256)).astype(np.float32)
result = crosscheck.check(x, "mxfp8_e4m3", [crosscheck.Definition(), OffByOne()])
print("identical:", result.identical)
for difference in result.differences:
    print(difference)
print(f"SQNR {result.statistics.sqnr_db:.2f} dB, codes {result.codes_sha256[:16]}")

# The same code and scale bytes come from the NumPy face, with or without kernels.
q = blockfp.quantize(x, "mxfp8_e4m3")
print(q, q.codes.nbytes + q.scales.nbytes, "bytes")
