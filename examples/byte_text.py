"""The task of the training examples: predict the next byte of the Python standard library's sources.

Text, batches and initial weights are NumPy arrays, so that the PyTorch and the JAX examples train on the same data. Each
resumes from the other's checkpoints: a .safetensors file of `blockfp.save` with whole arrays,

    NAME            the parameter, named as in `first_weights`: codes and scales, or float32
    master.NAME     float32, for quantized parameters
    first.NAME      float32, AdamW's first moment
    second.NAME     float32, its second moment
    step            int32, the number of steps done
    input_amax_history.NAME, input_scale.NAME, gradient_amax_history.NAME, gradient_scale.NAME
                    float32, for layers of quantized parameters with delayed scaling
    rng_key.NAME, rng_step.NAME
                    uint32 [2] and int32, for layers that round gradients stochastically: the layer's key and its number of
                    backward passes; the next pass uses `blockfp.definition.rounding.fold_in` of both
"""

from __future__ import annotations

import argparse
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Config:
    """A byte-level transformer of about a million parameters.

    Attributes:
        width: features of the residual stream.
        heads, layers, context: number of attention heads and blocks, and bytes that a prediction may look back on.
        hidden: features of the feed-forward layer.
    """

    width: int = 128
    heads: int = 4
    layers: int = 5
    context: int = 128
    hidden: int = 512


VOCABULARY = 256
SCALING = ("input_amax_history", "input_scale", "gradient_amax_history", "gradient_scale")
RANDOM = ("rng_key", "rng_step")


def read_text(limit: int = 6_000_000) -> tuple[np.ndarray, np.ndarray]:
    """Returns (training, held out): the bytes of the standard library's top-level modules; every 16th module is held out.

    Args:
        limit: maximum number of bytes.
    """
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [path.read_bytes() for path in paths]
    if sum(map(len, texts)) < 100_000:
        raise FileNotFoundError(f"the standard library's sources are not in {sysconfig.get_path('stdlib')}")
    kept = [b"".join(t for i, t in enumerate(texts) if (i % 16 == 15) == held_out)[:limit] for held_out in (False, True)]
    return np.frombuffer(kept[0], np.uint8), np.frombuffer(kept[1], np.uint8)


def batch(text: np.ndarray, rows: int, context: int, *, seed: int, step: int) -> np.ndarray:
    """Returns uint8 [rows, context + 1]: random pieces of the text, equal for equal seed and step in every process."""
    starts = np.random.default_rng((seed, step)).integers(0, len(text) - context - 1, rows)
    return np.stack([text[start : start + context + 1] for start in starts])


def first_weights(config: Config, seed: int) -> dict[str, np.ndarray]:
    """Returns float32 parameters by name. A matrix is [out, in], as `linear` expects in both frameworks."""
    random = np.random.default_rng(seed)

    def normal(*shape: int, scale: float) -> np.ndarray:
        return (random.standard_normal(shape) * scale).astype(np.float32)

    width, hidden = config.width, config.hidden
    outward = (2 * config.layers) ** -0.5
    weights = {"embedding": normal(VOCABULARY, width, scale=0.02), "positions": normal(config.context, width, scale=0.02)}
    for i in range(config.layers):
        weights |= {
            f"blocks.{i}.attention_norm": np.ones(width, np.float32),
            f"blocks.{i}.qkv": normal(3 * width, width, scale=width**-0.5),
            f"blocks.{i}.out": normal(width, width, scale=width**-0.5 * outward),
            f"blocks.{i}.mlp_norm": np.ones(width, np.float32),
            f"blocks.{i}.up": normal(hidden, width, scale=width**-0.5),
            f"blocks.{i}.down": normal(width, hidden, scale=hidden**-0.5 * outward),
        }
    weights["norm"] = np.ones(width, np.float32)
    weights["head"] = normal(VOCABULARY, width, scale=width**-0.5)
    return weights


def first_keys(config: Config, seed: int) -> dict[str, np.ndarray]:
    """Returns uint32 [2], a random key for each matrix of the blocks, by name."""
    names = [name for name, weight in first_weights(config, seed).items() if name.startswith("blocks.") and weight.ndim == 2]
    keys = np.random.default_rng((seed, 0, 0)).integers(1 << 32, size=(len(names), 2), dtype=np.uint32)
    return dict(zip(names, keys, strict=True))


def saved(folder: Path, recipe: str) -> Path:
    """Returns a recipe's file in the folder given by --save or --resume."""
    return folder / f"{recipe}.safetensors"


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses a training program's options; exits if --steps or --save-at names an impossible step."""
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be 1 or more, got {options.steps}")
    if options.save_at is not None and (options.save is None or not 1 <= options.save_at <= options.steps):
        parser.error(f"--save-at must be a step of 1 to --steps ({options.steps}) beside --save, got {options.save_at}")
    return options


def steps_left(done: int, options: argparse.Namespace, path: Path) -> range:
    """Returns the remaining steps of a run that resumes from a file.

    Raises:
        ValueError: no step remains, or not the one after which --save-at saves.
    """
    if done >= options.steps:
        raise ValueError(f"{path} has {done} steps done, and --steps is {options.steps}: pass more steps")
    if options.save_at is not None and done >= options.save_at:
        raise ValueError(f"{path} has {done} steps done, and --save-at is {options.save_at}: pass a later step")
    return range(done, options.steps)


def learning_rate(step: int, steps: int, *, peak: float = 2e-3, warmup: int = 10) -> float:
    """Linear warm-up, then a half cosine down to a tenth of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + float(np.cos(np.pi * progress))))
