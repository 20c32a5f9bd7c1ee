"""Recipes for GRPO with verl and Megatron-Core: params → recipe → command → run → metrics → curves, verdict.

Importing this package is cheap and pulls in neither torch, verl nor ray; the training interpreter is a child process.
"""

__version__ = "0.1.0"
