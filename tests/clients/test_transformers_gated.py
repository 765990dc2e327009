"""MLPs that `convert` finds in transformers' models: cast as they are made, with the bits of those that are not."""

import ast
import copy
import functools
import importlib.util
import io
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from blockfp.torch_backend.modules import convert as convert_module
from blockfp.torch_backend.modules import gated_mlp
from blockfp.torch_backend.modules.gated_mlp import FusedMLP, activation_of, parts_of
from blockfp.torch_backend.modules.shared_inputs import READERS
from counted_casts import casts_of
from torch import nn

import blockfp.torch as bfp

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 128, "max_position_embeddings": 64, "head_dim": 16, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "Llama": {},
    "Qwen3": {},
    "Mistral": {},
    "Gemma": {},
    "Gemma3Text": {},
    "Phi3": {},
    "GPTNeoX": {"hidden_act": "gelu"},
    "Olmo2": {},
    "DeepseekV3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
        "head_dim": 8, "num_key_value_heads": 4,
    },
}  # fmt: skip


def model_of(name, dtype=torch.float32):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SMALL | MODELS[name]))
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)


def converted(name, recipe, fused, monkeypatch, dtype=torch.float32):
    with monkeypatch.context() as patch:
        if not fused:
            patch.setattr(convert_module, "fused_class", lambda mlp: None)
        return bfp.convert(
            model_of(name, dtype), recipe, filter_fn=lambda path, layer: "lm_head" not in path and "embed_out" not in path
        )


def step(model, seed=0):
    """Logits and gradients."""
    tokens = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    logits = model(tokens).logits
    logits.backward(torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits.dtype))
    bfp.update_scales(model)
    return {"logits": logits.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, one in ours.items():
        assert torch.equal(one, theirs[name]), name


def fused_in(model):
    return [module for module in model.modules() if isinstance(module, FusedMLP)]


@pytest.mark.parametrize("name", MODELS)
def test_bits(name, monkeypatch):
    for recipe in ("mxfp8", "fp8_delayed"):
        model, other = (converted(name, recipe, fused, monkeypatch) for fused in (True, False))
        assert fused_in(model)
        assert not fused_in(other)
        assert list(model.state_dict()) == list(other.state_dict())
        for seed in range(2):
            assert_equal(step(model, seed), step(other, seed))


def test_bfloat16_and_no_gradients(monkeypatch):
    model, other = (converted("Qwen3", "fp8_block", fused, monkeypatch, torch.bfloat16) for fused in (True, False))
    assert_equal(step(model), step(other))
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens).logits, other.eval()(tokens).logits)


def test_a_fused_mlp_stays_what_it_was(monkeypatch):
    """Its class is derived from its own; copies and pickles are it; state dicts have its names."""
    model = converted("Llama", "mxfp8", True, monkeypatch)
    mlp = model.model.layers[0].mlp
    assert isinstance(mlp, transformers.models.llama.modeling_llama.LlamaMLP)
    wanted = step(model)
    for other in (copy.deepcopy(model), _pickled(model)):
        assert type(other.model.layers[0].mlp) is type(mlp)
        assert_equal(step(other), wanted)


def _pickled(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def test_what_looks_or_replaces_sees_what_it_would(monkeypatch):
    model, other = (converted("Llama", "mxfp8", fused, monkeypatch) for fused in (True, False))
    seen = []
    for one in (model, other):
        one.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda layer, args: seen.append(args[0].detach()))
        one.model.layers[1].mlp.act_fn.register_forward_hook(lambda layer, args, y: 2 * y)
    assert_equal(step(model), step(other))
    assert torch.equal(seen[0], seen[1])
    for one in (model, other):
        one.model.layers[0].mlp.act_fn = nn.ReLU()
        torch.manual_seed(0)
        one.model.layers[1].mlp.up_proj = nn.Sequential(one.model.layers[1].mlp.up_proj, nn.Linear(96, 96))
        one.model.layers[1].mlp.down_proj = nn.Linear(96, 64)
    assert_equal(step(model), step(other))


def test_checkpointed(monkeypatch):
    found = []
    for fused in (True, False):
        model = converted("Llama", "fp8_current", fused, monkeypatch)
        model.activation_checkpointing_enable()
        found.append(step(model.train()))
    assert_equal(*found)


@pytest.mark.parametrize("name", ["Llama", "Gemma", "Phi3", "GPTNeoX"])
def test_compiled_whole(name, monkeypatch):
    torch._dynamo.reset()
    model = converted(name, "mxfp8", True, monkeypatch)
    mlp = fused_in(model)[0]
    other = copy.deepcopy(mlp)
    other.compile(fullgraph=True, backend="aot_eager")
    results = []
    for one in (mlp, other):
        x = torch.randn((2, 16, 64), generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = one(x)
        y.backward(torch.ones_like(y))
        results.append({"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in one.named_parameters()}})
    assert_equal(*results)


class Changed(nn.Module):
    """Forwards that are nearly known."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down, self.act = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.SiLU()

    def known(self, hidden):
        """With a docstring, and names of its own."""
        return self.down(self.act(self.gate(hidden)) * self.up(hidden))

    def function(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh"))

    def by_nn(self, x):
        return self.down(nn.functional.gelu(self.up(x)))

    def other_approximation(self, x):
        return self.down(F.gelu(self.up(x), approximate="none"))

    def added(self, x):
        return self.down(self.act(self.gate(x)) + self.up(x))

    def scaled(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x) * 2)

    def swapped(self, x):
        return self.down(self.gate(self.act(x)) * self.up(x))

    def other_function(self, x):
        return self.down(F.mish(self.gate(x)) * self.up(x))

    def with_default(self, x=None):
        return self.down(self.act(self.gate(x)) * self.up(x))

    def method(self, x):
        return self.down(self.bend(self.gate(x)) * self.up(x))

    def bend(self, x):
        return x


def test_forwards_are_known_exactly():
    def parts(name):
        return parts_of(type("Other", (Changed,), {"forward": vars(Changed)[name]}))

    assert parts("known") == ("down", "gate", "up", "act", False, None)
    assert parts("function") == ("down", "up", None, None, False, "gelu_tanh")
    assert parts("by_nn") == ("down", "up", None, None, False, "gelu")
    for name in ("other_approximation", "added", "scaled", "other_function", "with_default", "method"):
        assert parts(name) is None, name
    # What stands where the activation should is no activation.
    made = type("Other", (Changed,), {"forward": Changed.swapped})()
    assert gated_mlp.fused_class(made) is None
    wrapped = functools.wraps(Changed.known)(lambda self, x: Changed.known(self, x) + 1)
    assert parts_of(type("Other", (Changed,), {"forward": wrapped})) is None


@pytest.mark.parametrize("forward", ["known", "function", "by_nn"])
def test_models_of_ones_own(forward, monkeypatch):
    cls = type("Own", (Changed,), {"forward": vars(Changed)[forward]})
    found = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = cls()
        with monkeypatch.context() as patch:
            if not fused:
                patch.setattr(convert_module, "fused_class", lambda mlp: None)
            bfp.convert(model, "fp8_current")
        assert isinstance(model, FusedMLP) is fused
        x = torch.randn((4, 8), generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = model(x)
        y.sum().backward()
        found.append({"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}})
    assert_equal(*found)


def test_activations():
    from transformers.activations import ACT2FN

    names = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
    for name in (
        "silu",
        "swish",
        "gelu",
        "gelu_pytorch_tanh",
        "gelu_new",
        "gelu_python",
        "gelu_fast",
        "quick_gelu",
        "relu",
        "relu2",
        "mish",
    ):
        assert activation_of(ACT2FN[name]) == names.get(name), name
    assert activation_of(nn.GELU()) == "gelu"
    assert activation_of(nn.GELU("tanh")) == "gelu_tanh"
    assert activation_of(nn.SiLU(inplace=True)) is None
    patched = nn.SiLU()
    patched.forward = lambda x: x
    assert activation_of(patched) is None
    assert activation_of(type("Mine", (nn.SiLU,), {})()) is None


def test_layers_that_stay_are_left_with_their_mlp():
    model = bfp.convert(model_of("Llama"), "mxfp8", filter_fn=lambda path, layer: "up_proj" in path)
    assert not fused_in(model)


@pytest.mark.parametrize(("name", "each"), [("Llama", 3), ("Qwen3", 3), ("Mistral", 3), ("Gemma3Text", 3), ("Phi3", 3)])
@pytest.mark.parametrize("grad", [True, False])
def test_query_key_and_value_share_a_cast_and_so_do_gate_and_up(name, each, grad):
    """A layer casts its attention's input once, what attention makes, and its MLP's input."""
    model = bfp.convert(model_of(name), "mxfp8", filter_fn=lambda path, layer: "lm_head" not in path)
    tokens = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.set_grad_enabled(grad):
        count, results = casts_of(lambda: model(tokens, use_cache=False).logits)
        assert count == each * 2
        # Hooks end it, and bits are those of layers that cast for themselves.
        for layer in model.modules():
            if isinstance(layer, bfp.Linear):
                layer.register_forward_hook(lambda layer, args, y: None)
        count, alone = casts_of(lambda: model(tokens, use_cache=False).logits)
    assert count > each * 2 or name == "Phi3"
    assert torch.equal(results, alone)


def _called(node):
    """The name of a module's own layer, where this is its call."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "self":
        return function.attr
    return None


def _writes(node):
    """Whether a piece of code may write into a tensor that it was given."""
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Subscript) for target in node.targets)
    if isinstance(node, ast.Call):
        names = [keyword.arg for keyword in node.keywords]
        return "out" in names or (isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_"))
    return isinstance(node, ast.AugAssign)


@pytest.mark.parametrize("place", READERS)
def test_forwards_that_share_a_cast_write_nothing_between(place):
    """Of all classes whose layers would share one, by their sources."""
    library, folder = place.rstrip(".").split(".")
    found = importlib.util.find_spec(library)
    if found is None:
        pytest.skip(f"{library} is not installed")
    count, writing = 0, set()
    for file in (Path(found.submodule_search_locations[0]) / folder).rglob("*.py"):
        for cls in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)):
            for forward in (node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "forward"):
                nodes = list(ast.walk(forward))
                for row in READERS[place]:
                    lines = [node.lineno for node in nodes if _called(node) in row]
                    if not set(row) <= {_called(node) for node in nodes}:
                        continue
                    count += 1
                    between = (node for node in nodes if min(lines) <= getattr(node, "lineno", 0) <= max(lines))
                    writing |= {f"{cls.name}: {ast.unparse(node)}" for node in between if _writes(node)}
    assert count > 1
    # Of a cache, that it was filled.
    assert not {one for one in writing if ".is_updated[" not in one}
