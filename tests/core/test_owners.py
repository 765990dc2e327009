"""Owners of whole matrices: every mesh gives each rank its part of the result, and ranks share the work."""

import numpy as np
import pytest
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st

from blockfp.sharding.owners import owners, plan, travel
from blockfp.sharding.placement import Mesh, Replicate, Shard, Sharding, StridedShard


def cost(rows, columns):
    return min(rows, columns) ** 2 * max(rows, columns)


def whole_sum(matrix):
    """Mixes every element of the matrix into every other."""
    return matrix + matrix.sum()


PLACEMENTS = {
    "fsdp": ((4,), (Shard(-2),)),
    "columns": ((3,), (Shard(-1),)),
    "hsdp": ((2, 3), (Replicate(), Shard(-2))),
    "fsdp and tp": ((2, 2), (Shard(-2), Shard(-1))),
    "tp within fsdp": ((2, 2), (StridedShard(-2, 2), Shard(-2))),
    "replicated": ((2, 2), (Replicate(), Replicate())),
    "cut, then replicated": ((3, 2), (Shard(-2), Replicate())),
    "three axes": ((2, 2, 2), (Replicate(), Shard(-2), Shard(-1))),
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_each_rank_gets_its_part_of_the_whole_result(name):
    shape, placements = PLACEMENTS[name]
    mesh = Mesh(shape)
    shapes = [(8, 6), (1, 7), (5, 5), (3, 4, 6), (13, 2), (2, 2, 3, 5), (0, 4)]
    check(mesh, [(shape, placements) for shape in shapes])


def check(mesh, cases):
    shardings = tuple(Sharding(shape, mesh, placements) for shape, placements in cases)
    arrays = [np.random.default_rng(i).integers(-9, 9, shape).astype(np.float64) for i, (shape, _) in enumerate(cases)]
    expected = [
        np.stack([whole_sum(x) for x in a.reshape(-1, *a.shape[-2:])]).reshape(a.shape) if a.size else a for a in arrays
    ]
    for rank, local in enumerate(travel(arrays, shardings, cost, whole_sum)):
        for lies, got, want in zip(shardings, local, expected, strict=True):
            np.testing.assert_array_equal(got, want[lies.region(rank).slices])
    plans = [plan(shardings, rank, cost) for rank in range(mesh.size)]
    done = sorted((parts[0].array, parts[0].matrix) for one in plans for parts in one.whole)
    assert done == [(i, j) for i, a in enumerate(arrays) if a.size for j in range(a.size // (a.shape[-1] * a.shape[-2]))]


@examples(60)
@given(st.data())
def test_any_mesh_and_any_mixture_of_placements(data):
    mesh = Mesh(tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))))
    cases = []
    for _ in range(data.draw(st.integers(1, 3))):
        shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=3)))
        one = st.one_of(st.just(Replicate()), st.builds(Shard, st.integers(0, len(shape) - 1)))
        cases.append((shape, tuple(data.draw(one) for _ in mesh.shape)))
    check(mesh, cases)


def test_experts_are_done_where_they_are():
    """Nothing travels if each rank holds its matrices whole."""
    mesh = Mesh((4,))
    shardings = (Sharding((8, 6, 5), mesh, (Shard(0),)),)
    for rank in range(4):
        one = plan(shardings, rank, cost)
        assert [parts[0].matrix for parts in one.whole] == [2 * rank, 2 * rank + 1]
        assert one.gather == one.scatter == ()


def test_replicas_share_the_work():
    mesh = Mesh((2, 2))
    shardings = tuple(Sharding((8, 8), mesh, (Replicate(), Shard(0))) for _ in range(8))
    assert [len(plan(shardings, rank, cost).whole) for rank in range(4)] == [2, 2, 2, 2]


def test_the_largest_tasks_are_placed_first():
    assert owners([1, 5, 1, 3, 1], [()] * 5, 2) == (1, 0, 1, 1, 0)
    assert owners([1, 9, 5], [(1,), (), ()], 2) == (1, 0, 1)
    loads = [0.0] * 7
    costs = [float(1 + i * i % 11) for i in range(50)]
    for task, rank in zip(costs, owners(costs, [()] * 50, 7), strict=True):
        loads[rank] += task
    assert max(loads) <= sum(costs) / 7 + max(costs)
