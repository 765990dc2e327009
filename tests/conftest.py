"""What has to be known before a test module imports a framework."""

import os

import pytest

# However early a module makes JAX look for devices.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
# Several workers share a GPU, of which JAX would take three quarters for each.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# torch.compile believes the processor, instead of compiling a program for each instruction set that it names.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


@pytest.fixture
def little_optimization():
    """Of JAX's programs, for tests that compile long and hardly run."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
