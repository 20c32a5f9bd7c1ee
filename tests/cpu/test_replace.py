"""Nothing is replaced that does not look as it is known to."""

from types import ModuleType

import pytest

from recipes.cpu.replace import UnknownCode, replace


class Engine:
    def run(self, steps, seed=0):
        return "old"


def test_the_old_value_comes_back_and_the_new_one_is_in_place(monkeypatch):
    monkeypatch.setattr(Engine, "run", Engine.run)
    old = replace(Engine, "run", lambda self, steps, seed=0: "new", parameters="self steps seed")
    assert (old(Engine(), 1), Engine().run(1)) == ("old", "new")


@pytest.mark.parametrize("parameters", ["self steps", "self seed steps", "self steps seed device"])
def test_another_signature_is_refused_and_nothing_changes(parameters):
    with pytest.raises(UnknownCode, match=r"Engine\.run.*found \(self steps seed\), known is \("):
        replace(Engine, "run", None, parameters=parameters)
    assert Engine().run(1) == "old"


def test_a_missing_attribute_is_refused():
    module = ModuleType("verl.utils.made_up")
    with pytest.raises(UnknownCode, match=r"verl\.utils\.made_up\.gone .*no such attribute"):
        replace(module, "gone", None)
    assert not hasattr(module, "gone")


def test_a_refusal_is_not_taken_for_a_missing_package():
    assert not issubclass(UnknownCode, ImportError)  # verl goes on without an engine whose import fails so
