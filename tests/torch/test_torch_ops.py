"""The custom ops: torch's own checks, gradients, compilation, codes and scales as DTensors, and what is refused."""

import functools
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import threaded
import torch
from arrays import values
from blockfp.torch_backend.ops import cuda, dequantize_plans, library
from blockfp.torch_backend.ops.quantize import cuda_reader
from held_formats import FORMATS
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import blockfp
import blockfp.torch as bfp
from blockfp.definition import numerics
from blockfp.formats import Format
from blockfp.kernels.operand_cast import OperandCast

ONE_OF_EACH = ("fp8_e4m3", "fp8_e5m2_128x128", "mxfp8_e4m3", "mxfp6_e3m2_32x32", "mxfp4_e2m1", "mxint8_floor", "nvfp4")
WORDS = torch.tensor([7, 9], dtype=torch.int64)


def tensor(shape=(37, 80), dtype=torch.bfloat16):
    return values(shape, 0, dtype)


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize("shape", [(37, 80), (2, 5, 33)])
def test_opcheck(name, shape):
    x = tensor(shape)
    for key in (None, WORDS):
        torch.library.opcheck(dequantize_plans.quantize, (x, name, key))
    q = bfp.quantize(x, name)
    torch.library.opcheck(
        dequantize_plans.dequantize, (q.codes, q.scales, q.tensor_scale, name, torch.float32, shape[-1], [0, 0])
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_gradients_pass_straight_through(name, dtype):
    x = tensor(dtype=dtype).requires_grad_()
    weight = tensor((37, 80), torch.float32)
    (bfp.quantize(x, name).dequantize(torch.float32) * weight).sum().backward()
    assert torch.equal(x.grad, weight.to(dtype))
    x.grad = None
    (bfp.fake_quantize(x, name).float() * weight).sum().backward()
    assert torch.equal(x.grad, weight.to(dtype))
    with torch.no_grad():
        assert not bfp.quantize(x, name).requires_grad


def test_gradients_pass_through_compiled_code():
    x = tensor().requires_grad_()
    weight = tensor((37, 80), torch.float32)
    step = torch.compile(
        lambda x: (bfp.fake_quantize(x, "mxfp8_e4m3").float() * weight).sum(), fullgraph=True, backend="aot_eager"
    )
    step(x).backward()
    assert torch.equal(x.grad, weight.to(x.dtype))


@pytest.mark.parametrize("name", ["fp8_e4m3", "mxfp6_e3m2_32x32", "nvfp4"])
def test_a_compiled_function_makes_a_quantized_tensor(name):
    torch._dynamo.reset()
    x = torch.randn((37, 80), generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(lambda x: bfp.quantize(x, name), fullgraph=True, backend="aot_eager")
    got, wanted = compiled(x), bfp.quantize(x, name)
    assert got.format is wanted.format
    assert all(torch.equal(one, other) for one, other in zip(got.parts, wanted.parts, strict=True))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_quantized_arguments_and_parameters_compile(name):
    """Their format can be read inside the graph; another tensor of the same format is no recompilation."""
    torch._dynamo.reset()

    class Layer(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = torch.nn.Parameter(bfp.quantize(weight, name), requires_grad=False)

        def forward(self, x, q):
            scale = 2 if self.weight.format is Format.parse(name) and q.format.name == name else 0
            return x @ self.weight.dequantize().mT + scale * q.dequantize().sum()

    layer, weight = Layer(tensor((16, 80))), tensor((16, 80))
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for seed in range(3):
        x = torch.randn((37, 80), generator=torch.Generator().manual_seed(seed)).bfloat16()
        q = bfp.quantize(x, name)
        torch.testing.assert_close(compiled(x, q), layer(x, q))
    assert counter.frame_count == 1
    assert torch.equal(layer.weight.dequantize(), bfp.quantize(weight, name).dequantize())


def test_formats_are_graphs_of_their_own():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    fake = torch.compile(lambda x, format: bfp.fake_quantize(x, format), fullgraph=True, backend=counter)
    x = tensor()
    for _ in range(2):
        for format in FORMATS[:4]:
            assert torch.equal(fake(x, format), bfp.fake_quantize(x, format))
    assert counter.frame_count == 4


@pytest.mark.parametrize(
    ("x", "options", "error", "message"),
    [
        (torch.zeros(4, 4, dtype=torch.float64), {}, TypeError, "float64"),
        (torch.zeros(4, 4, dtype=torch.int32), {}, TypeError, "int32"),
        (torch.zeros(4), {}, ValueError, "two or more axes"),
        (torch.zeros(()), {}, ValueError, "two or more axes"),
        ([[1.0]], {}, TypeError, "torch.Tensor, got list"),
        (torch.zeros(4, 4).to_sparse(), {}, TypeError, "to_dense"),
        (torch.zeros(4, 4), {"format": "mxfp9"}, ValueError, "mxfp9"),
        (torch.zeros(4, 4), {"key": torch.Generator()}, TypeError, "random_key"),
        (torch.zeros(4, 4), {"key": -3}, ValueError, "key must be"),
        (torch.zeros(4, 4), {"key": torch.tensor([2**32 + 1, 2])}, ValueError, "key must be"),
        (torch.zeros(4, 4), {"key": torch.zeros(3, dtype=torch.int32)}, ValueError, "key must be"),
        (torch.zeros(4, 4), {"key": torch.zeros(2, dtype=torch.int32, device="meta")}, ValueError, "meta"),
    ],
)
def test_bad_input(x, options, error, message):
    with pytest.raises(error, match=message):
        bfp.quantize(x, **({"format": "nvfp4"} | options))


def test_quantizing_twice_is_refused():
    with pytest.raises(TypeError, match="quantized already"):
        bfp.quantize(bfp.quantize(tensor(), "mxfp8_e4m3"), "mxfp8_e4m3")
    with pytest.raises(TypeError, match="float64"):
        bfp.quantize(tensor(), "mxfp8_e4m3").dequantize(torch.float64)


def test_random_keys_come_from_a_generator():
    first, again = (bfp.random_key(torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, again)
    assert first.shape == (2,)
    x = tensor()
    assert torch.equal(bfp.quantize(x, "nvfp4", key=first).codes, bfp.quantize(x, "nvfp4", key=again).codes)


def test_meta_tensors_have_the_shapes():
    for format in FORMATS:
        q, real = bfp.quantize(torch.empty(37, 80, device="meta"), format), bfp.quantize(tensor(), format)
        assert (q.codes.shape, q.scales.shape) == (real.codes.shape, real.scales.shape)
        assert q.dequantize().shape == (37, 80)


def test_the_cuda_kernels_take_tensors_of_one_gpu(monkeypatch):
    """Another index of the same type is another device; each call checks before it looks for the library."""
    with torch._subclasses.FakeTensorMode():
        first, second = (torch.empty((4, 4), device=f"cuda:{index}") for index in (0, 1))
        codes = torch.empty((4, 4), dtype=torch.uint8, device="cuda:0")
        words = torch.empty(2, dtype=torch.int32, device="cuda:1")
        cuda.check_beside(first, "x", scales=first, tensor_scale=None)
        monkeypatch.setattr(cuda_reader, "library", lambda: SimpleNamespace(quantize=None))
        form = Format.parse("fp8_e4m3")
        read, of_amax = (cuda_reader.reader(first, OperandCast(form, None, given)) for given in ("multiplier", "amax"))
        amax, into = numerics.Amax(words, None, None), numerics.Quantized(codes, second, None)
        for name, beside, call in (
            ("scales", "codes", lambda: cuda.dequantize(codes, second, None, "fp8_e4m3_128x128", "float32", columns=4)),
            ("tensor_scale", "codes", lambda: cuda.dequantize(codes, first, second, "nvfp4", "float32", columns=4)),
            ("scales", "codes", lambda: cuda.transpose(codes, second, "fp8_e4m3_128x128", columns=4)),
            ("key", "x", lambda: cuda.quantize(first, "mxfp8_e4m3", key=words)),
            ("amax.blocks", "x", lambda: cuda.quantize(first, "mxfp8_e4m3", amax=amax)),
            ("out.scales", "x", lambda: cuda.quantize(first, "mxfp8_e4m3", out=into)),
            ("multiplier", "x", lambda: read(first, None, second)),
            ("amax", "x", lambda: of_amax(first, words)),
            ("scales", "x", lambda: cuda.encode(first, "fp8_e4m3_128x128", second)),
            ("step", "key", lambda: cuda.gradient_keys(None, codes, second, 0, -1)),
        ):
            with pytest.raises(ValueError, match=rf"^{name} is on cuda:1 and {beside} on cuda:0: pass {name}\.to\({beside}"):
                call()


def test_the_face_does_not_import_jax():
    code = "import sys, blockfp.torch; sys.exit(any(m.split('.')[0] in ('jax', 'jaxlib', 'tvm_ffi') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


SHAPE = (4, 64, 96)


def dequantized(rank, name, placement):
    mesh = init_device_mesh("cpu", (2,))
    q = bfp.quantize(torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)), name)
    # Where square blocks are cut, their scales are too.
    parts = [distribute_tensor(part, mesh, [placement], src_data_rank=None) for part in (q.codes, q.scales)]
    tensor_scale = None
    if q.tensor_scale is not None:
        tensor_scale = distribute_tensor(q.tensor_scale, mesh, [Replicate()], src_data_rank=None)
    values = dequantize_plans.dequantize(*parts, tensor_scale, name, torch.float32, SHAPE[-1], [0, 0])
    assert torch.equal(values.full_tensor(), q.dequantize())
    return values.placements[0]


@pytest.mark.parametrize(
    ("name", "placement", "result"),
    [
        ("mxfp8_e4m3", Shard(1), Shard(1)),
        ("nvfp4", Shard(1), Shard(1)),
        ("nvfp4", Replicate(), Replicate()),
        ("mxfp4_e2m1", Shard(0), Shard(0)),
        ("mxfp8_e4m3_32x32", Shard(0), Shard(0)),
        ("mxfp8_e4m3_32x32", Shard(1), Replicate()),
    ],
)
def test_dequantize(name, placement, result):
    assert threaded.run(2, dequantized, name, placement) == [result] * 2


def refused(rank):
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.ones(64, 64)
    x = distribute_tensor(whole, mesh, [Replicate()], src_data_rank=None)
    weight = bfp.parallelize(bfp.Linear(64, 64, recipe="mxfp8"), mesh, "column").weight
    for function, arguments, name in (
        (bfp.quantize, (x, "mxfp8_e4m3"), "x"),
        (bfp.fake_quantize, (x, "mxfp8_e4m3"), "x"),
        (functools.partial(bfp.linear, recipe="mxfp8"), (x, whole), "x"),
        (functools.partial(bfp.linear, recipe="mxfp8"), (whole, weight), "weight"),
    ):
        with pytest.raises(ValueError, match=rf"^{name} is a DTensor, .*{name}\.to_local\(\)"):
            function(*arguments)


def test_functions_take_one_ranks_tensors():
    threaded.run(2, refused)


@threaded.on(2)
def test_values_of_a_weight(rank):
    mesh = init_device_mesh("cpu", (2,))
    q = bfp.quantize(torch.randn(64, 96, generator=torch.Generator().manual_seed(0)), "mxfp8_e4m3_32x32")
    model = torch.nn.Sequential(bfp.Linear(96, 64, bias=False, recipe="mxfp8"))
    weight = bfp.parallelize(model[0], mesh, "column").weight
    weight.detach().to_local().copy_(q[32 * rank : 32 * (rank + 1)])
    for held in (weight, weight.detach()):
        with pytest.raises(NotImplementedError, match=r"to_local\(\)\.dequantize\(\) .*high_precision_state_dict\(model\)"):
            held.dequantize()
        with pytest.raises(NotImplementedError, match=r"a DTensor: call it on its to_local\(\)"):
            held + 1
    assert torch.equal(weight.to_local().dequantize(), q.dequantize().chunk(2)[rank])
    whole = bfp.high_precision_state_dict(model)["0.weight"]
    assert torch.equal(whole, q.dequantize())


def test_programs_of_another_blockfp_are_compiled_again(tmp_path, monkeypatch):
    """torch's caches on disk know ops by name; a program has an op's defaults and the shapes that its fake gave."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    config = torch.compiler.config
    (ours,) = re.findall("blockfp [^;]*;", config.cache_key_tag)
    assert ours == f"blockfp {blockfp.__version__} {library.digest_of(Path(blockfp.__file__).parent)};"

    def found():
        torch.compiler.reset()
        counters.clear()
        q = bfp.quantize(tensor((32, 64)), "mxfp8_e4m3")
        compiled = torch.compile(lambda q: q.dequantize(torch.float32) + 1, fullgraph=True)
        assert torch.equal(compiled(q), q.dequantize(torch.float32) + 1)
        return [counters[cache][f"{kind}_cache_hit"] for cache, kind in (("inductor", "fxgraph"), ("aot_autograd", "autograd"))]

    package = tmp_path / "blockfp"
    (package / "ops").mkdir(parents=True)
    tags = []
    for source in ("exact=False", "exact=''"):
        (package / "ops" / "products.py").write_text(source)
        tags.append(config.cache_key_tag.replace(ours, f"blockfp 0.0.1 {library.digest_of(package)};"))
    hits = []
    for tag in (tags[0], tags[0], tags[1]):
        monkeypatch.setattr(config, "cache_key_tag", tag)
        hits.append(max(found()))
    assert hits == [0, 1, 0]
