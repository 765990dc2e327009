"""Checkpoints of small models that tests export, and what they compare."""

import ml_dtypes
import numpy as np
import torch
from resumed import model_of, shard, train

from blockfp.files.modelfile import open_model
from blockfp.torch import AdamW, save_checkpoint

SHAPES = [(64, 128), (37, 128)]


def save(rank, folder, format, mesh="strided", dtype=torch.float32):
    """A checkpoint of `unsharded`, from a rank of a mesh."""
    model = shard(model_of(format, SHAPES, dtype=dtype), mesh)
    optimizer = AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, 0, 2)
    save_checkpoint(folder, model, optimizer, step=2)


def unsharded(format, dtype=torch.float32):
    """A model of two layers after two steps, and its optimizer."""
    model = model_of(format, SHAPES, dtype=dtype)
    optimizer = AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, 0, 2)
    return model, optimizer


def read(path):
    """A file's arrays by name."""
    return {tensor.name: tensor.read() for tensor in open_model(path).tensors}


def bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def numpy(tensor):
    """Also of bfloat16."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
