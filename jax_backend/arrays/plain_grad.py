"""What `jax.grad` says when it is asked for the gradient of codes.

`jax.grad` refuses integers before it calls anything of ours, in words that lead on to `allow_int`, which gives an empty
gradient. The one thing it does first is to flatten its argument, and so that is where a better answer can be given.
"""

from __future__ import annotations

import sys

_MESSAGE = (
    "jax.grad can't differentiate with respect to a QuantizedArray, whose codes are integers: use blockfp.jax.value_and_grad "
    "or blockfp.jax.grad, which give the gradient of the array that was quantized"
)


def refuse() -> None:
    """Raises TypeError where the caller flattens its array for `jax.grad` or `jax.value_and_grad`.

    Should JAX come to flatten elsewhere, its own TypeError stands.
    """
    # This function, the array's flatten, jax.tree_util's tree_leaves, and whoever called that.
    try:
        caller = sys._getframe(3)
    except ValueError:
        return
    if caller.f_code.co_name == "value_and_grad_f" and caller.f_globals.get("__name__") == "jax._src.api":
        raise TypeError(_MESSAGE)
