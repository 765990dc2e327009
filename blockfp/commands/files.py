"""The commands that write models: quantize, dequantize, convert, export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.markup import escape

from ..array import QuantizedArray
from ..check import backends
from ..check.measure import measure
from ..definition.numerics import Quantized
from ..files import export, manifest, saving, untrusted
from ..files.contents import Contents, Weight
from ..files.layouts.known import LAYOUTS, in_formats_of, quantized_as_used
from ..files.layouts.layout import joined_by_servers, write_layout
from ..files.modelfile import Model, Tensor
from ..files.quantized_model import contents_of, dequantize_model, quantize_model
from ..formats import NAMES, Format
from .console import MODEL_FILE, Quiet, among, check_output, counted, format_of, progress, refused, say

Force = Annotated[bool, typer.Option("--force", help="Overwrite OUT if it exists.")]
Source = Annotated[Path, typer.Argument(metavar="IN", help=f"{MODEL_FILE}.")]
Target = Annotated[Path, typer.Argument(metavar="OUT", help="The .safetensors file to write.")]


def quantize_command(
    source: Source,
    target: Target,
    format: Annotated[str, typer.Option("--format", help="Format name.", autocompletion=among(*NAMES))],
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Quantizes a model into codes and scales; tensors with fewer than two axes or another dtype are copied."""
    parsed = format_of(format)
    check_output(target, ".safetensors", "OUT", force=force)
    model = saving.open_whole(source)
    _convert(model, target, lambda path, done: quantize_model(model, parsed, path, done))


def _convert(model: Model, target: Path, convert: Callable[[Path, Callable[[Tensor], None]], None]) -> None:
    with progress() as bar:
        task = bar.add_task(escape(target.name), total=len(model.tensors))
        with saving.in_one_file(target) as temporary:
            convert(temporary, lambda _: bar.advance(task))
    say(f"wrote {target}")


def dequantize_command(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="A model written by blockfp quantize or export, in one file or several.")
    ],
    target: Target,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, float16 or bfloat16. Default: each tensor's original dtype.")
    ] = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Dequantizes a model and writes its values."""
    if dtype not in (None, "float32", "float16", "bfloat16"):
        raise refused(f"--dtype {dtype}: must be float32, float16 or bfloat16")
    check_output(target, ".safetensors", "OUT", force=force)
    model = saving.open_whole(source)
    _convert(model, target, lambda path, done: dequantize_model(model, path, dtype, done))


def _check_file_bytes(file_bytes: int | None) -> None:
    if file_bytes is not None and file_bytes < 1:
        raise refused(f"--file-bytes {file_bytes}: must be 1 or more")


def _check_folder(target: Path, force: bool) -> None:
    """Refuses a non-empty folder, unless `force` allows overwriting."""
    if target.exists() and (not target.is_dir() or (any(target.iterdir()) and not force)):
        raise refused(f"OUT {target}: must be a new or empty folder; --force overwrites files of the same names")


FileBytes = Annotated[
    int | None, typer.Option("--file-bytes", help="Maximum size of a file; larger models get several files and an index.")
]


def convert_command(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="A quantized model: a .safetensors file, its index, or a folder with them.")
    ],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="The folder to write; for blockfp's layout a .safetensors file.")
    ],
    layout: Annotated[
        str, typer.Option("--layout", help=f"One of blockfp, {', '.join(LAYOUTS)}.", autocompletion=among("blockfp", *LAYOUTS))
    ],
    file_bytes: FileBytes = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Converts a quantized model to another library's layout, or a released model to blockfp's.

    Codes and scales are kept if the layout supports their format. Requantized weights are listed with their SQNR. Activation
    scales are only written to blockfp's layout; otherwise they are omitted and listed.
    """
    if layout != "blockfp" and layout not in LAYOUTS:
        raise refused(f"--layout {layout}: must be one of blockfp, {', '.join(LAYOUTS)}")
    _check_file_bytes(file_bytes)
    if layout == "blockfp":
        check_output(target, ".safetensors", "OUT", force=force)
    else:
        _check_folder(target, force)
    model = contents_of(saving.open_whole(source))
    if not model.weights:
        raise refused(f"IN {source}: has no quantized weights; create them by blockfp quantize")
    noise: dict[str, tuple[Format, Format, float]] = {}

    def requantized(weight: Weight, values: np.ndarray, q: QuantizedArray) -> None:
        parts = Quantized(q.codes, q.scales, q.tensor_scale)
        noise[weight.name] = weight.format, q.format, measure(values, parts, q.dequantize(), q.format).sqnr_db

    with progress() as bar:
        task = bar.add_task(escape(target.name), total=None)

        def done(_: Tensor) -> None:
            bar.advance(task)

        if layout == "blockfp":
            export.export_quantized(model, target, file_bytes, done)
        else:
            model = in_formats_of(LAYOUTS[layout], model, requantized)
            write_layout(LAYOUTS[layout], model, target, file_bytes, done)
    _say_joined(model, layout)
    if model.left_out:
        what = "activation scales, which the new config.json doesn't describe"
        say(f"omitted: {_some(list(map(untrusted.printable, model.left_out)), what)}", "yellow")
    for name, (before, after, sqnr) in noise.items():
        say(f"requantized {untrusted.printable(name)}: {before} to {after}, SQNR {sqnr:.1f} dB", "yellow")
    kept = len(model.weights) - len(noise)
    weights, others = counted(kept, "quantized weight"), counted(len(model.others), "other tensor")
    say(f"wrote {target}: {weights} unchanged, {len(noise)} requantized, {others}")


TARGETS = ("quantized", "high-precision", *LAYOUTS)


def export_command(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A run's folder, one of its checkpoints, or any DCP folder.")],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="The .safetensors file to write; a folder for other libraries' layouts.")
    ],
    to: Annotated[
        str, typer.Option("--to", help=f"One of {', '.join(TARGETS)}.", autocompletion=among(*TARGETS))
    ] = "quantized",
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="With --to high-precision: float32, float16 or bfloat16. Default: each weight's dtype."),
    ] = None,
    quantize: Annotated[
        bool,
        typer.Option("--quantize", help="Write weights of layers with weights='high_precision' as the codes of their forward."),
    ] = False,
    step: Annotated[int | None, typer.Option("--step", help="The checkpoint's step. Default: the last.")] = None,
    file_bytes: FileBytes = None,
    prefix: Annotated[
        str | None,
        typer.Option("--prefix", help="Prefix of the model's names in the checkpoint, which is removed. Default: model."),
    ] = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Exports the model of a training checkpoint: its stored codes, or values from the optimizer's fp32 weights.

    With --quantize, weights that are stored as values and multiplied as codes are written as these codes.
    """
    if to not in TARGETS:
        raise refused(f"--to {to}: must be one of {', '.join(TARGETS)}")
    if dtype not in (None, "float32", "float16", "bfloat16"):
        raise refused(f"--dtype {dtype}: must be float32, float16 or bfloat16")
    if dtype and to != "high-precision":
        raise refused(f"--dtype {dtype}: needs --to high-precision; codes have no dtype to choose")
    if quantize and to == "high-precision":
        raise refused("--quantize: writes codes; leave it out with --to high-precision")
    _check_file_bytes(file_bytes)
    if to in LAYOUTS:
        _check_folder(target, force)
    else:
        check_output(target, ".safetensors", "OUT", force=force)
    try:
        open_checkpoint = backends.find("torch", "torch_backend.checkpoint.plain_values", "open_checkpoint")
    except ImportError as error:
        raise refused(f"PyTorch checkpoints can't be read: {error}") from error
    of_codes: list[str] = []
    with progress() as bar:
        model = export.contents(open_checkpoint(source, step), prefix)
        casts = model.casts
        if quantize:
            if not model.weights and not casts:
                raise refused(f"--quantize: {source} records no format of any weight")
            model = quantized_as_used(model, LAYOUTS.get(to))
        each = (1 if to == "high-precision" else len(weight.parts) for weight in model.weights.values())
        task = bar.add_task(escape(target.name), total=len(model.others) + sum(each))

        def done(_: Tensor) -> None:
            bar.advance(task)

        if to in LAYOUTS:
            write_layout(LAYOUTS[to], model, target, file_bytes, done)
        elif to == "quantized":
            export.export_quantized(model, target, file_bytes, done)
        else:
            of_codes = export.export_values(model, target, dtype, file_bytes, done)
    if not (model.path / manifest.MANIFEST).exists():
        say(f"{model.path} has no checksums: its files may have changed since they were saved", "yellow")
    _say_joined(model, to)
    if of_codes:
        say(f"dequantized from codes, because the checkpoint has no fp32 weight: {_some(of_codes, 'weights')}")
    if casts and not quantize and to != "high-precision":
        say(f"written as values, which --quantize writes as the codes of their forward: {_some(list(casts), 'weights')}")
    if model.left_out:
        say(f"omitted, because only training needs it: {_some(model.left_out, 'tensors')}")
    weights, others = counted(len(model.weights), "quantized weight"), counted(len(model.others), "other tensor")
    say(f"wrote {target}: {weights} and {others} of {model.path.name}")


def _say_joined(model: Contents, layout: str) -> None:
    if layout in LAYOUTS and (joined := joined_by_servers(model.weights)):
        say(untrusted.printable(joined), "yellow")


def _some(names: list[str], what: str) -> str:
    return f"{len(names)} {what} ({', '.join(names[:4])}{' ..' if len(names) > 4 else ''})"
