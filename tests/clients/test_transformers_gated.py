"""MLPs that `convert` finds in transformers' models: cast as they are made, with the bits of those that are not."""

import ast
import copy
import functools
import importlib.util
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from arrays import through_a_file, values
from blockfp.torch_backend.conversion import fusing
from blockfp.torch_backend.conversion.gated_mlp import FusedMLP, Parts, activation_of, why_not
from blockfp.torch_backend.modules.known_classes import KNOWN
from counted_casts import casts_of
from same_tensors import assert_equal
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
            patch.setattr(fusing, "rows_of", lambda cls: ())
        return bfp.convert(
            model_of(name, dtype), recipe, filter_fn=lambda path, layer: "lm_head" not in path and "embed_out" not in path
        )


def step(model, seed=0):
    """Logits and gradients."""
    tokens = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    logits = model(tokens).logits
    logits.backward(values(logits.shape, 1).to(logits.dtype))
    bfp.update_scales(model)
    return {"logits": logits.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


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
    return through_a_file(model, weights_only=False)


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
        x = values((2, 16, 64), 0).requires_grad_()
        y = one(x)
        y.backward(torch.ones_like(y))
        results.append({"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in one.named_parameters()}})
    assert_equal(*results)


def test_activations():
    from transformers.activations import ACT2FN

    names = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}
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


@functools.cache
def forwards_of(place):
    """(class, forward, layers that it calls) of all classes of an installed library, by their sources."""
    library, _, folder = place.rstrip(".").partition(".")
    found = importlib.util.find_spec(library)
    if found is None:
        pytest.skip(f"{library} is not installed")
    files = (Path(found.submodule_search_locations[0]) / folder).rglob("*.py")
    # A model's modular file is what its modeling file is made of, and isn't imported.
    texts = (file.read_text() for file in files if not file.name.startswith("modular_"))
    classes = (one for text in texts for one in re.findall(r"^class .*?(?=^[^\s)]|\Z)", text, flags=re.MULTILINE | re.DOTALL))
    calls = [[f"self.{name}(" for name in layers_of(row)] for row in KNOWN[place]]
    return [
        (cls.name, forward, {_called(node) for node in ast.walk(forward)})
        for text in classes
        if any(all(call in text for call in each) for each in calls)
        for cls in ast.parse(text).body
        if isinstance(cls, ast.ClassDef)
        for forward in cls.body
        if isinstance(forward, ast.FunctionDef) and forward.name == "forward"
    ]


def layers_of(row):
    return row.layers if isinstance(row, bfp.SharedInput) else tuple({row.gate or row.up, row.up, row.down})


PLACES = [place for place in KNOWN if place != "transformers_modules."]


@pytest.mark.parametrize("place", PLACES)
def test_forwards_that_share_a_cast_write_nothing_between(place):
    """Of all classes whose layers would share one, by their sources."""
    count, writing = 0, set()
    for cls, forward, called in forwards_of(place):
        for row in KNOWN[place]:
            if not isinstance(row, bfp.SharedInput) or not called.issuperset(row.layers):
                continue
            count += 1
            nodes = list(ast.walk(forward))
            lines = [node.lineno for node in nodes if _called(node) in row.layers]
            between = (node for node in nodes if min(lines) <= getattr(node, "lineno", 0) <= max(lines))
            writing |= {f"{cls}: {ast.unparse(node)}" for node in between if _writes(node)}
    assert count > 1
    # Of a cache, that it was filled.
    assert not {one for one in writing if ".is_updated[" not in one}


GATED_FORMS = (
    "return self.down(ACT(self.gate(x)) * self.up(x))",
    "y = self.down(ACT(self.gate(x)) * self.up(x)); return y",
    "y = ACT(self.gate(x)) * self.up(x); return self.down(y)",
    "y = ACT(self.gate(x)); return self.down(y * self.up(x))",
)
HALVES_FORMS = (
    "y = self.gate(x); z, y = y.chunk(2, dim=-1); y = y * ACT(z); return self.down(y)",
    "x = self.gate(x); y = x.chunk(2, dim=-1); x = ACT(y[0]) * y[1]; x = self.down(x); return x",
    "x = self.gate(x); y = x.chunk(2, dim=-1); x = ACT(y[0]) * y[1]; return self.down(x)",
)
PLAIN_FORMS = (
    "return self.down(ACT(self.gate(x)))",
    "x = self.gate(x); x = ACT(x); x = self.down(x); return x",
    "x = self.gate(x); x = ACT(x); return self.down(x)",
    "x = self.gate(x); x = ACT(x); y = self.down(x); return y",
    "y = self.gate(x); y = ACT(y); y = self.down(y); return y",
    "y = self.gate(x); y = ACT(y); z = self.down(y); return z",
    "x = ACT(self.gate(x)); x = self.down(x); return x",
    "y = ACT(self.gate(x)); y = self.down(y); return y",
)


class _Renamed(ast.NodeTransformer):
    """Local names by the order they come in."""

    def __init__(self):
        self.names = {"F": "F", "nn": "nn", "self": "self"}

    def visit_Name(self, node):
        return ast.Name(self.names.setdefault(node.id, f"name{len(self.names)}"))

    def visit_arg(self, node):
        return ast.arg(self.names.setdefault(node.arg, f"name{len(self.names)}"))


def plain(forward):
    """The source of a forward without docstring and annotations, and with names that say nothing."""
    forward = ast.parse(ast.unparse(forward)).body[0]
    forward.decorator_list, forward.returns = [], None
    body = forward.body[1:] if ast.get_docstring(forward) is not None else forward.body
    renamed = _Renamed()
    arguments = [ast.unparse(renamed.visit(argument)) for argument in forward.args.args]
    extra = (forward.args.vararg, forward.args.kwarg, *forward.args.kwonlyargs, *forward.args.defaults)
    return arguments, [ast.unparse(renamed.visit(node)) for node in body], any(extra)


def forms(row):
    """What forwards that do what a row says look like in these libraries."""
    gate = row.gate or row.up
    texts = PLAIN_FORMS if row.gate is None else HALVES_FORMS if row.gate == row.up else GATED_FORMS
    functions = {"silu": ("F.silu", "nn.functional.silu"), "gelu": ("F.gelu", "nn.functional.gelu")}
    for text in texts:
        for activation in (f"self.{row.activation}", *functions.get(row.activation, ())):
            parts = {"gate": f"self.{gate}", "up": f"self.{row.up}", "down": f"self.{row.down}", "ACT": activation}
            named = re.sub(r"(?:self\.)?\b(gate|up|down|ACT)\b", lambda found, parts=parts: parts[found[1]], text)
            yield plain(ast.parse(f"def forward(self, x): {named}").body[0])


@pytest.mark.parametrize("place", PLACES)
def test_mlps_that_are_known_do_what_their_row_says(place):
    """Of all classes that call a row's layers, by their sources: the forms above are taken, and nothing else."""
    taken, others = set(), set()
    for row in (row for row in KNOWN[place] if isinstance(row, bfp.MLPParts)):
        written = list(forms(row))
        gate, up = row.gate or row.up, row.up if row.gate not in (None, row.up) else None
        for cls, forward, called in forwards_of(place):
            if not called.issuperset(layers_of(row)):
                continue
            function = None if row.activation in called else row.activation
            parts = Parts(row.down, gate, up, None if function else row.activation, row.gate == row.up, function)
            known = why_not(compiled(forward), parts) is None
            assert known == (plain(forward) in written), (cls, row, ast.unparse(forward))
            (taken if known else others).add(cls)
    assert taken
    if place == "transformers.models.":
        assert len(taken) > 250
        # They have the layers of a row, and do something else with them, or more.
        assert others - taken >= {
            *("BeamMLP", "BitNetMLP", "DeepseekV4MLP", "DoryMLP", "FalconH1MLP", "Glm5NextTextMLP", "GteMLP", "InklingMLP"),
            *("SeedOssMLP", "Step3p7MLP", "T5GemmaMLP", "MoonshineDecoderMLP", "Sam3MLP", "Llama4VisionMLP2", "DetrMLP"),
        }


def compiled(forward):
    """The function of a forward's source, without its annotations and defaults."""
    forward = ast.parse(ast.unparse(forward)).body[0]
    forward.decorator_list, forward.returns = [], None
    for node in ast.walk(forward):
        if isinstance(node, ast.arg):
            node.annotation = None
    for defaults in (forward.args.defaults, forward.args.kw_defaults):
        defaults[:] = [default and ast.Constant(None) for default in defaults]
    names = {"torch": torch, "nn": nn, "F": F}
    exec(compile(ast.fix_missing_locations(ast.Module([forward], [])), "forward", "exec"), names)
    return names["forward"]
