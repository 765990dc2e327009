"""Pretrains a Llama-like model on locally installed sources and documentation, in bf16 or any recipe.

    python examples/pretrain.py runs/mxfp8 --size 1m --recipe mxfp8 --tokens 400000                # one CPU or one GPU
    torchrun --nproc-per-node 2 examples/pretrain.py runs/nvfp4 --recipe nvfp4 --compile           # FSDP2, 124M parameters

Runs of one size and seed start from the same weights and see the same bytes in the same order, in any recipe. The folder gets
run.json (the run's settings, and each session's machine), metrics.jsonl, plot.png and checkpoints. The same command resumes
from the last checkpoint, on this mesh or another, including data order, random keys and schedule. --minutes and SIGTERM end a
session with a checkpoint. "mxfp8_floor", "mxfp6_floor" and "mxfp4_floor" are those recipes with OCP's rule for scales.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import byte_text
import pretrain_metrics
import pretrain_model
import pretrain_text
import torch
import torch.distributed as dist
from torch import nn

import blockfp
import blockfp.torch as bfp

SAME = ("recipe", "size", "seed", "tokens", "batch", "clip", "text_bytes", "evaluate_every", "evaluate_rows")
"""Options that make the run what it is: a folder holds one run."""


class Training:
    """A run in its folder, new or loaded from its last checkpoint.

    Args:
        options: the parsed command line.
        began: start of the session, by `time.monotonic`.
    """

    def __init__(self, options: argparse.Namespace, began: float):
        self.options, self.began = options, began
        self.size = pretrain_model.SIZES[options.size]
        self.sharded = dist.is_initialized()
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if self.sharded else (0, 1)
        self.batch = options.batch or self.size.batch
        if self.batch % self.ranks or options.evaluate_rows % self.batch:
            raise ValueError(
                f"--batch must be a multiple of the {self.ranks} ranks, and --evaluate-rows of --batch; "
                f"got {self.batch} and {options.evaluate_rows}"
            )
        self.steps = options.tokens // (self.batch * self.size.context)
        if self.steps < 1:
            raise ValueError(f"--tokens must be a step's {self.batch * self.size.context} or more, got {options.tokens}")
        self.device = torch.device(options.device, torch.cuda.current_device() if options.device == "cuda" else None)
        self.text = self._read_text()
        length = self.size.context + 1
        self.order = pretrain_text.Order(self.text.training, length, options.seed)
        self.held_out = pretrain_text.Order(self.text.held_out, length, 0)
        recipe = pretrain_model.recipe_of(options.recipe)
        how = {"shard": self.sharded, "compiled": options.compile} | pretrain_model.arguments_of(options.recipe, "build")
        self.model = pretrain_model.build(self.size, recipe, options.seed, self.device, **how)
        more = pretrain_model.arguments_of(options.recipe, "optimizer")
        self.optimizer = pretrain_model.optimizer_of(self.model, self.size.rate, **more)
        self.step = self.position = 0
        self.checkpoints = options.folder / "checkpoints"
        about = self._about()
        if any(self.checkpoints.glob("step-????????")):
            loaded = bfp.load_checkpoint(self.checkpoints, self.model, self.optimizer)
            self.step, self.position = loaded.step, int(loaded.extra["position"])
        if self.rank == 0:
            self._note_sitting(about)
            self.metrics = pretrain_metrics.Metrics(options.folder / "metrics.jsonl", self.step)
        # One rank's word for it.
        self.stopped = False

    def stop(self, *_: object) -> None:
        """Ends the session at the next line of metrics, on every rank."""
        self.stopped = True

    def _read_text(self) -> pretrain_text.Text:
        folder = self.options.text or self.options.folder.parent / "text"
        if self.rank == 0:
            pretrain_text.prepare(folder, self.options.text_bytes)
        if self.sharded:
            dist.barrier()
        return pretrain_text.read(folder, self.options.text_bytes)

    def _about(self) -> dict:
        """Describes the run, and checks that the folder contains the same run.

        Raises:
            ValueError: the folder contains another run.
        """
        about = {name: getattr(self.options, name) for name in SAME} | {"batch": self.batch, "text": self.text.digest}
        path = self.options.folder / "run.json"
        there = json.loads(path.read_text()) if path.exists() else about
        changed = {name: (there[name], value) for name, value in about.items() if there[name] != value}
        if changed:
            raise ValueError(
                f"{path} is another run: {', '.join(f'{n} {a!r} there, {b!r} here' for n, (a, b) in changed.items())}"
            )
        more = {"steps": self.steps, "parameters": sum(p.numel() for p in self.model.parameters()), "sittings": []}
        return more | about | there

    def _note_sitting(self, about: dict) -> None:
        device = torch.cuda.get_device_name() if self.device.type == "cuda" else _processor()
        versions = {"torch": torch.__version__, "blockfp": blockfp.__version__, "python": platform.python_version()}
        sitting = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "first_step": self.step}
        sitting |= {"device": device, "ranks": self.ranks, "threads": torch.get_num_threads(), "compile": self.options.compile}
        about["sittings"].append(sitting | versions | {"command": " ".join(sys.argv)})
        new = self.options.folder / f"run.json.{os.getpid()}"
        new.write_text(json.dumps(about, indent=1))
        new.replace(self.options.folder / "run.json")

    def rows(self, order: pretrain_text.Order, first: int) -> torch.Tensor:
        """Returns this rank's pieces of a batch of the text, int64."""
        rows = torch.from_numpy(order.rows(first, self.batch)[self.rank :: self.ranks])
        if self.device.type == "cuda":
            # The host doesn't wait for the steps before.
            rows = rows.pin_memory()
        return rows.to(self.device, non_blocking=True).to(torch.int64)

    def train_step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs one step; returns this rank's loss and the norm of all gradients before clipping."""
        for group in self.optimizer.param_groups:
            group["lr"] = byte_text.learning_rate(self.step, self.steps, peak=self.size.rate, warmup=max(1, self.steps // 20))
        loss = pretrain_model.loss_of(self.model, self.rows(self.order, self.position))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.position += self.batch
        return loss.detach(), norm

    def observed_step(self) -> tuple[torch.Tensor, torch.Tensor, dict]:
        """Runs a `train_step` that also returns the SQNR of this rank's inputs and gradients, and of the weights afterwards."""
        if not any(isinstance(module, bfp.Linear) for module in self.model.modules()):
            return *self.train_step(), {}
        # Compiled code would be compiled once more.
        eager = torch.compiler.set_stance("force_eager") if self.options.compile else nullcontext()
        with eager, bfp.observe(self.model) as observation:
            loss, norm = self.train_step()
            sqnr = pretrain_metrics.sqnr_of_operands(observation.step())
        return loss, norm, sqnr | pretrain_metrics.sqnr_of_weights(self.model, self.optimizer, self.sharded)

    @torch.no_grad()
    def held_out_losses(self) -> list[float]:
        """Returns the loss of each held-out row, the same rows every time and on every mesh."""
        firsts = range(0, self.options.evaluate_rows, self.batch)
        own = torch.cat([pretrain_model.losses_of_rows(self.model, self.rows(self.held_out, first)) for first in firsts])
        if not self.sharded:
            return own.double().tolist()
        # FSDP2 would keep the root's own weights whole.
        self.model.reshard()
        found = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(found, own)
        # A rank has every so many'th row.
        return torch.stack(found, 1).flatten().double().tolist()

    def mean(self, *values: torch.Tensor) -> list[float]:
        """Returns means over ranks."""
        found = torch.stack([value.double() for value in values])
        if self.sharded:
            dist.all_reduce(found)
        return (found / self.ranks).tolist()

    def save(self) -> None:
        """Saves a checkpoint of the finished step, with the position in the text."""
        extra = {"position": self.position}
        bfp.save_checkpoint(self.checkpoints, self.model, self.optimizer, step=self.step, keep=1, extra=extra)

    def run(self) -> bool:
        """Trains to the end, or until the session's time is up; returns whether the run is finished."""
        options, per_step, losses, sqnr = self.options, self.batch * self.size.context, [], {}
        first_line, stopping = True, False
        clock, timed_from = time.perf_counter(), self.step
        while self.step < self.steps and not stopping:
            if options.observe_every and self.step % options.observe_every == 0:
                loss, norm, sqnr = self.observed_step()
                clock, timed_from = time.perf_counter(), self.step
            else:
                loss, norm = self.train_step()
            losses.append(loss)
            if self.step % options.log_every and self.step < self.steps:
                continue
            time_is_up = self.stopped or time.monotonic() - self.began > 60 * options.minutes
            loss, stop = self.mean(torch.stack(losses).mean(), torch.tensor(float(time_is_up), device=self.device))
            line = {"step": self.step, "tokens": self.step * per_step, "loss": loss, "gradient_norm": _whole(norm)}
            line["tokens_per_second"] = (self.step - timed_from) * per_step / (time.perf_counter() - clock)
            if first_line or self.step == timed_from:
                # Kernels were compiled and memory was found.
                line["tokens_per_second"] = None
            line["mfu"] = self._mfu(line["tokens_per_second"])
            line["sqnr"] = sqnr
            if self._is_due(options.evaluate_every):
                rows = self.held_out_losses()
                line["held_out_loss"] = sum(rows) / len(rows)
                if self.step == self.steps:
                    line["held_out_rows"] = [round(row, 5) for row in rows]
            self._keep(line)
            stopping = stop > 0
            if self._is_due(options.save_every) or stopping:
                self.save()
            losses, sqnr, first_line = [], {}, False
            clock, timed_from = time.perf_counter(), self.step
        return self.step == self.steps

    def _is_due(self, every: int) -> bool:
        return self.step == self.steps or (bool(every) and self.step % every == 0)

    def _mfu(self, rate: float | None) -> float | None:
        """Returns the model's own operations as a share of the device's bfloat16 peak, in any recipe."""
        peak = pretrain_model.peak(self.device)
        return rate * pretrain_model.operations(self.size) / (peak * self.ranks) if rate and peak else None

    def _keep(self, line: dict) -> None:
        if self.rank == 0:
            self.metrics.add(line)
            if "held_out_loss" in line:
                lines = pretrain_metrics.read(self.metrics.path)
                pretrain_metrics.draw(self.options.folder / "plot.png", lines, f"{self.options.size}, {self.options.recipe}")
            shown = {"loss": ".4f", "held_out_loss": ".4f", "tokens_per_second": ",.0f", "mfu": ".1%"}
            found = [
                f"{name.replace('_', ' ')} {line[name]:{how}}" for name, how in shown.items() if line.get(name) is not None
            ]
            print(f"step {self.step} of {self.steps}: {', '.join(found)}", flush=True)


def _whole(norm: torch.Tensor) -> float:
    """Returns the gradients' norm over all ranks; all of them must call it."""
    return float(norm.full_tensor() if isinstance(norm, torch.distributed.tensor.DTensor) else norm)


def _processor() -> str:
    """Returns the processor's name, if the system reports it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor() or "CPU"


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses a command line, by default this program's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the run's folder; an existing run is continued")
    parser.add_argument(
        "--recipe",
        default="bf16",
        help="bf16, torchao, a recipe, or mxfp8_floor, mxfp6_floor, mxfp4_floor; +OPTION: pretrain_model.OPTIONS",
    )
    parser.add_argument("--size", choices=pretrain_model.SIZES, default="124m")
    parser.add_argument("--tokens", type=int, default=100_000_000, help="tokens of the whole run; a byte is a token")
    parser.add_argument("--batch", type=int, help="pieces of text per step, over all ranks; default: the size's")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights and the order of the text")
    parser.add_argument("--clip", type=float, default=1.0, help="maximum norm of the gradients")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=device)
    parser.add_argument("--compile", action="store_true", help="compile each block")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="save and exit after this time")
    parser.add_argument(
        "--text", type=Path, help="folder of the prepared text, created if necessary; default: next to the run's folder"
    )
    parser.add_argument("--text-bytes", type=int, default=200_000_000, help="maximum bytes of training text")
    parser.add_argument(
        "--log-every", type=int, default=10, help="steps per line of metrics; evaluations and saves happen only then"
    )
    parser.add_argument("--observe-every", type=int, default=100, help="steps between SQNR measurements; 0: never")
    parser.add_argument("--evaluate-every", type=int, default=100, help="steps between held-out losses; 0: only at the end")
    parser.add_argument("--evaluate-rows", type=int, default=256, help="pieces of held-out text")
    parser.add_argument("--save-every", type=int, default=500, help="steps between checkpoints; 0: only at a session's end")
    options = parser.parse_args(arguments)
    for name in ("observe_every", "evaluate_every", "save_every"):
        if options.log_every < 1 or getattr(options, name) % options.log_every:
            parser.error(
                f"--{name.replace('_', '-')} must be a multiple of --log-every, which is 1 or more; "
                f"got {getattr(options, name)} and {options.log_every}"
            )
    options.folder.mkdir(parents=True, exist_ok=True)
    return options


def main() -> None:
    began, options = time.monotonic(), parsed()
    under_torchrun = "LOCAL_RANK" in os.environ
    if under_torchrun:
        if options.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    training = Training(options, began)
    signal.signal(signal.SIGTERM, training.stop)
    finished = training.run()
    if training.rank == 0:
        print("finished" if finished else f"step {training.step} of {training.steps} is saved: call again to go on", flush=True)
    if under_torchrun:
        # A gloo process that exits by itself now and then aborts while another still waits.
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
