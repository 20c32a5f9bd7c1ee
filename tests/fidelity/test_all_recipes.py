"""Every recipe of the workbook composes against its own stack's verl, and nothing in it is known to be wrong."""

from __future__ import annotations

import sys
import time

import pytest

from recipes import card, export, params, preflight
from recipes.command import build, compose_verl
from recipes.stack import verl_version

NAMES = params.names()
# Processor seconds for a recipe, its command and verl's whole configuration, once verl's files are read. The goal is 1;
# a slow and shared processor may take three times as long without a fault of ours.
SECONDS = 3.0


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_has_no_key_its_verl_does_not_know(name, verl):
    verl(verl_version(params.compose(name).recipe.stack))
    build(params.compose(name), environment={})  # reads verl's files
    start = time.process_time()
    composed = params.compose(name, run_dir="/run", work="/work")
    command = build(composed, environment={})
    config = compose_verl(command, composed)
    assert time.process_time() - start < SECONDS
    assert config.actor_rollout_ref.actor.strategy == composed.recipe.engine
    assert config.trainer.nnodes == composed.recipe.nodes
    assert command.verl == verl_version(composed.recipe.stack)


@pytest.mark.parametrize("name", NAMES)
def test_preflight_finds_nothing_in_a_recipe(name):
    composed = params.compose(name, run_dir="/run", work="/work")
    assert [f"{f.rule}: {f}" for f in preflight.check(composed, here=False)] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_what_it_is(name):
    recipe = params.compose(name).recipe
    assert recipe.title
    if recipe.hardware.startswith("atlas"):
        assert any(note.startswith("Never run on NPUs by this workbook") for note in recipe.notes)


@pytest.mark.parametrize("name", NAMES)
def test_the_card_of_a_recipe_claims_what_holds_and_says_what_nobody_has_seen(name, verl):
    verl(verl_version(params.compose(name).recipe.stack))
    found = card.card(name, python=sys.executable)
    assert found.passed, found.text()
    states = {(item.state, item.what) for item in found.items}
    if params.compose(name).recipe.hardware.startswith("atlas"):
        assert {what for state, what in states if state == "open"} >= {f"run on {params.compose(name).recipe.hardware}"}
    else:
        assert ("tested", "runs") in states
    assert name in card.verified() or ("tested", "runs") in states


def test_a_card_tells_when_something_does_not_hold(monkeypatch, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults: [quickstart/base]\nparallel: {tensor: 3}\nverl: {trainer.no_such_key: 1}\n")
    found = card.card(str(mine), python=sys.executable)
    assert not found.passed
    assert {item.what for item in found.items if item.state == "failed"} == {"composes", "preflight"}


def test_verified_names_only_recipes_that_are():
    assert set(card.verified()) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_script_in_recipes_shell_is_the_one_export_writes(name, verl):
    """Drift: after changing a recipe, run `recipes export --all recipes/shell`."""
    verl(verl_version(params.compose(name).recipe.stack))
    written = params.home() / "recipes" / "shell" / export.file_name(name)
    assert written.read_text() == export.script(name, python=sys.executable)


def test_recipes_shell_holds_no_script_of_a_recipe_that_is_gone():
    found = {path.name for path in (params.home() / "recipes" / "shell").iterdir()}
    assert found == {export.file_name(name) for name in NAMES}


def test_a_value_for_a_mesh_is_said_once_and_reaches_actor_reference_and_ascend_alike():
    composed = params.compose("qwen3/grpo_235b_a22b_256k_vllm_a3_16nodes", ["parallel.context=4"], run_dir="/run")
    config = compose_verl(build(composed, environment={}), composed).actor_rollout_ref
    assert config.actor.megatron.context_parallel_size == 4
    assert config.ref.megatron.context_parallel_size == 4
    assert config.actor.megatron.override_transformer_config.context_parallel_size == 4


@pytest.mark.parametrize("stack", ["ascend-9.0.0", "ascend-9.0.0-verl-0.9.0"])
def test_mindspeed_s_engine_gets_the_recipe_s_settings_where_it_reads_them(stack, verl):
    verl(verl_version(stack))
    composed = params.compose("qwen3/grpo_30b_a3b_mindspeed_sglang_a3", [f"stack={stack}"], run_dir="/run")
    actor = compose_verl(build(composed, environment={}), composed).actor_rollout_ref.actor
    assert (actor.strategy, actor.mindspeed.strategy) == ("mindspeed", "mindspeed_megatron")
    assert actor.mindspeed.pipeline_model_parallel_size == 4
    assert actor.mindspeed.mcore_kwargs.recompute_granularity == "full"
    assert actor.mindspeed.mcore_kwargs.moe_grouped_gemm is True


@pytest.mark.parametrize(("stack", "told"), [("ascend-9.0.0", True), ("ascend-9.1.0", False)])
def test_gradients_leave_the_device_with_the_weights_on_every_verl(stack, told, verl):
    """Up to 0.9.0 they must be told to; 0.9.1 has no such key and does it by itself."""
    verl(verl_version(stack))
    composed = params.compose("qwen3/grpo_235b_a22b_vllm_a3_8nodes", [f"stack={stack}"], run_dir="/run")
    said = "actor_rollout_ref.actor.megatron.grad_offload=true" in build(composed, environment={}).overrides
    assert said is told
