"""Ray's worker processes as forks of one process that has imported everything already.

A worker imports torch, transformers, Megatron and verl for fifteen seconds before it does anything, and a run starts
one worker after another: on a small machine that is a minute before the first step. Here the trainer's driver starts
one process that imports all of it while the driver is still busy with its own start, and Ray is told (`py_executable`
of its runtime environment) to start a worker through `fork_client`, which asks that process for a fork of itself.

The server ends with the driver, whatever becomes of it. A worker that cannot be had this way starts as it always did.
"""

import gc
import importlib
import json
import os
import runpy
import secrets
import selectors
import shlex
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import ModuleType

from recipes.cpu import cluster_job
from recipes.cpu.import_hook import after
from recipes.cpu.replace import expect, expect_attribute, replace

SWITCH = "RECIPES_CPU_FORK"
"""Environment variable: "1" starts workers as forks (params/cpu/base.yaml)."""

ADDRESS, CLIENT = "RECIPES_CPU_FORK_ADDRESS", "RECIPES_CPU_FORK_CLIENT"
"""Environment variables by which a worker's client finds the server, and knows that it is what was asked for; set by
the driver for its children."""

MODULES = (
    "ray._private.workers.default_worker",
    "verl.trainer.main_ppo",
    "verl.trainer.ppo.v1",
    "verl.workers.engine_workers",
    "verl.workers.engine.megatron",
    "verl.experimental.agent_loop",
    "verl.experimental.reward_loop",
    "recipes.cpu.rollout",
    "megatron.bridge",
)
"""What some worker of a run imports. One that is missing costs time, nothing else."""

FIRST_JOB = "01000000"
"""What Ray calls the first job of a cluster; `address: local` makes a cluster for this job alone."""

STDIO = (0, 1, 2)

NODE_SECONDS = 240.0
"""How long a node of Ray may take to start."""


def install() -> None:
    """In the driver of a trainer, start the server and have Ray use it; elsewhere, or on a cluster, do nothing."""
    if os.environ.get(SWITCH) != "1" or ADDRESS in os.environ or not _is_driver(sys.orig_argv) or cluster_job.is_one():
        return
    address = start()
    os.environ |= {ADDRESS: address, CLIENT: shlex.join(client_command())}
    after("ray")(start_workers_as_forks)
    after("ray._private.ray_constants")(set_workers_up_by_the_client)
    after("ray._private.services")(wait_for_a_slow_node)


def _is_driver(argv: list[str]) -> bool:
    """Whether the interpreter was started as `python … -m verl.<a trainer>`."""
    return "-m" in argv and argv.index("-m") + 1 < len(argv) and argv[argv.index("-m") + 1].startswith("verl.")


def start_workers_as_forks(ray: ModuleType) -> None:
    """ray.init takes the command that starts a worker from its runtime environment, and verl (run_ppo in
    verl.trainer.main_ppo) makes that environment itself. Name the client there, unless the run names an executable of
    its own, or joins a cluster whose nodes could not reach the server.
    """
    expect_attribute(ray, "init")
    known = ray.init

    @wraps(known)
    def init(*args, **kwargs):
        environment = kwargs.get("runtime_env")
        if kwargs.get("address") == "local" and isinstance(environment, dict) and not environment.get("py_executable"):
            kwargs["runtime_env"] = {**environment, "py_executable": shlex.join(client_command())}
        return known(*args, **kwargs)

    ray.init = init


def set_workers_up_by_the_client(constants: ModuleType) -> None:
    """Node.__init__ (ray._private.node) joins this name to a folder of Ray's, which leaves a whole path as it is."""
    known = replace(constants, "SETUP_WORKER_FILENAME", client_command()[-1])
    expect(known == "setup_worker.py", "ray._private.ray_constants.SETUP_WORKER_FILENAME", known, "setup_worker.py")


def wait_for_a_slow_node(services: ModuleType) -> None:
    """Node.__init__ (ray._private.node) gives a new node 30 s to be known, a number nobody can set: on two busy cores
    it takes longer. It asks get_node until then, so here get_node does not give up as soon.
    """

    @wraps(services.get_node)
    def get_node(gcs_address, node_id):
        limit = time.monotonic() + NODE_SECONDS
        while True:
            try:
                return known(gcs_address, node_id)
            except RuntimeError:
                if time.monotonic() > limit:
                    raise
                time.sleep(0.5)

    known = replace(services, "get_node", get_node, parameters="gcs_address node_id")


def client_command() -> list[str]:
    """The words in front of a worker's script; -I and -S, because the client needs the standard library only."""
    return [sys.executable, "-I", "-S", str(Path(__file__).with_name("fork_client.py"))]


def server_environment() -> dict[str, str]:
    """The driver's, with what Ray's C++ side reads once, when it is loaded, and would expect in a worker.

    The job is the first one of a new cluster. The process with whose end a worker ends is the driver in place of the
    raylet, whose number is not known yet and which ends with the driver.
    """
    return {**os.environ, "RAY_JOB_ID": FIRST_JOB, "RAY_RAYLET_PID": str(os.getpid())}


def start() -> str:
    """Start a server that ends with this process; returns its address, a name among Linux's abstract sockets."""
    address = f"recipes-fork-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{address}")
    listener.listen(64)
    server = subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import main; main()", str(listener.fileno())],
        stdin=subprocess.PIPE,
        pass_fds=[listener.fileno()],
        env=server_environment(),
        process_group=0,  # as Ray's processes: Ctrl-C in a terminal reaches the driver, which ends the rest
    )
    start.servers.append(server)  # keeps the pipe open for as long as the driver lives
    listener.close()
    return address


start.servers = []


def main() -> None:
    """The server: import, then fork for every request until the driver is gone."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    with fresh_actor_class_ids():
        preload(MODULES)
    if not forks_differ():
        print(f"{__name__}: two forks draw the same Ray IDs, so workers start the slow way.", file=sys.stderr)
        return
    gc.collect()
    gc.freeze()  # a collection in a worker would touch, and so copy, every page
    request = serve(listener)
    if request is not None:
        become(**request)


def preload(names: tuple[str, ...]) -> None:
    """Import what can be imported; a worker that needs one of the rest says itself what is wrong with it."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  whatever a module raises while it is imported
            print(f"{__name__}: {name} is not imported ahead: {type(error).__name__}: {error}", file=sys.stderr)


@contextmanager
def fresh_actor_class_ids() -> Iterator[None]:
    """Draw the ID of a class that is made a Ray actor from the operating system.

    ray.actor draws it from Ray's C++ generator, whose pool is filled once a process, at first use: that would be here,
    at the import of a module with actors, and every fork would go on with the same numbers. Two agent loop workers then
    number their tasks alike, and a server that gets both at once aborts (core_worker.cc, "Check failed: erased == 1").
    """
    import ray.actor

    known = ray.actor.ActorClassID

    class FromOperatingSystem(known):
        @classmethod
        def from_random(cls):
            return known(os.urandom(known.size()))

    ray.actor.ActorClassID = FromOperatingSystem
    try:
        yield
    finally:
        ray.actor.ActorClassID = known


def forks_differ() -> bool:
    """Whether two forks of this process draw different IDs, in their main thread and in another one."""
    return len({drawn_by_a_fork() for _ in range(2)}) == 2


def drawn_by_a_fork() -> bytes:
    """Two IDs that a fork of this process draws."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        from ray._raylet import WorkerID

        drawn = [WorkerID.from_random()]
        thread = threading.Thread(target=lambda: drawn.append(WorkerID.from_random()))
        thread.start()
        thread.join()
        os.write(writer, b"".join(each.binary() for each in drawn))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        drawn = answer.read()
    os.wait()
    return drawn


def serve(listener: socket.socket) -> dict | None:
    """Fork once a request; returns the request in each fork, and None in the server once standard input ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(STDIO[0], selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if STDIO[0] in ready:
                return None
            connection, _ = listener.accept()
            request = read_request(connection)
            if request is not None and os.fork() == 0:
                listener.close()
                return {**request, "connection": connection}
            connection.close()
            for number in (request or {}).get("stdio", ()):
                os.close(number)


def read_request(connection: socket.socket) -> dict | None:
    """What a client sent: `argv`, `environment`, `folder`, and its `stdio`.

    None when it went away meanwhile, or is another user's.
    """
    connection.settimeout(5.0)  # a client sends at once; one that does not must not hold up the others
    if peer_user(connection) != os.getuid():
        return None
    try:
        data, stdio, _, _ = socket.recv_fds(connection, 65536, len(STDIO))
        while block := connection.recv(65536):
            data += block
        return {**json.loads(data), "stdio": stdio}
    except (OSError, ValueError):
        return None


def peer_user(connection: socket.socket) -> int:
    """User id of the process at the other end; anybody may find an abstract socket, and a request runs code."""
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return user


def become(
    argv: list[str], environment: dict[str, str], folder: str, stdio: list[int], connection: socket.socket
) -> None:
    """Be the Python process a client was asked for: run its script with its arguments, environment and files.

    `connection` stays open until this process ends, which is how the client learns of it.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    for given, number in zip(stdio, STDIO, strict=True):
        os.dup2(given, number)
        os.close(given)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # from the operating system, as at its import
    if environment.get("RAY_JOB_ID") != FIRST_JOB:
        os.execv(sys.executable, [sys.executable, *argv])
    refresh_authentication()
    connection.sendall(b"1")
    become.connection = connection
    sys.argv = sys.orig_argv = argv
    runpy.run_path(argv[0], run_name="__main__")


def refresh_authentication() -> None:
    """The driver turns Ray's token authentication on in its environment after the server was started."""
    from ray._raylet import Config

    Config.initialize("")  # reads RAY_AUTH_MODE again, and nothing else
