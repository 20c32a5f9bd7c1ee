"""Secrets: told by their name or their shape, refused where they would be kept, masked wherever text is shown.

A mask says that something was set and nothing else of it: no length, no hash. Imports nothing of ours, so that every
module may use it. All patterns take linear time: text from a log is anybody's.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MASK = "***"

# Bytes of a log read at once, and bytes a private key may go on beyond them.
CHUNK, BLOCK = 1 << 20, 1 << 16


@dataclass(frozen=True)
class Found:
    """A place that looks like a secret: its line, counted from 1, and what it looks like. Never the secret itself."""

    line: int
    kind: str


# ------------------------------------------------------------------------------------------------------------- names

# A name is a secret's by its last word: password_file and token_ids are none.
_ALWAYS = {"password", "passwd", "passphrase", "secret", "secrets", "credential", "credentials", "authorization"}
_ALWAYS |= {"cookie", "cookies", "auth", "apikey", "accesskey", "secretkey", "privatekey", "authtoken", "accesstoken"}
_KEYS = {"api", "access", "secret", "private", "ssh", "encryption", "signing", "account", "auth", "master", "session"}
_KEYS |= {"service", "license", "storage", "hmac", "aes", "rsa", "wandb", "hf", "openai", "anthropic", "aws", "azure"}
_KEYS |= {"swanlab", "mlflow", "modelscope", "dashscope", "deepseek", "gemini", "huggingface", "ark", "zhipu"}
_PLURALS = {"api", "access", "auth", "refresh", "bearer", "secret", "private"}
# The tokens of a language model, by the word before: pad_token is a piece of text and max_token a number.
_MODEL_TOKENS = {"pad", "eos", "bos", "unk", "mask", "sep", "cls", "image", "video", "audio", "special", "start", "end"}
_MODEL_TOKENS |= {"stop", "think", "begin", "next", "first", "last", "new", "prompt", "response", "input", "output"}
_MODEL_TOKENS |= {"per", "each", "max", "min", "num", "total", "by", "added", "decoder", "prefix", "suffix", "middle"}
_MODEL_TOKENS |= {
    "tool",
    "fim",
    "eot",
    "eod",
    "eom",
    "mean",
    "avg",
    "seq",
    "sub",
    "cross",
    "every",
    "single",
    "this",
    "dp",
}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


@functools.lru_cache(maxsize=4096)
def looks_secret(name: str) -> bool:
    """Say whether a key, parameter or variable of this name holds a secret: HF_TOKEN, api_key, db.password, X_PWD.

    Names of a language model's tokens, lengths in tokens, columns (prompt_key) and files that hold a secret are none.
    """
    words = [word.lower() for word in _WORD.findall(name)]
    while len(words) > 1 and words[-1] in ("value", "string"):
        words.pop()
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last in _ALWAYS or last.endswith(("password", "passwd", "apikey")):
        return True
    if last in ("pwd", "pw"):  # PWD and OLDPWD are working directories
        return before != "" and before != "old"
    if last.endswith("token"):
        return before not in _MODEL_TOKENS
    if last == "key":
        return before in _KEYS or (before != "" and name.isupper())
    if last in ("tokens", "keys"):
        return before in _PLURALS
    return words[-3:] == ["access", "key", "id"] or (before, last) == ("amz", "signature")


def harmless(value: Any) -> bool:
    """Say whether a value is no secret whatever its name: nothing, yes or no, a mask, or a reference to a variable."""
    if value is None or isinstance(value, bool):
        return True
    text = str(value).strip().strip("'\"")
    return text.lower() in _NOTHING or text[0] in "$<{[%" or set(text) <= {"*", "x", "X", ".", "-"}


_NUMBER = re.compile(r"[-+]?[\d.]+(?:[eE][-+]?\d+)?")
_NOTHING = ("", "null", "none", "~", "nil", "true", "false", "yes", "no", "on", "off", "unset", "set")


def reason(name: str, value: Any, secrets: Iterable[str] | None = None) -> str:
    """Say why `value` must not be kept under `name`, as the beginning of a sentence; empty when it may.

    Its name is that of a secret, or it looks like one, or it is the value of a secret of this process's environment
    (`secrets` instead, where given). Mappings, lists and `key=value` within lists are looked through. A number is
    refused under a password's name only.
    """
    secrets = known_secrets() if secrets is None else tuple(secrets)
    if isinstance(value, Mapping):
        inner = ((f"{name}.{key}", below) for key, below in value.items())
    elif isinstance(value, (list, tuple)):
        inner = (_pair(name, below) for below in value)
    else:
        text = str(value)
        if shape := next((found.kind for found in find(text)), ""):
            return f"{name} holds what looks like {shape}"
        if any(secret in text for secret in secrets):
            return f"{name} holds the value of a secret of this environment"
        number = _NUMBER.fullmatch(text.strip()) and not re.search(r"(?i)pass|pwd", name)
        return f"{name} is the name of a secret" if looks_secret(name) and not (number or harmless(value)) else ""
    return next((why for key, below in inner if (why := reason(key, below, secrets))), "")


def _pair(name: str, value: Any) -> tuple[str, Any]:
    key, equals, text = value.partition("=") if isinstance(value, str) else ("", "", "")
    return (key.lstrip("+~-"), text) if equals and re.fullmatch(r"[+~-]{0,2}[\w.@/-]+", key) else (name, value)


# ------------------------------------------------------------------------------------------------------------- shapes


@dataclass(frozen=True)
class _Shape:
    """A pattern, the literal texts without one of which it cannot match (looked for first: that is fast), and the mask.

    `replace` returns the text to put in place, or None where the match is no secret after all.
    """

    kind: str
    needles: tuple[str, ...]
    pattern: re.Pattern[str]
    replace: Callable[[re.Match[str]], str | None]


def _whole(match: re.Match[str]) -> str | None:
    """Mask it all, unless it is the rest of a longer word: disk-…, Ahf_…"""
    before = match.string[match.start() - 1] if match.start() else " "
    return None if before.isalnum() or before == "_" else MASK


def _lines(match: re.Match[str]) -> str:
    return _masked_lines(match[0])


def _masked_lines(block: str) -> str:
    """Mask a block line by line: the numbers of the lines after it stay right."""
    return re.sub(r"[^\n\r]+", MASK, block)


def _second(match: re.Match[str]) -> str | None:
    return None if harmless(match[2]) else match[1] + MASK


def _user(match: re.Match[str]) -> str | None:
    """The part of a URL before @. A user alone is a secret on the web only: ssh://git@host is none."""
    if harmless(match[1].partition(":")[2] or match[1]):
        return None
    web = match.string[max(0, match.start() - 4) : match.start()].lower() in ("http", "ttps")
    return f"://{MASK}@" if web or ":" in match[1] else None


def _named(match: re.Match[str]) -> str | None:
    """A value after a name that ends in a telling word: judged by the whole name, which is read backwards."""
    value = match[3]
    # Passwords may be anything. A token or a key that is no word of a sentence or of a program has a digit.
    stem, between = match[1].lower(), match[2]
    anything = stem.startswith(("pass", "pwd")) or (
        stem.startswith(("secret", "credential")) and (" " not in between or between.endswith(("'", '"')))
    )
    if harmless(value) or not (anything or (len(value) >= 8 and _DIGIT.search(value) and not _NUMBER.fullmatch(value))):
        return None
    start = match.start()
    limit = max(0, start - 100)
    while start > limit and (match.string[start - 1].isalnum() or match.string[start - 1] in "_.-"):
        start -= 1
    return match[1] + match[2] + MASK if looks_secret(match.string[start : match.end(1)]) else None


_DIGIT = re.compile(r"\d")
_VALUE = r"[^\s\"'`\\,;&|<>(){}\[\]]+"
_STEMS = ("token", "key", "secret", "password", "passwd", "passphrase", "credential", "cookie", "pwd", "auth")
_STEMS += ("authorization", "signature", "accesskeyid")
_SHAPES = (
    _Shape(
        "a private key",
        ("PRIVATE KEY-----",),
        re.compile(
            r"-----BEGIN (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY-----(?:[A-Za-z0-9+/=\s:,\\*]|-(?!----))*+"
            r"(?:-----END (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY-----)?"
        ),
        _lines,
    ),
    _Shape("a Hugging Face token", ("hf_",), re.compile(r"hf_[A-Za-z0-9]{30,}"), _whole),
    _Shape(
        "a GitHub token",
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
        re.compile(r"(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{22,})"),
        _whole,
    ),
    _Shape("a GitLab token", ("glpat-",), re.compile(r"glpat-[A-Za-z0-9_-]{20,}"), _whole),
    _Shape("an API key", ("sk-",), re.compile(r"sk-(?=[A-Za-z_-]{0,40}[0-9])[A-Za-z0-9_-]{20,}"), _whole),
    _Shape("an AWS access key", ("AKIA", "ASIA"), re.compile(r"A[KS]IA[A-Z0-9]{16}(?![A-Za-z0-9])"), _whole),
    _Shape("a Google API key", ("AIza",), re.compile(r"AIza[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])"), _whole),
    _Shape("a Slack token", ("xox",), re.compile(r"xox[abeoprs]-[A-Za-z0-9-]{10,}"), _whole),
    _Shape("a Slack webhook", ("hooks.slack",), re.compile(r"(hooks\.slack\.com/services/)([\w/]+)"), _second),
    _Shape(
        "a JSON web token",
        ("eyJ",),
        re.compile(r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}"),
        _whole,
    ),
    _Shape("a URL with a password", ("://",), re.compile(r"://([^\s/?#@\"'`<>\\]+)@"), _user),
    _Shape(
        "an authorization header",
        ("earer ", "asic ", "EARER ", "ASIC "),
        re.compile(r"(?i)(\b(?:bearer|basic)[ ]{1,3})((?=[a-z._~+/=-]{0,60}[0-9])[a-z0-9._~+/=-]{16,})"),
        _second,
    ),
    _Shape(
        "the value of a secret",
        _STEMS,
        re.compile(rf"(?i)((?:{'|'.join(_STEMS)})s?)(\\?[\"']?\]?[ ]{{0,2}}(?::=|[=:])[ ]{{0,2}}\\?[\"']?)({_VALUE})"),
        _named,
    ),
    _Shape(
        "the value of a secret",
        ("--",),
        re.compile(
            r"(?i)(--(?:[a-z]{1,20}[-_]){0,4}(?:token|password|passwd|passphrase|secret|(?:api|access|secret|private)"
            rf"[-_]key)[ \t]{{1,3}}[\"']?)({_VALUE})"
        ),
        lambda match: None if harmless(match[2]) or match[2].startswith("-") else match[1] + MASK,
    ),
)
_ASSIGNED = next(shape for shape in _SHAPES if shape.needles is _STEMS)


def _matches(text: str, shapes: Iterable[_Shape] = _SHAPES) -> Iterator[tuple[_Shape, re.Match[str], str]]:
    for shape in shapes:
        if shape is _ASSIGNED:
            matches = _assigned(text)
        elif any(needle in text for needle in shape.needles):
            matches = shape.pattern.finditer(text)
        else:
            continue
        for match in matches:
            if (shown := shape.replace(match)) is not None and shown != match[0]:
                yield shape, match, shown


def _assigned(text: str) -> Iterator[re.Match[str]]:
    """Yield the matches of _ASSIGNED from left to right. Texts are searched for its words twenty times faster so."""
    lower = text.lower()
    if len(lower) != len(text):  # a capital with a dot becomes two letters
        lower = text.translate({upper: upper + 32 for upper in range(ord("A"), ord("Z") + 1)})
    matches = []
    for stem in _ASSIGNED.needles:
        place = lower.find(stem)
        while place >= 0:
            if match := _ASSIGNED.pattern.match(text, place):
                matches.append(match)
            place = lower.find(stem, place + len(stem))
    end = 0
    for match in sorted(matches, key=lambda m: m.start()):
        if match.start() >= end and _named(match) is not None:
            end = match.end()
            yield match


def known_secrets(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the values of the environment's secrets (default: this process's), longest first.

    Short or simple ones are left out: a word that may stand in any text for something else would mask half of it.
    """
    given = os.environ if environment is None else environment
    found = {
        text
        for text in (given[name] for name in given if looks_secret(name))
        if len(text) >= 8
        and not text.startswith(("/", "."))
        and re.search(r"[^A-Za-z_-]", text)
        and not _NUMBER.fullmatch(text)
        and not harmless(text)
    }
    return tuple(sorted(found, key=len, reverse=True))


def mask(text: str, secrets: Iterable[str] | None = None) -> str:
    """Return `text` with whatever looks like a secret replaced by MASK; its lines stay the same lines.

    Masked are tokens of known shapes, private keys, credentials in URLs and headers, values after a secret's name, and
    the values of this process's own secrets (`secrets` instead, where given). Commit ids, hashes and paths are not.
    Masking twice is masking once.
    """
    return _count(text, known_secrets() if secrets is None else tuple(secrets))[0]


def _count(text: str, secrets: tuple[str, ...]) -> tuple[str, int]:
    """Return the masked text and how many places were masked."""
    places, before = 0, -1
    while before < places:  # what a mask has cut in two may look like something else
        before = places
        for secret in secrets:
            if secret in text:
                places += text.count(secret)
                text = text.replace(secret, _masked_lines(secret))
        for shape in _SHAPES:
            parts, end = [], 0
            for _, match, shown in _matches(text, (shape,)):
                parts += [text[end : match.start()], shown]
                end, places = match.end(), places + 1
            if parts:
                text = "".join([*parts, text[end:]])
    return text, places


def find(text: str) -> Iterator[Found]:
    """Yield each place of a text that `mask` would mask by its shape or its name, kind by kind."""
    for shape, match, _ in _matches(text):
        yield Found(text.count("\n", 0, match.start()) + 1, shape.kind)


def mask_tree(data: Any, secrets: Iterable[str] | None = None) -> Any:
    """Return plain data (dicts, lists, scalars) with every text masked, and every value under a secret's name."""
    secrets = known_secrets() if secrets is None else tuple(secrets)
    if isinstance(data, Mapping):
        return {
            key: MASK
            if isinstance(inner, str) and looks_secret(str(key)) and not harmless(inner)
            else mask_tree(inner, secrets)
            for key, inner in data.items()
        }
    if isinstance(data, (list, tuple)):
        return [mask_tree(inner, secrets) for inner in data]
    return mask(data, secrets) if isinstance(data, str) else data


# -------------------------------------------------------------------------------------------------------------- files


def scan_file(path: str | Path, limit: int = 100) -> list[Found]:
    """Return where a file looks like it holds secrets, by line, at most `limit` places. Any size, bounded memory."""
    found: list[Found] = []
    with Path(path).open("rb") as file:
        line = 0
        for chunk in _chunks(file):
            text = chunk.decode("utf-8", "surrogateescape")
            found += sorted((Found(line + one.line, one.kind) for one in find(text)), key=lambda one: one.line)
            if len(found) >= limit:
                break
            line += text.count("\n")
    return found[:limit]


def scrub_file(path: str | Path, secrets: Iterable[str] | None = None) -> int:
    """Mask a text file in place and return how many places were masked. For a file nobody writes to any more.

    The file is replaced in one move and only when something was found; lines, their numbers and other bytes stay.
    Takes any size in bounded memory. Raises OSError when it cannot be read or replaced; the old file then stays.
    """
    path = Path(path)
    secrets = known_secrets() if secrets is None else tuple(secrets)
    with path.open("rb") as file:
        start = 0  # up to here nothing was found, so nothing is written twice
        for chunk in _chunks(file):
            if _count(chunk.decode("utf-8", "surrogateescape"), secrets)[1]:
                break
            start += len(chunk)
        else:
            return 0
        file.seek(0)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        places = 0
        try:
            with os.fdopen(handle, "wb") as masked:
                left = start
                while left and (chunk := file.read(min(CHUNK, left))):
                    masked.write(chunk)
                    left -= len(chunk)
                for chunk in _chunks(file):
                    text, here = _count(chunk.decode("utf-8", "surrogateescape"), secrets)
                    masked.write(text.encode("utf-8", "surrogateescape"))
                    places += here
            shutil.copymode(path, temporary)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    return places


def _chunks(file: Any) -> Iterator[bytes]:
    """Yield a file in parts of whole lines of about CHUNK bytes; no private key is cut, no word of a long line."""
    rest = b""
    while part := file.read(CHUNK):
        part = rest + part
        begin = part.rfind(b"-----BEGIN ")
        if 0 <= begin > len(part) - BLOCK and b"\n" not in part[begin:].partition(b"-----END ")[2]:
            rest = part
            continue
        cut = part.rfind(b"\n") + 1
        if not cut and len(part) < 4 * CHUNK:
            rest = part
            continue
        cut = cut or part.rfind(b" ") + 1 or len(part)
        rest = part[cut:]
        yield part[:cut]
    if rest:
        yield rest


def scrub_notebook(path: str | Path, secrets: Iterable[str] | None = None) -> int:
    """Mask the sources, outputs and metadata of a notebook file in place; returns 1 when something was, else 0.

    Pictures stay as they are. Raises OSError or ValueError when it cannot be read or replaced.
    """
    import json

    from recipes.atomic import replace_file

    path = Path(path)
    before = json.loads(path.read_text(encoding="utf-8"))
    after = _notebook(before, known_secrets() if secrets is None else tuple(secrets))
    if after == before:
        return 0
    replace_file(path, (json.dumps(after, indent=1, ensure_ascii=False) + "\n").encode("utf-8"))
    return 1


def _notebook(node: Any, secrets: tuple[str, ...]) -> Any:
    """A text may be given as a list of its lines: a key that spans them is seen only in the whole."""
    if isinstance(node, dict):
        return {
            key: inner if key.startswith("image/") and isinstance(inner, str) else _notebook(inner, secrets)
            for key, inner in node.items()
        }
    if isinstance(node, list):
        if node and all(isinstance(line, str) for line in node):
            whole = "".join(node)
            shown = mask(whole, secrets)
            return node if shown == whole else shown.splitlines(keepends=True)
        return [_notebook(inner, secrets) for inner in node]
    return mask(node, secrets) if isinstance(node, str) else node
