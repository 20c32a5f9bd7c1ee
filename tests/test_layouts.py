"""Layouts: valid by preflight, ranked by what they cost, written as recipes that pass the same checks."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from recipes import layouts, memory, models, params, pipeline, preflight
from recipes.cli import main
from recipes.errors import RecipeError
from recipes.schema import Parallel

GLM = "glm5_2/grpo_a3_512"
ON_NPUS = [name for name in params.names() if params.compose(name).recipe.hardware != "cpu"]

# Published layouts that are not in the first third of those that fit, and the part of a step that puts them behind.
# All leave more memory free than the first ones do, which is worth something this ranking does not count.
BEHIND = {
    "glm5_2/grpo_a3_512": "idle",  # 8 stages and 16 micro batches; 16.0 of 57.6 GB are used
    "glm5_2/pruned_check_2nodes": "uneven experts",  # the first ones split no experts: 16 are few enough
    "qwen3/grpo_235b_a22b_256k_vllm_a3_16nodes": "idle",  # 16 stages and 16 micro batches
    "qwen3/grpo_235b_a22b_vllm_a3_8nodes": "experts",  # split over the tensor ranks too: every row is gathered
    "qwen3/grpo_30b_a3b_mindspeed_sglang_a3": "launches",  # one data-parallel rank: 128 micro batches an update
    "qwen3/grpo_30b_a3b_sglang_a3": "experts",  # the same
    "qwen3/grpo_8b_mindspeed_sglang_a3": "arithmetic",  # the head comes on top of an even split: a slow last stage
}


@functools.cache
def planned(name: str, **target) -> layouts.Plan:
    return layouts.plan(params.compose(name), **target)


# ------------------------------------------------------------------------------------------------ published layouts


@pytest.mark.parametrize("name", ON_NPUS)
def test_a_recipe_s_own_layout_is_valid_fits_and_ranks_well_or_why_not(name):
    found = planned(name)
    ((place, own),) = [(i, row) for i, row in enumerate(found.layouts, 1) if row.own]
    assert own.fits
    assert own.cost < 2 * found.layouts[0].cost
    if name not in BEHIND:
        assert place <= -(-found.fitting // 3)
        return
    assert place > found.fitting / 3, "it ranks well now: take it off the list"
    parts = layouts.behind(found, own)
    assert max(parts, key=parts.get) == BEHIND[name]
    assert parts[BEHIND[name]] >= 0.1
    assert own.peak < found.layouts[0].peak


def test_what_fits_comes_first_and_then_what_costs_least():
    found = planned(GLM)
    assert 0 < found.fitting < len(found.layouts)
    fitting = found.layouts[: found.fitting]
    assert all(row.fits and max(row.peak, row.generation) <= found.usable for row in fitting)
    assert not any(row.fits for row in found.layouts[found.fitting :])
    assert [row.cost for row in fitting] == sorted(row.cost for row in fitting)


def test_every_layout_is_one_megatron_could_build():
    found = planned(GLM)
    computing = models.index_layers(params.model_facts("glm5_2"))
    meshes = set()
    for row in found.layouts:
        p = row.parallel
        assert 512 % (p.tensor * p.pipeline * p.context) == 0
        assert p.tensor <= 16
        assert 512 % (p.expert * memory.expert_tensor(p) * p.pipeline) == 0
        assert 256 % p.expert == 0
        assert (16 * 8) % row.data == 0  # a mini batch over the data-parallel ranks
        assert set(pipeline.stage_starts(p, 78)) <= set(computing)
        meshes.add((p.tensor, p.pipeline, p.context, p.expert, p.expert_tensor))
    assert len(meshes) == len(found.layouts)


def test_512_devices_take_seconds():
    composed, started = params.compose(GLM), time.process_time()
    assert layouts.plan(composed).subject.world == 512
    assert time.process_time() - started < 20


# -------------------------------------------------------------------------------------------------- pipeline stages


@pytest.mark.parametrize("number", [2, 3, 4, 8, 16, 21])
def test_stages_of_glm_5_2_start_where_an_index_is_computed(number):
    facts = params.model_facts("glm5_2")
    split = Parallel(pipeline=number, **layouts.stages(facts, number))
    assert len(pipeline.stage_sizes(split, 78)) == number
    assert sum(pipeline.stage_sizes(split, 78)) == 78
    assert set(pipeline.stage_starts(split, 78)) <= set(models.index_layers(facts))


def test_eight_stages_of_glm_5_2_are_as_even_as_the_published_ones():
    sizes = pipeline.stage_sizes(Parallel(pipeline=8, **layouts.stages(params.model_facts("glm5_2"), 8)), 78)
    # 17 groups of four over the seven stages after the first: some stage has three of them.
    assert max(sizes) == 12
    # The head counts as two layers: the last stage is not among the largest.
    assert sizes[-1] < 12
    assert layouts.stages(params.model_facts("glm5_2"), 22) is None


@pytest.mark.parametrize(
    ("model", "number", "sizes"),
    [
        ("qwen3_235b_a22b", 8, [11, *[12] * 6, 11]),
        ("qwen3_235b_a22b", 16, [5, *[6] * 14, 5]),
        ("qwen3_235b_a22b", 2, [47, 47]),
        ("qwen3_8b", 4, [9, 9, 9, 9]),
        ("qwen3_0_6b", 3, [9, 10, 9]),
    ],
)
def test_layers_that_do_not_come_out_leave_less_to_the_first_and_last_stage(model, number, sizes):
    facts = params.model_facts(model)
    split = Parallel(pipeline=number, **layouts.stages(facts, number))
    assert pipeline.stage_sizes(split, facts.layers) == sizes


# ---------------------------------------------------------------------------------------------------------- traffic


def test_bytes_sent_by_a_dense_model():
    subject = preflight.subject(params.compose("qwen3/grpo_0_6b_vllm_a2"))
    sent = layouts.traffic(subject, memory.train(subject))
    # Two updates of 8 x 2 sequences over two ranks, 3072 tokens each. Update, log-probs, reference, backward: 4 passes.
    tokens, passes, row = 2 * 8 * 3072, 4, 2 * 1024
    assert sent.tensor == 14 * 2 * passes * 2 * 1 / 2 * tokens * row
    assert sent.pipeline == passes * tokens * row / 2
    # The last stage's parameters (test_memory works them out): fp32 gradients and bf16 weights, half of each, twice.
    assert sent.data == 2 * (4 + 2) * 187_924_992 / 2
    assert (sent.context, sent.expert) == (0, 0)


def test_bytes_sent_to_experts_and_to_other_parts_of_a_sequence():
    subject = preflight.subject(params.compose("qwen3/gspo_30b_a3b_vllm_a3"))
    sent = layouts.traffic(subject, memory.train(subject))
    # 32 / 16 updates of 64 sequences over 8 ranks; update, its recomputation, log-probs, backward.
    tokens, passes = 2 * 8 * 4096, 4
    assert sent.expert == 2 * 48 * passes * (8 * tokens / 2) * (2 * 2048) * 7 / 8
    # All layers have experts and none is shared: one all-reduce each, after attention.
    assert sent.tensor == 48 * passes * 2 * 1 / 2 * tokens * (2 * 2048)
    subject = preflight.subject(params.compose("qwen3/gspo_30b_a3b_vllm_a3", ["parallel.context=4"]))
    sent = layouts.traffic(subject, memory.train(subject))
    # Two ranks of data; keys and values of 2 of 4 heads of 128, to three others, five times (twice backward).
    assert sent.context == (passes + 1) * 3 * (2 * 32 * 1024) * 48 * 2 * (2 * 128 * 2)


# ------------------------------------------------------------------------------------------- other nodes and lengths


def run(*arguments: str):
    return CliRunner().invoke(main, [*map(str, arguments)])


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        (GLM, ["--nodes", "16"], {"nodes": 16}),
        (
            "qwen3/grpo_30b_a3b_vllm_a3",
            ["--hardware", "atlas_a2", "--nodes", "2"],
            {"hardware": "atlas_a2", "nodes": 2},
        ),
        ("glm5_2/fully_async", ["--nodes", "8", "--length", "20000"], {"data.max_response_length": 17952}),
    ],
)
def test_the_first_layout_becomes_a_recipe_that_passes_preflight(tmp_path, name, options, expected):
    written = tmp_path / "mine.yaml"
    done = run("layouts", name, *options, "--top", "1", "-o", written)
    assert done.exit_code == 0, done.output
    composed = params.compose(str(written))
    assert composed.bases == (name,)
    assert not params.repeated(written)
    known = dict(params.flatten(params.to_dict(composed.recipe)))
    assert expected.items() <= known.items()
    checked = run("check", "--anywhere", written)
    assert checked.exit_code == 0, checked.output
    # What was written is what was planned.
    needed = memory.estimate(preflight.subject(composed))
    assert max(needed.training.peak, needed.generation.peak) < 57.6e9
    assert f"{needed.training.peak / 1e9:.1f} of 57.6 GB" in done.output


def test_tensor_parallelism_stays_within_a_node():
    found = planned("qwen3/grpo_30b_a3b_vllm_a3", hardware="atlas_a2", nodes=2)
    assert found.subject.world == 16
    assert max(row.parallel.tensor for row in found.layouts) == 8
    assert max(row.rollout.tensor for row in found.layouts if row.rollout) <= 8


def test_a_budget_that_does_not_fit_is_halved_and_said():
    own = next(row for row in planned("qwen3/gspo_30b_a3b_vllm_a3").layouts if row.own)
    assert own.max_tokens == 7680
    assert "batch.max_tokens 30720 becomes 7680" in own.reasons


def test_an_engine_gets_what_the_trainer_leaves():
    found = planned("qwen3/grpo_8b_vllm_a2")
    own = next(row for row in found.layouts if row.own)
    # Nothing is offloaded: 28.7 GB stay, and 0.6 of 64 GB would not fit beside them.
    assert own.rollout.share == 0.45
    assert own.generation <= found.usable
    assert layouts.changes(found, own) == {"batch.max_tokens": own.max_tokens, "rollout.memory": 0.45}


def test_when_nothing_fits_the_fewest_nodes_that_would_are_named():
    composed = params.compose("qwen3/grpo_235b_a22b_vllm_a3_8nodes")
    with pytest.raises(RecipeError, match=r"nodes=1: no layout of .* fits atlas_a3, .* take 5 nodes, the fewest"):
        layouts.fitting_plan(composed, nodes=1)
    assert layouts.plan(composed, nodes=5).fitting
    for fewer in (2, 3, 4):
        assert not layouts.plan(composed, nodes=fewer).fitting


@pytest.mark.parametrize(
    ("name", "target", "sentence"),
    [
        ("quickstart/grpo", {}, "hardware=cpu: its facts .* name no memory_gb"),
        (GLM, {"nodes": 0}, "nodes=0: it takes at least one node"),
        (GLM, {"length": 2048}, "length=2048: data.max_prompt_length=2048 leaves no room for a response"),
        ("qwen3/grpo_8b_vllm_a2", {"length": 50000}, "no layout .* passes preflight; .* 40960 positions"),
        (GLM, {"hardware": "atlas_a4"}, "There is no 'atlas_a4' under params/hardware; did you mean"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_sentence(name, target, sentence):
    with pytest.raises(RecipeError, match=sentence):
        layouts.plan(params.compose(name), **target)


def test_every_key_that_repeats_the_length_follows_it():
    found = layouts.target(params.compose("qwen3/grpo_8b_mindspeed_sglang_a3"), length=8192).recipe
    assert (found.data.max_response_length, found.batch.max_tokens) == (6144, 8192)
    assert found.mindspeed.mcore_kwargs["seq_length"] == 8192


# ------------------------------------------------------------------------------------------------------ the command


def test_the_command_shows_reasons_and_json():
    done = run("layouts", "qwen3/grpo_0_6b_vllm_a2", "--top", "2")
    assert done.exit_code == 0, done.output
    assert "20 layouts pass preflight; 20 of them fit" in done.output
    assert "the recipe’s own" in done.output and "behind the first by: arithmetic" in done.output
    tree = json.loads(run("layouts", "qwen3/grpo_0_6b_vllm_a2", "--top", "2", "--json").output)
    assert (tree["valid"], tree["fitting"], len(tree["layouts"])) == (20, 20, 2)
    assert tree["layouts"][0]["changes"] == {"parallel.tensor": 1, "parallel.pipeline": 1}


def test_the_command_takes_a_file_and_names_it_relative_to_what_it_writes(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults: [qwen3/grpo_0_6b_vllm_a2]\ntitle: mine\nbatch: {mini: 16}\n")
    (tmp_path / "planned").mkdir()
    written = tmp_path / "planned" / "next.yaml"
    assert run("layouts", mine, "-o", written).exit_code == 0
    assert "- ../mine\n" in written.read_text()
    assert str(tmp_path) not in written.read_text()
    assert params.compose(str(written)).recipe.batch.mini == 16


def test_overrides_of_the_command_are_in_what_it_writes(tmp_path):
    written = tmp_path / "mine.yaml"
    whole = ("memory.recompute=full", "memory.recompute_method=uniform", "memory.recompute_layers=1")
    done = run("layouts", "qwen3/grpo_0_6b_vllm_a2", *whole, "optimizer.lr=2e-6", "-o", written)
    assert done.exit_code == 0, done.output
    recipe = params.compose(str(written)).recipe
    assert (recipe.memory.recompute, recipe.optimizer.lr, recipe.parallel.tensor) == ("full", 2e-6, 1)


def test_faults_of_the_command_are_sentences(tmp_path):
    done = run("layouts", "qwen3/grpo_0_6b_vllm_a2", "-o", tmp_path / "mine.txt")
    assert done.exit_code == 2 and "give it a name that ends in .yaml" in done.output
    (tmp_path / "file").write_text("")
    done = run("layouts", "qwen3/grpo_0_6b_vllm_a2", "-o", tmp_path / "file" / "mine.yaml")
    assert done.exit_code == 2 and "cannot be written" in done.output


def test_planning_needs_no_torch():
    code = "import recipes.layouts, recipes.cli_plan, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
