"""The nodes of a Ray cluster that already runs: their clocks, and what differs between them. Nothing is started."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from recipes.doctor import child
from recipes.doctor.lines import Line, Section, shown
from recipes.doctor.node import Node
from recipes.errors import RecipeError

SECTION = Section("cluster")

# Clocks farther apart than this make the nodes' logs unreadable side by side, and certificates and leases fail; our
# limit. The way to the node and back is known, and counts in favour of the clock.
SKEW_SECONDS = 1.0

PACKAGES = ("verl", "torch", "torch_npu", "transformers", "ray", "vllm", "vllm_ascend", "megatron-core", "mindspeed")
VARIABLES = ("VERL_USE_EXTERNAL_MODULES", "ASCEND_HOME_PATH", "HCCL_CONNECT_TIMEOUT", "PYTHONPATH")
# What may differ between nodes that still train together, and then explains the one that fails first.
LIMITS = ("/dev/shm, GiB", "ulimit -n", "ulimit -l")
MARK = "recipes-doctor:"

# One task a node, which takes no CPU and no NPU of it. It answers with text only.
_ASK = r"""
import json, sys, time
import ray
told = json.loads(sys.argv[1])
def join(address):
    ray.init(address=address, log_to_driver=False, logging_level="error")
def join_by_dashboard(url):
    # Ray joins at the head's own port, which every process of Ray on this node was told; its clusters may be several.
    import socket
    from urllib.parse import urlsplit
    from ray._private.services import find_gcs_addresses
    told = urlsplit(url)
    hosts = {told.hostname, socket.gethostbyname(told.hostname)}
    known = sorted(a for a in find_gcs_addresses() if a.rpartition(":")[0] in hosts) or [told.hostname + ":6379"]
    if len(known) == 1:
        return join(known[0])
    for address in known:
        try:
            join(address)
        except Exception as fault:  # another's cluster, with another token
            print(type(fault).__name__, str(fault)[:200], file=sys.stderr)
            continue
        if (ray._private.worker.global_worker.node.webui_url or "").rpartition(":")[2] == str(told.port):
            return
        ray.shutdown()
    sys.exit("ConnectionError: none of the clusters this node is in has its dashboard at " + url)
(join_by_dashboard if told["address"].startswith(("http://", "https://")) else join)(told["address"])
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
def look(told):
    import glob, hashlib, importlib.metadata, os, platform, re, resource, time
    def version(name):
        try: return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError: return "none"
    def digest(path):
        try:
            with open(path, "rb") as file: return hashlib.sha256(file.read(64 * 2**20)).hexdigest()[:12]
        except OSError: return "none"
    def first(path):
        try:
            with open(path) as file: return file.readline().strip()[:80]
        except OSError: return "none"
    def cann():
        home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
        home = home or "/usr/local/Ascend/ascend-toolkit/latest"
        for name in ("*-linux/ascend_toolkit_install.info", "ascend_toolkit_install.info", "version.cfg"):
            for path in sorted(glob.glob(glob.escape(home) + "/" + name)):
                try:
                    with open(path, errors="replace") as file: text = file.read(2**20)
                except OSError: continue
                found = re.search(r"^\w*version=\[?([\d][\w.-]*)", text, re.M)
                if found: return found[1][:80]
        return "none"
    def limit(number):
        soft = resource.getrlimit(number)[0]
        return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    def shared():
        try: found = os.statvfs("/dev/shm")
        except OSError: return "none"
        return str(round(found.f_blocks * found.f_frsize / 2**30))
    facts = {"python": platform.python_version(), "driver": first("/usr/local/Ascend/driver/version.info"),
             "firmware": first("/usr/local/Ascend/firmware/version.info"), "CANN": cann()}
    facts.update(zip(told["limits"], (shared(), limit(resource.RLIMIT_NOFILE), limit(resource.RLIMIT_MEMLOCK))))
    facts.update({name: version(name) for name in told["packages"]})
    facts.update({name: os.environ.get(name, "unset") for name in told["variables"]})
    facts.update({path: digest(path) for path in told["files"]})
    return {"facts": facts, "time": time.time()}
ask = ray.remote(num_cpus=0, max_retries=0)(look)
answers = {}
for node in ray.nodes():
    if not node["Alive"]:
        continue
    entry = {"address": node["NodeManagerAddress"], "devices": node["Resources"].get("NPU", 0)}
    try:
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ray.get(ask.options(scheduling_strategy=strategy).remote(told), timeout=told["seconds"])  # starts the worker
        begin = time.time()
        found = ray.get(ask.options(scheduling_strategy=strategy).remote(told), timeout=told["seconds"])
        end = time.time()
        entry.update(found["facts"] and {"facts": found["facts"]}, skew=found["time"] - (begin + end) / 2,
                     way=(end - begin) / 2)
    except Exception as fault:
        entry["fault"] = (str(fault).strip().splitlines() or [type(fault).__name__])[-1][:300]
    answers[node["NodeID"]] = entry
print("\nMARK" + json.dumps(answers))
ray.shutdown()
"""


def look(node: Node, address: str | None, deadline: float) -> Iterator[Line]:
    """Yield what differs between the nodes of the cluster at `address`, which must run already."""
    if not address:
        if node.several:
            yield SECTION.unseen(
                "nodes", "no cluster is named: give --address or ray_address, or export RAY_ADDRESS, once Ray runs"
            )
        elif node.subject:
            yield SECTION.ok("nodes", "the recipe runs on one")
        else:
            yield SECTION.unseen("nodes", "neither a recipe nor a cluster is named")
        return
    try:
        answers = ask(node, address, deadline)
    except RecipeError as fault:
        yield SECTION.unseen("nodes", str(fault))
        return
    yield from compare(answers)
    if node.subject and not node.without_npu:
        yield from resources(node, answers)


def ask(node: Node, address: str, deadline: float) -> dict[str, dict[str, Any]]:
    """Return what each node of a cluster says of itself, by its address.

    `address` is the dashboard's URL, as recipes and RAY_ADDRESS have it, or what ray.init takes: HOST:PORT of the head,
    or auto. Raises RecipeError when the cluster does not answer.
    """
    model = node.subject.recipe.model.path if node.subject else ""
    files = [f"{model}/{name}" for name in ("config.json", "model.safetensors.index.json")] if model else []
    told = {
        "address": address,
        "packages": PACKAGES,
        "variables": VARIABLES,
        "limits": LIMITS,
        "files": files,
        "seconds": max(5.0, deadline / 4),
    }
    argv = [node.python, "-c", _ASK.replace("MARK", MARK), json.dumps(told)]
    # The external modules would be imported by verl only; Ray's client needs none, and they may start devices.
    ended = child.run(argv, environment=node.environment, deadline=deadline)
    if ended.code is None:
        raise RecipeError(f"the cluster at {address} did not answer within {deadline:g} s")
    if ended.code != 0 and "InvalidAuthToken" in ended.errors:
        # Ray's own last line says only that it could not connect.
        raise RecipeError(
            f"the cluster at {address} wants Ray's token: give this shell the RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH "
            "its nodes were started with"
        )
    found = [line for line in ended.output.splitlines() if line.startswith(MARK)]
    if ended.code != 0 or not found:
        raise RecipeError(f"the cluster at {address} cannot be asked: {shown(ended.last, 200)}")
    return _by_address(json.loads(found[-1].removeprefix(MARK)))


def _by_address(answers: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Name each node by its address, and by its id too where several have one: containers on a host's network."""
    shared = Counter(answer["address"] for answer in answers.values())
    return {
        answer["address"] + (f" ({node[:8]})" if shared[answer["address"]] > 1 else ""): answer
        for node, answer in answers.items()
    }


def compare(answers: Mapping[str, Mapping[str, Any]]) -> Iterator[Line]:
    """Judge what nodes said of themselves: silent ones, clocks, and each fact that is not what most nodes have."""
    for name, answer in answers.items():
        if "fault" in answer:
            yield SECTION.fault(
                "node",
                {"node": name},
                f"it did not answer: {answer['fault']}.",
                "Look at Ray's log there, or take the node out.",
                noticed="engine start",
                source="a task of Ray",
            )
    told = {name: answer for name, answer in answers.items() if "facts" in answer}
    if not told:
        yield SECTION.unseen("differences", "no node answered")
        return
    before = False
    for line in (*_clocks(told), *_differences(told)):
        before = True
        yield line
    if not before:
        yield SECTION.ok("differences", f"none between {len(told)} nodes; clocks within {SKEW_SECONDS:g} s")


def _clocks(told: Mapping[str, Mapping[str, Any]]) -> Iterator[Line]:
    for name, answer in told.items():
        skew, way = float(answer["skew"]), float(answer["way"])
        if abs(skew) - way > SKEW_SECONDS:
            yield SECTION.fault(
                "clock",
                {"node": name},
                f"its clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this one's "
                f"(known to {way:.2f} s).",
                "Let chrony or ntpd set the clocks.",
                severity="warning",
                noticed="never: logs of nodes cannot be put in order",
                source="our limit",
            )


def _differences(told: Mapping[str, Mapping[str, Any]]) -> Iterator[Line]:
    keys: Sequence[str] = list(dict.fromkeys(key for answer in told.values() for key in answer["facts"]))
    for key in keys:
        values = {name: str(answer["facts"].get(key, "none")) for name, answer in told.items()}
        usual, count = Counter(values.values()).most_common(1)[0]
        for name, value in values.items():
            if value == usual:
                continue
            yield SECTION.fault(
                "differences",
                {"node": name, key: value},
                f"{count} of {len(told)} nodes have {usual}.",
                "Make the nodes alike before the run.",
                severity="warning" if key in (*VARIABLES, *LIMITS) else "error",
                noticed="engine start, or a run that hangs",
                source="a task of Ray on each node",
            )


def resources(node: Node, answers: Mapping[str, Mapping[str, Any]]) -> Iterator[Line]:
    """Judge the devices Ray counts against those the recipe wants, all nodes together."""
    recipe, subject = node.subject.recipe, node.subject
    apart = recipe.mode == "fully_async" and recipe.fully_async.rollout_nodes
    wanted = subject.world + (subject.rollout_world if apart else 0)
    has = int(sum(float(answer.get("devices", 0)) for answer in answers.values()))
    if has < wanted:
        each = ", ".join(f"{name} {int(answer.get('devices', 0))}" for name, answer in answers.items())
        yield SECTION.fault(
            "devices",
            {"nodes": recipe.nodes, "devices": subject.devices_per_node},
            f"the recipe wants {wanted} devices, and Ray counts {has} ({each}).",
            """Join the missing nodes with `ray start --address=… --resources='{"NPU": 16}'`.""",
            noticed="engine start: Total available GPUs is less than total desired GPUs",
            source="ray.nodes()",
        )
    else:
        yield SECTION.ok("devices", f"Ray counts {has}, the recipe wants {wanted}")
