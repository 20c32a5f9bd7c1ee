"""A recipe: composed from layers, typed by the schema, and able to say where each value came from."""

from __future__ import annotations

import subprocess
import sys

import pytest

from recipes import params
from recipes.errors import RecipeError, nearest

NAME = "quickstart/grpo"


def value(key, *overrides, **parameters):
    return params.explain(params.compose(NAME, overrides, parameters), key)[0]


def refusal(*overrides, **parameters) -> str:
    with pytest.raises(RecipeError) as refused:
        params.compose(NAME, overrides, parameters)
    return str(refused.value)


def test_importing_the_package_and_composing_needs_no_torch_verl_or_ray():
    code = (
        "import sys, recipes, recipes.params, recipes.command, recipes.preflight, recipes.export, recipes.notebook;"
        "recipes.params.compose('quickstart/grpo');"
        "print([m for m in ('torch', 'verl', 'ray', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


# Each of these arrives wrong if YAML or papermill is left to guess its type (facts of papermill 2.7 and YAML 1.1).
@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        ("optimizer.lr=1e-6", "optimizer.lr", 1e-6),
        ("optimizer.lr=.5", "optimizer.lr", 0.5),
        ("checkpoint.strict=off", "checkpoint.strict", False),
        ("checkpoint.strict=false", "checkpoint.strict", False),
        ("checkpoint.strict=True", "checkpoint.strict", True),
        ("checkpoint.strict=null", "checkpoint.strict", None),
        ("trainer.experiment=0012345", "trainer.experiment", "0012345"),
        ("trainer.experiment=1:30", "trainer.experiment", "1:30"),
        ("trainer.experiment=12e4567", "trainer.experiment", "12e4567"),
        ("trainer.experiment=off", "trainer.experiment", "off"),
        ("model.path=/a b/c", "model.path", "/a b/c"),
        ("external_modules=a, b,,c", "external_modules", ["a", "b", "c"]),
        ("external_modules=[a, b]", "external_modules", ["a", "b"]),
        ("env.HCCL_DETERMINISTIC=true", "env.HCCL_DETERMINISTIC", "true"),
        ("env.PORTS=60000-60050", "env.PORTS", "60000-60050"),
        ("verl.trainer.esi_redundant_time=1e1", "verl.trainer.esi_redundant_time", 10.0),
        ("verl.trainer.project_name='1'", "verl.trainer.project_name", "1"),
        ("tensor_parallel=2", "parallel.tensor", 2),
    ],
)
def test_what_was_written_is_what_arrives(override, key, expected):
    arrived = value(key, override)
    assert arrived == expected
    assert type(arrived) is type(expected)


def test_yaml_files_are_read_as_written(params_folder):
    (params_folder / "quickstart" / "traps.yaml").write_text(
        "defaults: [base]\noptimizer: {lr: 1e-6}\ncheckpoint: {strict: off}\n"
        "trainer: {experiment: 0012345, project: 1:30}\nenv: {A: true, B: 0012345, C: off}\n"
    )
    recipe = params.compose("quickstart/traps").recipe
    assert recipe.optimizer.lr == 1e-6
    assert recipe.checkpoint.strict is False
    assert (recipe.trainer.experiment, recipe.trainer.project) == ("0012345", "1:30")
    assert recipe.env == {"VERL_PLATFORM": "cpu", **recipe.env, "A": "true", "B": "0012345", "C": "off"}


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"learning_rate": "1e-6x"}, "finite number"),
        ({"learning_rate": float("inf")}, "finite number"),
        ({"learning_rate": float("nan")}, "finite number"),
        ({"tensor_parallel": True}, "whole number"),
        ({"tensor_parallel": 2.0}, "whole number"),
        ({"tensor_parallel": 0}, "at least 1"),
        ({"checkpoint_strict": "maybe"}, "true or false"),
        ({"stack": 1234567}, "in quotes"),
        ({"external_modules": ["a", 1]}, "list of strings"),
        ({"tensor_paralel": 2}, "did you mean tensor_parallel"),
    ],
)
def test_a_parameter_of_the_wrong_type_is_refused_with_its_name_and_value(parameters, words):
    sentence = refusal(**parameters)
    assert words in sentence
    assert "parameter" in sentence


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.lrr=1", "did you mean optimizer.lr"),
        ("nope", "key=value"),
        ("parallel=3", "parallel.<key>"),
        ("batch.train=0x10", "whole number"),
        ("batch.mini=null", "needs a value"),
        ("rollout.engine=vlm", "did you mean vllm"),
        ("data.train_files=[a]", "must be one str"),
        ("env.A=null", ""),
    ],
)
def test_an_override_that_cannot_be_is_refused(override, words):
    if words:
        assert words in refusal(override)
    else:  # an environment variable is a text, whatever it looks like
        assert value("env.A", override) == "null"


def test_none_means_as_in_the_recipe():
    assert value("optimizer.lr", learning_rate=None) == value("optimizer.lr")


def test_an_unknown_recipe_is_refused_with_the_nearest_name():
    with pytest.raises(RecipeError, match="did you mean quickstart/grpo"):
        params.compose("quickstart/grp")


def test_a_value_says_which_file_and_line_or_flag_set_it_and_what_it_replaced():
    composed = params.compose(NAME, ["optimizer.lr=1e-3"])
    held, meaning, history = params.explain(composed, "learning_rate")
    assert (held, meaning) == (1e-3, "learning rate of the actor")
    assert history[-1].origin == "override optimizer.lr"
    assert history[0].origin.startswith("params/quickstart/base.yaml:")


def test_every_key_of_the_schema_has_a_meaning():
    assert [key for key, meaning in params.declared_keys().items() if not meaning] == []


def test_a_list_or_scalar_of_the_file_replaces_that_of_its_base(params_folder):
    (params_folder / "quickstart" / "mine.yaml").write_text("defaults: [base]\nexternal_modules: [other]\n")
    assert params.compose("quickstart/mine").recipe.external_modules == ["other"]


def test_a_recipe_may_be_a_file_of_ones_own(params_folder, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults: [quickstart/base]\nbatch: {train: 16}\n")
    composed = params.compose(str(mine))
    assert composed.recipe.batch.train == 16
    assert [s.key for s in params.difference(composed)] == ["batch.train"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("defaults: [bse]\n", "did you mean"),
        ("defaults: [mine]\n", "circle"),
        ("batch: {train: 1, train: 2}\n", "given twice"),
        ("- a\n", "mapping"),
        ("batch: {train: [}\n", r"quickstart/mine.yaml:1 cannot be read as YAML: [^\n]*\.$"),
        ("title: x\n", "no value for"),
    ],
)
def test_a_file_that_cannot_be_composed_says_why(params_folder, text, words):
    (params_folder / "quickstart" / "mine.yaml").write_text(text)
    with pytest.raises(RecipeError, match=words):
        params.compose("quickstart/mine")


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("optimizer.lrr", "; did you mean optimizer.lr?"),
        ("optimizer.nothing_of_the_kind", "."),  # sharing a group is no likeness
        ("trainer.project_nam", "; did you mean trainer.project?"),
        ("mindspeed.llm_kwargs.x", "; did you mean mindspeed.mcore_kwargs?"),
        ("ascend-9.1", "; did you mean ascend-9.1.0?"),
        ("optimizer.clip", "; did you mean optimizer.clip_grad?"),
    ],
)
def test_a_name_nobody_knows_gets_the_nearest_ones_or_a_full_stop(name, ending):
    known = (
        "optimizer.lr",
        "optimizer.lr",
        "optimizer",
        "optimizer.clip_grad",
        "trainer.project",
        "ascend-9.1.0",
        "mindspeed.mcore_kwargs",
    )
    assert nearest(name, known) == ending


def test_a_list_that_holds_a_wrong_word_is_shown_as_it_was_written():
    with pytest.raises(
        RecipeError, match=r"stop_on=\['NAN', 'MISMTCH'\].*: 'MISMTCH' must be one of .*mean MISMATCH\?$"
    ):
        params.compose("quickstart/grpo", ["supervision.stop_on=[NAN, MISMTCH]"])


@pytest.mark.parametrize("name", params.names())
def test_no_recipe_repeats_what_its_base_says(name):
    assert [str(s) for s in params.repeated(params.home() / "params" / f"{name}.yaml")] == []


def test_a_repeated_line_is_found(params_folder):
    mine = params_folder / "quickstart" / "mine.yaml"
    mine.write_text("defaults: [base]\nbatch: {train: 8}\noptimizer: {lr: 3e-3}\n")
    assert [s.key for s in params.repeated(mine)] == ["batch.train"]
