"""`save` and `load`: named arrays, quantized or not, in .safetensors files that NumPy, JAX and PyTorch can read.

A model is one file, or several with an index in the format of the Hugging Face libraries:

    model.safetensors                                everything
    model-1f0c9a2b-00001-of-00003.safetensors, ..    parts; each save uses a new token
    model.safetensors.index.json                     maps tensors to parts

Only the index determines which parts form the model. It is replaced atomically, and older parts are removed afterwards, except
those named by another file in the folder, such as a copied or renamed index. The next save removes parts of a killed save: a
part's token is the first 8 of the 12 digits in the name of the index's temporary file, which exists and is locked while the
parts are written (`atomic`). New files get the permissions of the older model. `files.quantized_model` describes the entries
of a quantized tensor; its codes and scales are always in the same file.
"""

from __future__ import annotations

import json
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
from ..definition.layout import DTYPES
from ..errors import BadFile
from . import untrusted
from .atomic import being_written, naming, remove_left_behind, replacing, to_disk

if TYPE_CHECKING:
    from .modelfile import Entry, Model

INDEX = ".index.json"

_ATTEMPTS = 20
"""Attempts to open a model that other processes keep replacing."""


def save(
    path: str | PathLike[str],
    tensors: Mapping[str, np.ndarray | QuantizedArray],
    *,
    file_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes named arrays to one or several .safetensors files.

    An existing model at `path` stays until the new one is complete, and is then removed.

    Args:
        path: name of the file, ending in .safetensors.
        tensors: NumPy arrays and quantized arrays by name.
        file_bytes: maximum size of a file; larger models are split and get an index. None writes one file.
        metadata: additional strings for the file's header.

    Raises:
        TypeError, ValueError: an argument is invalid. `blockfp.errors.BadFile` (a ValueError) names the tensor: it is not an
            array, has a dtype that can't be stored, or has a name that another tensor's parts need.

    Example:
        >>> blockfp.save("model.safetensors", {"layer.weight": blockfp.quantize(w, "mxfp8_e4m3_32x32"), "layer.bias": b})
    """
    write(Path(path), tensors, lambda part: np.asarray(part), file_bytes, metadata or {})


def load(path: str | PathLike[str]) -> dict[str, np.ndarray | QuantizedArray]:
    """Reads a model written by `save` in any framework, a released quantized model, or any other .safetensors file or files.

    Supports the layouts of DeepSeek and Qwen (FP8), compressed-tensors, ModelOpt (NVFP4) and gpt-oss, recognized by their
    entries (`files.released`). Codes and scales keep their bits, and values have the dtype in config.json.

    Args:
        path: a .safetensors file, its .index.json, or a folder that contains model.safetensors or its index.

    Returns:
        Arrays and quantized arrays by name.

    Raises:
        blockfp.errors.BadFile: the file doesn't exist, is truncated, corrupt or of another type, or its quantization has no
            format in blockfp.
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
    """Implements `save` for any framework; `to_numpy` converts a plain array or a part of a quantized one, one at a time.

    Without `own`, tensors are entries of another library's layout, and the file has no blockfp description.
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
                # The empty entry under a quantized tensor's own name.
                yield laid[0].name, np.empty(laid[0].shape, laid[0].dtype)
            for entry, part in zip(laid[-len(parts) :], parts, strict=True):
                yield entry.name, to_numpy(part)

    def write_one(temporary: Path, names: list[str]) -> None:
        described = {name: _description(tensors[name]) for name in names if _is_quantized(tensors[name])}
        # Written even if nothing is quantized, so that readers don't take a name like "a_scale" for another library's layout.
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
    """Returns the token of the parts' names, given the token of the index's temporary file."""
    return of_temporary[:8]


def entries_of(path: Path, tensors: Mapping[str, Any]) -> dict[str, list[Entry]]:
    """Returns the file entries of each tensor; raises BadFile for those that `write` would reject."""
    from . import quantized_model

    entries = {name: _entries(path, name, tensor) for name, tensor in tensors.items()}
    quantized_model.check_names(path, [entry for parts in entries.values() for entry in parts])
    return entries


@contextmanager
def in_one_file(path: Path) -> Iterator[Path]:
    """Like `replacing` for a single-file model; also removes the index and parts of an older model at this path."""
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
    """Removes a file if it exists, and flushes its folder to disk."""
    if os.path.lexists(path):
        path.unlink(missing_ok=True)
        to_disk(path.parent)


@contextmanager
def _old_parts_removed(path: Path, index: Path, new: set[str]) -> Iterator[Path | None]:
    """Yields a file of the older model, or None. On exit removes its parts, or after an error the new ones, unless a file names
    them.

    First removes the parts of killed saves.
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
    """Returns the parts that no file in the folder names; indexes count under any name, as do copies."""
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
            if ".json" in name:  # it may be an index that names all of them
                return set()
            continue
        parts = {part for part in parts if os.fsencode(part) not in content and json.dumps(part)[1:-1].encode() not in content}
    return parts


def _remove_orphans(path: Path, index: Path) -> None:
    """Removes complete and partial parts that nothing names and that no running save will name."""
    part = re.compile(rf"({re.escape(path.stem)}-([0-9a-f]{{8}})-\d{{5}}-of-\d{{5}}\.safetensors)")
    half = re.compile(rf"\.{part.pattern}\.[0-9a-f]{{12}}\.tmp")
    there = os.listdir(path.parent)
    for name in {match[1] for match in map(half.fullmatch, there) if match}:
        remove_left_behind(path.with_name(name))
    remove_left_behind(index)
    under_way = set(map(_token, being_written(index)))
    # Read the index only now: a save that ended in between has made it name its parts.
    _remove_unnamed(path, index, {match[1] for match in map(part.fullmatch, there) if match and match[2] not in under_way})


def _parts_named(path: Path, index: Path) -> set[str] | None:
    """Returns the parts of the model at `path` that its index names; None if the index is unreadable."""
    try:
        names = set(untrusted.read_json(index)["weight_map"].values())
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    plain = filter(untrusted.is_plain_name, names)
    return {name for name in plain if re.fullmatch(rf"{re.escape(path.stem)}-.*\.safetensors", name)}


def read(path: Path) -> Iterator[tuple[str, np.ndarray | QuantizedArray]]:
    """Yields (name, array) for everything in one or several files, one at a time."""
    from . import quantized_model

    with closing(open_whole(path)) as model:
        yield from quantized_model.read_model(model)


def open_whole(path: Path) -> Model:
    """Opens one file or several as one model, without reading tensors; `path` and errors are those of `load`."""
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
                # A concurrent save may have removed the files.
                if before == (before := _standing(path, index)):
                    raise
                continue
            # Parts that an index names belong together; a single file and index may have changed meanwhile.
            if model.path != index or before == (before := _standing(path, index)):
                return model
        raise BadFile(path, f"was replaced {_ATTEMPTS} times while it was opened")


def _standing(*paths: Path) -> tuple[tuple[int, ...] | None, ...]:
    """Returns identity, size and modification time of each file; None for missing files."""

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
    from .modelfile import TAGS, Entry, odd_f4

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
    if problem := odd_f4(tensor.shape, dtype):
        raise BadFile(path, problem, name)
    return [Entry(name, dtype, tuple(tensor.shape))]


def _description(tensor: Any) -> dict[str, object]:
    return {"format": tensor.format.name, "shape": list(tensor.shape), "dtype": dtype_name(tensor)}


def _size(entries: list) -> int:
    from .modelfile import stored_bytes

    return sum(stored_bytes(entry.shape, entry.dtype) for entry in entries)


def divided(entries: Mapping[str, list], file_bytes: int) -> list[list[str]]:
    """Divides names into files, in order; a file exceeds `file_bytes` only if a single name does."""
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
