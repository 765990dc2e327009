"""The parts of the `blockfp` command."""
