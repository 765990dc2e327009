"""A process, or two under FSDP2, save one checkpoint after another and are killed, again and again.

    python tests/torch/support/killed_while_saving.py /tmp/kills --kills 15

Prints the steps that are there after each kill, the last of which has been loaded and is the one of its step to the bit, and
what was left behind. A program of its own, because what it forks must have no threads.
"""

import argparse
import os
import random
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from resumed import assert_is_part_of, model_of, shard, train

from blockfp.files import manifest
from blockfp.torch import AdamW, load_checkpoint, save_checkpoint

SHAPES = [(64, 128), (37, 40)]
FORMAT = "nvfp4_16x16"


def model_and_optimizer(mesh, steps):
    model = shard(model_of(FORMAT, SHAPES), mesh)
    optimizer = AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, 0, steps)
    return model, optimizer


def save_on_and_on(rank, world, wait, run, store, ready):
    if world > 1:
        dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world)
    last = manifest.steps(run)
    step = last[-1] if last else 0
    model, optimizer = model_and_optimizer("fsdp2" if world > 1 else "one", 0)
    if last:
        load_checkpoint(run, model, optimizer)
    os.write(ready, b".")
    while True:
        train(model, optimizer, step, step + 1)
        step += 1
        save_checkpoint(run, model, optimizer, step=step, keep=2, wait=step % 3 != 0 if wait is None else wait)


def forked(function, *arguments):
    child = os.fork()
    if child:
        return child
    try:
        function(*arguments)
    finally:
        os._exit(1)


def stop_half_way(run, ranks):
    """Stops ranks while a checkpoint is half written, and two are there that may be lost."""
    while True:
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)
            assert os.WIFSTOPPED(os.waitpid(rank, os.WUNTRACED)[1])
        if any(run.glob(".*.tmp")) and len(manifest.steps(run)) == 2:
            return
        for rank in ranks:
            os.kill(rank, signal.SIGCONT)
        time.sleep(random.uniform(0.0, 0.01))


def killed(folder, kills, world, wait):
    """Kills `world` ranks, in turn at random and in a checkpoint; yields the steps left, loaded, and names of leftovers."""
    run = folder / f"run-{world}-{wait}"
    for kill in range(kills):
        begun, ready = os.pipe()
        store = folder / f"store-{world}-{wait}-{kill}"
        ranks = [forked(save_on_and_on, rank, world, wait, run, store, ready) for rank in range(world)]
        for _ in ranks:
            assert os.read(begun, 1) == b"."
        if kill % 2:
            stop_half_way(run, ranks)
        else:
            # The first save behind the training's back makes a group first.
            time.sleep(random.uniform(0.0, 1.5 if world > 1 and wait is False else 0.3))
        random.shuffle(ranks)
        for number, rank in enumerate(ranks):
            os.kill(rank, signal.SIGKILL)
            for other in ranks[number + 1 :]:
                os.kill(other, signal.SIGCONT)
            # Some time for the other one to notice, or not.
            time.sleep(random.choice((0, 0.03)))
        for rank in ranks:
            os.waitpid(rank, 0)
        os.close(begun), os.close(ready)
        there = manifest.steps(run)
        if there:
            other = model_of(FORMAT, SHAPES, seed=50)
            other_optimizer = AdamW(other.parameters(), lr=0.5)
            step = load_checkpoint(run, other, other_optimizer).step
            assert step == there[-1]
            assert_is_part_of(other, other_optimizer, *model_and_optimizer("one", step))
        left_behind = [path.name for path in run.iterdir() if path.name.startswith(".")] if run.exists() else []
        assert len(left_behind) <= 2, left_behind  # one being written, one being removed
        yield there, left_behind


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--kills", type=int, default=15, help="of each number of processes, and each way of saving")
    parser.add_argument("--both", action="store_true", help="every third save waits for nothing, instead of all or none")
    options = parser.parse_args()
    random.seed(options.seed)
    # What torch imports at a first use is imported once, here.
    model, optimizer = model_and_optimizer("one", 1)
    save_checkpoint(options.folder / "first", model, optimizer, step=1)
    load_checkpoint(options.folder / "first", model, optimizer)
    for world in (1, 2):
        for wait in (None,) if options.both else (True, False):
            for there, left_behind in killed(options.folder, options.kills, world, wait):
                print(there, left_behind, world, wait, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
