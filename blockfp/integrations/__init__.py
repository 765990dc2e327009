"""Adapters for other libraries; each is imported only by its users, together with its backend."""
