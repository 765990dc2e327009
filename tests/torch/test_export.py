"""torch.export: the bits of the model, a backward that raises, programs for other runtimes, and what they can't take."""

import copy
import io

import pytest
import torch
from arrays import values
from torch import nn

import blockfp.torch as bfp

X = values((8, 64), 0)

# torch's, of its own pickles.
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:The given buffer is not writable:UserWarning"
)


class Dequantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(bfp.quantize(torch.randn(64, 64), "mxfp8_e4m3"))

    def forward(self, x):
        return x @ self.weight.dequantize().T


def between(layers):
    """A model whose other layers have right gradients, whatever those of the middle are."""
    return nn.Sequential(nn.Linear(64, 64), layers, nn.Linear(64, 8)).eval()


def converted(recipe, *, bias=True, activation=nn.SiLU, **options):
    layers = nn.Sequential(nn.Linear(64, 128, bias=bias), activation(), nn.Linear(128, 64, bias=bias))
    return between(bfp.convert(layers, recipe, **options))


MODELS = {
    "mxfp8": lambda: converted("mxfp8"),
    "high precision": lambda: converted("mxfp8", weights="high_precision", bias=False, activation=nn.GELU),
    "weight-only": lambda: converted("nvfp4", compute="high_precision"),
    "random": lambda: converted("nvfp4"),
    "delayed": lambda: converted("fp8_delayed"),
    "frozen": lambda: between(converted("mxfp8", keep_init=False)[1].requires_grad_(False)),
    "MLP": lambda: between(bfp.LayerNormMLP(64, 128, recipe="mxfp8")),
    "dequantized": lambda: between(Dequantized()),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_program_has_the_bits_and_no_gradients(name, strict):
    model = MODELS[name]()
    program = torch.export.export(copy.deepcopy(model), (X,), strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for one in (program, torch.export.load(file)):
        y = one.module()(X)
        assert torch.equal(y, model(X))
        with pytest.raises(NotImplementedError, match=r"train the model itself.*PipelineStage"):
            y.sum().backward()


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_block"])
def test_a_frozen_program_is_the_layers_alone(recipe):
    """Frozen, a model goes through what takes parameters apart: run_decompositions, AOTInductor."""
    model = converted(recipe).requires_grad_(False)
    program = torch.export.export(model, (X,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    assert "without_backward" not in str(program.graph)
    apart = program.run_decompositions()
    for x in (X, X[:3]):
        assert torch.equal(program.module()(x), model(x))
        assert torch.equal(apart.module()(x), model(x))


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: bfp.fake_quantize(x, "mxfp8_e4m3"),
        lambda x: bfp.linear(x, X, recipe="mxfp8"),
        converted("mxfp8"),
        converted("mxfp8").requires_grad_(False),
        bfp.convert(nn.Sequential(nn.GELU(), nn.Linear(64, 64)), "mxfp8", weights="high_precision"),
        bfp.LayerNormMLP(64, 64, recipe="mxfp8"),
    ],
)
def test_torch_jit_takes_no_layer(function, checked):
    """It would record constants: unchecked, the first result for every input."""
    with pytest.raises(NotImplementedError, match=r"torch\.export"):
        torch.jit.trace(function, (X,), check_trace=checked)


def test_layers_are_leaves_of_a_symbolic_trace():
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return isinstance(module, bfp.Linear) or super().is_leaf_module(module, name)

    model = converted("mxfp8", activation=nn.Identity)
    with pytest.raises(TypeError, match=r"got Proxy; make blockfp's layers leaves by is_leaf_module"):
        torch.fx.symbolic_trace(model)
    traced = torch.fx.GraphModule(model, Tracer().trace(model))
    x = X.clone().requires_grad_()
    traced(x).sum().backward()
    (wanted,) = torch.autograd.grad(model(y := X.clone().requires_grad_()).sum(), y)
    assert torch.equal(x.grad, wanted)


def test_compiled_layers_keep_their_gradients():
    model = converted("mxfp8")
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    for one in (model, compiled):
        one(X).sum().backward()
    for param, other in zip(model.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(param.grad, other.grad)
