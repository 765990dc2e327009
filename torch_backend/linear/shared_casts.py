"""Shares the casts of an input among a module's layers that read it, such as query, key and value projections.

A tensor can't tell whether it was modified: collectives, `.data`, NumPy, DLPack and foreign kernels write without changing its
version. So casts are shared only during a forward that is known not to write between the layers (`modules.layer_calls`).

With delayed scaling a cast also depends on the layer's amax history of its inputs. Layers that always read the same inputs have
equal ones, and share casts while they do (`Joint`).

This is for eager code; compilers find equal casts themselves.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.layer.linear_ops import Casts
from ..torch_internals import StopsRecomputation
from ..weights.cast_weight import CastWeight
from .delayed import update_layers
from .joint import Joint
from .scale_watch import RecipeLayer


class SharedCasts:
    """Within `with`, lets layers share the casts of an input.

    Attributes:
        layers: may read the same tensor `input`; `left` of them haven't yet. All is dropped after the last.
        input, casts: the tensor, and its casts by layers without delayed scaling.
        joint, joint_casts: those with delayed scaling, if their scales are equal, and their casts.
        recorded: those that recorded the input's amax.
        used: the last `joint`.
        outer: the enclosing `SharedCasts`.
    """

    __slots__ = ("casts", "input", "joint", "joint_casts", "layers", "left", "outer", "recorded", "used")

    def __init__(self, layers: Sequence[RecipeLayer]):
        self.layers, self.left = layers, 0
        self.input: Tensor | None = None
        self.casts: Casts = {}
        self.joint: Joint | None = None
        self.joint_casts: Casts = {}
        self.recorded: list[RecipeLayer] = []
        self.used: Joint | None = None
        self.outer: SharedCasts | None = None

    def __enter__(self) -> None:
        self.outer, running.casts = running.casts, self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        running.casts = self.outer
        if self.used is None:
            return
        self._end()
        if error is not None and not issubclass(error, StopsRecomputation):
            # The last layer may have failed before it recorded.
            self.used.doubt()

    def of(self, layer: RecipeLayer, x: Tensor) -> Casts | None:
        """Returns the casts of x that a layer shares, to be used and added to; None if the layer isn't among `layers`."""
        if layer not in self.layers:
            return None
        if self.input is not x:
            if self.input is not None:
                self._end()
            self.input, self.left = x, len(self.layers)
        casts = self.casts
        if layer.linear_recipe.delayed is not None:
            if self.joint is None:
                self.joint = self.used = _joint_of(self.layers)
            # Casts of its own if the layers' scales differ.
            casts = {} if self.joint is None else self.joint_casts
            if self.joint is not None and torch.is_grad_enabled() and layer not in self.recorded:
                self.recorded.append(layer)
        self.left -= 1
        if self.left == 0:
            self._end()
        return casts

    def _end(self) -> None:
        """Drops the input and its casts."""
        if self.joint is not None:
            if 0 < len(self.recorded) < len(self.joint.members):
                self.joint.doubt()
            self.joint, self.joint_casts, self.recorded = None, {}, []
        self.input, self.casts = None, {}


class _Running(threading.local):
    casts: SharedCasts | None = None


running = _Running()
"""`casts` is this thread's innermost active `SharedCasts`, or None."""


def _joint_of(layers: Sequence[RecipeLayer]) -> Joint | None:
    """Returns the joint of all layers with delayed scaling; None if their scales differ, or nobody knows."""
    members: list[Any] = []
    waiting, joints = [], set()
    for layer in layers:
        if layer.linear_recipe.delayed is not None:
            if layer.apart:
                return None
            members.append(layer)
            joints.add(layer.joint)
            weight = layer._parameters.get("weight")
            written = weight._noted if type(weight) is CastWeight else layer.written
            if written[0]:
                waiting.append((layer, written))
    joint: Joint | None = members[0].joint
    if joint is None or len(joints) > 1 or list(map(operator.call, joint.members)) != members:
        joint = _new_joint(members)
    if joint is None:
        return None
    if waiting and torch.is_grad_enabled():
        _catch_up(joint, members, waiting)
    return joint if joint.unchanged() or joint.compare() else None


def _new_joint(members: list[RecipeLayer]) -> Joint | None:
    for layer in members:
        if layer.joint is not None:
            layer.joint.dissolve()
    recipes = {id(layer.linear_recipe) for layer in members}
    return Joint(members) if len(members) > 1 and len(recipes) == 1 else None


def _catch_up(joint: Joint, members: list[RecipeLayer], waiting: list[tuple[RecipeLayer, list[bool]]]) -> None:
    """Updates the layers whose weight was written without a torch optimizer, before any of them casts the next input."""
    equal = len(waiting) == len(members) and joint.unchanged()
    for layer, written in waiting:
        if layer.recorded:
            # One by one, as each of them would do it at its own call.
            update_layers([layer])
        written[0] = False
    if equal:
        joint.note()
