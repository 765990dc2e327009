"""Errors where a quantized array is taken for an array of values, with what to write instead."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn


class NoValues:
    """Base of quantized arrays: raises TypeError for operations that need values, which codes and scales are not.

    Equality is among it: arrays can have the same codes, or the same values. `is` and hashing go by identity.
    """

    _hints: ClassVar[tuple[str, ...]] = ()
    """Notes of its errors: what else gets people where they wanted, a line each."""

    # NumPy's operators give way to the ones below, and its functions raise.
    __array_ufunc__ = None

    def _refusal(self, what: str) -> TypeError:
        error = TypeError(f"{what}: q.dequantize() gives values")
        for hint in self._hints:
            error.add_note(hint)
        return error

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        raise self._refusal("a QuantizedArray is no array of values, and its codes are none")

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not hasattr(other, "__array__"):
            return NotImplemented
        raise TypeError(
            "== is not defined for a QuantizedArray: compare format, codes, scales and tensor_scale for the same bits, "
            "or what dequantize() gives for the same values"
        )

    __hash__ = object.__hash__

    def __bool__(self) -> NoReturn:
        raise self._refusal("the truth of a QuantizedArray is not defined: ask `is None`, or its values")

    def __getitem__(self, index: Any) -> NoReturn:
        raise self._refusal("a QuantizedArray can't be indexed, because codes and scales have other axes")

    def _refuse(self, other: Any = None) -> NoReturn:
        raise self._refusal("codes of a QuantizedArray can't be calculated with")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refuse
    __neg__ = __pos__ = __abs__ = __round__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse
