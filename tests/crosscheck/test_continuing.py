"""A training run of one framework is continued by the other: the examples' files hold all of it, to the bit."""

import json
import os
import re
import sys
from argparse import Namespace
from pathlib import Path

import gloo
import numpy as np
import pytest

from blockfp.definition.rounding import COLUMNWISE, ROWWISE, fold_in, gradient_key

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = ("nvfp4", "fp8_delayed")
# Rows that two ranks cut inside of blocks.
SIZES = {"width": 48, "heads": 2, "layers": 1, "context": 16, "hidden": 96}
MATRICES = [f"blocks.0.{name}" for name in ("qkv", "out", "up", "down")]


def options(**changed):
    settings = {"steps": 5, "batch": 8, "held_out": 8, "seed": 0, "devices": 2, "save": None, "save_at": None, "resume": None}
    return Namespace(**settings | changed)


def pytorch(rank):
    """On two ranks: what the folder "jax" has is saved again at once and continued; without it, runs from the start."""
    import torch
    from blockfp.torch_backend.ops.quantize.key_ops import gradient_keys

    sys.path.insert(0, str(EXAMPLES))
    import train_fsdp2 as train

    config = train.byte_text.Config(**SIZES)
    train.byte_text.Config = lambda: config
    folder = Path(os.environ["CONTINUING"])
    theirs = folder / "jax"
    for recipe in RECIPES:
        if theirs.exists():
            saved = train.bfp.load(theirs / f"{recipe}.safetensors")
            model = train.build(config, recipe, 1, torch.device("cpu"), saved)
            optimizer = train.bfp.AdamW(model.parameters())
            train.load_state(optimizer, model, saved)
            train.save(folder / "torch again" / f"{recipe}.safetensors", model, optimizer, int(saved["step"]))
            if recipe == "nvfp4":
                keys = [gradient_keys(m.rng_key, step=m.step, folds=(rank,)) for m in map(model.get_submodule, MATRICES)]
                torch.save(keys, folder / f"keys-{rank}.pt")
            run = train.train(recipe, options(resume=theirs), None)
        else:
            run = train.train(recipe, options(save=folder / "torch", save_at=3), None)
        if rank == 0:
            (folder / f"{recipe}-{run['first_step']}.json").write_text(json.dumps(run["losses"]))


class Silent:
    """Progress bars that show nothing."""

    def add_task(self, *_, **__):
        return None

    update = add_task


@pytest.fixture
def train(monkeypatch, tmp_path, little_optimization):
    """examples/train_jax.py on the small model."""
    pytest.importorskip("jax")
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("CONTINUING", str(tmp_path))
    import train_jax

    config = train_jax.byte_text.Config(**SIZES)
    monkeypatch.setattr(train_jax.byte_text, "Config", lambda: config)
    return train_jax


def equal_files(one, other):
    """Both hold the same bytes under the same names, and all that a run goes on from."""
    from safetensors.numpy import load_file

    one, other = load_file(one), load_file(other)
    assert one.keys() == other.keys()
    for name, x in one.items():
        assert (x.dtype, x.shape) == (other[name].dtype, other[name].shape), name
        np.testing.assert_array_equal(x.reshape(-1).view(np.uint8), other[name].reshape(-1).view(np.uint8), name)
    assert {"embedding", "master.blocks.0.down", "first.blocks.0.down", "second.norm", "step"} <= one.keys()


def test_each_continues_the_other(train, tmp_path):
    import jax
    import torch

    gloo.run(2, __file__, "pytorch")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    for recipe in RECIPES:
        file = f"{recipe}.safetensors"
        sharded = train.start(train.byte_text.Config(), recipe, 1, train.bfp.adamw(0.0), mesh, tmp_path / "torch" / file)
        train.save(tmp_path / "jax" / file, *sharded)
        equal_files(tmp_path / "torch" / file, tmp_path / "jax" / file)
        if recipe == "nvfp4":
            random = sharded[-1]

    # One of them goes on in JAX for a step, and for two.
    run = train.train("fp8_delayed", options(resume=tmp_path / "torch", save=tmp_path / "jax", save_at=4), Silent())
    gloo.run(2, __file__, "pytorch")
    for recipe in RECIPES:
        equal_files(*(tmp_path / folder / f"{recipe}.safetensors" for folder in ("jax", "torch again")))

    # The gradients' random bits of the next step are the same ones too.
    for rank in range(2):
        for name, theirs in zip(MATRICES, torch.load(tmp_path / f"keys-{rank}.pt"), strict=True):
            key, step = (random[name.rpartition(".")[2]][part][0] for part in train.byte_text.RANDOM)
            assert step == 3
            ours = [gradient_key(fold_in(key, step), direction, rank) for direction in (ROWWISE, COLUMNWISE)]
            np.testing.assert_array_equal(theirs[0], ours)

    whole, after_jax = (json.loads((tmp_path / f"fp8_delayed-{first}.json").read_text()) for first in (0, 4))
    assert (run["first_step"], len(run["losses"])) == (3, 2)
    np.testing.assert_allclose(run["losses"], whole[3:], rtol=0.005)
    np.testing.assert_allclose(after_jax, whole[4:], rtol=0.005)


@pytest.mark.parametrize(
    ("changed", "message"),
    [({}, "has 5 steps done, and --steps is 5: pass more"), ({"steps": 9, "save_at": 5}, "--save-at is 5: pass a later step")],
)
def test_a_finished_run_is_not_continued(train, tmp_path, changed, message):
    with pytest.raises(ValueError, match=message):
        train.byte_text.steps_left(5, options(**changed), tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be 1 or more, got 0"),
        (["--steps", "3", "--save", "x", "--save-at", "5"], r"--save-at must be a step of 1 to --steps \(3\) .*, got 5"),
        (["--steps", "3", "--save-at", "2"], "beside --save, got 2"),
    ],
)
def test_steps_that_there_are_not(train, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["train_jax.py", *arguments])
    with pytest.raises(SystemExit):
        train.main()
    assert re.search(message, capsys.readouterr().err)
