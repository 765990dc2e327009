"""Optimizer state of each parameter (step, master, moments), in memory and in state dicts.

    parameter (DTensor or plain)          codes or values that the model computes with
      | new_moments, new_master
      v
    state: step, master, exp_avg, ..      plain local tensors; moments in fp32, bfloat16, or FP8 codes and scales
      | portable / restore
      v
    state dict                            fp32 values, DTensors placed as the parameter, which torch's checkpoints reshard

State dicts always hold fp32 values. The conversion is lossless (`definition.adamw`), so a state dict can be loaded on another
mesh, with other moments, or by torch's own AdamW.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from blockfp.definition import adamw, bits, numerics
from blockfp.definition.adamw import MOMENT_FORMAT

from ..ops import cuda
from ..ops.kernels import kernels_for
from ..quantized_tensor import sharding
from ..quantized_tensor.sharding import placed
from ..quantized_tensor.tensor import QuantizedTensor
from .local_parameter import MOMENT_NAMES, MOMENTUM_NAME, SCALES_OF, LocalParameter
from .osci_reset import PATHS, new_paths, resets


def matrices(x: Tensor) -> Tensor:
    """Returns x as [..., rows, columns]; a vector becomes one row."""
    return x if x.ndim >= 2 else x.reshape(1, -1)


def moments_of(one: LocalParameter, wanted: str) -> str:
    """Returns the dtype name of a parameter's moments.

    fp8 means float32 for vectors, which are small and sharded within blocks. Raises ValueError if FP8 blocks would cross ranks.
    """
    if wanted != "fp8" or one.param.ndim < 2:
        return "float32" if wanted == "fp8" else wanted
    assert MOMENT_FORMAT.block is not None
    if one.cuts_blocks(MOMENT_FORMAT.block):
        raise ValueError(
            f"moments='fp8' has blocks of 128 columns, but shards of a parameter of shape {tuple(one.param.shape)} "
            f"divide them: {one.lies}; use moments='bfloat16' in this parameter's group"
        )
    return wanted


def new_moments(one: LocalParameter, moments: str, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Returns zero moments of these names."""
    kept = moments_of(one, moments)
    shape, device = one.local.shape, one.local.device
    if kept != "fp8":
        dtype = torch.float32 if kept == "float32" else torch.bfloat16
        return {name: torch.zeros(shape, dtype=dtype, device=device) for name in names}
    state = {name: torch.zeros(shape, dtype=torch.uint8, device=device) for name in names}
    grid = (*shape[:-1], -(-shape[-1] // 128))
    return state | {SCALES_OF[name]: torch.ones(grid, dtype=torch.float32, device=device) for name in names}


def needs_master(one: LocalParameter, master: str | None) -> bool:
    """Returns whether the parameter has a separate master; plain fp32 parameters are their own master."""
    return master is not None and (isinstance(one.local, QuantizedTensor) or one.local.dtype != torch.float32)


def new_master(one: LocalParameter) -> Tensor:
    """Creates the fp32 master from the original values, which are then dropped, or else from the current values."""
    q = one.local
    if not isinstance(q, QuantizedTensor):
        return q.detach().to(torch.float32, copy=True).contiguous()
    initial, q.initial = q.initial, None
    if initial is None:
        return q.detach().dequantize(torch.float32)  # pyright: ignore[reportCallIssue]
    return initial.to(q.device, torch.float32, copy=True).contiguous()


def renew_master(one: LocalParameter, state: dict[str, Tensor]) -> None:
    """Recreates a master, in place, if values or codes have been loaded into the parameter since.

    A master that rounds to the current codes or 16-bit values is kept: a checkpoint's model may be loaded after its optimizer.
    """
    master, local = state.get("master"), one.local
    if master is None:
        return
    # In place: a captured CUDA graph refers to this memory.
    if not isinstance(local, QuantizedTensor):
        values = local.detach()
        master.copy_(torch.where(master.to(values.dtype) == values, master, values.to(torch.float32)))
        return
    if local.geometry.loaded == "values":
        master.copy_(new_master(one))
    elif local.geometry.loaded == "codes" and master.numel():
        master.copy_(torch.where(_made_of(local, master), master, new_master(one)))
    local.initial = None


def _made_of(q: QuantizedTensor, master: Tensor) -> Tensor:
    """Returns whether a master encodes to the current codes, as a tensor, without a device read.

    Reciprocals of scales may differ by a relative 2^-22 from those used to encode, so codes of slightly smaller or larger
    values also match.
    """
    encode = cuda.encode if kernels_for(master) is cuda else numerics.encode
    values, same = _values(q, q.codes), torch.zeros_like(master, dtype=torch.bool)
    for factor in (1 - 2**-20, 1 + 2**-20):
        made = _values(q, encode(master * factor, q.format, q.scales, q.tensor_scale, origin=q.origin))
        same |= (made == values) | (made.isnan() & values.isnan())
    return same.all()


def _values(q: QuantizedTensor, codes: Tensor) -> Tensor:
    return q.with_parts(codes, q.scales, q.tensor_scale).dequantize(torch.float32)


def load_moment(one: LocalParameter, state: dict[str, Tensor], name: str) -> Tensor:
    """Returns a moment in fp32, of the local shape; no copy if it is stored in fp32."""
    kept = state[name]
    if kept.dtype != torch.uint8:
        return kept.to(torch.float32)
    return adamw.load_fp8(kept, state[SCALES_OF[name]], second=name == MOMENT_NAMES[1], origin=(0, one.start[2]))


def store_moment(one: LocalParameter, state: dict[str, Tensor], name: str, values: Tensor, key: Any) -> None:
    """Stores a moment. key=None rounds to nearest, which is exact for values that were stored before."""
    kept = state[name]
    if kept.dtype == torch.uint8:
        second = name == MOMENT_NAMES[1]
        codes, scales = adamw.store_fp8(values, second=second, key=key, origin=one.origin, shape=one.whole)
        kept.copy_(codes)
        state[SCALES_OF[name]].copy_(scales)
    elif kept.dtype == torch.bfloat16 and key is not None:
        rounded = adamw.round_to_bfloat16(matrices(values), key, origin=one.origin, shape=one.whole)
        kept.copy_(rounded.reshape(kept.shape))
    else:
        kept.copy_(values)


def portable(param: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns a parameter's state for a state dict: fp32 values, placed as the parameter."""
    one = LocalParameter(param)
    shown = {name: state[name] for name in ("step", "master", *PATHS) if name in state}
    shown |= {name: load_moment(one, state, name) for name in SCALES_OF if name in state}
    return {name: value if name == "step" else placed(param, value) for name, value in shown.items()}


def restore(
    param: Tensor,
    shown: dict[str, Any],
    names: tuple[str, ...],
    *,
    moments: str,
    master: str | None,
    capturable: bool,
    osci_reset: Any,
) -> dict[str, Tensor]:
    """Creates a parameter's state with moments `names` from a state dict's, of any mesh or moments, or of torch's optimizer.

    Raises ValueError if an entry is missing or its shape differs from the parameter's.
    """
    one = LocalParameter(param)
    if names == (MOMENTUM_NAME,):
        shown = {"step": torch.zeros(()), **shown}  # torch's Muon counts no steps
    missing = [name for name in ("step", *names) if name not in shown]
    if missing:
        raise ValueError(f"state of a parameter of shape {tuple(param.shape)} lacks {', '.join(missing)}")
    step = shown["step"]
    step = torch.as_tensor(step, dtype=torch.float32, device=step.device if isinstance(step, Tensor) else "cpu").clone()
    state = {"step": step.to(one.local.device) if capturable else step.cpu(), **new_moments(one, moments, names)}
    for name in names:
        store_moment(one, state, name, _local_values(one, name, shown[name]), None)
    # torch's AdamW saves no master; the next step makes it from the parameter.
    if needs_master(one, master) and "master" in shown:
        state["master"] = _local_values(one, "master", shown["master"]).clone()
        if osci_reset is not None and resets(one, state):
            # If the saved run had no OsciReset, the paths of an open window start at 0.
            state |= {name: _local_values(one, name, shown[name]).clone() for name in PATHS if name in shown}
            state |= new_paths(one, state)
    return state


def _local_values(one: LocalParameter, name: str, value: Tensor) -> Tensor:
    """Returns this rank's shard of a tensor that is whole, placed as the parameter, or placed differently."""
    if tuple(value.shape) == tuple(one.param.shape):
        if sharding.placed_alike(value, one.param):
            value = sharding.local_of(value)
        else:
            dtensor = sharding.as_dtensor(value)
            value = sharding.own_part(value if dtensor is None else dtensor.full_tensor(), one.param)
    if tuple(value.shape) != tuple(one.local.shape):
        raise ValueError(
            f"{name} must be of the parameter's shape {tuple(one.param.shape)}, or of its local part's, "
            f"{tuple(one.local.shape)}; got {tuple(value.shape)}"
        )
    if bits.dtype_name(value) not in bits.FLOAT_DTYPES:
        raise ValueError(f"{name} must hold float32, bfloat16 or float16 values, got {value.dtype}")
    return value.detach().to(one.local.device, torch.float32).contiguous()


# ---- state dicts


_OWN = ("moments", "master", "capturable", "osci_reset")
"""Settings of how state is stored; loading doesn't change them."""


def unsupported_setting(settings: Mapping[str, Any], *, decoupled: bool) -> str | None:
    """Returns, as NAME=VALUE, the first torch setting that AdamW (decoupled) or Adam doesn't support, or None."""
    own = {"amsgrad": False, "maximize": False, "differentiable": False, "decoupled_weight_decay": decoupled}
    return next((f"{name}={settings[name]}" for name, value in own.items() if bool(settings.get(name, value)) != value), None)


@dataclass
class _Made:
    """Wraps a state's tensor for torch's `load_state_dict`, which would cast a plain tensor to the parameter's dtype."""

    value: Tensor


def renew_masters(optimizer: Optimizer) -> None:
    """Recreates masters whose parameters were loaded without the optimizer."""
    for param, state in optimizer.state.items():
        renew_master(LocalParameter(param), state)


def show(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Replaces the states in torch's state dict by portable ones; a state_dict post-hook."""
    renew_masters(optimizer)
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    states = state_dict["state"]
    shown = {i: portable(param, states[i]) for i, param in zip(ids, params, strict=True) if i in states}
    state_dict["state"] = shown


def make(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Converts a state dict for torch to load; a pre-hook. It raises before anything has changed."""
    ours, theirs = optimizer.param_groups, state_dict["param_groups"]
    if [len(group["params"]) for group in ours] != [len(group["params"]) for group in theirs]:
        return state_dict  # torch raises its own error
    groups, states = [], {}
    for own, group in zip(ours, theirs, strict=True):
        if unfit := unsupported_setting(group, decoupled=optimizer._decoupled):
            raise ValueError(f"the loaded state has {unfit}, which {type(optimizer).__name__} doesn't have")
        kept = {name: own[name] for name in _OWN}
        groups.append({**optimizer.defaults, **group, **kept})
        for param, i in zip(own["params"], group["params"], strict=True):
            if state_dict["state"].get(i):
                made = restore(param, state_dict["state"][i], optimizer._moment_names(param, groups[-1]), **kept)
                states[i] = {name: _Made(value) for name, value in made.items()}
    return {**state_dict, "state": states, "param_groups": groups}


def take(optimizer: Optimizer) -> None:
    """Unwraps the loaded states; a load_state_dict post-hook."""
    for param, state in optimizer.state.items():
        optimizer.state[param] = {name: made.value for name, made in state.items()}
        local = sharding.local_of(param)
        if "master" in state and isinstance(local, QuantizedTensor):
            local.initial = None
