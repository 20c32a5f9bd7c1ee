"""Secrets: which names and shapes are told, what is left alone, and that nothing of ours keeps one."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recipes import headless, live, masking, notebook, params, verl_schema
from recipes.errors import RecipeError
from recipes.masking import MASK, mask

HOME = Path(__file__).parent.parent

# Put together here, so that this file holds nothing that looks like one. None was ever valid.
TOKEN = "hf_" + "aB3" * 12
SHAPES = [
    TOKEN,
    "ghp_" + "x7" * 18,
    "github_pat_" + "11ABCDEFG0" * 4,
    "glpat-" + "a1b2-c3d4_" * 2,
    "sk-" + "proj-Ab1_" * 4,
    "AKIA" + "IOSFODNN7EXAMPLE",
    "AIza" + "Sy0123456789abcdefghijklmnopqrstuvw"[:35],
    "xoxb-" + "123456789012-abcdef",
    "eyJ" + "hbGciOiJIUzI1NiJ9.eyJ" + "zdWIiOiIxMjM0In0.dBjftJeZ4CVP-mB92K27uhbUJU1p1r",
]
FENCE = "RSA " + "PRIVATE KEY-----"
KEY = "\n".join([f"-----BEGIN {FENCE}", "MIIEpAIBAAKCAQEA+/=", "abc", f"-----END {FENCE}"])

# What our runs, logs and provenance are full of, and no secret.
HARMLESS = [
    "commit 1979a4d0c0ffee1979a4d0c0ffee1979a4d0c0ff, sha256:" + "0f" * 32,
    "/home/x/.cache/huggingface/token",
    "actor_rollout_ref.actor.loss_agg_mode=token-mean data.prompt_key=prompt data.reward_fn_key=data_source",
    "max_tokens=4096 num_tokens: 12345678 perf/total_num_tokens:1.5e7 rollout_corr/chi2_token:0.00015819072723",
    "pad_token='<|endoftext|>', eos_token_id: 151645, stop_token_ids=[151643, 151645]",
    "git clone ssh://git@github.com/verl-project/verl and git@github.com:x/y.git",
    "https://github.com/verl-project/verl.git@v0.9.1#egg=verl",
    "https://${NAME}:${WORD}@host/x and http://<user>:<password>@host",
    "HF_TOKEN=$HF_TOKEN password=${oc.env:PW} api_key=None token: null",
    "disk-usage of the task-runner-123456789012345678901234",
    "PWD=/work/x OLDPWD=/y TOKENIZERS_PARALLELISM=false hf_cpu_rollout_replica_of_ours_1",
    "KeyError: 'actor/grad_norm' and key=lambda pair: pair[1]",
]


@pytest.mark.parametrize("secret", SHAPES)
def test_a_token_of_a_known_shape_is_masked_wherever_it_stands(secret):
    for text in (secret, f"x {secret}.", f"--flag={secret}", f'{{"a": "{secret}"}}', f"(pid=1) said '{secret}'"):
        assert mask(text, ()) == text.replace(secret, MASK)
        assert [found.line for found in masking.find(f"one\n{text}")] == [2]


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_is_left_alone(text):
    assert mask(text, ()) == text
    assert list(masking.find(text)) == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("HF_TOKEN=0123456789abcdef", "HF_TOKEN=***"),
        ("environ({'WANDB_API_KEY': '0123456789abcdef', 'X': '1'})", "environ({'WANDB_API_KEY': '***', 'X': '1'})"),
        (r"{\"api_key\": \"0123456789abcdef\"}", r"{\"api_key\": \"***\"}"),
        ("db.password: hunter2 two", "db.password: *** two"),
        ("MYSQL_PWD=hunter2", "MYSQL_PWD=***"),
        ("curl --token hunter2 --verbose", "curl --token *** --verbose"),
        ("Authorization: Bearer 0123456789abcdef", "Authorization: Bearer ***"),
        ("http://me:hunter2@proxy:3128/ and https://tok@host/x", "http://***@proxy:3128/ and https://***@host/x"),
        ("https://hooks.slack.com/services/T0/B0/hunter2", "https://hooks.slack.com/services/***"),
    ],
)
def test_the_value_after_a_secrets_name_is_masked_and_nothing_else(text, shown):
    assert mask(text, ()) == shown


def test_a_private_key_is_masked_line_by_line():
    assert mask(f"before\n{KEY}\nafter", ()) == "before\n***\n***\n***\n***\nafter"


def test_a_secret_of_the_environment_is_masked_though_it_looks_like_nothing(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "plain-words-7")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/tmp/agent.7")
    monkeypatch.setenv("MODE_AUTH", "required")
    assert mask("it said plain-words-7 at /tmp/agent.7, as required") == "it said *** at /tmp/agent.7, as required"


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "DB_PWD", "token", "trainer.hub_token", "openaiApiKey"])
def test_names_of_secrets(name):
    assert masking.looks_secret(name)
    assert masking.looks_secret("AWS_SECRET_ACCESS_KEY")


@pytest.mark.parametrize(
    "name", ["PWD", "OLDPWD", "max_tokens", "tokenizer", "token_level_scores", "HF_TOKEN_PATH", "bypass_mode", "monkey"]
)
def test_names_of_other_things(name):
    assert not masking.looks_secret(name)


def test_no_key_of_verl_and_none_of_a_recipe_has_a_secrets_name():
    root = verl_schema.find("0.9.1").directory.parent.parent
    read = {path: yaml.load(path.read_text(), yaml.CSafeLoader) for path in root.rglob("config/**/*.yaml")}
    keys = {f"{path.stem}.{key}" for path, tree in read.items() if tree for key, _ in params.flatten(tree)}
    keys |= {".".join(key.split(".")[:depth]) for key in keys for depth in range(1, 9)} | set(params.declared_keys())
    assert len(keys) > 1000
    assert {"data.prompt_key", "actor.ppo_max_token_len_per_gpu", "actor.loss_agg_mode"} <= {
        ".".join(key.split(".")[-2:]) for key in keys
    }
    assert [key for key in sorted(keys) if masking.looks_secret(key)] == []


_WORDS = [
    "token",
    "password",
    "=",
    ": ",
    "'",
    '"',
    "\\",
    "\n",
    "://",
    "@",
    "-",
    "_",
    "a1b2c3d4",
    "Bearer ",
    "--",
    "***",
    "ß",
]
_PIECES = st.sampled_from([*SHAPES, KEY, *_WORDS, "\u0130", "\udcff"])


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(max_size=80), st.lists(_PIECES, max_size=12).map("".join)))
@example("password=" + TOKEN + "=x")
@example("\u0130 password=hunter2")
def test_masking_twice_is_masking_once_and_keeps_every_line(text):
    shown = mask(text, ())
    assert mask(shown, ()) == shown
    assert shown.count("\n") == text.count("\n")
    assert list(masking.find(shown)) == []


@settings(max_examples=100, deadline=None)
@given(st.lists(_PIECES, max_size=12))
def test_no_token_among_words_is_left(pieces):
    shown = mask(" ".join(pieces), ())
    assert [secret for secret in (*SHAPES, KEY) if secret in shown] == []


HOSTILE = ["-----BEGIN ", KEY[:31] + "a", "eyJ-", "eyJaaaaaaaa.", "://a", "token", "key= ", "--api-", "sk-", "A", "_"]


@pytest.mark.parametrize("piece", HOSTILE)
def test_time_is_linear_in_a_hostile_text(piece):
    began = time.process_time()
    mask(piece * (400_000 // len(piece)), ())
    assert time.process_time() - began < 5  # a quadratic pattern takes hours


def test_a_log_is_scanned_and_scrubbed_in_place(tmp_path, monkeypatch):
    monkeypatch.setattr(masking, "CHUNK", 64)  # many chunks, cut anywhere
    log = tmp_path / "train.log"
    lines = ["plain \udcff bytes\r"] * 20 + [f"loading with {TOKEN}", *KEY.split("\n"), "x" * 500 + " no line end"]
    log.write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
    log.chmod(0o640)
    found = masking.scan_file(log)
    assert [(one.line, one.kind) for one in found] == [(21, "a Hugging Face token"), (22, "a private key")]
    assert masking.scrub_file(log) == 2
    shown = log.read_bytes().split(b"\n")
    assert shown[:20] == [b"plain \xff bytes\r"] * 20
    assert shown[20:25] == [b"loading with ***", b"***", b"***", b"***", b"***"]
    assert shown[25] == b"x" * 500 + b" no line end"
    assert log.stat().st_mode & 0o777 == 0o640
    before = log.stat().st_ino
    assert (masking.scrub_file(log), masking.scan_file(log)) == (0, [])
    assert log.stat().st_ino == before  # clean: not written again
    assert list(tmp_path.iterdir()) == [log]


def test_a_log_that_cannot_be_replaced_stays_whole(tmp_path, monkeypatch):
    log = tmp_path / "train.log"
    log.write_text(f"x {TOKEN}\n")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        masking.scrub_file(log)
    assert log.read_text() == f"x {TOKEN}\n"
    assert list(tmp_path.iterdir()) == [log]


def test_an_executed_notebook_is_scrubbed(tmp_path):
    import nbformat

    cells = [nbformat.v4.new_code_cell(f"hf = '{TOKEN}'"), nbformat.v4.new_code_cell("1")]
    cells[1].outputs = [
        nbformat.v4.new_output("stream", text=f"key\n{KEY}\nend"),
        nbformat.v4.new_output("display_data", data={"image/png": "iVBORw0KGgo=", "text/html": f"<b>{TOKEN}</b>"}),
    ]
    path = tmp_path / "n.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    assert masking.scrub_notebook(path) == 1
    shown = nbformat.read(path, as_version=4)
    nbformat.validate(shown)
    assert shown.cells[0].source == "hf = '***'"
    assert shown.cells[1].outputs[0].text == "key\n***\n***\n***\n***\nend"
    assert shown.cells[1].outputs[1].data == {"image/png": "iVBORw0KGgo=", "text/html": "<b>***</b>"}
    assert masking.scrub_notebook(path) == 0


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("env.HF_TOKEN=abc", "env.HF_TOKEN is the name of a secret"),
        (f"trainer.experiment={TOKEN}", "trainer.experiment holds what looks like a Hugging Face token"),
        ("reward.kwargs={judge: {api_key: abc}}", "reward.kwargs.judge.api_key is the name"),
        ("verl.trainer.hub_token=abc", "verl.trainer.hub_token is the name"),
        ("extra_args=[+trainer.hub_token=abc]", "trainer.hub_token is the name"),
        ("model.path=https://me:hunter2@host/model", "model.path holds what looks like a URL with a password"),
        ("trainer.experiment=${oc.env:MY_SECRET}", "trainer.experiment holds the value of a secret"),
    ],
)
def test_a_recipe_is_given_no_secret(override, named, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "opaque-value-1")
    with pytest.raises(RecipeError) as refused:
        params.compose("quickstart/grpo", [override])
    assert named in str(refused.value)
    assert "Export" in str(refused.value)
    for secret in ("abc)", TOKEN, "hunter2", "opaque-value-1"):
        assert secret not in str(refused.value)


def test_harmless_keys_of_like_names_are_taken():
    recipe = params.compose(
        "quickstart/grpo",
        ["env.TOKENIZERS_PARALLELISM='false'", "verl.data.prompt_key=p", "reward.kwargs={api_key_variable: JUDGE_KEY}",
         "transformer.moe_token_dispatcher_type=alltoall", "reward.kwargs={stop_token: 5, token: null}"],
    ).recipe  # fmt: skip
    assert recipe.reward.kwargs["stop_token"] == 5


def test_a_sentence_for_people_quotes_no_secret():
    with pytest.raises(RecipeError) as refused:
        params.compose("quickstart/grpo", [TOKEN])
    assert TOKEN not in str(refused.value)
    assert "no override" in str(refused.value)


@pytest.mark.parametrize("parameters", [{"hf_token": "x"}, {"waive": TOKEN}, {"model_path": TOKEN}])
def test_a_notebook_is_given_no_secret(parameters, tmp_path):
    with pytest.raises(RecipeError):
        headless.execute(HOME / "notebooks" / "00_quickstart.ipynb", parameters, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_papermill_has_written_already_is_said():
    injected = {"In": ["", f"# Parameters\nhf_token = '{TOKEN}'\n"], "hf_token": TOKEN, "recipe": "quickstart/grpo"}
    with pytest.raises(RecipeError, match="delete that") as refused:
        notebook.resolve(injected)
    assert TOKEN not in str(refused.value)


def test_the_tail_of_a_log_is_shown_masked(tmp_path):
    (tmp_path / "log").write_text(f"\x1b[31mtoken is {TOKEN}\x1b[0m\n")
    assert live.tail(tmp_path / "log") == ("token is ***",)


# ------------------------------------------------------------------------------------------------------ quality gate

# How a made-up secret is written in this repository, where one has to be found: a line that holds one holds no other.
MADE_UP = ("hunter2", "0123456789abcdef")


def test_no_file_of_this_repository_holds_what_looks_like_a_secret():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=HOME, capture_output=True, check=True).stdout.decode()
    names = [name for name in listed.split("\0") if name and (HOME / name).is_file()]
    assert len(names) > 100
    found = []
    for name in names:
        lines = (HOME / name).read_bytes().split(b"\n")
        for one in masking.scan_file(HOME / name):
            if not any(word.encode() in lines[one.line - 1] for word in MADE_UP):
                found.append(f"{name}:{one.line}: {one.kind}")
    assert found == []


def test_masking_is_light():
    heavy = "{'omegaconf', 'yaml', 'pandas', 'torch'}"
    code = f"import sys, recipes.masking; print(sorted({{m.split('.')[0] for m in sys.modules}} & {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout == "[]\n"
