"""Terminal output, errors and checks of arguments for all commands."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..files import saving, untrusted
from ..formats import Format

MODEL_FILE = "A .safetensors, .npy or .npz file, an index of .safetensors files, or a folder with a model"
"""What a command takes as a model."""

out = Console()
err = Console(stderr=True)


def say(text: str, style: str = "", console: Console = out) -> None:
    """Prints a line verbatim, without markup, wrapping or control characters, so that it can be searched for."""
    console.print(Text(untrusted.printable(text), style), soft_wrap=True)


def counted(number: int, noun: str) -> str:
    """Returns "1 tensor", "2 tensors"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _silence(ctx: typer.Context, quiet: bool) -> None:
    """Silences standard output until the command ends."""
    if quiet:
        out.quiet = True
        ctx.call_on_close(lambda: setattr(out, "quiet", False))


Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Print errors alone; the exit code tells the result.", callback=_silence),
]


def among(*names: str) -> Callable[[str], list[str]]:
    """Returns the completion of an option that takes one of these names."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def format_of(name: str) -> Format:
    try:
        return Format.parse(name)
    except ValueError as error:
        raise refused(f"--format: {error}") from error


def refused(why: object) -> typer.Exit:
    """Prints why the input is refused; returns the exit to raise."""
    say(f"error: {why}", "red", err)
    return typer.Exit(2)


def progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=err, transient=True, disable=out.quiet)


def check_output(path: Path, suffix: str, option: str, *, force: bool = True) -> None:
    """Checks, before any work, that the output can be written."""
    if path.suffix != suffix:
        raise refused(f"{option} {path}: the name must end in {suffix}")
    if not path.parent.is_dir():
        raise refused(f"{option} {path}: {path.parent} is not a folder")
    if not os.access(path.parent, os.W_OK):
        raise refused(f"{option} {path}: {path.parent} isn't writable")
    if path.is_dir():
        raise refused(f"{option} {path}: is a folder")
    for there in (path, path.with_name(path.name + saving.INDEX)):
        if there.exists() and not force:
            raise refused(f"{option} {there}: already exists; --force overwrites it")
