"""Stacks: the dependency refs and versions of one image generation, as data."""

from __future__ import annotations

from dataclasses import dataclass, field

from recipes.params import load_facts


@dataclass
class Stack:
    """One generation of packages that agree with each other. Versions are exact; verl names its schema."""

    name: str = "???"
    title: str = "???"
    python: str = "???"
    verl: str = "???"
    packages: dict[str, str] = field(default_factory=dict)


def load(name: str) -> Stack:
    """Return the stack in params/stacks/`name`.yaml. Raises RecipeError when there is none."""
    return load_facts(Stack, "stacks", name)


def verl_version(name: str) -> str:
    """Return the verl version of a stack, such as 0.9.1; it names the configuration schema."""
    return load(name).verl
