"""What an interpreter has installed and from where. Runs INSIDE the training interpreter, which has no workbook.

Standard library only, Python 3.8 or later, nothing of the stack is imported: packages are found, not run. Reads
{"distributions": [...], "modules": [...]} as JSON on standard input; answers on standard output after MARK.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlparse

MARK = "recipes-stack-probe:"
GIT_SECONDS = 20
# Version=9.1.0, version=[V100R001:9.1.0] or toolkit_running_version=[9.1.0:CANN-9.1.0], by release of CANN.
CANN_VERSION = re.compile(r"(?im)^\s*(?:toolkit_\w+_version|version)\s*=\s*\[?(?:V\d+R\w+:)?v?(\d[\w.]*)")


def distribution(name):
    """Return version, place, direct_url.json (PEP 610) and editable folder of a distribution, or None."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    text = found.read_text("direct_url.json")
    try:
        direct = json.loads(text) if text else {}
    except ValueError:
        direct = {}
    url = urlparse(direct.get("url", ""))
    editable = url.scheme == "file" and direct.get("dir_info", {}).get("editable", False)
    return {
        "version": found.version,
        "place": str(found.locate_file("")),
        "direct_url": direct,
        "editable": unquote(url.path) if editable else "",
    }


def module(name):
    """Return the folder or file a module would be imported from, or None. Parents are searched, not imported."""
    parts, where, spec = name.split("."), None, None
    for depth in range(len(parts)):
        dotted = ".".join(parts[: depth + 1])
        spec = None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            try:
                spec = find(dotted, where) if find else None
            except (ImportError, AttributeError, KeyError, ValueError):
                spec = None
            if spec is not None:
                break
        if spec is None:
            return None
        where = list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else None
        if where is None and depth + 1 < len(parts):
            return None
    if spec.origin and spec.origin not in ("built-in", "frozen", "namespace"):
        origin = Path(spec.origin)
        return str(origin.parent if origin.name == "__init__.py" else origin)
    return where[0] if where else None


def git(folder, *arguments):
    """Return what git says in `folder`, or None when it cannot say. Reading only, and no hook of the folder runs."""
    argv = ["git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null"]
    environment = dict(os.environ, GIT_OPTIONAL_LOCKS="0", GIT_TERMINAL_PROMPT="0", LC_ALL="C")
    # Set by hooks and submodules; they would send git to another repository than the folder's.
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        environment.pop(name, None)
    try:
        done = subprocess.run(
            argv + ["-C", folder] + list(arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=GIT_SECONDS,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else None


def checkout(place):
    """Return commit, changed files and depth of the git checkout that holds `place`, or None outside of one."""
    folder = place if Path(place).is_dir() else str(Path(place).parent)
    root = git(folder, "rev-parse", "--show-toplevel")
    if not root:
        return None
    # A package inside somebody's checkout is not part of it when git does not track it (a .venv in a work tree).
    inside = str(Path(folder).resolve().relative_to(Path(root).resolve()))
    if inside != "." and not git(root, "ls-files", "--", inside):
        return None
    changed = git(root, "diff", "--no-ext-diff", "--name-only", "HEAD")
    return {
        "root": root,
        "commit": git(root, "rev-parse", "HEAD") or "",
        "branch": git(root, "symbolic-ref", "--short", "-q", "HEAD") or "",
        "tags": (git(root, "tag", "--points-at", "HEAD") or "").split(),
        "dirty": changed.splitlines() if changed else [],
        "shallow": git(root, "rev-parse", "--is-shallow-repository") == "true",
    }


def cann():
    """Return the CANN version the environment points at, or None. Its folder has a version.cfg or *.info file."""
    for variable in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH"):
        home = os.environ.get(variable)
        if not home:
            continue
        for name in ("version.cfg", "version.info", "ascend_toolkit_install.info"):
            try:
                found = CANN_VERSION.search(Path(home, name).read_text(encoding="utf-8", errors="replace"))
            except OSError:
                continue
            if found:
                return {"version": found.group(1), "place": str(Path(home, name))}
    return None


def main():
    asked = json.load(sys.stdin)
    modules, checkouts = {}, {}
    for name in asked["modules"]:
        place = module(name)
        modules[name] = place
        if place:
            checkouts[name] = checkout(place)
    distributions = {name: distribution(name) for name in asked["distributions"]}
    for name, found in distributions.items():
        if found and found["editable"]:
            checkouts["editable:" + name] = checkout(found["editable"])
    told = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "executable": sys.executable,
        "distributions": distributions,
        "modules": modules,
        "checkouts": checkouts,
        "cann": cann(),
    }
    print("\n" + MARK + json.dumps(told))


if __name__ == "__main__":
    main()
