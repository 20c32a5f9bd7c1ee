"""The command: what Hydra reads back from argv is exactly what the recipe says, composed against the real verl."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString

from recipes import export, params, verl_schema
from recipes.command import build, compose_verl, external_modules, quote
from recipes.errors import RecipeError

NAME = "quickstart/grpo"


def compose(*overrides, run_dir="/runs/x", **parameters):
    return params.compose(NAME, overrides, parameters, run_dir=run_dir, work="/work place/it's")


def plain(value):
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    return value


@pytest.mark.parametrize(
    "value",
    [
        "a b",
        "1",
        "1e-6",
        "null",
        "it's",
        'q"q',
        "a,b",
        "[x]",
        "{a:1}",
        "",
        " ",
        "é",
        "$x",
        "a=b",
        "\\",
        "a\\'b",
        "x\\\\",
    ]
    + ["/p/q.yaml", "-", ".5", "1_000", "e5", "._", "pkg://a.b", "Et*10|t*4L", "true", "~", "${a.b}", "a:b", "inf"]
    + ["0x1", "http://x:1/y?z=1&b=2", "@x", "%", "+1", "a#b", "TRUE", "nan", "0012345"]
    + [None, True, False, 1.5, 3, -1, 1e-6, 5e-5, [1, "a b", None], {"ab": [1], "c": "1"}, [], [["x"]]],
)
def test_hydra_reads_back_the_value_that_was_written(value):
    read = plain(OverridesParser.create().parse_override(f"k={quote(value)}").value())
    assert read == value
    assert type(read) is type(value)


def test_a_mapping_key_hydra_cannot_write_is_refused():
    with pytest.raises(RecipeError, match="cannot be written"):
        quote({"a b": 1})


def test_verl_composes_what_the_recipe_says():
    composed = compose("optimizer.lr=1e-3", "trainer.experiment=0012345")
    verl = compose_verl(build(composed), composed)
    assert verl.actor_rollout_ref.actor.optim.lr == 1e-3
    assert verl.actor_rollout_ref.actor.strategy == "megatron"
    assert verl.trainer.experiment_name == "0012345"
    assert verl.actor_rollout_ref.model.path == "/work place/it's/quickstart/model"
    assert verl.data.train_batch_size == composed.recipe.batch.train


def test_plus_is_decided_by_verl_s_own_files():
    overrides = build(
        compose("transformer.attention_backend=local", "transformer.masked_softmax_fusion=false")
    ).overrides
    prefix = "actor_rollout_ref.actor.megatron.override_transformer_config"
    assert f"{prefix}.attention_backend=local" in overrides  # verl declares it
    assert f"+{prefix}.masked_softmax_fusion=false" in overrides  # it does not


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("trainer.balance_bach", "trainer.balance_batch"),
        ("actor_rollout_ref.actor.megatron.grad_offload", "param_offload"),
        ("no.such.group", ""),
    ],
)
def test_a_key_this_verl_does_not_have_is_refused_with_the_nearest(key, nearest):
    with pytest.raises(RecipeError, match=f"verl 0.9.1 has no key '{key}'.*{nearest}"):
        build(compose(f"verl.{key}=true"))


def test_a_key_under_verl_replaces_what_a_field_says():
    overrides = build(compose("verl.trainer.total_training_steps=7")).overrides
    assert [o for o in overrides if "total_training_steps" in o] == ["trainer.total_training_steps=7"]


def test_extra_arguments_come_last_and_as_they_are():
    assert build(compose("extra_args=[+a.b=1, ++c=2]")).argv[-2:] == ("+a.b=1", "++c=2")


def test_external_modules_are_merged_in_order_without_blanks_or_duplicates():
    composed = params.compose(NAME, (), {"external_modules": "mine,image"})
    merged = external_modules(composed, {"VERL_USE_EXTERNAL_MODULES": " image, ,other,"})
    assert merged == ("image", "other", "recipes.cpu.adaptor", "mine")


@pytest.mark.parametrize("name", ["a b", "a;b", "$(x)", "a/b", "-x"])
def test_an_external_module_that_is_no_module_name_is_refused(name):
    with pytest.raises(RecipeError, match="no name of a Python module"):
        external_modules(params.compose(NAME), {"VERL_USE_EXTERNAL_MODULES": name})


def test_ray_workers_get_the_external_modules_too():
    command = build(compose(), environment={"VERL_USE_EXTERNAL_MODULES": "image"})
    assert command.environment["VERL_USE_EXTERNAL_MODULES"] == "image,recipes.cpu.adaptor"
    carried = "ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES='image,recipes.cpu.adaptor'"
    assert f"+{carried}" in command.overrides


def test_each_attempt_writes_its_own_metrics_file():
    first, second = (build(compose(), attempt=n).environment["VERL_FILE_LOGGER_PATH"] for n in (1, 2))
    assert first != second


def test_an_interpreter_without_verl_gets_the_schema_from_the_cache(tmp_path, python):
    """The light core alone composes recipes: a bare interpreter, and a cache filled from the installed verl."""
    bare = tmp_path / "bare" / "bin" / "python"
    subprocess.run([python, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    installed = verl_schema.find("0.9.1", python).directory
    target = verl_schema.cache() / "0.9.1" / "verl" / "trainer" / "config"
    target.parent.mkdir(parents=True)
    target.symlink_to(installed)
    assert verl_schema.interpreter(str(bare)).verl is None
    here, there = build(compose(), python=python), build(compose(), python=str(bare))
    assert here.overrides == there.overrides


def test_without_verl_cache_or_network_it_says_what_could_not_be_checked(tmp_path, python):
    with pytest.raises(RecipeError, match="keys could not be checked"):
        verl_schema.find("0.0.1", python, fetch=False)


def test_a_training_interpreter_that_cannot_be_started_is_named():
    with pytest.raises(RecipeError, match="/no/such/python"):
        verl_schema.interpreter("/no/such/python")


# ------------------------------------------------------------------------------------------------ the exported script


@pytest.mark.parametrize("run_dir", ["/tmp/plain", "/tmp/with space and it's"])
@pytest.mark.parametrize("named", ["", " image, ,other,", "recipes.cpu.adaptor"])
def test_the_script_launches_the_same_argv_and_environment(tmp_path, python, run_dir, named, monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", named)
    work = "/work place/it's"
    command = build(params.compose(NAME, run_dir=run_dir, work=work), python=python)
    recorder = tmp_path / "python"
    recorder.write_text(
        f"#!{python}\nimport json, os, sys\n"
        "if sys.argv[2:3] != ['-m'] and '-u' not in sys.argv: sys.exit(0)\n"
        f"json.dump([sys.argv[1:], dict(os.environ)], open({str(tmp_path / 'seen.json')!r}, 'w'))\n"
    )
    recorder.chmod(0o755)
    path = tmp_path / "run.sh"
    path.write_text(export.script(NAME, python=python))
    environment = {**os.environ, "PYTHON": str(recorder), "RUN_DIR": str(tmp_path) + run_dir, "RECIPES_WORK": work}
    command = build(params.compose(NAME, run_dir=str(tmp_path) + run_dir, work=work), python=python)
    subprocess.run(["bash", str(path)], check=True, env=environment)
    argv, seen = json.loads((tmp_path / "seen.json").read_text())
    assert argv == list(command.argv[1:])
    assert {k: seen.get(k) for k in command.environment} == dict(command.environment)

    printed = subprocess.run(["bash", str(path), "--print", "a.b=1"], check=True, env=environment, capture_output=True)
    *variables, line, _ = printed.stdout.decode().split("\n")
    assert shlex.split(line)[1:] == [*command.argv[1:], "a.b=1"]
    assert dict(shlex.split(v)[0].split("=", 1) for v in variables) == dict(command.environment)


def test_the_script_is_clean_under_shellcheck(tmp_path, python):
    path = tmp_path / "run.sh"
    path.write_text(export.script(NAME, ["trainer.experiment=$(touch /tmp/x)`a`\"'"], python=python))
    done = subprocess.run([str(Path(python).parent / "shellcheck"), str(path)], capture_output=True, text=True)
    assert done.stdout + done.stderr == ""


def test_hostile_text_in_a_recipe_reaches_the_script_as_text(tmp_path, python):
    text = "$(touch pwned) `touch pwned` \"; touch pwned; ' \\"
    path = tmp_path / "run.sh"
    path.write_text(export.script(NAME, [f"trainer.experiment={text}"], python=python))
    environment = {**os.environ, "RUN_DIR": str(tmp_path / "r"), "RECIPES_WORK": "/w"}
    done = subprocess.run(["bash", str(path), "--print"], env=environment, capture_output=True, text=True, cwd=tmp_path)
    argv = shlex.split(done.stdout.strip().split("\n")[-1])
    command = build(params.compose(NAME, [f"trainer.experiment={text}"], run_dir=str(tmp_path / "r"), work="/w"))
    assert argv[1:] == list(command.argv[1:])
    assert not (tmp_path / "pwned").exists()
