"""The examples with other libraries' modules, run as they are."""

import importlib.util
import sys
import warnings
from pathlib import Path

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
