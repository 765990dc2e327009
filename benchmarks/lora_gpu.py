"""Measures PEFT's LoRA on a randomly initialized gpt-oss model: memory and time of a step over codes, bf16 and bitsandbytes.

    torchrun --nproc-per-node 1 benchmarks/lora_gpu.py [--layers 24] [--tokens 2048] [--contenders bf16 mxfp4] [--json FILE]
    torchrun --nproc-per-node 2 benchmarks/lora_gpu.py

The shapes are gpt-oss-20b's: width 2880, 32 experts of which each token takes 4, 24 layers, 20.9 billion parameters. All
projections of attention and both weights of the experts are adapted with rank 16. Decoder layers are checkpointed; on several
GPUs FSDP2 shards each. Each rank has its own tokens. Adapters are float32, under autocast to bfloat16, or cast by FSDP2.

    bf16            PEFT's own layers over bfloat16 weights
    RECIPE          codes and quantized products
    RECIPE+exact    codes, dequantized in products: inputs and gradients stay in bfloat16, as with QLoRA
    bitsandbytes    NF4 with double quantization, experts too; on one GPU: FSDP2 would replicate its weights

Weights are GiB after sharding, before the first step; the peak covers a whole step. Milliseconds are medians. "counted" has the
bytes of a rank's parameters and their scales and constants, which needs no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import warnings
from pathlib import Path
from typing import Any

import ranks
import torch
import torch.distributed as dist
from blockfp.torch_backend.quantized_tensor import sharding
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import parametrize
from transformers import GptOssConfig, GptOssForCausalLM

import blockfp.torch as bfp
from blockfp.integrations.peft import register

CONTENDERS = ("bf16", "mxfp4+exact", "mxfp4", "fp8_block", "nvfp4+exact", "bitsandbytes")
TINY = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Options that make a model small, for tests."""


def config_of(options: argparse.Namespace) -> GptOssConfig:
    """Returns gpt-oss-20b's shapes, or those of a model of a few thousand parameters."""
    sizes: dict[str, Any] = {**TINY, "vocab_size": 128, "num_local_experts": 4} if options.tiny else {"num_local_experts": 32}
    kinds = ["sliding_attention", "full_attention"] * (options.layers // 2 + 1)
    shape = {"num_hidden_layers": options.layers, "layer_types": kinds[: options.layers], "use_cache": False}
    return GptOssConfig(**sizes, **shape, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def make_model(contender: str, device: torch.device, options: argparse.Namespace) -> nn.Module:
    """Builds the adapted model in bfloat16, with its decoder layers' weights in the contender's form."""
    config = config_of(options)
    torch.manual_seed(0)
    with torch.device(device):
        model = GptOssForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    # One after another, so that no more than a layer is there twice.
    recipe, _, exact = contender.partition("+")
    for layer in model.model.layers:
        if contender == "bitsandbytes":
            to_bitsandbytes(layer, device)
        elif contender != "bf16":
            bfp.convert(layer, recipe, keep_init=False, compute="high_precision" if exact else "quantized")
    experts = [f"model.layers.{i}.mlp.experts.{name}" for i in range(options.layers) for name in ("gate_up_proj", "down_proj")]
    adapters = LoraConfig(
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], target_parameters=experts, r=16, lora_alpha=16
    )
    # PEFT casts to float32 what it adds; what it is added to stays.
    model = get_peft_model(model, register(adapters) if contender not in ("bf16", "bitsandbytes") else adapters)
    # Older versions of transformers know the second name alone.
    checkpoint = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    checkpoint({"use_reentrant": False})
    return model.train()


def to_bitsandbytes(layer: nn.Module, device: torch.device) -> None:
    """Converts a decoder layer's linear layers and experts to NF4."""
    import bitsandbytes
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    # PEFT 0.21 looks for the other of its two proxies behind one of bitsandbytes', and would leave each forward's there.
    ParamWrapper._remove_parametrizations = without_the_last
    for module in list(layer.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                made = bitsandbytes.nn.Linear4bit(
                    child.in_features, child.out_features, child.bias is not None, torch.bfloat16, quant_type="nf4"
                )
                made.weight = bitsandbytes.nn.Params4bit(child.weight.data, requires_grad=False, quant_type="nf4")
                made.bias = child.bias
                setattr(module, name, made.to(device))
        for name, param in list(module.named_parameters(recurse=False)):
            if param.ndim == 3:
                replace_parameter_4bit(module, name, compress_statistics=True, quant_type="nf4")


def without_the_last(wrapper: Any) -> None:
    """Removes the parametrization that was added last."""
    layer, name = wrapper.get_base_layer(), wrapper.parameter_name
    found = layer.parametrizations[name]
    if len(found) == 1:
        parametrize.remove_parametrizations(layer, name, leave_parametrized=False)
    else:
        del found[len(found) - 1]


def counted_bytes(model: nn.Module) -> int:
    """Returns the bytes of a rank's parameters, with their scales and constants."""
    held: list[torch.Tensor] = []
    states = [getattr(module, "quant_state", None) for module in model.modules()]
    for param in model.parameters():
        local = sharding.local_of(param)
        held += local.parts if isinstance(local, bfp.QuantizedTensor) else [local]
        states.append(getattr(param, "quant_state", None))
    for state in states:
        while state is not None:
            held += [value for value in vars(state).values() if isinstance(value, torch.Tensor)]
            state = state.state2
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())


def shard(model: nn.Module) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers: Any = model.get_submodule("base_model.model.model.layers")
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if not torch.cuda.is_available():
        for module in model.modules():
            if isinstance(module, torch.distributed.fsdp.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo knows sums only


def measure(contender: str, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Returns a contender's row."""
    if contender == "bitsandbytes" and dist.get_world_size() > 1:
        raise ImportError("FSDP2 doesn't shard its weights")
    cuda = device.type == "cuda"
    model = make_model(contender, device, options)
    if dist.get_world_size() > 1:
        shard(model)
    ranks.forget()
    counted = counted_bytes(model)
    weights = torch.cuda.memory_allocated() if cuda else 0
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=cuda, foreach=None if cuda else False)
    random = torch.Generator(device).manual_seed(dist.get_rank())
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.randint(0, vocabulary, (1, options.tokens), device=device, generator=random)
    losses = []

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16) if dist.get_world_size() == 1 else contextlib.nullcontext():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    for _ in range(options.warm):
        step()
    peak = ranks.peak_bytes(step)
    times = [ranks.timed(step) for _ in range(options.steps)]
    ms, peak, weights = ranks.slowest([statistics.median(times), peak, weights], device)
    return {
        "contender": contender,
        "ms": round(ms, 1),
        "peak_gib": round(peak / 2**30, 2),
        "weights_gib": round(weights / 2**30, 2),
        "counted": counted,
        "adapters": sum(param.numel() for param in trained),
        "loss": [round(loss.item(), 4) for loss in (losses[0], losses[-1])],
    }


def reported(contender: str, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Returns a contender's row, or the reason without figures if another library fails or memory runs out."""
    try:
        return measure(contender, device, options)
    except torch.OutOfMemoryError:
        return {"contender": contender, "left_out": "out of memory"}
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if contender not in ("bf16", "bitsandbytes"):
            raise
        return {"contender": contender, "left_out": f"{type(error).__name__}: {str(error).splitlines()[0]}"}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="*", default=list(CONTENDERS), help="bf16, bitsandbytes, RECIPE or RECIPE+exact")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per rank, in one sequence")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm", type=int, default=2, help="warm-up steps")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand parameters")
    parser.add_argument("--json", type=Path, help="a file to write")
    return parser.parse_args(given)


def rows(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    warnings.filterwarnings("ignore", category=FutureWarning)
    return ranks.measured(options.contenders, lambda contender: reported(contender, device, options))


def main() -> None:
    options = arguments()
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    device = ranks.start()
    found = rows(options, device)
    if options.json is not None:
        ranks.report(options.json, found, layers=options.layers, tokens=options.tokens)
    ranks.finish()


if __name__ == "__main__":
    main()
