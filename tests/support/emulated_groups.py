"""The CUDA library's products, and its functions of groups of rows, carried out by the definition; see emulated_cuda.py."""

import torch
from emulated_kernels import BY_NUMBERS, amax_bits, float_of, write, write_aligned

from blockfp.definition import alignment, groups, rotation

_ELEMENTS = {0: torch.float8_e4m3fn, 1: torch.float8_e5m2}
_VALUES = 6


def group_rows(ends, words, tokens):
    where = list(groups.groups_of(ends.tolist(), tokens))
    assert words.numel() == groups.words_for(tokens, len(where))
    words.fill_(-1)
    found = [group.end for group in where] + [group.end_column for group in where]
    words[: len(found)] = torch.tensor(found, dtype=torch.int32)


def quantize_groups(
    x, words, keys, amax, recorded, overflows, codes, scales, tensor_scale, codes_t, scales_t, tensor_scale_t, count,
    rows_keyed, columns_keyed, element, block_rows, block_columns, rule, measure, eps_bits, largest_bits, rotate_t,
):  # fmt: skip
    assert not bool(x.isinf().any()), "an Inf in a group isn't marked here"
    format, ends = BY_NUMBERS[element, block_rows, block_columns, rule], words[:count].tolist()
    each = [x[group.begin : group.end] for group in groups.groups_of(ends, x.shape[0])]
    multiplier = None if measure or not format.per_tensor else amax
    found = [[amax_bits(rows), amax_bits(rotation.rotate(rows.mT))] for rows in each]
    if multiplier is not None:
        write(recorded, torch.tensor(found, dtype=torch.int32)[:, 0])
    elif amax is not None:
        write(amax, torch.tensor(found, dtype=torch.int32)[:, : 1 + rotate_t])
    for wanted, parts, columnwise, keyed in (
        (codes, (codes, scales, tensor_scale), False, rows_keyed),
        (codes_t, (codes_t, scales_t, tensor_scale_t), True, columns_keyed),
    ):
        if wanted is None:
            continue
        turn = {"turn": rotation.rotate} if rotate_t and columnwise else {}
        own = keys[:, int(columnwise)] if keyed else None
        options = {"columnwise": columnwise, "keys": own, "eps": float_of(eps_bits), "multiplier": multiplier}
        for to, part in zip(parts, groups.quantize_groups(x, ends, format, **options, **turn), strict=True):
            if part is not None:
                write(to, part)


def quantize_groups_aligned(
    x,
    words,
    overflows,
    codes,
    scales,
    codes_t,
    scales_t,
    stored_t,
    stored_scales_t,
    count,
    element,
    block_rows,
    block_columns,
    rule,
):
    format, ends = BY_NUMBERS[element, block_rows, block_columns, rule], words[:count].tolist()
    for out, stored, columnwise in (
        ((codes, scales), (None, None), False),
        ((codes_t, scales_t), (stored_t, stored_scales_t), True),
    ):
        if out[0] is None and stored[0] is None:
            continue
        made = groups.quantize_groups(x, ends, format, columnwise=columnwise)
        if stored[0] is not None:
            write(stored[0], made.codes)
            write(stored[1], made.scales)
        else:
            columns = groups.columns_for(x.shape[0], count) if columnwise else x.shape[1]
            write_aligned(alignment.align(made.codes, made.scales, format, columns=columns), *out)


def sum_groups(x, words, out):
    for group in groups.groups_of(words[: len(out)].tolist(), len(x)):
        out[group.number] = x[group.begin : group.end].float().sum(0)


def clear_groups(words, rows, matrices, count):
    where = list(groups.groups_of(words[:count].tolist(), 2**31 - 1))
    if rows is not None:
        rows[where[-1].end if where else 0 :] = 0
    for group in where if matrices is not None else []:
        if not group.rows:
            matrices[group.number] = 0


def _operand(codes, scales, element, block_rows, ordered):
    """An operand of a product, [.., rows, k] in float64, and its scale, or one for each group, where it has no blocks."""
    if block_rows == 0:
        values = codes if element == _VALUES else codes.view(_ELEMENTS[element])
        assert element != _VALUES or codes.dtype is torch.bfloat16
        return values.double(), scales.double().reshape(-1)
    rows, k = codes.shape[-2:]
    grid = scales.mT[..., :rows, :] if ordered else scales
    if block_rows == 128:
        grid = grid.repeat_interleave(128, -2)[..., :rows, :]
    if grid.shape[-1] > 1 or k <= 128:
        grid = grid.repeat_interleave(128, -1)[..., :k]
    assert grid.shape[-2] == rows
    return codes.view(_ELEMENTS[element]).double() * grid.double(), torch.ones(1, dtype=torch.float64)


def product(
    a, b, a_scales, b_scales, ends, bias, out, workspace, a_element, a_block_rows, b_element, b_block_rows, a_ordered,
    b_ordered, own, tile, fast, accumulate,
):  # fmt: skip
    assert all(each.is_contiguous() for each in (a, b, out))
    left, by_a = _operand(a, a_scales, a_element, a_block_rows, a_ordered)
    right, by_b = _operand(b, b_scales, b_element, b_block_rows, b_ordered)
    count = 1 if ends is None else len(ends)
    by_a, by_b = by_a.expand(count), by_b.expand(count)
    where = [groups.Group(0, len(a), 0, 0)] if ends is None else groups.groups_of(ends.tolist(), 2**31 - 1)
    for group in where:
        number = group.number
        if out.ndim == 3:
            columns, to = slice(group.first_column, group.end_column), out[number]
            terms = left[:, columns], right[:, columns]
        else:
            rows = slice(group.begin, group.end)
            to, terms = out[rows], (left[rows], right[number] if right.ndim == 3 else right)
        made = terms[0] @ terms[1].mT * by_a[number] * by_b[number]
        if bias is not None:
            made = made + bias.reshape(count, -1)[number].double()
        to.copy_(made + to.double() if accumulate else made)


FUNCTIONS = (group_rows, quantize_groups, quantize_groups_aligned, sum_groups, clear_groups, product)
