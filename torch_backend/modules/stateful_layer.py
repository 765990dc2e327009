"""`StatefulLayer`: a recipe, and its state in buffers, which no cast, move or copy of a module spoils."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from blockfp import recipes
from blockfp.files.names import LAYER_BUFFERS
from blockfp.recipes import Compute, Recipe

from ..linear.delayed import update_layers
from ..linear.linear import LinearState
from ..linear.parallel import Parallel
from ..linear.pipelines import keep_state
from ..linear.recipe_layer import RecipeLayer
from ..linear.scale_watch import note_sharded, unwatch, watch
from ..quantized_tensor import sharding
from ..quantized_tensor.quantize import copied_key, data_rank, random_key
from ..torch_internals import local_tensor, mark_static_address
from ..weights.cast_weight import CastWeight


class StatefulLayer(RecipeLayer):
    """The products of one weight by a recipe, and the recipe's state in buffers.

    Attributes:
        recipe: the `Recipe`.
        compute: "quantized", or "high_precision": products take the dequantized weight and everything else as it is.
        parallel: how a tensor-parallel group shares the layer, from `parallelize`; or None.
        known_scale: the input's scale where `has_scales`; a scale that is another tensor isn't known to be above 0.
        stateful: whether the recipe keeps state in buffers.
        data_rank: this rank's number in the mesh that `fully_shard` got, of a layer that draws random bits; otherwise 0.
        written: whether a weight that FSDP2 shards was written in place since the layer last looked (`CastWeight`).
        keyed_by_unit: whether `rng_key` is that of a unit of the batch (`Reproducible`), into which no rank is folded.
    """

    compute: Compute
    keyed_by_unit = False

    def __init__(self, recipe: Recipe | str, compute: Compute):
        # Not what the next class would do: torch.nn.Linear, where a layer is one, makes parameters of its own.
        nn.Module.__init__(self)
        self.recipe = recipes.parse(recipe)
        self.linear_recipe = recipes.for_linear(self.recipe, compute)
        self.compute = compute
        self.observed = None
        self.parallel: Parallel | None = None
        self.data_rank = 0
        self.recorded, self.written, self.has_scales = False, [False], False
        self.known_scale: Tensor | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Worked out again, not read: a pickle of another version may lack it.
        self.linear_recipe = recipes.for_linear(self.recipe, self.compute)
        self.recorded, self.written = False, [False]
        self.look_for_scales()
        self.announce()
        if self._stochastic:
            note_copied(self)

    def announce(self) -> None:
        """Registers a layer that was made, copied or unpickled with those that look after its state."""
        self.stateful = self.linear_recipe.delayed is not None or self._stochastic
        if self.linear_recipe.delayed is not None:
            watch(self)
        if self.stateful:
            keep_state()

    @property
    def _stochastic(self) -> bool:
        return self.linear_recipe.gradient.stochastic or self.linear_recipe.gradient_columnwise.stochastic

    def note_weight(self, weight: Any) -> None:
        """Takes note of a weight that is put into the layer: FSDP2 does it, sharded and gathered.

        A gathered one may be plain, and know nothing of a mesh. It does it every step: layers without state don't ask.
        """
        mesh = sharding.mesh_of(weight) if self.stateful else None
        if mesh is not None and self.linear_recipe.delayed is not None:
            note_sharded(self, weight)
            local = local_tensor(weight)
            if type(local) is CastWeight:
                self.written = local._noted
        if mesh is not None and self._buffers.get("rng_key") is not None:
            # The last axis is tensor parallelism's, if there is any; alone it says nothing of the batch.
            axes = mesh.ndim - (self.parallel is not None)
            if axes:
                self.data_rank = sharding.leading_rank(mesh, axes)

    def set_buffers(self, device: torch.device) -> None:
        """Makes the buffers that the recipe needs."""
        delayed, stochastic = self.linear_recipe.delayed, self._stochastic
        for operand in ("input", "gradient"):
            history = None if delayed is None else torch.zeros(delayed.history, dtype=torch.float32, device=device)
            self.register_buffer(f"{operand}_amax_history", history)
            scale = None if delayed is None else torch.zeros((), dtype=torch.float32, device=device)
            self.register_buffer(f"{operand}_scale", scale)
        self.register_buffer("rng_key", torch.zeros(2, dtype=torch.int64, device=device) if stochastic else None)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64, device=device) if stochastic else None)
        self.mark_buffers()

    def change_recipe(self, recipe: Recipe, device: torch.device, path: str) -> None:
        """Goes on by another recipe. State that means the same by both stays: equal delayed scaling, the random key and step.

        Any other begins anew. A new random key follows from the path alone, so that it is the same on every rank, whose
        generators may be anywhere in the middle of a run. The weight is not touched.
        """
        before, after = self.linear_recipe, recipes.for_linear(recipe, self.compute)
        kept = {name: self._buffers.get(name) for name in chain(*LAYER_BUFFERS)}
        if (before.delayed, _elements(before)) != (after.delayed, _elements(after)):
            kept = {name: kept[name] for name in ("rng_key", "step")}
        self.recipe, self.linear_recipe = recipe, after
        self.set_buffers(device)
        for name, buffer in kept.items():
            if buffer is not None and self._buffers[name] is not None:
                self._buffers[name] = buffer
        if self.rng_key is not None and self.rng_key is not kept["rng_key"]:
            self.rng_key.copy_(random_key(torch.Generator().manual_seed(zlib.crc32(path.encode()))))
        if before.delayed is not None and after.delayed is None:
            unwatch(self)
        if before.delayed is None or after.delayed is None:
            self.announce()
        self.recorded = False
        self.look_for_scales()
        self.note_weight(self.held_weight())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        state = [(name, self._buffers[name]) for name in chain(*LAYER_BUFFERS)]
        super()._apply(fn, recurse)
        for name, before in state:
            after = self._buffers[name]
            if before is not None and after is not None and before.dtype != after.dtype:
                # Amaxes, scales and keys are of the recipe's dtypes, whatever the layer is cast to.
                self._buffers[name] = before.to(after.device)
        if any(before is not None and before.is_meta and not self._buffers[name].is_meta for name, before in state):  # pyright: ignore
            # Memory that nobody else may write into: initializers of other libraries know parameters alone.
            self.reset_buffers()
        # Others may be in their place now.
        self.mark_buffers()
        self.note_scales(self.has_scales)
        return self

    def mark_buffers(self) -> None:
        """Tells compilers that buffers stay where they are, which they take for granted in modules, but not in FSDP2's.

        A CUDA graph would write into copies of them otherwise.
        """
        for buffer in self.buffers(recurse=False):
            mark_static_address(buffer)

    def state(self) -> LinearState:
        """Returns the buffers as `linear` takes them."""
        # An attribute of a module that is a buffer costs a Python call each.
        buffers: Any = self._buffers
        delayed = buffers["input_scale"] is not None
        compiled = delayed and torch.compiler.is_compiling()
        if delayed and not compiled:
            own: Any = self._parameters
            weight = own["weight"] if "weight" in own else self.held_weight()
            written = weight._noted if type(weight) is CastWeight else self.written
            if written[0] and torch.is_grad_enabled():
                if self.recorded:
                    # By a step of no torch optimizer: the hook behind those takes note of it.
                    update_layers([self])
                written[0] = False
            if not self.recorded:
                # torch's own __setattr__ looks for a module, parameter or buffer first.
                self.__dict__["recorded"] = torch.is_grad_enabled()
        key = buffers["rng_key"]
        rank = 0 if key is None or self.keyed_by_unit else data_rank(self.data_rank)
        history, gradient_history = buffers["input_amax_history"], buffers["gradient_amax_history"]
        scale, gradient_scale = buffers["input_scale"], buffers["gradient_scale"]
        known = delayed and (self.has_scales if compiled else scale is self.known_scale)
        return LinearState(history, scale, gradient_history, gradient_scale, key, buffers["step"], rank, self.observed, known)

    def note_updated(self) -> None:
        own: Any = self._parameters
        weight = own["weight"] if "weight" in own else self.held_weight()
        (weight._noted if type(weight) is CastWeight else self.written)[0] = False
        self.__dict__["recorded"] = False

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        # To write a weight is no step then.
        self.recorded = False
        self.look_for_scales()

    def look_for_scales(self) -> None:
        """Looks at scales that come from elsewhere: whether they are above 0; waits for a GPU."""
        operands = zip(("input", "gradient"), _elements(self.linear_recipe), strict=True)
        scales = [self._buffers.get(f"{operand}_scale") for operand, element in operands if element is not None]
        self.note_scales(all(type(scale) is Tensor and not scale.is_meta and bool(scale > 0) for scale in scales))

    def note_scales(self, found: bool) -> None:
        # A function that is called with other buffers (torch.func.functional_call) has other scales. Not registered: no state.
        own: dict[str, Any] = self.__dict__
        own["has_scales"], own["known_scale"] = found, self._buffers["input_scale"] if found else None

    def reset_buffers(self) -> None:
        """Sets delayed scaling and the step to their start, and draws a new random key."""
        for buffer in (self.input_amax_history, self.gradient_amax_history, self.step):
            if buffer is not None:
                buffer.zero_()
        for buffer in (self.input_scale, self.gradient_scale):
            if buffer is not None:
                buffer.zero_()
        self.note_scales(False)
        if self.rng_key is not None and not self.rng_key.is_meta:
            self.rng_key.copy_(random_key())


def _elements(recipe: Recipe) -> list[Any]:
    """Returns the elements of inputs and gradients, which delayed scales are for."""
    formats = [recipe.cast(operand).format or recipe.cast(operand, "columnwise").format for operand in ("input", "gradient")]
    return [None if format is None else format.element for format in formats]


# ---- keys of copied layers


_listening: list[Any] = []


def note_copied(layer: RecipeLayer) -> None:
    """Notes that a layer with a random key is a copy; from then on modules are looked at where they are registered."""
    vars(layer)["copied"] = True
    if not _listening:
        _listening.append(register_module_module_registration_hook(_part_keys))


def _part_keys(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Gives layers of a module that is registered other keys where its parent has layers with theirs."""
    new = _keyed(module) if isinstance(module, nn.Module) else {}
    if not new:
        return
    beside = {layer: key for layer, key in _keyed(parent).items() if layer not in new}
    if not any("copied" in vars(layer) for layer in (*new, *beside)):
        return
    taken = {tuple(key.tolist()) for key in beside.values()}
    for key in new.values():
        own = key.clone()
        for number in itertools.count(1):
            if (words := tuple(key.tolist())) not in taken:
                taken.add(words)
                break
            key.copy_(copied_key(own, number))


def _keyed(module: nn.Module) -> dict[RecipeLayer, Tensor]:
    """Returns the layers inside a module that have a random key, with their keys."""
    layers = (layer for layer in module.modules() if isinstance(layer, RecipeLayer))
    found = {layer: layer._buffers.get("rng_key") for layer in layers}
    return {layer: key for layer, key in found.items() if type(key) is Tensor and not key.is_meta}
