"""The notebooks' face: each cell calls one function here, and none holds logic of its own.

A cell shows what it did as HTML in JupyterLab and as plain text where there is no browser.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import shlex
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes import (
    bars,
    compare_view,
    curves,
    diagnosis,
    exports,
    lights,
    live,
    masking,
    memory,
    metrics,
    page,
    params,
    preflight,
    report,
    verdict,
)
from recipes import baseline as baselines
from recipes import compare as comparing
from recipes import rollouts as dumps
from recipes.atomic import replace_file
from recipes.command import Command, build, external_modules, training_python
from recipes.errors import RecipeError, nearest
from recipes.finding import Finding
from recipes.params import SHORT_NAMES, Composed
from recipes.preflight import files
from recipes.rehearsal import Rehearsal, fold
from recipes.run import launch as runs
from recipes.run import resume
from recipes.run.directory import ENDED, Run, default_path, open_run, read_state, write_json
from recipes.run.resume import Resumption

# What a notebook's parameters cell may hold besides params.SHORT_NAMES.
OWN_PARAMETERS = ("recipe", "target", "overrides", "run_dir", "waive", "on_disconnect", "deadline_minutes")
PARAMETERS = (*OWN_PARAMETERS, *SHORT_NAMES)
COMPARED = ("sources", "by", "tolerance", "step", "html")  # of 90_compare_runs.ipynb

# Drawing may take this share of the time it is drawn in: the training needs the processor more than the picture does.
DRAWING_SHARE = 0.03


class RunEnded(RecipeError):
    """A run that did not finish. In a notebook it shows as its sentence; papermill exits with a code other than 0."""


@dataclass(frozen=True)
class Plan:
    """What will run: the composed recipe and its command, before anything is started."""

    composed: Composed
    command: Command
    waive: tuple[str, ...] = ()
    on_disconnect: str | None = None
    deadline_seconds: float | None = None
    rehearsal: Rehearsal | None = None
    resumption: Resumption | None = None
    placed: bool = False  # a run_dir was asked for

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": _plan_html(self), "text/plain": _plan_text(self)}


def resolve(namespace: Mapping[str, Any]) -> Plan:
    """Compose the recipe that the parameters in a notebook's `globals()` name, and its command.

    With target="cpu" the plan is a rehearsal of the recipe: its tiny stand-in, on this processor. With a run_dir that
    holds a run which has ended, and checkpoint.resume=auto, the plan is that run's next attempt.
    Raises RecipeError for a parameter nobody knows, a value of the wrong type, or a key verl does not have.
    """
    refuse_unknown(namespace)
    given = {name: namespace.get(name) for name in PARAMETERS}
    params.refuse_secrets(params.Setting(key, given[key], f"parameter {key}") for key in OWN_PARAMETERS)
    name = given["recipe"]
    if not isinstance(name, str) or not name:
        raise RecipeError(f"recipe={name!r} must be the name of a recipe, such as quickstart/grpo.")
    overrides = given["overrides"] or []
    if isinstance(overrides, str):  # `papermill -p` can give no list
        overrides = shlex.split(overrides)
    if not isinstance(overrides, list) or not all(isinstance(text, str) for text in overrides):
        raise RecipeError(f"overrides={overrides!r} must be a list of texts such as 'optimizer.lr=1e-6'.")
    short = {key: given[key] for key in SHORT_NAMES}
    run_dir = Path(given["run_dir"] or default_path(params.home() / "runs", name)).absolute()
    composed = params.compose(name, overrides, short, run_dir=str(run_dir))
    verdict.thresholds(composed.recipe.supervision.thresholds, "supervision.thresholds")
    target, rehearsal = given["target"] or "npu", None
    if target not in ("npu", "cpu"):
        raise RecipeError(f"target={target!r} must be npu (the recipe itself) or cpu (a rehearsal on this machine).")
    if target == "cpu" and composed.recipe.hardware != "cpu":
        rehearsal = fold(composed, export=composed.recipe.checkpoint.strict is not None, run_dir=str(run_dir))
        composed = rehearsal.composed
    minutes = given["deadline_minutes"]
    if minutes is not None and (isinstance(minutes, bool) or not isinstance(minutes, (int, float)) or minutes <= 0):
        raise RecipeError(f"deadline_minutes={minutes!r} must be a number above 0.")
    resumption = None
    if composed.recipe.checkpoint.resume == "auto" and given["run_dir"] and Run(run_dir).state_file.is_file():
        resumption = _resumption(Run(run_dir), composed, overrides, short)
    return Plan(
        resumption.composed if resumption else composed,
        resumption.command if resumption else build(composed),
        waive=tuple(params.comma_separated(given["waive"] or "")),
        on_disconnect=given["on_disconnect"],
        deadline_seconds=None if minutes is None else 60.0 * minutes,
        rehearsal=rehearsal,
        resumption=resumption,
        placed=bool(given["run_dir"]),
    )


def _resumption(run: Run, composed: Composed, overrides: list[str], short: Mapping[str, Any]) -> Resumption | None:
    """The next attempt of a run that has ended. None while it runs: launch() attaches to it then."""
    state = read_state(run)
    if state["state"] not in ENDED:
        return None
    if state["recipe"] != composed.name:
        raise RecipeError(
            f"run_dir={str(run.path)!r} holds a run of {state['recipe']}, not of {composed.name}: choose another one."
        )
    given = {SHORT_NAMES[key]: value for key, value in short.items() if value is not None}
    changed = [text for text in overrides if not text.startswith("checkpoint.resume")]
    return resume.plan(run, changed, given)


def prepare(composed: Composed, *, python: str | None = None) -> None:
    """Make the recipe's model and data on this machine with the training interpreter, if the recipe says how.

    Raises RecipeError with the last words of what failed.
    """
    words = composed.recipe.prepare
    if not words:
        return
    python = python or training_python()
    done = subprocess.run([python, "-m", *words], stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RecipeError(f"`{shlex.join(['python', '-m', *words])}` failed with exit code {done.returncode}: {last}")


def check(plan: Plan) -> Findings:
    """Make what the recipe makes itself, then look for what would break the run. Raises RecipeError on errors.

    Where the recipe's devices are not, this machine's files and packages are left out: nothing can be launched here.
    """
    here = files.present(preflight.subject(plan.composed, plan.command.python))
    if here:
        prepare(plan.composed, python=plan.command.python)
    found = preflight.check(plan.composed, python=plan.command.python, here=here)
    preflight.refuse(found, plan.waive)
    npu = plan.composed.recipe.hardware != "cpu"
    bars_of = memory.estimate(preflight.subject(plan.composed)) if npu else None
    return Findings(tuple(found), plan.waive, bars_of, len(preflight.looking(here=here)))


@dataclass(frozen=True)
class Findings:
    """What preflight found, as a table, and what a device will have to hold, as bars, where devices are meant."""

    found: tuple[Finding, ...]
    waived: tuple[str, ...] = ()
    memory: memory.Memory | None = None
    looked: int = 0

    @property
    def summary(self) -> str:
        return f"{self.looked} rules looked, {len(self.found)} found something."

    def _word(self, finding: Finding) -> str:
        return "waived" if finding.severity == "error" and finding.rule in self.waived else finding.severity

    def text(self) -> str:
        lines = [self.summary, *(f"{self._word(f):8} {f.rule}: {f}" for f in self.found)]
        if self.memory is not None:
            lines.append(bars.describe(self.memory).replace("; ", "\n"))
        return "\n".join(lines)

    def html(self) -> str:
        rows = [(self._word(f), f.rule, str(f), f.noticed) for f in self.found]
        shown = page.table(("", "rule", "finding", "would have shown at"), rows) if rows else ""
        return page.block(page.paragraph(self.summary), shown, bars_html(self.memory) if self.memory else "")

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.html(), "text/plain": self.text()}


def bars_html(needed: memory.Memory) -> str:
    """Return both bars of a device's memory as a picture in a light and a dark form."""
    title = "memory of the fullest device, computed"
    images = [bars.encoded(needed, "png", theme=theme, title=title, dpi=100) for theme in ("light", "dark")]
    return page.picture(*images, bars.describe(needed))


def launch(plan: Plan) -> Run:
    """Start the training and return its run. The training is a child of a supervisor, not of this kernel.

    Where the very same command is running already, of an earlier kernel or papermill, nothing is started: the run is
    that one. Where a run_dir was asked for, only the run in that directory is looked at.
    Raises RecipeError where the recipe's devices are not.
    """
    if not files.present(preflight.subject(plan.composed, plan.command.python)):
        recipe = plan.composed.recipe
        raise RecipeError(
            f"This machine has no NPU, so {recipe.recipe} cannot be launched here; everything above holds. Open this "
            f"notebook on a node of {recipe.hardware}, or carry the script of `recipes export {recipe.recipe}` there."
        )
    if (running := _running(plan)) is not None:
        print(f"run directory: {running.path}\nIt is running already; nothing was started, this notebook watches it.")
        return running
    watched: dict[str, Any] = {
        "on_disconnect": plan.on_disconnect,
        "deadline_seconds": plan.deadline_seconds,
        "waived": plan.waive,
    }
    if plan.resumption:
        run = resume.resume(plan.resumption, **watched)
    else:
        run = runs.start(plan.composed, plan.command, **watched)
    if plan.rehearsal:
        write_json(run.path / "rehearsal.json", plan.rehearsal.to_dict())
    print(f"run directory: {run.path}")
    return run


def _running(plan: Plan) -> Run | None:
    """The run of the plan's command that is going on: in its directory, or beside it where none was asked for."""
    own = Path(plan.composed.recipe.run_dir)
    for path in (own, *(() if plan.placed else sorted(own.parent.glob("*/"), reverse=True))):
        run = Run(path)
        if not run.state_file.is_file() or not run.command_file.is_file() or read_state(run)["state"] != "running":
            continue
        told = json.loads(run.command_file.read_text(encoding="utf-8"))
        then = [text.replace(str(path), str(own)) for text in told["argv"]]
        if then == list(plan.command.argv):
            return run
    return None


def watch(run: Run | str | Path) -> None:
    """Show the curves, the progress and the tail of the log of a run, in place, until it has ended.

    Interrupting the cell ends the run and everything it started; so does a kernel that is restarted or shut down,
    unless on_disconnect is continue. Raises RunEnded when the run did not finish.
    """
    run = open_run(run) if not isinstance(run, Run) else run
    board = _Board(run)
    try:
        for moment in live.follow(run):
            board.show(moment)
    except KeyboardInterrupt:
        if read_state(run).get("on_disconnect") == "continue" and _kernel_ends():
            raise RunEnded("The kernel ends and the run goes on: on_disconnect is continue.") from None
        state = runs.stop(run)
        board.show(live.look(run))
        print(try_to_record(run), end="")
        raise RunEnded(f"Interrupted: the run was {state['state']} and all its processes have ended.") from None
    print(try_to_record(run), end="")
    state = read_state(run)
    if state["state"] != "finished":
        known = diagnosis.why(run)
        known = f" Its log says why: {known}" if known else ""
        raise RunEnded(f"The run {state['state']}: {state['cause']}.{known} Its log: {run.log()}")


class _Board:
    """What a cell shows of a run, in place. Curves and lights are drawn anew no oftener than their cost allows."""

    def __init__(self, run: Run) -> None:
        self._told, self._sheet, self._handle = _told(run), curves.Sheet(), None
        self._images: tuple[bytes, bytes, str] | None = None
        self._health: list[lights.Light] | None = None
        self._drawn, self._cost, self._trouble = 0.0, 0.0, ""

    def show(self, moment: live.Moment) -> None:
        from IPython.display import display

        if moment.ended or time.monotonic() - self._drawn > max(2.0, self._cost / DRAWING_SHARE):
            self._draw(moment)
        bundle = {
            "text/html": _moment_html(moment, self._images, self._health),
            "text/plain": _moment_text(moment, self._health),
        }
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def _draw(self, moment: live.Moment) -> None:
        """Draw; a picture must not end a training, so that what cannot be drawn is said once and left as it was."""
        self._drawn, busy = time.monotonic(), time.thread_time()
        try:
            pages = self._sheet.begin(moment.metrics, title=moment.state["recipe"], total_steps=moment.steps)
            self._health = lights.lights(moment.metrics, self._told, limits_of(moment.state))
            words = curves.describe(moment.metrics)
            self._images = (*pages(), words)
        except Exception as fault:  # noqa: BLE001
            if str(fault) != self._trouble:
                self._trouble = str(fault)
                print(f"The curves could not be drawn ({type(fault).__name__}: {fault}); the run goes on.")
        # Not the clock: a training that takes every core would hide itself. The first also loads matplotlib.
        self._cost = time.thread_time() - busy if self._handle else 0.0


def _kernel_ends(seconds: float = 2.0) -> bool:
    """Say whether the interruption came of the kernel being restarted or shut down.

    Jupyter interrupts a kernel first and asks it to end right after; nothing else tells the two from the stop button.
    """
    from IPython import get_ipython

    kernel, limit = getattr(get_ipython(), "kernel", None), time.monotonic() + seconds
    while kernel is not None and time.monotonic() < limit:
        if getattr(kernel, "_shutdown_message", None) is not None:
            return True
        time.sleep(0.05)
    return False


def judge(
    run: Run | str | Path,
    *,
    thresholds: Iterable[str] = (),
    baseline: str | Path | None = None,
    deterministic: bool = False,
) -> Judged:
    """Judge a run, write verdict.json, and show the judgements. A file of metrics or a log is judged without a run.

    `thresholds` are texts such as `grad_factor=20`, on top of the recipe's supervision.thresholds; `baseline` is a
    file, in place of the one that fits the run; `deterministic` asks for trainer and rollout that agree but for
    rounding, as a recipe with full_determinism does.
    Raises RecipeError for an unknown threshold, a baseline that cannot be read, or a path that holds no metrics.
    """
    limits = verdict.thresholds(thresholds)
    given = baselines.read(baseline) if baseline else None
    if not isinstance(run, Run) and not (Path(run) / "run.json").is_file():
        try:
            found = metrics.read(run)
        except RecipeError as fault:
            if bad := diagnosis.failed(run):
                raise RecipeError(f"{fault} Its text shows why: {bad.sentence}") from fault
            raise
        told = verdict.Told(deterministic=deterministic)
        why = "a file does not tell which recipe it is of; --baseline names one to compare with"
        judged, _ = verdict_of_file(Path(run), found, limits=limits, told=told, baseline=given, unmatched=why)
        return Judged(judged, bare=True)
    run = open_run(run) if not isinstance(run, Run) else run
    limits = limits_of(read_state(run), thresholds)
    found, exported = verdict_of(run, limits=limits, baseline=given, deterministic=deterministic)
    if exported and (exported.checks or exported.trouble):
        write_json(run.path / exports.CHECKS, exported.to_dict())
    before, now = report.verdict_kept(run), json.loads(json.dumps(found.to_dict()))
    write_json(run.verdict_file, now)
    if now != before and (run.path / report.FILE).is_file():  # it must not say another verdict than this one
        report.write([run.path], run.path / report.FILE, light=True)
    return Judged(found)


def verdict_of_file(
    path: Path, found: metrics.Metrics, **about: Any
) -> tuple[verdict.Verdict, diagnosis.Diagnosis | None]:
    """Judge a bare file whose metrics are `found`; of a console log, also say why its training failed, if it did.

    `about` is what verdict.judge takes besides: limits, told, baseline, unmatched.
    """
    bad = diagnosis.failed(path) if found.format == metrics.ConsoleLog.format else None
    ended = bad.sentence if bad else ""
    return verdict.judge(found, None, logged=verdict.logged(path), ended=ended, **about), bad


def limits_of(state: Mapping[str, Any], more: Iterable[str] = ()) -> verdict.Thresholds:
    """Return the limits a run is judged by: the verdict's own, its recipe's (as run.json has them), then `more`."""
    return verdict.thresholds((*state.get("thresholds", ()), *more))


def verdict_of(
    run: Run,
    *,
    limits: verdict.Thresholds | None = None,
    baseline: baselines.Baseline | None = None,
    deterministic: bool = False,
) -> tuple[verdict.Verdict, exports.Exported | None]:
    """Judge a run as `judge` does, and write nothing. Exports are compared once it has ended."""
    moment = live.look(run)
    exported = exports.of_run(run) if moment.ended else None
    told, why = _told(run), ""
    if baseline is not None:
        why = baselines.foreign(baseline, run.path, moment.state)
    else:
        baseline, why = baselines.of_run(run.path, moment.state)
    found = verdict.judge(
        moment.metrics,
        moment.state,
        exported,
        limits=limits or limits_of(moment.state),
        told=dataclasses.replace(told, deterministic=told.deterministic or deterministic),
        logged=[line for number in run.attempts for line in verdict.logged(run.log(number))],
        baseline=baseline,
        unmatched=why,
    )
    return found, exported


@dataclass(frozen=True)
class Judged:
    """A verdict as a table. `bare`: of a file of metrics or a log, which cannot tell how its run ended."""

    verdict: verdict.Verdict
    bare: bool = False

    @property
    def summary(self) -> str:
        return self.verdict.summary(bare=self.bare)

    def text(self) -> str:
        return "\n".join([self.summary, *map(str, self.verdict.judgements)])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        head = ("", "rule", "", "first step", "threshold from")
        rows = [
            (j.outcome, j.rule, j.sentence, "" if j.step is None else j.step, j.source) for j in self.verdict.judgements
        ]
        told = [row for row in rows if row[0] in ("fail", "warn")]
        rest = [row for row in rows if row not in told]
        html = page.block(
            page.paragraph(self.summary),
            page.table(head, told) if told else "",
            page.folded("what passed, and what is only said", page.table(head, rest))
            if told
            else page.table(head, rest),
        )
        return {"text/html": html, "text/plain": self.text()}


def diagnose(run: Run | str | Path) -> Diagnosed:
    """Say why a run failed, from the log of its last attempt; a log file may be given as well."""
    return Diagnosed(diagnosis.diagnose(run))


@dataclass(frozen=True)
class Diagnosed:
    """A diagnosis: its sentence, the lines of the log, the remedy; what follows from it and what is noise, folded."""

    found: diagnosis.Diagnosis

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        (_, sentence), *rows = self.found.rows()
        quoted = [words.removeprefix("| ") for _, words in rows if words.startswith("| ")]
        aside = [(head, words) for head, words in rows if head in ("then", "ignore")]
        rest = [row for row in rows if row not in aside and not row[1].startswith("| ")]
        html = page.block(
            page.paragraph(sentence),
            page.verbatim("\n".join(quoted)) if quoted else "",
            page.table(("", ""), rest),
            page.folded("what follows from it, and what is noise", page.table(("", ""), aside)) if aside else "",
        )
        return {"text/html": html, "text/plain": self.found.text()}


def record(run: Run | str | Path) -> Recorded:
    """Write the curves of a run as PNG, SVG and CSV, and its report, and say what its directory holds."""
    run = open_run(run) if not isinstance(run, Run) else run
    moment = live.look(run)
    curves.save(moment.metrics, run.curves, title=moment.state["recipe"], total_steps=moment.steps)
    report.write([run.path], run.path / report.FILE, light=True)
    return Recorded(run)


def try_to_record(run: Run) -> str:
    """Record a run that has just ended. What hinders it, a full disk say, must not hide how the run ended: a line."""
    try:
        record(run)
    except (OSError, ValueError) as fault:
        return f"Curves and report could not be written: {fault}\n"
    return ""


def compare(namespace: Mapping[str, Any]) -> compare_view.Compared:
    """Lay the runs and logs over each other that the parameters in a notebook's `globals()` name.

    A source is a path, or LABEL=PATH; None takes the two newest runs. Raises RecipeError for a parameter nobody knows,
    fewer than two sources, one that cannot be read, or an axis (step, tokens, time) it has no numbers for.
    """
    refuse_unknown(namespace, COMPARED)
    sources = namespace.get("sources")
    if isinstance(sources, str):  # `papermill -p` can give no list
        sources = shlex.split(sources)
    if not sources:
        sources = _newest(2)
    by, tolerance = namespace.get("by") or "step", namespace.get("tolerance")
    if tolerance is not None and (isinstance(tolerance, bool) or not isinstance(tolerance, int | float)):
        raise RecipeError(f"tolerance={tolerance!r} must be a number.")
    return compare_view.Compared(comparing.compare(sources, by=by, tolerance=tolerance))


def _newest(count: int) -> list[Path]:
    """The newest runs under runs/ that have made a step, the oldest of them first."""
    root = params.home() / "runs"
    files = sorted(root.glob("**/attempts/*/metrics.jsonl"), key=lambda file: file.stat().st_mtime)
    runs = list(dict.fromkeys(file.parents[2] for file in reversed(files) if file.stat().st_size))[:count]
    if len(runs) < count:
        raise RecipeError(
            f"sources=None takes the {count} newest runs of {root}, and there are {len(runs)}: name some."
        )
    return runs[::-1]


def rollouts(
    run: Run | str | Path, step: int | None = None, *, worst: int = 2, best: int = 2, flagged: int = 2
) -> dumps.Shown:
    """Show what the model wrote: a line a step, and the worst, best and flagged responses of `step`, or of the last.

    Raises RecipeError for a run that keeps no rollouts (trainer.rollout_dump).
    """
    return dumps.show(run.path if isinstance(run, Run) else run, step=step, worst=worst, best=best, flagged=flagged)


def write_report(compared: compare_view.Compared, path: str | Path | None) -> Path | None:
    """Write a comparison as one HTML file that needs no network, and return its path; nothing where `path` is None."""
    return None if path is None else replace_file(path, report.of_comparison(compared.found).encode())


@dataclass(frozen=True)
class Recorded:
    """The files of a run, each with what it is."""

    run: Run

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        rows = [(name, words) for name, words in _FILES.items() if (self.run.path / name).exists()]
        text = "\n".join([str(self.run.path), *(f"  {name:28} {words}" for name, words in rows)])
        html = page.block(page.paragraph(str(self.run.path)), page.table(("file", ""), rows))
        return {"text/html": html, "text/plain": text}


_FILES = {
    "run.json": "what happened: state, cause, attempts",
    "command.json": "the exact argv and environment",
    "recipe.yaml": "the resolved recipe",
    "verl.yaml": "verl's whole configuration as composed",
    "attempts/1/train.log": "everything the training printed",
    "attempts/1/metrics.jsonl": "every metric of every step",
    "attempts/1/tensorboard": "the same for TensorBoard",
    "curves/curves.png": "the curves (curves-dark.png, curves.svg, curves.csv beside it)",
    "verdict.json": "the verdict",
    "report.html": "all of it on one page, to send to somebody",
    "rehearsal.json": "what a rehearsal did with each setting of the recipe it rehearsed",
    "exports.json": "what was exported, compared with the model tensor by tensor",
    "provenance.json": "environment, packages, commits, hardware, model and data it ran with",
    "provenance": "what was changed in the working trees it ran from",
    "replay.json": "the run this one repeats, and what was different",
    "notebook.ipynb": "this notebook as it ran",
}


# ------------------------------------------------------------------------------------------------------- the pieces


def refuse_unknown(namespace: Mapping[str, Any], known: Sequence[str] = PARAMETERS) -> None:
    """Raise RecipeError for an injected parameter that is not `known`, or is a secret.

    Papermill injects a parameter nobody knows with no more than a warning: find its cell and refuse the name.

    A secret among them is in papermill's output by now, which is not ours: all that can be done is to say so.
    """
    for source in namespace.get("In", []):
        if source.startswith("# Parameters\n"):
            body = ast.parse(source).body
            names = [t.id for node in body if isinstance(node, ast.Assign) for t in node.targets if hasattr(t, "id")]
            for name in names:
                if why := masking.reason(name, namespace.get(name)):
                    raise RecipeError(
                        f"{why}, and papermill has written it into the notebook it makes: delete that. Export it as a "
                        "variable before the launch, for the training to inherit. Nothing was started."
                    )
                if name not in known:
                    raise RecipeError(f"Unknown parameter {name!r}{nearest(name, known)} Nothing was started.")


def _summary(plan: Plan) -> list[tuple[str, str]]:
    r, subject = plan.composed.recipe, preflight.subject(plan.composed, plan.command.python)
    p, b = r.parallel, r.batch
    updates = -(-b.train // b.mini) if b.train else 0
    said = f"{r.recipe}: {r.title}"
    if plan.rehearsal:
        said = f"NOT {plan.rehearsal.of} but its rehearsal: {r.recipe}, a tiny random model, no accelerator"
    return [
        ("recipe", said),
        ("target", f"{r.nodes} x {subject.devices_per_node} {subject.hardware.device} ({r.hardware}), stack {r.stack}"),
        (
            "layout",
            f"tensor {p.tensor}, pipeline {p.pipeline}, context {p.context}, expert {p.expert},"
            f" data {subject.data_parallel}",
        ),
        (
            "step",
            f"{b.train} prompts x {r.rollout.n} responses = {b.train * r.rollout.n} sequences, {updates} updates;"
            f" at most {r.data.max_prompt_length} + {r.data.max_response_length} tokens",
        ),
        ("checkpoint.strict", "verl's default (true)" if r.checkpoint.strict is None else str(r.checkpoint.strict)),
        ("external modules", ", ".join(external_modules(plan.composed, os.environ)) or "none"),
        ("verl", f"{plan.command.verl}, {plan.command.entry}"),
        ("interpreter", plan.command.python),
        ("run directory", r.run_dir),
        *([("attempt", "\n".join(plan.resumption.lines()))] if plan.resumption else []),
    ]


def _changes(plan: Plan) -> list[tuple[str, Any, str]]:
    return [(s.key, s.value, s.origin) for s in params.difference(plan.composed)]


def _argv_text(command: Command) -> str:
    exports = [f"{name}={shlex.quote(text)}" for name, text in command.environment.items()]
    return " \\\n  ".join([*exports, shlex.join(command.argv[:4]), *map(shlex.quote, command.overrides)])


def _plan_html(plan: Plan) -> str:
    account = page.verbatim("\n".join(plan.rehearsal.lines())) if plan.rehearsal else ""
    return page.block(
        page.table(("", ""), _summary(plan)),
        page.folded("what the rehearsal does with each setting", account) if account else "",
        page.paragraph("What differs from its base:"),
        page.table(("key", "value", "from"), _changes(plan)),
        page.folded("the exact command", page.verbatim(_argv_text(plan.command))),
    )


def _plan_text(plan: Plan) -> str:
    lines = [f"{name:18} {words}" for name, words in _summary(plan)]
    changes = [f"  {key} = {value!r}  ({origin})" for key, value, origin in _changes(plan)]
    return "\n".join([*lines, "differs from its base:", *changes])


def status(moment: live.Moment) -> str:
    """Return one line on a run: state, step, time so far, time left, cause."""
    words = moment.state["state"]
    if moment.step or moment.steps:
        words += f" · step {moment.step}" + (f" of {moment.steps}" if moment.steps else "")
    words += f" · {live.duration(moment.elapsed)}"
    if moment.left is not None:
        words += f" · about {live.duration(moment.left)} left"
    elif not moment.ended and not moment.step:
        words += " · starting"
    if moment.state.get("cause"):
        words += f" · {moment.state['cause']}"
    return words


def _told(run: Run) -> verdict.Told:
    """What a run's own configuration says of the metrics that must be there; nothing, where it has none yet."""
    return verdict.told(run.path / "verl.yaml") if (run.path / "verl.yaml").is_file() else verdict.Told()


def pace(moment: live.Moment) -> str:
    """Return one line on speed and memory, empty before the first step."""
    return " · ".join(f"{name} {words}" for name, words in live.pace(moment.metrics))


def _moment_html(
    moment: live.Moment, images: tuple[bytes, bytes, str] | None, health: list[lights.Light] | None = None
) -> str:
    share = moment.step / moment.steps if moment.steps else 0.0
    return page.block(
        page.paragraph(status(moment)),
        page.progress(share),
        lights.row(health) if health else "",
        page.paragraph(pace(moment)) if moment.step else "",
        page.picture(*images) if images else "",
        page.folded("log", page.verbatim("\n".join(moment.tail)))
        if moment.ended
        else page.verbatim("\n".join(moment.tail)),
    )


def _moment_text(moment: live.Moment, health: list[lights.Light] | None = None) -> str:
    bad = [str(light) for light in health or () if light.outcome in ("fail", "warn")]
    return "\n".join([status(moment), *filter(None, [pace(moment), "; ".join(bad)]), *moment.tail[-3:]])
