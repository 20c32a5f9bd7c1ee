"""Where modules come from and whether they import: asked of real children, with folders that get in the way."""

from __future__ import annotations

import sys
import time

import psutil
import pytest
from fake_node import only, states

from recipes.doctor import child, software
from recipes.doctor.lines import shown
from recipes.errors import RecipeError
from recipes.stack.verify import Checked


@pytest.fixture
def places(fake, monkeypatch):
    """Locate two installed packages only; torch and the rest would be found the same way."""
    monkeypatch.setattr(software, "PACKAGES", ("click", "omegaconf.errors"))
    return fake


def test_installed_packages_are_where_they_are_installed(places):
    lines = list(software._places(places.node()))
    assert [line.state for line in lines] == ["ok", "ok"]
    assert "site-packages" in only(lines, "path of click").text


def test_a_folder_beside_the_launch_hides_a_package(places):
    places.put("launched-from/click/__init__.py", "")
    line = only(software._places(places.node()), "path of click")
    assert line.state == "error"
    assert "launched-from" in line.finding.keys["click"]
    assert "site-packages" in line.finding.sentence


def test_a_folder_that_hides_the_parent_of_a_module_is_seen(places):
    places.put("launched-from/omegaconf/__init__.py", "")
    line = only(software._places(places.node()), "path of omegaconf.errors")
    assert line.state == "error"
    assert line.finding.keys == {"omegaconf.errors": "not found"}


def test_a_folder_without_init_hides_nothing(places):
    places.put("launched-from/click/notes.txt", "")
    assert only(software._places(places.node()), "path of click").state == "ok"


def test_pythonpath_hides_an_installed_package(places):
    places.put("checkout/click/__init__.py", "")
    line = only(software._places(places.node(PYTHONPATH=str(places.root / "checkout"))), "path of click")
    assert line.state == "warning"
    assert "checkout" in line.finding.keys["PYTHONPATH"]


def test_a_module_that_only_this_folder_has(places, monkeypatch):
    monkeypatch.setattr(software, "PACKAGES", ("only_here",))
    places.put("launched-from/only_here.py", "")
    line = only(software._places(places.node()), "path of only_here")
    assert line.state == "warning"
    assert "exists nowhere else" in line.text


def test_an_interpreter_that_is_none_is_unseen(places):
    (line,) = software._places(places.node(python=str(places.root / "no-python")))
    assert (line.subject, line.state) == ("module paths", "unseen")


def modules(fake, **texts):
    for name, text in texts.items():
        fake.put(f"modules/{name}.py", text)
    return fake.node(PYTHONPATH=str(fake.root / "modules"))


def test_modules_are_imported_in_order_in_the_environment_of_the_run(fake):
    node = modules(
        fake,
        first="import os, builtins; builtins.seen = os.environ['HCCL_CONNECT_TIMEOUT']",
        second="import builtins; assert builtins.seen == '1500'",
    )
    node.environment["HCCL_CONNECT_TIMEOUT"] = "1500"
    (line,) = software.imports(node, ("first", "second"), 30)
    assert line.state == "ok"
    (line,) = software.imports(node, ("second", "first"), 30)
    assert line.state == "error"
    assert line.finding.keys == {"external_modules": "second"}


def test_the_last_line_of_the_error_is_told_without_its_escapes(fake):
    node = modules(fake, good="print('noise')", broken="raise RuntimeError('torch_npu \\x1b[31mwants\\x1b[0m CANN')")
    (line,) = software.imports(node, ("good", "broken"), 30)
    assert line.finding.keys == {"external_modules": "broken"}
    assert "RuntimeError: torch_npu wants CANN" in line.text
    assert "\x1b" not in line.text


def runs(pid):
    """Whether a process still does anything. Orphans are reaped by whoever adopts them, in their own time."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def test_a_module_that_never_ends_is_named_and_its_children_are_ended(fake):
    pid = fake.root / "pid"
    node = modules(
        fake,
        hangs="import subprocess, time; p = subprocess.Popen(['sleep', '60']); "
        f"open({str(pid)!r}, 'w').write(str(p.pid)); time.sleep(60)",
    )
    begun = time.monotonic()
    (line,) = software.imports(node, ("hangs",), 3)
    assert time.monotonic() - begun < 20
    assert line.state == "error"
    assert "within 3 s" in line.text
    limit = time.monotonic() + 10
    while runs(int(pid.read_text())) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not runs(int(pid.read_text()))


def test_a_module_that_ends_python_is_not_taken_for_a_success(fake):
    node = modules(fake, leaves="import os; os._exit(0)")
    (line,) = software.imports(node, ("leaves",), 30)
    assert line.state == "error"


def test_no_module_is_in_order_and_no_stack_is_unseen(fake):
    assert states(software._modules(fake.node(), 5), "external modules") == ["ok"]
    assert states(software._stack(fake.node()), "stack") == ["unseen"]


def test_what_the_stack_wants_and_this_interpreter_has_not(fake, monkeypatch):
    told = [
        Checked("torch", "2.10.0", "2.9.0", "other_version"),
        Checked("CANN", "9.1.0", "", "missing"),
        Checked("vllm", "0fc695fc6d1d", "0.23.0", "untold", "not a git checkout"),
        Checked("verl", "0.9.1", "0.9.1", "same"),
        Checked("MindSpeed", "1881e01a9960", "", "missing", "a long reason why it is pinned"),
    ]
    monkeypatch.setattr(software.verifying, "verify", lambda stack, python, needs: told)
    lines = list(software._stack(fake.node("qwen3/grpo_8b_vllm_a2")))
    assert states(lines, "stack torch") == ["error"]
    assert states(lines, "stack CANN") == []
    assert states(lines, "stack vllm") == ["unseen"]
    assert "pinned" not in only(lines, "stack MindSpeed").text
    assert only(lines, "stack").text.startswith("1 of 5")


def test_an_engine_needs_the_repository_that_is_for_it_alone(fake, monkeypatch):
    asked = []
    monkeypatch.setattr(software.verifying, "verify", lambda stack, python, needs: asked.append(needs) or [])
    list(software._stack(fake.node("qwen3/grpo_8b_mindspeed_sglang_a3")))
    list(software._stack(fake.node("qwen3/grpo_8b_vllm_a2")))
    assert asked[0] and asked[1] == ()


def test_a_child_that_cannot_start_and_output_that_is_foreign():
    with pytest.raises(RecipeError, match="cannot be started"):
        child.run(["/no/such/program"], environment={}, deadline=1)
    with pytest.raises(RecipeError, match="cannot be started"):
        child.run([sys.executable, "-c", "null\0byte"], environment={}, deadline=1)
    assert shown("a\x1b[2Jb\n\tc\u202e") == "ab c"
    assert len(shown("x" * 5000)) == 400
