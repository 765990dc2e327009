"""Times modules of TransformerEngine beside blockfp's and bf16 on one GPU, forward and backward.

    python benchmarks/te_gpu.py [--cases mlp normed_mlp layers layers_2048] [--recipes fp8_current] [--json FILE]

    mlp          two linear layers with gelu (tanh) between them, 16,384 tokens
    normed_mlp   LayerNormMLP with RMSNorm and gelu (tanh), 16,384 tokens
    layers       8 transformer layers (RMSNorm, SwiGLU, 16 heads, 8 of keys and values), 4 sequences of 4,096 tokens
    layers_2048  the same, 1 sequence of 2,048 tokens, where the host decides

bf16 and blockfp are compiled, layers one by one, and layers are timed without a compiler ("eager") too, and those of few tokens
as CUDA graphs ("graphs": mode="reduce-overhead"); TransformerEngine's modules are timed as its documentation calls them, with
weights in bf16 (mlp) or FP8. Contenders of one library take turns.
TransformerEngine runs in a process of its own, which times bf16 once more, because its import changes which attention kernels
PyTorch takes. Where it isn't installed a note says so.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from linear_gpu import MLP
from torch import Tensor, nn
from turns import in_turns, medians, write_record

import blockfp.torch as bfp

RECIPES = {"fp8_current": "Float8CurrentScaling", "fp8_delayed": "DelayedScaling", "fp8_block": "Float8BlockScaling"}
"""Recipes, and TransformerEngine's of the same numerics."""
CASES = ("mlp", "normed_mlp", "layers", "layers_2048")
GRAPHS = ("layers_2048",)
"""Cases of few tokens."""
NOTE = "TransformerEngine isn't installed: its rows are left out (pip install transformer_engine[pytorch])"


class Shape(NamedTuple):
    """Lengths of a case; `heads` of 0 for an MLP."""

    batch: int
    length: int
    features: int
    ffn: int
    heads: int = 0
    layers: int = 1


SHAPES = {
    "mlp": Shape(1, 16384, 4096, 16384),
    "normed_mlp": Shape(1, 16384, 4096, 16384),
    "layers": Shape(4, 4096, 2048, 8192, 16, 8),
    "layers_2048": Shape(1, 2048, 2048, 8192, 16, 8),
}
TINY = {case: Shape(1, 32, 64, 128, 2 if shape.heads else 0, 2) for case, shape in SHAPES.items()}


class PlainLayer(nn.Module):
    """`bfp.TransformerLayer` in plain PyTorch, with SwiGLU as one product."""

    def __init__(self, shape: Shape, **where: Any):
        super().__init__()
        self.heads, self.size = shape.heads, shape.features // shape.heads
        kept = shape.features // 2
        self.norms = nn.ModuleList(nn.RMSNorm(shape.features, **where) for _ in range(2))
        self.qkv = nn.Linear(shape.features, shape.features + 2 * kept, bias=False, **where)
        self.out = nn.Linear(shape.features, shape.features, bias=False, **where)
        self.up = nn.Linear(shape.features, 2 * shape.ffn, bias=False, **where)
        self.down = nn.Linear(shape.ffn, shape.features, bias=False, **where)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, features = x.shape
        parts = self.qkv(self.norms[0](x)).split([features, features // 2, features // 2], -1)
        q, k, v = (part.view(batch, length, -1, self.size).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def plain(case: str, shape: Shape, where: dict[str, Any]) -> nn.Module:
    if shape.heads:
        return nn.Sequential(*(PlainLayer(shape, **where) for _ in range(shape.layers)))
    mlp = MLP(nn.Linear(shape.features, shape.ffn, False, **where), nn.Linear(shape.ffn, shape.features, False, **where))
    return mlp if case == "mlp" else nn.Sequential(nn.RMSNorm(shape.features, **where), mlp)


def ours(case: str, shape: Shape, recipe: Any, where: dict[str, Any]) -> nn.Module:
    if case == "mlp":
        return bfp.convert(plain(case, shape, where), recipe, keep_init=False)
    sizes: dict[str, Any] = {"bias": False, "norm": "rms_norm", "recipe": recipe, "keep_init": False, **where}
    if case == "normed_mlp":
        return bfp.LayerNormMLP(shape.features, shape.ffn, activation="gelu", **sizes)
    sizes |= {"activation": "swiglu", "key_value_heads": shape.heads // 2}
    each = (bfp.TransformerLayer(shape.features, shape.ffn, shape.heads, **sizes) for _ in range(shape.layers))
    return nn.Sequential(*each)


def theirs(case: str, shape: Shape, recipe: str, where: dict[str, Any]) -> tuple[nn.Module, Callable[[], Any]]:
    """Returns a model of TransformerEngine's modules and the context of its forward."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as te_recipes

    chosen = getattr(te_recipes, RECIPES[recipe])()
    where = {"params_dtype": where["dtype"], "device": where["device"], "bias": False}

    def context() -> AbstractContextManager[Any]:
        return te.autocast(enabled=True, recipe=chosen)

    if case == "mlp":
        return MLP(te.Linear(shape.features, shape.ffn, **where), te.Linear(shape.ffn, shape.features, **where)), context
    where |= {"normalization": "RMSNorm"}
    with te.quantized_model_init(enabled=True, recipe=chosen):
        if case == "normed_mlp":
            return te.LayerNormMLP(shape.features, shape.ffn, activation="gelu", **where), context
        where |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "self_attn_mask_type": "causal", "activation": "swiglu"}
        where |= {"num_gqa_groups": shape.heads // 2, "attn_input_format": "bshd", "fuse_qkv_params": True}
        sizes = (shape.features, shape.ffn, shape.heads)
        return nn.Sequential(*(te.TransformerLayer(*sizes, **where) for _ in range(shape.layers))), context


def step_of(model: nn.Module, shape: Shape, where: dict[str, Any], context: Callable[[], Any] = nullcontext) -> Any:
    x = torch.randn(shape.batch, shape.length, shape.features, **where).requires_grad_()
    gradient = torch.randn_like(x) / x.numel()
    delayed = any(getattr(getattr(module, "linear_recipe", None), "delayed", None) for module in model.modules())

    def step() -> None:
        # Graphs write anew into the memory of the step before.
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad()
        x.grad = None
        with context():
            y = model(x)
        y.backward(gradient)
        if delayed:
            bfp.update_scales(model)

    return step


def contenders(case: str, options: argparse.Namespace) -> dict[str, Callable[[], None]]:
    shape = (TINY if options.tiny else SHAPES)[case]
    where = {"device": options.device, "dtype": torch.bfloat16}
    ways = ("", *(" eager",) * bool(shape.heads), *(" graphs",) * (case in GRAPHS))
    found: dict[str, nn.Module] = {f"bf16{way}": plain(case, shape, where) for way in ways}
    contexts: dict[str, Any] = {}
    for recipe in options.recipes:
        torch.manual_seed(0)
        if options.theirs:
            found[f"TransformerEngine {recipe}"], contexts[f"TransformerEngine {recipe}"] = theirs(case, shape, recipe, where)
        else:
            found |= {f"{recipe}{way}": ours(case, shape, recipe, where) for way in ways}
    for name, model in found.items():
        if name not in contexts and not name.endswith("eager") and not options.tiny:
            for layer in model if shape.heads and isinstance(model, nn.Sequential) else [model]:
                layer.compile(mode="reduce-overhead" if name.endswith("graphs") else None)
    return {name: step_of(model, shape, where, contexts.get(name, nullcontext)) for name, model in found.items()}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", choices=CASES, default=CASES)
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=list(RECIPES))
    for name, default in (("rounds", 5), ("steps", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, not compiled: shows that it runs")
    parser.add_argument("--theirs", action="store_true", help="TransformerEngine's rows alone, in this process")
    return parser.parse_args(given)


def rows(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Returns milliseconds by case and contender."""
    found = {}
    for case in options.cases:
        found[case] = medians(in_turns(contenders(case, options), options.rounds, options.steps))
        for name, ms in found[case].items():
            print(f"{case:12} {name:30} {ms:9.3f} ms  {found[case]['bf16'] / ms:.3f}x", flush=True)
        torch.compiler.reset()
    return found


def main(given: list[str] | None = None) -> None:
    options = arguments(given)
    results: dict[str, Any] = {"TransformerEngine" if options.theirs else "blockfp": rows(options)}
    about: dict[str, Any] = {}
    if not options.theirs:
        if importlib.util.find_spec("transformer_engine") is None:
            about["note"] = NOTE
            print(NOTE)
        else:
            about["transformer_engine"] = importlib.metadata.version("transformer_engine")
            with tempfile.TemporaryDirectory() as folder:
                record = Path(folder) / "theirs.json"
                own = [*(given if given is not None else sys.argv[1:]), "--theirs", "--json", str(record)]
                subprocess.run([sys.executable, __file__, *own], check=True)
                results |= json.loads(record.read_text())["results"]
    write_record(options.json, results, **about)


if __name__ == "__main__":
    main()
