"""`AdamW` and `Adam`: master weights and moments, and the step over all parameters at once."""
