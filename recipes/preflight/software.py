"""Rules on the training interpreter: its verl, and the modules verl will import."""

from __future__ import annotations

import functools
import json
import os
import subprocess

from recipes import verl_schema
from recipes.command import external_modules
from recipes.preflight.rules import Subject, rule
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
    modules = external_modules(s.composed, os.environ)
    for name, there in probe(s.python, modules).items():
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
        if not probe(s.python, (name,))[name]:
            yield {"reward.function": function}, f"{s.python} has no module {name}.", "Install it there."
    elif not os.path.isfile(function):  # noqa: PTH113  (verl takes the text as it is)
        yield {"reward.function": function}, "there is no such file.", "Name the file or pkg://module."


@functools.lru_cache(maxsize=64)
def probe(python: str, names: tuple[str, ...]) -> dict[str, bool]:
    """Say for each module name whether `python` could find it. All False when the interpreter does not answer."""
    if not names:
        return {}
    done = subprocess.run(
        [python, "-c", _PROBE, *names], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
    )
    return json.loads(done.stdout) if done.returncode == 0 else dict.fromkeys(names, False)
