"""Classes derived from those of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn


class Derived:
    """Base of classes that `convert` makes from another library's; they are pickled, and copied, by that.

    Attributes:
        made_of: the library's class, which the made one is derived from, too.
        rebuild: a function that makes an empty module of what stands in `rebuilt_from`.
        rebuilt_from: its arguments. Another version of the library may have another forward, which is then what is meant.
    """

    made_of: type[nn.Module]
    rebuild: ClassVar[Callable[..., nn.Module]]
    rebuilt_from: ClassVar[tuple[Any, ...]]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if "made_of" not in vars(type(self)):
            # FSDP2 derives a class from this one, and others may.
            return super().__reduce_ex__(protocol)  # pyright: ignore[reportReturnType]
        return self.rebuild, self.rebuilt_from, self.__getstate__()


def derive(made_of: type[nn.Module], prefix: str, bases: tuple[type, ...], **members: Any) -> Any:
    """Makes a class of these bases and a library's class, named after that."""
    members = {"rebuilt_from": (made_of,)} | members | {"made_of": made_of, "__module__": made_of.__module__}
    return type(f"{prefix}{made_of.__name__}", (*bases, made_of), members)
