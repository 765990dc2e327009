"""PyTorch's private names stand in two files alone, and each says there what it is for."""

import ast
from pathlib import Path

import pytest

import blockfp

BACKEND = Path(blockfp.__file__).parent / "torch_backend"
INTERNALS = ("torch_internals.py", "distributed_internals.py")
OF_TENSORS = {"_local_tensor", "_spec", "_schema", "_can_decompose", "_module_info", "_param_fqn", "_base", "_version"}


def private(source: str) -> list[str]:
    """Names of PyTorch's in a file that begin with an underscore; operators of ATen, which have public schemas, aside."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [node.module, *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
            if node.attr not in OF_TENSORS and names[0].split(".")[0] not in ("torch", "Tensor", "DTensor", "dist", "nn"):
                continue
        else:
            continue
        if any(".aten." in name for name in names):
            continue
        found += [name for name in names for part in name.split(".") if part.startswith("_") and not part.startswith("__")]
    return found


@pytest.mark.parametrize(
    "line",
    [
        "from torch.utils import _pytree",
        "from torch._dynamo import config",
        "torch._foreach_add_(a, b)",
        "x = q._local_tensor",
        "Tensor._make_wrapper_subclass(cls)",
        "torch.ops._c10d_functional.all_reduce",
    ],
)
def test_a_private_name_is_found(line):
    assert private(line)


def test_private_names_stand_in_these_files():
    files = sorted(BACKEND.rglob("*.py"))
    assert len(files) > 50
    found = {str(file.relative_to(BACKEND)): private(file.read_text()) for file in files}
    assert all(found.pop(name) for name in INTERNALS)
    assert not {file: names for file, names in found.items() if names}


@pytest.mark.parametrize("name", INTERNALS)
def test_each_says_what_it_is_for(name):
    """Functions have a docstring, assigned names a string below them, imported names a line in the comment below."""
    source = (BACKEND / name).read_text()
    body = ast.parse(source).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef):
            assert ast.get_docstring(node), node.name
        elif isinstance(node, ast.AnnAssign):
            assert isinstance(after, ast.Expr), ast.unparse(node.target)
            assert isinstance(after.value, ast.Constant)
            assert isinstance(after.value.value, str)
        elif isinstance(node, ast.ImportFrom) and private(ast.unparse(node)):
            for alias in node.names:
                assert f"# `{alias.asname or alias.name}` " in source
