"""The settings of the CPU target are light, valid for verl, and say what the code that reads them expects."""

import subprocess
import sys
from pathlib import Path

import pytest

from recipes.cpu import settings


def test_reading_them_imports_no_torch():
    code = "import recipes.cpu.settings, sys; print({'torch', 'verl', 'ray', 'transformers'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


@pytest.fixture(scope="module")
def verl_config():
    """verl's own composed configuration for Megatron."""
    from importlib.metadata import distribution

    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    folder = Path(distribution("verl").locate_file("verl/trainer/config")).resolve()
    with initialize_config_dir(str(folder), version_base=None):
        composed = compose("ppo_trainer", overrides=["model_engine=megatron"])
    return OmegaConf.to_container(composed)


OPEN = ("override_transformer_config.", "ray_kwargs.ray_init.")
"""Sections that take any key of Megatron's config, or of ray.init."""


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe", "glm_moe_dsa"])
def test_every_key_is_one_of_verl_and_none_repeats_its_default(verl_config, model_type):
    keys = settings.verl_keys(2, model_type)
    del keys["model_engine"]  # a config group
    for key, value in keys.items():
        *sections, name = key.split(".")
        section = verl_config
        for part in sections:
            section = section.get(part, {})
        assert name in section or any(part in key for part in OPEN), key
        assert section.get(name) != value or key == "trainer.nnodes", f"{key} is {value} anyway"


def test_a_layout_asks_ray_for_as_many_ranks_as_it_offers():
    keys = settings.verl_keys(2, "qwen3")
    ranks = (
        "trainer.n_gpus_per_node",
        "actor_rollout_ref.rollout.n_gpus_per_node",
        "ray_kwargs.ray_init.resources.cpu_rank",
    )
    assert [keys[key] for key in ranks] == [2, 2, 2]


def test_ray_is_never_somebody_elses():
    assert settings.verl_keys(1, "qwen3")["ray_kwargs.ray_init.address"] == "local"


def test_a_reference_policy_takes_the_rest_from_the_actor(verl_config):
    of_actor = [key for key in settings.verl_keys(1, "glm_moe_dsa") if ".actor.megatron." in key]
    reference = verl_config["actor_rollout_ref"]["ref"]["megatron"]
    for key in of_actor:
        name = key.split(".megatron.")[1].split(".")[0]
        follows = str(reference[name]).startswith("${oc.select:actor_rollout_ref.actor.megatron." + name)
        assert follows or key.replace(".actor.", ".ref.") in settings.verl_keys(1, "glm_moe_dsa")


def test_what_stands_first_on_the_path_hides_exactly_what_it_says(child):
    code = "import importlib.util as u; print(u.find_spec('rfc3987_syntax').origin); import jsonschema, ray"
    result = child("-c", code)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).parent == Path(settings.PYTHONPATH)
    assert {path.name for path in Path(settings.PYTHONPATH).glob("*.py")} == {"__init__.py", "rfc3987_syntax.py"}
