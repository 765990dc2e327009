"""Code blocks of the documents, which tests run as they are printed."""

from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def documented(first_line):
    """The Python block of the documents that begins with a line, without its `# ` mark.

    Raises:
        LookupError: there is none, or more than one.
    """
    blocks = [
        block.partition("\n```")[0]
        for page in sorted(DOCS.rglob("*.md"))
        for block in page.read_text().split("```python\n")[1:]
    ]
    found = [block for block in blocks if block.startswith(f"# {first_line}\n")]
    if len(found) != 1:
        raise LookupError(f"{len(found)} blocks of the documents begin with '# {first_line}'")
    return found[0]


def run_documented(first_line, **names):
    """Runs such a block with these names given; returns all names that it knows afterwards."""
    space = {"__name__": "documented", **names}
    exec(compile(documented(first_line), first_line, "exec"), space)
    return space
