"""Plans of operands that are cut over a tensor-parallel group, as compiled code holds them.

    this rank's rows or columns
      | quantize_operand_shard        amaxes max-reduced over the group where the plan says so; blocks and random bits
      v                               counted from where the part lies in the whole
    codes, scales
      | start, .. join                one collective for all tensors, begun early and waited for late
      v
    codes and scales of the whole, bit for bit as if it had been quantized in one piece

Where a cut falls inside a block the values are gathered instead, and quantized behind the gather: the plan
(`plans.gather_activation`) says so, and a warning repeats its first reason. `sharded` carries the plans out. Nothing holds a
process group: collectives go by group name, as compiled code takes it. A plan is made while a function is traced, and stands
in the graph as constants.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from blockfp.recipes import Cast
from blockfp.sharding import plans
from blockfp.sharding.plans import Operand
from blockfp.sharding.steps import Gather, Plan

from ..sharded.rank_plan import COLUMNS, RankPlan, TensorParallelShard, rank_plan


def operand_plan(
    shape: Sequence[int],
    cast: Cast,
    shard: TensorParallelShard,
    *,
    columnwise: bool = False,
    operand: Operand = "input",
    gathers: bool = True,
) -> RankPlan:
    """The plan of this rank for one operand in one direction.

    Warns, once for each kind of operand, where it can't travel as codes.

    Args:
        shape: of this rank's part [rows, columns].
        cast: the operand's cast in this direction; without a format, values are gathered.
        shard: where the part lies.
        columnwise: whether the transposed matrix is wanted.
        operand: "input", "weight" or "gradient".
        gathers: whether the whole is wanted on every rank, or this rank's part of its codes and scales.

    Raises:
        ValueError: the shape isn't that of what this rank holds; or there is no such plan (`plans.quantize_shards`).
    """
    # Compiled code calls `_constant_plan` while it is traced, and keeps what it returns; `index` makes it take lengths as
    # constants. How columns are cut doesn't depend on how many rows there are, which it may leave open.
    rows, columns = 1 if shard.dim == COLUMNS else operator.index(shape[0]), operator.index(shape[1])
    format = None if cast.format is None else cast.format.name
    return _constant_plan(format, cast.stochastic, cast.rotate, shard[1:], (rows, columns), columnwise, operand, gathers)


_told: set[tuple[str, bool, Operand]] = set()
"""Format, direction and operand of which a warning was given."""


@torch.compiler.assume_constant_result
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
        # The next length of a sequence is no news. After the warning, which may be an error.
        _told.add((str(format), columnwise, operand))
    return rank_plan(plan, shard.rank, shard.runs)
