"""The `blockfp` command in this process, and a model for it."""

import numpy as np
from samples import sample
from typer.testing import CliRunner

from blockfp import cli
from blockfp.files.modelfile import Entry, write_safetensors

MATRIX = sample("bf16_valued", (70, 96))
HALF = sample("gaussian", (3, 40, 20), "bfloat16")
ARRAYS = {"layer.weight": MATRIX, "experts": HALF, "layer.bias": np.ones(5, np.float32), "ids": np.arange(6).reshape(2, 3)}


def run(*arguments):
    """What the command prints and exits with."""
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def plain(text):
    """Text without its line breaks, which depend on the terminal's width."""
    return " ".join(text.split())


def refused(result, *messages):
    assert result.exit_code == 2, result.output
    for message in messages:
        assert message in plain(result.stderr)


def write_model(path):
    """Writes `ARRAYS`, as PyTorch's libraries write models; returns the path."""
    write_safetensors(path, [Entry(n, a.dtype, a.shape) for n, a in ARRAYS.items()], ARRAYS.items(), {"format": "pt"})
    return path
