"""Optimizer steps whose codes need the amax of the whole parameter, in the two passes of a GPU, carried out on this CPU."""

import copy

import pytest
import torch
import two_pass_kernels
from adamw_parameters import assert_quantizes, give_gradients, mixed
from arrays import tensors_of

import blockfp.torch as bfp
from blockfp.formats import Format
from blockfp.kernels import native

pytestmark = pytest.mark.skipif(not native.available(), reason=native.status())


def test_one_call_a_pass(monkeypatch):
    """Codes of strided memory, too, and of an optimizer whose groups differ."""
    called = two_pass_kernels.install(monkeypatch).calls
    params = mixed()
    wide = bfp.quantize(torch.randn(64, 512), "fp8_e4m3")
    part = torch.nn.Parameter(wide[:, :256])
    assert not part.codes.is_contiguous()
    params.append(part)
    optimizer = bfp.AdamW([{"params": params[:2]}, {"params": params[2:], "lr": 0.1}], lr=0.01)
    for step in range(2):
        give_gradients(params, step)
        optimizer.step()
    assert called == [("adamw", 3), ("adamw_codes", 3)] * 2
    for p in params:
        if isinstance(p, bfp.QuantizedTensor):
            assert_quantizes(p, optimizer.state[p]["master"])


def test_a_table_is_kept_while_nothing_but_memory_changes(monkeypatch):
    """Of two optimizers the second makes each table anew: their parameters and states stay the same."""
    tables = two_pass_kernels.install(monkeypatch).tables
    params = mixed()
    others = copy.deepcopy(params)
    optimizer, other = bfp.AdamW(params), bfp.AdamW(others)
    for step in range(5):
        for some in (params, others):
            give_gradients(some, step)
            if step == 4:
                some[1].grad = None
        if step == 1:
            for state in optimizer.state.values():
                state.update({name: tensor.clone() for name, tensor in state.items()})
        optimizer.step()
        other._tables.clear()
        other.step()
        for p, q in zip(params, others, strict=True):
            kept = tensors_of(p) if isinstance(p, bfp.QuantizedTensor) else [p.detach()]
            made = tensors_of(q) if isinstance(q, bfp.QuantizedTensor) else [q.detach()]
            assert all(map(torch.equal, kept, made))
            assert all(torch.equal(x, other.state[q][name]) for name, x in optimizer.state[p].items())
    kept, made = tables[::2], tables[1::2]
    assert kept[0] is kept[3]
    assert len(kept[4]) < len(kept[3])
    assert len({id(table) for table in made}) == 5


def test_a_step_that_moves_nothing_changes_no_code(monkeypatch):
    two_pass_kernels.install(monkeypatch)
    params = [torch.nn.Parameter(bfp.quantize(torch.randn(16, 32), Format.parse(name))) for name in ("fp8_e4m3", "nvfp4")]
    optimizer = bfp.AdamW(params, lr=0.0)
    before = [[part.clone() for part in p.parts] for p in params]
    give_gradients(params, 0)
    optimizer.step()
    for p, old in zip(params, before, strict=True):
        assert all(map(torch.equal, p.parts, old))


def test_values_that_wait_for_other_ranks_are_not_overwritten(monkeypatch):
    two_pass_kernels.install(monkeypatch)
    p = torch.nn.Parameter(bfp.quantize(torch.randn(16, 32), "fp8_e4m3"))
    optimizer = bfp.AdamW([p])
    give_gradients([p], 0)
    optimizer.step()
    p.geometry.copied = torch.randn(16, 32)
    with pytest.raises(ValueError, match="values were copied into a shard"):
        optimizer.step()
