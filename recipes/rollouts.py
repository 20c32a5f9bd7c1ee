"""What a training wrote: verl's rollout dumps, read by step, with flags on responses that went wrong.

    folders(path)             the dumps of a run, of a folder or of one file, by step
    responses(file)           its responses, one after the other: any size, bounded memory
    summary(file)             how many, reward, length, and how many of each flag
    ranked(file, worst=3)     the responses to look at

verl writes STEP.jsonl under `trainer.rollout_data_dir`, an object a response: `input` and `output` (decoded without
special tokens), `gts`, `score` (the sum of its token rewards), `step`, `uid`, and whatever else the reward function
returned (`_write_generations` in verl 0.9's trainers). There is no count of tokens in it, so a length is one of
characters, unless the model's tokenizer is at hand to count again.

All of it is untrusted text: escape it to show it, and mask it.
"""

from __future__ import annotations

import functools
import heapq
import json
import math
import unicodedata
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import Any

from recipes.errors import RecipeError
from recipes.run.directory import Run

WINDOW = 2000
"""Characters judged at a time. A ratio of a whole text would rise with its length and no threshold would hold."""
REPETITION = 8.0
"""Bytes of a window over its bytes packed by zlib, our choice. Measured: prose 2.1, source code 2.6 to 2.9, logs
3.1, worked sums in one template 3.9; a loop of a sentence 16 (a long one) to 41 (a short one)."""
SHORTEST = 120  # characters below which zlib's own overhead decides the ratio
GARBLE = 0.01
"""Share of a window's characters that are no text: replacement and control characters, unassigned and private ones."""
SCRIPTS = 5
"""Writing systems in one window that no answer mixes. Broken weights show as tokens from everywhere."""

FLAGS = {
    "repetition": f"a stretch of {WINDOW} characters packs to less than 1/{REPETITION:g} of its size",
    "garble": f"more than {GARBLE:.0%} of a stretch are no characters, or it mixes {SCRIPTS} or more writing systems",
    "empty": "nothing but white space",
    "cut": "as many tokens as the limit allows: it was cut, and has no end",
}
"""What a response is flagged for, and why."""

_NO_TEXT = ("Cc", "Co", "Cn", "Cs")
_ONE_SCRIPT = {"HIRAGANA": "CJK", "KATAKANA": "CJK", "FULLWIDTH": "", "HALFWIDTH": "CJK", "IDEOGRAPHIC": "CJK"}


@dataclass(frozen=True)
class Response:
    """One line of a dump. `tokens` is None where no tokenizer counted; `others` is what else the line holds."""

    step: int
    line: int
    prompt: str
    text: str
    reward: float | None
    truth: str
    flags: tuple[str, ...]
    tokens: int | None
    others: dict[str, Any]

    @property
    def size(self) -> str:
        """Its length in words."""
        characters = f"{len(self.text)} characters"
        return characters if self.tokens is None else f"about {self.tokens} tokens, {characters}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, secrets masked."""
        from recipes.masking import mask_tree

        shown = mask_tree({"prompt": self.prompt, "text": self.text, "truth": self.truth, "others": self.others})
        about = {"step": self.step, "line": self.line, "reward": self.reward, "flags": list(self.flags)}
        return about | {"characters": len(self.text), "tokens": self.tokens} | shown


@dataclass(frozen=True)
class Summary:
    """A dump in numbers. Rewards are None where no line held a finite one; lengths are characters, or tokens if told.

    `unreadable` counts lines that are no object of a dump, such as the last one of a file that is being written,
    `unrewarded` the responses without a finite reward, of which the three rewards know nothing.
    """

    step: int
    count: int
    reward: tuple[float, float, float] | None
    """lowest, mean, highest"""
    length: tuple[int, float, int] | None
    """shortest, mean, longest"""
    unit: str
    flagged: dict[str, int]
    unreadable: int
    unrewarded: int = 0

    def to_dict(self) -> dict[str, Any]:
        named = {"min": 0, "mean": 1, "max": 2}
        return {
            "step": self.step,
            "count": self.count,
            "reward": self.reward and {name: self.reward[i] for name, i in named.items()},
            "length": self.length and {name: self.length[i] for name, i in named.items()},
            "unit": self.unit,
            "flagged": self.flagged,
            "unreadable": self.unreadable,
            "unrewarded": self.unrewarded,
        }


class Counter:
    """Counts tokens again, and says which responses were cut. Without a tokenizer it does neither, and says why."""

    def __init__(self, tokenizer: Path | None = None, limit: int | None = None, why: str = "") -> None:
        self.limit, self.why, self._encode = limit, why, None
        if tokenizer is None:
            return
        try:
            from tokenizers import Tokenizer

            self._encode = Tokenizer.from_file(str(tokenizer)).encode_batch
        except ImportError:
            self.why = "the package tokenizers is not installed"
        except Exception as fault:  # noqa: BLE001  the library raises a bare Exception for a file it cannot read
            self.why = f"{tokenizer} cannot be read ({fault})"

    @classmethod
    def of_run(cls, path: Path) -> Counter:
        """With the tokenizer of a run's model and the run's limit, as its recipe.yaml names them."""
        import yaml

        try:
            recipe = yaml.safe_load((path / "recipe.yaml").read_text(encoding="utf-8"))
            limit = int(recipe["data"]["max_response_length"])
            file = Path(str(recipe["model"]["path"])) / "tokenizer.json"
        except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
            return cls(why="no recipe.yaml says which tokenizer and limit")
        if not file.is_file():
            return cls(limit=limit, why=f"the tokenizer of the run's model is not here: {file}")
        return cls(file, limit)

    @property
    def counts(self) -> bool:
        return self._encode is not None

    def count(self, texts: list[str]) -> list[int | None]:
        if self._encode is None:
            return [None] * len(texts)
        return [len(found.ids) for found in self._encode(texts, add_special_tokens=False)]


def folders(path: str | Path) -> dict[int, Path]:
    """Return the dumps at `path` by step: of a run (the latest attempt wins), of a folder of STEP.jsonl, of a file.

    Raises RecipeError when there is none, with the setting that makes a run keep them.
    """
    path = Path(path)
    if path.is_file():
        if not path.stem.isdecimal():
            raise RecipeError(f"{path} is no dump of verl: these are called STEP.jsonl, such as 12.jsonl.")
        return {int(path.stem): path}
    if not path.is_dir():
        raise RecipeError(f"{path} does not exist: give a run directory, a folder of STEP.jsonl, or one of them.")
    places = [Run(path).attempt(n) / "rollouts" for n in Run(path).attempts] or [path]
    found = {int(file.stem): file for place in places for file in place.glob("*.jsonl") if file.stem.isdecimal()}
    if not found:
        raise RecipeError(
            f"{path} holds no rollouts. A run keeps them with trainer.rollout_dump=true (verl's own setting is "
            "trainer.rollout_data_dir)."
        )
    return dict(sorted(found.items()))


def responses(file: Path, counter: Counter | None = None, *, unreadable: list[int] | None = None) -> Iterator[Response]:
    """Yield the responses of a dump in the order of its lines. Numbers of lines that are none go to `unreadable`.

    Raises RecipeError when the file cannot be read.
    """
    counter = counter or Counter()
    try:
        with file.open("rb") as lines:
            # Tokenizers count faster in batches; a batch of the longest responses is a few megabytes.
            for part in batched(enumerate(lines, 1), 64):
                records = [(number, _record(line)) for number, line in part]
                if unreadable is not None:
                    unreadable += [number for number, record in records if record is None]
                kept = [(number, record) for number, record in records if record is not None]
                counts = counter.count([str(record["output"]) for _, record in kept])
                for (number, record), tokens in zip(kept, counts, strict=True):
                    yield _response(file, number, record, tokens, counter.limit)
    except OSError as fault:
        raise RecipeError(f"{file} cannot be read: {fault.strerror or fault}.") from fault


def summary(file: Path, counter: Counter | None = None) -> Summary:
    """Sum a dump up, streaming."""
    unreadable: list[int] = []
    count, unrewarded, rewards, lengths = 0, 0, _Range(), _Range()
    flagged = dict.fromkeys(FLAGS, 0)
    for one in responses(file, counter, unreadable=unreadable):
        count += 1
        if one.reward is not None:
            rewards.add(one.reward)
        else:
            unrewarded += 1
        lengths.add(len(one.text) if one.tokens is None else one.tokens)
        for flag in one.flags:
            flagged[flag] += 1
    length = lengths.told()
    return Summary(
        step=int(file.stem) if file.stem.isdecimal() else 0,
        count=count,
        reward=rewards.told(),
        length=length and (int(length[0]), length[1], int(length[2])),
        unit="tokens" if counter and counter.counts else "characters",
        flagged={flag: number for flag, number in flagged.items() if number},
        unreadable=len(unreadable),
        unrewarded=unrewarded,
    )


def ranked(
    file: Path, *, worst: int = 0, best: int = 0, flagged: int = 0, counter: Counter | None = None
) -> list[Response]:
    """The `worst` and `best` responses by reward and the first `flagged` ones, each once, in that order.

    A response without a finite reward is the worst. Only those returned are held in memory.
    """
    low, high, marked = _Best(worst), _Best(best), []
    for one in responses(file, counter):
        reward = -math.inf if one.reward is None else one.reward
        low.add(-reward, one)
        if one.reward is not None:
            high.add(reward, one)
        if one.flags and len(marked) < flagged:
            marked.append(one)
    chosen = {one.line: one for one in (*low.told(), *high.told(), *marked)}
    return list(chosen.values())


def flags(text: str, tokens: int | None = None, limit: int | None = None) -> tuple[str, ...]:
    """What is wrong with a response, of FLAGS. `cut` needs its number of tokens and their limit.

    Tokens are counted again from the text, so a response that just fitted may look cut; it is a flag, not a verdict.
    """
    if not text.strip():
        return ("empty",)
    found = []
    windows = [text[i : i + WINDOW] for i in range(0, len(text), WINDOW)]
    if len(windows) > 1:  # a loop at the end must not hide in a short last piece
        windows[-1] = text[-WINDOW:]
    if any(map(_repeats, windows)):
        found.append("repetition")
    # Characters of which the limit cut off a byte are replaced at the very end: no garble.
    windows[-1] = windows[-1].rstrip("\ufffd")
    if any(map(_garbled, windows)):
        found.append("garble")
    if tokens is not None and limit is not None and tokens >= limit:
        found.append("cut")
    return tuple(found)


def _repeats(window: str) -> bool:
    raw = window.encode("utf-8", "replace")
    return len(window) >= SHORTEST and len(raw) > REPETITION * len(zlib.compress(raw, 6))


def _garbled(window: str) -> bool:
    letters = set(window)
    strange = sum(window.count(c) for c in letters if _is_no_text(c))
    return strange > max(1, GARBLE * len(window)) or len({_script(c) for c in letters} - {""}) >= SCRIPTS


@functools.lru_cache(maxsize=8192)
def _is_no_text(c: str) -> bool:
    return c == "\ufffd" or (c not in "\t\n\r" and unicodedata.category(c) in _NO_TEXT)


@functools.lru_cache(maxsize=8192)
def _script(c: str) -> str:
    """The writing system of a letter, by the first word of its name in Unicode; empty for anything else."""
    if not c.isalpha():
        return ""
    first = unicodedata.name(c, "").split(" ", 1)[0].split("-", 1)[0]
    return "" if first in ("MATHEMATICAL", "MODIFIER", "FEMININE", "MASCULINE") else _ONE_SCRIPT.get(first, first)


def _record(line: bytes) -> dict[str, Any] | None:
    import orjson

    try:
        record = orjson.loads(line)
    except ValueError:
        try:  # verl writes NaN as NaN, which JSON has not
            record = json.loads(line)
        except (ValueError, RecursionError):
            return None
    return record if isinstance(record, dict) and "output" in record else None


_KNOWN = ("input", "output", "gts", "score", "step")


def _response(file: Path, number: int, record: dict[str, Any], tokens: int | None, limit: int | None) -> Response:
    reward, step, text = record.get("score"), record.get("step"), str(record["output"])
    finite = isinstance(reward, int | float) and math.isfinite(reward)
    return Response(
        step=step if isinstance(step, int) else int(file.stem),
        line=number,
        prompt=str(record.get("input", "")),
        text=text,
        reward=float(reward) if finite else None,
        truth="" if record.get("gts") is None else str(record["gts"]),
        flags=flags(text, tokens, limit),
        tokens=tokens,
        others={key: value for key, value in record.items() if key not in _KNOWN},
    )


class _Range:
    """Lowest, mean and highest of numbers that pass by."""

    def __init__(self) -> None:
        self.low, self.high, self.total, self.count = math.inf, -math.inf, 0.0, 0

    def add(self, value: float) -> None:
        self.low, self.high = min(self.low, value), max(self.high, value)
        self.total, self.count = self.total + value, self.count + 1

    def told(self) -> tuple[float, float, float] | None:
        return (self.low, self.total / self.count, self.high) if self.count else None


class _Best:
    """The `size` highest of what passes by, the first of equals; best first."""

    def __init__(self, size: int) -> None:
        self.size, self.heap = size, []  # type: ignore[var-annotated]

    def add(self, value: float, one: Response) -> None:
        entry = (value, -one.line, one)
        if len(self.heap) < self.size:
            heapq.heappush(self.heap, entry)
        elif self.size and entry[:2] > self.heap[0][:2]:
            heapq.heapreplace(self.heap, entry)

    def told(self) -> Iterable[Response]:
        return [one for *_, one in sorted(self.heap, key=lambda entry: entry[:2], reverse=True)]


# -------------------------------------------------------------------------------------------------------- to look at

READ_AT_ONCE = 64 << 20
"""Bytes of dumps that are summed up without being asked for; of more, some steps over the whole run are."""


def some(found: dict[int, Path], limit: int = READ_AT_ONCE) -> dict[int, Path]:
    """All dumps, or as many, spread over the run and with its last one, as `limit` bytes allow."""
    sizes = [file.stat().st_size for file in found.values()]
    keep = max(2, int(len(found) * limit / max(1, sum(sizes))))
    if sum(sizes) <= limit or keep >= len(found):
        return found
    steps = list(found)
    chosen = {steps[round(i * (len(steps) - 1) / (keep - 1))] for i in range(keep)}
    return {step: file for step, file in found.items() if step in chosen}


@dataclass(frozen=True)
class Shown:
    """Dumps summed up by step, and responses of one step to look at."""

    summaries: tuple[Summary, ...]
    steps: int
    """how many steps have a dump"""
    responses: tuple[Response, ...]
    counter: Counter

    def notes(self) -> list[str]:
        """What the numbers do not say themselves."""
        notes = []
        if len(self.summaries) < self.steps:
            notes.append(f"{len(self.summaries)} of {self.steps} steps were read; name one to read another.")
        if self.counter.counts:
            notes.append(f"Tokens were counted again from the text; the limit is {self.counter.limit}.")
        else:
            why = f": {self.counter.why}" if self.counter.why else ""
            notes.append(f"A dump holds no count of tokens: which responses were cut is not known{why}.")
        seen = {flag for one in self.summaries for flag in one.flagged} | {
            f for one in self.responses for f in one.flags
        }
        return notes + [f"{flag}: {FLAGS[flag]}." for flag in FLAGS if flag in seen]

    def rows(self) -> list[tuple[str, ...]]:
        """A row a step: step, responses, reward, length, flags."""
        return [
            (
                str(one.step),
                str(one.count) + (f" ({_count(one.unreadable, 'line')} unreadable)" if one.unreadable else ""),
                _rewards(one),
                "–" if one.length is None else f"{one.length[1]:.0f} ({one.length[0]} to {one.length[2]}) {one.unit}",
                ", ".join(f"{number} {flag}" for flag, number in one.flagged.items()) or "–",
            )
            for one in self.summaries
        ]

    def text(self) -> str:
        """As people read it in a terminal: no control characters, secrets masked, long texts cut in the middle."""
        rows = [HEADER, *self.rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        for one in self.responses:
            lines += ["", heading(one), "prompt:", _indented(one.prompt, 400), "response:", _indented(one.text, 1200)]
            if one.truth:
                lines += [f"truth: {_fit(one.truth, 200)}"]
        return "\n".join([*lines, "", *self.notes()])

    def html(self) -> str:
        """The same as pieces of HTML, escaped, long texts folded."""
        from recipes import page

        parts = [page.table(HEADER, self.rows())]
        for one in self.responses:
            parts += [page.paragraph(heading(one)), _folding("prompt", one.prompt), _folding("response", one.text)]
            parts += [_folding("truth", one.truth)] if one.truth else []
        return "".join([*parts, *map(page.paragraph, self.notes())])

    def to_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "summaries": [one.to_dict() for one in self.summaries],
            "responses": [one.to_dict() for one in self.responses],
            "notes": self.notes(),
        }

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        from recipes import page

        return {"text/html": page.block(self.html()), "text/plain": self.text()}


def _rewards(one: Summary) -> str:
    """Mean, lowest and highest reward, and of how many responses they know nothing."""
    without = f", {one.unrewarded} of {one.count} without" if one.unrewarded else ""
    if one.reward is None:
        return f"–{without}"
    return f"{one.reward[1]:.3f} ({one.reward[0]:g} to {one.reward[2]:g}){without}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


HEADER = ("step", "responses", "reward", "length", "flags")


def show(path: str | Path, *, step: int | None = None, worst: int = 0, best: int = 0, flagged: int = 0) -> Shown:
    """Sum up the dumps at `path` (only `step`'s, where given), and pick responses of `step`, or of the last one.

    Raises RecipeError when there are no dumps, or none of that step.
    """
    found = folders(path)
    if step is not None and step not in found:
        steps = list(found)
        raise RecipeError(f"--step {step}: there is no dump of it; there are {len(steps)}, {steps[0]} to {steps[-1]}.")
    counter = Counter.of_run(Path(path)) if Path(path).is_dir() else Counter(why="a file alone names no tokenizer")
    read = {step: found[step]} if step is not None else some(found)
    picked = []
    if worst or best or flagged:
        file = found[step if step is not None else max(found)]
        picked = ranked(file, worst=worst, best=best, flagged=flagged, counter=counter)
    return Shown(tuple(summary(file, counter) for file in read.values()), len(found), tuple(picked), counter)


def heading(one: Response) -> str:
    """A response in one line: where it is, reward, length, flags."""
    reward = "no finite reward" if one.reward is None else f"reward {one.reward:g}"
    marks = f", {', '.join(one.flags)}" if one.flags else ""
    return f"step {one.step}, line {one.line}: {reward}, {one.size}{marks}"


def _fit(text: str, limit: int) -> str:
    """Masked, without control characters, its middle cut out where it is longer than `limit`."""
    from recipes.logtext import clean
    from recipes.masking import mask

    # Masked before it is cut: half a secret would not look like one.
    text = mask(clean(text))
    left = limit - limit // 3
    if len(text) <= limit:
        return text
    return f"{text[:left]} … {len(text) - limit} characters left out … {text[-(limit // 3) :]}"


def _indented(text: str, limit: int) -> str:
    return "\n".join(f"  | {line}" for line in _fit(text, limit).splitlines() or [""])


def _folding(name: str, text: str, limit: int = 20_000) -> str:
    from recipes import page

    shown = _fit(text, limit)
    return (
        page.verbatim(f"{name}: {shown}")
        if len(shown) <= 300
        else page.folded(f"{name}: {shown[:120]}…", page.verbatim(shown))
    )
