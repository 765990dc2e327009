"""Training of a small Llama-like model on meshes of dp x tp ranks: losses, gradient norms and final weights."""

import threaded
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.recipes import HIGH_PRECISION

VALUES = recipes.mxfp8().replace(name="values", input=HIGH_PRECISION, weight=HIGH_PRECISION, gradient=HIGH_PRECISION)
RECIPES = {name: (name, None) for name in ("mxfp8", "fp8_block", "fp8_current", "nvfp4")}
RECIPES |= {"bf16": (VALUES, torch.bfloat16)}
"""Recipes, and the dtype of the parameters."""

UNITS, SPLITS, TOKENS, WORDS = 4, 2, 32, 64


class Llama(nn.Module):
    """The mean loss of each next word."""

    def __init__(self, recipe, width=256, hidden=256, layers=1, key_value_heads=2, dtype=None):
        super().__init__()
        how = {"norm": "rms_norm", "activation": "swiglu", "bias": False, "key_value_heads": key_value_heads, "dtype": dtype}
        self.embedding = nn.Embedding(WORDS, width, dtype=dtype)
        self.blocks = nn.Sequential(*(bfp.TransformerLayer(width, hidden, 4, recipe=recipe, **how) for _ in range(layers)))
        self.norm = nn.RMSNorm(width, dtype=dtype)
        self.head = nn.Linear(width, WORDS, bias=False, dtype=dtype)

    def forward(self, rows):
        logits = self.head(self.norm(self.blocks(self.embedding(rows[:, :-1]))))
        return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def rows_of(step, unit):
    """The one sequence of a unit."""
    generator = torch.Generator().manual_seed(1000 * step + unit)
    return torch.randint(WORDS, (1, TOKENS + 1), generator=generator)


def model_on(mesh, name, *, splits=SPLITS, policy=None, **sizes):
    """The model that every mesh begins with, cut and sharded."""
    recipe, dtype = RECIPES[name]
    model = Llama(recipe, dtype=dtype, **sizes)
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(p.shape, generator=generator).to(p.dtype) / 16 for name, p in model.named_parameters()}
    model.load_state_dict(values, strict=False)
    for module in model.modules():
        if getattr(module, "rng_key", None) is not None:
            # The first rank's is every rank's from the first gather on.
            module.rng_key.copy_(torch.tensor((3, 5 + dist.get_rank())))
    options = {} if policy is None else {"mp_policy": policy}
    if mesh is not None:
        if splits is not None or mesh["tp"].size() > 1:
            bfp.parallelize(model, mesh["tp"], splits=splits)
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"], **options)
        fully_shard(model, mesh=mesh["dp"], **options)
    return model


def train(rank, shape, name, *, first=0, last=3, load=None, save=None, mode=True, **options):
    """Trains from one step to another: ([loss], [norm], {name: whole tensor})."""
    mesh = None if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = model_on(mesh, name, **options)
    optimizer = bfp.AdamW(model.parameters(), lr=1e-2)
    if load is not None:
        assert bfp.load_checkpoint(load, model, optimizer).step == first
    dp = None if mesh is None else mesh["dp"]
    ranks, place = (1, 0) if dp is None else (dp.size(), dp.get_local_rank())
    run = bfp.Reproducible(model, UNITS, dp) if mode else None
    # Where ranks are threads, making a model draws from the generator of all of them.
    dist.barrier()
    losses, norms = [], []
    for step in range(first, last):
        if run is not None:
            loss = run.backward(lambda unit, step=step: model(rows_of(step, unit)))
        else:
            rows = torch.cat([rows_of(step, unit) for unit in range(UNITS)]).chunk(ranks)[place]
            loss = model(rows)
            loss.backward()
        losses.append(loss.detach().clone())
        norms.append(bfp.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    if save is not None:
        bfp.save_checkpoint(save, model, optimizer, step=last)
    return losses, norms, whole_state(model, optimizer)


def whole_state(model, optimizer):
    """Codes, scales and values of the whole model, and its master weights and moments."""
    found = dict(model.state_dict())
    names = [name for name, _ in model.named_parameters()]
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{names[number]} {kind}": value for kind, value in state.items()}
    return {name: whole(value) for name, value in found.items()}


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def on(shape, name, *, mode=True, **options):
    """What rank 0 of a mesh found; in the mode all ranks find the same."""
    ranks = 1 if shape is None else shape[0] * shape[1]
    results = threaded.run(ranks, lambda rank: train(rank, shape, name, mode=mode, **options))
    for result in results[1:] if mode else ():
        assert not (found := differences(results[0], result)), found
    return results[0]


def differences(a, b):
    """What of two runs differs in a bit: "loss 3", or the name of a tensor of the state."""
    found = []
    for kind, ours, theirs in (("loss", a[0], b[0]), ("norm", a[1], b[1])):
        found += [f"{kind} {i}" for i, (x, y) in enumerate(zip(ours, theirs, strict=True)) if bits(x) != bits(y)]
    assert a[2].keys() == b[2].keys()
    return found + [name for name, value in a[2].items() if bits(value) != bits(b[2][name])]


def bits(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
