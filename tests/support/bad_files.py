"""Damaged and made-up files of every kind that is read, and the whole ones that they are made from."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import random
import shutil
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

STEP = "step-00000002"


def sum_of(path: Path):
    """A file's entry in a manifest."""
    from blockfp.files import manifest

    content = path.read_bytes()
    return manifest.FileSum(len(content), hashlib.sha256(content).hexdigest())


def samples(folder: Path) -> None:
    """Whole files of each kind, from which bad ones are made."""
    import numpy as np
    import torch
    from blockfp.torch_backend.optimizer.adamw import AdamW

    import blockfp
    import blockfp.torch as bfp

    rng = np.random.default_rng(0)
    x = rng.standard_normal((20, 40)).astype(np.float32)
    arrays = {"w": blockfp.quantize(x, "nvfp4"), "v": blockfp.quantize(x, "mxfp8_e4m3"), "b": x[0], "i": np.arange(4)}
    blockfp.save(folder / "model.safetensors", arrays, metadata={"format": "np"})
    blockfp.save(folder / "parts.safetensors", arrays, file_bytes=1000)
    np.save(folder / "x.npy", x)
    np.savez(folder / "x.npz", x=x, half=x.astype(np.float16), i=np.arange(3))
    np.savez_compressed(folder / "packed.npz", x=x, z=np.zeros((64, 64), np.float32))
    torch.manual_seed(0)
    model = torch.nn.Sequential(bfp.Linear(32, 32, recipe="nvfp4"), bfp.Linear(32, 16, recipe="fp8_delayed"))
    optimizer = AdamW(model.parameters(), lr=0.1)
    extra = {"cursor": torch.arange(3), "loss": 0.5, "name": "x"}
    bfp.save_checkpoint(folder / "run", model, optimizer, step=2, extra=extra)


def mutated(rng: random.Random, content: bytes) -> bytes:
    """A few bytes flipped, cut out, doubled, or replaced by numbers and names that readers meet elsewhere."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at, length = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 4, 8, 100))
        kind = rng.randrange(6)
        if kind == 0 and data:
            data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at : at + length]
        elif kind == 2:
            data[at:at] = data[at : at + length]
        elif kind == 3:
            data[at : at + length] = rng.randbytes(length)
        elif kind == 4:
            data[at : at + 8] = rng.choice(_NUMBERS)
        else:
            data[at : at + 1] = rng.choice(_TOKENS)
    return bytes(data[: rng.randrange(len(data) + 1)] if rng.random() < 0.1 else data)


_NUMBERS = [(n % 2**64).to_bytes(8, "little") for n in (0, -1, 2**31, 2**32, 2**62, 2**63, 100_000_000, 3 * 2**30)]
_TOKENS = [b'"', b"{", b"}", b"[", b"]", b",", b":", b"-", b"1e400", b"NaN", b"Infinity", b"null", b"\x00", b"\xff", b"../"]
_TOKENS += [b"[" * 5000, b"9" * 5000, b"9223372036854775808", b"'", b"(", b")", b"\x1b[2J", b"(" * 300, b"_format_", b"true"]

_VALUES = [None, True, -1, 0, 1, 2**31, 2**62, 2**63, 2**64, 10**400, 1e400, float("nan"), 0.5, "", "F32", "nvfp4", "../x"]
_VALUES += ["/dev/zero", "x\0y", "\ud800", "\x1b[2J", "a" * 100_000, [], [1], [2**62, 2**62], [0, 2**63], [[]], {}, {"a": 1}]
_VALUES += [[1] * 70, [10**400] * 30, ["1", 2], "fp8_e4m3", "NVFP4", "float64", "__0_0.distcp", "manifest.json", ".", ".."]


def changed(rng: random.Random, value: object) -> object:
    """A tree of JSON with one value, somewhere in it, replaced, taken out, doubled, or found under another name."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return deep(rng) if rng.random() < 0.05 else rng.choice(_VALUES)
    if isinstance(value, list):
        at = rng.randrange(len(value))
        return [*value[:at], changed(rng, value[at]), *value[at + 1 :]]
    key = rng.choice(list(value))
    kind = rng.randrange(8)
    if kind == 0:
        return {name: inner for name, inner in value.items() if name != key}
    if kind == 1:
        return {str(rng.choice(_VALUES))[:200] if name == key else name: inner for name, inner in value.items()}
    if kind == 2:
        return value | {str(rng.choice(_VALUES))[:200]: value[key]}
    return value | {key: changed(rng, value[key])}


def deep(rng: random.Random) -> object:
    value: object = []
    for _ in range(rng.choice((10, 900))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def text_of(value: object) -> str:
    """A tree as JSON, by a thread of its own: pytest's frames would leave too little of this one's stack for `deep`."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(json.dumps, value).result()


def bad_safetensors(rng: random.Random, whole: bytes) -> bytes:
    """A header changed, with a length that fits it, or any bytes."""
    if rng.random() < 0.4:
        return mutated(rng, whole)
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    if rng.random() < 0.4 and "__metadata__" in header:
        described = json.loads(header["__metadata__"]["blockfp"])
        header["__metadata__"]["blockfp"] = text_of(changed(rng, described))
    else:
        header = changed(rng, header)
    text = text_of(header).encode()
    return len(text).to_bytes(8, "little") + text + whole[8 + length :]


def bad_npy(rng: random.Random, whole: bytes) -> bytes:
    """Another header for the same data, or any bytes."""
    if rng.random() < 0.5:
        return mutated(rng, whole)
    shapes = ("(20, 40)", "(-1, 40)", "(0, 40)", f"({2**62}, {2**62})", "(True, 4)", "(20, 40, 1e5)", "()", "(1,) * 100", "5")
    dtypes = ("'<f4'", "'>f8'", "'|O'", "'|V2'", "'|V0'", "'|S0'", f"'({2**40},)f4'", "[('a', '<f4')]", "'M8[s]'", "None", "1")
    order = rng.choice(("True", "False", "None", "[]"))
    header = f"{{'descr': {rng.choice(dtypes)}, 'fortran_order': {order}, 'shape': {rng.choice(shapes)}, }}"
    text = rng.choice((header, header + " " * 20_000, "(" * 9000, "{" * 500, header.replace("'", '"'), header[:-4])).encode()
    data = rng.choice((whole[128:], b"", bytes(10)))
    if rng.random() < 0.2:
        return b"\x93NUMPY\x02\x00" + rng.choice((len(text), 2**32 - 1)).to_bytes(4, "little") + text + data
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


def bad_npz(rng: random.Random, whole: bytes) -> bytes:
    """Members that aren't arrays, lie about their size, are encrypted or packed otherwise; or any bytes."""
    if rng.random() < 0.5:
        return mutated(rng, whole)
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    content = io.BytesIO()
    method = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    with zipfile.ZipFile(content, "w", method) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that are there twice
        for name, member in members.items():
            archive.writestr(name if rng.random() < 0.8 else rng.choice(("x.npy", "../x.npy", ".npy", "\x1b[2J.npy")), member)
            if rng.random() < 0.3:
                archive.writestr("more.npy", bad_npy(rng, member))
    data = bytearray(content.getvalue())
    if rng.random() < 0.5:  # sizes, flags and methods in the directory
        at = data.rfind(b"PK\x01\x02")
        field, size = rng.choice(((8, 2), (10, 2), (20, 4), (24, 4), (42, 4)))
        data[at + field : at + field + size] = rng.choice((1, 9, 2**31 - 1, 2**32 - 2, 0)).to_bytes(8, "little")[:size]
    return bytes(data)


def bad_index(rng: random.Random, whole: bytes) -> bytes:
    """The index of DCP with a value changed somewhere, pickled again; or any bytes."""
    if rng.random() < 0.4:
        return mutated(rng, whole)
    if rng.random() < 0.1:
        return rng.choice(
            (b"\x80\x04}r\xff\xff\xff\x7f.", b"\x80\x04]" * 1000 + b".", b"\x80\x04\x8e" + b"\xff" * 7 + b"\x0f.")
        )
    index = pickle.loads(whole)
    tensors, places = index.state_dict_metadata, index.storage_data
    name, key = rng.choice(list(tensors)), rng.choice(list(places))
    what, where = tensors[name], places[key]
    import torch

    value = rng.choice(_VALUES)
    kind = rng.randrange(10)
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        del places[key]
    elif kind == 2:
        setattr(where, rng.choice(("relative_path", "offset", "length", "transform_descriptors")), value)
    elif kind == 3 and hasattr(what, "chunks"):
        what.chunks = rng.choice(([], what.chunks * 2, value))
    elif kind == 4 and getattr(what, "chunks", None):
        setattr(
            what.chunks[0],
            rng.choice(("offsets", "sizes")),
            rng.choice((value, torch.Size([1]), torch.Size([8, 8]), (2**62, 4))),
        )
    elif kind == 5 and hasattr(what, "size"):
        what.size = rng.choice((value, torch.Size([2**40, 4]), torch.Size([1] * 70), torch.Size([])))
    elif kind == 6 and hasattr(what, "properties"):
        what.properties.dtype = rng.choice((torch.float64, torch.int8, torch.complex128, torch.float32))
    elif kind == 7:
        tensors[rng.choice(("model.x", "\x1b[2J", "extra.own.y", "optimizer.state.0.weight.master"))] = what
    elif kind == 8:
        vars(what).clear()
    else:
        setattr(index, rng.choice(("state_dict_metadata", "storage_data", "planner_data")), value)
    return pickle.dumps(index)


def bad_checkpoint(rng: random.Random, checkpoint: Path) -> None:
    """Damages a file of a checkpoint; mostly its manifest is made anew, so that no checksum shows it."""
    from blockfp.files import manifest

    kind = rng.randrange(5)
    data, index, listed = checkpoint / "__0_0.distcp", checkpoint / ".metadata", checkpoint / manifest.MANIFEST
    if kind == 0:
        data.write_bytes(mutated(rng, data.read_bytes()))
    elif kind in (1, 2):
        index.write_bytes(bad_index(rng, index.read_bytes()))
    elif kind == 3:
        other = rng.choice((data, index))
        other.unlink()
        how = rng.randrange(4)
        if how == 0:
            os.mkfifo(other)
        elif how == 1:
            other.symlink_to(rng.choice(("/dev/zero", "/proc/self/mem", "nowhere", "../../run/step-00000002/.metadata")))
        elif how == 2:
            other.mkdir()
    if kind == 4:
        text = listed.read_bytes()
        content = json.loads(text)
        if rng.random() < 0.2:
            content["files"]["/dev/zero" if rng.random() < 0.5 else "../../x"] = {"length": 0, "sha256": "0" * 64}
        listed.write_bytes(mutated(rng, text) if rng.random() < 0.3 else text_of(changed(rng, content)).encode())
    elif rng.random() < 0.8:
        names = [path.name for path in checkpoint.iterdir() if path.name != manifest.MANIFEST and path.is_file()]
        regular = {name: sum_of(checkpoint / name) for name in names if not (checkpoint / name).is_symlink()}
        kept = json.loads(listed.read_text())["files"]
        sums = {name: manifest.FileSum(0, kept[name]["sha256"]) for name in kept}
        listed.write_bytes(manifest.text_of(sums | regular))
    else:
        listed.unlink()


KINDS = ("safetensors", "parts", "npy", "npz", "checkpoint", "dcp")


def make(rng: random.Random, whole: Path, folder: Path) -> tuple[str, Path]:
    """A bad file or folder of some kind: what kind, and where it is."""
    kind = rng.choice(KINDS)
    if kind == "safetensors":
        path = folder / "model.safetensors"
        path.write_bytes(bad_safetensors(rng, (whole / path.name).read_bytes()))
    elif kind == "parts":
        for part in whole.glob("parts*"):
            shutil.copy(part, folder)
        path = folder / "parts.safetensors.index.json"
        text = path.read_bytes()
        if rng.random() < 0.3:
            part = rng.choice(sorted(folder.glob("parts-*")))
            part.write_bytes(bad_safetensors(rng, part.read_bytes()))
        else:
            path.write_bytes(mutated(rng, text) if rng.random() < 0.3 else text_of(changed(rng, json.loads(text))).encode())
    elif kind == "npy":
        path = folder / "x.npy"
        path.write_bytes(bad_npy(rng, (whole / path.name).read_bytes()))
    elif kind == "npz":
        path = folder / "x.npz"
        path.write_bytes(bad_npz(rng, (whole / rng.choice(("x.npz", "packed.npz"))).read_bytes()))
    else:
        shutil.copytree(whole / "run", folder / "run")
        path = folder / "run" / STEP
        bad_checkpoint(rng, path)
        if kind == "dcp":  # as if somebody else had written it
            (path / "manifest.json").unlink(missing_ok=True)
            path = path.rename(folder / "foreign")
    return kind, path
