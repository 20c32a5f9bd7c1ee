"""Run a batch: papermill in a process and a run directory each, so many at a time, and go on where it was ended.

What has been done is read from the run directories and nowhere else. One loop in one thread starts, watches and ends
everything; only stopping waits in parallel.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from recipes import headless, live, notebook, params
from recipes.batch import Batch, Item, directories, durations, fingerprint_of, next_directory, size
from recipes.errors import RecipeError
from recipes.preflight import files, subject
from recipes.run import launch, resume
from recipes.run.directory import ENDED, Run, here, patiently, read_state
from recipes.verdict import Verdict

# Seconds between looks at the children, between looks at the metrics of what runs, and between lines of progress.
LOOK, METRICS, SAY = 0.1, 2.0, 1.0
# Seconds to wait for the last words of a batch that was just killed.
LAST_WORDS = 15.0
# Bytes of memory one run without an accelerator takes (README: the quickstart, all its processes).
MEMORY = 3_000_000_000
# Runs at a time on a cluster, unless the batch says how many: enough to keep some waiting for devices.
ON_A_CLUSTER = 4


@dataclass(frozen=True)
class Found:
    """What the directories hold of a run: `done`, `running`, `resumable`, or `new` with why, and where it goes on."""

    what: str
    run: Run
    why: str = ""


@dataclass
class Outcome:
    """What became of one run of a batch. `what`: passed, failed, or not run."""

    item: Item
    what: str
    cause: str = ""
    run: Run | None = None
    state: dict[str, Any] = field(default_factory=dict)
    verdict: Verdict | None = None
    skipped: bool = False

    @property
    def seconds(self) -> float:
        """Seconds of all attempts in its directory."""
        return sum(map(_seconds, self.state.get("attempts", ())))

    @property
    def device_hours(self) -> float:
        return self.item.devices * self.seconds / 3600


@dataclass(eq=False)
class Slot:
    """One run that is going on: its papermill, or none where an earlier batch's training goes on by itself."""

    item: Item
    run: Run
    child: subprocess.Popen | None
    began: float
    words: str = "starts"
    left: float | None = None
    looked: float = 0.0
    reader: live.Reader | None = None


@dataclass(frozen=True)
class Estimate:
    """How long a run takes, in seconds, and how that is known."""

    seconds: float | None
    source: str


@dataclass(frozen=True)
class Forecast:
    """What a batch would do now: for each run what was found and how long it takes; device-hours spent and to come."""

    rows: tuple[tuple[Item, Found, Estimate], ...]
    workers: int
    why_workers: str
    spent: float

    @property
    def unknown(self) -> list[Item]:
        return [i for i, found, e in self.rows if found.what != "done" and e.seconds is None]

    @property
    def to_come(self) -> float:
        """Device-hours of what is left to run, as far as known."""
        return sum(i.devices * (e.seconds or 0.0) / 3600 for i, f, e in self.rows if f.what != "done")

    @property
    def wall(self) -> float:
        """Seconds until all of it has run, as far as known."""
        return schedule([e.seconds or 0.0 for _, f, e in self.rows if f.what != "done"], self.workers)


def look(root: Path, item: Item) -> Found:
    """Return what the batch directory `root` holds of a run and where it would go on.

    Raises RecipeError when it runs there with other settings.
    """
    why = ""
    for path in reversed(directories(root, item.name)):
        run = Run(path)
        if not run.state_file.is_file():
            why = why or f"{path.name} never came to its training"
            continue
        state = read_state(run)
        going = state["state"] not in ENDED
        if fingerprint_of(run) != item.fingerprint:
            if going:
                raise RecipeError(f"{path} is running with other settings than {item.name} has in the batch now.")
            why = why or f"{path.name} has other settings"
            continue
        if going:
            return Found("running", run)
        if state["state"] == "finished":
            return Found("done", run)
        if not item.is_rehearsal and (step := _checkpoint(run)):
            return Found("resumable", run, f"{state['state']}; goes on from step {step}")
        why = why or f"{path.name} {state['state']}, no whole checkpoint"
    return Found("new", Run(next_directory(root, item.name)), why)


def _checkpoint(run: Run) -> int:
    """The step a run would be resumed from; 0 where there is no whole checkpoint, or it cannot be resumed."""
    try:
        point = resume.plan(run).point
    except RecipeError:
        return 0
    return point.step if point.checkpoint is not None else 0


def forecast(batch: Batch, root: Path, workers: int | None = None) -> Forecast:
    """Return what the batch would do in `root`. Nothing is written or started. Raises RecipeError as `look` does."""
    known = durations(_earlier(batch, root))
    rows = tuple((item, look(root, item), estimate(item, known)) for item in batch.items)
    count, why = _workers(batch, [i for i, found, _ in rows if found.what != "done"], workers or batch.file.workers)
    return Forecast(rows, count, why, spent(batch, root))


def estimate(item: Item, known: dict) -> Estimate:
    """Return how long `item` takes: the median of earlier runs of its recipe and size, else its deadline, else None."""
    earlier = known.get((item.recipe, size(item.plan.command.argv)), [])
    same = [seconds for steps, seconds in earlier if steps == item.steps]
    if same:
        return Estimate(statistics.median(same), f"{len(same)} earlier runs" if len(same) > 1 else "1 earlier run")
    scaled = [seconds * item.steps / steps for steps, seconds in earlier if steps and item.steps]
    if scaled:
        return Estimate(statistics.median(scaled), f"{len(scaled)} earlier, by steps")
    if item.deadline_seconds is not None:
        return Estimate(item.deadline_seconds, "its deadline")
    return Estimate(None, "no earlier run")


def spent(batch: Batch, root: Path) -> float:
    """Return the device-hours that runs of the batch have taken in `root` so far, all their attempts."""
    hours = 0.0
    for item in batch.items:
        for path in directories(root, item.name):
            with contextlib.suppress(OSError, ValueError):
                attempts = json.loads((path / "run.json").read_text(encoding="utf-8"))["attempts"]
                hours += item.devices * sum(map(_seconds, attempts)) / 3600
    return hours


def refuse_cap(told: Forecast, cap: float | None) -> None:
    """Raise RecipeError when what a batch has spent and would spend is more than `cap` device-hours, or not known."""
    if cap is None:
        return
    if told.unknown:
        names = ", ".join(sorted({i.recipe for i in told.unknown}))
        raise RecipeError(
            f"A cap of {cap:g} device-hours cannot be kept: how long {names} takes is not known. Give the batch "
            "deadline_minutes, which bounds each run, or let one run first."
        )
    whole = told.spent + told.to_come
    if whole > cap:
        raise RecipeError(
            f"The batch would take {whole:.3g} device-hours ({told.spent:.3g} spent, {told.to_come:.3g} to come), more "
            f"than its cap of {cap:g}. Nothing was started."
        )


def schedule(seconds: Sequence[float], workers: int) -> float:
    """Return when the last of so many jobs ends that `workers` take one after another, in order."""
    free = [0.0] * max(1, workers)
    for each in seconds:
        heapq.heapreplace(free, free[0] + each)
    return max(free)


def run(
    batch: Batch,
    root: Path,
    *,
    workers: int | None = None,
    stop_on_failure: bool = False,
    cap: float | None = None,
    event: Callable[[str], None] = print,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[list[Outcome], bool]:
    """Run what of the batch has not finished in `root` yet.

    Returns an outcome for each of its runs, in order, and whether it was interrupted.

    `event` gets a line when a run starts or ends, `progress` one about everything that goes on. An interrupt (SIGINT,
    SIGTERM) ends all papermills and trainings; what did not run is `not run` then. Raises RecipeError when another
    batch runs in `root`, and for what `forecast` and `refuse_cap` refuse, before anything is started.
    """
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root, event) as lock:
        told = forecast(batch, root, workers)
        refuse_cap(told, cap)
        if told.why_workers:
            event(told.why_workers)
        loop = Loop(batch, root, told, lock, cap, stop_on_failure, event, progress)
        with _signals(loop):
            _prepare([item for item, found, _ in told.rows if found.what in ("new", "resumable")], event)
            loop.run()
        return loop.in_order(), bool(loop.asked)


class Loop:
    """The one loop of a batch, from its queue to its outcomes."""

    def __init__(
        self,
        batch: Batch,
        root: Path,
        told: Forecast,
        lock: int,
        cap: float | None,
        stop_on_failure: bool,
        event: Callable[[str], None],
        progress: Callable[[str], None],
    ) -> None:
        self.batch, self.root, self.workers, self.lock, self.cap = batch, root, told.workers, lock, cap
        self.stop_on_failure, self.event, self.progress = stop_on_failure, event, progress
        self.estimates = {item.name: e for item, _, e in told.rows}
        self.outcomes: dict[str, Outcome] = {}
        self.slots: list[Slot] = []
        self.asked = ""
        self.said = self.measured = 0.0
        # What still runs by itself first: it holds its devices whatever else is started.
        order = sorted(told.rows, key=lambda row: row[1].what != "running")
        self.queue = [(item, found) for item, found, _ in order if found.what != "done"]
        for item, found, _ in told.rows:
            if found.what == "done":
                self._conclude(item, found.run, skipped=True)

    def run(self) -> None:
        """Go on until everything has run, or somebody asked for an end; then nothing that was started is left."""
        try:
            self._go()
        except BaseException:
            self.asked = self.asked or "the batch itself failed"
            self._end_all()
            raise
        if self.asked:
            self._end_all()
        for item, found in self.queue:
            self.outcomes[item.name] = Outcome(item, "not run", self.asked, _there(found))

    def _go(self) -> None:
        while (self.queue or self.slots) and not self.asked:
            ended = [slot for slot in self.slots if self._ended(slot)]
            self.slots = [slot for slot in self.slots if slot not in ended]
            # Judging takes a second, and the next run need not wait for it, unless it depends on what is found.
            careful = self.stop_on_failure or self.cap is not None
            if not careful:
                self._fill()
            for slot in ended:
                try:
                    self._collect(slot)
                except Exception as fault:  # noqa: BLE001  a run nobody can read must not end the others
                    self._give_up(slot.item, slot.run, fault)
            self._fill()
            self._say()
            time.sleep(LOOK)

    def _fill(self) -> None:
        while self.queue and len(self.slots) < self.workers and not self.asked:
            item, found = self.queue.pop(0)
            try:
                self._start(item, found)
            except (OSError, RecipeError) as fault:  # one that cannot start must not end the others
                self._give_up(item, _there(found), fault)

    def in_order(self) -> list[Outcome]:
        return [self.outcomes[item.name] for item in self.batch.items]

    def _start(self, item: Item, found: Found) -> None:
        if found.what != "running" and (why := self._held_back(item)):
            self.outcomes[item.name] = Outcome(item, "not run", why, _there(found))
            self.event(f"{item.name}: not run, {why}")
            return
        if found.what == "running":
            self.slots.append(Slot(item, found.run, None, time.monotonic()))
            self.event(f"{item.name}: still runs in {found.run.path.name}; waits for it")
            return
        given = dict(item.parameters)
        if found.what == "resumable":
            given["overrides"] = [*given.get("overrides", ()), "checkpoint.resume=auto"]
        child = headless.begin(item.notebook, given, found.run.path, keep=[self.lock])
        self.slots.append(Slot(item, found.run, child, time.monotonic()))
        self.event(f"{item.name}: starts in {found.run.path.name}" + (f" ({found.why})" if found.why else ""))

    def _give_up(self, item: Item, run: Run | None, fault: Exception) -> None:
        self.outcomes[item.name] = Outcome(item, "failed", f"{type(fault).__name__}: {fault}", run)
        self.event(f"{item.name}: failed: {fault}")

    def _held_back(self, item: Item) -> str:
        """Say why a run may not start now, or nothing."""
        if self.stop_on_failure:
            failed = [o.item.name for o in self.outcomes.values() if o.what == "failed" and not o.skipped]
            if failed:
                return f"{failed[0]} failed"
        if self.cap is not None:
            # What runs is counted as spent for as long as it runs; to come is only the rest.
            to_come = [(item, 0.0)] + [(s.item, time.monotonic() - s.began) for s in self.slots]
            whole = spent(self.batch, self.root) + sum(
                each.devices * max(0.0, (self.estimates[each.name].seconds or 0.0) - gone) / 3600
                for each, gone in to_come
            )
            if whole > self.cap:
                return f"it would bring the batch to {whole:.3g} device-hours, more than its cap of {self.cap:g}"
        return ""

    def _ended(self, slot: Slot) -> bool:
        """Say whether a slot is free again. A training may outlive its papermill, and then is waited for."""
        if slot.child is not None and slot.child.poll() is None:
            return False
        if not patiently(slot.run.state_file.is_file):
            return True
        return patiently(lambda: read_state(slot.run))["state"] in ENDED

    def _collect(self, slot: Slot) -> None:
        if slot.child is not None:
            slot.child.stdin.close()
        headless.settle(slot.run.path)
        self._conclude(slot.item, slot.run, code=slot.child.returncode if slot.child else 0)
        outcome = self.outcomes[slot.item.name]
        undrawn = slot.child is None and outcome.state.get("state") == "finished"  # its notebook did not live to draw
        if undrawn and (words := notebook.try_to_record(slot.run)):
            self.event(f"{slot.item.name}: {words.strip()}")
        if slot.child is None and outcome.state.get("state") not in (None, "finished"):
            # It was an earlier batch's, and went down with it: it is this one's turn to try.
            del self.outcomes[slot.item.name]
            self.queue.insert(0, (slot.item, look(self.root, slot.item)))
            return
        words = f"{outcome.what} after {live.duration(time.monotonic() - slot.began)}"
        self.event(f"[{len(self.outcomes)}/{len(self.batch.items)}] {slot.item.name}: {words}" + _because(outcome))

    def _conclude(self, item: Item, run: Run, *, code: int = 0, skipped: bool = False) -> None:
        self.outcomes[item.name] = conclude(item, run, code, skipped=skipped)

    def _end_all(self) -> None:
        """End what runs, all at the same time, and say what became of it."""
        self.event(f"{self.asked}: ends {len(self.slots)} runs …")

        def end(slot: Slot) -> str:
            try:
                if slot.child is not None:
                    headless.interrupt(slot.child, slot.run.path)
                elif slot.run.state_file.is_file():
                    launch.stop(slot.run)
            except (RecipeError, OSError) as fault:
                return str(fault)
            return ""

        with ThreadPoolExecutor(max_workers=max(1, len(self.slots))) as pool:
            faults = list(pool.map(end, self.slots))
        for slot, fault in zip(self.slots, faults, strict=True):
            if slot.child is not None:
                slot.child.stdin.close()
            headless.settle(slot.run.path)
            self._conclude(slot.item, slot.run, code=1)
            if fault:
                self.outcomes[slot.item.name].cause = fault
                self.event(f"{slot.item.name}: {fault}")
        self.slots.clear()

    def _say(self) -> None:
        at = time.monotonic()
        if at - self.said < SAY:
            return
        self.said = at
        for slot in self.slots:
            if at - slot.looked > METRICS and patiently(slot.run.state_file.is_file):
                slot.looked = at
                with contextlib.suppress(OSError, ValueError):
                    slot.reader = slot.reader or live.Reader(slot.run)
                    moment = live.look(slot.run, slot.reader)
                    slot.left = moment.left
                    slot.words = f"step {moment.step}" + (f" of {moment.steps}" if moment.steps else "")
        self.progress(self.line())

    def line(self) -> str:
        """Return one line: how many are done, what runs, how long it takes still."""
        done = len(self.outcomes)
        words = f"{done} of {len(self.batch.items)} done"
        words += "".join(f" · {slot.item.name} {slot.words}" for slot in self.slots)
        left = self.left()
        return words + (f" · about {live.duration(left)} left" if left else "")

    def left(self) -> float | None:
        """Return the seconds until everything has run; None while that is not known of some run."""
        at, going = time.monotonic(), []
        for slot in self.slots:
            whole = self._expected(slot.item)
            by_estimate = None if whole is None else max(0.0, whole - (at - slot.began))
            # Right after the start the steps that were made say less than earlier runs.
            going.append(slot.left if slot.left is not None else by_estimate)
        waiting = [self._expected(item) for item, _ in self.queue]
        if any(each is None for each in (*going, *waiting)):
            return None
        return schedule([*going, *waiting], self.workers)

    def _expected(self, item: Item) -> float | None:
        """Seconds of a run: as estimated, else as those of the same recipe took that this batch has run."""
        known = self.estimates[item.name]
        if known.seconds is not None and known.source != "its deadline":
            return known.seconds
        took = [o.seconds for o in self.outcomes.values() if o.item.recipe == item.recipe and o.seconds]
        return statistics.median(took) if took else known.seconds


def conclude(item: Item, run: Run, code: int = 0, *, skipped: bool = False) -> Outcome:
    """Judge what is in a run's directory, and write its verdict.json. `code` is papermill's exit code."""
    if not run.state_file.is_file():
        return Outcome(item, "failed", f"the notebook failed before its launch: {_last_line(run)}", run)
    state = read_state(run)
    made = Outcome(item, "failed", state.get("cause", ""), run, state, skipped=skipped)
    try:
        made.verdict = notebook.judge(run.path, thresholds=item.thresholds).verdict
    except (OSError, ValueError) as fault:
        made.cause = made.cause or f"it cannot be judged: {fault}"
        return made
    if state["state"] != "finished":
        made.cause = made.cause or state["state"]
    elif not made.verdict.passed:
        made.cause = next(j.sentence for j in made.verdict.judgements if j.outcome == "fail")
    elif code:
        made.cause = f"the training finished, the notebook failed: {_last_line(run)}"
    else:
        made.what = "passed"
    return made


def _there(found: Found) -> Run | None:
    return found.run if found.run.state_file.is_file() else None


def _because(outcome: Outcome) -> str:
    return f": {outcome.cause}" if outcome.cause else ""


def _last_line(run: Run) -> str:
    try:
        lines = (run.path / "papermill.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else "papermill left no word"


def _seconds(attempt: dict[str, Any]) -> float:
    """Seconds of an attempt; of one that was lost, from its start to when that was noticed."""
    if attempt.get("seconds") is not None:
        return float(attempt["seconds"])
    if not attempt.get("started"):
        return 0.0
    began = datetime.fromisoformat(attempt["started"])
    until = datetime.fromisoformat(attempt["ended"]) if attempt.get("ended") else datetime.now().astimezone()
    return max(0.0, (until - began).total_seconds())


def _earlier(batch: Batch, root: Path) -> Iterator[Path]:
    """run.json of runs that may tell how long these take: of the batch itself, of batches beside it, of single runs."""
    places = [(root.parent, "*/*/run.json")]
    with contextlib.suppress(RecipeError):
        runs = params.home() / "runs"
        places += [(runs / "batches", "*/*/run.json")]
        places += [(runs / recipe.replace("/", "-"), "*/run.json") for recipe in {i.recipe for i in batch.items}]
    seen: set[Path] = set()
    for place, pattern in places:
        for path in place.glob(pattern):
            if (whole := path.resolve()) not in seen:
                seen.add(whole)
                yield path


def _workers(batch: Batch, items: Sequence[Item], asked: int | None) -> tuple[int, str]:
    """Return how many run at a time, and a sentence where that is worth one. Raises RecipeError for what cannot be."""
    local = [item for item in items if not item.on_ray]
    on_npus = [i for i in local if i.plan.composed.recipe.hardware != "cpu"]
    if on_npus and asked and asked > 1:
        raise RecipeError(
            f"workers={asked}: {on_npus[0].name} takes the NPUs of this machine, and so would the next. Leave workers "
            "unset, or let a Ray cluster place them (export RAY_ADDRESS; launch: ray)."
        )
    cores = os.cpu_count() or 1
    memory = max(1, psutil.virtual_memory().available // MEMORY)
    if asked is None:
        fits = 1 if on_npus else max(1, min(cores // 2, memory)) if local else ON_A_CLUSTER
        return min(fits, max(1, len(items))), ""
    if local and min(asked, len(items)) > memory:
        return asked, (
            f"warning: {asked} runs at a time, and memory for {memory} ({MEMORY / 1e9:g} GB each is what the "
            "quickstart takes)"
        )
    return asked, ""


def _prepare(items: Sequence[Item], event: Callable[[str], None]) -> None:
    """Make models and data once, before runs that would all make the same at the same time."""
    made = set()
    for item in items:
        composed, command = item.plan.composed, item.plan.command
        words = tuple(composed.recipe.prepare)
        if words and words not in made and files.present(subject(composed, command.python)):
            made.add(words)
            event(f"makes model and data of {item.recipe}, where they are not there yet")
            notebook.prepare(composed, python=command.python)


@contextlib.contextmanager
def _locked(root: Path, event: Callable[[str], None]) -> Iterator[int]:
    """Hold the lock of a batch directory. The papermills it starts hold it too, until the last of them is gone."""
    limit, said = time.monotonic() + LAST_WORDS, False
    with (root / ".lock").open("a+", encoding="utf-8") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "another process"
                if time.monotonic() > limit or _is_alive(holder):
                    raise RecipeError(f"{root} is taken: a batch runs in it ({holder}).") from None
            if not said:
                said = True
                event("waits for what an earlier batch has left to end")
            time.sleep(LOOK)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {here()['host']}\n")
        file.flush()
        yield file.fileno()


def _is_alive(holder: str) -> bool:
    """Say whether the process a lock names is there and on this machine."""
    words = holder.split()
    return len(words) == 4 and words[3] == here()["host"] and words[1].isdecimal() and psutil.pid_exists(int(words[1]))


@contextlib.contextmanager
def _signals(loop: Loop) -> Iterator[None]:
    """Turn SIGINT and SIGTERM into a request to the loop; a second one changes nothing."""

    def ask(number: int, _: Any) -> None:
        loop.asked = loop.asked or ("interrupted" if number == signal.SIGINT else "asked to end")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
