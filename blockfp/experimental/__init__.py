"""Experimental features, which may change or disappear in any release: `blockfp.experimental.torch` and `.jax`.

Each has a cost in every step, stated in its docstring, and a benefit that is not proven at scale.
"""
