"""benchmarks/products.py, te_gpu.py and weight_sync_gpu.py, with small operands on this CPU."""

import sys
from pathlib import Path

import pytest
import torch
from arrays import values

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import argparse
import importlib.util
import json

import gloo
import products as benchmark
import te_gpu

import blockfp.torch as bfp


@pytest.fixture(autouse=True)
def _asked_anew():
    benchmark.deep_gemm_package.cache_clear()
    yield
    benchmark.deep_gemm_package.cache_clear()


@pytest.fixture
def operands():
    x = values((128, 128), 0)
    return bfp.quantize(x, benchmark.ROWS), bfp.quantize(x, benchmark.SQUARES), torch.empty(128, 128)


@pytest.mark.parametrize("error", ["OSError", "ImportError"])
def test_deep_gemm_that_does_not_load_is_left_out(error, operands, tmp_path, monkeypatch, capsys):
    (tmp_path / "deep_gemm.py").write_text(f"raise {error}('deep_gemm/_C.so: undefined symbol: _ZN3c10')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    assert benchmark.deep_gemm(*operands) == benchmark.deep_gemm(*operands) == {}
    (said,) = capsys.readouterr().out.splitlines()
    assert eval(said) == {"contender": "deep_gemm", "left_out": f"{error}: deep_gemm/_C.so: undefined symbol: _ZN3c10"}


def test_deep_gemm_gets_codes_and_scales(operands, tmp_path, monkeypatch, capsys):
    (tmp_path / "deep_gemm.py").write_text("def fp8_gemm_nt(*arguments):\n    return arguments\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    (name,) = kinds = benchmark.deep_gemm(*operands)
    left, right, out = kinds[name]()
    monkeypatch.delitem(sys.modules, "deep_gemm")
    assert name == "deep_gemm"
    for given, q in ((left, operands[0]), (right, operands[1])):
        assert given[0].dtype == torch.float8_e4m3fn
        assert torch.equal(given[0].view(torch.uint8), q.codes)
        assert torch.equal(given[1], q.scales)
    assert out is operands[2]
    assert capsys.readouterr().out == ""


BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@gloo.on(2)
def test_every_contender_runs(rank):
    sys.path.append(str(BENCHMARKS))
    # What `gloo` calls this file; the benchmarks have one of that name.
    sys.modules.pop("ranks", None)
    import weight_sync_gpu

    for recipe, layout in (("fp8_block", "fine-grained-fp8"), ("nvfp4", "modelopt")):
        options = argparse.Namespace(recipe=recipe, layout=layout, layers=2, width=160, bucket_mib=1, repeats=1)
        for contender in ("codes", "codes, sums", "requantized"):
            row = weight_sync_gpu.measure(contender, options, torch.device("cpu"))
            assert row["contender"] == contender
            assert row.get("differing", 0) == 0
            assert ("differing" in row) is (contender != "requantized")
            assert row["sent_MB"] > 0


def test_transformer_engine_is_left_out_with_a_note(tmp_path, capsys):
    if importlib.util.find_spec("transformer_engine") is not None:
        pytest.skip("TransformerEngine is installed")
    record = tmp_path / "te.json"
    te_gpu.main(
        [*["--tiny", "--device", "cpu", "--rounds", "1", "--steps", "1", "--recipes", "fp8_delayed", "--json"], str(record)]
    )
    found = json.loads(record.read_text())
    assert found["about"]["note"] == te_gpu.NOTE
    assert te_gpu.NOTE in capsys.readouterr().out
    assert list(found["results"]) == ["blockfp"]
    assert list(found["results"]["blockfp"]) == list(te_gpu.CASES)
    for case, times in found["results"]["blockfp"].items():
        ways = ["", *[" eager"] * (te_gpu.SHAPES[case].heads > 0), *[" graphs"] * (case == "layers_2048")]
        assert list(times) == [f"{name}{way}" for name in ("bf16", "fp8_delayed") for way in ways]


@pytest.mark.parametrize("case", te_gpu.CASES)
def test_contenders_have_the_same_parameters(case):
    shape, where = te_gpu.TINY[case], {"device": "cpu", "dtype": torch.bfloat16}
    models = te_gpu.plain(case, shape, where), te_gpu.ours(case, shape, "fp8_block", where)
    plain, ours = (sum(param.numel() for param in model.parameters()) for model in models)
    assert plain == ours
