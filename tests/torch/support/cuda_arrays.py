"""NumPy arrays on the GPU, results there held against NumPy's, and CUDA graphs."""

import torch
from arrays import to_numpy, to_torch
from same_bits import assert_same_bits

__all__ = ["assert_same", "capture", "recordings", "to_gpu", "to_numpy"]


def to_gpu(x):
    return to_torch(x, "cuda")


def assert_same(got, expected, what):
    """Bits of every field of a result; torch tensors against NumPy arrays."""
    assert_same_bits(tuple(map(to_numpy, got)), tuple(expected), what)


def capture(call):
    """A CUDA graph of a call that has run before, and what the call returned there."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    return graph, found


def recordings():
    """The number of CUDA graphs that were recorded so far."""
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    nodes = [] if manager is None or manager.roots is None else list(manager.get_roots())
    count = 0
    while nodes:
        count += 1
        nodes += [child for children in nodes.pop().children.values() for child in children]
    return count
