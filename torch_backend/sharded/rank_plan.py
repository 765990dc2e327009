"""`RankPlan`: a plan of the core as one rank carries it out, in numbers that compiled code takes as constants."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from blockfp.formats import Format
from blockfp.sharding import plans
from blockfp.sharding.placement import Mesh, Shard, Sharding
from blockfp.sharding.steps import Dequantize, Gather, Join, Plan, Quantize, Rotate, Transpose


class SharedBlocks(NamedTuple):
    """Blocks that lie on several ranks, whose amaxes are max-reduced.

    Attributes:
        dim: array axis along which they do.
        axes: mesh axes to reduce over.
        count: how many there are on all ranks.
        held: (number among them, index in this rank's own scale grid) of those that this rank has a part of.
    """

    dim: int
    axes: tuple[str, ...]
    count: int
    held: tuple[tuple[int, int], ...]


class Quantization(NamedTuple):
    """The steps from values to codes on this rank.

    Attributes:
        format: name of the format.
        columnwise: whether the transposed matrix is encoded.
        rotate: whether groups along the last axis are rotated first.
        origins: (row, column) of this rank's first element in the unsharded matrix as it is encoded, for each run.
        shape: (rows, columns) of that matrix.
        amax_axes: mesh axes over which the amax of the whole tensor is max-reduced.
        tensor_field: which field of `numerics.Amax` that is.
        block_fields: the fields that have an entry for each block.
        shared: the blocks whose amaxes are reduced, in this order; of 4-over-6 with all their elements' magnitudes.
    """

    format: str
    columnwise: bool
    rotate: bool
    origins: tuple[tuple[int, int], ...]
    shape: tuple[int, int]
    amax_axes: tuple[str, ...]
    tensor_field: int
    block_fields: tuple[int, ...]
    shared: tuple[SharedBlocks, ...]

    @property
    def sends_members(self) -> bool:
        """Returns whether ranks also share the elements of blocks, which choose their scales by them."""
        return bool(self.shared) and Format.parse(self.format).scale.four_over_six

    @property
    def reduces(self) -> bool:
        """Returns whether ranks share amaxes; else each part's own scales are those of the whole."""
        return bool(self.amax_axes or self.shared)


class Chunk(NamedTuple):
    """The way in which one tensor of a gather is sent and put together.

    Attributes:
        dim: array axis along which it is put together.
        runs: how many runs it has along the axis.
        own: entries of a run that this rank has.
        length: entries of a run that every rank sends, its own and padding behind.
        take: (source, start, stop) of the entries in the chunks of all ranks that make the result; empty if they are the head.
        size: entries of the result.
        as_bytes: whether the entries are float32 that travel as bytes: gloo takes one dtype in a collective.
    """

    dim: int
    runs: int
    own: int
    length: int
    take: tuple[tuple[int, int, int], ...]
    size: int
    as_bytes: bool = False


class RankPlan(NamedTuple):
    """A plan as this rank carries it out.

    Attributes:
        quantize: the quantization of this rank's part, or of the whole behind a gather of values; None if there is none.
        by_codes: whether codes and scales are gathered; False where values are, or nothing is.
        chunks: codes, scales and maybe tensor scale of the gather, or the values; empty where nothing is gathered.
        transposes: whether the rowwise codes are transposed at the end.
    """

    quantize: Quantization | None
    by_codes: bool
    chunks: tuple[Chunk, ...]
    transposes: bool


def rank_plan(plan: Plan, rank: int, runs: int = 1) -> RankPlan:
    """Works out a rank's plan from one that begins with values, or with codes that are gathered.

    Args:
        plan: a plan of `sharding.plans` with one gather at most.
        rank: the rank's number in the plan's mesh; of several runs, in the mesh of one run.
        runs: length of the mesh's first axis, if that numbers runs of rows all of which each rank has; else 1.

    Raises:
        ValueError: runs share blocks.
    """
    ranks = plan.source.mesh.size // runs
    quantize, chunks = None, ()
    columnwise = rotate = by_codes = transposes = False
    for step in plan.steps:
        match step:
            case Transpose():
                columnwise, transposes = columnwise or step.format is None, transposes or step.format is not None
            case Rotate():
                rotate = True
            case Quantize():
                quantize = _quantization(step, columnwise, rotate, [run * ranks + rank for run in range(runs)])
            case Gather():
                chunks, by_codes = _chunks(step, rank, runs), step.payload == "codes"
            case Dequantize():
                raise NotImplementedError(f"no tensor comes quantized in another format than the wanted one: {plan}")
    return RankPlan(quantize, by_codes, chunks, transposes)


@lru_cache(maxsize=4096)
def weight_quantization(format: Format, sharding: Sharding, rank: int, stochastic: bool = False) -> Quantization:
    """The quantization of one rank's part of a weight; see `plans.quantize_shards`."""
    quantize = rank_plan(plans.quantize_shards(format, sharding, stochastic=stochastic), rank).quantize
    assert quantize is not None
    return quantize


def _quantization(step: Quantize, columnwise: bool, rotate: bool, ranks: list[int]) -> Quantization:
    format, sharding, (rank, *more) = step.format, step.sharding, ranks
    if step.straddles and more:
        raise ValueError(
            f"{len(ranks)} sequences that lie {sharding} share blocks: their parts can't be quantized where they are"
        )
    region = sharding.region(rank)
    # All places along the axis of runs are this rank's.
    axes = tuple(name for name in step.amax_axes if not more or name != sharding.mesh.names[0])
    shared = tuple(SharedBlocks(s.dim, s.axes, len(s.blocks), s.held(format, region)) for s in step.straddles)
    return Quantization(
        format.name,
        columnwise,
        rotate,
        tuple(sharding.region(each).origin for each in ranks),
        (sharding.shape[-2], sharding.shape[-1]),
        axes,
        2 if format.scale.two_level else 0,
        (0,) if format.element.has_nan else (0, 1, 3) if shared and format.scale.four_over_six else (0, 1),
        shared,
    )


def _chunks(gather: Gather, rank: int, runs: int) -> tuple[Chunk, ...]:
    format, dim = gather.format, gather.dim
    if gather.payload == "values" or format is None:
        return (_chunk(gather.elements(rank), rank, dim, runs),)
    assert not gather.unpacks, "whole blocks are whole bytes"
    ranks = gather.sharding.mesh.size // runs
    codes = _chunk(gather.stored(rank), rank, dim, runs)
    # One scale of the tensor is the same in all runs of a rank.
    one = Chunk(dim, 1, 1, 1, ((gather.first(rank) % ranks, 0, 1),), 1, True)
    scales = one if format.per_tensor else _chunk(gather.scales(rank), rank, dim, runs)
    scales = scales._replace(as_bytes=format.scale.dtype == "float32")
    return (codes, scales, one._replace(dim=0)) if format.scale.two_level else (codes, scales)


def _chunk(join: Join, rank: int, dim: int, runs: int) -> Chunk:
    spans = join.runs
    own = next((stop - start for source, start, stop in spans if source == rank), 0)
    return Chunk(dim, runs, own, join.chunk, () if join.head else spans, join.size)


# ---- the part of an array that one rank holds


ROWS, COLUMNS = 0, 1

AXIS = "tp"
"""The mesh axis of a tensor-parallel group in the core's plans."""


class TensorParallelShard(NamedTuple):
    """The part of an array that this rank holds, in values that compiled code takes as constants.

    Attributes:
        group: name of the process group that the array is cut over.
        ranks: how many ranks it has.
        rank: this rank's number in it.
        dim: the array axis that is cut; `ROWS` or `COLUMNS` of a matrix.
        length: of that axis, on all ranks together (of one run's rows); None where all ranks hold the same.
        runs: sequences that the rows are of, one after another: each is cut alike, and a rank holds its part of every one.
    """

    group: str
    ranks: int
    rank: int
    dim: int
    length: int | None = None
    runs: int = 1

    def sharding(self, local: tuple[int, int]) -> Sharding:
        """The sharding of the whole matrix. Runs are an axis of the mesh, along which this rank has all places.

        Args:
            local: shape [rows, columns] of this rank's part.

        Raises:
            ValueError: a part of that shape isn't what this rank holds.
        """
        rows, columns = local
        own = columns if self.dim == COLUMNS else rows // self.runs
        length = own * self.ranks if self.length is None else self.length
        if self.dim == COLUMNS:
            sharding = Sharding((rows, length), Mesh((self.ranks,), (AXIS,)), (Shard(1),))
        elif self.runs == 1:
            sharding = Sharding((length, columns), Mesh((self.ranks,), (AXIS,)), (Shard(0),))
        else:
            mesh = Mesh((self.runs, self.ranks), ("sequence", AXIS))
            sharding = Sharding((self.runs * length, columns), mesh, (Shard(0), Shard(0)))
        shape = sharding.region(self.rank).shape
        if (shape[0] * self.runs, shape[1]) != local:
            raise ValueError(
                f"x: rank {self.rank} of {self.ranks} must hold {shape[0] * self.runs} x {shape[1]} of a matrix that lies "
                f"{sharding}, got {rows} x {columns}"
            )
        return sharding
