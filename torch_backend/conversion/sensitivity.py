"""`sensitivity`: measures the loss of each linear layer under each recipe, one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockfp import patterns
from blockfp import recipes as known
from blockfp.kernels.operand_cast import operand_cast
from blockfp.recipes import Cast, Recipe, RecipeName

from ..linear.linear import linear
from ..modules.experts import Experts
from ..modules.linear import Linear, TransposedLinear
from ..modules.model_names import named_modules
from ..modules.quantized_layer import QuantizedLayer
from ..ops.quantize.operand_ops import FIGURES, quantization_figures, quantize_operand
from ..quantized_tensor import sharding
from ..quantized_tensor.tensor import QuantizedTensor
from ..weights.cast_weight import CastWeight
from .convert import convertible
from .kinds import base_kind
from .sensitivity_table import LayerSensitivity, Sensitivity

Loss = Callable[[nn.Module, Any], Tensor]


@patterns.takes_filter
def sensitivity(
    model: nn.Module,
    batches: Iterable[Any],
    recipes: Sequence[Recipe | RecipeName] = ("mxfp8", "nvfp4"),
    *,
    loss: Loss | None = None,
    filter_fn: Callable[[str, nn.Module], bool] | None = None,
) -> Sensitivity:
    """Measures how each recipe affects each linear layer of a model.

    For each layer and recipe the loss is computed with *that layer alone quantized* and all others in high precision. The SQNRs
    of its input, weight and (with a loss) output gradient are measured in the unquantized model, with the recipe's casts for
    forward and dgrad. Measured layers are `Linear` layers, and those that `convert` would make into one. A quantized weight is
    represented by its original values if kept, else dequantized; codes already in a recipe's format are used directly. Delayed
    scaling is measured with current scales, and stochastic rounding with one fixed key.

    The model runs eagerly in evaluation mode, with torch's generators reset for each batch, so results repeat. Parameters,
    gradients, buffers, hooks, modes and generators are restored afterwards, also on an error.

    The cost is one forward per batch, layer and recipe, plus one forward and backward per batch. Few batches suffice.

    Args:
        model: on one rank, before `fully_shard` and `parallelize`.
        batches: the model's inputs: a tensor, a tuple of arguments, or a dictionary of them; with a loss, what the loss takes.
        recipes: recipes or their names.
        loss: a function of model and batch that returns a scalar. Without one, loss changes and gradients aren't measured.
        filter_fn: as for `convert`; False leaves the layer out, of plans too.

    Returns:
        The table, whose `plan` chooses layers to keep in higher precision.

    Raises:
        TypeError: model is not a module, recipes is not a sequence, or the loss is not a scalar.
        ValueError: there is no batch, no recipe or no linear layer, the model is sharded, or a forward was assigned to a layer.

    Example:
        >>> table = bfp.sensitivity(model, batches, ("nvfp4",), loss=lambda model, batch: model(**batch).loss)
        >>> print(table)
        >>> bfp.convert(model, table.plan("nvfp4", layers=0.15))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(recipes, str | Recipe):
        raise TypeError(f"recipes must be a sequence, as (recipe,), got {type(recipes).__name__}: {str(recipes)!r}")
    taken = [known.parse(recipe) for recipe in recipes]
    if not taken or len({recipe.name for recipe in taken}) < len(taken):
        raise ValueError(f"recipes must be one or more of different names, got {[recipe.name for recipe in taken]}")
    data = list(batches)
    if not data:
        raise ValueError("batches is empty: at least one is needed")
    layers = _layers(model, filter_fn)
    forward = loss if loss is not None else _call
    with _left_as_it_was(model, layers) as begin:
        for layer in layers:
            for recipe in taken:
                layer.add_weight(recipe)
        base = []
        for batch in data:
            begin()
            base.append(_measure(model, batch, forward, layers, taken, backward=loss is not None))
        rows = []
        for layer in layers:
            for recipe in taken:
                changes = []
                if loss is not None:
                    with layer.multiplying_by(recipe):
                        for batch, before in zip(data, base, strict=True):
                            begin()
                            with torch.no_grad():
                                changes.append(_scalar(forward(model, batch)).item() - before)
                change = math.fsum(changes) / len(changes) if changes else None
                rows.append(layer.row(recipe, change))
    left = [path for path, module in named_modules(model) if _is_left(module)]
    mean = None if loss is None else math.fsum(base) / len(base)
    return Sensitivity(tuple(rows), mean, tuple(left), tuple(_excluded(model, filter_fn)))


class _Measured:
    """A layer with its accumulated measurements."""

    def __init__(self, path: str, module: Any):
        self.path, self.module = path, module
        self.transposed = bool(getattr(module, "transposed", base_kind(module) is TransposedLinear))
        weight = module.weight
        local = weight.values if isinstance(weight, CastWeight) else weight
        codes: Any = local.detach() if isinstance(local, QuantizedTensor) else None
        values: Any = local.detach()
        if isinstance(local, QuantizedTensor) and codes is not None:
            values = codes.dequantize() if local.initial is None else local.initial.to(codes.device, codes.dtype)
        self.codes, self.values = codes, values.mT.contiguous() if self.transposed else values
        self.sums: dict[tuple[str, str], Tensor] = {}

    def add(self, recipe: Recipe, operand: str, cast: Cast, x: Tensor) -> None:
        """Accumulates signal and noise of an operand [rows, columns]."""
        if cast.format is None or not x.numel():
            return
        keys = torch.zeros((2, 2), dtype=torch.int32, device=x.device) if cast.stochastic else None
        found = quantize_operand(x, operand_cast(cast, None, recipe.eps if operand != "weight" else 0.0, keyed=True), keys=keys)
        self._add(recipe, operand, quantization_figures(x, found.row, cast.format.name, False, [0, 0]))

    def _add(self, recipe: Recipe, operand: str, figures: Tensor) -> None:
        sums = figures[[FIGURES.index("signal"), FIGURES.index("noise")]]
        where = (operand, recipe.name)
        self.sums[where] = sums + self.sums[where] if where in self.sums else sums

    def weight_of(self, recipe: Recipe) -> Tensor:
        """Returns the weight [out, in] that the recipe multiplies: codes if they are in its format, else values."""
        own = self.codes is not None and self.codes.format is recipe.weight.format and not self.transposed
        return self.codes if own else self.values  # pyright: ignore[reportReturnType]

    def add_weight(self, recipe: Recipe) -> None:
        weight = self.weight_of(recipe)
        if isinstance(weight, QuantizedTensor):
            parts = [weight.codes, weight.scales, *weight.parts[2:]]
            self._add(recipe, "weight", quantization_figures(self.values, parts, str(weight.format), False, [0, 0]))
        else:
            self.add(recipe, "weight", recipe.weight, weight)

    @contextmanager
    def multiplying_by(self, recipe: Recipe) -> Iterator[None]:
        """Quantizes this layer's products within the context."""
        weight, one = self.weight_of(recipe), recipe.replace(delayed=None)
        before = vars(self.module)["forward"]
        vars(self.module)["forward"] = lambda x: linear(x, weight, self.module.bias, recipe=one, key=0)
        try:
            yield
        finally:
            vars(self.module)["forward"] = before

    def in_high_precision(self, x: Tensor) -> Tensor:
        return F.linear(x, self.values, self.module.bias)

    def row(self, recipe: Recipe, change: float | None) -> LayerSensitivity:
        found = {operand: _sqnr(self.sums.get((operand, recipe.name))) for operand in ("input", "weight", "gradient")}
        return LayerSensitivity(self.path, recipe.name, self.values.numel(), **found, loss_change=change)


def _layers(model: nn.Module, filter_fn: Callable[[str, nn.Module], bool] | None) -> list[_Measured]:
    plain = convertible(model, filter_fn)
    quantized = [(path, module) for path, module in named_modules(model) if isinstance(module, Linear | TransposedLinear)]
    taken = {module for (_, module), chosen in zip(quantized, patterns.select(filter_fn, quantized), strict=True) if chosen}
    taken |= {module for module in plain if base_kind(module) in (Linear, TransposedLinear)}
    found = []
    for path, module in named_modules(model):
        if module not in taken:
            continue
        weight: Any = module.weight
        if sharding.mesh_of(weight) is not None or (isinstance(weight, CastWeight) and weight.cut is not None):
            raise ValueError(f"{path!r} is sharded: measure the model before fully_shard and parallelize, on one rank")
        if "forward" in vars(module):
            raise ValueError(
                f"{path!r} has a forward put into it (accelerate's hooks): measure the model before, or leave it out"
            )
        found.append(_Measured(path, module))
    if not found:
        raise ValueError("model holds no linear layer that could be measured, or filter_fn leaves all of them out")
    return found


def _excluded(model: nn.Module, filter_fn: Callable[[str, nn.Module], bool] | None) -> list[str]:
    """Returns the paths of layers that filter_fn leaves out but a plan's last pattern would match."""
    if filter_fn is None:
        return []
    # A plan for a quantized model goes to set_recipe, which sees only quantized layers.
    taken = {module for module in model.modules() if isinstance(module, Experts | QuantizedLayer)} or convertible(model)
    named = [(path, module) for path, module in named_modules(model) if module in taken]
    return [path for (path, _), chosen in zip(named, patterns.select(filter_fn, named), strict=True) if not chosen]


def _is_left(module: nn.Module) -> bool:
    """Returns whether a module is or would be quantized but isn't measured: experts, and layers behind a norm."""
    if isinstance(module, Experts | QuantizedLayer):
        return not isinstance(module, Linear | TransposedLinear)
    kind = base_kind(module)
    return kind is not None and issubclass(kind, Experts)


def _measure(
    model: nn.Module,
    batch: Any,
    forward: Callable[[nn.Module, Any], Any],
    layers: list[_Measured],
    taken: list[Recipe],
    *,
    backward: bool,
) -> float:
    """Runs the unquantized model on a batch, accumulates its operands' figures, and returns the loss, or NaN without one."""
    outputs: list[tuple[_Measured, Any]] = []

    def watched(layer: _Measured) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            rows = x.detach().reshape(-1, x.shape[-1])
            if torch.is_autocast_enabled(x.device.type):
                rows = rows.to(torch.get_autocast_dtype(x.device.type))
            for recipe in taken:
                layer.add(recipe, "input", recipe.input, rows.contiguous())
            if not backward:
                return layer.in_high_precision(x)
            # Frozen weights too, so that every output gets a gradient.
            weight = layer.values.detach().requires_grad_()
            y = F.linear(x, weight, layer.module.bias)
            outputs.append((layer, torch.autograd.graph.get_gradient_edge(y)))
            return y

        return call

    for layer in layers:
        vars(layer.module)["forward"] = watched(layer)
    try:
        with torch.set_grad_enabled(backward):
            value = forward(model, batch)
            if not backward:
                return math.nan
            value = _scalar(value)
            edges = [edge for _, edge in outputs]
            gradients = torch.autograd.grad(value, edges, allow_unused=True) if edges and value.requires_grad else ()
    finally:
        for layer in layers:
            vars(layer.module)["forward"] = layer.in_high_precision
    for (layer, _), gradient in zip(outputs, gradients, strict=bool(gradients)):
        if gradient is not None:
            for recipe in taken:
                layer.add(recipe, "gradient", recipe.gradient, gradient.reshape(-1, gradient.shape[-1]).contiguous())
    return value.item()


@contextmanager
def _left_as_it_was(model: nn.Module, layers: list[_Measured]) -> Iterator[Callable[[], None]]:
    """Yields a function that resets torch's generators before a run; restores the model afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, None if buffer is None or buffer.is_meta else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    generators = [torch.default_generator, *(torch.cuda.default_generators[device] for device in devices)]
    states = [generator.get_state() for generator in generators]
    fast = torch.backends.mha.get_fastpath_enabled()

    def begin() -> None:
        for generator in generators:
            generator.manual_seed(0)

    try:
        for layer in layers:
            vars(layer.module)["forward"] = layer.in_high_precision
        # The encoders' fused paths bypass the layers.
        torch.backends.mha.set_fastpath_enabled(False)
        model.eval()
        with ExitStack() as eager:
            eager.enter_context(torch.compiler.set_stance("force_eager"))
            yield begin
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for layer in layers:
            vars(layer.module).pop("forward", None)
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, buffer, values in buffers:
                module._buffers[name] = buffer
                if buffer is not None and values is not None:
                    buffer.copy_(values)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _scalar(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"loss must return a scalar tensor, got {got}")
    return value.reshape(())


def _sqnr(sums: Tensor | None) -> float | None:
    """Returns 10 log10(signal / noise) in dB; None if nothing was quantized."""
    if sums is None:
        return None
    signal, noise = sums.tolist()
    if not noise:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 and math.isfinite(noise) else math.nan
