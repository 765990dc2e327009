"""`dispatch` and `combine`: tokens to the ranks of their experts as codes and scales, and the experts' outputs back.

    dispatch    forward     x is quantized once, on its own rank; its codes and scales travel, and are sorted by expert
                backward    gradients of the rows travel back in their dtype, and are summed over each token's experts
    combine     forward     outputs travel back in their dtype, and are summed, weighted, over each token's experts
                backward    the gradient of each row, its weight times the gradient of the token's output, is quantized once, on
                            the token's rank, and travels as codes and scales

So a product of the rows multiplies the codes that were sent. Its columnwise operands follow from them (`coded.columnwise`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from blockfp import recipes
from blockfp.definition.rounding import Key
from blockfp.recipes import Cast, Recipe, RecipeName
from blockfp.sharding.dispatching import check_rows

from ..linear.linear import LinearState
from ..linear.tensor_parallel.parallel import Parallel
from ..ops.library import outside_graphs
from ..ops.quantize.key_ops import gradient_keys
from ..quantized_tensor.quantize import key_tensor
from ..quantized_tensor.sharding import mesh_of
from ..quantized_tensor.tensor import DTYPES, QuantizedTensor
from .product import multiply_groups, takes_codes
from .route import Group, Route, joined, parted, quantize_rows, route, tensor_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, eq=False)
class Received:
    """Rows that came to this rank's experts, from `dispatch`, sorted by expert.

    Attributes:
        tokens: [rows, in], a `QuantizedTensor` in the recipe's format of inputs; values where it has none.
        offs: int32 [own experts], the end of each one's rows.
        recipe: the `Recipe`.
        state: the random key of the gradients that `combine` sends, and the step; None where the recipe needs none.
        route: where the rows came from.
    """

    tokens: Tensor
    offs: Tensor
    recipe: Recipe
    state: LinearState
    route: Route

    @property
    def counts(self) -> Tensor:
        """The number of rows of each of this rank's experts, int32 [own experts]."""
        return torch.diff(self.offs, prepend=self.offs.new_zeros(1))

    @outside_graphs
    def multiply(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        state: LinearState | None = None,
        parallel: Parallel | None = None,
    ) -> Tensor:
        """Multiplies rows that are sorted as `tokens` are, by the recipe, each expert's with its own weight.

        `tokens` are multiplied as they are. A gradient that comes from `combine` is, too.

        Args:
            x: [rows, in], `tokens` or values.
            weight: [own experts, out, in], a `QuantizedTensor` in the recipe's weight format, or values.
            bias: [own experts, out], or None.
            state: of a layer, with its random key; by default this dispatch's key.
            parallel: of a layer that `parallelize` has cut, by which a weight in high precision is quantized as a part.

        Returns:
            [rows, out].

        Raises:
            TypeError: dtypes that differ.
            ValueError: shapes or formats that don't fit, or a DTensor.
        """
        for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
            if tensor is not None and mesh_of(tensor) is not None:
                raise ValueError(f"{name} is a DTensor, and these rows are one rank's: pass {name}.to_local()")
        state = self.state if state is None else state
        if x.shape[0] != self.tokens.shape[0]:
            raise ValueError(f"x must have a row for each of the {self.tokens.shape[0]} tokens that came, got {tuple(x.shape)}")
        way = self.route
        options = {"counts": way.counts, "experts": (way.first, way.experts), "parallel": parallel}
        return multiply_groups(x, weight, bias, state, self.recipe, self.offs, **options)


# Collectives take sizes from the host, so a compiler leaves its graph at each of these.
@outside_graphs
def dispatch(
    x: Tensor,
    experts: Tensor,
    num_experts: int,
    *,
    recipe: Recipe | RecipeName,
    group: ProcessGroup | DeviceMesh | None = None,
    key: Key | None = None,
) -> Received:
    """Sends tokens to the ranks of their experts as codes and scales.

    Rank r of the group has experts r * n to (r + 1) * n - 1, with n = ceil(num_experts / ranks). Every rank calls it. What it
    receives is, to the bit, what it would be if values were sent and then quantized: in blocks of a row, or with one scale, of
    the largest magnitude among the tokens of all ranks.

    Ranks exchange once how many rows go where, and the host waits for that. On one rank it doesn't.

    Args:
        x: [tokens, in], float32, float16 or bfloat16, this rank's.
        experts: int64 or int32 [tokens, k], the numbers of each token's experts.
        num_experts: how many there are on all ranks.
        recipe: a `Recipe` or its name; the input's and the gradient's formats have blocks of one row, or one scale per tensor.
        group: the ranks that share the experts: a process group, a mesh of one axis, or None for this rank alone.
        key: a seed or two uint32 words, for recipes that round gradients stochastically.

    Raises:
        TypeError: x is no tensor of such a dtype, experts no integers, or group neither group nor mesh.
        ValueError: shapes that don't fit, numbers of experts that aren't there, a DTensor, or a recipe whose rows can't be told
            apart, that scales by earlier amaxes, or that needs a key.

    Example:
        >>> received = dispatch(x, experts, 64, recipe="mxfp8", group=mesh["ep"])
        >>> h = silu(received.multiply(received.tokens, up))
        >>> y = combine(received.multiply(h, down), received, weights)
    """
    recipe = check_recipe(recipes.for_linear(recipe))
    if not isinstance(x, Tensor) or x.dtype not in DTYPES or isinstance(x, QuantizedTensor):
        kind = getattr(x, "dtype", type(x).__name__)
        raise TypeError(f"x must hold values, not codes, in one of {', '.join(map(str, DTYPES))}, got {kind}")
    for name, tensor in (("x", x), ("experts", experts)):
        if tensor.layout is not torch.strided:
            raise TypeError(f"{name} must be dense, got layout {tensor.layout}: pass {name}.to_dense()")
        if mesh_of(tensor) is not None:
            raise ValueError(f"{name} is a DTensor, and dispatch takes one rank's tokens: pass {name}.to_local()")
    if experts.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"experts must be int64 or int32, got {experts.dtype}")
    if x.ndim != 2 or experts.ndim != 2 or experts.shape[0] != x.shape[0] or experts.device != x.device:
        raise ValueError(
            f"x must be [tokens, in] and experts [tokens, k] on one device, got {tuple(x.shape)} on {x.device} and "
            f"{tuple(experts.shape)} on {experts.device}"
        )
    if num_experts < 1:
        raise ValueError(f"num_experts must be 1 or more, got {num_experts}")
    state = LinearState(rng_key=None if key is None else key_tensor(key, x.device))
    return send(x, experts, num_experts, recipe, Group.of(group), state)


@outside_graphs
def send(x: Tensor, experts: Tensor, num_experts: int, recipe: Recipe, group: Group, state: LinearState) -> Received:
    """Does what `dispatch` does, with a recipe from `check_recipe` and the state of the layer that makes the outputs."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    way = route(experts, num_experts, group)
    return Received(_Dispatch.apply(x, way, recipe), way.offs, recipe, state, way)


def check_recipe(recipe: Recipe) -> Recipe:
    """Returns a recipe by which tokens can be dispatched.

    Raises:
        ValueError: it is none.
    """
    if recipe.delayed is not None:
        raise ValueError(
            f"recipe {recipe} scales by amaxes of earlier steps, which each product keeps for itself, and tokens are quantized "
            "before they come to one: use fp8_current, or another"
        )
    for cast in (recipe.input, recipe.gradient):
        if cast.format is not None:
            check_rows(cast.format)
    return recipe


@outside_graphs
def combine(y: Tensor, received: Received, weights: Tensor | None = None) -> Tensor:
    """Sends the experts' outputs back, in their dtype, and adds up those of each token.

    Every rank calls it. Sums are made in float32, in the order of each token's experts, and rounded once. The gradient of y is
    quantized on its way there, by the recipe's format of gradients, where y comes straight from `Received.multiply`; otherwise
    it arrives there as the values of these codes.

    Args:
        y: [rows, out], sorted as `received.tokens`.
        received: from `dispatch`.
        weights: [tokens, k], what each expert's output is multiplied with; None for 1.

    Returns:
        [tokens, out].

    Raises:
        ValueError: shapes that don't fit, or a recipe that needs a key and has none.
    """
    way = received.route
    if y.ndim != 2 or y.shape[0] != received.tokens.shape[0]:
        raise ValueError(f"y must be [{received.tokens.shape[0]}, out], a row for each that came, got {tuple(y.shape)}")
    if weights is not None and weights.shape != (way.tokens, way.k):
        raise ValueError(
            f"weights must be {(way.tokens, way.k)}, one for each expert of each token, got {tuple(weights.shape)}"
        )
    cast = received.recipe.gradient
    if cast.stochastic and received.state.rng_key is None and y.requires_grad:
        raise ValueError(f"recipe {received.recipe} rounds gradients stochastically: pass key= to dispatch")
    return _Combine.apply(y, weights, way, cast, received.recipe.eps, received.state, takes_codes(y))


def _groups(way: Route) -> tuple[str, ...]:
    return () if way.group.name is None else (way.group.name,)


def _send(rows: Tensor, of_row: Tensor | None, cast: Cast, eps: float, way: Route, key: Tensor | None) -> Tensor:
    """Quantizes rows and moves them to the experts.

    Args:
        rows: [tokens, columns], or [tokens * k, columns].
        of_row: which of them each row that is sent is, int64 [tokens * k].
        cast, eps, key: how they are quantized.
        way: where they go.
    """
    of_row = way.slots if of_row is None else of_row
    if cast.format is None:
        return way.there(rows.index_select(0, of_row))
    parts = quantize_rows(rows, cast, eps, _groups(way), key)
    came = way.there(joined(parts, cast.format).index_select(0, of_row))
    return tensor_of(parted(came, cast.format, parts), cast.format, rows.shape[1], rows.dtype)


class GradientCodes(QuantizedTensor):
    """A gradient as codes, which autograd adds to the gradients of others that read the same product, as values."""

    @classmethod
    def of(cls, q: QuantizedTensor) -> GradientCodes:
        return cls(q.codes, q.scales, q.tensor_scale, q.format, q.shape[-1], q.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor):
            return func(*(each.dequantize() if isinstance(each, QuantizedTensor) else each for each in args), **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: Route, recipe: Recipe) -> Tensor:
        ctx.way = way
        return _send(x, way.token_of(), recipe.input, recipe.eps, way, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor):
        way: Route = ctx.way
        rows = way.back(gradient).view(way.tokens, way.k, gradient.shape[1])
        return rows.sum(1), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        weights: Tensor | None,
        way: Route,
        cast: Cast,
        eps: float,
        state: LinearState,
        as_codes: bool,
    ) -> Tensor:
        rows = way.back(y).view(way.tokens, way.k, y.shape[1])
        ctx.way, ctx.cast, ctx.eps, ctx.state, ctx.as_codes, ctx.dtype = way, cast, eps, state, as_codes, y.dtype
        ctx.weighted = weights is not None
        needs = weights is not None and weights.requires_grad
        ctx.save_for_backward(*([] if weights is None else [weights]), *([rows] if needs else []))
        out = torch.zeros((way.tokens, y.shape[1]), dtype=torch.float32, device=y.device)
        # Operations of two dtypes cast what they read: values in float32 would be passes over memory.
        wide = None if weights is None else weights.float()
        for choice in range(way.k):
            out += rows[:, choice] if wide is None else rows[:, choice] * wide[:, choice, None]
        return out.to(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor):
        way: Route = ctx.way
        weights, rows = (*ctx.saved_tensors, None, None)[:2] if ctx.weighted else (None, None)
        d_weights = d_y = None
        if rows is not None and weights is not None:
            wide = gradient.float()
            each = [(rows[:, choice] * wide).sum(1) for choice in range(way.k)]
            d_weights = torch.stack(each, 1).to(weights.dtype) if each else torch.zeros_like(weights)
        if ctx.needs_input_grad[0]:
            cast: Cast = ctx.cast
            if weights is None:
                slots, of_row = gradient, way.token_of()
            else:
                slots, of_row = gradient.new_empty((way.tokens, way.k, gradient.shape[1]), dtype=ctx.dtype), None
                torch.mul(gradient[:, None], weights[..., None].float(), out=slots)
                slots = slots.flatten(0, 1)
            key = None
            if cast.stochastic:
                rank = ctx.state.rank * way.group.ranks + way.group.rank
                key = gradient_keys(ctx.state.rng_key, step=ctx.state.step, folds=(rank,))[0, 0]
            d_y = _send(slots, of_row, cast, ctx.eps, way, key)
            if isinstance(d_y, QuantizedTensor):
                d_y = GradientCodes.of(d_y) if ctx.as_codes else d_y.dequantize()
        return d_y, d_weights, None, None, None, None, None
