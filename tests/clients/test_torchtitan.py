"""torchtitan 0.3: its debug models through the converter, sharded by its own functions, on ranks that are threads."""

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import threaded
import torch
import torch.nn.functional as F
import training
from documented import run_documented
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

import blockfp.torch as bfp

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:DTensor random operators:UserWarning",
    "ignore:In CPU autocast, but the target dtype:UserWarning",
)  # fmt: skip

STEPS = 3
TOKENS = torch.arange(4 * 65).view(4, 65) * 29 % 2048
SKIP = ("lm_head", "*.router.gate", "*.wkv_a")


@pytest.fixture(scope="module")
def titan():
    # Its Triton kernels for experts are imported with everything else, and this machine has no Triton.
    sys.modules.setdefault("torchtitan.distributed.minimal_async_ep.kernels", MagicMock())
    from torchtitan.distributed import parallel_dims
    from torchtitan.distributed.utils import get_spmd_backend, set_spmd_backend
    from torchtitan.models import deepseek_v3, llama3
    from torchtitan.models.deepseek_v3.parallelize import parallelize_deepseekv3
    from torchtitan.models.llama3.parallelize import parallelize_llama

    from blockfp.integrations import torchtitan as adapter

    # It takes a machine without an accelerator for one with CUDA.
    device, parallel_dims.device_type = parallel_dims.device_type, "cpu"
    backend = get_spmd_backend()
    set_spmd_backend("partial_dtensor")
    yield SimpleNamespace(
        adapter=adapter, llama=(llama3, parallelize_llama), deepseek=(deepseek_v3, parallelize_deepseekv3)
    )  # fmt: skip
    set_spmd_backend(backend)
    parallel_dims.device_type = device


def config_of(titan, name, recipe, **options):
    """Two blocks of a debug model, with attention that needs no compiler."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    converters = [titan.adapter.BlockfpConverter.Config(recipe=recipe, **options)] if recipe else []
    config = getattr(titan, name)[0].model_registry("debugmodel", converters=converters).model
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def made(config):
    with torch.device("meta"):
        model = config.build()
    model.verify_module_protocol()
    return model


def filled(model, values):
    """On the CPU, with torchtitan's own initialization, and then these values."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_states()
    for name, param in model.named_parameters():
        if isinstance(param.to_local() if isinstance(param, DTensor) else param, bfp.QuantizedTensor):
            bfp.load_high_precision_(param, values[name])
        else:
            whole = values[name]
            shared = isinstance(param, DTensor)
            param.detach().copy_(distribute_tensor(whole, param.device_mesh, param.placements) if shared else whole)
    return model


@pytest.fixture(scope="module")
def values(titan):
    found = {}
    for name in ("llama", "deepseek"):
        torch.manual_seed(0)
        model = made(config_of(titan, name, None))
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.init_states()
        found[name] = {key: param.detach() for key, param in model.named_parameters()}
    return found


def optimizer_of(titan, model):
    from torchtitan.components.optimizer import ParamGroupConfig

    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 3e-3})
    return titan.adapter.BlockfpOptimizers.Config(param_groups=[group], implementation="for-loop").build(model_parts=[model])


def train(model, optimizer, rows, steps=STEPS):
    """The sums of these rows' losses, each divided by the number of all tokens."""

    def loss_of(_):
        y = model(TOKENS[rows, :-1])
        y = y.full_tensor() if isinstance(y, DTensor) else y
        return F.cross_entropy(y.float().flatten(0, 1), TOKENS[rows, 1:].flatten(), reduction="sum") / TOKENS[:, 1:].numel()

    return training.train(optimizer, loss_of, range(steps))


def parallel(titan, name, tp, ep, dp=2, **options):
    """A model that torchtitan has cut and sharded, on the meta device."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims

    given = {"data_parallel_shard_degree": dp, "tensor_parallel_degree": tp, "expert_parallel_degree": ep}
    parallelism = ParallelismConfig(**given, spmd_backend="partial_dtensor")
    training = TrainingConfig(seq_len=64)
    config = config_of(titan, name, **options)
    config.update_from_config(
        config=SimpleNamespace(
            parallelism=parallelism,
            training=training,
            compile=CompileConfig(),
            debug=SimpleNamespace(moe_force_load_balance=False),
        )
    )
    model = made(config)
    getattr(titan, name)[1](
        model,
        parallel_dims=ParallelDims.from_config(parallelism, dp * tp),
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def trained(rank, titan, name, tp, ep, values, recipe):
    model = filled(parallel(titan, name, tp, ep, recipe=recipe, skip=SKIP), values)
    local = {key: param.to_local() for key, param in model.named_parameters()}
    quantized = {key for key, param in local.items() if isinstance(param, bfp.QuantizedTensor)}
    before = {key: param.detach().clone() for key, param in local.items()}
    rows = 4 // 2
    losses = train(model, optimizer_of(titan, model), slice(rank // tp * rows, rank // tp * rows + rows))
    for key, param in model.named_parameters():
        # Experts that no token was sent to stand still but for weight decay.
        now, old = (getattr(one, "codes", one) for one in (param.to_local(), before[key]))
        assert not torch.equal(now, old), key
    return losses, quantized


@pytest.mark.parametrize(("name", "tp", "ep"), [("llama", 1, 1), ("llama", 2, 1), ("deepseek", 2, 2)])
def test_debug_models_train_on_a_mesh_as_on_one_rank(titan, values, name, tp, ep):
    alone = filled(made(config_of(titan, name, "mxfp8", skip=SKIP)), values[name])
    expected = train(alone, optimizer_of(titan, alone), slice(None))
    quantized = {key for key, param in alone.named_parameters() if isinstance(param, bfp.QuantizedTensor)}
    results = threaded.run(2 * tp, trained, titan, name, tp, ep, values[name], "mxfp8")
    assert all(found == quantized for _, found in results)
    assert len(quantized) == {"llama": 2 * 5, "deepseek": 15}[name]
    # torchtitan computes in bfloat16 on a mesh.
    losses = [sum(one) / tp for one in zip(*(losses for losses, _ in results), strict=True)]
    assert losses == pytest.approx(expected, rel=0.02)
    assert losses[-1] < 0.75 * losses[0]


def resumed(rank, titan, values):
    """Losses and parameters of a run, and of one that begins with its state dicts after a step."""
    rows = slice(2 * rank, 2 * rank + 2)
    models = [filled(parallel(titan, "llama", 1, 1, recipe="nvfp4"), values) for _ in range(2)]
    optimizers = [optimizer_of(titan, model) for model in models]
    train(models[0], optimizers[0], rows, 1)
    state = {key: value.clone() for key, value in models[0].state_dict().items()}
    moments = {
        key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in optimizers[0].state_dict().items()
    }
    assert any(key.endswith("weight_codes") for key in state)
    models[1].load_state_dict(state)
    optimizers[1].load_state_dict(moments)
    runs = [train(model, optimizer, rows, 2) for model, optimizer in zip(models, optimizers, strict=True)]
    left, right = (model.state_dict() for model in models)
    return runs, [
        key
        for key in left
        if not torch.equal(getattr(left[key], "_local_tensor", left[key]), getattr(right[key], "_local_tensor", right[key]))
    ]


def test_state_dicts_resume_to_the_bit(titan, values):
    # Random keys are drawn from one generator by ranks that are threads: a rank alone draws the same again.
    for (first, second), differing in threaded.run(2, resumed, titan, values["llama"]):
        assert first == second
        assert differing == []


def loaded(rank, titan, values):
    """State dicts hold all codes of query, key and value in one piece, or three matrices of values; both load again."""
    layer, other = "layers.1.attention.qkv_linear.", {name: 2 * value for name, value in values.items()}
    whole = values[layer + "wqkv.weight"]
    for weights, names in (("quantized", ["wqkv.weight"]), ("high_precision", ["wk.weight", "wq.weight", "wv.weight"])):
        left, right = (
            filled(parallel(titan, "llama", 1, 1, recipe="fp8_current", weights=weights), of) for of in (values, other)
        )
        state = {key: value.clone() for key, value in left.state_dict().items()}
        assert sorted(key.removeprefix(layer) for key in state if key.startswith(layer) and key.endswith("weight")) == names
        if weights == "quantized":
            found = bfp.high_precision_state_dict(left)[layer + "wqkv.weight"]
            assert torch.equal(found, bfp.quantize(whole, "fp8_e4m3").dequantize())
        else:
            heads = [state[f"{layer}w{one}.weight"].full_tensor().view(16, -1, 256) for one in "qkv"]
            assert torch.equal(torch.cat(heads, 1).view(whole.shape), whole)
        right.load_state_dict(state)
        for key, value in right.state_dict().items():
            assert torch.equal(*(getattr(one, "_local_tensor", one) for one in (value, state[key]))), key


def test_query_key_and_value_are_saved_whole_or_as_values(titan, values):
    threaded.run(2, loaded, titan, values["llama"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_from_and_to_hugging_face(titan, tmp_path, monkeypatch):
    from command import run
    from safetensors.torch import load_file, save_file

    monkeypatch.chdir(tmp_path)
    plain = titan.llama[0].model_registry("debugmodel")
    model = plain.model.build()
    with torch.no_grad():
        model.init_states()
    hf = plain.state_dict_adapter(plain.model, None).to_hf(model.state_dict())
    save_file(hf, "pretrained.safetensors")
    converters = [titan.adapter.BlockfpConverter.Config(recipe="fp8_current")]
    spec = titan.llama[0].model_registry("debugmodel", converters=converters)
    adapter = run_documented("torchtitan: from Hugging Face", spec=spec)["adapter"]
    exported = run("export", "seed", "values.safetensors", "--prefix", "", "--to", "high-precision")
    assert exported.exit_code == 0, exported.output
    run_documented("torchtitan: to Hugging Face", adapter=adapter)
    found = load_file("model.safetensors")
    assert found.keys() == hf.keys()
    for name, value in hf.items():
        *path, layer, _ = name.split(".")
        # One scale of the tensor: that of the three matrices together.
        three = (
            [hf[".".join((*path, one, "weight"))] for one in ("q_proj", "k_proj", "v_proj")]
            if layer in "q_proj k_proj v_proj"
            else []
        )
        scale = bfp.quantize(torch.cat(three or [value]), "fp8_e4m3").scales if "proj" in layer else None
        expected = value if scale is None else (value / scale).to(torch.float8_e4m3fn).float() * scale
        assert torch.equal(found[name], expected), name


def built(titan, recipe):
    return made(config_of(titan, "llama", recipe))


def test_recipes_by_patterns(titan):
    from blockfp import recipes

    ends = recipes.ends_in_high_precision(recipes.qat("nvfp4"), "layers", 2, end=0)
    model = built(titan, {"feed_forward.w2": "mxfp8", **ends})
    found = {path: str(layer.recipe) for path, layer in model.named_modules() if isinstance(layer, bfp.Linear)}
    assert set(found.values()) == {"mxfp8", "qat(nvfp4)"}
    assert [path for path in found if path.startswith("layers.0.")] == ["layers.0.feed_forward.w2"]
    assert found["layers.1.feed_forward.w2"] == "mxfp8"
    with pytest.raises(ValueError, match="the pattern 'w9' matches no convertible layer"):
        built(titan, {"w9": "mxfp8"})
    with pytest.raises(ValueError, match="recipe 'mxfp9' is not known"):
        built(titan, "mxfp9")


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


@threaded.on(2)
def test_what_cannot_be_cut_is_named(rank, titan):
    with pytest.raises(ValueError, match=r"a QuantizedLinear \(.*\) can't be placed as R: exclude it by skip="):
        parallel(titan, "deepseek", 2, 1, dp=1, recipe="mxfp8", skip=("lm_head", "*.router.gate", "*experts*"))


def test_moments_in_bfloat16_are_refused(titan):
    config = titan.adapter.BlockfpOptimizers.Config(implementation="fused_opt_states_bf16")
    with pytest.raises(ValueError, match="keep moments in fp32"):
        config.build(model_parts=[])


def test_muon_of_some_groups(titan):
    from torchtitan.components.optimizer import ParamGroupConfig

    model = torch.nn.Sequential(bfp.Linear(64, 32, recipe="mxfp8"), torch.nn.LayerNorm(32))
    matrices = ParamGroupConfig(pattern="0.*", optimizer_name="Muon", optimizer_kwargs={"lr": 0.02})
    others = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3})
    config = titan.adapter.BlockfpOptimizers.Config(param_groups=[matrices, others], implementation="fused")
    optimizers = config.build(model_parts=[model])
    assert [type(one) for one in optimizers] == [bfp.Muon, bfp.AdamW]
    model(torch.ones(4, 64)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizers.step()
    assert all((p.detach() != old).any() for p, old in zip(model[1].parameters(), before[2:], strict=True))
    assert "momentum_buffer" in next(iter(optimizers)).state[model[0].weight]


def test_the_documented_lines(titan):
    space = run_documented("torchtitan")
    assert isinstance(space["optimizer"], titan.adapter.BlockfpOptimizers.Config)
    with torch.device("meta"):
        model = space["spec"].model.build()
    assert bfp.summary(model).share > 0.9
