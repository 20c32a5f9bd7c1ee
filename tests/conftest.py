"""What several test files share."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A job a shell starts in the background ignores SIGINT, and so would every child that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Files of long tests that share nothing: each may run beside the others of its file.
APART = ("test_batch.py", "test_end_to_end.py", "test_rehearsal.py", "test_training.py")


def together(nodeid: str) -> str:
    """What a test shares: tests of the Ray cluster its nodes, those of a file what the file sets up, some nothing."""
    file = nodeid.partition("::")[0]
    if "/run_ray/" in file:
        return "cluster"
    return nodeid if file.rpartition("/")[2] in APART else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `-n --dist loadscope`, tests that share something go to one worker, one after the other."""
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return together(nodeid)

    return Together(config, log)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch, tmp_path):
    """Keep the developer's own settings out of the tests, and the tests' caches out of the developer's."""
    from recipes.preflight.environment import INHERITED

    own = ("VERL_USE_EXTERNAL_MODULES", "RECIPES_PYTHON", "RECIPES_WORK", "RECIPES_HOME", "RAY_ADDRESS")
    for name in (*own, *INHERITED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RECIPES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")  # tables wrap at the terminal's width, and there may be none


@pytest.fixture
def params_folder(tmp_path, monkeypatch):
    """A workbook of one's own: params/ with the real facts, for recipes a test writes itself."""
    import shutil

    home = tmp_path / "workbook"
    for folder in ("stacks", "models", "hardware", "cpu", "quickstart"):
        shutil.copytree(ROOT / "params" / folder, home / "params" / folder)
    monkeypatch.setenv("RECIPES_HOME", str(home))
    return home / "params"


@pytest.fixture
def faults_in_the_book():
    """Holds the table of faults that a test file writes into the book to the rows it saw; see RECIPES_WRITE_TABLES."""
    page = ROOT / "notebooks" / "book" / "when_it_fails.md"

    def held(mark: str, rows: set[str], count: int) -> None:
        mark, end = f"<!-- {mark} -->\n", "\n<!-- end -->"
        head, _, rest = page.read_text(encoding="utf-8").partition(mark)
        found, _, tail = rest.partition(end)
        if os.environ.get("RECIPES_WRITE_TABLES"):
            titles = ["| what happens | state | cause in run.json | steps kept | and then |", "|---|---|---|---|---|"]
            found = "\n".join([*titles, *sorted(rows)])
            page.write_text(head + mark + found + end + tail, encoding="utf-8")
        assert rows <= set(found.splitlines())
        assert len(found.splitlines()) == 2 + count

    return held


@pytest.fixture
def python() -> str:
    return sys.executable
