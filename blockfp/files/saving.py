"""`save` and `load`: named arrays, quantized or not, in .safetensors files that NumPy, JAX and PyTorch read alike.

One file, or several with an index, as the Hugging Face libraries write and read them:

    model.safetensors                                everything
    model-1f0c9a2b-00001-of-00003.safetensors, ..    parts of it, each a file of its own, with a new token at each save
    model.safetensors.index.json                     which tensor is in which part

The index alone says which parts are the model: it takes the place of an older one in one step, and only then older parts go,
but for those that another file in the folder names: a copy of an index, or one that was renamed. Parts that a killed save left
go with the next save. Their token is the first half of that in the name of the index's temporary file, which is there, and
locked, for as long as they are being written (`atomic`). All files of a model have the permissions of the older one.
`files.quantized_model` says how a quantized tensor lies in a file. Its codes and scales are always in the same one.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..array import QuantizedArray
from ..definition.bits import dtype_name
from ..definition.views import DTYPES
from ..errors import BadFile
from . import untrusted
from .atomic import being_written, naming, remove_left_behind, replacing, to_disk

if TYPE_CHECKING:
    from .modelfile import Entry, Model

INDEX = ".index.json"

_ATTEMPTS = 20
"""Times that a model is opened while others save it, before that is an error."""


def save(
    path: str | PathLike[str],
    tensors: Mapping[str, np.ndarray | QuantizedArray],
    *,
    file_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes named arrays to a .safetensors file, or to several.

    Whatever is at `path`, one file or several, stays until the new one is whole, and goes then.

    Args:
        path: name of the file, ending in .safetensors.
        tensors: NumPy arrays and quantized ones, by name.
        file_bytes: begin another file where one would get larger, and write an index; None writes one file.
        metadata: further strings for the file's header, by strings.

    Raises:
        TypeError, ValueError: an argument that isn't what it should be. `blockfp.errors.BadFile` (a ValueError) names the
            tensor: one that is no array, a dtype that can't be stored, a name that is needed for another tensor's parts.

    Example:
        >>> blockfp.save("model.safetensors", {"layer.weight": blockfp.quantize(w, "mxfp8_e4m3_32x32"), "layer.bias": b})
    """
    write(Path(path), tensors, lambda part: np.asarray(part), file_bytes, metadata or {})


def load(path: str | PathLike[str]) -> dict[str, np.ndarray | QuantizedArray]:
    """Reads what `save` of any framework wrote, a released quantized model, or any other .safetensors file, one or several.

    Of released models it knows the layouts of DeepSeek and Qwen (FP8), compressed-tensors, ModelOpt (NVFP4) and gpt-oss, each
    by its own marks (`files.released`); codes and scales stay as they are, and values have the dtype of config.json.

    Args:
        path: a .safetensors file, its .index.json, or a folder that has model.safetensors or its index.

    Returns:
        Arrays and quantized arrays by name.

    Raises:
        blockfp.errors.BadFile: no such file, one that is cut short, corrupt or of another kind, or weights that are quantized
            in a way that blockfp has no format for.
    """
    return dict(read(Path(path)))


def write(
    path: Path,
    tensors: Mapping[str, Any],
    to_numpy: Callable[[Any], np.ndarray],
    file_bytes: int | None,
    metadata: Mapping[str, str],
    *,
    own: bool = True,
) -> None:
    """`save` for any framework: `to_numpy` makes a plain array, or a part of a quantized one, NumPy's; one at a time.

    Without `own` tensors are entries of another library's layout, and the file doesn't say that blockfp wrote it.
    """
    from . import quantized_model
    from .modelfile import write_safetensors

    if path.suffix != ".safetensors":
        raise BadFile(path, "the name must end in .safetensors")
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors must be a mapping from names to arrays, got {type(tensors).__name__}")
    if not isinstance(metadata, Mapping) or not all(isinstance(text, str) for item in metadata.items() for text in item):
        raise TypeError(f"metadata must be strings by strings, got {metadata!r}")
    if quantized_model.KEY in metadata:
        raise ValueError(f"metadata: {quantized_model.KEY!r} is blockfp's own")
    if file_bytes is not None and (not isinstance(file_bytes, int) or file_bytes < 1):
        raise ValueError(f"file_bytes must be an integer of 1 or more, got {file_bytes!r}")
    entries = entries_of(path, tensors)

    def part_of(names: list[str]) -> Iterator[tuple[str, np.ndarray]]:
        for name in names:
            laid, parts = entries[name], _parts(tensors[name])
            if len(laid) > len(parts):
                # A quantized tensor's own name, under which there is nothing.
                yield laid[0].name, np.empty(laid[0].shape, laid[0].dtype)
            for entry, part in zip(laid[-len(parts) :], parts, strict=True):
                yield entry.name, to_numpy(part)

    def write_one(temporary: Path, names: list[str]) -> None:
        described = {name: _description(tensors[name]) for name in names if _is_quantized(tensors[name])}
        # Also where nothing is quantized: readers need not ask whether a name such as "a_scale" is another library's mark.
        told = json.dumps({"version": quantized_model.VERSION, "tensors": described})
        strings = {**metadata, quantized_model.KEY: told} if own else metadata
        write_safetensors(temporary, [e for name in names for e in entries[name]], part_of(names), strings)

    if file_bytes is None:
        with in_one_file(path) as temporary:
            write_one(temporary, list(entries))
        return
    index = path.with_name(path.name + INDEX)
    files = divided(entries, file_bytes)
    total = sum(_size(parts) for parts in entries.values())
    new: set[str] = set()
    with naming(path, "saving"), _old_parts_removed(path, index, new) as older:
        with replacing(index, None if index.exists() else older) as temporary:
            token = _token(temporary.name.split(".")[-2])
            called = [f"{path.stem}-{token}-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
            new.update(called)
            for name, names in zip(called, files, strict=True):
                with replacing(path.with_name(name), older) as part:
                    write_one(part, names)
            where = {e.name: name for name, names in zip(called, files, strict=True) for key in names for e in entries[key]}
            temporary.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2))
        with naming(path, "removing the older model, which readers take before the parts of the new one"):
            _remove(path)


def _token(of_temporary: str) -> str:
    """The token in the names of parts, from that of their index's temporary file."""
    return of_temporary[:8]


def entries_of(path: Path, tensors: Mapping[str, Any]) -> dict[str, list[Entry]]:
    """The entries of each tensor in a file. Raises BadFile where `write` would, before anything is written."""
    from . import quantized_model

    entries = {name: _entries(path, name, tensor) for name, tensor in tensors.items()}
    quantized_model.check_names(path, [entry for parts in entries.values() for entry in parts])
    return entries


@contextmanager
def in_one_file(path: Path) -> Iterator[Path]:
    """`replacing` for a model's one file: removes at the end the index and the parts of an older model at this path, too."""
    index = path.with_name(path.name + INDEX)
    with naming(path, "saving"), _old_parts_removed(path, index, set()) as older:
        with replacing(path, older) as temporary:
            yield temporary
        with _warning_of_leftovers(path):
            _remove(index)


@contextmanager
def _warning_of_leftovers(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        warnings.warn(f"{path} has been saved, and the older model's parts can't all be removed: {error}", stacklevel=6)


def _remove(path: Path) -> None:
    """Removes a file, if it is there, and waits until no crash of the machine brings it back."""
    if os.path.lexists(path):
        path.unlink(missing_ok=True)
        to_disk(path.parent)


@contextmanager
def _old_parts_removed(path: Path, index: Path, new: set[str]) -> Iterator[Path | None]:
    """Yields a file of the older model, or None; removes at the end old parts, or new ones after an error, that nothing names.

    At the beginning it removes parts that killed saves left.
    """
    with suppress(OSError):
        _remove_orphans(path, index)
    before = _parts_named(path, index) or set()
    try:
        yield next(filter(Path.exists, (path, *map(path.with_name, sorted(before)), index)), None)
    except BaseException:
        with suppress(OSError):
            _remove_unnamed(path, index, new)
        raise
    with _warning_of_leftovers(path):
        _remove_unnamed(path, index, new | before)


def _remove_unnamed(path: Path, index: Path, parts: set[str]) -> None:
    standing = _parts_named(path, index)
    if standing is not None:
        for name in _unnamed(path.parent, parts - standing):
            path.with_name(name).unlink(missing_ok=True)


def _unnamed(folder: Path, parts: set[str]) -> set[str]:
    """Those of these parts that no file in the folder names: an index stays one under any name, and so does a copy of it."""
    if not parts:
        return parts
    for name in os.listdir(folder):
        if name.endswith(".safetensors"):
            continue
        try:
            with untrusted.open_regular(folder / name) as file:
                if untrusted.length_of(file) > untrusted.HEADER_BYTES or not file.read(64).lstrip().startswith(b"{"):
                    continue
                file.seek(0)
                content = file.read()
        except (FileNotFoundError, untrusted.NotPlain):
            continue
        except OSError:
            if ".json" in name:  # it may name them all
                return set()
            continue
        parts = {part for part in parts if os.fsencode(part) not in content and json.dumps(part)[1:-1].encode() not in content}
    return parts


def _remove_orphans(path: Path, index: Path) -> None:
    """Removes parts, whole or half written, that nothing names and that no save is about to make the index name."""
    part = re.compile(rf"({re.escape(path.stem)}-([0-9a-f]{{8}})-\d{{5}}-of-\d{{5}}\.safetensors)")
    half = re.compile(rf"\.{part.pattern}\.[0-9a-f]{{12}}\.tmp")
    there = os.listdir(path.parent)
    for name in {match[1] for match in map(half.fullmatch, there) if match}:
        remove_left_behind(path.with_name(name))
    remove_left_behind(index)
    under_way = set(map(_token, being_written(index)))
    # The index is read after that: a save that ended in the meantime has made it name its parts.
    _remove_unnamed(path, index, {match[1] for match in map(part.fullmatch, there) if match and match[2] not in under_way})


def _parts_named(path: Path, index: Path) -> set[str] | None:
    """The parts of the model at `path` that its index names, called as parts are; None if it is not readable."""
    try:
        names = set(untrusted.read_json(index)["weight_map"].values())
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    plain = filter(untrusted.is_plain_name, names)
    return {name for name in plain if re.fullmatch(rf"{re.escape(path.stem)}-.*\.safetensors", name)}


def read(path: Path) -> Iterator[tuple[str, np.ndarray | QuantizedArray]]:
    """Yields (name, array) for everything in a file or several, one at a time."""
    from . import quantized_model

    with closing(open_whole(path)) as model:
        yield from quantized_model.read_model(model)


def open_whole(path: Path) -> Model:
    """The tensors of one file or several, not read yet, as if they were in one; `path` and errors are those of `load`."""
    from .modelfile import as_bad_file, open_model

    with as_bad_file(path):
        if path.is_dir():
            path = path / "model.safetensors"
        index = path if path.name.endswith(INDEX) else path.with_name(path.name + INDEX)
        before = _standing(path, index)
        for _ in range(_ATTEMPTS):
            try:
                model = _open_parts(index) if path == index or before[0] is None is not before[1] else open_model(path)
            except BadFile:
                # A save may have come in between, and have removed what was looked for.
                if before == (before := _standing(path, index)):
                    raise
                continue
            # The parts that an index names belong together for as long as it stands.
            if model.path != index or before == (before := _standing(path, index)):
                return model
        raise BadFile(path, f"was replaced {_ATTEMPTS} times while it was opened")


def _standing(*paths: Path) -> tuple[tuple[int, ...] | None, ...]:
    """Which files have these names now; None where none has."""

    def state(path: Path) -> tuple[int, ...] | None:
        try:
            found = os.stat(path)
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    return tuple(map(state, paths))


def _open_parts(index: Path) -> Model:
    from . import quantized_model
    from .modelfile import open_model

    try:
        where = untrusted.read_json(index)["weight_map"]
        files = sorted(set(where.values()))
        if not all(map(untrusted.is_plain_name, files)):
            raise ValueError("it names files outside its folder")
        if not all(name.endswith(".safetensors") for name in files):
            raise ValueError("it names files that don't end in .safetensors")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadFile(index, f"is not an index of .safetensors files: {error!r}") from error
    for name in files:
        if not index.with_name(name).exists():
            raise BadFile(index, f"names {name}: no such file")
    model = quantized_model.together(index, [open_model(index.with_name(name)) for name in files])
    missing = sorted(set(where) - {tensor.name for tensor in model.tensors})
    if missing:
        raise BadFile(index, f"names tensors that its files lack: {', '.join(missing[:3])}")
    return model


def _is_quantized(tensor: Any) -> bool:
    return hasattr(tensor, "codes") and hasattr(tensor, "format")


def _parts(tensor: Any) -> list[Any]:
    if not _is_quantized(tensor):
        return [tensor]
    return [part for part in (tensor.codes, tensor.scales, tensor.tensor_scale) if part is not None]


def _entries(path: Path, name: str, tensor: Any) -> list[Entry]:
    from .contents import quantized_entries
    from .modelfile import TAGS, Entry

    if _is_quantized(tensor):
        if tuple(tensor.origin) != (0, 0) or getattr(tensor, "sharding", None) is not None:
            raise BadFile(path, f"it is a shard, not a whole array ({tensor!r})", name)
        return quantized_entries(name, tuple(tensor.shape), DTYPES[dtype_name(tensor)], tensor.format)
    if isinstance(tensor, np.ma.MaskedArray):
        raise BadFile(path, "it is a masked array, and a file has no masks: save its .filled(..) or its .data", name)
    if not hasattr(tensor, "dtype"):
        raise BadFile(path, f"it must be an array, got {type(tensor).__name__}", name)
    known = dtype_name(tensor)
    dtype = next((dtype for dtype in TAGS if dtype.name == known), None)
    if dtype is None:
        raise BadFile(path, f"dtype {known} can't be stored in a .safetensors file", name)
    return [Entry(name, dtype, tuple(tensor.shape))]


def _description(tensor: Any) -> dict[str, object]:
    return {"format": tensor.format.name, "shape": list(tensor.shape), "dtype": dtype_name(tensor)}


def _size(entries: list) -> int:
    return sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in entries)


def divided(entries: Mapping[str, list], file_bytes: int) -> list[list[str]]:
    """Names file by file, in their order; a file holds more than `file_bytes` only where one name does.

    Args:
        entries: what each name stands for, with shapes and dtypes.
        file_bytes: of one file.
    """
    files: list[list[str]] = [[]]
    filled = 0
    for name, parts in entries.items():
        size = _size(parts)
        if files[-1] and filled + size > file_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    return files
