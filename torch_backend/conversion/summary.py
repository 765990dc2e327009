"""`summary`: lists a model's quantized weights with their formats, and the others with the reasons."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from blockfp import notebook
from blockfp.recipes import Recipe

from ..modules.experts import Experts
from ..modules.model_names import named_modules, optimizers_in, state_of
from ..quantized_tensor import sharding
from ..quantized_tensor.tensor import QuantizedTensor
from .kinds import EMBEDDING, ROUTER, base_kind, bias_names, quantized_names, router_modules, weight_names, why_not
from .memory import MemoryRow, memory_of


@dataclass(frozen=True)
class QuantizedWeight:
    """A layer's weight that is stored quantized, or quantized when used or gathered.

    Attributes:
        path: the layer's path; for experts, whose module has several weights, the parameter's.
        kind: name of the layer's class.
        recipe: its recipe, as text.
        stored: the format or dtype in which it is stored, as text.
        shape: shape of the whole weight.
        parameters: number of elements.
        bytes: bytes that this rank holds of codes and scales, or of values. Originals kept for an optimizer don't count.
    """

    path: str
    kind: str
    recipe: str
    stored: str
    shape: tuple[int, ...]
    parameters: int
    bytes: int


@dataclass(frozen=True)
class LeftWeight:
    """A parameter of two or more axes that is not quantized.

    Attributes:
        path: the parameter's path.
        kind: name of its module's class.
        reason: why it is not quantized.
        unasked: whether nobody asked for that: it is multiplied, and neither tied nor left out by filter_fn or recipe.
        stored: its dtype, as text.
        shape: shape of the whole parameter.
        parameters: number of elements.
        bytes: bytes that this rank holds.
    """

    path: str
    kind: str
    reason: str
    unasked: bool
    stored: str
    shape: tuple[int, ...]
    parameters: int
    bytes: int


_HEAD = ("weight", "layer", "recipe", "stored", "parameters", "bytes")


@dataclass(frozen=True)
class Summary:
    """The result of `summary`; prints as a table, with layers that differ only in a number in one row.

    Attributes:
        layers: the quantized weights.
        left: all other parameters of two or more axes.
        others: number of parameters in vectors (norms and biases, including experts').
        other_bytes: their bytes.
        originals: bytes of values kept on the CPU until an optimizer takes them (`keep_init`).
        states: bytes of an optimizer's state for the model's parameters, by entry: masters, moments.
        buffers: bytes of buffers: amax histories and scales of delayed scaling, random keys, and other modules' buffers.
        memory: where each byte is, if an optimizer or a batch was given: the storages of parameters, originals, optimizer
            state, gradients, buffers and what a forward keeps, each once.
    """

    layers: tuple[QuantizedWeight, ...]
    left: tuple[LeftWeight, ...]
    others: int
    other_bytes: int
    originals: int = 0
    states: tuple[tuple[str, int], ...] = ()
    buffers: int = 0
    memory: tuple[MemoryRow, ...] = ()

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model; a shared one counts once."""
        return self.quantized + sum(left.parameters for left in self.left) + self.others

    @property
    def bytes(self) -> int:
        """Bytes of all parameters that this rank holds."""
        return sum(one.bytes for one in (*self.layers, *self.left)) + self.other_bytes

    @property
    def held(self) -> int:
        """Bytes that this rank holds between steps: parameters, buffers, originals and optimizer state, without gradients."""
        return self.bytes + self.buffers + self.originals + sum(size for _, size in self.states)

    @property
    def quantized(self) -> int:
        """Number of quantized parameters."""
        return sum(one.parameters for one in self.layers)

    @property
    def in_matrices(self) -> int:
        """Number of parameters in matrices that are multiplied: all with two or more axes, except embeddings."""
        return self.quantized + sum(left.parameters for left in self.left if left.reason != EMBEDDING)

    @property
    def unasked(self) -> int:
        """Number of parameters in high precision although nobody asked for it."""
        return sum(left.parameters for left in self.left if left.unasked)

    @property
    def share(self) -> float:
        """Quantized share of the parameters in matrices, 0 to 1."""
        return self.quantized / self.in_matrices if self.in_matrices else 0.0

    def _rows_and_notes(self) -> tuple[list[tuple[str, ...]], list[str]]:
        """Returns the rows of the table, and the lines under it."""
        rows: list[tuple[str, ...]] = []
        for path, count, alike in _together(self.layers, lambda one: (one.kind, one.recipe, one.stored, one.shape)):
            first = alike[0]
            totals = (_number(sum(one.parameters for one in alike)), _number(sum(one.bytes for one in alike)))
            rows.append((_times(path, count), first.kind, first.recipe, first.stored, *totals))
        notes = []
        for path, count, alike in _together(self.left, lambda one: (one.kind, one.reason, one.stored, one.shape)):
            first = alike[0]
            totals = (_number(sum(one.parameters for one in alike)), _number(sum(one.bytes for one in alike)))
            rows.append((_times(path, count), first.kind, "left", first.stored, *totals))
            notes.append(f"left: {path} {list(first.shape)}: {first.reason}")
        rows.append(("vectors", "", "", "", _number(self.others), _number(self.other_bytes)))
        rows.append(("total", "", "", "", _number(self.parameters), _number(self.bytes)))
        quantized = f"quantized: {_number(self.quantized)} of {_number(self.in_matrices)} parameters in matrices"
        waiting = f"originals on the CPU, until an optimizer takes them: {_number(self.originals)} bytes"
        kept = [waiting] if self.originals else []
        if self.states:
            each = ", ".join(f"{name} {_number(size)}" for name, size in self.states)
            kept.append(f"optimizer: {each}; {_number(sum(size for _, size in self.states))} bytes")
        if self.held > self.bytes:
            kept.append(f"between steps: {_number(self.held)} bytes, buffers' {_number(self.buffers)} among them")
        if self.memory:
            kept += _memory_table(self.memory)
        return rows, [f"{quantized} ({self.share:.1%}; embeddings aside)", *kept, *notes]

    def __str__(self) -> str:
        rows, notes = self._rows_and_notes()
        rule = tuple("-" * max(map(len, column)) for column in zip(_HEAD, *rows, strict=True))
        lines = [line.rstrip() for line in notebook.columns((_HEAD, rule, *rows), 4)]
        return "\n".join([*lines, *notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows, notes = self._rows_and_notes()
        return notebook.table(rows, _HEAD, notes)


def summary(model: nn.Module, optimizer: Optimizer | Iterable[Optimizer] | None = None, *, batch: Any = None) -> Summary:
    """Counts a model's quantized and other weights, with reasons; before or after `convert`, sharded or not, on meta too.

    Args:
        model: any module.
        optimizer: optimizer whose state for the model's parameters is counted, as far as this rank holds it: any torch
            optimizer, or several in a list or in torchtitan's container. It has no state before its first step.
        batch: what the model is called with: a tensor, several in a sequence, or keyword arguments in a mapping. One forward
            then measures what is kept for the backward, in the model's mode; buffers and random states are put back. Every
            rank must do it. Call it between backward and step to see the gradients too.

    Raises:
        TypeError: model is not a module, or optimizer not an optimizer.

    Example:
        >>> print(summary(convert(model, "mxfp8")))
        >>> summary(model).share
        >>> print(summary(model, optimizer, batch=x))  # where the memory goes
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    optimizers = [] if optimizer is None else optimizers_in(optimizer)
    named, routers = tied_elsewhere(model), router_modules(model)
    owners: dict[Tensor, list[tuple[str, nn.Module]]] = {}
    for path, module in named_modules(model):
        for name, param in module.named_parameters(recurse=False):
            owners.setdefault(param, []).append((f"{path}.{name}".lstrip("."), module))
    layers, left, others, other_bytes = [], [], 0, 0
    for param, where in owners.items():
        path, module = where[0]
        sizes = ((), 0, 0) if is_lazy(param) else (tuple(param.shape), param.numel(), nbytes(param))
        if path.rpartition(".")[2] in quantized_names(module) and _recipe(module).weight.format is not None:
            layer = path if isinstance(module, Experts) else path.removesuffix("weight").rstrip(".")
            layers.append(QuantizedWeight(layer, type(module).__name__, str(_recipe(module)), _stored(param), *sizes))
        elif sum(length > 1 for length in sizes[0]) < 2 or path.rpartition(".")[2] in bias_names(module):
            others, other_bytes = others + sizes[1], other_bytes + sizes[2]
        else:
            reason, unasked = (ROUTER, False) if module in routers else _reason(param, where, named)
            left.append(LeftWeight(path, type(module).__name__, reason, unasked, _stored(param), *sizes))
    local = [sharding.local_of(param) for param in owners if not is_lazy(param)]
    originals = sum(one.initial.nbytes for one in local if isinstance(one, QuantizedTensor) and one.initial is not None)
    states: dict[str, int] = {}
    for param in owners:
        for name, kept in state_of(optimizers, param).items():
            if isinstance(kept, Tensor):
                states[name] = states.get(name, 0) + nbytes(kept)
    buffers = sum(nbytes(buffer) for buffer in model.buffers())
    memory = () if optimizer is None and batch is None else memory_of(model, optimizers, batch)
    return Summary(tuple(layers), tuple(left), others, other_bytes, originals, tuple(states.items()), buffers, memory)


def _memory_table(memory: tuple[MemoryRow, ...]) -> list[str]:
    devices = dict.fromkeys(row.device for row in memory)
    totals = [("total", device, sum(row.bytes for row in memory if row.device == device)) for device in devices]
    rows = [(holds, device, _number(size)) for holds, device, size in (*memory, *totals)]
    return notebook.columns((("memory", "device", "bytes"), *rows), 2)


def tied_elsewhere(model: nn.Module) -> dict[str, str]:
    """Maps parameters that a transformers model declares as tied to the names of the parameters they are or will be tied to."""
    found: dict[str, str] = {}
    for path, module in named_modules(model):
        declared = getattr(module, "all_tied_weights_keys", None)
        if isinstance(declared, dict):
            before = f"{path}." if path else ""
            found |= {f"{before}{target}": f"{before}{source}" for target, source in declared.items()}
    return found


def _reason(param: Tensor, where: list[tuple[str, nn.Module]], named: dict[str, str]) -> tuple[str, bool]:
    path, module = where[0]
    others = [other for other, _ in where[1:]] or [named.get(path, "")]
    if len({type(owner) for _, owner in where}) > 1 or path in named:
        return f"{', '.join(others)} shares it, and quantizing it would untie them", False
    if quantized_names(module):
        return "its recipe keeps weights in high precision", False
    if parametrize.is_parametrized(module) or ".parametrizations." in f".{path}":
        return "a parametrization computes the weight of it", False
    kind = base_kind(module)
    if kind is None:
        reason = why_not(module, param)
        return reason, reason != EMBEDDING
    if path.rpartition(".")[2] not in weight_names(kind, module):
        return f"it is not the weight that a {type(module).__name__} multiplies with", False
    return "filter_fn or recipe left it, or it came after convert", False


def _recipe(module: Any) -> Recipe:
    return module.recipe


def _stored(param: Tensor) -> str:
    local = sharding.local_of(param)
    return str(local.format) if isinstance(local, QuantizedTensor) else str(local.dtype).removeprefix("torch.")


def nbytes(param: Tensor) -> int:
    """Returns the bytes that this rank holds of a parameter: codes and scales, or values."""
    local = sharding.local_of(param)
    if not isinstance(local, QuantizedTensor):
        return local.numel() * local.element_size()
    parts = (local.codes, local.scales, local.tensor_scale)
    return sum(part.numel() * part.element_size() for part in parts if part is not None)


def _together(rows: Iterable, alike: Callable) -> list[tuple[str, int, list]]:
    """Groups rows whose paths differ only in numbers: (path with *, count, rows), in order of appearance."""
    found: dict = {}
    for row in rows:
        found.setdefault((re.sub(_NUMBER, "*", row.path), alike(row)), []).append(row)
    return [(_common([row.path for row in same]), len(same), same) for same in found.values()]


_NUMBER = r"(?<![^.])\d+(?![^.])"


def _common(paths: list[str]) -> str:
    steps = [set(step) for step in zip(*(path.split(".") for path in paths), strict=True)]
    return ".".join(step.pop() if len(step) == 1 else "*" for step in steps)


def _times(path: str, count: int) -> str:
    return f"{path} ({count} times)" if count > 1 else path


def _number(value: int) -> str:
    return f"{value:,}"
