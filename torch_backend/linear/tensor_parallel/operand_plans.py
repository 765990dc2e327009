"""Plans for operands sharded over a tensor-parallel group, as constants of compiled code.

    this rank's rows or columns
      | quantize_operand_shard        amaxes are max-reduced over the group if the plan says so; blocks and random bits are
      v                               counted from the shard's offset in the whole
    codes, scales
      | start, .. join                one collective for all tensors, started early and awaited late
      v
    codes and scales of the whole, with the same bits as if it had been quantized in one piece

If shards split a block, values are gathered and then quantized: the plan (`plans.gather_activation`) says so, and a warning
repeats its first reason. `sharded` executes the plans. No plan holds a process group; collectives take the group's name, as
compiled code requires. Plans are computed during tracing and become constants of the graph.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from blockfp.recipes import Cast
from blockfp.sharding import plans
from blockfp.sharding.plans import Operand
from blockfp.sharding.steps import Gather, Plan

from ...sharded.rank_plan import COLUMNS, RankPlan, TensorParallelShard, rank_plan
from ...torch_internals import assume_constant_result


def operand_plan(
    shape: Sequence[int],
    cast: Cast,
    shard: TensorParallelShard,
    *,
    columnwise: bool = False,
    operand: Operand = "input",
    gathers: bool = True,
) -> RankPlan:
    """Returns this rank's plan for one operand in one direction; warns once per kind of operand that can't be sent as codes.

    `shape` is this rank's shard, [rows, columns], at `shard` of the whole. A cast without a format gathers values. `columnwise`
    plans the transposed matrix. Without `gathers`, the plan ends with this rank's own codes and scales. Raises ValueError for a
    shape that contradicts `shard`, or if there is no such plan (`plans.quantize_shards`).
    """
    # dynamo evaluates `_constant_plan` while tracing; `index` turns symbolic lengths into constants. If columns are sharded,
    # the number of rows is irrelevant and may stay symbolic.
    rows, columns = 1 if shard.dim == COLUMNS else operator.index(shape[0]), operator.index(shape[1])
    format = None if cast.format is None else cast.format.name
    return _constant_plan(format, cast.stochastic, cast.rotate, shard[1:], (rows, columns), columnwise, operand, gathers)


_told: set[tuple[str, bool, Operand]] = set()
"""(format, columnwise, operand) of warnings already given."""


@assume_constant_result
def _constant_plan(*question: Any) -> RankPlan:
    return _rank_plan(*question)


@lru_cache(maxsize=4096)
def _rank_plan(
    format: str | None,
    stochastic: bool,
    rotate: bool,
    numbers: tuple[int, int, int, int | None, int],
    local: tuple[int, int],
    columnwise: bool,
    operand: Operand,
    gathers: bool,
) -> RankPlan:
    shard = TensorParallelShard("", *numbers)
    lies = shard.sharding(local)
    options: dict[str, Any] = {"operand": operand, "columnwise": columnwise, "rotate": rotate, "stochastic": stochastic}
    if format is None:
        gather = Gather(lies, shard.dim, lies.mesh.names, None, "values")
        plan = Plan("all-gather of values", lies, lies.gathered(lies.mesh.names), (gather,))
    elif gathers:
        plan = plans.gather_activation(format, lies, lies.mesh.names, **options)
    else:
        plan = plans.quantize_shards(format, lies, **options)
    if plan.reason is not None and (format, columnwise, operand) not in _told:
        warnings.warn(f"{plan.use}: it is gathered in high precision, because {plan.reason}", stacklevel=2)
        # Once for all shapes; recorded after the warning, which may be turned into an error.
        _told.add((str(format), columnwise, operand))
    return rank_plan(plan, shard.rank, shard.runs)
