"""Rules on the training interpreter: its verl, and the modules verl will import."""

from __future__ import annotations

import functools
import json
import os
import subprocess

from recipes import verl_schema
from recipes.command import external_modules
from recipes.errors import RecipeError
from recipes.finding import Finding
from recipes.preflight.rules import Subject, rule, warning
from recipes.stack import verl_version

# A probe finds modules without importing them: some take seconds and some start devices.
_PROBE = """
import importlib.util as u, json, sys
def found(name):
    try: return u.find_spec(name) is not None
    except (ImportError, ValueError): return False
print(json.dumps({name: found(name) for name in sys.argv[1:]}))
"""
PROBE_SECONDS = 60


@rule("software.verl", noticed="launch", source="the recipe's stack", here=True)
def verl_is_the_stack_s(s: Subject):
    wanted, found = verl_version(s.recipe.stack), verl_schema.interpreter(s.python).verl
    if found is None:
        yield (
            {"stack": s.recipe.stack, "python": s.python},
            f"verl {wanted} is not installed there.",
            "Install the stack, or name the interpreter that has it (--python, RECIPES_PYTHON).",
        )
    elif found != wanted:
        yield (
            {"stack": s.recipe.stack, "python": s.python},
            f"verl {found} is installed there; the stack and all checks here are for {wanted}.",
            "Install that version, or choose the stack that fits.",
        )


@rule("software.external_modules", noticed="import verl", source="verl 0.9.1, import_external_libs", here=True)
def external_modules_exist(s: Subject):
    try:
        found = probe(s.python, external_modules(s.composed, os.environ))
    except RecipeError as fault:
        yield _unseen(s, "software.external_modules", fault)
        return
    for name, there in found.items():
        if not there:
            yield (
                {"external_modules": name},
                f"{s.python} has no module {name}, so `import verl` would fail.",
                "Install it there, or take it off the list.",
            )


@rule("software.reward", noticed="first reward", source="verl 0.9.1, load_module", here=True)
def reward_function_exists(s: Subject):
    function = s.recipe.reward.function
    if not function:
        return
    if function.startswith("pkg://"):
        name = function.removeprefix("pkg://").replace("/", ".")
        try:
            there = probe(s.python, (name,))[name]
        except RecipeError as fault:
            yield _unseen(s, "software.reward", fault)
            return
        if not there:
            yield {"reward.function": function}, f"{s.python} has no module {name}.", "Install it there."
    elif not os.path.isfile(function):  # noqa: PTH113  (verl takes the text as it is)
        yield {"reward.function": function}, "there is no such file.", "Name the file or pkg://module."


def _unseen(s: Subject, name: str, fault: RecipeError) -> Finding:
    """A file system that is slow today is no reason to refuse a launch, and no reason to call it looked at."""
    return warning(name, {"python": s.python}, f"not looked at: {fault}", "")


@functools.lru_cache(maxsize=64)
def probe(python: str, names: tuple[str, ...]) -> dict[str, bool]:
    """Say for each module name whether `python` could find it. All False when the interpreter fails.

    Raises RecipeError when it cannot be started, or does not answer within PROBE_SECONDS.
    """
    if not names:
        return {}
    try:
        done = subprocess.run(
            [python, "-c", _PROBE, *names], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as fault:
        raise RecipeError(f"{python} did not find its modules within {PROBE_SECONDS} s.") from fault
    except OSError as fault:
        raise RecipeError(f"{python} cannot be started: {fault.strerror}.") from fault
    return json.loads(done.stdout) if done.returncode == 0 else dict.fromkeys(names, False)
