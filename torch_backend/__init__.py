"""The PyTorch backend. `blockfp.torch` exports its public names."""

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError("blockfp.torch needs PyTorch: pip install 'blockfp[torch]'", name="torch") from error

OLDEST = 2, 11

if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST:
    raise ImportError(f"blockfp.torch needs PyTorch {OLDEST[0]}.{OLDEST[1]} or later, got {torch.__version__}")

try:
    from . import torch_internals  # noqa: F401
except (AttributeError, ImportError) as error:
    raise ImportError(
        f"blockfp.torch uses private parts of PyTorch, and PyTorch {torch.__version__} has others ({error}): "
        "install a newer blockfp, or an older PyTorch"
    ) from error
