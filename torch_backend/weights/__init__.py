"""Weights as they are kept: loaded, requantized in place on every rank alike, cast when gathered, and shown in state dicts."""
