"""Stacks: the dependency refs and versions of one image generation, as data under params/stacks/."""

from recipes.stack.table import Conflict, Repository, Stack, load, names, verl_version, wants, warnings

__all__ = ["Conflict", "Repository", "Stack", "load", "names", "verl_version", "wants", "warnings"]
