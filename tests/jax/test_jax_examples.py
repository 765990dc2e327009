"""The examples with other libraries' modules, run as they are."""

import importlib.util
import sys
import warnings
from pathlib import Path

import jax
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with warnings.catch_warnings():
        # What these libraries remark on while they are imported.
        warnings.simplefilter("ignore")
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["flax_mlp", "equinox_mlp"])
def test_a_quantized_module_learns(name):
    pytest.importorskip(name.split("_")[0])
    losses = load(name).main(steps=10)
    assert losses[-1] < 0.5 * losses[0]


def test_the_transformer_learns_a_little(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for module in ("byte_text", "training_report"):
        monkeypatch.setitem(sys.modules, module, load(module))
    train = load("train_jax")
    small = sys.modules["byte_text"].Config(width=32, heads=2, layers=2, context=16, hidden=64)
    monkeypatch.setattr(sys.modules["byte_text"], "Config", lambda: small)
    out, saved = tmp_path / "out.json", tmp_path / "saved"
    saved.mkdir()
    arguments = ["--recipes", "fp8_current", "--steps", "6", "--batch", "8", "--held-out", "8", "--devices", "2"]
    monkeypatch.setattr(sys, "argv", ["train_jax.py", *arguments, "--out", str(out), "--save", str(saved)])
    train.main()
    assert out.exists()
    assert (saved / "fp8_current.safetensors").exists()
    assert jax.device_count() == 8
