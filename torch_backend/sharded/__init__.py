"""The executor of the core's plans: what a plan comes down to on this rank, shared amaxes, and the two halves of a gather."""
