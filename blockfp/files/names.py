"""The names under which model files and checkpoints hold things: one home for all that write them and all that read them.

In a file or a state dict a quantized weight NAME is

    NAME                                 no bytes: shape (0, *shape of the weight), dtype the nominal one (`no_values`)
    NAME_codes, NAME_scale, NAME_tensor_scale
    NAME_format_FORMAT                   as NAME; in state dicts and checkpoints alone

and a checkpoint of `blockfp.torch.save_checkpoint` is

    model.NAME                           the model's state dict
    optimizer.state.NAME.master, ..      the optimizer's; optimizer.param_groups...
    extra.step, extra.own.NAME           the step, and what the user gave
    extra.tied.OTHER_NAME                the first name of a weight that has several

Files outlive versions: a name that is changed here is a file that can't be read.
"""

from __future__ import annotations

from collections.abc import Sequence

SUFFIXES = {"codes": "_codes", "scales": "_scale", "tensor_scale": "_tensor_scale"}
"""The ending of each part's name, behind the weight's."""

FORMAT = "_format_"
"""Between a weight's name and that of its format."""

MODEL, OPTIMIZER, EXTRA = "model", "optimizer", "extra"
"""The parts of a checkpoint."""

STEP, OWN, TIED = "step", "own", "tied"
"""The parts of `EXTRA`."""

STATE, GROUPS = "state", "param_groups"
"""The parts of an optimizer's state dict."""

LAYER_BUFFERS = (("input_amax_history", "input_scale"), ("gradient_amax_history", "gradient_scale"), ("rng_key", "step"))
"""The buffers that a recipe may need in PyTorch's layers: pairs, of which a layer has both or none."""


def no_values(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of what stands under a quantized weight's own name: of no bytes, and of the wrong rank for a plain one.

    A reader that knows nothing of codes stops there, whatever it casts to or forgives, instead of leaving its own values.
    """
    return (0, *shape)


def master_of(name: str) -> str:
    """Returns the name of a parameter's fp32 master in an optimizer's state dict."""
    return f"{STATE}.{name}.master"
