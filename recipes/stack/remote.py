"""Asks a repository what its refs stand at (`git ls-remote`), with a deadline and without ever asking a question back.

Only names are looked up and nothing is fetched, so a whole stack takes as long as its slowest host.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from recipes.errors import RecipeError
from recipes.stack import refs
from recipes.stack.table import Repository, Stack

DEADLINE_SECONDS = 15.0
AT_ONCE = 8

# No prompt may open, whatever the user's git and ssh are set up to do; a host that stops sending is given up.
_QUIET = {
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ASKPASS": "true",
    "SSH_ASKPASS": "true",
    "SSH_ASKPASS_REQUIRE": "never",
    "GIT_SSH_COMMAND": "ssh -o BatchMode=yes -o ConnectTimeout=10",
    "GIT_ALLOW_PROTOCOL": "https:ssh:file",
    "GCM_INTERACTIVE": "never",
}


@dataclass(frozen=True)
class Remote:
    """What a repository says of one name: the commit of the tag (peeled) and of the branch, where there is one."""

    tag: str = ""
    branch: str = ""
    unreachable: str = ""  # why it could not be asked


@dataclass(frozen=True)
class Checked:
    """A ref of the table against its repository. `moved` branches still have their commit; a moved tag is a fault."""

    name: str
    verdict: str  # same, moved, moved_tag, other_kind, missing, unreachable, unasked
    found: str
    why: str

    @property
    def wrong(self) -> bool:
        return self.verdict in ("moved_tag", "other_kind", "missing")


def ask(url: str, ref: str, *, deadline: float = DEADLINE_SECONDS) -> Remote:
    """Ask `url` for the tag and the branch called `ref`, for at most `deadline` seconds.

    Raises RecipeError when `ref` is no name of a ref. A host that is not there is no error, but says so.
    """
    refs.check(ref, "ls-remote")
    if url.startswith("-"):
        raise RecipeError(f"{url!r} is no URL of a repository.")
    patterns = [f"refs/tags/{ref}", f"refs/tags/{ref}^{{}}", f"refs/heads/{ref}"]
    argv = ["git", "-c", "credential.helper=", "-c", "core.askPass=true", "ls-remote", "--", url, *patterns]
    try:
        # A group of its own: git starts git-remote-https, and both must end at the deadline.
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **_QUIET},
            start_new_session=True,
        )
    except OSError as fault:
        return Remote(unreachable=f"git cannot be started: {fault.strerror}")
    try:
        out, err = child.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return Remote(unreachable=f"no answer within {deadline:g} s")
    if child.returncode != 0:
        said = err.strip().splitlines()
        return Remote(unreachable=said[-1] if said else f"git ended with {child.returncode}")
    told = dict(reversed(line.split("\t", 1)) for line in out.splitlines() if "\t" in line)
    # An annotated tag is an object of its own; its ^{} is the commit it stands for.
    return Remote(tag=told.get(patterns[1]) or told.get(patterns[0], ""), branch=told.get(patterns[2], ""))


def check(repository: Repository, *, deadline: float = DEADLINE_SECONDS) -> Checked:
    """Compare one entry with what its repository says now."""
    name = repository.name
    if repository.kind == "commit":
        return Checked(name, "unasked", "", "a bare commit has no name to ask for")
    said = ask(repository.url, repository.ref, deadline=deadline)
    if said.unreachable:
        return Checked(name, "unreachable", "", said.unreachable)
    mine, other = (said.tag, said.branch) if repository.kind == "tag" else (said.branch, said.tag)
    other_kind = "branch" if repository.kind == "tag" else "tag"
    if not mine and other:
        return Checked(name, "other_kind", other, f"{repository.ref} is a {other_kind} there, not a {repository.kind}")
    if not mine:
        return Checked(name, "missing", "", f"there is no {repository.kind} {repository.ref} in {repository.url}")
    if not repository.commit or mine == repository.commit:
        return Checked(name, "same", mine, "" if repository.commit else "the table has no commit to compare with")
    if repository.kind == "tag":
        return Checked(name, "moved_tag", mine, f"the tag was set again; the table has {repository.commit}")
    return Checked(name, "moved", mine, f"the branch went on; the table pins {repository.commit}")


def check_all(stack: Stack, *, deadline: float = DEADLINE_SECONDS) -> Mapping[str, Checked]:
    """Compare every entry of a stack with its repository, several at once; name → result, in the table's order."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = pool.map(lambda r: check(r, deadline=deadline), stack.repositories.values())
        return {checked.name: checked for checked in found}
