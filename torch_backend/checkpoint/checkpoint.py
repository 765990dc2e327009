"""Saves and loads bit-exact checkpoints of a model and its optimizer through torch's DCP, on any mesh."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from blockfp.errors import BadCheckpoint
from blockfp.files import manifest, publishing
from blockfp.files.manifest import Files
from blockfp.files.names import CAST, EXTRA, GROUPS, INPUT, MODEL, OPTIMIZER, OWN, STATE, STEP, TIED

from ..conversion.kinds import input_formats
from ..distributed_internals import fsdp_params_of
from ..modules import model_names
from ..optimizer.adamw import _Adam
from ..quantized_tensor import agreement, sharding
from ..quantized_tensor.sharding import placed
from . import background, ranks
from .background import Saving
from .conversion import Conversion, conversions, convert, leave_paths, masters_of, replace, replace_masters, values_of
from .matching import HOW_TO_STEP, described, empty, match_model, match_optimizer, names_of
from .training_state import leaves, optimizer_state, replicate_uneven, restore_uneven, restorer

# DCP takes more than a second to import, so functions import it and its users.


@dataclass(frozen=True)
class Loaded:
    """The result of `load_checkpoint`.

    Attributes:
        path: the checkpoint's folder.
        step: its step.
        extra: the `extra` given to `save_checkpoint`.
    """

    path: Path
    step: int
    extra: dict[str, Any]


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
    """Saves a checkpoint as FOLDER/step-NNNNNNNN, a DCP folder with checksums.

    The folder gets its name only when the checkpoint is complete on disk; a run that dies earlier leaves previous checkpoints
    intact. Every rank must call it, on a shared file system.

    Before FSDP2's first gather, all ranks together also give layers the random keys that it would give them. Ranks whose keys
    differ nevertheless warn, as a checkpoint keeps one.

    Args:
        folder: the run's folder.
        model: any module; quantized weights are saved as codes and scales (`state_dict`).
        optimizer: its state (fp32 masters, moments) is saved too.
        step: number of the checkpoint.
        extra: tensors, numbers (NumPy's too), strings, None and tuples of them, by name. A name's value must be equal on all
            ranks that pass it; name values of one rank f"cursor.{rank}".
        keep: number of checkpoints to keep: this one and those of the highest steps; None keeps all.
        wait: False returns once everything is copied to the CPU and writes in a background thread.
        process_group: the ranks that save; by default all. wait=False adds its own gloo group, which `destroy_process_group`
            doesn't end.

    Returns:
        A handle whose `wait()` returns the folder of the completed checkpoint. After wait=False, call it for the last save too:
        a failed save is printed to stderr and, if nobody waited for it, makes the exit status 120.

    Raises:
        FileExistsError: a checkpoint of this step exists, or the folder is itself a checkpoint.
        OSError: this or the previous background save could not be written; a file is missing because ranks see different file
            systems; or another process saved this step meanwhile.
        ValueError: step or keep is out of range; or ranks differ in folder, step, settings, `extra`, optimizer settings, or the
            format, shape or recipe of one name. The message gives both values.
        TypeError: `extra` or an optimizer setting couldn't be loaded again, step is not an integer, or model is not a module.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    from .checkpoint_files import SummedWriter, write
    from .plain_values import cast_names, described_extra, plain, plain_extra, tied_names

    def arguments() -> tuple[Any, dict[str, Any], dict[str, str]]:
        number, most = _whole_number("step", step, 0), None if keep is None else _whole_number("keep", keep, 1)
        inner = model_names.plain_module(model)
        own = plain_extra(extra)
        checkpoint = manifest.folder_of(Path(folder).absolute(), number)
        background.wait_for_others()
        settings = {"the checkpoint": str(checkpoint), "keep": most, "wait": bool(wait), "optimizer": type(optimizer).__name__}
        state = {EXTRA: {STEP: number, TIED: tied_names(inner)} | {f"{OWN}.{name}": value for name, value in own.items()}}
        return (inner, most, checkpoint, state), settings, described(inner, optimizer) | described_extra(own)

    def contents() -> None:
        state[MODEL] = plain(MODEL, get_model_state_dict(model))
        # FSDP2 holds no gathered weights, which are codes, any more.
        state[EXTRA] |= {CAST: cast_names(model), INPUT: {name: str(format) for name, format in input_formats(model).items()}}
        if optimizer is not None:
            with ExitStack() as afterwards:
                afterwards.callback(restorer(optimizer))
                state[OPTIMIZER] = plain(OPTIMIZER, optimizer_state(model, optimizer, whole=False))

    def begin() -> Path:
        drafts.append(publishing.begin(checkpoint))
        return drafts[0].folder

    def not_saved(reasons: str) -> OSError:
        return OSError(f"{checkpoint} was not saved: {reasons}")

    def write_all() -> None:
        with _given_up_on_error(drafts):
            try:
                write(state, writer, exchange, lambda sums: drafts[0].publish(sums, keep), not_saved)
            except RuntimeError as error:  # a rank that is gone
                raise not_saved(ranks.told(error)) from error

    model, keep, checkpoint, state = ranks.check_alike("save_checkpoint", arguments, process_group)
    _share_random_keys(model, process_group)
    ranks.on_every_rank(contents, process_group)
    drafts: list[publishing.Draft] = []
    with _given_up_on_error(drafts):
        begun = ranks.on_first_rank(begin, process_group)
        if not drafts:
            # If the file system isn't shared, this rank has its own folder of this name; the draft removes it on failure.
            drafts.append(publishing.Draft(checkpoint, begun))
        replicate_uneven(state)
        writer, exchange = SummedWriter(drafts[0].folder), ranks.Exchange(process_group) if wait else ranks.apart(process_group)
        if wait:
            write_all()
            return Saving(checkpoint, None)
        # torch's staging doesn't copy DTensors of shape ().
        for holder, name, value in list(leaves(state)):
            if value.ndim == 0 and sharding.mesh_of(value) is not None:
                holder[name] = value.clone()
        state = writer.stage(state)
        return Saving(checkpoint, write_all)


def _share_random_keys(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Gives FSDP2's ranks their random keys, if no gather has; warns if other ranks differ, as a checkpoint keeps one key."""
    held = {name: buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] == "rng_key"}
    if held and ranks.rank_and_world(group)[1] == ranks.rank_and_world(None)[1]:
        # No rank of a mesh is missing.
        agreement.agree_on(fsdp_params_of(model))
    keys = {name: tuple(buffer.tolist()) for name, buffer in held.items()}
    for rank, others in enumerate(ranks.gather(keys, group)):
        for name in (name for name, key in keys.items() if others.get(name, key) != key):
            own = ranks.rank_and_world(group)[0]
            warnings.warn(
                f"the random key of {name} is {keys[name]} on rank {own} and {others[name]} on rank {rank}, and a checkpoint "
                "keeps one: a run that continues from it rounds gradients otherwise than this one. Seed all ranks alike where "
                "layers are made or reset, or load this checkpoint, which gives them one key",
                stacklevel=3,
            )
            return


def load_checkpoint(
    folder: str | PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    requantize: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Loads a checkpoint of `save_checkpoint` in place, onto the model's current mesh. Every rank must call it.

    All checksums, names, formats and shapes are verified before anything changes.

    Args:
        folder: the run's folder, or one checkpoint's.
        model: the saved model, sharded in any way or not at all; materialized.
        optimizer: its state is loaded; None ignores the checkpoint's. Its parameter groups must match. It keeps its own
            `moments`, `master` and OsciReset, torch's `capturable`, `foreach`, `fused` and `differentiable`, and settings that
            the checkpoint lacks.
        step: which checkpoint; by default the last.
        requantize: convert weights whose format differs between checkpoint and model, from the optimizer's masters if loaded,
            else from the checkpoint's values. Recipe buffers (histories, random keys) missing in the checkpoint keep their
            values.
        process_group: the ranks that load; by default all.

    Raises:
        BadCheckpoint: there is no checkpoint, a file is missing, truncated or altered, or an entry is missing or has another
            shape or format. Nothing has changed then, unless a file becomes unreadable during the load.
        ValueError: ranks differ in folder, step, settings, or the format, shape or recipe of one name. The message gives both
            values.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    from .checkpoint_files import read
    from .index import read_index
    from .plain_values import read_plain

    def arguments() -> tuple[Any, dict[str, Any], dict[str, str]]:
        number = None if step is None else _whole_number("step", step, 0)
        inner = model_names.plain_module(model)
        settings = {"the run's folder": str(Path(folder).absolute()), "step": number, "requantize": bool(requantize)}
        return (inner, number), settings | {"optimizer": type(optimizer).__name__}, described(inner, optimizer)

    def found() -> Path:
        checkpoint = manifest.find(Path(folder).absolute(), step)
        publishing.take_over(checkpoint.parent)
        return checkpoint

    def values() -> dict[str, Any]:
        parts = (MODEL, EXTRA) if optimizer is None else (MODEL, EXTRA, OPTIMIZER)
        plain = read_plain(files, index, tuple(f"{part}." for part in parts))
        manifest.check_step(checkpoint, plain.get(f"{EXTRA}.{STEP}"))
        return plain

    model, step = ranks.check_alike("load_checkpoint", arguments, process_group)
    checkpoint = ranks.on_first_rank(found, process_group)
    files = _summed_up(checkpoint, process_group)
    index = ranks.on_every_rank(lambda: read_index(files), process_group)
    there = names_of(index, MODEL)
    plain = ranks.on_first_rank(values, process_group)

    def fitted() -> tuple[dict[str, Any], list[Conversion], list[Conversion]]:
        state: dict[str, Any] = {EXTRA: {name: empty(what) for name, what in names_of(index, EXTRA).items()}}
        with ExitStack() as until_it_fits:
            state[MODEL] = get_model_state_dict(model)
            converted = conversions(model, there, requantize)
            replace(converted, state[MODEL])
            match_model(checkpoint, there, state[MODEL], model, requantize)
            lacking: list[Conversion] = []
            if optimizer is not None:
                until_it_fits.callback(restorer(optimizer))
                state[OPTIMIZER] = optimizer_state(model, optimizer, whole=True)
                of_optimizer = names_of(index, OPTIMIZER)
                ours = isinstance(optimizer, _Adam)
                lacking = replace_masters(converted, state[OPTIMIZER][STATE], of_optimizer, may_ignore=ours)
                leave_paths(state[OPTIMIZER][STATE], of_optimizer, may_ignore=ours)
                match_optimizer(checkpoint, of_optimizer, plain, state[OPTIMIZER], model, optimizer)
            until_it_fits.pop_all()
        return state, converted, lacking

    state, converted, lacking = ranks.on_every_rank(fitted, process_group)
    replaced = replicate_uneven(state)
    # The checkpoint may lack settings of the optimizer's groups; everything else was found.
    ranks.Exchange(process_group).together(
        lambda reasons: BadCheckpoint(f"{checkpoint} can't be read: {reasons}"), lambda: read(state, files, index)
    )
    restore_uneven(replaced)
    _into_model(model, state[MODEL], converted, strict=not requantize)
    masters = [None] * len(converted)
    if optimizer is not None:
        masters = _into_optimizer(model, optimizer, state[OPTIMIZER], converted, lacking)
    convert(converted, masters)
    extra = {name.removeprefix(f"{OWN}."): value for name, value in state[EXTRA].items() if name.startswith(f"{OWN}.")}
    return Loaded(checkpoint, state[EXTRA][STEP], extra)


def _into_model(model: nn.Module, state: dict[str, Any], converted: list[Conversion], *, strict: bool) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    taken = {name for one in converted if not one.nominal for name in one.read}
    rest = {name: value for name, value in state.items() if name not in taken}
    set_model_state_dict(model, model_names.wrapped_names(model, rest), options=StateDictOptions(strict=strict))


def _into_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    converted: list[Conversion],
    lacking: list[Conversion],
) -> list[Tensor | None]:
    """Loads an optimizer's state; returns the masters of the `converted` parameters.

    Parameters in `lacking` have no saved master; theirs is made from the checkpoint's values.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    states = state[STATE]
    for one in (one for one in lacking if one.name in states):
        states[one.name]["master"] = placed(one.param, values_of(one).to(torch.float32))
    masters = masters_of(converted, states)
    for own, group in zip(optimizer.param_groups, state[GROUPS], strict=True):
        group |= {name: own[name] for name in HOW_TO_STEP if name in own}
    # Parameters without a saved state get theirs at their next gradient.
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(strict=False))
    return masters


def _summed_up(checkpoint: Path, group: dist.ProcessGroup | None) -> Files:
    """Returns the checkpoint's files after hashing them, divided among the ranks."""

    def share() -> tuple[Files | None, list[str]]:
        try:
            files = Files(checkpoint)
            return files, files.sum_up(*ranks.rank_and_world(group))
        except BadCheckpoint as error:
            return None, [str(error)]

    files, found = ranks.on_every_rank(share, group)
    everyones = ranks.gather((found, files.stamps if files is not None else {}), group)
    together = list(dict.fromkeys(problem for problems, _ in everyones for problem in problems))
    if files is not None and not together:
        together = [problem for _, stamps in everyones for problem in files.take(stamps)]
    if files is None or together:
        raise BadCheckpoint("; ".join(together))
    return files


def _whole_number(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if number < least:
        raise ValueError(f"{name} must be {least} or more, got {number}")
    return number


@contextmanager
def _given_up_on_error(drafts: list[publishing.Draft]) -> Iterator[None]:
    """Removes a failed checkpoint's files, on every rank, in case ranks see different file systems."""
    try:
        yield
    except BaseException:
        for draft in drafts:
            draft.give_up()
        raise
