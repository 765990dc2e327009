"""Tables as text, and as HTML, which notebooks show in place of a value's text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from .formats import Format, block_name


def columns(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Returns rows of cells as lines that never wrap, with the first `left` columns aligned left and the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]


def table(rows: Iterable[Sequence[object]], head: Sequence[object] = (), notes: Iterable[object] = ()) -> str:
    """Returns rows of cells as an HTML table below its head, and notes as lines under it. All text is escaped."""

    def row(cells: Sequence[object], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    above = f"<thead>{row(head, 'th')}</thead>" if head else ""
    below = "".join(f"<div>{escape(str(note))}</div>" for note in notes)
    return f"<table>{above}<tbody>{''.join(row(cells, 'td') for cells in rows)}</tbody></table>{below}"


def of_array(kind: str, format: Format, shape: Sequence[int], dtype: Any, nbytes: int) -> str:
    """Returns the table of a quantized array: how it is stored, and its bytes beside the original's."""
    original = math.prod(shape) * dtype.itemsize
    rows = [
        ("format", f"{format}: {format.element}, {block_name(format.block)}, scales {format.scale}"),
        ("shape, dtype", f"{list(shape)}, {dtype}"),
        ("bytes", f"{nbytes:,} of {original:,}" + (f" ({nbytes / original:.1%})" if original else "")),
    ]
    return table(rows, ("", kind))
