"""`QuantizedTensor` as a tensor: its parts, its op table, what it refuses, how it is copied and saved."""

import copy

import numpy as np
import pytest
import torch
from arrays import through_a_file, values
from blockfp.torch_backend.quantized_tensor.geometry import Base
from held_formats import FORMATS
from same_tensors import assert_equal

import blockfp.torch as bfp
from blockfp.definition import numerics

BY_NAME = pytest.mark.parametrize("format", FORMATS, ids=str)
SQUARE = ("fp8_e4m3", "mxfp8_e4m3_32x32", "mxfp6_e2m3_32x32", "nvfp4_16x16", "fp8_e4m3_128x128")


def tensor(shape=(70, 96), dtype=torch.bfloat16, seed=0):
    return values(shape, seed, dtype)


@BY_NAME
def test_it_is_a_parameter_like_any_other(format):
    q = bfp.quantize(tensor(), format)
    parameter = torch.nn.Parameter(q, requires_grad=True)
    assert isinstance(parameter, bfp.QuantizedTensor)
    assert parameter.format is format
    assert parameter.codes.data_ptr() == q.codes.data_ptr()
    assert repr(parameter).startswith(f"QuantizedTensor({format}, shape=(70, 96)")
    module = torch.nn.Module()
    module.weight = parameter
    assert dict(module.named_parameters())["weight"] is parameter


@BY_NAME
def test_copies_and_pickles(format):
    q = bfp.quantize(tensor(), format)
    for other in (q.clone(), copy.deepcopy(q), q.to("cpu", copy=True), copy.deepcopy(torch.nn.Parameter(q))):
        assert_equal(other, q)
        assert other.codes.data_ptr() != q.codes.data_ptr()
    assert q.detach().codes.data_ptr() == q.codes.data_ptr()
    loaded = through_a_file({"weight": torch.nn.Parameter(q)}, weights_only=True)["weight"]
    assert_equal(loaded, q)
    assert isinstance(loaded, torch.nn.Parameter)


@pytest.mark.parametrize("name", SQUARE)
def test_transposes(name):
    x = tensor()
    q, expected = bfp.quantize(x, name), bfp.quantize(x.mT.contiguous(), name)
    for flipped in (q.mT, q.t(), q.transpose(0, 1), q.permute(1, 0)):
        assert_equal(flipped, expected)
        assert flipped.codes.is_contiguous()
    assert_equal(q.mT.mT, q)
    stacked = bfp.quantize(tensor((2, 40, 64)), name)
    assert stacked.mT.shape == (2, 64, 40)
    with pytest.raises(NotImplementedError, match="last two axes"):
        stacked.transpose(0, 1)


def test_one_dimensional_blocks_have_no_transpose():
    with pytest.raises(ValueError, match="mxfp8_e4m3 has 1x32 blocks"):
        _ = bfp.quantize(tensor(), "mxfp8_e4m3").mT
    with pytest.raises(ValueError, match="fp8_e4m3_row has a scale for each row"):
        _ = bfp.quantize(tensor(), "fp8_e4m3_row").mT


@BY_NAME
def test_rows_are_windows(format):
    q = bfp.quantize(tensor((150, 64)), format)
    whole = q.dequantize()
    for first, last in ((0, 150), (10, 140), (33, 34), (128, 150), (5, 5)):
        rows = q[first:last]
        assert rows.origin == ((first, 0) if (first, last) != (0, 150) else (0, 0))
        assert torch.equal(rows.dequantize(), whole[first:last])
        assert rows.numel() == 0 or rows.codes.data_ptr() == q.codes[first:].data_ptr()
    for part, expected in zip(q.split(40), whole.split(40), strict=True):
        assert torch.equal(part.dequantize(), expected)
    for part, expected in zip(q.split([7, 143]), whole.split([7, 143]), strict=True):
        assert torch.equal(part.dequantize(), expected)
    assert torch.equal(q[20:][10:40].dequantize(), whole[30:60])


@BY_NAME
def test_whole_blocks_of_columns_are_windows(format):
    width = 8 if format.block is None or format.per_row else format.block[1]
    q = bfp.quantize(tensor((40, 4 * width - 3)), format)
    whole = q.dequantize()
    for first, last in ((0, width), (width, 3 * width), (2 * width, 4 * width), (width, width)):
        part = q[:, first:last]
        assert part.shape == (40, min(last, 4 * width - 3) - first)
        assert part.origin == (0, first)
        assert torch.equal(part.dequantize(), whole[:, first:last])
        assert torch.equal(part[5:].clone().dequantize(), whole[5:, first:last])
    assert torch.equal(q.split(width, dim=1)[1].dequantize(), whole[:, width : 2 * width])
    if (format.block and not format.per_row) or format.element.packed:
        with pytest.raises(NotImplementedError, match=rf"aten.slice.*slice columns at multiples of {width}"):
            _ = q[:, 1:width]


@BY_NAME
def test_one_matrix_of_a_stack(format):
    q = bfp.quantize(tensor((3, 40, 64)), format)
    whole = q.dequantize()
    for i, matrix in enumerate(q.unbind()):
        assert matrix.shape == (40, 64)
        assert torch.equal(matrix.dequantize(), whole[i])
        assert_equal(matrix, q[i])
        assert matrix.codes.data_ptr() == q.codes[i].data_ptr()
    with pytest.raises(NotImplementedError, match=r"aten.select.*q\[i : i \+ 1\]"):
        _ = q[0][0]


def test_initial_values_follow_the_rows():
    x = tensor((2, 40, 64))
    q = bfp.quantize(x, "nvfp4_16x16")
    assert q.initial is None
    q.initial = x
    weight = torch.nn.Parameter(q)
    assert torch.equal(weight.initial, x)
    assert torch.equal(weight[1].initial, x[1])
    assert torch.equal(weight[1][8:30].initial, x[1, 8:30])
    assert torch.equal(weight[:, 8:30, 16:].initial, x[:, 8:30, 16:])
    for other in (copy.deepcopy(weight), q.clone()):
        assert torch.equal(other.initial, x)
        assert other.initial.data_ptr() != x.data_ptr()
    assert q.mT.initial is None
    assert torch.empty_like(q).initial is None
    assert through_a_file(q, weights_only=True).initial is None
    weight.detach().initial = None
    assert weight.initial is None
    for wrong in (x[0], x.int(), x.to("meta")):
        with pytest.raises(ValueError, match=r"initial must be a float tensor of shape \(2, 40, 64\) on the CPU"):
            q.initial = wrong
    q.initial = x
    q.copy_(bfp.quantize(x, "nvfp4_16x16"))
    assert (q.initial, q.geometry.loaded) == (None, "codes")
    q.copy_(weight.clone())
    assert (q.initial, q.geometry.loaded) == (None, "codes")
    other.initial = x
    q.copy_(other)
    assert torch.equal(q.initial, x)
    assert q.geometry.loaded
    assert q[1].geometry.loaded


@BY_NAME
def test_a_shard_remembers_its_place_in_copies_and_pickles(format):
    whole = bfp.quantize(tensor((150, 64)), format)
    part = whole.split(40)[1]
    for other in (part, part.clone(), copy.deepcopy(part), part.to("cpu", copy=True), through_a_file(part, weights_only=True)):
        assert_equal(other, part)
        assert other.origin == (40, 0)
        assert other.geometry.base == Base((150, 64), (0, 0))


@BY_NAME
def test_a_buffer_takes_the_place_of_what_is_copied_into_it(format):
    whole = bfp.quantize(tensor((150, 64)), format)
    last = whole.split(40)[3]
    buffer = whole.new_zeros((40, 64))
    buffer.narrow(0, 0, 30).copy_(last)
    shard = buffer.narrow(0, 0, 30)
    assert_equal(shard, last)
    assert shard.origin == (120, 0)
    assert shard.view(-1).geometry.base == Base((150, 64), (0, 0))
    again = shard.new_zeros((40, 64))
    again.narrow(0, 0, 30).copy_(shard)
    assert_equal(again[:30], last)
    assert again.geometry.base == Base((150, 64), (0, 0))
    empty = whole.new_zeros((40, 64)).narrow(0, 0, 0)
    assert (empty.shape, empty.origin) == ((0, 64), (150, 0))
    with pytest.raises(NotImplementedError, match=r"aten.slice.*take its first rows"):
        whole.new_zeros((40, 64)).narrow(0, 3, 5)
    with pytest.raises(NotImplementedError, match=r"aten.new_zeros.*shard_placement_fn"):
        whole.new_zeros((150, 32))


def test_memory_for_values():
    q = bfp.quantize(tensor(), "nvfp4_16x16")
    assert torch.equal(q.new_zeros((3,), dtype=torch.float32), torch.zeros(3))
    assert q.new_empty((0,)).shape == (0,)
    assert q.new_empty((2, 2)).dtype is torch.bfloat16
    assert not q.is_pinned()


@BY_NAME
def test_copy_in_place(format):
    q, other = bfp.quantize(tensor(), format), bfp.quantize(tensor(seed=1), format)
    codes = q.codes
    q.copy_(other)
    assert_equal(q, other)
    assert q.codes is codes


def test_what_copy_refuses():
    q = bfp.quantize(tensor(), "mxfp8_e4m3")
    before = q.codes.clone()
    with pytest.raises(NotImplementedError, match=r"load_high_precision_\(parameter, values\)"):
        q.copy_(tensor())
    with pytest.raises(ValueError, match="format is mxfp8_e4m3, the source's is mxfp8_e5m2"):
        q.copy_(bfp.quantize(tensor(), "mxfp8_e5m2"))
    with pytest.raises(ValueError, match="shape"):
        q.copy_(bfp.quantize(tensor((3, 96)), "mxfp8_e4m3"))
    with pytest.raises(NotImplementedError, match="dequantize"):
        tensor().copy_(q)
    square = bfp.quantize(tensor((64, 96)), "mxfp8_e4m3_32x32")
    with pytest.raises(ValueError, match="blocks"):
        square[0:40].copy_(square[10:50])
    assert torch.equal(q.codes, before)


def test_likes():
    q = bfp.quantize(tensor(), "nvfp4_16x16")
    empty = torch.empty_like(q)
    assert isinstance(empty, bfp.QuantizedTensor)
    assert (empty.format, empty.shape, empty.scales.shape) == (q.format, q.shape, q.scales.shape)
    master = torch.zeros_like(q, dtype=torch.float32)
    assert type(master) is torch.Tensor
    assert (master.dtype, master.shape) == (torch.float32, q.shape)
    on_meta = torch.empty_like(q, device="meta")
    assert on_meta.codes.is_meta
    assert torch.equal(torch.zeros_like(q), torch.zeros(70, 96, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (lambda q: q + 1, "add"),
        (lambda q: q @ tensor((96, 4)), "mm"),
        (lambda q: q.sum(), "sum"),
        (lambda q: q[:, 3:5], "slice"),
        (lambda q: q[::2], "slice"),
        (lambda q: q.view(-1) + 1, "(?s)add.*high_precision_state_dict"),
        (lambda q: q.reshape(96, 70), "view"),
        (lambda q: q.double(), "_to_copy"),
        (lambda q: q.as_strided((3, 3), (1, 1)), "as_strided"),
        (lambda q: torch.cat([q, q]), "cat"),
        (lambda q: q.fill_(0), "fill"),
        (lambda q: torch.nn.functional.linear(tensor((4, 96)), q), "mm|linear|addmm|t"),
    ],
)
def test_nothing_dequantizes_by_itself(operation, name):
    q = bfp.quantize(tensor(), "mxfp8_e4m3")
    with pytest.raises((NotImplementedError, ValueError), match=rf"{name}|1x32"):
        operation(q)


def test_inference_mode_changes_nothing():
    """Operations that are made of others come as they are there; and views of a tensor that is no inference tensor are none."""
    q = bfp.quantize(tensor((64, 96)), "mxfp8_e4m3_32x32")
    shard, weight = q.split(32)[1], bfp.CastWeight.from_values(tensor(), "mxfp8_e4m3")
    with torch.inference_mode():
        for got, expected in ((q.view_as(q), q), (q.chunk(2)[1], shard), (q.narrow(0, 32, 32), shard), (q.to("cpu"), q)):
            assert_equal(got, expected)
        # FSDP2 keeps the first and the last at a first forward.
        assert not any(view.is_inference() for view in (shard.view(-1), q.detach(), q[:32], weight.view(-1)))
        assert q.clone().detach().is_inference()
        with pytest.raises(NotImplementedError, match=r"aten\.mm"):
            torch.nn.functional.linear(tensor((4, 96)), q)


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
def test_memory_can_be_shared(weights):
    layer = bfp.Linear(64, 32, recipe="nvfp4", weights=weights)
    before = layer.weight.dequantize() if weights == "quantized" else layer.weight.values.clone()
    assert not layer.weight.is_shared()
    layer.share_memory()
    assert layer.weight.is_shared()
    parts = (layer.weight.codes, layer.weight.scales, layer.weight.tensor_scale) if weights == "quantized" else ()
    assert all(part.is_shared() for part in parts)
    assert torch.equal(layer.weight.dequantize() if weights == "quantized" else layer.weight.values, before)


def test_parts_are_checked():
    q = bfp.quantize(tensor(), "mxfp8_e4m3")
    good = {"format": "mxfp8_e4m3", "columns": 96, "dtype": torch.bfloat16}
    rebuilt = bfp.QuantizedTensor.from_parts(q.codes, q.scales, **good)
    assert_equal(rebuilt, q)
    cases = [
        ((q.codes.float(), q.scales), good, TypeError, "codes must be uint8"),
        ((q.codes, q.scales.float()), good, TypeError, "scales of mxfp8_e4m3 must be uint8"),
        ((q.codes, q.scales[:3]), good, ValueError, "must have shape"),
        ((q.codes, q.scales), good | {"columns": 95}, ValueError, "95 columns"),
        ((q.codes, q.scales), good | {"columns": 96.0}, TypeError, "columns must be of integers"),
        ((q.codes, q.scales), good | {"origin": (-32, 0)}, ValueError, "origin must be of integers of 0 or more"),
        ((q.codes, q.scales), good | {"dtype": torch.float64}, TypeError, "float64"),
        ((q.codes, q.scales), good | {"format": "nvfp4"}, ValueError, "nvfp4"),
        ((q.codes, q.scales, torch.ones(())), good, ValueError, "tensor_scale"),
        ((q.codes, q.scales.to("meta")), good, ValueError, "meta"),
        ((q.codes.numpy(), q.scales), good, TypeError, "codes must be a torch.Tensor, got ndarray"),
    ]
    for parts, options, error, message in cases:
        with pytest.raises(error, match=message):
            bfp.QuantizedTensor.from_parts(*parts, **options)


def test_numpy_has_the_same_parts():
    x = tensor(dtype=torch.float32)
    for format in FORMATS:
        q, expected = bfp.quantize(x, format), numerics.quantize(x.numpy(), format)
        np.testing.assert_array_equal(q.codes.numpy(), expected.codes)
        assert q.ndim == 2
