"""OsciReset in the optimizers (`definition.oscillation`): elementwise passes around a step, in array operations.

master, codes             before the step: copies, in the steps of a window alone
  | carry_out             the step, by the kernels, which know nothing of it
  v
master, codes             behind it: both paths get longer; where the window ends, masters that oscillate become what their
                          codes stand for
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
"""Names of the lengths of a weight's paths in its state, float32, of the master's shape."""


def osci_reset(optimizer: Optimizer, settings: OsciReset | None = None) -> Optimizer:
    """Makes an optimizer reset masters of quantized weights that oscillate between two codes to what these stand for.

    It keeps two fp32 numbers for each element of a quantized weight, and in the steps of a window copies of masters and weights
    for the length of a step. Codes stay as they are.

    Args:
        optimizer: `AdamW` or `Adam` with masters; the host has to know the step, so capturable must be False.
        settings: the published ones by default (`definition.oscillation`).

    Returns:
        The optimizer.

    Raises:
        TypeError: another optimizer.
        ValueError: a setting that means nothing, or doesn't go with the optimizer's; or no trained parameter is quantized. The
            optimizer is as it was then.

    Example:
        >>> optimizer = osci_reset(bfp.AdamW(model.parameters(), lr=1e-3), OsciReset(period=200, window=50))
    """
    if not isinstance(optimizer, Optimizer) or "osci_reset" not in optimizer.defaults:
        raise TypeError(f"optimizer must be blockfp's AdamW or Adam, got {type(optimizer).__name__}")
    # A plain tuple, which torch.load takes in state dicts.
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
    """Raises ValueError where a group's settings don't go with OsciReset."""
    for name, needed in (("master", "float32"), ("capturable", False)):
        if group[name] != needed:
            raise ValueError(f"osci_reset needs {name}={needed!r}, got {group[name]!r}")


def check_keeps_codes(param: Tensor, name: str = "") -> None:
    """Raises ValueError for a parameter whose codes are made anew for each product."""
    if isinstance(sharding.local_of(param), CastWeight):
        raise ValueError(
            f"parameter{name} of this group, of shape {tuple(param.shape)}, has no codes between two steps, as "
            "weights='high_precision' keeps it: OsciReset needs an optimizer without it"
        )


def resets(one: LocalParameter, state: dict[str, Tensor]) -> bool:
    """Says whether OsciReset is for a parameter: it is quantized, and has a master."""
    return one.format is not None and "master" in state


def new_paths(one: LocalParameter, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the paths that a state lacks, of length 0."""
    return {name: state["master"].new_zeros(one.local.shape) for name in PATHS if name not in state}


class Windows:
    """The parameters whose step lies in a window, with what they were before it.

    Args:
        todo: the parameters of a step, before it is carried out.
        settings: those of OsciReset, by places in `todo`.
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
        """Makes the paths longer by the step that was carried out, and resets masters where it ends a window."""
        for one, place, how, *before in self._open:
            master, quantized = one.state["master"], _values(one)
            paths = [one.state[name] for name in PATHS]
            for path, old, new in zip(paths, before, (master, quantized), strict=True):
                path.copy_(oscillation.lengthen(path, old, new, place == 1))
            if place == how.window:
                master[:] = quantized.where(oscillation.oscillates(paths[0], paths[1], how.threshold), master)


def _values(one: LocalParameter) -> Tensor:
    """Returns what the codes of this rank's part stand for, float32."""
    assert isinstance(one.local, QuantizedTensor)
    return one.local.detach().dequantize(one.state["master"].dtype)  # pyright: ignore[reportCallIssue]
