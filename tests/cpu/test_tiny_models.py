"""The tiny models are what they claim to be, byte for byte the same each time, and never half there."""

import json

import pytest

from recipes.cpu import tiny_models
from recipes.cpu.tiny_models import tiny_data, tiny_model


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def weight_names(folder):
    from safetensors import safe_open

    names = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            names[file.name] = set(weights.keys())
    return names


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "glm5_2"])
def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(tmp_path, name):
    first, second, other = (contents(tiny_model(name, tmp_path / str(n), seed)) for n, seed in enumerate((3, 3, 4)))
    assert first == second
    assert first["model.safetensors"] != other["model.safetensors"]


def test_a_build_leaves_torch_random_state_alone(tmp_path):
    import torch

    before = torch.get_rng_state()
    tiny_model("qwen3", tmp_path / "model")
    assert torch.equal(before, torch.get_rng_state())


def test_transformers_loads_each_model_and_its_words(tiny):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for name in ("qwen3", "qwen3_moe", "glm5_2"):
        _, report = AutoModelForCausalLM.from_pretrained(tiny(name), output_loading_info=True)
        assert not report["missing_keys"] and not report["mismatched_keys"]
        tokenizer = AutoTokenizer.from_pretrained(tiny(name))
        assert tokenizer.convert_ids_to_tokens(range(tiny_models.VOCABULARY)) == list(tiny_models.WORDS)


def test_chat_templates_are_lossless(tiny):
    from transformers import AutoTokenizer

    asked = [{"role": "user", "content": "say 7"}]
    texts = {
        "qwen3": "<|im_start|>user\nsay 7<|im_end|>\n<|im_start|>assistant\n",
        "glm5_2": "[gMASK]<sop><|user|>say 7<|assistant|>",
    }
    for name, text in texts.items():
        tokenizer = AutoTokenizer.from_pretrained(tiny(name))
        assert tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False) == text
        assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]


def test_the_mtp_layer_is_layer_2_and_only_in_the_checkpoint(tiny):
    (with_mtp,) = weight_names(tiny("glm5_2")).values()
    (without,) = weight_names(tiny("glm5_2", mtp=False)).values()
    mtp = with_mtp - without
    assert without < with_mtp
    assert (len(without), len(mtp)) == (51, 35)
    assert all(name.startswith("model.layers.2.") for name in mtp)
    assert {"enorm", "hnorm", "eh_proj"} <= {name.split(".")[3] for name in mtp}


def test_two_shards_hold_what_one_does_with_the_mtp_layer_at_the_end(tiny):
    (whole,) = weight_names(tiny("glm5_2")).values()
    shards = weight_names(tiny("glm5_2", shards=2))
    first, last = shards.values()
    assert first | last == whole
    assert not first & last
    assert {name for name in whole if name.startswith("model.layers.2.")} < last
    index = json.loads((tiny("glm5_2", shards=2) / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file, names in shards.items() for name in names}


def test_an_existing_model_is_kept_and_anything_else_is_not_overwritten(tmp_path):
    model = tiny_model("qwen3", tmp_path / "model")
    written = (model / "model.safetensors").stat().st_mtime_ns
    tiny_model("qwen3", model)
    assert (model / "model.safetensors").stat().st_mtime_ns == written
    with pytest.raises(FileExistsError, match=r"'seed': 0.*not .*'seed': 1.*remove this one"):
        tiny_model("qwen3", model, seed=1)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="did not build"):
        tiny_model("qwen3", mine)
    assert contents(mine) == {"notes.txt": b"keep"}


def test_a_build_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_models, "_tokenizer", lambda template: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tiny_model("qwen3", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"), [(("qwen4", 0, 1), "no tiny model 'qwen4'"), (("qwen3", 0, 3), "not 3")]
)
def test_what_cannot_be_built_is_said(tmp_path, arguments, sentence):
    name, seed, shards = arguments
    with pytest.raises(ValueError, match=sentence):
        tiny_model(name, tmp_path / "model", seed, shards)


def test_the_data_set_asks_and_knows_the_answer(tmp_path):
    import pandas

    folder = tiny_data(tmp_path / "data", train=20, val=5)
    table = pandas.read_parquet(folder / "train.parquet")
    assert len(table) == 20
    for row in table.itertuples():
        assert row.prompt[0]["content"] == f"say {row.reward_model['ground_truth']}"
    assert len(pandas.read_parquet(folder / "val.parquet")) == 5


def test_command_line_builds_and_refuses_with_a_sentence(tmp_path, capsys):
    tiny_models.main(["qwen3", str(tmp_path / "model"), "--seed", "5"])
    assert json.loads((tmp_path / "model" / "tiny_model.json").read_text())["seed"] == 5
    with pytest.raises(SystemExit) as refusal:
        tiny_models.main(["qwen3", str(tmp_path / "model")])
    assert refusal.value.code == 2
    assert "Choose another directory" in capsys.readouterr().err
