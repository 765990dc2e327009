"""Weights & Biases: the figures of `blockfp.torch.observe` in a run's history.

with bfp.observe(model) as observation:
    ...
    observation.step()
    log(run, observation)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..torch_backend.linear.observe import Observation

if TYPE_CHECKING:
    from wandb import Run


def log(
    run: Run, observation: Observation, *, step: int | None = None, commit: bool | None = None, prefix: str = "quantization"
) -> None:
    """Logs the figures of the observation's last step (`Observation.scalars`).

    Args:
        run: of `wandb.init`.
        observation: of `observe`, after its `step()`; before the first one, nothing is logged.
        step, commit: as for `run.log`: without a step, the figures are one row of the history; with commit=False, they join the
            row of the next `run.log`.
        prefix: first part of each name, "quantization/layers.0.up/input rowwise/sqnr".
    """
    if figures := observation.scalars():
        run.log({f"{prefix}/{name}": value for name, value in figures.items()}, step=step, commit=commit)
