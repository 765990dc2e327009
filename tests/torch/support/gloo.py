"""Ranks as processes over gloo or NCCL, forked from one without threads: `@on(4)`, or `run(4, __file__, "function")`."""

import functools
import importlib.util
import inspect
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

from processes import LIMIT

# Begun at the first call, in each worker once.
_FORKS = multiprocessing.get_context("forkserver")
# The last two are not there for all; what they import is most of what a rank of their tests would do.
_TORCH = ["torch.distributed.fsdp", "torch.distributed.checkpoint", "blockfp.torch"]
_FORKS.set_forkserver_preload(["pytest", *_TORCH, "transformers.modeling_utils", "peft"])


def run(world, file, function, timeout=LIMIT, backend="gloo"):
    """Calls a file's `function(rank)` on processes (None: no group; nccl: a GPU each); returns what they print, or raises."""
    with tempfile.TemporaryDirectory() as folder:
        place = (dict(os.environ), os.getcwd(), folder)
        # What is imported beforehand may look at a GPU, which no fork can use then.
        context = multiprocessing.get_context("spawn") if backend == "nccl" else _FORKS
        ranks = [
            context.Process(target=_rank_main, args=(rank, world, str(file), function, backend, *place))
            for rank in range(world)
        ]
        for rank in ranks:
            rank.start()
        end = time.monotonic() + timeout
        for rank in ranks:
            rank.join(max(0, end - time.monotonic()))
        hanging = [rank for rank in ranks if rank.is_alive()]
        for rank in hanging:
            rank.kill()
            rank.join()
        printed = "".join(path.read_text() for path in sorted(Path(folder).glob("printed-*")))
    assert not hanging, f"{function} on {world} ranks hangs:\n{printed}"
    assert not any(rank.exitcode for rank in ranks), f"{function} on {world} ranks:\n{printed}"
    return printed


def on(world):
    """Makes a test of a `function(rank)`, which that many processes run."""

    def decorate(function):
        @functools.wraps(function)
        def test():
            run(world, inspect.getfile(function), function.__name__)

        test.__signature__ = inspect.Signature()
        return test

    return decorate


def _rank_main(rank, world, file, name, backend, environment, here, folder):
    printed = os.open(f"{folder}/printed-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(here)
    code = 1
    try:
        import torch
        import torch.distributed as dist

        spec = importlib.util.spec_from_file_location("ranks", file)
        module = importlib.util.module_from_spec(spec)
        sys.modules["ranks"] = module
        spec.loader.exec_module(module)
        if backend == "nccl":
            torch.cuda.set_device(rank)
        if backend is not None:
            dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
        inspect.unwrap(getattr(module, name))(rank)
        if backend is not None:
            dist.barrier()
        code = 0
    except BaseException:
        print(f"rank {rank} of {world}:\n{traceback.format_exc()}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads make a plain exit abort now and then.
    os._exit(code)
