"""Is what an interpreter has what the stack wants? Asked of real interpreters and checkouts, without a network."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from dataclasses import replace
from pathlib import Path

import pytest

from recipes import stack
from recipes.errors import RecipeError
from recipes.stack import verify
from recipes.stack.table import Repository, Stack

VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, "-C", str(folder), *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


class Node:
    """An interpreter of its own with a checkout of a package `meg` that has a submodule `meg.core`."""

    def __init__(self, place: Path):
        venv.create(place / "env", with_pip=False)
        self.python = str(place / "env" / "bin" / "python")
        self.site = place / "env" / "lib" / f"python{VERSION}" / "site-packages"
        self.checkout = place / "Megatron LM"  # a blank in the path, as people have them
        (self.checkout / "meg" / "core").mkdir(parents=True)
        (self.checkout / "meg" / "core" / "__init__.py").write_text("raise SystemExit('imported')\n")
        git(self.checkout, "init", "--quiet", "--initial-branch=main")
        git(self.checkout, "add", ".")
        git(self.checkout, "commit", "--quiet", "-m", "first")
        git(self.checkout, "tag", "core_v1.0.0")
        self.commit = git(self.checkout, "rev-parse", "HEAD")

    def distribution(self, name: str, version: str, direct_url: dict | None = None) -> Path:
        info = self.site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        if direct_url:
            (info / "direct_url.json").write_text(json.dumps(direct_url))
        return info

    def editable(self, version: str = "1.0.0") -> None:
        self.distribution("meg", version, {"url": self.checkout.as_uri(), "dir_info": {"editable": True}})
        (self.site / "meg.pth").write_text(f"{self.checkout}\n")


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def wanted(node, **changes) -> Stack:
    meg = Repository(
        "meg", "https://example.com/o/meg.git", "core_v1.0.0", "tag", node.commit,
        distribution="meg", module="meg.core", version="1.0.0", why="the tag",
    )  # fmt: skip
    held = {"meg": replace(meg, **changes)}
    return Stack("mine", python=VERSION, verl="0", repositories=held, order=("meg",), packages={"nump": ">=2,<3"})


def verdict(held, node, name="meg", **options):
    return next(one for one in verify.verify(held, node.python, **options) if one.name == name)


def test_an_editable_install_at_the_wanted_commit_is_the_same(node):
    node.editable()
    one = verdict(wanted(node), node)
    assert one.verdict == "same"
    assert one.found == f"1.0.0 {node.commit[:12]} (tag core_v1.0.0, branch main)"
    assert one.place == str(node.checkout / "meg" / "core")


def test_another_commit_is_told_with_both(node):
    node.editable()
    git(node.checkout, "commit", "--quiet", "--allow-empty", "-m", "second")
    one = verdict(wanted(node), node)
    assert one.verdict == "other_commit"
    assert node.commit in one.why


def test_changed_files_are_told_by_name_and_new_ones_do_not_count(node):
    node.editable()
    (node.checkout / "meg.egg-info").mkdir()
    assert verdict(wanted(node), node).verdict == "same"
    (node.checkout / "meg" / "core" / "__init__.py").write_text("x = 1\n")
    one = verdict(wanted(node), node)
    assert (one.verdict, one.wrong) == ("dirty", True)
    assert "meg/core/__init__.py" in one.why


def test_a_cut_off_history_is_wrong_only_where_the_history_is_needed(node, tmp_path):
    git(node.checkout, "commit", "--quiet", "--allow-empty", "-m", "second")
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "--quiet", "--depth", "1", node.checkout.as_uri(), str(shallow))
    node.checkout, node.commit = shallow, git(shallow, "rev-parse", "HEAD")
    node.editable()
    assert verdict(wanted(node), node).verdict == "same"
    assert verdict(wanted(node, depth="full"), node).verdict == "shallow"


def test_a_module_that_comes_from_elsewhere_is_told(node, monkeypatch):
    node.editable()
    (node.site / "meg" / "core").mkdir(parents=True)
    (node.site / "meg" / "core" / "__init__.py").write_text("")
    one = verdict(wanted(node), node)
    assert (one.verdict, one.place) == ("other_place", str(node.site / "meg" / "core"))


def test_what_pip_built_from_a_commit_is_known_by_its_direct_url(node):
    built = {"url": "https://example.com/o/meg.git", "vcs_info": {"vcs": "git", "commit_id": node.commit}}
    node.distribution("meg", "1.0.0", built)
    assert verdict(wanted(node), node).verdict == "same"
    assert verdict(wanted(node, commit="0" * 40), node).verdict == "other_commit"


def test_a_wheel_of_the_right_version_cannot_tell_its_commit_and_of_another_version_is_wrong(node):
    node.distribution("meg", "1.0.0")
    assert (verdict(wanted(node), node).verdict, verdict(wanted(node), node).wrong) == ("untold", False)
    assert verdict(wanted(node, version="1.0.1"), node).verdict == "other_version"
    assert verdict(wanted(node, install="wheel", commit=""), node).verdict == "same"


def test_what_is_not_there_is_missing_unless_it_is_optional(node):
    assert verdict(wanted(node), node).verdict == "missing"
    optional = wanted(node, optional="engine mindspeed")
    assert verdict(optional, node).verdict == "not_needed"
    assert verdict(optional, node, needs=("meg",)).verdict == "missing"
    with pytest.raises(RecipeError, match="no repository nope"):
        verify.verify(optional, node.python, needs=("nope",))


def test_a_folder_on_the_path_is_known_by_its_checkout(node, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(node.checkout))
    one = verdict(wanted(node, distribution="", version="", install="path"), node)
    assert (one.verdict, one.found) == ("same", f"{node.commit[:12]} (tag core_v1.0.0, branch main)")


def test_the_working_directory_is_not_taken_for_an_installation(node, monkeypatch):
    monkeypatch.chdir(node.checkout)
    assert verdict(wanted(node), node).verdict == "missing"


def test_packages_are_compared_by_specifier_and_a_local_label_does_not_count(node):
    node.distribution("nump", "2.1.0+cpu")
    assert verdict(wanted(node), node, "nump").verdict == "same"
    assert verdict(replace(wanted(node), packages={"nump": "<2"}), node, "nump").verdict == "other_version"
    assert verdict(replace(wanted(node), packages={"other": "1"}), node, "other").verdict == "missing"


def test_what_must_be_absent_is_forbidden(node):
    held = replace(wanted(node), absent={"transformer-engine": "it hides the other one"})
    assert verdict(held, node, "transformer-engine").verdict == "same"
    node.distribution("transformer_engine", "2.9.0")
    one = verdict(held, node, "transformer-engine")
    assert (one.verdict, one.found, one.why) == ("forbidden", "2.9.0", "it hides the other one")


@pytest.mark.parametrize(("file", "text"), [
    ("version.cfg", "# CANN\ntoolkit_running_version=[9.1.0:CANN-9.1.0]\n"),
    ("version.info", "Version=9.1.0\n"),
    ("ascend_toolkit_install.info", "package_name=Ascend-cann-toolkit\nversion=9.1.0\n"),
])  # fmt: skip
def test_cann_is_read_where_its_environment_points(node, monkeypatch, tmp_path, file, text):
    held = replace(wanted(node), cann="9.1.0")
    assert verdict(held, node, "CANN").verdict == "missing"
    (tmp_path / file).write_text(text)
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(tmp_path))
    assert verdict(held, node, "CANN").verdict == "same"
    assert verdict(replace(held, cann="9.0.0"), node, "CANN").verdict == "other_version"


def test_another_python_is_told(node):
    assert verdict(replace(wanted(node), python="3.10"), node, "python").verdict == "other_version"


def test_noise_on_the_interpreter_s_output_does_not_hide_the_answer(node):
    (node.site / "noise.pth").write_text("import sys; print('hello from a plugin')\n")
    assert verdict(wanted(node), node).verdict == "missing"


def test_an_interpreter_that_cannot_answer_is_refused_with_its_own_words(tmp_path):
    with pytest.raises(RecipeError, match="cannot be asked"):
        verify.verify(stack.load("cpu"), str(tmp_path / "none"))
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no such module: encodings' >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(RecipeError, match=r"exit code 3.*no such module"):
        verify.verify(stack.load("cpu"), str(broken))


def test_a_hook_or_monitor_of_a_checkout_does_not_run(node, tmp_path):
    node.editable()
    trap = node.checkout / ".git" / "trap.sh"
    trap.write_text(f"#!/bin/sh\ntouch '{tmp_path / 'ran'}'\n")
    trap.chmod(0o755)
    git(node.checkout, "config", "core.fsmonitor", str(trap))
    assert verdict(wanted(node), node).verdict == "same"
    assert not (tmp_path / "ran").exists()


def test_this_machine_has_the_cpu_stack(python):
    checked = verify.verify(stack.load("cpu"), python)
    assert [(one.name, one.verdict) for one in checked if one.verdict != "same"] == []
    assert [one.name for one in checked] == ["python", *stack.load("cpu").packages]


def test_this_machine_does_not_have_an_ascend_stack_and_says_so_thing_by_thing(python):
    held = {one.name: one for one in verify.verify(stack.load("ascend-9.1.0"), python)}
    assert held["torch_npu"].verdict == "missing"
    assert held["torch"].verdict == "other_version"
    # A megatron-core of the right version is here, but from the index: its commit cannot be told.
    assert held["Megatron-LM"].verdict == "untold"
    assert held["verl"].verdict == "same"


def test_without_git_the_commit_cannot_be_told_and_nothing_breaks(node, monkeypatch, tmp_path):
    node.editable()
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert shutil.which("git") is None
    assert verdict(wanted(node), node).verdict == "untold"
