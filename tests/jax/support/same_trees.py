"""Comparison of JAX's trees by chex, of bits: it sees NaN, the sign of zero, formats, dtypes and shapes."""

import chex
import jax
import numpy as np
from samples import bits_of


def assert_same_tree(actual, expected):
    """Trees of the same structure, and so of the same formats, whose leaves have the same dtypes, shapes and bits."""
    chex.assert_trees_all_equal_structs(actual, expected)
    trees = [jax.tree.map(np.asarray, tree) for tree in (actual, expected)]
    chex.assert_trees_all_equal_shapes_and_dtypes(*trees)
    chex.assert_trees_all_equal(*(jax.tree.map(bits_of, tree) for tree in trees), strict=True)
