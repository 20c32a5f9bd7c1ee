"""Started by Ray in place of Python: has `fork_server` fork a worker, and lives as long as that worker does.

Ray starts a worker in two steps: setup_worker.py reads the runtime environment and then becomes the interpreter that
this environment names. Here the same script is both, for reading two arguments takes Ray's own half a second of
imports for every worker. Whatever is not as `fork_server` asked for is left to Ray's own scripts and interpreter.

A script on its own, of the standard library alone: importing `recipes` takes longer than all it does.
"""

import sys

SETS_UP = not sys.flags.isolated
"""Ray starts a script that sets up without flags; `fork_server` names an interpreter with -I."""

if SETS_UP:
    del sys.path[0]  # this folder has a module `platform`, which is none of those that follow

import json  # noqa: E402
import os  # noqa: E402
import socket  # noqa: E402
from typing import NoReturn  # noqa: E402

CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="


def main() -> None:
    words = sys.argv[1:]
    if SETS_UP:
        words = set_up(words)
    flags = [word for word in words if word in ("-s", "-S")]  # Ray puts its own interpreter's in front of the script
    script = words[len(flags) :]
    request = {"argv": script, "environment": dict(os.environ), "folder": os.getcwd()}  # noqa: PTH109  pathlib takes longer to import than all of this
    try:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect("\0" + os.environ["RECIPES_CPU_FORK_ADDRESS"])
        data = json.dumps(request).encode()
        sent = socket.send_fds(connection, [data], [0, 1, 2])
        connection.sendall(data[sent:])
        connection.shutdown(socket.SHUT_WR)
    except (OSError, KeyError):
        become_python(words)
    # One byte says that the worker is there; without it the server was ended meanwhile, and so is its driver.
    if connection.recv(1):
        connection.recv(1)  # nothing more is ever sent: this returns when the worker has ended


def set_up(words: list[str]) -> list[str]:
    """Do what setup_worker.py (Ray 2.5x) does with its two arguments, and return the others."""
    context = json.loads(next((word[len(CONTEXT) :] for word in words if word.startswith(CONTEXT)), "") or "{}")
    given = context.get("env_vars") or {}
    asked = context.get("py_executable") == os.environ.get("RECIPES_CPU_FORK_CLIENT", "")
    if not asked or any(value for name, value in context.items() if name not in ("env_vars", "py_executable")):
        become_rays_own(words)
    if any("$" in value for value in given.values()):  # Ray expands these
        become_rays_own(words)
    os.environ.update(given)
    return [word for word in words if not word.startswith((CONTEXT, LANGUAGE))]


def become_rays_own(words: list[str]) -> NoReturn:
    """Be the script that this one stands in for: it lies beside the worker's, the first word that is no flag."""
    worker = next(word for word in words if not word.startswith("-"))
    become_python([os.path.join(os.path.dirname(worker), "setup_worker.py"), *words])  # noqa: PTH118, PTH120


def become_python(words: list[str]) -> NoReturn:
    os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    main()
