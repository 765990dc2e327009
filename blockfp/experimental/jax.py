"""Experiments in JAX: OsciReset."""

from ..jax_backend.params.osci_reset import OsciResetState, osci_reset
from ..recipes import OsciReset

__all__ = ["OsciReset", "OsciResetState", "osci_reset"]

for _public in (OsciResetState, osci_reset):
    _public.__module__ = __name__
