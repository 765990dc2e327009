"""The products of `blockfp check --products` on a Hopper GPU: the bits of the definition and of the CPU kernels."""

import numpy as np
import pytest
import torch
from blockfp.torch_backend.check import TorchCuda

from blockfp.check import backends, products
from blockfp.formats import FORMATS

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("the kernel is Hopper's", allow_module_level=True)

SUMMATION = products.SUMMATIONS[products.DEFAULT]
MULTIPLIED = [format for format in FORMATS if not products.refusal(format, SUMMATION)]


@pytest.mark.parametrize("format", MULTIPLIED, ids=str)
def test_the_device_has_the_bits_of_a_cpu(format):
    weight = np.random.default_rng(0).standard_normal((301, 409)).astype(np.float32)
    found = products.check_products(weight, format, [*backends.load(["numpy", "kernels"]), TorchCuda()])
    assert (found.compared, found.without) == (("kernels", "torch-cuda"), {})
    assert not found.differences, [str(one) for one in found.differences]


def test_it_says_what_it_can_not_run():
    assert products.lacks(TorchCuda(), products.SUMMATIONS["blackwell_mx"]) == "torch-cuda has no blackwell_mx, but hopper_fp8"
