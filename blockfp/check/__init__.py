"""The parts of `blockfp check`: backends, their comparison, statistics, report and plot."""
