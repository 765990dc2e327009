"""Changing what a module is, where it stands."""

from __future__ import annotations

from typing import Any

from torch import nn


def become(module: nn.Module, cls: type[nn.Module]) -> None:
    """Makes a module one of another class.

    It stays the same object, and so whatever refers to it goes on with the new class: its parents (under several names, in
    lists, in attributes that are no children), hooks, what users hold. A new module in its place would reach none of these.
    torch's `fully_shard` does the same.

    Args:
        module: any; it already has what the new class needs, or gets it next.
        cls: a class without a constructor's work to be done.

    Raises:
        TypeError: Python can't, since the two lay their memory out in different ways.
    """
    changed: Any = module
    changed.__class__ = cls
