"""The block arithmetic's headers compile for a GPU, so that CUDA kernels can be written on them."""

import shutil
import subprocess
from pathlib import Path

import pytest

INCLUDE = Path(__file__).parents[2] / "kernels" / "include"
SOURCE = Path(__file__).with_name("headers.cu")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("architecture", ["80", "89", "90a", "100a", "120a"])
def test_headers_compile_for_gpus(architecture, tmp_path):
    command = ["nvcc", "-std=c++17", f"-gencode=arch=compute_{architecture},code=sm_{architecture}", f"-I{INCLUDE}"]
    command += ["-Werror", "all-warnings", "-c", str(SOURCE), "-o", str(tmp_path / "headers.o")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
