"""`stream_weights`: what a server gets is what `blockfp convert` writes of the whole model, to the byte, from any mesh."""

import copy
import hashlib
import json
import math

import pytest
import threaded
import torch
import torch.distributed as dist
from blockfp.torch_backend.checkpoint.stream import _Digests
from command import run
from resumed import MESHES, model_of, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import blockfp.torch as bfp
from blockfp.files.modelfile import open_model
from blockfp.files.names import LAYER_BUFFERS

SHAPES = [(64, 256), (37, 256), (50, 256)]
SHARDED = [
    ("fp8_e4m3_row", "compressed-tensors"),
    ("mxfp8_e4m3_32x32", "compressed-tensors"),
    ("nvfp4_16x16", "modelopt"),
    ("fp8_e4m3_128x128_fp32", "fine-grained-fp8"),
]
WHOLE = [("fp8_e4m3", "compressed-tensors"), ("nvfp4_16x16", "compressed-tensors"), ("mxfp4_e2m1", "mxfp4"), *SHARDED]


def converted(folder, model, layout):
    """(dtype, shape, digest) of each tensor, and config.json, of the file that the command writes of a whole model."""
    state = dict(model.named_parameters())
    left_out = {name for names in LAYER_BUFFERS for name in names}
    state |= {name: x for name, x in model.named_buffers() if name.rpartition(".")[2] not in left_out}
    bfp.save(folder / "in.safetensors", state)
    result = run("convert", folder / "in.safetensors", folder / "out", "--layout", layout)
    assert result.exit_code == 0, result.output
    assert " 0 requantized" in " ".join(result.output.split())
    tensors = open_model(folder / "out" / "model.safetensors").tensors
    found = {t.name: (t.dtype.name, t.shape, hashlib.sha256(t.read().tobytes()).hexdigest()) for t in tensors}
    return found, json.loads((folder / "out" / "config.json").read_text())


def sha256(tensor):
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def streamed(model, layout, **options):
    """The same of the buckets, and their sizes."""
    stream = bfp.stream_weights(model, layout=layout, **options)
    found, sizes = {}, []
    for bucket in stream:
        sizes.append(bucket.nbytes)
        assert list(bucket.tensors) == list(bucket.sha256)
        assert bucket.nbytes == sum(x.nbytes for _, x in bucket) or not bucket.tensors
        for name, tensor in bucket:
            assert type(tensor) is torch.Tensor
            assert stream.shapes[name] == (tensor.dtype, tuple(tensor.shape))
            digest = sha256(tensor)
            assert bucket.sha256[name] == digest
            found[name] = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), digest
    return found, stream, sizes


def _rank(rank, mesh, format, layout, expected, config):
    found, stream, sizes = streamed(shard(model_of(format, SHAPES), mesh), layout, bucket_bytes=6000)
    assert (found == expected) if rank == 0 else (found == {})
    assert set(stream.shapes) == set(expected)
    assert stream.configs["config.json"] == config
    return sizes


@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if MESHES[mesh]])
def test_every_mesh_gives_the_bytes_of_the_file(mesh, tmp_path):
    for i, (format, layout) in enumerate(SHARDED):
        (tmp_path / str(i)).mkdir()
        expected, config = converted(tmp_path / str(i), model_of(format, SHAPES), layout)
        sizes = threaded.run(math.prod(MESHES[mesh][0]), _rank, mesh, format, layout, expected, config)
        assert all(each == sizes[0] for each in sizes)


@pytest.mark.parametrize(("format", "layout"), WHOLE)
def test_a_whole_model_gives_the_bytes_of_the_file(format, layout, tmp_path):
    model = model_of(format, SHAPES)
    expected, config = converted(tmp_path, model, layout)
    found, stream, _ = streamed(model, layout)
    assert found == expected
    assert list(found) == list(stream.shapes)
    assert stream.configs["config.json"] == config


@pytest.mark.parametrize("quantize", [False, True])
def test_layers_that_servers_join_are_named(quantize):
    weights = "high_precision" if quantize else "quantized"
    attention = nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in ("q_proj", "k_proj", "v_proj")})
    model = bfp.convert(nn.ModuleDict({"attn": attention}), "nvfp4", weights=weights)
    with pytest.warns(UserWarning, match="q_proj, k_proj, v_proj of attn have scales of the whole tensor") as caught:
        bfp.stream_weights(model, layout="modelopt", quantize=quantize)
    assert [warning.filename for warning in caught] == [__file__]


def test_weights_in_high_precision_go_as_they_are():
    layers = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 33))
    model = bfp.convert(layers, "fp8_row", weights="high_precision")
    found, stream, _ = streamed(model, "compressed-tensors")
    assert stream.shapes["0.weight"] == (torch.float32, (64, 64))
    assert {name for name in found if name.startswith("1.")} == {
        f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    assert {name for name in found if name.startswith("0.")} == {"0.weight", "0.bias"}


def _experts(rank, kind, layout, whole, expected):
    model = copy.deepcopy(whole)
    if kind == "ep":
        bfp.parallelize(model[0], init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)), "experts")
    elif kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
        bfp.parallelize(model[0], mesh["ep"], "experts")
        fully_shard(model, mesh=mesh["fsdp"])
    found, _, _ = streamed(model, layout, keep_on=None)
    assert found == expected


@pytest.mark.parametrize("layout", ["fine-grained-fp8", "mxfp4"])
@pytest.mark.parametrize("kind", ["ep", "fsdp", "fsdp x ep"])
def test_experts(kind, layout, tmp_path):
    whole = nn.Sequential(bfp.GroupedLinear(4, 64, 96, recipe="fp8_block" if layout == "fine-grained-fp8" else "mxfp4"))
    expected, _ = converted(tmp_path, whole, layout)
    threaded.run(4 if kind == "fsdp x ep" else 2, _experts, kind, layout, whole, expected)


def test_a_bucket_is_bounded_and_a_weight_comes_with_its_scales():
    model = model_of("fp8_e4m3_row", [(32, 64)] * 6)
    one = 32 * 64 + 32 * 4
    for limit in (1, one + 32 * 4, 2 * one + 300):
        stream = bfp.stream_weights(model, layout="compressed-tensors", bucket_bytes=limit)
        buckets = list(stream)
        assert max(bucket.nbytes for bucket in buckets) <= max(limit, one)
        assert sum(bucket.nbytes for bucket in buckets) == 6 * (one + 32 * 4)
        names = [set(bucket.tensors) for bucket in buckets]
        assert all(("0.weight" in each) == ("0.weight_scale" in each) for each in names)
        assert set().union(*names) == set(stream.shapes)


def test_tied_weights_come_once():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    stream = bfp.stream_weights(bfp.convert(model, "mxfp8"), layout="compressed-tensors", sha256=False)
    assert stream.tied == {"1.weight": "0.weight"}
    (bucket,) = stream
    assert set(bucket.tensors) == {"0.weight", "0.weight_scale"}
    assert bucket.sha256 == {}
    assert list(bfp.stream_weights(nn.Sequential(), layout="compressed-tensors")) == []


def _refused(rank, case):
    model, options = model_of("mxfp8_e4m3", SHAPES[:1]), {"layout": "compressed-tensors"}
    if case == "NaN on one rank":
        shard(model, "fsdp2")
        if rank == 1:
            model[0].weight.to_local().scales[0, 0] = 0xFF
    elif case == "others":
        options["bucket_bytes"] = 1 << (20 + rank)
    else:
        model = model_of("mxfp8_e4m3", SHAPES[: 1 + rank])
    with pytest.raises(ValueError, match=REFUSED[case]):
        bfp.stream_weights(model, **options)


REFUSED = {
    "NaN on one rank": r"0\.weight: has NaN scales, which compressed-tensors would read as numbers",
    "others": "bucket_bytes is 1048576 on rank 0 and 2097152 on rank 1",
    "other models": "the number of tensors in model is 2 on rank 0 and 4 on rank 1",
}


@pytest.mark.parametrize("case", REFUSED)
def test_all_ranks_refuse_what_one_can_not_send(case):
    threaded.run(2, _refused, case)


@pytest.mark.parametrize(
    ("format", "options", "message"),
    [
        ("mxfp6_e3m2", {}, r"0\.weight: compressed-tensors has no layout for mxfp6_e3m2: .* such as mxfp8_e4m3"),
        ("fp8_e4m3_row", {"layout": "fine-grained-fp8"}, r"fine-grained-fp8 has no layout for fp8_e4m3_row"),
        ("mxfp8_e4m3", {"layout": "gguf"}, r"layout must be one of compressed-tensors, .*, got 'gguf'"),
        ("mxfp8_e4m3", {"bucket_bytes": 0}, "bucket_bytes must be an integer of 1 or more, got 0"),
        ("mxfp8_e4m3", {"keep_on": (1,)}, r"keep_on must be ranks of 0\.\.0, got \[1\]"),
    ],
)
def test_what_is_refused(format, options, message):
    with pytest.raises(ValueError, match=message):
        bfp.stream_weights(model_of(format, SHAPES[:1]), **{"layout": "compressed-tensors", **options})


def test_a_model_without_values_is_refused():
    model = bfp.convert(nn.Sequential(nn.Linear(64, 64, device="meta")), "mxfp8")
    with pytest.raises(ValueError, match=r"0\.weight is on the meta device"):
        bfp.stream_weights(model, layout="compressed-tensors")
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        bfp.stream_weights(3, layout="compressed-tensors")


def test_a_bucket_is_one_collective_where_rows_are_cut_evenly():
    """Codes, scales and biases together, with the bytes that come one by one."""
    sent = [[], []]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "_c10d_functional" and "wait" not in str(function):
                sent[dist.get_rank()].append(function._overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    def rank(rank):
        with threaded.seeded(0):
            model = nn.Sequential(*(bfp.Linear(256, 64, recipe="mxfp8") for _ in range(3)))
            nn.init.normal_(model[1].bias)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        whole = model[1].bias.full_tensor().detach()
        with Watch():
            (bucket,) = bfp.stream_weights(model, layout="compressed-tensors")
        if rank == 0:
            assert torch.equal(bucket.tensors["1.bias"], whole)
            assert all(bucket.sha256[name] == sha256(x) for name, x in bucket)

    threaded.run(2, rank)
    assert sent == [["all_gather_into_tensor_coalesced"]] * 2


class _Elsewhere(torch.Tensor):
    """A tensor that looks as if the host couldn't read it."""

    is_cpu = False


def test_digests_of_another_device_share_memory():
    digests, places = _Digests(), []
    for sizes in ((40, 3, 0), (7, 36), (100,)):
        plain = {str(i): torch.randn(size).bfloat16() for i, size in enumerate(sizes)}
        elsewhere = {name: tensor.as_subclass(_Elsewhere) for name, tensor in plain.items()}
        assert digests.of(elsewhere) == digests.of(plain) == {name: sha256(tensor) for name, tensor in plain.items()}
        places.append((digests._memory.data_ptr(), digests._memory.numel()))
    assert places[0] == places[1] != places[2]
    assert places[2][1] == 200
