"""Adapters for other libraries; each is imported only by its user."""
