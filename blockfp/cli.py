"""The `blockfp` command: info, formats, check, quantize, dequantize, convert, export. Loads the installed backends."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

from . import __version__
from .formats import FORMATS, block_name
from .kernels import cuda_library, routes

try:
    import typer
    from typer import Context
    from typer.core import TyperGroup

    from .commands import check, files
    from .commands.console import refused, say
except ModuleNotFoundError as error:
    sys.exit(f"the blockfp command needs {error.name}: pip install 'blockfp[cli]'")


class _SayingErrors(TyperGroup):
    """Reports bad input and disk errors in one line and exits with code 2."""

    def invoke(self, ctx: Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # the reader closed the pipe, as `head` does
        except (OSError, ValueError, MemoryError) as error:
            raise refused(str(error) or repr(error)) from error


app = typer.Typer(
    cls=_SayingErrors,
    no_args_is_help=True,
    rich_markup_mode="markdown",  # joins the lines of a paragraph
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"blockfp {__version__}")
        raise typer.Exit


_Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)]


@app.callback()
def options(version: _Version = False) -> None:
    """Block-scaled FP8, FP6, FP4 and INT8 arrays, with the same bits in NumPy, JAX and PyTorch."""


@app.command()
def info(as_json: _Json = False) -> None:
    """Prints the available backends, kernels, instruction sets, devices and versions, and how products of formats run."""
    lines = check.versions()
    for name, load in check.BACKENDS.items():
        try:
            lines[f"backend {name}"] = load().version
        except ImportError as error:
            lines[f"backend {name}"] = f"unavailable: {error}"
        except Exception as error:
            lines[f"backend {name}"] = f"broken: {type(error).__name__}: {error}"
    lines["CUDA kernels"] = cuda_library.status()
    if as_json:
        products = [dict(zip(("device", "operands", "how"), row, strict=True)) for row in routes.table()]
        typer.echo(json.dumps({**lines, "products": products}, indent=2))
        return
    for name, line in lines.items():
        say(f"{name:25} {line}")
    say("")
    say("products of quantized operands a [m, k] and b [n, k]:")
    for device, operands, how in routes.table():
        say(f"{device:17} {operands:66} {how}")


@app.command()
def formats(as_json: _Json = False) -> None:
    """Prints every format: its element, its blocks and their scale, and the bits per element of a large array."""
    rows = [
        {
            "name": one.name,
            "element": one.element.name,
            "block": block_name(one.block),
            "scale": one.scale.name,
            "bits per element": 8 * one.bytes_per_element,
        }
        for one in FORMATS
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    say(f"{'name':26} {'element':8} {'block':11} {'scale':20} bits per element")
    for name, element, block, scale, bits in (row.values() for row in rows):
        say(f"{name:26} {element:8} {block:11} {scale:20} {bits:.4g}")


for command in (
    check.check_command,
    files.quantize_command,
    files.dequantize_command,
    files.convert_command,
    files.export_command,
):
    app.command(command.__name__.removesuffix("_command"))(command)


def main() -> None:
    """Runs the `blockfp` command."""
    app()
