"""Code that takes a layer's weight and multiplies, draws, averages or counts by itself: right, or an error that helps."""

import copy
from functools import partial

import pytest
import threaded
import torch
import torch.nn.functional as F
from same_tensors import assert_equal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.flop_counter import FlopCounterMode

import blockfp.torch as bfp

X = torch.randn(4, 5, 32, generator=torch.Generator().manual_seed(0))
BOTH = pytest.mark.parametrize("weights", ["quantized", "high_precision"])


def in_inference(layer):
    with torch.inference_mode():
        return F.linear(X, layer.weight)


@BOTH
@pytest.mark.parametrize(
    "product",
    [
        lambda layer: F.linear(X, layer.weight),
        lambda layer: F.linear(X[0], layer.weight, layer.bias),
        lambda layer: nn.Linear.forward(layer, X),
        lambda layer: X @ layer.weight.T,
        lambda layer: torch.matmul(X, layer.weight.mT),
        lambda layer: layer.weight @ X[0, 0],
        lambda layer: torch.einsum("bti,oi->bto", X, layer.weight),
        pytest.param(
            lambda layer: torch.compile(F.linear, backend="aot_eager")(X, layer.weight),
            marks=pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11's compiler fails before it is refused"),
        ),
        lambda layer: torch.vmap(lambda row: F.linear(row, layer.weight))(X),
        in_inference,
        lambda layer: torch.mm(X[0], layer.weight.detach().T, out=torch.empty(5, 16)),
        lambda layer: torch.mm(X[0], layer.weight.detach()[:8].float().t(), out=torch.empty(5, 8)),
        lambda layer: torch.mm(X[0], layer.weight.T, out_dtype=torch.float32),
        lambda layer: torch.bmm(X, layer.weight.detach().T.expand(4, 32, 16), out=torch.empty(4, 5, 16)),
        lambda layer: F.bilinear(X[0, :, :16], X[0], layer.weight[None]),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_product_beside_the_layer_is_refused(product, weights):
    layer = bfp.Linear(32, 16, recipe="mxfp8", weights=weights)
    with pytest.raises(NotImplementedError, match=r"call the layer itself, or blockfp\.torch\.linear|unsqueeze|expand"):
        product(layer)


def test_a_product_may_be_added_to_a_weight_or_written_there():
    layer = bfp.Linear(32, 16, recipe="mxfp8", weights="high_precision")
    a, b, sums = torch.randn(16, 4), torch.randn(4, 32), torch.zeros(5, 16)
    before = layer.weight.detach().values.clone()
    with torch.no_grad():
        layer.weight.addmm_(a, b)
        assert torch.equal(layer.weight.values, torch.addmm(before, a, b))
        torch.mm(a, b, out=layer.weight)
        assert torch.equal(layer.weight.values, a @ b)
        with pytest.raises(NotImplementedError, match="would multiply it in high precision"):
            sums.addmm_(X[0], layer.weight.T)
    assert not sums.any()


@BOTH
@pytest.mark.filterwarnings("ignore:blockfp.torch.convert left")
def test_encoders_multiply_in_evaluation_as_in_training(weights):
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0), 2)
    plain = copy.deepcopy(encoder).eval()
    bfp.convert(encoder, "mxfp4", weights=weights)
    mask = torch.zeros(4, 5, dtype=torch.bool)
    mask[0, 3:] = True
    with torch.no_grad():
        for options in ({}, {"src_key_padding_mask": mask}):
            trained, evaluated = encoder.train()(X, **options), encoder.eval()(X, **options)
            assert (trained - evaluated).abs().max() < 1e-5
            assert (evaluated - plain(X)).abs().max() > 0.1
        assert torch.equal(encoder.layers[0](X), copy.deepcopy(encoder).layers[0](X))
    again = nn.TransformerEncoder(encoder.layers[0], 2, enable_nested_tensor=False).eval()
    with torch.no_grad():
        assert (again(X) - again.train()(X)).abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore:blockfp.torch.convert left")
def test_encoders_without_converted_layers_keep_their_path():
    encoder = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    with pytest.raises(ValueError, match="to convert"):
        bfp.convert(encoder, "mxfp8", filter_fn=lambda path, layer: False)
    assert encoder.activation_relu_or_gelu == 1


@BOTH
def test_layers_put_by_hand_where_torch_reads_weights_are_refused(weights):
    encoder = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    encoder.linear1 = bfp.Linear(32, 64, recipe="mxfp8", weights=weights)
    attention = nn.MultiheadAttention(32, 4, batch_first=True)
    attention.out_proj = bfp.Linear(32, 32, recipe="mxfp8", weights=weights)
    with torch.no_grad():
        for module, arguments in ((encoder, (X,)), (attention, (X, X, X)), (attention.eval(), (X, X, X))):
            with pytest.raises(NotImplementedError, match="torch module reads the weights of its layers"):
                module(*arguments)


def test_attention_keeps_its_weights():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(32, 4), "up": nn.Linear(32, 640)})
    with pytest.warns(UserWarning, match=r"torch\.nn\.MultiheadAttention multiplies with its weights itself"):
        bfp.convert(model, "mxfp8")
    assert not isinstance(model["attention"].out_proj, bfp.Linear)
    assert isinstance(model["up"], bfp.Linear)
    assert {left.path for left in bfp.summary(model).left} == {"attention.in_proj_weight", "attention.out_proj.weight"}


def cut_by_torch(rank, weights):
    layer = bfp.Linear(32, 16, recipe="mxfp8", weights=weights)
    layer = parallelize_module(layer, init_device_mesh("cpu", (2,)), ColwiseParallel())
    layer(X)


@BOTH
def test_torchs_own_parallel_styles_are_refused(weights):
    errors = threaded.errors(2, cut_by_torch, weights)
    # One thread may wait for the other's scatter.
    assert any(isinstance(raised, ValueError) for raised in errors)
    assert None not in errors


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_delayed", "fp8_block"])
@BOTH
def test_flops_are_torchs(recipe, weights):
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    counts = []
    for model in (net, bfp.convert(copy.deepcopy(net), recipe, weights=weights)):
        with FlopCounterMode(display=False) as counter:
            model(X.clone().requires_grad_()).sum().backward()
        counts.append((counter.get_total_flops(), set(counter.get_flop_counts())))
    assert counts[0] == counts[1]
    assert counts[0][0] == 3 * 2 * 20 * (32 * 64 + 64 * 16)


def test_flops_of_groups():
    layer = bfp.GroupedLinear(3, 32, 64, recipe="mxfp8")
    with FlopCounterMode(display=False) as counter:
        layer(X[0].clone().requires_grad_(), [3, 0, 2]).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 5 * 32 * 64


INITS = {
    "normal_": partial(nn.init.normal_, std=0.02),
    "uniform_": nn.init.uniform_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "zeros_": nn.init.zeros_,
    "constant_": partial(nn.init.constant_, val=0.3),
}
STEPS = {"trunc_normal_": partial(nn.init.trunc_normal_, std=0.02), "orthogonal_": nn.init.orthogonal_, "eye_": nn.init.eye_}


def drawn(function):
    torch.manual_seed(7)
    return function(torch.empty(64, 32))


@pytest.mark.parametrize("name", [*INITS, *STEPS])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_current"])
def test_init_is_the_function_then_quantized(name, recipe):
    function = (INITS | STEPS)[name]
    layer = bfp.Linear(32, 64, recipe=recipe)
    q = bfp.quantize(drawn(function), layer.recipe.weight.format)
    for call in (partial(bfp.init_, layer.weight, function), partial(function, layer.weight)):
        if name in STEPS and call.func is not bfp.init_:
            with pytest.raises(NotImplementedError, match=r"blockfp\.torch\.init_\("):
                call()
            continue
        nn.init.ones_(layer.weight)
        torch.manual_seed(7)
        assert call() is layer.weight
        assert_equal(layer.weight, q)
        assert torch.equal(layer.weight.initial, drawn(function))


def test_init_takes_any_parameter():
    layer = bfp.Linear(32, 64, recipe="mxfp8", weights="high_precision")
    torch.manual_seed(7)
    bfp.init_(layer.weight, STEPS["orthogonal_"])
    assert torch.equal(layer.weight.detach().values, drawn(STEPS["orthogonal_"]))
    assert not bfp.init_(layer.bias, nn.init.zeros_).any()
    meta = bfp.Linear(32, 64, recipe="mxfp8", device="meta").weight
    assert bfp.init_(meta, nn.init.orthogonal_) is nn.init.normal_(meta) is meta
    bfp.init_(layer.weight, nn.init.normal_, keep_init=False)
    assert bfp.init_(bfp.Linear(32, 64, recipe="mxfp8").weight, nn.init.normal_, keep_init=False).initial is None
    with pytest.raises(TypeError, match=r"param must be a torch\.Tensor, got Linear"):
        bfp.init_(layer, nn.init.normal_)
    with pytest.raises(TypeError, match="function must be one that takes a tensor"):
        bfp.init_(layer.weight, 0.02)


def test_the_optimizer_goes_on_from_what_was_drawn():
    layer = bfp.Linear(32, 64, bias=False, recipe="mxfp8")
    optimizer = bfp.AdamW(layer.parameters(), lr=0.0, weight_decay=0.0)
    layer(X).sum().backward()
    optimizer.step()
    torch.manual_seed(7)
    nn.init.normal_(layer.weight, std=0.02)
    layer(X).sum().backward()
    optimizer.step()
    assert torch.equal(layer.weight.codes, bfp.quantize(drawn(INITS["normal_"]), "mxfp8_e4m3_32x32").codes)


def drawn_shard(rank, recipe):
    layer = bfp.Linear(32, 50, recipe=recipe, bias=False)
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    # Alike on every rank, whoever draws when: ranks are threads here, with one generator.
    values = torch.linspace(-1, 1, 50 * 32).view(50, 32)
    bfp.init_(layer.weight, lambda tensor: tensor.copy_(values))
    refused = None
    try:
        layer.weight.detach().to_local().zero_()
    except NotImplementedError as error:
        refused = str(error)
    return layer.weight.to_local().dequantize(), bfp.fake_quantize(values, layer.recipe.weight.format), refused


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_current", "nvfp4"])
def test_shards_are_drawn_as_the_whole(recipe):
    results = threaded.run(2, drawn_shard, recipe)
    assert torch.equal(torch.cat([own for own, _, _ in results]), results[0][1])
    assert all("blockfp.torch.init_(parameter, function) with the parameter itself" in refused for _, _, refused in results)


def stepped(optimizer, layer, **options):
    layer(X).sum().backward()
    optimizer(layer.parameters(), lr=0.1, **options).step()


def averaged(layer, **options):
    average = AveragedModel(layer, **options)
    for _ in range(2):
        average.update_parameters(layer)


def averaged_state(layer, update):
    """As timm's ModelEmaV2 and Ultralytics' ModelEMA do, which go through all that a state dict holds."""
    average = copy.deepcopy(layer)
    with torch.no_grad():
        for mine, theirs in zip(average.state_dict().values(), layer.state_dict().values(), strict=True):
            update(mine, theirs.detach())


def in_place(mine, theirs):
    if mine.dtype.is_floating_point:
        mine *= 0.9
        mine += 0.1 * theirs


@pytest.mark.parametrize(
    "write",
    [
        partial(stepped, torch.optim.AdamW),
        partial(stepped, torch.optim.AdamW, foreach=True),
        partial(stepped, torch.optim.AdamW, fused=True),
        partial(stepped, torch.optim.SGD),
        partial(stepped, torch.optim.Adagrad),
        partial(averaged, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        averaged,
        partial(averaged_state, update=lambda mine, theirs: mine.copy_(0.9 * mine + 0.1 * theirs)),
        partial(averaged_state, update=lambda mine, theirs: mine.copy_(theirs.lerp(mine, 0.9))),
        partial(averaged_state, update=lambda mine, theirs: torch._foreach_lerp_([mine], [theirs], 0.1)),
        partial(averaged_state, update=in_place),
        lambda layer: [sum(both) / 2 for both in zip(*[layer.state_dict().values()] * 2, strict=True)],
        lambda layer: layer.weight.data.add_(1.0),
        lambda layer: layer.weight.data.clamp_(-1, 1),
    ],
)
def test_what_writes_values_names_what_helps(write):
    layer = bfp.Linear(32, 16, recipe="mxfp8")
    codes = layer.weight.codes.clone()
    with pytest.raises(NotImplementedError, match='weights="high_precision"'):
        write(layer)
    assert torch.equal(layer.weight.codes, codes)
    write(bfp.Linear(32, 16, recipe="mxfp8", weights="high_precision"))


@pytest.mark.parametrize(
    ("read", "remedy"),
    [
        (lambda layer: nn.utils.parameters_to_vector(layer.parameters()).norm(), "high_precision_state_dict"),
        (lambda layer: layer.weight.norm(), r"call dequantize\(\)"),
        (lambda layer: layer.weight.isnan(), r"call dequantize\(\)"),
        (lambda layer: torch.func.stack_module_state([layer, copy.deepcopy(layer)]), "stack_module_state"),
        (lambda layer: layer.weight.double(), r"nominal dtype can.t be torch\.float64"),
    ],
)
def test_what_reads_values_names_what_helps(read, remedy):
    with pytest.raises(NotImplementedError, match=remedy):
        read(bfp.Linear(32, 16, recipe="mxfp8"))


@BOTH
def test_functional_call_takes_what_it_is_given(weights):
    layer = bfp.Linear(32, 16, bias=False, recipe="mxfp8", weights=weights)
    other = torch.randn(16, 32)
    given = {"values": other, "codes": bfp.quantize(other, "mxfp8_e4m3_32x32")}
    for weight in given.values():
        y = torch.func.functional_call(layer, {"weight": weight}, (X,))
        assert torch.equal(y, bfp.linear(X, other, recipe="mxfp8"))
    assert torch.equal(torch.func.functional_call(layer, dict(layer.named_parameters()), (X,)), layer(X))
