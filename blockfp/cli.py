"""The `blockfp` command: info, check, quantize, dequantize, convert and export. Loads the installed backends."""

from __future__ import annotations

import sys
from typing import Any

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


app = typer.Typer(cls=_SayingErrors, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.command()
def info() -> None:
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
    for name, line in lines.items():
        say(f"{name:25} {line}")
    say("")
    say("products of quantized operands a [m, k] and b [n, k]:")
    for device, operands, how in routes.table():
        say(f"{device:17} {operands:66} {how}")


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
