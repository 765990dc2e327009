"""Prints the tables of docs/architecture.md, whose descriptions are the first lines of the rooms' docstrings.

python docs/rooms.py      updates the page after a room was added there or its docstring changed
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE / "architecture.md"


def first_line(file: Path) -> str:
    """Returns the first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    sentence = text.partition("\n\n")[0].replace("\n", " ")
    return sentence.removesuffix(".").replace("|", "\\|")


def printed(page: str) -> str:
    """Returns the page with updated descriptions; the page determines which rooms are listed, and their order."""

    def table(found: re.Match[str]) -> str:
        folder = HERE.parent / found["folder"]
        lines = []
        for row in found["rows"].splitlines():
            name = row.split("`")[1]
            lines.append(f"| `{name}` | {first_line(folder / (name if name.endswith('.py') else f'{name}__init__.py'))} |\n")
        return f"{found['head']}{''.join(lines)}"

    rooms = r"(?P<head><!-- rooms of (?P<folder>\w+) -->\n\| room \| what it holds \|\n\|---\|---\|\n)(?P<rows>(?:\|.*\n)+)"
    return re.sub(rooms, table, page)


if __name__ == "__main__":
    PAGE.write_text(printed(PAGE.read_text()))
