"""How many inputs of layers are cast."""

from unittest import mock

from blockfp.torch_backend.ops.layer import linear_ops


def casts_of(function, *arguments):
    """How many times a forward of dense layers casts an input in a call of a function, and what that returns."""
    count, planned = [], linear_ops.plan_of

    def plan(*known, **options):
        run = planned(*known, **options)
        return lambda *given: count.append(1) or run(*given)

    linear_ops._forwards.clear()
    with mock.patch.object(linear_ops, "plan_of", plan):
        result = function(*arguments)
    linear_ops._forwards.clear()
    return len(count), result
