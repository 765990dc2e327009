"""What casts ask of the CUDA library where MX operands come aligned, with its functions carried out by the definition."""

import pytest
import torch
from blockfp.torch_backend.ops import cuda
from blockfp.torch_backend.ops.groups import cuda_groups
from blockfp.torch_backend.ops.layer import gated_kernels
from blockfp.torch_backend.ops.layer.activations import activate
from blockfp.torch_backend.ops.quantize import cuda_layouts, cuda_reader
from emulated_cuda import Library
from same_tensors import assert_equal

from blockfp.definition import alignment, groups, numerics
from blockfp.formats import Format
from blockfp.kernels.calls import laid_parts
from blockfp.kernels.operand_cast import OperandCast

WANTED = ((True, False, (True, False)), (False, True, (False, True)), (True, True, (True, True)), (True, True, (True, False)))
"""Rows, columns, which of them are aligned."""


def aligned(q, format, columns):
    """Codes and scales as the library's product takes them."""
    made, rows = alignment.align(q.codes, q.scales, format, columns=columns), q.codes.shape[0]
    codes, scales = (torch.zeros(shape) for shape, _ in laid_parts((rows, columns), format))
    codes[:, :columns], scales[:, :rows] = made.codes, made.scales.mT
    return [codes.to(torch.uint8), scales]


@pytest.fixture
def library(monkeypatch):
    stand_in = Library()
    for module in (cuda, cuda_reader, cuda_layouts):
        monkeypatch.setattr(module, "library", lambda: stand_in)
    monkeypatch.setattr(cuda_reader, "check_input_on_device", lambda x: None)
    monkeypatch.setattr(gated_kernels, "agrees", lambda *_: True)
    monkeypatch.setattr(gated_kernels, "_takes", lambda *_: True)
    cuda_layouts._aligner.cache_clear()
    yield stand_in
    cuda_layouts._aligner.cache_clear()


def wanted_parts(x, format, row, column, shifts):
    parts = []
    for wants, shift, lines in ((row, shifts[0], x), (column, shifts[1], x.mT.contiguous())):
        if wants:
            q = numerics.quantize(lines, format)
            parts += aligned(q, format, lines.shape[1]) if shift else q[:2]
    return parts


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp6_e2m3_floor", "mxfp4_e2m1"])
@pytest.mark.parametrize(("row", "column", "shifts"), WANTED)
def test_one_call_makes_all_directions(library, name, row, column, shifts):
    format, x = Format.parse(name), torch.randn(40, 200).bfloat16()
    run = cuda_reader.reader(x, OperandCast(format if row else None, format if column else None, laid=shifts))
    assert_equal(run(x, None, None, None), wanted_parts(x, format, row, column, shifts))
    assert library.calls == ["quantize_aligned"]


@pytest.mark.parametrize(("row", "column", "shifts"), WANTED[:3])
@pytest.mark.parametrize("alone", [True, False])
def test_of_an_activation(library, row, column, shifts, alone):
    format, gate, up = Format.parse("mxfp6_e3m2"), torch.randn(16, 72).bfloat16(), torch.randn(16, 72).bfloat16()
    up, formats = None if alone else up, [format if wanted else None for wanted in (row, column)]
    run = gated_kernels.plan_of(gate, up, "silu", "apart", OperandCast(*formats, laid=shifts))
    made = activate(gate, up, "silu")
    assert_equal(run((gate, up), None, None), wanted_parts(made, format, row, column, shifts))
    assert library.calls == ["quantize_gated_aligned"]


@pytest.mark.parametrize(("row", "column", "shifts"), WANTED)
def test_of_groups(library, row, column, shifts):
    format, x = Format.parse("mxfp8_e4m3"), torch.randn(256, 40).bfloat16()
    assert groups.columns_for(256, 1) == 256
    cast = OperandCast(format if row else None, format if column else None, laid=shifts)
    found = cuda_groups.quantize_groups(x, torch.tensor([256], dtype=torch.int32), 1, cast)
    assert_equal([*(found.row or []), *(found.column or [])], wanted_parts(x, format, row, column, shifts))
    assert library.calls == ["quantize_groups_aligned"]


def test_columns_alone_beside_stored_rows_take_a_pass_of_their_own(library):
    """No product asks for them; the plan gives them."""
    format, x = Format.parse("mxfp8_e4m3"), torch.randn(32, 64)
    run = cuda_reader.reader(x, OperandCast(format, format, laid=(False, True)))
    assert_equal(run(x, None, None, None), wanted_parts(x, format, True, True, (False, True)))
    assert library.calls == ["quantize", "align"]
