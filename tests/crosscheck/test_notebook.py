"""What a notebook shows of arrays and summaries: HTML with the facts of the text."""

from xml.etree import ElementTree

import numpy as np
import pytest

import blockfp


def cells(html):
    """The texts of a table's cells; the HTML must be well formed."""
    root = ElementTree.fromstring(f"<div>{html}</div>")
    return ["".join(cell.itertext()) for cell in root.iter() if cell.tag in ("td", "th")]


def faces():
    """A function that makes the face's quantized array of ones."""
    yield "numpy", lambda: (blockfp.quantize, np.ones)
    yield "jax", lambda: (pytest.importorskip("blockfp.jax").quantize, pytest.importorskip("jax.numpy").ones)
    yield "torch", lambda: (pytest.importorskip("blockfp.torch").quantize, pytest.importorskip("torch").ones)


@pytest.mark.parametrize("made", [make for _, make in faces()], ids=[name for name, _ in faces()])
def test_arrays(made):
    quantize, ones = made()
    x = ones((64, 128), dtype=np.float32) if "numpy" in ones.__module__ else ones((64, 128))
    shown = cells(quantize(x, "nvfp4")._repr_html_())
    assert "nvfp4: e2m1, 1x16, scales e4m3" in shown
    # 64 * 128 codes of half a byte, a scale for 16, and the tensor's.
    assert f"{64 * 128 // 2 + 64 * 8 + 4:,} of {4 * 64 * 128:,} (14.1%)" in shown
    assert quantize(x[:0], "mxfp8_e4m3")._repr_html_()


def test_a_tree_of_placeholders_shows_its_text():
    jax, bfp = pytest.importorskip("jax"), pytest.importorskip("blockfp.jax")
    q = bfp.quantize(jax.numpy.ones((4, 32)), "mxfp8_e4m3")
    assert jax.tree.map(lambda _: None, q)._repr_html_() is None
    assert jax.tree.map(lambda _: "a", q)._repr_html_() is None


def test_summary():
    """The same cells as the printed table; names of a user's modules can't become markup."""
    torch = pytest.importorskip("torch")
    bfp = pytest.importorskip("blockfp.torch")
    model = torch.nn.ModuleDict({"up": torch.nn.Linear(64, 64), "<b>head": torch.nn.Linear(64, 32)})
    bfp.convert(model, lambda path: "mxfp8" if path == "up" else None)
    summary = bfp.summary(model)
    shown = cells(summary._repr_html_())
    assert "<b>head" in " ".join(shown)
    table = [line.split() for line in str(summary).split("quantized:")[0].splitlines()]
    assert [word for line in table for word in line if not word.startswith("--")] == " ".join(shown).split()
