"""Sums over the ranks of a tensor-parallel group."""

import pytest
import threaded
import torch
import torch.distributed as dist
from blockfp.torch_backend.linear import outputs
from blockfp.torch_backend.sharded.rank_plan import ROWS, TensorParallelShard
from samples import sample

import blockfp.torch as bfp
from blockfp.sharding.reducing import check_reduce_format


def terms(ranks, rows, columns):
    """Each rank's terms of y: integers, whose sums are exact in any order."""
    return [torch.from_numpy(sample("integers", (rows, columns), seed=rank)).bfloat16() // 8 for rank in range(ranks)]


def scattered(rank, ranks, rows, columns, runs, format):
    place = TensorParallelShard(dist.group.WORLD.group_name, ranks, rank, ROWS, runs=runs)
    format = None if format is None else check_reduce_format(format)
    pending = outputs.begin(terms(ranks, rows, columns)[rank], place, format)
    return outputs.finish(pending, place, columns, torch.bfloat16, format)


def rows_of(y, rank, ranks, runs):
    return torch.cat(
        [sequence[rank * -(-len(sequence) // ranks) :][: -(-len(sequence) // ranks)] for sequence in y.chunk(runs)]
    )


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("rows", "runs"), [(12, 1), (7, 1), (24, 2), (3, 1)])
def test_each_rank_gets_its_rows_of_the_sum(ranks, rows, runs):
    whole = sum(y.float() for y in terms(ranks, rows, 48)).bfloat16()
    for rank, got in enumerate(threaded.run(ranks, scattered, ranks, rows, 48, runs, None)):
        assert torch.equal(got, rows_of(whole, rank, ranks, runs))


@pytest.mark.parametrize("format", ["mxfp8_e5m2", "fp8_e4m3_1x128", "mxfp6_e3m2", "mxfp4_e2m1"])
@pytest.mark.parametrize(("rows", "runs"), [(12, 1), (7, 1), (24, 2)])
def test_quantized_terms_are_added_in_the_order_of_the_ranks(format, rows, runs):
    ranks = 3
    whole = torch.zeros(rows, 144)
    for y in terms(ranks, rows, 144):
        whole = whole + bfp.quantize(y, format).dequantize(torch.float32)
    for rank, got in enumerate(threaded.run(ranks, scattered, ranks, rows, 144, runs, format)):
        assert torch.equal(got, rows_of(whole.bfloat16(), rank, ranks, runs))


@pytest.mark.parametrize("format", ["mxfp8_e5m2", "fp8_e4m3_1x128", "mxint8"])
def test_an_overflow_reaches_the_sum(format):
    """Also of formats that saturate Inf."""
    y = torch.ones(4, 144, dtype=torch.float16)
    y[3, 5] = torch.inf

    def on_rank(rank):
        place, parsed = TensorParallelShard(dist.group.WORLD.group_name, 2, rank, ROWS), check_reduce_format(format)
        return outputs.finish(outputs.begin(y, place, parsed), place, 144, torch.float16, parsed)

    assert [bool(got.isfinite().all()) for got in threaded.run(2, on_rank)] == [True, False]


@pytest.mark.parametrize("format", ["fp8_e4m3", "mxfp8_e4m3_32x32", "nvfp4"])
def test_formats_whose_rows_share_a_scale_are_refused(format):
    with pytest.raises(ValueError, match=f"reduce_format {format}: rows that go to different ranks"):
        check_reduce_format(format)


def test_the_sum_on_every_rank():
    whole = sum(y.float() for y in terms(3, 5, 8)).bfloat16()
    for got in threaded.run(3, lambda rank: outputs.all_reduce(terms(3, 5, 8)[rank], dist.group.WORLD.group_name)):
        assert torch.equal(got, whole)
