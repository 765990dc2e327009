"""Equality of torch tensors, quantized ones, and collections of them."""

import collections.abc

import torch
from arrays import tensors_of


def assert_equal(ours, theirs, what=""):
    """Compares tensors, quantized tensors, and mappings and sequences of these; a NaN equals nothing."""
    if hasattr(ours, "codes"):
        if hasattr(theirs, "format"):
            assert (ours.format, ours.shape, ours.dtype) == (theirs.format, theirs.shape, theirs.dtype), what
        ours, theirs = tensors_of(ours), tensors_of(theirs)
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), what
    elif isinstance(ours, collections.abc.Mapping):
        assert ours.keys() == theirs.keys(), what
        for name, one in ours.items():
            assert_equal(one, theirs[name], f"{what} {name}")
    elif isinstance(ours, collections.abc.Iterable) and not isinstance(ours, str):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(one, other, f"{what} [{number}]")
    else:
        assert ours == theirs, what


def assert_same(ours, theirs, what):
    """Compares bits, but for those of NaN, and tells where they differ."""
    assert len(ours) == len(theirs), what
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.shape == b.shape, (what, number, a.shape, b.shape)
        assert a.dtype == b.dtype, (what, number)
        words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
        differs = a.view(words) != b.view(words)
        if a.is_floating_point():
            differs &= ~(a.isnan() & b.isnan())
        count = int(differs.sum())
        where = differs.nonzero()[:5].tolist()
        assert count == 0, (
            f"{what}, part {number} {tuple(a.shape)}: {count} differ, first at {where}, {a[differs][:5]} for {b[differs][:5]}"
        )
