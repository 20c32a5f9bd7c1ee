"""Run a notebook without a browser: papermill in a child process, the progress of its training in this one.

    python -m recipes.headless NOTEBOOK OUTPUT        parameters as JSON on standard input

Papermill's own command line guesses types (`1e-6` may become a text, an all-digit name a number) and takes unknown
parameters with a warning. Here they are resolved against the schema before a kernel is started.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes import live, masking, notebook
from recipes.errors import RecipeError, nearest
from recipes.params import SHORT_NAMES
from recipes.run import launch
from recipes.run.directory import Run

# Seconds between looks for the run while the notebook is before its Launch cell.
LOOK = 0.5


def execute(path: Path, parameters: Mapping[str, Any], run_dir: Path, say: Any = print) -> int:
    """Execute the notebook at `path` with papermill into run_dir/notebook.ipynb. Returns papermill's exit code.

    `say` gets a line whenever there is progress. Raises RecipeError for a parameter the notebook does not have or
    the schema refuses. An interrupt ends the notebook, the training and everything it started. Whatever looks like a
    secret in the executed notebook or papermill's log is masked at the end.
    """
    known = declared(path)
    for name in parameters:
        if name not in known and name not in SHORT_NAMES:
            raise RecipeError(f"{path.name} has no parameter {name!r}{nearest(name, [*known, *SHORT_NAMES])}.")
    parameters = {**parameters, "run_dir": str(run_dir)}
    notebook.resolve({**known, **parameters})
    run_dir.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "recipes.headless", str(path), str(run_dir / "notebook.ipynb")]
    with (run_dir / "papermill.log").open("ab") as log:
        # A session of its own, so that a terminal's Ctrl-C reaches it through us, once.
        child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
    child.stdin.write(json.dumps(parameters).encode())
    child.stdin.close()
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        _follow(Run(run_dir), child, say)
        return child.wait()
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
        if Run(run_dir).state_file.is_file():
            launch.stop(Run(run_dir))
        child.wait()
        raise
    finally:
        _scrub(run_dir)
        signal.signal(signal.SIGTERM, previous)


def _scrub(run_dir: Path) -> None:
    for scrub, name in ((masking.scrub_file, "papermill.log"), (masking.scrub_notebook, "notebook.ipynb")):
        with contextlib.suppress(OSError, ValueError):  # not written, or not whole: papermill was ended while it wrote
            scrub(run_dir / name)


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
    while child.poll() is None and not run.state_file.is_file():
        time.sleep(LOOK)
    if run.state_file.is_file():
        for moment in live.follow(run):
            say(notebook.status(moment))
            if child.poll() is not None:
                return


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """The child: hand plain types to papermill's Python API. Exit code 1 when a cell failed."""
    import papermill
    from papermill.exceptions import PapermillExecutionError

    source, output = sys.argv[1:3]
    parameters = json.load(sys.stdin)
    try:
        papermill.execute_notebook(
            source,
            output,
            parameters=parameters,
            kernel_name="python3",
            progress_bar=False,
            # Without it every carriage return of a progress bar becomes an output of its own.
            coalesce_streams=True,
        )
    except PapermillExecutionError as fault:
        print(f"{fault.ename}: {fault.evalue}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
