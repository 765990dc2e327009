"""Two processes under FSDP2 save one checkpoint after another and are killed; ten times. Prints the steps that then load.

A program of its own, because what it forks must have no threads. Arguments: a folder, a seed.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from blockfp.torch_backend.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from blockfp.torch_backend.optimizer.adamw import AdamW
from resumed import assert_is_part_of, model_of, shard, train

from blockfp import manifest

SHAPES = [(64, 128), (37, 40)]
FORMAT = "nvfp4_16x16"


def model_and_optimizer(mesh, steps):
    model = shard(model_of(FORMAT, SHAPES), mesh)
    optimizer = AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, 0, steps)
    return model, optimizer


def save_on_and_on(rank, run, store, ready):
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    last = manifest.steps(run)
    step = last[-1] if last else 0
    model, optimizer = model_and_optimizer("fsdp2", 0)
    if last:
        load_checkpoint(run, model, optimizer)
    os.write(ready, b".")
    while True:
        train(model, optimizer, step, step + 1)
        step += 1
        save_checkpoint(run, model, optimizer, step=step, keep=2, wait=step % 3 != 0)


def forked(function, *arguments):
    child = os.fork()
    if child:
        return child
    try:
        function(*arguments)
    finally:
        os._exit(1)


def main(folder, seed):
    run = folder / "run"
    random.seed(seed)
    # What torch imports at a first use is imported once, here.
    model, optimizer = model_and_optimizer("one", 1)
    save_checkpoint(folder / "first", model, optimizer, step=1)
    load_checkpoint(folder / "first", model, optimizer)
    for kill in range(10):
        begun, ready = os.pipe()
        ranks = [forked(save_on_and_on, rank, run, folder / f"store{kill}", ready) for rank in range(2)]
        for _ in ranks:
            assert os.read(begun, 1) == b"."
        time.sleep(random.uniform(0.0, 0.3))
        random.shuffle(ranks)
        os.kill(ranks[0], signal.SIGKILL)
        # Some time for the other one to notice, or not.
        time.sleep(random.choice((0, 0.03)))
        os.kill(ranks[1], signal.SIGKILL)
        for rank in ranks:
            os.waitpid(rank, 0)
        os.close(begun), os.close(ready)
        there = manifest.steps(run)
        left_behind = [path.name for path in run.iterdir() if path.name.startswith(".")] if run.exists() else []
        if there:
            other = model_of(FORMAT, SHAPES, seed=50)
            other_optimizer = AdamW(other.parameters(), lr=0.5)
            step = load_checkpoint(run, other, other_optimizer).step
            assert step == there[-1]
            assert_is_part_of(other, other_optimizer, *model_and_optimizer("one", step))
        print(there, left_behind, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
