"""The implementation that runs, and errors where one can't."""

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from blockfp.jax_backend.check import JaxBackend, JaxXla
from blockfp.jax_backend.implementations import choice, cuda
from blockfp.jax_backend.implementations.backend import Backend
from blockfp.jax_backend.implementations.cpu import CpuLibrary
from blockfp.jax_backend.implementations.cuda import CudaLibrary
from blockfp.jax_backend.implementations.pallas.backend import Pallas
from blockfp.jax_backend.implementations.xla import Xla
from blockfp.jax_backend.linear import products

import blockfp.jax as bfp
from blockfp.formats import MXFP6, MXFP8

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a machine without a GPU says")
X = jnp.ones((4, 64))


def test_the_cpu_library_is_chosen_where_it_is():
    for operation in ("quantize", "dequantize", "quantize_columnwise", "quantize_both", "amax"):
        assert choice.choose(None, operation, format=MXFP8).name == ("xla" if choice.missing("ffi") else "ffi")
    q = bfp.quantize(X, "mxfp8_e4m3", implementation="xla")
    assert (q.codes == bfp.quantize(X, "mxfp8_e4m3").codes).all()
    assert (q.dequantize(implementation="xla") == X).all()


def test_what_is_asked_for_and_can_not_run_raises():
    with pytest.raises(
        RuntimeError, match="implementation='pallas' can't run here: it needs a CUDA device, and JAX runs on cpu"
    ):
        bfp.quantize(X, "mxfp8_e4m3", implementation="pallas")
    with pytest.raises(RuntimeError, match="use implementation='xla'"):
        bfp.quantize(X, "mxfp8_e4m3").dequantize(implementation="pallas")
    with pytest.raises(RuntimeError, match="CUDA device"):
        bfp.fake_quantize(X, "mxfp8_e4m3", implementation="pallas")


def test_an_unknown_name_raises():
    with pytest.raises(ValueError, match=r"must be None or one of ffi, pallas, xla, got 'triton'"):
        bfp.quantize(X, "mxfp8_e4m3", implementation="triton")


def test_kernels_that_are_not_there_are_named(monkeypatch):
    pytest.importorskip("absl", reason="Pallas of JAX 0.10 imports it") if jax.__version__.startswith("0.10") else None
    monkeypatch.setattr(choice, "missing", lambda name: None)
    with pytest.raises(ValueError, match="no Pallas kernel does quantize of mxfp6_e3m2"):
        choice.choose("pallas", "quantize", format=MXFP6)
    with pytest.raises(ValueError, match="the Pallas kernels round to nearest"):
        choice.choose("pallas", "quantize", format=MXFP8, stochastic=True)
    with pytest.raises(ValueError, match=r"origin \(0, 8\) lies inside one of mxfp8_e4m3"):
        choice.choose("pallas", "dequantize", format=MXFP8, origin=(0, 8))
    assert choice.choose("pallas", "dequantize", format=MXFP8, origin=(3, 64)).name == "pallas"
    chosen = choice.choose("pallas", "quantize", format=MXFP8)
    assert (chosen.name, chosen.asked) == ("pallas", True)


def test_the_first_that_is_there_is_chosen(monkeypatch):
    pytest.importorskip("absl", reason="Pallas of JAX 0.10 imports it") if jax.__version__.startswith("0.10") else None
    monkeypatch.setattr(choice, "has_gpu", lambda: True)
    monkeypatch.setattr(choice, "would_be_partitioned", lambda: False)
    monkeypatch.setattr(choice, "missing", lambda name: "not installed" if name == "ffi" else None)
    assert choice.choose(None, "quantize", format=MXFP8).name == "pallas"
    assert choice.choose(None, "quantize", format=MXFP6).name == "xla"
    monkeypatch.setattr(choice, "missing", lambda name: None)
    assert choice.choose(None, "quantize", format=MXFP6).name == "ffi"
    monkeypatch.setattr(choice, "would_be_partitioned", lambda: True)
    assert choice.choose(None, "quantize", format=MXFP8).name == "xla"


def test_info_says_which_runs_and_why(monkeypatch):
    monkeypatch.setattr(choice, "missing", lambda name: None)
    assert 'casts by "ffi"' in JaxBackend().version
    monkeypatch.setattr(choice, "missing", lambda name: None if name == "xla" else f"no {name} here")
    assert 'casts by "xla" (not "ffi": no ffi here)' in JaxBackend().version
    assert "casts by" not in JaxXla().version


def test_only_inside_shard_map_are_kernels_run_on_several_devices():
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    assert choice.would_be_partitioned() == (jax.device_count() > 1)
    seen = []

    def body(x):
        seen.append(choice.would_be_partitioned())
        return x

    spec = jax.sharding.PartitionSpec("x")
    jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))(jnp.ones(jax.device_count()))
    assert seen == [False]


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed"])
def test_kernels_inside_shard_map_vary_as_the_definition_does(recipe, monkeypatch):
    """Traced as on a GPU: JAX's account of what values vary over must not depend on who makes them."""
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    cut = jax.sharding.PartitionSpec("fsdp")
    placed = bfp.shard_params(bfp.quantize_params(jnp.ones((512, 256), jnp.bfloat16), recipe), mesh, cut)
    state = bfp.delayed_state(recipe) if recipe == "fp8_delayed" else None
    for module, name, answer in (
        (choice, "has_gpu", True),
        (choice, "missing", None),
        (products, "capability", (9, 0)),
        (cuda, "cublas_version", 120900),
    ):
        monkeypatch.setattr(module, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(cuda, "_register", "blockfp_{}".format)

    def body(w, x):
        def loss(w, x):
            y = bfp.linear(x, w, recipe=recipe, state=state, data_axes=("fsdp",))
            return jax.tree.leaves(y)[0].astype(jnp.float32).sum()

        return bfp.grad(loss, (0, 1))(w, x)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(bfp.partition_specs(placed), cut), out_specs=(cut, cut))
    program = str(jax.jit(mapped).trace(placed, jnp.ones((1024, 256), jnp.bfloat16)).jaxpr)
    assert "blockfp_quantize" in program
    assert "blockfp_product" in program
    # Casts measure the amax themselves.
    assert "blockfp_amax" not in program


def test_why_cublas_gets_no_product(monkeypatch):
    monkeypatch.setattr(choice, "would_be_partitioned", lambda: False)
    assert "it needs a CUDA device" in choice.missing_product(120900)
    monkeypatch.setattr(choice, "has_gpu", lambda: True)
    monkeypatch.setattr(choice, "missing", lambda name: None)
    for found, says in ((0, "neither libcublasLt.so.13"), (120800, "cuBLASLt is 120800, and 120900 or later"), (130100, None)):
        monkeypatch.setattr(cuda, "cublas_version", lambda found=found: found)
        missing = choice.missing_product(120900)
        assert says in missing if says else missing is None
    monkeypatch.setattr(choice, "would_be_partitioned", lambda: True)
    assert choice.missing_product(0) == "XLA may have to split the product over devices"


@pytest.mark.parametrize("kind", [Xla, CpuLibrary, CudaLibrary, Pallas])
def test_every_backend_takes_the_same_arguments(kind):
    for operation in Backend.__abstractmethods__:
        taken, stated = (
            [(p.name, p.kind, p.default) for p in inspect.signature(getattr(each, operation)).parameters.values()]
            for each in (kind, Backend)
        )
        mark = [("mark", inspect.Parameter.KEYWORD_ONLY, False)] if kind.marks and operation.startswith("quantize") else []
        assert taken == stated + mark


def test_private_parts_of_jax_are_imported_in_one_file():
    root = Path(choice.__file__).parents[1]
    found = {str(file.relative_to(root)) for file in root.rglob("*.py") if "jax._src" in file.read_text()}
    assert found == {"implementations/jax_internals.py"}
