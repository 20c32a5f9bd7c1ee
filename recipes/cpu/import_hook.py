"""Runs a function before, after or around the import of a module, without importing that module now."""

import importlib.abc
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from importlib.machinery import ModuleSpec
from types import ModuleType

AfterImport = Callable[[ModuleType], None]
AroundImport = Callable[[], AbstractContextManager]

_after: dict[str, list[AfterImport]] = {}
_around: dict[str, list[AroundImport]] = {}
_registered: set[tuple[str, AfterImport]] = set()


def after(name: str) -> Callable[[AfterImport], AfterImport]:
    """Decorator: call the function with module `name` once it is imported; at once if it already is.

    The same function is registered once only: two parts of a process may both need a patch, and a patch of a patch is
    another one (a rollout server forked from a process that had patched GLM's rotary embedding once rotated it twice).
    """

    def register(function: AfterImport) -> AfterImport:
        if (name, function) in _registered:
            return function
        _registered.add((name, function))
        if name in sys.modules:
            function(sys.modules[name])
        else:
            _after.setdefault(name, []).append(function)
            _install()
        return function

    return register


def around(name: str) -> Callable[[AroundImport], AroundImport]:
    """Decorator: hold the function's context manager open while the body of module `name` runs.

    Raises RuntimeError when the module is imported already: its body has run, so it is too late.
    """

    def register(function: AroundImport) -> AroundImport:
        if name in sys.modules:
            raise RuntimeError(
                f"{name} was imported before recipes.cpu.adaptor, so what belongs around its import comes too late. "
                "Import verl first: it loads the modules named in VERL_USE_EXTERNAL_MODULES."
            )
        _around.setdefault(name, []).append(function)
        _install()
        return function

    return register


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find a module, and wraps its execution when something waits for it."""

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        if name not in _after and name not in _around:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                _wrap_execution(spec)
                return spec
        return None


_finder = _Finder()


def _install() -> None:
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _wrap_execution(spec: ModuleSpec) -> None:
    """Shadow `exec_module` on the loader of this one spec (each spec has a loader of its own)."""
    execute = spec.loader.exec_module

    def exec_module(module: ModuleType) -> None:
        with ExitStack() as stack:
            for function in _around.pop(module.__name__, ()):
                stack.enter_context(function())
            execute(module)
        for function in _after.pop(module.__name__, ()):
            function(module)

    spec.loader.exec_module = exec_module
