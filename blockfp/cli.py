"""The `blockfp` command: info, check, quantize, dequantize, export. Loads the backends that are installed."""

from __future__ import annotations

import importlib
import importlib.util
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

from . import __version__, cuda, manifest, native, products, saving, untrusted
from .atomic import replacing
from .crosscheck import Backend, Definition, check
from .formats import FORMATS, Format
from .numerics import Quantized

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.text import Text
    from typer import Context
    from typer.core import TyperGroup

    from . import compressed_tensors, export
    from .modelfile import Model, Tensor, open_model
    from .report import Findings, format_table, tensor_table, to_json
    from .store import dequantize_model, quantize_model
except ModuleNotFoundError as error:
    sys.exit(f"the blockfp command needs {error.name}: pip install 'blockfp[cli]'")


class _SayingErrors(TyperGroup):
    """Commands whose input or disk is bad end with a line that says so, and 2."""

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
    """Prints a line as it is: no markup in it, no wrapping, so that it can be searched for; nothing that a terminal obeys."""
    console.print(Text(untrusted.printable(text), style), soft_wrap=True)


def main() -> None:
    """The entry point of the `blockfp` command."""
    app()


class Kernels:
    """The CPU kernels behind NumPy arrays."""

    name = "kernels"

    @property
    def version(self) -> str:
        return native.status()

    def quantize(self, x: np.ndarray, format: Format) -> Quantized:
        return native.quantize(x, format)

    def dequantize(self, q: Quantized, format: Format, dtype: str, columns: int) -> np.ndarray:
        return native.dequantize(*q, format, dtype, columns=columns)


def _kernels() -> Backend:
    if not native.available():
        raise ImportError(native.status())
    return Kernels()


def _find(library: str, module: str, name: str) -> Any:
    """Something of a backend's; raises ImportError where its library is not installed."""
    if importlib.util.find_spec(library) is None:
        raise ImportError(f"{library} is not installed: pip install 'blockfp[{library}]'")
    return getattr(importlib.import_module(f"blockfp.{module}"), name)


def _installed(library: str, adapter: str, name: str) -> Callable[[], Backend]:
    return lambda: _find(library, adapter, name)()


BACKENDS: dict[str, Callable[[], Backend]] = {
    "numpy": Definition,
    "kernels": _kernels,
    "jax": _installed("jax", "jax_backend.check", "JaxBackend"),
    "torch": _installed("torch", "torch_backend.check", "TorchBackend"),
    "torch-definition": _installed("torch", "torch_backend.check", "TorchDefinition"),
}
"""Every backend's name and what makes it; raises ImportError where it is not installed. The first is the reference."""


def _backends(names: list[str] | None) -> list[Backend]:
    """The named backends; by default all that are installed."""
    found = []
    for name in dict.fromkeys(names or BACKENDS):
        if name not in BACKENDS:
            raise _refused(f"--backend {name}: must be one of {', '.join(BACKENDS)}")
        try:
            found.append(BACKENDS[name]())
        except ImportError as error:
            if names:
                raise _refused(f"--backend {name}: not here: {error}") from error
    return found


def _format(name: str) -> Format:
    try:
        return Format.parse(name)
    except ValueError as error:
        raise _refused(f"--format: {error}") from error


def _refused(why: object) -> typer.Exit:
    """What ends a command because of its input, after saying why."""
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
    lines["CUDA kernels"] = cuda.status()
    for name, line in lines.items():
        say(f"{name:25} {line}")
    say("")
    say("products of quantized operands a [m, k] and b [n, k]:")
    for device, operands, how in products.table():
        say(f"{device:17} {operands:66} {how}")


FormatOption = Annotated[list[str], typer.Option("--format", help="A format's name, or all; may be repeated.")]
BackendOption = Annotated[
    list[str] | None, typer.Option("--backend", help=f"Of {', '.join(BACKENDS)}; may be repeated. Default: all that are here.")
]


@app.command("check")
def check_command(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="A .safetensors, .npy or .npz file.")],
    format: FormatOption = ["all"],  # noqa: B006
    backend: BackendOption = None,
    report: Annotated[Path | None, typer.Option(help="Write everything found to this .json file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw errors and scales into this .png file.")] = None,
    per_tensor: Annotated[bool, typer.Option("--per-tensor", help="A table line for each tensor and format.")] = False,
) -> None:
    """Quantizes every tensor with every backend and compares codes, scales and values, bit by bit.

    Exits with 0 if all bits are equal, 1 on any difference, 2 on bad input, also where no tensor can be quantized.
    """
    formats = list(FORMATS) if "all" in format else list(dict.fromkeys(map(_format, format)))
    for path, suffix, option in ((report, ".json", "--report"), (plot, ".png", "--plot")):
        if path:
            _check_output(path, suffix, option)
    models = {path: open_model(path) for path in files}
    findings = Findings(_backends(backend), formats)
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
        from .plot import draw

        with replacing(plot) as temporary:
            draw(findings, temporary)
        say(f"picture: {plot}")
    raise typer.Exit(2 if findings.empty else 0 if findings.identical else 1)


@contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    """A thread for each core; what hasn't begun when an exception comes is dropped."""
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


LAYOUTS = ("quantized", "high-precision", "compressed-tensors")


@app.command("export")
def export_command(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A run's folder, one of its checkpoints, or any DCP folder.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The .safetensors file; a folder for compressed-tensors.")],
    to: Annotated[str, typer.Option("--to", help=f"One of {', '.join(LAYOUTS)}.")] = "quantized",
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="For high-precision: float32, float16 or bfloat16. Default: each weight's own."),
    ] = None,
    step: Annotated[int | None, typer.Option("--step", help="Which checkpoint of a run. Default: the last.")] = None,
    file_bytes: Annotated[
        int | None, typer.Option("--file-bytes", help="Begin another file where one would get larger, and write an index.")
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option("--prefix", help="What the model's names begin with in the checkpoint, which they lose. Default: model."),
    ] = None,
    force: Force = False,
) -> None:
    """Writes the model of a training checkpoint: its codes as they are, or values from the optimizer's fp32 weights."""
    if to not in LAYOUTS:
        raise _refused(f"--to {to}: must be one of {', '.join(LAYOUTS)}")
    if dtype not in (None, "float32", "float16", "bfloat16"):
        raise _refused(f"--dtype {dtype}: must be float32, float16 or bfloat16")
    if dtype and to != "high-precision":
        raise _refused(f"--dtype {dtype}: goes with --to high-precision; codes have no dtype to choose")
    if file_bytes is not None and file_bytes < 1:
        raise _refused(f"--file-bytes {file_bytes}: must be 1 or more")
    folder = to == "compressed-tensors"
    if folder and target.exists() and (not target.is_dir() or (any(target.iterdir()) and not force)):
        raise _refused(f"OUT {target}: must be a new or empty folder; --force overwrites what is called the same in it")
    if not folder:
        _check_output(target, ".safetensors", "OUT", force=force)
    try:
        open_checkpoint = _find("torch", "torch_backend.checkpoint.dcp_model", "open_checkpoint")
    except ImportError as error:
        raise _refused(f"a checkpoint of PyTorch can't be read: {error}") from error
    of_codes: list[str] = []
    with _progress() as progress:
        model = export.contents(open_checkpoint(source, step), prefix)
        each = (1 if to == "high-precision" else len(weight.parts) for weight in model.weights.values())
        task = progress.add_task(escape(target.name), total=len(model.others) + sum(each))

        def done(_: Tensor) -> None:
            progress.advance(task)

        if folder:
            compressed_tensors.export(model, target, file_bytes, done)
        elif to == "quantized":
            export.export_quantized(model, target, file_bytes, done)
        else:
            of_codes = export.export_values(model, target, dtype, file_bytes, done)
    if not (model.path / manifest.MANIFEST).exists():
        say(f"{model.path} has no checksums: whether its files are what was saved is not known", "yellow")
    if of_codes:
        say(f"values of codes, since the checkpoint has no fp32 weight: {_some(of_codes, 'weights')}")
    if model.left_out:
        say(f"left out, since only training needs it: {_some(model.left_out, 'tensors')}")
    say(f"wrote {target}: {len(model.weights)} quantized weights and {len(model.others)} other tensors of {model.path.name}")


def _some(names: list[str], what: str) -> str:
    return f"{len(names)} {what} ({', '.join(names[:4])}{' ..' if len(names) > 4 else ''})"
