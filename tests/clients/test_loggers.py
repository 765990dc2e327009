"""What `observe` measured, in the files of TensorBoard and Weights & Biases."""

import json
import math
import struct
import time

import pytest
import torch
from torch import nn

import blockfp.torch as bfp


def observed(log):
    """Two steps of a layer with figures that are known: values of E4M3, in the second step with one too small for it."""
    model = bfp.convert(nn.Sequential(nn.Linear(64, 32, bias=False)), "fp8_current")
    x = torch.full((32, 64), 2.0)
    with bfp.observe(model, oscillations=True) as observation:
        assert observation.scalars() == {}
        for smallest in (2.0, 2.0**-30):
            x[0, 0] = smallest
            model(x).sum().backward()
            assert observation.step()
            log(observation)
    return observation


def hold(read, observation):
    """`read` has (name, step) -> value: every figure of every record, and the known ones."""
    expected = {}
    for record in observation.records:
        share = {"saturated": record.saturated / record.elements, "flushed": record.flushed / record.elements}
        for name, value in {"amax": record.amax, "sqnr": record.sqnr, **share}.items():
            expected[f"quantization/{record.module}/{record.operand}/{name}", record.step] = value
    weights = {key: value for key, value in read.items() if "/weight/" in key[0]}
    assert set(read) - set(weights) == set(expected)
    assert all(read[key] == pytest.approx(value) for key, value in expected.items())
    names = ("changed", "flipped", "frequency", "oscillating")
    assert set(weights) == {(f"quantization/0/weight/{name}", step) for name in names for step in (0, 1)}
    first, second = (read["quantization/0/input rowwise/flushed", step] for step in (0, 1))
    assert (first, second) == (0, pytest.approx(1 / (32 * 64)))
    assert read["quantization/0/input rowwise/amax", 0] == 2
    assert read["quantization/0/input rowwise/sqnr", 0] == math.inf


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    from blockfp.integrations.tensorboard import write

    with SummaryWriter(tmp_path) as writer:
        observation = observed(lambda observation: write(writer, observation))
        write(writer, observation, step=7, prefix="other")
    events = EventAccumulator(str(tmp_path)).Reload()
    read = {(tag, one.step): one.value for tag in events.Tags()["scalars"] for one in events.Scalars(tag)}
    assert {step for tag, step in read if tag.startswith("other/")} == {7}
    hold({key: value for key, value in read.items() if not key[0].startswith("other/")}, observation)


def records(file):
    """The records of a .wandb file, LevelDB's log: 7 bytes of header, then parts (CRC, length, kind) in blocks of 32 KiB."""
    at, content = 7, b""
    while at + 7 <= len(file):
        if 2**15 - at % 2**15 < 7:  # the rest of a block
            at += 2**15 - at % 2**15
            continue
        _, length, kind = struct.unpack_from("<IHB", file, at)
        content += file[at + 7 : at + 7 + length]
        at += 7 + length
        if at > len(file):
            return  # still being written
        if kind in (1, 4):  # whole, or its last part
            yield content
            content = b""


def test_wandb(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    from blockfp.integrations.wandb import log

    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    with wandb.init(mode="offline", dir=tmp_path, project="blockfp", settings=wandb.Settings(console="off")) as run:
        observation = observed(lambda observation: log(run, observation))
    (file,) = tmp_path.rglob("*.wandb")
    # W&B's own process may write the end of the file after the run has ended here.
    for _ in range(300):
        found = [wandb_internal_pb2.Record.FromString(content) for content in records(file.read_bytes())]
        if found and found[-1].WhichOneof("record_type") == "exit":
            break
        time.sleep(0.1)
    read = {}
    for record in found:
        for item in record.history.item:
            name = item.key or item.nested_key[0]
            if name.startswith("quantization/"):
                value = json.loads(item.value_json)
                read[name, record.history.step.num] = math.inf if value == "Infinity" else value
    hold(read, observation)
