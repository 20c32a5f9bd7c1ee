"""Where a run came from: command, environment, packages, commits, hardware, model and data. No secret is kept.

    python -m recipes.provenance RUN        gathers it, in a process of its own: the launch does not wait

A part that cannot be gathered is named under `faults`; the run goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from recipes import __version__, masking
from recipes.atomic import replace_file
from recipes.run.directory import Run, now, write_json

FILE, FOLDER = "provenance.json", "provenance"
# What provenance.json says of itself where the ranks run elsewhere: each node has packages and hardware of its own.
LAUNCHING = "the launching machine, not the nodes of the cluster"

# Bytes of a working tree's diff that are kept, untracked files that are named, seconds for git and for all of it.
DIFF_BYTES, UNTRACKED = 1 << 20, 100
GIT_SECONDS, DEADLINE = 60, 600

# Variables that decide how a training runs: their values are kept. Of all others only that they are set.
_KEPT = (
    "ASCEND ATB CANN HCCL NPU TASK_QUEUE CPU_AFFINITY COMBINED ACL MINDSPEED VERL VLLM SGLANG RAY TORCH PYTORCH "
    "OMP MKL OPENBLAS NUMEXPR KMP GLOO NCCL TP_ CUDA TRITON INDUCTOR HYDRA TRANSFORMERS TOKENIZERS HF_ HUGGINGFACE "
    "DATASETS MODELSCOPE TENSORBOARD WANDB SWANLAB MLFLOW MASTER_ RANK WORLD_SIZE LOCAL_ NODE_ SLURM KUBERNETES "
    "RECIPES TQ_ TRAINER_ LD_ PATH PYTHON VIRTUAL_ENV CONDA_DEFAULT_ENV CONDA_PREFIX LANG LC_ TZ MALLOC JEMALLOC "
    "HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy XDG_CACHE TMPDIR PWD HOSTNAME"
)
KEPT = tuple(_KEPT.split())

# Asked of the interpreter that trains, which may be another than ours. Reading metadata of each costs a second.
_PACKAGES = """
import glob, json, os, sys
found, editable = {}, {}
for folder in sys.path:
    for place in glob.glob(os.path.join(glob.escape(folder or "."), "*-info")):
        base, kind = os.path.splitext(os.path.basename(place))
        name, _, version = base.partition("-")
        version = version.partition("-py3")[0]
        name = name.replace("_", "-").lower()
        if kind not in (".dist-info", ".egg-info") or name in found:
            continue
        found[name] = version
        try:
            with open(os.path.join(place, "direct_url.json"), encoding="utf-8") as file:
                direct = json.load(file)
        except (OSError, ValueError):
            continue
        commit = direct.get("vcs_info", {}).get("commit_id")
        if commit:
            found[name] += " at " + commit
        elif direct.get("dir_info", {}).get("editable"):
            editable[name] = direct.get("url", "")
print("\\nrecipes-packages:" + json.dumps({"packages": found, "editable": editable,
      "python": sys.version.split()[0], "executable": sys.executable}))
"""


def start(run: Run, attempt: int = 1, files: Iterable[Path] = ()) -> None:
    """Have the provenance of an attempt gathered in a process of its own. Returns at once; never raises.

    `files` are the recipe's own (`Composed.files`). Until it is gathered, and if that process is killed,
    provenance.json says that it is not.
    """
    words = [f"--attempt={attempt}", f"--launcher={masking.mask(shlex.join(sys.argv))}"]
    words += [f"--file={path}" for path in files]
    try:
        _keep(run, attempt, {"gathered": None, "faults": ["nothing was gathered yet, or the process was ended"]}, {})
        with (run.path / "provenance.log").open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "recipes.provenance", str(run.path), *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        threading.Thread(target=child.wait, daemon=True).start()  # leaves no zombie behind
    except (OSError, ValueError) as fault:
        with contextlib.suppress(OSError):
            _keep(run, attempt, {"gathered": None, "faults": [f"nothing could be gathered: {fault}"]}, {})


def write(run: Run, attempt: int = 1, *, files: Iterable[Path] = (), launcher: str = "") -> dict[str, Any]:
    """Gather the provenance of an attempt and write it: the attempt's own copy, and provenance.json, the latest.

    Diffs of changed working trees go into provenance/NAME.diff. Returns what was written.
    """
    told, diffs = _of_attempt(run, attempt, files, launcher)
    _keep(run, attempt, told, diffs)
    return told


def _of_attempt(run: Run, attempt: int, files: Iterable[Path], launcher: str) -> tuple[dict[str, Any], dict[str, str]]:
    began = time.monotonic()
    told: dict[str, Any] = {"gathered": now(), "attempt": attempt, "launcher": launcher, "faults": []}
    diffs: dict[str, str] = {}
    try:
        recipe, command = recorded(run, attempt)
        found, diffs = gather(recipe, command, files=files)
        folder = run.attempt(attempt)
        folder = folder if (folder / "recipe.yaml").is_file() else run.path
        found["written"] = {name: _hash(folder / name) for name in ("recipe.yaml", "verl.yaml", "command.json")}
        told |= found
    except Exception as fault:  # noqa: BLE001  whatever it is, the run is worth more than its provenance
        told["faults"].append(f"the rest could not be gathered: {_words(fault)}")
    told["seconds"] = round(time.monotonic() - began, 2)
    return told, diffs


def recorded(run: Run, attempt: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return recipe.yaml and command.json of a run, or of one attempt. Raises OSError or ValueError when unreadable."""
    import yaml

    folder = run.path
    if attempt is not None and (run.attempt(attempt) / "command.json").is_file():
        folder = run.attempt(attempt)
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    return recipe, json.loads((folder / "command.json").read_text(encoding="utf-8"))


def gather(
    recipe: Mapping[str, Any], command: Mapping[str, Any], *, files: Iterable[Path] = ()
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the provenance of a recipe's command on this machine now, and {name: diff} of changed working trees.

    `recipe` and `command` are as recipe.yaml and command.json hold them. No secret is in either. What cannot be
    gathered is named under `faults`, part by part.
    """
    python = command["argv"][0]
    faults: list[str] = []
    environment = {**os.environ, **command["environment"]}
    secrets = masking.known_secrets(environment)

    def part(name: str, get: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return get()
        except Exception as fault:  # noqa: BLE001  one part must not cost the others
            faults.append(f"{name} could not be gathered: {masking.mask(_words(fault), secrets)}")
            return otherwise

    told = part("packages", lambda: _ask_packages(python, environment), {})
    stack, modules = part("stack", lambda: _stack(recipe["stack"], python), ({}, {}))
    places = {"workbook": str(Path(__file__).parent), **modules}
    places |= {name: _local(url) for name, url in told.get("editable", {}).items()}
    repositories, diffs = part("git", lambda: _repositories(places, secrets), ({}, {}))
    found = {
        "gathered_on": LAUNCHING if recipe.get("launch") == "ray" else "",
        "workbook": __version__,
        "command": {**command, "folder": str(Path.cwd())},
        "environment": kept(environment, command["environment"]),
        "recipe_files": part("recipe files", lambda: hashes(files), {}),
        "interpreter": {"python": told.get("python"), "executable": told.get("executable"), "asked": python},
        "stack": stack,
        "repositories": repositories,
        "hardware": part("hardware", lambda: hardware(python, environment), {}),
        "data": part("data", lambda: prints(recipe, DATA), {}),
        "model": part("model", lambda: prints(recipe, MODEL), {}),
    }
    found = masking.mask_tree(found, secrets)
    found["packages"] = told.get("packages", {})  # names such as google-auth are no secrets' names
    found["faults"] = faults
    return found, diffs


def kept(environment: Mapping[str, str], named: Iterable[str] = ()) -> dict[str, str]:
    """Return an environment as it may be kept, sorted by name.

    Variables that decide how a training runs (KEPT, and those `named`) keep their values, all others are masked;
    secrets in any case.
    """
    secrets = masking.known_secrets(environment)
    shown = {}
    for name, text in sorted(environment.items()):
        public = name in named or name.startswith(tuple(KEPT))
        secret = masking.looks_secret(name) or name.startswith("AWS_")
        shown[name] = masking.mask(text, secrets) if public and not secret else masking.MASK
    return shown


# ---------------------------------------------------------------------------------------------------------- the parts

DATA = ("data.train_files", "data.val_files", "reward.function")
MODEL = ("model.path", "model.distributed_checkpoint", "checkpoint.resume_path")


def prints(recipe: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return the fingerprints of the files that keys of a recipe name; those unset are left out."""
    from recipes.fingerprint import fingerprint

    found = {}
    for key in keys:
        group, name = key.split(".")
        if path := (recipe.get(group) or {}).get(name):
            found[key] = fingerprint(str(path))
    return found


def hardware(python: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return this machine: processor, memory, and its NPUs with driver, firmware and CANN where there are any."""
    import psutil

    from recipes.doctor import node, npu
    from recipes.errors import RecipeError

    told = {
        "host": platform.node(),
        "system": platform.platform(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": psutil.cpu_count(logical=False),
        "threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count(),
        "memory": psutil.virtual_memory().total,
    }
    here = node.make(None, python, environment)
    cann = {name: found.version for name, found in npu.cann(here).items() if found}
    if cann:
        told["cann"] = cann
    if not here.shows_npu:
        return told
    for name, asked in (("driver", npu.driver), ("firmware", npu.firmware)):
        if found := asked(here)[0]:
            told[name] = found.version
    try:
        info = npu.parse_info(npu.ask(here, "info"))
        told["npu_smi"] = info.version
        told["devices"] = [
            {"device": c.device, "name": c.name, "health": c.health, "hbm_mib": c.hbm_total} for c in info.chips
        ]
    except RecipeError as fault:
        told["devices"] = f"not told: {fault}"
    return told


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, text = line.partition(":")
            if name.strip() in ("model name", "Model Name", "Hardware"):
                return text.strip()
    return platform.processor() or platform.machine()


def _ask_packages(python: str, environment: Mapping[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [python, "-P", "-c", _PACKAGES],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=GIT_SECONDS,
        env=dict(environment),
        check=False,
    )
    answer = re.findall(r"^recipes-packages:(.*)$", done.stdout, re.M)
    if done.returncode or not answer:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise OSError(f"{python} did not say what it has installed (exit code {done.returncode}): {last}")
    told = json.loads(answer[-1])
    return {**told, "packages": dict(sorted(told["packages"].items()))}


def _stack(name: str, python: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the stack's verification against `python`, and the places its repositories are imported from."""
    from recipes import stack
    from recipes.stack import verify

    wanted = stack.load(name)
    told = verify.ask(wanted, python)
    checked = list(verify.compare(wanted, told))
    places = {key: found["root"] for key, found in told["checkouts"].items() if found}
    return verify.as_json(wanted, python, checked), places


def _repositories(places: Mapping[str, str], secrets: Iterable[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the state of each git checkout, and the diffs of those whose tracked files were changed."""
    from recipes.stack import probe

    found: dict[str, Any] = {}
    diffs: dict[str, str] = {}
    for called, place in places.items():
        told = probe.checkout(place) if place and Path(place).exists() else None
        if not told or told["root"] in [known["root"] for known in found.values()]:
            continue
        name = re.sub(r"[^\w.-]", "-", called.removeprefix("editable:")).lstrip(".") or "checkout"
        entry = {**told, "remote": probe.git(told["root"], "remote", "get-url", "origin") or ""}
        others = probe.git(told["root"], "ls-files", "--others", "--exclude-standard", "--directory") or ""
        entry["untracked"] = others.splitlines()[:UNTRACKED]
        if told["dirty"]:
            text, cut = _diff(told["root"])
            diffs[name] = masking.mask(text, secrets)
            entry["diff"] = {"sha256": hashlib.sha256(diffs[name].encode()).hexdigest(), "cut": cut}
        found[name] = entry
    return found, diffs


def _diff(root: str) -> tuple[str, bool]:
    """Return what was changed in a working tree, at most DIFF_BYTES of it, and whether that is less than all."""
    argv = ["git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false", "-C", root, "diff", "HEAD"]
    environment = {k: v for k, v in os.environ.items() if k not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")}
    with subprocess.Popen(
        [*argv, "--no-ext-diff", "--no-textconv", "--no-color"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**environment, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
    ) as process:
        content = process.stdout.read(DIFF_BYTES + 1)
        process.kill()
    text = content[:DIFF_BYTES].decode("utf-8", "replace")
    cut = len(content) > DIFF_BYTES
    return text + (f"\n# cut here: the diff is longer than {DIFF_BYTES} bytes\n" if cut else ""), cut


def _keep(run: Run, attempt: int, told: Mapping[str, Any], diffs: Mapping[str, str]) -> None:
    if not run.path.is_dir():
        return  # somebody has removed the run meanwhile
    for name, text in diffs.items():
        shown = f"{name}.diff" if attempt == 1 else f"{name}-{attempt}.diff"
        told["repositories"][name]["diff"]["file"] = f"{FOLDER}/{shown}"
        replace_file(run.path / FOLDER / shown, text.encode("utf-8", "replace"))
    # An attempt that takes long to gather may be overtaken by the next one.
    for folder in (run.attempt(attempt), *([run.path] if attempt >= run.latest else [])):
        if folder.is_dir():
            write_json(folder / FILE, told)


def hashes(files: Iterable[Path]) -> dict[str, str]:
    """Return the SHA-256 of each recipe file, by its path in the workbook or its whole path; "missing" without one."""
    return {_label(path): _hash(path) for path in files}


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"


def _label(path: Path) -> str:
    from recipes.params import home

    return path.relative_to(home()).as_posix() if path.is_relative_to(home()) else str(path)


def _local(url: str) -> str:
    from urllib.parse import unquote, urlparse

    return unquote(urlparse(url).path)


def _words(fault: BaseException) -> str:
    return f"{type(fault).__name__}: {fault}".splitlines()[0][:500]


def main() -> int:
    """The child. Exit code 0 even where parts are missing: provenance.json says which."""
    parser = argparse.ArgumentParser(description="Gather the provenance of a run into provenance.json.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--attempt", type=int, default=1)
    parser.add_argument("--launcher", default="", help="the command line that launched it, for the record")
    parser.add_argument("--file", action="append", default=[], type=Path, help="one of the recipe's own files")
    given = parser.parse_args()
    with contextlib.suppress(OSError):
        os.nice(10)  # the training comes first
    signal.signal(signal.SIGALRM, _late)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE, 10)  # again every 10 s: each part that is left gets so much
    run = Run(given.run.absolute())
    told, diffs = _of_attempt(run, given.attempt, given.file, given.launcher)
    signal.setitimer(signal.ITIMER_REAL, 0)
    _keep(run, given.attempt, told, diffs)
    return 0


def _late(*_: Any) -> None:
    raise TimeoutError(f"it took longer than {DEADLINE} s")


if __name__ == "__main__":
    sys.exit(main())
