"""What must not be in a compiled program: XLA's division is a product with a reciprocal, its exp, log and pow are inexact."""

import re

import jax
import jax.numpy as jnp
import pytest

import blockfp.jax as bfp
from blockfp.formats import FORMATS

FORBIDDEN = re.compile(r"\b(divide|remainder|exponential|exponential-minus-one|log|log-plus-one|power|sqrt|rsqrt|cbrt|tanh)\(")
CUSTOM_CALL = re.compile(r"custom_call_target=\S+")


def program(x, key, format):
    nearest = bfp.quantize(x, format)
    return nearest, nearest.dequantize("float16"), nearest.dequantize(), bfp.quantize(x, format, key=key)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_no_inexact_operation(format, dtype):
    lowered = jax.jit(program, static_argnames="format").lower(
        jnp.zeros((150, 136), dtype), jnp.zeros(2, jnp.uint32), format=format
    )
    texts = [lowered.compiler_ir("hlo").as_hlo_text()]
    if dtype == "float32":
        texts.append(lowered.compile().as_text())
    for text in texts:
        assert "multiply(" in text
        assert FORBIDDEN.findall(text) == []
        assert CUSTOM_CALL.findall(text) == []


def test_the_scan_sees_a_division():
    lowered = jax.jit(lambda x: x / 3 + jnp.exp2(x)).lower(jnp.ones(4))
    assert set(FORBIDDEN.findall(lowered.compiler_ir("hlo").as_hlo_text())) >= {"divide"}
