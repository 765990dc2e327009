"""What the documents show runs, and says all formats."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from blockfp.formats import NAMES

ROOT = Path(__file__).parents[2]
SNIPPETS = [
    pytest.param(code, id=f"{path.name}-{i}")
    for path in (ROOT / "README.md", ROOT / "docs" / "architecture.md", ROOT / "docs" / "other-libraries.md")
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
    # Blocks with a name want a model or data of tests/clients, which runs them.
    if not re.match(r"# [\w:, ]+\n", code)
]

# What the training examples share, and what tests/jax/test_jax_examples.py runs.
OTHERS = ("byte_text", "training_report", "flax_mlp", "equinox_mlp")
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.stem not in OTHERS]


def run(tmp_path, *command):
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def _libraries():
    pytest.importorskip("jax")
    pytest.importorskip("torch")


@pytest.mark.parametrize("code", SNIPPETS)
def test_snippets_run(tmp_path, code):
    # The whole of inductor is for other tests: here the code has to be right, not fast.
    run(tmp_path, "-c", code.replace("fullgraph=True", 'fullgraph=True, backend="aot_eager"'))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(tmp_path, example):
    short = ["--steps", "2"] if example.stem.startswith("train_") else []
    short += ["--recipes", "mxfp8"] if example.stem in ("train_fsdp2", "train_jax") else []
    assert run(tmp_path, example, *short)


def test_what_is_promised_is_held():
    """Each test that docs/promises.md names is there."""
    promised = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "promises.md").read_text()))
    there = {name for path in ROOT.glob("tests/*/test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)}
    assert promised
    assert promised <= there, promised - there


def test_the_numerics_describe_every_format():
    text = (ROOT / "docs" / "numerics.md").read_text()
    for name in NAMES:
        base = re.sub(r"(_floor|_32x32|_fp32)", "", name)
        assert f"`{base}`" in text, name


def test_drawings_are_those_of_the_plans_and_results():
    """Every picture of docs/ is, byte for byte, what docs/drawings.py draws now."""
    drawn = {name: str(drawing) for name, drawing in runpy.run_path(str(ROOT / "docs" / "drawings.py"))["drawings"]().items()}
    kept = {path.name: path.read_text() for path in (ROOT / "docs").glob("*.svg")}
    assert drawn.keys() == kept.keys()
    changed = [name for name in drawn if drawn[name] != kept[name]]
    assert not changed, f"{changed}: run `python docs/drawings.py`"
