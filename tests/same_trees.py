"""Comparison of JAX's trees by chex, of bits: it sees NaN, the sign of zero, formats, dtypes and shapes."""

import chex
import jax
import numpy as np
from samples import bits_of


def assert_same_tree(actual, expected):
    """Trees of the same structure, and so of the same formats, whose leaves have the same dtypes, shapes and bits."""
    chex.assert_trees_all_equal_structs(actual, expected)
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    bits = [jax.tree.map(lambda leaf: bits_of(np.asarray(leaf)), tree) for tree in (actual, expected)]
    chex.assert_trees_all_equal(*bits, strict=True)
