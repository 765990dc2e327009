"""TensorBoard: the figures of `blockfp.torch.observe` as scalars.

with bfp.observe(model) as observation:
    ...
    observation.step()
    write(writer, observation)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..torch_backend.linear.observe import Observation

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def write(writer: SummaryWriter, observation: Observation, *, step: int | None = None, prefix: str = "quantization") -> None:
    """Writes the figures of the observation's last step (`Observation.scalars`).

    Args:
        writer: a `SummaryWriter` of torch.utils.tensorboard or tensorboardX.
        observation: of `observe`, after its `step()`; before the first one, nothing is written.
        step: the run's step; by default the observation's, from 0.
        prefix: first part of each tag, "quantization/layers.0.up/input rowwise/sqnr".
    """
    number = observation.steps - 1 if step is None else step
    for name, value in observation.scalars().items():
        writer.add_scalar(f"{prefix}/{name}", value, number)
