"""Custom ops on plain tensors, the bottom of the backend: nothing here knows a sharding or a module."""
