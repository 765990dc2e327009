"""Collectives in torch.compile's programs of a layer that a tensor-parallel group shares."""

from collections import Counter

import pytest
import threaded
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed.device_mesh import init_device_mesh

import blockfp.torch as bfp


@pytest.mark.parametrize("tokens", [128, 100], ids=["as codes", "as values"])
@pytest.mark.filterwarnings("ignore:all-gather of the")
def test_the_input_is_gathered_again_in_the_backward(tokens):
    """A compiler that gathered it in the forward would keep the gathered one, of all tokens, on every rank."""
    gathers = []

    def count(graph, inputs):
        names = Counter(str(node.target) for node in graph.graph.nodes)
        gathers.append(names["_c10d_functional.all_gather_into_tensor_coalesced.default"])
        return make_boxed_func(graph.forward)

    def run(rank):
        layer = bfp.Linear(64, 64, recipe="mxfp8")
        bfp.parallelize(layer, init_device_mesh("cpu", (1,)), "column", sequence_parallel=True)
        # As inductor divides a graph into forward and backward.
        backend = aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition)
        layer.compile(fullgraph=True, backend=backend)
        layer(torch.randn(2, tokens, 64)).sum().backward()

    threaded.run(1, run)
    assert gathers == [1, 1]


def test_a_grouped_layer_with_a_bias():
    def run(rank):
        layer = bfp.parallelize(bfp.GroupedLinear(2, 32, 32, recipe="mxfp8"), init_device_mesh("cpu", (1,)), "row")
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        x = torch.randn(5, 32)
        assert torch.equal(compiled(x, [2, 3]), layer(x, [2, 3]))

    threaded.run(1, run)


@pytest.mark.parametrize("style", ["column", "row"])
def test_one_graph_for_all_lengths_where_all_ranks_have_all_tokens(style):
    def run(rank):
        layer = bfp.parallelize(bfp.Linear(32, 32, recipe="nvfp4"), init_device_mesh("cpu", (1,)), style)
        backend = CompileCounter()
        layer.compile(fullgraph=True, backend=backend, dynamic=True)
        for tokens in (16, 17, 64):
            layer(torch.randn(2, tokens, 32, requires_grad=True)).sum().backward()
        assert backend.frame_count == 1

    threaded.run(1, run)
