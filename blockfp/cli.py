"""The `blockfp` command: info, check, quantize, dequantize, convert, export. Loads the backends that are installed."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from . import __version__
from .array import QuantizedArray
from .check import backends
from .check.backends import BACKENDS
from .check.crosscheck import check
from .check.measure import measure
from .definition.numerics import Quantized
from .files import manifest, saving, untrusted
from .files.atomic import replacing
from .formats import FORMATS, Format
from .kernels import cuda_library, routes

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.text import Text
    from typer import Context
    from typer.core import TyperGroup

    from .check.comparison import Comparison, read_report
    from .check.comparison import compare as compare_reports
    from .check.report import Findings, comparison_table, format_table, tensor_table, to_json
    from .files import export
    from .files.contents import Weight
    from .files.layouts.known import LAYOUTS, in_formats_of
    from .files.layouts.layout import write_layout
    from .files.modelfile import Model, Tensor, open_model
    from .files.quantized_model import contents_of, dequantize_model, quantize_model
except ModuleNotFoundError as error:
    sys.exit(f"the blockfp command needs {error.name}: pip install 'blockfp[cli]'")


class _SayingErrors(TyperGroup):
    """Ends a command with a line and exit code 2 where its input or the disk is bad."""

    def invoke(self, ctx: Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # of a reader that has seen enough, such as head
        except (OSError, ValueError, MemoryError) as error:
            raise _refused(str(error) or repr(error)) from error


app = typer.Typer(cls=_SayingErrors, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
out = Console()
err = Console(stderr=True)


def say(text: str, style: str = "", console: Console = out) -> None:
    """Prints a line as it is: without markup, wrapping or control characters, so that it can be searched for."""
    console.print(Text(untrusted.printable(text), style), soft_wrap=True)


def main() -> None:
    """The entry point of the `blockfp` command."""
    app()


def _format(name: str) -> Format:
    try:
        return Format.parse(name)
    except ValueError as error:
        raise _refused(f"--format: {error}") from error


def _refused(why: object) -> typer.Exit:
    """Says why the input is refused; returns the exit to raise."""
    say(f"error: {why}", "red", err)
    return typer.Exit(2)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=err, transient=True)


def _check_output(path: Path, suffix: str, option: str, *, force: bool = True) -> None:
    """Refuses, before any work, what could not be written after it."""
    if path.suffix != suffix:
        raise _refused(f"{option} {path}: the name must end in {suffix}")
    if not path.parent.is_dir():
        raise _refused(f"{option} {path}: {path.parent} is not a folder")
    if not os.access(path.parent, os.W_OK):
        raise _refused(f"{option} {path}: {path.parent} can't be written to")
    if path.is_dir():
        raise _refused(f"{option} {path}: is a folder")
    for there in (path, path.with_name(path.name + saving.INDEX)):
        if there.exists() and not force:
            raise _refused(f"{option} {there}: exists already; --force overwrites it")


def _versions() -> dict[str, str]:
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    libraries = {name: metadata.version(name) for name in ("numpy", "ml_dtypes", "apache-tvm-ffi")}
    return {"blockfp": __version__, "python": python, **libraries}


@app.command()
def info() -> None:
    """Says which backends, kernels, instruction sets, devices and versions are here, and how products of formats run."""
    lines = _versions()
    for name, load in BACKENDS.items():
        try:
            lines[f"backend {name}"] = load().version
        except ImportError as error:
            lines[f"backend {name}"] = f"not here: {error}"
    lines["CUDA kernels"] = cuda_library.status()
    for name, line in lines.items():
        say(f"{name:25} {line}")
    say("")
    say("products of quantized operands a [m, k] and b [n, k]:")
    for device, operands, how in routes.table():
        say(f"{device:17} {operands:66} {how}")


FormatOption = Annotated[list[str], typer.Option("--format", help="A format's name, or all; may be repeated.")]
OWN = "package.module:attribute for one of your own (blockfp.check.crosscheck.Backend)"
BackendOption = Annotated[
    list[str] | None,
    typer.Option("--backend", help=f"Of {', '.join(BACKENDS)}, or {OWN}; may be repeated. Default: all that are here."),
]
CompareOption = Annotated[
    tuple[Path, Path] | None,
    typer.Option("--compare", metavar="A.json B.json", help="Compare two reports, of two machines or releases, instead."),
]


@app.command("check")
def check_command(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE...", help="A .safetensors, .npy or .npz file.", show_default=False)
    ] = None,
    format: FormatOption = ["all"],  # noqa: B006
    backend: BackendOption = None,
    compare: CompareOption = None,
    report: Annotated[Path | None, typer.Option(help="Write everything found to this .json file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw errors and scales into this .png file.")] = None,
    per_tensor: Annotated[bool, typer.Option("--per-tensor", help="A table line for each tensor and format.")] = False,
) -> None:
    """Quantizes every tensor with every backend and compares codes, scales and values, bit by bit.

    With --compare it compares what two reports (--report) say of the same tensors instead, by SHA-256. Exits with 0 if all bits
    are equal, 1 on any difference, 2 on bad input, also where no tensor can be quantized.
    """
    if compare:
        given = {"FILE": files, "--backend": backend, "--report": report, "--plot": plot, "--per-tensor": per_tensor}
        given["--format"] = format != ["all"]
        if any(given.values()):
            raise _refused(f"--compare compares two reports, and takes no {' or '.join(n for n, v in given.items() if v)}")
        raise typer.Exit(_print_comparison(compare_reports(*map(read_report, compare))))
    if not files:
        raise _refused("FILE: name a .safetensors, .npy or .npz file, or two reports with --compare")
    formats = list(FORMATS) if "all" in format else list(dict.fromkeys(map(_format, format)))
    for path, suffix, option in ((report, ".json", "--report"), (plot, ".png", "--plot")):
        if path:
            _check_output(path, suffix, option)
    models = {path: open_model(path) for path in files}
    findings = Findings(backends.load(backend), formats)
    _run_checks(models, findings)

    for line in tensor_table(findings) if per_tensor else format_table(findings):
        say(line, "red" if " NO (" in line else "")
    _print_skipped(findings, None if per_tensor else 8)
    _print_verdict(findings)
    if report:
        with replacing(report) as temporary:
            temporary.write_text(json.dumps(to_json(findings, _versions()), indent=1, allow_nan=False) + "\n")
        say(f"report: {report}")
    if plot:
        from .check.plot import draw

        with replacing(plot) as temporary:
            draw(findings, temporary)
        say(f"picture: {plot}")
    raise typer.Exit(2 if findings.empty else 0 if findings.identical else 1)


@contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    """Yields a pool with a thread for each core; an exception drops the work that hasn't begun."""
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _run_checks(models: dict[Path, Model], findings: Findings) -> None:
    total = sum(not tensor.skipped for model in models.values() for tensor in model.tensors) * len(findings.formats)
    # NumPy, XLA and the kernels work without Python's lock, so two formats of a tensor go side by side.
    with _progress() as progress, _pool() as pool:
        task = progress.add_task("", total=total)
        for path, model in models.items():
            findings.files[path] = []
            findings.skipped[path] = [tensor for tensor in model.tensors if tensor.skipped]
            for tensor in model.tensors:
                if tensor.skipped:
                    continue
                progress.update(task, description=escape(untrusted.printable(tensor.name)))
                x = tensor.read()
                findings.inputs[path, tensor.name] = hashlib.sha256(x.tobytes()).hexdigest()
                running = [pool.submit(check, x, format, findings.backends) for format in findings.formats]
                checks = []
                for future in running:
                    checks.append(future.result())
                    progress.advance(task)
                findings.files[path].append((tensor, checks))


def _print_skipped(findings: Findings, shown: int | None) -> None:
    for path, tensors in findings.skipped.items():
        reasons: dict[str, list[str]] = {}
        for tensor in tensors:
            reasons.setdefault(tensor.skipped or "", []).append(tensor.name)
        for reason, names in reasons.items():
            more = f" and {len(names[shown:])} more (--per-tensor lists them)" if shown and names[shown:] else ""
            say(f"skipped in {path.name}, {reason}: {', '.join(names[:shown])}{more}")


def _print_verdict(findings: Findings, shown: int = 20) -> None:
    differences = findings.differences()
    for path, tensor, format, difference in differences[:shown]:
        say(f"{path}, {tensor.name}, {format}: {difference}", "red")
    if len(differences) > shown:
        say(f"and {len(differences) - shown} more", "red")
    tensors = sum(len(tensors) for tensors in findings.files.values())
    names = ", ".join(backend.name for backend in findings.backends)
    what = f"{tensors} tensors in {len(findings.formats)} formats through {names}"
    if findings.empty:
        say(f"{what}: nothing to check, which takes float32, float16 or bfloat16 of two or more axes", "red")
    elif differences:
        say(f"{what}: bits differ", "red")
    elif len(findings.backends) == 1:
        say(f"{what}: only one backend, nothing to compare it with", "yellow")
    else:
        say(f"{what}: all bits equal", "green")


def _print_comparison(comparison: Comparison, shown: int = 20) -> int:
    """Prints the differences of two reports and returns the exit code."""
    for remark in comparison.remarks:
        say(f"A and B differ in {remark}")
    for line in comparison_table(comparison):
        say(line, "red" if " NO (" in line else "")
    for difference in comparison.differences[:shown]:
        say(difference, "red")
    if len(comparison.differences) > shown:
        say(f"and {len(comparison.differences) - shown} more", "red")
    what = f"{sum(comparison.compared.values())} tensors in {len(comparison.compared)} formats, counted in each"
    if not comparison.compared:
        say("the reports have no tensor in common in any format", "red")
        return 2
    say(f"{what}: {'all bits equal' if comparison.equal else 'reports differ'}", "green" if comparison.equal else "red")
    return 0 if comparison.equal else 1


Force = Annotated[bool, typer.Option("--force", help="Overwrite OUT if it exists.")]
Source = Annotated[Path, typer.Argument(metavar="IN", help="A .safetensors, .npy or .npz file.")]
Target = Annotated[Path, typer.Argument(metavar="OUT", help="The .safetensors file to write.")]


@app.command("quantize")
def quantize_command(
    source: Source,
    target: Target,
    format: Annotated[str, typer.Option("--format", help="A format's name.")],
    force: Force = False,
) -> None:
    """Writes a model's codes and scales; tensors of fewer than two axes or another type are copied."""
    parsed = _format(format)
    _check_output(target, ".safetensors", "OUT", force=force)
    model = open_model(source)
    _convert(model, target, lambda done: quantize_model(model, parsed, target, done))


def _convert(model: Model, target: Path, convert: Callable[[Callable[[Tensor], None]], None]) -> None:
    with _progress() as progress:
        task = progress.add_task(escape(target.name), total=len(model.tensors))
        with saving.in_one_file(target):
            convert(lambda _: progress.advance(task))
    say(f"wrote {target}")


@app.command("dequantize")
def dequantize_command(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="What blockfp quantize or export wrote, in one file or several.")
    ],
    target: Target,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, float16 or bfloat16. Default: each tensor's original one.")
    ] = None,
    force: Force = False,
) -> None:
    """Writes the values of a quantized model."""
    if dtype not in (None, "float32", "float16", "bfloat16"):
        raise _refused(f"--dtype {dtype}: must be float32, float16 or bfloat16")
    _check_output(target, ".safetensors", "OUT", force=force)
    model = saving.open_whole(source)
    _convert(model, target, lambda done: dequantize_model(model, target, dtype, done))


def _check_file_bytes(file_bytes: int | None) -> None:
    if file_bytes is not None and file_bytes < 1:
        raise _refused(f"--file-bytes {file_bytes}: must be 1 or more")


def _check_folder(target: Path, force: bool) -> None:
    """Refuses a folder that holds something, unless it may be overwritten."""
    if target.exists() and (not target.is_dir() or (any(target.iterdir()) and not force)):
        raise _refused(f"OUT {target}: must be a new or empty folder; --force overwrites files of the same names")


FileBytes = Annotated[
    int | None, typer.Option("--file-bytes", help="Begin another file where one would get larger, and write an index.")
]


@app.command("convert")
def convert_command(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="A quantized model: a .safetensors file, its index, or a folder with them.")
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; for blockfp's layout a .safetensors file.")],
    layout: Annotated[str, typer.Option("--layout", help=f"One of blockfp, {', '.join(LAYOUTS)}.")],
    file_bytes: FileBytes = None,
    force: Force = False,
) -> None:
    """Writes a quantized model in another library's layout, or a released one in blockfp's.

    Codes and scales stay as they are where the layout has their format; what has to be requantized is named, with its SQNR.
    """
    if layout != "blockfp" and layout not in LAYOUTS:
        raise _refused(f"--layout {layout}: must be one of blockfp, {', '.join(LAYOUTS)}")
    _check_file_bytes(file_bytes)
    if layout == "blockfp":
        _check_output(target, ".safetensors", "OUT", force=force)
    else:
        _check_folder(target, force)
    model = contents_of(saving.open_whole(source))
    if not model.weights:
        raise _refused(f"IN {source}: has no quantized weights; blockfp quantize makes them")
    noise: dict[str, tuple[Format, Format, float]] = {}

    def requantized(weight: Weight, values: np.ndarray, q: QuantizedArray) -> None:
        parts = Quantized(q.codes, q.scales, q.tensor_scale)
        noise[weight.name] = weight.format, q.format, measure(values, parts, q.dequantize(), q.format).sqnr_db

    with _progress() as progress:
        task = progress.add_task(escape(target.name), total=None)

        def done(_: Tensor) -> None:
            progress.advance(task)

        if layout == "blockfp":
            export.export_quantized(model, target, file_bytes, done)
        else:
            write_layout(LAYOUTS[layout], in_formats_of(LAYOUTS[layout], model, requantized), target, file_bytes, done)
    for name, (before, after, sqnr) in noise.items():
        say(f"requantized {untrusted.printable(name)}: {before} to {after}, SQNR {sqnr:.1f} dB", "yellow")
    kept = len(model.weights) - len(noise)
    say(f"wrote {target}: {kept} quantized weights as they are, {len(noise)} requantized, {len(model.others)} other tensors")


TARGETS = ("quantized", "high-precision", *LAYOUTS)


@app.command("export")
def export_command(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A run's folder, one of its checkpoints, or any DCP folder.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The .safetensors file; a folder for other libraries' layouts.")],
    to: Annotated[str, typer.Option("--to", help=f"One of {', '.join(TARGETS)}.")] = "quantized",
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="For high-precision: float32, float16 or bfloat16. Default: each weight's own."),
    ] = None,
    step: Annotated[int | None, typer.Option("--step", help="Which checkpoint of a run. Default: the last.")] = None,
    file_bytes: FileBytes = None,
    prefix: Annotated[
        str | None,
        typer.Option("--prefix", help="What the model's names begin with in the checkpoint, which they lose. Default: model."),
    ] = None,
    force: Force = False,
) -> None:
    """Writes the model of a training checkpoint: its codes as they are, or values from the optimizer's fp32 weights."""
    if to not in TARGETS:
        raise _refused(f"--to {to}: must be one of {', '.join(TARGETS)}")
    if dtype not in (None, "float32", "float16", "bfloat16"):
        raise _refused(f"--dtype {dtype}: must be float32, float16 or bfloat16")
    if dtype and to != "high-precision":
        raise _refused(f"--dtype {dtype}: goes with --to high-precision; codes have no dtype to choose")
    _check_file_bytes(file_bytes)
    if to in LAYOUTS:
        _check_folder(target, force)
    else:
        _check_output(target, ".safetensors", "OUT", force=force)
    try:
        open_checkpoint = backends.find("torch", "torch_backend.checkpoint.dcp_model", "open_checkpoint")
    except ImportError as error:
        raise _refused(f"a checkpoint of PyTorch can't be read: {error}") from error
    of_codes: list[str] = []
    with _progress() as progress:
        model = export.contents(open_checkpoint(source, step), prefix)
        each = (1 if to == "high-precision" else len(weight.parts) for weight in model.weights.values())
        task = progress.add_task(escape(target.name), total=len(model.others) + sum(each))

        def done(_: Tensor) -> None:
            progress.advance(task)

        if to in LAYOUTS:
            write_layout(LAYOUTS[to], model, target, file_bytes, done)
        elif to == "quantized":
            export.export_quantized(model, target, file_bytes, done)
        else:
            of_codes = export.export_values(model, target, dtype, file_bytes, done)
    if not (model.path / manifest.MANIFEST).exists():
        say(f"{model.path} has no checksums: its files may have changed since they were saved", "yellow")
    if of_codes:
        say(f"values of codes, since the checkpoint has no fp32 weight: {_some(of_codes, 'weights')}")
    if model.left_out:
        say(f"left out, since only training needs it: {_some(model.left_out, 'tensors')}")
    say(f"wrote {target}: {len(model.weights)} quantized weights and {len(model.others)} other tensors of {model.path.name}")


def _some(names: list[str], what: str) -> str:
    return f"{len(names)} {what} ({', '.join(names[:4])}{' ..' if len(names) > 4 else ''})"
