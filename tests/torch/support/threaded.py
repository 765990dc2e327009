"""Ranks as threads, by torch's private threaded process group; FSDP2, DTensors and functional collectives run in it."""

import contextlib
import functools
import inspect
import os
import sys
import threading
import time
import traceback

import torch
import torch.distributed as dist
from processes import LIMIT
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import multi_threaded_pg as threaded_pg

if not hasattr(threaded_pg.ThreadLocalWorld, "comms"):
    # torch 2.11 asks for it when a group ends; its threads have none.
    threaded_pg.ThreadLocalWorld.comms = []


# In a CUDA build without a device, what stands in for one ends with the thread that first asked, and others then crash.
torch._C._ensureCUDADeviceGuardSet()

_drawing = threading.RLock()


@contextlib.contextmanager
def seeded(seed):
    """Seeds torch's generator, which ranks share, and keeps it from the others meanwhile."""
    with _drawing, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class OneRankFailed(AssertionError):
    """A rank raised; the message has its traceback."""


def run(world, function, *args, timeout=LIMIT):
    """Returns the results of `function(rank, *args)` by rank, or raises OneRankFailed, also after `timeout` seconds."""
    results, errors = _run(world, function, args, timeout, together=True)
    for rank, error in enumerate(errors):
        if error is not None and not isinstance(error, SystemExit):
            text = "".join(traceback.format_exception(error))
            raise OneRankFailed(f"rank {rank} of {world}:\n{text}") from error
    return results


def on(world):
    """Makes a test of a `function(rank, fixtures..)`, which that many threads run."""

    def decorate(function):
        @functools.wraps(function)
        def test(**fixtures):
            run(world, functools.partial(function, **fixtures))

        _, *others = inspect.signature(function).parameters.values()
        test.__signature__ = inspect.Signature(others)
        return test

    return decorate


def errors(world, function, *args, timeout=LIMIT):
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
        # Ranks take turns with the interpreter; on several processors each turn is a wait for another one to wake.
        if hasattr(os, "sched_setaffinity"):
            processors = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {processors[os.getpid() % len(processors)]})
        dist.init_process_group(backend="threaded", rank=rank, world_size=world, store=store)
        try:
            results[rank] = function(rank, *args)
        except BaseException as error:
            errors[rank] = error
            if together:
                _end_waiting(error)
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(world)]
    of_torch, torch.manual_seed = torch.manual_seed, manual_seed
    end = time.monotonic() + timeout
    try:
        for thread in threads:
            thread.start()
        while running := [thread for thread in threads if thread.is_alive()]:
            if time.monotonic() > end:
                hanging = "".join(f"rank {threads.index(one)} of {world} hangs:\n{_stack_of(one)}" for one in running)
                raise OneRankFailed(f"not done after {timeout} seconds: {hanging}")
            if not together and len(running) < world and _wait_in_vain(running):
                _end_waiting(TimeoutError())
            running[0].join(0.05)
    finally:
        torch.manual_seed = of_torch
        threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    # Later tests would draw random bits as that model's rank, and could not be compiled.
    assert DistributedDataParallel._get_active_ddp_module() is None, "forwards under DDP overlapped: let ranks take turns"
    return results, errors


def _stack_of(thread):
    return "".join(traceback.format_stack(sys._current_frames()[thread.ident]))


def _end_waiting(error):
    """Raises SystemExit on all ranks that wait in a collective, or will."""
    # The lock, because it looks through a dictionary that other ranks change.
    with threaded_pg.ProcessLocalGroup._coll_lock:
        threaded_pg.ProcessLocalGroup.exception_handle(error)


def _wait_in_vain(ranks):
    """Says whether each of these threads, which are all that still run, waits in a collective for one that has ended."""
    frames = sys._current_frames()
    return all(_waits_for_another(frames.get(rank.ident)) for rank in ranks)


def _waits_for_another(frame):
    while frame is not None and frame.f_code is not threading.Condition.wait_for.__code__:
        frame = frame.f_back
    if frame is None or frame.f_back.f_code is not threaded_pg.Collective.join.__code__:
        return False
    collective, rank = (frame.f_back.f_locals[name] for name in ("self", "rank"))
    # The first rank does the work for all once they are there; where it has raised meanwhile, the others wait for ever.
    about_to_work = rank == 0 and collective._count == collective._world_size
    return not (collective._done or about_to_work)
