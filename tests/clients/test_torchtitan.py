"""torchtitan 0.3: its debug Llama with the documented converter, sharded by its own function, on two ranks."""

import sys
from unittest.mock import MagicMock

import pytest
import threaded
import torch
import torch.nn.functional as F
from documented import documented, run_documented
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import distribute_tensor

import blockfp.torch as bfp

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:DTensor random operators:UserWarning"
)

STEPS = 4


@pytest.fixture(scope="module")
def titan():
    # Its Triton kernels for experts are imported with everything else, and this machine has no Triton.
    kernels = "torchtitan.distributed.minimal_async_ep.kernels"
    sys.modules.setdefault(kernels, MagicMock())
    return run_documented("torchtitan")


def built(titan, recipe):
    """Two blocks of the debug model on the meta device, with attention that needs no compiler."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    converters = [titan["BlockfpConverter"].Config(recipe=recipe)] if recipe else []
    config = model_registry("debugmodel", converters=converters).model
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    with torch.device("meta"):
        return config.build()


@pytest.fixture(scope="module")
def values(titan):
    torch.manual_seed(0)
    model = built(titan, None)
    model.to_empty(device="cpu")
    model.init_states()
    return {name: param.detach() for name, param in model.named_parameters()}


def trained(rank, titan, recipe, values):
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

    model = built(titan, recipe)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    apply_fsdp_to_decoder(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, pp_enabled=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_states()
    for name, param in model.named_parameters():
        if isinstance(param.to_local(), bfp.QuantizedTensor):
            bfp.load_high_precision_(param, values[name])
        else:
            param.detach().copy_(distribute_tensor(values[name], param.device_mesh, param.placements))
    container = titan["BlockfpOptimizers"] if recipe else OptimizersContainer
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 3e-3})
    optimizer = container.Config(param_groups=[group], implementation="for-loop").build(model_parts=[model])
    tokens = torch.arange(34).view(2, 17) * 29 % 2048
    losses = []
    for _ in range(STEPS):
        y = model(tokens[rank : rank + 1, :-1])
        loss = F.cross_entropy(y.float().flatten(0, 1), tokens[rank : rank + 1, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, bfp.summary(model).share


def test_the_converter_is_short():
    assert len([line for line in documented("torchtitan").splitlines() if line.strip()]) <= 45


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_current"])
def test_the_debug_model_trains_on_two_ranks(titan, recipe, values):
    plain = threaded.run(2, trained, titan, None, values)
    quantized = threaded.run(2, trained, titan, recipe, values)
    for (losses, share), (expected, none) in zip(quantized, plain, strict=True):
        assert share > 0.7
        assert none == 0
        assert losses[0] == pytest.approx(expected[0], abs=0.15 if recipe == "nvfp4" else 0.05)
        assert losses[-1] == pytest.approx(expected[-1], abs=0.5)
        assert losses[-1] < losses[0] / 4


def test_initializers_of_the_configuration_are_those_that_draw(titan):
    model = built(titan, "mxfp8")
    model.to_empty(device="cpu")
    model.init_states()
    for path, layer in model.named_modules():
        if isinstance(layer, bfp.Linear):
            values = layer.weight.initial
            deep = "w2" in path or "w3" in path or "wo" in path
            assert deep or values.std().item() == pytest.approx(0.02, rel=0.1)
            assert torch.equal(layer.weight.codes, bfp.quantize(values, layer.recipe.weight.format).codes)


def test_a_model_that_is_built_already_can_be_converted(titan):
    model = bfp.convert(built(titan, None), "mxfp8", filter_fn=lambda path, layer: path != "lm_head")
    from torchtitan.models.common.linear import Linear

    converted = [layer for layer in model.modules() if isinstance(layer, bfp.Linear)]
    assert len(converted) == 2 * 5
    assert all(isinstance(layer, Linear) for layer in converted)
    model.verify_module_protocol()
