"""Checkpoints of a model and its optimizer: saved and loaded through torch's DCP, on any mesh, to the bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from blockfp import manifest
from blockfp.manifest import BadCheckpoint

from ..quantized_tensor import sharding
from .conversion import Conversion, conversions, convert, replace
from .uneven import leaves, make_whole, put_back

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

# DCP is imported where it is used: it takes more than a second.

MODEL, OPTIMIZER, EXTRA = "model", "optimizer", "extra"


class Saving:
    """A checkpoint that is being written behind the training's back."""

    def __init__(self, path: Path, future: Future):
        self.path = path
        self._future = future

    def done(self) -> bool:
        """Whether this rank has nothing more to do with it."""
        return self._future.done()

    def wait(self) -> Path:
        """Waits until the checkpoint is whole, and returns its folder; raises what went wrong."""
        self._future.result()
        return self.path


@dataclass(frozen=True)
class Loaded:
    """What `load_checkpoint` found.

    Attributes:
        path: the checkpoint's folder.
        step: its step.
        extra: what was given as `extra` when it was saved.
    """

    path: Path
    step: int
    extra: dict[str, Any]


_behind: list[Saving] = []


def save_checkpoint(
    folder: str | PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    wait: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Saving:
    """Saves a checkpoint as FOLDER/step-NNNNNNNN, a folder of torch's DCP with checksums.

    The folder has its name only when the checkpoint is whole, on the disk; a run that dies before leaves those of earlier steps
    as they are. Every rank calls it, on a file system that all of them see.

    Args:
        folder: that of the run.
        model: any module; quantized weights are saved as codes and scales (`state_dict`).
        optimizer: whose state is saved too: masters and moments in fp32.
        step: number of the checkpoint.
        extra: tensors, and numbers, strings, None and tuples of them, by name, alike on every rank.
        keep: how many of the latest checkpoints to leave in the folder, this one among them; None leaves all.
        wait: False returns when everything is copied to the CPU, and writes behind the training's back.
        process_group: the ranks that save; by default all. For wait=False it must have a CPU backend, and nothing else may use
            it; by default one is made, with gloo.

    Returns:
        A handle: `wait()` returns the checkpoint's folder when it is whole.

    Raises:
        FileExistsError: there is a checkpoint of this step.
        ValueError: step or keep is out of range.
        TypeError: extra has something else.
    """
    from torch.distributed.checkpoint import state_dict_saver as dcp

    from .checkpoint_files import WholeOrNothing

    if step < 0 or (keep is not None and keep < 1):
        raise ValueError(f"step must be 0 or more and keep 1 or more, got step {step} and keep {keep}")
    checkpoint = manifest.folder_of(Path(folder).absolute(), step)
    while _behind:
        # Two at a time would mix up their exchanges.
        _behind.pop().wait()
    _check_extra(extra or {})
    _on_all(lambda: manifest.begin(checkpoint), process_group)
    state = _state(model, optimizer)
    make_whole(state)
    state[EXTRA] = {"step": step, **{f"own.{name}": value for name, value in (extra or {}).items()}}
    writer = WholeOrNothing(checkpoint, keep)
    with _without_groups_quietly():
        if wait:
            dcp.save(state, storage_writer=writer, process_group=process_group)
            future: Future = Future()
            future.set_result(None)
            return Saving(checkpoint, future)
        # torch copies what it saves behind the training's back, but for DTensors of shape ().
        for holder, name, value in list(leaves(state)):
            if value.ndim == 0 and sharding.mesh_of(value) is not None:
                holder[name] = value.clone()
        group = process_group or _own_group()
        future = dcp.async_save(state, storage_writer=writer, process_group=group)  # pyright: ignore[reportAssignmentType]
    _behind.append(Saving(checkpoint, future))
    return _behind[-1]


def load_checkpoint(
    folder: str | PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    requantize: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Loads a checkpoint of `save_checkpoint`, in place, onto whatever mesh the model is on. Every rank calls it.

    Every file is held against its checksum, and every name, format and shape against the model's, before anything is changed.

    Args:
        folder: that of the run, or of one checkpoint.
        model: what was saved, sharded in any way or not at all; materialized.
        optimizer: whose state is loaded; None leaves that in the checkpoint alone.
        step: which checkpoint; by default the last that is whole.
        requantize: convert weights that the checkpoint holds in another format, or in high precision where the model has codes,
            or the other way round: from the optimizer's masters where they are loaded, else from the checkpoint's values.
        process_group: the ranks that load; by default all.

    Raises:
        BadCheckpoint: there is no checkpoint, a file is missing, truncated or altered, or something the model has is not there
            or has another shape or format. Nothing was changed then.
    """
    from torch.distributed.checkpoint import state_dict_loader as dcp
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    from .checkpoint_files import PlainPlanner, PlainReader, read_index

    checkpoint = _on_all(lambda: manifest.find(Path(folder).absolute(), step), process_group)
    _check_files(checkpoint, process_group)
    index = read_index(checkpoint)
    state = _state(model, optimizer)
    converted = conversions(plain_module(model), _names(index, MODEL), requantize)
    replace(converted, state[MODEL])
    state[EXTRA] = _empty_extra(index)
    _check_names(checkpoint, index, state)
    replaced = make_whole(state)
    with _without_groups_quietly():
        dcp.load(state, storage_reader=PlainReader(checkpoint), planner=PlainPlanner(), process_group=process_group)
    put_back(replaced)
    _into_model(model, state[MODEL], converted)
    if optimizer is not None:
        set_optimizer_state_dict(plain_module(model), optimizer, state[OPTIMIZER])
    convert(converted, [_master(one.param, optimizer) for one in converted])
    extra = {name.removeprefix("own."): value for name, value in state[EXTRA].items() if name.startswith("own.")}
    return Loaded(checkpoint, state[EXTRA]["step"], extra)


def plain_module(model: nn.Module) -> nn.Module:
    """The module inside what DDP and torch.compile put around it, which would come into the names."""
    inner: Any = model
    while isinstance(inner, nn.parallel.DistributedDataParallel) or hasattr(inner, "_orig_mod"):
        inner = inner.module if isinstance(inner, nn.parallel.DistributedDataParallel) else inner._orig_mod
    return inner


def _state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    model = plain_module(model)
    state: dict[str, Any] = {MODEL: get_model_state_dict(model)}
    if optimizer is not None:
        with _gradients_aside(optimizer):
            state[OPTIMIZER] = get_optimizer_state_dict(model, optimizer)
    return state


@contextmanager
def _gradients_aside(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """torch makes the state of an optimizer that hasn't taken a step yet, but only where there are no gradients."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    gradients = [param.grad for param in params]
    if not optimizer.state:
        for param in params:
            param.grad = None
    yield
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient


def _into_model(model: nn.Module, state: dict[str, Any], converted: list[Conversion]) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    taken = {name for one in converted for name in one.read}
    rest = {name: value for name, value in state.items() if name not in taken}
    set_model_state_dict(plain_module(model), rest, options=StateDictOptions(strict=not converted))


def _master(param: Tensor, optimizer: torch.optim.Optimizer | None) -> Tensor | None:
    return None if optimizer is None else optimizer.state.get(param, {}).get("master")


# ---- checks, before anything is changed


def _check_files(checkpoint: Path, group: dist.ProcessGroup | None) -> None:
    from .checkpoint_files import problems

    rank, world = (dist.get_rank(group), dist.get_world_size(group)) if _distributed() else (0, 1)
    try:
        found = problems(checkpoint, rank, world)
    except BadCheckpoint as error:
        found = [str(error)]
    everyones = _gather(found, group)
    together = list(dict.fromkeys(problem for problems_there in everyones for problem in problems_there))
    if together:
        raise BadCheckpoint("; ".join(together))


def _names(index: Metadata, part: str) -> dict[str, Any]:
    """What a checkpoint has under "model", "optimizer" or "extra", by name."""
    prefix = f"{part}."
    return {name.removeprefix(prefix): what for name, what in index.state_dict_metadata.items() if name.startswith(prefix)}


def _check_extra(extra: Mapping[str, Any]) -> None:
    for name, value in extra.items():
        for part in value if isinstance(value, tuple) else (value,):
            if not isinstance(part, bool | int | float | str | None) and not (part is value and isinstance(value, Tensor)):
                raise TypeError(f"extra[{name!r}] must be a tensor, or numbers and strings, got {type(part).__name__}")


def _empty_extra(index: Metadata) -> dict[str, Any]:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    def empty(what: Any) -> Any:
        return torch.empty(what.size, dtype=what.properties.dtype) if isinstance(what, TensorStorageMetadata) else None

    return {name: empty(what) for name, what in _names(index, EXTRA).items()}


def _check_names(checkpoint: Path, index: Metadata, state: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    for part in (MODEL, OPTIMIZER):
        if part not in state:
            continue
        there, wanted = _names(index, part), dict(_flat(state[part]))
        if not there:
            raise BadCheckpoint(f"{checkpoint} holds no {part}")
        missing, surplus = sorted(wanted.keys() - there.keys()), sorted(there.keys() - wanted.keys())
        if missing or surplus:
            raise BadCheckpoint(
                f"{checkpoint} doesn't fit the {part}: it lacks {_some(missing)}, and has beyond it {_some(surplus)}"
            )
        for name, value in wanted.items():
            if isinstance(value, Tensor) and isinstance(there[name], TensorStorageMetadata):
                _check_tensor(f"{part}.{name}", value, there[name])


def _check_tensor(name: str, value: Tensor, saved: TensorStorageMetadata) -> None:
    if value.is_meta:
        raise BadCheckpoint(f"{name} is on the meta device and has no memory: call to_empty(device=...) of the model first")
    kinds = (("shape", tuple(saved.size), tuple(value.shape)), ("dtype", saved.properties.dtype, value.dtype))
    for what, there, here in kinds:
        if there != here:
            raise BadCheckpoint(f"{name} has {what} {there} in the checkpoint and {here} here")


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dictionaries and lists under the names that DCP gives them."""
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list) and any(isinstance(inner, dict | list | Tensor) for inner in value):
        entries = enumerate(value)
    else:
        yield path, value
        return
    for key, inner in entries:
        yield from _flat(inner, f"{path}.{key}" if path else str(key))


def _some(names: list[str]) -> str:
    return "nothing" if not names else ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# ---- process groups


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's value."""
    if not _distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _on_all(action: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """Has the group's first rank do something: every rank gets what it returns, or raises what it raises."""
    outcome: Any = None
    if not _distributed() or dist.get_rank(group) == 0:
        try:
            outcome = action()
        except Exception as error:
            outcome = error
    (outcome, *_) = _gather(outcome, group)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


_made: list[tuple[Any, Any]] = []


def _own_group() -> dist.ProcessGroup | None:
    """A group of all ranks for what is written behind the training's back: made once for each time torch is initialized."""
    if not _distributed():
        return None
    world = dist.group.WORLD
    if not _made or _made[-1][0] is not world:
        _made[:] = [(world, dist.new_group(backend="gloo"))]
    return _made[-1][1]


@contextmanager
def _without_groups_quietly() -> Iterator[None]:
    """DCP warns that it is alone where torch.distributed isn't initialized, which is no news here."""
    if _distributed():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
