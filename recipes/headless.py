"""Run a notebook without a browser: papermill in a child process, the progress of its training in this one.

    python -m recipes.headless NOTEBOOK OUTPUT        parameters as a line of JSON on standard input, which stays open

When that closes, whoever started the notebook is gone, and the notebook ends; its training does as on_disconnect says.

Papermill's own command line guesses types (`1e-6` may become a text, an all-digit name a number) and takes unknown
parameters with a warning. Here they are resolved against the schema before a kernel is started.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes import live, masking, notebook
from recipes.atomic import replace_file
from recipes.errors import RecipeError, nearest
from recipes.run import launch
from recipes.run.directory import Run, patiently, read_state

# Seconds a kernel may take to start: several do so at once, on machines that train.
KERNEL_SECONDS = 240
# Seconds between looks for the run while the notebook is before its Launch cell.
LOOK = 0.5
# Seconds an interrupted notebook gets to end by itself.
PATIENCE = 30.0
# Tag of the cell that says what became of a run that did not finish.
REPAIRED = "run-did-not-finish"


def execute(path: Path, parameters: Mapping[str, Any], run_dir: Path, say: Any = print) -> int:
    """Execute the notebook at `path` with papermill into run_dir/notebook.ipynb. Returns papermill's exit code.

    `say` gets a line whenever there is progress. Raises RecipeError for a parameter the notebook does not have or
    the schema refuses. An interrupt ends the notebook, the training and everything it started. Whatever looks like a
    secret in the executed notebook or papermill's log is masked at the end.
    """
    notebook.resolve(checked(path, parameters, run_dir))
    child = begin(path, parameters, run_dir)
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        _follow(Run(run_dir), child, say)
        return child.wait()
    except KeyboardInterrupt:
        interrupt(child, run_dir)
        raise
    finally:
        settle(run_dir)
        signal.signal(signal.SIGTERM, previous)


def checked(path: Path, parameters: Mapping[str, Any], run_dir: Path) -> dict[str, Any]:
    """Return the defaults of the notebook at `path` with `parameters` on top, for notebook.resolve.

    Raises RecipeError for a parameter that neither the notebook nor notebook.resolve knows.
    """
    known = declared(path)
    if not {"recipe", "run_dir"} <= known.keys():
        raise RecipeError(f"{path.name} takes no recipe and run_dir, so it trains nothing: run it with papermill.")
    for name in parameters:
        if name not in known and name not in notebook.PARAMETERS:
            raise RecipeError(f"{path.name} has no parameter {name!r}{nearest(name, [*known, *notebook.PARAMETERS])}")
    return {**known, **parameters, "run_dir": str(run_dir)}


def begin(path: Path, parameters: Mapping[str, Any], run_dir: Path, *, keep: Sequence[int] = ()) -> subprocess.Popen:
    """Start papermill on the notebook at `path` with `parameters`. Returns the child.

    Keep it: when it is let go, or this process ends, its standard input closes and it ends. `keep` are file
    descriptors it holds for as long as it lives.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    given = {**parameters, "run_dir": str(run_dir)}
    words = [sys.executable, "-m", "recipes.headless", str(path), str(run_dir / "notebook.ipynb")]
    with (run_dir / "papermill.log").open("ab") as log:
        # A session of its own, so that a terminal's Ctrl-C reaches it through us, once.
        child = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, pass_fds=keep
        )
    with contextlib.suppress(BrokenPipeError):  # it could not start; its exit code and its log say so
        child.stdin.write(json.dumps(given).encode() + b"\n")
        child.stdin.flush()
    return child


def interrupt(child: subprocess.Popen, run_dir: Path) -> None:
    """End a notebook that `begin` started, its training, and everything either started. Returns when they are gone.

    Raises RecipeError when something of the training does not end.
    """
    child.send_signal(signal.SIGINT)
    if Run(run_dir).state_file.is_file():
        with contextlib.suppress(RecipeError):  # said below, where it is still so when the notebook has ended
            launch.stop(Run(run_dir))
    try:
        child.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    if Run(run_dir).state_file.is_file():  # it was just about to launch
        launch.stop(Run(run_dir))


def settle(run_dir: Path) -> None:
    """Make an executed notebook say what became of its run, and mask what looks like a secret in it and its log.

    A run that is ending because its notebook has gets the time it takes.
    """
    with contextlib.suppress(RecipeError):
        state = read_state(Run(run_dir))
        if state["state"] == "running" and state.get("on_disconnect") == "stop":
            launch.wait(Run(run_dir), timeout=state["grace_seconds"] + PATIENCE)
    with contextlib.suppress(OSError, ValueError):  # not written, or not whole: papermill was ended while it wrote
        repair(run_dir / "notebook.ipynb", Run(run_dir))
    _scrub(run_dir)


def _scrub(run_dir: Path) -> None:
    for scrub, name in ((masking.scrub_file, "papermill.log"), (masking.scrub_notebook, "notebook.ipynb")):
        with contextlib.suppress(OSError, ValueError):  # not written, or not whole: papermill was ended while it wrote
            scrub(run_dir / name)


def repair(path: Path, run: Run) -> bool:
    """Make the metadata of an executed notebook say what became of its run. Returns whether anything was changed.

    papermill calls every cell completed when the kernel was killed or the cell interrupted, and leaves the notebook as
    it was last saved when it is ended itself. The run's own state is the truth: where the run did not finish, the
    notebook says so in its first cell, in papermill's own fields and under `metadata.recipes`.
    Raises OSError or ValueError for a file that cannot be read as a notebook.
    """
    import nbformat

    book = nbformat.read(path, as_version=4)
    state = read_state(run) if run.state_file.is_file() else {"state": "not started", "cause": ""}
    ran = state["state"] == "finished"
    said = book.metadata.get("papermill") or {}
    if ran and said.get("exception") is not None:  # the training is fine; a later cell is not, and papermill says so
        return False
    book.metadata["recipes"] = {"state": state["state"], "cause": masking.mask(state["cause"])}
    if not ran:
        book.metadata["papermill"] = {**said, "exception": True}
        _mark(book.cells)
        if not book.cells or book.cells[0].metadata.get("tags") != [REPAIRED]:
            words = f"The run is {state['state']}" + (f": {state['cause']}" if state["cause"] else ".")
            book.cells.insert(0, nbformat.v4.new_raw_cell(masking.mask(words), metadata={"tags": [REPAIRED]}))
    replace_file(path, (nbformat.writes(book) + "\n").encode("utf-8"))
    return True


def _mark(cells: list[Any]) -> None:
    """The watching cell failed, what follows it was never reached, unless papermill already knows better."""
    watching = [n for n, cell in enumerate(cells) if cell.cell_type == "code" and "notebook.watch(" in cell.source]
    reached = watching[0] if watching else len(cells)
    for place, cell in enumerate(cells):
        said = cell.metadata.get("papermill")
        if cell.cell_type != "code" or not said:
            continue
        if place == reached and said.get("status") != "pending":
            cell.metadata["papermill"] = {**said, "status": "failed", "exception": True}
        elif said.get("status") == "running" or (place > reached and not cell.get("execution_count")):
            cell.metadata["papermill"] = {**said, "status": "failed" if said["status"] == "running" else "pending"}


def declared(path: Path) -> dict[str, Any]:
    """Return the parameters of a notebook's tagged cell with their defaults. Raises RecipeError without such a cell."""
    import nbformat

    try:
        cells = nbformat.read(path, as_version=4).cells
    except (OSError, nbformat.reader.NotJSONError, nbformat.ValidationError) as fault:
        raise RecipeError(f"{path} cannot be read as a notebook: {fault}") from fault
    tagged = [cell.source for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        raise RecipeError(f"{path} has {len(tagged)} cells tagged `parameters`; it must have one.")
    namespace: dict[str, Any] = {}
    exec(compile(tagged[0], str(path), "exec"), namespace)  # the notebook is about to run anyway
    return {name: value for name, value in namespace.items() if not name.startswith("__")}


def _follow(run: Run, child: subprocess.Popen, say: Any) -> None:
    while child.poll() is None and not patiently(run.state_file.is_file):
        time.sleep(LOOK)
    if patiently(run.state_file.is_file):
        for moment in live.follow(run):
            say(notebook.status(moment))
            if child.poll() is not None:
                return


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _end_with_starter() -> None:
    # Not sys.stdin: a thread that waits in a buffered reader makes the interpreter's own end fail.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    """The child: hand plain types to papermill's Python API. Exit code 1 when a cell failed."""
    import papermill
    from papermill.exceptions import PapermillExecutionError
    from traitlets.config import Config

    source, output = sys.argv[1:3]
    parameters = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_starter, daemon=True).start()
    # Sockets in a folder of this kernel's own, not local ports: those are chosen free and taken later, and of two
    # notebooks that start at once one may find its port gone and its kernel dead.
    place = tempfile.gettempdir()
    place = place if len(place) < 80 else "/tmp"  # the path of a socket may have 107 bytes
    with tempfile.TemporaryDirectory(prefix="kernel-", dir=place) as folder:
        try:
            papermill.execute_notebook(
                source,
                output,
                parameters=parameters,
                kernel_name="python3",
                progress_bar=False,
                # Without it every carriage return of a progress bar becomes an output of its own.
                coalesce_streams=True,
                start_timeout=KERNEL_SECONDS,
                config=Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/kernel"}}),
            )
        except PapermillExecutionError as fault:
            print(f"{fault.ename}: {fault.evalue}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
