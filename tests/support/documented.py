"""Code blocks of the documents, which tests run as they are printed."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NAMED = re.compile(r"# ([\w:, ]+)\n")


def fences(page):
    """(language, text) of every fenced block of a page."""
    return _FENCE.findall(page.read_text())


def blocks(page):
    """(name, code) of a page's Python blocks; a first line that is a comment of words names a block for `run_documented`."""
    code = [text for language, text in fences(page) if language == "python"]
    return [(match[1] if (match := _NAMED.match(text)) else None, text) for text in code]


def program(page):
    """The blocks of a page without a name, one after another: that is how a reader runs them."""
    return "\n".join(code for name, code in blocks(page) if name is None)


def documented(name):
    """The block with this name; LookupError unless there is exactly one."""
    found = [code for page in PAGES for named, code in blocks(page) if named == name]
    if len(found) != 1:
        raise LookupError(f"{len(found)} blocks of the documents begin with '# {name}'")
    return found[0]


def run_documented(name, **names):
    """Runs such a block with these names given; returns all names that it knows afterwards."""
    space = {"__name__": "documented", **names}
    exec(compile(documented(name), name, "exec"), space)
    return space
