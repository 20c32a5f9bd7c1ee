"""Simulation: Megatron-Core builds the full-size model, its refusals are ours, and its bytes are those of real runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from recipes import bars, memory, params, preflight, simulate
from recipes.cli import main
from recipes.errors import RecipeError

HERE = Path(__file__).parent


def told(name: str, *overrides: str) -> dict:
    return simulate.asked(params.compose(name, overrides))


def test_what_the_child_is_told_is_verls_own_engine_configuration():
    asked = told("glm5_2/grpo_a3_512")
    assert asked["engine"]["pipeline_model_parallel_size"] == 8
    assert asked["engine"]["override_transformer_config"]["pipeline_model_parallel_layout"].startswith("Et*10|t*12|")
    assert asked["world"] == 512
    assert asked["config"]["n_routed_experts"] == 256
    assert asked["state_bytes"] == 12
    assert told("cpu/qwen3")["state_bytes"] == 8


def test_an_architecture_the_bridge_does_not_build_is_refused():
    facts = params.model_facts("qwen3_8b")
    with pytest.raises(RecipeError, match="MambaForCausalLM cannot be simulated"):
        simulate.config(type(facts)(**vars(facts) | {"architecture": "MambaForCausalLM"}))


def test_an_interpreter_without_megatron_is_one_sentence(tmp_path):
    empty = tmp_path / "python"
    empty.write_text("#!/bin/sh\necho 'ModuleNotFoundError: No module named torch' >&2\nexit 1\n")
    empty.chmod(0o755)
    with pytest.raises(RecipeError, match=r"cannot simulate: ModuleNotFoundError.*`cpu` extra"):
        simulate.simulate(params.compose("qwen3/grpo_8b_vllm_a2"), python=str(empty))


def test_bars_never_add_training_to_generation(tmp_path):
    found = memory.estimate(preflight.subject(params.compose("glm5_2/grpo_a3_512")))
    groups = bars.parts(found)
    assert dict(groups["training"])["weights"] == found.training.fullest.weights
    assert sum(size for _, size in groups["training"]) == found.training.fullest.states + sum(
        (found.training.fullest.update, found.training.rollout)
    )
    words = bars.describe(found)
    assert words.startswith("training: 16.1 GB (weights 4.7")
    assert "device: 64 GB" in words
    for theme in ("light", "dark"):
        for suffix in (".png", ".svg"):
            path = bars.save(found, tmp_path / f"{theme}{suffix}", theme=theme, title="a $ title")
            assert path.stat().st_size > 5_000
    assert "weights 4.7" in (tmp_path / "light.svg").read_text()


@pytest.mark.slow
def test_glm_5_2_on_512_and_on_8192_devices():
    """Every stage is what the formula says to the parameter, and all stages are what is published."""
    seconds = {}
    for nodes in (32, 512):
        found = simulate.simulate(params.compose("glm5_2/grpo_a3_512", [f"nodes={nodes}"]))
        seconds[nodes] = found.seconds
        assert found.passed
        assert found.total - found.shared_indexers == found.expected == 743_377_000_704
        assert [b.layers for b in found.built] == [10, 12, 8, 8, 12, 12, 12, 4]
        assert "simulate.formula" not in {f.rule for f in found.findings}
    assert seconds[512] < 1.4 * seconds[32], seconds  # 1.2 on an idle machine


@pytest.mark.slow
def test_what_megatron_refuses_is_a_finding_and_exit_code_1():
    done = CliRunner().invoke(main, ["simulate", "qwen3/grpo_8b_vllm_a2", "tensor_parallel=3", "nodes=3", "--json"])
    assert done.exit_code == 1, done.output
    [finding] = [f for f in json.loads(done.output)["findings"] if f["severity"] == "error"]
    assert finding["rule"] == "simulate.refused"
    assert "num_attention_heads (32) must be a multiple of tensor_model_parallel_size (3)" in finding["sentence"]


CASES = {
    "tensor": ("cpu/qwen3", "parallel.tensor=2"),
    "pipeline": ("cpu/qwen3", "parallel.pipeline=2"),
    "data": ("cpu/qwen3",),
    "bfloat16": ("cpu/qwen3", "parallel.tensor=2", "verl={actor_rollout_ref.actor.megatron.dtype: bfloat16}"),
    "expert": ("cpu/qwen3_moe", "parallel.expert=2"),
    "glm": ("cpu/glm5_2", "parallel.tensor=2", "parallel.expert_tensor=1"),
}

SIMULATED = "import json, sys; from recipes.cpu.simulate import simulate; out, sys.stdout = sys.stdout, sys.stderr;"
SIMULATED += "json.dump([simulate(told) for told in json.load(sys.stdin)], out)"


@pytest.mark.slow
def test_bytes_are_those_of_two_real_ranks_to_the_last_one(tmp_path):
    """Weights and gradients in Megatron's buffers, and the optimizer's state after a step, rank by rank."""
    asked = json.dumps([told(name, "devices=2", *overrides) for name, *overrides in CASES.values()])
    environment = {k: v for k, v in os.environ.items() if k != "VERL_USE_EXTERNAL_MODULES"}

    def start(*words: str) -> subprocess.Popen:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        child = subprocess.Popen([sys.executable, "-W", "ignore", *words], text=True, env=environment, **pipes)
        child.stdin.write(asked)
        child.stdin.close()
        child.stdin = None
        return child

    def answer(child: subprocess.Popen) -> list[dict]:
        out, err = child.communicate(timeout=240)
        assert child.returncode == 0, err[-3000:]
        return json.loads(out)

    ranks = [start(str(HERE / "children" / "real_ranks.py"), str(rank), "2", str(tmp_path)) for rank in range(2)]
    real = list(zip(*map(answer, ranks), strict=True))
    simulated = answer(start("-c", SIMULATED))
    for case, held, fake in zip(CASES, real, simulated, strict=True):
        stages = {each["stage"]: each for each in fake["stages"]}
        for each in {each["stage"]: each for each in reversed(held)}.values():
            wanted = {key: each[key] for key in ("weights", "gradients", "optimizer")}
            assert {key: stages[each["stage"]][key] for key in wanted} == wanted, case


ALL = """
import json, sys
from recipes.cpu import simulate
answers, sys.stdout = sys.stdout, sys.stderr
print(json.dumps([simulate.simulate(told) for told in json.load(sys.stdin)]), file=answers)
"""
PUBLISHED = [name for name in params.names() if params.compose(name).recipe.hardware != "cpu"]


@pytest.fixture(scope="module")
def published():
    """Every recipe for NPUs, built one after the other in one process."""
    composed = [params.compose(name) for name in PUBLISHED]
    environment = {k: v for k, v in os.environ.items() if k != "VERL_USE_EXTERNAL_MODULES"}
    words = [sys.executable, "-W", "ignore", "-c", ALL]
    asked = json.dumps([simulate.asked(one) for one in composed])
    done = subprocess.run(words, input=asked, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    return {one.name: simulate.weigh(one, answer) for one, answer in zip(composed, answers, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_recipe_is_built_and_holds_its_model(published, name):
    """Context parallelism, MindSpeed's engine, heads tied over stages and shared indexers among them."""
    found = published[name]
    assert [str(f) for f in found.findings if f.severity == "error"] == []
    assert len(found.built) == params.compose(name).recipe.parallel.pipeline
    tied = sum(155_582_464 for f in found.findings if f.rule == "simulate.tied")
    assert found.total - found.shared_indexers - tied == found.expected
