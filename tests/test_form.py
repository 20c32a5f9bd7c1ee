"""The form for exploring: what settings come to, the file they make, and the widgets through their Python API."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import nbformat
import papermill
import pytest
from click.testing import CliRunner

from recipes import form, params, preflight
from recipes.cli import main
from recipes.command import build
from recipes.errors import RecipeError

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "30_explore.ipynb"
QWEN, GLM, CPU = "qwen3/grpo_8b_vllm_a2", "glm5_2/grpo_a3_512", "quickstart/grpo"


def rules(explored: form.Explored) -> set[str]:
    return {finding.rule for finding in explored.found}


# ------------------------------------------------------------------------------------------------- what it comes to


def test_as_it_is_nothing_differs():
    explored = form.explore(QWEN)
    assert (explored.faults, explored.changes) == ({}, {})
    assert explored.memory.device == 64e9
    assert "Nothing differs from qwen3/grpo_8b_vllm_a2" in explored.difference_html()


def test_a_setting_changes_findings_memory_and_difference():
    before, after = form.explore(QWEN), form.explore(QWEN, tensor_parallel=3, max_response_length="4096", nodes="")
    assert {"layout.heads", "layout.kv_heads"} <= rules(after) - rules(before)
    assert after.memory.training.peak != before.memory.training.peak
    assert after.changes == {"parallel.tensor": (2, 3), "data.max_response_length": (2048, 4096)}
    severity, words = after.beside("tensor_parallel")
    assert severity == "error"
    assert "layout.heads" in words
    assert after.beside("nodes") == ("", "")
    told = after._repr_mimebundle_()
    for words in ("1, 2, 4, 8, 16 or 32 do", "parallel.tensor", "training: "):
        assert words in told["text/plain"]
    assert "1, 2, 4, 8, 16 or 32 do" in told["text/html"]
    assert "data:image/png;base64" in told["text/html"]


def test_what_only_repeats_the_recipe_is_no_difference():
    assert form.explore(QWEN, tensor_parallel=2, stack="ascend-9.1.0").changes == {}


def test_what_is_refused_is_left_out_and_the_rest_is_looked_at():
    explored = form.explore(QWEN, tensor_parallel="x", nodes=0, devices=4, overrides=["optimizer.lrr=1"])
    assert explored.faults["tensor_parallel"].endswith("must be a whole number.")
    assert explored.faults["nodes"].endswith("must be at least 1.")
    assert "did you mean optimizer.lr" in explored.faults["overrides"]
    assert explored.changes == {"devices": (None, 4)}
    assert explored.looked == len(preflight.looking(here=False))
    assert "cannot be as entered: tensor parallel, nodes, overrides." in explored.findings_html()


@pytest.mark.parametrize(
    ("settings", "name", "words"),
    [
        ({"overrides": "a 'b"}, "overrides", "No closing quotation"),
        ({"overrides": "nodes"}, "overrides", "is no override"),
        ({"nodes": 2, "overrides": "nodes=x"}, "overrides", "whole number"),
        ({"stack": "ascend-9.9"}, "", "There is no stack 'ascend-9.9'"),
        ({"overrides": "verl.trainer.nosuch=1"}, "", "nosuch"),
        ({"pipeline_layout": "hf_" + "a" * 34}, "pipeline_layout", "looks like a Hugging Face token"),
    ],
)
def test_a_fault_has_its_place(settings, name, words):
    assert words in form.explore(QWEN, **settings).faults[name]


def test_stages_that_do_not_hold_all_layers_are_a_sentence_in_place_of_bars():
    explored = form.explore(QWEN, pipeline_parallel=5)
    assert explored.memory is None
    assert "its stages hold" in explored.memory_html()
    assert "layout.layers" in rules(explored)


def test_a_processor_has_no_bars():
    assert form.explore(CPU).memory_html() == ""


def test_an_unknown_name_is_refused():
    with pytest.raises(RecipeError, match="did you mean qwen3/grpo_8b_vllm_a2"):
        form.explore("qwen3/grpo_8b_vllm_a22")
    with pytest.raises(RecipeError, match="did you mean nodes"):
        form.explore(QWEN, node=3)


def test_values_from_outside_are_escaped():
    explored = form.explore(QWEN, pipeline_layout="<script>1</script>", tensor_parallel="<b>")
    html = explored._repr_mimebundle_()["text/html"]
    assert "<script>" not in html
    assert "<b>" not in html


# ------------------------------------------------------------------------------------------------------ the file


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        (QWEN, {"nodes": 2, "tensor_parallel": 4, "rollout_memory": "0.55", "micro_batch": 2}),
        (GLM, {"nodes": 16, "expert_parallel": 32}),
        (GLM, {"overrides": "external_modules=mine env.A=1 verl.trainer.balance_batch=true batch.max_tokens=null"}),
        (QWEN, {"tensor_parallel": 3}),  # a file may be written that preflight refuses: it says the same of it
        (QWEN, {}),
    ],
)
def test_the_file_is_what_was_shown(recipe, settings, tmp_path, monkeypatch):
    monkeypatch.delenv("VERL_USE_EXTERNAL_MODULES", raising=False)
    explored = form.explore(recipe, **settings)
    path = explored.write(tmp_path / "new folder" / "mine.yaml")
    assert [file.name for file in path.parent.iterdir()] == ["mine.yaml"]
    read = params.compose(str(path), label=recipe)
    assert build(read).argv == explored.command.argv
    assert build(read).environment == explored.command.environment
    assert {s.key for s in params.difference(read)} - {"title"} == set(explored.changes)
    assert [s.key for s in params.repeated(path) if s.key != "title"] == []
    done = CliRunner().invoke(main, ["check", str(path), "--anywhere", "--json"])
    assert [finding["rule"] for finding in json.loads(done.output)] == [finding.rule for finding in explored.found]
    assert f"defaults:\n- {recipe}\n" in path.read_text()


def test_a_file_may_be_the_base_of_another(tmp_path):
    first = form.explore(QWEN, nodes=2).write(tmp_path / "first.yaml")
    second = form.explore(str(first), tensor_parallel=4).write(tmp_path / "below" / "second.yaml")
    recipe = params.compose(str(second)).recipe
    assert (recipe.nodes, recipe.parallel.tensor) == (2, 4)
    with pytest.raises(RecipeError, match="is the recipe itself or one of its bases"):
        form.explore(str(second), nodes=3).write(first, overwrite=True)


def test_a_file_that_is_there_is_kept_unless_told(tmp_path):
    path = form.explore(QWEN, nodes=2).write(tmp_path / "mine.yaml")
    words = path.read_bytes()
    assert form.explore(QWEN, nodes=2).write(path) == path
    with pytest.raises(RecipeError, match="is there already; nothing was written"):
        form.explore(QWEN, nodes=4).write(path)
    assert path.read_bytes() == words
    form.explore(QWEN, nodes=4).write(path, overwrite=True)
    assert params.compose(str(path)).recipe.nodes == 4


@pytest.mark.parametrize(
    ("settings", "name", "words"),
    [
        ({"nodes": "x"}, "mine.yaml", "Nothing was written: nodes='x'"),
        ({}, "mine.txt", "ends in .yaml"),
        ({}, "a_file/mine.yaml", "cannot be written"),
    ],
)
def test_nothing_is_written_of_what_cannot_be(settings, name, words, tmp_path):
    (tmp_path / "a_file").touch()
    with pytest.raises(RecipeError, match=words):
        form.explore(QWEN, **settings).write(tmp_path / name)
    assert [file.name for file in tmp_path.iterdir()] == ["a_file"]


# ------------------------------------------------------------------------------------------------------ the form


@pytest.fixture
def shown():
    pytest.importorskip("ipywidgets")
    return form.Form(QWEN)


def test_the_form_shows_what_a_change_comes_to_and_redraws_no_bars_for_nothing(shown, monkeypatch):
    assert shown.fields["tensor_parallel"].placeholder == "2"
    assert shown.fields["devices"].placeholder == "8"
    drawn, bars = [], form.notebook.bars_html
    monkeypatch.setattr(form.notebook, "bars_html", lambda memory: drawn.append(memory) or bars(memory))
    shown.fields["tensor_parallel"].value = "3"
    assert "1, 2, 4, 8, 16 or 32 do" in shown.findings.value
    assert "layout.heads" in shown.beside["tensor_parallel"].value
    assert "parallel.tensor" in shown.difference.value
    assert len(drawn) == 1
    shown.fields["overrides"].value = "optimizer.lr=2e-6"
    assert "optimizer.lr" in shown.difference.value
    assert len(drawn) == 1
    shown.fields["tensor_parallel"].value = ""
    assert "layout.heads" not in shown.findings.value
    assert shown.beside["tensor_parallel"].value == ""


def test_an_invalid_value_says_so_in_its_place_and_the_rest_goes_on(shown):
    shown.fields["nodes"].value = "many"
    assert "nodes=&#x27;many&#x27; (override nodes): must be a whole number." in shown.beside["nodes"].value
    assert shown.button.disabled
    shown.fields["tensor_parallel"].value = "3"
    assert "layout.heads" in shown.findings.value
    shown.fields["nodes"].value = "2"
    assert shown.beside["nodes"].value == ""
    assert not shown.button.disabled


def test_another_recipe_shows_its_own_values_and_keeps_what_was_entered(shown):
    shown.fields["nodes"].value = "16"
    shown.fields["recipe"].value = GLM
    assert shown.fields["expert_parallel"].placeholder == "64"
    assert shown.explored.changes == {"nodes": (32, 16)}
    shown.fields["stack"].value = "ascend-9.1.0"
    assert "stack" not in shown.explored.changes


def test_the_button_writes_what_is_shown(shown, tmp_path):
    shown.button.click()
    assert "Name the file" in shown.said.value
    shown.fields["nodes"].value, shown.file.value = "2", str(tmp_path / "mine.yaml")
    shown.button.click()
    assert f"recipes run {tmp_path}/mine.yaml" in shown.said.value
    assert params.compose(str(tmp_path / "mine.yaml")).recipe.nodes == 2
    shown.fields["nodes"].value = "4"
    assert shown.said.value == ""
    shown.button.click()
    assert "is there already" in shown.said.value
    shown.overwrite.value = True
    shown.button.click()
    assert params.compose(str(tmp_path / "mine.yaml")).recipe.nodes == 4


def test_it_waits_until_nothing_more_is_typed(shown, monkeypatch):
    looked, explore = [], form.explore
    monkeypatch.setattr(form, "explore", lambda *a, **k: looked.append(k) or explore(*a, **k))

    async def type_it():
        for text in ("1", "10", "102", "1024"):
            shown.fields["max_prompt_length"].value = text
            await asyncio.sleep(0.01)
        assert looked == []
        await asyncio.sleep(form.DELAY + 0.1)
        shown.fields["max_prompt_length"].value = "10240"
        shown.fields["max_prompt_length"].value = "1024"
        await asyncio.sleep(form.DELAY + 0.1)

    asyncio.run(type_it())
    assert [given["max_prompt_length"] for given in looked] == ["1024"]


def test_a_page_without_a_kernel_shows_the_same_once(shown):
    bundle = shown._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert "rules looked" in bundle["text/html"]
    assert "rules looked" in bundle["text/plain"]


# -------------------------------------------------------------------------------------------------- without a form


def test_nobody_who_could_use_a_form_gets_what_it_would_show(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    given = {"recipe": QWEN, "nodes": 2, "write": str(tmp_path / "mine.yaml")}
    assert form.show(given).changes == {"nodes": (1, 2)}
    assert f"recipes run {tmp_path}/mine.yaml" in capsys.readouterr().out
    assert params.compose(str(tmp_path / "mine.yaml")).recipe.nodes == 2


def test_a_kernel_of_jupyter_gets_the_form_and_papermill_in_it_does_not(monkeypatch):
    pytest.importorskip("ipywidgets")
    monkeypatch.setenv("JPY_SESSION_NAME", "30_explore.ipynb")
    assert isinstance(form.show({"recipe": QWEN, "nodes": 2, "overrides": ["rollout.n=8"]}), form.Form)
    injected = {"recipe": QWEN, "In": ["", "# Parameters\nnodes = 2"], "nodes": 2}
    assert isinstance(form.show(injected), form.Explored)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"recipe": None}, "must be the name of a recipe"),
        ({"recipe": QWEN, "nodes": "x"}, "whole number"),
        ({"recipe": QWEN, "overrides": 3}, "list of texts"),
        ({"recipe": QWEN, "In": ["# Parameters\nnode = 3"]}, "did you mean nodes"),
    ],
)
def test_a_bad_parameter_is_one_sentence(given, words, monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    with pytest.raises(RecipeError, match=words):
        form.show(given)


def test_papermill_runs_it_and_writes_the_file(tmp_path):
    out, path = tmp_path / "out.ipynb", tmp_path / "mine.yaml"
    given = {"recipe": GLM, "nodes": 16, "write": str(path)}
    papermill.execute_notebook(str(NOTEBOOK), str(out), given, progress_bar=False)
    [told] = [
        o["data"]
        for cell in nbformat.read(out, 4).cells
        for o in cell.get("outputs", ())
        if o.output_type == "execute_result"
    ]
    assert "nodes = 16  (in glm5_2/grpo_a3_512: 32)" in told["text/plain"]
    assert "image/png;base64" in told["text/html"]
    assert "application/vnd.jupyter.widget-view+json" not in told
    assert params.compose(str(path)).recipe.nodes == 16


def test_without_ipywidgets_all_but_the_form_works():
    code = (
        "import os, sys; sys.modules['ipywidgets'] = None; os.environ['JPY_SESSION_NAME'] = 'x';"
        f"from recipes import form; print(type(form.show({{'recipe': {CPU!r}}})).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("Explored\n", "")


def test_a_headless_look_imports_nothing_of_a_form():
    code = f"import sys; from recipes import form; form.explore({CPU!r}); print('ipywidgets' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "False\n"
