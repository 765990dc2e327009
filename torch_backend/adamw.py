"""`AdamW` and `Adam` for quantized, plain and sharded parameters alike.

A step goes over all parameters of a device in one call of the kernels: gradient in, master weight and moments updated, and
where the blocks of a quantized weight lie within this rank's part, its codes and scales written in the same pass. Weights
whose amax reaches further (one scale per tensor, NVFP4, blocks that straddle ranks) are quantized from their masters after
it, all together, with the few reductions that `requantize_` needs. Without kernels the definition (`blockfp.adamw`) does the
same, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from blockfp import adamw, cuda, native
from blockfp.adamw import WEIGHT, Coefficients
from blockfp.rounding import Key, key_words
from blockfp.step_table import Step, one_pass

from . import sharding
from .ops import name_of
from .optimizer_state import (
    MOMENT_NAMES,
    SCALE_NAMES,
    Part,
    load_moment,
    matrices,
    needs_master,
    new_master,
    new_moments,
    part_of,
    portable,
    restore,
    store_moment,
)
from .requantize import requantize_
from .tensor import QuantizedTensor

# Weights without a master are dequantized for the length of a step, so many elements (of the whole parameters) at a time.
_TRANSIENT = 1 << 26


class _Adam(Optimizer):
    """What AdamW and Adam share; they differ in what weight decay is."""

    # torch's GradScaler then hands over its scale and whether a gradient is not finite, instead of going over the gradients.
    _step_supports_amp_scaling = True
    _decoupled: bool

    def __init__(self, params, lr, betas, eps, weight_decay, master, moments, key, capturable):
        if master not in ("float32", None):
            raise ValueError(f"master must be 'float32' or None, got {master!r}")
        adamw.check_settings(lr, betas, eps, weight_decay, moments)
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(f"lr must be a number or a tensor of one element, got shape {tuple(lr.shape)}")
        first, second = key_words(0 if key is None else key)
        self._key = (int(first) & 0xFFFFFFFF, int(second) & 0xFFFFFFFF)
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "master": master, "moments": moments}
        super().__init__(params, settings | {"capturable": capturable})
        self.register_state_dict_post_hook(_show, prepend=True)
        self.register_load_state_dict_pre_hook(_wrap)
        self.register_load_state_dict_post_hook(_restore, prepend=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step; parameters without a gradient stay as they are.

        Sharded quantized weights may need collectives: every rank that holds a part of a parameter must call it.

        Args:
            closure: evaluates the loss again, and returns it.

        Returns:
            What the closure returns, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        number = 0
        todo: list[_Todo] = []
        for group in self.param_groups:
            group_todo = []
            for param in group["params"]:
                if param.grad is not None:
                    group_todo.append(self._todo(param, group, number))
                number += 1
            if group_todo and not self._begin(group, group_todo, found, scale):
                return loss
            todo += group_todo
        _carry_out(todo, self._key)
        return loss

    def _todo(self, param: Tensor, group: dict[str, Any], number: int) -> _Todo:
        part, state = part_of(param), self.state[param]
        if not state:
            on = part.local.device if group["capturable"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=on)
            state |= new_moments(part, group["moments"])
        if "master" not in state and needs_master(part, group["master"]):
            state["master"] = new_master(part)
        if not needs_master(part, group["master"]) and part.local.dtype == torch.float16 and _plain(part):
            raise ValueError("master=None is for quantized, bfloat16 and float32 parameters: float16 ones need a master")
        return _Todo(part, state, _local_gradient(param), number)

    def _begin(self, group: dict[str, Any], todo: list[_Todo], found: Tensor | None, scale: Tensor | None) -> bool:
        """Counts the step and works out its constants; False where the host knows that there is none to take."""
        steps: list[Tensor] = [one.state["step"] for one in todo]
        lr, settings = group["lr"], (group["betas"], group["eps"], group["weight_decay"])
        if group["capturable"]:
            _begin_on_device(todo, steps, lr, settings, self._decoupled, found, scale)
            return True
        if found is not None and found.item() != 0:
            return False
        unscale = 1.0 if scale is None else 1.0 / scale.item()
        lr = lr.item() if isinstance(lr, Tensor) else lr
        torch._foreach_add_(steps, 1)
        known: dict[int, Coefficients] = {}
        for one, step in zip(todo, steps, strict=True):
            one.step = int(step.item())
            if one.step not in known:
                c = adamw.coefficients(one.step, lr, *settings, decoupled=self._decoupled)
                known[one.step] = c._replace(unscale=unscale)
            one.coefficients = known[one.step]
        return True


class AdamW(_Adam):
    """AdamW (decoupled weight decay) for quantized parameters, plain ones and DTensors of either.

    Args:
        params: parameters or groups of them; each of the options below may differ by group, except `key`.
        lr: learning rate, a number or a tensor of one element.
        betas, eps, weight_decay: as in `torch.optim.AdamW`.
        master: "float32" keeps an fp32 master of every quantized or 16-bit parameter; it begins with the original values where
            the parameter has kept them (`initial`), else with what it is. None keeps none: the step is rounded stochastically
            to the parameter's own format.
        moments: "float32", or "bfloat16" and "fp8" in less memory, rounded stochastically (`blockfp.adamw`).
        key: seed, or two uint32 words, of that rounding; the same on every rank. 0 by default.
        capturable: the step count is kept on the device, and nothing is read back: for CUDA graphs.

    `state_dict` holds fp32 masters and moments, placed as their parameters; loading keeps them in fp32.

    Raises:
        ValueError: a setting that means nothing.

    Example:
        >>> q = torch.nn.Parameter(quantize(torch.ones(32, 64), "mxfp8_e4m3_32x32"))
        >>> q.grad = torch.ones(32, 64)
        >>> AdamW([q], lr=0.5).step()
        >>> q.dequantize()[0, 0].item()
        0.5
    """

    _decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        master: str | None = "float32",
        moments: str = "float32",
        key: Key | None = None,
        capturable: bool = False,
    ):
        super().__init__(params, lr, betas, eps, weight_decay, master, moments, key, capturable)


class Adam(_Adam):
    """Adam: as `AdamW`, but that weight decay is a term of the gradient (L2), 0 by default."""

    _decoupled = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        master: str | None = "float32",
        moments: str = "float32",
        key: Key | None = None,
        capturable: bool = False,
    ):
        super().__init__(params, lr, betas, eps, weight_decay, master, moments, key, capturable)


@dataclass
class _Todo:
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
    coefficients: Coefficients | Tensor = ()  # type: ignore[assignment]
    step: int | Tensor = 0

    @property
    def weight(self) -> Tensor | None:
        """The fp32 weight that the step changes: the master, or a plain fp32 parameter itself."""
        if "master" in self.state:
            return self.state["master"]
        return self.part.local.detach() if _plain(self.part) and self.part.local.dtype == torch.float32 else None

    @property
    def scalars(self) -> Coefficients:
        """The constants one by one."""
        c = self.coefficients
        return c if isinstance(c, Coefficients) else Coefficients(*c.unbind())

    def moves(self) -> bool | Tensor:
        """Whether the weight may move at all."""
        c = self.scalars
        if isinstance(self.coefficients, Coefficients):
            return not (adamw.stands_still(c) or c.skip)
        return ~adamw.stands_still(c) & (c.skip == 0)

    @cached_property
    def in_one_pass(self) -> bool:
        """Whether a kernel writes the codes while it updates the master; the same on every rank that shares the parameter."""
        q = self.part.local
        if not isinstance(q, QuantizedTensor) or q.format.block is None or not one_pass(q.format):
            return False
        return _kernels(q.device) is not None and not self.part.cuts_blocks(q.format.block)

    def key(self, key: tuple[int, int], what: int) -> Any:
        if isinstance(self.step, int):
            return adamw.rounding_key(key, self.step, self.number, what)
        # Filled in on the device: nothing may be copied there while a graph is captured.
        words = [torch.full((), number, dtype=torch.int64, device=self.step.device) for number in (*key, self.number, what)]
        return adamw.rounding_key(torch.stack(words[:2]), self.step.to(torch.int32), words[2], words[3])


def _plain(part: Part) -> bool:
    return not isinstance(part.local, QuantizedTensor)


def _local_gradient(param: Tensor) -> Tensor:
    gradient = param.grad
    assert gradient is not None
    if gradient.layout is not torch.strided:
        raise TypeError(f"gradients must be dense, got layout {gradient.layout}: use sparse=False in the embedding")
    mesh = sharding.mesh_of(param)
    if mesh is not None and sharding.mesh_of(gradient) is not None:
        if gradient.placements != param.placements:  # pyright: ignore[reportAttributeAccessIssue]
            gradient = gradient.redistribute(mesh, param.placements)  # pyright: ignore[reportAttributeAccessIssue]
        gradient = gradient.to_local()  # pyright: ignore[reportAttributeAccessIssue]
    return gradient.detach().contiguous()


def _begin_on_device(todo, steps, lr, settings, decoupled, found, scale) -> None:
    """`_begin` with nothing read back: the constants of each parameter are a row of a tensor."""
    by_device: dict[torch.device, list[int]] = {}
    for i, step in enumerate(steps):
        by_device.setdefault(step.device, []).append(i)
    for device, places in by_device.items():
        counts = [steps[i] for i in places]
        skip = torch.zeros((), device=device) if found is None else (found.to(device) != 0).to(torch.float32)
        torch._foreach_add_(counts, [1 - skip] * len(counts))
        step = torch.stack(counts).to(torch.float64)
        rate = lr.to(device, torch.float64) if isinstance(lr, Tensor) else lr
        c = adamw.coefficients(step, rate, *settings, decoupled=decoupled)
        unscale = 1.0 if scale is None else scale.to(device, torch.float64).reciprocal()
        # A step that is skipped has perhaps number 0, and constants that nobody reads.
        columns = [
            x.to(torch.float64).expand(len(counts)) if isinstance(x, Tensor) else torch.full_like(step, x)
            for x in c._replace(unscale=unscale, skip=skip)
        ]
        table = torch.stack(columns, dim=1).to(torch.float32)
        for i, row in zip(places, table.unbind(), strict=True):
            todo[i].coefficients, todo[i].step = row, steps[i]


def _carry_out(todo: list[_Todo], key: tuple[int, int]) -> None:
    """The steps of all parameters, then the codes that one pass can't write."""
    masters = [one for one in todo if one.weight is not None]
    _update_masters(masters, key)
    later = [one for one in masters if not _plain(one.part) and not one.in_one_pass]
    _requantize(later, [_weight_of(one) for one in later])
    transient = [one for one in todo if one.weight is None]
    for one in transient:
        if _plain(one.part):
            _round_in_place(one, key)
    _step_without_masters([one for one in transient if not _plain(one.part)], key)


def _weight_of(one: _Todo) -> Tensor:
    weight = one.weight
    assert weight is not None
    return weight


def _kernels(device: torch.device) -> Any:
    if device.type == "cuda" and cuda.available():
        return cuda
    return native if device.type == "cpu" and native.available() else None


def _update_masters(todo: list[_Todo], key: tuple[int, int]) -> None:
    """Masters and moments, copies in 16 bits, and codes where one pass writes them."""
    by_device: dict[torch.device, list[Step]] = {}
    for one in todo:
        local = one.part.local
        if _kernels(local.device) is None or not _contiguous(one):
            _update_by_definition(one, _weight_of(one), key)
            if _plain(one.part) and local.dtype != torch.float32:
                _copy_where(one.moves(), local.detach(), _weight_of(one))
        else:
            by_device.setdefault(local.device, []).append(_step(one))
    for device, steps in by_device.items():
        _kernels(device).adamw(steps, key)


def _contiguous(one: _Todo) -> bool:
    return _weight_of(one).is_contiguous() and (not _plain(one.part) or one.part.local.is_contiguous())


def _step(one: _Todo) -> Step:
    part, state, local = one.part, one.state, one.part.local
    out = out_scales = format = None
    if isinstance(local, QuantizedTensor):
        if one.in_one_pass:
            _check_not_gathered(local)
            out, out_scales, format = local.codes, local.scales, local.format
    elif local.dtype != torch.float32:
        out = matrices(local.detach())
    first, second = (matrices(state[name]) for name in MOMENT_NAMES)
    scales = (state.get(name) for name in SCALE_NAMES)
    place = (name_of(local.dtype), part.start, part.whole)
    weight, gradient = matrices(_weight_of(one)), matrices(one.gradient)
    return Step(
        gradient, weight, first, second, *scales, one.coefficients, one.step, one.number, out, out_scales, format, *place
    )


def _check_not_gathered(q: QuantizedTensor) -> None:
    if q.geometry.gathered:
        raise ValueError(
            "params hold FSDP's gathered copy of a sharded weight, which the next reshard throws away: give the optimizer "
            "model.parameters() after fully_shard, before a forward"
        )


def _update_by_definition(one: _Todo, weight: Tensor, key: tuple[int, int]) -> None:
    moments = [load_moment(one.part, one.state, which) for which in range(2)]
    gradient = one.gradient.to(torch.float32)
    moved, *moments = adamw.update(weight, *moments, gradient, one.scalars)
    skip = one.scalars.skip
    for which, (name, values) in enumerate(zip(MOMENT_NAMES, moments, strict=True)):
        kept = one.state[name]
        before = None if isinstance(skip, float) or kept.dtype == torch.float32 else _moment_parts(one, which)
        store_moment(one.part, one.state, which, values, one.key(key, which + 3))
        for part, old in before or ():  # rounding again what was kept is no change, but for NaN
            part.copy_(torch.where(skip != 0, old, part))
    weight.copy_(moved)


def _moment_parts(one: _Todo, which: int) -> list[tuple[Tensor, Tensor]]:
    names = (MOMENT_NAMES[which], SCALE_NAMES[which])
    return [(one.state[name], one.state[name].clone()) for name in names if name in one.state]


def _copy_where(condition: bool | Tensor, out: Tensor, values: Tensor) -> None:
    if isinstance(condition, Tensor):
        out.copy_(torch.where(condition, values.to(out.dtype), out))
    elif condition:
        out.copy_(values)


def _requantize(todo: list[_Todo], values: list[Tensor], keys: list[Any] | None = None) -> None:
    """Codes and scales of the parameters that may have moved: all in one go, for the sake of the reductions."""
    chosen = [i for i, one in enumerate(todo) if one.moves() is not False]
    before = [_parts_before(todo[i]) for i in chosen]
    new_keys = None if keys is None else [keys[i] for i in chosen]
    requantize_([todo[i].part.param for i in chosen], [values[i] for i in chosen], keys=new_keys)
    for i, parts in zip(chosen, before, strict=True):
        for part, old in parts:
            part.copy_(torch.where(todo[i].moves(), part, old))  # pyright: ignore[reportArgumentType]


def _parts_before(one: _Todo) -> list[tuple[Tensor, Tensor]]:
    """Codes and scales with copies of what they are, where only the device knows whether they are to change."""
    q = one.part.local
    assert isinstance(q, QuantizedTensor)
    if isinstance(one.moves(), bool):
        return []
    return [(part, part.clone()) for part in (q.codes, q.scales, q.tensor_scale) if part is not None]


def _step_without_masters(todo: list[_Todo], key: tuple[int, int]) -> None:
    """Quantized weights that have no master: dequantized, updated, and rounded stochastically to their format."""
    batch: list[_Todo] = []
    elements = 0
    for one in chain(todo, (None,)):
        if batch and (one is None or elements + one.part.param.numel() > _TRANSIENT):
            weights = [x.part.local.detach().dequantize(torch.float32) for x in batch]  # pyright: ignore[reportCallIssue]
            for x, weight in zip(batch, weights, strict=True):
                _update_transient(x, weight, key)
            _requantize(batch, weights, [x.key(key, WEIGHT) for x in batch])
            batch, elements = [], 0
        if one is not None:
            batch.append(one)
            elements += one.part.param.numel()


def _update_transient(one: _Todo, weight: Tensor, key: tuple[int, int]) -> None:
    kernels = _kernels(weight.device)
    if kernels is None:
        _update_by_definition(one, weight, key)
        return
    first, second = (matrices(one.state[name]) for name in MOMENT_NAMES)
    scales = (one.state.get(name) for name in SCALE_NAMES)
    place = (name_of(one.part.local.dtype), one.part.start, one.part.whole)
    gradient, weight = matrices(one.gradient), matrices(weight)
    step = Step(gradient, weight, first, second, *scales, one.coefficients, one.step, one.number, None, None, None, *place)
    kernels.adamw([step], key)


def _round_in_place(one: _Todo, key: tuple[int, int]) -> None:
    """A bfloat16 parameter without a master."""
    local = one.part.local.detach()
    weight = local.to(torch.float32, copy=True).contiguous()
    _update_transient(one, weight, key)
    place = {"origin": one.part.origin, "shape": one.part.whole}
    rounded = adamw.round_to_bfloat16(matrices(weight), one.key(key, WEIGHT), **place).reshape(local.shape)
    _copy_where(one.moves(), local, rounded)


@dataclass
class _Shown:
    """A tensor on its way through torch's `load_state_dict`, which would cast it to the parameter's dtype."""

    value: Any


def _show(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    states = state_dict["state"]
    shown = {i: portable(param, states[i]) for i, param in zip(ids, params, strict=True) if i in states}
    state_dict["state"] = shown


def _wrap(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    wrapped = {i: {name: _Shown(value) for name, value in state.items()} for i, state in state_dict["state"].items()}
    return {**state_dict, "state": wrapped}


def _restore(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        options = {name: group[name] for name in ("moments", "master", "capturable")}
        for param in group["params"]:
            if optimizer.state.get(param):
                values = {name: shown.value for name, shown in optimizer.state[param].items()}
                optimizer.state[param] = restore(param, values, **options)
