"""Preflight says of a layout what Megatron-Core itself says, both ways, for layouts nobody thought of."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from recipes import params, preflight, simulate
from recipes.command import build, compose_verl
from recipes.preflight.rules import RULES
from recipes.schema import Parallel

pytestmark = pytest.mark.slow

# What Megatron decides when it makes its groups and builds a model, and nothing later.
MESH = ("layout.world", "layout.expert_world", "layout.heads", "layout.kv_heads", "layout.layers", "layout.experts")
RECIPES = ("cpu/qwen3", "cpu/qwen3_moe", "qwen3/grpo_8b_vllm_a2", "qwen3/gspo_30b_a3b_vllm_a3")
SIZES = (1, 1, 2, 3, 4, 6, 8)


@pytest.fixture(scope="module")
def megatron():
    """Asks a child that has Megatron-Core: megatron(request) is its refusal in words, or None."""
    environment = {k: v for k, v in os.environ.items() if k != "VERL_USE_EXTERNAL_MODULES"}
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(Path(__file__).parent / "children" / "megatron_says.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )

    def ask(told: dict) -> str | None:
        child.stdin.write(json.dumps(told) + "\n")
        child.stdin.flush()
        refused = json.loads(child.stdout.readline())["refused"]
        outcomes.append(refused is not None)
        return refused

    outcomes: list[bool] = []
    yield ask
    child.stdin.close()
    assert child.wait(30) == 0
    assert min(outcomes.count(True), outcomes.count(False)) >= 5, outcomes  # else it has shown nothing


@pytest.fixture(scope="module")
def subjects():
    found = {}
    for name in RECIPES:
        composed = params.compose(name)
        subject = preflight.subject(composed)
        found[name] = subject, simulate.request(subject, compose_verl(build(composed, environment={}), composed))
    return found


layouts = some.fixed_dictionaries(
    {
        "tensor": some.sampled_from(SIZES),
        "pipeline": some.sampled_from(SIZES),
        "context": some.just(1),  # Megatron's own attention, which a CPU has, refuses more; Ascend's does not
        "expert": some.sampled_from(SIZES),
        "expert_tensor": some.sampled_from((None, 1, 2)),
    }
)


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=some.sampled_from(RECIPES), layout=layouts, world=some.sampled_from((1, 2, 4, 6, 8, 12, 16, 24, 32, 64, 96))
)
def test_preflight_refuses_what_megatron_refuses_and_nothing_else(megatron, subjects, name, layout, world):
    subject, told = subjects[name]
    parallel = Parallel(**layout, sequence=False)
    recipe = dataclasses.replace(subject.recipe, nodes=1, devices=world, parallel=parallel)
    looked_at = dataclasses.replace(subject, recipe=recipe)
    found = [rule for rule in MESH if list(RULES[rule].function(looked_at))]
    engine = told["engine"] | {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
    }
    override = {k: v for k, v in engine["override_transformer_config"].items() if not k.startswith("context_parallel")}
    refusal = megatron(told | {"engine": engine | {"override_transformer_config": override}, "world": world})
    said = f"{name} {layout} world {world}: preflight {found or 'has no objection'}, Megatron {refusal or 'neither'}"
    assert bool(found) == bool(refusal), said
