"""Times saving and loading a checkpoint of a transformer of about a billion parameters under FSDP2 and FSDP2 x TP.

    torchrun --nproc-per-node 4 benchmarks/checkpoint_gpu.py --folder /tmp/run --tp 2
    torchrun --nproc-per-node 2 benchmarks/checkpoint_gpu.py --folder /tmp/run --load

Reports seconds (of the slowest rank), gigabytes on disk, and how long a background save pauses training. The second command
loads the first one's checkpoint on another mesh, compares everything, and takes another step.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import time
from pathlib import Path

import ranks
import torch
import torch.distributed as dist
from blockfp.torch_backend.quantized_tensor import sharding
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import blockfp.torch as bfp


def build(options: argparse.Namespace, device: torch.device) -> tuple[nn.ModuleList, torch.optim.Optimizer]:
    """Builds a sharded model without values on the device, and its optimizer."""
    with torch.device("meta"):
        layers = (
            bfp.TransformerLayer(options.width, 4 * options.width, options.width // 128, recipe=options.recipe)
            for _ in range(options.layers)
        )
        model = nn.ModuleList(layers)
    world = dist.get_world_size()
    mesh = init_device_mesh(device.type, (world // options.tp, options.tp), mesh_dim_names=("fsdp", "tp"))
    for layer in model:
        if options.tp > 1:
            bfp.parallelize(layer, mesh["tp"])
        fully_shard(layer, mesh=mesh["fsdp"])
    model.to_empty(device=device)
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model, bfp.AdamW(model.parameters(), lr=1e-4)


def step(model: nn.ModuleList, optimizer: torch.optim.Optimizer, options: argparse.Namespace, device: torch.device) -> None:
    """Runs one training step; ranks that share a tensor get the same tokens."""
    torch.manual_seed(dist.get_rank() // options.tp)
    x = torch.randn(1, options.tokens, options.width, device=device)
    for layer in model:
        x = layer(x)
    x.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def fingerprint(model: nn.ModuleList, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Returns a sum over the bits of each parameter's codes, master and moments, equal on every mesh."""
    sums = {}
    for name, param in model.named_parameters():
        local = sharding.local_of(param)
        codes = local.codes if isinstance(local, bfp.QuantizedTensor) else local.detach()
        held = [codes, *(value for name, value in optimizer.state[param].items() if name != "step")]
        total = torch.stack([part.contiguous().view(torch.uint8).sum(dtype=torch.int64) for part in held]).sum()
        placements = getattr(param, "placements", ())
        for axis, placement in enumerate(placements):
            if not placement.is_replicate():
                dist.all_reduce(total, group=param.device_mesh.get_group(axis))
        sums[name] = int(total)
    return sums


def timed(action) -> float:
    """Returns the seconds until every rank is done."""
    dist.barrier()
    begin = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - begin


def save(model, optimizer, options) -> dict[str, float]:
    """Saves twice: blocking, and in the background."""
    extra = {"fingerprint": json.dumps(fingerprint(model, optimizer))}
    result = {"save_s": timed(lambda: bfp.save_checkpoint(options.folder, model, optimizer, step=1, extra=extra, keep=1))}
    saving = []
    result["async_stops_for_s"] = timed(
        lambda: saving.append(bfp.save_checkpoint(options.folder, model, optimizer, step=2, extra=extra, keep=1, wait=False))
    )
    result["async_whole_after_s"] = timed(lambda: saving[0].wait()) + result["async_stops_for_s"]
    result["gigabytes"] = sum(path.stat().st_size for path in saving[0].path.iterdir()) / 1e9
    return result


def load(model, optimizer, options) -> dict[str, float]:
    """Loads, and raises if anything differs from what was saved."""
    loaded = []
    seconds = timed(lambda: loaded.append(bfp.load_checkpoint(options.folder, model, optimizer)))
    saved, now = json.loads(loaded[0].extra["fingerprint"]), fingerprint(model, optimizer)
    different = [name for name in saved if saved[name] != now[name]]
    if different or saved.keys() != now.keys():
        raise SystemExit(f"not what was saved: {', '.join(different)}")
    return {"load_s": seconds, "equal_parameters": len(saved)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--recipe", default="mxfp8")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks; FSDP has the others")
    parser.add_argument("--load", action="store_true", help="load the checkpoint of an earlier run")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the JSON file")
    options = parser.parse_args()
    device = ranks.start()
    if not options.load and dist.get_rank() == 0:
        shutil.rmtree(options.folder, ignore_errors=True)
    built = []
    row = {"build_s": timed(lambda: built.append(build(options, device)))}
    ((model, optimizer),) = built
    if not options.load:
        row["step_s"] = timed(lambda: step(model, optimizer, options, device))
        row |= save(model, optimizer, options)
    row |= load(model, optimizer, options)
    step(model, optimizer, options, device)
    world = dist.get_world_size()
    row = {name: round(value, 2) for name, value in row.items()}
    about = {
        "recipe": options.recipe,
        "parameters": sum(param.numel() for param in model.parameters()),
        "mesh": f"fsdp={world // options.tp} x tp={options.tp}",
    }
    if dist.get_rank() == 0:
        print(about | row, flush=True)
    date = datetime.datetime.now(datetime.UTC).date()
    ranks.report(options.out / f"checkpoint-{'load-' if options.load else ''}{world}-gpus-{date}.json", [row], **about)
    ranks.finish()


if __name__ == "__main__":
    main()
