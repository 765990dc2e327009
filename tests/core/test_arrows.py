"""Imports point one way: among the rooms of the core, among those of each backend, and among the files of a room."""

import ast
import os
import re
from functools import cache
from pathlib import Path

import pytest

import blockfp

CORE = (
    {"formats", "errors", "patterns"},
    {"definition", "notebook"},
    {"sharding", "kernels"},
    {"array", "recipes"},
    {"files"},
    {"blockfp", "check"},
    {"jax_backend", "torch_backend"},
    {"jax", "torch", "experimental", "integrations", "commands"},
    {"cli"},
    {"__main__"},
)
"""The rooms of the core, from the bottom up; those of one floor don't know each other. `blockfp` is `__init__.py`."""

JAX = ("implementations", "arrays", "params", "linear", "files", "check")
TORCH = (
    "torch_internals",
    "distributed_internals",
    "ops",
    "sharded",
    "quantized_tensor",
    "weights",
    "linear",
    "experts",
    "modules",
    "conversion",
    "optimizer",
    "check",
    "checkpoint",
)
"""The rooms of the backends, from the bottom up."""

LATE = {
    "blockfp.check.plot": "takes matplotlib",
    "blockfp.files.contents": "takes zipfile and more, which quantizing doesn't need",
    "blockfp.files.modelfile": "takes zipfile and more, which quantizing doesn't need",
    "blockfp.files.quantized_model": "takes zipfile and more, which quantizing doesn't need",
    "blockfp.jax_backend.implementations.pallas.arrays": "takes Mosaic, which is slow to import",
    "blockfp.jax_backend.implementations.pallas.mosaic": "takes Mosaic, which is slow to import",
    "blockfp.torch_backend.checkpoint.checkpoint_files": "takes DCP, which is a second's import",
    "blockfp.torch_backend.checkpoint.index": "takes DCP, which is a second's import",
    "blockfp.torch_backend.checkpoint.plain_values": "takes DCP, which is a second's import",
}
"""Modules that are imported inside functions, and why."""


@cache
def modules() -> dict[str, Path]:
    """The files of the installed package by the names of their modules."""
    root = Path(blockfp.__file__).parent
    found = {}
    for folder, _, files in os.walk(root, followlinks=True):
        for file in (Path(folder, name) for name in files if name.endswith(".py")):
            *parents, last = file.relative_to(root).with_suffix("").parts
            found[".".join(["blockfp", *parents, *([] if last == "__init__" else [last])])] = file
    return found


@cache
def imports() -> frozenset[tuple[str, str, str]]:
    """(module, module of this package that it imports, "top", "function" or "types")."""
    found = set()
    for module, file in modules().items():
        tree = ast.parse(file.read_text())
        package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
        where = {}
        for node in ast.walk(tree):
            types = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            if types or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                where |= dict.fromkeys(ast.walk(node), "types" if types else "function")
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                source = ".".join(
                    [*package[: len(package) - node.level + 1], node.module or ""] if node.level else [node.module]
                )
                source = source.removesuffix(".")
                inner = [f"{source}.{alias.name}" for alias in node.names]
                targets = [name if name in modules() else source for name in inner]
            else:
                continue
            found |= {(module, target, where.get(node, "top")) for target in targets if target.partition(".")[0] == "blockfp"}
    return frozenset(found)


def room(module: str, depth: int) -> str:
    parts = module.split(".")
    return parts[depth] if len(parts) > depth else parts[-1]


def floor(name: str, house: tuple) -> int:
    floors = [number for number, rooms in enumerate(house) if name == rooms or (isinstance(rooms, set) and name in rooms)]
    assert floors, f"{name} is no known room: say in {__name__} between which others it stands"
    return floors[0]


def upward(house: tuple, depth: int, prefix: str) -> list[str]:
    """Imports of a room on the same floor or a higher one."""
    inside = [(a, b) for a, b, _ in imports() if a.startswith(prefix) and b.startswith(prefix)]
    pairs = [(a, b, room(a, depth), room(b, depth)) for a, b in inside]
    return [f"{a} imports {b}" for a, b, x, y in pairs if x != y and floor(x, house) <= floor(y, house)]


@pytest.mark.parametrize(
    ("house", "depth", "prefix"),
    [(CORE, 1, "blockfp"), (JAX, 2, "blockfp.jax_backend."), (TORCH, 2, "blockfp.torch_backend.")],
    ids=["core", "jax_backend", "torch_backend"],
)
def test_rooms_import_what_is_below_them(house, depth, prefix):
    assert not upward(house, depth, prefix)


def test_an_arrow_upward_is_found():
    assert any("blockfp.definition.scaling imports blockfp.formats" in arrow for arrow in upward(CORE[::-1], 1, "blockfp"))


def circles() -> set[frozenset[str]]:
    """Modules that import each other, by way of others too; imports for type checkers don't count."""
    arrows: dict[str, set[str]] = {}
    for a, b, where in imports():
        if where != "types" and a != b:
            arrows.setdefault(a, set()).add(b)

    @cache
    def reached(start: str) -> frozenset[str]:
        seen, open_ends = set(), [start]
        while open_ends:
            new = arrows.get(open_ends.pop(), set()) - seen
            seen |= new
            open_ends += new
        return frozenset(seen)

    return {frozenset(b for b in reached(a) if a in reached(b)) for a in arrows if a in reached(a)}


def test_no_modules_import_each_other():
    assert not circles()


def test_imports_inside_functions_have_a_reason():
    late = {target for _, target, where in imports() if where == "function"}
    assert late == set(LATE)


TABLES = (
    (CORE, "blockfp", "The core"),
    (JAX, "blockfp.jax_backend", "The JAX backend"),
    (TORCH, "blockfp.torch_backend", "The PyTorch backend"),
)


@pytest.mark.parametrize(("house", "prefix", "heading"), TABLES, ids=[prefix for _, prefix, _ in TABLES])
def test_the_architecture_shows_the_rooms_in_their_order(house, prefix, heading):
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    table = text.partition(f"\n{heading}, ")[2].partition("|---|---|\n")[2].partition("\n\n")[0]
    shown = re.findall(r"^\| `([\w.]+?)(?:\.py|/)?`", table, re.MULTILINE)
    there = {room(name, prefix.count(".") + 1) for name in modules() if name.startswith(f"{prefix}.")}
    if prefix == "blockfp":
        outer = {"integrations", "experimental", "commands", "cli", "__main__"}
        there = {name for name in there if floor(name, CORE) < floor("jax_backend", CORE) or name in outer}
    assert set(shown) == there
    floors = [floor(name, house) for name in shown]
    assert floors == sorted(floors)
