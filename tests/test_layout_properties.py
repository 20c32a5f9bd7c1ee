"""Preflight says of a layout what Megatron-Core itself says, both ways, for layouts nobody thought of."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as some

from recipes import params, preflight, simulate
from recipes.preflight.rules import RULES
from recipes.schema import Memory, Parallel

pytestmark = pytest.mark.slow

# What Megatron decides when it makes its groups and builds a model, and nothing later.
MESH = ("layout.world", "layout.expert_world", "layout.heads", "layout.kv_heads", "layout.layers", "layout.experts")
MESH += ("layout.virtual", "layout.stages", "layout.dsa", "memory.recompute")
RECIPES = ("cpu/qwen3", "cpu/qwen3_moe", "cpu/glm5_2", "qwen3/grpo_8b_vllm_a2", "qwen3/gspo_30b_a3b_vllm_a3")
SIZES = (1, 1, 2, 3, 4, 6, 8)
ENDS = (None, None, None, 1, 2, 3, 6, 10, 12, 18)


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
        found[name] = subject, simulate.asked(composed)
    return found


layouts = some.fixed_dictionaries(
    {
        "tensor": some.sampled_from(SIZES),
        "pipeline": some.sampled_from(SIZES),
        "context": some.sampled_from((1, 1, 1, 2, 3, 4)),
        "expert": some.sampled_from(SIZES),
        "expert_tensor": some.sampled_from((None, 1, 2)),
    }
)
# Few that combine with all of the above: most layouts would be refused for one of many reasons.
stages = some.fixed_dictionaries(
    {
        "pipeline": some.sampled_from((1, 2, 3, 4, 6)),
        "virtual_pipeline": some.sampled_from((None, None, 2, 3)),
        "first_stage_layers": some.sampled_from(ENDS),
        "last_stage_layers": some.sampled_from(ENDS),
    }
)


@some.composite
def written_layouts(draw, layers: int):
    """A layout as a string, and settings beside it: right as it is drawn first, and then often made wrong."""
    chunks = draw(some.integers(1, min(6, layers + 1)))
    cuts = sorted(draw(some.lists(some.integers(0, layers), min_size=chunks - 1, max_size=chunks - 1)))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]
    write = draw(some.sampled_from(("t*{}".format, lambda n: "t" * n, lambda n: f"(t)*{n}")))
    stages = [write(size) if size else "" for size in sizes]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    which = draw(some.integers(0, chunks - 1))
    spoiled = {
        "E again": lambda: stages.__setitem__(which, stages[which] + "E"),
        "L again": lambda: stages.__setitem__(which, "L" + stages[which]),
        "no E": lambda: stages.__setitem__(0, stages[0].removeprefix("E")),
        "no L": lambda: stages.__setitem__(-1, stages[-1].removesuffix("L")),
        "a layer more": lambda: stages.__setitem__(
            which, stages[which].replace("L", "") + "t" + "L" * ("L" in stages[which])
        ),
        "MTP": lambda: stages.__setitem__(-1, stages[-1].replace("L", "mL")),
        "MTP first": lambda: stages.__setitem__(0, stages[0].replace("E", "Em")),
        "a letter": lambda: stages.__setitem__(which, stages[which] + "x"),
        "a stage more": lambda: stages.insert(1, "") if len(stages) > 1 else None,
        "commas": lambda: stages.__setitem__(which, "," + stages[which] + ","),
    }
    for name in draw(some.lists(some.sampled_from(sorted(spoiled)), max_size=1)):
        spoiled[name]()
    pipeline = draw(some.sampled_from((1, len(stages), len(stages), max(1, len(stages) // 2), 2)))
    virtual = len(stages) // pipeline
    return {
        "pipeline_layout": "|".join(stages),
        "pipeline": pipeline,
        "virtual_pipeline": draw(some.sampled_from((None, virtual if virtual > 1 else None, 2))),
        "first_stage_layers": draw(some.sampled_from((None, None, None, None, 1))),
    }


recomputed = some.sampled_from(
    [
        {},
        {"recompute": "selective"},
        {"recompute": "selective", "recompute_layers": 1},
        {"recompute": "full"},
        {"recompute": "full", "recompute_method": "uniform"},
        {"recompute": "full", "recompute_layers": 1},
        {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 1},
        {"recompute": "full", "recompute_method": "block", "recompute_layers": 2},
    ]
)
BATCH = {"dynamic": True}  # so that no rule asks how many micro batches a step has: a build does not


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=some.sampled_from(RECIPES), layout=layouts, world=some.sampled_from((1, 2, 4, 6, 8, 12, 16, 24, 32, 64, 96))
)
def test_preflight_refuses_what_megatron_refuses_and_nothing_else(megatron, subjects, name, layout, world):
    compare(megatron, subjects[name], world, Parallel(**layout, sequence=False), Memory())


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=some.sampled_from(RECIPES), layout=stages, memory=recomputed)
def test_preflight_and_megatron_agree_on_stages_of_all_kinds_and_on_recomputation(
    megatron, subjects, name, layout, memory
):
    """More ends than stages, or more layers in them than the model has, are left out: Megatron takes both without a
    word and builds another model. Preflight refuses them: test_preflight.py.
    """
    parallel = Parallel(**layout, sequence=False)
    ends = [n for n in (parallel.first_stage_layers, parallel.last_stage_layers) if n]
    assume(len(ends) <= parallel.pipeline and sum(ends) <= subjects[name][0].model.layers)
    compare(megatron, subjects[name], parallel.pipeline, parallel, Memory(**memory))


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=some.data(), name=some.sampled_from(("cpu/qwen3", "cpu/qwen3_moe", "cpu/glm5_2", "qwen3/grpo_8b_vllm_a2")))
def test_preflight_and_megatron_agree_on_stages_written_out(megatron, subjects, data, name):
    layout = data.draw(written_layouts(subjects[name][0].model.layers))
    parallel = Parallel(**layout, sequence=False)
    compare(megatron, subjects[name], parallel.pipeline, parallel, Memory())


def compare(megatron, known, world: int, parallel: Parallel, memory: Memory) -> None:
    """Ask both about a layout on `world` devices, and assert that they agree."""
    subject, told = known
    batch = dataclasses.replace(subject.recipe.batch, **BATCH)
    recipe = dataclasses.replace(
        subject.recipe, nodes=1, devices=world, parallel=parallel, memory=memory, batch=batch, transformer={}
    )
    found = [rule for rule in MESH if list(RULES[rule].function(dataclasses.replace(subject, recipe=recipe)))]
    engine = told["engine"] | {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
    }
    override = {k: v for k, v in engine["override_transformer_config"].items() if not k.startswith("context_parallel")}
    override |= {
        "pipeline_model_parallel_layout": parallel.pipeline_layout,
        "num_layers_in_first_pipeline_stage": parallel.first_stage_layers,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers,
        "recompute_granularity": memory.recompute,
        "recompute_method": memory.recompute_method,
        "recompute_num_layers": memory.recompute_layers,
    }
    refusal = megatron(told | {"engine": engine | {"override_transformer_config": override}, "world": world})
    said = f"{subject.model.name} {parallel} {memory} world {world}: preflight {found or 'has no objection'}"
    assert bool(found) == bool(refusal), f"{said}, Megatron {refusal or 'neither'}"
