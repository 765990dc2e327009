"""PyTorch's ops on CUDA tensors: torch's own checks, compilation, graph capture, and arrays whose indices outgrow 32 bits."""

import pytest

torch = pytest.importorskip("torch")
if torch.cuda.is_available():
    from blockfp.torch_backend.custom_ops import cuda, ops

    import blockfp.torch as bfp
    from blockfp.definition import numerics
    from blockfp.kernels import cuda_library

ONE_OF_EACH = ("fp8_e4m3", "fp8_e5m2_128x128", "mxfp8_e4m3", "mxfp6_e3m2_32x32", "mxfp4_e2m1", "mxint8_floor", "nvfp4")


def values(shape=(37, 80)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to("cuda", torch.bfloat16)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_opcheck(name):
    assert cuda_library.available(), cuda_library.status()
    x = values()
    for key in (None, torch.tensor([7, 9], dtype=torch.int64, device="cuda")):
        torch.library.opcheck(ops.quantize, (x, name, key))
    q = bfp.quantize(x, name)
    torch.library.opcheck(ops.dequantize, (q.codes, q.scales, q.tensor_scale, name, torch.float32, 80, [0, 0]))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_compiles_whole(name):
    torch._dynamo.reset()
    x = values()
    compiled = torch.compile(lambda x: bfp.quantize(x, name).dequantize(torch.float32), fullgraph=True, backend="aot_eager")
    expected = bfp.quantize(x, name).dequantize(torch.float32)
    assert torch.equal(compiled(x).view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_graph_capture(name):
    x = values((128, 256))
    bfp.quantize(x, name)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = bfp.quantize(x, name)
    x.copy_(3 * values((128, 256)).flip(0))
    graph.replay()
    torch.cuda.synchronize()
    expected = bfp.quantize(x, name)
    assert torch.equal(q.codes, expected.codes)
    assert torch.equal(q.scales, expected.scales)


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp4_e2m1"])
@pytest.mark.parametrize("columns", [8192, 8200])
def test_more_than_2_to_the_31_elements(name, columns):
    """Rows and columns of the far end are those of a small array; 8200 columns take the kernels for ragged blocks."""
    rows = 2**31 // columns + 96
    x = torch.empty((rows, columns), dtype=torch.bfloat16, device="cuda")
    x.random_(-256, 257)
    both = cuda.quantize_both(x, name)
    y = cuda.dequantize(*both.row, name, "bfloat16", columns=columns)
    far = rows // 32 * 32 - 64
    expected = numerics.quantize(x[far:], name)
    assert torch.equal(both.row.codes[far:], expected.codes)
    assert torch.equal(both.row.scales[far:], expected.scales)
    values = numerics.dequantize(*expected, name, "bfloat16", columns=columns)
    assert torch.equal(y[far:].view(torch.int16), values.view(torch.int16))
    turned = numerics.quantize(x[far:].mT.contiguous(), name)
    across = turned.codes.shape[-1]
    assert torch.equal(both.column.codes[:, -across:], turned.codes)
