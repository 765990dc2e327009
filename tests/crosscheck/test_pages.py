"""Pages for newcomers: what they quote, copy and run is in the sources, the records and the packages."""

import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("blockfp", "jax_backend", "torch_backend") for path in (ROOT / folder).rglob("*.py")]


def page(name):
    return (ROOT / "docs" / name).read_text()


def said(node):
    """The text of a string expression, with `..` for what is put into it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(said, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return said(node.left) + said(node.right)
    return ".."


def strings():
    """Every string of the sources, as users may read it."""
    kinds = (ast.JoinedStr, ast.BinOp, ast.Constant)
    found = {said(node) for path in SOURCES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)}
    return {" ".join(text.split("\n")) for text in found if " " in text}


def test_quoted_errors_are_in_the_sources():
    """A heading of troubleshooting.md in code marks quotes an error; a search for its words must find it."""
    quoted = re.findall(r"^### `(.+)`$", page("troubleshooting.md"), re.MULTILINE)
    assert len(quoted) > 25
    nobody_says = "model holds no .. at all to convert"
    found = "\n".join(strings())
    patterns = {text: ".*?".join(map(re.escape, text.strip(". ").split(".."))) for text in [*quoted, nobody_says]}
    assert [text for text, pattern in patterns.items() if not re.search(pattern, found)] == [nobody_says]


def test_figures_of_the_choice_are_those_of_the_records():
    records = ROOT / "benchmarks" / "results"
    table = re.search(r"<!-- figures of (\S+) and (\S+) -->\n(.*?)<!-- end -->", page("choose.md"), re.DOTALL)
    trained = {run["recipe"]: run for run in json.loads((records / table[1]).read_text())["runs"]}
    layers = json.loads((records / table[2]).read_text())["results"]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) ?\| (.*?) \|$", table[3], re.MULTILINE)
    assert {recipe for recipe, *_ in rows} == trained.keys() - {"bf16"}
    for recipe, speed, layer, loss in rows:
        assert speed == f"{trained[recipe]['tokens_per_second'] / trained['bf16']['tokens_per_second']:.2f}", recipe
        assert layer == (f"{layers[recipe]['speedup']:.2f}" if recipe in layers else ""), recipe
        assert loss == f"{trained[recipe]['held_out_loss'] - trained['bf16']['held_out_loss']:+.4f}", recipe
    speeds = [float(speed) for _, speed, *_ in rows]
    assert speeds == sorted(speeds, reverse=True)
    assert rows[0][0] == "fp8_current"


def test_every_example_is_on_its_page():
    shown = re.findall(r"^examples/(\w+)\.py$", page("examples.md"), re.MULTILINE)
    programs = {path.stem for path in (ROOT / "examples").glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert programs - {"pretrain", "training_report"} <= set(shown)
    assert all((ROOT / "examples" / f"{name}.py").is_file() for name in shown)


def test_every_name_of_the_torch_face_is_in_one_group_of_its_page():
    """In the order of need, so the page lists them; a new name must be put somewhere."""
    face = pytest.importorskip("blockfp.torch")
    names = re.findall(r"^::: blockfp\.torch\.(\w+)$", page("api/torch.md"), re.MULTILINE)
    assert len(names) == len(set(names))
    assert set(names) == set(face.__all__) - {"errors", "formats", "recipes"}
    assert names[0] == "convert"


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text()
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert pages == set(re.findall(r": ([\w/-]+\.md)$", nav, re.MULTILINE))
