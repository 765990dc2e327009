"""`RankPlan`: one rank's view of a core plan, as numbers that compiled code takes as constants."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from blockfp.formats import Format
from blockfp.sharding import plans
from blockfp.sharding.placement import Mesh, Shard, Sharding
from blockfp.sharding.steps import Dequantize, Gather, Join, Plan, Quantize, Rotate, Transpose


class SharedBlocks(NamedTuple):
    """Blocks that cross ranks, whose amaxes are max-reduced.

    Attributes:
        dim: array axis along which blocks cross ranks.
        axes: mesh axes to reduce over.
        count: number of shared blocks on all ranks.
        held: (index among them, index in this rank's scale grid) of the blocks that this rank has a part of.
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
        origins: (row, column) of this rank's first element in the encoded unsharded matrix, for each run.
        shape: (rows, columns) of that matrix.
        amax_axes: mesh axes over which the tensor's amax is max-reduced.
        tensor_field: index of that amax in `numerics.Amax`.
        block_fields: indices of the fields with an entry per block.
        shared: blocks whose amaxes are reduced, in this order; for 4-over-6 with the magnitudes of all their elements.
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
        """Returns whether ranks also share the elements of blocks, which 4-over-6 needs to choose scales."""
        return bool(self.shared) and Format.parse(self.format).scale.four_over_six

    @property
    def reduces(self) -> bool:
        """Returns whether ranks share amaxes; otherwise each shard's own scales are exact."""
        return bool(self.amax_axes or self.shared)


class Chunk(NamedTuple):
    """How one tensor of a gather is sent and joined.

    Attributes:
        dim: array axis along which chunks are joined.
        runs: number of runs along the axis.
        own: entries of a run that this rank has.
        length: entries of a run that every rank sends, including padding.
        take: (source, start, stop) of the result's entries in all ranks' chunks; empty if the result is their head.
        size: entries of the result.
        as_bytes: whether float32 entries are sent as bytes, since gloo takes one dtype per collective.
    """

    dim: int
    runs: int
    own: int
    length: int
    take: tuple[tuple[int, int, int], ...]
    size: int
    as_bytes: bool = False


class RankPlan(NamedTuple):
    """A plan for this rank.

    Attributes:
        quantize: quantization of this rank's shard, or of the whole after a gather of values; or None.
        by_codes: whether codes and scales are gathered, rather than values or nothing.
        chunks: of codes, scales and any tensor scale, or of values; empty if nothing is gathered.
        transposes: whether rowwise codes are transposed at the end.
    """

    quantize: Quantization | None
    by_codes: bool
    chunks: tuple[Chunk, ...]
    transposes: bool


def rank_plan(plan: Plan, rank: int, runs: int = 1) -> RankPlan:
    """Converts a core plan, with at most one gather, to a rank's plan.

    With `runs` > 1 the mesh's first axis numbers runs of rows, this rank has a part of each, and `rank` counts within one run's
    mesh. Raises ValueError if runs share blocks.
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
    """Returns the quantization of one rank's shard of a weight; see `plans.quantize_shards`."""
    quantize = rank_plan(plans.quantize_shards(format, sharding, stochastic=stochastic), rank).quantize
    assert quantize is not None
    return quantize


def _quantization(step: Quantize, columnwise: bool, rotate: bool, ranks: list[int]) -> Quantization:
    format, sharding, (rank, *more) = step.format, step.sharding, ranks
    if step.straddles and more:
        raise ValueError(f"{len(ranks)} sequences placed as {sharding} share blocks: their parts can't be quantized locally")
    region = sharding.region(rank)
    # This rank holds a part of every run, so the axis of runs needs no reduction.
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
    # A tensor's single scale is the same in all runs.
    one = Chunk(dim, 1, 1, 1, ((gather.first(rank) % ranks, 0, 1),), 1, True)
    scales = one if format.per_tensor else _chunk(gather.scales(rank), rank, dim, runs)
    scales = scales._replace(as_bytes=format.scale.dtype == "float32")
    return (codes, scales, one._replace(dim=0)) if format.scale.two_level else (codes, scales)


def _chunk(join: Join, rank: int, dim: int, runs: int) -> Chunk:
    spans = join.runs
    own = next((stop - start for source, start, stop in spans if source == rank), 0)
    return Chunk(dim, runs, own, join.chunk, () if join.head else spans, join.size)


# ---- shards of tensor parallelism


ROWS, COLUMNS = 0, 1

AXIS = "tp"
"""Name of the tensor-parallel axis in the core's plans."""


class TensorParallelShard(NamedTuple):
    """This rank's shard of an array, in values that compiled code takes as constants.

    Attributes:
        group: name of the process group over which the array is sharded.
        ranks: size of the group.
        rank: this rank's index in it.
        dim: sharded array axis; `ROWS` or `COLUMNS` of a matrix.
        length: global length of that axis (within one run); None if all ranks have equal parts.
        runs: number of consecutive sequences in the rows, each sharded in the same way.
    """

    group: str
    ranks: int
    rank: int
    dim: int
    length: int | None = None
    runs: int = 1

    def sharding(self, local: tuple[int, int]) -> Sharding:
        """Returns the whole matrix's sharding; several runs become a mesh axis along which this rank has all positions.

        Raises ValueError unless `local` [rows, columns] is this rank's shape.
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
                f"x: rank {self.rank} of {self.ranks} must hold {shape[0] * self.runs} x {shape[1]} of a matrix placed "
                f"as {sharding}, got {rows} x {columns}"
            )
        return sharding
