"""The `blockfp` command in this process."""

from typer.testing import CliRunner

from blockfp import cli


def run(*arguments):
    """What the command prints and exits with."""
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
