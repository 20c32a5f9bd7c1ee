"""A run: one directory, its state, and the processes that belong to it."""
