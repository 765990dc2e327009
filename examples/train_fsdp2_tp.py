"""Trains the byte-level transformer under FSDP2 x tensor parallelism with sequence parallelism and quantized weights.

    python examples/train_fsdp2_tp.py --recipe fp8_block          # four processes, on GPUs or on the CPU: FSDP 2 x TP 2

Embeddings and head are torch layers, sharded by torch; the blocks between them are blockfp's.
"""

import argparse
import os
import subprocess
import sys

import byte_text
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.progress import track
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import blockfp.torch as bfp

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--recipe", default="mxfp8")
parser.add_argument("--steps", type=int, default=100)
options, config = parser.parse_args(), byte_text.Config()
if "LOCAL_RANK" not in os.environ:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", __file__, *sys.argv[1:]]
    sys.exit(subprocess.call(run, env={"OMP_NUM_THREADS": "1", **os.environ}))


class Transformer(nn.Module):
    """Returns the loss of each next byte. Between embeddings and head, a rank has its part of every piece of text."""

    def __init__(self):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, config.width), nn.Embedding(config.context, config.width)
        sizes, how = (config.width, config.hidden, config.heads), {"recipe": options.recipe, "norm": "rms_norm", "bias": False}
        self.blocks = nn.Sequential(*(bfp.TransformerLayer(*sizes, **how) for _ in range(config.layers)))
        self.norm, self.head = nn.RMSNorm(config.width), nn.Linear(config.width, 256, bias=False)

    def forward(self, rows):
        places = torch.arange(config.context, device=rows.device).expand(len(rows), -1)
        x = self.blocks(self.embedding(rows[:, :-1]) + self.positions(places))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), rows[:, 1:].flatten())


cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]) // 2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = Transformer().to(device)
bfp.parallelize(model, mesh["tp"], sequence_parallel=True)
embed = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
parallelize_module(model, mesh["tp"], {"embedding": embed, "positions": embed, "head": head})
for block in model.blocks:
    fully_shard(block, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
optimizer = bfp.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)

text, _ = byte_text.read_text()
for step in track(range(options.steps), options.recipe, disable=dist.get_rank() != 0):
    rows = byte_text.batch(text, 16, config.context, seed=0, step=step)[mesh["dp"].get_local_rank() :: mesh["dp"].size()]
    optimizer.param_groups[0]["lr"] = byte_text.learning_rate(step, options.steps)
    loss = model(torch.from_numpy(rows).to(device, torch.int64))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 10 == 9:
        print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
dist.destroy_process_group()
