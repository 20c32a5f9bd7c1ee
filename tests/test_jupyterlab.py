"""The notebooks in JupyterLab, in a real browser: opened, run, watched, interrupted, restarted and read as people do.

Everything is real but verl, in whose place tests/children/trainer.py makes steps; one run trains for real. The browser
is the Chromium of the system (Debian: `apt-get install chromium`); none is ever downloaded. JupyterLab and its kernels
have directories of their own, and the notebooks are copies. RECIPES_SCREENSHOTS=DIR keeps a picture of each page.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import nbformat
import psutil
import pytest

from recipes import params
from recipes.run import launch, processes
from recipes.run.directory import Run, create, read_state, write_json

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: it is in the extra `dev`")
expect = sync_api.expect

ROOT = Path(__file__).resolve().parent.parent
NPU = ("10_glm5_2_grpo", "20_qwen3_grpo")
OTHERS = sorted({file.stem for file in (ROOT / "notebooks").glob("*.ipynb")} - {"00_quickstart", *NPU})
PATIENCE = 180.0  # seconds until something is given up; a quiet machine needs a tenth of it
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")

pytestmark = pytest.mark.slow


def chromium() -> str | None:
    """Where the system's Chromium is; None where there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser():
    if (path := chromium()) is None:
        pytest.skip("no Chromium on PATH (Debian: apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--disable-dev-shm-usage"])
        yield browser
        browser.close()


# ------------------------------------------------------------------------------------------------ a JupyterLab


class Lab:
    """A JupyterLab of its own, as `jupyter lab` starts it: its address, its token, its notebooks, its workbook."""

    def __init__(self, home: Path, *options: str) -> None:
        self.home, self.token = home, secrets.token_hex(16)
        self.notebooks, self.workbook = home / "notebooks", home / "workbook"
        self.notebooks.mkdir()
        self.workbook.mkdir()
        shutil.copytree(ROOT / "params", self.workbook / "params")
        # A socket's path has at most 107 characters, and pytest's own folders are long.
        self.runtime = Path(tempfile.mkdtemp(prefix="lab-"))
        self.python = home / "python"
        self.trains("train healthy")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("JUPYTER", "RECIPES_"))} | {
            "JUPYTER_TOKEN": self.token,
            "JUPYTER_CONFIG_DIR": str(home / "config"),
            "JUPYTER_DATA_DIR": str(home / "data"),
            "JUPYTER_RUNTIME_DIR": str(self.runtime),
            "IPYTHONDIR": str(home / "ipython"),
            "RECIPES_HOME": str(self.workbook),
            "RECIPES_PYTHON": str(self.python),
        }
        # No news, no look for a newer version: nothing leaves this machine, and nothing covers the page.
        self.settings = home / "config" / "lab" / "user-settings" / "@jupyterlab" / "apputils-extension"
        self.settings.mkdir(parents=True)
        news = {"fetchNews": "false", "checkForUpdates": False}
        (self.settings / "notification.jupyterlab-settings").write_text(json.dumps(news))
        words = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--port=0", *options]
        with (home / "lab.log").open("w") as log:
            self.process = subprocess.Popen(
                words, cwd=self.notebooks, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ready(self) -> Lab:
        """Wait until it answers."""

        def answers():
            assert self.process.poll() is None, (self.home / "lab.log").read_text()
            for file in self.runtime.glob("jpserver-*.json"):
                with contextlib.suppress(ValueError, OSError):
                    self.port = json.loads(file.read_text())["port"]
                    return self.ask("/api/status")
            return None

        until(answers)
        return self

    def ask(self, path: str, method: str = "GET", *, token: bool = True) -> object:
        headers = {"Authorization": f"token {self.token}"} if token else {}
        request = urllib.request.Request(self.url + path, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.loads(answer.read() or "null")

    def trains(self, does: str | None, **environment: object) -> None:
        """Say what trains from now on: the stand-in, doing `does`, or verl itself (None)."""
        lines = ["#!/bin/sh", f"export REAL_PYTHON={shlex.quote(sys.executable)}"]
        environment = {"TRAINER": does, "TRAINER_STEP_SECONDS": 0.1} | environment
        lines += [f"export {name}={shlex.quote(str(value))}" for name, value in environment.items()]
        program = sys.executable if does is None else ROOT / "tests" / "children" / "python"
        new = self.home / "python.new"
        new.write_text("\n".join([*lines, f'exec {shlex.quote(str(program))} "$@"', ""]))
        new.chmod(0o755)
        new.replace(self.python)

    def copy(self, name: str, **given: object) -> str:
        """Copy a notebook here with values in its parameters cell, as somebody edits it; returns its new name."""
        book = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", 4)
        [cell] = [c for c in book.cells if "parameters" in c.metadata.get("tags", [])]
        for key, value in given.items():
            cell.source, count = re.subn(rf"^({key}: \w+ =) [^#\n]*", rf"\1 {value!r}  ", cell.source, flags=re.M)
            assert count == 1, key
        file = f"{name}-{secrets.token_hex(2)}.ipynb"
        nbformat.write(book, self.notebooks / file)
        return file

    def runs(self) -> list[Run]:
        return [Run(file.parent) for file in sorted(self.workbook.glob("runs/*/*/run.json"))]

    def processes(self) -> list[psutil.Process]:
        """The server and all below it: kernels, supervisors, trainings that stay with them."""
        return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]

    def end(self) -> None:
        for run in self.runs():
            launch.stop(run)
        below = self.processes() if self.process.poll() is None else []
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        for process in below:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()
        shutil.rmtree(self.runtime, ignore_errors=True)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A JupyterLab whose kernels talk over sockets in a folder, not over the network."""
    lab = Lab(tmp_path_factory.mktemp("lab"), "--KernelManager.transport=ipc")
    try:
        yield lab.ready()
    finally:
        lab.end()


def until(true, seconds: float = PATIENCE):
    """Wait until a function returns something true, and return that."""
    limit = time.monotonic() + seconds
    while True:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            if found := true():
                return found
        assert time.monotonic() < limit, true
        time.sleep(0.2)


def listening(found: list[psutil.Process]) -> set[str]:
    """The addresses at which these processes accept connections."""
    addresses = set()
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            connections = process.net_connections(kind="inet")
            addresses |= {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
    return addresses


# ------------------------------------------------------------------------------------------------ a page


class Book:
    """A notebook that is open in the browser. Cells are found by what their code says."""

    def __init__(self, lab: Lab, page: sync_api.Page, file: str) -> None:
        self.lab, self.page, self.file = lab, page, file
        page.set_default_timeout(1000 * PATIENCE)
        page.goto(f"{lab.url}/lab/tree/{file}?reset&token={lab.token}")
        self.panel = page.locator(".jp-NotebookPanel")
        self.idle()

    def menu(self, *path: str) -> None:
        """Choose from the menu bar: menu("Run", "Run All Cells")."""
        self.page.locator(".lm-MenuBar-item", has_text=re.compile(f"^{path[0]}$")).click()
        for number, name in enumerate(path[1:]):
            item = self.page.locator(".lm-Menu").nth(number).locator(".lm-Menu-itemLabel", has_text=name)
            item.first.click()

    def run_all(self) -> None:
        self.menu("Run", "Run All Cells")
        prompt = self.panel.locator(".jp-CodeCell .jp-InputPrompt").first
        expect(prompt).to_have_text(re.compile(r"\[(\*|\d+)\]:"), timeout=1000 * PATIENCE)

    def button(self, command: str) -> None:
        """Press a button of the notebook's toolbar."""
        self.panel.locator(f'.jp-Toolbar [data-command="{command}"]').first.click()

    def cell(self, code: str) -> sync_api.Locator:
        return self.panel.locator(".jp-CodeCell").filter(has=self.page.locator(".cm-content", has_text=code))

    def output(self, code: str) -> sync_api.Locator:
        return self.cell(code).locator(".jp-OutputArea-output")

    def idle(self) -> None:
        """Wait until the kernel is there, the page is connected to it, and it has nothing to do."""

        def connected():
            kernels = [k["kernel"] for k in self.lab.ask("/api/sessions") if k["path"] == self.file and k["kernel"]]
            return any(kernel["connections"] and kernel["execution_state"] == "idle" for kernel in kernels)

        until(connected)
        expect(self.page.locator("#jp-main-statusbar")).to_contain_text("| Idle", timeout=1000 * PATIENCE)
        indicator = self.panel.locator(".jp-Notebook-ExecutionIndicator")
        expect(indicator).to_have_attribute("data-status", "idle", timeout=1000 * PATIENCE)

    def says(self, code: str, words: str | re.Pattern) -> None:
        """Wait until the output of a cell contains words."""
        expect(self.output(code).filter(has_text=words).first).to_be_visible(timeout=1000 * PATIENCE)

    def picture(self, code: str, theme: str = "light") -> str:
        """What the picture of a cell is now: its whole data, once it is loaded and has a size."""
        image = self.output(code).locator(f"img.{theme}")
        expect(image).to_be_visible(timeout=1000 * PATIENCE)
        assert until(lambda: image.evaluate("i => i.complete && i.naturalWidth")) > 300
        return image.get_attribute("src")

    def another_picture(self, code: str, than: str) -> str:
        return until(lambda: (now := self.picture(code)) != than and now)

    def errors(self) -> list[str]:
        """The texts of cells that failed or warned."""
        kinds = [f'[data-mime-type="application/vnd.jupyter.{kind}"]' for kind in ("stderr", "error")]
        return self.panel.locator(", ".join(kinds)).all_inner_texts()

    def too_wide(self) -> list[str]:
        """Every output, or part of one, that is wider than the place it has, with all that is folded opened."""
        self.panel.evaluate("panel => panel.querySelectorAll('details').forEach(d => { d.open = true })")
        found = self.panel.evaluate(
            """panel => [...panel.querySelectorAll('.jp-OutputArea-output, .jp-OutputArea-output .rw')]
                .filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth)
                .map(e => `${e.scrollWidth} > ${e.clientWidth}: ${e.textContent.slice(-200)}`)"""
        )
        self.panel.evaluate("panel => panel.querySelectorAll('details').forEach(d => { d.open = false })")
        return found

    def look(self, name: str) -> None:
        """Keep pictures of the whole notebook, for people, if RECIPES_SCREENSHOTS names a folder."""
        if folder := os.environ.get("RECIPES_SCREENSHOTS"):
            size = self.page.viewport_size
            for number, cell in enumerate(self.panel.locator(".jp-CodeCell:has(.jp-OutputArea-output)").all(), 1):
                self.page.set_viewport_size({**size, "height": 3000})  # the page scrolls inside itself, so: all of it
                cell.scroll_into_view_if_needed()
                cell.screenshot(path=Path(folder) / f"{name}-{number}.png")
            self.page.set_viewport_size(size)


@pytest.fixture
def book(lab, browser):
    """Opens a notebook in a browser of its own: book("00_quickstart", steps=8)."""
    contexts = []

    def start(name: str, **given: object) -> Book:
        (lab.settings / "themes.jupyterlab-settings").unlink(missing_ok=True)  # light again
        contexts.append(browser.new_context(viewport={"width": 1280, "height": 900}))
        return Book(lab, contexts[-1].new_page(), lab.copy(name, **given))

    yield start
    for run in lab.runs():
        launch.stop(run)
    for context in contexts:
        context.close()
    for session in lab.ask("/api/sessions"):
        lab.ask(f"/api/sessions/{session['id']}", "DELETE")


@pytest.fixture
def hold(tmp_path):
    """Makes the stand-in wait before a step, until the test lets go: hold(4), hold.go(4)."""

    class Hold:
        def __call__(self, step: int) -> None:
            (tmp_path / f"before-{step}").touch()

        def go(self, step: int) -> None:
            (tmp_path / f"before-{step}").unlink()

        place = tmp_path

    return Hold()


def nothing_left(run: Run) -> None:
    state = read_state(run)
    until(lambda: not processes.of_run(state["id"]))
    assert not Path(state["ray_folder"]).exists()


# ------------------------------------------------------------------------------------------------ the tests


def test_it_listens_on_this_machine_only_and_wants_its_token(lab, tmp_path):
    """As it starts by default, kernels over local ports; and as the other tests have it, over sockets in a folder."""
    plain = Lab(tmp_path)
    try:
        for server in (plain.ready(), lab):
            kernel = server.ask("/api/kernels", "POST")
            file = server.runtime / f"kernel-{kernel['id']}.json"
            connection = until(lambda file=file: file.exists() and json.loads(file.read_text()))
            assert len(connection["key"]) > 30
            until(lambda server=server: len(server.processes()) > 1)
            assert listening(server.processes()) == {"127.0.0.1"}
            if server is lab:
                assert connection["transport"] == "ipc"
                assert file.stat().st_mode & 0o077 == 0
            else:
                assert connection["ip"] == "127.0.0.1"
            with pytest.raises(urllib.error.HTTPError, match="403"):
                server.ask("/api/kernels", token=False)
            server.ask(f"/api/kernels/{kernel['id']}", "DELETE")
    finally:
        plain.end()


def test_run_all_and_see_the_curve_move(lab, book, hold):
    hold(4), hold(8)
    lab.trains("train healthy", TRAINER_HOLD=hold.place)
    page = book("00_quickstart", recipe="cpu/qwen3")
    # Typed into the page: one parameter, and that pictures may come as fast as they can, for the test's sake.
    page.cell("deadline_minutes: float").locator(".cm-content").click()
    page.page.keyboard.press("Control+End")
    page.page.keyboard.insert_text("\nsteps = 10\n__import__('recipes.notebook').notebook.DRAWING_SHARE = 1.0")
    before = lab.runs()
    page.run_all()
    page.says("notebook.watch", "running · step 3 of 10")
    [run] = [r for r in lab.runs() if r not in before]
    first = page.picture("notebook.watch")
    assert listening([*lab.processes(), *processes.of_run(read_state(run)["id"])]) <= set(LOOPBACK)
    hold.go(4)
    page.says("notebook.watch", "running · step 7 of 10")
    second = page.another_picture("notebook.watch", than=first)
    assert read_state(run)["state"] == "running"
    hold.go(8)
    page.says("notebook.watch", "finished · step 10 of 10")
    page.another_picture("notebook.watch", than=second)
    page.says("notebook.judge", "The run may be believed.")
    page.says("notebook.record", "curves/curves.png")
    assert page.errors() == []
    assert page.too_wide() == []
    verdict = json.loads(run.verdict_file.read_text())
    told = page.output("notebook.judge").text_content()
    assert [j["rule"] for j in verdict["judgements"] if j["rule"] not in told] == []
    # What is between two $ is shown as it is, not as a formula.
    assert "'${work}/cpu/qwen3', '--data', '${work}/cpu/say'" in page.output("plan = notebook.resolve").text_content()
    page.look("quickstart-light")
    page.menu("Settings", "Theme", "JupyterLab Dark")
    page.picture("notebook.watch", theme="dark")
    expect(page.output("notebook.watch").locator("img.light")).to_be_hidden()
    assert page.too_wide() == []
    page.look("quickstart-dark")
    nothing_left(run)


def test_interrupting_the_cell_ends_the_run(lab, book, hold):
    hold(4)
    lab.trains("train child", TRAINER_HOLD=hold.place)
    before = lab.runs()
    page = book("00_quickstart", recipe="cpu/qwen3", steps=6)
    page.run_all()
    page.says("notebook.watch", "step 3 of 6")
    [run] = [r for r in lab.runs() if r not in before]
    page.button("notebook:interrupt-kernel")
    page.says("notebook.watch", "Interrupted: the run was stopped and all its processes have ended.")
    page.idle()
    assert read_state(run)["state"] == "stopped"
    nothing_left(run)
    assert page.too_wide() == []
    assert "Traceback" not in page.cell("notebook.watch").inner_text()
    expect(page.output("notebook.judge")).to_have_count(0)
    page.look("interrupted")


def test_a_kernel_that_is_restarted_attaches_to_its_run_again(lab, book, hold):
    hold(4)
    lab.trains("train healthy", TRAINER_HOLD=hold.place)
    before = lab.runs()
    page = book("00_quickstart", recipe="cpu/qwen3", steps=6, on_disconnect="continue")
    page.run_all()
    page.says("notebook.watch", "step 3 of 6")
    [run] = [r for r in lab.runs() if r not in before]
    page.button("notebook:restart-kernel")
    page.page.locator(".jp-Dialog .jp-mod-accept", has_text="Restart").click()
    page.idle()
    page.menu("Edit", "Clear Outputs of All Cells")
    expect(page.output("notebook.watch")).to_have_count(0)
    page.run_all()
    page.says("notebook.launch", "It is running already; nothing was started, this notebook watches it.")
    page.says("notebook.watch", "running · step 3 of 6")
    hold.go(4)
    page.says("notebook.watch", "finished · step 6 of 6")
    page.says("notebook.record", "run.json")
    state = read_state(run)
    assert (state["state"], len(state["attempts"])) == ("finished", 1)
    assert [r for r in lab.runs() if r not in before] == [run]
    page.look("attached")


@pytest.mark.parametrize("name", NPU)
def test_without_an_npu_it_checks_and_stops_at_launch(lab, book, name):
    before = lab.runs()
    page = book(name)
    page.run_all()
    page.says("notebook.launch", re.compile("This machine has no NPU, so .* cannot be launched here"))
    page.idle()
    page.says("notebook.check", re.compile(r"\d+ rules looked, \d+ found something."))
    page.picture("notebook.check")
    assert "Traceback" not in page.panel.inner_text()
    assert page.too_wide() == []
    expect(page.output("notebook.watch")).to_have_count(0)
    assert lab.runs() == before
    page.look(f"{name}-light")
    page.menu("Settings", "Theme", "JupyterLab Dark")
    page.picture("notebook.check", theme="dark")
    page.look(f"{name}-dark")


def test_the_form_answers_in_its_place_and_writes_a_recipe(lab, book):
    page = book("30_explore", recipe="qwen3/grpo_8b_vllm_a2")
    page.run_all()
    page.says("form.show", "Nothing differs from qwen3/grpo_8b_vllm_a2")
    first, shown = page.picture("form.show"), page.output("form.show")
    tensor = shown.get_by_label("tensor parallel", exact=True)
    expect(tensor).to_have_attribute("placeholder", "2")
    place = tensor.bounding_box()
    tensor.press_sequentially("3")
    page.says("form.show", "1, 2, 4, 8, 16 or 32 do")
    page.another_picture("form.show", than=first)
    shown.get_by_label("nodes", exact=True).press_sequentially("two")
    page.says("form.show", "must be a whole number")
    assert tensor.bounding_box()["x"] == place["x"]  # what is said moves nothing sideways
    assert page.too_wide() == []
    page.look("explore-findings")
    tensor.fill("4")
    shown.get_by_label("nodes", exact=True).fill("2")
    expect(shown.filter(has_text="layout.heads")).to_have_count(0)
    shown.get_by_label("file", exact=True).fill("mine.yaml")
    shown.get_by_role("button", name="Write this recipe").click()
    page.says("form.show", "recipes run ")
    recipe = params.compose(str(lab.notebooks / "mine.yaml")).recipe
    assert (recipe.nodes, recipe.parallel.tensor) == (2, 4)
    assert page.errors() == []
    assert page.too_wide() == []
    page.look("explore-light")
    page.menu("Settings", "Theme", "JupyterLab Dark")
    page.picture("form.show", theme="dark")
    page.look("explore-dark")


@pytest.fixture
def two_runs(lab):
    """Two finished runs of the workbook, the newest it has, with made-up numbers."""
    made = []
    for seed, gain in ((1, 0.02), (2, 0.01)):
        composed = params.compose("quickstart/grpo", [f"seed={seed}"])
        run = create(lab.workbook / "runs" / "made-up" / f"seed-{seed}-{secrets.token_hex(4)}", composed.name, {})
        (run.path / "recipe.yaml").write_text(json.dumps(params.to_dict(composed.recipe)))
        write_json(run.command_file, {"argv": ["python", "-m", "x", "verl"], "environment": {}, "verl": "0.9.1"})
        write_json(run.state_file, json.loads(run.state_file.read_text()) | {"state": "finished"})
        data = [{"critic/rewards/mean": 0.3 + gain * step, "timing_s/step": 2.0 + gain} for step in range(1, 21)]
        run.metrics(1).write_text("".join(json.dumps({"step": n, "data": d}) + "\n" for n, d in enumerate(data, 1)))
        made.append(run)
    yield made
    for run in made:
        shutil.rmtree(run.path)


@pytest.mark.parametrize("name", OTHERS)
def test_the_notebooks_that_train_nothing_run_to_their_end(two_runs, book, name):
    page = book(name)
    page.run_all()
    last = page.panel.locator(".jp-CodeCell").last
    expect(last.locator(".jp-InputPrompt")).to_have_text(re.compile(r"\[\d+\]:"), timeout=1000 * PATIENCE)
    page.idle()
    assert page.errors() == []
    assert "Traceback" not in page.panel.inner_text()
    assert page.too_wide() == []
    if name == "90_compare_runs":
        page.picture("notebook.compare")
        for run in two_runs:
            page.says("compared.numbers", run.path.name)
    page.look(f"{name}-light")
    page.menu("Settings", "Theme", "JupyterLab Dark")
    page.look(f"{name}-dark")
