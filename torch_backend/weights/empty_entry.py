"""What stands under a quantized weight's own name in a state dict: a tensor of no bytes that nobody computes with."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..torch_internals import NO_TORCH_FUNCTION

COMPUTES = {"add", "sub", "rsub", "mul", "div", "true_divide", "divide", "multiply", "subtract", "lerp", "addcmul", "addcdiv"}
"""The operations that averages are made of, as `_plain_name` calls them."""


class EmptyEntry(Tensor):
    """An empty tensor that takes part in copies, casts and files, and in no arithmetic.

    Averages over state dicts (timm's ModelEmaV3, Ultralytics' ModelEMA, ..) go through all that a state dict holds. An average
    without elements is easily made, and they would go on to the codes beside it as if these were numbers: some mix them, some
    leave them at those of the first step. Files hold a plain tensor.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _plain_name(func) in COMPUTES:
            shape = next((tuple(one.shape[1:]) for one in _leaves(args, kwargs) if isinstance(one, EmptyEntry)), ())
            raise NotImplementedError(
                f"{func.__name__} is not defined for what stands under a quantized weight's name in a state dict (the weight's "
                f"shape is {shape}): beside it are codes and scales, and averages of those are none of the weight. For "
                'averages of weights (EMA, soups) convert with weights="high_precision", or average what '
                "blockfp.torch.high_precision_state_dict(model) gives"
            )
        result = NO_TORCH_FUNCTION(func, types, args, kwargs or {})
        # A parameter that it is copied into stays what it is, and so does a shape.
        return result.as_subclass(EmptyEntry) if type(result) is Tensor and result.shape[:1] == (0,) else result

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def _plain_name(func: Any) -> str:
    """The name of an operation without what says that it is in place, reflected, or of a list: `mul` of `__rmul__`."""
    name = getattr(func, "__name__", "").strip("_").removeprefix("foreach_")
    for start in ("", "r", "i"):
        if name.startswith(start) and name[len(start) :] in (*COMPUTES, "truediv"):
            return name[len(start) :].replace("truediv", "div")
    return name


def _leaves(args: Any, kwargs: Any) -> list[Any]:
    outer = [*args, *(kwargs or {}).values()]
    return [inner for one in outer for inner in (one if isinstance(one, list | tuple) else [one])]
