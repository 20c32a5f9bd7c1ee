"""A user's launch becomes a recipe that gives verl the same configuration, and a report that hides nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from recipes import cli_tools, migrate, params, verl_schema
from recipes.command import build, compose_verl
from recipes.errors import RecipeError
from recipes.export import script
from recipes.migrate import fields
from recipes.migrate.text import recipe_text

SCRIPTS = Path(__file__).parent / "scripts"
ASCEND = "ascend-9.1.0"
MINIMAL = (
    *("model_engine=megatron", "data.train_files=/d/a.parquet", "data.val_files=/d/b.parquet"),
    *("data.train_batch_size=32", "data.max_prompt_length=512", "data.max_response_length=512"),
    *("actor_rollout_ref.model.path=/models/Qwen3-8B", "actor_rollout_ref.actor.optim.lr=1e-6"),
    *("actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.name=vllm"),
    *("actor_rollout_ref.rollout.n=4", "algorithm.adv_estimator=grpo", "trainer.device=npu"),
    *("trainer.n_gpus_per_node=8", "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2"),
)


@pytest.fixture(scope="module", autouse=True)
def _one_cache_for_wheels(tmp_path_factory):
    """Stacks whose verl is not installed bring their wheel once for the module, not once a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECIPES_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def migrated(*words, stack=ASCEND, **options):
    return migrate.migrate(words, stack, python=sys.executable, **options)


def from_script(name, *arguments, **options):
    return migrated(str(SCRIPTS / f"{name}.sh"), *arguments, **options)


def recipe(found, tmp_path, **places):
    path = tmp_path / "migrated.yaml"
    path.write_text(found.recipe)
    return params.compose(str(path), **places)


def changed(found):
    return {item.key: item.sentence for item in found.changed}


def unknown(found):
    return {item.key: item.sentence for item in found.unknown}


# ------------------------------------------------------------------------------------------------- the same run


@pytest.mark.slow
@pytest.mark.parametrize("name", params.names())
def test_an_exported_script_comes_back_as_the_recipe_it_was(name, tmp_path):
    ours = params.compose(name, run_dir="/run", work="/work")
    command = build(ours, python=sys.executable, environment={})
    exported = tmp_path / "exported.sh"
    exported.write_text(script(name, python=sys.executable))
    facts = {"hardware": ours.recipe.hardware, "model": ours.recipe.model.name}
    found = migrated(str(exported), stack=ours.recipe.stack, **facts)
    again = build(recipe(found, tmp_path, run_dir="/run", work="/work"), python=sys.executable, environment={})
    assert sorted(again.overrides) == sorted(command.overrides)
    assert again.environment == command.environment
    assert again.entry == command.entry
    assert (found.unknown, found.differences) == ((), ())


@pytest.mark.parametrize("name", ["arrays", "one_command", "several_nodes", "function", "ray_job"])
def test_verl_sees_what_it_saw_before(name, tmp_path):
    """Both are composed by Hydra; only what the report names, and the workbook's own places, may differ."""
    found = from_script(name)
    assert (found.complete, found.differences) == (True, ())
    composed = recipe(found, tmp_path, run_dir="/run", work="/work")
    ours = compose_verl(build(composed, python=sys.executable, environment={}), composed)
    told = {item.key: item.value for item in found.carried}
    for key in ("data.train_batch_size", "actor_rollout_ref.rollout.n", "actor_rollout_ref.model.path"):
        assert told[key] == str(verl_schema._node(ours, key)._value())


def test_a_value_nobody_gave_is_verls_and_not_the_recipes(tmp_path):
    found = migrated(*(word for word in MINIMAL if "adv_estimator" not in word))
    composed = recipe(found, tmp_path).recipe
    assert composed.algorithm.advantage == "gae"
    assert composed.trainer.val_before_train is True
    assert composed.checkpoint.resume == "auto"
    assert "verl's default" in changed(found)["trainer.val_before_train"]


# ------------------------------------------------------------------------------------------------- the recipe


def test_keys_become_fields_and_what_has_none_goes_under_verl(tmp_path):
    found = from_script("arrays")
    r = recipe(found, tmp_path).recipe
    assert (r.hardware, r.nodes, r.devices, r.model.name) == ("atlas_a3", 2, None, "qwen3_30b_a3b")
    assert (r.batch.max_tokens, r.batch.dynamic, r.data.max_response_length) == (15360, True, 8192)
    assert (r.parallel.tensor, r.parallel.expert) == (4, 8)
    assert r.transformer == {"moe_router_dtype": "fp32"}
    assert (r.memory.recompute, r.memory.recompute_method, r.memory.recompute_layers) == ("full", "uniform", 1)
    assert r.rollout.engine_kwargs == {"attention_backend": "ascend"}
    assert r.trainer.experiment == "Qwen3-30B-A3B-2/16-n5"
    assert r.verl == {}


def test_a_recipe_says_nothing_twice():
    text = from_script("one_command").recipe
    assert "log_prob_micro: 8" in text
    assert "context" not in text  # the default
    assert (
        "log_prob_micro" not in migrated(*MINIMAL, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2").recipe
    )  # as micro


def test_with_a_base_only_what_differs_is_said(tmp_path):
    exported = tmp_path / "exported.sh"
    exported.write_text(script("qwen3/grpo_8b_vllm_a2", ["batch.train=512"], python=sys.executable))
    found = migrated(str(exported), base="qwen3/grpo_8b_vllm_a2", model="qwen3_8b", hardware="atlas_a2")
    lines = [line for line in found.recipe.splitlines() if not line.startswith("#")]
    assert lines[0] == "defaults: [qwen3/grpo_8b_vllm_a2]"
    assert "  train: 512" in lines
    path = tmp_path / "mine.yaml"
    path.write_text(found.recipe)
    assert params.repeated(path) == []


def test_several_files_stay_several(tmp_path):
    word = "data.train_files=['/d/a.parquet', '/d/c.parquet']"
    composed = recipe(migrated(*MINIMAL, word), tmp_path, run_dir="/r", work="/w")
    command = build(composed, python=sys.executable, environment={})
    assert "data.train_files=['/d/a.parquet','/d/c.parquet']" in command.overrides


def test_verls_own_references_are_filled_in(tmp_path):
    words = ("trainer.project_name=p", "trainer.default_local_dir='ckpt/${trainer.project_name}/x'")
    found = migrated(*MINIMAL, *words)
    assert recipe(found, tmp_path).recipe.checkpoint.directory == "ckpt/p/x"
    assert "filled in: ckpt/p/x" in changed(found)["trainer.default_local_dir"]
    assert (
        "only Hydra can tell"
        in unknown(migrated(*MINIMAL, "trainer.experiment_name='${now:%Y}'"))["trainer.experiment_name"]
    )


def test_a_key_in_a_group_that_refers_to_another_one_still_reaches_verl(tmp_path):
    found = migrated(*MINIMAL, "+actor_rollout_ref.rollout.mtp.enable=True")
    composed = recipe(found, tmp_path, run_dir="/r", work="/w")
    config = compose_verl(build(composed, python=sys.executable, environment={}), composed)
    assert (config.actor_rollout_ref.rollout.mtp.enable, config.actor_rollout_ref.model.mtp.enable) == (True, False)
    assert found.differences == ()
    followed = migrated(*MINIMAL, "actor_rollout_ref.model.mtp.enable=True")
    assert recipe(followed, tmp_path).recipe.verl == {"actor_rollout_ref": {"model": {"mtp": {"enable": True}}}}
    assert followed.differences == ()


def test_where_rollouts_are_kept_is_the_runs_own_place(tmp_path):
    found = migrated(*MINIMAL, "trainer.rollout_data_dir=/tmp/rollouts")
    assert recipe(found, tmp_path).recipe.trainer.rollout_dump is True
    assert "with each attempt" in changed(found)["trainer.rollout_data_dir"]


def test_the_environment_is_sorted_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    found = from_script("environment", variables={"MODEL_PATH": "/models/Qwen3-8B", "CLUSTER_NODES": "2"})
    r = recipe(found, tmp_path).recipe
    assert r.env == {"TASK_QUEUE_ENABLE": "2", "HCCL_BUFFSIZE": "300", "VLLM_ASCEND_ENABLE_NZ": "0"}
    assert r.external_modules == ["megatron_adaptor", "my_plugin"]
    assert r.data.val_files == "/home/me/data/b.parquet"
    report = changed(found)
    assert "node to node" in report["HCCL_SOCKET_IFNAME"]
    assert "secret" in report["WANDB_API_KEY"]
    assert "0123456789abcdef" not in json.dumps(found.to_dict())
    assert "each attempt" in report["TENSORBOARD_DIR"]
    assert "would have to be run" in unknown(found)["RUN_TAG"]


def test_the_adaptor_is_added_where_the_stack_has_one_and_the_script_is_silent():
    assert "external_modules: [megatron_adaptor]" in migrated(*MINIMAL).recipe
    assert "adaptor" not in from_script("mindspeed_old_names", stack="ascend-9.0.0").recipe


def test_other_programs_modes_and_engines(tmp_path):
    asynchronous = recipe(from_script("fully_async"), tmp_path).recipe
    assert (asynchronous.mode, asynchronous.fully_async.rollout_nodes, asynchronous.fully_async.rollout_steps) == (
        "fully_async",
        2,
        6400,
    )
    mindspeed = recipe(from_script("mindspeed_old_names", stack="ascend-9.0.0-verl-0.9.0"), tmp_path).recipe
    assert (mindspeed.engine, mindspeed.model.bridge) == ("mindspeed", "mbridge")
    assert mindspeed.mindspeed.mcore_kwargs["spec"] == ["mindspeed_llm.tasks.models.spec.qwen3_spec", "layer_spec"]
    dapo = from_script("dapo_recipe")
    assert "another program" in changed(dapo)["recipe.dapo.main_dapo"]
    assert recipe(dapo, tmp_path).recipe.verl["algorithm"]["filter_groups"] == {"enable": True, "metric": "acc"}


# ------------------------------------------------------------------------------------------------- the report


def test_renamed_and_dropped_keys_say_what_became_of_them():
    report = changed(from_script("one_command"))
    assert report["custom_reward_function.path"] == "verl 0.9.1 calls it reward.custom_reward_function.path"
    assert "gradients move with the weights" in report["actor_rollout_ref.actor.megatron.grad_offload"]
    assert "asynchronous" in report["actor_rollout_ref.rollout.mode"]
    assert "`file` is added" in report["trainer.logger"]
    old = changed(from_script("mindspeed_old_names", stack="ascend-9.0.0-verl-0.9.0"))
    assert old["actor_rollout_ref.actor.mindspeed.strategy"] == "verl 0.9.0 calls it mindspeed_megatron"


def test_what_has_no_effect_is_left_out_with_the_reason():
    words = ("actor_rollout_ref.ref.megatron.tensor_model_parallel_size=4", "actor_rollout_ref.actor.kl_loss_coef=0.1")
    report = changed(migrated(*MINIMAL, *words))
    assert "no reference policy" in report["actor_rollout_ref.ref.megatron.tensor_model_parallel_size"]
    assert "no KL loss" in report["actor_rollout_ref.actor.kl_loss_coef"]


def test_what_is_unknown_is_named_and_the_recipe_names_it_too():
    found = from_script("unknown_keys")
    report = unknown(found)
    assert not found.complete
    assert "did you mean data.max_prompt_length" in report["data.max_promt_length"]
    assert "several values" in report["actor_rollout_ref.actor.ppo_mini_batch_size=8,16"]
    assert "extra_args" in report["actor_rollout_ref.rollout.limit_images"]
    assert "trainer.x={a" in report
    assert "params/models/some_new_model_7b.yaml" in report["model.name"]
    assert "# Open: data.max_promt_length=512" in found.recipe
    assert '"++actor_rollout_ref.rollout.limit_images=4"' in found.recipe


def test_a_number_that_only_the_environment_knows_is_asked_for():
    found = from_script("environment", variables={"MODEL_PATH": "/models/Qwen3-8B"})
    assert "--set CLUSTER_NODES=" in unknown(found)["trainer.nnodes"]


def test_a_value_a_recipe_must_have_is_asked_for_by_its_variable(tmp_path):
    words = " ".join(word for word in MINIMAL if "train_batch_size" not in word)
    path = tmp_path / "run.sh"
    path.write_text(f"python3 -m verl.trainer.main_ppo {words} data.train_batch_size=$BATCH\n")
    with pytest.raises(RecipeError, match="pass --set BATCH="):
        migrated(str(path))
    assert "train: 64" in migrated(str(path), variables={"BATCH": "64"}).recipe


def test_lines_that_are_no_part_of_the_launch_are_listed():
    notes = [(note.line, note.reason) for note in from_script("several_nodes").notes]
    assert any("the launch stands in this block" in reason for _, reason in notes)
    assert (4, "what that file sets is not known here") in notes


# ------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "Nothing to migrate"),
        (("/no/such/script.sh",), "neither a script here nor an argument list"),
        ((str(SCRIPTS),), "is a directory"),
        ((str(SCRIPTS / "fsdp.sh"),), "Megatron-Core or MindSpeed"),
        ((str(SCRIPTS / "two_launches.sh"),), "at lines 3, 4: choose one with --line"),
        ((str(SCRIPTS / "environment.sh"),), "--model"),
        (("model_engine=megatron", "data.train_files=a"), "The launch gives no"),
        (("model_engine=mindspeed", *MINIMAL[1:]), "verl 0.8.0 and 0.9.0"),
        ((*MINIMAL, "trainer.n_gpus_per_node=64"), "--hardware"),
        ((str(Path(sys.executable).resolve()),), "cannot be read as a script"),
    ],
)
def test_what_cannot_be_migrated_is_refused_in_one_sentence(words, sentence):
    with pytest.raises(RecipeError) as refused:
        migrated(*words)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_one_of_several_launches_is_chosen_by_its_line():
    with pytest.raises(RecipeError, match=r"starts no verl at line 7; it does at line 3, 4"):
        from_script("two_launches", line=7)
    with pytest.raises(RecipeError, match="The launch gives no"):
        from_script("two_launches", line=4)


def test_a_script_that_is_no_bash_says_where(tmp_path):
    broken = tmp_path / "broken.sh"
    broken.write_text("import verl\nprint((1, 2)\n")
    with pytest.raises(RecipeError, match="starts no verl trainer"):
        migrated(str(broken))


def test_the_command_writes_the_recipe_and_reports_on_stderr(tmp_path):
    out = tmp_path / "mine.yaml"
    words = [str(SCRIPTS / "one_command.sh"), "--stack", ASCEND, "-o", str(out)]
    done = CliRunner().invoke(cli_tools.migrate_command, words)
    assert (done.exit_code, done.stdout) == (0, "")
    assert "carried over" in done.stderr
    assert "tensor: 4" in out.read_text()
    told = CliRunner().invoke(
        cli_tools.migrate_command, [str(SCRIPTS / "unknown_keys.sh"), "--stack", ASCEND, "--json"]
    )
    assert told.exit_code == 1
    assert json.loads(told.stdout)["complete"] is False


# ------------------------------------------------------------------------------------------------- the inverse


def test_every_key_of_every_command_is_known_to_the_inverse():
    """The inverse is asked of the command module; what it cannot find would silently land under `verl:`."""
    decided = {"model_engine", "trainer.device", "algorithm.use_kl_in_reward", "actor_rollout_ref.actor.strategy"}
    decided |= {"actor_rollout_ref.actor.use_kl_loss"}
    ours = params.compose("glm5_2/grpo_a3_512", run_dir="/run", work="/work")
    command = build(ours, python=sys.executable, environment={})
    inverse = fields.inverse(ours.recipe.stack, ours.recipe.hardware, "sync", "megatron", "vllm", sys.executable)
    caused = {key for choices in inverse.choices.values() for texts in choices.values() for key in texts}
    keys = {text.partition("=")[0].lstrip("+") for text in command.overrides}
    keys -= (
        set(dict(params.flatten(ours.recipe.verl)))
        | decided
        | inverse.own_keys
        | caused
        | set(inverse.by_verl)
        | set(inverse.switches)
    )
    keys = {key for key in keys if not any(key.startswith(prefix) for prefix in inverse.free)}
    # The reference policy's are the actor's, which verl takes over where it is not told.
    assert {key for key in keys if not key.startswith("actor_rollout_ref.ref.megatron")} == set()


def test_a_field_takes_only_values_of_its_kind():
    inverse = fields.inverse(ASCEND, "atlas_a2", "sync", "megatron", "vllm", sys.executable)
    tensor, engine = inverse.fields["parallel.tensor"], inverse.fields["rollout.engine"]
    assert [tensor.takes(v) for v in (2, 0, True, "2", 1.5, None)] == [True, False, False, False, False, False]
    assert [engine.takes(v) for v in ("vllm", "hf")] == [True, False]


@pytest.mark.parametrize(
    "value",
    [
        "1e-6",
        "off",
        "0012345",
        "1:30",
        "a b",
        "null",
        "",
        'it\'s "so"',
        "[a]",
        "#x",
        "a: b",
        "*",
        "é\t",
    ],
)
def test_a_text_in_a_recipe_file_stays_that_text(value, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(recipe_text({"verl.a.b": value, "title": value}, bases=["quickstart/grpo"]))
    composed = params.compose(str(path)).recipe
    assert (composed.title, composed.verl["a"]["b"]) == (value, value)
