"""README and book: the real command line takes every command, the quick ones are run, every link leads somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from recipes import params
from recipes.cli import main
from recipes.errors import RecipeError

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("README.*.md"), *ROOT.glob("notebooks/book/*.md")])

# What stands for a path of the reader's.
PLACEHOLDERS = {"RUN", "RUN_A", "RUN_B", "LOG", "SOURCE", "EXPORT", "DIR", "FILE"}
# Commands of seconds that need no run: these are not only parsed but run.
QUICK = ("list", "show", "explain", "card", "export", "stack show", "stack dockerfile", "stack install", "layouts")


def commands(page: Path) -> list[str]:
    """The lines of a page's bash blocks, comments cut off, continued lines joined."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := re.sub(r"(^|\s)#.*$", "", line).strip())]


ALL = [pytest.param(page, line, id=f"{page.stem}: {line}") for page in PAGES for line in commands(page)]
OURS = [p for p in ALL if p.values[1].startswith("recipes ")]


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """A reader's folder: what the pages call RUN, LOG, DIR, mine.yaml, my_launch.sh is there."""
    monkeypatch.chdir(tmp_path)
    for name in PLACEHOLDERS:
        (tmp_path / name).mkdir()
    (tmp_path / "my_launch.sh").write_text("python -m verl.trainer.main_ppo trainer.nnodes=1\n")
    own = (ROOT / "notebooks" / "book" / "own_recipe.md").read_text(encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(re.search(r"^```yaml\n(.*?)^```", own, re.M | re.S)[1])
    return tmp_path


def parsed(words: list[str]) -> tuple[str, click.Context]:
    """The command that the real command line finds, with its arguments parsed. Raises click's own errors."""
    command, context, name = main, click.Context(main), []
    while isinstance(command, click.Group):
        word, *words = words
        name.append(word)
        found = command.get_command(context, word)
        assert found is not None, f"there is no command {' '.join(name)}"
        command = found
    return " ".join(name), command.make_context(word, words, parent=context)


@pytest.mark.parametrize(("page", "line"), OURS)
def test_the_command_line_takes_every_command_of_the_pages(page, line, reader):
    for word in shlex.split(line):  # what a command must find is there
        if re.fullmatch(r"[\w.-]+\.(log|gz|parquet)", word) or "/…" in word:
            Path(word).parent.mkdir(parents=True, exist_ok=True)
            Path(word).touch()
    name, context = parsed(shlex.split(line)[1:])
    given = context.params.get("name")
    overrides = list(context.params.get("overrides") or ())
    if given and name != "stack":
        if given.startswith(("ascend-", "cpu")) and name.startswith("stack"):
            assert (ROOT / "params" / "stacks" / f"{given}.yaml").is_file()
        elif name not in ("run",) or "=" not in given:
            try:
                params.compose(given, overrides)  # raises for a recipe, a key or a value that is not there
            except RecipeError as fault:
                assert "tensor_parallel=3" in line, fault  # a page's own example of a mistake


@pytest.mark.parametrize(
    ("page", "line"),
    [p for p in OURS if p.values[1].split("recipes ", 1)[1].startswith(QUICK) or "--dry-run" in p.values[1]],
)
def test_quick_commands_of_the_pages_run(page, line, reader):
    if any(word in PLACEHOLDERS or "…" in word for word in shlex.split(line)):
        return  # of a run that is not there; parsed above
    words = [sys.executable, "-m", "recipes.cli", *shlex.split(line)[1:]]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() or list(reader.iterdir())


@pytest.mark.parametrize(("page", "line"), [p for p in ALL if p.values[1].startswith("scripts/")])
def test_scripts_of_the_pages_are_there(page, line):
    words = shlex.split(line)
    assert os.access(ROOT / words[0], os.X_OK)
    if "--print" in words:
        environment = os.environ | {"RECIPES_PYTHON": sys.executable}
        done = subprocess.run(["bash", *words], cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:src|srcset)=\"([^\"]+)\"", text)
    for target in targets:
        if not target.startswith("http"):
            assert (page.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_keys_of_the_pages_are_keys(page):
    """What a page writes as `group.key=value` is a key of a recipe."""
    known = set(params.declared_keys()) | set(params.SHORT_NAMES)
    for key in re.findall(r"[`\s]([a-z_]+(?:\.[a-z_]+)+)=", page.read_text(encoding="utf-8")):
        root = key.split(".")[0]
        if root not in ("kernel", "config"):  # kernel names in JupyterLab, and Megatron's words where they are quoted
            assert key in known or root in ("verl", "env", "transformer"), key


def test_the_chinese_readme_has_the_same_commands_tables_and_sections():
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
    assert commands(ROOT / "README.md") == commands(ROOT / "README.zh.md")
    for shape in (r"^(#+) ", r"^(\|)", r"^(- )", r"(`[\w./=:-]+`)"):
        found = [
            sorted(re.findall(shape, re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M))
            for text in (english, chinese)
        ]
        assert found[0] == found[1], shape
