"""README and book: the real command line takes every command, the quick ones are run, every link leads somewhere."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pandas as pd
import pytest
from click.testing import CliRunner
from test_compare import run_of
from test_metrics_sources import VERSION, record, scalar
from test_verdict import healthy

from recipes import batch, headless, params
from recipes.cli import main
from recipes.errors import RecipeError
from recipes.run.directory import Run, update_state

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("README.*.md"), *ROOT.glob("notebooks/book/*.md")])

# What stands for a path of the reader's.
PLACEHOLDERS = {"RUN", "RUN_A", "RUN_B", "LOG", "SOURCE", "EXPORT", "DIR", "FILE"}
# Commands of seconds that need no run: these are not only parsed but run.
QUICK = ("list", "show", "explain", "card", "export", "stack show", "stack dockerfile", "stack install", "layouts")
# Commands that read a run, a log or this machine, run on made ones; 1 says that they found something to act on.
READING = {
    "baseline": {0},
    "check": {0, 1},
    "compare": {0},
    "diagnose": {0, 1},
    "diff": {0, 1},
    "doctor": {0, 1},
    "judge": {0, 1},
    "metrics": {0},
    "migrate": {0},
    "plot": {0},
    "report": {0},
    "rollouts": {0},
    "run --resume": {2},  # made runs have no checkpoint, and the sentence says so
    "stack drift": {0},
    "stack verify": {0, 1},
    "stop": {0},
    "watch": {0, 1},
}
# Commands that train, download or build for minutes: the file where they are run for real, and by which name.
ELSEWHERE = {
    "batch": ("test_batch.py", '"batch"'),
    "check-export": ("test_checkpoint.py", "cli_tools.check_export"),
    "data": ("test_data.py", "cli_tools.data_commands"),
    "prepare": ("test_faults.py", '"prepare"'),
    "rehearse": ("test_rehearsal.py", '"rehearse"'),
    "replay": ("test_provenance.py", '"replay"'),
    "run": ("test_faults.py", '"run"'),
    "simulate": ("test_simulate.py", '"simulate"'),
}


def commands(page: Path) -> list[str]:
    """The lines of a page's bash blocks, comments cut off, continued lines joined."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := re.sub(r"(^|\s)#.*$", "", line).strip())]


ALL = [pytest.param(page, line, id=f"{page.stem}: {line}") for page in PAGES for line in commands(page)]
# The Chinese README has the commands of the English one; a test below holds them equal.
OURS = [p for p in ALL if p.values[1].startswith("recipes ") and ".zh" not in p.values[0].name]
ONCE = list({p.values[1]: p for p in OURS}.values())  # two pages may name the same command


def kind(line: str, kinds) -> str | None:
    """The longest of `kinds` that the command of a line begins with."""
    words = line.removeprefix("recipes ")
    return max((each for each in kinds if f"{words} ".startswith(f"{each} ")), key=len, default=None)


def is_quick(line: str) -> bool:
    return (kind(line, QUICK) is not None or "--dry-run" in line) and not set(shlex.split(line)) & PLACEHOLDERS


LAUNCH = (
    "python -m verl.trainer.main_ppo model_engine=megatron actor_rollout_ref.rollout.name=vllm "
    "actor_rollout_ref.model.path=models/Qwen3-0.6B trainer.nnodes=1\n"
)


def own_recipe() -> str:
    page = (ROOT / "notebooks" / "book" / "own_recipe.md").read_text(encoding="utf-8")
    return re.search(r"^```yaml\n(.*?)^```", page, re.M | re.S)[1]


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """A reader's folder: what the pages call RUN, LOG, DIR, mine.yaml, my_launch.sh is there."""
    monkeypatch.chdir(tmp_path)
    for name in PLACEHOLDERS:
        (tmp_path / name).mkdir()
    (tmp_path / "my_launch.sh").write_text(LAUNCH)
    (tmp_path / "mine.yaml").write_text(own_recipe())
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
    [p for p in ONCE if is_quick(p.values[1])],
)
def test_quick_commands_of_the_pages_run(page, line, reader):
    words = [sys.executable, "-m", "recipes.cli", *shlex.split(line)[1:]]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() or list(reader.iterdir())


@pytest.fixture(scope="module")
def made_runs(tmp_path_factory):
    """Runs of the quickstart under the names the pages use, a console log, and event files."""
    root = tmp_path_factory.mktemp("reader")
    for seed, name in enumerate(("RUN", "RUN_A", "RUN_B", "RUN1", "RUN2", "RUN3", "runs/quickstart-grpo/…")):
        numbers = random.Random(seed)
        rows = {
            step: {key: value + numbers.uniform(0, 1e-4) for key, value in healthy(step).items()}
            for step in range(1, 31)
        }
        overrides = [f"trainer.seed={seed}", "trainer.rollout_dump=true"]
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        run = Run(Path(run_of(root, name, pd.DataFrame.from_dict(rows, orient="index"), overrides)))
        (run.path / "verl.yaml").write_text("{}")
        run.log(1).write_text("training ended\n")
        (run.attempt(1) / "rollouts").mkdir()
        said = {"input": "1+1", "output": "#### 2", "score": 1.0, "step": 30, "gts": "2"}
        (run.attempt(1) / "rollouts" / "30.jsonl").write_text(json.dumps(said) + "\n")
        update_state(run, given=["trainer.seed"], attempts=[{"number": 1, "seconds": 61.0, "state": "finished"}])
    text = "".join(f"step:{step} - {' - '.join(f'{k}:{v}' for k, v in row.items())}\n" for step, row in rows.items())
    for name in ("train.log", "npu.log", "gpu.log"):
        (root / name).write_text(text)
    (root / "train.log.gz").write_bytes(gzip.compress(text.encode()))
    (root / "DIR").mkdir()  # what `stack drift` looks through
    (root / "my_launch.sh").write_text(LAUNCH)
    (root / "mine.yaml").write_text(own_recipe())
    events = root / "path" / "to" / "tensorboard"
    events.mkdir(parents=True)
    values = [scalar(1, key, value) for key, value in healthy(1).items()]
    (events / "events.out.tfevents.1700000000.host.1.0").write_bytes(b"".join(map(record, [VERSION, *values])))
    return root


@pytest.mark.parametrize(
    ("page", "line"), [p for p in ONCE if kind(p.values[1], READING) and not is_quick(p.values[1])]
)
def test_commands_that_read_run_on_what_the_pages_name(page, line, made_runs, tmp_path, monkeypatch):
    monkeypatch.setenv("RECIPES_WORK", str(tmp_path / "work"))
    monkeypatch.chdir(made_runs)
    words = shlex.split(line)[1:]
    if words[:2] == ["baseline", "make"]:
        words += ["-o", str(tmp_path / "baseline.yaml")]
    done = CliRunner().invoke(main, words)
    assert done.exit_code in READING[kind(line, READING)], (done.output, done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert done.output.strip()


@pytest.mark.parametrize(("page", "line"), OURS)
def test_every_command_of_the_pages_is_run_by_a_test(page, line):
    place = kind(line, ELSEWHERE)
    if not is_quick(line) and not kind(line, READING):
        assert place, f"nothing runs {line!r}"
        file, name = ELSEWHERE[place]
        assert name in (ROOT / "tests" / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "line", [p.values[1] for p in ALL if p.values[1].startswith("papermill ") and ".zh" not in p.values[0].name]
)
def test_plain_papermill_of_the_pages_names_a_notebook_and_its_parameters(line):
    words = shlex.split(line)
    declared = headless.declared(ROOT / words[1])
    given = [words[i + 1] for i, word in enumerate(words) if word == "-p"]
    assert given
    assert set(given) <= set(declared)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_yaml_of_the_pages_is_a_recipe_or_a_batch(page, tmp_path):
    for number, text in enumerate(re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        assert batch.load(path).items if re.search(r"^runs:", text, re.M) else params.compose(str(path))


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
