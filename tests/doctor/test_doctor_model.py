"""The model directory, made by hand: a few bytes of safetensors and the JSON files beside them."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import pytest
from fake_node import only, states

from recipes.doctor import model

RECIPE = "qwen3/grpo_0_6b_vllm_a2"
CONFIG = {
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}
SIZES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}


def shard(path, tensors):
    """Write a safetensors file; tensors: name → dtype, four values each."""
    entries, place = {}, 0
    for name, dtype in tensors.items():
        end = place + 4 * SIZES[dtype]
        entries[name] = {"dtype": dtype, "shape": [4], "data_offsets": [place, end]}
        place = end
    header = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(place))


class Directory:
    def __init__(self, folder, fake):
        self.folder, self.fake = folder, fake
        folder.mkdir()
        self.write("config.json", CONFIG)
        self.write("generation_config.json", {"eos_token_id": [151645, 151643]})
        self.write("tokenizer_config.json", {"eos_token": "<|im_end|>", "chat_template": "{{ messages }}"})
        self.write("tokenizer.json", {"added_tokens": [{"id": 151645, "content": "<|im_end|>"}]})
        self.shards(BF16=("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"))

    def write(self, name, tree):
        (self.folder / name).write_text(json.dumps(tree))

    def shards(self, **names):
        """One shard a dtype, and the index."""
        listed = {}
        for number, (dtype, tensors) in enumerate(names.items(), 1):
            file = f"model-{number:05}.safetensors"
            shard(self.folder / file, dict.fromkeys(tensors, dtype))
            listed |= dict.fromkeys(tensors, file)
        self.write("model.safetensors.index.json", {"weight_map": listed})

    def look(self, *overrides):
        return list(model.look(self.fake.node(RECIPE, f"model.path={self.folder}", *overrides)))


@pytest.fixture
def directory(tmp_path, fake):
    return Directory(tmp_path / "model", fake)


def test_a_whole_model_is_in_order(directory):
    lines = directory.look()
    assert {line.state for line in lines} == {"ok"}
    assert {line.subject for line in lines} == {"shards", "dtype", "architecture", "end of text", "tokenizer"}


def test_a_shard_that_is_missing_and_one_that_is_cut_off(directory):
    first = directory.folder / "model-00001.safetensors"
    first.write_bytes(first.read_bytes()[:-3])
    assert "truncated" in only(directory.look(), "shards").text
    first.unlink()
    line = only(directory.look(), "shards")
    assert line.state == "error"
    assert "model-00001.safetensors, which is not there" in line.text


def test_a_shard_of_another_fetch_is_a_warning(directory):
    shard(directory.folder / "model-00009.safetensors", {"x": "BF16"})
    assert states(directory.look(), "shards") == ["warning", "ok"]


def test_an_empty_directory_and_one_that_is_not_there(directory, tmp_path, fake):
    empty = tmp_path / "empty"
    empty.mkdir()
    lines = list(model.look(fake.node(RECIPE, f"model.path={empty}")))
    assert states(lines, "config") == states(lines, "shards") == states(lines, "tokenizer") == ["error"]
    assert states(lines, "dtype") == ["unseen"]
    (line,) = model.look(fake.node(RECIPE, f"model.path={tmp_path / 'nowhere'}"))
    assert line.state == "error"
    (line,) = model.look(fake.node(RECIPE, "model.path=Qwen/Qwen3-0.6B"))
    assert line.state == "unseen"


@pytest.mark.parametrize(
    ("config", "dtype", "named"),
    [({"quantization_config": {"quant_method": "fp8"}}, "BF16", "fp8"), ({}, "F8_E4M3", "F8_E4M3")],
)
def test_a_quantised_checkpoint_cannot_be_trained(directory, config, dtype, named):
    directory.write("config.json", CONFIG | config)
    directory.shards(**{dtype: ("model.embed_tokens.weight",)})
    line = only(directory.look(), "dtype")
    assert line.state == "error"
    assert named in str(line.finding.keys)


def test_another_model_than_the_recipe_names(directory):
    directory.write("config.json", CONFIG | {"num_hidden_layers": 36})
    line = only(directory.look(), "architecture")
    assert line.state == "error"
    assert line.finding.keys == {"model.name": "qwen3_0_6b", "num_hidden_layers": "36"}
    directory.write("config.json", {k: v for k, v in CONFIG.items() if k != "hidden_size"})
    assert only(directory.look(), "architecture").state == "unseen"


def test_mtp_layers_that_are_declared_and_not_there(directory):
    directory.write("config.json", CONFIG | {"num_nextn_predict_layers": 1})
    assert only(directory.look(), "MTP").state == "warning"
    enabled = directory.look("verl.actor_rollout_ref.model.mtp.enable=true")
    assert only(enabled, "MTP").state == "error"
    directory.shards(BF16=("model.embed_tokens.weight", "model.layers.28.eh_proj.weight"))
    assert only(directory.look(), "MTP").text.startswith("1 tensors of 1")


@pytest.mark.parametrize(
    ("generation", "state"),
    [
        ({"eos_token_id": [151645, 151643]}, "ok"),
        ({"eos_token_id": 151643}, "error"),
        ({}, "ok"),
        ({"eos_token_id": "151645"}, "ok"),
    ],
)
def test_the_rollout_must_stop_where_the_tokenizer_ends(directory, generation, state):
    directory.write("generation_config.json", generation)
    line = only(directory.look(), "end of text")
    assert line.state == state
    assert state == "ok" or "151645" in line.finding.sentence


def test_some_ends_agree_and_one_does_not(directory):
    directory.write("config.json", CONFIG | {"eos_token_id": [151643]})
    directory.write("generation_config.json", {"eos_token_id": [151643]})
    assert only(directory.look(), "end of text").state == "warning"


def test_an_end_that_only_one_file_names_is_unseen(directory):
    directory.write("config.json", {k: v for k, v in CONFIG.items() if k != "eos_token_id"})
    directory.write("generation_config.json", {})
    assert only(directory.look(), "end of text").state == "unseen"


def test_the_id_of_the_end_stands_in_one_of_three_places(directory):
    directory.write("tokenizer.json", {"model": {"vocab": {"<|im_end|>": 7}}})
    assert model._tokenizer_eos(directory.folder) == {7}
    added = {"8": {"content": "<|im_end|>"}}
    directory.write("tokenizer_config.json", {"eos_token": {"content": "<|im_end|>"}, "added_tokens_decoder": added})
    assert model._tokenizer_eos(directory.folder) == {8}
    directory.write("tokenizer.json", {"added_tokens": [{"id": 9, "content": "<|im_end|>"}]})
    assert model._tokenizer_eos(directory.folder) == {9}


def test_a_tokenizer_without_a_chat_template(directory):
    directory.write("tokenizer_config.json", {"eos_token": "<|im_end|>"})
    line = only(directory.look(), "tokenizer")
    assert line.state == "error"
    (directory.folder / "chat_template.jinja").write_text("{{ messages }}")
    assert only(directory.look(), "tokenizer").state == "ok"


@pytest.mark.parametrize("text", ["", "[]", "null", '{"eos_token_id": {"a": [1]}}', "[" * 5000])
def test_files_that_are_no_json_object_end_nothing(directory, text):
    for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json", "config.json"):
        (directory.folder / name).write_text(text)
    assert directory.look()


def test_no_recipe_names_no_model(fake):
    (line,) = model.look(replace(fake.node(), subject=None))
    assert line.state == "unseen"
