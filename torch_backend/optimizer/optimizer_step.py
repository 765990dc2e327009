"""Carries out one step of all parameters.

masters and moments      one kernel call per device, or the definition one by one; the same pass writes 16-bit copies and the
  |                      codes of blocks within this rank's shard, and finds amaxes of whole parameters
  v
codes from those amaxes  one scale per tensor, or two levels: reduced over ranks together, then a second kernel call
  |
  v
remaining codes          on a CPU, or if blocks cross ranks: quantized from the masters
  |
  v
without a master         dequantized for the step, in batches, and rounded stochastically
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from blockfp.definition import adamw, muon, numerics
from blockfp.definition.adamw import FIRST, WEIGHT, Coefficients
from blockfp.kernels import step_table
from blockfp.kernels.step_table import Table

from ..ops import cuda
from ..ops.collectives import max_reduce
from ..ops.kernels import kernels_for
from ..ops.optimizer import cuda_steps
from ..quantized_tensor.geometry import Geometry
from ..quantized_tensor.tensor import QuantizedTensor
from ..torch_internals import foreach_add_
from ..weights.requantize import check_writable, requantize_
from .local_parameter import MOMENT_NAMES, SCALE_NAMES, SCALES_OF, LocalParameter
from .optimizer_state import load_moment, matrices, store_moment

# Batch size, in elements of whole parameters, for dequantizing weights without a master.
_TRANSIENT = 1 << 26


Tables = dict[torch.device, Table]
Arrays = tuple[Any, ...]
"""A parameter's `step_table.ARRAYS`, followed by coefficients and step number if only the device knows them."""


def carry_out(todo: list[LocalParameter], key: tuple[int, int], tables: Tables) -> None:
    """Takes all parameters' steps in place. `todo` has the same order on every rank; `tables` caches each device's table."""
    with_master, without, plain = [], [], []
    for one in todo:
        if "master" in one.state:
            with_master.append((one, one.state["master"]))
        elif one.format is not None:
            without.append(one)
        elif one.local.dtype is torch.float32:
            with_master.append((one, one.local))  # its own master
        else:
            plain.append(one)
    later = update(with_master, key, tables, whole_step=True)
    _requantize(later, [one.state["master"] for one in later], None)
    for one in plain:
        _round_in_place(one, key)
    _step_without_masters(without, key)


def update(
    todo: Iterable[tuple[LocalParameter, Tensor]], key: tuple[int, int], tables: Tables, *, whole_step: bool
) -> list[LocalParameter]:
    """Updates fp32 weights and moments with one kernel call per device, and writes the parameters too if `whole_step`.

    Each parameter comes with its weight: a master, or values dequantized for this step. Returns the quantized parameters whose
    codes remain to be written.
    """
    first, second = MOMENT_NAMES
    first_scales, second_scales = SCALE_NAMES
    by_device: dict[torch.device, tuple[Any, list[LocalParameter], list[Arrays]]] = {}
    by_definition, later = [], []
    copies: list[tuple[Tensor, Tensor]] = []
    for one, weight in todo:
        local, state = one.local, one.state
        device = local.device
        if device not in by_device:
            by_device[device] = (kernels_for(one.gradient), [], [])
        kernels, together, arrays = by_device[device]
        copied = whole_step and one.format is None and "master" in state
        by_kernels = kernels is not numerics and weight.is_contiguous() and (not copied or local.is_contiguous())
        out, out_scales = local if copied else None, None
        if whole_step and isinstance(local, QuantizedTensor):
            if by_kernels and one.one_pass:
                _check_not_gathered(local.geometry)
                out, out_scales = local.codes, local.scales
            elif by_kernels and one.two_passes and kernels is cuda:
                check_writable(local)
                out, out_scales = local.codes, local.scales
                if not (out.is_contiguous() and out_scales.is_contiguous()):  # views of other memory
                    copies += ((out, out := out.contiguous()), (out_scales, out_scales := out_scales.contiguous()))
            else:
                later.append(one)
        if by_kernels:
            scales, known = (state.get(first_scales), state.get(second_scales)), isinstance(one.step, int)
            constants = (None, None) if known else (one.coefficients, one.step)
            arrays.append((one.gradient, weight, state[first], state[second], *scales, out, out_scales, *constants))
            together.append(one)
        else:
            by_definition.append((one, weight.detach(), copied))
    for device, (kernels, together, arrays) in by_device.items():
        if together:
            table = _filled(kernels, together, arrays, key, tables, device)
            _by_kernels(kernels, together, table, whole_step)
    for part, written in copies:
        part.copy_(written)
    for one, weight, copied in by_definition:
        _update_by_definition(one, weight, key)
        if copied:
            _copy_where(one.moves, one.local.detach(), weight)
    return later


def _by_kernels(kernels: Any, todo: list[LocalParameter], table: Any, whole_step: bool) -> None:
    """Calls a device's kernels for the step, then again for codes that need the amaxes it found."""
    on = todo[0].gradient
    waiting: dict[tuple[str, ...], list[int]] = {}
    if whole_step and kernels is cuda:
        for place, one in enumerate(todo):
            if one.two_passes:
                waiting.setdefault(one.reduced_over, []).append(place)
    if not waiting:
        (cuda_steps if kernels is cuda else kernels).adamw(table, on)
        return
    places = list(chain.from_iterable(waiting.values()))
    codes = step_table.second_pass(table, places, [todo[place].tensor_scale_address for place in places])
    amaxes = torch.zeros(len(places), dtype=torch.int32, device=on.device)
    step_table.point_to_amaxes(table, places, amaxes.data_ptr(), known=False)
    cuda_steps.adamw(table, on)
    parts = amaxes.split([len(some) for some in waiting.values()])
    for groups, part in zip(waiting, parts, strict=True):
        if groups:
            part.copy_(max_reduce(part, groups))
    step_table.point_to_amaxes(codes, range(len(places)), amaxes.data_ptr(), known=True)
    cuda_steps.adamw_codes(codes, on)


def _filled(
    kernels: Any, todo: list[LocalParameter], arrays: list[Arrays], key: tuple[int, int], tables: Tables, device: torch.device
) -> Any:
    """Returns this step's table after checking all arrays; raises TypeError or ValueError for one that doesn't fit."""
    if kernels is not cuda:
        addresses = [one.addresses(own) for one, own in zip(todo, arrays, strict=True)]
        table = _table(todo, key, tables, device)
    else:
        for one, own in zip(todo, arrays, strict=True):
            if one.row is None:
                one.addresses(own)
        flat = list(chain.from_iterable(arrays))
        while True:
            table = _table(todo, key, tables, device)
            try:
                addresses, misfit = cuda_steps.addresses(flat, table.expected)
            except Exception:  # of a tensor without memory, such as one on meta
                for one, own in zip(todo, arrays, strict=True):
                    one.addresses(own)
                raise
            if misfit < 0:
                break
            place = misfit // step_table.ADDRESSES
            before = todo[place].row
            # Raises unless only the dtype of the gradient or moments has changed.
            todo[place].addresses(arrays[place])
            assert todo[place].row is not before
        addresses = addresses.reshape(len(todo), -1)
    constants = [c if isinstance(c := one.coefficients, Coefficients) else step_table.NO_COEFFICIENTS for one in todo]
    return table.filled(addresses, constants, [one.step if isinstance(one.step, int) else 0 for one in todo])


def _table(todo: list[LocalParameter], key: tuple[int, int], tables: Tables, device: torch.device) -> Table:
    rows: Any = [one.row for one in todo]
    numbers = [one.number for one in todo]
    known = [isinstance(one.step, int) for one in todo]
    table = tables.get(device)
    if table is None or not table.is_of(rows, numbers, known, key):
        table = tables[device] = Table(rows, numbers, known, key)
    return table


def _check_not_gathered(geometry: Geometry) -> None:
    if geometry.gathered:
        raise ValueError(
            "params hold FSDP's gathered copy of a sharded weight, which the next reshard throws away: give the optimizer "
            "model.parameters() after fully_shard, before a forward"
        )


def _update_by_definition(one: LocalParameter, weight: Tensor, key: tuple[int, int]) -> None:
    first, second = (load_moment(one, one.state, name) for name in MOMENT_NAMES)
    moved, first, second = adamw.update(weight, first, second, one.gradient.to(torch.float32), one.scalars)
    skip = one.scalars.skip
    for which, (name, values) in enumerate(zip(MOMENT_NAMES, (first, second), strict=True)):
        # Storing an unchanged moment changes it only beside NaNs. If only the device knows of the skip, the old one is
        # restored.
        names = [each for each in (name, SCALES_OF[name]) if each in one.state]
        before = {each: one.state[each].clone() for each in names} if isinstance(skip, Tensor) else {}
        store_moment(one, one.state, name, values, one.key(key, FIRST + which))
        for each, old in before.items():
            _copy_where(skip != 0, one.state[each], old)
    weight.copy_(moved)


def _copy_where(condition: bool | Tensor, out: Tensor, values: Tensor) -> None:
    if isinstance(condition, Tensor):
        out.copy_(torch.where(condition, values.to(out.dtype), out))
    elif condition:
        out.copy_(values)


def _requantize(todo: list[LocalParameter], values: list[Tensor], keys: list[Any] | None) -> None:
    """Quantizes all parameters that may have moved together, so that they share reductions."""
    if not todo:
        return
    chosen = [i for i, one in enumerate(todo) if one.moves is not False]
    before = [_copies(todo[i]) for i in chosen]
    chosen_keys = None if keys is None else [keys[i] for i in chosen]
    requantize_([todo[i].param for i in chosen], [values[i] for i in chosen], keys=chosen_keys)
    for i, copies in zip(chosen, before, strict=True):
        for part, old in copies:
            _copy_where(~torch.as_tensor(todo[i].moves, device=part.device), part, old)


def _copies(one: LocalParameter) -> list[tuple[Tensor, Tensor]]:
    """Returns codes and scales with copies if only the device knows whether they change, else []."""
    q = one.local
    if not isinstance(q, QuantizedTensor) or isinstance(one.coefficients, Coefficients):
        return []
    return [(part, part.clone()) for part in (q.codes, q.scales, q.tensor_scale) if part is not None]


def _step_without_masters(todo: list[LocalParameter], key: tuple[int, int]) -> None:
    """Updates quantized weights without masters: dequantizes, steps and rounds stochastically to their format."""
    batch: list[tuple[LocalParameter, Tensor]] = []
    elements = 0
    for one in chain(todo, (None,)):
        if batch and (one is None or elements + one.param.numel() > _TRANSIENT):
            update(batch, key, {}, whole_step=False)
            _requantize([x for x, _ in batch], [weight for _, weight in batch], [x.key(key, WEIGHT) for x, _ in batch])
            batch, elements = [], 0
        if one is not None:
            batch.append((one, one.local.detach().dequantize(torch.float32)))  # pyright: ignore[reportCallIssue]
            elements += one.param.numel()


def _round_in_place(one: LocalParameter, key: tuple[int, int]) -> None:
    """Updates a bfloat16 parameter without a master."""
    local = one.local.detach()
    weight = local.to(torch.float32, copy=True).contiguous()
    update([(one, weight)], key, {}, whole_step=False)
    place = {"origin": one.origin, "shape": one.whole}
    rounded = adamw.round_to_bfloat16(matrices(weight), one.key(key, WEIGHT), **place)
    _copy_where(one.moves, local, rounded.reshape(local.shape))


# ---- Constants of a step


def coefficients(step: Any, lr: Any, settings: Any, decoupled: bool, ratio: float | None) -> Coefficients:
    """Returns the constants of a step: of AdamW or Adam, or with a ratio Muon's.

    `settings` are (betas, eps, weight_decay).
    """
    if ratio is None:
        return adamw.coefficients(step, lr, *settings, decoupled=decoupled)
    return muon.coefficients(lr, settings[-1], ratio)


def begin_on_device(
    todo: list[LocalParameter],
    steps: list[Tensor],
    lr: Any,
    settings: Any,
    decoupled: bool,
    found: Tensor | None,
    scale: Tensor | None,
) -> None:
    """Counts the step and sets its coefficients without a device read: each parameter's are a row of a tensor."""
    alike: dict[tuple[torch.device, float | None], list[int]] = {}
    for i, step in enumerate(steps):
        alike.setdefault((step.device, todo[i].ratio), []).append(i)
    for (device, ratio), places in alike.items():
        counts = [steps[i] for i in places]
        skip = (torch.zeros((), device=device) if found is None else found.to(device) != 0).to(torch.float32)
        foreach_add_(counts, [1 - skip] * len(counts))
        step = torch.stack(counts).to(torch.float64)
        rate = lr.to(device, torch.float64) if isinstance(lr, Tensor) else lr
        c = coefficients(step, rate, settings, decoupled, ratio)
        unscale = 1.0 if scale is None else scale.to(device, torch.float64).reciprocal()
        # A skipped step may have number 0; its coefficients are never read.
        columns = [
            x.to(torch.float64).expand(len(counts)) if isinstance(x, Tensor) else torch.full_like(step, x)
            for x in c._replace(unscale=unscale, skip=skip)
        ]
        table = torch.stack(columns, dim=1).to(torch.float32)
        for i, row in zip(places, table.unbind(), strict=True):
            todo[i].coefficients, todo[i].step = row, steps[i]
