"""Why did a run fail? The first cause its log shows, in the log's own words, with remedy and keys of the recipe."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.diagnosis.causes import CAUSES, Cause
from recipes.diagnosis.reader import Hit, Raised, Ranked, Scan, cut, scan
from recipes.errors import RecipeError
from recipes.run.directory import Run, open_run, read_state

# Lines after a traceback in which the same writer may still say what the exception was about (HCCL's codes follow it).
EXPLAINED_WITHIN = 20
# Lines shown of an unknown failure.
SHOWN = 8

# Exceptions that only pass on that something else ended.
_PASSED_ON = (
    *("RayTaskError", "RayActorError", "ActorDiedError", "ActorUnavailableError", "EngineDeadError", "SystemExit"),
    *("KeyboardInterrupt", "CancelledError", "BrokenPipeError", "ConnectionResetError", "ConnectionRefusedError"),
    *("WorkerCrashedError", "OwnerDiedError", "ObjectLostError", "EOFError"),
)

_SIGNALS = {
    signal.SIGKILL: Cause(
        "killed",
        (),
        "The training was killed by SIGKILL: by the kernel's OOM killer, by the platform, or by hand.",
        "`dmesg` says whether it was the OOM killer. If so: offload less, fewer workers, or more host memory.",
        ("memory.param_offload", "memory.optimizer_offload", "rollout.agent_workers"),
    ),
    signal.SIGBUS: next(cause for cause in CAUSES if cause.id == "shm-full"),
    signal.SIGSEGV: Cause(
        "crashed",
        (),
        "The training crashed in native code (SIGSEGV).",
        "Most often versions that do not fit (`recipes stack verify`); PYTHONFAULTHANDLER=1 shows where.",
        ("stack", "env"),
    ),
    signal.SIGABRT: Cause(
        "aborted",
        (),
        "Native code gave up (SIGABRT).",
        "The last lines of the log say why; PYTHONFAULTHANDLER=1 shows where.",
        ("stack", "env"),
    ),
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
    ("out-of-memory killer ended ", next(cause for cause in CAUSES if cause.id == "host-memory")),
    ("the disk of the run directory is full", next(cause for cause in CAUSES if cause.id == "disk")),
)


@dataclass(frozen=True)
class Diagnosis:
    """What a log says about the end of its run.

    `outcome` is one of: cause (a known one), unknown (it failed, and no known cause is in the log), doubtful (it goes
    on, or ended by itself, but its numbers may not be believed), noise (only what may be ignored), clean (nothing at
    all), stopped (somebody ended it). `keys` holds the recipe's keys that decide it, with the run's own values where
    they are known.
    """

    log: Path
    outcome: str
    sentence: str
    first: Hit | None = None
    raised: Raised | None = None
    doubts: tuple[Hit, ...] = ()
    followed: tuple[Hit, ...] = ()
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
    lines = ["# Known causes", "", "`…` stands for anything on the same line. The first match in a log is its cause."]
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
    well = ended == "finished" or (not ended and found.ended_well)
    hits = sorted(found.hits.values(), key=lambda hit: hit.line)
    noise, doubts, serious = [], [], []
    for hit in hits:
        kind = hit.cause.kind
        over = found.step_line and hit.line > found.step_line and (well or found.ended_well)
        if kind == "noise" or (hit.cause.ends_well and over) or (well and kind in ("symptom", "consequence")):
            noise.append(hit)
        elif kind == "doubt" or well:
            doubts.append(hit)
        else:
            serious.append(hit)
    common: dict[str, Any] = {"log": log, "noise": tuple(noise), "state": state, "damaged": found.damaged}

    if well:
        if doubts:
            return Diagnosis(
                outcome="doubtful",
                sentence=f"The run finished, but: {doubts[0].cause.cause}",
                doubts=tuple(doubts),
                keys=_with_values(doubts[0].cause.keys, values),
                **common,
            )
        return Diagnosis(**_nothing(noise, "The run finished; its log shows nothing that matters."), **common)

    open_ = [r for r in found.raised.values() if _counts(r) and not _explained(r, hits)]
    raised = _pick(open_, found.last_exception)
    first = next((hit for hit in serious if hit.cause.kind == "cause"), None)
    if first is None:
        symptom = next((hit for hit in serious if hit.cause.kind == "symptom"), None)
        if symptom and (raised is None or symptom.line <= raised.end):
            first = symptom
    recorded = None if ended == "stopped" else _recorded(state)
    if first is None and recorded and (raised is None or recorded.cause.id == "hang"):
        # A process that raised and is waited for makes a hang too: its exception is then listed beside it.
        first = recorded
    if first is None and raised is None:
        first = next(iter(serious), None)
    if first is not None:
        return Diagnosis(
            outcome="cause",
            sentence=f"{first.cause.cause} [{first.cause.id}]",
            first=first,
            doubts=tuple(doubts),
            followed=tuple(hit for hit in serious if hit is not first),
            others=tuple(r for r in open_ if r.end < first.line or not first.line)[:SHOWN],
            keys=_with_values(first.cause.keys, values),
            **common,
        )
    failed = ended in ("failed", "lost")
    if raised is not None and (ended not in ("running", "prepared", "stopped") or failed):
        where = f" at {raised.frame}" if raised.frame else ""
        return Diagnosis(
            outcome="unknown",
            sentence=f"Unknown: no known cause is in the log. First to fail was {raised.type}{where}.",
            raised=raised,
            doubts=tuple(doubts),
            followed=tuple(serious),
            others=tuple(r for r in open_ if r is not raised)[:SHOWN],
            keys=_with_values(("reward.function",) if raised.frame.endswith("in compute_score") else (), values),
            **common,
        )
    if ended == "stopped":
        return Diagnosis(outcome="stopped", sentence=f"Nothing failed: {state.get('cause') or 'stopped'}.", **common)
    ranked = _best(found.ranked.values())
    if failed or (not ended and any(line.score == 5 for line in ranked)):
        said = "Unknown: no known cause is in the log, and no traceback; these lines say most." if ranked else ""
        said = said or "Unknown: the log says nothing about why. Other processes may have logs of their own."
        return Diagnosis(outcome="unknown", sentence=said, ranked=ranked, doubts=tuple(doubts), **common)
    if doubts:
        return Diagnosis(
            outcome="doubtful",
            sentence=f"The run goes on, but: {doubts[0].cause.cause}",
            doubts=tuple(doubts),
            keys=_with_values(doubts[0].cause.keys, values),
            **common,
        )
    going = "The run goes on; its log" if ended in ("running", "prepared") else "The log"
    nothing = f"{going} shows nothing that ended it." if open_ else f"{going} shows nothing that failed."
    return Diagnosis(**_nothing(noise, nothing), others=tuple(open_[:SHOWN]), **common)


def _nothing(noise: list[Hit], clean: str) -> dict[str, str]:
    if noise:
        return {"outcome": "noise", "sentence": f"{clean} What looks bad in it is noise."}
    return {"outcome": "clean", "sentence": clean}


def _counts(raised: Raised) -> bool:
    return not raised.ignored and not raised.type.startswith(_PASSED_ON)


def _explained(raised: Raised, hits: Iterable[Hit]) -> bool:
    """Whether the table knows what this exception is about: a hit stands in its lines, or right after them."""
    for hit in hits:
        kind, same = hit.cause.kind, not hit.writers or not raised.writer or raised.writer in hit.writers
        within = EXPLAINED_WITHIN if same and kind in ("cause", "symptom") else 0
        if kind not in ("noise", "doubt") and raised.line <= hit.line <= raised.end + within:
            return True
    return False


def _pick(raised: list[Raised], last: tuple[int, str] | None) -> Raised | None:
    """Return the first exception that the last one names; else the first of all."""
    if last:
        named = [r for r in raised if r.said in last[1] or (len(r.message) > 20 and r.message in last[1])]
        # The last exception names itself too: the earliest of those it names is where it began.
        if named:
            return min(named, key=lambda r: r.line)
    return min(raised, key=lambda r: r.line, default=None)


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
