"""OsciReset as an option of the optimizers (`definition.oscillation`): elementwise passes around a step, in array operations.

master, codes             before the step: copies, in the steps of a window alone
  | carry_out             the step, by the kernels, which know nothing of it
  v
master, codes             behind it: both paths get longer; where the window ends, masters that oscillate become what their
                          codes stand for
"""

from __future__ import annotations

from torch import Tensor

from blockfp.definition import oscillation
from blockfp.definition.oscillation import OsciReset

from ..quantized_tensor import sharding
from ..quantized_tensor.tensor import QuantizedTensor
from ..weights.cast_weight import CastWeight
from .local_parameter import LocalParameter

PATHS = ("master_path", "quantized_path")
"""Names of the lengths of a weight's paths in its state, float32, of the master's shape."""


def check_keeps_codes(param: Tensor, name: str = "") -> None:
    """Raises ValueError for a parameter whose codes are made anew for each product."""
    if isinstance(sharding.local_of(param), CastWeight):
        raise ValueError(
            f"parameter{name} of this group, of shape {tuple(param.shape)}, has no codes between two steps, as "
            "weights='high_precision' keeps it: give it a group with osci_reset=None"
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
