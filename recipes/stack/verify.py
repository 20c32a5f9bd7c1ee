"""Is what an interpreter has what the stack wants? Wanted, found and a verdict for each, without the network."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from recipes.errors import RecipeError
from recipes.stack import conflict, probe
from recipes.stack.table import Repository, Stack, wants

ASK_SECONDS = 120

# What each verdict means. Those in WRONG make the stack not the one that was wanted.
VERDICTS = {
    "same": "what the table wants",
    "missing": "not installed",
    "other_version": "another version",
    "other_commit": "another commit",
    "other_place": "Python imports it from somewhere else",
    "dirty": "tracked files were changed",
    "shallow": "its history was cut off, and its set-up reads it",
    "forbidden": "must not be installed",
    "untold": "the version fits; the commit cannot be told",
    "not_needed": "not installed, and not every run needs it",
}
WRONG = ("missing", "other_version", "other_commit", "other_place", "dirty", "shallow", "forbidden")


@dataclass(frozen=True)
class Checked:
    """One thing of the stack: what was wanted, what is there, the verdict and where the answer comes from."""

    name: str
    wanted: str
    found: str
    verdict: str
    why: str = ""
    place: str = ""

    @property
    def wrong(self) -> bool:
        return self.verdict in WRONG


def verify(stack: Stack, python: str, *, needs: tuple[str, ...] = ()) -> list[Checked]:
    """Compare what `python` has with `stack`. `needs` names optional repositories this machine must have.

    Raises RecipeError when the interpreter cannot be started, takes longer than ASK_SECONDS, or does not answer.
    """
    unknown = [name for name in needs if name not in stack.repositories]
    if unknown:
        raise RecipeError(f"Stack {stack.name} has no repository {', '.join(unknown)}.")
    return list(compare(stack, ask(stack, python), needs=needs))


def ask(stack: Stack, python: str) -> dict[str, Any]:
    """Return what `python` says of the stack's packages and modules (see `probe`). Nothing of them is imported."""
    distributions = sorted({*wants(stack), *stack.absent, *(r.distribution for r in _sources(stack) if r.distribution)})
    question = {"distributions": distributions, "modules": sorted({r.module for r in _sources(stack) if r.module})}
    try:
        # -P keeps the working directory off its path: a folder called vllm/ here is not what training imports.
        done = subprocess.run(
            [python, "-P", "-c", Path(probe.__file__).read_text(encoding="utf-8")],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ASK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise RecipeError(f"The interpreter {python!r} cannot be asked what it has installed: {fault}.") from fault
    answer = [line for line in done.stdout.splitlines() if line.startswith(probe.MARK)]
    if done.returncode != 0 or not answer:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RecipeError(
            f"The interpreter {python!r} did not say what it has installed (exit code {done.returncode}): {last}. "
            "It must be Python 3.11 or later."
        )
    return json.loads(answer[-1].removeprefix(probe.MARK))


def compare(stack: Stack, told: Mapping[str, Any], *, needs: tuple[str, ...] = ()) -> Iterator[Checked]:
    """Yield the comparison for Python, CANN, each package, each repository and what must be absent, in this order."""
    yield _python(stack, told)
    if stack.cann:
        yield _cann(stack, told["cann"])
    for name, wanted in stack.packages.items():
        yield _package(name, wanted, told["distributions"][name])
    for name in (n for n in stack.order if n in stack.repositories):
        yield _repository(stack.repositories[name], told, needed=name in needs)
    for name, why in stack.absent.items():
        found = told["distributions"][name]
        if found:
            yield Checked(name, "absent", found["version"], "forbidden", why, found["place"])
        else:
            yield Checked(name, "absent", "absent", "same")


def as_json(stack: Stack, python: str, checked: list[Checked]) -> dict[str, Any]:
    """Return the result as plain data: stack, python, whether it is all as wanted, and one entry a thing."""
    rows = [asdict(one) for one in checked]
    return {"stack": stack.name, "python": python, "same": not any(one.wrong for one in checked), "checked": rows}


def _sources(stack: Stack) -> list[Repository]:
    return list(stack.repositories.values())


def _python(stack: Stack, told: Mapping[str, Any]) -> Checked:
    found = told["python"]
    fits = found == stack.python or found.startswith(f"{stack.python}.")
    return Checked("python", stack.python, found, "same" if fits else "other_version", "", told["executable"])


def _cann(stack: Stack, found: Mapping[str, str] | None) -> Checked:
    if found is None:
        why = "no ASCEND_TOOLKIT_HOME with a version file: source CANN's set_env.sh first"
        return Checked("CANN", stack.cann, "", "missing", why)
    same = found["version"] == stack.cann or found["version"].startswith(f"{stack.cann}.")
    return Checked("CANN", stack.cann, found["version"], "same" if same else "other_version", "", found["place"])


def _package(name: str, wanted: str, found: Mapping[str, Any] | None) -> Checked:
    if not found:
        return Checked(name, wanted, "", "missing")
    verdict = "same" if conflict.admits(wanted, found["version"]) else "other_version"
    return Checked(name, wanted, found["version"], verdict, "", found["place"])


def _repository(r: Repository, told: Mapping[str, Any], *, needed: bool) -> Checked:
    package = told["distributions"].get(r.distribution) if r.distribution else None
    place = told["modules"].get(r.module) if r.module else None
    wanted = f"{r.version or r.ref} from the index" if r.install == "wheel" else _named(r)
    if not package and not place:
        if r.optional and not needed:
            return Checked(r.name, wanted, "", "not_needed", f"only for: {r.optional}")
        return Checked(r.name, wanted, "", "missing", r.why)
    checkout = told["checkouts"].get(r.module) or told["checkouts"].get(f"editable:{r.distribution}")
    version = package["version"] if package else ""
    found, where = version, place or (package["place"] if package else "")

    def result(verdict: str, why: str = "") -> Checked:
        return Checked(r.name, wanted, found, verdict, why, where)

    editable = package["editable"] if package else ""
    if editable and place and not _inside(place, editable):
        found = f"{version} editable in {editable}"
        return result("other_place", f"{r.module} is imported from {place}, which comes earlier on its path")
    direct = package["direct_url"].get("vcs_info", {}).get("commit_id", "") if package else ""
    commit = direct or (checkout["commit"] if checkout else "")
    if commit:
        found = f"{version + ' ' if version else ''}{commit[:12]}{_called(checkout)}"
    if commit and r.commit and commit != r.commit:
        return result("other_commit", f"wanted {r.commit}, found {commit}")
    if checkout and not direct and checkout["dirty"]:
        shown = ", ".join(checkout["dirty"][:3])
        more = len(checkout["dirty"]) - 3
        return result("dirty", f"changed: {shown}{f' and {more} more' if more > 0 else ''}")
    if checkout and not direct and r.depth == "full" and checkout["shallow"]:
        return result("shallow", "git fetch --unshallow in its checkout")
    if version and r.version and not commit and not _same_version(r.version, version):
        return result("other_version")
    if commit and r.commit:
        return result("same")
    if r.install == "wheel" and version and not commit:
        return result("same")
    return result("untold", "not a git checkout, and no direct_url.json names the commit it was built from")


def _named(r: Repository) -> str:
    return r.commit[:12] if r.kind == "commit" else f"{r.commit[:12]} ({r.kind} {r.ref})"


def _called(checkout: Mapping[str, Any] | None) -> str:
    if not checkout:
        return ""
    names = [f"tag {tag}" for tag in checkout["tags"]]
    if checkout["branch"]:
        names.append(f"branch {checkout['branch']}")
    return f" ({', '.join(names)})" if names else ""


def _inside(place: str, folder: str) -> bool:
    return Path(place).resolve().is_relative_to(Path(folder).resolve())


def _same_version(wanted: str, found: str) -> bool:
    try:
        return Version(found).public == Version(wanted).public
    except InvalidVersion:
        return False
