"""Modules that training processes are better off without; the folder stands first on their PYTHONPATH."""
