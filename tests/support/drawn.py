"""How Hypothesis draws in these tests: the same examples each time, however slow the machine is."""

from hypothesis import HealthCheck, settings


def examples(count=100):
    """Makes a test draw so many examples, which its name decides."""
    return settings(max_examples=count, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
