"""What stands under a quantized weight's own name in a state dict: a tensor of no bytes that nobody computes with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..torch_internals import pytree

COMPUTES = {
    *("add", "sub", "rsub", "mul", "div", "lerp", "addcmul", "addcdiv", "sum", "mean", "stack"),
    # As they come in inference mode.
    *("subtract", "multiply", "divide", "true_divide"),
}
"""The operations that averages are made of."""


class EmptyEntry(Tensor):
    """An empty tensor that takes part in copies, casts and files, and in no arithmetic, nor does a DTensor of it.

    Averages over state dicts (timm's ModelEmaV3, Ultralytics' ModelEMA, ..) go through all that a state dict holds. An average
    without elements is easily made, and they would go on to the codes beside it as if these were numbers: some mix them, some
    leave them at those of the first step. Files hold a plain tensor.
    """

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.strip("_").removeprefix("foreach_")
        if name in COMPUTES:
            leaves = pytree.tree_leaves((args, kwargs))
            shape = next(tuple(one.shape[1:]) for one in leaves if isinstance(one, EmptyEntry))
            raise NotImplementedError(
                f"{name} is not defined for what stands under a quantized weight's name in a state dict (the weight's "
                f"shape is {shape}): beside it are codes and scales, and averages of those are none of the weight. For "
                'averages of weights (EMA, soups) convert with weights="high_precision", or average what '
                "blockfp.torch.high_precision_state_dict(model) gives"
            )
        result = super().__torch_dispatch__(func, types, args, kwargs or {})  # pyright: ignore
        # A parameter that it is copied into stays what it is, and so does a shape. `as_subclass` takes an alias.
        kept = type(result) is Tensor and result.shape[:1] == (0,) and func is not torch.ops.aten.alias.default
        return result.as_subclass(EmptyEntry) if kept else result

    # Which torch refuses of all classes that have a `__torch_dispatch__`.
    def numpy(self, *, force: bool = False) -> Any:
        return self.as_subclass(Tensor).numpy(force=force)

    def tolist(self) -> Any:
        return self.as_subclass(Tensor).tolist()

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)
