"""Set-up: pins in one place, a Python 3.12 found wherever it is, an installation that can be interrupted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml

from recipes import stack

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]
SHELLCHECK = Path(sys.executable).parent / "shellcheck"
RUFF = Path(sys.executable).parent / "ruff"


def pins() -> dict[str, str]:
    """What must agree, from the one place that says so."""
    lines = [*PROJECT["project"]["optional-dependencies"]["cpu"], *PROJECT["tool"]["recipes"]["no-deps"]]
    found = (re.fullmatch(r"([\w.-]+)(?:\[[^]]*\])?==(\S+)", line) for line in lines)
    return {m[1]: m[2] for m in found if m}


def test_the_cpu_stack_has_the_pins_of_pyproject():
    assert dict(stack.load("cpu").packages) == pins()


def test_the_conda_environment_takes_its_pins_from_pyproject():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["dependencies"][0] == f"python={stack.load('cpu').python}"
    assert environment["dependencies"][-1] == {"pip": ["--editable .[cpu,dev]"]}
    assert PROJECT["tool"]["recipes"]["no-deps"][0] in (ROOT / "environment.yml").read_text()


def test_what_is_installed_here_is_what_is_pinned():
    from importlib.metadata import version

    assert {name: version(name) for name in pins()} == pins()


def test_continuous_integration_runs_exactly_the_test_command():
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("exec ")]
    assert commands == ["exec bash scripts/test.sh"]


def test_the_light_core_has_no_training_package():
    core = {re.match(r"[\w.-]+", line)[0].lower() for line in PROJECT["project"]["dependencies"]}
    assert core & {"torch", "verl", "ray", "transformers", "megatron-core", "megatron-bridge"} == set()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_are_clean(script):
    done = subprocess.run([str(SHELLCHECK), "-x", str(script)], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout + done.stderr == ""
    assert os.access(script, os.X_OK)


def test_the_code_is_clean():
    for command in (["check", "--quiet"], ["format", "--check", "--quiet"]):
        done = subprocess.run([str(RUFF), *command, str(ROOT)], capture_output=True, text=True)
        assert done.stdout + done.stderr == ""


# ---------------------------------------------------------------------------------------------- finding a Python 3.12


def find_python(path: Path, home: Path, **environment: str) -> subprocess.CompletedProcess:
    tools = ("bash", "dirname", "sed", "cksum", "cut", "flock", "tail", "rm", "touch")
    for tool in tools:
        if not (path / tool).exists():
            (path / tool).symlink_to(shutil.which(tool))
    return subprocess.run(
        [str(path / "bash"), "-c", f'. "{ROOT}/scripts/setup.sh"; find_python'],
        env={"PATH": str(path), "HOME": str(home), **environment},
        capture_output=True,
        text=True,
    )


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def places(tmp_path):
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin", tmp_path / "home"


def test_it_takes_the_python_on_the_path(places):
    path, home = places
    executable(path / "python3.12", f'exec {sys.executable} "$@"')
    assert find_python(path, home).stdout.strip() == str(path / "python3.12")


def test_it_looks_past_a_pyenv_shim_that_does_not_run(places):
    """A shim of a version that is not the active one is on PATH and fails when it is called."""
    path, home = places
    executable(path / "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    executable(path / "python3", "echo 3.11")
    real = executable(home / ".pyenv" / "versions" / "3.12.1" / "bin" / "python3.12", f'exec {sys.executable} "$@"')
    assert find_python(path, home).stdout.strip() == str(real)


def test_it_asks_uv(places):
    path, home = places
    real = executable(home / "uv" / "python3.12", f'exec {sys.executable} "$@"')
    executable(path / "uv", f'[ "$*" = "python find 3.12" ] && echo "{real}"')
    assert find_python(path, home).stdout.strip() == str(real)


def test_without_a_python_3_12_it_says_how_to_get_one(places):
    path, home = places
    executable(path / "python3", "echo 3.11")
    done = find_python(path, home)
    assert done.returncode != 0
    assert done.stderr.startswith("error: no Python 3.12 found. Get one with")
    assert done.stdout == ""


# ---------------------------------------------------------------------------------- interrupted, offline, two at once


@pytest.fixture
def clone(tmp_path):
    """What set-up reads, and a venv whose pip is a fake of ours: it notes its calls and fails on demand."""
    root = tmp_path / "a clone's dir"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup.sh", root / "scripts")
    shutil.copy(ROOT / "pyproject.toml", root)
    pip = f"""case "$*" in
      *"pip --version"*) exit 0 ;;
      *"pip install"*) echo "$@" >> "{root}/calls"; if [ -e "{root}/slow" ]; then sleep 2; fi
        if [ -e "{root}/offline" ]; then echo "ERROR: No network"; exit 1; fi ;;
      *) exec {sys.executable} "$@" ;;
    esac"""
    executable(root / ".venv" / "bin" / "python", pip)
    return root


def set_up(root: Path, **options) -> subprocess.Popen:
    script = f'. "{root}/scripts/setup.sh"; set_up cpu'
    return subprocess.Popen(["bash", "-c", script], stderr=subprocess.PIPE, text=True, **options)


def calls(root: Path) -> int:
    return len((root / "calls").read_text().splitlines()) if (root / "calls").exists() else 0


def test_a_network_that_fails_is_one_sentence_and_the_next_try_goes_on(clone):
    (clone / "offline").touch()
    done = set_up(clone)
    words = done.communicate()[1]
    assert done.returncode == 1
    assert "ERROR: No network" in words
    assert "run the same command again" in words
    (clone / "offline").unlink()
    assert set_up(clone).wait() == 0
    assert calls(clone) == 1 + 2  # the failed one, then the extras and what goes in without its dependencies


def test_setting_up_again_installs_nothing(clone):
    assert set_up(clone).wait() == 0
    assert set_up(clone).wait() == 0
    assert calls(clone) == 2


def test_changed_pins_are_installed(clone):
    assert set_up(clone).wait() == 0
    (clone / "pyproject.toml").write_text((clone / "pyproject.toml").read_text() + "\n# changed\n")
    assert set_up(clone).wait() == 0
    assert calls(clone) == 4


def test_a_second_set_up_waits_for_the_first_and_finds_it_done(clone):
    (clone / "slow").touch()
    first = set_up(clone)
    limit = time.monotonic() + 20
    while calls(clone) == 0:
        assert time.monotonic() < limit
        time.sleep(0.02)
    second = set_up(clone)
    assert "waiting for it" in second.communicate(timeout=60)[1]
    assert (first.wait(timeout=60), second.returncode, calls(clone)) == (0, 0, 2)


def test_an_interrupted_installation_is_taken_up_again(clone):
    (clone / "slow").touch()
    first = set_up(clone, start_new_session=True)
    limit = time.monotonic() + 20
    while calls(clone) == 0:
        assert time.monotonic() < limit
        time.sleep(0.02)
    os.killpg(first.pid, 2)
    assert first.wait(timeout=20) != 0
    assert list((clone / ".venv").glob(".installed*")) == []
    (clone / "slow").unlink()
    assert set_up(clone).wait(timeout=60) == 0


def test_an_environment_that_does_not_run_is_made_again(clone, tmp_path):
    executable(clone / ".venv" / "bin" / "python", "exit 1")
    (clone / ".venv" / "marker").touch()
    (clone / "fake").mkdir()
    make = f'mkdir -p "{clone}/.venv/bin"; cp "{clone}/fake/venv-python" "{clone}/.venv/bin/python"'
    executable(clone / "fake" / "venv-python", 'case "$*" in *tomllib*) echo x==1 ;; *version_info*) echo 3.12 ;; esac')
    found = 'case "$*" in *version_info*) echo 3.12 ;; "--version") echo Python ;; *"-m venv"*) ' + make + " ;; esac"
    executable(clone / "fake" / "python3.12", found)
    environment = {**os.environ, "PATH": f"{clone}/fake:{os.environ['PATH']}"}
    done = set_up(clone, env=environment)
    assert "making it again" in done.communicate(timeout=60)[1]
    assert done.returncode == 0
    assert not (clone / ".venv" / "marker").exists()
