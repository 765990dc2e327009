"""RMSNorms cast as they are made, on a GPU: the bits of PyTorch's operation and the casts behind it."""

import pytest

from blockfp import recipes
from blockfp.formats import Format

torch = pytest.importorskip("torch")
if torch.cuda.is_available():
    import torch.nn.functional as F
    from arrays import with_scales
    from blockfp.torch_backend.custom_ops import norm_kernels
    from blockfp.torch_backend.custom_ops.quantize_plans import quantize_matrix
    from blockfp.torch_backend.modules import fusing, layernorm_linear, multihead_attention
    from same_tensors import assert_same

    import blockfp.torch as bfp

EPS = 1e-5
DTYPES = ("bfloat16", "float16")
FORMATS = (
    "fp8_e4m3",
    "fp8_e4m3_pow2",
    "fp8_e4m3_1x128",
    "fp8_e4m3_1x128_fp32",
    "mxfp8_e4m3",
    "mxfp6_e3m2",
    "mxfp4_e2m1",
    "nvfp4",
)
SHAPES = ((256, 384), (32, 8), (160, 1032), (1024, 64), (64, 8192), (32, 5120), (96, 20480))


def tensors(shape, dtype, seed=0):
    """(x, weight) of rows of many sizes."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x, sizes = (torch.randn(shape, device="cuda", generator=generator) for _ in range(2))
    weight = torch.randn(shape[1], device="cuda", generator=generator)
    return (x * 2.0**sizes * 3).to(getattr(torch, dtype)), weight.to(getattr(torch, dtype))


def quantized(x, weight, row, column, multiplier=None, rotate=False, eps=EPS):
    """Parts by the kernels, which must take these, and one over the root mean square of each row."""
    run = norm_kernels.plan_of(x, weight, eps, row, column, multiplier is not None, rotate, 0.0)
    assert run is not None
    rows = torch.full((x.shape[0],), 7.0, device="cuda")
    return run((x, weight, rows), None, multiplier), rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [True, False])
def test_kernels_have_the_bits_of_pytorch(weighted, dtype):
    """Of all lengths of rows. Where this fails layers go on unfused, and are right."""
    for columns in (8, 16, 64, 120, 128, 136, 512, 1032, 2048, 2056, 2880, 3072, 4096, 5120, 6144, 8192, 12288, 16384, 18432):
        for eps in (EPS, 1e-6, 0.0, 1.0):
            found = norm_kernels.differing(torch.device("cuda:0"), getattr(torch, dtype), columns, weighted, eps)
            assert found == {}, (columns, eps, found)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("weighted", [True, False])
def test_casts(weighted, name):
    format = Format.parse(name)
    for dtype in DTYPES:
        for seed, shape in enumerate(SHAPES):
            x, weight = tensors(shape, dtype, seed)
            weight = weight if weighted else None
            made = F.rms_norm(x, shape[1:], weight, EPS)
            whole = format.block is None or shape[1] % format.block[1] == 0
            for row, column in ((format, format), (None, format), *([(format, None)] if whole else [])):
                for multiplier in (None, torch.tensor(3.0, device="cuda")) if format.per_tensor else (None,):
                    ours, rows = quantized(x, weight, row, column, multiplier)
                    theirs = quantize_matrix(made, row, column, None, multiplier, None, (False, False), False, 0.0)
                    if format.per_tensor and multiplier is None:
                        *ours, amax = ours
                        assert amax.view(torch.float32) == made.abs().max()
                    what = f"{dtype} {shape} {row} {column}, multiplier {multiplier}"
                    assert_same(ours, theirs, what)
                    assert_same([rows], [torch.ops.aten._fused_rms_norm(x, shape[1:], weight, EPS)[1][:, 0]], what)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotated(dtype):
    format = Format.parse("nvfp4")
    for seed, shape in enumerate(SHAPES):
        x, weight = tensors(shape, dtype, seed)
        made = F.rms_norm(x, shape[1:], weight, EPS)
        theirs = quantize_matrix(made, format, format, None, None, None, (False, False), True, 0.0)
        assert_same(quantized(x, weight, format, format, rotate=True)[0], theirs, f"{shape}")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("special", ["nan", "inf", "overflow", "zeros", "nan in the weight", "inf in the weight"])
def test_special_values(name, special):
    """An Inf of the norm marks scales, also where x holds none."""
    format = Format.parse(name)
    x, weight = tensors((256, 256), "bfloat16")
    if special == "zeros":
        x.zero_()
    elif special.endswith("weight"):
        weight[133] = torch.nan if "nan" in special else torch.inf
    else:
        x[70, 133] = {"nan": torch.nan, "inf": torch.inf, "overflow": 3e38}[special]
        weight[133] = 3e38
    made = F.rms_norm(x, [256], weight, EPS)
    for column in (format, None):
        theirs = quantize_matrix(made, format, column, None, None, None, (False, False), False, 0.0)
        ours, _ = quantized(x, weight, format, column)
        assert_same(ours[: len(theirs)], theirs, f"{special} {column}")


def test_what_the_kernels_do_not_take():
    """Other lengths, dtypes and places, and formats of weights: there is no plan."""
    e4m3, wide = Format.parse("fp8_e4m3"), Format.parse("fp8_e4m3_1x128")
    x, weight = tensors((256, 384), "bfloat16")
    take = lambda x, weight, row=e4m3, column=e4m3: norm_kernels.cast_of(x, weight, EPS, row, column, False, False, 0.0)  # noqa: E731
    assert take(x, weight) is not None
    assert take(x[:250], weight) is None
    assert take(x[:250], weight, column=None) is not None
    assert take(x.float(), weight.float()) is None
    assert take(x, weight.float()) is None
    assert take(x[:, :380].contiguous(), weight[:380].contiguous()) is None
    assert take(x[:, :256], weight[:256]) is None
    assert take(x[:, :320].contiguous(), weight[:320], wide, None) is None
    assert take(x, weight, Format.parse("fp8_e4m3_128x128"), None) is None
    assert take(x, weight, e4m3, wide) is None
    moved = torch.empty(385, dtype=x.dtype, device="cuda")[1:]
    assert take(x, moved) is None
    assert take(x, weight) is not None


def steps(make, fused, monkeypatch, shape=(2, 256, 256)):
    """Outputs and gradients of a layer, two steps."""
    torch.manual_seed(0)
    layer, results, calls = make(), [], []
    product = layernorm_linear.fused_norm_product

    def counted(*arguments):
        y = product(*arguments)
        calls.append(y is not None)
        return y

    with monkeypatch.context() as patch:
        for module in (layernorm_linear, multihead_attention):
            patch.setattr(module, "fused_norm_product", counted if fused else lambda *_: None)
        for seed in range(2):
            x, gradient = (tensors((512, 256), "bfloat16", seed + more)[0] for more in (0, 7))
            dtype = next(layer.parameters()).dtype
            x = x.to(dtype).view(shape).requires_grad_()
            y = layer(x)
            y.backward(gradient.to(dtype).view(shape)[..., :1].expand(y.shape))
            results += [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]
            bfp.update_scales(layer)
            layer.zero_grad()
    return results, calls


MAKERS = {
    "linear": lambda name, dtype: bfp.LayerNormLinear(256, 384, recipe=name, norm="rms_norm", device="cuda", dtype=dtype),
    "mlp": lambda name, dtype: bfp.LayerNormMLP(
        256, 384, recipe=name, norm="rms_norm", activation="swiglu", device="cuda", dtype=dtype
    ),
    "transformer": lambda name, dtype: bfp.TransformerLayer(
        256, 512, 4, recipe=name, norm="rms_norm", activation="swiglu", device="cuda", dtype=dtype
    ),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("name", recipes.RECIPES)
def test_layers(name, kind, dtype, monkeypatch):
    make = lambda: with_scales(MAKERS[kind](name, getattr(torch, dtype)))  # noqa: E731
    (ours, calls), (theirs, _) = (steps(make, fused, monkeypatch) for fused in (True, False))
    recipe = recipes.parse(name)
    if recipe.gradient.stochastic or recipe.gradient_columnwise.stochastic:
        # Keys of the layers are drawn anew: outputs alone are comparable.
        ours, theirs = ours[:1], theirs[:1]
    assert_same(ours, theirs, f"{name} {kind}")
    if dtype == "float32":
        assert not any(calls)
    elif name in ("fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "mxfp6", "mxfp4", "nvfp4"):
        assert all(calls)


def test_frozen_norms_and_weights():
    for frozen in ("norm", "weight", "x", "all"):
        found = []
        for fused in (True, False):
            torch.manual_seed(0)
            layer = bfp.LayerNormLinear(256, 384, recipe="fp8_block", norm="rms_norm", device="cuda", dtype=torch.bfloat16)
            layer.norm.weight.requires_grad_(frozen not in ("norm", "all"))
            layer.linear.weight.requires_grad_(frozen not in ("weight", "all"))
            x = tensors((256, 256), "bfloat16")[0].requires_grad_(frozen not in ("x", "all"))
            y = layer(x) if fused else layer.linear(layer.norm(x))
            y.sum().backward()
            found.append([y.detach(), *(one.grad for one in (x, *layer.parameters()) if one.grad is not None)])
        assert_same(*found, frozen)


def test_inference_and_graphs():
    layer = bfp.LayerNormLinear(256, 384, recipe="fp8_current", norm="rms_norm", device="cuda", dtype=torch.bfloat16)
    x, _ = tensors((512, 256), "bfloat16")
    wanted = layer.linear(layer.norm(x)).detach()
    with torch.inference_mode():
        assert_same([layer(x)], [wanted], "inference")
    with torch.no_grad():
        layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layer(x)
        x.copy_(tensors((512, 256), "bfloat16", 5)[0])
        graph.replay()
        assert_same([captured], [layer.linear(layer.norm(x))], "captured")
        compiled = torch.compile(layer, fullgraph=True)(x)
        # A compiler's norm has bits of its own.
        assert (compiled - captured).float().norm() < 0.1 * captured.float().norm()


def test_what_the_norm_makes_is_not_there():
    """The cast allocates codes, scales and a number for each row alone, and the backward keeps the columnwise ones."""
    tokens, features = 4096, 4096
    layer = bfp.LayerNormLinear(
        features, 256, bias=False, recipe="fp8_block", norm="rms_norm", device="cuda", dtype=torch.bfloat16
    )
    x = tensors((tokens, features), "bfloat16")[0].requires_grad_()
    layer(x)
    before, one = torch.cuda.memory_allocated(), tokens * features
    y = layer(x)
    kept = torch.cuda.memory_allocated() - before
    assert kept < 1.3 * one + y.numel() * 2, kept / one
    for name, bytes_each in (("fp8_e4m3", 2), ("fp8_e4m3_1x128", 2), ("nvfp4", 1)):
        f = Format.parse(name)
        run = norm_kernels.plan_of(x, layer.norm.weight, EPS, f, f, False, False, 0.0)
        assert run is not None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        rows = torch.empty(tokens, device="cuda")
        parts = run((x.detach(), layer.norm.weight.detach(), rows), None, None)
        peak = torch.cuda.max_memory_allocated() - before
        assert len(parts) in (4, 5, 6)
        assert peak < (bytes_each + 0.2) * one, (name, peak / one)


def test_nothing_waits_for_the_device(waiting_raises):
    layer = bfp.LayerNormLinear(256, 384, recipe="fp8_block", norm="rms_norm", device="cuda", dtype=torch.bfloat16)
    x, gradient = (tensors((512, columns), "bfloat16")[0] for columns in (256, 384))
    x.requires_grad_()
    layer(x).backward(gradient)
    with waiting_raises():
        layer(x).backward(gradient)


@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4"])
def test_models_that_convert_knows(name, monkeypatch):
    """`torch.nn.Sequential` with a norm before a layer."""
    found, taken = [], []
    for fused in (True, False):
        torch.manual_seed(0)
        plain = torch.nn.Sequential(
            torch.nn.RMSNorm(256, eps=EPS), torch.nn.Linear(256, 512), torch.nn.SiLU(), torch.nn.Linear(512, 256)
        )
        model = with_scales(bfp.convert(plain.to("cuda", torch.bfloat16), name))
        product = fusing.fused_norm_product

        def counted(*arguments, product=product):
            y = product(*arguments)
            taken.append(y is not None)
            return y

        with monkeypatch.context() as patch:
            patch.setattr(fusing, "fused_norm_product", counted if fused else lambda *_: None)
            x = tensors((512, 256), "bfloat16")[0].view(2, 256, 256).requires_grad_()
            y = model(x)
            y.backward(tensors((512, 256), "bfloat16", 3)[0].view(2, 256, 256))
        found.append([y.detach(), *([] if name == "nvfp4" else [x.grad, *(p.grad for p in model.parameters())])])
    assert taken == [True]
    assert_same(*found, name)
