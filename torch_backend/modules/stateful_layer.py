"""`StatefulLayer`: a recipe whose state is kept in buffers that survive casts, moves and copies of the module."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from functools import wraps
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from blockfp import recipes
from blockfp.files.names import LAYER_BUFFERS
from blockfp.recipes import Compute, Recipe, RecipeName

from ..distributed_internals import local_tensor
from ..linear.delayed import update_layers
from ..linear.joint import part_all
from ..linear.linear import LinearState
from ..linear.scale_watch import RecipeLayer, note_sharded, unwatch, watch
from ..linear.tensor_parallel.parallel import Parallel
from ..quantized_tensor import agreement, sharding
from ..quantized_tensor.quantize import copied_key, data_rank, random_key
from ..torch_internals import mark_static_address
from ..weights.cast_weight import CastWeight


class StatefulLayer(RecipeLayer):
    """The products of one weight by a recipe, and the recipe's state in buffers.

    Attributes:
        recipe: the `Recipe`.
        compute: "quantized", or "high_precision", which multiplies with the dequantized weight and casts nothing else.
        parallel: how a tensor-parallel group shares the layer, from `parallelize`; or None.
        known_scale: the input's scale if `has_scales`; any other tensor isn't known to be above 0.
        stateful: whether the recipe keeps state in buffers.
        data_rank: this rank's index in the mesh of `fully_shard`, if the layer draws random bits; else 0.
        keyed_by_unit: whether `rng_key` belongs to a unit of the batch (`Reproducible`), so that no rank is folded in.
    """

    compute: Compute
    keyed_by_unit = False

    def __init__(self, recipe: Recipe | RecipeName, compute: Compute):
        # Skips torch.nn.Linear.__init__, which would allocate parameters.
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
        # Recomputed: a pickle of another version may lack it.
        self.linear_recipe = recipes.for_linear(self.recipe, self.compute)
        self.recorded, self.written = False, [False]
        self.joint, self.apart = None, False
        self.look_for_scales()
        self.announce()
        if self._stochastic:
            note_copied(self)

    def announce(self) -> None:
        """Registers a new, copied or unpickled layer for updates of its state."""
        self.stateful = self.linear_recipe.delayed is not None or self._stochastic
        if self.linear_recipe.delayed is not None:
            watch(self)
        if self.stateful:
            keep_state()

    @property
    def _stochastic(self) -> bool:
        return self.linear_recipe.gradient.stochastic or self.linear_recipe.gradient_columnwise.stochastic

    def note_weight(self, weight: Any) -> None:
        """Records a weight set on the layer, which FSDP2 does every step, sharded and gathered.

        Only a sharded weight tells the mesh; a gathered one may be plain. Layers without state return early.
        """
        mesh = sharding.mesh_of(weight) if self.stateful else None
        if mesh is not None and self.linear_recipe.delayed is not None:
            note_sharded(self, weight)
            local = local_tensor(weight)
            if type(local) is CastWeight:
                self.written = local._noted
        if mesh is not None and self._buffers.get("rng_key") is not None:
            # The last axis is tensor parallelism's, if any; alone it doesn't divide the batch.
            axes = mesh.ndim - (self.parallel is not None)
            if axes:
                self.data_rank = sharding.leading_rank(mesh, axes)

    def set_buffers(self, device: torch.device) -> None:
        """Creates the buffers that the recipe needs."""
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
        """Switches to another recipe without touching the weight; equal delayed scaling, the random key and step are kept.

        Other state is reset. A new random key depends only on the path, since ranks' generators may differ in the middle of a
        run.
        """
        before, after = self.linear_recipe, recipes.for_linear(recipe, self.compute)
        kept = {name: self._buffers.get(name) for name in chain(*LAYER_BUFFERS)}
        if (before.delayed, _elements(before)) != (after.delayed, _elements(after)):
            kept = {name: kept[name] for name in ("rng_key", "step")}
        if self.joint is not None:
            self.joint.dissolve()
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
                # Amaxes, scales and keys keep their dtypes whatever the layer is cast to.
                self._buffers[name] = before.to(after.device)
        if any(before is not None and before.is_meta and not self._buffers[name].is_meta for name, before in state):  # pyright: ignore
            # Other libraries' initializers only fill parameters.
            self.reset_buffers()
        # The buffers may be new tensors.
        self.mark_buffers()
        self.note_scales(self.has_scales)
        return self

    def mark_buffers(self) -> None:
        """Marks the buffers' addresses as fixed for compilers, which assume so for modules, but not for FSDP2's.

        Otherwise a CUDA graph would write into copies.
        """
        for buffer in self.buffers(recurse=False):
            mark_static_address(buffer)

    def state(self, *, alone: bool = True) -> LinearState:
        """Returns the buffers as `linear` takes them, for a call together with the layers of its joint or `alone`."""
        # Attribute access costs a Python call per buffer.
        buffers: Any = self._buffers
        delayed = buffers["input_scale"] is not None
        compiled = delayed and torch.compiler.is_compiling()
        if compiled:
            part_all()
        elif delayed:
            if alone and self.joint is not None and torch.is_grad_enabled():
                self.joint.part()
            own: Any = self._parameters
            weight = own["weight"] if "weight" in own else self.held_weight()
            written = weight._noted if type(weight) is CastWeight else self.written
            if written[0] and torch.is_grad_enabled():
                if self.recorded:
                    # Written without a torch optimizer, whose step hook would have updated the scales.
                    update_layers([self])
                written[0] = False
            if not self.recorded:
                # Bypasses torch's __setattr__, which first searches modules, parameters and buffers.
                self.__dict__["recorded"] = torch.is_grad_enabled()
        key = buffers["rng_key"]
        rank = 0 if key is None or self.keyed_by_unit else data_rank(self.data_rank)
        history, gradient_history = buffers["input_amax_history"], buffers["gradient_amax_history"]
        scale, gradient_scale = buffers["input_scale"], buffers["gradient_scale"]
        # A compiler's guard on `joint`, which is None by now, makes it come back for layers that eager code joins later.
        known = delayed and (self.joint is None and self.has_scales if compiled else scale is self.known_scale)
        return LinearState(history, scale, gradient_history, gradient_scale, key, buffers["step"], rank, self.observed, known)

    def note_updated(self) -> None:
        own: Any = self._parameters
        weight = own["weight"] if "weight" in own else self.held_weight()
        (weight._noted if type(weight) is CastWeight else self.written)[0] = False
        self.__dict__["recorded"] = False

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        # So that a later write to the weight doesn't count as a step.
        self.recorded = False
        self.look_for_scales()

    def look_for_scales(self) -> None:
        """Checks whether loaded scales are above 0, which waits for a GPU."""
        operands = zip(("input", "gradient"), _elements(self.linear_recipe), strict=True)
        scales = [self._buffers.get(f"{operand}_scale") for operand, element in operands if element is not None]
        self.note_scales(all(type(scale) is Tensor and not scale.is_meta and bool(scale > 0) for scale in scales))

    def note_scales(self, found: bool) -> None:
        # Calls with other buffers (torch.func.functional_call) have other scales. Set in __dict__ so that it is not registered
        # as state.
        own: dict[str, Any] = self.__dict__
        own["has_scales"], own["known_scale"] = found, self._buffers["input_scale"] if found else None

    def reset_buffers(self) -> None:
        """Resets delayed scaling and the step, and draws a new random key, which FSDP2 shares in its next gather."""
        for buffer in (self.input_amax_history, self.gradient_amax_history, self.step):
            if buffer is not None:
                buffer.zero_()
        for buffer in (self.input_scale, self.gradient_scale):
            if buffer is not None:
                buffer.zero_()
        self.note_scales(False)
        if self.rng_key is not None and not self.rng_key.is_meta:
            self.rng_key.copy_(random_key())
            agreement.renew_key(self)


def _elements(recipe: Recipe) -> list[Any]:
    """Returns the element types of inputs and gradients, for which delayed scales are kept."""
    formats = [recipe.cast(operand).format or recipe.cast(operand, "columnwise").format for operand in ("input", "gradient")]
    return [None if format is None else format.element for format in formats]


# ---- keys of copied layers


_listening: list[Any] = []


def note_copied(layer: RecipeLayer) -> None:
    """Marks a layer with a random key as a copy; from now on module registrations are checked."""
    vars(layer)["copied"] = True
    if not _listening:
        _listening.append(register_module_module_registration_hook(_part_keys))


def _part_keys(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Gives the layers of a newly registered module other keys if its parent has layers with the same ones."""
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
    """Returns the layers in a module that have a random key, with their keys."""
    layers = (layer for layer in module.modules() if isinstance(layer, RecipeLayer))
    found = {layer: layer._buffers.get("rng_key") for layer in layers}
    return {layer: key for layer, key in found.items() if type(key) is Tensor and not key.is_meta}


# ---- pipelines

_METHOD = "_initialize_pp_stages"


def keep_state() -> None:
    """Patches schedules to restore layers' state after inferring shapes; called when a stateful layer is made.

    To learn the shapes that stages exchange, torch's schedules (2.13) run every stage once, forward and backward, on
    uninitialized memory. They restore torch's random states, but not layers' buffers. No public hook exists;
    `tests/torch/test_parallel_gloo.py` fails if torch changes the method.
    """
    if not torch.distributed.is_available():
        return
    from torch.distributed.pipelining import schedules

    schedule: Any = schedules._PipelineSchedule
    infer = getattr(schedule, _METHOD, None)
    if infer is None or hasattr(infer, "keeps_state"):
        return

    @wraps(infer)
    def infer_and_put_back(self: Any, stages: Any, *args: Any, **kwargs: Any) -> Any:
        before = [(tensor, tensor.clone()) for stage in stages for tensor in _state(stage.submod)]
        try:
            return infer(self, stages, *args, **kwargs)
        finally:
            for tensor, value in before:
                tensor.copy_(value)

    infer_and_put_back.keeps_state = True  # pyright: ignore[reportAttributeAccessIssue]
    setattr(schedule, _METHOD, infer_and_put_back)


def _state(model: nn.Module) -> list[Tensor]:
    names = (*chain(*LAYER_BUFFERS), "observed")
    found = [getattr(module, name) for module in model.modules() if isinstance(module, RecipeLayer) for name in names]
    return [tensor for tensor in found if tensor is not None]
