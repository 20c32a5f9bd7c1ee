"""Replaces one attribute of a module or class, after checking that it is the one this code was written for."""

import inspect
from typing import Any


class UnknownCode(RuntimeError):
    """What is to be replaced is missing or does not look as it did in the known versions.

    Not an ImportError on purpose: verl turns those into warnings and goes on without the engine.
    """


def where(owner: Any, name: str) -> str:
    return (
        f"{getattr(owner, '__module__', None) or owner.__name__}.{getattr(owner, '__qualname__', '')}.{name}".replace(
            "..", "."
        )
    )


def expect(condition: bool, place: str, found: str, known: str) -> None:
    """Raise UnknownCode unless `condition` holds."""
    if not condition:
        raise UnknownCode(
            f"{place} is not as recipes.cpu knows it: found {found}, known is {known}. The CPU target changes this "
            "place, and a guess could train wrongly. Install the versions of the `cpu` extra, or leave "
            "recipes.cpu.adaptor out of VERL_USE_EXTERNAL_MODULES."
        )


def replace(owner: Any, name: str, new: Any, parameters: str | None = None) -> Any:
    """Set `owner.name = new` and return the old value.

    `parameters` lists the names a known callable takes, separated by spaces; None when `owner.name` is not a plain
    Python function. Raises UnknownCode when the attribute is missing or its parameters differ.
    """
    place = where(owner, name)
    old = inspect.getattr_static(owner, name, None)
    expect(old is not None, place, "no such attribute", "present")
    old = getattr(owner, name)
    if parameters is not None:
        found = " ".join(inspect.signature(old).parameters)
        expect(found == parameters, f"The signature of {place}", f"({found})", f"({parameters})")
    setattr(owner, name, new)
    return old
