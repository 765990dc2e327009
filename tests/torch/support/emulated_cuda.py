"""The CUDA path with kernels that the definition carries out in float64: `with emulated_cuda.launches(): layer(x)`."""

import sys
from pathlib import Path

import emulated_groups
import emulated_kernels
import torch
import two_pass_kernels

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import standin

FUNCTIONS = {each.__name__: each for each in (*emulated_kernels.FUNCTIONS, *emulated_groups.FUNCTIONS)}


class Library:
    """The functions, where a test replaces the library of one module; `calls` has the names of those called."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            return FUNCTIONS[name](*arguments)

        return call


def launches(**replaced):
    """Lets CPU tensors take the CUDA path until the block ends, with the results of a GPU; `replaced` functions by name."""
    return standin.launches(FUNCTIONS | replaced | _of_the_optimizer(), [(torch.mm, _mm)])


_own_mm = torch.mm


def _mm(a, b, *, out_dtype=None):
    """torch.mm, whose sums have another dtype than what is multiplied on CUDA devices only."""
    return _own_mm(a, b) if out_dtype is None else _own_mm(a.to(out_dtype), b.to(out_dtype))


def _of_the_optimizer():
    kernels = two_pass_kernels.Kernels()

    def addresses(found, expected, *arrays):
        found[:], misfit = kernels.addresses(arrays, expected)
        return misfit

    def count_steps(found, *steps):
        for i, step in enumerate(steps):
            step += 1
            found[i] = int(step)
        return -1

    return {"addresses": addresses, "count_steps": count_steps, "adamw": kernels.adamw, "adamw_codes": kernels.adamw_codes}
