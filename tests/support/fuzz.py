"""Bad files through every reader and command: short in tests, long by hand.

    python tests/support/fuzz.py --files 20000 --seconds 3600 --seed 1

makes so many, runs each through everything that reads its kind, and prints how many were refused, how many read, and whatever
else happened: another exception, more than SECONDS, more than MEMORY. It works in children with a limit on their memory, so
that a large allocation is a finding and not the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

from bad_files import STEP, make, samples

SECONDS = 10
"""Seconds of a processor that a reader may take for one of these files, of a few kilobytes; waiting, six times as many."""

MEMORY = 512 * 2**20
"""Bytes that a reader may allocate beyond those that the process has before it: the bound of docs/checkpoints.md."""


class Refused(Exception):
    """A command has ended with 2."""


def readers(kind: str, path: Path, out: Path) -> dict[str, object]:
    """Everything that reads a file of this kind, by name."""
    import torch

    import blockfp
    import blockfp.torch as bfp

    if kind in ("checkpoint", "dcp"):

        def load() -> None:
            model = torch.nn.Sequential(bfp.Linear(32, 32, recipe="nvfp4"), bfp.Linear(32, 16, recipe="fp8_delayed"))
            bfp.load_checkpoint(path, model, bfp.AdamW(model.parameters(), lr=0.1))

        found = {
            f"export {to}": command("export", path, out / f"{to}.safetensors", "--to", to, "--force")
            for to in ("quantized", "high-precision")
        }
        return found if kind == "dcp" else found | {"load_checkpoint": load}
    found = {"quantize": command("quantize", path, out / "q.safetensors", "--format", "nvfp4", "--force")}
    found["check"] = command("check", path, "--format", "mxfp8_e4m3", "--backend", "numpy", "--backend", "kernels")
    if kind in ("safetensors", "parts"):
        found["dequantize"] = command("dequantize", path, out / "d.safetensors", "--force")
        found |= {"load": lambda: blockfp.load(path), "torch.load": lambda: bfp.load(path)}
        if "blockfp.jax" in sys.modules:
            found["jax.load"] = lambda: sys.modules["blockfp.jax"].load(path)
    return found


def command(*arguments: object):
    """The `blockfp` command, in this process."""

    def run() -> None:
        from typer.testing import CliRunner

        from blockfp.cli import app

        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        if "\x1b[2J" in result.output:
            raise AssertionError("what a file says was obeyed by the terminal")
        if result.exit_code == 2:
            if "nothing to check" in result.output:
                return
            names = {Path(str(argument)).name for argument in arguments[1:]} | {STEP, "parts-"}
            if "error: " not in result.output or not any(name in result.output for name in names):
                raise AssertionError(f"no file's name: {result.output[:300]!r}")
            raise Refused

    return run


_ALARMS = ((signal.ITIMER_PROF, signal.SIGPROF, SECONDS), (signal.ITIMER_REAL, signal.SIGALRM, 6 * SECONDS))


class TooLong(BaseException):
    """The alarm."""


def outcome(read) -> str:
    """A reader's answer to a file: "read", "refused", or what else happened."""
    from blockfp.errors import BadCheckpoint, BadFile

    def ring(*_):
        raise TooLong

    for timer, alarm, seconds in _ALARMS:
        signal.signal(alarm, ring)
        signal.setitimer(timer, seconds)
    try:
        read()
        return "read"
    except (BadFile, BadCheckpoint, Refused):
        return "refused"
    except TooLong:
        return f"more than {SECONDS} s"
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {str(error)[:300]}"
    finally:
        for timer, _, _ in _ALARMS:
            signal.setitimer(timer, 0)


def fuzz(files: int, seed: int, seconds: float, whole: Path) -> tuple[Counter, list[str]]:
    """Makes and reads bad files in this process, whose memory it limits; says what became of them, and each finding's seed."""
    begin, counted, findings = time.monotonic(), Counter(), []
    allocated = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (allocated + MEMORY, resource.RLIM_INFINITY))
    warnings.simplefilter("ignore")
    for number in range(seed, seed + files):
        if time.monotonic() - begin > seconds:
            break
        rng = random.Random(number)
        with tempfile.TemporaryDirectory() as made:
            kind, path = make(rng, whole, Path(made))
            out = Path(made) / "out"
            out.mkdir()
            counted["files"] += 1
            before = sorted(one.name for one in Path(made).iterdir())
            for name, read in readers(kind, path, out).items():
                happened = outcome(read)
                known = happened if happened in ("read", "refused") else "other"
                counted[known] += 1
                if known == "other":
                    findings.append(f"seed {number}, {kind}, {name}: {happened}")
                if known == "refused" and any(out.iterdir()):
                    findings.append(f"seed {number}, {kind}, {name}: left {[one.name for one in out.iterdir()]}")
                shutil.rmtree(out)
                out.mkdir()
            if sorted(one.name for one in Path(made).iterdir()) != before:
                findings.append(f"seed {number}, {kind}: wrote beside its output")
    return counted, findings


def in_child(files: int, seed: int, seconds: float, whole: Path) -> tuple[Counter, list[str], int]:
    """`fuzz` in a child of this process; and the most memory that it had, in bytes."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            counted, findings = fuzz(files, seed, seconds, whole)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            with open(send, "w") as pipe:
                json.dump([counted, findings, peak], pipe)
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    os.close(send)
    with open(receive) as pipe:
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        return Counter(), [f"seeds from {seed}: the process ended with {status}"], 0
    counted, findings, peak = json.loads(said)
    return Counter(counted), findings, peak


def prepare(whole: Path) -> None:
    """Makes the whole files, and reads each once, so that what is imported at a first use is there before memory is limited."""
    import torch

    torch.set_num_threads(1)
    samples(whole)
    with tempfile.TemporaryDirectory() as out, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind, name in (
            ("safetensors", "model.safetensors"),
            ("parts", "parts.safetensors.index.json"),
            ("npy", "x.npy"),
            ("npz", "x.npz"),
            ("checkpoint", f"run/{STEP}"),
        ):
            for reader, read in readers(kind, whole / name, Path(out)).items():
                happened = outcome(read)
                assert happened in ("read", "refused"), (name, reader, happened)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder)
        prepare(whole)
        began, total, found, largest = time.monotonic(), Counter(), [], 0
        for seed in range(options.seed, options.seed + options.files, 250):
            left = options.seconds - (time.monotonic() - began)
            if left <= 0:
                break
            files = min(250, options.seed + options.files - seed)
            counted, findings, peak = in_child(files, seed, left, whole)
            total, found, largest = total + counted, found + findings, max(largest, peak)
            print(*findings, f"{dict(total)}, {time.monotonic() - began:.0f} s", sep="\n", flush=True)
        print(f"{dict(total)}; findings: {len(found)}; most memory: {largest / 2**20:.0f} MiB")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
