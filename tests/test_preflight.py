"""Seeded faults: every rule finds its own, with its remedy, and the remedied recipe passes."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as tree
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from recipes import data, notebook, params, preflight
from recipes.cli import main
from recipes.finding import SEVERITIES, Finding
from recipes.preflight import files, software

GLM = "glm5_2/grpo_a3_512"
ASYNC = "glm5_2/fully_async"
B8 = "qwen3/grpo_8b_vllm_a2"
MOE = "qwen3/gspo_30b_a3b_vllm_a3"
MINDSPEED = "qwen3/grpo_8b_mindspeed_sglang_a3"
CPU = "cpu/qwen3"
EVEN = "parallel.pipeline_layout='Et*10|t*10|t*10|t*10|t*10|t*10|t*10|t*8L'"
SHARED = "parallel.pipeline_layout='Et*10|t*12|t*8|t*8|t*12|t*12|t*12|t*4L'"
ROLLOUT = "actor_rollout_ref.rollout"
STATIC = ["batch.dynamic=false", "batch.micro=4"]
OUT = "(leave out)"  # mends what breaks it by leaving out those of its keys that the finding names

# rule: (recipe, what breaks it, what the remedy says in part, that remedy applied)
FAULTS: dict[str, tuple[str, list[str], str, list[str]]] = {
    "layout.world": (GLM, ["nodes=31"], "Their product must be", ["nodes=32"]),
    "layout.expert_world": (GLM, ["parallel.expert_tensor=8"], "expert_tensor=1", ["parallel.expert_tensor=1"]),
    "layout.heads": (B8, ["parallel.tensor=3"], "1, 2, 4, 8, 16 or 32 do", ["parallel.tensor=4"]),
    "layout.kv_heads": (B8, ["parallel.tensor=3"], "divisor or a multiple of 8", ["parallel.tensor=4"]),
    "layout.layers": (B8, ["parallel.pipeline=8"], "Take 1, 2, 3, 4,", ["parallel.pipeline=4"]),
    "layout.experts": (MOE, ["parallel.expert=48"], "16, 32, 64 or 128 do", ["parallel.expert=16"]),
    "layout.rollout": (MOE, ["rollout.tensor=3"], "must be 1, 2, 4", ["rollout.tensor=4"]),
    "layout.stages": (GLM, [SHARED.replace("t*4L", "t*3L")], "Place all", [SHARED]),
    "layout.index_sharing": (GLM, [EVEN], "Those are 0, 1, 2, 6, 10", [SHARED]),
    "layout.sequence": (B8, ["parallel.tensor=1", "transformer.sequence_parallel=true"], "Leave it out", [OUT]),
    "layout.moe_sequence": (MOE, ["parallel.sequence=false"], "sequence=true", ["parallel.sequence=true"]),
    # On NPUs engine.adaptor speaks first.
    "layout.dsa": ("cpu/glm5_2", ["devices=2", "parallel.context=2"], "leave it out", ["parallel.context=1"]),
    "layout.virtual": (B8, ["parallel.virtual_pipeline=5"], "must be", ["parallel.virtual_pipeline=9"]),
    "layout.context": (
        B8,
        ["parallel.context=3", "nodes=3", "transformer.context_parallel_algo=ulysses_cp_algo"],
        "Their product must be 1, 2, 4",
        ["parallel.context=2", "nodes=2"],
    ),
    "layout.reference_context": (
        B8,
        ["verl.actor_rollout_ref.ref.megatron.context_parallel_size=2"],
        "Leave it out",
        [OUT],
    ),
    "memory.recompute": (
        B8,
        ["memory.recompute=full"],
        "memory.recompute_method=uniform and memory.recompute_layers=1",
        ["memory.recompute_method=uniform", "memory.recompute_layers=1"],
    ),
    "batch.mini": (B8, ["batch.mini=2048"], "batch.mini ≤ 1024", ["batch.mini=1024"]),
    "batch.mini_divides": (B8, ["batch.mini=600"], "256, 512 or 1024 leave none", ["batch.mini=512"]),
    "batch.mini_over_ranks": (B8, ["batch.mini=255"], "multiple of 2", ["batch.mini=256"]),
    "batch.micro": (B8, [*STATIC, "batch.micro=3"], "1, 2, 4, 5, 8", ["batch.micro=8"]),
    "batch.micro_or_dynamic": (B8, ["batch.dynamic=false"], "Set batch.micro", ["batch.micro=4"]),
    "batch.train_over_ranks": (B8, [*STATIC, "batch.train=1022"], "multiple of 8", ["batch.train=1024"]),
    "batch.dynamic_agrees": (MOE, [f"verl.{ROLLOUT}.log_prob_use_dynamic_bsz=false"], "Leave it out", [OUT]),
    "lengths.positions": (B8, ["data.max_response_length=65536"], "Shorten", ["data.max_response_length=4096"]),
    "lengths.budget": (MOE, ["batch.max_tokens=1000"], "Take 4096", ["batch.max_tokens=4096"]),
    "algorithm.router_replay": (
        MOE,
        ["algorithm.router_replay=R2", "verl.algorithm.rollout_correction.bypass_mode=true"],
        "Take R3",
        ["algorithm.router_replay=R3"],
    ),
    "algorithm.router_replay_padding": (GLM, ["batch.micro=2"], "batch.micro=1", ["batch.micro=1"]),
    "algorithm.router_replay_experts": (B8, ["algorithm.router_replay=R2"], "Leave it out", [OUT]),
    "model.mtp": (B8, ["verl.actor_rollout_ref.model.mtp.enable=true"], "Leave it out", [OUT]),
    "rollout.heads": (B8, ["rollout.tensor=3"], "1, 2, 4, 8, 16 or 32", ["rollout.tensor=4"]),
    "rollout.vocab": (B8, ["rollout.tensor=3"], "1, 2, 4, 8, 16, 32 or 64 always do", ["rollout.tensor=4"]),
    "rollout.expert": (ASYNC, ["rollout.expert=32"], "Take 1 or 64", ["rollout.expert=64"]),
    "rollout.node": (
        MOE,
        ["rollout.tensor=16", "rollout.data=2", "devices=8", "nodes=4"],
        "1, 2, 4 or 8 do",
        ["rollout.tensor=8"],
    ),
    "rollout.modes": (B8, [f"verl.{ROLLOUT}.mode=sync"], "Leave it out", [OUT]),
    "rollout.model_len": (B8, ["rollout.max_model_len=512"], "Take 3072", ["rollout.max_model_len=3072"]),
    "rollout.long_context": (
        ASYNC,
        ["rollout.max_model_len=null"],
        "max_model_len=34816",
        ["rollout.max_model_len=34816"],
    ),
    "rollout.batched_tokens": (
        B8,
        ["rollout.max_batched_tokens=128"],
        "8192 is usual",
        ["rollout.max_batched_tokens=8192"],
    ),
    "rollout.capture_sizes": (
        GLM,
        ["rollout.max_sequences=16"],
        "Leave out what is above 16",
        ["rollout.engine_kwargs.compilation_config.cudagraph_capture_sizes=[2,4,8,16]"],
    ),
    "rollout.bucket": (ASYNC, ["rollout.update_bucket_mb=1800"], "Take 1815", ["rollout.update_bucket_mb=1815"]),
    "env.stale": (B8, ["env.VLLM_ASCEND_ENABLE_FLASHCOMM=1"], "Drop it", [OUT]),
    "env.expandable_segments": (B8, ["env.PYTORCH_NPU_ALLOC_CONF=expandable_segments:True"], "Drop it", [OUT]),
    "env.task_queue": (
        B8,
        ["env.TASK_QUEUE_ENABLE=2", "rollout.enforce_eager=false"],
        "to 1",
        ["env.TASK_QUEUE_ENABLE=1"],
    ),
    "env.interface": (GLM, ["env.HCCL_SOCKET_IFNAME=eth0"], "on each node", [OUT]),
    "env.glm_patch": (GLM, ["env.VERL_VLLM_ASCEND_GLM52_PATCH=0"], "to '1'", ["env.VERL_VLLM_ASCEND_GLM52_PATCH=1"]),
    "env.connect_timeout": (GLM, ["env.HCCL_CONNECT_TIMEOUT=120"], "3600", ["env.HCCL_CONNECT_TIMEOUT=3600"]),
    "stack.model": (GLM, ["stack=ascend-9.0.0"], "later stack", ["stack=ascend-9.1.0"]),
    "stack.hardware": (CPU, ["stack=ascend-9.1.0"], "Choose a stack", ["stack=cpu"]),
    "stack.router_replay": (
        MOE,
        ["stack=ascend-9.0.0", "algorithm.router_replay=R3"],
        "Choose a later stack",
        ["stack=ascend-9.1.0"],
    ),
    "hardware.devices": (B8, ["devices=16"], "devices=8 or fewer", ["devices=8"]),
    "engine.mindspeed": (
        MINDSPEED,
        ["stack=ascend-9.1.0"],
        "Choose a stack with verl 0.8.0 or 0.9.0",
        ["stack=ascend-9.0.0-verl-0.9.0"],
    ),
    "engine.strategy": (B8, ["verl.actor_rollout_ref.actor.strategy=mindspeed_llm"], "Leave it out", [OUT]),
    "engine.mindspeed_fsdp": (
        MINDSPEED,
        ["mindspeed.strategy=mindspeed_fsdp"],
        "mindspeed_megatron",
        ["mindspeed.strategy=mindspeed_megatron"],
    ),
    "engine.mindspeed_weights": (
        MINDSPEED,
        ["model.bridge=megatron_bridge"],
        "bridge=mbridge",
        ["model.bridge=mbridge"],
    ),
    "engine.mindspeed_transformer": (
        MINDSPEED,
        ["transformer.swiglu=true"],
        "under mindspeed.mcore_kwargs",
        [OUT, "mindspeed.mcore_kwargs.swiglu=true"],
    ),
    "engine.adaptor": (B8, ["stack=cpu"], "off the list", [OUT]),
    "engine.adaptor_needless": (MINDSPEED, ["external_modules=[megatron_adaptor]"], "off the list", [OUT]),
    "checkpoint.strict": (
        GLM,
        ["checkpoint.strict=true", "checkpoint.save_freq=5"],
        "strict=false",
        ["checkpoint.strict=false"],
    ),
    "checkpoint.strict_later": (GLM, ["checkpoint.strict=true"], "strict=false", ["checkpoint.strict=false"]),
    "checkpoint.resume": (GLM, ["checkpoint.resume=auto"], "resume=disable", ["checkpoint.resume=disable"]),
    "checkpoint.resume_path": (
        GLM,
        ["checkpoint.resume=resume_path"],
        "global_step_N",
        ["checkpoint.resume_path=/run/checkpoints/global_step_5"],
    ),
    "checkpoint.keep": (GLM, ["checkpoint.save_freq=5", "checkpoint.keep=1"], "Keep 2", ["checkpoint.keep=2"]),
    "async.nodes": (
        ASYNC,
        ["fully_async.rollout_nodes=null"],
        "Say how many",
        ["fully_async.rollout_nodes=16"],
    ),
    "async.batch": (ASYNC, ["batch.train=64"], "Set batch.train=0", ["batch.train=0"]),
    "async.log_probs": (ASYNC, ["rollout.log_probs=false"], "Set rollout.log_probs=true", ["rollout.log_probs=true"]),
    "launch.address": (B8, ["launch=ray"], "http://head:8265", ["ray_address=http://head:8265"]),
    "launch.ray_init": (
        B8,
        ["launch=ray", "ray_address=http://head:8265", "verl.ray_kwargs.ray_init.num_cpus=64"],
        "Leave it out: scripts/ray_cluster.sh",
        [OUT],
    ),
    "files.validation": (
        B8,
        ["data.val_files=${data.train_files}"],
        "Hold some",
        ["data.val_files=/data/test.parquet"],
    ),
    "trainer.test_freq": (B8, ["trainer.test_freq=-1"], "Set trainer.test_freq", ["trainer.test_freq=5"]),
    "logging.file": (CPU, ["trainer.logger=[console]"], "Add file", ["trainer.logger=[console,file]"]),
}


def found(name, overrides):
    composed = params.compose(name, overrides, run_dir="/run", work="/work")
    return preflight.check(composed, here=False)


def test_every_rule_has_its_fault():
    assert set(FAULTS) == {rule.name for rule in preflight.RULES.values() if not rule.here}
    assert set(FAULTS) | set(FAULTS_HERE) == set(preflight.RULES)


@pytest.mark.parametrize(
    ("overrides", "rule", "remedy"),
    [
        ("pipeline=4 first_stage_layers=5", "layout.layers", "first_stage_layers=3 or 6."),
        ("pipeline=4 first_stage_layers=5 last_stage_layers=6", "layout.layers", "first_stage_layers=4 or 6."),
        ("pipeline=4 last_stage_layers=40", "layout.layers", "last_stage_layers=30 or 33."),
        ("pipeline=2 first_stage_layers=3 last_stage_layers=4", "layout.layers", "let them be 36 together."),
        ("pipeline=1 first_stage_layers=18 last_stage_layers=18", "layout.layers", "parallel.pipeline=2"),
        ("pipeline=4 first_stage_layers=6", None, ""),
        ("pipeline=2 first_stage_layers=16 last_stage_layers=20", None, ""),
        ("pipeline=4 first_stage_layers=6 virtual_pipeline=2", None, ""),
        ("pipeline=4 first_stage_layers=6 virtual_pipeline=3", "layout.virtual", "must divide 2."),
        ("pipeline=4 virtual_pipeline=2 pipeline_layout='Et*9|t*9|t*9|t*9L'", "layout.virtual", "out."),
        ("pipeline=2 virtual_pipeline=3 pipeline_layout='Et*9|t*9|t*9|t*9L'", "layout.virtual", "virtual_pipeline=2."),
    ],
)
def test_stages_of_their_own_size_are_judged_with_those_between_them(overrides, rule, remedy):
    keys = [f"parallel.{text}" for text in ("tensor=1", *overrides.split())]
    errors = [f for f in found(B8, keys) if f.rule in ("layout.layers", "layout.virtual", "layout.stages")]
    assert [f.rule for f in errors] == ([rule] if rule else [])
    assert all(remedy in f.remedy for f in errors)


@pytest.mark.parametrize(
    ("layout", "trained", "remedy"),
    [
        ("EE|t*2L", False, "Write each once"),
        ("E|t*2", False, "Write each once"),
        ("E|t*2mL", False, "Write no m."),
        ("E|t*2mL", True, ""),
        ("E|t*2L", True, "Write m."),
        ("E|tmtL", True, "before the L"),
        ("Ettm|||L", True, "before the L"),  # in the first virtual stage of a rank
        ("Et||tm|L", True, ""),
        ("E|t*2L", False, ""),
    ],
)
def test_a_layout_places_embedding_loss_and_the_trained_mtp_layers_once(layout, trained, remedy):
    keys = ["devices=2", "parallel.pipeline=2", f"parallel.pipeline_layout='{layout}'"]
    keys += ["verl.actor_rollout_ref.model.mtp.enable=true"] * trained
    said = [f.remedy for f in found("cpu/glm5_2", keys) if f.rule == "layout.stages"]
    assert [remedy in each for each in said] == [True] * bool(remedy)


@pytest.mark.parametrize("rule", FAULTS)
def test_a_seeded_fault_is_found_with_its_remedy_and_the_remedied_recipe_passes(rule):
    name, broken, remedy, mended = FAULTS[rule]
    [finding, *_] = [f for f in found(name, broken) if f.rule == rule]
    assert remedy in str(finding)
    assert finding.keys
    assert finding.noticed
    assert finding.source
    kept = broken
    if OUT in mended:
        kept = [word for word in broken if not _names(finding.keys, word.partition("=")[0])]
        assert len(kept) < len(broken), f"{list(finding.keys)} names nothing of {broken}"
    assert [f"{f.rule}: {f}" for f in found(name, [*kept, *(word for word in mended if word != OUT)])] == []


def _names(keys, given):
    """Whether a finding's keys name an override: a key of verl without its prefix, or the group it is in."""
    return any(given.removeprefix("verl.") == key or given.startswith(f"{key}.") for key in keys) or given in keys


@pytest.mark.parametrize(
    ("recipe", "variable", "rule"),
    [
        (B8, "VLLM_ASCEND_ENABLE_FLASHCOMM=1", "env.stale"),
        (B8, "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True", "env.expandable_segments"),
        (B8, "TASK_QUEUE_ENABLE=2", "env.task_queue"),
        (f"{B8} nodes=2", "HCCL_CONNECT_TIMEOUT=120", "env.connect_timeout"),
    ],
)
def test_an_exported_variable_is_judged_as_the_training_would_inherit_it(monkeypatch, recipe, variable, rule):
    name, _, value = variable.partition("=")
    composed = params.compose(recipe.split()[0], ["rollout.enforce_eager=false", *recipe.split()[1:]])
    composed.recipe.env.pop(name, None)
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(preflight.rules, "looking", lambda *, here: [preflight.RULES[rule]])
    [finding] = preflight.check(composed, here=True)
    assert finding.keys[f"{name} (exported, not in the recipe)"] == value
    composed.recipe.launch = "ray"  # a job of a cluster inherits nothing from here
    assert not any("exported" in str(f) for f in preflight.check(composed, here=True))


def test_the_recipe_s_variable_goes_before_an_exported_one_and_a_good_one_may_be_exported(monkeypatch):
    name = "HCCL_CONNECT_TIMEOUT"
    composed = params.compose(B8, ["nodes=2", f"env.{name}=120"])
    looks = preflight.RULES["env.connect_timeout"].function
    monkeypatch.setenv(name, "3600")
    [(keys, *_)] = looks(preflight.subject(composed, here=True))
    assert keys[f"env.{name}"] == "120"
    del composed.recipe.env[name]
    assert list(looks(preflight.subject(composed, here=True))) == []
    assert len(list(looks(preflight.subject(composed)))) == 1  # elsewhere nobody knows what is exported


# What a rule of FAULTS_HERE looks at on this machine: each builder breaks it below `place`, and returns the recipe's
# overrides, what the remedy says in part, and how to mend it (overrides, or a function that mends the files).


def no_devices(place, monkeypatch):
    monkeypatch.setattr(files, "DEVICES", place)
    return B8, [], "Launch on a node that has", (place / "davinci0").touch


def shards_missing(place, monkeypatch):
    (place / "config.json").write_text("{}")
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "1.safetensors"}}))
    return CPU, [f"model.path={place}"], "Fetch the model again", (place / "1.safetensors").touch


def no_data(place, monkeypatch):
    path = place / "none.parquet"
    return (
        CPU,
        [f"data.{key}_files={path}" for key in ("train", "val")],
        "recipes prepare cpu/qwen3",
        lambda: rows(path),
    )


def no_column(place, monkeypatch):
    path = place / "train.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": "1 + 1"}]), path)
    return CPU, [f"data.{key}_files={path}" for key in ("train", "val")], "no column data_source", lambda: rows(path)


def reward_of_nought(place, monkeypatch):
    path, function = rows(place / "train.parquet"), place / "reward.py"
    function.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 0.0")

    def mend():
        function.write_text(
            "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
            "    return float(ground_truth in solution_str.split())"
        )

    overrides = [f"data.train_files={path}", f"reward.function={function}", "reward.name=compute_score"]
    return CPU, overrides, "Check data_source, ground_truth", mend


def run_below_a_file(place, monkeypatch):
    (place / "file").touch()
    return CPU, [f"run_dir={place}/file/run"], "Choose another", [f"run_dir={place}/run"]


def another_verl(place, monkeypatch):
    return CPU, ["stack=ascend-9.0.0"], "choose the stack", ["stack=cpu"]


def module_missing(place, monkeypatch):
    def install():
        (place / "no_such_module.py").touch()
        monkeypatch.setenv("PYTHONPATH", str(place))
        software.probe.cache_clear()

    return CPU, ["external_modules=[no_such_module]"], "Install it there", install


def reward_missing(place, monkeypatch):
    return CPU, [f"reward.function={place}/none.py"], "Name the file", (place / "none.py").touch


def finished_before(place, monkeypatch):
    (place / "latest_checkpointed_iteration.txt").write_text("2")
    overrides = ["checkpoint.resume=auto", f"checkpoint.directory={place}", "trainer.steps=2"]
    return CPU, overrides, "more trainer.steps", [f"checkpoint.directory={place}/other"]


FAULTS_HERE = {
    "checkpoint.found": finished_before,
    "hardware.present": no_devices,
    "files.model": shards_missing,
    "files.data": no_data,
    "data.schema": no_column,
    "reward.trial": reward_of_nought,
    "files.run_dir": run_below_a_file,
    "software.verl": another_verl,
    "software.external_modules": module_missing,
    "software.reward": reward_missing,
}


def rows(path, **more):
    """A parquet file of one row, as verl wants it."""
    row = {
        "data_source": "mine",
        "prompt": [{"role": "user", "content": "1 + 1"}],
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "extra_info": {"index": 0},
    }
    pq.write_table(pa.Table.from_pylist([{**row, **more}]), path)
    return path


def look(rule, name, overrides):
    run_dir = [word.partition("=")[2] for word in overrides if word.startswith("run_dir=")]
    words = [word for word in overrides if not word.startswith("run_dir=")]
    composed = params.compose(name, words, **({"run_dir": run_dir[-1]} if run_dir else {}))
    subject = preflight.subject(composed, here=True)
    known = preflight.RULES[rule]
    return [f if isinstance(f, Finding) else Finding(rule, known.severity, *f) for f in known.function(subject)]


@pytest.mark.parametrize("rule", FAULTS_HERE)
def test_a_fault_of_this_machine_is_found_with_its_remedy_and_the_mended_machine_passes(rule, tmp_path, monkeypatch):
    name, broken, remedy, mended = FAULTS_HERE[rule](tmp_path, monkeypatch)
    [finding, *_] = look(rule, name, broken)
    assert remedy in str(finding)
    assert finding.severity == preflight.RULES[rule].severity
    if callable(mended):
        mended()
    assert [str(f) for f in look(rule, name, broken if callable(mended) else [*broken, *mended])] == []


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": []}', "{}", '{"weight_map": {"a": "\xff"}}'])
def test_an_index_that_is_none_is_a_finding(tmp_path, text):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    [finding] = look("files.model", CPU, [f"model.path={tmp_path}"])
    assert "index.json cannot be read" in str(finding)


def test_an_interpreter_that_does_not_answer_is_a_warning_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(software, "PROBE_SECONDS", 0.2)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 20\n")
    python.chmod(0o755)
    composed = params.compose(CPU, ["reward.function=pkg://json"])
    for rule in ("software.external_modules", "software.reward"):
        [finding] = preflight.RULES[rule].function(preflight.subject(composed, str(python)))
        assert (finding.rule, finding.severity) == (rule, "warning")
        assert "did not find its modules within 0.2 s" in str(finding)


def test_an_old_checkpoint_elsewhere_is_a_warning_and_the_run_s_own_is_none(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    overrides = ["checkpoint.resume=auto", f"checkpoint.directory={tmp_path}", "trainer.steps=2"]
    [finding] = look("checkpoint.found", CPU, overrides)
    assert finding.severity == "warning"
    assert "global_step_1 is there already" in str(finding)
    assert look("checkpoint.found", CPU, [*overrides, f"run_dir={tmp_path}"]) == []


def test_a_warning_of_the_data_does_not_hide_the_reward_trial(tmp_path, monkeypatch):
    name, overrides, remedy, _ = reward_of_nought(tmp_path, monkeypatch)
    table = pq.read_table(tmp_path / "train.parquet").drop(["extra_info"])
    pq.write_table(table, tmp_path / "train.parquet")
    assert [f.severity for f in data.check_parquet(tmp_path / "train.parquet")] == ["warning"]
    assert remedy in str(look("reward.trial", name, overrides)[0])


def test_a_waived_rule_lets_the_others_stand():
    findings = found("quickstart/grpo", ["tensor_parallel=3"])
    errors = {f.rule for f in findings if f.severity == "error"}
    assert len(errors) > 1
    with pytest.raises(preflight.rules.RecipeError, match=r"layout\.heads"):
        preflight.refuse(findings, errors - {"layout.heads"})
    preflight.refuse(findings, errors)


def test_a_waived_error_shows_as_waived_and_another_as_an_error():
    errors = [Finding("batch.mini", "error", {}, "one."), Finding("layout.heads", "error", {}, "two.")]
    shown = notebook.Findings(
        (*errors, Finding("env.stale", "warning", {}, "three.")), waived=("batch.mini", "env.stale")
    )
    assert [line.split()[0] for line in shown.text().splitlines()[1:]] == ["waived", "error", "warning"]
    cells = re.findall(r"<td>(.*?)</td>", shown.html())
    assert [word for word in cells if word in ("waived", *SEVERITIES)] == ["waived", "error", "warning"]


@pytest.fixture
def waived_run(tmp_path, monkeypatch):
    """A run of the stand-in trainer that was launched in spite of an error, by the command."""
    children = Path(__file__).parent / "children"
    environment = {"RECIPES_PYTHON": children / "python", "REAL_PYTHON": sys.executable, "TRAINER": "train healthy"}
    for name, value in (environment | {"TRAINER_STEP_SECONDS": 0}).items():
        monkeypatch.setenv(name, str(value))
    model, reward = tmp_path / "model", tmp_path / "reward.py"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").touch()
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, **_): return float('2' in solution_str)"
    )
    train, test = (rows(tmp_path / f"{name}.parquet") for name in ("train", "test"))
    overrides = [f"model.path={model}", f"data.train_files={train}", f"data.val_files={test}", "prepare=[]", "steps=2"]
    overrides += [f"reward.function={reward}", "reward.name=compute_score", "batch.mini=16", "external_modules=[json]"]
    place = tmp_path / "run"
    done = CliRunner().invoke(main, ["run", CPU, *overrides, "--waive", "batch.mini", "--run-dir", str(place)])
    assert done.exit_code == 0, done.output
    return place


@pytest.mark.slow
def test_a_waiver_is_in_the_run_and_a_replay_is_launched_in_spite_of_the_same_alone(waived_run, tmp_path):
    state = json.loads((waived_run / "run.json").read_text())
    assert state["waived"] == ["batch.mini"]
    again = CliRunner().invoke(main, ["replay", str(waived_run), "--run-dir", str(tmp_path / "again")])
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "again" / "run.json").read_text())["waived"] == ["batch.mini"]
    (waived_run / "run.json").write_text(json.dumps({**state, "waived": []}))
    refused = CliRunner().invoke(main, ["replay", str(waived_run), "--run-dir", str(tmp_path / "third")])
    assert refused.exit_code == 2
    assert "batch.mini: " in refused.output
    assert not (tmp_path / "third").exists()


def test_findings_as_junit_name_each_rule(tmp_path):
    path = tmp_path / "preflight.xml"
    done = CliRunner().invoke(
        main, ["check", "quickstart/grpo", "tensor_parallel=3", "--anywhere", "--json", "--junit", str(path)]
    )
    assert done.exit_code == 1
    suite = tree.parse(path).getroot()
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert set(cases) == {rule.name for rule in preflight.RULES.values() if not rule.here}
    failed = {name for name, case in cases.items() if case.find("failure") is not None}
    assert failed == {f["rule"] for f in json.loads(done.output) if f["severity"] == "error"}
    assert int(suite.get("failures")) == len(failed)
