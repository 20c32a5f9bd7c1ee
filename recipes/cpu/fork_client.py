"""Started by Ray in place of Python: has `fork_server` fork a worker, and lives as long as that worker does.

A script on its own, of the standard library alone: it is started once a worker, and importing `recipes` takes longer
than all it does. Where the server cannot be reached, it becomes the interpreter Ray would have started.
"""

import json
import os
import socket
import sys


def main() -> None:
    words = sys.argv[1:]
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
        os.execv(sys.executable, [sys.executable, *words])
    # One byte says that the worker is there; without it the server was ended meanwhile, and so is its driver.
    if connection.recv(1):
        connection.recv(1)  # nothing more is ever sent: this returns when the worker has ended


if __name__ == "__main__":
    main()
