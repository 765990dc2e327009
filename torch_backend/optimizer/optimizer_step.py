"""How an optimizer step is carried out: which parameters go through the kernels at once, and which are quantized after them.

masters and moments      all parameters of a device in one call of the kernels, or the definition one by one; copies in 16
  |                      bits and the codes of blocks that lie within this rank's part are written in the same pass
  v
codes of the rest        one scale per tensor, two levels, blocks that straddle ranks: from the masters, all together
  |
  v
without a master         dequantized for the length of a step, some at a time, and rounded stochastically
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from blockfp.definition import adamw
from blockfp.definition.adamw import FIRST, WEIGHT, Coefficients
from blockfp.kernels import cuda_library, native
from blockfp.kernels.step_table import Step, one_pass

from ..custom_ops import cuda
from ..custom_ops.ops import name_of
from ..quantized_tensor.tensor import QuantizedTensor
from ..weights.requantize import requantize_
from .optimizer_state import MOMENT_NAMES, SCALE_NAMES, Part, load_moment, matrices, store_moment

# Weights without a master are dequantized so many elements (of the whole parameters) at a time.
_TRANSIENT = 1 << 26


@dataclass
class Todo:
    """One parameter's step.

    Attributes:
        part: what this rank holds.
        state: its state.
        gradient: local, contiguous.
        number: the parameter's position in the optimizer.
        coefficients: numbers, or where only the device knows them float32 of their order.
        step: the step's number, likewise.
    """

    part: Part
    state: dict[str, Tensor]
    gradient: Tensor
    number: int
    coefficients: Coefficients | Tensor
    step: int | Tensor

    @property
    def quantized(self) -> QuantizedTensor | None:
        """This rank's codes and scales, if the parameter is quantized."""
        local = self.part.local
        return local if isinstance(local, QuantizedTensor) else None

    @property
    def master(self) -> Tensor | None:
        """The fp32 weight that the step changes: the master, or a plain fp32 parameter itself; None where there is none."""
        if "master" in self.state:
            return self.state["master"]
        plain = self.quantized is None and self.part.local.dtype == torch.float32
        return self.part.local.detach() if plain else None

    @property
    def scalars(self) -> Coefficients:
        """The constants one by one."""
        c = self.coefficients
        return c if isinstance(c, Coefficients) else Coefficients(*c.unbind())

    @property
    def moves(self) -> bool | Tensor:
        """Whether the weight may move at all; a tensor where only the device knows."""
        c = self.scalars
        if isinstance(self.coefficients, Coefficients):
            return not (adamw.stands_still(c) or c.skip)
        return ~adamw.stands_still(c) & (c.skip == 0)

    @cached_property
    def in_one_pass(self) -> bool:
        """Whether a kernel writes the codes while it updates the master; the same on every rank that shares the parameter."""
        q = self.quantized
        if q is None or q.format.block is None or not one_pass(q.format):
            return False
        return _kernels(q.device) is not None and not self.part.cuts_blocks(q.format.block)

    def key(self, key: tuple[int, int], what: int) -> Any:
        """The key that rounds the weight or a moment in this step."""
        if isinstance(self.step, int):
            return adamw.rounding_key(key, self.step, self.number, what)
        # Filled in on the device: nothing may be copied there while a graph is captured.
        words = [torch.full((), number, dtype=torch.int64, device=self.step.device) for number in (*key, self.number, what)]
        return adamw.rounding_key(torch.stack(words[:2]), self.step.to(torch.int32), words[2], words[3])


def carry_out(todo: list[Todo], key: tuple[int, int]) -> None:
    """The steps of all parameters, in place.

    Args:
        todo: the parameters, in the same order on every rank.
        key: the optimizer's.
    """
    _update_masters([(one, one.master) for one in todo if one.master is not None], key)
    later = [one for one in todo if one.master is not None and one.quantized is not None and not one.in_one_pass]
    _requantize(later, [one.state["master"] for one in later], None)
    without = [one for one in todo if one.master is None]
    for one in without:
        if one.quantized is None:
            _round_in_place(one, key)
    _step_without_masters([one for one in without if one.quantized is not None], key)


def _kernels(device: torch.device) -> Any:
    """The module whose `adamw` runs on this device, or None: the definition runs then."""
    if device.type == "cuda" and cuda_library.available():
        return cuda
    return native if device.type == "cpu" and native.available() else None


def _update_masters(todo: list[tuple[Todo, Tensor]], key: tuple[int, int]) -> None:
    """Masters and moments, copies in 16 bits, and codes where one pass writes them."""
    by_device: dict[torch.device, list[Step]] = {}
    for one, master in todo:
        local, copied = one.part.local, one.quantized is None and "master" in one.state
        if _kernels(local.device) is not None and master.is_contiguous() and (not copied or local.is_contiguous()):
            by_device.setdefault(local.device, []).append(_step(one, master, writes=True))
            continue
        _update_by_definition(one, master, key)
        if copied:
            _copy_where(one.moves, local.detach(), master)
    for device, steps in by_device.items():
        _kernels(device).adamw(steps, key)


def _step(one: Todo, weight: Tensor, *, writes: bool) -> Step:
    """What a kernel is told; `writes`: the parameter itself is written too, as far as one pass can."""
    part, q = one.part, one.quantized
    out = out_scales = format = None
    if writes and q is not None and one.in_one_pass:
        _check_not_gathered(q)
        out, out_scales, format = q.codes, q.scales, q.format
    elif writes and q is None and "master" in one.state:
        out = matrices(part.local.detach())
    return Step(
        gradient=matrices(one.gradient),
        weight=matrices(weight),
        first=matrices(one.state[MOMENT_NAMES[0]]),
        second=matrices(one.state[MOMENT_NAMES[1]]),
        first_scales=one.state.get(SCALE_NAMES[0]),
        second_scales=one.state.get(SCALE_NAMES[1]),
        coefficients=one.coefficients,
        step=one.step,
        parameter=one.number,
        out=out,
        out_scales=out_scales,
        format=format,
        nominal=name_of(part.local.dtype),
        start=part.start,
        shape=part.whole,
    )


def _check_not_gathered(q: QuantizedTensor) -> None:
    if q.geometry.gathered:
        raise ValueError(
            "params hold FSDP's gathered copy of a sharded weight, which the next reshard throws away: give the optimizer "
            "model.parameters() after fully_shard, before a forward"
        )


def _update_by_definition(one: Todo, weight: Tensor, key: tuple[int, int]) -> None:
    first, second = (load_moment(one.part, one.state, which) for which in range(2))
    moved, first, second = adamw.update(weight, first, second, one.gradient.to(torch.float32), one.scalars)
    skip = one.scalars.skip
    for which, values in enumerate((first, second)):
        # What was kept is kept again as it is, but for a NaN's neighbours: where the device alone knows, it is put back.
        names = [name for name in (MOMENT_NAMES[which], SCALE_NAMES[which]) if name in one.state]
        before = {name: one.state[name].clone() for name in names} if isinstance(skip, Tensor) else {}
        store_moment(one.part, one.state, which, values, one.key(key, FIRST + which))
        for name, old in before.items():
            _copy_where(skip != 0, one.state[name], old)
    weight.copy_(moved)


def _copy_where(condition: bool | Tensor, out: Tensor, values: Tensor) -> None:
    if isinstance(condition, Tensor):
        out.copy_(torch.where(condition, values.to(out.dtype), out))
    elif condition:
        out.copy_(values)


def _requantize(todo: list[Todo], values: list[Tensor], keys: list[Any] | None) -> None:
    """Codes and scales of the parameters that may have moved: all in one go, for the sake of the reductions."""
    chosen = [i for i, one in enumerate(todo) if one.moves is not False]
    before = [_copies(todo[i]) for i in chosen]
    chosen_keys = None if keys is None else [keys[i] for i in chosen]
    requantize_([todo[i].part.param for i in chosen], [values[i] for i in chosen], keys=chosen_keys)
    for i, copies in zip(chosen, before, strict=True):
        for part, old in copies:
            _copy_where(~torch.as_tensor(todo[i].moves), part, old)


def _copies(one: Todo) -> list[tuple[Tensor, Tensor]]:
    """Codes and scales, and what they are now, where only the device knows whether they are to change."""
    q = one.quantized
    if q is None or isinstance(one.moves, bool):
        return []
    return [(part, part.clone()) for part in (q.codes, q.scales, q.tensor_scale) if part is not None]


def _step_without_masters(todo: list[Todo], key: tuple[int, int]) -> None:
    """Quantized weights that have no master: dequantized, updated, and rounded stochastically to their format."""
    batch: list[tuple[Todo, Tensor]] = []
    elements = 0
    for one in chain(todo, (None,)):
        if batch and (one is None or elements + one.part.param.numel() > _TRANSIENT):
            _update_transient(batch, key)
            _requantize([x for x, _ in batch], [weight for _, weight in batch], [x.key(key, WEIGHT) for x, _ in batch])
            batch, elements = [], 0
        if one is not None and one.quantized is not None:
            batch.append((one, one.quantized.detach().dequantize(torch.float32)))  # pyright: ignore[reportCallIssue]
            elements += one.part.param.numel()


def _round_in_place(one: Todo, key: tuple[int, int]) -> None:
    """A bfloat16 parameter without a master."""
    local = one.part.local.detach()
    weight = local.to(torch.float32, copy=True).contiguous()
    _update_transient([(one, weight)], key)
    place = {"origin": one.part.origin, "shape": one.part.whole}
    rounded = adamw.round_to_bfloat16(matrices(weight), one.key(key, WEIGHT), **place)
    _copy_where(one.moves, local, rounded.reshape(local.shape))


def _update_transient(todo: list[tuple[Todo, Tensor]], key: tuple[int, int]) -> None:
    """Moments, and weights that are fp32 for the length of a step."""
    for one, weight in todo:
        kernels = _kernels(weight.device)
        if kernels is None:
            _update_by_definition(one, weight, key)
        else:
            kernels.adamw([_step(one, weight, writes=False)], key)
