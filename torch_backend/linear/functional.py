"""`linear` under `torch.func`: grad, vjp, jacrev and vmap, also nested.

torch's transforms unwrap tensors level by level. These functions save x and the weight instead of codes, recompute operands,
and run the ordinary `linear`, its backward and double backward (`second_order`) on plain tensors. Under vmap each example is
quantized separately, with its own amaxes, one after another. A layer's state is passed as arguments, since stacked models have
stacked state.

All of it stays outside of compiled graphs, where torch 2.13 returns zero gradients for autograd functions under torch.func.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.library import outside_graphs

Run = Callable[..., Tensor]


@outside_graphs
def transformed(x: Tensor, weight: Tensor, bias: Tensor | None, run: Run, state: Sequence[Tensor | None]) -> Tensor:
    """Calls `run(x, weight, bias, *state)` so that torch.func can differentiate it twice and map it.

    `state` tensors are written in place; the first is an amax history, if the layer has one.
    """
    return _Linear.apply(x, weight, bias, run, *state)


class _Mapped(torch.autograd.Function):
    @classmethod
    def each(cls, info: Any, in_dims: Sequence[int | None], args: Sequence[Any]) -> tuple[Any, Any]:
        """Runs the examples one after another and returns their stacked results with the batch axes."""
        results = []
        for i in range(info.batch_size):
            own = [arg.select(dim, i) if isinstance(dim, int) else arg for arg, dim in zip(args, in_dims, strict=True)]
            results.append(cls.apply(*own))
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0,) * len(results[0])


class _Linear(_Mapped):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, run: Run, *state: Tensor | None) -> Tensor:
        return run(x, weight, bias, *state)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.run = inputs[:4]
        # Not saved for backward, since autograd rejects saved tensors that were written in place.
        ctx.state = inputs[4:]
        ctx.save_for_backward(*tensors)

    @staticmethod
    @outside_graphs
    def backward(ctx: Any, gradient: Tensor):
        wanted = ctx.needs_input_grad[:3]
        grads = iter(_Gradients.apply(*ctx.saved_tensors, gradient, wanted, ctx.run, *ctx.state))
        return *(next(grads) if one else None for one in wanted), None, *(None for _ in ctx.state)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None):
        raise NotImplementedError(
            "linear has no forward-mode derivative: use torch.func.vjp, grad or jacrev (twice for a Hessian)"
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any):
        if in_dims[4] is not None and torch.is_grad_enabled():
            raise NotImplementedError(
                "delayed scaling makes scales of what a layer recorded in its own buffers, and under vmap these are stacked "
                "ones, which no step would update: train models that are stacked with another recipe, such as fp8_current, and "
                "evaluate them under torch.no_grad()"
            )
        return _Linear.each(info, in_dims, args)


class _Gradients(_Mapped):
    """The requested gradients of x, weight and bias."""

    @staticmethod
    def forward(x, weight, bias, gradient, wanted, run, *state):
        leaves = _leaves((x, weight, bias), wanted)
        return _grads(run, (*leaves, *state), wanted, gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.wanted, ctx.run = inputs[:6]
        ctx.state = inputs[6:]
        ctx.save_for_backward(*tensors)

    @staticmethod
    @outside_graphs
    def backward(ctx: Any, *along: Tensor):
        needs = ctx.needs_input_grad[:4]
        grads = iter(_Seconds.apply(*ctx.saved_tensors, ctx.wanted, needs, ctx.run, len(along), *along, *ctx.state))
        return *(next(grads) if one else None for one in needs), None, None, *(None for _ in ctx.state)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any):
        return _Gradients.each(info, in_dims, args)


class _Seconds(_Mapped):
    """Gradients of `_Gradients` with respect to x, weight, bias and the output's gradient."""

    @staticmethod
    def forward(x, weight, bias, gradient, wanted, needs, run, count, *along_and_state):
        along, state = along_and_state[:count], along_and_state[count:]
        leaves = _leaves((x, weight, bias, gradient), tuple(a or b for a, b in zip((*wanted, True), needs, strict=True)))
        with torch.enable_grad():
            first = _grads(run, (*leaves[:3], *state), wanted, leaves[3], create_graph=True)
            inputs: list[Any] = [leaf for leaf, one in zip(leaves, needs, strict=True) if one]
            pairs = [(one, v) for one, v in zip(first, along, strict=True) if one.requires_grad]
            outputs, vectors = zip(*pairs, strict=True) if pairs else ((), ())
            take: Any = torch.autograd.grad
            found = take(outputs, inputs, vectors, allow_unused=True) if pairs else [None] * len(inputs)
        return tuple(
            torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device) if one is None else one
            for leaf, one in zip(inputs, found, strict=True)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    @outside_graphs
    def backward(ctx: Any, *along: Tensor):
        raise NotImplementedError(
            "torch.func differentiates linear twice: for a third time use torch.autograd.grad in eager mode"
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any):
        return _Seconds.each(info, in_dims, args)


def _leaves(tensors: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
    return [None if x is None else x.detach().requires_grad_(one) for x, one in zip(tensors, wanted, strict=True)]


def _grads(run: Run, inputs: Sequence[Any], wanted: Sequence[bool], gradient: Tensor | None, **options: Any) -> Any:
    with torch.enable_grad():
        y = run(*inputs)
        leaves = [leaf for leaf, one in zip(inputs[:3], wanted, strict=True) if one]
        return torch.autograd.grad(y, leaves, gradient, **options)
