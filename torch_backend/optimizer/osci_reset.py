"""OsciReset for the optimizers (`definition.oscillation`): elementwise array operations around a step.

master, codes             before the step: copied, only in the steps of a window
  | carry_out             the step's kernels, unaware of OsciReset
  v
master, codes             after the step: both paths grow; at a window's end, oscillating masters are set to their
                          dequantized codes
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from blockfp.definition import oscillation
from blockfp.definition.oscillation import OsciReset

from ..quantized_tensor import sharding
from ..quantized_tensor.tensor import QuantizedTensor
from ..weights.cast_weight import CastWeight
from .local_parameter import LocalParameter

PATHS = ("master_path", "quantized_path")
"""State entries of the path lengths, float32, in the master's shape."""


def osci_reset(optimizer: Optimizer, settings: OsciReset | None = None) -> Optimizer:
    """Makes an optimizer reset masters that oscillate between two codes of a quantized weight to the dequantized code.

    It keeps two fp32 numbers per element of a quantized weight and, during each step of a window, copies of masters and
    weights. Codes don't change.

    Args:
        optimizer: `AdamW`, `Adam` or `Muon` with masters and capturable=False, since the host must know the step.
        settings: by default the published ones (`definition.oscillation`).

    Returns:
        The optimizer.

    Raises:
        TypeError: another optimizer.
        ValueError: a setting is invalid or conflicts with the optimizer's, or no trained parameter is quantized. The optimizer
            is unchanged.

    Example:
        >>> optimizer = osci_reset(bfp.AdamW(model.parameters(), lr=1e-3), OsciReset(period=200, window=50))
    """
    if not isinstance(optimizer, Optimizer) or "osci_reset" not in optimizer.defaults:
        raise TypeError(f"optimizer must be blockfp's AdamW, Adam or Muon, got {type(optimizer).__name__}")
    # torch.load accepts a plain tuple in state dicts, but no NamedTuple.
    how = tuple(oscillation.check_settings(OsciReset() if settings is None else settings))
    trained = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    for param in trained:
        check_keeps_codes(param)
    if not any(isinstance(sharding.local_of(param), QuantizedTensor) for param in trained):
        raise ValueError(
            "none of the optimizer's trained parameters is quantized, and osci_reset would do nothing: convert the model first"
        )
    for group in optimizer.param_groups:
        check_group(group)
    for group in (optimizer.defaults, *optimizer.param_groups):
        group["osci_reset"] = how
    return optimizer


def check_group(group: Mapping[str, Any]) -> None:
    """Raises ValueError if a group's settings conflict with OsciReset."""
    for name, needed in (("master", "float32"), ("capturable", False)):
        if group[name] != needed:
            raise ValueError(f"osci_reset needs {name}={needed!r}, got {group[name]!r}")


def check_keeps_codes(param: Tensor, name: str = "") -> None:
    """Raises ValueError for a `CastWeight`, which has no codes between steps."""
    if isinstance(sharding.local_of(param), CastWeight):
        raise ValueError(
            f"parameter{name} of this group, of shape {tuple(param.shape)}, has no codes between two steps, as "
            "weights='high_precision' keeps it: OsciReset needs an optimizer without it"
        )


def resets(one: LocalParameter, state: dict[str, Tensor]) -> bool:
    """Returns whether OsciReset applies: the parameter is quantized and has a master."""
    return one.format is not None and "master" in state


def new_paths(one: LocalParameter, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns zero lengths for the paths missing in a state."""
    return {name: state["master"].new_zeros(one.local.shape) for name in PATHS if name not in state}


class Windows:
    """Parameters whose step falls into a window, with their masters and values before the step.

    `settings` maps indices of `todo` to their OsciReset.
    """

    def __init__(self, todo: list[LocalParameter], settings: dict[int, OsciReset]):
        self._open: list[tuple[LocalParameter, int, OsciReset, Tensor, Tensor]] = []
        for number, how in settings.items():
            one = todo[number]
            assert isinstance(one.step, int)
            place = oscillation.place(one.step, how)
            if resets(one, one.state) and 1 <= place <= how.window:
                self._open.append((one, place, how, one.state["master"].clone(), _values(one)))

    def close(self) -> None:
        """Adds this step to the paths, and resets oscillating masters if it ends the window."""
        for one, place, how, *before in self._open:
            master, quantized = one.state["master"], _values(one)
            paths = [one.state[name] for name in PATHS]
            for path, old, new in zip(paths, before, (master, quantized), strict=True):
                path.copy_(oscillation.lengthen(path, old, new, place == 1))
            if place == how.window:
                master[:] = quantized.where(oscillation.oscillates(paths[0], paths[1], how.threshold), master)


def _values(one: LocalParameter) -> Tensor:
    """Returns this rank's dequantized codes, float32."""
    assert isinstance(one.local, QuantizedTensor)
    return one.local.detach().dequantize(one.state["master"].dtype)  # pyright: ignore[reportCallIssue]
