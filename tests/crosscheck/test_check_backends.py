"""The backends of `blockfp check`: each program that computes the definition is one, and one that is wrong or fails is said."""

import contextlib
import functools
import sys

import numpy as np
import pytest
from command import plain, run
from samples import sample

from blockfp.check import backends, crosscheck
from blockfp.check.crosscheck import Definition
from blockfp.definition import numerics
from blockfp.formats import Format

FORMAT = "mxfp8_e4m3"
MATRIX = sample("bf16_valued", (40, 64))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.npz"
    np.savez(path, w=MATRIX)
    return path


class Mine(Definition):
    """A backend of one's own that has one format, and fails on another."""

    name = "mine"

    def quantize(self, x, format):
        if format.name == "mxint8":
            raise ValueError("operands could not be broadcast together")
        if format.name != FORMAT:
            raise NotImplementedError("it multiplies nothing else")
        return super().quantize(x, format)


@pytest.fixture(autouse=True)
def mine(monkeypatch):
    monkeypatch.setitem(sys.modules, "mine", sys.modules[__name__])


@contextlib.contextmanager
def broken_xla(monkeypatch):
    """XLA's program of the definition, with every code wrong; the kernels are as they were."""
    import jax
    from blockfp.jax_backend.implementations.xla import Xla

    own = Xla.quantize

    def wrong(self, *arrays, **options):
        q = own(self, *arrays, **options)
        return q._replace(codes=q.codes ^ 1)

    jax.clear_caches()
    with monkeypatch.context() as patch:
        patch.setattr(Xla, "quantize", wrong)
        yield
    jax.clear_caches()


def test_xlas_program_is_checked(file, monkeypatch):
    pytest.importorskip("jax")
    with broken_xla(monkeypatch):
        result = run("check", file, "--format", FORMAT)
    assert result.exit_code == 1, result.output
    assert f"w, {FORMAT}: jax-xla: codes[0, 0] of input" in result.stdout
    assert "through numpy, " in result.stdout


def test_every_program_is_listed(monkeypatch):
    def broken():
        raise RuntimeError("no such symbol")

    monkeypatch.setitem(backends.BACKENDS, "kernels", broken)
    lines = run("info").stdout.splitlines()
    for name in ("jax-xla", "jax-pallas", "torch-cuda", "torch-compiled", "torch-definition"):
        assert any(line.startswith(f"backend {name} ") for line in lines), name
    assert any(line.startswith("backend kernels") and "broken: RuntimeError: no such symbol" in line for line in lines)


def test_where_no_name_is_given_those_that_take_long_stay_away(monkeypatch):
    made = []

    def make(name):
        made.append(name)
        return type("Backend", (Definition,), {"name": name})()

    for name in list(backends.BACKENDS):
        monkeypatch.setitem(backends.BACKENDS, name, functools.partial(make, name))
    backends.load(None)
    assert set(backends.BACKENDS) - set(made) == {"jax-pallas", "torch-compiled"}
    made.clear()
    assert [backend.name for backend in backends.load(["all"])] == made == list(backends.BACKENDS)


def test_a_backend_that_fails(file):
    result = run("check", file, "--format", "mxint8", "--backend", "mine:Mine")
    assert result.exit_code == 3
    said = plain(result.stderr)
    where = f"error: {file}, tensor 'w': backend 'mine', format mxint8, float32 array of shape (40, 64): "
    assert f"{where}ValueError: operands could not be broadcast together" in said
    assert "Traceback" in said


def test_formats_that_a_backend_does_not_have(file):
    chosen = ("--format", FORMAT, "--format", "nvfp4")
    result = run("check", file, *chosen, "--backend", "numpy", "--backend", "kernels", "--backend", "mine:Mine")
    assert result.exit_code == 0, result.output
    assert "mine has no nvfp4: skipped for these" in result.stdout
    result = run("check", file, *chosen, "--backend", "mine:Mine")
    assert result.exit_code == 2
    assert "only one backend has nvfp4, nothing to compare" in plain(result.stdout)
    found = crosscheck.check(MATRIX, "nvfp4", [Definition(), Mine()])
    assert (found.compared, found.without) == ((), {"mine": "it multiplies nothing else"})
    with pytest.raises(ValueError, match="backend 'mine', the reference, has no nvfp4"):
        crosscheck.check(MATRIX, "nvfp4", [Mine(), Definition()])


def test_one_backend_alone_checks_nothing(file, tmp_path):
    """Its report can be compared with another machine's all the same."""
    result = run("check", file, "--format", FORMAT, "--backend", "numpy", "--report", tmp_path / "report.json")
    assert result.exit_code == 2
    assert "only one backend, nothing to compare" in plain(result.stdout)
    assert run("check", "--compare", *[tmp_path / "report.json"] * 2).exit_code == 0


def test_what_a_backend_gives_must_be_arrays(file):
    broken = Definition()
    broken.name, broken.quantize = "broken", lambda x, format: numerics.quantize(x, format)._replace(codes=[1])
    with pytest.raises(ValueError, match=r"backend 'broken': codes must be a NumPy array, got list"):
        crosscheck.check(MATRIX, FORMAT, [Definition(), broken])


@pytest.mark.parametrize("name", [FORMAT, "nvfp4"])
def test_pallas_kernels_are_interpreted_on_a_cpu(name):
    """With NaN, both zeros and saturation. (XLA on CPUs flushes subnormal numbers, among them the scale of an Inf in MX.)"""
    pytest.importorskip("jax")
    try:
        pallas = backends.BACKENDS["jax-pallas"]()
    except ImportError as error:
        pytest.skip(str(error))
    x = sample("bf16_valued", (33, 70))
    x[0, :4] = (np.nan, 0.0, -0.0, 1e30)
    result = crosscheck.check(x, name, [Definition(), pallas])
    assert result.compared == ("jax-pallas",)
    assert result.identical, [str(d) for d in result.differences]
    with pytest.raises(NotImplementedError, match="no Pallas kernel does"):
        pallas.quantize(x, Format.parse("mxfp6_e2m3"))


def test_compiled_programs_of_torch():
    pytest.importorskip("torch")
    compiled = backends.BACKENDS["torch-compiled"]()
    for dtype in ("float32", "bfloat16"):
        x = sample("special", (33, 70), dtype)
        assert crosscheck.check(x, FORMAT, [Definition(), compiled]).identical
