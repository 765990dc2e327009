"""Products of bfloat16 by the CUDA library: of integers, whose sums fp32 holds, so they are exact."""

import pytest
import torch

from blockfp.definition.groups import columns_for
from blockfp.kernels import cuda_library
from blockfp.kernels.products import plan_values

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("the kernel is Hopper's", allow_module_level=True)

TILES = range(2)


def integers(*shape, seed=0):
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16).cuda()


def run(a, b, out, scales=None, ends=None, tile=-1):
    groups = 1 if ends is None else ends.shape[0]
    planned = plan_values(a.shape[0], b.shape[-2], a.shape[1], matrices=groups if b.ndim == 3 else 1)
    workspace = torch.empty(planned.workspace, dtype=torch.uint8, device="cuda")
    one = torch.ones(1, device="cuda")
    numbers = (*planned.numbers[:7], tile, *planned.numbers[8:])
    cuda_library.library().product(a, b, *(scales or (one, one)), ends, None, out, workspace, *numbers)
    return out


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    "shape", [(128, 192, 64), (1, 1, 1), (130, 200, 72), (257, 77, 1000), (1000, 520, 4104), (64, 8, 8)], ids=str
)
def test_is_the_sum(shape, tile):
    m, n, k = shape
    a, b = integers(m, k), integers(n, k, seed=1)
    want = a.float() @ b.float().mT if k < 16 else (a.double() @ b.double().mT).float()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        got = run(a, b, torch.empty((m, n), dtype=dtype, device="cuda"), tile=tile)
        assert torch.equal(got, want.to(dtype)), dtype


def test_scales_multiply_the_sums():
    a, b = integers(130, 64), integers(40, 64, seed=1)
    scales = torch.tensor([0.5], device="cuda"), torch.tensor([8.0], device="cuda")
    got = run(a, b, torch.empty((130, 40), device="cuda"), scales)
    assert torch.equal(got, 4 * (a.float() @ b.float().mT))


COUNTS = [(150, 0, 70, 131), (0, 0, 0, 0), (1, 127, 128, 129, 0, 300), (5,)]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("k", [256, 100])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_rows_of_groups(counts, k, tile):
    tokens, n, groups = sum(counts) + 20, 200, len(counts)
    a, b = integers(tokens, k), integers(groups, n, k, seed=1)
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32).cuda()
    factors = torch.arange(1, groups + 1, device="cuda").float(), torch.full((1,), 0.25, device="cuda")
    got = run(a, b, torch.full((tokens, n), 7.0, device="cuda"), factors, ends, tile)
    begin = 0
    for i, end in enumerate(ends.tolist()):
        assert torch.equal(got[begin:end], (a[begin:end].double() @ b[i].double().mT).float() * (i + 1) * 0.25)
        begin = end
    assert (got[begin:] == 7).all()


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_columns_of_groups(counts, tile):
    m, n, groups = 300, 136, len(counts)
    columns = columns_for(sum(counts) + 20, groups)
    # What no group has is NaN, and what fills groups up is zero.
    a, b = (torch.full((lines, columns), float("nan"), dtype=torch.bfloat16, device="cuda") for lines in (m, n))
    wants, first = [], 0
    for i, count in enumerate(counts):
        end = first + -(-count // 128) * 128
        for side, seed in ((a, 2 * i), (b, 2 * i + 1)):
            side[:, first:end] = 0
            side[:, first : first + count] = integers(side.shape[0], count, seed=seed)
        wants.append((a[:, first:end].double() @ b[:, first:end].double().mT).float() * 2 * (i + 1))
        first = end
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32).cuda()
    factors = torch.full((1,), 2.0, device="cuda"), torch.arange(1, groups + 1, device="cuda").float()
    got = run(a, b, torch.full((groups, m, n), 7.0, device="cuda"), factors, ends, tile)
    assert torch.equal(got, torch.stack(wants))


def test_what_does_not_fit_is_refused():
    a, b, out = integers(8, 64), integers(8, 64), torch.empty((8, 8), device="cuda")
    one = torch.ones(1, device="cuda")
    numbers = plan_values(8, 8, 64).numbers
    product = cuda_library.library().product
    with pytest.raises(ValueError, match="both be codes or both bfloat16"):
        product(
            a,
            torch.zeros((8, 64), dtype=torch.uint8, device="cuda"),
            one,
            one,
            None,
            None,
            out,
            None,
            *numbers[:2],
            0,
            0,
            *numbers[4:],
        )
    with pytest.raises(ValueError, match="a must be bfloat16"):
        product(a.half(), b, one, one, None, None, out, None, *numbers)
    with pytest.raises(ValueError, match="cuBLASLt multiplies FP8 here"):
        product(a, b, one, one, None, None, out, None, *numbers[:6], False, *numbers[7:])
