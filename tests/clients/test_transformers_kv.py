"""Scales of cached keys and values: those of transformers' own cache, read by compressed-tensors, in each server's layout."""

import json
from types import SimpleNamespace

import pytest
import threaded
import torch
from documented import run_documented
from hf_models import TOKENS, family
from safetensors.torch import load_file
from torch import nn

import blockfp.torch as bfp
from blockfp.integrations.transformers import observe_kv, save_in_layout, stream_in_layout

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

PATHS = ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def model_of(recipe="fp8_block", attention="sdpa"):
    model = family("Llama", num_attention_heads=4, num_key_value_heads=2)
    model.set_attn_implementation(attention)
    return bfp.convert(model, recipe, filter_fn=lambda path, _: path != "lm_head").eval()


def cached(model, tokens=TOKENS):
    """Keys and values of each layer [batch, heads, tokens, size], from transformers' cache."""
    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values
    return [(layer.keys.double(), layer.values.double()) for layer in cache.layers]


def observed(model, per, *batches):
    with observe_kv(model) as observation:
        for batch in batches or (TOKENS,):
            model(batch)
    return observation.scales(per)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_scale_is_the_caches_largest_magnitude_over_448(attention):
    model = model_of(attention=attention)
    batches = (TOKENS, 63 - TOKENS)
    both = [cached(model, batch) for batch in batches]
    tensor, head = (observed(model, per, *batches) for per in ("tensor", "head"))
    assert list(tensor) == list(head) == PATHS
    for i, path in enumerate(PATHS):
        for j in range(2):
            amax = torch.stack([one[i][j].abs().amax((0, 2, 3)) for one in both]).amax(0)
            assert (tensor[path][j].shape, head[path][j].shape) == ((1,), (2, 1, 1))
            torch.testing.assert_close(head[path][j].view(-1).double(), amax / 448, rtol=1e-6, atol=0)
            torch.testing.assert_close(tensor[path][j].double(), amax.max().view(1) / 448, rtol=1e-6, atol=0)


def test_only_the_forwards_of_this_context_count():
    model, other = model_of(), family("Llama")
    with observe_kv(model) as outer:
        model(TOKENS)
        with observe_kv(model) as inner:
            other(TOKENS)
            with pytest.raises(ValueError, match="no attention of the model has run"):
                inner.scales()
            model(TOKENS)
        assert torch.equal(inner.scales()[PATHS[0]][0], outer.scales()[PATHS[0]][0])
        with pytest.raises(ValueError, match="no attention of the model has run"):
            outer.scales()
    model(TOKENS)
    with pytest.raises(ValueError, match="no attention of the model has run"):
        outer.scales()


NAMES = {
    "compressed-tensors": ("k_scale", "v_scale"),
    "fine-grained-fp8": ("k_scale", "v_scale"),
    "modelopt": ("k_proj.k_scale", "v_proj.v_scale"),
}
RECIPES = {"compressed-tensors": "mxfp8", "fine-grained-fp8": "fp8_block", "modelopt": "nvfp4", "mxfp4": "mxfp4"}


@pytest.mark.parametrize("layout", NAMES)
def test_each_layout_has_them_under_its_names(layout, tmp_path):
    model = model_of(RECIPES[layout])
    scales = observed(model, "tensor")
    save_in_layout(model, tmp_path, layout, kv_scales=scales)
    file = load_file(tmp_path / "model.safetensors")
    stream = stream_in_layout(model, layout, kv_scales=scales)
    sent = {name: tensor for bucket in stream for name, tensor in bucket}
    plain = bfp.stream_weights(model, layout=layout, kv_scales=scales)
    for found in (file, sent, {name: tensor for bucket in plain for name, tensor in bucket}):
        added = {f"{path}.{name}": scales[path][i] for path in PATHS for i, name in enumerate(NAMES[layout])}
        assert {name for name in found if name.endswith(("k_scale", "v_scale"))} == added.keys()
        assert all(torch.equal(found[name], scale) for name, scale in added.items())
    told = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert stream.configs["config.json"]["quantization_config"].get("kv_cache_scheme") == told.get("kv_cache_scheme")
    if layout != "fine-grained-fp8":
        assert (told["kv_cache_scheme"]["num_bits"], told["kv_cache_scheme"]["type"]) == (8, "float")
    if layout == "modelopt":
        assert json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]["kv_cache_quant_algo"] == "FP8"


@pytest.mark.parametrize("per", ["tensor", "head"])
def test_compressed_tensors_reads_the_scheme_and_quantizes_by_the_scales(per):
    """By its own functions: its 0.20 finds no attention of transformers 5.24, which calls caches by another name."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.lifecycle.initialize import initialize_qparams

    model = model_of("fp8_row")
    scales = observed(model, per)
    stream = stream_in_layout(model, "compressed-tensors", kv_scales=scales)
    scheme = QuantizationConfig.model_validate(stream.configs["config.json"]["quantization_config"]).kv_cache_scheme
    for path, cache in zip(PATHS, cached(model), strict=True):
        for name, x in zip("kv", cache, strict=True):
            theirs, scale = nn.Module(), stream_of(stream, f"{path}.{name}_scale", scales[path]["kv".index(name)])
            _, heads, _, size = x.shape
            initialize_qparams(theirs, name, scheme, (heads, None, size), torch.float32, force_zero_point=False)
            assert getattr(theirs, f"{name}_scale").shape == scale.shape
            held = fake_quantize(x.float(), scale, None, scheme)
            codes = (x.float() / scale).to(torch.float8_e4m3fn)
            torch.testing.assert_close(held, codes.float() * scale, rtol=1e-6, atol=0)
            # Nothing saturates, and the largest element takes the largest code.
            assert codes.float().abs().max() == 448
            assert (x.float() / scale).abs().max() < 448 * (1 + 2**-20)


def stream_of(stream, name, scale):
    assert stream.shapes[name] == (torch.float32, tuple(scale.shape))
    return scale


def test_what_is_refused(tmp_path):
    model = model_of()
    scales, heads = observed(model, "tensor"), observed(model, "head")
    path, pair = PATHS[0], scales[PATHS[0]]
    for bad, error, match in (
        (heads, ValueError, r"fine-grained-fp8 has one scale for all heads, got 2 for model\.layers\.0\.self_attn"),
        ({**scales, path: heads[path]}, ValueError, "some are of a whole attention and some of each head"),
        ({"model.layers.7": pair}, ValueError, r"kv_scales: model has no module 'model\.layers\.7'"),
        ({path: pair[0]}, TypeError, r"kv_scales\['model\.layers\.0\.self_attn'\] must be two tensors"),
        (
            {path: (pair[0], pair[1].half())},
            ValueError,
            r"must be float32 of shape \(1,\) or \(heads, 1, 1\), got torch\.float16",
        ),
        ({path: (pair[0], pair[1] * 0)}, ValueError, "must be finite and above 0, got tensor"),
        ([pair], TypeError, "kv_scales must be a dictionary by the path of an attention, got list"),
    ):
        with pytest.raises(error, match=match):
            save_in_layout(model, tmp_path / "out", "fine-grained-fp8", kv_scales=bad)
        with pytest.raises(error, match=match):
            stream_in_layout(model, "fine-grained-fp8", kv_scales=bad)
    with pytest.raises(ValueError, match="mxfp4 has no scales of keys and values"):
        stream_in_layout(model_of("mxfp4"), "mxfp4", kv_scales=scales)
    assert not (tmp_path / "out").exists()
    with (
        pytest.raises(ValueError, match=r"self_attn, a DeepseekV3Attention, caches a compression"),
        observe_kv(family("DeepseekV3")),
    ):
        pass
    with pytest.raises(ValueError, match="model has no attention of transformers"), observe_kv(nn.Linear(2, 2)):
        pass
    with observe_kv(model) as observation, torch.no_grad():
        with pytest.raises(ValueError, match="per must be 'tensor' or 'head', got 'token'"):
            observation.scales("token")
        model.model.layers[1].self_attn.v_proj.weight.scales.fill_(torch.inf)
        model(TOKENS)
        with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn: keys or values are not finite"):
            observation.scales()


def test_ranks_share_the_largest():
    model = model_of()
    whole = observed(model, "head")
    halves = []
    for half in TOKENS:
        with observe_kv(model) as one:
            model(half[None])
        halves.append(one)

    def rank(rank):
        return halves[rank].scales("head")

    found = threaded.run(2, rank)
    for path in PATHS:
        for one in found:
            assert all(torch.equal(a, b) for a, b in zip(one[path], whole[path], strict=True))


def test_the_documented_lines():
    given = {}
    engine = SimpleNamespace(load_weights=lambda bucket: given.update(bucket))
    run_documented("server: cached keys and values", model=model_of(), tokens=TOKENS, engine=engine)
    assert given["model.layers.1.self_attn.v_scale"].shape == (1,)
