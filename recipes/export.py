"""Command → shell recipe: one readable script that launches what the workbook launches, argument by argument."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from recipes import __version__, params
from recipes.command import EXTERNAL_MODULES, Command, build

# Stand for the places a script finds at run time. They go into the command as ordinary paths and come out as variables.
WORK, RUN = "/__WORK__", "/__RUN_DIR__"


def script(
    name: str, overrides: Sequence[str] = (), parameters: Mapping[str, Any] | None = None, *, python: str
) -> str:
    """Return the shell recipe of `name`. `python` is asked for its verl now; the script runs its own, from PYTHON.

    Raises RecipeError as `params.compose` and `command.build` do.
    """
    composed = params.compose(name, overrides, parameters, run_dir=RUN, work=WORK)
    command = build(composed, python=python, environment={})
    modules = command.environment.get(EXTERNAL_MODULES, "")
    variables = {k: v for k, v in sorted(command.environment.items()) if k != EXTERNAL_MODULES}
    parts = [
        _header(composed, command),
        _PLACES.format(folder=composed.recipe.recipe.replace("/", "-")),
        "# ---- environment ----\n" + "".join(f"export {k}={_word(v)}\n" for k, v in variables.items()),
        _MODULES.format(name=EXTERNAL_MODULES, modules=shlex.quote(modules)) if modules else "",
        _arguments(command, modules),
        _PRINT.format(names=" ".join([*variables, *([EXTERNAL_MODULES] if modules else [])])),
        _prepare(composed.recipe.prepare),
        _LAUNCH,
    ]
    return "\n".join(part.strip("\n") + "\n" for part in parts if part)


def file_name(name: str) -> str:
    """Return the file name of a recipe's script in recipes/shell: glm5_2/x → glm5_2-x.sh."""
    return name.replace("/", "-") + ".sh"


def _header(composed: params.Composed, command: Command) -> str:
    recipe = composed.recipe
    notes = "".join(f"# Note: {note}\n" for note in recipe.notes)
    facts = params.hardware_facts(recipe.hardware)
    if facts.device == "npu" and (recipe.nodes > 1 or recipe.mode == "fully_async"):
        count = recipe.devices or facts.devices_per_node
        notes += _SEVERAL_NODES.format(count=count)
    changed = [s for s in params.difference(composed) if s.origin.startswith(("override", "parameter"))]
    notes += "".join(f"# Changed here: {s.key}={s.value!r}\n" for s in changed)
    return (
        "#!/usr/bin/env bash\n"
        f"# {recipe.recipe}: {recipe.title}\n"
        f"# verl {command.verl}, stack {recipe.stack}, {recipe.nodes} node(s) of {recipe.hardware}.\n"
        f"# Written by `recipes export {recipe.recipe}`, workbook {__version__}. Do not edit: change the recipe.\n"
        "# --print as the first argument shows what would run. All other arguments are Hydra overrides and come last.\n"
        f"{notes}set -euo pipefail"
    )


_SEVERAL_NODES = """# Several nodes: export the environment below on each, then start Ray, on the head node
#   ray start --head --resources='{{"NPU": {count}}}'
# and on every other node
#   ray start --address=HEAD:6379 --resources='{{"NPU": {count}}}'
# with the same versions and paths everywhere; HCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name each node's own interface.
# When `ray status` shows all devices, run this on the head node.
"""

_PLACES = r"""
# ---- places: set these variables to change them ----
PYTHON="${{PYTHON:-python3}}"
RECIPES_WORK="${{RECIPES_WORK:-$PWD/work}}"
RUN_DIR="${{RUN_DIR:-$PWD/runs/{folder}/$(date +%Y%m%d-%H%M%S)}}"
# The same within Hydra's single quotes.
work="${{RECIPES_WORK//\'/\\\'}}"
run_dir="${{RUN_DIR//\'/\\\'}}"
"""

# What the image or the user has named already comes first. A blank or a duplicate would break `import verl`.
_MODULES = """
# Modules verl imports first: those already named, then the recipe's; no blanks, no duplicates.
modules=""
IFS=, read -ra named <<<"${{{name}:-}},"{modules}
for module in "${{named[@]}}"; do
  module="${{module//[[:space:]]/}}"
  [ -n "$module" ] || continue
  case ",$modules," in *",$module,"*) ;; *) modules="${{modules:+$modules,}}$module" ;; esac
done
export {name}="$modules"
"""

_PRINT = """
if [ "${{1:-}}" = --print ]; then
  shift
  for name in {names}; do printf '%s=%q\\n' "$name" "${{!name}}"; done
  printf '%q ' "${{command[@]}}" "$@"
  echo
  exit 0
fi
"""

_LAUNCH = """
mkdir -p "$RUN_DIR/attempts/1"
exec "${command[@]}" "$@"
"""


def _arguments(command: Command, modules: str) -> str:
    lines = ["# ---- the run ----", f'command=("$PYTHON" -u -m {command.entry})']
    for title, overrides in command.groups:
        lines += [f"# {title}", "command+=("]
        lines += [f"  {_override(text, modules)}" for text in overrides]
        lines += [")"]
    return "\n".join(lines)


def _prepare(words: Sequence[str]) -> str:
    if not words:
        return ""
    return '# Makes the model and the data here, unless they are there.\n"$PYTHON" -m ' + " ".join(map(_word, words))


def _override(text: str, modules: str) -> str:
    key = text.partition("=")[0]
    if modules and key.endswith(f".{EXTERNAL_MODULES}"):
        return f"\"{key}='${EXTERNAL_MODULES}'\""
    return _word(text, work="$work", run="$run_dir")


def _word(text: str, *, work: str = "$RECIPES_WORK", run: str = "$RUN_DIR") -> str:
    """Quote one shell word, with the places as variables."""
    if not any(mark in text for mark in (WORK, RUN, "'")):
        return shlex.quote(text)
    for special in '\\"`$':
        text = text.replace(special, "\\" + special)
    return '"' + text.replace(WORK, work).replace(RUN, run) + '"'
