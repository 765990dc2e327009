"""Ranks as threads of this process: torch's own threaded process group, private API and known only here.

Real FSDP2, DTensors and functional collectives run in it, four ranks in hundredths of a second.
"""

import contextlib
import sys
import threading
import traceback

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import multi_threaded_pg as threaded_pg

if not hasattr(threaded_pg.ThreadLocalWorld, "comms"):
    # torch 2.11 asks for it when a group ends; its threads have none.
    threaded_pg.ThreadLocalWorld.comms = []


_drawing = threading.RLock()


@contextlib.contextmanager
def seeded(seed):
    """Seeds torch's generator, which ranks share, and keeps it from the others meanwhile."""
    with _drawing:
        torch.manual_seed(seed)
        yield


class OneRankFailed(AssertionError):
    """A rank raised; the message has its traceback."""


def run(world, function, *args, timeout=60):
    """Returns the results of `function(rank, *args)` on `world` ranks, by rank.

    Raises:
        OneRankFailed: a rank raised, or none of them got on for `timeout` seconds.
    """
    results, errors = _run(world, function, args, timeout, together=True)
    for rank, error in enumerate(errors):
        if error is not None and not isinstance(error, SystemExit):
            text = "".join(traceback.format_exception(error))
            raise OneRankFailed(f"rank {rank} of {world}:\n{text}") from error
    return results


def errors(world, function, *args, timeout=5):
    """Returns the error of each rank: None where it raises nothing, SystemExit where it waits for another in vain."""
    return _run(world, function, args, timeout, together=False)[1]


def _run(world, function, args, timeout, together):
    results, errors = [None] * world, [None] * world
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded_pg._install_threaded_pg()
    threaded_pg.ProcessLocalGroup.reset()
    store = dist.HashStore()

    def manual_seed(seed):
        if threading.current_thread() in threads and not _drawing._is_owned():
            raise RuntimeError("ranks that are threads draw from one generator: build what is drawn under threaded.seeded()")
        return of_torch(seed)

    def rank_main(rank):
        dist.init_process_group(backend="threaded", rank=rank, world_size=world, store=store)
        try:
            results[rank] = function(rank, *args)
        except BaseException as error:
            errors[rank] = error
            if together:
                # Whoever waits for this rank gets SystemExit.
                threaded_pg.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(world)]
    of_torch, torch.manual_seed = torch.manual_seed, manual_seed
    try:
        for thread in threads:
            thread.start()
        for rank, thread in enumerate(threads):
            thread.join(timeout)
            if thread.is_alive() and not together:
                threaded_pg.ProcessLocalGroup.exception_handle(TimeoutError())
                thread.join(timeout)
            if thread.is_alive():
                stack = "".join(traceback.format_stack(sys._current_frames()[thread.ident]))
                raise OneRankFailed(f"rank {rank} of {world} hangs:\n{stack}")
    finally:
        torch.manual_seed = of_torch
        threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    # Later tests would draw random bits as that model's rank, and could not be compiled.
    assert DistributedDataParallel._get_active_ddp_module() is None, "forwards under DDP overlapped: let ranks take turns"
    return results, errors
