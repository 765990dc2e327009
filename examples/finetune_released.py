"""Fine-tunes a model released in FP8 without ever dequantizing it: LoRA by PEFT, in half a minute on a CPU.

    pip install 'blockfp[all]' peft transformers
    python examples/finetune_released.py

1. A small Llama learns to continue Python sources, in place of a model trained by someone else.
2. `blockfp convert` writes it as DeepSeek and Qwen release theirs: FP8 codes and one scale per 128x128 block.
3. blockfp reads that file bit for bit. PEFT adds adapters of rank 8, which learn another kind of text: the English language
   reference.
4. The result is measured on unseen pages. The codes must still equal the file's.
5. The adapters are merged into the codes, and removed again.

The program fails if the loss doesn't decrease, or if a bit of the base changes.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from pydoc_data.topics import topics

import byte_text
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.integrations.peft import merged, register

CONTEXT, ROWS = 96, 16
CONFIG = LlamaConfig(
    vocab_size=byte_text.VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=CONTEXT, tie_word_embeddings=False, use_cache=False,
)  # fmt: skip


def english() -> tuple[np.ndarray, np.ndarray]:
    """Returns (training, held out): the bytes of Python's own language reference; every 8th page is held out."""
    pages = [page.encode() for _, page in sorted(topics.items())]
    kept = (b"".join(page for i, page in enumerate(pages) if (i % 8 == 7) == held_out) for held_out in (False, True))
    training, held_out = (np.frombuffer(text, np.uint8) for text in kept)
    return training, held_out


def tokens(text: np.ndarray, seed: int, step: int) -> Tensor:
    return torch.from_numpy(byte_text.batch(text, ROWS, CONTEXT - 1, seed=seed, step=step).astype(np.int64))


def train(model: nn.Module, text: np.ndarray, steps: int, rate: float) -> float:
    """Trains the parameters that aren't frozen; returns the seconds it took."""
    begin = time.perf_counter()
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1)
    model.train()
    for step in range(steps):
        batch = tokens(text, 0, step)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return time.perf_counter() - begin


@torch.no_grad()
def bits(model: nn.Module, text: np.ndarray) -> float:
    """Returns the bits per byte of the next byte: 8 for an untrained model."""
    model.eval()
    losses = [model(input_ids=batch, labels=batch).loss for batch in (tokens(text, 1, step) for step in range(4))]
    return torch.stack(losses).mean().item() / math.log(2)


def digest(tensors: dict[str, Tensor]) -> str:
    """Returns the SHA-256 of all codes and scales."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        for part in tensor.parts if isinstance(tensor, bfp.QuantizedTensor) else []:
            found.update(f"{name} {tuple(part.shape)}".encode() + part.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def release(folder: Path, steps: int) -> Path:
    """Trains the base and writes it as a released model; returns the folder."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    seconds = train(model, byte_text.read_text()[0], steps, 3e-3)
    codes = {
        name: bfp.quantize(param.detach(), "fp8_e4m3_128x128") if name.endswith("_proj.weight") else param.detach()
        for name, param in model.named_parameters()
    }
    bfp.save(folder / "own.safetensors", codes)
    command = [sys.executable, "-c", "from blockfp.cli import main; main()", "convert", "own.safetensors", "released"]
    said = subprocess.run([*command, "--layout", "fine-grained-fp8"], cwd=folder, check=True, capture_output=True, text=True)
    print(f"A base of {sum(param.numel() for param in model.parameters()):,} parameters has read Python for {seconds:.0f} s.")
    print(f"blockfp convert: {' '.join(said.stdout.split())}\n")
    return folder / "released"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-steps", type=int, default=100, help="of the base's training")
    parser.add_argument("--steps", type=int, default=60, help="of the adapters' training")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    training, held_out = english()
    with tempfile.TemporaryDirectory() as folder:
        released = bfp.load(release(Path(folder), options.base_steps))
    # Of codes that is the nominal dtype alone, of what products return.
    released = {name: tensor.to(torch.float32) for name, tensor in released.items()}

    # The file's own formats: here FP8 with a scale for each 128x128 block.
    formats = {name: tensor.format for name, tensor in released.items() if isinstance(tensor, bfp.QuantizedTensor)}
    recipe = recipes.fp8_block().replace(weight=recipes.Cast(next(iter(formats.values()))))
    model = LlamaForCausalLM(CONFIG)
    chosen = lambda path, layer: f"{path}.weight" in formats  # noqa: E731
    # Products take exactly what the codes stand for; inputs and gradients stay in float32. Frozen weights need no originals.
    bfp.convert(model, recipe, filter_fn=chosen, compute="high_precision", keep_init=False)
    model.load_state_dict(released)
    before = digest(dict(model.named_parameters()))
    if before != digest(released):
        raise SystemExit("the model's codes are not the file's")

    torch.manual_seed(0)
    model = get_peft_model(model, register(LoraConfig(target_modules="all-linear", r=8, lora_alpha=16)))
    adapters = sum(param.numel() for param in model.parameters() if param.requires_grad)
    first = bits(model, held_out)
    seconds = train(model, training, options.steps, 5e-3)
    last = bits(model, held_out)
    after = digest(base_weights(model))
    print(f"Adapters of {adapters:,} parameters have read English for {seconds:.0f} s.")
    print(f"Bits a byte on unseen pages: {first:.2f} before, {last:.2f} now.")
    print(f"SHA-256 of the base's codes and scales: {before[:16]}.. in the file, {after[:16]}.. now.\n")
    if after != before or last > first - 0.1:
        raise SystemExit("FAILED: " + ("the base has changed" if after != before else "nothing was learned"))

    model.merge_adapter()
    worst = min(merged(model), key=lambda weight: weight.change_sqnr)
    print(f"Merged into the codes: {bits(model, held_out):.2f} bits a byte. Rounding is {worst.sqnr:.0f} dB below the weights,")
    where = worst.name.partition("layers.")[2]
    print(f"and {worst.change_sqnr:.0f} dB below what the adapters change, where that is least: {where}.")
    model.unmerge_adapter()
    again = digest(base_weights(model))
    print(f"Unmerged: {again[:16]}.., and {bits(model, held_out):.2f} bits a byte.")
    if again != before:
        raise SystemExit("FAILED: unmerging has not given the codes back")
    print("\nEverything held: the adapters have learned, and the base is the file's, bit for bit.")


def base_weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns the base's parameters by their names without adapters."""
    named = (
        (name.replace("base_model.model.", "").replace("base_layer.", ""), param) for name, param in model.named_parameters()
    )
    return {name: param for name, param in named if "lora_" not in name}


if __name__ == "__main__":
    main()
