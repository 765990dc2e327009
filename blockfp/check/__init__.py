"""The parts of `blockfp check`: backends, their comparison, figures, report and plot."""
