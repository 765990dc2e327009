"""Bits of torch tensors held against others', on the device where they are."""

import torch


def assert_same(ours, theirs, what):
    """Compares bits and tells where they differ."""
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
