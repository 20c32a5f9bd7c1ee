"""One attempt of a run as a job of a Ray cluster: waits for its nodes, submits, streams the log, says how it ended.

The supervisor of the run starts this where it would start verl (recipes.run.cluster.supervised), and treats it alike:
what it prints is the attempt's log, its exit code is the training's, and SIGTERM ends the training. It runs on the
training interpreter, whose Ray must be the cluster's, and needs of this package only what is imported here.

    python …/recipes/run/ray_job.py RUN --attempt N           submit, or attach to the job if it is there already
    python …/recipes/run/ray_job.py RUN --attempt N --stop    end the job, should it still run

Neither other jobs nor the cluster itself are ever touched.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import shlex
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

if (
    __name__ == "__main__"
):  # by its path: this folder holds modules of ours, and beside `recipes` may lie other packages
    _here = Path(__file__).resolve().parent
    sys.path[:] = [*(p for p in sys.path if not p or Path(p).resolve() != _here), str(_here.parents[1])]

from recipes.atomic import replace_file
from recipes.masking import looks_secret
from recipes.run.causes import last_exception, signal_name

# Seconds: between looks at the job; between looks at the nodes; for one answer of the dashboard.
LOOK, NODES, ANSWER = 1.0, 5.0, 30
# Seconds until the same sentence about missing nodes is said again.
REPEAT = 60.0
# Seconds a training that lost a node gets to end by itself. Other ranks may wait for it in a collective for longer.
LOST_GRACE = 30.0
# Seconds until Ray may have noticed that a node is gone, once a process on it was missed (5 health checks, 3 s each).
NOTICE = 30.0
# Seconds a training gets to end when it is stopped, before Ray kills it.
STOP_GRACE = 8
# Seconds for the job's processes on all nodes to be gone after its driver. Both together are less than cluster.GRACE.
GONE = 20.0
# Seconds without a word until the log's connection is made anew: it may have broken without a sign.
SILENCE = 600.0
# Seconds a node gets to see the run directory.
VISIBLE = 60

ENDED = ("STOPPED", "SUCCEEDED", "FAILED")
# What a training's last words say when a process, or its node, went away under it.
VANISHED = re.compile(r"Actor(?:Died|Unavailable)|NodeDied|WorkerCrashed|OwnerDied|Connection (?:closed|reset|refused)")


class Stopped(BaseException):
    """We were asked to end the job."""


class JobError(Exception):
    """Why a job did not end well, in the words its run records."""


class ClusterError(JobError):
    """The cluster does not answer, or does not let us in."""


class NodesMissingError(JobError):
    """The nodes a run needs were not there in time."""


class NodeLostError(JobError):
    """A node with processes of the run died."""


class JobStoppedError(JobError):
    """Somebody else stopped the job."""


class JobFailedError(JobError):
    """The job failed, and its log need not say why."""


def main() -> int:
    """Run or stop the job of one attempt. The exit code is the training's, or 1."""
    parser = argparse.ArgumentParser(description="Run one attempt of a run as a job of a Ray cluster.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--attempt", type=int, default=1)
    parser.add_argument("--stop", action="store_true", help="end the job of this attempt, should it still run")
    given = parser.parse_args()
    plan = json.loads((given.run / "attempts" / str(given.attempt) / "ray.json").read_text(encoding="utf-8"))
    # Ray would take these in place of the address we name.
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        os.environ.pop(name, None)
    _use_token()
    signal.signal(signal.SIGTERM, _stopped)
    signal.signal(signal.SIGINT, _stopped)
    log = Log(given.run / "attempts" / str(given.attempt) / "job.position")
    if given.stop:  # whoever waits for the end of a run waits for no cluster to come back
        plan["wait_seconds"] = min(plan["wait_seconds"], ANSWER)
    job = Job(given.run, given.attempt, plan, log.say)
    try:
        if given.stop:
            job.connect()
            job.stop()
            return 0
        return job.attend(log)
    except Stopped:
        return _end(job)
    except JobError as fault:
        log.say(f"{type(fault).__name__}: {fault}", bare=True)
        return 1


def _stopped(*_: Any) -> NoReturn:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    raise Stopped


def _end(job: Job) -> int:
    try:
        if job.client is not None:
            job.stop()
    except JobError as fault:
        job.say(f"{type(fault).__name__}: {fault}")
    return 1


def _use_token() -> None:
    """Where there is a token, use it. Only `ray start --head` does so by itself (Ray 2.60), a client does not."""
    held = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if held or (Path.home() / ".ray" / "auth_token").is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


# ------------------------------------------------------------------------------------------------------------- the job


class Job:
    """The job of one attempt. Its id follows from the run and the attempt, so that it can never be submitted twice."""

    def __init__(self, run: Path, attempt: int, plan: Mapping[str, Any], say: Callable[[str], None]) -> None:
        self.run, self.attempt, self.plan, self.say = run.absolute(), attempt, plan, say
        self.id = self._id(attempt)
        self.file = self._file(attempt)
        self.client: Any = None
        self.record: dict[str, Any] | None = None  # job.json, read once: nobody else writes it while we attend
        self.turn, self.has_turn = contextlib.ExitStack(), False
        # Processes of the job on each node, by its id, the most that were seen: Ray forgets where they were when a job
        # has ended.
        self.seats: dict[str, int] = {}

    def attend(self, log: Log) -> int:
        """Bring the job to its end and return its exit code. Raises JobError."""
        self.connect()
        self._end_earlier()
        info = self.info(self.id)
        if info is not None:
            self.say(f"attaches to job {self.id}, which is {_status(info)}")
        elif self._recorded().get("submitted"):
            raise JobFailedError(
                f"the cluster at {self.url} knows no job {self.id} any more: it was deleted, or the cluster is new"
            )
        else:
            self._wait_for_turn()
            self._submit(self._wait_for_nodes())
        with self.turn:
            return self._follow(log)

    def connect(self) -> None:
        """Reach the dashboard, at the latest when the wait is over. Raises ClusterError."""
        address, limit, said = self.plan["address"], time.monotonic() + self.plan["wait_seconds"], False
        while True:
            try:
                self.client = _client(address)
                self.url = self.client.get_address()
                return
            except Exception as fault:  # noqa: BLE001  requests', Ray's, or what a proxy in between answers
                why = _first_line(fault)
                if "Authentication" in type(fault).__name__:
                    raise ClusterError(
                        f"the cluster at {address} wants Ray's token: give the shell that launches the RAY_AUTH_TOKEN "
                        "or RAY_AUTH_TOKEN_PATH its nodes were started with"
                    ) from None
                if time.monotonic() > limit:
                    raise ClusterError(
                        f"no Ray dashboard answers at {address} ({why}). Is the cluster up, and does its dashboard "
                        "listen on an address this machine reaches (ray start --dashboard-host)?"
                    ) from None
            if not said:
                self.say(f"no dashboard answers at {address} yet; waits {self.plan['wait_seconds']:g} s at most")
                said = True
            time.sleep(LOOK)

    def info(self, submission: str) -> Any:
        """Return Ray's JobDetails of a submission, or None when the cluster knows none. Raises ClusterError."""

        def get() -> Any:
            try:
                return self.client.get_job_info(submission)
            except RuntimeError as fault:
                if "404" in str(fault) or "does not exist" in str(fault):
                    return None
                raise

        return self._ask(get)

    def stop(self) -> None:
        """End the job and wait until its driver, then its processes on all nodes, are gone. Raises JobError."""
        self._stop(self.id)
        self._record_end("STOPPED")

    def _stop(self, submission: str) -> None:
        info = self.info(submission)
        if info is None:
            return
        if _status(info) not in ENDED:
            self.say(f"stops job {submission}")
            self._ask(lambda: self.client.stop_job(submission))
        limit = time.monotonic() + STOP_GRACE + GONE
        while _status(info) not in ENDED or self._living(info):
            if time.monotonic() > limit:
                raise JobFailedError(f"job {submission} was asked to stop and is still {_status(info)}")
            time.sleep(LOOK / 2)
            info = self.info(submission) or info
        self.say(f"job {submission} is {_status(info)}, and none of its processes is left on any node")

    def _end_earlier(self) -> None:
        """A job of an earlier attempt that still runs would write the same checkpoints."""
        for number in range(1, self.attempt):
            earlier = self._id(number)
            info = self.info(earlier) if self._file(number).exists() else None
            if info is not None and _status(info) not in ENDED:
                self.say(f"job {earlier} of attempt {number} still runs")
                self._stop(earlier)

    def _wait_for_turn(self) -> None:
        """Wait until no other run of this machine stands between its submission and its devices at this cluster.

        verl counts free devices, then takes them node by node, half a minute after its submission. Two that do so at
        once are each refused by verl, or each hold what the other waits for.
        """
        mark = hashlib.sha256(self.url.encode()).hexdigest()[:16]
        path = Path(tempfile.gettempdir()) / f"recipes-ray-{os.getuid()}-{mark}.lock"
        file, said = self.turn.enter_context(path.open("ab")), False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.has_turn = True
                return
            except BlockingIOError:
                if not said:
                    said = True
                    self.say("waits for its turn: another run of this machine is about to take devices")
            time.sleep(LOOK)

    def _has_devices(self, info: Any) -> bool:
        """Say whether the job holds the devices it asked for: all placement groups of verl's, on all nodes."""
        if not info.job_id:
            return False
        from ray.util.state import list_placement_groups

        options = {"limit": 1000, "timeout": ANSWER, "detail": True, "raise_on_missing_output": False}
        filters = [("creator_job_id", "=", info.job_id), ("state", "=", "CREATED")]
        groups = self._ask(lambda: list_placement_groups(address=self.url, filters=filters, **options))
        bundles = [bundle for group in groups for bundle in group.bundles or ()]
        held = sum((bundle.get("unit_resources") or {}).get(self.plan["resource"], 0) for bundle in bundles)
        return held >= sum(count * size for count, size in self.plan["wanted"])

    def _wait_for_nodes(self) -> dict[str, str]:
        """Wait until the cluster has what the run needs. Returns {node id: address}; raises NodesMissingError.

        What is there and in use by others is waited for as long as it takes: that is a queue, not a fault.
        """
        limit, before, said = time.monotonic() + self.plan["wait_seconds"], "", 0.0
        while True:
            used = self._used()
            nodes = [{**node, "used": used.get(node["node_id"], 0)} for node in self.nodes()]
            missing, sentence = survey(nodes, self.plan)
            if missing and not survey([{**node, "used": 0} for node in nodes], self.plan)[0]:
                limit = time.monotonic() + self.plan["wait_seconds"]
            if sentence != before or time.monotonic() - said > REPEAT:
                before, said = sentence, time.monotonic()
                self.say(sentence)
            if not missing:
                return {n["node_id"]: n["node_ip"] for n in nodes if n["state"] == "ALIVE"}
            if time.monotonic() > limit:
                raise NodesMissingError(f"{sentence}; waited {self.plan['wait_seconds']:g} s")
            time.sleep(LOOK)

    def _submit(self, nodes: Mapping[str, str]) -> None:
        command = json.loads((self.file.parent / "command.json").read_text(encoding="utf-8"))
        variables, kept_back = job_environment(command["environment"], self.plan)
        if kept_back:
            self.say(
                f"does not hand on {', '.join(kept_back)}: every user of the cluster could read a job's environment. "
                "Set them on the nodes before Ray is started there"
            )
        record = {"submission_id": self.id, "address": self.url, "nodes": dict(nodes), "submitted": None}
        self._record(record)  # first, so that the job can tell the run directory by it, and nobody submits again
        arguments = {
            "entrypoint": entrypoint(command["argv"], self.file, self.id, before=_set_again(variables)),
            "runtime_env": {"env_vars": variables},
            "submission_id": self.id,
            "metadata": {"recipe": self.plan["recipe"], "run": str(self.run), "attempt": str(self.attempt)},
        }
        try:
            # No resources for the driver: Ray then puts it on the head node, and verl's own processes take theirs.
            self.client.submit_job(**arguments)
        except Exception as fault:
            if self.info(self.id) is None:  # else it had arrived all the same
                raise JobFailedError(f"the cluster refused the job: {_first_line(fault)}") from fault
        self._record({**record, "submitted": datetime.now().astimezone().isoformat(timespec="seconds")})
        self.say(f"submitted job {self.id} to {self.url}")

    def _follow(self, log: Log) -> int:
        """Stream the log until the job has ended, and return its exit code. Raises JobError."""
        reader = threading.Thread(target=log.follow, args=(self.client, self.id), daemon=True)
        reader.start()
        lost: dict[str, str] = {}
        looked, since = time.monotonic(), None
        placed, taking = not self.has_turn, time.monotonic() + self.plan["taking_seconds"]
        info = self.info(self.id)
        while info is not None and _status(info) not in ENDED:
            time.sleep(LOOK)
            if time.monotonic() - looked > NODES:
                looked = time.monotonic()
                if not placed and (looked > taking or self._has_devices(info)):
                    placed = True
                    self.turn.close()
                self._see_seats(info)
                lost = self._lost(info)
                if lost and since is None:
                    since = looked
                    self.say(f"{_and(lost.values())}; gives the training {LOST_GRACE:g} s to end by itself")
                if since is not None and looked - since > LOST_GRACE:
                    self._stop(self.id)
                    info = self.info(self.id) or info
                    break
            info = self.info(self.id)
        log.finish(reader)
        if info is None:
            raise JobFailedError(f"the cluster at {self.url} knows no job {self.id} any more: it was deleted")
        # Ray's message holds the end of the log, which a dump of some raylet may fill: the exception stands before it.
        words = f"{info.message} {last_exception(self.file.parent / 'train.log')}"
        if not lost and _status(info) == "FAILED" and VANISHED.search(words):
            limit = time.monotonic() + NOTICE
            while not (lost := self._lost(info)) and time.monotonic() < limit:
                time.sleep(LOOK)
        self._record_end(_status(info))
        return self._judge(info, lost)

    def _judge(self, info: Any, lost: Mapping[str, str]) -> int:
        status, code = _status(info), info.driver_exit_code
        if status == "SUCCEEDED":
            return 0
        if lost:
            raise NodeLostError(_and(lost.values()))
        if status == "STOPPED":
            raise JobStoppedError(
                f"job {self.id} was stopped from outside (`ray job stop`, or the cluster's dashboard)"
            )
        if code is None:  # it never came to the training, or its node went away
            raise JobFailedError(_first_line(info.message))
        if code < 0:
            raise JobFailedError(f"the training's driver was killed by {signal_name(-code)} on the cluster")
        return code  # the last exception in the log says why

    # ------------------------------------------------------------------------------------------------ what Ray knows

    def nodes(self) -> list[dict[str, Any]]:
        """Return Ray's table of nodes, dead ones too. Raises ClusterError."""
        from ray.util.state import list_nodes

        options = {"limit": 10_000, "timeout": ANSWER, "detail": True, "raise_on_missing_output": False}
        return [vars(node) for node in self._ask(lambda: list_nodes(address=self.url, **options))]

    def _used(self) -> dict[str, int]:
        """Return how many devices of each node others hold, by its id, as the dashboard's page of nodes shows it.

        The page is no promise of Ray's: without it, devices count as free, and verl says which it could not have.
        """
        one = re.compile(rf"^([\d.]+)/[\d.]+ {re.escape(self.plan['resource'])}$", re.M)
        try:
            answer = self.client._do_request("GET", "/nodes?view=summary").json()
            shown = answer["data"]["nodeLogicalResources"]
            return {node: math.ceil(float(found[1])) for node, text in shown.items() if (found := one.search(text))}
        except Exception:  # noqa: BLE001  nodes() says it, where the dashboard does not answer
            return {}

    def _actors(self, info: Any, *more: tuple[str, str, str]) -> list[Any]:
        from ray.util.state import list_actors

        if not info.job_id:  # its driver has not called ray.init
            return []
        options = {"limit": 10_000, "timeout": ANSWER, "raise_on_missing_output": False}
        filters = [("job_id", "=", info.job_id), *more]
        return self._ask(lambda: list_actors(address=self.url, filters=filters, **options))

    def _living(self, info: Any) -> bool:
        return bool(self._actors(info, ("state", "!=", "DEAD")))

    def _lost(self, info: Any) -> dict[str, str]:
        """Return what to say of each node that died with processes of this job on it, by its id."""
        then = self._recorded().get("nodes", {})
        now = {node["node_id"]: node for node in self.nodes()}
        told = {}
        for node, address in then.items():
            if now.get(node, {}).get("state") == "ALIVE":
                continue
            if count := max(len(self._actors(info, ("node_id", "=", node))), self.seats.get(node, 0)):
                why = now.get(node, {}).get("state_message") or "Ray does not say why"
                told[node] = f"node {address} was lost with {count} processes of this run: {_shortened(why)}"
        return told

    def _see_seats(self, info: Any) -> None:
        for node, count in Counter(actor.node_id for actor in self._actors(info, ("state", "=", "ALIVE"))).items():
            self.seats[node] = max(count, self.seats.get(node, 0))

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Ask until there is an answer, for as long as a cluster may keep silent. Raises ClusterError."""
        limit, said = time.monotonic() + self.plan["wait_seconds"], False
        while True:
            try:
                return question()
            except Exception as fault:  # noqa: BLE001  requests', Ray's, or what a proxy in between answers
                why = _first_line(fault)
            if time.monotonic() > limit:
                raise ClusterError(
                    f"the dashboard at {self.url} has not answered for {self.plan['wait_seconds']:g} s ({why}). The "
                    f"head node may be down; whether job {self.id} still runs is not known"
                )
            if not said:
                self.say(f"the dashboard at {self.url} does not answer ({why}); asks again")
                said = True
            time.sleep(LOOK)

    # -------------------------------------------------------------------------------------------------------- records

    def _id(self, attempt: int) -> str:
        return f"{self.plan['id']}-{attempt}"

    def _file(self, attempt: int) -> Path:
        return self.run / "attempts" / str(attempt) / "job.json"

    def _record(self, what: Mapping[str, Any]) -> None:
        self.record = dict(what)
        replace_file(self.file, (json.dumps(what, indent=2) + "\n").encode())

    def _record_end(self, status: str) -> None:
        if recorded := self._recorded():
            self._record({**recorded, "ended": recorded.get("ended") or status})

    def _recorded(self) -> dict[str, Any]:
        if self.record is None:
            try:
                self.record = json.loads(self.file.read_text(encoding="utf-8"))
            except FileNotFoundError:
                self.record = {}
        return self.record


def _client(address: str) -> Any:
    import logging

    from ray.job_submission import JobSubmissionClient

    logging.getLogger(JobSubmissionClient.__module__).setLevel(logging.WARNING)  # the log is the training's

    class Client(JobSubmissionClient):
        """Ray's, which would wait for ever for an answer that does not come."""

        def _do_request(self, *args: Any, **kwargs: Any) -> Any:
            return super()._do_request(*args, **{"timeout": ANSWER, **kwargs})

    return Client(address)


def job_environment(environment: Mapping[str, str], plan: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Return the environment of the job, and the names of variables that look like secrets and stay behind.

    The command repeats its environment in verl's ray_init, as a run on one machine needs it; Ray refuses a variable
    that both name, whatever its value, unless told otherwise.
    """
    kept_back = sorted(name for name in environment if looks_secret(name))
    handed_on = {name: text for name, text in environment.items() if name not in kept_back}
    ours = {SEE: _SEE, "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1", "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_GRACE)}
    return {**handed_on, **ours, plan["marker"]: plan["id"]}, kept_back


# The variable of the job that holds the program below: Ray writes a job's shell line into its log.
SEE = "RECIPES_SEE_RUN"
# Asks every node whether it sees the run directory: verl's processes that write metrics and checkpoints run on any of
# them. Network file systems remember for a while that a file was not there.
_SEE = r"""
import os, socket, sys, time
def sees(record, submission, seconds):
    import os, time
    limit = time.time() + seconds
    while True:
        try:
            with open(record) as file:
                if '"' + submission + '"' in file.read() and os.access(os.path.dirname(record), os.W_OK):
                    return True
        except OSError:
            pass
        if time.time() > limit:
            return False
        time.sleep(1)
record, submission, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
blind = [] if sees(record, submission, seconds) else [socket.gethostname()]
if not blind:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
    ray.init(address="auto", log_to_driver=False, logging_level="error")
    ask = ray.remote(num_cpus=0, max_retries=0)(sees)
    asked = {}
    for node in ray.nodes():
        if node["Alive"]:
            place = On(node["NodeID"], soft=False)
            told = ask.options(scheduling_strategy=place).remote(record, submission, seconds)
            asked[node["NodeManagerAddress"]] = told
    for name, answer in asked.items():
        try:
            if not ray.get(answer, timeout=seconds + 60):
                blind.append(name)
        except Exception as fault:
            print("ray job: node", name, "did not say whether it sees the run directory:", type(fault).__name__)
    ray.shutdown()
if blind:
    folder = os.path.dirname(record)
    sys.exit("RunDirectoryError: " + folder + " is not there, or cannot be written, on " + ", ".join(blind) +
             ": metrics and checkpoints would be lost. Put run_dir on storage that all nodes share.")
"""


def _set_again(variables: Mapping[str, str]) -> list[str]:
    """Return the words in front of a command that set what Ray changes in a driver's environment, whatever it was."""
    changed = [f"{name}={text}" for name, text in variables.items() if name.startswith("RAY_EXPERIMENTAL_NOSET_")]
    return ["env", *changed] if changed else []


def entrypoint(
    argv: Sequence[str], record: Path, submission: str, seconds: float = VISIBLE, before: Sequence[str] = ()
) -> str:
    """Return the shell line of the job: `before` and `argv`, once all nodes are seen to have the run directory.

    `record` is the attempt's job.json, which names the submission: another directory of the same name does not pass.
    The look is no part of the job (RAY_JOB_CONFIG_JSON_ENV_VAR), so that it needs nothing of the job's environment.
    """
    look = f'{shlex.quote(argv[0])} -c "${SEE}" {shlex.join([str(record), submission, f"{seconds:g}"])}'
    return f"env -u RAY_JOB_CONFIG_JSON_ENV_VAR {look} || exit 1; exec {shlex.join([*before, *argv])}"


# ----------------------------------------------------------------------------------------------------------- the nodes


def survey(nodes: Sequence[Mapping[str, Any]], plan: Mapping[str, Any]) -> tuple[int, str]:
    """Return how many of the nodes a run needs are missing, and a sentence that names those there and those not.

    nodes: Ray's table (node_id, node_ip, node_name, state, state_message, resources_total), `used` (by others).
    plan: `wanted` [[nodes, devices on each], …], `resource`, and `nodes`, the addresses known beforehand, if they are.
    """
    resource, expected = plan["resource"], plan["nodes"]
    living = [node for node in nodes if node["state"] == "ALIVE"]
    offered = {n["node_id"]: int((n["resources_total"] or {}).get(resource, 0)) for n in living}
    devices = [(n["node_ip"], max(0, offered[n["node_id"]] - n["used"])) for n in living]
    busy = [f"{n['node_ip']} ({n['used']} of {offered[n['node_id']]})" for n in living if n["used"]]
    total = sum(count for count, _ in plan["wanted"])
    missing = _unplaced([count for _, count in devices], plan["wanted"])
    sizes = sorted({size for _, size in plan["wanted"]})
    enough = [f"{ip} ({count} {resource})" for ip, count in sorted(devices) if count >= sizes[0]]
    said = f"{total - missing} of {total} nodes are up" + (f": {', '.join(enough)}" if enough else "")
    if not missing:
        return 0, said
    fewer = [f"{ip} ({count})" for ip, count in sorted(devices) if 0 < count < sizes[0]]
    bare = sorted(n["node_ip"] for n in living if not offered[n["node_id"]])
    said += f"; with too few: {', '.join(fewer)}" if fewer else ""
    said += f"; in use: {', '.join(sorted(busy))}" if busy else ""
    said += f"; without {resource}: {', '.join(bare)}" if bare else ""
    each = " or ".join(map(str, sizes))
    said += f"; {missing} with {each} {resource} {'is' if missing == 1 else 'are'} missing"
    known = {text for node in living for text in (node["node_ip"], node["node_name"])}
    dead = {n["node_ip"]: n["state_message"] for n in nodes if n["state"] == "DEAD" and n["node_ip"] not in known}
    awaited = {name: _resolved(name) for name in expected}
    away = {name: ip for name, ip in awaited.items() if not known & {name, ip}}
    names = [f"{name}, dead" if ip in dead else name for name, ip in away.items()]
    names += [
        f"{ip}, dead ({_shortened(why or 'no reason given')})" for ip, why in dead.items() if ip not in away.values()
    ]
    return missing, said + (f": {'; '.join(names[:32])}" if names else "")


def _unplaced(free: Sequence[int], wanted: Sequence[Sequence[int]]) -> int:
    """Return how many of the wanted nodes find no place: each takes the node with the fewest devices that do."""
    left, missing = sorted(free), 0
    for count, size in sorted(wanted, key=lambda pair: -pair[1]):
        for _ in range(count):
            fits = [i for i, devices in enumerate(left) if devices >= size]
            if fits:
                left[min(fits, key=lambda i: left[i])] -= size
            else:
                missing += 1
    return missing


def _resolved(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return name


# ------------------------------------------------------------------------------------------------------------- the log


class Log:
    """Standard output: the job's log, each character once, whatever connection breaks; and lines of our own.

    Ray sends a job's log from its beginning to everyone who connects. How much of it was written stands in a file
    beside it, so that whoever attaches later goes on there. It is written after the log: if this process is killed in
    between, the last piece of the log is said twice, and never is one missing.
    """

    def __init__(self, position: Path) -> None:
        self.file = position
        self.position = _number(position)
        self.lock, self.at_start, self.ended = threading.Lock(), True, threading.Event()

    def say(self, text: str, *, bare: bool = False) -> None:
        """Write a line of our own; `bare` without the prefix that tells it from the training's."""
        with self.lock:
            self._write(("" if self.at_start else "\n") + ("" if bare else "ray job: ") + text + "\n")

    def follow(self, client: Any, submission: str) -> None:
        """Write the job's log as it grows, until `finish` and the log's end. Connects anew as often as it must."""
        failures = 0
        while True:
            try:
                asyncio.run(self._tail(client, submission))
                failures = 0
                if self.ended.wait(5 * LOOK):  # Ray closes the stream of a job that has ended, and of no other
                    return
            except Exception as fault:  # noqa: BLE001  aiohttp's, Ray's, a timeout
                failures += 1
                if failures == 3:
                    self.say(f"the job's log cannot be read for now ({_first_line(fault)})")
                if self.ended.is_set() and failures > 3:
                    return
                time.sleep(2 * LOOK)

    def finish(self, reader: threading.Thread) -> None:
        """The job has ended: let the reader come to the end of its log."""
        self.ended.set()
        reader.join(60)

    async def _tail(self, client: Any, submission: str) -> None:
        """Write what the job says until the stream ends; or until it was silent for so long that it may be broken."""
        seen = 0
        stream = client.tail_job_logs(submission).__aiter__()
        while True:
            since = time.monotonic()
            try:
                text = await asyncio.wait_for(stream.__anext__(), SILENCE)
            except StopAsyncIteration:
                return
            except TimeoutError:
                if time.monotonic() - since < SILENCE:  # not ours: the connection could not be made
                    raise
                return
            seen += len(text)
            new = text[max(0, len(text) - (seen - self.position)) :] if seen > self.position else ""
            if new:
                with self.lock:
                    self._write(new)
                    self.position = seen
                    replace_file(self.file, f"{seen:020d}".encode("ascii"))

    def _write(self, text: str) -> None:
        sys.stdout.buffer.write(text.encode("utf-8", errors="replace"))
        sys.stdout.buffer.flush()
        self.at_start = text.endswith("\n")


def _number(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _status(info: Any) -> str:
    return str(getattr(info.status, "value", info.status))


def _and(sentences: Any) -> str:
    return "; ".join(sentences)


def _first_line(text: Any) -> str:
    lines = [line.strip() for line in str(text or "").splitlines() if line.strip()]
    return _shortened(lines[0]) if lines else "no message"


def _shortened(text: str, length: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 1] + "…"


if __name__ == "__main__":
    sys.exit(main())
