"""`recipes doctor` as a user meets it: sections, exit codes, JSON, and never a pass for what was not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner
from fake_node import compose

from recipes import doctor
from recipes.cli import main
from recipes.doctor import lines, machine, node, software
from recipes.finding import SEVERITIES


@pytest.fixture(autouse=True)
def _anywhere(monkeypatch, fake):
    """A machine without NPUs and with room, wherever the tests run. The stack is compared in tests/stack."""
    make = node.make
    monkeypatch.setattr(node, "make", lambda *given: replace(make(*given), root=fake.root))
    monkeypatch.setenv("PATH", str(fake.bin))
    monkeypatch.setattr(machine, "OPEN_FILES", {"npu": 1, "cpu": 1})
    monkeypatch.setattr(software.verifying, "verify", lambda stack, python, needs: [])


def call(*words):
    return CliRunner().invoke(main, ["doctor", *words])


def test_a_recipe_for_npus_fails_here_and_says_what_it_could_not_see(tmp_path):
    done = call("qwen3/grpo_30b_a3b_vllm_a3", "--deadline", "30", "--run-dir", str(tmp_path))
    assert done.exit_code == 1, done.output
    assert "error    devices " in done.output
    assert "not looked at, because npu-smi is neither on PATH" in done.output
    assert "not looked at, which says nothing of them." in done.output
    headings = [line for line in done.output.splitlines() if line and not line.startswith(" ")]
    assert headings[:-1] == ["versions", "devices", "machine", "network", "software", "model", "data", "cluster"]


def test_json_has_the_same_lines_with_their_findings():
    done = call("qwen3/grpo_30b_a3b_vllm_a3", "--deadline", "30", "--json")
    told = json.loads(done.stdout)
    assert done.exit_code == 1
    assert told["ready"] is False
    assert told["recipe"] == "qwen3/grpo_30b_a3b_vllm_a3"
    assert sum(told["counts"].values()) == len(told["lines"])
    for line in told["lines"]:
        assert line["state"] in doctor.STATES
        if line["state"] in SEVERITIES:
            assert line["finding"]["severity"] == line["state"]
            assert line["finding"]["rule"].startswith(f"doctor.{line['section']}.")
            assert line["finding"]["keys"] and line["finding"]["remedy"] and line["finding"]["noticed"], line
            assert line["finding"]["source"], line
        else:
            assert line["finding"] is None


def test_without_a_name_it_looks_at_the_machine_in_general():
    done = call()
    assert done.exit_code == 0, done.output
    assert "no recipe names one" in done.output
    assert "open files" in done.output


@pytest.mark.parametrize("words", [("no/such_recipe",), ("quickstart/grpo", "no.such.key=1")])
def test_a_recipe_that_does_not_compose_is_one_sentence(words):
    done = call(*words)
    assert done.exit_code == 2
    assert done.output.startswith("error: ")


def test_a_section_that_cannot_be_looked_at_does_not_hide_the_others(monkeypatch):
    def fails(node):
        raise PermissionError(13, "Permission denied", "/proc/net")
        yield

    monkeypatch.setattr(doctor.network, "look", fails)
    found = list(doctor.examine(None, python=sys.executable))
    (line,) = (line for line in found if line.section == "network")
    assert line.state == "unseen"
    assert "Permission denied" in line.text
    assert found[-1].section == "cluster"


def test_text_from_outside_is_shown_as_text():
    hostile = "\x1b]8;;http://x\x07[red]/models\r\n\u202e" + "y" * 999
    line = lines.Section("model").fault("directory", {"model.path": hostile}, hostile)
    assert "\x1b" not in line.text and "\n" not in line.text and "\u202e" not in line.text
    assert len(line.finding.sentence) <= lines.SHOWN
    assert "[red]" in line.text


def test_the_command_line_does_not_load_it_before_it_is_asked():
    code = "import sys, recipes.cli; print([m for m in sys.modules if m.startswith('recipes.doctor')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_the_environment_of_the_run_is_what_the_recipe_adds_to_the_callers():
    composed = compose("qwen3/grpo_8b_vllm_a2")
    made = node.make(composed, sys.executable, {"HCCL_CONNECT_TIMEOUT": "1", "VERL_USE_EXTERNAL_MODULES": "mine"})
    assert made.environment["HCCL_CONNECT_TIMEOUT"] == "1500"
    assert made.environment["VERL_USE_EXTERNAL_MODULES"] == "mine,megatron_adaptor"
    assert made.modules == ("mine", "megatron_adaptor")
    assert node.make(None, sys.executable, {"VERL_USE_EXTERNAL_MODULES": "a, b,"}).modules == ("a", "b")
