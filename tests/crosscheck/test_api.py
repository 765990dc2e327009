"""Names and signatures of the faces, which change on purpose alone.

python tests/crosscheck/test_api.py      writes them anew into public/, after a change that is meant
"""

import importlib
import inspect
from importlib import metadata
from pathlib import Path
from typing import get_args

import pytest

FACES = {
    "blockfp": "numpy",
    "blockfp.torch": "torch",
    "blockfp.jax": "jax",
    "blockfp.experimental.torch": "torch",
    "blockfp.experimental.jax": "jax",
}
"""The faces, and what each needs."""


def imported(face: str):
    # Not importorskip: the tests' folders have the names of libraries.
    try:
        metadata.version(FACES[face])
    except metadata.PackageNotFoundError:
        pytest.skip(f"{FACES[face]} is not installed")
    return importlib.import_module(face)


def snapshot(face: str) -> Path:
    return Path(__file__).parent / "public" / f"{face}.txt"


def described(face: str) -> str:
    """A line for each public name, and one for each member of a class, with parameters and their defaults."""
    module = importlib.import_module(face)
    lines = []
    for name in sorted(module.__all__):
        value = getattr(module, name)
        if inspect.isclass(value):
            lines += [f"class {name}{parameters(value)}", *(f"    .{member}" for member in members(value))]
        elif inspect.ismodule(value):
            lines.append(f"{name}: module {value.__name__}")
        else:
            lines.append(name + (parameters(value) if callable(value) else ""))
    return "\n".join(lines) + "\n"


def members(cls: type) -> list[str]:
    """The public methods, properties and fields of a class and of bases that aren't public; FSDP2's hooks aside."""
    own = [base for base in cls.__mro__ if base is cls or base.__name__[0] == "_" or base.__module__ == "blockfp.array"]
    names = {name for base in own for name in (*vars(base), *vars(base).get("__annotations__", ()))}
    names = sorted(name for name in names if not name.startswith(("_", "fsdp_")))
    values = {name: inspect.getattr_static(cls, name, None) for name in names}
    functions = {n: v.__func__ if isinstance(v, classmethod | staticmethod) else v for n, v in values.items()}
    return [name + (parameters(f) if inspect.isfunction(f) else "") for name, f in functions.items()]


def parameters(function) -> str:
    shown = []
    for parameter in inspect.signature(function).parameters.values():
        default = parameter.default if parameter.default is parameter.empty else Default(parameter.default)
        shown.append(parameter.replace(annotation=parameter.empty, default=default))
    return str(inspect.Signature(shown))


class Default:
    def __init__(self, value):
        # Functions have addresses, which change.
        self.text = value.__name__ if callable(value) else repr(value)

    def __repr__(self) -> str:
        return self.text


@pytest.mark.parametrize("face", FACES)
def test_names_and_signatures(face):
    imported(face)
    assert described(face) == snapshot(face).read_text(), f"where this is meant: python {__file__}"


@pytest.mark.parametrize("face", FACES)
def test_what_is_exported_names_the_face(face):
    module = imported(face)
    public = [getattr(module, name) for name in module.__all__]
    homes = {value.__module__ for value in public if hasattr(value, "__module__")}
    assert homes <= {face, "blockfp.formats", "blockfp.recipes"}
    assert "experimental" in face or {"Format", "Recipe", "errors", "formats", "load", "quantize", "recipes", "save"} <= set(
        module.__all__
    )


@pytest.mark.parametrize("face", FACES)
def test_what_is_returned_is_exported(face):
    module = imported(face)
    functions = [getattr(module, name) for name in module.__all__ if inspect.isfunction(getattr(module, name))]
    for function in functions:
        function = inspect.unwrap(function)
        returned = [eval(function.__annotations__["return"], function.__globals__)]
        for hint in returned:
            returned += get_args(hint)
        homes = {hint.__module__ for hint in returned if inspect.isclass(hint)}
        known = {face, face.replace(".experimental", "")}
        assert not [home for home in homes if home.startswith("blockfp.") and home not in known], function


def test_errors_need_nothing():
    """`except blockfp.errors.BadFile` works where nothing optional is."""
    errors = importlib.import_module("blockfp.errors")
    raised = {name: value for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert set(raised) == {"BadBackend", "BadCheckpoint", "BadFile"}
    assert all(issubclass(error, ValueError) for error in raised.values())
    assert all(value.__module__ == "blockfp.errors" for value in raised.values())


if __name__ == "__main__":
    for each in FACES:
        snapshot(each).parent.mkdir(exist_ok=True)
        snapshot(each).write_text(described(each))
