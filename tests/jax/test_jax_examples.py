"""The examples with other libraries' modules, run as they are."""

import importlib.util
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
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


def in_float64(block, x):
    """What a block of `flax_moe` is to give."""
    experts = block.experts
    scale, router, gate_up, down = (
        np.asarray(p.get_value(), np.float64) for p in (block.norm.scale, experts.router.kernel, experts.gate_up, experts.down)
    )
    h = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-6) * scale
    scores = np.exp(h @ router)
    out = x.copy()
    for token, score in enumerate(scores):
        best = np.argsort(-score)[: experts.k]
        for expert, weight in zip(best, score[best] / score[best].sum(), strict=True):
            gate, up = np.split(gate_up[expert] @ h[token], 2)
            out[token] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def test_a_mixture_of_experts_is_near_float64_and_trains_as_bf16_does():
    nnx = pytest.importorskip("flax.nnx")
    moe = load("flax_moe")
    # In float32, in which the router chooses as it does in float64.
    x = jax.random.normal(jax.random.key(1), (256, 64))
    error, losses = {}, {}
    for recipe in ("mxfp8", "fp8_current", None):
        block = moe.Block(64, 96, 8, 2, nnx.Rngs(0), recipe=recipe)
        want = in_float64(block, np.asarray(x, np.float64))
        got = np.asarray(nnx.jit(lambda block, x: block(x))(block, x), np.float64)
        error[recipe] = np.linalg.norm(got - want) / np.linalg.norm(want - np.asarray(x, np.float64))
        losses[recipe] = moe.main(10, recipe)
    assert error[None] < 1e-4
    for recipe in ("mxfp8", "fp8_current"):
        assert error[recipe] < 0.09
        np.testing.assert_allclose(losses[recipe], losses[None], rtol=0.02)
    assert losses[None][-1] < 0.5 * losses[None][0]


@pytest.mark.parametrize("name", ["flax_mlp", "equinox_mlp"])
def test_a_quantized_module_learns(name):
    pytest.importorskip(name.split("_")[0])
    losses = load(name).main(steps=10)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("mlp", ["fp8_delayed", "nvfp4"])
def test_a_llama_goes_on_from_its_checkpoint_with_the_same_bits(tmp_path, monkeypatch, mlp):
    pytest.importorskip("orbax.checkpoint")
    monkeypatch.syspath_prepend(EXAMPLES)
    llama = load("train_llama_jax")
    small = llama.Sizes(width=64, inner=96, layers=2, batch=8, length=32)
    monkeypatch.setattr(llama, "Sizes", lambda: small)

    def losses(*arguments):
        monkeypatch.setattr(sys, "argv", ["train_llama_jax.py", "--mlp", mlp, *arguments])
        return llama.train(llama.parsed())

    whole = losses("--steps", "3")
    assert losses("--steps", "2", "--save", str(tmp_path / "run")) == whole[:2]
    # A profile takes longer to begin than all of these steps.
    profile = ("--profile", str(tmp_path / "trace")) if mlp == "nvfp4" else ()
    assert losses("--steps", "3", "--resume", str(tmp_path / "run"), *profile) == whole[2:]
    assert bool(profile) == bool(list((tmp_path / "trace").rglob("*.trace.json.gz")))
    assert whole[2] < whole[0]
