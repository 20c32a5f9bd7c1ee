"""Why did a run fail? The first cause its log shows, in the log's own words, with remedy and keys of the recipe."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from recipes.diagnosis.causes import CAUSES, Cause
from recipes.diagnosis.reader import EXPLAINED_WITHIN, FAILING, FATAL, Hit, Raised, Ranked, Scan, cut, scan
from recipes.errors import RecipeError
from recipes.run.directory import Run, open_run, read_state

# Lines shown of an unknown failure.
SHOWN = 8

# Exceptions that only pass on that something else ended.
_PASSED_ON = (
    *("RayTaskError", "RayActorError", "ActorDiedError", "ActorUnavailableError", "EngineDeadError", "SystemExit"),
    *("KeyboardInterrupt", "CancelledError", "BrokenPipeError", "ConnectionResetError", "ConnectionRefusedError"),
    *("WorkerCrashedError", "OwnerDiedError", "ObjectLostError", "EOFError", "ExceptionGroup", "BaseExceptionGroup"),
)
# Metrics of which a value that is not finite says that the training is broken.
_WATCHED = ("actor/", "critic/", "training/rollout_", "rollout_corr/")

_BY_ID = {cause.id: cause for cause in CAUSES}
_SIGNALS = {
    signal.SIGKILL: _BY_ID["killed"],
    signal.SIGBUS: _BY_ID["shm-full"],
    signal.SIGSEGV: _BY_ID["crashed"],
    signal.SIGABRT: _BY_ID["aborted"],
}

# What the supervisor of a run saw and no log says, by its words in run.json.
_RECORDED = (
    (
        "it hangs: ",
        Cause(
            "hang",
            (),
            "The run made no step for so long that it was ended as hanging.",
            "The stacks named in run.json say where each process waited: the one that waits for nothing is the one.",
            ("trainer.collective_timeout", "rollout.enforce_eager", "env"),
        ),
    ),
    ("out-of-memory killer ended ", _BY_ID["host-memory"]),
    ("the disk of the run directory is full", _BY_ID["disk"]),
)


@dataclass(frozen=True)
class Diagnosis:
    """What a log says about the end of its run.

    `outcome` is one of: cause (a known one), unknown (it failed, and no known cause is in the log), doubtful (it goes
    on, or ended by itself, but its numbers may not be believed), noise (only what may be ignored), clean (nothing at
    all), stopped (somebody ended it). `keys` holds the recipe's keys that decide it, with the run's own values where
    they are known. `survived` are causes after which the training made more steps.
    """

    log: Path
    outcome: str
    sentence: str
    first: Hit | None = None
    raised: Raised | None = None
    doubts: tuple[Hit, ...] = ()
    followed: tuple[Hit, ...] = ()
    survived: tuple[Hit, ...] = ()
    noise: tuple[Hit, ...] = ()
    ranked: tuple[Ranked, ...] = ()
    others: tuple[Raised, ...] = ()
    keys: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    damaged: str = ""

    @property
    def found(self) -> bool:
        """Whether there is something to act on."""
        return self.outcome in ("cause", "unknown", "doubtful")

    @property
    def remedy(self) -> str:
        """What to do, or an empty string where nothing is known."""
        known = self.first or (self.doubts[0] if self.doubts else None)
        return known.cause.remedy if known else ""

    def short(self) -> str:
        """Return one to three lines: the cause, its words in the log, the remedy."""
        lines = [self.sentence]
        hit = self.first or (self.doubts[0] if self.doubts else None)
        if hit and hit.line:
            lines.append(f"  line {hit.line}: {hit.quotes[0]}")
        elif hit:
            lines.append(f"  run.json: {hit.quotes[0]}")
        elif self.raised:
            lines.append(f"  line {self.raised.end}: {self.raised.said}")
        elif self.ranked:
            lines.append(f"  line {self.ranked[0].line}: {self.ranked[0].text}")
        if self.remedy:
            lines.append(f"remedy: {self.remedy}{_keys(self.keys)}")
        return "\n".join(lines)

    def text(self) -> str:
        """Return everything, as people read it."""
        return "\n".join(f"{head:9}{words}" if head or words else "" for head, words in self.rows())

    def rows(self) -> list[tuple[str, str]]:
        """Return everything as rows of a head and words, for every face alike. Untrusted text: escape it to show it."""
        rows = [("", self.sentence)]
        for hit in (self.first, *self.doubts) if self.first else self.doubts:
            rows += _hit_rows(hit)
        if self.first or self.doubts:
            rows.append(("remedy", self.remedy))
            if self.keys:
                rows.append(("keys", _keys(self.keys).removeprefix(" Keys: ").removesuffix(".")))
            source = (self.first or self.doubts[0]).cause.source
            if source:
                rows.append(("seen in", source))
        if self.raised:
            if self.keys:
                rows.append(("keys", _keys(self.keys).removeprefix(" Keys: ").removesuffix(".")))
            place = f"lines {self.raised.line} to {self.raised.end}{_by([self.raised.writer])}"
            rows.append(("raised", f"{self.raised.said}{_times(self.raised.count)}, {place}"))
            if self.raised.frame:
                rows.append(("at", self.raised.frame))
        for other in self.others:
            rows.append(("also", f"line {other.end}: {other.said}{_times(other.count)}{_by([other.writer])}"))
        for line in self.ranked:
            rows.append(("says", f"line {line.line}: {line.text}{_times(line.count)}{_by([line.writer])}"))
        for hit in self.followed:
            rows.append(("then", f"line {hit.line}: {hit.cause.cause} [{hit.cause.id}]{_times(hit.count)}"))
        for hit in self.survived:
            said = f"line {hit.line}: {hit.cause.cause} [{hit.cause.id}]{_times(hit.count)}; steps were made after it"
            rows.append(("earlier", said))
        for hit in self.noise:
            rows.append(("ignore", f"line {hit.line}: {hit.cause.cause} [{hit.cause.id}]{_times(hit.count)}"))
        if self.state:
            cause = f": {cut(str(self.state.get('cause')))}" if self.state.get("cause") else ""
            rows.append(("run", f"{self.state.get('state')}{cause}"))
        rows.append(("log", str(self.log)))
        if self.damaged:
            rows.append(("note", f"The compressed log could be read to a part only: {self.damaged}"))
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON's types."""
        return {
            "log": str(self.log),
            "outcome": self.outcome,
            "sentence": self.sentence,
            "remedy": self.remedy,
            "keys": dict(self.keys),
            "first": _hit_dict(self.first) if self.first else None,
            "raised": _raised_dict(self.raised) if self.raised else None,
            "doubts": [_hit_dict(hit) for hit in self.doubts],
            "followed": [_hit_dict(hit) for hit in self.followed],
            "survived": [_hit_dict(hit) for hit in self.survived],
            "noise": [_hit_dict(hit) for hit in self.noise],
            "others": [_raised_dict(each) for each in self.others],
            "ranked": [{"line": r.line, "text": r.text, "count": r.count, "writer": r.writer} for r in self.ranked],
            "state": {key: self.state.get(key) for key in ("state", "cause", "attempt", "exit_code")}
            if self.state
            else {},
            "damaged": self.damaged,
        }


def diagnose(path: str | Path | Run, attempt: int | None = None) -> Diagnosis:
    """Diagnose a run (its last attempt, or the one asked for) or a log file, plain or gzip.

    Raises RecipeError when there is neither, or it cannot be read.
    """
    if not isinstance(path, Run):
        path = Path(path)
        if not path.exists():
            raise RecipeError(f"{path} does not exist: give a run directory or a log file.")
        if not path.is_dir():
            if attempt is not None:
                raise RecipeError(f"attempt={attempt} is for a run directory, and {path} is a file.")
            return conclude(path, scan(path))
        path = open_run(path)
    state = dict(read_state(path))
    number = attempt or path.latest
    log = path.log(number)
    if not log.is_file():
        raise RecipeError(f"{log} does not exist: attempt {number} of the run has printed nothing.")
    entries = [e for e in state.get("attempts") or [] if isinstance(e, dict)]
    entry = next((e for e in entries if e.get("number") == number), {})
    if number != path.latest:  # run.json's own state is the last attempt's
        state |= {"state": entry.get("state", ""), "cause": entry.get("cause", "")}
    state |= {"attempt": number, "exit_code": entry.get("exit_code")}
    return conclude(log, scan(log), state, _values(path))


def failed(log: str | Path) -> Diagnosis | None:
    """Diagnose a bare console log; None where it does not show that its training failed, or cannot be read."""
    try:
        found = diagnose(log)
    except RecipeError:
        return None
    return found if found.outcome in ("cause", "unknown") else None


def brief(run: Run) -> str:
    """Return the short form for a run that has ended badly; an empty string where its log cannot be read."""
    try:
        return diagnose(run).short()
    except RecipeError:
        return ""


def why(run: Run) -> str:
    """Return the known cause of a run's end and its remedy as a sentence each; an empty string where none is known."""
    try:
        found = diagnose(run)
    except RecipeError:
        return ""
    return f"{found.sentence} {found.remedy}" if found.outcome == "cause" else ""


def table() -> str:
    """Return every known cause as Markdown: its texts, what it means, what to do, the recipe's keys, and the source."""
    kinds = {
        "cause": "Causes",
        "symptom": "What one rank sees of another's trouble",
        "consequence": "A process is gone",
        "doubt": "The run goes on, and may not be believed",
        "noise": "Noise",
    }
    lines = ["# Known causes", ""]
    lines += [
        "`…` stands for anything on the same line. The first match after the last step of a log is its "
        "cause; what stands before a step was survived, and what a model or a configuration says is none."
    ]
    for kind, title in kinds.items():
        lines += ["", f"## {title}"]
        for cause in (c for c in CAUSES if c.kind == kind):
            lines += ["", f"### {cause.id}", "", *(f"- `{pattern}`" for pattern in cause.patterns)]
            lines += ["", f"{cause.cause} **{cause.remedy}**"]
            if cause.ends_well:
                lines.append("After the last step it is noise.")
            if cause.keys:
                lines.append(f"Keys: {', '.join(f'`{key}`' for key in cause.keys)}.")
            if cause.source:
                lines.append(f"Seen in <{cause.source}>.")
    return "\n".join(lines) + "\n"


def conclude(log: Path, found: Scan, state: Mapping[str, Any] | None = None, values: Any = None) -> Diagnosis:
    """Say what a scan means. `state` is run.json where there is a run; `values` is its resolved recipe."""
    state = state or {}
    ended = state.get("state", "")
    finished, through = ended == "finished", not ended and found.ended_well
    noise, doubts, serious, survived = _sorted(found, finished, through)
    late = [r for r in found.raised.values() if r.epoch == found.epoch and _counts(r)]
    signs = [line for line in found.ranked.values() if line.score >= FAILING]
    if through and (serious or late or any(_ends_badly(line) for line in signs)):
        through = False  # it made its last step, and failed after it
    broken = _not_finite(found)
    if broken:
        doubts = sorted([*doubts, broken], key=lambda hit: hit.line)
    told = Diagnosis(
        log=log,
        outcome="clean",
        sentence="",
        doubts=tuple(doubts),
        survived=tuple(survived[:SHOWN]),
        noise=tuple(noise),
        others=tuple(late[:SHOWN]),
        state=state,
        damaged=found.damaged,
    )

    if finished or through:
        if doubts:
            return _doubtful(told, "The run finished, but", values)
        nothing = "its log shows nothing that " + ("ended it" if late or survived else "matters")
        judge = "Whether its numbers can be believed, `recipes judge` says."
        return _nothing(told, f"The run finished; {nothing}. {judge}")

    every = [r for r in found.raised.values() if _counts(r)]
    raised = _named(every, found.last_exception) or min(late, key=lambda r: r.line, default=None)
    if raised is None and not any(hit.cause.kind == "cause" for hit in serious) and (serious or signs):
        # All that is left after the last step is what follows from a failure, which then stands shortly before it: what
        # different processes print comes in any order.
        shortly = [hit for hit in survived if hit.epoch == found.epoch - 1 and hit.cause.kind == "cause"]
        serious, survived = sorted([*shortly, *serious], key=_line), [hit for hit in survived if hit not in shortly]
        told = replace(told, survived=tuple(survived[:SHOWN]))
    failed = ended in ("failed", "lost")
    first = _first(serious, raised, found.last_exception)
    recorded = None if ended == "stopped" else _recorded(state)
    if first is not None and recorded and first.cause.id == recorded.cause.id:
        recorded = None  # the log says it in its own words
    if (first is None or first.cause.kind == "consequence") and recorded and (raised is None or _is_hang(recorded)):
        # A process that raised and is waited for makes a hang too: its exception is then listed beside it.
        first = recorded
    ranked = _best(found.ranked.values())
    unsaid = first is None or first.cause.kind in ("symptom", "consequence")
    if broken and found.broken_last and unsaid and (raised or first or signs or failed) and ended != "stopped":
        # The numbers of the last step are not to be believed: what failed after it most likely follows from that.
        first = replace(broken, cause=replace(broken.cause, kind="cause"))
        doubts.remove(broken)
    if first is not None:
        return replace(
            told,
            outcome="cause",
            sentence=f"{first.cause.cause} [{first.cause.id}]",
            first=first,
            doubts=tuple(doubts),
            followed=tuple(hit for hit in serious if hit is not first),
            ranked=ranked if first.cause.vague or first.cause.kind == "consequence" else (),
            keys=_with_values(first.cause.keys, values),
        )
    going = ended in ("running", "prepared")
    if raised is not None and not going and ended != "stopped":
        where = f" at {raised.frame}" if raised.frame else ""
        return replace(
            told,
            outcome="unknown",
            sentence=f"Unknown: no known cause is in the log. First to fail was {raised.type}{where}.",
            raised=raised,
            followed=tuple(serious),
            others=tuple(r for r in late if r is not raised)[:SHOWN],
            keys=_with_values(("reward.function",) if raised.frame.endswith("in compute_score") else (), values),
        )
    if ended == "stopped":
        return replace(told, outcome="stopped", sentence=f"Nothing failed: {state.get('cause') or 'stopped'}.")
    if not ended and signs and all(line.text.startswith("KeyboardInterrupt") for line in signs):
        return replace(told, outcome="stopped", sentence=f"Nothing failed: it was interrupted (line {signs[0].line}).")
    if failed or (not ended and signs):
        ranked = ranked or _best(found.before.values())
        said = "no known cause is in the log, and no traceback; these lines say most." if ranked else ""
        if not said:
            empty = "the log is empty" if not found.lines else "the log says nothing about why"
            said = f"{empty}. Other processes may have logs of their own."
        return replace(told, outcome="unknown", sentence=f"Unknown: {said}", ranked=ranked)
    if doubts:
        return _doubtful(told, "The run goes on, but", values)
    if not found.lines:
        return replace(
            told, sentence="Nothing of the log can be read." if found.damaged else "The log is empty: 0 bytes."
        )
    if found.binary:
        return replace(told, sentence="The file is no log: it is not text.")
    said = "The run goes on; its log" if going else "The log"
    return _nothing(told, f"{said} shows nothing that {'ended it' if late or survived else 'failed'}.")


def _sorted(found: Scan, finished: bool, through: bool) -> tuple[list[Hit], list[Hit], list[Hit], list[Hit]]:
    """Sort what was found, each in the order of the log: noise, doubts, what is serious, and what was survived.

    `finished` is what run.json says; `through` what the log alone says, so that something may still have failed.
    """
    noise, doubts, serious, survived = [], [], [], []
    for hit in sorted(found.hits.values(), key=_line):
        kind, latest = hit.cause.kind, hit.latest
        over = found.step_line and latest.line > found.step_line and (finished or found.ended_well)
        if kind == "noise":
            noise.append(hit)
        elif kind == "doubt":
            doubts.append(hit)
        elif hit.epoch < found.epoch:
            survived.append(hit)
        elif (
            (hit.cause.ends_well and (over or through))
            or (finished and kind != "cause")
            or (through and kind == "symptom")
        ):
            noise.append(latest)
        else:
            (doubts if finished else serious).append(latest)
    return noise, sorted(doubts, key=_line), sorted(serious, key=_line), survived


def _first(serious: Sequence[Hit], raised: Raised | None, last: tuple[int, str] | None) -> Hit | None:
    """Return the first cause: a known one, unless an exception before it is what the log ends with; else a symptom that
    came before the exception; without one, what follows from a failure."""
    first = next((hit for hit in serious if hit.cause.kind == "cause"), None)
    if first is not None:
        before = raised is not None and raised.end < first.line and _named([raised], last)
        return None if before else first
    symptom = next((hit for hit in serious if hit.cause.kind == "symptom"), None)
    if symptom is not None and (raised is None or symptom.line <= raised.end):
        if symptom.cause.vague:
            near = [h for h in serious if abs(h.line - symptom.line) <= EXPLAINED_WITHIN and h.cause.kind == "symptom"]
            return next((hit for hit in near if not hit.cause.vague), symptom)
        return symptom
    if raised is not None:
        return None
    return next((hit for hit in serious if not hit.cause.vague), None) or next(iter(serious), None)


def _not_finite(found: Scan) -> Hit | None:
    """Return which values of the steps were not finite, as a doubt; None where all that are watched were."""
    keys = {key: first for key, first in found.broken.items() if key.startswith(_WATCHED)}
    found.broken_last = {key for key in found.broken_last if key.startswith(_WATCHED)}
    if not keys:
        return None
    key, (step, line, _) = min(keys.items(), key=lambda item: item[1][1])
    more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    cause = Cause(
        "not-finite",
        (),
        f"A value of the training is not finite: {cut(key, 120)}{more}, first at step {step}.",
        "Do not believe the run (`recipes judge`): lower optimizer.lr, and look at the curves of the steps before.",
        ("optimizer.lr", "optimizer.clip_grad", "rollout.log_probs"),
        "",
        "doubt",
    )
    quotes = [cut(f"step:{at} - {name}:{what}") for name, (at, _, what) in list(keys.items())[:3]]
    return Hit(cause, line, quotes, 1, line)


def _line(hit: Hit) -> int:
    return hit.latest.line


def _is_hang(hit: Hit) -> bool:
    return hit.cause.id == "hang"


def _ends_badly(line: Ranked) -> bool:
    """Whether a line after the last step says that the run failed. Its processes may lose each other while they end."""
    if line.score == 5:
        kind = line.text.partition(":")[0].rpartition(".")[2]
        return not line.ends and (kind.startswith("RayTaskError") or not kind.startswith(_PASSED_ON))
    return line.score >= FATAL


def _doubtful(told: Diagnosis, head: str, values: Any) -> Diagnosis:
    first = told.doubts[0].cause
    return replace(told, outcome="doubtful", sentence=f"{head}: {first.cause}", keys=_with_values(first.keys, values))


def _nothing(told: Diagnosis, clean: str) -> Diagnosis:
    if told.noise:
        return replace(told, outcome="noise", sentence=f"{clean} What looks bad in it is noise.")
    return replace(told, outcome="clean", sentence=clean)


def _counts(raised: Raised) -> bool:
    return not raised.ignored and not raised.explained and not raised.type.startswith(_PASSED_ON)


def _named(raised: list[Raised], last: tuple[int, str] | None) -> Raised | None:
    """Return the first exception that the last one names, which names itself too: the earliest is where it began."""
    if not last:
        return None
    named = [r for r in raised if r.said in last[1] or (len(r.message) > 20 and r.message in last[1])]
    return min(named, key=lambda r: r.line, default=None)


def _recorded(state: Mapping[str, Any]) -> Hit | None:
    """Return what run.json says beyond the log: a hang, the kernel's out-of-memory killer, a full disk, a signal."""
    words, code = str(state.get("cause") or ""), state.get("exit_code")
    for text, cause in _RECORDED:
        if text in words:
            return Hit(cause, 0, [cut(words)], 1)
    if isinstance(code, int):
        number = -code if code < 0 else code - 128
        for each, cause in _SIGNALS.items():
            if each == number:
                return Hit(cause, 0, [f"exit code {code}"], 1)
    return None


def _best(ranked: Iterable[Ranked]) -> tuple[Ranked, ...]:
    """Return the lines that say most: exceptions before alarms before complaints, the earlier first among equals."""
    return tuple(sorted(ranked, key=lambda line: (-line.score, line.line))[:SHOWN])


def _values(run: Run) -> Any:
    """Return the run's resolved recipe, or None: it is an extra, and its absence no fault."""
    from omegaconf import OmegaConf

    try:
        return OmegaConf.to_container(OmegaConf.load(run.path / "recipe.yaml"))
    except Exception:  # noqa: BLE001 - whatever is wrong with that file, the log can still be read
        return None


def _with_values(keys: Iterable[str], values: Any) -> dict[str, Any]:
    """Return keys with the run's values; None where a value is not set or not known."""
    found = {}
    for key in keys:
        value = values
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        found[key] = value if isinstance(value, (str, int, float, bool)) else None
    return found


def _keys(keys: Mapping[str, Any]) -> str:
    if not keys:
        return ""
    return f" Keys: {', '.join(k if v is None else f'{k}={cut(str(v), 80)}' for k, v in keys.items())}."


def _hit_rows(hit: Hit) -> list[tuple[str, str]]:
    if not hit.line:
        return [("cause", f"{hit.cause.id}, by run.json"), *(("", f"| {quote}") for quote in hit.quotes)]
    lines = f"line {hit.line}" + (f", {hit.count} times up to line {hit.last}" if hit.count > 1 else "")
    return [
        (hit.cause.kind if hit.cause.kind == "doubt" else "cause", f"{hit.cause.id}, {lines}{_by(hit.writers)}"),
        *(("", f"| {quote}") for quote in hit.quotes),
    ]


def _times(count: int) -> str:
    return f" ({count} times)" if count > 1 else ""


def _by(writers: Iterable[str]) -> str:
    names = [name for name in writers if name]
    more = f" and {len(names) - 3} others" if len(names) > 3 else ""
    return f", by {'; '.join(cut(name, 80) for name in names[:3])}{more}" if names else ""


def _hit_dict(hit: Hit) -> dict[str, Any]:
    return {
        "id": hit.cause.id,
        "kind": hit.cause.kind,
        "cause": hit.cause.cause,
        "remedy": hit.cause.remedy,
        "source": hit.cause.source,
        "line": hit.line,
        "last_line": hit.last,
        "count": hit.count,
        "quotes": list(hit.quotes),
        "writers": [cut(name, 160) for name in hit.writers],
    }


def _raised_dict(raised: Raised) -> dict[str, Any]:
    return {
        "type": raised.type,
        "message": raised.message,
        "frame": raised.frame,
        "first_line": raised.line,
        "line": raised.end,
        "count": raised.count,
        "writer": cut(raised.writer, 160),
    }
