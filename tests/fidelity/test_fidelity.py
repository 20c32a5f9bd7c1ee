"""What the recipes launch is what was published: verl's whole configuration, composed from either, key by key.

differences.yaml holds every difference that is meant, with both values and the reason. Nothing else may differ.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from recipes import card, params, verl_schema
from recipes.command import build, compose_verl
from recipes.errors import RecipeError
from recipes.stack import verl_version

HERE = Path(__file__).parent
DATA = yaml.safe_load((HERE / "differences.yaml").read_text(encoding="utf-8"))
RUNS, GROUPS = DATA["runs"], DATA["groups"]
ABSENT = "(absent)"


def published(table: str) -> dict[str, str]:
    """The launch as Hydra saw it, with real-looking places."""
    text = (HERE / "published" / f"{table}.tsv").read_text(encoding="utf-8")
    for mark, place in (("<work>", "/work"), ("<home>", "/home"), ("<time>", "20260901_1200")):
        text = text.replace(mark, place)
    return dict(line.split("\t") for line in text.splitlines())


def settings(config) -> dict[str, object]:
    """Every key of a composed configuration with its resolved value; an empty group counts as a value."""
    return dict(params.flatten(OmegaConf.to_container(config, resolve=True)))


def composed(recipe: str, verl):
    """(what was published, what we launch), each as verl would see it, and the keys that verl refuses."""
    ours = params.compose(recipe, run_dir="/run", work="/work")
    schema = verl(verl_version(ours.recipe.stack))
    entry = verl_schema.ENTRIES[ours.recipe.mode]
    launch = published(RUNS[recipe]["published"])
    engine = launch.pop("model_engine", "megatron")
    known = verl_schema.defaults(schema, engine, entry)
    refused = [k for k in launch if not (verl_schema.declares(known, k) or verl_schema.is_open(known, k))]
    # `++`: the tables do not keep which keys were added and which replaced.
    overrides = [f"++{key}={value}" for key, value in launch.items() if key not in refused]
    theirs = verl_schema.compose(schema, [f"model_engine={engine}", *overrides], entry)
    return settings(theirs), settings(compose_verl(build(ours, environment={}), ours)), refused


def differing(theirs: dict, ours: dict) -> dict[str, object]:
    """Our value for every key that differs."""
    keys = theirs | ours
    return {key: ours.get(key, ABSENT) for key in keys if theirs.get(key, ABSENT) != ours.get(key, ABSENT)}


def meant(recipe: str) -> dict[str, dict]:
    """The differences of a run, those of its groups among them; `{recipe}` stands for its name."""
    run = RUNS[recipe]
    found = {k: entry for name in run["groups"] for k, entry in GROUPS[name].items()} | run.get("differences", {})
    return {
        key: {**entry, "ours": recipe if entry["ours"] == "{recipe}" else entry["ours"]} for key, entry in found.items()
    }


@pytest.mark.parametrize("recipe", RUNS)
def test_a_recipe_launches_what_was_published_but_for_the_differences_that_are_meant(recipe, verl):
    theirs, ours, refused = composed(recipe, verl)
    held = card.verified()[recipe]
    assert held["published"] == RUNS[recipe]["published"]
    assert held["keys"] == len(published(RUNS[recipe]["published"]))
    assert held["settings"] == len(theirs | ours)
    assert held["differences"] == len(meant(recipe))
    assert held["refused"] == len(refused)
    assert differing(theirs, ours) == {key: entry["ours"] for key, entry in meant(recipe).items()}
    assert refused == list(RUNS[recipe].get("refused", {}))


def test_every_difference_has_its_reason():
    entries = [e for run in RUNS for e in meant(run).values()]
    entries += [e for run in RUNS.values() for e in run.get("refused", {}).values()]
    assert [e for e in entries if not e["why"].strip().endswith(".")] == []


def test_every_published_table_is_compared():
    assert {run["published"] for run in RUNS.values()} == {p.stem for p in (HERE / "published").glob("*.tsv")}


def test_a_published_key_our_verl_refuses_is_named_with_its_way_out():
    (reason,) = {RUNS[run]["refused"][key]["why"] for run in RUNS for key in RUNS[run].get("refused", {})}
    assert "param_offload" in reason
    ours = params.compose("qwen3/grpo_235b_a22b_vllm_a3_8nodes")
    with pytest.raises(RecipeError, match=r"has no key .*grad_offload.*param_offload"):
        build(params.compose(ours.name, ["verl.actor_rollout_ref.actor.megatron.grad_offload=true"]))
