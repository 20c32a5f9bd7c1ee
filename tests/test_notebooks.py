"""The notebooks: an essay with short cells, no logic of its own, no outputs in git, parameters a schema knows."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import nbformat
import papermill
import pytest

from recipes import form, headless, notebook, params
from recipes.errors import RecipeError

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
COMPARE = ROOT / "notebooks" / "90_compare_runs.ipynb"
EXPLORE = ROOT / "notebooks" / "30_explore.ipynb"
OTHERS = {COMPARE: notebook.COMPARED, EXPLORE: form.PARAMETERS}  # they train nothing, and know other parameters
TRAINING = [path for path in NOTEBOOKS if path not in OTHERS]
QUICKSTART = ROOT / "notebooks" / "00_quickstart.ipynb"
SECTIONS = ["Parameters", "Resolve", "Preflight", "Launch", "Watch", "Judge", "Record"]


def read(path):
    return nbformat.read(path, as_version=4)


def code(path):
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


@pytest.fixture(params=NOTEBOOKS, ids=lambda p: p.stem)
def path(request):
    return request.param


@pytest.fixture(params=TRAINING, ids=lambda p: p.stem)
def training(request):
    return request.param


def test_there_are_notebooks():
    assert NOTEBOOKS


def test_it_has_one_tagged_parameters_cell_and_it_is_the_first_code(path):
    tagged = [i for i, cell in enumerate(code(path)) if "parameters" in cell.metadata.get("tags", [])]
    assert tagged == [0]


def test_cells_are_short(path):
    assert [cell.source for cell in code(path) if len(cell.source.splitlines()) > 15] == []


def test_no_outputs_are_kept_in_git(path):
    assert [cell for cell in code(path) if cell.outputs or cell.execution_count] == []


def test_the_kernel_is_nobody_s_own(path):
    assert read(path).metadata.kernelspec.name == "python3"


def test_no_logic_no_shell_no_exit(path):
    """What a test cannot import does not belong in a cell; a failing `!cmd` leaves it green; exit() hides the end."""
    for cell in code(path)[1:]:
        assert not re.search(r"^\s*[!%]", cell.source, re.M)
        for node in ast.walk(ast.parse(cell.source)):
            assert not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.For | ast.While | ast.If | ast.Try)
            assert not (isinstance(node, ast.Name) and node.id in ("exit", "quit"))


def test_it_promises_first_and_keeps_the_order_of_its_sections(path):
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    assert "**Promise.**" in text.split("## ")[0]
    found = re.findall(r"^## (.+)$", text, re.M)
    kept = SECTIONS if path in TRAINING else ["Parameters"]
    assert [title for title in found if title in SECTIONS] == kept


def test_nothing_of_a_machine_is_in_it(path):
    assert not re.search(r"/(home|root|Users|work)/|localhost:\d|https?://\d", path.read_text())


def test_every_parameter_is_typed_explained_and_known(path):
    """papermill reads the cell with a regular expression: what it does not understand it does not show."""
    inferred = papermill.inspect_notebook(str(path))
    declared = headless.declared(path)
    assert set(inferred) == set(declared)
    for name, seen in inferred.items():
        assert name in OTHERS.get(path, notebook.PARAMETERS)
        assert seen["inferred_type_name"] in ("str", "int", "float", "bool", "list"), name
        assert seen["help"].strip(), name
        assert ast.literal_eval(seen["default"]) == declared[name]


def test_its_defaults_resolve(training, monkeypatch):
    plan = notebook.resolve(headless.declared(training))
    shown = plan._repr_mimebundle_()
    assert plan.composed.name in shown["text/plain"]
    assert plan.composed.name in shown["text/html"]


# ------------------------------------------------------------------------------------------------- comparing


@pytest.mark.slow
def test_two_logs_are_compared_headless_and_written_as_a_report(tmp_path):
    logs = [ROOT / "tests/data/metrics" / name for name in ("verl_0.9.1_three_steps.jsonl", "one_run/train.log")]
    out, html = tmp_path / "out.ipynb", tmp_path / "compared.html"
    given = {"sources": f"here='{logs[0]}' there='{logs[1]}'", "html": str(html)}
    papermill.execute_notebook(str(COMPARE), str(out), given, progress_bar=False)
    shown = [o["data"] for cell in code(out) for o in cell.outputs if o.output_type == "execute_result"]
    assert len(shown) == 6
    assert "image/png;base64" in shown[0]["text/html"]
    assert "Reward per response" in shown[0]["text/plain"]
    assert "critic/rewards/mean" in shown[1]["text/plain"]
    assert "A log does not tell its seed" in shown[3]["text/plain"]
    assert html.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("parameters", "words"),
    [({"source": "a"}, "did you mean sources"), ({"by": "epoch", "sources": "a b"}, "step, tokens, time")],
)
def test_comparing_refuses_a_bad_parameter(parameters, words):
    cell = "# Parameters\n" + "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
    with pytest.raises(RecipeError, match=words):
        notebook.compare({"In": [cell], **parameters})


def test_comparing_takes_the_two_newest_runs_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("RECIPES_HOME", str(tmp_path))
    (tmp_path / "params").mkdir()
    with pytest.raises(RecipeError, match=r"takes the 2 newest runs of .* there are 0"):
        notebook.compare({"sources": None})
    line = '{"step":1,"data":{"critic/rewards/mean":0.5}}\n'
    for age, name in enumerate("abc"):
        file = tmp_path / "runs/x" / name / "attempts/1/metrics.jsonl"
        file.parent.mkdir(parents=True)
        file.write_text(line)
        os.utime(file, (1e9 + age, 1e9 + age))
    assert [one.name for one in notebook.compare({"sources": None}).found.groups] == ["b", "c"]


@pytest.mark.parametrize("path", OTHERS, ids=lambda p: p.stem)
def test_the_command_that_trains_says_that_this_one_does_not(path):
    with pytest.raises(RecipeError, match="it trains nothing: run it with papermill"):
        headless.checked(path, {}, ROOT)


# ------------------------------------------------------------------------------------------------- bad parameters


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"stepps": 3}, "did you mean steps"),
        ({"steps": "many"}, "whole number"),
        ({"learning_rate": "1e-6x"}, "finite number"),
        ({"overrides": ["optimizer.lrr=1"]}, "did you mean optimizer.lr"),
        ({"overrides": 3}, "list of texts"),
        ({"recipe": "quickstart/grp"}, "did you mean quickstart/grpo"),
        ({"deadline_minutes": -1}, "above 0"),
    ],
)
def test_headless_refuses_a_bad_parameter_before_a_kernel_is_started(tmp_path, parameters, words):
    with pytest.raises(RecipeError, match=words):
        headless.execute(QUICKSTART, parameters, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_headless_kernels_take_no_ports_and_leave_no_sockets(tmp_path, monkeypatch):
    """Ports are chosen free and taken later: of kernels that start at once, one found its own gone, and died."""
    cell = "import json, ipykernel.connect as c\nprint(json.loads(c.get_connection_info())['transport'])"
    parameters = nbformat.v4.new_code_cell("run_dir: str = None", metadata={"tags": ["parameters"]})
    book = nbformat.v4.new_notebook(cells=[parameters, nbformat.v4.new_code_cell(cell)])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(book, tmp_path / "book.ipynb")
    (tmp_path / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    runs = [tmp_path / "one", tmp_path / "two"]
    children = [headless.begin(tmp_path / "book.ipynb", {}, run) for run in runs]
    for child, run in zip(children, runs, strict=True):
        assert child.wait(240) == 0, (run / "papermill.log").read_text()
        child.stdin.close()
        assert nbformat.read(run / "notebook.ipynb", 4).cells[-1].outputs[0].text == "ipc\n"
    assert list((tmp_path / "t").iterdir()) == []
    assert list(Path.cwd().glob("kernel-*")) == []  # where jupyter_client puts the sockets of all, left to itself


def test_plain_papermill_stops_at_an_unknown_parameter_too(tmp_path):
    """Papermill itself only warns; the Resolve cell finds the injected name and nothing is started."""
    with pytest.raises(papermill.PapermillExecutionError, match="Unknown parameter 'stepps'; did you mean steps"):
        papermill.execute_notebook(
            str(QUICKSTART),
            str(tmp_path / "out.ipynb"),
            {"stepps": 3, "run_dir": str(tmp_path / "run")},
            progress_bar=False,
        )
    assert not (tmp_path / "run").exists()


def test_an_error_shows_as_its_sentence_and_not_as_a_traceback(tmp_path):
    out = tmp_path / "out.ipynb"
    with pytest.raises(papermill.PapermillExecutionError):
        papermill.execute_notebook(str(QUICKSTART), str(out), {"steps": "many"}, progress_bar=False)
    errors = [o for cell in code(out) for o in cell.outputs if o.output_type == "error"]
    assert [e.evalue for e in errors] == ["trainer.steps='many' (parameter steps): must be a whole number."]
    assert len(errors[0].traceback) == 1


@pytest.mark.parametrize("name", ["10_glm5_2_grpo", "20_qwen3_grpo"])
def test_without_an_npu_it_resolves_and_checks_and_stops_at_launch(tmp_path, name):
    out = tmp_path / "out.ipynb"
    source = str(ROOT / "notebooks" / f"{name}.ipynb")
    with pytest.raises(
        papermill.PapermillExecutionError, match=r"This machine has no NPU, so .* cannot be launched here"
    ):
        papermill.execute_notebook(source, str(out), {"run_dir": str(tmp_path / "run")}, progress_bar=False)
    done = [cell for cell in code(out) if cell.outputs and cell.outputs[-1].output_type == "execute_result"]
    shown = done[-1].outputs[-1]["data"]
    assert "rules looked" in shown["text/plain"]
    assert shown["text/html"].count("<img") >= 1  # both bars of a device's memory, without a display
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------------ attaching, ending


def running(plan):
    """A run of the plan's command that is going on, as another kernel has left it; this process is its supervisor."""
    from recipes.run.directory import create, identify, update_state, write_json

    run = create(Path(plan.composed.recipe.run_dir), plan.composed.name, {})
    write_json(run.command_file, {"argv": list(plan.command.argv)})
    update_state(run, state="running", supervisor=identify(os.getpid()))
    return run


def test_a_notebook_run_again_attaches_to_its_run_and_not_to_one_of_another_directory(tmp_path, monkeypatch):
    """`recipes notebook` always asks for a directory: beside it may run another with the same parameters."""
    first, second = (notebook.resolve({"recipe": "cpu/qwen3", "run_dir": str(tmp_path / name)}) for name in "ab")
    going = running(first)
    assert notebook._running(first) == going
    assert notebook._running(second) is None

    monkeypatch.setattr(notebook, "default_path", lambda root, recipe: tmp_path / "c")  # none was asked for
    assert notebook._running(notebook.resolve({"recipe": "cpu/qwen3"})) == going


def test_a_notebook_that_is_killed_waits_for_what_becomes_of_its_run(tmp_path):
    """A training may take its grace to end, after the kernel has gone."""
    from recipes.run.directory import update_state

    run = running(notebook.resolve({"recipe": "cpu/qwen3", "run_dir": str(tmp_path / "run")}))
    update_state(run, on_disconnect="stop", grace_seconds=15.0)
    nbformat.write(nbformat.v4.new_notebook(), run.path / "notebook.ipynb")
    ends = threading.Timer(0.5, update_state, [run], {"state": "stopped", "cause": "the notebook went away"})
    ends.start()
    headless.settle(run.path)
    ends.join()
    told = read(run.path / "notebook.ipynb").metadata["recipes"]
    assert told == {"state": "stopped", "cause": "the notebook went away"}


def test_a_look_that_fails_ends_no_notebook(tmp_path, monkeypatch):
    from recipes.run.directory import update_state

    run = running(notebook.resolve({"recipe": "cpu/qwen3", "run_dir": str(tmp_path / "run")}))
    update_state(run, state="finished")
    child, said, real, fails = subprocess.Popen(["sleep", "600"]), [], Path.stat, [run.state_file] * 2

    def stat(path, **more):
        if path in fails:
            fails.remove(path)
            raise OSError(116, "Stale file handle")
        return real(path, **more)

    monkeypatch.setattr(Path, "stat", stat)
    try:
        headless._follow(run, child, said.append)
    finally:
        child.kill()
        child.wait()
    assert fails == []
    assert said[-1].startswith("finished")


def test_a_notebook_is_ended_although_its_training_cannot_be(tmp_path, monkeypatch):
    from recipes.run import launch
    from recipes.run.directory import create

    stops = []

    def stop(run):
        stops.append(run.path)
        raise RecipeError("it is still there")

    monkeypatch.setattr(launch, "stop", stop)
    run = create(tmp_path / "run", "r", {})
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with pytest.raises(RecipeError, match="still there"):
        headless.interrupt(child, run.path)
    assert child.poll() is not None
    assert stops == [run.path] * 2


# ------------------------------------------------------------------------------------------------ untrusted text


def test_text_from_outside_is_escaped(tmp_path):
    from recipes import live, page
    from recipes.run.directory import create

    run = create(tmp_path / "run", "<i>r", {"steps": 3})
    run.log().write_text("<script>alert(1)</script>\n")
    moment = live.look(run)
    html = notebook._moment_html(moment, (b"", b"", '"><script>x'))
    assert "<script>" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert page.table(("<b>",), [["<i>", 1]]).count("&lt;") == 2


def test_a_finding_shows_with_its_rule_and_remedy():
    from recipes import preflight

    composed = params.compose("quickstart/grpo", ["tensor_parallel=3"])
    found = preflight.check(composed, here=False)
    html = notebook.Findings(tuple(found))._repr_mimebundle_()["text/html"]
    assert "layout.heads" in html
    assert "1, 2 or 4 do" in html
