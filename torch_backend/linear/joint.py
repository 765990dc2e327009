"""`Joint`: layers with delayed scaling that read the same inputs, so that their histories and scales of these are equal."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_internals import assume_constant_result, dispatch_modes, functorch_is_active, version_of


class Joint:
    """Layers whose histories and scales of their input are equal as long as `unchanged` says so.

    They were compared once, and stay equal while all layers read the same inputs and are updated together. Each layer keeps its
    own buffers, so names, checkpoints and updates know nothing of joints. A write from elsewhere (a loaded checkpoint) replaces
    a buffer or changes its version, and leads to another comparison. Layers that differ once are never compared again.

    Attributes:
        members: weak references to the layers.
        known: each layer's history and scale with their versions, when they were last known to be equal; empty if they aren't.
    """

    __slots__ = ("__weakref__", "known", "members")

    def __init__(self, layers: Sequence[nn.Module]):
        self.members = tuple(map(weakref.ref, layers))
        self.known: list[tuple[Tensor, int, Tensor, int]] = []
        for layer in layers:
            vars(layer)["joint"] = self
        _joints.add(self)

    def __reduce__(self) -> Any:
        # Copies and pickles of layers are compared anew.
        return type(None), ()

    def unchanged(self) -> bool:
        """Returns whether nothing was written into the layers' buffers since `note`, except by kernels that record amaxes."""
        for member, (history, recorded, scale, updated) in zip(self.members, self.known, strict=False):
            layer: Any = member()
            buffers = {} if layer is None else layer._buffers
            if buffers.get("input_amax_history") is not history or buffers.get("input_scale") is not scale:
                return False
            if version_of(history) != recorded or version_of(scale) != updated:
                return False
        return bool(self.known)

    def compare(self) -> bool:
        """Compares the layers' histories and scales, and returns whether they are equal. This waits for a GPU.

        Parts the layers if they differ. False where they can't be compared now: in a CUDA graph's capture, in transforms, and
        without memory.
        """
        self.doubt()
        states = [_state(member()) for member in self.members]
        if functorch_is_active() or dispatch_modes() or any(map(_without_values, (one for state in states for one in state))):
            return False
        if states[0][0].is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        alike = len({buffer.device for state in states for buffer in state}) == 1
        if alike and all(torch.equal(a, b) for state in states[1:] for a, b in zip(state, states[0], strict=True)):
            self.note()
            return True
        self.part()
        return False

    def note(self) -> None:
        """Notes the layers' buffers, which are equal now."""
        states = [_state(member()) for member in self.members]
        self.known = [(history, version_of(history), scale, version_of(scale)) for history, scale in states]

    def doubt(self) -> None:
        """Makes the next reader compare values; in a CUDA graph's capture, whose replays aren't seen, parts the layers."""
        known, self.known = self.known, []
        if known and known[0][0].is_cuda and torch.cuda.is_current_stream_capturing():
            self.part()

    def dissolve(self) -> None:
        """Ends the joint; another may follow."""
        for member in self.members:
            layer = member()
            if layer is not None and layer.joint is self:
                vars(layer)["joint"] = None
        self.known = []
        _joints.discard(self)

    def part(self) -> None:
        """Ends the joint for good: from now on each layer goes on by itself."""
        self.dissolve()
        for member in self.members:
            layer = member()
            if layer is not None:
                vars(layer)["apart"] = True


# ---- a comparison that doesn't wait


_compared: dict[torch.device, tuple[list[Joint], Tensor, torch.cuda.Event]] = {}
"""On each GPU the last comparison that is being copied to the host: joints, whether their scales differ, and its end."""


def compare_later(joints: Sequence[Joint]) -> None:
    """Compares the scales of joints on a GPU, without waiting for it: each call looks at what an earlier one found.

    Raises RuntimeError if they differ although nobody told: ranks called the layers differently, a captured CUDA graph called
    some of them, or someone wrote through `.data`. From then on the layers go on by themselves.
    """
    by_device: dict[torch.device, list[Joint]] = {}
    for joint in joints:
        device = joint.known[0][2].device
        if _is_gpu(device):
            by_device.setdefault(device, []).append(joint)
    for device, some in by_device.items():
        if torch.cuda.is_current_stream_capturing():
            return
        before = _compared.get(device)
        if before is not None and not before[2].query():
            continue
        differs = scales_differ(some).to("cpu", non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        _compared[device] = some, differs, done
        apart = [] if before is None else [joint for joint, one in zip(*before[:2], strict=True) if one and joint.known]
        for joint in apart:
            joint.part()
        if apart:
            raise RuntimeError(
                f"delayed scaling: layers that read one input ({len(apart)} groups) have different scales of it, and one cast "
                "for all: every rank must call all layers of a SharedInput or MLPParts with it, CUDA graphs too, and scales "
                "are written by load_state_dict, not through .data. From now on each layer casts for itself"
            )


def scales_differ(joints: Sequence[Joint]) -> Tensor:
    """Returns whether the noted scales of each joint differ, bool [joints]."""
    most = max(len(joint.known) for joint in joints)
    scales = [joint.known[min(place, len(joint.known) - 1)][2] for joint in joints for place in range(most)]
    each = torch.stack(scales).view(len(joints), most)
    return (each != each[:, :1]).any(1)


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


_joints: weakref.WeakSet[Joint] = weakref.WeakSet()


def _state(layer: Any) -> tuple[Any, Any]:
    return (None, None) if layer is None else (layer._buffers["input_amax_history"], layer._buffers["input_scale"])


def _without_values(buffer: Any) -> bool:
    return type(buffer) is not Tensor or buffer.is_meta or buffer.is_inference()


@assume_constant_result
def part_all() -> None:
    """Parts all layers: what compiled code records, for all or some of them, isn't seen. Runs when a compiler traces it."""
    for joint in list(_joints):
        joint.part()
