"""The interpreter that trains: where its packages come from, whether they are the stack's, whether modules import."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from recipes.doctor import child
from recipes.doctor.lines import Line, Section, shown
from recipes.doctor.node import Node
from recipes.errors import RecipeError
from recipes.stack import verify as verifying

SECTION = Section("software")

# Packages a folder beside the launch, or a stale PYTHONPATH, hides most easily: all have checkouts of that name.
PACKAGES = ("verl", "megatron.core", "megatron.bridge", "mindspeed", "megatron_adaptor", "vllm", "vllm_ascend")
PACKAGES += ("torch", "torch_npu", "transformers", "ray")

LOCATE_SECONDS = 60
MARK = "recipes-doctor:"

# Runs inside the training interpreter, started as a run is: the working directory first on the path. Nothing is
# imported; parents are searched, so that a folder megatron/ which hides megatron.core is seen.
_LOCATE = """
import json, os, sys
here = os.path.realpath(os.getcwd())
real = lambda entry: os.path.realpath(entry or ".")
named = {real(e) for e in os.environ.get("PYTHONPATH", "").split(os.pathsep) if e}
whole = list(sys.path)
def locate(name, path):
    sys.path[:] = path
    sys.path_importer_cache.clear()
    parts, where, spec = name.split("."), None, None
    for depth in range(len(parts)):
        spec = None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            try:
                spec = find(".".join(parts[:depth + 1]), where) if find else None
            except (ImportError, AttributeError, KeyError, ValueError):
                spec = None
            if spec is not None:
                break
        if spec is None:
            return None
        locations = spec.submodule_search_locations
        where = list(locations) if locations is not None else None
        if where is None and depth + 1 < len(parts):
            return None
    if spec.origin and spec.origin not in ("built-in", "frozen", "namespace"):
        return spec.origin
    return where[0] if where else None
found = {}
for name in sys.argv[1:]:
    found[name] = [
        locate(name, whole),
        locate(name, [e for e in whole if real(e) != here]),
        locate(name, [e for e in whole if real(e) != here and real(e) not in named]),
    ]
print("MARK" + json.dumps({"here": here, "found": found}))
"""

# Each name is said before it is imported: after the deadline, the last one is what hung.
_IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    print("\\nMARK" + name, flush=True)
    importlib.import_module(name)
print("\\nMARK", flush=True)
"""


def look(node: Node, deadline: float) -> Iterator[Line]:
    """Yield what is to be said of the training interpreter. `deadline`: seconds its modules may take to import."""
    yield from _places(node)
    yield from _stack(node)
    yield from _modules(node, deadline)


# ------------------------------------------------------------------------------------------------------------ places


def locate(node: Node, names: Sequence[str]) -> Mapping[str, tuple[str | None, str | None, str | None]]:
    """Say for each module where the run would import it from: as it is, without the working directory, and without
    PYTHONPATH as well. Raises RecipeError when the interpreter does not answer."""
    ended = child.run(
        [node.python, "-c", _LOCATE.replace("MARK", MARK), *names],
        environment=node.environment,
        deadline=LOCATE_SECONDS,
        folder=node.folder,
    )
    told = [line for line in ended.output.splitlines() if line.startswith(MARK)]
    if ended.code != 0 or not told:
        why = f"it did not answer within {LOCATE_SECONDS} s" if ended.code is None else ended.last
        raise RecipeError(f"{node.python} cannot say where its modules are: {shown(why)}")
    return {name: tuple(places) for name, places in json.loads(told[-1].removeprefix(MARK))["found"].items()}


def _places(node: Node) -> Iterator[Line]:
    names = tuple(dict.fromkeys((*PACKAGES, *node.modules)))
    try:
        found = locate(node, names)
    except RecipeError as fault:
        yield SECTION.unseen("module paths", str(fault))
        return
    for name, (as_run, away, installed) in found.items():
        if as_run != away:
            hidden = f"hides the one in {away}" if away else "exists nowhere else, so another folder would not have it"
            yield SECTION.fault(
                f"path of {name}",
                {name: as_run or "not found"},
                f"it would come from the folder the run is launched from, which {hidden}.",
                "Launch from another folder, or rename what is there.",
                severity="error" if away else "warning",
                noticed="import, or never: other code trains than was installed",
                source="Python puts the working directory first (python -m)",
            )
        elif as_run != installed and installed is not None:
            yield SECTION.fault(
                f"path of {name}",
                {"PYTHONPATH": as_run or "not found"},
                f"it hides the {name} that is installed in {installed}.",
                "Take one of them away; the stack says which it wants.",
                severity="warning",
                noticed="never: other code trains than was installed",
                source="Python puts PYTHONPATH before installed packages",
            )
        elif as_run:
            yield SECTION.ok(f"path of {name}", as_run)
    absent = [name for name, places in found.items() if not any(places)]
    if absent:
        yield SECTION.unseen("path of others", f"{node.python} has no {', '.join(absent)}")


# ------------------------------------------------------------------------------------------------------------- stack


def _stack(node: Node) -> Iterator[Line]:
    if node.stack is None:
        yield SECTION.unseen("stack", "no recipe says which stack is wanted; `recipes stack verify` compares with one")
        return
    wanted_by_engine = tuple(
        name
        for name, repository in node.stack.repositories.items()
        if repository.optional == f"engine {node.subject.recipe.engine}"
    )
    try:
        checked = verifying.verify(node.stack, node.python, needs=wanted_by_engine)
    except RecipeError as fault:
        yield SECTION.unseen("stack", str(fault))
        return
    same = 0
    for one in checked:
        if one.name == "CANN":
            continue  # versions.py says more of it
        if one.wrong:
            found = one.found or "nothing"
            why = "" if one.verdict == "missing" else one.why.rstrip(".")
            yield SECTION.fault(
                f"stack {one.name}",
                {one.name: found},
                f"stack {node.stack.name} wants {one.wanted}: {verifying.VERDICTS[one.verdict]}"
                f"{f' ({why})' if why else ''}.",
                "See `recipes stack install`, or name the interpreter that has it (--python, RECIPES_PYTHON).",
                noticed="import, or never",
                source="the stack's table",
            )
        elif one.verdict == "untold":
            yield SECTION.unseen(f"stack {one.name}", f"{one.found or 'it is there, and'} tells no commit: {one.why}")
        else:
            same += 1
    yield SECTION.ok("stack", f"{same} of {len(checked)} as stack {node.stack.name} wants (nothing was imported)")


# ----------------------------------------------------------------------------------------------------------- modules


def _modules(node: Node, deadline: float) -> Iterator[Line]:
    if not node.modules:
        yield SECTION.ok("external modules", "the run names none")
        return
    yield from imports(node, node.modules, deadline)


def imports(node: Node, names: Sequence[str], deadline: float) -> Iterator[Line]:
    """Import modules in order in one child of the training interpreter, as verl does, for `deadline` seconds in all."""
    listed = ", ".join(names)
    try:
        ended = child.run(
            [node.python, "-c", _IMPORT.replace("MARK", MARK), *names],
            environment=node.environment,
            deadline=deadline,
            folder=node.folder,
        )
    except RecipeError as fault:
        yield SECTION.unseen("external modules", str(fault))
        return
    begun = [line.removeprefix(MARK) for line in ended.output.splitlines() if line.startswith(MARK)]
    if ended.code == 0 and begun and not begun[-1]:
        yield SECTION.ok("external modules", f"{listed}: imported in this order by {node.python}")
        return
    at = begun[-1] if begun else names[0]
    if ended.code is None:
        why = f"its import did not end within {deadline:g} s."
        remedy = "Import it by hand to see where it waits; allow it more with --deadline if it is only slow."
    else:
        why = f"importing it ended with: {shown(ended.last, 200).rstrip('.')}."
        remedy = "Install what it needs, or take it off external_modules."
    yield SECTION.fault(
        "external modules",
        {"external_modules": at},
        why,
        remedy,
        noticed="import verl, in every process of the run",
        source="verl 0.9.1, import_external_libs",
    )
