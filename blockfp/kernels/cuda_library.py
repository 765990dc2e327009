"""The CUDA kernel library, loaded on first use and only where a CUDA device is.

`pip install` builds it where asked (`-Ccmake.define.BLOCKFP_CUDA=ON`); otherwise, where nvcc is, the first use builds it into
a cache whose key is the sources and the flags. Where there is a device and no library, a warning says why, once: the
definition's bits are the same, but it is many times slower. kernels/cuda/exports.cu says what the functions take.
"""

from __future__ import annotations

from pathlib import Path

from . import switch
from .cuda_build import device_count, find, find_or_build, where
from .library import Library, NothingToRunOn

_NO_DEVICE = "no CUDA device is here"
_FUNCTIONS = (
    *("amax", "amax_blocks", "record_amax", "quantize", "encode", "requantize", "dequantize", "product", "cublas_version"),
    *("transpose", "align", "fold_keys", "adamw", "adamw_codes", "addresses", "count_steps"),
    *("group_rows", "group_words", "group_columns", "quantize_groups", "sum_groups", "clear_groups"),
    *("quantize_aligned", "quantize_groups_aligned", "quantize_gated_aligned"),
    *("quantize_gated", "quantize_gradient", "activation", "activation_gradient"),
    *("newest_amaxes", "update_scales"),
)


def _find() -> Path:
    if device_count() == 0:
        raise NothingToRunOn(_NO_DEVICE)
    return find_or_build()


_cuda = Library("CUDA kernels", _find, _FUNCTIONS, loud=True)

available = _cuda.available
library = _cuda.get


def status() -> str:
    """Says in one line which library runs or would run, or why there is none. It loads and builds nothing."""
    if not switch.kernels_allowed():
        return _cuda.missing()
    if _cuda.loaded is not None:
        return str(_cuda.loaded.path)
    if _cuda.why_not or device_count() == 0:
        return _cuda.missing(_cuda.why_not or _NO_DEVICE)
    try:
        return str(find() or f"not built yet: their first use builds {where()}")
    except (OSError, RuntimeError) as error:
        return _cuda.missing(f"{type(error).__name__}: {error}")
