"""Megatron-Core under the CPU target computes what transformers computes, and writes back the weights it was given.

Known with torch 2.11.0, megatron-core 0.18.0, megatron-bridge 0.5.1, transformers 5.8.1, verl 0.9.1.
"""

import json

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

IN_ONE_PROCESS = """
import dataclasses, importlib.util, json, sys
from recipes.cpu import parity

models, exports = json.loads(sys.argv[1])
report = {}
for name, folder in models.items():
    bridge, model = parity.megatron_model(folder)
    report[name] = dataclasses.asdict(parity.compare(folder, model))

# transformers' GLM as it is, without the rotary embedding of recipes.cpu.hf_glm
import transformers.models.glm_moe_dsa.modeling_glm_moe_dsa as patched
spec = importlib.util.spec_from_file_location(patched.__name__ + "_again", patched.__file__)
untouched = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(untouched)
patched.apply_rotary_pos_emb = untouched.apply_rotary_pos_emb
report["glm5_2 with transformers' own rotary embedding"] = dataclasses.asdict(parity.compare(models["glm5_2"], model))

for source, out, strict in exports:
    bridge, model = parity.megatron_model(source)
    parity.export(bridge, model, out, strict)
print("REPORT", json.dumps(report))
"""

SHARDS, STRICT = (1, 2), (True, False)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    root = tmp_path_factory.mktemp("exported")
    return {(shards, strict): root / f"shards{shards}-strict{strict}" for shards in SHARDS for strict in STRICT}


@pytest.fixture(scope="module")
def report(tiny, exported, child):
    """One process for all: importing Megatron takes longer than everything else here."""
    models = {name: str(tiny(name)) for name in ("qwen3", "qwen3_moe", "glm5_2")}
    exports = [(str(tiny("glm5_2", shards=shards)), str(out), strict) for (shards, strict), out in exported.items()]
    result = child("-c", IN_ONE_PROCESS, json.dumps([models, exports]), timeout=400)
    assert result.returncode == 0, result.stderr[-3000:]
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("REPORT"))
    return json.loads(line.removeprefix("REPORT"))


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "glm5_2"])
def test_logits_and_gradients_are_those_of_transformers(report, name):
    found = report[name]
    assert found["logits_difference"] <= 1e-5
    assert found["largest_logit"] > 1  # or the difference would say little
    assert found["megatron_gradient_norm"] == pytest.approx(found["transformers_gradient_norm"], rel=1e-4)


def test_a_wrong_rotary_embedding_would_be_seen(report):
    assert report["glm5_2 with transformers' own rotary embedding"]["logits_difference"] > 0.01


def weights(folder):
    return {name: weight for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}


def of_mtp(name):
    return name.startswith("model.layers.2.")


@pytest.mark.parametrize("shards", SHARDS)
def test_not_strict_writes_all_but_the_mtp_layer_unchanged(report, tiny, exported, shards):
    source, found = weights(tiny("glm5_2", shards=shards)), weights(exported[shards, False])
    missing = source.keys() - found.keys()
    assert found.keys() <= source.keys()
    assert {name for name in source if of_mtp(name)} == missing
    assert (len(found), len(missing)) == (51, 35)
    for name, weight in found.items():
        assert weight.equal(source[name]), name


@pytest.mark.parametrize("shards", SHARDS)
def test_strict_drops_every_file_that_holds_a_weight_of_the_mtp_layer(report, tiny, exported, shards):
    """Without an error: who believes the exit code loses the file with the head, or all of the model."""
    source, found = tiny("glm5_2", shards=shards), exported[shards, True]
    whole = [file for file in source.glob("*.safetensors") if not any(map(of_mtp, load_file(file)))]
    assert {file.name for file in found.glob("*.safetensors")} == {file.name for file in whole}
    assert set(weights(found)) == {name for file in whole for name in load_file(file)}
    assert len(weights(found)) == {1: 0, 2: 25}[shards]
    assert "lm_head.weight" not in weights(found)
