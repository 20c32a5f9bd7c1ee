"""Functions run before, after and around an import that has not happened yet."""

import importlib
import sys
from contextlib import contextmanager

import pytest

from recipes.cpu import import_hook


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes an importable module of a fresh name; returns its name."""

    def write(body: str) -> str:
        name = f"module_of_{tmp_path.name}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(body)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    return write


def test_after_changes_a_module_before_its_importer_sees_it(module):
    name = module("answer = 1")
    import_hook.after(name)(lambda loaded: setattr(loaded, "answer", loaded.answer + 41))
    assert name not in sys.modules
    assert importlib.import_module(name).answer == 42


def test_functions_run_in_the_order_they_were_registered(module):
    name = module("told = []")
    for word in "first", "second":
        import_hook.after(name)(lambda loaded, word=word: loaded.told.append(word))
    assert importlib.import_module(name).told == ["first", "second"]


def test_after_runs_at_once_on_a_module_that_is_loaded(module):
    name = module("answer = 1")
    loaded = importlib.import_module(name)
    import_hook.after(name)(lambda loaded: setattr(loaded, "answer", 2))
    assert loaded.answer == 2


def test_around_holds_while_the_body_runs_and_lets_go_when_it_fails(module):
    name = module("import sys\nseen = 'placeholder' in sys.modules\nraise ValueError(seen)")

    @contextmanager
    def placeholder():
        sys.modules["placeholder"] = sys
        try:
            yield
        finally:
            del sys.modules["placeholder"]

    import_hook.around(name)(placeholder)
    with pytest.raises(ValueError, match="True"):
        importlib.import_module(name)
    assert "placeholder" not in sys.modules


def test_around_refuses_a_module_that_is_loaded(module):
    name = module("")
    importlib.import_module(name)
    with pytest.raises(RuntimeError, match=f"{name} was imported before"):
        import_hook.around(name)(contextmanager(lambda: iter([None])))


def test_what_an_after_function_raises_fails_the_import(module):
    name = module("")

    @import_hook.after(name)
    def refuse(loaded):
        raise LookupError("not as it was")

    with pytest.raises(LookupError, match="not as it was"):
        importlib.import_module(name)
    assert name not in sys.modules


def test_a_function_registered_twice_runs_once(module):
    """A rollout server is forked from a process that has registered the same patches."""
    name = module("told = []")

    def tell(loaded):
        loaded.told.append("once")

    for _ in range(2):
        import_hook.after(name)(tell)
    assert importlib.import_module(name).told == ["once"]
    import_hook.after(name)(tell)
    assert sys.modules[name].told == ["once"]
