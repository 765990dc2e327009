"""Settings that have to be there before a test module imports a framework."""

import gc
import os
import random
import sys

import pytest

# However early a module makes JAX look for devices.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
# Several workers share a GPU, of which JAX would take three quarters for each.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Ranks are threads, and workers are processes: more threads for each one's sums would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch.compile believes the processor, instead of compiling a program for each instruction set that it names.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

PROCESSORS = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def own_processors():
    """This worker's share of the processors, or all where it is alone: workers have work for each other's too."""
    workers, worker = (os.environ.get(f"PYTEST_XDIST_{name}", "") for name in ("WORKER_COUNT", "WORKER"))
    return set(sorted(PROCESSORS)[int(worker.removeprefix("gw")) :: int(workers)]) if workers else PROCESSORS


if own_processors():
    os.sched_setaffinity(0, own_processors())


def pytest_collection_finish():
    """Modules stay: looking through all of them again and again for garbage took a tenth of the tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Each test draws the same numbers, and is told the same, behind any others."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    plans, adamw = (
        sys.modules.get(f"blockfp.torch_backend.{name}") for name in ("linear.tensor_parallel.operand_plans", "optimizer.adamw")
    )
    if plans is not None:
        plans._told.clear()
        plans._rank_plan.cache_clear()
    if adamw is not None:
        adamw._told.clear()


@pytest.fixture(params=["kernels", "definition"])
def route(request):
    """Both of what can run behind the faces on a CPU, which must not differ in a bit; the name of the one."""
    from blockfp.kernels import native, switch

    if request.param == "definition":
        with switch.definition_only():
            yield request.param
    elif native.available():
        yield request.param
    else:
        pytest.skip(native.status())


@pytest.fixture
def every_processor():
    """Lets a test's threads run at the same time, whatever its worker's share is."""
    before = os.sched_getaffinity(0) if PROCESSORS else set()
    if before:
        os.sched_setaffinity(0, PROCESSORS)
    yield
    if before:
        os.sched_setaffinity(0, before)


@pytest.fixture
def little_optimization(request, monkeypatch):
    """Compiles JAX's programs with little optimization, except in tests marked `optimized` (all, or the formats it names)."""
    import jax
    from jax._src import compiler

    mark = request.node.get_closest_marker("optimized")
    if mark is not None and (not mark.args or request.node.callspec.params["format"] in mark.args[0]):
        yield
        return
    original = compiler.get_compile_options

    def options(*arguments, **named):
        made = original(*arguments, **named)
        # XLA's newer generator of fused loops, a third of the time of compiling. From JAX 0.11 on there is no other.
        if jax.__version_info__ < (0, 11):
            made.env_option_overrides = [*made.env_option_overrides, ("xla_cpu_use_fusion_emitters", False)]
        return made

    monkeypatch.setattr(compiler, "get_compile_options", options)
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
