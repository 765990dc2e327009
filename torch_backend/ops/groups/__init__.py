"""Casts and products of rows in groups."""
