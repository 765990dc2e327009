"""Names of entries in model files and checkpoints.

In a file or a state dict, a quantized weight NAME is

    NAME                                 without bytes: shape (0, *shape of the weight), nominal dtype (`no_values`)
    NAME_codes, NAME_scale, NAME_tensor_scale
    NAME_format_FORMAT                   like NAME; only in state dicts and checkpoints

A checkpoint of `blockfp.torch.save_checkpoint` contains

    model.NAME                           the model's state dict
    optimizer.state.NAME.master, ..      the optimizer's state dict; optimizer.param_groups...
    extra.step, extra.own.NAME           the step, and the user's entries
    extra.tied.OTHER_NAME                the first name of a weight with several names
    extra.cast.NAME                      the format in which the forward multiplies a weight that is stored as values
    extra.input.NAME                     the format in which the forward multiplies the input of a weight's layer

Files outlive versions: after a change here, old files can't be read.
"""

from __future__ import annotations

from collections.abc import Sequence

SUFFIXES = {"codes": "_codes", "scales": "_scale", "tensor_scale": "_tensor_scale"}
"""Suffixes of each part's name after the weight's name."""

FORMAT = "_format_"
"""Separates a weight's name from its format's name."""

MODEL, OPTIMIZER, EXTRA = "model", "optimizer", "extra"
"""Top-level names in a checkpoint."""

STEP, OWN, TIED, CAST, INPUT = "step", "own", "tied", "cast", "input"
"""Names under `EXTRA`."""

STATE, GROUPS = "state", "param_groups"
"""Names in an optimizer's state dict."""

LAYER_BUFFERS = (("input_amax_history", "input_scale"), ("gradient_amax_history", "gradient_scale"), ("rng_key", "step"))
"""Buffers that a recipe may need in PyTorch layers, as pairs; a layer has both of a pair or neither."""


def no_values(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of the entry under a quantized weight's own name: no bytes, and one axis more than the weight.

    Readers that know no codes fail on the shape, whatever they cast or tolerate, and don't silently keep their own weights.
    """
    return (0, *shape)


def master_of(name: str) -> str:
    """Returns the name of a parameter's fp32 master in an optimizer's state dict."""
    return f"{STATE}.{name}.master"
