"""Completion: in a real bash, through readline, and what it is made of."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from recipes import completion, params
from recipes.cli import main

RECIPES = Path(sys.executable).parent / "recipes"


def ask(*words: str, **environment: str) -> list[str]:
    """What `recipes` answers a bash that asks about the last of the words."""
    asked = {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    with pytest.MonkeyPatch.context() as patch:
        for name, text in {**asked, **environment}.items():
            patch.setenv(name, text)
        answer = completion.Bash(main, {}, "recipes", "_RECIPES_COMPLETE").complete()
    return [line.partition(",")[2] for line in answer.splitlines()]


@pytest.fixture(scope="module")
def bash():
    """Types into an interactive bash, completion switched on as README says; returns the words it then has."""
    expecting = pytest.importorskip("pexpect.fdpexpect")
    path = f"{RECIPES.parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "TERM": "dumb", "INPUTRC": "/dev/null"}
    # Not pexpect.spawn: it forks, and a thread of another test could leave the child waiting for ever.
    ours, its = pty.openpty()
    termios.tcsetwinsize(ours, (50, 500))
    words = ["bash", "--norc", "--noprofile", "-i"]
    process = subprocess.Popen(words, stdin=its, stdout=its, stderr=its, env=environment, start_new_session=True)
    os.close(its)
    child = expecting.fdspawn(ours, encoding="utf-8", timeout=60)

    def typed(line: str) -> list[str]:
        # Control-A and -E: the completed line becomes the arguments of printf, between marks no echo of it has.
        child.send(f'{line}\x01printf \'<%s>\' be""gin \x05 e""nd\n')
        child.expect(r"<begin>(.*)<end>")
        return re.findall(r"<([^>]*)>", child.match[1])

    child.sendline('eval "$(_RECIPES_COMPLETE=bash_source recipes)"')
    yield typed
    child.close()  # bash ends with its terminal
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("recipes expl\t", ["explain"]),
        ("recipes show quickst\t", ["show", "quickstart/grpo"]),
        ("recipes show quickst\t --diff\t", ["show", "quickstart/grpo", "--diff-base"]),
        ("recipes explain quickstart/grpo learn\t", ["explain", "quickstart/grpo", "learning_rate"]),
        ("recipes check quickstart/grpo memory.recompute=f\t", ["check", "quickstart/grpo", "memory.recompute=full"]),
        # No space after `=` and after a group's dot: there is more to type.
        ("recipes check quickstart/grpo tensor_par\t4", ["check", "quickstart/grpo", "tensor_parallel=4"]),
        ("recipes check quickstart/grpo opti\tlr\t3", ["check", "quickstart/grpo", "optimizer.lr3"]),
        ("recipes check quickstart/grpo seed=\t7", ["check", "quickstart/grpo", "seed=7"]),
        ("recipes stack show ascend-9.1\t", ["stack", "show", "ascend-9.1.0"]),
    ],
)
def test_bash_completes(bash, line, words):
    assert bash(line) == ["recipes", *words]


def test_recipes_are_completed_wherever_one_is_named():
    for command in ("show", "explain", "check", "run", "export", "layouts", "simulate", "card", "rehearse", "doctor"):
        assert ask("recipes", command, "") == params.names()


def test_keys_come_a_group_at_a_time_and_with_those_only_the_recipe_has():
    first = ask("recipes", "explain", "quickstart/grpo", "")
    assert {"optimizer.", "tensor_parallel", "nodes", "env."} <= set(first)
    assert len(first) < 60
    assert ask("recipes", "explain", "quickstart/grpo", "env.VERL_P") == ["env.VERL_PLATFORM"]
    assert "learning_rate" in ask("recipes", "explain", "no/such/recipe", "")


def test_overrides_are_completed_after_others_and_with_values_where_there_are_few():
    before = ("recipes", "check", "quickstart/grpo", "nodes", "=", "2")
    assert ask(*before, "rollout.eng") == ["rollout.engine=", "rollout.engine_kwargs="]
    assert ask(*before, "rollout.engine", "=") == ["vllm", "sglang", "hf_cpu"]
    assert ask(*before, "checkpoint_strict", "=", "t") == ["true"]
    assert ask(*before, "stack", "=", "ascend-9.1") == ["ascend-9.1.0"]
    assert ask(*before, "seed", "=") == []
    assert "run_dir=" not in ask(*before, "")


def test_runs_are_completed_the_newest_first_and_files_where_there_are_none(tmp_path):
    (tmp_path / "params").mkdir()
    there = {"RECIPES_HOME": str(tmp_path)}
    assert ask("recipes", "watch", "", **there) == [""]  # click's word for: files
    for age, name in enumerate(("old", "new")):
        run = tmp_path / "runs" / "quickstart-grpo" / name
        run.mkdir(parents=True)
        (run / "run.json").touch()
        os.utime(run, (1e9 + age, 1e9 + age))
    found = [str(tmp_path / "runs" / "quickstart-grpo" / name) for name in ("new", "old")]
    for words in (["watch"], ["stop"], ["judge"], ["diff", "RUN_A"], ["run", "--resume"], ["replay"], ["plot"]):
        assert ask("recipes", *words, "", **there) == found
    assert ask("recipes", "judge", "./train.l", **there) == ["./train.l"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_click_s_own(shell):
    source = subprocess.run(
        [RECIPES], env=os.environ | {"_RECIPES_COMPLETE": f"{shell}_source"}, capture_output=True, text=True, check=True
    )
    assert f"_RECIPES_COMPLETE={shell}_complete" in source.stdout


def test_completing_a_command_loads_nothing_heavy():
    code = (
        "import sys, atexit; from recipes.cli import main\n"
        "heavy = ('torch', 'verl', 'ray', 'pandas', 'matplotlib', 'hydra')\n"
        "atexit.register(lambda: print([m for m in heavy if m in sys.modules], file=sys.stderr))\n"
        "main(prog_name='recipes')"
    )
    asked = {"COMP_WORDS": "recipes\ncheck\nquick", "COMP_CWORD": "2", "_RECIPES_COMPLETE": "bash_complete"}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("plain,quickstart/grpo\n", "[]\n")
