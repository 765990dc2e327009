"""Checks an installed release in an otherwise empty environment: `python -P check_release.py cpu [cuda]`.

The package must contain exactly the named libraries, they must load, and kernels and definition must quantize to the same bits.
The quantized array is left in small.npy.
"""

import ctypes
import os
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import numpy
import tvm_ffi

import blockfp
from blockfp.kernels import native, switch

package = Path(blockfp.__file__).parent
assert package.is_relative_to(sys.prefix), f"{package} isn't installed in {sys.prefix}"
assert not [name for name in ("jax", "torch") if find_spec(name)], "the environment isn't empty"
assert metadata.version("blockfp") == blockfp.__version__

found = {path.stem.removeprefix("libblockfp_") for path in package.glob("kernels/*.so")}
assert found == set(sys.argv[1:]), f"kernels in the package: {found}; asked for: {sys.argv[1:]}"
for kernels in found:
    # RTLD_NOW resolves every symbol, so missing ones show without a device.
    ctypes.CDLL(str(package / f"kernels/libblockfp_{kernels}.so"), os.RTLD_NOW)

x = numpy.linspace(-3, 3, 4096, dtype="f4").reshape(32, 128)
for format in ("mxfp8_e4m3", "nvfp4", "fp8_e5m2_1x128"):
    assert native.available()
    by_kernels = blockfp.quantize(x, format)
    with switch.definition_only():
        by_definition = blockfp.quantize(x, format)
    assert numpy.array_equal(by_kernels.codes, by_definition.codes), format
    assert numpy.array_equal(by_kernels.scales, by_definition.scales), format
numpy.save("small.npy", x)
print(f"blockfp {blockfp.__version__} in {package}: kernels {sorted(found)}, apache-tvm-ffi {tvm_ffi.__version__}")
