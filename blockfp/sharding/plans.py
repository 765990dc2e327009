"""Plans: the steps of every rank, derived from format, shape, mesh, placements and use.

Every plan keeps one invariant, for every format, shape and mesh, bit for bit:

    gather(quantize(shard)) == quantize(gather(shard))

A block within one shard is quantized there. For a block that spans shards, ranks first max-reduce their partial amaxes. Scales
travel with the data. If this isn't possible, data passes through high precision and the plan gives the reason; an impossible
request raises ValueError. `sharding.steps` defines the steps, `sharding.simulate` runs them in NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from ..definition.rotation import GROUP
from ..formats import FORMATS, WHOLE_ROW, Format
from .placement import Mesh, Partial, Placement, Replicate, Shard, Sharding, StridedShard
from .steps import Dequantize, Gather, Plan, Quantize, Rotate, Step, Straddle, Transpose, block_length

Operand = Literal["input", "weight", "gradient"]
OPERANDS: tuple[Operand, ...] = ("input", "weight", "gradient")


def amax_axes(
    format: Format | str,
    mesh: Mesh,
    placements: Sequence[Placement],
    operand: Operand,
    *,
    data_axes: Sequence[str] = (),
    delayed: bool = False,
) -> tuple[str, ...]:
    """Returns the mesh axes over which a tensor's amax is max-reduced, in the mesh's order, without axes of one rank.

    | format | weight | input, gradient |
    |---|---|---|
    | one scale per tensor, or two levels | axes that shard it | axes that shard it, except data-parallel ones |
    | one scale per tensor, delayed scaling | same (weights use their current amax) | also all data-parallel axes |
    | blocks | none | none |

    Data-parallel (and context-parallel) axes divide the batch. The activations and gradients of their ranks are separate
    tensors, whether placements call them `Shard` or `Replicate`. `Quantize.straddles` covers blocks that span ranks.

    Args:
        format: a `Format` or its name.
        mesh: the ranks.
        placements: the operand's placements, one per mesh axis.
        operand: "input", "weight" or "gradient".
        data_axes: the mesh axes that divide the batch.
        delayed: whether the recipe scales inputs and gradients by their amax history.

    Raises:
        ValueError: the operand or an axis is unknown, or a placement doesn't fit the mesh or is `Partial`.
    """
    format = Format.parse(format)
    if operand not in OPERANDS:
        raise ValueError(f"operand must be one of {', '.join(OPERANDS)}, got {operand!r}")
    if len(placements) != len(mesh.shape):
        raise ValueError(f"placements must have one entry per axis of the mesh {mesh}, got {len(placements)}")
    data = {mesh.names[mesh.axis(name)] for name in data_axes}
    _refuse_partial(mesh, placements)
    if delayed and not format.per_tensor:
        raise ValueError(f"delayed = True needs a format with one scale per tensor, got {format}")
    if not format.has_tensor_scale:
        return ()
    sharding = {n for n, p in zip(mesh.names, placements, strict=True) if isinstance(p, Shard | StridedShard)}
    if operand == "weight":
        axes = sharding
    else:
        axes = (sharding - data) | (data if delayed else set())
    return tuple(name for name, size in zip(mesh.names, mesh.shape, strict=True) if name in axes and size > 1)


@lru_cache(maxsize=4096)
def quantize_shards(
    format: Format | str,
    sharding: Sharding,
    *,
    operand: Operand = "weight",
    data_axes: tuple[str, ...] = (),
    columnwise: bool = False,
    rotate: bool = False,
    stochastic: bool = False,
) -> Plan:
    """Plans how ranks quantize their shards to get their parts of the unsharded array's codes and scales. Only amaxes are sent.

    Args:
        format: a `Format` or its name.
        sharding: placement of the values. For an input or gradient: the tensor of one data-parallel rank, with `Replicate()` on
            `data_axes`.
        operand: "input", "weight" or "gradient"; see `amax_axes`.
        data_axes: the mesh axes that divide the batch.
        columnwise: quantize the transposed array.
        rotate: first rotate groups of 16 along the last axis (after transposition).
        stochastic: whether a key will be given for stochastic rounding.

    Raises:
        ValueError: a placement is `Partial`, a cut is inside a rotation group, an input is sharded over a data-parallel axis,
            or stochastic rounding is asked for an array whose leading axes are cut.
    """
    format = Format.parse(format)
    _check_operand(sharding, operand, data_axes)
    steps = _quantize(format, sharding, operand, data_axes, columnwise, rotate, stochastic)
    target = sharding.transposed() if columnwise else sharding
    return Plan(f"quantize shards of the {operand} {_direction(columnwise)}", sharding, target, steps)


@lru_cache(maxsize=4096)
def gather_weight(
    format: Format | str,
    sharding: Sharding,
    axes: tuple[str, ...],
    *,
    origin: tuple[int, int] = (0, 0),
    columnwise: bool = False,
) -> Plan:
    """Plans the all-gather of a quantized weight over some mesh axes (FSDP's). Codes and scales travel, always rowwise.

    Args:
        format: the weight's format.
        sharding: placement of codes and scales, as `quantize_shards` left them.
        axes: mesh axes to gather over. The result stays sharded over the others (tensor parallelism's).
        origin: (row, column) of the sharding's first element in the matrix that counts the blocks. FSDP only sees the
            tensor-parallel shard that it cuts further, so it passes that shard's origin.
        columnwise: derive the transposed weight after the gather; exact for square blocks and one scale per tensor.

    Raises:
        ValueError: an axis shards nothing or leaves separate runs, or a columnwise weight has 1-D blocks.
    """
    format = Format.parse(format)
    _refuse_partial(sharding.mesh, sharding.placements)
    if columnwise and not format.square:
        raise ValueError(
            f"columnwise = True: a weight in {format} has no exact transpose, because its blocks are 1-D; use a format with "
            f"square blocks ({_square_names(format)}), or multiply by the dequantized weight"
        )
    steps: tuple[Step, ...] = _gathers(sharding, axes, format, "codes", origin)
    target = sharding.gathered(axes)
    if columnwise:
        steps, target = (*steps, Transpose(target, format)), target.transposed()
    return Plan(f"all-gather of a weight in {format} over {', '.join(axes)}, {_direction(columnwise)}", sharding, target, steps)


@lru_cache(maxsize=4096)
def gather_activation(
    format: Format | str,
    sharding: Sharding,
    axes: tuple[str, ...],
    *,
    operand: Operand = "input",
    data_axes: tuple[str, ...] = (),
    columnwise: bool = False,
    rotate: bool = False,
    stochastic: bool = False,
    quantized: Format | str | None = None,
) -> Plan:
    """Plans the all-gather of an activation or gradient, quantized before it travels if possible.

    The result is the quantization of the gathered array, or of its dequantization if it was quantized in another format or
    direction. The forward product takes it rowwise, the weight gradient columnwise. If a cut is inside a block or rotation
    group, the array is gathered unquantized and quantized afterwards; the plan gives this reason.

    Args:
        format: the format of the result.
        sharding: placement of one data-parallel rank's tensor, with `Replicate()` on `data_axes`.
        axes: mesh axes to gather over.
        operand: "input" or "gradient".
        data_axes: the mesh axes that divide the batch.
        columnwise: return the transposed array.
        rotate: rotate groups of 16 along the last axis (after transposition) before quantizing.
        stochastic: whether a key will be given for stochastic rounding.
        quantized: the format of the ranks' rowwise codes; None if they hold values.

    Raises:
        ValueError: see `quantize_shards`; an axis shards nothing; the operand is a weight (see `gather_weight`).
    """
    format = Format.parse(format)
    have = None if quantized is None else Format.parse(quantized)
    if operand == "weight":
        raise ValueError("operand = 'weight': gather_weight plans the gather of a weight, whose codes are the stored ones")
    _check_operand(sharding, operand, data_axes)
    derive = columnwise and format.square and not rotate and not stochastic
    encodes_columnwise = columnwise and not derive
    whole = sharding.gathered(axes)
    target = whole.transposed() if columnwise else whole
    back: tuple[Step, ...] = (Transpose(whole, format),) if derive else ()

    def plan(*steps: Step, reason: str | None = None) -> Plan:
        use = f"all-gather of the {operand} in {format} over {', '.join(axes)}, {_direction(columnwise)}"
        return Plan(use, sharding, target, (*steps, *back), reason)

    def quantized_at(lies: Sharding) -> tuple[Step, ...]:
        return _quantize(format, lies, operand, data_axes, encodes_columnwise, rotate, stochastic)

    if have is format and not encodes_columnwise and not rotate:
        return plan(*_gathers(sharding, axes, format, "codes"))
    reason = _cut_by_gather(format, sharding, axes, encodes_columnwise, rotate)
    if reason is None:
        before = () if have is None else (Dequantize(have, sharding),)
        lies = sharding.transposed() if encodes_columnwise else sharding
        return plan(*before, *quantized_at(sharding), *_gathers(lies, axes, format, "codes"))
    if have is None:
        return plan(*_gathers(sharding, axes, None, "values"), *quantized_at(whole), reason=reason)
    return plan(*_gathers(sharding, axes, have, "codes"), Dequantize(have, whole), *quantized_at(whole), reason=reason)


def _quantize(
    format: Format,
    sharding: Sharding,
    operand: Operand,
    data_axes: tuple[str, ...],
    columnwise: bool,
    rotate: bool,
    stochastic: bool,
) -> tuple[Step, ...]:
    """Returns the steps from values to codes, including the reductions of amaxes."""
    steps: list[Step] = []
    if columnwise:
        steps.append(Transpose(sharding))
        sharding = sharding.transposed()
    last = len(sharding.shape) - 1
    if rotate:
        if not sharding.aligned(last, GROUP):
            raise ValueError(
                f"rotate = True: a shard boundary on axis {last} of {sharding} divides a group of {GROUP}; gather over "
                f"{', '.join(sharding.straddling_axes(last, GROUP))} first (gather_activation plans that)"
            )
        steps.append(Rotate())
    cut = [dim for dim in range(last - 1) if len(sharding.starts(dim)) > 1]
    if stochastic and cut:
        raise ValueError(
            f"stochastic = True: random bits count the elements of the unsharded array, but leading axis {cut[0]} of "
            f"{sharding} is sharded; fold the leading axes into the rows, or quantize each matrix separately"
        )
    straddles = []
    for dim in (last - 1, last):
        block = block_length(format, sharding, dim)
        if not sharding.aligned(dim, block):
            straddles.append(Straddle(dim, sharding.straddling_axes(dim, block), sharding.straddling(dim, block)))
    axes = amax_axes(format, sharding.mesh, sharding.placements, operand, data_axes=data_axes)
    return (*steps, Quantize(format, sharding, axes, tuple(straddles)))


def _gathers(
    sharding: Sharding,
    axes: tuple[str, ...],
    format: Format | None,
    payload: Literal["codes", "values"],
    origin: tuple[int, int] = (0, 0),
) -> tuple[Gather, ...]:
    """Returns one gather per array axis that these mesh axes cut."""
    sharding.gathered(axes)
    gathers = []
    for dim in range(len(sharding.shape)):
        over = tuple(name for name in sharding.order(dim) if name in axes)
        if over:
            gathers.append(Gather(sharding, dim, over, format, payload, origin))
            sharding = sharding.gathered(over)
    return tuple(gathers)


def _cut_by_gather(format: Format, sharding: Sharding, axes: tuple[str, ...], columnwise: bool, rotate: bool) -> str | None:
    """Returns why shards can't be quantized before they are gathered over these axes, or None if they can."""
    lies = sharding.transposed() if columnwise else sharding
    last = len(sharding.shape) - 1
    units = [(dim, block_length(format, lies, dim), "block") for dim in (last - 1, last)]
    if rotate:
        units.append((last, GROUP, "rotation group"))
    for dim, unit, what in units:
        if set(lies.straddling_axes(dim, unit)) & set(axes):
            starts = lies.starts(dim)
            cuts = starts[starts % unit != 0]
            # Report the axis of the caller's array, which is not transposed yet.
            own = 2 * last - 1 - dim if columnwise else dim
            where = ", ".join(map(str, cuts[:4])) + (", .." if len(cuts) > 4 else "")
            if unit == WHOLE_ROW:
                return (
                    f"axis {own} of {list(sharding.shape)} is cut at {where}, and all of it has one scale; formats in blocks "
                    "travel quantized"
                )
            return (
                f"axis {own} of {list(sharding.shape)} is cut at {where}, inside a {what} of {unit}; "
                f"shards whose length is a multiple of {unit} travel quantized"
            )
    return None


def _check_operand(sharding: Sharding, operand: Operand, data_axes: Sequence[str]) -> None:
    _refuse_partial(sharding.mesh, sharding.placements)
    if operand == "weight":
        return
    for name in data_axes:
        placement = sharding.placements[sharding.mesh.axis(name)]
        if not isinstance(placement, Replicate):
            raise ValueError(
                f"sharding: {placement} on data-parallel axis {name!r} of the {operand}, whose ranks have separate "
                f"tensors: describe one rank's tensor, with Replicate() on {name!r}"
            )


def _refuse_partial(mesh: Mesh, placements: Sequence[Placement]) -> None:
    for name, placement in zip(mesh.names, placements, strict=True):
        if isinstance(placement, Partial):
            raise ValueError(
                f"placements: {placement} on mesh axis {name!r} holds terms, not values; reduce them over {name!r} first"
            )


def _square_names(format: Format) -> str:
    same = [f.name for f in FORMATS if f.square and f.block and f.element is format.element and f.scale is format.scale]
    return ", ".join(same)


def _direction(columnwise: bool) -> str:
    return "columnwise" if columnwise else "rowwise"
