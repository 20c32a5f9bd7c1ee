"""An exported checkpoint is judged by its files: an export that lost half of the model exits 0 as well."""

from __future__ import annotations

import json
import struct
import subprocess
import sys

import pytest
from click.testing import CliRunner

from recipes import checkpoint, cli_tools
from recipes.errors import RecipeError

BYTES = {"F32": 4, "BF16": 2, "I64": 8}
CONFIG = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1, "tie_word_embeddings": False}


def shard(path, tensors):
    """Write a safetensors file as the format says: length, JSON header, data. `tensors`: name → (dtype, shape)."""
    header, place = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = BYTES[dtype]
        for width in shape:
            size *= width
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, place + size]}
        place += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * place)


def write(folder, *shards, config=CONFIG, index=True):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors" if index else "model.safetensors"
        shard(folder / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def layer(number, dtype="BF16"):
    return {f"model.layers.{number}.mlp.experts.{e}.down_proj.weight": (dtype, (4, 8)) for e in range(3)}


FIRST = {"model.embed_tokens.weight": ("BF16", (16, 4)), **layer(0)}
SECOND = {**layer(1), "model.norm.weight": ("BF16", (4,)), "lm_head.weight": ("BF16", (16, 4))}
MTP = layer(2)


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "source", FIRST, SECOND | MTP)


def errors(check):
    return [f.sentence for f in check.findings if f.severity == "error"]


def warnings(check):
    return [f.sentence for f in check.findings if f.severity == "warning"]


def test_a_checkpoint_is_a_whole_export_of_itself(source):
    check = checkpoint.compare(source, source)
    assert (check.passed, check.found, check.expected, check.mtp, check.findings) == (True, 9, 9, 3, ())


def test_only_the_mtp_layer_may_be_missing(source, tmp_path):
    check = checkpoint.compare(source, write(tmp_path / "export", FIRST, SECOND))
    assert check.passed
    assert check.missing == ()
    assert check.missing_mtp == tuple(sorted(MTP))


def test_the_same_layer_counts_when_the_config_declares_no_mtp(tmp_path):
    plain = {"num_hidden_layers": 2}
    source = write(tmp_path / "source", FIRST, SECOND | MTP, config=plain)
    check = checkpoint.compare(source, write(tmp_path / "export", FIRST, SECOND, config=plain))
    assert errors(check) == ["3 of 12 tensors are missing: model.layers.2.mlp.experts.*.down_proj.weight (3)."]


def test_a_dropped_shard_is_named_with_its_cause_and_remedy(source, tmp_path):
    check = checkpoint.compare(source, write(tmp_path / "export", FIRST))
    assert (check.passed, check.found, check.lost_shards) == (False, 4, ("model-00002-of-00002.safetensors",))
    (finding,) = check.findings
    assert "5 of 9 tensors are missing" in finding.sentence
    assert "Nothing of model-00002-of-00002.safetensors has arrived" in finding.sentence
    assert "checkpoint.strict=false" in finding.remedy


def test_an_export_that_wrote_nothing_is_a_failed_check_and_no_crash(source, tmp_path):
    empty = write(tmp_path / "export", index=False)
    check = checkpoint.compare(source, empty)
    assert errors(check) == ["no weight was written at all."]
    assert (check.passed, check.found, check.expected) == (False, 0, 9)


def test_a_file_the_index_names_but_that_is_not_there_takes_its_tensors_away(source, tmp_path):
    export = write(tmp_path / "export", FIRST, SECOND)
    (export / "model-00001-of-00002.safetensors").unlink()
    check = checkpoint.compare(source, export)
    assert "the index names model-00001-of-00002.safetensors, which is not there." in errors(check)
    assert set(check.missing) == set(FIRST)


@pytest.mark.parametrize("kept", [4, 60, -1])
def test_a_truncated_shard_holds_nothing(source, tmp_path, kept):
    export = write(tmp_path / "export", FIRST, SECOND)
    file = export / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    check = checkpoint.compare(source, export)
    assert set(check.missing) == set(SECOND)
    assert any("truncated" in e or "ends within its header" in e for e in errors(check))


def test_a_tensor_in_a_shard_that_the_index_does_not_list_is_not_there_for_a_loader(source, tmp_path):
    export = write(tmp_path / "export", FIRST, SECOND)
    index = export / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    del listed["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(listed))
    check = checkpoint.compare(source, export)
    assert check.missing == ("lm_head.weight",)
    assert any("holds lm_head.weight, which the index does not list" in e for e in errors(check))


def test_a_tensor_the_index_lists_but_no_shard_holds_is_missing(source, tmp_path):
    export = write(tmp_path / "export", FIRST, SECOND)
    shard(export / "model-00001-of-00002.safetensors", layer(0))
    check = checkpoint.compare(source, export)
    assert check.missing == ("model.embed_tokens.weight",)
    assert any("whose header has no such name" in e for e in errors(check))


def test_another_shape_is_an_error_and_a_padded_vocabulary_is_called_by_its_name(source, tmp_path):
    padded = {**FIRST, "model.embed_tokens.weight": ("BF16", (20, 4))}
    check = checkpoint.compare(source, write(tmp_path / "export", padded, SECOND))
    assert check.shapes == (("model.embed_tokens.weight", "16×4", "20×4"),)
    (finding,) = check.findings
    assert (finding.severity, finding.remedy) == ("error", "The vocabulary was padded and not cut back.")


@pytest.mark.parametrize(
    ("dtype", "severity", "words"),
    [("F32", "warning", "the values are the same"), ("I64", "error", "do not hold the same values")],
)
def test_a_dtype_between_floats_is_a_warning_and_any_other_an_error(source, tmp_path, dtype, severity, words):
    changed = {**FIRST, "model.embed_tokens.weight": (dtype, (16, 4))}
    check = checkpoint.compare(source, write(tmp_path / "export", changed, SECOND))
    (finding,) = check.findings
    assert finding.severity == severity
    assert f"from BF16 to {dtype}" in finding.sentence
    assert words in finding.sentence
    assert check.passed is (severity == "warning")


def test_a_narrower_float_says_that_values_were_rounded(tmp_path):
    wide = {"a": ("F32", (2,))}
    source = write(tmp_path / "source", wide, index=False)
    check = checkpoint.compare(source, write(tmp_path / "export", {"a": ("BF16", (2,))}, index=False))
    assert check.passed
    assert "values were rounded" in warnings(check)[0]


def test_extra_tensors_and_files_no_index_names_are_warnings(source, tmp_path):
    export = write(tmp_path / "export", FIRST, SECOND | {"model.layers.9.x": ("BF16", (1,))})
    shard(export / "old.safetensors", {"b": ("F32", (1,))})
    check = checkpoint.compare(source, export)
    assert check.passed
    assert check.extra == ("model.layers.9.x",)
    assert any("old.safetensors is in no index" in w for w in warnings(check))


def test_a_tied_head_may_be_written_or_left_out(tmp_path):
    tied = {**CONFIG, "tie_word_embeddings": True}
    headless = {k: v for k, v in SECOND.items() if k != "lm_head.weight"}
    source = write(tmp_path / "source", FIRST, SECOND, config=tied)
    assert checkpoint.compare(source, write(tmp_path / "export", FIRST, headless, config=tied)).findings == ()


@pytest.mark.parametrize(
    "index",
    ["{", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../source/x.safetensors"}}'],
)
def test_an_index_that_is_none_or_leaves_its_directory_is_refused_in_words(source, tmp_path, index):
    export = write(tmp_path / "export", FIRST, SECOND)
    (export / "model.safetensors.index.json").write_text(index)
    check = checkpoint.compare(source, export)
    assert not check.passed
    assert errors(check)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 64,
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 14) + b'{"a":{"x":1}} ',
        b"version https://git",
    ],
)
def test_bytes_that_are_no_safetensors_file_are_a_fault_of_that_file(source, tmp_path, content):
    export = write(tmp_path / "export", FIRST, SECOND)
    (export / "model-00001-of-00002.safetensors").write_bytes(content)
    check = checkpoint.compare(source, export)
    assert any("model-00001-of-00002.safetensors" in e for e in errors(check))
    assert set(check.missing) == set(FIRST)


def test_a_header_whose_offsets_do_not_fit_is_damaged(source, tmp_path):
    text = json.dumps({"a": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 4]}}).encode()
    export = write(tmp_path / "export", {"a": ("BF16", (4,))}, index=False)
    (export / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 8)
    assert any("do not fit its shape" in e for e in errors(checkpoint.compare(source, export)))


def test_verl_layout_is_found_below_a_step_directory_unless_it_is_ambiguous(source, tmp_path):
    step = tmp_path / "global_step_3"
    write(step / "actor" / "model" / "huggingface", FIRST, SECOND)
    assert checkpoint.compare(source, step).passed
    write(step / "critic" / "huggingface", FIRST, SECOND)
    with pytest.raises(RecipeError, match="holds 2 exports"):
        checkpoint.compare(source, step)


def test_a_source_that_is_no_checkpoint_is_refused(source, tmp_path):
    with pytest.raises(RecipeError, match="no directory on this machine"):
        checkpoint.compare("zai-org/GLM-5.2", source)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecipeError, match="no tensor to compare with"):
        checkpoint.compare(tmp_path / "empty", source)


def test_tensors_are_shown_by_kind_and_layer():
    names = [f"model.layers.{n}.mlp.experts.{e}.up_proj.weight" for n in (0, 1, 2, 5) for e in range(8)]
    assert checkpoint.grouped([*names, "lm_head.weight"]) == [
        "model.layers.0-2,5.mlp.experts.*.up_proj.weight (32)",
        "lm_head.weight",
    ]


def test_the_command_says_it_in_text_and_json_and_by_its_exit_code(source, tmp_path):
    broken = write(tmp_path / "export", FIRST)
    good = CliRunner().invoke(cli_tools.check_export, [str(source), str(source)])
    assert (good.exit_code, "the export is whole." in good.output) == (0, True)
    bad = CliRunner().invoke(cli_tools.check_export, [str(source), str(broken)])
    assert (bad.exit_code, "must not be used" in bad.output) == (1, True)
    told = json.loads(CliRunner().invoke(cli_tools.check_export, [str(source), str(broken), "--json"]).output)
    assert (told["passed"], told["found"], len(told["missing"])) == (False, 4, 5)


def test_it_needs_neither_torch_nor_safetensors():
    code = "import sys, recipes.checkpoint; print([m for m in ('torch', 'safetensors', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.slow
def test_the_glm_shaped_checkpoint_and_its_two_real_failures(tmp_path):
    """What Megatron-Bridge 0.5 leaves with strict=True: a whole shard lost (two files), or nothing (one file)."""
    made = {}
    for shards in (1, 2):
        made[shards] = tmp_path / f"glm{shards}"
        build = ["-m", "recipes.cpu.tiny_models", "glm5_2", str(made[shards]), "--mtp", "--shards", str(shards)]
        subprocess.run([sys.executable, *build], check=True, capture_output=True, timeout=120)
    whole = checkpoint.compare(made[2], made[1])
    assert (whole.passed, whole.expected, whole.mtp) == (True, 51, 35)

    lost = tmp_path / "lost"
    lost.mkdir()
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        (lost / name).write_bytes((made[2] / name).read_bytes())
    listed = json.loads((made[2] / "model.safetensors.index.json").read_text())["weight_map"]
    kept = {name: file for name, file in listed.items() if file.startswith("model-00001")}
    (lost / "model.safetensors.index.json").write_text(json.dumps({"weight_map": kept}))
    dropped = checkpoint.compare(made[2], lost)
    assert (dropped.passed, dropped.found, dropped.expected) == (False, 25, 51)
    assert (len(dropped.missing), dropped.lost_shards) == (26, ("model-00002-of-00002.safetensors",))

    nothing = tmp_path / "nothing"
    nothing.mkdir()
    (nothing / "config.json").write_bytes((made[1] / "config.json").read_bytes())
    assert errors(checkpoint.compare(made[1], nothing)) == ["no weight was written at all."]
