"""A user's lines with the NumPy face. mypy and pyright read them; nothing runs them (see tests/README.md)."""

from typing import assert_type

import numpy as np

import blockfp
from blockfp import recipes

x = np.ones((64, 128), np.float32)
q = blockfp.quantize(x, "mxfp8_e4m3")
assert_type(q, blockfp.QuantizedArray)
assert_type(q.mT, blockfp.QuantizedArray)
assert_type(q.shape, tuple[int, ...])
q.dequantize().mean()
blockfp.fake_quantize(x, blockfp.Format.parse("nvfp4")).mean()

name: str = "read from a file"
assert_type(blockfp.Format.parse(name), blockfp.Format)
assert_type(recipes.parse(name), blockfp.Recipe)
assert_type(recipes.qat("nvfp4", "mxfp8_e4m3"), blockfp.Recipe)
half = recipes.mxfp8().replace(gradient=recipes.Cast(None))
assert_type(half, blockfp.Recipe)

# Wrong:
blockfp.quantize(x, "mxpf8_e4m3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
blockfp.quantize(x)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
blockfp.quantize([[1.0]], "nvfp4")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
recipes.qat("fp4")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
recipes.fp8_delayed(algorithm="mean")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
