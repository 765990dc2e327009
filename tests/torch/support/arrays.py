"""Tensors to try things on; NumPy arrays as tensors and back, bit for bit."""

import io

import ml_dtypes
import numpy as np
import torch


def to_torch(x, device="cpu"):
    """A tensor of an array's memory, or of a copy on another device; None is None."""
    if x is None:
        return None
    x = np.ascontiguousarray(x) if device != "cpu" else np.asarray(x)
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(x).to(device)


def to_numpy(x):
    """An array of a tensor's memory, or of a copy of what lies on another device; None is None."""
    if x is None:
        return None
    x = x.detach().cpu().contiguous()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def values(shape, seed=0, dtype=torch.float32, scale=1.0, device="cpu"):
    """Gaussian values, the same ones for a seed on any device, rounded to the dtype."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(device, dtype)


def tensors_of(q):
    """Codes, scales and tensor scale, where there is one."""
    return [part for part in (q.codes, q.scales, q.tensor_scale) if part is not None]


def with_scales(model):
    """Gives the layers of a model scales of delayed scaling, as after a first step, and returns it."""
    state = model.state_dict()
    scales = [name for name in state if name.endswith(("input_scale", "gradient_scale"))]
    model.load_state_dict({name: torch.full_like(state[name], 1.0) for name in scales}, strict=False)
    return model


def through_a_file(x, **options):
    """What torch.load makes of what torch.save writes."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, **options)
