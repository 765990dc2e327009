"""`AdamW`, `Adam` and `Muon`: master weights, moments, and one step over all parameters; gradient clipping and `set_recipe`."""
