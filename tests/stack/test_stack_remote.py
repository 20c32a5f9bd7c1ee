"""What a repository says of a ref, asked of bare repositories made here: no network, and no waiting for one."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import threading
import time

import pytest

from recipes import stack
from recipes.errors import RecipeError
from recipes.stack import remote


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, "-C", str(folder), *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """A bare repository: a branch that went on, an annotated and a lightweight tag, and a branch named like a tag."""
    work = tmp_path / "work"
    work.mkdir()
    git(work, "init", "--quiet", "--initial-branch=main")
    git(work, "commit", "--quiet", "--allow-empty", "-m", "first")
    first = git(work, "rev-parse", "HEAD")
    git(work, "tag", "--annotate", "-m", "a release", "core_v0.18.0")
    git(work, "tag", "v1.0.0")
    git(work, "branch", "core_r0.18.0")
    git(work, "commit", "--quiet", "--allow-empty", "-m", "second")
    second = git(work, "rev-parse", "HEAD")
    bare = tmp_path / "bare.git"
    git(tmp_path, "clone", "--quiet", "--bare", str(work), str(bare))
    return bare, first, second


def entry(bare, **changes):
    like = stack.load("ascend-9.1.0").repositories["Megatron-LM"]
    return dataclasses.replace(like, url=f"file://{bare}", **changes)


def test_an_annotated_tag_is_the_commit_it_stands_for_and_a_lightweight_one_is_that_commit(repository):
    bare, first, _ = repository
    assert remote.check(entry(bare, commit=first)).verdict == "same"
    assert remote.check(entry(bare, ref="v1.0.0", commit=first)).verdict == "same"


def test_a_tag_that_was_set_again_is_wrong(repository):
    bare, _, second = repository
    checked = remote.check(entry(bare, commit=second))
    assert (checked.verdict, checked.wrong) == ("moved_tag", True)


def test_a_branch_that_went_on_is_told_and_is_not_wrong(repository):
    bare, first, second = repository
    checked = remote.check(entry(bare, ref="main", kind="branch", commit=first))
    assert (checked.verdict, checked.found, checked.wrong) == ("moved", second, False)


def test_a_branch_called_a_tag_is_wrong(repository):
    bare, first, _ = repository
    checked = remote.check(entry(bare, ref="core_r0.18.0", commit=first))
    assert (checked.verdict, checked.wrong) == ("other_kind", True)
    assert "is a branch there, not a tag" in checked.why


def test_a_ref_that_is_not_there_is_wrong(repository):
    bare, first, _ = repository
    checked = remote.check(entry(bare, ref="core_v0.19.0", commit=first))
    assert (checked.verdict, checked.wrong) == ("missing", True)


def test_a_repository_that_is_not_there_is_unreachable_and_not_wrong(tmp_path):
    checked = remote.check(entry(tmp_path / "none.git"))
    assert (checked.verdict, checked.wrong) == ("unreachable", False)
    assert checked.why


def test_a_host_that_never_answers_is_given_up_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = []
        threading.Thread(target=lambda: held.append(server.accept()), daemon=True).start()
        began = time.monotonic()
        said = remote.ask(f"https://127.0.0.1:{server.getsockname()[1]}/x/y.git", "main", deadline=1)
        assert said.unreachable == "no answer within 1 s"
        assert time.monotonic() - began < 5


def test_no_other_transport_can_be_asked_for(tmp_path):
    said = remote.ask(f"ext::sh -c 'touch {tmp_path}/run'", "main", deadline=5)
    assert said.unreachable
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("ref", ["--upload-pack=touch x", "a b", "main;ls"])
def test_a_ref_with_shell_characters_is_never_asked_for(ref):
    with pytest.raises(RecipeError, match="no name of a git ref"):
        remote.ask("https://127.0.0.1/x/y.git", ref)


def test_a_whole_stack_is_asked_at_once_and_in_its_own_order(repository):
    bare, first, _ = repository
    held = stack.load("ascend-9.1.0")
    mine = {
        name: entry(bare, name=name, commit=first) if name != "verl" else entry(bare, name=name, kind="commit")
        for name in held.repositories
    }
    checked = remote.check_all(dataclasses.replace(held, repositories=mine), deadline=20)
    assert list(checked) == list(mine)
    assert {one.verdict for name, one in checked.items() if name != "verl"} == {"same"}
    assert checked["verl"].verdict == "unasked"
