"""What the optimizers keep of each parameter: master weight and moments, as this rank's part, and as a state dict shows them.

    parameter (DTensor or plain)          codes, or values: what the model computes with
      | part_of
      v
    Part                                  what this rank holds, as matrices, and where it lies in the unsharded parameter
      | new_state
      v
    state: step, master, exp_avg, ..      plain local tensors; moments as they are kept (fp32, bfloat16, FP8 codes and scales)
      | portable / restore
      v
    state dict                            fp32 values, DTensors placed as the parameter: torch's checkpoints reshard them

A state dict holds fp32 values whatever moments are kept in. Nothing is lost by that (`definition.adamw`), and it can be loaded
on another mesh, with other moments, or by torch's own AdamW.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from blockfp.definition import adamw, bits
from blockfp.definition.adamw import MOMENT_FORMAT
from blockfp.sharding.placement import Mesh, Placement, Replicate, Shard, Sharding, StridedShard, from_dtensor

from ..quantized_tensor import sharding
from ..quantized_tensor.tensor import QuantizedTensor
from ..weights.cast_weight import CastWeight
from ..weights.state_dict import placed

MOMENT_NAMES = ("exp_avg", "exp_avg_sq")
SCALE_NAMES = ("exp_avg_scales", "exp_avg_sq_scales")


@dataclass(frozen=True)
class Part:
    """What this rank holds of a parameter.

    Attributes:
        param: the parameter, a DTensor or a plain tensor.
        local: its local tensor: quantized, or plain values.
        start: (batch, row, column) of the first element in the unsharded array, leading axes counted as one.
        whole: (rows, columns) of the unsharded matrix.
        lies: how the parameter lies.
    """

    param: Tensor
    local: Tensor
    start: tuple[int, int, int]
    whole: tuple[int, int]
    lies: Sharding

    @property
    def origin(self) -> tuple[int, int]:
        """(row, column) of the first element, matrices counted one below the other: where random bytes are counted from."""
        return (self.start[0] * self.whole[0] + self.start[1], self.start[2])

    def cuts_blocks(self, block: tuple[int, int]) -> bool:
        """Whether some rank's part, or this one's own beginning, falls inside a block; the same on every rank of a mesh."""
        if self.lies.mesh is sharding.ONE_RANK:
            return bool(self.start[1] % block[0] or self.start[2] % block[1])
        return _cuts_blocks(self.lies, block)


def part_of(param: Tensor) -> Part:
    """This rank's part of a parameter. It is looked up at every step: FSDP replaces local tensors."""
    local, mesh = sharding.local_of(param), sharding.mesh_of(param)
    local = local.values if isinstance(local, CastWeight) else local
    if mesh is None:
        lies = sharding.sharding_of(param) if param.ndim >= 2 else _row(tuple(param.shape), sharding.ONE_RANK, (Replicate(),))
        row, column = local.origin if isinstance(local, QuantizedTensor) else (0, 0)
        return Part(param, local, (0, row, column), (lies.shape[-2], lies.shape[-1]), lies)
    if param.ndim >= 2:
        lies = sharding.sharding_of(param)
    else:
        placements = from_dtensor(param.placements)  # pyright: ignore[reportAttributeAccessIssue]
        lies = _row(tuple(param.shape), sharding.core_mesh(mesh), placements)
    return Part(param, local, _start(lies, sharding.rank_in(param, lies)), (lies.shape[-2], lies.shape[-1]), lies)


# A step asks the same of the same values, again and again.
_kept = lru_cache(maxsize=4096)


@_kept
def _row(shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...]) -> Sharding:
    """A vector is a matrix of one row."""
    return Sharding((1, math.prod(shape)), mesh, tuple(map(_along_columns, placements)))


@_kept
def _start(lies: Sharding, rank: int) -> tuple[int, int, int]:
    start, batch = lies.region(rank).start, 0
    for first, size in zip(start[:-2], lies.shape[:-2], strict=True):
        batch = batch * size + first
    return batch, start[-2], start[-1]


@_kept
def _cuts_blocks(lies: Sharding, block: tuple[int, int]) -> bool:
    last = len(lies.shape) - 1
    return not (lies.aligned(last - 1, block[0]) and lies.aligned(last, block[1]))


def _along_columns(placement: Any) -> Any:
    if isinstance(placement, StridedShard):
        return StridedShard(1, placement.split_factor)
    return Shard(1) if isinstance(placement, Shard) else placement


def matrices(x: Tensor) -> Tensor:
    """x as [..., rows, columns]: a vector is one row."""
    return x if x.ndim >= 2 else x.reshape(1, -1)


def moments_of(part: Part, wanted: str) -> str:
    """What a parameter's moments are kept in. FP8 is for matrices: vectors are small, and sharding cuts their blocks.

    Raises:
        ValueError: FP8 blocks would straddle ranks.
    """
    if wanted != "fp8" or part.param.ndim < 2:
        return "float32" if wanted == "fp8" else wanted
    assert MOMENT_FORMAT.block is not None
    if part.cuts_blocks(MOMENT_FORMAT.block):
        raise ValueError(
            f"moments='fp8' has blocks of 128 columns, and a parameter of shape {tuple(part.param.shape)} is cut between them: "
            f"{part.lies}; use moments='bfloat16' in this parameter's group"
        )
    return wanted


def new_moments(part: Part, moments: str) -> dict[str, Tensor]:
    """Moments of zero."""
    kept = moments_of(part, moments)
    shape, device = part.local.shape, part.local.device
    if kept != "fp8":
        dtype = torch.float32 if kept == "float32" else torch.bfloat16
        return {name: torch.zeros(shape, dtype=dtype, device=device) for name in MOMENT_NAMES}
    state = {name: torch.zeros(shape, dtype=torch.uint8, device=device) for name in MOMENT_NAMES}
    grid = (*shape[:-1], -(-shape[-1] // 128))
    return state | {name: torch.ones(grid, dtype=torch.float32, device=device) for name in SCALE_NAMES}


def needs_master(part: Part, master: str | None) -> bool:
    """Whether the parameter has a master of its own: plain fp32 parameters are their own."""
    return master is not None and (isinstance(part.local, QuantizedTensor) or part.local.dtype != torch.float32)


def new_master(part: Part) -> Tensor:
    """The fp32 master of a parameter: its original values where it has kept them (which it then drops), else its values now."""
    q = part.local
    if not isinstance(q, QuantizedTensor):
        return q.detach().to(torch.float32, copy=True).contiguous()
    initial, q.initial = q.initial, None
    if initial is None:
        return q.detach().dequantize(torch.float32)  # pyright: ignore[reportCallIssue]
    return initial.to(q.device, torch.float32, copy=True).contiguous()


def renew_master(part: Part, state: dict[str, Tensor]) -> None:
    """Makes the master that a state has anew where high-precision values have been loaded into the parameter since."""
    if "master" in state and isinstance(part.local, QuantizedTensor) and part.local.geometry.loaded:
        # In place: a CUDA graph that was captured knows this memory.
        state["master"].copy_(new_master(part))


def load_moment(part: Part, state: dict[str, Tensor], which: int) -> Tensor:
    """A moment in fp32, of the local tensor's shape; the state's own tensor where that is fp32."""
    kept = state[MOMENT_NAMES[which]]
    if kept.dtype != torch.uint8:
        return kept.to(torch.float32)
    return adamw.load_fp8(kept, state[SCALE_NAMES[which]], second=which == 1, origin=(0, part.start[2]))


def store_moment(part: Part, state: dict[str, Tensor], which: int, values: Tensor, key: Any) -> None:
    """Writes a moment into the state; `key` None rounds to nearest, which loses nothing of values that were kept before."""
    kept = state[MOMENT_NAMES[which]]
    if kept.dtype == torch.uint8:
        place = {"origin": part.origin, "shape": part.whole}
        codes, scales = adamw.store_fp8(values, second=which == 1, key=key, **place)
        kept.copy_(codes)
        state[SCALE_NAMES[which]].copy_(scales)
    elif kept.dtype == torch.bfloat16 and key is not None:
        rounded = adamw.round_to_bfloat16(matrices(values), key, origin=part.origin, shape=part.whole)
        kept.copy_(rounded.reshape(kept.shape))
    else:
        kept.copy_(values)


def portable(param: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A parameter's state as a state dict shows it: fp32 values, placed as the parameter is."""
    part = part_of(param)
    shown = {name: state[name] for name in ("step", "master") if name in state}
    shown |= {name: load_moment(part, state, which) for which, name in enumerate(MOMENT_NAMES)}
    return {name: value if name == "step" else placed(param, value) for name, value in shown.items()}


def restore(param: Tensor, shown: dict[str, Any], *, moments: str, master: str | None, capturable: bool) -> dict[str, Tensor]:
    """A new state for a parameter of what a state dict shows: of any mesh, any kind of moments, or of torch's own AdamW.

    Raises:
        ValueError: something is missing, or is not of the parameter's shape.
    """
    part = part_of(param)
    missing = [name for name in ("step", *MOMENT_NAMES) if name not in shown]
    if missing:
        raise ValueError(f"state of a parameter of shape {tuple(param.shape)} lacks {', '.join(missing)}")
    step = torch.as_tensor(shown["step"], dtype=torch.float32).clone()
    state = {"step": step.to(part.local.device) if capturable else step.cpu(), **new_moments(part, moments)}
    for which, name in enumerate(MOMENT_NAMES):
        store_moment(part, state, which, _local_values(part, name, shown[name]), None)
    # A checkpoint of torch's AdamW has no master: the next step makes it from the parameter.
    if needs_master(part, master) and "master" in shown:
        state["master"] = _local_values(part, "master", shown["master"]).clone()
    return state


def _local_values(part: Part, name: str, value: Tensor) -> Tensor:
    """This rank's part of a tensor that lies as the parameter does, otherwise, or whole."""
    if tuple(value.shape) == tuple(part.param.shape):
        if sharding.placed_alike(value, part.param):
            value = sharding.local_of(value)
        else:
            whole = value if sharding.mesh_of(value) is None else value.full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
            value = sharding.own_part(whole, part.param)
    if tuple(value.shape) != tuple(part.local.shape):
        raise ValueError(
            f"{name} must be of the parameter's shape {tuple(part.param.shape)}, or of its local part's, "
            f"{tuple(part.local.shape)}; got {tuple(value.shape)}"
        )
    if bits.dtype_name(value) not in bits.FLOAT_DTYPES:
        raise ValueError(f"{name} must hold float32, bfloat16 or float16 values, got {value.dtype}")
    return value.detach().to(part.local.device, torch.float32).contiguous()
