"""Seeded faults: every rule finds its own, with its remedy, and the remedied recipe passes."""

from __future__ import annotations

import json
import xml.etree.ElementTree as tree

import pytest
from click.testing import CliRunner

from recipes import params, preflight
from recipes.cli import main

GLM = "glm5_2/grpo_a3_512"
ASYNC = "glm5_2/fully_async"
B8 = "qwen3/grpo_8b_vllm_a2"
MOE = "qwen3/gspo_30b_a3b_vllm_a3"
MINDSPEED = "qwen3/grpo_8b_mindspeed_sglang_a3"
CPU = "cpu/qwen3"
EVEN = "parallel.pipeline_layout='Et*10|t*10|t*10|t*10|t*10|t*10|t*10|t*8L'"
ROLLOUT = "actor_rollout_ref.rollout"
STATIC = ["batch.dynamic=false", "batch.micro=4"]

# rule: (recipe, what breaks it, what the remedy says in part, what mends it)
FAULTS: dict[str, tuple[str, list[str], str, list[str]]] = {
    "layout.world": (GLM, ["nodes=31"], "Their product must be", ["nodes=32"]),
    "layout.expert_world": (GLM, ["parallel.expert_tensor=8"], "expert_tensor=1", ["parallel.expert_tensor=1"]),
    "layout.heads": (CPU, ["parallel.tensor=3", "devices=3"], "1, 2 or 4 do", ["parallel.tensor=2", "devices=2"]),
    "layout.kv_heads": (
        "quickstart/grpo",
        ["tensor_parallel=3", "devices=3"],
        "divisor",
        ["tensor_parallel=2", "devices=2"],
    ),
    "layout.layers": (B8, ["parallel.pipeline=8"], "parallel.pipeline_layout", ["parallel.pipeline=4"]),
    "layout.experts": (
        MOE,
        ["parallel.expert=48", "nodes=3", "parallel.tensor=1"],
        "16, 32, 64 or 128 do",
        ["parallel.expert=16"],
    ),
    "layout.rollout": (MOE, ["rollout.tensor=3"], "must be 1, 2, 4", ["rollout.tensor=4"]),
    "layout.stages": (GLM, ["parallel.pipeline_layout='Et*10|t*12|t*8|t*8|t*12|t*12|t*12|t*3L'"], "Place all", []),
    "layout.index_sharing": (GLM, [EVEN], "Those are 0, 1, 2, 6, 10", []),
    "layout.sequence": (CPU, ["transformer.sequence_parallel=true"], "Leave it out", []),
    "layout.moe_sequence": (MOE, ["parallel.sequence=false"], "sequence=true", ["parallel.sequence=true"]),
    "layout.dsa": ("cpu/glm5_2", ["parallel.context=2", "devices=2"], "megatron_adaptor", ["parallel.context=1"]),
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
        [],
    ),
    "memory.recompute": (B8, ["memory.recompute=full"], "uniform", ["memory.recompute=selective"]),
    "batch.mini": (CPU, ["batch.mini=16"], "batch.mini ≤ 8", ["batch.mini=8"]),
    "batch.mini_divides": (
        CPU,
        ["batch.train=10"],
        "1, 2, 5 or 10",
        ["batch.mini=5", "batch.train=10", "batch.micro=4"],
    ),
    "batch.mini_over_ranks": (CPU, ["devices=3"], "multiple of 3", ["devices=2"]),
    "batch.micro": (CPU, ["batch.micro=5"], "1, 2, 4, 8 or 16 divide", ["batch.micro=4"]),
    "batch.micro_or_dynamic": (CPU, ["batch.micro=null"], "Set batch.micro", ["batch.micro=2"]),
    "batch.train_over_ranks": (CPU, ["batch.train=6", "batch.micro=16"], "multiple of 16", ["batch.train=8"]),
    "batch.dynamic_agrees": (MOE, [f"verl.{ROLLOUT}.log_prob_use_dynamic_bsz=false"], "Leave it out", []),
    "lengths.positions": (CPU, ["data.max_response_length=512"], "Shorten", ["data.max_response_length=8"]),
    "lengths.budget": (MOE, ["batch.dynamic=true", "batch.max_tokens=1000"], "Take", ["batch.max_tokens=32768"]),
    "algorithm.router_replay": (
        MOE,
        ["algorithm.router_replay=R2", "verl.algorithm.rollout_correction.bypass_mode=true"],
        "Take R3",
        ["algorithm.router_replay=R3"],
    ),
    "algorithm.router_replay_padding": (GLM, ["batch.micro=2"], "batch.micro=1", ["batch.micro=1"]),
    "algorithm.router_replay_experts": (B8, ["algorithm.router_replay=R2"], "Leave it out", []),
    "model.mtp": (B8, ["verl.actor_rollout_ref.model.mtp.enable=true"], "Leave it out", []),
    "rollout.heads": (B8, ["rollout.tensor=5", "nodes=5"], "1, 2, 4, 8, 16 or 32", ["rollout.tensor=4"]),
    "rollout.expert": (ASYNC, ["rollout.expert=32"], "Take 1 or 64", ["rollout.expert=64"]),
    "rollout.node": (
        MOE,
        ["rollout.tensor=16", "rollout.data=2", "devices=8", "nodes=4"],
        "1, 2, 4 or 8 do",
        ["rollout.tensor=8"],
    ),
    "rollout.modes": (B8, [f"verl.{ROLLOUT}.mode=sync"], "Leave it out", []),
    "rollout.model_len": (B8, ["rollout.max_model_len=512"], "Take", []),
    "rollout.long_context": (ASYNC, ["rollout.max_model_len=null"], "max_model_len=34816", []),
    "rollout.batched_tokens": (
        B8,
        ["rollout.max_batched_tokens=128"],
        "8192 is usual",
        ["rollout.max_batched_tokens=8192"],
    ),
    "rollout.capture_sizes": (GLM, ["rollout.max_sequences=16"], "above 16", ["rollout.max_sequences=64"]),
    "rollout.bucket": (ASYNC, ["rollout.update_bucket_mb=1800"], "Take 1815", ["rollout.update_bucket_mb=1815"]),
    "env.stale": (B8, ["env.VLLM_ASCEND_ENABLE_FLASHCOMM=1"], "Drop it", []),
    "env.expandable_segments": (B8, ["env.PYTORCH_NPU_ALLOC_CONF=expandable_segments:True"], "Drop it", []),
    "env.task_queue": (
        B8,
        ["env.TASK_QUEUE_ENABLE=2", "rollout.enforce_eager=false"],
        "to 1",
        ["env.TASK_QUEUE_ENABLE=1"],
    ),
    "env.interface": (GLM, ["env.HCCL_SOCKET_IFNAME=eth0"], "on each node", []),
    "env.glm_patch": (GLM, ["env.VERL_VLLM_ASCEND_GLM52_PATCH=0"], "to '1'", ["env.VERL_VLLM_ASCEND_GLM52_PATCH=1"]),
    "env.connect_timeout": (GLM, ["env.HCCL_CONNECT_TIMEOUT=120"], "3600", ["env.HCCL_CONNECT_TIMEOUT=3600"]),
    "stack.model": (GLM, ["stack=ascend-9.0.0"], "later stack", []),
    "stack.hardware": (CPU, ["stack=ascend-9.1.0"], "Choose a stack", []),
    "stack.router_replay": (MOE, ["stack=ascend-9.0.0", "algorithm.router_replay=R3"], "R2", []),
    "hardware.devices": (B8, ["devices=16"], "devices=8 or fewer", ["devices=8"]),
    "engine.mindspeed": (MINDSPEED, ["stack=ascend-9.1.0"], "Choose a stack", []),
    "engine.strategy": (B8, ["verl.actor_rollout_ref.actor.strategy=mindspeed_llm"], "Set engine", []),
    "engine.mindspeed_fsdp": (MINDSPEED, ["mindspeed.strategy=mindspeed_fsdp"], "mindspeed_megatron", []),
    "engine.mindspeed_weights": (MINDSPEED, ["model.bridge=megatron_bridge"], "bridge=mbridge", []),
    "engine.mindspeed_transformer": (MINDSPEED, ["transformer.swiglu=true"], "mcore_kwargs", []),
    "engine.adaptor": (B8, ["stack=cpu"], "off the list", []),
    "engine.adaptor_needless": (MINDSPEED, ["external_modules=[megatron_adaptor]"], "off the list", []),
    "checkpoint.strict": (GLM, ["checkpoint.strict=true", "checkpoint.save_freq=5"], "strict=false", []),
    "checkpoint.strict_later": (GLM, ["checkpoint.strict=true"], "strict=false", []),
    "checkpoint.resume": (GLM, ["checkpoint.resume=auto"], "disable", []),
    "checkpoint.resume_path": (GLM, ["checkpoint.resume=resume_path"], "global_step_N", []),
    "checkpoint.keep": (GLM, ["checkpoint.save_freq=5", "checkpoint.keep=1"], "Keep 2", ["checkpoint.keep=2"]),
    "async.nodes": (ASYNC, ["fully_async.rollout_nodes=null"], "Say how many", []),
    "async.batch": (ASYNC, ["batch.train=64"], "", []),
    "async.log_probs": (ASYNC, ["rollout.log_probs=false"], "", []),
    "launch.address": (B8, ["launch=ray"], "http://head:8265", ["ray_address=http://head:8265"]),
    "launch.ray_init": (B8, ["launch=ray", "verl.ray_kwargs.ray_init.num_cpus=64"], "ray_cluster.sh", ["launch=local"]),
    "files.validation": (CPU, ["data.val_files=${data.train_files}"], "Hold some", []),
    "logging.file": (CPU, ["trainer.logger=[console]"], "Add file", []),
}


def found(name, overrides):
    composed = params.compose(name, overrides, run_dir="/run", work="/work")
    return preflight.check(composed, here=False)


def test_every_rule_that_needs_no_machine_has_its_fault():
    assert set(FAULTS) == {rule.name for rule in preflight.RULES.values() if not rule.here}


@pytest.mark.parametrize("rule", FAULTS)
def test_a_seeded_fault_is_found_with_its_remedy_and_the_remedied_recipe_passes(rule):
    name, broken, remedy, mended = FAULTS[rule]
    [finding, *_] = [f for f in found(name, broken) if f.rule == rule]
    assert remedy in str(finding)
    assert finding.keys
    assert finding.noticed
    assert finding.source
    later = [*broken, *mended] if mended else []
    assert [str(f) for f in found(name, later) if f.rule == rule] == []


def test_a_waived_rule_lets_the_others_stand():
    findings = found("quickstart/grpo", ["tensor_parallel=3"])
    errors = {f.rule for f in findings if f.severity == "error"}
    assert len(errors) > 1
    with pytest.raises(preflight.rules.RecipeError, match=r"layout\.heads"):
        preflight.refuse(findings, errors - {"layout.heads"})
    preflight.refuse(findings, errors)


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
