"""`recipes stack …`: what people and machines read of it, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from recipes import stack
from recipes.cli import Sentences
from recipes.cli_stack import stack as group


@pytest.fixture
def run():
    def call(*words: str):
        done = CliRunner().invoke(Sentences("recipes", commands={"stack": group}), ["stack", *map(str, words)])
        return done.exit_code, done.stdout, done.stderr

    return call


def test_every_stack_is_named(run):
    code, out, _ = run("show")
    assert (code, [line.split()[0] for line in out.splitlines()]) == (0, stack.names())


def test_the_table_says_ref_kind_commit_and_why(run):
    code, out, _ = run("show", "ascend-9.1.0")
    assert code == 0
    line = next(line for line in out.splitlines() if "Megatron-LM " in line)
    assert line.split() == ["3", "Megatron-LM", "core_v0.18.0", "tag", "ba7b5ebce12a", "editable"]
    assert "There is also a branch core_r0.18.0, and it moves" in out
    assert "vllm-ascend 0.23.0 wants ==5.5.4: not met" in out


def test_as_json_the_table_is_whole(run):
    told = json.loads(run("show", "ascend-9.0.0", "--json")[1])
    assert told["repositories"]["MindSpeed"]["depth"] == "full"
    assert told["repositories"]["transformers"]["commit"] == "cc7ab9be508ce6ed3637bba9e50367b29b742dc6"


def test_an_unknown_stack_ends_as_one_sentence(run):
    code, out, err = run("show", "ascend-9")
    assert (code, out) == (2, "")
    assert err.startswith("error: There is no stack 'ascend-9'")


def test_this_machine_has_the_cpu_stack_and_not_an_ascend_one(run):
    code, out, _ = run("verify", "cpu", "--python", sys.executable)
    assert code == 0
    assert out.splitlines()[-1] == f"{sys.executable}: all as stack cpu wants."
    code, out, _ = run("verify", "ascend-9.1.0", "--python", sys.executable, "--json")
    told = json.loads(out)
    assert (code, told["same"]) == (1, False)
    assert {"name", "wanted", "found", "verdict", "why", "place"} <= set(told["checked"][0])


def test_scripts_are_written_executable_and_dockerfiles_are_not(run, tmp_path):
    for command, name, executable in (("install", "install.sh", True), ("dockerfile", "Dockerfile", False)):
        code, out, _ = run(command, "ascend-9.1.0", "--hardware", "atlas_a3", "-o", tmp_path / name)
        assert (code, out) == (0, f"{tmp_path / name}\n")
        assert bool((tmp_path / name).stat().st_mode & 0o111) is executable
        assert run(command, "ascend-9.1.0", "--hardware", "atlas_a3")[1] == (tmp_path / name).read_text()


def test_hardware_a_stack_is_not_made_for_ends_as_one_sentence(run):
    code, _, err = run("install", "ascend-9.1.0", "--hardware", "atlas_a5")
    assert (code, err) == (2, "error: Stack ascend-9.1.0 is not made for 'atlas_a5': it knows atlas_a2, atlas_a3.\n")


def test_drift_is_told_by_file_and_line_and_ends_with_one(run, tmp_path):
    (tmp_path / "npu.sh").write_text(
        "git clone -b core_r0.18.0 https://github.com/NVIDIA/Megatron-LM.git\n# torch_npu\n"
    )
    code, out, _ = run("drift", tmp_path, "--stack", "ascend-9.1.0")
    assert code == 1
    assert out.splitlines()[0] == "npu.sh:1: error: a branch where a tag was meant"
    code, out, _ = run("drift", tmp_path, "--stack", "ascend-9.1.0", "--json")
    (one,) = json.loads(out)["drifts"]
    assert (code, one["verdict"], one["severity"], one["line"]) == (1, "branch_for_tag", "error", 1)
    assert run("drift", tmp_path, "--stack", "ascend-9.1.0", "--exclude", "*.sh")[0] == 0


def test_what_a_file_says_cannot_colour_or_move_the_terminal(run, tmp_path):
    (tmp_path / "npu.sh").write_text(
        "# torch_npu\ngit clone -b 'v1\x1b[2J' https://github.com/NVIDIA/Megatron-LM.git\n"
    )
    assert "\x1b" not in run("drift", tmp_path, "--stack", "ascend-9.1.0")[1]


def test_help_needs_nothing_heavy():
    code = "import sys, recipes.cli_stack, recipes.stack.drift, recipes.stack.verify;"
    code += "print([m for m in ('torch', 'verl', 'ray', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
