"""Runs the code that the documents show, and looks for all formats in them."""

import ast
import pydoc
import re
import runpy
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import gloo
import numpy
import pytest
from documented import PAGES, blocks, documented, fences, program, run_documented
from processes import LIMIT

import blockfp
from blockfp.check import crosscheck
from blockfp.formats import NAMES

ROOT = Path(__file__).parents[2]
RANKS = {"training.md": 2, "parallelism.md": 4, "reproducible.md": 4, "experts.md": 4, "checkpoints.md": 2}
"""Pages whose programs run on several processes: by torchrun, as they say."""


# What the training examples share, and what tests/jax/test_jax_examples.py and tests/torch/test_pretrain.py run.
OTHERS = ("byte_text", "training_report", "flax_mlp", "flax_moe", "equinox_mlp")
OTHERS += ("pretrain", "pretrain_text", "pretrain_model", "pretrain_metrics")
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.stem not in OTHERS]


def run(tmp_path, *command):
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def fork(tmp_path, ranks, body, **options):
    """Runs lines of Python on ranks that need not import torch anew; `rank` is each one's number."""
    file = tmp_path / "forked.py"
    lines = textwrap.indent(f"import os\nos.chdir({str(tmp_path)!r})\n{body}\n", "    ")
    file.write_text(f"def forked(rank):\n{lines}")
    gloo.run(ranks, file, "forked", **options)


def torchrun(tmp_path, ranks, body):
    """Runs lines of Python as torchrun does: no process group, but the environment from which one is made."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    begin = f"os.environ |= {where!r} | {{'RANK': str(rank), 'LOCAL_RANK': str(rank)}}"
    # No rank ends while another still talks to it.
    end = "import torch.distributed as dist\nif dist.is_initialized():\n    dist.barrier()"
    fork(tmp_path, ranks, f"{begin}\n{body}\n{end}", backend=None)


@pytest.fixture(autouse=True)
def _libraries(monkeypatch):
    pytest.importorskip("jax")
    pytest.importorskip("torch")
    # Programs that compile long and hardly run, as tests/jax has them.
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


@pytest.mark.parametrize("page", [page for page in PAGES if program(page)], ids=lambda page: page.stem)
def test_pages_run(tmp_path, page):
    """Each page is a program, from its first block to its last."""
    # The whole of inductor is for other tests: here the code has to be right, not fast.
    code = program(page).replace("fullgraph=True", 'fullgraph=True, backend="aot_eager"')
    # torch 2.11's compiler looks for the module that a function names.
    module = "import sys, types; page = sys.modules['page'] = types.ModuleType('page')"
    body = f"{module}\nexec({code!r}, vars(page))"
    if page.name in RANKS:
        torchrun(tmp_path, RANKS[page.name], body)
    else:
        fork(tmp_path, 1, body, backend=None)


def test_the_example_for_many_gpus_runs_by_torchrun(tmp_path):
    """The file of start.md, as printed; it ends its process group itself."""
    assert "$ torchrun --nproc-per-node 8 train.py" in (ROOT / "docs" / "start.md").read_text()
    program = documented("train on every GPU")
    torchrun(tmp_path, 2, f"exec({program!r}, {{}})")
    assert (tmp_path / "run").is_dir()


def test_every_named_block_is_run_by_a_test():
    tests = "".join(path.read_text() for path in ROOT.glob("tests/*/test_*.py"))
    names = [name for page in PAGES for name, _ in blocks(page) if name]
    assert names
    assert [name for name in names if f'"{name}"' not in tests] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_block_that_is_not_run_is_no_python(page):
    for language, text in fences(page):
        if language != "python":
            with pytest.raises(SyntaxError):
                ast.parse(text)


def test_a_backend_of_your_own():
    """The documented class, around kernels that give the definition's bits and around others."""
    x = numpy.linspace(-3, 3, 4096, dtype="f4").reshape(32, 128)

    def kernel(x, format):
        q = blockfp.quantize(x, format)
        return q.codes, q.scales

    def inverse(codes, scales, format):
        return blockfp.QuantizedArray.from_parts(codes, scales, format=format, columns=128, dtype="f4").dequantize()

    for given, same in ((kernel, True), (lambda x, format: kernel(-x, format), False)):
        mine = run_documented("a backend of your own", my_kernel=given, my_inverse=inverse)["Mine"]()
        assert crosscheck.check(x, "mxfp8_e4m3", [crosscheck.Definition(), mine]).identical is same


# A Python program of its own is what starts the ranks of train_fsdp2; the others are run as one.
AS_A_PROGRAM = """
import contextlib, io, runpy, sys
sys.argv = {command!r}
sys.path.insert(0, {folder!r})
with contextlib.redirect_stdout(io.StringIO()) as printed:
    runpy.run_path({command!r}[0], run_name="__main__")
assert rank or printed.getvalue()
"""


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(tmp_path, example):
    short = ["--steps", "2"] if example.stem.startswith("train_") else []
    short += ["--recipes", "mxfp8", "--batch", "8", "--held-out", "8"] if example.stem in ("train_fsdp2", "train_jax") else []
    short += ["--batch", "4", "--held-out", "8"] if example.stem == "train_moe" else []
    short += ["--base-steps", "40", "--steps", "40"] if example.stem == "finetune_released" else []
    body = AS_A_PROGRAM.format(command=[str(example), *short], folder=str(example.parent))
    if example.stem == "train_fsdp2":
        assert run(tmp_path, example, *short)
    elif example.stem == "train_fsdp2_tp":
        fork(tmp_path, 4, AS_TORCHRUN + body)
    else:
        fork(tmp_path, 1, body, backend=None)


def test_a_mixture_of_experts_far_from_bf16_fails(tmp_path):
    """No recipe's loss is within 0% of that of bf16."""
    example = ROOT / "examples" / "train_moe.py"
    command = [str(example), "--steps", "2", "--batch", "4", "--held-out", "8", "--within", "0"]
    body = AS_A_PROGRAM.format(command=command, folder=str(example.parent))
    failing = (
        f"import pytest\nwith pytest.raises(SystemExit, match='FAILED: mxfp8 and fp8_block'):\n{textwrap.indent(body, '    ')}"
    )
    fork(tmp_path, 1, failing, backend=None)


# The process group stays until all are done.
AS_TORCHRUN = """
import torch.distributed as dist
os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": "4"}
dist.destroy_process_group = dist.barrier
"""


def test_an_example_starts_its_ranks(tmp_path, monkeypatch):
    """`train_fsdp2_tp.py` without torchrun runs itself by it, with the same options; the ranks run above."""
    example, started = ROOT / "examples" / "train_fsdp2_tp.py", []
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.syspath_prepend(example.parent)
    monkeypatch.setattr(sys, "argv", [str(example), "--steps", "2"])
    monkeypatch.setattr(subprocess, "call", lambda command, env: started.append((command, env)) or 3)
    with pytest.raises(SystemExit, match="3"):
        runpy.run_path(str(example), run_name="__main__")
    ((command, env),) = started
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert {"--standalone", "--nproc-per-node=4"} <= set(command)
    assert command[-3:] == [str(example), "--steps", "2"]
    assert env["OMP_NUM_THREADS"] == "1"


def test_what_is_promised_is_held():
    """Each test that docs/promises.md names is there."""
    promised = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "promises.md").read_text()))
    there = {name for path in ROOT.glob("tests/*/test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)}
    assert promised
    assert promised <= there, promised - there


def test_paths_that_documents_name_are_there():
    """Folders and files of the repository, as `blockfp/check/crosscheck.py`; modules that moved are found."""
    folders = "blockfp|jax_backend|torch_backend|kernels|tests|benchmarks|examples|docs"
    for page in PAGES:
        for path in re.findall(rf"`(?:python )?((?:{folders})/[\w/.-]*)", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_api_pages_name_what_is_there():
    names = [name for page in PAGES for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)]
    assert {"blockfp", "blockfp.torch", "blockfp.jax"} <= set(names)
    assert [name for name in names if pydoc.locate(name) is None] == []


def test_the_numerics_describe_every_format():
    text = (ROOT / "docs" / "numerics.md").read_text()
    for name in NAMES:
        base = re.sub(r"(_floor|_32x32|_fp32)", "", name)
        assert f"`{base}`" in text, name


def test_rooms_are_described_by_their_own_first_lines():
    page = (ROOT / "docs" / "architecture.md").read_text()
    printed = runpy.run_path(str(ROOT / "docs" / "rooms.py"))["printed"](page)
    assert printed.count("| `") > 20
    assert printed == page, "run `python docs/rooms.py`"


def test_drawings_are_those_of_the_plans_and_results():
    """Every picture of docs/ is, byte for byte, what docs/drawings.py draws now."""
    drawn = {name: str(drawing) for name, drawing in runpy.run_path(str(ROOT / "docs" / "drawings.py"))["drawings"]().items()}
    kept = {path.name: path.read_text() for path in (ROOT / "docs").glob("*.svg")}
    assert drawn.keys() == kept.keys()
    changed = [name for name in drawn if drawn[name] != kept[name]]
    assert not changed, f"{changed}: run `python docs/drawings.py`"
