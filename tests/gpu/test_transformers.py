"""transformers' own Llama on a GPU: its layers as CUDA graphs, with blockfp's optimizer."""

import pytest
import torch
from cuda_arrays import recordings
from documented import run_documented
from same_tensors import assert_equal

transformers = pytest.importorskip("transformers")

import blockfp.torch as bfp  # noqa: E402

# torch 2.11's compiler looks at .grad of what is no leaf, and begins with a graph of nothing: it warns itself of both.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]

STEPS = 8


@pytest.fixture(autouse=True)
def deterministic():
    """Inductor takes the kernel of a sum that it finds the fastest, and perhaps another one the next time."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def llama(recipe):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    with torch.device("cuda"):  # other attention adds with atomics in its backward: runs differ
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    bfp.convert(model.model.layers, recipe)
    return model


def trained(recipe, mode):
    """Losses of some steps, and the weights after them."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = llama(recipe)
    for layer in model.model.layers:
        layer.compile(fullgraph=True, mode=mode)
    optimizer = bfp.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 128, (2, 64), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    losses = []
    for _ in range(STEPS):
        if mode is not None:
            torch.compiler.cudagraph_mark_step_begin()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach().dequantize() if hasattr(p, "codes") else p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4"])
def test_cuda_graphs_of_each_layer_change_no_bit(recipe):
    losses, weights = trained(recipe, None)
    again, graphed = trained(recipe, "reduce-overhead")
    assert recordings() >= 4  # forward and backward of two layers
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    assert losses[-1] < losses[0]
    assert again == losses
    assert_equal(weights, graphed)


def test_the_documents_loop():
    torch._dynamo.reset()
    batches = torch.randint(0, 128, (6, 2, 64), device="cuda")
    space = run_documented(
        "a transformers model with CUDA graphs", model=llama("fp8_block"), batches=batches, bfp=bfp, torch=torch
    )
    assert len(space["losses"]) == 6
    assert recordings() >= 4
