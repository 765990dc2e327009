"""Adapters for other libraries, by their names; each is imported only by its user, with the backend that it is for."""
