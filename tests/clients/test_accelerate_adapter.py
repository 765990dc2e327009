"""accelerate's FSDP2 with a model that rank 0 alone has read, and its checkpoints: the numbers of `fully_shard` alone."""

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import gloo
import pytest
import torch
from documented import run_documented
from torch.distributed.fsdp import fully_shard

import blockfp.torch as bfp

RECIPES = ("nvfp4", "fp8_delayed")


def client():
    """What the tests of accelerate without an adapter have."""
    spec = importlib.util.spec_from_file_location("accelerate_client", Path(__file__).with_name("test_accelerate.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def net(common, recipe):
    """Without originals: what travels is codes, and an optimizer's masters begin with their values."""
    torch.manual_seed(0)
    return bfp.convert(common.Net(), recipe, keep_init=False)


def accelerator(common, rank, **options):
    from accelerate.state import PartialState

    made = common.accelerator(rank, reshard_after_forward=True, **options)
    # Whoever asks for the state again gets this one, too.
    PartialState._shared_state["distributed_type"] = made.distributed_type
    return made


def same(model, other):
    for (name, a), (other_name, b) in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
        assert name == other_name
        assert torch.equal(getattr(a, "_local_tensor", a), getattr(b, "_local_tensor", b)), name


@gloo.on(2)
def test_recipes_with_buffers_are_loaded_by_rank_0_alone(rank):
    from blockfp.integrations.accelerate import prepare

    common = client()
    for recipe in RECIPES:
        plain = net(common, recipe)
        names = [name for name, _ in plain.named_buffers()]
        assert names
        fully_shard(plain)
        expected = common.train(plain, common.optimizer_of(plain, "quantized"), rank)
        ours = accelerator(common, rank, cpu_ram_efficient_loading=True)
        model = net(common, recipe)
        if rank != 0:
            # Only rank 0 has read the model.
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    (tensor.codes if isinstance(tensor, bfp.QuantizedTensor) else tensor).zero_()
        model, optimizer = prepare(ours, model, common.optimizer_of(model, "quantized"))
        assert [name for name, _ in model.named_buffers()] == names
        assert set(names) <= set(model.state_dict())
        assert common.train(model, optimizer, rank, ours.backward) == expected, recipe
        same(model, plain)


def _resumes(rank):
    _resume(rank)


def _resumes_from_full(rank):
    import blockfp.integrations.accelerate  # noqa: F401

    _resume(rank, state_dict_type="FULL_STATE_DICT")


def _resume(rank, **options):
    common = client()
    folder = os.environ["BLOCKFP_TEST_FOLDER"]
    for recipe in ("mxfp8", *RECIPES):
        ours = accelerator(common, rank, cpu_ram_efficient_loading=False, **options)
        model = common.net(recipe, "quantized")
        model, optimizer = ours.prepare(model, common.optimizer_of(model, "quantized"))
        common.train(model, optimizer, rank, ours.backward)
        ours.save_state(f"{folder}/{recipe}")
        through = common.train(model, optimizer, rank, ours.backward)
        ends = {name: getattr(value, "_local_tensor", value).clone() for name, value in model.state_dict().items()}
        assert any(name.endswith("weight_codes") for name in ends)
        ours.load_state(f"{folder}/{recipe}")
        assert common.train(model, optimizer, rank, ours.backward) == through, recipe
        for name, value in model.state_dict().items():
            assert torch.equal(getattr(value, "_local_tensor", value), ends[name]), (recipe, name)


@pytest.mark.parametrize("function", ["_resumes", "_resumes_from_full"])
def test_save_state_resumes_to_the_bit(function, monkeypatch):
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("BLOCKFP_TEST_FOLDER", folder)
        gloo.run(2, __file__, function)


def test_without_fsdp_it_is_prepare():
    from accelerate import Accelerator

    from blockfp.integrations.accelerate import prepare

    common = client()
    model = common.net("nvfp4", "quantized")
    optimizer = common.optimizer_of(model, "quantized")
    again, wrapped = prepare(Accelerator(cpu=True), model, optimizer)
    assert again is model
    assert wrapped.optimizer is optimizer


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "torch"])
def test_without_fsdp_save_state_resumes_to_the_bit(safe, tmp_path):
    """accelerate drops what it takes for tied: tensors whose storages have one address and size."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    common = client()
    runs = []
    for saves in (True, False):
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        ours, model = Accelerator(cpu=True), common.net("nvfp4", "quantized")
        model, optimizer = ours.prepare(model, common.optimizer_of(model, "quantized"))
        if saves:
            common.train(model, optimizer, 0, ours.backward)
            ours.save_state(str(tmp_path), safe_serialization=safe)
        else:
            ours.load_state(str(tmp_path))
        runs.append((common.train(model, optimizer, 0, ours.backward), model))
    assert runs[0][0] == runs[1][0]
    same(runs[0][1], runs[1][1])


def test_the_documented_lines(tmp_path):
    common = client()
    space = run_documented("accelerate", model=common.Net(), data=[torch.randn(4, 48)], folder=tmp_path)
    space = run_documented("accelerate: buffers", model=common.Net(), accelerator=space["accelerator"], bfp=bfp)
    assert bfp.summary(space["model"]).share == 1
