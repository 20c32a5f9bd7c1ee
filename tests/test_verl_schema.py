"""verl's configuration: composed as Hydra composes it, of any release, and from a cache that may be damaged."""

from __future__ import annotations

import base64
import hashlib
import shutil
import zipfile
from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from recipes import params, verl_schema
from recipes.command import build, compose_verl
from recipes.errors import RecipeError

ASYNC = verl_schema.ENTRIES["fully_async"]


def hydra_composes(directory, config, overrides):
    try:
        with hydra.initialize_config_dir(str(directory), version_base=None):
            return hydra.compose(config_name=config, overrides=list(overrides))
    finally:
        GlobalHydra.instance().clear()


@pytest.mark.parametrize("name", ["glm5_2/grpo_a3_512", "quickstart/grpo", "qwen3/grpo_235b_a22b_256k_vllm_a3_16nodes"])
def test_composing_in_two_steps_gives_what_hydra_gives_in_one(name):
    composed = params.compose(name, ["extra_args=[~trainer.esi_redundant_time, ++trainer.extra=1]"], run_dir="/run")
    command = build(composed)
    directory = verl_schema.find("0.9.1").directory
    assert compose_verl(command, composed) == hydra_composes(directory, "ppo_trainer", command.overrides)


def test_composing_twice_leaves_the_defaults_alone():
    schema = verl_schema.find("0.9.1")
    before = OmegaConf.to_yaml(verl_schema.defaults(schema, "megatron"))
    verl_schema.compose(schema, ["model_engine=megatron", "trainer.nnodes=7", "+trainer.extra=1"])
    assert OmegaConf.to_yaml(verl_schema.defaults(schema, "megatron")) == before


def test_the_asynchronous_entry_with_megatron_is_verl_s_own_file_for_it():
    """fully_async_ppo_megatron_trainer looks for other files below the current folder; ours needs no such place."""
    schema = verl_schema.find("0.9.1")
    ours = verl_schema.compose(schema, ["model_engine=megatron"], ASYNC)
    beside = f"hydra.searchpath=[file://{schema.directory}]"
    theirs = hydra_composes(schema.folder(ASYNC), "fully_async_ppo_megatron_trainer", [beside])
    assert ours == theirs
    assert ours.async_training.trigger_parameter_sync_step == 4


def test_the_asynchronous_run_starts_its_own_entry_with_generation_on_its_own_nodes():
    composed = params.compose("glm5_2/fully_async", run_dir="/run", work="/work")
    command = build(composed)
    config = compose_verl(command, composed)
    assert command.argv[3] == "verl.experimental.fully_async_policy.fully_async_main"
    assert config.actor_rollout_ref.hybrid_engine is False
    assert (config.rollout.nnodes, config.rollout.n_gpus_per_node, config.trainer.nnodes) == (16, 16, 16)
    assert (config.data.train_batch_size, config.data.gen_batch_size) == (0, 1)


@pytest.mark.parametrize("override", ["+actor_rollout_ref.actor.megatron.grad_offload", "trainer.max_ckpt_to_keep"])
def test_hydra_s_own_refusal_carries_what_to_write_instead(override):
    composed = params.compose("quickstart/grpo", [f"extra_args=['{override}=1']"])
    if override.startswith("+"):
        assert compose_verl(build(composed), composed).actor_rollout_ref.actor.megatron.grad_offload == 1
        return
    with pytest.raises(
        RecipeError, match=r"verl 0.9.1 refuses .*max_ckpt_to_keep.*; actor and critic .* checkpoint.keep"
    ):
        compose_verl(build(composed), composed)


# ------------------------------------------------------------------------------------- wheels, by pip, from a folder


def wheel(folder: Path, version: str, *, size: int | None = None, corrupt: bool = False) -> Path:
    """Make a small wheel of `verl` that pip accepts; cut it off after `size` bytes, or damage a file in its middle."""
    path = folder / f"verl-{version}-py3-none-any.whl"
    info = f"verl-{version}.dist-info"
    files = {
        "verl/trainer/config/ppo_trainer.yaml": "defaults:\n  - model_engine: dp\n  - _self_\ntrainer:\n  nnodes: 1\n",
        "verl/trainer/config/model_engine/dp.yaml": "# @package _global_\nmodel_engine: dp\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: verl\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    hashes = {n: base64.urlsafe_b64encode(hashlib.sha256(t.encode()).digest()).rstrip(b"=") for n, t in files.items()}
    record = "".join(f"{n},sha256={h.decode()},{len(files[n])}\n" for n, h in hashes.items())
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(name, text)
    whole = path.read_bytes()
    if corrupt:
        path.write_bytes(whole.replace(b"nnodes: 1", b"nnodes: 2", 1))
    if size is not None:
        path.write_bytes(whole[:size])
    return path


@pytest.fixture
def index(tmp_path, monkeypatch):
    """pip finds wheels in this folder and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_a_release_that_is_not_installed_comes_from_its_wheel_once(index):
    path = wheel(index, "0.0.7")
    first = verl_schema.find("0.0.7")
    assert verl_schema.defaults(first, "dp").trainer.nnodes == 1
    path.unlink()
    assert verl_schema.find("0.0.7", fetch=False) == first


@pytest.mark.parametrize("damage", [{"size": 300}, {"size": 0}, {"corrupt": True}])
def test_a_damaged_wheel_is_fetched_again_and_then_refused_in_a_sentence(index, damage):
    wheel(index, "0.0.7", **damage)
    with (
        pytest.warns(UserWarning, match=r"The wheel of verl 0.0.7 is damaged .* fetched again"),
        pytest.raises(RecipeError, match=r"The wheel of verl 0.0.7 is damaged, .* keys could not be checked"),
    ):
        verl_schema.find("0.0.7")
    assert not (verl_schema.cache() / "0.0.7").exists()


def test_a_truncated_file_in_the_cache_is_told_and_fetched_again(index):
    wheel(index, "0.0.7")
    file = verl_schema.find("0.0.7").directory / "ppo_trainer.yaml"
    whole = file.read_text()
    file.write_text(whole[:20])
    with pytest.raises(RecipeError, match=r"ppo_trainer.yaml has 20 of \d+ bytes.*could not be checked"):
        verl_schema.find("0.0.7", fetch=False)
    with pytest.warns(UserWarning, match="fetched again"):
        verl_schema.find("0.0.7")
    assert file.read_text() == whole


def test_without_a_network_it_says_what_could_not_be_checked(index):
    with pytest.raises(
        RecipeError, match=r"verl 0.0.8 is not installed and its wheel could not be fetched .* not be checked"
    ):
        verl_schema.find("0.0.8")


# ------------------------------------------------------------------------------------------- keys of other releases


def test_a_key_is_written_as_this_verl_spells_it():
    older = OmegaConf.create({"custom_reward_function": {"path": None}, "reward_model": {"num_workers": 8}})
    assert verl_schema.spelled(older, "reward.custom_reward_function.path") == "custom_reward_function.path"
    assert verl_schema.spelled(older, "reward.num_workers") == "reward_model.num_workers"
    now = verl_schema.defaults(verl_schema.find("0.9.1"), "megatron")
    assert verl_schema.spelled(now, "reward.num_workers") == "reward.num_workers"
    assert verl_schema.spelled(now, "trainer.nnodes") == "trainer.nnodes"


def test_a_composed_configuration_is_kept_until_a_file_of_it_changes(tmp_path, monkeypatch):
    installed = verl_schema.find("0.9.1").directory
    shutil.copytree(installed, tmp_path / "trainer" / "config")
    schema = verl_schema.Schema("0.9.1", tmp_path / "trainer" / "config", "a copy")
    composed, made = verl_schema._composed, []
    monkeypatch.setattr(verl_schema, "_composed", lambda *given: made.append(given) or composed(*given))

    def read():
        verl_schema._pickled.cache_clear()  # as another process
        return verl_schema.defaults(schema, "megatron")

    try:
        first, second = read(), read()
        assert len(made) == 1
        assert second == first
        assert str(second) == str(first)
        assert OmegaConf.is_struct(second)
        assert not verl_schema.declares(second, "trainer.no_such_key")
        overrides = ["trainer.nnodes=3", "+ray_kwargs.ray_init.x=1", "actor_rollout_ref.actor.optim.lr=1e-5"]
        again = verl_schema.compose(schema, ["model_engine=megatron", *overrides])
        assert again.trainer.nnodes == 3
        with pytest.raises(RecipeError, match="no_such_key"):
            verl_schema.compose(schema, ["model_engine=megatron", "trainer.no_such_key=1"])

        [kept] = (verl_schema.cache().parent / "composed").iterdir()
        kept.write_text("{")  # damaged: composed anew
        assert read() == first
        assert len(made) == 2

        [kept] = (verl_schema.cache().parent / "composed").iterdir()
        assert kept.stat().st_mode & 0o077 == 0
        kept.chmod(0o664)  # others may have written it: not run
        assert read() == first
        assert len(made) == 3

        changed = schema.directory / "ppo_trainer.yaml"
        changed.write_text(changed.read_text().replace("total_epochs: 30", "total_epochs: 31"))
        assert read().trainer.total_epochs == 31
        assert len(made) == 4
    finally:
        verl_schema._pickled.cache_clear()
