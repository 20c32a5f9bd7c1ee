"""Replaces one attribute of a module or class, after checking that it is the one this code was written for."""

import inspect
from types import ModuleType
from typing import Any


class UnknownCode(RuntimeError):
    """What is to be replaced is missing or does not look as it did in the known versions.

    Not an ImportError on purpose: verl turns those into warnings and goes on without the engine.
    """


def expect(condition: bool, place: str, found: str, known: str) -> None:
    """Raise UnknownCode unless `condition` holds."""
    if not condition:
        raise UnknownCode(
            f"{place} is not as recipes.cpu knows it: found {found}, known is {known}. The CPU target changes this "
            "place, and a guess could train wrongly. Install the versions of the `cpu` extra, or leave "
            "recipes.cpu.adaptor out of VERL_USE_EXTERNAL_MODULES."
        )


def expect_attribute(owner: ModuleType | type, name: str) -> str:
    """Full name of attribute `name` of a module or class; UnknownCode when it is not there."""
    path = owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
    expect(hasattr(owner, name), f"{path}.{name}", "no such attribute", "present")
    return f"{path}.{name}"


def replace(owner: ModuleType | type, name: str, new: Any, parameters: str | None = None) -> Any:
    """Set `owner.name = new` and return the old value.

    `parameters` lists the names a known callable takes, separated by spaces; None when `owner.name` is not a plain
    Python function. Raises UnknownCode when the attribute is missing or its parameters differ.
    """
    place = expect_attribute(owner, name)
    old = getattr(owner, name)
    if parameters is not None:
        found = " ".join(inspect.signature(old).parameters)
        expect(found == parameters, f"The signature of {place}", f"({found})", f"({parameters})")
    setattr(owner, name, new)
    return old
