"""`linear`: y = x w^T + bias, with each operand of its three products quantized as a recipe says."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockfp import recipes
from blockfp.definition.rounding import Key
from blockfp.kernels import switch
from blockfp.kernels.operand_cast import NEITHER
from blockfp.recipes import Compute, Recipe, RecipeName

from ..ops import library
from ..ops.layer.activations import Gating
from ..ops.layer.linear_ops import Casts
from ..ops.library import is_real
from ..ops.product.ordered_products import why_not
from ..ops.product.products import comes_laid
from ..ops.quantize.quantize_plans import part_count
from ..quantized_tensor import sharding
from ..quantized_tensor.quantize import key_tensor
from ..quantized_tensor.refusals import jit_refusal
from ..quantized_tensor.tensor import DTYPES, QuantizedTensor
from ..torch_internals import FakeTensor, dispatch_modes, functorch_is_active, jit_traces, unsafe_view, unwrap_if_dead
from .call import Call, ends_of
from .dense_layer import DenseLayer
from .functional import transformed
from .grouped_layer import GroupedLayer, counts_of
from .layer_function import NO_STATE, LayerFunction, run_layer
from .operands import may_keep_laid
from .tensor_parallel.parallel import Parallel
from .tensor_parallel.parallel_layer import ParallelLayer


class LinearState(NamedTuple):
    """Tensors that a layer keeps between steps, written in place; None for those that its recipe doesn't use.

    Attributes:
        input_amax_history, gradient_amax_history: float32 [steps], newest first, of delayed scaling.
        input_scale, gradient_scale: float32 (), what x and the gradient are multiplied with.
        rng_key: int64 [2], two words, of stochastic rounding.
        step: int64 (), how many backwards there were.
        rank: this rank's coordinate on the data-parallel axes, folded into the key.
        observed: float64 [operands, figures], see observe.py.
        has_scales: whether both scales are known to be above 0, so that no cast has to look at the current amax.
    """

    input_amax_history: Tensor | None = None
    input_scale: Tensor | None = None
    gradient_amax_history: Tensor | None = None
    gradient_scale: Tensor | None = None
    rng_key: Tensor | None = None
    step: Tensor | None = None
    rank: int = 0
    observed: Tensor | None = None
    has_scales: bool = False


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: Recipe | RecipeName,
    state: LinearState | None = None,
    key: Key | None = None,
    compute: Compute = "quantized",
) -> Tensor:
    """Computes x @ weight^T + bias, forward and backward in the formats of a recipe.

    Args:
        x: float32, float16 or bfloat16, [.., in]; quantized as [tokens, in], so that columnwise blocks run along tokens.
        weight: [out, in], a `QuantizedTensor` in the recipe's weight format, or values, which are quantized here.
        bias: [out], or None.
        recipe: a `Recipe` or its name.
        state: of delayed scaling, and the key of stochastic rounding; modules keep it in buffers.
        key: of stochastic rounding, instead of a state: a seed or two uint32 words.
        compute: "high_precision" multiplies the dequantized weight with x and the gradient as they are.

    Under `torch.autocast`, x and bias are cast to its dtype. The weight's gradient has the weight's dtype. Products run as
    `kernels.routes` says, on codes or exactly dequantized.

    Raises:
        TypeError: an x that is quantized already, a dtype that isn't supported, or dtypes of x, weight and bias that differ
            outside of autocast.
        ValueError: shapes that don't fit, tensors on different devices, a weight in another format than the recipe's, no
            state or key where the recipe needs one, or a DTensor.
        NotImplementedError: under torch.jit.trace.

    Example:
        >>> y = linear(x, quantize(w, "mxfp8_e4m3_32x32"), recipe="mxfp8")
    """
    return apply(x, weight, bias, recipes.for_linear(recipe, compute), state=state, key=key)


def apply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    *,
    state: LinearState | None = None,
    key: Key | None = None,
    counts: Sequence[int] | None = None,
    offs: Tensor | None = None,
    parallel: Parallel | None = None,
    transposed: bool = False,
    casts: Casts | None = None,
    up: Tensor | None = None,
    prologue: Gating | None = None,
) -> Tensor:
    """Computes `linear` with a recipe from `recipes.for_linear`.

    With `counts`, weight is [groups, out, in], bias [groups, out], and group g multiplies the next counts[g] rows of
    x [tokens, in]; each group's rows are a tensor of their own. `offs` says the same as the groups' ends, int32 [groups] on x's
    device. With `parallel`, tensors are what this rank holds of them. With `transposed`, weight is [.., in, out], in a format
    whose transpose is exact. `casts` are those of x that other layers share. With a `prologue`, x is its gate or holds gate and
    up, and the layer multiplies the activation's output (`prologue.takes` says where it can).
    """
    if jit_traces():
        raise jit_refusal()
    shared = None if parallel is None else parallel.of(x.shape)
    traced = torch.compiler.is_compiling()
    transforms = functorch_is_active()
    if traced and transforms:
        # See `functional`. Where nobody wants one graph, the compiler leaves this to eager code.
        raise NotImplementedError(
            "torch.compile would lose the gradients of torch.func's transforms (grad, vjp, vmap, ..) of blockfp's layers: "
            "leave torch.func out of what is compiled, or take gradients by torch.autograd"
        )
    known = call = None
    grouped = counts is not None or offs is not None
    # Lengths of fake tensors may be left open, and aren't hashed then.
    if not grouped and parallel is None and not transforms and not traced and type(x) is not FakeTensor:
        known = known_by(x, weight, bias, recipe, state, key, transposed, prologue)
        call = _calls.get(known)
    if call is None:
        in_one = prologue is not None and prologue.layout != "apart"
        check_tensors(x.narrow(-1, 0, x.shape[-1] // 2) if in_one else x, weight, bias, grouped=grouped, transposed=transposed)
    if transforms:
        kept_state = state or LinearState()

        def run(x: Tensor, weight: Tensor, bias: Tensor | None, *tensors: Tensor | None) -> Tensor:
            own = LinearState(*tensors, rank=kept_state.rank, observed=kept_state.observed)
            call = call_of(x, weight, bias, recipe, own, key, grouped, shared)
            return run_call(x, None, weight, bias, call, state and own, key, counts, offs, transposed)

        y = transformed(_rows(x), weight, bias, run, kept_state[:6])
    else:
        if call is None:
            call = call_of(_rows(x), weight, bias, recipe, state, key, grouped, shared, prologue)
            if known is not None:
                switch.kept(_calls, known, call)
        if known is None:
            casts = None
        if x.ndim > 2 and type(x) is Tensor and call.takes_axes and not dispatch_modes():
            return run_call(x, None, weight, bias, call, state, key, counts, offs, transposed, casts)
        rows = x if x.ndim == 2 else _rows(x)
        up = up if up is None or up.ndim == 2 else _rows(up)
        y = run_call(rows, up, weight, bias, call, state, key, counts, offs, transposed, casts)
        if traced and parallel is None:
            y = library.outputs(y, rows, weight, bias)
    if x.ndim == 2:
        return y
    leading = list(x.shape[:-1])
    if parallel is not None and shared is not None and shared.sequence:
        leading[shared.sequence_dim] = parallel.output_tokens(leading[shared.sequence_dim])
    # As torch's own linear does it: the result is no view, which FSDP2 warns of and in-place operations refuse.
    return unsafe_view(y, [*leading, y.shape[-1]])


def _rows(x: Tensor) -> Tensor:
    # Not reshape: of no elements it can't infer a length.
    return x if x.ndim == 2 else x.flatten(0, -2) if x.ndim > 1 else x[None]


# Calls whose arguments were checked, by all that the checks look at. A dictionary: compiled code calls no cache of functools.
_calls: dict[Any, Call] = switch.plans()

wants_grad = Tensor.requires_grad.__get__  # pyright: ignore[reportAttributeAccessIssue]
"""Says whether a tensor wants a gradient, without a call of its class's own Python code."""


def known_by(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    state: LinearState | None,
    key: Key | None,
    transposed: bool,
    prologue: Gating | None,
) -> tuple[Any, ...]:
    """All that a call of one rank without groups is checked for, and that its `Call` is made of."""
    device = x.device
    kind = device.type
    # A recipe lives as long as the calls that are known by its number: they hold it. Nothing is unpacked: that takes a list.
    return (
        id(recipe), type(x), x.shape[-1:], x.dtype, device, x.requires_grad, x.layout,
        type(weight), weight.shape, weight.dtype, weight.layout, weight.device, wants_grad(weight),
        id(getattr(weight, "format", None)),
        None if bias is None else (type(bias), bias.shape, bias.dtype, bias.device, bias.requires_grad),
        torch.is_grad_enabled(),
        torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None,
        None if state is None else (state.rank, state.input_scale is None, state.gradient_scale is None, state.has_scales),
        state is None or state.rng_key is None or state.step is None,
        key is None,
        transposed,
        prologue,
    )  # fmt: skip


_NO_DTENSORS = (Tensor, torch.nn.Parameter, QuantizedTensor)
"""Classes that are known to be none without a call."""


def check_tensors(x: Tensor, weight: Tensor, bias: Tensor | None, *, grouped: bool, transposed: bool) -> None:
    if isinstance(x, QuantizedTensor):
        raise TypeError("x is quantized already: pass its values, or x.dequantize()")
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is not None and type(tensor) not in _NO_DTENSORS and sharding.mesh_of(tensor) is not None:
            raise ValueError(
                f"{name} is a DTensor, and linear is of one rank's tensors: pass {name}.to_local(). Layers that fully_shard"
                " sharded have their weights in its module's forward (torch.distributed.fsdp.register_fsdp_forward_method adds "
                "others), and blockfp.torch.parallelize cuts layers"
            )
        if tensor is not None and tensor.layout is not torch.strided:
            raise TypeError(f"{name} must be dense, got layout {tensor.layout}: pass {name}.to_dense()")
        if tensor is not None and tensor.dtype not in DTYPES:
            raise TypeError(f"{name} must be one of {', '.join(map(str, DTYPES))}, got {tensor.dtype}")
    if x.ndim < 1 or weight.ndim != 2 + grouped or x.shape[-1] != weight.shape[-2 if transposed else -1]:
        lies = f"[{'groups, ' * grouped}{'in, out' if transposed else 'out, in'}]"
        raise ValueError(f"x [.., in] and weight {lies} must share in, got {tuple(x.shape)} and {tuple(weight.shape)}")
    if bias is not None and bias.shape != (outputs := (*weight.shape[:-2], weight.shape[-1 if transposed else -2])):
        raise ValueError(f"bias must have shape {tuple(outputs)}, got {tuple(bias.shape)}")
    if x.device != weight.device or (bias is not None and x.device != bias.device):
        lie = f"x on {x.device}, weight on {weight.device}" + (f", bias on {bias.device}" if bias is not None else "")
        raise ValueError(
            f"x, weight and bias must be on one device, got {lie}: move x or the module; what is on meta gets memory by "
            "to_empty(device=..), and values by reset_parameters() or a checkpoint"
        )


def call_of(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    state: LinearState | None,
    key: Key | None,
    grouped: bool,
    parallel: Parallel | None,
    prologue: Gating | None = None,
    experts: tuple[int, int] | None = None,
    made: bool = False,
) -> Call:
    """Checks what `check_tensors` doesn't, and returns the constants of the call.

    With `made` the input is made of x and wants a gradient, whether or not x does.
    """
    kind, state, traced = x.device.type, state or LinearState(), torch.compiler.is_compiling()
    # torch has none for meta.
    autocast = torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None
    stored = None
    if isinstance(weight, QuantizedTensor):
        # What a DTensor holds has no attributes in compiled code, nor a tensor made there; the product looks at its format.
        unread = parallel is not None or (traced and recipe.weight.format is not None)
        stored = recipe.weight.format if unread else weight.format
    if stored is not None and stored is not recipe.weight.format:
        raise ValueError(f"the weight is in {stored}, but recipe {recipe} wants {recipe.weight}: quantize it in that format")
    if autocast is None and (weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype)):
        other = weight.dtype if weight.dtype != x.dtype else bias is not None and bias.dtype
        raise TypeError(
            f"x is {x.dtype}, weight or bias {other}: cast x, or use torch.autocast or FSDP2's MixedPrecisionPolicy"
        )
    training = torch.is_grad_enabled()
    needs_bias = training and bias is not None and bias.requires_grad
    needs = (training and (made or x.requires_grad), training and weight.requires_grad, needs_bias)
    if experts is None:
        _check_state(recipe, state, key, any(needs))
    if recipe.exact_order:
        _check_order(recipe, x, weight, needs, autocast, parallel)
    rank = None if key is not None else state.rank
    cast = 0 if stored is not None or recipe.weight.format is None else part_count(recipe.weight.format)
    plain = stored is not None or type(weight) in (Tensor, torch.nn.Parameter)
    direct = not traced and plain and (is_real(x) or type(x) is QuantizedTensor)
    lays, kept = NEITHER, recipe.input_columnwise.format
    if not grouped and parallel is None:
        lays = (
            comes_laid(x, recipe.input.format, recipe.weight.format, exact=recipe.exactness),
            comes_laid(x, kept, recipe.gradient_columnwise.format, exact=recipe.exactness),
        )
    keeps_laid = lays[1] and kept is not None and may_keep_laid(kept, traced)
    takes_axes = direct and not grouped and parallel is None and prologue is None
    # As `Recipe.of_text` takes it apart, which makes all of a recipe: calls of groups come here each time.
    eps = float(recipe.text.rsplit(",", 3)[1])
    layer = DenseLayer if not grouped and parallel is None else ParallelLayer
    if parallel is not None and parallel.style == "experts":
        experts = parallel.first, parallel.features
    if grouped and (parallel is None or experts is not None) and not (traced and state.observed is not None):
        # Compiled code measures each group by itself.
        layer = GroupedLayer
    options = (cast, direct, traced, lays, keeps_laid, takes_axes, autocast, state.has_scales, eps, layer, prologue, experts)
    return Call(recipe, stored, grouped, needs, training, rank, parallel, *options)


def run_call(
    x: Tensor,
    up: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    call: Call,
    state: LinearState | None,
    key: Key | None,
    counts: Sequence[int] | None,
    offs: Tensor | None,
    transposed: bool,
    shared: Casts | None = None,
) -> Tensor:
    recipe, dtype = call.recipe, call.dtype
    if transposed:
        weight = weight.mT
    if dtype is not None:
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        weight = weight.to(dtype) if recipe.weight.format is None else weight
    tensors: tuple[Tensor | None, ...] = ()
    if state is not None or key is not None:
        state = state or LinearState()
        delayed = (state.input_amax_history, state.input_scale, state.gradient_amax_history, state.gradient_scale)
        words = state.rng_key if key is None else key_tensor(key, x.device)
        tensors = (*(delayed if recipe.delayed else (None,) * 4), words, state.step, state.observed)
    extra: Any = shared
    if call.layer is GroupedLayer:
        extra = ends_of(counts, x) if offs is None else offs
        if counts is not None and not call.traced:
            extra = extra, list(accumulate(counts))
    elif call.layer is ParallelLayer:
        extra = counts_of(offs, x) if counts is None and offs is not None else counts
    function: Any = LayerFunction.apply
    arguments = (call, extra, *tensors)
    if not call.traced and not functorch_is_active():
        function, arguments = run_layer, (call, extra, tensors or NO_STATE)
        x, weight, up = unwrap_if_dead(x), unwrap_if_dead(weight), None if up is None else unwrap_if_dead(up)
    if dtype is None:
        outputs: Any = function(x, up, weight, bias, *arguments)
    else:
        # Products choose their dtypes themselves.
        with torch.autocast(x.device.type, enabled=False):
            outputs = function(x, up, weight, bias, *arguments)
    # Beside y there may be what gradients of gradients need.
    return outputs[0] if isinstance(outputs, tuple) else outputs


def _check_order(
    recipe: Recipe,
    x: Tensor,
    weight: Tensor,
    needs: tuple[bool, ...],
    autocast: torch.dtype | None,
    parallel: Parallel | None,
) -> None:
    """Raises ValueError unless all sums that the call needs have a defined order (`kernels.exact_order`)."""
    device, dtypes = x.device, (autocast or x.dtype, autocast or weight.dtype)
    why = why_not(recipe.text, device.type, device.index, *dtypes, needs[0], needs[1])
    if why is not None:
        raise ValueError(f"recipe {recipe}: {why}")
    if parallel is not None and parallel.ranks > 1 and parallel.style != "experts" and parallel.splits is None:
        raise ValueError(
            f"recipe {recipe} has exact_order, and {parallel.ranks} ranks would add their terms in any order: "
            "parallelize(.., splits=N), with one N for every number of ranks, adds them in one tree"
        )


def _check_state(recipe: Recipe, state: LinearState, key: Key | None, training: bool) -> None:
    if recipe.delayed is not None and (state.input_scale is None or state.gradient_scale is None):
        raise ValueError(
            f"recipe {recipe} scales by amaxes of earlier steps: pass state=LinearState(..), or use the Linear module"
        )
    stochastic = recipe.gradient.stochastic or recipe.gradient_columnwise.stochastic
    if training and stochastic and key is None and (state.rng_key is None or state.step is None):
        raise ValueError(f"recipe {recipe} rounds gradients stochastically: pass key=, or use the Linear module")
