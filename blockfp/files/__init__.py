"""Model files and checkpoints: reading, writing, and the layouts of other libraries."""
