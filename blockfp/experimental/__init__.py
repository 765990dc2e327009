"""What may change or go in any release: `blockfp.experimental.torch` and `blockfp.experimental.jax`.

Each costs something on every step, which its docstring names, for a gain that is not proven at scale.
"""
