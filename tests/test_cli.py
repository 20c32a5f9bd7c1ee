"""The command line: a thin face, quick to answer, one sentence for a bad input and an exit code that tells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from recipes.cli import main
from recipes.run.directory import create, update_state

NAME = "quickstart/grpo"


def call(*words, **environment):
    return CliRunner().invoke(main, list(words), env=environment)


def test_help_names_every_command_and_answers_without_the_heavy_packages():
    code = (
        "import sys; from click.testing import CliRunner; from recipes.cli import main;"
        "out = CliRunner().invoke(main, ['--help']).output;"
        "print([m for m in ('torch', 'verl', 'ray', 'pandas', 'matplotlib', 'hydra') if m in sys.modules]); print(out)"
    )
    loaded, text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split("\n", 1)
    assert loaded == "[]"
    for command in main.commands:
        assert f"  {command} " in text


@pytest.mark.parametrize("command", sorted(main.commands))
def test_every_command_explains_itself(command):
    done = call(command, "--help")
    assert done.exit_code == 0
    assert main.commands[command].help


def test_list_names_every_recipe_with_its_title():
    assert "quickstart/grpo  " in call("list").output
    assert NAME in json.loads(call("list", "--json").output)


def test_show_and_explain_agree():
    assert "lr: 0.002" in call("show", NAME, "optimizer.lr=2e-3").output
    said = call("explain", NAME, "learning_rate", "optimizer.lr=2e-3").output
    assert said.startswith("optimizer.lr = 0.002\n")
    assert "set by: override optimizer.lr" in said
    assert "before: params/quickstart/" in said


def test_show_diff_base_shows_only_what_differs():
    lines = call("show", NAME, "--diff-base", "seed=7").output.splitlines()
    assert any(line.startswith("trainer.seed = 7") for line in lines)
    assert not any(line.startswith("rollout.engine") for line in lines)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("show", "quickstart/grp"), "error: There is no recipe 'quickstart/grp'; did you mean quickstart/grpo?"),
        (("run", NAME, "--dry-run", "optimzer.lr=3"), "error: Unknown key 'optimzer.lr'"),
        (("explain", NAME, "optimizer.lrr"), "error: A recipe has no key 'optimizer.lrr'; did you mean optimizer.lr"),
        (("watch", "/no/such/run"), "error: /no/such/run does not exist"),
    ],
)
def test_a_bad_input_is_one_sentence_and_exit_code_2(words, sentence):
    done = call(*words)
    assert done.exit_code == 2
    assert sentence in done.output
    assert "Traceback" not in done.output


def test_dry_run_prints_what_would_run_and_starts_nothing(tmp_path):
    done = call("run", NAME, "--dry-run", "--run-dir", str(tmp_path / "run"), "seed=7")
    assert done.exit_code == 0
    assert "VERL_USE_EXTERNAL_MODULES=recipes.cpu.adaptor" in done.output
    assert "-m verl.trainer.main_ppo model_engine=megatron" in done.output
    assert "data.seed=7" in done.output
    assert not (tmp_path / "run").exists()


def test_check_tells_by_its_exit_code():
    assert call("check", NAME, "--anywhere").exit_code == 0
    done = call("check", NAME, "--anywhere", "tensor_parallel=3", "--json")
    assert done.exit_code == 1
    rules = [finding["rule"] for finding in json.loads(done.output)]
    assert {"layout.heads", "layout.world", "layout.kv_heads"} <= set(rules)


def test_check_says_what_is_about_this_machine_and_where_memory_is_short():
    npu = "qwen3/grpo_8b_vllm_a2"
    done = call("check", npu)
    assert done.exit_code == 1
    assert "hardware.present" in done.output
    assert "--anywhere leaves that out" in done.output
    done = call("check", npu, "--anywhere")
    assert done.exit_code == 0
    assert "--anywhere leaves that out" not in done.output
    assert "note: training may need 95.7 GB at its fullest" in done.output
    assert "a device has 64" in done.output
    fits = call("check", npu, "--anywhere", "batch.max_tokens=6144", "rollout.memory=0.45")
    assert "may need" not in fits.output


def test_a_run_that_preflight_refuses_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RECIPES_WORK", str(tmp_path / "work"))
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults: [quickstart/base]\nprepare: []\n")
    done = call("run", str(mine), "tensor_parallel=3", "--run-dir", str(tmp_path / "run"))
    assert done.exit_code == 2
    assert "nothing was started" in done.output
    assert "1, 2 or 4 do" in done.output
    assert "there is no such directory" in done.output  # the model
    assert not (tmp_path / "run").exists()
    done = call("run", str(mine), "--waive", "layout.hed", "--run-dir", str(tmp_path / "run"))
    assert "there is no rule 'layout.hed'; did you mean layout.heads" in done.output


def test_a_model_directory_without_weights_is_refused(tmp_path, monkeypatch):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    done = call("check", NAME, f"model_path={model}")
    assert done.exit_code == 1
    assert "has no weights" in done.output
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "model-1.safetensors").touch()
    assert "1 of 2 shards are missing, such as model-2.safetensors" in call("check", NAME, f"model_path={model}").output


def test_an_external_module_that_is_not_there_is_refused():
    done = call("check", NAME, "external_modules=no_such_module")
    assert done.exit_code == 1
    assert "has no module no_such_module" in done.output


def test_an_external_module_of_the_environment_is_checked_too():
    done = call("check", NAME, VERL_USE_EXTERNAL_MODULES="megatron_adaptor_missing")
    assert "has no module megatron_adaptor_missing" in done.output


def test_export_writes_an_executable_script(tmp_path):
    done = call("export", NAME, "-o", str(tmp_path / "run.sh"))
    assert done.exit_code == 0
    assert os.access(tmp_path / "run.sh", os.X_OK)
    assert (tmp_path / "run.sh").read_text() == call("export", NAME).output


def test_export_to_a_place_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").touch()
    done = call("export", NAME, "-o", str(tmp_path / "file" / "run.sh"))
    assert done.exit_code == 2
    assert "cannot be written" in done.output


def test_judge_tells_by_its_exit_code(tmp_path):
    run = create(tmp_path / "run", "r", {"steps": 2})
    update_state(run, state="failed", cause="exit code 1")
    done = call("judge", str(run.path), "--json")
    assert done.exit_code == 1
    assert json.loads(done.output)["passed"] is False
    assert json.loads(run.verdict_file.read_text())["passed"] is False


def test_plot_draws_a_run_that_never_got_to_a_step(tmp_path):
    run = create(tmp_path / "a run's dir", "r", {"steps": 2})
    update_state(run, state="failed", cause="exit code 1")
    drawn = call("plot", str(run.path)).output.split("\n")
    assert {Path(line).suffix for line in drawn if line} == {".png", ".svg", ".csv"}
